# %% [markdown]
# # Exercise 6 · Prefix sharing with reference counts
#
# Requests that begin with the same tokens can hold the same blocks. Then a block has several holders, and may only be
# given away when the last has left; and even then its content is worth keeping for who comes next. Here you write
# the pool that keeps these books.
#
# **To look at**: notebook 4, "A shared prefix"; in the package `minillm/ladder/paged.py`; exercise 5 for the plain
# pool.

# %%
from collections import OrderedDict

from minillm.course.grading import check, hint

# %% [markdown]
# ## Three states
#
# | a block is | `references[block]` | and |
# |---|---|---|
# | **live** | how many block tables hold it | |
# | **cached** | 0 | the index still knows which tokens it holds; it is in `cached` |
# | **free** | 0 | its content means nothing; it is in `free` |
#
# Every block is in one of the three states. `num_available`, which is given, counts those that can be taken.
#
# **The index.** `block_of` leads from a prefix to the block that holds its last tokens. A key is all tokens from the
# first one to the block's end, as a tuple: what a block holds depends on everything before it. `key_of` leads
# back from a block to its key. A block that is not in the index is in neither.
#
# ## The methods
#
# **Entering.** `enter(tokens, blocks)`: `tokens` are stored in `blocks`. Put each **full** block into the index under
# its prefix. If the index has that prefix already, the block there stays, and this one is just not shared.
#
# **Matching.** `match(tokens)` returns the blocks that hold the longest known beginning of a new request's tokens, in
# order. One token at least must be left to compute, since logits are not cached: a prompt of 8 in blocks of 4 can find
# one block, not two. Nothing changes.
#
# **Sharing.** `share(blocks)` is called with what `match` found: each gets one more reference. A cached block is
# live again.
#
# **Releasing.** `release(blocks)` takes one reference from each block of a table. One that nobody holds any more
# becomes cached if the index knows it, else free. Go from the last block to the first, so that the tail of a prefix
# is the first to be given away: without its head a tail is never found again. A block must not be released more
# often than it is held, in one call or in several: raise a `ValueError`, before anything changes.
#
# **Taking.** `take(number)` gives new blocks with one reference each, or `None`, and nothing changed, if there are
# too few. Free blocks go first, then cached ones, those that became cached longest ago first. A cached block that is
# taken will hold something else, so the index must forget it.
#
# Lists that a method is given are the caller's: leave them as they are.

# %%
class SharingPool:
    """Blocks that several block tables may hold, and an index of what they contain."""

    def __init__(self, num_blocks, block_size):
        self.block_size = block_size
        self.references = [0] * num_blocks
        self.free = list(range(num_blocks))
        self.cached = OrderedDict()  # block -> None, the one that became cached first stands first
        self.block_of = {}  # prefix -> block
        self.key_of = {}  # block -> prefix

    @property
    def num_available(self):
        return len(self.free) + len(self.cached)

    def enter(self, tokens, blocks):
        """Put the full ones among `blocks`, which hold `tokens`, into the index."""
        ### BEGIN SOLUTION
        for i in range(len(tokens) // self.block_size):
            key = tuple(tokens[: (i + 1) * self.block_size])
            if key not in self.block_of:
                self.block_of[key] = blocks[i]
                self.key_of[blocks[i]] = key
        ### END SOLUTION

    def match(self, tokens):
        """The blocks of the longest known beginning of `tokens`; one token is left over at least."""
        ### BEGIN SOLUTION
        found = []
        for end in range(self.block_size, len(tokens), self.block_size):
            key = tuple(tokens[:end])
            if key not in self.block_of:
                break
            found.append(self.block_of[key])
        return found
        ### END SOLUTION

    def share(self, blocks):
        """One more reference to each of `blocks`."""
        ### BEGIN SOLUTION
        for block in blocks:
            if self.references[block] == 0:
                del self.cached[block]
            self.references[block] += 1
        ### END SOLUTION

    def release(self, blocks):
        """One reference less to each of `blocks`, the last first. ValueError, and no change, for too many."""
        ### BEGIN SOLUTION
        for block in blocks:
            if blocks.count(block) > self.references[block]:
                raise ValueError(f"block {block} is not held so often")
        for block in reversed(blocks):
            self.references[block] -= 1
            if self.references[block] == 0:
                if block in self.key_of:
                    self.cached[block] = None
                else:
                    self.free.append(block)
        ### END SOLUTION

    def take(self, number):
        """`number` blocks with one reference each: free ones, then the longest cached; None if there are too few."""
        ### BEGIN SOLUTION
        if number > self.num_available:
            return None
        taken = []
        for _ in range(number):
            if self.free:
                block = self.free.pop()
            else:
                block, _ = self.cached.popitem(last=False)
                del self.block_of[self.key_of.pop(block)]
            self.references[block] = 1
            taken.append(block)
        return taken
        ### END SOLUTION


# %%
check("sharing_pool", SharingPool)

# %% [markdown]
# ## A conversation
#
# Two requests with the same first eight tokens, one after the other, and a third that needs the whole pool.

# %% tags=["demo"]
pool = SharingPool(6, 4)
for tokens in ([1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 5, 6, 7, 8, 30, 31], list(range(50, 74))):
    hits = pool.match(tokens)
    pool.share(hits)
    table = hits + pool.take(-(-len(tokens) // 4) - len(hits))
    print(f"{len(tokens)} tokens: found {len(hits)} blocks, table {table}, {pool.num_available} left")
    pool.enter(tokens, table)
    pool.release(table)

# %% [markdown]
# The same beginning at the same time: two requests hold its blocks together. When both have ended, the full blocks
# stay cached for the next.

# %% tags=["demo"]
from minillm.course.show.exercise_drawings import pool_map, pool_of

pool, tables, moments = SharingPool(8, 4), {}, {}
begin = [1, 2, 3, 4, 5, 6, 7, 8]
for name, tokens in ((1, [*begin, 9]), (2, [*begin, 30, 31])):
    hits = pool.match(tokens)
    pool.share(hits)
    tables[name] = hits + pool.take(-(-len(tokens) // 4) - len(hits)), len(tokens)
    pool.enter(tokens, tables[name][0])
moments["both run"] = pool_of(8, 4, tables, pool.cached)
for name in (1, 2):
    pool.release(tables.pop(name)[0])
    moments[f"request {name} has ended"] = pool_of(8, 4, tables, pool.cached)

# %% tags=["demo"]
pool_map(moments)
