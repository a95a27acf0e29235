"""One thread runs the engine. Everything else talks to it through queues.

    the server's event loop                       the engine's thread
      submit, abort, look  ---- inbox ---------->   calls, between two steps
      Answer               <--- outbox, by id ---   the events of a step

So the engine needs no lock, a step never waits for a client, and what a slow client has not read yet
waits in the outbox of its own request.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any
from uuid import uuid4

from minillm.fast.engine import Engine
from minillm.ladder.request import Request, RequestId, SamplingParams, TokenEvent
from minillm.serve.metrics import Metrics

log = logging.getLogger("minillm.serve")
MOST_FAILURES = 3  # steps that may fail one after another, before the requests in them are given up


class QueueFull(Exception):
    """As many requests wait as may wait; the message says how many."""


class Stopped(Exception):
    """The engine's thread has ended."""


class Answer:
    """A request's events, as they come. Close it: a request that nobody reads any more is aborted."""

    def __init__(self, request_id: RequestId, prompt_tokens: int, forget: Callable[[RequestId], None]) -> None:
        self.id, self.prompt_tokens, self.forget = request_id, prompt_tokens, forget
        self.outbox: asyncio.Queue[TokenEvent] = asyncio.Queue()

    async def __aiter__(self) -> AsyncIterator[TokenEvent]:
        while True:
            event = await self.outbox.get()
            yield event
            if event.finished:
                return

    def close(self) -> None:
        self.forget(self.id)


class EngineThread:
    """Serves an engine's requests until it is stopped. All methods are called on one event loop.

    max_waiting: requests that may wait for a row or for memory; one more is refused. None: no limit.
    """

    def __init__(self, engine: Engine, max_waiting: int | None = None) -> None:
        self.engine, self.max_waiting, self.metrics = engine, max_waiting, Metrics(engine)
        self.inbox: SimpleQueue[tuple[Callable[[], Any], Future]] = SimpleQueue()
        self.answers: dict[RequestId, Answer] = {}  # of the requests that somebody reads
        self.failures = 0  # steps that failed one after another
        self.closing = self.stopped = False  # closing: no new requests; stopped: no more steps
        self.thread = Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.thread.start()

    async def stop(self) -> None:
        """Abort what is under way, and wait for the thread to end."""
        self.closing = self.stopped = True
        self.inbox.put((lambda: None, Future()))  # in case it waits for a call
        await asyncio.to_thread(self.thread.join)

    async def submit(self, prompt: list[int], params: SamplingParams) -> Answer:
        """Queue a request. RequestError if it could never run, QueueFull if too many wait, Stopped on the way out."""
        if self.closing:
            raise Stopped("the server is shutting down")
        answer = Answer(f"cmpl-{uuid4().hex}", len(prompt), self._forget)
        try:
            await self.call(partial(self._add, answer, prompt, params, self.engine.clock.now()))
        except BaseException:  # a client that hangs up meanwhile, too
            answer.close()
            raise
        return answer

    async def call(self, function: Callable[[], Any]) -> Any:
        """What a function returns or raises on the engine's thread, between two steps."""
        if self.stopped:
            raise Stopped("the server is shutting down")
        done: Future = Future()
        self.inbox.put((function, done))
        return await asyncio.wrap_future(done)

    # -- on the engine's thread -------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self.stopped:
                self._take_calls(wait=not self.engine.has_work)
                if self.engine.has_work:
                    self._deliver(self._step())
            self._give_up(list(self.engine.unfinished))
        except Exception:
            log.exception("the engine's thread has failed: the server must be started anew")
        finally:
            self.closing = self.stopped = True
            self._take_calls(wait=False)
            now = self.engine.clock.now()
            self._hand_out([TokenEvent(request_id, [], "", True, "abort", now) for request_id in self.answers])

    def _take_calls(self, wait: bool) -> None:
        """Make the calls that have come; if there is nothing else to do, wait for one."""
        with suppress(Empty):
            while True:
                function, done = self.inbox.get(block=wait)
                wait = False
                if done.set_running_or_notify_cancel():
                    try:
                        done.set_result(function())
                    except Exception as error:
                        done.set_exception(error)

    def _step(self) -> list[TokenEvent]:
        """The events of one step. A step that fails is tried again; then its requests are given up."""
        try:
            events, self.failures = self.engine.step(), 0
        except Exception:
            log.exception("a step failed, %d in a row", self.failures + 1)
            events, self.failures = [], self.failures + 1
            if self.failures == MOST_FAILURES:
                self.failures = 0
                self._give_up([request.id for request in self.engine.scheduler.running])
        return events

    def _give_up(self, request_ids: list[RequestId]) -> None:
        for request_id in request_ids:
            self.engine.abort(request_id)

    def _deliver(self, events: list[TokenEvent]) -> None:
        self.metrics.observe(events)
        self._hand_out(events)

    def _hand_out(self, events: list[TokenEvent]) -> None:
        """Put events into the outboxes of their requests, in one call to the event loop."""
        mine = [(self.answers[event.request_id], event) for event in events if event.request_id in self.answers]
        if mine:
            with suppress(RuntimeError):  # the event loop has been closed
                self.loop.call_soon_threadsafe(_put, mine)

    def _add(self, answer: Answer, prompt: list[int], params: SamplingParams, arrival: float) -> None:
        request = self.engine.make_request(prompt, params, answer.id, arrival)
        if self.max_waiting is not None and self._would_wait(request) > self.max_waiting:
            self.metrics.refused.inc()
            raise QueueFull(f"all rows are taken, and {self.max_waiting} requests wait already, as many as may")
        self.engine.enqueue(request)
        self.answers[answer.id] = answer
        self.metrics.arrived(answer.id, arrival)

    def _would_wait(self, newest: Request) -> int:
        """How many would be left in the queue with this one, once all have joined that rows and memory are free for.

        A request that only waits for the budget of the next steps joins. Blocks that it may share count as its own.
        """
        scheduler, memory = self.engine.scheduler, self.engine.scheduler.memory
        is_open = scheduler.batching.is_open(scheduler.running)
        rows = scheduler.max_batch - len(scheduler.running) if is_open else 0
        blocks = memory.pool.num_available - scheduler.blocks_owed()
        for place, request in enumerate([*scheduler.waiting, newest]):
            blocks -= scheduler.blocks_needed(request)
            if place == rows or blocks < 0:
                return len(scheduler.waiting) - place + 1
        return 0

    def _forget(self, request_id: RequestId) -> None:
        """Called on the event loop: nobody reads this request any more."""

        def forget() -> None:
            if self.answers.pop(request_id, None):
                self.engine.abort(request_id)  # does nothing to one that has ended

        self.inbox.put((forget, Future()))


def _put(events: list[tuple[Answer, TokenEvent]]) -> None:
    for answer, event in events:
        answer.outbox.put_nowait(event)
