"""The ladder experiment: every rung on the same prompts, its speed, its memory, and whether its tokens are the same."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from minillm.course.prompts import CHAT_PROMPTS
from minillm.course.setting import Progress, Setting, silent
from minillm.fast.engine import Engine
from minillm.ladder.decode import NoCache, decode_cached, decode_recomputing
from minillm.ladder.quantized import kv_bytes_per_token, native_format
from minillm.ladder.request import SamplingParams
from minillm.measure import metrics
from minillm.measure.measurement import Measurement, Spread, provenance

# How far apart the two likeliest logits may be where two rungs are allowed to disagree: sums in
# another order move a logit by this much, and a tie then falls the other way.
MARGIN_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.5}

SLOTS_THAT_FIT = 8  # of the longest request, in the ladder's default memory
RUNG_0_REQUESTS = 2  # recomputing everything is slow by nature: so many are run in full


RUNGS = (  # name, what it adds, whether its tokens must be those of rung 1
    ("recompute", "a forward over the whole text for every token", True),
    ("KV cache", "keys and values are kept; a step feeds one token", True),
    ("static batch", "a batch shares one read of the weights", True),
    ("continuous batch", "the batch is re-decided at every step", True),
    ("paged KV", "memory by block, shared prefixes", True),
    ("int8 KV", "8 bits per key and value: more rows in the same memory", False),
)
ENGINE_RUNGS = (  # the settings of rungs 2 to 5
    {"batching": "static", "kv": "slots"},
    {"batching": "continuous", "kv": "slots"},
    {"batching": "continuous", "kv": "paged"},
    {"batching": "continuous", "kv": "paged", "kv_format": "int8"},
)
NOT_EXACT = {"identical": None, "divergences": []}


@dataclass
class RungRun:
    """What one rung did with the ladder's requests."""

    outputs: list[list[int]]
    seconds: float
    ttft_s: list[float]
    details: dict
    ends_s: list[float] = field(default_factory=list)  # of each request, where they ran one after the other

    @property
    def tokens_per_s(self) -> float:
        return sum(map(len, self.outputs)) / self.seconds

    def speed_on_first(self, requests: int) -> float:
        """Tokens per second over the first requests: of all of them, or of a run one by one."""
        if requests >= len(self.outputs):
            return self.tokens_per_s
        return sum(map(len, self.outputs[:requests])) / self.ends_s[requests - 1]


def ladder(
    model,
    tokenizer,
    name: str,
    requests: int = 16,
    max_tokens: int = 96,
    kv_memory: int | None = None,
    progress: Progress = silent,
) -> Measurement:
    """Every rung on the same chat prompts, all arriving at once; the columns are those of `minillm ladder`.

    Rungs 2 to 5 share one byte budget for keys and values: by default what holds eight slots
    of the longest request. Rung 0 runs the first few requests only, and is compared with rung
    1 on those. progress(label, total) gives a bar with `update`.
    """
    prompts = [tokenizer.chat(CHAT_PROMPTS[i % len(CHAT_PROMPTS)]) for i in range(requests)]
    if kv_memory is None:
        kv_memory = _eight_slots(model, prompts, max_tokens)
    for settings in ENGINE_RUNGS:  # what cannot run is refused here, and not behind the slow rungs
        engine = Engine(model, kv_memory=kv_memory, **settings)
        for prompt in prompts:
            engine.add(prompt, SamplingParams(max_tokens=max_tokens))
    few = prompts[:RUNG_0_REQUESTS]
    _warm_up(model, prompts)
    runs = []
    for rung, (decode, some) in enumerate(((decode_recomputing, few), (decode_cached, prompts))):
        with progress(f"rung {rung}", len(some)) as bar:
            runs.append(_run_one_by_one(model, decode, some, max_tokens, bar))
    for rung, settings in enumerate(ENGINE_RUNGS, start=len(runs)):
        engine = Engine(model, kv_memory=kv_memory, **settings)
        with progress(f"rung {rung}", requests) as bar:
            runs.append(_run_engine(engine, prompts, max_tokens, bar))
    rows = [_ladder_row(model, prompts, runs, rung) for rung in range(len(runs))]
    spread = Spread.of([runs[1].tokens_per_s], warmups=1)
    dtype = native_format(model.dtype)
    return Measurement("ladder", provenance(name, dtype, model.device, seed=0, spread=spread), rows)


