"""One workload on this engine: in turns with transformers in the same process, or alone as in a server's loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from functools import cached_property
from statistics import median

import torch

from minillm.fast.engine import Engine
from minillm.fast.memory import native_format
from minillm.guard.inputs import check_at_least
from minillm.load.weights import load_model
from minillm.measure import metrics
from minillm.measure.measurement import Measurement, Spread, Watch, provenance
from minillm.measure.reference import load_reference
from minillm.measure.roofline import Ceilings, StepWork, least_work, measure_ceilings, shape_of
from minillm.measure.workload import WorkItem, make_workload, play
from minillm.model.llama import Llama

STATIC_BATCH = 8

Run = tuple[int, float]  # output tokens, seconds
OnStep = Callable[[Engine], None]
AGAINST = ("transformers", "transformers-continuous")


def bench(
    workload: str, model_name: str, against: str | None, repeats: int, progress, watch: OnStep | None = None,
    budget_s: float | None = None, keep: Callable[[Measurement], object] = lambda measurement: None, **settings,
) -> Measurement:
    """Output tokens per second of a workload, all requests at the start: median of `repeats`, engines in turns.

    against: "transformers" adds its `generate` with static batches of 8, and its continuous batching,
    both warmed, on the same weights; "transformers-continuous" only the latter, which takes a fraction of the
    time. progress: (label, total) -> a bar. watch: called with our engine after each of its steps. budget_s: no
    turn but the first begins after it. keep: called with what there is after each turn, since a run may be stopped.
    `settings` are the workload's; with another number of requests than its own the result has a name of its own.
    """
    check_at_least(1, repeats=repeats)
    check_at_least(0, budget_s=budget_s)
    items, began = make_workload(workload, **settings), time.perf_counter()
    model = load_model(model_name)
    ours = OurEngine(model, watch)
    engines: dict[str, Callable[[Sequence[WorkItem]], Run]] = {"minillm": ours.run}
    if against:
        reference = load_reference(model_name, model)
        if against == AGAINST[0]:
            engines["transformers, static batch of 8"] = lambda items: _static(reference, items)
        engines["transformers, continuous batching"] = lambda items: _continuous(reference, items)
    name = f"bench_{workload}" + (f"_{settings['requests']}" if settings.get("requests") else "")
    for speeds in _take_turns(engines, items, repeats, progress):
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
    model, speed = ours.model, median(speeds["minillm"])
    rows = [
        {
            "engine": engine, "output_tokens": sum(item.output_tokens for item in items), "tokens_per_s": median(runs),
            "min": min(runs), "max": max(runs), "times_minillm": speed / median(runs),
        }
        for engine, runs in speeds.items()
    ]
    rows[0] |= ours.shares()
    spread, load = Spread.of(speeds["minillm"], warmups=1), ours.load.found(model.device.type == "cpu")
    source = provenance(model_name, native_format(model.dtype), model.device, seed=seed, spread=spread, **load)
    return Measurement(name, source, rows)


def _take_turns(engines, items, repeats: int, progress) -> Iterator[dict[str, list[float]]]:
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
    if graphs := getattr(engine.executor, "graphs", None):
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


@torch.inference_mode()
def _static(reference, items: Sequence[WorkItem]) -> Run:
    """`generate` on left-padded batches in order of arrival; tokens past an answer's end are not counted."""
    pad, start = 0, time.perf_counter()
    for at in range(0, len(items), STATIC_BATCH):
        batch = items[at : at + STATIC_BATCH]
        width, longest = max(len(item.prompt_ids) for item in batch), max(item.output_tokens for item in batch)
        ids = [[pad] * (width - len(item.prompt_ids)) + item.prompt_ids for item in batch]
        mask = [[0] * (width - len(item.prompt_ids)) + [1] * len(item.prompt_ids) for item in batch]
        reference.generate(
            input_ids=torch.tensor(ids, device=reference.device),
            attention_mask=torch.tensor(mask, device=reference.device),
            max_new_tokens=longest, min_new_tokens=longest, do_sample=False, eos_token_id=None, pad_token_id=pad,
        )
    getattr(torch, reference.device.type).synchronize()  # the last batch may still be running
    return sum(item.output_tokens for item in items), time.perf_counter() - start


def _continuous(reference, items: Sequence[WorkItem]) -> Run:
    """transformers' continuous batching, with a cache that holds all requests together, and no more.

    Its manager's thread never sleeps, so it is stopped after each turn. Its start and warm-up are not timed.
    """
    from transformers import GenerationConfig
    from transformers.generation import ContinuousBatchingConfig

    page, most = 32, max(item.output_tokens for item in items)
    step_tokens = 512 if reference.device.type == "cpu" else 4096
    blocks = sum(-(-(len(item.prompt_ids) + item.output_tokens) // page) for item in items) + len(items)
    manager = reference.init_continuous_batching(
        generation_config=GenerationConfig(do_sample=False, max_new_tokens=most, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(num_blocks=blocks, max_batch_tokens=step_tokens,
                                                            **{page_name(ContinuousBatchingConfig): page}),
    )
    manager.start()
    try:
        _ask(manager, items[:2])
        start = time.perf_counter()
        tokens = _ask(manager, items)
        return tokens, time.perf_counter() - start
    finally:
        manager.stop(block=True)


def page_name(config_class: type) -> str:
    """What a release of transformers calls the tokens of a block: `page_size`, or `block_size` in 5.17 and before."""
    known = {each.name for each in fields(config_class)}
    return next(name for name in ("page_size", "block_size") if name in known)


def _ask(manager, items: Sequence[WorkItem]) -> int:
    """Send the requests, wait for all of them; how many tokens came."""
    for item in items:
        manager.add_request(input_ids=item.prompt_ids, max_new_tokens=item.output_tokens)
    done = tokens = 0
    while done < len(items):
        result = manager.get_result(timeout=5)
        if result is None and not manager.is_running():
            raise RuntimeError("transformers' continuous batching stopped by itself")
        if result is not None and result.is_finished():
            done, tokens = done + 1, tokens + len(result.generated_tokens)
    return tokens
