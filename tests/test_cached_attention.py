"""A cache changes nothing: however a text is cut, packed and stored, attention sees the same keys.

The references here are a loop over heads in double precision, a forward without a cache,
and the keys and values that transformers' own cache holds.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from parity import logits_of, random_ids, twins
from serving import Watch, make_engine, numbers, run_to_end, serve

from minillm.fast import attention
from minillm.fast.attention import SHORT_ROW, FastAttention, group_rows
from minillm.ladder.attention import KVStorage, RowSpan
from minillm.ladder.decode import SequenceCache
from minillm.ladder.quantized import kv_storage
from minillm.ladder.request import SamplingParams
from minillm.load.config import ModelConfig

BLOCK = 4
CLOSE = dict(rtol=0, atol=1e-5)
NAN = float("nan")
KINDS = (FastAttention, FastAttention)
CHUNKS = (4096, 7, 3)  # of a context: all at once, and in several parts, with and without a rest
KINDS_AND_CHUNKS = [(FastAttention, 4096), *((FastAttention, chunk) for chunk in CHUNKS)]


def storage_and_tables(config: ModelConfig, tokens: list[int], filling: float) -> tuple[KVStorage, list[list[int]]]:
    """A store full of `filling`, its scratch slot last; a block table for so many tokens each, in scattered blocks."""
    needs = [-(-n // BLOCK) for n in tokens]
    blocks = torch.randperm(sum(needs) + 3, generator=torch.Generator().manual_seed(0)).tolist()
    storage = kv_storage(config, "fp32", len(blocks) * BLOCK + 1)
    fill(storage, filling)
    free = iter(blocks)
    return storage, [list(itertools.islice(free, need)) for need in needs]


def fill(storage: KVStorage, filling: float) -> None:
    for tensor in numbers(storage):
        tensor.fill_(filling)


def step_attention(storage: KVStorage, spans: list[RowSpan], kind: type = FastAttention):
    return kind(storage, spans, BLOCK, scratch_slot=numbers(storage)[0].shape[1] - 1)


def slots_of(table: list[int], positions: range) -> list[int]:
    return [table[at // BLOCK] * BLOCK + at % BLOCK for at in positions]


def attend_in_loops(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """One token: q [Hq, D] over keys and values [S, Hkv, D], a head at a time, in double precision -> [Hq, D]."""
    group = q.shape[0] // keys.shape[1]
    out = []
    for head, query in enumerate(q.double()):
        k, v = keys[:, head // group].double(), values[:, head // group].double()
        weights = torch.exp(k @ query / q.shape[1] ** 0.5)
        out.append((weights / weights.sum()) @ v)
    return torch.stack(out).float()


# -- one step's attention -----------------------------------------------------------------------

STEPS = {  # the rows of a step: (tokens stored before, new tokens)
    "a first token": [(0, 1)],
    "one decode": [(5, 1)],
    "decodes at a block's last, first and second place": [(3, 1), (4, 1), (5, 1)],
    "decodes, the longest first": [(9, 1), (2, 1), (5, 1)],
    "decodes far apart": [(200, 1), (2, 1), (70, 1)],
    "a prompt": [(0, 9)],
    "a chunk": [(6, 5)],
    "a chunk between decodes": [(30, 1), (4, 4), (0, 1)],
    "short rows of all lengths": [(2, 3), (0, 7), (9, 1), (5, 2)],
    "the longest short row and the shortest long one": [(3, SHORT_ROW), (3, SHORT_ROW + 1)],
    "long rows among decodes": [(8, 1), (0, 40), (90, 1), (11, 20)],
}
GROUPS = {"a first token": 1, "decodes far apart": 2, "a chunk between decodes": 1, "long rows among decodes": 3,
          "the longest short row and the shortest long one": 2}


@pytest.mark.parametrize(("kind", "chunk"), KINDS_AND_CHUNKS)
@pytest.mark.parametrize("shape", ["t8-2", "t-wide", "t4-1", "t9-3"])
@pytest.mark.parametrize("rows", STEPS.values(), ids=STEPS)
def test_each_row_sees_its_own_past_and_nothing_else(rows, shape, kind, chunk, monkeypatch):
    """All other slots hold NaN: one of them read, even with weight 0, would show."""
    monkeypatch.setattr(attention, "CONTEXT_CHUNK", chunk)
    config = twins(shape).ours.config
    make = torch.Generator().manual_seed(1)
    heads, kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    storage, tables = storage_and_tables(config, [start + count for start, count in rows], NAN)
    keys, values = numbers(storage)
    layer, wanted, flat = 1, [], []
    for (start, count), table in zip(rows, tables, strict=True):
        k, v = torch.randn(2, start + count, kv_heads, head_dim, generator=make)
        q = torch.randn(count, heads, head_dim, generator=make)
        past = slots_of(table, range(start))
        keys[layer, past], values[layer, past] = k[:start], v[:start]
        wanted += [attend_in_loops(q[i], k[: start + i + 1], v[: start + i + 1]) for i in range(count)]
        flat.append((q, k[start:], v[start:]))
    before = keys.clone()
    spans = [RowSpan(start, count, table) for (start, count), table in zip(rows, tables, strict=True)]
    step = step_attention(storage, spans, kind)
    q, k, v = (torch.cat(parts) for parts in zip(*flat, strict=True))
    torch.testing.assert_close(step.attend(layer, q, k, v), torch.stack(wanted), **CLOSE)

    new = [slot for span in spans for slot in slots_of(span.block_table, range(span.start, span.start + span.count))]
    assert torch.equal(keys[layer, new], k) and torch.equal(values[layer, new], v)
    before[layer, new] = k
    assert torch.equal(keys.nan_to_num(9e9), before.nan_to_num(9e9)), "a slot that is nobody's was written"


@pytest.mark.parametrize("name", GROUPS)
def test_the_steps_above_are_grouped_as_meant(name):
    """Lest a case above no longer is what it says."""
    config = twins("t8-2").ours.config
    _, tables = storage_and_tables(config, [start + count for start, count in STEPS[name]], 0.0)
    spans = [RowSpan(start, count, table) for (start, count), table in zip(STEPS[name], tables, strict=True)]
    assert len(group_rows(spans)) == GROUPS[name]


@pytest.mark.parametrize("kind", KINDS)
def test_positions_of_a_step_are_those_of_its_rows(kind):
    config = twins("t8-2").ours.config
    rows = [(8, 1), (0, 5), (3, 2)]
    storage, tables = storage_and_tables(config, [start + count for start, count in rows], 0.0)
    spans = [RowSpan(start, count, table) for (start, count), table in zip(rows, tables, strict=True)]
    assert step_attention(storage, spans, kind).positions.tolist() == [8, 0, 1, 2, 3, 4, 3, 4]


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_that_does_not_store_reads_what_it_had_and_writes_to_scratch(kind):
    config = twins("t8-2").ours.config
    storage, (idle, busy) = storage_and_tables(config, [6, 6], NAN)
    keys, values = numbers(storage)
    make = torch.Generator().manual_seed(2)
    past_k, past_v = torch.randn(2, 6, 2, 8, generator=make)
    for table in (idle, busy):
        slots = slots_of(table, range(6))
        keys[0, slots], values[0, slots] = past_k, past_v
    before = keys.clone()
    q, (k, v) = torch.randn(2, 8, 8, generator=make), torch.randn(2, 2, 2, 8, generator=make)
    step = step_attention(storage, [RowSpan(5, 1, idle, stores=False), RowSpan(5, 1, busy)], kind)
    out = step.attend(0, q, k, v)
    torch.testing.assert_close(out[0], attend_in_loops(q[0], past_k, past_v), **CLOSE)
    changed = (keys != before) & ~(keys.isnan() & before.isnan())
    assert sorted(set(changed.nonzero()[:, 1].tolist())) == sorted((*slots_of(busy, range(5, 6)), len(changed[0]) - 1))


# -- a text in pieces ---------------------------------------------------------------------------

SPLITS = ([10], [4, 4, 2], [1, 9], [9, 1], [1] * 10)
TEXT = random_ids(10, seed=7)


def their_cache(shape: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each layer's keys and values [S, Hkv, D] of TEXT, as transformers caches them."""
    with torch.inference_mode():
        layers = twins(shape).theirs(torch.tensor([TEXT]), use_cache=True).past_key_values.layers
    return [(layer.keys[0].transpose(0, 1), layer.values[0].transpose(0, 1)) for layer in layers]


