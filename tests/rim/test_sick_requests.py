"""One sick request among healthy ones: it alone is refused or ends with "error", and the others' tokens stay.

Each row of the tables is a kind of sickness, and each is run greedily and sampled, over pages and slots,
with and without drafts, and with steps launched ahead as on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from itertools import count, product, repeat

import numpy as np
import pytest
import torch
from fakes import NoProposer, fake_engine
from serving import MOST_STEPS, make_engine, run_to_end
from tiny import tiny_model

from minillm.extras.draft_model import DraftModelProposer
from minillm.fast.engine import Engine
from minillm.guard.inputs import RequestError
from minillm.ladder import engine as heart
from minillm.ladder.quantized import STORES, kv_storage
from minillm.ladder.request import Request, SamplingParams
from minillm.ladder.speculative import NgramProposer, Speculator
from minillm.ladder.static import decode_static
from minillm.load.tokenizer import load_tokenizer

HEALTHY = {"short": [5, 6, 5, 6, 5], "shared": [1, 2, 3, 4, 1, 2, 3, 4, 9], "long": list(range(10, 30))}
SICK = [1, 2, 3, 4, *range(30, 66)]  # 40 tokens: no healthy request comes to such a position
TOKENS = 12
GREEDY, SAMPLED = SamplingParams(TOKENS), SamplingParams(TOKENS, temperature=0.9, top_p=0.95, seed=4)
PROPOSERS = {
    "plain": lambda: None,
    "lookup": lambda: Speculator(NgramProposer(), 3),
    "draft model": lambda: Speculator(DraftModelProposer(tiny_model(seed=1)), 3),
}


@dataclass(frozen=True)
class Setup:
    """How the engine of a case is set up."""

    params: SamplingParams
    policy: tuple[str, str]  # batching and memory
    drafts: str
    ahead: bool

    def engine(self, model, **settings) -> Engine:
        batching, kv = self.policy
        engine = make_engine(model, batching=batching, kv=kv, speculator=PROPOSERS[self.drafts](), **settings)
        engine.runs_ahead = self.ahead
        return engine

    def solo(self, prompt: list[int]) -> list[int]:
        """What the prompt gives with the engine to itself."""
        return self.engine(plain_model()).generate([prompt], self.params)[0].token_ids

    def __str__(self) -> str:
        sampling = "greedy" if self.params is GREEDY else "sampled"
        return ", ".join((sampling, *self.policy, self.drafts, "ahead" if self.ahead else "in turn"))


POLICIES = [("continuous", "paged"), ("continuous", "slots"), ("static", "slots")]
SETUPS = [Setup(*case) for case in product((GREEDY, SAMPLED), POLICIES, PROPOSERS, (False, True))]


def plain_model():
    return tiny_model(tie_word_embeddings=False)


class SickModel:
    """A model whose logits are unusable after `position`, or whose embedding of one token is, while it is sick."""

    def __init__(self, number: float, where: str, position: int) -> None:
        self.model, self.number, self.where, self.position, self.sick = plain_model(), number, where, position, True

    def __getattr__(self, name: str):
        return getattr(self.model, name)

    def forward(self, tokens, positions, cache, logit_rows):
        if self.where == "keys":  # of one of its tokens, and so everything that attends to it
            return self.with_sick_keys(tokens, positions, cache, logit_rows)
        logits = self.model.forward(tokens, positions, cache, logit_rows)
        rows = positions[logit_rows] >= self.position if self.sick else slice(0)
        if self.where == "all":
            logits[rows] = self.number
        else:
            logits[rows, 13] = self.number
        return logits

    def with_sick_keys(self, tokens, positions, cache, logit_rows):
        embedding = self.model.embedding
        self.model.embedding = torch.cat((embedding, torch.full_like(embedding[:1], self.number)))
        sick = (positions == self.position) & (tokens == SICK[self.position]) & self.sick
        try:
            return self.model.forward(tokens.where(~sick, len(embedding)), positions, cache, logit_rows)
        finally:
            self.model.embedding = embedding


UNUSABLE = {
    "NaN everywhere": (np.nan, "all", 39),
    "NaN everywhere, later": (np.nan, "all", 43),
    "one NaN": (np.nan, "one", 39),
    "one NaN, later": (np.nan, "one", 42),
    "minus infinity everywhere": (-np.inf, "all", 39),
    "one plus infinity": (np.inf, "one", 41),
    "NaN in its keys": (np.nan, "keys", 33),
    "infinity in its keys": (np.inf, "keys", 39),
}


def run_beside_healthy(engine: Engine, sick, params) -> tuple[dict, dict[str, str]]:
    """Serve the healthy requests and one more; their tokens, and why each ended."""
    for name, prompt in HEALTHY.items():
        engine.add(prompt, params, request_id=name)
    sick(engine)
    tokens: dict = {}
    for _ in range(MOST_STEPS):
        if not engine.has_work:
            break
        for event in engine.step():
            tokens.setdefault(event.request_id, []).extend(event.token_ids)
        if engine.launched is None:
            engine.check_invariants()
    assert not engine.has_work and engine.stats().blocks_live == 0
    return tokens, {record.request_id: record.finish_reason for record in engine.records.requests}


@pytest.mark.parametrize("setup", SETUPS, ids=str)
@pytest.mark.parametrize("kind", UNUSABLE)
def test_unusable_logits_end_their_own_request_only(setup, kind):
    number, where, position = UNUSABLE[kind]
    model = SickModel(number, where, position)
    engine = setup.engine(model)
    tokens, reasons = run_beside_healthy(engine, lambda engine: engine.add(SICK, setup.params, "sick"), setup.params)
    given = max(0, position - 39) if where != "keys" else 0  # the logits of position 39 are its first token's
    assert reasons == {**dict.fromkeys(HEALTHY, "length"), "sick": "error"}
    assert tokens["sick"] == setup.solo(SICK)[:given]
    assert {name: tokens[name] for name in HEALTHY} == {name: setup.solo(HEALTHY[name]) for name in HEALTHY}
    engine.check_invariants()
    model.sick = False  # what it stored must not come back as somebody's shared prefix
    assert engine.generate([SICK], setup.params)[0].token_ids == setup.solo(SICK)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", UNUSABLE)
def test_the_hearts_engine_and_a_static_batch_end_that_request_only_too(kind, params):
    number, where, position = UNUSABLE[kind]
    given = max(0, position - 39) if where != "keys" else 0
    setup = Setup(params, ("continuous", "paged"), "plain", False)
    expected = {name: setup.solo(prompt) for name, prompt in HEALTHY.items()} | {"sick": setup.solo(SICK)[:given]}

    engine = heart.Engine(SickModel(number, where, position), block_size=4)
    for name, prompt in (HEALTHY | {"sick": SICK}).items():
        engine.add(prompt, params, name)
    assert run_to_end(engine) == expected

    batch = [Request(name, prompt, params, seed=4) for name, prompt in (HEALTHY | {"sick": SICK}).items()]
    decode_static(SickModel(number, where, position), batch)
    assert {request.id: request.output_ids for request in batch} == expected
    assert [request.finish_reason for request in batch] == ["length"] * 3 + ["error"]


@pytest.mark.parametrize("kv_format", STORES)
@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_a_number_that_is_not_finite_is_not_stored_as_one_that_is(kv_format, number):
    """And its neighbours in the store are read as if it were not there."""
    config = plain_model().config
    x = torch.randn(6, config.num_key_value_heads, config.head_dim, generator=torch.Generator().manual_seed(0))
    sick = x.clone()
    sick[3, 1, 2] = number
    slots, read = torch.arange(6), []
    for numbers in (x, sick):
        storage = kv_storage(config, kv_format, 6)
        storage.write(1, slots, numbers, numbers.flip(0))
        read.append(storage.read(1, slots))
    for store, row in ((0, 3), (1, 2)):
        healthy, found = (pair[store] for pair in read)
        assert not found[row, 1].isfinite().all()
        others = torch.ones(6, dtype=torch.bool)
        others[row] = False
        assert torch.equal(found[others], healthy[others]) and torch.equal(found[row, 0], healthy[row, 0])


@pytest.mark.parametrize("kv_format", ["int8", "fp8", "int4"])
def test_a_request_whose_keys_are_infinite_ends_with_an_error_in_every_format(kv_format):
    model = SickModel(np.inf, "keys", 33)
    engine, healthy = make_engine(model, kv_format=kv_format), make_engine(plain_model(), kv_format=kv_format)
    expected = {name: healthy.generate([prompt], GREEDY)[0].token_ids for name, prompt in HEALTHY.items()}
    tokens, reasons = run_beside_healthy(engine, lambda engine: engine.add(SICK, GREEDY, "sick"), GREEDY)
    assert reasons["sick"] == "error" and tokens == expected | {"sick": []}


# -- refused on entry -----------------------------------------------------------------------------

REFUSED = {
    "an empty prompt": (lambda: ([], {}), "empty"),
    "an id that is not in the vocabulary": (lambda: ([1, 97], {}), "97"),
    "a negative id": (lambda: ([1, -1], {}), "-1"),
    "an id of 3.0": (lambda: ([1, 3.0], {}), "3.0"),
    "an id that is a bool": (lambda: ([1, True], {}), "True"),
    "a float tensor": (lambda: (torch.ones(3), {}), "1."),
    "two prompts for one": (lambda: ([[1, 2], [3]], {}), r"\[1, 2\]"),
    "a prompt that is None": (lambda: (None, {}), "None"),
    "a text without a tokenizer": (lambda: ("text", {}), "tokenizer"),
    "a context that is too long": (lambda: ([1] * 4000, dict(max_tokens=97)), "4,000"),
    "more than the pool holds": (lambda: ([1] * 600, {}), "blocks"),
    "max_tokens of 7.5": (lambda: ([1], dict(max_tokens=7.5)), "7.5"),
    "max_tokens of None": (lambda: ([1], dict(max_tokens=None)), "None"),
    "a temperature of NaN": (lambda: ([1], dict(temperature=np.nan)), "nan"),
    "a temperature below 0": (lambda: ([1], dict(temperature=-1)), "-1"),
    "a temperature as text": (lambda: ([1], dict(temperature="hot")), "hot"),
    "a complex temperature": (lambda: ([1], dict(temperature=torch.tensor(1j))), "1"),
    "a temperature beyond floats": (lambda: ([1], dict(temperature=10**400)), "1000"),
    "top_p of 0": (lambda: ([1], dict(top_p=0)), "0"),
    "top_k of 0": (lambda: ([1], dict(top_k=0)), "top_k 0"),
    "top_k of 2.0": (lambda: ([1], dict(top_k=2.0)), "2.0"),
    "a seed of 1.5": (lambda: ([1], dict(seed=1.5)), "1.5"),
    "a seed that is a bool": (lambda: ([1], dict(seed=True)), "True"),
    "a seed of several numbers": (lambda: ([1], dict(seed=np.array([1, 2]))), "seed"),
    "stop ids that are text": (lambda: ([1], dict(stop_ids="2")), "stop_ids"),
    "a stop id of 2.5": (lambda: ([1], dict(stop_ids=[2.5])), "2.5"),
    "nested stop ids": (lambda: ([1], dict(stop_ids=[[2]])), r"\[2\]"),
    "stop ids without an end": (lambda: ([1], dict(stop_ids=count())), "stop_ids holds more than"),
    "stop strings without an end": (lambda: ([1], dict(stop=repeat("x"))), "stop holds more than"),
    "a stop string without a tokenizer": (lambda: ([1], dict(stop="end")), "tokenizer"),
    "a stop string that is a number": (lambda: ([1], dict(stop=[3])), "3"),
    "stop_after of 0": (lambda: ([1], dict(stop_after=0)), "0"),
}


def add_refused(engine: Engine, make, message: str) -> None:
    prompt, changes = make()
    with pytest.raises(RequestError, match=message):
        engine.add(prompt, SamplingParams(**{"max_tokens": TOKENS, **changes}), "sick")


@pytest.mark.parametrize("setup", [setup for setup in SETUPS if setup.policy != ("static", "slots")], ids=str)
def test_what_can_never_run_is_refused_on_entry_and_changes_nothing(setup):
    """All of the table one after the other beside one healthy batch: none of them leaves a trace."""

    def sick(engine: Engine) -> None:
        for make, message in REFUSED.values():
            before = engine.stats()
            add_refused(engine, make, message)
            engine.step()
            engine.check_invariants()
            assert engine.stats().waiting + engine.stats().running <= before.waiting + before.running

    _, reasons = run_beside_healthy(setup.engine(plain_model()), sick, setup.params)
    assert reasons == dict.fromkeys(HEALTHY, "length")


@pytest.mark.parametrize("kind", REFUSED)
def test_a_refused_request_does_not_change_its_neighbours_tokens(kind):
    setup = SETUPS[0]
    engine = setup.engine(plain_model())
    tokens, _ = run_beside_healthy(engine, lambda engine: add_refused(engine, *REFUSED[kind]), setup.params)
    assert tokens == {name: setup.solo(prompt) for name, prompt in HEALTHY.items()}


# -- odd, but meant -------------------------------------------------------------------------------

MEANT = {
    "a numpy seed": (dict(seed=np.int64(4), temperature=1.0), dict(seed=4, temperature=1.0)),
    "a torch seed": (dict(seed=torch.tensor(4), temperature=1.0), dict(seed=4, temperature=1.0)),
    "a seed past 64 bits": (dict(seed=2**70 + 4, temperature=1.0), dict(seed=4, temperature=1.0)),
    "a negative seed": (dict(seed=-1, temperature=1.0), dict(seed=2**64 - 1, temperature=1.0)),
    "a temperature that is a fraction": (dict(seed=4, temperature=Fraction(1, 2)), dict(seed=4, temperature=0.5)),
    "a temperature of numpy": (dict(seed=4, temperature=np.float32(0.5)), dict(seed=4, temperature=0.5)),
    "a top_p of torch": (
        dict(seed=4, temperature=1.0, top_p=torch.tensor(0.5)), dict(seed=4, temperature=1.0, top_p=0.5)),
    "max_tokens of numpy": (dict(max_tokens=np.int32(7)), dict(max_tokens=7)),
    "top_k of numpy": (dict(seed=4, temperature=1.0, top_k=np.uint8(3)), dict(seed=4, temperature=1.0, top_k=3)),
    "top_k beyond the vocabulary": (dict(seed=4, temperature=1.0, top_k=10**30), dict(seed=4, temperature=1.0)),
    "stop ids in a tensor": (dict(stop_ids=torch.arange(40)), dict(stop_ids=list(range(40)))),
    "every id of a large vocabulary": (dict(stop_ids=range(200_000)), dict(stop_ids=range(97))),
    "one stop id": (dict(stop_ids=torch.tensor(40)), dict(stop_ids=[40])),
}


@pytest.mark.parametrize("setup", [setup for setup in SETUPS if setup.params is GREEDY and not setup.ahead], ids=str)
def test_odd_values_that_are_meant_count_as_what_they_mean(setup):
    for odd, usual in MEANT.values():
        answers = []
        for changes in (odd, usual):
            params = SamplingParams(**{"max_tokens": TOKENS, **changes})
            engine = setup.engine(plain_model())
            add = partial(engine.add, [7, 8, 9], params, "sick")
            answers.append(run_beside_healthy(engine, lambda _, add=add: add(), GREEDY)[0])
        assert answers[0] == answers[1]
        assert len(answers[0]["sick"]) > 0


@pytest.mark.parametrize("seed", [np.int64(3), torch.tensor(3), np.uint8(3)])
def test_an_engine_takes_any_whole_number_as_its_seed(seed):
    params = SamplingParams(TOKENS, temperature=1.0)
    answers = [make_engine(plain_model(), seed=own).generate([SICK], params)[0].token_ids for own in (seed, 3)]
    assert answers[0] == answers[1]


@pytest.mark.parametrize("name", ["block_size", "max_batch", "max_step_tokens", "max_context", "seed"])
@pytest.mark.parametrize("value", [4.0, 7.5, True, "4", np.float32(4), torch.tensor(4.0), [4]])
def test_a_whole_number_is_asked_for_on_entry(name, value):
    with pytest.raises(ValueError, match=f"{name} .* must be a whole number"):
        Engine(plain_model(), **{name: value})


@pytest.mark.parametrize("value", [4.0, 0, -1, True, "4", None])
def test_a_draft_length_is_a_whole_number(value):
    if value is None:
        assert Speculator(NgramProposer(), np.int64(3)).most == 3
        return
    with pytest.raises(ValueError, match="draft_length .* must be a whole number from 1 up"):
        Speculator(NgramProposer(), value)


def test_a_context_beyond_the_models_positions_is_refused():
    model = tiny_model(max_position_embeddings=32)
    with pytest.raises(ValueError, match="max_context 64 > 32 tokens that this model's positions"):
        Engine(model, max_context=64)
    assert Engine(model, max_context=32).max_context == Engine(model).max_context == 32


# -- a proposer is never trusted ------------------------------------------------------------------

JUNK = {
    "ids beyond the vocabulary": lambda k: ([97] * k, None),
    "negative ids": lambda k: ([-1] * k, None),
    "ids in the vocabulary, then one beyond": lambda k: ([13, 10**9, 13][:k], None),
    "too many": lambda k: ([13] * (k + 50), None),
    "ids that are not numbers": lambda k: (["13", None, 2.5][:k], None),
    "no list": lambda k: (None, None),
    "a text": lambda k: ("13", None),
    "numpy ids": lambda k: (list(np.full(k, 13)), None),
    "a distribution of NaN": lambda k: ([13] * k, torch.full((k, 97), torch.nan)),
    "a distribution of zeros": lambda k: ([13] * k, torch.zeros(k, 97)),
    "a distribution below zero": lambda k: ([13] * k, torch.eye(97)[:k] * 2 - torch.eye(97)[1 : k + 1]),
    "a distribution of another shape": lambda k: ([13] * k, torch.ones(k + 1, 5) / 5),
    "a distribution that is a list": lambda k: ([13] * k, [[1.0]]),
}


class JunkProposer(NgramProposer):
    """Proposes junk for the sick request, and for the others what followed before."""

    def __init__(self, junk) -> None:
        super().__init__()
        self.junk, self.asked = junk, 0

    def propose(self, rows):
        q = super().propose(rows)
        for place, row in enumerate(rows):
            if row.request.id == "sick" and row.samples:
                self.asked += 1
                row.drafts, q[place] = self.junk(max(row.num_drafts, 1))
        return q


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kv", ["paged", "slots"])
@pytest.mark.parametrize("kind", JUNK)
def test_junk_from_a_proposer_costs_nothing_but_its_drafts(kind, kv, params):
    proposer = JunkProposer(JUNK[kind])
    engine = make_engine(plain_model(), kv=kv, speculator=Speculator(proposer, 3))
    tokens, reasons = run_beside_healthy(engine, lambda engine: engine.add(SICK, params, "sick"), params)
    setup = Setup(params, ("continuous", kv), "lookup", False)
    assert {name: tokens[name] for name in HEALTHY} == {name: setup.solo(HEALTHY[name]) for name in HEALTHY}
    assert set(reasons.values()) == {"length"} and len(tokens["sick"]) == TOKENS and proposer.asked
    if params is GREEDY:
        assert tokens["sick"] == setup.solo(SICK)


@pytest.mark.parametrize("answer", [None, [], [None], "none", 7])
def test_a_proposer_that_returns_no_list_of_distributions_is_taken_to_have_picked(answer):
    class Odd(NgramProposer):
        def propose(self, rows):
            super().propose(rows)
            return answer

    engine = make_engine(plain_model(), speculator=Speculator(Odd(), 3))
    prompts = list(HEALTHY.values())
    expected = make_engine(plain_model()).generate(prompts, GREEDY)
    assert [a.token_ids for a in engine.generate(prompts, GREEDY)] == [a.token_ids for a in expected]


# -- stop strings that are special tokens ---------------------------------------------------------

SAYS = "the end<|im_end|>the end"


def spelling_engine(smollm2, text: str, drafts: int = 0):
    """An engine that says the tokens of a text, one at a time or several in a step."""
    ids = smollm2.encode(text)

    def say(request):
        return ids[request.num_output :][: 1 + drafts]

    speculator = Speculator(NoProposer(), drafts) if drafts else None
    return fake_engine(say=say, tokenizer=smollm2, speculator=speculator)


@pytest.fixture(scope="module")
def smollm2(smollm2_dir):
    return load_tokenizer(smollm2_dir)


@pytest.mark.parametrize("drafts", [0, 4])
@pytest.mark.parametrize(
    ("stop", "text", "reason"),
    [
        (["<|im_end|>"], "the end", "stop"),  # the token is not text, and ends the answer as if it were
        (["nothing", "<|im_end|>"], "the end", "stop"),
        (["<|im_start|>"], "the endthe end", "length"),  # another special token: not said
        (["endt"], "the ", "stop"),  # across a token that is not shown
        (["d<|im"], None, None),
        (["<|im_end|> "], None, None),
    ],
)
def test_a_stop_string_that_is_a_special_token_stops_there(smollm2, drafts, stop, text, reason):
    engine = spelling_engine(smollm2, SAYS, drafts)
    params = SamplingParams(len(smollm2.encode(SAYS)), stop=stop, ignore_eos=True)
    if text is None and "<|im_end|>" in stop[0]:
        with pytest.raises(RequestError, match="holds the special token '<|im_end|>', which is never text"):
            engine.generate([[1]], params)
        return
    answer, neighbour = engine.generate([[1], [1]], [params, SamplingParams(params.max_tokens, ignore_eos=True)])
    assert neighbour.text == "the endthe end"
    assert (answer.text, answer.finish_reason) == ((text, reason) if text else ("the endthe end", "length"))
