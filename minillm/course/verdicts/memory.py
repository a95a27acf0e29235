"""C: the cache is the capacity."""

from __future__ import annotations

from minillm.course.verdicts.formats import NOTICEABLE, change, changed
from minillm.course.verdicts.reading import (
    NOISE,
    Rows,
    column,
    digits,
    find,
    judged,
    less,
    more,
    near,
    not_less,
    ratio,
    reading,
)
from minillm.course.verdicts.words import Claim, Missing, TooSmall, Verdict, every, true

EXAMPLE = {"model": "llama-3-8b", "kv_format": "bf16", "context_tokens": 4096}
TOKENS_THAT_TELL = 64  # a request's, on average: half a block of 16 is then an eighth of what it holds
FULL_CONTEXT = 4096


def c1(rows: Rows) -> Verdict:
    """Arithmetic: the articles' 80 GB less 16 and 4, over 4,096 tokens of what a store here really takes for one, is
    111, rounded down."""
    row = find(rows, **EXAMPLE)
    stored = next((each["stored_bytes"] for each in rows
                   if each.get("stored_bytes") and each["model"] == EXAMPLE["model"]), None)
    if stored is None:
        raise Missing("no row with the bytes that a store of llama-3-8b takes")
    free = row["memory_gb"] - row["weights_gb"] - row["overhead_gb"]
    fit = free * 1e9 / (row["context_tokens"] * stored)
    measured = (
        f"arithmetic: {row['memory_gb']:g} - {row['weights_gb']:g} - {row['overhead_gb']:g} GB, the articles' own, "
        f"over {row['context_tokens']:,} tokens of {stored:,} bytes, as a store here takes them: {fit:.1f} "
        "requests (claimed 111)"
    )
    return judged(measured, true(int(fit) == 111 == row["max_concurrent"]))


def c2(rows: Rows) -> Verdict:
    """For every preset a store takes exactly the formula's bytes per token. Counted, so without noise."""
    presets = [row for row in rows if row.get("formula_bytes")]
    column(presets, "stored_bytes")
    wrong = [row["model"] for row in presets if row["stored_bytes"] != row["formula_bytes"]]
    sizes = [row["formula_bytes"] for row in presets]
    return judged(f"{len(presets) - len(wrong)} of {len(presets)} models' stores take it exactly: {min(sizes):,} to "
                  f"{max(sizes):,} bytes at 16 bits", true(not wrong))


def c3(rows: Rows) -> Verdict:
    """Direction: pages waste a smaller share of what they hold than slots do. Size: slots more than half ("most"),
    pages less than a quarter. Counted by steps, so without noise. Too small: requests of under 64 tokens, of which a
    part-filled block is much."""
    slots, paged = find(rows, kv="slots"), find(rows, kv="paged")
    if paged.get("tokens_each", TOKENS_THAT_TELL) < TOKENS_THAT_TELL:
        raise TooSmall(f"a request holds {paged['tokens_each']:.0f} tokens on average, so its part-filled block alone "
                       f"wastes much of them; {TOKENS_THAT_TELL} tokens or more would tell")
    measured = (
        f"slots reserve {slots['reserved_mb']:.3g} MB and waste {slots['wasted_share']:.0%} (claimed: most), pages "
        f"{paged['reserved_mb']:.3g} MB and {paged['wasted_share']:.0%}; {slots['mean_requests']:.1f} and "
        f"{paged['mean_requests']:.1f} requests ran concurrently"
    )
    return judged(measured, true(paged["wasted_share"] < slots["wasted_share"]),
                  true(slots["wasted_share"] > 0.5 and paged["wasted_share"] < 0.25))


def c4(rows: Rows) -> Verdict:
    """Direction: requests are refused while less than half of the arithmetic is used. Size: the gauge that servers
    report, time in use, within 1.25 of 45 %. Cause: the cache is at least 95 % full, and with more memory the same load
    is refused less than half as often."""
    column(rows, "refused")
    little, much = (pick(rows, key=lambda row: row["cache_gb"]) for pick in (min, max))
    measured = (
        f"{little['refused_share']:.0%} refused with {little['cache_peak_share']:.0%} of the cache in use and "
        f"{little['mfu']:.0%} of the arithmetic; with {much['cache_gb']} GB of cache {much['refused_share']:.0%}; the "
        f"gauge for time in use reads {little['busy_share']:.0%} (claimed 45 %)"
    )
    cured = little["cache_peak_share"] >= 0.95 and much["refused_share"] < little["refused_share"] / 2
    direction = true(little["refused"] > 0 and little["mfu"] < 0.5 and little["refused"] > much["refused"])
    return judged(measured, direction, near(little["busy_share"], 0.45), true(cured))


