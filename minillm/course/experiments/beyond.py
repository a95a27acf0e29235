"""Chapter 14: what the two articles leave out, as arithmetic over published geometries and in virtual time.

Nothing here is measured. The numbers of a model are those of its `config.json`, in the repository that
`source` names; bandwidths are data sheets' (`measure/virtual.py` and `LINKS`); what is assumed says so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from minillm.course.experiments.service import chats
from minillm.course.figures import service_row
from minillm.ladder.records import RequestRecord
from minillm.load.config import ModelConfig
from minillm.measure.metrics import step_gaps
from minillm.measure.roofline import StepShape, read_numbers, weight_numbers
from minillm.measure.service import Served, Service
from minillm.measure.virtual import CostModel
from minillm.measure.workload import WorkItem, lognormal

BYTES = 2  # of a number, at 16 bits

# -- what a token leaves in the cache -------------------------------------------------------------


@dataclass(frozen=True)
class CacheShape:
    """What a model stores of a request. numbers: of a token in one layer. windowed: the layers that keep no more
    than the last `window` tokens; the others keep all."""

    source: str
    layers: int
    numbers: int
    window: int = 0
    windowed: int = 0

    def bytes(self, context: int) -> int:
        """Of a request with so many tokens."""
        tokens = (self.layers - self.windowed) * context + self.windowed * min(context, self.window)
        return BYTES * self.numbers * tokens


CACHES = {
    "multi-head, Llama-2-7B": CacheShape("meta-llama/Llama-2-7b-hf", 32, 2 * 32 * 128),
    "grouped, Llama-3.1-8B": CacheShape("meta-llama/Llama-3.1-8B", 32, 2 * 8 * 128),
    "window, Mistral-7B v0.1": CacheShape("mistralai/Mistral-7B-v0.1", 32, 2 * 8 * 128, 4096, 32),
    "5 of 6 windowed, Gemma-3-12B": CacheShape("google/gemma-3-12b-it", 48, 2 * 8 * 256, 1024, 40),
    "latent (MLA), DeepSeek-V3": CacheShape("deepseek-ai/DeepSeek-V3", 61, 512 + 64),  # latent, and RoPE's key
}

# -- mixture of experts ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Mixture:
    """A mixture of experts. dense: the model of the same active size, whose one MLP is as wide as the experts that
    a token uses; everything else is the mixture's own."""

    source: str
    dense: ModelConfig
    experts: int
    active: int

    @property
    def expert_bytes(self) -> int:
        """Of one expert in one layer: three matrices."""
        return BYTES * 3 * self.dense.hidden_size * self.dense.intermediate_size // self.active

    @property
    def router_bytes(self) -> int:
        """Of all layers: a number for each expert and hidden unit."""
        return BYTES * self.dense.num_hidden_layers * self.dense.hidden_size * self.experts

    def bytes_read(self, rows: float) -> float:
        """Weights that a step of so many rows reads, if the router spreads them evenly."""
        more = distinct_experts(self.experts, self.active, rows) - self.active
        return BYTES * read_numbers(self.dense) + self.router_bytes + (
            self.dense.num_hidden_layers * more * self.expert_bytes)

    @property
    def total_bytes(self) -> int:
        """All weights, those of the embedding table included."""
        rest = self.dense.num_hidden_layers * (self.experts - self.active) * self.expert_bytes
        return BYTES * weight_numbers(self.dense) + self.router_bytes + rest

    def cost(self, device: str, rows: float) -> CostModel:
        """How long its steps of so many rows take: multiplied is what is active, read what is touched."""
        return CostModel.of_device(device, self.dense, weight_bytes=self.bytes_read(rows))


MIXTURES = {
    # as vocabulary, hidden and inner size, layers, query and KV heads, head_dim; the inner size: active x expert's
    "Qwen3-30B-A3B": Mixture("Qwen/Qwen3-30B-A3B", ModelConfig(
        151_936, 2048, 8 * 768, 48, 32, 4, 128, model_type="qwen3", max_position_embeddings=40_960), 128, 8),
    "Mixtral-8x7B": Mixture("mistralai/Mixtral-8x7B-v0.1", ModelConfig(
        32_000, 4096, 2 * 14_336, 32, 32, 8, 128, model_type="mistral", max_position_embeddings=32_768), 8, 2),
}


def distinct_experts(experts: int, active: int, rows: float) -> float:
    """Expected number of experts that at least one of the rows uses, each row `active` of them, all equally likely."""
    return experts * (1 - (1 - active / experts) ** rows)


def simulated_experts(experts: int, active: int, rows: int, times: int = 200, skew: float = 0.0, seed: int = 0
                      ) -> np.ndarray:
    """The same number drawn `times` times. skew: expert i is as likely as (i + 1) ** -skew; 0 is even."""
    draw = np.random.default_rng(seed)
    likely = -skew * np.log(np.arange(1, experts + 1))  # the largest of these plus Gumbel noise: without replacement
    keys = likely + draw.gumbel(size=(times, rows, experts))
    chosen = np.argpartition(-keys, active - 1, axis=2)[:, :, :active]
    return np.array([len(np.unique(once)) for once in chosen])


