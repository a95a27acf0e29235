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
import torch

import minillm
from minillm.measure.measurement import device_name

model, tokenizer = minillm.load_model(dtype="fp32"), minillm.load_tokenizer()
config, head_dim = model.config, model.config.head_dim
print(device_name(model.device))

# %% [markdown]
# ## Build: a number in 8 bits
#
# Take the 64 numbers of one key. Find the largest, divide it by 127, and call that the scale. Now every number is a
# whole multiple of the scale, of -127 to 127, give or take half a step. Keep the whole numbers, a byte each, and the
# scale, in two bytes.

# %%
def quantise(x):
    """x [..., D] -> whole numbers of a byte each [..., D], and a scale in two bytes [..., 1]."""
    scale = (x.abs().amax(-1, keepdim=True) / 127).half()
    codes = (x / scale.float()).round().clamp(-127, 127)  # by the scale as it is stored, which may be a little small
    return codes.to(torch.int8), scale


def dequantise(codes, scale):
    return codes.float() * scale.float()


# %%
# NBVAL_CHECK_OUTPUT
key = torch.tensor([0.31, -2.54, 0.02, 1.27])
codes, scale = quantise(key)
print("scale:", round(float(scale), 4), "codes:", codes.tolist())
print("read back:", [round(number, 2) for number in dequantise(codes, scale).tolist()])

# %% [markdown]
# A store writes tokens into places and reads them back. Attention does not know which store it reads: it asks for
# places and gets numbers. Ours keeps the codes and the scales of all layers.

# %%
class Int8Store:
    """The keys, or the values, of all places in 8 bits."""

    def __init__(self, places):
        shape = config.num_hidden_layers, places, config.num_key_value_heads
        self.codes = torch.zeros(*shape, head_dim, dtype=torch.int8, device=model.device)  # [L, places, Hkv, D]
        self.scales = torch.zeros(*shape, 1, dtype=torch.float16, device=model.device)  # [L, places, Hkv, 1]

    def write(self, layer, places, x):
        """x [N, Hkv, D] into places [N]."""
        self.codes[layer, places], self.scales[layer, places] = quantise(x)

    def read(self, layer, places):
        """Places [S] -> [S, Hkv, D]."""
        return dequantise(self.codes[layer, places], self.scales[layer, places])


# %% [markdown]
# Every token and head has a scale of its own. That costs two bytes, and allows much: a token can be appended, shared
# with another request, or rolled back, and no neighbour's bytes change.
#
# The loop is chapter 1's, for one sequence. Its cache has one change: where it sliced its own tensors, it asks a store.
# The margins say how far the likeliest token was ahead of the second.

# %%
from minillm.ladder.decode import attend  # rung 1's, for one row


class Cache:
    """Keys and values of one sequence, in a store each."""

    def __init__(self, keys, values):
        self.keys, self.values, self.length = keys, values, 0

    def attend(self, layer, q, k, v):
        """q [N, Hq, D], k and v [N, Hkv, D] of the new tokens -> [N, Hq, D]."""
        seen = torch.arange(self.length + len(q), device=q.device)  # [S]: the stored tokens and the new ones
        self.keys.write(layer, seen[self.length :], k)
        self.values.write(layer, seen[self.length :], v)
        return attend(q, self.keys.read(layer, seen), self.values.read(layer, seen), self.length)


@torch.inference_mode()
def decode(prompt, max_tokens, cache):
    answer, margins, feed = [], [], prompt
    while len(answer) < max_tokens:
        tokens = torch.tensor(feed, device=model.device)  # [N]: first the prompt, then the last token
        positions = torch.arange(cache.length, cache.length + len(feed), device=model.device)  # [N]
        logits = model.forward(tokens, positions, cache, tokens.new_tensor([len(feed) - 1]))  # [1, V]
        cache.length += len(feed)
        (first, second), (best, _) = (part[0].tolist() for part in logits.topk(2))
        margins.append(first - second)
        feed = [best]
        answer.append(best)
    return answer, margins


# %% [markdown]
# Is it right? First the package's own int8 store under the same loop: after the same text it must hold the same bytes,
# and so lead to the same tokens. Then the package's engine, whose attention sums in another order: a number halfway
# between two codes may fall to the other one. So its tokens are compared as far as no token was a close call.

