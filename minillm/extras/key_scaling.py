"""A `KVStorage.key_transform` with scales calibrated once, on other text: better than a rotation, for int4."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class KeyTransform(Protocol):
    """A change of q and k together that leaves the attention weights as they were."""

    def apply(self, layer: int, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """q [N, Hq, D], k [N, Hkv, D] -> the same, transformed."""
        ...



class ChannelScaling:
    """Store (k - mean) / scale, attend with q * scale; mean and scale per channel, calibrated once.

    The scales cancel in q·k. Without the mean every score is less by the same q·mean, which softmax ignores.
    """

    def __init__(self, mean: Tensor, scale: Tensor) -> None:
        """mean and scale [L, Hkv, D], scale positive."""
        self.mean, self.scale = mean, scale

    @classmethod
    def calibrate(cls, keys: Tensor, queries: Tensor | None = None) -> ChannelScaling:
        """From keys [L, N, Hkv, D] of some text: each channel's mean, and its largest distance from it as scale.

        With the queries [L, N, Hq, D] of that text, scale = sqrt(largest distance / RMS query): a channel with
        large queries is stored finely (as in SmoothQuant: Xiao et al., 2023). A rotation may follow.
        """
        keys = keys.float()
        mean = keys.mean(1)  # [L, Hkv, D]
        scale = (keys - mean[:, None]).abs().amax(1).clamp_min(1e-6)
        if queries is not None:
            grouped = queries.float().unflatten(2, (keys.shape[2], -1))  # [L, N, Hkv, G, D]
            scale = (scale / grouped.square().mean((1, 3)).sqrt().clamp_min(1e-6)).sqrt()
        return cls(mean, scale)

    def apply(self, layer: int, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """q [N, Hq, D], k [N, Hkv, D] -> the same, scaled."""
        mean, scale = self.mean[layer].to(k.dtype), self.scale[layer].to(k.dtype)  # [Hkv, D]
        return q * scale.repeat_interleave(q.shape[1] // k.shape[1], dim=0), (k - mean) / scale
