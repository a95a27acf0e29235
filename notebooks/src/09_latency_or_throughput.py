# %% [markdown]
# # 9 · Latency or throughput
#
# A server can be set up to answer each person quickly, or to answer as many as possible. It cannot do both at its
# best. This chapter finds out how far the two pull apart, and what can be done: pools, caps, admission, prefix
# caching, and a split of prompts from answers.
#
# **You will learn**
# - what one setting, the rows of a step, does to both;
# - when separate pools beat one large one, and when they lose;
# - what a cap and a bounded queue do to the tail;
# - what prefix caching and disaggregation take out of whose way.
#
# Everything here is **virtual time**: the real scheduler, pool and records, and steps whose duration comes from an
# A100's data sheet for Llama-3.1-8B in 16 bits. So the figures are the same on every machine. Chapters 7 and 10
# measure.
#
# **To run this page**: `make lab` in the repository, or `pip install -e ".[lab]"` and open the notebook.

# %%
# Where the package is missing, as on Colab: open this page inside a copy of the repository, and this installs it.
# ("minillm" on PyPI is another project.)
import importlib.util
import subprocess
import sys

if importlib.util.find_spec("minillm") is None:
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "..[lab]"], check=True)

# %%
import os
from dataclasses import replace

from minillm.course.experiments import memory, service
from minillm.course.figures import service_row
from minillm.course.setting import Setting
from minillm.course.show import service_plots
from minillm.course.show.guesses import guess, guesses, reveal
from minillm.course.show.live import progress
from minillm.course.show.recorded import ledger, recorded
from minillm.course.show.source import show_source
from minillm.course.show.tables import text_table
from minillm.course.show.widgets import pools_explorer
from minillm.measure.capacity import GB
from minillm.measure.measurement import MEASUREMENTS, Measurement
from minillm.measure.service import Service
from minillm.measure.workload import lognormal

QUICK = os.environ.get("MINILLM_QUICK") == "1"  # small sizes, for tests
setting = Setting(quick=QUICK, progress=progress)
a100 = Service(kv_memory=60 * GB)  # Llama-3.1-8B in 16 bits on an A100, by its data sheet

# %% [markdown]
# ## More people
#
# One server, and ever more clients, each of whom asks again when answered. Predict: what happens to the tokens per
# second of all, and to the time that one of them waits for the whole answer?

# %%
guess("tokens/s, 64 clients over 1, times", None)
guess("p99 latency, 64 clients over 1, times", None)

# %%
load = service.load_sweep(setting).rows
LOAD = {"clients": "clients", "tokens_per_s": "tokens/s", "mean_rows": "rows, mean", "ttft_p50_s": "TTFT p50, s",
        "itl_p50_ms": "ITL p50, ms", "latency_p99_s": "latency p99, s"}
print(text_table(load, LOAD))
by_clients = {row["clients"]: row for row in load}
for name, column in (("tokens/s", "tokens_per_s"), ("p99 latency", "latency_p99_s")):
    reveal(f"{name}, 64 clients over 1, times", by_clients[64][column] / by_clients[1][column])

# %%
alone, crowded = load[0], load[-1]
service_plots.frontier(
    load, "clients", "tokens_per_s", "latency_p99_s",
    f"{crowded['clients']} clients: {crowded['tokens_per_s'] / alone['tokens_per_s']:.1f} times the tokens per second, "
    f"and a p99 latency {crowded['latency_p99_s'] / alone['latency_p99_s']:.1f} times as long",
    xlabel="output tokens per second, all clients together (number: clients)", ylabel="p99 latency, s",
)

# %%
# NBVAL_CHECK_OUTPUT
speeds, tails = ([row[name] for row in load] for name in ("tokens_per_s", "latency_p99_s"))
print("more clients, more tokens/s, each time:", speeds == sorted(speeds))
print("no load has 90 % of the best throughput and 110 % of the best latency:",
      not any(row["tokens_per_s"] > 0.9 * max(speeds) and row["latency_p99_s"] < 1.1 * min(tails) for row in load))

