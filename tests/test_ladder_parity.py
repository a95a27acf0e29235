"""Every rung says, token for token, what transformers' own `generate` says.

Greedy, in fp32, on small models of odd shapes, whose texts wander over the vocabulary; and
once per rung on SmolLM2. "The same" is defined in parity.py.
"""

from __future__ import annotations

import itertools
from functools import cache

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from parity import (
    MARGIN,
    Reference,
    assert_same_tokens,
    first_divergence,
    greedy_reference,
    random_ids,
    smollm2_twins,
    twins,
)
from serving import ManualClock, Watch, check_positions, make_engine, run_to_end, serve

from minillm.ladder.decode import decode_cached, decode_recomputing
from minillm.ladder.request import SamplingParams
from minillm.ladder.sampling import sample
from minillm.load.weights import make_model

KV_FORMATS = ("fp32",)  # those that must give the very same tokens
BLOCK = 4
LONGEST_OUTPUT = 12


@cache
def reference(shape: str, prompt: tuple[int, ...]) -> Reference:
    return greedy_reference(twins(shape).theirs, prompt, LONGEST_OUTPUT)


def first_tokens(whole: Reference, n: int) -> Reference:
    return Reference(whole.tokens[:n], whole.margins[:n])


def assert_parity(shape: str, prompts, max_tokens, texts) -> None:
    for prompt, n, text in zip(prompts, max_tokens, texts, strict=True):
        assert_same_tokens(text, first_tokens(reference(shape, tuple(prompt)), n))


# -- the yardstick ------------------------------------------------------------------------------


def test_the_yardstick_tolerates_near_ties_only_and_reports_them():
    decided = Reference([3, 1, 4], [0.5, 0.5, 0.5])
    close = Reference([3, 1, 4], [0.5, 1e-5, 0.5])
    assert first_divergence([3, 1, 4], decided) is None
    assert first_divergence([3, 9, 4], decided) == (1, 0.5)
    with pytest.raises(AssertionError, match=r"token 1.* margin is 0\.5, above the tolerance 0\.001"):
        assert_same_tokens([3, 9, 4], decided)
    with pytest.warns(UserWarning, match=r"token 1.* margin is 1e-05"):
        assert assert_same_tokens([3, 9, 9], close) == (1, 1e-5)  # once apart, texts are not compared further


@pytest.mark.parametrize("got", [[3, 1], [], [3, 1, 4, 1]], ids=["short", "empty", "long"])
def test_a_text_that_ends_elsewhere_is_no_near_tie(got):
    with pytest.raises(AssertionError, match="margin is inf"):
        assert_same_tokens(got, Reference([3, 1, 4], [0.0, 0.0, 0.0]))


@pytest.mark.parametrize("stop_place", [None, 0, 4])
def test_the_reference_is_the_same_from_transformers_and_from_our_model_without_a_cache(stop_place):
    theirs, ours = twins("t-wide")
    prompt = random_ids(7)
    stop_ids = [] if stop_place is None else [greedy_reference(theirs, prompt, 12).tokens[stop_place]]
    a, b = (greedy_reference(model, prompt, 12, stop_ids) for model in (theirs, ours))
    assert a.tokens == b.tokens and a.margins == pytest.approx(b.margins, abs=1e-4)
    assert len(a.tokens) == (12 if stop_place is None else stop_place + 1)


# -- rungs 0 and 1 ------------------------------------------------------------------------------

ONE_SEQUENCE = {"rung 0": decode_recomputing, "rung 1": decode_cached}


@pytest.mark.parametrize("packed", [True, False, "heart"])
@pytest.mark.parametrize("shape", ["t8-2", "t-wide", "t4-1", "t9-3"])
@pytest.mark.parametrize("rung", ONE_SEQUENCE)
def test_one_sequence_at_a_time(rung, shape, packed):
    for length in (1, 3, 7, 17):
        prompt = random_ids(length, seed=length)
        text = list(ONE_SEQUENCE[rung](twins(shape, packed=packed).ours, prompt, LONGEST_OUTPUT))
        assert_same_tokens(text, reference(shape, tuple(prompt)))


