"""Parts G and H, the articles' worked example (notebook 10): three set-ups in virtual time and on this device, and what
the articles' own figures imply."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np

from minillm.course.experiments import common
from minillm.course.experiments.repeats import over_seeds
from minillm.course.experiments.service import COST, FIGURES, simulated
from minillm.course.figures import flat, service_row
from minillm.course.setting import Setting, timed
from minillm.fast.memory import native_format
from minillm.guard.inputs import check_at_least, check_positive
from minillm.ladder.quantized import kv_bytes_per_token
from minillm.ladder.records import Records
from minillm.load.config import ModelConfig
from minillm.measure import metrics
from minillm.measure.capacity import GB, capacity
from minillm.measure.measurement import EXACT, Measurement, Spread, provenance
from minillm.measure.roofline import Ceilings, StepShape, StepWork, least_work
from minillm.measure.service import PRICE, Service
from minillm.measure.virtual import DEVICES, DataSheet
from minillm.measure.workload import WorkItem, numbered_ids
from minillm.measure.workload import worked_example as workload


def setups(static_batch: int = 8, native: str = "bf16") -> tuple[tuple[str, str, dict], ...]:
    """Of each set-up its name, its KV format, and the settings of its engine. native: the format of the model."""
    static = {"batching": "static", "kv": "slots", "max_batch": static_batch}
    return ((f"static batch of {static_batch}", native, static), ("continuous, paged", native, {}),
            ("continuous, paged, 8-bit KV", "int8", {}))


SETUPS = setups()
CROWDED = "static batch of 8, others waiting"  # not the articles': the same batch, asked by as many as paging serves
CONTEXT, ANSWER = 4096, 300  # tokens: of a request, and of its answer
VARY = 0.1  # by which an answer's length differs, as a share
WEIGHTS_GB, OVERHEAD_GB = 16, 4  # of the 80 of the device
COMPARED = {"peak_rows": "requests at once", "tokens_per_s": "tokens/s", "ttft_p50_s": "TTFT p50, s",
            "latency_p99_s": "latency p99, s", COST: "cost per 1M output tokens, $"}
# What the articles say of these set-ups: an 8B model on one A100 80 GB. The figures are theirs, not measured here; None
# where they give none.
ARTICLES = (
    {"peak_rows": 8, "tokens_per_s": 310, "ttft_p50_s": 1.4, "latency_p99_s": None, "utilisation": 0.31, COST: 2.60},
    {"peak_rows": 111, "tokens_per_s": 2850, "ttft_p50_s": 0.9, "latency_p99_s": 4.1, "utilisation": 0.78, COST: 0.28},
    {"peak_rows": 222, "tokens_per_s": 3900, "ttft_p50_s": None, "latency_p99_s": 6.8, "utilisation": None, COST: None},
)
MODEL, SHEET = ModelConfig.preset("llama-3-8b"), DEVICES["a100-80gb"]


def worked_example_rows(
    base: Service, clients: int | None = None, requests: int | None = None, context: int = CONTEXT,
    answer: int = ANSWER, scale: float = 1.0, seed: int = 0, vary: float = 0.0,
) -> list[dict]:
    """Chats that fill their context, on one device: a static batch, continuous with paging, and 8-bit keys and values.

    base: device, model and price; with `prompts_received` only answers are computed. Each set-up is a closed loop, by
    default of as many clients as fit into memory, with three requests each. The static batch of 8 is there twice: with
    8 clients at once, which is the articles' baseline, and (CROWDED) with as many as the second set-up has, so that
    most of them queue for eight rows. vary: by up to this share an answer is longer or shorter than `answer`.
    """
    check_at_least(1, clients=clients, requests=requests)
    check_positive(scale=scale)
    rows = []
    for setup, kv_format, settings in (SETUPS[0], (CROWDED, *SETUPS[0][1:]), *SETUPS[1:]):
        service = replace(base, kv_format=kv_format)
        fits = service.capacity(context).max_concurrent
        number = clients or max(1, fits)
        items = example_items(requests or 3 * number, context, answer, scale, seed, vary)
        number = settings["max_batch"] if setup == SETUPS[0][0] else number
        budget = (number if base.prompts_received else 2) * context  # tokens that are received need no computing
        service = replace(service, **{"max_batch": number, "max_step_tokens": budget, **settings})
        served = service.serve(items, number)
        found = service_row(served, "mean_rows", *COMPARED)
        times = found["tokens_per_s"] / rows[0]["tokens_per_s"] if rows else 1.0
        rows.append({"setup": setup, "clients": number, "fit_at_once": fits, "times_first": times, **found,
                     "busy_share": served.summary["busy_s"] / served.summary["span_s"]})
    return rows


def example_items(
    requests: int, context: int, answer: int, scale: float = 1.0, seed: int = 0, vary: float = 0.0
) -> list[WorkItem]:
    """`workload`, whose prompts are numbered, with answers that are up to `vary` of their length longer or shorter, and
    prompts as much shorter or longer: every context is full."""
    items = workload(requests, context, answer, scale, seed, ids=numbered_ids)
    if not vary:
        return items
    draw, given = np.random.default_rng(seed), []
    for item, share in zip(items, draw.uniform(1 - vary, 1 + vary, requests), strict=True):
        tokens, total = max(1, round(share * item.max_tokens)), len(item.prompt_ids) + item.max_tokens
        first = item.prompt_ids.start
        given.append(replace(item, prompt_ids=range(first, first + total - tokens), max_tokens=tokens))
    return given


def worked_example(setting: Setting) -> Measurement:
    """The articles' service, with as many clients as fit and every history in the cache, as their figures imply.

    Answers are 300 tokens give or take a tenth, which differs by seed: equal ones would all end in the same step.
    """
    service, scale = Service(prompts_received=True), setting.size(0.1, 1.0)
    formats = dict.fromkeys((SETUPS[0][0], CROWDED), SETUPS[0][1]) | {name: kv for name, kv, _ in SETUPS}

    def one(seed: int) -> list[dict]:
        rows = worked_example_rows(service, requests=setting.size(220, None), scale=scale, seed=seed, vary=VARY)
        return [{**row, "price_per_hour": PRICE,
                 **memory_and_step(row, formats[row["setup"]], round(CONTEXT * scale), service)} for row in rows]

    compared = ("times_first", "mean_rows", "step_ms", *COMPARED)
    return simulated("worked_example", over_seeds(setting, one, *compared), setting)


def memory_and_step(row: dict, kv_format: str, context: int, service: Service) -> dict:
    """Of a set-up's row: what its weights and the cache of its most rows take; the least reading and arithmetic of a
    step of its mean rows at full context, at the service's own rates, and as shares of the data sheet's."""
    shape = StepShape.decode([context] * round(row["mean_rows"]))
    work, limits = least_work(service.cost.config, kv_format, shape, service.cost.weight_bytes), sheet_limits(SHEET)
    seconds = row["mean_rows"] / row["tokens_per_s"]
    return {
        "context_tokens": context, "weights_gb": service.capacity(context).weights_gb,
        "kv_peak_gb": row["peak_rows"] * context * kv_bytes_per_token(service.cost.config, kv_format) / GB,
        "reading_ms": work.bytes / service.cost.bytes_per_s * 1e3,
        "arithmetic_ms": work.flops / service.cost.flops_per_s * 1e3,
        "step_ms": seconds * 1e3,
        "bandwidth_share": limits.mbu(work, seconds), "arithmetic_share": limits.mfu(work, seconds),
    }


def beside_the_articles(rows: Sequence[dict]) -> list[dict]:
    """Our rows transposed: a row per figure, with the articles' and ours of each of their set-ups.

    Below each figure stands its ratio to that of the first set-up.
    """
    table, by_setup = [], {row["setup"]: row for row in rows}
    rows = [by_setup[setup] for setup, *_ in SETUPS]
    for key, title in COMPARED.items():
        for ratio in (False, True):
            row = {"figure": "  x static" if ratio else title}
            for (setup, *_), theirs, ours in zip(SETUPS, ARTICLES, rows, strict=True):
                for whose, column, first in (("articles", theirs, ARTICLES[0]), ("ours", ours, rows[0])):
                    unit = first[key] if ratio else 1
                    row[f"{setup}: {whose}"] = column[key] / unit if column[key] and unit else None
            if not ratio or ARTICLES[0][key]:
                table.append(row)
    return table


# -- the articles against themselves --------------------------------------------------------------


def articles_sums(setting: Setting) -> Measurement:
    """Part H: `articles_table` as a measurement, which is arithmetic and needs no device."""
    source = provenance("llama-3-8b on a100-80gb", "bf16", EXACT, setting.seed, None)
    return Measurement("articles_sums", source, articles_table())


def articles_table() -> list[dict]:
    """What the articles' figures imply, a row for each set-up, from ARTICLES and the inputs below it alone.

    rows, tokens_per_s, latency_p99_s and utilisation are theirs. The others follow: Little's law (`little`), the least
    that a step reads and multiplies (`bandwidth_floor`), the shares of both limits that their tokens/s need
    (`gauges_of`), and the memory of one request (`request_memory`).
    """
    table = []
    for (setup, kv_format, _), theirs in zip(SETUPS, ARTICLES, strict=True):
        rows, speed, p99 = theirs["peak_rows"], theirs["tokens_per_s"], theirs["latency_p99_s"]
        stay = little(rows, speed)
        table.append({
            "setup": setup, "kv_format": kv_format, "rows": rows, "tokens_per_s": speed, "latency_p99_s": p99,
            "utilisation": theirs["utilisation"], **stay,
            "slowest_mean_s": slowest_mean(stay["mean_stay_s"], p99) if p99 else None,
            **bandwidth_floor(rows, kv_format), **gauges_of(rows, speed, kv_format), **request_memory(kv_format),
        })
    return table


def little(present: float, tokens_per_s: float, answer: int = ANSWER) -> dict:
    """Little's law, L = lambda W: the requests per second that these tokens are, and the seconds that each stays."""
    rate = tokens_per_s / answer
    return {"requests_per_s": rate, "mean_stay_s": present / rate}


