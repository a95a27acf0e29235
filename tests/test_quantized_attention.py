"""Rung 5 in service: whatever is batched, shared, preempted or rolled back, attention reads the bytes that are stored.

Each attention of a run is done again by hand, in double precision, over the very bytes that
lie in the row's blocks, decoded here from their definition. Both sides read the same bytes,
so the format's own error cancels and only the arithmetic of fp32 remains: sums over some
dozens of products, each off by 2**-24 of its size. Hence the tolerance below.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch
from parity import random_ids
from serving import make_engine, run_to_end
from tiny import tiny_config, tiny_model
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from minillm import Engine
from minillm.course.experiments.speculation import ReplayProposer
from minillm.fast import attention
from minillm.fast.attention import FastAttention
from minillm.ladder.attention import KVStorage, RowSpan
from minillm.ladder.quantized import fp8_encode, int4_decode, int4_encode, kv_bytes_per_token, kv_storage
from minillm.ladder.request import SamplingParams
from minillm.ladder.speculative import Speculator

SCALED = ("int8", "fp8", "int4")
CASES = {  # heads; tokens of context that are read at a time
    "8/2 heads of 12": ("t-wide", {}, 4096),
    "8/2 heads of 16, context in parts": ("t8-2", {"head_dim": 16}, 7),
}
FP32_SUMS = 2.0**-18  # 64 roundings of 2**-24, of the largest value stored: far below any format's step
BLOCK = 4


# -- the formats, from their definition -----------------------------------------------------------


def e4m3(bits: int) -> float:
    """Sign, four bits of exponent with bias 7, three of mantissa; exponent 0 has no leading one."""
    sign, exponent, mantissa = bits >> 7, bits >> 3 & 15, bits & 7
    size = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -size if sign else size


E4M3 = torch.tensor([e4m3(bits) for bits in range(256)], dtype=torch.float64)
SIGNED = torch.tensor([byte - 256 * (byte > 127) for byte in range(256)], dtype=torch.float64)  # two's complement
HALVES = torch.tensor([[byte % 16, byte // 16] for byte in range(256)], dtype=torch.float64)


def decoded(store, layer: int, slots: Tensor) -> Tensor:
    """What the bytes of `slots` [M] mean: [M, Hkv, D] in double precision."""
    codes, scales = store.codes[layer, slots].long(), store.scales[layer, slots].double()
    if hasattr(store, "minima"):
        numbers = HALVES[codes].flatten(-2).unflatten(-1, (scales.shape[-1], -1))
        return (numbers * scales[..., None] + store.minima[layer, slots].double()[..., None]).flatten(-2)
    return (E4M3 if store.encode is fp8_encode else SIGNED)[codes] * scales[..., None]


def by_hand(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """The row's newest q [n, Hq, D] over all its keys and values [S, Hkv, D] -> [n, Hq, D], in double precision."""
    group = q.shape[1] // keys.shape[1]
    keys, values = (x.repeat_interleave(group, dim=1) for x in (keys, values))
    scores = torch.einsum("ihd,jhd->hij", q.double(), keys) * q.shape[2] ** -0.5
    ahead = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1 + scores.shape[2] - scores.shape[1])
    return torch.einsum("hij,jhd->ihd", scores.masked_fill(ahead, -torch.inf).softmax(-1), values)


def raw(storage: KVStorage, layer: int, slots: Tensor) -> list[Tensor]:
    """All the bytes that belong to these slots, as whole numbers: what was never written may look like NaN."""
    both, names = (storage.keys, storage.values), ("codes", "scales", "minima")
    found = [getattr(store, name)[layer, slots] for store in both for name in names if hasattr(store, name)]
    return [tensor if tensor.dtype == torch.uint8 else tensor.view(torch.int16) for tensor in found]


# -- every attention of a run, done again ---------------------------------------------------------


@dataclass
class Checked:
    """What was compared, lest a run that compared nothing passes. worst: in units of the largest value stored."""

    tokens: int = 0
    worst: float = 0.0


