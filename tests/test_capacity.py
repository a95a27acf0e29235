"""How many requests fit: the articles' sum, and the same sum against bytes that were really allocated."""

import json

import pytest
from tiny import SHAPES, tiny_config, tiny_model

from minillm.cli import main
from minillm.fast.engine import Engine
from minillm.load.config import PRESETS, ModelConfig
from minillm.measure.capacity import GB, capacity, preset_rows, server_flags, what_changes_it


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
@pytest.mark.parametrize("kv_format", ["fp32", "bf16", "fp16", "int8", "fp8", "int4"])
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


def test_a_pool_holds_no_more_than_the_sum_says_and_a_block_less_at_most():
    """The cache of a request is rounded up to blocks, and the pool down."""
    model, block_size = tiny_model("t8-2"), 16
    for kv_format in ("fp32", "int8", "fp8", "int4"):
        found = capacity(model.config, memory_gb=2e-3, weights_gb=1e-3, overhead_gb=0, context=100, kv_format=kv_format)
        engine = Engine(model, kv_format=kv_format, kv_memory=round(found.cache_gb * GB), block_size=block_size)
        fits = engine.stats().blocks_free // -(-100 // block_size)
        assert found.max_concurrent * 100 / 112 - 1 < fits <= found.max_concurrent


# -- what changes it ------------------------------------------------------------------------------


def test_what_changes_the_sum():
    rows = {row["case"]: row for row in what_changes_it("llama-3-8b", memory_gb=80, weights_gb=16)}
    fits = {case: row["max_concurrent"] for case, row in rows.items()}
    assert fits == {
        "as asked": 111, "half the context": 223, "int8 keys and values": 220, "int4 keys and values": 357,
        "a KV head for each query head, not for 4": 27,
    }
    assert rows["half the context"]["times"] == pytest.approx(223 / 111)


def test_a_model_that_shares_no_kv_head_has_no_such_row():
    cases = [row["case"] for row in what_changes_it("smollm2-1.7b", memory_gb=80, kv_format="int8")]
    assert cases == ["as asked", "half the context", "int4 keys and values"]


def test_every_preset_has_its_bytes_per_token():
    rows = {row["model"]: row for row in preset_rows()}
    assert set(rows) == set(PRESETS)
    assert rows["qwen3-0.6b"]["bf16_kv_bytes_per_token"] == 114_688
    assert rows["llama-3-8b"]["int8_kv_bytes_per_token"] == 66_560
    assert rows["llama-3-8b"]["weights_gb"] == pytest.approx(16.06, abs=0.01)


def test_the_flags_of_other_engines_say_the_same():
    flags = server_flags(articles(kv_format="fp8"))
    assert flags["vLLM"] == (
        "--max-model-len 4096 --gpu-memory-utilization 0.95 --max-num-seqs 220 --kv-cache-dtype fp8"
    )
    assert flags["SGLang"].endswith("--max-running-requests 220 --kv-cache-dtype fp8_e4m3")
    assert "kv-cache-dtype" not in server_flags(articles())["vLLM"]
    assert "for int4 there is no flag" in server_flags(articles(kv_format="int4"))["vLLM"]


@pytest.mark.parametrize(("overhead_gb", "share"), [(0.0, "0.99"), (0.001, "0.99"), (0.4, "0.99"), (4.0, "0.95"),
                                                    (2.0, "0.97"), (8.0, "0.90")])  # fmt: skip
def test_the_share_of_other_engines_leaves_the_overhead_free(overhead_gb, share):
    flags = server_flags(articles(overhead_gb=overhead_gb))
    assert f"--gpu-memory-utilization {share} " in flags["vLLM"]
    assert f"--mem-fraction-static {share} " in flags["SGLang"]


@pytest.mark.parametrize("changes", [dict(memory_gb=20.1), dict(memory_gb=20.1, kv_format="fp8", context=8192)],
                         ids=str)  # fmt: skip
