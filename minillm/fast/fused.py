"""The operations between the matrices of a layer as Triton kernels: one launch, one read and one write each.

A program keeps in registers what one sum or one rotation needs:

    add_norm          one program a token: its H numbers, for the mean of their squares
    rotate_and_store  one program a (token, head): its D numbers, and the same ones half a head further;
                      queries are written out, keys and values straight into the store
    rotate            the same without the store, where keys are transformed before they are stored
    gate              one program a (token, block of columns): nothing depends on anything else

A layer's last addition waits for the next layer, whose first norm is over the sum: one kernel does both.

All compute in fp32. A Triton block is a power of two long; `inside` masks the rest of it. Rows may have
any stride (q, k and v are parts of a wider row); within a row numbers are neighbours.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from minillm.fast.kernels import StepKernels, columns, number_shape, store_numbers
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
def rotated(x, cos, sin, norm, eps, d, inside, D: tl.constexpr, HAS_NORM: tl.constexpr):
    """The numbers d of the head at x, rotated by its token's cos and sin, and normed before by `norm`; in fp32."""
    partner = (d + D // 2) % D
    a = tl.load(x + d, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x + partner, mask=inside, other=0.0).to(tl.float32)
    if HAS_NORM:
        scale = 1.0 / tl.sqrt(tl.sum(a * a, 0) / D + eps)
        a *= scale * tl.load(norm + d, mask=inside, other=0.0).to(tl.float32)
        b *= scale * tl.load(norm + partner, mask=inside, other=0.0).to(tl.float32)
    c = tl.load(cos + d, mask=inside, other=0.0).to(tl.float32)
    return a * c + b * tl.load(sin + d, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def rotate_kernel(
    x, cos, sin, norm, out, x_row, x_head, eps,
    HEADS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, HAS_NORM: tl.constexpr,
):
    """x [N, HEADS, D] with its strides; cos, sin [N, 1, D]; norm [HEADS, D], or anything; out [N, HEADS, D]."""
    token, head, d = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, BLOCK)
    x, cos, sin, norm = x + token * x_row + head * x_head, cos + token * D, sin + token * D, norm + head * D
    turned = rotated(x, cos, sin, norm, eps, d, d < D, D, HAS_NORM)
    tl.store(out + (token * HEADS + head) * D + d, turned.to(out.dtype.element_ty), mask=d < D)


@triton.jit(do_not_specialize_on_alignment=["slots"])
def rotate_and_store_kernel(
    x, cos, sin, norm, q, slots, k_codes, k_scales, k_minima, v_codes, v_scales, v_minima, x_row, x_head, eps,
    QUERIES: tl.constexpr, HAS_NORM: tl.constexpr,
    HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
):
    """x [N, QUERIES + 2 HEADS, D] with its strides: queries, keys, values; q [N, QUERIES, D]; slots [N]."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d, inside = columns(D, BLOCK_D, GROUP, BLOCK_GROUP)
    place = tl.load(slots + token).to(tl.int64) * HEADS + (head - QUERIES) % HEADS
    x, cos, sin, norm = x + token * x_row + head * x_head, cos + token * D, sin + token * D, norm + head * D
    if head >= QUERIES + HEADS:
        value = tl.load(x + d, mask=inside, other=0.0)
        store_numbers(value, v_codes, v_scales, v_minima, place, D, BLOCK_D, FORMAT, GROUP, BLOCK_GROUP)
    else:
        turned = rotated(x, cos, sin, norm, eps, d, inside, D, HAS_NORM).to(q.dtype.element_ty)
        if head < QUERIES:
            tl.store(q + (token * QUERIES + head) * D + d, turned, mask=inside)
        else:
            store_numbers(turned, k_codes, k_scales, k_minima, place, D, BLOCK_D, FORMAT, GROUP, BLOCK_GROUP)


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


def rotate_and_store(heads: Tensor, rotation: CosSin, norm: Tensor | None, eps: float, cache: StepKernels,
                     layer: int) -> Tensor:
    """heads [N, Hq + 2 Hkv, D]: queries, keys, values -> the queries rotated [N, Hq, D]; the others are stored."""
    rows, number, head_dim = heads.shape
    numbers = cache.numbers(layer)
    kv_heads = numbers[0].shape[1]
    q = heads.new_empty(rows, number - 2 * kv_heads, head_dim)
    rotate_and_store_kernel[(rows, number)](
        heads, *rotation, q if norm is None else norm, q, cache.new_slots, *numbers, *heads.stride()[:2], eps,
        QUERIES=q.shape[1], HAS_NORM=norm is not None, **number_shape(cache.storage.keys, kv_heads, head_dim),
        num_warps=1,
    )
    return q


def gate(both: Tensor) -> Tensor:
    """As `llama.gate`: both [N, 2 inner] -> [N, inner]."""
    rows, inner = len(both), both.shape[1] // 2
    out = both.new_empty(rows, inner)
    gate_kernel[(rows, triton.cdiv(inner, COLUMNS))](both, out, both.stride(0), inner, COLUMNS, num_warps=4)
    return out


class FusedLayer(DecoderLayer):
    """A decoder layer with these kernels between its matrices."""

    def forward(self, x: Tensor | tuple[Tensor, Tensor], rotation: CosSin, cache: CacheView):
        """x [N, H], of all but the last layer as two summands: the next layer adds them."""
        eps = self.config.rms_norm_eps
        if isinstance(x, tuple):
            x, normed = add_norm(*x, self.attention_norm, eps)  # two of [N, H]
        else:
            normed = rms_norm(x, self.attention_norm, eps)
        attended = self.attend(normed, rotation, cache)  # [N, Hq, D]
        x, normed = add_norm(x, self.output(attended.flatten(1)), self.mlp_norm, eps)
        change = self.down(gate(self.gate_up(normed)))
        return x + change if self.index + 1 == self.config.num_hidden_layers else (x, change)

    def attend(self, x: Tensor, rotation: CosSin, cache: CacheView) -> Tensor:
        """Normed x [N, H] -> attended [N, Hq, D]."""
        if not isinstance(cache, StepKernels) or cache.storage.key_transform is not None:
            return cache.attend(self.index, *self.project(x, rotation))
        heads = self.qkv(x).view(len(x), -1, self.config.head_dim)  # [N, Hq + 2 Hkv, D]
        q = rotate_and_store(heads, rotation, self.head_norm, self.config.rms_norm_eps, cache, self.index)
        return cache.attend_stored(self.index, q)

    def rotate(self, heads: Tensor, rotation: CosSin) -> Tensor:
        """Queries and keys [N, Hq + Hkv, D], normalised first where the model does that -> the same, rotated."""
        return rotate(heads, rotation, self.head_norm, self.config.rms_norm_eps)
