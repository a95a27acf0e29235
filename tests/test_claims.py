"""The ledger: each word follows from direction, size and cause, each rule has rows on both sides of its thresholds, and
a contrary measurement or exchanged labels cost a claim its word."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import dataclass

import pytest

from minillm.cli import main
from minillm.course.catalogue import EXPERIMENTS
from minillm.course.experiments import example
from minillm.course.ledger import LEDGER, as_audit, as_markdown, as_rows, find_all, judged
from minillm.course.verdicts import (
    HOLDS,
    IN_DIRECTION,
    INCONCLUSIVE,
    NOT_HERE,
    NOT_MEASURED,
    OTHER_REASON,
    TOO_SMALL,
    Part,
    word,
)
from minillm.course.verdicts.reading import NOISE, not_less, not_more, over, ratio, reading, times
from minillm.course.verdicts.service import WATCHED, agreement
from minillm.measure.measurement import EXACT, MEASUREMENTS, VIRTUAL, Measurement, Provenance

JUDGED = {claim.id: claim for claim in LEDGER}
SPEAKING = (HOLDS, IN_DIRECTION, OTHER_REASON)

# -- rows under which each claim holds ------------------------------------------------------------

CURVE = [{"rows": n, "step_ms": 10 + 0.1 * n, "tokens_per_s": n / (10 + 0.1 * n) * 1e3,
          "tokens_per_s_each": 1e3 / (10 + 0.1 * n)} for n in (1, 8, 32, 64)]
LOTS = [
    *({"phase": "prefill", "rows": n, "tokens_each": tokens, "tokens_per_s": rate, "mfu": rate / 2e4, "mbu": 0.1}
      for n, tokens, rate in ((1, 64, 5e3), (1, 2048, 1.5e4), (8, 64, 1.4e4))),
    *({"phase": "decode", "rows": n, "tokens_each": 1, "tokens_per_s": 100.0 * n, "mfu": 0.01 * n, "mbu": 0.8}
      for n in (1, 8)),
]  # fmt: skip
KNEE = [{"clients": n, "mean_rows": n, "tokens_per_s": n / (16 + n) * 1e3, "itl_p50_ms": 16.0 + n}
        for n in (1, 4, 16, 64, 128, 256)]
IDLE = [
    {"case": case, "batching": batching, "steps": 900, "idle_slot_steps": idle, "idle_share": share,
     "empty_while_waiting": 0}
    for case, batching, idle, share in (
        ("80 beside 800 tokens", "static", 720, 0.45), ("80 beside 800 tokens", "continuous", 0, 0.0),
        ("one of 800, seven of 40", "static", 5320, 0.83), ("one of 800, seven of 40", "continuous", 0, 0.0),
    )
]  # fmt: skip
POLICIES = [{"part": part, "setup": setup, "tokens_per_s": speed} for part in ("whole run", "answers only")
            for setup, speed in (("static, slots", 100.0), ("continuous, slots", 250.0), ("continuous, paged", 390.0))]
SUMS = [
    {"model": "llama-3-8b", "kv_format": "bf16", "context_tokens": context, "memory_gb": 80.0, "weights_gb": 16.0,
     "overhead_gb": 4.0, "cache_gb": 60.0, "request_gb": 131072 * context / 1e9, "max_concurrent": fit}
    for context, fit in ((4096, 111), (2048, 223))
] + [
    {"model": name, "heads": 32, "kv_heads": heads, "formula_bytes": 16384 * heads, "stored_bytes": 16384 * heads,
     "times_without_gqa": 32 / heads}
    for name, heads in (("llama-3-8b", 8), ("llama-2-7b", 32))
]  # fmt: skip
EXAMPLE = [
    {"setup": setup, "clients": clients, "peak_rows": clients, "tokens_per_s": speed, "latency_p99_s": tail,
     "price_per_hour": 2.9, "cost_per_million_output_tokens": 2.9 / speed / 3600 * 1e6, "context_tokens": 4096,
     "weights_gb": 16.0, "kv_peak_gb": kv, "reading_ms": 40.0, "arithmetic_ms": 50.0}
    for setup, clients, speed, tail, kv in (
        ("static batch of 8", 8, 310.0, 9.0, 4.3), ("continuous, paged", 111, 2850.0, 4.1, 59.6),
        ("continuous, paged, 8-bit KV", 220, 3900.0, 6.8, 59.7),
    )
]  # fmt: skip
DRAFTS = [
    *({"part": "step cost", "k": 4, "batch": batch, "times_plain": times} for batch, times in ((1, 1.2), (16, 2.1))),
    {"part": "sampling", "draws": 1000, "chi_square": 3.0, "limit": 22.46},
    *({"part": "real", "prompts": prompts, "drafts": "n-gram", "k": k, "batch": batch, "acceptance": right,
       "speedup": speedup, "same_tokens": True}
      for prompts, k, batch, right, speedup in (("copy", 4, 1, 0.7, 2.5), ("chat", 4, 1, 0.1, 0.97),
                                                ("chat", 4, 16, 0.1, 0.7), ("chat", "adaptive", 16, 0.3, 0.98),
                                                ("copy", 4, 16, 0.6, 0.8))),
]  # fmt: skip
KV_FORMATS = [
    {"scheme": name, "share_of_16_bit": share, "change_percent": change, "change_error_percent": 0.01, "tokens": 12288,
     "copied_percent": copied, "copying_change_nats": nats, "copying_change_error_nats": error,
     "found_in_1024_percent": 75.0, "asked_in_1024": 8,
     "rare_tokens_change_nats": 0.1, "common_tokens_change_nats": 0.02, "at_2k_to_4k_change_nats": 0.1,
     "at_under_256_change_nats": 0.02, **{f"{part}_change_error_nats": 0.01 for part in
                                          ("rare_tokens", "common_tokens", "at_2k_to_4k", "at_under_256")}}
    for name, share, change, copied, nats, error in (
        ("fp32", 2.0, 0.0, 57.0, 0.0, 0.0), ("int8", 0.516, 0.1, 57.0, 0.0, 0.001),
        ("fp8", 0.516, 0.05, 50.0, 0.2, 0.05), ("int4", 0.25, 5.0, 30.0, 1.0, 0.1))
]  # fmt: skip
PACKED = [
    {"weights": name, "rows": n, "read_mb": mb, "step_ms": ms * (1 + 0.1 * n), "times_faster": 10 / ms,
     "cache_tokens_in_1_gib": int(5000 - mb)}
    for name, mb, ms in (("fp32", 538.0, 10.0), ("int8", 135.0, 5.0), ("int4", 88.0, 3.0)) for n in (1, 8)
]  # fmt: skip
LAYOUT = {"ttft_p50_s": 0.1, "ttft_p99_s": 1.0, "tokens_per_s": 500.0}
H = example.articles_table()


@dataclass
class Given:
    """rows: under which the claim holds. cases: (changes to them as (row, column, value), the word that follows)."""

    rows: list[dict]
    cases: list[tuple[list[tuple[int, str, object]], str]]

    def changed(self, changes) -> list[dict]:
        rows = deepcopy(self.rows)
        for number, name, value in changes:
            rows[number][name] = value
        return rows


def one(column: str, row: int, **words: object) -> list:
    """Cases that each change one figure: {word: values}."""
    names = {"holds": HOLDS, "in_direction": IN_DIRECTION, "other_reason": OTHER_REASON, "not_here": NOT_HERE,
             "inconclusive": INCONCLUSIVE, "too_small": TOO_SMALL}
    return [([(row, column, value)], names[name]) for name, values in words.items() for value in values]


GIVEN = {
    "A1": Given(
        [{"layers": n, "weight_mb": 10.0 * n, "step_ms": 1.0 * n, "mbu": 0.9, "mfu": 0.02} for n in (32, 16, 4)],
        one("mbu", 0, holds=[0.81], in_direction=[0.79]) + one("mfu", 0, holds=[0.29], not_here=[0.31])
        + one("step_ms", 2, holds=[10.0], other_reason=[14.0], inconclusive=[31.0], not_here=[40.0])),
    "A2": Given(LOTS, one("mbu", 1, holds=[0.6], inconclusive=[0.7, 0.8], not_here=[0.9])
                + one("mfu", 2, holds=[0.93], in_direction=[0.95])
                + [([(1, "mfu", 0.45), (2, "mfu", 0.9)], INCONCLUSIVE),
                   ([(1, "mfu", 0.4), (2, "mfu", 0.9)], NOT_HERE)]),
    "A3": Given(LOTS, one("tokens_per_s", 4, holds=[570.0], in_direction=[550.0], inconclusive=[290.0],
                          not_here=[200.0])),
    "A4": Given([{"context_tokens": n, "recompute_ms": 1.0 * n, "cached_ms": 40 + n / 500}
                 for n in (16, 64, 256, 1024)],
                one("recompute_ms", 3, holds=[1270.0], in_direction=[1300.0], inconclusive=[260.0], not_here=[150.0],
                    too_small=[None])
                + one("cached_ms", 3, holds=[49.0], in_direction=[51.0])),
    "A5": Given([{"rows": n, "gauge": "NVML utilisation", "busy_percent": 97.0, "tokens_per_s": 50.0 * n,
                  "mfu": 0.01 * n} for n in (1, 64)],
                one("tokens_per_s", 1, holds=[201.0], in_direction=[199.0], inconclusive=[52.0], not_here=[40.0])
                + one("busy_percent", 0, holds=[82.0], not_here=[81.0]) + one("mfu", 0, holds=[0.33], not_here=[0.34])
                + one("gauge", 0, in_direction=["process CPU time"])),
    "A6": Given(LOTS, one("mfu", 3, holds=[0.6], inconclusive=[0.7, 0.8], not_here=[0.9])
                + one("tokens_per_s", 4, holds=[350.0], inconclusive=[290.0], not_here=[200.0])),
    "B1": Given(CURVE, one("tokens_per_s", 1, holds=[643.0], in_direction=[623.0], inconclusive=[105.0],
                           not_here=[80.0]) + one("step_ms", 1, holds=[15.1], in_direction=[15.2])),
    "B2": Given(CURVE, one("tokens_per_s", 2, holds=[1950.0], in_direction=[1930.0], inconclusive=[3160.0],
                           not_here=[80.0]) + one("tokens_per_s", 1, holds=[575.0], in_direction=[573.0])),
    "B3": Given(KNEE, one("itl_p50_ms", 5, holds=[230.0], in_direction=[200.0])
                + one("tokens_per_s", 5, holds=[1140.0], in_direction=[1160.0])
                + one("mean_rows", 5, holds=[192], too_small=[191])
                + one("requests_per_client", 5, holds=[8], too_small=[7])
                + [([(5, "itl_p50_ms", 33.0), (5, "tokens_per_s", 300.0)], INCONCLUSIVE),
                   ([(5, "itl_p50_ms", 25.0), (5, "tokens_per_s", 300.0)], NOT_HERE)]),
    "B4": Given(IDLE, one("idle_slot_steps", 0, in_direction=[719, 721], not_here=[0])
                + one("idle_share", 2, holds=[0.51], in_direction=[0.5])),
    "B5": Given(IDLE, one("empty_while_waiting", 3, not_here=[5]) + one("idle_slot_steps", 1, not_here=[1])),
    "B6": Given(POLICIES, one("tokens_per_s", 1, holds=[201.0, 399.0], in_direction=[199.0, 401.0],
                              inconclusive=[105.0], not_here=[80.0]) + one("tokens_per_s", 2, holds=[1000.0, 50.0])
                + one("requests", 1, holds=[32], too_small=[31])),
    "B7": Given([{"cv": cv, "static_steps": 48, "times_tokens_per_s": 1 + cv} for cv in (0.0, 1.0, 2.0)],
                one("static_steps", 0, holds=[32], too_small=[31]) + one("times_tokens_per_s", 2, not_here=[1.05])
                + [([(1, "times_tokens_per_s", 1.02), (2, "times_tokens_per_s", 1.08)], INCONCLUSIVE),
                   ([(1, "times_tokens_per_s", 1.05), (2, "times_tokens_per_s", 1.3)], HOLDS)]),
    "B8": Given(CURVE, [*one("tokens_per_s_each", 1, holds=[101.0, 108.0], not_here=[120.0]),
                        ([(1, "tokens_per_s_each_min", 70.0), (1, "tokens_per_s_each_max", 140.0)], INCONCLUSIVE)]),
    "B9": Given([{"replicas": n, "tokens_per_s": 100 + 12.5 * n, "mean_rows": 40 / n} for n in (1, 2, 4, 8)],
                one("tokens_per_s", 3, holds=[810.0], inconclusive=[832.0], not_here=[1012.0])
                + one("mean_rows", 3, holds=[35.0], inconclusive=[39.0], not_here=[60.0])),
    "C1": Given(SUMS, one("stored_bytes", 2, not_here=[1, 65536]) + one("max_concurrent", 0, not_here=[112])),
    "C2": Given(SUMS, one("stored_bytes", 2, not_here=[1])),
    "C3": Given([{"kv": "slots", "reserved_mb": 100.0, "wasted_share": 0.8, "mean_requests": 4.0},
                 {"kv": "paged", "reserved_mb": 90.0, "wasted_share": 0.05, "mean_requests": 20.0}],
                one("wasted_share", 1, holds=[0.24], in_direction=[0.26], not_here=[0.9])
                + one("wasted_share", 0, holds=[0.51], in_direction=[0.49])
                + one("tokens_each", 1, holds=[64.0], too_small=[63.0])),
    "C4": Given([{"cache_gb": gb, "refused": n, "refused_share": n / 100, "cache_peak_share": share, "mfu": 0.2,
                  "busy_share": 0.45} for gb, n, share in ((5, 30, 1.0), (60, 0, 0.1))],
                one("busy_share", 0, holds=[0.56], in_direction=[0.57, 1.0])
                + one("mfu", 0, holds=[0.49], not_here=[0.5])
                + one("refused", 0, not_here=[0]) + one("cache_peak_share", 0, holds=[0.95], other_reason=[0.94])
                + one("refused_share", 1, holds=[0.149], other_reason=[0.15])),
    "C5": Given(SUMS, one("max_concurrent", 1, holds=[221], in_direction=[220], not_here=[111])),
    "C6": Given(KV_FORMATS, one("share_of_16_bit", 1, holds=[0.62], in_direction=[0.63], not_here=[1.0])
                + one("change_percent", 1, holds=[0.98], inconclusive=[0.995], not_here=[1.02])),
    "C7": Given(SUMS, one("times_without_gqa", 3, not_here=[4.0])),
    "C8": Given([{"case": case, "prompt_tokens": 1000, "found": found, "ttft_p50_ms": ms} for case, found, ms in
                 (("no sharing", 0, 90.0), ("shared prefix", 900, 20.0), ("first token changed", 0, 91.0))],
                one("found", 2, not_here=[900]) + one("found", 1, holds=[500], in_direction=[499], not_here=[0])
                + one("ttft_p50_ms", 1, holds=[80.0], inconclusive=[85.0], not_here=[120.0])
                + [([(2, "ttft_p50_ms", 60.0)], HOLDS),  # equal work, 1.5 times apart: that is this file's noise
                   ([(2, "ttft_p50_ms", 60.0), (1, "ttft_p50_ms", 45.0)], INCONCLUSIVE)]),
    "C9": Given([{"kv": kv, "cap_tokens": cap, "mean_rows": rows, "latency_p99_s": tail} for kv, cap, rows, tail in
                 (("slots", 8000, 5.0, 9.0), ("slots", 400, 20.0, 5.0), ("paged", 8000, 20.0, 6.0))],
                one("mean_rows", 1, holds=[5.6], inconclusive=[5.2], not_here=[3.0])
                + one("latency_p99_s", 1, holds=[8.0], inconclusive=[8.9], not_here=[12.0])
                + one("mean_rows", 2, holds=[18.5], other_reason=[17.0])),
    "C10": Given(EXAMPLE, one("kv_peak_gb", 1, holds=[16.1], not_here=[15.9])
                 + one("context_tokens", 0, too_small=[4095])),
    "D1": Given(KV_FORMATS, one("share_of_16_bit", 3, holds=[0.3125], in_direction=[0.313], not_here=[0.55])
                + one("share_of_16_bit", 1, holds=[0.625], in_direction=[0.63], not_here=[1.1])),
    "D2": Given(KV_FORMATS, one("change_percent", 3, holds=[1.02], in_direction=[1.005, 0.5], inconclusive=[0.11],
                                not_here=[0.02])
                + one("change_percent", 1, holds=[0.98], in_direction=[1.2])
                + one("change_percent", 2, in_direction=[0.095, 0.2])),
    "D3": Given(PACKED, one("step_ms", 2, holds=[9.9], inconclusive=[10.5], not_here=[13.0])
                + one("step_ms", 5, holds=[16.3], in_direction=[17.0, 25.0])
                + one("cache_tokens_in_1_gib", 2, not_here=[4000])),
    "D4": Given(KV_FORMATS, one("rare_tokens_change_nats", 3, holds=[0.035], inconclusive=[0.033], not_here=[-0.1])
                + one("at_2k_to_4k_change_nats", 3, holds=[0.035], inconclusive=[0.033], not_here=[-0.1])),
    "D5": Given(KV_FORMATS, one("copied_percent", 2, holds=[51.2], in_direction=[51.5])
                + one("copying_change_nats", 2, holds=[0.061], inconclusive=[0.05], not_here=[-0.1])
                + one("change_percent", 2, holds=[0.99], not_here=[1.0])),
    "D6": Given(KV_FORMATS, one("change_percent", 1, holds=[0.98], inconclusive=[0.995], not_here=[1.2])
                + one("share_of_16_bit", 1, holds=[0.62], in_direction=[0.63])
                + one("change_percent", 3, inconclusive=[0.11], not_here=[0.05])
                + [([(1, "change_percent", 0.9), (2, "change_percent", -0.2)], NOT_HERE)]),
    "E1": Given(DRAFTS, one("same_tokens", 4, not_here=[False]) + one("chi_square", 2, holds=[22.4], not_here=[22.5])),
    "E2": Given(DRAFTS, one("times_plain", 0, holds=[1.25], in_direction=[1.26, 1.7], inconclusive=[2.1],
                            not_here=[3.0])
                + one("times_plain", 1, holds=[1.5], in_direction=[1.4], other_reason=[0.9])),
    "E3": Given(DRAFTS, one("speedup", 3, holds=[1.25], inconclusive=[1.09, 1.15], not_here=[0.9])),
    "E4": Given(DRAFTS, one("speedup", 7, holds=[0.9], in_direction=[0.92, 1.4], inconclusive=[2.4], not_here=[3.1])),
    "F1": Given([{"clients": n, "tokens_per_s": 100.0 * n**0.5, "latency_p99_s": 2.0 + n / 16} for n in (1, 16, 256)],
                one("latency_p99_s", 2, holds=[2.4], not_here=[2.1]) + one("tokens_per_s", 2, inconclusive=[105.0],
                                                                           not_here=[90.0])),
    "F2": Given([{"layout": layout, "chat_ttft_p99_s": tail, "heap_tokens_per_s": 900.0}
                 for layout, tail in (("mixed", 4.0), ("separate pools", 0.2))],
                one("chat_ttft_p99_s", 1, holds=[3.6], inconclusive=[3.8], not_here=[5.0])
                + one("heap_tokens_per_s", 1, holds=[721.0], in_direction=[719.0])),
    "F3": Given([{"case": case, "latency_p99_s": tail, "queue_p99_s": queue, "prompt_tokens_computed": tokens}
                 for case, tail, queue, tokens in (
                     ("answers as they come", 20.0, 1.0, 10), ("answers capped at 200", 5.0, 1.0, 10),
                     ("prompts computed", 9.0, 5.0, 50), ("prompts cached", 4.0, 0.1, 5))],
                one("latency_p99_s", 1, holds=[18.0], inconclusive=[19.0], not_here=[25.0])
                + one("queue_p99_s", 3, holds=[4.5], inconclusive=[4.8], not_here=[6.0])
                + one("prompt_tokens_computed", 3, holds=[49], other_reason=[50])),
    "F4": Given([{"metric": name, "value": 1.0, "counted": 1.0} for name in WATCHED],
                one("value", 2, not_here=[None]) + one("counted", 2, holds=[1.009], in_direction=[1.02, None])),
    "F5": Given([{"setup": f"{rows} rows", "mean_rows": rows, "tokens_per_s": speed, "busy_share": 1.0,
                  "queue_p99_s": queue} for rows, speed, queue in
                 ((3.0, 300.0, 4.0), (8.0, 700.0, 5.0), (15.0, 1100.0, 3.0), (25.0, 1700.0, 2.0), (40.0, 2500.0, 1.0))],
                one("queue_p99_s", 0, inconclusive=[6.0]) + one("mean_rows", 0, not_here=[50.0])),
    "F6": Given([{"symptom": "slow", "cure": "a cure", "figure": "ttft_p50_s", "before": 10.0, "after": 1.0},
                 {"symptom": "dear", "cure": "another", "figure": "tokens_per_s", "before": 100.0, "after": 300.0}],
                one("after", 0, holds=[8.9], inconclusive=[9.5], not_here=[12.0])
                + one("after", 1, holds=[115.0], inconclusive=[105.0], not_here=[80.0])
                + one("cure", 0, in_direction=["drafts that are free"])),
    "F7": Given([{**LAYOUT, "layout": layout, "itl_p99_ms": gap} for layout, gap in
                 (("both on both", 90.0), ("apart", 12.0))],
                one("itl_p99_ms", 1, holds=[80.0], inconclusive=[85.0], not_here=[110.0])
                + one("ttft_p99_s", 1, holds=[1.25], in_direction=[1.26]) + one("ttft_p50_s", 1, in_direction=[0.2])
                + one("tokens_per_s", 1, holds=[401.0], in_direction=[399.0])),
    "G1": Given(EXAMPLE, one("tokens_per_s", 1, holds=[2290.0], in_direction=[2270.0], inconclusive=[320.0],
                             not_here=[250.0]) + one("context_tokens", 0, too_small=[4095])),
    "G2": Given(EXAMPLE, one("latency_p99_s", 2, holds=[5.5], in_direction=[5.4], not_here=[4.3, 3.0])
                + one("tokens_per_s", 2, in_direction=[5000.0], inconclusive=[2900.0], not_here=[2000.0])
                + one("arithmetic_ms", 2, holds=[41.0], other_reason=[39.0]) + one("context_tokens", 0, too_small=[410])
                + [([(2, "latency_p99_s", 4.3), (2, "latency_p99_s_min", 3.0), (2, "latency_p99_s_max", 7.0)],
                    INCONCLUSIVE)]),
    "G3": Given(EXAMPLE, [*one("cost_per_million_output_tokens", 0, not_here=[1.0]),
                          ([(0, "tokens_per_s", 653.0), (0, "cost_per_million_output_tokens", 2.9 / 653 / 3600 * 1e6)],
                           IN_DIRECTION)]),
    "H1": Given(H, one("mean_stay_s", 1, holds=[11.9], in_direction=[12.0], not_here=[4.0])),
    "H2": Given(H, one("most_tokens_per_s", 1, holds=[3030], in_direction=[3050], not_here=[2800, 3200])
                + one("tokens_per_s", 0, holds=[400], not_here=[410])),
    "H3": Given(H, one("arithmetic_ms", 2, holds=[13.7], in_direction=[13.8], not_here=[38.0])
                + one("reading_ms", 2, holds=[37.7], not_here=[37.9])),
    "H4": Given(H, one("bandwidth_share", 0, holds=[0.387], in_direction=[0.39], not_here=[0.96])
                + one("bandwidth_share", 1, holds=[0.97], in_direction=[0.98])),
    "H5": Given(H, one("bytes_a_token", 1, not_here=[131_073]) + one("fit", 1, holds=[111.0, 111.9], not_here=[112.0])),
}  # fmt: skip

# What exchanging columns does where the compared set-ups are columns of one row.
COLUMNS = {
    "C7": [("heads", "kv_heads")], "D4": [("rare_tokens_change_nats", "common_tokens_change_nats")],
    "F6": [("before", "after")], "H1": [("mean_stay_s", "latency_p99_s")],
}
# Nothing is compared: exact counts and sums, a list of figures, and "one such case exists".
COUNTS = ("C1", "C2", "D5", "E1", "F4", "H5")


def source(device: str = "A GPU", driver: str = "1, CUDA 13") -> Provenance:
    return Provenance(device, driver, "2", "bf16", "m", "abc", "2026-01-01", 0, 1, 3)


def record(root, claim: str, rows: list[dict], experiment: str = "", **where) -> None:
    Measurement(experiment or JUDGED[claim].experiments[0], source(**where), rows).save(root)


def verdicts(root, claim: str) -> list[str]:
    return [finding.verdict for finding in find_all(root, (JUDGED[claim],))]


def word_of(claim: str, rows: list[dict]) -> str:
    return judged(JUDGED[claim], rows).word


# -- the words ------------------------------------------------------------------------------------

YES, NO, UNCLEAR, UNTESTED, NONE = Part.AS_CLAIMED, Part.ANOTHER, Part.UNCLEAR, Part.NOT_TESTED, Part.NONE


@pytest.mark.parametrize(
    ("direction", "size", "cause", "expected"),
    [(YES, YES, YES, HOLDS), (YES, NONE, NONE, HOLDS), (YES, YES, NONE, HOLDS), (YES, NONE, YES, HOLDS),
     (YES, NO, YES, IN_DIRECTION), (YES, NO, NO, IN_DIRECTION), (YES, UNTESTED, NONE, IN_DIRECTION),
     (YES, UNCLEAR, NONE, IN_DIRECTION), (YES, YES, UNTESTED, IN_DIRECTION), (YES, YES, UNCLEAR, IN_DIRECTION),
     (YES, YES, NO, OTHER_REASON), (YES, NONE, NO, OTHER_REASON),
     (NO, YES, YES, NOT_HERE), (NO, NONE, NONE, NOT_HERE), (UNCLEAR, YES, YES, INCONCLUSIVE),
     (UNCLEAR, NO, NO, INCONCLUSIVE)],
)  # fmt: skip
def test_the_word_follows_from_the_three_parts(direction, size, cause, expected):
    assert word(direction, size, cause) == expected


def test_only_a_direction_as_claimed_may_hold():
    for direction in Part:
        for size in Part:
            for cause in Part:
                found = word(direction, size, cause)
                assert (found in SPEAKING) == (direction is YES)
                assert (found == HOLDS) == (direction is YES and {size, cause} <= {YES, NONE})


# -- the rules ------------------------------------------------------------------------------------


@pytest.mark.parametrize("claim", GIVEN)
def test_a_claim_holds_on_rows_that_are_as_it_says(claim):
    assert word_of(claim, GIVEN[claim].rows) == HOLDS


@pytest.mark.parametrize(
    ("claim", "changes", "expected"),
    [(claim, *case) for claim, given in GIVEN.items() for case in given.cases],
    ids=lambda value: "" if isinstance(value, list) else None,
)
def test_each_threshold_has_rows_on_both_sides(claim, changes, expected):
    found = judged(JUDGED[claim], GIVEN[claim].changed(changes))
    assert found.word == expected, f"{changes}: {found.measured}"


@pytest.mark.parametrize("claim", GIVEN)
def test_a_planted_contrary_measurement_flips_the_verdict(tmp_path, claim):
    record(tmp_path, claim, GIVEN[claim].rows)
    assert verdicts(tmp_path, claim) == [HOLDS]
    contrary = [changes for changes, expected in GIVEN[claim].cases if expected == NOT_HERE]
    assert contrary, "no rows that speak against it"
    record(tmp_path, claim, GIVEN[claim].changed(contrary[0]))
    assert verdicts(tmp_path, claim) == [NOT_HERE]


def test_the_knee_needs_clients_up_to_twice_itself_and_is_in_the_tens():
    def loop(shared: int, clients) -> list[dict]:
        return [{"clients": n, "tokens_per_s": n / (shared + n) * 1e3, "itl_p50_ms": 1.0 * shared + n} for n in clients]

    assert word_of("B3", loop(16, (1, 4, 16, 31))) == TOO_SMALL  # the power at 31 is still within the noise
    assert word_of("B3", loop(16, (1, 4, 16, 64))) == IN_DIRECTION  # two doublings: latency to the 0.66
    assert word_of("B3", loop(4, (1, 4, 64))) == word_of("B3", loop(200, (1, 50, 200, 3200))) == IN_DIRECTION
    spread = [{**row, "power_min": 1.0, "power_max": 99.0} for row in KNEE]
    assert word_of("B3", spread) == TOO_SMALL  # by its bootstrap the knee may be anywhere


def test_the_resamples_of_a_run_say_where_its_knee_may_be():
    """B3: the share of resamples in which the knee is at a row, and nothing else, says whether it may be there."""
    def with_shares(*shares: float) -> list[dict]:
        return [{**row, "power_min": 1.0, "power_max": 99.0, "knee_share": share}
                for row, share in zip(KNEE, shares, strict=True)]

    assert word_of("B3", with_shares(0, 0.01, 0.99, 0, 0, 0)) == HOLDS
    assert word_of("B3", exchanged("B3", with_shares(0, 0.01, 0.99, 0, 0, 0))) not in SPEAKING
    assert word_of("B3", with_shares(0, 0.02, 0.96, 0.02, 0, 0)) == HOLDS  # a fortieth may lie beyond either end
    found = judged(JUDGED["B3"], with_shares(0, 0.3, 0.7, 0, 0, 0))
    assert found.word == IN_DIRECTION and "knee at 4 to 16 clients" in found.measured
    assert word_of("B3", with_shares(0, 0, 0.5, 0, 0, 0.5)) == TOO_SMALL
    spread = [{**row, **{f"{name}_{end}": row[name] * by for name in ("itl_p50_ms", "tokens_per_s")
                         for end, by in (("min", 0.3), ("max", 3.0))}} for row in with_shares(0, 0, 1, 0, 0, 0)]
    assert word_of("B3", spread) == INCONCLUSIVE  # nobody knows by how much latency grew


def test_shares_of_the_limits_that_were_measured_in_turns_have_their_own_spread():
    """A2: each turn's share by that turn's limits, so that a set-up measured at two moments is no noise."""
    def in_turns(width: float) -> list[dict]:
        return [{**row, "turns": 3, **{f"{name}_{end}": row[name] * by for name in ("mfu", "mbu")
                                       for end, by in (("min", 1 / width), ("max", width))}} for row in LOTS]

    for width, expected in ((1.1, HOLDS), (3.0, INCONCLUSIVE)):
        found = judged(JUDGED["A2"], in_turns(width))
        assert found.word == expected and "noise" not in found.measured


def test_a_gain_within_each_turn_is_narrower_than_one_of_medians():
    """B6: both policies at 0.7 to 1.4 times their medians, as the machine went, and the gain the same in each turn."""
    rows = [{**row, "turns": 3, "tokens_per_s_min": 0.7 * row["tokens_per_s"],
             "tokens_per_s_max": 1.4 * row["tokens_per_s"]} for row in POLICIES]
    rows[1] |= {"tokens_per_s": 130.0, "tokens_per_s_min": 90.0, "tokens_per_s_max": 180.0}
    assert word_of("B6", rows) == INCONCLUSIVE
    rows[1] |= {"times_static": 1.3, "times_static_min": 1.25, "times_static_max": 1.35}
    found = judged(JUDGED["B6"], rows)
    assert found.word == IN_DIRECTION and "in slots 1.3 (1.25 to 1.35) times static" in found.measured
    rows[0] |= {"times_static": 1.0, "times_static_min": 1.0, "times_static_max": 1.0}
    assert word_of("B6", exchanged("B6", rows)) not in SPEAKING


def test_sharing_is_judged_by_the_spread_of_its_turns():
    """C8: equal work 1.5 times apart is no noise where every case has a spread of its own."""
    given = GIVEN["C8"].changed([(2, "ttft_p50_ms", 60.0), (1, "ttft_p50_ms", 45.0)])
    rows = [{**row, "turns": 3, "ttft_p50_ms_min": 0.95 * row["ttft_p50_ms"],
             "ttft_p50_ms_max": 1.05 * row["ttft_p50_ms"]} for row in given]
    found = judged(JUDGED["C8"], rows)
    assert found.word == HOLDS and "noise" not in found.measured
    rows[1]["ttft_p50_ms_max"] = 60.0
    assert word_of("C8", rows) == INCONCLUSIVE


def test_a_prompt_measured_at_two_moments_shows_the_noise_of_its_file():
    """A2: twice the same prompt, 1.5 times apart, so 1.15 times the bandwidth's share proves nothing."""
    rows = [{**row, "mbu": 0.65} if row["tokens_each"] == 2048 else row for row in LOTS]
    assert word_of("A2", rows) == HOLDS
    again = {**LOTS[0], "tokens_per_s": 7.5e3}
    assert word_of("A2", [*rows, again]) == INCONCLUSIVE


