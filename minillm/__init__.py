"""minillm: LLM inference, built a rung at a time. `minillm.ladder` is the part to read."""

from minillm.fast.linear import quantize_weights
from minillm.ladder.engine import Engine
from minillm.ladder.request import Completion, RequestError, SamplingParams, TokenEvent
from minillm.load.tokenizer import load_tokenizer
from minillm.load.weights import load_model
from minillm.measure import metrics
from minillm.model.config import ModelConfig

__version__ = "0.1.0"
__all__ = [
    "Completion",
    "Engine",
    "ModelConfig",
    "RequestError",
    "SamplingParams",
    "TokenEvent",
    "load_model",
    "load_tokenizer",
    "metrics",
    "quantize_weights",
]
