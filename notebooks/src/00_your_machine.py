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

import minillm
from minillm.course.experiments import limits
from minillm.course.setting import Setting
from minillm.course.show import plots, service_plots
from minillm.course.show.live import progress
from minillm.course.show.recorded import ledger, recorded
from minillm.course.show.source import show_source
from minillm.course.show.tables import text_table
from minillm.ladder.quantized import kv_bytes_per_token
from minillm.load.config import ModelConfig
from minillm.measure import roofline
from minillm.measure.measurement import device_name
from minillm.measure.roofline import Ceilings, StepShape, StepWork, least_work
from minillm.measure.virtual import DEVICES, CostModel

QUICK = os.environ.get("MINILLM_QUICK") == "1"  # small sizes, for tests
setting = Setting(quick=QUICK, progress=progress)
model = setting.timed_model  # on a GPU random weights of Llama-3-8B's shape: the default model is too small for one
print(device_name(model.device))

# %% [markdown]
# ## Predict
#
# How many GB per second does this machine read from memory, and how many GFLOP per second (10⁹ multiplications and
# additions) does it reach in a product of two large matrices? Write your guess down, even a wild one.

# %%
my_guess = {"GB/s": None, "GFLOP/s": None}

# %% [markdown]
# ## Build: two readings
#
# Bandwidth: copy an array that is far larger than any cache, and count the bytes read and written. Rate: multiply
# two large square matrices; n³ products and as many sums, so 2 n³ FLOP. Each is the best of several readings, since
# we want a limit.

# %%
show_source(roofline.measured_bandwidth, roofline.measured_matmul_rate)

# %%
ceilings = setting.ceilings  # measured here, and kept
print(f"reads {ceilings.bytes_per_s / 1e9:,.1f} GB/s")
print(f"multiplies {ceilings.flops_per_s / 1e9:,.0f} GFLOP/s")
print(f"in the time of reading one byte it multiplies {ceilings.flops_per_s / ceilings.bytes_per_s:.1f} FLOP")

# %% [markdown]
# The last line is the machine's **ridge**. Work that does fewer FLOP per byte than this waits for memory; work that
# does more waits for the arithmetic units.
#
# ## What a step must do
#
# To decode one token, every weight of the model is read once and used in one multiplication and one addition. The
# keys and values of the text so far are read too. `least_work` adds up both.

# %%
show_source(least_work)

# %% [markdown]
# By hand, for this model: each weight is 2 FLOP. In fp32 a weight is 4 bytes, so a decoded token does about
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
# per second at most? Write it down before the next cell works it out.

# %%
my_guess = None

# %%
one = least_work(model.config, "fp32" if model.dtype.itemsize == 4 else "bf16", StepShape.decode([64]),
                 model.weight_bytes)
print(f"{one.bytes / 1e6:.0f} MB at {ceilings.bytes_per_s / 1e9:.1f} GB/s: at most "
      f"{1 / ceilings.least_seconds(one):,.0f} tokens/s")

# %% [markdown]
# ## Measure
#
# Decode steps with 1, 8 and more rows, and prefills of some lengths, each beside the least time that the limits
# allow. **MBU** is the share of the bandwidth that the step's least bytes account for, **MFU** the share of the
# matmul rate that its FLOP account for.

# %%
steps = limits.roofline_steps(setting)
STEP_COLUMNS = {"kind": "step", "tokens": "tokens", "read_mb": "must read MB", "gflop": "GFLOP",
                "flop_per_byte": "FLOP/byte", "least_ms": "least ms", "step_ms": "measured ms", "mbu": "MBU",
                "mfu": "MFU", "bound_by": "bound by"}
print(text_table(steps.rows, STEP_COLUMNS))

# %%
service_plots.roofline(steps.rows, ceilings)

# %% [markdown]
# A point under the slanted part waits for memory, one under the level part for the arithmetic units. How far it
# lies below the roof is time that neither limit explains. Going from left to right along the decode points, more
# rows share one reading of the weights: that is batching, and chapter 2. A point above the roof means that something
# else kept the machine busy while the limits were read: run the page again.

# %%
decoded, longest = steps.rows[0], steps.rows[-1]
print(f"predicted at most {1e3 / decoded['least_ms']:,.0f} tokens/s for one request, measured "
      f"{decoded['tokens_per_s']:,.0f}: {decoded['least_ms'] / decoded['step_ms']:.0%}")
