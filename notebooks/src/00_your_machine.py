# %% [markdown]
# # 0 · Your machine
#
# Two numbers of your machine decide how fast a language model can run on it: how fast it reads memory, and how fast
# it multiplies. This chapter measures both, predicts the tokens per second from them, and then looks.
#
# **You will learn**
# - what one step of a model must read, and what it must compute;
# - which of your machine's two limits stops a decode step, and which a prefill;
# - to predict tokens per second from a data sheet;
# - when the prediction is wrong.
#
# **To run this page**: `make lab` in the repository, or `pip install -e ".[lab]"` and open the notebook. The first
# run fetches SmolLM2-135M-Instruct (93 MB).
#
# In the cells of all pages, `Setting(...)` says what an experiment runs on: model, device, sizes. `QUICK` is true in
# tests, which take small sizes. A cell that begins with `# NBVAL_CHECK_OUTPUT` prints the same on every machine, and
# tests compare it with what is stored.

# %%
# Where the package is missing, as on Colab: open this page inside a copy of the repository, and this installs it.
# ("minillm" on PyPI is another project.)
import importlib.util
import subprocess
import sys

if importlib.util.find_spec("minillm") is None:
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "..[lab]"], check=True)

# %%
import minillm
from minillm.course.show.page import *  # guess, reveal, plots, text_table, show_source, ledger and the like

setting = Setting(quick=QUICK, progress=progress)
model = setting.timed_model  # on a GPU random weights of Llama-3-8B's shape: the default model is too small for one
print(device_name(model.device))

# %% [markdown]
# ## Predict
#
# How many GB per second does this machine read from memory, and how many GFLOP per second (10⁹ multiplications and
# additions) does it reach in a product of two large matrices? Write your guess in place of `None`, even a wild one. It
# is kept and set beside what is measured; a blank one stays silent.

# %%
guess("GB/s that this machine reads", None)
guess("GFLOP/s that it multiplies", None)

# %% [markdown]
# ## Build: two readings
#
# Bandwidth: copy an array that is far larger than any cache, and count the bytes read and written. Rate: multiply
# two large square matrices; n³ products and as many sums, so 2 n³ FLOP. Each is the best of several readings, since
# we want a limit.

# %%
from minillm.measure import roofline

show_source(roofline.measured_bandwidth, roofline.measured_matmul_rate)

# %%
ceilings = setting.ceilings  # measured here, and kept
print(f"reads {ceilings.bytes_per_s / 1e9:,.1f} GB/s")
print(f"multiplies {ceilings.flops_per_s / 1e9:,.0f} GFLOP/s")
print(f"in the time of reading one byte it multiplies {ceilings.flops_per_s / ceilings.bytes_per_s:.1f} FLOP")
reveal("GB/s that this machine reads", ceilings.bytes_per_s / 1e9)
reveal("GFLOP/s that it multiplies", ceilings.flops_per_s / 1e9)

# %% [markdown]
# The last line is the machine's **ridge**. Work that does fewer FLOP per byte than this waits for memory; work that
# does more waits for the arithmetic units.
#
# ## What a step must do
#
# To decode one token, every weight of the model is read once and used in one multiplication and one addition. The
# keys and values of the text so far are read too. `least_work` adds up both.

# %%
from minillm.measure.roofline import Ceilings, StepShape, StepWork, least_work

show_source(least_work)

# %% [markdown]
# In numbers, for this model: each weight is 2 FLOP. In fp32 a weight is 4 bytes, so a decoded token does about
# 2 / 4 = 0.5 FLOP for each byte. In 16 bits it is 1. A prefill of 256 tokens reads the weights once as well, and
# multiplies for 256 tokens.
#
# The default checkpoint was published in 4 bits (Q4_1), and is dequantised when it is fetched: a weight of a group of
# 32 has one of 16 values, but is stored and computed in fp32. So bytes and times here are those of fp32; what it means
# for quality is said in chapter 5.

# %%
# NBVAL_CHECK_OUTPUT
config = minillm.ModelConfig.preset("smollm2-135m")
weights = roofline.read_numbers(config)
print(f"weights that a step reads: {weights / 1e6:.1f} million, in fp32 {4 * weights / 1e6:.0f} MB")
STEPS = {"decode 1": StepShape.decode([64]), "decode 8": StepShape.decode([64] * 8),
         "prefill 256": StepShape.of([(0, 256, 1)])}
