"""A decoder of the Llama family over a flat list of tokens.

There is no batch axis and no padding. The model is given N tokens, each with its position;
they may belong to one sequence or to a hundred, and the model does not know which. Only
attention has to know, so the model hands q, k and v of its N tokens to the cache object,
`cache.attend`, and gets the attended values back. A prefill chunk, a decode step and the
verification of drafts are therefore one code path.

    tokens [N] -> embedding -> L x (norm, q k v, rotate, cache.attend, norm, gated MLP) -> norm -> logits [R, V]

Letters in shapes: N tokens, R tokens whose logits are wanted, H hidden, Hq query heads, Hkv
KV heads, D head_dim, V vocabulary. `fast/` replaces `Llama.linear` and `Llama.layer` by faster ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from minillm.model.config import ModelConfig

CosSin = tuple[Tensor, Tensor]  # cosines and signed sines, each [N, 1, D]


class CacheView(Protocol):
    """A KV cache as one forward pass sees it."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Keep k, v [N, Hkv, D] if it is a cache, then attend q [N, Hq, D] to all that each token may see."""
        ...


class Linear:
    """y = x Wᵀ + b. weight [out, in], bias [out] or None."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        """x [N, in] -> [N, out]."""
        return F.linear(x, self.weight, self.bias)


class Weights:
    """Tensors by transformers' names, on the model's device and in its dtype."""

    def __init__(
        self, tensors: Mapping[str, Tensor], device: torch.device, dtype: torch.dtype, make_linear: Callable = Linear
    ) -> None:
        self.tensors, self.device, self.dtype, self.make_linear = tensors, device, dtype, make_linear

    def tensor(self, name: str) -> Tensor:
        return self.tensors[name].to(device=self.device, dtype=self.dtype)

    def linear(self, *names: str):
        """Several weight matrices stacked into one Linear, so that one product serves q, k and v."""
        weight = torch.cat([self.tensor(f"{name}.weight") for name in names])
        biases = [self.tensor(f"{name}.bias") for name in names if f"{name}.bias" in self.tensors]
        return self.make_linear(weight, torch.cat(biases) if biases else None)


class DecoderLayer:
    """Attention and a gated feed-forward network, each added to the residual stream."""

    LINEARS = ("qkv", "output", "gate_up", "down")

    def __init__(self, config: ModelConfig, weights: Weights, index: int) -> None:
        at = f"model.layers.{index}."
        self.config, self.index = config, index
        self.qkv = weights.linear(*(f"{at}self_attn.{name}_proj" for name in ("q", "k", "v")))
        self.output = weights.linear(f"{at}self_attn.o_proj")
        self.gate_up = weights.linear(f"{at}mlp.gate_proj", f"{at}mlp.up_proj")
        self.down = weights.linear(f"{at}mlp.down_proj")
        self.attention_norm = weights.tensor(f"{at}input_layernorm.weight")  # [H]
        self.mlp_norm = weights.tensor(f"{at}post_attention_layernorm.weight")  # [H]
        self.head_norm = None
        if config.has_qk_norm:
            heads = ("q", config.num_attention_heads), ("k", config.num_key_value_heads)
            norms = [weights.tensor(f"{at}self_attn.{name}_norm.weight").expand(n, -1) for name, n in heads]
            self.head_norm = torch.cat(norms)  # [Hq + Hkv, D]

    def forward(self, x: Tensor, rotation: CosSin, cache: CacheView) -> Tensor:
        """x [N, H] -> [N, H]."""
        eps = self.config.rms_norm_eps
        q, k, v = self.project(rms_norm(x, self.attention_norm, eps), rotation)
        attended = cache.attend(self.index, q, k, v)  # [N, Hq, D]
        x = x + self.output(attended.flatten(1))  # [N, H]
        return x + self.down(gate(self.gate_up(rms_norm(x, self.mlp_norm, eps))))

    def project(self, x: Tensor, rotation: CosSin) -> tuple[Tensor, Tensor, Tensor]:
        """x [N, H] -> q [N, Hq, D] and k [N, Hkv, D], both rotated, and v [N, Hkv, D]."""
        config = self.config
        q_heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        heads = self.qkv(x).view(len(x), q_heads + 2 * kv_heads, config.head_dim)  # [N, Hq + 2 Hkv, D]
        q_and_k, v = heads.split((q_heads + kv_heads, kv_heads), dim=1)
        q, k = self.rotate(q_and_k, rotation).split((q_heads, kv_heads), dim=1)
        return q, k, v

    def rotate(self, heads: Tensor, rotation: CosSin) -> Tensor:
        """Queries and keys [N, Hq + Hkv, D], normalised first where the model does that -> the same, rotated."""
        return rotate(heads, rotation, self.head_norm, self.config.rms_norm_eps)


class Llama:
    """The weights and the forward pass; no requests, no cache, no text."""

    linear: Callable = Linear
    layer: Callable = DecoderLayer

    def __init__(
        self, config: ModelConfig, tensors: Mapping[str, Tensor], device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """tensors: by transformers' names, each read once. A tied model's head is its embedding."""
        self.config, self.device, self.dtype = config, torch.device(device), dtype
        weights = Weights(tensors, self.device, dtype, self.linear)
        self.embedding = weights.tensor("model.embed_tokens.weight")  # [V, H]
        self.layers = [self.layer(config, weights, index) for index in range(config.num_hidden_layers)]
        self.norm = weights.tensor("model.norm.weight")  # [H]
        self.head = self.linear(self.embedding) if config.tie_word_embeddings else weights.linear("lm_head")
        self.inverse_frequencies = inverse_frequencies(config).to(self.device)  # [D / 2]

    def forward(self, tokens: Tensor, positions: Tensor, cache: CacheView, logit_rows: Tensor | None = None) -> Tensor:
        """tokens [N], positions [N] -> logits [R, V] of the tokens in `logit_rows` [R], or of all N."""
        x = self.hidden_states(tokens, positions, cache)
        return self.logits(x if logit_rows is None else x[logit_rows])

    def hidden_states(self, tokens: Tensor, positions: Tensor, cache: CacheView) -> Tensor:
        """tokens [N], positions [N] -> the last layer's output, before the final norm [N, H]."""
        x = F.embedding(tokens, self.embedding)  # [N, H]
        rotation = rotation_for(positions, self.inverse_frequencies, self.dtype)  # two of [N, 1, D]
        for layer in self.layers:
            x = layer.forward(x, rotation, cache)
        return x

    def logits(self, x: Tensor) -> Tensor:
        """Hidden states [R, H] -> logits [R, V]."""
        return self.head(rms_norm(x, self.norm, self.config.rms_norm_eps))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale the last axis of x to unit root mean square, then by weight (Zhang and Sennrich, 2019)."""
    return F.rms_norm(x, weight.shape, weight, eps)


def gate(both: Tensor) -> Tensor:
    """both [N, 2 inner], the gate's half first -> silu(gate) * up [N, inner] (Shazeer, 2020)."""
    gated, up = both.chunk(2, dim=-1)
    return F.silu(gated) * up


