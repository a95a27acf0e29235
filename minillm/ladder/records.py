"""What happened, as plain data: one record a step, one a request. Every metric is computed from these.

With `mode="summary"` the lists stay empty, and histograms of the durations stand in for
them, whose memory does not grow however long the engine serves.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Literal

import numpy as np

from minillm.ladder.continuous import Row, Scheduler, StepPlan
from minillm.ladder.request import Request, RequestId, Timing


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One forward. Times in seconds on the engine's clock; blocks as they stood after planning."""

    start: float
    duration: float
    rows: int  # all rows of the forward
    idle_rows: int  # rows of finished requests that a static batch still carried
    due_rows: int  # rows that were given a token, or an accepted run
    prompt_tokens: int  # fed for the first time
    decode_tokens: int  # fed for the first time: newest output tokens
    recomputed_tokens: int  # fed again after a preemption
    drafted_tokens: int  # fed behind newest tokens, to be verified
    accepted_tokens: int  # of those, accepted and kept
    output_tokens: int  # given to requests
    admitted: int
    preempted: int
    waiting: int
    blocks_live: int
    blocks_cached: int
    blocks_free: int
    kv_tokens: int  # token slots of live blocks that hold something once the step is done
    members: tuple[RequestId, ...]  # whose rows these were, in the forward's order


@dataclass
class RequestRecord:
    """One request's life."""

    request_id: RequestId
    arrival: float
    prompt_tokens: int
    first_scheduled: float | None = None
    token_times: list[float] = field(default_factory=list)  # of each output token: when its step ended
    finish: float | None = None
    finish_reason: str | None = None
    cached_tokens: int = 0  # of the prompt, found in the prefix cache, computed by others
    recovered_tokens: int = 0  # its own, found again in the cache after a preemption
    preemptions: int = 0
    rounds: int = 0  # verifications of at least one draft
    drafted_tokens: int = 0
    accepted_tokens: int = 0  # drafts accepted and kept: what follows a stop is neither

    @property
    def output_tokens(self) -> int:
        return len(self.token_times)

    @property
    def first_token(self) -> float | None:
        return self.token_times[0] if self.token_times else None

    @property
    def timing(self) -> Timing:
        return Timing(self.arrival, self.first_scheduled, self.first_token, self.finish)


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


class Records:
    """The engine writes here before and after each forward; readers only read.

    `totals` counts over the whole run (every counting field of the step records, steps,
    busy seconds, finished requests by reason, cached and recovered tokens); `peaks` keeps
    the highest rows, blocks_live, kv_tokens and waiting of any step. `block_size`, in tokens,
    turns blocks into tokens reserved; None where no pool is known.
    """

    def __init__(self, mode: Literal["all", "summary"] = "all", block_size: int | None = None) -> None:
        if mode not in ("all", "summary"):
            raise ValueError(f"records={mode!r}: choose 'all' or 'summary'")
        self.mode, self.block_size = mode, block_size
        self.steps: list[StepRecord] = []
        self.requests: list[RequestRecord] = []  # finished ones, in the order in which they ended
        self.live: dict[RequestId, RequestRecord] = {}
        self.totals: Counter[str] = Counter()
        self.peaks: Counter[str] = Counter()
        durations = ("queue", "ttft", "itl", "latency") if mode == "summary" else ()
        self.histograms = {name: Histogram() for name in durations}
        self.began: float | None = None
        self.ended: float | None = None

    def arrived(self, request: Request) -> None:
        """A request reached the queue."""
        self.live[request.id] = RequestRecord(request.id, request.arrival, request.num_prompt)
        self.began = request.arrival if self.began is None else min(self.began, request.arrival)

    def planned(self, plan: StepPlan, scheduler: Scheduler, now: float) -> dict:
        """Before the forward: note who joins and who was sent away; returns what `committed` needs."""
        self.totals["admitted"] += len(plan.admitted)  # here, since they stand even if the forward fails
        self.totals["preempted"] += len(plan.preempted)
        for request in plan.preempted:
            self.live[request.id].preemptions += 1
        for request in plan.admitted:
            record = self.live[request.id]
            if record.first_scheduled is None:
                record.first_scheduled = now
            recovered = min(request.num_kv, request.num_once_stored)  # the rest was computed by others
            record.recovered_tokens += recovered
            record.cached_tokens += request.num_kv - recovered
            self.totals["recovered_tokens"] += recovered
            self.totals["cached_tokens"] += request.num_kv - recovered
        return {"start": now, **step_counts(plan, scheduler)}

    def committed(
        self, counts: dict, end: float, news: list[tuple[Request, list[int]]], plan: StepPlan, taken: Sequence[int] = ()
    ) -> None:
        """After the forward: each due request's new tokens, and the step's record.

        taken: blocks taken before each repetition of the plan, which is a step of its own.
        """
        ends, drafted, accepted, output = [*plan.ends, end], 0, 0, 0
        for (request, tokens), row in zip(news, [row for row in plan.rows if row.due], strict=True):
            record = self.live[request.id]
            record.token_times += ends if taken else [end] * len(tokens)
            output += len(tokens)
            if row.drafts:
                kept = accepted_drafts(row.drafts, tokens)
                record.rounds += 1
                record.drafted_tokens += len(row.drafts)
                record.accepted_tokens += kept
                drafted, accepted = drafted + len(row.drafts), accepted + kept
        counts |= {"due_rows": len(news), "output_tokens": len(news) if taken else output,
                   "drafted_tokens": drafted, "accepted_tokens": accepted}
        steps = [StepRecord(**counts, duration=ends[0] - counts["start"])]
        for (start, end), blocks in zip(pairwise(ends), taken, strict=True):
            counts = repeated(counts, start, blocks)
            steps.append(StepRecord(**counts, duration=end - start))
        self._count(steps)
        self.ended = end

    def _count(self, steps: list[StepRecord]) -> None:
        """Add a step, and its repetitions, which count alike and of which the last reaches highest."""
        first, last, repetitions = steps[0], steps[-1], len(steps) - 1
        self.totals["steps"] += len(steps)
        for step in steps:  # one by one, so that the sum rounds alike however they were run
            self.totals["busy_seconds"] += step.duration
        for name in COUNTED:
            self.totals[name] += getattr(first, name) + repetitions * getattr(last, name)
        for name in PEAKED:
            self.peaks[name] = max(self.peaks[name], getattr(last, name))
        if self.mode == "all":
            self.steps += steps

    def finished(self, request: Request, now: float) -> RequestRecord:
        """A request ended, however it did; returns its record, which a summary does not keep."""
        record = self.live.pop(request.id)
        record.finish, record.finish_reason = now, request.finish_reason
        self.totals[f"finished_{request.finish_reason}"] += 1
        if self.mode == "all":
            self.requests.append(record)
        elif request.finish_reason != "abort" and record.token_times:
            self.histograms["queue"].add(record.first_scheduled - record.arrival)
            self.histograms["ttft"].add(record.first_token - record.arrival)
            self.histograms["latency"].add(now - record.arrival)
            self.histograms["itl"].add(*[later - earlier for earlier, later in pairwise(record.token_times)])
        return record

    def to_chrome_trace(self, path: str | Path) -> None:
        """Write the requests' lives as a trace that chrome://tracing and Perfetto open."""
        Path(path).write_text(json.dumps({"traceEvents": list(self._trace_events())}))

    def _trace_events(self) -> Iterator[dict]:
        """Complete events ("X"), times in microseconds: steps on line 0, each request on a line of its own."""

        def event(name: str, line: int, start: float, end: float, details: dict) -> dict:
            micro = {"ts": start * 1e6, "dur": (end - start) * 1e6}
            return {"name": name, "ph": "X", "pid": 0, "tid": line, **micro, "args": details}

        for step in self.steps:
            yield event("step", 0, step.start, step.start + step.duration, asdict(step))
        for line, r in enumerate(sorted(self.requests, key=lambda r: r.arrival), start=1):
            marks = [("waiting", r.arrival), ("prefill", r.first_scheduled), ("decode", r.first_token), ("", r.finish)]
            marks = [(name, at) for name, at in marks if at is not None]
            details = {"request": str(r.request_id), "output_tokens": r.output_tokens}
            for (name, start), (_, end) in pairwise(marks):
                yield event(name, line, start, end, details)