for label, shape in STEPS.items():
    work = least_work(config, "fp32", shape, 4 * weights)
    print(f"{label:>11}: {work.bytes / 1e6:.0f} MB, {work.flops / 1e9:.2f} GFLOP, {work.flops / work.bytes:.1f} FLOP/B")

# %% [markdown]
# The roofline says: a step takes at least its bytes over the bandwidth, and at least its FLOP over the rate, so at
# least the longer of the two. A machine with easy numbers, 10 GB/s and 100 GFLOP/s, has its ridge at 10 FLOP per byte:

# %%
# NBVAL_CHECK_OUTPUT
easy = Ceilings(bytes_per_s=10e9, flops_per_s=100e9)
for label, shape in STEPS.items():
    work = least_work(config, "fp32", shape, 4 * weights)
    print(f"{label:>11}: {work.bytes / 10e9 * 1e3:.1f} ms to read, {work.flops / 100e9 * 1e3:.1f} ms to multiply: "
          f"at least {easy.least_seconds(work) * 1e3:.1f} ms, bound by {easy.bound_by(work)}")
at_the_ridge = StepWork(bytes=10e9, flops=100e9)
print("at the ridge both take the same time:", easy.mbu(at_the_ridge, 1.0) == easy.mfu(at_the_ridge, 1.0) == 1.0)

# %% [markdown]
# ## Predict: tokens per second
#
# You have your machine's bandwidth above, and the bytes of a step. One request, one token a step: how many tokens
# per second at most? And how many per cent of that does the model reach? Write both down before the next cells.

# %%
guess("tokens/s of one request, at most", None)
guess("share of it that is reached, %", None)

# %%
one = least_work(model.config, "fp32" if model.dtype.itemsize == 4 else "bf16", StepShape.decode([64]),
                 model.weight_bytes)
print(f"{one.bytes / 1e6:.0f} MB at {ceilings.bytes_per_s / 1e9:.1f} GB/s: at most "
      f"{1 / ceilings.least_seconds(one):,.0f} tokens/s")
reveal("tokens/s of one request, at most", 1 / ceilings.least_seconds(one))

# %% [markdown]
# ## Measure
#
# Decode steps with 1, 8 and more rows, and prefills of some lengths, each beside the least time that the limits
# allow. **MBU** is the share of the bandwidth that the step's least bytes account for, **MFU** the share of the
# matmul rate that its FLOP account for.

# %%
from minillm.course.experiments import limits

steps = limits.roofline_steps(setting)
STEPS_MEASURED = {"kind": "step", "tokens": "tokens", "least_ms": "least ms", "step_ms": "measured ms", "mbu": "MBU",
                  "mfu": "MFU"}
print(text_table(steps.rows, STEPS_MEASURED))

# %%
service_plots.roofline(steps.rows, ceilings)

# %% [markdown]
# A point under the slanted part waits for memory, one under the level part for the arithmetic units. How far it
# lies below the roof is time spent on neither reading nor multiplying at full speed. Going from left to right along the
# decode points, more rows share one reading of the weights: that is batching, and chapter 2. A point above the roof
# means that something else kept the machine busy while the limits were read: run the page again.

# %%
decoded, longest = steps.rows[0], steps.rows[-1]
print(f"predicted at most {1e3 / decoded['least_ms']:,.0f} tokens/s for one request, measured "
      f"{decoded['tokens_per_s']:,.0f}: {decoded['least_ms'] / decoded['step_ms']:.0%}")
print(f"prefill of {longest['tokens']}: {longest['tokens_per_s']:,.0f} tokens/s, "
      f"{longest['tokens_per_s'] / decoded['tokens_per_s']:.0f} times the decode of one request")
reveal("share of it that is reached, %", 100 * decoded["least_ms"] / decoded["step_ms"])

# %% [markdown]
# ## Eight prompts, or eight rows that decode
#
# A prompt of a hundred tokens already shares one reading of the weights among its hundred tokens. A row that decodes
# shares it with nothing. Predict: how many times the tokens per second do eight *prompts* in one step give, beside
# one? And eight rows that decode?

# %%
guess("eight prompts, times the tokens/s of one", None)
guess("eight rows that decode, times the tokens/s of one", None)

# %%
phases = limits.prefill(setting)
PHASES = {"phase": "phase", "rows": "rows", "tokens_each": "tokens each", "tokens_per_s": "tokens/s", "mbu": "MBU",
          "mfu": "MFU"}
