"""Wrong and right answers to exercise 5."""

from wrong_answers import Mutant

MUTANTS = [
    Mutant("block_pool", "rounds down", "-(-num_tokens // self.block_size)", "num_tokens // self.block_size",
           caught_by="blocks_for rounds up, and a full last block is not one too few or too many"),
    Mutant("block_pool", "always one block more", "-(-num_tokens // self.block_size)",
           "num_tokens // self.block_size + 1",
           caught_by="blocks_for rounds up, and a full last block is not one too few or too many"),
    Mutant("block_pool", "keeps one in reserve", "if number > len(self.free)", "if number >= len(self.free)",
           caught_by="hands out the very last block"),
    Mutant("block_pool", "takes what there is before it refuses",
           """        if number > len(self.free):
            return None
        return [self.free.pop() for _ in range(number)]""",
           """        blocks = []
        for _ in range(number):
            if not self.free:
                return None
            blocks.append(self.free.pop())
        return blocks""",
           caught_by="a refused take returns None and changes nothing"),
    Mutant("block_pool", "forgets to free", "self.free.extend(blocks)", "pass",
           caught_by="released blocks can be taken again"),
    Mutant("block_pool", "does not look for a double release", "block in self.free or", "",
           caught_by="a block that is free already is refused"),
    Mutant("block_pool", "frees one by one until it refuses",
           "        self.free.extend(blocks)", "            self.free.append(block)",
           caught_by="a refused release changes nothing"),
    Mutant("block_pool", "looks at the first block only", "for block in blocks:", "for block in blocks[:1]:",
           caught_by="a refused release changes nothing"),
    Mutant("block_pool", "frees a block twice in one call", " or blocks.count(block) > 1", "",
           caught_by="a block that stands twice in one release is refused"),
    Mutant("block_pool", "remembers only what was released", "if block in self.free or blocks.count(block) > 1:",
           "self.back = getattr(self, 'back', set()); "
           "again = block in self.back and block in self.free; self.back.add(block)\n            if again:",
           caught_by="a block that is free already is refused"),
    Mutant("block_pool", "keeps the caller's list", "self.free.extend(blocks)",
           "self.free = self.free + blocks if self.free else blocks",
           caught_by="a list that was handed over stays the caller's"),
    Mutant("block_pool", "empties the caller's list", "self.free.extend(blocks)",
           "while blocks:\n            self.free.append(blocks.pop())",
           caught_by="a list that was handed over stays the caller's"),
    Mutant("block_pool", "refuses because nothing is free", "if number > len(self.free)",
           "if not self.free or number > len(self.free)", caught_by="taking no block is never refused"),
    Mutant("block_pool", "hands out all where none is asked", "return [self.free.pop() for _ in range(number)]",
           "taken = self.free[-number:]; self.free = self.free[:-number]\n        return taken",
           caught_by="taking no block is never refused", says="[-0:] is all of it"),
    Mutant("block_pool", "hands out the same block again", "self.free.pop()", "self.free[-1]",
           caught_by="takes as many different blocks as asked, all of them the pool's"),
    Mutant("block_pool", "counts from 1", "list(range(num_blocks))", "list(range(1, num_blocks + 1))",
           caught_by="takes as many different blocks as asked, all of them the pool's"),
    Mutant("block_pool", "one list for all pools", "self.free = list(range(num_blocks))",
           'self.free = BlockPool.__dict__.get("shared") or list(range(num_blocks)); BlockPool.shared = self.free',
           caught_by="two pools do not share blocks"),
    Mutant("block_table", "takes all blocks anew",
           "missing = self.pool.blocks_for(num_tokens) - len(self.blocks)",
           "missing = self.pool.blocks_for(num_tokens); self.blocks = []",
           caught_by="keeps the blocks that it has when it grows"),
    Mutant("block_table", "new blocks in front", "self.blocks += taken", "self.blocks = taken + self.blocks",
           caught_by="keeps the blocks that it has when it grows", says="new blocks stand behind the old ones"),
    Mutant("block_table", "a block one token late", "blocks_for(num_tokens)", "blocks_for(num_tokens - 1)",
           caught_by="takes a block when the first token behind a full one comes, and neither before nor after"),
    Mutant("block_table", "a block one token early", "blocks_for(num_tokens)", "blocks_for(num_tokens + 1)",
           caught_by="takes a block when the first token behind a full one comes, and neither before nor after"),
    Mutant("block_table", "refuses where nothing is missing", "taken = self.pool.take(missing)",
           "taken = self.pool.take(missing) if missing else None",
           caught_by="says True where nothing is missing"),
    Mutant("block_table", "returns nothing", "return True", "pass", caught_by="takes the blocks for its first tokens"),
    Mutant("block_table", "the place without the block", "self.blocks[position // size] * size + position % size",
           "self.blocks[position // size] * size + position", caught_by="finds each token's slot"),
    Mutant("block_table", "does not look whether the pool refused", "return False", "return True",
           caught_by="a refused grow returns False and leaves table and pool as they were"),
    Mutant("block_table", "leaks the last block", "self.pool.release(self.blocks)",
           "self.pool.release(self.blocks[:-1])", caught_by="gives everything back at the end, once"),
    Mutant("block_table", "keeps what it has released", "        self.blocks = []\n        ### END", "        ### END",
           caught_by="gives everything back at the end, once"),
]

