"""For exercise 11: four servers that are ill, in virtual time, each of something else.

All are Llama-3-8B on an A100. The engine, its scheduler and its records are the package's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from minillm.fast.engine import Engine
from minillm.ladder.records import Records, RequestRecord
from minillm.load.config import ModelConfig
from minillm.measure import fleet, metrics
from minillm.measure.virtual import CostModel, virtual_engine
from minillm.measure.workload import WorkItem


@dataclass(frozen=True)
class Settings:
    """How a server is set up."""

    max_batch: int = 128  # rows in a step, at most
    max_step_tokens: int = 512  # tokens fed in a step, at most
    kv_memory_gb: float = 40.0
    kv_format: str = "bf16"
    prefix_cache: bool = False
    servers: int = 1  # machines that share the load


@dataclass(frozen=True)
class Load:
    """Requests of about so many tokens, at so many a second."""

    requests: int
    requests_per_s: float
    prompt_tokens: int
    answer_tokens: int
    shared_tokens: int = 0  # of instructions that stand before every prompt

    def items(self, seed: int) -> list[WorkItem]:
        """Lengths within 30 % of the mean, Poisson arrivals; nobody's cap is reached."""
        draw = np.random.default_rng(seed)
        arrivals = draw.exponential(1 / self.requests_per_s, self.requests).cumsum()
        prompts, answers = (
            draw.integers(round(0.7 * mean), round(1.3 * mean) + 1, self.requests)
            for mean in (self.prompt_tokens, self.answer_tokens)
        )
        shared = [1] * self.shared_tokens
        return [
            WorkItem(float(arrival), shared + [2 + i] * int(prompt), 2 * self.answer_tokens, int(answer))
            for i, (arrival, prompt, answer) in enumerate(zip(arrivals, prompts, answers, strict=True))
        ]


@dataclass(frozen=True)
class Server:
    """A server that is ill, and the figure that its users complain of."""

    settings: Settings
    load: Load
    complaint: str  # "ttft_s" or "itl_per_token_s"
    percentile: str  # of it


# What ails each of them: the names that a diagnosis may give.
SERVERS = {
    "batch_cap": Server(Settings(max_batch=4), Load(100, 10, 200, 40), "ttft_s", "p99"),
    "memory": Server(Settings(kv_memory_gb=2.0), Load(120, 16, 500, 120), "ttft_s", "p99"),
    "prompts": Server(Settings(), Load(100, 6, 100, 20, shared_tokens=3000), "ttft_s", "p99"),
    "knee": Server(
        Settings(max_batch=256, kv_memory_gb=2.0, kv_format="int8", prefix_cache=True),
        Load(300, 55, 50, 60, shared_tokens=6000), "itl_per_token_s", "p50",
    ),
}

Change = Callable[[Settings], Settings]
TREATMENTS: dict[str, Change] = {
    "more_rows": lambda settings: replace(settings, max_batch=16 * settings.max_batch),
    "fewer_rows": lambda settings: replace(settings, max_batch=max(1, settings.max_batch // 4)),
    "bigger_steps": lambda settings: replace(settings, max_step_tokens=4 * settings.max_step_tokens),
    "int8_kv": lambda settings: replace(settings, kv_format="int8"),
    "prefix_cache": lambda settings: replace(settings, prefix_cache=True),
    "second_server": lambda settings: replace(settings, servers=2),
}


def start(settings: Settings) -> Engine:
    """One machine, in virtual time."""
    cost = CostModel.of_device("a100-80gb", ModelConfig.preset("llama-3-8b"), settings.kv_format)
    return virtual_engine(
        cost, kv_memory=round(settings.kv_memory_gb * 1e9), max_batch=settings.max_batch,
        max_step_tokens=settings.max_step_tokens, prefix_cache=settings.prefix_cache, max_context=8192,
    )


def run(settings: Settings, items: list[WorkItem]) -> tuple[list[RequestRecord], Records]:
    """Serve the load; every request's record, and the records of the first machine."""
    engines = [start(settings) for _ in range(settings.servers)]
    return fleet.serve(engines, items), engines[0].records


@cache
def examine(name: str, seed: int) -> Records:
    """The records of one of the SERVERS, with its load drawn from this seed. Whoever asks twice is given the same."""
    return run(SERVERS[name].settings, SERVERS[name].load.items(seed))[1]


@cache
def complaint(name: str, seed: int, treatment: str | None = None) -> float:
    """What its users complain of, in seconds, as it is, or with one of the TREATMENTS."""
    server = SERVERS[name]
    settings = TREATMENTS[treatment](server.settings) if treatment else server.settings
    requests, _ = run(settings, server.load.items(seed))
    return metrics.latencies(requests)[server.complaint][server.percentile]
