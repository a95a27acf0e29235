"""Rung 6: drafts change how fast an answer comes, never what it says."""

import itertools
import random
from collections import Counter
from copy import deepcopy
from statistics import median

import pytest
import torch
from fakes import NoProposer, fake_engine
from serving import make_engine
from serving import serve as serve_all
from test_drafter import random_drafter
from tiny import random_tensors, tiny_config, tiny_model

from minillm import Engine, SamplingParams, metrics
from minillm.course.experiments.speculation import ReplayProposer
from minillm.extras.adaptive import AdaptiveSpeculator, StepCost
from minillm.extras.draft_model import DraftModelProposer
from minillm.extras.drafter import DrafterProposer
from minillm.fast.attention import FastAttention
from minillm.ladder.attention import RowSpan
from minillm.ladder.continuous import Row, StepPlan
from minillm.ladder.decode import NoCache, decode_cached
from minillm.ladder.sampling import probabilities
from minillm.ladder.speculative import NgramIndex, NgramProposer, Speculator, verify_greedy, verify_sampled
from minillm.load.weights import make_model

TARGET, OTHER = tiny_model("t-wide"), tiny_model("t8-2", seed=3)
DRAW = random.Random(1)
PROMPTS = [[DRAW.randrange(97) for _ in range(n)] for n in (1, 3, 4, 5, 8, 11, 16, 17, 8)]
PROMPTS += [PROMPTS[6], PROMPTS[6] + [3], [1, 1, 1], [1, 2, 3, 1, 2, 3, 1, 2]]
PARAMS = [SamplingParams(max_tokens=DRAW.choice([1, 2, 5, 12, 28])) for _ in PROMPTS]
ANSWERS = {tuple(prompt): list(decode_cached(TARGET, prompt, 60)) for prompt in PROMPTS}
WANTED = [ANSWERS[tuple(prompt)][: params.max_tokens] for prompt, params in zip(PROMPTS, PARAMS, strict=True)]

PROPOSERS = {  # good drafters hide faults, and so do bad ones
    "ngram": NgramProposer,
    "draft model": lambda: DraftModelProposer(OTHER),
    "draft = target": lambda: DraftModelProposer(TARGET),
    "perfect": lambda: ReplayProposer(ANSWERS, lambda i: True),
    "always wrong": lambda: ReplayProposer(ANSWERS, lambda i: False),
    "alternating": lambda: ReplayProposer(ANSWERS, lambda i: i % 2 == 0),
    "drafter": lambda: DrafterProposer(random_drafter(TARGET, ids=range(97))),
}
CHOICES = {
    "proposer": list(PROPOSERS), "k": range(1, 9), "max_batch": range(1, 9), "kv": ("paged", "slots"),
    "batching": ("continuous", "static"), "chunked_prefill": (True, False), "prefix_cache": (True, False),
    "blocks": (15, 64), "max_step_tokens": (20, 64),
}
TIGHT = {"max_batch": 8, "kv": "paged", "batching": "continuous", "blocks": 15, "max_step_tokens": 64}  # it preempts


def mixtures(choices: dict, at_random: int) -> list[dict]:
    """Settings in which every pair of choices meets at least once (greedily, so not the fewest), and some more."""
    draw, names = random.Random(0), list(choices)
    left = {(a, x, b, y) for a, b in itertools.combinations(names, 2) for x in choices[a] for y in choices[b]}
    found = []
    while left:
        tries = [{name: draw.choice(choices[name]) for name in names} for _ in range(40)]
        a, x, b, y = min(left, key=str)
        pairs = [{(c, own[c], d, own[d]) for c, d in itertools.combinations(names, 2)}
                 for own in (one | {a: x, b: y} for one in tries)]
        best = max(range(40), key=lambda i: len(left & pairs[i]))
        found.append(tries[best] | {a: x, b: y})
        left -= pairs[best]
    return found + [{name: draw.choice(choices[name]) for name in names} for _ in range(at_random)]


