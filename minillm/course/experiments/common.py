"""What several experiments share: runs of the engine with and without a model, steps timed in turns, provenance.

The speed of a shared machine moves by tens of per cent within minutes. So what decides something is measured in
turns: every set-up once, then every set-up again. A row has the median of its turns, `<column>_min` and
`<column>_max` of them, and `turns`, how many there were.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from statistics import median
from typing import TypeVar
from weakref import WeakKeyDictionary

import numpy as np

from minillm.course.setting import Setting
from minillm.fast.engine import Engine
from minillm.fast.memory import native_format
from minillm.ladder.continuous import StepPlan
from minillm.ladder.quantized import kv_bytes_per_token
from minillm.ladder.records import Records
from minillm.ladder.request import SamplingParams
from minillm.load.config import ModelConfig
from minillm.measure.bench import started
from minillm.measure.measurement import Measurement, Spread, provenance
from minillm.measure.roofline import Ceilings, StepShape, StepWork
from minillm.measure.workload import WorkItem, play, random_ids

Key = TypeVar("Key", bound=Hashable)
WARM_UPS = 3  # decode steps
PROMPT_STEP_TOKENS = 16_384  # all prompts in one step, if they fit


def measured(experiment: str, model, name: str, rows: list[dict], spread: Spread | None, seed: int = 0) -> Measurement:
    """`Setting.measured` for another model than the timed one."""
    return Measurement(experiment, provenance(name, native_format(model.dtype), model.device, seed, spread), rows)


# -- the engine, with a model and without ---------------------------------------------------------


warm: WeakKeyDictionary[object, int] = WeakKeyDictionary()  # models, and the longest prompt that each has seen


def warm_up(model, prompt_tokens: int = 32) -> None:
    """Let the allocator and the kernels see a prompt and a step before anything is timed; once for each model."""
    if warm.get(model, 0) < prompt_tokens:
        prompts = [list(range(prompt_tokens))] * 2
        Engine(model, max_context=prompt_tokens + 16).generate(prompts, SamplingParams(max_tokens=3))
        warm[model] = prompt_tokens


class NoForward:
    """An executor that computes nothing: every row that is due gets token 0. The scheduler cannot tell."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config

    def run(self, plan: StepPlan) -> list[list[int]]:
        return [[0] for row in plan.rows if row.samples]


def engine_for(model, items: Sequence[WorkItem], **settings) -> Engine:
    """A new engine without prefix sharing, whose context holds the longest item; nothing is left to record in a run."""
    longest = max(len(item.prompt_ids) + item.max_tokens for item in items)
    return started(Engine(model, **{"max_context": longest, "prefix_cache": False, **settings}))


def serve(model, items: Sequence[WorkItem], clients: int | None = None, **settings) -> Records:
    """The records of a new engine after a closed loop of `clients`; None gives it all items at the start."""
    engine = engine_for(model, items, **settings)
    play(engine, items, clients or len(items))
    return engine.records


def count(config: ModelConfig, items: Sequence[WorkItem], **settings) -> Records:
    """`serve` without a forward: scheduler and memory are the real ones, so counts are exact; times mean nothing."""
    return serve(None, items, executor=NoForward(config), **{"kv_format": "fp32", **settings})


# -- steps ----------------------------------------------------------------------------------------


def random_prompts(number: int, tokens: int, vocabulary: int) -> list[list[int]]:
    """`number` prompts of random ids, the same at every call."""
    draw = np.random.default_rng(number)
    return [[token % vocabulary for token in random_ids(draw, tokens, 1.0)] for _ in range(number)]


