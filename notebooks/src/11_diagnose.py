# %% [markdown]
# # 11 · Diagnose
#
# Six services, six complaints. For each you see the plots that an operator has. You say what is wrong, pick a cure,
# and run it. Then you see what every other cure would have done.
#
# **You will learn**
# - to read rows, steps, queue and cache together;
# - to match the cure to the symptom;
# - which popular cures do nothing for which complaint, and what they cost.
#
# Everything is virtual time: Llama-3.1-8B on A100s by their data sheet, the real scheduler and pool. A run takes a few
# seconds.
#
# **To run this page**: `make lab` in the repository, or `pip install -e ".[lab]"` and open the notebook. Chapters 7 to
# 9 have the background.

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

from minillm.course import diagnose
from minillm.course.diagnose import CASES, CURES
from minillm.course.experiments import service
from minillm.course.experiments.drafts import recorded_drafts
from minillm.course.experiments.service import COST
from minillm.course.setting import Setting
from minillm.course.show import explore_service, service_plots
from minillm.course.show.explore_service import FIGURES
from minillm.course.show.guesses import guess, guesses, reveal
from minillm.course.show.live import progress
from minillm.course.show.recorded import ledger
from minillm.course.show.source import show_source
from minillm.course.show.tables import text_table
from minillm.course.show.widgets import cure_chooser
from minillm.measure.service import Service

QUICK = os.environ.get("MINILLM_QUICK") == "1"  # small sizes, for tests
REQUESTS = 30 if QUICK else 120


def print_figures(rows):
    """A line for each figure, a column for each set-up."""
    lines = [{"figure": title, **{row["set-up"]: row[name] for row in rows}} for name, title in FIGURES.items()]
    print(text_table(lines, {"figure": "figure", **{row["set-up"]: row["set-up"] for row in rows}}))


def examine(case):
    """The complaint, the figures, and the operator's plots, with a list of cures to try."""
    print(CASES[case].complaint)
    print_figures(diagnose.diagnose(case, requests=REQUESTS)[0])
    return cure_chooser(case, REQUESTS)


def guess_cure(case, times_better):
    guess(f"{case}: times better with my cure", times_better)


def try_cure(case, cure):
    """The figures and the plots with a cure beside those without, and your guess beside what it does."""
    if cure:
        rows, _ = diagnose.diagnose(case, [cure], REQUESTS)
        print_figures(rows)
        reveal(f"{case}: times better with my cure", rows[-1]["times_better"])
        return explore_service.cure_at(case, cure, REQUESTS)


def every_cure(case):
    """What every cure does to the figure of the complaint, and to the bill."""
    rows, _ = diagnose.diagnose(case, CURES, REQUESTS)
    rows[0]["set-up"], figure = "as it was", CASES[case].figure
    rows[0]["effect"] = ""
    print(text_table(rows, {"set-up": "cure", figure: FIGURES[figure], "times_better": "times better",
                            "effect": "so it", COST: FIGURES[COST]}))
    return rows


# %% [markdown]
# ## The medicine chest
#
# A cure changes one thing of the service. The same requests are then served again. It *cures* if the figure of the
# complaint becomes a fifth better or more.

# %%
print(*CURES, sep="\n")

# %% [markdown]
# What speculation is worth depends on the drafts. Those of this page are as often there, as often right, and take as
# long as chapter 6 found in its recorded run: by looking back, on chats and on text that repeats its prompt, and by the
# trained drafter. The model there is a small one, and few rounds are counted at batch 1: take the shares as rough.
# Verifying takes what the A100's data sheet says.

# %%
KINDS = {"chat": "chats", "copy": "repeated text"}
worth = [
    {"drafts": f"{drafts} on {KINDS[prompts]}", "steps": found.found, "first": found.right[0],
     "accepted": found.acceptance, "cost": found.cost}
    for prompts, drafts in (("chat", "n-gram"), ("copy", "n-gram"), ("chat", "drafter"))
    for found in [recorded_drafts(prompts, drafts).at(1)]
]
print(text_table(worth, {"drafts": "drafts, one request", "steps": "steps that have some", "first": "first one right",
                         "accepted": "accepted of four", "cost": "proposing, in plain steps"}))
print(f"recorded on {recorded_drafts('chat', 'n-gram').source}")

# %%
show_source(Service.serve, diagnose.diagnose)

# %% [markdown]
# ## Case 1: slow to begin
#
# A help desk: a long text of instructions before every short question.
#
# Look first. Where is the time: in the queue, in the prompt, or between tokens?

# %%
examine("slow start")

# %% [markdown]
# With a running kernel the list above the picture tries a cure. First name yours here, in place of `None` and in
# quotation marks, and how many times better you expect the TTFT to be.

# %%
my_cure = None
guess_cure("slow start", None)  # how many times better?

try_cure("slow start", my_cure)

# %% [markdown]
# And everything that you might have tried:

# %%
slow_start = every_cure("slow start")

