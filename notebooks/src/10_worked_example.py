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
# | p99 latency | | 4.1 s | 6.8 s |
#
# This chapter does the sums, runs the three in virtual time on an A100, and runs them on your machine.
#
# **You will learn**
# - to turn tokens per second into money;
# - where the factor 9 comes from, and what it silently assumes about prompts;
# - why the last step buys throughput and sells latency;
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
from minillm.course.experiments.example import beside_the_articles, worked_example_rows
from minillm.course.setting import Setting
from minillm.course.show import plots, service_plots
from minillm.course.show.live import progress
from minillm.course.show.recorded import ledger
from minillm.course.show.source import show_source
from minillm.course.show.tables import text_table
from minillm.load.source import DEFAULT
from minillm.measure.measurement import device_name
from minillm.measure.roofline import StepShape
from minillm.measure.service import PRICE, Service
from minillm.measure.virtual import CostModel

QUICK = os.environ.get("MINILLM_QUICK") == "1"  # small sizes, for tests
setting = Setting(quick=QUICK, progress=progress)
model = setting.model
GPU = setting.gpu
print(device_name(model.device))

# %% [markdown]
# ## Money
#
# A GPU costs $2.90 an hour, busy or not. Predict the cost of a million output tokens at 310 and at 2,850 tokens per
# second.

# %%
my_guess = {"310 tokens/s": None, "2,850 tokens/s": None}

# %%
show_source(metrics.cost_per_million_tokens)

# %%
# NBVAL_CHECK_OUTPUT
dear, cheap = (metrics.cost_per_million_tokens(rate, 2.9) for rate in (310, 2850))
print(f"${dear:.2f} and ${cheap:.2f}: {1 - cheap / dear:.0%} less")
implied = [cost * rate * 3600 / 1e6 for cost, rate in ((2.60, 310), (0.28, 2850))]
print(f"the price an hour that $2.60 and $0.28 imply: ${implied[0]:.2f} and ${implied[1]:.2f}")

# %% [markdown]
# Nothing but tokens per hour is in this number. So the cost falls with the achieved batch, as long as a step hardly
# grows. By the data sheet, with 4,096 tokens in each context:

# %%
llama = ModelConfig.preset("llama-3-8b")
batches = (1, 2, 4, 8, 16, 32, 64, 111)
a100 = CostModel.of_device("a100-80gb", llama)
rates = [n / a100.seconds(StepShape.decode([4096] * n)) for n in batches]
costs = [metrics.cost_per_million_tokens(rate, PRICE) for rate in rates]
plots.curves(
    {"Llama-3-8B on an A100": (batches, costs)},
    f"A million tokens cost ${costs[0]:.2f} from a batch of one, ${costs[3]:.2f} from eight, ${costs[-1]:.2f} from 111",
    "rows in the step", "dollars for a million output tokens", log_x=True, log_y=True,
)

# %% [markdown]
# ## In virtual time
#
# As many clients as the cache holds (chapter 8), each of whom asks again when answered. Their histories are in the
# cache already, so that only answers are computed: this is what the articles' figures imply.
#
# Predict from the curve: how many times the tokens of the static batch of 8 does the second set-up make?

# %%
my_guess = None

# %%
show_source(worked_example_rows)

# %%
virtual = example.worked_example(setting)
EXAMPLE = {"setup": "set-up (virtual time, A100)", "clients": "clients", "mean_rows": "rows, mean",
           "tokens_per_s": "tokens/s", "times_first": "times static", "ttft_p50_s": "TTFT p50, s",
           "latency_p99_s": "latency p99, s", "cost_per_million_output_tokens": "$ a million"}
print(text_table(virtual.rows, EXAMPLE))

# %% [markdown]
# Beside the articles' own figures, which nobody measured here:

# %%
beside = beside_the_articles(virtual.rows)
print(text_table(beside, {column: column.replace("continuous, paged, 8-bit KV", "8-bit KV") for column in beside[0]}))

# %%
static, paged, eight = virtual.rows
service_plots.side_by_side(
    virtual.rows, "setup", {"tokens_per_s": "tokens/s", "cost_per_million_output_tokens": "$ a million tokens",
                            "latency_p99_s": "latency p99, s"},
    f"Continuous and paged: {paged['times_first']:.1f} times the tokens of a static batch of 8, at "
    f"{paged['cost_per_million_output_tokens'] / static['cost_per_million_output_tokens']:.0%} of the cost",
)

# %%
# NBVAL_CHECK_OUTPUT
print("tokens/s rise from each set-up to the next:",
      static["tokens_per_s"] < paged["tokens_per_s"] < eight["tokens_per_s"])
print("the cost falls by the same factor:",
      abs(static["cost_per_million_output_tokens"] / paged["cost_per_million_output_tokens"]
          - paged["tokens_per_s"] / static["tokens_per_s"]) < 1e-6)

