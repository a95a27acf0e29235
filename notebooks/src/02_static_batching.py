# %% [markdown]
# # 2 · Static batches
#
# A decode step reads all the weights to make one token. If eight requests are at that point, one reading can serve
# all eight. This chapter puts requests into a batch (rung 2), measures what a step then costs, and shows what a
# batch wastes when it must wait for its longest row.
#
# **You will learn**
# - how several texts go through one forward pass without padding;
# - what a step with 1, 2, 4 … 32 rows costs, and what bounds it;
# - where your machine's knee is: the number of people from which more of them only wait longer;
# - how to count idle slot-steps before running anything;
# - what a slot reserves, and how little of that is used.
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
import os

import torch

import minillm
from minillm import Engine, SamplingParams, metrics
from minillm.course.experiments import batching, common, limits
from minillm.course.prompts import CHAT_PROMPTS
from minillm.course.setting import Setting
from minillm.course.show import plots
from minillm.course.show.live import progress
from minillm.course.show.recorded import ledger, recorded
from minillm.course.show.source import show_source
from minillm.course.show.tables import text_table
from minillm.ladder.attention import RowSpan, StepAttention
from minillm.ladder.continuous import StaticBatching
from minillm.ladder.decode import decode_cached
from minillm.ladder.executor import ModelExecutor
from minillm.ladder.quantized import kv_bytes_per_token, kv_storage
from minillm.ladder.static import SlotCache, decode_batch
from minillm.measure.measurement import device_name
from minillm.measure.roofline import StepShape, least_work
from minillm.measure.workload import articles_static

QUICK = os.environ.get("MINILLM_QUICK") == "1"  # small sizes, for tests
model = minillm.load_model(dtype="fp32")
tokenizer = minillm.load_tokenizer()
print(device_name(model.device))

# %% [markdown]
# ## A batch is a longer list
#
# The model takes a flat list of tokens, each with its position. Nothing in a linear layer or a norm asks which text
# a token belongs to. Only attention has to know, and the cache object runs attention: it is told where each row
# begins and where its keys and values are stored.
#
# So two prompts of different lengths go through one pass as one list. The engine does this, and pads nothing; how it
# finds each row's keys is chapter 4.

# %%
# NBVAL_CHECK_OUTPUT
a, b = tokenizer.chat("What is the capital of France?"), tokenizer.chat("Name a colour.")
storage = kv_storage(model.config, "fp32", 8 * 16 + 1, model.device)  # 8 blocks of 16 tokens, and one scratch slot
rows = [RowSpan(start=0, count=len(a), block_table=[0, 1, 2]), RowSpan(start=0, count=len(b), block_table=[3, 4, 5])]
step = StepAttention(storage, rows, 16, 8 * 16)
last = torch.tensor([row.count for row in rows]).cumsum(0) - 1  # the last token of each row
with torch.inference_mode():
    tokens = torch.tensor([*a, *b], device=model.device)  # [N]
    logits = model.forward(tokens, step.positions.to(model.device), step, last.to(model.device))  # [2, V]
together = logits.argmax(-1).tolist()
apart = [next(decode_cached(model, prompt, 1)) for prompt in (a, b)]
print(f"rows of {len(a)} and {len(b)} tokens: {len(tokens)} fed; with padding it would be {2 * max(len(a), len(b))}")
print(f"next tokens: {[tokenizer.decode([token]) for token in together]}; as when alone: {together == apart}")

# %% [markdown]
# ## Predict
#
# One step for eight requests, each with 64 tokens of text. Compared with a step for one request:
#
# - how many times the bytes must be read?
# - how many times the arithmetic must be done?
# - so, how many times as long does the step take? Write that number down.

# %%
my_guess = None  # times as long, for 8 rows

