"""What must hold between steps: queue, batch, pool and index agree with each other.

`check_invariants` may be called at any time between two steps; it raises InvariantError, which
names the field that broke and the numbers. Tests call it after every step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from minillm.ladder.continuous import Scheduler
from minillm.ladder.paged import BlockPool, InvariantError, Slots
from minillm.ladder.request import Request


def check_invariants(scheduler: Scheduler) -> None:
    """Raise InvariantError unless queue, batch and pool agree with each other."""
    running, waiting = scheduler.running, scheduler.waiting
    orders = [request.arrival_number for request in (*running, *waiting)]
    if orders != sorted(set(orders)):
        raise InvariantError(f"running, waiting: not in order of arrival, or one twice: {orders}")
    if len(running) > scheduler.max_batch:
        raise InvariantError(f"running: {len(running)} rows, at most {scheduler.max_batch} allowed")
    for request in waiting:
        if request.block_table or request.num_kv:
            raise InvariantError(f"block_table: {request.id!r} waits, but holds {len(request.block_table)} blocks")
    for request in running:
        check_running(scheduler, request)
    check_pool(scheduler.memory.pool, (request.block_table for request in running))


def check_running(scheduler: Scheduler, request: Request) -> None:
    """A running request holds as many blocks as its policy says, and the index knows them by its own tokens."""
    pool = scheduler.memory.pool
    known = request.num_tokens + (request.finish_reason == "error")  # which has no token after its last stored one
    if not 0 <= request.num_kv < known:
        raise InvariantError(f"num_kv: {request.id!r} stores {request.num_kv} of {request.num_tokens} tokens")
    expected = pool.blocks_for(request.max_kv if isinstance(scheduler.memory, Slots) else request.num_kv)
    if len(request.block_table) != expected:
        held = len(request.block_table)
        raise InvariantError(f"block_table: {request.id!r} has {held} blocks, not {expected}")
    for i, block in enumerate(request.block_table):
        if block in pool.key_of and pool.key_of[block][1] != pool.block_tokens(request.tokens, i):
            raise InvariantError(f"key_of: block {block} of {request.id!r} is indexed as other tokens")


def check_pool(pool: BlockPool, tables: Iterable[Sequence[int]]) -> None:
    """Raise InvariantError unless the pool agrees with itself and with the block tables."""
    held = Counter(block for table in tables for block in table)
    for block in range(pool.num_blocks):
        references, states = pool.references[block], (block in pool.free) + (block in pool.cached)
        if references != held[block]:
            raise InvariantError(f"references: block {block} counts {references}, {held[block]} tables hold it")
        if states != (references == 0):
            raise InvariantError(f"free, cached: block {block} has {references} references, is in {states} of them")
        if block in pool.cached and block not in pool.key_of:
            raise InvariantError(f"cached: block {block} is kept, but the index does not know it")
        if block in pool.free and block in pool.key_of:
            raise InvariantError(f"key_of: block {block} is free, but still in the index")
    for key, (_, block) in pool.node_of.items():
        if pool.key_of.get(block) != key:
            raise InvariantError(f"node_of: {key} leads to block {block}, which holds {pool.key_of.get(block)}")
    if len(pool.key_of) != len(pool.node_of):
        raise InvariantError(f"key_of: {len(pool.key_of)} blocks, but {len(pool.node_of)} nodes")