@pytest.mark.parametrize("rung", ONE_SEQUENCE)
def test_one_sequence_ends_with_its_stop_id_or_at_its_cap(rung):
    _, ours = twins("t8-2")
    prompt = random_ids(5)
    whole = reference("t8-2", tuple(prompt)).tokens
    for n in (0, 1, 5):
        assert list(ONE_SEQUENCE[rung](ours, prompt, n)) == whole[:n]
    end = whole.index(whole[3]) + 1
    assert list(ONE_SEQUENCE[rung](ours, prompt, LONGEST_OUTPUT, {whole[3]})) == whole[:end]


def test_rung_0_feeds_the_whole_text_every_time_and_rung_1_each_token_once(monkeypatch):
    _, ours = twins("t8-2")
    prompt = random_ids(5)
    text = prompt + reference("t8-2", tuple(prompt)).tokens[:4]
    watches = {}
    for rung, decode in ONE_SEQUENCE.items():
        with monkeypatch.context() as patch:
            watches[rung] = Watch(patch, ours)
            list(decode(ours, prompt, 4))
    assert watches["rung 0"].forwards == [(text[:n], list(range(n))) for n in (5, 6, 7, 8)]
    assert watches["rung 1"].forwards == [(text[:5], list(range(5))), *(([text[n]], [n]) for n in (5, 6, 7))]


# -- rungs 2 to 4: every combination of settings --------------------------------------------------

A, B, C = random_ids(11, seed=1), random_ids(9, seed=2), random_ids(4, seed=3)
PROMPTS = [
    A[:3], C, random_ids(5, seed=4),  # k blocks - 1, k, k + 1
    random_ids(7, seed=5), A[:8], B,  # and for k = 2
    A[:8], A[:8],  # twice more in flight, the same
    A, random_ids(1, seed=6),  # more than a known prefix; a single token
]  # fmt: skip
MAX_TOKENS = [9, 6, 1, 9, 4, 2, 7, 4, 9, 9]
AGAIN, AGAIN_TOKENS = [A[:8], B, C], [5, 3, 2]  # later, when all of them are cached
TIGHT, AMPLE = 6, 64  # blocks; the longest request may need 5

AXES = dict(
    shape=("t8-2", "t-wide"),
    packed=(True, False, "heart"),
    batching=("static", "continuous"),
    kv=("slots", "paged"),
    kv_format=KV_FORMATS,
    chunked_prefill=(True, False),
    prefix_cache=(True, False),
    blocks=(TIGHT, AMPLE),
    max_batch=(1, 3, 8),
)
COMBINATIONS = [dict(zip(AXES, values, strict=True)) for values in itertools.product(*AXES.values())]


@pytest.mark.parametrize("chosen", COMBINATIONS, ids=lambda chosen: "-".join(map(str, chosen.values())))
def test_every_combination_of_settings(chosen, monkeypatch):
    chosen = dict(chosen)
    shape, model = chosen["shape"], twins(chosen.pop("shape"), packed=chosen.pop("packed")).ours
    budget = 8 if chosen["chunked_prefill"] else 11  # the longest prompt is cut, or just fits
    engine = make_engine(model, block_size=BLOCK, max_step_tokens=budget, **chosen)
    watch = Watch(monkeypatch, model, engine)
    for prompts, most in ((PROMPTS, MAX_TOKENS), (AGAIN, AGAIN_TOKENS)):
        assert_parity(shape, prompts, most, serve(engine, prompts, [SamplingParams(max_tokens=n) for n in most]))

    # that what these settings are about did happen, and only there
    totals = engine.records.totals
    crowded = chosen["blocks"] == TIGHT and chosen["max_batch"] > 1
    assert (totals["preempted"] > 0) == (crowded and chosen["kv"] == "paged" and chosen["batching"] == "continuous")
    assert (totals["cached_tokens"] > 0) == (chosen["prefix_cache"] and chosen["kv"] == "paged")
    assert (totals["idle_rows"] > 0) == (chosen["batching"] == "static" and chosen["max_batch"] > 1)
    assert any(not row.samples and not row.idle for row in watch.rows) == chosen["chunked_prefill"]
    wanted = sum(map(len, PROMPTS + AGAIN)) + sum(MAX_TOKENS + AGAIN_TOKENS) - len(PROMPTS + AGAIN)
    skipped, extra = totals["cached_tokens"], totals["recomputed_tokens"] + totals["idle_rows"]
    assert watch.tokens_fed == wanted - skipped + extra


