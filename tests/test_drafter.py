"""The one-layer drafter: what it drafts in an engine is what it drafts from nothing."""

import hashlib
from dataclasses import replace

import pytest
import torch
from test_tokenizer import of_pieces
from tiny import random_tensors, tiny_model

from minillm import Engine, SamplingParams, load_model, load_tokenizer
from minillm.course.experiments.speculation import acceptance_by_position
from minillm.course.prompts import CHAT_PROMPTS
from minillm.extras.draft_model import DraftModelProposer
from minillm.extras.drafter import WEIGHTS, Drafter, DrafterProposer, load_drafter, read_card
from minillm.ladder.decode import NoCache, decode_cached
from minillm.ladder.speculative import Speculator
from minillm.load.source import DEFAULT

TARGET = tiny_model("t-wide")
DRAW = torch.Generator().manual_seed(2)
PROMPTS = [torch.randint(97, (n,), generator=DRAW).tolist() for n in (1, 4, 9, 16, 17, 30)]
PROMPTS += [PROMPTS[3], PROMPTS[3] + [5]]
PARAMS = SamplingParams(max_tokens=20)
ANSWERS = {tuple(prompt): list(decode_cached(TARGET, prompt, 20)) for prompt in PROMPTS}


def random_drafter(target=TARGET, seed: int = 5, ids=range(0, 97, 2)) -> Drafter:
    """Random weights; it may propose the even ids only."""
    tensors = random_tensors(replace(target.config, num_hidden_layers=1), seed)
    tensors = {name: tensor for name, tensor in tensors.items() if ".layers." in name}
    hidden, make = target.config.hidden_size, torch.Generator().manual_seed(seed)
    return Drafter(target, tensors | {
        "fuse.weight": torch.randn(hidden, 2 * hidden, generator=make) / 8, "ids": torch.tensor(ids)
    })


def drafts_from_nothing(drafter: Drafter, tokens: list[int], number: int) -> list[int]:
    """Draft behind a text with no cache and no engine: everything is computed again for each draft."""
    known = torch.tensor(tokens)
    states = drafter.norm(TARGET.hidden_states(known[:-1], torch.arange(len(known) - 1), NoCache()))
    states = torch.cat((torch.zeros(1, states.shape[1]), states))  # [N, H] the state before each token
    for _ in range(number):
        guess = drafter.forward(known, torch.arange(len(known)), states, NoCache())[-1:]
        known = torch.cat((known, drafter.ids[drafter.head(guess).argmax(-1)]))
        states = torch.cat((states, guess))
    return known[len(tokens) :].tolist()