# %%
# NBVAL_CHECK_OUTPUT
works = {n: least_work(model.config, "fp32", StepShape.decode([64] * n), model.weight_bytes) for n in (1, 8, 32)}
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
# ## Build
#
# Rung 2 is rung 1's loop over a batch. Every prompt is padded to the longest, and each step feeds one token of every
# row. A row that has ended stays in every forward pass until the batch is over: it feeds its last stored token again,
# and what it samples is dropped. We count that as an **idle slot-step**.

# %%
show_source(decode_batch)

# %% [markdown]
# The cache has a slot for each row, as long as the longest text of the batch. A token is stored at its position and
# sees all positions up to its own, so what padding writes after a prompt is hidden, and overwritten as the row grows.

# %%
show_source(SlotCache)

# %% [markdown]
# The engine, which the rest of this page measures, has the same policy for its own memory: admit only into an empty
# batch, and let no row leave before the last has ended. Here is how its forward pass lays the rows end to end.

# %%
show_source(StaticBatching, ModelExecutor.logits)

# %% [markdown]
# ## The same tokens
#
# Who shares the batch must not change what a request is told. Four prompts, alone (rung 1) and together (rung 2):

# %%
# NBVAL_CHECK_OUTPUT
prompts = [tokenizer.chat(text) for text in CHAT_PROMPTS[:4]]
alone = [list(decode_cached(model, prompt, 8, model.config.eos_token_id)) for prompt in prompts]
engine = Engine(model, tokenizer, batching="static", kv="slots", max_batch=4)
together = engine.generate(prompts, SamplingParams(max_tokens=8))
for answer, tokens in zip(together, alone, strict=True):
    print(answer.token_ids == tokens, repr(answer.text))

# %% [markdown]
# ## Measure: a step against its rows
#
# `batch_curve` lets 1, 2, 4 … rows decode side by side and takes the median of the steps.

# %%
by_rows = batching.batch_curve(setting)
ROWS = {"rows": "rows", "step_ms": "step, ms", "min_ms": "least", "max_ms": "most", "tokens_per_s": "tokens/s",
        "times_step": "step, times one row", "times_tokens": "tokens/s, times one row"}
print(text_table(by_rows.rows, ROWS))

# %%
plots.tokens_per_s_curve(by_rows.rows)

# %% [markdown]
# The articles behind this course say: eight times the output for about 1.2 times the time of a step. Your device's
# answer is in the row for 8. "If rows were free" is one row's speed times the rows. The roofline bends where
# multiplying begins to take longer than reading; the measured line bends with it, or before it.
#
# On other devices:

# %%
print(recorded("batch_curve", ROWS))

# %% [markdown]
# ## Where is the knee?
#
# More rows give more tokens per second, and each of them comes later. Up to some number of people the first grows
# faster than the second, in per cent: there is something to gain. Past it the second does: people only wait longer.
# That number is the **knee**. We look for it as a service would: a closed loop of more and more clients, each of whom
# asks again when answered, and the number with the most tokens per second for each millisecond of waiting (the median,
# p50).
#
# Predict, from the table above: with how many clients does *this* machine have its knee?

# %%
my_guess = None

# %%
show_source(batching.knee_of, batching.power)

# %%
brief = Setting(quick=QUICK or not setting.gpu, progress=progress)  # the full size takes a CPU minutes
brief.model = setting.model
by_clients = batching.knee(brief)
CLIENTS = {"clients": "clients", "mean_rows": "rows, mean", "tokens_per_s": "tokens/s", "tokens_per_s_each": "each",
           "itl_p50_ms": "ms between tokens, p50", "power": "tokens/s per ms", "knee_share": "share of the resamples"}
print(text_table(by_clients.rows, CLIENTS))

# %%
plots.knee_curve(by_clients.rows)

# %% [markdown]
# Read it from the left. Up to the knee each client adds more throughput than delay; past it, more delay than
# throughput. The load was played several times. Resampling its requests and its turns 200 times shows how firmly the
# knee stands where it is drawn: the last column is the share of the resamples with their knee in that row, and the
# rings mark all rows in which it may lie. A CPU plays a small size here, where the knee may lie beyond the last row.
# In numbers:

# %%
alone, crowd = by_clients.rows[0], by_clients.rows[-1]
knee_row = next(row for row in by_clients.rows if row["knee"])
for before, after in ((alone, knee_row), (knee_row, crowd)):
    if before is not after:  # a knee may lie at an end
        print(f"from {before['clients']} to {after['clients']} clients: "
              f"{after['tokens_per_s'] / before['tokens_per_s']:.1f} times the tokens/s, "
              f"{after['itl_p50_ms'] / before['itl_p50_ms']:.1f} times the wait for the next token")
print(f"the knee may lie at {', '.join(str(row['clients']) for row in batching.knees_of(by_clients.rows))} clients")

# %% [markdown]
# A service that must be quick stops at the knee; one that must be cheap goes on past it, for as long as the line still
# moves to the right.
#
# On other devices:

# %%
print(recorded("knee", CLIENTS))

# %% [markdown]
# ## And prompts?
#
# A prompt of a hundred tokens already shares one reading of the weights among its hundred tokens. Predict: how many
# times the tokens per second do eight *prompts* in one step give, beside one? And eight rows that decode?

# %%
my_guess = {"eight prompts": None, "eight rows that decode": None}

# %%
prompts_too = limits.prefill(setting)
PHASES = {"phase": "phase", "rows": "rows", "tokens_each": "tokens each", "step_ms": "step, ms",
          "tokens_per_s": "tokens/s", "mbu": "MBU", "mfu": "MFU"}
print(text_table(prompts_too.rows, PHASES))

# %% [markdown]
# ## Idle slot-steps
#
# Now the cost. A batch holds one request whose answer has 800 tokens, and seven whose answers have 40. Each answer
# of n tokens takes part in n steps: the step that reads its prompt gives the first token. The batch lasts as long
# as its longest row.
#
# How many slot-steps are there, and how many of them are idle? And for a pair of 80 and 800? Write it down.

# %%
my_guess = {"one of 800, seven of 40": None, "80 beside 800": None}


# %%
# NBVAL_CHECK_OUTPUT
def idle_slot_steps(answers):
    return sum(max(answers) - answer for answer in answers)


for answers in ([800, *[40] * 7], [80, 800]):
    idle, all_steps = idle_slot_steps(answers), len(answers) * max(answers)
    print(f"{answers}: {idle:,} of {all_steps:,} slot-steps are idle, {idle / all_steps:.0%}")

# %% [markdown]
# Let the scheduler do it. To count steps no model is needed: `NoForward` hands token 0 to every row that is due,
# and the scheduler cannot tell. It is the real scheduler, so the count is exact, and it takes milliseconds.

# %%
show_source(common.NoForward, common.count)

# %%
# NBVAL_CHECK_OUTPUT
for answers in ([800, *[40] * 7], [80, 800]):
    records = common.count(model.config, articles_static(answers), batching="static", kv="slots", max_batch=8)
    steps, found = records.totals["steps"], records.totals["idle_rows"]
    as_predicted = found == idle_slot_steps(answers)
    print(f"{answers}: {steps} steps, {found:,} idle slot-steps, as predicted: {as_predicted}")

# %% [markdown]
# The same with the model itself, at a twentieth of the length: one answer of 40 tokens, seven of 2.

# %%
short = articles_static(scale=0.05)
engine_records = common.serve(model, short, batching="static", kv="slots", max_batch=8)

# %%
# NBVAL_CHECK_OUTPUT
answers = [item.output_tokens for item in short]
batch = metrics.summary(engine_records)["batch"]
found = batch["idle_row_steps"]
print(f"{answers}: {found} idle slot-steps, as predicted: {found == idle_slot_steps(answers)}")
print(f"{batch['idle_share']:.0%} of all slot-steps; rows that worked, on average: {batch['mean_rows']:.2f} of 8")

# %%
plots.slot_timeline({"one answer of 40 tokens, seven of 2": engine_records}, unit="step")