def test_prompts_of_a_static_batch_that_share_no_length(monkeypatch):
    """Lengths 1, 3, 7, 7 in one batch, each as if alone; every row counts its positions from 0."""
    _, ours = twins("t8-2")
    prompts = [random_ids(n, seed=20 + n) for n in (1, 3, 7, 7)]
    engine = make_engine(ours, batching="static", kv="slots", max_batch=4)
    watch = Watch(monkeypatch, ours, engine)
    assert_parity("t8-2", prompts, [6] * 4, serve(engine, prompts, SamplingParams(max_tokens=6)))
    assert [row.positions for row in watch.steps[0]] == [list(range(len(prompt))) for prompt in prompts]


@pytest.mark.parametrize("kv", ["slots", "paged"])
@pytest.mark.parametrize("batching", ["static", "continuous"])
def test_survivors_of_a_batch_whose_longest_row_ends_first(batching, kv):
    """Whatever derives the write place from the longest row loses it with that row."""
    prompts, most = [random_ids(n, seed=30 + n) for n in (9, 4, 4)], [1, 8, 8]
    engine = make_engine(twins("t8-2").ours, batching=batching, kv=kv, max_batch=3)
    assert_parity("t8-2", prompts, most, serve(engine, prompts, [SamplingParams(max_tokens=n) for n in most]))


@pytest.mark.parametrize("chunked_prefill", [True, False])
@pytest.mark.parametrize("kv", ["slots", "paged"])
@pytest.mark.parametrize("batching", ["static", "continuous"])
def test_every_row_is_fed_at_its_own_positions(batching, kv, chunked_prefill, monkeypatch):
    """The outputs cannot show it, so the positions themselves are checked: each place of each text once."""
    _, ours = twins("t-wide")
    engine = make_engine(
        ours, batching=batching, kv=kv, chunked_prefill=chunked_prefill, max_batch=3, max_step_tokens=11
    )
    watch = Watch(monkeypatch, ours, engine)
    ids = [engine.add(p, SamplingParams(max_tokens=n)) for p, n in zip(PROMPTS, MAX_TOKENS, strict=True)]
    outputs = run_to_end(engine)
    texts = {request_id: prompt + outputs[request_id] for request_id, prompt in zip(ids, PROMPTS, strict=True)}
    check_positions(watch, texts)
    hits = {record.request_id: record.cached_tokens for record in engine.records.requests}
    for request_id, text in texts.items():
        fed = [at for row in watch.rows if row.request_id == request_id and not row.idle for at in row.positions]
        assert fed == list(range(hits[request_id], len(text) - 1)), "the last token of a text is never fed"


# -- prefix sharing -----------------------------------------------------------------------------


@pytest.mark.parametrize("length, hit", [(1, 0), (3, 0), (4, 0), (5, 4), (7, 4), (8, 4), (9, 8), (11, 8)])
@pytest.mark.parametrize("during", [False, True], ids=["after", "during"])
def test_a_known_prompt_skips_whole_blocks_but_its_last_token(length, hit, during, monkeypatch):
    """One token is always left to compute, or there would be no logits to choose from."""
    _, ours = twins("t8-2")
    prompt = random_ids(length, seed=40)
    engine = make_engine(ours)
    watch = Watch(monkeypatch, ours, engine)
    first = engine.add(prompt, SamplingParams(max_tokens=6))
    texts = {first: list(engine.step()[0].token_ids)} if during else run_to_end(engine)
    second = engine.add(prompt, SamplingParams(max_tokens=6))
    for request_id, text in run_to_end(engine).items():
        texts.setdefault(request_id, []).extend(text)
    assert_parity("t8-2", [prompt] * 2, [6] * 2, [texts[first], texts[second]])
    fed = {name: [row.tokens for row in watch.rows if row.request_id == name] for name in (first, second)}
    assert [len(tokens) for tokens in fed[first]] == [length, *[1] * 5]
    assert [len(tokens) for tokens in fed[second]] == [length - hit, *[1] * 5], "the hit did not skip its work"


