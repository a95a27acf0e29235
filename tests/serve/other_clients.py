"""`minillm serve`, seen by other people's clients, and our client beside another server.

    python tests/serve/other_clients.py                 all of it; `make clients` calls this
    python tests/serve/other_clients.py --only mock     guidellm | bench | knee | openai | mock | cost

One server runs SmolLM2. GuideLLM and `bench --url` load it in turn, and what each saw is compared with
the engine's own records of the same requests. Then OpenAI's client asks it, `bench --url` reads the
known latencies of GuideLLM's mock server, and eight streams are timed beside the same work without a
server. The other clients live in .venv-clients, made here if missing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median, median_low

from minillm import Engine, SamplingParams, load_model, load_tokenizer
from minillm.course.experiments.batching import knee_of, power
from minillm.course.show.tables import text_table
from minillm.ladder.records import RequestRecord
from minillm.load.source import DEFAULT, fetch
from minillm.measure.client import Server as Asked
from minillm.measure.client import bench_server, play
from minillm.measure.workload import WorkItem, make_workload
from minillm.serve.app import Server
from minillm.serve.engine_thread import EngineThread
from minillm.serve.run import in_background

ROOT = Path(__file__).resolve().parent.parent.parent
CLIENTS = ROOT / ".venv-clients"
WANTED = ["torch==2.13.0", "guidellm==0.8.1", "openai==3.57.0"]
WITHIN, OR_MS = 0.05, 2.0  # what two clients of one run may differ by
MOCK_WITHIN = 0.10
STREAMING_COSTS = 0.03  # of the tokens per second, at most
KEY = "a key"


def client_python() -> str:
    """The interpreter with the other clients; their environment is made if it is not there."""
    python = CLIENTS / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", CLIENTS], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", *WANTED], check=True)
    return str(python)


def guidellm_report(url: str, profile: str, requests: int, folder: str) -> dict:
    """What GuideLLM writes of its runs, each of so many requests; profile: in its own words."""
    file = Path(folder, "guidellm.json")
    subprocess.run(
        [CLIENTS / "bin" / "guidellm", "run", "--backend", f"kind=openai_http,target={url},model={DEFAULT}",
         "--profile", profile, "--constraint", f"kind=max_requests,count={requests}",
         "--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=24",
         "--tokenizer", f"kind=huggingface_auto,model={fetch()}", "--output", f"kind=json,path={file}",
         "--disable-console-interactive"],
        check=True, stdout=subprocess.DEVNULL, env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    return json.loads(file.read_text())


def guidellm(url: str, streams: int, requests: int, folder: str) -> dict:
    """GuideLLM's report of a closed loop: tokens, and medians in ms."""
    run, = guidellm_report(url, f"kind=concurrent,streams={streams}", requests, folder)["benchmarks"]
    return figures(run)


def figures(run: dict) -> dict:
    found = {name: run["metrics"][name]["successful"] for name in
             ("output_token_count", "time_to_first_token_ms", "inter_token_latency_ms", "request_latency")}
    return {"client": "GuideLLM", "requests": run["metrics"]["request_totals"]["successful"],
            "tokens": round(found["output_token_count"]["total_sum"]),
            "ttft_ms": found["time_to_first_token_ms"]["median"], "itl_ms": found["inter_token_latency_ms"]["median"],
            "tokens_per_s": found["output_token_count"]["total_sum"] / run["duration"]}


def seen(client: str, lives: list[RequestRecord]) -> dict:
    """The same figures from request records. ITL as GuideLLM has it: a request's mean, counted once for each gap."""
    gaps = []
    for life in lives:
        number = life.output_tokens - 1
        gaps += [(life.token_times[-1] - life.token_times[0]) / max(number, 1) * 1e3] * number
    seconds = max(life.finish for life in lives) - min(life.arrival for life in lives)
    tokens = sum(life.output_tokens for life in lives)
    ttft_ms = median_low((life.first_token - life.arrival) * 1e3 for life in lives)
    return {"client": client, "requests": len(lives), "tokens": tokens, "tokens_per_s": tokens / seconds,
            "ttft_ms": ttft_ms, "itl_ms": median_low(gaps)}


def agree(one: dict, other: dict) -> bool:
    """Tokens equal; TTFT and ITL within 5 % or 2 ms."""
    near = all(abs(one[name] - other[name]) <= max(OR_MS, WITHIN * other[name]) for name in ("ttft_ms", "itl_ms"))
    return one["tokens"] == other["tokens"] and one["requests"] == other["requests"] and near


