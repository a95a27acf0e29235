"""Records whose memory does not grow however long the engine serves: `Engine(records="summary")`."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise

import numpy as np

from minillm.ladder.records import Records, RequestRecord, StepRecord
from minillm.ladder.request import Request


class Histogram:
    """Counts of durations in buckets that grow by 1 %, so that a quantile is right to 1 %, in bounded memory."""

    GROWTH, SHORTEST = math.log(1.01), 1e-6

    def __init__(self) -> None:
        self.buckets: Counter[int] = Counter()
        self.highest: float | None = None

    def add(self, *durations: float) -> None:
        """Count some durations, in seconds."""
        if not durations:
            return
        buckets = np.rint(np.log(np.maximum(durations, self.SHORTEST)) / self.GROWTH)
        self.buckets.update(buckets.astype(int).tolist())
        self.highest = max(durations) if self.highest is None else max(self.highest, *durations)

    @property
    def n(self) -> int:
        return self.buckets.total()

    def nearest_rank(self, percent: int) -> float | None:
        """The value at rank ceil(percent * n / 100); None of nothing. The highest value is kept exactly."""
        rank, seen = -(-percent * self.n // 100), 0  # in whole numbers, so that nothing rounds
        for bucket in sorted(self.buckets):
            seen += self.buckets[bucket]
            if seen >= rank:
                return self.highest if seen == self.n else math.exp(bucket * self.GROWTH)
        return None


class BoundedRecords(Records):
    """The sums and peaks of `Records`, and histograms of durations in place of the lists, which stay empty."""

    def __init__(self, block_size: int | None = None) -> None:
        super().__init__(block_size)
        self.histograms = {name: Histogram() for name in ("queue", "ttft", "itl", "latency")}

    def add(self, step: StepRecord) -> None:
        """Count a step, and forget it."""
        super().add(step)
        self.steps.clear()

    def finished(self, request: Request, now: float) -> RequestRecord:
        """A request ended: its durations are counted, and its record is returned and not kept."""
        record = super().finished(request, now)
        self.requests.clear()
        if request.finish_reason not in ("abort", "error") and record.token_times:
            self.histograms["queue"].add(record.first_scheduled - record.arrival)
            self.histograms["ttft"].add(record.first_token - record.arrival)
            self.histograms["latency"].add(now - record.arrival)
            self.histograms["itl"].add(*[later - earlier for earlier, later in pairwise(record.token_times)])
        return record