@pytest.mark.parametrize(
    "prompt, then", [(random_ids(11, seed=41), 0), (random_ids(7, seed=42), 2)], ids=["mid-prompt", "mid-output"]
)
def test_a_block_that_was_never_filled_is_not_shared(prompt, then):
    """Its tokens are known, but not all stored: by mistake indexed, it would be found after an abort."""
    engine = make_engine(twins("t8-2").ours, max_step_tokens=7)
    first = engine.add(prompt, SamplingParams(max_tokens=6))
    engine.step()  # 7 tokens stored: a block and three quarters of the next
    engine.abort(first)
    prompt = prompt + reference("t8-2", tuple(prompt)).tokens[:then]
    texts = serve(engine, [prompt], SamplingParams(max_tokens=6))
    assert_parity("t8-2", [prompt], [6], texts)
    assert engine.records.totals["cached_tokens"] == 4


# -- what does not depend on company ------------------------------------------------------------


def test_static_and_continuous_are_the_same_work_when_all_lengths_are_equal(monkeypatch):
    """Ratio 1.00 exactly: the gain of rung 3 is idle rows saved, and here there are none."""
    _, ours = twins("t8-2")
    prompts = [random_ids(6, seed=50 + i) for i in range(8)]
    shapes = {}
    for batching in ("static", "continuous"):
        engine = make_engine(ours, batching=batching, max_batch=4, max_step_tokens=64, prefix_cache=False)
        texts = serve(engine, prompts, SamplingParams(max_tokens=7))
        assert_parity("t8-2", prompts, [7] * 8, texts)
        shapes[batching] = [(step.rows, step.prompt_tokens, step.decode_tokens) for step in engine.records.steps]
    assert shapes["static"] == shapes["continuous"] == [(4, 24, 0), *[(4, 0, 4)] * 6] * 2


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "plain"])
def test_logits_are_the_same_alone_in_a_batch_and_on_other_threads_up_to_rounding(packed, monkeypatch):
    """COR-5. The order of a sum depends on shapes and threads, so not to the last bit, and nobody may promise that."""
    _, ours = twins("t8-2", packed=packed)
    prompt, others = random_ids(7, seed=60), [random_ids(n, seed=60 + n) for n in (1, 3, 5, 9, 11, 13, 20)]
    before, seen = torch.get_num_threads(), []
    try:
        for threads, company in itertools.product((1, 2), ([], others)):
            torch.set_num_threads(threads)
            with monkeypatch.context() as patch:
                watch = Watch(patch, ours)
                serve(make_engine(ours, max_batch=8), [prompt, *company], SamplingParams(max_tokens=8))
            seen.append(torch.stack([logits[0] for logits in watch.logits]))  # the prompt's row comes first
    finally:
        torch.set_num_threads(before)
    for logits in seen[1:]:
        torch.testing.assert_close(logits, seen[0], rtol=0, atol=1e-4)


