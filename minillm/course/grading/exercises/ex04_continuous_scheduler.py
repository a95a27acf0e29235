"""Exercise 4: a continuous scheduler with chunked prefill."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from minillm.course.grading.tasks import Exercise, Task, expect
from minillm.ladder import continuous
from minillm.ladder import request as request_module
from minillm.ladder.paged import BlockPool, Paged
from minillm.ladder.request import SamplingParams

Fed = dict[str, int]  # request -> tokens that a step feeds


@dataclass(eq=False)
class Request:
    """A prompt of `num_prompt` tokens, and an answer that will have `wanted` tokens."""

    id: str
    num_prompt: int
    wanted: int
    num_kv: int = 0  # tokens that were fed, and have keys and values
    _answer: list[int] = field(default_factory=list)  # grows by `append` alone

    @property
    def num_tokens(self) -> int:
        """Tokens known: the prompt, and the answer so far."""
        return self.num_prompt + self.num_output

    @property
    def num_output(self) -> int:
        """Tokens of the answer so far."""
        return len(self._answer)

    @property
    def num_pending(self) -> int:
        """Tokens known but not yet fed."""
        return self.num_tokens - self.num_kv

    @property
    def finished(self) -> bool:
        return self.num_output >= self.wanted

    def append(self, token: int) -> None:
        """Give it its next token."""
        self._answer.append(token)


def twin(request: Request) -> request_module.Request:
    """The same request as the package's own scheduler wants it."""
    params = SamplingParams(max_tokens=request.wanted)
    return request_module.Request(request.id, list(range(request.num_prompt)), params, 0.0, 0, frozenset())


def step(scheduler, seen: Callable[[list], None] = lambda rows: None) -> Fed:
    """Plan and commit one step; what it fed to whom."""
    rows = [tuple(row) for row in scheduler.plan()]
    fed = {request.id: count for request, count in rows}
    expect(len(fed) == len(rows), "is a request in one step twice?")
    seen(rows)
    scheduler.commit(rows, lambda request: 7)
    return fed


def filled(Scheduler, max_batch: int, budget: int, *requests: Request):
    """A learner's scheduler with these requests in its queue."""
    scheduler = Scheduler(max_batch, budget)
    for request in requests:
        scheduler.add(request)
    return scheduler


scheduler_task = Task(
    "continuous_scheduler", "Scheduler",
    hints=(
        "Write plan as three loops, one for each of the three bold words under `plan`, and let one variable hold what "
        "is left of the budget.",
        "A count is min(request.num_pending, budget). The queue's loop goes on while there is somebody waiting, a free "
        "row, and budget. commit adds each count to num_kv, and looks at num_pending to see who is due.",
        "Decodes: for r in running if r.num_pending == 1: feed 1. Chunks: for r in running if r.num_pending > 1 and "
        "budget > 0. Joining: popleft, append to running, feed. commit: r.num_kv += count; if r.num_pending == 0: "
        "r.append(next_token(r)); keep in running who is not finished.",
    ),
)


@scheduler_task.check(
    mistake="With an idle scheduler and a short prompt in the queue, plan must return [(request, its prompt's length)] "
    "and move the request from waiting to running.",
    look="'Joining'",
)
def feeds_a_prompt(Scheduler):
    """A request joins and feeds its prompt."""
    request = Request("a", 3, 4)
    scheduler = filled(Scheduler, 4, 8, request)
    expect([tuple(row) for row in scheduler.plan()] == [(request, 3)], "one prompt of 3 tokens, budget 8: plan()")
    expect(not scheduler.waiting and list(scheduler.running) == [request], "waiting and running after this plan()")


@scheduler_task.check(
    mistake="num_kv, the sampled token or the end is not kept right: after its prompt a request gets a token in each "
    "step, the last one too, by request.append(token), and feeds the newest.",
    look="'Counting' and 'Sampling'",
)
def decodes(Scheduler):
    """Then it feeds one token a step, until it has finished."""
    for answer in (1, 4):
        request = Request("a", 3, answer)
        scheduler = filled(Scheduler, 4, 8, request)
        fed = [step(scheduler) for _ in range(answer)]
        expect(fed == [{"a": 3}] + [{"a": 1}] * (answer - 1), f"prompt 3, max_tokens {answer}: fed in each step")
        expect(request.finished and request.num_output == answer, f"prompt 3, max_tokens {answer}: its tokens")
        expect(not scheduler.running and not list(scheduler.plan()), f"prompt 3, max_tokens {answer}: afterwards")