def test_codes_are_judged_over_all_lengths_since_one_has_few():
    """D5: in one length fp8 finds fewer than fp32, in the other more; over both it loses nothing."""
    rows = [row | {"copying_change_nats": 0.0, "copying_change_error_nats": 0.001, "found_in_512_percent": 50.0,
                   "asked_in_512": 400, "asked_in_1024": 400} for row in KV_FORMATS]
    rows[2] |= {"found_in_512_percent": 75.0, "found_in_1024_percent": 50.0}
    assert word_of("D5", rows) == NOT_HERE
    rows[2]["found_in_512_percent"] = 50.0
    found = judged(JUDGED["D5"], rows)
    assert found.word == HOLDS and "finding codes falls from 62 to 50 % of 800 (+-5)" in found.measured


def test_one_threshold_says_what_a_loss_of_quality_is():
    """No change of int4 is noticeable for D2 and none for D5: 5.7 % can't be both."""
    for change in (0.5, 0.9, 1.1, 5.7):
        rows = [row for row in KV_FORMATS if row["scheme"] != "fp8"]
        rows[-1] = {**rows[-1], "change_percent": change}
        noticeable = "int4: perplexity" not in judged(JUDGED["D5"], rows).measured
        assert noticeable == (judged(JUDGED["D2"], [*rows, KV_FORMATS[2]]).word == HOLDS)