# %% [markdown]
# Nearly all of the work is the same prompt, computed again for each request. A second GPU helps as well, since the
# load is halved; look at what it costs.
#
# Look at the rows again: they stop rising far below `max_batch`, beside a queue, with most of the cache free. What
# holds them there? A step feeds at most `max_step_tokens`. A prompt is longer, so not even one request joins in each
# step; and it stays for its prompt and for the steps of its answer. Little's law (chapter 7), in steps:

# %%
case = CASES["slow start"]
asked = case.load(REQUESTS)
prompt = sum(len(item.prompt_ids) for item in asked) / len(asked)
prompt_steps, answer_steps = prompt / case.service.max_step_tokens, asked[0].output_tokens
joining, stay = 1 / prompt_steps, prompt_steps + answer_steps
print(f"a prompt takes {prompt_steps:.2f} steps of {case.service.max_step_tokens:,} tokens, an answer {answer_steps}: "
      f"{joining:.2f} requests join a step,\neach stays {stay:.0f} steps: {joining * stay:.0f} rows, and "
      f"{case.service.max_batch} would be allowed")

# %% [markdown]
# So a larger batch does nothing. The limit is the reading of prompts, and only fewer prompt tokens (or a second GPU to
# read them) raise it. Smaller chunks make it worse.
#
# ## Case 2: stutter

# %%
examine("stutter")

# %%
my_cure = None
guess_cure("stutter", None)  # how many times better?

try_cure("stutter", my_cure)

# %%
stutter = every_cure("stutter")

# %% [markdown]
# The median gap is fine, the p99 is many times as long: some steps read a whole prompt while all rows wait. Chunks
# bound the length of every step. No format of the cache does. Whatever shortens all steps (8-bit weights) or lets fewer
# rows share them (another GPU) makes the stalls rarer or shorter, at its own price. Speculation makes the figure worse:
# fewer steps give the same tokens, so more of the gaps are those of long steps.
#
# ## Case 3: alone and slow

# %%
examine("alone and slow")

# %%
my_cure = None
guess_cure("alone and slow", None)  # how many times better?

try_cure("alone and slow", my_cure)

# %%
alone = every_cure("alone and slow")

# %% [markdown]
# One row in the step, no queue, and hardly any of the cache. There is nothing to batch with. Fewer bytes
# per token cure it: 8-bit weights. More tokens per step cure it where the text repeats itself: speculation by looking
# back. On chats it does not cure: few drafts are right, so it helps little, and so does the trained drafter, which is
# right more often and must be paid for. Another GPU idles.
#
# ## Case 4: the crowd

# %%
examine("crowd")

# %%
my_cure = None
guess_cure("crowd", None)  # how many times better?

try_cure("crowd", my_cure)

# %%
crowd = every_cure("crowd")

# %% [markdown]
# The rows lie on the line of `max_batch`, and hold hardly any of the cache: the limit is a setting. All requests were
# there at the start, so the queue only falls, one for each answer; what is wrong is not that it grows, but that it
# falls at the speed of eight rows. This is the case of "three where forty would fit".
#
# Speculation cures here too where the text repeats itself: at eight rows the arithmetic units are mostly idle. At 256
# rows they would not be (chapter 6). On chats it helps little, and the trained drafter makes it worse. 8-bit weights
# shorten each step, and another GPU takes half of the requests away: both cure as well, and leave the limit where it
# is.
#
# ## Case 5: turned away

# %%
examine("turned away")

# %%
my_cure = None
guess_cure("turned away", None)  # how many times better?

try_cure("turned away", my_cure)

# %%
turned_away = every_cure("turned away")

# %% [markdown]
# Few rows, a queue, and a cache of which most is held, yet never all of it. How much is held while requests wait?

# %%
slots = CASES["turned away"].service
_, watched = diagnose.diagnose("turned away", requests=REQUESTS)
waiting = [step for step in watched["before"].steps if step.waiting]
held = sorted(service_plots.cache_share(step) for step in waiting)
rows = [step.rows for step in waiting]
print(f"while requests wait, {held[0]:.0%} to {held[-1]:.0%} of the cache is held, by {min(rows)} to {max(rows)} rows; "
      f"room for 4,096 tokens is {slots.capacity(4096).request_gb:.2f} GB, "
      f"{slots.capacity(4096).request_gb * 1e9 / slots.kv_memory:.0%} of it")

# %% [markdown]
# What is held are reservations for answers of 4,096 tokens that never come, and a slot is so large that the next one
# does not fit into what is left. Pages, a cap, or 8 bits free it. ("inf" times better: no request is refused any more.)
# Whatever ends requests sooner helps as well, since it gives the memory back.
#
# ## Case 6: the bill

# %%
examine("the bill")

# %%
my_cure = None
guess_cure("the bill", None)  # how many times better?

try_cure("the bill", my_cure)

# %%
bill = every_cure("the bill")

# %% [markdown]
# Four GPUs share out what one batch could hold; the picture shows at each moment the fullest of them, which runs a few
# rows and holds hardly any of its cache. Fill the batch before you add GPUs; here, take GPUs away. What does half of
# them do to the latency? Look it up with `try_cure("the bill", "half of the GPUs")`. Where the text repeats itself,
# speculation makes each token cheaper too, on as many GPUs as before.
#
# The same traffic on 1, 2, 4 and 8 GPUs, in full. Predict: how many times the tokens per second of one do eight make?

