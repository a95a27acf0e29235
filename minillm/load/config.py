"""Where a `ModelConfig` comes from: transformers' `config.json` as a dict, or a preset's name.

Reads the spelling of transformers 4 (`rope_theta`, `rope_scaling`) and of 5 (`rope_parameters`). A key
that is left out means what it means to transformers' own class of the family. What this package
cannot compute faithfully is refused here, by name, before any weight is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from minillm.load.fields import Fields
from minillm.model import config

ROPE_TYPES = ("default", "llama3")
NEEDED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
MOST_LAYERS = 10_000
MOST_POSITIONS = 2**40
LAYER_TYPES = ("full_attention", "sliding_attention")

# What a family's class in transformers takes for a key that the file leaves out. None is worked out.
_SPECIAL = dict(bos_token_id=1, eos_token_id=2)
_LAYERED = dict(max_position_embeddings=32_768, num_key_value_heads=32, sliding_window=4096)
DEFAULTS: dict[str, dict[str, int]] = {
    "llama": dict(max_position_embeddings=2048, **_SPECIAL),  # SmolLM2 is one
    "mistral": dict(max_position_embeddings=131_072, num_key_value_heads=8, sliding_window=4096, **_SPECIAL),
    "qwen2": _LAYERED,
    "qwen3": _LAYERED | dict(head_dim=128),
}
FAMILIES = tuple(DEFAULTS)


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
        if self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is not an even number from 2 up, and RoPE rotates pairs")

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any], file: str = "config.json") -> ModelConfig:
        """Read a transformers config as a dict. Raises ValueError naming `file` and what is not supported."""
        fields = Fields(hf, file)
        try:
            return cls(**_read(fields))
        except ValueError as error:
            raise error if str(error).startswith(file) else ValueError(f"{file}: {error}") from None

    @classmethod
    def preset(cls, name: str) -> ModelConfig:
        """The published geometry of a known model, e.g. `qwen3-0.6b`; ValueError lists the names."""
        if not isinstance(name, str) or name not in PRESETS:
            near = get_close_matches(str(name), PRESETS, n=2)
            hint = f"; near it: {' and '.join(near)}" if near else ""
            raise ValueError(f"unknown preset {name!r}; known: {', '.join(sorted(PRESETS))}{hint}")
        return PRESETS[name]


def _read(fields: Fields) -> dict[str, Any]:
    """The fields of a ModelConfig, each checked."""
    family = fields.get("model_type")
    if family not in FAMILIES:
        raise ValueError(f"unknown model_type {family!r}; this package computes {', '.join(FAMILIES)}")
    if (act := fields.get("hidden_act", "silu")) != "silu":
        raise ValueError(f"hidden_act {act!r} is not supported; the Llama family uses 'silu'")
    if missing := [key for key in NEEDED if key not in fields]:
        raise ValueError(f"the config lacks {', '.join(missing)}")
    sizes = {key: fields.whole(key, None) for key in NEEDED}
    layers = fields.whole("num_hidden_layers", None, most=MOST_LAYERS)
    defaults, heads = DEFAULTS[family], sizes["num_attention_heads"]
    theta, scaling = _read_rope(fields)
    bias, mlp_bias = fields.flag("attention_bias"), fields.flag("mlp_bias")
    head_dim = fields.whole("head_dim", defaults.get("head_dim"), nullable="head_dim" not in defaults)
    return sizes | dict(
        model_type=family,
        num_key_value_heads=fields.whole(
            "num_key_value_heads", defaults.get("num_key_value_heads"), nullable=True) or heads,
        head_dim=head_dim or sizes["hidden_size"] // heads,
        rms_norm_eps=fields.positive("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        max_position_embeddings=_context_limit(fields, family, layers),
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        attention_bias=family == "qwen2" or (bias and family != "mistral"),
        mlp_bias=mlp_bias and family == "llama",
        bos_token_id=next(iter(fields.ids("bos_token_id", defaults.get("bos_token_id"))), None),
        eos_token_id=fields.ids("eos_token_id", defaults.get("eos_token_id"), below=sizes["vocab_size"]),
    )


def _read_rope(fields: Fields) -> tuple[float, dict[str, Any] | None]:
    """RoPE base and scaling from either spelling; ValueError for a type we do not compute."""
    new, old = fields.part("rope_parameters"), fields.part("rope_scaling")
    scaling = new or old
    theta = (scaling if "rope_theta" in scaling else fields).positive("rope_theta", 10_000.0)
    rope_type = scaling.get("rope_type", scaling.get("type", "default"))
    if rope_type not in ROPE_TYPES:
        raise ValueError(f"unknown RoPE type {rope_type!r}; this package computes {', '.join(ROPE_TYPES)}")
    if any(part.positive("partial_rotary_factor", 1.0) != 1.0 for part in (fields, scaling)):
        raise ValueError("partial_rotary_factor other than 1 is not supported")
    if rope_type == "default":
        return theta, None
    needed = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    if missing := [key for key in needed if key not in scaling]:
        raise ValueError(f"llama3 RoPE scaling lacks {', '.join(missing)}")
    for key in needed:
        scaling.positive(key, 0.0)
    if scaling["low_freq_factor"] >= scaling["high_freq_factor"]:
        raise scaling.refused("high_freq_factor", f"above low_freq_factor {scaling['low_freq_factor']}")
    return theta, {key: scaling[key] for key in needed}


def _context_limit(fields: Fields, family: str, layers: int) -> int:
    """Positions the model may use. Inside its window, sliding attention equals full attention.

    When the window applies is each family's own rule in transformers: never in a Llama; in a Mistral
    unless it is null; in a Qwen in the layers that `layer_types` names, or else, with
    `use_sliding_window`, in those from `max_window_layers` on.
    """
    defaults = DEFAULTS[family]
    limit = fields.whole("max_position_embeddings", defaults["max_position_embeddings"], most=MOST_POSITIONS)
    if family == "llama":
        return limit
    window = fields.whole("sliding_window", defaults["sliding_window"], most=MOST_POSITIONS, nullable=True)
    if family != "mistral" and not _has_sliding_layers(fields, layers, window):
        return limit
    return min(limit, window or limit)


def _has_sliding_layers(fields: Fields, layers: int, window: int | None) -> bool:
    """Whether any layer of a Qwen slides; ValueError where one must and there is no window."""
    active = fields.flag("use_sliding_window") and window is not None
    first = fields.whole("max_window_layers", 28, least=0)
    types = fields.get("layer_types")
    if types is None:
        return active and first < layers
    if not (isinstance(types, list) and len(types) == layers and all(kind in LAYER_TYPES for kind in types)):
        raise fields.refused("layer_types", f"a list of {layers} of {', '.join(LAYER_TYPES)}")
    if "sliding_attention" in types and not active:
        raise ValueError("layer_types has sliding_attention, but use_sliding_window and sliding_window give no window")
    return "sliding_attention" in types


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
