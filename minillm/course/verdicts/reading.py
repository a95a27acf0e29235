"""How a rule reads rows: figures with their spread, ratios of two of them, and what a ratio says of a claim."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

from minillm.course.verdicts.words import Missing, Part, Verdict, true, word

Rows = Sequence[dict]
FACTOR = 1.25  # a figure is met within this factor
# How far a ratio may be off where no runs in turns are recorded, as a share: about the half-width of those that are
# (continuous_vs_static, gain_by_spread: 2 to 11 % on two cores), and the widest error allowed to virtual time.
NOISE = 0.10
TURNS = 3  # fewer runs have no spread
RATIOS = ("speedup", "times_plain", "times_tokens_per_s")  # columns that are ratios already
SPREADS = {"tokens_per_s": ("min", "max"), "times_tokens_per_s": ("times_tokens_min", "times_tokens_max")}


@dataclass(frozen=True)
class Reading:
    """A figure, and where it lies: `low` and `high` are those of runs that took turns if `recorded`, else assumed.
    runs: the figure in each of them, where every set-up had the same runs in the same order, as over seeds."""

    value: float
    low: float
    high: float
    recorded: bool
    runs: tuple[float, ...] = field(default=(), compare=False, repr=False)

    def __str__(self) -> str:
        value, low, high = (digits(each) for each in (self.value, self.low, self.high))
        return value if low == high else f"{value} ({low} to {high})"


def reading(row: dict, name: str, noise: float = NOISE) -> Reading:
    """A row's figure with its spread: `NAME_min` and `NAME_max`, or the columns that SPREADS names.

    Without them `noise` is assumed, and for `step_ms` at least what lies between the median and the fastest step
    (`min_ms`): the steps of one run did not take turns with another's. noise 0: a count. Missing if there is no figure.
    """
    value = row.get(name)
    if value is None:
        raise Missing(f"a row has no {name}")
    if row.get("turns", TURNS) >= TURNS:
        for low, high in ((f"{name}_min", f"{name}_max"), SPREADS.get(name, ("", ""))):
            if row.get(low) is not None and row.get(high) is not None:
                return Reading(value, row[low], row[high], True, tuple(row.get("by_seed", {}).get(name, ())))
    width = 1 + noise if name in RATIOS else math.sqrt(1 + noise)  # so that a ratio of two has `noise`
    if name == "step_ms" and row.get("min_ms"):
        width = max(width, value / row["min_ms"])
    return Reading(value, value / width, value * width, noise == 0)


def over(a: Reading, b: Reading) -> Reading:
    """a / b. Its spread is that of the pairs where both have the same runs, else the widest that both allow."""
    if a.runs and len(a.runs) == len(b.runs) and all(b.runs):
        pairs = tuple(mine / other for mine, other in zip(a.runs, b.runs, strict=True))
        return Reading(median(pairs), min(pairs), max(pairs), True, pairs)
    return Reading(a.value / b.value, a.low / b.high, a.high / b.low, a.recorded and b.recorded)


def ratio(a: dict, b: dict, name: str, noise: float = NOISE) -> Reading:
    """a's figure over b's."""
    return over(reading(a, name, noise), reading(b, name, noise))


def within_turns(row: dict, base: dict, name: str, column: str) -> Reading:
    """`row` over `base` as its own column of ratios says, each of which was taken within a turn; else `ratio`."""
    if row.get(f"{column}_min") is not None:
        return reading(row, column)
    return ratio(row, base, name)


def times(value: float, noise: float = NOISE) -> Reading:
    """A ratio that a row holds already, without its spread."""
    return Reading(value, value / (1 + noise), value * (1 + noise), noise == 0)


def turn_by_turn(row: dict, name: str, gain: Reading) -> Reading:
    """A ratio as a row's own column of it has it, of which each was taken within a turn; `gain` if none is recorded.

    Where the column says the contrary of `gain`, the ratio of the figures, it only tells how wide the spread is.
    """
    if row.get(f"{name}_min") is None or row.get("turns", 0) < TURNS:
        return gain
    least, usual, most = (row[f"{name}{end}"] for end in ("_min", "", "_max"))
    scale = 1.0 if (gain.value >= 1) == (usual >= 1) else gain.value / usual
    return Reading(usual * scale, least * scale, most * scale, True)


# -- what a ratio says ----------------------------------------------------------------------------


def more(found: Reading, than: float = 1.0) -> Part:
    """Whether it lies above, its spread and all."""
    if found.low > than:
        return Part.AS_CLAIMED
    return Part.ANOTHER if found.high < than else Part.UNCLEAR


def less(found: Reading, than: float = 1.0) -> Part:
    """Whether it lies below, its spread and all."""
    if found.high < than:
        return Part.AS_CLAIMED
    return Part.ANOTHER if found.low > than else Part.UNCLEAR


def not_more(found: Reading) -> Part:
    """For a claim that something makes no difference: not above 1 beyond its spread, nor so wide as to hide much."""
    if found.low > 1:
        return Part.ANOTHER
    return Part.AS_CLAIMED if found.high <= FACTOR else Part.UNCLEAR


def not_less(found: Reading) -> Part:
    """For a claim that something costs nothing: not below 1 beyond its spread, nor so wide as to hide much."""
    if found.high < 1:
        return Part.ANOTHER
    return Part.AS_CLAIMED if found.low >= 1 / FACTOR else Part.UNCLEAR


def near(value: float, figure: float, factor: float = FACTOR) -> Part:
    """Whether a figure is met."""
    return true(figure / factor * (1 - 1e-9) <= value <= figure * factor * (1 + 1e-9))


def inside(value: float, least: float, most: float) -> Part:
    """Whether a value lies in a claimed range."""
    return true(least <= value <= most)


def barely(value: float, threshold: float) -> str:
    """" (barely)" where a value passes a threshold, or misses it, by less than a tenth."""
    return " (barely)" if threshold and abs(value / threshold - 1) < 0.1 else ""


def judged(
    measured: str, direction: Part, size: Part = Part.NONE, cause: Part = Part.NONE, by: Iterable[Reading] = ()
) -> Verdict:
    """The verdict on the three parts. by: the readings that decided; the sentence says so if one has no spread."""
    if any(not each.recorded for each in by):
        measured += f"; no runs in turns are recorded: {NOISE:.0%} are taken as noise"
    return Verdict(word(direction, size, cause), measured, direction, size, cause)


# -- rows -----------------------------------------------------------------------------------------


def find(rows: Rows, /, **wanted) -> dict:
    """The one row with these values; Missing if there is none."""
    return find_all(rows, **wanted)[0]


def find_all(rows: Rows, /, **wanted) -> list[dict]:
    """The rows with these values; Missing if there is none."""
    found = [row for row in rows if all(row.get(name) == value for name, value in wanted.items())]
    if not found:
        raise Missing("no row with " + ", ".join(f"{name} {value}" for name, value in wanted.items()))
    return found


def column(rows: Rows, name: str) -> list:
    """A column's values where there is one; Missing if there are fewer than two."""
    values = [row[name] for row in rows if row.get(name) is not None]
    if len(values) < 2:
        raise Missing(f"fewer than two rows with {name}")
    return values


def repeated(rows: Rows, name: str) -> Reading:
    """One figure of rows that measured the same set-up at different moments: their median, and the range of all."""
    found = sorted((reading(row, name) for row in rows), key=lambda each: each.value)
    return Reading(found[len(found) // 2].value, min(each.low for each in found), max(each.high for each in found),
                   all(each.recorded for each in found))


def digits(value: float) -> str:
    """Three significant digits; of a larger number all those before the point: 1,750 and not 1.75e+03."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def exponent(times_x: float, times_y: Reading) -> Reading:
    """p where y grows as x to the p."""
    value, low, high = (math.log(each) / math.log(times_x) for each in (times_y.value, times_y.low, times_y.high))
    return Reading(value, low, high, times_y.recorded)
