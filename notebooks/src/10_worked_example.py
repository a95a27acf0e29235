# %% [markdown]
# # 10 · The worked example
#
# One service, three set-ups, and a bill. The articles behind this course take an 8B model on one A100: chats with
# contexts of 4,096 tokens and answers of 300. They say:
#
# | | static batch of 8 | continuous, paged | + 8-bit keys and values |
# |---|---|---|---|
# | people at once | 8 | 111 | 222 |
# | tokens per second | 310 | 2,850 (9.2 times) | 3,900 |
# | cost of a million tokens | $2.60 | $0.28 | |
# | time to first token, p50 | 1.4 s | 0.9 s | |
# | p99 latency | | 4.1 s | 6.8 s |
# | GPU utilisation | 31 % | 78 % | |
#
# This chapter does the sums, holds the table against two lines of arithmetic, runs the three in virtual time on an
# A100, and runs them on your machine.
#
# **You will learn**
# - to turn tokens per second into money;
# - to test a table of figures with Little's law and the bandwidth floor, before you believe it;
# - where the factor 9 comes from, and what it silently assumes about prompts;
# - what limits the last step: the reading of keys and values, which a batch does not share;
# - what the same three set-ups do here.
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

from minillm import ModelConfig, metrics
from minillm.course.experiments import example
from minillm.course.experiments.example import (
    bandwidth_floor,
    beside_the_articles,
    gauges_of,
    little,
    slowest_mean,
    worked_example_rows,
)
from minillm.course.setting import Setting
from minillm.course.show import plots, service_plots
from minillm.course.show.guesses import guess, guesses, reveal
from minillm.course.show.live import progress
from minillm.course.show.recorded import ledger
from minillm.course.show.source import show_source
from minillm.course.show.tables import cell, text_table
from minillm.load.source import DEFAULT
from minillm.measure.measurement import device_name
from minillm.measure.roofline import StepShape, least_work, read_numbers
from minillm.measure.service import PRICE, Service
from minillm.measure.virtual import CostModel

QUICK = os.environ.get("MINILLM_QUICK") == "1"  # small sizes, for tests
setting = Setting(quick=QUICK, progress=progress)
model = setting.model
GPU = setting.gpu
theirs = example.articles_table()  # the table above, and what follows from it
at_eight, at_paged, at_eight_bits = theirs
print(device_name(model.device))

# %% [markdown]
# ## Money
#
# A GPU costs $2.90 an hour, busy or not. Predict the cost of a million output tokens at 310 and at 2,850 tokens per
# second.

# %%
for row in (at_eight, at_paged):
    guess(f"$ a million tokens at {row['tokens_per_s']:,} tokens/s", None)

# %%
show_source(metrics.cost_per_million_tokens)

# %%
# NBVAL_CHECK_OUTPUT
dear, cheap = (metrics.cost_per_million_tokens(row["tokens_per_s"], PRICE) for row in (at_eight, at_paged))
print(f"${dear:.2f} and ${cheap:.2f}: {1 - cheap / dear:.0%} less")
said = [row[example.COST] for row in example.ARTICLES[:2]]
implied = [cost * row["tokens_per_s"] * 3600 / 1e6 for cost, row in zip(said, theirs, strict=False)]
print(f"the price an hour that ${said[0]:.2f} and ${said[1]:.2f} imply: ${implied[0]:.2f} and ${implied[1]:.2f}")

# %%
for row, cost in ((at_eight, dear), (at_paged, cheap)):
    reveal(f"$ a million tokens at {row['tokens_per_s']:,} tokens/s", cost)

# %% [markdown]
# Nothing but tokens per hour is in this number. So the cost falls with the achieved batch, as long as a step hardly
# grows. By the data sheet, with 4,096 tokens in each context:

# %%
llama = ModelConfig.preset("llama-3-8b")
batches = (1, 2, 4, 8, 16, 32, 64, at_paged["rows"])
a100 = CostModel.of_device("a100-80gb", llama)
rates = [n / a100.seconds(StepShape.decode([example.CONTEXT] * n)) for n in batches]
costs = [metrics.cost_per_million_tokens(rate, PRICE) for rate in rates]
plots.curves(
    {"Llama-3-8B on an A100": (batches, costs)},
    f"A million tokens cost ${costs[0]:.2f} from a batch of one, ${costs[3]:.2f} from eight, ${costs[-1]:.2f} from "
    f"{batches[-1]}",
    "rows in the step", "dollars for a million output tokens", log_x=True, log_y=True,
)

# %% [markdown]
# ## Two lines of arithmetic
#
# Before you build on a table, ask whether its figures fit each other. Two lines do that here.
#
# **Little's law** (chapter 7): those present are the rate times the mean stay, $L = \lambda W$. 2,850 tokens per second
# in answers of 300 are so many requests per second; 111 are present. How long does a request stay, on average? Write
# down your guess, and hold it against the p99 of the table.

# %%
for row in theirs[1:]:
    guess(f"mean stay of {row['rows']} requests, s", None)

# %%
show_source(little, slowest_mean)

# %%
# NBVAL_CHECK_OUTPUT
for row in theirs[1:]:
    stay = little(row["rows"], row["tokens_per_s"])
    others = slowest_mean(stay["mean_stay_s"], row["latency_p99_s"])
    print(f"{row['rows']} present, {stay['requests_per_s']:.2f} requests/s: a mean stay of {stay['mean_stay_s']:.1f} "
          f"s. If 99 % stay {row['latency_p99_s']} s at most, the others stay {others:,.0f} s on average")

# %%
for row in theirs[1:]:
    reveal(f"mean stay of {row['rows']} requests, s", little(row["rows"], row["tokens_per_s"])["mean_stay_s"])

# %% [markdown]
# A p99 far below the mean is not the latency of an answer. At most it is the time to the first token.
#
# **The bandwidth floor** (chapters 0 and 8): a step reads all weights once, and each row's keys and values. No schedule
# can do without. Predict for 111 rows of 4,096 tokens, on a device that reads 2,039 GB/s: how many milliseconds, and so
# how many tokens per second at most?

# %%
guess("reading of a step of 111 rows, ms", None)
guess("tokens/s of 111 rows at most", None)

# %%
show_source(bandwidth_floor)

# %%
# NBVAL_CHECK_OUTPUT
floors = [{"setup": row["setup"], "rows": row["rows"], **bandwidth_floor(row["rows"], row["kv_format"]),
           "tokens_per_s": row["tokens_per_s"]} for row in theirs]
for row in floors:
    row["share"] = f"{row['tokens_per_s'] / row['most_tokens_per_s']:.0%}"
FLOOR = {"rows": "rows", "reading_ms": "reading, ms", "arithmetic_ms": "arithmetic, ms",
         "most_tokens_per_s": "most tokens/s", "tokens_per_s": "theirs", "share": "of the most"}
print(text_table(floors, FLOOR))
_, of_paged, of_eight_bits = floors
for row in floors:
    print(f"{row['setup']}: {row['read_gb']:.1f} GB a step, {row['kv_gb']:.1f} of them cache; arithmetic takes "
          f"{row['arithmetic_ms'] / row['reading_ms']:.0%} of the time of the reading")

# %%
reveal("reading of a step of 111 rows, ms", of_paged["reading_ms"])
reveal("tokens/s of 111 rows at most", of_paged["most_tokens_per_s"])

# %% [markdown]
# Three findings. The second set-up's tokens per second are nearly all that the memory can deliver, which no engine
# reaches. The static batch's lie far below what eight rows allow, so "9.2 times" mixes two things: a larger batch, and
# a slow baseline. And the third set-up reads as many bytes as the second, for twice the rows: its floor allows twice
# the tokens per second, at steps that are no longer. Its arithmetic takes a fraction of the time of its reading. If
# there is a bend between the second and the third, compute does not make it.
#
# **Which gauge reads 31 and 78 %?** If steps follow one another, the time in use is all of it, in any of the three.
# What share of the bandwidth, and of the arithmetic, do their tokens per second need? Guess for 8 rows and for 111.