def test_among_equal_logits_the_lowest_id_wins():
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0], [3.0, 3.0, 3.0, 3.0], [0.0, 0.0, 0.0, 5.0]])
    assert sample(logits, [SamplingParams()] * 3, [0] * 3, [0] * 3).tolist() == [1, 0, 3]
    wide = torch.zeros(3, 50_000)  # wide enough for a reduction in several parts
    wide[:, [5, 96, 40_000]] = 1.0
    assert sample(wide, [SamplingParams()] * 3, [0] * 3, [0] * 3).tolist() == [5, 5, 5]


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "plain"])
def test_two_equal_embedding_rows_tie_and_the_lower_id_is_said(packed, monkeypatch):
    """COR-5's own case: ids 5 and 96 share a row that wins often, so the tied head gives near ties, mostly exact."""
    theirs, ours = twins("t8-2", tie_word_embeddings=True)
    tensors = {name: tensor.clone() for name, tensor in theirs.state_dict().items() if name != "lm_head.weight"}
    embedding = tensors["model.embed_tokens.weight"]
    embedding[5] *= 2
    embedding[96] = embedding[5]
    model = make_model(ours.config, tensors, packed=packed)
    engine = make_engine(model, max_batch=5)
    watch = Watch(monkeypatch, model)
    texts = serve(engine, [random_ids(6, seed=70 + i) for i in range(5)], SamplingParams(max_tokens=LONGEST_OUTPUT))
    ties = said = 0
    for logits in watch.logits:
        assert (logits[:, 5] - logits[:, 96]).abs().max() < 1e-4
        exact = (logits[:, 5] == logits[:, 96]) & (logits[:, 5] == logits.amax(-1))
        ties += int(exact.sum())
        said += int((logits.argmax(-1)[exact] == 5).sum())
    assert ties == said > 0, f"of {ties} exact ties, {said} went to the lower id"
    assert any(5 in text for text in texts)


# -- random mixtures ----------------------------------------------------------------------------

TEXTS = [random_ids(13, seed=80 + i) for i in range(3)]
MIXED_PROMPTS = [tuple(text[:n]) for text in TEXTS for n in (1, 3, 4, 5, 8, 9, 13)]
MOST_KV = 13 + LONGEST_OUTPUT - 1


def test_the_references_of_the_mixtures_are_decided_at_every_step():
    """So that below, a text's end can be told from its reference."""
    for shape in ("t8-2", "t-wide"):
        assert min(min(reference(shape, prompt).margins) for prompt in MIXED_PROMPTS) > MARGIN


REQUEST = st.fixed_dictionaries(
    dict(
        prompt=st.sampled_from(MIXED_PROMPTS),
        max_tokens=st.integers(0, LONGEST_OUTPUT),
        stop_place=st.none() | st.integers(0, LONGEST_OUTPUT - 1),  # the stop id is what the reference says there
        stop_after=st.none() | st.integers(1, LONGEST_OUTPUT),
        arrival=st.integers(0, 12),
        abort=st.none() | st.integers(0, 25),
    )
)


