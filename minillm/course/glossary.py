"""The terms of notebooks/GLOSSARY.md, linked where a page first uses them."""

from __future__ import annotations

import re
from collections.abc import Sequence

# What holds no prose: code, formulas, links, headings, rows of a table, HTML, addresses.
SKIPPED = r"```.*?```|`[^`\n]*`|\$\$.*?\$\$|\$[^$\n]+\$|!?\[[^\]]*\]\([^)]*\)|^ *[#|][^\n]*$|<[^>\n]+>|https?://\S+"

EVERYDAY = ("round", "scale")  # in most texts these are not the term, so they are not linked


def terms(glossary: str) -> dict[str, str]:
    """Each spelling that the glossary explains, and the row that explains it.

    The row "grouped-query attention (GQA)" explains two spellings, "percentile: p50, p99" three.
    """
    rows = re.findall(r"^\| (?!term \|)([^|]+?) \| .+ \|$", glossary, flags=re.MULTILINE)
    return {spelling: row for row in rows for spelling in re.split(r"[,:()]\s*|\s+(?=\()", row) if spelling}


def link_first_uses(texts: Sequence[str], glossary: str, address: str) -> list[str]:
    """A page's Markdown cells with a link to `address` at the first use of each row of the glossary.

    Code, headings and existing links stay as they are. A spelling is found with another first letter too (small or
    capital), in the plural, and over the end of a line.
    """
    rows = {spelling: row for spelling, row in terms(glossary).items() if spelling not in EVERYDAY}
    linked: set[str] = set()

    def link(match: re.Match) -> str:
        words = " ".join((match["term"] or "").split())
        spelling = known.get(words.lower())
        if not spelling or rows[spelling] in linked or words[1:] != spelling[1:]:
            return match[0]
        linked.add(rows[spelling])
        return f"[{match[0]}]({address})"

    known = {spelling.lower(): spelling for spelling in rows}
    either = "|".join(re.escape(each).replace(r"\ ", r"\s+") for each in sorted(rows, key=len, reverse=True))
    pattern = re.compile(rf"{SKIPPED}|(?<![\w-])(?i:(?P<term>{either}))(?:s|es)?(?![\w-])", re.DOTALL | re.MULTILINE)
    return [pattern.sub(link, text) for text in texts]
