"""A run as a trace that chrome://tracing and Perfetto open."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

from minillm.ladder.records import Records


def to_chrome_trace(records: Records, path: str | Path) -> None:
    """Write the steps and the requests' lives to a JSON file."""
    Path(path).write_text(json.dumps({"traceEvents": list(trace_events(records))}))


def trace_events(records: Records) -> Iterator[dict]:
    """Complete events ("X"), times in microseconds: steps on line 0, each request on a line of its own."""

    def event(name: str, line: int, start: float, end: float, details: dict) -> dict:
        micro = {"ts": start * 1e6, "dur": (end - start) * 1e6}
        return {"name": name, "ph": "X", "pid": 0, "tid": line, **micro, "args": details}

    for step in records.steps:
        yield event("step", 0, step.start, step.start + step.duration, asdict(step))
    for line, r in enumerate(sorted(records.requests, key=lambda r: r.arrival), start=1):
        marks = [("waiting", r.arrival), ("prefill", r.first_scheduled), ("decode", r.first_token), ("", r.finish)]
        marks = [(name, at) for name, at in marks if at is not None]
        details = {"request": str(r.request_id), "output_tokens": r.output_tokens}
        for (name, start), (_, end) in pairwise(marks):
            yield event(name, line, start, end, details)
