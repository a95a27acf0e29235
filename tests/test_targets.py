"""Targets: predictions follow from counts, and a GPU's file fills the column beside them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from minillm.course import targets
from minillm.course.targets import FAST, SLOW, TARGETS
from minillm.measure.measurement import Measurement, provenance

RECORDED = {  # rows as each experiment leaves them, and the figures to be read from them
    "decode": ("llama-3-8b", [{"engine": "minillm", "batch": 1, "mbu": 0.84, "step_ms": 4.0},
                              {"engine": "minillm", "batch": 8, "mbu": 0.8, "step_ms": 5.0}]),
    "bench_yardstick": ("qwen3-0.6b", [{"engine": "minillm", "tokens_per_s": 21_000.0}]),
    "decode_by_format": ("llama-3-8b", [{"kv_format": name, "times_native_step": times}
                                        for name, times in (("bf16", 1.0), ("int8", 0.9), ("fp8", 1.0))]),
    "bench_yardstick_32": ("qwen3-0.6b", [{"engine": "minillm", "times_minillm": 1.0},
                                          {"engine": "transformers, continuous batching", "times_minillm": 2.9}]),
}


@pytest.fixture
def record(tmp_path, monkeypatch):
    monkeypatch.setattr("minillm.measure.measurement.current_commit", lambda: "abc")

    def save(experiment: str, driver: str = "580, CUDA 13.0", **more) -> None:
        model, rows = RECORDED[experiment]
        source = replace(provenance(f"random:{model}", "bf16", "cpu", 0, None), driver=driver, device="NVIDIA H200")
        Measurement(experiment, replace(source, **more), rows).save(tmp_path)

    return save


def test_each_target_stands_beside_its_prediction_until_a_gpu_has_recorded_it(record, tmp_path):
    before = targets.targets(tmp_path)
    assert [row["recorded"] for row in before] == [targets.NOT_YET] * 5 and not any(row["met"] for row in before)
    for experiment in RECORDED:
        record(experiment)
    after = targets.targets(tmp_path)
    assert [row["recorded"] for row in after] == ["84%", "21,000", "1.25", "1.00", "2.9"]
    assert [row["met"] for row in after] == ["yes", "yes", "no", "yes", "no"]
    assert [row["predicted"] for row in after] == [row["predicted"] for row in before]
    assert all(row["where"] == "NVIDIA H200, commit abc" for row in after)


@pytest.mark.parametrize("other", [{"driver": "Linux"}, {"model": "random:smollm2-135m"}], ids=["a CPU", "a model"])
def test_what_a_cpu_or_another_model_left_is_no_record(other, record, tmp_path):
    record("decode", **other)
    assert targets.targets(tmp_path)[0]["recorded"] == targets.NOT_YET


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.experiment)
def test_a_prediction_moves_with_the_counts_it_is_made_of(target, monkeypatch):
    low, high = target.predict(SLOW), target.predict(FAST)
    assert low != high
    targets.yardstick_speed.cache_clear()
    monkeypatch.setattr(targets, "LAYER_KERNELS", 2 * targets.LAYER_KERNELS)
    assert target.predict(SLOW) != low
    targets.yardstick_speed.cache_clear()


def test_no_prediction_is_past_the_roofline():
    assert targets.share_of_copy(FAST) < FAST.products < 1
    assert targets.eight_over_one(FAST) > 1 and targets.coded_over_native(FAST) > 0.5