# %%
for row in (at_eight, at_paged):
    guess(f"{row['rows']} rows: share of the bandwidth", None)  # 0 to 1
    guess(f"{row['rows']} rows: share of the arithmetic", None)

# %%
# NBVAL_CHECK_OUTPUT
gauges = [{"rows": row["rows"], **gauges_of(row["rows"], row["tokens_per_s"], row["kv_format"]),
           "said": row["utilisation"] and f"{row['utilisation']:.0%}"} for row in theirs]
for row in gauges:
    row |= {name: f"{row[name]:.0%}" for name in ("busy_share", "bandwidth_share", "arithmetic_share")}
GAUGES = {"rows": "rows", "step_ms": "step, ms", "busy_share": "time in use", "bandwidth_share": "bandwidth",
          "arithmetic_share": "arithmetic", "said": "the articles' utilisation"}
print(text_table(gauges, GAUGES))

# %%
for row in (at_eight, at_paged):
    reveal(f"{row['rows']} rows: share of the bandwidth", row["bandwidth_share"])
    reveal(f"{row['rows']} rows: share of the arithmetic", row["arithmetic_share"])

# %% [markdown]
# Only the share of the bandwidth comes near, and `nvidia-smi` does not show that one (chapter 7).
#
# ## In virtual time
#
# As many clients as the cache holds (chapter 8), each of whom asks again when answered. Their histories are in the
# cache already, so that only answers are computed: this is what the articles' figures imply. Answers have 300 tokens,
# give or take a tenth, which differs by seed; shown are medians over three.
#
# The static batch is there twice. The articles have 8 at once: eight clients, who share eight rows and never wait. Put
# as many clients before it as the second set-up serves, and it makes the same tokens per second, while the others
# queue for its rows: that is what its users would see, and not what the articles compare with.
#
# Predict from the curve: how many times the tokens of the static batch of 8 does the paged set-up make?

# %%
guess("paged over static batch, tokens/s, times", None)

# %%
show_source(worked_example_rows)

# %%
virtual = example.worked_example(setting)
EXAMPLE = {"setup": "set-up (virtual time, A100)", "clients": "clients", "mean_rows": "rows, mean",
           "tokens_per_s": "tokens/s", "times_first": "times static", "ttft_p50_s": "TTFT p50, s"}
print(text_table(virtual.rows, EXAMPLE))
set_ups = {row["setup"]: row for row in virtual.rows}
crowded, (static, paged, eight) = set_ups[example.CROWDED], (set_ups[row["setup"]] for row in theirs)
reveal("paged over static batch, tokens/s, times", paged["times_first"])

# %% [markdown]
# Beside the articles' own figures, which were not measured here. In each cell: theirs | ours.

# %%
beside = [{"figure": line["figure"], **{row["setup"]: " | ".join(cell(line[f"{row['setup']}: {whose}"])
                                                                 for whose in ("articles", "ours")) for row in theirs}}
          for line in beside_the_articles(virtual.rows)]
print(text_table(beside, {column: column for column in beside[0]}))

# %%
service_plots.side_by_side(
    virtual.rows, "setup", {"tokens_per_s": "tokens/s", "cost_per_million_output_tokens": "$ a million tokens",
                            "latency_p99_s": "latency p99, s"},
    f"Continuous and paged: {paged['times_first']:.1f} times the tokens of a static batch of 8, at "
    f"{paged['cost_per_million_output_tokens'] / static['cost_per_million_output_tokens']:.0%} of the cost",
)

# %%
# NBVAL_CHECK_OUTPUT
print("eight rows make the same tokens/s, however many wait, within 5 %:",
      abs(crowded["tokens_per_s"] / static["tokens_per_s"] - 1) < 0.05)
