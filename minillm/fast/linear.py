"""Matrix-vector products: where nearly all the time of a decode step goes.

At few rows a linear layer is bound by reading its weights, yet PyTorch's default fp32
path on x86 reaches a third of the memory bandwidth there: it re-arranges the weights into
the blocks its kernel wants at every call. oneDNN can do that once, when the model is
loaded. `PackedLinear` does; `Linear` is the plain path, and the only one elsewhere.

Fewer bits are fewer bytes to read. `quantize_weights` turns a loaded model into one with

    int8   w = q s, q of -127 to 127             a scale per output channel        8.03 bits
    int4   w = (q - 8) s + m, q of 0 to 15       a scale and a middle per 64       4.5 bits

Scales and middles are bf16, since PyTorch's CPU kernels want them so. Those kernels read the
codes, round the activations to bf16, and win at few rows; at many rows the arithmetic decides
and fp32 is faster. Where there is no kernel, weights are dequantised for each product: that
saves memory and costs time.
"""

from __future__ import annotations

from copy import copy
from functools import cache
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from minillm.model.codes import even_group, pack_nibbles, unpack_nibbles

if TYPE_CHECKING:
    from minillm.model.llama import Llama

Packing = bool | Literal["auto"]

ROWS_HINT = 8  # oneDNN chooses its block layout for about this many rows; it is fast from 1 to 512
WEIGHT_GROUP = 64  # neighbouring int4 weights of an output channel that share a scale, at most
FEW_ROWS = 32  # up to which the int8 kernel beats a dequantised product


class Linear:
    """y = x Wᵀ + b with the weight as it was loaded. weight [out, in], bias [out] or None."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias
        self.weight_bytes = sum(t.nbytes for t in (weight, bias) if t is not None)

    def __call__(self, x: Tensor) -> Tensor:
        """x [N, in] -> [N, out]."""
        return F.linear(x, self.weight, self.bias)


class PackedLinear:
    """The same product over weights that oneDNN has packed once (x86 CPUs, fp32).

    Keeps only the packed copy. The operators are private to PyTorch, so `can_pack` tries
    them before anyone relies on them.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight_bytes = sum(t.nbytes for t in (weight, bias) if t is not None)
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), ROWS_HINT)
        self.bias = bias

    @property
    def weight(self) -> Tensor:
        """The weight [out, in], unpacked."""
        return self.packed.to_dense()

    def __call__(self, x: Tensor) -> Tensor:
        """x [N, in] -> [N, out]."""
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


@cache
def can_pack() -> bool:
    """True where this PyTorch has oneDNN's packed linear and it agrees with the plain one."""
    weight = torch.arange(48.0).view(6, 8) / 48  # [out, in]
    x = torch.linspace(-1, 1, 24).view(3, 8)  # [N, in]
    try:
        packed = PackedLinear(weight, torch.ones(6))(x)
    except (AttributeError, NotImplementedError, RuntimeError):
        return False
    return torch.allclose(packed, F.linear(x, weight, torch.ones(6)), atol=1e-5)


def make_linear(weight: Tensor, bias: Tensor | None = None, packed: Packing = "auto") -> Linear | PackedLinear:
    """The fastest layer this device has for `weight` [out, in].

    packed: True insists (RuntimeError where it cannot be), False keeps the plain path,
    "auto" packs fp32 weights on a CPU that supports it.
    """
    fits = weight.device.type == "cpu" and weight.dtype == torch.float32
    if packed is True and not (fits and can_pack()):
        raise RuntimeError(
            f"packed=True needs fp32 weights on an x86 CPU with oneDNN; these are {weight.dtype} on {weight.device}: "
            "use packed='auto'"
        )
    if packed and fits and can_pack():
        return PackedLinear(weight, bias)
    return Linear(weight, bias)


# -- fewer bits -----------------------------------------------------------------------------------


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


class Int8Linear:
    """The same product over weights in int8, with a scale per output channel."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.codes, self.scales = int8_weight(weight)
        self.bias, self.has_kernel = bias, kernel_fits(weight)
        self.weight_bytes = sum(t.nbytes for t in (self.codes, self.scales, bias) if t is not None)

    def __call__(self, x: Tensor) -> Tensor:
        """x [N, in] -> [N, out]."""
        if not (self.has_kernel and len(x) <= FEW_ROWS):
            return F.linear(x, (self.codes.float() * self.scales.float()[:, None]).to(x.dtype), self.bias)
        out = torch.ops.aten._weight_int8pack_mm(x.bfloat16(), self.codes, self.scales).to(x.dtype)
        return out if self.bias is None else out + self.bias


class Int4Linear:
    """The same product over weights in int4. Keeps one copy of the codes: the kernel's, where there is a kernel."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        group = even_group("a row of", weight.shape[1], WEIGHT_GROUP)
        codes, scales, middles = int4_weight(weight, group)
        self.group, self.bias, self.has_kernel = group, bias, group == WEIGHT_GROUP and kernel_fits(weight)
        if self.has_kernel:
            self.codes = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)  # [out, in / 2]
            self.scales = torch.stack((scales, middles), dim=-1).transpose(0, 1).contiguous()  # [in / group, out, 2]
        else:
            self.codes = pack_nibbles(codes)  # [out, in / 2]
            self.scales = torch.stack((scales, middles))  # [2, out, in / group]
        self.weight_bytes = sum(t.nbytes for t in (self.codes, self.scales, bias) if t is not None)

    def __call__(self, x: Tensor) -> Tensor:
        """x [N, in] -> [N, out]."""
        if not self.has_kernel:
            return F.linear(x, int4_dense(unpack_nibbles(self.codes), *self.scales).to(x.dtype), self.bias)
        rows = torch.ops.aten._weight_int4pack_mm_for_cpu(x.bfloat16(), self.codes, self.group, self.scales)
        return rows.to(x.dtype) if self.bias is None else rows.to(x.dtype) + self.bias


def kernel_fits(weight: Tensor) -> bool:
    """Whether PyTorch's kernels for int8 and int4 take a weight [out, in]: whole vectors, on a CPU that has them."""
    rows, columns = weight.shape
    return weight.device.type == "cpu" and columns % 64 == 0 and rows % 16 == 0 and has_kernels()


@cache
def has_kernels() -> bool:
    """True where this PyTorch has the CPU kernels for int8 and int4 weights. They are private, so they are tried."""
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


def quantize_weights(model: Llama, weight_format: str) -> Llama:
    """A model with the same embedding and norms, whose matrices are stored in `weight_format`: "int8" or "int4".

    A tied embedding is untied on purpose: as a table it stays as it is, since a step reads one
    row of it per token, and as the head it becomes int8 in both formats, since an error there
    reaches the logits undiminished. `model` is left alone. Raises ValueError for an unknown
    format, or a model that was quantised before.
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
