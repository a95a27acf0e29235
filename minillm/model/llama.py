"""A decoder of the Llama family over a flat list of tokens.

There is no batch axis and no padding. The model is given N tokens, which may belong to
one sequence or to a hundred, each with its position; it does not know which. Only
attention must know, and that is the cache's affair: the model hands q, k and v of its N
tokens to `cache.attend` and gets the attended values back. So a prefill chunk, a decode
step, and the verification of drafts are one code path.

Letters in shapes: N tokens, H hidden, Hq query heads, Hkv KV heads, D head_dim, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from minillm.fast.linear import Packing, make_linear
from minillm.model.config import ModelConfig
from minillm.model.elementwise import Rotation, elementwise_for, rms_norm


class CacheView(Protocol):
    """What the model needs of a KV cache: to be asked for attention, layer by layer."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k, v [N, Hkv, D], then attend q [N, Hq, D] over all that each token may see -> [N, Hq, D]."""
        ...


class Llama:
    """The weights and the forward pass; no requests, no cache, no text."""

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, Tensor],
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        packed: Packing = "auto",
    ) -> None:
        """Take every weight from `tensors` (transformers' names), each once.

        Raises ValueError naming the tensors that are missing, left over, of a wrong shape,
        or that contradict `tie_word_embeddings`.
        """
        self.config, self.device, self.dtype = config, torch.device(device), dtype
        self.weight_format: str | None = None  # "int8" or "int4" after `quantize_weights`; else as `dtype` says
        take = WeightReader(tensors, self.device, dtype, packed)
        self.embedding = take.tensor("model.embed_tokens.weight", config.vocab_size, config.hidden_size)  # [V, H]
        self.layers = [DecoderLayer(config, take, index) for index in range(config.num_hidden_layers)]
        self.norm = take.tensor("model.norm.weight", config.hidden_size)  # [H]
        self.head = take.head(self.embedding, config)
        take.finish()
        self.inverse_frequencies = inverse_frequencies(config).to(self.device)  # [D / 2]

    def forward(
        self, tokens: Tensor, positions: Tensor, cache: CacheView, logit_rows: Tensor | None = None,
        observe: Callable[[Tensor], None] | None = None,
    ) -> Tensor:
        """tokens [N], positions [N] -> logits [R, V] of the tokens in `logit_rows` [R], or of all N.

        observe: is shown the hidden states [N, H] on the way, for a drafter that reads them.
        """
        x = self.hidden_states(tokens, positions, cache)
        if observe:
            observe(x)
        return self.logits(x if logit_rows is None else x[logit_rows])

    def hidden_states(self, tokens: Tensor, positions: Tensor, cache: CacheView) -> Tensor:
        """tokens [N], positions [N] -> the last layer's output, before the final norm [N, H]."""
        x = F.embedding(tokens, self.embedding)  # [N, H]
        rotation = rotation_for(positions, self.inverse_frequencies, self.dtype)  # two of [N, 1, D]
        for index, layer in enumerate(self.layers):
            x = layer.forward(x, rotation, cache, index)
        return x

    def logits(self, x: Tensor) -> Tensor:
        """Hidden states [R, H] -> logits [R, V]."""
        return self.head(rms_norm(x, self.norm, self.config.rms_norm_eps))

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that one decode step reads: all but the embedding table, of which it reads a row."""
        layers = sum(linear.weight_bytes for layer in self.layers for linear in layer.linears)
        return layers + self.head.weight_bytes


class DecoderLayer:
    """Attention and a gated feed-forward network, each added to the residual stream.

    What stands between its matrices is plain PyTorch, or on a GPU the same in a few kernels: `elementwise`.
    """

    LINEARS = ("qkv", "output", "gate_up", "down")

    def __init__(self, config: ModelConfig, take: WeightReader, index: int) -> None:
        self.config, self.elementwise = config, elementwise_for(take.device)
        hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
        q_rows, kv_rows = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
        at = f"model.layers.{index}."
        qkv = {f"{at}self_attn.{name}_proj": rows for name, rows in zip("qkv", (q_rows, kv_rows, kv_rows), strict=True)}
        self.qkv = take.linear(qkv, hidden, config.attention_bias)
        self.output = take.linear({f"{at}self_attn.o_proj": hidden}, q_rows, config.has_output_bias)
        self.gate_up = take.linear({f"{at}mlp.gate_proj": inner, f"{at}mlp.up_proj": inner}, hidden, config.mlp_bias)
        self.down = take.linear({f"{at}mlp.down_proj": hidden}, inner, config.mlp_bias)
        self.attention_norm = take.tensor(f"{at}input_layernorm.weight", hidden)  # [H]
        self.mlp_norm = take.tensor(f"{at}post_attention_layernorm.weight", hidden)  # [H]
        self.head_norm = None
        if config.has_qk_norm:
            heads = ("q", config.num_attention_heads), ("k", config.num_key_value_heads)
            norms = [take.tensor(f"{at}self_attn.{name}_norm.weight", head_dim).expand(n, -1) for name, n in heads]
            self.head_norm = torch.cat(norms)  # [Hq + Hkv, D]

    @property
    def linears(self) -> tuple:
        return tuple(getattr(self, name) for name in self.LINEARS)

    def forward(self, x: Tensor, rotation: Rotation, cache: CacheView, index: int) -> Tensor:
        """x [N, H] -> [N, H]."""
        eps = self.config.rms_norm_eps
        q, k, v = self.project(rms_norm(x, self.attention_norm, eps), rotation)
        attended = cache.attend(index, q, k, v)  # [N, Hq, D]
        x, normed = self.elementwise.add_norm(x, self.output(attended.flatten(1)), self.mlp_norm, eps)  # two of [N, H]
        return x + self.down(self.elementwise.gate(self.gate_up(normed)))  # [N, H]

    def project(self, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """x [N, H] -> q [N, Hq, D] and k [N, Hkv, D], both rotated, and v [N, Hkv, D]."""
        config = self.config
        q_heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        heads = self.qkv(x).view(len(x), q_heads + 2 * kv_heads, config.head_dim)  # [N, Hq + 2 Hkv, D]
        q_and_k, v = heads.split((q_heads + kv_heads, kv_heads), dim=1)
        rotated = self.elementwise.rotate(q_and_k, rotation, self.head_norm, config.rms_norm_eps)
        q, k = rotated.split((q_heads, kv_heads), dim=1)
        return q, k, v


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


def rotation_for(positions: Tensor, frequencies: Tensor, dtype: torch.dtype) -> Rotation:
    """positions [N] -> cosines and signed sines, each [N, 1, D], for `elementwise.rotate`."""
    angles = positions[:, None].float() * frequencies  # [N, D / 2], fp32: bf16 cannot count to 8,192
    sines = angles.sin()
    cos, sin = angles.cos().repeat(1, 2), torch.cat((-sines, sines), dim=-1)  # [N, D]
    return cos[:, None].to(dtype), sin[:, None].to(dtype)


class WeightReader:
    """Hands out tensors by name, checks their shapes, and knows at the end which were not asked for."""

    def __init__(self, tensors: Mapping[str, Tensor], device: torch.device, dtype: torch.dtype, packed: Packing):
        self.tensors, self.device, self.dtype, self.packed = tensors, device, dtype, packed
        self.unused = {name for name in tensors if not name.endswith("rotary_emb.inv_freq")}

    def tensor(self, name: str, *shape: int) -> Tensor:
        """The tensor `name`, on the device, in the model's dtype, of exactly this shape."""
        if name not in self.unused:
            raise ValueError(f"the weights lack {name}")
        self.unused.remove(name)
        tensor = self.tensors[name]
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; the config asks for {shape}")
        return tensor.to(device=self.device, dtype=self.dtype)

    def linear(self, parts: Mapping[str, int], columns: int, with_bias: bool):
        """One layer from several stacked ones {name: rows}, so that one product serves q, k and v."""
        weight = self._stack([self.tensor(f"{name}.weight", rows, columns) for name, rows in parts.items()])
        bias = None
        if with_bias:
            bias = self._stack([self.tensor(f"{name}.bias", rows) for name, rows in parts.items()])
        return make_linear(weight, bias, self.packed)

    def head(self, embedding: Tensor, config: ModelConfig):
        """The output head: a weight of its own, or the embedding's where the two are tied."""
        name = "lm_head.weight"
        if not config.tie_word_embeddings:
            return self.linear({"lm_head": config.vocab_size}, config.hidden_size, with_bias=False)
        if name in self.unused and not torch.equal(self.tensor(name, *embedding.shape), embedding):
            raise ValueError(
                "tie_word_embeddings is true, but lm_head.weight differs from model.embed_tokens.weight: "
                "set tie_word_embeddings to false, or drop lm_head.weight"
            )
        return make_linear(embedding, None, self.packed)

    def finish(self) -> None:
        """Raise ValueError if a weight was left over."""
        if self.unused:
            names = sorted(self.unused)
            raise ValueError(f"{len(names)} weights belong nowhere in this model, for example {', '.join(names[:3])}")

    @staticmethod
    def _stack(parts: list[Tensor]) -> Tensor:
        return parts[0] if len(parts) == 1 else torch.cat(parts)