def c5(rows: Rows) -> Verdict:
    """Arithmetic. Direction: at half of the context more requests fit. Size: twice as many, give or take one."""
    whole, half = find(rows, **EXAMPLE), find(rows, **EXAMPLE | {"context_tokens": 2048})
    measured = f"arithmetic: {whole['max_concurrent']} at 4,096 tokens, {half['max_concurrent']} at 2,048"
    return judged(measured, true(half["max_concurrent"] > whole["max_concurrent"]),
                  true(abs(half["max_concurrent"] - 2 * whole["max_concurrent"]) <= 1))


def c6(rows: Rows) -> Verdict:
    """Direction: int8 takes less memory than 16 bits, scales counted, and its perplexity does not grow noticeably (by
    1 %), beyond its error. Size: half, within 1.25."""
    row = find(rows, scheme="int8")
    fewer = 1 / row["share_of_16_bit"]
    measured = (
        f"int8 takes {row['share_of_16_bit']:.1%} of 16 bits, so {fewer:.2f} times the tokens fit (claimed 2); "
        f"perplexity {change(row)} over {row['tokens']:,} tokens"
    )
    return judged(measured, every(true(fewer > 1), less(changed(row), NOTICEABLE)), near(fewer, 2))


def c7(rows: Rows) -> Verdict:
    """Arithmetic: without grouping every cache would be larger by exactly heads over KV heads."""
    presets = [row for row in rows if row.get("kv_heads")]
    column(presets, "times_without_gqa")
    right = [row for row in presets if row["times_without_gqa"] == row["heads"] / row["kv_heads"]]
    example = find(presets, model="llama-3-8b")
    return judged(f"arithmetic: {len(right)} of {len(presets)} models; llama-3-8b: {example['times_without_gqa']:g} "
                  "times", true(len(right) == len(presets)))


def c8(rows: Rows) -> Verdict:
    """Direction: sharing finds tokens and lowers TTFT, and one changed first token loses all of it. Size: half of the
    prompts' tokens or more are skipped. The two cases that share nothing do equal work: without runs in turns, how far
    they lie apart is noise."""
    alone, shared = find(rows, case="no sharing"), find(rows, case="shared prefix")
    changed = find(rows, case="first token changed")
    noise = max(NOISE, abs(reading(alone, "ttft_p50_ms").value / reading(changed, "ttft_p50_ms").value - 1))
    gains = [ratio(other, shared, "ttft_p50_ms", noise) for other in (alone, changed)]
    faster = min(gains, key=lambda gain: gain.value)
    measured = (
        f"{shared['found']:,} of {shared['prompt_tokens']:,} prompt tokens found, TTFT {digits(alone['ttft_p50_ms'])} "
        f"to {digits(shared['ttft_p50_ms'])} ms; first token changed: {changed['found']} found, "
        f"{digits(changed['ttft_p50_ms'])} ms, so sharing is {faster} times as fast as the faster of the two without"
    )
    if noise > NOISE and not faster.recorded:
        measured += f"; these two do equal work {1 + noise:.2f} times apart, which is taken as noise"
    found = true(shared["found"] > 0 == changed["found"])
    return judged(measured, every(found, more(faster)), true(shared["found"] >= 0.5 * shared["prompt_tokens"]),
                  by=[faster] * (noise == NOISE))


