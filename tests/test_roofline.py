"""Least bytes and FLOPs of a step, against counts made another way."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import SHAPES, random_tensors, tiny_config
from torch.utils.flop_counter import FlopCounterMode

from minillm.ladder.quantized import kv_bytes_per_token
from minillm.load.config import ModelConfig
from minillm.load.weights import make_model
from minillm.measure.roofline import (
    Ceilings,
    StepShape,
    StepWork,
    least_work,
    macs_per_token,
    measured_bandwidth,
    measured_matmul_rate,
    read_numbers,
    weight_numbers,
)

FAMILIES = {
    "tied": {},
    "untied": {"tie_word_embeddings": False},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "qwen2": {"model_type": "qwen2", "attention_bias": True},
    "qwen3": {"model_type": "qwen3"},
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shape", SHAPES)
def test_weights_are_counted_as_the_model_holds_them(shape, family):
    config = tiny_config(shape, **FAMILIES[family])
    tensors = random_tensors(config)
    assert weight_numbers(config) == sum(tensor.numel() for tensor in tensors.values())
    read = sum(t.numel() for name, t in tensors.items() if config.tie_word_embeddings or "embed" not in name)
    assert read_numbers(config) == read


class NoAttention:
    def attend(self, layer, q, k, v):
        return q


@pytest.mark.parametrize("shape", SHAPES)
def test_matrix_flops_are_two_per_multiply_accumulate(shape):
    config = tiny_config(shape)
    model = make_model(config, random_tensors(config), packed=False)
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        model.forward(torch.arange(7), torch.arange(7), NoAttention(), logit_rows=torch.tensor([2, 6]))
    work = least_work(config, "fp32", StepShape(tokens=7, due=2, stored=0, pairs=0), weight_bytes=0)
    assert work.flops == counter.get_total_flops()


@pytest.mark.parametrize("shape", SHAPES)
def test_attention_flops_are_those_of_its_two_products(shape):
    config, context = tiny_config(shape), 11
    q = torch.ones(config.num_attention_heads, 1, config.head_dim)
    k = torch.ones(config.num_attention_heads, context, config.head_dim)
    with FlopCounterMode(display=False) as counter:
        (q @ k.transpose(1, 2)) @ k
    with_, without = (
        least_work(config, "fp32", StepShape(1, 1, context, pairs), 0).flops for pairs in (context, 0)
    )
    assert with_ - without == config.num_hidden_layers * counter.get_total_flops()


@given(rows=st.lists(st.tuples(st.integers(0, 50), st.integers(1, 20), st.booleans()), min_size=1, max_size=8))
@settings(deadline=None)
def test_a_step_s_shape_is_the_sum_over_its_rows(rows):
    shape = StepShape.of(rows)
    assert shape.tokens == sum(count for _, count, _ in rows) and shape.due == sum(due for *_, due in rows)
    assert shape.stored == sum(start + count for start, count, _ in rows)
    assert shape.pairs == sum(position + 1 for start, count, _ in rows for position in range(start, start + count))


def test_a_decode_reads_weights_once_and_every_context():
    config = ModelConfig.preset("smollm2-135m")
    assert kv_bytes_per_token(config, "fp16") == 23_040  # 69,120 would count query heads
    shape = StepShape.decode([100, 200, 300])
    assert shape == StepShape(tokens=3, due=3, stored=600, pairs=600)
    assert least_work(config, "fp16", shape, weight_bytes=270e6).bytes == 270e6 + 600 * 23_040


@pytest.mark.parametrize(("preset", "gigabytes"), [("llama-3-8b", 15.0), ("qwen3-0.6b", 1.19), ("smollm2-135m", 0.269)])
def test_bytes_read_a_step_in_16_bits(preset, gigabytes):
    assert read_numbers(ModelConfig.preset(preset)) * 2 / 1e9 == pytest.approx(gigabytes, rel=0.01)


def test_the_roofline_is_the_longer_of_its_two_times_and_shares_are_of_its_limits():
    ceilings = Ceilings(bytes_per_s=100.0, flops_per_s=1000.0)
    assert ceilings.least_seconds(StepWork(bytes=200, flops=1000)) == 2.0
    assert ceilings.least_seconds(StepWork(bytes=200, flops=5000)) == 5.0
    assert ceilings.mbu(StepWork(200, 1000), seconds=4.0) == 0.5
    assert ceilings.mfu(StepWork(200, 1000), seconds=4.0) == 0.25
    assert ceilings.bound_by(StepWork(bytes=200, flops=1000)) == "reading"
    assert ceilings.bound_by(StepWork(bytes=50, flops=1000)) == "multiplying"


def test_decoding_is_bound_by_bandwidth_and_prefill_by_compute():
    config = ModelConfig.preset("llama-3-8b")
    ceilings = Ceilings(bytes_per_s=1.7e12, flops_per_s=250e12)
    weights = 2 * read_numbers(config)
    for shape, bound in ((StepShape.decode([1000]), "reading"), (StepShape.of([(0, 2048, True)]), "multiplying")):
        work = least_work(config, "bf16", shape, weights)
        assert ceilings.bound_by(work) == bound


def test_the_ceilings_can_be_measured_here():
    assert 1e8 < measured_bandwidth("cpu", megabytes=8) < 1e13
    assert 1e8 < measured_matmul_rate("cpu", torch.float32, size=128) < 1e15
    assert sum(macs_per_token(ModelConfig.preset("smollm2-135m"))) == pytest.approx(134.5e6, rel=0.01)
