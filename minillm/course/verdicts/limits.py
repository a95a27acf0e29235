"""A: why decoding is slow."""

from __future__ import annotations

from minillm.course.verdicts.reading import (
    FACTOR,
    NOISE,
    Rows,
    column,
    digits,
    find,
    find_all,
    judged,
    less,
    more,
    near,
    over,
    ratio,
    reading,
    repeated,
    times,
)
from minillm.course.verdicts.words import Claim, Part, TooSmall, Verdict, every, true

PROMPTS_THAT_TELL = 512  # tokens of the longest; below a quarter of it a step's fixed part decides


def a1(rows: Rows) -> Verdict:
    """Direction: one row's step needs at least three times as large a share of the bandwidth as of the arithmetic, and
    fewer layers take less time. Size: a step within 1.25 of the read of its weights. Cause, the read: what a further MB
    adds is within 1.25 of its read."""
    column(rows, "step_ms")
    whole, part = (pick(rows, key=lambda row: row["weight_mb"]) for pick in (max, min))
    faster = ratio(whole, part, "step_ms")
    direction = every(true(whole["mbu"] >= 3 * whole["mfu"]), more(faster))
    read_ms = whole["step_ms"] * whole["mbu"]
    added = (whole["step_ms"] - part["step_ms"]) / (whole["weight_mb"] - part["weight_mb"])  # ms a MB
    slope = added / (read_ms / whole["weight_mb"])
    measured = (
        f"{whole['weight_mb']:,.0f} MB in {digits(whole['step_ms'])} ms: {1 / whole['mbu']:.2f} times the bare read "
        f"(claimed 1), {whole['mbu']:.0%} of the bandwidth, {whole['mfu']:.1%} of the arithmetic; "
        f"{whole['weight_mb'] / part['weight_mb']:.1f} times the bytes take {faster} times the time, so a further MB "
        f"costs {slope:.2f} times its read"
    )
    return judged(measured, direction, near(1 / whole["mbu"], 1), near(slope, 1), [faster])


def a2(rows: Rows) -> Verdict:
    """Direction: the longest prompt alone needs a larger share of the arithmetic than of the bandwidth, and no lot of
    prompts reaches twice its share. Size: none reaches 1.25 times. Without runs in turns, a set-up that was measured
    twice shows the noise."""
    prompts = find_all(rows, phase="prefill")
    alone = [row for row in prompts if row["rows"] == 1]
    column(alone, "tokens_per_s")
    long, best = max(alone, key=lambda row: row["tokens_each"]), max(prompts, key=lambda row: row["mfu"])
    noise = max(NOISE, *(_apart([other for other in alone if other["tokens_each"] == row["tokens_each"]])
                         for row in alone))
    share = reading(long, "mfu", noise)
    bound, gain = over(share, reading(long, "mbu", noise)), over(reading(best, "mfu", noise), share)
    measured = (
        f"one prompt of {long['tokens_each']:,} tokens: {long['mfu']:.0%} of the arithmetic, {long['mbu']:.0%} of the "
        f"bandwidth; the best lot reaches {gain} times its share of the arithmetic (claimed 1)"
    )
    if noise > NOISE and not bound.recorded:
        measured += f"; the same prompt ran at two moments {1 + noise:.2f} times apart, which is taken as noise"
    return judged(measured, every(more(bound), less(gain, 2)), true(gain.value <= FACTOR),
                  by=[bound] * (noise == NOISE))


def _apart(rows: Rows) -> float:
    """How far the speeds of equal set-ups lie apart, as a share."""
    speeds = [row["tokens_per_s"] for row in rows]
    return max(speeds) / min(speeds) - 1


def a3(rows: Rows) -> Verdict:
    """Direction: eight in place of one speed up decoding more than prefill. Size, "far": at least twice as much."""
    gains = {}
    for phase, tokens in (("prefill", find(rows, phase="prefill", rows=8)["tokens_each"]), ("decode", 1)):
        one, eight = (repeated(find_all(rows, phase=phase, rows=number, tokens_each=tokens), "tokens_per_s")
                      for number in (1, 8))
        gains[phase] = over(eight, one)
    apart = over(gains["decode"], gains["prefill"])
    measured = f"8 rows give {gains['decode']} times the tokens/s in decoding, {gains['prefill']} in prefill"
    return judged(measured, more(apart), true(apart.value >= 2), by=[apart])