def _eight_slots(model, prompts, max_tokens: int, block_size: int = 16) -> int:
    """Bytes of keys and values that hold eight slots of the longest request."""
    blocks = -(-(max(map(len, prompts)) + max_tokens) // block_size)
    return SLOTS_THAT_FIT * blocks * block_size * kv_bytes_per_token(model.config, native_format(model.dtype))


def _ladder_row(model, prompts, runs: Sequence[RungRun], rung: int) -> dict:
    """One line of the table: how rung `rung` did, beside the one before it and against rung 1."""
    run, (title, adds, exact) = runs[rung], RUNGS[rung]
    before = None
    if rung:
        same_requests = len(runs[rung - 1].outputs)
        before = run.speed_on_first(same_requests) / runs[rung - 1].tokens_per_s
    ttft = metrics.distribution(run.ttft_s)
    compared = compare(model, prompts, run.outputs, runs[1].outputs) if exact else NOT_EXACT
    return {
        "rung": rung, "name": title, "adds": adds, "requests": len(run.outputs),
        "output_tokens": sum(map(len, run.outputs)), "tokens_per_s": run.tokens_per_s, "times_rung_before": before,
        "ttft_p50_s": ttft["p50"], "ttft_p99_s": ttft["p99"], **run.details, **compared,
        "agreement_percent": 100 * agreement(run.outputs, runs[1].outputs),
    }


def agreement(outputs: Sequence[Sequence[int]], reference: Sequence[Sequence[int]]) -> float:
    """The share of the reference's tokens, of the requests that both ran, before the first that differs."""
    pairs = list(zip(outputs, reference, strict=False))
    same = sum(next(iter(first_divergence(got, want)), len(want)) for got, want in pairs)
    return same / sum(len(want) for _, want in pairs)


def _run_one_by_one(model, decode, prompts: Sequence[list[int]], max_tokens: int, bar) -> RungRun:
    """Serve the prompts in order, each by itself; all are taken to have arrived at the start."""
    outputs, ttft, ends, start = [], [], [], time.perf_counter()
    for prompt in prompts:
        tokens = []
        for token in decode(model, prompt, max_tokens, model.config.eos_token_id):
            if not tokens:
                ttft.append(time.perf_counter() - start)
            tokens.append(token)
        outputs.append(tokens)
        ends.append(time.perf_counter() - start)
        bar.update(1)
    per_token = kv_bytes_per_token(model.config, native_format(model.dtype)) / 1e6
    cached = decode is decode_cached  # one sequence at a time: the longest, and what its cache was sized for
    details = {
        "batch_rows": 1.0,
        "idle_slot_steps": 0,
        "kv_reserved_mb": cached * max(len(prompt) + max_tokens for prompt in prompts) * per_token,
        "kv_used_mb": cached * max(len(p) + len(o) - 1 for p, o in zip(prompts, outputs, strict=True)) * per_token,
    }
    return RungRun(outputs, ends[-1], ttft, details, ends)


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
    summary = metrics.summary(records)
    per_token = engine.block_bytes / block_size / 1e6
    details = {
        "batch_rows": summary["batch"]["mean_rows"],
        "idle_slot_steps": summary["batch"]["idle_row_steps"],
        "kv_reserved_mb": summary["kv"]["peak_reserved_tokens"] * per_token,
        "kv_used_mb": summary["kv"]["peak_used_tokens"] * per_token,
    }
    return RungRun([outputs[i] for i in ids], seconds, [r.first_token - r.arrival for r in records.requests], details)


def compare(model, prompts, outputs, reference) -> dict:
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


def ladder_experiment(setting: Setting) -> Measurement:
    """`ladder` at the sizes of a setting."""
    requests, max_tokens = setting.size((4, 16), (16, 96), (64, 256))
    return ladder(setting.model, setting.tokenizer, setting.model_name, requests, max_tokens,
                  progress=setting.progress)