print("in the crowd the first token takes more than ten times as long:",
      crowded["ttft_p50_s"] > 10 * static["ttft_p50_s"])
print("tokens/s rise from each set-up to the next:",
      static["tokens_per_s"] < paged["tokens_per_s"] < eight["tokens_per_s"])
print("the cost falls by the same factor:",
      abs(static["cost_per_million_output_tokens"] / paged["cost_per_million_output_tokens"]
          - paged["tokens_per_s"] / static["tokens_per_s"]) < 1e-6)

# %% [markdown]
# Our static server in virtual time is quicker than the articles', since it wastes no time between its steps (and its
# longest answer still holds the other seven rows). A slower start makes a larger factor. What the three gauges would
# read on ours, at the batch's mean and full contexts:

# %%
print(f"static batch of 8: {static['tokens_per_s'] / at_eight['tokens_per_s']:.1f} times the articles' tokens/s\n")
print(text_table(virtual.rows, {"setup": "set-up (virtual time, A100)", "mean_rows": "rows, mean",
                                "busy_share": "time in use", "bandwidth_share": "share of the bandwidth",
                                "arithmetic_share": "of the arithmetic"}))

# %% [markdown]
# ## Where it loses: something must read the prompts
#
# A context has 4,096 tokens, of which 300 are the answer: all else is history. If it is *not* in the cache, it must be
# computed. How long does the A100 compute for one request's prompt, and how long for its answer, if a full step of 111
# rows is shared? Take 2 FLOP a weight and token, and the rate and the step's time of the cost model above.

# %%
guess("the prompt's time over the answer's, times", None)

# %%
# NBVAL_CHECK_OUTPUT
most = at_paged["rows"]
weights, full_step = read_numbers(llama), a100.seconds(StepShape.decode([example.CONTEXT] * most))
history = example.CONTEXT - example.ANSWER
prompt_s = history * 2 * weights / a100.flops_per_s
answer_s = example.ANSWER * full_step / most
print(f"{weights / 1e9:.1f} billion weights, {a100.flops_per_s / 1e12:.0f} TFLOP/s, a full step of "
      f"{full_step * 1e3:.0f} ms")
print(f"prompt of {history:,} tokens {prompt_s:.2f} s, answer {answer_s:.2f} s: the prompt takes "
      f"{prompt_s / answer_s:.1f} times as long")

# %%
reveal("the prompt's time over the answer's, times", prompt_s / answer_s)

# %% [markdown]
# So with prompts computed, most of the GPU's time goes there, and the batch of the decodes matters less. The same
# three set-ups again, both ways, with shorter texts and fewer requests. (They are fewer than the third set-up has room
# for: compare within this table.) Predict: with prompts computed, how many times the static batch's tokens does the
# second make?

# %%
guess("prompts computed: paged over static batch, times", None)

# %%
few = {"requests": 64, "scale": 0.1} if QUICK else {"requests": 192, "scale": 0.5}
both_ways = {received: worked_example_rows(Service(prompts_received=received), **few) for received in (True, False)}
WAYS = {"way": "history", "setup": "set-up", "tokens_per_s": "tokens/s", "times_first": "times static",
        "ttft_p50_s": "TTFT p50, s", "latency_p99_s": "latency p99, s"}
ways = [{"way": "in the cache" if received else "computed", **row}
        for received, rows in both_ways.items() for row in rows]
print(text_table(ways, WAYS))

# %%
# NBVAL_CHECK_OUTPUT
gains = {received: {row["setup"]: row["times_first"] for row in rows} for received, rows in both_ways.items()}
cached_gain, computed_gain = (gains[received][at_paged["setup"]] for received in (True, False))
print("with prompts computed continuous batching and paging gain less, by a quarter or more:",
      computed_gain < 0.75 * cached_gain)

# %%
reveal("prompts computed: paged over static batch, times", computed_gain)

