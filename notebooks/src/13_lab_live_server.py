# %% [markdown]
# # 13 · Lab: a live server
#
# Until now the engine and its load were in one program. Here they are apart: `minillm serve` is the engine of this
# course behind OpenAI's API, and any HTTP client can load it. You start it from this page, read its stream and its
# metrics, find its knee, fill its queue, hang up on it, and set what the clients saw beside what the engine wrote down.
#
# **You will learn**
# - what goes over the wire, and when a token reaches a client;
# - how the figures of chapter 7 look from outside, in an open and in a closed loop;
# - what a bounded queue answers, and what a client that hangs up leaves behind;
# - how far two clients and the server's own records agree.
#
# **To run this page**: `make lab` in the repository, or `pip install -e ".[lab]"` and open the notebook.

# %%
# Where the package is missing, as on Colab: open this page inside a copy of the repository, and this installs it.
# ("minillm" on PyPI is another project.)
import importlib.util
import subprocess
import sys

if importlib.util.find_spec("minillm") is None or importlib.util.find_spec("uvicorn") is None:
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "..[lab]"], check=True)

# %%
import json
import os
import time
from contextlib import ExitStack

import httpx

import minillm
from minillm.course.show.guesses import guess, guesses, reveal
from minillm.course.show.source import show_source
from minillm.course.show.tables import text_table
from minillm.load.source import DEFAULT
from minillm.measure import metrics
from minillm.measure.client import Server as Asked
from minillm.measure.client import bench_server
from minillm.measure.workload import make_workload
from minillm.serve.app import Server
from minillm.serve.engine_thread import EngineThread
from minillm.serve.run import in_background

QUICK = os.environ.get("MINILLM_QUICK") == "1"  # small sizes, for tests

# %% [markdown]
# ## Start it
#
# On a command line this is `minillm serve --max-num-seqs 4 --max-waiting 4`. Here it runs in a thread of this kernel,
# so that the page can look at the engine too. Four rows are few: the queue will fill while you watch.

# %%
model, tokenizer = minillm.load_model(dtype="fp32"), minillm.load_tokenizer()
engine = minillm.Engine(model, tokenizer, max_batch=4, max_context=1024)
thread = EngineThread(engine, max_waiting=4)
running = ExitStack()
url = running.enter_context(in_background(Server(thread, tokenizer, DEFAULT)))
http = httpx.Client(base_url=url, timeout=120, trust_env=False)
print(f"the server is at {url}/v1; open {url} in a browser beside this page, and watch")

# %% [markdown]
# One thread runs the engine. Handlers of HTTP hand requests in between two steps, and take each step's tokens out.

# %%
show_source(EngineThread)

# %% [markdown]
# ## What goes over the wire
#
# A client asks with a JSON body. With `"stream": true` the answer is a line of events, one for each step that gave this
# request something.

# %%
asked = {"model": DEFAULT, "max_tokens": 8, "temperature": 0, "stream": True,
         "messages": [{"role": "user", "content": "What is the capital of France?"}]}
began, arrived, said = time.perf_counter(), [], []
with http.stream("POST", "/v1/chat/completions", json=asked) as answer:
    for line in answer.iter_lines():
        if line.startswith("data: {"):
            arrived.append(time.perf_counter() - began)
            said.append(json.loads(line[6:])["choices"][0]["delta"]["content"])
print("milliseconds after the request:", ", ".join(f"{seconds * 1e3:.0f}" for seconds in arrived))

# %%
# NBVAL_CHECK_OUTPUT
print(said)

# %% [markdown]
# The first event comes after the prompt was read (TTFT), each later one after a decode step (ITL). The last may be
# empty: the end of the text is a token too, and has no letters.
#
# ## Read its metrics
#
# `/metrics` is what a monitoring system scrapes, every few seconds. The names are vLLM's, with another prefix
# ([chapter 12](12_appendix_names.ipynb)).

# %%
def scrape(*names):
    lines = http.get("/metrics").text.splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(values[f"minillm:{name}"]) for name in names}


seen = scrape("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prompt_tokens_total",
              "generation_tokens_total", "time_to_first_token_seconds_sum", "inter_token_latency_seconds_count")
for name, value in seen.items():
    print(f"minillm:{name} {value:g}")

