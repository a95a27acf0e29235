"""Ledger part C: how many requests fit into the cache, and what pages and sharing save. Notebooks 01, 04 and 08."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from statistics import mean

from minillm.course.experiments.common import decode_seconds, serve, spread_columns, warm_up
from minillm.course.experiments.limits import one_cached_step
from minillm.course.experiments.repeats import over_seeds
from minillm.course.experiments.service import simulated, under_load
from minillm.course.figures import LATENCIES, service_row
from minillm.course.setting import Setting, timed
from minillm.fast.engine import Engine
from minillm.fast.memory import native_format
from minillm.ladder.quantized import kv_bytes_per_token, kv_storage
from minillm.ladder.records import Records
from minillm.ladder.request import SamplingParams
from minillm.load.config import PRESETS, ModelConfig
from minillm.measure import metrics
from minillm.measure.bench import started
from minillm.measure.capacity import GB, capacity
from minillm.measure.measurement import EXACT, Measurement, provenance, time_seconds
from minillm.measure.service import Service
from minillm.measure.workload import chat, lognormal, shared_prefix

BLOCK = 16  # tokens

# -- the sum --------------------------------------------------------------------------------------


def capacity_sum(setting: Setting) -> Measurement:
    """How many requests fit into 80 GB, by model, context and format; and what a token's keys and values take."""
    sums = [(4096, "bf16"), (2048, "bf16"), (4096, "int8"), (4096, "int4")]
    rows = [{"model": "llama-3-8b", **asdict(capacity("llama-3-8b", 80.0, 16.0, 4.0, *each))} for each in sums]
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


