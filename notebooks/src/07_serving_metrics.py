# %% [markdown]
# # 7 · Serving metrics
#
# The chapters before made a server. Now people use it, and come when they like. This chapter measures what they
# feel, and what the operator sees; and shows which of the usual figures mislead.
#
# **You will learn**
# - the four times of a request, and where the queue hides in them;
# - what a percentile says, and from how many values on;
# - why a load test may report fine latencies while people wait;
# - a law that ties throughput, latency and batch together, exactly;
# - why a high "GPU utilisation" tells you nothing about useful work.
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
from statistics import mean

import minillm
from minillm import metrics
from minillm.course.experiments import limits, service
from minillm.course.figures import flat
from minillm.course.setting import Setting
from minillm.course.show import service_plots, step_by_step
from minillm.course.show.guesses import guess, guesses, reveal
from minillm.course.show.live import progress
from minillm.course.show.recorded import ledger, recorded
from minillm.course.show.source import show_source
from minillm.course.show.tables import text_table
from minillm.course.show.widgets import arrival_explorer
from minillm.ladder.quantized import kv_bytes_per_token
from minillm.measure.measurement import device_name
from minillm.measure.virtual import CostModel, virtual_engine
from minillm.measure.workload import WorkItem, chat, play

QUICK = os.environ.get("MINILLM_QUICK") == "1"  # small sizes, for tests
setting = Setting(quick=QUICK, progress=progress)
model = setting.model
llama = minillm.ModelConfig.preset("llama-3-8b")
print(device_name(model.device))

# %% [markdown]
# ## Four times
#
# - **Queue**: from arrival until the scheduler first plans the request.
# - **TTFT**, time to first token: from arrival. The queue is in it.
# - **ITL**, inter-token latency: from one step that gave the request tokens to the next.
# - **Latency**: from arrival to the last token.
#
# Two requests arrive at second 0 at a server with one row. Every step takes exactly one second. Each has a prompt of
# three tokens, which one step reads, and an answer of three.
#
# Predict for the *second* request: queue, TTFT, ITL, latency.

# %%
for figure in ("queue", "TTFT", "ITL", "latency"):
    guess(f"second request: {figure}, s", None)

# %%
# NBVAL_CHECK_OUTPUT
FOREVER = 1e30
second_a_step = CostModel(llama, "bf16", 0, FOREVER, FOREVER, FOREVER, overhead_s=1.0)
engine = virtual_engine(second_a_step, max_batch=1)
play(engine, [WorkItem(0.0, [1, 2, 3], 3), WorkItem(0.0, [4, 5, 6], 3)])
for record in engine.records.requests:
    queue, ttft = record.first_scheduled - record.arrival, record.first_token - record.arrival
    itl = metrics.step_gaps(record)[0].tolist()
    print(f"{record.request_id}: queue {queue:.0f} s, TTFT {ttft:.0f} s, ITL {itl} s, "
          f"latency {record.finish - record.arrival:.0f} s")
print(f"of the second one's time to the first token {queue / ttft:.0%} is queue")

# %%
seen = {"queue": queue, "TTFT": ttft, "ITL": itl[0], "latency": record.finish - record.arrival}
for figure, seconds in seen.items():
    reveal(f"second request: {figure}, s", seconds)

# %% [markdown]
# Most of the second one's time to the first token is queue. No faster prefill would help it much.
#
# Until it has finished, a request is in one of four states: queued, in prefill, decoding, or preempted (chapter 4: it
# gave its blocks back, waits, and then computes again what it had). Three requests in two rows, in a pool of six blocks
# of four tokens; the steps take a second again. Which of the times above show that a request was preempted?

# %%
# NBVAL_CHECK_OUTPUT
pool_bytes = 6 * 4 * kv_bytes_per_token(llama, "bf16")
engine = virtual_engine(second_a_step, max_batch=2, block_size=4, kv_memory=pool_bytes, prefix_cache=False)
for first, length in ((10, 8), (20, 8), (30, 3)):
    engine.add([*range(first, first + 7)], minillm.SamplingParams(max_tokens=length, ignore_eos=True))
while engine.has_work:
    engine.step()
waits = {record.request_id: metrics.step_gaps(record)[0].tolist() for record in engine.records.requests}
for record in engine.records.requests:
    print(f"{record.request_id}: queue {record.first_scheduled - record.arrival:.0f} s, "
          f"ITL {waits[record.request_id]} s, preempted {record.preemptions} times")

