"""Rung 4: memory by block, prefixes shared.

The cache is cut into blocks of a few tokens, and a sequence's block table lists the ones it
holds, in order (PagedAttention: Kwon et al., 2023). A block is taken when a token needs it and
returned when its last holder leaves. A full block is also entered in an index of prefixes, so
that a later request that begins with the same tokens can hold it too. A block is in one of
three states, and live + cached + free is always the whole pool:

    live    some block tables hold it; `references` says how many
    cached  no table holds it, but the index still knows its tokens: a hit revives it
    free    its content means nothing

"Slots", the older way, is another policy over the same pool. At a first reading skip `match`, `enter`
and `evict`: without prefix sharing no block is ever cached.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import count

from minillm.ladder.request import Request

ROOT = 0  # the prefix index's node for "no tokens yet"


class InvariantError(AssertionError):
    """The bookkeeping contradicts itself; the message names the field and the numbers."""


class BlockPool:
    """Which blocks are live, cached and free, and which tokens the cached and live ones hold."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool needs at least 1 block of 1 token, not {num_blocks} of {block_size}")
        self.num_blocks, self.block_size = num_blocks, block_size
        self.references = [0] * num_blocks
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self.cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        # The index is a tree of blocks. A node's key is its parent node and its own tokens, so
        # a dict look-up compares the whole prefix, whatever the hash; nodes are never re-used.
        self.node_of: dict[tuple[int, tuple[int, ...]], tuple[int, int]] = {}  # key -> (node, block)
        self.key_of: dict[int, tuple[int, tuple[int, ...]]] = {}  # block -> key
        self.new_node = count(ROOT + 1).__next__

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    @property
    def num_available(self) -> int:
        """Blocks that can be taken now: the free ones, then the cached ones."""
        return len(self.free) + len(self.cached)

    @property
    def num_live(self) -> int:
        return self.num_blocks - self.num_available

    def take(self, number: int) -> list[int] | None:
        """`number` blocks for one holder; None, and nothing changed, if fewer are available."""
        if number > self.num_available:
            return None
        blocks = [self.free.popitem(last=False)[0] for _ in range(min(number, len(self.free)))]
        blocks += [self.evict() for _ in range(number - len(blocks))]
        for block in blocks:
            self.references[block] = 1
        return blocks

    def take_run(self, number: int) -> list[int] | None:
        """`number` neighbouring blocks, the first that fit; None if there is no such run."""
        run = 0
        for block in range(self.num_blocks if number <= len(self.free) else 0):
            run = run + 1 if block in self.free else 0
            if run == number:
                blocks = list(range(block - number + 1, block + 1))
                for taken in blocks:
                    del self.free[taken]
                    self.references[taken] = 1
                return blocks
        return None

    def share(self, blocks: Iterable[int]) -> None:
        """Hold once more each of the blocks that `match` found."""
        for block in blocks:
            if self.references[block] == 0:
                del self.cached[block]
            self.references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Give up one hold on each block of a table."""
        for block in reversed(blocks):  # evicting the head of a prefix first would make its tail unreachable
            if self.references[block] < 1:
                raise InvariantError(f"references: block {block} was released more often than it was taken")
            self.references[block] -= 1
            if self.references[block] == 0:
                (self.cached if block in self.key_of else self.free)[block] = None

    def match(self, tokens: Sequence[int], most_blocks: int) -> tuple[list[int], list[int]]:
        """The longest known prefix of `tokens` in whole blocks, at most `most_blocks`: their nodes and blocks."""
        nodes, blocks, node = [], [], ROOT
        for i in range(most_blocks):
            found = self.node_of.get((node, self.block_tokens(tokens, i)))
            if found is None:
                break
            node, block = found
            nodes.append(node)
            blocks.append(block)
        return nodes, blocks

    def enter(self, parent: int, tokens: Sequence[int], i: int, block: int) -> int:
        """Index `block`, the i-th of `tokens`, under its parent node; returns the node that is indexed."""
        key = (parent, self.block_tokens(tokens, i))
        if key not in self.node_of:
            self.node_of[key] = (self.new_node(), block)
            self.key_of[block] = key
        return self.node_of[key][0]

    def evict(self) -> int:
        """The cached block that was used longest ago, which the index then forgets."""
        block, _ = self.cached.popitem(last=False)
        self.forget([block])
        return block

    def forget(self, blocks: Iterable[int]) -> None:
        """Take blocks out of the index: no later request may share them."""
        for block in blocks:
            if block in self.key_of:
                del self.node_of[self.key_of.pop(block)]

    def block_tokens(self, tokens: Sequence[int], i: int) -> tuple[int, ...]:
        """The tokens of block i of a text."""
        return tuple(tokens[i * self.block_size : (i + 1) * self.block_size])


class Paged:
    """Take a block when a token needs it; share whole blocks of a known prefix."""

    def __init__(self, pool: BlockPool, prefix_cache: bool = True) -> None:
        self.pool, self.prefix_cache = pool, prefix_cache

    def admit(self, request: Request, needed: int, owed: int) -> bool:
        """Attach the request's cached prefix, and take no new block yet; or return False and change nothing.

        needed: blocks for its tokens. owed: blocks promised to running requests and not yet taken.
        One token is always left to compute, since logits are not cached.
        """
        nodes, hits = [], []
        if self.prefix_cache:
            nodes, hits = self.pool.match(request.tokens, (request.num_tokens - 1) // self.pool.block_size)
        revived = sum(self.pool.references[block] == 0 for block in hits)
        if needed - len(hits) + owed > self.pool.num_available - revived:
            return False
        self.pool.share(hits)
        request.block_table, request.prefix_nodes = hits, nodes
        request.num_kv = len(hits) * self.pool.block_size
        return True

    def reserve(self, request: Request, num_kv: int) -> bool:
        """Take the blocks for `num_kv` stored tokens; False, and nothing changed, if the pool has too few."""
        if num_kv <= len(request.block_table) * self.pool.block_size:
            return True
        blocks = self.pool.take(self.pool.blocks_for(num_kv) - len(request.block_table))
        request.block_table += blocks or []
        return blocks is not None

    def after_step(self, request: Request) -> None:
        """Return the blocks past `num_kv` (rejected drafts, a failed step), and index the full ones."""
        table, nodes, size = request.block_table, request.prefix_nodes, self.pool.block_size
        if len(table) * size - request.num_kv >= size:
            keep = self.pool.blocks_for(request.num_kv)
            self.pool.release(table[keep:])
            del table[keep:]
        if self.prefix_cache and request.num_kv - len(nodes) * size >= size:
            for i in range(len(nodes), request.num_kv // size):
                parent = nodes[-1] if nodes else ROOT
                nodes.append(self.pool.enter(parent, request.tokens, i, table[i]))

    def release(self, request: Request) -> None:
        """Return everything; the request's stored tokens are forgotten."""
        if request.finish_reason == "error":  # what it stored may be what is wrong with it
            self.pool.forget(request.block_table)
        self.pool.release(request.block_table)
        request.block_table, request.prefix_nodes, request.num_kv = [], [], 0


class Slots:
    """Reserve one contiguous run at admission, for the longest that the request may become; nothing is shared."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool

    def admit(self, request: Request, needed: int, owed: int) -> bool:
        """Reserve the run, or return False and change nothing. `needed` and `owed` matter to pages only."""
        run = self.pool.take_run(self.pool.blocks_for(request.max_kv))
        request.block_table = run or []
        return run is not None

    def reserve(self, request: Request, num_kv: int) -> bool:
        return True  # the run was reserved for the longest

    def after_step(self, request: Request) -> None:
        """Nothing to return before the end."""

    def release(self, request: Request) -> None:
        self.pool.release(request.block_table)
        request.block_table, request.num_kv = [], 0
