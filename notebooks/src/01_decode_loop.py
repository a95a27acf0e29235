# %% [markdown]
# # 1 · The decode loop
#
# A language model gives one token at a time. In this chapter you read and run that loop twice: first so that every
# token computes the whole text again (rung 0 of a ladder that the next chapters climb), then so that it keeps what was
# computed (rung 1).
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
import torch
from torch.nn.functional import scaled_dot_product_attention

import minillm
from minillm.course.show.page import *  # guess, reveal, plots, drawings, text_table, show_source, ledger and the like

model = minillm.load_model(dtype="fp32")  # fp32, so that "the same tokens" can be checked exactly
tokenizer = minillm.load_tokenizer()
config, EOS = model.config, model.config.eos_token_id
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
# ## Build: rung 0
#
# The model is given N tokens and the position of each. Inside each layer every token becomes a query, a key and a
# value. Everything else in the model treats each token by itself, so attention is the only place where a token meets
# others. That is why the model leaves attention to an object that you hand it: it calls `attend(layer, q, k, v)` in
# each layer and continues with what that returns.
#
# Attention lets each token look at itself and at what stands before it. Here are the newest n tokens of a text of S:

# %%
def attention(q, k, v):
    """The newest n of S tokens look back: q [n, Hq, D], k and v [S, Hkv, D] -> [n, Hq, D]."""
    places = torch.arange(len(k), device=k.device)  # [S]
    sees = places <= places[len(k) - len(q) :, None]  # [n, S]: itself, and all before it
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))  # [1, heads, n or S, D]
    return scaled_dot_product_attention(q, k, v, sees, enable_gqa=True)[0].transpose(0, 1)  # [n, Hq, D]


class Recompute:
    """Keeps nothing: each token of this forward pass looks at the tokens of this forward pass."""

    def attend(self, layer, q, k, v):
        return attention(q, k, v)  # q [N, Hq, D], k and v [N, Hkv, D] -> [N, Hq, D]


# %% [markdown]
# Now the loop. For N tokens the model returns N rows of logits, one number for each entry of the vocabulary. Row i
# says what follows token i, so only the last row is needed: take its largest entry, append that token to the text, and
# repeat until the model says that it has finished. `fed` notes what each forward pass is given: the position of the
# first token, and how many.

# %%
@torch.inference_mode()
def recomputing_loop(prompt, max_tokens):
    """Rung 0: the whole text goes through the model for every token -> the answer, and what each step fed."""
    cache, fed = Recompute(), []
    feed, answer = list(prompt), []
    while len(answer) < max_tokens:
        tokens = torch.tensor(feed, device=model.device)  # [N]
        positions = torch.arange(0, len(feed), device=model.device)  # [N]
        logits = model.forward(tokens, positions, cache)  # [N, V]
        fed.append((0, len(feed)))
        answer.append(int(logits[-1].argmax()))
        feed = list(prompt) + answer
        if answer[-1] in EOS:
            break
    return answer, fed


# %%
# NBVAL_CHECK_OUTPUT
answer, fed = recomputing_loop(prompt, 20)
print(tokenizer.decode(answer))
print(f"{len(answer)} tokens, one forward pass each; tokens fed: {[count for _, count in fed]}")

# %% [markdown]
# ## Predict
#
# Take a prompt of 37 tokens and an answer of 48. The loop above feeds the whole text each time. A loop that keeps
# what it has computed feeds the prompt once, and then one token a step.
#
# How many tokens does each of them feed, over all steps? Write your two numbers in place of `None` before you run the
# next cell. (A guess is kept and set beside what is measured; a blank one stays silent.)

# %%
guess("tokens fed, everything again", None)
guess("tokens fed, one token a step", None)


# %%
# NBVAL_CHECK_OUTPUT
def fed_again(prompt_tokens, new_tokens):
    return sum(prompt_tokens + i for i in range(new_tokens))


def fed_once(prompt_tokens, new_tokens):
    return prompt_tokens + new_tokens - 1  # the last token is never fed: its successor is not wanted


for new_tokens in (48, 480):
    again, once = fed_again(37, new_tokens), fed_once(37, new_tokens)
    print(f"{new_tokens} new tokens. Everything again: {again:,}; one token a step: {once}; ratio {again / once:.0f}")

# %%
reveal("tokens fed, everything again", fed_again(37, 48))
reveal("tokens fed, one token a step", fed_once(37, 48))

# %% [markdown]
# ## What can be kept?
#
# The key of token 5 depends on tokens 0 to 5, since attention never looks ahead. If so, a key that was computed once
# need not be computed again.
#
# Test it. `Watching` notes the keys of all layers. We compute them for the prompt alone, for the prompt with its
# answer, and for the prompt with another first token.

