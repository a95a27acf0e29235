"""The engine: what every rung from 2 up shares. Requests come in, steps are run, tokens go out.

One step, whoever decides and whatever computes:

    plan    = scheduler.plan()            who feeds which tokens
    result  = executor.run(plan)          the forward and the sampling, on the device or in virtual time
    news    = scheduler.commit(plan, ..)  tokens appended, finished rows gone, blocks returned
    records, text, events                 written after the commit; they decide nothing but stop strings

A GPU computes while Python goes on. So there the next step is planned and launched as soon as
one is committed, and the books of the one are written while the other runs:

    host      plan 1, launch | wait | commit 1, plan 2, launch | books 1, events | wait | commit 2, ...
    device                   | step 1                          | step 2 ...............| step 3

The executor and the clock are the seam between the real engine and a simulated one.
"""

from __future__ import annotations

import heapq
import math
import operator
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, count
from typing import Literal, Protocol

import torch
from torch import Tensor

from minillm.fast.budget import default_kv_memory, refuse_too_much
from minillm.fast.graphs import StepGraphs, graph_sizes, wants_graphs
from minillm.ladder.attention import StepAttention, to_device
from minillm.ladder.continuous import ContinuousBatching, Row, Scheduler, StepPlan, no_drafts
from minillm.ladder.paged import BlockPool, Paged, Slots
from minillm.ladder.quantized import KeyTransform, KVStorage, default_transform, kv_bytes_per_token, native_format
from minillm.ladder.records import Records
from minillm.ladder.request import Completion, Request, RequestError, RequestId, SamplingParams, TokenEvent
from minillm.ladder.sampling import hash_numbers, sample
from minillm.ladder.speculative import Proposer, Speculator, check_vocabularies, verify
from minillm.ladder.static import StaticBatching
from minillm.model.config import ModelConfig, check_at_least, is_number


class Clock(Protocol):
    """Seconds since some moment, and a way to let them pass."""

    def now(self) -> float: ...

    def wait_until(self, moment: float) -> None: ...


class WallClock:
    """Real time, from 0 at its making."""

    def __init__(self) -> None:
        self.origin = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self.origin

    def wait_until(self, moment: float) -> None:
        time.sleep(max(0.0, moment - self.now()))


class Executor(Protocol):
    """What turns a plan into tokens."""

    def run(self, plan: StepPlan) -> list[list[int]]:
        """The new tokens of each due row of the plan, in the rows' order; returns when they are known.

        It may run the plan up to `plan.repeats` times more at once, none of them from `plan.until` on, notes in
        `plan.ends` when each run but the last ended, and gives each row as many tokens as it ran.

        An executor whose steps may overlap Python has `start` too: see `ModelExecutor`.
        """
        ...


@dataclass(frozen=True)
class Launched:
    """A step under way: its plan, what its record begins with, and what waits for its tokens."""

    plan: StepPlan
    counts: dict
    wait: Callable[[], list[list[int]]]


