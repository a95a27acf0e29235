"""Text to token ids and back, whole or as a stream.

A token is a run of bytes, not of characters: an emoji may be four tokens. So decoding here
is joining bytes and reading them as UTF-8, and a stream does the same with an incremental
UTF-8 decoder. Its cost per token is the same at the first and at the ten-thousandth.
"""

from __future__ import annotations

import codecs
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

from minillm.load.gguf_file import GGUFFile
from minillm.load.source import DEFAULT, ModelNotFound, locate

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
    backend = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    settings = {}
    if (file := path / "tokenizer_config.json").is_file():
        settings = json.loads(file.read_text(encoding="utf-8"))
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
        backend.no_truncation()  # a tokenizer.json may carry the limits of somebody's training
        backend.no_padding()
        self.special_ids = {id for id, token in backend.get_added_tokens_decoder().items() if token.special}
        self.bos_id, self.eos_id = self._setting_id("bos_token"), self._setting_id("eos_token")
        # What the decoder does to a token tells which kind it is.
        decode = backend.decoder.decode if backend.decoder else "".join
        self._is_byte_level = decode(["a", "Ġ"]) == "a "
        self._strips_first_space = decode(["▁a"]) == "a"
        if not self._is_byte_level and decode(["a", "▁"]) != "a ":
            raise ValueError(f"{name}: only byte-level BPE and SentencePiece tokenizers are supported")

    def _setting_id(self, key: str) -> int | None:
        token = self.settings.get(key)
        token = token["content"] if isinstance(token, Mapping) else token
        return None if token is None else self.backend.token_to_id(token)

    def encode(self, text: str, add_bos: bool | None = None) -> list[int]:
        """Token ids of plain text; special tokens written in it count as such.

        add_bos: whether to begin with BOS; None does what tokenizer.json says. A text that
        already begins with BOS does not get a second.
        """
        ids = self._ids(text)
        wanted = self._adds_bos if add_bos is None else add_bos
        if wanted and self.bos_id is None:
            raise ValueError(f"{self.name} has no BOS token to add")
        return [self.bos_id, *ids] if wanted and ids[:1] != [self.bos_id] else ids

    def _ids(self, text: str) -> list[int]:
        """Token ids of just this text; ValueError for what UTF-8 cannot write, such as half a surrogate pair."""
        try:
            return self.backend.encode(text, add_special_tokens=False).ids
        except (TypeError, UnicodeEncodeError):
            raise ValueError(f"{text!r} is no text that can be written in UTF-8") from None

    @cached_property
    def _adds_bos(self) -> bool:
        return self.bos_id is not None and self.bos_id in self.backend.encode("", add_special_tokens=True).ids

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of the ids; bytes that are no UTF-8 become U+FFFD, ids unknown to the tokenizer nothing."""
        data = b"".join(self.token_bytes(id) for id in ids if not (skip_special and id in self.special_ids))
        return self._without_first_space(data.decode("utf-8", errors="replace"))

    def token_bytes(self, id: int) -> bytes:
        """The bytes that one token stands for."""
        token = self.backend.id_to_token(id) if id >= 0 else None
        if token is None:
            return b""
        if self._is_byte_level:
            try:
                return bytes(BYTE_OF_CHARACTER[character] for character in token)
            except KeyError:  # an added token, kept as plain text
                return token.encode()
        if len(token) == 6 and token.startswith("<0x"):  # SentencePiece's <0xE2>: a byte without a token of its own
            return bytes.fromhex(token[3:5])
        return token.replace("▁", " ").encode()

    def _without_first_space(self, text: str) -> str:
        """SentencePiece puts a space before every word, which is taken off again where a text starts."""
        return text.removeprefix(" ") if self._strips_first_space else text

    def stream(self, stop: Sequence[str] = ()) -> TextStream:
        """A stream that turns generated ids into text one by one."""
        return TextStream(self, stop)

    def chat(
        self, messages: str | Sequence[Message], add_generation_prompt: bool = True, system: str | None = None
    ) -> list[int]:
        """Token ids of a conversation in the model's own chat format.

        messages: one user message as a str, or all as {"role", "content"}. system: a system
        message to put before them. add_generation_prompt: end with the opening of the
        assistant's turn. The template writes the special tokens, so none are added here.
        """
        messages = [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
        return self._ids(self.render(messages, add_generation_prompt))

    def render(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        """The text of a conversation, special tokens and all.

        Raises ValueError where there is no chat template, or it refuses these messages.
        """
        special = {"bos_token": self.bos_id, "eos_token": self.eos_id}
        try:
            return self._template.render(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                **{key: "" if id is None else self.backend.id_to_token(id) for key, id in special.items()},
            )
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template of {self.name} cannot render these messages: {error}") from error

    @cached_property
    def _template(self) -> jinja2.Template:
        """The chat template, compiled in a sandbox: it comes with the model, so it is a stranger's code."""
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
        answer = "answer"
        chat = [{"role": "user", "content": "question"}, {"role": "assistant", "content": answer}]
        try:
            rest = self.render(chat, add_generation_prompt=False).rpartition(answer)[2]
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


class TextStream:
    """The text of generated tokens, released as soon as it can no longer change.

    `push` returns new text; `finish`, called once no token follows, returns what was still
    held: half a character, or the beginning of a stop string that never came. Held is only
    what must be: the bytes of a started character, and the longest end of the text that a
    stop string begins with.

    The rule by which ids and text agree: `text` is `tokenizer.decode(ids)` of the pushed
    ids, cut before the leftmost stop string in it. The ids include the token that completed
    the stop string; the text does not include the stop string, and further ids are ignored.
    Stop strings are looked for in the generated text only, where special tokens have none.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self.stop = (stop,) if isinstance(stop, str) else tuple(stop)
        if "" in self.stop:
            raise ValueError("an empty stop string would end every text at once")
        self.stopped = False
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._at_start = True
        self._held = ""  # characters that may yet turn out to begin a stop string
        self._released: list[str] = []

    @property
    def text(self) -> str:
        """All text released so far."""
        return "".join(self._released)

    def push(self, token_id: int) -> str:
        """Take one token; return the text that is now certain, often one token's, sometimes none."""
        if token_id in self._tokenizer.special_ids:
            return ""
        return self._release(self._utf8.decode(self._tokenizer.token_bytes(token_id)), keep=True)

    def finish(self) -> str:
        """Return what is left; a second call returns nothing."""
        return self._release(self._utf8.decode(b"", final=True), keep=False)

    def _release(self, new: str, keep: bool) -> str:
        """Append `new` to what is held, and let go of all of it but what `keep` demands."""
        if self.stopped:
            return ""
        if self._at_start and new:
            new, self._at_start = self._tokenizer._without_first_space(new), False
        held = self._held + new
        matches = [place for stop in self.stop if (place := held.find(stop)) >= 0]
        if matches:
            self.stopped = True
            end, self._held = min(matches), ""
        else:
            end = len(held) - (self._begun_stop(held) if keep else 0)
            self._held = held[end:]
        self._released.append(held[:end])
        return held[:end]

    def _begun_stop(self, text: str) -> int:
        """Length of the longest end of `text` that a stop string begins with."""
        longest = max((len(stop) - 1 for stop in self.stop), default=0)
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self.stop):
                return length
        return 0


def _refuse(message: str) -> None:
    """What a chat template calls when it cannot render the messages it was given."""
    raise jinja2.TemplateError(message)


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE writes each byte as a printable character: itself, or one from U+0100 on (GPT-2)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


BYTE_OF_CHARACTER = _byte_alphabet()
