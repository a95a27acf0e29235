"""Rungs 0 and 1: one sequence, first without a cache, then with one.

Rung 0 runs the whole text through the model for every token. Rung 1 keeps each layer's keys
and values, so that a step feeds one token. Compare the two loops: what is fed, and to what cache.

    step     rung 0 feeds          rung 1 feeds    and reads from its cache
    1        a b c                 a b c
    2        a b c d               d               a b c
    3        a b c d e             e               a b c d
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from minillm.guard.inputs import check_length
from minillm.model.llama import Llama


def attend(q: Tensor, k: Tensor, v: Tensor, start: int) -> Tensor:
    """q [N, Hq, D] of the tokens from position `start` on, over k and v [S, Hkv, D] of the whole text -> [N, Hq, D].

    Each token sees itself and all before it. Hq / Hkv query heads share a KV head, so `enable_gqa`.
    """
    mask = None  # one token, the last, sees everything
    if len(q) > 1:
        positions = torch.arange(len(k), device=q.device)
        mask = positions <= positions[start:, None]  # [N, S]
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))  # [1, heads, tokens, D]
    return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)[0].transpose(0, 1)


class NoCache:
    """Attention over the tokens of this forward alone."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [N, Hq, D], k and v [N, Hkv, D] -> [N, Hq, D]."""
        return attend(q, k, v, start=0)


class SequenceCache:
    """Keys and values of one sequence in one contiguous buffer. Its user advances `length` after each forward."""

    def __init__(self, model: Llama, capacity: int) -> None:
        config = model.config
        shape = (config.num_hidden_layers, capacity, config.num_key_value_heads, config.head_dim)
        self.keys = torch.zeros(shape, dtype=model.dtype, device=model.device)  # [L, S, Hkv, D]
        self.values = torch.zeros_like(self.keys)
        self.length = 0  # tokens stored by earlier forwards

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k, v [N, Hkv, D] after the stored ones, then attend q [N, Hq, D] to all of them -> [N, Hq, D]."""
        end = self.length + len(q)
        self.keys[layer, self.length : end] = k
        self.values[layer, self.length : end] = v
        return attend(q, self.keys[layer, :end], self.values[layer, :end], self.length)


def decode_recomputing(
    model: Llama, prompt_ids: Sequence[int], max_tokens: int, stop_ids: Collection[int] = ()
) -> Iterator[int]:
    """Rung 0: yield greedy tokens, computing the whole text again for each."""
    check_length(model.config, prompt_ids, max_tokens)
    ids = list(prompt_ids)
    for _ in range(max_tokens):
        tokens = torch.tensor(ids, device=model.device)  # [N]: the prompt and all output so far
        positions = torch.arange(len(ids), device=model.device)
        with torch.inference_mode():
            logits = model.forward(tokens, positions, NoCache(), logit_rows=positions[-1:])  # [1, V]
        ids.append(int(logits.argmax()))
        yield ids[-1]
        if ids[-1] in stop_ids:
            return


def decode_cached(
    model: Llama, prompt_ids: Sequence[int], max_tokens: int, stop_ids: Collection[int] = ()
) -> Iterator[int]:
    """Rung 1: yield greedy tokens, feeding the prompt once and then one token a step."""
    check_length(model.config, prompt_ids, max_tokens)
    cache = SequenceCache(model, capacity=len(prompt_ids) + max_tokens)
    feed = list(prompt_ids)
    for _ in range(max_tokens):
        tokens = torch.tensor(feed, device=model.device)  # [N]: first the prompt, then the last token
        positions = torch.arange(cache.length, cache.length + len(feed), device=model.device)
        with torch.inference_mode():
            logits = model.forward(tokens, positions, cache, logit_rows=tokens.new_tensor([len(feed) - 1]))  # [1, V]
        cache.length += len(feed)
        feed = [int(logits.argmax())]
        yield feed[0]
        if feed[0] in stop_ids:
            return
