"""Rung 5: how keys and values are stored. Fewer bits a number, more tokens in the same memory.

A storage is a long run of token slots; who owns which slot is the block pool's affair. The
slots past the pool's last block are scratch: a row that must not touch the cache (an idle
row of a static batch) writes there. What a slot holds before it is written is undefined:
nobody reads it, so nobody clears it.

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

from minillm.load.weights import DTYPES
from minillm.model.codes import even_group, fp8_decode, fp8_encode, int4_decode, int4_encode, int8_decode, int8_encode
from minillm.model.config import ModelConfig

INT4_GROUP = 32


def native_format(dtype: torch.dtype) -> str:
    """The format that stores a model's keys and values as they are."""
    return next(name for name, native in DTYPES.items() if native == dtype)


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
        self.kv_format, self.key_transform, self.device = kv_format, key_transform, torch.device(device)

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
        self.numbers = torch.empty((*shape, head_dim), dtype=DTYPES[kv_format], device=device)
        self.nbytes = self.numbers.nbytes

    @staticmethod
    def bytes_per_head(head_dim: int, kv_format: str) -> int:
        return head_dim * DTYPES[kv_format].itemsize

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
        self.codes = torch.empty((*shape, head_dim), dtype=torch.uint8, device=device)  # bit patterns
        self.scales = torch.empty(shape, dtype=torch.float16, device=device)
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
        self.group = even_group("head_dim", head_dim, INT4_GROUP)
        groups = head_dim // self.group
        self.codes = torch.empty((*shape, head_dim // 2), dtype=torch.uint8, device=device)
        self.scales = torch.empty((*shape, groups), dtype=torch.float16, device=device)
        self.minima = torch.empty((*shape, groups), dtype=torch.float16, device=device)
        self.nbytes = self.codes.nbytes + self.scales.nbytes + self.minima.nbytes

    @staticmethod
    def bytes_per_head(head_dim: int, kv_format: str) -> int:
        return head_dim // 2 + 4 * (head_dim // even_group("head_dim", head_dim, INT4_GROUP))

    def write(self, layer: int, slots: Tensor, x: Tensor) -> None:
        """x [N, Hkv, D]."""
        encoded = int4_encode(x, self.group)
        for store, new in zip((self.codes, self.scales, self.minima), encoded, strict=True):
            store[layer].index_copy_(0, slots, new)

    def read(self, layer: int, slots: Tensor) -> Tensor:
        """[M, Hkv, D], fp32."""
        return int4_decode(*(store[layer].index_select(0, slots) for store in (self.codes, self.scales, self.minima)))


STORES: dict[str, type] = {
    **dict.fromkeys(DTYPES, NativeStore),
    "int8": ScaledStore,
    "fp8": ScaledStore,
    "int4": Int4Store,
}


# -- keys made even -------------------------------------------------------------------------------


class KeyTransform(Protocol):
    """A change of q and k together that leaves the attention weights as they were."""

    def apply(self, layer: int, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """q [N, Hq, D], k [N, Hkv, D] -> the same, transformed."""
        ...


def default_transform(config: ModelConfig, kv_format: str, device: str | torch.device) -> KeyTransform | None:
    """What needs no calibration and helps: a rotation for fp8 and int4. The steps of int8 are fine enough without."""
    return Rotation(config.head_dim, device) if kv_format in ("fp8", "int4") else None


class Rotation:
    """Turn q and k by one orthogonal matrix: q·k stays, and a large channel is spread over all.

    Hadamard's matrix where head_dim is a power of two and no seed is given (QuaRot: Ashkboos
    et al., 2024), else a random one from the seed (0 if none).
    """

    def __init__(self, head_dim: int, device: str | torch.device = "cpu", seed: int | None = None) -> None:
        if seed is None and head_dim & (head_dim - 1) == 0:
            matrix = torch.ones(1, 1)
            while len(matrix) < head_dim:
                matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1))) / 2**0.5
        else:
            generator = torch.Generator().manual_seed(seed or 0)
            matrix = torch.linalg.qr(torch.randn(head_dim, head_dim, generator=generator))[0]
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
    def calibrate(cls, keys: Tensor, queries: Tensor | None = None) -> ChannelScaling:
        """From keys [L, N, Hkv, D] of some text: each channel's mean, and its largest distance from it as scale.

        With the queries [L, N, Hq, D] of that text, scale = sqrt(largest distance / RMS query):
        a channel that is asked for strongly is stored finely (as SmoothQuant does between
        activations and weights: Xiao et al., 2023). A rotation afterwards evens out the rest.
        """
        keys = keys.float()
        mean = keys.mean(1)  # [L, Hkv, D]
        scale = (keys - mean[:, None]).abs().amax(1).clamp_min(1e-6)
        if queries is not None:
            grouped = queries.float().unflatten(2, (keys.shape[2], -1))  # [L, N, Hkv, G, D]
            scale = (scale / grouped.square().mean((1, 3)).sqrt().clamp_min(1e-6)).sqrt()
        return cls(mean, scale)

    def apply(self, layer: int, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """q [N, Hq, D], k [N, Hkv, D] -> the same, scaled."""
        mean, scale = self.mean[layer].to(k.dtype), self.scale[layer].to(k.dtype)  # [Hkv, D]
        return q * scale.repeat_interleave(q.shape[1] // k.shape[1], dim=0), (k - mean) / scale
