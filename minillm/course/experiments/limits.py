"""Ledger part A: what bounds a decode step and a prompt. Notebooks 00 and 01, and the gauges of 07."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from statistics import median

import torch

from minillm.course.experiments.common import (
    TimedStep,
    Turns,
    spread_columns,
    step_row,
    time_in_turns,
    timed_step,
)
from minillm.course.setting import Setting, timed
from minillm.fast.model import FastLlama
from minillm.ladder.decode import NoCache, SequenceCache
from minillm.ladder.records import Records
from minillm.load.config import ModelConfig
from minillm.load.weights import RandomTensors, make_model
from minillm.measure import metrics
from minillm.measure.measurement import Measurement, Spread, time_seconds
from minillm.measure.roofline import Ceilings, StepShape, StepWork, least_work, shape_of
from minillm.model.llama import Llama

# -- steps beside the roofline --------------------------------------------------------------------


@timed
def roofline_steps(setting: Setting) -> Measurement:
    """Decode steps by rows and prefills by tokens, each beside the least time that the limits allow."""
    rows, spreads, steps = [], [], setting.size(8, 12)
    cases = [("decode", n, 64 - steps // 2, steps) for n in setting.size((1, 8), (1, 2, 8, 32), (1, 8, 32, 128))]
    cases += [("prefill", 1, n, 3) for n in setting.size((16, 64), (16, 64, 256, 512), (64, 256, 1024, 4096))]
    for phase, number, tokens, repeats in setting.each("roofline_steps", cases):
        step = timed_step(setting, phase, number, tokens, repeats)
        spread = Spread.of(step.seconds(), warmups=1)
        rows.append({"kind": phase, "tokens": step.tokens, **roofline_row(setting, step.work, spread, step.tokens)})
        spreads.append(spread)
    bandwidth = setting.ceilings.bytes_per_s / 1e9
    return setting.measured("roofline_steps", rows, spreads[0], bandwidth_gb_per_s=bandwidth)


def roofline_row(setting: Setting, work: StepWork, spread: Spread, tokens: int) -> dict:
    """A step's work, its time, and its shares of both limits."""
    return {
        "read_mb": work.bytes / 1e6, "gflop": work.flops / 1e9, "flop_per_byte": work.flops / work.bytes,
        **step_row(setting, work, spread, tokens),
        "gflop_per_s": work.flops / spread.median / 1e9, "bound_by": setting.ceilings.bound_by(work),
    }


@timed
def mbu_by_width(setting: Setting) -> Measurement:
    """One decoded token, by the model and by ever narrower ones with random weights: as many calls, less work.

    What is left when the work is almost nothing is the cost of the calls themselves.
    """
    model, rows, spreads = setting.timed_model, [], []
    for divisor in setting.each("mbu_by_width", setting.size((1, 4), (1, 2, 4, 8))):
        slim = narrowed(model, divisor) if divisor > 1 else model
        spread = time_seconds(one_cached_step(slim, 16), model.device, warmups=3, repeats=7)
        row = roofline_row(setting, setting.work(StepShape.decode([16]), slim), spread, tokens=1)
        rows.append({"width": slim.config.hidden_size, **row, "lost_ms": row["step_ms"] - row["least_ms"]})
        spreads.append(spread)
    return setting.measured("mbu_by_width", rows, spreads[0])


def narrowed(model: FastLlama, divisor: int) -> FastLlama:
    """Random weights for as many layers and heads, every width divided. ValueError if one is not divisible."""
    config = model.config
    if config.head_dim % (2 * divisor) or config.hidden_size % divisor or config.intermediate_size % divisor:
        raise ValueError(f"widths of {config.hidden_size}, {config.intermediate_size}, {config.head_dim} by {divisor}")
    config = replace(
        config, hidden_size=config.hidden_size // divisor, intermediate_size=config.intermediate_size // divisor,
        head_dim=config.head_dim // divisor, vocab_size=config.vocab_size // divisor,
    )
    return make_model(config, RandomTensors(config, model.device, model.dtype), model.device, model.dtype)