class Decoding:
    """An engine in which `rows` requests decode side by side, ready to be timed a few steps at a time.

    context: tokens of each row's prompt. steps: how many the rows can run from here on. settings: the engine's.
    """

    def __init__(self, model, rows: int, context: int, steps: int, **settings) -> None:
        budget = max(256, min(rows * context, PROMPT_STEP_TOKENS))
        prompt_steps = -(-rows * context // budget) + 1  # the first rows decode in these already, and must not end
        answer = prompt_steps + WARM_UPS + steps + 1  # on a GPU one more is under way
        blocks = rows * (-(-(context + answer) // 16) + 1)
        token_bytes = kv_bytes_per_token(model.config, settings.get("kv_format", native_format(model.dtype)))
        self.engine = Engine(model, max_batch=rows, max_context=context + answer, max_step_tokens=budget,
                             prefix_cache=False, kv_memory=blocks * 16 * token_bytes, **settings)
        for prompt in random_prompts(rows, context, model.config.vocab_size):
            self.engine.add(prompt, SamplingParams(max_tokens=answer, ignore_eos=True))
        done = self.engine.records.steps
        while sum(step.decode_tokens == rows for step in done) < WARM_UPS - 1:
            self.engine.step()

    def seconds(self, steps: int) -> list[float]:
        """Seconds of each of `steps` steps, sampling and bookkeeping included.

        One more is run first and not counted: it comes after another set-up's turn, and on a GPU it was launched then.
        """
        done = len(self.engine.records.steps)
        for _ in range(1 + steps):
            self.engine.step()
        return [step.duration for step in self.engine.records.steps[done + 1 :]]


def decode_seconds(model, rows: int, context: int, steps: int, **settings) -> Spread:
    """Seconds of `steps` engine steps in which all `rows` decode; arguments as of `Decoding`."""
    return Spread.of(Decoding(model, rows, context, steps, **settings).seconds(steps), warmups=WARM_UPS)


@dataclass(frozen=True)
class TimedStep:
    """A step to be timed: the least it must do, the tokens it gives, and what runs it: the seconds of each time."""

    work: StepWork
    tokens: int
    seconds: Callable[[], Sequence[float]]


def timed_step(setting: Setting, phase: str, rows: int, tokens: int, repeats: int, turns: int = 1) -> TimedStep:
    """A "prefill" of `rows` whole prompts, each of which gets its first token, or a "decode" after such prompts.

    repeats: steps each time that it is run, which it can be `turns` times. It is warm already.
    """
    model = setting.timed_model
    if phase == "decode":
        steps = turns * (1 + repeats)  # each adds a token
        decoding = Decoding(model, rows, tokens, steps)
        shape = StepShape.decode([tokens + steps // 2] * rows)
        return TimedStep(setting.work(shape), rows, lambda: decoding.seconds(repeats))
    prompts = random_prompts(rows, tokens, model.config.vocab_size)
    engine = Engine(model, max_batch=rows, max_context=tokens + 1, max_step_tokens=rows * tokens, prefix_cache=False)

    def seconds(times: int = repeats) -> list[float]:
        for _ in range(times):
            engine.generate(prompts, SamplingParams(max_tokens=1))
        return [step.duration for step in engine.records.steps[-times:]]

    seconds(1)
    return TimedStep(setting.work(StepShape.of([(0, tokens, 1)] * rows)), rows * tokens, seconds)


def step_row(setting: Setting, work: StepWork, spread: Spread, tokens: int) -> dict:
    """A step's time, its tokens per second, and its shares of the device's limits."""
    setting.watch.compare(spread.readings)
    return {
        "step_ms": spread.median * 1e3, "min_ms": spread.min * 1e3, "max_ms": spread.max * 1e3,
        "tokens_per_s": tokens / spread.median, **setting.shares(work, spread.median),
    }


# -- turns ----------------------------------------------------------------------------------------


def spread_columns(column: str, values: Sequence[float] | None) -> dict:
    """A column's median, and its lowest and highest value under names of their own; all None of None."""
    of = {"": median, "_min": min, "_max": max}
    return {f"{column}{end}": function(values) if values else None for end, function in of.items()}


@dataclass
class Turns:
    """What the turns of one step found: the seconds of its readings in each, and the device's limits in that turn."""

    step: TimedStep
    readings: list[Sequence[float]] = field(default_factory=list)
    limits: list[Ceilings] = field(default_factory=list)

    @property
    def seconds(self) -> list[float]:
        """The median of each turn."""
        return [median(readings) for readings in self.readings]

    @property
    def spread(self) -> Spread:
        return Spread.of(self.seconds, warmups=1)

    def shares(self) -> dict:
        """The least time, and the shares of the limits, of which each turn has its own."""
        turns, work = list(zip(self.seconds, self.limits, strict=True)), self.step.work
        return {
            "least_ms": median(limits.least_seconds(work) * 1e3 for limits in self.limits),
            **spread_columns("mbu", [limits.mbu(work, seconds) for seconds, limits in turns]),
            **spread_columns("mfu", [limits.mfu(work, seconds) for seconds, limits in turns]),
        }

    def columns(self) -> dict:
        """Step time, tokens per second and shares of the limits; `min_ms` and `max_ms` are of single readings."""
        every = list(chain(*self.readings))
        return {
            **spread_columns("step_ms", [seconds * 1e3 for seconds in self.seconds]),
            "min_ms": min(every) * 1e3, "max_ms": max(every) * 1e3,
            **spread_columns("tokens_per_s", [self.step.tokens / seconds for seconds in self.seconds]),
            **self.shares(), "turns": len(self.readings),
        }


def time_in_turns(setting: Setting, label: str, steps: Mapping[Key, TimedStep], turns: int) -> dict[Key, Turns]:
    """Each step once a turn, after the device's limits have been measured; every other turn runs them backwards, so
    that a steady drift favours none. Where the budget ends it, the later ones have fewer turns or are not there."""
    found = {key: Turns(step) for key, step in steps.items()}
    keys, limits = list(steps), []
    order = [(turn, key) for turn in range(turns) for key in (reversed(keys) if turn % 2 else keys)]
    for turn, key in setting.each(label, order):
        if turn == len(limits):
            limits.append(setting.measure_ceilings())
        found[key].readings.append(steps[key].seconds())
        found[key].limits.append(limits[turn])
    for each in found.values():
        setting.watch.compare(list(chain(*each.readings)))
    return {key: each for key, each in found.items() if each.readings}
