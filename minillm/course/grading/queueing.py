"""For exercise 12: the package's scheduler with the learner's order of prompts, in virtual time.

The package feeds prompts in order of arrival: those under way, then those in the queue. Here
a function says the order, anew at every step, and sees only what a server would see.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from minillm.fast.engine import Engine
from minillm.ladder.continuous import Scheduler, StepPlan
from minillm.ladder.request import Request
from minillm.measure import metrics
from minillm.measure.capacity import GB
from minillm.measure.service import Service
from minillm.measure.workload import WorkItem, play

STEP_TOKENS = 512  # the budget of a step: first one token for each row that decodes, the rest for prompts


@dataclass(frozen=True)
class Prompt:
    """What a server knows of a prompt that is not computed to its end."""

    number: int  # its place in line: 1 came first
    arrival: float  # seconds on the server's clock
    tokens: int  # of the whole prompt
    left: int  # of them, those still to be computed


Order = Callable[[list[Prompt], float], Sequence[Prompt]]


class OrderedScheduler(Scheduler):
    """An engine's scheduler, but with prompts fed in an order of one's own."""

    def __init__(self, engine: Engine, order: Order) -> None:
        was = engine.scheduler
        super().__init__(was.batching, was.memory, was.max_batch, was.max_step_tokens)
        self.order, self.clock = order, engine.clock

    def plan(self, plan: StepPlan | None = None, decodes: bool = True) -> StepPlan:
        """The decodes, then prompts in the learner's order while budget is left; one that waits joins in its turn."""
        plan = StepPlan(budget=self.max_step_tokens)
        for request in list(self.running):
            if request.num_pending == 1:
                self.feed(request, 1, plan)
        requests = {r.arrival_number: r for r in (*self.running, *self.waiting) if r.num_pending > 1}
        for number in self._ordered(list(requests.values())):
            request = requests[number]
            if plan.budget > 0 and (request in self.running or self._join(request, plan)):
                self.feed(request, self.chunk(request, plan), plan)
        return plan

    def _ordered(self, requests: list[Request]) -> list[int]:
        """The requests' numbers in the learner's order; ValueError unless it holds each prompt once."""
        prompts = [Prompt(r.arrival_number, r.arrival, r.num_prompt, r.num_pending) for r in requests]
        ordered = [prompt.number for prompt in self.order(list(prompts), self.clock.now())] if prompts else []
        if sorted(ordered) != sorted(prompt.number for prompt in prompts):
            raise ValueError(f"{len(prompts)} prompts were to be ordered; they did not come back once each")
        return ordered

    def _join(self, request: Request, plan: StepPlan) -> bool:
        """Move a request from the queue into the batch, if there is a row, and memory for all that it may become."""
        held = sum(self._final_blocks(other) - len(other.block_table) for other in self.running)
        if len(self.running) >= self.max_batch or not self.memory.admit(request, self._final_blocks(request), held):
            return False
        self.waiting.remove(request)
        self.running.append(request)
        plan.admitted.append(request)
        return True

    def _final_blocks(self, request: Request) -> int:
        return self.memory.pool.blocks_for(request.max_kv)


def in_order_of_arrival(prompts: list[Prompt], now: float) -> list[Prompt]:
    """The given scheduler: first come, first served."""
    return sorted(prompts, key=lambda prompt: prompt.number)


def server(order: Order | None = None) -> Engine:
    """Llama-3-8B on an A100 in virtual time, with memory for every request; None: the package's own scheduler."""
    engine = Service(kv_memory=50 * GB, max_batch=128, max_step_tokens=STEP_TOKENS).engine(max_context=32_768)
    if order:
        engine.scheduler = OrderedScheduler(engine, order)
    return engine


@dataclass(frozen=True)
class Score:
    """What an order reached on one load: times to first token, and output tokens per second."""

    p50_s: float
    p99_s: float
    longest_s: float
    tokens_per_s: float


def serve(order: Order, items: Sequence[WorkItem]) -> Score:
    """Serve the load with prompts in this order."""
    engine = server(order)
    play(engine, items)
    found = metrics.summary(engine.records)
    ttft = found["ttft_s"]
    return Score(ttft["p50"], ttft["p99"], ttft["max"], found["output_tokens_per_s"])


def load(seed: int, rate: float = 14.0) -> list[WorkItem]:
    """99 questions of 100 to 1,000 tokens, `rate` a second, and one document of 16,000 among them; short answers."""
    draw = np.random.default_rng(seed)
    arrivals = draw.exponential(1 / rate, 100).cumsum()
    sizes, answers = draw.integers(100, 1001, 100), draw.integers(2, 9, 100)
    sizes[draw.integers(20, 60)] = 16_000
    return [WorkItem(float(at), [1] * int(size), int(answer))
            for at, size, answer in zip(arrivals, sizes, answers, strict=True)]


def rush(questions: int = 120, gap: float = 0.064) -> list[WorkItem]:
    """One document of 8,000 tokens, and right behind it as many questions of 1,000 as the server can just answer."""
    return [WorkItem(0.0, [1] * 8_000, 2), *(WorkItem(0.01 + i * gap, [1] * 1_000, 2) for i in range(questions))]


@cache
def given(seed: int) -> Score:
    """What first come, first served reaches on `load(seed)`."""
    return serve(in_order_of_arrival, load(seed))
