"""Whole services in virtual time, as rows to print: the articles' worked example."""

from __future__ import annotations

from minillm.measure import metrics
from minillm.measure.capacity import GB, capacity
from minillm.measure.virtual import DEVICES, CostModel, virtual_engine
from minillm.measure.workload import play, worked_example
from minillm.model.config import ModelConfig

# setup, KV format, and the engine's settings
SETUPS = (
    ("static batch of 8", "bf16", {"batching": "static", "kv": "slots", "max_batch": 8}),
    ("continuous, paged", "bf16", {}),
    ("continuous, paged, 8-bit KV", "int8", {}),
)


def worked_example_rows(
    device: str = "a100-80gb",
    model: str = "llama-3-8b",
    clients: int = 256,
    requests: int = 512,
    context: int = 4096,
    answer: int = 300,
    prompts_received: bool = False,
    overhead_gb: float = 4.0,
    price_per_hour: float = 2.9,
    scale: float = 1.0,
) -> list[dict]:
    """Chats that fill their context, on one device: a static batch, continuous with paging, and 8-bit keys and values.

    A closed loop of so many clients. prompts_received: the chats' history is in the cache
    already, so that only answers are computed; else every prompt is computed whole.
    ValueError for a device that has no data sheet.
    """
    if device not in DEVICES:
        raise ValueError(f"unknown device {device!r}; known: {', '.join(DEVICES)}")
    config = ModelConfig.preset(model)
    items = worked_example(requests, context, answer, scale)
    rows = []
    for setup, kv_format, settings in SETUPS:
        fits = capacity(config, DEVICES[device].memory_gb, None, overhead_gb, context, kv_format)
        engine = virtual_engine(
            CostModel.of_device(device, config, kv_format), prompts_received, kv_memory=round(fits.cache_gb * GB),
            **{"max_batch": clients, "max_step_tokens": 2 * context, "prefix_cache": False, **settings},
        )
        play(engine, items, clients)
        found = metrics.summary(engine.records, price_per_hour=price_per_hour)
        rows.append({
            "setup": setup, "fit_at_once": fits.max_concurrent, "mean_rows": found["batch"]["mean_rows"],
            "tokens_per_s": found["output_tokens_per_s"],
            "times_first": found["output_tokens_per_s"] / rows[0]["tokens_per_s"] if rows else 1.0,
            "ttft_p50_s": found["ttft_s"]["p50"], "latency_p99_s": found["latency_s"]["p99"],
            "cost_per_million_output_tokens": found["cost_per_million_output_tokens"],
        })
    return rows
