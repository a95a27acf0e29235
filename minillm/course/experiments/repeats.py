"""Several runs as one row: of each figure the median, and of the compared ones the least and the greatest.

Runs differ by their seed where time is virtual, and take turns where it is real: whatever slows the machine for a
while then slows every set-up.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from statistics import median
from typing import TypeVar

from minillm.course.experiments.common import spread_columns
from minillm.course.setting import Setting
from minillm.guard.inputs import check_at_least

SEEDS = 3  # as many as a verdict asks of a spread (`verdicts/reading.py`)
Case = TypeVar("Case", bound=Hashable)


def median_row(runs: Sequence[Mapping], compared: Sequence[str]) -> dict:
    """The rows of one set-up in several runs as one: medians of all numbers, a spread of the `compared` columns, and
    `turns`, how many runs there were. What is no number in some run stays as in the first; None in one is None."""
    row: dict = {}
    for name, first in runs[0].items():
        values = [run[name] for run in runs]
        if any(value is None for value in values):
            row[name] = None
        elif not isinstance(first, (int, float)) or isinstance(first, bool):
            row[name] = first
        else:
            row |= spread_columns(name, values) if name in compared else {name: median(values)}
    return row | {"turns": len(runs)}


def seeds(setting: Setting) -> list[int]:
    """Those of an experiment in virtual time: the setting's and the next."""
    return [setting.seed + turn for turn in range(SEEDS)]


def seeds_row(setting: Setting, runs: Sequence[Mapping], compared: Sequence[str]) -> dict:
    """`median_row` of one set-up under each of `seeds`, with the compared figures `by_seed`: of the same seed all
    set-ups have the same load, so that a verdict compares them seed by seed."""
    by_seed = {name: [run[name] for run in runs] for name in compared if all(run[name] is not None for run in runs)}
    return {**median_row(runs, compared), "seeds": seeds(setting), "by_seed": by_seed}


def over_seeds(setting: Setting, rows_of: Callable[[int], Sequence[Mapping]], *compared: str) -> list[dict]:
    """`rows_of(seed)` for each of `seeds`, which always gives the same set-ups in the same order: a row for each."""
    runs = [rows_of(seed) for seed in seeds(setting)]
    return [seeds_row(setting, same, compared) for same in zip(*runs, strict=True)]


def in_turns(cases: Mapping[Case, Callable[[], float]], turns: int) -> dict[Case, list[float]]:
    """Call each case `turns` times, all of them once before any again; every other turn runs backwards."""
    check_at_least(1, turns=turns)
    found: dict[Case, list[float]] = {case: [] for case in cases}
    for turn in range(turns):
        for case in reversed(cases) if turn % 2 else cases:
            found[case].append(cases[case]())
    return found
