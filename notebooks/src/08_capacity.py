# %% [markdown]
# # 8 · Capacity
#
# How many people can one GPU serve concurrently? The weights take their part of the memory once. What is left holds
# keys and values, and these grow with every person and every token. So the cache *is* the capacity.
#
# **You will learn**
# - to do the sum: memory, less weights, less overhead, over the cache of one request;
# - what doubles the result: context, grouped heads, fewer bits;
# - to check the sum with the scheduler that will live in it;
# - what a server looks like that is out of cache, and why more room is not always more speed.
#
# **To run this page**: `make lab` in the repository, or `pip install -e ".[lab]"` and open the notebook. Nothing here
# needs a GPU: counts come from the real scheduler, times from virtual time, and one picture from this machine.

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

from minillm import Engine, RequestError, SamplingParams
from minillm.course.experiments import common, memory, service
from minillm.course.setting import Setting
from minillm.course.show import capacity_plots, plots
from minillm.course.show.explore import explore_capacity
from minillm.course.show.guesses import guess, guesses, reveal
from minillm.course.show.recorded import ledger
from minillm.course.show.source import show_source
from minillm.course.show.tables import text_table
from minillm.course.show.widgets import capacity_explorer
from minillm.ladder.quantized import kv_bytes_per_token, kv_storage
from minillm.load.config import ModelConfig
from minillm.measure import fleet
from minillm.measure.capacity import capacity
from minillm.measure.roofline import StepShape
from minillm.measure.service import Service
from minillm.measure.virtual import CostModel

QUICK = os.environ.get("MINILLM_QUICK") == "1"  # small sizes, for tests
setting = Setting(quick=QUICK)
llama = ModelConfig.preset("llama-3.1-8b")

# %% [markdown]
# ## Predict
#
# A GPU has 80 GB (10⁹ bytes each). A model of 8 billion weights takes 16 GB in 16 bits. Activations, workspaces and the
# runtime take 4 GB. Each request has a context of 4,096 tokens, and Llama-3.1-8B keeps 131,072 bytes a token.
#
# How many requests concurrently? Write it down. And how many with 8 bits per key and value?

# %%
guess("requests with 16 bits", None)
guess("requests with 8 bits", None)

# %% [markdown]
# ## Build
#
# The whole sum. `rule_of_thumb` is what "half the bits, twice the people" promises.

# %%
show_source(capacity)

# %%
# NBVAL_CHECK_OUTPUT
cache = 80 - 16 - 4
request = 4096 * kv_bytes_per_token(llama, "bf16") / 1e9
print(f"80 - 16 - 4 = {cache} GB for the cache; one request {request:.3f} GB; {cache} / {request:.3f} = "
      f"{cache / request:.1f}, so {int(cache / request)} requests")
for kv_format in ("bf16", "int8"):
    fits = capacity("llama-3.1-8b", 80, 16, 4, 4096, kv_format)
    print(f"{kv_format}: {fits.request_gb:.3f} GB a request, {fits.max_concurrent} at once; "
          f"the rule of thumb says {fits.rule_of_thumb}")
own = capacity("llama-3.1-8b", 80, None, 4, 4096, "int8")
print(f"with the {own.weights_gb:.2f} GB that Llama-3.1-8B's weights really take, int8: {own.max_concurrent}")

# %%
reveal("requests with 16 bits", capacity("llama-3.1-8b", 80, 16, 4, 4096, "bf16").max_concurrent)
reveal("requests with 8 bits", fits.max_concurrent)

# %% [markdown]
# 8 bits are a little more than half of 16: each key and each value of 128 numbers also stores a scale, of 16 bits. So
# the sum says less than the rule of thumb. (And Llama-3.1-8B has some more than 8 billion weights, which cost one
# request.)
#
# ## Does the memory agree?
#
# What PyTorch allocates for 1,000 tokens of the small model, in each format, against the sum:

