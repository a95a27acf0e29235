"""Experiments of parts B9, F and G: whole services in virtual time, an 8B model on A100s; the last one for real.

The engine, its scheduler and its pool are the real ones; a step takes what `virtual.py` says
it would. So the figures are predictions from a data sheet, and are labelled as such; the
counts (rows, queues, preemptions) follow from them exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from minillm.course.experiments import service
from minillm.course.experiments.service import in_ms, percentiles
from minillm.course.setting import Setting
from minillm.fast.engine import Engine
from minillm.ladder.records import Records, RequestRecord
from minillm.load.config import ModelConfig
from minillm.measure import fleet, metrics
from minillm.measure.capacity import GB, capacity
from minillm.measure.measurement import VIRTUAL, Measurement, provenance
from minillm.measure.simulation import collector_off, worked_example_rows
from minillm.measure.virtual import DEVICES, CostModel, VirtualProposer, virtual_engine
from minillm.measure.workload import WorkItem, chat, lognormal, play, shared_prefix

MODEL, DEVICE = "llama-3-8b", "a100-80gb"
PRICE = 2.9  # an hour of the device, in dollars: what the articles' costs imply


def simulated(name: str, rows: list[dict], setting: Setting) -> Measurement:
    """Rows of a simulation: they depend on the seed and on nothing here."""
    return Measurement(name, provenance(f"{MODEL} on {DEVICE}", "bf16", VIRTUAL, setting.seed, None), rows)


def cost_model(kv_format: str = "bf16", weights: float = 1.0) -> CostModel:
    """The model on the device. weights: their bytes, as a share of 16 bits."""
    cost = CostModel.of_device(DEVICE, ModelConfig.preset(MODEL), kv_format)
    return replace(cost, weight_bytes=cost.weight_bytes * weights)


def server(cost: CostModel | None = None, prompts_received: bool = False, proposer=None, **settings) -> Engine:
    """One GPU's engine, its cache as large as the memory allows; `settings` are the engine's."""
    cost = cost or cost_model()
    room = capacity(MODEL, DEVICES[DEVICE].memory_gb, cost.weight_bytes / GB, kv_format=cost.kv_format).cache_gb
    usual = {"max_batch": 256, "max_step_tokens": 2048, "max_context": 16_384, "prefix_cache": False}
    return virtual_engine(cost, prompts_received, proposer, **{"kv_memory": round(room * GB), **usual, **settings})


def served(items: Sequence[WorkItem], clients: int | None = None, engine: Engine | None = None, **settings) -> dict:
    """The summary of one server's run."""
    engine = engine or server(**settings)
    with collector_off():
        play(engine, items, clients)
    return metrics.summary(engine.records, PRICE)


def figures(found: dict) -> dict:
    """The columns that most tables here share."""
    return {
        "tokens_per_s": found["output_tokens_per_s"], "mean_rows": found["batch"]["mean_rows"], **percentiles(found)
    }


# -- B9, F1, F2: more machines, more load ---------------------------------------------------------


def replicas(setting: Setting) -> Measurement:
    """The same traffic on 1 to 8 GPUs behind a router: the batch on each, and what all make together."""
    items, rows = chat(setting.size(80, 400), rate=24, scale=setting.size(0.5, 1.0), seed=setting.seed), []
    for number in setting.each("replicas", (1, 2, 4, 8)):
        engines = [server() for _ in range(number)]
        fleet.serve(engines, items)
        found = metrics.summary(metrics.merge([engine.records for engine in engines]), PRICE * number)
        times = found["output_tokens_per_s"] / rows[0]["tokens_per_s"] if rows else 1.0
        rows.append({"replicas": number, "times_one": times, **figures(found),
                     "cost_per_million_output_tokens": found["cost_per_million_output_tokens"]})
    return simulated("replicas", rows, setting)


