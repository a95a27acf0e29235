"""The product with int8 and int4 weights as a Triton kernel: codes become numbers in registers, never in memory.

A decode step reads its weights once and multiplies little, so what counts is that bytes are read as they are stored.
A program makes a tile of the output, of up to 64 tokens and 32 channels, and walks along the inputs in steps of one
group; more tokens are more programs, which read the same weights from the cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

CHANNELS, TOKENS = 32, 64  # of a tile, at most
STEP = {"int8": 128, "int4": 64}  # inputs at a time; of int4 a group, which shares its scale


@triton.jit
def product_kernel(
    x, codes, scales, middles, out, x_stride, N, OUT, IN: tl.constexpr, FORMAT: tl.constexpr, DOT: tl.constexpr,
    STEP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_OUT: tl.constexpr,
):  # fmt: skip
    """out[n, o] = sum over i of x[n, i] w[o, i]; int4 has its even inputs in the low halves of bytes."""
    tokens = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    channels = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)  # [BLOCK_OUT]
    total = tl.zeros((BLOCK_N, BLOCK_OUT), dtype=tl.float32)
    is_token, is_channel = tokens[:, None] < N, channels[:, None] < OUT
    x_rows, wide = x + tokens[:, None].to(tl.int64) * x_stride, channels[:, None].to(tl.int64)
    for at in range(0, IN, STEP):
        if FORMAT == "int8":
            inputs = at + tl.arange(0, STEP)[None]  # [1, STEP]
            w = tl.load(codes + wide * IN + inputs, is_channel & (inputs < IN), other=0)
            part = tl.load(x_rows + inputs, is_token & (inputs < IN), other=0)
            total += tl.dot(part.to(DOT), w.to(tl.float32).to(DOT).trans(1, 0))
        else:
            pairs = at // 2 + tl.arange(0, STEP // 2)[None]  # [1, STEP / 2]
            packed = tl.load(codes + wide * (IN // 2) + pairs, is_channel, other=0).to(tl.int32)
            group = channels * (IN // STEP) + at // STEP  # [BLOCK_OUT]
            scale = tl.load(scales + group, channels < OUT, other=0).to(tl.float32)[:, None]
            middle = tl.load(middles + group, channels < OUT, other=0).to(tl.float32)[:, None]
            low = ((packed & 15) - 8).to(tl.float32) * scale + middle
            high = ((packed >> 4) - 8).to(tl.float32) * scale + middle
            even = tl.load(x_rows + 2 * pairs, is_token, other=0)
            odd = tl.load(x_rows + 2 * pairs + 1, is_token, other=0)
            total += tl.dot(even.to(DOT), low.to(DOT).trans(1, 0)) + tl.dot(odd.to(DOT), high.to(DOT).trans(1, 0))
    if FORMAT == "int8":  # one scale for all inputs of a channel
        total *= tl.load(scales + channels, channels < OUT, other=0).to(tl.float32)[None]
    places = out + tokens[:, None].to(tl.int64) * OUT + channels[None]
    tl.store(places, total.to(out.dtype.element_ty), is_token & (channels < OUT)[None])


def product(x: Tensor, codes: Tensor, scales: Tensor, middles: Tensor, weight_format: str) -> Tensor:
    """x [N, in] times codes [out, in] (int8) or [out, in / 2] (int4, packed) -> [N, out].

    scales: [out], or of int4 [out, in / 64] as are middles, which int8 does not use. Computed in 16 bits where x has
    them, and summed in 32.
    """
    x = x if x.stride(1) == 1 else x.contiguous()
    tokens, outputs = len(x), len(codes)
    out = torch.empty(tokens, outputs, dtype=x.dtype, device=x.device)
    block = max(16, min(TOKENS, triton.next_power_of_2(tokens)))
    native = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
    dot = tl.float32 if triton.knobs.runtime.interpret else native[x.dtype]  # the interpreter has no bf16 of its own
    if tokens:
        grid = triton.cdiv(outputs, CHANNELS), triton.cdiv(tokens, block)
        product_kernel[grid](x, codes, scales, middles, out, x.stride(0), tokens, outputs, x.shape[1], weight_format,
                             dot, STEP[weight_format], block, CHANNELS)
    return out
