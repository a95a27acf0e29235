"""Exercise 13: the cache and the step of an engine whose other parts are the answers to earlier exercises.

The engine's truth is the loop without a cache. Where a check fails, each of the learner's parts is exchanged for
the package's in turn: the one whose exchange mends it is named. The grader has one notebook at a time, so there all
parts are the package's, and the marks are those of this exercise alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from traceback import extract_tb
from types import SimpleNamespace

import torch
from torch import Tensor

from minillm.course.grading.exercises.ex02_kv_cache import PROMPT, agrees, recomputed, small_model, tokens
from minillm.course.grading.parts import PACKAGE, PARTS, Part
from minillm.course.grading.tasks import Exercise, Task, Wrong, close, expect
from minillm.course.your_engine import Engine, Request, Store, Stuck
from minillm.ladder.request import SamplingParams

# -- the cache ----------------------------------------------------------------------------------------------------

paged_cache = Task(
    "paged_cache",
    "PagedCache",
    hints=(
        "Look at `OwnCaches` in the engine's file: the same loop over the rows, with a store and a table in place of "
        "a cache.",
        "The row's new tokens stand at positions num_kv to num_kv + count - 1; `table.slot(position)` says where each "
        "is stored. Attention is asked for num_kv + count tokens, since the new ones are stored by then.",
        "For each row: slots = [request.table.slot(p) for p in range(request.num_kv, end)]; store.write(layer, slots, "
        "k[row], v[row]); keys, values, blocks = store.read(layer, request.table.blocks); "
        "parts.paged_attention(q[row], keys, values, blocks, end). In the end torch.cat of all rows.",
    ),
)
HEADS, HEAD_DIM, SIZE = 2, 6, 4


def stand(Store=Store) -> SimpleNamespace:
    """What a cache needs of an engine: a store of 3 layers and 8 blocks of 4 tokens, and the package's attention."""
    config = SimpleNamespace(num_hidden_layers=3, num_key_value_heads=HEADS, head_dim=HEAD_DIM)
    return SimpleNamespace(store=Store(config, 8, SIZE), parts=PACKAGE)


class Moved(Store):
    """A store whose `read` returns copies in other places, and so another table, as in int8."""

    def read(self, layer: int, blocks) -> tuple[Tensor, Tensor, list[int]]:
        number = self.numbers.shape[2]
        return *self.numbers[layer].roll(1, dims=1), [(block + 1) % number for block in blocks]


def request(num_kv: int, *blocks: int) -> SimpleNamespace:
    """A request with `num_kv` tokens stored and this block table."""
    table = SimpleNamespace(blocks=list(blocks), slot=lambda position: slots(blocks)[position])
    return SimpleNamespace(num_kv=num_kv, table=table)


def slots(blocks: tuple[int, ...] | list[int]) -> list[int]:
    """Where the tokens of a table lie, one after the other."""
    return [block * SIZE + place for block in blocks for place in range(SIZE)]


