"""Small random models of odd shapes, which show the mistakes that a 9/3-head model hides."""

from functools import cache

import torch

from minillm.fast.model import FastLlama
from minillm.load.config import ModelConfig

SHAPES = {
    "t8-2": dict(hidden_size=64, num_attention_heads=8, num_key_value_heads=2, head_dim=8),
    "t-wide": dict(hidden_size=64, num_attention_heads=8, num_key_value_heads=2, head_dim=12),
    "t4-1": dict(hidden_size=48, num_attention_heads=4, num_key_value_heads=1, head_dim=12),
    "t9-3": dict(hidden_size=72, num_attention_heads=9, num_key_value_heads=3, head_dim=8),
}


def tiny_config(shape: str = "t8-2", **changes) -> ModelConfig:
    common = dict(vocab_size=97, intermediate_size=128, num_hidden_layers=2, max_position_embeddings=4096,
                  tie_word_embeddings=True)
    return ModelConfig(**{**common, **SHAPES[shape], **changes})


def random_tensors(config: ModelConfig, seed: int = 0, std: float = 0.08) -> dict[str, torch.Tensor]:
    """Random weights under transformers' names. The spread is large enough for the argmax to be clear."""
    make = torch.Generator().manual_seed(seed)
    q, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes = {"model.embed_tokens": (config.vocab_size, hidden), "model.norm": (hidden,)}
    if not config.tie_word_embeddings:
        shapes["lm_head"] = (config.vocab_size, hidden)
    biased = set()
    for i in range(config.num_hidden_layers):
        at = f"model.layers.{i}."
        shapes |= {f"{at}self_attn.q_proj": (q, hidden), f"{at}self_attn.k_proj": (kv, hidden),
                   f"{at}self_attn.v_proj": (kv, hidden), f"{at}self_attn.o_proj": (hidden, q),
                   f"{at}mlp.gate_proj": (inner, hidden), f"{at}mlp.up_proj": (inner, hidden),
                   f"{at}mlp.down_proj": (hidden, inner),
                   f"{at}input_layernorm": (hidden,), f"{at}post_attention_layernorm": (hidden,)}
        if config.has_qk_norm:
            shapes |= {f"{at}self_attn.q_norm": (config.head_dim,), f"{at}self_attn.k_norm": (config.head_dim,)}
        if config.attention_bias:
            biased |= {f"{at}self_attn.{n}_proj" for n in ("q", "k", "v")}
        if config.has_output_bias:
            biased.add(f"{at}self_attn.o_proj")
        if config.mlp_bias:
            biased |= {f"{at}mlp.{n}_proj" for n in ("gate", "up", "down")}
    tensors = {}
    for name, shape in shapes.items():
        centre = 1.0 if "norm" in name else 0.0
        tensors[f"{name}.weight"] = torch.randn(shape, generator=make) * std + centre
        if name in biased:
            tensors[f"{name}.bias"] = torch.randn(shape[0], generator=make) * std
    return tensors


@cache
def tiny_model(shape: str = "t8-2", seed: int = 0, **changes) -> FastLlama:
    config = tiny_config(shape, **changes)
    return FastLlama(config, random_tensors(config, seed))
