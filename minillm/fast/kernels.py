"""Cached attention on a GPU: three Triton kernels that read the store where it lies.

The plain path gathers every row's keys and values, and reads that copy again. Here a program looks its
slots up in the block table, loads the codes and turns them into numbers in registers.

    store    one program a (token, KV head): quantise the new key and value, write them
    attend   one program a (tile, KV head, part of the context): online softmax over its keys
    combine  one program a (tile, KV head, query): merge the parts

A tile is up to BLOCK_M queries of one row that read the same keys: some of its new tokens, times the G
query heads that share a KV head. Matrix units want 16 rows at least: a decoding row of G queries fills
the rest of its 16 with zeros, which costs nothing, since it waits for memory.

    queries of a tile, G = 2       token 0 head 0 | token 0 head 1 | token 1 head 0 | ...

One row of a long context would occupy Hkv programs and leave the chip idle. So where tiles are few, the
context is cut into SPLITS parts, attended apart and combined (flash-decoding: Dao et al., 2023). Tiles
and parts depend on the numbers of tokens alone, so that a CUDA graph can be replayed as contexts grow.

Letters as in attention.py; and S keys at a time, D head_dim, padded to a power of two. Every load is
masked to the tokens that the row has stored: what an unused slot holds, NaN included, is never loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.errors import OutOfResources  # noqa: F401  what a launch raises that asks for too much memory

from minillm.fast.attention import SHORT_ROW, FastAttention
from minillm.fast.device import to_device
from minillm.fast.step_inputs import make_tiles
from minillm.fast.tile_shapes import tile_shape

SHORT_TILE, LONG_TILE = 16, 64  # BLOCK_M of rows with few new tokens, and of prompts
KEYS = {1: 64, 2: 128, 4: 16}  # the most S, by the bytes of a model's number: two tiles of each fit shared memory
DOT_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
PROGRAMS = 512  # to fill a chip: about four for each multiprocessor of an H100
MOST_SPLITS = 64


# -- in registers: codes and numbers --------------------------------------------------------------


@triton.jit
def round_even(x):
    """The nearest whole number, of two the even one, for |x| < 2**22: fp32 has no bits for less beside 1.5 * 2**23."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def e4m3_as_fp16(code):
    """Bits of e4m3 -> the number / 256. As bits of fp16 they mean the same but for the exponent's bias, 7, not 15."""
    bits = ((code & 0x80).to(tl.uint16) << 8) | ((code & 0x7F).to(tl.uint16) << 7)
    return bits.to(tl.float16, bitcast=True)


@triton.jit
def e4m3_encode(x):
    """|x| <= 448 in fp32 -> the bits of the nearest e4m3, on cards without fp8 too."""
    bits = x.to(tl.int32, bitcast=True)
    power = (bits & 0x7F800000).to(tl.float32, bitcast=True)  # 2**floor(log2 |x|)
    step = tl.maximum(power, 0.015625) * 0.125  # three bits after the leading one; below 2**-6 none leads
    size = round_even(tl.div_rn(tl.abs(x), step)) * step * 0.00390625  # exact from here on
    return ((bits >> 24) & 0x80 | size.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.int32) >> 7).to(tl.uint8)


@triton.jit
def stored_scale(scale):
    """A positive scale as fp16 keeps it, as `codes.stored_scale` has it."""
    return tl.minimum(tl.maximum(scale, 5.960464477539063e-08), 65504.0).to(tl.float16)


@triton.jit
def columns(D: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr, BLOCK_GROUP: tl.constexpr):
    """Which of the D numbers each column holds, and whether it holds one: each group is padded to a power of two."""
    c = tl.arange(0, BLOCK_D)
    d = c // BLOCK_GROUP * GROUP + c % BLOCK_GROUP
    return d, (c % BLOCK_GROUP < GROUP) & (d < D)


