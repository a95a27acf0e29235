"""`check_invariants` earns its trust: each thing it guards is broken once, and it must say which.

A check that cannot fail would make every other test of the bookkeeping worthless.
"""

from __future__ import annotations

import pytest
from fakes import fake_engine

from minillm.fast.engine import Engine
from minillm.ladder.paged import InvariantError
from minillm.ladder.request import SamplingParams


def busy_engine(kv: str = "paged") -> Engine:
    """Two rows that share a block, a third that waits; and in the pool live, cached and free blocks."""
    engine = fake_engine(blocks=16, kv=kv, max_batch=2)
    engine.generate([[50] * 8], SamplingParams(2))
    engine.add([1, 2, 3, 4, 5, 6], SamplingParams(9), "a")
    engine.step()
    engine.add([1, 2, 3, 4, 7, 8], SamplingParams(9), "b")
    engine.add([9, 9, 9], SamplingParams(9), "c")
    engine.step()
    stats = engine.stats()
    assert (stats.running, stats.waiting) == (2, 1)
    engine.check_invariants()
    return engine


class Handle:
    """The parts of an engine that a test breaks, by name."""

    def __init__(self, engine: Engine) -> None:
        self.scheduler = engine.scheduler
        self.pool = engine.scheduler.memory.pool
        self.a, self.b = engine.scheduler.running
        self.c = engine.scheduler.waiting[0]

    @property
    def cached(self) -> int:
        return next(iter(self.pool.cached))

    @property
    def free(self) -> int:
        return next(iter(self.pool.free))


def count_up(it):
    it.pool.references[it.a.block_table[0]] += 1


def count_down(it):
    it.pool.references[it.a.block_table[0]] -= 1


def count_of_nobody(it):
    it.pool.references[it.free] = 1


def live_block_in_free(it):
    it.pool.free[it.a.block_table[1]] = None


def live_block_in_cached(it):
    it.pool.cached[it.a.block_table[0]] = None


def free_block_lost(it):
    del it.pool.free[it.free]


def cached_block_lost(it):
    it.pool.cached.popitem()


def cached_block_also_free(it):
    it.pool.free[it.cached] = None


def cached_block_unknown(it):
    del it.pool.node_of[it.pool.key_of.pop(it.cached)]


def free_block_known(it):
    block = it.cached
    del it.pool.cached[block]
    it.pool.free[block] = None


def node_of_another_block(it):
    key, (node, _) = next(iter(it.pool.node_of.items()))
    it.pool.node_of[key] = (node, it.free)


def node_without_block(it):
    it.pool.node_of[0, (90, 90, 90, 90)] = (99, it.free)


def block_without_node(it):
    it.pool.key_of[it.a.block_table[1]] = (0, tuple(it.a.tokens[4:8]))


def key_of_other_tokens(it):
    block = it.a.block_table[0]
    parent, _ = it.pool.key_of[block]
    entry = it.pool.node_of.pop(it.pool.key_of[block])
    it.pool.key_of[block] = (parent, (90, 90, 90, 90))
    it.pool.node_of[it.pool.key_of[block]] = entry


def tokens_changed_under_the_cache(it):
    it.a.tokens[0] = 90


def table_too_long(it):
    it.a.block_table.append(it.free)


def table_too_short(it):
    it.a.block_table.pop()


def table_of_another(it):
    it.a.block_table[1] = it.b.block_table[1]


def waiting_with_a_block(it):
    it.c.block_table.append(it.free)


def waiting_with_stored_tokens(it):
    it.c.num_kv = 1


def stored_all(it):
    it.a.num_kv = it.a.num_tokens


def stored_less_than_nothing(it):
    it.a.num_kv = -1


def stored_in_fewer_blocks(it):
    it.a.num_kv = 4


def order_swapped(it):
    it.scheduler.running.reverse()


def queue_before_batch(it):
    it.c.arrival_number = 0


def one_twice(it):
    it.scheduler.running.append(it.b)


def waits_and_runs(it):
    it.scheduler.waiting.appendleft(it.b)


def too_many_rows(it):
    it.scheduler.max_batch = 1


FAULTS = {
    "references": [count_up, count_down, count_of_nobody, table_of_another],
    "free, cached": [live_block_in_free, live_block_in_cached, free_block_lost, cached_block_lost,
                     cached_block_also_free],
    "cached": [cached_block_unknown],
    "key_of": [free_block_known, block_without_node, key_of_other_tokens, tokens_changed_under_the_cache],
    "node_of": [node_of_another_block, node_without_block],
    "block_table": [table_too_long, table_too_short, waiting_with_a_block, waiting_with_stored_tokens,
                    stored_in_fewer_blocks],
    "num_kv": [stored_all, stored_less_than_nothing],
    "running, waiting": [order_swapped, queue_before_batch, one_twice, waits_and_runs],
    "running": [too_many_rows],
}


@pytest.mark.parametrize(
    ("field", "fault"), [pytest.param(field, f, id=f.__name__) for field, faults in FAULTS.items() for f in faults]
)
def test_a_fault_is_noticed_and_named(field, fault):
    engine = busy_engine()
    fault(Handle(engine))
    with pytest.raises(InvariantError, match=rf"^{field}: "):
        engine.check_invariants()


@pytest.mark.parametrize("fault", [table_too_long, table_too_short, count_up, stored_all, one_twice])
def test_slots_are_checked_as_well(fault):
    engine = busy_engine("slots")
    fault(Handle(engine))
    with pytest.raises(InvariantError):
        engine.check_invariants()


def test_an_engine_at_rest_holds_nothing():
    engine = busy_engine()
    while engine.has_work:
        engine.step()
    engine.check_invariants()
    assert engine.stats().blocks_live == 0
