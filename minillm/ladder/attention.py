"""Cached attention for many rows: each of any length, all over one store of token slots.

A step's tokens lie flat, row after row. Row b brings n_b new tokens; with them it has S_b tokens
stored, of which the new ones are the last:

    tokens   |  row 0: n=1  |  row 1: n=1  |  row 2: n=4            |
    sees     |  S=9         |  S=30        |  S=12: 9, 10, 11, 12   |   each new token sees all up to itself

The store is one long run of slots, cut into blocks; a row's block table says where its tokens lie:

    block table [5, 2], 4 slots to a block:   token 0 in slot 20, 1 in 21, ... 4 in slot 8, 5 in slot 9

`StepAttention` is built once per step and used by every layer: write the new keys and values to
their slots, then gather each row's slots and attend as rung 1 does. `fast/` has a quicker one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minillm.ladder.decode import attend
from minillm.model.config import ModelConfig


class NativeStore:
    """The keys, or the values, of all slots as the model computed them, [L, slots, Hkv, D]."""

    def __init__(self, config: ModelConfig, slots: int, device: str | torch.device, dtype: torch.dtype) -> None:
        shape = (config.num_hidden_layers, slots, config.num_key_value_heads, config.head_dim)
        self.numbers = torch.empty(shape, dtype=dtype, device=device)
        self.nbytes = self.numbers.nbytes

    def write(self, layer: int, slots: Tensor, x: Tensor) -> None:
        """Store x [N, Hkv, D] in slots [N]."""
        self.numbers[layer].index_copy_(0, slots, x.to(self.numbers.dtype))

    def read(self, layer: int, slots: Tensor) -> Tensor:
        """Slots [M] -> [M, Hkv, D]."""
        return self.numbers[layer].index_select(0, slots)


class KVStorage:
    """Keys and values of all slots. What a slot holds before it is written is undefined, and never read."""

    def __init__(self, keys, values, device: str | torch.device, key_transform=None) -> None:
        """keys, values: a store each. key_transform: changes q and k before k is stored (rung 5)."""
        self.keys, self.values, self.key_transform = keys, values, key_transform
        self.device, self.nbytes = torch.device(device), keys.nbytes + values.nbytes

    def prepare(self, layer: int, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """q [N, Hq, D] and k [N, Hkv, D] as attention and storage are to use them."""
        return (q, k) if self.key_transform is None else self.key_transform.apply(layer, q, k)

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store k, v [N, Hkv, D] in slots [N]."""
        self.keys.write(layer, slots, k)
        self.values.write(layer, slots, v)

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of slots [M], each [M, Hkv, D]."""
        return self.keys.read(layer, slots), self.values.read(layer, slots)


def native_storage(config: ModelConfig, slots: int, device: str | torch.device, dtype: torch.dtype) -> KVStorage:
    """Storage for `slots` tokens in the model's own dtype."""
    return KVStorage(*(NativeStore(config, slots, device, dtype) for _ in range(2)), device)


@dataclass(frozen=True)
class RowSpan:
    """A row's part of a step: `count` tokens from position `start`, over the blocks of `block_table`.

    `stores=False`, for the finished rows of a static batch: new keys and values go to the scratch slot, which
    is past the pool's last block, and the row reads what it had stored before.
    """

    start: int
    count: int
    block_table: Sequence[int]
    stores: bool = True

    def slots(self, block_size: int) -> Tensor:
        """Where the row's tokens lie, from the first to the last of this step [S]."""
        position = torch.arange(self.start + self.count)
        table = torch.tensor(self.block_table)
        return table[position // block_size] * block_size + position % block_size


class StepAttention:
    """The cache as one step's forward pass sees it (the model's `CacheView`)."""

    def __init__(self, storage: KVStorage, spans: Sequence[RowSpan], block_size: int, scratch_slot: int) -> None:
        """scratch_slot: where rows that store nothing write."""
        self.storage, self.spans = storage, spans
        slots = [span.slots(block_size) for span in spans]  # each [S]
        new = [own[span.start :] if span.stores else torch.full((span.count,), scratch_slot)
               for own, span in zip(slots, spans, strict=True)]  # each [n]
        self.positions = torch.cat([torch.arange(span.start, span.start + span.count) for span in spans])  # [N]
        self.new_slots = torch.cat(new).to(storage.device)  # [N]
        self.slots = [own.to(storage.device) for own in slots]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k, v [N, Hkv, D], then attend q [N, Hq, D], row by row -> [N, Hq, D]."""
        q, k = self.storage.prepare(layer, q, k)
        self.storage.write(layer, self.new_slots, k, v)
        out, first = torch.empty_like(q), 0
        for span, slots in zip(self.spans, self.slots, strict=True):
            row = slice(first, first + span.count)
            keys, values = self.storage.read(layer, slots)  # each [S, Hkv, D]
            out[row] = attend(q[row], keys.to(q.dtype), values.to(q.dtype), span.start)
            first += span.count
        return out
