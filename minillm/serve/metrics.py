"""What a monitoring system scrapes from /metrics, under vLLM's names, with `minillm:` before them.

Gauges and counters are read from the engine and its records when they are asked for; histograms
count events as they are delivered.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from statistics import median

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from minillm.fast.engine import Engine
from minillm.ladder.request import RequestId, TokenEvent

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
RECENT = 200  # values that the page's medians are taken over
COUNTERS = {  # of `Records.totals`
    "prompt_tokens": ("prompt tokens computed", "prompt_tokens"),
    "generation_tokens": ("output tokens", "output_tokens"),
    "prefix_cache_hits": ("prompt tokens found in the prefix cache", "cached_tokens"),
    "num_preemptions": ("requests that lost their memory and wait again", "preempted"),
    "spec_decode_num_draft_tokens": ("draft tokens verified", "drafted_tokens"),
    "spec_decode_num_accepted_tokens": ("draft tokens accepted", "accepted_tokens"),
    "engine_steps": ("forward passes", "steps"),
}
REASONS = ("stop", "length", "abort", "error")


class Metrics:
    """The server's registry, and the histograms that its engine's thread feeds."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.registry = engine, CollectorRegistry()
        self.ttft = self._seconds("time_to_first_token", "from arrival to the first token")
        self.itl = self._seconds("inter_token_latency", "between the steps that gave a request tokens")
        self.latency = self._seconds("e2e_request_latency", "from arrival to the last token")
        self.refused = Counter("minillm:requests_refused", "refused, since the queue was full", registry=self.registry)
        self.registry.register(self)
        self.lives: dict[RequestId, tuple[float, float | None]] = {}  # arrival, and when the last token came
        self.recent = {name: deque(maxlen=RECENT) for name in ("ttft", "itl")}

    def _seconds(self, name: str, says: str) -> Histogram:
        return Histogram(f"minillm:{name}_seconds", f"seconds {says}", buckets=SECONDS, registry=self.registry)

    def arrived(self, request_id: RequestId, now: float) -> None:
        self.lives[request_id] = now, None

    def observe(self, events: Iterable[TokenEvent]) -> None:
        """Count what a step gave: called on the engine's thread."""
        for event in events:
            if event.request_id not in self.lives:  # added to the engine by somebody else
                continue
            arrival, last = self.lives.pop(event.request_id)
            if event.token_ids:
                name, start = ("ttft", arrival) if last is None else ("itl", last)
                getattr(self, name).observe(event.time - start)
                self.recent[name].append(event.time - start)
                last = event.time
            if not event.finished:
                self.lives[event.request_id] = arrival, last
            elif event.finish_reason in ("stop", "length"):
                self.latency.observe(event.time - arrival)

    def medians_ms(self) -> dict[str, float | None]:
        """Of the last `RECENT` values, for the page."""
        return {f"{name}_ms": median(values) * 1e3 if values else None for name, values in self.recent.items()}

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        """What the registry asks for at each scrape."""
        stats, totals = self.engine.stats(), self.engine.records.totals
        blocks = stats.blocks_live + stats.blocks_cached + stats.blocks_free
        yield GaugeMetricFamily("minillm:num_requests_running", "rows now", stats.running)
        yield GaugeMetricFamily("minillm:num_requests_waiting", "requests in the queue now", stats.waiting)
        yield GaugeMetricFamily("minillm:kv_cache_usage_perc", "share of the blocks held, 1 is all",
                                stats.blocks_live / blocks)
        for name, (says, total) in COUNTERS.items():
            yield CounterMetricFamily(f"minillm:{name}", says, totals[total])
        asked = CounterMetricFamily("minillm:prefix_cache_queries", "prompt tokens looked up in the prefix cache")
        asked.add_metric([], totals["prompt_tokens"] + totals["cached_tokens"])
        yield asked
        ended = CounterMetricFamily("minillm:request_success", "requests that ended", labels=["finished_reason"])
        for reason in REASONS:
            ended.add_metric([reason], totals[f"finished_{reason}"])
        yield ended