# %% [markdown]
# ## A closed loop, from outside
#
# So many clients, each of whom asks again when answered: `minillm bench chat --url URL --clients N`. The server has
# four rows. Guess before you run it: how many times the tokens per second of one client do four clients get, and how
# many times do eight? And how does the time to the first token of eight stand to that of four?

# %%
guess("4 clients, times the tokens/s of 1", None)
guess("8 clients, times the tokens/s of 1", None)
guess("8 clients, times the TTFT of 4", None)

# %%
def closed_loop(clients):
    items = make_workload("chat", requests=(2 if QUICK else 6) * clients, scale=0.1, seed=clients)
    found = bench_server(Asked(f"{url}/v1", DEFAULT), items, clients)
    return {"clients": clients, "requests": found["requests"]["finished"], "failed": found["failed"],
            "tokens_per_s": found["output_tokens_per_s"], "ttft_ms": found["ttft_s"]["p50"] * 1e3,
            "itl_ms": found["itl_per_step_s"]["p50"] * 1e3}


COLUMNS = {"clients": "clients", "requests": "requests", "failed": "failed", "tokens_per_s": "tokens/s",
           "ttft_ms": "TTFT p50, ms", "itl_ms": "ITL p50, ms"}
rows = [closed_loop(clients) for clients in ((1, 4) if QUICK else (1, 2, 4, 8))]
print(text_table(rows, COLUMNS))

# %%
by_clients = {row["clients"]: row for row in rows}
reveal("4 clients, times the tokens/s of 1", by_clients[4]["tokens_per_s"] / by_clients[1]["tokens_per_s"])
if 8 in by_clients:
    reveal("8 clients, times the tokens/s of 1", by_clients[8]["tokens_per_s"] / by_clients[1]["tokens_per_s"])
    reveal("8 clients, times the TTFT of 4", by_clients[8]["ttft_ms"] / by_clients[4]["ttft_ms"])
knee = max(rows, key=lambda row: row["tokens_per_s"] / row["itl_ms"])
print(f"most tokens/s for each millisecond of waiting (chapter 2's knee): {knee['clients']} clients")

# %% [markdown]
# Past four clients there are no more rows. ITL changes little. Tokens per second still gain something: a queue keeps
# the rows full, where four clients leave one empty now and then (and each load draws requests of its own). What grows
# most is the wait for the first token. A monitoring page that shows ITL alone would not see it.
#
# ## An open loop, from outside
#
# People do not wait for each other. `minillm bench chat --url URL --rate R` sends requests at their times, answered or
# not. Take nine tenths of what the closed loop reached, and then one and a half times of it.

# %%
capacity = max(row["tokens_per_s"] for row in rows)


def open_loop(share):
    items = make_workload("chat", requests=8 if QUICK else 24, scale=0.1, seed=7)
    tokens_each = sum(item.output_tokens for item in items) / len(items)
    items = make_workload("chat", requests=len(items), scale=0.1, seed=7, rate=share * capacity / tokens_each)
    found = bench_server(Asked(f"{url}/v1", DEFAULT), items)
    return {"load": f"{share:g} x capacity", "answered": found["requests"]["finished"],
            "refused": found["faults"].get("server error 429", 0), "tokens_per_s": found["output_tokens_per_s"],
            "ttft_ms": found["ttft_s"]["p50"] * 1e3, "ttft_p99_ms": found["ttft_s"]["p99"] * 1e3}


OPEN = {"load": "load", "answered": "answered", "refused": "refused", "tokens_per_s": "tokens/s",
        "ttft_ms": "TTFT p50, ms", "ttft_p99_ms": "p99"}
print(text_table([open_loop(share) for share in (0.9, 1.5)], OPEN))

# %% [markdown]
# Above its capacity a queue without a bound only grows. This one is bounded, so some requests are refused immediately,
# and those that are taken still get their first token in time. That is admission control (chapter 9), live.
#
# ## Fill the queue
#
# Four rows, and four may wait. Twelve requests come in one moment, each long enough to hold its row. How many are
# answered, and what do the others get? Write it down.

# %%
guess("answered of twelve", None)

