"""The experiments of notebooks 00 and 07 to 10: the machine's limits, and what a service does under load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from minillm.ladder.quantized import native_format
from minillm.measure import chapters
from minillm.measure.measurement import Measurement, time_seconds
from minillm.measure.roofline import Ceilings, StepShape, StepWork, least_work
from minillm.model.config import ModelConfig
from minillm.model.llama import Llama
from minillm.model.weights import RandomTensors

# -- 00: the machine ------------------------------------------------------------------------------


def roofline_steps(
    model, name: str, limits: Ceilings, rows: Sequence[int] = (1, 8, 32), prompts: Sequence[int] = (16, 64, 256),
    context: int = 64, steps: int = 12,
) -> Measurement:
    """Decode steps of so many rows, and prefills of so many tokens, beside the least time that the limits allow."""
    first = context - steps // 2  # the rows' texts grow; at the median step they are `context` long
    decodes = chapters.step_time_by_rows(model, name, rows, prompt_tokens=first, steps=steps)
    table = [
        step_row(model, limits, "decode", row["rows"], StepShape.decode([context] * row["rows"]), row["step_ms"])
        for row in decodes.rows
    ]
    for length in prompts:
        spread = time_seconds(chapters.one_recomputing_step(model, length), model.device, warmups=1, repeats=3)
        shape = StepShape.of([(0, length, 1)])
        table.append(step_row(model, limits, "prefill", length, shape, spread.median * 1e3))
    provenance = replace(decodes.provenance, bandwidth_gb_per_s=limits.bytes_per_s / 1e9)
    return Measurement("roofline_steps", provenance, table)


def step_row(model, limits: Ceilings, kind: str, tokens: int, shape: StepShape, step_ms: float) -> dict:
    """One row of `roofline_steps`: the work of a step, its time, and its shares of both limits."""
    work = least_work(model.config, native_format(model.dtype), shape, model.weight_bytes)
    seconds = step_ms / 1e3
    return {
        "kind": kind, "tokens": tokens, "read_mb": work.bytes / 1e6, "gflop": work.flops / 1e9,
        "flop_per_byte": work.flops / work.bytes, "step_ms": step_ms, "least_ms": limits.least_seconds(work) * 1e3,
        "tokens_per_s": tokens / seconds, "gflop_per_s": work.flops / seconds / 1e9,
        "mbu": limits.mbu(work, seconds), "mfu": limits.mfu(work, seconds), "bound_by": bound_by(limits, work),
    }


def bound_by(limits: Ceilings, work: StepWork) -> str:
    """Which of the two limits decides: "reading" or "multiplying"."""
    return "reading" if work.bytes / limits.bytes_per_s > work.flops / limits.flops_per_s else "multiplying"


def narrowed(config: ModelConfig, divisor: int) -> ModelConfig:
    """The same number of layers and heads, everything else so many times narrower. ValueError if nothing is left."""
    if config.head_dim % (2 * divisor) or config.hidden_size % divisor or config.intermediate_size % divisor:
        raise ValueError(f"widths of {config.hidden_size}, {config.intermediate_size}, {config.head_dim} by {divisor}")
    return replace(
        config, hidden_size=config.hidden_size // divisor, intermediate_size=config.intermediate_size // divisor,
        head_dim=config.head_dim // divisor, vocab_size=config.vocab_size // divisor,
    )


def mbu_by_width(model, name: str, limits: Ceilings, divisors: Sequence[int] = (1, 2, 4, 8)) -> Measurement:
    """One decoded token, with random weights of the model's shape and of ever narrower ones: as many calls, less work.

    What is left when the work is almost nothing is the cost of the calls themselves.
    """
    table, spreads = [], []
    for divisor in divisors:
        config = narrowed(model.config, divisor)
        slim = Llama(config, RandomTensors(config, model.device, model.dtype), model.device, model.dtype)
        spread = time_seconds(chapters.one_cached_step(slim, 16), model.device, warmups=3, repeats=7)
        row = step_row(slim, limits, "decode", 1, StepShape.decode([16]), spread.median * 1e3)
        table.append({"width": config.hidden_size, **row, "lost_ms": row["step_ms"] - row["least_ms"]})
        spreads.append(spread)
    return chapters.measured("mbu_by_width", model, name, table, spreads[0])
