"""How many drafts to ask for: learnt from acceptance and from the duration of steps.

A batch of a new size begins with a few set lengths. Later one step in `PROBE_EVERY` tries no drafts,
one fewer or one more than seems best, since what was learnt becomes outdated.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median_low

import numpy as np

from minillm.ladder.continuous import StepPlan
from minillm.ladder.speculative import Proposer, Speculator

PRIOR_ACCEPTANCE = 0.5  # of drafts never tried
LEARNING_RATE = 0.05  # how fast tried ones change it
FIRST_LENGTHS = (1, 0, 1, 0)  # 1 twice: at its first drafts a drafter has prompts to read
PROBE_EVERY = 20  # steps


class AdaptiveSpeculator(Speculator):
    """Asks for the number of drafts with the most tokens per second, as far as it is known."""

    def __init__(self, proposer: Proposer, draft_length: int = 4) -> None:
        """draft_length: the most drafts of a row in a step."""
        super().__init__(proposer, draft_length)
        self.acceptance = [PRIOR_ACCEPTANCE] * draft_length  # by place in the round, if those before it were accepted
        self.costs: dict[int, StepCost] = {}  # by batch: 1, 2 to 3, 4 to 7, ...
        self.turn = 0

    def draft_length(self, batch: int) -> int:
        """Drafts per row, given the number of decoding rows."""
        cost = self.costs.setdefault(batch.bit_length(), StepCost())
        if cost.steps < len(FIRST_LENGTHS):
            return min(FIRST_LENGTHS[cost.steps], self.most)
        best = max(range(self.most + 1), key=lambda k: self.expected_tokens(k) / cost.seconds(k))
        self.turn += 1
        if self.turn % PROBE_EVERY:
            return best
        others = (best + 1, best - 1, 0)
        return min(max(others[self.turn // PROBE_EVERY % len(others)], 0), self.most)

    def expected_tokens(self, k: int) -> float:
        """Of a round that asks for k drafts: the target's own, and every draft that all before it lead to."""
        return 1.0 + sum(np.cumprod(self.acceptance[:k]).tolist())

    def observe(self, plan: StepPlan, outputs: Sequence[Sequence[int]]) -> None:
        """Learn from a step how many drafts were accepted, and, if it read no prompts, what it cost.

        A draft that was asked for and not made counts as one that was rejected.
        """
        sampling = [row for row in plan.rows if row.samples]
        for row, output in zip(sampling, outputs, strict=True):
            for place in range(min(row.num_drafts, len(output))):
                accepted = place < len(output) - 1
                self.acceptance[place] += LEARNING_RATE * (accepted - self.acceptance[place])
        if sampling and all(row.end - row.start == 1 for row in plan.rows):
            cost = self.costs.setdefault(len(sampling).bit_length(), StepCost())
            cost.add(max(row.num_drafts for row in sampling), plan.end - plan.start)


class StepCost:
    """A decode step's seconds by the number of drafts k: the median of the last few, or a line where none was tried."""

    RECENT = 5

    def __init__(self) -> None:
        self.steps, self.recent = 0, {}

    def add(self, k: int, seconds: float) -> None:
        """Take in one step."""
        self.steps += 1
        self.recent.setdefault(k, deque(maxlen=self.RECENT)).append(seconds)

    def seconds(self, k: int) -> float:
        """What a step with k drafts a row should cost; more drafts never cost less than none."""
        known = {tried: median_low(times) for tried, times in sorted(self.recent.items())}
        if k in known:
            return known[k]
        slope, plain = np.polyfit(list(known), list(known.values()), 1) if len(known) > 1 else (0.0, *known.values())
        return float(plain + max(slope, 0.0) * k)