# %% [markdown]
# Every server has such a line. Choosing a point on it is the operator's decision, not a program's.
#
# ## One setting, two wishes
#
# The load stays now, and a setting moves. 96 clients ask, wait for the answer, and ask again. The server takes at most
# 2, 8, 32 or 128 rows into a step.
#
# Predict: which of the four gives the most tokens per second? Which gives the shortest time between two tokens? Which
# the shortest latency, queue included?

# %%
guess("rows allowed for the most tokens/s", None)
guess("rows allowed for the shortest p99 of the ITL", None)
guess("rows allowed for the shortest p50 of the latency", None)

# %%
clients = 48 if QUICK else 96
asked = lognormal(0.5, 2 * clients, 48, 256)
limits = [{"max_batch": most, **service_row(replace(a100, max_batch=most).serve(asked, clients), *service.FIGURES)}
          for most in (2, 8, 32, 128)]
LIMITS = {"max_batch": "most rows", "mean_rows": "rows, mean", "tokens_per_s": "tokens/s",
          "itl_p99_ms": "ITL p99, ms", "queue_p50_s": "queue p50, s", "latency_p50_s": "latency p50, s"}
print(text_table(limits, LIMITS))
reveal("rows allowed for the most tokens/s", max(limits, key=lambda row: row["tokens_per_s"])["max_batch"])
reveal("rows allowed for the shortest p99 of the ITL", min(limits, key=lambda row: row["itl_p99_ms"])["max_batch"])
reveal("rows allowed for the shortest p50 of the latency",
       min(limits, key=lambda row: row["latency_p50_s"])["max_batch"])

# %%
few, many = limits[0], limits[-1]
service_plots.frontier(
    [{**row, "label": f"{row['max_batch']} rows"} for row in limits], "label", "tokens_per_s", "itl_p99_ms",
    f"{many['tokens_per_s'] / few['tokens_per_s']:.1f} times the tokens per second, for "
    f"{many['itl_p99_ms'] / few['itl_p99_ms']:.1f} times the p99 between two tokens",
    xlabel="output tokens per second", ylabel="p99 of the time between two tokens, ms",
)

# %%
# NBVAL_CHECK_OUTPUT
speeds, gaps = [row["tokens_per_s"] for row in limits], [row["itl_p99_ms"] for row in limits]
print("more rows, more tokens/s, each time:", speeds == sorted(speeds))
print("and a longer p99 between two tokens:", gaps[0] < gaps[1] < gaps[-1])
print("small batches only move the waiting into the queue; latency is shorter with many rows:",
      many["latency_p50_s"] < few["latency_p50_s"])

# %% [markdown]
# Mind the last line. Under *this* load a small batch is worse for every request, since they wait in the queue instead.
# A small batch pays only where the load is small as well: then it bounds the gap between tokens.
#
# ## Pools
#
# Two kinds of work. People arrive at random and wait for short answers. Jobs (summaries, evaluations) were all handed
# in at the start and only have to be done by morning. Four GPUs. Either all four take whatever comes, or two are kept
# for people, with small chunks and at most 32 rows, and two for jobs.
#
# Predict, for pools over one mixed pool: people's p99 to the first token, and the time until the jobs are done.

# %%
guess("people's p99 TTFT, pools over mixed, times", None)
guess("time until the jobs are done, pools over mixed, times", None)

# %%
show_source(service.in_pools)

# %%
people, jobs = (60, 40) if QUICK else (160, 120)
pooled = service.mixed_and_pools(*service.two_kinds(people, 8.0, jobs))
POOLS = {"setup": "four GPUs as", "ttft_p50_s": "people: TTFT p50, s", "ttft_p99_s": "p99, s",
         "latency_p99_s": "latency p99, s", "jobs_done_s": "jobs done after, s", "tokens_per_s": "tokens/s"}
print(text_table(pooled, POOLS))
mixed, apart = pooled
reveal("people's p99 TTFT, pools over mixed, times", apart["ttft_p99_s"] / mixed["ttft_p99_s"])
reveal("time until the jobs are done, pools over mixed, times", apart["jobs_done_s"] / mixed["jobs_done_s"])

