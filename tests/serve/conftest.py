"""A live server on a free port of loopback, with a tiny model whose tokens are bytes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
import pytest
from tiny import tiny_model
from toy_files import TEMPLATE, TOKENS, byte_level_tokenizer

from minillm.fast.engine import Engine
from minillm.load.tokenizer import Tokenizer
from minillm.serve.app import Server
from minillm.serve.engine_thread import EngineThread
from minillm.serve.run import in_background

JSON = {"Content-Type": "application/json"}
WAIT_S = 20.0


@dataclass
class Live:
    """A server that runs, and what is behind it."""

    url: str
    thread: EngineThread
    http: httpx.Client

    @property
    def engine(self) -> Engine:
        return self.thread.engine

    def post(self, path: str = "completions", **body) -> httpx.Response:
        return self.http.post(f"/v1/{path}", json=body)

    def until(self, holds) -> None:
        """Wait until it holds, at most WAIT_S."""
        end = time.perf_counter() + WAIT_S
        while not holds():
            assert time.perf_counter() < end, "it never came to hold"
            time.sleep(0.005)

    def at_rest(self) -> None:
        """Nothing runs, nothing is held, and the books agree."""
        self.until(lambda: not self.engine.unfinished and not self.thread.answers)
        future = asyncio.run_coroutine_threadsafe(self.thread.call(self.engine.check_invariants), self.thread.loop)
        future.result(WAIT_S)
        assert self.engine.stats().blocks_live == 0 and not self.thread.metrics.lives


def toy_tokenizer() -> Tokenizer:
    settings = {"bos_token": "<bos>", "eos_token": "<eos>", "chat_template": TEMPLATE}
    return Tokenizer(byte_level_tokenizer(), settings, "toy")


def tiny_engine(**settings) -> Engine:
    model = tiny_model(vocab_size=len(TOKENS))
    return Engine(model, toy_tokenizer(), **{"max_context": 256, "max_batch": 4, "records": "summary", **settings})


@contextmanager
def running(engine: Engine | None = None, max_waiting: int | None = None, api_key: str | None = None,
            drain_s: float = 0.0) -> Iterator[Live]:
    """A server in a thread; stopped at the end, as Ctrl-C does."""
    thread = EngineThread(engine or tiny_engine(), max_waiting)
    server = Server(thread, thread.engine.tokenizer, "toy", api_key)
    with (
        in_background(server, drain_s=drain_s) as url,
        httpx.Client(base_url=url, timeout=WAIT_S, trust_env=False) as http,
    ):
        yield Live(url, thread, http)
    assert not thread.thread.is_alive()


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with running() as server:
        yield server


@pytest.fixture(autouse=True)
def _nothing_is_left(request) -> Iterator[None]:
    """After every test that used the shared server, it holds nothing."""
    yield
    if "live" in request.fixturenames:
        request.getfixturevalue("live").at_rest()
