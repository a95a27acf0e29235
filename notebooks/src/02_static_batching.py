# %% [markdown]
# # 2 · Static batches
#
# A decode step reads all the weights to make one token. If eight requests are at that point, one reading can serve
# all eight. In this chapter you read and run a loop that puts requests into a batch (rung 2), measure what a step then
# costs, and count what a batch wastes when it must wait for its longest row.
#
# **You will learn**
# - how several texts go through one forward pass;
# - what a step with 1, 2, 4 … 128 rows costs, and what bounds it;
# - how to count idle slot-steps before running anything;
# - what a slot reserves, and how little of that is used;
# - where your machine's knee is: the number of clients from which each further one adds more delay than throughput.
#
# **To run this page**: `make lab` in the repository, or `pip install -e ".[lab]"` and open the notebook. Chapter 1
# comes first.

# %%
# Where the package is missing, as on Colab: open this page inside a copy of the repository, and this installs it.
# ("minillm" on PyPI is another project.)
import importlib.util
import subprocess
import sys

if importlib.util.find_spec("minillm") is None:
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "..[lab]"], check=True)

# %%
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
# ## Predict
#
# One step for eight requests, each with 64 tokens of text. Compared with a step for one request:
#
# - how many times the bytes must be read?
# - how many times the arithmetic must be done?
# - so, how many times as long does the step take? Write that number down.

# %%
guess("a step of 8 rows, times a step of one", None)

# %%
# NBVAL_CHECK_OUTPUT
from minillm.measure.roofline import StepShape, least_work

works = {n: least_work(config, "fp32", StepShape.decode([64] * n), model.weight_bytes) for n in (1, 8, 32)}
for n, work in works.items():
    print(f"{n:>2} rows: {work.bytes / 1e6:.0f} MB to read ({work.bytes / works[1].bytes:.2f} times), "
          f"{work.flops / 1e9:.2f} GFLOP to do ({work.flops / works[1].flops:.0f} times)")

# %% [markdown]
# The bytes hardly grow, the arithmetic grows with the rows. Which of the two decides depends on the device: on how
# fast it reads, and how fast it multiplies. We measure both limits here and divide. The longer of the two times is
# the least that a step can take.

# %%
setting = Setting(quick=QUICK, progress=progress)  # what it times on a GPU has Llama-3-8B's shape
setting.model = model
reach = setting.ceilings
print(f"this device reads {reach.bytes_per_s / 1e9:.1f} GB/s and multiplies {reach.flops_per_s / 1e9:,.0f} GFLOP/s")
works = {n: setting.work(StepShape.decode([64] * n)) for n in works}
for n, work in works.items():
    read, multiply = work.bytes / reach.bytes_per_s, work.flops / reach.flops_per_s
    print(f"{n:>2} rows: {read * 1e3:.1f} ms to read, {multiply * 1e3:.1f} ms to multiply: "
          f"at least {reach.least_seconds(work) / reach.least_seconds(works[1]):.2f} times the step of one row")

# %% [markdown]
# ## Build: a slot for each row
#
# From here on there are several texts, so what chapter 1 kept in variables of its loop goes into an object: a prompt,
# the most tokens that its answer may have, and the answer so far.

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


# %% [markdown]
# The model takes a flat list of tokens, and nothing in a linear layer or a norm asks which text a token belongs to. So
# a batch of B rows with n tokens each is a list of B · n tokens. Only the object that runs attention must know the
# rows. Compare it with chapter 1's `Cache`:
#
# - the tensors have one axis more, B: each row has a **slot**, as long as the longest text may become;
# - a token is stored at its own position in its row's slot, where chapter 1 had `length`;
# - the mask has a row axis too: each row's token sees its own slot, up to its own position.

