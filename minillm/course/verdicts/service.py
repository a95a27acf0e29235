"""F: running a service."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from minillm.course.verdicts.reading import (
    FACTOR,
    Reading,
    Rows,
    column,
    find,
    judged,
    less,
    more,
    near,
    ratio,
    times,
    turn_by_turn,
)
from minillm.course.verdicts.words import Claim, Missing, Part, TooSmall, Verdict, every, true

MODELLED = "; on the virtual A100 alone, whose cost model was checked on a CPU of one thread"
WATCHED = ("ttft_p50_s", "ttft_p99_s", "itl_p50_ms", "itl_p99_ms", "tokens_per_s", "achieved_batch_mean_rows",
           "achieved_batch_steps_kept", "kv_occupancy_peak_share", "queue_depth_peak", "queue_wait_p99_s")
COUNTED_WITHIN = 0.01  # an independent count agrees with a figure, as a share
GAUGES = {"busy_share": "time in use", "itl_p50_ms": "ITL", "ttft_p50_s": "TTFT", "queue_p99_s": "queue",
          "cache_peak_share": "cache occupancy", "mean_waiting": "requests waiting"}
SWEEP = 5  # set-ups of a sweep, at the least


def f1(rows: Rows) -> Verdict:
    """Direction: from the lightest load to the heaviest tokens/s and the p99 latency both rise, and no load has both
    90 % of the best throughput and at most 110 % of the best latency."""
    column(rows, "tokens_per_s")
    light, heavy = (pick(rows, key=lambda row: row["clients"]) for pick in (min, max))
    best, least = max(row["tokens_per_s"] for row in rows), min(row["latency_p99_s"] for row in rows)
    both = [row for row in rows if row["tokens_per_s"] >= 0.9 * best and row["latency_p99_s"] <= 1.1 * least]
    speed, tail = ratio(heavy, light, "tokens_per_s"), ratio(heavy, light, "latency_p99_s")
    measured = (
        f"{light['clients']} to {heavy['clients']} clients: {light['tokens_per_s']:,.0f} to "
        f"{heavy['tokens_per_s']:,.0f} tokens/s, p99 latency {light['latency_p99_s']:.3g} to "
        f"{heavy['latency_p99_s']:.3g} s; seed by seed {speed} times the tokens/s, {tail} times the latency"
    )
    return judged(measured, every(more(speed), more(tail), true(not both)), by=[speed, tail])


def f2(rows: Rows) -> Verdict:
    """Direction: with a pool of their own, chats have a lower p99 TTFT. Size, "serves both": the offline work keeps its
    tokens/s, within 1.25."""
    mixed, apart = find(rows, layout="mixed"), find(rows, layout="separate pools")
    tail, kept = ratio(apart, mixed, "chat_ttft_p99_s"), ratio(apart, mixed, "heap_tokens_per_s")
    measured = (
        f"chats' p99 TTFT {mixed['chat_ttft_p99_s']:.3g} s mixed, {apart['chat_ttft_p99_s']:.3g} s apart; offline "
        f"work at {kept.value:.0%} of its tokens/s{MODELLED}"
    )
    return judged(measured, less(tail), true(kept.value >= 1 / FACTOR), by=[tail])


def f3(rows: Rows) -> Verdict:
    """Direction: capped answers have a lower p99 latency, and cached prompts a lower p99 of the queue. Cause: under the
    second fewer prompt tokens are computed."""
    free, cap = find(rows, case="answers as they come"), find(rows, case="answers capped at 200")
    computed, cached = find(rows, case="prompts computed"), find(rows, case="prompts cached")
    tail, queue = ratio(cap, free, "latency_p99_s"), ratio(cached, computed, "queue_p99_s")
    measured = (
        f"p99 latency {free['latency_p99_s']:.3g} to {cap['latency_p99_s']:.3g} s under the cap; p99 queue "
        f"{computed['queue_p99_s']:.3g} to {cached['queue_p99_s']:.3g} s with cached prompts, of which "
        f"{cached['prompt_tokens_computed']:,} tokens in place of {computed['prompt_tokens_computed']:,} are computed"
        f"{MODELLED}"
    )
    fewer = true(cached["prompt_tokens_computed"] < computed["prompt_tokens_computed"])
    return judged(measured, every(less(tail), less(queue)), cause=fewer, by=[tail, queue])


def f4(rows: Rows) -> Verdict:
    """Direction: every figure of the list comes out of one run's records. Size: each agrees within 1 % with `counted`,
    an independent count from the same run."""
    values = {row["metric"]: row for row in rows}
    if not values:
        raise Missing("no row with a metric")
    absent = [name for name in WATCHED if values.get(name, {}).get("value") is None]
    checked = [name for name in WATCHED if name not in absent and values[name].get("counted") is not None]
    if not checked and not absent:
        raise Missing(f"all {len(WATCHED)} figures are there, but none has `counted`, an independent count beside it")
    wrong = [name for name in checked
             if near(values[name]["value"] or 1e-12, values[name]["counted"] or 1e-12, 1 + COUNTED_WITHIN)
             is not Part.AS_CLAIMED]
    unchecked = [name for name in WATCHED if name not in (*absent, *checked)]
    measured = f"{len(checked) - len(wrong)} of {len(WATCHED)} figures agree with an independent count" + "".join(
        f"; {title}: {', '.join(names)}" for title, names in
        (("not there", absent), ("they disagree", wrong), ("not counted", unchecked)) if names)
    size = Part.ANOTHER if wrong else Part.NOT_TESTED if unchecked else Part.AS_CLAIMED
    return judged(measured, true(not absent), size)


def f5(rows: Rows) -> Verdict:
    """Direction, "the most telling": over a sweep of five set-ups or more, the achieved batch orders them by tokens/s
    more nearly than any other gauge that was recorded (Kendall's tau)."""
    column(rows, "tokens_per_s")
    if len(rows) < SWEEP:
        thin, full = (pick(rows, key=lambda row: row["mean_rows"]) for pick in (min, max))
        raise TooSmall(f"{len(rows)} set-ups ({thin['mean_rows']:.1f} rows give {thin['tokens_per_s']:,.0f} tokens/s, "
                       f"{full['mean_rows']:.1f} give {full['tokens_per_s']:,.0f}): a sweep of {SWEEP} or more, with "
                       "every gauge beside the batch, would tell")
    speeds = column(rows, "tokens_per_s")
    found = {title: agreement(column(rows, name), speeds) for name, title in GAUGES.items()
             if all(row.get(name) is not None for row in rows)}
    if not found:
        raise Missing("no gauge beside the achieved batch")
    batch, best = agreement(column(rows, "mean_rows"), speeds), max(found.values())
    listed = ", ".join(f"{name} {tau:.2f}" for name, tau in found.items())
    measured = f"order of {len(rows)} set-ups by tokens/s (1: the same): achieved batch {batch:.2f}, {listed}"
    equal = [name for name, tau in found.items() if tau == batch]
    tied = f"; as nearly as the batch: {', '.join(equal)}" if equal else ""
    part = Part.AS_CLAIMED if batch > best else Part.UNCLEAR if batch == best else Part.ANOTHER
    return judged(measured + tied, part)


def agreement(a: Sequence[float], b: Sequence[float]) -> float:
    """How nearly two columns order the rows alike, or in reverse: Kendall's tau without its sign, 0 to 1."""
    pairs = list(combinations(zip(a, b, strict=True), 2))
    signs = [_sign(x1 - x0) * _sign(y1 - y0) for (x0, y0), (x1, y1) in pairs]
    return abs(sum(signs)) / len(pairs)


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)


