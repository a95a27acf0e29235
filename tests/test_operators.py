"""A step's time by its parts: clocks within each other, and parts that add up to the step."""

from __future__ import annotations

import time

import pytest
from tiny import tiny_model

from minillm import SamplingParams
from minillm.course.experiments import operators as module
from minillm.course.experiments.operators import PARTS, Stopwatch, operators, watched_engine
from minillm.course.setting import Setting
from minillm.fast.engine import Engine


def test_of_clocks_within_each_other_the_innermost_runs(monkeypatch):
    now = iter([0.0, 1.0, 3.0, 6.0])  # outer begins, inner begins, inner ends, outer ends
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    watch = Stopwatch()
    inner = watch.around("inner", lambda: None)
    watch.around("outer", inner)()
    assert watch.seconds == {"outer": 1 + 3, "inner": 2}


def test_a_part_that_fails_stops_its_clock():
    watch = Stopwatch()
    with pytest.raises(ZeroDivisionError):
        watch.around("part", lambda: 1 / 0)()
    assert not watch.running


@pytest.mark.parametrize("settings", [{}, {"kv_format": "int8"}])
def test_a_watched_engine_gives_the_same_tokens_and_every_part_has_a_time(settings):
    model, watch, params = tiny_model(), Stopwatch(), SamplingParams(max_tokens=6, ignore_eos=True)
    prompts = [[5, 6, 7], [8] * 30]
    plain = Engine(model, max_batch=2, max_context=64, prefix_cache=False, **settings).generate(prompts, params)
    start = time.perf_counter()
    watched = watched_engine(model, watch, max_batch=2, max_context=64, **settings).generate(prompts, params)
    whole = time.perf_counter() - start
    assert [each.token_ids for each in watched] == [each.token_ids for each in plain]
    assert set(watch.seconds) == set(PARTS) and all(seconds > 0 for seconds in watch.seconds.values())
    assert sum(watch.seconds.values()) < whole


def test_each_part_of_each_step_has_a_row_and_the_shares_add_up(monkeypatch):
    monkeypatch.setattr(Setting, "model", tiny_model())
    monkeypatch.setattr(module, "warm_up", lambda model: None)
    rows = operators(Setting(quick=True)).rows
    assert len(rows) == 5 * len(PARTS)
    for at in range(0, len(rows), len(PARTS)):
        step = rows[at : at + len(PARTS)]
        assert [row["part"] for row in step] == list(PARTS)
        assert sum(row["share"] for row in step) == pytest.approx(1)
        assert all(row["matrices_mfu"] > 0 and row["least_ms"] < row["step_ms"] for row in step)
