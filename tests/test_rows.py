"""The rows of `limits`, `batching` and `memory` on a tiny model: counts are exact, times are at least times."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fakes import fake_engine
from tiny import tiny_model

from minillm.course.experiments import batching, common, limits, memory
from minillm.course.setting import Setting
from minillm.course.show.plots import knee_curve
from minillm.course.verdicts import HOLDS, TooSmall
from minillm.course.verdicts.batching import b6
from minillm.course.verdicts.memory import c3
from minillm.course.verdicts.reading import reading
from minillm.fast.packed import weight_bytes
from minillm.ladder.quantized import kv_bytes_per_token
from minillm.measure import metrics
from minillm.measure.measurement import Measurement
from minillm.measure.roofline import Ceilings, StepShape, StepWork, read_numbers
from minillm.measure.workload import chat, lognormal

VOCABULARY = 10_000  # random prompts draw ids below this
CEILINGS = Ceilings(1e15, 1e15)  # no tiny step comes near


def setting_for(model) -> Setting:
    setting = Setting(quick=True, model_name="tiny")
    setting.model, setting.measure_ceilings = model, lambda: CEILINGS
    return setting


@pytest.fixture(scope="module")
def setting():
    return setting_for(tiny_model(vocab_size=VOCABULARY))


def check_times(measurement: Measurement, *columns: str) -> None:
    measurement.check()
    assert measurement.provenance.device and measurement.provenance.model == "tiny"
    for row in measurement.rows:
        assert all(row[column] is None or 0 < row[column] < math.inf for column in columns)


def check_turns(measurement: Measurement, turns: int, *columns: str) -> None:
    """Each row has as many turns, and of each column its median between the lowest and the highest turn."""
    check_times(measurement, *columns)
    for row in measurement.rows:
        assert row["turns"] == turns
        for column in columns:
            low, middle, high = (row[f"{column}{end}"] for end in ("_min", "", "_max"))
            assert (low is middle is high is None) or low <= middle <= high


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
    decoding = common.Decoding(setting.model, 12, 40, steps=3 * (1 + 4))
    steps, warm = decoding.engine.records.steps, common.WARM_UPS - 1
    begun = len(steps)
    assert [len(decoding.seconds(4)) for _ in range(3)] == [4] * 3 and len(steps) == begun + 3 * 5
    assert all(step.decode_tokens == step.rows == 12 for step in steps[begun - warm :])


def test_steps_take_turns_and_each_turn_has_its_own_limits():
    setting, order = setting_for(tiny_model()), []
    limits = iter([Ceilings(2e9, 1e9), Ceilings(4e9, 2e9), Ceilings(3e9, 3e9)])
    setting.measure_ceilings = lambda: order.append("limits") or next(limits)

    def step(name: str, seconds: list[float]) -> common.TimedStep:
        return common.TimedStep(StepWork(1e9, 1e8), 10, lambda: order.append(name) or [seconds.pop(0)] * 3)

    steps = {"a": step("a", [1.0, 2.0, 4.0]), "b": step("b", [2.0, 2.0, 2.0])}
    found = common.time_in_turns(setting, "steps", steps, turns=3)
    assert order == ["limits", "a", "b", "limits", "b", "a", "limits", "a", "b"]
    row = found["a"].columns()
    assert [row[f"step_ms{end}"] for end in ("_min", "", "_max")] == [1000, 2000, 4000] and row["turns"] == 3
    assert [row[f"tokens_per_s{end}"] for end in ("_min", "", "_max")] == [2.5, 5, 10]
    assert [row[f"mbu{end}"] for end in ("_min", "", "_max")] == pytest.approx([1 / 12, 1 / 8, 1 / 2])
    assert row["mfu"] == pytest.approx(1 / 40) and row["least_ms"] == pytest.approx(1e3 / 3)


def test_a_budget_leaves_fewer_turns_and_no_spread_that_a_verdict_would_trust():
    setting = setting_for(tiny_model(vocab_size=VOCABULARY))
    setting.budget_s = 0.0
    setting.begin()
    (row,) = batching.batch_curve(setting).rows
    assert row["turns"] == 1 and setting.cut and not reading(row, "step_ms").recorded


def test_a_model_is_warmed_up_once(monkeypatch):
    model, seen = tiny_model(seed=7), []
    monkeypatch.setattr(common, "Engine", lambda *given, **settings: seen.append(settings) or fake_engine())
    for tokens in (32, 16, 32, 64):
        common.warm_up(model, tokens)
    assert [settings["max_context"] for settings in seen] == [32 + 16, 64 + 16]


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


def test_the_step_of_every_depth_takes_turns(setting):
    found = limits.decode_step(setting)
    check_turns(found, 5, "step_ms", "tokens_per_s", "mbu", "mfu")
    assert [row["layers"] for row in found.rows] == [2, 1]
    assert found.rows[0]["read_ms"] == pytest.approx(found.rows[0]["least_ms"])


def test_each_case_of_prefill_is_measured_once(setting):
    found = limits.prefill(setting)
    check_turns(found, 3, "step_ms", "tokens_per_s", "mbu", "mfu")
    cases = [(row["phase"], row["rows"], row["tokens_each"]) for row in found.rows]
    assert len(set(cases)) == len(cases) == 8 and ("prefill", 1, 512) in cases


def test_the_gauge_is_read_in_each_turn(setting):
    found = limits.utilisation(setting)
    check_turns(found, 3, "step_ms", "tokens_per_s", "busy_percent")
    assert [row["rows"] for row in found.rows] == [1, 64]


def test_cost_by_length(setting):
    found = limits.cost_by_length(setting)
    check_times(found, "recompute_ms", "cached_ms")
    check_turns(found, 3, "recompute_ms", "cached_ms", "mbu", "mfu")
    assert [row["recompute_ms"] is None for row in found.rows] == [False] * 5 + [True]
    assert {128, 512} <= {row["context_tokens"] for row in found.rows if row["recompute_ms"]}
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
    check_times(found, "min_ms", "max_ms")
    check_turns(found, 3, "step_ms", "tokens_per_s", "tokens_per_s_each", "mbu", "mfu")
    assert found.rows[0]["times_step"] == found.rows[0]["times_tokens"] == 1
    for row in found.rows:
        assert row["tokens_per_s"] * row["step_ms"] == pytest.approx(1000 * row["rows"])
        assert row["times_tokens"] * row["times_step"] == pytest.approx(row["rows"])
        assert row["tokens_per_s_each"] == pytest.approx(row["tokens_per_s"] / row["rows"])
        work = setting.work(StepShape.decode([16 + 6] * row["rows"]))
        assert row["mbu"] == pytest.approx(work.bytes / row["step_ms"] * 1e3 / 1e15)


def test_the_knee_lies_where_the_rows_own_work_takes_as_long_as_what_they_share():
    """Steps of 50 + 2 n ms for n rows: power n / (50 + 2 n)^2 is highest at n = 25."""
    rows = [{"clients": n, "tokens_per_s": 1e3 * n / (50 + 2 * n), "itl_p50_ms": 50.0 + 2 * n} for n in range(1, 101)]
    assert batching.knee_of(rows)["clients"] == 25
    figure = knee_curve(rows)
    assert "The knee lies at 25 clients: 100 make" in figure.get_suptitle().replace("\n", " ")


def answered(clients: int, step_ms: float, draw: np.random.Generator, noise: float) -> batching.Answered:
    """A closed loop of steps that take so long, each request's gaps by up to `noise` more or less."""
    requests, tokens = batching.REQUESTS_A_CLIENT * clients, 6
    own = step_ms / 1e3 * draw.uniform(1 - noise, 1 + noise, requests)
    return batching.Answered(np.full(requests, tokens), tokens * own, np.repeat(own, tokens - 1),
                             np.repeat(range(requests), tokens - 1), present=clients)