def stored(engine, layer: int, one) -> tuple[Tensor, Tensor]:
    """Random keys and values [num_kv, Hkv, D] of a request, put into the store by another way."""
    _, k, v = tokens(one.num_kv, seed=100 + layer)
    for position, slot in enumerate(slots(one.table.blocks)[: one.num_kv]):
        engine.store.numbers[layer, 0, slot // SIZE, slot % SIZE] = k[position]
        engine.store.numbers[layer, 1, slot // SIZE, slot % SIZE] = v[position]
    return k, v


@paged_cache.check(
    mistake="For a request of which nothing is stored yet, attend must store k and v in its block, and return "
    "attention over these tokens.",
    look="'The cache'",
)
def one_row(PagedCache):
    """A prompt's tokens are stored, and attend to each other."""
    engine, one = stand(), request(0, 5)
    q, k, v = tokens(3, seed=1)
    got = PagedCache(engine, [(one, 3)]).attend(0, q, k.clone(), v.clone())
    expect(agrees(got, q, (k, v)), "a prompt of 3 tokens, table [5], blocks of 4")


@paged_cache.check(
    mistake="Keys or values do not lie where `table.slot(position)` says for the positions from num_kv on.",
    look="'Storing'",
)
def in_its_slots(PagedCache):
    """New keys and values are stored where the block table says, and nowhere else."""
    for num_kv, blocks in ((0, (3,)), (2, (3,)), (5, (6, 1))):
        engine, one = stand(), request(num_kv, *blocks)
        stored(engine, 1, one)
        before = engine.store.numbers.clone()
        q, k, v = tokens(2, seed=2)
        PagedCache(engine, [(one, 2)]).attend(1, q, k.clone(), v.clone())
        for position, slot in enumerate(slots(blocks)[num_kv : num_kv + 2]):
            before[1, :, slot // SIZE, slot % SIZE] = torch.stack((k[position], v[position]))
        asked = f"2 tokens after {num_kv} stored ones, table {list(blocks)}: the store afterwards"
        expect(close(engine.store.numbers.nan_to_num(99.0), before.nan_to_num(99.0), 1e-6), asked)


@paged_cache.check(
    mistake="A new token does not see all that is stored of its text, and itself: attention needs num_kv + count.",
    look="'Attending'",
)
def sees_what_is_stored(PagedCache):
    """A new token sees what was stored by earlier steps."""
    for num_kv in (3, 4, 7):
        engine, one = stand(), request(num_kv, 6, 1)
        before = stored(engine, 2, one)
        q, k, v = tokens(1, seed=3)
        got = PagedCache(engine, [(one, 1)]).attend(2, q, k.clone(), v.clone())
        expect(agrees(got, q, before, (k, v)), f"1 token after {num_kv} stored ones, table [6, 1], blocks of 4")


@paged_cache.check(
    mistake="Attention was given another table than the one that store.read returned, which may differ from "
    "request.table.blocks; or store.read was called before store.write.",
    look="'Attending'",
)
def table_of_read(PagedCache):
    """Attention reads by the table that the store returns."""
    engine, one = stand(Moved), request(5, 6, 1)
    before = stored(engine, 1, one)
    q, k, v = tokens(2, seed=6)
    got = PagedCache(engine, [(one, 2)]).attend(1, q, k.clone(), v.clone())
    expect(agrees(got, q, before, (k, v)), "2 tokens after 5 stored ones, a store whose `read` returns another table")


@paged_cache.check(
    mistake="Rows are mixed up: row by row, its own part of q, k and v, its own table, its own number of tokens; and "
    "the results in the rows' order.",
    look="'Rows'",
)
def rows_are_apart(PagedCache):
    """Rows of one step do not see each other."""
    engine = stand()
    rows = [(request(3, 4), 1), (request(0, 7, 2), 6), (request(5, 0, 5), 2)]
    q, k, v = tokens(9, seed=4)
    before = [stored(engine, 0, one) for one, _ in rows]
    got = PagedCache(engine, list(rows)).attend(0, q, k.clone(), v.clone())
    first = 0
    for number, ((_, count), earlier) in enumerate(zip(rows, before, strict=True), 1):
        part = slice(first, first + count)
        asked = f"rows of 1, 6 and 2 tokens, of which 3, 0 and 5 are stored: the result of row {number}"
        expect(agrees(got[part], q[part], earlier, (k[part], v[part])), asked)
        first += count


@paged_cache.check(
    mistake="The cache counted the tokens itself: `commit` does that, after the last layer.",
    look="'Storing'",
)
def counts_nothing(PagedCache):
    """Requests and rows stay as they were."""
    engine, rows = stand(), [(request(2, 3), 1), (request(0, 5), 3)]
    view = PagedCache(engine, rows)
    for layer in range(3):
        view.attend(layer, *tokens(4, seed=5))
    expect([(one.num_kv, count, one.table.blocks) for one, count in rows] == [(2, 1, [3]), (0, 3, [5])],
           "rows of 1 and 3 tokens after all layers: num_kv, counts and tables")


@paged_cache.check(
    mistake="The layers share a place in the store: write and read with the `layer` that attend is given.",
    look="'Storing'",
)
def layers_are_apart(PagedCache):
    """Each layer has its own keys and values."""
    engine, one = stand(), request(2, 3)
    view = PagedCache(engine, [(one, 1)])
    parts = [(stored(engine, layer, one), tokens(1, seed=20 + layer)) for layer in range(3)]
    for layer, (before, (q, k, v)) in enumerate(parts):
        expect(agrees(view.attend(layer, q, k.clone(), v.clone()), q, before, (k, v)), f"layer {layer} of 3")


# -- the engine ---------------------------------------------------------------------------------------------------

your_engine = Task(
    "your_engine",
    "MyEngine",
    hints=(
        "Five parts, one after the other, as in the heading of the engine's file: plan, reserve, forward, commit, "
        "free. Which of them does your engine lack?",
        "The rows are the pairs of `plan` whose `table.grow(num_kv + count)` is True. Their tokens lie one after the "
        "other in one list, and their positions in another. Row i of the logits belongs to token i of the list.",
        "rows = [(r, n) for r, n in self.scheduler.plan() if r.table.grow(r.num_kv + n)]; if not rows: return "
        "self.preempt(). tokens += r.tokens[r.num_kv : r.num_kv + n]; positions += range(...). following[r] = "
        "self.following(r, best[first : first + n]). self.scheduler.commit(rows, following.get). Free who is finished.",
    ),
)
PROMPTS = [PROMPT, [11], [90, 90, 4, 33, 8], [70, 12, 9]]
MOST_STEPS = 150  # a right engine needs 40 at most
# What may be wrong with a part, once it is known which.
SUSPECTS = {
    "KVCache": "Does it forget a layer, or what was stored before?",
    "Scheduler": "Does it starve a request, or count wrongly what was fed?",
    "BlockPool": "Does it leak: are blocks lost when they are released, given to two requests, or to a request that "
    "takes none?",
    "BlockTable": "Does it take the blocks that are missing, find each token's slot, and give all back?",
    "paged_attention": "Is its mask off by one, so that a token sees one too many or one too few?",
    "int8_encode": "Has every row a scale of its own?",
    "verify_greedy": "Does it accept too much: drafts after the first wrong one, or a wrong one?",
}


def judge(MyEngine, test: Callable[[type[Engine]], None]) -> None:
    """Run a test on the engine. If it fails, say which of the learner's parts is at fault, if one of them is."""
    try:
        test(MyEngine)
        return
    except Exception as error:
        failed = error
    for part in PARTS:
        if part.name in MyEngine.parts.own and mends(MyEngine, test, part.name):
            says = (f"Your {part.title}, of exercise {part.number}, is at fault: with the package's in its place this "
                    f"check passes. {raised(failed, part) or SUSPECTS[part.name]}")
            raise Wrong(what(failed), says, f"{part.exercise}.ipynb, and at its checks") from failed
    if MyEngine.parts.own and mends(MyEngine, test, *MyEngine.parts.own):
        raise Wrong(what(failed), "Several of your parts are at fault: with the package's in their places this check "
                    "passes.", "the checks of their exercises") from failed
    raise failed


def raised(error: Exception, part: Part) -> str:
    """What a part's notebook raised, with its line; nothing if the error came from elsewhere."""
    cell = f"<{part.exercise},"  # how `take_parts` names the cells of that notebook
    frames = [frame for frame in extract_tb(error.__traceback__) if frame.filename.startswith(cell)]
    if isinstance(error, Wrong) or not frames:
        return ""
    return f"Your {part.title} raised {type(error).__name__}: {error}, in the line `{frames[-1].line}`."


def what(error: Exception) -> str:
    """What was asked when it failed, or the error that came instead."""
    return str(error) if isinstance(error, Wrong) else f"{type(error).__name__}: {error}"


def mends(MyEngine, test: Callable[[type[Engine]], None], *names: str) -> bool:
    """Whether the test passes with the package's parts in these places."""
    parts = replace(MyEngine.parts, **{name: getattr(PACKAGE, name) for name in names})
    try:
        test(type(MyEngine.__name__, (MyEngine,), {"parts": parts}))
    except Exception:
        return False
    return True


class CountingModel:
    """The small model of exercise 2, which counts its forward passes."""

    def __init__(self) -> None:
        self.model, self.config, self.passes = small_model(), small_model().config, 0

    def forward(self, tokens: Tensor, positions: Tensor, cache, logit_rows: Tensor | None = None) -> Tensor:
        self.passes += 1
        return self.model.forward(tokens, positions, cache, logit_rows)


@cache
def truth(prompt: tuple[int, ...], number: int) -> list[int]:
    """The tokens of the loop without a cache."""
    return recomputed(list(prompt), number)


def served(engine: Engine, prompts: list[list[int]], number: int, asked: str, stop_ids=()) -> list[list[int]]:
    """The answers; that they have all ended is expected too."""
    try:
        return engine.serve(prompts, number, stop_ids, most_steps=len(engine.steps) + MOST_STEPS)
    except Stuck as stuck:
        raise Wrong(f"{asked}: {stuck}", STUCK) from None


STUCK = "The engine goes on for ever: a step must feed what `plan` says, and commit it, or preempt if no row has room."


def serves(engine: Engine, prompts: list[list[int]], number: int, asked: str) -> None:
    """Expect the loop's own tokens for each of these prompts."""
    expect(served(engine, prompts, number, asked) == [truth(tuple(prompt), number) for prompt in prompts], asked)


@your_engine.check(
    mistake="Which tokens are fed, at which positions, and whose logits are taken? After the prompt a request feeds "
    "its newest token alone. Or were its blocks given back too soon, before it had finished?",
    look="'The forward pass', and at 'Free'",
)
def one_request(MyEngine):
    """One request gets the tokens of the loop without a cache."""
    judge(MyEngine, lambda E: serves(E(CountingModel()), [PROMPT], 6, "one prompt of 7 tokens, 6 tokens of answer"))


@your_engine.check(
    mistake="A table is too short for what is stored in it: it needs room for num_kv + count tokens in all.",
    look="'Reserve'",
)
def tables_grow(MyEngine):
    """A table grows with its request."""
    for size in (1, 3, 4):
        asked = f"one prompt of 7 tokens, 6 tokens of answer, blocks of {size}"
        judge(MyEngine, lambda E, size=size, asked=asked:
              serves(E(CountingModel(), block_size=size), [PROMPT], 6, asked))


@your_engine.check(
    mistake="Rows are mixed up: tokens and positions lie row after row, and the last of a row's own logits says what "
    "follows it.",
    look="'The forward pass'",
)
def several_requests(MyEngine):
    """Requests of different lengths get their own tokens."""
    judge(MyEngine, lambda E: serves(E(CountingModel()), PROMPTS, 6, "prompts of 7, 1, 5 and 3 tokens"))


@your_engine.check(
    mistake="The model runs more often than it must: one forward pass takes the tokens of all rows of `plan`.",
    look="'The forward pass'",
)
def one_pass_a_step(MyEngine):
    """A step is one forward pass."""
    def test(E):
        model, asked = CountingModel(), "4 short prompts at once, 6 tokens each: forward passes in all"
        served(E(model), PROMPTS, 6, asked)
        expect(1 <= model.passes <= 6, asked)

    judge(MyEngine, test)


@your_engine.check(
    mistake="A prompt that is fed in chunks gives other tokens: the next chunk's tokens are those from num_kv on (not "
    "the last ones), its table has room for num_kv + count, and what is committed is what was fed.",
    look="'The forward pass', 'Reserve' and 'Commit'",
)
def prompts_in_chunks(MyEngine):
    """Prompts in chunks give the same tokens."""
    for budget in (2, 3, 5):
        asked = f"prompts of 7, 1, 5 and 3 tokens, {budget} tokens a step"
        judge(MyEngine, lambda E, budget=budget, asked=asked:
              serves(E(CountingModel(), max_batch=2, max_step_tokens=budget, block_size=4), PROMPTS, 5, asked))


@your_engine.check(
    mistake="A request never gets a turn, while others do: rows of `plan` are left out although there is room, or not "
    "committed.",
    look="'Plan'",
)
def all_have_a_turn(MyEngine):
    """Every request gets its turn, whatever comes after it."""
    def test(E):
        engine = E(CountingModel(), max_batch=2, max_step_tokens=4)
        first = [engine.add(prompt, 3) for prompt in PROMPTS]
        for _ in range(25):
            engine.add([8], 2)
            engine.advance()
        starved = [one.id for one in first if not one.finished]
        expect(not starved, "2 rows; prompts of 7, 1, 5 and 3 tokens, and then a new one of 1 token at every step: "
               f"requests {starved} of the first four have not ended after 25 steps")

    judge(MyEngine, test)


@your_engine.check(
    mistake="Blocks leak: not all of them are free after every request has ended, or one is free twice.",
    look="'Free'",
)
def blocks_come_back(MyEngine):
    """Who has ended gives all blocks back, at once."""
    def test(E):
        engine = E(CountingModel(), num_blocks=24, block_size=4)
        long, short = engine.add(PROMPT, 12), engine.add([11], 2)
        while not (long.finished and short.finished) and len(engine.steps) < MOST_STEPS:
            engine.advance()
            expect(not any(one.table.blocks for one in (long, short) if one.finished),
                   "an answer of 12 tokens beside one of 2: the table of one that has ended")
        expect(long.finished and short.finished, "an answer of 12 tokens beside one of 2: have both ended?")
        for prompts in (PROMPTS, PROMPTS[::-1]):
            served(engine, prompts, 7, "ten requests, one after the other, in 24 blocks")
        blocks = engine.pool.take(24)
        expect(blocks is not None and sorted(blocks) == list(range(24)),
               "24 blocks, ten requests that have ended: take(24) from the pool")

    judge(MyEngine, test)


@your_engine.check(
    mistake="A row whose blocks were refused was fed all the same, or was committed all the same, or the engine stands "
    "still when no row finds room.",
    look="'Reserve' and 'Commit'",
)
def little_room(MyEngine):
    """Rows wait where the pool is short, and the tokens stay the same."""
    for blocks in (5, 6, 8):
        asked = f"{blocks} blocks of 3 tokens; prompts of 7, 1, 5 and 3 tokens, 6 tokens of answer each"
        judge(MyEngine, lambda E, blocks=blocks, asked=asked:
              serves(E(CountingModel(), num_blocks=blocks, block_size=3, max_batch=3), PROMPTS, 6, asked))


def steps_needed(prompts: list[list[int]], number: int, max_batch: int, budget: int) -> int:
    """Steps of the package's scheduler where no row is refused blocks."""
    scheduler, steps = PACKAGE.Scheduler(max_batch, budget), 0
    requests = [Request(i, list(prompt), SamplingParams(max_tokens=number)) for i, prompt in enumerate(prompts)]
    for one in requests:
        scheduler.add(one)
    while not all(one.finished for one in requests):
        scheduler.commit(scheduler.plan(), lambda request: 7)
        steps += 1
    return steps


@your_engine.check(
    mistake="More steps than a right engine needs: rows of `plan` are left out, or refused, although blocks are free.",
    look="'Plan' and 'Reserve'",
)
def ample_room(MyEngine):
    """With blocks for all, no row waits."""
    def test(E):
        asked = "200 blocks of 2 tokens; prompts of 7, 1, 5 and 3 tokens, 6 tokens of answer each: the steps"
        engine = E(CountingModel(), max_batch=3, max_step_tokens=8, num_blocks=200, block_size=2)
        served(engine, PROMPTS, 6, asked)
        expect(len(engine.steps) == steps_needed(PROMPTS, 6, 3, 8), asked)

    judge(MyEngine, test)


@your_engine.check(
    mistake="A request goes on after its stop token, or ends before it.",
    look="'Commit'",
)
def stops(MyEngine):
    """A stop token ends a request."""
    whole = truth(tuple(PROMPT), 8)

    def test(E):
        asked = "a prompt of 7 tokens, stop at its answer's fourth"
        got = served(E(CountingModel()), [PROMPT], 8, asked, [whole[3]])
        expect(got == [whole[: whole.index(whole[3]) + 1]], asked)

    judge(MyEngine, test)


def half_right(tokens: list[int], number: int) -> list[int]:
    """A drafter that knows the answers: some of its drafts are all right, some wrong first, some in the middle."""
    for prompt in PROMPTS:
        made = len(tokens) - len(prompt)
        whole = truth(tuple(prompt), 12)
        if tokens[: len(prompt)] == prompt and tokens[len(prompt) :] == whole[:made]:
            drafts = whole[made : made + number]
            return [token if i != made % 3 else (token + 1) % 97 for i, token in enumerate(drafts)]
    return [0] * number


@your_engine.check(
    mistake="With drafts the tokens differ from those without: a row's `best` has a place for each token that it fed, "
    "in their order; or `following` was asked twice for a row, though the first call has taken its drafts.",
    look="'Commit'",
)
def drafts_change_nothing(MyEngine):
    """Drafts save steps, and change no token."""
    def test(E):
        engine = E(CountingModel(), drafter=half_right)
        serves(engine, PROMPTS, 9, "four prompts, 9 tokens each, drafts of which some are wrong")
        expect(len(engine.steps) < 9, "four prompts, 9 tokens each, drafts of which some are right: the steps")

    judge(MyEngine, test)


@your_engine.check(
    mistake="Without a pool, where each request has a KV cache of its own, the tokens differ.",
    look="'The forward pass'",
)
def own_caches(MyEngine):
    """It works with a KV cache for each request as well."""
    def test(E):
        serves(E(CountingModel(), paged=False, max_step_tokens=5), PROMPTS, 6,
               "four prompts, a KV cache for each, 5 tokens a step")

    judge(MyEngine, test)


@your_engine.check(
    mistake="With keys and values in 8 bits the tokens differ from the first on.",
    look="'The parts'",
)
def eight_bits(MyEngine):
    """Keys and values in 8 bits give the same first tokens."""
    judge(MyEngine, lambda E: serves(E(CountingModel(), int8=True), PROMPTS, 2, "four prompts, 2 tokens each, in int8"))


EXERCISE = Exercise(
    "13_your_engine", "Your engine", 45, 2, "06_speculative", (paged_cache, your_engine), importance=3
)
