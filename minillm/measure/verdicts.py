"""Verdicts on claims: each a function from the rows of an experiment to what they say.

The rule is stated in the function's first line, with its thresholds as numbers in the code.
Nothing but rows goes in, so that a contrary measurement gives a contrary verdict. A function
that finds too few rows raises `Missing`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

HOLDS, CONDITION, NOT_HERE, NOT_MEASURED = "holds", "holds with a condition", "does not hold here", "not measured"
Rows = Sequence[dict]


class Missing(ValueError):
    """The rows do not tell; the message says what is missing."""


@dataclass(frozen=True)
class Verdict:
    """`measured` gives the figures that decided."""

    word: str
    measured: str


def judged(holds: bool, measured: str, condition: str = "") -> Verdict:
    """The verdict's word: a condition only matters if the claim holds at all."""
    if not holds:
        return Verdict(NOT_HERE, measured)
    return Verdict(CONDITION, f"{measured}; condition: {condition}") if condition else Verdict(HOLDS, measured)


def find(rows: Rows, /, **wanted) -> dict:
    """The one row with these values; Missing if there is none."""
    for row in rows:
        if all(row.get(column) == value for column, value in wanted.items()):
            return row
    raise Missing("no row with " + ", ".join(f"{column} {value}" for column, value in wanted.items()))


def column(rows: Rows, name: str) -> list:
    """A column's values where there is one; Missing if there are fewer than two."""
    values = [row[name] for row in rows if row.get(name) is not None]
    if len(values) < 2:
        raise Missing(f"fewer than two rows with {name}")
    return values


# -- A: why decode is slow ------------------------------------------------------------------------


def a1(rows: Rows) -> Verdict:
    """One row's step reads at half of the bandwidth or more, uses at most a third as much of the arithmetic, and an
    eighth of the layers takes less time than all in at least half the proportion of their bytes. Below 80 % of the
    bandwidth the rest is named as the condition."""
    column(rows, "step_ms")
    whole, part = rows[0], rows[-1]
    bytes_ratio, time_ratio = whole["weight_mb"] / part["weight_mb"], whole["step_ms"] / part["step_ms"]
    measured = (
        f"{whole['weight_mb']:,.0f} MB in {whole['step_ms']:.3g} ms: {whole['mbu']:.0%} of the bandwidth, "
        f"{whole['mfu']:.0%} of the arithmetic; {bytes_ratio:.1f} times the bytes take {time_ratio:.1f} times the time"
    )
    bound = whole["mbu"] >= 0.5 and whole["mfu"] <= whole["mbu"] / 3 and time_ratio >= bytes_ratio / 2
    return judged(bound, measured, f"{1 / whole['mbu']:.2f} times the bare read" if whole["mbu"] < 0.8 else "")


def a2(rows: Rows) -> Verdict:
    """The longest prompt alone needs more of the arithmetic than of the bandwidth, half of it or more (the condition:
    less), and no lot of prompts is computed at more than 1.25 times its rate."""
    alone = [row for row in rows if row["phase"] == "prefill" and row["rows"] == 1]
    column(alone, "tokens_per_s")
    long, best = max(alone, key=lambda row: row["tokens_each"]), max(row["tokens_per_s"] for row in rows)
    measured = (
        f"one prompt of {long['tokens_each']:,} tokens: {long['mfu']:.0%} of the arithmetic, {long['mbu']:.0%} of the "
        f"bandwidth, {long['tokens_per_s']:,.0f} tokens/s; the best of all lots {best:,.0f}"
    )
    saturated = long["mfu"] > long["mbu"] and best <= 1.25 * long["tokens_per_s"]
    return judged(saturated, measured, "the kernels reach less than half of a large product's rate"
                  if long["mfu"] < 0.5 else "")


def a3(rows: Rows) -> Verdict:
    """Eight in place of one speed up decoding at least twice as much as they speed up prefill."""
    gains = {}
    for phase, tokens in (("prefill", find(rows, phase="prefill", rows=8)["tokens_each"]), ("decode", 1)):
        one, eight = (find(rows, phase=phase, rows=number, tokens_each=tokens) for number in (1, 8))
        gains[phase] = eight["tokens_per_s"] / one["tokens_per_s"]
    measured = f"8 rows give {gains['decode']:.1f} times the tokens/s in decoding, {gains['prefill']:.2f} in prefill"
    return judged(gains["decode"] >= 2 * gains["prefill"], measured)


