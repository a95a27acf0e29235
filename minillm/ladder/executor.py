"""What turns a plan into tokens, and the clock it runs by: the seam to a simulated engine, `measure/virtual.py`.

    plan: rows of (request, tokens to feed, position of the first, is a token sampled after its last?)
      -> flat tokens [N] and positions [N], one forward, logits [R, V] -> one token a row that samples
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from minillm.ladder.attention import KVStorage, StepAttention
from minillm.ladder.continuous import Row, StepPlan
from minillm.ladder.sampling import sample
from minillm.model.llama import Llama


class Clock(Protocol):
    """Seconds since some moment, and a way to let them pass."""

    def now(self) -> float: ...
    def wait_until(self, moment: float) -> None: ...


class Executor(Protocol):
    """Turns a plan into the new tokens of each row that samples; without a model it has a `config` too."""

    def run(self, plan: StepPlan) -> list[list[int]]: ...


class WallClock:
    """Real time, from 0 at its making."""

    def __init__(self) -> None:
        self.origin = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self.origin

    def wait_until(self, moment: float) -> None:
        time.sleep(max(0.0, moment - self.now()))


class ModelExecutor:
    """Runs a plan on a model: flattens the rows, one forward, samples."""

    attention = StepAttention

    def __init__(self, model: Llama, storage: KVStorage, num_blocks: int, block_size: int) -> None:
        self.model, self.storage, self.block_size = model, storage, block_size
        self.scratch_slot = num_blocks * block_size  # past the pool's last block

    def run(self, plan: StepPlan) -> list[list[int]]:
        """For each row that samples, its new tokens."""
        return self.read(plan, self.compute(plan))

    @torch.inference_mode()
    def compute(self, plan: StepPlan) -> Tensor:
        """The forward and the sampling -> ids [R] of the rows that sample, on the device."""
        requests = [row.request for row in plan.rows if row.samples]
        params, seeds = [r.params for r in requests], [r.seed for r in requests]
        return sample(self.logits(plan.rows), params, seeds, [r.num_output for r in requests])

    def read(self, plan: StepPlan, computed: Tensor) -> list[list[int]]:
        """What was computed, as Python's numbers: a GPU is waited for here."""
        return [[token] for token in computed.tolist()]

    def logits(self, rows: Sequence[Row]) -> Tensor:
        """One forward over all rows -> logits [R, V] of those that sample."""
        spans = [row.span for row in rows]
        cache = self.attention(self.storage, spans, self.block_size, self.scratch_slot)
        tokens = torch.tensor([token for row in rows for token in row.tokens])  # [N]
        return self.forward(tokens, cache, torch.tensor(self.logit_rows(rows), dtype=torch.long))

    def logit_rows(self, rows: Sequence[Row]) -> list[int]:
        """Indices of the tokens whose logits are needed: each sampling row's last, and in rung 6 its drafts too."""
        ends = list(accumulate(row.span.count for row in rows))
        wanted = [range(end - 1 - len(row.drafts), end) for row, end in zip(rows, ends, strict=True) if row.samples]
        return [place for places in wanted for place in places]

    def forward(self, tokens: Tensor, cache: StepAttention, logit_rows: Tensor) -> Tensor:
        """tokens [N], logit_rows [R] -> logits [R, V], on the device."""
        tokens, positions, logit_rows = (x.to(self.model.device) for x in (tokens, cache.positions, logit_rows))
        return self.model.forward(tokens, positions, cache, logit_rows)
