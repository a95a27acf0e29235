"""Wrong and right answers to exercise 10."""

import heapq
import math
from fractions import Fraction

import numpy as np
from wrong_answers import Mutant

from minillm.measure import metrics

MUTANTS = [
    Mutant("percentile", "counts ranks from 0", "[rank - 1]", "[min(rank, len(values) - 1)]",
           caught_by="the median of three is the second"),
    Mutant("percentile", "does not sort", "sorted(values)", "values",
           caught_by="values may come in any order, and stay in it"),
    Mutant("percentile", "sorts the caller's list", "sorted(values)[rank - 1]", "(values.sort(), values[rank - 1])[1]",
           caught_by="values may come in any order, and stay in it"),
    Mutant("percentile", "rounds down", "-(-percent * len(values) // 100)", "max(1, percent * len(values) // 100)",
           caught_by="the median of three is the second"),
    Mutant("percentile", "rounds down and adds one", "-(-percent * len(values) // 100)",
           "min(len(values), percent * len(values) // 100 + 1)",
           caught_by="the rank is rounded up to a value that occurs"),
    Mutant("percentile", "interpolates", "sorted(values)[rank - 1]", "__import__('numpy').percentile(values, percent)",
           caught_by="the rank is rounded up to a value that occurs"),
    Mutant("percentile", "p99 is the highest", "-(-percent * len(values) // 100)",
           "min(len(values), -(-percent * len(values) // 100) + (percent > 90))",
           caught_by="of 100 values the p99 is the 99th, and p100 the last"),
    Mutant("percentile", "divides first", "-(-percent * len(values) // 100)",
           "__import__('math').ceil(percent / 100 * len(values))", caught_by="no rounding error moves the rank"),
    Mutant("percentile", "fails on nothing", " if values else None", "", caught_by="nothing has no percentile"),
    Mutant("percentile", "nothing is 0", "else None", "else 0.0", caught_by="nothing has no percentile"),
    Mutant("ttft", "clock started late", "record.arrival", "record.first_scheduled",
           caught_by="waiting in the queue counts"),
    Mutant("ttft", "until the end", "record.token_times[0]", "record.finish",
           caught_by="from arrival to the first token"),
    Mutant("ttft", "time on the clock", "record.token_times[0] - record.arrival", "record.token_times[0]",
           caught_by="from arrival to the first token"),
    Mutant("ttft", "fails without a token", " if record.token_times else None", "",
           caught_by="without a token there is none"),
    Mutant("token_gaps", "the first token too", "pairwise(counts)", "pairwise([record.arrival, *counts])",
           caught_by="the time between a token and the next"),
    Mutant("token_gaps", "one gap a step", " for _ in range(counts[later])]", "]",
           caught_by="tokens of one step share the time"),
    Mutant("token_gaps", "not shared", "(later - earlier) / counts[later]", "(later - earlier)",
           caught_by="tokens of one step share the time"),
    Mutant("token_gaps", "gaps of 0 within a step", "pairwise(counts) for _ in range(counts[later])",
           "pairwise(record.token_times) for _ in [0]", caught_by="tokens of one step share the time"),
    Mutant("token_gaps", "shared among the tokens of the step before", "/ counts[later]", "/ counts[earlier]",
           caught_by="tokens of one step share the time"),
    Mutant("token_gaps", "the mean for every token", "(later - earlier) / counts[later]",
           "(record.token_times[-1] - record.token_times[0]) / (len(record.token_times) - 1)",
           caught_by="the time between a token and the next"),
    Mutant("summarise", "aborted ones too", 'r.finish_reason not in (None, "abort")', "r.finish_reason is not None",
           caught_by="who was not answered is in no latency"),
    Mutant("summarise", "those under way too", 'r.finish_reason not in (None, "abort")', 'r.finish_reason != "abort"',
           caught_by="who was not answered is in no latency"),
    Mutant("summarise", "those that reached max_tokens left out", 'r.finish_reason not in (None, "abort")',
           'r.finish_reason == "stop"', caught_by="an answer that ended at max_tokens is answered"),
    Mutant("summarise", "sorts the caller's records", "    answered = [",
           "    records.sort(key=lambda r: r.arrival)\n    answered = [", caught_by="the records stay as they were"),
    Mutant("summarise", "a mean of percentiles", '"itl_p99_s": percentile(gaps, 99)',
           '"itl_p99_s": sum(percentile(token_gaps(r), 99) or 0 for r in answered) / max(1, len(answered))',
           caught_by="the gaps of all answers make one distribution"),
    Mutant("summarise", "a percentile of means", '"itl_p50_s": percentile(gaps, 50)',
           '"itl_p50_s": percentile([sum(token_gaps(r)) / len(token_gaps(r)) for r in answered if token_gaps(r)], 50)',
           caught_by="the gaps of all answers make one distribution"),
    Mutant("summarise", "mean instead of median", '"ttft_p50_s": percentile(waits, 50)',
           '"ttft_p50_s": sum(waits) / max(1, len(waits))',
           caught_by="answered requests are counted, each with its time to first token"),
    Mutant("summarise", "tokens of answered requests only",
           "for r in records for moment", "for r in answered for moment",
           caught_by="the rate counts every token, from the first arrival to the last token"),
    Mutant("summarise", "tokens of finished requests only", "for r in records for moment",
           "for r in records if r.finish_reason for moment",
           caught_by="the rate counts every token, from the first arrival to the last token"),
    Mutant("summarise", "time until the last finish", "(max(times)", "(max(r.finish for r in records if r.finish)",
           caught_by="the rate counts every token, from the first arrival to the last token"),
    Mutant("summarise", "time from the first token", "min(r.arrival for r in records)", "min(times)",
           caught_by="the rate counts every token, from the first arrival to the last token"),
    Mutant("summarise", "the first record's arrival", "min(r.arrival for r in records)", "records[0].arrival",
           caught_by="the rate counts every token, from the first arrival to the last token"),
    Mutant("summarise", "divides by nothing", " if times else None,", ",",
           caught_by="where nobody was answered, there are no figures"),
]

