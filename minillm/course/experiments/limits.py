"""Ledger part A: what bounds a decode step and a prompt. Notebooks 00 and 01, and the gauges of 07."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from statistics import mean

import torch

from minillm.course.experiments.common import decode_seconds, step_row, timed_step
from minillm.course.setting import Setting, timed
from minillm.fast.model import FastLlama
from minillm.ladder.decode import NoCache, SequenceCache
from minillm.ladder.records import Records
from minillm.load.config import ModelConfig
from minillm.load.weights import RandomTensors, make_model
from minillm.measure import metrics
from minillm.measure.measurement import Measurement, Spread, time_seconds
from minillm.measure.roofline import Ceilings, StepShape, StepWork, least_work, shape_of

# -- steps beside the roofline --------------------------------------------------------------------


@timed
def roofline_steps(setting: Setting) -> Measurement:
    """Decode steps by rows and prefills by tokens, each beside the least time that the limits allow."""
    rows, spreads, steps = [], [], setting.size(8, 12)
    cases = [("decode", n, 64 - steps // 2, steps) for n in setting.size((1, 8), (1, 2, 8, 32), (1, 8, 32, 128))]
    cases += [("prefill", 1, n, 3) for n in setting.size((16, 64), (16, 64, 256, 512), (64, 256, 1024, 4096))]
    for phase, number, tokens, repeats in setting.each("roofline_steps", cases):
        work, spread = timed_step(setting, phase, number, tokens, repeats)
        fed = tokens if phase == "prefill" else number
        rows.append({"kind": phase, "tokens": fed, **roofline_row(setting, work, spread, fed)})
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
    model, context, rows, spreads = setting.timed_model, 32, [], []
    depth = model.config.num_hidden_layers
    for layers in setting.each("decode_step", sorted({max(1, depth // part) for part in (1, 2, 4, 8)}, reverse=True)):
        cut = first_layers(model, layers)
        spread = time_seconds(one_cached_step(cut, context), model.device, warmups=3, repeats=setting.size(7, 21))
        work = setting.work(StepShape.decode([context]), cut)
        rows.append({
            "layers": layers, "weight_mb": cut.weight_bytes / 1e6,
            "read_ms": work.bytes / setting.ceilings.bytes_per_s * 1e3, **step_row(setting, work, spread, tokens=1),
        })
        spreads.append(spread)
    return setting.measured("decode_step", rows, spreads[0])


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
    model, rows, spreads = setting.timed_model, [], []
    lengths = setting.size((4, 16, 64, 256, 1024), (4, 8, 16, 64, 256, 512, 1024, 2048, 4096, 8192))
    recompute_up_to = setting.size(256, 1024, 8192)
    lengths = [length for length in lengths if length <= model.config.max_position_embeddings]
    for length in setting.each("cost_by_length", lengths):
        cached = time_seconds(one_cached_step(model, length), model.device, warmups=1)
        again = None
        if length <= recompute_up_to:
            again = time_seconds(one_recomputing_step(model, length), model.device, warmups=1, repeats=3).median * 1e3
        work = setting.work(StepShape.decode([length]))
        rows.append({"context_tokens": length, "recompute_ms": again, "cached_ms": cached.median * 1e3,
                     "read_mb": work.bytes / 1e6, **setting.shares(work, cached.median)})
        spreads.append(cached)
    return setting.measured("cost_by_length", rows, spreads[0])


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
    rows, spreads = [], []
    lengths = setting.size((32, 128, 512), (32, 128, 512, 1024), (32, 128, 512, 2048, 8000))
    each, repeats = setting.size(64, 128, 512), setting.size(2, 3)
    cases = [("prefill", 1, length, repeats) for length in lengths]
    cases += [(phase, n, each, times) for phase, times in (("prefill", repeats), ("decode", 8)) for n in (1, 2, 8)]
    for phase, number, tokens, repeats in setting.each("prefill", cases):
        work, spread = timed_step(setting, phase, number, tokens, repeats)
        fed = tokens if phase == "prefill" else 1
        rows.append({"phase": phase, "rows": number, "tokens_each": fed,
                     **step_row(setting, work, spread, number * fed)})
        spreads.append(spread)
    return setting.measured("prefill", rows, spreads[0])


# -- utilisation ----------------------------------------------------------------------------------


@timed
def utilisation(setting: Setting) -> Measurement:
    """What the usual gauge reads at batch 1 and at 64, beside the tokens made and the shares of the limits."""
    name, gauge = ("NVML utilisation", gpu_gauge) if setting.gpu else ("process CPU time", processor_gauge)
    rows, steps = [], setting.size(10, 40, 300)
    for number in setting.each("utilisation", (1, 64)):
        readings: list[float] = []
        spread = decode_seconds(setting.timed_model, number, 16, steps, during=gauge(readings))
        work = setting.work(StepShape.decode([16 + steps // 2] * number))
        rows.append({"rows": number, "gauge": name, "busy_percent": mean(readings) if readings else None,
                     **step_row(setting, work, spread, number)})
    return setting.measured("utilisation", rows)


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
