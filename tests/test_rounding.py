"""Weights in fewer bits, for measuring: what each way loses and takes, and which one loses nothing."""

from __future__ import annotations

import pytest
import torch
from tiny import random_tensors, tiny_config, tiny_model

from minillm.course.experiments.formats import all_logits, weight_quality
from minillm.course.experiments.rounding import (
    FP8_WEIGHTS,
    OTHER_GROUPS,
    OWN_GROUPS,
    NotExact,
    fp8_per_channel,
    int4_across_outputs,
    int4_per_channel,
    int8_in_groups,
    int8_per_channel,
    q4_1,
    q8_0,
    rounded,
)
from minillm.course.setting import Setting
from minillm.load.weights import load_model, make_model

RANDOM = torch.Generator().manual_seed(0)
WEIGHT = torch.randn(96, 128, generator=RANDOM)


def stored_as_q4_1(shape: tuple[int, int], seed: int = 0) -> torch.Tensor:
    """A weight as a GGUF file gives it: q s + m in groups of 32, in which every group has a 0 and a 15."""
    make = torch.Generator().manual_seed(seed)
    codes = torch.randint(16, (shape[0], shape[1] // 32, 32), generator=make).float()
    codes[..., 3], codes[..., 17] = 0.0, 15.0
    scales = (0.001 + 0.01 * torch.rand(*codes.shape[:2], 1, generator=make)).half().float()
    least = (0.08 * torch.randn(*codes.shape[:2], 1, generator=make) - 0.08).half().float()
    return (codes * scales + least).flatten(1)


def stored_as_q8_0(shape: tuple[int, int], seed: int = 1) -> torch.Tensor:
    make = torch.Generator().manual_seed(seed)
    codes = torch.randint(-127, 128, (shape[0], shape[1] // 32, 32), generator=make).float()
    codes[..., 9] = 127.0
    return (codes * (0.001 + 0.001 * torch.rand(*codes.shape[:2], 1, generator=make)).half().float()).flatten(1)


@pytest.mark.parametrize("seed", range(5))
def test_in_the_groups_that_it_was_stored_in_a_weight_loses_nothing(seed):
    for way, weight, bits in ((q4_1, stored_as_q4_1((48, 96), seed), 5), (q8_0, stored_as_q8_0((48, 96), seed), 8.5)):
        dense, stored = way(weight)
        assert torch.equal(dense, weight) and 8 * stored / weight.numel() == bits


def test_a_weight_that_was_never_stored_so_is_refused():
    ours = stored_as_q4_1((48, 96))
    ours[5, 40] += 0.01
    with pytest.raises(NotExact, match="1 of 4,608 weights are none that Q4_1 holds"):
        q4_1(ours)
    for way in (q4_1, q8_0):
        with pytest.raises(NotExact, match="weights are none that"):
            way(WEIGHT)
        with pytest.raises(NotExact, match="a multiple of 32 inputs, not 72"):
            way(torch.zeros(8, 72))


@pytest.mark.parametrize(
    ("way", "bits", "steps"),
    [(int8_per_channel, 8 + 16 / 128, 254), (int8_in_groups, 8.25, 254), (int4_per_channel, 4 + 32 / 128, 30),
     (int4_across_outputs, 5.0, 30)],
)
def test_other_ways_lose_at_most_half_a_step_and_count_their_scales(way, bits, steps):
    dense, stored = way(WEIGHT)
    assert 8 * stored / WEIGHT.numel() == pytest.approx(bits)
    reach = float(WEIGHT.max() - WEIGHT.min()) if steps == 30 else 2 * float(WEIGHT.abs().max())
    assert 0 < float((dense - WEIGHT).abs().max()) <= reach / steps * 1.1


def test_fp8_loses_a_sixteenth_of_a_weight_at_most():
    dense, stored = fp8_per_channel(WEIGHT)
    large = WEIGHT.abs() > WEIGHT.abs().amax(1, keepdim=True) / 2**8
    assert float(((dense - WEIGHT).abs() / WEIGHT.abs())[large].max()) <= 1 / 16 + 1e-6
    assert 8 * stored / WEIGHT.numel() == 8 + 16 / 128


def test_smaller_groups_and_more_bits_lose_less():
    lost = {way: float((way(WEIGHT)[0] - WEIGHT).square().mean()) for way in (
        int8_in_groups, int8_per_channel, int4_across_outputs, int4_per_channel)}
    assert sorted(lost, key=lost.get) == list(lost)


def published_model():
    """A tiny model whose matrices were once Q4_1, and its head Q8_0."""
    config = tiny_config(vocab_size=128, intermediate_size=160, hidden_size=64)
    tensors = random_tensors(config)
    for number, (name, tensor) in enumerate(tensors.items()):
        if "proj" in name:
            tensors[name] = stored_as_q4_1(tensor.shape, number)
        if "embed" in name:
            tensors[name] = stored_as_q8_0(tensor.shape)
    return make_model(config, tensors)


def test_a_model_in_its_own_groups_gives_the_same_logits_bit_for_bit():
    model, ids = published_model(), torch.arange(40)
    exact, stored = rounded(model, OWN_GROUPS)
    assert torch.equal(all_logits(exact, ids), all_logits(model, ids)) and stored < model.weight_bytes / 4
    for other in (FP8_WEIGHTS, *OTHER_GROUPS):
        assert int((all_logits(rounded(model, other)[0], ids) != all_logits(model, ids)).sum()) > 0


def test_rounding_leaves_the_model_as_it_was():
    model, ids = tiny_model(), torch.arange(20)
    before = all_logits(model, ids)
    changed, _ = rounded(model, OTHER_GROUPS[1])
    assert torch.equal(all_logits(model, ids), before) and not torch.equal(all_logits(changed, ids), before)
    assert changed.embedding is model.embedding


def test_the_default_checkpoint_is_lossless_in_its_own_groups(smollm2_dir):
    model, ids = load_model(smollm2_dir), torch.arange(100, 132)
    exact, stored = rounded(model, OWN_GROUPS)
    differing = all_logits(exact, ids) != all_logits(model, ids)
    assert int(differing.sum()) == 0 and differing.numel() == 32 * 49_152
    assert 8 * stored / (model.weight_bytes / 4) == pytest.approx(5.74, abs=0.01)


def test_the_row_of_a_checkpoint_that_was_never_4_bit_is_left_out(monkeypatch, smollm2_dir):
    monkeypatch.setattr(Setting, "model", tiny_model(vocab_size=49_152))
    rows = {row["weights"]: row for row in weight_quality(Setting(quick=True)).rows}
    assert list(rows) == ["fp32", "int8", "int4", "fp8"]
    assert rows["fp32"]["differing_logits"] == 0 < rows["int4"]["differing_logits"] <= rows["int4"]["logits"]
