"""Products of up to four rows with a weight matrix on a GPU, for a model that is handed to `with_matvec`.

At so few rows a product only reads its weights. A library's kernel for matrices computes tiles of 64 rows or
more, and may leave some of the bandwidth unused at one. Here a program reads OUT rows of the weights, a run of
columns at a time, multiplies in fp32 and adds up at the end; no matrix unit is used, and none is missed.

Off by default: whether it gains anything is for a measurement on the device to say.
"""

from __future__ import annotations

from copy import copy

import torch
import triton
import triton.language as tl
from torch import Tensor

from minillm.fast.model import FastLlama
from minillm.model.llama import Linear

MOST_ROWS = 4
OUT, COLUMNS = 2, 1024  # of a program: rows of the weight, and columns that it reads at a time


@triton.jit
def matvec_kernel(
    x, weight, bias, y, x_row, columns, outs,
    ROWS: tl.constexpr, OUT: tl.constexpr, COLUMNS: tl.constexpr, HAS_BIAS: tl.constexpr,
):
    """x [ROWS, columns], its rows at any stride; weight [outs, columns]; bias [outs], or anything; y [ROWS, outs]."""
    out, c = tl.program_id(0) * OUT + tl.arange(0, OUT), tl.arange(0, COLUMNS)[None, None, :]
    row, is_out = tl.arange(0, ROWS), out < outs
    x, weight = x + row[:, None, None] * x_row, weight + out.to(tl.int64)[None, :, None] * columns
    products = tl.zeros([ROWS, OUT, COLUMNS], tl.float32)  # added up at the end: between threads that takes a barrier
    for at in range(0, columns, COLUMNS):
        inside = at + c < columns
        w = tl.load(weight + at + c, mask=is_out[None, :, None] & inside, other=0.0).to(tl.float32)
        products += tl.load(x + at + c, mask=inside, other=0.0).to(tl.float32) * w
    sums = tl.sum(products, 2)  # [ROWS, OUT]
    if HAS_BIAS:
        sums += tl.load(bias + out, mask=is_out, other=0.0).to(tl.float32)[None, :]
    place = row[:, None] * outs + out[None, :]
    tl.store(y + place, sums.to(y.dtype.element_ty), mask=is_out[None, :])


def matvec(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [1, 2 or 4 rows, in], weight [out, in], bias [out] -> [rows, out]."""
    rows, (outs, columns) = len(x), weight.shape
    y = x.new_empty(rows, outs)
    matvec_kernel[(triton.cdiv(outs, OUT),)](
        x, weight, y if bias is None else bias, y, x.stride(0), columns, outs,
        ROWS=rows, OUT=OUT, COLUMNS=COLUMNS, HAS_BIAS=bias is not None, num_warps=4,
    )
    return y


class MatvecLinear(Linear):
    """A linear layer that takes the kernel above for one, two and four rows: the sizes that graphs record."""

    def __call__(self, x: Tensor) -> Tensor:
        """x [N, in] -> [N, out]."""
        if len(x) in (1, 2, MOST_ROWS):
            return matvec(x, self.weight, self.bias)
        return super().__call__(x)


@torch.no_grad()
def with_matvec(model: FastLlama) -> FastLlama:
    """A model with the same weights whose small products take this kernel. `model` is not changed.

    Raises ValueError where its weights are quantised, or packed for a CPU.
    """
    changed = copy(model)
    changed.head = small(model.head)
    changed.layers = [copy(layer) for layer in model.layers]
    for layer in changed.layers:
        for name in layer.LINEARS:
            setattr(layer, name, small(getattr(layer, name)))
    return changed


def small(linear) -> MatvecLinear:
    """The same layer, with the kernel for few rows."""
    if not isinstance(linear, Linear):
        raise ValueError(f"a {type(linear).__name__} has no weights that this kernel can read")
    return MatvecLinear(linear.weight, linear.bias)
