"""Stand-ins for the model and the tokenizer, so that a test of bookkeeping takes microseconds.

The fake model keeps a real store, slot by slot, and reads it through the block tables as
attention does. What it stores at a position is a checksum of that token and of all that it
reads before it, and what it says next is the last checksum. So a block that was handed out
twice, recycled under its owner, or shared by prompts that differ gives wrong tokens, and
`expected_output` works out the right ones without any cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial

from hypothesis import settings
from hypothesis import strategies as st
from serving import MOST_STEPS, ManualClock
from tiny import tiny_config

from minillm.fast.engine import Engine
from minillm.ladder.continuous import Row, StepPlan
from minillm.ladder.quantized import kv_bytes_per_token
from minillm.ladder.request import Request, RequestId, SamplingParams, TokenEvent

VOCABULARY = 97
BLOCK_SIZE = 4


def checksum(token: int, before: Sequence[int]) -> int:
    """What the fake model stores for a token. (Python's hash of whole numbers has no salt.)"""
    return hash((token, *before))


@cache
def expected_output(prompt: tuple[int, ...], number: int) -> list[int]:
    """The `number` tokens that the fake model says after this prompt."""
    stored, output = [], []
    for token in prompt:
        stored.append(checksum(token, stored))
    for _ in range(number):
        output.append(stored[-1] % VOCABULARY)
        stored.append(checksum(output[-1], stored))
    return output


class FakeExecutor:
    """Runs plans on the fake model; each takes `seconds` of the clock.

    `say(request)`, where given, replaces the model's next token by tokens of the test's
    choice: several are an accepted run, and also the drafts where the plan has room for
    some. `error`, when set, is raised once, in mid-step, with half of the rows written.
    """

    def __init__(
        self,
        clock: ManualClock,
        seconds: float,
        say: Callable[[Request], list[int]] | None,
        eos_ids: tuple[int, ...],
    ) -> None:
        self.config = tiny_config(vocab_size=VOCABULARY, eos_token_id=eos_ids)
        self.clock, self.seconds, self.say = clock, seconds, say
        self.error: BaseException | None = None
        self.store: dict[int, int] = {}  # slot -> what was stored there
        self.plan = StepPlan(budget=0)  # the last one

    def run(self, plan: StepPlan) -> list[list[int]]:
        self.plan = plan
        assert plan.rows, "a step without rows: nobody gets on"
        assert all(row.start >= 0 and row.tokens for row in plan.rows), "a row that feeds nothing, or from nowhere"
        storing = [row for row in plan.rows if not row.idle]
        for row in storing:
            row.drafts = self.say(row.request)[: row.num_drafts] if row.num_drafts else []
        error, self.error = self.error, None
        for row in storing[: len(storing) // 2] if error else storing:
            self._write(row)
        if error:
            raise error
        self.clock.moment += self.seconds
        # Read after all rows have written: a slot that two rows hold shows now.
        return [self._next(row) for row in plan.rows if row.samples]

    def start(self, plan: StepPlan) -> Callable[[], list[list[int]]]:
        """As `ModelExecutor` has it: what waits for the tokens."""
        return partial(self.run, plan)

    def _write(self, row: Row) -> None:
        slots = self._slots(row)
        before = [self.store[slot] for slot in slots[: row.start]]
        for slot, token in zip(slots[row.start :], row.tokens, strict=True):
            self.store[slot] = checksum(token, before)
            before.append(self.store[slot])

    def _next(self, row: Row) -> list[int]:
        if self.say:
            return self.say(row.request)[: len(row.drafts) + 1 if row.drafts else None]
        *before, last = (self.store[slot] for slot in self._slots(row))
        assert last == checksum(row.tokens[-1], before), f"{row.request.id!r} reads what others wrote"
        return [last % VOCABULARY]

    def _slots(self, row: Row) -> list[int]:
        """Where the positions of a row are stored, from the first of its text to the last that it feeds."""
        table, end = row.request.block_table, row.span.start + row.span.count
        return [table[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE for at in range(end)]


class NoProposer:
    """For a `Speculator` on the fake model, which drafts what the test makes it say."""

    bytes_per_token = 0

    def prepare(self, config, num_blocks: int, block_size: int) -> None:
        pass


class FakeTokenizer:
    """Every id is one letter: 0 is "a", 25 is "z", and round again. Its stream is the real interface, made simple."""

    eos_ids = (96,)

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - ord("a") for letter in text]

    def stream(self, stop: Sequence[str] = ()) -> FakeTextStream:
        return FakeTextStream(stop)


class FakeTextStream:
    """Holds the newest letters back while one of the stop strings could still begin with them."""

    def __init__(self, stop: Sequence[str]) -> None:
        self.stop, self.held, self.stopped = stop, "", False

    def push(self, token: int) -> str:
        self.held += chr(ord("a") + token % 26)
        for stop in self.stop:
            if stop in self.held:
                self.stopped = True
                return self.held[: self.held.index(stop)]
        begun = [n for n in range(len(self.held) + 1) if any(s.startswith(self.held[n:]) for s in self.stop)]
        return self._release(begun[0] if begun else len(self.held))

    def finish(self) -> str:
        return self._release(len(self.held))

    def _release(self, number: int) -> str:
        text, self.held = self.held[:number], self.held[number:]
        return text


def fake_engine(blocks: int = 64, seconds: float = 1.0, say=None, eos_ids: tuple[int, ...] = (), **settings) -> Engine:
    """An engine on the fake model and a clock of its own, with a pool of so many blocks of 4 tokens."""
    clock = ManualClock()
    executor = FakeExecutor(clock, seconds, say, eos_ids)
    memory = blocks * BLOCK_SIZE * kv_bytes_per_token(executor.config, "bf16")
    settings = {"executor": executor, "clock": clock, "kv_memory": memory, "block_size": BLOCK_SIZE, **settings}
    return Engine(None, kv_format="bf16", **settings)


def steps(engine: Engine) -> Iterator[list[TokenEvent]]:
    """The events of each step until nothing is left, with the books checked after each."""
    for _ in range(MOST_STEPS):
        if not engine.has_work:
            return
        events = engine.step()
        engine.check_invariants()
        yield events
    raise AssertionError(f"still busy after {MOST_STEPS} steps")


def outputs(events: Iterator[list[TokenEvent]] | list[list[TokenEvent]]) -> dict[RequestId, list[int]]:
    """All tokens of these steps' events, by request. An event after the last one of its request is an error."""
    tokens: dict[RequestId, list[int]] = {}
    ended = set()
    for event in (event for step in events for event in step):
        assert event.request_id not in ended, f"{event.request_id!r} got an event after its last"
        ended |= {event.request_id} if event.finished else set()
        tokens.setdefault(event.request_id, []).extend(event.token_ids)
    return tokens


on_random_workloads = settings(max_examples=150, deadline=None, derandomize=True)


@st.composite
def busy_engines(draw, chunked: bool | None = None) -> Engine:
    """An engine with requests that share prefixes, arrive over time, and together need more memory than there is."""
    budget = draw(st.integers(4, 20))
    chunked = draw(st.booleans()) if chunked is None else chunked
    engine = fake_engine(
        blocks=draw(st.integers(7, 14)), max_step_tokens=budget, max_batch=draw(st.integers(1, 6)),
        batching=draw(st.sampled_from(["continuous", "static"])), kv=draw(st.sampled_from(["paged", "slots"])),
        chunked_prefill=chunked, prefix_cache=draw(st.booleans()),
    )
    for number in range(draw(st.integers(1, 8))):
        length = draw(st.integers(1, 16 if chunked else min(16, budget)))
        asked = SamplingParams(draw(st.integers(1, 12)), stop_after=draw(st.none() | st.integers(1, 12)))
        engine.add([draw(st.integers(0, 2))] * length, asked, number, arrival=float(draw(st.integers(1, 12))))
    return engine