def test_weights_are_judged_by_the_rules_of_keys_and_values():
    rows = [{"weights": row["scheme"], "bits_per_weight": 16 * row["share_of_16_bit"],
             **{k: v for k, v in row.items() if k not in ("scheme", "share_of_16_bit")}} for row in KV_FORMATS]
    assert [word_of(claim, rows) for claim in ("D2", "D4", "D5", "D6")] == [HOLDS] * 4
    without = [row for row in rows if row["weights"] != "fp8"]
    assert word_of("D2", without) == IN_DIRECTION and "fp8 is not there" in judged(JUDGED["D2"], without).measured


def test_a_format_that_changes_no_logit_is_told_and_weights_that_never_were_4_bit_are_not_called_so():
    rows = [{"weights": row["scheme"], "bits_per_weight": 8.0, "differing_logits": n, "logits": 1000, **row}
            for n, row in enumerate(KV_FORMATS)]
    rows = [{name: value for name, value in row.items() if name != "scheme"} for row in rows]
    own = {**rows[0], "weights": "int4, the checkpoint's own groups", "bits_per_weight": 5.736}
    said = judged(JUDGED["D2"], [*rows, own]).measured
    assert said.startswith("weights (once 4-bit, then dequantised): ")
    assert said.endswith("; int4, the checkpoint's own groups, at 5.74 bits a weight: 0 of 1,000 logits differ")
    assert "logits" not in judged(JUDGED["D2"], rows).measured
    fresh = [{**row, "baseline": "as loaded"} for row in rows]
    assert judged(JUDGED["D2"], fresh).measured.startswith("weights: ")


