# %% [markdown]
# # 15 · Lab: your own server
#
# You run a server, or rent one, and were not told how it was started. This page asks it. Six questions, each
# answered from outside, by HTTP: how many rows it runs, how many tokens its cache holds, whether it shares prefixes,
# whether it cuts long prompts, where its knee is, and what it does when its queue is full.
#
# **You will learn**
# - to read the metrics page of vLLM, SGLang, llama.cpp or this package under one set of names;
# - to tell a server's settings from the moments at which tokens arrive;
# - which of them cannot be seen without its metrics page.
#
# **To run this page**: `make lab` in the repository, or `pip install -e ".[lab]"` and open the notebook. Without
# anything else it starts this package's server, with settings that you then discover. For a server of yours, set
# MINILLM_SERVER_URL (such as `http://127.0.0.1:8000`, without `/v1`) and MINILLM_SERVER_MODEL, the name that it serves,
# before you start Jupyter:
#
# ```
# vllm serve MODEL --port 8000
# python -m sglang.launch_server --model-path MODEL --port 8000 --enable-metrics
# llama-server -m FILE --port 8000 --parallel 8 --metrics
# ```
#
# Ask a server that others use only with their consent: two of the questions fill it up.

# %%
# Where the package is missing, as on Colab: open this page inside a copy of the repository, and this installs it.
# ("minillm" on PyPI is another project.)
import importlib.util
import subprocess
import sys

if importlib.util.find_spec("minillm") is None or importlib.util.find_spec("uvicorn") is None:
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "..[lab]"], check=True)

# %%
import asyncio
import os
import time
from contextlib import ExitStack

import httpx
import numpy as np
from IPython.display import Markdown

import minillm
from minillm.course.experiments.outside import METRICS, Stream, engine_of, most_at_once, read_metrics, tokens_a_step
from minillm.course.show import beyond_plots
from minillm.course.show.guesses import guess, guesses, reveal
from minillm.course.show.source import show_source
from minillm.course.show.tables import text_table
from minillm.ladder.quantized import kv_bytes_per_token
from minillm.load.source import DEFAULT
from minillm.measure.client import Server as Asked
from minillm.measure.client import bench_server
from minillm.measure.workload import make_workload
from minillm.serve.app import Server
from minillm.serve.engine_thread import EngineThread
from minillm.serve.run import in_background

QUICK = os.environ.get("MINILLM_QUICK") == "1"  # small sizes, for tests

# %% [markdown]
# ## The server
#
# If you use the package's own, skip the next cell's numbers until the end of the page.

# %%
url, name = os.environ.get("MINILLM_SERVER_URL"), os.environ.get("MINILLM_SERVER_MODEL", DEFAULT)
running, SETTINGS = ExitStack(), None
if not url:
    SETTINGS = {"rows": 6, "queue": 5, "blocks": 240, "block": 16, "chunk": 64, "prefixes": True}
    model, tokenizer = minillm.load_model(dtype="fp32"), minillm.load_tokenizer()
    token_bytes = kv_bytes_per_token(model.config, "fp32")
    engine = minillm.Engine(
        model, tokenizer, max_batch=SETTINGS["rows"], max_context=1024, max_step_tokens=SETTINGS["chunk"],
        block_size=SETTINGS["block"], kv_memory=SETTINGS["blocks"] * SETTINGS["block"] * token_bytes,
        prefix_cache=SETTINGS["prefixes"])
    url = running.enter_context(in_background(Server(EngineThread(engine, SETTINGS["queue"]), tokenizer, name)))
http = httpx.AsyncClient(base_url=url, timeout=300, trust_env=False)


def compare(what, found, key, within=1.0):
    """Say whether a discovery is what the server was started with; of another server nothing is known."""
    if SETTINGS is None:
        print(f"{what}: {found or 'not found'} (your server's own setting is in its start command)")
    else:
        near = 1 / within <= found / SETTINGS[key] <= within
        print(f"{what}, as it was set{f' within {within:g} times' if within > 1 else ''}: {near}")


# %% [markdown]
# ## One page, four dialects
#
# `/metrics` is text in Prometheus' format: a name, labels in braces, a value. The four servers count the same things
# under different names. The map holds what this page needs; [chapter 12](12_appendix_names.ipynb) has the rest.

# %%
show_source(read_metrics)

