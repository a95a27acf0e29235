"""A small server whose answers a test writes itself, and the chunks of sound ones."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from minillm.measure.client import Server, bench_server
from minillm.measure.workload import WorkItem

GAP = 0.02  # seconds between the fake server's events


def event(text: str, **more) -> str:
    return json.dumps({"choices": [{"index": 0, "text": text, "finish_reason": None, **more}]})


END = json.dumps({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]})


def usage(told: int, *choices: dict) -> str:
    return json.dumps({"choices": list(choices), "usage": {"completion_tokens": told}})


@contextmanager
def fake_server(reply: Callable[[BaseHTTPRequestHandler, dict], None]) -> Iterator[str]:
    """Serve every request by `reply(handler, body)` on a port of its own; gives the URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            reply(self, body)

        def log_message(self, *_) -> None: ...

    class Listener(ThreadingHTTPServer):
        daemon_threads, request_queue_size = True, 128  # many may come at the same time

    server = Listener(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()


def sends(*lines: str, status: int = 200, done: bool = True, gap: float = 0.0, hold: float = 0.0):
    """A reply of these events; `done` ends it properly, `hold` keeps the connection open and silent before."""

    def reply(handler: BaseHTTPRequestHandler, body: dict) -> None:
        handler.send_response(status)
        handler.send_header("Content-Type", "text/event-stream")
        handler.end_headers()
        for line in lines:
            time.sleep(gap)
            handler.wfile.write(f"data: {line}\n\n".encode())
        time.sleep(hold)
        if done:
            handler.wfile.write(b": a comment\n\ndata: [DONE]\n\n")

    return reply


def items(number: int = 3, tokens: int = 4, every: float = 0.0) -> list[WorkItem]:
    return [WorkItem(i * every, [1, 2, 3], tokens) for i in range(number)]


def bench(reply, asked: list[WorkItem] | None = None, clients: int | None = None, patience_s: float = 5.0) -> dict:
    with fake_server(reply) as url:
        return bench_server(Server(url, "any", patience_s), asked or items(), clients)


ANSWER = [event(letter) for letter in "abcd"]
