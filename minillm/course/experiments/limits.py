"""Experiments of part A: what bounds a decode step and a prompt."""

from __future__ import annotations

import copy
import threading
import time
from dataclasses import replace

import numpy as np
import torch

from minillm.course.experiments import chapters
from minillm.course.setting import Setting
from minillm.fast.engine import Engine
from minillm.ladder.quantized import native_format
from minillm.ladder.request import SamplingParams
from minillm.measure.measurement import Measurement, Spread, time_seconds
from minillm.measure.roofline import StepShape, least_work
from minillm.measure.workload import random_ids
from minillm.model.llama import Llama

# -- a decode step --------------------------------------------------------------------------------


def decode_step(setting: Setting) -> Measurement:
    """One row's step, of the model and of its first half, quarter and eighth of layers: time against bytes read."""
    model, context, rows, spreads = setting.timed_model, 32, [], []
    depth, kv_format = model.config.num_hidden_layers, native_format(model.dtype)
    for layers in setting.each("decode_step", sorted({max(1, depth // part) for part in (1, 2, 4, 8)}, reverse=True)):
        cut = first_layers(model, layers)
        step = chapters.one_cached_step(cut, context)
        spread = time_seconds(step, model.device, warmups=3, repeats=setting.size(7, 21))
        work = least_work(cut.config, kv_format, StepShape.decode([context]), cut.weight_bytes)
        rows.append({
            "layers": layers, "weight_mb": cut.weight_bytes / 1e6,
            "read_ms": work.bytes / setting.ceilings.bytes_per_s * 1e3,
            "step_ms": spread.median * 1e3, "min_ms": spread.min * 1e3, "max_ms": spread.max * 1e3,
            "mbu": setting.ceilings.mbu(work, spread.median), "mfu": setting.ceilings.mfu(work, spread.median),
        })
        spreads.append(spread)
    return chapters.measured("decode_step", model, setting.timed_name, rows, spreads[0])


def first_layers(model: Llama, layers: int) -> Llama:
    """The same model without its later layers, sharing the weights."""
    cut = copy.copy(model)
    cut.config, cut.layers = replace(model.config, num_hidden_layers=layers), model.layers[:layers]
    return cut


def cost_by_length(setting: Setting) -> Measurement:
    """What the next token costs behind a text of so many, recomputed and cached."""
    lengths = setting.size((4, 16, 64, 256, 1024), (4, 8, 16, 64, 256, 512, 1024, 2048, 4096, 8192))
    model, name = setting.timed_model, setting.timed_name
    lengths = [length for length in lengths if length <= model.config.max_position_embeddings]
    found = chapters.cost_by_length(
        model, name, setting.each("cost_by_length", lengths), setting.size(256, 1024, max(lengths))
    )
    for row in found.rows:
        row |= setting.shares(StepShape.decode([row["context_tokens"]]), row["cached_ms"] / 1e3)
    return found


# -- prompts --------------------------------------------------------------------------------------


def prefill(setting: Setting) -> Measurement:
    """Prompts by length and number, each lot in one step; and decode steps of as many rows, to compare."""
    model, together = setting.timed_model, 8
    lengths = setting.size((32, 128, 512), (32, 128, 512, 1024), (32, 128, 512, 2048, 8000))
    each = setting.size(64, 128, 512)
    chapters.warm_up(model)
    rows, spreads = [], []
    for number, tokens in setting.each("prefill", [*((1, n) for n in lengths), (1, each), (2, each), (together, each)]):
        spread = prompt_seconds(model, number, tokens, setting.size(2, 3))
        shape = StepShape.of([(0, tokens, 1)] * number)
        rows.append({"phase": "prefill", "rows": number, "tokens_each": tokens, "step_ms": spread.median * 1e3,
                     "tokens_per_s": number * tokens / spread.median, **setting.shares(shape, spread.median)})
        spreads.append(spread)
    for row in chapters.batch_curve(model, setting.timed_name, (1, 2, together), prompt_tokens=each, steps=8).rows:
        shape = StepShape.decode([each + 5] * row["rows"])
        rows.append({"phase": "decode", "rows": row["rows"], "tokens_each": 1, "step_ms": row["step_ms"],
                     "tokens_per_s": row["tokens_per_s"], **setting.shares(shape, row["step_ms"] / 1e3)})
    return chapters.measured("prefill", model, setting.timed_name, rows, spreads[0])


def prompt_seconds(model: Llama, number: int, tokens: int, repeats: int) -> Spread:
    """Seconds of a step that takes so many whole prompts and gives each its first token."""
    draw = np.random.default_rng(number * tokens)
    prompts = [random_ids(draw, tokens, 1.0) for _ in range(number)]
    engine = Engine(model, max_batch=number, max_context=tokens + 1, max_step_tokens=number * tokens,
                    prefix_cache=False)
    engine.generate(prompts, SamplingParams(max_tokens=1))
    for _ in range(repeats):
        engine.generate(prompts, SamplingParams(max_tokens=1))
    return Spread.of([step.duration for step in engine.records.steps[1:]], warmups=1)


# -- utilisation ----------------------------------------------------------------------------------


def utilisation(setting: Setting) -> Measurement:
    """What the usual gauge reads at batch 1 and at 64, beside what was made and what the limits allowed."""
    model, rows = setting.timed_model, []
    gauge = GpuGauge if setting.gpu else ProcessorGauge
    steps = setting.size(10, 40, 300)
    for number in setting.each("utilisation", (1, 64)):
        engine = Engine(model, max_batch=number, max_context=steps + 20, max_step_tokens=max(256, 16 * number))
        draw = np.random.default_rng(number)
        for _ in range(number):
            engine.add(random_ids(draw, 16, 1.0), SamplingParams(max_tokens=steps + 1, ignore_eos=True))
        engine.step()  # the prompts
        with gauge() as reading:
            while engine.has_work:
                engine.step()
        seconds = sum(step.duration for step in engine.records.steps[1:]) / steps
        rows.append({
            "rows": number, "gauge": reading.name, "busy_percent": reading.percent, "step_ms": seconds * 1e3,
            "tokens_per_s": number / seconds,
            **setting.shares(StepShape.decode([16 + steps // 2] * number), seconds),
        })
    speeds = Spread.of([row["tokens_per_s"] for row in rows], warmups=1)
    return chapters.measured("utilisation", model, setting.timed_name, rows, speeds)


class ProcessorGauge:
    """Processor time of this process as a share of what its threads could have used, in per cent."""

    name = "process CPU time"

    def __enter__(self) -> ProcessorGauge:
        self.start = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *exc) -> None:
        wall, used = time.perf_counter() - self.start[0], time.process_time() - self.start[1]
        self.percent = 100 * used / wall / torch.get_num_threads()


class GpuGauge:
    """What NVML, and so nvidia-smi, reports as GPU utilisation, sampled ten times a second: the mean, in per cent.

    None where torch cannot reach NVML (its Python package is nvidia-ml-py).
    """

    name = "NVML utilisation"

    def __enter__(self) -> GpuGauge:
        self.samples: list[float] = []
        self.done = threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()
        return self

    def _watch(self) -> None:
        while not self.done.wait(0.1):
            try:
                self.samples.append(torch.cuda.utilization())
            except (ModuleNotFoundError, RuntimeError):
                return

    def __exit__(self, *exc) -> None:
        self.done.set()
        self.thread.join()
        self.percent = sum(self.samples) / len(self.samples) if self.samples else None
