"""From logits to tokens: argmax, or a draw after temperature, top-k and top-p.

A draw is one uniform number from a hash of (request seed, token index, purpose). There is
no generator whose state could be lost when a request is preempted, or shared with the
other rows of its batch: the same request draws the same numbers in any company.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minillm.ladder.attention import send
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


def uniforms(seeds: Sequence[int], indices: Sequence[int], purpose: int = SAMPLE) -> Tensor:
    """`uniform` of many requests at once [R], in fp64: the same hash in int64, whose products wrap as C's do."""
    state = torch.zeros(len(seeds), dtype=torch.int64)
    for numbers in (seeds, indices, [purpose] * len(seeds)):
        state = _mix(state ^ torch.tensor([_signed(number) for number in numbers], dtype=torch.int64))
    return _shift(state, 32).double() / 2**32


def _mix(x: Tensor) -> Tensor:
    """`mix` over int64 [R]."""
    x = x + _signed(0x9E3779B97F4A7C15)
    x = (x ^ _shift(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Shift right as unsigned: `>>` alone would drag the sign along."""
    return (x >> bits) & (MASK >> bits)


def _signed(number: int) -> int:
    """The int64 with the same low 64 bits."""
    return ((number & MASK) ^ (1 << 63)) - (1 << 63)


def greedy(logits: Tensor) -> Tensor:
    """logits [R, V] -> the likeliest ids [R]; among equals the lowest id."""
    return logits.argmax(dim=-1)


def probabilities(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """logits [R, V] -> what each row samples from [R, V], after temperature, top-k, then top-p, in fp32.

    A greedy row puts everything on its argmax. Filters work on all rows that have them at once,
    so that the work on the device does not grow by launches with the batch.
    """
    temperature = torch.tensor([1.0 if p.greedy else p.temperature for p in params])
    temperature = send(temperature, logits.device)
    scores, vocabulary = logits.float(), logits.shape[-1]
    # the highest score becomes 0 before the division, which then cannot overflow
    scores = (scores - scores.amax(-1, keepdim=True)) / temperature[:, None]  # [R, V]
    with_k = [row for row, p in enumerate(params) if not p.greedy and p.top_k is not None and p.top_k < vocabulary]
    if with_k:
        rows = send(torch.tensor(with_k), logits.device)
        scores[rows] = keep_top_k(scores[rows], [params[row].top_k for row in with_k])
    with_p = [row for row, p in enumerate(params) if not p.greedy and p.top_p is not None and p.top_p < 1]
    if with_p:
        rows = send(torch.tensor(with_p), logits.device)
        scores[rows] = keep_nucleus(scores[rows], [params[row].top_p for row in with_p])
    if sure := [row for row, p in enumerate(params) if p.greedy]:
        rows = send(torch.tensor(sure), logits.device)
        only = scores[rows].argmax(-1, keepdim=True)
        scores[rows] = torch.full_like(scores[rows], -torch.inf).scatter(1, only, 0.0)
    return scores.softmax(-1)


def keep_top_k(scores: Tensor, top_k: Sequence[int]) -> Tensor:
    """scores [R, V] with all below each row's k-th largest masked; ties with it stay."""
    k = send(torch.tensor(top_k), scores.device)[:, None]
    kth = scores.topk(max(top_k)).values.gather(1, k - 1)  # [R, 1]
    return scores.masked_fill(scores < kth, -torch.inf)


def keep_nucleus(scores: Tensor, top_p: Sequence[float]) -> Tensor:
    """scores [R, V] with all but the fewest likeliest tokens that reach top_p masked (Holtzman et al., 2020)."""
    ordered, ids = scores.sort(descending=True, stable=True)
    p = ordered.softmax(-1)
    most = send(torch.tensor(top_p, dtype=p.dtype), p.device)[:, None].clamp_min(torch.finfo(p.dtype).tiny)  # not 0
    outside = p.cumsum(-1) - p >= most  # those before it suffice; never true of the first
    return scores.scatter(1, ids, ordered.masked_fill(outside, -torch.inf))


def draw(p: Tensor, u: Tensor) -> Tensor:
    """p [R, V], u [R] in [0, 1) -> ids [R] by inverting the cumulative sum; an id with p = 0 is never drawn.

    u may still be on the CPU.
    """
    wide = p.cpu() if p.device.type == "mps" else p  # Apple's GPUs have no fp64
    cumulative = wide.double().cumsum(-1)  # [R, V]
    u = u if u.device == wide.device else send(u, wide.device)
    point = u.double()[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, point, right=True)[:, 0].to(p.device)


def sample(logits: Tensor, params: Sequence[SamplingParams], seeds: Sequence[int], indices: Sequence[int]) -> Tensor:
    """logits [R, V] -> one id a row [R], on the device; nothing waits for it here.

    `indices` are the places of the tokens in their requests' outputs.
    """
    ids = greedy(logits)
    rows = [row for row, p in enumerate(params) if not p.greedy]
    if rows:
        chosen = send(torch.tensor(rows), logits.device)
        u = uniforms([seeds[row] for row in rows], [indices[row] for row in rows])
        ids[chosen] = draw(probabilities(logits[chosen], [params[row] for row in rows]), u)
    return ids
