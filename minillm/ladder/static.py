"""Rung 2: static batches. The rows of a batch share each read of the weights, and all wait for the longest.

Rung 1's loop over a batch: every prompt is padded to the longest, the cache has a slot for each
row, and each step feeds one token of every row. Reading the weights is most of a decode step,
so eight rows cost little more than one. But the batch ends with its longest row. Until then a
finished row feeds its last token again for nothing, an idle slot-step; and each slot is as
long as the longest text of all. The engine has the same policy for its own memory, `StaticBatching`.

    slot 0   p p p p o o o o o o o o        p prompt, o output
    slot 1   p p . . o o o . . . . .        . padding, then idle slot-steps
    slot 2   p p p . o o o o o . . .        nothing can join before slot 0 has ended
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from minillm.guard.inputs import check_lengths
from minillm.ladder.request import Request
from minillm.ladder.sampling import sample
from minillm.model.llama import Llama


class SlotCache:
    """Keys and values of B rows, each in a slot that is long enough for the longest row, [L, B, S, Hkv, D]."""

    def __init__(self, model: Llama, rows: int, capacity: int) -> None:
        config = model.config
        shape = (config.num_hidden_layers, rows, capacity, config.num_key_value_heads, config.head_dim)
        self.keys = torch.zeros(shape, dtype=model.dtype, device=model.device)
        self.values = torch.zeros_like(self.keys)
        self.row = torch.arange(rows, device=model.device)[:, None]  # [B, 1]

    def begin(self, positions: Tensor, length: int) -> None:
        """The next forward feeds tokens at `positions` [B, n]; `length`: one more than the highest of them."""
        self.positions, self.length = positions, length
        places = torch.arange(length, device=positions.device)
        self.mask = places <= positions[:, None, :, None]  # [B, 1, n, S]: a token sees all up to its own position

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The flat tokens are B rows of n: q [B n, Hq, D], k and v [B n, Hkv, D] -> [B n, Hq, D].

        What padding writes after a prompt is hidden by the mask, and overwritten as the row grows.
        """
        shape = self.positions.shape
        self.keys[layer, self.row, self.positions] = k.unflatten(0, shape)
        self.values[layer, self.row, self.positions] = v.unflatten(0, shape)
        q = q.unflatten(0, shape).transpose(1, 2)  # [B, Hq, n, D]
        k, v = (x[layer, :, : self.length].transpose(1, 2) for x in (self.keys, self.values))  # [B, Hkv, S, D]
        out = F.scaled_dot_product_attention(q, k, v, self.mask, enable_gqa=True)  # [B, Hq, n, D]
        return out.transpose(1, 2).flatten(0, 1)


def decode_static(model: Llama, requests: Sequence[Request], batch_size: int = 8) -> int:
    """Rung 2: run requests, of max_tokens >= 1, in batches of `batch_size`, in order -> all idle slot-steps."""
    check_lengths(model.config, requests)
    batches = [requests[first : first + batch_size] for first in range(0, len(requests), batch_size)]
    return sum(decode_batch(model, batch) for batch in batches)


@torch.inference_mode()
def decode_batch(model: Llama, batch: Sequence[Request]) -> int:
    """Run one batch until its longest request has ended -> its idle slot-steps."""
    cache = SlotCache(model, len(batch), capacity=max(request.max_kv for request in batch))
    params, seeds = [request.params for request in batch], [request.seed for request in batch]
    starts, feed, idle = [0] * len(batch), [request.prompt_ids for request in batch], 0
    while True:
        logits = forward_padded(model, cache, starts, feed)  # [B, V]
        tokens = sample(logits, params, seeds, [request.num_output for request in batch])
        for request, token in zip(batch, tokens.tolist(), strict=True):
            if not request.finished:
                request.num_kv = request.num_tokens
                request.extend([token])
        finished = sum(request.finished for request in batch)
        if finished == len(batch):
            return idle
        idle += finished  # each finished row feeds its last stored token again
        starts = [request.num_kv - request.finished for request in batch]
        feed = [[request.tokens[start]] for request, start in zip(batch, starts, strict=True)]


def forward_padded(model: Llama, cache: SlotCache, starts: Sequence[int], feed: Sequence[Sequence[int]]) -> Tensor:
    """Feed B rows of tokens, each from its start on, padded to the longest -> logits after each row's last [B, V]."""
    counts = torch.tensor([len(row) for row in feed])  # [B]
    longest = int(counts.max())
    tokens = torch.tensor([[*row, *row[-1:] * (longest - len(row))] for row in feed])  # [B, n]
    positions = torch.tensor(starts)[:, None] + torch.arange(longest)  # [B, n]
    last = torch.arange(len(feed)) * longest + counts - 1  # [B], among the flat tokens
    cache.begin(positions.to(model.device), length=int(positions.max()) + 1)
    tokens, positions, last = (x.flatten().to(model.device) for x in (tokens, positions, last))
    return model.forward(tokens, positions, cache, last)
