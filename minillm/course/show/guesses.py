"""Guesses: kept when they are made, and set beside what was measured.

    guess("steps of a static batch", 54)      before the measurement; None is a guess that nobody made
    reveal("steps of a static batch", 60)     after it: prints both, and the factor between them
    guesses()                                 at the end of the page: all of them

What was not guessed stays silent. A page's guesses are those of its kernel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from minillm.course.show.tables import text_table
from minillm.guard.inputs import as_number


@dataclass
class Guess:
    """One prediction. measured: None until it was revealed."""

    about: str
    value: float
    measured: float | None = None

    @property
    def factor(self) -> float | None:
        """How many times the guess was measured; None where no factor says it, with a zero or another sign."""
        known = self.measured is not None and self.value * self.measured > 0
        return self.measured / self.value if known else None

    def __str__(self) -> str:
        between = "" if self.factor is None else f", {in_words(self.factor)}"
        return f"{self.about}: your guess {self.value:,g}, measured {self.measured:,.4g}{between}"


made: dict[str, Guess] = {}  # by what they are about, in their order


def guess(about: str, value: float | None) -> None:
    """Keep a guess; a later one about the same thing replaces it. ValueError for what is not a finite number."""
    made.pop(about, None)
    if value is None:
        return
    number = as_number(value)
    if number is None or not math.isfinite(number):
        raise ValueError(f"a guess is a number, or None for no guess: {about!r} got {value!r}")
    made[about] = Guess(about, number)


def reveal(about: str, measured: float) -> None:
    """Print the guess beside the measurement; nothing if nobody guessed."""
    if about in made:
        made[about].measured = float(measured)
        print(made[about])


def guesses() -> None:
    """Print all guesses that were revealed, the nearest first."""
    known = sorted((g for g in made.values() if g.measured is not None), key=distance)
    if known:
        rows = [{"about": g.about, "guess": g.value, "measured": g.measured, "times": g.factor} for g in known]
        print(text_table(rows, {"about": "", "guess": "your guess", "measured": "measured", "times": "times"}))


def distance(one: Guess) -> float:
    """How far off, as the logarithm of the factor: twice and half are as far."""
    return math.inf if one.factor is None else abs(math.log(one.factor))


def in_words(factor: float) -> str:
    """1.25 -> "1.25 times the guess"; what lies within a tenth is said to be near."""
    return f"{factor:,.3g} times the guess" + (" (near)" if 1 / 1.1 <= factor <= 1.1 else "")