def rotate(heads: Tensor, rotation: CosSin, norm: Tensor | None, eps: float) -> Tensor:
    """Rotate heads [N, h, D], pairing dimension i with i + D/2 as transformers does.

    norm [h, D]: the weights of each head's norm before it, in models that have one.
    (a, b) becomes (a cos - b sin, b cos + a sin): rolling by half a head swaps a and b,
    and the sine carries the sign.
    """
    if norm is not None:
        heads = F.rms_norm(heads, norm.shape[1:], eps=eps) * norm
    cos, sin = rotation
    return torch.addcmul(heads * cos, heads.roll(heads.shape[-1] // 2, dims=-1), sin)


def rotation_for(positions: Tensor, frequencies: Tensor, dtype: torch.dtype) -> CosSin:
    """positions [N] -> cosines and signed sines, each [N, 1, D], for `rotate`."""
    angles = positions[:, None].float() * frequencies  # [N, D / 2], fp32: bf16 holds whole numbers only up to 256
    sines = angles.sin()
    cos, sin = angles.cos().repeat(1, 2), torch.cat((-sines, sines), dim=-1)  # [N, D]
    return cos[:, None].to(dtype), sin[:, None].to(dtype)


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """RoPE's rotation per position, in radians, of each pair of dimensions [D / 2] (Su et al., 2021).

    With llama3 scaling the slow pairs, whose wavelength exceeds the original context, turn
    `factor` times slower; the fast ones stay; between them the two are blended linearly.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    if config.rope_scaling is None:
        return frequencies
    s = config.rope_scaling
    turns = s["original_max_position_embeddings"] * frequencies / (2 * math.pi)  # in the original context
    keep = ((turns - s["low_freq_factor"]) / (s["high_freq_factor"] - s["low_freq_factor"])).clamp(0, 1)
    return keep * frequencies + (1 - keep) * frequencies / s["factor"]
