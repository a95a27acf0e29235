"""The rows of `limits`, `batching` and `memory` on a tiny model: counts are exact, times are at least times."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import pytest
import torch
from tiny import tiny_model

from minillm.course.experiments import batching, common, limits, memory
from minillm.course.setting import Setting
from minillm.course.show.plots import knee_curve
from minillm.fast.packed import weight_bytes
from minillm.ladder.quantized import kv_bytes_per_token
from minillm.measure.measurement import Measurement
from minillm.measure.roofline import Ceilings, StepShape, read_numbers
from minillm.measure.workload import lognormal

VOCABULARY = 10_000  # random prompts draw ids below this
CEILINGS = Ceilings(1e15, 1e15)  # no tiny step comes near


def setting_for(model) -> Setting:
    setting = Setting(quick=True, model_name="tiny")
    setting.model, setting.ceilings = model, CEILINGS
    return setting


@pytest.fixture(scope="module")
def setting():
    return setting_for(tiny_model(vocab_size=VOCABULARY))


def check_times(measurement: Measurement, *columns: str) -> None:
    measurement.check()
    assert measurement.provenance.device and measurement.provenance.model == "tiny"
    for row in measurement.rows:
        assert all(row[column] is None or 0 < row[column] < math.inf for column in columns)


# -- common ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["static", "continuous"])
def test_counting_without_a_model_counts_what_a_model_would_do(setting, policy):
    items = lognormal(1.0, requests=10, mean_tokens=6, prompt_tokens=8)
    settings = {"batching": policy, "kv": "slots", "max_batch": 4}
    counted, real = common.count(setting.config, items, **settings), common.serve(setting.model, items, **settings)
    for name in ("steps", "rows", "idle_rows", "output_tokens", "prompt_tokens"):
        assert counted.totals[name] == real.totals[name]
    assert [s.blocks_live for s in counted.steps] == [s.blocks_live for s in real.steps]


def test_equal_answers_leave_the_policies_nothing_to_differ_in(setting):
    """Step for step the same rows, tokens and blocks: a measured ratio other than 1 is the machine's noise."""
    runs = []
    for policy in ("static", "continuous"):
        items = lognormal(0.0, requests=32, mean_tokens=12, prompt_tokens=8)
        records = common.count(setting.config, items, batching=policy, max_batch=8)
        runs.append([replace(step, start=0.0, duration=0.0) for step in records.steps])
    assert runs[0] == runs[1] and len(runs[0]) == 4 * 12


@pytest.mark.parametrize("prompt_step_tokens", [16_384, 256])
def test_timed_decode_steps_have_all_rows_and_only_those(setting, prompt_step_tokens, monkeypatch):
    """Also where the prompts take several steps, in which the first rows decode already."""
    monkeypatch.setattr(common, "PROMPT_STEP_TOKENS", prompt_step_tokens)
    spread = common.decode_seconds(setting.model, rows=12, context=40, steps=5)
    assert (spread.repeats, spread.warmups) == (5, common.WARM_UPS) and 0 < spread.min <= spread.max


# -- limits ---------------------------------------------------------------------------------------


def test_roofline_steps_know_their_work_and_their_shares(setting):
    found = limits.roofline_steps(setting)
    check_times(found, "step_ms")
    one, eight, *prefills = found.rows
    assert [row["tokens"] for row in found.rows] == [1, 8, 16, 64]
    assert eight["gflop"] == pytest.approx(8 * one["gflop"]) and prefills[0]["gflop"] > one["gflop"]
    assert eight["flop_per_byte"] > 5 * one["flop_per_byte"]
    for row in found.rows:
        seconds = row["step_ms"] / 1e3
        assert row["mbu"] == pytest.approx(row["read_mb"] * 1e6 / seconds / 1e15)
        assert row["mfu"] == pytest.approx(row["gflop"] * 1e9 / seconds / 1e15)
        assert row["least_ms"] < row["step_ms"] and row["tokens_per_s"] == pytest.approx(row["tokens"] / seconds)