@pytest.mark.parametrize("shape", ["t8-2", "t-wide"])
@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_pieces_on_one_sequences_cache_are_the_whole(split, shape):
    """The same logits at all ten places, and the keys and values that transformers has, the first included."""
    model = twins(shape).ours
    cache, logits = SequenceCache(model, capacity=10), []
    for count in split:
        at = torch.arange(cache.length, cache.length + count)
        with torch.inference_mode():
            logits.append(model.forward(torch.tensor(TEXT)[at], at, cache))
        cache.length += count
    torch.testing.assert_close(torch.cat(logits), logits_of(model, TEXT), **CLOSE)
    for layer, (keys, values) in enumerate(their_cache(shape)):
        assert cache.keys[layer, 0].abs().min() > 0
        torch.testing.assert_close(cache.keys[layer], keys, **CLOSE)
        torch.testing.assert_close(cache.values[layer], values, **CLOSE)


@pytest.mark.parametrize(("kind", "chunk"), KINDS_AND_CHUNKS)
@pytest.mark.parametrize("filling", [0.0, NAN], ids=["zeros", "NaN"])
@pytest.mark.parametrize("shape", ["t8-2", "t-wide"])
@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_pieces_on_the_paged_store_are_the_whole(split, shape, filling, kind, chunk, monkeypatch):
    """Beside another row that moves at another pace and must not disturb it."""
    monkeypatch.setattr(attention, "CONTEXT_CHUNK", chunk)
    model = twins(shape).ours
    storage, (table, beside) = storage_and_tables(model.config, [10, 30], filling)
    other, logits, start, moved = random_ids(30, seed=8), [], 0, 0
    for count in split:
        spans = [RowSpan(moved, 3, beside), RowSpan(start, count, table)]
        step = step_attention(storage, spans, kind)
        tokens = torch.tensor(other[moved : moved + 3] + TEXT[start : start + count])
        with torch.inference_mode():
            logits.append(model.forward(tokens, step.positions, step)[3:])
        start, moved = start + count, moved + 3
    torch.testing.assert_close(torch.cat(logits), logits_of(model, TEXT), **CLOSE)
    slots = slots_of(table, range(10))
    for layer, theirs in enumerate(their_cache(shape)):
        for stored, wanted in zip(numbers(storage), theirs, strict=True):
            torch.testing.assert_close(stored[layer, slots], wanted, **CLOSE)


