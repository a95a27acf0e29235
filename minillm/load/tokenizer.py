"""Text to token ids and back, whole or as a stream.

A token is a run of bytes, not of characters: an emoji may be four tokens. So decoding joins bytes and
reads them as UTF-8; `ladder/text.py` does the same for a stream.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

import jinja2
import tokenizers
from jinja2.sandbox import ImmutableSandboxedEnvironment

from minillm.ladder.text import TextStream
from minillm.load.gguf_file import GGUFFile
from minillm.load.source import DEFAULT, ModelNotFound, locate, read_json

Message = Mapping[str, str]  # {"role": "user" | "assistant" | "system", "content": text}


def load_tokenizer(name: str | os.PathLike = DEFAULT) -> Tokenizer:
    """The tokenizer of the model that `load_model` loads by the same name.

    Raises ValueError for `random:…`, which has none, ModelNotFound if the files are missing.
    """
    if os.fspath(name).startswith("random:"):
        raise ValueError(f"{name!r} has random weights and no tokenizer: give prompts as lists of token ids")
    path = locate(name)
    if path.is_file():
        return Tokenizer(*GGUFFile(path).tokenizer(), name=os.fspath(name))
    if not (path / "tokenizer.json").is_file():
        raise ModelNotFound(f"{path} holds no tokenizer.json; save it with a fast tokenizer of transformers")
    try:
        backend = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    except Exception as error:  # the library raises no narrower class
        raise ValueError(f"{path / 'tokenizer.json'} is damaged: {error}") from error
    settings = read_json(file) if (file := path / "tokenizer_config.json").is_file() else {}
    if (file := path / "chat_template.jinja").is_file():
        settings["chat_template"] = file.read_text(encoding="utf-8")
    return Tokenizer(backend, settings, name=os.fspath(name))


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
        self.bos_id, self.eos_id = self._setting_id("bos_token"), self._setting_id("eos_token")
        self.adds_bos = self.bos_id is not None and self.bos_id in backend.encode("", add_special_tokens=True).ids
        # What the decoder does to a token tells which kind it is.
        decode = backend.decoder.decode if backend.decoder else "".join
        self._is_byte_level = decode(["a", "Ġ"]) == "a "
        self._strips_first_space = decode(["▁a"]) == "a"
        if not self._is_byte_level and decode(["a", "▁"]) != "a ":
            raise ValueError(f"{name}: only byte-level BPE and SentencePiece tokenizers are supported")

    def _setting_id(self, key: str) -> int | None:
        token = self.settings.get(key)
        token = token.get("content") if isinstance(token, Mapping) else token
        if not isinstance(token, str | None):
            raise ValueError(f"{self.name}: {key} {token!r} is not a text")
        return None if token is None else self.backend.token_to_id(token)

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
        try:
            return self.backend.encode(text, add_special_tokens=False).ids
        except (TypeError, UnicodeEncodeError):
            raise ValueError(f"{text!r} cannot be written in UTF-8") from None

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

        messages: one user message as a str, or all as {"role", "content"}. system: a system message to
        put before them. add_generation_prompt: end with the opening of the assistant's turn.
        """
        messages = [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
        return self._ids(self.render(messages, add_generation_prompt))

    def render(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        """The text of a conversation; ValueError without a chat template, or where it refuses these messages."""
        special = {"bos_token": self.bos_id, "eos_token": self.eos_id}
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, tools=None, documents=None,
                **{key: "" if id is None else self.backend.id_to_token(id) for key, id in special.items()},
            )
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template of {self.name} cannot render these messages: {error}") from error

    @cached_property
    def _template(self) -> jinja2.Template:
        """The chat template, compiled in a sandbox: it comes with the model, so it is untrusted code."""
        source = self.settings.get("chat_template")
        if isinstance(source, list):  # several, by name
            source = {entry["name"]: entry["template"] for entry in source}.get("default")
        if source is None:
            raise ValueError(f"{self.name} has no chat template: encode the prompt as plain text with .encode")
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        # What templates expect to find besides the variables of `render`.
        environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, indent=indent, ensure_ascii=False)
        environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
        environment.globals["raise_exception"] = _refuse
        return environment.from_string(source)

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


def _refuse(message: str) -> None:
    """What a chat template calls when it cannot render the messages it was given."""
    raise jinja2.TemplateError(message)


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE writes each byte as a printable character: itself, or one from U+0100 on (GPT-2)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


BYTE_OF_CHARACTER = _byte_alphabet()