def check_every_attention(monkeypatch, kv_format: str) -> Checked:
    """From here on each attention is compared with one by hand, and each write with what may be written."""
    seen, attend = Checked(), FastAttention.attend

    def checked(step, layer, q, k, v):
        everything = torch.arange(step.storage.keys.codes.shape[1])
        before = raw(step.storage, layer, everything)
        out = attend(step, layer, q, k, v)
        for old, new in zip(before, raw(step.storage, layer, everything), strict=True):
            changed = (old != new).flatten(1).any(1).nonzero().flatten()
            assert set(changed.tolist()) <= set(step.new_slots.tolist()), "a slot beside the new ones was written"
        q, k = step.storage.prepare(layer, q, k)
        for span, first in zip(step.spans, step.first.tolist(), strict=True):
            rows = slice(first, first + span.count)
            if span.stores:
                check_bytes(step.storage, layer, slots_of(span)[-1:], k[rows][-1:], v[rows][-1:], kv_format)
            compare(step.storage, layer, span, q[rows], out[rows], seen)
        return out

    monkeypatch.setattr(FastAttention, "attend", checked)
    return seen


def slots_of(span: RowSpan) -> Tensor:
    """Where the row's tokens lie, from the first to its newest."""
    places = torch.arange(span.start + span.count)
    return torch.tensor(span.block_table)[places // BLOCK] * BLOCK + places % BLOCK


def check_bytes(storage: KVStorage, layer: int, slot: Tensor, k: Tensor, v: Tensor, kv_format: str) -> None:
    """A new token's bytes in slot [1] are those that its k, v [1, Hkv, D] give alone: no scale is shared."""
    config = tiny_config("t8-2", num_hidden_layers=1, num_key_value_heads=k.shape[1], head_dim=k.shape[2])
    alone, nought = kv_storage(config, kv_format, 1), torch.tensor([0])
    alone.write(0, nought, k, v)
    pairs = zip(raw(storage, layer, slot), raw(alone, 0, nought), strict=True)
    assert all(torch.equal(*pair) for pair in pairs), "a token's bytes depend on its company"


def compare(storage: KVStorage, layer: int, span: RowSpan, q: Tensor, out: Tensor, seen: Checked) -> None:
    """out [n, Hq, D] must be attention of q [n, Hq, D], as stored against, over what the row's blocks hold."""
    keys, values = (decoded(store, layer, slots_of(span)) for store in (storage.keys, storage.values))
    error = (out - by_hand(q, keys, values)).abs().max() / values.abs().max()
    seen.worst, seen.tokens = max(seen.worst, float(error)), seen.tokens + len(q)


PROMPTS = [random_ids(n, seed=100 + n) for n in (9, 8, 1, 7, 5)]
MOST = [SamplingParams(max_tokens=n) for n in (1, 8, 6, 3, 8)]
TWICE = [PROMPTS[1], [*PROMPTS[1], 5], PROMPTS[1], PROMPTS[1][:4]]  # two whole blocks: found but for the last token
RUNS = {  # settings; prompts; whether what the case is about has happened
    "a static batch whose longest row ends first": (
        {"batching": "static", "kv": "slots", "max_batch": 3}, PROMPTS,
        lambda engine: any(step.idle_rows for step in engine.records.steps)),
    "slots": ({"kv": "slots", "max_batch": 3}, PROMPTS, lambda engine: len(engine.records.steps)),
    "prompts in chunks": ({"max_step_tokens": 5, "max_batch": 3}, PROMPTS,
                          lambda engine: any(0 < step.prompt_tokens < 9 for step in engine.records.steps)),
    "prompts that are wholly cached": ({"max_batch": 1}, TWICE, lambda engine: engine.records.totals["cached_tokens"]),
    "too few blocks": ({"blocks": 5}, PROMPTS, lambda engine: engine.records.totals["preempted"]),
    "drafts rolled back": ({"drafts": 3}, PROMPTS, lambda engine: engine.records.totals["drafted_tokens"]
                           - engine.records.totals["accepted_tokens"]),
}


def half_right(model, kv_format: str) -> Speculator:
    """Every second draft is the model's own next token, the others are not."""
    engine = make_engine(model, kv_format=kv_format)
    answers = engine.generate(PROMPTS, SamplingParams(max_tokens=12, ignore_eos=True))
    known = {tuple(prompt): answer.token_ids for prompt, answer in zip(PROMPTS, answers, strict=True)}
    return Speculator(ReplayProposer(known, lambda i: i % 2 == 0), 3)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("kv_format", SCALED)
def test_attention_is_that_over_the_stored_bytes(kv_format, name, case, monkeypatch):
    (settings, prompts, happened), (shape, changes, chunk) = RUNS[name], CASES[case]
    model, settings = tiny_model(shape, **changes), dict(settings)
    if settings.pop("drafts", None):
        settings["speculator"] = half_right(model, kv_format)
    monkeypatch.setattr(attention, "CONTEXT_CHUNK", chunk)
    engine = make_engine(model, kv_format=kv_format, **settings)
    seen = check_every_attention(monkeypatch, kv_format)
    for prompt, params in zip(prompts, MOST, strict=False):
        engine.add(prompt, params)
    run_to_end(engine)
    assert happened(engine) and seen.tokens >= 2 * sum(map(len, prompts[:1]))
    assert seen.worst < FP32_SUMS


@pytest.mark.parametrize("kv_format", SCALED)
def test_rolled_back_drafts_leave_what_a_fresh_prefill_would_store(kv_format):
    """SPD-7: behind accepted and refused drafts, the committed tokens' bytes are those of a run without drafts."""
    model = tiny_model("t-wide")
    plain, drafted = make_engine(model, kv_format=kv_format), make_engine(
        model, kv_format=kv_format, speculator=half_right(model, kv_format))
    texts = []
    for engine in (plain, drafted):
        texts.append([a.token_ids for a in engine.generate(PROMPTS, SamplingParams(max_tokens=12, ignore_eos=True))])
    assert texts[0] == texts[1]


# -- memory ---------------------------------------------------------------------------------------


class LargestTensor(TorchDispatchMode):
    """Notes the bytes of the largest tensor that any operation makes; views of the cache itself are none."""

    def __init__(self, storage: KVStorage) -> None:
        super().__init__()
        self.bytes = 0
        self.cache = {tensor.untyped_storage().data_ptr() for store in (storage.keys, storage.values)
                      for tensor in vars(store).values() if isinstance(tensor, Tensor)}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in self.cache:
                self.bytes = max(self.bytes, tensor.numel() * tensor.element_size())
        return out


def largest_of_a_step(kv_format: str, context: int) -> int:
    """Bytes of the largest tensor made while one token attends to `context` stored ones."""
    config = tiny_config("t8-2", head_dim=16, num_hidden_layers=1)
    storage = kv_storage(config, kv_format, context + BLOCK)
    span = RowSpan(context - 1, 1, range(context // BLOCK))
    step = FastAttention(storage, [span], BLOCK, context)
    q, k = torch.randn(1, 8, 16), torch.randn(1, 2, 16)
    step.attend(0, q, k, k)  # makes, once a step for all layers, a slot number and a mask for each token
    with LargestTensor(storage) as largest:
        step.attend(0, q, k, k)
    return largest.bytes


@pytest.mark.parametrize("kv_format", SCALED)
def test_memory_of_a_step_stays_flat_as_the_context_grows(kv_format, monkeypatch):
    """The cache is dequantised a chunk at a time: eight times the context makes no larger tensor."""
    monkeypatch.setattr(attention, "CONTEXT_CHUNK", 64)
    short, long = (largest_of_a_step(kv_format, context) for context in (256, 2048))
    assert long == short
    monkeypatch.setattr(attention, "CONTEXT_CHUNK", 4096)  # all at once: the measure sees it
    assert largest_of_a_step(kv_format, 2048) >= 7 * largest_of_a_step(kv_format, 256)


@pytest.mark.parametrize(("kv_format", "times"), [("int8", 128 / 66), ("fp8", 128 / 66), ("int4", 128 / 40)])
def test_the_pool_holds_so_many_times_the_tokens_of_16_bit(kv_format, times):
    """A head of 64, as in most models: 1.94 for 8 bits, and 3.2, not 4, for int4, since scales are counted."""
    model = tiny_model("t8-2", head_dim=64)
    memory = 1000 * BLOCK * kv_bytes_per_token(model.config, "bf16")
    engines = {name: Engine(model, kv_format=name, kv_memory=memory, block_size=BLOCK) for name in ("bf16", kv_format)}
    blocks = {name: engine.scheduler.memory.pool.num_blocks for name, engine in engines.items()}
    assert blocks["bf16"] == 1000 and blocks[kv_format] == int(1000 * times)
    for engine in engines.values():  # and no more is allocated than the memory, but for the scratch slot
        storage = engine.executor.storage
        assert storage.nbytes <= memory + storage.nbytes // (engine.executor.scratch_slot + 1)


# -- what a code can hold -------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", [8, 12, 64])
@pytest.mark.parametrize("kv_format", SCALED)
def test_an_error_is_at_most_half_a_step_of_the_format(kv_format, head_dim):
    """Half a step, of the scale as stored. A stored scale is off by 2**-11, which at the largest number adds to it."""
    config = tiny_config("t8-2", head_dim=head_dim, num_key_value_heads=2, num_hidden_layers=1)
    x = torch.randn(200, 2, head_dim, generator=torch.Generator().manual_seed(0)) * 3
    x[0], x[1, 0] = 0, x[1, 0] * 1e4
    storage, slots = kv_storage(config, kv_format, len(x)), torch.arange(len(x))
    storage.write(0, slots, x, x)
    error, largest = (storage.read(0, slots)[0] - x).abs(), x.abs().amax(-1, keepdim=True)
    if kv_format == "int8":
        most = largest / 127 / 2 + largest * 2**-10
    elif kv_format == "fp8":  # three bits of mantissa; below the smallest normal number its step stays
        most = torch.maximum(x.abs() * 2**-4, largest / 448 * 2.0**-10) + largest * 2**-10
    else:
        groups = x.unflatten(-1, (-1, storage.keys.group))
        low, high = groups.aminmax(dim=-1, keepdim=True)
        most = ((high - low) / 15 / 2 + torch.maximum(low.abs(), high.abs()) * 2**-9).expand_as(groups).flatten(-2)
    assert (error <= most + 1e-7).all()


@pytest.mark.parametrize("kv_format", SCALED)
def test_representable_numbers_come_back_exactly(kv_format):
    """QNT-4: every code once, with a scale that is a power of two."""
    config = tiny_config("t8-2", head_dim=32, num_key_value_heads=1, num_hidden_layers=1)
    if kv_format == "int8":
        x = torch.arange(-127, 128).float() / 8
    elif kv_format == "fp8":
        x = E4M3[[bits for bits in range(256) if bits % 128 < 127]].float() / 8  # 127 and 255 are NaN
    else:
        x = (torch.arange(16) - 5).float() / 4
    extremes = torch.tensor([float(x.max()), float(x.min())])
    x = torch.cat([torch.cat((extremes, part, part.new_zeros(30 - len(part)))) for part in x.split(30)]).view(-1, 1, 32)
    storage, slots = kv_storage(config, kv_format, len(x)), torch.arange(len(x))
    storage.write(0, slots, x, x)
    assert torch.equal(storage.read(0, slots)[0], x)


@pytest.mark.parametrize("kv_format", SCALED)
@pytest.mark.parametrize("value", [0.0, 1e-38, -1e-38, 3e-8, 5.0, 6e4, 1e8])
def test_scales_are_finite_and_above_zero_whatever_is_stored(kv_format, value):
    """QNT-1: the scale itself, since int8 hides a zero one. 1e8 is clamped: fp16 cannot scale to it."""
    config = tiny_config("t8-2", num_hidden_layers=1)
    storage, x = kv_storage(config, kv_format, 2), torch.full((1, 2, 8), value)
    storage.write(0, torch.tensor([0]), x, x)
    scales = storage.keys.scales[:, :1]  # of the slot that was written
    assert scales.isfinite().all() and (scales > 0).all()
    read = storage.read(0, torch.tensor([0]))[0]
    assert read.isfinite().all() and (value or not read.any())


@pytest.mark.parametrize("head_dim", [7, 15])
def test_a_head_that_cannot_be_packed_is_refused_when_it_is_built(head_dim):
    """QNT-2: not at the first write, and by the calculator too."""
    config = tiny_config("t8-2", head_dim=head_dim + 1)  # RoPE itself wants an even head
    object.__setattr__(config, "head_dim", head_dim)
    for build in (lambda: kv_storage(config, "int4", 4), lambda: kv_bytes_per_token(config, "int4")):
        with pytest.raises(ValueError, match=f"head_dim {head_dim} is odd: take int8"):
            build()


def test_all_sixteen_halves_survive_packing_in_both_places():
    """QNT-4."""
    pairs = torch.tensor(list(itertools.product(range(16), repeat=2)))
    numbers = torch.cat((torch.tensor([[0, 15]]).expand(len(pairs), 2), pairs), dim=1).float()
    codes, scales, minima = int4_encode(numbers, 4)
    assert torch.equal(HALVES[codes.long()].flatten(1), numbers.double())
    assert torch.equal(int4_decode(codes, scales, minima), numbers)
