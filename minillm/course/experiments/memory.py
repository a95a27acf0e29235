"""Experiments of part C: who has the cache, and what sharing it saves."""

from __future__ import annotations

from dataclasses import replace

from minillm.course.experiments import chapters, traffic
from minillm.course.experiments.service import percentiles, under_load
from minillm.course.setting import Setting
from minillm.ladder.quantized import kv_bytes_per_token, kv_storage, native_format
from minillm.load.config import PRESETS, ModelConfig
from minillm.measure.capacity import GB, capacity
from minillm.measure.measurement import EXACT, Measurement, provenance
from minillm.measure.workload import chat, lognormal, shared_prefix

BLOCK = 16  # tokens

# -- the sum --------------------------------------------------------------------------------------


def capacity_sum(setting: Setting) -> Measurement:
    """How many requests fit into 80 GB, by model, context and format; and what a token's keys and values take."""
    sums = [("llama-3-8b", 16.0, 4096, "bf16"), ("llama-3-8b", 16.0, 2048, "bf16"), ("llama-3-8b", 16.0, 4096, "int8"),
            ("llama-3-8b", 16.0, 4096, "int4")]
    rows = []
    for model, weights_gb, context, kv_format in sums:
        fits = capacity(model, 80.0, weights_gb, 4.0, context, kv_format)
        rows.append({
            "model": model, "kv_format": kv_format, "context_tokens": context, "memory_gb": fits.memory_gb,
            "weights_gb": fits.weights_gb, "overhead_gb": fits.overhead_gb, "cache_gb": fits.cache_gb,
            "request_gb": fits.request_gb, "max_concurrent": fits.max_concurrent,
        })
    rows += [token_row(name, config) for name, config in PRESETS.items()]
    return Measurement("capacity_sum", provenance("the presets", "none", EXACT, setting.seed, None), rows)


def token_row(name: str, config: ModelConfig) -> dict:
    """A model's cache bytes per token: by the formula, as a store of 16 tokens really takes them, and without GQA."""
    formula = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 2
    ungrouped = replace(config, num_key_value_heads=config.num_attention_heads)
    return {
        "model": name, "kv_format": "bf16", "layers": config.num_hidden_layers, "heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads, "head_dim": config.head_dim, "formula_bytes": formula,
        "stored_bytes": kv_storage(config, "bf16", BLOCK).nbytes // BLOCK,
        "times_without_gqa": kv_bytes_per_token(ungrouped, "bf16") / kv_bytes_per_token(config, "bf16"),
    }


# -- on the device --------------------------------------------------------------------------------


def memory_by_policy(setting: Setting) -> Measurement:
    """The same requests in the same bytes, as slots and as pages."""
    model = setting.timed_model
    requests, mean_tokens, prompt, cap, slots, batch = setting.size(
        (16, 6, 16, 64, 2, 64), (48, 24, 32, 256, 4, 64), (512, 64, 32, 256, 32, 256)
    )
    items = lognormal(1.0, requests, mean_tokens, prompt)
    cap = max(cap, items[0].max_tokens)
    slot_tokens = -(-(prompt + cap - 1) // BLOCK) * BLOCK
    memory = slots * slot_tokens * kv_bytes_per_token(model.config, native_format(model.dtype))
    items = [replace(item, max_tokens=cap) for item in items]
    return chapters.memory_by_policy(model, setting.timed_name, items, memory, batch)


def prefix_sharing(setting: Setting) -> Measurement:
    """One system prompt before several questions: computed each time, shared, and with its first token changed."""
    requests, prefix = setting.size((4, 128), (8, 512), (16, 2048))
    prompts = [item.prompt_ids for item in shared_prefix(requests, prefix, seed=setting.seed)]
    return chapters.prefix_sharing(setting.timed_model, setting.timed_name, prompts)


def cost_of_blocks(setting: Setting) -> Measurement:
    """A step over keys and values in one run of memory, and in blocks."""
    contexts = setting.size((64, 256), (64, 512, 2048), (64, 512, 2048, 8000))
    contexts = setting.each("cost_of_blocks", contexts)
    return chapters.cost_of_blocks(setting.timed_model, setting.timed_name, contexts)


# -- in virtual time ------------------------------------------------------------------------------


def out_of_cache(setting: Setting) -> Measurement:
    """A server with a bounded queue that refuses requests: with little memory for the cache, and with all of it."""
    items = chat(setting.size(60, 300), rate=6.0, scale=0.5, seed=setting.seed)
    items = [replace(item, max_tokens=4096, stop_after=8 * item.output_tokens) for item in items]
    rows = []
    for memory_gb in (5, 60):
        found = under_load(traffic.cost_model(), items, most_waiting=4, kv_memory=memory_gb * GB, max_context=16_384)
        rows.append({"cache_gb": memory_gb, **{name: value for name, value in found.items() if name != "records"}})
    return traffic.simulated("out_of_cache", rows, setting)


def output_caps(setting: Setting) -> Measurement:
    """The same chats under a cap of 8,000 tokens an answer and under one of 400, as slots and as blocks."""
    items = chat(setting.size(40, 300), rate=6.0, scale=0.5, seed=setting.seed)
    items = [replace(item, stop_after=2 * item.output_tokens) for item in items]
    rows = []
    for kv in ("slots", "paged"):
        for cap in (8_000, 400):
            asked = [replace(item, max_tokens=cap) for item in items]
            found = traffic.served(asked, kv=kv, kv_memory=12 * GB)
            rows.append({
                "kv": kv, "cap_tokens": cap, "tokens_per_s": found["output_tokens_per_s"],
                "mean_rows": found["batch"]["mean_rows"], "wasted_share": found["kv"]["peak_wasted_share"],
                **percentiles(found),
            })
    return traffic.simulated("output_caps", rows, setting)
