"""`minillm.Engine`: the ladder's engine with settings by name, defaults for the device, and steps launched ahead.

A GPU computes while Python goes on. So there the next step is planned and launched as soon as one is
committed, and the records, text and events of that step are made while the next runs:

    host      plan 1, launch | wait | commit 1, plan 2, launch | report 1 | wait | commit 2, ...
    device                   | step 1                          | step 2 .........| step 3

Not where a text may contain a stop string: then only the report decides what is in the next step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from minillm.extras.bounded_records import BoundedRecords
from minillm.extras.whole_prompts import WholePromptScheduler
from minillm.fast.executor import FastExecutor, FastSpeculativeExecutor
from minillm.fast.graphs import StepGraphs, graph_sizes, wants_graphs
from minillm.fast.memory import default_kv_memory, native_format, refuse_too_much
from minillm.guard import invariants
from minillm.guard.inputs import (
    check_bytes,
    check_parts,
    check_switches,
    check_vocabularies,
    check_whole,
    choose,
)
from minillm.ladder import engine as ladder
from minillm.ladder.continuous import Scheduler, StepPlan
from minillm.ladder.executor import Clock, Executor
from minillm.ladder.paged import BlockPool
from minillm.ladder.quantized import STORES, storage_in
from minillm.ladder.records import Records
from minillm.ladder.request import RequestId, TokenEvent
from minillm.ladder.speculative import NgramProposer, Speculator


@dataclass(frozen=True)
class Launched:
    """A step under way: its plan, what its record begins with, and what waits for its tokens."""

    plan: StepPlan
    counts: dict
    wait: Callable[[], list[list[int]]]


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


class Engine(ladder.Engine):
    """Serves requests on one model; every setting has a default that works.

    model: from `load_model`, or None with an `executor` of one's own. batching: admit at every step, or
    into an empty batch only. kv: blocks as they are needed, or one run for the longest. kv_format: how
    keys and values are stored, "auto" as the model computes them. key_transform: how keys are evened out
    before they are stored; "auto" rotates them for fp8 and int4. kv_memory: bytes for keys and values;
    by default what the largest batch can use, but at most 1 GiB, or on CUDA 90 % of what is free after
    the weights, less what steps and graphs need: see memory.py. max_batch: rows in a step, at most
    `max_step_tokens`, the tokens that a step feeds. max_context: prompt and output of one request.
    chunked_prefill: False feeds a prompt whole or lets it wait. speculator: what drafts tokens, and how
    many; "ngram" for prompt lookup. cuda_graphs: record small steps and replay them; "auto" does where
    the Triton kernels run. records: "summary" keeps sums and histograms only.
    """

    def __init__(
        self,
        model,
        tokenizer=None,
        *,
        batching: Literal["continuous", "static"] = "continuous",
        kv: Literal["paged", "slots"] = "paged",
        kv_format: str = "auto",
        key_transform="auto",
        kv_memory: int | None = None,
        block_size: int = 16,
        max_batch: int | None = None,
        max_context: int | None = None,
        max_step_tokens: int | None = None,
        chunked_prefill: bool = True,
        prefix_cache: bool = True,
        speculator: Speculator | Literal["ngram"] | None = None,
        cuda_graphs: bool | Literal["auto"] = "auto",
        executor: Executor | None = None,
        clock: Clock | None = None,
        records: Literal["all", "summary"] = "all",
        seed: int = 0,
    ) -> None:
        if isinstance(speculator, str) and speculator == "ngram":
            speculator = Speculator(NgramProposer())
        most = {"max_batch": max_batch, "max_context": max_context, "max_step_tokens": max_step_tokens}
        check_whole(1, block_size=block_size, **{name: value for name, value in most.items() if value is not None})
        check_switches(chunked_prefill=chunked_prefill, prefix_cache=prefix_cache)
        check_bytes(kv_memory=kv_memory)
        check_whole(-math.inf, seed=seed)
        transform = None if isinstance(key_transform, str) and key_transform == "auto" else key_transform
        check_parts(model=model, tokenizer=tokenizer, speculator=speculator, executor=executor, clock=clock,
                    key_transform=transform)
        check_vocabularies(tokenizer, speculator and speculator.proposer)
        choose("kv_format", kv_format, "auto", *STORES)
        choose("batching", batching, "continuous", "static")
        choose("kv", kv, "paged", "slots")
        choose("records", records, "all", "summary")
        gpu = model is not None and model.device.type == "cuda"
        if kv_format == "auto":
            kv_format = native_format(model.dtype) if model else "bf16"
        max_step_tokens = max_step_tokens or (2048 if gpu else 256)
        max_batch = min(max_batch or (256 if gpu else 32), max_step_tokens)
        most_logits = min(max_batch * (1 + (speculator.most if speculator else 0)), max_step_tokens)
        self.graph_tokens = most_logits if wants_graphs(model, cuda_graphs) else 0
        self.most_memory = default_kv_memory(model, max_step_tokens, most_logits, graph_sizes(self.graph_tokens))
        with refuse_too_much(kv_memory or self.most_memory, self.most_memory):
            super().__init__(
                model, tokenizer, batching=batching, kv=kv, kv_memory=kv_memory, block_size=block_size,
                max_batch=max_batch, max_context=max_context, max_step_tokens=max_step_tokens,
                prefix_cache=prefix_cache, scheduler=Scheduler if chunked_prefill else WholePromptScheduler,
                speculator=speculator, executor=executor, storage=storage_in(kv_format, key_transform), clock=clock,
                records=(Records if records == "all" else BoundedRecords)(block_size), seed=seed,
            )
        self.runs_ahead = gpu and executor is None  # a launch returns immediately there
        self.launched: Launched | None = None

    def make_executor(self, storage: Callable, pool: BlockPool) -> Executor:
        """The quick executor, which may replay recorded graphs."""
        kv = storage(self.config, pool.num_blocks * pool.block_size + 1, self.model.device)
        parts = self.model, kv, pool.num_blocks, pool.block_size
        if self.speculator:
            executor = FastSpeculativeExecutor(self.speculator.proposer, *parts)
        else:
            executor = FastExecutor(*parts)
        if self.graph_tokens:
            most_blocks = pool.blocks_for(self.max_context)  # of one request
            executor.graphs = StepGraphs(
                self.model, kv, pool.block_size, executor.scratch_slot, self.graph_tokens, most_blocks
            )
        return executor

    # -- steps launched ahead ---------------------------------------------------------------------

    def step(self) -> list[TokenEvent]:
        """As in the ladder's engine. On a GPU the next step is under way when this returns, and a request that
        is added then joins the one after it."""
        if not self.runs_ahead:
            return super().step()
        if self.launched is None:
            self.wait_for_work()
            self.launch()
        self.land(ahead=True)
        events, self.events = self.events, []
        return events

    def launch(self) -> None:
        """Plan the next step, if there is anything to do, and start it without waiting."""
        self.take_arrivals()
        if self.scheduler.has_work:
            start, plan = self.clock.now(), self.scheduler.plan()
            plan.start = start
            with self.undone_on_error(plan):
                try:
                    wait = self.executor.start(plan)
                finally:  # what was admitted stands even if the launch fails
                    counts = self.records.planned(plan, self.scheduler)  # while the device computes
            self.launched = Launched(plan, counts, wait)

    def land(self, ahead: bool = False) -> None:
        """Wait for the step under way, if there is one, commit it, and make its events.

        ahead: launch the next step before the report, unless a stop string may end a request there.
        """
        if self.launched is None:
            return
        step, self.launched = self.launched, None
        with self.undone_on_error(step.plan):
            outputs = step.wait()
        accepted = self.commit(step.plan, outputs)
        try:
            if ahead and not any(request.params.stop for request, _ in accepted):
                self.launch()
        finally:
            self.report(step.plan, step.counts, accepted)

    def abort(self, request_id: RequestId) -> None:
        """As in the ladder's engine, once the step under way, which may be the request's last, has ended."""
        if request_id in self.unfinished:
            self.land()
        super().abort(request_id)

    # -- looking inside ---------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """Gauges of this moment."""
        pool, scheduler = self.scheduler.memory.pool, self.scheduler
        blocks = pool.num_live, len(pool.cached), len(pool.free), self.block_bytes
        return EngineStats(len(scheduler.waiting), len(scheduler.running), len(self.arrivals), *blocks)

    def check_invariants(self) -> None:
        """Raise InvariantError, naming what broke, unless scheduler, pool and tables agree."""
        self.land()  # rows under way hold blocks for what is not yet stored
        invariants.check_invariants(self.scheduler)
