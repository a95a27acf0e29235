"""Other engines on the same work: a peer takes items and gives its output tokens and seconds, as our engine does.

    transformers   `generate` in static batches of 8, and its continuous batching: in this process, on our weights
    llama.cpp      the wheel xllamacpp, in a process of its own; the default model as it was published, in 4 bits
    vLLM           its CPU build, in a process and an environment of its own (`make peers`)
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch

from minillm.load.source import DEFAULT, fetch_gguf, locate
from minillm.load.weights import RANDOM
from minillm.measure.reference import load_reference
from minillm.measure.workload import WorkItem
from minillm.model.llama import Llama

STATIC_BATCH = 8
VLLM_PYTHON = "MINILLM_VLLM"  # the environment variable that names the interpreter which has vLLM
PEERS = ("transformers", "llama.cpp", "vllm")
CONTINUOUS = "transformers-continuous"  # without its static batches: a fraction of the time

Run = tuple[int, float]  # output tokens, seconds
Engines = dict[str, Callable[[Sequence[WorkItem]], Run]]


class NoPeer(ValueError):
    """This peer is not here, or can't take this model; the message says why, and the cure."""


@contextmanager
def peers(against: str | None, model_name: str, model: Llama, items: Sequence[WorkItem]) -> Iterator[Engines]:
    """The engines of one peer, ready to run; of "all", those that are here, with a line for each that is not.

    Raises NoPeer for a peer that was asked for by name. items: the work, for which room is made.
    """
    makers = {"transformers": transformers_engines, CONTINUOUS: continuous_engine, "llama.cpp": llama_cpp_engine,
              "vllm": vllm_engine}
    with ExitStack() as opened:
        engines: Engines = {}
        for name in PEERS if against == "all" else [against] * (against is not None):
            try:
                engines |= opened.enter_context(makers[name](model_name, model, items))
            except NoPeer as why:
                if against != "all":
                    raise NoPeer(f"{name} can't run beside: {why}") from None
                print(f"{name} is left out: {why}", flush=True)
        yield engines


# -- transformers ---------------------------------------------------------------------------------


@contextmanager
def transformers_engines(model_name: str, model: Llama, items: Sequence[WorkItem]) -> Iterator[Engines]:
    """Both of its ways to serve, on the very same weights."""
    reference = load_reference(model_name, model)
    yield {"transformers, static batch of 8": partial(static_batches, reference),
           "transformers, continuous batching": partial(continuous_batching, reference)}


@contextmanager
def continuous_engine(model_name: str, model: Llama, items: Sequence[WorkItem]) -> Iterator[Engines]:
    """Its continuous batching alone."""
    yield {"transformers, continuous batching": partial(continuous_batching, load_reference(model_name, model))}


@torch.inference_mode()
def static_batches(reference, items: Sequence[WorkItem]) -> Run:
    """`generate` on left-padded batches in order of arrival; tokens past an answer's end are not counted."""
    pad, start = 0, time.perf_counter()
    for at in range(0, len(items), STATIC_BATCH):
        batch = items[at : at + STATIC_BATCH]
        width, longest = max(len(item.prompt_ids) for item in batch), max(item.output_tokens for item in batch)
        ids = [[pad] * (width - len(item.prompt_ids)) + item.prompt_ids for item in batch]
        mask = [[0] * (width - len(item.prompt_ids)) + [1] * len(item.prompt_ids) for item in batch]
        reference.generate(
            input_ids=torch.tensor(ids, device=reference.device),
            attention_mask=torch.tensor(mask, device=reference.device),
            max_new_tokens=longest, min_new_tokens=longest, do_sample=False, eos_token_id=None, pad_token_id=pad,
        )
    getattr(torch, reference.device.type).synchronize()  # the last batch may still be running
    return sum(item.output_tokens for item in items), time.perf_counter() - start


