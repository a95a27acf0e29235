# %% [markdown]
# # 14 · What the articles leave out
#
# The two articles that this course tests speak of one dense model on one GPU, with short answers, judged by tokens per
# second. Most servers of today differ in at least one of these. This page does the sums for five such differences.
#
# **You will learn**
# - what four designs of attention leave in the cache for each token, and what that does to the batch;
# - why a mixture of experts is cheap for one request, and loses that in a batch;
# - what it costs to split one model over 2, 4 or 8 GPUs;
# - why the rate with the most tokens per second is not the one that serves the most people in time;
# - what answers of thousands of tokens do to memory and queue.
#
# Everything here is **arithmetic or virtual time**: published geometries, data sheets, and the real scheduler with
# steps as long as a data sheet says. Nothing is measured, so the figures are the same on every machine.
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

import numpy as np

from minillm.course.experiments import beyond, service
from minillm.course.show import beyond_plots, plots, service_plots
from minillm.course.show.guesses import guess, guesses, reveal
from minillm.course.show.source import show_source
from minillm.course.show.tables import text_table
from minillm.load.config import ModelConfig
from minillm.measure.capacity import GB
from minillm.measure.roofline import StepShape
from minillm.measure.service import Service
from minillm.measure.virtual import DEVICES, CostModel

QUICK = os.environ.get("MINILLM_QUICK") == "1"  # small sizes, for tests
llama = ModelConfig.preset("llama-3.1-8b")

# %% [markdown]
# ## A · Keys and values are not shared by a batch
#
# Rows of a batch share one read of the weights. Each row reads its own keys and values (chapter 8). So past some
# context the cache decides both how many rows fit and how long a step takes, and models are built to store less:
#
# - **multi-head**: a key and a value for each query head;
# - **grouped-query**: several query heads share one (chapter 8's lever d);
# - **sliding window**: a layer keeps the last W tokens only; some models do this in all layers, some in most;
# - **multi-head latent attention** (MLA): one latent vector for all heads, from which keys and values are computed
#   again, and one key with the position.
#
# Predict, at a context of 32,768 tokens and for the same bytes of cache: how many times the requests of multi-head
# Llama-2-7B does Llama-3.1-8B hold? And DeepSeek-V3, with 61 layers and a latent of 512 numbers?

# %%
guess("grouped-query, times the requests of multi-head", None)
guess("MLA, times the requests of multi-head", None)

# %% [markdown]
# These are the numbers of five `config.json` files (the repositories are named in the second column of the table
# below). Write what a request stores.

