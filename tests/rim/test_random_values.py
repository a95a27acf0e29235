"""Random wrong values at the engine's entries: each works, or is refused by a ValueError that names it.

Never another exception, never a hang; and the engine serves afterwards as it did before.
"""

from __future__ import annotations

import math
import random
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
from serving import MOST_STEPS, ManualClock, make_engine
from tiny import tiny_model

from minillm.extras.adaptive import AdaptiveSpeculator
from minillm.fast.engine import Engine
from minillm.guard.inputs import RequestError
from minillm.ladder.executor import WallClock
from minillm.ladder.quantized import STORES, Rotation
from minillm.ladder.request import SamplingParams
from minillm.ladder.speculative import NgramProposer, Speculator

EACH = 4000  # inputs of each test
WHOLE = [0, 1, 2, 3, 5, 16, 64, -1, 97, 10**30, -(10**30)]
ODD = [
    None, True, False, 0.0, 0.5, 1.0, 7.5, -0.5, math.nan, math.inf, -math.inf, 1e300, 1e-300, 1j,
    "", "4", "ngram", "auto", "all", "paged", "fp32", "int4", "none", "text", "\ud800", "\x00", "x" * 300, b"1", b"",
    [], [1], [1, 2, 3], [[1]], [None], ["a"], ["", "b"], [97], [-1], [1.5], (), (1, 2), {}, {1: 2}, {1, 2}, frozenset(),
    range(0), range(3), range(10**12), np.int64(2), np.float32(2.0), np.float64("nan"), np.bool_(True), np.arange(3),
    np.zeros((2, 2)), np.array(3), np.array("a"), np.array([None]), torch.tensor(2), torch.tensor(2.5),
    torch.tensor(True), torch.tensor(1j), torch.arange(4), torch.ones(2, 2), torch.empty(0), torch.tensor(math.nan),
    Decimal("0.5"), Decimal("NaN"), Fraction(1, 3), object(), object, int, len, Ellipsis, NotImplemented,
    SamplingParams(), SamplingParams, ValueError("x"), WallClock(), NgramProposer(), NgramProposer,
]


def any_value(draw: random.Random):
    """Something that may be wrong: a whole number, an odd value, or a list of such."""
    kind = draw.random()
    if kind < 0.3:
        return draw.choice(WHOLE)
    if kind < 0.9:
        return draw.choice(ODD)
    return [draw.choice(draw.choice((WHOLE, ODD))) for _ in range(draw.randrange(4))]


def names_what_is_wrong(error: ValueError, names) -> bool:
    """Whether the message holds the name of one of the settings that were given."""
    return any(name in str(error) for name in names)


FIELDS = ("max_tokens", "temperature", "top_k", "top_p", "seed", "stop", "stop_ids", "ignore_eos", "stop_after")


def test_sampling_params_take_a_value_or_name_it(count_inputs):
    draw, taken = random.Random(0), 0
    for _ in range(EACH):
        given = {name: any_value(draw) for name in draw.sample(FIELDS, draw.randint(1, 3))}
        try:
            params = SamplingParams(**given)
        except RequestError as error:
            assert names_what_is_wrong(error, [*given, "stop string"]), (given, error)
            continue
        taken += 1
        assert type(params.max_tokens) is int and type(params.temperature) is float and type(params.stop) is tuple
    count_inputs("sampling parameters", EACH)
    assert EACH / 20 < taken < EACH


SETTINGS = {
    "batching": ["continuous", "static"], "kv": ["paged", "slots"], "kv_format": ["auto", *STORES],
    "key_transform": ["auto", None, Rotation(8)], "kv_memory": [10**5, 10**6, 2e5], "block_size": [1, 4, 16],
    "max_batch": [1, 4], "max_context": [16, 64], "max_step_tokens": [8, 64], "chunked_prefill": [True, False],
    "prefix_cache": [True, False], "speculator": [None, "ngram"], "cuda_graphs": ["auto", False], "clock": [None],
    "records": ["all", "summary"], "seed": [0, 3],
}