def a4(rows: Rows) -> Verdict:
    """Direction: a longer prompt costs more, by a larger factor than a token after it does. Size: four times the
    longest quarter takes 4 times the time, within 1.25, and a token after the longest prompt costs within 1.25 of one
    after a short text. Prompts under 512 tokens cannot show it."""
    column(rows, "cached_ms")
    prompts = sorted((row for row in rows if row["recompute_ms"] is not None), key=lambda row: row["context_tokens"])
    column(prompts, "recompute_ms")
    last = prompts[-1]
    long = last["context_tokens"]
    if long < PROMPTS_THAT_TELL:
        raise TooSmall(f"the longest prompt has {long:,} tokens, where a step's fixed part still decides: prompts of "
                       f"{PROMPTS_THAT_TELL // 4} to {PROMPTS_THAT_TELL} tokens or more would tell")
    quarter = max((row for row in prompts if row["context_tokens"] <= long / 4), key=lambda row: row["context_tokens"])
    lengths, prompt = long / quarter["context_tokens"], ratio(last, quarter, "recompute_ms")
    base = repeated([row for row in rows if row["context_tokens"] <= 64], "cached_ms")
    tokens = {row["context_tokens"]: over(repeated([row], "cached_ms"), base) for row in rows}
    dear = next((f"; from {length:,} on {cost} times" for length, cost in tokens.items()
                 if length > long and cost.value > FACTOR), "")
    measured = (
        f"{lengths:.3g} times the prompt ({quarter['context_tokens']:,} to {long:,} tokens) takes {prompt} times the "
        f"time; a token after {long:,} costs {tokens[long]} times one after up to 64{dear}"
    )
    direction = every(more(prompt), more(over(prompt, tokens[long])))
    return judged(measured, direction, every(near(prompt.value, lengths), near(tokens[long].value, 1)),
                  by=[prompt, tokens[long]])


def a5(rows: Rows) -> Verdict:
    """Direction: 64 rows make more tokens/s than one, while the gauge reads within 15 points of the same and at one row
    less than a third of the arithmetic is used. Size: at least 4 times the tokens/s, on NVML's gauge."""
    one, many = find(rows, rows=1), find(rows, rows=64)
    column(rows, "busy_percent")
    gain = ratio(many, one, "tokens_per_s")
    measured = (
        f"{one['gauge']} {one['busy_percent']:.0f} % at one row and {many['busy_percent']:.0f} % at 64, which give "
        f"{gain} times the tokens/s; {one['mfu']:.1%} and {many['mfu']:.1%} of the arithmetic"
    )
    alike = true(abs(one["busy_percent"] - many["busy_percent"]) <= 15 and one["mfu"] < 1 / 3)
    size = true(gain.value >= 4)
    if "NVML" not in one["gauge"]:
        measured, size = f"{measured}; the gauge is {one['gauge']}, not a GPU's utilisation", Part.NOT_TESTED
    return judged(measured, every(alike, more(gain)), size, by=[gain])


def a6(rows: Rows) -> Verdict:
    """Direction, for the batch alone: a whole text at a time, as training computes it, uses a larger share of the
    arithmetic at one row than decoding does, and gains less from eight rows."""
    long = max(find_all(rows, phase="prefill", rows=1), key=lambda row: row["tokens_each"])
    one, eight = (find(rows, phase="decode", rows=number) for number in (1, 8))
    share, gain = times(long["mfu"] / one["mfu"]), ratio(eight, one, "tokens_per_s")
    lots = repeated(find_all(rows, phase="prefill", rows=8), "tokens_per_s")
    single = repeated(find_all(rows, phase="prefill", rows=1, tokens_each=find(rows, phase="prefill", rows=8)
                               ["tokens_each"]), "tokens_per_s")
    text_gain = over(lots, single)
    measured = (
        f"one row: a whole text uses {long['mfu']:.0%} of the arithmetic, decoding {one['mfu']:.1%}; eight rows give "
        f"{text_gain} and {gain} times the tokens/s. Precision (D2) and memory (C10) are judged there"
    )
    return judged(measured, every(more(share), more(over(gain, text_gain))), by=[gain])


CLAIMS = (
    Claim("A1", "Decoding is bound by memory bandwidth: a token costs one read of all the weights.",
          "step = weight bytes / bandwidth", ("decode_step",), a1, ("weight_mb",)),
    Claim("A2", "Prefill is bound by compute, and one long prompt is enough to saturate it.", "", ("prefill",), a2,
          ("phase",), ("prefill", "decode")),
    Claim("A3", "Batching helps prefill far less than it helps decoding.", "moderate against very large", ("prefill",),
          a3, ("phase",), ("prefill", "decode")),
    Claim("A4", "A prompt costs time about in proportion to its length; an output token's hardly depends on it.", "",
          ("cost_by_length",), a4, ("context_tokens",)),
    Claim("A5", "GPU utilisation reads high while the arithmetic units idle: it does not measure useful work.",
          "the same at batch 1 and 64", ("utilisation",), a5, ("rows",), (1, 64)),
    Claim("A6", "Intuition from training does not transfer: there a batch of one text keeps the arithmetic busy.", "",
          ("prefill",), a6, ("phase",), ("prefill", "decode")),
)
