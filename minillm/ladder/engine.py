"""The engine: requests come in, steps are run, tokens go out.

    plan     = scheduler.plan()              which request feeds which tokens
    outputs  = executor.run(plan)            the forward and the sampling
    accepted = scheduler.commit(plan, ...)   tokens appended, finished requests gone, blocks returned
    report                                   records, text and events; only a stop string decides anything here

Begin at `step`. `storage` and `speculator` are where rungs 5 and 6 are handed in. `minillm.Engine` is
this class with everything that makes it quick: see `fast/engine.py`.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Literal

import torch

from minillm.guard.inputs import check_request, context_of, for_each_prompt
from minillm.ladder.attention import KVStorage, native_storage
from minillm.ladder.continuous import ContinuousBatching, Scheduler, StaticBatching, StepPlan
from minillm.ladder.executor import Clock, Executor, ModelExecutor, WallClock
from minillm.ladder.paged import BlockPool, Paged, Slots
from minillm.ladder.records import Records
from minillm.ladder.request import Completion, Request, RequestId, SamplingParams, TokenEvent
from minillm.ladder.sampling import hash_numbers
from minillm.ladder.text import TextStream

Params = SamplingParams | Sequence[SamplingParams] | None


class Engine:
    """Serves requests on one model.

    Rung 2 is batching="static", kv="slots"; rung 3 continuous, slots; rung 4 continuous, paged. kv_memory:
    bytes for keys and values; by default what the largest batch could use, at most 1 GiB. max_batch: rows in
    a step. max_step_tokens: tokens in a step. max_context: prompt and output of a request. storage: makes a
    KVStorage (rung 5). speculator: drafts and verifies (rung 6). `fast/engine.py` checks settings.
    """

    most_memory = 1 << 30  # bytes for keys and values where the user names none

    def __init__(
        self,
        model,
        tokenizer=None,
        *,
        batching: Literal["continuous", "static"] = "continuous",
        kv: Literal["paged", "slots"] = "paged",
        kv_memory: int | None = None,
        block_size: int = 16,
        max_batch: int = 32,
        max_context: int | None = None,
        max_step_tokens: int = 256,
        prefix_cache: bool = True,
        scheduler: type[Scheduler] = Scheduler,
        storage: Callable[..., KVStorage] | None = None,
        speculator=None,
        executor: Executor | None = None,
        clock: Clock | None = None,
        records: Records | None = None,
        seed: int = 0,
    ) -> None:
        self.config = (model or executor).config
        self.model, self.tokenizer, self.speculator, self.seed = model, tokenizer, speculator, seed
        self.max_context = context_of(model, self.config, max_context)
        max_batch = min(max_batch, max_step_tokens)
        storage = storage or partial(native_storage, dtype=model.dtype if model else torch.bfloat16)
        pool = self.make_pool(storage, kv_memory, block_size, max_batch)
        policy = {"continuous": ContinuousBatching, "static": StaticBatching}[batching]()
        memory = {"paged": partial(Paged, prefix_cache=prefix_cache), "slots": Slots}[kv](pool)
        scheduler = speculator.scheduler(scheduler) if speculator else scheduler
        self.scheduler = scheduler(policy, memory, max_batch, max_step_tokens)
        self.executor = executor or self.make_executor(storage, pool)
        self.clock, self.records = clock or WallClock(), records or Records(block_size)
        self.eos_ids = frozenset(self.config.eos_token_id) | frozenset(tokenizer.eos_ids if tokenizer else ())
        self.unfinished: dict[RequestId, Request] = {}
        self.streams: dict[RequestId, TextStream] = {}  # of the unfinished, where there is a tokenizer
        self.arrivals: list[tuple[float, int, Request]] = []  # a heap of those still to come
        self.events: list[TokenEvent] = []  # not yet returned by `step`
        self.numbers, self.calls = count(), count()  # for names and seeds; for the order among equal arrivals

    def make_pool(self, storage: Callable[..., KVStorage], memory: int | None, size: int, max_batch: int) -> BlockPool:
        """A pool of as many blocks of `size` tokens as the memory holds."""
        drafts = self.speculator.bytes_per_token if self.speculator else 0
        self.block_bytes = size * (storage(self.config, 1, "meta").nbytes + drafts)
        if memory is None:
            memory = min(self.most_memory, max_batch * -(-self.max_context // size) * self.block_bytes)
        if memory < self.block_bytes:
            raise ValueError(f"kv_memory of {memory:,} bytes holds no block: one takes {self.block_bytes:,}")
        return BlockPool(int(memory // self.block_bytes), size)

    def make_executor(self, storage: Callable[..., KVStorage], pool: BlockPool) -> Executor:
        """The executor over a store with a slot for every token of the pool, and one scratch slot."""
        kv = storage(self.config, pool.num_blocks * pool.block_size + 1, self.model.device)
        make = self.speculator.executor if self.speculator else ModelExecutor
        return make(self.model, kv, pool.num_blocks, pool.block_size)

    # -- requests in ------------------------------------------------------------------------------

    def add(self, prompt: Sequence[int] | str, params: SamplingParams | None = None,
            request_id: RequestId | None = None, arrival: float | None = None) -> RequestId:
        """Queue one request. Raises RequestError, and changes nothing, if it could never run.

        request_id: any str or int that no unfinished request has; generated if None. arrival: seconds
        on the engine's clock, now by default; the request joins the queue then.
        """
        request = self.make_request(prompt, SamplingParams() if params is None else params, request_id, arrival)
        self.enqueue(request)
        return request.id

    def make_request(self, prompt, params: SamplingParams, request_id=None, arrival=None) -> Request:
        """A request that could run, by `check_request`; nothing is queued yet."""
        prompt_ids = check_request(self, prompt, params, request_id, arrival)
        number = next(self.numbers)
        seed = int(hash_numbers(self.seed, number)[0]) if params.seed is None else params.seed
        stop_ids = frozenset(params.stop_ids or ()) | (frozenset() if params.ignore_eos else self.eos_ids)
        arrival = self.clock.now() if arrival is None else float(arrival)
        request_id = f"request-{number}" if request_id is None else request_id
        return Request(request_id, prompt_ids, params, arrival, seed, stop_ids)

    def enqueue(self, request: Request) -> None:
        """Hold a request until its arrival, then put it into the scheduler's queue."""
        while request.id in self.unfinished:  # a generated id that was taken meanwhile
            request.id = f"request-{next(self.numbers)}"
        self.unfinished[request.id] = request
        if self.tokenizer is not None:
            self.streams[request.id] = self.tokenizer.stream(request.params.stop)
        heapq.heappush(self.arrivals, (request.arrival, next(self.calls), request))
        self.take_arrivals()

    def take_arrivals(self) -> None:
        """Queue the requests whose time has come."""
        while self.arrivals and self.arrivals[0][0] <= self.clock.now():
            request = heapq.heappop(self.arrivals)[2]
            self.records.arrived(request)
            if request.params.max_tokens:
                self.scheduler.add(request)
            else:  # nothing to compute
                request.finish_reason = "length"
                self.emit(request, [], "", self.clock.now())

    def abort(self, request_id: RequestId) -> None:
        """End a request now and free what it holds; its last event comes with the next step.

        One that is unknown or has finished is left alone. A static batch keeps the row until its longest ends.
        """
        request = self.unfinished.get(request_id)
        if request is None:
            return
        ahead = [entry for entry in self.arrivals if entry[2] is not request]
        if len(ahead) < len(self.arrivals):  # it never arrived: it begins and ends now
            self.arrivals, request.arrival, request.finish_reason = ahead, self.clock.now(), "abort"
            heapq.heapify(self.arrivals)
            self.records.arrived(request)
        else:
            self.scheduler.finish(request, "abort")
        stream = self.streams.get(request_id)
        self.emit(request, [], stream.finish() if stream else "", self.clock.now())

    # -- steps ------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether `step` would do or report something."""
        return bool(self.unfinished or self.events)

    def step(self) -> list[TokenEvent]:
        """Run one step; returns the events that are pending, then this step's.

        If the forward raises, no token and no stored key counts; the next step runs the rows again.
        """
        self.wait_for_work()
        if self.scheduler.has_work:
            plan, counts = self.begin_step()
            with self.undone_on_error(plan):
                outputs = self.executor.run(plan)
            accepted = self.commit(plan, outputs)
            self.report(plan, counts, accepted)
        events, self.events = self.events, []
        return events

    def wait_for_work(self) -> None:
        """Queue the arrivals that are due; if idle, sleep until the next one first."""
        if not self.scheduler.has_work and not self.events and self.arrivals:
            self.clock.wait_until(self.arrivals[0][0])
        self.take_arrivals()

    def begin_step(self) -> tuple[StepPlan, dict]:
        """The next plan, and what its record begins with. A step's time begins before it is planned."""
        start, plan = self.clock.now(), self.scheduler.plan()
        plan.start = start
        return plan, self.records.planned(plan, self.scheduler)

    @contextmanager
    def undone_on_error(self, plan: StepPlan) -> Iterator[None]:
        """If the forward is stopped, also by an interrupt, nothing that it stored counts."""
        try:
            yield
        except BaseException:
            self.scheduler.cancel(plan)
            raise

    def commit(self, plan: StepPlan, outputs: list[list[int]]) -> list[tuple[Request, list[int]]]:
        """Let the scheduler take the tokens; the step ends here."""
        plan.end = self.clock.now()
        return self.scheduler.commit(plan, outputs)

    def report(self, plan: StepPlan, counts: dict, accepted: list[tuple[Request, list[int]]]) -> None:
        """Write the records, the text and the events of a committed step."""
        shown = [(request, *self.to_text(request, tokens)) for request, tokens in accepted]
        self.records.committed(plan, counts, [(request, tokens) for request, tokens, _ in shown])
        for request, tokens, text in shown:
            self.emit(request, tokens, text, plan.end)

    def to_text(self, request: Request, tokens: list[int]) -> tuple[list[int], str]:
        """The tokens up to a stop string, and the text that is now safe to show."""
        stream, text = self.streams.get(request.id), ""
        if stream is None:
            return tokens, text
        for number, token in enumerate(tokens, start=1):
            text += stream.push(token)
            if stream.stopped:
                if not request.finished:
                    self.scheduler.finish(request, "stop")
                request.finish_reason = "stop"  # also where the cap fell on the same token
                request.cut = request.num_tokens - len(tokens) + number  # the rest of an accepted run is dropped
                return tokens[:number], text
        return tokens, text + (stream.finish() if request.finished else "")

    def emit(self, request: Request, tokens: list[int], text: str, now: float) -> None:
        """Make the event for the user, and close the record of a request that has ended."""
        if request.finished:
            request.timing = self.records.finished(request, now).timing
            del self.unfinished[request.id]
            self.streams.pop(request.id, None)
        self.events.append(TokenEvent(request.id, tokens, text, request.finished, request.finish_reason, now))

    # -- whole jobs -------------------------------------------------------------------------------

    def generate(self, prompts: Sequence[Sequence[int] | str], params: Params = None) -> list[Completion]:
        """Run these prompts to their ends; answers in the order of the prompts.

        All are checked before any is queued: a RequestError names the index of a bad one.
        """
        requests = self.make_requests(prompts, params)
        texts: dict[RequestId, str] = defaultdict(str)
        for event in self.run_to_end(requests):
            texts[event.request_id] += event.text
        shown = {r: texts[r.id] if self.tokenizer else None for r in requests}
        return [Completion(r.id, r.prompt_ids, r.output_ids, shown[r], r.finish_reason, r.timing) for r in requests]

    def stream(self, prompts: Sequence[Sequence[int] | str], params: Params = None) -> Iterator[TokenEvent]:
        """The same, as events while they happen."""
        return self.run_to_end(self.make_requests(prompts, params))

    def make_requests(self, prompts: Sequence[Sequence[int] | str], params: Params) -> list[Request]:
        """One request for each prompt, all checked."""
        return for_each_prompt(self.make_request, prompts, SamplingParams() if params is None else params)

    def run_to_end(self, requests: list[Request]) -> Iterator[TokenEvent]:
        """Queue and step until these have ended; what other requests get is kept for the next `step`."""
        for request in requests:
            self.enqueue(request)
        own = {request.id for request in requests}
        try:
            while own:
                if not any(event.request_id in own for event in self.events):
                    if own.isdisjoint(self.unfinished):
                        return  # a `step` in between took their last events
                    self.events = self.step()
                mine = [event for event in self.events if event.request_id in own]
                self.events = [event for event in self.events if event.request_id not in own]
                for event in mine:
                    if event.finished:
                        own.remove(event.request_id)
                    yield event
        finally:
            for request_id in own:
                self.abort(request_id)
            self.events = [event for event in self.events if event.request_id not in own]
