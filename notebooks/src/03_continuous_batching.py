# %% [markdown]
# # 3 · Continuous batching
#
# A static batch decides once which requests are in it. The loop of this chapter, which you read and run, decides again
# at every step (rung 3):
# a request that has ended leaves immediately, and one that waits takes its slot. Nothing else changes, neither the
# model nor the memory.
#
# **You will learn**
# - to put a queue and slots around the loop of chapter 2, without padding;
# - how to predict the steps of both policies with a pencil;
# - what the gain depends on: first of all, how much the answers' lengths vary;
# - what a long prompt does to the streams beside it, and what chunks do about that.
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
from collections import deque
from dataclasses import dataclass, field

import torch
from torch.nn.functional import scaled_dot_product_attention

import minillm
from minillm.course.show.page import *  # guess, reveal, plots, drawings, text_table, show_source, ledger and the like

model = minillm.load_model(dtype="fp32")
tokenizer = minillm.load_tokenizer()
config, EOS = model.config, model.config.eos_token_id
print(device_name(model.device))


# %% [markdown]
# ## Build: a slot for each row, without padding
#
# Chapter 2's `Request` and chapter 1's `attention`, as they were:

# %%
@dataclass
class Request:
    name: str
    prompt: list[int]
    limit: int  # the most tokens of its answer
    stops: tuple = EOS  # tokens that end it earlier
    answer: list[int] = field(default_factory=list)

    @property
    def ended(self):
        return len(self.answer) == self.limit or (bool(self.answer) and self.answer[-1] in self.stops)


def attention(q, k, v):
    """The newest n of S tokens look back: q [n, Hq, D], k and v [S, Hkv, D] -> [n, Hq, D]."""
    places = torch.arange(len(k), device=k.device)  # [S]
    sees = places <= places[len(k) - len(q) :, None]  # [n, S]: itself, and all before it
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))  # [1, heads, n or S, D]
    return scaled_dot_product_attention(q, k, v, sees, enable_gqa=True)[0].transpose(0, 1)  # [n, Hq, D]


# %% [markdown]
# Chapter 2 padded all prompts to one length, since all joined at the same step. When a request joins while others
# decode, one row feeds a prompt of 40 tokens and the others feed one token each. Padding the others to 40 would be 39
# tokens wasted for each. But the model wants a flat list anyway: so lay the rows end to end, and let the cache be told
# which part of the list is whose. `rows` holds for each row its slot, the position of its first token, and how many
# tokens it feeds. What is new beside chapter 2's `Slots` is the loop over rows; a row by itself is chapter 1.

# %%
class Slots:
    """Keys and values of several texts, each in a slot of its own with room for `capacity` tokens."""

    def __init__(self, slots, capacity):
        shape = (config.num_hidden_layers, slots, capacity, config.num_key_value_heads, config.head_dim)
        self.keys = torch.zeros(shape, device=model.device)  # [L, slots, S, Hkv, D]
        self.values = torch.zeros_like(self.keys)

    def attend(self, layer, q, k, v):
        outputs, first = [], 0
        for slot, start, count in self.rows:  # of this forward
            mine, end = slice(first, first + count), start + count
            self.keys[layer, slot, start:end] = k[mine]  # [count, Hkv, D]
            self.values[layer, slot, start:end] = v[mine]
            outputs.append(attention(q[mine], self.keys[layer, slot, :end], self.values[layer, slot, :end]))
            first += count
        return torch.cat(outputs)  # [N, Hq, D]


# %% [markdown]
# One step: a request without an answer feeds its prompt, every other feeds its newest token. Each gets one token.
# There is no case for a step that has both: the model sees a list of tokens.

