"""How many requests fit: memory, less weights, less overhead, over the cache of one request.

GB here is 10**9 bytes, as in bandwidths and data sheets; a GiB is 7 % more.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from minillm.ladder.quantized import kv_bytes_per_token
from minillm.measure.roofline import weight_numbers
from minillm.model.config import ModelConfig

GB = 10**9
WEIGHT_BYTES = 2  # per weight, at 16 bits
PLAIN_FORMAT = "bf16"


@dataclass(frozen=True)
class Capacity:
    """The sum, with all its terms.

    `rule_of_thumb` is what "8 bits double it" promises: the 16-bit number of requests times
    16 over the format's bits per number. It forgets the scales, which `max_concurrent` counts.
    """

    memory_gb: float
    weights_gb: float
    overhead_gb: float
    cache_gb: float  # what is left of the memory
    kv_format: str
    kv_bytes_per_token: float
    context_tokens: int
    request_gb: float  # the cache of one request at full context
    max_concurrent: int
    rule_of_thumb: int


def capacity(
    model: str | ModelConfig,
    memory_gb: float,
    weights_gb: float | None = None,
    overhead_gb: float = 4.0,
    context: int = 4096,
    kv_format: str = PLAIN_FORMAT,
) -> Capacity:
    """Requests of `context` tokens that fit at once; `model` is a preset's name or a config.

    weights_gb: 16 bits a weight if None. overhead_gb: activations, workspaces, and the
    runtime itself. Raises ValueError if the weights and the overhead leave nothing.
    """
    config = ModelConfig.preset(model) if isinstance(model, str) else model
    weights_gb = weight_numbers(config) * WEIGHT_BYTES / GB if weights_gb is None else weights_gb
    cache_bytes = round((memory_gb - weights_gb - overhead_gb) * GB)
    if cache_bytes <= 0:
        raise ValueError(
            f"{weights_gb:g} GB of weights and {overhead_gb:g} GB of overhead leave nothing of {memory_gb:g} GB: "
            "take fewer bits per weight, or more memory"
        )
    per_token = kv_bytes_per_token(config, kv_format)
    plain = cache_bytes // (context * kv_bytes_per_token(config, PLAIN_FORMAT))
    bits = int(re.sub(r"\D", "", kv_format))  # a format's name ends in the bits of a number
    return Capacity(
        memory_gb, weights_gb, overhead_gb, cache_bytes / GB, kv_format, per_token, context,
        request_gb=context * per_token / GB,
        max_concurrent=int(cache_bytes // (context * per_token)),
        rule_of_thumb=plain * 16 // bits,
    )
