"""Whole services in virtual time, as rows to print: any workload on any device, and the articles' worked example."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from minillm.fast.engine import Engine
from minillm.guard.inputs import check_at_least, check_positive
from minillm.ladder.records import RequestRecord
from minillm.load.config import ModelConfig
from minillm.measure import fleet, metrics
from minillm.measure.capacity import GB, capacity
from minillm.measure.virtual import DEVICES, CostModel, VirtualProposer, virtual_engine
from minillm.measure.workload import WorkItem, make_workload, numbered_ids, play, worked_example

# -- any workload ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Service:
    """Replicas of one engine on one kind of device, and how they are set up.

    acceptance: how many of its 4 drafts' first are right, where it speculates with drafts
    that cost nothing. prefill_replicas: so many more that compute prompts only, and send
    their cache on at `transfer_gb_per_s`. price_per_hour: of one device.
    """

    device: str = "a100-80gb"
    model: str = "llama-3-8b"
    kv_format: str = "bf16"
    replicas: int = 1
    prefill_replicas: int = 0
    transfer_gb_per_s: float = 50.0
    acceptance: float | None = None
    max_batch: int = 256
    max_step_tokens: int = 2048
    overhead_gb: float = 4.0
    price_per_hour: float = 2.9

    def engine(self, max_context: int, prefix_cache: bool = False, prompts_received: bool = False) -> Engine:
        """One replica, whose cache is as large as the device allows. ValueError for a device without a data sheet."""
        sheet, config = data_sheet(self.device), ModelConfig.preset(self.model)
        room = capacity(config, sheet.memory_gb, None, self.overhead_gb, max_context, self.kv_format).cache_gb
        return virtual_engine(
            CostModel.of_device(self.device, config, self.kv_format), prompts_received,
            None if self.acceptance is None else VirtualProposer(self.acceptance),
            kv_memory=round(room * GB), max_batch=self.max_batch, max_context=max_context, prefix_cache=prefix_cache,
            max_step_tokens=max(self.max_step_tokens, max_context if prompts_received else 0),
        )


def data_sheet(device: str):
    """The device's entry in `DEVICES`; ValueError lists them."""
    if device not in DEVICES:
        raise ValueError(f"unknown device {device!r}; known: {', '.join(DEVICES)}")
    return DEVICES[device]


COMPACT = ("chat", "code", "trace", "worked-example")  # workloads whose prompts need no memory in virtual time


def simulate(workload: str, service: Service, clients: int | None = None, **settings) -> dict:
    """The summary of a workload on a service, with `row_steps` and the service's size.

    clients: of a closed loop, on one replica; None plays the open loop. `settings` are the workload's.
    """
    if service.replicas < 1 or service.prefill_replicas < 0:
        raise ValueError(f"{service.replicas} and {service.prefill_replicas} replicas: at least 1 must decode")
    check_at_least(0, price_per_hour=service.price_per_hour)
    if clients is not None and service.replicas + service.prefill_replicas > 1:
        raise ValueError("a closed loop is played on one replica; leave the number of clients or of replicas")
    data_sheet(service.device)
    items = make_workload(workload, **({"ids": numbered_ids} if workload in COMPACT else {}), **settings)
    with collector_off():
        engines, lives = _serve(service, items, clients, prefix_cache=workload == "shared-prefix")
    merged = metrics.merge([engine.records for engine in engines])
    return {
        **metrics.summary(merged, service.price_per_hour * len(engines)),
        **(metrics.latencies(lives) if service.prefill_replicas else {}),  # of whole requests, where two shared one
        "requests": {"finished": len(lives), "aborted": 0, "unfinished": len(items) - len(lives)},
        "row_steps": merged.totals["rows"], "devices": len(engines),
    }


def _serve(
    service: Service, items: Sequence[WorkItem], clients: int | None, prefix_cache: bool
) -> tuple[list[Engine], list[RequestRecord]]:
    """Serve them all; the engines, and each request's life."""
    longest = max(len(item.prompt_ids) + item.max_tokens for item in items)
    engines = [
        service.engine(longest, prefix_cache, prompts_received=service.prefill_replicas > 0)
        for _ in range(service.replicas)
    ]
    if clients is not None:
        play(engines[0], items, clients)
        return engines, engines[0].records.requests
    if not service.prefill_replicas:
        return engines, fleet.serve(engines, items)
    first = [service.engine(longest, prefix_cache) for _ in range(service.prefill_replicas)]
    lives = fleet.serve_disaggregated(first, engines, items, service.transfer_gb_per_s * GB)
    return [*first, *engines], lives


