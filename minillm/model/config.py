"""The shape of a decoder, in transformers' own field names.

Skip nothing here: every shape in the files that follow is made of these numbers. How a
config is read from a file, and the presets of known models, are in `load/config.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self


@dataclass(frozen=True)
class ModelConfig:
    """Everything that decides a model's tensors and arithmetic; no weights.

    `head_dim` is not always `hidden_size / num_attention_heads`. `rope_scaling` is None or the
    llama3 parameters. `eos_token_id` holds every id that ends a text, whether config or tokenizer names it.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    model_type: str = "llama"  # or "mistral", "qwen2", "qwen3"
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    rope_scaling: Mapping[str, Any] | None = None
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    bos_token_id: int | None = None
    eos_token_id: tuple[int, ...] = ()

    @property
    def query_group(self) -> int:
        """G, the query heads that share one KV head."""
        return self.num_attention_heads // self.num_key_value_heads

    @property
    def has_qk_norm(self) -> bool:
        """Qwen3 normalises each head's query and key before RoPE."""
        return self.model_type == "qwen3"

    @property
    def has_output_bias(self) -> bool:
        """Llama's `attention_bias` covers the output projection; Qwen2's covers q, k and v only."""
        return self.attention_bias and self.model_type != "qwen2"

    def with_eos(self, *ids: int) -> Self:
        """The same model, with further ids that end a text."""
        return replace(self, eos_token_id=tuple(dict.fromkeys((*self.eos_token_id, *ids))))
