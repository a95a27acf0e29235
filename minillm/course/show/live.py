"""What a server or a long job does while it does it: a line in a terminal, a progress bar in a notebook.

    with on_terminal("chat") as show:
        play(engine, items, watch=Gauges(show))

    with ticking("knee"):                           # no engine to watch: a line that counts the seconds
        knee(setting)

On a terminal a line is written over and over; elsewhere, as in a log, a new one now and then. A
bar of a notebook is not shown in CI, and nothing is with TQDM_DISABLE set.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from minillm.fast.engine import Engine

Show = Callable[[dict], None]
Item = TypeVar("Item")
EVERY_S = 0.25  # between two looks
LOG_EVERY_S = 20.0  # between two lines where there is no terminal


class Gauges:
    """Call it with the engine after each step: now and then it reads the gauges and shows them.

    A reading: seconds since the first call, tokens given so far, tokens/s since the reading
    before, running, waiting, and the share of the cache that is held. The seconds are the
    engine's own, the looks are spaced by the wall clock, so that virtual time can be watched too.
    """

    def __init__(self, show: Show, every_s: float = EVERY_S) -> None:
        self.show, self.every_s = show, every_s
        self.last: dict | None = None
        self.began: float | None = None
        self.looked = -float("inf")

    def __call__(self, engine: Engine) -> None:
        if time.perf_counter() - self.looked < self.every_s and engine.has_work:  # the last step is always read
            return
        self.looked, now, stats = time.perf_counter(), engine.clock.now(), engine.stats()
        self.began = now if self.began is None else self.began
        tokens, before = engine.records.totals["output_tokens"], self.last
        seconds = now - self.began
        passed = seconds - before["seconds"] if before else 0.0
        self.last = {
            "seconds": seconds, "tokens": tokens,
            "tokens_per_s": (tokens - before["tokens"]) / passed if passed > 0 else None,
            "running": stats.running, "waiting": stats.waiting,
            "kv_share": stats.blocks_live / (stats.blocks_live + stats.blocks_cached + stats.blocks_free),
        }
        self.show(self.last)


def line(reading: dict) -> str:
    """One reading in words, of an engine or of a client (`measure/client.py`), which sees less."""
    if "in_flight" in reading or "done" in reading:
        speed = reading.get("tokens", 0) / max(reading["seconds"], 1e-9)
        return (f"{speed:,.0f} tokens/s, {reading.get('in_flight', 0)} in flight, {reading.get('done', 0)} done, "
                f"{reading.get('failed', 0)} failed")
    speed = reading["tokens_per_s"]
    return (f"{'-' if speed is None else format(speed, ',.0f')} tokens/s, {reading['running']} running, "
            f"{reading['waiting']} waiting, {reading['kv_share']:.0%} of the cache held")


@contextmanager
def on_terminal(label: str) -> Iterator[Show]:
    """A line on stderr that is written over and over, and gone at the end; where there is no terminal, log lines."""
    from tqdm import tqdm

    if not sys.stderr.isatty():
        log = Log(label)
        yield lambda reading: log.write(line(reading))
        return
    with tqdm(desc=label, bar_format="{desc}", leave=False, disable=None, mininterval=EVERY_S, file=sys.stderr) as bar:
        shown = -float("inf")

        def show(reading: dict) -> None:
            nonlocal shown
            if not bar.disable and time.perf_counter() - shown >= EVERY_S:
                shown = time.perf_counter()
                bar.set_description_str(f"{label}: {line(reading)}")

        yield show


class Log:
    """A progress bar where there is no terminal: a line on stderr when it has been silent for `LOG_EVERY_S`.

    The first line of one that counts to a total comes immediately.
    """

    def __init__(self, label: str, total: int = 0) -> None:
        self.label, self.total, self.done = label, total, 0
        self.wrote = -float("inf") if total else time.perf_counter()
        if total:
            self.write("")

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *error: object) -> None: ...

    def update(self, number: int = 1) -> None:
        """So many more items are done."""
        self.done += number
        self.write(f"{self.done:,} of {self.total:,}")

    def write(self, text: str) -> None:
        """The line, unless one was written just now."""
        now = time.perf_counter()
        if now - self.wrote >= LOG_EVERY_S and not os.environ.get("TQDM_DISABLE"):
            self.wrote = now
            print(f"{self.label}: {text}" if text else self.label, file=sys.stderr, flush=True)


@contextmanager
def ticking(label: str, every_s: float = 1.0) -> Iterator[None]:
    """A line on stderr that counts the seconds of a long job, on a terminal gone at the end; none in CI.

    A thread of its own writes it, for some microseconds a second: far too little to show in what the job times.
    """
    from tqdm import tqdm

    silent = None if watched() else True  # None: silent unless it is a terminal
    with tqdm(desc=label, bar_format="{desc}: {elapsed}", leave=False, disable=silent, file=sys.stderr) as bar:
        done, log, began = threading.Event(), Log(label), time.perf_counter()

        def tick() -> None:
            while not done.wait(every_s):
                if bar.disable:
                    log.write(f"{time.perf_counter() - began:.0f} s")
                else:
                    bar.refresh()

        ticker = threading.Thread(target=tick, daemon=True)
        if watched():
            ticker.start()
        try:
            yield
        finally:
            done.set()
            if ticker.is_alive():
                ticker.join()


def watched() -> bool:
    """Whether output is shown while it runs: not in CI, nor where bars are turned off."""
    return not (os.environ.get("CI") or os.environ.get("TQDM_DISABLE"))


def bar(items: Sequence[Item], label: str) -> Iterable[Item]:
    """The items, under a progress bar on a notebook's page; without one in CI."""
    with progress(label, len(items)) as shown:
        for item in items:
            yield item
            shown.update(1)


def progress(label: str, total: int):
    """A progress bar of its own on a notebook's page: a `Setting`'s `progress`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # without ipywidgets it is a bar of text, and need not say so
        from tqdm.auto import tqdm as on_this_page
    return on_this_page(total=total, desc=label, leave=False, disable=not watched())