def continuous_batching(reference, items: Sequence[WorkItem]) -> Run:
    """transformers' continuous batching, with a cache that holds all requests together, and no more.

    Its manager's thread never sleeps, so it is stopped after each turn. Its start and warm-up are not timed.
    """
    from transformers import GenerationConfig
    from transformers.generation import ContinuousBatchingConfig

    page, most = 32, max(item.output_tokens for item in items)
    step_tokens = 512 if reference.device.type == "cpu" else 4096
    blocks = sum(-(-(len(item.prompt_ids) + item.output_tokens) // page) for item in items) + len(items)
    manager = reference.init_continuous_batching(
        generation_config=GenerationConfig(do_sample=False, max_new_tokens=most, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(num_blocks=blocks, max_batch_tokens=step_tokens,
                                                            **{page_name(ContinuousBatchingConfig): page}),
    )
    manager.start()
    try:
        ask_manager(manager, items[:2])
        start = time.perf_counter()
        tokens = ask_manager(manager, items)
        return tokens, time.perf_counter() - start
    finally:
        manager.stop(block=True)


def page_name(config_class: type) -> str:
    """What a release of transformers calls the tokens of a block: `page_size`, or `block_size` in 5.17 and before."""
    known = {each.name for each in fields(config_class)}
    return next(name for name in ("page_size", "block_size") if name in known)


def ask_manager(manager, items: Sequence[WorkItem]) -> int:
    """Send the requests, wait for all of them; how many tokens came."""
    for item in items:
        manager.add_request(input_ids=item.prompt_ids, max_new_tokens=item.output_tokens)
    done = tokens = 0
    while done < len(items):
        result = manager.get_result(timeout=5)
        if result is None and not manager.is_running():
            raise RuntimeError("transformers' continuous batching stopped by itself")
        if result is not None and result.is_finished():
            done, tokens = done + 1, tokens + len(result.generated_tokens)
    return tokens


# -- in processes of their own --------------------------------------------------------------------


class Worker:
    """Another engine's process, stopped but in its turns: its threads would spin beside the others'.

    It is not in this process, where llama.cpp's library took 15 % of this engine's speed. It reads a line of work, a
    list of [prompt ids, output tokens], and writes [output tokens, seconds]. hello: what it wrote when it was ready.
    """

    def __init__(self, name: str, process: subprocess.Popen, hello: object) -> None:
        self.name, self.process, self.hello = name, process, hello

    @contextmanager
    def awake(self) -> Iterator[None]:
        os.killpg(self.process.pid, signal.SIGCONT)
        try:
            yield
        finally:
            os.killpg(self.process.pid, signal.SIGSTOP)

    def run(self, items: Sequence[WorkItem]) -> Run:
        """RuntimeError if the process ends."""
        work = [(item.prompt_ids, item.output_tokens) for item in items]
        try:
            with self.awake():
                print(json.dumps(work), file=self.process.stdin, flush=True)
                tokens, seconds = json.loads(self.process.stdout.readline())
        except (BrokenPipeError, json.JSONDecodeError):
            raise RuntimeError(f"{self.name} ended before its answer") from None
        return tokens, seconds


@contextmanager
def worker(name: str, command: Sequence, variables: Mapping[str, str]) -> Iterator[Worker]:
    """A worker that is ready; ended at the end. NoPeer with its last words if it does not start."""
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen([*map(str, command)], env={**os.environ, **variables}, stdin=subprocess.PIPE,
                                   stdout=subprocess.PIPE, stderr=said, text=True, start_new_session=True)
        try:
            hello = process.stdout.readline()
            if not hello:
                said.seek(0)
                raise NoPeer(f"it did not start: {' | '.join(said.read().splitlines()[-3:])}")
            os.killpg(process.pid, signal.SIGSTOP)
            yield Worker(name, process, json.loads(hello))
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


SPEAK = """
import json, os, sys, time
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what the engine prints goes where its errors go

def say(what):
    print(json.dumps(what), file=answers, flush=True)
"""
LLAMA_CPP = SPEAK + """
from concurrent.futures import ThreadPoolExecutor
import xllamacpp
settings, (file, requests, tokens, threads) = xllamacpp.CommonParams(), sys.argv[1:]
settings.model.path, settings.port, settings.warmup, settings.verbosity = file, 0, True, 1  # 1: errors only
settings.n_parallel, settings.n_ctx = int(requests), int(requests) * int(tokens)
settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = int(threads)
server = xllamacpp.Server(settings)

def answer(work):
    body = {"prompt": work[0], "max_tokens": work[1], "temperature": 0, "ignore_eos": True, "cache_prompt": False}
    return server.handle_completions(body)["usage"]["completion_tokens"]

say(server.listening_address)
for line in sys.stdin:
    work = json.loads(line)
    with ThreadPoolExecutor(len(work)) as pool:
        start = time.perf_counter()
        say([sum(pool.map(answer, work)), time.perf_counter() - start])
"""
VLLM = SPEAK + """
from vllm import LLM, SamplingParams
model, dtype, rows, context = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
engine = LLM(model=model, dtype=dtype, max_model_len=context, max_num_seqs=rows, enable_prefix_caching=False)
say("ready")
for line in sys.stdin:
    work = json.loads(line)
    prompts = [{"prompt_token_ids": prompt} for prompt, _ in work]
    params = [SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True) for _, tokens in work]
    start = time.perf_counter()
    given = engine.generate(prompts, params, use_tqdm=False)
    say([sum(len(each.outputs[0].token_ids) for each in given), time.perf_counter() - start])
"""
VLLM_SETTINGS = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_NUM_OF_RESERVED_CPU": "0", "HF_HUB_OFFLINE": "1",
                 "VLLM_NO_USAGE_STATS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


def longest(items: Sequence[WorkItem]) -> int:
    """Tokens of the longest prompt and answer, and one to spare."""
    return max(len(item.prompt_ids) + item.output_tokens for item in items) + 1


@contextmanager
def llama_cpp(file: Path, requests: int, tokens: int) -> Iterator[Worker]:
    """Its server on this GGUF file, with room for so many requests of so many tokens, and as many threads as PyTorch.

    It says its URL, and answers there as well. NoPeer without the wheel.
    """
    if find_spec("xllamacpp") is None:
        raise NoPeer("it is not installed: `pip install xllamacpp` (Linux on x86-64)")
    threads = torch.get_num_threads()
    with worker("llama.cpp", [sys.executable, "-c", LLAMA_CPP, file, requests, tokens, threads], {}) as found:
        yield found


@contextmanager
def llama_cpp_engine(model_name: str, model: Llama, items: Sequence[WorkItem]) -> Iterator[Engines]:
    """Its server's own loop without HTTP, all requests at once."""
    if model_name != DEFAULT or model.device.type != "cpu":
        raise NoPeer(f"its wheel computes on the processor, and reads a GGUF file: only that of {DEFAULT} is fetched")
    with llama_cpp(fetch_gguf(), len(items), longest(items)) as found:
        yield {"llama.cpp, 4-bit weights": found.run}


@contextmanager
def vllm_engine(model_name: str, model: Llama, items: Sequence[WorkItem]) -> Iterator[Engines]:
    """Its offline engine, without prefix sharing, with room for all requests at once."""
    python = os.environ.get(VLLM_PYTHON, ".venv-vllm/bin/python")
    if not Path(python).exists():
        raise NoPeer(f"no interpreter at {python}: `make peers` makes one, or {VLLM_PYTHON} names another")
    if model_name.startswith(RANDOM):
        raise NoPeer(f"it reads a model from files, and {model_name} has none")
    dtype = str(model.dtype).partition(".")[2]
    command = [python, "-c", VLLM, locate(model_name), dtype, len(items), longest(items)]
    with worker("vLLM", command, VLLM_SETTINGS) as found:
        yield {"vLLM": found.run}