def f6(rows: Rows) -> Verdict:
    """Direction: each symptom's figure is made better by one of its cures, beyond the noise. Size: by every cure that
    was tried. A cure that rests on drafts whose acceptance was assumed (no column `acceptance`) is not counted."""
    column(rows, "before")
    counted = [row for row in rows if "drafts" not in row["cure"] or row.get("acceptance") is not None]
    gains = {id(row): _better(row) for row in rows}
    listed = "; ".join(f"{row['symptom']}: {row['cure']}, {gains[id(row)]} times better{_told(row, counted, gains)}"
                       for row in rows)
    cured: dict[str, list[Part]] = {}
    for row in counted:
        cured.setdefault(row["symptom"], []).append(more(gains[id(row)]))
    direction = every(*(max(parts, key=(Part.ANOTHER, Part.UNCLEAR, Part.AS_CLAIMED).index)
                        for parts in cured.values()))
    size = every(*(part for parts in cured.values() for part in parts))
    if size is Part.AS_CLAIMED:
        size = Part.NONE if len(counted) == len(rows) else Part.NOT_TESTED
    return judged(listed, direction, size, by=[gains[id(row)] for row in counted])


def _told(row: dict, counted: Sequence[dict], gains: dict[int, Reading]) -> str:
    """What is said after a cure that does not count, or does not cure beyond the noise."""
    if row not in counted:
        return " (assumed drafts: not counted)"
    return "" if more(gains[id(row)]) is Part.AS_CLAIMED else ": no cure beyond the noise"


