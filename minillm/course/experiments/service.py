"""Ledger parts B9 and F: what a service does under load. Notebooks 07 to 09, and 11.

Services run in virtual time, by default Llama-3-8B on A100s: their times are predictions from a data
sheet, and are recorded as such.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby, pairwise
from statistics import mean

import numpy as np

from minillm.course.experiments.common import count
from minillm.course.experiments.drafts import DraftingService, drafting
from minillm.course.experiments.limits import gauges
from minillm.course.experiments.repeats import over_seeds, seeds, seeds_row
from minillm.course.figures import LATENCIES, flat, service_row
from minillm.course.setting import Setting
from minillm.fast.engine import Engine
from minillm.ladder.continuous import StepPlan
from minillm.ladder.quantized import kv_bytes_per_token
from minillm.ladder.records import Records, RequestRecord
from minillm.load.config import ModelConfig
from minillm.measure import fleet, metrics
from minillm.measure.capacity import GB
from minillm.measure.measurement import VIRTUAL, Measurement, provenance
from minillm.measure.roofline import Ceilings
from minillm.measure.service import Service
from minillm.measure.workload import (
    WorkItem,
    chat,
    lognormal,
    play_by_step,
    random_ids,
    shared_prefix,
    worked_example,
)

COST = "cost_per_million_output_tokens"
BLOCK = 16  # tokens
FIGURES = ("tokens_per_s", "mean_rows", *LATENCIES)


def simulated(name: str, rows: list[dict], setting: Setting) -> Measurement:
    """Rows of a simulation, which depend on the seed and on no machine."""
    model = f"{Service.model} on {Service.device}"
    return Measurement(name, provenance(model, "bf16", VIRTUAL, setting.seed, None), rows)


# -- 07: load, and which requests are present -----------------------------------------------------


def at_rate(items: Sequence[WorkItem], per_s: float) -> list[WorkItem]:
    """The same requests in the same order, their arrivals stretched to this mean number a second."""
    now = (len(items) - 1) / (max(item.arrival for item in items) - min(item.arrival for item in items))
    return [replace(item, arrival=item.arrival * now / per_s) for item in items]


Serve = Callable[[Sequence[WorkItem], int | None], Records]  # items, and the clients of a closed loop or None


def open_and_closed(
    serve: Serve, items: Sequence[WorkItem], clients: int, loads: Sequence[float]
) -> dict[str, Records]:
    """The same requests in a closed loop of `clients`, then in open loops at shares of the rate that it reached."""
    closed = serve(items, clients)
    runs, rate = {f"closed, {clients} clients": closed}, len(items) / (closed.ended - closed.began)
    return runs | {f"open, {load * rate:.2g} a second": serve(at_rate(items, load * rate), None) for load in loads}


def number_present(lives: Sequence[tuple[float, float]]) -> list[tuple[float, int]]:
    """(moment, number present from then on), from the moments at which each came and went; equal moments are one."""
    changes = sorted([(came, 1) for came, _ in lives] + [(went, -1) for _, went in lives])
    steps, present = [], 0
    for moment, same in groupby(changes, key=lambda change: change[0]):
        present += sum(change for _, change in same)
        steps.append((moment, present))
    return steps


def littles_law(lives: Sequence[tuple[float, float]]) -> dict:
    """L = lambda W over a time in which every request came and went (Little, 1961).

    mean_present is integrated over time and does not use which request is which; rate and
    mean_stay_s are taken from the requests and do not use which of them met.
    """
    steps = number_present(lives)
    span = steps[-1][0] - steps[0][0]
    area = sum(present * (later - moment) for (moment, present), (later, _) in pairwise(steps))
    return {
        "mean_present": area / span, "rate_per_s": len(lives) / span,
        "mean_stay_s": sum(went - came for came, went in lives) / len(lives),
    }


def lives(records: Records, where: str = "system") -> list[tuple[float, float]]:
    """When each finished request came and went: into the "system", the "queue", or the "service" after the queue."""
    known = {"system": ("arrival", "finish"), "queue": ("arrival", "first_scheduled"),
             "service": ("first_scheduled", "finish")}
    if where not in known:
        raise ValueError(f"unknown place {where!r}; known: {', '.join(known)}")
    came, went = known[where]
    return [(getattr(record, came), getattr(record, went)) for record in records.requests]


def one_long_prompt(requests: int = 200, clients: int = 8, long_prompt: int = 60_000) -> dict[str, Records]:
    """Chats, and in their middle one prompt as long as a book, computed whole; closed loop, then open at its rate.

    The records are those of all requests; the book is the one with the longest prompt.
    """
    items = chats(requests, 1.0)
    middle = items[len(items) // 2]
    items.insert(len(items) // 2, replace(middle, prompt_ids=[0] * long_prompt))
    service = Service(chunked_prefill=False, max_step_tokens=long_prompt, max_batch=64, kv_memory=60 * GB)
    return open_and_closed(lambda *load: service.serve(*load).records, items, clients, [1.0])


class Onlooker:
    """Stands before an engine's executor and writes down, without the engine's records, what is run: at each step the
    moments at which it began and ended, the first and last token fed of each row, by request, and the blocks that the
    tables of all running requests hold."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.executor, self.config = engine, engine.executor, engine.executor.config
        self.steps: list[tuple[float, float, dict, int]] = []

    def run(self, plan: StepPlan) -> list[list[int]]:
        """Run a step, and note it."""
        began, rows = self.engine.clock.now(), {row.request.id: (row.start, row.end) for row in plan.rows}
        blocks = {block for request in self.engine.scheduler.running for block in request.block_table}
        outputs = self.executor.run(plan)
        self.steps.append((began, self.engine.clock.now(), rows, len(blocks)))
        return outputs


