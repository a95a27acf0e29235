"""A completion as it streams in: from the bytes of server-sent events to the times of a request's tokens.

A line ends with LF, CR or CRLF and with nothing else, since a token may hold U+2028 or a form feed;
an event ends with an empty line, and may have several lines of data. What is wrong with a stream
raises a `Fault`. What says nothing about the answer is ignored: comments, empty events, events of
another name, chunks without a choice.
"""

from __future__ import annotations

import asyncio
import json
import re
from codecs import BOM_UTF8
from collections.abc import AsyncIterator, Iterator

import httpx

from minillm.ladder.records import RequestRecord

EVENTS_PER_TOKEN = 4  # more than any server sends: an answer of more has no end
MOST_BYTES = 1 << 24  # of one event: one without an end would fill the memory
LINE_END = re.compile(rb"\r\n?|\n")
IN_STREAM = "server error in the stream"
MESSAGES = ("message", "detail", "error", "text", "code", "type")  # keys under which an error says what it is


class Fault(Exception):
    """What went wrong with one request: its kind, as counted."""


# -- from bytes to events -------------------------------------------------------------------------


class EventDecoder:
    """Cuts bytes into server-sent events as they come: https://html.spec.whatwg.org/multipage/server-sent-events.html

    Two forms beyond the standard, in which servers report errors, come out as well: a field named
    `error`, and a line of bare JSON, which is an event without a name (None).
    """

    def __init__(self) -> None:
        self.rest = bytearray()  # of a line that has not ended
        self.name, self.data, self.held = "", [], 0  # of an event that has not ended; held: its bytes
        self.after_cr, self.at_start = False, True

    def feed(self, chunk: bytes) -> Iterator[tuple[str | None, str]]:
        """(name, data) of each event that these bytes complete."""
        start = int(self.after_cr and chunk.startswith(b"\n"))  # a CRLF in two chunks is one end
        self.after_cr = chunk.endswith(b"\r") if chunk else self.after_cr
        for end in LINE_END.finditer(chunk, start):
            line, start = bytes(self.rest + chunk[start : end.start()]), end.end()
            self.rest.clear()
            if event := self._line(line):
                yield event
        self.rest += chunk[start:]
        if self.held + len(self.rest) > MOST_BYTES:
            raise Fault("malformed: an event without an end")

    def _line(self, line: bytes) -> tuple[str | None, str] | None:
        """The event that a line completes, if it does."""
        text = (line.removeprefix(BOM_UTF8) if self.at_start else line).decode(errors="replace")
        self.at_start = False
        if not text:
            event = (self.name, "\n".join(self.data)) if self.name or self.data else None
            self.name, self.data, self.held = "", [], 0
            return event
        field, _, value = text.partition(":")
        value = value.removeprefix(" ")
        if field == "event":
            self.name = value
        elif field == "data" or (field == "error" and value not in ("", "null")):
            self.name = "error" if field == "error" else self.name
            self.data.append(value)
            self.held += len(line)
        return (None, text) if text.startswith("{") else None


async def events(response: httpx.Response, most: int) -> AsyncIterator[dict]:
    """The chunks of a completion, up to `[DONE]` or the end; Fault if one is malformed, or there are over `most`."""
    decoder, left = EventDecoder(), most
    async for chunk in response.aiter_bytes():
        await asyncio.sleep(0)  # however fast the bytes come, the client's patience can run out between them
        for name, data in decoder.feed(chunk):
            if data.strip() == "[DONE]":
                return
            if (event := read_data(name, data)) is None:
                continue
            left -= 1
            if left < 0:
                raise Fault("malformed: an answer without an end")
            yield event
    for name, data in decoder.feed(b"\n\n"):  # an event without its empty line does not count, but an error in it does
        read_data("error" if name == "error" else None, data)
    if left == most and "text/event-stream" not in response.headers.get("content-type", "text/event-stream"):
        raise Fault("malformed: not a stream of events")


