"""Anything, in any order: adds, steps, aborts, failures and whole jobs, on a pool that is always too small.

After every step the books must agree, and at the end nobody may have lost a token, got one
twice, or still hold a block. Hypothesis shortens what it finds to the few calls that matter.
"""

from __future__ import annotations

from contextlib import suppress

import pytest
from fakes import expected_output, fake_engine, steps
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from minillm.guard.inputs import RequestError
from minillm.ladder.request import SamplingParams, TokenEvent

POOL = 7
# Prompts that share beginnings, in whole blocks and in parts of one.
PROMPTS = st.builds(
    lambda stem, length, tail: ([stem] * length + tail)[:16],
    st.integers(1, 2), st.integers(0, 13), st.lists(st.integers(3, 5), min_size=1, max_size=5),
)
ENDS = st.builds(
    SamplingParams, max_tokens=st.integers(0, 12), stop_after=st.none() | st.integers(1, 12), ignore_eos=st.just(True)
)


class Serving(RuleBasedStateMachine):
    """One engine under attack, and what each of its requests must have got in the end."""

    @initialize(
        batching=st.sampled_from(["continuous", "static"]), kv=st.sampled_from(["paged", "slots"]),
        chunked_prefill=st.booleans(), prefix_cache=st.booleans(), max_step_tokens=st.integers(16, 20),
        max_batch=st.integers(1, 5), ahead=st.booleans(),
    )
    def start(self, ahead, **chosen):
        self.engine = fake_engine(blocks=POOL, max_context=28, **chosen)
        self.engine.runs_ahead = ahead  # as on a GPU
        self.expected: dict[int, list[int]] = {}
        self.got: dict[int, list[int]] = {}
        self.ended: dict[int, str] = {}
        self.aborted: set[int] = set()

    def take(self, events: list[TokenEvent]) -> None:
        for event in events:
            assert event.request_id not in self.ended, "an event after the last"
            self.got[event.request_id] += event.token_ids
            if event.finished:
                self.ended[event.request_id] = event.finish_reason

    @rule(prompt=PROMPTS, params=ENDS, delay=st.none() | st.floats(0, 5))
    def add(self, prompt, params, delay):
        number = len(self.expected)
        self.engine.add(prompt, params, number, None if delay is None else self.engine.clock.now() + delay)
        self.expected[number] = expected_output(tuple(prompt), min(params.max_tokens, params.stop_after or 99))
        self.got[number] = []

    @rule(length=st.integers(17, 40))
    def add_what_can_never_run(self, length):
        before = self.engine.stats()
        with pytest.raises(RequestError):
            self.engine.add([1] * length, SamplingParams(12))
        assert self.engine.stats() == before

    @rule()
    def step(self):
        self.take(self.engine.step())

    @rule(error=st.sampled_from([RuntimeError, KeyboardInterrupt]))
    def step_that_fails(self, error):
        self.engine.executor.error = error()
        with suppress(error):  # raised if the step needs the model
            self.take(self.engine.step())
        self.engine.executor.error = None

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def abort(self, data):
        number = data.draw(st.integers(0, len(self.expected) - 1))
        if number not in self.ended:
            self.aborted.add(number)
        self.engine.abort(number)

    @rule(prompts=st.lists(PROMPTS, min_size=1, max_size=3), length=st.integers(0, 6))
    def generate(self, prompts, length):
        for prompt, answer in zip(prompts, self.engine.generate(prompts, SamplingParams(length)), strict=True):
            assert answer.token_ids == expected_output(tuple(prompt), length)

    @rule(prompts=st.lists(PROMPTS, min_size=1, max_size=3), read=st.integers(0, 9))
    def stream_and_leave(self, prompts, read):
        stream = self.engine.stream(prompts, SamplingParams(12))
        for _ in zip(range(read), stream, strict=False):
            pass
        stream.close()

    @rule()
    def look_at_the_books(self):
        self.engine.check_invariants()  # which waits for a step under way

    @invariant()
    def books_agree(self):
        if not self.engine.runs_ahead:
            self.engine.check_invariants()
        stats = self.engine.stats()
        assert stats.blocks_live + stats.blocks_cached + stats.blocks_free == POOL
        assert all(self.expected[number][: len(got)] == got for number, got in self.got.items())

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        for events in steps(self.engine):
            self.take(events)
        assert self.engine.stats().blocks_live == 0
        assert self.ended.keys() == self.expected.keys()
        for number, reason in self.ended.items():
            if reason != "abort":
                assert self.got[number] == self.expected[number]
            assert (reason == "abort") <= (number in self.aborted)
        totals, records = self.engine.records.totals, self.engine.records.requests
        assert totals["output_tokens"] == sum(record.output_tokens for record in records)
        assert not self.engine.records.live


TestServing = Serving.TestCase
TestServing.settings = settings(max_examples=250, stateful_step_count=30, deadline=None, derandomize=True)
