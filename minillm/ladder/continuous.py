"""Rung 3: re-decide the batch at every step. And what rung 4 adds to that: preemption.

`waiting` is a queue in order of arrival; `running` holds the rows of the batch, oldest first.
Each step, `plan` gives out a budget of tokens:

    1. every running row that decodes feeds its newest token;
    2. prompts under way feed a chunk from what is left, oldest first;
    3. waiting requests join while there is a row, memory and budget.

If memory runs out, the youngest row is preempted: it gives its blocks back and waits at the head
of the queue, to recompute prompt and output so far when it returns. After the forward, `commit`
appends the sampled tokens; a request that has ended leaves, and its row and memory are free for
the next step. (Orca: Yu et al., 2022; chunked prefill: Sarathi-Serve, Agrawal et al., 2024.)
At a first reading skip `StaticBatching`, which is rung 2 as a policy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from minillm.ladder.attention import RowSpan
from minillm.ladder.paged import Paged, Slots
from minillm.ladder.request import Request


class ContinuousBatching:
    """Admit at every step; a request that has ended leaves immediately."""

    needs_budget = True  # admit a request only if it can feed at least one token now

    def is_open(self, running: Sequence[Request]) -> bool:
        """Whether new requests may join at this step."""
        return True

    def leaving(self, running: Sequence[Request]) -> list[Request]:
        """The requests that leave after this step."""
        return [request for request in running if request.finished]

    def tokens_needed(self, request: Request) -> int:
        """Tokens that memory must hold at admission: one more than known, or its first decode preempts it."""
        return min(request.num_tokens + 1, request.max_kv)


class StaticBatching:
    """Rung 2 as a policy: admit only into an empty batch; hold every row until the longest has ended."""

    needs_budget = False  # the batch is filled in one step: a prompt may join now and be fed later

    def is_open(self, running: Sequence[Request]) -> bool:
        return not running

    def leaving(self, running: Sequence[Request]) -> list[Request]:
        return list(running) if all(request.finished for request in running) else []

    def tokens_needed(self, request: Request) -> int:
        """All, since no row of the batch can be preempted."""
        return request.max_kv


@dataclass(eq=False, slots=True)
class Row:
    """One request's part in a step: it feeds its tokens from position `start` up to, not including, `end`."""

    request: Request
    start: int
    end: int
    samples: bool  # its last token is the newest, so a new one is sampled
    idle: bool = False  # a finished row that a static batch still carries
    drafts: list[int] = field(default_factory=list)  # rung 6: guesses that are fed after the tokens
    num_drafts: int = 0  # rung 6: how many there is room for

    @property
    def tokens(self) -> list[int]:
        """The tokens to feed, drafts included."""
        return self.request.tokens[self.start : self.end] + self.drafts

    @property
    def span(self) -> RowSpan:
        """The row as attention sees it."""
        count = self.end - self.start + len(self.drafts)
        return RowSpan(self.start, count, self.request.block_table, stores=not self.idle)


@dataclass
class StepPlan:
    """What one forward will do, and what was decided on the way to it."""

    budget: int  # tokens that are left to give out
    rows: list[Row] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    start: float = 0.0  # seconds on the engine's clock, which the engine notes
    end: float = 0.0

    def add(self, row: Row) -> None:
        self.rows.append(row)
        self.budget -= row.end - row.start

    def drop(self, request: Request) -> None:
        """Take a preempted request's row out again."""
        for row in [row for row in self.rows if row.request is request]:
            self.rows.remove(row)
            self.budget += row.end - row.start


