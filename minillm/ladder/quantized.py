"""Rung 5: how keys and values are stored. Fewer bits a number, more tokens in the same memory.

A storage is a long run of token slots; who owns which slot is the block pool's affair. The
slots past the pool's last block are scratch: a row that must not touch the cache (an idle
row of a static batch) writes there.

    format            a token's D numbers of one head                      bytes, D = 64
    fp32, bf16, fp16  as the model computed them                           256, 128, 128
    int8              q = round(x / s), s = max|x| / 127 in fp16           66
    fp8               x / s as e4m3, s = max|x| / 448 in fp16              66
    int4              groups of up to 32: x = q s + m, two q to a byte,    40
                      s and m in fp16

Every token and head has scales of its own. So a slot can be written, rolled back and shared
without a look at its neighbours, which a scale over several tokens would not allow.

Keys are harder than values: a few of their channels are far larger than the rest, and one
scale for all of a token's channels spends its steps on those (KIVI: Liu et al., 2024). A
`KeyTransform` evens them out before storing, in a way that leaves every attention weight
as it was: q and k change together.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from minillm.model.config import ModelConfig

NATIVE_FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SMALLEST_SCALE = 2.0**-24  # the smallest fp16 above 0: a scale below it would be stored as 0, and divide to NaN
LARGEST_SCALE = 65504.0
INT4_GROUP = 32


def native_format(dtype: torch.dtype) -> str:
    """The format that stores a model's keys and values as they are."""
    return next(name for name, native in NATIVE_FORMATS.items() if native == dtype)


def kv_bytes_per_token(config: ModelConfig, kv_format: str) -> int:
    """Bytes of cache per token, scales counted: keys and values of all layers and KV heads.

    Raises ValueError for an unknown format, or a head_dim that the format cannot pack.
    """
    store = store_for(kv_format)
    return 2 * config.num_hidden_layers * config.num_key_value_heads * store.bytes_per_head(config.head_dim, kv_format)


def store_for(kv_format: str) -> type:
    """The class that stores this format; ValueError lists the formats."""
    if kv_format not in STORES:
        raise ValueError(f"unknown KV format {kv_format!r}; known: {', '.join(STORES)}")
    return STORES[kv_format]


