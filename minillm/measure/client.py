"""The same workloads on any server that speaks OpenAI's streaming completions, and the same metrics.

vLLM, SGLang, TGI and llama.cpp do. All times are the client's: from the moment at which a
request was due until its events arrived. A request that fails is counted under what went
wrong, and is in no average and in no sum of tokens.

    refused      the connection was not accepted
    server error the server answered with an error, immediately or inside the stream; its code is named
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
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import torch

from minillm.guard.inputs import check_at_least, check_positive
from minillm.ladder.records import Records, RequestRecord
from minillm.measure import metrics
from minillm.measure.measurement import MEASUREMENTS, SEE_ROWS, Measurement, device_name, measurement_path, provenance
from minillm.measure.workload import WorkItem

OnChange = Callable[[dict], None]
EVENTS_PER_TOKEN = 4  # more than any server sends: an answer of more has no end


class Fault(Exception):
    """What went wrong with one request: its kind, as counted."""


@dataclass
class Server:
    """Where to ask, and how. patience_s: without an event for this long, a request has stalled.

    text_of: turns ids into a prompt of text, for servers that take no ids.
    """

    url: str  # up to and with /v1
    model: str
    patience_s: float = 60.0
    text_of: Callable[[Sequence[int]], str] | None = None

    def __post_init__(self) -> None:
        check_positive(patience_s=self.patience_s)
        try:
            url = httpx.URL(self.url)
        except httpx.InvalidURL as error:
            raise ValueError(f"{self.url!r} is not a URL: {error}") from None
        if url.scheme not in ("http", "https") or not url.host or (url.port or 0) > 65_535:
            raise ValueError(f"{self.url!r} is not a server's URL: give one such as http://127.0.0.1:8000/v1")

    def body(self, item: WorkItem) -> dict:
        """The request: greedy, with exactly the workload's number of tokens."""
        prompt = list(item.prompt_ids) if self.text_of is None else self.text_of(item.prompt_ids)
        return {
            "model": self.model, "prompt": prompt, "max_tokens": item.output_tokens, "temperature": 0,
            "ignore_eos": True, "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }


@dataclass
class Run:
    """The records of the answered requests, faults by kind, and when the run began and ended.

    short: answers whose number of tokens is not the one asked for (a server without `ignore_eos`).
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
    run = asyncio.run(play(server, items, clients, on_change))
    found = metrics.seen_by_clients(run.records())
    return {**found, "faults": dict(run.faults), "failed": run.faults.total(), "short_answers": run.short}


async def play(
    server: Server, items: Sequence[WorkItem], clients: int | None = None, on_change: OnChange | None = None
) -> Run:
    """Send the workload; every request ends in `lives` or in `faults`."""
    check_at_least(1, clients=clients)
    run, state = Run(), Counter()
    order = sorted(range(len(items)), key=lambda i: items[i].arrival)

    def changed(**by: int) -> None:
        state.update(by)
        if on_change:
            on_change({**state, "seconds": time.perf_counter() - run.began})

    async def ask(http: httpx.AsyncClient, index: int, due: float) -> None:
        changed(in_flight=1)
        try:
            run.lives.append(await answer(http, server, items[index], index, due, lambda n: changed(tokens=n)))
            run.short += run.lives[-1].output_tokens != items[index].output_tokens
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

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=None, limits=limits, trust_env=False) as http:  # `answer` has the patience
        coming, run.began = iter(order), time.perf_counter()
        works = [arrive(http, i) for i in order] if clients is None else [client(http, coming) for _ in range(clients)]
        await asyncio.gather(*works)
    if clients is None and order:
        run.began += items[order[0]].arrival  # when the first was due
    run.ended = max((life.finish for life in run.lives), default=time.perf_counter())
    return run


async def answer(
    http: httpx.AsyncClient, server: Server, item: WorkItem, index: int, due: float, gave: Callable[[int], None]
) -> RequestRecord:
    """One request's life; Fault if it fails. gave: called with each number of new tokens."""
    life, now = RequestRecord(index, due, len(item.prompt_ids)), asyncio.get_running_loop().time
    try:
        async with (
            asyncio.timeout(server.patience_s) as patience,
            http.stream("POST", f"{server.url}/completions", json=server.body(item)) as response,
        ):
            if response.status_code != 200:
                raise Fault(f"server error {response.status_code}")
            most = EVENTS_PER_TOKEN * item.output_tokens + 64
            async for event in events(response, most):
                patience.reschedule(now() + server.patience_s)
                before = life.output_tokens
                read_event(event, life, time.perf_counter(), item.output_tokens)
                gave(life.output_tokens - before)
    except httpx.ConnectError:
        raise Fault("refused") from None
    except TimeoutError:
        raise Fault("stalled") from None
    except httpx.DecodingError:
        raise Fault("malformed: not what its encoding says") from None
    except httpx.TransportError:
        raise Fault("cut off") from None
    if life.finish_reason is None:
        raise Fault("cut off")
    if not life.token_times:
        raise Fault("malformed: an answer without a token")
    return life


async def events(response: httpx.Response, most: int) -> AsyncIterator[dict]:
    """The events of a stream (server-sent events: lines `data: ...`), up to `[DONE]`; Fault if they are over `most`."""
    async for line in response.aiter_lines():
        name, _, data = line.partition(":")
        if name != "data":  # an empty line, a comment, or another field
            continue
        if data.strip() == "[DONE]":
            return
        try:
            event = json.loads(data)
        except (ValueError, RecursionError):  # a number of too many digits, brackets in too many brackets
            raise Fault("malformed: not JSON") from None
        if not isinstance(event, dict):
            raise Fault("malformed: not an object")
        most -= 1
        if most < 0:
            raise Fault("malformed: an answer without an end")
        yield event


def read_event(event: dict, life: RequestRecord, now: float, most: int) -> None:
    """Note an event's new tokens, end, and count so far. Fault if malformed, or if it counts more than `most`."""
    if "error" in event:
        raise Fault("server error in the stream")
    choices, usage = event.get("choices"), event.get("usage")
    if not isinstance(choices, list) or not (choices or usage):
        raise Fault("malformed: no choices")
    text = ""
    for choice in choices:
        if not isinstance(choice, dict) or not isinstance(choice.get("text"), str):
            raise Fault("malformed: a choice without text")
        text += choice["text"]
        reason = choice.get("finish_reason")
        if not isinstance(reason, str | None):
            raise Fault("malformed: a reason to finish that is not text")
        life.finish_reason = reason or life.finish_reason
        life.finish = now
    if not usage:
        life.token_times += [now] * bool(text)
        return
    told = usage.get("completion_tokens") if isinstance(usage, dict) else None
    if type(told) is not int or not 0 <= told <= most:  # True is an int to isinstance
        raise Fault("malformed: no count of tokens")
    # tokens that only the last count tells of came with the text before it
    late = life.finish_reason and not text and life.token_times
    life.token_times += [life.token_times[-1] if late else now] * (told - life.output_tokens)
    del life.token_times[told:]


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
