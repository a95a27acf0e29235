"""One workload on this engine: in turns with its peers, or alone as in a server's loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from statistics import median

from minillm.fast.engine import Engine
from minillm.fast.memory import native_format
from minillm.guard.inputs import check_at_least
from minillm.load.weights import load_model
from minillm.measure import metrics
from minillm.measure.measurement import Measurement, Spread, Watch, provenance
from minillm.measure.peers import Engines, Run, peers
from minillm.measure.roofline import Ceilings, StepWork, least_work, measure_ceilings, shape_of
from minillm.measure.workload import WorkItem, make_workload, play
from minillm.model.llama import Llama

OnStep = Callable[[Engine], None]


def bench(
    workload: str, model_name: str, against: str | None, repeats: int, progress, watch: OnStep | None = None,
    budget_s: float | None = None, keep: Callable[[Measurement], object] = lambda measurement: None, **settings,
) -> Measurement:
    """Output tokens per second of a workload, all requests at the start: median of `repeats`, engines in turns.

    against: one of `PEERS`, its CONTINUOUS, or "all" of `PEERS` that are here (NoPeer says why one is not), all warmed.
    progress: (label, total) -> a bar. watch: called with our engine after each of its steps. budget_s: no turn but the
    first begins after it. keep: called with what there is after each turn, since a run may be stopped. `settings` are
    the workload's; with another number of requests than its own the result has a name of its own.
    """
    check_at_least(1, repeats=repeats)
    check_at_least(0, budget_s=budget_s)
    items, began = make_workload(workload, **settings), time.perf_counter()
    model = load_model(model_name)
    ours = OurEngine(model, watch)
    name = f"bench_{workload}" + (f"_{settings['requests']}" if settings.get("requests") else "")
    with peers(against, model_name, model, items) as others:
        for speeds in _take_turns({"minillm": ours.run, **others}, items, repeats, progress):
            turns = len(speeds["minillm"])
            cut = turns < repeats and budget_s is not None and time.perf_counter() - began > budget_s
            result = _measurement(name, model_name, ours, items, speeds, settings.get("seed", 0))
            result = replace(result, cut_at_s=budget_s if cut else None)
            keep(result if turns == repeats or cut else replace(result, cut_at_s=time.perf_counter() - began))
            if cut:
                break
    return result


def _measurement(name: str, model_name: str, ours: OurEngine, items, speeds: dict[str, list[float]], seed: int):
    """What the turns so far have shown, a row for each engine."""
    model, tokens = ours.model, sum(item.output_tokens for item in items)
    rows = [peer_row(engine, tokens, runs, speeds["minillm"]) for engine, runs in speeds.items()]
    rows[0] |= ours.shares()
    spread, load = Spread.of(speeds["minillm"], warmups=1), ours.load.found(model.device.type == "cpu")
    source = provenance(model_name, native_format(model.dtype), model.device, seed=seed, spread=spread, **load)
    return Measurement(name, source, rows)


def peer_row(engine: str, tokens: int, runs: Sequence[float], ours: Sequence[float]) -> dict:
    """An engine's tokens per second in each turn, and how many times that ours reached in the same turn."""
    times = [own / other for own, other in zip(ours, runs, strict=True)]
    return {
        "engine": engine, "output_tokens": tokens,
        "tokens_per_s": median(runs), "tokens_per_s_min": min(runs), "tokens_per_s_max": max(runs),
        "times_minillm": median(times), "times_minillm_min": min(times), "times_minillm_max": max(times),
        "turns": len(runs),
    }


def _take_turns(engines: Engines, items, repeats: int, progress) -> Iterator[dict[str, list[float]]]:
    """Tokens per second of each run so far, after each turn. In turns, so that a machine that slows down slows every
    engine; turn 0 warms up, and is not given."""
    speeds: dict[str, list[float]] = {name: [] for name in engines}
    wanted = sum(item.output_tokens for item in items)
    with progress("bench", (repeats + 1) * len(engines)) as bar:
        for turn in range(repeats + 1):
            for name, run in engines.items():
                tokens, seconds = run(items if turn else items[:4])  # turn 0 warms up
                bar.update(1)
                if turn and tokens != wanted:
                    raise RuntimeError(f"{name} gave {tokens} tokens instead of {wanted}; its speed would mean nothing")
                if turn:
                    speeds[name].append(wanted / seconds)
            if turn:
                yield speeds


def bench_loop(
    items: Sequence[WorkItem], model: Llama, clients: int | None = None, watch: OnStep | None = None
) -> dict:
    """`metrics.summary` of a workload as in a server's loop, with all that `client.bench_server` finds of a server.

    clients: of a closed loop; None plays the open loop at the items' arrival times. First the longest
    requests run for two tokens each: that warms up, and refuses (RequestError) early what cannot run.
    """
    longest = sorted(items, key=lambda item: len(item.prompt_ids) + item.max_tokens)[-4:]
    play(started_engine(model), [replace(item, stop_after=2) for item in longest], len(longest), watch)
    engine, load = started_engine(model), Watch()
    outputs = play(engine, items, clients, watch)
    load.compare_steps(engine.records.steps)
    short = sum(len(given) != item.output_tokens for given, item in zip(outputs, items, strict=True))
    seen = metrics.seen_by_clients(engine.records)
    none_failed = {"faults": {}, "failed": 0, "short_answers": short}
    return {**metrics.summary(engine.records), **seen, **load.found(), **none_failed}


def started_engine(model: Llama) -> Engine:
    """An engine with all defaults, `started`."""
    return started(Engine(model))


def started(engine: Engine) -> Engine:
    """The engine, once its CUDA graphs are recorded: what is timed begins after that, here and in other engines."""
    if warm_up := getattr(engine.executor, "warm_up", None):  # which compiles the kernels of prompts, too
        warm_up()
    elif graphs := getattr(engine.executor, "graphs", None):
        graphs.record_all()
    return engine


class OurEngine:
    """Runs items on a new engine each time. Keeps the last run's seconds and steps, and the machine's load in all."""

    def __init__(self, model: Llama, watch: OnStep | None) -> None:
        self.model, self.watch, self.load = model, watch, Watch()

    def run(self, items: Sequence[WorkItem]) -> Run:
        engine, start = started_engine(self.model), time.perf_counter()
        with self.load:
            outputs = play(engine, items, len(items), self.watch)
        self.seconds, self.steps = time.perf_counter() - start, engine.records.steps
        self.load.compare_steps(self.steps)
        return sum(map(len, outputs)), self.seconds

    @cached_property
    def limits(self) -> Ceilings:
        """Bandwidth and matmul rate of the device, measured once."""
        return measure_ceilings(self.model.device, self.model.dtype)

    def shares(self) -> dict[str, float]:
        """MBU and MFU of the last run: the least bytes and FLOPs of all its steps, over its time."""
        model, limits = self.model, self.limits
        kv_format = native_format(model.dtype)
        works = [least_work(model.config, kv_format, shape_of(step), model.weight_bytes) for step in self.steps]
        work = StepWork(sum(work.bytes for work in works), sum(work.flops for work in works))
        return {"mbu": limits.mbu(work, self.seconds), "mfu": limits.mfu(work, self.seconds)}
