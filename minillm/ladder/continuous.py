"""Rung 3: re-decide the batch at every step.

The scheduler in a dozen lines. `waiting` is a queue in order of arrival; `running` holds the
rows of the batch, oldest first. Each step `plan` gives out a budget of tokens:

    1. every running row that decodes feeds its newest token;
    2. prompts under way feed a chunk from what is left, oldest first;
    3. waiting requests join while there is a row, memory and budget;
    4. with speculation, decoding rows may add drafts, if budget and memory are left.

If memory runs out in 1 or 2, the youngest row is preempted: it gives its blocks back and
waits at the head of the queue, to recompute prompt and output so far when it returns.
After the forward, `commit` appends the sampled tokens; who has ended leaves at once, and
its row and memory are free for the next step. (Orca: Yu et al., 2022; chunked prefill:
Sarathi-Serve, Agrawal et al., 2024.)

Bounds, since a scheduler must be fair as well as fast. With chunked prefill a decoding row
gets a token at every step, and the oldest prompt under way gets at least one token of
budget, because there are never more rows than budget. Without it, steps that hold only
whole prompts alternate with steps that decode, so a decode waits one step at most. The
queue is strictly first come, first served, and the oldest row is never preempted, so the
head of the queue waits for the rows before it and for nothing else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from minillm.ladder.attention import RowSpan
from minillm.ladder.paged import InvariantError, Paged, Slots
from minillm.ladder.request import Request, RequestError, check_prompt
from minillm.ladder.static import StaticBatching


class ContinuousBatching:
    """Admit at every step; whoever has ended leaves at once."""

    waits_for_budget = True  # a request that cannot feed a token yet had better leave its row to others

    def is_open(self, running: Sequence[Request]) -> bool:
        """Whether new requests may join at this step."""
        return True

    def leaving(self, running: Sequence[Request]) -> list[Request]:
        """Who leaves after this step."""
        return [request for request in running if request.finished]

    def tokens_to_claim(self, request: Request) -> int:
        """Tokens that memory must be found for at admission: the known and one more, lest it be preempted at once."""
        return min(request.num_tokens + 1, request.max_kv)


@dataclass(eq=False, slots=True)
class Row:
    """One request's part in a step: it feeds its tokens from position `start` up to, not including, `end`."""

    request: Request
    start: int
    end: int
    due: bool  # does it need a token sampled after its last one?
    idle: bool = False  # a finished row that a static batch still carries
    num_drafts: int = 0  # how many tokens a proposer may add, for which there is room
    drafts: list[int] = field(default_factory=list)  # those it added, fed behind the tokens to be verified

    @property
    def tokens(self) -> list[int]:
        """The tokens to feed."""
        return self.request.tokens[self.start : self.end]

    @property
    def span(self) -> RowSpan:
        """The row as attention sees it."""
        count = self.end - self.start + len(self.drafts)
        return RowSpan(self.start, count, self.request.block_table, stores=not self.idle)


@dataclass
class StepPlan:
    """What one forward will do, and what was decided on the way to it."""

    budget: int
    rows: list[Row] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    repeats: int = 0  # how often an executor may run it again at once, each row feeding the token it was just given
    until: float = 0.0  # the moment from which it may not, since somebody arrives
    ends: list[float] = field(default_factory=list)  # when each run of it but the last ended

    def add(self, row: Row) -> None:
        self.rows.append(row)
        self.budget -= row.end - row.start

    def drop(self, request: Request) -> None:
        """Take a preempted request's row out again."""
        for row in [row for row in self.rows if row.request is request]:
            self.rows.remove(row)
            self.budget += row.end - row.start


def no_drafts(batch: int) -> int:
    """The draft length without speculation."""
    return 0


