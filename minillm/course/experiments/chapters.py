"""The experiments of notebooks 01 to 04, each a function that measures and returns a `Measurement`.

A notebook runs them at sizes that suit the device at hand; the same functions, run on
another device and saved, give the rows that are shown beside.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import mean, median, pstdev

import numpy as np
import torch

from minillm.fast.engine import Engine
from minillm.ladder.continuous import StepPlan
from minillm.ladder.decode import NoCache, SequenceCache
from minillm.ladder.quantized import kv_bytes_per_token, native_format
from minillm.ladder.records import Records, RequestRecord
from minillm.ladder.request import SamplingParams
from minillm.load.config import ModelConfig
from minillm.measure import metrics
from minillm.measure.measurement import Measurement, Spread, provenance, time_seconds
from minillm.measure.workload import WorkItem, lognormal, play, random_ids


def measured(experiment: str, model, name: str, rows: list[dict], spread: Spread, seed: int = 0) -> Measurement:
    """Rows with their provenance; `spread` is that of the first row's main figure."""
    return Measurement(experiment, provenance(name, native_format(model.dtype), model.device, seed, spread), rows)


def warm_up(model, prompt_tokens: int = 32) -> None:
    """Let the allocator and the kernels see a prompt and a step before anything is timed."""
    prompts = [list(range(prompt_tokens))] * 2
    Engine(model, max_context=prompt_tokens + 16).generate(prompts, SamplingParams(max_tokens=3))


class NoForward:
    """An executor that computes nothing: every row that is due gets token 0. The scheduler cannot tell."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config

    def run(self, plan: StepPlan) -> list[list[int]]:
        return [[0] for row in plan.rows if row.samples]


def serve(model, items: Sequence[WorkItem], **settings) -> Records:
    """All at once on a new engine; its records."""
    longest = max(len(item.prompt_ids) + item.max_tokens for item in items)
    engine = Engine(model, **{"max_context": longest, "prefix_cache": False, **settings})
    play(engine, items, clients=len(items))
    return engine.records


def count(config: ModelConfig, items: Sequence[WorkItem], **settings) -> Records:
    """The same without a forward: scheduler and memory are the real ones, so every count is exact, and no time is."""
    return serve(None, items, executor=NoForward(config), **{"kv_format": "fp32", **settings})


# -- 01: the loop ---------------------------------------------------------------------------------


def cost_by_length(
    model, name: str, lengths: Iterable[int], recompute_up_to: int = 1024, repeats: int = 3
) -> Measurement:
    """What the next token costs behind a text of so many tokens: all of it computed again, and with a cache.

    Computing all of it is also what the prefill of such a prompt costs. The tokens are
    arbitrary: the arithmetic does not depend on which they are.
    """
    rows, spreads = [], []
    for length in lengths:
        cached = time_seconds(one_cached_step(model, length), model.device, warmups=1, repeats=repeats + 2)
        again = None
        if length <= recompute_up_to:
            again = time_seconds(one_recomputing_step(model, length), model.device, warmups=1, repeats=repeats)
        read = model.weight_bytes + length * kv_bytes_per_token(model.config, native_format(model.dtype))
        rows.append({
            "context_tokens": length, "recompute_ms": again and again.median * 1e3, "cached_ms": cached.median * 1e3,
            "read_mb": read / 1e6,
        })
        spreads.append(cached)
    return measured("cost_by_length", model, name, rows, spreads[0])


def one_recomputing_step(model, length: int):
    """A function that computes the token after `length` tokens from nothing."""
    tokens = torch.arange(length, device=model.device) % model.config.vocab_size  # [N]
    positions = torch.arange(length, device=model.device)

    @torch.inference_mode()
    def step():
        return model.forward(tokens, positions, NoCache(), positions[-1:]).argmax()

    return step


def one_cached_step(model, length: int):
    """A function that feeds the last of `length` tokens, the others being stored. Each call does the same again."""
    cache = SequenceCache(model, length)
    cache.length = length - 1  # zeros are stored: the clock does not mind
    position = torch.tensor([length - 1], device=model.device)

    @torch.inference_mode()
    def step():
        return model.forward(position.new_zeros(1), position, cache).argmax()

    return step


# -- 02: static batches ---------------------------------------------------------------------------


def batch_curve(
    model, name: str, rows: Iterable[int] = (1, 2, 4, 8, 16, 32), prompt_tokens: int = 16, steps: int = 12
) -> Measurement:
    """A decode step's time, and the tokens per second it gives, against the rows that share it."""
    warm_up(model)
    table, spreads = [], []
    for number in rows:
        engine = Engine(model, max_batch=number, max_context=prompt_tokens + steps + 2, prefix_cache=False,
                        max_step_tokens=max(256, number * prompt_tokens))  # all prompts in one step
        draw = np.random.default_rng(number)
        items = [WorkItem(0.0, random_ids(draw, prompt_tokens, 1.0), steps + 2) for _ in range(number)]
        play(engine, items, clients=number)
        times = [s.duration for s in engine.records.steps if s.decode_tokens == number]
        spread = Spread.of(times[1:])
        spreads.append(spread)
        table.append({
            "rows": number, "step_ms": spread.median * 1e3, "min_ms": spread.min * 1e3, "max_ms": spread.max * 1e3,
            "tokens_per_s": number / spread.median,
        })
    for row in table:
        row["times_step"] = row["step_ms"] / table[0]["step_ms"]
        row["times_tokens"] = row["tokens_per_s"] / table[0]["tokens_per_s"]
    return measured("batch_curve", model, name, table, spreads[0])


