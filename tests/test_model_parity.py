"""The model computes what transformers computes: every family, shape and RoPE, and SmolLM2 itself.

Where a mistake would leave the outputs alone, the test says how it would show: a shape
whose numbers coincide (9 / 3 = 3) hides a mix-up of heads, and equal shifts of all positions
hide behind RoPE, which knows distances only.
"""

from __future__ import annotations

import json
import platform
from dataclasses import replace

import pytest
import torch
import transformers
from parity import (
    FAMILIES,
    assert_same_tokens,
    greedy_reference,
    hf_config,
    logits_of,
    random_hf_model,
    random_ids,
    smollm2_twins,
    twins,
)
from tiny import SHAPES

from minillm.fast import packed as packing
from minillm.fast.packed import PackedLinear, can_pack, make_linear
from minillm.ladder.decode import NoCache, decode_cached
from minillm.load.config import ModelConfig
from minillm.load.weights import load_model, make_model
from minillm.model.llama import Linear, Llama

FP32 = 1e-4  # tiny models: 1e-5 seen, at logits up to 7
SMOLLM2 = 1e-5  # of the largest logit: 3e-6 seen, which is 1e-4 at logits up to 40
LLAMA3 = dict(rope_type="llama3", rope_theta=500_000.0, factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=8192)
FAR = [0, 1, 2, 3, *range(8185, 8205)]  # a gap beyond 8,192: near 0, scaled and plain RoPE agree

IDS = random_ids(24)


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.float() - b.float()).abs().max())


def in_v4_spelling(config: dict, type_key: str) -> dict:
    """A config as transformers 4 wrote it: theta at the top, scaling beside it."""
    old = dict(config)
    rope = dict(old.pop("rope_parameters"))
    kind = rope.pop("rope_type")
    old["rope_theta"] = rope.pop("rope_theta")
    old["rope_scaling"] = None if kind == "default" else {type_key: kind, **rope}
    return old


# -- logits -------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "plain"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(family, shape, tied, packed):
    theirs, ours = twins(shape, family, packed, tie_word_embeddings=tied)
    assert difference(logits_of(theirs, IDS), logits_of(ours, IDS)) < FP32


@pytest.mark.parametrize(
    "family, biases",
    [
        ("llama", dict(attention_bias=True)),
        ("llama", dict(mlp_bias=True)),
        ("llama", dict(attention_bias=True, mlp_bias=True)),
        ("qwen3", dict(attention_bias=True)),
    ],
    ids=str,
)
def test_biases_are_added_where_the_family_has_them(family, biases):
    theirs, ours = twins("t-wide", family, **biases)
    assert difference(logits_of(theirs, IDS), logits_of(ours, IDS)) < FP32


def test_logit_rows_are_those_rows_of_all_logits():
    _, ours = twins("t-wide")
    rows = torch.tensor([23, 0, 7])
    tokens, positions = torch.tensor(IDS), torch.arange(24)
    with torch.inference_mode():
        some = ours.forward(tokens, positions, NoCache(), rows)
    assert difference(some, logits_of(ours, IDS)[rows]) < FP32


