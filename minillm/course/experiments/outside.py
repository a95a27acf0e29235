"""Chapter 15: what can be learned of a server from outside, by HTTP alone.

A metrics page in Prometheus' text format is read under this course's names, whoever serves it; and what a
client saw of its streams is turned into answers about the server.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

# Each idea of the page, and its sample's name on a metrics page, in the order in which they are looked for.
# vLLM's and SGLang's names are those of their documentation of 2026, llama.cpp's those of `llama-server --metrics`.
METRICS: dict[str, tuple[str, ...]] = {
    "rows now": ("minillm:num_requests_running", "vllm:num_requests_running", "sglang:num_running_reqs",
                 "llamacpp:requests_processing"),
    "queue now": ("minillm:num_requests_waiting", "vllm:num_requests_waiting", "sglang:num_queue_reqs",
                  "llamacpp:requests_deferred"),
    "share of the cache held": ("minillm:kv_cache_usage_perc", "vllm:kv_cache_usage_perc",
                                "vllm:gpu_cache_usage_perc", "sglang:token_usage", "llamacpp:kv_cache_usage_ratio"),
    "prompt tokens": ("minillm:prompt_tokens_total", "vllm:prompt_tokens_total", "sglang:prompt_tokens_total",
                      "llamacpp:prompt_tokens_total"),
    "output tokens": ("minillm:generation_tokens_total", "vllm:generation_tokens_total",
                      "sglang:generation_tokens_total", "llamacpp:tokens_predicted_total"),
    "prompt tokens found in the prefix cache": ("minillm:prefix_cache_hits_total", "vllm:prefix_cache_hits_total",
                                                "sglang:cached_tokens_total"),
    "preemptions": ("minillm:num_preemptions_total", "vllm:num_preemptions_total", "sglang:num_retracted_reqs"),
    "requests refused": ("minillm:requests_refused_total",),
    "time to first token, sum": ("minillm:time_to_first_token_seconds_sum", "vllm:time_to_first_token_seconds_sum",
                                 "sglang:time_to_first_token_seconds_sum"),
    "time to first token, count": ("minillm:time_to_first_token_seconds_count",
                                   "vllm:time_to_first_token_seconds_count",
                                   "sglang:time_to_first_token_seconds_count"),
}
HIGHEST = ("share of the cache held",)  # of several engines' gauges the fullest; everything else is summed


def read_metrics(page: str) -> dict[str, float]:
    """The ideas of `METRICS` that a metrics page has. Samples that differ in labels alone (engines, models) are summed;
    of a share the highest is taken. ValueError where the text is not in Prometheus' format."""
    samples: dict[str, list[float]] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            samples.setdefault(sample.name, []).append(sample.value)
    found = {}
    for idea, names in METRICS.items():
        known = next((samples[name] for name in names if name in samples), None)
        if known is not None:
            found[idea] = max(known) if idea in HIGHEST else sum(known)
    return found


def engine_of(page: str) -> str | None:
    """Whose metrics page it is, by the names' prefix: "minillm", "vllm", "sglang", "llamacpp"; None if neither."""
    prefixes = dict.fromkeys(name.split(":")[0] for names in METRICS.values() for name in names)
    return next((prefix for prefix in prefixes if f"\n{prefix}:" in f"\n{page}"), None)


@dataclass
class Stream:
    """What a client saw of one request, in seconds on its own clock. events: the moments at which text came.

    status: of the answer; retry_after: what a refusal asked for.
    """

    sent: float
    status: int | None = None
    retry_after: str | None = None
    events: list[float] = field(default_factory=list)

    @property
    def ttft(self) -> float:
        return self.events[0] - self.sent


def most_at_once(streams: Sequence[Stream]) -> int:
    """The most requests that were between their first and their last event at the same time: rows of one step."""
    changes = sorted((moment, step) for stream in streams if len(stream.events) > 1
                     for moment, step in ((stream.events[0], 1), (stream.events[-1], -1)))
    most = now = 0
    for _, step in changes:
        now += step
        most = max(most, now)
    return most


def tokens_a_step(prompt_tokens: int, beside: Stream, sent: float, first: float) -> float:
    """Prompt tokens that were computed between two events of another request, while a prompt sent at `sent` was
    waiting for its token at `first`: the prompt's length where it was computed whole.

    The first event after `sent` is that of a step that was under way already, and had none of the prompt.
    """
    steps = sum(sent < moment <= first for moment in beside.events) - 1
    return prompt_tokens / max(steps, 1)
