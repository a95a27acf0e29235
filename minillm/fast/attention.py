"""Attention over many rows in few calls: what `ladder/attention.py` does row by row.

On a GPU `kernels.py` does it. Elsewhere the rows are gathered into a few padded groups. A padded place
repeats a slot of its own row and is masked: an unused slot may hold NaN, and 0 times NaN is NaN.

Letters: N tokens of the step, B rows of a group, n new tokens a row, S stored tokens a row, Hq and
Hkv heads, G = Hq / Hkv query heads that share a KV head, D head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from minillm.fast.device import triton_module
from minillm.ladder.attention import KVStorage, RowSpan

SHORT_ROW = 16  # rows with at most this many new tokens share a group; longer ones are computed alone
CONTEXT_CHUNK = 4096  # stored tokens gathered at a time, so that memory does not grow with the context
GROUP_SPREAD = 1.5  # the longest context of a group over its shortest, at most (contexts under 64 count as 64)


@dataclass(frozen=True)
class RowGroup:
    """Rows that are attended together, padded to one shape."""

    tokens: Tensor  # [B, n] which of the step's N tokens; a padded place repeats the row's last
    slots: Tensor  # [B, S] which slots of the store; a padded place repeats the row's last
    mask: Tensor  # [B, 1, n G, S] added to the scores: 0 where the token may look, else -inf


class FastAttention:
    """The cache as one step's forward pass sees it; takes what `StepAttention` takes, and gives the same."""

    def __init__(self, storage: KVStorage, spans: Sequence[RowSpan], block_size: int, scratch_slot: int) -> None:
        """scratch_slot: where rows that store nothing write."""
        self.storage, self.spans, self.block_size = storage, spans, block_size
        self.start = torch.tensor([span.start for span in spans])  # [B]
        self.count = torch.tensor([span.count for span in spans])  # [B]
        self.first = self.count.cumsum(0) - self.count  # [B] where the row begins among the N tokens
        self.tables = padded_tables([span.block_table for span in spans])  # [B, widest]

        row = torch.repeat_interleave(self.count)  # [N]
        self.positions = self.start[row] + torch.arange(len(row)) - self.first[row]  # [N]
        stores = torch.tensor([span.stores for span in spans])[row]
        self.new_slots = torch.where(stores, self._slots(row, self.positions), scratch_slot)  # [N], on the CPU

    @cached_property
    def kernels(self):
        """The step as Triton kernels take it, its tables on the device; None where the plain path computes it."""
        kernels = kernels_for(self.storage.device)
        return kernels and kernels.step_kernels(self, self.query_group)

    @cached_property
    def written(self) -> Tensor:
        """The slots of the new tokens [N], on the device."""
        return self.new_slots.to(self.storage.device)

    @cached_property
    def groups(self) -> list[RowGroup]:
        """The step as the path without kernels takes it."""
        return [self._group(torch.tensor(rows)) for rows in group_rows(self.spans)]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k, v [N, Hkv, D], then attend q [N, Hq, D] -> [N, Hq, D]."""
        self.query_group, self.dtype = q.shape[1] // k.shape[1], q.dtype
        if self.kernels:
            return self.kernels.attend(layer, q, k, v)
        q, k = self.storage.prepare(layer, q, k)
        self.storage.write(layer, self.written, k, v)
        if len(self.groups) == 1 and len(q) == len(self.count):  # one new token a row: nothing to pad or to sort
            return attend_stored(q[:, None], self.storage, layer, self.groups[0])[:, 0]
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for group in self.groups:
            # a repeated token is written twice, with the same value
            out[group.tokens] = attend_stored(q[group.tokens], self.storage, layer, group)
        return out

    def _slots(self, row: Tensor, position: Tensor) -> Tensor:
        """Where the block tables put these positions of these rows."""
        return self.tables[row, position // self.block_size] * self.block_size + position % self.block_size

    def _group(self, rows: Tensor) -> RowGroup:
        """Pad the rows [B] to one shape."""
        start, count = self.start[rows, None], self.count[rows, None]  # [B, 1]
        stored = torch.minimum(torch.arange(int((start + count).max())), start + count - 1)  # [B, S]
        new = torch.minimum(torch.arange(int(count.max())), count - 1)  # [B, n]
        sees = torch.arange(stored.shape[1]) <= (start + new)[:, :, None]  # [B, n, S]
        mask = additive_mask(sees, self.query_group, self.dtype)
        group = self.first[rows, None] + new, self._slots(rows[:, None], stored), mask
        return RowGroup(*(tensor.to(self.storage.device) for tensor in group))


def padded_tables(tables: Sequence[Sequence[int]]) -> Tensor:
    """Block tables as one tensor [B, widest], short ones filled up with zeros; from one flat list, the fastest way."""
    lengths = torch.tensor([len(table) for table in tables])
    padded = torch.zeros(len(tables), int(lengths.max()), dtype=torch.long)
    flat = np.fromiter(chain.from_iterable(tables), np.int64, int(lengths.sum()))
    padded[torch.arange(padded.shape[1]) < lengths[:, None]] = torch.from_numpy(flat)
    return padded


@cache
def kernels_for(device: torch.device):
    """The module `kernels` if it runs on this device, else None."""
    return triton_module("minillm.fast.kernels", device)


def group_rows(spans: Sequence[RowSpan]) -> list[list[int]]:
    """Which rows to attend together, in their order: short rows of similar context; each long row by itself."""
    groups, together, limit = [], [], 0.0
    lengths = [span.start + span.count for span in spans]
    for length, b in sorted(zip(lengths, range(len(spans)), strict=True)):
        if spans[b].count > SHORT_ROW:
            groups.append([b])
        elif length <= limit:
            together.append(b)
        else:
            together, limit = [b], GROUP_SPREAD * max(length, 64)
            groups.append(together)
    return [sorted(group) for group in groups]


def attend_stored(q: Tensor, storage: KVStorage, layer: int, group: RowGroup) -> Tensor:
    """q [B, n, Hq, D] over the stored tokens of a group -> [B, n, Hq, D].

    The G query heads that share a KV head become G further rows of queries, so that no key is copied
    (Ainslie et al., 2023). Of a long context a chunk is read at a time, and the chunks' softmaxes are
    merged (online softmax: Milakov and Gimelshein, 2018): what is gathered does not grow with the context.
    """
    if group.slots.shape[1] <= CONTEXT_CHUNK:
        k, v = read_rows(storage, layer, group.slots, q.dtype)  # each [B, Hkv, S, D]
        return unfold_heads(F.scaled_dot_product_attention(fold_heads(q, k.shape[1]), k, v, group.mask), q)
    highest, total, weighted = -torch.inf, 0.0, 0.0
    for at in range(0, group.slots.shape[1], CONTEXT_CHUNK):
        chunk = slice(at, at + CONTEXT_CHUNK)
        k, v = read_rows(storage, layer, group.slots[:, chunk], torch.float32)  # each [B, Hkv, chunk, D]
        queries = fold_heads(q, k.shape[1]).float() * q.shape[3] ** -0.5  # [B, Hkv, n G, D]
        scores = queries @ k.transpose(2, 3) + group.mask[..., chunk]  # [B, Hkv, n G, chunk]
        top = scores.amax(-1, keepdim=True).clamp_min(highest)  # finite: every token sees position 0
        weights, shrink = torch.exp(scores - top), torch.exp(highest - top)
        weighted = weighted * shrink + weights @ v  # [B, Hkv, n G, D]
        total = total * shrink + weights.sum(-1, keepdim=True)  # [B, Hkv, n G, 1]
        highest = top
    return unfold_heads(weighted / total, q).to(q.dtype)


def read_rows(storage: KVStorage, layer: int, slots: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Keys and values of `slots` [B, S], each [B, Hkv, S, D] in `dtype`."""
    return [x.unflatten(0, slots.shape).to(dtype).transpose(1, 2) for x in storage.read(layer, slots.flatten())]


def fold_heads(q: Tensor, kv_heads: int) -> Tensor:
    """q [B, n, Hq, D] -> [B, Hkv, n G, D]: head h of a token belongs to KV head h // G."""
    return q.unflatten(2, (kv_heads, -1)).transpose(1, 2).flatten(2, 3)


def unfold_heads(out: Tensor, q: Tensor) -> Tensor:
    """[B, Hkv, n G, D] -> the shape of q [B, n, Hq, D]."""
    return out.unflatten(2, (q.shape[1], -1)).transpose(1, 2).flatten(2, 3)


def additive_mask(sees: Tensor, query_group: int, dtype: torch.dtype) -> Tensor:
    """sees [B, n, S] -> what to add to the scores [B, 1, n G, S], once for all layers."""
    mask = torch.zeros(sees.shape, dtype=dtype).masked_fill_(~sees, -torch.inf)
    return mask.repeat_interleave(query_group, dim=1)[:, None]