def slowest_mean(mean_s: float, p99_s: float) -> float:
    """The mean latency that the slowest 1 % must have, if all are `mean_s` on average and 99 % at most `p99_s`."""
    return (mean_s - 0.99 * p99_s) / 0.01


def step_work(rows: int, kv_format: str = "bf16", context: int = CONTEXT) -> StepWork:
    """The least bytes and FLOPs of a decode step of the articles' model: all its weights, and `rows` full contexts."""
    return least_work(MODEL, kv_format, StepShape.decode([context] * rows), WEIGHTS_GB * GB)


def bandwidth_floor(rows: int, kv_format: str = "bf16", context: int = CONTEXT, sheet: DataSheet = SHEET) -> dict:
    """A decode step's least time by the device's data sheet, for reading and for arithmetic, and the most tokens/s."""
    work, limits = step_work(rows, kv_format, context), sheet_limits(sheet)
    return {
        "read_gb": work.bytes / GB, "kv_gb": work.bytes / GB - WEIGHTS_GB, "tflop": work.flops / 1e12,
        "reading_ms": work.bytes / limits.bytes_per_s * 1e3, "arithmetic_ms": work.flops / limits.flops_per_s * 1e3,
        "bound_by": limits.bound_by(work), "most_tokens_per_s": rows / limits.least_seconds(work),
    }