@st.composite
def engines(draw):
    """Settings of an engine that can run each of the requests, if only one at a time."""
    block_size = draw(st.integers(1, 5))
    chunked = draw(st.booleans())
    return dict(
        shape=draw(st.sampled_from(["t8-2", "t-wide"])),
        batching=draw(st.sampled_from(["continuous", "static"])),
        kv=draw(st.sampled_from(["paged", "slots"])),
        kv_format=draw(st.sampled_from(KV_FORMATS)),
        block_size=block_size,
        blocks=-(-MOST_KV // block_size) + draw(st.integers(0, 12)),
        chunked_prefill=chunked,
        prefix_cache=draw(st.booleans()),
        max_batch=draw(st.integers(1, 8)),
        max_step_tokens=draw(st.integers(1 if chunked else 13, 30)),
    )


def expected_end(shape: str, wanted: dict) -> tuple[list[int], str]:
    """What the request must say and why it must end, from transformers' text alone."""
    tokens = reference(shape, wanted["prompt"]).tokens
    ends = {len(tokens) + 1}
    if wanted["stop_after"] is not None:
        ends.add(wanted["stop_after"])
    if wanted["stop_place"] is not None:
        ends.add(tokens.index(tokens[wanted["stop_place"]]) + 1)
    if min(ends) <= wanted["max_tokens"]:
        return tokens[: min(ends)], "stop"
    return tokens[: wanted["max_tokens"]], "length"


@settings(max_examples=300, deadline=None, derandomize=True)
@given(engines(), st.lists(REQUEST, min_size=1, max_size=9))
def test_any_mixture_of_arrivals_stops_and_aborts(chosen, requests):
    """Whatever happens around a request, it says what transformers says, up to its own end."""
    shape, clock = chosen["shape"], ManualClock()
    engine = make_engine(twins(shape).ours, clock=clock, **{k: v for k, v in chosen.items() if k != "shape"})
    for number, wanted in enumerate(requests):
        tokens, place = reference(shape, wanted["prompt"]).tokens, wanted["stop_place"]
        params = SamplingParams(
            max_tokens=wanted["max_tokens"], stop_after=wanted["stop_after"],
            stop_ids=None if place is None else [tokens[place]],
        )
        engine.add(wanted["prompt"], params, request_id=number, arrival=float(wanted["arrival"]))
    texts, reasons = {number: [] for number in range(len(requests))}, {}
    while engine.has_work:
        for number, wanted in enumerate(requests):
            if wanted["abort"] is not None and wanted["abort"] <= clock.moment:
                engine.abort(number)
        for event in engine.step():
            assert event.request_id not in reasons, "an event after the end"
            texts[event.request_id] += event.token_ids
            if event.finished:
                reasons[event.request_id] = event.finish_reason
        engine.check_invariants()
        clock.moment += 1
        assert clock.moment < 1000, "it gets nowhere"
    assert engine.stats().blocks_live == 0
    for number, wanted in enumerate(requests):
        text, reason = expected_end(shape, wanted)
        if reasons[number] == "abort":
            assert wanted["abort"] is not None
            assert texts[number] == text[: len(texts[number])]
        else:
            assert (texts[number], reasons[number]) == (text, reason)


def test_a_static_batch_carries_a_row_that_was_aborted_before_its_first_chunk():
    """It has no token to feed again; its neighbours must not notice."""
    engine = make_engine(twins("t8-2").ours, batching="static", max_batch=2, max_step_tokens=4)
    long, late = random_ids(9, seed=90), random_ids(3, seed=91)
    first, second = (engine.add(prompt, SamplingParams(max_tokens=5)) for prompt in (long, late))
    engine.step()  # admits both, but the budget goes to the first
    engine.abort(second)
    texts = run_to_end(engine)
    assert_parity("t8-2", [long], [5], [texts[first]])
    assert texts[second] == []


# -- SmolLM2 ------------------------------------------------------------------------------------

QUESTIONS = (
    "What is the capital of France?",
    "Count from one to ten.",
    "Write a haiku about rain.",
    "Name three colours, and for each of them one fruit that has it.",
)
RUNGS = {
    "rung 0": decode_recomputing,
    "rung 1": decode_cached,
    "rung 2": dict(batching="static", kv="slots"),
    "rung 3": dict(batching="continuous", kv="slots"),
    "rung 4": dict(batching="continuous", kv="paged"),
}


@cache
def smollm2_references(directory) -> list[tuple[list[int], Reference]]:
    """Real prompts with their chat template, and transformers' answers."""
    theirs, ours = smollm2_twins(directory)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    prompts = [
        tokenizer.apply_chat_template([{"role": "user", "content": q}], add_generation_prompt=True, return_dict=False)
        for q in QUESTIONS
    ]
    return [(prompt, greedy_reference(theirs, prompt, 16, ours.config.eos_token_id)) for prompt in prompts]


@pytest.mark.parametrize("rung", RUNGS)
def test_smollm2_answers_real_questions_as_in_transformers(smollm2_dir, rung):
    model, how = smollm2_twins(smollm2_dir).ours, RUNGS[rung]
    prompts, references = zip(*smollm2_references(smollm2_dir), strict=True)
    if isinstance(how, dict):
        engine = make_engine(model, blocks=20, block_size=16, max_batch=3, max_step_tokens=48, **how)
        texts = serve(engine, prompts, SamplingParams(max_tokens=16))
    else:
        texts = [list(how(model, prompt, 16, model.config.eos_token_id)) for prompt in prompts]
    for text, wanted in zip(texts, references, strict=True):
        assert_same_tokens(text, wanted)