# %%
longest = max(map(max, waits.values()))
step_by_step.request_states(
    engine.records, f"The reader of a preempted request waits {longest:.0f} s for a token where a step takes 1 s")

# %% [markdown]
# Only the ITL shows it, and of that only the tail: neither the time to the first token nor the p50 of the gaps has
# changed.
#
# ## Build
#
# The engine writes down what happened and decides nothing with it. Every figure is computed afterwards, from these
# records, by these functions.

# %%
show_source(metrics.percentile, metrics.nearest_rank, metrics.step_gaps, metrics.latencies)

# %% [markdown]
# ## Percentiles
#
# p99 is the value that 99 of 100 do not exceed. Here it is always a value that really occurred: the one at rank
# n · 99 / 100, rounded up. What are p50 and p99 of the numbers 1 to 200? And of 1 to 10?

# %%
# NBVAL_CHECK_OUTPUT
for n in (200, 10):
    found = metrics.distribution(list(range(1, n + 1)))
    print(f"1 to {n}: p50 {found['p50']}, p99 {found['p99']}, max {found['max']}; {found['warning'] or 'no warning'}")

# %% [markdown]
# From fewer than 100 values, p99 is the highest value and nothing more. So n stands beside every percentile here.
#
# Percentiles cannot be averaged. Two servers, one fast and one slow, each with its own p99:

# %%
# NBVAL_CHECK_OUTPUT
fast, slow = [0.1] * 990 + [1.0] * 10, [0.1] * 80 + [5.0] * 20  # seconds; 1,000 requests and 100
of_both = metrics.percentile(fast + slow, 99)
averaged = mean([metrics.percentile(fast, 99), metrics.percentile(slow, 99)])
print(f"mean of the two p99: {averaged:.2f} s; p99 of all 1,100 requests: {of_both:.2f} s")

# %% [markdown]
# ## Measure: people arrive
#
# Chats with the lengths of a real service (shrunk to this machine). First a **closed loop**: four clients, each of
# whom asks again when answered. It finds out how much this machine can do with four rows. Then **open loops**, where
# requests arrive at random, whatever the server does: at 60 % and at 120 % of that rate.
#
# Predict: in which of the three is the p50 of the time to first token longest, and how many times the shortest is it?

# %%
guess("longest p50 of the TTFT over the shortest, times", None)

# %%
show_source(service.open_and_closed)

# %%
items = chat(16 if QUICK else 60, rate=1.0, scale=1 / 32 if QUICK else 1 / 16)


def serve(items, clients=None):
    """The items' records, from a new engine of four rows: a closed loop of so many clients, or an open loop."""
    engine = minillm.Engine(model, max_batch=4, max_context=1024, prefix_cache=False)
    play(engine, items, clients)
    return engine.records


serve(items[:4], clients=4)  # the first run is slower: it warms up
runs = service.open_and_closed(serve, items, clients=4, loads=(0.6, 1.2))
rows = [{"run": name, "n": len(records.requests), **flat(metrics.summary(records))}
        for name, records in runs.items()]
LATENCY = {"run": "loop", "n": "n", "tokens_per_s": "tokens/s", "queue_p50_s": "queue p50, s",
           "ttft_p50_s": "TTFT p50, s", "latency_p50_s": "latency p50, s"}
print(text_table(rows, LATENCY))
medians = [row["ttft_p50_s"] for row in rows]
reveal("longest p50 of the TTFT over the shortest, times", max(medians) / min(medians))

# %%
service_plots.request_lives(list(runs.values())[-1])

# %% [markdown]
# Where more arrive than the server can do, the queue grows as long as people keep coming, and late arrivals wait
# longest. There is no steady state, and a percentile of such a run says mostly how long the run was.

# %%
service_plots.latency_distributions({name: records.requests for name, records in runs.items()})

# %% [markdown]
# Right: most gaps have the length of a decode step; the tail is the steps in which another request's prompt was read.
#
# ## What the operator sees
#
# Rows, duration, queue and cache, step by step. Both runs serve the same requests, and both columns have the same time
# axis: where they come faster, the run is shorter.

# %%
service_plots.over_time({name: records for name, records in runs.items() if "open" in name})