@triton.jit
def find_places(tables, s, end, head, HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Where the tokens s [S] of a row lie: slot and head, in 64 bits, since a store is large. `tables` is the row's."""
    block = tl.load(tables + s // BLOCK_SIZE, mask=s < end, other=0)
    return (block.to(tl.int64) * BLOCK_SIZE + s % BLOCK_SIZE) * HEADS + head


@triton.jit
def read_numbers(
    codes, scales, minima, place, inside,
    D: tl.constexpr, BLOCK_D: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr, BLOCK_GROUP: tl.constexpr,
    DOT: tl.constexpr,
):
    """What is stored at places [S], as [S, BLOCK_D] of type DOT; 0 where not `inside` [S]. Of int8 and fp8 the codes
    alone: they are exact in DOT, and `read_scales` has the rest."""
    if FORMAT == "int4":
        groups: tl.constexpr = BLOCK_D // BLOCK_GROUP
        group, pair = tl.arange(0, groups)[None, :, None], tl.arange(0, BLOCK_GROUP // 2)[None, None, :]
        place, inside = place[:, None, None], inside[:, None, None] & (group < D // GROUP)
        at = place * (D // 2) + group * (GROUP // 2) + pair
        byte = tl.load(codes + at, mask=inside & (pair < GROUP // 2), other=0)  # [S, groups, BLOCK_GROUP / 2]
        code = tl.interleave(byte & 15, byte >> 4)  # [S, groups, BLOCK_GROUP]
        at = place * (D // GROUP) + group
        scale = tl.load(scales + at, mask=inside, other=0.0).to(tl.float32)  # [S, groups, 1]
        x = code.to(tl.float32) * scale + tl.load(minima + at, mask=inside, other=0.0).to(tl.float32)
        x = tl.reshape(x, (place.shape[0], BLOCK_D))
    else:
        d, is_number = columns(D, BLOCK_D, GROUP, BLOCK_GROUP)
        x = tl.load(codes + place[:, None] * D + d[None, :], mask=inside[:, None] & is_number[None, :], other=0)
        if FORMAT == "int8":
            x = x.to(tl.int8, bitcast=True)
        elif FORMAT == "fp8":
            x = e4m3_as_fp16(x)
    return x.to(DOT)


@triton.jit
def read_scales(scales, place, inside, FORMAT: tl.constexpr):
    """What `read_numbers` has left out: a factor for each place [S], in fp32.

    As a column that is then summed: else each thread would load the scale of every score that it holds.
    """
    scale = tl.sum(tl.load(scales + place[:, None], mask=inside[:, None], other=0.0).to(tl.float32), 1)
    return scale * 256.0 if FORMAT == "fp8" else scale


@triton.jit
def store_numbers(
    x, codes, scales, minima, place,
    D: tl.constexpr, BLOCK_D: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr, BLOCK_GROUP: tl.constexpr,
):
    """Encode D numbers, in the columns of the block x, bit for bit as `quantized.py` does; write them to a place."""
    d, is_number = columns(D, BLOCK_D, GROUP, BLOCK_GROUP)
    if FORMAT == "native":
        tl.store(codes + place * D + d, x.to(codes.dtype.element_ty), mask=is_number)
    elif FORMAT == "int4":  # a row for each group, its even and its odd numbers apart, two of which make a byte
        block_groups: tl.constexpr = BLOCK_D // BLOCK_GROUP
        even, odd = tl.split(tl.reshape(x.to(tl.float32), (block_groups, BLOCK_GROUP // 2, 2)))
        groups, pair = tl.arange(0, block_groups), tl.arange(0, BLOCK_GROUP // 2)[None, :]
        group = groups[:, None]
        mask = (group < D // GROUP) & (pair < GROUP // 2)
        lowest = tl.min(tl.where(mask, tl.minimum(even, odd), float("inf")), 1)
        highest = tl.max(tl.where(mask, tl.maximum(even, odd), float("-inf")), 1)
        minimum = tl.minimum(tl.maximum(lowest, -65504.0), 65504.0).to(tl.float16)
        scale = stored_scale(tl.div_rn(highest - minimum.to(tl.float32), 15.0))
        scale += tl.sum(tl.where(mask, (even + odd) * 0.0, 0.0), 1).to(tl.float16)  # NaN if one is not finite
        m, s = minimum.to(tl.float32)[:, None], scale.to(tl.float32)[:, None]
        low = tl.minimum(tl.maximum(round_even(tl.div_rn(even - m, s)), 0.0), 15.0).to(tl.uint8)
        high = tl.minimum(tl.maximum(round_even(tl.div_rn(odd - m, s)), 0.0), 15.0).to(tl.uint8)
        tl.store(codes + place * (D // 2) + group * (GROUP // 2) + pair, low | (high << 4), mask=mask)
        tl.store(scales + place * (D // GROUP) + groups, scale, mask=groups < D // GROUP)
        tl.store(minima + place * (D // GROUP) + groups, minimum, mask=groups < D // GROUP)
    else:
        most = 127.0 if FORMAT == "int8" else 448.0
        x = x.to(tl.float32)
        scale = stored_scale(tl.div_rn(tl.max(tl.abs(x), 0), most)) + tl.sum(x * 0.0, 0).to(tl.float16)
        x = tl.div_rn(x, scale.to(tl.float32))
        x = tl.minimum(tl.maximum(round_even(x) if FORMAT == "int8" else x, -most), most)
        code = x.to(tl.int8).to(tl.uint8, bitcast=True) if FORMAT == "int8" else e4m3_encode(x)
        tl.store(codes + place * D + d, code, mask=is_number)
        tl.store(scales + place, scale)


# -- the kernels ----------------------------------------------------------------------------------


@triton.jit(do_not_specialize_on_alignment=["slots"])
def store_kernel(
    k, v, slots, k_codes, k_scales, k_minima, v_codes, v_scales, v_minima, k_token, k_head, v_token, v_head,
    HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
):
    """Write one token's key and value of one KV head. k, v [N, Hkv, D] with their strides; slots [N]."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d, is_number = columns(D, BLOCK_D, GROUP, BLOCK_GROUP)
    place = tl.load(slots + token).to(tl.int64) * HEADS + head  # 64 bits: a store is large
    key = tl.load(k + token * k_token + head * k_head + d, mask=is_number, other=0.0)
    value = tl.load(v + token * v_token + head * v_head + d, mask=is_number, other=0.0)
    store_numbers(key, k_codes, k_scales, k_minima, place, D, BLOCK_D, FORMAT, GROUP, BLOCK_GROUP)
    store_numbers(value, v_codes, v_scales, v_minima, place, D, BLOCK_D, FORMAT, GROUP, BLOCK_GROUP)


@triton.jit
def part_length(stored, splits, keys):
    """Tokens in each part of a context, whole tiles of `keys`."""
    return tl.cdiv(tl.cdiv(stored, splits), keys) * keys


@triton.jit
def load_tile(tiles, tile):
    """Row, first token, its position, tokens."""
    at = tiles + 4 * tile
    return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)


@triton.jit(do_not_specialize=["table_row", "splits"], do_not_specialize_on_alignment=["tiles", "tables"])
def attend_kernel(
    q, out, parts, part_scores, tiles, tables, k_codes, k_scales, k_minima, v_codes, v_scales, v_minima,
    q_token, q_head, table_row, splits, scale,
    HEADS: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, FORMAT: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_GROUP: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_S: tl.constexpr, MANY: tl.constexpr, DOT: tl.constexpr,
):
    """One part of the context for one tile. q [N, Hq, D] with its strides, out [N, Hq, D].

    tiles [T, 4], tables [B, widest]. With MANY, more than one of `splits`, the result goes to `parts`
    [T, Hkv, splits, BLOCK_M, D], and each query's log of its summed exponentials to
    `part_scores` [T, Hkv, splits, BLOCK_M].
    """
    head, tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, first, position, count = load_tile(tiles, tile)
    stored = position + count  # what the tile's last token sees
    begin = split * part_length(stored, splits, BLOCK_S)
    end = tl.minimum(begin + part_length(stored, splits, BLOCK_S), stored)
    if (count == 0) | (begin >= stored):  # a graph's padding, or a part that a short context does not have
        return

    # 1. the tile's queries [BLOCK_M, D], and the last position that each may see
    m = tl.arange(0, BLOCK_M)
    d, is_number = columns(D, BLOCK_D, GROUP, BLOCK_GROUP)
    token = m // G
    is_query = (token < count)[:, None] & is_number[None, :]
    query = (first + token) * q_token + (head * G + m % G) * q_head
    queries = tl.load(q + query[:, None] + d[None, :], mask=is_query, other=0.0).to(DOT)
    last = position + tl.minimum(token, count - 1)

    # 2. online softmax: the highest score so far, the sum of exponentials below it, the weighted values
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    weighted = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    tables += row * table_row
    place = find_places(tables, begin + tl.arange(0, BLOCK_S), end, head, HEADS, BLOCK_SIZE)
    for at in range(begin, end, BLOCK_S):
        s = at + tl.arange(0, BLOCK_S)
        inside = s < end
        if FORMAT == "int8" or FORMAT == "fp8":
            k_scale = read_scales(k_scales, place, inside, FORMAT)
            v_scale = read_scales(v_scales, place, inside, FORMAT)
        keys = read_numbers(k_codes, k_scales, k_minima, place, inside, D, BLOCK_D, FORMAT, GROUP, BLOCK_GROUP, DOT)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale  # [M, S]
        if FORMAT == "int8" or FORMAT == "fp8":
            scores *= k_scale[None, :]
        scores = tl.where(inside[None, :] & (s[None, :] <= last[:, None]), scores, float("-inf"))
        top = tl.maximum(highest, tl.max(scores, 1))
        base = tl.where(top == float("-inf"), 0.0, top)  # a query that sees none of these keys: -inf - -inf is NaN
        weights, shrink = tl.exp(scores - base[:, None]), tl.exp(highest - base)
        total = total * shrink + tl.sum(weights, 1)
        values = read_numbers(v_codes, v_scales, v_minima, place, inside, D, BLOCK_D, FORMAT, GROUP, BLOCK_GROUP, DOT)
        if FORMAT == "int8" or FORMAT == "fp8":
            if tl.float16 == DOT:  # a small weight times a small scale is nothing in fp16
                values = (values.to(tl.float32) * v_scale[:, None]).to(DOT)
            else:
                weights *= v_scale[None, :]
        weighted = weighted * shrink[:, None] + tl.dot(weights.to(DOT), values, input_precision="ieee")
        highest = top
        # looked up a tile ahead: then the next keys and values can be copied while these are computed with
        place = find_places(tables, s + BLOCK_S, end, head, HEADS, BLOCK_SIZE)

    # 3. the result, or this part of it
    weighted = weighted / tl.where(total == 0.0, 1.0, total)[:, None]
    if MANY:
        place = ((tile * HEADS + head) * splits + split) * BLOCK_M + m
        tl.store(parts + (place * D)[:, None] + d[None, :], weighted, mask=is_query)
        tl.store(part_scores + place, highest + tl.log(total))
    else:
        place = ((first + token) * HEADS * G + head * G + m % G) * D
        tl.store(out + place[:, None] + d[None, :], weighted.to(out.dtype.element_ty), mask=is_query)


@triton.jit(do_not_specialize=["splits", "block_m", "keys"], do_not_specialize_on_alignment=["tiles"])
def combine_kernel(
    parts, part_scores, out, tiles, splits, block_m, keys,
    HEADS: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SPLITS: tl.constexpr,
):
    """Merge the parts of one query, each weighted by its share of the summed exponentials."""
    head, tile, m = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    _row, first, position, count = load_tile(tiles, tile)
    if m >= count * G:
        return
    stored = position + count
    split, d = tl.arange(0, BLOCK_SPLITS), tl.arange(0, BLOCK_D)
    exists = (split < splits) & (split * part_length(stored, splits, keys) < stored)
    place = ((tile * HEADS + head) * splits + split) * block_m + m
    scores = tl.load(part_scores + place, mask=exists, other=float("-inf"))
    weights = tl.exp(scores - tl.max(scores, 0))  # the part with position 0 has a real score
    mask = exists[:, None] & (d < D)[None, :]
    part = tl.load(parts + (place * D)[:, None] + d[None, :], mask=mask, other=0.0)
    merged = tl.sum(part * weights[:, None], 0) / tl.sum(weights, 0)
    at = ((first + m // G) * HEADS * G + head * G + m % G) * D
    tl.store(out + at + d, merged.to(out.dtype.element_ty), mask=d < D)


# -- launching them -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tiles:
    """Tiles of one size: `fields` [T, 4] holds row, first token, its position, and tokens (0: no tile)."""

    fields: Tensor
    block_m: int


def tile_tokens(block_m: int, query_group: int) -> tuple[int, int]:
    """BLOCK_M, grown where one token's queries need more, and the tokens that a tile then holds."""
    block_m = max(block_m, triton.next_power_of_2(query_group))
    return block_m, block_m // query_group


class StepKernels:
    """The launches of one step (a `CacheView`): where its tokens go, and what its tiles read."""

    shape = None  # of its tiles; by default the table's, see tile_shapes.py

    def __init__(self, storage, new_slots: Tensor, tables: Tensor, tiles: Sequence[Tiles], block_size: int) -> None:
        """new_slots [N], tables [B, widest] and the tiles' fields are int32 tensors on the device."""
        self.storage, self.new_slots, self.tables, self.block_size = storage, new_slots, tables, block_size
        self.tiles = [some for some in tiles if len(some.fields)]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k, v [N, Hkv, D], then attend q [N, Hq, D] -> [N, Hq, D]; tokens in no tile get no value."""
        q, k = self.storage.prepare(layer, q, k)
        store_kernel[(len(k), k.shape[1])](
            k, v, self.new_slots, *self.numbers(layer), *k.stride()[:2], *v.stride()[:2],
            **number_shape(self.storage.keys, *k.shape[1:]), num_warps=1,
        )
        return self.attend_stored(layer, q)

    def attend_stored(self, layer: int, q: Tensor) -> Tensor:
        """The same, once keys and values are stored."""
        out, numbers = torch.empty(q.shape, dtype=q.dtype, device=q.device), self.numbers(layer)
        shape = number_shape(self.storage.keys, numbers[0].shape[1], q.shape[2])
        for tiles in self.tiles:
            self._attend(tiles, q, out, numbers, shape)
        return out

    def numbers(self, layer: int) -> tuple[Tensor, ...]:
        """Codes, scales and minima of the keys and of the values of a layer, each [slots, Hkv, ...]."""
        return *raw_tensors(self.storage.keys, layer), *raw_tensors(self.storage.values, layer)

    def _attend(self, tiles: Tiles, q: Tensor, out: Tensor, numbers: tuple, shape: dict) -> None:
        """Attend the queries of these tiles, and write their places of `out`."""
        count, kv_heads, block_m = len(tiles.fields), shape["HEADS"], tiles.block_m
        dot = tl.float32 if triton.knobs.runtime.interpret else DOT_TYPES[q.dtype]  # the interpreter has no other
        keys, stages, warps = self.shape or tile_shape(shape["FORMAT"], block_m, q.device)
        keys = min(keys, KEYS[q.element_size()])
        splits = max(1, min(MOST_SPLITS, PROGRAMS // (count * kv_heads)))  # enough programs, even of a few tiles
        parts = part_scores = out  # not touched where there is one part
        if splits > 1:
            part_scores = torch.empty(count, kv_heads, splits, block_m, dtype=torch.float32, device=q.device)
            parts = part_scores.new_empty(*part_scores.shape, q.shape[2])
        group = q.shape[1] // kv_heads
        attend_kernel[(kv_heads, count, splits)](  # heads first: programs that run together read whole tokens
            q, out, parts, part_scores, tiles.fields, self.tables, *numbers, *q.stride()[:2],
            self.tables.stride(0), splits, q.shape[2] ** -0.5, **shape, G=group, BLOCK_SIZE=self.block_size,
            BLOCK_M=block_m, BLOCK_S=keys, MANY=splits > 1, DOT=dot, num_warps=warps, num_stages=stages,
        )
        if splits > 1:
            combine_kernel[(kv_heads, count, block_m)](
                parts, part_scores, out, tiles.fields, splits, block_m, keys, HEADS=kv_heads, G=group, D=shape["D"],
                BLOCK_D=shape["BLOCK_D"], BLOCK_SPLITS=triton.next_power_of_2(MOST_SPLITS), num_warps=4,
            )


def number_shape(store, kv_heads: int, head_dim: int) -> dict:
    """The constants of how a store keeps its numbers, for all kernels: only int4 has groups that share a scale."""
    group = getattr(store, "group", head_dim)
    block_groups = triton.next_power_of_2(head_dim // group)
    block_group = max(triton.next_power_of_2(group), 16 // block_groups)  # matrix units want 16 columns
    return {"HEADS": kv_heads, "D": head_dim, "BLOCK_D": block_group * block_groups,
            "FORMAT": getattr(store, "kv_format", "native"), "GROUP": group, "BLOCK_GROUP": block_group}


def step_kernels(step: FastAttention, query_group: int) -> StepKernels:
    """The launches of an eager step: tiles of 16 for rows with few new tokens, larger ones for prompts."""
    is_short, blocks, fields = step.count <= SHORT_ROW, [], []
    for rows, least in ((is_short, SHORT_TILE), (~is_short, LONG_TILE)):
        b = rows.nonzero()[:, 0]
        block_m, tokens = tile_tokens(least, query_group)
        blocks.append(block_m)
        rows = (numbers.numpy() for numbers in (b, step.first[b], step.start[b], step.count[b]))
        fields.append(torch.from_numpy(make_tiles(*rows, tokens)))
    new_slots, tables, *fields = to_device([step.new_slots, step.tables, *fields], step.storage.device, torch.int32)
    return StepKernels(step.storage, new_slots, tables, list(map(Tiles, fields, blocks)), step.block_size)


@torch.inference_mode()
def compile_all(model, storage, block_size: int, scratch_slot: int) -> None:
    """Launch every variant that steps of this model will: one token is stored in the scratch slot, nothing attends.

    Variants are tiles of decodes or of prompts, few (whose contexts are cut into parts) or many.
    """
    zeros = partial(torch.zeros, dtype=torch.int32, device=model.device)
    sizes = [tile_tokens(least, model.config.query_group)[0] for least in (SHORT_TILE, LONG_TILE)]
    for number in (1, PROGRAMS):
        tiles = [Tiles(zeros(number, 4), block_m) for block_m in sizes]
        cache = StepKernels(storage, zeros(1) + scratch_slot, zeros(1, 1), tiles, block_size)
        model.hidden_states(zeros(1), zeros(1), cache)


def raw_tensors(store, layer: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and minima of a layer; a format that has none of one gives its numbers in its place."""
    codes = store.numbers if hasattr(store, "numbers") else store.codes
    scales, minima = getattr(store, "scales", codes), getattr(store, "minima", codes)
    return codes[layer], scales[layer], minima[layer]