MIXTURES = mixtures(CHOICES, at_random=8)


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


@pytest.mark.parametrize("part", range(8))
def test_greedy_answers_are_those_of_plain_decoding(part):
    """Every proposer, draft length, batch and policy, each pair of them together in some mixture."""
    preempted = 0
    tight = MIXTURES[0] | TIGHT | {"proposer": list(PROPOSERS)[part % len(PROPOSERS)], "k": part + 1}
    for mixture in (tight, *MIXTURES[part::8]):
        settings = dict(mixture)
        proposer, k = PROPOSERS[settings.pop("proposer")](), settings.pop("k")
        outputs, engine = serve(proposer, k, PROMPTS, PARAMS, **settings)
        assert outputs == WANTED, mixture
        preempted += engine.records.totals["preempted"]
    assert preempted > 0


@pytest.mark.parametrize("k", [1, 4])
def test_among_equals_verification_takes_the_lowest_id_as_decoding_does(k):
    """SPD-6: every id has a twin with the same embedding, 48 above it, so each choice is a tie."""
    config = tiny_config("t8-2", vocab_size=96)
    tensors = random_tensors(config)
    tensors["model.embed_tokens.weight"][48:] = tensors["model.embed_tokens.weight"][:48]
    model, prompts = make_model(config, tensors), [[n, n + 1, n] for n in range(6)]
    plain = [list(decode_cached(model, prompt, 24)) for prompt in prompts]
    assert all(token < 48 for answer in plain for token in answer)
    for proposer in (NgramProposer(), DraftModelProposer(model)):
        engine = Engine(model, block_size=4, speculator=Speculator(proposer, k), max_context=64)
        assert [done.token_ids for done in engine.generate(prompts, SamplingParams(24))] == plain
        assert engine.records.totals["accepted_tokens"] > 0


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


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_an_alternating_drafter_is_right_every_other_time(k):
    """Token i is drafted rightly where i is even: a round that begins there accepts one draft, another none."""
    _, engine = serve(PROPOSERS["alternating"](), k, [PROMPTS[5]], [SamplingParams(max_tokens=40)])
    place, drafted, accepted, given = 1, 0, 0, [1]  # the prompt's step gives one token
    while place < 40:
        k_here = min(k, 40 - place - 1)
        right = int(k_here > 0 and place % 2 == 0)
        drafted, accepted, place = drafted + k_here, accepted + right, place + right + 1
        given.append(right + 1)
    (record,) = engine.records.requests
    assert (record.drafted_tokens, record.accepted_tokens) == (drafted, accepted)
    assert [step.output_tokens for step in engine.records.steps] == given
    found = metrics.summary(engine.records)["speculation"]
    assert found["acceptance_rate"] == accepted / drafted
    assert found["tokens_per_round"] == (accepted + record.rounds) / record.rounds


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


def chance(counts: torch.Tensor, p: torch.Tensor) -> float:
    """How likely draws from p are to fit it worse than these counts do: Pearson's chi-square, rare cells as one."""
    counts, expected = counts.double(), p.double() * counts.sum()
    assert not counts[expected == 0].any(), "a token that the target excludes was drawn"
    rare = expected < 5
    cells = [(counts[~rare], expected[~rare])]
    if expected[rare].sum() > 0:
        cells.append((counts[rare].sum()[None], expected[rare].sum()[None]))
    counts, expected = (torch.cat(parts) for parts in zip(*cells, strict=True))
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2).double(), statistic / 2))