# %% [markdown]
# They belong together. Few rows and an empty queue: there is no work. Few rows and a full queue: something stops
# requests from joining, memory or a limit. Many rows and a growing queue: the machine is simply full.
#
# Try other rates. This is **virtual time**: the real scheduler and records, with steps as long as an A100's data sheet
# says (chapter 0), so that seconds cost nothing and the figures are the same everywhere. With a running kernel the
# slider moves. From which rate on does the queue no longer come back to zero?

# %%
arrival_explorer(40 if QUICK else 120)

# %% [markdown]
# ## Little's law
#
# If λ requests arrive a second and each stays W seconds, then L = λ W are present on average. No assumption about
# arrivals or order is needed (Little, 1961). We compute the left side by integrating over time how many are present,
# and the right side from the requests' own records. The two computations share nothing.

# %%
show_source(service.number_present, service.littles_law)

# %%
# NBVAL_CHECK_OUTPUT
for where in ("system", "queue", "service"):
    laws = [service.littles_law(service.lives(records, where)) for records in runs.values()]
    same = [abs(law["mean_present"] - law["rate_per_s"] * law["mean_stay_s"]) < 1e-9 for law in laws]
    print(f"in the {where}: L = lambda W in every run: {all(same)}")

# %%
service_plots.presence(list(runs.values())[1])

# %% [markdown]
# Use it as a pencil. A server at 5 requests a second, each of which stays 8 s, has 40 of them at a time. If 32 are in
# its batch, the other 8 are in the queue.
#
# Predict: the closed loop had four clients. How many requests were present on average?

# %%
guess("requests present in the closed loop", None)

# %%
# NBVAL_CHECK_OUTPUT
closed = service.littles_law(service.lives(runs["closed, 4 clients"]))
print("never more than its four clients:", closed["mean_present"] <= 4)
print("and more than half of them on average:", closed["mean_present"] > 2)

# %%
reveal("requests present in the closed loop", closed["mean_present"])

# %% [markdown]
# ## Where it loses: the load test that does not see
#
# A client sends a prompt of 60,000 tokens, and this server reads it in one step (no chunks; chapter 3). All other
# requests stand still for seconds. We serve the same chats around it twice, in a closed loop of eight clients and in an
# open loop at the same rate, in virtual time.
#
# Predict the open loop's p90 of the time to first token, over the closed loop's: below one if you expect it shorter.

# %%
guess("p90 of the TTFT, open loop over closed, times", None)

# %%
show_source(service.one_long_prompt)

# %%
stalled = service.one_long_prompt(requests=60 if QUICK else 200)
BOOK = 60_000
others = {name: [record for record in records.requests if record.prompt_tokens < BOOK]
          for name, records in stalled.items()}
service_plots.latency_distributions(others, gaps=False)

# %%
# NBVAL_CHECK_OUTPUT
in_closed, in_open = (metrics.latencies(requests)["ttft_s"] for requests in others.values())
print("the same requests were served:", in_closed["n"] == in_open["n"])
print("the open loop's p90 is more than twice the closed one's:", in_open["p90"] > 2 * in_closed["p90"])

# %%
reveal("p90 of the TTFT, open loop over closed, times", in_open["p90"] / in_closed["p90"])

# %% [markdown]
# In the closed loop seven clients waited, and *stopped asking*. Whoever would have come in those seconds was never
# measured. Real people do not wait for the server before they arrive. This error has a name: coordinated omission.
#
# So a figure here always names its loop.
#
# ## The utilisation illusion
#
# The usual gauge of a GPU says in what share of the time *something* ran. On a CPU it is the share of processor time
# that was used. Neither asks what was achieved. We decode with one row and then with 64, and read the gauge both
# times. Guess both readings, and how many times more tokens the second makes.

# %%
guess("gauge at 1 row, %", None)
guess("gauge at 64 rows, %", None)
guess("times the tokens with 64 rows", None)

# %%
gauge = limits.utilisation(setting)
GAUGE = {"rows": "rows", "gauge": "gauge", "busy_percent": "it reads, %", "tokens_per_s": "tokens/s", "mfu": "MFU",
         "mbu": "MBU"}
print(text_table(gauge.rows, GAUGE))