# %%
guess("eight GPUs over one, tokens/s, times", None)

# %%
setting = Setting(quick=QUICK, progress=progress)
fleets = service.replicas(setting).rows
FLEETS = {"replicas": "GPUs", "mean_rows": "rows each", "tokens_per_s": "tokens/s", "times_one": "times one",
          "latency_p50_s": "latency p50, s", COST: "$ a million"}
print(text_table(fleets, FLEETS))
one, eight = fleets[0], fleets[-1]
reveal("eight GPUs over one, tokens/s, times", eight["times_one"])

# %%
service_plots.side_by_side(
    [{**row, "label": f"{row['replicas']} GPUs" if row is not one else "1 GPU"} for row in fleets], "label",
    {"mean_rows": "rows in a step of each", "tokens_per_s": "tokens/s of all",
     COST: "$ a million tokens"},
    f"Eight GPUs make {eight['times_one']:.1f} times the tokens of one: each runs {eight['mean_rows']:.1f} rows, "
    f"not {one['mean_rows']:.1f}",
)

# %% [markdown]
# ## Right and tempting
#
# For each case: the cure that the symptom asks for makes its figure better by a fifth or more, and the one that people
# try first does not.

# %%
# NBVAL_CHECK_OUTPUT
tables = {"slow start": slow_start, "stutter": stutter, "alone and slow": alone, "crowd": crowd,
          "turned away": turned_away, "the bill": bill}
for name, rows in tables.items():
    better, case = {row["set-up"]: row["times_better"] for row in rows}, CASES[name]
    helps, hardly = better[case.cure] >= 1.2, better[case.tempting] < 1.2
    print(f"{name}: {case.cure} helps: {helps}; {case.tempting} hardly: {hardly}")

# %% [markdown]
# ## Where it loses: a cure makes another figure worse
#
# A cure is measured on its own symptom. Here is the cure of case 2 on all figures: what do chunks of 256 tokens do to
# the time to first token? Guess: its p50 with chunks, over that without.

# %%
guess("chunks: p50 of the TTFT, with over without, times", None)

# %%
chunked, _ = diagnose.diagnose("stutter", ["chunked prefill"], REQUESTS)
before, after = chunked
print_figures(chunked)
reveal("chunks: p50 of the TTFT, with over without, times", after["ttft_p50_s"] / before["ttft_p50_s"])

# %%
service_plots.side_by_side(
    chunked, "set-up", {"itl_p99_ms": "ITL p99, ms", "ttft_p50_s": "TTFT p50, s", "ttft_p99_s": "TTFT p99, s"},
    f"Chunks: the p99 gap is {after['times_better']:.1f} times shorter, TTFT p50 changes by "
    f"{after['ttft_p50_s'] / before['ttft_p50_s'] - 1:+.0%}",
)

# %% [markdown]
# ## Claims of the ledger that this page settles
#
# By the [ledger](CLAIMS.md)'s own rules; F6 has cases of its own, and F5 a sweep of eight set-ups. Each is run with
# three seeds.

# %%
print(ledger({"B9": fleets, "F5": service.achieved_batch(setting).rows, "F6": service.cures(setting).rows}))

# %%
guesses()  # yours, the nearest first

# %% [markdown]
# ## What a production engine calls this
#
# | symptom | look at | cure | vLLM | SGLang |
# |---|---|---|---|---|
# | slow to begin | prefix hits; prompt tokens per second | cache prompts | `--enable-prefix-caching` | on by default |
# | stutter | p99 of ITL | chunks | `--max-num-batched-tokens` | `--chunked-prefill-size` |
# | one user slow | rows: 1 | 8 bits, drafts | `--quantization`, `--speculative-config` | `--speculative-algorithm` |
# | crowd | rows at a limit, cache free | more rows | `--max-num-seqs` | `--max-running-requests` |
# | turned away | cache full | pages, 8 bits, a cap | `--kv-cache-dtype fp8` | `--kv-cache-dtype fp8_e4m3` |
# | the bill | rows far below what fits | fewer GPUs | replicas of the deployment | the same |
#
# ## Exercise
#
# [Exercise 11](../exercises/11_sick_servers.ipynb) hands you runs of services that are not on this page, and asks for
# the cause; in [exercise 10](../exercises/10_latencies.ipynb) you write the figures that give it away. Before you go
# there, make a case of your own: take one of the services, break something, and give the plots to a colleague.

# %%
crowd_case = CASES["crowd"]
broken = replace(crowd_case.service, max_step_tokens=16)
run = broken.serve(crowd_case.load(REQUESTS), crowd_case.clients)
service_plots.over_time({"broken": run.records}, title="What is wrong here?")

# %% [markdown]
# [How these pages are made](README.md) · before: [10 · The worked example](10_worked_example.ipynb) · next:
# [12 · Names](12_appendix_names.ipynb)