# %%
# NBVAL_CHECK_OUTPUT
print("pools: people's p99 TTFT is less than a fifth:", apart["ttft_p99_s"] < mixed["ttft_p99_s"] / 5)
print("pools: the jobs are done later:", apart["jobs_done_s"] > mixed["jobs_done_s"])
print("tokens/s are the same within a tenth, though the jobs take longer:",
      abs(apart["tokens_per_s"] / mixed["tokens_per_s"] - 1) < 0.1)

# %% [markdown]
# In the mixed pool a person's request waits after the long prompts that were there first. A separate pool shortens the
# tail by leaving hardware idle: when few people are there, their two GPUs do nothing.
#
# The jobs take longer, and yet the tokens per second hardly change. The arrivals set the length of the run: people come
# at the same moments in both set-ups, the last of them after the jobs are done, and the same tokens are divided by
# about the same time. So do not read the price of pools from the last column. It stands in the one before.
#
# ## Where it loses: the wrong cut
#
# The same two pools at noon: more people than their two GPUs can serve, and few jobs. Which is better for people now?

# %%
guess("at noon: people's p99 TTFT, pools over mixed, times", None)

# %%
noon = service.mixed_and_pools(*service.two_kinds(100 if QUICK else 300, 90.0, 12))
print(text_table(noon, POOLS))
mixed_noon, apart_noon = noon
reveal("at noon: people's p99 TTFT, pools over mixed, times", apart_noon["ttft_p99_s"] / mixed_noon["ttft_p99_s"])

# %%
# NBVAL_CHECK_OUTPUT
print("now people's p99 to the first token is longer with pools:", apart_noon["ttft_p99_s"] > mixed_noon["ttft_p99_s"])

# %% [markdown]
# Half of the hardware has little to do while people queue at the other half. A cut must follow the traffic, or leave
# room. With a running kernel these move: how many of the four GPUs are kept for people, and how many people come a
# second. Where does each cut begin to lose?

# %%
pools_explorer(40 if QUICK else 200)

# %% [markdown]
# ## Caps
#
# A service allows answers of 8,000 tokens, "to be safe". Most end long before. The server has 12 GB for its cache. What
# does a cap of 400 do for the p99 of the latency, and for the p99 of the *time to first token*? One of the two is easy
# to see. Guess the other. And does it matter whether the cache is kept as slots or as pages?

# %%
guess("slots: p99 TTFT, loose cap over tight, times", None)
guess("pages: p99 TTFT, loose cap over tight, times", None)

# %%
caps = memory.output_caps(setting).rows
CAPS = {"kv": "cache", "cap_tokens": "most tokens of an answer", "mean_rows": "rows, mean",
        "wasted_share": "cache held and empty", "ttft_p99_s": "TTFT p99, s", "latency_p99_s": "latency p99, s"}
print(text_table(caps, CAPS))
loose, tight, paged_loose, paged_tight = caps
reveal("slots: p99 TTFT, loose cap over tight, times", loose["ttft_p99_s"] / tight["ttft_p99_s"])
reveal("pages: p99 TTFT, loose cap over tight, times", paged_loose["ttft_p99_s"] / paged_tight["ttft_p99_s"])

# %%
# NBVAL_CHECK_OUTPUT
print("slots: a tighter cap, a larger batch:", tight["mean_rows"] > loose["mean_rows"])
print("slots: a shorter p99 latency, and a shorter p99 to the first token:",
      tight["latency_p99_s"] < loose["latency_p99_s"], tight["ttft_p99_s"] < loose["ttft_p99_s"])
print("pages: under the loose cap already a larger batch than slots:", paged_loose["mean_rows"] > loose["mean_rows"])

# %% [markdown]
# A slot reserves for the cap. A lower cap makes smaller slots, so more requests run, and none waits for a slot. With
# pages the reservation is gone, and a cap works only on answers that are really longer.
#
# A cap cuts answers off. That is its price, and no figure here shows it.
#
# ## Admission
#
# More requests come than one GPU can serve. Either they all queue, or a request that finds eight in the queue is told
# immediately to come again. The GPU does no more work. But a request that is served is served in time. Predict: what
# share is refused, and what does the p99 to the first token fall to?

