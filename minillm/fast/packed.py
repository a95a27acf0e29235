"""Matrix-vector products on an x86 CPU: where nearly all the time of a decode step goes.

At few rows a linear layer is bound by reading its weights, yet PyTorch's default fp32 path on x86
reaches a third of the memory bandwidth there: it re-arranges the weights into the blocks its kernel
wants at every call. oneDNN can do that once, when the model is loaded. `PackedLinear` does; the
plain `Linear` of model/llama.py is the only one elsewhere.
"""

from __future__ import annotations

from functools import cache
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from minillm.model.llama import Linear

Packing = bool | Literal["auto"]

ROWS_HINT = 8  # oneDNN chooses its block layout for about this many rows; it is fast from 1 to 512


class PackedLinear:
    """The same product over weights that oneDNN has packed once (x86 CPUs, fp32).

    Keeps only the packed copy. The operators are private to PyTorch, so `can_pack` tries
    them before anyone relies on them.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight_bytes = weight.nbytes + (0 if bias is None else bias.nbytes)
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


def weight_bytes(linear) -> int:
    """Bytes that one product with this layer reads."""
    if isinstance(linear, Linear):
        return linear.weight.nbytes + (0 if linear.bias is None else linear.bias.nbytes)
    return linear.weight_bytes