class Scheduler:
    """Decides who is in the next forward, and keeps the books of who holds what."""

    def __init__(
        self,
        batching: ContinuousBatching | StaticBatching,
        memory: Paged | Slots,
        max_batch: int,
        max_step_tokens: int,
        max_context: int,
        chunked_prefill: bool = True,
        draft_length: Callable[[int], int] = no_drafts,
    ) -> None:
        """draft_length: how many drafts a row may verify in a step in which so many decode."""
        self.draft_length = draft_length
        self.batching, self.memory = batching, memory
        self.max_batch, self.max_step_tokens, self.max_context = max_batch, max_step_tokens, max_context
        self.chunked_prefill = chunked_prefill
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.decodes_went_last = False  # without chunking: whether the last step let the decodes run
        self.num_arrived = 0

    def check(self, request: Request) -> None:
        """Raise RequestError for a request that could never run: "never" must not look like "not now"."""
        check_prompt(request.prompt_ids)
        prompt, new, pool = request.num_prompt, request.params.max_tokens, self.memory.pool
        clashes = []
        if prompt + new > self.max_context:
            clashes.append(f"> context {self.max_context:,}")
        if (blocks := pool.blocks_for(request.max_kv)) > pool.num_blocks:
            clashes.append(f"need {blocks:,} blocks of {pool.block_size}, the pool has {pool.num_blocks:,}")
        if not self.chunked_prefill and prompt > self.max_step_tokens:
            clashes.append(f"the prompt > {self.max_step_tokens:,} tokens a step, and chunked prefill is off")
        if clashes:
            raise RequestError(f"{prompt:,} prompt + {new:,} new tokens: {'; '.join(clashes)}")

    def add(self, request: Request) -> None:
        """Queue a request that `check` has passed."""
        self.num_arrived += 1
        request.order = self.num_arrived
        self.waiting.append(request)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def plan(self) -> StepPlan:
        """The next step. Its rows stay valid until `commit` or `cancel`."""
        plan = StepPlan(self.max_step_tokens)
        if not self.chunked_prefill and self.decodes_went_last:
            self._plan_prompts(plan)
            self._admit(plan)
        self.decodes_went_last = not plan.rows
        if not plan.rows:
            self._plan_decodes(plan)
            self._plan_prompts(plan)
            self._admit(plan)
            self._plan_drafts(plan)
        return plan

    def repeats(self, plan: StepPlan) -> int:
        """How many of the next steps are sure to look like this one, if no answer ends and nobody arrives.

        A lower bound: 0 unless everybody decodes and all will find memory. Whoever waits has just been refused, and
        will be again while nobody leaves, since rows that grow leave less room.
        """
        fed, rows = self.max_step_tokens - plan.budget, len(plan.rows)
        if plan.preempted or not fed == rows == len(self.running) or not all([row.due for row in plan.rows]):
            return 0
        if self.draft_length is not no_drafts or (self.waiting and not self.chunked_prefill):
            return 0
        return self.memory.steps_ahead(rows)

    def repeat(self, plan: StepPlan, times: int) -> list[int]:
        """Let a plan stand for so many further steps like it. Returns the blocks taken before each of them."""
        size, taken = self.memory.pool.block_size, [0] * times
        for row in plan.rows if times else ():
            unfilled = len(row.request.block_table) * size - row.end
            for step in range(unfilled, times, size):
                taken[step] += 1
            row.end += times
            self.memory.reserve(row.request, row.end)
        return taken

    def commit(self, plan: StepPlan, outputs: Sequence[Sequence[int]]) -> list[tuple[Request, list[int]]]:
        """Take what the step computed. `outputs` holds the new tokens of each due row, in the rows' order.

        Returns each due request with the tokens it accepted: all, or those up to a stop.
        """
        news, outputs = [], iter(outputs)
        for row in plan.rows:
            if row.idle:
                continue
            request = row.request
            request.num_kv = row.end
            if row.due:
                tokens = request.extend(next(outputs))
                news.append((request, tokens))
                if row.drafts:  # the last token is never stored, and rejected drafts no longer are
                    request.num_kv += len(tokens) - 1
            self.memory.settle(request)
        self._depart()
        return news

    def cancel(self, plan: StepPlan) -> None:
        """Forget a step whose forward failed: nothing was stored, everybody can be planned again."""
        for row in plan.rows:
            self.memory.settle(row.request)

    def finish(self, request: Request, reason: str) -> None:
        """End a request from outside, waiting or running: an abort, or a stop string in its text."""
        if not request.finished:
            request.finish_reason = reason
        if request in self.running:
            self._depart()
        else:
            self.waiting.remove(request)

    def _plan_decodes(self, plan: StepPlan) -> None:
        for request in list(self.running):
            if request.finished:  # only a static batch still carries it
                last = request.num_kv - 1
                if last >= 0:  # else it was aborted before its first chunk, and has nothing to feed again
                    plan.add(Row(request, last, last + 1, due=False, idle=True))
            elif request.num_pending == 1 and request not in plan.preempted:
                start, end = request.num_kv, request.num_kv + 1
                if self.memory.reserve(request, end) or self._make_room(request, end, plan):
                    plan.add(Row(request, start, end, due=True))

    def _plan_prompts(self, plan: StepPlan) -> None:
        if len(plan.rows) == len(self.running):  # everybody decodes
            return
        for request in list(self.running):
            # one pending token is a decode: fed here, it would take the room of a prompt that needs the whole budget
            if not request.finished and request.num_pending > 1 and request not in plan.preempted:
                self._feed_prompt(request, plan)

    def _feed_prompt(self, request: Request, plan: StepPlan) -> None:
        """Plan the next chunk of a prompt, if the budget has room for it."""
        number = min(request.num_pending, plan.budget) if self.chunked_prefill else request.num_pending
        end = request.num_kv + number
        if self._has_budget(request, plan) and self._make_room(request, end, plan):
            plan.add(Row(request, request.num_kv, end, due=end == request.num_tokens))

    def _plan_drafts(self, plan: StepPlan) -> None:
        """Let decoding rows verify drafts, with what budget and memory nobody else wants at this step."""
        if self.draft_length is no_drafts:
            return
        decoding = [row for row in plan.rows if row.due and row.end - row.start == 1]
        wanted = self.draft_length(len(decoding)) if decoding else 0
        for row in decoding:
            request = row.request
            # a round gives one token more than it accepts drafts, so the last token is never a draft
            number = min(wanted, plan.budget, request.params.max_tokens - request.num_output - 1)
            if number > 0 and self.memory.reserve(request, request.num_tokens + number):
                row.num_drafts = number
                plan.budget -= number

    def _has_budget(self, request: Request, plan: StepPlan) -> bool:
        """Room for a chunk of its prompt; or without chunking, for all of it, or an otherwise empty step.

        `check` saw to it that a whole prompt fits a step, but one that recomputes its output too may not.
        """
        if self.chunked_prefill:
            return plan.budget > 0
        return request.num_pending <= plan.budget or not plan.rows

    def _admit(self, plan: StepPlan) -> None:
        """Let the head of the queue join, again and again, until something is short."""
        if not self._may_join(plan) or not self.batching.is_open(self.running):
            return
        promised = sum(self._claim(request) - len(request.block_table) for request in self.running)
        while self._may_join(plan):
            request = self.waiting[0]
            claim = self._claim(request)
            if not self.memory.admit(request, claim, promised):
                return
            self.running.append(self.waiting.popleft())
            plan.admitted.append(request)
            self._feed_prompt(request, plan)
            promised += claim - len(request.block_table)

    def _may_join(self, plan: StepPlan) -> bool:
        """Whether there is a head of the queue, and but for memory room for it."""
        if not self.waiting or plan.preempted or len(self.running) >= self.max_batch:
            return False
        return not self.batching.waits_for_budget or self._has_budget(self.waiting[0], plan)

    def _claim(self, request: Request) -> int:
        """Blocks that a running request needs soon, or holds already."""
        needed = self.memory.pool.blocks_for(self.batching.tokens_to_claim(request))
        return max(needed, len(request.block_table))

    def _make_room(self, request: Request, num_kv: int, plan: StepPlan) -> bool:
        """Find memory for `num_kv` stored tokens, preempting the youngest; False if that was the request itself."""
        while not self.memory.reserve(request, num_kv):
            victim = self.running.pop()
            victim.num_once_stored = max(victim.num_once_stored, victim.num_kv)
            self.memory.release(victim)
            self.waiting.appendleft(victim)
            plan.drop(victim)
            plan.preempted.append(victim)
            if victim is request:
                return False
        return True

    def _depart(self) -> None:
        for request in self.batching.leaving(self.running):
            self.running.remove(request)
            self.memory.release(request)

    def check_invariants(self) -> None:
        """Raise InvariantError unless queue, batch and pool agree with each other."""
        pool = self.memory.pool
        orders = [request.order for request in (*self.running, *self.waiting)]
        if orders != sorted(set(orders)):
            raise InvariantError(f"running, waiting: not in order of arrival, or one twice: {orders}")
        if len(self.running) > self.max_batch:
            raise InvariantError(f"running: {len(self.running)} rows, at most {self.max_batch} allowed")
        for request in self.waiting:
            if request.block_table or request.num_kv:
                raise InvariantError(f"block_table: {request.id!r} waits, but holds {len(request.block_table)} blocks")
        for request in self.running:
            if not 0 <= request.num_kv < request.num_tokens:
                raise InvariantError(f"num_kv: {request.id!r} stores {request.num_kv} of {request.num_tokens} tokens")
            expected = self.memory.expected_blocks(request)
            if len(request.block_table) != expected:
                held = len(request.block_table)
                raise InvariantError(f"block_table: {request.id!r} has {held} blocks, not {expected}")
            self._check_content(request)
        pool.check_invariants(request.block_table for request in self.running)

    def _check_content(self, request: Request) -> None:
        """The index must say of each block that a request holds just what the request stored there."""
        pool = self.memory.pool
        for i, block in enumerate(request.block_table):
            tokens = tuple(request.tokens[i * pool.block_size : (i + 1) * pool.block_size])
            if block in pool.key_of and pool.key_of[block][1] != tokens:
                raise InvariantError(f"key_of: block {block} of {request.id!r} is indexed as other tokens")