# %%
# NBVAL_CHECK_OUTPUT
small = ModelConfig.preset("smollm2-135m")
for kv_format in ("fp32", "bf16", "fp8", "int8", "int4"):
    per_token = kv_bytes_per_token(small, kv_format)
    allocated = kv_storage(small, kv_format, 1000).nbytes
    print(f"{kv_format}: {per_token:>6,} bytes a token, {per_token / kv_bytes_per_token(small, 'bf16'):.3f} of bf16; "
          f"allocated is 1,000 times that: {allocated == 1000 * per_token}")

# %% [markdown]
# ## Does the scheduler agree?
#
# 256 requests arrive together at the engine of chapters 2 to 4, with a pool of 60 GB. The forward pass is left out, so
# no such memory is needed; scheduler, pool and block tables are the real ones. How many does it run concurrently?

# %%
show_source(service.fill)

# %%
# NBVAL_CHECK_OUTPUT
pool_bytes = 60 * 10**9
for kv_format in ("bf16", "int8"):
    ran = service.fill(llama, kv_format, pool_bytes, kv="slots").peaks["rows"]
    fits = capacity("llama-3.1-8b", 80, 16, 4, 4096, kv_format).max_concurrent
    print(f"{kv_format}, a slot for each: {ran} at once; as the sum says: {ran == fits}")

# %% [markdown]
# ## The levers
#
# Five changes, one at a time. Which double the number, or nearly? Mark them before you run the cell: (a) half the
# context, (b) 8-bit keys and values, (c) 4-bit weights, (d) no grouped heads (32 KV heads in place of 8), (e) a GPU
# with twice the memory.

# %%
LEVERS = {"a": "half the context", "b": "8-bit keys and values", "c": "4-bit weights",
          "d": "a KV head for each query head", "e": "twice the memory"}
for name, about in LEVERS.items():
    guess(f"({name}) {about}: times the requests", None)

# %%
# NBVAL_CHECK_OUTPUT
def fits(memory=80, weights=16, context=4096, kv_format="bf16", config=llama):
    return capacity(config, memory, weights, 4, context, kv_format).max_concurrent


ungrouped = replace(llama, num_key_value_heads=llama.num_attention_heads)
levers = {
    "as it was": fits(), "(a) half the context": fits(context=2048),
    "(b) 8-bit keys and values": fits(kv_format="int8"), "(c) 4-bit weights": fits(weights=4.5),
    "(d) a KV head for each query head": fits(config=ungrouped), "(e) twice the memory": fits(memory=160),
    "    4-bit keys and values": fits(kv_format="int4"),
    "    a, b and c together": fits(weights=4.5, context=2048, kv_format="int8"),
}
for change, number in levers.items():
    print(f"{change:<34} {number:>4} requests, {number / levers['as it was']:.2f} times")

# %%
for name, about in LEVERS.items():
    reveal(f"({name}) {about}: times the requests", levers[f"({name}) {about}"] / levers["as it was"])

# %% [markdown]
# Twice the memory more than doubles it: the weights are there already. Quantised weights give little here, since the
# weights are the smaller part; on a GPU of 24 GB it is the other way round. Try that, and others:

# %%
capacity_explorer()

# %% [markdown]
# Left: who has the memory. In the middle and right: what a step with so many requests costs by the data sheet, and
# where the memory ends (grey).

# %%
contexts = [2**n for n in range(9, 18)]
FORMATS = {"bf16": "16 bits", "int8": "8 bits", "int4": "4 bits, groups of 32"}
plots.curves(
    {label: (contexts, [fits(context=context, kv_format=f) for context in contexts]) for f, label in FORMATS.items()},
    f"Llama-3.1-8B on 80 GB: {fits():,} people at 4,096 tokens, {fits(context=131072)} at 131,072; "
    f"with 4 bits {fits(context=131072, kv_format='int4')}",
    "tokens of context", "requests at once", log_x=True, log_y=True,
)

# %% [markdown]
# ## Three GPUs
#
# Memory decides how many fit, bandwidth how fast they are served. The same model on three GPUs, each as full as it
# can be with 4,096 tokens for each. The H200 has 141 GB where the H100 has 80, and reads 4.80 TB/s where that reads
# 3.35. Predict: how many times the tokens per second of the H100 does it give? And the H100 with 8-bit keys and values,
# of itself with 16?