SURVIVORS = {}  # by task: mutant -> why it is no wrong answer


class PoolOfSets:
    """Free blocks in a set; released in one operation."""

    def __init__(self, num_blocks, block_size):
        self.num_blocks, self.block_size = num_blocks, block_size
        self.unused = set(range(num_blocks))

    def blocks_for(self, num_tokens):
        return (num_tokens + self.block_size - 1) // self.block_size

    def take(self, number):
        if len(self.unused) < number:
            return None
        chosen = sorted(self.unused)[:number]
        self.unused -= set(chosen)
        return chosen

    def release(self, blocks):
        if self.unused & set(blocks) or len(set(blocks)) < len(blocks):
            raise ValueError("free already")
        self.unused |= set(blocks)


class PoolOfFlags:
    """One flag per block, the highest first."""

    def __init__(self, num_blocks, block_size):
        self.num_blocks, self.block_size = num_blocks, block_size
        self.taken = [False] * num_blocks

    def blocks_for(self, num_tokens):
        whole, rest = divmod(num_tokens, self.block_size)
        return whole + bool(rest)

    def take(self, number):
        found = [block for block in range(self.num_blocks - 1, -1, -1) if not self.taken[block]][:number]
        if len(found) < number:
            return None
        for block in found:
            self.taken[block] = True
        return found

    def release(self, blocks):
        if len({block for block in blocks if self.taken[block]}) != len(blocks):
            raise ValueError("free already")
        for block in blocks:
            self.taken[block] = False


class TableOneByOne:
    """Looks at the room first, then takes blocks singly."""

    def __init__(self, pool):
        self.pool, self.blocks = pool, []

    def grow(self, num_tokens):
        taken = []
        while (len(self.blocks) + len(taken)) * self.pool.block_size < num_tokens:
            block = self.pool.take(1)
            if block is None:
                self.pool.release(taken)
                return False
            taken.extend(block)
        self.blocks.extend(taken)
        return True

    def slot(self, position):
        index, place = divmod(position, self.pool.block_size)
        return sum([self.pool.block_size] * self.blocks[index]) + place

    def free(self):
        while self.blocks:
            self.pool.release([self.blocks.pop()])


class TableOfSlots(TableOneByOne):
    """Lays all slots out to find one."""

    def slot(self, position):
        size = self.pool.block_size
        return [slot for block in self.blocks for slot in range(block * size, block * size + size)][position]


ALTERNATIVES = {"block_pool": [PoolOfSets, PoolOfFlags], "block_table": [TableOneByOne, TableOfSlots]}
