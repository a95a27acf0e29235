"""What happened, as plain data: one record a step, one a request. Every metric is computed from these.

Records decide nothing: a reader who only wants to know how a token is made may skip this file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from minillm.ladder.continuous import Row, Scheduler, StepPlan
from minillm.ladder.request import Request, RequestId, Timing


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One forward. Times in seconds on the engine's clock; blocks as they stood after planning."""

    start: float
    duration: float
    rows: int  # all rows of the forward
    idle_rows: int  # rows of finished requests that a static batch still carried
    sampled_rows: int  # rows that were given a token, or several (rung 6)
    prompt_tokens: int  # fed for the first time
    decode_tokens: int  # fed for the first time: newest output tokens
    recomputed_tokens: int  # fed again after a preemption
    drafted_tokens: int  # fed after newest tokens, to be verified
    accepted_tokens: int  # of those, accepted and kept
    output_tokens: int  # given to requests
    admitted: int
    preempted: int
    waiting: int
    blocks_live: int
    blocks_cached: int
    blocks_free: int
    kv_tokens: int  # token slots of live blocks that hold something once the step is done, drafts not counted
    members: tuple[RequestId, ...]  # whose rows these were, in the forward's order
    kinds: tuple[str, ...]  # of each row: "prefill" | "decode" | "recompute" | "idle"


COUNTED = ("rows", "idle_rows", "sampled_rows", "prompt_tokens", "decode_tokens", "recomputed_tokens", "output_tokens",
           "drafted_tokens", "accepted_tokens")
PEAKED = ("rows", "blocks_live", "kv_tokens", "waiting")


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
    cached_tokens: int = 0  # of the prompt, found in the prefix cache, computed for other requests
    recovered_tokens: int = 0  # found in the cache after a preemption, of what it had stored
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


class Records:
    """The lists, sums over the whole run (`totals`), and the highest of any step (`peaks`).

    `block_size`, in tokens, turns blocks into tokens reserved; None where no pool is known.
    """

    def __init__(self, block_size: int | None = None) -> None:
        self.block_size = block_size
        self.steps: list[StepRecord] = []
        self.requests: list[RequestRecord] = []  # finished ones, in the order in which they ended
        self.live: dict[RequestId, RequestRecord] = {}
        self.totals: Counter[str] = Counter()
        self.peaks: Counter[str] = Counter()
        self.began: float | None = None  # the first arrival
        self.ended: float | None = None  # the end of the last step

    def arrived(self, request: Request) -> None:
        """A request reached the queue."""
        self.live[request.id] = RequestRecord(request.id, request.arrival, request.num_prompt)
        self.began = request.arrival if self.began is None else min(self.began, request.arrival)

    def planned(self, plan: StepPlan, scheduler: Scheduler) -> dict:
        """Before the forward: note what was admitted and preempted; returns what is known of the step's record."""
        self.totals["admitted"] += len(plan.admitted)  # here, since they stand even if the forward fails
        self.totals["preempted"] += len(plan.preempted)
        for request in plan.preempted:
            self.live[request.id].preemptions += 1
        for request in plan.admitted:
            record = self.live[request.id]
            if record.first_scheduled is None:
                record.first_scheduled = plan.start
            recovered = min(request.num_kv, request.num_kv_lost)  # the rest was computed for other requests
            record.recovered_tokens += recovered
            record.cached_tokens += request.num_kv - recovered
            self.totals["recovered_tokens"] += recovered
            self.totals["cached_tokens"] += request.num_kv - recovered
        return step_counts(plan, scheduler)

    def committed(self, plan: StepPlan, counts: dict, accepted: Sequence[tuple[Request, list[int]]]) -> None:
        """After the forward: the new tokens of each request that sampled some, and the step's record."""
        output = drafted = kept = 0
        for (request, tokens), row in zip(accepted, (row for row in plan.rows if row.samples), strict=True):
            record, same = self.live[request.id], accepted_drafts(row.drafts, tokens)
            record.token_times += [plan.end] * len(tokens)
            record.rounds += bool(row.drafts)
            record.drafted_tokens += len(row.drafts)
            record.accepted_tokens += same
            output, drafted, kept = output + len(tokens), drafted + len(row.drafts), kept + same
        self.add(StepRecord(
            start=plan.start, duration=plan.end - plan.start, **counts, sampled_rows=len(accepted),
            output_tokens=output, drafted_tokens=drafted, accepted_tokens=kept,
        ))

    def add(self, step: StepRecord) -> None:
        """Count a step, and keep its record."""
        self.totals["steps"] += 1
        self.totals["busy_seconds"] += step.duration
        for name in COUNTED:
            self.totals[name] += getattr(step, name)
        for name in PEAKED:
            self.peaks[name] = max(self.peaks[name], getattr(step, name))
        self.ended = step.start + step.duration
        self.steps.append(step)

    def finished(self, request: Request, now: float) -> RequestRecord:
        """A request ended, for whatever reason; returns its record."""
        record = self.live.pop(request.id)
        record.finish, record.finish_reason = now, request.finish_reason
        self.totals[f"finished_{request.finish_reason}"] += 1
        self.requests.append(record)
        return record


def accepted_drafts(drafts: Sequence[int], tokens: Sequence[int]) -> int:
    """How many of a row's new tokens are its drafts: its leading ones that agree."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(drafts, tokens, strict=False)))


def step_counts(plan: StepPlan, scheduler: Scheduler) -> dict:
    """The fields of a step record that are known once it is planned."""
    pool, rows = scheduler.memory.pool, plan.rows
    by_kind = [tokens_by_kind(row) for row in rows]
    fed = sum(map(Counter, by_kind), Counter())
    unfilled = sum(len(r.block_table) * pool.block_size - r.num_kv for r in scheduler.running) - fed.total()
    kinds = tuple(next(iter(kinds)) for kinds in by_kind)  # of each row the first
    return {
        "prompt_tokens": fed["prefill"], "decode_tokens": fed["decode"], "recomputed_tokens": fed["recompute"],
        "rows": len(rows), "idle_rows": kinds.count("idle"), "kinds": kinds,
        "members": tuple(row.request.id for row in rows),
        "admitted": len(plan.admitted), "preempted": len(plan.preempted), "waiting": len(scheduler.waiting),
        "blocks_live": pool.num_live, "blocks_cached": len(pool.cached), "blocks_free": len(pool.free),
        "kv_tokens": pool.num_live * pool.block_size - unfilled,
    }


def tokens_by_kind(row: Row) -> dict[str, int]:
    """Tokens that a row feeds: again after a preemption, else of its prompt, else of its output. Idle ones: none."""
    if row.idle:
        return {"idle": 0}
    again = min(max(row.request.num_kv_lost, row.start), row.end)
    prompt = min(max(row.request.num_prompt, again), row.end)
    fed = {"recompute": again - row.start, "prefill": prompt - again, "decode": row.end - prompt}
    return {kind: tokens for kind, tokens in fed.items() if tokens}
