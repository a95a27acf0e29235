"""Virtual time: the engine's own scheduler, pool and records, with the forward pass replaced by what it would take.

    memory  = weight bytes / bandwidth + KV bytes / KV bandwidth
    compute = FLOPs / rate
    step    = the longer + (1 - overlap) * the shorter + overhead

A GPU does both concurrently (overlap 1: the roofline). The cores of a CPU must
do both in turn (overlap 0), and gather the keys and values of a batch at a fraction of the
bandwidth at which they read weights. The numbers are effective ones: taken from a data
sheet, and then an estimate, or fitted to the recorded steps of a real run
(`course/experiments/fitting.py`), and then good for other loads of the same model on the same machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import count, islice, takewhile

import torch

from minillm.fast.engine import Engine
from minillm.ladder.continuous import Row, StepPlan
from minillm.ladder.paged import Slots
from minillm.ladder.records import StepRecord
from minillm.ladder.request import Request, TokenEvent
from minillm.ladder.sampling import ACCEPT, uniforms
from minillm.ladder.speculative import Speculator
from minillm.load.config import ModelConfig
from minillm.measure.roofline import StepShape, least_work, measure_ceilings, read_numbers

GIVEN_TOKENS = 1 << 32  # tokens given in virtual time are numbered from here: none repeats, so none hits a prefix


class VirtualClock:
    """Seconds that pass only when told to."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time

    def wait_until(self, moment: float) -> None:
        """Jump to a moment, unless it is past."""
        self.time = max(self.time, moment)

    def advance(self, seconds: float) -> None:
        self.time += seconds


@dataclass(frozen=True)
class CostModel:
    """How long a step takes, by its shape. weight_bytes: those that a step reads."""

    config: ModelConfig
    kv_format: str
    weight_bytes: float
    bytes_per_s: float
    kv_bytes_per_s: float
    flops_per_s: float
    overhead_s: float
    overlap: float = 1.0

    def seconds(self, shape: StepShape) -> float:
        """The duration of one step."""
        kv_bytes, per_token, per_logit, per_pair = self.unit_costs
        memory = self.weight_bytes / self.bytes_per_s + shape.stored * kv_bytes / self.kv_bytes_per_s
        flops = per_token * shape.tokens + per_logit * shape.due + per_pair * shape.pairs
        compute = flops / self.flops_per_s
        return max(memory, compute) + (1 - self.overlap) * min(memory, compute) + self.overhead_s

    @cached_property
    def unit_costs(self) -> tuple[int, int, int, int]:
        """Bytes of a stored token; FLOPs of a token, of a token's logits, of a pair. `least_work` is their sum."""
        one = least_work(self.config, self.kv_format, StepShape(0, 0, 1, 0), 0)
        units = StepShape(1, 0, 0, 0), StepShape(0, 1, 0, 0), StepShape(0, 0, 0, 1)
        return one.bytes, *(least_work(self.config, self.kv_format, unit, 0).flops for unit in units)

    @classmethod
    def of_device(cls, name: str, config: ModelConfig, kv_format: str = "bf16", weight_bytes: float | None = None):
        """An estimate from the device's data sheet, or for "cpu" from its measured ceilings.

        weight_bytes: 16 bits a weight if None. ValueError lists the devices.
        """
        if name not in (*DEVICES, "cpu"):
            raise ValueError(f"unknown device {name!r}; known: {', '.join((*DEVICES, 'cpu'))}")
        weight_bytes = 2 * read_numbers(config) if weight_bytes is None else weight_bytes
        if name == "cpu":
            limits = measure_ceilings("cpu", torch.float32)
            bandwidth, rate, overhead, overlap = limits.bytes_per_s, limits.flops_per_s, 0.0, 0.0
        else:
            sheet = DEVICES[name]
            bandwidth, rate = sheet.gb_per_s * 1e9 * REACHED_BANDWIDTH, sheet.tflops * 1e12 * REACHED_RATE
            overhead, overlap = GPU_OVERHEAD_S, 1.0
        return cls(config, kv_format, weight_bytes, bandwidth, bandwidth, rate, overhead, overlap)


@dataclass(frozen=True)
class DataSheet:
    """What the maker promises: memory, its bandwidth, and dense 16-bit matmul with 32-bit sums."""

    memory_gb: float
    gb_per_s: float
    tflops: float