def test_a_narrow_model_has_as_many_layers_and_heads_and_fewer_weights():
    model = tiny_model(hidden_size=256, intermediate_size=512, head_dim=32, vocab_size=VOCABULARY)
    wide, narrow = model.config, limits.narrowed(model, 4).config
    for name in ("num_hidden_layers", "num_attention_heads", "num_key_value_heads"):
        assert getattr(narrow, name) == getattr(wide, name)
    assert read_numbers(narrow) < read_numbers(wide) / 15
    with pytest.raises(ValueError, match="256, 512, 32 by 5"):
        limits.narrowed(model, 5)


def test_mbu_falls_with_the_width():
    model = tiny_model(hidden_size=256, intermediate_size=512, head_dim=32, vocab_size=VOCABULARY)
    wide, slim = limits.mbu_by_width(setting_for(model)).rows
    assert (wide["width"], slim["width"]) == (256, 64)
    assert wide["read_mb"] > 15 * slim["read_mb"] and wide["mbu"] > slim["mbu"]


def test_fewer_layers_read_fewer_bytes_and_share_the_weights():
    model = tiny_model()
    half = limits.first_layers(model, 1)
    per_layer = sum(weight_bytes(getattr(model.layers[0], name)) for name in model.layers[0].LINEARS)
    assert model.weight_bytes - half.weight_bytes == per_layer and half.layers[0] is model.layers[0]
    assert model.config.num_hidden_layers == 2 == len(model.layers), "the model itself keeps them all"


def test_cost_by_length(setting):
    found = limits.cost_by_length(setting)
    check_times(found, "recompute_ms", "cached_ms")
    assert [row["recompute_ms"] is None for row in found.rows] == [False] * 4 + [True]
    first, last = found.rows[0], found.rows[-1]
    stored = (last["context_tokens"] - first["context_tokens"]) * kv_bytes_per_token(setting.config, "fp32")
    assert last["read_mb"] - first["read_mb"] == pytest.approx(stored / 1e6)


def test_a_timed_step_computes_what_it_says(setting):
    """The cached step attends to all `length` tokens, and does the same again at every call."""
    step = limits.one_cached_step(setting.model, 9)
    assert step() == step()
    assert limits.one_recomputing_step(setting.model, 9)().shape == ()


def test_the_processor_gauge_counts_work_and_not_waiting():
    readings: list[float] = []
    with limits.processor_gauge(readings):
        time.sleep(0.2)
    with limits.processor_gauge(readings):
        sum(i * i for i in range(300_000))
    idle, busy = readings
    assert idle < busy


def without_nvml():
    raise ModuleNotFoundError("nvidia-ml-py does not seem to be installed")


@pytest.mark.parametrize(("read", "seen"), [(without_nvml, set()), (lambda: 97, {97})])
def test_the_gpu_gauge_reads_what_nvml_says_and_nothing_without_it(monkeypatch, read, seen):
    monkeypatch.setattr(torch.cuda, "utilization", read)
    readings: list[float] = []
    with limits.gpu_gauge(readings):
        time.sleep(0.25)
    ended = list(readings)
    time.sleep(0.15)
    assert set(readings) == seen and readings == ended, "it stops at the end of the block"


# -- batching -------------------------------------------------------------------------------------


def test_batch_curve(setting):
    found = batching.batch_curve(setting)
    check_times(found, "step_ms", "min_ms", "max_ms", "tokens_per_s", "mbu")
    assert found.rows[0]["times_step"] == found.rows[0]["times_tokens"] == 1
    for row in found.rows:
        assert row["tokens_per_s"] * row["step_ms"] == pytest.approx(1000 * row["rows"])
        assert row["times_tokens"] * row["times_step"] == pytest.approx(row["rows"])
        assert row["tokens_per_s_each"] == pytest.approx(row["tokens_per_s"] / row["rows"])
        work = setting.work(StepShape.decode([16 + 4] * row["rows"]))
        assert row["mbu"] == pytest.approx(work.bytes / row["step_ms"] * 1e3 / 1e15)