# %%
def step(cache, running):
    """One forward pass for the requests in their slots (None: an empty slot), each of which gets its next token."""
    cache.rows, tokens = [], []
    for slot, request in enumerate(running):
        if request:
            text = request.prompt + request.answer
            start = len(text) - 1 if request.answer else 0  # what stands before it is stored
            cache.rows.append((slot, start, len(text) - start))
            tokens += text[start:]
    positions = [position for _, start, count in cache.rows for position in range(start, start + count)]
    last = torch.tensor([count for *_, count in cache.rows]).cumsum(0) - 1  # [R]: each row's last among the flat tokens
    tokens, positions, last = (torch.as_tensor(x, device=model.device) for x in (tokens, positions, last))
    logits = model.forward(tokens, positions, cache, last)  # [R, V]
    for request, token in zip(filter(None, running), logits.argmax(-1).tolist(), strict=True):
        if not request.ended:
            request.answer.append(token)


# %% [markdown]
# Three requests, the third of which joins at the second step: what that step looked like, from what your cache noted.

# %%
# NBVAL_CHECK_OUTPUT
texts = ("The sky is blue", "One, two, three,", "Water boils at a temperature of")
three = [Request(text, tokenizer.encode(text), limit=2) for text in texts]
cache = Slots(3, capacity=16)
with torch.inference_mode():
    step(cache, [three[0], three[1], None])
    step(cache, three)
print("rows of the second step (slot, start, count):", cache.rows)
print({request.name: tokenizer.decode(request.answer) for request in three})

# %%
drawings.flat_mask(cache.rows)

# %% [markdown]
# Each token sees the keys of its own slot up to its own position, and nothing of its neighbours. The white part is
# never computed: the loop over rows leaves it out. (Packing rows of unequal length like this is called *ragged*, or
# *varlen*, attention.)
#
# ## Build: two policies
#
# Now the queue. First chapter 2's policy around `step`: fill an empty batch, and run it until its last request has
# ended.

# %%
@torch.inference_mode()
def static_loop(requests, slots, step=step):
    """Rung 2 with a queue -> for each step (slot, name, idle) of each row."""
    queue, running, steps = deque(requests), [None] * slots, []
    cache = Slots(slots, max(len(request.prompt) + request.limit for request in requests))
    while queue or any(running):
        if not any(running):
            running = [queue.popleft() if queue else None for _ in range(slots)]
        steps.append([(slot, request.name, request.ended) for slot, request in enumerate(running) if request])
        step(cache, running)
        if all(request is None or request.ended for request in running):
            running = [None] * slots
    return steps


# %% [markdown]
# Then the policy of this chapter, which asks both questions for each slot and at every step: is it free, and has its
# request ended?

# %%
@torch.inference_mode()
def continuous_loop(requests, slots, step=step):
    """Rung 3 -> for each step (slot, name, idle) of each row."""
    queue, running, steps = deque(requests), [None] * slots, []
    cache = Slots(slots, max(len(request.prompt) + request.limit for request in requests))
    while queue or any(running):
        running = [request or (queue.popleft() if queue else None) for request in running]
        steps.append([(slot, request.name, request.ended) for slot, request in enumerate(running) if request])
        step(cache, running)
        running = [None if request and request.ended else request for request in running]
    return steps


# %% [markdown]
# The whole difference between rung 2 and rung 3:

# %%
show_diff(static_loop, continuous_loop)

# %% [markdown]
# ## The same tokens
#
# When a request joins, and what runs beside it, must not change its answer. Your two policies against the package's
# engine, token for token and step for step:

# %%
# NBVAL_CHECK_OUTPUT
from minillm import Engine, SamplingParams
from minillm.course.prompts import CHAT_PROMPTS


def idle_in(steps):
    return sum(idle for step in steps for _, _, idle in step)