# %%
guess("H200 over H100: times the tokens/s", None)
guess("H100, 8 bits over 16: times the tokens/s", None)

# %%
DEVICE_NAMES = ("a100-80gb", "h100", "h200")
rows = []
for device in DEVICE_NAMES:
    for kv_format in ("bf16", "int8"):
        number = explore_capacity(device, "llama-3.1-8b", 4096, kv_format).fits
        seconds = CostModel.of_device(device, llama, kv_format).seconds(StepShape.decode([4096] * number))
        rows.append({"device": device, "kv_format": kv_format, "fits": number, "step_ms": seconds * 1e3,
                     "tokens_per_s": number / seconds})
GPUS = {"device": "virtual time on", "kv_format": "keys and values", "fits": "requests that fit",
        "step_ms": "step, ms", "tokens_per_s": "tokens/s"}
print(text_table(rows, GPUS))

# %%
# NBVAL_CHECK_OUTPUT
by = {(row["device"], row["kv_format"]): row for row in rows}
for device in DEVICE_NAMES:
    plain, eight = by[device, "bf16"], by[device, "int8"]
    print(f"{device}: {eight['fits'] / plain['fits']:.2f} times the requests with 8 bits;",
          "each waits no longer for its next token:", eight["step_ms"] < 1.1 * plain["step_ms"])
h100, h200 = by["h100", "bf16"], by["h200", "bf16"]
print(f"H200 over H100: {h200['fits'] / h100['fits']:.2f} times the requests, "
      f"{h200['tokens_per_s'] / h100['tokens_per_s']:.2f} times the tokens/s")
plain, eight = by["a100-80gb", "bf16"], by["a100-80gb", "int8"]
print(f"A100: {eight['fits']} requests at 8 bits take {eight['step_ms'] / plain['step_ms']:.2f} times the step of "
      f"{plain['fits']} at 16")

# %%
reveal("H200 over H100: times the tokens/s", h200["tokens_per_s"] / h100["tokens_per_s"])
reveal("H100, 8 bits over 16: times the tokens/s", by["h100", "int8"]["tokens_per_s"] / h100["tokens_per_s"])

# %% [markdown]
# The H200 gains more than its bandwidth: its larger memory lets more requests share one reading of the weights.
#
# Full caches of equal bytes take equal time to read, whatever number of requests they belong to. This is the second
# gain of a smaller cache. It holds where the kernel reads 8 bits as fast as 16, which not every kernel does.
#
# ## A server that is out of cache
#
# An A100 with the same model, but only 9 GB left for the cache: a second model sits on the card. Chats arrive, ten a
# second. The server refuses a request that finds eight others in the queue. Three settings, virtual time. Which share
# of the requests does each refuse? Guess.

# %%
for setup in ("slots", "pages", "pages, 8 bits"):
    guess(f"share refused with {setup}", None)  # 0 to 1

# %%
show_source(fleet.serve)

# %%
items = service.chats(80 if QUICK else 300, rate=10.0)
setups = (("slots", "slots", "bf16"), ("pages", "paged", "bf16"), ("pages, 8 bits", "paged", "int8"))
loads = []
for name, kv, kv_format in setups:
    server = Service(kv_format=kv_format, kv=kv, kv_memory=9 * 10**9, max_waiting=8)
    loads.append({"setup": name, **service.under_load(server, items)})
LOADS = {"setup": "cache", "refused_share": "refused, share", "cache_peak_share": "most of cache held", "mfu": "MFU",
         "busy_share": "busy", "tokens_per_s": "tokens/s"}
print(text_table(loads, LOADS))
for row in loads:
    reveal(f"share refused with {row['setup']}", row["refused_share"])

# %%
# NBVAL_CHECK_OUTPUT
slots, pages, eight = loads
print("the arithmetic units were at most 60 % in use, in every setup:", all(row["mfu"] <= 0.6 for row in loads))
print("fewer are refused with pages, and no more with 8 bits:", slots["refused"] > pages["refused"] >= eight["refused"])
print("a GPU utilisation gauge would have said over 95 % each time:", all(row["busy_share"] > 0.95 for row in loads))

