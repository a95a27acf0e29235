# %% [markdown]
# # Exercise 7 · Paged attention
#
# In notebook 4 a text's keys and values lay in blocks all over the pool, and the answers stayed the same. Here you
# write the attention that makes this true: first the text in one run, then what each new token takes from it.
#
# **To look at**: notebook 4, "Build: a block table"; in the package `minillm/ladder/attention.py`.

# %%
import torch

from minillm.course.grading import check, hint

# %% [markdown]
# ## The text in one run
#
# The pool keeps the keys of all its blocks in one tensor, `store[block, place, head]`, of shape
# [P, block_size, Hkv, D]: P blocks, Hkv heads, D numbers each. Values lie in a second one of the same shape.
#
# A text's block table lists its blocks in the order of the text. With blocks of 4 and the table [6, 1], positions 0
# to 3 lie in block 6 and positions 4 to 7 in block 1.
#
# Of the text, `num_tokens` are stored. The last block may be full in part only, and the table may hold blocks for
# tokens that are still to come. All places behind the last stored token may hold anything, NaN too.
#
# `gather` returns the stored tokens' entries in the order of the text.

# %%
def gather(store, block_table, num_tokens):
    """store [P, block_size, Hkv, D], block_table a list of block numbers -> [num_tokens, Hkv, D]."""
    ### BEGIN SOLUTION
    return store[block_table].flatten(0, 1)[:num_tokens]
    ### END SOLUTION


# %%
check("gather", gather)

# %% [markdown]
# ## Attention over blocks
#
# One text is at a step: it brings n new tokens, whose queries are `q` [n, Hq, D]. All of its `num_tokens` keys and
# values are in the blocks, those of the new tokens too.
#
# For each new token and each query head: its scores are the products of its query with the keys that it sees,
# divided by the root of D. A softmax makes them weights, whose sum is 1. The result is the values' sum under these
# weights.
#
# There may be more query heads than KV heads: G = Hq / Hkv neighbouring query heads share one. With 6 query heads
# and 2 KV heads, query heads 0, 1 and 2 read KV head 0.
#
# ## Several new tokens
#
# n is 1 when the text decodes. It is more for a piece of a prompt, or when drafts are verified. The new tokens are
# the last n of the text: the i-th of them, from 0, stands at position `num_tokens - n + i`. It sees itself and
# everything before it, and nothing behind it.
#
# Do not change what you were given: keys and values go on being the cache.

# %%
def paged_attention(q, keys, values, block_table, num_tokens):
    """q [n, Hq, D], keys and values [P, block_size, Hkv, D] -> [n, Hq, D]."""
    ### BEGIN SOLUTION
    n, q_heads, head_dim = q.shape
    group = q_heads // keys.shape[2]
    k = gather(keys, block_table, num_tokens).repeat_interleave(group, dim=1)  # [S, Hq, D]
    v = gather(values, block_table, num_tokens).repeat_interleave(group, dim=1)  # [S, Hq, D]
    scores = torch.einsum("nhd,shd->nhs", q, k) / head_dim**0.5
    position = torch.arange(num_tokens - n, num_tokens)[:, None]  # [n, 1]
    unseen = torch.arange(num_tokens) > position  # [n, S]
    weights = scores.masked_fill(unseen[:, None], -torch.inf).softmax(-1)
    return torch.einsum("nhs,shd->nhd", weights, v)
    ### END SOLUTION


# %%
check("paged_attention", paged_attention)

# %% [markdown]
# ## The same, wherever the blocks lie
#
# One text of 10 tokens, in blocks that lie in order, and in blocks that do not.

# %% tags=["demo"]
text_keys, text_values = torch.randn(2, 12, 2, 8)  # 12 places, 2 KV heads, D = 8
q = torch.randn(1, 4, 8)
answers = []
for table in ([0, 1, 2], [5, 0, 3]):
    keys, values = torch.full((2, 6, 4, 2, 8), torch.nan)
    keys[table], values[table] = text_keys.unflatten(0, (3, 4)), text_values.unflatten(0, (3, 4))
    answers.append(paged_attention(q, keys, values, table, num_tokens=10))
print("same answer:", torch.allclose(*answers))

# %% [markdown]
# ## What it reads
#
# A text of 10 tokens, of which the last three are new, in blocks 5, 0 and 3 of a pool. Each value of the pool is
# changed in turn; where that changes the result of a new token, the token has read it.

# %% tags=["demo"]
from minillm.course.show.exercise_drawings import attention_map

attention_map(paged_attention, [5, 0, 3], num_tokens=10, new=3)