prompts, limits = [tokenizer.chat(text) for text in CHAT_PROMPTS[:5]], [8, 3, 10, 5, 7]
params = [SamplingParams(max_tokens=limit) for limit in limits]
for policy, loop in (("static", static_loop), ("continuous", continuous_loop)):
    mine = [Request(f"request {i}", prompt, limits[i]) for i, prompt in enumerate(prompts)]
    steps = loop(mine, slots=2)
    engine = Engine(model, batching=policy, kv="slots", max_batch=2)
    same = [request.answer for request in mine] == [answer.token_ids for answer in engine.generate(prompts, params)]
    counts, theirs = (len(steps), idle_in(steps)), engine.records.totals
    print(f"{policy}: the engine's tokens: {same}; {counts[0]} steps, {counts[1]} idle slot-steps, "
          f"as the engine: {counts == (theirs['steps'], theirs['idle_rows'])}")
print([tokenizer.decode(request.answer) for request in mine])

# %% [markdown]
# ## The package's rung 3
#
# In the package a policy is an object, and the scheduler asks it at every step. The two decisions of your loops are
# these, static first:

# %%
from minillm.ladder.continuous import ContinuousBatching, Scheduler, StaticBatching

show_source(StaticBatching.is_open, StaticBatching.leaving, ContinuousBatching.is_open, ContinuousBatching.leaving)

# %% [markdown]
# What the package adds to your loop:
#
# - requests arrive while others run, so the queue is filled from outside, and a step is a method that is called again;
# - `plan` decides what a step feeds, `commit` takes what it gave: between them a forward pass may fail, and nothing is
#   lost;
# - a step has a budget of tokens, which the last part of this page is about;
# - a request that does not fit into memory waits: that is the next chapter. After it, read all of `plan` and `commit`
#   in `minillm/ladder/continuous.py`, which fit on a screen each.
#
# ## Predict
#
# Sixteen requests, all here at the start, and four slots. Their answers have these lengths:
#
# `3 12 5 30 · 8 4 20 6 · 2 16 9 3 · 25 7 5 10`
#
# - Static: four batches of four, in this order, each as long as its longest. How many steps?
# - Continuous: at least the sum of all lengths over four. How many steps at least?
#
# Write both down.

# %%
guess("steps, static", None)
guess("steps, continuous, at least", None)

# %%
# NBVAL_CHECK_OUTPUT
import heapq

lengths = [3, 12, 5, 30, 8, 4, 20, 6, 2, 16, 9, 3, 25, 7, 5, 10]


def static_steps(lengths, slots):
    return sum(max(lengths[at : at + slots]) for at in range(0, len(lengths), slots))


def continuous_steps(lengths, slots):
    """The next in the queue takes the slot that is free first."""
    ends = [0] * slots
    for length in lengths:
        heapq.heapreplace(ends, ends[0] + length)
    return max(ends)


