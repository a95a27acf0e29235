"""The parity tests can fail: each of the classic mistakes is planted in turn, and must be noticed.

Where a check is blind to a fault, that stands here too, since it says what the check is
worth: a model whose head counts coincide, and positions that are all shifted alike.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from parity import Twins, assert_same_tokens, greedy_reference, logits_of, random_ids, twins
from serving import Watch, check_positions, make_engine, serve
from toy_files import interleaved

from minillm.fast import attention
from minillm.fast.attention import FastAttention
from minillm.ladder import attention as ladder_attention
from minillm.ladder import decode
from minillm.ladder.attention import KVStorage
from minillm.ladder.decode import SequenceCache, decode_cached
from minillm.ladder.request import SamplingParams
from minillm.load.gguf_file import unpermute
from minillm.load.weights import make_model
from minillm.model.llama import Llama, inverse_frequencies

PROMPTS = [random_ids(n, seed=n) for n in (13, 6, 9)]
ROWS = len(PROMPTS)  # a forward of more tokens than this computes a prompt


# -- the checks: each raises AssertionError where the two models part --------------------------------


def logits(pair: Twins) -> None:
    for prompt in PROMPTS:
        torch.testing.assert_close(logits_of(pair.ours, prompt), logits_of(pair.theirs, prompt), rtol=0, atol=1e-4)


def rung_1(pair: Twins) -> None:
    for prompt in PROMPTS:
        assert_same_tokens(list(decode_cached(pair.ours, prompt, 12)), greedy_reference(pair.theirs, prompt, 12))


def rung_4(pair: Twins) -> None:
    """Three rows, prompts in chunks of at most 8."""
    engine = make_engine(pair.ours, max_batch=ROWS, max_step_tokens=8)
    for prompt, text in zip(PROMPTS, serve(engine, PROMPTS, SamplingParams(max_tokens=12)), strict=True):
        assert_same_tokens(text, greedy_reference(pair.theirs, prompt, 12))


# -- the faults: each changes the model or the code it runs through ----------------------------------


def rope_theta_is_read_wrongly(patch, model: Llama) -> None:
    patch.setattr(model, "inverse_frequencies", inverse_frequencies(replace(model.config, rope_theta=20_000.0)))


def query_heads_are_dealt_to_kv_heads_in_turn(patch, model: Llama) -> None:
    """Head h to KV head h % Hkv instead of h // G."""

    def fold(q, kv_heads):
        dealt = q.unflatten(2, (-1, kv_heads)).permute(0, 3, 1, 2, 4)  # [B, Hkv, n, G, D]
        return dealt.flatten(2, 3)

    def unfold(out, q):
        return out.unflatten(2, (q.shape[1], -1)).permute(0, 2, 3, 1, 4).reshape(q.shape)

    patch.setattr(attention, "fold_heads", fold)
    patch.setattr(attention, "unfold_heads", unfold)
    change_attend(patch, repeat=lambda x, group: x.repeat(1, group, 1))


def change_mask(patch, change) -> None:
    """In both attentions. `change` maps what each token sees [B, n, S]."""
    make = attention.additive_mask
    patch.setattr(attention, "additive_mask", lambda sees, *rest: make(change(sees), *rest))
    change_attend(patch, change=change)


