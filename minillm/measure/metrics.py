"""Every figure that a server is judged by, computed afterwards from the engine's records and from nothing else.

Definitions, each stated once and used everywhere:

    percentile    nearest rank: the value at rank ceil(percent * n / 100), so p50 of 3 values is the
                  2nd and p99 of 100 the 99th; None of no values. n stands beside it, and below 100
                  values a p99 carries a warning, since it is then merely the highest
    queue         from arrival until first scheduled
    TTFT          time to first token, from arrival: the queue is in it
    ITL per step  between the steps that gave a request tokens: how long the text stands still
    ITL per token the same time shared among the tokens of the later step: how fast the text comes.
                  The two differ where a step gives several tokens (speculation); one token has neither
    latency       from arrival to finish

Latencies are those of requests that ended by themselves. Aborted ones are counted, and their
tokens are output, but they are not averaged; neither are those still under way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from minillm.extras.bounded_records import BoundedRecords, Histogram
from minillm.ladder.records import Records, RequestRecord, StepRecord

PERCENTILES = (50, 90, 99)
ENOUGH_FOR_P99 = 100


def percentile(values: Sequence[float], percent: int) -> float | None:
    """The value at nearest rank, ceil(percent * n / 100), in whole numbers so that nothing rounds; None of nothing."""
    return nearest_rank(np.sort(values), percent)


def nearest_rank(ordered: np.ndarray, percent: int) -> float | None:
    """The same of values in ascending order."""
    rank = -(-percent * len(ordered) // 100)
    return ordered[max(rank, 1) - 1].item() if len(ordered) else None


def distribution(values: Sequence[float]) -> dict:
    """n, p50, p90, p99 and max of some values, and a warning where p99 says no more than max."""
    ordered = np.sort(values)
    return _described(len(ordered), lambda percent: nearest_rank(ordered, percent), nearest_rank(ordered, 100))


def distribution_of(histogram: Histogram) -> dict:
    """The same from a histogram, right to 1 %."""
    return _described(histogram.n, histogram.nearest_rank, histogram.highest)


def _described(n: int, at: Callable[[int], float | None], highest: float | None) -> dict:
    few = f"p99 of {n} values is no more than their highest" if 0 < n < ENOUGH_FOR_P99 else None
    return {"n": n, **{f"p{percent}": at(percent) for percent in PERCENTILES}, "max": highest, "warning": few}


NOT_ANSWERED = (None, "abort", "error")  # reasons to finish


def latencies(requests: Iterable[RequestRecord]) -> dict[str, dict]:
    """Distributions, in seconds, over the finished requests among these (all of a run, or one kind of customer)."""
    answered = [r for r in requests if r.finish_reason not in NOT_ANSWERED and r.token_times]
    seconds, tokens = all_gaps(answered)
    return {
        "queue_s": distribution([r.first_scheduled - r.arrival for r in answered if r.first_scheduled is not None]),
        "ttft_s": distribution([r.first_token - r.arrival for r in answered]),
        "itl_per_token_s": distribution(seconds if (tokens == 1).all() else np.repeat(seconds / tokens, tokens)),
        "itl_per_step_s": distribution(seconds),
        "latency_s": distribution([r.finish - r.arrival for r in answered]),
    }


def step_gaps(request: RequestRecord) -> tuple[np.ndarray, np.ndarray]:
    """Of each step but the first that gave the request tokens: seconds since the one before, and how many it gave."""
    moments, tokens = np.unique(request.token_times, return_counts=True)  # tokens of one step have one time
    return np.diff(moments), tokens[1:]


def all_gaps(requests: Sequence[RequestRecord]) -> tuple[np.ndarray, np.ndarray]:
    """`step_gaps` of all requests, one after another. In place, since there may be millions."""
    most, end = sum(request.output_tokens for request in requests), 0
    seconds, tokens = np.empty(most), np.empty(most, np.int32)
    for request in requests:
        gaps, numbers = step_gaps(request)
        start, end = end, end + len(gaps)
        seconds[start:end], tokens[start:end] = gaps, numbers
    return seconds[:end], tokens[:end]


def summary(records: Records, price_per_hour: float | None = None) -> dict:
    """All metrics of a run, units in their names; None where records lack them, or a rate has no time.

    price_per_hour, of the hardware in any currency, gives the cost per million output tokens.
    """
    totals = records.totals
    span = records.ended - records.began if records.ended is not None else None
    rate = _ratio(totals["output_tokens"], span)
    return {
        "requests": request_counts(records),
        "span_s": span,  # from the first arrival to the end of the last step
        "busy_s": totals["busy_seconds"],
        "steps": totals["steps"],
        "output_tokens": totals["output_tokens"],  # of all requests, aborted ones too
        "output_tokens_per_s": rate,
        "cost_per_million_output_tokens": cost_per_million_tokens(rate, price_per_hour),
        **(latencies_of_summary(records) if isinstance(records, BoundedRecords) else latencies(records.requests)),
        "batch": batch(records),
        "queue_depth": {"peak": records.peaks["waiting"], "mean": time_mean(records.steps, lambda s: s.waiting)},
        "kv": occupancy(records),
        "speculation": speculation(records),
        "prompt_tokens": totals["prompt_tokens"],  # computed, each counted once
        "cached_prompt_tokens": totals["cached_tokens"],  # found in the prefix cache instead
        "prefix_hit_rate": _ratio(totals["cached_tokens"], totals["cached_tokens"] + totals["prompt_tokens"]),
        "preemptions": totals["preempted"],
        "recomputed_tokens": totals["recomputed_tokens"],  # fed again after a preemption: neither prompt nor output
        "recovered_tokens": totals["recovered_tokens"],  # found in the cache again after a preemption
    }


CLIENTS_SEE = (
    "requests", "span_s", "output_tokens", "output_tokens_per_s", "ttft_s", "itl_per_token_s", "itl_per_step_s",
    "latency_s",
)


def seen_by_clients(records: Records) -> dict:
    """What a client sees of `summary`, and `mean_in_flight` by Little's law. ValueError for bounded records."""
    if isinstance(records, BoundedRecords):
        raise ValueError("records='summary' keeps no requests; run the engine with records='all'")
    found = summary(records)
    waited = sum(r.finish - r.arrival for r in records.requests if r.finish_reason not in NOT_ANSWERED)
    return {**{name: found[name] for name in CLIENTS_SEE}, "mean_in_flight": _ratio(waited, found["span_s"])}


