# %% [markdown]
# # 5 · Quantised keys and values
#
# The last chapter packed the cache without gaps. This one makes what is packed smaller: 8 or 4 bits a number instead
# of 16 or 32 (rung 5). More requests fit into the same bytes. It is the first rung that may change what the model
# says, so most of this page measures how much, and where.
#
# **You will learn**
# - what a number in 8 or 4 bits is, and what its scale costs;
# - why keys are harder than values, and three cures;
# - to measure damage: a text's loss with its error, rare words, long contexts, single abilities;
# - where fewer bits help weights, and where they lose.
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

import torch

import minillm
from minillm import quantize_weights
from minillm.course.experiments import common, formats
from minillm.course.experiments.formats import calibrated, errors, per_channel, per_token, queries_and_keys
from minillm.course.experiments.quality import QualityTask, python_help, repeated
from minillm.course.setting import Setting
from minillm.course.show import plots
from minillm.course.show.live import bar, progress
from minillm.course.show.recorded import ledger, recorded
from minillm.course.show.source import show_source
from minillm.course.show.tables import text_table
from minillm.extras.key_scaling import ChannelScaling
from minillm.ladder.quantized import (
    Rotation,
    ScaledStore,
    int4_encode,
    int8_decode,
    int8_encode,
    kv_bytes_per_token,
    kv_storage,
)
from minillm.measure import metrics
from minillm.measure.measurement import device_name
from minillm.measure.workload import lognormal

QUICK = os.environ.get("MINILLM_QUICK") == "1"  # small sizes, for tests
model = minillm.load_model(dtype="fp32")
tokenizer = minillm.load_tokenizer()
config, head_dim = model.config, model.config.head_dim
print(device_name(model.device))

# %% [markdown]
# ## A number in 8 bits
#
# Take the 64 numbers of one key. Find the largest, divide it by 127, and call that the scale. Now every number is a
# whole multiple of the scale, of -127 to 127, give or take half a step. Keep the whole numbers, a byte each, and the
# scale.

# %%
# NBVAL_CHECK_OUTPUT
key = torch.tensor([0.31, -2.54, 0.02, 1.27])
codes, scale = int8_encode(key)
print("scale:", round(float(scale), 4), "codes:", codes.view(torch.int8).tolist())
print("read back:", [round(number, 2) for number in int8_decode(codes, scale).tolist()])
codes, scale, minimum = int4_encode(key, group=4)
print(f"in 4 bits: {codes.tolist()} are two bytes for four numbers; a step is {float(scale):.2f}, not {2.54 / 127:.2f}")

# %% [markdown]
# `int4` has sixteen steps, too few to waste one on a sign: it keeps the smallest number of a group and counts upwards
# from there. `fp8` divides too, but then keeps each number as a float of 8 bits, whose steps are fine near zero and
# coarse at the top.
#
# ## Build
#
# A storage writes tokens into slots and reads them back. Attention does not know which storage it reads: it asks for
# a chunk of slots and gets numbers, so the cache is never dequantised as a whole.

# %%
show_source(int8_encode, int8_decode, ScaledStore.write, ScaledStore.read)

# %% [markdown]
# Every token and head has a scale of its own. That costs two bytes, and buys a lot: a token can be appended, shared
# with another request, or rolled back, and no neighbour's bytes change.
#
# ## Predict
#
# - How many times as many tokens fit into the same bytes with int8 as with 16 bits? Exactly twice?
# - And with int4, whose scale and minimum (2 bytes each) serve 32 numbers?

# %%
my_guess = {"int8": None, "int4": None}

# %%
# NBVAL_CHECK_OUTPUT
plain = kv_bytes_per_token(config, "bf16")
for kv_format in ("fp32", "bf16", "fp8", "int8", "int4"):
    stored = kv_bytes_per_token(config, kv_format)
    allocated = kv_storage(config, kv_format, slots=100).nbytes
    print(f"{kv_format}: {stored:>6,} bytes per token, {stored / plain:.4f} of 16 bits, {plain / stored:.2f} times the "
          f"tokens; as allocated: {allocated == 100 * stored}")