# %% [markdown]
# A service whose contexts are long earns more with prefix caching than with a larger batch. That is chapter 4's second
# half, and the articles do not put it into their table.
#
# ## Past which knee?
#
# From the second set-up to the third, twice the clients share the GPU. The articles say: past the compute knee, a third
# more tokens per second for two thirds more p99 latency. The floor said otherwise; what does the cost model say, which
# has a step's overhead and what an A100 really reaches? How many people fit at 8 bits is computed, as in chapter 8.
# Predict: how long is the step of the full 8-bit cache, over that of the full 16-bit one?

# %%
guess("step of the full 8-bit cache over the 16-bit one, times", None)

# %%
# NBVAL_CHECK_OUTPUT
fit = {kv: Service(kv_format=kv).capacity(example.CONTEXT).max_concurrent for kv in ("bf16", "int8")}
models = {"bf16": a100, "int8": CostModel.of_device("a100-80gb", llama, "int8")}
steps = []
for kv, rows in (("bf16", fit["bf16"]), ("int8", fit["bf16"]), ("int8", fit["int8"])):
    work = least_work(llama, kv, StepShape.decode([example.CONTEXT] * rows), models[kv].weight_bytes)
    steps.append({
        "kv": kv, "rows": rows, "weights": models[kv].weight_bytes / models[kv].bytes_per_s * 1e3,
        "cache": (work.bytes - models[kv].weight_bytes) / models[kv].bytes_per_s * 1e3,
        "arithmetic": work.flops / models[kv].flops_per_s * 1e3,
        "step": models[kv].seconds(StepShape.decode([example.CONTEXT] * rows)) * 1e3,
    })
print(text_table(steps, {"kv": "keys and values", "rows": "rows", "weights": "reading weights, ms",
                         "cache": "reading the cache, ms", "arithmetic": "arithmetic beside it, ms",
                         "step": "step, ms"}))
sixteen, few_at_eight, full = steps
print(f"{full['rows']} people at 8 bits wait as long for a token as {sixteen['rows']} at 16, within 3 %:",
      abs(full["step"] / sixteen["step"] - 1) < 0.03)
print(f"{few_at_eight['rows']} people at 8 bits wait less than 0.7 times as long:",
      few_at_eight["step"] < 0.7 * sixteen["step"])
print(f"the arithmetic of {full['rows']} rows takes {full['arithmetic'] / (full['weights'] + full['cache']):.0%} "
      "of the time of their reading")

# %%
reveal("step of the full 8-bit cache over the 16-bit one, times", full["step"] / sixteen["step"])

# %% [markdown]
# A full cache of 16-bit numbers and one of 8-bit numbers weigh the same, so a step takes as long for twice the people.
# The weights are read once for all rows, and their share of a row shrinks with the batch. The cache is not shared: each
# row brings its own to be read. So from some tens of rows on the step grows with the rows, and tokens per second
# flatten towards the bandwidth over the bytes of one row's cache. **This is the bend: the reading of keys and values,
# which a batch does not share.** It is not compute: the arithmetic of the fullest batch is done long before the
# reading. And half the bytes of a key move the bend out by a factor of two, which is why the third set-up makes nearly
# twice the tokens here, at the same latency:

# %%
one, two = at_paged, at_eight_bits
print(f"{paged['clients']} to {eight['clients']} clients: {eight['tokens_per_s'] / paged['tokens_per_s']:.2f} times "
      f"the tokens/s, {eight['latency_p99_s'] / paged['latency_p99_s']:.2f} times the p99 latency; the articles: "
      f"{two['tokens_per_s'] / one['tokens_per_s']:.2f} and {two['latency_p99_s'] / one['latency_p99_s']:.2f}")

# %% [markdown]
# The saved bytes can be spent once: on people, or on speed. Spent on people, they double the tokens per second and
# leave the latency as it is; spent on speed, as many people as before get their answers sooner. A knee of compute does
# exist on this device. It takes prompts (above), much shorter contexts (chapter 8 draws it), or several tokens a row
# (chapter 6).
#
# ## On your machine
#
# The same three set-ups with the real model and the real clock, at this machine's scale. Contexts are short, and all
# prompts are computed. The memory for keys and values holds a few full contexts; with 8 bits in place of 32 it holds
# nearly four times as many. (Of fewer than 100 requests, p99 is the longest.)
#
# Predict: how many times the tokens per second of the static batch, with pages, and with 8 bits as well?