def counted_by_others(service: Service, items: Sequence[WorkItem]) -> tuple[Records, dict[str, float]]:
    """A run's records, and the figures of `watch` as others than the records saw it: the client, who has the tokens and
    a clock, and an `Onlooker` at the executor. Open loop, one engine with `kv_memory` given."""
    engine = service.engine(max(len(item.prompt_ids) + item.max_tokens for item in items))
    engine.executor = onlooker = Onlooker(engine)
    arrived, received, tokens = {}, defaultdict(list), 0
    start = engine.clock.now()
    for events in play_by_step(engine, items):
        for item, event in events:
            arrived[event.request_id] = start + items[item].arrival
            received[event.request_id].append(engine.clock.now())
            tokens += len(event.token_ids)
    blocks = service.kv_memory // (BLOCK * kv_bytes_per_token(service.cost.config, service.kv_format))
    return engine.records, {**client_figures(arrived, received, tokens),
                            **step_figures(arrived, received, onlooker.steps, blocks)}


def client_figures(arrived: Mapping, received: Mapping[object, list[float]], tokens: int) -> dict[str, float]:
    """From when each request arrived, and when each of its tokens was received."""
    first = [moments[0] - arrived[id] for id, moments in received.items()]
    gaps = [1e3 * (later - before) for moments in received.values() for before, later in pairwise(moments)]
    span = max(map(max, received.values())) - min(arrived.values())
    return {"ttft_p50_s": ranked(first, 50), "ttft_p99_s": ranked(first, 99), "itl_p50_ms": ranked(gaps, 50),
            "itl_p99_ms": ranked(gaps, 99), "tokens_per_s": tokens / span}


def step_figures(
    arrived: Mapping, received: Mapping, steps: Sequence[tuple[float, float, dict, int]], blocks: int
) -> dict[str, float]:
    """From what an `Onlooker` saw. The mean batch is Little's law in steps: requests that come in a step, times the
    steps that each stays. blocks: of the whole pool."""
    ends = {end: number for number, (_, end, _, _) in enumerate(steps)}
    begun: dict = {}  # of each request the number of its first step
    fed, restarts = {}, 0
    for number, (_, _, rows, _) in enumerate(steps):
        for id, (first, last) in rows.items():
            begun.setdefault(id, number)
            restarts += first < fed.get(id, 0)
            fed[id] = last
    stays = [ends[received[id][-1]] - number + 1 for id, number in begun.items()]
    waits = [steps[number][0] - arrived[id] for id, number in begun.items()]
    queues = [sum(arrived[id] <= began for id in arrived) - sum(first <= number for first in begun.values())
              for number, (began, _, _, _) in enumerate(steps)]
    busy = sum(end - began for began, end, _, _ in steps)
    return {
        "achieved_batch_mean_rows": len(begun) / len(steps) * mean(stays), "achieved_batch_steps_kept": len(steps),
        "kv_occupancy_peak_share": max(held for *_, held in steps) / blocks,
        "kv_occupancy_mean_share": sum(held * (end - began) for began, end, _, held in steps) / busy / blocks,
        "queue_depth_peak": max(queues), "queue_wait_p99_s": ranked(waits, 99), "preemptions": restarts,
    }


