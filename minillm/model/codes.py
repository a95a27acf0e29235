"""Numbers in 8 and 4 bits: codes, and the scales that give them a meaning.

    int8   q = round(x / s), s = max|x| / 127             one scale for the last axis
    fp8    x / s as e4m3, s = max|x| / 448                one scale for the last axis
    int4   x = q s + m, q of 0 to 15, two q to a byte     a scale and a minimum per group

Scales and minima are kept in fp16, and rounding happens against them as they are kept, so
that what is read is the nearest there is. Keys and values are stored like this, and so are
weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

SMALLEST_SCALE = 2.0**-24  # the smallest fp16 above 0: a scale below it would be stored as 0, and divide to NaN
LARGEST_SCALE = 65504.0


def stored_scale(scale: Tensor) -> Tensor:
    """A positive scale as fp16 keeps it: never 0, never infinite."""
    return scale.clamp(SMALLEST_SCALE, LARGEST_SCALE).half()


def int8_encode(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., D] -> codes, the bits of int8 [..., D], and scales [...]."""
    x = x.float()
    scales = stored_scale(x.abs().amax(-1) / 127)
    codes = (x / scales[..., None].float()).round().clamp(-127, 127)  # the stored scale may be a little small
    return codes.to(torch.int8).view(torch.uint8), scales


def int8_decode(codes: Tensor, scales: Tensor) -> Tensor:
    """The inverse, in fp32."""
    return codes.view(torch.int8).float().mul_(scales[..., None])


def fp8_encode(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., D] -> codes, the bits of e4m3 [..., D], and scales [...]."""
    x = x.float()
    scales = stored_scale(x.abs().amax(-1) / 448)
    codes = (x / scales[..., None].float()).clamp(-448, 448)  # e4m3 has no infinity: beyond 448 it is NaN
    return codes.to(torch.float8_e4m3fn).view(torch.uint8), scales


def fp8_decode(codes: Tensor, scales: Tensor) -> Tensor:
    """The inverse, in fp32."""
    return codes.view(torch.float8_e4m3fn).float().mul_(scales[..., None])


def even_group(what: str, numbers: int, most: int) -> int:
    """How many of a row's numbers share a scale in int4: its largest even divisor up to `most`; ValueError if odd."""
    if numbers % 2:
        raise ValueError(f"int4 packs two numbers to a byte, and {what} {numbers} is odd: take int8")
    return next(size for size in range(most - most % 2, 0, -2) if numbers % size == 0)


def pack_nibbles(codes: Tensor) -> Tensor:
    """Codes of 0 to 15 [..., D] -> bytes [..., D / 2]. Number 2i is in the low half of byte i."""
    return (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """The inverse, [..., D]."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def int4_encode(x: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """x [..., D] -> codes [..., D / 2], packed; scales and minima [..., D / group]."""
    x = x.float().unflatten(-1, (-1, group))  # [..., D / group, group]
    minima = x.amin(-1).clamp(-LARGEST_SCALE, LARGEST_SCALE).half()
    scales = stored_scale((x.amax(-1) - minima.float()) / 15)
    steps = (x - minima[..., None].float()) / scales[..., None].float()
    return pack_nibbles(steps.round().clamp(0, 15).to(torch.uint8).flatten(-2)), scales, minima


def int4_decode(codes: Tensor, scales: Tensor, minima: Tensor) -> Tensor:
    """The inverse, in fp32."""
    steps = unpack_nibbles(codes).unflatten(-1, (scales.shape[-1], -1)).float()  # [..., D / group, group]
    return torch.addcmul(minima[..., None].float(), steps, scales[..., None].float()).flatten(-2)