def test_a_default_is_slower_nowhere():
    """D6 on weight_speed."""
    assert word_of("D6", PACKED) == HOLDS
    for eight_rows, fastest, expected in ((19.7, 19.7, HOLDS), (20.5, 20.5, NOT_HERE), (20.5, 12.0, INCONCLUSIVE)):
        rows = deepcopy(PACKED)
        rows[3] |= {"step_ms": eight_rows, "min_ms": fastest}  # int8; fp32 takes 18 ms
        assert word_of("D6", rows) == expected, (eight_rows, fastest)


def test_formats_that_took_turns_are_compared_within_each_turn():
    """D3: the machine's speed moved by a factor of two from turn to turn, and int4 was 3.6 times as fast in each."""
    rows = [row | {"turns": 3, "step_ms_min": row["step_ms"] * 0.7, "step_ms_max": row["step_ms"] * 1.4,
                   "times_faster_min": 0.97 * row["times_faster"], "times_faster_max": 1.03 * row["times_faster"]}
            for row in PACKED]
    assert word_of("D3", rows) == HOLDS and "no runs in turns" not in judged(JUDGED["D3"], rows).measured
    rows[4] |= {"times_faster_min": 0.2 * rows[4]["times_faster"]}  # int4 at one row: in one turn it was slower
    assert word_of("D3", rows) == INCONCLUSIVE
    few = [row | {"turns": 2} for row in rows]
    assert "no runs in turns" in judged(JUDGED["D3"], few).measured