def ranked(values: Sequence[float], percent: int) -> float:
    """The percentile at nearest rank, by NumPy."""
    return float(np.percentile(values, percent, method="inverted_cdf"))


def watch(setting: Setting) -> Measurement:
    """F4: all that is worth watching, from the records of one busy run, and beside each figure the same `counted` by
    others in the same run (`counted_by_others`)."""
    service = Service(kv_memory=12 * GB, max_batch=64)
    records, counted = counted_by_others(service, chat(setting.size(40, 300), rate=8.0, seed=setting.seed))
    found = flat(metrics.summary(records))
    pool = metrics.occupancy(records)
    values = {
        **{name: found[name] for name in ("ttft_p50_s", "ttft_p99_s", "itl_p50_ms", "itl_p99_ms", "tokens_per_s")},
        "achieved_batch_mean_rows": found["mean_rows"],
        "achieved_batch_steps_kept": len(records.steps),
        "kv_occupancy_peak_share": found["cache_peak_share"],
        "kv_occupancy_mean_share":
            pool["mean_blocks_live"] / sum(pool[f"mean_{state}"] for state in metrics.BLOCK_STATES),
        "queue_depth_peak": found["peak_waiting"],
        "queue_wait_p99_s": found["queue_p99_s"], "preemptions": found["preemptions"],
    }
    rows = [{"metric": name, "value": value, "counted": counted[name]} for name, value in values.items()]
    return simulated("watch", rows, setting)


# -- 08: capacity ---------------------------------------------------------------------------------


def fill(config: ModelConfig, kv_format: str, kv_memory: int, kv: str, context: int = 4096, answer: int = 8) -> Records:
    """More chats of one full context than fit, all at once; the real scheduler and pool, without a forward.

    The peak of `rows` is the number that ran concurrently.
    """
    items = worked_example(256, context, answer)
    settings = {"max_batch": len(items), "max_step_tokens": len(items) * context, "max_context": context}
    return count(config, items, kv=kv, kv_format=kv_format, kv_memory=kv_memory, **settings)


def chats(requests: int, rate: float, context: int = 8192, seed: int = 0, **settings) -> list[WorkItem]:
    """The `chat` workload without the few requests that are longer than a context."""
    items = chat(requests, rate, seed=seed, **settings)
    return [item for item in items if len(item.prompt_ids) + item.max_tokens <= context]


def under_load(service: Service, items: Sequence[WorkItem]) -> dict:
    """A service of one device in the open loop: its records, and the gauges that an operator watches."""
    served, cost = service.serve(items), service.cost
    limits = Ceilings(cost.bytes_per_s, cost.flops_per_s)
    return {
        **gauges(served.records, cost.config, cost.kv_format, cost.weight_bytes, limits),
        **service_row(served, "cache_peak_share", "refused", "refused_share", "mean_waiting", "preemptions"),
        **service_row(served, *LATENCIES), "records": served.records,
    }


# -- 09: latency or throughput --------------------------------------------------------------------