FILTERS = [dict(temperature=0.5), dict(temperature=1.0, top_k=5), dict(temperature=1.5, top_p=0.8),
           dict(temperature=1.5, top_k=6, top_p=0.9)]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_rejection_sampling_gives_the_targets_distribution(filters):
    """200,000 draws on eight ids: the first token, and the pairs of the first and the second."""
    make, rows, params = torch.Generator().manual_seed(0), 200_000, SamplingParams(**filters)
    p = probabilities(torch.randn(3, 8, generator=make), [params] * 3)  # [k + 1, V]
    q = probabilities(torch.randn(2, 8, generator=make), [params] * 2)  # [k, V]
    drafts = torch.stack([torch.multinomial(row, rows, True, generator=make) for row in q], dim=1)
    u = torch.rand(rows, 2, generator=make, dtype=torch.float64)
    u_next = torch.rand(rows, 3, generator=make, dtype=torch.float64)
    accepted, following = verify_sampled(p.expand(rows, -1, -1), q.expand(rows, -1, -1), drafts, u, u_next)
    first = torch.where(accepted > 0, drafts[:, 0], following)
    assert chance(first.bincount(minlength=8), p[0]) > 1e-4
    assert 0.05 < (accepted > 0).float().mean() < 0.95
    second = torch.where(accepted > 1, drafts[:, 1], following)
    pairs = (first * 8 + second)[accepted > 0]  # whoever got past the first place
    got_past = torch.minimum(p[0], q[0])
    assert chance(pairs.bincount(minlength=64), torch.outer(got_past / got_past.sum(), p[1]).flatten()) > 1e-4


SMALL, SMALL_DRAFT = (tiny_model("t8-2", seed=seed, vocab_size=8) for seed in (1, 2))


@pytest.mark.parametrize("filters", FILTERS[:3], ids=str)
def test_an_engine_that_speculates_samples_from_the_target(filters):
    """5,000 answers of three tokens on eight ids: the second is drafted, the third drafted or drawn behind it."""
    params = SamplingParams(max_tokens=4, **filters)
    speculator = Speculator(DraftModelProposer(SMALL_DRAFT), 2)
    engine = Engine(SMALL, max_batch=250, max_step_tokens=2000, speculator=speculator)
    answers = torch.tensor([done.token_ids for done in engine.generate([[1, 2, 3]] * 5000, params)])
    assert 0.05 < metrics.summary(engine.records)["speculation"]["acceptance_rate"] < 0.95

    def target(*texts):
        rows = [SMALL.forward(torch.tensor(text), torch.arange(len(text)), NoCache())[-1] for text in texts]
        return probabilities(torch.stack(rows), [params] * len(rows))

    first, ids = target([1, 2, 3])[0], range(8)
    second = target(*[[1, 2, 3, a] for a in ids])  # [V, V]
    third = target(*[[1, 2, 3, a, b] for a in ids for b in ids]).view(8, 8, 8)
    pairs = first[:, None] * second  # of the first and the second token
    later = torch.einsum("ab,abc->bc", pairs, third)  # of the second and the third
    assert chance(answers[:, 1].bincount(minlength=8), pairs.sum(0)) > 1e-4
    assert chance(answers[:, 2].bincount(minlength=8), later.sum(0)) > 1e-4
    assert chance((answers[:, 0] * 8 + answers[:, 1]).bincount(minlength=64), pairs.flatten()) > 1e-4
    assert chance((answers[:, 1] * 8 + answers[:, 2]).bincount(minlength=64), later.flatten()) > 1e-4