NEVER_JOINS = "A prompt longer than the budget never joins: it joins with the first chunk, as many tokens as fit."


@scheduler_task.check(
    mistake="A long prompt is fed at once, or its later chunks are not what is left: min(num_pending, budget).",
    look="'Chunks'",
)
def chunks(Scheduler):
    """A prompt that exceeds the budget is fed in chunks."""
    for prompt, sizes in ((10, [4, 4, 2]), (8, [4, 4]), (5, [4, 1])):
        request = Request("a", prompt, 2)
        scheduler, fed = filled(Scheduler, 2, 4, request), []
        for _ in sizes:
            rows = scheduler.plan()
            fed.append([count for _, count in rows])
            expect(rows or request not in scheduler.waiting, f"a prompt of {prompt}, budget 4: plan()", NEVER_JOINS,
                   "'Joining'")
            request.num_kv += sum(fed[-1])  # what commit does
        expect(fed == [[size] for size in sizes], f"a prompt of {prompt}, budget 4: its chunks")


@scheduler_task.check(
    mistake="Every row is given a token; only a request whose tokens have all been fed is due for one.",
    look="'Sampling'",
)
def not_due_before_the_end(Scheduler):
    """No token is sampled before the prompt is complete."""
    request = Request("a", 10, 3)
    scheduler = filled(Scheduler, 2, 4, request)
    scheduler.plan()
    outputs = []
    for count in (4, 5, 1, 1):
        scheduler.commit([(request, count)], lambda request: 7)
        outputs.append(request.num_output)
    expect(outputs == [0, 0, 1, 2], "a prompt of 10, fed as 4 + 5 + 1, then a decode: tokens of the answer so far")


PROMPT_IN_FRONT = (
    "A long prompt that stands in front of a decoding request takes its budget: go through the decodes first, and "
    "through the chunks after them."
)


@scheduler_task.check(
    mistake="A prompt takes the budget that running requests needed for their next token, so that their readers wait.",
    look="'Decodes first'",
)
def decodes_first(Scheduler):
    """Decodes come before prompts."""
    scheduler = filled(Scheduler, 4, 6, Request("long", 20, 3), Request("b", 1, 9), Request("c", 2, 9))
    for _ in range(4):
        step(scheduler)  # the prompt of 20 is under way, then b and c join
    scheduler.add(Request("d", 30, 3))
    for turn in range(4):
        before = [r for r in scheduler.running if r.num_pending == 1]
        fed = step(scheduler)
        expect(all(fed.get(request.id) == 1 for request in before), f"prompts 20, 1, 2, then 30: step {turn + 5}")
    scheduler = filled(Scheduler, 4, 4)
    scheduler.running = [Request("long", 9, 3), Request("b", 2, 9, 2, [7])]
    asked = "running: a prompt of 9 that must be fed anew, then a request with one pending token; budget 4"
    expect(step(scheduler).get("b") == 1, asked, PROMPT_IN_FRONT)


TOO_MANY = "The counts exceed the budget: every row, a decode too, must reduce what is left of it."


@scheduler_task.check(
    mistake="A request is planned, or joins, although nothing is left of the budget for it.",
    look="'Joining', and at 'Chunks'",
)
def within_the_budget(Scheduler):
    """Counts of a step stay within the budget, and none is 0."""
    def watch(rows):
        counts = [count for _, count in rows]
        expect(sum(counts) <= 5, "prompts 4, 4, 9, 2, budget 5: the sum of the counts", TOO_MANY)
        expect(all(count >= 1 for count in counts), "prompts 4, 4, 9, 2, budget 5: the counts")

    scheduler = filled(Scheduler, 4, 5, Request("a", 4, 3), Request("b", 4, 3), Request("c", 9, 3), Request("d", 2, 3))
    for _ in range(8):
        step(scheduler, watch)
    scheduler = filled(Scheduler, 4, 5, Request("b", 2, 3), Request("c", 2, 3))
    scheduler.running = [Request("a", 7, 3)]
    scheduler.plan()
    expect(len(scheduler.running) == 1, "a prompt of 7 under way, two of 2 waiting, budget 5: who has joined")