def change_attend(patch, change=lambda sees: sees, repeat=lambda x, group: x.repeat_interleave(group, dim=1)) -> None:
    """The heart's `attend`, with another mask or another way to deal query heads to KV heads."""

    def attend(q, k, v, start):
        sees = change((torch.arange(len(k)) <= torch.arange(start, start + len(q))[:, None])[None])[0]
        k, v = (repeat(x, q.shape[1] // k.shape[1]) for x in (k, v))
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, sees)[0].transpose(0, 1)

    patch.setattr(decode, "attend", attend)
    patch.setattr(ladder_attention, "attend", attend)


def a_token_sees_the_one_after_it(patch, model: Llama) -> None:
    change_mask(patch, lambda sees: torch.cat((torch.ones_like(sees[..., :1]), sees[..., :-1]), dim=-1))


def a_token_does_not_see_itself(patch, model: Llama) -> None:
    change_mask(patch, lambda sees: torch.cat((sees[..., 1:], torch.zeros_like(sees[..., :1])), dim=-1))


def the_mask_is_square_and_forgets_what_was_stored_before(patch, model: Llama) -> None:
    change_mask(patch, lambda sees: torch.ones_like(sees).tril())


def the_mask_is_left_out_where_something_was_stored_before(patch, model: Llama) -> None:
    change_mask(patch, lambda sees: sees if sees.shape[1] == sees.shape[2] else torch.ones_like(sees))


def the_first_key_of_a_chunk_is_not_stored(patch, model: Llama) -> None:
    write, attend = KVStorage.write, SequenceCache.attend

    def skipping_write(storage, layer, slots, k, v):
        write(storage, layer, slots[1:], k[1:], v[1:])

    def skipping_attend(cache, layer, q, k, v):
        return attend(cache, layer, q, torch.cat((0 * k[:1], k[1:])), torch.cat((0 * v[:1], v[1:])))

    patch.setattr(KVStorage, "write", skipping_write)
    patch.setattr(SequenceCache, "attend", skipping_attend)


def change_forward(patch, model: Llama, change) -> None:
    """`change` maps (tokens, positions, logit_rows) to what the model is given instead."""
    forward = model.forward

    def changed(tokens, positions, cache, logit_rows=None):
        tokens, positions, logit_rows = change(tokens, positions, logit_rows)
        return forward(tokens, positions, cache, logit_rows)

    patch.setattr(model, "forward", changed)


def positions_are_shifted_in_prefill_only(patch, model: Llama) -> None:
    change_forward(patch, model, lambda tokens, at, rows: (tokens, at + 7 if len(at) > ROWS else at, rows))


def decoding_counts_one_position_too_many(patch, model: Llama) -> None:
    """The newest token is known, but not stored: whoever mixes the two lengths is off by one."""
    change_forward(patch, model, lambda tokens, at, rows: (tokens, at if len(at) > ROWS else at + 1, rows))


def logits_are_those_of_the_last_token_but_one(patch, model: Llama) -> None:
    def change(tokens, at, rows):
        return tokens, at, rows - 1 if rows is not None and len(at) > ROWS else rows

    change_forward(patch, model, change)


EVERYWHERE = (logits, rung_1, rung_4)
CACHED = (rung_1, rung_4)  # without a cache, these make no difference
NOTICED_BY = {
    rope_theta_is_read_wrongly: EVERYWHERE,
    query_heads_are_dealt_to_kv_heads_in_turn: EVERYWHERE,
    a_token_sees_the_one_after_it: EVERYWHERE,
    a_token_does_not_see_itself: EVERYWHERE,
    the_mask_is_square_and_forgets_what_was_stored_before: CACHED,
    the_mask_is_left_out_where_something_was_stored_before: (rung_4,),  # rung 1 has no such forward of many tokens
    the_first_key_of_a_chunk_is_not_stored: CACHED,
    positions_are_shifted_in_prefill_only: CACHED,
    decoding_counts_one_position_too_many: CACHED,
    logits_are_those_of_the_last_token_but_one: CACHED,
}
SHAPES = ("t8-2", "t-wide", "t9-3")
APART = "texts part at token|Tensor-likes are not close"  # of an InvariantError, say, nothing would follow for parity


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("check", EVERYWHERE, ids=lambda check: check.__name__)
def test_without_a_fault_every_check_passes(check, shape):
    for pair in pairs(check, shape):
        check(pair)


def pairs(check, shape: str) -> list[Twins]:
    """What a check is run on: rung 4 in the heart's engine as well."""
    return [twins(shape), twins(shape, packed="heart")] if check is rung_4 else [twins(shape)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("plant", NOTICED_BY, ids=lambda plant: plant.__name__)
def test_a_planted_fault_is_noticed(plant, shape, monkeypatch):
    for pair in pairs(rung_4, shape):
        plant(monkeypatch, pair.ours)
    for check in EVERYWHERE:
        for pair in pairs(check, shape):
            if check in NOTICED_BY[plant]:
                with pytest.raises(AssertionError, match=APART):
                    check(pair)
            else:
                check(pair)


@pytest.mark.parametrize("shape, hidden", [("t8-2", False), ("t4-1", False), ("t9-3", True)])
def test_keys_unpermuted_by_the_wrong_head_count_show_only_where_the_counts_differ(shape, hidden):
    """n_q // n_kv for n_kv. With 9 and 3 heads, as in SmolLM2, both are 3 and the fault is invisible."""
    theirs, right = twins(shape, head_dim=8)
    heads, kv_heads = right.config.num_attention_heads, right.config.num_key_value_heads
    tensors = dict(theirs.state_dict())
    for name in [name for name in tensors if name.endswith("k_proj.weight")]:
        tensors[name] = unpermute(interleaved(tensors[name], kv_heads), heads // kv_heads)
    pair = Twins(theirs, make_model(right.config, tensors))
    for check in EVERYWHERE:
        if hidden:
            check(pair)
        else:
            with pytest.raises(AssertionError, match=APART):
                check(pair)


def test_positions_that_are_all_shifted_change_no_token_and_only_the_check_of_positions_sees_it(monkeypatch):
    """RoPE knows distances only."""
    make = FastAttention.__init__

    def shifted(step, *arguments):
        make(step, *arguments)
        step.positions = step.positions + 7

    monkeypatch.setattr(FastAttention, "__init__", shifted)
    pair = twins("t8-2")
    rung_4(pair)  # passes
    engine = make_engine(pair.ours)
    watch = Watch(monkeypatch, pair.ours, engine)
    texts = serve(engine, PROMPTS, SamplingParams(max_tokens=12))
    names = [record.request_id for record in sorted(engine.records.requests, key=lambda record: record.arrival)]
    whole = {name: prompt + text for name, prompt, text in zip(names, PROMPTS, texts, strict=True)}
    with pytest.raises(AssertionError, match="fed at 7"):
        check_positions(watch, whole)
