"""A run's summary as one row of a table."""

from __future__ import annotations

from minillm.measure.service import Served

LATENCIES = ("queue_p50_s", "queue_p99_s", "ttft_p50_s", "ttft_p99_s", "itl_p50_ms", "itl_p99_ms", "latency_p50_s",
             "latency_p99_s")
COLUMNS = {  # of a table, and where a summary has each; of ITL, that per step
    "tokens_per_s": "output_tokens_per_s", "mean_rows": "batch.mean_rows", "peak_rows": "batch.peak_rows",
    "queue_p50_s": "queue_s.p50", "queue_p99_s": "queue_s.p99", "ttft_p50_s": "ttft_s.p50", "ttft_p99_s": "ttft_s.p99",
    "itl_p50_ms": "itl_per_step_s.p50", "itl_p99_ms": "itl_per_step_s.p99",
    "latency_p50_s": "latency_s.p50", "latency_p99_s": "latency_s.p99",
    "mean_waiting": "queue_depth.mean", "peak_waiting": "queue_depth.peak", "preemptions": "preemptions",
    "cache_peak_share": "kv.peak_share", "wasted_share": "kv.peak_wasted_share",
    "prompt_tokens_computed": "prompt_tokens", "cost_per_million_output_tokens": "cost_per_million_output_tokens",
}


def flat(found: dict, *columns: str) -> dict:
    """A `summary`, or `latencies`, as one row of a table: these of the COLUMNS, or all that it has.

    Columns in _ms are milliseconds. None where the summary has no value; KeyError for an unknown column.
    """
    row = {}
    for column in columns or [name for name, place in COLUMNS.items() if place.split(".")[0] in found]:
        value = found
        for key in COLUMNS[column].split("."):
            value = value.get(key) if value else None
        row[column] = value * 1e3 if value is not None and column.endswith("_ms") else value
    return row


def service_row(served: Served, *columns: str) -> dict:
    """These columns of `flat`, which here has "refused" and "refused_share" too."""
    refused = served.requests.count(None)
    row = {**flat(served.summary), "refused": refused, "refused_share": refused / len(served.requests)}
    return {column: row[column] for column in columns}
