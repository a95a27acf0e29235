"""Whatever stands in a model's files, a trace or a call: it works, or a ValueError names what is wrong.

Each test damages healthy inputs in thousands of random ways, from a fixed seed, and prints how many.
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from tiny import random_tensors, tiny_config
from toy_files import TEMPLATE, TOKENS, byte_level_tokenizer, hf_config, write_directory, write_gguf

from minillm.ladder.decode import decode_cached
from minillm.load.config import ModelConfig
from minillm.load.tokenizer import load_tokenizer
from minillm.load.weights import load_model
from minillm.measure.capacity import capacity, server_flags, what_changes_it
from minillm.measure.workload import WORKLOADS, make_workload

DEEP = "[" * 100_000
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
VALUES = (
    None, True, False, -1, 0, 1, 2, 7, 10**7, 2**31, 2**70, 0.5, -2.0, 1e308, float("nan"), float("inf"), "", "1",
    "text", "\ud800", "\x00", "true", [], [1], ["a"], [None, -1], {}, {"a": 1}, {"content": 5}, {"content": "<eos>"},
    [[[[]]]],
)  # fmt: skip
SIZES = dict(vocab_size=len(TOKENS), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
             num_key_value_heads=1, head_dim=8, max_position_embeddings=32)  # fmt: skip
OTHER_FIELDS = {
    "rope_scaling": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "sliding_window": 16,
    "use_sliding_window": False, "max_window_layers": 1, "layer_types": ["full_attention"], "eos_token_id": [1, 2],
    "bos_token_id": 0, "partial_rotary_factor": 1.0,
}  # fmt: skip


class Tried:
    """Counts inputs, and fails for one that ends in anything but an answer or a ValueError."""

    def __init__(self) -> None:
        self.number = self.refused = 0

    def __call__(self, what: object, call, *arguments, **settings):
        self.number += 1
        try:
            return call(*arguments, **settings)
        except ValueError as error:
            self.refused += 1
            assert str(error), f"{what!r:.300} is refused without a word"
        except BaseException as error:
            raise AssertionError(f"{what!r:.300}: {type(error).__name__}: {error}") from error


@pytest.fixture(scope="module")
def tried(count_inputs):
    counter = Tried()
    yield counter
    count_inputs("files and settings", counter.number)


def family_config(family: str, **changes) -> dict:
    config = tiny_config(**SIZES, model_type=family, attention_bias=family == "qwen2")
    return hf_config(config) | OTHER_FIELDS | changes


def write_model(path: Path, family: str = "qwen3") -> Path:
    """A healthy directory with every side file there is."""
    config = tiny_config(**SIZES, model_type=family, attention_bias=family == "qwen2")
    tensors = random_tensors(config)
    write_directory(
        path, family_config(family), tensors,
        generation_config={"eos_token_id": [1], "bos_token_id": 0},
        tokenizer=json.loads(byte_level_tokenizer().to_str()),
        tokenizer_config={"bos_token": "<bos>", "eos_token": {"content": "<eos>"}, "chat_template": TEMPLATE},
        special_tokens_map={"bos_token": "<bos>", "eos_token": "<eos>"},
    )  # fmt: skip
    (path / "model.safetensors").rename(path / "model-1.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "model-1.safetensors")}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def use(path: Path) -> None:
    """Load all that a path holds, and let it say a token."""
    tokenizer = load_tokenizer(path)
    try:
        prompt = tokenizer.chat("hello")
    except ValueError:  # a template may be missing, or refuse
        prompt = tokenizer.encode("hello")
    model = load_model(path, device="cpu")
    if prompt and max(prompt) < model.config.vocab_size and len(prompt) < model.config.max_position_embeddings:
        tokenizer.decode(decode_cached(model, prompt, 1))


def at_random(draw: random.Random, value):
    """The value with something at a random depth replaced, left out or added."""
    if isinstance(value, dict) and value and draw.random() < 0.9:
        key = draw.choice(list(value))
        if draw.random() < 0.15:
            return {name: kept for name, kept in value.items() if name != key}
        return value | {key: at_random(draw, value[key])}
    if isinstance(value, list) and value and draw.random() < 0.7:
        place = draw.randrange(len(value))
        return [*value[:place], at_random(draw, value[place]), *value[place + 1 :]]
    return draw.choice(VALUES)


def damaged_bytes(draw: random.Random, data: bytes) -> bytes:
    """Bytes cut, overwritten, or replaced by those of another kind of file."""
    kind, place = draw.randrange(6), draw.randrange(len(data))
    if kind == 0:
        return data[:place]
    if kind == 1:
        return data[:place] + draw.randbytes(draw.randint(1, 9)) + data[place + 1 :]
    if kind == 2:
        return data[: draw.randrange(min(len(data), 64))] + draw.randbytes(8) + data[place:]
    others = (POINTER.encode(), DEEP.encode(), b"\xff\xfe{\x00}\x00")
    return draw.choice([b"", b"null", b"[1]", b"5", b"\x00" * 9, *others])


# -- fields of side files -------------------------------------------------------------------------

WRONG = {"text": 5, "number": "5", "flag": "false", "ids": "1", "list": 5, "settings": [1]}
KINDS = {
    "config.json": {
        **dict.fromkeys(SIZES, "number"), "rms_norm_eps": "number", "rope_theta": "number", "sliding_window": "number",
        "max_window_layers": "number", "partial_rotary_factor": "number", "tie_word_embeddings": "flag",
        "attention_bias": "flag", "mlp_bias": "flag", "use_sliding_window": "flag", "model_type": "text",
        "hidden_act": "text", "layer_types": "list", "eos_token_id": "ids", "bos_token_id": "ids",
        "rope_scaling": "settings", "rope_parameters": "settings",
    },
    "generation_config.json": {"eos_token_id": "ids"},
    "tokenizer_config.json": {"bos_token": "text", "eos_token": "text", "chat_template": "text"},
    "special_tokens_map.json": {"bos_token": "text", "eos_token": "text"},
    "model.safetensors.index.json": {"weight_map": "settings"},
}  # fmt: skip
NULL_IS_MEANT = (
    "num_key_value_heads", "sliding_window", "layer_types", "eos_token_id", "bos_token_id", "rope_scaling",
    "rope_parameters", "bos_token", "eos_token", "chat_template",
)  # fmt: skip
DEFAULTED = ("weight_map", *(size for size in SIZES if size not in ("num_key_value_heads", "head_dim",
                                                                    "max_position_embeddings")))  # fmt: skip


@pytest.mark.parametrize(("file", "field"), [(file, field) for file in KINDS for field in KINDS[file]])
def test_a_field_of_another_kind_is_refused_with_its_file_and_its_name(file, field, tmp_path, tried):
    path = write_model(tmp_path / "model")
    healthy = json.loads((path / file).read_text()) | ({"rope_parameters": None} if field.startswith("rope") else {})
    wrong = [WRONG[KINDS[file][field]], [[5]], {"a": {"b": 5}}, -1.5]
    wrong += [] if field in NULL_IS_MEANT else [None]
    for value in wrong:
        if KINDS[file][field] == "settings" and isinstance(value, dict):
            value = {"rope_type": 5, "a": {"b": 1}}
        (path / file).write_text(json.dumps(healthy | {field: value}))
        with pytest.raises(ValueError) as caught:
            use(path)
        said = str(caught.value)
        assert file in said and (field in said or "RoPE" in said), f"{value!r}: {said}"
    if field in NULL_IS_MEANT and field != "num_key_value_heads":  # there it means as many as query heads
        (path / file).write_text(json.dumps(healthy | {field: None}))
        use(path)
    left_out = {name: value for name, value in healthy.items() if name != field}
    (path / file).write_text(json.dumps(left_out))
    if field in DEFAULTED or field == "model_type":
        with pytest.raises(ValueError, match=field):
            use(path)


@pytest.mark.parametrize("file", [*KINDS, "tokenizer.json", "chat_template.jinja", "model-1.safetensors"])
@pytest.mark.parametrize("content", [POINTER, "", "\xff\xfe", DEEP], ids=["a pointer", "empty", "no UTF-8", "nested"])
def test_a_file_that_is_another_file_is_refused_by_its_name(file, content, tmp_path):
    path = write_model(tmp_path / "model")
    (path / file).write_bytes(content.encode("latin-1"))
    if file == "chat_template.jinja" and content in ("", DEEP):
        use(path)  # a template may be any text
        return
    with pytest.raises(ValueError, match=file) as caught:
        use(path)
    assert ("Git LFS pointer" in str(caught.value)) == (content == POINTER)


# -- random damage --------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_random_damage_to_the_files_of_a_directory(family, tmp_path, tried):
    draw = random.Random(f"files {family}")
    path = write_model(tmp_path / "model", family)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    use(path)
    files = {file.name: file.read_bytes() for file in path.iterdir()}
    fields = [name for name in files if name.endswith(".json")]
    for _ in range(350):
        if draw.random() < 0.7:
            name = draw.choice(fields)
            data = json.dumps(at_random(draw, json.loads(files[name]))).encode()
        else:
            name = draw.choice(list(files))
            data = damaged_bytes(draw, files[name])
        (path / name).write_bytes(data)
        tried((name, data), use, path)
        (path / name).write_bytes(files[name])
    use(path)


def test_random_damage_to_a_tokenizer(tmp_path, tried):
    draw = random.Random("tokenizer")
    path = write_model(tmp_path / "model")
    healthy = json.loads((path / "tokenizer.json").read_text())
    for _ in range(500):
        part = draw.choice(list(healthy))
        data = json.dumps(healthy | {part: at_random(draw, healthy[part])})
        (path / "tokenizer.json").write_text(data)
        tokenizer = tried(data[:300], load_tokenizer, path)
        if tokenizer:
            tried(data, tokenizer.encode, "hello <end> 中")


def test_random_damage_to_a_gguf(tmp_path, tried):
    draw = random.Random("gguf")
    config = tiny_config(**SIZES)
    path = write_gguf(tmp_path / "healthy.gguf", config, random_tensors(config))
    use(path)
    data, bad = path.read_bytes(), tmp_path / "bad.gguf"
    head = data[: data.rindex(b"output_norm.weight") + 64]  # settings and names stand before the numbers
    for _ in range(150):
        if draw.random() < 0.3:
            bad.write_bytes(damaged_bytes(draw, data))
        else:
            place = draw.randrange(len(head))
            bad.write_bytes(data[:place] + bytes([draw.randrange(256)]) + data[place + 1 :])
        tried(("gguf", bad.read_bytes()[:9]), use, bad)


# -- calls ----------------------------------------------------------------------------------------

ODD = (*VALUES, b"", object(), Path("nowhere"), 1j, (), ("a",), range(3), torch.tensor(1.5), torch.tensor([1]))


def test_random_arguments_of_loading(tmp_path, tried, monkeypatch):
    path = write_model(tmp_path / "model")
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("subprocess.run", lambda *a, **k: pytest.fail("nothing here asks for a download"))
    names = ("~nobody-of-this-name/x", "a" * 5000, "random:", "random:x", "x.gguf", "\x00/x", "/", "random:\ud800")
    for odd in (*ODD, *names):
        tried(("name", odd), load_model, odd)
        tried(("tokenizer", odd), load_tokenizer, odd)
        tried(("device", odd), load_model, path, device=odd)
        tried(("dtype", odd), load_model, path, device="cpu", dtype=odd)
        tried(("preset", odd), ModelConfig.preset, odd)
        tried(("config", odd), ModelConfig.from_hf, odd)
    for dtype in (torch.int8, torch.bool, torch.complex64):
        tried(("dtype", dtype), load_model, path, device="cpu", dtype=dtype)


def test_random_chats(tmp_path, tried):
    draw, tokenizer = random.Random("chat"), load_tokenizer(write_model(tmp_path / "model"))
    for _ in range(1500):
        message = {"role": "user", "content": draw.choice(["hello", [{"type": "text", "text": "hello"}], *ODD])}
        chat = draw.choice([[message], [message, at_random(draw, message)], message, draw.choice(ODD), "hello"])
        system = draw.choice([None, None, "Be brief.", *ODD])
        ids = tried((chat, system), tokenizer.chat, chat, draw.choice(VALUES), system)
        assert ids is None or "None" not in tokenizer.decode(ids)
        tried(chat, tokenizer.encode, draw.choice(ODD))


def test_random_settings_of_workloads(tried):
    draw = random.Random("workload")
    settings = ("requests", "rate", "scale", "seed", "ids", "cv", "mean_tokens", "prompt_tokens", "answers",
                "context", "answer", "prefix_tokens", "path", "nonsense")  # fmt: skip
    for _ in range(1500):
        name = draw.choice([*WORKLOADS, *WORKLOADS, draw.choice(ODD)])
        asked = {"requests": 3, "scale": 0.01} if name not in ("articles-static",) else {}
        asked |= {draw.choice(settings): draw.choice((*ODD, 10**12, 1e-320)) for _ in range(draw.randint(1, 2))}
        tried((name, asked), make_workload, name, **asked)


CELLS = ("1", "2.5", "", " ", "nan", "inf", "-1", "1e400", "9" * 5000, "2023-11-05 01:59:59", "2023-11-05T02:00:00Z",
         "2023-11-05 02:00:00+01:00", "0001-01-01T00:00:00+23:59", "9999-12-31", "TIMESTAMP", "ContextTokens",
         "GeneratedTokens", "Model", "x" * 200_000, '"', "\x00", "\r", "\ud7ff", "٣")  # fmt: skip


def test_random_traces(tmp_path, tried):
    draw, file = random.Random("trace"), tmp_path / "trace.csv"
    for _ in range(1000):
        header = draw.choice([[], ["TIMESTAMP,ContextTokens,GeneratedTokens"], ["a,b,c"], ["Model,timestamp,x"]])
        lines = [f"{i},{i + 3},{i + 4}" for i in range(draw.randint(0, 4))]
        for _ in range(draw.randint(0, 2)):
            lines.insert(draw.randint(0, len(lines)), ",".join(draw.choices(CELLS, k=draw.randint(0, 5))))
        text = draw.choice(["\n", "\r\n", "\n\n"]).join([*header, *lines, *draw.choice([[], ["", ""]])])
        file.write_bytes(draw.choice([text.encode(), text.encode("utf-16"), text.encode()[: len(text) // 2]]))
        tried(text, make_workload, "trace", path=file, requests=draw.choice([None, 1, 2]))
    for odd in (*ODD, tmp_path, tmp_path / "absent.csv"):
        tried(odd, make_workload, "trace", path=odd)


def test_random_capacity_sums(tried):
    draw = random.Random("capacity")
    names = ("model", "memory_gb", "weights_gb", "overhead_gb", "context", "kv_format")
    for _ in range(1200):
        asked = {"model": "llama-3-8b", "memory_gb": 80} | {
            draw.choice(names): draw.choice((*ODD, 10**400, 1e305, "qwen3-0.6b", "int8", 17.0))
            for _ in range(draw.randint(1, 2))
        }
        found = tried(asked, capacity, **asked)
        if found:
            server_flags(found)
            tried(asked, what_changes_it, **asked)


def test_at_least_six_thousand_inputs_were_tried(tried, request):
    if request.config.getoption("keyword") or "::" in "".join(map(str, request.config.args)):
        return  # only some of the tests above ran
    assert tried.number >= 6000


def test_a_healthy_directory_loads_again_after_all_that(tmp_path):
    use(path := write_model(tmp_path / "model"))
    shutil.rmtree(path)
