"""minillm: LLM inference, built a rung at a time. `minillm.ladder` is the part to read.

A name is imported when it is first used: PyTorch takes seconds, and `minillm --help` needs none of it.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # what an editor reads; at run time `__getattr__` does the same
    from minillm.extras.draft_model import DraftModelProposer
    from minillm.fast.engine import Engine
    from minillm.fast.weight_formats import quantize_weights
    from minillm.guard.inputs import RequestError
    from minillm.ladder.request import Completion, SamplingParams, TokenEvent
    from minillm.ladder.speculative import NgramProposer, Speculator
    from minillm.load.config import ModelConfig
    from minillm.load.tokenizer import load_tokenizer
    from minillm.load.weights import load_model
    from minillm.measure import metrics

__version__ = "0.1.0"
__all__ = [
    "Completion",
    "DraftModelProposer",
    "Engine",
    "ModelConfig",
    "NgramProposer",
    "RequestError",
    "SamplingParams",
    "Speculator",
    "TokenEvent",
    "load_model",
    "load_tokenizer",
    "metrics",
    "quantize_weights",
]
_HOMES = {
    "Completion": "ladder.request", "DraftModelProposer": "extras.draft_model", "Engine": "fast.engine",
    "ModelConfig": "load.config", "NgramProposer": "ladder.speculative", "RequestError": "guard.inputs",
    "SamplingParams": "ladder.request", "Speculator": "ladder.speculative", "TokenEvent": "ladder.request",
    "load_model": "load.weights", "load_tokenizer": "load.tokenizer", "metrics": "measure.metrics",
    "quantize_weights": "fast.weight_formats",
}


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f"minillm.{_HOMES[name]}")
    globals()[name] = module if name == "metrics" else getattr(module, name)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