# %%
CONFIGS = {
    "multi-head, Llama-2-7B": {"num_hidden_layers": 32, "num_key_value_heads": 32, "head_dim": 128},
    "grouped, Llama-3.1-8B": {"num_hidden_layers": 32, "num_key_value_heads": 8, "head_dim": 128},
    "window, Mistral-7B v0.1": {"num_hidden_layers": 32, "num_key_value_heads": 8, "head_dim": 128,
                                "sliding_window": 4096, "sliding_window_pattern": None},
    "5 of 6 windowed, Gemma-3-12B": {"num_hidden_layers": 48, "num_key_value_heads": 8, "head_dim": 256,
                                     "sliding_window": 1024, "sliding_window_pattern": 6},
    "latent (MLA), DeepSeek-V3": {"num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64},
}


def stored_bytes(config, context):
    """Bytes that a request of `context` tokens holds, at 16 bits a number."""
    if "kv_lora_rank" in config:  # a latent, and a key that RoPE has turned
        numbers = config["kv_lora_rank"] + config["qk_rope_head_dim"]
    else:
        numbers = 2 * config["num_key_value_heads"] * config["head_dim"]
    tokens = 0
    for layer in range(1, config["num_hidden_layers"] + 1):
        every = config.get("sliding_window_pattern")  # each layer with this number as a factor keeps all tokens
        windowed = "sliding_window" in config and not (every and layer % every == 0)
        tokens += min(context, config["sliding_window"]) if windowed else context
    return 2 * numbers * tokens


# %%
# NBVAL_CHECK_OUTPUT
contexts = [2**n for n in range(8, 18)]
print("as the package counts, at every context:", all(
    stored_bytes(config, context) == beyond.CACHES[name].bytes(context)
    for name, config in CONFIGS.items() for context in contexts))
for name, config in CONFIGS.items():
    each = ", ".join(f"{stored_bytes(config, context) // context:,}" for context in (1024, 32_768, 131_072))
    print(f"{name}: {each} bytes a token at 1,024, 32,768 and 131,072 tokens")

# %%
many, few = (stored_bytes(CONFIGS[name], 131_072) / 1e9 for name in ("multi-head, Llama-2-7B",
                                                                    "latent (MLA), DeepSeek-V3"))
plots.curves(
    {name: (contexts, [stored_bytes(config, context) / context / 1024 for context in contexts])
     for name, config in CONFIGS.items()},
    f"A request of 131,072 tokens holds {many:.0f} GB with multi-head attention, {few:.1f} GB in a latent; windows "
    "make a token cheaper the longer the text",
    "tokens of context", "KiB of cache for each token", log_x=True, log_y=True,
)

# %% [markdown]
# Two consequences: the requests that fit into 60 GB of cache, at three contexts, and the time that an H100 takes to
# read the keys and values of 16 requests of 32k in one step. The weights stay out of it: only the caches are compared.

# %%
bandwidth = CostModel.of_device("h100", llama).bytes_per_s
rows = []
for name, config in CONFIGS.items():
    fits = {f"fits_{context}": 60 * GB // stored_bytes(config, context) for context in (4096, 32_768, 131_072)}
    read_ms = 16e3 * stored_bytes(config, 32_768) / bandwidth
    rows.append({"name": name, "source": beyond.CACHES[name].source, **fits, "read_ms": read_ms})
print(text_table(rows, {"name": "attention, model", "source": "config.json of", "fits_4096": "fit: 4k",
                        "fits_32768": "32k", "fits_131072": "128k", "read_ms": "16 rows of 32k: ms"}))

# %%
at_32k = {row["name"].split(",")[0]: row["fits_32768"] for row in rows}
reveal("grouped-query, times the requests of multi-head",
       stored_bytes(CONFIGS["multi-head, Llama-2-7B"], 32_768) / stored_bytes(CONFIGS["grouped, Llama-3.1-8B"], 32_768))
reveal("MLA, times the requests of multi-head",
       stored_bytes(CONFIGS["multi-head, Llama-2-7B"], 32_768)
       / stored_bytes(CONFIGS["latent (MLA), DeepSeek-V3"], 32_768))

# %%
# NBVAL_CHECK_OUTPUT
v3 = {"num_hidden_layers": 61, "num_key_value_heads": 128, "head_dim": (192 + 128) // 2}  # its heads, kept as they are
print(f"DeepSeek-V3 with its 128 heads kept: {stored_bytes(v3, 1):,} bytes a token, "
      f"{stored_bytes(v3, 1) / stored_bytes(CONFIGS['latent (MLA), DeepSeek-V3'], 1):.0f} times the latent's")
print("requests of 32,768 tokens in 60 GB:", ", ".join(f"{name} {number}" for name, number in at_32k.items()))

# %% [markdown]
# **What it means for a server.** A capacity plan needs the model's attention, not only its size: the model with 671
# billion weights holds nearly twice the requests of the one with 8 billion in the same bytes. With windows there is no
# single number of bytes a token, so "tokens that fit" depends on how long the texts are. A latent costs arithmetic:
# keys and values are computed from it again, or the computation is moved into the query. And with a window in *every*
# layer, older text is reached only through what later tokens kept of it.
#
# ## B · Mixture of experts, and the batch
#
# Qwen3-30B-A3B has 30.5 billion weights, and each token uses 3.3 billion of them: in each of 48 layers a router picks
# 8 of 128 experts. For one row a step reads 8 experts a layer. For two rows it reads up to 16, since they seldom pick
# the same. Predict: how many different experts does a layer read for 16 rows? And for 64?

# %%
guess("experts read for 16 rows, of 128", None)
guess("experts read for 64 rows, of 128", None)

# %% [markdown]
# An expert is missed by one row with probability 1 − 8/128, and by B rows with that to the power of B, if the router
# has no favourites. So the expected number needs no simulation. Do both:

# %%
def expected(experts, active, rows):
    """Experts that at least one row uses."""
    return experts * (1 - (1 - active / experts) ** rows)


def counted(experts, active, rows, times=100):
    """The mean of `times` draws: each row draws its experts, all equally likely."""
    draw = np.random.default_rng(0)
    found = [len(set(np.concatenate([draw.permutation(experts)[:active] for _ in range(rows)])))
             for _ in range(times)]
    return sum(found) / times


# %%
# NBVAL_CHECK_OUTPUT
for rows in (1, 2, 4, 16, 64):
    near = abs(counted(128, 8, rows) / expected(128, 8, rows) - 1) < 0.02
    print(f"{rows:>2} rows: {expected(128, 8, rows):6.1f} of 128 experts expected; the count is within 2 %: {near}")
print("as the package says:", expected(128, 8, 16) == beyond.distinct_experts(128, 8, 16))

# %%
reveal("experts read for 16 rows, of 128", expected(128, 8, 16))
reveal("experts read for 64 rows, of 128", expected(128, 8, 64))

# %% [markdown]
# Now bytes. A row reads 3.0 of its 3.3 billion weights, since the embedding table is a lookup. Three models with the
# same attention: the mixture; a dense one that is as large as what a token uses; and a dense one as large as the whole
# mixture.

# %%
show_source(beyond.Mixture.bytes_read)

# %%
mixture = beyond.MIXTURES["Qwen3-30B-A3B"]
batches = [2**n for n in range(13)]
dense_bytes = mixture.bytes_read(1) - mixture.router_bytes
plots.curves(
    {"mixture, 30B of which 3B are active": (batches, [mixture.bytes_read(rows) / 1e9 for rows in batches]),
     "dense, 3B": (batches, [dense_bytes / 1e9] * len(batches)),
     "dense, 30B": (batches, [mixture.total_bytes / 1e9] * len(batches))},
    f"The mixture reads {mixture.bytes_read(1) / 1e9:.0f} GB for one row, {mixture.bytes_read(16) / 1e9:.0f} for 16 "
    f"and {mixture.bytes_read(64) / 1e9:.0f} for 64: nearly all that it has",
    "rows in a step", "GB of weights read in a step", log_x=True,
)

# %%
# NBVAL_CHECK_OUTPUT
for name, each in beyond.MIXTURES.items():
    print(f"{name} ({each.source}): {each.total_bytes / 2e9:.1f} billion weights; a row reads "
          f"{each.bytes_read(1) / 2e9:.1f} billion, 64 rows read {each.bytes_read(64) / 2e9:.1f} billion")

# %% [markdown]
# What is multiplied does not grow that way: each row multiplies with its own 8 experts only. So a step of few rows
# costs what it reads, and a step of very many costs what it multiplies. Tokens per second on an H100, contexts of 1,024
# tokens:

# %%
speeds = {"mixture": [], "dense, 3B": [], "reads as a dense 30B": []}
for rows in batches:
    shape, cost = StepShape.decode([1024] * rows), mixture.cost("h100", rows)
    for name, read in zip(speeds, (cost.weight_bytes, dense_bytes, mixture.total_bytes), strict=True):
        speeds[name].append(rows / replace(cost, weight_bytes=read).seconds(shape))
ratio = {rows: dense / mixed for rows, mixed, dense in zip(batches, speeds["mixture"], speeds["dense, 3B"],
                                                           strict=True)}
plots.curves(
    {name: (batches, values) for name, values in speeds.items()},
    f"Dense 3B makes {ratio[1]:.1f} times the mixture's tokens/s at 1 row, {max(ratio.values()):.1f} times at "
    f"{max(ratio, key=ratio.get)}, {ratio[4096]:.1f} times at 4,096",
    "rows in a step", "tokens per second", log_x=True, log_y=True,
)

# %%
# NBVAL_CHECK_OUTPUT
print("one row: both within 1 %:", abs(ratio[1] - 1) < 0.01, "- 64 rows: dense 3B makes over 4 times:", ratio[64] > 4)
print("the advantage is largest between 8 and 128 rows:", 8 <= max(ratio, key=ratio.get) <= 128)
print("at 64 rows the mixture is within 5 % of one that reads everything:",
      speeds["mixture"][6] / speeds["reads as a dense 30B"][6] < 1.05)

# %% [markdown]
# **What it means for a server.** "3B active" is the price of one request on its own, and of the arithmetic. In a batch
# of chapter 2's size a mixture reads like a dense model of its *total* size. It needs hundreds of rows before its
# small arithmetic shows, which is why such models are served with large batches over many GPUs (expert parallelism),
# where each GPU reads its own experts only. The dense 3B wins wherever 3B is good enough; the mixture is compared with
# it because it answers better. Speculation (chapter 6) suffers too: verifying five tokens touches the experts of five.
#
# Real routers have favourites, so fewer experts are touched. Draw them with probabilities 1, 1/2, 1/3, …:

# %%
skewed = {rows: float(beyond.simulated_experts(128, 8, rows, skew=1.0, times=100).mean()) for rows in (4, 16, 64)}
print(text_table([{"rows": rows, "even": expected(128, 8, rows), "skewed": found} for rows, found in skewed.items()],
                 {"rows": "rows", "even": "experts, even router", "skewed": "with favourites"}))

# %% [markdown]
# ## C · Tensor parallelism
#
# One model on n GPUs: each holds 1/n of every matrix and of the KV heads. All of them work on every token, and twice a
# layer (after attention, and after the MLP) they must sum what they have: an **all-reduce** of rows × hidden numbers.
# In a ring each GPU sends 2(n − 1)/n of these bytes. Small sums take their latency, whatever the bandwidth.
#
# Predict for Llama-3.1-8B at 4,096 tokens of context on H100s joined by NVLink: how many times the tokens per second of
# one GPU do eight make for one request? And for 64 requests?

# %%
guess("8 GPUs over 1, one request", None)
guess("8 GPUs over 1, 64 requests", None)

# %%
def all_reduce(devices, size, gb_per_s, latency_s):
    """Seconds to sum `size` bytes over the devices of a ring."""
    return 0 if devices == 1 else latency_s + 2 * (devices - 1) / devices * size / (gb_per_s * 1e9)


def step_seconds(devices, rows, gb_per_s, latency_s, context=4096):
    """A step of Llama-3.1-8B on this many H100s: its work divided, its sums and its fixed part not."""
    cost = CostModel.of_device("h100", llama)
    work = cost.seconds(StepShape.decode([context] * rows)) - cost.overhead_s
    sums = 2 * llama.num_hidden_layers * all_reduce(devices, 2 * rows * llama.hidden_size, gb_per_s, latency_s)
    return work / devices + sums + cost.overhead_s


# %% [markdown]
# Bandwidths are data sheets': NVLink 4 has 450 GB/s in one direction, PCIe 5.0 x16 64 GB/s. The latencies, 10 and 30
# µs for a sum of no bytes, are assumptions; measure yours with `nccl-tests` and put them in.

# %%
# NBVAL_CHECK_OUTPUT
small, large = 2 * 1 * llama.hidden_size, 2 * 64 * llama.hidden_size
print(f"sums in a step: {2 * llama.num_hidden_layers}, of {small:,} bytes for one row, of {large:,} for 64")
for name, link in beyond.LINKS.items():
    each = [all_reduce(8, size, link.gb_per_s, link.latency_s) * 1e6 for size in (small, large)]
    print(f"{name}: {each[0]:.1f} µs for one row's sum over 8, {each[1]:.1f} µs for 64 rows'")

# %%
split = {rows: beyond.parallel_rows("h100", llama, rows, 4096) for rows in (1, 64)}
by = {(row["rows"], row["link"], row["devices"]): row for rows in split.values() for row in rows}
gain = {key: row["tokens_per_s"] / by[key[0], key[1], 1]["tokens_per_s"] for key, row in by.items()}
reveal("8 GPUs over 1, one request", gain[1, "NVLink 4", 8])
reveal("8 GPUs over 1, 64 requests", gain[64, "NVLink 4", 8])
beyond_plots.step_parts(
    {"1 request": split[1], "64 requests": split[64]},
    f"Eight GPUs make {gain[1, 'NVLink 4', 8]:.1f} times the tokens/s for one request, "
    f"{gain[64, 'NVLink 4', 8]:.1f} times for 64")

# %%
PARTS = {"rows": "requests", "link": "link", "devices": "GPUs", "step_ms": "step, ms",
         "tokens_per_s": "tokens/s", "replicas_tokens_per_s": "as replicas"}
print(text_table([row for rows in split.values() for row in rows], PARTS))

# %%
# NBVAL_CHECK_OUTPUT
print("as the package says, to the last microsecond:", all(
    abs(step_seconds(devices, rows, link.gb_per_s, link.latency_s) * 1e3 - by[rows, name, devices]["step_ms"]) < 1e-3
    for rows in (1, 64) for name, link in beyond.LINKS.items() for devices in (1, 2, 4, 8)))
print("one request, 8 GPUs by NVLink: under half of eight times:", gain[1, "NVLink 4", 8] < 4)
print("and by PCIe less than by NVLink:", gain[1, "PCIe 5.0 x16", 8] < gain[1, "NVLink 4", 8])
print("64 requests: the work is larger, the sums nearly the same:", gain[64, "NVLink 4", 8] > gain[1, "NVLink 4", 8])
print("and 8 GPUs as one model make more than as replicas of 8 rows:",
      by[64, "NVLink 4", 8]["tokens_per_s"] > by[64, "NVLink 4", 8]["replicas_tokens_per_s"])

# %% [markdown]
# **What it means for a server.** Splitting a model is the one lever of this course that makes *one* request faster
# without drafts, until sums and the fixed part are all that is left. Under load the comparison is with replicas (last
# column): eight replicas read the weights eight times for the same 64 requests, so the split wins here, and every GPU
# also has more room for the cache. With 512 requests the replicas are full as well, and need no sums at all. Over a
# slow link keep each model on as few GPUs as hold it. Past the number of KV heads (8 here) keys and values would have
# to be stored twice.
#
# ## D · Goodput: tokens per second that came in time
#
# A promise to users (an SLO, a service-level objective) bounds both waits: say the first token within 0.5 s, and then
# 50 ms a token on average. **Goodput** counts only requests that met both. One A100 with Llama-3.1-8B, chats of
# chapter 9, open loop.
#
# Predict: at which rate of arrivals does this server make the most tokens per second, and at which does it answer the
# most requests in time? Of 2, 4, 6, 8, 10, 12, 16, 24 a second.

# %%
guess("rate with the most tokens/s", None)
guess("rate with the most requests in time", None)

# %%
TTFT_S, ITL_S = 0.5, 0.05
a100 = Service(kv_memory=60 * GB, max_step_tokens=512)


def in_time(request):
    """Whether a request's record keeps both promises."""
    if request.first_token - request.arrival > TTFT_S:
        return False
    after_first = request.output_tokens - 1
    return not after_first or (request.finish - request.first_token) / after_first <= ITL_S


def good_share(rate, requests):
    """The share of the requests at this rate that were answered in time."""
    served = a100.serve(service.chats(requests, rate)).requests
    return sum(map(in_time, served)) / len(served)


# %%
requests = 120 if QUICK else 400
rates = (4, 8, 12, 24) if QUICK else (2, 4, 6, 8, 10, 12, 16, 24)
sweep = beyond.goodput_rows(a100, rates, requests, TTFT_S, ITL_S)
most_tokens, most_good = (max(sweep, key=lambda row, name=name: row[name]) for name in ("tokens_per_s", "good_per_s"))
reveal("rate with the most tokens/s", most_tokens["rate"])
reveal("rate with the most requests in time", most_good["rate"])
GOOD = {"rate": "arrive /s", "tokens_per_s": "tokens/s", "ttft_p99_s": "TTFT p99, s",
        "itl_p50_ms": "ITL p50, ms", "share": "in time", "good_per_s": "in time /s"}
print(text_table(sweep, GOOD))

# %%
beyond_plots.goodput(
    sweep, f"first token in {TTFT_S} s, {1e3 * ITL_S:.0f} ms a token",
    f"Most tokens/s at {most_tokens['rate']:g} requests a second, of which {most_tokens['share']:.0%} are in time; "
    f"most in time at {most_good['rate']:g}")

# %%
# NBVAL_CHECK_OUTPUT
print("the same share, counted here and in the package:",
      good_share(rates[0], requests) == sweep[0]["share"], good_share(rates[-1], requests) == sweep[-1]["share"])
print("the most tokens/s come at a higher rate than the most requests in time:",
      most_tokens["rate"] > most_good["rate"])
print("at the rate of most tokens/s fewer than a third are in time:", most_tokens["share"] < 1 / 3)
print("nine tenths in time is kept up to a rate, and not beyond:", sweep[0]["share"] >= 0.9 > sweep[-1]["share"])

# %%
kept = beyond.highest_rate(sweep)
print(f"nine tenths in time: up to {kept:g} requests a second")

# %% [markdown]
# **What it means for a server.** Past its knee a server goes on making tokens, for requests that are late already.
# Size it by the highest rate at which the promise is kept, with room for bursts, and refuse beyond it (chapter 9):
# a request refused costs one request, a request queued makes all after it late. Which bound breaks says what to do:
# here it is the first token; a long ITL asks for smaller chunks or fewer rows instead.
#
# ## E · Answers of thousands of tokens
#
# A model that reasons before it answers writes thousands of tokens for one question. A closed loop of clients, the
# same prompts of 500 tokens, and answers of 300 or of 4,000 tokens on average. Memory is for the short ones: all
# clients fit many times over.
#
# Predict for the long answers: how many requests lose their memory and start again, for each 100 requests? And how
# does the time between two tokens change?

# %%
guess("preemptions for each 100 requests", None)
guess("ITL p50, long over short", None)

# %% [markdown]
# The sum first: how many whole requests does the memory hold? The scheduler admits a request when its *prompt* fits.

# %%
clients = 32 if QUICK else 96
memory = clients * 5 * GB // 16  # 0.31 GB for each client
small_server = Service(kv_memory=memory)


def whole_requests(prompt_tokens, answer_tokens):
    """Requests that fit with their whole answer."""
    per_token = 2 * 2 * llama.num_hidden_layers * llama.num_key_value_heads * llama.head_dim
    return memory // (per_token * (prompt_tokens + answer_tokens))


# %%
runs, answers = {}, []
for name, mean, most in (("300 tokens", 300, 256), ("4,000 tokens", 4000, 256),
                         ("4,000, as many rows as fit", 4000, whole_requests(500, 4000))):
    served = replace(small_server, max_batch=most).serve(beyond.thinking(3 * clients, mean), clients)
    runs[name] = served.records
    answers.append({"case": name, "fit": whole_requests(500, mean), **beyond.long_answers_row(served)})
LONG = {"case": "answers of", "fit": "whole requests fit", "mean_rows": "rows, mean", "tokens_per_s": "tokens/s",
        "itl_p99_ms": "ITL p99, ms", "preemptions": "preempted"}
print(text_table(answers, LONG))

# %%
short, long, bounded = answers
reveal("preemptions for each 100 requests", 100 * long["preemptions"] / (3 * clients))
reveal("ITL p50, long over short", long["itl_p50_ms"] / short["itl_p50_ms"])
service_plots.over_time(
    {name: runs[name] for name in ("4,000 tokens", "4,000, as many rows as fit")},
    f"{clients} clients, answers of 4,000 tokens: {long['preemptions']} preemptions; "
    f"with at most {bounded['fit']} rows {bounded['preemptions']}")

# %%
# NBVAL_CHECK_OUTPUT
print("300 tokens: all clients fit, and none is preempted:", short["fit"] >= clients and short["preemptions"] == 0)
print("4,000: fewer whole requests fit than there are clients:", long["fit"] < clients)
print("requests are preempted, and the cache is full:", long["preemptions"] > 0, long["cache_peak_share"] > 0.99)
print("a step reads more, so every next token comes later:", long["itl_p50_ms"] > 1.2 * short["itl_p50_ms"])
print("with as many rows as fit, fewer are preempted, and the p99 between two tokens is shorter:",
      bounded["preemptions"] < long["preemptions"], bounded["itl_p99_ms"] < long["itl_p99_ms"])
print("but the queue is longer, and tokens/s are no higher:", bounded["queue_p99_s"] > long["queue_p99_s"],
      bounded["tokens_per_s"] < 1.02 * long["tokens_per_s"])

# %% [markdown]
# **What it means for a server.** A long answer holds memory for minutes and grows all the while, so a plan by prompts
# is wrong by the length of the answers. Admission sees only the prompt: rows start, and later some must give their
# memory back and compute everything again. Tokens per second hardly show it, since computing again is prefill, which is
# cheap beside decoding (chapter 1). What shows it is the p99 between two tokens: whoever decodes waits while thousands
# of tokens are computed again in large steps. A bound on the rows, from the sum with the whole answer, ends that and
# moves the wait into the queue. Since most requests are not at their end, the bound leaves memory unused and may cost
# throughput; a bound between the two is the operator's choice. Give short requests a pool of their own (chapter 9):
# beside these they wait for minutes.
#
# ## Your guesses

# %%
guesses()

# %% [markdown]
# ## Where it loses
#
# The sums on this page are floors and expectations. What they leave out:
#
# - **A**: kernels for latent and windowed attention reach other shares of the bandwidth than plain ones.
# - **B**: even routing is assumed in the curve, and a mixture's small matrices seldom reach a dense one's rate.
# - **C**: sums can overlap with work, and the slowest of n devices sets the pace; neither is counted.
# - **D**: 120 to 400 requests are a short rush, not a day; a p99 of a day sees worse bursts.
# - **E**: real lengths are not known, and a cap on thinking changes the answers.
#
# This page settles no claim of the ledger: the articles do not speak of any of this.
#
# ## What a production engine calls this
#
# | here | vLLM | SGLang |
# |---|---|---|
# | windows beside full layers | the hybrid KV cache manager | `--swa-full-tokens-ratio` |
# | latent attention | chosen by the model; FlashMLA and others | chosen by the model; `--attention-backend` |
# | experts over several GPUs | `--enable-expert-parallel` | `--ep-size` |
# | one model on n GPUs | `--tensor-parallel-size` | `--tp-size` |
# | replicas | `--data-parallel-size` | `--dp-size` |
# | goodput | `vllm bench serve --goodput ttft:500 tpot:50` | from the records of `bench_serving` |
# | most rows of a step | `--max-num-seqs` | `--max-running-requests` |
#
# ## Exercise
#
# Your answers average 2,000 tokens after prompts of 500, and 48 clients ask at the same time. Find the memory in GB
# below which requests are preempted, to within 2 GB: first by the sum, then by running it. Why is it less than the sum
# says? (Not all of them are at their end at the same moment.)

# %%
gigabytes = 4

tried = Service(kv_memory=gigabytes * GB).serve(beyond.thinking(96, 2000), 48)
print(f"{gigabytes} GB of a card with {DEVICES['a100-80gb'].memory_gb}: {tried.summary['preemptions']} preempted;",
      "enough" if not tried.summary["preemptions"] else "not enough yet")

# %% [markdown]
# [How these pages are made](README.md) · before: [13 · Lab: a live server](13_lab_live_server.ipynb) · next:
# [15 · Lab: your own server](15_lab_your_own_server.ipynb)
