"""Does the picture of a step's parts say what the cost model says, and does it end where memory does?"""

from __future__ import annotations

import pytest
from tiny import tiny_model

from minillm.course.setting import Setting
from minillm.course.show import capacity_plots
from minillm.course.show.capacity_plots import Device, Knees, knees, split
from minillm.load.config import ModelConfig
from minillm.measure.capacity import capacity
from minillm.measure.roofline import Ceilings, StepShape
from minillm.measure.service import Service
from minillm.measure.virtual import CostModel

LLAMA = ModelConfig.preset("llama-3.1-8b")
CASES = [(512, 1), (512, 400), (4096, 30), (16_384, 27)]


def device(overlap: float = 1.0, **changed) -> Device:
    """An 8B model in 16 bits on round numbers: 2 TB/s, 250 TFLOP/s, 1 ms fixed, 60 GB for keys and values."""
    settings = {"weight_bytes": 16e9, "bytes_per_s": 2e12, "kv_bytes_per_s": 2e12, "flops_per_s": 250e12,
                "overhead_s": 1e-3} | changed
    return Device(CostModel(LLAMA, "bf16", overlap=overlap, **settings), 60 * 10**9)


@pytest.mark.parametrize(("context", "rows"), CASES)
def test_the_parts_make_up_the_step(context, rows):
    """On a CPU as a sum; on a GPU the longer of reading and arithmetic, and the fixed part."""
    for overlap in (0.0, 1.0):
        cost = device(overlap).cost
        parts = split(cost, context, rows)
        reading, arithmetic = parts["weights"] + parts["cache"], parts["arithmetic"]
        whole = reading + arithmetic if overlap == 0 else max(reading, arithmetic)
        assert parts["step"] == pytest.approx(whole + parts["fixed"])
        assert parts["step"] == pytest.approx(1e3 * cost.seconds(StepShape.decode([context] * rows)))


@pytest.mark.parametrize("context", [512, 4096, 16_384])
@pytest.mark.parametrize("part", ["arithmetic", "cache"])
def test_a_knee_is_the_fewest_rows_whose_part_takes_longer_than_the_weights(context, part):
    found = getattr(knees(device(), context), part)
    before, at = (split(device().cost, context, rows) for rows in (found - 1, found))
    assert before[part] <= before["weights"] < at[part]


def test_memory_ends_where_the_capacity_sum_says():
    for context in (512, 4096, 16_384):
        fits = capacity("llama-3.1-8b", 80, 16, 4, context).max_concurrent
        assert knees(device(), context).memory == fits
    sheet = capacity_plots.by_data_sheet()
    assert knees(sheet, 4096).memory == Service().capacity(4096).max_concurrent


def test_each_knee_follows_what_makes_it():
    """A faster multiplier moves the first alone, shorter contexts the second, and bandwidth leaves the second."""
    plain = knees(device(), 4096)
    assert knees(device(flops_per_s=500e12), 4096).arithmetic == pytest.approx(2 * plain.arithmetic, abs=2)
    assert knees(device(flops_per_s=500e12), 4096).cache == plain.cache
    assert knees(device(bytes_per_s=4e12, kv_bytes_per_s=4e12), 4096).cache == plain.cache
    assert knees(device(), 2048).cache == pytest.approx(2 * plain.cache, abs=2)


def test_no_line_is_drawn_past_the_memory_and_no_knee_that_does_not_fit():
    figure = capacity_plots.step_parts({"one": device()}, "title")
    for ax, context in zip(figure.axes, (512, 4096, 16_384), strict=True):
        found = knees(device(), context)
        ends = [max(line.get_xdata()) for line in ax.lines if len(line.get_xdata()) > 2]
        assert set(ends) == {found.memory}
        marked = {line.get_xdata()[0] for line in ax.lines if line.get_marker() == "o"}
        assert marked == {knee for knee in (found.arithmetic, found.cache) if knee <= found.memory}
        assert f"{found.memory:,} fit" in ax.get_title(loc="left")


def test_the_knees_are_said_in_the_order_in_which_they_are_met():
    assert capacity_plots.knee_lines(Knees(142, 224, 893), 512) == [
        "512 tokens each: 893 fit", "arithmetic overtakes the weights at 142",
        "keys and values overtake the weights at 224"]
    assert capacity_plots.knee_lines(Knees(126, 28, 111), 4096)[1:] == ["keys and values overtake the weights at 28"]


def test_a_context_is_cut_at_what_the_model_can_take():
    assert device().contexts() == [512, 4096, 16_384]
    short = Device(CostModel.of_device("l4", ModelConfig.preset("llama-3-8b")), 10**9)
    assert short.contexts() == [512, 4096, 8192]


def test_this_machine_is_its_ceilings_and_what_a_measured_step_takes_beyond_them(monkeypatch):
    monkeypatch.setattr(Setting, "model", tiny_model())
    monkeypatch.setattr(Setting, "measure_ceilings", lambda self: Ceilings(1e15, 1e15))
    here = capacity_plots.this_machine(Setting(quick=True))
    assert here.cost.overlap == 0.0 and here.kv_memory == 1 << 30
    assert 0 < here.cost.overhead_s < 10 and split(here.cost, 32, 1)["weights"] < 1e-3
