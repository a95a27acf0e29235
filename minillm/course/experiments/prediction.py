"""Virtual time put to the test: fitted to one recorded run, it predicts others of the same machine.

The speed of a shared machine moves by tens of per cent within minutes, and a fit to one minute
cannot know the next. So all runs are played concurrently, a step of each in turn, and each has
a clock that stands still between its turns: whatever slows one of them slows all. Two runs of
the same load show the noise that is left: smaller differences mean nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from random import Random
from statistics import mean

import numpy as np
import torch

from minillm.course.experiments.common import measured
from minillm.course.experiments.fitting import FittedCost, fit
from minillm.course.experiments.limits import first_layers
from minillm.course.setting import Setting
from minillm.fast.engine import Engine
from minillm.fast.memory import native_format
from minillm.ladder.records import Records
from minillm.measure import metrics
from minillm.measure.bench import started
from minillm.measure.measurement import Measurement, Spread
from minillm.measure.virtual import virtual_engine
from minillm.measure.workload import WorkItem, chat, lognormal, play, play_by_step
from minillm.model.llama import Llama

ALLOWED = {"tokens_per_s": 5.0, "ttft_p50_s": 10.0, "itl_p50_s": 10.0}  # per cent
LIMITS = {"max_batch": 16, "max_step_tokens": 128, "max_context": 4096, "prefix_cache": False}
REPLAYS = 8  # of a prediction, each with noise of its own


class TurnClock:
    """Seconds of one run's turns; waiting is skipped.

    read: what counts as seconds. On a CPU this thread's time on the processor, which other
    processes hardly show; on a GPU the wall clock's.
    """

    def __init__(self, read: Callable[[], float]) -> None:
        self.read, self.before, self.since = read, 0.0, None

    def now(self) -> float:
        return self.before if self.since is None else self.before + (self.read() - self.since)

    def wait_until(self, moment: float) -> None:
        """Jump to the moment, unless it is past: exactly to it, since an engine asks until it is reached."""
        self.before = max(moment, self.now())
        if self.since is not None:
            self.since = self.read()

    @contextmanager
    def running(self) -> Iterator[None]:
        """A turn."""
        self.since = self.read()
        try:
            yield
        finally:
            self.before, self.since = self.now(), None


@dataclass
class TurnRun:
    """A workload on an engine whose clock is a `TurnClock`, a step at a time; `clients` as in `play`."""

    engine: Engine
    items: Sequence[WorkItem]
    clients: int | None = None

    def __post_init__(self) -> None:
        self.steps = play_by_step(self.engine, self.items, self.clients)
        self.output_tokens = sum(item.output_tokens for item in self.items)  # those it will have at its end

    @property
    def tokens_so_far(self) -> int:
        return self.engine.records.totals["output_tokens"]

    @property
    def share(self) -> float:
        """How much of it has been played."""
        return self.tokens_so_far / self.output_tokens


def in_turns(runs: Sequence[TurnRun], watch: Callable[[int], object] = lambda tokens: None) -> None:
    """Play all to their ends, always a step of the run with the smallest share, so that they end together.

    watch: told after each step how many tokens came out.
    """
    going = list(runs)
    while going:
        run = min(going, key=lambda run: run.share)
        before = run.tokens_so_far
        with run.engine.clock.running():
            ended = next(run.steps, None) is None
        if ended:
            going.remove(run)
        watch(run.tokens_so_far - before)


def virtual_prediction(setting: Setting) -> Measurement:
    """Fit the cost model to chats whose rate goes up and down, then predict other loads, and run them for real."""
    threads = torch.get_num_threads()
    torch.set_num_threads(threads if setting.gpu else 1)  # one thread's time is all the time there is
    try:
        return predictions(setting, time.perf_counter if setting.gpu else time.thread_time)
    finally:
        torch.set_num_threads(threads)


def predictions(setting: Setting, read: Callable[[], float]) -> Measurement:
    """The same by a given clock (`TurnClock`)."""
    whole = setting.timed_model
    # a quick run takes few layers: of short steps there are more, in shorter turns
    model = first_layers(whole, setting.size(min(8, len(whole.layers)), len(whole.layers)))
    limits = {**LIMITS, "kv_memory": setting.size(1 << 28, 1 << 28, 3 << 30)}
    recorded, loads = make_runs(setting, model, read, limits)
    runs = [recorded, *(run for pair in loads.values() for run in pair)]
    with setting.progress("virtual_prediction", sum(run.output_tokens for run in runs)) as bar:
        in_turns(runs, bar.update)
    cost = fit(recorded.engine.records, model.config, native_format(model.dtype), model.weight_bytes)
    rows = [
        row | {"layers": len(model.layers)} for load, pair in loads.items()
        for row in error_rows(load, [figures(run.engine.records) for run in pair], replayed(cost, pair[0], limits))
    ]
    return measured("virtual_prediction", model, setting.timed_name, rows,
                    Spread.of([row["error_percent"] for row in rows]))


def make_runs(
    setting: Setting, model: Llama, read: Callable[[], float], limits: dict
) -> tuple[TurnRun, dict[str, tuple[TurnRun, TurnRun]]]:
    """The run to fit to, and the loads to predict, each to be played twice."""

    def run(items: Sequence[WorkItem], clients: int | None = None) -> TurnRun:
        engine = started(Engine(model, clock=TurnClock(read), **limits))
        engine.runs_ahead = False  # into another's turn
        return TurnRun(engine, items, clients)

    requests, scale = setting.size((80, 0.05), (120, 0.06), (200, 0.25))
    busy = run(chat(24, scale=scale), clients=8)
    in_turns([busy])
    rate = 24 / busy.engine.clock.now()  # requests a second that the device can do, about
    loads = {
        "6 clients, varied answers": (lognormal(0.8, requests, 24, 40, seed=setting.seed + 3), 6),
        "chats half as long again, a third of the rate":
            (chat(requests, 0.35 * rate, 1.5 * scale, seed=setting.seed + 7), None),
    }
    waves = swelling(chat(3 * requests, rate, scale, seed=setting.seed), waves=requests // 8)
    return run(waves), {load: (run(*load_of), run(*load_of)) for load, load_of in loads.items()}


def swelling(items: Sequence[WorkItem], waves: int = 1, slowest: float = 0.25, fastest: float = 2.0) -> list[WorkItem]:
    """The same open loop at a rate that grows from `slowest` to `fastest` times its own, in each of `waves` waves.

    So one run has steps of every size, from a single row to a full batch with a queue, early
    and late: a fit knows nothing of batches that it never saw.
    """
    gaps = np.diff([item.arrival for item in items], prepend=0.0)
    phase = np.arange(len(items)) * waves / len(items) % 1
    arrivals = (gaps / (slowest + (fastest - slowest) * phase)).cumsum().tolist()
    return [replace(item, arrival=arrival) for item, arrival in zip(items, arrivals, strict=True)]


def figures(records: Records) -> dict[str, float]:
    """What is compared: tokens per second over the whole run, and two medians."""
    found = metrics.summary(records)
    return {
        "tokens_per_s": found["output_tokens_per_s"], "ttft_p50_s": found["ttft_s"]["p50"],
        "itl_p50_s": found["itl_per_step_s"]["p50"],
    }


def replayed(cost: FittedCost, run: TurnRun, limits: dict) -> list[dict[str, float]]:
    """The figures that virtual time gives for a run, `REPLAYS` times."""
    found = []
    for seed in range(REPLAYS):
        engine = virtual_engine(replace(cost, draw=Random(seed)), **limits)
        play(engine, run.items, run.clients)
        found.append(figures(engine.records))
    return found


def error_rows(load: str, real: Sequence[dict[str, float]], predicted: Sequence[dict[str, float]]) -> list[dict]:
    """A row for each figure: by how many per cent the prediction is off, beside what it may be off by.

    Both are means over the runs given. apart_percent: how far apart the real ones lie.
    """
    rows = []
    for figure, allowed in ALLOWED.items():
        came, guessed = ([run[figure] for run in runs] for runs in (real, predicted))
        error = 100 * (mean(guessed) / mean(came) - 1)
        rows.append({"load": load, "figure": figure, "recorded": mean(came), "predicted": mean(guessed),
                     "error_percent": error, "allowed_percent": allowed, "within": abs(error) <= allowed,
                     "apart_percent": 100 * (max(came) - min(came)) / mean(came)})
    return rows
