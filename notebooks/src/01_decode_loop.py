# %% [markdown]
# # 1 · The decode loop
#
# A language model gives one token at a time. This chapter writes that loop twice: first so that every token
# computes the whole text again (rung 0), then so that it keeps what was computed (rung 1).
#
# **You will learn**
# - what goes into the model at each step, and what comes out;
# - why keys and values can be kept, and why nothing else needs to be;
# - what a token costs with and without them, as the text grows;
# - how many bytes they take.
#
# **To run this page**: `make lab` in the repository, or `pip install -e ".[lab]"` and open the notebook. The first
# run fetches SmolLM2-135M-Instruct (93 MB).

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
import time

import torch

import minillm
from minillm.course.experiments import limits, memory
from minillm.course.setting import Setting
from minillm.course.show import plots
from minillm.course.show.live import progress
from minillm.course.show.recorded import ledger, recorded
from minillm.course.show.source import show_source
from minillm.course.show.tables import text_table
from minillm.ladder.decode import NoCache, SequenceCache, decode_cached, decode_recomputing
from minillm.ladder.quantized import kv_bytes_per_token
from minillm.load.source import DEFAULT
from minillm.measure.measurement import device_name
from minillm.model.llama import Llama

QUICK = os.environ.get("MINILLM_QUICK") == "1"  # small sizes, for tests
model = minillm.load_model(dtype="fp32")  # fp32, so that "the same tokens" can be checked exactly
tokenizer = minillm.load_tokenizer()
print(device_name(model.device))

# %% [markdown]
# ## A prompt is a list of numbers
#
# The tokenizer writes the question in the model's chat format and cuts it into tokens. The model sees only the
# numbers.

# %%
# NBVAL_CHECK_OUTPUT
prompt = tokenizer.chat("What is the capital of France?")
print(tokenizer.decode(prompt, skip_special=False))
print(f"{len(prompt)} tokens, the last of them {prompt[-3:]}")

# %% [markdown]
# ## The loop by hand
#
# For N tokens the model returns N rows of logits, one number for each entry of the vocabulary. Row i says what
# follows token i. Only the last row is news: take its largest entry, put that token behind the text, and go round
# again until the model says that it has finished.

# %%
# NBVAL_CHECK_OUTPUT
text = list(prompt)
with torch.inference_mode():
    while text[-1] not in model.config.eos_token_id or len(text) == len(prompt):
        tokens = torch.tensor(text, device=model.device)  # [N]
        positions = torch.arange(len(text), device=model.device)  # [N]
        logits = model.forward(tokens, positions, NoCache())  # [N, V]
        text.append(int(logits[-1].argmax()))
print(tokenizer.decode(text[len(prompt) :]))
print(f"{len(text) - len(prompt)} tokens, one forward pass each; logits of the last pass: {tuple(logits.shape)}")

# %% [markdown]
# ## Predict
#
# Take a prompt of 37 tokens and an answer of 48. The loop above feeds the whole text each time. A loop that keeps
# what it has computed feeds the prompt once, and then one token a step.
#
# How many tokens does each of them feed, over all steps? Write your two numbers down before you run the next cell.

# %%
my_guess = {"everything again": None, "one token a step": None}

# %%
# NBVAL_CHECK_OUTPUT
def fed_again(prompt_tokens, new_tokens):
    return sum(prompt_tokens + i for i in range(new_tokens))


def fed_once(prompt_tokens, new_tokens):
    return prompt_tokens + new_tokens - 1  # the last token is never fed: nobody asks what follows it


for new_tokens in (48, 480):
    again, once = fed_again(37, new_tokens), fed_once(37, new_tokens)
    print(f"{new_tokens} new tokens. Everything again: {again:,}; one token a step: {once}; ratio {again / once:.0f}")

# %% [markdown]
# ## Build: rung 0
#
# This is the loop above as the package has it. What you see is read from the installed source when the page is run.
# `NoCache` is what the model asks for attention: it looks at the tokens of this forward pass and nothing else.

# %%
show_source(NoCache, decode_recomputing)

# %% [markdown]
# ## What can be kept?
#
# Inside a layer, a token becomes a query, a key and a value. Attention lets each token look back, never ahead. So
# the key of token 5 depends on tokens 0 to 5, and not on what comes later. If that is true, a key that was computed
# once need never be computed again.
#
# Test it. `Watching` notes the keys of all layers. We compute them for the prompt alone, for the prompt with its
# answer, and for the prompt with another first token.

# %%
# NBVAL_CHECK_OUTPUT
class Watching(NoCache):
    """No cache, and a note of every layer's keys."""

    def __init__(self):
        self.keys = []

    def attend(self, layer, q, k, v):
        self.keys.append(k)  # [N, Hkv, D]
        return super().attend(layer, q, k, v)


@torch.inference_mode()
def keys_of(ids):
    watching = Watching()
    positions = torch.arange(len(ids), device=model.device)
    model.forward(torch.tensor(ids, device=model.device), positions, watching, positions[-1:])
    return torch.stack(watching.keys)  # [L, N, Hkv, D]


