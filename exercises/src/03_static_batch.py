# %% [markdown]
# # Exercise 3 · A static batch and its idle slots
#
# A static batch is filled once, and ends with its longest row. Until then a row that has finished stays in every
# forward pass. Here you play that policy through without a model, and count what it costs.
#
# **To look at**: notebook 2, "Idle slot-steps"; in the package `minillm/ladder/static.py`.

# %%
from minillm.course.grading import check, hint

# %% [markdown]
# ## The steps of static batches
#
# `lengths[i]` is how many tokens the answer of request i will have, at least one. Requests run in the order of their
# numbers. Prompts cost nothing here: a request's first step gives its first token, and each further step one more.
#
# **Filling.** Up to `batch` requests are taken from the queue at once. Nobody joins until all of them have finished.
#
# **Running.** At each step every request of the batch has a row, the finished ones too. A row is idle if its request
# had all its tokens before this step.
#
# **Ending.** When the longest has its last token, the whole batch leaves, and the next one is filled for the next
# step. The last batch may have fewer rows; a row that nobody ever filled does not count.
#
# Return the list of steps. A step is a list of rows, in order of the requests' numbers, and a row is a pair
# `(request, idle)`. Leave the list of lengths as it is, here and below.

# %%
def run_static(lengths, batch):
    """The steps of static batches of up to `batch` requests, each a list of (request, idle)."""
    ### BEGIN SOLUTION
    steps = []
    for first in range(0, len(lengths), batch):
        members = range(first, min(first + batch, len(lengths)))
        for made in range(max(lengths[request] for request in members)):
            steps.append([(request, made >= lengths[request]) for request in members])
    return steps
    ### END SOLUTION


# %%
check("run_static", run_static)

# %% [markdown]
# ## Idle slot-steps
#
# A row that is idle in a step is one idle slot-step. It takes part in the forward pass for nothing.

# %%
def idle_slot_steps(steps):
    """How many rows were idle, over all steps."""
    ### BEGIN SOLUTION
    return sum(idle for step in steps for _, idle in step)
    ### END SOLUTION


# %%
check("idle_slot_steps", idle_slot_steps)

# %% [markdown]
# ## When the answer comes back
#
# `generate` of a static batch returns when the whole batch has ended. So a request waits for the batches before its
# own, and then for the longest of its own batch, however short its own answer is.
#
# Return for each request the number of steps that have run when its answer comes back.

# %%
def returned_after(lengths, batch):
    """For each request, the number of steps after which its batch, and with it its answer, comes back."""
    ### BEGIN SOLUTION
    result, passed = [], 0
    for first in range(0, len(lengths), batch):
        group = lengths[first : first + batch]
        passed += max(group)
        result += [passed] * len(group)
    return result
    ### END SOLUTION


# %%
check("returned_after", returned_after)

# %% [markdown]
# ## One long answer among short ones
#
# Seven answers of 40 tokens in one batch with an answer of 800:

# %% tags=["demo"]
lengths = [800] + [40] * 7
steps = run_static(lengths, 8)
rows, idle = sum(map(len, steps)), idle_slot_steps(steps)
print(f"{len(steps)} steps, {rows:,} rows, {idle:,} of them idle: {idle / rows:.0%}")
print(f"an answer of 40 tokens comes back after {returned_after(lengths, 8)[-1]} steps")
