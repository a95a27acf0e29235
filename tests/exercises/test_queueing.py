"""Exercise 12's scheduler is the package's own, but for the order."""

from __future__ import annotations

import pytest

from minillm.course.grading.queueing import (
    Prompt,
    in_order_of_arrival,
    load,
    rush,
    serve,
    server,
)
from minillm.guard.invariants import check_pool
from minillm.measure.workload import play


@pytest.mark.parametrize("items", [load(5), rush(questions=20)], ids=["load", "rush"])
def test_in_order_of_arrival_it_does_what_the_package_does(items):
    plain, ordered = server(), server(in_order_of_arrival)
    for engine in (plain, ordered):
        play(engine, items)
    assert plain.records.requests == ordered.records.requests
    assert plain.records.steps == ordered.records.steps


def test_books_balance_whatever_the_order():
    engine = server(lambda prompts, now: prompts[::-1])
    for item in load(5):
        engine.add(item.prompt_ids, item.params, arrival=item.arrival)
    pool = engine.scheduler.memory.pool
    while engine.has_work:
        engine.step()
        if len(engine.records.steps) % 20 == 0:  # the pool is large
            check_pool(pool, (request.block_table for request in engine.scheduler.running))
        assert len(engine.scheduler.running) <= engine.scheduler.max_batch
    assert pool.num_live == 0 and len(engine.records.requests) == 100


def test_an_order_sees_what_a_server_sees():
    seen: list[tuple[list[Prompt], float]] = []

    def spy(prompts, now):
        seen.append((prompts, now))
        return prompts

    serve(spy, rush(questions=3))
    first, now = seen[0]
    assert [(p.number, p.tokens, p.left) for p in first] == [(1, 8_000, 8_000)] and now == 0.0
    assert all(p.arrival <= now and 0 < p.left <= p.tokens for prompts, now in seen for p in prompts)
    assert any(p.left < p.tokens for prompts, _ in seen for p in prompts)


@pytest.mark.parametrize("order", [lambda ps, now: ps[1:], lambda ps, now: [*ps, *ps[:1]]], ids=["fewer", "more"])
def test_an_order_that_loses_or_doubles_somebody_is_refused(order):
    with pytest.raises(ValueError, match="once each"):
        serve(order, rush(questions=3))
