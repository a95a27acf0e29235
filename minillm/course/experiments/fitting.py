"""A cost model from the recorded steps of a real run, good for other loads of the same model on the same machine.

A fit keeps two things that the form of `CostModel` cannot say: by how much steps of n tokens took
longer, since a library's matrix product has a different algorithm for every few sizes; and by how
much identical steps differed, since other processes slow a few steps by a lot, which moves the mean
and not the median.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import groupby, pairwise
from random import Random
from statistics import pvariance

import numpy as np
import torch

from minillm.ladder.quantized import kv_bytes_per_token
from minillm.ladder.records import Records, StepRecord
from minillm.load.config import ModelConfig
from minillm.measure.roofline import StepShape, least_work, shape_of
from minillm.measure.virtual import CostModel

STALLED = 3  # times what was predicted
FEW, LIKELY = 4, 0.04  # steps; share of a step's time
FAINT = 1e-6  # the pull towards the first guess


@dataclass(frozen=True)
class FittedCost(CostModel):
    """A cost model with what its form lacks.

    corrections: (tokens, factor) by which steps of that many tokens differ from the form, in order
    of tokens; between two, on a straight line. noise: factors, 1 in the mean, by which single steps
    came out longer or shorter than that. draw: each call of `seconds` draws one of them; None for the mean.
    """

    corrections: tuple[tuple[float, float], ...] = ()
    noise: tuple[float, ...] = field(default=(), repr=False)
    draw: Random | None = None

    def seconds(self, shape: StepShape) -> float:
        """The duration of one step."""
        seconds = super().seconds(shape)
        if self.corrections:
            seconds *= float(np.interp(shape.tokens, *zip(*self.corrections, strict=True)))
        return seconds * self.draw.choice(self.noise) if self.draw and self.noise else seconds


def fit(records: Records, config: ModelConfig, kv_format: str, weight_bytes: float) -> FittedCost:
    """The cost model under which the recorded steps are likeliest.

    The run should hold prompts as well as decodes, at several batch sizes: effects that it never
    separated cannot be told apart, and stay near a first guess. To the form's five numbers come a
    correction for every doubling of tokens, and the `noise` that is left.
    Raises ValueError if fewer steps than numbers were recorded.
    """
    shapes, seconds = [shape_of(step) for step in records.steps], step_seconds(records.steps)
    if len(shapes) < 5:
        raise ValueError(f"{len(shapes)} recorded steps cannot settle 5 numbers: run longer, with records='all'")
    form = likeliest_form(shapes, seconds, config, kv_format, weight_bytes)
    numbers = {field.name: getattr(form, field.name) for field in fields(form)}
    cost = FittedCost(**numbers, corrections=corrections(form, shapes, seconds))
    return replace(cost, noise=noise(cost, shapes, seconds))


def likeliest_form(
    shapes: Sequence[StepShape], seconds: Sequence[float], config: ModelConfig, kv_format: str, weight_bytes: float
) -> CostModel:
    """The five numbers of the form, without corrections and noise.

    Minimises the Huber loss of log(predicted / recorded), which a few stalled steps do not bend,
    then matches the total time of all but the stalled ones.
    """
    seconds = torch.tensor(seconds, dtype=torch.float64)
    kv_bytes = kv_bytes_per_token(config, kv_format) * torch.tensor([shape.stored for shape in shapes]).double()
    flops = torch.tensor([least_work(config, kv_format, shape, 0).flops for shape in shapes]).double()

    def predict(parameters: torch.Tensor) -> torch.Tensor:
        weights, per_kv_byte, per_flop, overhead = parameters[:4].exp()
        memory, compute, hidden = weights + kv_bytes * per_kv_byte, flops * per_flop, parameters[4].sigmoid()
        return torch.maximum(memory, compute) + (1 - hidden) * torch.minimum(memory, compute) + overhead

    fastest = seconds.min()
    guess = torch.stack([fastest, fastest / weight_bytes, (seconds / flops).min(), fastest / 100]).log()
    guess = torch.cat([guess, guess.new_zeros(1)])
    parameters = minimise(lambda p: huber((predict(p) / seconds).log()) + FAINT * ((p - guess) ** 2).mean(), guess)
    usual = seconds < STALLED * predict(parameters)
    scale = float(seconds[usual].sum() / predict(parameters)[usual].sum())
    weights, per_kv_byte, per_flop, overhead = (parameters[:4].exp() * scale).tolist()
    speeds = weight_bytes / weights, 1 / per_kv_byte, 1 / per_flop
    return CostModel(config, kv_format, weight_bytes, *speeds, overhead, overlap=float(parameters[4].sigmoid()))


def corrections(
    form: CostModel, shapes: Sequence[StepShape], seconds: Sequence[float]
) -> tuple[tuple[float, float], ...]:
    """(mean tokens, recorded over predicted time) of the steps of 1 token, of 2 to 3, of 4 to 7 and so on.

    Stalled steps are left out. Few steps are weak evidence, and weaker the more they differ among
    themselves: a factor goes n / (n + FEW + variance / LIKELY^2) of its way from 1, as if n
    measurements were added to a prior of 1 with the standard deviation LIKELY.
    """
    steps = sorted((shape.tokens, taken, form.seconds(shape)) for shape, taken in zip(shapes, seconds, strict=True))
    found = []
    for _, same in groupby(steps, key=lambda step: step[0].bit_length()):
        usual = [step for step in same if step[1] < STALLED * step[2]]
        if usual:
            tokens, taken, predicted = map(sum, zip(*usual, strict=True))
            doubt = FEW + pvariance([step[1] / step[2] for step in usual]) / LIKELY**2
            found.append((tokens / len(usual), 1 + (taken / predicted - 1) * len(usual) / (len(usual) + doubt)))
    return tuple(found)


def noise(cost: CostModel, shapes: Sequence[StepShape], seconds: Sequence[float]) -> tuple[float, ...]:
    """Recorded over predicted time of each step that did not stall, over their mean."""
    ratios = [taken / cost.seconds(shape) for shape, taken in zip(shapes, seconds, strict=True)]
    usual = [ratio for ratio in ratios if ratio < STALLED]
    return tuple(ratio * len(usual) / sum(usual) for ratio in usual)


def huber(residuals: torch.Tensor, knee: float = 0.05) -> torch.Tensor:
    """Squares up to the knee, straight lines beyond: the mean over residuals (Huber, 1964)."""
    return torch.nn.functional.huber_loss(residuals, torch.zeros_like(residuals), delta=knee)


def minimise(loss, start: torch.Tensor) -> torch.Tensor:
    """The parameters near `start` at which `loss` is lowest, by L-BFGS."""
    parameters = start.clone().requires_grad_()
    optimiser = torch.optim.LBFGS([parameters], max_iter=500, tolerance_change=1e-12, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimiser.zero_grad()
        value = loss(parameters)
        value.backward()
        return value

    optimiser.step(closure)
    return parameters.detach()


def step_seconds(steps: Sequence[StepRecord]) -> list[float]:
    """Each step's duration, and with it the time until the next one where there was work to go on with."""
    seconds = []
    for step, following in pairwise(steps):
        goes_on = step.waiting or not set(step.members).isdisjoint(following.members)
        seconds.append(following.start - step.start if goes_on else step.duration)
    return [*seconds, *(step.duration for step in steps[-1:])]
