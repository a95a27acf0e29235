"""The operations between the matrices of a layer as three Triton kernels: one launch, one read and one write each.

A program keeps in registers what one sum or one rotation needs:

    add_norm    one program a token: its H numbers, for the mean of their squares
    rotate      one program a (token, head): its D numbers, and the same ones half a head further
    gate        one program a (token, block of columns): nothing depends on anything else

All compute in fp32. A Triton block is a power of two long; `inside` masks the rest of it. Rows may have
any stride (q, k and v are parts of a wider row); within a row numbers are neighbours.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from minillm.model.llama import CacheView, CosSin, DecoderLayer, rms_norm

COLUMNS = 1024  # of a block of `gate`


@triton.jit
def add_norm_kernel(x, change, weight, total, normed, x_row, change_row, eps, H: tl.constexpr, BLOCK: tl.constexpr):
    """x, change [N, H] with the strides of their rows; weight [H]; total, normed [N, H]."""
    token, h = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = h < H
    old = tl.load(x + token * x_row + h, mask=inside, other=0.0).to(tl.float32)
    new = tl.load(change + token * change_row + h, mask=inside, other=0.0).to(tl.float32)
    both = (old + new).to(total.dtype.element_ty)
    tl.store(total + token * H + h, both, mask=inside)
    both = both.to(tl.float32)  # rounded as it is stored, since the plain path norms that
    scale = 1.0 / tl.sqrt(tl.sum(both * both, 0) / H + eps)
    scaled = both * scale * tl.load(weight + h, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + token * H + h, scaled.to(normed.dtype.element_ty), mask=inside)


@triton.jit
def rotate_kernel(
    x, cos, sin, norm, out, x_row, x_head, eps,
    HEADS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, HAS_NORM: tl.constexpr,
):
    """x [N, HEADS, D] with its strides; cos, sin [N, 1, D]; norm [HEADS, D], or anything; out [N, HEADS, D]."""
    token, head, d = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, BLOCK)
    inside, partner = d < D, (d + D // 2) % D
    x += token * x_row + head * x_head
    a = tl.load(x + d, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x + partner, mask=inside, other=0.0).to(tl.float32)
    if HAS_NORM:
        scale = 1.0 / tl.sqrt(tl.sum(a * a, 0) / D + eps)
        a *= scale * tl.load(norm + head * D + d, mask=inside, other=0.0).to(tl.float32)
        b *= scale * tl.load(norm + head * D + partner, mask=inside, other=0.0).to(tl.float32)
    c = tl.load(cos + token * D + d, mask=inside, other=0.0).to(tl.float32)
    s = tl.load(sin + token * D + d, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + (token * HEADS + head) * D + d, (a * c + b * s).to(out.dtype.element_ty), mask=inside)


@triton.jit
def gate_kernel(both, out, row, INNER: tl.constexpr, BLOCK: tl.constexpr):
    """both [N, 2 INNER] with the stride of its rows; out [N, INNER]."""
    token, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < INNER
    gate = tl.load(both + token * row + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(both + token * row + INNER + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * INNER + column, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=inside)


def add_norm(x: Tensor, change: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x, change [N, H] -> their sum, which is the residual stream, and its norm, both [N, H]."""
    rows, hidden = x.shape
    total, normed = x.new_empty(2, rows, hidden)
    block = triton.next_power_of_2(hidden)
    add_norm_kernel[(rows,)](
        x, change, weight, total, normed, x.stride(0), change.stride(0), eps, hidden, block,
        num_warps=min(16, max(1, block // 512)),
    )
    return total, normed


def rotate(heads: Tensor, rotation: tuple[Tensor, Tensor], norm: Tensor | None, eps: float) -> Tensor:
    """As `llama.rotate`: heads [N, h, D] rotated, and normed before where there is a `norm` [h, D]."""
    rows, number, head_dim = heads.shape
    out = heads.new_empty(heads.shape)
    rotate_kernel[(rows, number)](
        heads, *rotation, out if norm is None else norm, out, *heads.stride()[:2], eps,
        number, head_dim, triton.next_power_of_2(head_dim), norm is not None, num_warps=1,
    )
    return out


def gate(both: Tensor) -> Tensor:
    """As `llama.gate`: both [N, 2 inner] -> [N, inner]."""
    rows, inner = len(both), both.shape[1] // 2
    out = both.new_empty(rows, inner)
    gate_kernel[(rows, triton.cdiv(inner, COLUMNS))](both, out, both.stride(0), inner, COLUMNS, num_warps=4)
    return out


class FusedLayer(DecoderLayer):
    """A decoder layer with these kernels between its matrices."""

    def forward(self, x: Tensor, rotation: CosSin, cache: CacheView) -> Tensor:
        """x [N, H] -> [N, H]."""
        eps = self.config.rms_norm_eps
        q, k, v = self.project(rms_norm(x, self.attention_norm, eps), rotation)
        attended = cache.attend(self.index, q, k, v)  # [N, Hq, D]
        x, normed = add_norm(x, self.output(attended.flatten(1)), self.mlp_norm, eps)  # two of [N, H]
        return x + self.down(gate(self.gate_up(normed)))

    def rotate(self, heads: Tensor, rotation: CosSin) -> Tensor:
        """Queries and keys [N, Hq + Hkv, D], normalised first where the model does that -> the same, rotated."""
        return rotate(heads, rotation, self.head_norm, self.config.rms_norm_eps)
