"""How many requests fit: the articles' sum, and the same sum against bytes that were really allocated."""

import pytest
from tiny import SHAPES, tiny_config, tiny_model

from minillm.ladder.engine import Engine
from minillm.measure.capacity import GB, capacity
from minillm.model.config import ModelConfig


def articles(**changes):
    sums = {"model": "llama-3-8b", "memory_gb": 80, "weights_gb": 16, "overhead_gb": 4, "context": 4096}
    return capacity(**{**sums, **changes})


def test_the_articles_sum():
    found = articles()
    assert found.cache_gb == 60 and found.kv_bytes_per_token == 131_072
    assert found.request_gb == pytest.approx(0.537, abs=0.0005) and found.max_concurrent == 111


def test_half_the_context_twice_the_requests():
    assert articles(context=2048).max_concurrent == 223  # 111.76 requests of 4,096 tokens are 223.5 of 2,048


def test_weights_are_counted_where_no_size_is_given():
    found = articles(weights_gb=None)
    assert found.weights_gb == pytest.approx(16.06, abs=0.01) and found.max_concurrent == 111


def test_query_heads_that_share_a_key_save_their_factor():
    shared = tiny_config("t8-2", num_hidden_layers=30)
    alone = tiny_config("t8-2", num_hidden_layers=30, num_key_value_heads=8)
    one, four = (capacity(c, 1, 0.5, 0.1, 100).kv_bytes_per_token for c in (shared, alone))
    assert four == 4 * one


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kv_format", ["fp32", "bf16", "fp16"])
def test_the_sum_agrees_with_what_the_engine_allocates(shape, kv_format):
    model = tiny_model(shape)
    context, block_size, requests = 96, 16, 7
    found = capacity(model.config, memory_gb=1, weights_gb=0.5, overhead_gb=0.1, context=context, kv_format=kv_format)
    kv_memory = requests * round(found.request_gb * GB)
    engine = Engine(model, kv_format=kv_format, kv_memory=kv_memory, block_size=block_size)
    assert engine.stats().block_bytes == block_size * found.kv_bytes_per_token
    assert engine.stats().blocks_free * block_size == requests * context
    allocated = engine.executor.storage.nbytes  # one slot of scratch behind the pool
    assert allocated == kv_memory + found.kv_bytes_per_token
    smaller = capacity(model.config, kv_memory / GB, weights_gb=0, overhead_gb=0, context=context, kv_format=kv_format)
    assert smaller.max_concurrent == requests


def test_nothing_left_is_said_with_the_numbers():
    with pytest.raises(ValueError, match=r"140 GB of weights and 4 GB of overhead leave nothing of 80 GB"):
        capacity("llama-3-70b", 80, weights_gb=140)
    with pytest.raises(ValueError, match="unknown preset 'llama-9'; known: llama-3-70b"):
        capacity("llama-9", 80)
    with pytest.raises(ValueError, match="unknown KV format 'int3'; known: fp32"):
        articles(kv_format="int3")


def test_smollm_in_fp16_has_three_kv_heads():
    assert capacity(ModelConfig.preset("smollm2-135m"), 1, 0.27, 0.1, 1000, "fp16").kv_bytes_per_token == 23_040