alone, answered, changed = keys_of(prompt), keys_of(text), keys_of([text[5], *prompt[1:]])
print("keys of the prompt, all layers:", tuple(alone.shape))
print("the same when text follows:", torch.allclose(alone, answered[:, : len(prompt)], atol=1e-3))
print("the same after another first token:", torch.allclose(alone[:, 1:], changed[:, 1:], atol=1e-3))

# %% [markdown]
# Keys, and likewise values, stay as they are whatever follows. They do depend on everything before. Both facts
# return in chapter 4.
#
# Queries are not kept: a token's query is used once, to look back from that token.

# %%
show_source(Llama.hidden_states)

# %% [markdown]
# ## Build: rung 1
#
# Compare this loop with rung 0. Two things differ: what is fed, and what attention is handed.

# %%
show_source(SequenceCache, decode_cached)

# %% [markdown]
# ## The same tokens
#
# A cache must change the cost and nothing else. (Sums in another order move the last bits of a logit, so where the two
# likeliest tokens are as good as tied, two right programs may differ:
# [what equal means](../README.md#what-equal-means).) `Counting` stands before the model and notes how many tokens each
# forward pass is fed, so the prediction is checked too.

# %%
# NBVAL_CHECK_OUTPUT
class Counting:
    """The model, with a note of how many tokens each forward pass was fed."""

    def __init__(self, model):
        self.model, self.fed = model, []

    def __getattr__(self, name):
        return getattr(self.model, name)

    def forward(self, tokens, *rest, **named):
        self.fed.append(len(tokens))
        return self.model.forward(tokens, *rest, **named)


for question in ("What is the capital of France?", "Write a short story about a lighthouse keeper."):
    ids = tokenizer.chat(question)
    again, kept = Counting(model), Counting(model)
    first = list(decode_recomputing(again, ids, 10, model.config.eos_token_id))
    second = list(decode_cached(kept, ids, 10, model.config.eos_token_id))
    print(repr(tokenizer.decode(second)))
    predicted = fed_again(len(ids), len(first)), fed_once(len(ids), len(first))
    fed = sum(again.fed), sum(kept.fed)
    print(f"  same tokens: {first == second};  fed: {fed[0]} and {fed[1]}, as predicted: {fed == predicted}")

# %% [markdown]
# ## Measure: the next token, as the text grows
#
# `cost_by_length` times one token after texts of different lengths: rung 0, which computes all of the text, and
# rung 1, which feeds one token to a cache that holds the rest. Computing all of a text is also exactly what the
# **prefill** of a prompt of that length costs; feeding one token is a **decode** step.
#
# Predict: behind a text 64 times as long, how many times as long does the next token take, with either rung? And how
# long must a text be before rung 1 takes twice as long as behind four tokens?

# %%
my_guess = {"rung 0, times": None, "rung 1, times": None, "tokens until rung 1 has doubled": None}

# %%
show_source(limits.one_recomputing_step, limits.one_cached_step)

# %%
setting = Setting(quick=QUICK, gpu_model=DEFAULT, progress=progress)  # this page's model, also on a GPU
setting.model = model
costs = limits.cost_by_length(setting)
COSTS = {"context_tokens": "tokens of text", "recompute_ms": "rung 0, or prefill: ms", "cached_ms": "rung 1: ms",
         "read_mb": "rung 1 must read MB"}
print(text_table(costs.rows, COSTS))

# %%
plots.cost_per_token(costs.rows)

# %% [markdown]
# Read the two lines at their ends.
#
# - At the left, a text of a few tokens: both cost about the same. One pass over the weights is needed whether it
#   serves one token or eight.
# - Further right, rung 0 grows with the text: more tokens are more arithmetic. The same slope is what a longer
#   **prompt** costs before its first token.
# - Rung 1 is nearly level. Each step reads all the weights, and the keys and values of the text so far. For a short
#   text the second is little beside the first.
#
# Where does "level" end? The last column says what a step must read. It doubles when the cache is as large as the
# weights.

# %%
# NBVAL_CHECK_OUTPUT
per_token = kv_bytes_per_token(model.config, "fp32")
as_many = model.weight_bytes / per_token  # tokens whose keys and values weigh as much as the weights
print(f"weights that a step reads: {model.weight_bytes / 1e6:.0f} MB; keys and values: {per_token:,} bytes a token")
print(f"a tenth more to read after {as_many / 10:,.0f} tokens, twice as much after {as_many:,.0f}")
print(f"this model's longest context: {model.config.max_position_embeddings:,} tokens")

# %%
rows = costs.rows
prefills = [row for row in rows if row["recompute_ms"]]
for row in prefills[-3:]:
    each = row["recompute_ms"] / row["context_tokens"]
    print(f"prefill of {row['context_tokens']:>5,} tokens: {each:.2f} ms a token")
for row in rows[-4:]:
    slower, more = row["cached_ms"] / rows[0]["cached_ms"], row["read_mb"] / rows[0]["read_mb"]
    print(f"decode behind {row['context_tokens']:>5,} tokens: {slower:.2f} times the shortest; bytes: {more:.2f} times")

