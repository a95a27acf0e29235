"""From logits to tokens: the right distribution, and the same draws in any company."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import make_engine, run_to_end
from tiny import tiny_model

from minillm.guard.inputs import HOTTEST, RequestError
from minillm.ladder import sampling
from minillm.ladder.request import GREEDY_BELOW, NO_TOKEN, SamplingParams
from minillm.ladder.sampling import ACCEPT, DRAFT, SAMPLE, draw, hash_numbers, probabilities, sample, uniforms

BANNED = -math.inf


def uniform(seed: int, index: int, purpose: int = SAMPLE) -> float:
    return uniforms([seed], [index], purpose).item()


def sampled(**params) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, **params})


# -- temperature ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_of_any_temperature_side_by_side(dtype):
    """The last id is banned in each row, and id 2 leads by 10: all but the last row must take it."""
    temperatures = [0.0, 1e-40, 1e-5, 3e-4, 1.0]
    logits = torch.tensor([[0.0, 1.0, 11.0, 1.0, BANNED]] * 5, dtype=dtype)
    params = [SamplingParams(temperature=t) for t in temperatures]
    p = probabilities(logits, params)
    assert p.dtype == torch.float32 and p.isfinite().all()
    torch.testing.assert_close(p[:4], torch.tensor([0.0, 0, 1, 0, 0]).expand(4, 5))
    torch.testing.assert_close(p[4], logits[4].float().softmax(-1))
    assert (p[:, 4] == 0).all()
    assert sample(logits, params, [0] * 5, [0] * 5)[:4].tolist() == [2] * 4


def test_a_row_has_the_same_probabilities_alone_and_beside_others():
    logits = torch.randn(5, 50, generator=torch.Generator().manual_seed(0))
    params = [sampled(), SamplingParams(), sampled(temperature=1e-5), sampled(top_k=3), sampled(top_p=0.5)]
    together = probabilities(logits, params)
    for row in range(5):
        assert torch.equal(together[row], probabilities(logits[row : row + 1], params[row : row + 1])[0])


@pytest.mark.parametrize(
    "unusable", [[math.nan] * 4, [0.0, math.nan, 1.0, 2.0], [BANNED] * 4, [0.0, 1.0, math.inf, 2.0]]
)
@pytest.mark.parametrize("params", [SamplingParams(), sampled(), sampled(top_k=2, top_p=0.5)])
def test_logits_that_are_not_finite_give_no_token_and_change_no_other_row(unusable, params):
    healthy = [[0.0, 3.0, BANNED, 1.0], [5.0, 4.0, 3.0, 2.0]]
    ids = sample(torch.tensor([healthy[0], unusable, healthy[1]]), [params] * 3, [1, 2, 3], [4, 5, 6]).tolist()
    alone = [sample(torch.tensor([row]), [params], [seed], [index]).item()
             for row, seed, index in zip(healthy, (1, 3), (4, 6), strict=True)]
    assert ids == [alone[0], NO_TOKEN, alone[1]]


def test_no_logit_is_too_large_for_a_low_temperature():
    logits = torch.tensor([[3e38, 1e38, -3e38, BANNED]])
    assert probabilities(logits, [sampled(temperature=1e-5)]).tolist() == [[1, 0, 0, 0]]


def test_the_highest_temperature_makes_all_alike_but_what_is_banned():
    p = probabilities(torch.tensor([[30.0, -30.0, 0.0, BANNED]]), [sampled(temperature=HOTTEST)])
    torch.testing.assert_close(p, torch.tensor([[1 / 3, 1 / 3, 1 / 3, 0.0]]))
    with pytest.raises(RequestError, match="temperature 1e\\+31"):  # -inf over infinity would be NaN
        sampled(temperature=1e31)


@pytest.mark.parametrize(("temperature", "is_greedy"), [(0, True), (GREEDY_BELOW / 2, True), (GREEDY_BELOW, False)])
def test_what_counts_as_greedy(temperature, is_greedy):
    assert SamplingParams(temperature=temperature).greedy == is_greedy


@pytest.mark.parametrize("temperature", [0.25, 1.0, 4.0])
def test_temperature_divides_the_logits(temperature):
    logits = torch.tensor([[0.0, 1.0, 3.0]])
    p = probabilities(logits, [sampled(temperature=temperature)])
    torch.testing.assert_close(p, torch.tensor([[0.0, 1 / temperature, 3 / temperature]]).softmax(-1))


def test_logits_are_not_changed():
    logits = torch.randn(3, 20)
    before = logits.clone()
    sample(logits, [SamplingParams(), sampled(top_k=2), sampled(top_p=0.3)], [1, 2, 3], [0, 0, 0])
    assert torch.equal(logits, before)


# -- ties -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_among_equals_greedy_takes_the_lowest_id(dtype):
    logits = torch.tensor([[1.0, 5, 5, 5], [7, 0, 0, 7], [2, 2, 2, 2]], dtype=dtype)
    assert sample(logits, [SamplingParams()] * 3, [0] * 3, [0] * 3).tolist() == [1, 0, 0]
    assert probabilities(logits, [SamplingParams()] * 3).argmax(-1).tolist() == [1, 0, 0]


def test_among_equals_the_nucleus_takes_the_lowest_ids():
    logits = torch.zeros(1, 40)  # long enough for a sort that is not stable to show it
    kept = probabilities(logits, [sampled(top_p=0.2)])[0].nonzero()[:, 0]
    assert kept.tolist() == list(range(8))


def test_top_k_keeps_all_that_tie_with_the_last_kept():
    p = probabilities(torch.tensor([[3.0, 1, 2, 2, 2]]), [sampled(top_k=2)])[0]
    assert (p > 0).tolist() == [True, False, True, True, True]


# -- top-k and top-p, against a reference that shares no code --------------------------------------


def reference(logits: list[float], temperature: float, top_k: int | None, top_p: float | None) -> list[float]:
    """Sort, cut, and cut again, in plain Python."""
    ranked = sorted(range(len(logits)), key=lambda i: -logits[i])
    weights = {i: math.exp((logits[i] - logits[ranked[0]]) / temperature) for i in ranked}
    kept = ranked[:top_k]
    if top_p is not None:
        total, so_far, nucleus = sum(weights[i] for i in kept), 0.0, []
        for i in kept:
            nucleus.append(i)
            so_far += weights[i] / total
            if so_far >= top_p:
                break
        kept = nucleus
    total = sum(weights[i] for i in kept)
    return [weights[i] / total if i in kept else 0.0 for i in range(len(logits))]


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    order=st.permutations(range(12)), gap=st.sampled_from([0.05, 0.3, 1.0]),
    temperature=st.sampled_from([0.5, 1.0, 2.5]), top_k=st.none() | st.integers(1, 20),
    top_p=st.none() | st.sampled_from([0.0003, 0.1234, 0.4321, 0.8765, 0.9876, 1.0]),
)
def test_top_k_then_top_p_as_in_the_reference(order, gap, temperature, top_k, top_p):
    logits = [gap * (rank + 0.37 * math.sin(rank)) for rank in order]  # no two equal, no cut on a rounding error
    p = probabilities(torch.tensor([logits]), [sampled(temperature=temperature, top_k=top_k, top_p=top_p)])[0]
    expected = reference(logits, temperature, top_k, top_p)
    torch.testing.assert_close(p, torch.tensor(expected), atol=1e-5, rtol=1e-4)
    assert (p > 0).tolist() == [value > 0 for value in expected]


NARROW = (dict(top_k=1), dict(top_p=1e-6), dict(top_p=1e-60), dict(top_k=1, top_p=0.5))  # in fp32 1e-60 is 0


@pytest.mark.parametrize("params", NARROW, ids=str)
def test_the_narrowest_choice_is_the_likeliest_token(params):
    logits = torch.randn(1, 30, generator=torch.Generator().manual_seed(1))
    p = probabilities(logits, [sampled(**params)])
    assert p[0, logits.argmax()] == 1 and p.sum() == 1


@pytest.mark.parametrize(
    ("p", "top_p", "kept"),
    [([0.5, 0.3, 0.1, 0.1], 0.8, 2), ([0.5, 0.3, 0.1, 0.1], 0.81, 3), ([0.7, 0.1, 0.1, 0.1], 0.8, 2),
     ([0.4, 0.3, 0.2, 0.1], 0.9, 3), ([0.4, 0.3, 0.2, 0.1], 0.3999, 1)],
)
def test_top_p_that_the_likeliest_tokens_just_reach_keeps_no_further_one(p, top_p, kept):
    assert (probabilities(torch.tensor([p]).log(), [sampled(top_p=top_p)]) > 0).sum() == kept


@pytest.mark.parametrize("n", [3, 7, 10, 97, 1000, 49_152, 151_936])
def test_k_nths_of_n_equal_logits_keep_k(n):
    places = sorted({1, 2, n // 3, n // 2, n - 2, n - 1} - {0})
    logits = torch.zeros(len(places), n)
    p = probabilities(logits, [sampled(top_p=k / n) for k in places])
    assert (p > 0).sum(-1).tolist() == places


def test_top_p_counts_after_top_k():
    """The first of four has a share of 0.4; of the first two alone, 0.571."""
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    assert (probabilities(logits, [sampled(top_p=0.57)]) > 0).sum() == 2
    assert (probabilities(logits, [sampled(top_p=0.57, top_k=2)]) > 0).sum() == 1


# -- draws ----------------------------------------------------------------------------------------

P_HOLES = torch.tensor([[0.0, 0.25, 0.0, 0.5, 0.25, 0.0]])
HIGHEST_U = 1 - 2**-32


@pytest.mark.parametrize(
    ("u", "id"),
    [(0.0, 1), (0.2499, 1), (0.25, 3), (0.7499, 3), (0.75, 4), (HIGHEST_U, 4)],
)
def test_draw_inverts_the_cumulative_sum_and_never_takes_what_has_no_probability(u, id):
    assert draw(P_HOLES, torch.tensor([u], dtype=torch.float64)).tolist() == [id]


def test_draw_at_both_ends_of_unrounded_probabilities():
    """fp32 probabilities do not add up to 1 exactly: the highest draw must still end inside."""
    make = torch.Generator().manual_seed(0)
    p = torch.rand(200, 500, generator=make).masked_fill(torch.rand(200, 500, generator=make) < 0.5, 0).softmax(-1)
    p = p.masked_fill(torch.rand(200, 500, generator=make) < 0.5, 0.0)
    for u in (0.0, HIGHEST_U):
        ids = draw(p, torch.full((200,), u, dtype=torch.float64))
        assert (p[torch.arange(200), ids] > 0).all()


def test_a_rare_token_behind_a_likely_one_can_be_drawn():
    """In fp32, 0.5 + 2e-9 is 0.5, and the token would not exist."""
    p = torch.tensor([[0.5, 2e-9, 0.5]])
    assert draw(p, torch.tensor([0.5 + 2**-31], dtype=torch.float64)).tolist() == [1]


def test_the_highest_hash_does_not_round_to_1(monkeypatch):
    monkeypatch.setattr(sampling, "hash_numbers", lambda *numbers: np.array([2**64 - 1], np.uint64))
    assert uniform(0, 0) == HIGHEST_U < 1.0
    assert torch.tensor([uniform(0, 0)], dtype=torch.float64).item() < 1.0


def chi_square(counts: list[int], p: list[float]) -> float:
    n = sum(counts)
    assert all(count == 0 for count, share in zip(counts, p, strict=True) if share == 0)
    return sum((count - n * share) ** 2 / (n * share) for count, share in zip(counts, p, strict=True) if share > 0)


# Values that chi-square exceeds once in 1,000 times, by degrees of freedom (any table of the distribution)
ONCE_IN_1000 = {5: 20.52, 15: 37.70, 255: 330.5}


@pytest.mark.parametrize("along", ["one request", "many requests", "many seeds of a user"])
def test_draws_follow_the_probabilities(along):
    """Along one text, and over the first tokens of many: both must look independent."""
    n = 20_000
    seeds = {"one request": [7] * n, "many requests": hash_numbers(0, range(n)).tolist()}.get(along, range(n))
    indices = range(n) if along == "one request" else [0] * n
    logits = torch.tensor([[0.3, 2.0, BANNED, 1.0, 0.0, 1.5, -1.0]])
    params = [sampled(temperature=0.8)] * n
    ids = sample(logits.expand(n, -1), params, list(seeds), list(indices))
    p = probabilities(logits, params[:1])[0].tolist()
    assert chi_square(ids.bincount(minlength=7).tolist(), p) < ONCE_IN_1000[5]


@pytest.mark.parametrize("step", ["seed", "index", "purpose"])
def test_neighbouring_draws_are_independent(step):
    """Pairs of neighbours fill a 16 x 16 square evenly."""
    draws = [int(16 * uniform(**{"seed": 3, "index": 5, "purpose": 0, step: i})) for i in range(20_000)]
    cells = torch.tensor(draws[:-1]) * 16 + torch.tensor(draws[1:])
    assert chi_square(cells.bincount(minlength=256).tolist(), [1 / 256] * 256) < ONCE_IN_1000[255]


def test_seed_index_and_purpose_cannot_stand_in_for_each_other():
    assert len({uniform(*numbers) for numbers in itertools.permutations((1, 2, 3))}) == 6
    assert len({hash_numbers(*numbers).item() for numbers in [(), (0,), (0, 0), (0, 0, 0)]}) == 4


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63, 2**64 - 1, -(2**70)])
def test_any_whole_number_is_a_seed(seed):
    assert 0 <= uniform(seed, 0) < 1


# -- the same draws in any company ----------------------------------------------------------------

PROMPT, LENGTH = [5, 6, 7, 8], 12
SEEDED = SamplingParams(LENGTH, temperature=0.8, seed=42)
UNSEEDED = SamplingParams(LENGTH, temperature=0.8)


def texts(requests: dict, **settings):
    """Serve these (prompt, params) by name; their outputs, and the engine for a look at its records."""
    engine = make_engine(tiny_model(), **settings)
    for name, (prompt, params) in requests.items():
        engine.add(prompt, params, name)
    return run_to_end(engine), engine


@pytest.fixture(scope="module")
def alone() -> list[int]:
    found, _ = texts({"seeded": (PROMPT, SEEDED)})
    return found["seeded"]


OTHER = ([50, 51, 52, 53], UNSEEDED)
COMPANY = {
    "alone again": {"seeded": (PROMPT, SEEDED)},
    "before an unseeded row": {"seeded": (PROMPT, SEEDED), "other": OTHER},
    "behind an unseeded row": {"other": OTHER, "seeded": (PROMPT, SEEDED)},
    "behind a greedy row": {"other": ([50, 51], SamplingParams(LENGTH)), "seeded": (PROMPT, SEEDED)},
    "among many": {**{n: ([n, n + 1], UNSEEDED) for n in range(6)}, "seeded": (PROMPT, SEEDED), "last": OTHER},
}


@pytest.mark.parametrize("company", COMPANY)
@pytest.mark.parametrize("batching", ["continuous", "static"])
def test_a_seeded_request_says_the_same_in_any_company(company, batching, alone):
    found, _ = texts(COMPANY[company], batching=batching)
    assert found["seeded"] == alone
    if "other" in found:
        assert found["other"] != alone


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_seeded_request_says_the_same_after_a_preemption(prefix_cache, alone):
    found, engine = texts({"other": OTHER, "seeded": (PROMPT, SEEDED)}, blocks=5, prefix_cache=prefix_cache)
    assert [record.preemptions for record in engine.records.requests] == [0, 1]
    assert found["seeded"] == alone


def test_a_seeded_request_says_the_same_in_chunks_and_after_a_failed_step(alone):
    found, _ = texts({"seeded": (PROMPT, SEEDED), "other": OTHER}, max_step_tokens=3)
    assert found["seeded"] == alone


def test_one_seed_twice_in_a_batch_says_the_same_twice(alone):
    found, _ = texts({"a": (PROMPT, SEEDED), "b": (PROMPT, SEEDED)})
    assert found["a"] == found["b"] == alone


def test_without_a_seed_requests_differ_and_an_engine_of_the_same_seed_repeats_them():
    requests = {name: (PROMPT, UNSEEDED) for name in "abcd"}
    first, again, other = (texts(requests, seed=seed)[0] for seed in (1, 1, 2))
    assert len({tuple(tokens) for tokens in first.values()}) == 4
    assert first == again
    assert first != other


def test_torchs_own_random_state_is_neither_used_nor_moved(alone):
    torch.manual_seed(123)
    before = torch.get_rng_state()
    found, _ = texts({"seeded": (PROMPT, SEEDED), "other": OTHER})
    assert torch.equal(torch.get_rng_state(), before)
    assert found["seeded"] == alone


def test_uniform_numbers_of_many_requests_are_those_of_each():
    seeds = [0, 1, -1, 2**63, 2**64 - 1, 2**64 + 5, 123456789, *range(50)]
    indices = [index * 7 for index in range(len(seeds))]
    for purpose in (SAMPLE, ACCEPT, DRAFT):
        wanted = [uniform(seed, index, purpose) for seed, index in zip(seeds, indices, strict=True)]
        assert uniforms(seeds, indices, purpose).tolist() == wanted
