"""Matrix-vector products on an x86 CPU: where nearly all the time of a decode step goes.

At few rows a linear layer is bound by reading its weights, yet PyTorch's default fp32 path on x86
reaches a third of the memory bandwidth: it re-arranges the weights for its kernel at every call.
oneDNN can do that once, when the model is loaded.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from minillm.model.llama import Linear

ROWS_HINT = 8  # oneDNN chooses its block layout for about this many rows; it is fast from 1 to 512


class PackedLinear:
    """The same product over fp32 weights that oneDNN has packed once; only the packed copy is kept."""

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
    """Whether oneDNN's packed linear, whose operators are private to PyTorch, is here and agrees with the plain one."""
    weight = torch.arange(48.0).view(6, 8) / 48  # [out, in]
    x = torch.linspace(-1, 1, 24).view(3, 8)  # [N, in]
    try:
        packed = PackedLinear(weight, torch.ones(6))(x)
    except (AttributeError, NotImplementedError, RuntimeError):
        return False
    return torch.allclose(packed, F.linear(x, weight, torch.ones(6)), atol=1e-5)


def make_linear(weight: Tensor, bias: Tensor | None = None, packed: bool = True) -> Linear | PackedLinear:
    """The layer for `weight` [out, in]: with `packed`, a packed one where the weights are fp32 on a CPU that packs."""
    fits = weight.device.type == "cpu" and weight.dtype == torch.float32
    return PackedLinear(weight, bias) if packed and fits and can_pack() else Linear(weight, bias)


def weight_bytes(linear) -> int:
    """Bytes that one product with this layer reads."""
    if isinstance(linear, Linear):
        return linear.weight.nbytes + (0 if linear.bias is None else linear.bias.nbytes)
    return linear.weight_bytes