def compared(engine: Engine, load, streams: int) -> list[dict]:
    """Both sides of one run: what the client saw, and what the engine recorded of those requests."""
    before = len(engine.records.requests)
    theirs = load(streams)
    while engine.unfinished:
        time.sleep(0.01)
    ours = seen("engine.records", engine.records.requests[before:])
    return [{"streams": streams, **row, "agrees": agree(theirs, ours)} for row in (theirs, ours)]


def by_bench(url: str, streams: int) -> dict:
    """What our own client sees of a closed loop."""
    items = make_workload("chat", requests=4 * streams, scale=0.1, seed=streams)
    run = asyncio.run(play(Asked(f"{url}/v1", DEFAULT), items, streams))
    assert not run.faults, run.faults
    return seen("bench --url", run.lives)


@contextmanager
def mock_server(*flags: str) -> Iterator[str]:
    """GuideLLM's server of known latency."""
    port = 8765
    process = subprocess.Popen(
        [CLIENTS / "bin" / "guidellm", "mock-server", "--port", str(port), "--model", "mock", "--ttft-ms", "150",
         "--itl-ms", "20", *flags], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1)
                break
            except OSError:
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        os.killpg(process.pid, 9)
        process.wait()


def read_mock() -> bool:
    """`bench --url` reads 150 and 20 ms, and counts failures as failures.

    The mock's bound on requests is let go as soon as a stream begins, so that streams, which is what this client
    asks for, do not wait for each other: nothing may fail there, and the wait is printed.
    """
    tokenizer, items = load_tokenizer(), make_workload("chat", requests=16, scale=0.1, seed=0)
    asked = {"text_of": tokenizer.decode, "model": "mock"}
    with mock_server() as url:
        plain = bench_server(Asked(url, **asked), items, 4)
    with mock_server("--fail-after-requests", "5") as url:
        failing = bench_server(Asked(url, **asked), items, 1)
    with mock_server("--max-concurrent-requests", "1") as url:
        bounded = bench_server(Asked(url, **asked), items, 4)
    ttft, itl = (plain[name]["p50"] * 1e3 for name in ("ttft_s", "itl_per_step_s"))
    waited = bounded["ttft_s"]["p50"] / plain["ttft_s"]["p50"]
    print(f"mock server, 150 and 20 ms: bench --url reads {ttft:.1f} and {itl:.1f}; one that fails after 5 requests: "
          f"{failing['requests']['finished']} answered, {failing['faults']}; a bound of one: TTFT {waited:.2f} times")
    near = abs(ttft / 150 - 1) <= MOCK_WITHIN and abs(itl / 20 - 1) <= MOCK_WITHIN
    return near and failing["faults"] == {"server error 500": 11} and not plain["failed"] + bounded["failed"]


# -- the knee -------------------------------------------------------------------------------------

KNEE_STREAMS = 1, 2, 4, 8, 16, 32
KNEE_REQUESTS = 96  # at each number of streams, so that 32 of them ask three times


def knees(engine: Engine, url: str, folder: str) -> None:
    """GuideLLM's knee beside ours, of the same requests: two definitions, which may name two places.

    Theirs is where two lines that are fitted to tokens/s cross; ours has the most tokens/s per ms of ITL.
    """
    before = len(engine.records.requests)
    profile = json.dumps({"kind": "knee", "initial_streams": KNEE_STREAMS})
    report = guidellm_report(url, profile, KNEE_REQUESTS, folder)
    while engine.unfinished:
        time.sleep(0.01)
    lives, rows = engine.records.requests[before:], []
    for number, run in zip(KNEE_STREAMS, report["benchmarks"], strict=True):
        theirs = figures(run)
        ours, lives = seen("engine.records", lives[: theirs["requests"]]), lives[theirs["requests"] :]
        rows.append({"streams": number, "GuideLLM": theirs["tokens_per_s"], **ours, "itl_p50_ms": ours["itl_ms"]})
    at = knee_of(rows)
    for row in rows:
        row["power"], row["knee"] = power(row), "<- our knee" if row is at else ""
    columns = ("streams", "requests", "GuideLLM", "tokens_per_s", "ttft_ms", "itl_ms", "power", "knee")
    print(text_table(rows, {name: name.replace("_", " ") for name in columns}))
    found = report["conclusions"][0]["final"]["throughput"]
    where = "no knee" if found["knee"] is None else f"its knee at {found['knee']:.1f} streams"
    print(f"GuideLLM: {where} ({found['reason']})")