def a4(rows: Rows) -> Verdict:
    """A prompt's time grows at most as length to the 1.3 and at least as 0.7; a token costs at most 1.5 times the
    cheapest behind any length. Where the second ends is the condition."""
    prompts = [(row["context_tokens"], row["recompute_ms"]) for row in rows if row["recompute_ms"] is not None]
    column(rows, "cached_ms")
    (first, first_ms), (last, last_ms) = prompts[len(prompts) // 2 - 1], prompts[-1]
    power = _power(first, last, first_ms, last_ms)
    base = rows[0]["cached_ms"]
    dear = next((row for row in rows if row["cached_ms"] > 1.5 * base), None)
    measured = (
        f"prompts of {first:,} to {last:,} tokens take {first_ms:.3g} to {last_ms:.3g} ms, as length to the "
        f"{power:.2f}; a token behind {rows[-1]['context_tokens']:,} costs {rows[-1]['cached_ms'] / base:.2f} "
        f"times one behind {rows[0]['context_tokens']:,}"
    )
    cheap = dear is None or dear["context_tokens"] >= 512
    return judged(0.7 <= power <= 1.3 and cheap, measured, f"up to about {dear['context_tokens']:,}" if dear else "")


def a5(rows: Rows) -> Verdict:
    """At 64 rows the gauge reads within 15 points of what it reads at one, while tokens/s are at least 4 times as many
    and at one row less than a third of the arithmetic is used. Any gauge but NVML's is the condition."""
    one, many = find(rows, rows=1), find(rows, rows=64)
    column(rows, "busy_percent")
    gain = many["tokens_per_s"] / one["tokens_per_s"]
    measured = (
        f"{one['gauge']} {one['busy_percent']:.0f} % at one row and {many['busy_percent']:.0f} % at 64, which give "
        f"{gain:.1f} times the tokens/s; {one['mfu']:.1%} and {many['mfu']:.1%} of the arithmetic"
    )
    blind = abs(one["busy_percent"] - many["busy_percent"]) <= 15 and gain >= 4 and one["mfu"] < 1 / 3
    return judged(blind, measured, "" if "NVML" in one["gauge"] else f"the gauge is {one['gauge']}, not NVML's")


def _power(x0: float, x1: float, y0: float, y1: float) -> float:
    """p where y grows as x to the p between two points."""
    return math.log(y1 / y0) / math.log(x1 / x0)


# -- B: batching ----------------------------------------------------------------------------------


def b1(rows: Rows) -> Verdict:
    """Eight rows take at most 1.5 times one row's step; up to 4 times, that is the condition."""
    one, eight = find(rows, rows=1), find(rows, rows=8)
    step = eight["step_ms"] / one["step_ms"]
    condition = f"a step of eight takes {step:.2f} times as long" if step > 1.5 else ""
    return judged(step <= 4, f"8 rows give {8 / step:.1f} times the output in {step:.2f} times the step", condition)


def b2(rows: Rows) -> Verdict:
    """32 rows give at least 16 times the total or more; from 8 times on with a condition."""
    one, many = find(rows, rows=1), find(rows, rows=32)
    gain = many["tokens_per_s"] / one["tokens_per_s"]
    curve = ", ".join(f"{row['rows']}: {row['tokens_per_s']:.3g} ({row['tokens_per_s'] / row['rows']:.3g})"
                      for row in rows if row["rows"] in (1, 8, 32, 64))
    condition = f"{gain:.1f} times in place of 24" if gain < 16 else ""
    return judged(gain >= 8, f"tokens/s by rows (each request's): {curve}", condition)


def b8(rows: Rows) -> Verdict:
    """At no number of rows does one request run more than 5 % faster than alone."""
    alone = find(rows, rows=1)["tokens_per_s"]
    best, number = max((row["tokens_per_s"] / row["rows"], row["rows"]) for row in rows if row["rows"] > 1)
    measured = f"alone {alone:.3g} tokens/s; at best {best:.3g} in company, among {number}"
    return judged(best <= 1.05 * alone, measured)


def b4(rows: Rows) -> Verdict:
    """An 80-token answer beside one of 800 leaves exactly 720 idle slot-steps; seven of 40 beside one, most."""
    pair = find(rows, case="80 beside 800 tokens", batching="static")
    eight = find(rows, case="one of 800, seven of 40", batching="static")
    measured = (
        f"{pair['idle_slot_steps']} idle slot-steps; with seven of 40 beside one of 800, {eight['idle_slot_steps']:,}, "
        f"{eight['idle_share']:.0%} of all"
    )
    return judged(pair["idle_slot_steps"] == 720 and eight["idle_share"] > 0.5, measured)


def b5(rows: Rows) -> Verdict:
    """In no continuous run is a slot held by a finished request, or empty while a request waits."""
    continuous = [row for row in rows if row["batching"] == "continuous"]
    column(continuous, "steps")
    idle, empty = (sum(row[name] for row in continuous) for name in ("idle_slot_steps", "empty_while_waiting"))
    static = sum(row["idle_slot_steps"] for row in rows if row["batching"] == "static")
    return judged(idle == empty == 0, f"{idle} idle slot-steps and {empty} empty ones while somebody waited; "
                                      f"static batches: {static:,} idle")


def b6(rows: Rows) -> Verdict:
    """In the same bytes, with paging, at least 2 times static's tokens/s; from 1.2 times on with a condition."""
    whole, answers = (find(rows, part=part, setup="continuous, paged") for part in ("whole run", "answers only"))
    slots = find(rows, part="whole run", setup="continuous, slots")["times_static"]
    measured = (
        f"{whole['times_static']:.2f} times static in the whole run ({slots:.2f} with slots), "
        f"{answers['times_static']:.2f} for answers alone"
    )
    condition = "" if whole["times_static"] >= 2 else "prompts, which no policy speeds up, dilute it"
    return judged(whole["times_static"] >= 1.2, measured, condition)


def b7(rows: Rows) -> Verdict:
    """The ratio is 1.00 within 5 % where lengths do not vary, and never falls by more than 5 % as they vary more."""
    column(rows, "times_tokens_per_s")
    ratios = [row["times_tokens_per_s"] for row in sorted(rows, key=lambda row: row["cv"])]
    equal = find(rows, cv=0.0)["times_tokens_per_s"]
    widens = all(later > 0.95 * earlier for earlier, later in pairwise(ratios)) and ratios[-1] > 1.1 * ratios[0]
    listed = ", ".join(f"{row['cv']:g}: {row['times_tokens_per_s']:.2f}" for row in rows)
    return judged(abs(equal - 1) <= 0.05 and widens, f"continuous over static, by CV: {listed}")


# -- C: the cache is the capacity -----------------------------------------------------------------


def c3(rows: Rows) -> Verdict:
    """Slots waste more than half of their reserve; pages less than a quarter, and less than a third of that."""
    slots, paged = find(rows, kv="slots"), find(rows, kv="paged")
    measured = (
        f"slots reserve {slots['reserved_mb']:.3g} MB and waste {slots['wasted_share']:.0%}, pages "
        f"{paged['reserved_mb']:.3g} MB and {paged['wasted_share']:.0%}; {slots['mean_requests']:.1f} and "
        f"{paged['mean_requests']:.1f} requests at once"
    )
    less = paged["wasted_share"] < min(0.25, slots["wasted_share"] / 3)
    return judged(slots["wasted_share"] > 0.5 and less, measured)


def c8(rows: Rows) -> Verdict:
    """Sharing skips half of the prompts' tokens or more and lowers TTFT; one changed first token loses it all."""
    alone, shared = find(rows, case="no sharing"), find(rows, case="shared prefix")
    changed = find(rows, case="first token changed")
    measured = (
        f"{shared['found']:,} of {shared['prompt_tokens']:,} prompt tokens found, TTFT {alone['ttft_p50_ms']:.3g} to "
        f"{shared['ttft_p50_ms']:.3g} ms; first token changed: {changed['found']} found, "
        f"{changed['ttft_p50_ms']:.3g} ms"
    )
    skipped = shared["found"] >= 0.5 * shared["prompt_tokens"] and shared["ttft_p50_ms"] < alone["ttft_p50_ms"]
    return judged(skipped and changed["found"] == 0, measured)
