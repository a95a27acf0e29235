"""What the engine itself costs: its time a step, its memory, and its speed in virtual time. No model computes."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Iterable

from minillm.course.experiments.common import NoForward
from minillm.fast.engine import Engine
from minillm.ladder.request import SamplingParams
from minillm.load.config import ModelConfig
from minillm.measure.measurement import Measurement, Spread, provenance
from minillm.measure.service import Service, simulate

PRESET = "smollm2-135m"
ANSWER = SamplingParams(max_tokens=64, ignore_eos=True)
PROMPT_TOKENS = 64
SERVED = (960, 1_920, 3_840)  # whole batches


def new_engine(max_batch: int) -> Engine:
    """An engine whose model computes nothing."""
    executor = NoForward(ModelConfig.preset(PRESET))
    return Engine(None, executor=executor, max_batch=max_batch, max_step_tokens=2048, records="summary")


def add_requests(engine: Engine, numbers: Iterable[int]) -> None:
    """Queue a request for each number, which its prompt repeats."""
    for number in numbers:
        engine.add([number % 1000] * PROMPT_TOKENS, ANSWER)


def overhead(steps: int = 200, warmups: int = 50, chats: int = 10_000) -> Measurement:
    """Milliseconds a step, by batch and queue; Python's memory by requests served; row-steps a second in virtual time.

    The prefix index is part of that memory. It grows until every block of the pool is known,
    here after about 400 requests, and no further.
    """
    rows, spread = [], None
    for batch in (32, 256):
        for queued in (100, 10_000):
            spread = step_seconds(batch, queued, steps, warmups)
            rows.append({"batch_rows": batch, "queued": queued, "step_ms": spread.median * 1e3,
                         "min_ms": spread.min * 1e3, "max_ms": spread.max * 1e3})
    peaks = memory_kb(32, SERVED)
    rows += [{"batch_rows": 32, "served": served, "memory_kb": kb} for served, kb in peaks.items()]
    rows.append(simulated(chats))
    return Measurement("overhead", provenance(f"none ({PRESET}'s shape)", "none", "cpu", seed=0, spread=spread), rows)


def step_seconds(batch: int, queued: int, steps: int, warmups: int) -> Spread:
    """Seconds of `Engine.step` with a full batch and `queued` requests waiting."""
    engine, seconds = new_engine(batch), []
    add_requests(engine, range(batch + queued))
    for _ in range(warmups + steps):
        start = time.perf_counter()
        events = engine.step()
        seconds.append(time.perf_counter() - start)
        add_requests(engine, range(sum(event.finished for event in events)))  # the queue keeps its length
    return Spread.of(seconds[warmups:], warmups)


def memory_kb(batch: int, after: tuple[int, ...]) -> dict[int, float]:
    """Python's own memory at its peak since the engine was made, by requests served, multiples of `batch`."""
    engine, peaks = new_engine(batch), {}
    tracemalloc.start()
    for served in range(batch, max(after) + 1, batch):
        add_requests(engine, range(served - batch, served))
        while engine.has_work:
            engine.step()
        if served in after:
            peaks[served] = tracemalloc.get_traced_memory()[1] / 1e3
    tracemalloc.stop()
    return peaks


def simulated(chats: int, repeats: int = 3) -> dict:
    """Row-steps (a request in a step) that one core runs in a second of virtual time's work, metrics included."""
    speeds = []
    for _ in range(repeats):
        start = time.process_time()
        row_steps = simulate("chat", Service(), requests=chats)["row_steps"]
        speeds.append(row_steps / (time.process_time() - start))
    spread = Spread.of(speeds)
    return {"simulated_chats": chats, "row_steps": row_steps, "row_steps_per_s": spread.median,
            "min_per_s": spread.min, "max_per_s": spread.max}