# %% [markdown]
# The gauge says "busy", the arithmetic units are half idle, and people are turned away. The number that tells is the
# share of the cache that is held. (Slots never hold all of it: what is free is not one run that is long enough.) The
# cure is in the cache as well: pages, or fewer bits.
#
# ## One request that cannot run
#
# A request that is longer than everything is refused immediately, with the numbers that clash. The engine computes this
# before anything is queued.

# %%
engine = Engine(None, executor=common.NoForward(small), kv_format="fp32", max_context=1024,
                kv_memory=64 * 16 * kv_bytes_per_token(small, "fp32"))
refusal = ""
try:
    engine.add(list(range(900)), SamplingParams(max_tokens=200))
except RequestError as error:
    refusal = str(error)
print(refusal)

# %%
# NBVAL_CHECK_OUTPUT
print("it names prompt, answer and limit:", all(number in refusal for number in ("900", "200", "1,024")))
print("and nothing was queued:", not engine.has_work)

# %% [markdown]
# ## Where it loses
#
# **Pages promise less than the sum.** The sum gives every request its full context. Pages admit a request when its
# prompt fits, and its answer must find blocks later. So more start than the sum has room for, and some of them are
# preempted (chapter 4):

# %%
# NBVAL_CHECK_OUTPUT
records = service.fill(llama, "bf16", pool_bytes, kv="paged", answer=100)
print(f"pages: {records.peaks['rows']} at once at the peak, where the sum says {fits()}; "
      f"{records.totals['preempted']} preempted, and {records.totals['recomputed_tokens']:,} tokens computed twice")

# %% [markdown]
# **Room is not speed.** Doubling the requests doubles the throughput only as long as a step takes no longer. With
# short contexts the cache is small beside the weights, and the bend comes late; with long ones each further request
# lengthens the step by the time to read its cache.
#
# Predict for an A100: at how many requests of 4,096 tokens does a step take twice as long as with one?

# %%
guess("requests of 4,096 tokens at which a step takes twice as long", None)

# %%
curve = {context: explore_capacity("a100-80gb", "llama-3.1-8b", context, "bf16") for context in (512, 4096)}
a100 = CostModel.of_device("a100-80gb", llama)


def throughput(context, most):
    """(requests, tokens per second) from one request to as many as fit."""
    rows = sorted({*(1, 2, 4, 8, 16, 32, 64, 256, 512), *(found.fits for found in curve.values())})
    rows = [n for n in rows if n <= most]
    return rows, [n / a100.seconds(StepShape.decode([context] * n)) for n in rows]


plots.curves(
    {f"{context:,} tokens each, {found.fits:,} fit": throughput(context, found.fits)
     for context, found in curve.items()},
    f"A step takes twice as long at {curve[512].doubled_at:,.0f} requests of 512 tokens, "
    f"and already at {curve[4096].doubled_at:,.0f} of 4,096 (A100, by its data sheet)",
    "requests in a step, up to where memory ends", "tokens per second", log_x=True, log_y=True,
)

# %%
reveal("requests of 4,096 tokens at which a step takes twice as long", curve[4096].doubled_at)