# %%
# NBVAL_CHECK_OUTPUT
from minillm import Engine, SamplingParams
from minillm.ladder.quantized import kv_bytes_per_token, kv_storage

prompt, length = tokenizer.chat("Name three primary colours."), 20
places = len(prompt) + length - 1  # the last token is never fed
ours = Cache(Int8Store(places), Int8Store(places))
answer, margins = decode(prompt, length, ours)
storage = kv_storage(config, "int8", places, model.device)
theirs = Cache(storage.keys, storage.values)
print("same tokens over the package's store:", decode(prompt, length, theirs)[0] == answer)
for name in ("keys", "values"):
    mine, other = getattr(ours, name), getattr(theirs, name)
    print(f"{name}: same codes {torch.equal(mine.codes, other.codes.view(torch.int8))}, "
          f"same scales {torch.equal(mine.scales[..., 0], other.scales)}")
CLOSE = 0.1  # between the two largest logits
sure = next((i for i, margin in enumerate(margins) if margin < CLOSE), length)
(served,) = Engine(model, kv_format="int8").generate([prompt], SamplingParams(max_tokens=length, ignore_eos=True))
print("same tokens as the package's engine, before any close call:", served.token_ids[:sure] == answer[:sure], sure > 3)
stored = sum(part.nbytes for store in (ours.keys, ours.values) for part in (store.codes, store.scales))
print(f"{stored // places:,} bytes per token; as the package: {stored == places * kv_bytes_per_token(config, 'int8')}")

# %%
print("in int8:", tokenizer.decode(answer))
native = kv_storage(config, "fp32", places, model.device)
print("in fp32:", tokenizer.decode(decode(prompt, length, Cache(native.keys, native.values))[0]))

# %% [markdown]
# Now the package's source.

# %%
from minillm.course.show.source import show_source
from minillm.ladder.quantized import CodedStore, int4_decode, int4_encode, int8_encode, stored_scale

show_source(stored_scale, int8_encode, CodedStore.write, CodedStore.read)

# %% [markdown]
# What it adds to ours:
#
# - a scale is never 0 (of a key whose numbers are all 0, ours divides 0 by 0) and never infinite;
# - numbers that are not finite make their scale NaN, so that the damage shows, as it would without quantisation;
# - the same store holds other formats. `int4` has sixteen steps, too few to spend one on a sign: it keeps the smallest
#   number of a group of 32 and counts upwards from there. `fp8` divides too, but then keeps each number as a float of
#   8 bits, whose steps are fine near zero and coarse at the top;
# - keys can be changed before they are stored; "Keys have loud channels" below says why.
#
# ## Predict
#
# - How many times as many tokens fit into the same bytes with int8 as with 16 bits? Exactly twice?
# - And with int4, whose scale and minimum (2 bytes each) serve 32 numbers?
#
# Put your guesses in place of `None`; the page compares them with what is measured.

# %%
from minillm.course.show.guesses import guess, guesses, reveal

guess("tokens with int8, over 16 bits", None)
guess("tokens with int4, over 16 bits", None)

# %%
# NBVAL_CHECK_OUTPUT
plain = kv_bytes_per_token(config, "bf16")
for kv_format in ("fp32", "bf16", "fp8", "int8", "int4"):
    stored = kv_bytes_per_token(config, kv_format)
    allocated = kv_storage(config, kv_format, slots=100).nbytes
    print(f"{kv_format}: {stored:>6,} bytes per token, {stored / plain:.4f} of 16 bits, {plain / stored:.2f} times the "
          f"tokens; as allocated: {allocated == 100 * stored}")

# %%
for kv_format in ("int8", "int4"):
    reveal(f"tokens with {kv_format}, over 16 bits", plain / kv_bytes_per_token(config, kv_format))

# %% [markdown]
# ## Measure: how many fit
#
# 64 requests in the bytes that hold 1,024 tokens of 16 bits. The scheduler and the pool are the real ones; there is
# no model in this cell, so the counts are exact.

# %%
# NBVAL_CHECK_OUTPUT
from minillm.course.experiments import common, formats
from minillm.measure import metrics
from minillm.measure.workload import lognormal

