"""transformers' own model beside ours, with the very same weights: what benchmarks compare with."""

from __future__ import annotations

from dataclasses import asdict

from minillm.load.config import ModelConfig
from minillm.load.source import locate
from minillm.load.weights import RANDOM, RandomTensors


def load_reference(name: str, model):
    """transformers' model of the name that `model` was loaded from, on its device and in its dtype."""
    from transformers import AutoModelForCausalLM

    if name.startswith(RANDOM):
        return _random_reference(model)
    reference = AutoModelForCausalLM.from_pretrained(locate(name), dtype=model.dtype, attn_implementation="sdpa")
    return reference.to(model.device).eval()


def _random_reference(model):
    """`random:` names have no files: the same geometry, and the same numbers drawn again."""
    from transformers import AutoModelForCausalLM

    with model.device:
        reference = AutoModelForCausalLM.from_config(hf_config(model.config), dtype=model.dtype,
                                                     attn_implementation="sdpa")
    drawn = RandomTensors(model.config, model.device, model.dtype)
    for key in drawn:  # one at a time: never all of them twice
        reference.get_parameter(key).data.copy_(drawn[key])
    reference.tie_weights()
    return reference.to(model.device).eval()


def hf_config(config: ModelConfig):
    """The config that transformers' classes take: their field names are ours but for RoPE's."""
    from transformers import AutoConfig

    fields = {key: value for key, value in asdict(config).items() if not key.startswith("rope_")}
    scaling = {"rope_type": "llama3", **config.rope_scaling} if config.rope_scaling else {"rope_type": "default"}
    eos = list(config.eos_token_id) or None
    return AutoConfig.for_model(
        **fields | {"eos_token_id": eos, "rope_parameters": {"rope_theta": config.rope_theta, **scaling}}
    )
