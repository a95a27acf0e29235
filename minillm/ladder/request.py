"""What a user asks for, what the engine remembers of it, and what comes back."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from minillm.model.config import is_number

GREEDY_BELOW = 1e-5  # temperatures under this are greedy: dividing by them overflows
HOTTEST = 1e30  # far beyond "all tokens alike", and still a number in fp32

RequestId = str | int


class RequestError(ValueError):
    """A request that can never run as asked; the message says which numbers clash."""


def check_prompt(prompt_ids: Sequence[int]) -> None:
    """Raise RequestError for an empty prompt, which gives the model nothing to continue."""
    if not prompt_ids:
        raise RequestError("the prompt is empty; it needs at least one token")


@dataclass(frozen=True)
class SamplingParams:
    """How to continue one prompt.

    max_tokens: the cap on output tokens, and what a slot must reserve. temperature: 0, or
    anything under `GREEDY_BELOW`, is greedy. top_k, top_p: None keeps all. seed: None takes
    one from the engine's seed and the request's place in line. stop: strings that end the
    text, which is cut before them. stop_ids: ids that end it, besides the model's EOS ids,
    which `ignore_eos` ignores. stop_after: a hidden end for experiments: after so many
    tokens the request ends as if the model had said EOS; the scheduler cannot see it coming.
    """

    max_tokens: int = 64
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_ids: Collection[int] | None = None
    ignore_eos: bool = False
    stop_after: int | None = None

    def __post_init__(self) -> None:
        one = isinstance(self.stop, str) or not isinstance(self.stop, Iterable | None)
        object.__setattr__(self, "stop", (self.stop,) if one else tuple(() if self.stop is None else self.stop))
        for name in ("max_tokens", "top_k", "seed", "stop_after"):
            value = getattr(self, name)
            whole = is_number(value) and hasattr(value, "__index__")
            if not (whole or (value is None and name != "max_tokens")):
                raise RequestError(f"{name} {value!r} is no whole number")
        for name in ("temperature", "top_p"):
            value = getattr(self, name)
            if not (is_number(value) or (value is None and name == "top_p")):
                raise RequestError(f"{name} {value!r} is no number")
        if not all(isinstance(stop, str) for stop in self.stop):
            raise RequestError(f"stop strings are texts, not {self.stop!r}; token ids belong to stop_ids")
        if isinstance(self.stop_ids, str) or not isinstance(self.stop_ids, Collection | None):
            raise RequestError(f"stop_ids {self.stop_ids!r} is no collection of token ids; texts belong to stop")
        if self.max_tokens < 0:
            raise RequestError(f"max_tokens {self.max_tokens} is negative; 0 gives an empty answer")
        if not 0 <= self.temperature <= HOTTEST:
            raise RequestError(f"temperature {self.temperature} must be from 0, which is greedy, to {HOTTEST:g}")
        if self.top_k is not None and self.top_k < 1:
            raise RequestError(f"top_k {self.top_k} would leave no token; use None to keep all")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise RequestError(f"top_p {self.top_p} must be above 0 and at most 1; None keeps all")
        if self.stop_after is not None and self.stop_after < 1:
            raise RequestError(f"stop_after {self.stop_after} must be at least 1 token")
        if "" in self.stop:
            raise RequestError("an empty stop string would end every text at once")

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW


@dataclass(frozen=True)
class Timing:
    """When things happened, in seconds on the engine's clock; None if they never did."""

    arrival: float
    first_scheduled: float | None
    first_token: float | None
    finish: float

    @property
    def ttft(self) -> float | None:
        """Time to first token, from arrival: waiting counts."""
        return None if self.first_token is None else self.first_token - self.arrival


@dataclass(eq=False)
class Request:
    """One sequence on its way through the engine.

    Two lengths, never one: `num_tokens` are known, `num_kv` have their keys and values
    computed and stored. A sampled token has none until it is fed.

        tokens:   [ prompt ............ | output ........ newest ]
                    <-- num_kv: stored, in block_table -->|        <- still to be fed
    """

    id: RequestId
    prompt_ids: list[int]
    params: SamplingParams
    arrival: float
    seed: int
    stop_ids: frozenset[int]
    num_prompt: int = field(init=False)
    max_kv: int = field(init=False)  # the most tokens it can ever store: the last output token is never fed
    num_at_end: float = field(init=False)  # how many tokens there are when it ends, unless a stop comes before
    order: int = 0  # its place in line: the lower, the longer it waits, and the later it is preempted
    tokens: list[int] = field(default_factory=list)  # prompt and output
    num_kv: int = 0
    num_once_stored: int = 0  # stored before a preemption: feeding these again is not progress
    block_table: list[int] = field(default_factory=list)
    prefix_nodes: list[int] = field(default_factory=list)  # of its full blocks, in the pool's prefix index
    finish_reason: str | None = None  # "stop" | "length" | "abort"
    cut: int | None = None  # where a stop string ended the answer, if accepted drafts go on behind it
    timing: Timing | None = None  # once it has finished

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt_ids)
        self.num_prompt = len(self.prompt_ids)
        self.max_kv = self.num_prompt + max(self.params.max_tokens, 1) - 1
        self.num_at_end = self.num_prompt + min(self.params.max_tokens, self.params.stop_after or math.inf)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def output_ids(self) -> list[int]:
        return self.tokens[self.num_prompt : self.cut]

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def num_pending(self) -> int:
        """Tokens known but not yet fed: one when it decodes, more when it (re)computes a prompt."""
        return len(self.tokens) - self.num_kv

    def extend(self, tokens: list[int]) -> list[int]:
        """Take output tokens up to the one that ends the text; returns those taken. A stop comes before the cap."""
        if len(self.tokens) + len(tokens) < self.num_at_end and self.stop_ids.isdisjoint(tokens):  # nearly always
            self.tokens += tokens
            return tokens
        for number, token in enumerate(tokens, start=1):
            self.tokens.append(token)
            if token in self.stop_ids:
                self.finish_reason = "stop"
            elif len(self.tokens) >= self.num_at_end:
                self.finish_reason = "stop" if self.num_output == self.params.stop_after else "length"
            if self.finish_reason:
                return tokens[:number]
        return tokens


@dataclass(frozen=True)
class Completion:
    """An answer. `token_ids` holds every output token, an ending EOS included; `text` is cut before a stop."""

    request_id: RequestId
    prompt_ids: list[int]
    token_ids: list[int]
    text: str | None  # None without a tokenizer
    finish_reason: str
    timing: Timing


class TokenEvent(NamedTuple):
    """What one step gave one request: its new tokens, and the text that is now safe to show."""

    request_id: RequestId
    token_ids: list[int]
    text: str
    finished: bool
    finish_reason: str | None
    time: float
