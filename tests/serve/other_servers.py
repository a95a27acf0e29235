"""`minillm serve` beside other servers of the same model on this machine, with GuideLLM as the client of all.

    python tests/serve/other_servers.py --save                      llama.cpp's server (xllamacpp, of the test extra)
    python tests/serve/other_servers.py --vllm PYTHON --save        and vLLM's, of an environment that has it

Each server runs alone, in turns, in a process of its own. vLLM and minillm compute in fp32; llama.cpp keeps the
checkpoint's 4-bit weights. The rows go to notebooks/measurements/DEVICE/servers.json.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

from other_clients import client_python, guidellm

from minillm.course.show.tables import text_table
from minillm.load.source import DEFAULT, fetch, fetch_gguf
from minillm.measure.measurement import Measurement, provenance

PORT = 8766
START_S = 300
LLAMA_CPP = """
import sys, time, xllamacpp
settings = xllamacpp.CommonParams()
settings.model.path, settings.port, settings.verbosity = sys.argv[1], int(sys.argv[2]), 1  # on loopback
settings.n_parallel, settings.n_ctx = 16, 16 * 512
settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = int(sys.argv[3])
server = xllamacpp.Server(settings)
time.sleep(1e6)
"""


def commands(vllm: str | None) -> dict[str, tuple[list[str], dict]]:
    """Of each server, the command and the environment variables."""
    threads = str(os.cpu_count())
    found = {
        "minillm": ([sys.executable, "-m", "minillm", "serve", "--port", str(PORT), "--dtype", "fp32"], {}),
        "llama.cpp, 4-bit": ([sys.executable, "-c", LLAMA_CPP, str(fetch_gguf()), str(PORT), threads], {}),
    }
    if vllm:
        found["vLLM"] = (
            [vllm, "-m", "vllm.entrypoints.openai.api_server", "--model", str(fetch()), "--served-model-name", DEFAULT,
             "--dtype", "float32", "--max-model-len", "1024", "--host", "127.0.0.1", "--port", str(PORT)],
            {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
             "VLLM_CPU_NUM_OF_RESERVED_CPU": "0"},
        )
    return found


@contextmanager
def serving(command: list[str], variables: dict) -> Iterator[str]:
    """The server, once it answers; ended with all its processes."""
    process = subprocess.Popen(command, env={**os.environ, **variables}, stdout=subprocess.DEVNULL,
                               stderr=subprocess.DEVNULL, start_new_session=True)
    url, end = f"http://127.0.0.1:{PORT}", time.perf_counter() + START_S
    try:
        while True:
            try:
                urllib.request.urlopen(f"{url}/health", timeout=2)
                break
            except OSError as error:
                if process.poll() is not None or time.perf_counter() > end:
                    raise RuntimeError(f"{' '.join(command[:4])} does not answer") from error
                time.sleep(0.5)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def spread(turns: list[dict], name: str) -> dict:
    values = [turn[name] for turn in turns]
    return {name: median(values), f"{name}_min": min(values), f"{name}_max": max(values)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--vllm", metavar="PYTHON", help="of an environment with vLLM, such as `make peers` makes")
    parser.add_argument("--streams", default="1,4,16", metavar="N,N,...")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--save", action="store_true")
    arguments = parser.parse_args()
    client_python()
    streams, found = [int(n) for n in arguments.streams.split(",")], {}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(arguments.turns):
            for name, how in commands(arguments.vllm).items():
                with serving(*how) as url:
                    guidellm(url, 2, 4, folder)  # warms up
                    for number in streams:
                        print(f"turn {turn + 1} of {arguments.turns}, {name}, {number} streams", flush=True)
                        found.setdefault((number, name), []).append(guidellm(url, number, 4 * number, folder))
    rows = []
    for (number, name), turns in sorted(found.items()):
        figures = {k: v for each in ("tokens_per_s", "ttft_ms", "itl_ms") for k, v in spread(turns, each).items()}
        ours = median(turn["tokens_per_s"] for turn in found[number, "minillm"])
        rows.append({"streams": number, "server": name, "tokens": turns[0]["tokens"], **figures,
                     "minillm_times": ours / figures["tokens_per_s"], "turns": len(turns)})
    columns = ("streams", "server", "tokens", "tokens_per_s", "minillm_times", "ttft_ms", "itl_ms")
    print(text_table(rows, {name: name.replace("_", " ") for name in columns}))
    if arguments.save:
        print("written to", Measurement("servers", provenance(DEFAULT, "fp32", "cpu", 0, None), rows).save())
    return 0


if __name__ == "__main__":
    sys.exit(main())