def test_a_symptom_is_cured_if_one_of_its_cures_works_and_the_others_are_told():
    rows = GIVEN["F6"].rows
    weak = {**rows[0], "cure": "4 drafts", "acceptance": 0.1, "after": 9.9}
    found = judged(JUDGED["F6"], [*rows, weak])
    assert found.word == IN_DIRECTION and "4 drafts, 1.01 (0.918 to 1.11) times better: no cure" in found.measured
    assert word_of("F6", [weak, rows[1]]) == INCONCLUSIVE
    assert word_of("F6", [{**weak, "after": 20.0}, rows[1]]) == NOT_HERE
    spread = {"turns": 3, "times_better": 1.12, "times_better_min": 1.05, "times_better_max": 1.2}
    assert word_of("F6", [{**weak, "after": 9.1, **spread}, rows[1]]) == HOLDS


def test_a_tail_that_hardly_rises_is_no_rise_however_sure():
    """G2: seeds of a simulation agree to a thousandth, and its cost model is off by more."""
    sure = {f"latency_p99_s_{end}": 4.1 * by for end, by in (("min", 1.001), ("max", 1.002))}
    rows = GIVEN["G2"].changed([(2, "latency_p99_s", 4.1 * 1.0015)])
    rows[2] |= sure
    rows[1] |= {"latency_p99_s_min": 4.1, "latency_p99_s_max": 4.1}
    found = judged(JUDGED["G2"], rows)
    assert found.word == NOT_HERE and "no rise to speak of" in found.measured
    rows[2] |= {"arithmetic_ms": 13.0}
    assert "the bend is the reading of keys and values" in judged(JUDGED["G2"], rows).measured


