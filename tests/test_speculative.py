"""Rung 6: drafts change how fast an answer comes, never what it says."""

import itertools
import random

import pytest
import torch
from tiny import tiny_model

from minillm import Engine, SamplingParams
from minillm.ladder.decode import decode_cached
from minillm.ladder.speculative import (
    DraftModelProposer,
    NgramIndex,
    NgramProposer,
    ReplayProposer,
    Speculator,
    StepCost,
    verify_greedy,
    verify_sampled,
)

TARGET, OTHER = tiny_model("t-wide"), tiny_model("t8-2", seed=3)
DRAW = random.Random(1)
PROMPTS = [[DRAW.randrange(97) for _ in range(n)] for n in (1, 3, 4, 5, 8, 11, 16, 17, 8)]
PROMPTS += [PROMPTS[6], PROMPTS[6] + [3], [1, 1, 1], [1, 2, 3, 1, 2, 3, 1, 2]]
PARAMS = [SamplingParams(max_tokens=DRAW.choice([1, 2, 5, 12, 40])) for _ in PROMPTS]
ANSWERS = {tuple(prompt): list(decode_cached(TARGET, prompt, 60)) for prompt in PROMPTS}
WANTED = [ANSWERS[tuple(prompt)][: params.max_tokens] for prompt, params in zip(PROMPTS, PARAMS, strict=True)]

PROPOSERS = {  # good drafters hide faults, and so do bad ones
    "ngram": NgramProposer,
    "draft model": lambda: DraftModelProposer(OTHER),
    "draft = target": lambda: DraftModelProposer(TARGET),
    "perfect": lambda: ReplayProposer(ANSWERS, lambda i: True),
    "always wrong": lambda: ReplayProposer(ANSWERS, lambda i: False),
    "alternating": lambda: ReplayProposer(ANSWERS, lambda i: i % 2 == 0),
}
SETTINGS = list(itertools.product(
    ("static", "continuous"), ("paged", "slots"), (True, False), (True, False), (15, 64), (1, 8), (20, 64), (1, 4, 8),
))

TIGHT = ("continuous", "paged", True, False, 15, 8, 64, 4)  # memory runs out here, whatever is drafted


def serve(proposer, k, prompts, params, **settings):
    """Outputs in the prompts' order and the engine, its invariants checked after each step."""
    blocks = settings.pop("blocks", 64)
    per_token = 2 * 2 * 2 * 12 * 4 + proposer.bytes_per_token
    kv_memory, speculator = blocks * 4 * per_token, Speculator(proposer, k)
    engine = Engine(TARGET, block_size=4, kv_memory=kv_memory, speculator=speculator, **settings)
    ids = [engine.add(prompt, p) for prompt, p in zip(prompts, params, strict=True)]
    outputs = {i: [] for i in ids}
    while engine.has_work:
        for event in engine.step():
            outputs[event.request_id] += event.token_ids
        engine.check_invariants()
    assert engine.stats().blocks_live == 0
    return [outputs[i] for i in ids], engine


@pytest.mark.parametrize("name", PROPOSERS)
def test_greedy_answers_are_those_of_plain_decoding(name):
    preempted = 0
    for batching, kv, chunked, prefix, blocks, rows, budget, k in [TIGHT, *random.Random(name).sample(SETTINGS, 11)]:
        outputs, engine = serve(
            PROPOSERS[name](), k, PROMPTS, PARAMS, batching=batching, kv=kv, chunked_prefill=chunked,
            prefix_cache=prefix, blocks=blocks, max_batch=rows, max_step_tokens=budget,
        )
        assert outputs == WANTED, (batching, kv, chunked, prefix, blocks, rows, budget, k)
        preempted += engine.records.totals["preempted"]
    assert preempted > 0


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("name", ["draft = target", "perfect"])
def test_a_perfect_drafter_is_accepted_wholly_in_every_round(name, k):
    """40 tokens, k + 1 of them in each full round: a draft cache that falls behind would show here."""
    _, engine = serve(PROPOSERS[name](), k, [PROMPTS[5]], [SamplingParams(max_tokens=40)], prefix_cache=False)
    (record,) = engine.records.requests
    assert record.drafted_tokens == record.accepted_tokens > 0
    full = [step.output_tokens for step in engine.records.steps if step.drafted_tokens == k]
    assert full == [k + 1] * len(full) and len(full) >= 39 // (k + 1)


@pytest.mark.parametrize("k", [1, 3])
def test_an_always_wrong_drafter_gives_one_token_a_round(k):
    _, engine = serve(PROPOSERS["always wrong"](), k, [PROMPTS[5]], [SamplingParams(max_tokens=20)])
    assert engine.records.totals["accepted_tokens"] == 0
    assert all(step.output_tokens == 1 for step in engine.records.steps)


