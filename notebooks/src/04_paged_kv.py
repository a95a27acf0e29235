# %% [markdown]
# # 4 · Paged KV
#
# A slot reserves memory for the longest answer that a request may get. This chapter cuts the memory into blocks of
# 16 tokens and takes one when a token needs it (rung 4). More requests fit, and requests that begin with the same
# tokens can hold the same blocks.
#
# **You will learn**
# - what a block table is, and where a token's key really lies;
# - how many more requests run concurrently in the same bytes, and why;
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
import torch

import minillm
from minillm.measure.measurement import device_name

model, tokenizer = minillm.load_model(dtype="fp32"), minillm.load_tokenizer()
print(device_name(model.device))

# %% [markdown]
# ## Build: a block table
#
# The memory for keys and values is one long store of token places, cut into blocks of 16. A row (a request on its way
# through the engine) has a *block table*: the blocks that hold its tokens, in the order of the text. So token 50 of a
# text lies in place 50 mod 16 = 2 of its block number 50 div 16 = 3, wherever the table says that block is.

# %%
from dataclasses import dataclass, field

BLOCK = 16  # tokens


@dataclass
class Row:
    """A request on its way: what is known of its text, and how much of it is stored."""

    tokens: list[int]  # the prompt, and the answer so far
    ends_at: int  # tokens at which its answer ends
    stored: int = 0  # tokens whose keys and values are in the store
    blocks: list[int] = field(default_factory=list)  # its block table


