"""Wrong and right answers to exercise 6."""

from collections import Counter, OrderedDict, deque

from wrong_answers import Mutant

TASK = "sharing_pool"
LAST_HOLDER = "a shared block lives until its last holder leaves"
CACHED = "a block that nobody holds stays cached, and a hit revives it"

MUTANTS = [
    Mutant(TASK, "new blocks without a reference", "self.references[block] = 1", "pass",
           caught_by="takes different blocks, each with one reference"),
    Mutant(TASK, "takes before it counts",
           "        if number > self.num_available:\n            return None\n        taken = []",
           "        taken = []\n        if number > self.num_available:\n            number = self.num_available\n"
           "            taken = None", caught_by="a refused take changes nothing"),
    Mutant(TASK, "frees without counting", "self.references[block] -= 1\n            if self.references[block] == 0:",
           "self.references[block] = 0\n            if True:", caught_by=LAST_HOLDER),
    Mutant(TASK, "forgets to free", "self.free.append(block)", "pass",
           caught_by="a released block is free again if the index does not know it"),
    Mutant(TASK, "shares without counting", "self.references[block] += 1", "self.references[block] = 1",
           caught_by=LAST_HOLDER),
    Mutant(TASK, "finds the whole prompt", "range(self.block_size, len(tokens), self.block_size)",
           "range(self.block_size, len(tokens) + 1, self.block_size)", caught_by="leaves one token to compute"),
    Mutant(TASK, "the block's own tokens as the key", "key = tuple(tokens[: (i + 1) * self.block_size])",
           "key = tuple(tokens[i * self.block_size : (i + 1) * self.block_size])",
           caught_by="finds the blocks of a known prefix, in order"),
    Mutant(TASK, "the block's own tokens as the key, on both sides",
           "        found = []\n        for end in range(self.block_size, len(tokens), self.block_size):\n"
           "            key = tuple(tokens[:end])",
           "        found = []\n        self.block_of = {k[-self.block_size:]: b for k, b in self.block_of.items()}\n"
           "        for end in range(self.block_size, len(tokens), self.block_size):\n"
           "            key = tuple(tokens[end - self.block_size : end])",
           caught_by="the same tokens behind another beginning are no match"),
    Mutant(TASK, "enters a block that is not full", "range(len(tokens) // self.block_size)", "range(len(blocks))",
           caught_by="only full blocks are entered"),
    Mutant(TASK, "a second block takes the first one's place", "if key not in self.block_of:\n                self",
           "if True:\n                self", caught_by="a prefix that is known keeps its block"),
    Mutant(TASK, "nothing is kept", "if block in self.key_of:",
           "if self.block_of.pop(self.key_of.pop(block, None), 0) is None:",
           caught_by=CACHED),
    Mutant(TASK, "a revived block stays among the cached", "del self.cached[block]", "pass", caught_by=CACHED),
    Mutant(TASK, "cached before free", "            if self.free:\n", "            if self.free and not self.cached:\n",
           caught_by="takes free blocks before cached ones"),
    Mutant(TASK, "the index forgets nothing", "del self.block_of[self.key_of.pop(block)]", "pass",
           caught_by="the index forgets a cached block that is taken"),
    Mutant(TASK, "head first", "reversed(blocks)", "list(blocks)",
           caught_by="gives the tail of a prefix away before its head"),
    Mutant(TASK, "youngest first", "popitem(last=False)", "popitem()",
           caught_by="gives the tail of a prefix away before its head"),
    Mutant(TASK, "releases twice", "if blocks.count(block) > self.references[block]:", "if False:",
           caught_by="refuses to release what nobody holds"),
    Mutant(TASK, "does not see that a block stands twice", "blocks.count(block) > self.references[block]",
           "self.references[block] == 0", caught_by="refuses to release what nobody holds"),
    Mutant(TASK, "releases one by one until it refuses",
           "                raise ValueError(f\"block {block} is not held so often\")\n"
           "        for block in reversed(blocks):\n",
           "                pass\n        for block in reversed(blocks):\n"
           "            if self.references[block] == 0:\n                raise ValueError\n",
           caught_by="a refused release changes nothing"),
    Mutant(TASK, "refuses a block that is held twice", "blocks.count(block) > self.references[block]",
           "blocks.count(block) > min(1, self.references[block])", caught_by="a refused release changes nothing"),
    Mutant(TASK, "a match renews what it finds", "            found.append(self.block_of[key])",
           "            found.append(self.block_of[key])\n            if found[-1] in self.cached:\n"
           "                self.cached.move_to_end(found[-1])",
           caught_by="a match alone leaves the order of the cached blocks as it was"),
    Mutant(TASK, "takes the caller's table apart", "for block in reversed(blocks):\n",
           "while blocks:\n            block = blocks.pop()\n",
           caught_by="lists that are handed over stay as they were"),
    Mutant(TASK, "refuses because nothing can be taken", "if number > self.num_available:",
           "if not self.num_available or number > self.num_available:", caught_by="taking no block is never refused"),
]