class Scheduler:
    """Decides what the next forward computes, and which request holds which memory.

    There are never more rows than budget, so a decoding row that is not preempted gets a token at every step,
    and the oldest prompt under way at least one token of budget. The oldest row is never preempted.
    """

    chunked_prefill = True  # `extras/whole_prompts.py` feeds a prompt whole, or lets it wait

    def __init__(
        self, batching: ContinuousBatching | StaticBatching, memory: Paged | Slots, max_batch: int, max_step_tokens: int
    ) -> None:
        """max_batch: rows in a step, at most `max_step_tokens`, the budget of tokens in a step."""
        self.batching, self.memory = batching, memory
        self.max_batch, self.max_step_tokens = max_batch, max_step_tokens
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_arrived = 0

    def add(self, request: Request) -> None:
        """Queue a request that could run alone (`guard.inputs.check_request` has made sure of it)."""
        self.num_arrived += 1
        request.arrival_number = self.num_arrived
        self.waiting.append(request)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def plan(self, plan: StepPlan | None = None, decodes: bool = True) -> StepPlan:
        """The next step, by the three rules at the top of this file. Call `commit` or `cancel` before the next.

        plan, decodes: for `extras/whole_prompts.py`, which plans in two passes.
        """
        plan = plan or StepPlan(budget=self.max_step_tokens)
        for request in list(self.running) if decodes else ():  # 1
            if request.finished and request.num_kv:  # a static batch carries it: it feeds its last stored token again
                plan.add(Row(request, request.num_kv - 1, request.num_kv, samples=False, idle=True))
            elif request.num_pending == 1 and not request.finished:
                self.feed(request, 1, plan)
        for request in list(self.running):  # 2
            if request.num_pending > 1 and not request.finished:
                self.feed(request, self.chunk(request, plan), plan)
        may_join = self.batching.is_open(self.running)  # 3
        while may_join and self.waiting and len(self.running) < self.max_batch and not plan.preempted:
            request = self.waiting[0]
            if self.batching.needs_budget and not self.chunk(request, plan):
                break
            if not self.memory.admit(request, self.blocks_needed(request), self.blocks_owed()):
                break
            self.running.append(self.waiting.popleft())
            plan.admitted.append(request)
            self.feed(request, self.chunk(request, plan), plan)
        return plan

    def chunk(self, request: Request, plan: StepPlan) -> int:
        """How many tokens of its prompt a request feeds in this step."""
        return min(request.num_pending, plan.budget)

    def feed(self, request: Request, count: int, plan: StepPlan) -> None:
        """Let a running request feed its next `count` tokens, if memory can be found for them."""
        start, end = request.num_kv, request.num_kv + count
        if count and request not in plan.preempted and self.find_memory(request, end, plan):
            plan.add(Row(request, start, end, samples=end == request.num_tokens))

    def find_memory(self, request: Request, num_kv: int, plan: StepPlan) -> bool:
        """Reserve memory for `num_kv` stored tokens, preempting the youngest; False if the request itself had to go."""
        while not self.memory.reserve(request, num_kv):
            victim = self.running.pop()
            victim.num_kv_lost = max(victim.num_kv_lost, victim.num_kv)
            self.memory.release(victim)
            self.waiting.appendleft(victim)
            plan.drop(victim)
            plan.preempted.append(victim)
            if victim is request:
                return False
        return True

    def blocks_needed(self, request: Request) -> int:
        """Blocks that a request is promised when it is admitted."""
        return self.memory.pool.blocks_for(self.batching.tokens_needed(request))

    def blocks_owed(self) -> int:
        """Blocks that running requests were promised and have not taken yet."""
        return sum(max(0, self.blocks_needed(request) - len(request.block_table)) for request in self.running)

    def commit(self, plan: StepPlan, outputs: Sequence[Sequence[int]]) -> list[tuple[Request, list[int]]]:
        """Take what the step computed: `outputs` holds the new tokens of each row that samples, in the rows' order.

        Returns each such request with the tokens it accepted: all, or those up to a stop.
        """
        accepted, outputs = [], iter(outputs)
        for row in plan.rows:
            if row.idle:
                continue
            request = row.request
            request.num_kv = row.end
            if row.samples:
                tokens = request.extend(next(outputs))
                accepted.append((request, tokens))
                if row.drafts:  # rung 6: accepted drafts are stored already, the last token is not
                    request.num_kv += len(tokens) - 1
            self.memory.after_step(request)
        self.remove_finished()
        return accepted

    def cancel(self, plan: StepPlan) -> None:
        """Forget a step whose forward failed: nothing was stored, and every row can be planned again."""
        for row in plan.rows:
            self.memory.after_step(row.request)

    def finish(self, request: Request, reason: str) -> None:
        """End a request from outside, waiting or running: an abort, or a stop string in its text."""
        request.finish_reason = request.finish_reason or reason
        if request in self.running:
            self.remove_finished()
        else:
            self.waiting.remove(request)

    def remove_finished(self) -> None:
        """Take the requests that leave out of the batch, and their memory back."""
        for request in self.batching.leaving(self.running):
            self.running.remove(request)
            self.memory.release(request)
