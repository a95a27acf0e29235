"""Everything that can be wrong with a request or a setting, said on entry: with the numbers, and the cure.

`engine` and `params` are the ladder's Engine and SamplingParams, which import this file.

A request is checked once, when the engine makes it and before anything is changed: one that can never
run is refused, or it would wait for ever.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Real

LARGEST = sys.float_info.max  # a whole number can be larger, and then no float
HOTTEST = 1e30  # far beyond "all tokens alike", and still a number in fp32


class RequestError(ValueError):
    """A request that can never run as asked; the message says which numbers clash."""


# -- numbers --------------------------------------------------------------------------------------


def is_number(value: object) -> bool:
    """Whether it is a scalar number, of Python, numpy or torch."""
    return isinstance(value, Real) or (getattr(value, "ndim", None) == 0 and isinstance(value.item(), Real))


def check_at_least(least: float, **settings: float | None) -> None:
    """ValueError for the first setting that is not a finite number from `least` up; None is a default."""
    for name, value in settings.items():
        if value is not None and not (is_number(value) and least <= value <= LARGEST):
            unit = " of bytes" if name == "kv_memory" else ""
            raise ValueError(f"{name} {value!r} must be a finite number{unit} from {least} up")


def check_positive(**settings: float | None) -> None:
    """ValueError for the first setting that is not a finite number above 0; None is a default."""
    for name, value in settings.items():
        if value is not None and not (is_number(value) and 0 < value <= LARGEST):
            raise ValueError(f"{name} {value!r} must be a finite number above 0")


def choose(setting: str, value: str, *choices: str) -> str:
    """The value; ValueError lists the choices if it is none of them."""
    if value not in choices:
        raise ValueError(f"{setting}={value!r}: choose {' or '.join(map(repr, choices))}")
    return value


# -- sampling parameters --------------------------------------------------------------------------


def check_sampling(params) -> None:
    """Raise RequestError for a value of SamplingParams that cannot be meant.

    Whole numbers of numpy or torch become Python's, and a single stop string becomes a tuple of one.
    """
    one = isinstance(params.stop, str) or not isinstance(params.stop, Iterable | None)
    object.__setattr__(params, "stop", (params.stop,) if one else tuple(() if params.stop is None else params.stop))
    for name in ("max_tokens", "top_k", "seed", "stop_after"):
        value = getattr(params, name)
        if value is None and name != "max_tokens":
            continue
        if not (is_number(value) and hasattr(value, "__index__")):
            raise RequestError(f"{name} {value!r} is not a whole number")
        object.__setattr__(params, name, operator.index(value))
    for name in ("temperature", "top_p"):
        value = getattr(params, name)
        if not (is_number(value) or (value is None and name == "top_p")):
            raise RequestError(f"{name} {value!r} is not a number")
    if not all(isinstance(stop, str) for stop in params.stop):
        raise RequestError(f"stop strings are texts, not {params.stop!r}; token ids belong in stop_ids")
    if isinstance(params.stop_ids, str) or not (params.stop_ids is None or isinstance(params.stop_ids, Iterable)):
        raise RequestError(f"stop_ids {params.stop_ids!r} is not a collection of token ids; texts belong in stop")
    if params.stop_ids is not None:
        ids = params.stop_ids.tolist() if hasattr(params.stop_ids, "tolist") else params.stop_ids
        ids = [ids] if isinstance(ids, int) else ids
        object.__setattr__(params, "stop_ids", frozenset(whole_number(id, at, "stop_ids") for at, id in enumerate(ids)))
    check_ranges(params)


def check_ranges(params) -> None:
    """Raise RequestError for a number out of its range."""
    if params.max_tokens < 0:
        raise RequestError(f"max_tokens {params.max_tokens} is negative; 0 gives an empty answer")
    if not 0 <= params.temperature <= HOTTEST:
        raise RequestError(f"temperature {params.temperature} must be from 0, which is greedy, to {HOTTEST:g}")
    if params.top_k is not None and params.top_k < 1:
        raise RequestError(f"top_k {params.top_k} would leave no token; use None to keep all")
    if params.top_p is not None and not 0 < params.top_p <= 1:
        raise RequestError(f"top_p {params.top_p} must be above 0 and at most 1; None keeps all")
    if params.stop_after is not None and params.stop_after < 1:
        raise RequestError(f"stop_after {params.stop_after} must be at least 1 token")
    if "" in params.stop:
        raise RequestError("an empty stop string would end every text immediately")


# -- requests -------------------------------------------------------------------------------------


def check_prompt(prompt_ids: Sequence[int]) -> None:
    """Raise RequestError for an empty prompt, which gives the model nothing to continue."""
    if not prompt_ids:
        raise RequestError("the prompt is empty; it needs at least one token")


def check_length(config, prompt_ids: Sequence[int], new: int) -> None:
    """Raise RequestError for an empty prompt, or for more tokens than the model may use."""
    check_prompt(prompt_ids)
    if len(prompt_ids) + new > (most := config.max_position_embeddings):
        raise RequestError(f"{len(prompt_ids):,} prompt + {new:,} new tokens > context {most:,}")


def check_lengths(config, requests) -> None:
    """The same of requests, naming which of them."""
    for index, request in enumerate(requests):
        with naming_prompt(index):
            check_length(config, request.prompt_ids, request.params.max_tokens)


def context_of(model, config, asked: int | None) -> int:
    """Tokens of the longest request: as asked, or all that the model may use. ValueError if those are fewer."""
    most = config.max_position_embeddings
    if asked and model and asked > most:  # an executor of one's own may have no model, and no limit
        raise ValueError(f"max_context {asked:,} > {most:,} tokens that this model's positions or sliding window allow")
    return asked or most


def check_request(engine, prompt, params, request_id=None, arrival=None) -> list[int]:
    """The prompt as token ids. Raises RequestError for whatever is wrong with a request; changes nothing."""
    if not isinstance(request_id, str | int | None):
        raise RequestError(f"request_id {request_id!r} is neither a str nor an int")
    if request_id is not None and request_id in engine.unfinished:
        raise RequestError(f"request_id {request_id!r} is taken by a request that has not finished")
    if arrival is not None and not (is_number(arrival) and math.isfinite(arrival)):
        raise RequestError(f"arrival must be a finite number of seconds on the engine's clock, not {arrival!r}")
    if not hasattr(params, "max_tokens"):
        raise RequestError(f"params {params!r} are not SamplingParams: give SamplingParams(max_tokens=64)")
    if params.stop and engine.tokenizer is None:
        raise RequestError("stop strings need a tokenizer: Engine(model, tokenizer)")
    ids = token_ids(engine, prompt)
    check_prompt(ids)
    check_fits(engine, len(ids), params.max_tokens)
    return ids


def token_ids(engine, prompt: Sequence[int] | str) -> list[int]:
    """A prompt of text or ids as a list of Python's whole numbers in the vocabulary."""
    if isinstance(prompt, str):
        if engine.tokenizer is None:
            raise RequestError("a prompt of text needs a tokenizer: Engine(model, tokenizer); or pass token ids")
        return engine.tokenizer.encode(prompt)
    if isinstance(prompt, range) and prompt:  # the simulator passes ranges: checking both ends is enough
        check_fits(engine, len(prompt), 0)  # before all of it is written out
        low, high = sorted((prompt[0], prompt[-1]))
        if low >= 0 and high < engine.config.vocab_size:
            return list(prompt)
    try:
        ids = list(prompt)
    except TypeError:
        raise RequestError(
            f"a prompt is a list of token ids, or text, not {prompt!r}; and prompts is a list of such prompts"
        ) from None
    return check_ids(ids, engine.config.vocab_size)