def request_counts(records: Records) -> dict[str, int]:
    """How many requests ended by themselves, were aborted, failed, and are still under way."""
    ended = {name: number for name, number in records.totals.items() if name.startswith("finished_")}
    aborted, failed = (ended.pop(f"finished_{reason}", 0) for reason in ("abort", "error"))
    return {"finished": sum(ended.values()), "aborted": aborted, "failed": failed, "unfinished": len(records.live)}


def latencies_of_summary(records: Records) -> dict[str, dict | None]:
    """The same distributions where only histograms were kept; they do not tell steps from tokens."""
    kept = {name: distribution_of(histogram) for name, histogram in records.histograms.items()}
    return {
        "queue_s": kept["queue"],
        "ttft_s": kept["ttft"],
        "itl_per_token_s": kept["itl"],
        "itl_per_step_s": None,
        "latency_s": kept["latency"],
    }


def batch(records: Records) -> dict:
    """The achieved batch, the most telling number of all: rows a step that served a request, and rows that idled."""
    totals = records.totals
    useful = totals["rows"] - totals["idle_rows"]
    return {
        "mean_rows": _ratio(useful, totals["steps"]),
        "peak_rows": records.peaks["rows"],  # idle ones included
        "idle_row_steps": totals["idle_rows"],  # slots that a static batch held for requests that had ended
        "idle_share": _ratio(totals["idle_rows"], totals["rows"]),
    }


def speculation(records: Records) -> dict:
    """Drafts verified and accepted, their ratio, and tokens per round, the target's own included; none past an end."""
    totals = records.totals
    rounds = sum(record.rounds for record in (*records.requests, *records.live.values()))
    in_rounds = totals["output_tokens"] - (totals["sampled_rows"] - rounds)  # a row without drafts is given one token
    return {
        "drafted_tokens": totals["drafted_tokens"],
        "accepted_tokens": totals["accepted_tokens"],
        "acceptance_rate": _ratio(totals["accepted_tokens"], totals["drafted_tokens"]),
        "tokens_per_round": None if isinstance(records, BoundedRecords) else _ratio(in_rounds, rounds),
    }


def occupancy(records: Records) -> dict:
    """Blocks live, cached and free on average over busy time, and the fullest step.

    `used_tokens` hold a key and a value; `wasted_tokens` are reserved and empty.
    """
    steps = records.steps
    means = {f"mean_{name}": time_mean(steps, lambda s, name=name: getattr(s, name)) for name in BLOCK_STATES}
    if not steps or records.block_size is None:
        peaks = records.peaks
        return {**means, "peak_blocks_live": peaks["blocks_live"], "peak_used_tokens": peaks["kv_tokens"]}
    fullest = max(steps, key=lambda step: step.blocks_live)
    reserved = fullest.blocks_live * records.block_size
    return {
        **means,
        "peak_blocks_live": fullest.blocks_live,
        "peak_share": _ratio(fullest.blocks_live, sum(getattr(fullest, name) for name in BLOCK_STATES)),
        "peak_reserved_tokens": reserved,
        "peak_used_tokens": fullest.kv_tokens,
        "peak_wasted_tokens": reserved - fullest.kv_tokens,
        "peak_wasted_share": _ratio(reserved - fullest.kv_tokens, reserved),
    }


BLOCK_STATES = ("blocks_live", "blocks_cached", "blocks_free")  # their sum is the pool


def time_mean(steps: Sequence[StepRecord], value: Callable[[StepRecord], float]) -> float | None:
    """A gauge's mean over busy time: each step counts for as long as it took."""
    return _ratio(sum(value(step) * step.duration for step in steps), sum(step.duration for step in steps))


def cost_per_million_tokens(tokens_per_s: float | None, price_per_hour: float | None) -> float | None:
    """Price per hour over the tokens made in an hour, times a million."""
    return price_per_hour / (tokens_per_s * 3600) * 1e6 if tokens_per_s and price_per_hour is not None else None


def merge(parts: Sequence[Records]) -> Records:
    """The records of several servers as those of one service. Peaks and batches stay those of one server."""
    if any(isinstance(part, BoundedRecords) for part in parts):
        raise ValueError("merge needs records='all' of every engine")
    sizes = {part.block_size for part in parts}
    merged = Records(sizes.pop() if len(sizes) == 1 else None)
    for number, part in enumerate(parts):
        merged.requests += part.requests
        merged.steps += part.steps
        merged.live |= {(number, request_id): record for request_id, record in part.live.items()}
        merged.totals.update(part.totals)
        merged.peaks |= part.peaks  # the higher of the two
    merged.steps.sort(key=lambda step: step.start)
    merged.began = min((part.began for part in parts if part.began is not None), default=None)
    merged.ended = max((part.ended for part in parts if part.ended is not None), default=None)
    return merged


def _ratio(part: float, whole: float | None) -> float | None:
    return part / whole if whole else None
