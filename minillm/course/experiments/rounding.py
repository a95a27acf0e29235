"""Ways to round a weight to fewer bits, and what it takes to store: for measuring quality, with the plain product.

A rounded model multiplies as the plain one does, by weights that are what would be read back. So nothing but the
rounding differs, and what is stored exactly gives the same logits, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from minillm.fast.model import FastLlama
from minillm.fast.weight_formats import int4_dense, int4_weight, int8_weight

HALF = 2  # bytes of a scale, or of a least value
FP8 = torch.float8_e4m3fn
OWN_GROUP = 32  # neighbouring weights that share a scale in GGUF's Q4_1 and Q8_0
Rounding = Callable[[Tensor], tuple[Tensor, float]]  # weight [out, in] -> what is read back [out, in], bytes stored


class NotExact(ValueError):
    """A weight is not one that these codes can hold."""


def int8_per_channel(weight: Tensor) -> tuple[Tensor, float]:
    """A scale for each output."""
    codes, scales = int8_weight(weight)
    return codes.float() * scales.float()[:, None], codes.nbytes + HALF * len(scales)


def int8_in_groups(weight: Tensor, group: int = 64) -> tuple[Tensor, float]:
    """A scale for `group` neighbouring inputs of an output, or for all where the number of inputs is no multiple."""
    group = group if weight.shape[1] % group == 0 else weight.shape[1]
    dense, _ = int8_per_channel(weight.reshape(-1, group))
    return dense.view(weight.shape), weight.numel() + HALF * weight.numel() / group


def fp8_per_channel(weight: Tensor) -> tuple[Tensor, float]:
    """E4M3, with a scale for each output."""
    scales = (weight.abs().amax(1, keepdim=True) / torch.finfo(FP8).max).bfloat16().float()
    scales = scales.clamp_min(torch.finfo(torch.bfloat16).tiny)
    most = torch.finfo(FP8).max
    return (weight / scales).clamp(-most, most).to(FP8).float() * scales, weight.numel() + HALF * len(weight)


def int4_per_channel(weight: Tensor) -> tuple[Tensor, float]:
    """A scale and a middle for each output."""
    return int4_dense(*int4_weight(weight, weight.shape[1])), weight.numel() / 2 + 2 * HALF * len(weight)


def int4_across_outputs(weight: Tensor, group: int = 32) -> tuple[Tensor, float]:
    """A scale and a middle for `group` neighbouring outputs of an input, or for all of them."""
    group = group if len(weight) % group == 0 else len(weight)
    dense = int4_dense(*int4_weight(weight.T.contiguous(), group))
    return dense.T.contiguous(), weight.numel() * (1 / 2 + 2 * HALF / group)


def q4_1(weight: Tensor) -> tuple[Tensor, float]:
    """GGUF's Q4_1: q s + m in groups of 32 inputs, q of 0 to 15, s and m in fp16.

    Lossless for a weight that was read from such a file: in each group some q is 0 and some is 15, which gives s and m
    back. NotExact for any other, whose loss would be that of another way to choose s and m.
    """
    groups = in_groups(weight, "Q4_1")
    low, high = groups.aminmax(dim=-1, keepdim=True)
    scales, least = ((high - low) / 15).half().float(), low.half().float()
    codes = ((groups - least) / scales.clamp_min(torch.finfo(torch.half).tiny)).round().clamp(0, 15)
    return exactly(codes * scales + least, weight, "Q4_1"), weight.numel() * (1 / 2 + 2 * HALF / OWN_GROUP)


def q8_0(weight: Tensor) -> tuple[Tensor, float]:
    """GGUF's Q8_0: q s in groups of 32 inputs, q of -127 to 127, s in fp16. Lossless, or NotExact, as `q4_1`."""
    groups = in_groups(weight, "Q8_0")
    scales = (groups.abs().amax(-1, keepdim=True) / 127).half().float()
    codes = (groups / scales.clamp_min(torch.finfo(torch.half).tiny)).round()
    return exactly(codes * scales, weight, "Q8_0"), weight.numel() * (1 + HALF / OWN_GROUP)


def in_groups(weight: Tensor, name: str) -> Tensor:
    """weight [out, in] -> [out, in / 32, 32]."""
    if weight.shape[1] % OWN_GROUP:
        raise NotExact(f"{name} needs a multiple of {OWN_GROUP} inputs, not {weight.shape[1]}")
    return weight.unflatten(1, (-1, OWN_GROUP))


def exactly(groups: Tensor, weight: Tensor, name: str) -> Tensor:
    """What was read back, [out, in]; NotExact unless it is the weight."""
    dense = groups.flatten(1)
    if wrong := int((dense != weight).sum()):
        raise NotExact(f"{wrong:,} of {weight.numel():,} weights are none that {name} holds")
    return dense


@dataclass(frozen=True)
class WeightRounding:
    """Of a whole model: how its layers' matrices are rounded, and its head."""

    name: str
    layers: Rounding
    head: Rounding


FP8_WEIGHTS = WeightRounding("fp8", fp8_per_channel, fp8_per_channel)
OTHER_GROUPS = (
    WeightRounding("int8, groups of 64", int8_in_groups, int8_in_groups),
    WeightRounding("int4, per channel", int4_per_channel, int8_per_channel),
    WeightRounding("int4, 32 across outputs", int4_across_outputs, int8_per_channel),
)
OWN_GROUPS = WeightRounding("int4, the checkpoint's own groups", q4_1, q8_0)


def rounded(model: FastLlama, rounding: WeightRounding) -> tuple[FastLlama, float]:
    """A model that shares all but its matrices, and the bytes that these take as stored. `model` is not changed."""
    found, stored = copy(model), 0.0

    def again(linear, how: Rounding):
        nonlocal stored
        weight = linear.weight
        dense, size = how(weight.float())
        stored += size + (0 if linear.bias is None else linear.bias.nbytes)
        return type(linear)(dense.to(weight.dtype), linear.bias)

    found.head = again(model.head, rounding.head)
    found.layers = [copy(layer) for layer in model.layers]
    for layer in found.layers:
        for name in layer.LINEARS:
            setattr(layer, name, again(getattr(layer, name), rounding.layers))
    return found, stored
