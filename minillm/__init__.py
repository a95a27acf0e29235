"""minillm: LLM inference, built a rung at a time. `minillm.ladder` is the part to read."""

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
