"""Ledger part B: what a batch buys, and what the policy that fills it is worth. Notebooks 02 and 03."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import mean, median, pstdev

import torch

from minillm.course.experiments.common import (
    WARM_UPS,
    count,
    decode_seconds,
    random_prompts,
    serve,
    step_row,
    timed_step,
    warm_up,
)
from minillm.course.figures import LATENCIES, flat
from minillm.course.setting import Setting, timed
from minillm.fast.engine import Engine
from minillm.fast.memory import native_format
from minillm.guard.inputs import check_at_least
from minillm.ladder.quantized import kv_bytes_per_token
from minillm.ladder.records import Records
from minillm.ladder.request import SamplingParams
from minillm.load.config import ModelConfig
from minillm.measure import metrics
from minillm.measure.measurement import EXACT, Measurement, Spread, provenance
from minillm.measure.reference import load_reference
from minillm.measure.roofline import StepShape
from minillm.measure.workload import WorkItem, articles_static, chat, lognormal

COUNTED_SHAPE = "smollm2-135m"  # any will do: nothing is computed


@timed
def batch_curve(setting: Setting) -> Measurement:
    """A decode step's time, and the tokens per second it gives, by the rows that share it."""
    rows, spreads = [], []
    sizes = setting.size((1, 8, 32, 64), (1, 2, 4, 8, 16, 32, 64, 128), (1, 2, 4, 8, 16, 32, 64, 128, 256))
    for number in setting.each("batch_curve", sizes):
        work, spread = timed_step(setting, "decode", number, tokens=16, repeats=setting.size(8, 16))
        rows.append({"rows": number, **step_row(setting, work, spread, number)})
        spreads.append(spread)
    for row in rows:
        row |= {"times_step": row["step_ms"] / rows[0]["step_ms"],
                "times_tokens": row["tokens_per_s"] / rows[0]["tokens_per_s"],
                "tokens_per_s_each": row["tokens_per_s"] / row["rows"]}
    return setting.measured("batch_curve", rows, spreads[0])


