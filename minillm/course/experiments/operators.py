"""Where an engine's step spends its time, by what it does: linears, attention, gathering, small operators, Python.

A stopwatch is put around each part of a running engine. Parts lie inside each other (a step runs the executor, which
runs the model, whose layers attend, which reads the cache): each is given the time in which nothing inside it ran.
"""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from statistics import median
from typing import Any

from minillm import SamplingParams
from minillm.course.experiments.common import random_prompts, spread_columns, warm_up
from minillm.course.setting import NotHere, Setting, timed
from minillm.fast.attention import FastAttention
from minillm.fast.engine import Engine
from minillm.fast.model import FastLlama
from minillm.measure.measurement import Measurement, Spread
from minillm.measure.roofline import StepShape

PARTS = {
    "linears": "products with the layers' matrices", "head": "the last product, to logits",
    "attention": "scores, softmax, sums", "gather": "keys and values read from their slots",
    "store": "new keys and values written",
    "small operators": "norms, rotation, gate, sums, embedding", "tables": "slots, masks, groups of rows",
    "sampling": "token lists in, ids out", "scheduler": "the plan, the books",
}
DECODE_CONTEXT = 64
TABLES = ({"phase": "phase", "tokens": "tokens", "part": "part", "ms": "ms", "share": "share", "what": "of"},)


class Stopwatch:
    """Seconds by part; of parts within each other the innermost one's clock runs."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.running: list[str] = []
        self.last = 0.0

    def tick(self) -> None:
        now = time.perf_counter()
        if self.running:
            self.seconds[self.running[-1]] += now - self.last
        self.last = now

    def around(self, part: str, function: Callable) -> Callable:
        """The same function, on this part's clock."""

        def timed_function(*args: Any, **kwargs: Any) -> Any:
            self.tick()
            self.running.append(part)
            try:
                return function(*args, **kwargs)
            finally:
                self.tick()
                self.running.pop()

        return timed_function


def watched_model(model: FastLlama, watch: Stopwatch) -> FastLlama:
    """The same weights, with a clock on each product and on the pass as a whole."""
    watched = copy.copy(model)
    watched.layers = [copy.copy(layer) for layer in model.layers]
    for layer in watched.layers:
        for name in layer.LINEARS:
            setattr(layer, name, watch.around("linears", getattr(layer, name)))
    watched.head = watch.around("head", model.head)
    watched.forward = watch.around("small operators", watched.forward)
    return watched


def watched_engine(model: FastLlama, watch: Stopwatch, **settings) -> Engine:
    """An engine on that model, each of whose parts has a clock."""
    engine = Engine(model, prefix_cache=False, **settings)
    executor, storage = engine.executor, engine.executor.storage

    class Watched(FastAttention):
        __init__ = watch.around("tables", FastAttention.__init__)
        attend = watch.around("attention", FastAttention.attend)

        @cached_property
        def groups(self):
            return watch.around("tables", FastAttention.groups.func)(self)

    executor.model, executor.attention = watched_model(model, watch), Watched
    storage.read, storage.write = watch.around("gather", storage.read), watch.around("store", storage.write)
    executor.run = watch.around("sampling", executor.run)
    engine.step = watch.around("scheduler", engine.step)
    return engine


@timed
def operators(setting: Setting) -> Measurement:
    """Decode steps and prompts, in turns: milliseconds by part, and what the products reach of the limits."""
    if setting.gpu:
        raise NotHere("on a GPU a launch returns before the work is done: a profiler is needed there")
    model, cases = setting.timed_model, [("decode", rows) for rows in (1, 8, 24)] + [("prefill", 64), ("prefill", 256)]
    warm_up(model)
    turns = [[parts_of(setting, model, phase, size) for phase, size in cases]
             for _ in setting.each("operators", range(3))]
    rows = [row for i, (phase, size) in enumerate(cases)
            for row in part_rows(setting, model, phase, size, [turn[i] for turn in turns])]
    return setting.measured("operators", rows, Spread.of([sum(turn[0].values()) for turn in turns], warmups=1))


def parts_of(setting: Setting, model: FastLlama, phase: str, size: int) -> dict[str, float]:
    """Seconds of one step by part: a decode step of `size` rows, or the prefill of `size` tokens."""
    watch, steps = Stopwatch(), setting.size(4, 12)
    rows, prompt = (size, DECODE_CONTEXT) if phase == "decode" else (1, size)
    engine = watched_engine(model, watch, max_batch=rows, max_context=prompt + steps + 8,
                            max_step_tokens=max(256, rows * prompt))
    prompts = random_prompts(rows, prompt, model.config.vocab_size)
    params = SamplingParams(max_tokens=steps + 4 if phase == "decode" else 1, ignore_eos=True)

    def step(times: int) -> None:
        for _ in range(times):
            for ids in prompts if phase == "prefill" or not engine.unfinished else []:
                engine.add(ids, params)
            engine.step()

    step(2)  # the rows' prompts, and a step that warms up
    watch.seconds.clear()
    step(steps)
    return {part: watch.seconds[part] / steps for part in PARTS}


def part_rows(setting: Setting, model: FastLlama, phase: str, size: int, turns: Sequence[Mapping]) -> list[dict]:
    """A row for each part of a step. What the linears and the head reach of the limits, together and in their time."""
    shape = StepShape.decode([DECODE_CONTEXT] * size) if phase == "decode" else StepShape.of([(0, size, 1)])
    medians = {part: median(turn[part] for turn in turns) for part in PARTS}
    products = median(turn["linears"] + turn["head"] for turn in turns)
    matrices = setting.work(replace(shape, stored=0, pairs=0))  # less attention: the weights, and their FLOPs
    return [
        {
            "phase": phase, "tokens": size, "part": part, "what": PARTS[part],
            **spread_columns("ms", [turn[part] * 1e3 for turn in turns]),
            "share": medians[part] / sum(medians.values()), "step_ms": sum(medians.values()) * 1e3,
            "least_ms": setting.ceilings.least_seconds(setting.work(shape)) * 1e3,
            "matrices_mbu": setting.ceilings.mbu(matrices, products),
            "matrices_mfu": setting.ceilings.mfu(matrices, products), "turns": len(turns),
        }
        for part in PARTS
    ]