def test_a_gauge_of_the_time_in_use_would_be_told_apart():
    """H4: with 31 and 78 % of the time in use, the share of the bandwidth is not the only gauge that fits."""
    rows = GIVEN["H4"].changed([(0, "busy_share", 0.31), (1, "busy_share", 0.78)])
    assert word_of("H4", rows) == NOT_HERE
    assert "8 rows: bandwidth 39%, arithmetic 1.7%, time in use 100%" in judged(JUDGED["H4"], H).measured


def test_the_articles_sum_says_that_it_is_arithmetic():
    for claim in ("C1", "C5", "C7", "C10"):
        assert judged(JUDGED[claim], SUMS).measured.startswith("arithmetic")


def test_figures_that_nobody_counted_independently_are_not_measured():
    rows = [{"metric": name, "value": 1.0} for name in WATCHED]
    found = judged(JUDGED["F4"], rows)
    assert found.word == NOT_MEASURED and "`counted`" in found.measured


def test_two_runs_are_no_sweep():
    rows = GIVEN["F5"].rows
    assert word_of("F5", rows[:4]) == TOO_SMALL and word_of("F5", rows[:5]) == HOLDS
    assert agreement([1, 2, 3], [3, 2, 1]) == agreement([1, 2, 3], [4, 5, 6]) == 1
    assert agreement([1, 1, 1], [1, 2, 3]) == 0 and agreement([1, 3, 2], [1, 2, 3]) == pytest.approx(1 / 3)


def test_drafts_whose_acceptance_was_measured_count_as_a_cure():
    rows = GIVEN["F6"].changed([(0, "cure", "4 drafts"), (0, "acceptance", 0.3)])
    assert word_of("F6", rows) == HOLDS
    rows[0]["after"] = 12.0
    assert word_of("F6", rows) == NOT_HERE


# -- spreads --------------------------------------------------------------------------------------


def test_a_recorded_spread_decides_in_place_of_the_assumed_noise():
    a, b = {"x": 12.0, "x_min": 9.0, "x_max": 14.0}, {"x": 10.0, "x_min": 9.5, "x_max": 10.5}
    assert (ratio(a, b, "x").low, ratio(a, b, "x").high) == pytest.approx((9 / 10.5, 14 / 9.5))
    assert ratio(a, b, "x").recorded and not ratio({"x": 12.0}, b, "x").recorded
    bare = ratio({"x": 12.0}, {"x": 10.0}, "x")
    assert (bare.low, bare.high) == pytest.approx((1.2 / (1 + NOISE), 1.2 * (1 + NOISE)))
    few = reading({**a, "turns": 2}, "x")
    assert not few.recorded and reading({**a, "turns": 3}, "x").recorded
    old = reading({"tokens_per_s": 5.0, "min": 4.0, "max": 6.0}, "tokens_per_s")
    assert (old.low, old.high, old.recorded) == (4.0, 6.0, True)


