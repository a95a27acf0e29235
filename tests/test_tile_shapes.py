"""The table of attention's tile shapes: what a device gets, and what a sweep writes."""

import json
import math

import pytest
import torch
from tiny import tiny_config

from minillm.fast import tile_shapes
from minillm.fast.tile_shapes import ANY, table, tile_shape, write
from minillm.ladder.quantized import STORES

CPU = torch.device("cpu")


@pytest.fixture
def own_table(tmp_path, monkeypatch):
    """A copy of the table, which the package reads."""
    path = tmp_path / "tile_shapes.json"
    path.write_text(tile_shapes.TABLE.read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.setattr(tile_shapes, "TABLE", path)
    monkeypatch.setattr(tile_shapes, "device_name", lambda device: "a card of tomorrow")
    table.cache_clear()
    yield path
    table.cache_clear()


@pytest.mark.parametrize("kv_format", ["native", *(name for name in STORES if name not in ("fp32", "bf16", "fp16"))])
def test_every_format_has_a_shape_on_a_device_that_was_not_measured(kv_format, own_table):
    for block_m in (16, 32, 64):
        keys, stages, warps = tile_shape(kv_format, block_m, CPU)
        assert keys >= 16 and keys & (keys - 1) == 0 and stages >= 3 and warps in (4, 8)


def test_the_sweep_takes_what_is_quickest_over_all_steps_and_skips_what_does_not_run(own_table):
    """One shape is quickest at one step and slow at others; one is out of shared memory."""
    pytest.importorskip("triton", reason="Triton is published for Linux alone")
    from minillm.fast.tile_sweep import CANDIDATES, STEPS, sweep

    uneven, even, large = CANDIDATES[:3]

    def seconds(rows, storage, shape):
        if shape == large:
            return math.inf
        return {uneven: 0.5 if rows is STEPS["decode"][0] else 4.0, even: 1.0}.get(shape, 2.0)

    found = sweep(tiny_config(), "int8", CPU, seconds)
    assert found == {"decode": even, "prompt": even}


def test_what_a_sweep_wrote_is_what_its_device_gets_from_then_on(own_table):
    before = tile_shape("int8", 16, CPU)
    write(CPU, {"int8": {"decode": (128, 4, 8), "prompt": (32, 3, 4)}}, own_table)
    assert before != tile_shape("int8", 16, CPU) == (128, 4, 8) and tile_shape("int8", 64, CPU) == (32, 3, 4)
    assert tile_shape("native", 16, CPU) == tuple(table()[ANY]["native"]["decode"]), "not swept: as on any device"
    assert set(json.loads(own_table.read_text(encoding="utf-8"))) == {ANY, "a card of tomorrow"}
