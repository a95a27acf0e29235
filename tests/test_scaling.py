"""The scheduler's own cost: counted in Python instructions, which no busy machine can change.

A step must cost the same whether a hundred or ten thousand requests wait. What Python does
in C is not counted, so the queue also refuses to be walked.
"""

from __future__ import annotations

import gc
import sys
from collections import deque
from collections.abc import Callable

import pytest
from fakes import fake_engine

from minillm.fast.engine import Engine
from minillm.ladder.request import SamplingParams


def instructions(work: Callable[[], object]) -> int:
    """How many bytecode instructions `work` executes."""
    counted = 0

    def trace(frame, event, argument):
        nonlocal counted
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        counted += event == "opcode"
        return trace

    before = sys.gettrace()
    gc.disable()  # others may have Python code run at a collection, which comes when it likes
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
        gc.enable()
    return counted


instructions(lambda: None)  # Python 3.12 counts none the first time that anybody asks


class Queue(deque):
    """A queue that may be touched at its ends only."""

    def refuse(self, *arguments):
        raise AssertionError("the whole queue was walked")

    __iter__ = __reversed__ = __contains__ = __copy__ = remove = index = count = copy = rotate = insert = refuse


def step_costs(engine: Engine, steps: int) -> list[int]:
    return [instructions(engine.step) for _ in range(steps)]


def queued(number: int, **settings) -> Engine:
    engine = fake_engine(blocks=40, max_batch=8, max_step_tokens=32, **settings)
    engine.scheduler.waiting = Queue()
    for _ in range(number):
        engine.add([1, 2, 3, 4, 5], SamplingParams(7))
    return engine


@pytest.mark.parametrize("batching", ["continuous", "static"])
@pytest.mark.parametrize("kv", ["paged", "slots"])
@pytest.mark.parametrize("chunked_prefill", [True, False])
def test_a_step_costs_the_same_however_many_wait(batching, kv, chunked_prefill):
    few, many = (
        step_costs(queued(n, batching=batching, kv=kv, chunked_prefill=chunked_prefill), 20) for n in (100, 10_000)
    )
    assert few == many
    assert min(few) > 100, "nothing was counted"


def test_a_step_with_a_preemption_costs_the_same_however_many_wait():
    costs = []
    for number in (100, 10_000):
        engine = fake_engine(blocks=7, max_batch=3)
        engine.scheduler.waiting = Queue()
        for first in range(number):
            engine.add([first % 90, 2, 3, 4], SamplingParams(12))
        costs.append(step_costs(engine, 15))
        assert engine.records.totals["preempted"] > 0
    assert costs[0] == costs[1]


@pytest.mark.parametrize("mode", ["all", "summary"])
def test_a_step_costs_the_same_however_many_are_still_to_arrive_or_have_finished(mode):
    costs = []
    for later, before in [(10, 1), (3000, 500)]:
        engine = fake_engine(records=mode, prefix_cache=False)
        for _ in range(before):
            engine.add([1], SamplingParams(1))
        while engine.has_work:
            engine.step()
        for number in range(later):
            engine.add([1], SamplingParams(1), arrival=1e6 + number)
        engine.add([1, 2, 3], SamplingParams(12))
        costs.append(step_costs(engine, 10))
    assert costs[0] == costs[1]


def test_a_step_of_twice_the_rows_costs_no_more_than_about_twice():
    costs = []
    for rows in (32, 64):
        engine = fake_engine(blocks=999, max_batch=rows, max_step_tokens=512, prefix_cache=False)
        for _ in range(rows):
            engine.add([1, 2, 3], SamplingParams(12))
        costs.append(step_costs(engine, 6)[-1])
    assert costs[0] < costs[1] < 2.2 * costs[0]


def test_a_decode_step_costs_the_same_early_and_late_in_a_text():
    """The fake model reads the whole text, so it is left out."""
    engine = fake_engine(blocks=999, say=lambda request: [1], max_context=4096)
    engine.executor._write = lambda row: None
    engine.add([1, 2, 3], SamplingParams(3000))
    costs = step_costs(engine, 6)
    for _ in range(2000):
        engine.step()
    late = step_costs(engine, 4)
    assert sorted(late) == sorted(costs[2:6])  # four steps, of which one fills a block
