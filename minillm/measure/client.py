"""The same workloads on any server that speaks OpenAI's streaming completions, and the same metrics.

vLLM, SGLang, TGI and llama.cpp do. All times are the client's: from the moment at which a
request was due until its events arrived. A request that fails is counted under what went
wrong, and is in no average and in no sum of tokens.

    refused, reset, name not found, TLS: ..., connection timed out, too many open files, no connection: ...
                 why a connection failed before any answer came
    server error the server answered with an error, with its code, or inside the stream, with its message
    stalled      no event came for `patience_s`, whatever else did
    malformed    an event that is not JSON, or does not have the shape of a completion
    cut off      the stream ended before the answer did

A server may send several tokens in one event, or none with it, while a character is still
incomplete. Servers that can are asked to count along (vLLM: `continuous_usage_stats`); of
the others each event with text is taken for one token, and what the count at the end has
beyond that is added to the last event.
"""

from __future__ import annotations

import asyncio
import errno
import json
import math
import os
import socket
import ssl
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch

from minillm.guard.inputs import check_at_least, check_positive, whole_number, whole_setting
from minillm.ladder.records import Records, RequestRecord
from minillm.measure import metrics
from minillm.measure.measurement import MEASUREMENTS, SEE_ROWS, Measurement, device_name, measurement_path, provenance
from minillm.measure.stream import EVENTS_PER_TOKEN, Fault, events, read_event
from minillm.measure.workload import WorkItem

OnChange = Callable[[dict], None]
JSON = {"Content-Type": "application/json"}


