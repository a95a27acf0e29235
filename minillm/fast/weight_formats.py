"""Weights in fewer bits, which are fewer bytes to read. `quantize_weights` turns a loaded model into one with

    int8   w = q s, q of -127 to 127             a scale per output channel        8.03 bits
    int4   w = (q - 8) s + m, q of 0 to 15       a scale and a middle per 64       4.5 bits

Scales and middles are bf16, as PyTorch's CPU kernels require. Those kernels round the activations to
bf16, and win at few rows; at many rows fp32 is faster. On a GPU a Triton kernel multiplies the codes as they
are stored (weight_kernels.py). Without a kernel, weights are dequantised for each product: that saves memory
and costs time.
"""

from __future__ import annotations

from copy import copy
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from minillm.fast.device import triton_module
from minillm.fast.model import FastLlama
from minillm.ladder.quantized import even_group, pack_nibbles, unpack_nibbles

WEIGHT_GROUP = 64  # neighbouring int4 weights of an output channel that share a scale, at most
FEW_ROWS = 32  # up to which the int8 kernel beats a dequantised product


def int8_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [out, in] -> codes int8 [out, in] and scales bf16 [out]."""
    weight = weight.float()
    scales = (weight.abs().amax(1) / 127).clamp_min(torch.finfo(torch.bfloat16).tiny).bfloat16()
    codes = (weight / scales.float()[:, None]).round().clamp(-127, 127)
    return codes.to(torch.int8), scales


def int4_weight(weight: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """weight [out, in] -> codes of 0 to 15 as int32 [out, in], scales and middles bf16 [out, in / group]."""
    groups = weight.float().unflatten(1, (-1, group))  # [out, in / group, group]
    low, high = groups.aminmax(dim=-1)
    scales = ((high - low) / 15).clamp_min(torch.finfo(torch.bfloat16).tiny).bfloat16()
    middles = (low + 8 * scales.float()).bfloat16()
    codes = ((groups - middles.float()[..., None]) / scales.float()[..., None]).round() + 8
    return codes.clamp(0, 15).flatten(1).int(), scales, middles


def int4_dense(codes: Tensor, scales: Tensor, middles: Tensor) -> Tensor:
    """The inverse of `int4_weight`, in fp32 [out, in]."""
    steps = codes.unflatten(1, (scales.shape[1], -1)).float() - 8
    return (steps * scales.float()[..., None] + middles.float()[..., None]).flatten(1)


class QuantizedLinear:
    """The same product over a weight [out, in] in fewer bits, which a subclass has as `product`."""

    def __init__(self, codes: Tensor, scales: Tensor, bias: Tensor | None, has_kernel: bool) -> None:
        self.codes, self.scales, self.bias, self.has_kernel = codes, scales, bias, has_kernel
        self.kernels = triton_module("minillm.fast.weight_kernels", codes.device)  # a GPU's
        self.weight_bytes = codes.nbytes + scales.nbytes + (0 if bias is None else bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        """x [N, in] -> [N, out]."""
        out = self.product(x).to(x.dtype)
        return out if self.bias is None else out + self.bias


class Int8Linear(QuantizedLinear):
    """Weights in int8, with a scale per output channel."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__(*int8_weight(weight), bias, kernel_fits(weight))

    def product(self, x: Tensor) -> Tensor:
        """x [N, in] -> [N, out], before the bias."""
        if self.kernels:
            return self.kernels.product(x, self.codes, self.scales, self.scales, "int8")
        if self.has_kernel and len(x) <= FEW_ROWS:
            return torch.ops.aten._weight_int8pack_mm(x.bfloat16(), self.codes, self.scales)
        return F.linear(x, (self.codes.float() * self.scales.float()[:, None]).to(x.dtype))


class Int4Linear(QuantizedLinear):
    """Weights in int4. Keeps one copy of the codes: the kernel's, where there is a kernel."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.group = even_group("a row of", weight.shape[1], WEIGHT_GROUP)
        codes, scales, middles = int4_weight(weight, self.group)
        has_kernel = self.group == WEIGHT_GROUP and kernel_fits(weight)
        if has_kernel:
            codes = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)  # [out, in / 2]
            scales = torch.stack((scales, middles), dim=-1).transpose(0, 1).contiguous()  # [in / group, out, 2]
        else:
            codes, scales = pack_nibbles(codes), torch.stack((scales, middles))  # [out, in / 2], [2, out, in / group]
        super().__init__(codes, scales, bias, has_kernel)

    def product(self, x: Tensor) -> Tensor:
        """x [N, in] -> [N, out], before the bias."""
        if self.kernels and self.group == WEIGHT_GROUP:
            return self.kernels.product(x, self.codes, *self.scales, "int4")
        if self.has_kernel:
            return torch.ops.aten._weight_int4pack_mm_for_cpu(x.bfloat16(), self.codes, self.group, self.scales)
        return F.linear(x, int4_dense(unpack_nibbles(self.codes), *self.scales).to(x.dtype))


def kernel_fits(weight: Tensor) -> bool:
    """Whether PyTorch's kernels for int8 and int4 take a weight [out, in]: whole vectors, on a CPU that has them."""
    rows, columns = weight.shape
    return weight.device.type == "cpu" and columns % 64 == 0 and rows % 16 == 0 and has_kernels()


@cache
def has_kernels() -> bool:
    """Whether this PyTorch has the CPU kernels for int8 and int4 weights, which are private: they are tried."""
    codes, x = torch.arange(16 * 64, dtype=torch.int32).view(16, 64) % 16, torch.ones(1, 64, dtype=torch.bfloat16)
    scales, ones = torch.ones(1, 16, 2, dtype=torch.bfloat16), torch.ones(16, dtype=torch.bfloat16)
    try:
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
        four = torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, 64, scales)
        eight = torch.ops.aten._weight_int8pack_mm(x, codes.to(torch.int8), ones)
    except (AttributeError, NotImplementedError, RuntimeError):
        return False
    return bool((four == (codes - 7).sum(1)).all() and (eight == codes.sum(1)).all())  # bf16 holds 32 and 480 exactly


WEIGHT_FORMATS = {"int8": (Int8Linear, Int8Linear), "int4": (Int4Linear, Int8Linear)}  # of the layers, and of the head


def quantize_weights(model: FastLlama, weight_format: str) -> FastLlama:
    """A model with the same embedding and norms, whose matrices are stored in `weight_format`: "int8" or "int4".

    A tied embedding is untied: the table stays as it is, since a step reads one row of it per token; the
    head becomes int8 in both formats, since its errors reach the logits undiminished. `model` is not
    changed. Raises ValueError for an unknown format, or a model that was quantised before.
    """
    if weight_format not in WEIGHT_FORMATS:
        raise ValueError(f"unknown weight format {weight_format!r}; known: {', '.join(WEIGHT_FORMATS)}")
    if model.weight_format is not None:
        raise ValueError(f"these weights are {model.weight_format} already: load the model again")
    layer_kind, head_kind = WEIGHT_FORMATS[weight_format]
    quantized = copy(model)
    quantized.weight_format = weight_format
    quantized.head = head_kind(model.head.weight, model.head.bias)
    quantized.layers = [copy(layer) for layer in model.layers]
    for layer in quantized.layers:
        for name in layer.LINEARS:
            linear = getattr(layer, name)
            setattr(layer, name, layer_kind(linear.weight, linear.bias))
    return quantized