def planted(shared_ms: float, mood: float, clients=(1, 4, 16, 64, 128), noise: float = 0.02) -> list[dict]:
    """Rows of a knee where a step of n rows takes `shared_ms` + n ms, and each loop of each turn by up to `mood` more
    or less."""
    draw = np.random.default_rng(1)
    turns = [{n: answered(n, (shared_ms + n) * draw.uniform(1 - mood, 1 + mood), draw, noise)
              for n in clients} for _ in range(3)]
    rows = []
    for n in turns[0]:
        every = [turn[n].figures(np.arange(len(turn[n].tokens))) for turn in turns]
        speed, gap = np.median(every, axis=0).tolist()
        rows.append({"clients": n, "tokens_per_s": speed, "itl_p50_ms": gap})
    batching.add_powers(rows, turns, seed=0)
    return rows


def test_a_clear_knee_lies_in_a_narrow_interval():
    rows = planted(shared_ms=16, mood=0.0)
    assert [row["clients"] for row in batching.knees_of(rows)] == [16]
    assert [row["knee_share"] for row in rows] == [0, 0, 1, 0, 0] and rows[2]["knee"] == "<- knee"
    for row in rows:
        assert row["power_min"] <= row["power"] <= row["power_max"] < 1.1 * row["power_min"]
        assert row["power"] == pytest.approx(1e3 * row["clients"] / (16 + row["clients"]) ** 2, rel=0.02)


def test_the_interval_of_a_knee_is_wide_where_the_turns_differ_more_than_the_clients():
    rows = planted(shared_ms=16, mood=0.5, clients=(1, 4, 8, 12, 16, 24, 32, 128))
    assert len(batching.knees_of(rows)) >= 4 and sum(row["knee_share"] for row in rows) == pytest.approx(1)
    assert max(row["power_max"] / row["power_min"] for row in rows) > 2
    assert batching.knee_of(rows) in batching.knees_of(rows)


def test_the_same_resamples_are_drawn_again_from_the_same_seed():
    assert planted(16, 0.5) == planted(16, 0.5)


