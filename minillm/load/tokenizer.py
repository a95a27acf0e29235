"""Text to token ids and back, whole or as a stream.

A token is a run of bytes, not of characters: an emoji may be four tokens. So decoding joins bytes and
reads them as UTF-8; `ladder/text.py` does the same for a stream.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import tokenizers

from minillm.ladder.text import TextStream
from minillm.load.chat import Message, compiled_template, text_messages
from minillm.load.fields import Fields, naming_damage, read_json, read_text, refuse_pointer
from minillm.load.gguf_file import GGUFFile
from minillm.load.source import DEFAULT, ModelNotFound, locate, model_name

LONG_TEXT = 20_000  # characters


def load_tokenizer(name: str | os.PathLike = DEFAULT) -> Tokenizer:
    """The tokenizer of the model that `load_model` loads by the same name.

    Raises ValueError for `random:…`, which has none, ModelNotFound if the files are missing.
    """
    if model_name(name).startswith("random:"):
        raise ValueError(f"{name!r} has random weights and no tokenizer: give prompts as lists of token ids")
    path = locate(name)
    if path.is_file():
        return Tokenizer(*GGUFFile(path).tokenizer(), name=model_name(name))
    if not (file := path / "tokenizer.json").is_file():
        raise ModelNotFound(f"{path} holds no tokenizer.json; save it with a fast tokenizer of transformers")
    refuse_pointer(file)
    with naming_damage(str(file)):
        backend = tokenizers.Tokenizer.from_file(str(file))
    return Tokenizer(backend, _settings(path, backend), name=model_name(name))


def _settings(path: Path, backend: tokenizers.Tokenizer) -> dict[str, Any]:
    """BOS, EOS and the chat template that a directory's files name, each checked.

    transformers writes the special tokens into tokenizer_config.json, its older versions also into
    special_tokens_map.json, which counts where the first one has no `added_tokens_decoder`.
    """
    config, special = (
        read_json(file) if (file := path / f"{name}.json").is_file() else Fields({}, str(file))
        for name in ("tokenizer_config", "special_tokens_map")
    )
    settings = {"chat_template": _template_text(config)}
    for fields in (special, config) if "added_tokens_decoder" in config else (config, special):
        tokens = {key: text for key in ("bos_token", "eos_token") if (text := fields.text(key)) is not None}
        if unknown := [key for key, token in tokens.items() if backend.token_to_id(token) is None]:
            raise fields.refused(unknown[0], "a token of tokenizer.json")
        settings |= tokens
    if (file := path / "chat_template.jinja").is_file():
        settings["chat_template"] = read_text(file)
    return settings


def _template_text(fields: Fields) -> str | None:
    """The chat template of tokenizer_config.json; of several by name, the default."""
    template = fields.get("chat_template")
    if isinstance(template, list) and all(isinstance(entry, dict) and "name" in entry for entry in template):
        template = next((entry.get("template", 0) for entry in template if entry["name"] == "default"), None)
    if not isinstance(template, str | None):
        raise fields.refused("chat_template", "a text, or a list of named ones")
    return template


class Tokenizer:
    """A `tokenizers.Tokenizer` with the settings of its tokenizer_config.json.

    bos_id, eos_id: None where there is none. Raises ValueError for a tokenizer whose tokens
    are not bytes (neither byte-level BPE nor SentencePiece).
    """

    def __init__(self, backend: tokenizers.Tokenizer, settings: Mapping[str, Any], name: str) -> None:
        self.backend, self.settings, self.name = backend, settings, name
        backend.no_truncation()  # a tokenizer.json may carry the limits of its training
        backend.no_padding()
        self.added = backend.get_added_tokens_decoder()
        self.special_ids = {id for id, token in self.added.items() if token.special}
        self.template = _template_text(Fields(settings, name))
        self.bos_id, self.eos_id = self._setting_id("bos_token"), self._setting_id("eos_token")
        decode = backend.decoder.decode if backend.decoder else "".join
        with naming_damage(f"the tokenizer of {name}"):
            self.adds_bos = self.bos_id is not None and self.bos_id in backend.encode("", add_special_tokens=True).ids
            # What the decoder does to a token tells which kind it is.
            two, first = decode(["a", "Ġ"]), decode(["▁a"])
            is_sentencepiece = decode(["a", "▁"]) == "a "
        self._is_byte_level, self._strips_first_space = two == "a ", first == "a"
        if not self._is_byte_level and not is_sentencepiece:
            raise ValueError(f"{name}: only byte-level BPE and SentencePiece tokenizers are supported")

    def _setting_id(self, key: str) -> int | None:
        token = Fields(self.settings, self.name).text(key)
        if token is None:
            return None
        if (id := self.backend.token_to_id(token)) is None:
            raise ValueError(f"{self.name}: {key} {token!r:.60} is not in its vocabulary")
        return id

    def encode(self, text: str, add_bos: bool | None = None) -> list[int]:
        """Token ids of plain text; special tokens written in it count as such.

        add_bos: whether to begin with BOS, unless the text does; None does what tokenizer.json says.
        """
        ids = self._ids(text)
        wanted = self.adds_bos if add_bos is None else add_bos
        if wanted and self.bos_id is None:
            raise ValueError(f"{self.name} has no BOS token to add")
        return [self.bos_id, *ids] if wanted and ids[:1] != [self.bos_id] else ids

    def _ids(self, text: str) -> list[int]:
        """Token ids of just this text; ValueError for what UTF-8 cannot write, such as half a surrogate pair."""
        if not isinstance(text, str):
            raise ValueError(f"{text!r:.60} is not a text")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ValueError(f"{text!r} cannot be written in UTF-8") from None
        with naming_damage(f"the tokenizer of {self.name}"):
            if len(text) > LONG_TEXT:  # takes seconds: only a batch lets Python's other threads run meanwhile
                return self.backend.encode_batch([text], add_special_tokens=False)[0].ids
            return self.backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of the ids; bytes that are not UTF-8 become U+FFFD, unknown ids nothing."""
        data = b"".join(self.token_bytes(id) for id in ids if not (skip_special and id in self.special_ids))
        return self.without_first_space(data.decode("utf-8", errors="replace"))

    def token_bytes(self, id: int) -> bytes:
        """The bytes that one token stands for."""
        token = self.backend.id_to_token(id) if id >= 0 else None
        if token is None:
            return b""
        if self._is_byte_level:
            if id in self.added or not BYTE_OF_CHARACTER.keys() >= set(token):  # kept as plain text
                return token.encode()
            return bytes(map(BYTE_OF_CHARACTER.__getitem__, token))
        if len(token) == 6 and token.startswith("<0x"):  # SentencePiece's <0xE2>: a byte without a token of its own
            return bytes.fromhex(token[3:5])
        return token.replace("▁", " ").encode()

    def without_first_space(self, text: str) -> str:
        """SentencePiece puts a space before every word, which is taken off again where a text starts."""
        return text.removeprefix(" ") if self._strips_first_space else text

    def stream(self, stop: Sequence[str] = ()) -> TextStream:
        """A stream that turns generated ids into text one by one."""
        return TextStream(self, stop)

    def chat(
        self, messages: str | Sequence[Message], add_generation_prompt: bool = True, system: str | None = None
    ) -> list[int]:
        """Token ids of a conversation in the model's own chat format, whose template writes the special tokens.

        messages: one user message as a str, or all as {"role", "content"}, where the content is a text or a
        list of text parts. system: a system message to put before them. add_generation_prompt: end with the
        opening of the assistant's turn. ValueError names a message that is something else.
        """
        return self._ids(self.render(text_messages(messages, system), add_generation_prompt))

    def render(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        """The text of a conversation; ValueError without a chat template, or where it refuses these messages."""
        if self.template is None:
            raise ValueError(f"{self.name} has no chat template: encode the prompt as plain text with .encode")
        special = {"bos_token": self.bos_id, "eos_token": self.eos_id}
        try:
            return self._compiled_template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, tools=None, documents=None,
                **{key: "" if id is None else self.backend.id_to_token(id) for key, id in special.items()},
            )
        except Exception as error:  # a template is a program: it can fail in any way
            raise ValueError(f"the chat template of {self.name} cannot render these messages: {error}") from error

    @cached_property
    def _compiled_template(self) -> jinja2.Template:
        return compiled_template(self.template)

    @cached_property
    def eos_ids(self) -> tuple[int, ...]:
        """The ids that end a text: EOS, and the token that ends an assistant's turn in a chat."""
        ids = (self.eos_id, self._turn_end())
        return tuple(dict.fromkeys(id for id in ids if id is not None))

    def _turn_end(self) -> int | None:
        """The special token that the chat template writes right after an answer, if it does."""
        chat = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
        try:
            rest = self.render(chat, add_generation_prompt=False).rpartition("answer")[2]
        except ValueError:  # no template, or one for other kinds of chats
            return None
        ids = self._ids(rest)
        return ids[0] if ids and ids[0] in self.special_ids else None

    @cached_property
    def vocab_size(self) -> int:
        """One above the largest id. A model's embedding may be padded to more rows."""
        return max(self.backend.get_vocab(with_added_tokens=True).values()) + 1

    @cached_property
    def content_hash(self) -> str:
        """sha256 of the map from tokens to ids: equal where two models mean the same by an id."""
        pairs = sorted(self.backend.get_vocab(with_added_tokens=True).items())
        return hashlib.sha256(json.dumps(pairs).encode()).hexdigest()


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE writes each byte as a printable character: itself, or one from U+0100 on (GPT-2)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


BYTE_OF_CHARACTER = _byte_alphabet()
