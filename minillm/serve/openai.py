"""OpenAI's API as data: what a body asks for, and what an answer, a chunk and an error look like.

https://platform.openai.com/docs/api-reference/completions and .../chat. `ignore_eos`, `top_k` and
`stop_token_ids` are vLLM's additions. A field that is not known is refused: to ignore it would be to
answer another question than the one that was asked.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from minillm.guard.inputs import as_whole
from minillm.ladder.request import SamplingParams
from minillm.load.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 16  # of a completion, as the API says; a chat may fill the context
DEFAULT_TEMPERATURE = 1.0
MOST_STOPS = 16
MEANT_HERE = {
    "model", "stream", "stream_options", "max_tokens", "temperature", "top_p", "top_k", "seed", "stop",
    "stop_token_ids", "ignore_eos",
}
OF_KIND = {False: {"prompt"}, True: {"messages", "max_completion_tokens"}}
WITHOUT_EFFECT = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
ONLY_AS_DEFAULT: dict[str, tuple] = {  # fields of features that are not here, with the values that do not ask for them
    "n": (1,), "best_of": (1,), "echo": (False,), "logprobs": (False,), "top_logprobs": (0,), "suffix": ("",),
    "presence_penalty": (0,), "frequency_penalty": (0,), "logit_bias": ({},), "tools": ([],), "functions": ([],),
    "tool_choice": ("none", "auto"), "parallel_tool_calls": (True, False), "modalities": (["text"],),
    "response_format": ({"type": "text"},),
}
STREAM_OPTIONS = {"include_usage", "continuous_usage_stats", "include_obfuscation"}


class ApiError(Exception):
    """An answer that is an error: HTTP status, message, and OpenAI's `type`, `code` and `param`."""

    def __init__(self, status: int, message: str, kind: str = "invalid_request_error", code: str | None = None,
                 param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        # half a surrogate pair, which JSON can hold and UTF-8 cannot, would come back out of the body
        message, param = (text and text.encode(errors="replace").decode() for text in (message, param))
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


@dataclass(frozen=True)
class Asked:
    """A request as the engine takes it, and how its answer is wanted."""

    prompt: list[int]
    params: SamplingParams
    chat: bool
    stream: bool
    usage_at_end: bool
    usage_always: bool


# -- what a body asks for -------------------------------------------------------------------------


def read_body(body: Any, chat: bool, model: str, tokenizer: Tokenizer, max_context: int) -> Asked:
    """The request in a body. ApiError names the field that is wrong; RequestError or ValueError its value."""
    if not isinstance(body, dict):
        raise ApiError(400, f"the body must be a JSON object, not {body!r:.60}")
    fields = {name: value for name, value in body.items() if value is not None}  # null stands for the default
    check_fields(fields, chat)
    if fields.get("model", model) != model:
        raise ApiError(404, f"this server has {model!r}, not {fields['model']!r:.100}", code="model_not_found",
                       param="model")
    options = fields.get("stream_options", {})
    if not isinstance(options, dict) or options.keys() - STREAM_OPTIONS:
        raise ApiError(400, f"stream_options {options!r:.100} may hold {', '.join(sorted(STREAM_OPTIONS))}",
                       param="stream_options")
    switches = {"stream": fields.get("stream"), **options, "ignore_eos": fields.get("ignore_eos")}
    for name, value in switches.items():
        if not isinstance(value, bool | None):
            raise ApiError(400, f"{name} {value!r:.60} must be true or false", param=name)
    prompt = read_messages(fields, tokenizer) if chat else read_prompt(fields, tokenizer)
    params = read_params(fields, max(1, max_context - len(prompt)) if chat else DEFAULT_MAX_TOKENS)
    always = bool(options.get("continuous_usage_stats"))
    return Asked(prompt, params, chat, bool(fields.get("stream")), always or bool(options.get("include_usage")), always)


def check_fields(fields: dict, chat: bool) -> None:
    """ApiError for the first field that is not known here, or asks for what this server does not do."""
    for name, value in fields.items():
        if name in ONLY_AS_DEFAULT:
            if value not in ONLY_AS_DEFAULT[name]:
                raise ApiError(400, f"{name} {value!r:.60} is not supported here", param=name)
        elif name not in MEANT_HERE | OF_KIND[chat] | WITHOUT_EFFECT:
            raise ApiError(400, f"there is no field {name!r:.60} here", code="unknown_parameter", param=name)


def read_prompt(fields: dict, tokenizer: Tokenizer) -> list[int]:
    """The ids of `prompt`: a text, or ids, or a list with one of either."""
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and prompt and not all(as_whole(one) is not None for one in prompt):
        if len(prompt) > 1:
            raise ApiError(400, f"one prompt a request, not {len(prompt)}: send them as requests of their own",
                           param="prompt")
        prompt, = prompt
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    if not isinstance(prompt, list):
        raise ApiError(400, f"prompt {prompt!r:.60} must be a text or a list of token ids", param="prompt")
    return prompt


def read_messages(fields: dict, tokenizer: Tokenizer) -> list[int]:
    """The ids of `messages`, by the model's own template: a client cannot send one."""
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ApiError(400, f"messages {messages!r:.60} must be a list of messages", param="messages")
    return tokenizer.chat(messages)


def read_params(fields: dict, most: int) -> SamplingParams:
    """How to sample. RequestError, of SamplingParams itself, names a value that cannot be meant."""
    top_k, stop = fields.get("top_k"), fields.get("stop", ())
    if isinstance(stop, list) and len(stop) > MOST_STOPS:  # each is looked for at every token, in everybody's step
        raise ApiError(400, f"{len(stop):,} stop strings; at most {MOST_STOPS}", param="stop")
    return SamplingParams(
        max_tokens=fields.get("max_completion_tokens", fields.get("max_tokens", most)),
        temperature=fields.get("temperature", DEFAULT_TEMPERATURE),
        top_k=None if top_k in (0, -1) else top_k,  # vLLM's ways to keep all
        top_p=fields.get("top_p"), seed=fields.get("seed"), stop=stop,
        stop_ids=fields.get("stop_token_ids"), ignore_eos=fields.get("ignore_eos", False),
    )


# -- what comes back ------------------------------------------------------------------------------


class Shape:
    """Answer and chunks of one request. `created` is in whole seconds since 1970."""

    def __init__(self, request_id: str, model: str, asked: Asked) -> None:
        self.asked, self.tokens, self.first = asked, 0, True
        self.head = {"id": request_id, "created": int(time.time()), "model": model}
        if asked.chat:
            self.head["id"] = request_id.replace("cmpl", "chatcmpl")

    def usage(self) -> dict:
        """Tokens of the prompt, of the answer so far, and of both."""
        prompt = len(self.asked.prompt)
        return {"prompt_tokens": prompt, "completion_tokens": self.tokens, "total_tokens": prompt + self.tokens}

    def chunk(self, text: str, reason: str | None) -> dict:
        """One event of a stream."""
        if self.asked.chat:
            kind, part = "chat.completion.chunk", {"delta": {"content": text}}
            if self.first:
                part["delta"] = {"role": "assistant", "content": text}
        else:
            kind, part = "text_completion", {"text": text}
        self.first = False
        choice = {"index": 0, **part, "logprobs": None, "finish_reason": reason}
        return {**self.head, "object": kind, "choices": [choice],
                **({"usage": self.usage()} if self.asked.usage_always else {})}

    def last_chunk(self) -> dict:
        """The usage of the whole, in a chunk without a choice."""
        kind = "chat.completion.chunk" if self.asked.chat else "text_completion"
        return {**self.head, "object": kind, "choices": [], "usage": self.usage()}

    def whole(self, text: str, reason: str | None) -> dict:
        """The answer in one piece."""
        chat = self.asked.chat
        part = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        choice = {"index": 0, **part, "logprobs": None, "finish_reason": reason}
        kind = "chat.completion" if chat else "text_completion"
        return {**self.head, "object": kind, "choices": [choice], "usage": self.usage()}
