"""Wrong and right answers to exercise 13."""

import torch
from wrong_answers import Mutant

from minillm.course.grading.parts import PACKAGE
from minillm.course.your_engine import Engine

CACHE, ENGINE = "paged_cache", "your_engine"
STORED = "a prompt's tokens are stored, and attend to each other"
ALONE = "one request gets the tokens of the loop without a cache"
SLOTS = "new keys and values are stored where the block table says, and nowhere else"
SEES = "a new token sees what was stored by earlier steps"
ROWS = "rows of one step do not see each other"
OWN = "requests of different lengths get their own tokens"
GROWS = "a table grows with its request"
BLOCKS = "who has ended gives all blocks back, at once"
CHUNKS = "prompts in chunks give the same tokens"
DRAFTS = "drafts save steps, and change no token"
ROOM = "rows wait where the pool is short, and the tokens stay the same"

SECONDS = 5.0  # of processor time a check: a right answer serves requests on a tiny model, in about half a second
MUTANTS = [
    Mutant(CACHE, "stores without the table", "request.table.slot(position) for position", "position for position",
           caught_by=STORED),
    Mutant(CACHE, "keys and values exchanged", "k[row], v[row]", "v[row], k[row]", caught_by=STORED),
    Mutant(CACHE, "attends without the new tokens", "blocks, end)", "blocks, request.num_kv)", caught_by=STORED),
    Mutant(CACHE, "one token too few", "blocks, end)", "blocks, end - 1)", caught_by=STORED),
    Mutant(CACHE, "attends to whole blocks", "blocks, end)", "blocks, 4 * len(blocks))", caught_by=STORED),
    Mutant(CACHE, "attends before it has stored", "            store.write(layer, slots, k[row], v[row])\n", "",
           caught_by=STORED),
    Mutant(CACHE, "stores from the first slot on", "range(request.num_kv, end)", "range(count)", caught_by=SLOTS),
    Mutant(CACHE, "stores in the first layer", "store.write(layer,", "store.write(0,", caught_by=SLOTS),
    Mutant(CACHE, "reads the first layer", "store.read(layer,", "store.read(0,", caught_by=SEES),
    Mutant(CACHE, "ignores the table that read returns", "values, blocks, end)", "values, request.table.blocks, end)",
           caught_by="attention reads by the table that the store returns"),
    Mutant(CACHE, "every row has the step's queries", "paged_attention(q[row]", "paged_attention(q", caught_by=ROWS),
    Mutant(CACHE, "every row begins at the first token", "            first += count\n", "", caught_by=ROWS),
    Mutant(CACHE, "one token a row", "first += count", "first += 1", caught_by=ROWS),
    Mutant(CACHE, "rows in the opposite order", "torch.cat(out)", "torch.cat(out[::-1])", caught_by=ROWS),
    Mutant(CACHE, "counts what it stores", "first += count", "first += count; request.num_kv = end",
           caught_by="requests and rows stay as they were"),
    Mutant(ENGINE, "positions from 0", "range(request.num_kv, end)", "range(count)", caught_by=ALONE),
    Mutant(ENGINE, "feeds the first tokens again", "request.tokens[request.num_kv : end]", "request.tokens[:count]",
           caught_by=ALONE),
    Mutant(ENGINE, "feeds the whole text", "request.tokens[request.num_kv : end]", "request.tokens", caught_by=ALONE),
    Mutant(ENGINE, "gives every table back after each step", "            if request.finished:", "            if True:",
           caught_by=ALONE, says="blocks given back too soon"),
    Mutant(ENGINE, "feeds the last tokens of a prompt's chunk", "request.tokens[request.num_kv : end]",
           "request.tokens[-count:]", caught_by=CHUNKS, says="'The forward pass'"),
    Mutant(ENGINE, "takes a row's first logits", "best[first : first + count]", "best[first : first + 1]",
           caught_by=ALONE),
    Mutant(ENGINE, "commits nothing", "self.scheduler.commit(rows, following.get)", "pass", caught_by=ALONE),
    Mutant(ENGINE, "takes the step's last logits", "best[first : first + count]", "best[-count:]", caught_by=OWN),
    Mutant(ENGINE, "reserves for the new tokens only", "grow(request.num_kv + count)", "grow(count)",
           caught_by=GROWS, says="'Reserve'"),
    Mutant(ENGINE, "reserves one token too few", "grow(request.num_kv + count)", "grow(request.num_kv + count - 1)",
           caught_by=GROWS),
    Mutant(ENGINE, "one row a step", "        if not rows:", "        rows = rows[:1]\n        if not rows:",
           caught_by="a step is one forward pass"),
    Mutant(ENGINE, "never frees", "                request.table.free()", "                pass", caught_by=BLOCKS),
    Mutant(ENGINE, "frees when all have ended", "            if request.finished:",
           "            if all(other.finished for other in self.requests):", caught_by=BLOCKS),
    Mutant(ENGINE, "feeds rows whose blocks were refused", "grow(request.num_kv + count)]",
           "grow(request.num_kv + count) or True]", caught_by=ROOM),
    Mutant(ENGINE, "commits rows whose blocks were refused",
           """        rows = [(request, count) for request, count in self.scheduler.plan()
                if request""", """        plan = self.scheduler.plan()
        rows = [(request, count) for request, count in plan
                if request""", caught_by=ROOM, says="committed all the same",
           also=("commit(rows, following.get)", "commit(plan, lambda request: following.get(request, 0))")),
    Mutant(ENGINE, "asks twice what follows a row", "            following[request] = self.following(",
           "            self.following(request, best[first : first + count])\n"
           "            following[request] = self.following(", caught_by=DRAFTS, says="asked twice"),
    Mutant(ENGINE, "waits for ever", "return self.preempt()", "return", caught_by=ROOM),
    Mutant(ENGINE, "does not verify drafts", "self.following(request, best[first : first + count])",
           "best[first + count - 1]", caught_by=DRAFTS),
]
SURVIVORS = {}