# -- what streaming costs -------------------------------------------------------------------------


def eight_streams() -> list[WorkItem]:
    return [WorkItem(prompt_ids=[5 + number] * 16, max_tokens=96, arrival=0.0) for number in range(8)]


def streaming_cost(engine: Engine, tokenizer, turns: int = 5) -> bool:
    """Tokens per second of eight streams over HTTP against `engine.generate`, in turns, by the engine's own clock."""
    thread = EngineThread(engine)
    params = SamplingParams(max_tokens=96, ignore_eos=True)
    rates: dict[str, list[float]] = {"engine.generate": [], "eight streams": []}

    def rate(work) -> float:
        before = len(engine.records.requests)
        work()
        while engine.unfinished:
            time.sleep(0.01)
        return seen("", engine.records.requests[before:])["tokens_per_s"]

    with in_background(Server(thread, tokenizer, DEFAULT)) as url:
        prompts = [item.prompt_ids for item in eight_streams()]
        plain = lambda: asyncio.run_coroutine_threadsafe(  # noqa: E731  (on the engine's thread, as the streams are)
            thread.call(lambda: engine.generate(prompts, params)), thread.loop).result()
        streams = lambda: subprocess.run([sys.executable, __file__, "--as-client", url], check=True)  # noqa: E731
        for turn in range(turns + 1):
            for name, work in (("engine.generate", plain), ("eight streams", streams)):
                found = rate(work)
                rates[name] += [found] * bool(turn)  # the first warms up
    ratios = [streamed / alone for alone, streamed in zip(*rates.values(), strict=True)]
    print("tokens/s at 8 streams: " + ", ".join(
        f"{name} {median(values):.1f} ({min(values):.1f}-{max(values):.1f})" for name, values in rates.items())
        + f"; ratio {median(ratios):.3f} ({min(ratios):.3f}-{max(ratios):.3f})")
    return median(ratios) >= 1 - STREAMING_COSTS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", choices=["guidellm", "bench", "knee", "openai", "mock", "cost"])
    parser.add_argument("--as-client", metavar="URL", help=argparse.SUPPRESS)
    parser.add_argument("--streams", default="1,4,16", metavar="N,N,...")
    parser.add_argument("--requests", type=int, default=4, help="of each stream (default: 4)")
    arguments = parser.parse_args()
    if arguments.as_client:
        asked = Asked(f"{arguments.as_client}/v1", DEFAULT)
        return int(bench_server(asked, eight_streams(), 8)["failed"] > 0)
    only, streams = arguments.only, [int(number) for number in arguments.streams.split(",")]
    python, rows, sound = client_python(), [], []
    tokenizer = load_tokenizer()
    engine = Engine(load_model(dtype="fp32"), tokenizer)
    engine.generate([[5] * 64] * 4)  # warm
    server = Server(EngineThread(engine), tokenizer, DEFAULT)
    with in_background(server) as url, tempfile.TemporaryDirectory() as folder:
        for number in streams:
            if only in (None, "guidellm"):
                rows += compared(engine, lambda n: guidellm(url, n, n * arguments.requests, folder), number)
            if only in (None, "bench"):
                rows += compared(engine, lambda n: by_bench(url, n), number)
        if only in (None, "knee"):
            knees(engine, url, folder)
    if rows:
        columns = ("streams", "client", "requests", "tokens", "ttft_ms", "itl_ms", "tokens_per_s", "agrees")
        print(text_table(rows, {name: name.replace("_", " ") for name in columns}))
    sound += [row["agrees"] for row in rows]
    if only in (None, "openai"):
        server = Server(EngineThread(Engine(engine.model, tokenizer)), tokenizer, DEFAULT, api_key=KEY)
        with in_background(server) as url:
            script = Path(__file__).with_name("openai_client.py")
            sound.append(subprocess.run([python, script, f"{url}/v1", DEFAULT, KEY]).returncode == 0)
    if only in (None, "mock"):
        sound.append(read_mock())
    if only in (None, "cost"):
        sound.append(streaming_cost(engine, tokenizer))
    print("all agree" if all(sound) else "they do NOT agree")
    return 0 if all(sound) else 1


if __name__ == "__main__":
    sys.exit(main())
