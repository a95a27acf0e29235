"""How keys and values are stored: the formats behind the cache's one interface.

A storage is a long run of token slots; who owns which slot is the block pool's affair.
The slots past the pool's last block are scratch: a row that must not touch the cache (an
idle row of a static batch) writes there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minillm.model.config import ModelConfig

NATIVE_FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def native_format(dtype: torch.dtype) -> str:
    """The format that stores a model's keys and values as they are."""
    return next(name for name, native in NATIVE_FORMATS.items() if native == dtype)


def kv_bytes_per_token(config: ModelConfig, kv_format: str) -> int:
    """Bytes of cache per token: a key and a value of head_dim numbers, per layer and KV head."""
    check_format(kv_format)
    numbers = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    return numbers * NATIVE_FORMATS[kv_format].itemsize


def check_format(kv_format: str) -> None:
    """Raise ValueError unless `kv_format` is one that can be stored."""
    if kv_format not in NATIVE_FORMATS:
        raise ValueError(f"unknown KV format {kv_format!r}; known: {', '.join(NATIVE_FORMATS)}")


class NativeStorage:
    """Keys and values as the model computed them, [L, slots, Hkv, D] each."""

    def __init__(self, config: ModelConfig, kv_format: str, slots: int, device: torch.device) -> None:
        shape = (config.num_hidden_layers, slots, config.num_key_value_heads, config.head_dim)
        self.keys = torch.zeros(shape, dtype=NATIVE_FORMATS[kv_format], device=device)
        self.values = torch.zeros_like(self.keys)
        self.device = self.keys.device

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store k, v [N, Hkv, D] in slots [N]."""
        self.keys[layer].index_copy_(0, slots, k.to(self.keys.dtype))
        self.values[layer].index_copy_(0, slots, v.to(self.values.dtype))

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of slots [M], each [M, Hkv, D], in the storage's dtype."""
        return self.keys[layer].index_select(0, slots), self.values[layer].index_select(0, slots)
