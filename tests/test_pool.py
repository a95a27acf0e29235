"""Who holds which block, and which prefix is known: counts, sharing, eviction, and a pool run dry."""

from __future__ import annotations

import copy
import random
from collections import Counter

import pytest
from fakes import BLOCK_SIZE, expected_output, fake_engine, outputs, steps

from minillm.guard.inputs import RequestError
from minillm.guard.invariants import check_pool
from minillm.ladder.paged import BlockPool, InvariantError, Paged, Slots
from minillm.ladder.request import Request, SamplingParams


def make_request(tokens: list[int], max_tokens: int = 1) -> Request:
    return Request("r", tokens, SamplingParams(max_tokens), arrival=0.0, seed=0, stop_ids=frozenset())


def store(memory: Paged, request: Request, *ends: int) -> Request:
    """Admit a request and store its tokens up to each of `ends`, as prefill in chunks does."""
    assert memory.admit(request, memory.pool.blocks_for(request.num_tokens), owed=0)
    for end in ends:
        assert memory.reserve(request, end)
        request.num_kv = end
        memory.after_step(request)
    return request


def state_of(pool: BlockPool):
    return copy.deepcopy((pool.references, list(pool.free), list(pool.cached), pool.node_of, pool.key_of))


# -- how many blocks, after each step -------------------------------------------------------------