# %%
one, many = gauge.rows
service_plots.side_by_side(
    [{**row, "label": "1 row" if row is one else f"{row['rows']} rows", "mfu_percent": 100 * row["mfu"]}
     for row in gauge.rows], "label",
    {"busy_percent": "gauge: busy, %", "mfu_percent": "of the matmul rate, %", "tokens_per_s": "tokens/s"},
    f"The gauge reads {one['busy_percent'] or 0:.0f} % and {many['busy_percent'] or 0:.0f} %; the second made "
    f"{many['tokens_per_s'] / one['tokens_per_s']:.1f} times the tokens",
)

# %%
for name, row in (("1 row", one), ("64 rows", many)):
    if row["busy_percent"] is not None:  # some devices have no gauge
        reveal(f"gauge at {name}, %", row["busy_percent"])
reveal("times the tokens with 64 rows", many["tokens_per_s"] / one["tokens_per_s"])

# %%
print(recorded("utilisation", GAUGE))

# %% [markdown]
# Watch the achieved batch instead: the mean of the rows in a step. A server that runs a few rows where it could run
# many is the whole problem, and no gauge of busyness shows it.

# %%
for name, records in runs.items():
    rows_a_step = metrics.batch(records)["mean_rows"]
    busy = records.totals["busy_seconds"] / (records.ended - records.began)
    print(f"{name}: {rows_a_step:.1f} rows a step; a step was running {busy:.0%} of the time")

# %% [markdown]
# In the records of this page's last run:

# %%
# NBVAL_CHECK_OUTPUT
watched = metrics.summary(list(runs.values())[-1])
seen = {"TTFT": watched["ttft_s"]["p99"], "ITL": watched["itl_per_step_s"]["p99"],
        "tokens/s": watched["output_tokens_per_s"], "achieved batch": watched["batch"]["mean_rows"],
        "cache held": watched["kv"]["peak_share"], "queue depth": watched["queue_depth"]["mean"],
        "queue time": watched["queue_s"]["p99"]}
print("everything to be watched is in the records:", all(value is not None for value in seen.values()))
print("watched:", ", ".join(seen))

# %% [markdown]
# ## Claims of the ledger that this page settles
#
# By the [ledger](CLAIMS.md)'s own rules: A5 on this device, just now, and on every device that has a recorded run; F4
# from one busy run in virtual time.

# %%
print(ledger({"A5": gauge, "F4": service.watch(setting).rows}))

# %%
guesses()  # yours, the nearest first

# %% [markdown]
# ## What a production engine calls this
#
# | here | vLLM | SGLang |
# |---|---|---|
# | queue | `vllm:request_queue_time_seconds` | `sglang:queue_time_seconds` |
# | TTFT | `vllm:time_to_first_token_seconds` | `sglang:time_to_first_token_seconds` |
# | ITL | `vllm:inter_token_latency_seconds` | `sglang:inter_token_latency_seconds` |
# | latency | `vllm:e2e_request_latency_seconds` | `sglang:e2e_request_latency_seconds` |
# | rows, waiting | `vllm:num_requests_running`, `_waiting` | `sglang:num_running_reqs`, `num_queue_reqs` |
# | cache held | `vllm:kv_cache_usage_perc` | `sglang:token_usage` |
# | open loop, closed loop | `vllm bench serve --request-rate`, `--max-concurrency` | `bench_serving`, the same two |
#
# Both export histograms, whose buckets bound how exactly a percentile can be read. TPOT, "time per output token", is
# the latency after the first token over the tokens after it: a request's mean ITL.
#
# ## Exercise
#
# An operator reads: 12 requests a second, mean latency 2.5 s, 20 rows in the step on average. How many requests wait
# in the queue on average, and how long does one wait? Fill in both. In
# [exercise 10](../exercises/10_latencies.ipynb) you write TTFT, ITL and percentiles yourself.

# %%
waiting, wait_s = None, None

for answer, right in ((waiting, 12 * 2.5 - 20), (wait_s, (12 * 2.5 - 20) / 12)):
    good = answer is not None and abs(answer - right) < 0.02
    print("not answered yet" if answer is None else "right" if good else "no: L = lambda W, of the queue too")

# %% [markdown]
# [How these pages are made](README.md) · before: [6 · Speculative decoding](06_speculative.ipynb) · next:
# [8 · Capacity](08_capacity.ipynb)
