"""Everything that can be wrong with a request or a setting, said on entry: with the numbers, and the cure.

`engine` and `params` are the ladder's Engine and SamplingParams, which import this file.

A request is checked once, when the engine makes it and before anything is changed: one that can never
run is refused, or it would wait for ever.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence, Sized
from functools import partial
from itertools import islice, repeat
from numbers import Real

NOT_WHOLE = ("bool", "float", "complex")  # in the names of dtypes
MOST_STOPS = 1_000_000  # stop strings or ids of a request, more than any vocabulary has
MOST_BYTES = 2**48  # 256 TiB
HOTTEST = 1e30  # far beyond "all tokens alike", and still a number in fp32


class RequestError(ValueError):
    """A request that can never run as asked; the message says which numbers clash."""


# -- numbers --------------------------------------------------------------------------------------


def as_number(value: object) -> float | None:
    """A scalar of Python, numpy or torch as a float; None for anything else, a text of digits too."""
    if not (isinstance(value, Real) or getattr(value, "ndim", None) == 0):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # 10**400; numpy's texts; torch's complex numbers
        return None


def as_whole(value: object) -> int | None:
    """A scalar whole number of Python, numpy or torch as an int; None for anything else, as are 4.0 and True."""
    kind = str(getattr(value, "dtype", type(value).__name__))
    if getattr(value, "ndim", 0) or any(not_whole in kind for not_whole in NOT_WHOLE):
        return None
    try:
        return operator.index(value)
    except (TypeError, ValueError, RuntimeError):
        return None


def check_at_least(least: float, **settings: float | None) -> None:
    """ValueError for the first setting that is not a finite number from `least` up; None is a default."""
    for name, value in settings.items():
        number = as_number(value)
        if value is not None and (number is None or not least <= number < math.inf):
            raise ValueError(f"{name} {value!r} must be a finite number from {least} up")


def check_positive(**settings: float | None) -> None:
    """ValueError for the first setting that is not a finite number above 0; None is a default."""
    for name, value in settings.items():
        number = as_number(value)
        if value is not None and (number is None or not 0 < number < math.inf):
            raise ValueError(f"{name} {value!r} must be a finite number above 0")


def whole_setting(name: str, value, least: float, most: float = math.inf) -> int:
    """A setting as Python's whole number; ValueError names one that is not whole, or not from `least` to `most`."""
    number = as_whole(value)
    if number is None or number < least:
        bound = "" if least == -math.inf else f" from {least} up"
        raise ValueError(f"{name} {value!r} must be a whole number{bound}")
    if number > most:
        raise ValueError(f"{name} {number:,} is more than {most:,}")
    return number


def check_whole(least: float, **settings: int) -> None:
    """ValueError for the first setting that is not a whole number from `least` up."""
    for name, value in settings.items():
        whole_setting(name, value, least)


def is_switch(value: object) -> bool:
    """Whether it is True or False, Python's or numpy's."""
    return type(value).__name__ in ("bool", "bool_")


def check_switches(**settings: bool) -> None:
    """ValueError for the first setting that is neither True nor False."""
    for name, value in settings.items():
        if not is_switch(value):
            raise ValueError(f"{name} {value!r} must be True or False")


def check_bytes(**settings: float | None) -> None:
    """ValueError for the first setting that is not a number of bytes that a device may have; None is a default."""
    for name, value in settings.items():
        number = as_number(value)
        if value is not None and (number is None or not 1 <= number <= MOST_BYTES):
            raise ValueError(f"{name} {value!r} must be a number of bytes from 1 up, such as 100_000_000 for 100 MB")