class KVStorage:
    """Keys and values of `slots` tokens in every layer, in one format."""

    def __init__(
        self,
        config: ModelConfig,
        kv_format: str,
        slots: int,
        device: str | torch.device = "cpu",
        key_transform: KeyTransform | None = None,
    ) -> None:
        kind, shape = store_for(kv_format), (config.num_hidden_layers, slots, config.num_key_value_heads)
        self.keys = kind(shape, config.head_dim, kv_format, device)
        self.values = kind(shape, config.head_dim, kv_format, device)
        self.key_transform, self.device = key_transform, torch.device(device)

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def prepare(self, layer: int, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """q [N, Hq, D] and k [N, Hkv, D] as attention and storage are to use them."""
        return (q, k) if self.key_transform is None else self.key_transform.apply(layer, q, k)

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store k, v [N, Hkv, D] in slots [N]."""
        self.keys.write(layer, slots, k)
        self.values.write(layer, slots, v)

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of slots [M], each [M, Hkv, D]: native ones as stored, others in fp32."""
        return self.keys.read(layer, slots), self.values.read(layer, slots)


class NativeStore:
    """Numbers as the model computed them, [L, slots, Hkv, D]."""

    def __init__(self, shape: tuple[int, int, int], head_dim: int, kv_format: str, device) -> None:
        self.numbers = torch.zeros((*shape, head_dim), dtype=NATIVE_FORMATS[kv_format], device=device)
        self.nbytes = self.numbers.nbytes

    @staticmethod
    def bytes_per_head(head_dim: int, kv_format: str) -> int:
        return head_dim * NATIVE_FORMATS[kv_format].itemsize

    def write(self, layer: int, slots: Tensor, x: Tensor) -> None:
        """x [N, Hkv, D]."""
        self.numbers[layer].index_copy_(0, slots, x.to(self.numbers.dtype))

    def read(self, layer: int, slots: Tensor) -> Tensor:
        """[M, Hkv, D]."""
        return self.numbers[layer].index_select(0, slots)


class ScaledStore:
    """One byte a number, int8 or fp8, and one fp16 scale per token and head."""

    def __init__(self, shape: tuple[int, int, int], head_dim: int, kv_format: str, device) -> None:
        self.encode, self.decode = {"int8": (int8_encode, int8_decode), "fp8": (fp8_encode, fp8_decode)}[kv_format]
        self.codes = torch.zeros((*shape, head_dim), dtype=torch.uint8, device=device)  # bit patterns
        self.scales = torch.ones(shape, dtype=torch.float16, device=device)
        self.nbytes = self.codes.nbytes + self.scales.nbytes

    @staticmethod
    def bytes_per_head(head_dim: int, kv_format: str) -> int:
        return head_dim + 2

    def write(self, layer: int, slots: Tensor, x: Tensor) -> None:
        """x [N, Hkv, D]."""
        codes, scales = self.encode(x)
        self.codes[layer].index_copy_(0, slots, codes)
        self.scales[layer].index_copy_(0, slots, scales)

    def read(self, layer: int, slots: Tensor) -> Tensor:
        """[M, Hkv, D], fp32."""
        return self.decode(self.codes[layer].index_select(0, slots), self.scales[layer].index_select(0, slots))


class Int4Store:
    """Two numbers to a byte; a scale and a minimum in fp16 per token, head and group of numbers."""

    def __init__(self, shape: tuple[int, int, int], head_dim: int, kv_format: str, device) -> None:
        self.group = int4_group(head_dim)
        groups = head_dim // self.group
        self.codes = torch.zeros((*shape, head_dim // 2), dtype=torch.uint8, device=device)
        self.scales = torch.ones((*shape, groups), dtype=torch.float16, device=device)
        self.minima = torch.zeros((*shape, groups), dtype=torch.float16, device=device)
        self.nbytes = self.codes.nbytes + self.scales.nbytes + self.minima.nbytes

    @staticmethod
    def bytes_per_head(head_dim: int, kv_format: str) -> int:
        return head_dim // 2 + 4 * (head_dim // int4_group(head_dim))

    def write(self, layer: int, slots: Tensor, x: Tensor) -> None:
        """x [N, Hkv, D]."""
        encoded = int4_encode(x, self.group)
        for store, new in zip((self.codes, self.scales, self.minima), encoded, strict=True):
            store[layer].index_copy_(0, slots, new)

    def read(self, layer: int, slots: Tensor) -> Tensor:
        """[M, Hkv, D], fp32."""
        return int4_decode(*(store[layer].index_select(0, slots) for store in (self.codes, self.scales, self.minima)))


STORES: dict[str, type] = {
    **dict.fromkeys(NATIVE_FORMATS, NativeStore),
    "int8": ScaledStore,
    "fp8": ScaledStore,
    "int4": Int4Store,
}


# -- codes ----------------------------------------------------------------------------------------
# Rounding happens against the scale as it is stored, so that what is read is the nearest there is.


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


def int4_group(head_dim: int) -> int:
    """Numbers that share a scale: the largest even divisor of head_dim up to 32; ValueError if there is none."""
    sizes = [size for size in range(2, INT4_GROUP + 1, 2) if head_dim % size == 0]
    if not sizes:
        raise ValueError(f"int4 packs two numbers to a byte, and head_dim {head_dim} is odd: take int8 or fp8")
    return sizes[-1]


def int4_encode(x: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """x [..., D] -> codes [..., D / 2], scales and minima [..., D / group]. Number 2i is in the low half of byte i."""
    x = x.float().unflatten(-1, (-1, group))  # [..., D / group, group]
    minima = x.amin(-1).clamp(-LARGEST_SCALE, LARGEST_SCALE).half()
    scales = stored_scale((x.amax(-1) - minima.float()) / 15)
    steps = (x - minima[..., None].float()) / scales[..., None].float()
    codes = steps.round().clamp(0, 15).to(torch.uint8).flatten(-2)  # [..., D]
    return codes[..., 0::2] | codes[..., 1::2] << 4, scales, minima


def int4_decode(codes: Tensor, scales: Tensor, minima: Tensor) -> Tensor:
    """The inverse, in fp32."""
    codes = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)  # [..., D]
    steps = codes.unflatten(-1, (scales.shape[-1], -1)).float()  # [..., D / group, group]
    return torch.addcmul(minima[..., None].float(), steps, scales[..., None].float()).flatten(-2)


# -- keys made even -------------------------------------------------------------------------------


class KeyTransform(Protocol):
    """A change of q and k together that leaves the attention weights as they were."""

    def apply(self, layer: int, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """q [N, Hq, D], k [N, Hkv, D] -> the same, transformed."""
        ...


class Rotation:
    """Turn q and k by one orthogonal matrix: q·k stays, and a large channel is spread over all.

    Hadamard's matrix where head_dim is a power of two (QuaRot: Ashkboos et al., 2024),
    else a seeded random one.
    """

    def __init__(self, head_dim: int, device: str | torch.device = "cpu", seed: int = 0) -> None:
        if head_dim & (head_dim - 1) == 0:
            matrix = torch.ones(1, 1)
            while len(matrix) < head_dim:
                matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1))) / 2**0.5
        else:
            matrix = torch.linalg.qr(torch.randn(head_dim, head_dim, generator=torch.Generator().manual_seed(seed)))[0]
        self.matrix = matrix.to(device)  # [D, D]

    def apply(self, layer: int, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """q [N, Hq, D], k [N, Hkv, D] -> the same, rotated."""
        matrix = self.matrix.to(q.dtype)
        return q @ matrix, k @ matrix


class ChannelScaling:
    """Store (k - mean) / scale, attend with q * scale; mean and scale per channel, calibrated once.

    The scales cancel in q·k. Leaving out the mean takes the same q·mean from the score of
    every key, which a softmax does not see.
    """

    def __init__(self, mean: Tensor, scale: Tensor) -> None:
        """mean and scale [L, Hkv, D], scale positive."""
        self.mean, self.scale = mean, scale

    @classmethod
    def calibrate(cls, keys: Tensor) -> ChannelScaling:
        """From keys [L, N, Hkv, D] of some text: each channel's mean and standard deviation."""
        keys = keys.float()
        return cls(keys.mean(1), keys.std(1).clamp_min(1e-6))

    def apply(self, layer: int, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """q [N, Hq, D], k [N, Hkv, D] -> the same, scaled."""
        mean, scale = self.mean[layer].to(k.dtype), self.scale[layer].to(k.dtype)  # [Hkv, D]
        return q * scale.repeat_interleave(q.shape[1] // k.shape[1], dim=0), (k - mean) / scale