# %%
guess("share refused, 0 to 1", None)
guess("p99 TTFT with a bounded queue, s", None)

# %%
rush = service.chats(80 if QUICK else 250, rate=24.0)
doors = [{"door": name, **service.under_load(replace(a100, max_waiting=most), rush)}
         for name, most in (("all may queue", None), ("at most 8 wait", 8))]
DOORS = {"door": "admission", "refused_share": "refused, share", "ttft_p50_s": "TTFT p50, s",
         "ttft_p99_s": "TTFT p99, s", "latency_p99_s": "latency p99, s", "tokens_per_s": "tokens/s"}
print(text_table(doors, DOORS))
reveal("share refused, 0 to 1", doors[-1]["refused_share"])
reveal("p99 TTFT with a bounded queue, s", doors[-1]["ttft_p99_s"])

# %%
# NBVAL_CHECK_OUTPUT
unbounded, bounded = doors
print("with a bounded queue the p99 to the first token is less than half:",
      bounded["ttft_p99_s"] < unbounded["ttft_p99_s"] / 2)
print("some were refused:", bounded["refused"] > 0, "and none without a bound:", unbounded["refused"] == 0)

# %% [markdown]
# ## Prefix caching
#
# One system prompt of 4,096 tokens before short questions, six a second. Chapter 4 found most prompt tokens in the
# pool. What does this do to the queue? Predict the p50 of the time to first token with it, as a share of that without.

# %%
guess("p50 TTFT with cached prompts, as a share of that without", None)

# %%
caching = service.caps_and_caching(setting)
again, cached = (row for row in caching.rows if "prompts" in row["case"])
SHARED = {"case": "case", "prompt_tokens_computed": "prompt tokens computed", "queue_p99_s": "queue p99, s",
          "ttft_p50_s": "TTFT p50, s", "ttft_p99_s": "TTFT p99, s", "itl_p99_ms": "ITL p99, ms"}
print(text_table([again, cached], SHARED))
reveal("p50 TTFT with cached prompts, as a share of that without", cached["ttft_p50_s"] / again["ttft_p50_s"])

# %%
# NBVAL_CHECK_OUTPUT
print("the p50 to the first token is less than a third:", cached["ttft_p50_s"] < again["ttft_p50_s"] / 3)
print("other people's tokens come evenly too, p99 less than half:", cached["itl_p99_ms"] < again["itl_p99_ms"] / 2)

# %% [markdown]
# The prompt's work has left the queue. It left it for all: a request with a prompt of its own would have stood
# in the same line.
#
# ## Prompts here, answers there
#
# Two GPUs. Either each does everything. Or one only reads prompts and sends the finished keys and values over a link
# (50 GB/s here) to the other, which only decodes. Which figure should get better, TTFT or ITL?

# %%
guess("p99 TTFT, apart over both on both, times", None)
guess("p99 ITL, apart over both on both, times", None)

# %%
split = service.disaggregation(setting)
both, by_phase = split.rows
reveal("p99 TTFT, apart over both on both, times", by_phase["ttft_p99_s"] / both["ttft_p99_s"])
reveal("p99 ITL, apart over both on both, times", by_phase["itl_p99_ms"] / both["itl_p99_ms"])

# %%
service_plots.side_by_side(
    split.rows, "layout", {"ttft_p50_s": "TTFT p50, s", "ttft_p99_s": "TTFT p99, s", "itl_p50_ms": "ITL p50, ms",
                           "itl_p99_ms": "ITL p99, ms"},
    f"Apart, the p99 between two tokens goes from {both['itl_p99_ms']:.0f} to {by_phase['itl_p99_ms']:.0f} ms, "
    f"that to the first token from {both['ttft_p99_s']:.2f} to {by_phase['ttft_p99_s']:.2f} s",
)