@timed
def memory_by_policy(setting: Setting) -> Measurement:
    """The same requests in the same bytes, as slots and as pages: how many ran at once, and what was wasted."""
    model, rows = setting.timed_model, []
    requests, mean_tokens, prompt, cap, slots, batch = setting.size(
        (12, 6, 64, 192, 2, 64), (48, 24, 64, 256, 4, 64), (512, 64, 64, 256, 32, 256)
    )
    items = lognormal(1.0, requests, mean_tokens, prompt)
    cap = max(cap, items[0].max_tokens)
    items = [replace(item, max_tokens=cap) for item in items]
    token_bytes = kv_bytes_per_token(model.config, native_format(model.dtype))
    memory = slots * -(-(prompt + cap - 1) // BLOCK) * BLOCK * token_bytes
    warm_up(model)
    for kv in ("slots", "paged"):
        records = serve(model, items, kv=kv, kv_memory=memory, max_batch=batch)
        rows.append({"kv": kv, **memory_row(records, token_bytes)})
    return setting.measured("memory_by_policy", rows)


def memory_row(records: Records, token_bytes: int) -> dict:
    """What a run reserved and used: means over the steps, each counting once, so that no clock is in them."""
    summary, steps = metrics.summary(records), records.steps
    reserved = mean(step.blocks_live for step in steps) * records.block_size * token_bytes / 1e6
    tokens = mean(step.kv_tokens for step in steps)
    used = tokens * token_bytes / 1e6
    return {
        "peak_requests": summary["batch"]["peak_rows"], "mean_requests": summary["batch"]["mean_rows"],
        "tokens_each": tokens / mean(step.rows for step in steps),
        "reserved_mb": reserved, "used_mb": used, "wasted_mb": reserved - used, "wasted_share": 1 - used / reserved,
        "steps": summary["steps"], "preemptions": summary["preemptions"],
        "tokens_per_s": summary["output_tokens"] / summary["busy_s"],
    }


@timed
def prefix_sharing(setting: Setting, prompts: Sequence[Sequence[int]] | None = None, tokens: int = 4) -> Measurement:
    """The same prompts one after another: without sharing, with it, and with another first token each.

    prompts: by default one long start before several questions. Each prompt after the first, which finds nothing to
    share, is a turn of the three cases; `ttft_p50_ms` is the median of the turns.
    """
    model, rows = setting.timed_model, []
    if prompts is None:
        requests, prefix = setting.size((4, 128), (8, 512), (16, 2048))
        prompts = [item.prompt_ids for item in shared_prefix(requests, prefix, seed=setting.seed)]
    changed = [[(prompt[0] + i) % model.config.vocab_size, *prompt[1:]] for i, prompt in enumerate(prompts)]
    warm_up(model, len(prompts[0]) // 2)
    longest = max(map(len, prompts)) + tokens
    memory = 2 * -(-longest // BLOCK) * BLOCK * kv_bytes_per_token(model.config, native_format(model.dtype))
    cases = [
        (case, asked, started(Engine(model, prefix_cache=cache, max_context=longest, max_batch=1, kv_memory=memory)))
        for case, cache, asked in (
            ("no sharing", False, prompts), ("shared prefix", True, prompts), ("first token changed", True, changed)
        )
    ]
    for turn in setting.each("prefix_sharing", range(len(prompts))):
        for _, asked, engine in reversed(cases) if turn % 2 else cases:
            engine.generate([asked[turn]], SamplingParams(max_tokens=tokens, ignore_eos=True))
    for case, asked, engine in cases:
        totals, ended = engine.records.totals, engine.records.requests
        later = [(record.first_token - record.arrival) * 1e3 for record in ended[1:]]
        rows.append({
            "case": case, "prompt_tokens": sum(map(len, asked[: len(ended)])), "computed": totals["prompt_tokens"],
            "found": totals["cached_tokens"], **spread_columns("ttft_p50_ms", later), "turns": len(later),
        })
    return setting.measured("prefix_sharing", rows)


@timed
def cost_of_blocks(setting: Setting, steps: int = 8) -> Measurement:
    """A decode step of one sequence: keys and values in one run (rung 1), and gathered block by block (rung 4)."""
    model, rows, spreads = setting.timed_model, [], []
    for context in setting.each("cost_of_blocks", setting.size((64, 256), (64, 512, 2048), (64, 512, 2048, 8000))):
        run = time_seconds(one_cached_step(model, context), model.device, warmups=1, repeats=steps)
        paged = decode_seconds(model, 1, context - 1, steps)
        rows.append({
            "context_tokens": context, "contiguous_ms": run.median * 1e3, "paged_ms": paged.median * 1e3,
            "times": paged.median / run.median,
        })
        spreads.append(run)
    return setting.measured("cost_of_blocks", rows, spreads[0])


# -- in virtual time ------------------------------------------------------------------------------


def out_of_cache(setting: Setting) -> Measurement:
    """A server with a bounded queue that refuses requests: with little memory for the cache, and with all of it."""
    compared = ("refused", "refused_share", "cache_peak_share", "busy_share", "mfu", "mbu", "tokens_per_s")

    def memories(seed: int) -> list[dict]:
        items = chat(setting.size(60, 300), rate=6.0, scale=0.5, seed=seed)
        items = [replace(item, max_tokens=4096, stop_after=8 * item.output_tokens) for item in items]
        runs = {gb: under_load(Service(kv_memory=gb * GB, max_waiting=4), items) for gb in (5, 60)}
        return [{"cache_gb": gb, **{name: value for name, value in run.items() if name != "records"}}
                for gb, run in runs.items()]

    return simulated("out_of_cache", over_seeds(setting, memories, *compared, *LATENCIES), setting)


def output_caps(setting: Setting) -> Measurement:
    """The same chats under a cap of 8,000 tokens an answer and under one of 400, as slots and as blocks."""
    columns = ("tokens_per_s", "mean_rows", "wasted_share", *LATENCIES)

    def caps(seed: int) -> list[dict]:
        items = chat(setting.size(40, 300), rate=6.0, scale=0.5, seed=seed)
        items = [replace(item, stop_after=2 * item.output_tokens) for item in items]
        asked = {cap: [replace(item, max_tokens=cap) for item in items] for cap in (8_000, 400)}
        return [{"kv": kv, "cap_tokens": cap,
                 **service_row(Service(kv=kv, kv_memory=12 * GB).serve(asked[cap]), *columns)}
                for kv in ("slots", "paged") for cap in asked]

    return simulated("output_caps", over_seeds(setting, caps, *columns), setting)
