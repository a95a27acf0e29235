"""Exercise 5: a block pool and a block table."""

from __future__ import annotations

import random

from minillm.course.grading.tasks import Exercise, Task, expect
from minillm.ladder import paged

pool = Task(
    "block_pool",
    "BlockPool",
    hints=(
        "Keep the numbers of the free blocks in a list. Everything else follows from who moves numbers in and out.",
        "blocks_for rounds up: 5 tokens in blocks of 4 need 2. take looks at how many are free before it moves any.",
        "blocks_for: -(-num_tokens // block_size). take: if number > len(free), return None; else cut that many off "
        "the list. release: first look at every block, and refuse one that is free or stands there twice; then put "
        "them back.",
    ),
)


@pool.check(
    mistake="take must return a list of so many block numbers, each from 0 to num_blocks - 1, and none of them twice.",
    look="'The pool'",
)
def takes_different_blocks(BlockPool):
    """Takes as many different blocks as asked, all of them the pool's."""
    pool = BlockPool(6, 4)
    first, second = pool.take(2), pool.take(3)
    expect(isinstance(first, list) and len(first) == 2 and len(second) == 3, "6 blocks: take(2), then take(3)")
    expect(len({*first, *second}) == 5, "6 blocks: take(2), take(3): is a block handed out twice?")
    expect({*first, *second} <= set(range(6)), "6 blocks: take(2), take(3): are these blocks of the pool?")


@pool.check(
    mistake="The list of free blocks belongs to the class, or to the module, instead of to each pool.",
    look="'The pool'",
)
def pools_are_apart(BlockPool):
    """Two pools do not share blocks."""
    one, other = BlockPool(4, 4), BlockPool(4, 4)
    one.take(3)
    expect(len(other.take(3) or []) == 3, "two pools of 4 blocks: take(3) from each")


