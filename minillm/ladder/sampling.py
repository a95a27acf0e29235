"""From logits to tokens: argmax, or a draw after temperature, top-k and top-p.

A draw is one uniform number from a hash of (request seed, token index, purpose). No
generator's state can be lost when a request is preempted, or is shared with the other rows
of a batch: a request draws the same numbers in any company. Skip `mix` at a first reading.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from minillm.ladder.request import NO_TOKEN, SamplingParams

ROUNDING = 1e-6  # 0.5 + 0.3 reaches a top_p of 0.8, though not to the last bit
SAMPLE, ACCEPT, DRAFT = 0, 1, 2  # purposes of the uniform numbers of one output token (the last two: rung 6)


def mix(x: np.ndarray) -> np.ndarray:
    """One step of SplitMix64 on uint64 (Steele, Lea and Flood, 2014): every input bit reaches every output bit."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def hash_numbers(*columns: int | Sequence[int]) -> np.ndarray:
    """uint64 [R]: a hash of each row of whole numbers, given by columns; one number stands for a whole column."""
    state = np.zeros(1, np.uint64)
    for column in columns:
        numbers = column if isinstance(column, Sequence) else [column]
        state = mix(state ^ np.array([operator.index(number) % 2**64 for number in numbers], np.uint64))
    return state


def uniforms(seeds: Sequence[int], indices: Sequence[int], purpose: int = SAMPLE) -> Tensor:
    """A number in [0, 1) for token `index` of each request [R], in fp64: the top 32 bits of its hash."""
    return torch.from_numpy((hash_numbers(seeds, indices, purpose) >> np.uint64(32)) / 2**32)


def probabilities(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """logits [R, V] -> what each row samples from [R, V], after temperature, top-k, then top-p, in fp32.

    A greedy row puts everything on its argmax.
    """
    device = logits.device
    temperature = torch.tensor([[0.0 if p.greedy else p.temperature] for p in params], device=device)  # [R, 1]
    # the highest score becomes 0 before the division, which then cannot overflow
    scores = logits.float() - logits.float().amax(-1, keepdim=True)  # [R, V]
    scores = scores / torch.where(temperature > 0, temperature, 1.0)
    ks = [min(p.top_k or 0, scores.shape[1]) for p in params]  # 0 keeps all
    if any(ks):
        scores = keep_top_k(scores, torch.tensor(ks, device=device)[:, None], max(ks))
    if any(p.top_p is not None for p in params):
        scores = keep_nucleus(scores, torch.tensor([[p.top_p or 1.0] for p in params], device=device))
    best = torch.zeros_like(scores).scatter(1, logits.argmax(-1, keepdim=True), 1.0)
    return torch.where(temperature > 0, scores.softmax(-1), best)


def keep_top_k(scores: Tensor, top_k: Tensor, most: int) -> Tensor:
    """scores [R, V] with all below each row's k-th largest masked, k [R, 1] up to `most`; ties with it stay."""
    kth = scores.topk(most).values.gather(1, (top_k.clamp(max=most) - 1).clamp_min(0))  # [R, 1]
    return scores.masked_fill((scores < kth) & (top_k > 0), -torch.inf)


def keep_nucleus(scores: Tensor, top_p: Tensor) -> Tensor:
    """scores [R, V] without all but the fewest likeliest tokens that reach p [R, 1] (Holtzman et al., 2020)."""
    ordered, ids = scores.sort(descending=True, stable=True)
    p = ordered.softmax(-1)
    before = p.double().cumsum(-1) - p  # what the likelier ones sum to
    enough = (top_p.double() - ROUNDING).clamp_min(torch.finfo(p.dtype).tiny)  # above 0: the first always stays
    outside = (before >= enough) & (top_p < 1)
    return scores.scatter(1, ids, ordered.masked_fill(outside, -torch.inf))


def draw(p: Tensor, u: Tensor) -> Tensor:
    """p [R, V], u [R] in [0, 1) -> ids [R] by inverting the cumulative sum; an id with p = 0 is never drawn."""
    cumulative = p.double().cumsum(-1)  # [R, V]
    point = u.to(p.device)[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, point, right=True)[:, 0]


def sample(logits: Tensor, params: Sequence[SamplingParams], seeds: Sequence[int], indices: Sequence[int]) -> Tensor:
    """logits [R, V] -> one id a row [R]; `indices` are the tokens' places in their requests' outputs.

    Greedy rows take the likeliest id, among equals the lowest. NO_TOKEN where the logits cannot be used.
    """
    best = greedy(logits)
    if all(p.greedy for p in params):
        return best
    return draw(probabilities(logits, params), uniforms(seeds, indices)).where(best != NO_TOKEN, NO_TOKEN)


def greedy(logits: Tensor) -> Tensor:
    """logits [R, V] -> the likeliest id of each row [R]; NO_TOKEN where the highest is NaN or infinite."""
    best = logits.argmax(-1)  # a NaN counts as the highest
    return best.where(logits.gather(-1, best[..., None])[..., 0].isfinite(), NO_TOKEN)
