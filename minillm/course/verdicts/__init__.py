"""The rules that judge the ledger's claims: a file for each letter, `words.py` for what they answer, and `reading.py`
for how they read.

A rule is a function from the rows of an experiment to a verdict. Its first lines state it, with its thresholds as
numbers in the code. Nothing but rows goes in, so that a contrary measurement gives a contrary verdict.
"""

from minillm.course.verdicts import articles, batching, example, formats, limits, memory, service, speculation
from minillm.course.verdicts.reading import Rows
from minillm.course.verdicts.words import (
    HOLDS,
    IN_DIRECTION,
    INCONCLUSIVE,
    NOT_HERE,
    NOT_MEASURED,
    OTHER_REASON,
    TOO_SMALL,
    Claim,
    Missing,
    Part,
    TooSmall,
    Verdict,
    word,
)

__all__ = [
    "CLAIMS", "HOLDS", "INCONCLUSIVE", "IN_DIRECTION", "NOT_HERE", "NOT_MEASURED", "OTHER_REASON", "TOO_SMALL",
    "Claim", "Missing", "Part", "Rows", "TooSmall", "Verdict", "word",
]

CLAIMS = (*limits.CLAIMS, *batching.CLAIMS, *memory.CLAIMS, *formats.CLAIMS, *speculation.CLAIMS, *service.CLAIMS,
          *example.CLAIMS, *articles.CLAIMS)
