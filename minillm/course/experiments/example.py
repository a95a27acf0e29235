"""Part G, the articles' worked example (notebook 10): three set-ups in virtual time, and on the device at hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from minillm.course.experiments import common
from minillm.course.experiments.service import COST, FIGURES, simulated
from minillm.course.figures import flat, service_row
from minillm.course.setting import Setting, timed
from minillm.fast.engine import Engine
from minillm.guard.inputs import check_at_least, check_positive
from minillm.ladder.quantized import kv_bytes_per_token, native_format
from minillm.measure import metrics
from minillm.measure.measurement import Measurement, Spread
from minillm.measure.service import PRICE, Service
from minillm.measure.workload import numbered_ids, play
from minillm.measure.workload import worked_example as workload


def setups(static_batch: int = 8, native: str = "bf16") -> tuple[tuple[str, str, dict], ...]:
    """Of each set-up its name, its KV format, and the settings of its engine. native: the format of the model."""
    static = {"batching": "static", "kv": "slots", "max_batch": static_batch}
    return ((f"static batch of {static_batch}", native, static), ("continuous, paged", native, {}),
            ("continuous, paged, 8-bit KV", "int8", {}))


SETUPS = setups()
COMPARED = {"peak_rows": "requests at once", "tokens_per_s": "tokens/s", "ttft_p50_s": "TTFT p50, s",
            "latency_p99_s": "latency p99, s", COST: "cost per 1M output tokens, $"}
# What the articles say of these set-ups: an 8B model on one A100 80 GB, 4k contexts, answers of 300
# tokens. The figures are theirs, not measured here; None where they give none.
ARTICLES = (
    {"peak_rows": 8, "tokens_per_s": 310, "ttft_p50_s": 1.4, "latency_p99_s": None, COST: 2.60},
    {"peak_rows": 111, "tokens_per_s": 2850, "ttft_p50_s": 0.9, "latency_p99_s": 4.1, COST: 0.28},
    {"peak_rows": 222, "tokens_per_s": 3900, "ttft_p50_s": None, "latency_p99_s": 6.8, COST: None},
)


def worked_example_rows(
    base: Service, clients: int | None = None, requests: int | None = None, context: int = 4096, answer: int = 300,
    scale: float = 1.0,
) -> list[dict]:
    """Chats that fill their context, on one device: a static batch, continuous with paging, and 8-bit keys and values.

    base: device, model and price; with `prompts_received` only answers are computed. A closed loop of
    `clients`, by default as many as fit into memory, with three requests each.
    """
    check_at_least(1, clients=clients, requests=requests)
    check_positive(scale=scale)
    rows = []
    for setup, kv_format, settings in SETUPS:
        service = replace(base, kv_format=kv_format, max_step_tokens=2 * context)
        fits = service.capacity(context).max_concurrent
        number = clients or max(1, fits)
        service = replace(service, **{"max_batch": number, **settings})
        items = workload(requests or 3 * number, context, answer, scale, ids=numbered_ids)
        found = service_row(service.serve(items, number), "mean_rows", *COMPARED)
        times = found["tokens_per_s"] / rows[0]["tokens_per_s"] if rows else 1.0
        rows.append({"setup": setup, "clients": number, "fit_at_once": fits, "times_first": times, **found})
    return rows


def worked_example(setting: Setting) -> Measurement:
    """The articles' service, with as many clients as fit and every history in the cache, as their figures imply."""
    rows = worked_example_rows(Service(prompts_received=True), requests=setting.size(220, None),
                               scale=setting.size(0.1, 1.0))
    return simulated("worked_example", [{**row, "price_per_hour": PRICE} for row in rows], setting)


def beside_the_articles(rows: Sequence[dict]) -> list[dict]:
    """Our rows transposed: a row per figure, with the articles' and ours of each set-up.

    Below each figure stands its ratio to that of the first set-up.
    """
    table = []
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
    return three_setups(setting.timed_model, setting.timed_name, **sizes)


def three_setups(
    model, name: str, requests: int = 32, context: int = 96, answer: int = 32, static_batch: int = 4, fit: int = 8,
    price_per_hour: float = 0.1, kv_memory: int | None = None,
) -> Measurement:
    """The rows of `worked_example_here` at given sizes, in one byte budget.

    kv_memory: that budget; None: what `fit` full contexts take. A closed loop of as many clients as
    fit (twice the batch for the static one, whose queue is part of it).
    """
    common.warm_up(model)
    native, rows = native_format(model.dtype), []
    memory = kv_memory or fit * context * kv_bytes_per_token(model.config, native)
    for setup, kv_format, settings in setups(static_batch, native):
        fits = memory // (context * kv_bytes_per_token(model.config, kv_format))
        clients = 2 * static_batch if settings else min(requests, fits)
        engine = Engine(model, **{"kv_format": kv_format, "kv_memory": memory, "max_context": context,
                                  "prefix_cache": False, "max_batch": clients, **settings})
        play(engine, workload(requests, context, answer), clients)
        found = flat(metrics.summary(engine.records, price_per_hour), *FIGURES, COST)
        times = found["tokens_per_s"] / rows[0]["tokens_per_s"] if rows else 1.0
        rows.append({"setup": setup, "clients": clients, "times_static": times, **found})
    speeds = Spread.of([row["tokens_per_s"] for row in rows], warmups=1)
    return common.measured("worked_example_here", model, name, rows, speeds)