# %%
# NBVAL_CHECK_OUTPUT
class Watching(Recompute):
    """Keeps nothing for attention, and notes every layer's keys."""

    def __init__(self):
        self.keys = []

    def attend(self, layer, q, k, v):
        self.keys.append(k)  # [N, Hkv, D]
        return super().attend(layer, q, k, v)


@torch.inference_mode()
def keys_of(ids):
    watching = Watching()
    model.forward(torch.tensor(ids, device=model.device), torch.arange(len(ids), device=model.device), watching)
    return torch.stack(watching.keys)  # [L, N, Hkv, D]


alone, answered, changed = keys_of(prompt), keys_of(prompt + answer), keys_of([answer[0], *prompt[1:]])
print("keys of the prompt, all layers:", tuple(alone.shape))
print("the same when text follows:", torch.allclose(alone, answered[:, : len(prompt)], atol=1e-3))
print("the same after another first token:", torch.allclose(alone[:, 1:], changed[:, 1:], atol=1e-3))

# %% [markdown]
# Keys, and likewise values, stay as they are whatever follows. From the second layer on they do depend on everything
# before; in the first a key is made of its own token and position alone. Both facts return in chapter 4.
#
# Queries are not kept: a token's query is used once, to look back from that token.
#
# ## Build: rung 1
#
# So the object that runs attention may keep the keys and values of each layer. A forward pass then feeds only the
# tokens that are new: their keys and values are written after the stored ones, and their queries look at all of them.

# %%
class Cache:
    """Keys and values of one text, with room for `capacity` tokens; `length` of them are stored."""

    def __init__(self, capacity):
        shape = (config.num_hidden_layers, capacity, config.num_key_value_heads, config.head_dim)
        self.keys = torch.zeros(shape, device=model.device)  # [L, S, Hkv, D]
        self.values = torch.zeros_like(self.keys)  # [L, S, Hkv, D]
        self.length = 0

    def attend(self, layer, q, k, v):
        end = self.length + len(k)
        self.keys[layer, self.length : end] = k  # [n, Hkv, D]
        self.values[layer, self.length : end] = v
        return attention(q, self.keys[layer, :end], self.values[layer, :end])  # [n, Hq, D]


# %%
@torch.inference_mode()
def cached_loop(prompt, max_tokens):
    """Rung 1: the prompt goes through the model once, then one token a step -> the answer, and what each step fed."""
    cache, fed = Cache(len(prompt) + max_tokens), []
    feed, answer = list(prompt), []
    while len(answer) < max_tokens:
        tokens = torch.tensor(feed, device=model.device)  # [n]
        positions = torch.arange(cache.length, cache.length + len(feed), device=model.device)  # [n]
        logits = model.forward(tokens, positions, cache)  # [n, V]
        fed.append((cache.length, len(feed)))
        cache.length += len(feed)
        answer.append(int(logits[-1].argmax()))
        feed = answer[-1:]
        if answer[-1] in EOS:
            break
    return answer, fed


# %% [markdown]
# What changed from rung 0: which tokens are fed, at which positions, and which object runs attention.

# %%
show_diff(recomputing_loop, cached_loop)

# %% [markdown]
# ## The same tokens
#
# A cache must change the cost and nothing else. So compare your two loops with each other, and both with the
# package's, token for token. (Sums in another order move the last bits of a logit, so where the two likeliest tokens
# are as good as tied, two right programs may differ: [what equal means](../README.md#what-equal-means).) What was fed
# is compared with the prediction.

# %%
# NBVAL_CHECK_OUTPUT
from minillm.ladder.decode import NoCache, SequenceCache, attend, decode_cached, decode_recomputing

for question in ("What is the capital of France?", "Write a short story about a lighthouse keeper."):
    ids = tokenizer.chat(question)
    (again, fed_0), (kept, fed_1) = recomputing_loop(ids, 10), cached_loop(ids, 10)
    print(repr(tokenizer.decode(kept)))
    rung_0, rung_1 = (list(decode(model, ids, 10, EOS)) for decode in (decode_recomputing, decode_cached))
    print(f"  your loops agree: {again == kept}; with the package's: {again == rung_0}, {kept == rung_1}")
    fed = [sum(count for _, count in steps) for steps in (fed_0, fed_1)]
    predicted = [fed_again(len(ids), len(kept)), fed_once(len(ids), len(kept))]
    print(f"  fed: {fed[0]} and {fed[1]}, as predicted: {fed == predicted}")

