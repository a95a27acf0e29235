"""Exercise 6: prefix sharing with reference counts."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

from minillm.course.grading.tasks import Exercise, Task, expect

SIZE = 4
A = [1, 2, 3, 4, 5, 6, 7, 8]  # two blocks


def blocks_for(tokens: Sequence[int]) -> int:
    """How many blocks hold these tokens."""
    return -(-len(tokens) // SIZE)


def store(pool, tokens: Sequence[int]) -> list[int]:
    """Let a request find what it can, take the rest and enter its tokens; its table."""
    hits = list(pool.match(list(tokens)))
    pool.share(hits)
    table = hits + list(pool.take(blocks_for(tokens) - len(hits)))
    pool.enter(list(tokens), list(table))
    return table


def sound(pool, tables: Sequence[Sequence[int]]) -> bool:
    """Whether the books agree with the tables: references, states, and an index that leads there and back."""
    held = Counter(block for table in tables for block in table)
    for block, references in enumerate(pool.references):
        states = (block in pool.free) + (block in pool.cached)
        if references != held[block] or states != (references == 0):
            return False
        if (block in pool.cached and block not in pool.key_of) or (block in pool.free and block in pool.key_of):
            return False
    return {block: tuple(key) for key, block in pool.block_of.items()} == {b: tuple(k) for b, k in pool.key_of.items()}


task = Task(
    "sharing_pool", "SharingPool",
    hints=(
        "Write down for each method which of references, free, cached, block_of and key_of it may change. match "
        "changes none of them.",
        "A prefix's key for block i is tuple(tokens[: (i + 1) * block_size]). match may look at the ends block_size, "
        "2 * block_size, … below len(tokens). take has to clean both dicts when it takes a cached block.",
        "range(block_size, len(tokens), block_size) are match's ends. release: for block in reversed(blocks): count "
        "down; at 0 cached[block] = None if it is in key_of, else free.append(block). take: free.pop(), else block, _ "
        "= cached.popitem(last=False) and del block_of[key_of.pop(block)].",
    ),
)


@task.check(
    mistake="take must return so many different blocks and set references of each to 1; what it takes is free no more.",
    look="'Taking'",
)
def takes_blocks(SharingPool):
    """Takes different blocks, each with one reference."""
    pool = SharingPool(5, SIZE)
    table = pool.take(3)
    expect(len(set(table)) == 3 and [pool.references[b] for b in table] == [1, 1, 1], "5 blocks: take(3)")
    expect(sound(pool, [table]) and pool.num_available == 2, "5 blocks: the books after take(3)")


@task.check(
    mistake="Blocks were taken before it was known that there are too few, or the last one is never given.",
    look="'Taking'",
)
def refused_take(SharingPool):
    """A refused take changes nothing."""
    pool = SharingPool(4, SIZE)
    table = list(pool.take(1))
    expect(pool.take(4) is None and sound(pool, [table]), "4 blocks: take(1), then take(4)")
    rest = pool.take(3)
    expect(rest is not None and sound(pool, [table, rest]), "4 blocks: take(1), take(4), then take(3)")


@task.check(
    mistake="take(0) was refused because nothing can be taken: it asks for nothing, so it gets an empty list.",
    look="'Taking'",
)
def takes_none(SharingPool):
    """Taking no block is never refused."""
    pool = SharingPool(2, SIZE)
    table = list(pool.take(2))
    expect(pool.take(0) == [] and sound(pool, [table]), "2 blocks: take(2), then take(0)")


@task.check(
    mistake="Blocks without an entry in the index belong to free, and their references go back to 0.",
    look="'Releasing'",
)
def released_are_free(SharingPool):
    """A released block is free again if the index does not know it."""
    pool = SharingPool(4, SIZE)
    table = list(pool.take(3))
    pool.release(list(table))
    expect(sound(pool, []) and len(pool.free) == 4, "4 blocks: take(3), release them")


@task.check(
    mistake="match finds nothing, or blocks of another place: a key is the tuple of all tokens up to the block's end.",
    look="'Entering' and 'Matching'",
)
def finds_a_prefix(SharingPool):
    """Finds the blocks of a known prefix, in order."""
    pool = SharingPool(6, SIZE)
    table = list(pool.take(2))
    pool.enter(A, list(table))
    expect(list(pool.match([*A, 9])) == table, "8 tokens entered; the same and one more: match")
    expect(list(pool.match([*A[:4], 90, 91, 92, 93, 94])) == table[:1], "only the first 4 tokens are the same: match")
    expect(list(pool.match([90, *A])) == [], "the same tokens behind another one: match")


@task.check(
    mistake="A prompt that is known as a whole is found as a whole, and nothing is left to compute logits from.",
    look="'Matching'",
)
def one_token_left(SharingPool):
    """Leaves one token to compute."""
    pool = SharingPool(6, SIZE)
    table = list(pool.take(2))
    pool.enter(A, list(table))
    for length, blocks in ((8, 1), (4, 0), (9, 2), (5, 1), (1, 0)):
        expect(list(pool.match([*A, 9][:length])) == table[:blocks], f"8 tokens entered, a prompt of {length}: match")


@task.check(
    mistake="The key holds the block's own tokens only; a block's content depends on all tokens before it.",
    look="'The index'",
)
def parents_count(SharingPool):
    """The same tokens behind another beginning are no match."""
    pool = SharingPool(8, SIZE)
    one, other = list(pool.take(2)), list(pool.take(2))
    pool.enter([1, 2, 3, 4, 9, 9, 9, 9], list(one))
    pool.enter([5, 6, 7, 8, 9, 9, 9, 9], list(other))
    expect(list(pool.match([5, 6, 7, 8, 9, 9, 9, 9, 0])) == other, "1 2 3 4 9 9 9 9 and 5 6 7 8 9 9 9 9: match")
    expect(list(pool.match([9, 9, 9, 9, 0])) == [], "1 2 3 4 9 9 9 9 and 5 6 7 8 9 9 9 9: match 9 9 9 9 0")


@task.check(
    mistake="A block that is not full yet is entered: its next token would change what others believe it holds.",
    look="'Entering'",
)
def full_blocks_only(SharingPool):
    """Only full blocks are entered."""
    pool = SharingPool(4, SIZE)
    table = list(pool.take(2))
    pool.enter(A[:6], list(table))
    expect(set(pool.key_of) == {table[0]} and sound(pool, [table]), "6 tokens in two blocks of 4: what is entered")


@task.check(
    mistake="A second block for the same prefix takes the first one's place in the index, which others may hold.",
    look="'Entering'",
)
def first_block_stays(SharingPool):
    """A prefix that is known keeps its block."""
    pool = SharingPool(6, SIZE)
    first, second = list(pool.take(2)), list(pool.take(2))
    pool.enter(A, list(first))
    pool.enter(A, list(second))
    expect(list(pool.match([*A, 9])) == first and sound(pool, [first, second]), "the same 8 tokens entered twice")


@task.check(
    mistake="References are not counted: share must add one, and release take one, before a block can be given away.",
    look="'Sharing'",
)
def last_holder(SharingPool):
    """A shared block lives until its last holder leaves."""
    pool = SharingPool(4, SIZE)
    table = list(pool.take(2))
    pool.enter(A, list(table))
    hits = list(pool.match([*A, 9]))
    pool.share(list(hits))
    expect([pool.references[b] for b in hits] == [2, 2], "two tables hold the same two blocks: references")
    pool.release(list(table))
    expect(sound(pool, [hits]) and pool.num_available == 2, "one of two holders has left")
    pool.release(list(hits))
    expect(sound(pool, []) and pool.num_available == 4, "both holders have left")


@task.check(
    mistake="What is released is forgotten although the index knows it, or a revived block stays among the cached.",
    look="'Releasing' and 'Sharing'",
)
def cached_and_revived(SharingPool):
    """A block that nobody holds stays cached, and a hit revives it."""
    pool = SharingPool(4, SIZE)
    table = list(pool.take(2))
    pool.enter(A, list(table))
    pool.release(list(table))
    expect(set(pool.cached) == set(table) and sound(pool, []), "8 tokens entered, then released")
    hits = list(pool.match([*A, 9]))
    expect(hits == table and sound(pool, []), "8 tokens entered, released, then matched")
    pool.share(list(hits))
    expect(sound(pool, [hits]) and pool.num_available == 2, "8 tokens entered, released, matched and shared")


@task.check(
    mistake="A cached block is given away although a free one was left; the free ones are worth nothing to anybody.",
    look="'Taking'",
)
def free_first(SharingPool):
    """Takes free blocks before cached ones."""
    pool = SharingPool(4, SIZE)
    table = list(pool.take(2))
    pool.enter(A, list(table))
    pool.release(list(table))
    pool.take(2)
    expect(list(pool.match([*A, 9])) == table, "4 blocks, 2 of them cached: take(2), then match")


@task.check(
    mistake="The index still leads to a block that holds something else now: somebody would read another's keys.",
    look="'Taking'",
)
def index_forgets(SharingPool):
    """The index forgets a cached block that is taken."""
    pool = SharingPool(4, SIZE)
    table = list(pool.take(2))
    pool.enter(A, list(table))
    pool.release(list(table))
    taken = list(pool.take(4))
    expect(list(pool.match([*A, 9])) == [] and sound(pool, [taken]), "4 blocks, 2 of them cached: take(4), then match")


@task.check(
    mistake="The head of a prefix is given away first, and its tail can never be found again: release from the last "
    "block to the first, and take what became cached first.",
    look="'Releasing' and 'Taking'",
)
def tail_first(SharingPool):
    """Gives the tail of a prefix away before its head."""
    pool = SharingPool(3, SIZE)
    table = list(pool.take(3))
    pool.enter([*A, 9, 10, 11, 12], list(table))
    pool.release(list(table))
    pool.take(1)
    expect(list(pool.match([*A, 9, 10, 11, 12, 13])) == table[:2], "12 tokens in a pool of 3, released: take(1), match")


@task.check(
    mistake="A younger cached block goes before an older one.",
    look="'Taking'",
)
def oldest_first(SharingPool):
    """Gives away what became cached longest ago."""
    pool = SharingPool(2, SIZE)
    for start in (10, 20):
        table = list(pool.take(1))
        pool.enter(list(range(start, start + 4)), list(table))
        pool.release(list(table))
    pool.share(list(pool.match([10, 11, 12, 13, 0])))
    pool.release(list(pool.match([10, 11, 12, 13, 0])))  # used again, so the other one is older now
    pool.take(1)
    expect(len(pool.match([10, 11, 12, 13, 0])) == 1 and not pool.match([20, 21, 22, 23, 0]),
           "two prefixes, the first used again: take(1), then which is left")


@task.check(
    mistake="match changes something: above all it must not renew a cached block, since a request that only asks, and "
    "then waits, has not used it.",
    look="'Matching'",
)
def match_only_looks(SharingPool):
    """A match alone leaves the order of the cached blocks as it was."""
    pool = SharingPool(2, SIZE)
    for start in (10, 20):
        table = list(pool.take(1))
        pool.enter(list(range(start, start + 4)), list(table))
        pool.release(list(table))
    pool.match([10, 11, 12, 13, 0])
    pool.take(1)
    expect(not pool.match([10, 11, 12, 13, 0]), "two prefixes, the older one matched: take(1), then which is left")


@task.check(
    mistake="A block without references is released once more, and will be given to two requests.",
    look="'Releasing'",
)
def double_release(SharingPool):
    """Refuses to release what nobody holds."""
    pool = SharingPool(3, SIZE)
    table = list(pool.take(1))
    pool.release(list(table))
    expect(refuses(pool, table), "take(1), release, release")
    expect(sound(pool, []), "take(1), release, release: the books")
    expect(refuses(pool, pool.take(1) * 2), "take(1), then its block twice in one release",
           "A block stands twice in one release and is held once: after its first place it is not held.")


@task.check(
    mistake="A release that is refused has released some of its blocks before: look at all of them first.",
    look="'Releasing'",
)
def refused_release(SharingPool):
    """A refused release changes nothing."""
    for order in (1, -1):
        pool = SharingPool(4, SIZE)
        table = list(pool.take(2))
        expect(refuses(pool, [*table, 3, 0][::order]) and sound(pool, [table]),
               "4 blocks: take(2), then all of the pool in one release: the books")
        expect(refuses(pool, [*table, *table[:1]][::order]) and sound(pool, [table]),
               "4 blocks: take(2), then both, and one of them again, in one release: the books")
    shared = [*table, *table]
    pool.share(list(table))
    pool.release(shared)
    expect(sound(pool, []), "two blocks with two references each, all released in one call",
           "A block may stand as often in a release as it is held.")


@task.check(
    mistake="A list of blocks or tokens was changed, by pop or reverse: a request goes on with its table.",
    look="'The methods'",
)
def lists_stay(SharingPool):
    """Lists that are handed over stay as they were."""
    pool = SharingPool(6, SIZE)
    table, tokens = list(pool.take(2)), list(A)
    before = list(table)
    pool.enter(tokens, table)
    pool.match(tokens)
    pool.share(table)
    pool.release(table)
    expect(table == before and tokens == A, "enter, match, share and release of 8 tokens in two blocks: the lists")


def refuses(pool, blocks: list[int]) -> bool:
    """Whether a pool raises ValueError for the release of these blocks."""
    try:
        pool.release(list(blocks))
    except ValueError:
        return True
    return False


@task.check(
    mistake="Each step seems right on its own, but after a while references, states or index disagree: which method "
    "changes one of them and not the others?",
    look="'Three states'",
)
def any_traffic(SharingPool):
    """The books stay right through any traffic."""
    for seed in range(3):
        draw, pool, tables = random.Random(seed), SharingPool(9, SIZE), []
        for turn in range(60):
            tokens = [draw.randrange(2) for _ in range(draw.randint(1, 4))] * 4
            if tables and (draw.random() < 0.5 or blocks_for(tokens) > pool.num_available):
                pool.release(tables.pop(draw.randrange(len(tables))))
            elif blocks_for(tokens) <= pool.num_available:
                tables.append(store(pool, tokens))
                told = {tuple(tokens[: (i + 1) * SIZE]): block for i, block in enumerate(tables[-1])}
                entered = {tuple(key): block for block, key in pool.key_of.items() if block in tables[-1]}
                expect(all(told.get(key) == block for key, block in entered.items()),
                       f"traffic drawn with seed {seed}, step {turn + 1}: is a block entered as what it holds?")
            expect(sound(pool, tables), f"traffic drawn with seed {seed}, step {turn + 1}: the books")


EXERCISE = Exercise(
    "06_prefix_sharing", "Prefix sharing with reference counts", 50, 3, "04_paged_kv", (task,), importance=2
)
