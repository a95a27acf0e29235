"""Experiments of part B: what a batch buys, and what the policy that fills it is worth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import mean, median

from minillm.course.experiments import chapters
from minillm.course.setting import Setting
from minillm.ladder.quantized import kv_bytes_per_token, native_format
from minillm.ladder.records import Records
from minillm.load.config import ModelConfig
from minillm.measure import metrics
from minillm.measure.measurement import EXACT, Measurement, Spread, provenance
from minillm.measure.roofline import StepShape
from minillm.measure.workload import WorkItem, articles_static, chat, lognormal

COUNTED_SHAPE = "smollm2-135m"  # any will do: nothing is computed


def batch_curve(setting: Setting) -> Measurement:
    """A decode step's time against its rows, beside its limits."""
    rows = setting.size((1, 8, 32, 64), (1, 2, 4, 8, 16, 32, 64, 128), (1, 2, 4, 8, 16, 32, 64, 128, 256))
    prompt_tokens, steps = 16, setting.size(8, 16)
    rows = setting.each("batch_curve", rows)
    found = chapters.batch_curve(setting.timed_model, setting.timed_name, rows, prompt_tokens, steps)
    for row in found.rows:
        shape = StepShape.decode([prompt_tokens + steps // 2] * row["rows"])
        row |= {"tokens_per_s_each": row["tokens_per_s"] / row["rows"], **setting.shares(shape, row["step_ms"] / 1e3)}
    return found


# -- who holds a slot -----------------------------------------------------------------------------


def idle_slots(setting: Setting) -> Measurement:
    """Slot-steps that serve nobody, under both policies. Counted without a forward, so no clock is in them."""
    cases = {
        "80 beside 800 tokens": (articles_static((80, 800)), 2),
        "one of 800, seven of 40": (articles_static(), 8),
        "32 answers of varied length, 4 slots": (lognormal(1.0, 32, 20, 8, seed=setting.seed), 4),
    }
    rows = []
    for case, (items, slots) in cases.items():
        for batching in ("static", "continuous"):
            records = chapters.count(
                ModelConfig.preset(COUNTED_SHAPE), items, batching=batching, kv="slots", max_batch=slots
            )
            rows.append({"case": case, "batching": batching, "slots": slots, **idle_row(records, slots)})
    source = provenance(f"none ({COUNTED_SHAPE}'s shape)", "none", EXACT, setting.seed, None)
    return Measurement("idle_slots", source, rows)


def idle_row(records: Records, slots: int) -> dict:
    """Idle slot-steps: of finished rows that were carried on, and of empty slots while somebody waited."""
    totals = records.totals
    empty = sum(slots - step.rows for step in records.steps if step.waiting)
    return {
        "steps": totals["steps"], "idle_slot_steps": totals["idle_rows"],
        "idle_share": totals["idle_rows"] / totals["rows"], "empty_while_waiting": empty,
    }


# -- continuous over static -----------------------------------------------------------------------

SETUPS = {
    "static, slots": {"batching": "static", "kv": "slots"},
    "continuous, slots": {"batching": "continuous", "kv": "slots"},
    "continuous, paged": {"batching": "continuous", "kv": "paged"},
}


def continuous_vs_static(setting: Setting) -> Measurement:
    """The policies on the lengths of real chats, in the same bytes, which alone limit the batch.

    "answers only" has the same answers behind prompts of one token: what the policy is worth
    once prompts are no part of it. Runs take turns, and the medians are compared.
    """
    model = setting.timed_model
    requests, scale, turns = setting.size((24, 0.04, 1), (32, 0.1, 3), (256, 1.0, 1))
    items = chat(requests, scale=scale, seed=setting.seed)
    token_bytes = kv_bytes_per_token(model.config, native_format(model.dtype))
    parts = {"whole run": items, "answers only": [replace(item, prompt_ids=item.prompt_ids[:1]) for item in items]}
    chapters.warm_up(model)
    runs: dict[tuple[str, str], list[dict]] = {(part, setup): [] for part in parts for setup in SETUPS}
    for part, setup in setting.each("continuous_vs_static", [*runs] * turns):
        memory = memory_of(parts[part], 8) * token_bytes
        records = chapters.serve(model, parts[part], kv_memory=memory, max_batch=64, **SETUPS[setup])
        runs[part, setup].append(metrics.summary(records))
    rows: list[dict] = []
    for (part, setup), found in runs.items():
        if found:  # else the budget was spent
            static = next((row["tokens_per_s"] for row in rows if row["part"] == part), None)
            rows.append({"part": part, "setup": setup, **policy_row(found, static)})
    return chapters.measured("continuous_vs_static", model, setting.timed_name, rows,
                             Spread.of([row["tokens_per_s"] for row in rows], warmups=1))


def policy_row(runs: Sequence[dict], static: float | None) -> dict:
    """What the summaries of equal runs say; static: tokens per second of the first set-up, None for itself."""
    speeds, one = [run["output_tokens"] / run["busy_s"] for run in runs], runs[0]  # the counts are equal in all
    return {
        "steps": one["steps"], "mean_rows": one["batch"]["mean_rows"], "idle_share": one["batch"]["idle_share"],
        "tokens_per_s": median(speeds), "min": min(speeds), "max": max(speeds),
        "times_static": median(speeds) / static if static else 1.0,
    }


def memory_of(items: Sequence[WorkItem], slots: int) -> int:
    """Tokens of so many slots of the mean request, and at least of the longest one."""
    tokens = [len(item.prompt_ids) + item.max_tokens + 16 for item in items]
    return round(max(slots * mean(tokens), max(tokens)))


def gain_by_spread(setting: Setting) -> Measurement:
    """Continuous over static batching against the spread of the answers' lengths."""
    requests, mean_tokens, repeats = setting.size((16, 8, 2), (32, 12, 4), (128, 64, 4))
    spreads = setting.each("gain_by_spread", chapters.SPREADS)
    return chapters.gain_by_spread(setting.timed_model, setting.timed_name, spreads, requests=requests,
                                   mean_tokens=mean_tokens, max_batch=8, repeats=repeats)


def stall_by_chunking(setting: Setting) -> Measurement:
    """How long streams stand still while a long prompt is read, whole and in chunks."""
    long_prompt, budget, tokens = setting.size((192, 64, 20), (1024, 64, 40), (8128, 256, 40))
    return chapters.stall_by_chunking(
        setting.timed_model, setting.timed_name, long_prompt, budget=budget, tokens=tokens
    )