class BySlots:
    """Stores the whole step first, then attends row by row, with spans that are made once."""

    def __init__(self, engine, rows):
        self.store, self.attention, self.spans = engine.store, engine.parts.paged_attention, []
        for request, count in rows:
            self.spans.append((request.table, request.num_kv, request.num_kv + count))

    def attend(self, layer, q, k, v):
        slots = [table.slot(position) for table, start, end in self.spans for position in range(start, end)]
        self.store.write(layer, slots, k, v)
        out = torch.empty_like(q)
        queries, results = list(q.split(sizes := [end - start for _, start, end in self.spans])), out.split(sizes)
        for (table, _, end), query, result in zip(self.spans, queries, results, strict=True):
            result.copy_(self.attention(query, *self.store.read(layer, table.blocks), end))
        return out


class TokenByToken:
    """Stores a token, lets it attend, and goes on to the next."""

    def __init__(self, engine, rows):
        self.engine = engine
        self.places = [(request, request.num_kv + i) for request, count in rows for i in range(count)]

    def attend(self, layer, q, k, v):
        store, out = self.engine.store, []
        for i, (request, position) in enumerate(self.places):
            store.write(layer, [request.table.slot(position)], k[i : i + 1], v[i : i + 1])
            read = store.read(layer, request.table.blocks)
            out += [self.engine.parts.paged_attention(q[i : i + 1], *read, position + 1)]
        return torch.cat(out)


class InDictionaries(Engine):
    """Keeps each row's part of the step by request."""

    parts, PagedCache = PACKAGE, BySlots

    def step(self):
        counts = {}
        for request, count in self.scheduler.plan():
            if request.table.grow(request.num_kv + count):
                counts[request] = count
        if counts:
            feeds = {request: request.tokens[request.num_kv :][:count] for request, count in counts.items()}
            where = torch.cat([torch.arange(request.num_kv, request.num_kv + n) for request, n in counts.items()])
            fed = torch.tensor([token for tokens in feeds.values() for token in tokens])
            logits = self.model.forward(fed, where, self.cache(list(counts.items())))
            rows = zip(counts, logits.split(list(counts.values())), strict=True)
            tokens = {request: self.following(request, own.argmax(1).tolist()) for request, own in rows}
            self.scheduler.commit(list(counts.items()), lambda request: tokens[request])
        else:
            self.preempt()
        for request in [request for request in self.requests if request.finished and request.table.blocks]:
            request.table.free()


class FromTheEnd(Engine):
    """Rows in the opposite order."""

    parts, PagedCache = PACKAGE, TokenByToken

    def step(self):
        rows = []
        for request, count in reversed(self.scheduler.plan()):
            if request.table.grow(request.num_kv + count):
                rows.append((request, count))
        if len(rows) == 0:
            self.preempt()
            return
        ids = [token for request, count in rows for token in request.tokens[request.num_kv :][:count]]
        positions = [request.num_kv + i for request, count in rows for i in range(count)]
        best = self.model.forward(torch.tensor(ids), torch.tensor(positions), self.cache(rows)).argmax(-1).tolist()
        following = []
        for _, count in rows:
            following.append(best[:count])
            best = best[count:]
        tokens = [self.following(request, own) for (request, _), own in zip(rows, following, strict=True)]
        self.scheduler.commit(rows, dict(zip((request for request, _ in rows), tokens, strict=True)).__getitem__)
        [request.table.free() for request, _ in rows if request.finished]


ALTERNATIVES = {CACHE: [BySlots, TokenByToken], ENGINE: [InDictionaries, FromTheEnd]}
