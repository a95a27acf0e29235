"""Launching a step before the books of the one before are written: the same steps, the same events, in any company.

Only a GPU gains time by it, yet any executor with a `start` can be run so, and is here.
"""

from __future__ import annotations

import random

import pytest
import torch
from fakes import FakeTokenizer, expected_output, fake_engine
from serving import make_engine
from tiny import tiny_model

from minillm.extras.draft_model import DraftModelProposer
from minillm.fast.engine import Engine
from minillm.ladder.request import SamplingParams
from minillm.ladder.speculative import NgramProposer, Speculator


def lives(engine: Engine) -> list[list]:
    """The events of each step until nothing is left; the books are not looked at, since that waits for the device."""
    events = []
    while engine.has_work:
        events.append(engine.step())
    engine.check_invariants()
    return events


def busy_engine(seed: int, ahead: bool) -> Engine:
    """Requests that come over time, share prefixes, want too much memory, and may end at a stop string."""
    draw = random.Random(seed)
    engine = fake_engine(
        blocks=draw.randint(7, 14), max_step_tokens=draw.randint(8, 20), max_batch=draw.randint(1, 6),
        batching=draw.choice(["continuous", "static"]), kv=draw.choice(["paged", "slots"]),
        tokenizer=FakeTokenizer(),
    )
    engine.runs_ahead = ahead
    for number in range(draw.randint(1, 8)):
        stop = draw.choice([(), (), (), ("a", "b", "c"), ("de", "fg")])
        params = SamplingParams(draw.randint(1, 12), stop=stop, stop_after=draw.choice([None, draw.randint(1, 12)]))
        engine.add([draw.randint(0, 2)] * draw.randint(1, 16), params, number, arrival=float(draw.randint(1, 12)))
    return engine


@pytest.mark.parametrize("seed", range(60))
def test_ahead_or_not_every_step_and_every_event_is_the_same(seed):
    engines = [busy_engine(seed, ahead) for ahead in (False, True)]
    events = [lives(engine) for engine in engines]
    assert events[0] == events[1]
    plain, ahead = (engine.records for engine in engines)
    assert plain.steps == ahead.steps and plain.requests == ahead.requests and plain.totals == ahead.totals


@pytest.mark.parametrize(
    ("stop", "wanted"),
    [((), ["launch", "launch", "books", "launch", "books", "books"]), (("!",), ["launch", "books"] * 3)],
    ids=["while it runs", "a stop string decides first"],
)
def test_when_the_next_step_is_launched(stop, wanted, monkeypatch):
    engine = fake_engine(tokenizer=FakeTokenizer())
    engine.runs_ahead, order = True, []
    start, committed = engine.executor.start, engine.records.committed
    monkeypatch.setattr(engine.executor, "start", lambda plan: order.append("launch") or start(plan))
    monkeypatch.setattr(engine.records, "committed", lambda *step: order.append("books") or committed(*step))
    engine.generate([[1, 2]], SamplingParams(3, ignore_eos=True, stop=stop))
    assert order == wanted


def test_a_token_came_when_its_step_ended_not_when_the_next_was_launched():
    engine = fake_engine()
    engine.runs_ahead, start, clock = True, engine.executor.start, engine.clock

    def slow_start(plan):
        clock.moment += 0.25
        return start(plan)

    engine.executor.start = slow_start
    engine.generate([[1, 2]], SamplingParams(3, ignore_eos=True))
    assert engine.records.requests[0].token_times == [1.25, 2.5, 3.75]


def test_an_abort_waits_for_the_step_under_way_and_loses_none_of_its_tokens():
    engine = fake_engine()
    engine.runs_ahead = True
    for name in ("a", "b"):
        engine.add([1, 2], SamplingParams(9, ignore_eos=True), name)
    first = engine.step()
    engine.abort("a")
    later = [event for events in lives(engine) for event in events]
    tokens = {name: [t for e in (*first, *later) if e.request_id == name for t in e.token_ids] for name in ("a", "b")}
    assert tokens == {"a": expected_output((1, 2), 2), "b": expected_output((1, 2), 9)}
    assert {event.request_id: event.finish_reason for event in later if event.finished} == {"a": "abort", "b": "length"}
    assert engine.stats().blocks_live == 0


@pytest.mark.parametrize("fails_at", [0, 1, 3])
def test_a_launch_that_fails_is_undone_and_the_step_before_it_is_reported(fails_at):
    engine, calls = fake_engine(), []
    engine.runs_ahead, start = True, engine.executor.start

    def fails_once(plan):
        calls.append(plan)
        if len(calls) == fails_at + 1:
            raise RuntimeError("no memory for this launch")
        return start(plan)

    engine.executor.start = fails_once
    engine.add([5, 6, 7], SamplingParams(6, ignore_eos=True))
    tokens, failed = [], 0
    while engine.has_work:
        try:
            tokens += [token for event in engine.step() for token in event.token_ids]
        except RuntimeError:
            failed += 1
            engine.check_invariants()
    assert failed == 1 and tokens == expected_output((5, 6, 7), 6)
    engine.check_invariants()


PROPOSERS = {
    "none": lambda: None,
    "n-grams": lambda: Speculator(NgramProposer(), 3),
    "a draft model": lambda: Speculator(DraftModelProposer(tiny_model("t4-1")), 3),
}


@pytest.mark.parametrize("proposer", PROPOSERS)
def test_a_model_that_runs_ahead_gives_the_same_tokens(proposer):
    """Greedy and sampled, in a pool too small for all."""
    prompts = [[5, 6, 5, 6, 5], [7, 8, 9], [5, 6, 5, 6, 7, 8, 9, 5, 6]]
    params = [SamplingParams(12), SamplingParams(12, temperature=1.0), SamplingParams(12, temperature=0.8, top_k=9)]
    answers = []
    for ahead in (False, True):
        engine = make_engine(tiny_model(), blocks=12, speculator=PROPOSERS[proposer](), max_context=64)
        engine.runs_ahead = ahead
        answers.append([answer.token_ids for answer in engine.generate(prompts, params)])
        engine.check_invariants()
    assert answers[0] == answers[1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_are_fetched_once_a_round(temperature, monkeypatch):
    """Each fetch waits for the device."""
    engine = make_engine(tiny_model(), speculator=Speculator(DraftModelProposer(tiny_model("t4-1")), 4), max_context=64)
    fetches, tolist, propose = [], torch.Tensor.tolist, engine.executor.proposer.propose

    def watched(rows):
        fetches.append(0)
        monkeypatch.setattr(torch.Tensor, "tolist", counted)
        proposed = propose(rows)
        monkeypatch.setattr(torch.Tensor, "tolist", tolist)
        return proposed

    def counted(tensor):
        fetches[-1] += 1
        return tolist(tensor)

    monkeypatch.setattr(engine.executor.proposer, "propose", watched)
    engine.generate([[5, 6, 5], [7, 8]], SamplingParams(9, temperature=temperature))
    assert set(fetches) <= {0, 1} and 1 in fetches and engine.records.totals["drafted_tokens"] > 4
