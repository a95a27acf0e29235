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
from statistics import mean

from minillm.course.experiments.batching import knee_of

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


def digits(value: float) -> str:
    """Three significant digits; of a larger number all those before the point: 1,750 and not 1.75e+03."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def column(rows: Rows, name: str) -> list:
    """A column's values where there is one; Missing if there are fewer than two."""
    values = [row[name] for row in rows if row.get(name) is not None]
    if len(values) < 2:
        raise Missing(f"fewer than two rows with {name}")
    return values


# -- A: why decode is slow ------------------------------------------------------------------------


def a1(rows: Rows) -> Verdict:
    """One row's step reads at 30 % of the bandwidth or more and uses at most a third as much of the arithmetic, and
    fewer layers take less time, in at least half the proportion of their bytes. Below 80 % of the bandwidth the rest is
    named as the condition."""
    column(rows, "step_ms")
    whole, part = rows[0], rows[-1]
    bytes_ratio, time_ratio = whole["weight_mb"] / part["weight_mb"], whole["step_ms"] / part["step_ms"]
    measured = (
        f"{whole['weight_mb']:,.0f} MB in {digits(whole['step_ms'])} ms: {whole['mbu']:.0%} of the bandwidth, "
        f"{whole['mfu']:.0%} of the arithmetic; {bytes_ratio:.1f} times the bytes take {time_ratio:.1f} times the time"
    )
    bound = whole["mbu"] >= 0.3 and whole["mfu"] <= whole["mbu"] / 3 and time_ratio >= bytes_ratio / 2
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
        f"prompts of {first:,} to {last:,} tokens take {digits(first_ms)} to {digits(last_ms)} ms, as length to the "
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


def b3(rows: Rows) -> Verdict:
    """The knee (`knee_of`) is not the last row; past it latency grows by more than half as much as the clients, in
    per cent, and throughput by less. A knee outside the tens is the condition."""
    column(rows, "tokens_per_s")
    at, last = knee_of(rows), max(rows, key=lambda row: row["clients"])
    if at is last:
        raise Missing(f"throughput still outgrows latency at {last['clients']} clients: go further")
    slower, faster = (_power(at["clients"], last["clients"], at[name], last[name])
                      for name in ("itl_p50_ms", "tokens_per_s"))
    measured = (
        f"knee at {at['clients']} clients, {at['tokens_per_s']:,.0f} tokens/s; from there to {last['clients']} latency "
        f"grows as clients to the {slower:.2f}, throughput to the {faster:.2f}"
    )
    condition = "" if 10 <= at["clients"] < 100 else f"on this device at {at['clients']}"
    return judged(slower > 0.5 > faster, measured, condition)


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


def b9(rows: Rows) -> Verdict:
    """Eight replicas make less than 6.4 times one's tokens/s, and each runs at most half of its mean batch."""
    one, eight = find(rows, replicas=1), find(rows, replicas=8)
    measured = (
        f"8 replicas make {eight['times_one']:.2f} times the tokens/s of one, with {eight['mean_rows']:.1f} rows each "
        f"in place of {one['mean_rows']:.1f}"
    )
    return judged(eight["times_one"] < 6.4 and eight["mean_rows"] <= one["mean_rows"] / 2, measured)


# -- C: the cache is the capacity -----------------------------------------------------------------

EXAMPLE = {"model": "llama-3-8b", "kv_format": "bf16", "context_tokens": 4096}


