"""Weights in 8 and 4 bits: what a code can hold, kernels against plain products, and a whole model in one call."""

from __future__ import annotations

import pytest
import torch
from tiny import random_tensors, tiny_config, tiny_model

from minillm import Engine, SamplingParams, quantize_weights
from minillm.fast.weight_formats import (
    WEIGHT_FORMATS,
    WEIGHT_GROUP,
    Int4Linear,
    Int8Linear,
    has_kernels,
    int4_dense,
    int4_weight,
    int8_weight,
)
from minillm.ladder.decode import NoCache
from minillm.ladder.quantized import even_group
from minillm.load.weights import make_model

BF16 = 2.0**-8  # a bf16 number is off by at most 2**-9 of itself; here twice: the activation, and the output


def random(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows + columns))


def dense(linear_kind, weight: torch.Tensor) -> torch.Tensor:
    """What the format makes of a weight [out, in]."""
    if linear_kind is Int8Linear:
        codes, scales = int8_weight(weight)
        return codes.float() * scales.float()[:, None]
    return int4_dense(*int4_weight(weight, even_group("columns", weight.shape[1], WEIGHT_GROUP)))


@pytest.mark.parametrize("shape", [(48, 64), (96, 576), (5, 12), (97, 72)])
@pytest.mark.parametrize("kind", [Int8Linear, Int4Linear])
def test_a_weight_is_off_by_at_most_half_a_step(kind, shape):
    """Half a step, and what a bf16 scale or middle adds at the largest weight."""
    weight = random(*shape)
    error = (dense(kind, weight) - weight).abs()
    if kind is Int8Linear:
        largest = weight.abs().amax(1, keepdim=True)
        assert (error <= largest / 254 + largest * BF16).all()
    else:
        groups = weight.unflatten(1, (-1, even_group("columns", shape[1], WEIGHT_GROUP)))
        low, high = groups.aminmax(dim=-1, keepdim=True)
        most = ((high - low) * (1 / 30 + BF16) + (low + high).abs() * BF16).expand_as(groups).flatten(1)
        assert (error <= most).all()


@pytest.mark.parametrize("kind", [Int8Linear, Int4Linear])
def test_quantising_twice_changes_nothing_more(kind):
    """QNT-4: codes from end to end, in steps of a scale that bf16 holds."""
    span = torch.arange(-8, 8) if kind is Int4Linear else torch.arange(-127, 128)
    weight = 0.25 * torch.stack([span.float().roll(i) for i in range(3)])
    assert torch.equal(dense(kind, weight), weight)
    once = dense(kind, random(7, 64) * 0.3)
    assert (dense(kind, once) - once).abs().max() <= once.abs().max() * BF16


@pytest.mark.parametrize("value", [0.0, 1e-38, 3.0])
@pytest.mark.parametrize("kind", [Int8Linear, Int4Linear])
def test_constant_weights_are_finite_and_zeros_stay_zero(kind, value):
    weight = torch.full((16, 64), value)
    scales = kind(weight).scales
    most = value * 2 * BF16 + (value > 0) * torch.finfo(torch.bfloat16).tiny
    assert scales.isfinite().all() and (dense(kind, weight) - weight).abs().max() <= most
    assert kind(weight)(torch.ones(1, 64)).isfinite().all()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("shape", [(48, 64), (96, 576), (33, 72)], ids=["fits", "nine groups", "no kernel"])
@pytest.mark.parametrize("kind", [Int8Linear, Int4Linear])
def test_products_are_those_of_the_dequantised_weight(kind, shape, rows, bias):
    """Off by the rounding to bf16 of activations and outputs at most, where a kernel computes it."""
    weight, x = random(*shape), random(rows, shape[1])
    shift = random(1, shape[0])[0] if bias else None
    layer, wanted = kind(weight, shift), x @ dense(kind, weight).T + (0 if shift is None else shift)
    assert layer.has_kernel == (has_kernels() and shape != (33, 72))
    most = x.abs() @ dense(kind, weight).abs().T * BF16
    assert ((layer(x) - wanted).abs() <= most).all()


def test_plain_products_where_there_are_no_kernels(monkeypatch):
    monkeypatch.setattr("minillm.fast.weight_formats.has_kernels", lambda: False)
    weight, x = random(48, 64), random(5, 64)
    for kind in (Int8Linear, Int4Linear):
        layer = kind(weight)
        assert not layer.has_kernel
        torch.testing.assert_close(layer(x), x @ dense(kind, weight).T, rtol=0, atol=1e-4)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("weight_format", WEIGHT_FORMATS)
def test_a_model_in_one_call(weight_format, packed):
    """The head is untied and 8 bits in both; the table and the model that was given stay as they are."""
    config = tiny_config("t8-2", vocab_size=160)
    plain = make_model(config, random_tensors(config), packed=packed)
    table = plain.embedding.clone()
    model = quantize_weights(plain, weight_format)
    assert plain.weight_format is None and not isinstance(plain.layers[0].qkv, Int8Linear | Int4Linear)
    assert model.embedding is plain.embedding and torch.equal(plain.embedding, table)
    assert isinstance(model.head, Int8Linear)
    kind = WEIGHT_FORMATS[weight_format][0]
    assert all(isinstance(getattr(layer, name), kind) for layer in model.layers for name in layer.LINEARS)
    numbers = plain.weight_bytes // 4
    assert 4 / 8 * numbers < model.weight_bytes < 8.6 / 8 * numbers  # codes, and scales besides
    tokens = torch.arange(12)
    with torch.inference_mode():
        ours, exact = (m.forward(tokens, tokens, NoCache()) for m in (model, plain))
    worst = {"int8": 0.02, "int4": 0.25}[weight_format]  # 3.5 and 15 steps to a deviation, over two layers
    assert (ours - exact).norm() / exact.norm() < worst
    answer = Engine(model, max_context=64).generate([[1, 2, 3]], SamplingParams(max_tokens=5))[0]
    assert len(answer.token_ids) == 5


def test_bytes_counted_are_bytes_kept():
    weight, bias = random(96, 576), random(1, 96)[0]
    eight, four = Int8Linear(weight, bias), Int4Linear(weight, bias)
    assert eight.weight_bytes == 96 * 576 + 96 * 2 + 96 * 4
    assert four.weight_bytes == 96 * 576 // 2 + 96 * 9 * 4 + 96 * 4
    assert four.codes.nbytes + four.scales.nbytes + bias.nbytes == four.weight_bytes


def test_what_cannot_be_quantised_is_refused_in_words():
    model = tiny_model("t8-2")
    with pytest.raises(ValueError, match="unknown weight format 'int3'; known: int8, int4"):
        quantize_weights(model, "int3")
    with pytest.raises(ValueError, match="int8 already: load the model again"):
        quantize_weights(quantize_weights(model, "int8"), "int4")
    with pytest.raises(ValueError, match="a row of 7 is odd: take int8"):
        Int4Linear(random(4, 7))
