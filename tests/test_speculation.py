"""The experiment on drafts: what it reports is what was emitted, and its sums are right."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
from tiny import tiny_model

from minillm import Engine, SamplingParams, load_model, load_tokenizer, metrics
from minillm.course.drafter_training.text import prompts as training_prompts
from minillm.course.experiments.speculation import (
    Counted,
    DraftBenchmark,
    ReplayProposer,
    crossovers,
    draftings,
    expected_tokens,
    predict,
    right_at_random,
    sampling_check,
    step_costs,
)
from minillm.course.prompts import CHAT_PROMPTS, COPY_PROMPTS
from minillm.course.show.explore import Watched
from minillm.ladder.continuous import StepPlan
from minillm.ladder.speculative import NgramProposer, Speculator, verify_greedy

COSTS = [{"part": "step cost", "batch": 2, "k": k, "times_plain": 1 + 0.25 * k} for k in (0, 4, 8)]


def test_nothing_is_measured_on_a_prompt_that_the_drafter_was_trained_on():
    trained = {text.casefold() for text in training_prompts(24 * 78, seed=0)}
    assert len(trained) == 24 * 78 and not trained & {text.casefold() for text in (*CHAT_PROMPTS, *COPY_PROMPTS)}


@pytest.mark.parametrize("kind", ["copy", "chat"])
def test_the_reported_acceptance_is_that_of_the_emitted_tokens(kind, smollm2_dir):
    """Drafts are counted again against what the engine gave out: no draft is right because it knew the answer."""
    model, tokenizer = load_model(smollm2_dir), load_tokenizer(smollm2_dir)
    texts, notes = {"copy": COPY_PROMPTS, "chat": CHAT_PROMPTS}[kind][:2], []

    class Noting(NgramProposer):
        def propose(self, rows):
            proposed = super().propose(rows)
            notes.extend((list(row.request.tokens), list(row.drafts)) for row in rows if row.drafts)
            return proposed

    engine = Engine(model, speculator=Speculator(Noting(), 4), max_context=256)
    done = engine.generate([tokenizer.chat(text) for text in texts], SamplingParams(32))
    answers = [each.prompt_ids + each.token_ids for each in done]
    accepted = 0
    for before, drafts in notes:
        (coming,) = {tuple(text[len(before) :]) for text in answers if text[: len(before)] == before}
        said = [draft == token for draft, token in zip(drafts, coming, strict=False)]
        accepted += said.index(False) if False in said else len(said)
    drafted, counted = sum(len(drafts) for _, drafts in notes), metrics.summary(engine.records)["speculation"]
    assert counted["acceptance_rate"] == pytest.approx(accepted / drafted)
    rounds = sum(record.rounds for record in engine.records.requests)
    assert counted["tokens_per_round"] == pytest.approx((accepted + rounds) / rounds, abs=2 / rounds)  # ends may be cut


def test_a_row_of_the_table_is_that_of_its_run(smollm2_dir):
    bench = DraftBenchmark(load_model(smollm2_dir), load_tokenizer(smollm2_dir), few=2, tokens=13, turns=1, seed=0)
    row = bench.row("chat", "replay 1", 2, 2, COSTS)
    assert row["same_tokens"] and row["part"] == "replay" and row["acceptance"] == 1
    assert row["tokens_per_step"] == 3 and row["predicted"] == pytest.approx(3 / 1.5)
    assert row["speedup"] == row["tokens_per_s"] / row["plain_tokens_per_s"]
    assert row["itl_step_p50_ms"] > 2 * row["itl_token_p50_ms"]


def test_drafts_are_counted_by_their_place_in_the_round():
    """Of a round of four, the third wrong: three tried, two right; what stands behind it is not counted."""
    right = {(5,): [9] * 40}
    counted = Counted(ReplayProposer(right, lambda i: i % 4 != 2), 4)
    counted.proposer.prepare(tiny_model().config, 1, 16)
    request = SimpleNamespace(prompt_ids=[5], num_output=0)
    row = SimpleNamespace(request=request, samples=True, num_drafts=4, drafts=[], start=0, end=1)
    counted.proposer.propose([row])
    for _ in range(3):
        counted.observe(StepPlan(0, [row], end=0.1), [verify_greedy([9] * 5, row.drafts)])
    assert counted.tried == [3, 3, 3, 0] and counted.right == [3, 3, 0, 0]


def test_step_costs_time_every_draft_length_on_whole_batches():
    rows = list(step_costs(tiny_model(), (1, 3), (0, 2, 4), repeats=2))
    assert [(row["batch"], row["k"], row["step_tokens"]) for row in rows] == [
        (1, 0, 1), (1, 2, 3), (1, 4, 5), (3, 0, 3), (3, 2, 9), (3, 4, 15)]
    assert [row["times_plain"] for row in rows[::3]] == [1, 1]


def test_predictions_by_hand():
    assert predict(COSTS, 2, 4, 3) == 1.5  # three tokens for a step of twice the time
    assert predict(COSTS, 2, 2, 3) == 2.0
    assert expected_tokens(0.5, 3) == 1 + 0.5 + 0.25 + 0.125
    assert expected_tokens(1.0, 4) == 5


def test_the_crossover_is_the_first_batch_that_loses():
    rows = [{"prompts": "chat", "drafts": "n-gram", "k": 4, "batch": batch, "speedup": speedup, "predicted": 1.1}
            for batch, speedup in ((8, 0.9), (1, 1.4), (2, 1.05), (4, 0.99))]
    (found,) = crossovers(rows)
    assert (found["gains_up_to_batch"], found["costs_from_batch"]) == (2, 4)
    assert (found["predicted_gains_up_to_batch"], found["predicted_costs_from_batch"]) == (8, None)


def test_a_sampler_that_ignores_the_target_would_be_seen(monkeypatch):
    assert sampling_check(20_000, 0)["same_tokens"]
    monkeypatch.setattr("minillm.course.experiments.speculation.verify_sampled", lambda p, q, drafts, u, v: (
        (u >= 0).sum(1), drafts[:, 0]))
    assert not sampling_check(20_000, 0)["same_tokens"]


def test_the_lines_of_the_table_cover_lengths_and_batches_once():
    found = draftings((2, 7), (1, 8), (0.5,), drafter=True)
    assert len(found) == len(set(found)) and all(batch in (1, 8) for *_, batch in found)
    assert ("chat", "drafter", "adaptive", 8) in found and ("chat", "replay 0.5", 4, 8) in found


def test_a_dialled_proposer_is_right_as_often_as_dialled():
    answer = list(range(50)) * 40
    proposer = ReplayProposer({(1,): answer}, right_at_random(0.7, seed=3))
    right = [proposer.is_right(i) for i in range(2000)]
    assert math.isclose(sum(right) / 2000, 0.7, abs_tol=0.03)


def test_watching_a_proposer_does_not_hide_what_it_wants_to_see():
    assert not hasattr(Watched(NgramProposer()), "observe")
