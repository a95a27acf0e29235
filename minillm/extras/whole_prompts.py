"""Chunked prefill turned off, as servers had it before: what rung 3's chunks are compared with."""

from __future__ import annotations

from minillm.ladder.continuous import Scheduler, StepPlan
from minillm.ladder.request import Request


class WholePromptScheduler(Scheduler):
    """A prompt is fed whole, or waits; larger than a step's budget, it goes alone.

    Steps that hold only whole prompts alternate with steps that decode, so a decode waits one step at most.
    """

    chunked_prefill = False
    decoded_last = False

    def plan(self, plan: StepPlan | None = None, decodes: bool = True) -> StepPlan:
        """The next step: only prompts if the last one let the decodes run and a prompt fits, else everything."""
        plan = StepPlan(budget=self.max_step_tokens)
        if self.decoded_last:
            super().plan(plan, decodes=False)
        self.decoded_last = not plan.rows
        return super().plan(plan) if self.decoded_last else plan

    def chunk(self, request: Request, plan: StepPlan) -> int:
        """All of a prompt or nothing."""
        return request.num_pending if request.num_pending <= plan.budget or not plan.rows else 0
