"""The notebooks' experiments on a tiny model: what they count is exact, and what they time is at least a time."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from tiny import tiny_model

from minillm.course.experiments import chapters
from minillm.ladder.quantized import kv_bytes_per_token
from minillm.measure.measurement import Measurement
from minillm.measure.workload import lognormal

VOCABULARY = 10_000  # random prompts draw ids below this


@pytest.fixture(scope="module")
def model():
    return tiny_model(vocab_size=VOCABULARY)


def check_times(measurement: Measurement, *columns: str) -> None:
    assert measurement.provenance.device and measurement.provenance.model == "tiny"
    for row in measurement.rows:
        assert all(row[column] is None or 0 < row[column] < math.inf for column in columns)


@pytest.mark.parametrize("batching", ["static", "continuous"])
def test_counting_without_a_model_counts_what_a_model_would_do(model, batching):
    items = lognormal(1.0, requests=10, mean_tokens=6, prompt_tokens=8)
    settings = {"batching": batching, "kv": "slots", "max_batch": 4}
    counted, real = chapters.count(model.config, items, **settings), chapters.serve(model, items, **settings)
    for name in ("steps", "rows", "idle_rows", "output_tokens", "prompt_tokens"):
        assert counted.totals[name] == real.totals[name]
    assert [s.blocks_live for s in counted.steps] == [s.blocks_live for s in real.steps]


def test_cost_by_length(model):
    found = chapters.cost_by_length(model, "tiny", (4, 16, 64), recompute_up_to=16, repeats=1)
    check_times(found, "recompute_ms", "cached_ms")
    assert [row["recompute_ms"] is None for row in found.rows] == [False, False, True]
    first, last = found.rows[0], found.rows[-1]
    assert last["read_mb"] - first["read_mb"] == pytest.approx(60 * kv_bytes_per_token(model.config, "fp32") / 1e6)


def test_a_timed_step_computes_what_it_says(model):
    """The cached step attends to all `length` tokens, and does the same again at every call."""
    step = chapters.one_cached_step(model, 9)
    assert step() == step()
    assert chapters.one_recomputing_step(model, 9)().shape == ()


def test_batch_curve(model):
    found = chapters.batch_curve(model, "tiny", (1, 2, 4), prompt_tokens=5, steps=6)
    check_times(found, "step_ms", "min_ms", "max_ms", "tokens_per_s")
    assert found.rows[0]["times_step"] == found.rows[0]["times_tokens"] == 1
    for row in found.rows:
        assert row["tokens_per_s"] * row["step_ms"] == pytest.approx(1000 * row["rows"])
        assert row["times_tokens"] * row["times_step"] == pytest.approx(row["rows"])


def test_gain_by_spread(model):
    found = chapters.gain_by_spread(model, "tiny", (0.0, 1.0), requests=12, mean_tokens=6, max_batch=4)
    check_times(found, "static_tokens_per_s", "continuous_tokens_per_s")
    equal, varied = found.rows
    assert equal["static_steps"] == equal["continuous_steps"] == 3 * 6 and equal["idle_share"] == 0
    assert varied["times_steps"] > 1 and varied["idle_share"] > 0 and varied["drawn_cv"] == pytest.approx(1, abs=0.4)
    lengths = [item.output_tokens for item in lognormal(1.0, requests=12, mean_tokens=6)]
    assert varied["static_steps"] == sum(max(lengths[at : at + 4]) for at in range(0, 12, 4))


def test_equal_answers_leave_the_policies_nothing_to_differ_in(model):
    """Step for step the same rows, tokens and blocks: a measured ratio other than 1 is the machine's noise."""
    runs = []
    for batching in ("static", "continuous"):
        items = lognormal(0.0, requests=32, mean_tokens=12, prompt_tokens=8)
        records = chapters.count(model.config, items, batching=batching, max_batch=8)
        runs.append([replace(step, start=0.0, duration=0.0) for step in records.steps])
    assert runs[0] == runs[1] and len(runs[0]) == 4 * 12


def test_a_disturbance_in_one_repeat_does_not_count(model):
    once, again = (chapters.serve(model, lognormal(0.0, requests=4, mean_tokens=3), max_batch=4) for _ in range(2))
    for records, slow in ((once, 0), (again, 2)):
        records.steps[:] = [replace(step, duration=9.0 if i == slow else 0.5) for i, step in enumerate(records.steps)]
    assert chapters.undisturbed([once, again]) == 0.5 * len(once.steps)
    again.steps.pop()
    with pytest.raises(ValueError):
        chapters.undisturbed([once, again])


def test_stall_by_chunking(model):
    found = chapters.stall_by_chunking(model, "tiny", long_prompt=60, streams=3, budget=16, after=4, tokens=24)
    check_times(found, "p50_gap_ms", "longest_gap_ms", "late_ttft_ms")
    whole, chunked = found.rows
    assert whole["prompt_steps"] == 1
    assert chunked["prompt_steps"] == -(-60 // (16 - 3))  # the streams take their tokens first
    assert len(whole["gaps_ms"]) == len(whole["gap_at_s"]) == len(chunked["gaps_ms"]) == 23


def test_memory_by_policy(model):
    items = lognormal(1.0, requests=16, mean_tokens=8, prompt_tokens=8)
    token_bytes = kv_bytes_per_token(model.config, "fp32")
    slot = -(-(8 + items[0].max_tokens - 1) // 16) * 16  # tokens in whole blocks
    found = chapters.memory_by_policy(model, "tiny", items, kv_memory=4 * slot * token_bytes)
    check_times(found, "tokens_per_s")
    slots, paged = found.rows
    assert slots["peak_requests"] == 4 < paged["peak_requests"]
    assert slots["reserved_mb"] <= 4 * slot * token_bytes / 1e6, "a mean of at most the whole pool"
    for row in found.rows:
        assert row["reserved_mb"] == pytest.approx(row["used_mb"] + row["wasted_mb"])
        assert row["wasted_mb"] == pytest.approx(row["wasted_share"] * row["reserved_mb"])
    assert paged["wasted_share"] < slots["wasted_share"]


def test_prefix_sharing(model):
    prefix = list(range(40))
    prompts = [[*prefix, 100 + i, 200 + i] for i in range(4)]
    found = chapters.prefix_sharing(model, "tiny", prompts, tokens=2)
    check_times(found, "ttft_p50_ms", "ttft_max_ms")
    alone, shared, changed = found.rows
    assert (alone["computed"], alone["found"]) == (4 * 42, 0)
    assert (shared["computed"], shared["found"]) == (4 * 42 - 3 * 32, 3 * 32), "whole blocks only: 32 of the 40"
    assert (changed["computed"], changed["found"]) == (4 * 42, 0), "one changed token in front loses everything"


def test_cost_of_blocks(model):
    found = chapters.cost_of_blocks(model, "tiny", (8, 40), steps=3)
    check_times(found, "contiguous_ms", "paged_ms", "times")


def test_an_experiment_can_be_saved_and_read_back(model, tmp_path):
    found = chapters.batch_curve(model, "tiny", (1, 2), prompt_tokens=5, steps=4)
    found.save(tmp_path)
    assert Measurement.load(found.provenance.device, "batch_curve", tmp_path) == found