print(f"static: {static_steps(lengths, 4)} steps")
least = -(-sum(lengths) // 4)
print(f"continuous: at least {sum(lengths)} / 4, so {least}; with this queue {continuous_steps(lengths, 4)}")

# %% [markdown]
# Now your two loops. To count steps no model is needed: `no_forward` gives token 0 to every request that has not ended.
# The package's scheduler is counted beside them. All must be as predicted.

# %%
# NBVAL_CHECK_OUTPUT
from minillm.course.experiments import common
from minillm.measure.workload import articles_static


def no_forward(cache, running):
    for request in running:
        if request and not request.ended:
            request.answer.append(0)


def asking_for(lengths, prompt=(1,)):
    """A request for each length, which nothing ends before it."""
    return [Request(f"request {i}", list(prompt), length, stops=()) for i, length in enumerate(lengths)]


runs = {}
for policy, loop, predicted in (("static", static_loop, static_steps(lengths, 4)),
                                ("continuous", continuous_loop, continuous_steps(lengths, 4))):
    runs[policy] = steps = loop(asking_for(lengths), 4, no_forward)
    counted = common.count(config, articles_static(lengths), batching=policy, kv="slots", max_batch=4).totals
    same = (len(steps), idle_in(steps)) == (counted["steps"], counted["idle_rows"])
    print(f"{policy}: {len(steps)} steps, as predicted: {len(steps) == predicted}; idle slot-steps: {idle_in(steps)}; "
          f"the package counts the same: {same}")

# %%
reveal("steps, static", len(runs["static"]))
reveal("steps, continuous, at least", least)
drawings.slots_by_step(runs)

# %% [markdown]
# ## Measure: the same requests, side by side
#
# From here on the package's engine is measured. Twelve requests whose lengths vary as much as their mean, four slots,
# the real model and the real clock. Each bar is a request; its dark beginning is the prefill, a hatched bar is a row
# that feeds its last token again for nothing.
#
# Predict: how many times as fast is the continuous run?

# %%
guess("continuous, times the tokens/s of static", None)

# %%
from minillm import metrics
from minillm.measure.workload import lognormal

items = lognormal(1.0, requests=12, mean_tokens=6 if QUICK else 16, prompt_tokens=16)
common.warm_up(model)
runs = {
    policy: common.serve(model, items, batching=policy, kv="slots", max_batch=4)
    for policy in ("static", "continuous")
}
plots.slot_timeline(runs, unit="s")

# %% [markdown]
# The white space at the right end of the continuous run is not idle work: the queue is empty, so the last steps have
# fewer rows and cost less.
#
# Move the slider (with the arrow keys, too) to walk through the continuous run: at which step does the fifth
# request join, and whose row does it take? (The blocks that it counts are the memory for keys and values, of which
# slots take all they may need at the start: that is chapter 4.) Without a running kernel you see one step as a picture;
# a kernel makes the slider move.

# %%
from minillm.course.show.widgets import schedule_stepper

schedule_stepper(runs["continuous"], start=8)

# %%
speeds = {}
for name, records in runs.items():
    s = metrics.summary(records)
    speeds[name], rows, ttft = s["output_tokens"] / s["busy_s"], s["batch"]["mean_rows"], s["ttft_s"]
    print(f"{name}: {speeds[name]:.0f} tokens/s; {s['steps']} steps with {rows:.2f} rows that worked; "
          f"time to first token p50 {ttft['p50']:.2f} s, longest {ttft['max']:.2f} s")
reveal("continuous, times the tokens/s of static", speeds["continuous"] / speeds["static"])

# %% [markdown]
# ## What the gain depends on
#
# Answers that all have one length give a static batch nothing to waste. The more they vary, the longer the longest
# of eight is beside the mean. The **coefficient of variation** (standard deviation over mean) says how much they
# vary: 0 is all equal.
#
# Steps first: 64 requests of 64 tokens on average, eight slots. These counts depend on no clock. Predict: how many
# times the steps do static batches need at a variation of 0, and at 1?

# %%
guess("static over continuous steps, variation 0", None)
guess("static over continuous steps, variation 1", None)


# %%
# NBVAL_CHECK_OUTPUT
def steps_of(lengths, loop, slots=8):
    return len(loop(asking_for(lengths), slots, no_forward))


times = {}
for cv in (0.0, 0.5, 1.0, 2.0):
    drawn = [item.output_tokens for item in lognormal(cv, requests=64, mean_tokens=64, prompt_tokens=8)]
    by_static, by_continuous = steps_of(drawn, static_loop), steps_of(drawn, continuous_loop)
    times[cv] = by_static / by_continuous
    print(f"variation {cv}: static {by_static:>4} steps, continuous {by_continuous:>4}: {times[cv]:.2f} times")

# %%
reveal("static over continuous steps, variation 0", times[0.0])
reveal("static over continuous steps, variation 1", times[1.0])

# %% [markdown]
# And now by the clock, at sizes that suit this machine.

# %%
from minillm.course.experiments import batching

setting = Setting(quick=QUICK, progress=progress)
setting.model = model
gains = batching.gain_by_spread(setting, repeats=1)
GAINS = {"cv": "variation", "static_steps": "static steps", "continuous_steps": "continuous steps",
         "times_steps": "times the steps", "idle_share": "static: idle share",
         "times_tokens_per_s": "times the tokens/s"}
print(text_table(gains.rows, GAINS))

# %%
last, spreads = gains.rows[-1], [row["cv"] for row in gains.rows]
plots.curves(
    {"fewer steps": (spreads, [row["times_steps"] for row in gains.rows]),
     "more tokens per second": (spreads, [row["times_tokens_per_s"] for row in gains.rows])},
    f"Equal answers: {gains.rows[0]['times_tokens_per_s']:.2f} times the throughput of static batches; "
    f"variation {last['cv']:g}: {last['times_tokens_per_s']:.2f} times",
    "coefficient of variation of the answers' lengths", "times, against static batches",
)

# %% [markdown]
# Two things bound the gain of so short a run. It cannot end before its longest answer: with few requests and a large
# variation that one answer decides, and the last steps have one row. And both policies spend the same time on prompts.
#
# On other devices:

# %%
print(recorded("gain_by_spread", GAINS))

# %% [markdown]
# ## Chats
#
# Those lengths were drawn from a formula. Real chats have long prompts too, and a prompt costs the same under every
# policy. So here are the lengths of a chat service, shrunk to this machine, in equal bytes for each policy (pages are
# the next chapter's); then the same answers after prompts of one token. Predict, for both: how many times static?

# %%
guess("chats in slots, times static: whole run", None)
guess("chats in slots, times static: answers only", None)

# %%
brief = Setting(quick=QUICK or not setting.gpu, progress=progress)  # the full size takes a CPU minutes
brief.model = model
chats = batching.continuous_vs_static(brief)
CHATS = {"part": "part", "setup": "policy", "steps": "steps", "mean_rows": "rows, mean", "tokens_per_s": "tokens/s",
         "times_static": "times static"}
print(text_table(chats.rows, CHATS))
for row in chats.rows:
    if row["setup"] == "continuous, slots":
        reveal(f"chats in slots, times static: {row['part']}", row["times_static"])

# %% [markdown]
# This run is small, for a CPU: a batch or two, whose longest answer is luck. Recorded at full size:

# %%
print(recorded("continuous_vs_static", CHATS))

# %% [markdown]
# ## A long prompt among streams
#
# Four clients read their answers as they come. A prompt of many tokens arrives. If it is computed in one step, as in
# your loop, that step is long, and all four streams stand still.
#
# With **chunked prefill** a step has a budget of tokens: the four streams take one each, and the prompt gets the
# rest. The prompt then needs several steps, and each is short.
#
# Predict: with a budget of 64 and four streams, how many steps does a prompt of 512 tokens take?

# %%
guess("steps of a prompt of 512 tokens in chunks", None)

# %% [markdown]
# In the package that is one line of the scheduler. `num_pending` is how many tokens a request has known but not yet
# fed. The other one feeds a prompt whole, or lets it wait.

# %%
from minillm.extras.whole_prompts import WholePromptScheduler

show_source(Scheduler.chunk, WholePromptScheduler.chunk)

# %%
stalls = batching.stall_by_chunking(setting)
STALLS = {"prompt": "prompt", "step_budget": "tokens a step", "p50_gap_ms": "gap p50, ms",
          "longest_gap_ms": "longest gap, ms", "prompt_steps": "steps with the prompt",
          "late_ttft_ms": "its time to first token, ms"}
print(text_table(stalls.rows, STALLS))

# %%
# NBVAL_CHECK_OUTPUT
in_chunks = -(-512 // (64 - 4))
print("512 tokens, budget 64, four streams:", in_chunks, "steps")
whole, chunked = stalls.rows
long_prompt, budget = whole["step_budget"] - 4, chunked["step_budget"]
print("measured as predicted:", whole["prompt_steps"] == 1, chunked["prompt_steps"] == -(-long_prompt // (budget - 4)))

# %%
reveal("steps of a prompt of 512 tokens in chunks", in_chunks)
drawings.gaps(
    {"whole prompt in one step": (whole["gap_at_s"], whole["gaps_ms"]),
     "in chunks": (chunked["gap_at_s"], chunked["gaps_ms"])},
    f"A prompt of {long_prompt:,} tokens makes a stream stand still for {whole['longest_gap_ms']:,.0f} ms; "
    f"in chunks for {chunked['longest_gap_ms']:,.0f} ms at most",
)

# %% [markdown]
# Each stem is a token of one stream, as high as the time since the token before it.
#
# A chunk's budget is a trade. A small one keeps the streams smooth. But every chunk reads the weights again, and
# its last tokens look back over all chunks before, so the late request's own first token comes no sooner, often
# later. The last column of the table says by how much here.
#
# Choose a budget yourself, on an A100 under an 8B model. That is **virtual time**: the real scheduler, with steps as
# long as a data sheet says. With a running kernel the slider moves: from which budget on does a smaller one no longer
# shorten the gaps, and only delays the late request?

# %%
from minillm.course.show.widgets import budget_explorer

budget_explorer()

# %% [markdown]
# ## Where it loses
#
# When all answers have one length, there is nothing to win: the batch empties as a whole in both policies.

# %%
# NBVAL_CHECK_OUTPUT
by_static, by_continuous = steps_of([64] * 32, static_loop), steps_of([64] * 32, continuous_loop)
print(f"steps: {by_static} and {by_continuous}; equal: {by_static == by_continuous}")

# %%
print(f"by the clock, equal lengths: {gains.rows[0]['times_tokens_per_s']:.2f} times the throughput of static batches")

# %% [markdown]
# Nor does it help a request that is alone, and it does nothing about memory: a slot still reserves for the longest.
# Chapter 4 does.
#
# ## Claims of the ledger that this page settles
#
# By the [ledger](CLAIMS.md)'s own rules: on this device, just now, and on every device that has a recorded run.

# %%
print(ledger({"B5": batching.idle_slots(setting).rows, "B6": chats, "B7": gains}))

# %% [markdown]
# ## What a production engine calls this
#
# | here | vLLM | SGLang | elsewhere |
# |---|---|---|---|
# | continuous batching | always on | always on | in-flight (TensorRT-LLM), iteration-level (Orca) |
# | `max_batch` | `--max-num-seqs` | `--max-running-requests` | |
# | `max_step_tokens` | `--max-num-batched-tokens` | `--chunked-prefill-size`, `--max-prefill-tokens` | |
# | `chunked_prefill` | `--enable-chunked-prefill` | `--chunked-prefill-size -1` turns it off | |
# | decodes and chunks in one step | always, where chunked | `--enable-mixed-chunk` | |
# | first come, first served | `--scheduling-policy fcfs` | `--schedule-policy fcfs` | |
# | waiting, running | `vllm:num_requests_waiting`, `_running` | `sglang:num_queue_reqs`, `num_running_reqs` | |
#
# ## Your guesses
#
# Those that you made on this page, beside what was measured, the nearest first:

# %%
guesses()

# %% [markdown]
# ## Exercise
#
# A service answers its requests with 16 and with 240 tokens in turn, from eight slots: `[16, 240] * 32`. Before you
# count: is the gain nearer to 1, 2 or 3? Put these `lengths` below in place of `None`, and then shapes of your own,
# until you have found one with a gain above 4.
#
# To go further, in a checked notebook: [exercise 4](../exercises/04_continuous_scheduler.ipynb), where you write the
# scheduler with its budget.

# %%
lengths = None  # of the answers, a list
if lengths:
    gain = steps_of(lengths, static_loop) / steps_of(lengths, continuous_loop)
    print(f"gain in steps: {gain:.2f}; above 4: {'yes' if gain > 4 else 'no'}")

# %% [markdown]
# [How these pages are made](README.md) · before: [2 · Static batches](02_static_batching.ipynb) · next:
# [4 · Paged KV](04_paged_kv.ipynb)