@scheduler_task.check(
    mistake="One request too many joins, or one too few: a row is free while len(running) < max_batch.",
    look="'Joining'",
)
def batch_limit(Scheduler):
    """At most max_batch requests run."""
    for most in (1, 3):
        scheduler = filled(Scheduler, most, 32, *(Request(name, 1, 3) for name in "abcde"))
        expect(len(step(scheduler)) == most, f"five short requests, max_batch {most}: rows of the first step")


@scheduler_task.check(
    mistake="A finished request keeps its row, or the free row stays empty until others have ended too: that is a "
    "static batch.",
    look="'Leaving' and 'Joining'",
)
def leaves_at_once(Scheduler):
    """Who has finished leaves at once, and a waiting request takes its row in the next step."""
    scheduler = filled(Scheduler, 2, 16, Request("c", 3, 2))
    scheduler.running = [Request("a", 2, 2, 2, [7]), Request("b", 2, 9, 2, [7])]
    fed = [set(step(scheduler)) for _ in range(2)]
    expect(fed == [{"a", "b"}, {"b", "c"}], "a and b decode, a for the last time, c waits, max_batch 2: who runs")


@scheduler_task.check(
    mistake="Of two that finish in the same step one keeps its row: a loop over a list that it takes things out of "
    "skips the next one.",
    look="'Leaving'",
)
def all_leave(Scheduler):
    """Several may finish in the same step."""
    scheduler = filled(Scheduler, 3, 16)
    scheduler.running = [Request(name, 2, most, 2, [7]) for name, most in (("a", 2), ("b", 2), ("c", 9))]
    step(scheduler)
    expect([r.id for r in scheduler.running] == ["c"], "a, b and c decode, a and b for the last time: who runs then")


@scheduler_task.check(
    mistake="Budget is left over although prompts wait for it: chunks may be small, and several may share a step.",
    look="'Chunks' and 'Joining'",
)
def uses_the_budget(Scheduler):
    """The whole budget is used while there is work."""
    scheduler = filled(Scheduler, 4, 6, Request("a", 4, 9), Request("b", 9, 9), Request("c", 9, 9))
    for turn in range(3):
        expect(sum(step(scheduler).values()) == 6, f"prompts 4, 9, 9, budget 6: tokens fed in step {turn + 1}")


@scheduler_task.check(
    mistake="A shorter or younger request joins before an older one: only the head of the queue may join.",
    look="'Joining'",
)
def first_come(Scheduler):
    """Nobody overtakes in the queue."""
    scheduler = filled(Scheduler, 3, 4, Request("a", 2, 9), Request("long", 12, 2), Request("short", 1, 2))
    first = [step(scheduler) for _ in range(2)]
    expect("short" not in first[0] and "short" not in first[1], "prompts 2, 12, 1, budget 4: the first two steps")


@scheduler_task.check(
    mistake="Each rule seems right on its own, but on mixed traffic some step differs: read the three rules in order.",
    look="'The scheduler'",
)
def as_the_package(Scheduler):
    """It plans what the package's scheduler plans, whatever arrives."""
    for seed in range(4):
        draw = random.Random(seed)
        budget = draw.randint(4, 9)
        lives = [(str(i), draw.randint(1, 14), draw.randint(1, 6), draw.randint(0, 12)) for i in range(9)]
        mine = Scheduler(4, budget)
        theirs = continuous.Scheduler(
            continuous.ContinuousBatching(), Paged(BlockPool(99, 16), prefix_cache=False), 4, budget
        )
        for turn in range(60):
            for name, prompt, answer, arrival in lives:
                if arrival == turn:
                    mine.add(Request(name, prompt, answer))
                    theirs.add(twin(Request(name, prompt, answer)))
            plan = theirs.plan()
            fed = {row.request.id: len(row.tokens) for row in plan.rows}
            theirs.commit(plan, [[7] for row in plan.rows if row.samples])
            expect(step(mine) == fed, f"nine requests drawn with seed {seed}, budget {budget}: step {turn + 1}")


EXERCISE = Exercise(
    "04_continuous_scheduler", "A continuous scheduler", 45, 2, "03_continuous_batching", (scheduler_task,),
    importance=3,
)
