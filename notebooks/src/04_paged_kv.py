# %% [markdown]
# # 4 · Paged KV
#
# A slot reserves memory for the longest answer that a request may get. This chapter cuts the memory into blocks of
# 16 tokens and hands one out when a token needs it (rung 4). More requests fit, and requests that begin alike can
# hold the same blocks.
#
# **You will learn**
# - what a block table is, and where a token's key really lies;
# - how many more requests run at once in the same bytes, and why;
# - what sharing a prefix saves, and how one token loses it;
# - what happens when the blocks run out.
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

import torch

import minillm
from minillm import Engine, SamplingParams
from minillm.course.experiments import common, memory
from minillm.course.prompts import CHAT_PROMPTS
from minillm.course.setting import Setting
from minillm.course.show import plots
from minillm.course.show.live import progress
from minillm.course.show.recorded import ledger, recorded
from minillm.course.show.source import show_source
from minillm.course.show.tables import text_table
from minillm.course.show.widgets import pool_explorer
from minillm.ladder.decode import SequenceCache
from minillm.ladder.paged import BlockPool, Paged, Slots
from minillm.ladder.quantized import kv_bytes_per_token
from minillm.measure.measurement import device_name
from minillm.measure.workload import lognormal

QUICK = os.environ.get("MINILLM_QUICK") == "1"  # small sizes, for tests
model = minillm.load_model(dtype="fp32")
tokenizer = minillm.load_tokenizer()
TOKEN_BYTES = kv_bytes_per_token(model.config, "fp32")
print(device_name(model.device))

# %% [markdown]
# ## A block table
#
# Two requests run side by side in a pool of ten blocks. Each has a table: the blocks that hold its tokens, in the
# order of the text. We print both tables whenever one of them changes. "Stored" is how many tokens have their keys
# and values in the pool.

# %%
# NBVAL_CHECK_OUTPUT
a, b = tokenizer.chat("What is the capital of France?"), tokenizer.chat("Is water wet? Answer in one word.")
engine = Engine(model, kv_memory=10 * 16 * TOKEN_BYTES)
for prompt in (a, b):
    engine.add(prompt, SamplingParams(max_tokens=18, ignore_eos=True))
before = None
for _ in range(16):
    engine.step()
    running = engine.scheduler.running
    if before != (tables := [list(request.block_table) for request in running]):
        print("stored", [request.num_kv for request in running], "in blocks", *tables)
        before = tables

# %% [markdown]
# The fourth block of a text need not lie behind its third: it is the one that was free. Token 50 of the first text
# lies in place 50 mod 16 = 2 of its block number 50 div 16 = 3, wherever the table says that block is.
#
# Look there. The key that the pool holds for a token must be the one that rung 1 keeps in its one contiguous run.

# %%
# NBVAL_CHECK_OUTPUT
request = engine.scheduler.running[0]
text, table = request.tokens[: request.num_kv], request.block_table
cache = SequenceCache(model, capacity=len(text))
with torch.inference_mode():
    model.forward(torch.tensor(text, device=model.device), torch.arange(len(text), device=model.device), cache)
