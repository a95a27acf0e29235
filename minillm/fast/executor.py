"""The executors of the heart with quicker attention, recorded graphs, and steps that start without waiting."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from minillm.fast.attention import FastAttention
from minillm.fast.device import to_device
from minillm.fast.graphs import StepGraphs
from minillm.ladder.continuous import StepPlan
from minillm.ladder.executor import ModelExecutor
from minillm.ladder.speculative import SpeculativeExecutor


class FastForward:
    """Put before an executor of the heart, whose forward it replaces."""

    attention = FastAttention
    proposer = None
    graphs: StepGraphs | None = None  # of small steps, where the device can record them

    def start(self, plan: StepPlan) -> Callable[[], list[list[int]]]:
        """Start a step without waiting; returns a function that waits for its tokens."""
        return partial(self.read, plan, self.compute(plan))

    def forward(self, tokens: Tensor, cache: FastAttention, logit_rows: Tensor) -> Tensor:
        """tokens [N], logit_rows [R] -> logits [R, V]: by a recorded graph, or launch by launch.

        A proposer that has `observe` is shown the hidden states [N, H] and the slots [N] of all tokens.
        """
        device, observe = self.model.device, getattr(self.proposer, "observe", None)
        if self.graphs and self.graphs.fits(cache):
            x = self.graphs.hidden_states(tokens, cache)  # [N, H]
            logit_rows, slots = to_device([logit_rows, cache.new_slots], device)
        else:
            inputs = to_device([tokens, cache.positions, logit_rows, cache.new_slots], device)
            tokens, positions, logit_rows, slots = inputs
            if observe is None:
                logits = self.model.forward(tokens, positions, cache, logit_rows)
                return logits.cpu() if device.type == "mps" else logits  # Apple's GPUs have no fp64 to draw with
            x = self.model.hidden_states(tokens, positions, cache)
        if observe:
            observe(slots, x)
        return self.model.logits(x[logit_rows])


class FastExecutor(FastForward, ModelExecutor):
    """`ModelExecutor`, quicker."""


class FastSpeculativeExecutor(FastForward, SpeculativeExecutor):
    """`SpeculativeExecutor`, quicker."""
