"""Exercise 7: attention over a text whose keys and values lie in blocks.

For the second task the truth is plain Python in double precision: one token, one head, one sum at a time.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from minillm.course.grading.tasks import Exercise, Task, close, expect

TOLERANCE = 1e-4

gather = Task(
    "gather",
    "gather",
    hints=(
        "Position 0 lies in the first block of the table, in its first place. Where does position block_size lie?",
        "`store[block_table]` picks whole blocks in the table's order, [blocks, block_size, Hkv, D]. What is too much?",
        "Blocks and places become one axis with flatten(0, 1); of that run, keep the first num_tokens.",
    ),
)
paged_attention = Task(
    "paged_attention",
    "paged_attention",
    hints=(
        "Gather the keys and the values into one run each, [S, Hkv, D]. After that it is attention as you know it.",
        "Query head h reads KV head h // G: repeat each KV head G times, next to itself. "
        "The i-th of n new tokens stands at position num_tokens - n + i, and sees up to there.",
        "k and v: repeat_interleave(G, dim=1). scores = torch.einsum('nhd,shd->nhs', q, k) / D ** 0.5, "
        "-inf where s > num_tokens - n + i; softmax over s; torch.einsum('nhs,shd->nhd', weights, v).",
    ),
)
EXERCISE = Exercise(
    name="07_paged_attention",
    title="Paged attention",
    minutes=30,
    difficulty=2,
    importance=3,
    chapter="04_paged_kv",
    tasks=(gather, paged_attention),
)


# -- the text in one run --------------------------------------------------------------------------


def numbered(blocks: int, block_size: int) -> Tensor:
    """A store [P, block_size, 1, 2] that says where everything lies: place i of block b holds b, i."""
    return torch.tensor([[[[float(b), float(i)]] for i in range(block_size)] for b in range(blocks)])


def gathered(answer, table: list[int], num_tokens: int, blocks: int = 8, block_size: int = 4) -> None:
    """Expect the places in the order of the text."""
    places = [[[float(block), float(i)]] for block in table for i in range(block_size)][:num_tokens]
    got = answer(numbered(blocks, block_size), list(table), num_tokens)
    expect(close(got, places, 1e-6), f"{num_tokens} tokens, table {table}, blocks of {block_size}")


@gather.check(
    mistake="The result is [num_tokens, Hkv, D], one entry per token, read from the block that the table names.",
    look="'The text in one run'",
)
def one_block(answer):
    """One full block comes whole, from where the table says."""
    gathered(answer, [5], 4)


@gather.check(
    mistake="Blocks were read in the order in which they lie in the store, or side by side from the first one.",
    look="'The text in one run'",
)
def table_order(answer):
    """Blocks come in the table's order."""
    gathered(answer, [6, 1, 3], 12)


@gather.check(
    mistake="The last block was taken whole: its further places hold nothing of this text.",
    look="'The text in one run'",
)
def last_block(answer):
    """A part-filled last block gives only what is stored."""
    gathered(answer, [2, 7, 4], 9)
    gathered(answer, [3, 0], 7)


@gather.check(
    mistake="The whole table was read; it may hold blocks for tokens that are still to come.",
    look="'The text in one run'",
)
def reserved_blocks(answer):
    """Blocks that are only reserved are left out."""
    gathered(answer, [7, 2, 5], 8)
    gathered(answer, [1, 6], 1)


@gather.check(
    mistake="A size was written into the code as a number: take it from store.shape.",
    look="'The text in one run'",
)
def other_sizes(answer):
    """Any block size, any number of heads."""
    gathered(answer, [2, 0, 3], 7, blocks=4, block_size=3)
    store = torch.randn(3, 2, 5, 3, generator=torch.Generator().manual_seed(8))
    rows = [store[2, 0].tolist(), store[2, 1].tolist(), store[1, 0].tolist()]
    expect(close(answer(store, [2, 1], 3), rows, 1e-6), "3 tokens, table [2, 1], blocks of 2, 5 heads")