# %% [markdown]
# What each step fed, as your loops noted it, for a prompt of a few tokens:

# %%
short_prompt = tokenizer.encode("The sun had set")
runs = {"rung 0": recomputing_loop(short_prompt, 20), "rung 1": cached_loop(short_prompt, 20)}
drawings.fed_by_step({name: fed for name, (_, fed) in runs.items()})

# %% [markdown]
# The triangle on the left grows with the square of the text: that is the cost of rung 0. On the right each step after
# the first is one token, and what stands before it is read, not computed.
#
# ## The package's two loops
#
# Now that you have run both, here are the package's, as the installed source has them.

# %%
show_source(attend, NoCache, SequenceCache, decode_recomputing, decode_cached)

# %% [markdown]
# What they add to yours:
#
# - `yield`: a token can be shown as soon as it is known;
# - `logit_rows`: logits are computed for the last token alone. The output layer (LM head) of this model is a fifth
#   of its weights, and your loop multiplies by it for every token of the prompt;
# - `mask = None` for one token, which sees everything;
# - `check_length`: a text that would not fit into the model's context is refused before it starts;
# - the model and the ids that end a text are arguments.
#
# ## Measure: the next token, as the text grows
#
# `cost_by_length` times one token after texts of different lengths: rung 0, which computes all of the text, and
# rung 1, which feeds one token to a cache that holds the rest. Computing all of a text is also exactly what the
# **prefill** of a prompt of that length costs; feeding one token is a **decode** step.
#
# Predict: after a text 128 times as long (512 tokens instead of 4), how many times as long does the next token take,
# with either rung? And how long must a text be before rung 1 takes twice as long as after four tokens?

# %%
guess("rung 0, times as long after 512 tokens as after 4", None)
guess("rung 1, times as long after 512 tokens as after 4", None)
guess("tokens until rung 1 takes twice as long", None)

# %%
from minillm.course.experiments import limits
from minillm.load.source import DEFAULT

setting = Setting(quick=QUICK, gpu_model=DEFAULT, progress=progress)  # this page's model, also on a GPU
setting.model = model
costs = limits.cost_by_length(setting)
COSTS = {"context_tokens": "tokens of text", "recompute_ms": "rung 0, or prefill: ms", "cached_ms": "rung 1: ms",
         "read_mb": "rung 1 must read MB"}
print(text_table(costs.rows, COSTS))

# %%
by_length = {row["context_tokens"]: row for row in costs.rows}
doubled = [n for n, row in by_length.items() if row["cached_ms"] >= 2 * by_length[4]["cached_ms"]]
for name, column in (("rung 0", "recompute_ms"), ("rung 1", "cached_ms")):
    reveal(f"{name}, times as long after 512 tokens as after 4", by_length[512][column] / by_length[4][column])
if doubled:
    reveal("tokens until rung 1 takes twice as long", doubled[0])
plots.cost_per_token(costs.rows)

# %% [markdown]
# Read the two lines at their ends.
#
# - At the left, a text of a few tokens: both cost about the same. One pass over the weights is needed whether it
#   serves one token or eight.
# - Further right, rung 0 grows with the text: more tokens are more arithmetic. The same slope is what a longer
#   **prompt** costs before its first token.
# - Rung 1 is nearly level. Each step reads all the weights, and the keys and values of the text so far. For a short
#   text the keys and values are few beside the weights.
#
# Where does "level" end? The last column says what a step must read. That doubles only when the cache is as large as
# the weights; the time of a step doubles sooner, as the two cells below show.

# %%
# NBVAL_CHECK_OUTPUT
from minillm.ladder.quantized import kv_bytes_per_token

per_token = kv_bytes_per_token(config, "fp32")
as_many = model.weight_bytes / per_token  # tokens whose keys and values weigh as much as the weights
print(f"weights that a step reads: {model.weight_bytes / 1e6:.0f} MB; keys and values: {per_token:,} bytes a token")
print(f"a tenth more to read after {as_many / 10:,.0f} tokens, twice as much after {as_many:,.0f}")
print(f"this model's longest context: {config.max_position_embeddings:,} tokens")

# %%
prefills = [row for row in costs.rows if row["recompute_ms"]]
for row in prefills[-3:]:
    each = row["recompute_ms"] / row["context_tokens"]
    print(f"prefill of {row['context_tokens']:>5,} tokens: {each:.2f} ms a token")
first = costs.rows[0]
for row in costs.rows[-4:]:
    slower, more = row["cached_ms"] / first["cached_ms"], row["read_mb"] / first["read_mb"]
    print(f"decode after {row['context_tokens']:>5,} tokens: {slower:.2f} times the shortest; bytes: {more:.2f} times")