@pool.check(
    mistake="The count is off by one: no tokens need no block, 1 to block_size need one, one more needs two.",
    look="'How many blocks'",
)
def blocks_for_counts(BlockPool):
    """Blocks_for rounds up, and a full last block is not one too few or too many."""
    for size in (1, 4, 16):
        pool = BlockPool(3, size)
        for tokens in range(3 * size + 1):
            touched = {token // size for token in range(tokens)}
            expect(pool.blocks_for(tokens) == len(touched), f"blocks_for({tokens}) with blocks of {size}")


@pool.check(
    mistake="The pool refuses although exactly enough blocks are free: compare with > and not with >=.",
    look="'The pool'",
)
def hands_out_the_last(BlockPool):
    """Hands out the very last block."""
    pool = BlockPool(3, 4)
    expect(sorted(pool.take(3) or []) == [0, 1, 2], "3 blocks, all free: take(3)")


TOOK_ALL = (
    "take(0) asks for nothing, and while blocks are free it was given some, or None: of a list, [-0:] is all of it."
)


@pool.check(
    mistake="take(0) was refused because nothing is free: it asks for nothing, so it gets an empty list.",
    look="'All or nothing'",
)
def takes_none(BlockPool):
    """Taking no block is never refused."""
    pool = BlockPool(2, 4)
    pool.take(2)
    expect(pool.take(0) == [], "2 blocks: take(2), then take(0)")
    pool = BlockPool(3, 4)
    expect(pool.take(0) == [], "3 blocks, all free: take(0)", TOOK_ALL)
    expect(len(pool.take(3) or []) == 3, "3 blocks, all free: take(0), then take(3)", TOOK_ALL)


@pool.check(
    mistake="Blocks were taken one by one before it was known that there are too few, and they are lost now.",
    look="'All or nothing'",
)
def refused_take(BlockPool):
    """A refused take returns None and changes nothing."""
    pool = BlockPool(3, 4)
    kept = pool.take(1)
    expect(pool.take(3) is None, "3 blocks: take(1), then take(3)")
    rest = pool.take(2)
    expect(rest is not None and len({*kept, *rest}) == 3, "3 blocks: take(1), take(3), then take(2)")


@pool.check(
    mistake="What is released does not come back, so the pool runs dry after a while.",
    look="'Giving back'",
)
def released_blocks_return(BlockPool):
    """Released blocks can be taken again."""
    pool = BlockPool(4, 4)
    for turn in range(5):
        blocks = pool.take(4)
        expect(blocks is not None and len(set(blocks)) == 4, f"4 blocks: take(4) and release, turn {turn + 1}")
        pool.release(list(blocks))


NEVER_TAKEN = "A block that was never taken is free: to release it must be refused too."
ONE_OF_MANY = "A free block was accepted because it stands in a list with others: each of the list must be looked at."


def refuses(pool, blocks: list[int]) -> bool:
    """Whether a pool raises ValueError for the release of these blocks."""
    try:
        pool.release(list(blocks))
    except ValueError:
        return True
    return False


@pool.check(
    mistake="A second release of the same block is accepted, so that two requests will be given it.",
    look="'Giving back'",
)
def double_release(BlockPool):
    """A block that is free already is refused."""
    pool = BlockPool(4, 4)
    blocks = pool.take(2)
    pool.release(blocks[:1])
    expect(refuses(pool, blocks[:1]), "4 blocks: take(2), one of them released twice")
    expect(len(pool.take(3) or []) == 3, "4 blocks: take(2), one of them released twice, then take(3)")
    expect(refuses(BlockPool(2, 4), [0]), "a new pool: the release of a block that was not taken", NEVER_TAKEN)


@pool.check(
    mistake="Of a list with a free block in it, others were freed before it was refused: look at all of them first.",
    look="'Giving back'",
)
def refused_release(BlockPool):
    """A refused release changes nothing."""
    for order in (1, -1):
        pool = BlockPool(4, 4)
        one, other, free = pool.take(3)
        pool.release([free])
        expect(refuses(pool, [one, other, free][::order]), "take(3), one released; then all three", ONE_OF_MANY)
        rest = pool.take(2)
        expect(pool.take(1) is None and not {one, other} & set(rest or [one]),
               "4 blocks: take(3), one released; all three released, which must be refused; then take(2), take(1)")


@pool.check(
    mistake="A block that stands twice in one call is freed twice, so that two requests will be given it: after its "
    "first place it is free already.",
    look="'Giving back'",
)
def twice_in_a_call(BlockPool):
    """A block that stands twice in one release is refused."""
    pool = BlockPool(3, 4)
    one, other = pool.take(2)
    expect(refuses(pool, [one, other, one]), "3 blocks: take(2), then one of them twice in one release")
    expect(pool.take(2) is None, "3 blocks: take(2), one of them twice in one release, then take(2)",
           "The release was refused, but something was freed before: look at all of the list first.")


@pool.check(
    mistake="The pool keeps, or empties, a list that belongs to the caller: take numbers from it, and leave it alone.",
    look="'Giving back'",
)
def lists_are_the_callers(BlockPool):
    """A list that was handed over stays the caller's."""
    pool = BlockPool(3, 4)
    blocks = pool.take(3)
    pool.release(blocks)
    expect(len(blocks) == 3, "3 blocks: take(3), release them: the list after the call")
    blocks.clear()
    expect(len(pool.take(3) or []) == 3, "3 blocks: take(3), release them, the caller clears the list, then take(3)")


table = Task(
    "block_table",
    "BlockTable",
    hints=(
        "The table is a list: entry i is the block that holds the i-th group of block_size tokens.",
        "grow compares how many blocks the new length needs with how many the table has, and takes the difference. "
        "slot needs the block of a position, and the place inside of it: a division and its remainder.",
        "missing = pool.blocks_for(num_tokens) - len(blocks); slot: blocks[position // size] * size + position % size.",
    ),
)


@table.check(
    mistake="grow must take blocks_for(num_tokens) blocks from the pool, and append them to the table.",
    look="'The table'",
)
def first_blocks(BlockTable):
    """Takes the blocks for its first tokens."""
    pool = paged.BlockPool(8, 4)
    table = BlockTable(pool)
    grown = table.grow(6)
    expect(len(table.blocks) == 2 and pool.num_live == 2, "an empty table, blocks of 4: grow(6)")
    expect(grown is True, "an empty table, 8 free blocks of 4: what grow(6) returns",
           "The blocks were taken, but grow did not return True.")


IN_FRONT = (
    "The blocks that the table had are still there, but moved: new blocks stand behind the old ones, since the table "
    "is in the order of the text."
)


@table.check(
    mistake="grow takes all blocks anew; the stored keys and values of the earlier tokens are lost with the old ones.",
    look="'Growing'",
)
def keeps_its_blocks(BlockTable):
    """Keeps the blocks that it has when it grows."""
    pool = paged.BlockPool(8, 4)
    table = BlockTable(pool)
    table.grow(6)
    before = list(table.blocks)
    table.grow(14)
    asked = "blocks of 4: grow(6), then grow(14)"
    expect(not set(before) <= set(table.blocks) or table.blocks[:2] == before, asked, IN_FRONT)
    expect(table.blocks[:2] == before and len(set(table.blocks)) == 4, asked)


@table.check(
    mistake="Nothing was missing, and grow did not return True: needing no further block is not a refusal.",
    look="'Growing'",
)
def nothing_missing(BlockTable):
    """Says True where nothing is missing."""
    table = BlockTable(paged.BlockPool(8, 4))
    for tokens in (0, 5, 6, 7, 7):
        grown = table.grow(tokens)
        expect(grown is True, f"8 blocks of 4: grow(0), grow(5), grow(6), grow(7), twice: what grow({tokens}) returns")


@table.check(
    mistake="The new block comes one token early or late: at a full block, one more token needs one more block.",
    look="'Growing'",
)
def edge_of_a_block(BlockTable):
    """Takes a block when the first token behind a full one comes, and neither before nor after."""
    for size in (1, 3, 4):
        pool = paged.BlockPool(12, size)
        table = BlockTable(pool)
        for tokens in range(1, 3 * size + 2):
            table.grow(tokens)
            held = len({token // size for token in range(tokens)})
            expect(len(table.blocks) == held, f"blocks of {size}, growing token by token to {tokens}")


@table.check(
    mistake="A slot is the block's number times the block's size, plus the place inside the block (the remainder).",
    look="'Where a token lies'",
)
def finds_slots(BlockTable):
    """Finds each token's slot."""
    draw = random.Random(5)
    for size in (1, 3, 4):
        order = draw.sample(range(10), 4)
        table = BlockTable(paged.BlockPool(10, size))
        table.blocks = list(order)
        laid_out = [block * size + place for block in order for place in range(size)]
        for position, slot in enumerate(laid_out):
            expect(table.slot(position) == slot, f"table {order}, blocks of {size}: slot({position})")


@table.check(
    mistake="When the pool is dry, take gives None: grow must return False, and the table must stay as it is.",
    look="'Growing'",
)
def refused_grow(BlockTable):
    """A refused grow returns False and leaves table and pool as they were."""
    pool = paged.BlockPool(3, 4)
    table = BlockTable(pool)
    table.grow(5)
    before = list(table.blocks)
    expect(table.grow(13) is False, "3 blocks of 4: grow(5), then grow(13)")
    expect(table.blocks == before and pool.num_live == 2, "3 blocks of 4: what is left after grow(5), grow(13)")
    expect(table.grow(12) is True, "3 blocks of 4: grow(5), grow(13), then grow(12)")


@table.check(
    mistake="free must release every block, the last one too, and forget them: a second free has nothing to give.",
    look="'The end'",
)
def gives_back(BlockTable):
    """Gives everything back at the end, once."""
    pool = paged.BlockPool(5, 4)
    table = BlockTable(pool)
    table.grow(17)
    table.free()
    expect(pool.num_live == 0 and table.blocks == [], "5 blocks of 4: grow(17), then free()")
    table.free()
    expect(table.grow(4) is True and len(table.blocks) == 1, "grow(17), free(), free(), then grow(4)")


EXERCISE = Exercise(
    "05_block_pool", "Block pool and block table", 35, 2, "04_paged_kv", (pool, table), importance=3
)