def places(row):
    """Where the row's tokens lie in the store, from its first to its last."""
    position = torch.arange(len(row.tokens))  # [S]
    return torch.tensor(row.blocks)[position // BLOCK] * BLOCK + position % BLOCK  # [S]


# %% [markdown]
# The model does not know about blocks. In each layer it hands q, k and v of the new tokens to the cache, and gets the
# attended values back. Ours writes the new keys and values to their places; then it gathers each row's places into
# one run, over which chapter 1's attention does the rest.

# %%
from minillm.ladder.decode import attend  # rung 1's, for one row


class PagedCache:
    """Keys and values of all rows in one store."""

    def __init__(self, blocks):
        config = model.config
        shape = config.num_hidden_layers, blocks * BLOCK, config.num_key_value_heads, config.head_dim
        self.keys, self.values = torch.zeros(2, *shape, device=model.device)  # each [L, places, Hkv, D]
        self.rows = []  # of this step

    def attend(self, layer, q, k, v):
        """The new tokens, row after row: q [N, Hq, D], k and v [N, Hkv, D] -> [N, Hq, D]."""
        new = torch.cat([places(row)[row.stored :] for row in self.rows])  # [N]
        self.keys[layer, new], self.values[layer, new] = k, v
        counts, out = [len(row.tokens) - row.stored for row in self.rows], []
        for row, own in zip(self.rows, q.split(counts), strict=True):
            at = places(row)  # [S]
            out.append(attend(own, self.keys[layer, at], self.values[layer, at], start=row.stored))
        return torch.cat(out)


# %% [markdown]
# Who decides which blocks a row gets? A *free list*: the blocks that no row holds. A row takes one when its next token
# needs it, and returns all of them when its answer has ended.

# %%
class FreeList:
    """The blocks that no row holds."""

    def __init__(self, blocks):
        self.free = list(range(blocks))

    def cover(self, row):
        """Take blocks until each of the row's tokens has a place."""
        while len(row.blocks) * BLOCK < len(row.tokens):
            row.blocks.append(self.free.pop(0))

    def give_back(self, row):
        self.free += row.blocks
        row.blocks = []


# %% [markdown]
# And the loop over them. It is chapter 3's: rows join when there is room, every step feeds each row what is not stored
# yet, and a row that has ended leaves. Two lines are new.

# %%
@torch.inference_mode()
def step(rows, cache):
    """Feed each row its tokens that are not stored yet: a prompt, or one token. Each row gets a token."""
    fed = [row.tokens[row.stored :] for row in rows]
    tokens = torch.tensor([token for part in fed for token in part], device=model.device)  # [N], row after row
    positions = torch.cat([torch.arange(row.stored, len(row.tokens)) for row in rows]).to(model.device)  # [N]
    last = torch.tensor([len(part) for part in fed], device=model.device).cumsum(0) - 1  # [R], of each row
    cache.rows = rows
    logits = model.forward(tokens, positions, cache, last)  # [R, V]
    for row, token in zip(rows, logits.argmax(-1).tolist(), strict=True):
        row.stored = len(row.tokens)
        row.tokens.append(token)


def serve(rows, pool, cache, most=2):
    """Run all rows, at most `most` of them concurrently; yields those of each step, after it."""
    waiting, running = list(rows), []
    while waiting or running:
        while waiting and len(running) < most:
            running.append(waiting.pop(0))
        for row in running:
            pool.cover(row)  # new: a block when a token needs it
        step(running, cache)
        yield running
        for row in running:
            if len(row.tokens) == row.ends_at:
                pool.give_back(row)  # new: for the next row
        running = [row for row in running if row.blocks]  # an empty table means that it has ended


# %% [markdown]
# Three requests, two of them concurrently, in a store of eight blocks. We print the tables whenever one changes.

# %%
# NBVAL_CHECK_OUTPUT
texts = ("What is the capital of France?", "Is water wet? Answer in one word.", "Name three primary colours.")
prompts, lengths = [tokenizer.chat(text) for text in texts], (22, 8, 18)
rows = [Row(list(prompt), len(prompt) + length) for prompt, length in zip(prompts, lengths, strict=True)]
pool, cache = FreeList(8), PagedCache(8)
moments, before = [], None  # (tokens stored, block table) of each row, whenever a table changes
for running in serve(rows, pool, cache):
    if before != (tables := [list(row.blocks) for row in running]):
        moments.append([(row.stored, table) for row, table in zip(running, tables, strict=True)])
        print("stored", [row.stored for row in running], "in blocks", *tables)
        before = tables

# %% [markdown]
# The blocks of a text need not lie in its order: a row takes the block that was free. The third request has taken
# blocks that the second one gave back.

# %%
from minillm.course.show import cache_drawings

cache_drawings.block_tables(moments[-2], num_blocks=8, block_size=BLOCK)

# %% [markdown]
# Is it right? The tokens must be those of the package's engine, and every block must be free again. And the store must
# still hold, at the places of the third text, the keys that rung 1 keeps in one contiguous run: that request was the
# last to end, so nothing has overwritten them.

# %%
# NBVAL_CHECK_OUTPUT
from minillm import Engine, SamplingParams
from minillm.ladder import engine as ladder
from minillm.ladder.decode import SequenceCache

params = [SamplingParams(max_tokens=length, ignore_eos=True) for length in lengths]
package = {kv: [answer.token_ids for answer in ladder.Engine(model, max_batch=2, kv=kv).generate(prompts, params)]
           for kv in ("paged", "slots")}  # by the plain engine, whose source is shown below
ours = [row.tokens[len(prompt) :] for row, prompt in zip(rows, prompts, strict=True)]
print("same tokens as the package, with pages:", ours == package["paged"], "| with slots:", ours == package["slots"])
print("all blocks are free again:", sorted(pool.free) == list(range(8)))
text, (_, table) = rows[2].tokens[:-1], moments[-1][-1]  # the last token was never fed
at = places(Row(text, 0, blocks=table))
contiguous = SequenceCache(model, capacity=len(text))
with torch.inference_mode():
    model.forward(torch.tensor(text, device=model.device), torch.arange(len(text), device=model.device), contiguous)
print(f"token 50 is in block {table[50 // BLOCK]}, at place {50 % BLOCK}: place {int(at[50])} of the store")
print("same keys as one contiguous run:", torch.allclose(cache.keys[29, at], contiguous.keys[29], atol=1e-3))
print("same values:", torch.allclose(cache.values[29, at], contiguous.values[29], atol=1e-3))

# %% [markdown]
# Now the package's. `Paged` takes a block when a token needs it, as ours does; `Slots`, the policy of the last two
# chapters, takes a contiguous run at the start. They are two policies over the same pool, and the model cannot tell
# them apart.

# %%
from minillm.course.show.source import show_source
from minillm.ladder.attention import RowSpan
from minillm.ladder.paged import Paged, Slots

show_source(Paged.reserve, Slots.admit, RowSpan.slots)

# %% [markdown]
# What it adds to ours:
#
# - a pool that has too few blocks answers False, where our `pop` fails: the scheduler then sends a row away (below);
# - the places (it calls them slots) are worked out once for a step, not in each of 30 layers;
# - a policy decides which request may join: `Slots.admit` needs a whole run for the longest answer (`max_kv` tokens);
# - a block may have several holders: that is the second half of this page.
#
# ## Predict
#
# A service caps its answers at 256 tokens. Prompts have 32. The answers really have 24 tokens on average; how long
# each will be is not known beforehand. The memory for keys and values is what four slots take.
#
# - How many requests run concurrently as slots?
# - And as pages, if a request holds its prompt and about half of its answer on average?
#
# Put your guesses in place of `None`; the page compares them with what is measured.

# %%
from minillm.course.show.guesses import guess, guesses, reveal

guess("requests as slots, at the peak", None)
guess("requests as pages, at the peak", None)

# %%
# NBVAL_CHECK_OUTPUT
from minillm.ladder.quantized import kv_bytes_per_token

TOKEN_BYTES = kv_bytes_per_token(model.config, "fp32")


def blocks_for(tokens):
    return -(-tokens // BLOCK)


slot = blocks_for(32 + 256 - 1)  # the last token of an answer is never stored
pool_blocks = 4 * slot
print(f"a slot is {slot} blocks; the pool has {pool_blocks}, which is {pool_blocks * BLOCK:,} tokens")
print(f"a request that is half through an average answer needs {blocks_for(32 + 12)} blocks: "
      f"about {pool_blocks // blocks_for(32 + 12)} fit")

# %% [markdown]
# ## Measure: which request holds what
#
# The scheduler and the pool are the real ones; there is no model in this cell, so it takes no time and gives exact
# counts. First what both policies did with 64 requests, as means over all steps.

# %%
# NBVAL_CHECK_OUTPUT
from dataclasses import replace

from minillm.course.experiments import common, memory
from minillm.measure.workload import lognormal

items = [replace(item, max_tokens=256) for item in lognormal(1.0, requests=64, mean_tokens=24, prompt_tokens=32)]
budget = pool_blocks * BLOCK * TOKEN_BYTES
peaks = {}
for kv in ("slots", "paged"):
    records = common.count(model.config, items, kv=kv, kv_memory=budget, max_batch=64)
    row = memory.memory_row(records, TOKEN_BYTES)
    peaks[kv] = row["peak_requests"]
    print(f"{kv}: up to {row['peak_requests']} concurrently, {row['mean_requests']:.1f} on average; {row['steps']} "
          f"steps; {row['wasted_share']:.0%} of what was reserved was empty; preempted {row['preemptions']}")

# %%
reveal("requests as slots, at the peak", peaks["slots"])
reveal("requests as pages, at the peak", peaks["paged"])

# %% [markdown]
# ("Preempted" counts requests that had to give their blocks back in the middle: see the end of this page.)
# The peak is what the sum says. The mean is lower, since the queue is soon empty and the last steps have few rows.
#
# Now a picture of both pools after step 12.

# %%
from minillm.course.show import plots


def engine_after(steps, items, **settings):
    """An engine without a model, in the middle of its work."""
    engine = Engine(None, executor=common.NoForward(model.config), kv_format="fp32", kv_memory=budget, max_batch=64,
                    max_context=512, **settings)
    for item in items:
        engine.add(item.prompt_ids, item.params)
        if not engine.records.steps:
            engine.step()  # the first request alone: what it stores, the others can find
    while len(engine.records.steps) < steps:
        engine.step()
    return engine


pools = {name: plots.pool_snapshot(engine_after(12, items, kv=kv, prefix_cache=False))
         for name, kv in (("slots", "slots"), ("pages", "paged"))}
plots.block_map(pools, columns=12)

# %%
# NBVAL_CHECK_OUTPUT
def print_pools(pools):
    for name, pool in pools.items():
        print(f"{name}: {pool.requests} requests hold {pool.count('live')} blocks; {pool.used_tokens:,} tokens stored, "
              f"{pool.wasted_tokens} places empty; {pool.shared} blocks shared")


print_pools(pools)

# %% [markdown]
# A page wastes at most the rest of a request's last block. A slot wastes all that the answer turns out not to need.
#
# Fill a pool yourself. Twelve requests, each of which may get 96 tokens and gets fewer. Watch step 0 to 40 as slots
# and as pages; then try blocks of 4 and of 32 tokens, and see what each wastes. (With a running kernel the controls
# move. "Same first 32 tokens" belongs to the second half of this page.)

# %%
from minillm.course.show.widgets import pool_explorer

pool_explorer()

# %% [markdown]
# Does it pay by the clock? The same policies with the model, in the same bytes. Predict: how many times the tokens per
# second do pages give?

# %%
guess("tokens/s of pages, over those of slots", None)

# %%
import os

from minillm.course.setting import Setting
from minillm.course.show.live import progress
from minillm.course.show.recorded import ledger, recorded
from minillm.course.show.tables import text_table

QUICK = os.environ.get("MINILLM_QUICK") == "1"  # small sizes, for tests
setting = Setting(quick=QUICK, progress=progress)
setting.model = model
policies = memory.memory_by_policy(setting)
MEMORY = {"kv": "policy", "mean_requests": "requests, mean", "reserved_mb": "reserved MB", "used_mb": "used MB",
          "wasted_share": "wasted", "tokens_per_s": "tokens/s"}
print(text_table(policies.rows, MEMORY))
as_slots, as_pages = policies.rows
reveal("tokens/s of pages, over those of slots", as_pages["tokens_per_s"] / as_slots["tokens_per_s"])

# %%
plots.bars(
    policies.rows, "kv", {"used_mb": "holds keys and values", "wasted_mb": "reserved, empty"},
    f"In the same memory for keys and values: {as_slots['mean_requests']:.1f} concurrent requests as slots, "
    f"{as_pages['mean_requests']:.1f} as pages", "MB, mean over the steps",
)

# %%
print(recorded("memory_by_policy", MEMORY))

# %% [markdown]
# ## A shared prefix
#
# Chapter 1 showed that a key depends on all tokens before it and on none after it. So two texts that begin with
# the same tokens have the same keys there, to the last bit. A row that begins like an earlier one can hold that row's
# full blocks, and need not compute them.
#
# Our free list learns it with two new methods, and two that do more. It counts the holders of each block, and it knows
# each full block by the text up to its end: by its own tokens and all before them. `enter` makes a row's full blocks
# known, `find` lets a new row hold what is known of its text. A block that was given back stays known until it is
# taken: then `cover` must forget it, since other tokens will be written there, and a row that found it would read
# their keys.

# %%
from collections import Counter


class SharingFreeList(FreeList):
    """A free list whose full blocks can have several holders."""

    def __init__(self, blocks):
        super().__init__(blocks)
        self.holders, self.known, self.found = Counter(), {}, 0  # known: the text up to a block's end -> the block

    def find(self, row):
        """Hold the known blocks of the row's text; one token must be left to feed."""
        for end in range(BLOCK, len(row.tokens), BLOCK):
            if (block := self.known.get(tuple(row.tokens[:end]))) is None:
                return
            if self.holders[block] == 0:
                self.free.remove(block)
            self.holders[block] += 1
            row.blocks.append(block)
            row.stored = end
            self.found += BLOCK

    def cover(self, row):
        if not row.blocks:
            self.find(row)
        self.enter(row)
        held = len(row.blocks)
        super().cover(row)
        self.holders.update(taken := row.blocks[held:])
        self.known = {text: block for text, block in self.known.items() if block not in taken}  # overwritten soon

    def enter(self, row):
        """Know the row's full blocks from now on."""
        for i in range(row.stored // BLOCK):
            self.known.setdefault(tuple(row.tokens[: (i + 1) * BLOCK]), row.blocks[i])

    def give_back(self, row):
        self.enter(row)
        self.holders.subtract(row.blocks)
        self.free += [block for block in row.blocks if self.holders[block] == 0]
        row.blocks = []


# %% [markdown]
# A service puts the same instructions before every question. Four questions, one after another. How many prompt
# tokens need not be computed? Only whole blocks are shared.

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
guess("prompt tokens found", None)

# %%
# NBVAL_CHECK_OUTPUT
in_common = next(i for i in range(len(prompts[0])) if len({prompt[i] for prompt in prompts}) > 1)
whole = in_common // BLOCK * BLOCK
predicted = (len(prompts) - 1) * whole
print(f"prompts of {[len(prompt) for prompt in prompts]} tokens, {in_common} in common: {whole} in whole blocks")
print(f"to be found instead of computed: {len(prompts) - 1} x {whole} = {predicted}")

# %% [markdown]
# The same loop and the same cache, with the new free list, in a store of 16 blocks. It must say what the package says,
# and find what was predicted. Then the same questions again, two at a time, whose answers end at different steps: a
# block that only one of its holders gave back must not be taken.

# %%
# NBVAL_CHECK_OUTPUT
pool, cache, lengths = SharingFreeList(16), PagedCache(16), (6, 3, 6, 3)
params = [SamplingParams(max_tokens=length, ignore_eos=True) for length in lengths]
engine = Engine(model, max_batch=1, max_context=256)
package = [done.token_ids for done in engine.generate(prompts, params)]
for most in (1, 2):
    found_before = pool.found
    rows = [Row(list(prompt), len(prompt) + length) for prompt, length in zip(prompts, lengths, strict=True)]
    for _ in serve(rows, pool, cache, most):
        pass
    ours = [row.tokens[-length:] for row, length in zip(rows, lengths, strict=True)]
    print(f"{most} at a time: found {pool.found - found_before} of {sum(map(len, prompts))} prompt tokens; "
          f"same tokens as the package: {ours == package}; every block is free: {sorted(pool.free) == list(range(16))}")
print(f"the package found {engine.records.totals['cached_tokens']}, predicted were {predicted}")

# %% [markdown]
# The second turn finds more than was predicted for one turn: all four questions find the blocks that the first turn has
# left known, where in the first turn the first question finds nothing.
#
# Now the four questions run side by side, and two chats; one of each kind has run before. Each box is a run of blocks
# that the same rows hold, by their numbers in the store; an orange one is shared by as many rows as it says. (The chats
# share a block too: where no other instructions are given, the template begins with the same sentence.)

# %%
others = [tokenizer.chat(text) for text in ("What is the capital of France?", "Name three primary colours.")]
pool, cache = SharingFreeList(40), PagedCache(40)
for _ in serve([Row(list(prompt), len(prompt) + 3) for prompt in (prompts[0], others[0])], pool, cache):
    pass
rows = [Row(list(prompt), len(prompt) + 3) for prompt in (*prompts, *others)]
names = [*questions, "capital of France", "primary colours"]
for running in serve(rows, pool, cache, most=6):
    tables = [list(row.blocks) for row in running]
    if running[0].stored > len(prompts[0]):
        break
cache_drawings.prefix_tree(dict(zip(names, tables, strict=True)), block_size=BLOCK)

# %% [markdown]
# Now the package's source, and what it adds:
#
# - it keeps the known blocks in a tree: a block is known by its parent node and its own tokens, so that a look-up need
#   not compare the whole text before it;
# - blocks that no row holds and that are still known are taken last, the least recently used first;
# - a request joins only if the pool also covers what the running ones still need.

# %%
from minillm.ladder.paged import BlockPool

show_source(BlockPool.match, BlockPool.enter, Paged.admit, BlockPool.take)

# %% [markdown]
# What it saves: the same questions with and without sharing, and with another first token each. The time to the first
# token is the median of the later questions. Predict: how many times sooner does the first token come?

# %%
guess("first token, times sooner with a shared prefix", None)

# %%
sharing = memory.prefix_sharing(setting, prompts)
SHARING = {"case": "case", "computed": "tokens computed", "found": "found", "ttft_p50_ms": "ms to first token, p50",
           "ttft_p50_ms_min": "shortest", "ttft_p50_ms_max": "longest"}
print(text_table(sharing.rows, SHARING))
without, shared, changed = sharing.rows
reveal("prompt tokens found", shared["found"])
reveal("first token, times sooner with a shared prefix", without["ttft_p50_ms"] / shared["ttft_p50_ms"])

# %%
# NBVAL_CHECK_OUTPUT
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
# On other devices. This is another workload, longer instructions and more questions, so its counts of tokens are not
# those above:

# %%
print(recorded("prefix_sharing", SHARING))

# %% [markdown]
# Sharing saves memory too. The 64 requests of above, now with the same 64 tokens of instructions before every prompt:
# the pool after step 12, without sharing and with it.

# %%
instructed = [replace(item, prompt_ids=[*range(64), *item.prompt_ids]) for item in items]
pools = {name: plots.pool_snapshot(engine_after(12, instructed, prefix_cache=share))
         for name, share in (("not shared", False), ("shared", True))}
fit = [pool.requests for pool in pools.values()]
title = f"64 tokens of instructions before every prompt: {fit[0]} requests fit without sharing, {fit[1]} with it"
plots.block_map(pools, title, columns=12)

# %%
# NBVAL_CHECK_OUTPUT
print_pools(pools)

# %% [markdown]
# ## When the blocks run out
#
# A slot is safe: it has all it will ever need. Pages are promised to no request. If a running request needs a block and
# none is free, the youngest request gives all of its blocks back and waits. When it returns, it computes its prompt
# and its output so far again. It must then go on as if nothing had happened. (Our own `serve` would stop with an error
# of `pop`.)
#
# Three requests in a pool of eleven blocks, against a pool with room for all. First the numbers:

# %%
# NBVAL_CHECK_OUTPUT
from minillm.course.prompts import CHAT_PROMPTS

prompts, new = [tokenizer.chat(text) for text in CHAT_PROMPTS[:3]], 26
needed = [blocks_for(len(prompt) + new - 1) for prompt in prompts]  # the last token is never stored
print(f"prompts of {[len(prompt) for prompt in prompts]} tokens, answers of {new} each: "
      f"{needed} blocks at the end, {sum(needed)} in all")

# %% [markdown]
# All three have joined, and each step stores one more token of each. Predict: when the blocks run out, the youngest
# gives up its blocks. How many tokens are computed again when it returns?

# %%
guess("tokens computed again", None)

# %%
# NBVAL_CHECK_OUTPUT
runs = {}
for name, blocks, shares in (("room for all", 64, False), ("eleven", 11, False), ("eleven, prefix cache", 11, True)):
    engine = Engine(model, kv_memory=blocks * BLOCK * TOKEN_BYTES, prefix_cache=shares, max_batch=3)
    answers = engine.generate(prompts, SamplingParams(max_tokens=new, ignore_eos=True))
    engine.check_invariants()
    runs[name] = [answer.token_ids for answer in answers], engine.records
    totals = engine.records.totals
    print(f"{name}: {totals['preempted']} preempted, {totals['recomputed_tokens']} tokens computed again, "
          f"{totals['recovered_tokens']} found again; same answers: {runs[name][0] == runs['room for all'][0]}")

# %%
reveal("tokens computed again", runs["eleven"][1].totals["recomputed_tokens"])

# %% [markdown]
# Watch it happen: four requests, three rows, ten blocks, and steps of at most 64 tokens. A step of your run shows the
# state of every request up to then and, beside it, the blocks that each holds. Which request gives its blocks back,
# which ones take them, and when does it come back? (Without a kernel the steps run by themselves; with one a slider
# moves them.)

# %%
from minillm.course.show import step_by_step
from minillm.course.show.widgets import run_stepper

four = [tokenizer.chat(text) for text in CHAT_PROMPTS[:4]]
params = [SamplingParams(max_tokens=length, ignore_eos=True) for length in (14, 16, 14, 6)]
engine = Engine(model, kv_memory=10 * BLOCK * TOKEN_BYTES, prefix_cache=False, max_batch=3, max_step_tokens=64)
run = step_by_step.watch(engine, four, params)
run_stepper(run, start=13)

# %% [markdown]
# With the prefix cache, blocks that a preempted request gave back are still known until they are taken. What
# it finds again it need not compute.
#
# ## Where it loses
#
# **Indirection.** A kernel must look the blocks up. In plain PyTorch we gather them into one run at every step and
# every layer, which copies the whole cache of the text. Here is one sequence alone, rung 1 beside rung 4. Guess first:
# how many times as long does a step take after a short text, and after a long one?

# %%
guess("step with blocks over step without, short text", None)
guess("step with blocks over step without, long text", None)

# %%
indirect = memory.cost_of_blocks(setting)
INDIRECT = {"context_tokens": "tokens of text", "contiguous_ms": "one run: ms", "paged_ms": "blocks: ms",
            "times": "times"}
print(text_table(indirect.rows, INDIRECT))
reveal("step with blocks over step without, short text", indirect.rows[0]["times"])
reveal("step with blocks over step without, long text", indirect.rows[-1]["times"])

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
# By the [ledger](CLAIMS.md)'s own rules: on this device, just now, and on every device that has a recorded run.

# %%
print(ledger({"C3": policies, "C8": sharing}))

# %%
guesses()  # yours, the nearest first

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
# The help desk wants today's date in its instructions. Someone writes it in front: `"Today is Monday. " + SYSTEM`.
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