# %%
class Slots:
    """Keys and values of B rows, each in a slot of its own with room for `capacity` tokens."""

    def __init__(self, rows, capacity):
        shape = (config.num_hidden_layers, rows, capacity, config.num_key_value_heads, config.head_dim)
        self.keys = torch.zeros(shape, device=model.device)  # [L, B, S, Hkv, D]
        self.values = torch.zeros_like(self.keys)  # [L, B, S, Hkv, D]
        self.row = torch.arange(rows, device=model.device)[:, None]  # [B, 1]
        self.place = torch.arange(capacity, device=model.device)  # [S]

    def attend(self, layer, q, k, v):
        at = self.positions  # [B, n], of this forward's tokens
        self.keys[layer, self.row, at] = k.unflatten(0, at.shape)  # [B, n, Hkv, D]
        self.values[layer, self.row, at] = v.unflatten(0, at.shape)
        sees = self.place <= at[:, None, :, None]  # [B, 1, n, S]
        q = q.unflatten(0, at.shape).transpose(1, 2)  # [B, Hq, n, D]
        k, v = (x[layer].transpose(1, 2) for x in (self.keys, self.values))  # [B, Hkv, S, D]
        return scaled_dot_product_attention(q, k, v, sees, enable_gqa=True).transpose(1, 2).flatten(0, 1)


# %% [markdown]
# One forward pass for B rows. The fourth argument of `model.forward` names the tokens whose logits are wanted: the
# last one of each row.

# %%
def forward(cache, feed, starts, last):
    """Feed B rows of n tokens, each row from its own start -> logits after token last[b] of each row [B, V]."""
    tokens = torch.tensor(feed, device=model.device)  # [B, n]
    rows, n = tokens.shape
    cache.positions = torch.tensor(starts, device=model.device)[:, None] + torch.arange(n, device=model.device)
    wanted = torch.arange(rows) * n + torch.tensor(last)  # [B], among the flat tokens
    return model.forward(tokens.flatten(), cache.positions.flatten(), cache, wanted.to(model.device))


# %% [markdown]
# ## Build: chapter 1's loop, for all rows
#
# Line by line beside `cached_loop`:
#
# - every prompt is padded to the longest. What padding writes after a prompt is not seen, since a token sees only up to
#   its own position, and it is overwritten as the row grows;
# - each step takes one token for every row, not for one;
# - the loop ends with the **longest** row. Until then a row that has ended stays in the batch: it feeds its last token
#   again, and what the model says is dropped. That is an **idle slot-step**;
# - `steps` notes for each step which slot held which request, and whether it was idle.

# %%
@torch.inference_mode()
def static_batch(requests, forward=forward):
    """Rung 2: all requests in one batch, until the last has ended -> for each step (slot, name, idle) of each row."""
    longest, steps = max(len(request.prompt) for request in requests), []
    cache = Slots(len(requests), longest + max(request.limit for request in requests))
    feed = [request.prompt + [0] * (longest - len(request.prompt)) for request in requests]  # [B, longest], padded
    starts, last = [0] * len(requests), [len(request.prompt) - 1 for request in requests]
    while not all(request.ended for request in requests):
        steps.append([(slot, request.name, request.ended) for slot, request in enumerate(requests)])
        tokens = forward(cache, feed, starts, last).argmax(-1).tolist()  # B of them
        for request, token in zip(requests, tokens, strict=True):
            if not request.ended:
                request.answer.append(token)
        feed = [request.answer[-1:] for request in requests]  # [B, 1]
        starts = [len(request.prompt) + len(request.answer) - 1 for request in requests]
        last = [0] * len(requests)
    return steps


def idle_in(steps):
    return sum(idle for step in steps for _, _, idle in step)


# %% [markdown]
# ## The same tokens
#
# What else is in the batch must not change a request's answer. Four prompts, alone (rung 1), in your batch, and in
# the package's two: `decode_batch`, which is a loop like yours, and the engine with this policy. The idle slot-steps
# are compared as well.

# %%
# NBVAL_CHECK_OUTPUT
from minillm import Engine, SamplingParams
from minillm.course.prompts import CHAT_PROMPTS
from minillm.ladder import request as package
from minillm.ladder.decode import decode_cached
from minillm.ladder.static import SlotCache, decode_batch, forward_padded

prompts, limits = [tokenizer.chat(text) for text in CHAT_PROMPTS[:4]], [8, 3, 12, 6]
params = [SamplingParams(max_tokens=limit) for limit in limits]
alone = [list(decode_cached(model, prompt, limit, EOS)) for prompt, limit in zip(prompts, limits, strict=True)]
mine = [Request(f"request {i}", prompt, limits[i]) for i, prompt in enumerate(prompts)]
theirs = [package.Request(i, prompt, params[i], stop_ids=frozenset(EOS)) for i, prompt in enumerate(prompts)]
engine = Engine(model, batching="static", kv="slots", max_batch=4)
steps, their_idle = static_batch(mine), decode_batch(model, theirs)
served = engine.generate(prompts, params)
for request, by_itself, other, third in zip(mine, alone, theirs, served, strict=True):
    same = request.answer == by_itself, request.answer == other.output_ids, request.answer == third.token_ids
    print(*same, repr(tokenizer.decode(request.answer)))