# %%
ENGINES = {"minillm": "minillm", "vllm": "vLLM", "sglang": "SGLang", "llamacpp": "llama.cpp"}
titles = [f"{label}, `{prefix}:`" for prefix, label in ENGINES.items()]
lines = ["| idea | " + " | ".join(titles) + " |", "|---" * 5 + "|"]
for idea, names in METRICS.items():
    each = [", ".join(f"`{n.split(':')[1]}`" for n in names if n.split(":")[0] == prefix) for prefix in ENGINES]
    lines.append(f"| {idea} | " + " | ".join(each) + " |")
Markdown("\n".join(lines))

# %%
# NBVAL_CHECK_OUTPUT
vllm_page = """# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 24.0
vllm:num_requests_running{engine="1",model_name="m"} 8.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.62
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.21
"""
sglang_page = """# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{model_name="m",tp_rank="0"} 32.0
# TYPE sglang:token_usage gauge
sglang:token_usage{model_name="m",tp_rank="0"} 0.62
"""
print("the same state of two servers reads the same:", read_metrics(vllm_page) == read_metrics(sglang_page))
print(read_metrics(sglang_page))

# %%
async def metrics_page():
    """The text of /metrics; "" where the server has none."""
    answer = await http.get("/metrics")
    return answer.text if answer.status_code == 200 else ""


page = await metrics_page()  # noqa: F704
print("this server speaks", engine_of(page))
print(text_table([{"idea": idea, "now": value} for idea, value in read_metrics(page).items()],
                 {"idea": "idea", "now": "now"}))

# %% [markdown]
# ## The probe
#
# All that follows uses one function: send a prompt, and note the moment at which each token comes. Prompts are random
# ids, so that no two share a beginning unless you want it. (llama.cpp and others that take text only: send text.)