print(f"prefill of {longest['tokens']}: {longest['tokens_per_s']:,.0f} tokens/s, "
      f"{longest['tokens_per_s'] / decoded['tokens_per_s']:.0f} times the decode of one request")

# %% [markdown]
# On other devices:

# %%
print(recorded("roofline_steps", STEP_COLUMNS))

# %% [markdown]
# ## From a data sheet
#
# The same division for machines that you may not have. Llama-3-8B in 16 bits reads 15.0 GB a step. `CostModel` takes
# 85 % of the promised bandwidth, which is about what a large copy reaches, and a millisecond for launches.

# %%
# NBVAL_CHECK_OUTPUT
llama = ModelConfig.preset("llama-3-8b")
read = 2 * roofline.read_numbers(llama)
print(f"weights read a step: {read / 1e9:.1f} GB; keys and values: {kv_bytes_per_token(llama, 'bf16'):,} bytes a token")
for name in ("l4", "rtx-4090", "a100-80gb", "h100", "h200"):
    bound = DEVICES[name].gb_per_s * 1e9 / read
    expected = 1 / CostModel.of_device(name, llama).seconds(StepShape.decode([64]))
    below = "yes" if expected < bound else "NO"
    print(f"{name:>9}: {DEVICES[name].gb_per_s:,} GB/s allow {bound:.0f} tokens/s; the estimate is lower: {below}")

# %% [markdown]
# ## Where it loses
#
# The roofline counts work. A step also costs something for being a step: each operation must be called, and on a GPU
# launched. A small model does almost no work in as many calls. Here is the model beside ever narrower ones with as many
# layers and random weights, one token each. The narrowest reads about sixty times less than the model. How many times
# faster is its step? Write it down.

# %%
my_guess = None

# %%
narrow = limits.mbu_by_width(setting)
NARROW = {"width": "hidden size", "read_mb": "must read MB", "least_ms": "least ms", "step_ms": "measured ms",
          "lost_ms": "neither: ms", "mbu": "MBU"}
print(text_table(narrow.rows, NARROW))

# %%
widths = [row["width"] for row in narrow.rows]
wide, slim = narrow.rows[0], narrow.rows[-1]
plots.curves(
    {"measured": (widths, [row["step_ms"] for row in narrow.rows]),
     "least, by the roofline": (widths, [row["least_ms"] for row in narrow.rows])},
    f"{wide['read_mb'] / slim['read_mb']:.0f} times less to read makes a step {wide['step_ms'] / slim['step_ms']:.1f} "
    f"times faster: what is left is {slim['lost_ms']:.1f} ms of calls",
    f"hidden size ({model.config.num_hidden_layers} layers each)", "ms for one token", log_x=True, log_y=True,
)

# %% [markdown]
# This is why a small model on a large GPU runs far below its roof unless its launches are recorded once and replayed
# (CUDA graphs).
#
# Other things that the two numbers do not know: a laptop that gets warm, a machine that others use at the same time,
# and a model that fits into a cache.
#
# ## Claims of the ledger that this page settles
#
# Two articles on LLM serving gave this course its questions. The **ledger** lists what they claim, each claim with an
# experiment and a rule that judges it
# ([the whole of it](CLAIMS.md)). Each page ends with the claims that it
# settles: by what it measured just now on this device, and by every recorded run. A1 asks for the step of fewer and
# fewer layers, A2 for prompts alone and several at once, so both are measured first.

# %%
print(ledger({"A1": limits.decode_step(setting), "A2": limits.prefill(setting)}))

# %% [markdown]
# ## What a production engine calls this
#
# | here | elsewhere |
# |---|---|
# | bandwidth, matmul rate | "peak memory bandwidth" and "dense TFLOPS" of a data sheet; reached in part |
# | roofline, ridge | roofline model; arithmetic or operational intensity; "ops:byte ratio" |
# | MBU, MFU | the same names in papers and vendors' blogs; profilers show "DRAM throughput", "tensor active" |
# | cost of calls | launch overhead; CUDA graphs remove it (`--enforce-eager`, `--disable-cuda-graph` do without) |
#
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