SURVIVORS = {}


def percentile_by_fractions(values, percent):
    """An exact quotient, rounded up; NumPy's own nearest rank, `inverted_cdf`, gives the 8th of 100 values as p7."""
    if not values:
        return None
    return heapq.nsmallest(math.ceil(Fraction(percent * len(values), 100)), values)[-1]


def ttft_by_timing(record):
    return record.timing.ttft


def ttft_by_minimum(record):
    return min(record.token_times, default=None) and min(record.token_times) - record.arrival


def gaps_by_steps(record):
    return [gap / number for gap, number in zip(*metrics.step_gaps(record), strict=True) for _ in range(number)]


def gaps_by_numpy(record):
    """Distinct times, their differences, repeated."""
    moments, counts = np.unique(record.token_times, return_counts=True)
    return np.repeat(np.diff(moments) / counts[1:], counts[1:]).tolist()


def summarise_by_metrics(records):
    found = metrics.latencies(records)
    times = sorted(moment for r in records for moment in r.token_times)
    return {
        "answered": found["ttft_s"]["n"],
        **{f"ttft_p{p}_s": found["ttft_s"][f"p{p}"] for p in (50, 99)},
        **{f"itl_p{p}_s": found["itl_per_token_s"][f"p{p}"] for p in (50, 99)},
        "output_tokens_per_s": len(times) / (times[-1] - min(r.arrival for r in records)) if times else None,
    }


def summarise_in_one_pass(records):
    """A loop over the records, with lists that grow."""
    waits, gaps, tokens, begin, end = [], [], 0, float("inf"), None
    for record in records:
        begin, tokens = min(begin, record.arrival), tokens + len(record.token_times)
        if record.token_times:
            end = max(end or 0.0, record.token_times[-1])
            if record.finish_reason in ("stop", "length"):
                waits.append(ttft_by_timing(record))
                gaps += gaps_by_numpy(record)
    quantiles = {
        f"{name}_p{p}_s": percentile_by_fractions(values, p)
        for name, values in (("ttft", waits), ("itl", gaps)) for p in (50, 99)
    }
    return {"answered": len(waits), **quantiles, "output_tokens_per_s": tokens / (end - begin) if tokens else None}


ALTERNATIVES = {
    "percentile": [metrics.percentile, percentile_by_fractions],
    "ttft": [ttft_by_timing, ttft_by_minimum],
    "token_gaps": [gaps_by_steps, gaps_by_numpy],
    "summarise": [summarise_by_metrics, summarise_in_one_pass],
}
