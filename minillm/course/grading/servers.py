"""For exercise 11: four servers with different faults, in virtual time.

All are Llama-3-8B on an A100. The engine, its scheduler and its records are the package's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial

import numpy as np

from minillm.course.experiments.service import CURES
from minillm.course.figures import service_row
from minillm.ladder.records import Records
from minillm.measure.capacity import GB
from minillm.measure.service import Served, Service
from minillm.measure.workload import WorkItem


def load(
    requests: int, requests_per_s: float, prompt_tokens: int, answer_tokens: int, seed: int, shared_tokens: int = 0
) -> list[WorkItem]:
    """Lengths within 30 % of these means, Poisson arrivals, caps that no answer reaches.

    shared_tokens: of instructions that stand before every prompt.
    """
    draw = np.random.default_rng(seed)
    arrivals = draw.exponential(1 / requests_per_s, requests).cumsum()
    prompts, answers = (
        draw.integers(round(0.7 * mean), round(1.3 * mean) + 1, requests) for mean in (prompt_tokens, answer_tokens)
    )
    return [
        WorkItem(float(arrival), [1] * shared_tokens + [2 + i] * int(prompt), 2 * answer_tokens, int(answer))
        for i, (arrival, prompt, answer) in enumerate(zip(arrivals, prompts, answers, strict=True))
    ]


@dataclass(frozen=True)
class Server:
    """A server with a fault, its load for a seed, and the column of figures that its users complain of."""

    settings: Service
    load: Callable[..., list[WorkItem]]
    complaint: str


USUAL = Service(max_batch=128, max_step_tokens=512, kv_memory=40 * GB)
# By fault: the names that a diagnosis may give.
SERVERS = {
    "batch_cap": Server(replace(USUAL, max_batch=4), partial(load, 100, 10, 200, 40), "ttft_p99_s"),
    "memory": Server(replace(USUAL, kv_memory=2 * GB), partial(load, 120, 16, 500, 120), "ttft_p99_s"),
    "prompts": Server(USUAL, partial(load, 100, 6, 100, 20, shared_tokens=3000), "ttft_p99_s"),
    "knee": Server(
        replace(USUAL, max_batch=256, kv_memory=2 * GB, kv_format="int8", prefix_cache=True),
        partial(load, 300, 55, 50, 60, shared_tokens=6000), "itl_p50_ms",
    ),
}
TREATMENTS: dict[str, Callable[[Service], Service]] = {
    "more_rows": lambda settings: replace(settings, max_batch=16 * settings.max_batch),
    "fewer_rows": lambda settings: replace(settings, max_batch=max(1, settings.max_batch // 4)),
    "bigger_steps": lambda settings: replace(settings, max_step_tokens=4 * settings.max_step_tokens),
    "int8_kv": CURES["8-bit keys and values"],
    "prefix_cache": CURES["cache prompts"],
    "second_server": CURES["another GPU"],
}


@cache
def served(name: str, seed: int, treatment: str | None = None) -> Served:
    """One of the SERVERS, with its load drawn from this seed, as it is or with one of the TREATMENTS."""
    server = SERVERS[name]
    settings = TREATMENTS[treatment](server.settings) if treatment else server.settings
    return settings.serve(server.load(seed=seed))


def examine(name: str, seed: int) -> Records:
    """The records of one of the SERVERS; the same object for the same name and seed."""
    return served(name, seed).records


def complaint(name: str, seed: int, treatment: str | None = None) -> float:
    """The figure that its users complain of, as it is or with one of the TREATMENTS."""
    figure = SERVERS[name].complaint
    return service_row(served(name, seed, treatment), figure)[figure]
