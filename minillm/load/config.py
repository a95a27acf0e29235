"""Where a `ModelConfig` comes from: transformers' `config.json` as a dict, or a preset's name.

Reads the spelling of transformers 4 (`rope_theta`, `rope_scaling`) and of 5 (`rope_parameters`). What
this package cannot compute faithfully is refused here, by name, before any weight is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from minillm.model import config

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")  # SmolLM2 is a "llama"
ROPE_TYPES = ("default", "llama3")
NEEDED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
OPTIONAL = ("num_key_value_heads", "head_dim", "max_position_embeddings", "sliding_window")


@dataclass(frozen=True)
class ModelConfig(config.ModelConfig):
    """The model's shape, with the two ways to get one. Raises ValueError for a shape that cannot be."""

    def __post_init__(self) -> None:
        if self.model_type not in FAMILIES:
            raise ValueError(f"unknown model_type {self.model_type!r}; this package computes {', '.join(FAMILIES)}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"{self.num_attention_heads} query heads cannot share {self.num_key_value_heads} KV heads evenly"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd; RoPE rotates pairs of dimensions")

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        """Read a transformers config as a dict. Raises ValueError naming what is not supported."""
        model_type = hf.get("model_type")
        if model_type not in FAMILIES:
            raise ValueError(f"unknown model_type {model_type!r}; this package computes {', '.join(FAMILIES)}")
        if (act := hf.get("hidden_act", "silu")) != "silu":
            raise ValueError(f"hidden_act {act!r} is not supported; the Llama family uses 'silu'")
        if missing := [key for key in NEEDED if not hf.get(key)]:
            raise ValueError(f"the config lacks {', '.join(missing)}")
        if wrong := [key for key in (*NEEDED, *OPTIONAL) if not isinstance(hf.get(key, 1) or 1, int)]:
            raise ValueError(f"config.json: {wrong[0]} {hf[wrong[0]]!r} is not a whole number")
        heads = hf["num_attention_heads"]
        theta, scaling = _read_rope(hf)
        return cls(
            model_type=model_type,
            **{key: hf[key] for key in NEEDED},
            num_key_value_heads=hf.get("num_key_value_heads") or heads,
            head_dim=hf.get("head_dim") or hf["hidden_size"] // heads,
            rms_norm_eps=hf.get("rms_norm_eps", 1e-6),
            rope_theta=theta,
            rope_scaling=scaling,
            max_position_embeddings=_context_limit(hf),
            tie_word_embeddings=bool(hf.get("tie_word_embeddings", False)),
            attention_bias=model_type == "qwen2" or bool(hf.get("attention_bias", False)),
            mlp_bias=bool(hf.get("mlp_bias", False)),
            bos_token_id=next(iter(as_ids(hf, "bos_token_id", "config.json")), None),
            eos_token_id=as_ids(hf, "eos_token_id", "config.json"),
        )

    @classmethod
    def preset(cls, name: str) -> ModelConfig:
        """The published geometry of a known model, e.g. `qwen3-0.6b`; ValueError lists the names."""
        if name not in PRESETS:
            raise ValueError(f"unknown preset {name!r}; known: {', '.join(sorted(PRESETS))}")
        return PRESETS[name]


def as_ids(settings: Mapping[str, Any], field: str, file: str) -> tuple[int, ...]:
    """Token ids as transformers writes them (null, one id, or a list of ids), as a tuple.

    Raises ValueError naming file and field for anything else, such as an id written as text.
    """
    value = settings.get(field)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(id) is int and id >= 0 for id in ids):
        raise ValueError(f"{file}: {field} {value!r} is not a token id, or a list of them")
    return tuple(ids)


def _read_rope(hf: Mapping[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """RoPE base and scaling from either spelling; ValueError for a type we do not compute."""
    new = hf.get("rope_parameters") or {}
    scaling = new or hf.get("rope_scaling") or {}
    theta = float(new.get("rope_theta") or hf.get("rope_theta") or 10_000.0)
    rope_type = scaling.get("rope_type") or scaling.get("type") or "default"
    if rope_type not in ROPE_TYPES:
        raise ValueError(f"unknown RoPE type {rope_type!r}; this package computes {', '.join(ROPE_TYPES)}")
    if float(hf.get("partial_rotary_factor") or new.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ValueError("partial_rotary_factor other than 1 is not supported")
    if rope_type == "default":
        return theta, None
    needed = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    if missing := [key for key in needed if key not in scaling]:
        raise ValueError(f"llama3 RoPE scaling lacks {', '.join(missing)}")
    return theta, {key: scaling[key] for key in needed}


def _context_limit(hf: Mapping[str, Any]) -> int:
    """Positions the model may use. Inside its window, sliding attention equals full attention."""
    limit = hf.get("max_position_embeddings", 2048)
    window = hf.get("sliding_window")
    active = hf.get("use_sliding_window", hf["model_type"] == "mistral")
    return min(limit, window) if window and active else limit


_SMOLLM2 = dict(max_position_embeddings=8192, tie_word_embeddings=True, bos_token_id=1, eos_token_id=(2,))
_QWEN = dict(rms_norm_eps=1e-6, rope_theta=1_000_000.0, tie_word_embeddings=True, eos_token_id=(151_645,))
_LLAMA3 = dict(rope_theta=5e5, max_position_embeddings=8192, bos_token_id=128_000, eos_token_id=(128_001, 128_009))
_SCALING = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
_LLAMA31 = _LLAMA3 | dict(
    rope_scaling=_SCALING, max_position_embeddings=131_072, eos_token_id=(128_001, 128_008, 128_009)
)
_LLAMA32 = _LLAMA31 | dict(rope_scaling=_SCALING | {"factor": 32.0}, tie_word_embeddings=True)
_QWEN2 = _QWEN | dict(model_type="qwen2", max_position_embeddings=32_768, attention_bias=True)
_QWEN3 = _QWEN | dict(model_type="qwen3", max_position_embeddings=40_960)
_MISTRAL = dict(model_type="mistral", rope_theta=1e6, max_position_embeddings=32_768, bos_token_id=1, eos_token_id=(2,))

# vocabulary, hidden and inner size, layers, query and KV heads, head_dim
PRESETS: dict[str, ModelConfig] = {
    "smollm2-135m": ModelConfig(49_152, 576, 1536, 30, 9, 3, 64, rope_theta=100_000.0, **_SMOLLM2),
    "smollm2-360m": ModelConfig(49_152, 960, 2560, 32, 15, 5, 64, rope_theta=100_000.0, **_SMOLLM2),
    "smollm2-1.7b": ModelConfig(49_152, 2048, 8192, 24, 32, 32, 64, rope_theta=130_000.0, **_SMOLLM2),
    "qwen2.5-0.5b": ModelConfig(151_936, 896, 4864, 24, 14, 2, 64, **_QWEN2),
    "qwen3-0.6b": ModelConfig(151_936, 1024, 3072, 28, 16, 8, 128, **_QWEN3),
    "llama-3-8b": ModelConfig(128_256, 4096, 14_336, 32, 32, 8, 128, **_LLAMA3),
    "llama-3.1-8b": ModelConfig(128_256, 4096, 14_336, 32, 32, 8, 128, **_LLAMA31),
    "llama-3.2-1b": ModelConfig(128_256, 2048, 8192, 16, 32, 8, 64, **_LLAMA32),
    "llama-3-70b": ModelConfig(128_256, 8192, 28_672, 80, 64, 8, 128, **_LLAMA3),
    "mistral-7b": ModelConfig(32_768, 4096, 14_336, 32, 32, 8, 128, **_MISTRAL),
}