# %% [markdown]
# ## Measure: who fits
#
# 64 requests in the bytes that hold 1,024 tokens of 16 bits. The scheduler and the pool are the real ones; there is
# no model in this cell, so the counts are exact.

# %%
# NBVAL_CHECK_OUTPUT
items = lognormal(1.0, requests=64, mean_tokens=48, prompt_tokens=48)
for kv_format in ("fp32", "bf16", "int8", "int4"):
    records = common.count(config, items, kv_format=kv_format, kv_memory=1024 * plain, max_batch=64)
    summary = metrics.summary(records)
    rows = sum(step.rows for step in records.steps) / len(records.steps)
    print(f"{kv_format}: {rows:.1f} requests at once on average, up to {summary['batch']['peak_rows']}; "
          f"{summary['steps']} steps, {summary['preemptions']} preempted")

# %% [markdown]
# ## Keys have loud channels
#
# So much for the bytes. Now for the numbers. Here are real keys: a piece of Python's own help text, run through the
# model. For each of the 64 channels of one head: how large does it get?

# %%
corpus = python_help(tokenizer)
queries, keys = queries_and_keys(model, corpus.documents(1, 256)[0, :-1])  # [L, N, heads, D]
calibration = queries_and_keys(model, corpus.calibration[: 512 if QUICK else 4096])  # other text
loudest = keys.abs().amax(1) / keys.abs().median(1).values  # [L, Hkv, D]
layer = int(loudest.amax(-1).mean(-1).argmax())
ways = {
    "as they are": None,
    "rotated (Hadamard)": Rotation(head_dim, model.device),
    "channels scaled, mean out": ChannelScaling.calibrate(calibration[1]),
    "calibrated, then rotated": calibrated(*calibration),
}
shown = {}
for name in ("as they are", "rotated (Hadamard)"):
    way = ways[name]
    k = keys[layer] if way is None else way.apply(layer, queries[layer], keys[layer])[1]
    shown[name] = list(range(head_dim)), k[:, 0].abs().amax(0).tolist()
top = max(shown["as they are"][1])
plots.curves(
    shown, f"Layer {layer}, head 0: one channel reaches {top:.0f}, half of them stay under "
    f"{sorted(shown['as they are'][1])[head_dim // 2]:.1f}. A rotation spreads the loud ones over all",
    "channel", "largest number of 256 tokens",
)

# %% [markdown]
# The scale is set by the loudest channel of a group. In 4 bits its step is so large that quiet channels get two or
# three different values. The cures change q and k *together*, so that every attention weight stays as it was:
#
# - **rotate** both by one orthogonal matrix: q·k is unchanged, and a loud channel is spread over all;
# - **scale**: divide each channel of k by a number measured once, and multiply q by it;
# - **take the mean out**: a constant in every key adds the same to every score, which a softmax does not see. It must
#   be the mean over a text as long as the contexts to be served: rotary positions turn the slow channels by less than
#   one round, so where they stand depends on how far a text goes.

# %%
show_source(Rotation.apply, ChannelScaling.calibrate, ChannelScaling.apply)

# %% [markdown]
# What does each do in 4 bits? One norm over everything would mislead, so look at the score error (before the softmax)
# and at how much of the attention moves. The last row shares a scale among 32 *tokens* of one channel. It does as well
# and cannot be served as it is: a scale is known only when its last token has come, and a shared or rolled back token
# would change its neighbours.

# %%
rows = [{"keys": name, **errors(queries, keys, per_token, way)} for name, way in ways.items()]
rows.append({"keys": "per channel, over 32 tokens", **errors(queries, keys, per_channel)})
ERRORS = {"keys": "int4 keys", "whole_tensor_error": "error of the whole", "median_channel_error": "median channel",
          "worst_channel_error": "worst channel", "score_error": "scores", "attention_variation": "attention moved"}
print(text_table(rows, ERRORS))

# %%
# NBVAL_CHECK_OUTPUT
plainly, turned, scaled, both, over_tokens = (row["score_error"] for row in rows)
print("a rotation helps:", turned < plainly, "| calibrated scales and a rotation help more:", both < turned)
print("scales over 32 tokens of a channel help too:", over_tokens < turned)
print("the error of the whole tells rotated and calibrated apart:",
      abs(rows[1]["whole_tensor_error"] / rows[3]["whole_tensor_error"] - 1) > 0.1)

