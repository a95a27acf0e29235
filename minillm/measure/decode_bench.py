"""Decode steps by batch, each beside the least that the device could need, and beside transformers.

Every row of a batch has the same context, so a step is only weights and cache: what should
be near the memory's bandwidth at batch 1, and move towards the matmul rate as the batch grows.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch

from minillm.course.experiments.chapters import measured
from minillm.course.setting import Progress, Setting, silent
from minillm.fast.engine import Engine
from minillm.ladder.quantized import kv_bytes_per_token, native_format
from minillm.ladder.request import SamplingParams
from minillm.load.weights import load_model
from minillm.measure.measurement import Measurement, Spread
from minillm.measure.reference import load_reference
from minillm.measure.roofline import Ceilings, StepShape, least_work, measure_ceilings
from minillm.measure.workload import random_ids

WARM_UPS = 3
PROMPT_STEP_TOKENS = 16_384  # all prompts in one step, if they fit


def decode(setting: Setting) -> Measurement:
    """The experiment: the timed model, at batches and a context that suit the device."""
    runs = [
        decode_bench(setting.timed_name, (batch,), setting.size(32, 128, 1024), setting.size(4, 16, 64),
                     model=setting.timed_model, ceilings=setting.ceilings)
        for batch in setting.each("decode", setting.size((1, 8), (1, 8, 32), (1, 8, 32, 64, 128)))
    ]
    return replace(runs[0], rows=[row for run in runs for row in run.rows])


def decode_bench(
    model_name: str,
    batches: Sequence[int],
    context: int = 128,
    steps: int = 16,
    against: str | None = None,
    progress: Progress = silent,
    model=None,
    ceilings: Ceilings | None = None,
    **settings,
) -> Measurement:
    """Median of `steps` decode steps for each batch, `context` tokens before the first.

    mbu, mfu: the share of the measured bandwidth and matmul rate that the least work accounts
    for. against: "transformers" adds its `generate` on the same weights. settings: the engine's.
    """
    if min(batches) < 1 or context < 1 or steps < 1:
        raise ValueError(f"batches {list(batches)}, context {context} and steps {steps} must be at least 1")
    model = model or load_model(model_name)
    ceilings = ceilings or measure_ceilings(model.device, model.dtype)
    timers = {"minillm": lambda batch: our_steps(model, batch, context, steps, settings)}
    if against:
        reference = load_reference(model_name, model)
        timers["transformers, generate"] = lambda batch: their_steps(reference, batch, context, steps)
    rows, spreads = [], []
    with progress("decode", len(batches) * len(timers)) as bar:
        for batch in batches:
            work = least_work(
                model.config, settings.get("kv_format", native_format(model.dtype)),
                StepShape.decode([context + steps // 2] * batch), model.weight_bytes,
            )
            for engine, timer in timers.items():
                spread = timer(batch)
                rows.append(step_row(engine, batch, context, spread, ceilings, work))
                spreads.append(spread)
                bar.update(1)
    return measured("decode", model, model_name, rows, spreads[0])


def step_row(engine: str, batch: int, context: int, spread: Spread, ceilings: Ceilings, work) -> dict:
    """One row: the step, its limit, and the shares of the two ceilings."""
    seconds = spread.median
    return {
        "engine": engine, "batch": batch, "context_tokens": context, "step_ms": seconds * 1e3,
        "min_ms": spread.min * 1e3, "max_ms": spread.max * 1e3, "tokens_per_s": batch / seconds,
        "least_ms": ceilings.least_seconds(work) * 1e3,
        "mbu": ceilings.mbu(work, seconds), "mfu": ceilings.mfu(work, seconds),
    }


def our_steps(model, batch: int, context: int, steps: int, settings: dict) -> Spread:
    """Seconds of the engine's steps, sampling and bookkeeping in them."""
    step_tokens = max(256, min(batch * context, PROMPT_STEP_TOKENS))
    lead = -(-batch * context // step_tokens)  # steps of prompts: the first rows decode meanwhile, and must not end
    answer = lead + WARM_UPS + steps
    kv_format = settings.get("kv_format", native_format(model.dtype))
    blocks = batch * (-(-(context + answer) // 16) + 1)
    engine = Engine(
        model, max_batch=batch, max_context=context + answer, max_step_tokens=step_tokens, prefix_cache=False,
        kv_memory=blocks * 16 * kv_bytes_per_token(model.config, kv_format), **settings,
    )
    for prompt in prompts(model.config.vocab_size, batch, context):
        engine.add(prompt, SamplingParams(max_tokens=answer, ignore_eos=True))
    while engine.has_work:
        engine.step()
    full = [step.duration for step in engine.records.steps if step.decode_tokens == batch]
    return Spread.of(full[WARM_UPS:][:steps] or full, warmups=WARM_UPS)


@torch.inference_mode()
def their_steps(reference, batch: int, context: int, steps: int) -> Spread:
    """Seconds between the logits of one step of `generate` and those of the next."""
    ids = torch.tensor(prompts(reference.config.vocab_size, batch, context), device=reference.device)
    synchronize, times = getattr(torch, reference.device.type).synchronize, []

    def note_time(_ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        synchronize()
        times.append(time.perf_counter())
        return logits

    tokens = WARM_UPS + steps + 1
    reference.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens,
        do_sample=False, eos_token_id=None, pad_token_id=0, logits_processor=[note_time],
    )
    return Spread.of([after - before for before, after in pairwise(times)][WARM_UPS:], warmups=WARM_UPS)


def prompts(vocabulary: int, batch: int, tokens: int) -> list[list[int]]:
    """`batch` prompts of random ids, the same for everybody."""
    draw = np.random.default_rng(batch)
    return [[token % vocabulary for token in random_ids(draw, tokens, 1.0)] for _ in range(batch)]
