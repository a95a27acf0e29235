"""Rung 5: what is stored is finite, counted right, exact where it can be, and what attention reads."""

import pytest
import torch
from tiny import tiny_config, tiny_model

from minillm import Engine, SamplingParams
from minillm.extras.key_scaling import ChannelScaling
from minillm.ladder.quantized import Rotation, kv_bytes_per_token, kv_storage

FORMATS = ("fp32", "bf16", "fp16", "int8", "fp8", "int4")
SCALED = ("int8", "fp8", "int4")


def stored(kv_format, x):
    """What a storage gives back for keys x [N, Hkv, D], with no transform."""
    config = tiny_config("t8-2", head_dim=x.shape[-1], num_key_value_heads=x.shape[1], num_hidden_layers=1)
    storage, slots = kv_storage(config, kv_format, len(x), "cpu"), torch.arange(len(x))
    storage.write(0, slots, x, x)
    return storage.read(0, slots)[0].float()


@pytest.mark.parametrize("kv_format", SCALED)
@pytest.mark.parametrize("value", [0.0, 1e-38, 7.25, 1e4])
def test_constant_tokens_are_finite_and_zeros_stay_zero(kv_format, value):
    """QNT-1: a scale that underflows to 0 would divide to NaN."""
    read = stored(kv_format, torch.full((3, 2, 8), value))
    assert read.isfinite().all()
    assert (read - value).abs().max() <= max(1e-7, value / 100)
    assert value or not read.any()


@pytest.mark.parametrize("head_dim", [8, 12, 20, 64])
@pytest.mark.parametrize("kv_format", SCALED)
def test_what_was_read_is_stored_again_exactly(kv_format, head_dim):
    x = torch.randn(50, 2, head_dim, generator=torch.Generator().manual_seed(0)) * 3
    once = stored(kv_format, x)
    assert torch.equal(stored(kv_format, once), once)
    assert (once - x).abs().max() < {"int8": 0.06, "fp8": 0.5, "int4": 1.0}[kv_format]


@pytest.mark.parametrize("head_dim", [8, 12, 20, 64])
@pytest.mark.parametrize("kv_format", FORMATS)
def test_bytes_counted_are_bytes_allocated(kv_format, head_dim):
    config = tiny_config("t8-2", head_dim=head_dim)
    assert kv_storage(config, kv_format, 10, "cpu").nbytes == 10 * kv_bytes_per_token(config, kv_format)


def test_eight_bits_hold_194_percent_of_the_tokens_of_sixteen():
    config = tiny_config("t8-2", head_dim=64)
    assert kv_bytes_per_token(config, "bf16") / kv_bytes_per_token(config, "int8") == pytest.approx(1.94, abs=0.005)
    assert kv_bytes_per_token(config, "int4") / kv_bytes_per_token(config, "bf16") <= 0.32


@pytest.mark.parametrize("make", [
    lambda D: Rotation(D),
    lambda D: ChannelScaling(torch.randn(1, 2, D), torch.rand(1, 2, D) + 0.5),
], ids=["rotation", "channels"])
@pytest.mark.parametrize("head_dim", [8, 12])
def test_a_key_transform_leaves_attention_as_it_was(make, head_dim):
    """8 query and 2 KV heads, so that a scale given to the wrong head shows."""
    torch.manual_seed(0)
    q, k = torch.randn(1, 8, head_dim), torch.randn(30, 2, head_dim)
    q2, _ = (transform := make(head_dim)).apply(0, q, k[:1])
    k2 = torch.cat([transform.apply(0, q, key[None])[1] for key in k])

    def weights(q, k):
        return torch.einsum("hd,shd->hs", q[0], k.repeat_interleave(4, dim=1)).softmax(-1)

    assert torch.allclose(weights(q, k), weights(q2, k2), atol=1e-5)


@pytest.mark.parametrize("kv_format", SCALED)
def test_batch_paging_and_preemption_store_the_same_bytes(kv_format):
    """Alone, in a batch, in chunks, in a pool so small that requests are sent away: the same tokens in each format."""
    model = tiny_model("t-wide")
    prompts = [[(7 * i + j) % 97 for j in range(n)] for i, n in enumerate((3, 4, 5, 9))]
    params, settings = SamplingParams(max_tokens=12), {"kv_format": kv_format, "block_size": 4}
    alone = [Engine(model, **settings).generate([prompt], params)[0].token_ids for prompt in prompts]
    memory = 8 * 4 * kv_bytes_per_token(model.config, kv_format)
    engine = Engine(model, kv_memory=memory, max_step_tokens=8, **settings)
    together = [answer.token_ids for answer in engine.generate(prompts, params)]
    assert engine.records.totals["preempted"] > 0
    assert together == alone


def test_an_unknown_format_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="int8"):
        Engine(tiny_model("t8-2"), kv_format="int3")
