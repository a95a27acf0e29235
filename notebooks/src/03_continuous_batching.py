# %% [markdown]
# # 3 · Continuous batching
#
# A static batch decides once who is in it. This chapter decides again at every step (rung 3): who has ended leaves
# at once, and who waits joins at once. Nothing else changes, neither the model nor the memory.
#
# **You will learn**
# - the scheduler, which fits on a screen;
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
import heapq
import os

import minillm
from minillm import Engine, SamplingParams, metrics
from minillm.course.experiments import batching, common
from minillm.course.prompts import CHAT_PROMPTS
from minillm.course.setting import Setting
from minillm.course.show import plots
from minillm.course.show.live import progress
from minillm.course.show.recorded import ledger, recorded
from minillm.course.show.source import show_source
from minillm.course.show.tables import text_table
from minillm.course.show.widgets import schedule_stepper
from minillm.extras.whole_prompts import WholePromptScheduler
from minillm.ladder.continuous import ContinuousBatching, Scheduler, StaticBatching
from minillm.measure.measurement import device_name
from minillm.measure.workload import articles_static, lognormal

QUICK = os.environ.get("MINILLM_QUICK") == "1"  # small sizes, for tests
model = minillm.load_model(dtype="fp32")
tokenizer = minillm.load_tokenizer()
print(device_name(model.device))

# %% [markdown]
# ## Build: two policies
#
# A batching policy answers three questions: may a request join now, which requests leave now, and how much memory
# must be free to admit a request. Here are both, static first.

# %%
show_source(StaticBatching, ContinuousBatching)

# %% [markdown]
# The scheduler asks them at every step. A step has a budget of tokens. Rows that decode take theirs first, then
# prompts under way, then the queue.

# %%
show_source(Scheduler.plan, Scheduler.feed)

# %% [markdown]
# After the forward pass, `commit` appends the new tokens. A request that has ended leaves here, so its row and its
# memory are free for the next plan.

# %%
show_source(Scheduler.commit)

# %% [markdown]
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
my_guess = {"static": None, "continuous, at least": None}

# %%
# NBVAL_CHECK_OUTPUT
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
# Now the scheduler itself, without a model, as in chapter 2. The counts must be the predicted ones.

# %%
# NBVAL_CHECK_OUTPUT
requests = articles_static(lengths)
for policy, predicted in (("static", static_steps(lengths, 4)), ("continuous", continuous_steps(lengths, 4))):
    counted = common.count(model.config, requests, batching=policy, kv="slots", max_batch=4)
    steps, idle = counted.totals["steps"], counted.totals["idle_rows"]
    print(f"{policy}: {steps} steps, as predicted: {steps == predicted}; idle slot-steps: {idle}")

# %% [markdown]
# ## The same tokens
#
# When a request joins, and who is beside it, must not change its answer.

# %%
# NBVAL_CHECK_OUTPUT
prompts = [tokenizer.chat(text) for text in CHAT_PROMPTS[:5]]
outputs = {}
for policy in ("static", "continuous"):
    engine = Engine(model, tokenizer, batching=policy, kv="slots", max_batch=2)
    outputs[policy] = engine.generate(prompts, SamplingParams(max_tokens=8))
print("same tokens:", [a.token_ids for a in outputs["static"]] == [b.token_ids for b in outputs["continuous"]])
print([answer.text for answer in outputs["continuous"]])

# %% [markdown]
# ## Measure: the same requests, side by side
#
# Twelve requests whose lengths vary as much as their mean, four slots, the real model and the real clock. Each bar
# is a request; its dark head is the prefill, a hatched bar is a row that feeds its last token again for nothing.
#
# Predict: how many times as fast is the continuous run?

# %%
my_guess = None

# %%
mean = 6 if QUICK else 16
items = lognormal(1.0, requests=12, mean_tokens=mean, prompt_tokens=16)
common.warm_up(model)
runs = {
    policy: common.serve(model, items, batching=policy, kv="slots", max_batch=4)
    for policy in ("static", "continuous")
}
plots.slot_timeline(runs, unit="s")

# %% [markdown]
# The white space at the right end of the continuous run is not idle work: nobody is waiting any more, so the last
# steps have fewer rows and cost less.
#
# Move the slider (with the arrow keys, too) to walk through the continuous run: at which step does the fifth
# request join, and whose row does it take? Without a running kernel you see one step as a picture.

# %%
schedule_stepper(runs["continuous"], start=8)

# %%
for name, records in runs.items():
    s = metrics.summary(records)
    speed, rows, ttft = s["output_tokens"] / s["busy_s"], s["batch"]["mean_rows"], s["ttft_s"]
    print(f"{name}: {speed:.0f} tokens/s; {s['steps']} steps with {rows:.2f} rows that worked; "
          f"time to first token p50 {ttft['p50']:.2f} s, longest {ttft['max']:.2f} s")

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
my_guess = {"0": None, "1": None}

# %%
# NBVAL_CHECK_OUTPUT
def steps_of(requests, policy, slots=8):
    return common.count(model.config, requests, batching=policy, kv="slots", max_batch=slots).totals["steps"]