@contextmanager
def collector_off() -> Iterator[None]:
    """No search for cycles meanwhile: there are none to find, and it walks over every prompt that waits."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


# -- the worked example ---------------------------------------------------------------------------

# setup, KV format, and the engine's settings
SETUPS = (
    ("static batch of 8", "bf16", {"batching": "static", "kv": "slots", "max_batch": 8}),
    ("continuous, paged", "bf16", {}),
    ("continuous, paged, 8-bit KV", "int8", {}),
)
# What the articles say of these setups: an 8B model on one A100 80 GB, 4k contexts, answers of 300
# tokens. Their own figures, measured by nobody here; None where they give none.
ARTICLES = (
    {"peak_rows": 8, "tokens_per_s": 310, "ttft_p50_s": 1.4, "latency_p99_s": None,
     "cost_per_million_output_tokens": 2.60},
    {"peak_rows": 111, "tokens_per_s": 2850, "ttft_p50_s": 0.9, "latency_p99_s": 4.1,
     "cost_per_million_output_tokens": 0.28},
    {"peak_rows": 222, "tokens_per_s": 3900, "ttft_p50_s": None, "latency_p99_s": 6.8,
     "cost_per_million_output_tokens": None},
)


def worked_example_rows(
    device: str = "a100-80gb",
    model: str = "llama-3-8b",
    clients: int | None = None,
    requests: int | None = None,
    context: int = 4096,
    answer: int = 300,
    prompts_received: bool = False,
    overhead_gb: float = 4.0,
    price_per_hour: float = 2.9,
    scale: float = 1.0,
) -> list[dict]:
    """Chats that fill their context, on one device: a static batch, continuous with paging, and 8-bit keys and values.

    A closed loop of so many clients, by default as many as fit into memory at once, with
    three requests each. prompts_received: the chats' history is in the cache already, so that
    only answers are computed; else every prompt is computed whole. ValueError for a device
    that has no data sheet.
    """
    check_at_least(1, clients=clients, requests=requests)
    check_at_least(0, price_per_hour=price_per_hour)
    check_positive(scale=scale)
    sheet, config, rows = data_sheet(device), ModelConfig.preset(model), []
    for setup, kv_format, settings in SETUPS:
        fits = capacity(config, sheet.memory_gb, None, overhead_gb, context, kv_format)
        at_once = clients or max(1, fits.max_concurrent)
        engine = virtual_engine(
            CostModel.of_device(device, config, kv_format), prompts_received, kv_memory=round(fits.cache_gb * GB),
            **{"max_batch": at_once, "max_step_tokens": 2 * context, "prefix_cache": False, **settings},
        )
        play(engine, worked_example(requests or 3 * at_once, context, answer, scale, ids=numbered_ids), at_once)
        found = metrics.summary(engine.records, price_per_hour=price_per_hour)
        rows.append({
            "setup": setup, "clients": at_once, "fit_at_once": fits.max_concurrent,
            "peak_rows": found["batch"]["peak_rows"], "mean_rows": found["batch"]["mean_rows"],
            "tokens_per_s": found["output_tokens_per_s"],
            "times_first": found["output_tokens_per_s"] / rows[0]["tokens_per_s"] if rows else 1.0,
            "ttft_p50_s": found["ttft_s"]["p50"], "latency_p99_s": found["latency_s"]["p99"],
            "cost_per_million_output_tokens": found["cost_per_million_output_tokens"],
        })
    return rows


def beside_the_articles(rows: Sequence[dict]) -> list[dict]:
    """Our rows turned on their side: a row per figure, with the articles' and ours of each setup.

    Below each figure stands its ratio to that of the first setup.
    """
    figures = {
        "peak_rows": "requests at once", "tokens_per_s": "tokens/s", "ttft_p50_s": "TTFT p50, s",
        "latency_p99_s": "latency p99, s", "cost_per_million_output_tokens": "cost per 1M output tokens, $",
    }
    table = []
    for key, title in figures.items():
        for ratio in (False, True):
            row = {"figure": "  x static" if ratio else title}
            for (setup, *_), theirs, ours in zip(SETUPS, ARTICLES, rows, strict=True):
                for whose, column, first in (("articles", theirs, ARTICLES[0]), ("ours", ours, rows[0])):
                    unit = first[key] if ratio else 1
                    row[f"{setup}: {whose}"] = column[key] / unit if column[key] and unit else None
            if not ratio or ARTICLES[0][key]:
                table.append(row)
    return table