COUNTED = ("rows", "idle_rows", "due_rows", "prompt_tokens", "decode_tokens", "recomputed_tokens", "output_tokens",
           "drafted_tokens", "accepted_tokens")
PEAKED = ("rows", "blocks_live", "kv_tokens", "waiting")


def accepted_drafts(drafts: Sequence[int], tokens: Sequence[int]) -> int:
    """How many of a row's new tokens are its drafts: its leading ones that agree."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(drafts, tokens, strict=False)))


def step_counts(plan: StepPlan, scheduler: Scheduler) -> dict:
    """The fields of a step record that are known once it is planned."""
    pool, rows = scheduler.memory.pool, plan.rows
    fed = tokens_by_kind(rows)
    unfilled = sum([len(r.block_table) * pool.block_size - r.num_kv for r in scheduler.running])
    unfilled -= sum(fed.values())  # about to be filled
    return {
        **fed,
        "idle_rows": sum([row.idle for row in rows]),
        "rows": len(rows),
        "members": tuple([row.request.id for row in rows]),
        "admitted": len(plan.admitted),
        "preempted": len(plan.preempted),
        "waiting": len(scheduler.waiting),
        "blocks_live": pool.num_live,
        "blocks_cached": len(pool.cached),
        "blocks_free": len(pool.free),
        "kv_tokens": pool.num_live * pool.block_size - unfilled,
    }


def repeated(counts: dict, start: float, blocks: int) -> dict:
    """The counts of a step of decodes that follows one like it, for which so many blocks were taken."""
    rows, free = counts["rows"], min(blocks, counts["blocks_free"])
    return counts | {
        "start": start, "prompt_tokens": 0, "decode_tokens": rows, "admitted": 0,
        "blocks_live": counts["blocks_live"] + blocks, "blocks_free": counts["blocks_free"] - free,
        "blocks_cached": counts["blocks_cached"] - (blocks - free), "kv_tokens": counts["kv_tokens"] + rows,
    }


def tokens_by_kind(rows: Sequence[Row]) -> dict[str, int]:
    """What rows feed for somebody, told apart by position: computed before, else of the prompt, else output."""
    recomputed = prompt = decode = 0
    for row in rows:
        request, start, end = row.request, row.start, row.end
        if row.idle:
            continue
        if start >= request.num_prompt and start >= request.num_once_stored:  # nearly every row of nearly every step
            decode += end - start
            continue
        again = min(max(request.num_once_stored, start), end)
        new = min(max(request.num_prompt, again), end)
        recomputed, prompt, decode = recomputed + again - start, prompt + new - again, decode + end - new
    return {"recomputed_tokens": recomputed, "prompt_tokens": prompt, "decode_tokens": decode}