# %% [markdown]
# If the measured factor grows faster than the bytes, attention in plain PyTorch reads its keys and values more
# slowly than the linear layers read the weights.
#
# ## The bytes of a token
#
# For each token, each layer keeps one key and one value per KV head. SmolLM2-135M has 30 layers and 3 KV heads of
# 64 numbers, at 4 bytes each in fp32. Work the product out, then run the cell: it compares the sum with what
# PyTorch has really allocated.

# %%
# NBVAL_CHECK_OUTPUT
config = model.config
layers, heads, head_dim = config.num_hidden_layers, config.num_key_value_heads, config.head_dim
by_hand = 2 * layers * heads * head_dim * 4
cache = SequenceCache(model, capacity=100)
allocated = cache.keys.nbytes + cache.values.nbytes
print(f"2 x {layers} layers x {heads} heads x {head_dim} numbers x 4 bytes = {by_hand:,} bytes a token")
print(f"allocated for 100 tokens: {allocated:,} bytes, which is 100 times that: {allocated == 100 * by_hand}")
print("the package's own sum agrees:", kv_bytes_per_token(config, "fp32") == by_hand)
print(f"a context of 8,192 tokens: {8192 * by_hand / 1e6:.0f} MB, beside {model.weight_bytes / 1e6:.0f} MB of weights")

# %% [markdown]
# The model has 9 query heads and 3 KV heads: three query heads share each key. With a key for every query head the
# cache would be three times as large. That is grouped-query attention.
#
# ## Where it loses
#
# A cache saves nothing on the first token, which is the prefill in both rungs. So a very short answer gains little,
# and memory is held all the same. Here is the same question with its answer cut at different lengths. How many times
# faster is rung 1 for an answer of one token, and of a dozen?

# %%
my_guess = {"1 token": None, "12 tokens": None}

# %%
def seconds(decode, new_tokens):
    start = time.perf_counter()
    made = sum(1 for _ in decode(model, prompt, new_tokens))
    assert made == new_tokens
    return time.perf_counter() - start


gains = []
for new_tokens in (1, 4, 12) if QUICK else (1, 2, 4, 8, 16, 32):
    again, kept = seconds(decode_recomputing, new_tokens), seconds(decode_cached, new_tokens)
    gains.append({
        "new_tokens": new_tokens, "again_s": again, "kept_s": kept, "times": again / kept,
        "fed_times": fed_again(len(prompt), new_tokens) / fed_once(len(prompt), new_tokens),
        "cache_mb": fed_once(len(prompt), new_tokens) * per_token / 1e6,
    })
GAINS = {"new_tokens": "answer, tokens", "again_s": "rung 0: s", "kept_s": "rung 1: s", "times": "faster, times",
         "fed_times": "fewer tokens fed, times", "cache_mb": "cache, MB"}
print(text_table(gains, GAINS))

# %% [markdown]
# The time gained is less than the tokens saved. Feeding 40 tokens in one pass costs less than 40 passes with one
# token: the weights are read once for all of them. That is the next chapter's whole idea.
#
# On a GPU the short end reads differently again, because a step there can be bound by launching kernels. Recorded
# runs of `cost_by_length`:

# %%
print(recorded("cost_by_length", COSTS))

# %% [markdown]
# ## Claims of the ledger that this page settles
#
# By the ledger's own rules: on this device, just now, and on every device that has a recorded run.

# %%
print(ledger({"A4": costs, "C2": memory.capacity_sum(setting).rows}))

# %% [markdown]
# ## What a production engine calls this
#
# | here | vLLM | SGLang | transformers |
# |---|---|---|---|
# | rung 1 | always on | always on | `use_cache=True`, `past_key_values` |
# | computing the prompt | prefill | prefill (`extend`) | first forward of `generate` |
# | one token a step | decode | decode | each later forward |
# | capacity of a text | `--max-model-len` | `--context-length` | `max_length` |
# | bytes per number | `--kv-cache-dtype` | `--kv-cache-dtype` | `cache_implementation="quantized"` |
#
# Both servers export the two times of this page as `time_to_first_token_seconds` (prefill is in it) and
# `inter_token_latency_seconds` (one decode step), with the prefix `vllm:` or `sglang:`.
#
# ## Exercise
#
# Llama-3-8B has 32 layers, 8 KV heads and a head size of 128. In bf16 a number takes 2 bytes. How many bytes does a
# token take, and how many tokens fit into 60 GB (60 · 10⁹ bytes)? Replace the two `None` and run the cell.
#
# To go further, in checked notebooks: [exercise 1](../exercises/01_step_cost.ipynb), the sums of a step, and
# [exercise 2](../exercises/02_kv_cache.ipynb), where you write the cache and the loop.

# %%
bytes_a_token, tokens_in_60_gb = None, None

right = kv_bytes_per_token(minillm.ModelConfig.preset("llama-3-8b"), "bf16")
for answer, expected in ((bytes_a_token, right), (tokens_in_60_gb, 60 * 10**9 // right)):
    print("not answered yet" if answer is None else "right" if answer == expected else "no: check each factor")

# %% [markdown]
# [How these pages are made](README.md) · before: [0 · Your machine](00_your_machine.ipynb) · next:
# [2 · Static batches](02_static_batching.ipynb)
