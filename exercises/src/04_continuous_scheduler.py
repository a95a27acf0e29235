# %% [markdown]
# # Exercise 4 · A continuous scheduler
#
# A static batch decides once who is in it. Here you write the scheduler that decides again at every step: who has
# ended leaves at once, who waits joins at once, and a long prompt is fed in chunks so that nobody else stands still.
#
# **To look at**: notebook 3, "Build: two policies" and "A long prompt among streams"; in the package
# `minillm/ladder/continuous.py`.

# %%
from collections import deque

from minillm.course.grading import check, hint
from minillm.course.grading.exercises.ex04_continuous_scheduler import Request
from minillm.course.show.source import show_source

# %% [markdown]
# ## What a request knows
#
# A request is told apart by three numbers: how many tokens are known, how many of them were fed, and so how many are
# pending. It decodes if one is pending; more are a prompt, or what is left of it. You keep `num_kv` up to date.

# %% tags=["demo"]
show_source(Request)

# %% [markdown]
# ## The scheduler
#
# `plan()` says what the next forward pass feeds: a list of pairs `(request, count)`, each request at most once, each
# count at least 1. There are two limits: at most `max_batch` requests run at once, and the counts of a step add up to
# at most `max_step_tokens`, the budget (it is never smaller than `max_batch`).
#
# **Decodes first.** Every running request with one pending token feeds it, one that stands after a long prompt too:
# where memory is short, an engine makes a running request begin anew (exercise 13), and it keeps its place.
#
# **Chunks.** From what is left of the budget, a running request with more pending tokens feeds as many as fit.
#
# **Joining.** While there is a free row and some budget, the head of the queue becomes a running request, and feeds
# what fits. Nobody overtakes. A request that could not feed a single token does not join yet.
#
# `commit(rows, next_token)` is called when the forward pass is done, with the pairs that `plan` gave.
#
# **Counting.** What was fed has keys and values now.
#
# **Sampling.** A request whose tokens have all been fed gets one new token, `next_token(request)`:
# `request.append(token)` gives it its token, and there is no other way; the engine's requests, too, have no list
# `output`. A prompt that was fed in part gets none: the model has not seen its end yet.
#
# **Leaving.** Who has finished is no longer running, and its row is free for the next step.

# %%
class Scheduler:
    """Decides who is in the next forward pass."""

    def __init__(self, max_batch, max_step_tokens):
        self.max_batch, self.max_step_tokens = max_batch, max_step_tokens
        self.waiting = deque()  # the longest waiting first
        self.running = []  # the oldest first

    def add(self, request):
        """Put a request in the queue."""
        self.waiting.append(request)

    def plan(self):
        """The next step: a list of (request, count of tokens to feed)."""
        ### BEGIN SOLUTION
        rows, budget = [], self.max_step_tokens
        for request in self.running:
            if request.num_pending == 1:
                rows.append((request, 1))
                budget -= 1
        for request in self.running:
            if request.num_pending > 1:
                count = min(request.num_pending, budget)
                rows.append((request, count))
                budget -= count
        while self.waiting and budget > 0 and len(self.running) < self.max_batch:
            request = self.waiting.popleft()
            self.running.append(request)
            count = min(request.num_pending, budget)
            rows.append((request, count))
            budget -= count
        return rows
        ### END SOLUTION

    def commit(self, rows, next_token):
        """Take what the step computed: `next_token(request)` is the token that follows all of a request's tokens."""
        ### BEGIN SOLUTION
        for request, count in rows:
            request.num_kv += count
            if request.num_pending == 0:
                request.append(next_token(request))
        self.running = [request for request in self.running if not request.finished]
        ### END SOLUTION


# %%
check("continuous_scheduler", Scheduler)

# %% [markdown]
# ## At work
#
# Three rows, six tokens a step. Request 3 has a prompt of nine tokens, and request 4 finds no free row at first.

# %% tags=["demo"]
from minillm.course.show.exercise_drawings import gantt

scheduler, steps = Scheduler(max_batch=3, max_step_tokens=6), []
for name, prompt, answer in ((1, 2, 3), (2, 3, 6), (3, 9, 2), (4, 1, 4)):
    scheduler.add(Request(name, prompt, answer))
while (scheduler.waiting or scheduler.running) and len(steps) < 40:
    rows = scheduler.plan()
    print(f"step {len(steps) + 1}: " + "  ".join(f"{request.id} feeds {count}" for request, count in rows))
    steps.append([(request.id, "decode" if request.num_output else "prefill") for request, _ in rows])
    scheduler.commit(rows, next_token=lambda request: 7)

# %% [markdown]
# The same steps as a Gantt chart: one line for each row of the batch. Where is a row empty, and for how long?

# %% tags=["demo"]
gantt(steps)