# %%
print(recorded("key_errors", ERRORS))

# %% [markdown]
# ## What it does to a text
#
# The loss of each token of a text, with its keys and values stored in each format and read back. The difference to
# fp32 on the *same* tokens has a small error, though the loss itself has a large one: ± is two standard errors over
# blocks of 64 tokens.
#
# Which of these changes would you notice in a chat? Write down a guess for int8, fp8 and int4 first, in per cent of
# perplexity.

# %%
my_guess = {"int8": None, "fp8": None, "int4": None}

# %%
setting = Setting(quick=QUICK or model.device.type == "cpu", progress=progress)  # full sizes take a CPU minutes
setting.model, setting.tokenizer = model, tokenizer
documents = corpus.documents(1, 512 if QUICK else 2048)
copies = repeated(config.vocab_size, 1 if QUICK else 2, 192)
schemes = [scheme for scheme in formats.SCHEMES if scheme.main]
task = QualityTask(corpus, documents, copies)
quality = list(formats.scheme_rows(model, tokenizer, task, calibration, bar(schemes, "schemes")))
LIVE = {"scheme": "scheme", "share_of_16_bit": "of 16 bits", "perplexity": "perplexity", "perplexity_error": "+-",
        "change_percent": "change %", "change_error_percent": "+-", "copied_percent": "copied %"}
print(f"{documents.numel() - len(documents):,} tokens of {corpus.source}")
print(text_table(quality, LIVE))

# %% [markdown]
# The figures below are from full runs: contexts up to 4,096, and three tasks besides. A *code* is a number of four
# digits hidden in a long text, to be named to the digit; a CPU's run asks for sixteen at each length (eight in older
# records), so one more or less is 6 per cent. *Copied* is the share of a random text that the model repeats rightly
# when it is said a second time: it must find the one place where this token stood before.
# *Greedy agrees* is how much of an answer is the same until the first difference.

# %%
print(*dict.fromkeys(recorded("kv_quality", table) for table in formats.KV_TABLES), sep="\n\n")

# %% [markdown]
# ## The damage is uneven
#
# An average hides who pays. Here is the loss by how common the token is, by where it stands, and for the copied text.

# %%
parts = {f"{part}_tokens": f"{part}\ntokens" for part in ("rare", "medium", "common")}
parts |= {"at_under_256": "under\n256", "at_256_to_1k": "256 to\n1,024", "copying": "copied\ntext"}
worst = max(quality[1:], key=lambda row: row["change_percent"])
plots.with_errors(
    quality[1:], "scheme", parts,
    f"{worst['scheme']}: the text's perplexity grows by {worst['change_percent']:.1f} %, the loss of a copied text by "
    f"{worst['copying_change_nats']:.2f} nats", "growth of the loss, nats",
)

# %% [markdown]
# Copying is attention at its most exact: one place among hundreds must win. The average text rarely needs that. So
# formats whose perplexities are hardly told apart, given their ±, may differ widely in what they copy. Claim D5 of the
# ledger says just this: test your own task, not an average.
#
# ## Where it loses
#
# **Time.** Fewer bytes are read, but someone must turn them back into numbers. A fused GPU kernel does it on the way.
# In plain PyTorch it is work of its own, in every layer of every step. So more requests run at once, and each step is
# slower: who wins depends on the device. The `chat` lengths, shrunk, in the same bytes for each format. Predict: how
# many times the tokens per second of 16 bits does int8 give *here*?

# %%
my_guess = None

# %%
concurrency = formats.kv_concurrency(setting)
FIT = {"kv_format": "format", "tokens_that_fit": "tokens that fit", "mean_requests": "requests at once",
       "preemptions": "preempted", "steps": "steps", "tokens_per_s": "tokens/s", "times_16_bit_requests": "x requests",
       "times_16_bit_speed": "x speed", "itl_p50_ms": "ms between tokens, p50", "itl_p99_ms": "p99"}
print(text_table(concurrency.rows, FIT))