def test_where_no_request_fits_no_flags_are_printed(changes):
    assert articles(**changes).max_concurrent == 0
    for line in server_flags(articles(**changes)).values():
        assert "no flags: not one request of" in line and "--" not in line


@pytest.mark.parametrize(("model", "context", "most"), [("llama-3-8b", 100_000, 8192), ("llama-3-8b", 8193, 8192),
                                                        ("qwen2.5-0.5b", 40_000, 32_768)])  # fmt: skip
def test_a_context_beyond_the_models_own_is_refused_with_both(model, context, most):
    with pytest.raises(ValueError, match=f"context {context:,} > {most:,} positions"):
        capacity(model, 80, context=context)
    assert "--max-model-len" in server_flags(capacity(model, 80, context=most))["vLLM"]


def test_half_of_one_token_is_one_token():
    assert [row["context_tokens"] for row in what_changes_it("llama-3-8b", memory_gb=80, context=1)][:2] == [1, 1]


@pytest.mark.parametrize(("kv_format", "fit", "rule"), [("bf16", 111, 111), ("int8", 220, 222)])
def test_the_command_prints_the_sum_and_its_json(kv_format, fit, rule, capsys):
    sums = "--model llama-3-8b --memory-gb 80 --weights-gb 16 --overhead-gb 4 --context 4096 --json -"
    assert main(["capacity", *sums.split(), "--kv-format", kv_format]) == 0
    *text, last = capsys.readouterr().out.strip().splitlines()
    found = json.loads(last)
    assert (found["max_concurrent"], found["rule_of_thumb"]) == (fit, rule)
    assert any(f"{fit} requests at once" in line for line in text)


def test_nothing_left_is_said_with_the_numbers():
    with pytest.raises(ValueError, match=r"140 GB of weights and 4 GB of overhead leave nothing of 80 GB"):
        capacity("llama-3-70b", 80, weights_gb=140)
    with pytest.raises(ValueError, match="unknown preset 'llama-9'; known: llama-3-70b"):
        capacity("llama-9", 80)
    with pytest.raises(ValueError, match="unknown preset 'qwen3-8b'; known: .*; near it: qwen3-0.6b"):
        capacity("qwen3-8b", 80)
    with pytest.raises(ValueError, match="unknown preset 'abacus'; known: .*smollm2-360m$"):
        capacity("abacus", 80)
    with pytest.raises(ValueError, match="kv_format='int3': choose 'fp32'"):
        articles(kv_format="int3")


@pytest.mark.parametrize("wrong", [dict(memory_gb=float("nan")), dict(memory_gb=float("inf")), dict(weights_gb=-1.0),
                                   dict(overhead_gb=-1.0), dict(context=0), dict(context=-4), dict(memory_gb="80"),
                                   dict(memory_gb=10**400), dict(context="4k"), dict(weights_gb=1j)], ids=str)
def test_sizes_that_cannot_be_are_refused_by_name(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} .* must be a (finite|whole) number"):
        capacity("llama-3-8b", **{"memory_gb": 80, **wrong})


@pytest.mark.parametrize(
    ("wrong", "message"),
    [(dict(context=4096.5), "context 4096.5 must be a whole number"), (dict(kv_format=["int8"]), "kv_format="),
     (dict(model=5), "unknown preset 5"), (dict(memory_gb=None), "memory_gb None"),
     (dict(context=None), "context None"),
     (dict(weights_gb=1e305), "leave nothing")],
    ids=str,
)  # fmt: skip
def test_values_of_another_kind_are_refused_by_name(wrong, message):
    with pytest.raises(ValueError, match=message):
        articles(**wrong)


def test_smollm_in_fp16_has_three_kv_heads():
    assert capacity(ModelConfig.preset("smollm2-135m"), 1, 0.27, 0.1, 1000, "fp16").kv_bytes_per_token == 23_040