DEVICES = {
    "a100-80gb": DataSheet(80, 2039, 312),  # SXM
    "h100": DataSheet(80, 3350, 989),  # SXM
    "h200": DataSheet(141, 4800, 989),
    "l4": DataSheet(24, 300, 121),
    "t4": DataSheet(16, 320, 65),
    "rtx-4090": DataSheet(24, 1008, 165),
}
# Of the promised figures, what a large copy reaches (A100 0.83, H200 0.90) and a large product (H200 0.80).
REACHED_BANDWIDTH, REACHED_RATE = 0.85, 0.8
GPU_OVERHEAD_S = 1e-3  # scheduling and launches of a step: a guess, which a fit replaces


class VirtualProposer:
    """Drafts that cost nothing, each right with a given probability, given that its predecessors were."""

    bytes_per_token = 0

    def __init__(self, acceptance: float) -> None:
        if not 0 <= acceptance <= 1:
            raise ValueError(f"acceptance {acceptance} must be a share, from 0 to 1")
        self.acceptance = acceptance
        self.next_token = count(2 * GIVEN_TOKENS).__next__

    def prepare(self, config: ModelConfig, num_blocks: int, block_size: int, attention=None) -> None:
        """Nothing to prepare."""

    def propose(self, rows: Sequence[Row]) -> list[None]:
        """Fill every row's drafts with tokens that occur nowhere else."""
        for row in rows:
            row.drafts[:] = [self.next_token() for _ in range(row.num_drafts)]
        return [None] * len(rows)

    def accepted(self, row: Row) -> list[int]:
        """The drafts of a row before its first wrong one; the same request draws the same in any company."""
        request = row.request
        draws = (uniform(request.seed, request.num_output + i, ACCEPT) < self.acceptance for i in count())
        return [draft for draft, _ in zip(row.drafts, takewhile(bool, draws), strict=False)]


class VirtualExecutor:
    """Gives each row that samples tokens that occur nowhere else, once the step's time has passed.

    prompts_received: a prompt's keys and values arrive from elsewhere with the request, so
    that only the last token of a row is computed, unless the row was preempted and lost them.
    """

    def __init__(
        self, cost: CostModel, clock: VirtualClock, prompts_received: bool = False,
        proposer: VirtualProposer | None = None,
    ) -> None:
        self.cost, self.clock, self.prompts_received, self.proposer = cost, clock, prompts_received, proposer
        self.config = replace(cost.config, vocab_size=1 << 62, eos_token_id=())  # room for all tokens given
        self.new_tokens = count(GIVEN_TOKENS)

    def run(self, plan: StepPlan) -> list[list[int]]:
        """The new tokens of each row that samples: one, or the accepted drafts and one."""
        if self.proposer:
            self.proposer.propose(plan.rows)
        shape = StepShape.of([self._computed(row) for row in plan.rows])
        self.clock.advance(self.cost.seconds(shape))
        sampling = [row for row in plan.rows if row.samples]
        return [[*(self.proposer.accepted(row) if row.drafts else ()), next(self.new_tokens)] for row in sampling]

    def run_again(self, plan: StepPlan, most: int, until: float) -> list[float]:
        """Let the time pass of up to `most` further decode steps like the plan, none of them from `until` on.

        Each time every row stores one token more, and sees it. Returns the moments at which they began.
        """
        rows, stored, began = len(plan.rows), sum(row.end for row in plan.rows), []
        while len(began) < most and self.clock.time < until:
            began.append(self.clock.time)
            stored += rows
            self.clock.advance(self.cost.seconds(StepShape(rows, rows, stored, stored)))
        return began

    def _computed(self, row: Row) -> tuple[int, int, int]:
        """(start, tokens, logits) of what must be computed of a row."""
        drafts = len(row.drafts)
        logits = 1 + drafts if row.samples else 0
        if self.prompts_received and row.start < row.request.num_prompt and not row.request.num_kv_lost:
            return (row.end - 1, logits, logits) if row.samples else (0, 0, 0)
        return row.start, row.end - row.start + drafts, logits