# -- rollback -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_format", ["fp32", "int8", "fp8", "int4"])
def test_after_a_rollback_the_next_logits_come_from_the_same_stored_bytes(kv_format, monkeypatch):
    """SPD-7: before each step, the logits behind every newest token are computed without drafts, from a copy."""
    model = tiny_model("t8-2", head_dim=32, hidden_size=64, seed=4)
    prompts = PROMPTS[3:9]
    plain = make_engine(model, kv_format=kv_format)
    answers = {tuple(done.prompt_ids): done.token_ids for done in plain.generate(prompts, SamplingParams(30))}
    proposer = ReplayProposer(answers, lambda i: i % 3 > 0)  # accepts 0, 1 or 2 of 4
    engine = make_engine(model, kv_format=kv_format, max_batch=4, speculator=Speculator(proposer, 4))
    executor, seen = engine.executor, []
    forward, run = model.forward, executor.run

    def noted(tokens, positions, cache, logit_rows):
        seen.append(forward(tokens, positions, cache, logit_rows))
        return seen[-1]

    def checked(plan):
        before = deepcopy(executor.storage)
        spans = [RowSpan(row.start, len(row.tokens), row.request.block_table, not row.idle) for row in plan.rows]
        cache = FastAttention(before, spans, 4, executor.scratch_slot)
        fed = torch.tensor([token for row in plan.rows for token in row.tokens])
        want = forward(fed, cache.positions, cache, cache.first + cache.count - 1)
        outputs = run(plan)
        lengths = torch.tensor([1 + len(row.drafts) for row in plan.rows if row.samples])
        due = torch.tensor([row.samples for row in plan.rows])
        torch.testing.assert_close(seen[-1][lengths.cumsum(0) - lengths], want[due], atol=2e-4, rtol=1e-3)
        return outputs

    monkeypatch.setattr(model, "forward", noted)
    monkeypatch.setattr(executor, "run", checked)
    with torch.inference_mode():
        serve_all(engine, prompts, SamplingParams(30))
    totals = engine.records.totals
    assert 0 < totals["accepted_tokens"] < totals["drafted_tokens"]


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


def test_step_cost_is_the_median_of_what_was_seen_and_a_line_elsewhere():
    cost = StepCost()
    for k in (0, *[2] * 9, 0):
        cost.add(k, 0.010 + 0.002 * k)
    for seconds in (0.5, 0.001):  # one step that something else held up, and one that had nothing to do
        cost.add(2, seconds)
    assert cost.seconds(2) == pytest.approx(0.014) and cost.seconds(7) == pytest.approx(0.024)
    for _ in range(StepCost.RECENT):
        cost.add(2, 0.030)  # what is old counts no more
    assert cost.seconds(2) == pytest.approx(0.030)
    falling = StepCost()
    for k in (0, 2):
        falling.add(k, 0.020 - 0.005 * k)
    assert falling.seconds(9) == pytest.approx(0.020), "a line that falls would promise steps in no time"


def step(rows: list[Row], seconds: float) -> StepPlan:
    """A step of these rows that took so long."""
    return StepPlan(budget=0, rows=rows, end=seconds)


def lengths_chosen(accepts: float, draft_costs: float, batch: int = 8, steps: int = 400) -> list[int]:
    """The adaptive k of each step, where drafts are right with a chance and each makes the step so much longer."""
    draw, speculator = random.Random(1), AdaptiveSpeculator(NgramProposer(), 6)
    chosen = []
    for _ in range(steps):
        k = speculator.draft_length(batch)
        rows = [Row(request=None, start=9, end=10, samples=True, num_drafts=k) for _ in range(batch)]
        right = [next((i for i in range(k) if draw.random() >= accepts), k) for _ in rows]
        speculator.observe(step(rows, 1.0 + draft_costs * k), [[1] * (count + 1) for count in right])
        chosen.append(k)
    return chosen


@pytest.mark.parametrize(
    ("accepts", "draft_costs", "best"),
    [(0.0, 0.05, 0), (0.9, 0.0, 6), (0.3, 0.4, 0), (0.5, 0.3, 1), (0.8, 0.15, 5), (0.05, 1.0, 0)],
)
def test_the_adaptive_length_finds_the_best_one_and_costs_little_on_the_way(accepts, draft_costs, best):
    def tokens_per_second(k):
        return sum(accepts**i for i in range(k + 1)) / (1 + draft_costs * k)

    chosen = lengths_chosen(accepts, draft_costs)[50:]
    assert tokens_per_second(best) == max(map(tokens_per_second, range(7)))
    seconds = sum(1 + draft_costs * k for k in chosen)
    tokens = sum(tokens_per_second(k) * (1 + draft_costs * k) for k in chosen)
    assert tokens / seconds > 0.95 * tokens_per_second(best)