def test_an_engine_takes_a_setting_or_names_it(count_inputs):
    """One or two settings are anything, the others are right: what was taken must serve."""
    draw, taken, model = random.Random(1), 0, tiny_model()
    expected = make_engine(model).generate([[1, 2, 3, 4]], SamplingParams(4))[0].token_ids
    for _ in range(EACH):
        given = {name: any_value(draw) for name in draw.sample([*SETTINGS, "tokenizer"], draw.randint(1, 2))}
        right = {name: draw.choice(choices) for name, choices in SETTINGS.items() if draw.random() < 0.3}
        every = {"kv_memory": 10**6, "max_context": 64, **right, **given}
        try:
            engine = Engine(model, **every)
        except ValueError as error:
            assert names_what_is_wrong(error, every), (given, right, error)
            continue
        taken += 1
        if taken % 4 == 0:
            answer = serve_or_refuse(engine, [1, 2, 3, 4])
            assert answer is None or len(answer) == 4
            assert answer in (None, expected) or "kv_format" in {*given, *right}, (given, right)
            engine.check_invariants()
    count_inputs("engine settings", EACH)
    assert EACH / 40 < taken < EACH


def serve_or_refuse(engine: Engine, prompt: list[int]) -> list[int] | None:
    """An answer of 4 tokens; None where the settings leave no room for it."""
    try:
        return engine.generate([prompt], SamplingParams(4))[0].token_ids
    except RequestError:
        return None


@pytest.mark.parametrize("wrong", [*(v for v in ODD if v is not None), *WHOLE], ids=lambda v: repr(v)[:30])
def test_a_model_that_is_none_is_refused(wrong):
    with pytest.raises(ValueError, match="model"):
        Engine(wrong)


@pytest.mark.parametrize("make", [Speculator, AdaptiveSpeculator])
def test_a_speculator_takes_a_draft_length_or_names_it(make, count_inputs):
    draw, taken = random.Random(2), 0
    for _ in range(EACH // 8):
        value = any_value(draw)
        try:
            make(NgramProposer(), value if not isinstance(value, int) else min(value, 50))
            taken += 1
        except ValueError as error:
            assert "draft_length" in str(error)
    count_inputs("draft lengths", EACH // 8)
    assert taken


def any_prompt(draw: random.Random):
    """A prompt that may be right, or have one thing wrong with it, or be anything."""
    ids = [draw.randrange(97) for _ in range(draw.randint(1, 12))]
    kind = draw.random()
    if kind < 0.4:
        return draw.choice((list, tuple, np.array, torch.tensor))(ids)
    if kind < 0.7:
        ids[draw.randrange(len(ids))] = any_value(draw)
        return ids
    return any_value(draw)


def any_params(draw: random.Random):
    if draw.random() < 0.2:
        return any_value(draw)
    while True:
        try:
            fields = draw.sample(FIELDS, draw.randint(0, 2))
            return SamplingParams(**{"max_tokens": draw.randint(0, 5), **{name: any_value(draw) for name in fields}})
        except RequestError:
            continue


@pytest.mark.parametrize(
    "settings", [dict(), dict(kv="slots"), dict(speculator="ngram"), dict(batching="static")], ids=str
)
def test_a_request_is_taken_or_refused_and_the_others_go_on(settings, count_inputs):
    draw, taken = random.Random(3), 0
    engine = make_engine(tiny_model(), blocks=24, max_batch=4, clock=ManualClock(), records="summary", **settings)
    healthy, params = [5, 6, 7], SamplingParams(5)
    expected = make_engine(tiny_model()).generate([healthy], params)[0].token_ids
    for number in range(EACH // 2):
        name = engine.add(healthy, params) if number % 5 == 0 else None
        given = {"prompt": any_prompt(draw), "params": any_params(draw)}
        given |= {key: any_value(draw) for key in ("request_id", "arrival") if draw.random() < 0.2}
        if isinstance(given.get("arrival"), int):
            given["arrival"] = min(given["arrival"], 10**6)
        try:
            if draw.random() < 0.5:
                engine.add(**given)
            else:
                prompts = [given["prompt"]] if draw.random() < 0.7 else given["prompt"]
                engine.make_requests(prompts, given["params"])
            taken += 1
        except RequestError as error:
            assert str(error)
        if name is not None or number % 7 == 0:
            tokens = drain(engine)
            assert name is None or tokens[name] == expected
    count_inputs("requests", EACH // 2)
    assert EACH / 20 < taken < EACH / 2
    drain(engine)
    assert engine.generate([healthy], params)[0].token_ids == expected and engine.stats().blocks_live == 0


def drain(engine: Engine) -> dict:
    """Step until nothing is left; the tokens by request."""
    tokens: dict = {}
    for _ in range(MOST_STEPS):
        if not engine.has_work:
            break
        for event in engine.step():
            tokens.setdefault(event.request_id, []).extend(event.token_ids)
    assert not engine.has_work
    engine.check_invariants()
    return tokens