SURVIVORS = {}


class Plain:
    """What both alternatives share with the exercise: the fields, and the property that is given."""

    def __init__(self, num_blocks, block_size):
        self.block_size = block_size
        self.references = [0] * num_blocks
        self.free = deque(range(num_blocks))
        self.cached = OrderedDict()
        self.block_of, self.key_of = {}, {}

    @property
    def num_available(self):
        return len(self.free) + len(self.cached)


class InSmallSteps(Plain):
    """Takes blocks one at a time; matches by growing the key; frees from the other end."""

    def enter(self, tokens, blocks):
        for block, end in zip(blocks, range(self.block_size, len(tokens) + 1, self.block_size), strict=False):
            if self.block_of.setdefault(tuple(tokens[:end]), block) == block:
                self.key_of[block] = tuple(tokens[:end])

    def match(self, tokens):
        blocks = []
        while len(tokens) > self.block_size * (len(blocks) + 1):
            block = self.block_of.get(tuple(tokens[: self.block_size * (len(blocks) + 1)]))
            if block is None:
                return blocks
            blocks.append(block)
        return blocks

    def share(self, blocks):
        for block in blocks:
            self.cached.pop(block, None)
            self.references[block] += 1

    def release(self, blocks):
        if any(number > self.references[block] for block, number in Counter(blocks).items()):
            raise ValueError("released too often")
        for block in blocks[::-1]:
            self.references[block] -= 1
            if not self.references[block]:
                if block in self.key_of:
                    self.cached[block] = None
                else:
                    self.free.appendleft(block)

    def take(self, number):
        if self.num_available < number:
            return None
        return [self.take_one() for _ in range(number)]

    def take_one(self):
        block = self.free.popleft() if self.free else self.evict()
        self.references[block] += 1
        return block

    def evict(self):
        block = next(iter(self.cached))
        del self.cached[block]
        self.block_of.pop(self.key_of.pop(block))
        return block


class InBulk(InSmallSteps):
    """Takes in slices; matches from the longest prefix down."""

    def match(self, tokens):
        known = []
        for number in range((len(tokens) - 1) // self.block_size, 0, -1):
            keys = [tuple(tokens[: self.block_size * (i + 1)]) for i in range(number)]
            if all(key in self.block_of for key in keys):
                known = [self.block_of[key] for key in keys]
                break
        return known

    def take(self, number):
        if number > self.num_available:
            return None
        fresh = list(self.free)[:number]
        self.free = deque(list(self.free)[number:])
        old = list(self.cached)[: number - len(fresh)]
        for block in old:
            del self.cached[block], self.block_of[self.key_of[block]], self.key_of[block]
        for block in fresh + old:
            self.references[block] = 1
        return fresh + old


ALTERNATIVES = {TASK: [InSmallSteps, InBulk]}