def read_data(name: str | None, data: str) -> dict | None:
    """The chunk that an event holds, None if it holds none; Fault if it is malformed, or reports an error."""
    plain = name in ("", "message")
    try:
        chunk = json.loads(data, strict=False)  # a raw control character in a token breaks nothing
    except (ValueError, RecursionError):  # a number of too many digits, brackets in too many brackets
        if plain and data.strip():
            raise Fault("malformed: not JSON") from None
        chunk = None
    error = (chunk or data) if name == "error" else reported_error(chunk)
    if error is not None:
        raise Fault(": ".join(filter(None, (IN_STREAM, in_words(error)))))
    if plain and data.strip() and not isinstance(chunk, dict):
        raise Fault("malformed: not an object")
    return chunk if isinstance(chunk, dict) and (plain or (name and "choices" in chunk)) else None


# -- errors that a stream reports -----------------------------------------------------------------


def reported_error(chunk: object) -> object:
    """The error in a chunk or in one of its choices; None for a chunk that merely has a field for one."""
    if not isinstance(chunk, dict):
        return None
    choices = chunk.get("choices")
    for part in (chunk, *(choices if isinstance(choices, list) else ())):
        if not isinstance(part, dict):
            continue
        error, code = part.get("error"), part.get("error_code")
        if any(error.values()) if isinstance(error, dict) else error:
            return error if isinstance(error, dict | str) else part
        if type(code) is int and code:
            return part
        if part.get("finish_reason") in ("error", "abort"):
            return f"finish_reason {part['finish_reason']}"
    return chunk if "error" in (chunk.get("object"), chunk.get("type"), chunk.get("status")) else None


def in_words(error: object) -> str:
    """An error's own message, on one line of at most 100 characters; "" if it has none."""
    while isinstance(error, dict):
        error = next((error[key] for key in MESSAGES if error.get(key)), "")
    text = str(error) if isinstance(error, str | int | float) else ""
    return " ".join("".join(c if c.isprintable() else " " for c in text[:1000]).split())[:100]


# -- from events to tokens ------------------------------------------------------------------------


def read_event(chunk: dict, life: RequestRecord, now: float, most: int) -> None:
    """Note a chunk's new tokens, end, and count so far. Fault if malformed, or if it counts more than `most`."""
    choices, usage = chunk.get("choices"), chunk.get("usage")
    if not isinstance(choices, list | None) or not ("choices" in chunk or usage):
        raise Fault("malformed: no choices")
    text = ""
    for choice in choices or ():
        text += choice_text(choice)
        reason = choice.get("finish_reason")
        if not isinstance(reason, str | None):
            raise Fault("malformed: a reason to finish that is not text")
        life.finish_reason = reason or life.finish_reason
        life.finish = now
    told = told_tokens(usage, most)
    if not told:  # none is told, or 0 by a server that counts at the end
        life.token_times += [now] * bool(text)
        return
    # tokens that only the last count tells of came with the text before it
    late = life.finish_reason and not text and life.token_times
    life.token_times += [life.token_times[-1] if late else now] * (told - life.output_tokens)
    del life.token_times[told:]


def choice_text(choice: object) -> str:
    """The text of a choice. It may be missing where the choice says how the answer ended, or how it was filtered."""
    if not isinstance(choice, dict):
        raise Fault("malformed: a choice without text")
    text = choice.get("text")
    silent = "text" in choice or choice.get("finish_reason") or any(key.startswith("content_filter") for key in choice)
    if not isinstance(text, str | None) or (text is None and not silent):
        raise Fault("malformed: a choice without text")
    return text or ""


def told_tokens(usage: object, most: int) -> int | None:
    """How many tokens a chunk's `usage` counts, None if it does not; Fault for what cannot be a count."""
    told = usage.get("completion_tokens") if isinstance(usage, dict) else usage or None
    if told is None:
        return None
    if type(told) not in (int, float) or not 0 <= told <= most or told != int(told):  # True is an int to isinstance
        raise Fault("malformed: no count of tokens")
    return int(told)
