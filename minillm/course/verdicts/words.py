"""The words of the ledger. A claim has up to three parts: its direction, its size, its cause. Each is judged by itself,
and the verdict's word follows from them by `word` alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

HOLDS, IN_DIRECTION, OTHER_REASON = "holds", "holds in direction", "holds, for another reason"
NOT_HERE, INCONCLUSIVE = "does not hold here", "inconclusive"
TOO_SMALL, NOT_MEASURED = "too small to tell", "not measured"


class Part(StrEnum):
    """How one part of a claim was found."""

    AS_CLAIMED = "as claimed"
    ANOTHER = "another"
    UNCLEAR = "inside the noise"
    NOT_TESTED = "not tested"
    NONE = "none claimed"


def word(direction: Part, size: Part = Part.NONE, cause: Part = Part.NONE) -> str:
    """The verdict that follows from the three parts. A part that is claimed and not tested does not count as found."""
    if direction is Part.UNCLEAR:
        return INCONCLUSIVE
    if direction is not Part.AS_CLAIMED:
        return NOT_HERE
    if size not in (Part.AS_CLAIMED, Part.NONE):
        return IN_DIRECTION
    if cause is Part.ANOTHER:
        return OTHER_REASON
    return HOLDS if cause in (Part.AS_CLAIMED, Part.NONE) else IN_DIRECTION


def true(found: bool) -> Part:
    """The part of a count, or of a comparison that has no noise."""
    return Part.AS_CLAIMED if found else Part.ANOTHER


def every(*parts: Part) -> Part:
    """A part that has several: another if one is, unclear if one is."""
    for worst in (Part.ANOTHER, Part.UNCLEAR, Part.NOT_TESTED):
        if worst in parts:
            return worst
    return Part.AS_CLAIMED


class Missing(ValueError):
    """The rows do not tell; the message says what is missing."""


class TooSmall(ValueError):
    """At this size the claim cannot show; the message says what was seen, and the size that would tell."""


@dataclass(frozen=True)
class Verdict:
    """`measured` gives the figures that decided, with their spreads."""

    word: str
    measured: str
    direction: Part = Part.NOT_TESTED
    size: Part = Part.NOT_TESTED
    cause: Part = Part.NOT_TESTED


@dataclass(frozen=True)
class Claim:
    """figure: what the articles name, for an 8B model in fp16 on an A100 80 GB.

    experiments: the names of those that settle it, each by its own file. judge: the rule, from rows to a verdict.
    labels: the columns that name the compared set-ups; a file has one of them. None are named where nothing is
    compared, as in a count or a sum. pair: the two labels whose exchange turns the comparison round; without them,
    the least and the greatest.
    """

    id: str
    sentence: str
    figure: str
    experiments: tuple[str, ...]
    judge: Callable[[Sequence[dict]], Verdict]
    labels: tuple[str, ...] = ()
    pair: tuple = ()