# %% [markdown]
# If the measured factor grows faster than the bytes, attention in plain PyTorch reads its keys and values more
# slowly than the linear layers read the weights.
#
# ## The bytes of a token
#
# For each token, each layer keeps one key and one value per KV head. SmolLM2-135M has 30 layers and 3 KV heads of
# 64 numbers, at 4 bytes each in fp32. Work the product out, then run the cell: it compares the product with what
# PyTorch has really allocated for your cache.

# %%
# NBVAL_CHECK_OUTPUT
layers, heads, head_dim = config.num_hidden_layers, config.num_key_value_heads, config.head_dim
a_token = 2 * layers * heads * head_dim * 4
cache = Cache(capacity=100)
allocated = cache.keys.nbytes + cache.values.nbytes
print(f"2 x {layers} layers x {heads} heads x {head_dim} numbers x 4 bytes = {a_token:,} bytes a token")
print(f"allocated for 100 tokens: {allocated:,} bytes, which is 100 times that: {allocated == 100 * a_token}")
print("the package's own sum agrees:", kv_bytes_per_token(config, "fp32") == a_token)
print(f"a context of 8,192 tokens: {8192 * a_token / 1e6:.0f} MB, beside {model.weight_bytes / 1e6:.0f} MB of weights")

# %% [markdown]
# The model has 9 query heads and 3 KV heads: three query heads share each key. With a key for every query head the
# cache would be three times as large. That is grouped-query attention.
#
# ## Where it loses
#
# A cache saves nothing on the first token, which is the prefill in both rungs. So a very short answer gains little,
# and memory is held all the same. Here is the same question with its answer cut at different lengths, with the
# package's two loops. How many times faster is rung 1 for an answer of one token, and of a dozen?

# %%
guess("times faster with a cache, 1 token", None)
guess("times faster with a cache, 12 tokens", None)

# %%
import time


def seconds(decode, new_tokens):
    start = time.perf_counter()
    made = sum(1 for _ in decode(model, prompt, new_tokens))
    assert made == new_tokens
    return time.perf_counter() - start


gains = []
for new_tokens in (1, 4, 12) if QUICK else (1, 2, 4, 8, 12, 32):
    again, kept = seconds(decode_recomputing, new_tokens), seconds(decode_cached, new_tokens)
    gains.append({
        "new_tokens": new_tokens, "again_s": again, "kept_s": kept, "times": again / kept,
        "fed_times": fed_again(len(prompt), new_tokens) / fed_once(len(prompt), new_tokens),
        "cache_mb": fed_once(len(prompt), new_tokens) * per_token / 1e6,
    })
GAINS = {"new_tokens": "answer, tokens", "again_s": "rung 0: s", "kept_s": "rung 1: s", "times": "faster, times",
         "fed_times": "fewer tokens fed, times", "cache_mb": "cache, MB"}
print(text_table(gains, GAINS))
by_answer = {row["new_tokens"]: row["times"] for row in gains}
reveal("times faster with a cache, 1 token", by_answer[1])
reveal("times faster with a cache, 12 tokens", by_answer[12])

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
# By the [ledger](CLAIMS.md)'s own rules: on this device, just now, and on every device that has a recorded run.

# %%
from minillm.course.experiments import memory

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
# ## Your guesses
#
# Those that you made on this page, beside what was measured, the nearest first:

# %%
guesses()

# %% [markdown]
# ## Exercise
#
# Llama-3-8B has 32 layers, 8 KV heads and a head size of 128. In bf16 a number takes 2 bytes. How many bytes does a
# token take, and how many tokens fit into 60 GB (60 · 10⁹ bytes)? Replace the two `None` and run the cell.
#
# To go further, in checked notebooks: [exercise 1](../exercises/01_step_cost.ipynb), the sums of a step, and
# [exercise 2](../exercises/02_kv_cache.ipynb), where you write a cache that grows as it is filled, and its loop, from
# an empty cell.

# %%
bytes_a_token, tokens_in_60_gb = None, None

right = kv_bytes_per_token(minillm.ModelConfig.preset("llama-3-8b"), "bf16")
for answer, expected in ((bytes_a_token, right), (tokens_in_60_gb, 60 * 10**9 // right)):
    print("not answered yet" if answer is None else "right" if answer == expected else "no: check each factor")

# %% [markdown]
# [How these pages are made](README.md) · before: [0 · Your machine](00_your_machine.ipynb) · next:
# [2 · Static batches](02_static_batching.ipynb)