print(text_table(phases.rows, PHASES))
speed = {(row["phase"], row["rows"], row["tokens_each"]): row["tokens_per_s"] for row in phases.rows}
for phase, words in (("prefill", "eight prompts"), ("decode", "eight rows that decode")):
    tokens = next(each for at, rows, each in speed if (at, rows) == (phase, 8))
    times = speed[phase, 8, tokens] / speed[phase, 1, tokens]
    print(f"{words} give {times:.2f} times the tokens/s of one")
    reveal(f"{words}, times the tokens/s of one", times)

# %% [markdown]
# A prompt uses the arithmetic units well by itself, so there is little to gain from a second one. Rows that decode
# leave them idle: that is the gain of chapter 2.
#
# ## From a data sheet
#
# The same division for machines that you may not have. Llama-3-8B in 16 bits reads 15.0 GB a step. `CostModel` takes
# 85 % of the promised bandwidth, which is about what a large copy reaches, and a millisecond for launches.

# %%
# NBVAL_CHECK_OUTPUT
from minillm.ladder.quantized import kv_bytes_per_token
from minillm.measure.virtual import DEVICES, CostModel

llama = minillm.ModelConfig.preset("llama-3-8b")
read = 2 * roofline.read_numbers(llama)
print(f"weights read a step: {read / 1e9:.1f} GB; keys and values: {kv_bytes_per_token(llama, 'bf16'):,} bytes a token")
for name in ("l4", "rtx-4090", "a100-80gb", "h100", "h200"):
    bound = DEVICES[name].gb_per_s * 1e9 / read
    expected = 1 / CostModel.of_device(name, llama).seconds(StepShape.decode([64]))
    below = "yes" if expected < bound else "NO"
    print(f"{name:>9}: {DEVICES[name].gb_per_s:,} GB/s allow {bound:.0f} tokens/s; the estimate is lower: {below}")

# %% [markdown]
# The same, in finer counts, for what this engine is asked to reach on one of them, an H200. A kernel that starts and
# ends has a price beside its reading, no kernel reads at the full speed of a copy, and between two steps Python works.
# How much of each is not known before a run: so there are two bounds for each, and a prediction is a range. Beside it
# stands what was recorded there.

# %%
from minillm.course.targets import COLUMNS, FAST, SLOW, targets

print("bounds, slow:", SLOW)
print("bounds, fast:", FAST)
print(text_table(targets(), COLUMNS))

# %% [markdown]
# ## Where it loses
#
# The roofline counts work. Every step also has a fixed overhead: each operation must be called, and on a GPU
# launched. A small model does almost no work in as many calls. Here is the model beside ever narrower ones with as many
# layers and random weights, one token each. The narrowest reads about sixty times less than the model. How many times
# faster is its step? Write it down.

# %%
guess("times faster, the narrowest model's step", None)

# %%
narrow = limits.mbu_by_width(setting)
NARROW = {"width": "hidden size", "read_mb": "must read MB", "least_ms": "least ms", "step_ms": "measured ms",
          "lost_ms": "neither: ms", "mbu": "MBU"}
print(text_table(narrow.rows, NARROW))

# %%
widths = [row["width"] for row in narrow.rows]
wide, slim = narrow.rows[0], narrow.rows[-1]
faster = wide["step_ms"] / slim["step_ms"]
reveal("times faster, the narrowest model's step", faster)
plots.curves(
    {"measured": (widths, [row["step_ms"] for row in narrow.rows]),
     "least, by the roofline": (widths, [row["least_ms"] for row in narrow.rows])},
    f"{wide['read_mb'] / slim['read_mb']:.0f} times less to read makes a step {faster:.1f} times faster: "
    f"{slim['lost_ms'] / slim['step_ms']:.0%} of the narrowest model's {slim['step_ms']:.1f} ms are calls",
    f"hidden size ({model.config.num_hidden_layers} layers each)", "ms for one token", log_x=True, log_y=True,
)

# %% [markdown]
# The narrowest model makes the same calls as the full one and does almost no work, so its time is the price of the
# calls. But do the calls explain what the *full* model loses? Time its matrix products alone, each once and in their
# order, with nothing between them, and split the step:

# %%
import torch

from minillm.measure.measurement import time_seconds

linears = [*(getattr(layer, name) for layer in model.layers for name in layer.LINEARS), model.head]
inputs = [torch.randn(1, each.weight.shape[1], device=model.device, dtype=model.dtype) for each in linears]  # [1, in]


@torch.inference_mode()
def products():
    for linear, x in zip(linears, inputs, strict=True):
        linear(x)  # [1, out]