# %%
# NBVAL_CHECK_OUTPUT
print("apart, the p99 between two tokens is less than half:", by_phase["itl_p99_ms"] < both["itl_p99_ms"] / 2)
print("and about as many tokens are made, within a tenth:",
      abs(by_phase["tokens_per_s"] / both["tokens_per_s"] - 1) < 0.1)

# %% [markdown]
# No prompt can disturb an answer any more. The price: one GPU for prompts in place of two, which shows in the p99 to
# the first token; the transfer; and again a cut that must fit the traffic. Code completion (long prompts, short
# answers) would leave the decoding GPU idle most of the time.
#
# ## How far to trust virtual time
#
# The queue, the batches and the memory above are the engine's own; the time of a step is a sum over a data sheet, and
# so an estimate. Its form can be tested where there is a machine: record one run, fit the five numbers of the cost
# model to its steps, let virtual time predict loads of other lengths, and run those as well. `minillm measure
# virtual_prediction` does so. Predict: how many per cent off is the median time to the first token?

# %%
guess("virtual time: p50 of the TTFT, % off at most", None)

# %%
OFF = {"load": "load", "figure": "figure", "recorded": "recorded", "error_percent": "% off",
       "allowed_percent": "% allowed", "apart_percent": "two runs apart, %"}
print(recorded("virtual_prediction", OFF))
checked = [Measurement.load(file.parent.name, file.stem) for file in MEASUREMENTS.glob("*/virtual_prediction.json")]
off = [abs(row["error_percent"]) for run in checked for row in run.rows if row["figure"] == "ttft_p50_s"]
if off:
    reveal("virtual time: p50 of the TTFT, % off at most", max(off))

# %% [markdown]
# Each load ran twice, and the last column is by how much the two differed: smaller differences are noise. All runs were
# played together, a step of each in turn. One after the other they would have met different machines: the speed of a
# shared one moves by tens of per cent within minutes, and no fit to one minute knows the next.
#
# What was checked is the form of the cost model, on the device above the table. The A100's numbers come from its data
# sheet, and nothing here has checked them.
#
# ## Claims of the ledger that this page settles
#
# In virtual time, on an A100; by the [ledger](CLAIMS.md)'s own rules. So F2, F3 and F7 stand on the cost model of the
# last section.

# %%
print(ledger({"C9": caps, "F1": load, "F2": service.pools(setting).rows, "F3": caching.rows, "F7": split.rows}))

# %%
guesses()  # yours, the nearest first

# %% [markdown]
# ## What a production engine calls this
#
# | here | vLLM | SGLang |
# |---|---|---|
# | most rows of a step | `--max-num-seqs` | `--max-running-requests` |
# | chunk budget | `--max-num-batched-tokens` | `--chunked-prefill-size` |
# | pools | several deployments behind a router | the same; `sglang-router` |
# | cap | `max_tokens` of a request | `max_new_tokens` |
# | admission: a bounded queue | a proxy in front | `--max-queued-requests` |
# | prefix caching | `--enable-prefix-caching` | RadixAttention, on by default |
# | prompts and answers apart | `--kv-transfer-config` | `--disaggregation-mode prefill`, `decode` |
#
# ## Exercise
#
# The pools of noon had two GPUs for people. Here is a shorter noon, of 100 people. Find a number, 1 to 3,
# for which people's p99
# to the first token is below that of the mixed pool (one line to change), and look at what the jobs pay.
# [Exercise 12](../exercises/12_beat_the_scheduler.ipynb) asks for more: a scheduler of your own that beats this one's
# p99.

# %%
gpus_for_people = 2

tried = service.mixed_and_pools(*service.two_kinds(100, 90.0, 12), for_people=gpus_for_people)
better = tried[1]["ttft_p99_s"] < tried[0]["ttft_p99_s"]
print(f"{tried[1]['setup']}: people's p99 {tried[1]['ttft_p99_s']:.2f} s, mixed {tried[0]['ttft_p99_s']:.2f} s:",
      "better" if better else "not yet better")

# %% [markdown]
# [How these pages are made](README.md) · before: [8 · Capacity](08_capacity.ipynb) · next:
# [10 · The worked example](10_worked_example.ipynb)