items = lognormal(1.0, requests=64, mean_tokens=48, prompt_tokens=48)
for kv_format in ("fp32", "bf16", "int8", "int4"):
    records = common.count(config, items, kv_format=kv_format, kv_memory=1024 * plain, max_batch=64)
    summary = metrics.summary(records)
    rows = sum(step.rows for step in records.steps) / len(records.steps)
    print(f"{kv_format}: {rows:.1f} concurrent requests on average, up to {summary['batch']['peak_rows']}; "
          f"{summary['steps']} steps, {summary['preemptions']} preempted")

# %% [markdown]
# ## Keys have loud channels
#
# So much for the bytes. Now for the numbers. Here are real keys: a piece of Python's own help text, run through the
# model. For each of the 64 channels of one head: how large does it get?

# %%
import os

from minillm.course.experiments.formats import calibrated, errors, per_channel, per_token, queries_and_keys
from minillm.course.experiments.quality import QualityTask, python_help, repeated
from minillm.course.show import cache_drawings, plots
from minillm.extras.key_scaling import ChannelScaling
from minillm.ladder.quantized import Rotation

QUICK = os.environ.get("MINILLM_QUICK") == "1"  # small sizes, for tests
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
sizes = {}
for name in ("as they are", "rotated (Hadamard)"):
    way = ways[name]
    k = keys[layer] if way is None else way.apply(layer, queries[layer], keys[layer])[1]
    sizes[name] = k[:, 0].abs().amax(0).tolist()