def choose(setting: str, value: str, *choices: str) -> str:
    """The value; ValueError lists the choices if it is none of them."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{setting}={value!r}: choose {' or '.join(map(repr, choices))}")
    return value


# -- sampling parameters --------------------------------------------------------------------------


def check_sampling(params) -> None:
    """Raise RequestError for a value of SamplingParams that cannot be meant.

    Numbers of numpy or torch become Python's, and a single stop string becomes a tuple of one.
    """
    keep = partial(object.__setattr__, params)  # the class is frozen
    for name in ("max_tokens", "top_k", "seed", "stop_after"):
        value = getattr(params, name)
        if value is not None or name == "max_tokens":
            keep(name, as_whole(value))
            if getattr(params, name) is None:
                raise RequestError(f"{name} {value!r} is not a whole number")
    for name in ("temperature", "top_p"):
        value = getattr(params, name)
        if value is not None or name == "temperature":
            keep(name, as_number(value))
            if getattr(params, name) is None:
                raise RequestError(f"{name} {value!r} is not a number")
    if not is_switch(params.ignore_eos):
        raise RequestError(f"ignore_eos {params.ignore_eos!r} must be True or False")
    stop = (params.stop,) if isinstance(params.stop, str) else as_list(() if params.stop is None else params.stop)
    if stop is None or not all(isinstance(each, str) for each in stop):
        raise RequestError(f"stop strings are texts, not {params.stop!r}; token ids belong in stop_ids")
    check_few("stop", stop)
    keep("stop", tuple(stop))
    if params.stop_ids is not None:
        ids = [params.stop_ids] if getattr(params.stop_ids, "ndim", None) == 0 else as_list(params.stop_ids)
        if ids is None or isinstance(params.stop_ids, str):
            raise RequestError(f"stop_ids {params.stop_ids!r} is not a collection of token ids; texts belong in stop")
        check_few("stop_ids", ids)
        keep("stop_ids", frozenset(whole_number(id, at, "stop_ids") for at, id in enumerate(ids)))
    check_ranges(params)


def check_few(name: str, stops: Sequence) -> None:
    """Raise RequestError where there are more stop strings or ids than a vocabulary has, or no end of them."""
    if len(stops) > MOST_STOPS:
        raise RequestError(f"{name} holds more than {MOST_STOPS:,}")


def as_list(values: object, most: int = MOST_STOPS + 1) -> list | None:
    """The first `most` of some values; None where it is no collection."""
    try:
        return list(islice(values, most))
    except TypeError:
        return None


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
        try:
            check_length(config, request.prompt_ids, request.params.max_tokens)
        except RequestError as error:
            raise RequestError(f"prompt {index}: {error}") from error


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
    if arrival is not None and not math.isfinite(math.nan if as_number(arrival) is None else as_number(arrival)):
        raise RequestError(f"arrival must be a finite number of seconds on the engine's clock, not {arrival!r}")
    if isinstance(params, type) or not (hasattr(params, "stop_after") and hasattr(params, "greedy")):
        raise RequestError(f"params {params!r} are not SamplingParams: give SamplingParams(max_tokens=64)")
    if params.stop and engine.tokenizer is None:
        raise RequestError("stop strings need a tokenizer: Engine(model, tokenizer)")
    for id in getattr(engine.tokenizer, "special_ids", ()) if params.stop else ():
        special = engine.tokenizer.token_bytes(id).decode(errors="replace")
        if special and any(special in stop and special != stop for stop in params.stop):
            raise RequestError(f"stop {params.stop!r} holds the special token {special!r}, which is never text: "
                               f"stop at the token alone, or put its id {id} into stop_ids")
    ids = token_ids(engine, prompt, params.max_tokens)
    check_prompt(ids)
    check_fits(engine, len(ids), params.max_tokens)
    return ids


def token_ids(engine, prompt: Sequence[int] | str, new: int) -> list[int]:
    """A prompt of text or ids as a list of Python's whole numbers in the vocabulary."""
    if isinstance(prompt, str):
        if engine.tokenizer is None:
            raise RequestError("a prompt of text needs a tokenizer: Engine(model, tokenizer); or pass token ids")
        return engine.tokenizer.encode(prompt)
    if isinstance(prompt, range) and prompt:  # the simulator passes ranges: checking both ends is enough
        check_fits(engine, len(prompt), new)  # before all of it is written out
        low, high = sorted((prompt[0], prompt[-1]))
        if low >= 0 and high < engine.config.vocab_size:
            return list(prompt)
    if isinstance(prompt, Sized) and getattr(prompt, "ndim", 1):
        check_fits(engine, len(prompt), new)
    ids = as_list(prompt, engine.max_context + 1)  # one that has no end is refused too
    if ids is None:
        raise RequestError(
            f"a prompt is a list of token ids, or text, not {prompt!r}; and prompts is a list of such prompts"
        )
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
    number = as_whole(token)
    if number is None:
        said = f"token {token!r} at place {place} is not a whole number"
        raise RequestError(f"{said}; {where} takes token ids" + (", or text" if where == "a prompt" else ""))
    return number