class ModelExecutor:
    """Runs a plan on a model: flattens the rows, one forward, samples the due ones."""

    def __init__(
        self,
        model,
        kv_format: str,
        num_blocks: int,
        block_size: int,
        key_transform: KeyTransform | None = None,
        proposer: Proposer | None = None,
        graph_tokens: int = 0,
        max_blocks: int = 0,
    ) -> None:
        """graph_tokens: the largest step that is recorded as a CUDA graph, 0 for none. max_blocks: of a request."""
        self.model, self.block_size, self.proposer = model, block_size, proposer
        self.scratch_slot = num_blocks * block_size  # behind the pool's last block
        self.storage = KVStorage(model.config, kv_format, self.scratch_slot + 1, model.device, key_transform)
        self.graphs = None
        if graph_tokens:
            self.graphs = StepGraphs(model, self.storage, block_size, self.scratch_slot, graph_tokens, max_blocks)

    def run(self, plan: StepPlan) -> list[list[int]]:
        """For each due row one token, or an accepted run."""
        return self.start(plan)()

    @torch.inference_mode()
    def start(self, plan: StepPlan) -> Callable[[], list[list[int]]]:
        """Launch one forward over all rows, and the sampling; a GPU is then still at it. Returns what waits for it."""
        rows = plan.rows
        proposed = self.proposer.propose(rows) if self.proposer else [None] * len(rows)
        spans = [row.span for row in rows]
        cache = StepAttention(
            self.storage, spans, self.block_size, self.scratch_slot, self.model.config.query_group, self.model.dtype
        )
        tokens = torch.tensor([token for row in rows for token in (*row.tokens, *row.drafts)])  # [N]
        due, wanted = [b for b, row in enumerate(rows) if row.due], []
        ends = list(accumulate(span.count for span in spans))
        for b in due:  # the newest token and the drafts behind it
            wanted += range(ends[b] - len(rows[b].drafts) - 1, ends[b])
        logit_rows = torch.tensor(wanted, dtype=torch.long)  # [R]
        logits = self._forward(rows, tokens, cache, logit_rows)  # [R, V]
        if any(row.drafts for row in rows):
            return partial(verify, [rows[b] for b in due], logits, [proposed[b] for b in due])
        requests = [rows[b].request for b in due]
        params, seeds = [r.params for r in requests], [r.seed for r in requests]
        chosen = sample(logits, params, seeds, [r.num_output for r in requests])  # [R]
        return lambda: [[token] for token in chosen.tolist()]

    def _forward(self, rows: Sequence[Row], tokens: Tensor, cache: StepAttention, logit_rows: Tensor) -> Tensor:
        """tokens [N], logit_rows [R] -> logits [R, V] on the device: by a recorded graph, or launch by launch."""
        observe, device = getattr(self.proposer, "observe", None), self.model.device  # observe: see drafter.py
        if self.graphs and self.graphs.fits(cache):
            x = self.graphs.hidden_states(tokens, cache)  # [N, H]
            logit_rows, slots = to_device([logit_rows, cache.new_slots], device)
            if observe:
                observe(rows, slots, x)
            return self.model.logits(x[logit_rows])
        inputs = to_device([tokens, cache.positions, logit_rows, cache.new_slots], device)
        tokens, positions, logit_rows, slots = inputs
        shown = {"observe": partial(observe, rows, slots)} if observe else {}
        return self.model.forward(tokens, positions, cache, logit_rows, **shown)


@dataclass(frozen=True)
class EngineStats:
    """How things stand now. blocks_live + blocks_cached + blocks_free is the pool."""

    waiting: int
    running: int
    arriving: int  # added with an arrival still ahead
    blocks_live: int
    blocks_cached: int
    blocks_free: int
    block_bytes: int