def load_sweep(setting: Setting) -> Measurement:
    """A closed loop of 1 to 256 clients: total tokens against what each of them sees."""
    rows = []
    for clients in setting.each("load_sweep", setting.size((1, 8, 64), (1, 4, 16, 64, 256))):
        items = chat(setting.size(4 + clients // 2, 16 + 2 * clients), scale=setting.size(0.3, 1.0), seed=setting.seed)
        rows.append({"clients": clients, **figures(served(items, clients))})
    return simulated("load_sweep", rows, setting)


def pools(setting: Setting) -> Measurement:
    """Chats and a heap of offline work on two GPUs: all on both, and a pool for each."""
    talk = chat(setting.size(40, 200), rate=3.0, scale=0.3, seed=setting.seed)
    heap = [replace(item, arrival=0.0) for item in chat(setting.size(60, 400), seed=setting.seed + 1)]
    mixed = [server() for _ in range(2)]
    ended = fleet.serve(mixed, [*talk, *heap])
    rows = [pool_row("mixed", ended[: len(talk)], ended[len(talk) :])]
    apart = fleet.serve([server(max_batch=32, max_step_tokens=512)], talk), fleet.serve([server()], heap)
    rows.append(pool_row("separate pools", *apart))
    return simulated("pools", rows, setting)


def pool_row(layout: str, talk: Sequence[RequestRecord], heap: Sequence[RequestRecord]) -> dict:
    """How the chats fared, and how fast the heap was done."""
    fared = metrics.latencies(talk)
    return {
        "layout": layout, "chat_ttft_p50_s": fared["ttft_s"]["p50"], "chat_ttft_p99_s": fared["ttft_s"]["p99"],
        "chat_itl_p99_ms": in_ms(fared["itl_per_step_s"]["p99"]),
        "heap_tokens_per_s": sum(record.output_tokens for record in heap) / max(record.finish for record in heap),
    }


# -- F3 to F6: what to watch, and what to do ------------------------------------------------------


def caps_and_caching(setting: Setting) -> Measurement:
    """Answers as long as they come and capped; and a common prompt computed for each, and once."""
    requests = setting.size(40, 300)
    free = chat(requests, rate=6.0, seed=setting.seed)
    common = shared_prefix(requests, 4096, rate=6.0, seed=setting.seed)
    cases = {
        "answers as they come": served(free), "answers capped at 200": served(capped(free, 200)),
        "prompts computed": served(common), "prompts cached": served(common, prefix_cache=True),
    }
    rows = [
        {"case": case, "prompt_tokens_computed": found["prompt_tokens"], **figures(found)}
        for case, found in cases.items()
    ]
    return simulated("caps_and_caching", rows, setting)


def capped(items: Sequence[WorkItem], tokens: int) -> list[WorkItem]:
    """The same requests, none of which is given more than so many tokens."""
    return [replace(item, max_tokens=min(item.max_tokens, tokens)) for item in items]


def watch(setting: Setting) -> Measurement:
    """All that is worth watching, from the records of one busy run."""
    engine = server(kv_memory=12 * GB, max_batch=64)
    found = served(chat(setting.size(40, 300), rate=8.0, seed=setting.seed), engine=engine)
    values = {
        "ttft_p50_s": found["ttft_s"]["p50"], "ttft_p99_s": found["ttft_s"]["p99"],
        "itl_p50_ms": in_ms(found["itl_per_step_s"]["p50"]), "itl_p99_ms": in_ms(found["itl_per_step_s"]["p99"]),
        "tokens_per_s": found["output_tokens_per_s"], "achieved_batch_mean_rows": found["batch"]["mean_rows"],
        "achieved_batch_steps_kept": len(metrics.series(engine.records, "useful_rows")),
        "kv_occupancy_peak_share": found["kv"]["peak_share"], "queue_depth_peak": found["queue_depth"]["peak"],
        "queue_wait_p99_s": found["queue_s"]["p99"], "preemptions": found["preemptions"],
    }
    return simulated("watch", [{"metric": name, "value": value} for name, value in values.items()], setting)


def achieved_batch(setting: Setting) -> Measurement:
    """The same GPU, load and model: a batch that stays at 3, since a slot reserves 16k tokens, and one that fills."""
    items = lognormal(1.0, setting.size(60, 400), 200, 512, seed=setting.seed)
    longest = [replace(item, max_tokens=16_384 - len(item.prompt_ids)) for item in items]
    memory = 7 * GB  # three slots of 16k tokens
    rows = []
    for setup, asked, settings in (
        ("slots for the longest answer", longest, {"kv": "slots"}), ("blocks as tokens appear", longest, {}),
    ):
        engine = server(kv_memory=memory, **settings)
        found = served(asked, clients=len(asked), engine=engine)
        rows.append({"setup": setup, "busy_share": found["busy_s"] / found["span_s"], **figures(found),
                     "cost_per_million_output_tokens": found["cost_per_million_output_tokens"]})
    return simulated("achieved_batch", rows, setting)


def cures(setting: Setting) -> Measurement:
    """A row for each symptom: what one watches, before the cure and after it, on the same load."""
    requests = setting.size(60, 400)
    common = shared_prefix(requests // 2, 4096, 6.0, seed=setting.seed)
    alone = chat(setting.size(3, 16), scale=0.5, seed=setting.seed)
    crowd = lognormal(0.5, requests, 100, 256, seed=setting.seed)
    tight = {"kv_memory": 1 * GB}  # about twenty of them
    rows = [
        cure("TTFT too high", "cache the common prompt", "ttft_p50_s", served(common),
             served(common, prefix_cache=True)),
        cure("one user too slow", "weights of 8 bits", "itl_p50_ms", served(alone, 1),
             served(alone, 1, cost=cost_model(weights=0.5))),
        cure("one user too slow", "speculation, 7 of 10 drafts right", "latency_p50_s", served(alone, 1),
             served(alone, 1, proposer=VirtualProposer(0.7))),
        cure("throughput too low", "a batch of 256 in place of 8", "tokens_per_s", served(crowd, requests, max_batch=8),
             served(crowd, requests)),
        cure("requests wait for memory", "8-bit keys and values", "queue_p99_s", served(crowd, requests, **tight),
             served(crowd, requests, cost=cost_model("int8"), **tight)),
        cure("too expensive", "fill the batch of one GPU", "cost_per_million_output_tokens",
             two_half_empty(crowd), served(crowd, requests)),
    ]
    return simulated("cures", rows, setting)


def two_half_empty(items: Sequence[WorkItem]) -> dict:
    """The summary of two GPUs with small batches, at the price of two."""
    engines = [server(max_batch=8) for _ in range(2)]
    fleet.serve(engines, items)
    return metrics.summary(metrics.merge([engine.records for engine in engines]), 2 * PRICE)


def cure(symptom: str, remedy: str, figure: str, before: dict, after: dict) -> dict:
    """One row: `figure` before and after, and by how much it became better (more tokens, or less of all else)."""
    old, new = ({
        **figures(found),
        "cost_per_million_output_tokens": found["cost_per_million_output_tokens"],
    }[figure] for found in (before, after))
    better = new / old if figure == "tokens_per_s" else old / new
    return {"symptom": symptom, "cure": remedy, "figure": figure, "before": old, "after": new, "times_better": better}


# -- F7, G ----------------------------------------------------------------------------------------


def disaggregation(setting: Setting) -> Measurement:
    """Two GPUs that do both, and one for prompts beside one for answers, the cache sent at 50 GB/s."""
    items = chat(setting.size(50, 300), rate=7.0, seed=setting.seed)
    settings = {"max_step_tokens": 16_384}
    both = [server(**settings) for _ in range(2)]
    apart = [server(**settings)], [server(prompts_received=True, **settings)]
    rows = []
    for layout, ended, engines in (
        ("both on both", fleet.serve(both, items), both),
        ("apart", fleet.serve_disaggregated(*apart, items, transfer_bytes_per_s=50e9), [*apart[0], *apart[1]]),
    ):
        rows.append(service_row(layout, ended, [engine.records for engine in engines]))
    return simulated("disaggregation", rows, setting)


def service_row(layout: str, ended: Sequence[RequestRecord], records: Sequence[Records]) -> dict:
    """How all customers of several engines fared."""
    fared = metrics.latencies(ended)
    return {
        "layout": layout, "ttft_p50_s": fared["ttft_s"]["p50"], "ttft_p99_s": fared["ttft_s"]["p99"],
        "itl_p50_ms": in_ms(fared["itl_per_step_s"]["p50"]), "itl_p99_ms": in_ms(fared["itl_per_step_s"]["p99"]),
        "tokens_per_s": sum(record.output_tokens for record in ended) / max(part.ended for part in records),
    }


def worked_example(setting: Setting) -> Measurement:
    """The articles' service, with as many clients as fit and every history in the cache, as their figures imply."""
    rows = worked_example_rows(requests=setting.size(220, None), prompts_received=True, scale=setting.size(0.1, 1.0),
                               price_per_hour=PRICE)
    return simulated("worked_example", [{**row, "price_per_hour": PRICE} for row in rows], setting)


def worked_example_here(setting: Setting) -> Measurement:
    """The same three set-ups on this device, every prompt computed. On a GPU with the articles' lengths and memory:
    60 GB for keys and values, which hold 111 contexts of an 8B model in 16 bits."""
    sizes = setting.size(
        {"requests": 8, "context": 48, "answer": 12, "static_batch": 2, "fit": 4},
        {},
        {"requests": 440, "context": 4096, "answer": 300, "static_batch": 8, "kv_memory": 60 * 10**9,
         "price_per_hour": PRICE},
    )
    return service.worked_example_here(setting.timed_model, setting.timed_name, **sizes)