def c9(rows: Rows) -> Verdict:
    """Direction: as slots, a batch under the tight cap has more rows than under the loose one, and a lower p99 latency.
    Cause, the reserve: blocks, which reserve nothing, keep at least as many rows under the loose cap as slots under the
    tight one."""
    column(rows, "mean_rows")
    caps = [row["cap_tokens"] for row in rows]
    loose, tight = (find(rows, kv="slots", cap_tokens=cap) for cap in (max(caps), min(caps)))
    blocks = find(rows, kv="paged", cap_tokens=max(caps))
    batch, tail = ratio(tight, loose, "mean_rows"), ratio(tight, loose, "latency_p99_s")
    measured = (
        f"slots under caps of {max(caps):,} and {min(caps):,} tokens: {loose['mean_rows']:.1f} and "
        f"{tight['mean_rows']:.1f} rows, p99 latency {loose['latency_p99_s']:.3g} and {tight['latency_p99_s']:.3g} s; "
        f"with blocks the loose cap leaves {blocks['mean_rows']:.1f} rows and {digits(blocks['latency_p99_s'])} s"
    )
    cause = not_less(ratio(blocks, tight, "mean_rows"))
    return judged(measured, every(more(batch), less(tail)), cause=cause, by=[batch, tail])


def c10(rows: Rows) -> Verdict:
    """Direction: of the requests that the scheduler ran concurrently in pages, the cache is larger than the weights.
    Counted, so without noise. Too small: contexts under 4,096 tokens. On rows without set-ups, the articles' sum, and
    the sentence says that it is arithmetic."""
    if rows and "setup" not in rows[0]:
        row = find(rows, **EXAMPLE)
        enough = row["weights_gb"] / row["request_gb"]
        measured = (f"arithmetic, on the articles' own figures: weights {row['weights_gb']:.3g} GB, cache "
                    f"{row['cache_gb']:.3g} GB, the larger from {enough:.0f} requests on")
        return judged(measured, true(row["cache_gb"] > row["weights_gb"]))
    static, paged = find(rows, setup="static batch of 8"), find(rows, setup="continuous, paged")
    check_context(rows)
    measured = (
        f"{static['peak_rows']} requests of {paged['context_tokens']:,} tokens hold {static['kv_peak_gb']:.3g} GB, "
        f"{paged['peak_rows']} hold {paged['kv_peak_gb']:.3g} GB, beside {paged['weights_gb']:.3g} GB of weights: the "
        f"cache is the larger from {paged['weights_gb'] / (paged['kv_peak_gb'] / paged['peak_rows']):.0f} requests on"
    )
    return judged(measured, true(paged["kv_peak_gb"] > paged["weights_gb"]))


def check_context(rows: Rows) -> None:
    """TooSmall where the example's contexts are shorter than the articles'."""
    short = min(row.get("context_tokens", FULL_CONTEXT) for row in rows)
    if short < FULL_CONTEXT:
        raise TooSmall(f"contexts of {short:,} tokens, whose keys and values weigh little beside the weights; contexts "
                       f"of {FULL_CONTEXT:,} would tell")


CLAIMS = (
    Claim("C1", "Memory less weights less overhead, over the cache of one request, is how many fit.",
          "60 GB / 0.54 GB = 111", ("capacity_sum",), c1),
    Claim("C2", "Cache bytes per token are 2 x layers x KV heads x head size x bytes per number.", "",
          ("capacity_sum",), c2),
    Claim("C3", "Slots reserve for the longest answer and waste most of it; blocks are taken as tokens appear.", "",
          ("memory_by_policy",), c3, ("kv",), ("slots", "paged")),
    Claim("C4", "A server that turns requests away while its GPU looks half idle is out of cache.",
          "at 45 % utilisation", ("out_of_cache",), c4, ("cache_gb",)),
    Claim("C5", "Half the context, twice the requests.", "2x", ("capacity_sum",), c5, ("context_tokens",),
          (4096, 2048)),
    Claim("C6", "8-bit keys and values halve a request's footprint at a small cost in quality.", "111 to 222 requests",
          ("kv_quality",), c6, ("scheme",), ("int8", "int4")),
    Claim("C7", "Grouped-query attention shrinks the cache by the sharing factor.", "", ("capacity_sum",), c7),
    Claim("C8", "A common prefix can share its cache; one changed token in front loses all of it.", "",
          ("prefix_sharing",), c8, ("case",), ("no sharing", "shared prefix")),
    Claim("C9", "Without a cap on the answer, memory is reserved for the worst case and the batch shrinks.", "",
          ("output_caps",), c9, ("cap_tokens",)),
    Claim("C10", "Memory is weights, cache and activations, and the cache is often the largest.", "",
          ("worked_example", "capacity_sum"), c10, ("setup",), ("static batch of 8", "continuous, paged")),
)