@pytest.mark.parametrize("dtype, most", [(torch.bfloat16, 0.3), (torch.float16, 0.04)], ids=["bf16", "fp16"])
@pytest.mark.parametrize("positions", [None, FAR], ids=["near", "beyond 8192"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_half_precision_is_as_close_to_fp32_as_transformers_is(family, positions, dtype, most):
    """`most`: about twice what was seen, at logits up to 6. Counting positions in bf16 would be off by 1 and more."""
    config = hf_config("t-wide", family)
    theirs = random_hf_model(family, config)
    exact = logits_of(theirs, IDS, positions)
    ours = make_model(ModelConfig.from_hf(config.to_dict()), theirs.state_dict(), dtype=dtype)
    frequencies = theirs.model.rotary_emb.inv_freq
    theirs.to(dtype).model.rotary_emb.inv_freq = frequencies  # `from_pretrained` keeps them in fp32, `to` does not
    got, wanted = logits_of(ours, IDS, positions), logits_of(theirs, IDS, positions)
    assert got.dtype == dtype
    assert difference(got, wanted) < most
    noise, their_noise = ((x.float() - exact).square().mean().sqrt() for x in (got, wanted))
    assert noise < 1.25 * their_noise, f"deviation from fp32: ours {noise:.4f}, transformers' {their_noise:.4f}"


# -- positions ----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("head_dim", [12, 64])
@pytest.mark.parametrize("rope", [None, LLAMA3], ids=["default", "llama3"])
@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_type", "type"])
def test_rope_equals_transformers_beyond_position_8192(family, head_dim, rope, spelling):
    config = hf_config("t8-2", family, head_dim=head_dim, rope_parameters=rope)
    theirs = random_hf_model(family, config)
    read = config.to_dict() if spelling == "rope_parameters" else in_v4_spelling(config.to_dict(), spelling)
    ours = make_model(ModelConfig.from_hf(read), theirs.state_dict())
    torch.testing.assert_close(ours.inverse_frequencies, theirs.model.rotary_emb.inv_freq, rtol=1e-6, atol=0)
    assert difference(logits_of(theirs, IDS, FAR), logits_of(ours, IDS, FAR)) < FP32
    assert difference(logits_of(ours, IDS, FAR), logits_of(ours, IDS)) > 0.1, "the positions made no difference"


def test_llama3_scaling_is_applied_which_shows_at_long_distances_only():
    """Were it read and never applied, a comparison of short texts would hardly tell."""
    theirs, scaled = twins.__wrapped__("t8-2", head_dim=64, rope_parameters=LLAMA3)
    plain = make_model(replace(scaled.config, rope_scaling=None), theirs.state_dict())
    near, far = (difference(logits_of(plain, IDS, at), logits_of(scaled, IDS, at)) for at in (None, FAR))
    assert near < 0.1 and far > 1, f"applied or not, logits differ by {near} near 0, by {far} beyond 8,192"


def test_the_model_uses_the_positions_it_is_given():
    """Shifting all of them changes almost nothing, so the outputs alone could not show it; a gap changes much."""
    _, ours = twins("t8-2")
    start = logits_of(ours, IDS)
    assert difference(logits_of(ours, IDS, range(7, 31)), start) < FP32
    assert difference(logits_of(ours, IDS, [*range(12), *range(19, 31)]), start) > 0.1


@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3"])
def test_a_sliding_window_limits_the_context_to_where_it_does_not_matter(family):
    active = {} if family == "mistral" else dict(use_sliding_window=True, max_window_layers=0)
    theirs, ours = twins("t8-2", family, sliding_window=8, **active)
    assert ours.config.max_position_embeddings == 8
    apart = difference(logits_of(theirs, IDS[:8]), logits_of(ours, IDS[:8]))
    assert apart < FP32, "inside its window, sliding attention is full attention"
    assert difference(logits_of(theirs, IDS), logits_of(ours, IDS)) > 0.1, "then the limit would not be needed"


def test_a_sliding_window_that_is_switched_off_does_not_limit_the_context():
    read = {**hf_config("t8-2", "qwen2").to_dict(), "sliding_window": 8, "use_sliding_window": False}
    assert ModelConfig.from_hf(read).max_position_embeddings == 16_384


# -- configs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_a_directory_that_transformers_saved_loads_and_agrees(family, tmp_path):
    config = hf_config("t-wide", family, rope_parameters=LLAMA3, tie_word_embeddings=True, eos_token_id=[5, 7])
    theirs = random_hf_model(family, config)
    theirs.save_pretrained(tmp_path)
    ours = load_model(tmp_path, device="cpu")
    assert ours.config.eos_token_id == (5, 7)
    assert difference(logits_of(theirs, IDS), logits_of(ours, IDS)) < FP32


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_config_leaves_out_is_what_transformers_assumes(family):
    """Of these, a wrong guess would show in no tensor's shape."""
    said = dict(vocab_size=97, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=8,
                num_key_value_heads=2, head_dim=8)
    wanted = FAMILIES[family].config_class(**said)
    got = ModelConfig.from_hf({"model_type": family, **said})
    assert got.rms_norm_eps == wanted.rms_norm_eps
    assert got.rope_theta == wanted.rope_parameters["rope_theta"] and got.rope_scaling is None
    assert got.tie_word_embeddings == wanted.tie_word_embeddings


def test_head_dim_left_out_is_hidden_size_over_heads_and_kv_heads_left_out_are_as_many_as_heads():
    said = dict(vocab_size=97, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=8)
    for absent in ({}, dict(head_dim=None, num_key_value_heads=None)):
        config = ModelConfig.from_hf({"model_type": "llama", **said, **absent})
        assert (config.head_dim, config.num_key_value_heads) == (8, 8)


LLAMA3_WITHOUT_FACTOR = {key: value for key, value in LLAMA3.items() if key != "factor"}


@pytest.mark.parametrize(
    "changes, named",
    [
        *((dict(model_type=kind), kind) for kind in ("qwen2_moe", "qwen3_moe", "qwen3_next", "gemma2", "gpt2")),
        (dict(model_type=None), "model_type None"),
        *((dict(rope_parameters=dict(rope_type=kind, rope_theta=1e4, factor=4.0)), kind)
          for kind in ("yarn", "dynamic", "linear", "longrope")),
        (dict(rope_parameters=None, rope_theta=1e6, rope_scaling=dict(type="yarn", factor=4.0)), "yarn"),
        (dict(rope_parameters=None, rope_scaling=dict(rope_type="yarn", factor=4.0)), "yarn"),
        (dict(rope_parameters=LLAMA3_WITHOUT_FACTOR), "lacks factor"),
        (dict(partial_rotary_factor=0.5), "partial_rotary_factor"),
        (dict(rope_parameters=dict(rope_type="default", partial_rotary_factor=0.5)), "partial_rotary_factor"),
        (dict(hidden_act="gelu"), "gelu"),
        (dict(num_attention_heads=8, num_key_value_heads=3), "8 query heads cannot share 3 KV heads"),
        (dict(head_dim=9), "head_dim 9"),
    ],
    ids=str,
)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_what_cannot_be_computed_is_refused_by_name(family, changes, named):
    """yarn is what Qwen's long-context configs ask for; computed as plain RoPE it would be fluent and wrong."""
    with pytest.raises(ValueError, match=named):
        ModelConfig.from_hf({**hf_config("t8-2", family).to_dict(), **changes})


# -- weights ------------------------------------------------------------------------------------


def tensors_of(tied: bool) -> tuple[ModelConfig, dict[str, torch.Tensor]]:
    theirs, ours = twins("t-wide", "qwen3", tie_word_embeddings=tied, attention_bias=True)
    return ours.config, dict(theirs.state_dict())


HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@pytest.mark.parametrize(
    "tied, file, complaint",
    [
        (True, "no head", None),
        (True, "equal head", None),
        (True, "different head", f"{HEAD} differs from {EMBEDDING}"),
        (True, "head only", f"lack {EMBEDDING}"),
        (False, "no head", f"lack {HEAD}"),
        (False, "equal head", None),
        (False, "different head", None),
        (False, "head only", f"lack {EMBEDDING}"),
    ],
)
def test_head_and_embedding_are_tied_or_loaded_as_declared(tied, file, complaint):
    config, tensors = tensors_of(tied)
    other = torch.randn(tensors[EMBEDDING].shape, generator=torch.Generator().manual_seed(1))
    tensors[HEAD] = other if file == "different head" else tensors[EMBEDDING]
    if file == "no head":
        del tensors[HEAD]
    if file == "head only":
        del tensors[EMBEDDING]
    if complaint:
        with pytest.raises(ValueError, match=complaint):
            make_model(config, tensors)
        return
    states = torch.randn(3, config.hidden_size)
    head = other if file == "different head" else tensors[EMBEDDING]
    assert difference(make_model(config, tensors, packed=False).head(states), states @ head.T) < FP32


NAMES = sorted(tensors_of(tied=False)[1])


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_weight_is_named(name):
    config, tensors = tensors_of(tied=False)
    del tensors[name]
    with pytest.raises(ValueError, match=f"lack {name}"):
        make_model(config, tensors)


@pytest.mark.parametrize("name", NAMES)
def test_a_weight_of_a_wrong_shape_is_named_with_both_shapes(name):
    config, tensors = tensors_of(tied=False)
    right = tuple(tensors[name].shape)
    tensors[name] = torch.cat((tensors[name], tensors[name][:1]))
    with pytest.raises(ValueError) as error:
        make_model(config, tensors)
    assert all(part in str(error.value) for part in (name, str(tuple(tensors[name].shape)), str(right)))


@pytest.mark.parametrize("name", ["model.layers.2.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.bias", "score.bias"])
def test_a_weight_left_over_is_named(name):
    """A third layer, a bias or another head: the config and the file speak of two models."""
    config, tensors = tensors_of(tied=True)
    with pytest.raises(ValueError, match=f"1 weights belong nowhere.*{name}"):
        make_model(config, {**tensors, name: torch.zeros(1)})


def test_rotary_frequencies_in_the_file_are_no_weight_left_over():
    """Older checkpoints store them; they follow from the config."""
    config, tensors = tensors_of(tied=True)
    make_model(config, {**tensors, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(6)})


# -- packed linear layers -----------------------------------------------------------------------


def linear_layers(model: Llama) -> list:
    return [model.head, *(getattr(layer, name) for layer in model.layers for name in layer.LINEARS)]


def test_fp32_layers_are_packed_wherever_packing_works_and_plain_where_they_are_told_to_be():
    kinds = {packed: {type(layer) for layer in linear_layers(twins(packed=packed).ours)} for packed in (True, False)}
    assert kinds == {True: {PackedLinear if can_pack() else Linear}, False: {Linear}}


@pytest.mark.skipif(
    platform.machine().lower() not in ("x86_64", "amd64") or not torch.backends.mkldnn.is_available(),
    reason="oneDNN packs on x86 only",
)
def test_packing_works_on_x86():
    """`can_pack` turns to the plain path on any disagreement; where it ought to work, that must not go unnoticed."""
    assert can_pack()


def test_without_packing_layers_are_plain(monkeypatch):
    monkeypatch.setattr(packing, "can_pack", lambda: False)
    theirs, ours = twins.__wrapped__("t-wide")
    assert {type(layer) for layer in linear_layers(ours)} == {Linear}
    assert difference(logits_of(theirs, IDS), logits_of(ours, IDS)) < FP32


def test_half_precision_is_never_packed():
    assert type(make_linear(torch.zeros(8, 8, dtype=torch.bfloat16))) is Linear


# -- SmolLM2 itself -----------------------------------------------------------------------------


@pytest.mark.parametrize("question", ["What is the capital of France?", "Count from one to ten."])
def test_smollm2_equals_transformers(smollm2_dir, question):
    theirs, ours = smollm2_twins(smollm2_dir)
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2_dir)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
    )
    wanted = logits_of(theirs, ids)
    assert difference(wanted, logits_of(ours, ids)) < SMOLLM2 * wanted.abs().max()
    stop_ids = ours.config.eos_token_id
    assert_same_tokens(list(decode_cached(ours, ids, 20, stop_ids)), greedy_reference(theirs, ids, 20, stop_ids))


def test_smollm2_config_says_what_transformers_reads(smollm2_dir):
    """The converted config is ours; a wrong theta or eps in it would be wrong in both models alike."""
    said = json.loads((smollm2_dir / "config.json").read_text(encoding="utf-8"))
    config, published = ModelConfig.from_hf(said), ModelConfig.preset("smollm2-135m")
    assert config.rms_norm_eps == pytest.approx(published.rms_norm_eps)  # GGUF keeps it as an fp32
    assert replace(config, rms_norm_eps=published.rms_norm_eps) == published
