"""The experiments: each one function that measures and returns a `Measurement`.

Notebook, command line and README show what these return, and nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from minillm.ladder.decode import NoCache, decode_cached, decode_recomputing
from minillm.ladder.engine import Engine
from minillm.ladder.quantized import kv_bytes_per_token, native_format
from minillm.ladder.request import SamplingParams
from minillm.measure import metrics
from minillm.measure.measurement import Measurement, Spread, provenance
from minillm.measure.prompts import CHAT_PROMPTS

# How far apart the two likeliest logits may be where two rungs are allowed to disagree: sums in
# another order move a logit by this much, and a tie then falls the other way.
MARGIN_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.5}

SLOTS_THAT_FIT = 8  # of the longest request, in the ladder's default memory
RUNG_0_REQUESTS = 2  # recomputing everything is slow by nature: so many are run in full


@dataclass
class RungRun:
    """What one rung did with the ladder's requests."""

    outputs: list[list[int]]
    seconds: float
    ttft_s: list[float]
    details: dict = field(default_factory=dict)

    @property
    def tokens_per_s(self) -> float:
        return sum(map(len, self.outputs)) / self.seconds


def ladder(
    model,
    tokenizer,
    name: str,
    requests: int = 16,
    max_tokens: int = 96,
    kv_memory: int | None = None,
    progress=lambda label, total: _Silent(),
) -> Measurement:
    """Every rung on the same chat prompts, all arriving at once; the columns are those of `minillm ladder`.

    Rungs 2 to 4 share one byte budget for keys and values: by default what holds eight slots
    of the longest request. Rung 0 runs the first few requests only, and is compared with rung
    1 on those. progress(label, total) gives a bar with `update`.
    """
    prompts = [tokenizer.chat(CHAT_PROMPTS[i % len(CHAT_PROMPTS)]) for i in range(requests)]
    if kv_memory is None:
        longest = -(-(max(map(len, prompts)) + max_tokens) // 16) * 16
        kv_memory = SLOTS_THAT_FIT * longest * kv_bytes_per_token(model.config, native_format(model.dtype))
    few = prompts[: min(RUNG_0_REQUESTS, requests)]
    one_by_one = {"batch_rows": 1.0, "idle_slot_steps": 0}
    _warm_up(model, prompts)

    def run_alone(decode, label, some):
        with progress(label, len(some)) as bar:
            return _run_one_by_one(model, decode, some, max_tokens, bar)

    cached = run_alone(decode_cached, "rung 1", prompts)
    cached.details = {**one_by_one, **_contiguous_kv(model, prompts, cached.outputs, max_tokens)}
    recomputing = run_alone(decode_recomputing, "rung 0", few)
    recomputing.details = {**one_by_one, "kv_reserved_mb": 0.0, "kv_used_mb": 0.0}
    runs = [(recomputing, "recompute", "a forward over the whole text for every token"),
            (cached, "KV cache", "keys and values are kept; a step feeds one token")]
    for batching, kv, title, adds in (
        ("static", "slots", "static batch", "a batch shares one read of the weights"),
        ("continuous", "slots", "continuous batch", "the batch is re-decided at every step"),
        ("continuous", "paged", "paged KV", "memory by block, shared prefixes"),
    ):
        engine = Engine(model, batching=batching, kv=kv, kv_memory=kv_memory)
        with progress(f"rung {len(runs)}", requests) as bar:
            runs.append((_run_engine(engine, prompts, max_tokens, bar), title, adds))

    rows = []
    for rung, (run, title, adds) in enumerate(runs):
        same = _compare(model, prompts, run.outputs, cached.outputs)
        before = {0: None, 1: _speed_on_first(cached, len(few)) / recomputing.tokens_per_s}.get(
            rung, run.tokens_per_s / runs[rung - 1][0].tokens_per_s
        )
        rows.append(_ladder_row(rung, title, adds, run, before, same))
    spread = Spread.of([cached.tokens_per_s], warmups=1)
    dtype = native_format(model.dtype)
    return Measurement("ladder", provenance(name, dtype, model.device, seed=0, spread=spread), rows)


def _ladder_row(rung: int, title: str, adds: str, run: RungRun, before: float | None, same: dict) -> dict:
    ttft = metrics.distribution(run.ttft_s)
    return {
        "rung": rung, "name": title, "adds": adds, "requests": len(run.outputs),
        "output_tokens": sum(map(len, run.outputs)), "tokens_per_s": run.tokens_per_s, "times_rung_before": before,
        "ttft_p50_s": ttft["p50"], "ttft_p99_s": ttft["p99"], **run.details, **same,
    }


def _run_one_by_one(model, decode, prompts: Sequence[list[int]], max_tokens: int, bar) -> RungRun:
    """Serve the prompts in order, each by itself; all are taken to have arrived at the start."""
    outputs, ttft, start = [], [], time.perf_counter()
    for prompt in prompts:
        tokens = []
        for token in decode(model, prompt, max_tokens, model.config.eos_token_id):
            if not tokens:
                ttft.append(time.perf_counter() - start)
            tokens.append(token)
        outputs.append(tokens)
        bar.update(1)
    return RungRun(outputs, time.perf_counter() - start, ttft, {})


def _speed_on_first(run: RungRun, number: int) -> float:
    """Tokens per second of a one-by-one run up to the end of its first `number` requests."""
    if number >= len(run.outputs):
        return run.tokens_per_s
    # the next request's first token comes one prefill later than these end; the first prefill stands for it
    seconds = run.ttft_s[number] - run.ttft_s[0]
    return sum(map(len, run.outputs[:number])) / seconds


def _run_engine(engine: Engine, prompts: Sequence[list[int]], max_tokens: int, bar) -> RungRun:
    start = time.perf_counter()
    ids = [engine.add(prompt, SamplingParams(max_tokens=max_tokens)) for prompt in prompts]
    outputs = {request_id: [] for request_id in ids}
    while engine.has_work:
        for event in engine.step():
            outputs[event.request_id] += event.token_ids
            bar.update(event.finished)
    seconds = time.perf_counter() - start
    records, block_size = engine.records, engine.scheduler.memory.pool.block_size
    summary = metrics.summary(records, block_size)
    per_token = engine.block_bytes / block_size / 1e6
    details = {
        "batch_rows": summary["batch"]["mean_rows"],
        "idle_slot_steps": summary["batch"]["idle_row_steps"],
        "kv_reserved_mb": summary["kv"]["peak_reserved_tokens"] * per_token,
        "kv_used_mb": summary["kv"]["peak_used_tokens"] * per_token,
    }
    return RungRun([outputs[i] for i in ids], seconds, [r.first_token - r.arrival for r in records.requests], details)


def _contiguous_kv(model, prompts, outputs, max_tokens: int) -> dict:
    """The cache of one sequence alone at its fullest: the longest, and what it was sized for."""
    per_token = kv_bytes_per_token(model.config, native_format(model.dtype)) / 1e6
    return {
        "kv_reserved_mb": max(len(prompt) + max_tokens for prompt in prompts) * per_token,
        "kv_used_mb": max(len(p) + len(o) - 1 for p, o in zip(prompts, outputs, strict=True)) * per_token,
    }


def _compare(model, prompts, outputs, reference) -> dict:
    """Whether a rung's tokens are the reference's, and where not, by how small a margin.

    `identical` forgives a first divergence only where the two likeliest logits are as good
    as tied; `divergences` lists them all.
    """
    divergences = [
        {"request": number, "token": token, "top2_margin": top2_margin(model, prompt + want[:token])}
        for number, (prompt, got, want) in enumerate(zip(prompts, outputs, reference, strict=False))
        for token in first_divergence(got, want)
    ]
    identical = all(d["top2_margin"] <= MARGIN_TOLERANCE[model.dtype] for d in divergences)
    return {"identical": identical, "divergences": divergences}


def first_divergence(got: Sequence[int], want: Sequence[int]) -> Iterator[int]:
    """The index of the first token in which two outputs differ, if they do."""
    if list(got) != list(want):
        pairs = enumerate(zip(got, want, strict=False))
        yield next((i for i, (a, b) in pairs if a != b), min(len(got), len(want)))


@torch.inference_mode()
def top2_margin(model, ids: Sequence[int]) -> float:
    """By how much the likeliest next token's logit exceeds the second's, computed without a cache."""
    tokens = torch.tensor(ids, device=model.device)
    positions = torch.arange(len(ids), device=model.device)
    best, second = model.forward(tokens, positions, NoCache(), positions[-1:])[0].float().topk(2).values
    return float(best - second)


def _warm_up(model, prompts) -> None:
    """Let the allocator and the kernels see a prompt and a step before anything is timed."""
    Engine(model).generate(prompts[:2], SamplingParams(max_tokens=3))
    list(decode_cached(model, prompts[0], 3))


class _Silent:
    """A progress bar that shows nothing."""

    def __enter__(self):
        return self

    def __exit__(self, *exc) -> None: ...

    def update(self, number: int) -> None: ...