def test_a_client_of_a_closed_loop_asks_eight_times(setting):
    found = batching.knee(setting)
    check_turns(found, 3, "tokens_per_s", "itl_p50_ms")
    assert [row["clients"] for row in found.rows] == [1, 2, 4, 8]
    for row in found.rows:
        assert row["requests_per_client"] == 8 and 0.75 * row["clients"] <= row["mean_rows"] <= row["clients"]
        assert row["power"] == pytest.approx(row["tokens_per_s"] / row["itl_p50_ms"])
        assert row["power_min"] <= row["power"] <= row["power_max"]
    assert sum(row["knee_share"] for row in found.rows) == pytest.approx(1)


def test_the_figures_of_a_loop_are_those_of_its_summary(setting):
    """By Little's law, of all requests once: the tokens per second, and the median gap."""
    records = common.serve(setting.model, lognormal(0.5, 20, 8, 4), clients=4, max_batch=4)
    speed, gap = batching.Answered.of(records).figures(np.arange(20))
    summary = metrics.summary(records)
    assert speed == pytest.approx(summary["output_tokens_per_s"])
    assert gap == pytest.approx(1e3 * summary["itl_per_step_s"]["p50"])


def test_gain_by_spread(setting):
    found = batching.gain_by_spread(setting)
    check_turns(found, 3, "static_tokens_per_s", "continuous_tokens_per_s", "times_tokens_per_s")
    equal, varied = found.rows
    assert equal["static_steps"] == equal["continuous_steps"] == 4 * 8 and equal["idle_share"] == 0
    assert varied["times_steps"] > 1 and varied["idle_share"] > 0 and varied["drawn_cv"] == pytest.approx(1, abs=0.4)
    lengths = [item.output_tokens for item in lognormal(1.0, requests=32, mean_tokens=8)]
    assert varied["static_steps"] == sum(max(lengths[at : at + 8]) for at in range(0, 32, 8))
    assert all(row["turns"] == 1 for row in batching.gain_by_spread(setting, repeats=1).rows)


def test_continuous_vs_static_takes_its_gains_within_a_turn(setting):
    found = batching.continuous_vs_static(setting)
    check_turns(found, 3, "tokens_per_s", "times_static")
    assert [row["times_static_max"] for row in found.rows if row["setup"] == "static, slots"] == [1, 1]
    items = chat(12, scale=0.03, seed=setting.seed)
    token_bytes = kv_bytes_per_token(setting.config, "fp32")
    for row in found.rows[:3]:
        counted = common.count(setting.config, items, kv_memory=batching.tokens_of_slots(items, 8) * token_bytes,
                               max_batch=64, **batching.SETUPS[row["setup"]])
        assert row["steps"] == counted.totals["steps"] and row["requests"] == 12
    with pytest.raises(TooSmall, match="32 or more would tell"):
        b6(found.rows)


@pytest.mark.parametrize("together", [True, False])
def test_a_machine_that_slows_down_slows_the_loads_of_a_turn_alike(setting, monkeypatch, together):
    """Equal answers, so equal work under both policies. One after the other the second looks slower."""
    monkeypatch.setattr(Setting, "gpu", not together)
    readings = [0.0]

    def slowing() -> float:
        readings.append(readings[-1] + 1.01 ** len(readings))
        return readings[-1]

    monkeypatch.setattr(batching, "time", SimpleNamespace(perf_counter=slowing))
    items = lognormal(0.0, requests=8, mean_tokens=6, prompt_tokens=4)
    loads = {policy: batching.Load(items, None, {"batching": policy, "max_batch": 4})
             for policy in ("static", "continuous")}
    (run,) = batching.play_in_turns(setting, "loads", loads, turns=1)
    slower = run["continuous"].totals["busy_seconds"] / run["static"].totals["busy_seconds"]
    assert (0.9 < slower < 1.1) == together


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
    token_bytes = kv_bytes_per_token(setting.config, "fp32")
    slot = -(-(64 + 192 - 1) // 16) * 16 * token_bytes  # bytes, in whole blocks
    assert slots["reserved_mb"] <= 2 * slot / 1e6, "a mean of at most the whole pool"
    for row in found.rows:
        assert row["reserved_mb"] == pytest.approx(row["used_mb"] + row["wasted_mb"])
        assert row["wasted_mb"] == pytest.approx(row["wasted_share"] * row["reserved_mb"])
        held = row["tokens_each"] * row["mean_requests"] * token_bytes
        assert row["used_mb"] == pytest.approx(held / 1e6) and row["tokens_each"] > 64, "enough for C3 to tell"
    assert paged["wasted_share"] < slots["wasted_share"]
    assert c3(found.rows).word == HOLDS, "counted, so on every machine"


def test_prefix_sharing(setting):
    prompts = [[*range(40), 100 + i, 200 + i] for i in range(4)]
    found = memory.prefix_sharing(setting, prompts, tokens=2)
    check_turns(found, 3, "ttft_p50_ms")
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