# %%
async def ask(prompt, tokens, on_event=None):
    """A request's stream, as the client sees it; `on_event(number)` is awaited after each of its events."""
    stream = Stream(time.perf_counter())
    body = {"model": name, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        stream.status, stream.retry_after = answer.status_code, answer.headers.get("Retry-After")
        async for line in answer.aiter_lines():
            if answer.status_code == 200 and line.startswith("data: {"):
                stream.events.append(time.perf_counter())
                if on_event:
                    await on_event(len(stream.events))
    return stream


async def now():
    """The server's metrics, at this moment."""
    return read_metrics(await metrics_page())


draw = np.random.default_rng(int(time.time()))  # other prompts in each run: an earlier one may still be cached


def prompt_of(tokens):
    return draw.integers(1000, 9000, tokens).tolist()


# %% [markdown]
# ## 1 · How many rows can it run?
#
# Send more requests at the same moment than it can run. Those with a row stream side by side; the others' first token
# comes when a row is free. So the most streams that are open between their first and last token are the rows. If it
# runs all of them, ask for more.

# %%
REQUESTS = 16  # for a large server: several hundred
seen = []


async def in_the_middle(number):
    if number == 10:
        seen.append(await now())


streams = await asyncio.gather(  # noqa: F704
    *[ask(prompt_of(8), 16, in_the_middle if i == 0 else None) for i in range(REQUESTS)])
answered = [stream for stream in streams if stream.status == 200]
rows = most_at_once(answered)
state = seen[0] if seen else {}
print(f"{len(answered)} of {REQUESTS} answered, {rows} at a time; the metrics page said {state.get('rows now')} rows, "
      f"{state.get('queue now')} in the queue")

# %%
# NBVAL_CHECK_OUTPUT
compare("rows", rows, "rows")
print("the metrics page agrees:", state.get("rows now") == rows)

# %% [markdown]
# A row limit and a memory limit look the same here. Short prompts, as these, find the first; long ones the second.
#
# ## 2 · How many tokens does its cache hold?
#
# This one needs the metrics page: no token's moment tells how much memory is left. Let one request grow, and read the
# share of the cache after each token. It goes up in steps. A step's height is one block as a share of all, and the
# tokens between two steps are a block. (SGLang hands out single tokens and rounds the share: hold a long prompt, and
# divide its tokens by the share. vLLM also says it outright, in the labels of `vllm:cache_config_info`.)

# %%
shares = []


async def note_share(number):
    shares.append((await now()).get("share of the cache held", 0))


await ask(prompt_of(8), 62, note_share)  # noqa: F704
rises = [at for at in range(1, len(shares)) if shares[at] > shares[at - 1]]  # token at which the share went up
blocks = block = 0
if len(rises) > 2:
    blocks = round(1 / (shares[rises[1]] - shares[rises[1] - 1]))
    block = round((rises[-1] - rises[0]) / (len(rises) - 1))
    print(f"{blocks:,} blocks of {block} tokens: {blocks * block:,} tokens of cache")
else:
    print("the share does not rise in steps here, or there is no metrics page")

# %%
# NBVAL_CHECK_OUTPUT
compare("blocks", blocks, "blocks")
compare("tokens of a block", block, "block")

# %% [markdown]
# Divide by your users' context, and you have chapter 8's number of requests that fit.
#
# ## 3 · Does it share prefixes?
#
# Send a long prompt, send it again, and send it a third time with another first token. If beginnings are kept, the
# second's first token comes early, and the third's does not. Guess: the second's time to first token, as a share of
# the first's?

# %%
guess("TTFT of a prompt that was seen, as a share", None)

# %%
long_prompt = prompt_of(320)
before = await now()  # noqa: F704
fresh, again, changed = [await ask(prompt, 1) for prompt in (  # noqa: F704
    long_prompt, long_prompt, [long_prompt[0] + 1, *long_prompt[1:]])]
after = await now()  # noqa: F704
FOUND = "prompt tokens found in the prefix cache"
reveal("TTFT of a prompt that was seen, as a share", again.ttft / fresh.ttft)
print(f"TTFT {fresh.ttft * 1e3:.0f} ms, again {again.ttft * 1e3:.0f} ms, first token changed "
      f"{changed.ttft * 1e3:.0f} ms; the page counts {after.get(FOUND, 0) - before.get(FOUND, 0):g} tokens found")

# %%
# NBVAL_CHECK_OUTPUT
shares_prefixes = again.ttft < fresh.ttft / 2 and changed.ttft > fresh.ttft / 2
compare("it shares prefixes", shares_prefixes, "prefixes")
if FOUND in after:
    print("the metrics page agrees:", (after[FOUND] > before[FOUND]) == shares_prefixes)
else:
    print("the metrics page does not count them")

# %% [markdown]
# ## 4 · Does it cut long prompts?
#
# While one request streams, send a long prompt. Computed whole, it makes the stream stand still once, for as long as
# the prompt takes. Cut, it lets a token through at each step: count them, and the prompt's length over their number is
# the chunk.

# %%
guess("longest gap over the usual one, beside a long prompt", None)

# %%
late = {}


async def send_long(number):
    if number == 6:
        late["task"] = asyncio.create_task(ask(prompt_of(512), 1))


beside = await ask(prompt_of(8), 30, send_long)  # noqa: F704
long = await late["task"]  # noqa: F704
gaps = np.diff(beside.events)
chunk = tokens_a_step(512, beside, long.sent, long.events[0])
reveal("longest gap over the usual one, beside a long prompt", gaps.max() / np.median(gaps[-10:]))
print(f"about {chunk:.0f} tokens of the prompt between two tokens of the stream; "
      f"longest gap {gaps.max() * 1e3:.0f} ms, usual {np.median(gaps[-10:]) * 1e3:.0f} ms")

# %%
# NBVAL_CHECK_OUTPUT
print("it cuts prompts:", chunk < 256)
compare("chunk", chunk, "chunk", within=1.3)

# %% [markdown]
# A step's budget also holds a token for each row that decodes, so under load chunks are smaller than here. If all 512
# tokens came at once, the chunk is at least that: send a longer prompt. (llama.cpp takes 512 by default.)
#
# ## 5 · Where is its knee?
#
# A closed loop of more and more clients, as `minillm bench chat --url URL/v1 --model NAME --clients N` plays it. Below
# the rows of question 1, more clients share a step. Above, they share the queue. Guess: the tokens per second of as
# many clients as there are rows, over one client's?

# %%
guess("tokens/s, clients as rows over one client", None)

# %%
def closed_loop(clients):
    requests, scale = (2 + 2 * clients, 0.05) if QUICK else (4 * clients, 0.1)
    items = make_workload("chat", requests=requests, scale=scale, seed=clients)
    found = bench_server(Asked(f"{url}/v1", name), items, clients)
    return {"clients": clients, "failed": found["failed"], "tokens_per_s": found["output_tokens_per_s"],
            "ttft_ms": found["ttft_s"]["p50"] * 1e3, "itl_ms": found["itl_per_step_s"]["p50"] * 1e3,
            "latency_ms": found["latency_s"]["p50"] * 1e3}


loads = [closed_loop(clients) for clients in ((1, rows, rows + 4) if QUICK else (1, max(2, rows // 2), rows, rows + 4))]
reveal("tokens/s, clients as rows over one client",
       next(load["tokens_per_s"] for load in loads if load["clients"] == rows) / loads[0]["tokens_per_s"])
print(text_table(loads, {"clients": "clients", "failed": "failed", "tokens_per_s": "tokens/s",
                         "ttft_ms": "TTFT p50, ms", "itl_ms": "ITL p50, ms", "latency_ms": "latency p50, ms"}))

# %%
knee = max(loads, key=lambda load: load["tokens_per_s"] / load["latency_ms"])
beyond_plots.client_loads(
    loads, rows, f"{loads[-1]['clients']} clients get {loads[-1]['tokens_per_s'] / loads[0]['tokens_per_s']:.1f} times "
    f"the tokens/s of one; most tokens/s for each ms of latency at {knee['clients']}")

# %%
# NBVAL_CHECK_OUTPUT
print("no request failed:", all(load["failed"] == 0 for load in loads))

# %% [markdown]
# ITL alone would not show the knee: above the rows it stays, and the first token waits. The title takes the whole
# latency. `--rate` in place of `--clients` finds what it does in an open loop
# ([the lab before](13_lab_live_server.ipynb)).
#
# ## 6 · What does it do when the queue is full?
#
# Ask again for more than it can hold, and look at the refusals: their number, their status, and whether they say when
# to come again. What was answered less the rows of question 1 is the queue. A server without a bound answers all, and
# the last one waits: then the longest TTFT is the answer to look at.

# %%
crowd = await asyncio.gather(*[ask(prompt_of(8), 16) for _ in range(REQUESTS)])  # noqa: F704
taken, refused = ([stream for stream in crowd if (stream.status == 200) == wanted] for wanted in (True, False))
print(f"{len(taken)} answered, the last one's first token after {max(stream.ttft for stream in taken):.1f} s;",
      f"{len(refused)} refused, with {sorted({stream.status for stream in refused})}")

# %%
# NBVAL_CHECK_OUTPUT
if refused:
    compare("places in the queue", len(taken) - rows, "queue")
    print(f"a refusal has status {refused[0].status} and says: come again after {refused[0].retry_after} s")
else:
    print("nobody was refused: ask for more, or the queue has no bound")

# %% [markdown]
# ## What you know now

# %%
answers = {"rows": rows, "tokens of cache": blocks * block or None, "shares prefixes": bool(shares_prefixes),
           "prompt tokens a step": round(chunk), "knee, clients": knee["clients"],
           "places in the queue": len(taken) - rows if refused else None}
print(text_table([{"what": what, "found": found} for what, found in answers.items()],
                 {"what": "the server", "found": "found"}))

# %%
guesses()

# %%
running.close()
await http.aclose()  # noqa: F704
print("done")

# %% [markdown]
# ## Where it loses
#
# From outside you see what a client sees. Several servers behind one address mix their answers: rows add up, and a
# repeated prompt may meet another cache. A proxy with a buffer sends tokens in bursts, which look like speculation.
# A server with drafts sends several tokens in one event, and questions 2 and 4 count events. And on a shared server
# each of these probes also measures the others.
#
# This page settles no claim of the ledger.
#
# ## What a production engine calls this
#
# | question | vLLM | SGLang | llama.cpp |
# |---|---|---|---|
# | rows | `--max-num-seqs` | `--max-running-requests` | `--parallel` |
# | tokens of cache | `--gpu-memory-utilization`, log | `--mem-fraction-static`, log | `--ctx-size`, for all slots |
# | prefixes | `--enable-prefix-caching` | `--disable-radix-cache` | `cache_prompt` of a request |
# | prompts in chunks | `--max-num-batched-tokens` | `--chunked-prefill-size` | `--batch-size`, `--ubatch-size` |
# | full queue | no bound of its own; a proxy in front | `--max-queued-requests` | no bound; `requests_deferred` grows |
#
# ## Exercise
#
# Change two of the settings in the first cells' server, let a colleague run the six questions without looking, and see
# whether they name both. Then turn `prefix_cache` off and explain why question 3 needed its third prompt: which wrong
# answer would two prompts have given on a server that was merely cold at first?

# %% [markdown]
# [How these pages are made](README.md) · before: [14 · What the articles leave out](14_beyond_the_articles.ipynb)
