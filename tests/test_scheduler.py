"""Who is in each step: nobody blocks, starves, overtakes or loses a token; and static batches idle as they must.

What continuous.py states as bounds is proved here on random workloads, after the cases in
which schedulers are known to have failed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from fakes import busy_engines, expected_output, fake_engine, on_random_workloads, outputs, steps
from hypothesis import given
from tiny import tiny_model

from minillm.fast.engine import Engine
from minillm.guard.inputs import RequestError
from minillm.ladder.continuous import StepPlan
from minillm.ladder.decode import decode_cached, decode_recomputing
from minillm.ladder.request import Request, SamplingParams, TokenEvent


def params(max_tokens: int = 4, **more) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, **more)


@dataclass
class Step:
    """One step, with who stood where before it."""

    running: list[Request]
    decoding: list[Request]  # those of them that only need their next token
    plan: StepPlan
    events: list[TokenEvent]

    @property
    def tokens_fed(self) -> dict:
        return {row.request.id: len(row.tokens) for row in self.plan.rows if not row.idle}

    @property
    def tokens_given(self) -> dict:
        return {event.request_id: event.token_ids for event in self.events if event.token_ids}


def watched(engine: Engine) -> Iterator[Step]:
    """Run to the end, looking on."""
    running = engine.scheduler.running
    before, decoding = [], []
    for events in steps(engine):
        yield Step(before, decoding, engine.executor.plan, events)
        before = list(running)
        decoding = [r for r in before if not r.finished and r.num_output and r.num_pending == 1]


# -- "never" is not "not now" ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "settings", "numbers"),
    [
        (13, 1, {}, ["13 prompt", "1 new", "need 4 blocks of 4", "the pool has 3"]),
        (10, 8, {}, ["10 prompt", "8 new", "need 5 blocks of 4", "the pool has 3"]),
        (10, 1, dict(max_step_tokens=8, chunked_prefill=False), ["10 prompt", "> 8 tokens a step", "chunked"]),
        (10, 7, dict(max_context=16, blocks=99), ["10 prompt", "7 new", "> context 16"]),
        (900, 200, dict(max_context=1024, blocks=64 * 4), ["900", "200", "1,024", "need 275 blocks", "has 256"]),
    ],
    ids=["prompt > pool", "prompt + output > pool", "prompt > step", "> context", "> context and pool"],
)
def test_what_can_never_run_is_refused_with_its_numbers_and_blocks_nobody(prompt, max_tokens, settings, numbers):
    engine = fake_engine(**{"blocks": 3, **settings})
    with pytest.raises(RequestError) as refusal:
        engine.add([1] * prompt, params(max_tokens))
    assert [number for number in numbers if number not in str(refusal.value)] == []
    engine.add([1, 2, 3], params(2), "short")
    assert len(list(steps(engine))) == 2


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "settings"),
    [
        (12, 1, dict(blocks=3)),
        (10, 3, dict(blocks=3)),
        (8, 1, dict(max_step_tokens=8, chunked_prefill=False)),
        (10, 6, dict(max_context=16)),
    ],
    ids=["pool", "pool, with output", "step", "context"],
)
def test_what_just_fits_is_not_refused(prompt, max_tokens, settings):
    (answer,) = fake_engine(**settings).generate([[1] * prompt], params(max_tokens))
    assert len(answer.token_ids) == max_tokens


def test_an_empty_prompt_is_refused():
    with pytest.raises(RequestError, match="empty"):
        fake_engine().add([])


@pytest.mark.parametrize("decode", [decode_recomputing, decode_cached])
def test_the_plain_loops_know_the_edges_too(decode):
    with pytest.raises(RequestError, match="empty"):
        next(decode(tiny_model(), [], 3))
    assert [len(list(decode(tiny_model(), [1], n))) for n in (0, 1, 2)] == [0, 1, 2]


# -- preempted and resumed ------------------------------------------------------------------------


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("chunked_prefill", [True, False])
def test_a_preempted_request_resumes_where_it_was(prefix_cache, chunked_prefill):
    engine = fake_engine(blocks=5, prefix_cache=prefix_cache, chunked_prefill=chunked_prefill)
    for name, prompt in {"old": (1, 2, 3, 4), "young": (5, 6, 7, 8)}.items():
        engine.add(list(prompt), params(12), name)
    victim, known = None, 0
    everything = []
    for step in watched(engine):
        everything.append(step.events)
        if step.plan.preempted:
            (victim,), known = step.plan.preempted, step.plan.preempted[0].num_tokens
        elif victim in step.plan.admitted:
            (row,) = (row for row in step.plan.rows if row.request is victim)
            assert (row.start > 0) == prefix_cache
            assert row.start + len(row.tokens) == known > victim.num_prompt  # prompt and output so far
            assert row.samples  # so the next token comes at once
    assert (victim.id, victim.arrival, victim.arrival_number) == ("young", 0.0, 2)
    assert outputs(everything) == {
        "old": expected_output((1, 2, 3, 4), 12), "young": expected_output((5, 6, 7, 8), 12),
    }
    old, young = engine.records.requests
    assert (old.request_id, old.preemptions, young.preemptions) == ("old", 0, 1)
    assert young.token_times[0] == young.timing.first_token == 1.0  # as before it was sent away


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_one_request_preempted_twice(prefix_cache):
    engine = fake_engine(blocks=7, prefix_cache=prefix_cache)
    lengths = {"a": 8, "b": 16, "c": 12}
    for first, (name, length) in enumerate(lengths.items()):
        engine.add([first, 50, 51, 52], params(length), name)
    assert outputs(steps(engine)) == {
        name: expected_output((first, 50, 51, 52), n) for first, (name, n) in enumerate(lengths.items())
    }
    assert {record.request_id: record.preemptions for record in engine.records.requests} == {"a": 0, "b": 0, "c": 2}
    totals = engine.records.totals
    assert totals["preempted"] == 2 and totals["output_tokens"] == 36
    # All that was stored twice was either fed again or found again.
    assert totals["prompt_tokens"] == 12 and totals["decode_tokens"] == 36 - 3
    assert totals["recomputed_tokens"] > 0 and (totals["recovered_tokens"] > 0) == prefix_cache


@pytest.mark.parametrize("chunked_prefill", [True, False])
def test_a_resumed_request_longer_than_a_step_still_comes_back(chunked_prefill):
    """Its prompt fitted a step; with its output it no longer does."""
    engine = fake_engine(blocks=6, max_step_tokens=5, chunked_prefill=chunked_prefill, prefix_cache=False)
    for name in "ab":
        engine.add([1, 2, 3, 4], params(14), name)
    assert outputs(steps(engine)) == dict.fromkeys("ab", expected_output((1, 2, 3, 4), 14))
    assert engine.records.totals["preempted"] > 0


def test_a_returning_request_finds_its_own_output_again_as_well():
    engine = fake_engine(blocks=7)
    for first in (10, 20):
        engine.add([first, 1, 2, 3], params(12), first)
    list(steps(engine))
    assert engine.records.totals["preempted"] == 1
    assert (engine.records.totals["recovered_tokens"], engine.records.totals["recomputed_tokens"]) == (12, 0)


def test_a_victim_that_had_a_row_in_the_plan_already_loses_it():
    """An accepted run needs two blocks at once, which the younger row, planned before it, has to give."""
    engine = fake_engine(blocks=3, prefix_cache=False, say=lambda r: [1] * (6 if r.id == "run" else 1))
    engine.add([1, 2, 3], params(9), "run")
    engine.add([4, 5, 6], params(5), "single")
    seen = list(watched(engine))
    assert [request.id for request in seen[1].plan.preempted] == ["single"]
    assert [row.request.id for row in seen[1].plan.rows] == ["run"]
    assert seen[1].plan.budget == engine.scheduler.max_step_tokens - 6
    assert {name: len(tokens) for name, tokens in outputs([s.events for s in seen]).items()} == {"run": 9, "single": 5}


# -- no phase starves another ---------------------------------------------------------------------


@pytest.mark.parametrize(("chunked_prefill", "longest_gap"), [(True, 1), (False, 2)])
def test_a_decode_goes_on_while_prompts_keep_arriving(chunked_prefill, longest_gap):
    engine = fake_engine(blocks=999, max_step_tokens=32, max_batch=8, chunked_prefill=chunked_prefill)
    engine.add([1], params(51), "decode")
    for moment in range(1, 51):
        engine.add([50 + moment % 40] * 32, params(1), f"prompt {moment}", arrival=float(moment))
    given = [number for number, step in enumerate(watched(engine)) if "decode" in step.tokens_given]
    assert len(given) == 51
    gaps = [later - earlier for earlier, later in itertools.pairwise(given)]
    assert max(gaps) == longest_gap
    # and the prompts do not wait for the decode's end either
    assert sum(record.finish < given[-1] for record in engine.records.requests) > 20


def test_a_prompt_gets_on_beside_a_full_batch_of_decodes():
    engine = fake_engine(max_batch=9, max_step_tokens=9)
    for number in range(8):
        engine.add([number], params(40))
    first = engine.step()
    engine.add([50] * 20, params(1), "prompt")
    fed = [step.tokens_fed.get("prompt") for step in watched(engine)]
    assert len(first) == 8 and fed[:20] == [1] * 20  # the ninth token of each step


def test_who_cannot_feed_a_token_yet_does_not_take_a_row_or_memory():
    engine = fake_engine(max_step_tokens=4)
    engine.add([1] * 10, params(1), "a")
    engine.add([2] * 3, params(1), "b")
    joined = [[request.id for request in step.plan.admitted] for step in watched(engine)]
    assert joined == [["a"], [], ["b"], []]  # "a" leaves two tokens of the third step


def test_prompts_that_fill_the_pool_together_all_end():
    engine = fake_engine(blocks=8, max_step_tokens=4)
    for number in range(4):
        engine.add([number] * 16, params(8), number)
    everything = list(steps(engine))
    assert outputs(everything) == {number: expected_output((number,) * 16, 8) for number in range(4)}
    assert len(everything) <= 4 * (16 + 8)


# -- ids ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["arriving", "waiting", "running", "aborted in a static batch", "finished"])
def test_an_id_is_free_again_only_when_its_request_has_finished(state):
    batching = "static" if "static" in state else "continuous"
    engine = fake_engine(max_batch=1 if state == "waiting" else 2, batching=batching)
    engine.add([1], params(9), "other")
    engine.add([2, 3], params(1 if state == "finished" else 5), "a", arrival=50.0 if state == "arriving" else None)
    events = [engine.step()]
    if "aborted" in state:
        engine.abort("a")
    if state in ("arriving", "waiting", "running"):
        before = engine.stats()
        with pytest.raises(RequestError, match="'a' is taken"):
            engine.add([4], params(5), "a")
        assert engine.stats() == before
        assert outputs(events + list(steps(engine)))["a"] == expected_output((2, 3), 5)
    else:
        events = [engine.step()]
        engine.add([4], params(5), "a")
        tokens = outputs([[e for e in step if e.token_ids] for step in [*events, *steps(engine)]])
        assert tokens["a"] == expected_output((4,), 5)
        assert engine.stats().blocks_live == 0


def test_1_and_the_text_1_are_two_ids():
    engine = fake_engine()
    engine.add([1], params(3), 1)
    engine.add([2], params(4), "1")
    assert outputs(steps(engine)) == {1: expected_output((1,), 3), "1": expected_output((2,), 4)}


# -- prompts in chunks ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "decodes", "budget", "chunks"),
    [(10, 0, 4, [4, 4, 2]), (8, 0, 4, [4, 4]), (10, 2, 4, [2] * 5), (9, 2, 4, [2, 2, 2, 2, 1]), (3, 0, 4, [3])],
)
@pytest.mark.parametrize("kv", ["paged", "slots"])
def test_no_token_before_the_last_chunk(prompt, decodes, budget, chunks, kv):
    engine = fake_engine(kv=kv, max_step_tokens=budget)
    for number in range(decodes):
        engine.add([number], params(20))
    if decodes:
        engine.step()
    began = engine.clock.now()
    engine.add(list(range(50, 50 + prompt)), params(3), "a")
    seen = []
    for step in watched(engine):
        seen.append((step.tokens_fed.get("a"), step.tokens_given.get("a")))
        assert sum(step.tokens_fed.values()) <= budget
    tokens = expected_output(tuple(range(50, 50 + prompt)), 3)
    assert [fed for fed, _ in seen[: len(chunks)]] == chunks
    assert [given for _, given in seen[: len(chunks)]] == [None] * (len(chunks) - 1) + [tokens[:1]]
    assert [given for _, given in seen[len(chunks) :]][:2] == [[tokens[1]], [tokens[2]]]
    (record,) = (r for r in engine.records.requests if r.request_id == "a")
    assert record.timing.ttft == len(chunks) and record.first_token == began + len(chunks)


# -- static batches -------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [[800, 80], [800] + 7 * [40]], ids=["80 beside 800", "one of 800, seven of 40"])
@pytest.mark.parametrize("kv", ["paged", "slots"])
@pytest.mark.parametrize("hidden", [False, True], ids=["caps", "hidden ends"])
def test_idle_slot_steps_of_a_static_batch(lengths, kv, hidden):
    idle = {}
    for batching in ("static", "continuous"):
        engine = fake_engine(blocks=8 * 201, batching=batching, kv=kv, say=lambda request: [1], prefix_cache=False)
        asked = [params(800, stop_after=n) if hidden else params(n) for n in lengths]
        engine.generate([[2, 3]] * len(lengths), asked)
        assert engine.records.totals["steps"] == 800
        assert engine.records.totals["output_tokens"] == sum(lengths)
        idle[batching] = engine.records.totals["idle_rows"]
    assert idle == {"static": 720 if len(lengths) == 2 else 7 * 760, "continuous": 0}


@pytest.mark.parametrize("kv", ["paged", "slots"])
def test_nobody_joins_a_static_batch_and_nobody_leaves_before_its_end(kv):
    engine = fake_engine(batching="static", kv=kv, max_batch=4)
    for name, length in [("a", 2), ("b", 6), ("c", 4)]:
        engine.add([1, 2, 3], params(length), name)
    engine.add([1, 2, 3], params(3), "d", arrival=0.5)
    engine.add([4], params(2), "e", arrival=2.5)
    members, live = [], []
    for step in watched(engine):
        members.append("".join(row.request.id for row in step.plan.rows))
        live.append(engine.stats().blocks_live)
    assert members == ["abc"] * 6 + ["de"] * 3  # though a fourth row was to be had all the time
    assert live[5] == 0 and all(live[:5]), "the memory of a static batch comes back at its end, all at once"
    finished = {record.request_id: record.finish for record in engine.records.requests}
    assert finished == {"a": 2, "c": 4, "b": 6, "e": 8, "d": 9}  # but its answers come when they are ready


def test_a_static_batch_is_as_large_as_memory_allows_for_its_longest():
    engine = fake_engine(batching="static", blocks=6)
    for name in "abc":
        engine.add([1, 2, 3], params(6), name)  # 8 tokens stored: two blocks each, though one is enough to begin
    engine.add([1, 2, 3], params(6), "d")
    assert [len(step.plan.rows) for step in watched(engine)] == [3] * 6 + [1] * 6
    assert engine.records.totals["preempted"] == 0


# -- the end that nobody knows --------------------------------------------------------------------


class Hidden(SamplingParams):
    """Params that tell when their hidden end is looked at."""

    looked_at = False

    def __getattribute__(self, name: str):
        if name == "stop_after":
            Hidden.looked_at = True
        return super().__getattribute__(name)


@pytest.mark.parametrize("batching", ["continuous", "static"])
@pytest.mark.parametrize("kv", ["paged", "slots"])
def test_planning_never_looks_at_the_hidden_end(batching, kv):
    engine = fake_engine(batching=batching, kv=kv, blocks=12)
    plan, plans = engine.scheduler.plan, []

    def noted_plan():
        Hidden.looked_at = False
        plans.append(plan())
        assert not Hidden.looked_at
        return plans[-1]

    engine.scheduler.plan = noted_plan
    for number in range(4):
        engine.add([number] * 3, Hidden(20, stop_after=2 + number))
    assert [len(tokens) for tokens in outputs(steps(engine)).values()] == [2, 3, 4, 5]
    assert Hidden.looked_at and plans


# -- bounds, on random workloads ------------------------------------------------------------------


@on_random_workloads
@given(busy_engines(chunked=True))
def test_with_chunks_every_decoding_row_gets_a_token_at_every_step(engine):
    for step in watched(engine):
        sent_away = {request.id for request in step.plan.preempted}
        for request in step.decoding:
            if request.id not in sent_away:
                assert len(step.tokens_given.get(request.id, [])) == 1


@on_random_workloads
@given(busy_engines(chunked=False))
def test_without_chunks_a_decoding_row_is_passed_over_for_one_step_at_most(engine):
    passed_over: set[int] = set()
    for step in watched(engine):
        sent_away = {request.id for request in step.plan.preempted}
        missed = {r.id for r in step.decoding if r.id not in step.tokens_given and r.id not in sent_away}
        assert not missed & passed_over
        assert not missed or step.tokens_fed, "passed over for nothing"
        passed_over = missed


@on_random_workloads
@given(busy_engines())
def test_every_step_gets_on_within_its_budget(engine):
    for step in watched(engine):
        assert step.tokens_fed or step.plan.preempted or any(event.finished for event in step.events)
        fed = sum(len(row.tokens) for row in step.plan.rows)
        one_long_row = len(step.plan.rows) == 1 and not engine.scheduler.chunked_prefill  # a long recomputation
        assert fed <= engine.scheduler.max_step_tokens or one_long_row
        assert len(step.plan.rows) <= engine.scheduler.max_batch
        assert len({id(row.request) for row in step.plan.rows}) == len(step.plan.rows), "one request in two rows"


@on_random_workloads
@given(busy_engines())
def test_the_youngest_is_sent_away_and_never_the_oldest(engine):
    just_joined = []
    for step in watched(engine):
        victims = step.plan.preempted
        stayed = [request for request in step.running if request not in victims]
        assert all(victim.arrival_number > request.arrival_number for victim in victims for request in stayed)
        assert not step.running or step.running[0] not in victims
        numbers = [victim.arrival_number for victim in victims]
        assert numbers == sorted(numbers, reverse=True)
        assert not (victims and step.plan.admitted), "somebody joined in the step in which another was sent away"
        assert not (victims and just_joined), "somebody joined for whom there was no room a step later"
        just_joined = step.plan.admitted


@on_random_workloads
@given(busy_engines())
def test_first_come_first_served_and_a_bounded_wait_at_the_head_of_the_queue(engine):
    """Each step brings the oldest row on by a token at least; without chunks, each two steps."""
    scheduler, add = engine.scheduler, engine.scheduler.add
    at_most: dict[int, int] = {}  # request -> the step by which it must have joined
    joined: list[int] = []

    def noted_add(request):
        ahead = sum(r.num_prompt + r.params.max_tokens for r in (*scheduler.running, *scheduler.waiting))
        at_most[request.id] = number + 1 + ahead * (1 if engine.scheduler.chunked_prefill else 2)
        add(request)

    scheduler.add = noted_add
    number = 0
    for number, step in enumerate(watched(engine)):
        for request in step.plan.admitted:
            if request.arrival_number not in joined:  # else it comes back after a preemption
                assert joined == [*range(1, request.arrival_number)]
                assert number <= at_most[request.id]
                joined.append(request.arrival_number)


@on_random_workloads
@given(busy_engines())
def test_everybody_gets_just_their_tokens(engine):
    requests = [entry[2] for entry in engine.arrivals] + list(engine.scheduler.waiting)
    given_out = outputs(steps(engine))
    for request in requests:
        number = min(request.params.max_tokens, request.params.stop_after or 99)
        assert given_out[request.id] == expected_output(tuple(request.prompt_ids), number)
    assert engine.stats().blocks_live == 0