def test_single_steps_are_no_runs_in_turns_but_widen_the_noise():
    quiet, noisy = ({"step_ms": 100.0, "min_ms": fastest, "max_ms": 900.0} for fastest in (99.0, 70.0))
    assert reading(noisy, "step_ms").low == pytest.approx(70) and not reading(noisy, "step_ms").recorded
    assert reading(quiet, "step_ms").low == pytest.approx(100 / (1 + NOISE) ** 0.5)


def test_a_wide_spread_never_makes_a_claim_of_no_difference_hold():
    wide = over(reading({"x": 1.0, "x_min": 0.5, "x_max": 2.0}, "x"), times(1.0, 0))
    assert not_more(wide) is not_less(wide) is Part.UNCLEAR
    assert not_more(times(1.0)) is not_less(times(1.0)) is Part.AS_CLAIMED
    assert not_more(times(1.3)) is not_less(times(0.7)) is Part.ANOTHER


def test_continuous_batching_is_judged_by_the_spread_of_its_turns():
    """B6: 1.5 times, and slots whose turns overlap those of static batches."""
    rows = [{**row, "min": row["tokens_per_s"] * 0.95, "max": row["tokens_per_s"] * 1.05} for row in POLICIES]
    rows[1] |= {"tokens_per_s": 150.0, "min": 145.0, "max": 155.0}
    found = judged(JUDGED["B6"], rows)
    assert found.word == IN_DIRECTION and "1.5 (1.38 to 1.63) times static" in found.measured
    assert "no runs in turns" not in found.measured
    rows[1]["min"] = 104.0
    assert word_of("B6", rows) == INCONCLUSIVE
    assert "no runs in turns are recorded: 10% are taken as noise" in judged(JUDGED["B6"], POLICIES).measured


@pytest.mark.parametrize("claim", ["A3", "B1", "B2", "B6", "B9", "C9", "D3", "F2", "F3", "F7", "G1", "G2"])
def test_a_spread_as_wide_as_the_difference_is_inconclusive(claim):
    """Every figure with a spread from a thousandth to a thousand times."""
    rows = [row | {f"{name}_{end}": value * by for name, value in row.items() if isinstance(value, float)
                   for end, by in (("min", 1e-3), ("max", 1e3))} for row in GIVEN[claim].rows]
    assert word_of(claim, rows) == INCONCLUSIVE


# -- exchanged labels -----------------------------------------------------------------------------


def exchanged(claim: str, rows: list[dict]) -> list[dict]:
    """The rows with the labels of the two compared set-ups exchanged, or the two compared columns."""
    judged_by = JUDGED[claim]
    if claim in COLUMNS:
        pairs = {name: other for pair in COLUMNS[claim] for name, other in (pair, pair[::-1])}
        return [{name: row.get(pairs.get(name, name)) for name in row} for row in rows]
    name = next(name for name in judged_by.labels if any(name in row for row in rows))
    values = [row[name] for row in rows if row.get(name) is not None]
    a, b = judged_by.pair if set(judged_by.pair) <= set(values) and judged_by.pair else (min(values), max(values))
    swap = {a: b, b: a}
    return [{**row, name: swap.get(row.get(name), row.get(name))} if name in row else row for row in rows]


def test_every_claim_compares_labels_or_columns_or_is_a_count():
    kinds = [{claim.id for claim in LEDGER if claim.labels}, set(COLUMNS), set(COUNTS)]
    assert set.union(*kinds) == set(JUDGED) and sum(map(len, kinds)) == len(JUDGED)


@pytest.mark.parametrize("claim", [claim for claim in GIVEN if claim not in COUNTS])
def test_exchanged_labels_cost_a_claim_its_word(claim):
    assert word_of(claim, exchanged(claim, GIVEN[claim].rows)) != HOLDS


@pytest.mark.parametrize("claim", [claim for claim in GIVEN if claim not in COUNTS])
def test_exchanged_labels_in_the_recorded_files_cost_a_claim_its_word(claim):
    for finding in find_all(MEASUREMENTS, (JUDGED[claim],)):
        if finding.verdict not in SPEAKING or (claim == "C10" and finding.experiment == "capacity_sum"):
            continue
        rows = json.loads((MEASUREMENTS / finding.file).read_text())["rows"]
        found = word_of(claim, exchanged(claim, rows))
        lost = (HOLDS,) if finding.verdict == HOLDS else SPEAKING
        assert found not in lost, f"{finding.experiment}: {finding.verdict}, and exchanged {found}"


# -- files ----------------------------------------------------------------------------------------


def test_every_judged_claim_has_rows_here():
    assert set(GIVEN) == set(JUDGED)


def test_every_claim_is_there_once_and_the_catalogue_names_its_experiments():
    ids = [claim.id for claim in LEDGER]
    numbers = {"A": 6, "B": 9, "C": 10, "D": 6, "E": 4, "F": 7, "G": 3, "H": 5}
    assert ids == [f"{part}{n}" for part, last in numbers.items() for n in range(1, last + 1)]
    named = {(claim, name) for name, experiment in EXPERIMENTS.items() for claim in experiment.claims}
    assert named == {(claim.id, name) for claim in LEDGER for name in claim.experiments}


@pytest.mark.parametrize("claim", GIVEN)
def test_the_verdict_names_what_was_measured_or_what_is_missing(tmp_path, claim):
    record(tmp_path, claim, GIVEN[claim].rows)
    (finding,) = find_all(tmp_path, (JUDGED[claim],))
    assert any(character.isdigit() for character in finding.measured)
    record(tmp_path, claim, [])
    (finding,) = find_all(tmp_path, (JUDGED[claim],))
    assert finding.verdict == NOT_MEASURED and finding.experiment in finding.measured


@pytest.mark.parametrize("claim", GIVEN)
def test_rows_that_were_edited_cost_a_claim_its_verdict_and_nobody_theirs(tmp_path, claim):
    rows = GIVEN[claim].rows
    column = next(changes[0][1] for changes, expected in GIVEN[claim].cases if expected == NOT_HERE)
    record(tmp_path, claim, rows)
    (path,) = tmp_path.glob("*/*.json")
    stored = json.loads(path.read_text())
    for damage in ({}, [], "x", None):
        path.write_text(json.dumps({**stored, "rows": [{**row, column: damage} for row in rows]}))
        (finding,) = find_all(tmp_path, (JUDGED[claim],))
        assert finding.measured
    path.write_text(json.dumps({**stored, "rows": [{k: v for k, v in row.items() if k != column} for row in rows]}))
    (finding,) = find_all(tmp_path, (JUDGED[claim],))
    assert finding.verdict not in SPEAKING


def test_a_verdict_on_rows_that_a_budget_cut_says_so(tmp_path):
    for rows in (CURVE, []):
        Measurement("batch_curve", source(), rows, cut_at_s=60.0).save(tmp_path)
        (finding,) = find_all(tmp_path, (JUDGED["B1"],))
        assert finding.measured.endswith("cut at its budget of 60 s: rows are missing")