def check_fits(engine, prompt: int, new: int) -> None:
    """Raise RequestError if so many prompt and new tokens could never run: context, pool, step."""
    scheduler, pool = engine.scheduler, engine.scheduler.memory.pool
    clashes = []
    if prompt + new > engine.max_context:
        clashes.append(f"> context {engine.max_context:,}")
    if (blocks := pool.blocks_for(prompt + max(new, 1) - 1)) > pool.num_blocks:
        clashes.append(f"need {blocks:,} blocks of {pool.block_size}, the pool has {pool.num_blocks:,}")
    if not scheduler.chunked_prefill and prompt > scheduler.max_step_tokens:
        clashes.append(f"the prompt > {scheduler.max_step_tokens:,} tokens a step, and chunked prefill is off")
    if clashes:
        raise RequestError(f"{prompt:,} prompt + {new:,} new tokens: {'; '.join(clashes)}")


def check_ids(tokens: list, vocab_size: int) -> list[int]:
    """The tokens as Python's whole numbers; RequestError names the first that is none, or not in the vocabulary.

    A float, a bool or a digit is refused, not rounded: it means that two things were mixed up.
    """
    if set(map(type, tokens)) - {int}:  # whole numbers of numpy and torch will do
        tokens = [whole_number(token, place) for place, token in enumerate(tokens)]
    if tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
        place, token = next((i, t) for i, t in enumerate(tokens) if not 0 <= t < vocab_size)
        raise RequestError(f"token id {token} at place {place} is outside the vocabulary of {vocab_size:,}")
    return tokens


