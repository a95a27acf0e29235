"""Text to ids and back: no half characters, no second BOS, stop strings found and nothing else delayed."""

import json

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, processors
from toy_files import TEMPLATE, TOKENS, byte_level_tokenizer, text_as_token

from minillm.load.gguf_file import _splitter
from minillm.load.source import ModelNotFound
from minillm.load.tokenizer import BYTE_OF_CHARACTER, Tokenizer, load_tokenizer

BOS, EOS, END = 0, 1, 2


def byte_level(**settings) -> Tokenizer:
    return Tokenizer(byte_level_tokenizer(), {"bos_token": "<bos>", "eos_token": "<eos>", **settings}, "toy")


def with_bos_post_processor() -> tokenizers.Tokenizer:
    backend = byte_level_tokenizer()
    backend.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    return backend


def sentencepiece() -> Tokenizer:
    """A tokenizer as Llama 2 has it: ▁ for spaces, <0xE2> for bytes, a space before every text."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "▁b", "▁ab"]
    merges = [("▁", "a"), ("▁", "b"), ("▁a", "b")]
    vocabulary = {token: id for id, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(parts)
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in tokens[:3]])
    return Tokenizer(backend, {"bos_token": "<s>", "eos_token": "</s>"}, "toy sentencepiece")


def of_pieces(pieces: list[str]) -> Tokenizer:
    """A tokenizer whose id i is the text pieces[i]."""
    backend = tokenizers.Tokenizer(models.WordLevel({text_as_token(p): i for i, p in enumerate(pieces)}, "?"))
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend, {}, "pieces")


def run_stream(tokenizer, ids, stop=()):
    """Push ids until the stream stops; the deltas, the last of them from finish, and the ids taken."""
    stream, deltas, taken = tokenizer.stream(stop), [], []
    for id in ids:
        taken.append(id)
        deltas.append(stream.push(id))
        if stream.stopped:
            break
    deltas.append(stream.finish())
    assert stream.finish() == "", "finish flushed twice"
    return deltas, taken, stream


# --- TOK-1: characters that span tokens -------------------------------------------------------------------------

ONE_BYTE_PER_TOKEN = [TOKENS.index(text_as_token("A"))] + [
    TOKENS.index(next(iter(byte))) for character in "😀中é" for byte in [text_as_token(character)] for byte in byte
]


def test_no_half_character_is_emitted_wherever_the_length_cap_falls():
    tokenizer = byte_level()
    assert len(ONE_BYTE_PER_TOKEN) == 1 + 4 + 3 + 2
    for cap in range(len(ONE_BYTE_PER_TOKEN) + 1):
        ids = ONE_BYTE_PER_TOKEN[:cap]
        deltas, _, _ = run_stream(tokenizer, ids)
        assert "\ufffd" not in "".join(deltas[:-1])
        assert "".join(deltas) == tokenizer.decode(ids)
    assert deltas == ["A", "", "", "", "😀", "", "", "中", "", "é", ""]


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_joined_deltas_are_the_full_decode_at_every_finish(make, data):
    """Over any ids, broken characters and special tokens among them; and released text never changes."""
    tokenizer = make()
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    deltas, _, _ = run_stream(tokenizer, ids)
    assert "".join(deltas) == tokenizer.decode(ids)
    for length in range(len(ids)):
        assert tokenizer.decode(ids).startswith("".join(deltas[:length]))


@given(ids=st.lists(st.integers(0, len(TOKENS) - 1), max_size=30), skip=st.booleans())
def test_byte_level_decode_agrees_with_the_tokenizers_library(ids, skip):
    tokenizer = byte_level()
    assert tokenizer.decode(ids, skip_special=skip) == tokenizer.backend.decode(ids, skip_special_tokens=skip)


@given(text=st.text(alphabet="ab é中😀", max_size=20))
def test_sentencepiece_round_trip_agrees_with_the_tokenizers_library(text):
    tokenizer = sentencepiece()
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text == tokenizer.backend.decode(ids)


def test_sentencepiece_stream_keeps_the_spaces_between_words():
    tokenizer = sentencepiece()
    deltas, _, _ = run_stream(tokenizer, tokenizer.encode("ab a b"))
    assert deltas == ["ab", " a", " b", ""]


def test_cost_per_token_does_not_grow(monkeypatch):
    """Each push looks at its own token alone, and holds no more text than a stop string is long."""
    tokenizer, seen = byte_level(), []
    stream = tokenizer.stream(["aaab"])
    token_bytes = Tokenizer.token_bytes
    monkeypatch.setattr(Tokenizer, "token_bytes", lambda self, id: (seen.append(id), token_bytes(self, id))[1])
    monkeypatch.setattr(Tokenizer, "decode", None)
    letter = TOKENS.index("a")
    released = ""
    for count in range(1, 2001):
        released += stream.push(letter)
        assert len(seen) == count
        assert len(stream._held) <= 3
    assert len(released + stream.finish()) == 2000


def test_ids_beyond_the_vocabulary_have_no_text():
    """A padded embedding can produce them."""
    tokenizer = byte_level()
    assert tokenizer.decode([len(TOKENS) + 5, TOKENS.index("hello")]) == "hello"


def test_an_added_token_outside_the_byte_alphabet_is_plain_text():
    backend = byte_level_tokenizer()
    backend.add_tokens([AddedToken("two words 中", normalized=False)])
    tokenizer = Tokenizer(backend, {}, "toy")
    assert tokenizer.decode(tokenizer.encode("hello two words 中!")) == "hello two words 中!"


@pytest.mark.parametrize("text", ["čaj", "two Ġwords", "ĠĠ"])
def test_an_added_token_of_letters_from_the_byte_alphabet_is_plain_text(text):
    backend = byte_level_tokenizer()
    backend.add_tokens([AddedToken(text, normalized=False)])
    tokenizer = Tokenizer(backend, {}, "toy")
    assert tokenizer.decode(tokenizer.encode(f"hello {text}!")) == f"hello {text}!"


# --- TOK-2: stop strings ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stop", "pieces", "deltas", "stopped"),
    [
        (["own fox"], ["The br", "own", " fox", " jumps"], ["The br", "", "", ""], True),
        (["own fox"], ["The br", "own", " dog"], ["The br", "", "own dog", ""], False),
        (["own fox"], ["The br", "own"], ["The br", "", "own"], False),
        (["aab"], ["a", "a", "a", "b"], ["", "", "a", "", ""], True),
        (["ab", "abc"], ["x", "a", "b", "c"], ["x", "", "", ""], True),
        (["abc", "ab"], ["x", "abc"], ["x", "", ""], True),
        (["o w"], ["hello world"], ["hell", ""], True),
        (["b", "c"], ["a", "xcyb"], ["a", "x", ""], True),
        (["\n\n"], ["a\n", "\nb"], ["a", "", ""], True),
        (["中"], ["a中b"], ["a", ""], True),
        ([], ["a", "b"], ["a", "b", ""], False),
        ("fox", ["a f", "ox"], ["a ", "", ""], True),
    ],
)
def test_stop_strings(stop, pieces, deltas, stopped):
    tokenizer = of_pieces(sorted(set(pieces)))
    ids = [sorted(set(pieces)).index(piece) for piece in pieces]
    found, _, stream = run_stream(tokenizer, ids, stop)
    assert found == deltas
    assert stream.stopped == stopped


def test_a_stop_string_does_not_begin_in_the_prompt():
    """The prompt ended in 'own': only generated text is searched."""
    tokenizer = of_pieces([" fox", " runs"])
    deltas, _, stream = run_stream(tokenizer, [0, 1], ["own fox"])
    assert deltas == [" fox", " runs", ""]
    assert not stream.stopped


def test_a_stop_string_in_split_characters_is_found():
    tokenizer = byte_level()
    deltas, taken, _ = run_stream(tokenizer, ONE_BYTE_PER_TOKEN, ["中"])
    assert "".join(deltas) == "A😀"
    assert len(taken) == 1 + 4 + 3


def test_ids_after_a_stop_add_nothing():
    stream = of_pieces(["a", "stop"]).stream(["stop"])
    assert [stream.push(id) for id in (0, 1, 0, 0)] == ["a", "", "", ""]
    assert stream.finish() == ""


@given(
    pieces=st.lists(st.text(alphabet="ab", min_size=1, max_size=3), max_size=12),
    stop=st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3),
)
@settings(max_examples=400)
def test_text_is_the_decode_of_the_ids_cut_at_the_leftmost_stop(pieces, stop):
    distinct = sorted(set(pieces))
    tokenizer = of_pieces(distinct)
    deltas, taken, stream = run_stream(tokenizer, [distinct.index(piece) for piece in pieces], stop)
    full = tokenizer.decode(taken)
    places = [full.find(s) for s in stop if s in full]
    assert stream.stopped == bool(places)
    assert "".join(deltas) == (full[: min(places)] if places else full)
    for count in range(1, len(taken) + (not stream.stopped)):
        sofar = tokenizer.decode(taken[:count])
        begun = [n for s in stop for n in range(1, len(s)) if sofar.endswith(s[:n])]
        held = len(sofar) - len("".join(deltas[:count]))
        assert held == max(begun, default=0), "held back more, or less, than could become a stop string"


# --- TOK-3: BOS -------------------------------------------------------------------------------------------------

HELLO = TOKENS.index("hello")
WORLD = [TOKENS.index("Ġw"), *(TOKENS.index(letter) for letter in "orld")]


def test_raw_text_gets_one_bos_or_none():
    plain = byte_level()
    adds = Tokenizer(with_bos_post_processor(), {"bos_token": "<bos>"}, "toy")
    assert plain.encode("hello") == [HELLO]
    assert adds.encode("hello world") == [BOS, HELLO, *WORLD]
    assert adds.encode("<bos>hello") == [BOS, HELLO]
    assert adds.encode("") == [BOS]
    assert adds.encode("hello", add_bos=False) == [HELLO]
    assert plain.encode("hello", add_bos=True) == [BOS, HELLO]


@pytest.mark.parametrize("text", ["\ud800", "smile \udc80"])
def test_half_a_surrogate_pair_is_no_text(text):
    with pytest.raises(ValueError, match="cannot be written in UTF-8"):
        byte_level().encode(text)


def test_asking_for_a_bos_that_does_not_exist():
    with pytest.raises(ValueError, match="toy has no BOS"):
        Tokenizer(byte_level_tokenizer(), {}, "toy").encode("hello", add_bos=True)


@pytest.mark.parametrize("backend", [byte_level_tokenizer, with_bos_post_processor])
def test_chat_holds_the_bos_of_its_template_alone(backend):
    config = {"bos_token": "<bos>", "eos_token": "<eos>", "chat_template": TEMPLATE}
    tokenizer = Tokenizer(backend(), config, "toy")
    user, assistant = (tokenizer.encode(f"[{role}]", add_bos=False) for role in ("user", "assistant"))
    system = tokenizer.encode("[system]", add_bos=False)
    assert tokenizer.chat("hello") == [BOS, *user, HELLO, END, *assistant]
    assert tokenizer.chat("hello", add_generation_prompt=False) == [BOS, *user, HELLO, END]
    assert tokenizer.chat("hello", system="hello") == [BOS, *system, HELLO, END, *user, HELLO, END, *assistant]
    turns = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hello"}]
    assert tokenizer.chat(turns, add_generation_prompt=False) == [BOS, *user, HELLO, END, *assistant, HELLO, END]
    tokenizer.chat(turns, system="hello")
    assert len(turns) == 2, "the caller's list was changed"


def test_missing_template_says_what_to_use():
    with pytest.raises(ValueError, match=r"toy has no chat template.*\.encode"):
        byte_level().chat("hello")


def test_a_template_that_refuses_says_why():
    tokenizer = byte_level(chat_template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ValueError, match="roles must alternate"):
        tokenizer.chat("hello")


def test_a_template_cannot_reach_out_of_its_sandbox():
    tokenizer = byte_level(chat_template="{{ messages.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(ValueError, match="unsafe"):
        tokenizer.chat("hello")


def test_a_template_among_several_by_name():
    several = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "hello"}]
    assert byte_level(chat_template=several).chat("x") == [HELLO]


GENERATION = (
    "{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<end>"
    "{%- endgeneration -%}{% else %}{{ m.content }}<end>{% endif %}{% endfor %}"
)
TEMPLATES = [
    TEMPLATE, GENERATION, "{{ messages | tojson(ensure_ascii=False) }}", "{{ messages | tojson(indent=1) }}",
    "{{ messages | tojson(sort_keys=True, separators=(',', ':')) }}", "{{ dict(a=1) }}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "{% for m in messages %}{% if loop.last %}{% break %}{% endif %}{{ m.content }}\n  {% endfor %}",
    "{% for m in messages %}{% generation %}{% set x = m.content %}{{ x }}{% endgeneration %}{{ x }}{% endfor %}",
]


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_template_renders_as_in_transformers(template):
    from transformers.utils.chat_template_utils import render_jinja_template

    chat = [{"role": "user", "content": "héllo <b>"}, {"role": "assistant", "content": "wörld"}]
    special = {"bos_token": "<bos>", "eos_token": "<eos>"}
    ((theirs,), _) = render_jinja_template([chat], chat_template=template, add_generation_prompt=True, **special)
    assert byte_level(chat_template=template).render(chat, True) == theirs


def test_the_end_of_a_turn_is_found_in_a_generation_block():
    assert byte_level(chat_template=GENERATION).eos_ids == (EOS, END)


@pytest.mark.parametrize("template", ["{{ 1 / 0 }}", "{{ messages[5].content.x }}", "{{ 'a' + 1 }}", "{{ [].pop() }}"])
def test_a_template_that_fails_in_any_way_is_a_value_error(template):
    with pytest.raises(ValueError, match="the chat template of toy cannot render these messages"):
        byte_level(chat_template=template).chat("hello")


@pytest.mark.parametrize(
    "content",
    ["hello world", ["hello", " world"], [{"type": "text", "text": "hello world"}],
     [{"type": "text", "text": "hello"}, {"type": "text", "text": " world"}], ({"text": "hello world"},)],
    ids=str,
)  # fmt: skip
def test_parts_of_text_are_one_text(content):
    tokenizer = byte_level(chat_template=TEMPLATE)
    assert tokenizer.chat([{"role": "user", "content": content}]) == tokenizer.chat("hello world")


@pytest.mark.parametrize(
    ("messages", "named"),
    [
        ([{"role": "user", "content": None}], "message 0: its content None is not a text"),
        ([{"role": "user", "content": "a"}, {"role": "assistant"}], "message 1: its content None is not a text"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], "message 0: .*image_url"),
        ([{"role": "user", "content": ["a", None]}], "message 0: its content None"),
        ([{"role": "user", "content": 5}], "message 0: its content 5"),
        ([{"content": "a"}], "message 0 .* is not of the form"),
        (["hello"], "message 0 'hello' is not of the form"),
        ({"role": "user", "content": "a"}, "message 0 'role' is not of the form"),
        (None, "messages None is neither"), (5, "messages 5 is neither"),
    ],
)  # fmt: skip
def test_a_message_without_a_text_is_named(messages, named):
    with pytest.raises(ValueError, match=named):
        byte_level(chat_template=TEMPLATE).chat(messages)
    with pytest.raises(ValueError, match="message system: its content 5"):
        byte_level(chat_template=TEMPLATE).chat("hello", system=5)


# --- TOK-4: the ends of a text ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, ()),
        ({"eos_token": "<eos>"}, (EOS,)),
        ({"eos_token": {"content": "<eos>", "special": True}}, (EOS,)),
        ({"eos_token": "<eos>", "chat_template": TEMPLATE}, (EOS, END)),
        ({"eos_token": "<end>", "chat_template": TEMPLATE}, (END,)),
        ({"eos_token": "<eos>", "chat_template": "{{ messages[-1].content }}\nUser:"}, (EOS,)),
        ({"eos_token": "<eos>", "chat_template": "{{ raise_exception('tools only') }}"}, (EOS,)),
        ({"eos_token": "<eos>", "chat_template": "{% no such tag %}"}, (EOS,)),
    ],
)
def test_a_text_ends_at_eos_and_at_the_end_of_a_turn(config, expected):
    assert Tokenizer(byte_level_tokenizer(), config, "toy").eos_ids == expected


# --- Loading, and telling tokenizers apart ----------------------------------------------------------------------


def write(path, config=None, template=None):
    path.mkdir(exist_ok=True)
    byte_level_tokenizer().save(str(path / "tokenizer.json"))
    if config is not None:
        (path / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (path / "chat_template.jinja").write_text(template)
    return path


def test_load_from_a_directory(tmp_path):
    config = {"bos_token": "<bos>", "chat_template": "no"}
    assert load_tokenizer(write(tmp_path / "a")).chat.__self__.bos_id is None
    assert load_tokenizer(write(tmp_path / "b", config)).render([], False) == "no"
    assert load_tokenizer(write(tmp_path / "c", config, "yes")).render([], False) == "yes"


@pytest.mark.parametrize(
    ("settings", "named"),
    [("[]", "not settings"), ('{"eos_token": 5}', "eos_token 5"), ("{", "damaged"), ('{"bos_token": {"a": 1}}', "bos"),
     ('{"chat_template": {"a": 1}}', "tokenizer_config.json: chat_template"),
     ('{"chat_template": [1]}', "tokenizer_config.json: chat_template"),
     ('{"chat_template": [{"name": "default", "template": 5}]}', "chat_template")],
)
def test_damaged_settings_are_named(settings, named, tmp_path):
    write(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(settings)
    with pytest.raises(ValueError, match=f"{tmp_path.name}.*{named}"):
        load_tokenizer(tmp_path)


def test_limits_stored_in_the_file_do_not_apply(tmp_path):
    backend = byte_level_tokenizer()
    backend.enable_truncation(2)
    backend.enable_padding(length=9)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).encode("hello world") == [HELLO, *WORLD]


def test_random_models_have_no_tokenizer():
    with pytest.raises(ValueError, match="no tokenizer: give prompts as lists of token ids"):
        load_tokenizer("random:llama-3-8b")


def test_a_directory_without_tokenizer_says_so(tmp_path):
    with pytest.raises(ModelNotFound, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_other_kinds_of_tokenizer_are_refused():
    backend = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(ValueError, match="bert: only byte-level BPE and SentencePiece"):
        Tokenizer(backend, {}, "bert")


def test_content_hash_tells_vocabularies_apart():
    """Of one size, but two ids swapped: a draft with such a map would propose nonsense."""
    swapped = of_pieces(["b", "a", "c"])
    assert of_pieces(["a", "b", "c"]).content_hash == of_pieces(["a", "b", "c"]).content_hash
    assert of_pieces(["a", "b", "c"]).content_hash != swapped.content_hash
    assert of_pieces(["a", "b", "c"]).vocab_size == swapped.vocab_size == 3
    assert of_pieces(["a", "b", "c"]).content_hash != of_pieces(["a", "b", "c", "d"]).content_hash


def test_smollm_words():
    """Digits are cut out first, and only then words: the space before a number is on its own."""
    normalizer, pre_tokenizer = _splitter("smollm")
    assert normalizer is None
    words = [word for word, _ in pre_tokenizer.pre_tokenize_str("In 1984,  don't\n 7")]
    assert words == ["In", "Ġ", "1", "9", "8", "4", ",", "Ġ", "Ġdon", "'t", "ĊĠ", "7"]


@settings(deadline=None)  # the first example imports transformers
@given(text=st.text(alphabet="abÀé中 \n\r\t'sS1²٠.!?😀\u0301", max_size=30))
def test_qwen2_words_agree_with_transformers(text):
    from transformers import Qwen2Tokenizer

    theirs = Qwen2Tokenizer(vocab={"a": 0}, merges=[]).backend_tokenizer
    normalizer, pre_tokenizer = _splitter("qwen2")
    assert normalizer.normalize_str(text) == theirs.normalizer.normalize_str(text)
    assert pre_tokenizer.pre_tokenize_str(text) == theirs.pre_tokenizer.pre_tokenize_str(text)


# --- The real tokenizer -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2(smollm2_dir) -> Tokenizer:
    return load_tokenizer(smollm2_dir)


def test_smollm2_golden_ids(smollm2):
    """A digit is a token of its own, and the space before a number stands alone."""
    assert smollm2.encode("The capital of France is") == [504, 3575, 282, 4649, 314]
    tokens = [smollm2.backend.id_to_token(id) for id in smollm2.encode("In 1984, don't")]
    assert tokens == ["In", "Ġ", "1", "9", "8", "4", ",", "Ġdon", "'t"]
    chat = [1, 9690, 198, 6077, 5453, 30, 2, 198, 1, 4093, 198, 26843, 2, 198, 1, 520, 9531, 198]
    assert smollm2.chat("Hi", system="Be brief.") == chat
    opening = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert smollm2.decode(chat, skip_special=False) == opening
    assert (smollm2.bos_id, smollm2.eos_ids, smollm2.vocab_size) == (1, (2,), 49_152)
    assert smollm2.special_ids == set(range(17))


@given(text=st.text(max_size=60))
@settings(max_examples=200, deadline=None)
def test_smollm2_round_trip(smollm2, text):
    """Of all it can spell: its vocabulary lacks 21 bytes, so that rare characters vanish in `encode`."""
    spellable = {byte for token, byte in BYTE_OF_CHARACTER.items() if smollm2.backend.token_to_id(token) is not None}
    assert len(spellable) == 256 - 21
    spelt = "".join(character for character in text if set(character.encode()) <= spellable)
    ids = smollm2.encode(spelt)
    assert smollm2.decode(ids, skip_special=False) == spelt
    deltas, _, _ = run_stream(smollm2, ids)
    assert "".join(deltas) == smollm2.decode(ids)


def test_smollm2_agrees_with_transformers(smollm2, smollm2_dir):
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(smollm2_dir)
    for text in ["", "  two  spaces\n\n\tand 12 345 ½", "naïve café 日本語 👩‍👩‍👧", "<|im_start|>user\nhi<|im_end|>"]:
        ids = theirs(text)["input_ids"]
        assert smollm2.encode(text) == ids
        assert smollm2.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    for generation in (True, False):
        rendered = theirs.apply_chat_template(messages, add_generation_prompt=generation, tokenize=False)
        assert smollm2.render(messages, generation) == rendered


def test_a_long_text_is_cut_as_a_short_one_is(monkeypatch):
    tokenizer = Tokenizer(byte_level_tokenizer(), {}, "toy")
    text = "hello world é 😀 <eos> " * 20
    short = tokenizer.encode(text)
    monkeypatch.setattr("minillm.load.tokenizer.LONG_TEXT", 10)
    assert tokenizer.encode(text) == short
