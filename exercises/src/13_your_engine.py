# %% [markdown]
# # Exercise 13 · Your engine
#
# You have written a cache, a scheduler, a block pool, a block table and attention over blocks. Here they become an
# engine that serves a real model: you write the two pieces that tie them together.
#
# **To look at**: exercises 2, 4, 5 and 7, and, if you have done them, 8 and 9; in the package
# `minillm/course/your_engine.py`, which is the frame of your engine, and then `minillm/ladder/engine.py`.

# %%
import torch

from minillm.course.grading import check, hint
from minillm.course.grading.parts import take_parts
from minillm.course.show.source import show_source
from minillm.course.your_engine import Engine, OwnCaches, prompt_lookup

# %% [markdown]
# ## The parts
#
# `take_parts` reads your answers from the notebooks beside this one, as they were last saved: save them, and run this
# cell again after a change. A part whose exercise is not done is the package's. No checks or demonstrations of those
# notebooks run.

# %%
parts = take_parts()

# %% [markdown]
# ## The frame
#
# `Engine` makes the scheduler, the pool and the store of keys and values out of the parts, queues requests, and calls
# `step` until all have ended. Read it now; you write what it lacks.

# %% tags=["demo"]
show_source(Engine)

# %% [markdown]
# ## The cache
#
# In a step the model is fed the tokens of several requests, one row after the other. In every layer it hands the
# cache their queries, keys and values. `OwnCaches` is such a cache for requests that have a KV cache each. Yours keeps
# keys and values in the blocks of one pool.
#
# **Rows.** `rows` is a list of pairs: a request, and how many tokens it feeds in this step. With the rows (a, 1) and
# (b, 3), `q[0]` belongs to a, and `q[1:4]` to b; `k` and `v` likewise.
#
# **Storing.** A request has `num_kv` tokens stored. What it feeds now stands behind them, at positions from `num_kv`
# on, and `request.table.slot(position)` says where each is kept. `engine.store.write(layer, slots, k, v)` keeps n keys
# and values in n slots. Count nothing: `num_kv` goes on when the step is committed.
#
# **Attending.** `engine.store.read(layer, request.table.blocks)` gives keys, values and a block table, which are what
# `engine.parts.paged_attention(q, keys, values, block_table, num_tokens)` of exercise 7 wants, for one request. This
# table may differ from `request.table.blocks`: in int8 the store dequantises the request's blocks alone, into a copy.

# %% tags=["demo"]
show_source(OwnCaches)


# %%
class PagedCache:
    """The cache as the model sees it in one step."""

    def __init__(self, engine, rows):
        self.engine, self.rows = engine, rows

    def attend(self, layer, q, k, v):
        """Store k, v [N, Hkv, D]; let each row's part of q [N, Hq, D] attend to its own text: [N, Hq, D]."""
        ### BEGIN SOLUTION
        store, out, first = self.engine.store, [], 0
        for request, count in self.rows:
            row, end = slice(first, first + count), request.num_kv + count
            slots = [request.table.slot(position) for position in range(request.num_kv, end)]
            store.write(layer, slots, k[row], v[row])
            keys, values, blocks = store.read(layer, request.table.blocks)
            out.append(self.engine.parts.paged_attention(q[row], keys, values, blocks, end))
            first += count
        return torch.cat(out)
        ### END SOLUTION


# %%
check("paged_cache", PagedCache)

# %% [markdown]
# ## The step
#
# **Plan.** `self.scheduler.plan()` gives the rows that are to be fed, pairs of a request and a count.
#
# **Reserve.** A row needs blocks for the tokens that are stored and those that it feeds: `request.table.grow(number)`
# makes room for `number` tokens in all, or returns `False`. Such a row is left out, and planned again at the next
# step. If no row is left, call `self.preempt()`, which takes the blocks of the youngest request, and end the step.
#
# **The forward pass.** The tokens of all rows lie in one list, row after row: of a request's `tokens`, those from
# `num_kv` on, as many as it feeds. A second list has their positions in their own texts. Then one call,
# `self.model.forward(tokens, positions, self.cache(rows))`, with both as tensors [N], gives logits [N, V]: row i says
# what follows token i.
#
# **Commit.** What follows a request is `self.following(request, best)`, where `best` is the list of the likeliest
# token after each of those that it fed. Without drafts that is the last of them; with drafts your `verify_greedy` is
# asked. Ask once for each row, then call `self.scheduler.commit(rows, next_token)` of exercise 4: `next_token` is a
# function that gives a request's token. Commit the rows that were fed.
#
# **Free.** A request that is `finished` gives its blocks back: `request.table.free()`.

# %%
class MyEngine(Engine):
    """The frame, your parts, and your step."""

    parts, PagedCache = parts, PagedCache

    def step(self):
        """Plan, reserve, forward, commit, free."""
        ### BEGIN SOLUTION
        rows = [(request, count) for request, count in self.scheduler.plan()
                if request.table.grow(request.num_kv + count)]
        if not rows:
            return self.preempt()
        tokens, positions = [], []
        for request, count in rows:
            end = request.num_kv + count
            tokens += request.tokens[request.num_kv : end]
            positions += range(request.num_kv, end)
        logits = self.model.forward(torch.tensor(tokens), torch.tensor(positions), self.cache(rows))  # [N, V]
        best, following, first = logits.argmax(1).tolist(), {}, 0
        for request, count in rows:
            following[request] = self.following(request, best[first : first + count])
            first += count
        self.scheduler.commit(rows, following.get)
        for request, _ in rows:
            if request.finished:
                request.table.free()
        ### END SOLUTION


# %% [markdown]
# The checks run the whole engine, with your parts in it. Where one fails they exchange your parts for the package's,
# one by one: if that mends it, the part is named, and the place to look is its own exercise.

# %%
check("your_engine", MyEngine)

# %% [markdown]
# ## Your ladder
#
# SmolLM2 answers six questions, at most four at a time, with your engine: one at a time with your cache, with your
# scheduler and a cache for each request, then over your pool, with int8 and with drafts. A static batch and the
# package's engine stand beside it. The answers must be the package's, token for token; in int8 keys and values are
# rounded, so a token may differ there. "yours" and "your scheduler, a cache each" must need equally many steps: if
# yours needs more, blocks are refused that should be there; look at exercise 5. Here drafts save a few steps; they save
# more where a text repeats itself.

# %% tags=["demo"]
import minillm
from minillm.course.grading.trial import ladder, ladder_table
from minillm.course.prompts import CHAT_PROMPTS
from minillm.course.show.exercise_drawings import ladder_bars, step_timeline

model, tokenizer = minillm.load_model(dtype="fp32", device="cpu"), minillm.load_tokenizer()
prompts = [tokenizer.chat(text) for text in CHAT_PROMPTS[:6]]
runs = ladder(MyEngine, model, prompts, max_tokens=16, drafter=prompt_lookup)
print(ladder_table(runs))
print(tokenizer.decode(runs["yours"].answers[0]))

# %% tags=["demo"]
ladder_bars({name: run.tokens_per_s for name, run in runs.items()})

# %% [markdown]
# ## Your Gantt chart
#
# One line for each row of the batch; a request keeps its line. Prompts are dark.

# %% tags=["demo"]
step_timeline({name: runs[name].steps for name in ("one at a time, your cache", "yours", "the package's")})