for cv in (0.0, 0.5, 1.0, 2.0):
    requests = lognormal(cv, requests=64, mean_tokens=64, prompt_tokens=8)
    static, continuous = (steps_of(requests, policy) for policy in ("static", "continuous"))
    print(f"variation {cv}: static {static:>4} steps, continuous {continuous:>4}: {static / continuous:.2f} times")

# %% [markdown]
# And now by the clock, at sizes that suit this machine.

# %%
setting = Setting(quick=QUICK, progress=progress)
setting.model = model
gains = batching.gain_by_spread(setting, repeats=1)
GAINS = {"cv": "variation asked", "drawn_cv": "drawn", "static_steps": "static steps", "continuous_steps": "continuous",
         "times_steps": "times the steps", "idle_share": "static: idle share", "static_tokens_per_s": "static tok/s",
         "continuous_tokens_per_s": "continuous tok/s", "times_tokens_per_s": "times the tok/s"}
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
# the next chapter's); then the same answers behind prompts of one token. Predict, for both: how many times static?

# %%
my_guess = {"whole run": None, "answers only": None}

# %%
brief = Setting(quick=QUICK or not setting.gpu, progress=progress)  # the full size takes a CPU minutes
brief.model = model
chats = batching.continuous_vs_static(brief)
CHATS = {"part": "part", "setup": "policy", "steps": "steps", "mean_rows": "rows, mean", "idle_share": "idle share",
         "tokens_per_s": "tokens/s", "times_static": "times static"}
print(text_table(chats.rows, CHATS))

# %%
print(recorded("continuous_vs_static", CHATS))

# %% [markdown]
# ## A long prompt among streams
#
# Four people read their answers as they come. A prompt of many tokens arrives. If it is computed in one step, that
# step is long, and all four stand still.
#
# With **chunked prefill** a step has a budget of tokens: the four streams take one each, and the prompt gets the
# rest. The prompt then needs several steps, and each is short.
#
# Predict: with a budget of 64 and four streams, how many steps does a prompt of 512 tokens take?

# %%
my_guess = None

# %%
show_source(Scheduler.chunk, WholePromptScheduler)

# %%
stalls = batching.stall_by_chunking(setting)
STALLS = {"prompt": "prompt", "step_budget": "tokens a step", "p50_gap_ms": "gap p50, ms",
          "longest_gap_ms": "longest gap, ms", "prompt_steps": "steps with the prompt",
          "late_ttft_ms": "its time to first token, ms"}
print(text_table(stalls.rows, STALLS))

# %%
# NBVAL_CHECK_OUTPUT
print("512 tokens, budget 64, four streams:", -(-512 // (64 - 4)), "steps")
whole, chunked = stalls.rows
long_prompt, budget = whole["step_budget"] - 4, chunked["step_budget"]
print("measured as predicted:", whole["prompt_steps"] == 1, chunked["prompt_steps"] == -(-long_prompt // (budget - 4)))

# %%
plots.curves(
    {"whole prompt in one step": (whole["gap_at_s"], whole["gaps_ms"]),
     "in chunks": (chunked["gap_at_s"], chunked["gaps_ms"])},
    f"A prompt of {long_prompt:,} tokens makes a stream stand still for {whole['longest_gap_ms']:,.0f} ms; "
    f"in chunks for {chunked['longest_gap_ms']:,.0f} ms at most",
    "seconds since the streams began", "ms between two tokens of one stream", log_y=True,
)

# %% [markdown]
# A chunk's budget is a trade. A small one keeps the streams smooth. But every chunk reads the weights again, and
# its last tokens look back over all chunks before, so the late-comer's own first token comes no sooner, often
# later. The last column of the table says by how much here.

# %%
print(recorded("stall_by_chunking", STALLS))

# %% [markdown]
# ## Where it loses
#
# When all answers have one length, there is nothing to win: the batch empties as a whole in both policies.

# %%
# NBVAL_CHECK_OUTPUT
equal = lognormal(0.0, requests=32, mean_tokens=64, prompt_tokens=8)
static, continuous = steps_of(equal, "static"), steps_of(equal, "continuous")
print(f"steps: {static} and {continuous}; equal: {static == continuous}")

# %%
print(f"by the clock, equal lengths: {gains.rows[0]['times_tokens_per_s']:.2f} times the throughput of static batches")

# %% [markdown]
# Nor does it help a request that is alone, and it does nothing about memory: a slot still reserves for the longest.
# Chapter 4 does.
#
# ## Claims of the ledger that this page settles
#
# By the ledger's own rules: on this device, just now, and on every device that has a recorded run.

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
# ## Exercise
#
# A service answers its requests with 16 and with 240 tokens in turn, from eight slots. Before you count: is the gain
# nearer to 1, 2 or 3? Change `lengths` below to shapes of your own, and find one with a gain above 4.
#
# To go further, in a checked notebook: [exercise 4](../exercises/04_continuous_scheduler.ipynb), where you write the
# scheduler.

# %%
lengths = [16, 240] * 32


def gain(lengths, slots=8):
    requests = articles_static(lengths)
    return steps_of(requests, "static", slots) / steps_of(requests, "continuous", slots)


print(f"gain in steps: {gain(lengths):.2f}")

# %% [markdown]
# [How these pages are made](README.md) · before: [2 · Static batches](02_static_batching.ipynb) · next:
# [4 · Paged KV](04_paged_kv.ipynb)