def gauges_of(rows: int, tokens_per_s: float, kv_format: str = "bf16", sheet: DataSheet = SHEET) -> dict:
    """The step's time that these tokens/s imply, if steps follow one another without a pause, and what three gauges
    then read: the time in use, and the shares of bandwidth and arithmetic that a step needs."""
    work, limits, seconds = step_work(rows, kv_format), sheet_limits(sheet), rows / tokens_per_s
    steps_per_s = tokens_per_s / rows
    return {"step_ms": seconds * 1e3, "busy_share": steps_per_s * seconds, "bandwidth_share": limits.mbu(work, seconds),
            "arithmetic_share": limits.mfu(work, seconds)}


def sheet_limits(sheet: DataSheet) -> Ceilings:
    """What the maker promises, as limits of the roofline."""
    return Ceilings(sheet.gb_per_s * 1e9, sheet.tflops * 1e12)


def request_memory(kv_format: str = "bf16", context: int = CONTEXT) -> dict:
    """The cache of one request, and how many such the memory holds beside weights and overhead, not rounded."""
    found = capacity(MODEL, SHEET.memory_gb, WEIGHTS_GB, OVERHEAD_GB, context, kv_format)
    return {"context_tokens": context, "bytes_a_token": found.kv_bytes_per_token, "request_gb": found.request_gb,
            "cache_gb": found.cache_gb, "fit": found.cache_gb / found.request_gb}


