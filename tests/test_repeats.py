"""Several runs as one row."""

from __future__ import annotations

import pytest

from minillm.course.experiments.common import spread_columns
from minillm.course.experiments.repeats import in_turns, median_row, over_seeds
from minillm.course.setting import Setting
from minillm.course.verdicts.reading import ratio, reading


def test_a_row_of_three_runs_has_medians_and_the_spread_of_what_is_compared():
    runs = [{"setup": "a", "clients": 8, "speed": speed, "tail": tail, "paged": True}
            for speed, tail in ((3.0, 1.0), (1.0, None), (2.0, 2.0))]
    row = median_row(runs, ["speed", "tail"])
    assert row == {"setup": "a", "clients": 8, "speed": 2.0, "speed_min": 1.0, "speed_max": 3.0, "tail": None,
                   "paged": True, "turns": 3}
    assert (reading(row, "speed").low, reading(row, "speed").recorded) == (1.0, True)


def test_rows_of_seeds_are_put_together_by_set_up():
    rows = over_seeds(Setting(seed=5), lambda seed: [{"setup": n, "seed_times": seed * n} for n in (1, 2)],
                      "seed_times")
    assert [(row["setup"], row["seed_times"], row["seed_times_max"]) for row in rows] == [(1, 6, 7), (2, 12, 14)]
    assert all(row["seeds"] == [5, 6, 7] and row["turns"] == 3 for row in rows)
    assert rows[1]["by_seed"] == {"seed_times": [10, 12, 14]}


def test_set_ups_are_compared_seed_by_seed():
    """Loads differ by a factor of two from seed to seed, and one set-up is always a tenth faster."""
    runs = {"slow": (10.0, 20.0, 15.0), "fast": (11.0, 22.0, 16.5)}
    fast, slow = (over_seeds(Setting(), lambda seed, name=name: [{"speed": runs[name][seed]}], "speed")[0]
                  for name in ("fast", "slow"))
    found = ratio(fast, slow, "speed")
    assert (found.low, found.high) == pytest.approx((1.1, 1.1)) and found.recorded
    alone = {name: value for name, value in slow.items() if name != "by_seed"}
    assert ratio(fast, alone, "speed").low < 0.6, "of other runs only the ranges are known"


def test_a_seed_that_leaves_out_a_set_up_is_an_error():
    with pytest.raises(ValueError, match="zip"):
        over_seeds(Setting(), lambda seed: [{"x": 1}] * (1 + seed), "x")


def test_cases_take_turns_and_every_other_turn_runs_backwards():
    called = []
    cases = {name: lambda name=name: called.append(name) or len(called) for name in "abc"}
    assert in_turns(cases, 3) == {"a": [1, 6, 7], "b": [2, 5, 8], "c": [3, 4, 9]}
    assert "".join(called) == "abccbaabc"
    assert spread_columns("ms", [3, 1, 2]) == {"ms": 2, "ms_min": 1, "ms_max": 3}
    with pytest.raises(ValueError, match="turns 0"):
        in_turns(cases, 0)
