"""The experiments of notebooks 00 and 07 to 10: the machine's limits, and what a service does under load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from minillm.ladder.engine import Engine
from minillm.ladder.quantized import native_format
from minillm.ladder.records import Records
from minillm.measure import chapters, metrics
from minillm.measure.fleet import run_until
from minillm.measure.measurement import Measurement, time_seconds
from minillm.measure.roofline import Ceilings, StepShape, StepWork, least_work
from minillm.measure.virtual import CostModel, shape_of, virtual_engine
from minillm.measure.workload import WorkItem, chat, worked_example
from minillm.model.config import ModelConfig
from minillm.model.llama import Llama
from minillm.model.weights import RandomTensors

# -- 00: the machine ------------------------------------------------------------------------------


def roofline_steps(
    model, name: str, limits: Ceilings, rows: Sequence[int] = (1, 8, 32), prompts: Sequence[int] = (16, 64, 256),
    context: int = 64, steps: int = 12,
) -> Measurement:
    """Decode steps of so many rows, and prefills of so many tokens, beside the least time that the limits allow."""
    first = context - steps // 2  # the rows' texts grow; at the median step they are `context` long
    decodes = chapters.batch_curve(model, name, rows, prompt_tokens=first, steps=steps)
    table = [
        step_row(model, limits, "decode", row["rows"], StepShape.decode([context] * row["rows"]), row["step_ms"])
        for row in decodes.rows
    ]
    for length in prompts:
        spread = time_seconds(chapters.one_recomputing_step(model, length), model.device, warmups=1, repeats=3)
        shape = StepShape.of([(0, length, 1)])
        table.append(step_row(model, limits, "prefill", length, shape, spread.median * 1e3))
    provenance = replace(decodes.provenance, bandwidth_gb_per_s=limits.bytes_per_s / 1e9)
    return Measurement("roofline_steps", provenance, table)


def step_row(model, limits: Ceilings, kind: str, tokens: int, shape: StepShape, step_ms: float) -> dict:
    """One row of `roofline_steps`: the work of a step, its time, and its shares of both limits."""
    work = least_work(model.config, native_format(model.dtype), shape, model.weight_bytes)
    seconds = step_ms / 1e3
    return {
        "kind": kind, "tokens": tokens, "read_mb": work.bytes / 1e6, "gflop": work.flops / 1e9,
        "flop_per_byte": work.flops / work.bytes, "step_ms": step_ms, "least_ms": limits.least_seconds(work) * 1e3,
        "tokens_per_s": tokens / seconds, "gflop_per_s": work.flops / seconds / 1e9,
        "mbu": limits.mbu(work, seconds), "mfu": limits.mfu(work, seconds), "bound_by": bound_by(limits, work),
    }


def bound_by(limits: Ceilings, work: StepWork) -> str:
    """Which of the two limits decides: "reading" or "multiplying"."""
    return "reading" if work.bytes / limits.bytes_per_s > work.flops / limits.flops_per_s else "multiplying"


def narrowed(config: ModelConfig, divisor: int) -> ModelConfig:
    """The same number of layers and heads, everything else so many times narrower. ValueError if nothing is left."""
    if config.head_dim % (2 * divisor) or config.hidden_size % divisor or config.intermediate_size % divisor:
        raise ValueError(f"widths of {config.hidden_size}, {config.intermediate_size}, {config.head_dim} by {divisor}")
    return replace(
        config, hidden_size=config.hidden_size // divisor, intermediate_size=config.intermediate_size // divisor,
        head_dim=config.head_dim // divisor, vocab_size=config.vocab_size // divisor,
    )


def mbu_by_width(model, name: str, limits: Ceilings, divisors: Sequence[int] = (1, 2, 4, 8)) -> Measurement:
    """One decoded token, with random weights of the model's shape and of ever narrower ones: as many calls, less work.

    What is left when the work is almost nothing is the cost of the calls themselves.
    """
    table, spreads = [], []
    for divisor in divisors:
        config = narrowed(model.config, divisor)
        slim = Llama(config, RandomTensors(config, model.device, model.dtype), model.device, model.dtype)
        spread = time_seconds(chapters.one_cached_step(slim, 16), model.device, warmups=3, repeats=7)
        row = step_row(slim, limits, "decode", 1, StepShape.decode([16]), spread.median * 1e3)
        table.append({"width": config.hidden_size, **row, "lost_ms": row["step_ms"] - row["least_ms"]})
        spreads.append(spread)
    return chapters.measured("mbu_by_width", model, name, table, spreads[0])


# -- 07: what a server's gauges say ---------------------------------------------------------------


def utilisation(records: Records, config: ModelConfig, kv_format: str, weight_bytes: float, limits: Ceilings) -> dict:
    """How busy a run looks, and how much of the device's limits it used, over the time from first to last.

    `busy_share` is what a GPU's utilisation gauge counts: time in which something ran. `mbu`
    and `mfu` are what the steps had to read and multiply, over what the limits allow in the
    whole time.
    """
    works = [least_work(config, kv_format, shape_of(step), weight_bytes) for step in records.steps]
    whole = StepWork(sum(work.bytes for work in works), sum(work.flops for work in works))
    span = records.ended - records.began
    return {
        "busy_share": records.totals["busy_seconds"] / span,
        "mbu": limits.mbu(whole, span), "mfu": limits.mfu(whole, span),
        "mean_rows": metrics.batch(records)["mean_rows"], "tokens_per_s": records.totals["output_tokens"] / span,
    }


# -- 08: capacity ---------------------------------------------------------------------------------


def fill(config: ModelConfig, kv_format: str, kv_memory: int, kv: str, context: int = 4096, answer: int = 8) -> Records:
    """More chats of one full context than fit, all at once; the real scheduler and pool, without a forward.

    The peak of `rows` says how many ran at once.
    """
    items = worked_example(256, context, answer)
    settings = {"max_batch": len(items), "max_step_tokens": len(items) * context, "max_context": context}
    return chapters.count(config, items, kv=kv, kv_format=kv_format, kv_memory=kv_memory, **settings)


def chats(requests: int, rate: float, context: int = 8192, seed: int = 0, **settings) -> list[WorkItem]:
    """The `chat` workload without the few requests that are longer than a context."""
    items = chat(requests, rate, seed=seed, **settings)
    return [item for item in items if len(item.prompt_ids) + item.max_tokens <= context]


def under_load(cost: CostModel, items: Sequence[WorkItem], most_waiting: int | None = None, **settings) -> dict:
    """One engine in virtual time, in an open loop: its records, and the gauges that an operator watches.

    most_waiting: a request that finds so many before it in the queue is refused.
    """
    engine = virtual_engine(cost, **{"prefix_cache": False, "max_batch": 256, "max_step_tokens": 2048, **settings})
    refused = serve_bounded(engine, items, most_waiting)
    records, pool = engine.records, engine.scheduler.memory.pool
    limits = Ceilings(cost.bytes_per_s, cost.flops_per_s)
    found = metrics.summary(records, pool.block_size)
    return {
        **utilisation(records, cost.config, cost.kv_format, cost.weight_bytes, limits),
        "cache_peak_share": found["kv"]["peak_share"], "refused": len(refused),
        "refused_share": len(refused) / len(items), "mean_waiting": found["queue_depth"]["mean"],
        "preemptions": found["preemptions"], **percentiles(found), "records": records,
    }


def serve_bounded(engine: Engine, items: Sequence[WorkItem], most_waiting: int | None = None) -> list[int]:
    """The open loop with a bounded queue; the numbers of the items that were refused. `engine.records` has the rest."""
    refused = []
    for index in sorted(range(len(items)), key=lambda i: items[i].arrival):
        item = items[index]
        run_until(engine, item.arrival)
        if most_waiting is not None and engine.stats().waiting >= most_waiting:
            refused.append(index)
        else:
            engine.add(item.prompt_ids, item.params, request_id=index, arrival=item.arrival)
    run_until(engine, float("inf"))
    return refused


def percentiles(found: dict) -> dict:
    """The latencies of a `metrics.summary`, or of `metrics.latencies`, as columns of a row."""
    return {
        "queue_p50_s": found["queue_s"]["p50"], "queue_p99_s": found["queue_s"]["p99"],
        "ttft_p50_s": found["ttft_s"]["p50"], "ttft_p99_s": found["ttft_s"]["p99"],
        "itl_p50_ms": in_ms(found["itl_per_step_s"]["p50"]), "itl_p99_ms": in_ms(found["itl_per_step_s"]["p99"]),
        "latency_p50_s": found["latency_s"]["p50"], "latency_p99_s": found["latency_s"]["p99"],
    }


def in_ms(seconds: float | None) -> float | None:
    """Milliseconds, or None of nothing."""
    return None if seconds is None else seconds * 1e3
