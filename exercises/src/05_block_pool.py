# %% [markdown]
# # Exercise 5 · Block pool and block table
#
# In notebook 4 the cache was cut into blocks, and a request held a list of the blocks it needed. Here you write both
# parts: the pool, which knows what is free, and the table, which knows where each token lies.
#
# **To look at**: notebook 4, "Build: a block table"; in the package `minillm/ladder/paged.py`.

# %%
from minillm.course.grading import check, hint

# %% [markdown]
# ## The pool
#
# A pool has `num_blocks` blocks, numbered from 0, each with room for `block_size` tokens.
#
# **How many blocks.** `blocks_for(num_tokens)` says how many blocks hold so many tokens. No tokens need no block.
#
# **All or nothing.** `take(number)` hands out `number` free blocks, as a list of their numbers; none asked, an empty
# list. If fewer are free it returns `None` and changes nothing: a scheduler that is refused tries again later.
#
# **Giving back.** `release(blocks)` makes blocks free again. A block that is free already must not be released
# again, nor twice in one call, since two requests would be given it: raise a `ValueError`, before anything changes.
# The list stays the caller's: do not change it.
#
# You choose how the pool remembers what is free.

# %%
class BlockPool:
    """Which blocks are free."""

    def __init__(self, num_blocks, block_size):
        self.num_blocks, self.block_size = num_blocks, block_size
        ### BEGIN SOLUTION
        self.free = list(range(num_blocks))
        ### END SOLUTION

    def blocks_for(self, num_tokens):
        """How many blocks hold `num_tokens` tokens."""
        ### BEGIN SOLUTION
        return -(-num_tokens // self.block_size)
        ### END SOLUTION

    def take(self, number):
        """A list of `number` free blocks, which are free no longer; None, and nothing changed, if there are too few."""
        ### BEGIN SOLUTION
        if number > len(self.free):
            return None
        return [self.free.pop() for _ in range(number)]
        ### END SOLUTION

    def release(self, blocks):
        """Make `blocks` free again. Raises ValueError, and changes nothing, if one is free already or given twice."""
        ### BEGIN SOLUTION
        for block in blocks:
            if block in self.free or blocks.count(block) > 1:
                raise ValueError(f"block {block} is free already, or given twice")
        self.free.extend(blocks)
        ### END SOLUTION


# %%
check("block_pool", BlockPool)

# %% [markdown]
# ## The table
#
# One request's table is the list of its blocks, in the order of its tokens: with blocks of 4, tokens 0 to 3 lie in
# `blocks[0]`, tokens 4 to 7 in `blocks[1]`, wherever in the pool those are.
#
# **Growing.** `grow(num_tokens)` makes room for `num_tokens` stored tokens in all. What is there stays; only what is
# missing is taken from the pool, and that may be nothing. It returns `True`, or, if the pool refuses, `False`, and the
# table is as before. A request's length never shrinks here.
#
# **Where a token lies.** The keys and values of the whole pool are one long tensor. Block b owns its entries from
# `b * block_size` on. `slot(position)` is the entry of the request's token at `position`. A slot here is one token's
# place, not the run of places that chapter 2 reserved for a whole request.
#
# **The end.** `free()` gives all blocks back. The table is empty then, and could begin anew.
#
# The table works with any pool that has `block_size`, `blocks_for`, `take` and `release`. The checks below use the
# package's pool, so a mistake in yours above does not show here again.

# %%
class BlockTable:
    """Which blocks hold one request's tokens."""

    def __init__(self, pool):
        self.pool = pool
        self.blocks = []

    def grow(self, num_tokens):
        """Make room for `num_tokens` tokens in all; False, and nothing changed, if the pool has too few blocks."""
        ### BEGIN SOLUTION
        missing = self.pool.blocks_for(num_tokens) - len(self.blocks)
        taken = self.pool.take(missing)
        if taken is None:
            return False
        self.blocks += taken
        return True
        ### END SOLUTION

    def slot(self, position):
        """The entry of the pool's long tensor that holds the token at `position`."""
        ### BEGIN SOLUTION
        size = self.pool.block_size
        return self.blocks[position // size] * size + position % size
        ### END SOLUTION

    def free(self):
        """Give every block back to the pool."""
        ### BEGIN SOLUTION
        self.pool.release(self.blocks)
        self.blocks = []
        ### END SOLUTION


# %%
check("block_table", BlockTable)

# %% [markdown]
# ## Both together
#
# Two requests grow by turns in a pool of eight blocks. Their blocks end up mixed; each table still finds its tokens.
# Then the first one ends.

# %% tags=["demo"]
from minillm.course.show.exercise_drawings import pool_map, pool_of

pool, moments = BlockPool(8, 4), {}
tables = {1: BlockTable(pool), 2: BlockTable(pool)}
for tokens in range(1, 12):
    for name, table in tables.items():
        if not table.grow(tokens):
            print(f"no room for token {tokens} of request {name}")
    if tokens in (3, 11):
        moments[f"{tokens} tokens each"] = pool_of(8, 4, {name: (t.blocks, tokens) for name, t in tables.items()})
for name, table in tables.items():
    print(f"request {name}: blocks {table.blocks}, token 5 in slot {table.slot(5)}")
tables[1].free()
moments["request 1 has ended"] = pool_of(8, 4, {2: (tables[2].blocks, 11)})

# %% tags=["demo"]
pool_map(moments)
