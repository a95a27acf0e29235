# %% [markdown]
# # Exercise 9 · Accept a draft, or not
#
# In notebook 6 a cheap drafter guesses tokens and the target verifies them in one forward. Here you decide which
# drafts stay, so that the answer is the target's own: token for token, or in distribution.
#
# **To look at**: notebook 6; in the package `minillm/ladder/speculative.py`.

# %%
from collections import Counter

import torch

from minillm.course.grading import check, hint

# %% [markdown]
# ## Greedy
#
# The row fed its newest token and k drafts. `best` has k + 1 entries: `best[i]` is what the target says at the place
# of draft i, and `best[k]` what it says after the last draft.
#
# Drafts are taken up to the first that the target would not have said. The target's own token at that place follows.
# So a step gives at least one token and at most k + 1. Leave the lists as they are; that goes for all three tasks.

# %%
def verify_greedy(best, drafts):
    """best: k + 1 token ids, drafts: k token ids -> the list of tokens that this step gives."""
    ### BEGIN SOLUTION
    accepted = 0
    while accepted < len(drafts) and drafts[accepted] == best[accepted]:
        accepted += 1
    return [*drafts[:accepted], best[accepted]]
    ### END SOLUTION


# %%
check("verify_greedy", verify_greedy)

# %% [markdown]
# Here is what your verification makes of the drafts of a drafter that is often wrong. The target would say the
# whole sentence.

# %% tags=["demo"]
from minillm.course.show.exercise_drawings import draft_tree

sentence = "the first ship is met with a brass band and everybody gets an orange"
guesses = {"the": "first ship was", "is": "met by the", "by": "a train and", "with": "a brass band", "and": "the boys",
           "everybody": "gets an apple"}
text = sentence.split()
words = list(dict.fromkeys([*text, *" ".join(guesses.values()).split()]))  # a token id is a place in this list
made, rounds = 1, []
while made < len(text) and len(rounds) < 20:
    drafts = guesses.get(text[made - 1], "").split()[: len(text) - made - 1]
    best = [words.index(word) for word in text[made : made + len(drafts) + 1]]
    given = verify_greedy(best, [words.index(word) for word in drafts])
    rounds.append((drafts, [words[token] for token in given]))
    made += len(given)
draft_tree(text[0], rounds)

# %% [markdown]
# ## What is left over
#
# When sampling, the target has a distribution p over the V tokens, and the draft was drawn from another one, q. Where
# q gives a token more often than p, drafts of it are refused from time to time. What must make up for that are the
# tokens that p gives more often than q.
#
# The residual is max(0, p - q) for each token, divided by the sum of these over all tokens. Where p and q are equal
# nothing is left over; return p then.

# %%
def residual(p, q):
    """p [V], q [V], each with sum 1 -> the residual [V]."""
    ### BEGIN SOLUTION
    left = (p - q).clamp_min(0)
    return left / left.sum() if left.sum() > 0 else p
    ### END SOLUTION


# %%
check("residual", residual)

# %% [markdown]
# ## Sampled
#
# `p[i]` is the target's distribution at the place of draft i, `p[k]` the one after the last draft. `q[i]` is what
# draft i was drawn from. `u[i]` are uniform numbers from 0 up to, but not including, 1.
#
# - Draft i, the token x, is accepted if u[i] < p[i, x] / q[i, x].
# - At the first draft that is not accepted, one token is drawn from the residual of p[i] and q[i]. That ends the step.
# - If all are accepted, one token is drawn from p[k].
#
# `u_next` is the uniform number for that last draw. It is made with `draw`, which is given. Your `residual` is used
# here, so pass its checks first.

# %%
def draw(distribution, u):
    """The first token at which the sum of the probabilities so far is above u."""
    return int((distribution.cumsum(0) <= u).sum())


# %%
def verify_sampled(p, q, drafts, u, u_next):
    """p [k + 1, V], q [k, V], drafts: k token ids, u: k numbers, u_next: a number -> the list of tokens."""
    ### BEGIN SOLUTION
    for i, draft in enumerate(drafts):
        if u[i] * q[i, draft] >= p[i, draft]:
            return [*drafts[:i], draw(residual(p[i], q[i]), u_next)]
    return [*drafts, draw(p[-1], u_next)]
    ### END SOLUTION


# %%
check("verify_sampled", verify_sampled)

# %% [markdown]
# ## Why it is exact
#
# A token x is drafted and accepted with probability q(x) · min(1, p(x) / q(x)) = min(q(x), p(x)). What is missing to
# p(x) is max(0, p(x) - q(x)), and that is what the residual gives. Here is a drafter that is often wrong, and the
# frequencies of the first token of 5,000 rounds, in per cent:

# %% tags=["demo"]
p, q = torch.tensor([0.5, 0.2, 0.2, 0.1]), torch.tensor([0.1, 0.2, 0.3, 0.4])
first, tokens = Counter(), 0
numbers = torch.rand(5000, 3, generator=torch.Generator().manual_seed(0))
for u_draft, u, u_next in numbers.tolist():
    answer = verify_sampled(torch.stack((p, p)), q[None], [draw(q, u_draft)], [u], u_next)
    first[answer[0]] += 1
    tokens += len(answer)
print("target:", [round(100 * x) for x in p.tolist()], "drafter:", [round(100 * x) for x in q.tolist()])
print("answers:", [round(first[token] / 50) for token in range(4)], f"with {tokens / 5000:.2f} tokens a round")