class Noting(DrafterProposer):
    """Notes behind which text it drafted what."""

    def __init__(self, drafter: Drafter) -> None:
        super().__init__(drafter)
        self.notes: dict[tuple[int, ...], list[int]] = {}

    def propose(self, rows):
        proposed = super().propose(rows)
        for row in rows:
            if row.drafts:
                self.notes[tuple(row.request.tokens)] = list(row.drafts)
        return proposed

    def check(self) -> None:
        """Some of the notes: were these drafts those of the bare drafter behind that text?"""
        for text, drafts in list(self.notes.items())[:: 1 + len(self.notes) // 24]:
            assert drafts == drafts_from_nothing(self.model, list(text), len(drafts)), len(text)


class ComingTrue(Noting):
    """Notes what it drafted, and has verified what the target says: as if each draft had been right."""

    def propose(self, rows):
        proposed = super().propose(rows)
        for row in rows:
            answer, at = ANSWERS[tuple(row.request.prompt_ids)], row.request.num_output
            row.drafts[:] = answer[at : at + len(row.drafts)]
        return proposed


def engine_with(proposer, k: int = 3, blocks: int = 96, **settings) -> Engine:
    kv_memory = blocks * 4 * (2 * 2 * 2 * 12 * 4 + proposer.bytes_per_token)
    return Engine(TARGET, block_size=4, kv_memory=kv_memory, speculator=Speculator(proposer, k), **settings)


SETTINGS = {
    "alone": dict(max_batch=1), "in chunks": dict(max_step_tokens=12, max_batch=3), "slots": dict(kv="slots"),
    "preempted": dict(blocks=20), "static": dict(batching="static"), "no prefix cache": dict(prefix_cache=False),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_it_drafts_in_any_engine_what_it_drafts_from_nothing(name):
    proposer = Noting(random_drafter())
    engine = engine_with(proposer, **SETTINGS[name])
    caps = [20 - 2 * (i % 3) for i in range(len(PROMPTS))]  # a static batch carries some rows to its end
    for _ in range(2):  # the second time, the prefix cache knows the prompts
        answers = engine.generate(PROMPTS, [SamplingParams(max_tokens=cap) for cap in caps])
        for done, cap in zip(answers, caps, strict=True):
            assert done.token_ids == ANSWERS[tuple(done.prompt_ids)][:cap]
        engine.check_invariants()
    assert (engine.records.totals["preempted"] > 0) == (name == "preempted")
    assert len(proposer.notes) > 70
    proposer.check()


def test_the_places_of_accepted_drafts_are_read_again_with_the_true_states():
    """Random weights are hardly ever right, so that nothing else would tell."""
    proposer = ComingTrue(random_drafter())
    engine = engine_with(proposer)
    engine.generate(PROMPTS, PARAMS)
    assert engine.records.totals["accepted_tokens"] == engine.records.totals["drafted_tokens"] > 60
    proposer.check()


def test_it_proposes_only_its_own_ids_also_when_sampling():
    proposer = Noting(random_drafter())
    params = SamplingParams(max_tokens=20, temperature=1.5, top_p=0.95)
    engine_with(proposer).generate(PROMPTS, params)
    drafted = {token for drafts in proposer.notes.values() for token in drafts}
    assert drafted and all(token % 2 == 0 for token in drafted)


def test_it_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="the drafter is for 64 hidden and 97 ids; this model has 72 and 97"):
        Engine(tiny_model("t9-3"), speculator=Speculator(DrafterProposer(random_drafter())))
    with pytest.raises(ValueError, match="proposes id 97; the target has 97"):
        random_drafter(ids=[3, 97])
    with pytest.raises(ValueError, match="this target's head is another"):
        random_drafter(tiny_model("t-wide", tie_word_embeddings=False))


# -- draft models, whose cache lags behind and catches up --------------------------------------------


@pytest.mark.parametrize("k", range(1, 6))
def test_the_target_as_its_own_draft_model_is_never_wrong_with_a_shared_prefix(k):
    """SPD-3: the last draft of a fully accepted round was never fed to the draft model, and its block lives on."""
    engine = engine_with(DraftModelProposer(TARGET), k, max_batch=4)
    for _ in range(2):
        answers = engine.generate(PROMPTS, PARAMS)
        engine.generate([done.prompt_ids + done.token_ids for done in answers], PARAMS)  # as in a conversation
    totals = engine.records.totals
    assert totals["cached_tokens"] > 100
    assert totals["accepted_tokens"] == totals["drafted_tokens"] > 0


@pytest.mark.parametrize("vocabulary", [90, 101])
def test_ids_that_only_one_of_two_models_has_are_padding(vocabulary):
    """SPD-5: read without a crash, and never proposed beyond the target's."""
    proposer = DraftModelProposer(tiny_model("t8-2", vocab_size=vocabulary))
    params = [SamplingParams(20), SamplingParams(20, temperature=1.5)] * (len(PROMPTS) // 2)
    for done in engine_with(proposer).generate([[95, *prompt] for prompt in PROMPTS], params)[::2]:
        assert done.token_ids == list(decode_cached(TARGET, done.prompt_ids, 20))


def test_another_token_map_of_the_same_size_is_refused():
    """SPD-5: equal sizes prove nothing."""
    ours, theirs = of_pieces(["a", "b", "c"]), of_pieces(["b", "a", "c"])
    match = "pieces (3 ids) and pieces (3 ids) have different maps"
    with pytest.raises(ValueError, match=match.replace("(", r"\(").replace(")", r"\)")):
        Engine(TARGET, ours, speculator=Speculator(DraftModelProposer(TARGET, theirs)))
    Engine(TARGET, ours, speculator=Speculator(DraftModelProposer(TARGET, of_pieces(["a", "b", "c"]))))


# -- the weights that come with the package --------------------------------------------------------


def test_the_drafter_is_small_and_what_its_card_says(smollm2_dir):
    card, model = read_card(), load_model(smollm2_dir)
    assert WEIGHTS.stat().st_size <= 12_000_000
    assert hashlib.sha256(WEIGHTS.read_bytes()).hexdigest() == card["sha256"]
    drafter = load_drafter(model)
    assert len(drafter.ids) == card["ids"] and card["target"] == DEFAULT
    for name in ("made_by", "commit", "seed", "texts", "tokens", "steps", "validation_loss", "evaluated_prompts"):
        assert card.get(name) is not None, name
    assert len(card["drafter_acceptance_by_position"]) == len(card["ngram_acceptance_by_position"]) == 4


def test_its_acceptance_is_what_its_card_says(smollm2_dir):
    """On the first of the prompts that the card's figures come from: text the drafter has never seen."""
    model, tokenizer = load_model(smollm2_dir), load_tokenizer(smollm2_dir)
    asked = [tokenizer.chat(text) for text in CHAT_PROMPTS[1:4]]
    shares = acceptance_by_position(model, DrafterProposer(load_drafter(model)), asked, k=2, tokens=32)
    assert abs(shares[0] - read_card()["drafter_acceptance_by_position"][0]) < 0.2


def test_a_damaged_file_and_another_target_are_refused(tmp_path):
    with pytest.raises(ValueError, match="this drafter is for smollm2-135m-instruct"):
        load_drafter(TARGET)
    copy = tmp_path / WEIGHTS.name
    copy.with_suffix(".json").write_text(WEIGHTS.with_suffix(".json").read_text())
    copy.write_bytes(WEIGHTS.read_bytes()[:-1] + b"x")
    with pytest.raises(ValueError, match="is damaged: its sha256 is"):
        load_drafter(TARGET, copy)
