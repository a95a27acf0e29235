"""G: the worked example."""

from __future__ import annotations

from minillm.course.verdicts.memory import check_context
from minillm.course.verdicts.reading import FACTOR, Rows, digits, find, judged, more, near, ratio
from minillm.course.verdicts.words import Claim, Part, Verdict, every, true

CLAIMED = {"static batch of 8": (310, 2.60), "continuous, paged": (2850, 0.28),
           "continuous, paged, 8-bit KV": (3900, None)}  # tokens/s, and dollars for a million of them
GAIN, MORE_SPEED, MORE_TAIL = 2850 / 310, 3900 / 2850, 6.8 / 4.1


def three(rows: Rows) -> tuple[dict, dict, dict]:
    """The worked example's set-ups, in the articles' order."""
    return tuple(find(rows, setup=setup) for setup in CLAIMED)


def g1(rows: Rows) -> Verdict:
    """Direction: continuous batching with paging makes more tokens/s than a static batch of 8. Size: 9.2 times, within
    1.25. The batch grows with the policy, so the gain is not the policy's alone. Too small: short contexts."""
    static, paged, eight = three(rows)
    check_context(rows)
    gain, last = ratio(paged, static, "tokens_per_s"), ratio(eight, static, "tokens_per_s")
    measured = (
        f"{static['tokens_per_s']:,.0f}, {paged['tokens_per_s']:,.0f} and {eight['tokens_per_s']:,.0f} tokens/s "
        f"(claimed 310, 2,850 and 3,900): {gain} and {last} times (claimed {GAIN:.1f} and {3900 / 310:.1f}), with "
        f"{static['peak_rows']}, {paged['peak_rows']} and {eight['peak_rows']} rows: rows and policy change together"
    )
    return judged(measured, more(gain), near(gain.value, GAIN), by=[gain])


def g2(rows: Rows) -> Verdict:
    """Direction: with 8-bit keys and values, and as many more clients, tokens/s and the p99 latency both rise, the
    latency by a tenth of the claimed rise or more. Less, or a rise inside the noise where the claimed one lies far
    outside (beyond 1.25 times it), is another direction: none. Size: 1.37 and 1.66 times, within 1.25. Cause, a knee of
    compute: the step's arithmetic takes longer than its reading. Too small: short contexts."""
    _, paged, eight = three(rows)
    check_context(rows)
    speed, tail = ratio(eight, paged, "tokens_per_s"), ratio(eight, paged, "latency_p99_s")
    worse = more(tail, 1 + (MORE_TAIL - 1) / 10)
    if worse is Part.UNCLEAR and tail.high * FACTOR < MORE_TAIL:
        worse = Part.ANOTHER
    no_rise = ", no rise to speak of" if worse is Part.ANOTHER else ""
    knee = eight["arithmetic_ms"] > eight["reading_ms"]
    bend = "a knee of compute" if knee else (
        "the bend is the reading of keys and values, which a batch does not share, and not a knee of compute")
    measured = (
        f"{paged['clients']} to {eight['clients']} clients: {speed} times the tokens/s (claimed {MORE_SPEED:.2f}), "
        f"{tail} times the p99 latency (claimed {MORE_TAIL:.2f}){no_rise}; a step reads for "
        f"{digits(paged['reading_ms'])} and {digits(eight['reading_ms'])} ms and multiplies for "
        f"{digits(paged['arithmetic_ms'])} and {digits(eight['arithmetic_ms'])}: {bend}"
    )
    size = every(near(speed.value, MORE_SPEED), near(tail.value, MORE_TAIL))
    return judged(measured, every(more(speed), worse), size, true(knee), [speed, tail])


def g3(rows: Rows) -> Verdict:
    """Direction: each cost is the price over the tokens of an hour, and the second is less than the first. Size: $2.60
    and $0.28, within 1.25."""
    static, paged, _ = three(rows)
    cost, right, sizes = "cost_per_million_output_tokens", [], []
    for row in rows:
        tokens = row["tokens_per_s"] * 3600 / 1e6
        right.append(near(row[cost], row["price_per_hour"] / tokens, 1.001))
    for row in (static, paged):
        sizes.append(near(row[cost], CLAIMED[row["setup"]][1]))
    implied = ", ".join(f"{dollars * speed * 3600 / 1e6:.2f}" for speed, dollars in CLAIMED.values() if dollars)
    measured = (
        f"${static[cost]:.3g} and ${paged[cost]:.3g} a million tokens at ${static['price_per_hour']:g} an hour "
        f"(claimed $2.60 and $0.28, which imply ${implied} an hour): {1 - paged[cost] / static[cost]:.0%} less "
        "(claimed 89 %)"
    )
    return judged(measured, every(*right, true(paged[cost] < static[cost])), every(*sizes))


CLAIMS = (
    Claim("G1", "An 8B model on one A100: continuous batching and paging multiply a static batch's throughput.",
          "310 to 2,850 tokens/s: 9.2x", ("worked_example",), g1, ("setup",),
          ("static batch of 8", "continuous, paged")),
    Claim("G2", "With 8-bit keys and values throughput still rises while the tail gets worse: past the compute knee.",
          "3,900 tokens/s; p99 4.1 to 6.8 s", ("worked_example",), g2, ("setup",),
          ("continuous, paged", "continuous, paged, 8-bit KV")),
    Claim("G3", "The cost of a million tokens is the GPU's price per hour over the tokens made in it.",
          "$2.60 and $0.28", ("worked_example",), g3, ("setup",), ("static batch of 8", "continuous, paged")),
)
