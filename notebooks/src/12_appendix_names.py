# %% [markdown]
# # 12 · Appendix: names
#
# Every idea of this course has a name in the engines that you will run. This page maps them: what it is called here
# and where it is built, and its flag, metric or parameter in vLLM and in SGLang.
#
# The two projects change quickly. The names are those of their documentation in 2026; look them up with
# `vllm serve --help` and `python -m sglang.launch_server --help`.
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
from pathlib import Path

from IPython.display import Markdown

from minillm.course.show.guesses import guess, guesses, reveal
from minillm.course.show.names import NAMES, names_table, resolve
from minillm.course.show.recorded import recorded

# %% [markdown]
# ## Predict
#
# Before you look: what are the flags for the most rows of a step, for the token budget of a step, and for the size of a
# block? Chapters 3 and 4 had them. And how many ideas of this course have no name of their own in vLLM?

# %%
guess("ideas without a name in vLLM", None)

# %%
Markdown(names_table())

# %%
reveal("ideas without a name in vLLM", sum(name.vllm in ("", "none") for name in NAMES))

# %% [markdown]
# The second column is checked: each name is looked up in the package that is installed, so the table cannot speak of
# something that is gone. Settings are those of `Engine` and `SamplingParams`.

# %%
# NBVAL_CHECK_OUTPUT
found = [resolve(name.here) for name in NAMES]
print(f"{len(found)} names, all found: {all(thing is not None for thing in found)}")
print("each has a chapter on this shelf:", all(any(Path().glob(f"{name.chapter:02d}_*.ipynb")) for name in NAMES))

# %%
# NBVAL_CHECK_OUTPUT
try:
    resolve("Engine.max_rows")
except LookupError as error:
    print(f"a name that is not there is refused: {error}")

# %% [markdown]
# ## What has no counterpart
#
# - **Static batching** exists here to be measured against. Neither engine offers it.
# - **Virtual time** (`measure/virtual.py`) is a teaching tool. The nearest thing elsewhere is a simulator, such as
#   Vidur.
# - **The hidden end** of an answer (`SamplingParams.stop_after`) lets a workload have lengths that are not known
#   beforehand. Benchmarks elsewhere fix the lengths and set `ignore_eos`.
#
# And much that they have is not here: several GPUs for one model, guided decoding, adapters, images, quantised weights
# from checkpoints.
#
# ## Where a name misleads
#
# | name | what one expects | what it is |
# |---|---|---|
# | "GPU utilisation" | share of the arithmetic in use | share of the time in which something ran (chapter 7) |
# | `--gpu-memory-utilization` | how full the memory is | how much the server may take, weights included |
# | "throughput" | output tokens per second | sometimes input and output together (chapter 10) |
# | `--max-num-batched-tokens` | tokens in all requests of a batch | tokens *fed* in one step (chapter 3) |
# | "dynamic batching" | what chapter 3 does | often a static batch that waits a little for company |
# | "p99" | a bad case | of fewer than 100 values, the worst case (chapter 7) |
#
# ## The same figures, of a server of yours
#
# The metrics have the same definitions whoever serves. Start vLLM, SGLang or llama.cpp, and let this package's client
# put the course's chats on it:
#
# ```
# vllm serve MODEL --served-model-name NAME --port 8000
# minillm bench chat --url http://127.0.0.1:8000/v1 --clients 8 --requests 96 --scale 0.1 --seed 0 --model NAME
# minillm bench chat --clients 8 --requests 96 --scale 0.1 --seed 0
# ```
#
# The first reports TTFT, ITL and latency as the client sees them, the second the same of this engine, without a network
# between. Rows are comparable where the machine, the loop and the output tokens are the same. With `--label` and
# `--save` a run is kept.
#
# The next table is of another client, GuideLLM, which loaded each of three servers alone, in turns, on one machine
# (`python tests/serve/other_servers.py`; prompts of 64 tokens, answers of 24, four requests a stream):

# %%
SERVERS = {"streams": "streams", "server": "server", "tokens_per_s": "tokens/s", "ttft_ms": "TTFT p50, ms",
           "itl_ms": "ITL p50, ms", "minillm_times": "minillm is x"}
print(recorded("servers", SERVERS))

# %% [markdown]
# One figure does not name a winner. At 16 streams vLLM gives the most tokens and the shortest ITL, and this engine the
# shortest TTFT: each ran with its own default for the tokens of a step, and what that trades is
# [chapter 3](03_continuous_batching.ipynb)'s budget. llama.cpp reads weights of 4 bits, the others of 32: fewer bytes
# for each token, and more arithmetic to unpack them, so it leads at one stream and no longer at 16.
# `minillm measure beside_llama_cpp` compares weights of 4 bits with weights of 4 bits, in turns on one clock:

# %%
BESIDE = {"engine": "engine", "weights": "weights", "streams": "streams", "tokens_per_s": "tokens/s",
          "ms_between_tokens": "ms between tokens", "times_llama_cpp": "times llama.cpp"}
print(recorded("beside_llama_cpp", BESIDE))

# %%
guesses()  # yours, the nearest first

# %% [markdown]
# ## Exercise
#
# Take the start command of a server that you run, or one from a blog. For each flag, find its line in the table and the
# chapter that measures it. What is left over?

# %%
command = "vllm serve meta-llama/Llama-3.1-8B --max-num-seqs 64 --max-model-len 8192 --enable-prefix-caching"

for flag in (word for word in command.split() if word.startswith("--")):
    lines = [name for name in NAMES if flag in name.vllm + name.sglang]
    print(flag, "->", *(f"{name.idea}, chapter {name.chapter}" for name in lines or []), sep=" ")

# %% [markdown]
# [How these pages are made](README.md) · before: [11 · Diagnose](11_diagnose.ipynb) · next:
# [13 · Lab: a live server](13_lab_live_server.ipynb)