def _better(row: dict) -> Reading:
    """How many times better a symptom's figure became: more tokens per second, or less of anything else. Its spread is
    that over the same requests without and with the cure, where runs of several seeds are recorded."""
    worse, better = (row[name] for name in (("before", "after") if row["figure"] == "tokens_per_s"
                                             else ("after", "before")))
    gain = 1.0 if worse == better else better / worse if worse else float("inf")
    return turn_by_turn(row, "times_better", times(gain))


def f7(rows: Rows) -> Verdict:
    """Direction: apart, the p99 gap between tokens is smaller. Size, at no other cost: p50 and p99 TTFT and tokens/s
    stay within 1.25."""
    both, apart = find(rows, layout="both on both"), find(rows, layout="apart")
    gap = ratio(apart, both, "itl_p99_ms")
    kept = [apart[name] <= FACTOR * both[name] for name in ("ttft_p50_s", "ttft_p99_s")]
    kept.append(apart["tokens_per_s"] >= both["tokens_per_s"] / FACTOR)
    measured = (
        f"p99 gap {both['itl_p99_ms']:.3g} ms on both, {apart['itl_p99_ms']:.3g} ms apart; TTFT p50 "
        f"{both['ttft_p50_s']:.3g} and {apart['ttft_p50_s']:.3g} s, p99 {both['ttft_p99_s']:.3g} and "
        f"{apart['ttft_p99_s']:.3g} s; tokens/s {both['tokens_per_s']:,.0f} and {apart['tokens_per_s']:,.0f}{MODELLED}"
    )
    return judged(measured, less(gap), true(all(kept)), by=[gap])


CLAIMS = (
    Claim("F1", "Under load throughput and latency pull apart; no one setting serves both.", "", ("load_sweep",), f1,
          ("clients",)),
    Claim("F2", "So interactive and batch work belong in pools of their own.", "", ("pools",), f2, ("layout",),
          ("mixed", "separate pools")),
    Claim("F3", "Capping answers cuts the tail; caching prompts takes prefill out of the queue.", "",
          ("caps_and_caching",), f3, ("case",), ("prompts computed", "prompts cached")),
    Claim("F4", "TTFT, ITL, tokens/s, achieved batch, cache occupancy and queue are what to watch.", "", ("watch",),
          f4),
    Claim("F5", "The achieved batch is the most telling number.", "3 where 40 would fit", ("achieved_batch",), f5,
          ("mean_rows",)),
    Claim("F6", "Each symptom has its own cure.", "", ("cures",), f6),
    Claim("F7", "Prefill and decoding can have pools of their own.", "", ("disaggregation",), f7, ("layout",),
          ("both on both", "apart")),
)
