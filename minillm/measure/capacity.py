"""How many requests fit: memory, less weights, less overhead, over the cache of one request.

GB here is 10**9 bytes, as in bandwidths and data sheets; a GiB is 7 % more.
"""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass, replace

from minillm.guard.inputs import check_at_least, whole_setting
from minillm.ladder.quantized import DTYPES, kv_bytes_per_token
from minillm.load.config import PRESETS, ModelConfig
from minillm.measure.roofline import weight_numbers
from minillm.model.config import ModelConfig as Shape

GB = 10**9
WEIGHT_BYTES = 2  # per weight, at 16 bits
PLAIN_FORMAT = "bf16"


@dataclass(frozen=True)
class Capacity:
    """The sum, with all its terms.

    rule_of_thumb: the 16-bit number of requests times 16 over the format's bits per number. It
    forgets the scales, which `max_concurrent` counts.
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
    model: str | ModelConfig, memory_gb: float, weights_gb: float | None = None, overhead_gb: float = 4.0,
    context: int = 4096, kv_format: str = PLAIN_FORMAT,
) -> Capacity:
    """Requests of `context` tokens that fit concurrently; `model` is a preset's name or a config.

    weights_gb: 16 bits a weight if None. overhead_gb: activations, workspaces, the runtime.
    ValueError if weights and overhead leave nothing, or if the context is longer than the model's own.
    """
    if memory_gb is None or overhead_gb is None:
        raise ValueError(f"memory_gb {memory_gb} and overhead_gb {overhead_gb} must both be numbers of GB")
    check_at_least(0, memory_gb=memory_gb, weights_gb=weights_gb, overhead_gb=overhead_gb)
    config = model if isinstance(model, Shape) else ModelConfig.preset(model)
    context = whole_setting("context", context, 1, math.inf)
    if context > (most := config.max_position_embeddings):
        raise ValueError(f"context {context:,} > {most:,} positions that this model has: no engine would serve it")
    weights_gb = weight_numbers(config) * WEIGHT_BYTES / GB if weights_gb is None else float(weights_gb)
    memory_gb, overhead_gb = float(memory_gb), float(overhead_gb)
    check_at_least(0, memory_bytes=memory_gb * GB)
    cache_bytes = round(max(0.0, memory_gb - weights_gb - overhead_gb) * GB)
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


def what_changes_it(model: str, context: int = 4096, kv_format: str = PLAIN_FORMAT, **sums) -> list[dict]:
    """The sum as asked, and with one thing changed: half the context, fewer bits, no KV heads shared. As rows.

    sums: the other arguments of `capacity`. Every row has the model's own weights: only the cache differs.
    """
    config = ModelConfig.preset(model)
    context = whole_setting("context", context, 1, math.inf)
    alone = replace(config, num_key_value_heads=config.num_attention_heads)
    if sums.get("weights_gb") is None:
        sums["weights_gb"] = weight_numbers(config) * WEIGHT_BYTES / GB
    cases = [("as asked", config, context, kv_format), ("half the context", config, -(-context // 2), kv_format)]
    cases += [(f"{name} keys and values", config, context, name) for name in ("int8", "int4") if name != kv_format]
    if alone != config:
        shared = config.num_attention_heads // config.num_key_value_heads
        cases.append((f"a KV head for each query head, not for {shared}", alone, context, kv_format))
    rows = []
    for case, changed, tokens, stored in cases:
        found = asdict(capacity(changed, context=tokens, kv_format=stored, **sums))
        first = rows[0]["max_concurrent"] if rows else found["max_concurrent"]
        rows.append({"case": case, **found, "times": found["max_concurrent"] / first if first else None})
    return rows


def preset_rows(kv_formats: tuple[str, ...] = ("bf16", "int8", "int4")) -> list[dict]:
    """Every preset's weights at 16 bits, and what a token of its cache takes in each of these formats."""
    return [
        {
            "model": name, "weights_gb": weight_numbers(config) * WEIGHT_BYTES / GB,
            **{f"{kv_format}_kv_bytes_per_token": kv_bytes_per_token(config, kv_format) for kv_format in kv_formats},
        }
        for name, config in PRESETS.items()
    ]


def server_flags(found: Capacity) -> dict[str, str]:
    """The same for vLLM and SGLang (their documentation, 2025): both take a share of the memory for weights and cache.

    Of the quantised formats here they have fp8 too. A sentence in place of flags where no request fits.
    """
    # rounded down, and never all of it, or the engine would take what the overhead needs
    share = min(0.99, math.floor(100 * (found.memory_gb - found.overhead_gb) / found.memory_gb + 1e-9) / 100)
    if not (found.max_concurrent and share):
        return dict.fromkeys(
            ("vLLM", "SGLang"), f"no flags: not one request of {found.context_tokens:,} tokens fits beside the weights"
        )
    names = {
        "vLLM": ("--max-model-len", "--gpu-memory-utilization", "--max-num-seqs", "--kv-cache-dtype fp8"),
        "SGLang": ("--context-length", "--mem-fraction-static", "--max-running-requests", "--kv-cache-dtype fp8_e4m3"),
    }
    lines = {}
    for engine, (context, memory, rows, fp8) in names.items():
        lines[engine] = f"{context} {found.context_tokens} {memory} {share:.2f} {rows} {found.max_concurrent}"
        if found.kv_format == "fp8":
            lines[engine] += f" {fp8}"
        elif found.kv_format not in DTYPES:
            lines[engine] += f" (for {found.kv_format} there is no flag; 8 bits are {fp8})"
    return lines