# %%
print(recorded("kv_concurrency", FIT))

# %% [markdown]
# Where two formats have equally many requests at once, all of them fitted already: room that nobody needs is worth
# nothing.
#
# **The tail.** More requests at once mean longer steps for all of them. Past the knee of chapter 2 that is all they
# mean.
#
# **Calibration.** Scales that were measured on one kind of text may not fit another.
#
# ## Weights in fewer bits
#
# A decode step reads every weight once. Halve their bytes and the step's floor halves, and what they no longer take
# is room for the cache. One call does it:

# %%
# NBVAL_CHECK_OUTPUT
for weight_format in ("int8", "int4"):
    small = quantize_weights(model, weight_format)
    print(f"{weight_format}: a step reads {small.weight_bytes / 1e6:.0f} MB of weights in place of "
          f"{model.weight_bytes / 1e6:.0f}; the embedding table is untouched: {small.embedding is model.embedding}")

# %% [markdown]
# Is the step faster? PyTorch has CPU kernels that read such weights directly. They win while the bytes decide, with
# few rows; with many rows the arithmetic decides, and the gain shrinks or is lost. Predict: how many times as fast is a
# step of one row with int8 weights, a quarter of the bytes?

# %%
my_guess = None

# %%
speed = formats.weight_speed(setting)
SPEED = {"weights": "weights", "rows": "rows", "read_mb": "MB read", "step_ms": "step ms", "min_ms": "min",
         "max_ms": "max", "times_faster": "times as fast", "mbu": "share of the bandwidth",
         "cache_tokens_in_1_gib": "tokens of cache in 1 GiB beside"}
print(text_table(speed.rows, SPEED))

# %%
print(recorded("weight_speed", SPEED))

# %%
print(*dict.fromkeys(recorded("weight_quality", table) for table in formats.WEIGHT_TABLES), sep="\n\n")

# %% [markdown]
# Speed has its price: see the change in per cent. And read the quality of *weights* with care. The default checkpoint
# was itself stored in 4 bits once, in groups of 32: its weights take only 16 values in each. We use groups of 64, so
# that int4 is not lossless, but such weights are still kinder to 4 bits than those of a model that never was quantised.
# In the checkpoint's own groups of 32 nothing is lost at all: not one logit differs. The verdicts below on weights are
# verdicts on this checkpoint.
#
# ## Claims of the ledger that this page settles
#
# By the ledger's own rules: on this device, just now, and on every device that has a recorded run. What was measured
# just now comes from a short text: mind its ±.

# %%
print(ledger({"C6": quality, "D1": quality, "D2": quality, "D3": speed, "D4": quality, "D5": quality,
              "D6": quality}))

# %% [markdown]
# ## What a production engine calls this
#
# | here | vLLM | SGLang | llama.cpp |
# |---|---|---|---|
# | `kv_format="fp8"` | `--kv-cache-dtype fp8` | `--kv-cache-dtype fp8_e4m3` | |
# | `kv_format="int8"`, `"int4"` | | | `--cache-type-k q8_0`, `--cache-type-v q4_0` |
# | scales | one per layer, from the checkpoint | the same | one per 32 numbers |
# | `quantize_weights` | `--quantization` and the checkpoint's own | `--quantization` | the file's own |
#
# ## Exercise
#
# A model has heads of 128 numbers. Which share of 16 bits does int8 take then, and which int4? Fill in two numbers to
# three decimals. In [exercise 8](../exercises/08_quantised_kv.ipynb) you write the formats yourself.

# %%
int8_share, int4_share = None, None

wide = minillm.ModelConfig.preset("llama-3-8b")  # heads of 128
for kv_format, answer in (("int8", int8_share), ("int4", int4_share)):
    right = kv_bytes_per_token(wide, kv_format) / kv_bytes_per_token(wide, "bf16")
    print("not answered yet" if answer is None else
          "right" if abs(answer - right) < 0.001 else "no: count the scales' bytes of one head")

# %% [markdown]
# [How these pages are made](README.md) · before: [4 · Paged KV](04_paged_kv.ipynb) · next:
# [6 · Speculative decoding](06_speculative.ipynb)