# %% [markdown]
# The articles' static server makes 310 tokens per second; ours in virtual time makes more, since it wastes no time
# between its steps. A slower start makes a larger factor. And here all clients queue for eight rows, so the first
# token takes long; the articles do not say how many asked.
#
# ## Where it loses: somebody must read the prompts
#
# 3,796 tokens of history before 300 tokens of answer. If the history is *not* in the cache, it must be computed. How
# long does the A100 compute for one request's prompt, and how long for its answer, if a full step of 111 rows is
# shared? Take 2 FLOP a weight and token, 7.5 · 10⁹ weights, 250 TFLOP/s; and 44 ms a step.

# %%
# NBVAL_CHECK_OUTPUT
prompt_s, answer_s = 3796 * 2 * 7.5e9 / 250e12, 300 * 0.044 / 111
print(f"prompt {prompt_s:.2f} s, answer {answer_s:.2f} s: the prompt takes {prompt_s / answer_s:.1f} times as long")

# %% [markdown]
# So with prompts computed, most of the GPU's time goes there, and the batch of the decodes matters less. The same
# three set-ups again, both ways, with shorter texts and fewer requests. (They are fewer than the third set-up has room
# for: compare within this table.) Predict: with prompts computed, how many times the static batch's tokens does the
# second make?

# %%
my_guess = None

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
cached_gain, computed_gain = (both_ways[received][1]["times_first"] for received in (True, False))
print("with prompts computed continuous batching and paging gain less, by a quarter or more:",
      computed_gain < 0.75 * cached_gain)

# %% [markdown]
# A service whose contexts are long earns more with prefix caching than with a larger batch. That is chapter 4's second
# half, and the articles do not put it into their table.
#
# ## Past the knee
#
# From the second set-up to the third, twice the clients share the GPU. Here are the same settings at full size, with
# a step's time by the data sheet: a full cache of 16-bit numbers and one of 8-bit numbers weigh the same, so a step
# takes as long for twice the people. If the third is served to as *many* people as the second, it is faster instead:

# %%
# NBVAL_CHECK_OUTPUT
int8 = CostModel.of_device("a100-80gb", llama, "int8")
step = {(kv, n): cost.seconds(StepShape.decode([4096] * n)) for kv, cost in (("bf16", a100), ("int8", int8))
        for n in (111, 219)}
print("219 people at 8 bits wait as long for a token as 111 at 16, within 3 %:",
      abs(step["int8", 219] / step["bf16", 111] - 1) < 0.03)
print("111 people at 8 bits wait less than 0.7 times as long:", step["int8", 111] < 0.7 * step["bf16", 111])

# %% [markdown]
# The saved bytes can be spent once: on people, or on speed. The articles spend them on people, and p99 rises from 4.1
# to 6.8 s.
#
# ## On your machine
#
# The same three set-ups with the real model and the real clock, at this machine's scale. Contexts are short, and all
# prompts are computed. The memory for keys and values holds a few full contexts; with 8 bits in place of 32 it holds
# nearly four times as many. (Of fewer than 100 requests, p99 is the longest.)
#
# Predict: how many times the tokens per second of the static batch, with pages, and with 8 bits as well?

# %%
my_guess = {"pages": None, "8 bits": None}

# %%
sizes = {"requests": 8, "context": 48, "answer": 12, "static_batch": 2, "fit": 4} if QUICK else {
    "requests": 256, "context": 512, "answer": 128, "static_batch": 8, "fit": 64} if GPU else {}
here = example.three_setups(model, DEFAULT, **sizes)
HERE = {"setup": "set-up (measured here)", "clients": "clients", "mean_rows": "rows, mean", "tokens_per_s": "tokens/s",
        "times_static": "times static", "ttft_p50_s": "TTFT p50, s", "latency_p99_s": "latency p99, s",
        "cost_per_million_output_tokens": "$ a million at $0.10 an hour"}
print(text_table(here.rows, HERE))

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
# By the ledger's own rules, in virtual time. The full sizes decide; the test sizes have short contexts.

# %%
print(ledger(dict.fromkeys(("G1", "G2", "G3"), virtual.rows)))

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
# An H100 costs $4.00 an hour and reads 1.64 times as fast as an A100. Its memory is the same 80 GB. With 111 people at
# 4,096 tokens, which of the two makes the cheaper token? Decide first, then let the cell compute.
# [Exercise 1](../exercises/01_step_cost.ipynb) has the sums behind it.

# %%
cheaper = None  # "a100-80gb" or "h100"

prices = {"a100-80gb": 2.9, "h100": 4.0}
bills = {
    name: metrics.cost_per_million_tokens(
        111 / CostModel.of_device(name, llama).seconds(StepShape.decode([4096] * 111)), price)
    for name, price in prices.items()
}
right = min(bills, key=bills.get)
print("not answered yet" if cheaper is None else "right" if cheaper == right else "no: divide price by speed")

# %% [markdown]
# [How these pages are made](README.md) · before: [9 · Latency or throughput](09_latency_or_throughput.ipynb) · next:
# [11 · Diagnose](11_diagnose.ipynb)