# -- on the device at hand ------------------------------------------------------------------------


@timed
def worked_example_here(setting: Setting) -> Measurement:
    """The same set-ups on this device, every prompt computed. On a GPU with the articles' lengths and memory:
    60 GB for keys and values, which hold 111 contexts of an 8B model in 16 bits."""
    sizes = setting.size(
        {"requests": 8, "context": 48, "answer": 12, "static_batch": 2, "fit": 4},
        {},
        {"requests": 440, "context": 4096, "answer": 300, "static_batch": 8, "kv_memory": 60 * 10**9,
         "price_per_hour": PRICE},
    )
    return three_setups(setting.timed_model, setting.timed_name, within=setting.within_budget, **sizes)


def three_setups(
    model, name: str, requests: int = 32, context: int = 96, answer: int = 32, static_batch: int = 4, fit: int = 8,
    price_per_hour: float = 0.1, kv_memory: int | None = None, within: Callable[[Iterable], Iterable] = iter,
) -> Measurement:
    """The rows of `worked_example_here` at given sizes, in one byte budget.

    kv_memory: that budget; None: what `fit` full contexts take. A closed loop of as many clients as
    fit (twice the batch for the static one, whose queue is part of it). within: of the set-ups, those to run.
    """
    common.warm_up(model)
    native, rows = native_format(model.dtype), []
    memory = kv_memory or fit * context * kv_bytes_per_token(model.config, native)
    for setup, kv_format, settings in within(setups(static_batch, native)):
        fits = memory // (context * kv_bytes_per_token(model.config, kv_format))
        clients = 2 * static_batch if settings else min(requests, fits)
        records = serve_setup(model, workload(requests, context, answer), clients, **{
            "kv_format": kv_format, "kv_memory": memory, "max_context": context, "max_batch": clients, **settings})
        found = flat(metrics.summary(records, price_per_hour), *FIGURES, COST)
        times = found["tokens_per_s"] / rows[0]["tokens_per_s"] if rows else 1.0
        rows.append({"setup": setup, "clients": clients, "times_static": times, **found})
    speeds = Spread.of([row["tokens_per_s"] for row in rows], warmups=1)
    return common.measured("worked_example_here", model, name, rows, speeds)


def serve_setup(model, items: Sequence[WorkItem], clients: int, **settings) -> Records:
    """`common.serve`; the engine is gone when this returns, since on a GPU two such caches do not fit."""
    records = common.serve(model, items, clients, **settings)
    gc.collect()  # an engine and its parts refer to one another
    return records