@timed
def decode_step(setting: Setting) -> Measurement:
    """One row's step, of the model and of its first half, quarter and eighth of layers: time against bytes read."""
    model, context = setting.timed_model, 32
    depth = model.config.num_hidden_layers
    cuts = {n: first_layers(model, n) for n in sorted({max(1, depth // part) for part in (1, 2, 4, 8)}, reverse=True)}
    work = {layers: setting.work(StepShape.decode([context]), cut) for layers, cut in cuts.items()}
    steps = {layers: model_step(work[layers], one_cached_step(cut, context), model, setting.size(3, 7))
             for layers, cut in cuts.items()}
    found = time_in_turns(setting, "decode_step", steps, turns=5)
    rows = [{"layers": layers, "weight_mb": cuts[layers].weight_bytes / 1e6,
             "read_ms": median(work[layers].bytes / limits.bytes_per_s * 1e3 for limits in turns.limits),
             **turns.columns()} for layers, turns in found.items()]
    return setting.measured("decode_step", rows, found[depth].spread)


def model_step(
    work: StepWork, step: Callable[[], object], model: Llama, repeats: int = 3, warmups: int = 1
) -> TimedStep:
    """A step of one token that calls the model without an engine: `repeats` times, after `warmups` not counted."""
    return TimedStep(work, 1, lambda: time_seconds(step, model.device, warmups, repeats).readings)


def first_layers(model: FastLlama, layers: int) -> FastLlama:
    """The same model without its later layers, sharing the weights."""
    cut = copy.copy(model)
    cut.config, cut.layers = replace(model.config, num_hidden_layers=layers), model.layers[:layers]
    return cut


# -- the length of the text -----------------------------------------------------------------------


@timed
def cost_by_length(setting: Setting) -> Measurement:
    """What the next token costs after texts of many lengths: all of the text computed again, and with a cache.

    Computing all of it is also what the prefill of such a prompt costs. The tokens are
    arbitrary: the arithmetic does not depend on which they are.
    """
    model = setting.timed_model
    lengths = setting.size((4, 16, 64, 128, 512, 2048), (4, 8, 16, 64, 256, 512, 1024, 2048, 4096, 8192))
    recompute_up_to = setting.size(512, 1024, 8192)
    steps = {}
    for length in (length for length in lengths if length <= model.config.max_position_embeddings):
        work = setting.work(StepShape.decode([length]))
        steps[length, "cached"] = cached_step(model, work, length)
        if length <= recompute_up_to:
            again = one_recomputing_step(model, length)
            again()  # a long text's turn has no warm-up of its own
            short = length <= 64
            steps[length, "again"] = model_step(work, again, model, repeats=3 if short else 1, warmups=short)
    found = time_in_turns(setting, "cost_by_length", steps, turns=setting.size(3, 5))
    rows = [length_row(length, turns, found.get((length, "again"))) for (length, how), turns in found.items()
            if how == "cached"]
    return setting.measured("cost_by_length", rows, next(iter(found.values())).spread)


def cached_step(model: Llama, work: StepWork, length: int) -> TimedStep:
    """A step after `length` - 1 stored tokens. Its cache is made for each turn: those of all lengths may not fit."""
    return TimedStep(work, 1, lambda: model_step(work, one_cached_step(model, length), model).seconds())


def length_row(length: int, cached: Turns, again: Turns | None) -> dict:
    """A text's length, and what its next token takes with a cache and, where that was measured, without."""
    return {
        "context_tokens": length,
        **spread_columns("recompute_ms", again and [seconds * 1e3 for seconds in again.seconds]),
        **spread_columns("cached_ms", [seconds * 1e3 for seconds in cached.seconds]),
        "read_mb": cached.step.work.bytes / 1e6, **cached.shares(),
        "turns": min(len(each.readings) for each in (cached, again) if each),
    }


def one_recomputing_step(model: FastLlama, length: int):
    """A function that computes the token after `length` tokens from nothing."""
    tokens = torch.arange(length, device=model.device) % model.config.vocab_size  # [N]
    positions = torch.arange(length, device=model.device)  # [N]

    @torch.inference_mode()
    def step():
        return model.forward(tokens, positions, NoCache(), positions[-1:]).argmax()

    return step


def one_cached_step(model: FastLlama, length: int):
    """A function that feeds the last of `length` tokens, the others being stored. Each call does the same again."""
    cache = SequenceCache(model, length)
    cache.length = length - 1  # zeros are stored, which does not change the time
    position = torch.tensor([length - 1], device=model.device)

    @torch.inference_mode()
    def step():
        return model.forward(position.new_zeros(1), position, cache).argmax()

    return step


@timed
def prefill(setting: Setting) -> Measurement:
    """Prompts by length and number, each case in one step; and decode steps of as many rows."""
    lengths = setting.size((32, 64, 512), (32, 128, 512, 1024), (32, 128, 512, 2048, 8000))
    each, turns = setting.size(64, 128, 512), setting.size(3, 5)
    cases = [("prefill", 1, length) for length in lengths]
    cases += [(phase, number, each) for phase in ("prefill", "decode") for number in (1, 2, 8)]
    steps = {  # by the prompts of a case, so that each is measured once
        (phase, number, tokens): timed_step(setting, phase, number, tokens, 1 if phase == "prefill" else 4, turns)
        for phase, number, tokens in dict.fromkeys(cases)
    }
    found = time_in_turns(setting, "prefill", steps, turns)
    rows = [{"phase": phase, "rows": number, "tokens_each": tokens if phase == "prefill" else 1, **turns.columns()}
            for (phase, number, tokens), turns in found.items()]
    return setting.measured("prefill", rows, next(iter(found.values())).spread)


# -- utilisation ----------------------------------------------------------------------------------


@timed
def utilisation(setting: Setting) -> Measurement:
    """What the usual gauge reads at batch 1 and at 64, beside the tokens made and the shares of the limits."""
    name, gauge = ("NVML utilisation", gpu_gauge) if setting.gpu else ("process CPU time", processor_gauge)
    turns, repeats = 3, setting.size(4, 12, 120)
    readings: dict[int, list[float]] = {1: [], 64: []}
    steps = {number: gauged(timed_step(setting, "decode", number, 16, repeats, turns), gauge, seen)
             for number, seen in readings.items()}
    found = time_in_turns(setting, "utilisation", steps, turns)
    rows = [{"rows": number, "gauge": name, **spread_columns("busy_percent", readings[number]), **turns.columns()}
            for number, turns in found.items()]
    return setting.measured("utilisation", rows, found[1].spread)


def gauged(step: TimedStep, gauge: Callable[[list[float]], AbstractContextManager], readings: list[float]) -> TimedStep:
    """The same step under a gauge, whose readings are added to these."""

    def seconds() -> Sequence[float]:
        with gauge(readings):
            return step.seconds()

    return replace(step, seconds=seconds)


@contextmanager
def processor_gauge(readings: list[float]) -> Iterator[None]:
    """Processor time of this process as a share of what its threads could have used, in per cent, read at the end."""
    wall, used = time.perf_counter(), time.process_time()
    yield
    wall, used = time.perf_counter() - wall, time.process_time() - used
    readings.append(100 * used / wall / torch.get_num_threads())


@contextmanager
def gpu_gauge(readings: list[float]) -> Iterator[None]:
    """What NVML, and so nvidia-smi, reports as GPU utilisation, in per cent, read ten times a second.

    No readings where torch cannot reach NVML (its Python package is nvidia-ml-py).
    """
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.1):
            try:
                readings.append(torch.cuda.utilization())
            except (ModuleNotFoundError, RuntimeError):
                return

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def gauges(records: Records, config: ModelConfig, kv_format: str, weight_bytes: float, limits: Ceilings) -> dict:
    """How busy a run looks, and how much of the device's limits it used, over the time from first to last.

    `busy_share` is what a GPU's utilisation gauge counts: time in which something ran. `mbu`
    and `mfu` are what the steps had to read and multiply, over what the limits allow in the
    whole time.
    """
    works = [least_work(config, kv_format, shape_of(step), weight_bytes) for step in records.steps]
    whole = StepWork(sum(work.bytes for work in works), sum(work.flops for work in works))
    span = records.ended - records.began
    return {
        "busy_share": records.totals["busy_seconds"] / span,
        "mbu": limits.mbu(whole, span), "mfu": limits.mfu(whole, span),
        "mean_rows": metrics.batch(records)["mean_rows"], "tokens_per_s": records.totals["output_tokens"] / span,
    }