# %% [markdown]
# ## What a slot reserves
#
# A slot is one contiguous run of memory for one request. Nobody can move it later, so it is sized at the start for
# the longest that the request may become: its prompt and its `max_tokens`. The server does not know that seven of
# these answers will end after two tokens. Which share of what was reserved holds something at the last step? Guess.

# %%
my_guess = None

# %%
# NBVAL_CHECK_OUTPUT
step = engine_records.steps[-1]  # the last step, when most is stored
blocks = sum(-(-(len(item.prompt_ids) + item.max_tokens - 1) // 16) for item in short)  # whole blocks of 16 tokens
print(f"reserved {step.blocks_live * 16} tokens, as predicted: {step.blocks_live == blocks}")
print(f"used {step.kv_tokens}, which is {step.kv_tokens / (step.blocks_live * 16):.0%}")

# %%
token_mb = kv_bytes_per_token(model.config, "fp32") / 1e6
print(f"in bytes: {step.blocks_live * 16 * token_mb:.1f} MB reserved, {step.kv_tokens * token_mb:.1f} MB used")

# %% [markdown]
# ## Where it loses: real questions
#
# Chat prompts have answers of very different lengths. We serve two batches of them and look at three things: the
# idle share, the rows that worked on average, and the time to the first token of the second batch. It had to wait
# for the longest answer of the first. Guess the idle share before you run it.

# %%
my_guess = None

# %%
size, cap = (4, 16) if QUICK else (8, 64)
prompts = [tokenizer.chat(CHAT_PROMPTS[i]) for i in range(2 * size)]
engine = Engine(model, tokenizer, batching="static", kv="slots", max_batch=size, max_context=256)
answers = engine.generate(prompts, SamplingParams(max_tokens=cap))
summary = metrics.summary(engine.records)
print("answers, tokens:", [len(answer.token_ids) for answer in answers])
batch = summary["batch"]
print(f"idle: {batch['idle_share']:.0%} of the slot-steps; rows that worked: {batch['mean_rows']:.1f} of {size}")
for name, some in (("first", answers[:size]), ("second", answers[size:])):
    times = metrics.distribution([answer.timing.ttft for answer in some])
    print(f"time to first token, {name} batch: {times['p50']:.2f} s (median of {times['n']})")

# %% [markdown]
# It also loses where there is nothing to share: a batch of one is rung 1 with more book-keeping.
#
# ## Claims of the ledger that this page settles
#
# By the ledger's own rules: on this device, just now, and on every device that has a recorded run.

# %%
print(ledger({"A3": prompts_too, "A6": prompts_too, "B1": by_rows, "B2": by_rows, "B3": by_clients,
              "B4": batching.idle_slots(setting).rows, "B8": by_rows}))

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
# ## Exercise
#
# You may sort the waiting requests by the length of their answers (suppose you knew it) and then cut them into
# batches of four. How many idle slot-steps does sorting save? Fill in `sorted_idle`; the check counts with the
# scheduler.
#
# To go further, in a checked notebook: [exercise 3](../exercises/03_static_batch.ipynb), where you write the policy and
# count its idle slots.

# %%
lengths = [3, 12, 5, 30, 8, 4, 20, 6, 2, 16, 9, 3, 25, 7, 5, 10]
as_they_came = sum(idle_slot_steps(lengths[at : at + 4]) for at in range(0, 16, 4))
sorted_idle = None  # your number


def check(answer):
    items = [item for at in range(0, 16, 4) for item in articles_static(sorted(lengths)[at : at + 4])]
    right = common.count(model.config, items, batching="static", kv="slots", max_batch=4).totals["idle_rows"]
    return "not answered yet" if answer is None else "right" if answer == right else "no: sort, cut into fours, count"


print(f"as they came: {as_they_came} idle slot-steps. Sorted: {check(sorted_idle)}")

# %% [markdown]
# [How these pages are made](README.md) · before: [1 · The decode loop](01_decode_loop.ipynb) · next:
# [3 · Continuous batching](03_continuous_batching.ipynb)