# %%
guess("here: pages over static batch, tokens/s, times", None)
guess("here: pages and 8 bits over static batch, tokens/s, times", None)

# %%
sizes = {"requests": 8, "context": 48, "answer": 12, "static_batch": 2, "fit": 4} if QUICK else {
    "requests": 256, "context": 512, "answer": 128, "static_batch": 8, "fit": 64} if GPU else {}
here = example.three_setups(model, DEFAULT, **sizes)
HERE = {"setup": "set-up (measured here)", "clients": "clients", "mean_rows": "rows, mean", "tokens_per_s": "tokens/s",
        "times_static": "times static", "cost_per_million_output_tokens": "$ a million at $0.10 an hour"}
print(text_table(here.rows, HERE))
reveal("here: pages over static batch, tokens/s, times", here.rows[1]["times_static"])
reveal("here: pages and 8 bits over static batch, tokens/s, times", here.rows[2]["times_static"])

# %%
service_plots.side_by_side(
    here.rows, "setup", {"tokens_per_s": "tokens/s", "ttft_p50_s": "TTFT p50, s", "latency_p99_s": "latency p99, s"},
    f"Here: {here.rows[1]['times_static']:.1f} times a static batch with pages, "
    f"{here.rows[2]['times_static']:.1f} times with 8 bits as well",
)

# %%
# NBVAL_CHECK_OUTPUT
print("clients that fit grow with each set-up:", here.rows[0]["clients"] <= here.rows[1]["clients"]
      < here.rows[2]["clients"])
print("rows that worked, on average, grow too:", here.rows[0]["mean_rows"] < here.rows[1]["mean_rows"]
      < here.rows[2]["mean_rows"])

# %% [markdown]
# ## Claims of the ledger that this page settles
#
# By the [ledger](CLAIMS.md)'s own rules: G in virtual time, where the full sizes decide, since the test sizes have
# short contexts; H by arithmetic on the articles' own figures.

# %%
print(ledger(dict.fromkeys(("G1", "G2", "G3"), virtual.rows) | dict.fromkeys(("H1", "H2", "H3", "H4", "H5"), theirs)))

# %%
guesses()  # yours, the nearest first

# %% [markdown]
# ## What a production engine calls this
#
# | here | elsewhere |
# |---|---|
# | closed loop of n clients | `--max-concurrency n` of `vllm bench serve` and of SGLang's `bench_serving` |
# | tokens/s | "output token throughput"; "total" counts prompts as well and looks larger: read which |
# | cost of a million tokens | what API prices are quoted in, separately for input, cached input and output |
# | history in the cache | "prompt caching", "context caching", at a lower price per token |
#
# ## Exercise
#
# An H100 costs $4.00 an hour and reads 3.35 TB/s, an A100 2.04. Its memory is the same 80 GB. With 111 people at
# 4,096 tokens, which of the two makes the cheaper token? Decide first, then let the cell compute.
# [Exercise 1](../exercises/01_step_cost.ipynb) has the sums behind it.

# %%
cheaper = None  # "a100-80gb" or "h100"

prices = {"a100-80gb": 2.9, "h100": 4.0}
bills = {
    name: metrics.cost_per_million_tokens(
        most / CostModel.of_device(name, llama).seconds(StepShape.decode([example.CONTEXT] * most)), price)
    for name, price in prices.items()
}
right = min(bills, key=bills.get)
print("not answered yet" if cheaper is None else "right" if cheaper == right else "no: divide price by speed")

# %% [markdown]
# [How these pages are made](README.md) · before: [9 · Latency or throughput](09_latency_or_throughput.ipynb) · next:
# [11 · Diagnose](11_diagnose.ipynb)