@pytest.mark.parametrize("cap", range(1, 7))
def test_stops_and_caps_inside_an_accepted_run(cap):
    """SPD-1: the third token of the oracle is named a stop; the earliest end wins, and so does its reason."""
    answer = ANSWERS[tuple(PROMPTS[8])]
    stop = max(answer.index(token) for token in answer[:6])  # the last new token among the first six
    params = SamplingParams(max_tokens=cap, stop_ids=[answer[stop]])
    (outputs,), engine = serve(PROPOSERS["perfect"](), 5, [PROMPTS[8]], [params])
    assert outputs == answer[: min(cap, stop + 1)]
    assert engine.records.requests[0].finish_reason == ("stop" if stop + 1 <= cap else "length")


def test_verification_takes_drafts_up_to_the_first_the_target_would_not_have_said():
    assert verify_greedy([5, 6, 7], [5, 6]) == [5, 6, 7]
    assert verify_greedy([5, 9, 7], [5, 6]) == [5, 9]
    assert verify_greedy([4, 6, 7], [5, 6]) == [4]
    assert verify_greedy([4], []) == [4]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
def test_rejection_sampling_gives_the_targets_distribution(temperature):
    """200,000 draws on four tokens: chi-square of the first token, and of the pairs of first and second."""
    make, rows, k, vocabulary = torch.Generator().manual_seed(0), 200_000, 2, 4
    p = (torch.randn(k + 1, vocabulary, generator=make) / temperature).softmax(-1)
    p[:, 3] = 0  # filtered out
    p /= p.sum(-1, keepdim=True)
    q = (torch.randn(k, vocabulary, generator=make) / temperature).softmax(-1)
    drafts = torch.stack([torch.multinomial(row, rows, True, generator=make) for row in q], dim=1)
    u = torch.rand(rows, k, generator=make, dtype=torch.float64)
    u_next = torch.rand(rows, k + 1, generator=make, dtype=torch.float64)
    accepted, following = verify_sampled(p.expand(rows, -1, -1), q.expand(rows, -1, -1), drafts, u, u_next)
    first = torch.where(accepted > 0, drafts[:, 0], following)
    assert chi_square(first, p[0]) < 20  # 2 degrees of freedom: 20 is passed once in 20,000 times
    second = torch.where(accepted > 1, drafts[:, 1], following)[accepted >= 1]  # whoever got past the first place
    assert chi_square(second, p[1]) < 20
    assert not (first == 3).any() and not (second == 3).any()


def chi_square(tokens, p):
    expected = p * len(tokens)
    counts = torch.bincount(tokens, minlength=len(p))
    return float(((counts - expected)[p > 0] ** 2 / expected[p > 0]).sum())


def test_rejection_sampling_at_the_edges():
    """SPD-4: p = q leaves no residual; p and q without a common token, at u = 0; a one-hot target."""
    zero = torch.zeros(1, 1, dtype=torch.float64)
    same = torch.tensor([[[0.5, 0.5, 0.0]] * 2])
    accepted, following = verify_sampled(same, same[:, :1], torch.tensor([[0]]), zero + 0.999, torch.zeros(1, 2))
    assert accepted.item() == 1 and following.item() in (0, 1)
    p, q = torch.tensor([[[0.0, 1.0, 0.0]] * 2]), torch.tensor([[[1.0, 0.0, 0.0]]])
    accepted, following = verify_sampled(p, q, torch.tensor([[0]]), zero, torch.zeros(1, 2))
    assert (accepted.item(), following.item()) == (0, 1)


def test_a_sampled_answer_without_drafts_draws_as_plain_decoding_does():
    params = [SamplingParams(max_tokens=12, temperature=0.9, seed=7)]
    plain = Engine(TARGET).generate([PROMPTS[5]], params)[0].token_ids
    nothing = ReplayProposer({tuple(PROMPTS[5]): []}, lambda i: True)
    assert serve(nothing, 3, [PROMPTS[5]], params)[0] == [plain]


def test_prompt_lookup_finds_the_latest_earlier_occurrence():
    index = NgramIndex(range(3, 0, -1))
    text = [1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3]
    assert index.continuation(text, 2) == [5, 1]
    assert index.continuation([*text, 9], 2) == []
    assert index.continuation([*text, 9, 4], 3) == [1, 2, 3]


def test_step_cost_learns_a_straight_line():
    cost = StepCost()
    for tokens in (1, 8, 1, 8, 4):
        cost.add(tokens, 0.010 + 0.002 * tokens)
    assert cost.seconds(16) == pytest.approx(0.042, rel=1e-6)


def test_adaptive_drafting_stops_where_rows_cost_more_than_they_give():
    speculator = Speculator(ReplayProposer(ANSWERS, lambda i: False), 4, adaptive=True)
    speculator.cost.add(1, 0.01), speculator.cost.add(9, 0.09)  # a step is as long as its tokens are many
    speculator.acceptance = 0.1
    assert speculator.draft_length(8) == 0
    speculator.acceptance = 1.0
    speculator.cost = StepCost()
    speculator.cost.add(1, 0.01), speculator.cost.add(9, 0.0101)  # drafts are nearly free
    assert speculator.draft_length(8) == 4


def test_a_draft_model_serves_one_engine():
    proposer = DraftModelProposer(OTHER)
    Engine(TARGET, speculator=Speculator(proposer))
    with pytest.raises(ValueError, match="serves an engine already"):
        Engine(TARGET, speculator=Speculator(proposer))