# -- tensor parallelism ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Link:
    """Between the devices of one model: GB/s in one direction, by its data sheet, and the seconds that an all-reduce
    of no bytes takes: an assumption of the size that is measured on such machines."""

    gb_per_s: float
    latency_s: float


LINKS = {"NVLink 4": Link(450, 10e-6), "PCIe 5.0 x16": Link(64, 30e-6)}
ALL_REDUCES = 2  # a layer: after the attention's output projection, and after the MLP's


def all_reduce_seconds(link: Link, devices: int, size: float) -> float:
    """Sum `size` bytes over the devices, in a ring: each sends 2 (n - 1) / n of them."""
    if devices == 1:
        return 0.0
    return link.latency_s + 2 * (devices - 1) / devices * size / (link.gb_per_s * 1e9)


def parallel_step(cost: CostModel, link: Link, devices: int, contexts: Sequence[int]) -> dict[str, float]:
    """A decode step's parts, in milliseconds: its work split evenly, what is sent, and what does not shrink."""
    config, whole = cost.config, cost.seconds(StepShape.decode(contexts)) - cost.overhead_s
    sent = BYTES * len(contexts) * config.hidden_size
    sums = ALL_REDUCES * config.num_hidden_layers * all_reduce_seconds(link, devices, sent)
    parts = {"work_ms": whole / devices, "all_reduce_ms": sums, "fixed_ms": cost.overhead_s}
    return {name: seconds * 1e3 for name, seconds in parts.items()}


def parallel_rows(device: str, config: ModelConfig, rows: int, context: int) -> list[dict]:
    """1, 2, 4 and 8 devices over each link: the parts of a step, tokens/s, and those of as many replicas that share
    the rows; a replica without a row makes nothing."""
    cost, found = CostModel.of_device(device, config), []
    for name, link in LINKS.items():
        for devices in (1, 2, 4, 8):
            parts = parallel_step(cost, link, devices, [context] * rows)
            share = math.ceil(rows / devices)
            alone = cost.seconds(StepShape.decode([context] * share))
            found.append({"link": name, "devices": devices, "rows": rows, **parts, "step_ms": sum(parts.values()),
                          "tokens_per_s": rows / sum(parts.values()) * 1e3, "replicas_tokens_per_s": rows / alone})
    return found


# -- goodput --------------------------------------------------------------------------------------


def meets(request: RequestRecord | None, ttft_s: float, itl_s: float) -> bool:
    """Whether a request was answered within both bounds; of the time between tokens, its own mean counts."""
    if request is None or request.first_token is None or request.first_token - request.arrival > ttft_s:
        return False
    seconds, tokens = step_gaps(request)
    return not tokens.sum() or float(seconds.sum() / tokens.sum()) <= itl_s


def goodput_rows(service: Service, rates: Sequence[float], requests: int, ttft_s: float, itl_s: float) -> list[dict]:
    """The same chats at each rate a second, in the open loop. good_per_s: the rate times the share that met both."""
    rows = []
    for rate in rates:
        served = service.serve(chats(requests, rate))
        share = sum(meets(request, ttft_s, itl_s) for request in served.requests) / len(served.requests)
        figures = service_row(served, "tokens_per_s", "ttft_p50_s", "ttft_p99_s", "itl_p50_ms", "itl_p99_ms")
        rows.append({"rate": float(rate), "share": share, "good_per_s": rate * share, **figures})
    return rows


def highest_rate(rows: Sequence[dict], share: float = 0.9) -> float | None:
    """The highest rate up to which at least this share met both bounds, at it and at every lower rate."""
    kept = None
    for row in sorted(rows, key=lambda row: row["rate"]):
        if row["share"] < share:
            break
        kept = row["rate"]
    return kept


# -- answers of thousands of tokens ---------------------------------------------------------------


def thinking(requests: int, mean_tokens: int, prompt_tokens: int = 500) -> list[WorkItem]:
    """Questions of equal length, and answers whose lengths vary by 0.6 of their mean."""
    return lognormal(0.6, requests, mean_tokens, prompt_tokens)


def long_answers_row(served: Served) -> dict:
    """What long answers do to rows, queue and memory; computed_again: tokens, for each token of an answer."""
    totals = served.records.totals
    figures = service_row(served, "mean_rows", "tokens_per_s", "queue_p99_s", "itl_p50_ms", "itl_p99_ms",
                          "latency_p50_s", "preemptions", "cache_peak_share")
    return {**figures, "computed_again": totals["recomputed_tokens"] / totals["output_tokens"]}


def rows_that_fit(service: Service, prompt_tokens: int, answer_tokens: float) -> int:
    """Requests whose prompt and whole answer the service's memory holds."""
    per_token = service.cost.unit_costs[0]
    return int(service.kv_memory // (per_token * (prompt_tokens + answer_tokens)))