def load_sweep(setting: Setting) -> Measurement:
    """F1: a closed loop of 1 to 256 clients: total tokens against what each of them sees."""
    rows: list[dict] = []
    for clients in setting.each("load_sweep", setting.size((1, 8, 64), (1, 4, 16, 64, 256))):
        requests, scale = setting.size(4 + clients // 2, 16 + 2 * clients), setting.size(0.3, 1.0)

        def loop(seed: int, clients=clients, requests=requests, scale=scale) -> list[dict]:
            served = Service().serve(chat(requests, scale=scale, seed=seed), clients)
            return [{"clients": clients, **service_row(served, *FIGURES)}]

        rows += over_seeds(setting, loop, *FIGURES)
    return simulated("load_sweep", rows, setting)


def two_kinds(
    interactive: int, per_s: float, jobs: int, prompt: int = 512, answer: int = 96, job_prompt: int = 3072,
    job_answer: int = 384, seed: int = 0,
) -> tuple[list[WorkItem], list[WorkItem]]:
    """Interactive requests, which arrive at random and have short answers, and long jobs, all there at the start."""
    draw = np.random.default_rng(seed)
    arrivals = draw.exponential(1 / per_s, interactive).cumsum()
    people = [WorkItem(float(arrival), random_ids(draw, prompt, 1.0), answer) for arrival in arrivals]
    return people, [WorkItem(0.0, random_ids(draw, job_prompt, 1.0), job_answer) for _ in range(jobs)]


def in_pools(
    layouts: Mapping[str, Sequence[Sequence[Service]]], people: Sequence[WorkItem], jobs: Sequence[WorkItem]
) -> Iterator[tuple[str, list[RequestRecord], list[RequestRecord], Records]]:
    """For each layout of GPUs: its name, the records of people's requests and of jobs, and the hardware's.

    A layout is one pool of GPUs, which takes all requests, or two: for people, and for jobs.
    Within a pool a request goes to the least loaded GPU.
    """
    longest = max(len(item.prompt_ids) + item.max_tokens for item in (*people, *jobs))
    for layout, pools in layouts.items():
        engines = [[service.engine(longest) for service in pool] for pool in pools]
        if len(engines) == 1:
            ended = fleet.serve(engines[0], [*people, *jobs])
            parts = ended[: len(people)], ended[len(people) :]
        else:
            parts = fleet.serve(engines[0], people), fleet.serve(engines[1], jobs)
        yield layout, *parts, metrics.merge([engine.records for pool in engines for engine in pool])


def mixed_and_pools(
    people: Sequence[WorkItem], jobs: Sequence[WorkItem], gpus: int = 4, for_people: int = 2
) -> list[dict]:
    """The same GPUs as one mixed pool, and as two: people with small chunks and batches, jobs with large ones."""
    small = Service(max_batch=32, max_step_tokens=512, kv_memory=60 * GB)
    large = Service(max_batch=128, kv_memory=60 * GB)
    for_jobs = gpus - for_people
    layouts = {"one mixed pool": [[large] * gpus],
               f"pools of {for_people} and {for_jobs}": [[small] * for_people, [large] * for_jobs]}
    return [
        {"setup": layout, **flat(metrics.latencies(answered)),
         "jobs_done_s": max((record.finish for record in done), default=None),
         **flat(metrics.summary(records), "tokens_per_s")}
        for layout, answered, done, records in in_pools(layouts, people, jobs)
    ]


def pools(setting: Setting) -> Measurement:
    """F2: chats and offline work on two GPUs: all on both, and a pool for each."""
    layouts = {"mixed": [[Service()] * 2],
               "separate pools": [[Service(max_batch=32, max_step_tokens=512)], [Service()]]}

    def both(seed: int) -> list[dict]:
        talk = chat(setting.size(40, 200), rate=3.0, scale=0.3, seed=seed)
        heap = [replace(item, arrival=0.0) for item in chat(setting.size(60, 400), seed=seed + 1000)]
        return [pool_row(layout, answered, done) for layout, answered, done, _ in in_pools(layouts, talk, heap)]

    compared = ("chat_ttft_p50_s", "chat_ttft_p99_s", "chat_itl_p99_ms", "heap_tokens_per_s")
    return simulated("pools", over_seeds(setting, both, *compared), setting)


def pool_row(layout: str, answered: Sequence[RequestRecord], done: Sequence[RequestRecord]) -> dict:
    """The latencies of chats, and the offline work's tokens per second until its last request ended."""
    found = flat(metrics.latencies(answered), "ttft_p50_s", "ttft_p99_s", "itl_p99_ms")
    speed = sum(record.output_tokens for record in done) / max(record.finish for record in done)
    return {"layout": layout, **{f"chat_{name}": value for name, value in found.items()}, "heap_tokens_per_s": speed}


def caps_and_caching(setting: Setting) -> Measurement:
    """F3: answers as they come and capped; and a common prompt computed for each request, and once."""
    requests = setting.size(40, 300)

    def cases(seed: int) -> list[dict]:
        free = chat(requests, rate=6.0, seed=seed)
        common = shared_prefix(requests, 4096, rate=6.0, seed=seed)
        services = {
            "answers as they come": (Service(), free), "answers capped at 200": (Service(answer_cap=200), free),
            "prompts computed": (Service(), common), "prompts cached": (Service(prefix_cache=True), common),
        }
        return [{"case": case, **service_row(service.serve(items), "prompt_tokens_computed", *FIGURES)}
                for case, (service, items) in services.items()]

    return simulated("caps_and_caching", over_seeds(setting, cases, *FIGURES), setting)


def disaggregation(setting: Setting) -> Measurement:
    """F7: two GPUs that do both, and one for prompts beside one for answers, the cache sent at 50 GB/s."""
    both = Service(max_step_tokens=16_384, replicas=2)
    columns = ("ttft_p50_s", "ttft_p99_s", "itl_p50_ms", "itl_p99_ms")

    def layouts(seed: int) -> list[dict]:
        items, rows = chat(setting.size(50, 300), rate=7.0, seed=seed), []
        for layout, service in (("both on both", both), ("apart", replace(both, replicas=1, prefill_replicas=1))):
            served = service.serve(items)  # both layouts are timed from 0, whenever their first request arrives
            rows.append({"layout": layout, **service_row(served, *columns),
                         "tokens_per_s": served.summary["output_tokens"] / served.records.ended})
        return rows

    return simulated("disaggregation", over_seeds(setting, layouts, *columns, "tokens_per_s"), setting)


# -- 11: symptoms and cures -----------------------------------------------------------------------


def replicas(setting: Setting) -> Measurement:
    """B9: the same traffic on 1 to 8 GPUs behind a router: the batch on each, and the throughput of all."""
    requests, scale = setting.size(80, 400), setting.size(0.5, 1.0)
    traffic = [chat(requests, rate=24, scale=scale, seed=seed) for seed in seeds(setting)]
    runs = {number: [service_row(Service(replicas=number).serve(items), *FIGURES, COST) for items in traffic]
            for number in setting.each("replicas", (1, 2, 4, 8))}
    rows = []
    for number, found in runs.items():
        each = [{"replicas": number, "times_one": run["tokens_per_s"] / one["tokens_per_s"], **run}
                for run, one in zip(found, runs[1], strict=True)]
        rows.append(seeds_row(setting, each, ("times_one", *FIGURES, COST)))
    return simulated("replicas", rows, setting)


LIMITED: dict[str, dict] = {  # one GPU, model and load; what limits the batch
    "slots for the longest answer": {"kv": "slots"},
    "slots for 4k tokens": {"kv": "slots", "answer_cap": 4096 - 512},
    "static batches of 8": {"batching": "static", "max_batch": 8},
    "at most 8 rows": {"max_batch": 8},
    "at most 16 rows": {"max_batch": 16},
    "steps of 64 tokens": {"max_step_tokens": 64, "max_batch": 64},
    "blocks as tokens appear": {},
    "blocks, 8-bit keys and values": {"kv_format": "int8"},
}
GAUGES = ("cache_peak_share", "mean_waiting")


def achieved_batch(setting: Setting) -> Measurement:
    """F5: one GPU, load and model under eight limits, from a batch of 3 (a slot reserves 16k tokens, of which 7 GB hold
    three) to one that fills; beside the batch every other gauge that could tell them apart."""
    compared = ("busy_share", *GAUGES, *FIGURES, COST)
    loads = {}
    for seed in seeds(setting):
        items = lognormal(1.0, setting.size(60, 200), 200, 512, seed=seed)
        loads[seed] = [replace(item, max_tokens=16_384 - len(item.prompt_ids)) for item in items]
    rows: list[dict] = []
    for setup, limit in setting.each("achieved_batch", LIMITED.items()):
        service = Service(kv_memory=7 * GB, **limit)

        def at_once(seed: int, setup=setup, service=service) -> list[dict]:
            served = service.serve(loads[seed], clients=len(loads[seed]))
            busy = served.summary["busy_s"] / served.summary["span_s"]
            return [{"setup": setup, "busy_share": busy, **service_row(served, *GAUGES, *FIGURES, COST)}]

        rows += over_seeds(setting, at_once, *compared)
    return simulated("achieved_batch", rows, setting)


CURES: dict[str, Callable[[Service], Service]] = {
    "cache prompts": lambda service: replace(service, prefix_cache=True),
    "chunked prefill": lambda service: replace(service, chunked_prefill=True, max_step_tokens=256),
    "8-bit weights": lambda service: replace(service, weights=0.5),
    "8-bit keys and values": lambda service: replace(service, kv_format="int8"),
    "speculation on chats": lambda service: drafting(service, "chat", "n-gram"),
    "speculation on repeated text": lambda service: drafting(service, "copy", "n-gram"),
    "speculation by a drafter, on chats": lambda service: drafting(service, "chat", "drafter"),
    "a larger batch": lambda service: replace(service, max_batch=256),
    "pages for slots": lambda service: replace(service, kv="paged"),
    "cap answers at 200": lambda service: replace(service, answer_cap=200),
    "another GPU": lambda service: replace(service, replicas=service.replicas + 1),
    "half of the GPUs": lambda service: replace(service, replicas=max(1, service.replicas // 2)),
}
CURED = 1.2  # times better, from which a figure counts as cured


def times_better(figure: str, before: dict, after: dict) -> float:
    """How many times better a column became: more tokens per second, or less of anything else."""
    old, new = (row[figure] for row in ((after, before) if figure == "tokens_per_s" else (before, after)))
    if old == new:  # perhaps both are 0
        return 1.0
    return old / new if new else float("inf")


def effect(times: float) -> str:
    """What a cure did to a figure, in words."""
    if times >= CURED:
        return "cures"
    return "makes it worse" if times < 0.99 else "helps little" if times > 1.01 else "does nothing"


def symptoms(setting: Setting, seed: int) -> list[tuple]:
    """Of F6: the symptom, the cure's title, its figure, the load, the service, and the names of what is tried."""
    requests, usual = setting.size(60, 400), Service()
    common = shared_prefix(requests // 2, 4096, 6.0, seed=seed), None
    alone = chat(setting.size(3, 16), scale=0.5, seed=seed), 1
    crowd = lognormal(0.5, requests, 100, 256, seed=seed), requests
    return [
        ("TTFT too high", "cache the common prompt", "ttft_p50_s", common, usual, ["cache prompts"]),
        ("one user too slow", "weights of 8 bits", "itl_p50_ms", alone, usual, ["8-bit weights"]),
        ("one user too slow", "4 drafts by prompt lookup, chats", "latency_p50_s", alone, usual,
         ["speculation on chats"]),
        ("one user too slow", "4 drafts by prompt lookup, repeated text", "latency_p50_s", alone, usual,
         ["speculation on repeated text"]),
        ("one user too slow", "4 drafts by a trained drafter, chats", "latency_p50_s", alone, usual,
         ["speculation by a drafter, on chats"]),
        ("throughput too low", "a batch of 256 in place of 8", "tokens_per_s", crowd, Service(max_batch=8),
         ["a larger batch"]),
        ("requests wait for memory", "8-bit keys and values", "queue_p99_s", crowd, Service(kv_memory=GB),  # ~20 rows
         ["8-bit keys and values"]),
        ("too expensive", "fill the batch of one GPU", COST, crowd, Service(max_batch=8, replicas=2),
         ["half of the GPUs", "a larger batch"]),
    ]


def cures(setting: Setting) -> Measurement:
    """F6: a row for each symptom: the figure to watch, before the cure and after it, on the same load.

    Drafts are as often right, and take as long, as the recorded ones did (`drafts.py`).
    """

    def tried(seed: int) -> list[dict]:
        rows = []
        for symptom, title, figure, load, service, names in symptoms(setting, seed):
            cured = service
            for name in names:
                cured = CURES[name](cured)
            before, after = (service_row(each.serve(*load), figure) for each in (service, cured))
            rows.append({"symptom": symptom, "cure": title, "figure": figure, "before": before[figure],
                         "after": after[figure], "times_better": times_better(figure, before, after),
                         **draft_columns(cured)})
        return rows

    rows = over_seeds(setting, tried, "before", "after", "times_better")
    return simulated("cures", [{**row, "effect": effect(row["times_better"])} for row in rows], setting)


def draft_columns(service: Service) -> dict:
    """Of a service that drafts for one request: what its drafts are worth, as recorded; None of any other."""
    if not isinstance(service, DraftingService):
        return dict.fromkeys(("acceptance", "steps_with_drafts", "right_by_place", "drafting_plain_steps"))
    worth = service.recorded.at(1)
    return {"acceptance": worth.acceptance, "steps_with_drafts": worth.found, "right_by_place": list(worth.right),
            "drafting_plain_steps": worth.cost}