places = [table[at // 16] * 16 + at % 16 for at in range(len(text))]
keys, values = engine.executor.storage.read(29, torch.tensor(places, device=model.device))  # of the last layer
print(f"token 50 is in block {table[50 // 16]}, at place {50 % 16}: the pool's token slot {places[50]}")
print("same keys as one contiguous run:", torch.allclose(keys, cache.keys[29], atol=1e-3))
print("same values:", torch.allclose(values, cache.values[29], atol=1e-3))

# %% [markdown]
# ## Build
#
# The pool knows which blocks are free. `Paged` takes one when a token needs it; `Slots`, the policy of the last two
# chapters, takes a contiguous run at the start. They are two policies over the same pool, and the model cannot tell
# them apart.

# %%
show_source(Slots.admit, Paged.reserve, BlockPool.take, Paged.after_step)

# %% [markdown]
# ## Predict
#
# A service caps its answers at 256 tokens. Prompts have 32. The answers really have 24 tokens on average; how long
# each will be nobody knows beforehand. The memory for keys and values is what four slots take.
#
# - How many requests run at once as slots?
# - And as pages, if a request holds its prompt and about half of its answer on average? Write it down.

# %%
my_guess = {"slots": None, "pages": None}

# %%
# NBVAL_CHECK_OUTPUT
def blocks_for(tokens):
    return -(-tokens // 16)


slot = blocks_for(32 + 256 - 1)  # the last token of an answer is never stored
pool_blocks = 4 * slot
print(f"a slot is {slot} blocks; the pool has {pool_blocks}, which is {pool_blocks * 16:,} tokens")
print(f"a request that is half through an average answer needs {blocks_for(32 + 12)} blocks: "
      f"about {pool_blocks // blocks_for(32 + 12)} at once")

# %% [markdown]
# ## Measure: who holds what
#
# The scheduler and the pool are the real ones; there is no model in this cell, so it takes no time and gives exact
# counts. First what both policies did with 64 requests, as means over all steps.

# %%
# NBVAL_CHECK_OUTPUT
items = [replace(item, max_tokens=256) for item in lognormal(1.0, requests=64, mean_tokens=24, prompt_tokens=32)]
budget = pool_blocks * 16 * TOKEN_BYTES
for kv in ("slots", "paged"):
    records = common.count(model.config, items, kv=kv, kv_memory=budget, max_batch=64)
    row = memory.memory_row(records, TOKEN_BYTES)
    print(f"{kv}: up to {row['peak_requests']} at once, {row['mean_requests']:.1f} on average; {row['steps']} steps; "
          f"{row['wasted_share']:.0%} of what was reserved was empty; preempted {row['preemptions']}")

# %% [markdown]
# The peak is what the sum says. The mean is lower, since the queue is soon empty and the last steps have few rows.
#
# Now a picture of both pools after step 12. In the third pool the same 64 tokens of instructions stand before every
# prompt.

# %%
def engine_after(steps, items, kv="paged", shared=()):
    """An engine without a model, in the middle of its work."""
    engine = Engine(None, executor=common.NoForward(model.config), kv=kv, kv_format="fp32", kv_memory=budget,
                    max_batch=64, max_context=512)
    for item in items:
        engine.add([*shared, *item.prompt_ids], item.params)
        if shared and not engine.records.steps:
            engine.step()  # the first computes the prefix, the others find it
    while len(engine.records.steps) < steps:
        engine.step()
    return engine


pools = {
    "slots": plots.pool_snapshot(engine_after(12, items, "slots")),
    "pages": plots.pool_snapshot(engine_after(12, items)),
    "pages, shared prefix": plots.pool_snapshot(engine_after(12, items, shared=range(64))),
}
plots.block_map(pools, columns=12)

# %%
# NBVAL_CHECK_OUTPUT
for name, pool in pools.items():
    requests = len({holder for block in pool.blocks for holder in block.holders})
    print(f"{name}: {requests} requests hold {pool.count('live')} blocks; {pool.used_tokens:,} tokens stored, "
          f"{pool.wasted_tokens} places empty; {pool.shared} blocks shared")

# %% [markdown]
# A page wastes at most the rest of a request's last block. A slot wastes all that the answer turns out not to need.
#
# Fill a pool yourself. Twelve requests, each of which may get 96 tokens and gets fewer. Watch step 0 to 40 as slots
# and as pages; give all prompts the same first 32 tokens; then try blocks of 4 and of 32 tokens, and see what each
# wastes.

# %%
pool_explorer()

# %% [markdown]
# Does it pay by the clock? The same policies with the model, in the same bytes. Predict: how many times the tokens per
# second do pages give?

# %%
my_guess = None

# %%
setting = Setting(quick=QUICK, progress=progress)
setting.model = model
policies = memory.memory_by_policy(setting)
MEMORY = {"kv": "policy", "peak_requests": "most at once", "mean_requests": "on average", "reserved_mb": "reserved MB",
          "used_mb": "used MB", "wasted_share": "wasted", "steps": "steps", "tokens_per_s": "tokens/s"}
print(text_table(policies.rows, MEMORY))

# %%
as_slots, as_pages = policies.rows
plots.bars(
    policies.rows, "kv", {"used_mb": "holds keys and values", "wasted_mb": "reserved, empty"},
    f"In the same memory for keys and values: {as_slots['mean_requests']:.1f} requests at once as slots, "
    f"{as_pages['mean_requests']:.1f} as pages", "MB, mean over the steps",
)

# %%
print(recorded("memory_by_policy", MEMORY))

# %% [markdown]
# ## The same tokens
#
# Where a key lies must not change what is said.

# %%
# NBVAL_CHECK_OUTPUT
prompts = [tokenizer.chat(text) for text in CHAT_PROMPTS[:4]]
outputs = []
for kv in ("slots", "paged"):
    answers = Engine(model, tokenizer, kv=kv, max_batch=4).generate(prompts, SamplingParams(max_tokens=8))
    outputs.append([answer.token_ids for answer in answers])
print("same tokens:", outputs[0] == outputs[1])
print([answer.text for answer in answers])

# %% [markdown]
# ## A shared prefix
#
# Chapter 1 showed that a key depends on all tokens before it and on none behind it. So two texts that begin with
# the same tokens have the same keys there, to the last bit. A full block is entered in an index under its tokens
# and everything before them. Who comes later with the same beginning holds that block too, and need not compute it.

# %%
show_source(BlockPool.match, Paged.admit)

# %% [markdown]
# A service puts the same instructions before every question. Four questions, one after another. How many prompt
# tokens need not be computed? Only whole blocks are shared. Write it down.

# %%
SYSTEM = (
    "You are the help desk of a public library. Be friendly and brief. The library is open from ten to seven on "
    "weekdays and from ten to four on Saturdays; it is closed on Sundays and public holidays. A reader's card is free "
    "for children and costs twelve euros a year for adults. Books may be kept for four weeks and renewed twice, unless "
    "somebody else is waiting for them. Films and games may be kept for one week. A book that is late costs twenty "
    "cents a day. Lost books are replaced at the price of a new copy. Rooms for study groups can be booked two weeks "
    "ahead at the front desk. If a question is about something other than the library, say kindly that you cannot help."
)
questions = ("When do you open on Saturdays?", "How long may I keep a film?", "What is a card?", "I lost a book.")
prompts = [tokenizer.chat(question, system=SYSTEM) for question in questions]
my_guess = None

# %%
# NBVAL_CHECK_OUTPUT
in_common = next(i for i in range(len(prompts[0])) if len({prompt[i] for prompt in prompts}) > 1)
whole = in_common // 16 * 16
predicted = (len(prompts) - 1) * whole
print(f"prompts of {[len(prompt) for prompt in prompts]} tokens, {in_common} in common: {whole} in whole blocks")
print(f"to be found instead of computed: {len(prompts) - 1} x {whole} = {predicted}")

# %%
sharing = memory.prefix_sharing(setting, prompts)
SHARING = {"case": "case", "prompt_tokens": "prompt tokens", "computed": "computed", "found": "found",
           "ttft_p50_ms": "time to first token, ms (p50 of the later ones)", "ttft_p50_ms_min": "shortest",
           "ttft_p50_ms_max": "longest"}
print(text_table(sharing.rows, SHARING))

# %%
# NBVAL_CHECK_OUTPUT
without, shared, changed = sharing.rows
as_predicted = shared["found"] == predicted
print(f"shared prefix: {shared['found']} found, {shared['computed']} computed; as predicted: {as_predicted}")
print(f"another first token: {changed['found']} found, {changed['computed']} computed")

# %%
plots.prefix_bars(sharing.rows)

# %% [markdown]
# The third case is a common mistake: a date, a user's name or a session number *in front of* the instructions.
# Every block's place in the index depends on everything before it, so nothing matches. Put what varies at the end.
#
# The first and the third case compute equally many tokens, so what their times differ by is noise: shortest and
# longest show how much of it there was. A gain that is no larger than that would be none.
#
# On other devices:

# %%
print(recorded("prefix_sharing", SHARING))

# %% [markdown]
# ## When the blocks run out
#
# A slot is safe: it has all it will ever need. Pages are promised to nobody. If a running request needs a block and
# none is free, the youngest request gives all of its blocks back and waits. When it returns, it computes its prompt
# and its output so far again. It must then go on as if nothing had happened.
#
# Three requests in a pool of eleven blocks, where 15 would be needed, against a pool with room for all. Predict: how
# many tokens are computed again?

# %%
my_guess = None

# %%
# NBVAL_CHECK_OUTPUT
prompts = [tokenizer.chat(text) for text in CHAT_PROMPTS[:3]]
runs = {}
for name, blocks, cache in (("room for all", 64, False), ("eleven", 11, False), ("eleven, prefix cache", 11, True)):
    engine = Engine(model, kv_memory=blocks * 16 * TOKEN_BYTES, prefix_cache=cache, max_batch=3)
    answers = engine.generate(prompts, SamplingParams(max_tokens=26, ignore_eos=True))
    engine.check_invariants()
    runs[name] = [answer.token_ids for answer in answers], engine.records
    totals = engine.records.totals
    print(f"{name}: {totals['preempted']} preempted, {totals['recomputed_tokens']} tokens computed again, "
          f"{totals['recovered_tokens']} found again; same answers: {runs[name][0] == runs['room for all'][0]}")

# %%
plots.slot_timeline(
    {name: records for name, (_, records) in runs.items() if "cache" not in name}, unit="step",
    title="In eleven blocks the youngest request is sent away, and computes its text again when it returns",
)

# %% [markdown]
# With the prefix cache, blocks that a preempted request gave back are still known until somebody takes them. What
# it finds again it need not compute.
#
# ## Where it loses
#
# **Indirection.** A kernel must look the blocks up. In plain PyTorch we gather them into one run at every step and
# every layer, which copies the whole cache of the text. Here is one sequence alone, rung 1 beside rung 4. Guess first:
# how many times as long does a step take behind a short text, and behind a long one?

# %%
my_guess = {"short": None, "long": None}

# %%
indirect = memory.cost_of_blocks(setting)
INDIRECT = {"context_tokens": "tokens of text", "contiguous_ms": "one run: ms", "paged_ms": "blocks: ms",
            "times": "times"}
print(text_table(indirect.rows, INDIRECT))

# %%
print(recorded("cost_of_blocks", INDIRECT))

# %% [markdown]
# **Size of a block.** A large block wastes more at the end of each text; a small one makes tables longer and shares
# finer. The same 64 requests and bytes as above:

# %%
# NBVAL_CHECK_OUTPUT
for block_size in (1, 16, 64, 256):
    records = common.count(model.config, items, kv_memory=budget, max_batch=64, block_size=block_size)
    row = memory.memory_row(records, TOKEN_BYTES)
    requests, wasted = row["mean_requests"], row["wasted_share"]
    print(f"blocks of {block_size:>3}: {requests:>4.1f} requests on average, {wasted:.0%} wasted")

# %% [markdown]
# **Preemption.** What was computed and given back is computed twice. A pool that is always short spends its time on
# that: watch the counter.
#
# ## Claims of the ledger that this page settles
#
# By the ledger's own rules: on this device, just now, and on every device that has a recorded run.

# %%
print(ledger({"C3": policies, "C8": sharing}))

# %% [markdown]
# ## What a production engine calls this
#
# | here | vLLM | SGLang |
# |---|---|---|
# | block, `block_size` | `--block-size` | `--page-size` |
# | `kv_memory` | `--gpu-memory-utilization` (with the weights) | `--mem-fraction-static` (with the weights) |
# | prefix sharing | `--enable-prefix-caching`, on by default | RadixAttention; `--disable-radix-cache` |
# | preemption | `vllm:num_preemptions_total` | retraction; `--schedule-conservativeness` |
# | live share of the pool | `vllm:kv_cache_usage_perc` | `sglang:token_usage` |
# | found, asked | `vllm:prefix_cache_hits_total`, `_queries_total` | `sglang:cache_hit_rate` |
#
# ## Exercise
#
# The help desk wants today's date in its instructions. Somebody writes it in front: `"Today is Monday. " + SYSTEM`.
# Tomorrow it is Tuesday. How many tokens of yesterday's blocks does tomorrow's first question find? And with
# `SYSTEM + " Today is Monday."`? Fill in the two numbers; the check asks an engine.
#
# To go further, in checked notebooks: [exercise 5](../exercises/05_block_pool.ipynb), pool and block table,
# [exercise 6](../exercises/06_prefix_sharing.ipynb), prefix sharing, and
# [exercise 7](../exercises/07_paged_attention.ipynb), attention by block table.

# %%
found_in_front, found_at_the_end = None, None


def found(monday, tuesday):
    engine = Engine(None, executor=common.NoForward(model.config), kv_format="fp32", max_context=512)
    for system in (monday, tuesday):
        engine.generate([tokenizer.chat(questions[0], system=system)], SamplingParams(max_tokens=1))
    return engine.records.totals["cached_tokens"]


right = (found("Today is Monday. " + SYSTEM, "Today is Tuesday. " + SYSTEM),
         found(SYSTEM + " Today is Monday.", SYSTEM + " Today is Tuesday."))
for answer, expected in zip((found_in_front, found_at_the_end), right, strict=True):
    print("not answered yet" if answer is None else "right" if answer == expected else "no: whole blocks of 16 count")

# %% [markdown]
# [How these pages are made](README.md) · before: [3 · Continuous batching](03_continuous_batching.ipynb) · next:
# [5 · Quantised KV](05_quantized_kv.ipynb)
