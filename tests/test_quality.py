"""The measures of quality: what they report of losses, texts and codes that are known beforehand."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
from tiny import tiny_model

from minillm import Engine, load_tokenizer
from minillm.course.experiments.formats import SCHEMES, calibrated, errors, key_transforms, per_channel, per_token
from minillm.course.experiments.quality import (
    ERROR_BLOCK,
    Corpus,
    Losses,
    QualityTask,
    copy_columns,
    greedy_columns,
    hidden_codes,
    loss_columns,
    python_help,
    quality_row,
    repeated,
    retrieved,
    run_task,
    token_losses,
    with_error,
)
from minillm.ladder.decode import NoCache
from minillm.ladder.quantized import kv_storage

RANDOM = torch.Generator().manual_seed(0)


@pytest.mark.parametrize("chunk", [7, 64, 1000])
def test_losses_are_those_of_a_forward_without_a_cache_whatever_the_chunk(chunk):
    model = tiny_model("t8-2")
    documents = torch.randint(97, (2, 101), generator=RANDOM)
    losses = token_losses(model, documents, lambda slots: kv_storage(model.config, "fp32", slots), chunk)
    for document, nats, choices in zip(documents, losses.nats, losses.first_choice, strict=True):
        with torch.inference_mode():
            logits = model.forward(document[:-1], torch.arange(100), NoCache())
        wanted = torch.nn.functional.cross_entropy(logits, document[1:], reduction="none")
        torch.testing.assert_close(nats, wanted, rtol=0, atol=1e-4)
        assert torch.equal(choices, logits.argmax(-1))


def test_keys_of_the_same_chunk_are_read_as_stored():
    """int4 must show in a text of one chunk, and the chunk must not change it."""
    model = tiny_model("t8-2")
    documents = torch.randint(97, (1, 65), generator=RANDOM)
    plain, *fours = (
        token_losses(model, documents, lambda slots, f=kv_format: kv_storage(model.config, f, slots), chunk).nats
        for kv_format, chunk in (("fp32", 64), ("int4", 64), ("int4", 1))
    )
    assert (fours[0] - plain).abs().max() > 1e-3
    torch.testing.assert_close(*fours, rtol=0, atol=1e-4)


def test_an_error_bar_counts_blocks_not_tokens():
    """A value that stays for a whole block is one observation: 100 blocks of noise 1 give 2 / sqrt(100)."""
    noise = torch.randn(4, 100, generator=RANDOM)
    values = noise.repeat_interleave(ERROR_BLOCK, dim=1)
    mean, error = with_error(values)
    assert mean == pytest.approx(float(noise.mean()), abs=1e-5)
    assert error == pytest.approx(2 * float(noise.std()) / 400**0.5, rel=0.01)
    _, alone = with_error(torch.randn(4, 100 * ERROR_BLOCK, generator=RANDOM))
    assert alone == pytest.approx(2 / (400 * ERROR_BLOCK) ** 0.5, rel=0.15)
    first = torch.zeros_like(values, dtype=torch.bool)
    first[0, :9] = True
    assert with_error(values, first)[1] == math.inf, "one block tells nothing of its error"


def test_changes_are_sorted_into_the_buckets_they_belong_to():
    documents = torch.tensor([[0, *[1, 2] * 300]])  # token 1 is rare, token 2 is common
    occurrences = torch.tensor([0, 5, 5000])
    before = Losses(torch.full((1, 600), 2.0), torch.zeros(1, 600, dtype=torch.long))
    after = Losses(before.nats.clone(), before.first_choice.clone())
    after.nats[documents[:, 1:] == 1] += 0.5
    after.nats[0, :256] += 0.25
    after.first_choice[0, :60] = 1
    row = loss_columns(after, before, documents, occurrences)
    assert row["rare_tokens_change_nats"] - row["common_tokens_change_nats"] == pytest.approx(0.5)
    assert row["at_under_256_change_nats"] - row["at_256_to_1k_change_nats"] == pytest.approx(0.25)
    assert row["medium_tokens_change_nats"] is None and row["at_2k_to_4k_loss_nats"] is None
    assert row["same_first_choice_percent"] == pytest.approx(90)
    assert row["perplexity"] == pytest.approx(math.exp(2 + 0.25 + 0.25 * 256 / 600))
    assert row["change_percent"] == pytest.approx(100 * math.expm1(0.25 + 0.25 * 256 / 600), rel=1e-4)


def quality_task(documents: int = 6, short: int | None = 4) -> QualityTask:
    ids = torch.arange(3000) % 90
    corpus = Corpus(ids, torch.full((97,), 50), "numbers", "0")
    text = torch.randint(90, (documents, 129), generator=RANDOM)
    brief = None if short is None else torch.randint(90, (short, 65), generator=RANDOM)
    return QualityTask(corpus, text, repeated(97, 1, 32), {8: []}, [[1]], 1, brief)


def test_a_format_of_which_less_is_asked_is_held_against_the_reference_on_its_own_documents():
    whole = quality_task()
    less = whole.asking(False, True)
    assert torch.equal(less.documents, whole.documents[[0, 3]]) and less.short is None and less.codes == whole.codes
    least = whole.asking(False, False)
    assert torch.equal(least.documents, whole.documents[[0]]) and not least.codes and not least.prompts
    assert whole.asking(True, False).short is whole.short and whole.asking(True, True) is whole
    model = tiny_model("t8-2")
    all_of_it, part = (run_task(model, None, replace(task, codes={}, prompts=[]),
                                partial(kv_storage, model.config, "fp32")) for task in (whole, less))
    row = quality_row(less, part, all_of_it)
    assert (row["tokens"], row["change_percent"], row["same_first_choice_percent"]) == (2 * 128, 0.0, 100.0)
    with pytest.raises(RuntimeError):
        loss_columns(part.losses, all_of_it.losses, less.documents, less.corpus.occurrences)


def test_short_documents_count_at_early_positions():
    task, model = quality_task().asking(True, False), tiny_model("t8-2")
    got = run_task(model, None, task, partial(kv_storage, model.config, "int4"))
    before = run_task(model, None, task, partial(kv_storage, model.config, "fp32"))
    row = quality_row(task, got, before)
    assert row["tokens"] == 6 * 128 + 4 * 64
    pairs = (got.losses, before.losses), (got.short, before.short)
    change = torch.cat([(after.nats - old.nats).flatten() for after, old in pairs])
    assert row["at_under_256_change_nats"] == pytest.approx(float(change.mean()), abs=1e-6)
    alone = quality_row(replace(task, short=None), replace(got, short=None), replace(before, short=None))
    assert row["change_error_percent"] != alone["change_error_percent"] and alone["tokens"] == 6 * 128


def test_long_and_short_documents_come_from_different_halves():
    kept = Corpus(torch.arange(24_096), torch.ones(1), "numbers", "0")
    long, short = kept.documents(2, 4000, end=0.5), kept.documents(10, 200, begin=0.5)
    assert long.max() < 10_000 <= short.min() and short.max() < kept.calibration.min()
    with pytest.raises(ValueError, match="do not fit into the text's 10,000"):
        kept.documents(3, 4000, end=0.5)


def test_copies_are_judged_by_the_second_time_alone():
    documents = repeated(5000, 3, 100)
    assert documents.shape == (3, 201) and torch.equal(documents[:, :101], documents[:, 100:])
    right = Losses(torch.ones(3, 200), documents[:, 1:].clone())
    wrong = Losses(right.nats.clone(), right.first_choice.clone())
    wrong.first_choice[:, 100:125] = -1
    wrong.nats[:, :100] = 9  # the first time, which nobody can know
    assert copy_columns(right, right, documents)["copied_percent"] == 100
    row = copy_columns(wrong, right, documents)
    assert row["copied_percent"] == pytest.approx(75) and row["copying_change_nats"] == 0


def test_greedy_answers_are_compared_up_to_their_first_difference():
    row = greedy_columns([[1, 2, 9, 4], [5, 6]], [[1, 2, 3, 4], [5, 6]])
    assert (row["answers_that_differ"], row["first_difference_at_token"]) == (1, 2)
    assert row["greedy_agree_percent"] == pytest.approx(100 * 4 / 6)


# -- texts ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer(smollm2_dir):
    return load_tokenizer()


@pytest.fixture(scope="module")
def corpus(tokenizer):
    ids = torch.tensor(tokenizer.encode("The cat sat on the mat and looked at the rain. " * 900))
    return Corpus(ids, torch.bincount(ids, minlength=49_152), "cats", "0")


def test_documents_never_touch_the_calibration_text(corpus):
    kept = Corpus(torch.arange(12_000), torch.ones(1), "numbers", "0")
    documents = kept.documents(3, 2000)
    assert documents.shape == (3, 2001) and documents.max() < kept.calibration.min()
    assert all(first[-1] < second[0] for first, second in pairwise(documents))
    with pytest.raises(ValueError, match="4 pieces of 2,000 tokens and one do not fit"):
        kept.documents(4, 2000)


def test_a_text_hides_its_codes_where_it_says_and_questions_share_it(tokenizer, corpus):
    questions = hidden_codes(tokenizer, corpus, 400, 4)
    assert len({question.code for question in questions}) == 4
    text = tokenizer.decode(questions[0].prompt_ids)
    for question, depth in zip(questions, (0.125, 0.375, 0.625, 0.875), strict=True):
        place = text.index(f"door is {question.code}.") / len(text)
        assert place == pytest.approx(depth, abs=0.12)
    prompts = [question.prompt_ids for question in questions]
    shared = next(i for i in range(len(prompts[0])) if len({prompt[i] for prompt in prompts}) > 1)
    assert shared > 400
    assert hidden_codes(tokenizer, corpus, 400, 4, seed=1)[0].code != questions[0].code


def test_a_code_counts_as_found_to_the_digit_alone(tokenizer, corpus, monkeypatch):
    questions = hidden_codes(tokenizer, corpus, 100, 2)
    said = iter([tokenizer.encode(questions[0].code), tokenizer.encode(questions[1].code[:3] + "x")])

    class Answer:
        def __init__(self, token_ids):
            self.token_ids = token_ids

    engine = Engine(tiny_model("t8-2", vocab_size=49_152))
    monkeypatch.setattr(engine, "generate", lambda prompts, params: [Answer(next(said)) for _ in prompts])
    assert retrieved(engine, tokenizer, questions) == [True, False]


def test_the_help_text_is_there_and_named(tokenizer):
    text = python_help(tokenizer)
    assert len(text.ids) > 90_000 and text.source.startswith("pydoc_data.topics of Python 3")
    assert len(text.sha256) == 64 and int(text.occurrences.sum()) == len(text.ids)


# -- the outlier lesson ---------------------------------------------------------------------------


def test_one_loud_channel_is_judged_by_more_than_one_norm():
    """A norm over the whole tensor hardly tells the ways apart; scores and attention weights do."""
    queries, keys = torch.randn(1, 96, 4, 32, generator=RANDOM), torch.randn(1, 96, 2, 32, generator=RANDOM)
    keys[..., 5] = keys[..., 5] * 3 + 40
    plain, channels = errors(queries, keys, per_token), errors(queries, keys, per_channel)
    scaled = errors(queries, keys, per_token, calibrated(queries, keys))
    exact = errors(queries, keys, lambda k: k)
    assert max(exact.values()) < 1e-6
    assert plain["whole_tensor_error"] < 0.2 and plain["median_channel_error"] > 0.5
    for better in (scaled, channels):
        assert better["score_error"] < plain["score_error"] / 3
        assert better["attention_variation"] < plain["attention_variation"] / 3


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
def test_each_scheme_stores_keys_and_values_near_what_they_were(scheme):
    """Also those that only the full size measures."""
    model, make = tiny_model(), torch.Generator().manual_seed(0)
    queries, keys, values = (torch.randn(2, 32, heads, 8, generator=make) for heads in (8, 2, 2))
    transform = key_transforms(queries, keys)[scheme.keys]
    storage, slots = scheme.storage(model, transform, 33), torch.arange(32)
    k = transform.apply(0, queries[0], keys[0])[1] if transform else keys[0]
    for store, numbers in ((storage.keys, k), (storage.values, values[0])):
        store.write(0, slots, numbers)
        wrong = (store.read(0, slots).float() - numbers).square().mean().sqrt() / numbers.square().mean().sqrt()
        assert wrong < 0.15, wrong


def test_keys_per_channel_need_whole_blocks():
    with pytest.raises(ValueError, match="33 tokens are not a whole number of blocks of 32"):
        per_channel(torch.zeros(33, 2, 8))