@dataclass
class Server:
    """Where to ask, and how; ValueError for what cannot be asked.

    patience_s: without an event for this long, a request has stalled.
    text_of: turns ids into a prompt of text, for servers that take no ids.
    """

    url: str  # up to and with /v1
    model: str
    patience_s: float = 60.0
    text_of: Callable[[Sequence[int]], str] | None = None

    def __post_init__(self) -> None:
        check_positive(patience_s=math.nan if self.patience_s is None else self.patience_s)
        self.patience_s = float(self.patience_s)
        if not isinstance(self.model, str):
            raise ValueError(f"model {self.model!r} is not a name")
        try:
            url = httpx.URL(f"{self.url}/completions" if isinstance(self.url, str) else self.url)
            host, port = url.host, url.port
        except (httpx.InvalidURL, ValueError, TypeError) as error:
            raise ValueError(f"{self.url!r} is not a URL: {error}") from None
        if url.scheme not in ("http", "https") or not host or (port or 0) > 65_535 or url.query or url.fragment:
            raise ValueError(f"{self.url!r} is not a server's URL: give one such as http://127.0.0.1:8000/v1")
        self.url = self.url.rstrip("/")

    def body(self, item: WorkItem) -> dict:
        """The request: greedy, with exactly the workload's number of tokens. ValueError if its sizes cannot be."""
        check_at_least(0, arrival=math.nan if item.arrival is None else item.arrival)
        lengths = [whole_setting("max_tokens", item.max_tokens, 1)]
        if item.stop_after is not None:
            lengths.append(whole_setting("stop_after", item.stop_after, 1))
        try:
            ids = list(item.prompt_ids)
        except TypeError:
            raise ValueError(f"a prompt is a list of token ids, not {item.prompt_ids!r}") from None
        if set(map(type, ids)) - {int}:
            ids = [whole_number(token, place) for place, token in enumerate(ids)]
        return {
            "model": self.model, "prompt": ids if self.text_of is None else self.text_of(ids),
            "max_tokens": min(lengths), "temperature": 0, "ignore_eos": True, "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }


@dataclass
class Run:
    """The records of the answered requests, faults by kind, and when the run began and ended.

    short: answers whose number of tokens is not the one asked for, lower or higher.
    """

    lives: list[RequestRecord] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    short: int = 0
    began: float = 0.0
    ended: float = 0.0

    def records(self) -> Records:
        """As an engine's records, without its steps: what `metrics.seen_by_clients` takes."""
        records = Records()
        records.requests = sorted(self.lives, key=lambda life: life.finish)
        for life in self.lives:
            records.totals["output_tokens"] += life.output_tokens
            records.totals[f"finished_{life.finish_reason}"] += 1
        records.began, records.ended = self.began, self.ended
        return records


def bench_server(
    server: Server, items: Sequence[WorkItem], clients: int | None = None, on_change: OnChange | None = None
) -> dict:
    """`metrics.seen_by_clients` of the workload on the server, with `faults`, `failed` and `short_answers`.

    clients: of a closed loop; None plays the open loop at the items' arrival times.
    on_change: called with {"done", "failed", "in_flight", "tokens", "seconds"} at each event.
    """
    run = play_to_end(server, items, clients, on_change)
    found = metrics.seen_by_clients(run.records())
    return {**found, "faults": dict(run.faults), "failed": run.faults.total(), "short_answers": run.short}


def play_to_end(
    server: Server, items: Sequence[WorkItem], clients: int | None = None, on_change: OnChange | None = None
) -> Run:
    """`play` for a caller that is not a coroutine, also where an event loop is running already."""
    return _run_to_end(play(server, items, clients, on_change))


def _run_to_end(work: Coroutine[Any, Any, Run]) -> Run:
    """`asyncio.run`; where a loop is running already, as in a notebook's cell, in a thread with a loop of its own."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    tasks: list[asyncio.Task] = []

    async def in_thread() -> Run:
        tasks.append(asyncio.current_task())
        return await work

    with ThreadPoolExecutor(1) as thread:
        finished = thread.submit(copy_context().run, asyncio.run, in_thread())
        try:
            return finished.result()
        except KeyboardInterrupt:  # of this thread; the other one does not see it
            for task in tasks:
                task.get_loop().call_soon_threadsafe(task.cancel)
            raise


async def play(
    server: Server, items: Sequence[WorkItem], clients: int | None = None, on_change: OnChange | None = None
) -> Run:
    """Send the workload; every request ends in `lives` or in `faults`. ValueError before anything is sent."""
    clients = None if clients is None else min(whole_setting("clients", clients, 1), len(items))
    bodies = [_encoded(server, item, index) for index, item in enumerate(items)]  # no time is spent on it later
    run, state = Run(), Counter()
    order = sorted(range(len(items)), key=lambda i: items[i].arrival)

    def changed(**by: int) -> None:
        state.update(by)
        if on_change:
            on_change({**state, "seconds": time.perf_counter() - run.began})

    async def ask(http: httpx.AsyncClient, index: int, due: float) -> None:
        changed(in_flight=1)
        try:
            life = RequestRecord(index, due, len(items[index].prompt_ids))
            asked = items[index].output_tokens
            await answer(http, server, bodies[index], asked, life, lambda n: changed(tokens=n))
            run.lives.append(life)
            run.short += life.output_tokens != asked
            changed(in_flight=-1, done=1)
        except Fault as fault:
            run.faults[str(fault)] += 1
            changed(in_flight=-1, failed=1)

    async def arrive(http: httpx.AsyncClient, index: int) -> None:
        due = run.began + items[index].arrival
        await asyncio.sleep(due - time.perf_counter())
        await ask(http, index, due)

    async def client(http: httpx.AsyncClient, coming) -> None:
        for index in coming:
            await ask(http, index, time.perf_counter())

    limits, hooks = httpx.Limits(max_connections=None), {"response": [_check_status]}
    async with httpx.AsyncClient(timeout=None, limits=limits, trust_env=False, event_hooks=hooks) as http:
        coming, run.began = iter(order), time.perf_counter()
        works = [arrive(http, i) for i in order] if clients is None else [client(http, coming) for _ in range(clients)]
        await asyncio.gather(*works)
    if clients is None and order:
        run.began += items[order[0]].arrival  # when the first was due
    run.ended = max((life.finish for life in run.lives), default=time.perf_counter())
    return run


def _encoded(server: Server, item: WorkItem, index: int) -> bytes:
    try:
        return json.dumps(server.body(item)).encode()
    except ValueError as error:
        raise ValueError(f"request {index}: {error}") from None


async def _check_status(response: httpx.Response) -> None:
    """As a hook, before httpx reads where a redirection would go, which may not be a URL."""
    if response.status_code != 200:
        raise Fault(f"server error {response.status_code}")


async def answer(
    http: httpx.AsyncClient, server: Server, body: bytes, asked: int, life: RequestRecord, gave: Callable[[int], None]
) -> None:
    """One request's life, noted in `life`; Fault if it fails. Its timeout is the only one: httpx's own are off.

    asked: tokens that the answer should have. gave: called with each number of new tokens.
    """
    now, most = asyncio.get_running_loop().time, EVENTS_PER_TOKEN * asked + 64
    stage, answered = "", False

    async def trace(name: str, _: dict) -> None:  # httpcore's name of what the connection is doing
        nonlocal stage
        stage = name

    try:
        async with (
            asyncio.timeout(server.patience_s) as patience,
            http.stream(
                "POST", f"{server.url}/completions", content=body, headers=JSON, extensions={"trace": trace}
            ) as response,
        ):
            answered = True
            async for event in events(response, most):
                patience.reschedule(now() + server.patience_s)
                before = life.output_tokens
                read_event(event, life, time.perf_counter(), most)
                gave(life.output_tokens - before)
    except TimeoutError:
        raise Fault("connection timed out" if stage.startswith("connection.") else "stalled") from None
    except httpx.DecodingError:
        raise Fault("malformed: not what its encoding says") from None
    except httpx.TransportError as error:
        raise Fault("cut off" if answered else why_unconnected(error)) from None
    except OSError as error:  # of a module that httpx imports late, where no more files may be open
        raise Fault(why_unconnected(error)) from None
    if life.finish_reason is None:
        raise Fault("cut off")
    if not life.token_times:
        raise Fault("malformed: an answer without a token")


# -- why there is no connection -------------------------------------------------------------------

CAUSES = (  # the operating system's and the TLS library's errors, the more telling ones first
    (socket.gaierror, "name not found"),
    (ConnectionRefusedError, "refused"),
    ((ConnectionResetError, ConnectionAbortedError, BrokenPipeError), "reset"),
    (TimeoutError, "connection timed out"),
)


def why_unconnected(error: Exception) -> str:
    """The name of what kept a connection from being made, or from being answered."""
    causes = list(_causes(error))
    codes = [cause.errno for cause in causes if type(cause) is OSError and cause.errno]
    if {errno.EMFILE, errno.ENFILE} & set(codes):
        return "too many open files"
    for cause in causes:
        if isinstance(cause, ssl.SSLError):
            reason = getattr(cause, "verify_message", None) or getattr(cause, "reason", None) or "no handshake"
            return f"TLS: {reason.lower().replace('_', ' ')}"
    for kind, name in CAUSES:
        if any(isinstance(cause, kind) for cause in causes):
            return name
    if codes:
        return f"no connection: {os.strerror(codes[0])}"
    return "no connection" if isinstance(error, httpx.ConnectError) else "cut off"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error and those that it came from, down to the operating system's."""
    while error is not None:
        yield error
        for one in getattr(error, "exceptions", ()):  # of a host with several addresses
            yield from _causes(one)
        error = error.__cause__ or error.__context__


# -- what is kept ---------------------------------------------------------------------------------


def server_row(found: dict, label: str, workload: str, model: str, loop: str) -> dict:
    """A run as a row of `bench_servers`."""
    times = {
        f"{name}_{percent}_ms": found[f"{key}_s"][percent] * 1e3
        for name, key in (("ttft", "ttft"), ("itl", "itl_per_step"), ("latency", "latency"))
        for percent in ("p50", "p99") if found[f"{key}_s"][percent] is not None
    }
    return {
        "server": label, "model": model, "workload": workload, "loop": loop,
        "requests": found["requests"]["finished"], "failed": found["failed"], "faults": found["faults"],
        "short_answers": found["short_answers"], "output_tokens": found["output_tokens"],
        "tokens_per_s": found["output_tokens_per_s"], "mean_in_flight": found["mean_in_flight"], **times,
    }


def save_row(row: dict, root: Path = MEASUREMENTS, device: str | torch.device = "cpu") -> Path:
    """Put a row into this device's `bench_servers`, in place of an earlier one of the same run.

    device: of our own engine; what a server elsewhere runs on, a client does not know.
    """
    name, same, device_is = "bench_servers", ("server", "model", "workload", "loop"), device_name(device)
    path = measurement_path(device_is, name, root)
    rows = Measurement.load(device_is, name, root).rows if path.exists() else []
    rows = [old for old in rows if any(old[key] != row[key] for key in same)]
    return Measurement(name, provenance(SEE_ROWS, SEE_ROWS, device, 0, None), [*rows, row]).save(root)
