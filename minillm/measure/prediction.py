"""Virtual time put to the test: fitted to one recorded run, it predicts others of the same machine."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch

from minillm.ladder.engine import Clock, Engine, WallClock
from minillm.ladder.quantized import native_format
from minillm.measure import chapters, metrics
from minillm.measure.measurement import Measurement, Spread
from minillm.measure.setting import Setting
from minillm.measure.virtual import fit, virtual_engine
from minillm.measure.workload import WorkItem, chat, lognormal, play

ALLOWED = {"tokens_per_s": 5.0, "ttft_p50_s": 10.0, "itl_p50_s": 10.0}  # per cent
LIMITS = {"max_batch": 16, "max_step_tokens": 128, "max_context": 4096, "prefix_cache": False}


class ProcessorClock:
    """This thread's time on the processor, so that neighbours on the machine hardly show; waiting is skipped."""

    def __init__(self) -> None:
        self.skipped = -time.thread_time()

    def now(self) -> float:
        return time.thread_time() + self.skipped

    def wait_until(self, moment: float) -> None:
        self.skipped += max(0.0, moment - self.now())


@contextmanager
def clock_for(gpu: bool) -> Iterator[type[Clock]]:
    """The wall clock for a GPU; for a CPU the processor's, and one thread, whose time is then all the time there is."""
    threads = torch.get_num_threads()
    torch.set_num_threads(threads if gpu else 1)
    try:
        yield WallClock if gpu else ProcessorClock
    finally:
        torch.set_num_threads(threads)


def virtual_prediction(setting: Setting) -> Measurement:
    """Fit the cost model to chats that come ever faster, then replay other loads, and run them for real."""
    with clock_for(setting.gpu) as clock:
        return predictions(setting, clock)


def predictions(setting: Setting, clock: type[Clock]) -> Measurement:
    """The same by a given clock."""
    model, kv_format = setting.timed_model, native_format(setting.timed_model.dtype)
    requests, scale = setting.size((16, 0.04), (60, 0.06), (200, 0.25))
    limits = {**LIMITS, "kv_memory": setting.size(1 << 28, 1 << 28, 8 << 30)}

    def real(items: Sequence[WorkItem], clients: int | None = None):
        engine = Engine(model, clock=clock(), **limits)
        play(engine, items, clients)
        return engine.records

    busy = real(chat(24, scale=scale), clients=8)
    rate = 24 / (busy.ended - busy.began)  # requests a second that the device can do, about
    recorded = real(swelling(chat(requests, rate, scale, seed=setting.seed)))
    cost = fit(recorded, model.config, kv_format, model.weight_bytes)
    loads = {
        "6 clients, varied answers": (lognormal(0.8, requests, 24, 40, seed=setting.seed + 3), 6),
        "chats half as long again, half the rate":
            (chat(requests, 0.35 * rate, 1.5 * scale, seed=setting.seed + 7), None),
    }
    rows = []
    for load, (items, clients) in setting.each("virtual_prediction", loads.items()):
        engine = virtual_engine(cost, **limits)
        play(engine, items, clients)
        rows += error_rows(load, figures(real(items, clients)), figures(engine.records))
    return chapters.measured("virtual_prediction", model, setting.timed_name, rows,
                             Spread.of([row["error_percent"] for row in rows]))


def swelling(items: Sequence[WorkItem], slowest: float = 0.4, fastest: float = 2.0) -> list[WorkItem]:
    """The same open loop at a rate that grows from `slowest` to `fastest` times its own.

    So one run has steps of every size, from a single row to a full batch that a queue stands
    behind: a fit knows nothing of batches that it never saw.
    """
    gaps = np.diff([item.arrival for item in items], prepend=0.0)
    arrivals = (gaps / np.linspace(slowest, fastest, len(items))).cumsum().tolist()
    return [replace(item, arrival=arrival) for item, arrival in zip(items, arrivals, strict=True)]


def figures(records) -> dict[str, float]:
    """What is compared: tokens per second over the whole run, and two medians."""
    found = metrics.summary(records)
    return {
        "tokens_per_s": found["output_tokens_per_s"], "ttft_p50_s": found["ttft_s"]["p50"],
        "itl_p50_s": found["itl_per_step_s"]["p50"],
    }


def error_rows(load: str, recorded: dict[str, float], predicted: dict[str, float]) -> list[dict]:
    """A row for each figure: by how many per cent the prediction is off, beside what it may be off by."""
    rows = []
    for figure, allowed in ALLOWED.items():
        error = 100 * (predicted[figure] / recorded[figure] - 1)
        rows.append({"load": load, "figure": figure, "recorded": recorded[figure], "predicted": predicted[figure],
                     "error_percent": error, "allowed_percent": allowed, "within": abs(error) <= allowed})
    return rows