class VirtualEngine(Engine):
    """An engine that may run many identical decode steps as one: the records tell them apart."""

    def step(self, until: float | None = None) -> list[TokenEvent]:
        """As any engine's; with `until`, a moment before which you will add or abort nothing, decode steps that
        begin before it run as one while no answer ends, and an event holds the tokens of all."""
        if until is None or self.tokenizer is not None or not isinstance(self.executor, VirtualExecutor):
            return super().step()
        self.wait_for_work()
        if self.scheduler.has_work:
            plan, counts = self.begin_step()
            with self.undone_on_error(plan):
                outputs = self.executor.run(plan)
                most = min(self.steps_alike(plan), *[steps_left(row.request) - 1 for row in plan.rows])
                until = min(until, self.arrivals[0][0]) if self.arrivals else until
                again = self.executor.run_again(plan, most, until) if most > 0 else []
            if again:
                self.report_repeats(plan, counts, outputs, again)
            else:
                self.report(plan, counts, self.commit(plan, outputs))
        events, self.events = self.events, []
        return events

    def steps_alike(self, plan: StepPlan) -> int:
        """How many of the next steps are sure to look like this one, if no answer ends and none arrives.

        A lower bound: 0 unless every row decodes and all will find memory. A request that waits has just been
        refused, and will be again while no row leaves, since rows that grow leave less room.
        """
        scheduler, rows = self.scheduler, len(plan.rows)
        fed = scheduler.max_step_tokens - plan.budget
        if plan.preempted or not fed == rows == len(scheduler.running) or not all(row.samples for row in plan.rows):
            return 0
        if self.speculator or (scheduler.waiting and not scheduler.chunked_prefill):
            return 0
        pool = scheduler.memory.pool
        if isinstance(scheduler.memory, Slots):  # all that they may ever ask for is theirs
            return pool.num_blocks * pool.block_size
        return pool.num_available // rows * pool.block_size  # each row takes a block in `block_size` steps

    def report_repeats(self, plan: StepPlan, counts: dict, outputs: list[list[int]], began: list[float]) -> None:
        """Commit a plan that ran 1 + len(began) times, and write a record for each time."""
        times, size, taken = len(began), self.scheduler.memory.pool.block_size, [0] * len(began)
        for row, tokens in zip(plan.rows, outputs, strict=True):
            unfilled = len(row.request.block_table) * size - row.end
            for step in range(unfilled, times, size):
                taken[step] += 1
            row.end += times
            self.scheduler.memory.reserve(row.request, row.end)
            tokens += islice(self.executor.new_tokens, times)
        accepted = self.commit(plan, outputs)
        ends, rows = [*began, plan.end], len(plan.rows)
        for request, _ in accepted:
            self.records.live[request.id].token_times += ends
        for start, end, blocks in zip([plan.start, *began], ends, [None, *taken], strict=True):
            counts = counts if blocks is None else next_counts(counts, blocks)
            self.records.add(StepRecord(
                start=start, duration=end - start, **counts, sampled_rows=rows, output_tokens=rows,
                drafted_tokens=0, accepted_tokens=0,
            ))
        for request, tokens in accepted:
            self.emit(request, tokens, "", plan.end)


def next_counts(counts: dict, blocks: int) -> dict:
    """The counts of a step of decodes that follows one like it, given the number of blocks that were taken for it."""
    rows, free = counts["rows"], min(blocks, counts["blocks_free"])
    return counts | {
        "prompt_tokens": 0, "decode_tokens": rows, "admitted": 0, "kinds": decodes(rows),
        "blocks_live": counts["blocks_live"] + blocks, "blocks_free": counts["blocks_free"] - free,
        "blocks_cached": counts["blocks_cached"] - (blocks - free), "kv_tokens": counts["kv_tokens"] + rows,
    }


@cache
def decodes(rows: int) -> tuple[str, ...]:
    """The kinds of so many rows; one tuple for all steps, of which there may be millions."""
    return ("decode",) * rows


def steps_left(request: Request) -> int:
    """Decode steps to the end of an answer, which virtual time may know; at least 1, where stops may come sooner."""
    return 1 if request.stop_ids else int(request.length_limit) - request.num_tokens


def virtual_engine(
    cost: CostModel, prompts_received: bool = False, proposer: VirtualProposer | None = None, draft_length: int = 4,
    **settings,
) -> VirtualEngine:
    """An engine on a virtual clock of its own; `settings` are the engine's."""
    clock = VirtualClock()
    executor = VirtualExecutor(cost, clock, prompts_received, proposer)
    speculator = Speculator(proposer, draft_length) if proposer else None
    return VirtualEngine(
        None, executor=executor, clock=clock, kv_format=cost.kv_format, speculator=speculator, **settings
    )


def uniform(seed: int, index: int, purpose: int) -> float:
    """One of `sampling.uniforms`."""
    return float(uniforms([seed], [index], purpose)[0])
