"""What the engine promises to its caller: nothing lost, nothing twice, nobody harmed by another's mistake."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from fakes import BLOCK_SIZE, FakeTokenizer, NoProposer, expected_output, fake_engine, outputs, steps
from serving import make_engine, run_to_end
from tiny import tiny_model

from minillm.fast.engine import Engine
from minillm.guard.inputs import RequestError
from minillm.ladder.request import SamplingParams
from minillm.ladder.speculative import Speculator

EVERY_POLICY = pytest.mark.parametrize(
    ("batching", "kv"),
    [("continuous", "paged"), ("continuous", "slots"), ("static", "paged"), ("static", "slots")],
)


def params(max_tokens: int = 4, **more) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, **more)


# -- generate -------------------------------------------------------------------------------------


@EVERY_POLICY
def test_answers_come_in_the_order_of_the_prompts_whoever_ends_first(batching, kv):
    prompts, lengths = [[1, 2, 3], [4], [5, 6, 7, 8, 9]], [9, 1, 4]
    answers = fake_engine(batching=batching, kv=kv).generate(prompts, [params(n) for n in lengths])
    assert [a.prompt_ids for a in answers] == prompts
    assert [a.token_ids for a in answers] == [
        expected_output((1, 2, 3), 9), expected_output((4,), 1), expected_output((5, 6, 7, 8, 9), 4),
    ]
    assert {a.finish_reason for a in answers} == {"length"}
    assert {a.text for a in answers} == {None}  # there is no tokenizer


def test_no_prompts_give_no_answers():
    assert fake_engine().generate([]) == []


@pytest.mark.parametrize(
    ("bad", "numbers"),
    [
        ([], ["empty"]),
        ([1] * 60, ["60", "8", "64"]),  # longer than the context
        ([1, 97], ["97", "place 1"]),  # not in the vocabulary
        ([-1], ["-1", "place 0"]),
        ("text", ["tokenizer"]),
        ([1, 2.0], ["2.0", "place 1"]),
        ([True, 2], ["True", "place 0"]),
        ([1, "2"], ["'2'", "place 1"]),
        ([torch.tensor(True)], ["place 0"]),
        ([[1, 2]], ["[1, 2]", "place 0"]),
        (3, ["list of token ids", "prompts is a list"]),  # generate([1, 2, 3]): one prompt where a list of them belongs
    ],
    ids=["empty", "too long", "id too high", "negative id", "text without a tokenizer", "a float", "a bool", "a digit",
         "a tensor of bool", "a list of lists", "a bare number"],
)
@pytest.mark.parametrize("call", ["generate", "stream"])
def test_one_bad_prompt_refuses_the_whole_call_and_names_its_index(bad, numbers, call):
    engine = fake_engine(max_context=64)
    with pytest.raises(RequestError) as refusal:
        getattr(engine, call)([[1, 2], [3], bad, [4]], params(8))  # a stream refuses here, not at its first event
    assert str(refusal.value).startswith("prompt 2: ")
    assert all(number in str(refusal.value) for number in numbers)
    assert not engine.has_work, "prompts before the bad one were queued all the same"


def test_whole_numbers_of_numpy_and_torch_are_token_ids():
    given = [np.arange(1, 4), torch.arange(1, 4), range(1, 4), [np.int64(1), torch.tensor(2), 3]]
    for answer in fake_engine().generate(given, params(3)):
        assert (answer.prompt_ids, answer.token_ids) == ([1, 2, 3], expected_output((1, 2, 3), 3))
        assert all(type(token) is int for token in answer.prompt_ids)


@pytest.mark.parametrize("moment", [math.inf, -math.inf, math.nan, "now", "3"])
def test_a_moment_that_never_comes_is_refused(moment):
    engine = fake_engine()
    with pytest.raises(RequestError, match="arrival"):
        engine.add([1], params(), arrival=moment)
    assert not engine.has_work


@pytest.mark.parametrize("number", [1, 3])
def test_a_list_of_params_must_be_as_long_as_the_prompts(number):
    engine = fake_engine()
    with pytest.raises(RequestError, match=f"2 prompts, but {number} SamplingParams"):
        engine.generate([[1], [2]], [params()] * number)
    assert not engine.has_work


@pytest.mark.parametrize("call", ["add", "generate"])
def test_params_of_another_kind_are_refused(call):
    engine = fake_engine()
    with pytest.raises(RequestError, match="give SamplingParams"):
        getattr(engine, call)([1] if call == "add" else [[1]], {"max_tokens": 3})
    assert not engine.has_work


def test_the_name_of_a_model_is_none():
    with pytest.raises(ValueError, match=r"give load_model\('smollm2'\)"):
        Engine("smollm2")
    with pytest.raises(ValueError, match="give load_model"):
        Engine(None)


def test_prompts_may_come_one_by_one_but_must_come():
    prompts = ([1, 2, 3] for _ in range(2))
    assert [answer.token_ids for answer in fake_engine().generate(prompts, params(3))] == [
        expected_output((1, 2, 3), 3)] * 2
    with pytest.raises(RequestError, match="3.5 is not a list of prompts"):
        fake_engine().generate(3.5, params(3))


def test_one_string_is_not_a_list_of_prompts():
    with pytest.raises(RequestError, match="one string"):
        fake_engine(tokenizer=FakeTokenizer()).generate("abc")


@EVERY_POLICY
def test_generate_loses_and_repeats_nothing_of_requests_in_flight(batching, kv):
    engine = fake_engine(batching=batching, kv=kv)
    engine.add([1, 2, 3], params(20), "longer")
    engine.add([4, 5], params(5), "shorter")
    engine.add([6], params(0), "no token")
    before = [engine.step()]
    (answer,) = engine.generate([[7, 8, 9]], params(8))
    assert answer.token_ids == expected_output((7, 8, 9), 8)
    assert outputs(before + list(steps(engine))) == {
        "longer": expected_output((1, 2, 3), 20), "shorter": expected_output((4, 5), 5), "no token": [],
    }


# -- stream ---------------------------------------------------------------------------------------


def test_a_stream_brings_each_token_in_the_step_that_made_it():
    engine = fake_engine()
    events = list(engine.stream([[1, 2, 3], [4]], [params(3), params(2)]))
    assert [(e.time, e.finished) for e in events] == [(1, False), (1, False), (2, False), (2, True), (3, True)]
    assert [e.finish_reason for e in events] == [None, None, None, "length", "length"]
    by_request = outputs([[event] for event in events])
    assert list(by_request.values()) == [expected_output((1, 2, 3), 3), expected_output((4,), 2)]


def test_a_stream_that_nobody_reads_runs_nothing():
    engine = fake_engine()
    engine.stream([[1, 2, 3]])
    assert not engine.has_work


@EVERY_POLICY
def test_closing_a_stream_midway_frees_its_blocks_and_leaves_others_alone(batching, kv):
    engine = fake_engine(batching=batching, kv=kv)
    engine.add([9, 9], params(12), "other")
    stream = engine.stream([[1, 2, 3], [4, 5]], params(50))
    for _ in range(4):
        next(stream)
    stream.close()
    engine.check_invariants()
    assert outputs(steps(engine)) == {"other": expected_output((9, 9), 12)}
    assert engine.stats().blocks_live == 0
    assert [r.finish_reason for r in engine.records.requests] == ["abort", "abort", "length"]


def test_two_streams_at_once_each_get_their_own_events():
    engine = fake_engine()
    first, second = engine.stream([[1, 2]], params(5)), engine.stream([[3, 4]], params(5))
    pairs = list(zip(first, second, strict=True))
    assert outputs([[a] for a, _ in pairs]).popitem()[1] == expected_output((1, 2), 5)
    assert outputs([[b] for _, b in pairs]).popitem()[1] == expected_output((3, 4), 5)


def test_a_stream_whose_last_events_a_step_took_ends_instead_of_waiting_for_ever():
    engine = fake_engine()
    stream = engine.stream([[1, 2, 3]], params(3))
    next(stream)
    list(steps(engine))
    assert list(stream) == []


# -- add, step, abort -----------------------------------------------------------------------------


def test_an_id_chosen_between_a_stream_s_call_and_its_start_stays_its_owner_s():
    engine = fake_engine()
    stream = engine.stream([[1, 2], [3]], params(2))
    engine.add([5, 6, 7], params(3), request_id="request-0")
    streamed = outputs([list(stream)])
    assert "request-0" not in streamed and sorted(map(len, streamed.values())) == [2, 2]
    assert outputs(steps(engine)) == {"request-0": expected_output((5, 6, 7), 3)}


def test_add_makes_up_ids_that_nobody_has():
    engine = fake_engine()
    taken = [engine.add([1], request_id=f"request-{number}") for number in (1, 2, 4)]
    made_up = [engine.add([1]) for _ in range(4)]
    assert len({*taken, *made_up}) == 7


@pytest.mark.parametrize("request_id", [1.0, ("a",), b"a"])
def test_an_id_is_text_or_a_whole_number(request_id):
    with pytest.raises(RequestError, match="neither a str nor an int"):
        fake_engine().add([1], request_id=request_id)


def test_step_with_nothing_to_do_does_nothing():
    engine = fake_engine()
    assert engine.step() == [] and engine.clock.now() == 0


@pytest.mark.parametrize("batching", ["continuous", "static"])
@pytest.mark.parametrize("max_tokens", [0, 1])
def test_no_token_or_one_beside_a_healthy_request(max_tokens, batching):
    engine = fake_engine(batching=batching)
    engine.add([1, 2, 3, 4], params(max_tokens), "odd")
    engine.add([5, 6], params(3), "healthy")
    first = engine.step()
    (odd,) = (event for event in first if event.request_id == "odd")
    assert (odd.finished, odd.finish_reason) == (True, "length")
    assert odd.token_ids == expected_output((1, 2, 3, 4), max_tokens)
    assert outputs([first, *steps(engine)])["healthy"] == expected_output((5, 6), 3)
    assert max(step.kv_tokens for step in engine.records.steps) <= 4 + 2 + 2  # an only token is never stored


def test_a_request_for_no_token_alone_needs_no_step_of_the_model():
    (answer,) = fake_engine().generate([[1, 2]], params(0))
    assert (answer.token_ids, answer.finish_reason, answer.timing.first_token) == ([], "length", None)


@EVERY_POLICY
@pytest.mark.parametrize("when", ["arriving", "waiting", "running"])
def test_abort_ends_a_request_once_wherever_it_stands(when, batching, kv):
    engine = fake_engine(batching=batching, kv=kv, max_batch=1 if when == "waiting" else 8)
    engine.add([1, 2, 3], params(8), "other")
    engine.add([4, 5, 6], params(8), "gone", arrival=50.0 if when == "arriving" else None)
    events = [engine.step()]
    engine.abort("gone")
    engine.abort("gone")  # the second one finds nobody
    engine.abort("never seen")
    engine.check_invariants()
    events += steps(engine)
    (end,) = (e for step in events for e in step if e.request_id == "gone" and e.finished)
    assert (end.finish_reason, end.token_ids) == ("abort", [])
    assert outputs(events)["other"] == expected_output((1, 2, 3), 8)
    assert engine.stats().blocks_live == 0
    assert engine.clock.now() < 50, "somebody waited for a request that had been aborted"


def test_a_request_aborted_before_it_arrived_has_not_ended_before_it_began():
    engine = fake_engine()
    engine.add([1], arrival=50.0, request_id="early")
    engine.abort("early")
    (record,) = engine.records.requests
    assert record.arrival <= record.finish


def test_step_jumps_to_an_arrival_when_nothing_else_is_runnable():
    engine = fake_engine()
    engine.add([1, 2], params(2), "late", arrival=100.0)
    engine.add([3], params(2), "now")
    engine.add([4], params(1), "between", arrival=1.5)
    times = {e.request_id: e.time for step in steps(engine) for e in step if e.finished}
    # "between" comes while the second step runs, and joins the third
    assert times == {"now": 2, "between": 3, "late": 102}


def test_arrivals_join_in_the_order_of_their_time_not_of_the_calls():
    engine = fake_engine(max_batch=1)
    for name, arrival in [("c", 3.0), ("a", 1.0), ("d", 3.0), ("b", 2.0)]:
        engine.add([1], params(1), name, arrival)
    assert [event.request_id for step in steps(engine) for event in step] == ["a", "b", "c", "d"]


def test_an_abort_among_arrivals_leaves_the_others_in_their_order():
    engine = fake_engine(max_batch=1)
    for moment in (1, 5, 2, 6, 3, 4):
        engine.add([1], params(1), moment, float(moment))
    engine.abort(1)
    assert [event.request_id for step in steps(engine) for event in step] == [1, 2, 3, 4, 5, 6]


def test_the_end_of_an_abort_does_not_wait_for_the_next_arrival():
    engine = fake_engine()
    engine.add([1], request_id="a")
    engine.add([1], arrival=50.0)
    engine.abort("a")
    assert [event.finish_reason for event in engine.step()] == ["abort"]
    assert engine.clock.now() == 0


def test_an_unseeded_request_draws_by_its_place_in_line_not_by_when_the_others_arrive():
    """On the wall clock an arrival of "now" may be past or future: that must not move the seeds behind it."""
    drawn = []
    for arrival in (None, 5.0):
        engine = fake_engine(say=lambda request: [request.seed % 97])
        engine.add([1], params(1, temperature=1.0), "first", arrival)
        engine.add([2], params(1, temperature=1.0), "second")
        drawn.append(outputs(steps(engine)))
    assert drawn[0] == drawn[1]


# -- when the forward fails -----------------------------------------------------------------------


@EVERY_POLICY
@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_a_failed_step_is_undone_and_can_be_repeated(error, batching, kv):
    engine = fake_engine(batching=batching, kv=kv, max_step_tokens=6, max_batch=4)
    prompts = {"a": (1, 2, 3), "b": (4, 5, 6, 7, 8, 9), "c": (1, 2, 3, 4, 5, 6, 7, 8)}
    for name, prompt in prompts.items():
        engine.add(list(prompt), params(6), name)
    engine.add([1], params(0), "no token")
    events = []
    while engine.has_work:
        engine.executor.error = error
        before = engine.stats()
        try:
            events.append(engine.step())  # the error comes only if there is a forward
        except type(error):
            engine.check_invariants()
            assert engine.stats().waiting + engine.stats().running == before.waiting + before.running
            engine.executor.error = None
            events.append(engine.step())
    assert outputs(events) == {name: expected_output(p, 6) for name, p in prompts.items()} | {"no token": []}
    assert engine.stats().blocks_live == 0


def test_who_joined_and_who_was_sent_away_before_a_failed_forward_is_counted():
    engine = fake_engine(blocks=5)
    for name, first in [("a", 10), ("b", 20)]:
        engine.add([first, 1, 2, 3], params(12), name)
    while engine.has_work:
        engine.executor.error = RuntimeError("out of memory")
        with pytest.raises(RuntimeError):
            engine.step()
        engine.executor.error = None
        engine.step()
    totals, lives = engine.records.totals, engine.records.requests
    assert totals["preempted"] == sum(life.preemptions for life in lives) == 1
    assert totals["admitted"] == 3  # two, and one again
    assert totals["output_tokens"] == 24


@EVERY_POLICY
@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt()], ids=["error", "interrupt"])
@pytest.mark.parametrize("step", [0, 1, 4])
def test_an_exception_inside_generate_ends_its_requests_and_no_others(step, error, batching, kv):
    engine = fake_engine(batching=batching, kv=kv)
    engine.add([1, 2, 3], params(10), "other")
    engine.add([9], params(0), "no token")
    run, calls = engine.executor.run, []

    def fails_once(plan):
        calls.append(plan)
        engine.executor.error = error if len(calls) == step + 1 else None
        return run(plan)

    engine.executor.run = fails_once
    with pytest.raises(type(error)):
        engine.generate([[4, 5, 6, 7, 8], [4, 5]], params(9))
    engine.check_invariants()
    assert outputs(steps(engine)) == {"other": expected_output((1, 2, 3), 10), "no token": []}
    assert engine.stats().blocks_live == 0
    (answer,) = engine.generate([[4, 5, 6, 7, 8]], params(9))
    assert answer.token_ids == expected_output((4, 5, 6, 7, 8), 9)


# -- how a request ends ---------------------------------------------------------------------------


def counting(run: int = 1):
    """A model that says 1, 2, 3, ..., `run` tokens a step."""
    return lambda request: [request.num_output + 1 + i for i in range(run)]


STOPS = {
    "the cap": (dict(max_tokens=5), [1, 2, 3, 4, 5], "length"),
    "a stop id": (dict(stop_ids=[3]), [1, 2, 3], "stop"),
    "the earlier of two stop ids": (dict(stop_ids=[6, 4]), [1, 2, 3, 4], "stop"),
    "EOS": (dict(), [1, 2, 3, 4, 5, 6, 7], "stop"),
    "a stop id joins EOS, it does not replace it": (dict(stop_ids=[50]), [1, 2, 3, 4, 5, 6, 7], "stop"),
    "EOS ignored": (dict(ignore_eos=True), [*range(1, 11)], "length"),
    "EOS ignored, but not the stop id": (dict(ignore_eos=True, stop_ids=[8]), [*range(1, 9)], "stop"),
    "the hidden end": (dict(stop_after=4), [1, 2, 3, 4], "stop"),
    "the hidden end, EOS ignored": (dict(stop_after=9, ignore_eos=True), [*range(1, 10)], "stop"),
    "stop id and cap on one token: a stop": (dict(stop_ids=[5], max_tokens=5), [1, 2, 3, 4, 5], "stop"),
    "hidden end and cap on one token: a stop": (dict(stop_after=5, max_tokens=5), [1, 2, 3, 4, 5], "stop"),
    "a cap of one": (dict(max_tokens=1, stop_ids=[2]), [1], "length"),
}


@EVERY_POLICY
@pytest.mark.parametrize("run", [1, 2, 5, 12])
@pytest.mark.parametrize("case", STOPS)
def test_ends_are_the_same_token_by_token_and_inside_accepted_runs(case, run, batching, kv):
    asked, tokens, reason = STOPS[case]
    engine = fake_engine(say=counting(run), eos_ids=(7, 60), batching=batching, kv=kv)
    engine.add([1, 2], SamplingParams(**{"max_tokens": 10, **asked}), "a")
    events = [event for step in steps(engine) for event in step]
    assert outputs([[event] for event in events])["a"] == tokens
    assert events[-1].finish_reason == reason
    (record,) = engine.records.requests
    assert (record.output_tokens, record.finish_reason) == (len(tokens), reason)
    assert engine.records.totals["output_tokens"] == len(tokens)
    assert engine.stats().blocks_live == 0


def test_eos_of_model_and_tokenizer_both_count():
    def echo(request):
        return [request.prompt_ids[0] if request.num_output else 50]

    engine = fake_engine(say=echo, eos_ids=(7,), tokenizer=FakeTokenizer())  # which adds 96
    answers = engine.generate([[7], [96], [8]], params(4))
    assert [(len(a.token_ids), a.finish_reason) for a in answers] == [(2, "stop"), (2, "stop"), (4, "length")]


# The counting model says "bcdefg..." to the fake tokenizer.
TEXTS = {
    "no stop": (dict(max_tokens=4), "bcde", 4, "length"),
    "one letter": (dict(stop="d"), "bc", 3, "stop"),
    "over several tokens": (dict(stop=["def"]), "bc", 5, "stop"),
    "the earliest of several": (dict(stop=["hi", "fg"]), "bcde", 6, "stop"),
    "begun, but not ended: released": (dict(stop=["efx"], max_tokens=5), "bcdef", 5, "length"),
    "stop and cap on one token: a stop": (dict(stop=["ef"], max_tokens=5), "bcd", 5, "stop"),
    "stop string and stop id on one token": (dict(stop=["ef"], stop_ids=[5]), "bcd", 5, "stop"),
    "the stop id comes first": (dict(stop=["ef"], stop_ids=[4]), "bcde", 4, "stop"),
    "the hidden end comes first": (dict(stop=["ef"], stop_after=4), "bcde", 4, "stop"),
    "the cap comes first": (dict(stop=["ef"], max_tokens=4), "bcde", 4, "length"),
}


@pytest.mark.parametrize("batching", ["continuous", "static"])
@pytest.mark.parametrize("run", [1, 3, 12])
@pytest.mark.parametrize("case", TEXTS)
def test_stop_strings(case, run, batching):
    asked, text, number, reason = TEXTS[case]
    engine = fake_engine(say=counting(run), tokenizer=FakeTokenizer(), batching=batching)
    (answer,) = engine.generate(["ab"], SamplingParams(**{"max_tokens": 12, **asked}))
    assert (answer.text, answer.finish_reason) == (text, reason)
    assert answer.token_ids == [*range(1, number + 1)]  # up to the one that completed the stop
    assert engine.records.totals["output_tokens"] == number
    assert engine.stats().blocks_live == 0


@EVERY_POLICY
@pytest.mark.parametrize("max_tokens", [3, 20])
def test_a_stop_string_inside_a_verified_run_cuts_the_answer_and_spoils_no_books(max_tokens, batching, kv):
    """The second step says 2 to 6: what is behind the stop is stored, and a static batch keeps feeding it."""

    def say(request):
        return counting(5 if request.num_output else 1)(request)

    engine = fake_engine(say=say, tokenizer=FakeTokenizer(), batching=batching, kv=kv,
                         speculator=Speculator(NoProposer(), 4))
    engine.add("ab", params(max_tokens, stop=["cd"]), "cut")
    engine.add("ab", params(20), "other")
    assert outputs(steps(engine)) == {"cut": [1, 2, 3], "other": [*range(1, 21)]}
    (record,) = (record for record in engine.records.requests if record.request_id == "cut")
    assert (record.output_tokens, record.finish_reason) == (3, "stop")
    assert engine.stats().blocks_live == 0
    (answer,) = engine.generate(["ab"], params(max_tokens, stop=["cd"]))
    assert (answer.text, answer.token_ids) == ("b", [1, 2, 3])


def test_a_stop_string_ends_its_own_request_only():
    engine = fake_engine(say=counting(), tokenizer=FakeTokenizer())
    answers = engine.generate(["a", "b", "c"], [params(6), params(6, stop="d"), params(6)])
    assert [a.text for a in answers] == ["bcdefg", "bc", "bcdefg"]


def test_text_is_streamed_as_soon_as_it_is_safe():
    engine = fake_engine(say=counting(), tokenizer=FakeTokenizer())
    texts = [event.text for event in engine.stream(["a"], params(6, stop=["de!"]))]
    assert texts == ["b", "c", "", "", "def", "g"]


def test_text_held_back_for_a_stop_is_released_by_an_abort():
    engine = fake_engine(say=counting(), tokenizer=FakeTokenizer())
    engine.add("a", params(9, stop=["cd!"]), "a")
    texts = [event.text for _ in range(3) for event in engine.step()]
    engine.abort("a")
    texts += [event.text for event in engine.step()]
    assert "".join(texts) == "bcd"


def test_stop_strings_need_a_tokenizer():
    with pytest.raises(RequestError, match="tokenizer"):
        fake_engine().add([1], params(stop="x"))


# -- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(batching="dynamic"), "batching='dynamic': choose 'continuous' or 'static'"),
        (dict(kv="flat"), "kv='flat': choose 'paged' or 'slots'"),
        (dict(records="none"), "records='none': choose 'all' or 'summary'"),
        (dict(kv_memory=100), "kv_memory of 100 bytes holds no block"),
        (dict(kv_memory=float("nan")), "kv_memory nan must be a number of bytes from 1 up"),
        (dict(block_size=0), "block_size 0 must be a whole number from 1 up"),
        (dict(max_batch=0), "max_batch 0"),  # not "the default": a step without rows would never end
        (dict(max_batch=-1), "max_batch -1"),
        (dict(max_step_tokens=-1), "max_step_tokens -1"),
        (dict(max_context=0), "max_context 0"),
        (dict(kv_memory="1GB"), "kv_memory '1GB' must be a number of bytes"),
        (dict(tokenizer="smollm2"), r"tokenizer 'smollm2' is a name: give load_tokenizer\('smollm2'\)"),
        (dict(speculator="prompt lookup"), "speculator 'prompt lookup' is a name: give Speculator"),
    ],
)
def test_a_wrong_setting_is_named_with_the_right_ones(settings, message):
    with pytest.raises(ValueError, match=message):
        fake_engine(**settings)


@pytest.mark.parametrize(
    "wrong",
    [dict(max_tokens=-1), dict(temperature=-0.1), dict(temperature=float("nan")), dict(temperature=float("inf")),
     dict(top_k=0), dict(top_p=0.0), dict(top_p=1.1), dict(stop_after=0), dict(stop=["a", ""]), dict(stop=[7]),
     dict(max_tokens=2.5), dict(max_tokens=None), dict(top_k=1.5), dict(top_p=float("nan")), dict(seed="7"),
     dict(stop_after=2.5), dict(stop_ids=5), dict(stop_ids="ab"), dict(stop_ids=True), dict(stop=7), dict(stop=True),
     dict(temperature="0.7"), dict(temperature=None), dict(top_p="1"), dict(max_tokens=np.array([1, 2])),
     dict(temperature=torch.tensor([0.1, 0.2])), dict(stop=np.array([1, 2]))],
    ids=str,
)
def test_params_that_cannot_be_meant_are_refused_by_name(wrong):
    with pytest.raises(RequestError, match="stop string" if "stop" in wrong else next(iter(wrong))):
        SamplingParams(**wrong)


def test_stats_add_up_to_the_pool():
    engine = fake_engine(kv_memory=10.5 * BLOCK_SIZE * 2 * 2 * 2 * 8 * 2)  # half a block is no block
    assert (engine.stats().blocks_free, engine.stats().block_bytes) == (10, BLOCK_SIZE * 2 * 2 * 2 * 8 * 2)
    engine.add([1] * 9, params(1), "a")
    engine.add([2], params(9), "b", arrival=50)
    engine.step()
    stats = engine.stats()
    assert (stats.blocks_live, stats.blocks_cached, stats.blocks_free) == (0, 2, 8)
    assert (stats.waiting, stats.running, stats.arriving) == (0, 0, 1)


@pytest.mark.parametrize("ids", [(7,), [7], {7}, torch.tensor([7]), np.array([7, 9]), torch.tensor(7)], ids=str)
def test_stop_ids_of_any_library_end_the_answer(ids):
    engine = fake_engine(say=lambda request: [request.num_output + 5])
    assert engine.generate([[1, 2]], SamplingParams(9, stop_ids=ids))[0].token_ids == [5, 6, 7]


@pytest.mark.parametrize("ids", ["7", 7.0, [7.0], ["7"], [True], [[7]], [None], object()], ids=str)
def test_stop_ids_that_are_no_ids_are_refused(ids):
    with pytest.raises(RequestError, match="stop_ids"):
        SamplingParams(9, stop_ids=ids)


@pytest.mark.parametrize("seed", [np.int64(1), np.uint8(1), torch.tensor(1)], ids=repr)
def test_a_seed_of_another_library_is_the_number_that_it_is(seed):
    """Beside a healthy request, whose tokens do not change."""
    texts = []
    for own in (1, seed):
        engine = make_engine(tiny_model())
        engine.add([1, 2, 3], SamplingParams(6, temperature=1.0, seed=own), "own")
        engine.add([4, 5], SamplingParams(6), "other")
        texts.append(run_to_end(engine))
    assert texts[0] == texts[1]
