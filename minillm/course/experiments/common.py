"""What several experiments share: runs of the engine with and without a model, timed decode steps, provenance."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np

from minillm.course.setting import Setting
from minillm.fast.engine import Engine
from minillm.fast.memory import native_format
from minillm.ladder.continuous import StepPlan
from minillm.ladder.quantized import kv_bytes_per_token
from minillm.ladder.records import Records
from minillm.ladder.request import SamplingParams
from minillm.load.config import ModelConfig
from minillm.measure.measurement import Measurement, Spread, provenance
from minillm.measure.roofline import StepShape, StepWork
from minillm.measure.workload import WorkItem, play, random_ids

WARM_UPS = 3  # decode steps
PROMPT_STEP_TOKENS = 16_384  # all prompts in one step, if they fit


def measured(experiment: str, model, name: str, rows: list[dict], spread: Spread | None, seed: int = 0) -> Measurement:
    """`Setting.measured` for another model than the timed one."""
    return Measurement(experiment, provenance(name, native_format(model.dtype), model.device, seed, spread), rows)


# -- the engine, with a model and without ---------------------------------------------------------


def warm_up(model, prompt_tokens: int = 32) -> None:
    """Let the allocator and the kernels see a prompt and a step before anything is timed."""
    prompts = [list(range(prompt_tokens))] * 2
    Engine(model, max_context=prompt_tokens + 16).generate(prompts, SamplingParams(max_tokens=3))


class NoForward:
    """An executor that computes nothing: every row that is due gets token 0. The scheduler cannot tell."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config

    def run(self, plan: StepPlan) -> list[list[int]]:
        return [[0] for row in plan.rows if row.samples]


def serve(model, items: Sequence[WorkItem], clients: int | None = None, **settings) -> Records:
    """The records of a new engine after a closed loop of `clients`; None gives it all items at the start."""
    longest = max(len(item.prompt_ids) + item.max_tokens for item in items)
    engine = Engine(model, **{"max_context": longest, "prefix_cache": False, **settings})
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


def decode_seconds(
    model, rows: int, context: int, steps: int, during: AbstractContextManager | None = None, **settings
) -> Spread:
    """Seconds of `steps` engine steps in which all `rows` decode, sampling and bookkeeping included.

    context: tokens of each row's prompt. during: entered for the timed steps alone. settings: the engine's.
    """
    budget = max(256, min(rows * context, PROMPT_STEP_TOKENS))
    prompt_steps = -(-rows * context // budget)  # the first rows decode in these already, and must not end
    answer = prompt_steps + WARM_UPS + steps
    blocks = rows * (-(-(context + answer) // 16) + 1)
    token_bytes = kv_bytes_per_token(model.config, settings.get("kv_format", native_format(model.dtype)))
    engine = Engine(model, max_batch=rows, max_context=context + answer, max_step_tokens=budget, prefix_cache=False,
                    kv_memory=blocks * 16 * token_bytes, **settings)
    for prompt in random_prompts(rows, context, model.config.vocab_size):
        engine.add(prompt, SamplingParams(max_tokens=answer, ignore_eos=True))
    for _ in range(prompt_steps + WARM_UPS):
        engine.step()
    with during or nullcontext():
        while engine.has_work:
            engine.step()
    full = [step.duration for step in engine.records.steps if step.decode_tokens == rows]
    return Spread.of(full[WARM_UPS:][:steps], warmups=WARM_UPS)


def prompt_seconds(model, rows: int, tokens: int, repeats: int) -> Spread:
    """Seconds of an engine's step that takes `rows` whole prompts and gives each its first token."""
    prompts = random_prompts(rows, tokens, model.config.vocab_size)
    engine = Engine(model, max_batch=rows, max_context=tokens + 1, max_step_tokens=rows * tokens, prefix_cache=False)
    for _ in range(1 + repeats):
        engine.generate(prompts, SamplingParams(max_tokens=1))
    return Spread.of([step.duration for step in engine.records.steps[1:]], warmups=1)


def timed_step(setting: Setting, phase: str, rows: int, tokens: int, repeats: int) -> tuple[StepWork, Spread]:
    """The least work of a step, and its seconds: a "prefill" of whole prompts, or a "decode" after such prompts."""
    model = setting.timed_model
    if phase == "prefill":
        return setting.work(StepShape.of([(0, tokens, 1)] * rows)), prompt_seconds(model, rows, tokens, repeats)
    shape = StepShape.decode([tokens + repeats // 2] * rows)  # each step adds a token
    return setting.work(shape), decode_seconds(model, rows, tokens, repeats)


def step_row(setting: Setting, work: StepWork, spread: Spread, tokens: int) -> dict:
    """A step's time, its tokens per second, and its shares of the device's limits."""
    setting.watch.compare(spread.readings)
    return {
        "step_ms": spread.median * 1e3, "min_ms": spread.min * 1e3, "max_ms": spread.max * 1e3,
        "tokens_per_s": tokens / spread.median, **setting.shares(work, spread.median),
    }
