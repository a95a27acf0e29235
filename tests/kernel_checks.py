"""The Triton kernels against the plain path: on a GPU at real sizes, else tiny, in Triton's interpreter.

`test_kernels.py` runs this file in a process of its own, since TRITON_INTERPRET counts when
triton is imported. By hand, without a GPU: TRITON_INTERPRET=1 python -m pytest tests/kernel_checks.py
"""

from __future__ import annotations

import os
import random

import pytest
import torch
from serving import numbers
from test_cached_attention import attend_in_loops
from tiny import random_tensors, tiny_config, tiny_model

from minillm import Engine, SamplingParams
from minillm.extras.draft_model import DraftModelProposer
from minillm.fast import attention, fused, kernels, matvec, weight_formats, weight_kernels
from minillm.fast import graphs as graphs_module
from minillm.fast.attention import SHORT_ROW, FastAttention
from minillm.fast.graphs import CudaRecorder, StepGraphs
from minillm.fast.model import FastLlama
from minillm.fast.weight_formats import Int4Linear, Int8Linear, int4_dense
from minillm.ladder.attention import KVStorage, RowSpan
from minillm.ladder.decode import NoCache
from minillm.ladder.quantized import Rotation, kv_storage, storage_in, unpack_nibbles
from minillm.ladder.speculative import NgramProposer, Speculator
from minillm.load.weights import make_model
from minillm.model.llama import DecoderLayer, Llama, gate, rms_norm, rotate, rotation_for

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
LARGE_SIZES = GPU or bool(os.environ.get("MINILLM_GPU_SIZES"))  # so that their sums can be tried without one
HEAD_DIMS = (64, 128) if LARGE_SIZES else (16, 12)  # 12: no power of two
BLOCK = 16 if LARGE_SIZES else 4
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}  # of the largest output

CODE_STEP = {"bf16": 0.0, "int8": 0.01, "fp8": 0.06, "int4": 0.2}  # what one code more or less changes

# (tokens stored before, new tokens) of each row
RAGGED = [(0, 1), (BLOCK - 1, 1), (BLOCK, 1), (2 * BLOCK - 1, 2), (5, SHORT_ROW + 1)]
EDGES = RAGGED if LARGE_SIZES else [(0, 1), (BLOCK - 1, 1), (2 * BLOCK - 1, 2)]
LONG = [(2000, 1), (3333, 4), (700, 300), (1, 1)] if GPU else [(61, 1), (40, 2), (1, 1)]


@pytest.fixture(autouse=True)
def small_machine(monkeypatch):
    """In the interpreter a program is slow: a chip that a few of them fill, and tiles of few keys."""
    if not GPU:
        monkeypatch.setattr(kernels, "PROGRAMS", 8)
        monkeypatch.setattr(kernels, "KEYS", dict.fromkeys(kernels.KEYS, 16))
        monkeypatch.setattr(kernels, "LONG_TILE", 32)


def on_device(x: torch.Tensor) -> torch.Tensor:
    """The same numbers there, as far apart: `to` alone would make them dense."""
    if x.device == DEVICE or x.numel() == 0:
        return x.to(DEVICE)
    whole = torch.empty(1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True)),
                        dtype=x.dtype, device=DEVICE)
    view = whole.as_strided(x.shape, x.stride())
    view.copy_(x)
    return view


def stores(storage: KVStorage) -> list[torch.Tensor]:
    """Every tensor that a storage keeps."""
    names = ("numbers", "codes", "scales", "minima")
    return [getattr(s, n) for s in (storage.keys, storage.values) for n in names if hasattr(s, n)]