# -- 03: continuous batching ----------------------------------------------------------------------


SPREADS = (0.0, 0.5, 1.0, 2.0)  # of the answers' lengths: standard deviation over mean


def gain_by_spread(
    model, name: str, spreads: Iterable[float] = SPREADS, requests: int = 32, mean_tokens: int = 24,
    max_batch: int = 8, repeats: int = 1,
) -> Measurement:
    """Continuous over static batching on the same requests, against the spread of their answers' lengths.

    Each is run `repeats` times, in turns, and who goes first changes. A step counts at the fastest of its repeats,
    which all did the same work: what slows one down comes from elsewhere.
    """
    warm_up(model)
    rows = []
    for cv in spreads:
        items = lognormal(cv, requests=requests, mean_tokens=mean_tokens, prompt_tokens=8)
        runs: dict[str, list[Records]] = {"static": [], "continuous": []}
        for turn in range(repeats):
            for batching in reversed(runs) if turn % 2 else runs:
                runs[batching].append(serve(model, items, batching=batching, max_batch=max_batch))
        rows.append(spread_row(cv, items, runs))
    speeds = [row["continuous_tokens_per_s"] for row in rows]
    return measured("gain_by_spread", model, name, rows, Spread.of(speeds, warmups=1))


def undisturbed(runs: Sequence[Records]) -> float:
    """Seconds that the steps of a run take, each at the fastest of the runs. ValueError if their steps differ."""
    return sum(map(min, zip(*[[step.duration for step in run.steps] for run in runs], strict=True)))


def spread_row(cv: float, items: Sequence[WorkItem], runs: dict[str, list[Records]]) -> dict:
    """One row of `gain_by_spread`: the spread as asked and as drawn, steps and seconds of both.

    times_tokens_min and _max are those of single turns, the noise of the ratio.
    """
    lengths = [item.output_tokens for item in items]
    static, continuous = (metrics.summary(same[0]) for same in runs.values())
    static_s, continuous_s = map(undisturbed, runs.values())
    ratios = [a.totals["busy_seconds"] / b.totals["busy_seconds"] for a, b in zip(*runs.values(), strict=True)]
    return {
        "cv": cv, "drawn_cv": pstdev(lengths) / mean(lengths),
        "static_steps": static["steps"], "continuous_steps": continuous["steps"],
        "times_steps": static["steps"] / continuous["steps"], "idle_share": static["batch"]["idle_share"],
        "static_tokens_per_s": sum(lengths) / static_s, "continuous_tokens_per_s": sum(lengths) / continuous_s,
        "times_tokens_per_s": static_s / continuous_s, "times_tokens_min": min(ratios),
        "times_tokens_max": max(ratios),
    }