# %%
# NBVAL_CHECK_OUTPUT
most = fits()
half, whole = (a100.seconds(StepShape.decode([4096] * n)) for n in (most // 2, most))
print(f"from {most // 2} to {most} requests of 4,096 tokens: twice the requests, but less than 1.5 times the tokens/s:",
      most / whole < 1.5 * (most // 2) / half)
print("and everybody's next token comes later:", whole > half)

# %% [markdown]
# ### Three kinds of knee
#
# A step reads the weights, once for all rows. It reads the keys and values of each row. It multiplies, for each row.
# And it has a fixed overhead. Only the first and the last are shared by the rows, so sooner or later something
# overtakes them. Which, depends on the context:

# %%
sheet, here = capacity_plots.by_data_sheet(), capacity_plots.this_machine(setting)
bends = {context: capacity_plots.knees(sheet, context) for context in sheet.contexts()}
short, middle, long = bends.values()
capacity_plots.step_parts(
    {"Llama-3.1-8B, A100": sheet, "SmolLM2, this machine": here},
    f"A100: with 512 tokens each, arithmetic overtakes the weights at {short.arithmetic} rows; with 4,096, keys and "
    f"values do at {middle.cache}; with 16,384 at {long.cache}, and memory ends at {long.memory}",
)

# %%
# NBVAL_CHECK_OUTPUT
for context, knee in bends.items():
    print(f"{context:>6,} tokens each: arithmetic takes longer than the weights from {knee.arithmetic} rows on, "
          f"keys and values from {knee.cache}; memory ends at {knee.memory}")
small_bends = [capacity_plots.knees(here, context) for context in here.contexts()]
print("SmolLM2, on any device: keys and values take longer than the weights from",
      ", ".join(f"{knee.cache} rows of {context:,} tokens" for context, knee in
                zip(here.contexts(), small_bends, strict=True)))

# %% [markdown]
# Upper row: the A100 reads and multiplies concurrently, so the step (black) follows the longer of the two. Lower row:
# the cores of a CPU do one after the other, so the step is their sum; its ceilings were measured just now, memory ends
# where this package's engine ends by itself, and the fixed part is what one measured step of one row takes beyond
# reading and multiplying (chapter 0).
#
# - **Arithmetic overtakes the weights.** This is the knee that most texts mean. On a GPU it takes short contexts, where
#   many rows fit; a CPU multiplies slowly for what it reads, and meets it sooner. A faster multiplier, or fewer tokens
#   fed, moves it.
# - **Keys and values overtake the weights.** A batch does not share them, so from here on more rows hardly mean more
#   tokens per second. Only fewer bytes a token move it: shorter contexts, grouped heads, fewer bits.
# - **Memory ends.** With long contexts this comes soonest after the second. More memory, or again fewer bytes a token.
#
# Where two devices share a model and a format, the second knee lies at the same number of rows: both readings run at
# one bandwidth, and it cancels.

# %% [markdown]
# ## Claims of the ledger that this page settles
#
# By the [ledger](CLAIMS.md)'s own rules. All of them are arithmetic or virtual time on an A100, but C6: what 8 bits
# cost in quality is measured (chapter 5).

# %%
sums = memory.capacity_sum(setting).rows
print(ledger({**dict.fromkeys(("C1", "C2", "C5", "C7", "C10"), sums), "C4": memory.out_of_cache(setting).rows,
              "C6": None}))

# %%
guesses()  # yours, the nearest first

# %% [markdown]
# ## What a production engine calls this
#
# | here | vLLM | SGLang |
# |---|---|---|
# | memory for weights and cache | `--gpu-memory-utilization` | `--mem-fraction-static` |
# | tokens that fit | "GPU KV cache size: … tokens" in the log | `max_total_num_tokens` in the log |
# | requests at full context | "Maximum concurrency for … tokens per request" | |
# | context | `--max-model-len` | `--context-length` |
# | bits per key and value | `--kv-cache-dtype fp8` | `--kv-cache-dtype fp8_e4m3` |
# | most rows in a step | `--max-num-seqs` | `--max-running-requests` |
# | share of the cache held | `vllm:kv_cache_usage_perc` | `sglang:token_usage` |
#
# ## Exercise
#
# You have one L4 (24 GB) and want to serve Llama-3.1-8B to 20 people with 4,096 tokens each. The overhead is 2 GB. Find
# bits for the weights (4 take 4.5 GB with their scales, 8 take 8 GB) and for the cache that do it. The check computes
# with your choice. In [exercise 1](../exercises/01_step_cost.ipynb) you write the sum itself.

# %%
weights_in_gb, kv_bits = 16, "bf16"

people = capacity("llama-3.1-8b", 24, weights_in_gb, 2, 4096, kv_bits).max_concurrent
print(f"{people} people: {'enough' if people >= 20 else 'not enough yet'}")

# %% [markdown]
# [How these pages are made](README.md) · before: [7 · Serving metrics](07_serving_metrics.ipynb) · next:
# [9 · Latency or throughput](09_latency_or_throughput.ipynb)