def slots_of(table: list[int], positions: range) -> list[int]:
    """Where the block table puts these positions, in blocks of this file's size."""
    return [table[at // BLOCK] * BLOCK + at % BLOCK for at in positions]


def model_here(**changes) -> Llama:
    """The tiny model, on the device."""
    config = tiny_config("t4-1", **changes)
    return make_model(config, random_tensors(config), DEVICE)


class Case:
    """A step's rows over two equal stores, one here for the plain path in fp32, one for the kernels."""

    def __init__(self, rows, kv_format, head_dim, query_group, dtype, kv_heads=1, seed=0, rotated=False):
        make = torch.Generator().manual_seed(seed)
        self.config = tiny_config(head_dim=head_dim, num_key_value_heads=kv_heads,
                                  num_attention_heads=kv_heads * query_group)
        needs = [-(-(start + count) // BLOCK) for start, count in rows]
        blocks = torch.randperm(sum(needs) + 3, generator=make).tolist()
        self.scratch, self.rows, self.dtype = len(blocks) * BLOCK, rows, dtype
        storage = storage_in(kv_format, Rotation(head_dim) if rotated else None)
        self.plain, self.store = (storage(self.config, self.scratch + 1, at) for at in ("cpu", DEVICE))
        for tensor in stores(self.plain):  # 0x7F is NaN in e4m3, and the largest number elsewhere
            tensor.fill_(0x7F if tensor.dtype == torch.uint8 else torch.nan)
        ends = torch.tensor(needs).cumsum(0).tolist()
        self.spans = [
            RowSpan(start, count, blocks[end - need : end])
            for (start, count), end, need in zip(rows, ends, needs, strict=True)
        ]
        past = [slot for span in self.spans for slot in slots_of(span.block_table, range(span.start))]
        if past:
            self.plain.write(1, torch.tensor(past), *torch.randn(2, len(past), kv_heads, head_dim, generator=make))
        for ours, theirs in zip(stores(self.store), stores(self.plain), strict=True):
            ours.copy_(theirs)
        tokens = sum(count for _, count in rows)
        both = torch.randn(tokens, kv_heads * query_group + kv_heads, head_dim, generator=make).to(dtype)
        self.rotated, self.code_step = rotated, CODE_STEP[kv_format] if rotated else 0.0
        self.q, self.k = both.split((kv_heads * query_group, kv_heads), dim=1)  # strided, as the model hands them over
        self.v = torch.randn(tokens, kv_heads, head_dim, generator=make).to(dtype)

    def step(self, storage) -> FastAttention:
        return FastAttention(storage, self.spans, BLOCK, self.scratch)

    def check(self):
        want = self.step(self.plain).attend(1, *(x.float() for x in (self.q, self.k, self.v)))
        launches = kernels.step_kernels(self.step(self.store), self.config.query_group)
        got = launches.attend(1, *map(on_device, (self.q, self.k, self.v)))
        for ours, theirs in zip(stores(self.store), stores(self.plain), strict=True):
            if self.rotated:  # by a product, whose last bit may move a code
                break
            bits = (tensor.cpu().view(torch.uint8) for tensor in (ours, theirs))
            assert torch.equal(*bits), "a new token is stored in other bytes, or elsewhere"
        error = (got.cpu().float() - want).abs().max() / want.abs().max()
        assert got.isfinite().all() and error < TOLERANCE[self.dtype] + self.code_step


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("kv_format", DTYPES)
def test_native_formats_as_the_plain_path(kv_format, head_dim):
    Case(RAGGED if kv_format == "fp32" else EDGES, kv_format, head_dim, 3, DTYPES[kv_format], kv_heads=2).check()


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("kv_format", ["int8", "fp8", "int4"])
def test_quantised_formats_as_their_dequantised_reference(kv_format, head_dim):
    Case(RAGGED if kv_format == "int8" else EDGES, kv_format, head_dim, 3, torch.float32).check()


@pytest.mark.parametrize("kv_format", ["int8", "fp8", "int4"])
def test_a_model_in_bf16_over_quantised_formats(kv_format):
    Case(EDGES, kv_format, HEAD_DIMS[0], 4, torch.bfloat16).check()


MANY = [(1, 3, 17, 64, 256), 2000] if GPU else [(1, 6), 40]  # rows of a step, the longest context of most


@pytest.mark.parametrize("number", MANY[0])
@pytest.mark.parametrize("kv_format", ["bf16", "int8", "fp8", "int4"])
def test_a_step_of_a_large_model_in_bf16_with_many_rows_and_one_long_context(kv_format, number):
    """On a GPU one context of 8,192, which is attended in parts beside others that are not."""
    make = torch.Generator().manual_seed(number)
    rows = [(int(start), 1) for start in torch.randint(1, MANY[1], (number,), generator=make)]
    Case([(8191 if GPU else 70, 1), *rows[1:]], kv_format, HEAD_DIMS[-1] if GPU else 16, 4, torch.bfloat16).check()


@pytest.mark.parametrize("kv_format", ["bf16", "int8", "fp8", "int4"])
def test_rotated_keys_over_every_format(kv_format):
    Case(EDGES, kv_format, HEAD_DIMS[0], 2, torch.bfloat16, kv_heads=2, rotated=True).check()


@pytest.mark.parametrize("kv_format", ["bf16", "int8", "fp8", "int4"] if GPU else ["int8"])
def test_slots_past_two_to_the_31_numbers(kv_format):
    """Of a store that large only the slots in use are ever touched; the plain path reads the very same ones."""
    config = tiny_config(head_dim=64, num_key_value_heads=8, num_attention_heads=16, num_hidden_layers=2)
    blocks = (1 << 31) // (8 * 64 * BLOCK) * (2 if kv_format == "int4" else 1) + 4
    store = kv_storage(config, kv_format, blocks * BLOCK + 1, DEVICE)
    assert stores(store)[0][1].storage_offset() > 1 << 31
    make = torch.Generator().manual_seed(1)
    q, k, v, past = (torch.randn(n, h, 64, generator=make).to(DEVICE) for n, h in ((1, 16), (1, 8), (1, 8), (BLOCK, 8)))
    table = [blocks - 1, blocks - 3]
    store.write(1, torch.tensor(slots_of(table, range(BLOCK)), device=DEVICE), past, past.flip(0))
    step = FastAttention(store, [RowSpan(BLOCK, 1, table)], BLOCK, blocks * BLOCK)
    got = kernels.step_kernels(step, 2).attend(1, q, k, v)
    slots = torch.tensor(slots_of(table, range(BLOCK + 1)), device=DEVICE)
    keys, values = (x.float() for x in store.read(1, slots))  # each [S, Hkv, D]
    scores = torch.einsum("hgd,shd->hgs", q[0].unflatten(0, (8, 2)), keys) / 8
    want = torch.einsum("hgs,shd->hgd", scores.softmax(-1), values).flatten(0, 1)
    torch.testing.assert_close(got[0], want, rtol=0, atol=2e-5)


@pytest.mark.parametrize("query_group", range(1, 10))
def test_one_to_nine_query_heads_share_a_key(query_group):
    Case([(BLOCK, 1), (2, 3)], "fp32", HEAD_DIMS[0], query_group, torch.float32, kv_heads=2).check()


@pytest.mark.parametrize("programs", [1, 12, 4096])
def test_a_context_in_parts_is_the_whole(programs, monkeypatch):
    """In one part, in several, and in more than a short context has."""
    monkeypatch.setattr(kernels, "PROGRAMS", programs)
    monkeypatch.setattr(kernels, "MOST_SPLITS", 5)
    Case(LONG, "fp32", HEAD_DIMS[0], 2, torch.float32).check()


def test_the_kernel_as_attention_in_plain_loops():
    """Against a loop over heads in double precision: the plain path might share a mistake."""
    case = Case([(2 * BLOCK + 1, 1)], "fp32", HEAD_DIMS[0], 4, torch.float32, kv_heads=2)
    slots = slots_of(case.spans[0].block_table, range(2 * BLOCK + 1))
    keys, values = (tensor[1, slots] for tensor in numbers(case.plain))
    want = attend_in_loops(case.q[0], torch.cat((keys, case.k)), torch.cat((values, case.v)))
    launches = kernels.step_kernels(case.step(case.store), case.config.query_group)
    got = launches.attend(1, *map(on_device, (case.q, case.k, case.v)))
    torch.testing.assert_close(got[0].cpu(), want, rtol=0, atol=1e-5)


def test_every_code_of_fp8_is_decoded_and_encoded_as_torch_does():
    """All numbers that e4m3 has, and all that lie half-way between two, where a tie goes to the even code."""
    codes = torch.arange(127, dtype=torch.uint8)
    exact = codes.view(torch.float8_e4m3fn).float()
    x = torch.cat((exact, (exact[1:] + exact[:-1]) / 2, torch.full((3,), 448.0)))  # 256 numbers, the scale 1
    config = tiny_config(head_dim=256, num_key_value_heads=2, num_attention_heads=2)
    plain, store = (kv_storage(config, "fp8", 1, at) for at in ("cpu", DEVICE))
    k = torch.stack((x, -x))[None]  # [1, 2, 256]
    plain.write(0, torch.tensor([0]), k, k)
    step = FastAttention(store, [RowSpan(0, 1, [0])], 1, 0)
    got = kernels.step_kernels(step, 1).attend(0, k.to(DEVICE), k.to(DEVICE), k.to(DEVICE))
    assert torch.equal(store.keys.codes[0].cpu(), plain.keys.codes[0])
    torch.testing.assert_close(got.cpu(), plain.read(0, torch.tensor([0]))[1], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "settings",
    [{"batching": "static", "kv": "slots"}, {"max_step_tokens": 5, "kv_format": "int8"}],
    ids=["an idle row of a static batch", "chunks beside decodes, in int8"],
)
def test_the_engine_gives_the_plain_paths_tokens(settings, monkeypatch):
    model = model_here(num_hidden_layers=1)
    prompts, params = [[5, 6], [50, 9, 10, 11, 12]], [SamplingParams(max_tokens=n) for n in (1, 3)]
    answers = []
    for chosen in (None, kernels):
        monkeypatch.setattr(attention, "kernels_for", lambda device, chosen=chosen: chosen)
        engine = Engine(model, block_size=4, max_context=16, cuda_graphs=False, **settings)
        answers.append([answer.token_ids for answer in engine.generate(prompts, params)])
    assert answers[0] == answers[1]


# -- between the matrices -----------------------------------------------------------------------

SHAPES = [(4096, 128, 14336), (576, 64, 1536), (36, 12, 40)] if GPU else [(36, 12, 40)]  # hidden, head_dim, inner


def apart(rows: int, columns: int, dtype, seed: int) -> torch.Tensor:
    """Random numbers [rows, columns] whose rows lie in wider ones, the last row zeros."""
    wide = torch.randn(rows, columns + 5, generator=torch.Generator().manual_seed(seed)).to(dtype)
    wide[-1:] = 0
    return wide[:, 2 : 2 + columns]


def moved(arguments, move) -> list:
    """The arguments with each tensor moved, also those in tuples."""
    return [
        move(x) if isinstance(x, torch.Tensor) else tuple(moved(x, move)) if isinstance(x, tuple) else x
        for x in arguments
    ]


def add_norm(x, change, weight, eps):
    return x + change, rms_norm(x + change, weight, eps)


PLAIN = {"add_norm": add_norm, "gate": gate, "rotate": rotate}


def check_fused(function: str, *arguments):
    """On the device as the plain function computes it in fp32 from the same numbers."""
    want = PLAIN[function](*moved(arguments, torch.Tensor.float))
    got = getattr(fused, function)(*moved(arguments, on_device))
    for ours, theirs in zip(*(x if isinstance(x, tuple) else (x,) for x in (got, want)), strict=True):
        assert ours.dtype == arguments[0].dtype and ours.shape == theirs.shape and ours.isfinite().all()
        if theirs.numel():
            error = (ours.cpu().float() - theirs).abs().max()
            assert error <= TOLERANCE[ours.dtype] * theirs.abs().max()


@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize(("hidden", "head_dim", "inner"), SHAPES)
def test_fused_steps_as_the_plain_ones(hidden, head_dim, inner, dtype, rows):
    """Eight query heads and two KV heads, whose q and k are part of a wider row, as the model hands them over."""
    x, change = apart(rows, hidden, dtype, 1), apart(rows, hidden, dtype, 2)
    check_fused("add_norm", x, change, torch.rand(hidden).to(dtype), 1e-5)
    check_fused("gate", apart(rows, 2 * inner, dtype, 3))
    heads = apart(rows, 12 * head_dim, dtype, 4).unflatten(1, (12, head_dim))[:, :10]  # [N, Hq + Hkv, D]
    rotation = rotation_for(torch.arange(rows) * 700, torch.logspace(0, -4, head_dim // 2), dtype)
    for norm in (None, torch.rand(10, head_dim).to(dtype)):
        check_fused("rotate", heads, rotation, norm, 1e-6)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_model_of_fused_steps_gives_the_plain_models_logits(family, monkeypatch):
    """Qwen3 norms its heads before it rotates them."""
    config = tiny_config("t-wide", hidden_size=36, model_type=family)
    tokens = torch.tensor([5, 6, 7, 50])
    logits = []
    for device, layer in (("cpu", DecoderLayer), (DEVICE, fused.FusedLayer)):
        monkeypatch.setattr(Llama, "layer", layer)
        model = Llama(config, random_tensors(config), device)
        with torch.inference_mode():
            logits.append(model.forward(*(x.to(device) for x in (tokens, torch.arange(4))), NoCache()).cpu())
    torch.testing.assert_close(*logits, rtol=0, atol=1e-4)


# -- CUDA graphs --------------------------------------------------------------------------------


class Replays:
    """Stands for CUDA's graphs where there is none: runs the recorded callable again, into the same result."""

    def __init__(self):
        self.replays = 0

    def __call__(self, run):
        result = run().clone()

        def replay():
            self.replays += 1
            result.copy_(run())

        return replay, result


def graphs_for(model, storage, most_tokens=4):
    """On a GPU real ones."""
    return StepGraphs(model, storage, 4, storage_slots(storage) - 1, most_tokens, 8, None if GPU else Replays())


def storage_slots(storage):
    return stores(storage)[0].shape[1]


@pytest.mark.parametrize("rows", [[(9, 1), (3, 1), (4, 1)], [(5, 2), (0, 1)], [(2, 1)]], ids=str)
def test_a_padded_replay_gives_the_logits_of_the_forward_it_stands_for(rows, monkeypatch):
    """Decodes, a row that verifies a draft, and a step that needs no padding; twice over the same buffers."""
    monkeypatch.setattr(graphs_module, "kernels_for", lambda device: kernels)
    model = model_here()
    make = torch.Generator().manual_seed(3)
    plain, store = (kv_storage(model.config, "fp32", 13 * 4 + 1, at) for at in ("cpu", DEVICE))
    for tensor in stores(plain):
        tensor.copy_(torch.randn(tensor.shape, generator=make))
    for ours, theirs in zip(stores(store), stores(plain), strict=True):
        ours.copy_(theirs)
    graphs = graphs_for(model, store)
    for turn in range(2):
        blocks = torch.randperm(13, generator=make).tolist()
        spans = [RowSpan(start + turn, count, [blocks.pop() for _ in range(4)]) for start, count in rows]
        tokens = torch.randint(97, (sum(count for _, count in rows),), generator=make)
        step = FastAttention(plain, spans, 4, 52)
        with torch.inference_mode():
            want = tiny_model("t4-1").forward(tokens, step.positions, step)
            step = FastAttention(store, spans, 4, 52)
            assert graphs.fits(step)
            got = model.logits(graphs.hidden_states(tokens, step))
        torch.testing.assert_close(got.cpu(), want, rtol=0, atol=1e-4)
        for ours, theirs in zip(stores(store), stores(plain), strict=True):
            assert torch.allclose(ours[:, :-1].cpu(), theirs[:, :-1], atol=1e-5), "padding was stored in a block"
    assert len(graphs.graphs) == 1 and (GPU or graphs.record.replays == 2)


def test_graphs_recorded_before_they_are_needed_store_nothing_and_replay_as_others(monkeypatch):
    monkeypatch.setattr(graphs_module, "kernels_for", lambda device: kernels)
    model = model_here(num_hidden_layers=1)
    store = kv_storage(model.config, "fp32", 5 * 4 + 1, DEVICE)
    for tensor in stores(store):
        tensor.zero_()
    graphs = graphs_for(model, store, most_tokens=2)
    graphs.record_all()
    assert set(graphs.graphs) == set(graphs.sizes) == {1, 2}
    assert all(not tensor[:, :-1].any() for tensor in stores(store)), "padding was stored in a block"
    step = FastAttention(store, [RowSpan(0, 1, [3])], 4, 20)
    with torch.inference_mode():
        got = graphs.hidden_states(torch.tensor([7]), step).cpu()
    want = tiny_model("t4-1", num_hidden_layers=1).hidden_states(torch.tensor([7]), torch.tensor([0]), NoCache())
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4)


def test_an_engine_with_graphs_gives_the_plain_paths_tokens(monkeypatch):
    """Speculation with right and wrong drafts: rows of several lengths replay the graphs of decodes."""
    monkeypatch.setattr(graphs_module, "CudaRecorder", CudaRecorder if GPU else Replays)
    prompts, params = [[5, 6, 5, 6, 5], [50]], SamplingParams(max_tokens=3)
    answers, settings = [], {"block_size": 4, "max_context": 16, "max_batch": 2}
    for chosen in (None, kernels):
        monkeypatch.setattr(attention, "kernels_for", lambda device, chosen=chosen: chosen)
        monkeypatch.setattr(graphs_module, "kernels_for", lambda device, chosen=chosen: chosen)
        monkeypatch.setattr(FastLlama, "layer", fused.FusedLayer if chosen else DecoderLayer)
        model = model_here(num_hidden_layers=1)
        engine = Engine(model, speculator=Speculator(NgramProposer(), 2), **settings)
        answers.append([answer.token_ids for answer in engine.generate(prompts, params)])
    assert answers[0] == answers[1]
    assert engine.executor.graphs.graphs


# -- weights in few bits --------------------------------------------------------------------------

WEIGHTS = [(4096, 4096), (6144, 4096), (97, 576)] if GPU else [(48, 128), (33, 64)]  # outputs, inputs


@pytest.mark.parametrize("rows", [1, 5, 100])
@pytest.mark.parametrize("shape", WEIGHTS, ids=str)
@pytest.mark.parametrize("kind", [Int8Linear, Int4Linear])
def test_products_over_codes_are_those_of_the_dequantised_weight(kind, shape, rows, monkeypatch):
    """Activations whose rows lie apart; in bf16 on a GPU."""
    monkeypatch.setattr(weight_formats, "triton_module", lambda name, device: weight_kernels)
    monkeypatch.setattr(weight_formats, "kernel_fits", lambda weight: False)  # the processor's kernel packs otherwise
    dtype = torch.bfloat16 if GPU else torch.float32
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(7)).to(DEVICE)
    linear, x = kind(weight), apart(rows + 1, shape[1], dtype, 8)[:rows]
    if kind is Int8Linear:
        dense = linear.codes.float() * linear.scales.float()[:, None]
    else:
        dense = int4_dense(unpack_nibbles(linear.codes), *linear.scales)
    want = x.float().to(DEVICE) @ dense.to(dtype).float().T
    error = (linear(on_device(x)).float() - want).abs().max() / want.abs().max()
    assert error < TOLERANCE[dtype]


# -- whole engines --------------------------------------------------------------------------------

LARGE = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
         "head_dim": 128}  # Llama-3-8B's layers
REQUESTS, MOST, CONTEXT = (40, 60, 512) if GPU else (3, 4, 16)  # with the rows below some 200 steps on a GPU
KINDS = {
    "greedy": ({}, {}), "sampled": ({"temperature": 1.0, "top_k": 20}, {}),
    "n-grams": ({}, {"speculator": Speculator(NgramProposer(), 2)}),
    "n-grams, sampled": ({"temperature": 0.7}, {"speculator": Speculator(NgramProposer(), 2)}),
    "int8 keys": ({}, {"kv_format": "int8"}),
}


def served(model, settings: dict, sampling: dict, graphs: bool, ahead: bool) -> list[list[int]]:
    """The tokens of requests of random lengths, more than fit into a step, on a new engine."""
    draw = random.Random(4)
    prompts = [[draw.randrange(97) for _ in range(draw.randint(1, CONTEXT - MOST - 1))] for _ in range(REQUESTS)]
    params = [SamplingParams(draw.randint(1, MOST), ignore_eos=True, **sampling) for _ in prompts]
    engine = Engine(model, max_context=CONTEXT, max_batch=12 if GPU else 2, max_step_tokens=256 if GPU else 12,
                    block_size=BLOCK, cuda_graphs="auto" if graphs else False, **settings)
    engine.runs_ahead = ahead
    answers = [answer.token_ids for answer in engine.generate(prompts, params)]
    assert not GPU or len(engine.records.steps) >= 100
    assert bool(engine.executor.graphs and engine.executor.graphs.graphs) == graphs
    return answers


def wide(monkeypatch, dtype: torch.dtype, kernel_module) -> Llama:
    """Two layers of a large model on the device, with these kernels or none; tiny in the interpreter."""
    for module in (attention, graphs_module):
        monkeypatch.setattr(module, "kernels_for", lambda device: kernel_module)
    monkeypatch.setattr(graphs_module, "CudaRecorder", CudaRecorder if GPU else Replays)
    monkeypatch.setattr(FastLlama, "layer", fused.FusedLayer if kernel_module else DecoderLayer)
    config = tiny_config("t4-1", **(LARGE if GPU else {"num_hidden_layers": 1}))
    return make_model(config, random_tensors(config, std=0.02 if GPU else 0.08), DEVICE, dtype)


@pytest.mark.parametrize("kind", KINDS if GPU else ["n-grams, sampled"])
def test_eager_replayed_and_launched_ahead_give_the_same_tokens_as_the_plain_path(kind, monkeypatch):
    """In fp32, in which two ways to add up differ too little to choose another token."""
    sampling, settings = KINDS[kind]
    plain = served(wide(monkeypatch, torch.float32, None), settings, sampling, graphs=False, ahead=False)
    model = wide(monkeypatch, torch.float32, kernels)
    for graphs in (False, True):
        for ahead in (False, True):
            got = served(model, settings, sampling, graphs, ahead)
            assert got == plain, f"graphs {graphs}, ahead {ahead}"


@pytest.mark.parametrize("kind", KINDS if GPU else ["greedy"])
def test_in_bf16_launching_ahead_changes_no_token(kind, monkeypatch):
    """The same kernels over the same rows: not a bit may differ."""
    sampling, settings = KINDS[kind]
    model = wide(monkeypatch, torch.bfloat16 if GPU else torch.float32, kernels)
    for graphs in (False, True) if GPU else (False,):
        one, other = (served(model, settings, sampling, graphs, ahead) for ahead in (False, True))
        assert one == other


@pytest.mark.parametrize("temperature", [0.0, 1.0] if GPU else [1.0])
def test_a_draft_model_on_the_device_gives_what_it_gives_on_the_processor(temperature, monkeypatch):
    """Its drafts, and the target's checks of them (`verify_sampled`)."""
    answers, params = [], SamplingParams(6 if GPU else 3, temperature=temperature, ignore_eos=True)
    for device, kernel_module in (("cpu", None), (DEVICE, kernels)):
        for module in (attention, graphs_module):
            monkeypatch.setattr(module, "kernels_for", lambda device, chosen=kernel_module: chosen)
        monkeypatch.setattr(FastLlama, "layer", fused.FusedLayer if kernel_module else DecoderLayer)
        configs = [tiny_config(name, num_hidden_layers=1) for name in ("t8-2", "t4-1")]
        target, draft = (make_model(config, random_tensors(config), device) for config in configs)
        engine = Engine(target, block_size=4, max_context=16, speculator=Speculator(DraftModelProposer(draft), 2),
                        cuda_graphs=False)
        answers.append([answer.token_ids for answer in engine.generate([[5, 6, 5], [7, 8]], params)])
        assert engine.records.totals["drafted_tokens"] > 0
    assert answers[0] == answers[1]


# -- rotation and store as one kernel -----------------------------------------------------------

STEPS_OF = {"int8": 1 / 127, "fp8": 1 / 16, "int4": 1 / 15}  # of a format, in shares of its largest number


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("kv_format", ["fp32", "bf16", *STEPS_OF])
def test_rotated_keys_are_stored_as_two_kernels_store_them(kv_format, head_dim):
    """Eight query heads, two KV heads, rows of any stride; on a GPU a number may fall to the next code."""
    dtype = DTYPES.get(kv_format, torch.float32)
    config = tiny_config(head_dim=head_dim, num_attention_heads=8, num_key_value_heads=2)
    heads = apart(3, 12 * head_dim, dtype, 4).unflatten(1, (12, head_dim)).to(DEVICE)  # [N, Hq + 2 Hkv, D]
    rotation = rotation_for(torch.arange(3) * 700, torch.logspace(0, -4, head_dim // 2), dtype)
    rotation, slots = tuple(x.to(DEVICE) for x in rotation), torch.tensor([4, 0, 7], dtype=torch.int32, device=DEVICE)
    for norm in (None, torch.rand(10, head_dim).to(DEVICE, dtype)):
        both, ours = (kv_storage(config, kv_format, 9, DEVICE) for _ in range(2))
        for tensor in (*stores(both), *stores(ours)):
            tensor.zero_()
        turned = fused.rotate(heads[:, :10], rotation, norm, 1e-6)  # [N, Hq + Hkv, D]
        apart_, together = (
            kernels.StepKernels(store, slots, torch.zeros(1, 1, dtype=torch.int32, device=DEVICE), [], 4)
            for store in (both, ours)
        )
        apart_.attend(1, turned[:, :8], turned[:, 8:], heads[:, 10:])
        q = fused.rotate_and_store(heads, rotation, norm, 1e-6, together, 1)
        assert torch.allclose(q.float(), turned[:, :8].float(), atol=TOLERANCE[dtype] * 4)
        everywhere = torch.arange(9, device=DEVICE)
        for got, want in zip(ours.read(1, everywhere), both.read(1, everywhere), strict=True):
            step = STEPS_OF.get(kv_format, TOLERANCE[dtype]) * want.abs().max() if GPU else 0.0
            assert want.abs().max() > 0.5 and (got.float() - want.float()).abs().max() <= step
        assert not any(tensor[0].any() for tensor in stores(ours)), "another layer was written"


def test_a_model_of_several_layers_over_pages_gives_the_plain_models_logits(monkeypatch):
    """Sums that wait for the next layer, keys that are stored as they are rotated: prompts, then a decode."""
    config = tiny_config("t-wide", num_hidden_layers=3, model_type="qwen3")
    logits, tokens = [], torch.tensor([5, 6, 7, 50, 8])
    for device, layer in (("cpu", DecoderLayer), (DEVICE, fused.FusedLayer)):
        monkeypatch.setattr(Llama, "layer", layer)
        model, store = Llama(config, random_tensors(config), device), kv_storage(config, "int8", 17, device)
        out = []
        for spans in ([RowSpan(0, 3, [2]), RowSpan(0, 2, [1])], [RowSpan(3, 1, [2]), RowSpan(2, 1, [1])]):
            step = FastAttention(store, spans, 4, 16)
            view = step if layer is DecoderLayer else kernels.step_kernels(step, config.query_group)
            fed = tokens[: len(step.positions)].to(device)
            with torch.inference_mode():
                out.append(model.forward(fed, step.positions.to(device), view).cpu())
        logits.append(torch.cat(out))
    torch.testing.assert_close(*logits, rtol=0, atol=1e-3)


def test_warming_up_stores_nothing_and_the_engine_goes_on_as_without(monkeypatch):
    monkeypatch.setattr(attention, "kernels_for", lambda device: kernels)
    monkeypatch.setattr(FastLlama, "layer", fused.FusedLayer)
    model = model_here(num_hidden_layers=1)
    answers = []
    for warm in (False, True):
        engine = Engine(model, block_size=4, max_context=16, kv_memory=1 << 20, cuda_graphs=False)
        for tensor in stores(engine.executor.storage):
            tensor.zero_()
        if warm:
            kernels.compile_all(model, engine.executor.storage, 4, engine.executor.scratch_slot)
            assert not any(t[:, :-1].any() for t in stores(engine.executor.storage)), "a block was written"
        answers.append([a.token_ids for a in engine.generate([[5, 6, 7]], SamplingParams(max_tokens=2))])
    assert answers[0] == answers[1]


# -- products of few rows -----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 4])
def test_products_of_few_rows_as_the_plain_ones(rows, dtype, monkeypatch):
    """With and without a bias; widths that fill no block, and rows that lie in wider ones."""
    if not GPU:
        monkeypatch.setattr(matvec, "COLUMNS", 32)
    outs, width = (4098, 4104) if GPU else (10, 72)
    x, weight = apart(rows, width, dtype, 1), torch.randn(outs, width).to(dtype)
    for bias in (None, torch.randn(outs).to(dtype)):
        want = torch.nn.functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
        got = matvec.matvec(*(t if t is None else t.to(DEVICE) for t in (x, weight, bias)))
        assert got.dtype == dtype and (got.cpu().float() - want).abs().max() <= TOLERANCE[dtype] * want.abs().max()


def test_a_model_whose_small_products_take_the_kernel(monkeypatch):
    monkeypatch.setattr(matvec, "COLUMNS", 64)
    config = tiny_config("t4-1", num_hidden_layers=1)
    plain = FastLlama(config, random_tensors(config), DEVICE, packed=False)
    changed, launched, kernel = matvec.with_matvec(plain), [], matvec.matvec
    monkeypatch.setattr(matvec, "matvec", lambda x, *rest: launched.append(len(x)) or kernel(x, *rest))
    for rows in (1, 3):
        inputs = torch.arange(rows, device=DEVICE), torch.arange(rows, device=DEVICE)
        with torch.inference_mode():
            torch.testing.assert_close(*(m.forward(*inputs, NoCache()) for m in (plain, changed)), rtol=0, atol=1e-4)
    assert launched == [1] * 5 and type(plain.head) is not type(changed.head)  # four of a layer, and the head