class Engine:
    """Serves requests on one model. See the README for the settings; all have a default that works.

    model: from `load_model`, or None with an `executor` of one's own. kv_memory: bytes for
    keys and values; by default what the largest batch can use, but at most 1 GiB, or on CUDA
    90 % of what is free after the weights, less what steps and graphs need: see budget.py.
    max_batch: rows in a step, at most `max_step_tokens`. max_step_tokens: the budget of
    tokens a step feeds. max_context: prompt and output of one request. key_transform: how
    keys are made even before they are stored; "auto" rotates them for fp8 and int4.
    speculator: who drafts tokens, and how many. cuda_graphs: record small steps and replay
    them; "auto" does where the Triton kernels run, False shows what launching costs.
    """

    def __init__(
        self,
        model,
        tokenizer=None,
        *,
        batching: Literal["continuous", "static"] = "continuous",
        kv: Literal["paged", "slots"] = "paged",
        kv_format: str = "auto",
        key_transform: KeyTransform | Literal["auto"] | None = "auto",
        kv_memory: int | None = None,
        block_size: int = 16,
        max_batch: int | None = None,
        max_context: int | None = None,
        max_step_tokens: int | None = None,
        chunked_prefill: bool = True,
        prefix_cache: bool = True,
        speculator: Speculator | None = None,
        cuda_graphs: bool | Literal["auto"] = "auto",
        executor: Executor | None = None,
        clock: Clock | None = None,
        records: Literal["all", "summary"] = "all",
        seed: int = 0,
    ) -> None:
        check_at_least(
            1, kv_memory=kv_memory, block_size=block_size, max_batch=max_batch, max_context=max_context,
            max_step_tokens=max_step_tokens,
        )
        check_parts(model, tokenizer, speculator, executor)
        config: ModelConfig = (model or executor).config
        gpu = model is not None and model.device.type == "cuda"
        if kv_format == "auto":
            kv_format = native_format(model.dtype) if model else "bf16"
        max_context = max_context or config.max_position_embeddings
        max_step_tokens = max_step_tokens or (2048 if gpu else 256)
        max_batch = min(max_batch or (256 if gpu else 32), max_step_tokens)
        proposer = speculator.proposer if speculator else None
        bytes_per_token = kv_bytes_per_token(config, kv_format) + (proposer.bytes_per_token if proposer else 0)
        block_bytes = block_size * bytes_per_token
        max_blocks = -(-max_context // block_size)  # of one request
        max_due = min(max_batch * (1 + (speculator.most if speculator else 0)), max_step_tokens)
        graph_tokens = max_due if wants_graphs(model, cuda_graphs) else 0
        usual_memory = default_kv_memory(model, max_step_tokens, max_due, graph_sizes(graph_tokens))
        if kv_memory is None:
            kv_memory = min(usual_memory, max_batch * max_blocks * block_bytes)
        if kv_memory < block_bytes:
            raise ValueError(f"kv_memory of {kv_memory:,} bytes holds no block: one takes {block_bytes:,}")
        pool = BlockPool(int(kv_memory // block_bytes), block_size)  # 2e9 is a number of bytes too
        self.config, self.tokenizer, self.seed, self.block_bytes = config, tokenizer, seed, block_bytes
        self.scheduler = Scheduler(
            _choose("batching", batching, continuous=ContinuousBatching, static=StaticBatching)(),
            Paged(pool, prefix_cache) if _choose("kv", kv, paged=True, slots=False) else Slots(pool),
            max_batch, max_step_tokens, max_context, chunked_prefill,
            speculator.draft_length if speculator else no_drafts,
        )
        if key_transform == "auto":
            key_transform = default_transform(config, kv_format, model.device) if model else None
        with refuse_too_much(kv_memory, usual_memory):
            if proposer:
                check_vocabularies(tokenizer, proposer)
                proposer.prepare(config, pool.num_blocks, block_size)
            self.executor = executor or ModelExecutor(
                model, kv_format, pool.num_blocks, block_size, key_transform, proposer, graph_tokens, max_blocks
            )
        self.runs_ahead = gpu and executor is None  # a launch returns at once there, and the next may follow early
        self._launched: Launched | None = None
        self.speculator = speculator
        self.clock = clock or WallClock()
        self.records = Records(records, block_size)
        self.eos_ids = frozenset(config.eos_token_id) | frozenset(tokenizer.eos_ids if tokenizer else ())
        self._arrivals: list[tuple[float, int, Request]] = []  # a heap of those still to come
        self._requests: dict[RequestId, Request] = {}  # all that have not finished
        self._streams: dict[RequestId, object] = {}  # their text streams, where there is a tokenizer
        self._kept: list[TokenEvent] = []  # of other requests, while `generate` or `stream` ran
        self._numbers = count()  # of requests: their names and seeds
        self._calls = count()  # with an arrival ahead: among equals, who called first comes first

    # -- requests in ------------------------------------------------------------------------------

    def add(
        self,
        prompt: Sequence[int] | str,
        params: SamplingParams | None = None,
        request_id: RequestId | None = None,
        arrival: float | None = None,
    ) -> RequestId:
        """Queue one request. Raises RequestError, and changes nothing, if it could never run.

        request_id: any str or int that no unfinished request has (1 and "1" are two); made
        up if None. An id may be used again once its request has finished. arrival: seconds on
        the engine's clock, now by default; the request joins the queue then.
        """
        request = self._make_request(prompt, params or SamplingParams(), request_id, arrival)
        self._queue(request)
        return request.id

    def abort(self, request_id: RequestId) -> None:
        """End a request now and free what it holds. One that is unknown or has finished is left alone.

        A static batch holds an aborted row's memory, as that of any row that has ended, until its longest ends.
        Its last event, with finish_reason "abort", comes with the next step.
        """
        if request_id in self._requests:
            self._land_launched()  # which may be its last step
        request = self._requests.get(request_id)
        if request is None:
            return
        if any(entry[2] is request for entry in self._arrivals):
            self._arrivals = [entry for entry in self._arrivals if entry[2] is not request]
            heapq.heapify(self._arrivals)
            request.arrival = self.clock.now()  # it never came: it begins and ends now
            self.records.arrived(request)
            request.finish_reason = "abort"
        else:
            self.scheduler.finish(request, "abort")
        stream = self._streams.get(request_id)
        self._kept.append(self._event(request, [], stream.finish() if stream else "", self.clock.now()))

    @property
    def has_work(self) -> bool:
        """Whether `step` would do or report something."""
        return bool(self._requests or self._kept)

    # -- steps ------------------------------------------------------------------------------------

    def step(self, until: float | None = None) -> list[TokenEvent]:
        """Run one step, and return what it gave to whom, after what was kept back before.

        until: a moment before which you will add or abort nothing. Virtual time then runs several like steps at once,
        as many as begin before it; the records tell them apart, an event holds the tokens of all.

        With nothing runnable and an arrival ahead it waits for it (in virtual time: jumps to
        it). If the forward raises, the step is undone, every request stays as it was, and
        the exception goes on to the caller. On a GPU the next step is under way when this
        returns, and a request that is added then joins the one behind it.
        """
        self._advance(until)
        events, self._kept = self._kept, []
        return events

    def _advance(self, until: float | None = None) -> None:
        """One step. Its events join those that are kept, which an exception must not lose."""
        if not self.scheduler.has_work and not self._kept and self._arrivals:
            self.clock.wait_until(self._arrivals[0][0])
        if self._launched is None:
            self._launch(until)
        self._land_launched(ahead=self.runs_ahead)

    def _launch(self, until: float | None = None) -> None:
        """Plan the next step, if there is anything to do, and where that is possible start it without waiting."""
        self._take_arrivals()
        if not self.scheduler.has_work:
            return
        plan = self.scheduler.plan()
        counts = self.records.planned(plan, self.scheduler, self.clock.now())
        if until is not None and self.tokenizer is None:  # text may end at any token
            plan.repeats = self.scheduler.repeats(plan)
            plan.until = min(until, self._arrivals[0][0]) if self._arrivals else until
        wait = partial(self.executor.run, plan)
        if self.runs_ahead:
            with self._undone_if_it_raises(plan):
                wait = self.executor.start(plan)
        self._launched = Launched(plan, counts, wait)

    def _land_launched(self, ahead: bool = False) -> None:
        """Wait for the step under way, if there is one, commit it, and keep its events.

        ahead: launch the next step before the books are written. Not where a text may
        contain a stop string: then only the books tell who is in the next step.
        """
        if self._launched is None:
            return
        step, self._launched = self._launched, None
        with self._undone_if_it_raises(step.plan):
            outputs = step.wait()
        if self.speculator:
            self.speculator.observe(step.plan.rows, outputs, self.clock.now() - step.counts["start"])
        taken = self.scheduler.repeat(step.plan, len(step.plan.ends))
        news, now = self.scheduler.commit(step.plan, outputs), self.clock.now()
        try:
            if ahead and not any(request.params.stop for request, _ in news):
                self._launch()
        finally:
            self._kept += self._report(step, news, now, taken)

    @contextmanager
    def _undone_if_it_raises(self, plan: StepPlan) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.scheduler.cancel(plan)
            raise

    def _report(self, step: Launched, news: list[tuple[Request, list[int]]], now: float, taken) -> list[TokenEvent]:
        """The text, the records and the events of a step that was committed at `now`; taken: see `Scheduler.repeat`."""
        texts = [""] * len(news)
        if self.tokenizer is not None:
            shown = [self._show(request, tokens) for request, tokens in news]
            news = [(request, tokens) for (request, _), (tokens, _) in zip(news, shown, strict=True)]
            texts = [text for _, text in shown]
        self.records.committed(step.counts, now, news, step.plan, taken)
        return [self._event(request, tokens, text, now) for (request, tokens), text in zip(news, texts, strict=True)]

    def _show(self, request: Request, tokens: list[int]) -> tuple[list[int], str]:
        """The tokens that count, and the text that is now safe to show: both end with a stop string."""
        stream, text = self._streams[request.id], ""
        for number, token in enumerate(tokens, start=1):
            text += stream.push(token)
            if stream.stopped:
                if not request.finished:
                    self.scheduler.finish(request, "stop")
                request.finish_reason = "stop"  # also where the cap fell on the same token
                request.cut = request.num_tokens - len(tokens) + number  # a static batch may go on feeding the rest
                return tokens[:number], text
        return tokens, text + (stream.finish() if request.finished else "")

    def _event(self, request: Request, tokens: list[int], text: str, now: float) -> TokenEvent:
        """Report to the user, and close the books of a request that has ended."""
        reason = request.finish_reason
        if reason is not None:
            request.timing = self.records.finished(request, now).timing
            del self._requests[request.id]
            self._streams.pop(request.id, None)
        return TokenEvent(request.id, tokens, text, reason is not None, reason, now)

    # -- whole jobs -------------------------------------------------------------------------------

    def generate(
        self, prompts: Sequence[Sequence[int] | str], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]:
        """Run these prompts to their ends; answers in the order of the prompts.

        All are validated before any is queued: one bad prompt refuses the call with a
        RequestError that names its index. If it is interrupted, its requests are aborted.
        """
        requests = self._make_requests(prompts, params)
        texts: dict[RequestId, str] = {request.id: "" for request in requests}
        for event in self._run_to_end(requests):
            texts[event.request_id] += event.text
        if self.tokenizer is None:
            texts = dict.fromkeys(texts)
        return [
            Completion(r.id, r.prompt_ids, r.output_ids, texts[r.id], r.finish_reason, r.timing) for r in requests
        ]

    def stream(
        self, prompts: Sequence[Sequence[int] | str], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> Iterator[TokenEvent]:
        """The same, as events while they happen. Prompts are validated at the call, not at the first event."""
        return self._run_to_end(self._make_requests(prompts, params))

    def _run_to_end(self, requests: list[Request]) -> Iterator[TokenEvent]:
        """Queue and step until these have ended; what other requests get is kept for the next `step`."""
        for request in requests:
            while request.id in self._requests:  # made up at the call, and chosen by somebody since
                request.id = f"request-{next(self._numbers)}"
            self._queue(request)
        own = {request.id for request in requests}
        try:
            while own:
                if not any(event.request_id in own for event in self._kept):
                    if not any(request_id in self._requests for request_id in own):
                        return  # a `step` in between took their last events
                    self._advance()
                mine = [event for event in self._kept if event.request_id in own]
                self._kept = [event for event in self._kept if event.request_id not in own]
                for event in mine:
                    if event.finished:
                        own.remove(event.request_id)
                    yield event
        finally:
            for request_id in own:
                self.abort(request_id)
            self._kept = [event for event in self._kept if event.request_id not in own]

    def stats(self) -> EngineStats:
        """Gauges of this moment."""
        s, pool = self.scheduler, self.scheduler.memory.pool
        blocks = pool.num_live, len(pool.cached), len(pool.free), self.block_bytes
        return EngineStats(len(s.waiting), len(s.running), len(self._arrivals), *blocks)

    def check_invariants(self) -> None:
        """Raise InvariantError, naming what broke, unless scheduler, pool and tables agree."""
        self._land_launched()  # rows under way hold blocks for what is not yet stored
        self.scheduler.check_invariants()

    # -- making and queueing requests -------------------------------------------------------------

    def _make_requests(self, prompts, params) -> list[Request]:
        """One request a prompt, all checked; RequestError names the index of a bad one."""
        if isinstance(prompts, str):
            raise RequestError("prompts is one string; pass a list of prompts")
        try:
            prompts = list(prompts)
        except TypeError:
            raise RequestError(f"prompts {prompts!r} is no list of prompts") from None
        every = [params or SamplingParams()] * len(prompts) if not isinstance(params, (list, tuple)) else list(params)
        if len(every) != len(prompts):
            raise RequestError(f"{len(prompts)} prompts, but {len(every)} SamplingParams; give one, or one for each")
        requests = []
        for index, (prompt, own) in enumerate(zip(prompts, every, strict=True)):
            try:
                requests.append(self._make_request(prompt, own, None, None))
            except RequestError as error:
                raise RequestError(f"prompt {index}: {error}") from error
        return requests

    def _make_request(self, prompt, params: SamplingParams, request_id, arrival: float | None) -> Request:
        """Check everything that can be wrong with a request, before anything is changed."""
        number = next(self._numbers)
        while request_id is None and f"request-{number}" in self._requests:  # somebody chose that name
            number = next(self._numbers)
        request_id = f"request-{number}" if request_id is None else request_id
        if not isinstance(request_id, (str, int)):
            raise RequestError(f"request_id {request_id!r} is neither a str nor an int")
        if request_id in self._requests:
            raise RequestError(f"request_id {request_id!r} is taken by a request that has not finished")
        arrival = self.clock.now() if arrival is None else arrival
        if not (is_number(arrival) and math.isfinite(arrival)):
            raise RequestError(f"arrival {arrival!r} is no moment that comes; give seconds on the engine's clock")
        if not isinstance(params, SamplingParams):
            raise RequestError(f"params {params!r} are none: give SamplingParams(max_tokens=64)")
        if params.stop and self.tokenizer is None:
            raise RequestError("stop strings need a tokenizer: Engine(model, tokenizer)")
        request = Request(
            id=request_id,
            prompt_ids=self._token_ids(prompt),
            params=params,
            arrival=float(arrival),
            seed=hash_numbers(self.seed, number) if params.seed is None else params.seed,
            stop_ids=frozenset(params.stop_ids or ()) | (frozenset() if params.ignore_eos else self.eos_ids),
        )
        self.scheduler.check(request)
        return request

    def _token_ids(self, prompt: Sequence[int] | str) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError("a prompt of text needs a tokenizer: Engine(model, tokenizer); or pass token ids")
            return self.tokenizer.encode(prompt)
        if isinstance(prompt, range) and prompt:  # as virtual time has: its ends speak for all
            pool, most = self.scheduler.memory.pool, self.scheduler.max_context
            if len(prompt) > min(most, room := pool.num_blocks * pool.block_size):  # before all is written down
                raise RequestError(f"{len(prompt):,} prompt tokens: > context {most:,}, or > {room:,}, all of the pool")
            low, high = sorted((prompt[0], prompt[-1]))
            if low >= 0 and high < self.config.vocab_size:
                return list(prompt)
        try:
            ids = list(prompt)
        except TypeError:
            raise RequestError(
                f"a prompt is a list of token ids, or text, not {prompt!r}; and prompts is a list of such prompts"
            ) from None
        return check_ids(ids, self.config.vocab_size)

    def _queue(self, request: Request) -> None:
        self._requests[request.id] = request
        if self.tokenizer is not None:
            self._streams[request.id] = self.tokenizer.stream(request.params.stop)
        if request.arrival > self.clock.now():
            heapq.heappush(self._arrivals, (request.arrival, next(self._calls), request))
        else:
            self._arrived(request)

    def _take_arrivals(self) -> None:
        """Move the requests whose time has come to the queue."""
        while self._arrivals and self._arrivals[0][0] <= self.clock.now():
            self._arrived(heapq.heappop(self._arrivals)[2])

    def _arrived(self, request: Request) -> None:
        self.records.arrived(request)
        if request.params.max_tokens == 0:  # nothing to compute
            request.finish_reason = "length"
            self._kept.append(self._event(request, [], "", self.clock.now()))
        else:
            self.scheduler.add(request)


def check_parts(model, tokenizer, speculator, executor) -> None:
    """ValueError where the name of a thing was given in its place, or nothing that could compute."""
    if model is None and executor is None:
        raise ValueError("model None computes nothing: give load_model(), or an executor of your own")
    for what, given, cure in (
        ("model", model, "load_model({!r})"), ("tokenizer", tokenizer, "load_tokenizer({!r})"),
        ("speculator", speculator, "a Speculator, such as Speculator(NgramProposer()), not {!r}"),
    ):
        if isinstance(given, str):
            raise ValueError(f"{what} {given!r} is a name: give {cure.format(given)}")


def check_ids(tokens: list, vocab_size: int) -> list[int]:
    """The tokens as Python's whole numbers; RequestError names the first that is none, or not in the vocabulary.

    A float, a bool or a digit is refused, not rounded: whoever passes one has mixed something up.
    """
    if set(map(type, tokens)) - {int}:  # whole numbers of numpy and torch will do
        tokens = [whole_number(token, place) for place, token in enumerate(tokens)]
    if tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
        place, token = next((i, t) for i, t in enumerate(tokens) if not 0 <= t < vocab_size)
        raise RequestError(f"token id {token} at place {place} is outside the vocabulary of {vocab_size:,}")
    return tokens


def whole_number(token, place: int) -> int:
    """One token id, be it Python's, numpy's or torch's; RequestError for anything else."""
    try:
        if "bool" not in str(getattr(token, "dtype", type(token))):
            return operator.index(token)
    except TypeError:
        pass
    raise RequestError(f"token {token!r} at place {place} is no whole number; a prompt is a list of token ids, or text")


def _choose(setting: str, value: str, **choices):
    """The choice that goes by this name; ValueError lists the names."""
    if value not in choices:
        raise ValueError(f"{setting}={value!r}: choose {' or '.join(map(repr, choices))}")
    return choices[value]
