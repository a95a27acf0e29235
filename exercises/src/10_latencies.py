# %% [markdown]
# # Exercise 10 · What the users felt
#
# A server keeps plain records of what happened. Everything it is judged by is computed from them afterwards. Here you
# write the figures that stand on every dashboard, with the details that dashboards get wrong.
#
# **To look at**: notebook 7; in the package `minillm/measure/metrics.py`, and `RequestRecord` in
# `minillm/ladder/records.py`.

# %%
from collections import Counter
from itertools import pairwise

from minillm.course.grading import check, hint

# %% [markdown]
# ## Percentiles
#
# There are many definitions; this one is the nearest rank. Put the n values in order and count from 1: the p-th
# percentile is the value at rank p * n / 100, rounded up. The p50 of 3 values is the second, the p99 of 100 values is
# the 99th. It is always one of the values, never something between two.
#
# `percent` is a whole number from 1 to 100. No values have no percentile: return `None`. Leave the list as it is.

# %%
def percentile(values, percent):
    """values: a list of numbers -> the one at the nearest rank; None if there are none."""
    ### BEGIN SOLUTION
    rank = -(-percent * len(values) // 100)
    return sorted(values)[rank - 1] if values else None
    ### END SOLUTION


# %%
check("percentile", percentile)

# %% [markdown]
# ## Time to first token
#
# A `RequestRecord` has these fields, all times in seconds on one clock:
#
# | field | what |
# |---|---|
# | `arrival` | when the request came |
# | `first_scheduled` | when it left the queue, or `None` |
# | `token_times` | a list: when each output token came |
# | `finish`, `finish_reason` | when and why it ended: "stop", "length" or "abort"; `None` while it is under way |
#
# The TTFT is how long the user looked at nothing: from arrival to the first token. Waiting in the queue counts.
# A request without tokens has none: return `None`.

# %%
def ttft(record):
    """Seconds from arrival to the first token; None if there is no token."""
    ### BEGIN SOLUTION
    return record.token_times[0] - record.arrival if record.token_times else None
    ### END SOLUTION


# %%
check("ttft", ttft)

# %% [markdown]
# ## Between tokens
#
# The inter-token latency, ITL, is how fast the text comes once it has begun. A plain step gives one token, so the
# gaps are the differences between neighbouring times. With speculation a step may give several, which then have the
# same time: they share the time since the step before in equal parts. Tokens at 1.0, 2.0 and 2.0 have the gaps 0.5 and
# 0.5.
#
# `token_gaps` returns one gap for each token, except for those of the first step.

# %%
def token_gaps(record):
    """A list of seconds, one for each token after the first step."""
    ### BEGIN SOLUTION
    counts = Counter(record.token_times)  # in order of time
    return [(later - earlier) / counts[later] for earlier, later in pairwise(counts) for _ in range(counts[later])]
    ### END SOLUTION


# %%
check("token_gaps", token_gaps)

# %% [markdown]
# ## All of them
#
# A request is *answered* if it ended by itself (its `finish_reason` is neither `None` nor "abort") and has at least one
# token. `summarise` returns a dictionary:
#
# | key | what |
# |---|---|
# | `"answered"` | how many requests were answered |
# | `"ttft_p50_s"`, `"ttft_p99_s"` | percentiles of their TTFTs |
# | `"itl_p50_s"`, `"itl_p99_s"` | percentiles of their gaps, all answered requests' gaps in one list |
# | `"output_tokens_per_s"` | all tokens of all requests, over the time from the first arrival to the last token |
#
# What cannot be computed, since nobody was answered or there was no token, is `None`. Leave the records as they are.
# Your functions above are used here, so pass their checks first.

# %%
def summarise(records):
    """records: a list of RequestRecord -> the dictionary above."""
    ### BEGIN SOLUTION
    answered = [r for r in records if r.finish_reason not in (None, "abort") and r.token_times]
    waits = [ttft(r) for r in answered]
    gaps = [gap for r in answered for gap in token_gaps(r)]
    times = [moment for r in records for moment in r.token_times]
    return {
        "answered": len(answered),
        "ttft_p50_s": percentile(waits, 50),
        "ttft_p99_s": percentile(waits, 99),
        "itl_p50_s": percentile(gaps, 50),
        "itl_p99_s": percentile(gaps, 99),
        "output_tokens_per_s": len(times) / (max(times) - min(r.arrival for r in records)) if times else None,
    }
    ### END SOLUTION


# %%
check("summarise", summarise)

# %% [markdown]
# ## A server's afternoon
#
# An A100 in virtual time, at three loads. Which figure tells first that it is too much?

# %% tags=["demo"]
from minillm.load.config import ModelConfig
from minillm.measure.virtual import CostModel, virtual_engine
from minillm.measure.workload import chat, play

cost = CostModel.of_device("a100-80gb", ModelConfig.preset("llama-3-8b"))
for requests_per_s in (4, 8, 16):
    engine = virtual_engine(cost, kv_memory=50 * 10**9, max_batch=64, max_step_tokens=1024, max_context=32_768)
    play(engine, chat(requests=200, rate=requests_per_s))
    figures = summarise(engine.records.requests)
    print(f"{requests_per_s} requests/s: " + ", ".join(f"{name} {value:.3g}" for name, value in figures.items()))
