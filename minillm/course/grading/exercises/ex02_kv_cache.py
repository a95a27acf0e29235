"""Exercise 2: a KV cache for one sequence, and the loop that uses it."""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from minillm.course.grading.tasks import Exercise, Task, Wrong, close, expect
from minillm.ladder.decode import SequenceCache, decode_recomputing
from minillm.load.config import ModelConfig
from minillm.load.weights import RandomTensors, make_model
from minillm.model.llama import Llama

TOLERANCE = 1e-4  # of attention's outputs, which are about 1; other orders of summing differ by 1e-6
PROMPT = [5, 61, 17, 3, 88, 40, 2]


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> list:
    """Causal attention of the newest tokens, a number at a time in Python's doubles."""
    rows, before = [], len(k) - len(q)
    group = q.shape[1] // k.shape[1]
    q, k, v = q.tolist(), k.tolist(), v.tolist()
    for i, heads in enumerate(q):
        rows.append([])
        for h, query in enumerate(heads):
            seen = range(before + i + 1)
            scores = [sum(a * b for a, b in zip(query, k[j][h // group], strict=True)) / math.sqrt(len(query))
                      for j in seen]
            weights = [math.exp(score - max(scores)) for score in scores]
            rows[-1].append([sum(w * v[j][h // group][d] for w, j in zip(weights, seen, strict=True)) / sum(weights)
                             for d in range(len(query))])
    return rows


def tokens(n: int, seed: int, heads: int = 4, head_dim: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    """Random queries [n, heads, head_dim], keys and values [n, 2, head_dim]."""
    draw = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(n, number, head_dim, generator=draw) for number in (heads, 2, 2))


def agrees(got: Tensor, q: Tensor, *parts: tuple[Tensor, Tensor]) -> bool:
    """Whether `got` is attention of `q` over the parts' keys and values, one part behind the other."""
    k, v = (torch.cat(side) for side in zip(*parts, strict=True))
    return close(got, by_hand(q, k, v), TOLERANCE)


kv_cache = Task(
    "kv_cache", "KVCache",
    hints=(
        "Keep two tensors for each layer, keys and values. What do they hold before the first call, and after it?",
        "torch.cat((old, new)) puts new rows behind old ones. Store the result, and hand the same to attention.",
        "If the layer has something: k = torch.cat((self.keys[layer], k)), v likewise. Then self.keys[layer] = k, "
        "self.values[layer] = v, and return attention(q, k, v).",
    ),
)


@kv_cache.check(
    mistake="With an empty cache, attend must return attention(q, k, v) of the new tokens.",
    look="'Attending'",
)
def first_call(KVCache):
    """The first tokens attend to themselves."""
    q, k, v = tokens(3, seed=1)
    expect(agrees(KVCache().attend(0, q, k, v), q, (k, v)), "3 tokens on an empty cache")


@kv_cache.check(
    mistake="The store belongs to the class, or to the module, instead of to each cache.",
    look="'The cache'",
)
def caches_are_apart(KVCache):
    """Two sequences do not share a cache."""
    KVCache().attend(0, *tokens(2, seed=9))
    q, k, v = tokens(2, seed=10)
    expect(agrees(KVCache().attend(0, q, k, v), q, (k, v)), "a second, empty cache")


@kv_cache.check(
    mistake="Earlier keys or values are not used, or are mixed up, or the new token does not see itself.",
    look="'Storing'",
)
def second_call(KVCache):
    """A new token sees what was stored before."""
    cache, (q, k, v), (q2, k2, v2) = KVCache(), tokens(3, seed=2), tokens(1, seed=3)
    cache.attend(0, q, k, v)
    expect(agrees(cache.attend(0, q2, k2, v2), q2, (k, v), (k2, v2)), "3 tokens, then 1")


@kv_cache.check(
    mistake="What is stored is replaced at each call, or the sum of old and new is used but not stored.",
    look="'Storing'",
)
def third_call(KVCache):
    """Everything that was fed is kept, not only the last call's."""
    cache, parts = KVCache(), []
    for turn in range(4):
        q, k, v = tokens(1, seed=10 + turn)
        parts.append((k, v))
        expect(agrees(cache.attend(0, q, k, v), q, *parts), f"single tokens, number {turn + 1} of them")


@kv_cache.check(
    mistake="The new keys stand before the old ones, or the new tokens see each other's future: new ones go behind, "
    "and `attention` gets all new queries at once.",
    look="'Attending'",
)
def warm_chunk(KVCache):
    """Several tokens on a warm cache see what stands before each of them, in order."""
    cache, (q, k, v), (q2, k2, v2) = KVCache(), tokens(2, seed=4), tokens(3, seed=5)
    cache.attend(0, q, k, v)
    expect(agrees(cache.attend(0, q2, k2, v2), q2, (k, v), (k2, v2)), "2 tokens, then 3 more at once")


SHARED = "All layers share one store, so that a layer sees another one's keys."


@kv_cache.check(
    mistake="All layers share a length, which is counted once a layer instead of once a call: layer 1 began to store "
    "where layer 0 had stopped.",
    look="'Storing'",
)
def layers_are_apart(KVCache):
    """Each layer has its own keys and values."""
    cache, first, other = KVCache(), tokens(2, seed=6), tokens(2, seed=7)
    cache.attend(0, *first)
    got, asked = cache.attend(1, *other), "2 tokens in layer 0, then 2 in layer 1"
    right = agrees(got, other[0], other[1:])
    expect(right or not agrees(got, other[0], first[1:], other[1:]), asked, SHARED)
    expect(right, asked)
    q, k, v = tokens(1, seed=8)
    expect(agrees(cache.attend(0, q, k, v), q, first[1:], (k, v)), "layer 0, layer 1, then layer 0 again", SHARED)


@kv_cache.check(
    mistake="A model's number of layers, or the size of its heads, is written into the code: store what comes.",
    look="'Storing'",
)
def any_model(KVCache):
    """It works for models with any number of layers and heads."""
    cache, (q, k, v), (q2, k2, v2) = KVCache(), tokens(4, 11, heads=8, head_dim=12), tokens(1, 12, 8, 12)
    cache.attend(79, q, k, v)
    got = cache.attend(79, q2, k2, v2)
    expect(agrees(got, q2, (k, v), (k2, v2)), "4 tokens, then 1, in layer 79, 8 query heads of 12")


class Strong(RandomTensors):
    """Random weights, large enough for one logit to stand out."""

    def __getitem__(self, name: str) -> Tensor:
        tensor = super().__getitem__(name)
        return tensor if name.endswith("norm.weight") else tensor * 8


@cache
def small_model() -> Llama:
    """Two layers of random weights, strong enough that every token counts."""
    config = ModelConfig(97, 32, 48, 2, 4, 2, 8, max_position_embeddings=64)
    return make_model(config, Strong(config, "cpu", torch.float32, seed=3))


class AttendOnly:
    """The package's cache, of which the loop sees `attend` alone: a learner's cache need not have more."""

    def __init__(self) -> None:
        self._cache = SequenceCache(small_model(), 64)

    def attend(self, *given):
        return self._cache.attend(*given)

    def __getattr__(self, name: str):
        raise Wrong(f"cache.{name}", NOT_TOLD, "'Where it stands'")


NOT_TOLD = "A cache has `attend` and need not have more: it does not tell how long the text is, so count yourself."


class Spy:
    """The small model, with a note of what each forward pass was fed."""

    def __init__(self) -> None:
        self.model, self.fed, self.positions = small_model(), [], []
        self.config = self.model.config

    def forward(self, tokens: Tensor, positions: Tensor, cache, logit_rows: Tensor | None = None) -> Tensor:
        self.fed.append(tokens.tolist())
        self.positions.append(positions.tolist())
        if isinstance(cache, AttendOnly):  # it writes where the tokens stand
            cache._cache.length = self.positions[-1][0] if self.positions[-1] else 0
        return self.model.forward(tokens, positions, cache, logit_rows)


def run(decode, prompt: list[int], max_tokens: int, stop_ids=()) -> tuple[list[int], Spy]:
    """The answer, with the package's own cache, and what was fed on the way."""
    spy = Spy()
    return decode(spy, AttendOnly(), prompt, max_tokens, stop_ids), spy


def recomputed(prompt: list[int], max_tokens: int, stop_ids=()) -> list[int]:
    """The truth: the tokens of a loop without a cache."""
    return list(decode_recomputing(small_model(), prompt, max_tokens, stop_ids))


cached_decode = Task(
    "cached_decode", "decode",
    hints=(
        "Three things change from step to step: what is fed next, the position of its first token, and the answer.",
        "Start with feed = the prompt and position = 0. After a forward pass, position grows by len(feed), and feed "
        "becomes a list with the one new token.",
        "while len(answer) < max_tokens: forward feed at arange(position, position + len(feed)); position += len(feed)"
        "; feed = [argmax of logits[-1]]; append it; break if it is in stop_ids.",
    ),
)


@cached_decode.check(
    mistake="The first token is wrong: feed the whole prompt and take the largest logit of the last row.",
    look="'What is chosen'",
)
def first_token(decode):
    """The first token is the model's choice behind the prompt."""
    answer, _ = run(decode, PROMPT, 1)
    expect(isinstance(answer, list) and answer[:1] == recomputed(PROMPT, 1), f"a prompt of {len(PROMPT)}, max_tokens=1")


@cached_decode.check(
    mistake="Too much or too little is fed: the prompt in the first pass, then only the newest token; what is cached "
    "is not fed again.",
    look="'What is fed'",
)
def fed_once(decode):
    """The prompt is fed once, and then one token a step."""
    answer, spy = run(decode, PROMPT, 5)
    expect([len(ids) for ids in spy.fed[:4]] == [len(PROMPT), 1, 1, 1], "tokens fed in the first four passes")
    expect(spy.fed[0] == PROMPT and spy.fed[1:4] == [[token] for token in answer[:3]], "which tokens were fed")


@cached_decode.check(
    mistake="The positions are wrong: they go on behind the prompt (0, 1, 2, … over the whole text), and do not start "
    "again at 0 or jump.",
    look="'Where it stands'",
)
def positions_go_on(decode):
    """Each token is fed at its place in the text."""
    _, spy = run(decode, PROMPT, 6)
    flat = [position for positions in spy.positions for position in positions]
    expect(flat == list(range(len(flat))), f"a prompt of {len(PROMPT)}, max_tokens=6: the positions fed")


@cached_decode.check(
    mistake="The tokens differ from those of a loop without a cache: look at what is fed, and where.",
    look="'The loop'",
)
def same_tokens(decode):
    """The answer is what recomputing everything gives."""
    for prompt in (PROMPT, [11], [90, 90, 4]):
        expect(run(decode, prompt, 8)[0][:8] == recomputed(prompt, 8), f"prompt {prompt}, max_tokens=8")


@cached_decode.check(
    mistake="The count is off by one, or a pass is run whose result nobody asks for.",
    look="'When it ends'",
)
def exact_count(decode):
    """It makes exactly max_tokens tokens, and does not feed the last."""
    for number in (0, 1, 4):
        answer, spy = run(decode, PROMPT, number)
        expect(len(answer) == number, f"max_tokens={number}: how many tokens")
        expect(len(spy.fed) == number, f"max_tokens={number}: how many forward passes")


FED = "The stop token was fed, although what follows it is not needed: look for it before the next forward pass."


def wrong_stop(answer: list[int], want: list[int], in_prompt: bool) -> str:
    """Which of the likely mistakes an answer with a stop token shows; else nothing."""
    if answer == want[:-1] and not in_prompt:
        return "The answer leaves the stop token out: it is part of it."
    if len(answer) > len(want) and answer[: len(want)] == want:
        return "The answer goes on after a stop token."
    if in_prompt and len(answer) < len(want):
        return "The answer stops because of a token of the prompt: only the answer's own tokens count."
    return ""


@cached_decode.check(
    mistake="With stop tokens the answer differs from the one without by more than where it ends.",
    look="'When it ends'",
)
def stops(decode):
    """A stop token ends the answer, and is part of it."""
    whole = recomputed(PROMPT, 8)
    for stop_ids, name in (
        ((whole[0],), "the answer's first token"), ((whole[3], 96), "the fourth, among two ids"),
        ({PROMPT[-1]}, "a token of the prompt"),
    ):
        answer, spy = run(decode, PROMPT, 8, stop_ids)
        want = recomputed(PROMPT, 8, stop_ids)
        expect(answer == want, f"max_tokens=8, stop at {name}", wrong_stop(answer, want, PROMPT[-1] in stop_ids))
        expect(len(spy.fed) == len(answer), f"max_tokens=8, stop at {name}: how many forward passes", FED)


@cached_decode.check(
    mistake="The new tokens were appended to the list that was handed in: copy it first.",
    look="'What is fed'",
)
def prompt_unchanged(decode):
    """The caller's prompt is left alone."""
    prompt = list(PROMPT)
    answer, _ = run(decode, prompt, 3)
    expect(prompt == PROMPT and len(answer) == 3, "the prompt's list after the call")


EXERCISE = Exercise(
    "02_kv_cache", "Decode with a KV cache", 35, 2, "01_decode_loop", (kv_cache, cached_decode), importance=3
)