# -- in the engine ------------------------------------------------------------------------------

PROMPTS = [random_ids(n, seed=100 + n) for n in (9, 4, 1, 7, 5, 20)]
MOST = [SamplingParams(max_tokens=n) for n in (1, 8, 6, 3, 8, 2)]


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("kv", ["slots", "paged"])
@pytest.mark.parametrize("batching", ["static", "continuous"])
def test_a_dirty_pool_gives_the_very_logits_of_a_clean_one(batching, kv, chunk, monkeypatch):
    """To the last bit: what nobody stored may be anything, NaN included."""
    monkeypatch.setattr(attention, "CONTEXT_CHUNK", chunk)
    model, seen = twins("t-wide").ours, []
    for filling in (0.0, NAN):
        engine = make_engine(model, batching=batching, kv=kv, max_batch=3, max_step_tokens=21)
        fill(engine.executor.storage, filling)
        with monkeypatch.context() as patch:
            watch = Watch(patch, model)
            serve(engine, PROMPTS, MOST)
        seen.append(torch.cat(watch.logits))
    assert seen[1].isfinite().all() and torch.equal(*seen)


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("kv", ["slots", "paged"])
@pytest.mark.parametrize("batching", ["static", "continuous"])
def test_a_step_writes_the_slots_of_its_new_tokens_and_no_other(batching, kv, prefix_cache, monkeypatch):
    """Above all, an idle row of a static batch, which is in every forward, never writes into a block.

    Nor does anybody write into a block that is shared.
    """
    model = twins("t8-2").ours
    engine = make_engine(model, batching=batching, kv=kv, prefix_cache=prefix_cache, max_batch=3, max_step_tokens=21)
    storage, run = engine.executor.storage, engine.executor.run
    fill(storage, 0.0)  # what is there is compared before and after, and NaN equals nothing
    idle_rows = shared_blocks = 0

    def checked_run(plan):
        nonlocal idle_rows, shared_blocks
        before = [tensor.clone() for tensor in numbers(storage)]
        expected = set()
        for row in plan.rows:
            if not row.idle:
                expected |= set(slots_of(row.request.block_table, range(row.start, row.start + len(row.tokens))))
        outputs = run(plan)
        for old, new in zip(before, numbers(storage), strict=True):
            written = {slot for _, slot in (old != new).any(-1).any(-1).nonzero().tolist()}
            assert written - {engine.executor.scratch_slot} == expected
        idle_rows += sum(row.idle for row in plan.rows)
        pool = engine.scheduler.memory.pool
        shared_blocks += sum(references > 1 for references in pool.references)
        return outputs

    monkeypatch.setattr(engine.executor, "run", checked_run)
    serve(engine, [*PROMPTS, PROMPTS[5], PROMPTS[5]], [*MOST, MOST[1], MOST[1]])
    assert (idle_rows > 0) == (batching == "static")
    assert (shared_blocks > 0) == (kv == "paged" and prefix_cache)


def test_slots_and_scattered_blocks_give_the_very_same_logits(monkeypatch):
    """To the last bit, since only the addresses differ: indirection is no approximation."""
    model, seen = twins("t-wide").ours, []
    for kv in ("slots", "paged"):
        engine = make_engine(model, kv=kv, prefix_cache=False, max_batch=3, max_step_tokens=21)
        if kv == "paged":  # scatter: blocks are given out in the order of this dict
            free = engine.scheduler.memory.pool.free
            order = torch.randperm(len(free), generator=torch.Generator().manual_seed(0)).tolist()
            for block in order:
                free.move_to_end(block)
        with monkeypatch.context() as patch:
            watch = Watch(patch, model)
            for prompt, params in zip(PROMPTS, MOST, strict=True):
                engine.add(prompt, params)
            run_to_end(engine)
        seen.append(torch.cat(watch.logits))
    assert torch.equal(*seen)
