"""The application on a port: in this process until Ctrl-C, or in a thread beside a notebook or a test."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread

import uvicorn

from minillm.serve.app import Server

DRAIN_S = 5.0  # for answers under way, once the server is told to stop


class DrainingServer(uvicorn.Server):
    """Told to stop, it takes no new request, lets answers end for `drain_s`, then aborts the rest with an error."""

    def __init__(self, server: Server, host: str, port: int, log_level: str = "info", drain_s: float = DRAIN_S) -> None:
        # what an answer still needs after the abort is one event: uvicorn waits that long for it
        super().__init__(uvicorn.Config(server.app(), host=host, port=port, log_level=log_level, access_log=False,
                                        timeout_graceful_shutdown=5))
        self.engine_thread, self.drain_s = server.thread, drain_s

    async def shutdown(self, sockets=None) -> None:
        self.engine_thread.closing = True
        end = time.perf_counter() + self.drain_s
        while self.engine_thread.answers and not self.force_exit and time.perf_counter() < end:  # forced: Ctrl-C twice
            await asyncio.sleep(0.02)
        await self.engine_thread.stop()
        await super().shutdown(sockets)


@contextmanager
def in_background(server: Server, port: int = 0, drain_s: float = 0.0) -> Iterator[str]:
    """The server on a port of loopback (0: a free one) while the block runs; gives its URL."""
    running = DrainingServer(server, "127.0.0.1", port, "error", drain_s)
    thread = Thread(target=running.run, name="server", daemon=True)
    thread.start()
    while not running.started:
        if not thread.is_alive():
            raise OSError(f"the server did not start: is port {port} taken?")
        time.sleep(0.005)
    try:
        yield f"http://127.0.0.1:{running.servers[0].sockets[0].getsockname()[1]}"
    finally:
        running.should_exit = True
        thread.join()