@dataclass(frozen=True)
class BusyProvenance(Provenance):
    busy: object = "another process used 90 % of the processor"


def test_a_busy_machine_measured_nothing_and_a_record_without_the_field_counts(tmp_path, monkeypatch):
    record(tmp_path, "B1", CURVE)
    assert verdicts(tmp_path, "B1") == [HOLDS]
    for where, kind in (({"device": "A CPU", "driver": "Linux"}, "CPU"), ({}, "GPU")):
        fields = source(**where).__dict__
        for busy, expected in (("yes", NOT_MEASURED), (True, NOT_MEASURED), (False, HOLDS), (None, HOLDS)):
            run = Measurement("batch_curve", BusyProvenance(**{**fields, "busy": busy}), CURVE)
            monkeypatch.setattr(Measurement, "load", lambda *_, run=run: run)
            (finding,) = find_all(tmp_path, (JUDGED["B1"],))
            assert (finding.verdict, finding.kind) == (expected, kind)
            assert (finding.measured == "this machine was busy") == (expected == NOT_MEASURED)
    simulated = Measurement("batch_curve", BusyProvenance(**source(VIRTUAL, "none").__dict__), CURVE)
    monkeypatch.setattr(Measurement, "load", lambda *_: simulated)
    assert verdicts(tmp_path, "B1") == [HOLDS]  # no clock of this machine is in virtual time


def test_each_device_has_its_own_verdict(tmp_path):
    record(tmp_path, "B1", CURVE)
    contrary = GIVEN["B1"].changed([(1, "tokens_per_s", 80.0)])
    record(tmp_path, "B1", contrary, device="A CPU", driver="Linux, AVX2")
    record(tmp_path, "B1", CURVE, device=VIRTUAL, driver="none")
    record(tmp_path, "B1", CURVE, device=EXACT, driver="none")
    found = {finding.kind: finding.verdict for finding in find_all(tmp_path, (JUDGED["B1"],))}
    assert found == {"GPU": HOLDS, "CPU": NOT_HERE, VIRTUAL: HOLDS, EXACT: HOLDS}


def test_each_experiment_of_a_claim_has_its_own_verdict(tmp_path):
    record(tmp_path, "D6", KV_FORMATS)
    record(tmp_path, "D6", GIVEN["D3"].changed([(3, "step_ms", 25.0)]), experiment="weight_speed")
    found = {finding.experiment: finding.verdict for finding in find_all(tmp_path, (JUDGED["D6"],))}
    assert found == {"kv_quality": HOLDS, "weight_speed": NOT_HERE}


def test_a_file_that_is_refused_settles_nothing(tmp_path):
    record(tmp_path, "B1", CURVE)
    (path,) = tmp_path.glob("*/*.json")
    path.write_text(path.read_text().replace('"commit": "abc"', '"commit": ""'))
    (finding,) = find_all(tmp_path, (JUDGED["B1"],))
    assert finding.verdict == NOT_MEASURED and "no commit is named" in finding.measured


def test_without_files_every_claim_says_what_to_run(tmp_path, capsys):
    assert main(["claims", "--root", str(tmp_path), "--json", "-"]) == 0
    claims = json.loads(capsys.readouterr().out.splitlines()[-1])["claims"]
    assert len(claims) == len(LEDGER) and {claim["verdict"] for claim in claims} == {NOT_MEASURED}
    assert all("run `minillm measure " in claim["measured"] for claim in claims)


def test_the_table_has_a_line_for_each_finding(tmp_path, capsys):
    record(tmp_path, "C3", GIVEN["C3"].rows)
    assert main(["claims", "C3", "B1", "--root", str(tmp_path), "--markdown"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and lines[2].startswith("| C3 |")
    assert "| memory_by_policy | holds | as claimed, as claimed, none claimed | GPU: A GPU |" in lines[2]
    assert as_markdown(find_all(tmp_path)).count("\n") == 1 + len(as_rows(find_all(tmp_path)))


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_the_audit_names_all_that_a_verdict_rests_on_and_fits_the_terminal(tmp_path, capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    record(tmp_path, "B1", GIVEN["B1"].changed([(1, "tokens_per_s", 520.0)]))
    assert main(["claims", "B1", "B3", "--root", str(tmp_path), "--audit"]) == 0
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= columns
    flat = " ".join(said.split())
    for part in ("verdict HOLDS IN DIRECTION", "claimed 8x for 1.2x", "measured 8 rows give 5.25 (4.77 to 5.78) times",
                 "direction as claimed size another cause none claimed", "device GPU: A GPU",
                 "file a-gpu/batch_curve.json, commit abc", "B3", "verdict NOT MEASURED"):
        assert part in flat


def test_the_audit_of_the_recorded_files_fits_80_columns():
    found = find_all()
    text = as_audit(found, 80)
    assert max(map(len, text.splitlines())) <= 80 and text.count("verdict    ") == len(found)


def test_an_unknown_claim_is_refused(capsys):
    assert main(["claims", "Z9"]) == 2
    assert "unknown claim 'Z9'; known: A1, A2" in capsys.readouterr().err


# -- part H ---------------------------------------------------------------------------------------


def test_littles_law_turns_tokens_into_a_mean_stay():
    assert example.little(111, 2850) == {"requests_per_s": 9.5, "mean_stay_s": pytest.approx(11.68, abs=0.01)}
    assert example.little(222, 3900)["mean_stay_s"] == pytest.approx(17.08, abs=0.01)
    assert example.little(10, 100, answer=50) == {"requests_per_s": 2.0, "mean_stay_s": 5.0}
    assert example.slowest_mean(2.0, 1.0) == pytest.approx(101)  # 99 of 1 s and one of 101: 200 s in all


def test_the_floor_of_a_step_is_weights_and_contexts_over_the_bandwidth():
    floor = example.bandwidth_floor(111)
    assert floor["read_gb"] == pytest.approx(16 + 111 * 4096 * 131_072 / 1e9)
    assert floor["reading_ms"] == pytest.approx(floor["read_gb"] / 2039 * 1e3)
    assert floor["most_tokens_per_s"] == pytest.approx(111 / floor["reading_ms"] * 1e3)
    assert floor["arithmetic_ms"] == pytest.approx(floor["tflop"] / 312 * 1e3) and floor["bound_by"] == "reading"
    assert example.bandwidth_floor(1000, context=1)["bound_by"] == "multiplying"


def test_the_articles_table_has_no_figure_that_is_not_theirs_or_computed():
    table = example.articles_table()
    assert [row["setup"] for row in table] == [setup for setup, *_ in example.SETUPS]
    for row, theirs in zip(table, example.ARTICLES, strict=True):
        assert (row["rows"], row["tokens_per_s"]) == (theirs["peak_rows"], theirs["tokens_per_s"])
        assert row["bandwidth_share"] == pytest.approx(row["reading_ms"] / row["step_ms"])
        assert row["arithmetic_share"] == pytest.approx(row["arithmetic_ms"] / row["step_ms"])
        assert row["fit"] == pytest.approx(row["cache_gb"] * 1e9 / (row["bytes_a_token"] * row["context_tokens"]))
