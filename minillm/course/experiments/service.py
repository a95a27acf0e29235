"""The experiments of notebooks 00 and 07 to 10: the machine's limits, and what a service does under load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby, pairwise

import numpy as np

from minillm.course.experiments import chapters
from minillm.fast.engine import Engine
from minillm.ladder.quantized import kv_bytes_per_token, native_format
from minillm.ladder.records import Records
from minillm.load.config import ModelConfig
from minillm.load.weights import RandomTensors, make_model
from minillm.measure import metrics
from minillm.measure.fleet import Router, least_loaded, run_until, serve
from minillm.measure.measurement import Measurement, Spread, time_seconds
from minillm.measure.roofline import Ceilings, StepShape, StepWork, least_work
from minillm.measure.virtual import CostModel, shape_of, virtual_engine
from minillm.measure.workload import WorkItem, chat, play, random_ids, worked_example

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
        slim = make_model(config, RandomTensors(config, model.device, model.dtype), model.device, model.dtype)
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


# -- 07: load, and who is in the system -----------------------------------------------------------


def at_rate(items: Sequence[WorkItem], per_s: float) -> list[WorkItem]:
    """The same requests in the same order, their arrivals stretched to so many a second on average."""
    now = (len(items) - 1) / (max(item.arrival for item in items) - min(item.arrival for item in items))
    return [replace(item, arrival=item.arrival * now / per_s) for item in items]


def open_and_closed(
    model, items: Sequence[WorkItem], clients: int, loads: Sequence[float], **settings
) -> dict[str, Records]:
    """The same requests of so many clients in a closed loop, then in an open one at shares of the rate that gave.

    A step takes as many rows as there are clients, so that the closed loop keeps it full.
    """
    longest = max(len(item.prompt_ids) + item.max_tokens for item in items)
    settings = {"max_context": longest, "prefix_cache": False, "max_batch": clients, **settings}
    chapters.warm_up(model)
    closed = Engine(model, **settings)
    play(closed, items, clients)
    runs = {f"closed, {clients} clients": closed.records}
    rate = len(items) / (closed.records.ended - closed.records.began)
    for load in loads:
        engine = Engine(model, **settings)
        play(engine, at_rate(items, load * rate))
        runs[f"open, {load * rate:.2g} a second"] = engine.records
    return runs


def number_present(lives: Sequence[tuple[float, float]]) -> list[tuple[float, int]]:
    """(moment, how many are present from then on), from when each came and went; at equal moments, after both."""
    changes = sorted([(came, 1) for came, _ in lives] + [(went, -1) for _, went in lives])
    steps, present = [], 0
    for moment, same in groupby(changes, key=lambda change: change[0]):
        present += sum(change for _, change in same)
        steps.append((moment, present))
    return steps


def littles_law(lives: Sequence[tuple[float, float]]) -> dict:
    """L = lambda W over a time that saw everybody come and go (Little, 1961).

    mean_present is integrated over time and knows nothing of who is who; rate and mean_stay_s
    are taken from the requests and know nothing of who met whom.
    """
    steps = number_present(lives)
    span = steps[-1][0] - steps[0][0]
    area = sum(present * (later - moment) for (moment, present), (later, _) in pairwise(steps))
    return {
        "mean_present": area / span, "rate_per_s": len(lives) / span,
        "mean_stay_s": sum(went - came for came, went in lives) / len(lives),
    }


def lives(records: Records, where: str = "system") -> list[tuple[float, float]]:
    """When each finished request came and went: into the system, the "queue" before it, or "service" behind that."""
    known = {"system": ("arrival", "finish"), "queue": ("arrival", "first_scheduled"),
             "service": ("first_scheduled", "finish")}
    if where not in known:
        raise ValueError(f"unknown place {where!r}; known: {', '.join(known)}")
    came, went = known[where]
    return [(getattr(record, came), getattr(record, went)) for record in records.requests]


def one_long_prompt(
    cost: CostModel, requests: int = 200, clients: int = 8, long_prompt: int = 60_000
) -> dict[str, Records]:
    """Chats, and in their middle one prompt as long as a book, computed whole; closed loop, then open at its rate.

    The records are those of all requests; the book is the one with the longest prompt.
    """
    items = chats(requests, 1.0)
    middle = items[len(items) // 2]
    items.insert(len(items) // 2, replace(middle, prompt_ids=[0] * long_prompt))
    settings = {"chunked_prefill": False, "prefix_cache": False, "max_step_tokens": long_prompt,
                "max_context": 2 * long_prompt, "max_batch": 64, "kv_memory": 60 * 10**9}
    closed = virtual_engine(cost, **settings)
    play(closed, items, clients)
    rate = len(items) / (closed.records.ended - closed.records.began)
    opened = virtual_engine(cost, **settings)
    play(opened, at_rate(items, rate))
    return {f"closed, {clients} clients": closed.records, f"open, {rate:.2g} a second": opened.records}


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
    refused = serve_bounded([engine], items, most_waiting)
    records = engine.records
    limits = Ceilings(cost.bytes_per_s, cost.flops_per_s)
    found = metrics.summary(records)
    return {
        **utilisation(records, cost.config, cost.kv_format, cost.weight_bytes, limits),
        "cache_peak_share": found["kv"]["peak_share"], "refused": len(refused),
        "refused_share": len(refused) / len(items), "mean_waiting": found["queue_depth"]["mean"],
        "preemptions": found["preemptions"], **percentiles(found), "records": records,
    }


def serve_bounded(engines: Sequence[Engine], items: Sequence[WorkItem], most_waiting: int | None = None) -> list[int]:
    """The open loop with bounded queues, each request to the least loaded engine; the numbers of the items refused.

    most_waiting: of a queue that refuses the next; None for no bound. The engines' records have the rest.
    """
    refused = []
    for index in sorted(range(len(items)), key=lambda i: items[i].arrival):
        item = items[index]
        for engine in engines:
            run_until(engine, item.arrival)
        engine = least_loaded(engines, item)
        if most_waiting is not None and engine.stats().waiting >= most_waiting:
            refused.append(index)
        else:
            engine.add(item.prompt_ids, item.params, request_id=index, arrival=item.arrival)
    for engine in engines:
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


# -- 09: latency or throughput --------------------------------------------------------------------


def batch_limits(
    cost: CostModel, limits: Sequence[int], items: Sequence[WorkItem], clients: int, kv_memory: int = 60 * 10**9
) -> list[dict]:
    """The same clients, in a closed loop, at servers that differ in the most rows of a step."""
    rows = []
    for most in limits:
        engine = virtual_engine(cost, max_batch=most, max_step_tokens=2048, prefix_cache=False, kv_memory=kv_memory)
        play(engine, items, clients)
        found = metrics.summary(engine.records)
        rows.append({"max_batch": most, "tokens_per_s": found["output_tokens_per_s"],
                     "mean_rows": found["batch"]["mean_rows"], **percentiles(found)})
    return rows


def two_kinds(
    interactive: int, per_s: float, jobs: int, prompt: int = 512, answer: int = 96, job_prompt: int = 3072,
    job_answer: int = 384, seed: int = 0,
) -> list[WorkItem]:
    """People who arrive at random and wait for short answers, and long jobs of a batch, all there at the start."""
    draw = np.random.default_rng(seed)
    arrivals = draw.exponential(1 / per_s, interactive).cumsum()
    people = [WorkItem(float(arrival), random_ids(draw, prompt, 1.0), answer) for arrival in arrivals]
    return people + [WorkItem(0.0, random_ids(draw, job_prompt, 1.0), job_answer) for _ in range(jobs)]


def is_job(item: WorkItem) -> bool:
    """Whether an item of `two_kinds` is a job of the batch."""
    return item.arrival == 0.0


def pools(for_people: int) -> Router:
    """People go to the first so many engines, jobs to the others; within a pool to the least loaded."""
    def route(engines: Sequence[Engine], item: WorkItem) -> Engine:
        return least_loaded(engines[for_people:] if is_job(item) else engines[:for_people], item)

    return route


def mixed_and_pools(cost: CostModel, items: Sequence[WorkItem], gpus: int = 4, for_people: int = 2) -> list[dict]:
    """The same GPUs as one mixed pool, and as two: people with small chunks and batches, jobs with large ones."""
    common = {"prefix_cache": False, "kv_memory": 60 * 10**9}
    small, large = {"max_batch": 32, "max_step_tokens": 512}, {"max_batch": 128, "max_step_tokens": 2048}
    setups = {
        "one mixed pool": ([large] * gpus, least_loaded),
        f"pools of {for_people} and {gpus - for_people}": (
            [small] * for_people + [large] * (gpus - for_people), pools(for_people)),
    }
    rows = []
    for name, (settings, route) in setups.items():
        engines = [virtual_engine(cost, **common, **each) for each in settings]
        records = serve(engines, items, route)
        whole = metrics.merge([engine.records for engine in engines])
        people = [record for record, item in zip(records, items, strict=True) if not is_job(item)]
        ends = [record.finish for record, item in zip(records, items, strict=True) if is_job(item)]
        rows.append({
            "setup": name, **percentiles(metrics.latencies(people)), "jobs_done_s": max(ends, default=None),
            "tokens_per_s": whole.totals["output_tokens"] / (whole.ended - whole.began),
        })
    return rows


# -- 10: the worked example, here -----------------------------------------------------------------


def worked_example_here(
    model, name: str, requests: int = 32, context: int = 96, answer: int = 32, static_batch: int = 4, fit: int = 8,
    price_per_hour: float = 0.1, kv_memory: int | None = None,
) -> Measurement:
    """The articles' three setups at this machine's scale, in one byte budget that holds so many full contexts.

    kv_memory: that budget in bytes, in place of `fit`.
    A closed loop of as many clients as fit (twice the batch for the static one, whose queue
    is part of it); every prompt is computed.
    """
    chapters.warm_up(model)
    native = native_format(model.dtype)
    memory = kv_memory or fit * context * kv_bytes_per_token(model.config, native)
    fit = blocks_fit(model.config, memory, context, native)
    rows = []
    for setup, kv_format, clients, settings in (
        (f"static batch of {static_batch}", native, 2 * static_batch,
         {"batching": "static", "kv": "slots", "max_batch": static_batch}),
        ("continuous, paged", native, fit, {}),
        ("continuous, paged, 8-bit KV", "int8", min(requests, blocks_fit(model.config, memory, context, "int8")), {}),
    ):
        engine = Engine(model, **{"kv_format": kv_format, "kv_memory": memory, "max_context": context,
                                  "prefix_cache": False, "max_batch": clients, **settings})
        play(engine, worked_example(requests, context, answer), clients)
        found = metrics.summary(engine.records, price_per_hour=price_per_hour)
        rows.append({
            "setup": setup, "clients": clients, "mean_rows": found["batch"]["mean_rows"],
            "tokens_per_s": found["output_tokens_per_s"],
            "times_static": found["output_tokens_per_s"] / rows[0]["tokens_per_s"] if rows else 1.0,
            **percentiles(found), "cost_per_million_output_tokens": found["cost_per_million_output_tokens"],
        })
    speeds = Spread.of([row["tokens_per_s"] for row in rows], warmups=1)
    return chapters.measured("worked_example_here", model, name, rows, speeds)


def blocks_fit(config: ModelConfig, memory: int, context: int, kv_format: str, block_size: int = 16) -> int:
    """Requests of a full context whose blocks fit into these bytes."""
    blocks = memory // (block_size * kv_bytes_per_token(config, kv_format))
    return blocks // -(-context // block_size)