def test_the_knee_lies_where_the_rows_own_work_takes_as_long_as_what_they_share():
    """Steps of 50 + 2 n ms for n rows: power n / (50 + 2 n)^2 is highest at n = 25."""
    rows = [{"clients": n, "tokens_per_s": 1e3 * n / (50 + 2 * n), "itl_p50_ms": 50.0 + 2 * n} for n in range(1, 101)]
    assert batching.knee_of(rows)["clients"] == 25
    figure = knee_curve(rows)
    assert "The knee lies at 25 clients: 100 make" in figure.get_suptitle().replace("\n", " ")


def test_gain_by_spread(setting):
    found = batching.gain_by_spread(setting, repeats=1)
    check_times(found, "static_tokens_per_s", "continuous_tokens_per_s")
    equal, _, varied, _ = found.rows
    assert equal["static_steps"] == equal["continuous_steps"] == 2 * 8 and equal["idle_share"] == 0
    assert varied["times_steps"] > 1 and varied["idle_share"] > 0 and varied["drawn_cv"] == pytest.approx(1, abs=0.4)
    lengths = [item.output_tokens for item in lognormal(1.0, requests=16, mean_tokens=8)]
    assert varied["static_steps"] == sum(max(lengths[at : at + 8]) for at in range(0, 16, 8))


def test_a_disturbance_in_one_repeat_does_not_count(setting):
    items = lognormal(0.0, requests=4, mean_tokens=3)
    once, again = (common.serve(setting.model, items, max_batch=4) for _ in range(2))
    for records, slow in ((once, 0), (again, 2)):
        records.steps[:] = [replace(step, duration=9.0 if i == slow else 0.5) for i, step in enumerate(records.steps)]
    assert batching.undisturbed([once, again]) == 0.5 * len(once.steps)
    again.steps.pop()
    with pytest.raises(ValueError):
        batching.undisturbed([once, again])


def test_stall_by_chunking(setting):
    found = batching.stall_by_chunking(setting, streams=3)
    check_times(found, "p50_gap_ms", "longest_gap_ms", "late_ttft_ms")
    whole, chunked = found.rows
    assert whole["step_budget"] == 192 + 3 and whole["prompt_steps"] == 1
    assert chunked["prompt_steps"] == -(-192 // (64 - 3))  # the streams take their tokens first
    assert len(whole["gaps_ms"]) == len(whole["gap_at_s"]) == len(chunked["gaps_ms"]) == 19


# -- memory ---------------------------------------------------------------------------------------


def test_memory_by_policy(setting):
    found = memory.memory_by_policy(setting)
    check_times(found, "tokens_per_s")
    slots, paged = found.rows
    assert slots["peak_requests"] == 2 < paged["peak_requests"]
    slot = -(-(16 + 64 - 1) // 16) * 16 * kv_bytes_per_token(setting.config, "fp32")  # bytes, in whole blocks
    assert slots["reserved_mb"] <= 2 * slot / 1e6, "a mean of at most the whole pool"
    for row in found.rows:
        assert row["reserved_mb"] == pytest.approx(row["used_mb"] + row["wasted_mb"])
        assert row["wasted_mb"] == pytest.approx(row["wasted_share"] * row["reserved_mb"])
    assert paged["wasted_share"] < slots["wasted_share"]


def test_prefix_sharing(setting):
    prompts = [[*range(40), 100 + i, 200 + i] for i in range(4)]
    found = memory.prefix_sharing(setting, prompts, tokens=2)
    check_times(found, "ttft_p50_ms", "ttft_max_ms")
    alone, shared, changed = found.rows
    assert (alone["computed"], alone["found"]) == (4 * 42, 0)
    assert (shared["computed"], shared["found"]) == (4 * 42 - 3 * 32, 3 * 32), "whole blocks only: 32 of the 40"
    assert (changed["computed"], changed["found"]) == (4 * 42, 0), "one changed token in front loses everything"


def test_cost_of_blocks(setting):
    check_times(memory.cost_of_blocks(setting), "contiguous_ms", "paged_ms", "times")


# -- setting --------------------------------------------------------------------------------------


def test_a_gpu_times_its_own_model_in_place_of_the_default_one_alone(monkeypatch):
    monkeypatch.setattr(Setting, "gpu", True)
    assert Setting().timed_name == "random:llama-3-8b" and Setting(model_name="mine").timed_name == "mine"
    assert Setting(gpu_model="other").timed_name == "other"
