"""From logits to tokens: argmax, or a draw after temperature, top-k and top-p.

A draw is one uniform number from a hash of (request seed, token index, purpose). There is
no generator whose state could be lost when a request is preempted, or shared with the
other rows of its batch: the same request draws the same numbers in any company.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minillm.ladder.request import SamplingParams

MASK = (1 << 64) - 1
SAMPLE, ACCEPT, DRAFT = 0, 1, 2  # purposes of the uniform numbers of one output token


def mix(x: int) -> int:
    """One step of SplitMix64 (Steele, Lea and Flood, 2014): every input bit reaches every output bit."""
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def hash_numbers(*numbers: int) -> int:
    """64 bits from a tuple of whole numbers."""
    state = 0
    for number in numbers:
        state = mix(state ^ (number & MASK))
    return state


def uniform(seed: int, index: int, purpose: int = SAMPLE) -> float:
    """A number in [0, 1) for token `index` of the request with this seed. 32 bits, so that it never rounds to 1."""
    return (hash_numbers(seed, index, purpose) >> 32) / 2**32


def greedy(logits: Tensor) -> Tensor:
    """logits [R, V] -> the likeliest ids [R]; among equals the lowest id."""
    return logits.argmax(dim=-1)


def probabilities(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """logits [R, V] -> what each row samples from [R, V], after temperature, top-k, then top-p, in fp32.

    A greedy row puts everything on its argmax.
    """
    temperature = logits.new_tensor([1.0 if p.greedy else p.temperature for p in params], dtype=torch.float32)
    scores = logits.float()
    # the highest score becomes 0 before the division, which then cannot overflow
    scores = (scores - scores.amax(-1, keepdim=True)) / temperature[:, None]  # [R, V]
    for row, p in enumerate(params):
        if p.greedy:
            only = scores[row].argmax()
            scores[row] = torch.full_like(scores[row], -torch.inf).index_fill(0, only, 0.0)
            continue
        if p.top_k is not None and p.top_k < scores.shape[-1]:
            kth = scores[row].topk(p.top_k).values[-1]
            scores[row] = scores[row].masked_fill(scores[row] < kth, -torch.inf)
        if p.top_p is not None and p.top_p < 1:
            scores[row] = keep_nucleus(scores[row], p.top_p)
    return scores.softmax(-1)


def keep_nucleus(scores: Tensor, top_p: float) -> Tensor:
    """scores [V] with all but the fewest likeliest tokens that reach top_p masked (Holtzman et al., 2020)."""
    ordered, ids = scores.sort(descending=True, stable=True)
    p = ordered.softmax(-1)
    outside = p.cumsum(-1) - p >= top_p  # those before it suffice; never true of the first
    return scores.index_fill(0, ids[outside], -torch.inf)


def draw(p: Tensor, u: Tensor) -> Tensor:
    """p [R, V], u [R] in [0, 1) -> ids [R] by inverting the cumulative sum; an id with p = 0 is never drawn."""
    cumulative = p.double().cumsum(-1)  # [R, V]
    point = u.double()[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, point, right=True)[:, 0]


def sample(logits: Tensor, params: Sequence[SamplingParams], seeds: Sequence[int], indices: Sequence[int]) -> Tensor:
    """logits [R, V] -> one id a row [R]. `indices` are the places of the tokens in their requests' outputs."""
    ids = greedy(logits)
    rows = [row for row, p in enumerate(params) if not p.greedy]
    if rows:
        chosen = torch.tensor(rows, device=logits.device)
        u = torch.tensor([uniform(seeds[row], indices[row]) for row in rows], dtype=torch.float64, device=logits.device)
        ids[chosen] = draw(probabilities(logits[chosen], [params[row] for row in rows]), u)
    return ids