alone_ms, calls = 1e3 * time_seconds(products, model.device, warmups=3, repeats=7).median, slim["lost_ms"]
print(f"{wide['step_ms']:>6.1f} ms  the step of the full model, of which")
print(f"{wide['least_ms']:>6.1f} ms  are the reading of all weights, at the speed of a copy")
print(f"{alone_ms - wide['least_ms']:>6.1f} ms  are what its {len(linears)} matrix products take beyond that")
print(f"{calls:>6.1f} ms  are calls, as the narrowest model has them: {calls / wide['lost_ms']:.0%} of what is lost")
print(f"{wide['step_ms'] - alone_ms - calls:>6.1f} ms  are neither")

# %% [markdown]
# Calls are fixed: every step pays for them, whatever it reads. So a small model on a large GPU runs far below its roof
# unless its launches are recorded once and replayed (CUDA graphs). The products are the loss that grows with the
# weights: a product with one row can read its matrix more slowly than a large copy runs. (They contain calls of their
# own, which are counted twice here.) The last line is the rest: attention, norms, what one operation evicts from the
# processor's caches before the next needs it, and the noise of figures that were not measured at the same time, which
# can make it negative. The roofline is a bound and not a forecast.
#
# Other things that the two numbers do not know: a laptop that gets warm, a machine that others use at the same time,
# and a model that fits into a cache.
#
# ## Claims of the ledger that this page settles
#
# Two articles on LLM serving gave this course its questions. The **ledger** lists what they claim, each claim with an
# experiment and a rule that judges it ([the whole of it](CLAIMS.md)). Each page ends with the claims that it
# settles: by what it measured just now on this device, and by every recorded run. A1 asks for the step of fewer and
# fewer layers, which is measured first.

# %%
by_depth = limits.decode_step(setting)
print(ledger({"A1": by_depth, "A2": phases, "A3": phases, "A6": phases}))

# %% [markdown]
# A1 is the thesis of this course, so read its verdict closely. "Holds in direction" means that the bytes decide how the
# time grows, and that a step takes longer than the claim says. In numbers:

# %%
deep, shallow = by_depth.rows[0], by_depth.rows[-1]
print(f"one token reads {deep['weight_mb']:.0f} MB, which takes {deep['read_ms']:.1f} ms at the bandwidth of a copy; "
      f"the step takes {deep['step_ms']:.1f} ms, {deep['step_ms'] / deep['read_ms']:.1f} times as long")
print(f"{deep['weight_mb'] / shallow['weight_mb']:.1f} times the bytes take {deep['step_ms'] / shallow['step_ms']:.1f} "
      f"times as long, while {1 - deep['mfu']:.0%} of the arithmetic is not used")

# %% [markdown]
# The arithmetic is idle, and the time follows the bytes: so the step is bound by reading, though not by reading at the
# speed of a copy. That is all that the next chapters need: whatever shares one reading among more tokens is nearly
# free. Where the factor is far above 1, the split above says what to look at.
#
# ## What a production engine calls this
#
# | here | elsewhere |
# |---|---|
# | bandwidth, matmul rate | "peak memory bandwidth" and "dense TFLOPS" of a data sheet; reached in part |
# | roofline, ridge | roofline model; arithmetic or operational intensity; "ops:byte ratio" |
# | MBU, MFU | the same names in papers and vendors' blogs; profilers show "DRAM throughput", "tensor active" |
# | cost of calls | launch overhead; CUDA graphs remove it (`--enforce-eager`, `--disable-cuda-graph` do without) |
#
# ## Your guesses
#
# Those that you made on this page, beside what was measured, the nearest first:

# %%
guesses()

# %% [markdown]
# ## Exercise
#
# A friend's GPU reads 900 GB/s. Mistral-7B has 7.1 · 10⁹ weights that a step reads. How many tokens per second can one
# request get at most in 16 bits, and in 4 bits (half a byte a weight)? Replace the two `None`. The full exercise, where
# you write the sums of a step yourself, is [exercise 1](../exercises/01_step_cost.ipynb).

# %%
in_16_bits, in_4_bits = None, None

for answer, bytes_a_weight in ((in_16_bits, 2), (in_4_bits, 0.5)):
    right = 900e9 / (7.1e9 * bytes_a_weight)
    good = answer is not None and abs(answer / right - 1) < 0.05
    print("not answered yet" if answer is None else "right" if good else "no: bandwidth over the bytes of all weights")

# %% [markdown]
# [How these pages are made](README.md) · next: [1 · The decode loop](01_decode_loop.ipynb)
