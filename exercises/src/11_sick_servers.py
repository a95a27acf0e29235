# %% [markdown]
# # Exercise 11 · Four sick servers
#
# Four servers have unhappy users, each for another reason. On all of them "the GPU is at 100 %". You have their
# records, and write down what a good engineer sees in them: the cause, and what helps.
#
# **To look at**: notebook 11; in the package `StepRecord` in `minillm/ladder/records.py`, and
# `minillm/course/grading/servers.py`, where the servers are made.

# %%
from minillm.course.grading import check, hint
from minillm.course.grading.servers import SERVERS, TREATMENTS, complaint, examine

# %% [markdown]
# ## The causes
#
# | diagnosis | what is the matter |
# |---|---|
# | `"batch_cap"` | more rows could run, but the setting `max_batch` forbids it |
# | `"memory"` | the blocks for keys and values are taken, so requests wait or are preempted |
# | `"prompts"` | steps are filled with prompt tokens, which take their time to compute |
# | `"knee"` | so many tokens are read for so many rows that every step has become slow |
#
# `diagnose(records, settings)` returns one of the four names. `records.steps` is the list of steps:
#
# | field of a step | what |
# |---|---|
# | `duration` | seconds |
# | `rows` | requests in it |
# | `waiting` | requests in the queue |
# | `prompt_tokens`, `decode_tokens` | tokens fed: of prompts, and newest output tokens |
# | `blocks_live`, `blocks_cached`, `blocks_free` | held by requests; held by nobody, but still known; empty |
#
# `settings` has `max_batch` and `max_step_tokens`, the most tokens that a step may feed. A long step matters more
# than a short one: take means over time, each step counting for as long as it took.
#
# Here are the four, with one load. The checks draw other loads, and servers with other settings. Leave the records as
# they are. Which figure gives each of the four away?

# %% tags=["demo"]
for name, server in SERVERS.items():
    steps = examine(name, seed=0).steps
    busy = sum(s.duration for s in steps)
    figures = "rows", "waiting", "prompt_tokens", "decode_tokens", "blocks_live", "blocks_cached", "blocks_free"
    means = {figure: sum(getattr(s, figure) * s.duration for s in steps) / busy for figure in figures}
    print(f"{name}: {server.complaint} {complaint(name, seed=0):.3f}; {server.settings}")
    shortest = min(s.duration for s in steps)
    print(f"   a step takes {busy / len(steps) * 1e3:.1f} ms, the shortest {shortest * 1e3:.1f} ms;",
          ", ".join(f"{figure} {value:.1f}" for figure, value in means.items()))

# %%
def diagnose(records, settings):
    """records: what a server wrote down, settings: its settings -> the name of the cause."""
    ### BEGIN SOLUTION
    steps = records.steps
    busy = sum(s.duration for s in steps)

    def mean(value):
        return sum(value(s) * s.duration for s in steps) / busy

    used = {
        "batch_cap": mean(lambda s: s.rows) / settings.max_batch,
        "memory": mean(lambda s: s.blocks_live / (s.blocks_live + s.blocks_cached + s.blocks_free)),
        "prompts": mean(lambda s: s.prompt_tokens) / settings.max_step_tokens,
        "knee": 1.0 - min(s.duration for s in steps) / mean(lambda s: s.duration),
    }
    return max(used, key=used.get)
    ### END SOLUTION


# %%
check("diagnose", diagnose)

# %% [markdown]
# ## Treatments
#
# | treatment | what it does |
# |---|---|
# | `"more_rows"` | 16 times as many rows may run |
# | `"fewer_rows"` | a quarter as many |
# | `"bigger_steps"` | a step may feed 4 times as many tokens |
# | `"int8_kv"` | keys and values in 8 bits |
# | `"prefix_cache"` | blocks of a prompt that is known from before are not computed again |
# | `"second_server"` | another machine takes half of the requests, and costs as much as the first |
#
# `treat(cause)` returns the name of a treatment. The checks apply it, and serve the load again: of the complaint (the
# p99 of the time to first token, or at the knee the p50 between tokens) at most 70 % may be left. A second server is
# for where nothing cheaper helps.

# %%
def treat(cause):
    """cause: a name that `diagnose` may return -> the name of a treatment."""
    ### BEGIN SOLUTION
    return {
        "batch_cap": "more_rows",
        "memory": "int8_kv",
        "prompts": "prefix_cache",
        "knee": "second_server",
    }[cause]
    ### END SOLUTION


# %%
check("treat", treat)

# %% [markdown]
# ## What each would have done
#
# The complaint that is left, as a share of what it was. Some treatments do harm.

# %% tags=["demo"]
for name in SERVERS:
    before = complaint(name, seed=0)
    left = {treatment: complaint(name, 0, treatment) / before for treatment in TREATMENTS}
    print(f"{name}: " + ", ".join(f"{treatment} {share:.0%}" for treatment, share in left.items()))