@pytest.mark.parametrize("prompt", [3, 4, 5, 8])
@pytest.mark.parametrize("max_tokens", [1, 4, 5])
@pytest.mark.parametrize("kv", ["paged", "slots"])
def test_blocks_after_each_step_in_a_pool_just_large_enough(prompt, max_tokens, kv):
    most = -(-(prompt + max_tokens - 1) // BLOCK_SIZE)  # the last token is never stored
    engine = fake_engine(blocks=most, kv=kv)
    engine.add(list(range(prompt)), SamplingParams(max_tokens), "a")
    held = []
    for events in steps(engine):
        (event,) = events
        held.append(engine.stats().blocks_live)
        assert event.finished == (len(held) == max_tokens)
    if kv == "paged":
        # prompt + n tokens are known after step n + 1, and all but the newest are stored
        assert held == [-(-(prompt + n) // BLOCK_SIZE) for n in range(max_tokens - 1)] + [0]
    else:
        assert held == [most] * (max_tokens - 1) + [0]
    assert engine.records.requests[0].preemptions == 0


@pytest.mark.parametrize(("prompt", "max_tokens"), [(4, 2), (8, 5), (5, 5), (12, 2)])
def test_one_block_less_is_refused_when_added_not_discovered_when_full(prompt, max_tokens):
    needed = -(-(prompt + max_tokens - 1) // BLOCK_SIZE)
    with pytest.raises(RequestError, match=f"need {needed} blocks of 4, the pool has {needed - 1}"):
        fake_engine(blocks=needed - 1).add([1] * prompt, SamplingParams(max_tokens))


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (3, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_blocks_for(tokens, blocks):
    assert BlockPool(9, 4).blocks_for(tokens) == blocks


@pytest.mark.parametrize("sizes", [(0, 4), (4, 0)])
def test_a_pool_of_nothing_is_refused(sizes):
    with pytest.raises(ValueError, match="at least 1 block of 1 token"):
        BlockPool(*sizes)


# -- a prompt that the index knows ----------------------------------------------------------------

EIGHT = (1, 2, 3, 4, 5, 6, 7, 8)


@pytest.mark.parametrize(
    ("prompt", "cached"),
    [
        (EIGHT, 4),  # not 8: one token must be left to compute, and only whole blocks are shared
        ((*EIGHT, 9), 8),
        ((*EIGHT, 9, 10, 11, 12), 8),
        (EIGHT[:7], 4),
        (EIGHT[:5], 4),
        (EIGHT[:4], 0),
        ((1, 2, 3, 9, 5, 6, 7, 8, 9), 0),  # differs in the first block
        ((1, 2, 3, 4, 5, 6, 7, 9, 9), 4),  # differs in the second
    ],
)
@pytest.mark.parametrize("when", ["after", "during"])
def test_a_known_prefix_is_shared_in_whole_blocks_and_never_the_last_token(prompt, cached, when):
    engine = fake_engine()
    engine.add(list(EIGHT), SamplingParams(1 if when == "after" else 12), "first")
    events = [engine.step()]
    of_first = {block for block in engine.scheduler.memory.pool.key_of}
    store, shared = engine.executor.store, dict(engine.executor.store)
    engine.add(list(prompt), SamplingParams(6), "second")
    events.append(engine.step())
    (row,) = (row for row in engine.executor.plan.rows if row.request.id == "second")
    assert (row.start, len(row.tokens)) == (cached, len(prompt) - cached)
    assert len(of_first & set(row.request.block_table)) == cached // BLOCK_SIZE
    events += steps(engine)
    assert outputs(events)["second"] == expected_output(prompt, 6)
    assert outputs(events)["first"] == expected_output(EIGHT, 1 if when == "after" else 12)
    assert {slot: store[slot] for slot in shared} == shared, "a block that others read was written again"
    assert [r.cached_tokens for r in sorted(engine.records.requests, key=lambda r: r.request_id)] == [0, cached]


def test_equal_prompts_in_one_step_are_both_computed_and_one_of_them_is_indexed():
    engine = fake_engine()
    for name in "ab":
        engine.add(list(EIGHT), SamplingParams(3), name)
    assert outputs(steps(engine)) == dict.fromkeys("ab", expected_output(EIGHT, 3))
    assert engine.stats().blocks_cached == 2
    assert engine.records.totals["cached_tokens"] == 0


def test_output_is_a_prefix_too():
    """The second turn of a conversation begins with all of the first."""
    engine = fake_engine()
    (first,) = engine.generate([[1, 2, 3]], SamplingParams(6))
    (second,) = engine.generate([[1, 2, 3, *first.token_ids, 50]], SamplingParams(3))
    assert engine.records.requests[1].cached_tokens == 8  # of the 3 + 6 - 1 that are stored
    assert second.token_ids == expected_output(tuple(second.prompt_ids), 3)


def test_without_a_prefix_cache_nothing_is_known_and_nothing_is_kept():
    engine = fake_engine(prefix_cache=False)
    for _ in range(2):
        engine.generate([list(EIGHT)], SamplingParams(3))
    assert engine.records.totals["cached_tokens"] == engine.stats().blocks_cached == 0


def test_a_block_that_was_given_to_others_is_no_longer_found():
    engine = fake_engine(blocks=4)
    for prompt in (EIGHT, tuple(range(20, 36)), EIGHT):  # the second takes the whole pool
        engine.add(list(prompt), SamplingParams(1))
        (tokens,) = outputs(steps(engine)).values()
        assert tokens == expected_output(prompt, 1)
    assert engine.records.totals["cached_tokens"] == 0


def test_evicting_a_twin_that_was_never_indexed_keeps_the_entry_of_the_other():
    memory = Paged(BlockPool(3, BLOCK_SIZE))
    first, twin = (store(memory, make_request([1, 2, 3, 4])) for _ in range(2))
    for request in (first, twin):  # both are under way before either is known
        assert memory.reserve(request, 4)
        request.num_kv = 4
        memory.after_step(request)
    memory.release(twin)
    assert memory.pool.take(2) is not None  # the twin's block and the spare one
    assert memory.pool.match([1, 2, 3, 4], 1)[1] == first.block_table


# -- keys that a hash takes for equal -------------------------------------------------------------


class SameHash(int):
    """A token whose hash is that of every other."""

    def __hash__(self) -> int:
        return 0


X = 5
TWIN = X + 2**61 - 1  # Python's hash of whole numbers is their remainder by 2**61 - 1


@pytest.mark.parametrize(
    ("known", "asked"),
    [
        ([X] * 4, [TWIN] * 4),
        ([-1, -1, -1, -1], [-2, -2, -2, -2]),
        ([SameHash(n) for n in (1, 2, 3, 4)], [SameHash(n) for n in (4, 3, 2, 1)]),
    ],
    ids=["remainders", "-1 and -2", "constant hash"],
)
def test_tokens_of_equal_hash_share_nothing(known, asked):
    assert hash(tuple(known)) == hash(tuple(asked))
    pool = BlockPool(4, BLOCK_SIZE)
    pool.enter(0, known, 0, block=0)
    assert pool.match(known, 1)[1] == [0]
    assert pool.match(asked, 1)[1] == []


def test_equal_blocks_under_different_beginnings_share_nothing():
    prompts = [(1, 2, 3, 4, 9, 9, 9, 9, 0), (5, 6, 7, 8, 9, 9, 9, 9, 0), (9, 9, 9, 9, 0)]
    engine = fake_engine()
    for prompt in prompts:
        engine.add(list(prompt), SamplingParams(4))
        (tokens,) = outputs(steps(engine)).values()
        assert tokens == expected_output(prompt, 4)
    assert engine.records.totals["cached_tokens"] == 0


# -- what is forgotten first ----------------------------------------------------------------------

TWELVE = list(range(1, 13))


@pytest.mark.parametrize("chunks", [(12,), (4, 12), (4, 8, 12)], ids=["whole", "4+8", "4+4+4"])
def test_the_tail_of_a_prefix_is_evicted_before_its_head(chunks):
    memory = Paged(BlockPool(3, BLOCK_SIZE))
    first = store(memory, make_request(TWELVE), *chunks)
    table = list(first.block_table)
    memory.release(first)
    assert list(memory.pool.cached) == table[::-1]
    assert memory.pool.take(1) == table[-1:]
    assert memory.pool.match(TWELVE, 3)[1] == table[:2]


@pytest.mark.parametrize("budget", [4, 12])
def test_a_prompt_that_lost_its_last_block_still_hits_the_others(budget):
    engine = fake_engine(blocks=3, max_step_tokens=budget)
    for prompt in (TWELVE, [50], TWELVE):  # the second needs one block
        engine.add(prompt, SamplingParams(1))
        (tokens,) = outputs(steps(engine)).values()
        assert tokens == expected_output(tuple(prompt), 1)
    assert [record.cached_tokens for record in engine.records.requests] == [0, 0, 8]


def test_what_was_used_longest_ago_is_evicted_first_and_a_hit_is_a_use():
    memory = Paged(BlockPool(3, BLOCK_SIZE))
    for first in (10, 20, 30):
        memory.release(store(memory, make_request([first] * 4), 4))
    memory.release(store(memory, make_request([10] * 4 + [1])))  # used again
    memory.pool.take(1)
    assert [bool(memory.pool.match([n] * 4, 1)[1]) for n in (10, 20, 30)] == [True, False, True]


def test_free_blocks_are_taken_before_cached_ones():
    memory = Paged(BlockPool(4, BLOCK_SIZE))
    memory.release(store(memory, make_request([1] * 4), 4))
    taken = memory.pool.take(3)
    assert memory.pool.match([1] * 4, 1)[1] and not set(taken) & set(memory.pool.cached)


# -- counts, and a dry pool -----------------------------------------------------------------------


def test_three_blocks_wanted_and_two_free_changes_nothing():
    pool = BlockPool(5, BLOCK_SIZE)
    held = pool.take(3)
    before = state_of(pool)
    assert pool.take(3) is None and pool.take_run(3) is None
    assert state_of(pool) == before
    assert pool.take(2) is not None and not set(held) & {3, 4}


def test_a_dry_pool_leaves_the_request_as_it_was():
    memory = Paged(BlockPool(5, BLOCK_SIZE))
    memory.release(store(memory, make_request(TWELVE), 12))
    store(memory, make_request([50] * 16, 1), 12)
    late = make_request([*TWELVE, 13])
    before = state_of(memory.pool)
    assert not memory.admit(late, needed=4, owed=0)  # two of its blocks are known, but two more are not to be had
    assert (late.block_table, late.prefix_nodes, late.num_kv) == ([], [], 0)
    assert state_of(memory.pool) == before
    growing = make_request([60] * 12)
    assert memory.admit(growing, 1, 0) and not memory.reserve(growing, 12)
    assert growing.block_table == [] and state_of(memory.pool) == before


def test_known_blocks_that_nobody_holds_are_not_counted_as_room_as_well():
    """Two idle blocks are the prompt's own prefix. Reviving them leaves nothing for the third."""
    memory = Paged(BlockPool(2, BLOCK_SIZE))
    memory.release(store(memory, make_request(TWELVE[:8]), 8))
    assert not memory.admit(make_request(TWELVE[:9]), needed=3, owed=0)
    assert memory.admit(make_request(TWELVE[:8]), needed=2, owed=0)


@pytest.mark.parametrize("reviving", [False, True])
def test_releasing_twice_is_an_error_that_names_the_block(reviving):
    pool = BlockPool(3, BLOCK_SIZE)
    blocks = pool.take(2)
    if reviving:
        pool.enter(0, [1, 2, 3, 4], 0, blocks[0])
    pool.release(blocks)
    with pytest.raises(InvariantError, match=f"block {blocks[-1]} was released more often than it was taken"):
        pool.release(blocks)


def test_counts_through_500_random_takes_shares_and_releases():
    choose, pool = random.Random(0), BlockPool(7, BLOCK_SIZE)
    tables: list[list[int]] = []
    refused = 0
    for step in range(500):
        what = choose.choice(["take", "take_run", "share", "release"])
        if what == "release" and tables:
            pool.release(tables.pop(choose.randrange(len(tables))))
        elif what == "share" and (known := sorted(pool.key_of)):
            tables.append(choose.sample(known, choose.randint(1, len(known))))
            pool.share(tables[-1])
        elif what.startswith("take"):
            number, before = choose.randint(1, 4), state_of(pool)
            blocks = getattr(pool, what)(number)
            if blocks is None:
                refused += 1
                assert state_of(pool) == before
                continue
            assert len(set(blocks)) == number
            assert not set(blocks) & {block for table in tables for block in table}, "a live block was handed out"
            tables.append(blocks)
            if what == "take" and choose.random() < 0.5:
                pool.enter(0, [step] * BLOCK_SIZE, 0, blocks[0])
        check_pool(pool, tables)
        held = Counter(block for table in tables for block in table)
        assert pool.references == [held[block] for block in range(7)]
        assert pool.num_live == len(held)
    assert refused > 50


# -- slots ----------------------------------------------------------------------------------------


def test_a_slot_is_the_first_run_that_fits():
    pool = BlockPool(8, BLOCK_SIZE)
    runs = [pool.take_run(2) for _ in range(4)]
    assert runs == [[0, 1], [2, 3], [4, 5], [6, 7]]
    pool.release(runs[0])
    pool.release(runs[2])
    assert pool.take_run(3) is None, "four blocks are free, but no three of them are neighbours"
    assert pool.take_run(1) == [0]
    assert pool.take_run(2) == [4, 5]
    pool.release(runs[1])
    assert pool.take_run(3) == [1, 2, 3]


def test_a_slot_is_reserved_for_the_longest_and_returned_whole():
    memory = Slots(BlockPool(8, BLOCK_SIZE))
    request = make_request([1] * 5, max_tokens=9)  # 13 tokens are stored at most
    assert memory.admit(request, needed=1, owed=0)
    assert request.block_table == [0, 1, 2, 3]
    assert memory.reserve(request, 13) and request.block_table == [0, 1, 2, 3]
    memory.release(request)
    assert request.block_table == [] and memory.pool.num_available == 8


@pytest.mark.parametrize(("kv", "joins_at"), [("slots", 5), ("paged", 2)])
def test_free_blocks_that_lie_apart_are_no_use_to_slots(kv, joins_at):
    engine = fake_engine(blocks=6, kv=kv, prefix_cache=False)
    # name, prompt, max_tokens: two blocks each for the first three, of which the middle one stays for four steps
    for name, prompt, max_tokens in [("a", 8, 1), ("b", 5, 4), ("c", 8, 1), ("d", 9, 2)]:
        engine.add([1] * prompt, SamplingParams(max_tokens), name)
    engine.step()
    assert engine.stats().blocks_free == 4  # and "d" needs three
    list(steps(engine))
    first_step_of_d = next(number for number, step in enumerate(engine.records.steps, 1) if "d" in step.members)
    assert first_step_of_d == joins_at
