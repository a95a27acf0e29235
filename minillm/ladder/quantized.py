"""Rung 5: keys and values in 8 and 4 bits. Fewer bits a number, more tokens in the same memory.

    format            a token's D numbers of one head                      bytes, D = 64
    fp32, bf16, fp16  as the model computed them                           256, 128, 128
    int8              q = round(x / s), s = max|x| / 127 in fp16           66
    fp8               x / s as e4m3, s = max|x| / 448 in fp16              66
    int4              groups of up to 32: x = q s + m, two q to a byte,    40
                      s and m in fp16

Every token and head has scales of its own, so a slot can be written, rolled back and shared without
reading its neighbours, which a scale over several tokens would not allow. Values are divided
by the fp16 scale that is stored. Keys are harder than values: a few of their channels are far larger than
the rest (KIVI: Liu et al., 2024), so for fp8 and int4 q and k are turned by a `Rotation` first. The engine is
handed `storage_in` a format and knows nothing else of this file.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from minillm.ladder.attention import KVStorage, NativeStore
from minillm.model.config import ModelConfig

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
INT4_GROUP = 32
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


class CodedStore:
    """Codes of all slots, and their scales and minima, each [L, slots, Hkv, ...]."""

    def __init__(self, *tensors: Tensor) -> None:
        self.tensors, self.nbytes = tensors, sum(tensor.nbytes for tensor in tensors)

    def write(self, layer: int, slots: Tensor, x: Tensor) -> None:
        """Store x [N, Hkv, D] in slots [N]."""
        for tensor, new in zip(self.tensors, self.encode(x), strict=True):
            tensor[layer].index_copy_(0, slots, new)

    def read(self, layer: int, slots: Tensor) -> Tensor:
        """Slots [M] -> [M, Hkv, D], fp32."""
        return self.decode(*(tensor[layer].index_select(0, slots) for tensor in self.tensors))


class ScaledStore(CodedStore):
    """One byte a number, int8 or fp8, and one fp16 scale per token and head."""

    def __init__(self, config: ModelConfig, slots: int, device: str | torch.device, kv_format: str) -> None:
        self.kv_format = kv_format
        self.encode, self.decode = {"int8": (int8_encode, int8_decode), "fp8": (fp8_encode, fp8_decode)}[kv_format]
        shape = (config.num_hidden_layers, slots, config.num_key_value_heads)
        self.codes = torch.empty((*shape, config.head_dim), dtype=torch.uint8, device=device)  # bit patterns
        self.scales = torch.empty(shape, dtype=torch.float16, device=device)
        super().__init__(self.codes, self.scales)


class Int4Store(CodedStore):
    """Two numbers to a byte; a scale and a minimum in fp16 per token, head and group of numbers."""

    kv_format, decode = "int4", staticmethod(int4_decode)

    def __init__(self, config: ModelConfig, slots: int, device: str | torch.device) -> None:
        self.group = even_group("head_dim", config.head_dim, INT4_GROUP)
        self.encode = partial(int4_encode, group=self.group)
        shape, groups = (config.num_hidden_layers, slots, config.num_key_value_heads), config.head_dim // self.group
        self.codes = torch.empty((*shape, config.head_dim // 2), dtype=torch.uint8, device=device)
        self.scales, self.minima = torch.empty((2, *shape, groups), dtype=torch.float16, device=device)
        super().__init__(self.codes, self.scales, self.minima)


STORES = {
    **{name: partial(NativeStore, dtype=dtype) for name, dtype in DTYPES.items()},
    **{name: partial(ScaledStore, kv_format=name) for name in ("int8", "fp8")},
    "int4": Int4Store,
}


def kv_storage(
    config: ModelConfig, kv_format: str, slots: int, device: str | torch.device = "cpu", key_transform=None
) -> KVStorage:
    """Storage for `slots` tokens in a format. ValueError for an unknown format, or a head_dim that it cannot pack."""
    if not isinstance(kv_format, str) or kv_format not in STORES:
        raise ValueError(f"unknown KV format {kv_format!r}; known: {', '.join(STORES)}")
    keys, values = (STORES[kv_format](config, slots, device) for _ in range(2))
    return KVStorage(keys, values, device, key_transform)


def storage_in(kv_format: str, key_transform="auto") -> Callable[..., KVStorage]:
    """What `Engine(storage=...)` takes. key_transform: a change of q and k together; "auto": the default."""

    def make(config: ModelConfig, slots: int, device: str | torch.device) -> KVStorage:
        transform = default_transform(config, kv_format, device) if key_transform == "auto" else key_transform
        return kv_storage(config, kv_format, slots, device, transform)

    return make


def native_format(dtype: torch.dtype) -> str:
    """The format that stores a model's keys and values as they are."""
    return next(name for name, native in DTYPES.items() if native == dtype)


def kv_bytes_per_token(config: ModelConfig, kv_format: str) -> int:
    """Bytes of cache per token, scales counted: keys and values of all layers and KV heads."""
    return kv_storage(config, kv_format, 1, "meta").nbytes


def default_transform(config: ModelConfig, kv_format: str, device: str | torch.device) -> Rotation | None:
    """A rotation for fp8 and int4, which needs no calibration; the steps of int8 are fine enough without."""
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
