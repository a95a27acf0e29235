"""The heart by itself: rung 2's own loop, and the ladder's engine with the plain model and rungs 5 and 6 handed in."""

from __future__ import annotations

import itertools

import pytest
from parity import assert_same_tokens, greedy_reference, random_ids, twins
from serving import make_engine, serve

from minillm.extras.draft_model import DraftModelProposer
from minillm.guard.inputs import RequestError
from minillm.ladder import engine as heart
from minillm.ladder.continuous import Scheduler
from minillm.ladder.quantized import storage_in
from minillm.ladder.request import Request, SamplingParams
from minillm.ladder.speculative import NgramProposer, Speculator
from minillm.ladder.static import decode_static

LENGTHS, MOST = (9, 4, 1, 7, 5, 20, 3), (1, 8, 6, 3, 12, 2, 5)
PROMPTS = [random_ids(n, seed=200 + n) for n in LENGTHS]


def both(shape: str, batch: int, params: list[SamplingParams]) -> tuple[list[list[int]], int, list[list[int]], int]:
    """Tokens and idle slot-steps of rung 2's own loop, and of the engine's static batches."""
    model = twins(shape, packed="heart").ours
    requests = [Request(i, prompt, own, seed=i) for i, (prompt, own) in enumerate(zip(PROMPTS, params, strict=True))]
    idle = decode_static(model, requests, batch)
    engine = make_engine(model, batching="static", kv="slots", max_batch=batch, max_step_tokens=512)
    texts = serve(engine, PROMPTS, params)
    return [request.output_ids for request in requests], idle, texts, engine.records.totals["idle_rows"]


@pytest.mark.parametrize("batch", [1, 2, 3, 8])
@pytest.mark.parametrize("shape", ["t8-2", "t-wide", "t4-1", "t9-3"])
def test_rung_2s_own_loop_gives_the_tokens_and_the_idle_steps_of_the_engines_static_batches(shape, batch):
    loop, idle, texts, engines_idle = both(shape, batch, [SamplingParams(n) for n in MOST])
    assert idle == engines_idle and (idle > 0) == (batch > 1)
    for prompt, n, tokens, text in zip(PROMPTS, MOST, loop, texts, strict=True):
        wanted = greedy_reference(twins(shape).theirs, prompt, n)
        assert_same_tokens(tokens, wanted)
        assert_same_tokens(text, wanted)


def test_it_draws_as_the_engine_does_and_ends_at_hidden_ends():
    params = [SamplingParams(n, temperature=0.8, seed=i, stop_after=max(1, n - 1)) for i, n in enumerate(MOST)]
    loop, idle, texts, engines_idle = both("t-wide", 3, params)
    assert loop == texts and idle == engines_idle
    assert [len(tokens) for tokens in loop] == [max(1, n - 1) for n in MOST]


def test_a_stop_id_ends_a_row_and_the_rest_of_its_batch_goes_on():
    model = twins("t8-2", packed="heart").ours
    whole = greedy_reference(twins("t8-2").theirs, PROMPTS[0], 8).tokens
    ends = Request("ends", PROMPTS[0], SamplingParams(8), stop_ids=frozenset({whole[2]}))
    other = Request("other", PROMPTS[1], SamplingParams(8))
    idle = decode_static(model, [ends, other])
    assert ends.output_ids == whole[: whole.index(whole[2]) + 1] and ends.finish_reason == "stop"
    assert len(other.output_ids) == 8 and idle == 8 - len(ends.output_ids)


SPECULATORS = {"none": None, "n-gram": NgramProposer, "draft model": lambda: DraftModelProposer(twins("t8-2").ours)}


@pytest.mark.parametrize("kv, batching", list(itertools.product(("paged", "slots"), ("continuous", "static"))))
@pytest.mark.parametrize("drafts", SPECULATORS)
def test_the_ladders_engine_speculates_and_says_the_same(drafts, kv, batching):
    model = twins("t-wide", packed="heart").ours
    speculator = Speculator(SPECULATORS[drafts](), 3) if SPECULATORS[drafts] else None
    engine = heart.Engine(model, kv=kv, batching=batching, max_batch=3, speculator=speculator, max_context=64)
    answers = engine.generate(PROMPTS, [SamplingParams(n) for n in MOST])
    for prompt, n, answer in zip(PROMPTS, MOST, answers, strict=True):
        assert_same_tokens(answer.token_ids, greedy_reference(twins("t-wide").theirs, prompt, n))


@pytest.mark.parametrize("kv_format", ["int8", "fp8", "int4"])
def test_the_ladders_engine_reads_the_same_quantised_bytes_as_the_fast_one(kv_format):
    params = SamplingParams(12)
    plain, fast = twins("t8-2", packed="heart").ours, twins("t8-2", packed=False).ours
    slow_answers = heart.Engine(plain, storage=storage_in(kv_format), max_context=64).generate(PROMPTS, params)
    fast_engine = make_engine(fast, kv_format=kv_format, max_context=64)
    fast_answers = fast_engine.generate(PROMPTS, params)
    same = [a.token_ids == b.token_ids for a, b in zip(slow_answers, fast_answers, strict=True)]
    assert sum(same) >= len(same) - 1, "a rounding boundary may part one text, not several"


def test_it_refuses_and_streams_as_the_fast_one_does():
    engine = heart.Engine(twins("t8-2").ours, max_context=32)
    with pytest.raises(RequestError, match="prompt 1: 40 prompt"):
        engine.generate([[1], [1] * 40], SamplingParams(2))
    events = list(engine.stream([[1, 2], [3]], SamplingParams(3)))
    assert sum(len(event.token_ids) for event in events) == 6 and not engine.has_work
    assert type(engine.scheduler) is Scheduler
