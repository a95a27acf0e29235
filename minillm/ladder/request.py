"""What a user asks for, what the engine remembers of it, and what comes back.

Remember the picture in `Request`: a token is known as soon as it is sampled, its keys and values
are stored when it is fed, a step later.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from minillm.guard.inputs import check_sampling

NO_TOKEN = -1  # in place of an id: the logits were not finite, and the request ends with "error"
GREEDY_BELOW = 1e-5  # under this temperature sampling would give the argmax anyway

RequestId = str | int


@dataclass(frozen=True)
class SamplingParams:
    """How to continue one prompt. Raises RequestError for a value that cannot be meant.

    max_tokens: the cap on output tokens, for which `Slots` reserves memory. temperature: 0, or
    anything under `GREEDY_BELOW`, is greedy. top_k, top_p: None keeps all. seed: None takes
    one from the engine's seed and the request's number. stop: strings that end the text,
    which is cut before them. stop_ids: ids that end it, besides the model's EOS ids, which
    `ignore_eos` ignores. stop_after: a hidden end for experiments: after so many tokens the
    request ends as if the model had said EOS; no decision of the scheduler reads it.
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
        check_sampling(self)

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

    Two lengths, never one: `num_tokens` are known, `num_kv` have their keys and values stored.

        tokens:   [ prompt ............ | output ........ newest ]
                    <-- num_kv: stored, in block_table -->|        <- still to be fed
    """

    id: RequestId
    prompt_ids: list[int]
    params: SamplingParams
    arrival: float = 0.0
    seed: int = 0
    stop_ids: frozenset[int] = frozenset()
    num_prompt: int = field(init=False)
    max_kv: int = field(init=False)  # the most tokens it can ever store: the last output token is never fed
    length_limit: float = field(init=False)  # tokens at which it ends, if no EOS or stop string comes first
    arrival_number: int = 0  # `waiting` and `running` are in this order; the last is preempted first
    tokens: list[int] = field(default_factory=list)  # prompt and output
    num_kv: int = 0
    num_kv_lost: int = 0  # the most it stored before a preemption; only records use it
    block_table: list[int] = field(default_factory=list)
    prefix_nodes: list[int] = field(default_factory=list)  # of its full blocks, in the pool's prefix index
    finish_reason: str | None = None  # "stop" | "length" | "abort" | "error"
    cut: int | None = None  # where `tokens` end for the user, if a step gave more after a stop string
    timing: Timing | None = None  # once it has finished

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt_ids)
        self.num_prompt = len(self.prompt_ids)
        self.max_kv = self.num_prompt + max(self.params.max_tokens, 1) - 1
        self.length_limit = self.num_prompt + min(self.params.max_tokens, self.params.stop_after or math.inf)

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
    def num_pending(self) -> int:
        """Tokens known but not yet fed: one when it decodes, more when it (re)computes a prompt."""
        return len(self.tokens) - self.num_kv

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def extend(self, tokens: Sequence[int]) -> list[int]:
        """Take output tokens up to the one that ends the text; returns those taken. A stop goes before the cap."""
        for number, token in enumerate(tokens, start=1):
            if token == NO_TOKEN:
                self.finish_reason = "error"
                return list(tokens[: number - 1])
            self.tokens.append(token)
            if token in self.stop_ids or self.num_output == self.params.stop_after:
                self.finish_reason = "stop"
            elif len(self.tokens) >= self.length_limit:
                self.finish_reason = "length"
            if self.finished:
                return list(tokens[:number])
        return list(tokens)


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