@gather.check(
    mistake="The entries were copied into a tensor of another dtype: a store in 8 or 16 bits is read as it is.",
    look="'The text in one run'",
)
def own_dtype(answer):
    """What is gathered has the store's dtype, and the store stays as it was."""
    store = torch.arange(48).view(4, 3, 2, 2).to(torch.int8)
    before = store.clone()
    got = answer(store, [2, 0], 5)
    expect(got.dtype == torch.int8, "5 tokens of a store of int8: the dtype")
    expect(torch.equal(store, before), "5 tokens of a store of int8: the store afterwards", "The store was changed.")


# -- attention ------------------------------------------------------------------------------------


def pool(seed: int, blocks: int = 6, block_size: int = 4, kv_heads: int = 2, head_dim: int = 4):
    """Keys and values [P, block_size, Hkv, D] of a pool in use."""
    draw = torch.Generator().manual_seed(seed)
    return (torch.randn(blocks, block_size, kv_heads, head_dim, generator=draw) for _ in range(2))


def queries(seed: int, new: int = 1, heads: int = 2, head_dim: int = 4) -> Tensor:
    """q [n, Hq, D]."""
    return torch.randn(new, heads, head_dim, generator=torch.Generator().manual_seed(1000 + seed))


def truth(q: Tensor, keys: Tensor, values: Tensor, table: list[int], num_tokens: int) -> list:
    """[n, Hq, D] in double precision, without a tensor operation."""
    new, heads, head_dim = q.shape
    kv_heads = keys.shape[2]
    text_k = [place for block in table for place in keys[block].tolist()][:num_tokens]  # [S][Hkv][D]
    text_v = [place for block in table for place in values[block].tolist()][:num_tokens]

    def one(query: list[float], position: int, head: int) -> list[float]:
        seen = range(position + 1)
        scores = [math.fsum(a * b for a, b in zip(query, text_k[s][head], strict=True)) for s in seen]
        weights = [math.exp((score - max(scores)) / math.sqrt(head_dim)) for score in scores]
        total = math.fsum(weights)
        return [math.fsum(weights[s] * text_v[s][head][d] for s in seen) / total for d in range(head_dim)]

    return [
        [one(query, num_tokens - new + i, h // (heads // kv_heads)) for h, query in enumerate(token)]
        for i, token in enumerate(q.tolist())
    ]


def agrees(answer, q: Tensor, keys: Tensor, values: Tensor, table: list[int], num_tokens: int) -> bool:
    """Whether an answer gives the truth, on copies that it may spoil."""
    got = answer(q.clone(), keys.clone(), values.clone(), list(table), num_tokens)
    return close(got, truth(q, keys, values, table, num_tokens), TOLERANCE)


@paged_attention.check(
    mistake="The weights of one token must be 1: is the softmax over the stored tokens, and the result [n, Hq, D]?",
    look="'Attention over blocks'",
)
def one_token(answer):
    """One stored token: every head gives that token's value."""
    keys, values = pool(0)
    expect(agrees(answer, queries(0), keys, values, [0], 1), "1 stored token in block 0, 1 new token, 2 heads")


POSITION_0 = "The one new token saw position 0 only: it stands at position num_tokens - n, and sees up to there."
AXIS = "The weights of a new token do not sum to 1 over the keys: the softmax runs over the wrong axis."


def gives(answer, want: Tensor, q: Tensor, keys: Tensor, values: Tensor, table: list[int], num_tokens: int) -> bool:
    """Whether an answer, on copies that it may spoil, gives `want`."""
    got = torch.as_tensor(answer(q.clone(), keys.clone(), values.clone(), list(table), num_tokens))
    return got.shape == want.shape and torch.allclose(got.to(want.dtype), want, atol=TOLERANCE)


@paged_attention.check(
    mistake="Keys or values were read from where the text would lie without a table: in one run from slot 0.",
    look="'The text in one run'",
)
def table_is_used(answer):
    """The table says where a block lies."""
    keys, values = pool(1)
    keys[[4, 1]] = 0.0  # equal weights, whatever scores are divided by
    given = queries(1), keys, values, [4, 1], 8
    asked = "8 stored tokens in blocks 4 and 1, their keys 0"
    right = agrees(answer, *given)
    expect(right or not gives(answer, values[4, :1], *given), asked, POSITION_0, "'Several new tokens'")
    ones = torch.ones_like(values)
    expect(right or gives(answer, ones[0, :1], given[0], keys, ones, *given[3:]), asked, AXIS,
           "'Attention over blocks'")
    expect(right, asked)
    q = queries(1)
    keys[1, 2] = 100 * q[0]  # all weight on position 6
    expect(agrees(answer, q, keys, values, [4, 1], 8), "the same, with one key of block 1 that fits the query")


@paged_attention.check(
    mistake="Without the division by sqrt(D) the softmax is too sharp; by D itself it is too flat.",
    look="'Attention over blocks'",
)
def scaled(answer):
    """Scores are divided by the root of head_dim."""
    keys, values = pool(2, head_dim=16)
    expect(agrees(answer, queries(2, head_dim=16), keys, values, [2, 5], 8), "head_dim 16, 8 stored tokens")


@paged_attention.check(
    mistake="Query head h reads KV head h // G, where G = Hq / Hkv; h % Hkv deals the heads out in turns.",
    look="'Attention over blocks'",
)
def grouped(answer):
    """Neighbouring query heads share a KV head."""
    keys, values = pool(3)
    expect(agrees(answer, queries(3, heads=6), keys, values, [3, 0], 8), "6 query heads, 2 KV heads")


@paged_attention.check(
    mistake="A part-filled block ends in places that nobody wrote; a weight of 0 does not help: 0 times NaN is NaN.",
    look="'The text in one run'",
)
def part_filled(answer):
    """Of the last block, only what is stored is read."""
    keys, values = pool(4)
    keys[1, 2:], values[1, 2:] = torch.nan, torch.nan
    expect(agrees(answer, queries(4), keys, values, [5, 1], 6), "6 stored tokens in blocks 5 and 1, 4 to a block")


@paged_attention.check(
    mistake="Off by one at the edge of a block: 8 tokens fill two blocks of 4, a third may be reserved but is empty.",
    look="'The text in one run'",
)
def full_blocks(answer):
    """A text that ends with its block needs no further one."""
    keys, values = pool(5)
    keys[0], values[0] = torch.nan, torch.nan
    expect(agrees(answer, queries(5), keys, values, [2, 4, 0], 8), "8 stored tokens, table [2, 4, 0], 4 to a block")


@paged_attention.check(
    mistake="Several new tokens are stored at once, and each may look only up to its own position, num_tokens - n + i.",
    look="'Several new tokens'",
)
def causal(answer):
    """A new token sees itself and nothing behind it."""
    keys, values = pool(6)
    expect(agrees(answer, queries(6, new=3), keys, values, [1, 3], 8), "3 new tokens, the last of 8 stored ones")


@paged_attention.check(
    mistake="Each part is right, but not together: new tokens in several blocks see each other over the blocks' edges, "
    "and each of their heads reads the KV head of its group.",
    look="'Several new tokens'",
)
def whole_prompt(answer):
    """A whole prompt over several blocks, with grouped heads of any size."""
    keys, values = pool(8, block_size=3, head_dim=12)
    q = queries(8, new=8, heads=8, head_dim=12)
    expect(agrees(answer, q, keys, values, [4, 0, 2], 8), "8 new tokens, blocks of 3, 8 query and 2 KV heads of 12")


@paged_attention.check(
    mistake="An operation in place (`*=`, `/=`, an assignment into a slice) wrote into the cache or the query.",
    look="'Attention over blocks'",
)
def left_alone(answer):
    """Nothing that was passed in is changed."""
    keys, values = pool(7)
    given = queries(7, new=2), keys, values
    before, table = [tensor.clone() for tensor in given], [3, 2]
    answer(*given, table, 7)
    same = all(torch.equal(a, b) for a, b in zip(given, before, strict=True)) and table == [3, 2]
    expect(same, "q, keys, values and table, looked at before and after the call")