def stall_by_chunking(
    model, name: str, long_prompt: int = 1024, streams: int = 4, budget: int = 64, after: int = 8, tokens: int = 48
) -> Measurement:
    """Streams that are being read, and one long prompt: how long they stand still, with and without chunks.

    budget: tokens a step with chunked prefill; without, a step takes the whole prompt.
    after: tokens that each stream has when the long prompt arrives. `gaps_ms` are the
    times between the tokens of the first stream, `gap_at_s` when each ended.
    """
    warm_up(model, long_prompt // 2)
    rows = []
    for chunked in (False, True):
        size = budget if chunked else long_prompt + streams
        records, late = with_long_prompt(model, long_prompt, streams, after, tokens, max_step_tokens=size,
                                         chunked_prefill=chunked)
        rows.append(stall_row(records, late, chunked, size))
    return measured("stall_by_chunking", model, name, rows, Spread.of([row["p50_gap_ms"] for row in rows], warmups=1))


def with_long_prompt(
    model, long_prompt: int, streams: int, after: int, tokens: int, **settings
) -> tuple[Records, RequestRecord]:
    """Run the streams, add the long prompt once they have `after` tokens; all records, and the late-comer's."""
    draw = np.random.default_rng(0)
    engine = Engine(model, max_batch=streams + 1, max_context=long_prompt + tokens, prefix_cache=False, **settings)
    for stream in range(streams):
        engine.add(random_ids(draw, 16, 1.0), SamplingParams(max_tokens=tokens, ignore_eos=True), stream)
    late = random_ids(draw, long_prompt, 1.0)
    while engine.has_work:
        engine.step()
        if len(engine.records.steps) == after:
            engine.add(late, SamplingParams(max_tokens=4, ignore_eos=True), "late")
    return engine.records, next(life for life in engine.records.requests if life.request_id == "late")


def stall_row(records: Records, late: RequestRecord, chunked: bool, budget: int) -> dict:
    """One row of `stall_by_chunking`."""
    stream = next(life for life in records.requests if life.request_id == 0)
    gaps = (metrics.step_gaps(stream)[0] * 1e3).tolist()
    start = stream.arrival
    return {
        "prompt": "in chunks" if chunked else "whole", "step_budget": budget,
        "p50_gap_ms": median(gaps), "longest_gap_ms": max(gaps),
        "prompt_steps": sum(step.start < late.first_token and "late" in step.members for step in records.steps),
        "late_ttft_ms": (late.first_token - late.arrival) * 1e3,
        "gaps_ms": gaps, "gap_at_s": [moment - start for moment in stream.token_times[1:]],
    }


# -- 04: memory by block --------------------------------------------------------------------------


def memory_by_policy(model, name: str, items: Sequence[WorkItem], kv_memory: int, max_batch: int = 64) -> Measurement:
    """The same requests in the same bytes, as slots and as pages: how many ran at once, and what was wasted."""
    warm_up(model)
    rows = []
    for kv in ("slots", "paged"):
        records = serve(model, items, kv=kv, kv_memory=kv_memory, max_batch=max_batch)
        rows.append(memory_row(kv, records, kv_bytes_per_token(model.config, native_format(model.dtype))))
    return measured("memory_by_policy", model, name, rows, Spread.of([row["tokens_per_s"] for row in rows], warmups=1))


def memory_row(kv: str, records: Records, token_bytes: int) -> dict:
    """One row of `memory_by_policy`: means over the steps, each counting once, so that no clock is in them."""
    summary, steps, block_size = metrics.summary(records), records.steps, records.block_size
    reserved = mean(step.blocks_live for step in steps) * block_size * token_bytes / 1e6
    used = mean(step.kv_tokens for step in steps) * token_bytes / 1e6
    return {
        "kv": kv, "peak_requests": summary["batch"]["peak_rows"], "mean_requests": summary["batch"]["mean_rows"],
        "reserved_mb": reserved, "used_mb": used, "wasted_mb": reserved - used, "wasted_share": 1 - used / reserved,
        "steps": summary["steps"], "preemptions": summary["preemptions"],
        "tokens_per_s": summary["output_tokens"] / summary["busy_s"],
    }


def prefix_sharing(model, name: str, prompts: Sequence[Sequence[int]], tokens: int = 4) -> Measurement:
    """The same prompts one after another: without sharing, with it, and with another first token each.

    TTFT is that of the prompts behind the first, which has nobody to share with.
    """
    vocabulary = model.config.vocab_size
    changed = [[(prompt[0] + i) % vocabulary, *prompt[1:]] for i, prompt in enumerate(prompts)]
    warm_up(model, len(prompts[0]) // 2)
    rows = []
    for case, cache, asked in (
        ("no sharing", False, prompts), ("shared prefix", True, prompts), ("first token changed", True, changed)
    ):
        engine = Engine(model, prefix_cache=cache, max_context=max(map(len, prompts)) + tokens, max_batch=8)
        for prompt in asked:
            engine.generate([prompt], SamplingParams(max_tokens=tokens, ignore_eos=True))
        later = [(life.first_token - life.arrival) * 1e3 for life in engine.records.requests[1:]]
        rows.append({
            "case": case, "prompt_tokens": sum(map(len, asked)), "computed": engine.records.totals["prompt_tokens"],
            "found": engine.records.totals["cached_tokens"], "ttft_p50_ms": median(later), "ttft_max_ms": max(later),
        })
    return measured("prefix_sharing", model, name, rows, Spread.of([row["ttft_p50_ms"] for row in rows], warmups=1))


def cost_of_blocks(model, name: str, contexts: Iterable[int], steps: int = 8) -> Measurement:
    """A decode step of one sequence: keys and values in one run (rung 1), and gathered block by block (rung 4)."""
    rows, spreads = [], []
    for context in contexts:
        run = time_seconds(one_cached_step(model, context), model.device, warmups=1, repeats=steps)
        paged = Spread.of(paged_steps(model, context, steps))
        rows.append({
            "context_tokens": context, "contiguous_ms": run.median * 1e3, "paged_ms": paged.median * 1e3,
            "times": paged.median / run.median,
        })
        spreads.append(run)
    return measured("cost_of_blocks", model, name, rows, spreads[0])


def paged_steps(model, context: int, steps: int) -> list[float]:
    """Seconds of single decode steps of an engine behind about `context` tokens."""
    engine = Engine(model, max_batch=1, max_context=context + steps + 2, max_step_tokens=512)
    prompt = random_ids(np.random.default_rng(0), context - 1, 1.0)
    engine.generate([prompt], SamplingParams(max_tokens=steps + 2, ignore_eos=True))
    return [s.duration for s in engine.records.steps if not s.prompt_tokens][1:]
