"""Chats: messages in the spellings of chat APIs, and the templates that turn them into one text.

A template is a Jinja program that comes with the model, so it runs in a sandbox. It finds here what it
finds in transformers, whose own environment is in a package that the engine does not need.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

Message = Mapping[str, Any]  # {"role": "user" | "assistant" | "system", "content": text, or a list of text parts}


def text_messages(messages: str | Sequence[Message], system: str | None = None) -> list[dict[str, Any]]:
    """A chat with each content as one text; a str is one user message. ValueError names a message that has none."""
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    try:
        messages = list(messages)
    except TypeError:
        raise ValueError(f"messages {messages!r:.60} is neither a text nor a list of messages") from None
    chat = [_text_message(number, message) for number, message in enumerate(messages)]
    return chat if system is None else [_text_message("system", {"role": "system", "content": system}), *chat]


def _text_message(number: int | str, message: Message) -> dict[str, Any]:
    """The message with its content as one text."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ValueError(f"message {number} {message!r:.60} is not of the form {{'role': text, 'content': text}}")
    content = message.get("content")
    parts = content if isinstance(content, list | tuple) else [content]
    return {**message, "content": "".join(_text(number, part) for part in parts)}


def _text(number: int | str, part: Any) -> str:
    """The text of one part of a message: a str, or {"type": "text", "text": str}."""
    text = part.get("text") if isinstance(part, Mapping) and part.get("type", "text") == "text" else part
    if not isinstance(text, str):
        raise ValueError(f"message {number}: its content {part!r:.60} is not a text, and this model reads only text")
    return text


class Generation(Extension):
    """`{% generation %}` marks an assistant's words for training; they are rendered as if it were not there."""

    tags = {"generation"}  # noqa: RUF012  (Jinja's own way to declare them)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def compiled_template(source: str) -> jinja2.Template:
    """A chat template, ready to render."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    environment.globals["raise_exception"] = _refuse
    return environment.from_string(source)


def _to_json(value: Any, ensure_ascii: bool = False, indent=None, separators=None, sort_keys: bool = False) -> str:
    """Unlike Jinja's own filter, which writes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    """What a chat template calls when it cannot render the messages it was given."""
    raise jinja2.TemplateError(message)
