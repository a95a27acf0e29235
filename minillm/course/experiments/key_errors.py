"""Why keys are hard to quantise: the errors of each way to store them in int4, on a model's own keys.

A few channels of a key are far larger than the rest. One norm over the whole tensor hides
what that does, so four figures are taken: the error of a channel against that channel's
own size, the error of the scores before the softmax, how far the attention weights move
(total variation: half the sum of the differences, 0 to 1), and the one norm for comparison.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor

from minillm.extras.key_scaling import ChannelScaling
from minillm.ladder.attention import KVStorage
from minillm.ladder.decode import NoCache
from minillm.ladder.quantized import (
    INT4_GROUP,
    KeyTransform,
    Rotation,
    even_group,
    int4_decode,
    int4_encode,
)

TOKEN_BLOCK = 32  # tokens that share a scale where keys are stored per channel


class Tap(NoCache):
    """Attention without a cache that keeps every layer's queries and keys."""

    def __init__(self) -> None:
        self.queries: list[Tensor] = []
        self.keys: list[Tensor] = []

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [N, Hq, D], k and v [N, Hkv, D] -> [N, Hq, D]."""
        self.queries.append(q)
        self.keys.append(k)
        return super().attend(layer, q, k, v)


@torch.inference_mode()
def queries_and_keys(model, ids: Tensor) -> tuple[Tensor, Tensor]:
    """What a text ids [N] makes of each layer: queries [L, N, Hq, D] and keys [L, N, Hkv, D]."""
    tap, ids = Tap(), ids.to(model.device)
    model.hidden_states(ids, torch.arange(len(ids), device=model.device), tap)
    return torch.stack(tap.queries), torch.stack(tap.keys)


class Chain:
    """Several transforms, one after the other."""

    def __init__(self, *transforms: KeyTransform) -> None:
        self.transforms = transforms

    def apply(self, layer: int, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """q [N, Hq, D], k [N, Hkv, D] -> the same, transformed."""
        for transform in self.transforms:
            q, k = transform.apply(layer, q, k)
        return q, k


def calibrated(queries: Tensor, keys: Tensor) -> Chain:
    """The best served way for int4: mean out and channels balanced, as calibrated on these, then rotated."""
    return Chain(ChannelScaling.calibrate(keys, queries), Rotation(keys.shape[-1], keys.device))


class PerChannelKeys:
    """int4 keys whose groups are TOKEN_BLOCK neighbouring tokens of one channel, dequantised at once.

    An experiment, not a format that can be served: a group's scale is known once its last
    token is there, and a token that is rolled back or shared would change its neighbours.
    """

    def __init__(self, storage: KVStorage) -> None:
        """Takes the place of `storage.keys`, whose shape it takes over."""
        codes = storage.keys.codes  # [L, slots, Hkv, D / 2]
        self.numbers = torch.zeros((*codes.shape[:-1], 2 * codes.shape[-1]), device=codes.device)

    def write(self, layer: int, slots: Tensor, x: Tensor) -> None:
        """x [N, Hkv, D]; N must be a multiple of TOKEN_BLOCK."""
        self.numbers[layer].index_copy_(0, slots, per_channel(x))

    def read(self, layer: int, slots: Tensor) -> Tensor:
        """[M, Hkv, D], fp32."""
        return self.numbers[layer].index_select(0, slots)


def per_token(keys: Tensor) -> Tensor:
    """keys [N, Hkv, D], quantised to int4 as the engine does and back."""
    return int4_decode(*int4_encode(keys, even_group("head_dim", keys.shape[-1], INT4_GROUP)))


def per_channel(keys: Tensor) -> Tensor:
    """keys [N, Hkv, D], quantised to int4 over blocks of tokens and back; ValueError for a block that is not full."""
    if len(keys) % TOKEN_BLOCK:
        raise ValueError(f"{len(keys)} tokens are no whole number of blocks of {TOKEN_BLOCK}")
    channels = keys.permute(1, 2, 0)  # [Hkv, D, N]
    return int4_decode(*int4_encode(channels, TOKEN_BLOCK)).permute(2, 0, 1)


# -- the errors -----------------------------------------------------------------------------------


def errors(
    queries: Tensor, keys: Tensor, store: Callable[[Tensor], Tensor], transform: KeyTransform | None = None
) -> dict:
    """The figures of one way to store keys, over all layers: queries [L, N, Hq, D], keys [L, N, Hkv, D].

    store(keys [N, Hkv, D]) gives them as read back. Errors of keys are taken in the
    transformed channels, and relative; those of scores and weights do not depend on it.
    """
    rows = []
    for layer, (q, k) in enumerate(zip(queries.float(), keys.float(), strict=True)):
        turned_q, turned_k = transform.apply(layer, q, k) if transform else (q, k)
        read = store(turned_k)
        before, after = scores(q, k), scores(turned_q, read)  # [Hq, N, N]
        rows.append(_layer_errors(turned_k, read, before, after))
    return {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]}


def scores(q: Tensor, k: Tensor) -> Tensor:
    """q [N, Hq, D], k [N, Hkv, D] -> scaled scores [Hq, N, N], -inf for tokens to come."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    products = torch.einsum("ihd,jhd->hij", q, k) * q.shape[2] ** -0.5
    return products.masked_fill_(~torch.ones(len(q), len(q), dtype=torch.bool, device=q.device).tril(), -torch.inf)


def _layer_errors(k: Tensor, read: Tensor, before: Tensor, after: Tensor) -> dict:
    """One layer's figures. Scores are compared up to a constant per query, which a softmax does not see."""
    wrong = (read - k).square().sum(0)  # [Hkv, D]
    channels = (wrong / (k - k.mean(0)).square().sum(0).clamp_min(1e-12)).sqrt()
    seen = before.isfinite()
    moved = torch.where(seen, after - before, 0.0)  # [Hq, N, N]
    count = seen.sum(-1, keepdim=True)
    centred = torch.where(seen, moved - moved.sum(-1, keepdim=True) / count, 0.0)
    variation = (after.softmax(-1) - before.softmax(-1)).abs().sum(-1) / 2  # [Hq, N]
    return {
        "whole_tensor_error": float((wrong.sum() / k.square().sum()).sqrt()),
        "median_channel_error": median(channels.flatten().tolist()),
        "worst_channel_error": float(channels.max()),
        "score_error": float((centred.square().sum() / seen.sum()).sqrt()),
        "attention_variation": float(variation.mean()),
    }
