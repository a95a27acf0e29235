"""Speculation in virtual time with what drafts were worth where they were measured: the recorded `speculation`.

Recorded are, by kind of prompt, of drafts and by rows of the batch: how often there was a draft at all, the share that
was right by place, and what proposing took, in steps of plain decoding. Verifying takes what the cost model says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import count
from pathlib import Path

from minillm.ladder.continuous import Row
from minillm.ladder.sampling import ACCEPT
from minillm.measure.measurement import MEASUREMENTS, Measurement, MeasurementError
from minillm.measure.roofline import StepShape
from minillm.measure.service import Service
from minillm.measure.virtual import VirtualExecutor, VirtualProposer, uniform

LENGTH = 4  # drafts of a round: what virtual time plans, and the length of the recorded rows that are read
FOUND = 8  # purpose of the uniform numbers that decide whether a row has drafts


@dataclass(frozen=True)
class Worth:
    """Of drafts in a batch of so many rows. found: the share of a row's steps that have drafts. right: by place, the
    share that is right where those before it were. cost: of proposing for the whole batch, in plain decode steps."""

    rows: int
    found: float
    right: tuple[float, ...]
    cost: float
    acceptance: float  # drafts accepted over drafts verified

    @classmethod
    def of(cls, row: dict) -> Worth:
        """From a row of `speculation` that has a batch, and what a round gave and took."""
        step, round_ = row["tokens_per_step"], row["tokens_per_round"]
        right = tuple(right / tried if tried else 0.0
                      for right, tried in zip(row["right_by_place"], row["tried_by_place"], strict=True))
        taken, verifying = step / row["speedup"], step / row["predicted"]  # both in plain steps
        return cls(row["batch"], min(1.0, (step - 1) / (round_ - 1)) if round_ > 1 else 1.0, right,
                   max(0.0, taken - verifying), row["acceptance"])


@dataclass(frozen=True)
class RecordedDrafts:
    """One kind of drafts on one kind of prompts, by the rows of the batch, fewest first. source: on which device."""

    prompts: str
    drafts: str
    worth: tuple[Worth, ...]
    source: str

    def at(self, rows: int) -> Worth:
        """As measured in the largest batch that is not larger than this."""
        return max((each for each in self.worth if each.rows <= rows), key=lambda each: each.rows,
                   default=self.worth[0])


def recorded_drafts(prompts: str, drafts: str, root: Path = MEASUREMENTS) -> RecordedDrafts:
    """From the newest `speculation` that is recorded. prompts: "chat" or "copy"; drafts: "n-gram" or "drafter".

    MeasurementError if none is recorded, or has no such rows.
    """
    runs = [Measurement.load(file.parent.name, "speculation", root) for file in root.glob("*/speculation.json")]
    if not runs:
        raise MeasurementError("no speculation is recorded; run `minillm measure speculation --save`")
    newest = max(runs, key=lambda run: run.provenance.date)
    rows = [row for row in newest.rows if row["part"] == "real" and row["k"] == LENGTH
            and (row["prompts"], row["drafts"]) == (prompts, drafts)]
    if not rows:
        raise MeasurementError(f"the recorded speculation has no drafts by {drafts} on {prompts} prompts")
    worth = sorted(map(Worth.of, rows), key=lambda each: each.rows)
    return RecordedDrafts(prompts, drafts, tuple(worth), newest.provenance.device)


class RecordedProposer(VirtualProposer):
    """Drafts that are as often there, as often right, and take as long as the recorded ones."""

    def __init__(self, recorded: RecordedDrafts, executor: VirtualExecutor) -> None:
        super().__init__(acceptance=1.0)
        self.recorded, self.cost, self.clock = recorded, executor.cost, executor.clock

    def propose(self, rows: Sequence[Row]) -> list[None]:
        """Fill the drafts of the rows that have some, and let the time pass that this takes."""
        decoding = [row for row in rows if row.num_drafts]
        self.now = self.recorded.at(len(decoding))
        for row in rows:
            request = row.request
            found = row.num_drafts and uniform(request.seed, request.num_output, FOUND) < self.now.found
            row.drafts[:] = [self.next_token() for _ in range(row.num_drafts if found else 0)]
        if self.now.cost and decoding:
            plain = StepShape.of([(row.start, 1, 1) for row in decoding])
            self.clock.advance(self.now.cost * self.cost.seconds(plain))
        return [None] * len(rows)

    def accepted(self, row: Row) -> list[int]:
        """The drafts of a row before its first wrong one; the same request draws the same in any company."""
        kept, request = [], row.request
        for place, draft, right in zip(count(request.num_output), row.drafts, self.now.right, strict=False):
            if uniform(request.seed, place, ACCEPT) >= right:
                break
            kept.append(draft)
        return kept


@dataclass(frozen=True)
class DraftingService(Service):
    """A service that speculates with recorded drafts."""

    recorded: RecordedDrafts | None = None

    def engine(self, max_context: int = 16_384):
        """As of any service."""
        engine = super().engine(max_context)
        engine.executor.proposer = RecordedProposer(self.recorded, engine.executor)
        return engine


def drafting(service: Service, prompts: str, drafts: str) -> DraftingService:
    """The same service with the recorded drafts of this kind; see `recorded_drafts`."""
    same = {field.name: getattr(service, field.name) for field in fields(Service)}
    return DraftingService(**{**same, "acceptance": 1.0}, recorded=recorded_drafts(prompts, drafts))