print(f"{len(steps)} steps, {idle_in(steps)} idle slot-steps; the package counts as many:",
      idle_in(steps) == their_idle == engine.records.totals["idle_rows"])

# %% [markdown]
# ## The package's rung 2

# %%
show_source(decode_batch, forward_padded, SlotCache)

# %% [markdown]
# What it adds to yours:
#
# - `sample`: each request may have its own temperature and its own seed;
# - the mask is made once for each forward (`begin`), where yours is made in every layer, and attention reaches to the
#   longest row of now, where yours reaches to the end of the slots;
# - a request tells what is **known** (`num_tokens`) from what is **stored** (`num_kv`): the newest token is known, but
#   has no key before it is fed. Your `starts` is the second of these two numbers;
# - `decode_static`, not shown, cuts a queue into batches.
#
# ## Measure: a step against its rows
#
# `batch_curve` lets 1, 2, 4 … rows decode side by side in the package's engine and takes the median of the steps.

# %%
from minillm.course.experiments import batching

by_rows = batching.batch_curve(setting)
ROWS = {"rows": "rows", "step_ms": "step, ms", "min_ms": "least", "max_ms": "most",
        "times_step": "step, times one row", "times_tokens": "tokens/s, times one row"}
print(text_table(by_rows.rows, ROWS))

# %%
eight = next(row for row in by_rows.rows if row["rows"] == 8)
reveal("a step of 8 rows, times a step of one", eight["times_step"])
plots.tokens_per_s_curve(by_rows.rows)

# %% [markdown]
# The two articles behind this course (their claims are the [ledger](CLAIMS.md)) say: eight times the output for about
# 1.2 times the time of a step. Your device's answer is in the row for 8. "If rows were free" is one row's speed times
# the rows. The roofline bends where multiplying begins to take longer than reading; the measured line bends with it, or
# before it. Where a step of more rows is faster than one of fewer, compare the least of one with the most of the other.
# If these overlap, it is noise; if not, the matrix library uses another kernel for the other shape.
#
# On other devices:

# %%
print(recorded("batch_curve", ROWS))

# %% [markdown]
# ## Idle slot-steps
#
# Now the cost. A batch holds one request whose answer has 800 tokens, and seven whose answers have 40. Each answer
# of n tokens takes part in n steps: the step that reads its prompt gives the first token. The batch lasts as long
# as its longest row.
#
# How many slot-steps are there, and how many of them are idle? And for a pair of 80 and 800? Write it down.

# %%
guess("idle slot-steps, one answer of 800 and seven of 40", None)
guess("idle slot-steps, 80 beside 800", None)


# %%
# NBVAL_CHECK_OUTPUT
def idle_slot_steps(answers):
    return sum(max(answers) - answer for answer in answers)


ARTICLES = [800, *[40] * 7]
for answers in (ARTICLES, [80, 800]):
    idle, all_steps = idle_slot_steps(answers), len(answers) * max(answers)
    print(f"{answers}: {idle:,} of {all_steps:,} slot-steps are idle, {idle / all_steps:.0%}")

# %% [markdown]
# Let your loop count. That needs no model: `no_forward` says token 0 for every row, and the loop cannot tell. The
# package's engine counts the same way, with its real scheduler.

# %%
# NBVAL_CHECK_OUTPUT
from minillm.course.experiments import common
from minillm.measure.workload import articles_static


def no_forward(cache, feed, starts, last):
    return torch.zeros(len(feed), 1)  # [B, V], a vocabulary of one


def asking_for(answers, prompt=(1,)):
    """A request for each length, which nothing ends before it."""
    return [Request(f"request {i}", list(prompt), limit, stops=()) for i, limit in enumerate(answers)]