def test_the_adaptive_length_notices_that_text_and_load_have_changed():
    speculator, chosen = AdaptiveSpeculator(NgramProposer(), 4), []
    for number in range(1200):
        k = speculator.draft_length(4)
        right = k if 400 <= number < 800 else 0  # nothing, then everything, then nothing is guessed
        rows = [Row(request=None, start=9, end=10, samples=True, num_drafts=k) for _ in range(4)]
        speculator.observe(step(rows, 1.0 + 0.1 * k), [[1] * (right + 1)] * 4)
        chosen.append(k)
    assert [median(chosen[end - 100 : end]) for end in (400, 800, 1200)] == [0, 4, 0]


def test_steps_that_read_prompts_teach_nothing_of_what_drafts_cost():
    speculator = AdaptiveSpeculator(NgramProposer(), 4)
    decoding, reading = Row(None, 9, 10, True, num_drafts=1), Row(None, 0, 7, False)
    speculator.observe(step([decoding, reading], 5.0), [[1]])
    assert not speculator.costs and speculator.acceptance[0] < 0.5


def test_a_step_costs_what_its_most_drafts_cost_and_counts_for_the_rows_that_decode():
    speculator = AdaptiveSpeculator(NgramProposer(), 4)
    rows = [Row(None, 9, 10, True, num_drafts=k) for k in (1, 3, 2)] + [Row(None, 9, 10, False, idle=True)]
    speculator.observe(step(rows, 5.0), [[1]] * 3)
    assert {size: list(cost.recent) for size, cost in speculator.costs.items()} == {2: [3]}


def test_the_first_round_which_reads_prompts_does_not_speak_against_drafts():
    speculator = AdaptiveSpeculator(NgramProposer(), 4)
    for seconds in (10.0, 1.0, 1.1, 1.0):
        rows = [Row(None, 9, 10, True, num_drafts=speculator.draft_length(1))]
        speculator.observe(step(rows, seconds), [[1]])
    cost = speculator.costs[1]
    assert (cost.seconds(0), cost.seconds(1)) == (1.0, 1.1)


def test_the_lengths_beside_the_best_one_and_none_are_tried_now_and_then():
    speculator = AdaptiveSpeculator(NgramProposer(), 6)
    speculator.acceptance = [1.0, 1.0, 1.0, 0.0, 0.0, 0.0]
    for _ in range(4):
        speculator.observe(step([Row(None, 9, 10, True)], 1.0), [[1]])
    assert Counter(speculator.draft_length(1) for _ in range(60)) == {3: 57, 4: 1, 2: 1, 0: 1}


def test_an_engine_asks_for_the_rows_that_decode_and_tells_what_the_step_took():
    """The second prompt takes two steps, in which only the first request decodes."""
    speculator, asked = AdaptiveSpeculator(NoProposer(), 2), []
    engine = fake_engine(seconds=0.25, say=lambda request: [7], speculator=speculator, max_step_tokens=8)
    draft_length = speculator.draft_length
    speculator.draft_length = lambda batch: asked.append(batch) or draft_length(batch)
    engine.add([1, 2], SamplingParams(5))
    engine.step()
    engine.add([3] * 12, SamplingParams(3))
    while engine.has_work:
        engine.step()
    assert asked == [1, 1, 2, 2]
    assert {s for cost in speculator.costs.values() for times in cost.recent.values() for s in times} == {0.25}


def test_a_draft_model_serves_one_engine():
    proposer = DraftModelProposer(OTHER)
    Engine(TARGET, speculator=Speculator(proposer))
    with pytest.raises(ValueError, match="serves an engine already"):
        Engine(TARGET, speculator=Speculator(proposer))