top, middle = max(sizes["as they are"]), sorted(sizes["as they are"])[head_dim // 2]
plots.sorted_bars(
    sizes, f"Layer {layer}, head 0: one channel reaches {top:.0f}, half of them stay under {middle:.1f}; rotated, the "
    f"largest is {max(sizes['rotated (Hadamard)']):.0f}", f"the {head_dim} channels, largest first",
    "largest number of 256 tokens",
)

# %% [markdown]
# Here is one key of that head, the one with the largest number: each of its numbers as computed, and as stored. In
# int8 our own two functions read it back. In int4 each half of the key has sixteen steps of its own.

# %%
key = keys[layer, int(keys[layer, :, 0].abs().amax(-1).argmax()), 0].cpu()  # [D]
codes, scale = quantise(key)
lines = {"int8": (key, torch.arange(-127, 128) * float(scale), dequantise(codes, scale))}
packed, steps, lowest = int4_encode(key, group=32)
for half, back in enumerate(int4_decode(packed, steps, lowest).split(32)):
    levels = float(lowest[half]) + float(steps[half]) * torch.arange(16)
    lines[f"int4, numbers {32 * half} to {32 * half + 31}"] = key.split(32)[half], levels, back
cache_drawings.number_lines(
    lines, f"One key: a step of int8 is {float(scale):.2f}; one of int4 is up to "
    f"{float(steps.max()) / float(scale):.0f} times as wide"
)

# %% [markdown]
# The scale is set by the loudest channel of a group. In 4 bits its step is then so large that quiet channels get two
# or three different values. The cures change q and k *together*, so that every attention weight stays as it was:
#
# - **rotate** both by one orthogonal matrix: q·k is unchanged, and a loud channel is spread over all;
# - **scale**: divide each channel of k by a number measured once, and multiply q by it;
# - **take the mean out**: a constant in every key adds the same to every score, which a softmax does not see. It must
#   be the mean over a text as long as the contexts to be served: low-frequency RoPE channels never complete a turn, so
#   their mean depends on the text's length.

# %%
show_source(Rotation.apply, ChannelScaling.calibrate, ChannelScaling.apply)

# %% [markdown]
# What does each do in 4 bits? One norm over everything would mislead, so look at the score error (before the softmax)
# and at how much of the attention moves. The last row shares a scale among 32 *tokens* of one channel, as KIVI does
# (Liu et al., 2024).

# %%
from minillm.course.show.recorded import ledger, recorded
from minillm.course.show.tables import text_table

rows = [{"keys": name, **errors(queries, keys, per_token, way)} for name, way in ways.items()]
rows.append({"keys": "per channel, over 32 tokens", **errors(queries, keys, per_channel)})
ERRORS = {"keys": "int4 keys", "whole_tensor_error": "error of the whole", "median_channel_error": "median channel",
          "worst_channel_error": "worst channel", "score_error": "scores", "attention_variation": "attention moved"}
print(text_table(rows, ERRORS))
best = {title: min(rows, key=lambda row: row[name])["keys"] for name, title in ERRORS.items() if name != "keys"}
print("best:", "; ".join(f"{title}: {keys}" for title, keys in best.items()))

# %%
# NBVAL_CHECK_OUTPUT
plainly, turned, _, both, _ = (row["score_error"] for row in rows)
print("a rotation helps:", turned < plainly, "| calibrated scales and a rotation help more:", both < turned)
print("scales over 32 tokens of a channel beat a rotation in every column:",
      all(rows[-1][name] < rows[1][name] for name in ERRORS if name != "keys"))
print("the error of the whole tells rotated and calibrated apart:",
      abs(rows[1]["whole_tensor_error"] / rows[3]["whole_tensor_error"] - 1) > 0.1)

# %% [markdown]
# A scale for each channel does better than the rotation in every column, and yet it cannot be served as it is: the
# scale is known only when its last token has come, and a token that is shared or rolled back would change its
# neighbours. KIVI therefore keeps the newest tokens in 16 bits until their group is full. Of what can be served token
# by token, the calibrated way is the best for the scores; the line under the table says where it comes out ahead of
# the channels' own scales, if anywhere.
#
# The same on a longer text, where it was recorded:

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
for kv_format, percent in {"int8": None, "fp8": None, "int4": None}.items():
    guess(f"perplexity, growth by {kv_format} in %", percent)

# %%
from minillm.course.setting import Setting
from minillm.course.show.live import bar, progress

setting = Setting(quick=QUICK or model.device.type == "cpu", progress=progress)  # full sizes take a CPU minutes
setting.model, setting.tokenizer = model, tokenizer
documents = corpus.documents(1, 512 if QUICK else 2048)
copies = repeated(config.vocab_size, 1 if QUICK else 2, 192)
schemes = [scheme for scheme in formats.SCHEMES if scheme.main]
task = QualityTask(corpus, documents, copies)
quality = list(formats.scheme_rows(model, tokenizer, task, calibration, bar(schemes, "schemes")))
LIVE = {"scheme": "scheme", "perplexity": "perplexity", "perplexity_error": "+-", "change_percent": "change %",
        "change_error_percent": "+-", "copied_percent": "copied %"}
print(f"{documents.numel() - len(documents):,} tokens of {corpus.source}")
print(text_table(quality, LIVE))
for row in quality:
    reveal(f"perplexity, growth by {row['scheme']} in %", row["change_percent"])

# %% [markdown]
# The figures below are from full runs: contexts up to 4,096, and three tasks besides. A *code* is a number of four
# digits hidden in a long text, to be named to the digit; a CPU's run asks for sixteen at each length (eight in older
# records), so one more or less is 6 per cent. *Copied* is the share of a random text that the model repeats rightly
# when it is said a second time: it must find the one place where this token stood before.
# *Greedy agrees* is how much of an answer is the same until the first difference.

# %%
texts, _, abilities = formats.KV_TABLES
shown = "scheme", "change_percent", "change_error_percent", "same_first_choice_percent", "greedy_agree_percent"
few = {column: title for column, title in texts.items() if column in shown}
tasks = {column: title for column, title in abilities.items() if not column.startswith("copying")}
print(recorded("kv_quality", few), recorded("kv_quality", tasks), sep="\n\n")

# %% [markdown]
# ## The damage is uneven
#
# An average hides which tokens pay. Here is the loss by how common the token is, by where it stands, and for the copied
# text, which has a scale of its own.

# %%
parts = {f"{part}_tokens": f"{part}\ntokens" for part in ("rare", "medium", "common")}
parts |= {"at_under_256": "under\n256", "at_256_to_1k": "256 to\n1,024", "copying": "copied\ntext"}
worst = max(quality[1:], key=lambda row: row["change_percent"])
plots.with_errors(
    quality[1:], "scheme", parts,
    f"{worst['scheme']}: the text's perplexity grows by {worst['change_percent']:.1f} %, the loss of a copied text by "
    f"{worst['copying_change_nats']:.2f} nats", "growth of the loss, nats", apart=["copying"],
)

# %% [markdown]
# A bar is two standard errors of the mean; where too few tokens are measured to know it, the point is hollow. Some
# points lie below zero, as if storing fewer bits made the model better. Do any lie there by more than their bar?

# %%
points = [(row["scheme"], name.replace("\n", " "), row[f"{part}_change_nats"], row[f"{part}_change_error_nats"])
          for row in quality[1:] for part, name in parts.items() if row.get(f"{part}_change_error_nats") is not None]
below = [point for point in points if point[2] < 0]
beyond = [point for point in below if point[2] + point[3] < 0]
print(f"{len(below)} of {len(points)} points lie below zero, {len(beyond)} of them by more than their bar")
for scheme, name, change, error in beyond:
    print(f"{scheme}, {name}: {change:.3f} +- {error:.3f}")
print(f"by chance alone, of {len(points)} points without any change, about {0.025 * len(points):.1f} would")

# %% [markdown]
# Copying is attention at its most exact: one place among hundreds must win. The average text rarely needs that. So
# formats whose perplexities are hardly told apart, given their ±, may differ widely in what they copy. Claim D5 of the
# ledger says just this: test your own task, not an average.
#
# ## Where it loses
#
# **Time.** Fewer bytes are read, but someone must turn them back into numbers. A fused GPU kernel does it on the way.
# In plain PyTorch it is work of its own, in every layer of every step. So more requests run concurrently, and each
# step is slower: which of the two wins depends on the device. The `chat` lengths, shrunk, in the same bytes for each
# format. Predict: how many times the tokens per second of 16 bits does int8 give *here*?

# %%
guess("tokens/s with int8, over 16 bits", None)

# %%
concurrency = formats.kv_concurrency(setting)
FIT = {"kv_format": "format", "tokens_that_fit": "tokens that fit", "mean_requests": "requests, mean",
       "times_16_bit_requests": "x requests", "times_16_bit_speed": "x speed", "itl_p99_ms": "ms between tokens, p99"}
print(text_table(concurrency.rows, FIT))
of_format = {row["kv_format"]: row for row in concurrency.rows}
reveal("tokens/s with int8, over 16 bits", of_format["int8"]["times_16_bit_speed"])

# %%
print(recorded("kv_concurrency", FIT))

# %% [markdown]
# Where two formats run equally many requests concurrently, all of them fitted already: once all requests fit, spare
# memory adds no speed.
#
# **The tail.** More concurrent requests mean longer steps for all of them. Past the knee of chapter 2 that is all they
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
from minillm import quantize_weights

for weight_format in ("int8", "int4"):
    small = quantize_weights(model, weight_format)
    print(f"{weight_format}: a step reads {small.weight_bytes / 1e6:.0f} MB of weights in place of "
          f"{model.weight_bytes / 1e6:.0f}; the embedding table is untouched: {small.embedding is model.embedding}")

# %% [markdown]
# Is the step faster? PyTorch has CPU kernels that read such weights directly. They win while the bytes decide, with
# few rows; with many rows the arithmetic decides, and the gain shrinks or is lost. Predict: how many times as fast is a
# step of one row with int8 weights, a quarter of the bytes?

# %%
guess("a step of one row with int8 weights, times as fast", None)

# %%
speed = formats.weight_speed(setting)
SPEED = {"weights": "weights", "rows": "rows", "read_mb": "MB read", "step_ms": "step ms",
         "times_faster": "times as fast", "mbu": "share of the bandwidth"}
print(text_table(speed.rows, SPEED))
one_row = next(row for row in speed.rows if (row["weights"], row["rows"]) == ("int8", 1))
reveal("a step of one row with int8 weights, times as fast", one_row["times_faster"])

# %%
PRICE = {"weights": "weights", "read_mb": "MB read a step", "change_percent": "perplexity, change %",
         "change_error_percent": "+-"}
print(recorded("weight_speed", SPEED), recorded("weight_quality", PRICE), sep="\n\n")

# %% [markdown]
# Speed has its price: see the change in per cent, and read it with care. The default checkpoint was itself stored in 4
# bits once, so its weights are kinder to 4 bits than those of a model that never was. The verdicts below on weights are
# verdicts on this checkpoint.
#
# ## Claims of the ledger that this page settles
#
# By the [ledger](CLAIMS.md)'s own rules: on this device, just now, and on every device that has a recorded run. What
# was measured just now comes from a short text: mind its ±.

# %%
print(ledger({"C6": quality, "D1": quality, "D2": quality, "D3": speed, "D4": quality, "D5": quality,
              "D6": quality}))

# %%
guesses()  # yours, the nearest first

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