for answers in (ARTICLES, [80, 800]):
    steps = static_batch(asking_for(answers), no_forward)
    engines = common.count(config, articles_static(answers), batching="static", kv="slots", max_batch=8).totals
    print(f"{answers}: {len(steps)} steps, {idle_in(steps):,} idle slot-steps; "
          f"as predicted: {idle_in(steps) == idle_slot_steps(answers)}; "
          f"the engine's count: {(len(steps), idle_in(steps)) == (engines['steps'], engines['idle_rows'])}")

# %% [markdown]
# And with the model, at a twentieth of the length: one answer of 40 tokens, seven of 2. Who sits where:

# %%
# NBVAL_CHECK_OUTPUT
short = asking_for([40, *[2] * 7], prompt=prompts[0])
short_steps = static_batch(short)
slot_steps = len(short_steps) * len(short)
print(f"{idle_in(short_steps)} of {slot_steps} slot-steps are idle, {idle_in(short_steps) / slot_steps:.0%}; "
      f"rows that worked, on average: {(slot_steps - idle_in(short_steps)) / len(short_steps):.2f} of 8")

# %%
reveal("idle slot-steps, one answer of 800 and seven of 40", idle_slot_steps(ARTICLES))
reveal("idle slot-steps, 80 beside 800", idle_slot_steps([80, 800]))
drawings.slots_by_step({"one answer of 40 tokens, seven of 2": short_steps})

# %% [markdown]
# ## What a slot reserves
#
# A slot is one contiguous run of memory. Its place is fixed when the batch starts, so it is as long as the longest
# text may become: prompt and `limit`. How long an answer really gets is not known then. Here are four questions, each
# of which may have 128 tokens of answer, and whose answers turn out to be short. Which share of what was reserved holds
# a key at the end of the batch, in per cent?

# %%
guess("share of the reserved slots that is used, %", None)

# %%
# NBVAL_CHECK_OUTPUT
limit = 128
chats = [Request(text, tokenizer.chat(text), limit) for text in (CHAT_PROMPTS[i] for i in (0, 6, 8, 10))]
static_batch(chats)
reserved = len(chats) * (max(len(request.prompt) for request in chats) + limit)
stored = sum(len(request.prompt) + len(request.answer) - 1 for request in chats)  # the last token is never fed
print("answers, tokens:", [len(request.answer) for request in chats])
print(f"reserved {reserved} tokens, used {stored}: {stored / reserved:.0%}")

# %%
from minillm.ladder.quantized import kv_bytes_per_token

reveal("share of the reserved slots that is used, %", 100 * stored / reserved)
token_mb = kv_bytes_per_token(config, "fp32") / 1e6
print(f"in bytes: {reserved * token_mb:.1f} MB reserved, {stored * token_mb:.1f} MB used")

# %% [markdown]
# ## Where is the knee?
#
# More rows give more tokens per second, and each of them comes later. Up to some number of clients the first grows
# faster than the second, in per cent; past it the second does. That number is the **knee**. We look for it as a
# service would: a closed loop of more and more clients, each of which asks again when it is answered, and the number
# with the most tokens per second for each millisecond between two tokens (the median, p50).
#
# Predict, from the table above: with how many clients does *this* machine have its knee? On a CPU the run below is
# small and ends at 8 clients. If the best row is its last one, the knee may lie anywhere past it, and your guess is not
# judged.

# %%
guess("clients at the knee", None)

# %%
brief = Setting(quick=QUICK or not setting.gpu, progress=progress)  # the full size takes a CPU minutes
brief.model = model
by_clients = batching.knee(brief)
CLIENTS = {"clients": "clients", "mean_rows": "rows, mean", "tokens_per_s": "tokens/s",
           "itl_p50_ms": "ms between tokens, p50", "power": "tokens/s per ms", "knee_share": "share of the resamples"}
print(text_table(by_clients.rows, CLIENTS))

# %%
if by_clients.rows[-1]["knee"]:
    print("the best row is the last one, so the knee lies there or past it: no guess is judged")
else:
    reveal("clients at the knee", next(row["clients"] for row in by_clients.rows if row["knee"]))
print(f"the knee may lie at {', '.join(str(row['clients']) for row in batching.knees_of(by_clients.rows))} clients")
plots.knee_curve(by_clients.rows)

# %% [markdown]
# Up to the knee each client adds more throughput than delay; past it, more delay than throughput. A service that must
# be quick stops there; one that must be cheap goes on. Resampling the requests shows how firmly the knee stands: the
# last column is the share of 200 resamples with their knee in that row. A CPU plays a small size here, where the knee
# may lie beyond the last row. At full size:

# %%
print(recorded("knee", CLIENTS))

# %% [markdown]
# Eight clients are not the eight rows of the first table: a prompt takes part of a step, and at the start and the end
# of a run there are fewer than eight rows. And the two tables were made minutes apart, while the speed of a shared
# machine moves. So compare what stands in one table, where the set-ups took turns, and believe a difference only if it
# is larger than its range.
#
# ## Where it loses: real questions
#
# Chat prompts have answers of very different lengths. We serve two batches of them with the package's engine, and
# look at three things: the idle share, the rows that worked on average, and the time to the first token of the second
# batch. It had to wait for the longest answer of the first. Guess the idle share before you run it.

# %%
guess("idle share of two batches of chats, %", None)

# %%
from minillm import metrics

size, cap = (4, 16) if QUICK else (8, 64)
engine = Engine(model, tokenizer, batching="static", kv="slots", max_batch=size, max_context=256)
answers = engine.generate([tokenizer.chat(text) for text in CHAT_PROMPTS[: 2 * size]], SamplingParams(max_tokens=cap))
print("answers, tokens:", [len(answer.token_ids) for answer in answers])
batch = metrics.summary(engine.records)["batch"]
print(f"idle: {batch['idle_share']:.0%} of the slot-steps; rows that worked: {batch['mean_rows']:.1f} of {size}")
for name, some in (("first", answers[:size]), ("second", answers[size:])):
    times = metrics.distribution([answer.timing.ttft for answer in some])
    print(f"time to first token, {name} batch: {times['p50']:.2f} s (median of {times['n']})")
reveal("idle share of two batches of chats, %", 100 * batch["idle_share"])

# %% [markdown]
# It also loses where there is nothing to share: a batch of one is rung 1 with more records to keep.
#
# ## Claims of the ledger that this page settles
#
# By the [ledger](CLAIMS.md)'s own rules: on this device, just now, and on every device that has a recorded run.

# %%
print(ledger({"B1": by_rows, "B2": by_rows, "B3": by_clients, "B4": batching.idle_slots(setting).rows, "B8": by_rows}))

# %% [markdown]
# A claim that this page's sizes cannot judge says which row is missing; `minillm measure NAME` runs an experiment at
# its full size.
#
# ## What a production engine calls this
#
# | here | elsewhere |
# |---|---|
# | static batch | `model.generate` of transformers on a padded batch; request-level "dynamic batching" of a server |
# | rows, slots | batch size; `--max-num-seqs` in vLLM and `--max-running-requests` in SGLang cap the rows of a step |
# | idle slot-step | padding after the end of a sequence; "bubble" |
# | reserved slot | what `max_length` allocates in a static cache (`cache_implementation="static"`) |
#
# Neither vLLM nor SGLang batches statically. The next chapter shows what they do.
#
# ## Your guesses
#
# Those that you made on this page, beside what was measured, the nearest first:

# %%
guesses()

# %% [markdown]
# ## Exercise
#
# You may sort the waiting requests by the length of their answers (suppose you knew it) and then cut them into
# batches of four. How many idle slot-steps are left? Fill in `sorted_idle`; the check counts with your loop.
#
# To go further, in a checked notebook: [exercise 3](../exercises/03_static_batch.ipynb), where you write the policy and
# count its idle slots.

# %%
lengths = [3, 12, 5, 30, 8, 4, 20, 6, 2, 16, 9, 3, 25, 7, 5, 10]
as_they_came = sum(idle_slot_steps(lengths[at : at + 4]) for at in range(0, 16, 4))
sorted_idle = None  # your number


def check(answer):
    batches = [sorted(lengths)[at : at + 4] for at in range(0, 16, 4)]
    right = sum(idle_in(static_batch(asking_for(batch), no_forward)) for batch in batches)
    return "not answered yet" if answer is None else "right" if answer == right else "no: sort, cut into fours, count"


print(f"as they came: {as_they_came} idle slot-steps. Sorted: {check(sorted_idle)}")

# %% [markdown]
# [How these pages are made](README.md) · before: [1 · The decode loop](01_decode_loop.ipynb) · next:
# [3 · Continuous batching](03_continuous_batching.ipynb)