# %%
async def at_once(number):
    import asyncio

    async with httpx.AsyncClient(base_url=url, timeout=120, trust_env=False) as many:
        body = {"prompt": "Once upon a time", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
        return await asyncio.gather(*[many.post("/v1/completions", json=body) for _ in range(number)])


answers = await at_once(12)  # noqa: F704
refused = [answer for answer in answers if answer.status_code == 429]
reveal("answered of twelve", len(answers) - len(refused))

# %%
# NBVAL_CHECK_OUTPUT
print(f"{len(answers) - len(refused)} answered, {len(refused)} refused with status 429")
print(refused[0].json()["error"]["message"], "- come again after", refused[0].headers["Retry-After"], "s")

# %% [markdown]
# ## Hang up
#
# A reader closes the page while the answer is being made. What it held must not stay held.

# %%
before = engine.records.totals["finished_abort"]
with http.stream("POST", "/v1/completions", json={"prompt": "Once upon a time", "max_tokens": 900, "stream": True,
                                                  "ignore_eos": True}) as answer:
    lines = answer.iter_lines()
    some = [next(lines) for _ in range(5)]
    held = engine.stats().blocks_live
while engine.unfinished:  # the next step notices
    time.sleep(0.01)

# %%
# NBVAL_CHECK_OUTPUT
print("blocks were held while it ran:", held > 0)
print("requests aborted:", engine.records.totals["finished_abort"] - before, "- blocks held now:",
      engine.stats().blocks_live)

# %% [markdown]
# ## Two sides of one run
#
# The client's clock begins when it sends, the engine's when the request has been read from the socket. How much lies
# between, as a share of the time to the first token?

# %%
guess("client's TTFT over the engine's", None)

# %%
first = len(engine.records.requests)
items = make_workload("chat", requests=6 if QUICK else 16, scale=0.1, seed=3)
outside = bench_server(Asked(f"{url}/v1", DEFAULT), items, clients=4)
inside = metrics.latencies(engine.records.requests[first:])
sides = [{"side": side, **{name: of[key]["p50"] * 1e3 for name, key in
                           (("ttft", "ttft_s"), ("itl", "itl_per_step_s"), ("latency", "latency_s"))}}
         for side, of in (("client", outside), ("engine.records", inside))]
SIDES = {"side": "seen by", "ttft": "TTFT p50, ms", "itl": "ITL p50, ms", "latency": "latency p50, ms"}
print(text_table(sides, SIDES))
reveal("client's TTFT over the engine's", sides[0]["ttft"] / sides[1]["ttft"])

# %%
# NBVAL_CHECK_OUTPUT
print("both counted the same tokens:", outside["output_tokens"] == sum(
    record.output_tokens for record in engine.records.requests[first:]))
print("the client waited at least as long as the engine says:", sides[0]["latency"] >= sides[1]["latency"])

# %%
guesses()

# %% [markdown]
# ## Another project's client
#
# A figure that two programs by different people agree on is worth more than one. `make clients` lets GuideLLM load this
# server and compares what it saw with the engine's records; it also reads a server of known latency with our client.
# In a terminal, where GuideLLM is installed:
#
# ```
# minillm serve --max-num-seqs 4 &
# guidellm run --backend kind=openai_http,target=http://127.0.0.1:8000,model=smollm2-135m-instruct \
#   --profile kind=concurrent,streams=4 --constraint kind=max_requests,count=16 \
#   --data kind=synthetic_text,prompt_tokens=64,output_tokens=24 \
#   --tokenizer kind=huggingface_auto,model=DIR --output kind=json,path=report.json
# ```
#
# DIR is a folder with the model's tokenizer, which `minillm fetch` prints. GuideLLM's ITL is a request's mean, counted
# once for each gap; ours is the gap itself. Over a whole run their medians are close, and their 99th percentiles are
# not: a mean hides the one long gap.
#
# ## Exercise
#
# Start a server of your own with `--max-waiting 0`, and load it in an open loop at twice its capacity. Which of TTFT,
# ITL and refusals tell you so first? Then take the bound away and look again after a minute.

# %%
running.close()
print("the server has stopped:", not thread.thread.is_alive())

# %% [markdown]
# [How these pages are made](README.md) · before: [12 · Names](12_appendix_names.ipynb) · next:
# [14 · What the articles leave out](14_beyond_the_articles.ipynb)
