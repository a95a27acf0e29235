"""H: the articles against themselves. Every row is arithmetic on their own figures (`experiments/example.py`), so a
verdict says whether the finding follows, not whether anything was measured."""

from __future__ import annotations

from minillm.course.verdicts.reading import FACTOR, Rows, barely, find, judged, near
from minillm.course.verdicts.words import Claim, Missing, Part, Verdict, every, true

PAGED, EIGHT, STATIC = "continuous, paged", "continuous, paged, 8-bit KV", "static batch of 8"
STAYS = {PAGED: 11.7, EIGHT: 17.1}  # what claims H1 to H5 say, by set-up
MOST, ARITHMETIC_MS, READING_MS, GAUGES = 2980, 11, 37, {STATIC: 0.31, PAGED: 0.78}
BYTES_A_TOKEN, REQUEST_GB, FIT = 131_072, 0.54, 111
EXACT = 1.02  # arithmetic meets a rounded figure within this factor


def h1(rows: Rows) -> Verdict:
    """Direction: by Little's law the mean stay is longer than the articles' p99. Size: 11.7 and 17.1 s."""
    found = {setup: find(rows, setup=setup) for setup in STAYS}
    measured = "; ".join(
        f"{row['rows']} present at {row['requests_per_s']:.2f} requests/s stay {row['mean_stay_s']:.1f} s on average: "
        f"with 99 % below {row['latency_p99_s']:g} s the others would stay {row['slowest_mean_s']:,.0f} s"
        for row in found.values()
    )
    return judged(measured, every(*(true(row["mean_stay_s"] > row["latency_p99_s"]) for row in found.values())),
                  every(*(near(row["mean_stay_s"], STAYS[setup], EXACT) for setup, row in found.items())))


def h2(rows: Rows) -> Verdict:
    """Direction: the articles' 2,850 tokens/s lie below what reading weights and cache allows, and above 90 % of it,
    which no engine here reaches; their 310 lie below half of theirs. Size: at most 2,980 tokens/s."""
    static, paged = find(rows, setup=STATIC), find(rows, setup=PAGED)
    share = paged["tokens_per_s"] / paged["most_tokens_per_s"]
    slow = static["most_tokens_per_s"] / static["tokens_per_s"]
    measured = (
        f"{paged['rows']} rows read {paged['read_gb']:.1f} GB, {paged['reading_ms']:.1f} ms, so at most "
        f"{paged['most_tokens_per_s']:,.0f} tokens/s (claimed about 2,980): {paged['tokens_per_s']:,} is {share:.0%}; "
        f"{static['rows']} rows need {static['reading_ms']:.1f} ms a step, and {static['tokens_per_s']} tokens/s are "
        f"{slow:.1f} times as slow"
    )
    return judged(measured, true(0.9 < share < 1 and slow > 2), near(paged["most_tokens_per_s"], MOST, EXACT))


def h3(rows: Rows) -> Verdict:
    """Direction: at 222 rows a step's reading takes longer than its arithmetic, so the bend is not of compute, and its
    floor is within 2 % of that of 111. Size: 11 and 37 ms, within 1.25."""
    paged, eight = find(rows, setup=PAGED), find(rows, setup=EIGHT)
    measured = (
        f"{eight['rows']} rows read {eight['read_gb']:.1f} GB in {eight['reading_ms']:.1f} ms and need "
        f"{eight['tflop']:.2f} TFLOP, {eight['arithmetic_ms']:.1f} ms; {paged['rows']} rows read for "
        f"{paged['reading_ms']:.1f} ms, so {eight['most_tokens_per_s']:,.0f} tokens/s would fit (the articles: "
        f"{eight['tokens_per_s']:,}) and no step need be longer"
    )
    alike = near(eight["reading_ms"], paged["reading_ms"], EXACT)
    return judged(measured, every(true(eight["reading_ms"] > eight["arithmetic_ms"]), alike),
                  every(near(eight["arithmetic_ms"], ARITHMETIC_MS), near(eight["reading_ms"], READING_MS)))


def h4(rows: Rows) -> Verdict:
    """Direction: the share of the bandwidth that the articles' tokens/s need rises from the first set-up to the second,
    and neither of the other gauges fits both figures within 1.25. Size: 31 and 78 %, within 1.25."""
    found = {setup: find(rows, setup=setup) for setup in GAUGES}
    static, paged = found.values()
    listed = []
    for setup in (STATIC, PAGED, EIGHT):
        row, claimed = find(rows, setup=setup), GAUGES.get(setup)
        said = f" (claimed {claimed:.0%}{barely(row['bandwidth_share'], claimed * FACTOR)})" if claimed else ""
        listed.append(f"{row['rows']} rows: bandwidth {row['bandwidth_share']:.0%}, arithmetic "
                      f"{row['arithmetic_share']:.1%}, time in use {row.get('busy_share', 1):.0%}{said}")
    others = [every(*(near(row.get(name, 1.0), GAUGES[setup]) for setup, row in found.items()))
              for name in ("arithmetic_share", "busy_share")]
    alone = true(Part.AS_CLAIMED not in others)
    return judged("; ".join(listed) + ": of the three only the bandwidth's share comes near",
                  every(true(paged["bandwidth_share"] > static["bandwidth_share"]), alone),
                  every(*(near(row["bandwidth_share"], GAUGES[setup]) for setup, row in found.items())))


def h5(rows: Rows) -> Verdict:
    """A request's cache at 4,096 tokens is 0.54 GB, of 131,072 bytes a token, and 60 GB hold 111.8: 111."""
    row = find(rows, setup=PAGED)
    if "request_gb" not in row:
        raise Missing("no request_gb")
    measured = (
        f"{row['context_tokens']:,} x {row['bytes_a_token']:,} bytes = {row['request_gb']:.4f} GB; "
        f"{row['cache_gb']:g} GB hold {row['fit']:.2f} (claimed 111)"
    )
    exact = row["bytes_a_token"] == BYTES_A_TOKEN and round(row["request_gb"], 2) == REQUEST_GB
    return judged(measured, true(exact and int(row["fit"]) == FIT))


CLAIMS = (
    Claim("H1", "By Little's law the articles' p99 of 4.1 and 6.8 s can't be the latency of a whole answer.",
          "mean stays of 11.7 and 17.1 s", ("articles_sums",), h1),
    Claim("H2", "Their 2,850 tokens/s are nearly all that the bandwidth allows, their 310 much less than it allows.",
          "at most 2,980", ("articles_sums",), h2, ("setup",), (STATIC, PAGED)),
    Claim("H3", "The bend after 111 rows is not one of compute: reading takes longer, and need not grow.",
          "11 ms of arithmetic, 37 ms of reading", ("articles_sums",), h3, ("setup",), (STATIC, EIGHT)),
    Claim("H4", "A gauge that reads 31 and 78 % is the share of the bandwidth, not of time or arithmetic.",
          "31 % and 78 %", ("articles_sums",), h4, ("setup",), (STATIC, PAGED)),
    Claim("H5", "A request of 4,096 tokens takes 0.54 GB of cache, and 111 is rounded down.", "0.54 GB, 111",
          ("articles_sums",), h5),
)
