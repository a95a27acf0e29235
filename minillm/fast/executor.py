"""The executors of the heart with quicker attention, recorded graphs, and steps that start without waiting."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from minillm.fast.attention import FastAttention, kernels_for
from minillm.fast.device import to_device
from minillm.fast.graphs import StepGraphs
from minillm.ladder.continuous import Row, StepPlan
from minillm.ladder.executor import ModelExecutor
from minillm.ladder.speculative import SpeculativeExecutor


class FastForward:
    """Put before an executor of the heart, whose forward it replaces."""

    attention = FastAttention
    proposer = None
    graphs: StepGraphs | None = None  # of small steps, where the device can record them

    def warm_up(self) -> None:
        """Record all graphs and compile all kernels, so that no step waits for that. No step may be under way."""
        if self.graphs:
            self.graphs.record_all()
        elif kernels := kernels_for(self.model.device):
            kernels.compile_all(self.model, self.storage, self.block_size, self.scratch_slot)

    def start(self, plan: StepPlan) -> Callable[[], list[list[int]]]:
        """Start a step without waiting; returns a function that waits for its tokens."""
        computed = self.compute(plan)
        if self.graphs and isinstance(computed, Tensor):
            self.graphs.keep(computed)
        return partial(self.finish, plan, computed)

    def finish(self, plan: StepPlan, computed) -> list[list[int]]:
        """Prepare the next step while this one computes; then wait for its tokens."""
        if self.graphs:
            self.graphs.expect_next(plan.rows)
        return self.read(plan, computed)

    def logits(self, rows: Sequence[Row]) -> Tensor:
        """One forward over all rows -> logits [R, V] of those that sample: by a recorded graph, or launch by launch."""
        step = self.graphs and self.graphs.run(rows)
        if not step:
            return super().logits(rows)
        if observe := getattr(self.proposer, "observe", None):
            observe(step.slots.long(), step.hidden)
        wanted = self.logit_rows(rows)
        if len(wanted) == len(step.logits):
            return step.logits
        return step.logits[to_device([torch.tensor(wanted, dtype=torch.long)], self.model.device)[0]]

    def forward(self, tokens: Tensor, cache: FastAttention, logit_rows: Tensor) -> Tensor:
        """tokens [N], logit_rows [R] -> logits [R, V], launch by launch.

        A proposer that has `observe` is shown the hidden states [N, H] and the slots [N] of all tokens.
        """
        device, observe = self.model.device, getattr(self.proposer, "observe", None)
        inputs = to_device([tokens, cache.positions, logit_rows, cache.new_slots], device)
        tokens, positions, logit_rows, slots = inputs
        cache.query_group = self.model.config.query_group
        cache = cache.kernels or cache
        if observe is None:
            logits = self.model.forward(tokens, positions, cache, logit_rows)
            return logits.cpu() if device.type == "mps" else logits  # Apple's GPUs have no fp64 to draw with
        x = self.model.hidden_states(tokens, positions, cache)
        observe(slots, x)
        return self.model.logits(x[logit_rows])


class FastExecutor(FastForward, ModelExecutor):
    """`ModelExecutor`, quicker."""

    @torch.inference_mode()
    def compute(self, plan: StepPlan) -> Tensor:
        """As in the heart, ids [R] on the device; a replayed graph has the likeliest already."""
        one_each = all(row.samples and row.end - row.start == 1 and row.request.params.greedy for row in plan.rows)
        step = self.graphs.run(plan.rows) if self.graphs and one_each else None
        return step.ids if step else super().compute(plan)


class FastSpeculativeExecutor(FastForward, SpeculativeExecutor):
    """`SpeculativeExecutor`, quicker."""