def c1(rows: Rows) -> Verdict:
    """80 GB less 16 and 4, over one request at 4,096 tokens, is 111, rounded down."""
    row = find(rows, **EXAMPLE)
    measured = f"{row['cache_gb']:.4g} GB / {row['request_gb']:.3f} GB = {row['max_concurrent']} requests"
    return judged(row["max_concurrent"] == 111 == row["cache_gb"] // row["request_gb"], measured)


def c2(rows: Rows) -> Verdict:
    """For every preset a store takes exactly the formula's bytes per token."""
    presets = [row for row in rows if row.get("formula_bytes")]
    column(presets, "stored_bytes")
    wrong = [row["model"] for row in presets if row["stored_bytes"] != row["formula_bytes"]]
    sizes = [row["formula_bytes"] for row in presets]
    return judged(not wrong, f"{len(presets) - len(wrong)} of {len(presets)} models take it exactly: {min(sizes):,} to "
                             f"{max(sizes):,} bytes at 16 bits")


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


def c4(rows: Rows) -> Verdict:
    """Requests are refused with the cache at least 95 % full and the arithmetic at most 45 % used; with more memory the
    same load is refused less than half as often. What is read as utilisation is the condition."""
    column(rows, "refused")
    little, much = (pick(rows, key=lambda row: row["cache_gb"]) for pick in (min, max))
    measured = (
        f"{little['refused_share']:.0%} refused with {little['cache_peak_share']:.0%} of the cache in use and "
        f"{little['mfu']:.0%} of the arithmetic; with {much['cache_gb']} GB of cache {much['refused_share']:.0%}"
    )
    full = little["refused"] > 0 and little["cache_peak_share"] >= 0.95 and little["mfu"] <= 0.45
    condition = f"the gauge for time in use reads {little['busy_share']:.0%}"
    return judged(full and much["refused_share"] < little["refused_share"] / 2, measured, condition)


def c5(rows: Rows) -> Verdict:
    """At half of the context twice as many fit, give or take the rounding of one."""
    whole, half = find(rows, **EXAMPLE), find(rows, **EXAMPLE | {"context_tokens": 2048})
    measured = f"{whole['max_concurrent']} at 4,096 tokens, {half['max_concurrent']} at 2,048"
    return judged(abs(half["max_concurrent"] - 2 * whole["max_concurrent"]) <= 1, measured)


def c7(rows: Rows) -> Verdict:
    """Without grouping every cache would be larger by exactly heads over KV heads."""
    presets = [row for row in rows if row.get("kv_heads")]
    column(presets, "times_without_gqa")
    right = [row for row in presets if row["times_without_gqa"] == row["heads"] / row["kv_heads"]]
    example = find(presets, model="llama-3-8b")
    measured = f"{len(right)} of {len(presets)} models; llama-3-8b: {example['times_without_gqa']:g} times"
    return judged(len(right) == len(presets), measured)


def c9(rows: Rows) -> Verdict:
    """As slots, a batch under the tight cap has at least 1.25 times the rows that it has under the loose one, and the
    p99 latency is lower. With blocks no memory is reserved: the condition."""
    column(rows, "mean_rows")
    caps = [row["cap_tokens"] for row in rows]
    loose, tight = (find(rows, kv="slots", cap_tokens=cap) for cap in (max(caps), min(caps)))
    blocks = find(rows, kv="paged", cap_tokens=max(caps))
    measured = (
        f"slots under caps of {max(caps):,} and {min(caps):,} tokens: {loose['mean_rows']:.1f} and "
        f"{tight['mean_rows']:.1f} rows, p99 latency {loose['latency_p99_s']:.3g} and {tight['latency_p99_s']:.3g} s"
    )
    gained = tight["mean_rows"] >= 1.25 * loose["mean_rows"] and tight["latency_p99_s"] < loose["latency_p99_s"]
    condition = f"for memory, only without paging: blocks keep {blocks['mean_rows']:.1f} rows under the loose cap"
    return judged(gained, measured, condition)


def c10(rows: Rows) -> Verdict:
    """In the articles' sum the parts make up the memory and the cache is the largest."""
    row = find(rows, **EXAMPLE)
    parts = {name: row[f"{name}_gb"] for name in ("weights", "cache", "overhead")}
    measured = ", ".join(f"{name} {gb:.3g} GB" for name, gb in parts.items()) + f" of {row['memory_gb']:.3g}"
    adds_up = abs(sum(parts.values()) - row["memory_gb"]) < 1e-6
    return judged(adds_up and parts["cache"] == max(parts.values()), measured)


def c8(rows: Rows) -> Verdict:
    """Sharing skips half of the prompts' tokens or more and lowers TTFT; one changed first token loses it all."""
    alone, shared = find(rows, case="no sharing"), find(rows, case="shared prefix")
    changed = find(rows, case="first token changed")
    measured = (
        f"{shared['found']:,} of {shared['prompt_tokens']:,} prompt tokens found, "
        f"TTFT {digits(alone['ttft_p50_ms'])} to {digits(shared['ttft_p50_ms'])} ms; "
        f"first token changed: {changed['found']} found, {digits(changed['ttft_p50_ms'])} ms"
    )
    skipped = shared["found"] >= 0.5 * shared["prompt_tokens"] and shared["ttft_p50_ms"] < alone["ttft_p50_ms"]
    return judged(skipped and changed["found"] == 0, measured)


# -- D: fewer bits --------------------------------------------------------------------------------


def c6(rows: Rows) -> Verdict:
    """int8 takes at most 52 % of 16 bits, scales counted, and its perplexity grows by at most 1 %."""
    row = find(rows, scheme="int8")
    measured = (
        f"int8 takes {row['share_of_16_bit']:.1%} of 16 bits, so {1 / row['share_of_16_bit']:.2f} times the tokens "
        f"fit; perplexity {_change(row)} over {row['tokens']:,} tokens"
    )
    return judged(row["share_of_16_bit"] <= 0.52 and row["change_percent"] <= 1, measured)


def d1(rows: Rows) -> Verdict:
    """fp8 and int8 take at most 52 % of 16 bits and int4 at most 32 %. More than 26 % for int4 is the condition."""
    shares = {name: find(rows, scheme=name)["share_of_16_bit"] for name in ("fp8", "int8", "int4")}
    measured = ", ".join(f"{name} {share:.1%}" for name, share in shares.items()) + " of 16 bits with their scales"
    holds = max(shares["fp8"], shares["int8"]) <= 0.52 and shares["int4"] <= 0.32
    return judged(holds, measured, "scales take int4 above a quarter" if shares["int4"] > 0.26 else "")


def d2(rows: Rows) -> Verdict:
    """By perplexity fp8 and int8 cost at most 1 %, and the engine's int4 more than either. int8 better than fp8 is
    the condition, since the claim has it the other way round."""
    of = {name: find(rows, scheme=name) for name in ("fp8", "int8", "int4")}
    measured = "; ".join(f"{name} {_change(row)}" for name, row in of.items())
    fp8, int8, int4 = (of[name]["change_percent"] for name in ("fp8", "int8", "int4"))
    return judged(max(fp8, int8) <= 1 and int4 > max(fp8, int8, 1), measured,
                  "keys and values alone; int8 costs less than fp8" if int8 < fp8 else "keys and values alone")


def d3(rows: Rows) -> Verdict:
    """With one row each weight format is at least 1.1 times as fast as 16 or 32 bits, and leaves room for more cache.
    Where the most rows measured are no faster, that is the condition."""
    column(rows, "times_faster")
    plain, few = rows[0], [row for row in rows if row["rows"] == 1 and row["weights"] != rows[0]["weights"]]
    many = [row for row in rows if row["rows"] == max(row["rows"] for row in rows) and row["times_faster"] != 1]
    measured = "; ".join(
        f"{row['weights']} reads {row['read_mb']:,.0f} MB in place of {plain['read_mb']:,.0f}, a step of one row is "
        f"{row['times_faster']:.2f} times as fast, and {row['cache_tokens_in_1_gib']:,} tokens of cache fit beside it "
        f"in 1 GiB ({plain['cache_tokens_in_1_gib']:,} before)"
        for row in few
    )
    holds = all(row["times_faster"] >= 1.1 and row["cache_tokens_in_1_gib"] > plain["cache_tokens_in_1_gib"]
                for row in few)
    slow = [f"{row['weights']} {row['times_faster']:.2f}" for row in many if row["times_faster"] < 1.1]
    return judged(holds, measured, f"few rows: at {many[0]['rows']} it is {', '.join(slow)} times" if slow else "")


def d4(rows: Rows) -> Verdict:
    """In the engine's int4 the loss of rare tokens grows by more than that of common ones, and that at 2,000 to 4,000
    tokens by more than under 256, both beyond their errors. One of the two alone is the condition."""
    row, found = find(rows, scheme="int4"), {}
    for name, more, less in (("rare tokens", "rare_tokens", "common_tokens"),
                             ("long contexts", "at_2k_to_4k", "at_under_256")):
        column([row, row], f"{more}_change_nats")
        error = math.hypot(row[f"{more}_change_error_nats"], row[f"{less}_change_error_nats"])
        found[name] = row[f"{more}_change_nats"] - row[f"{less}_change_nats"], error
    measured = "int4: " + "; ".join(f"{name} lose {gap:+.3f} nats more (+-{error:.3f})"
                                    for name, (gap, error) in found.items())
    true = [name for name, (gap, error) in found.items() if gap > error]
    return judged(bool(true), measured, f"only for {true[0]}" if len(true) == 1 else "")


def d5(rows: Rows) -> Verdict:
    """In one format perplexity grows by less than 6 %, while copying a random text, or finding codes in texts of all
    lengths together, loses at least a tenth of its score. Shown is the format with the worst fall."""
    cases = []
    for row in rows[1:]:
        falls = {"copying": (rows[0]["copied_percent"], row["copied_percent"])}
        if lengths := [name for name in row if name.startswith("found_in_")]:  # of one length there are few codes
            falls["finding codes"] = tuple(mean(each[name] for name in lengths) for each in (rows[0], row))
        worst = max(falls, key=lambda name: 1 - falls[name][1] / max(falls[name][0], 1e-9))
        before, after = falls[worst]
        cases.append((1 - after / max(before, 1e-9), row, f"{worst} falls from {before:.0f} to {after:.0f} %"))
    kept = [case for case in cases if case[1]["change_percent"] < 6]
    if not kept:
        raise Missing("no format whose perplexity grows by less than 6 %")
    fall, row, what = max(kept, key=lambda case: case[0])
    return judged(fall >= 0.1, f"{row['scheme']}: perplexity {_change(row)}, while {what}")


def _change(row: dict) -> str:
    return f"{row['change_percent']:+.2f} % (+-{row['change_error_percent']:.2f})"


# -- E: speculative decoding ----------------------------------------------------------------------


def e1(rows: Rows) -> Verdict:
    """Every greedy run with drafts gives plain decoding's tokens, ties aside, and sampling passes its chi-square."""
    greedy = [row for row in rows if row["part"] in ("real", "replay")]
    column(greedy, "same_tokens")
    sampled = find(rows, part="sampling")
    measured = (
        f"{sum(row['same_tokens'] for row in greedy)} of {len(greedy)} greedy runs give the same tokens; "
        f"{sampled['draws']:,} draws: chi-square {sampled['chi_square']:.3g}, limit {sampled['limit']}"
    )
    return judged(all(row["same_tokens"] for row in greedy) and sampled["chi_square"] < sampled["limit"], measured)


def e2(rows: Rows) -> Verdict:
    """At one row, verifying four drafts and the newest token takes at most 1.6 plain steps; if at the largest batch
    it takes more than that, the batch is the condition."""
    costs = [row for row in rows if row["part"] == "step cost" and row["k"] == 4]
    column(costs, "times_plain")
    one, many = costs[0], costs[-1]
    measured = (
        f"a step of 5 tokens a row in place of 1: {one['times_plain']:.2f} times as long at batch {one['batch']}, "
        f"{many['times_plain']:.2f} at batch {many['batch']}"
    )
    return judged(one["times_plain"] <= 1.6, measured, "small batches" if many["times_plain"] > 1.6 else "")


def e3(rows: Rows) -> Verdict:
    """One request is served at least 1.5 times as fast at best; if the worst case is below 1.1, acceptance is the
    condition."""
    alone = [row for row in rows if row["part"] == "real" and row["batch"] == 1 and row["k"] != "adaptive"]
    column(alone, "speedup")
    best, worst = (choose(alone, key=lambda row: row["speedup"]) for choose in (max, min))
    measured = "; ".join(
        f"{row['speedup']:.2f} times as fast: {row['drafts']}, {row['prompts']}, k = {row['k']}, acceptance "
        f"{row['acceptance']:.0%}" for row in (best, worst)
    )
    return judged(best["speedup"] >= 1.5, measured, "where drafts are often right" if worst["speedup"] < 1.1 else "")


def e4(rows: Rows) -> Verdict:
    """It costs: real drafts of a fixed length lose more than 5 % in some batch. If they do not in every batch above
    one, drafts and batch are the condition. Where none loses, it hardly hurts, and the claim does not hold here."""
    fixed = [row for row in rows if row["part"] == "real" and row["k"] != "adaptive" and row["batch"] > 1]
    column(fixed, "speedup")
    largest = max(row["batch"] for row in fixed)
    adaptive = find(rows, part="real", k="adaptive", batch=largest, prompts="chat")
    crossings = [row for row in rows if row["part"] == "crossover" and not row["drafts"].startswith("replay")]
    measured = ", ".join(
        f"{row['drafts']} on {row['prompts']} "
        + (f"costs from batch {row['costs_from_batch']}" if row["costs_from_batch"] else f"gains up to {largest}")
        for row in crossings
    )
    measured += f"; {adaptive['speedup']:.2f} times plain decoding at batch {largest} if the length adapts"
    costs = [row for row in fixed if row["speedup"] < 0.95]
    return judged(bool(costs), measured, "it depends on drafts and batch" if len(costs) < len(fixed) else "")


# -- F: running a service -------------------------------------------------------------------------


def f1(rows: Rows) -> Verdict:
    """From the lightest load to the heaviest tokens/s at least quadruple and the p99 latency at least doubles, and no
    load has both 90 % of the best throughput and at most 110 % of the best latency."""
    column(rows, "tokens_per_s")
    light, heavy = (pick(rows, key=lambda row: row["clients"]) for pick in (min, max))
    best, least = max(row["tokens_per_s"] for row in rows), min(row["latency_p99_s"] for row in rows)
    both = [row for row in rows if row["tokens_per_s"] >= 0.9 * best and row["latency_p99_s"] <= 1.1 * least]
    measured = (
        f"{light['clients']} to {heavy['clients']} clients: {light['tokens_per_s']:,.0f} to "
        f"{heavy['tokens_per_s']:,.0f} tokens/s, p99 latency {light['latency_p99_s']:.3g} to "
        f"{heavy['latency_p99_s']:.3g} s"
    )
    more = heavy["tokens_per_s"] >= 4 * light["tokens_per_s"]
    return judged(more and heavy["latency_p99_s"] >= 2 * light["latency_p99_s"] and not both, measured)


def f2(rows: Rows) -> Verdict:
    """With a pool of their own, chats have at most half of the p99 TTFT. What the offline work loses is the condition,
    if it is more than a tenth."""
    mixed, apart = find(rows, layout="mixed"), find(rows, layout="separate pools")
    kept = apart["heap_tokens_per_s"] / mixed["heap_tokens_per_s"]
    measured = (
        f"chats' p99 TTFT {mixed['chat_ttft_p99_s']:.3g} s mixed, {apart['chat_ttft_p99_s']:.3g} s apart; offline "
        f"work at {kept:.0%} of its tokens/s"
    )
    condition = "" if kept >= 0.9 else "where chats leave their GPU half idle, the offline work pays for it"
    return judged(apart["chat_ttft_p99_s"] <= mixed["chat_ttft_p99_s"] / 2, measured, condition)


def f3(rows: Rows) -> Verdict:
    """Capped answers lower the p99 latency by a fifth or more; cached prompts at least halve the p99 of the queue."""
    free, cap = find(rows, case="answers as they come"), find(rows, case="answers capped at 200")
    computed, cached = find(rows, case="prompts computed"), find(rows, case="prompts cached")
    measured = (
        f"p99 latency {free['latency_p99_s']:.3g} to {cap['latency_p99_s']:.3g} s under the cap; p99 queue "
        f"{computed['queue_p99_s']:.3g} to {cached['queue_p99_s']:.3g} s with cached prompts"
    )
    shorter = cap["latency_p99_s"] <= 0.8 * free["latency_p99_s"]
    return judged(shorter and cached["queue_p99_s"] <= computed["queue_p99_s"] / 2, measured)


WATCHED = ("ttft_p50_s", "ttft_p99_s", "itl_p50_ms", "itl_p99_ms", "tokens_per_s", "achieved_batch_mean_rows",
           "achieved_batch_steps_kept", "kv_occupancy_peak_share", "queue_depth_peak", "queue_wait_p99_s")


def f4(rows: Rows) -> Verdict:
    """Every figure of the list comes out of one run's records."""
    values = {row["metric"]: row["value"] for row in rows}
    if not values:
        raise Missing("no row with a metric")
    absent = [name for name in WATCHED if values.get(name) is None]
    return judged(not absent, f"{len(WATCHED) - len(absent)} of {len(WATCHED)} figures from one run's records"
                              + (f"; not: {', '.join(absent)}" if absent else ""))


def f5(rows: Rows) -> Verdict:
    """Two runs whose GPU is busy alike, within 5 %: tokens/s differ by at least half as much as the mean batch, and by
    2 times or more."""
    thin, full = find(rows, setup="slots for the longest answer"), find(rows, setup="blocks as tokens appear")
    speed, batch = full["tokens_per_s"] / thin["tokens_per_s"], full["mean_rows"] / thin["mean_rows"]
    measured = (
        f"{thin['mean_rows']:.1f} rows give {thin['tokens_per_s']:,.0f} tokens/s, {full['mean_rows']:.1f} give "
        f"{full['tokens_per_s']:,.0f}; the GPU is in use {thin['busy_share']:.0%} and "
        f"{full['busy_share']:.0%} of the time"
    )
    alike = abs(thin["busy_share"] - full["busy_share"]) <= 0.05
    return judged(alike and speed >= 2 and speed >= batch / 2, measured)


def f6(rows: Rows) -> Verdict:
    """Every cure makes its symptom's figure better by a fifth or more."""
    gains = column(rows, "times_better")
    listed = "; ".join(f"{row['symptom']}: {row['cure']}, {row['times_better']:.3g} times better" for row in rows)
    return judged(min(gains) >= 1.2, listed)


def f7(rows: Rows) -> Verdict:
    """Apart, the p99 gap between tokens is at most half. A longer TTFT or fewer tokens/s are the condition."""
    both, apart = find(rows, layout="both on both"), find(rows, layout="apart")
    measured = (
        f"p99 gap {both['itl_p99_ms']:.3g} ms on both, {apart['itl_p99_ms']:.3g} ms apart; p50 TTFT "
        f"{both['ttft_p50_s']:.3g} and {apart['ttft_p50_s']:.3g} s; tokens/s {both['tokens_per_s']:,.0f} and "
        f"{apart['tokens_per_s']:,.0f}"
    )
    slower = apart["ttft_p50_s"] > 1.1 * both["ttft_p50_s"]
    return judged(apart["itl_p99_ms"] <= both["itl_p99_ms"] / 2, measured,
                  "prompts wait longer for their one GPU" if slower else "")


# -- G: the worked example ------------------------------------------------------------------------


def example_rows(rows: Rows) -> tuple[dict, dict, dict]:
    """The worked example's three set-ups, in the articles' order."""
    return tuple(find(rows, setup=setup) for setup in
                 ("static batch of 8", "continuous, paged", "continuous, paged, 8-bit KV"))


def g1(rows: Rows) -> Verdict:
    """Continuous batching with paging makes at least half of 9.2 times a static batch's tokens/s; from 2 times on with
    a condition."""
    static, paged, eight = example_rows(rows)
    times = paged["tokens_per_s"] / static["tokens_per_s"]
    measured = (
        f"{static['tokens_per_s']:,.0f}, {paged['tokens_per_s']:,.0f} and {eight['tokens_per_s']:,.0f} tokens/s: "
        f"{times:.1f} and {eight['tokens_per_s'] / static['tokens_per_s']:.1f} times"
    )
    slow = f"against a static loop that wastes no step's time, which makes {static['tokens_per_s']:,.0f} and not 310"
    return judged(times >= 2, measured, slow if times < 9.2 / 2 else "")


def g2(rows: Rows) -> Verdict:
    """With 8-bit keys and values, and as many more clients, tokens/s rise and the p99 latency rises too."""
    _, paged, eight = example_rows(rows)
    measured = (
        f"{paged['clients']} to {eight['clients']} clients: {paged['tokens_per_s']:,.0f} to "
        f"{eight['tokens_per_s']:,.0f} tokens/s, p99 latency {paged['latency_p99_s']:.3g} to "
        f"{eight['latency_p99_s']:.3g} s"
    )
    return judged(eight["tokens_per_s"] > paged["tokens_per_s"] and eight["latency_p99_s"] > paged["latency_p99_s"],
                  measured)


def g3(rows: Rows) -> Verdict:
    """Each cost is the price over the tokens of an hour, within 0.1 %."""
    costs = column(rows, "cost_per_million_output_tokens")
    right = all(
        abs(row["cost_per_million_output_tokens"] * row["tokens_per_s"] * 3600 / 1e6 / row["price_per_hour"] - 1) < 1e-3
        for row in rows
    )
    listed = ", ".join(f"${cost:.3g}" for cost in costs)
    return judged(right, f"{listed} a million tokens at ${rows[0]['price_per_hour']:g} an hour")