def for_each_prompt(make, prompts, params) -> list:
    """make(prompt, params) of each prompt; `params` are one for all, or a list with one for each.

    A RequestError names the prompt by its index.
    """
    if isinstance(prompts, str):
        raise RequestError("prompts is one string; pass a list of prompts")
    if not isinstance(prompts, Iterable) or getattr(prompts, "ndim", 1) == 0:
        raise RequestError(f"prompts {prompts!r} is not a list of prompts")
    each, requests = isinstance(params, list | tuple), []
    if each and isinstance(prompts, Sized) and len(prompts) != len(params):
        raise RequestError(f"{len(prompts)} prompts, but {len(params)} SamplingParams; give one, or one for each")
    for index, (prompt, own) in enumerate(zip(prompts, params if each else repeat(params), strict=each)):
        try:
            requests.append(make(prompt, own))
        except RequestError as error:
            raise RequestError(f"prompt {index}: {error}") from error
    return requests


# -- an engine's parts ----------------------------------------------------------------------------


PARTS = {  # what an engine uses of each, and where one comes from
    "model": (("config", "forward"), "load_model(NAME)"),
    "tokenizer": (("encode", "eos_ids", "stream"), "load_tokenizer(NAME)"),
    "speculator": (("proposer", "scheduler", "executor"), 'Speculator(NgramProposer()), or "ngram" for short'),
    "executor": (("config", "run"), "an Executor, which turns a plan into tokens"),
    "clock": (("now", "wait_until"), "a Clock, such as WallClock()"),
    "key_transform": (("apply",), 'a Rotation, or "auto"'),
}


def check_parts(**parts) -> None:
    """ValueError where a part is something else, such as its name, or where nothing could compute."""
    for name, part in parts.items():
        needed, cure = PARTS[name]
        if part is not None and (isinstance(part, type) or not all(hasattr(part, each) for each in needed)):
            said = "a name" if isinstance(part, str) else f"not a {name}"
            raise ValueError(f"{name} {part!r} is {said}: give {cure.replace('NAME', repr(part))}")
    if parts["model"] is None and parts["executor"] is None:
        raise ValueError("model None computes nothing: give load_model(), or an executor of your own")


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


# -- what a proposer returns ----------------------------------------------------------------------


def usable_drafts(rows: Sequence, proposed, vocab_size: int) -> list:
    """Cut each row's drafts to its room, and before the first that is not in the vocabulary -> one q a row."""
    for row in rows:
        drafts = row.drafts if isinstance(row.drafts, Sequence) else ()
        wrong = (at for at, id in enumerate(drafts) if not (as_whole(id) is not None and 0 <= id < vocab_size))
        row.drafts = list(map(int, drafts[: min(row.num_drafts, next(wrong, len(drafts)))]))
    return list(proposed) if isinstance(proposed, Sequence) and len(proposed) == len(rows) else [None] * len(rows)


def is_distribution(q, p) -> bool:
    """Whether q can be what drafts were drawn from: of the shape of p [k, V], its rows 0 or more, and 1 in sum."""
    if getattr(q, "shape", None) != p.shape:
        return False
    return bool(((q >= 0).all(-1) & ((q.sum(-1) - 1).abs() < 1e-3)).all())