@timed
def decode(
    setting: Setting, sizes: tuple[Sequence[int], int, int] | None = None, against: str | None = None, **settings
) -> Measurement:
    """Decode steps by batch, beside the least that the device could need. `sizes`: batches, context, steps of each.

    Every row has the same context, so a step reads only weights and cache: it should be near
    the memory's bandwidth at batch 1, and move towards the matmul rate as the batch grows.
    against: "transformers" adds its `generate` on the same weights. settings: the engine's.
    ValueError for sizes below 1.
    """
    batches, context, steps = sizes or setting.size(
        ((1, 8), 32, 4), ((1, 8, 32), 128, 16), ((1, 8, 32, 64, 128), 1024, 64)
    )
    check_at_least(1, batch=min(batches), context=context, steps=steps)
    model, rows, spreads = setting.timed_model, [], []
    reference = load_reference(setting.timed_name, model) if against else None
    for batch in setting.each("decode", batches):
        found = {"minillm": decode_seconds(model, batch, context, steps, **settings)}
        if reference:
            prompts = random_prompts(batch, context, model.config.vocab_size)
            found["transformers, generate"] = generate_step_seconds(reference, prompts, steps, WARM_UPS)
        work = setting.work(StepShape.decode([context + steps // 2] * batch), kv_format=settings.get("kv_format"))
        rows += [{"engine": engine, "batch": batch, "context_tokens": context,
                  **step_row(setting, work, spread, batch)} for engine, spread in found.items()]
        spreads.append(found["minillm"])
    return setting.measured("decode", rows, spreads[0])


@torch.inference_mode()
def generate_step_seconds(reference, prompts: Sequence[Sequence[int]], steps: int, warmups: int) -> Spread:
    """Seconds between the logits of one step of `generate` and those of the next; prompts are of equal length."""
    ids = torch.tensor(prompts, device=reference.device)  # [B, S]
    synchronize, times = getattr(torch, reference.device.type).synchronize, []

    def note_time(_ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        synchronize()
        times.append(time.perf_counter())
        return logits

    tokens = warmups + steps + 1
    reference.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens,
        do_sample=False, eos_token_id=None, pad_token_id=0, logits_processor=[note_time],
    )
    return Spread.of([after - before for before, after in pairwise(times)][warmups:], warmups)


@timed
def knee(setting: Setting) -> Measurement:
    """A closed loop of more and more clients, and the knee by `knee_of`."""
    model, rows = setting.timed_model, []
    clients = setting.size((1, 4, 16, 32, 64), (1, 2, 4, 8, 16, 24, 32, 48, 64),
                           (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512))
    mean_tokens, prompt = setting.size((8, 8), (12, 8), (128, 64))
    warm_up(model)
    for number in setting.each("knee", clients):
        items = lognormal(0.3, max(number + number // 2, 4), mean_tokens, prompt, seed=setting.seed)
        records = serve(model, items, number, max_batch=number, max_step_tokens=max(256, 2 * number))
        setting.watch.compare_steps(records.steps)
        found = metrics.summary(records)
        rows.append({
            "clients": number, "mean_rows": found["batch"]["mean_rows"], "tokens_per_s": found["output_tokens_per_s"],
            "tokens_per_s_each": found["output_tokens_per_s"] / number, **flat(found, *LATENCIES),
        })
    at = knee_of(rows)
    for row in rows:
        row |= {"power": power(row), "knee": "<- knee" if row is at else ""}
    return setting.measured("knee", rows)


def power(row: dict) -> float:
    """Tokens per second over the median gap between tokens, in ms (power: Kleinrock, 1979)."""
    return row["tokens_per_s"] / row["itl_p50_ms"]


def knee_of(rows: Sequence[dict]) -> dict:
    """The row with the most power.

    Up to it throughput grows faster than latency, in per cent; past it, latency does. With
    steps of a + b n seconds for n rows it lies at n = a / b: where the rows' own work takes
    as long as what they share.
    """
    return max(rows, key=power)


def idle_slots(setting: Setting) -> Measurement:
    """Slot-steps that serve no request, under both policies. Counted without a forward, so no clock is in them."""
    cases = {
        "80 beside 800 tokens": (articles_static((80, 800)), 2),
        "one of 800, seven of 40": (articles_static(), 8),
        "32 answers of varied length, 4 slots": (lognormal(1.0, 32, 20, 8, seed=setting.seed), 4),
    }
    rows, config = [], ModelConfig.preset(COUNTED_SHAPE)
    for case, (items, slots) in cases.items():
        for batching in ("static", "continuous"):
            records = count(config, items, batching=batching, kv="slots", max_batch=slots)
            totals = records.totals
            rows.append({
                "case": case, "batching": batching, "slots": slots, "steps": totals["steps"],
                "idle_slot_steps": totals["idle_rows"],  # finished rows that were carried on
                "idle_share": totals["idle_rows"] / totals["rows"],
                "empty_while_waiting": sum(slots - step.rows for step in records.steps if step.waiting),
            })
    source = provenance(f"none ({COUNTED_SHAPE}'s shape)", "none", EXACT, setting.seed, None)
    return Measurement("idle_slots", source, rows)


# -- continuous over static -----------------------------------------------------------------------

SETUPS = {
    "static, slots": {"batching": "static", "kv": "slots"},
    "continuous, slots": {"batching": "continuous", "kv": "slots"},
    "continuous, paged": {"batching": "continuous", "kv": "paged"},
}


@timed
def continuous_vs_static(setting: Setting) -> Measurement:
    """The policies on the lengths of real chats, in the same bytes, which alone limit the batch.

    "answers only" has the same answers after prompts of one token: what the policy is worth
    once prompts are no part of it. Runs take turns, and the medians are compared.
    """
    model = setting.timed_model
    requests, scale, turns = setting.size((24, 0.04, 1), (32, 0.1, 3), (256, 1.0, 1))
    items = chat(requests, scale=scale, seed=setting.seed)
    token_bytes = kv_bytes_per_token(model.config, native_format(model.dtype))
    parts = {"whole run": items, "answers only": [replace(item, prompt_ids=item.prompt_ids[:1]) for item in items]}
    warm_up(model)
    runs: dict[tuple[str, str], list[dict]] = {(part, setup): [] for part in parts for setup in SETUPS}
    for part, setup in setting.each("continuous_vs_static", [*runs] * turns):
        memory = tokens_of_slots(parts[part], 8) * token_bytes
        records = serve(model, parts[part], kv_memory=memory, max_batch=64, **SETUPS[setup])
        runs[part, setup].append(metrics.summary(records))
    rows: list[dict] = []
    for (part, setup), found in runs.items():
        if found:  # else the budget was spent
            static = next((row["tokens_per_s"] for row in rows if row["part"] == part), None)
            rows.append({"part": part, "setup": setup, **policy_row(found, static)})
    return setting.measured("continuous_vs_static", rows)


def policy_row(runs: Sequence[dict], static: float | None) -> dict:
    """What the summaries of equal runs say; static: tokens per second of the first set-up, None for itself."""
    speeds, one = [run["output_tokens"] / run["busy_s"] for run in runs], runs[0]  # the counts are equal in all
    return {
        "steps": one["steps"], "mean_rows": one["batch"]["mean_rows"], "idle_share": one["batch"]["idle_share"],
        "tokens_per_s": median(speeds), "min": min(speeds), "max": max(speeds),
        "times_static": median(speeds) / static if static else 1.0,
    }


def tokens_of_slots(items: Sequence[WorkItem], slots: int) -> int:
    """Tokens that `slots` of the mean request reserve, and at least those of the longest request."""
    tokens = [len(item.prompt_ids) + item.max_tokens + 16 for item in items]
    return round(max(slots * mean(tokens), max(tokens)))


@timed
def gain_by_spread(setting: Setting, repeats: int | None = None) -> Measurement:
    """Continuous over static batching on the same requests, by the spread of their answers' lengths.

    Each is run `repeats` times, in turns, and which is first alternates. A step counts at the
    fastest of its repeats, which all did the same work: the rest is the machine's noise.
    """
    model, rows = setting.timed_model, []
    requests, mean_tokens, usual = setting.size((16, 8, 2), (32, 12, 4), (128, 64, 4))
    warm_up(model)
    for cv in setting.each("gain_by_spread", (0.0, 0.5, 1.0, 2.0)):
        items = lognormal(cv, requests=requests, mean_tokens=mean_tokens, prompt_tokens=8)
        runs: dict[str, list[Records]] = {"static": [], "continuous": []}
        for turn in range(repeats or usual):
            for batching in reversed(runs) if turn % 2 else runs:
                runs[batching].append(serve(model, items, batching=batching, max_batch=8))
        rows.append({"cv": cv, **spread_row(items, **runs)})
    return setting.measured("gain_by_spread", rows)


def undisturbed(runs: Sequence[Records]) -> float:
    """Seconds that the steps of a run take, each at the fastest of the runs. ValueError if their steps differ."""
    return sum(map(min, zip(*[[step.duration for step in run.steps] for run in runs], strict=True)))


def spread_row(items: Sequence[WorkItem], static: Sequence[Records], continuous: Sequence[Records]) -> dict:
    """The spread as drawn, steps and speeds of both policies; times_tokens_min and _max are those of single turns."""
    lengths = [item.output_tokens for item in items]
    seconds, steps = (undisturbed(static), undisturbed(continuous)), (len(static[0].steps), len(continuous[0].steps))
    ratios = [a.totals["busy_seconds"] / b.totals["busy_seconds"] for a, b in zip(static, continuous, strict=True)]
    return {
        "drawn_cv": pstdev(lengths) / mean(lengths), "static_steps": steps[0], "continuous_steps": steps[1],
        "times_steps": steps[0] / steps[1], "idle_share": metrics.batch(static[0])["idle_share"],
        "static_tokens_per_s": sum(lengths) / seconds[0], "continuous_tokens_per_s": sum(lengths) / seconds[1],
        "times_tokens_per_s": seconds[0] / seconds[1], "times_tokens_min": min(ratios), "times_tokens_max": max(ratios),
    }


@timed
def stall_by_chunking(setting: Setting, streams: int = 4) -> Measurement:
    """A long prompt arrives while streams decode: the gaps between their tokens, with and without chunks.

    With chunks a step has a budget of tokens; without, it takes the whole prompt. `gaps_ms`
    are the times between the tokens of stream 0, `gap_at_s` when each ended.
    """
    long_prompt, budget, tokens = setting.size((192, 64, 20), (1024, 64, 40), (8128, 256, 40))
    rows, model = [], setting.timed_model
    warm_up(model, long_prompt // 2)
    for prompt, step_budget in (("whole", long_prompt + streams), ("in chunks", budget)):
        engine = Engine(model, max_batch=streams + 1, max_context=long_prompt + tokens, prefix_cache=False,
                        max_step_tokens=step_budget, chunked_prefill=prompt == "in chunks")
        for number in range(streams):
            engine.add([number] * 16, SamplingParams(max_tokens=tokens, ignore_eos=True), number)
        while engine.has_work:
            engine.step()
            if len(engine.records.steps) == 8:
                engine.add([0] * long_prompt, SamplingParams(max_tokens=4, ignore_eos=True), "late")
        rows.append({"prompt": prompt, "step_budget": step_budget, **stall_row(engine.records)})
    return setting.measured("stall_by_chunking", rows)


def stall_row(records: Records) -> dict:
    """The gaps of stream 0, and the steps and the time that the late prompt took to its first token."""
    ended = {record.request_id: record for record in records.requests}
    stream, late = ended[0], ended["late"]
    gaps = (metrics.step_gaps(stream)[0] * 1e3).tolist()
    return {
        "p50_gap_ms": median(gaps), "longest_gap_ms": max(gaps),
        "prompt_steps": sum(step.start < late.first_token and "late" in step.members for step in records.steps),
        "late_ttft_ms": (late.first_token - late.arrival) * 1e3,
        "gaps_ms": gaps, "gap_at_s": [moment - stream.arrival for moment in stream.token_times[1:]],
    }