def whole_number(token, place: int, where: str = "a prompt") -> int:
    """One token id of Python, numpy or torch; RequestError for anything else."""
    try:
        if "bool" not in str(getattr(token, "dtype", type(token))):
            return operator.index(token)
    except TypeError:
        pass
    said = f"token {token!r} at place {place} is not a whole number"
    raise RequestError(f"{said}; {where} takes token ids" + (", or text" if where == "a prompt" else ""))


def one_params_each(prompts, params) -> list[tuple]:
    """(prompt, params) of each prompt, where `params` are one for all or a list with one for each."""
    if isinstance(prompts, str):
        raise RequestError("prompts is one string; pass a list of prompts")
    try:
        prompts = list(prompts)
    except TypeError:
        raise RequestError(f"prompts {prompts!r} is not a list of prompts") from None
    every = list(params) if isinstance(params, list | tuple) else [params] * len(prompts)
    if len(every) != len(prompts):
        raise RequestError(f"{len(prompts)} prompts, but {len(every)} SamplingParams; give one, or one for each")
    return list(zip(prompts, every, strict=True))


@contextmanager
def naming_prompt(index: int) -> Iterator[None]:
    """Let a RequestError say which of several prompts it is about."""
    try:
        yield
    except RequestError as error:
        raise RequestError(f"prompt {index}: {error}") from error


# -- an engine's parts ----------------------------------------------------------------------------


def check_parts(model, tokenizer, speculator, executor) -> None:
    """ValueError where a name was given in place of a part, or nothing that could compute."""
    if model is None and executor is None:
        raise ValueError("model None computes nothing: give load_model(), or an executor of your own")
    for what, given, cure in (
        ("model", model, "load_model({!r})"), ("tokenizer", tokenizer, "load_tokenizer({!r})"),
        ("speculator", speculator, "a Speculator, such as Speculator(NgramProposer()), not {!r}"),
    ):
        if isinstance(given, str):
            raise ValueError(f"{what} {given!r} is a name: give {cure.format(given)}")


def check_vocabularies(target, proposer) -> None:
    """Raise ValueError if a draft model reads and writes by another token map than the target.

    Equal sizes prove nothing, and unequal ones may be padding: only the maps can tell, where both are known.
    """
    draft = getattr(proposer, "tokenizer", None)
    if target and draft and target.content_hash != draft.content_hash:
        raise ValueError(
            f"the draft model's tokens are not the target's: {draft.name} ({draft.vocab_size:,} ids) and "
            f"{target.name} ({target.vocab_size:,} ids) have different maps; draft with a model of the same tokenizer"
        )
