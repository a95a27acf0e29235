# %% [markdown]
# # Exercise 2 · Decode with a KV cache
#
# In notebook 1 a loop that computed everything again became a loop that feeds one token a step. Here you write the
# cache, and then the loop.
#
# **To look at**: notebook 1, "What can be kept?" and "Build: rung 1"; in the package `minillm/ladder/decode.py`.

# %%
import torch

import minillm
from minillm.course.grading import check, hint
from minillm.ladder.decode import attend


def attention(q, k, v):
    """Causal attention of the newest n of S tokens: q [n, Hq, D], k and v [S, Hkv, D] -> [n, Hq, D]."""
    return attend(q, k, v, start=len(k) - len(q))


# %% [markdown]
# ## The cache
#
# In every layer the model hands its cache the queries, keys and values of the tokens that are fed, and wants what
# attention makes of them. Without a cache that is `attention(q, k, v)`. With one, a token must also see the keys and
# values of all tokens that were fed before.
#
# **Storing.** `attend` keeps what it is given, per layer: the layers have different keys for the same token. The new
# ones stand after the old ones. The cache is not told beforehand how many layers or how many tokens will come.
#
# **Attending.** The new queries look at everything that is stored in their layer, the new tokens included.
# `attention` above takes care of the order: each of the new tokens sees what stands before it, and itself.

# %%
class KVCache:
    """Keys and values of one sequence, for each layer."""

    def __init__(self):
        ### BEGIN SOLUTION
        self.keys, self.values = {}, {}  # layer -> [S, Hkv, D]
        ### END SOLUTION

    def attend(self, layer, q, k, v):
        """Keep k and v [n, Hkv, D] behind what the layer has, and let q [n, Hq, D] attend to all of it: [n, Hq, D]."""
        ### BEGIN SOLUTION
        if layer in self.keys:
            k = torch.cat((self.keys[layer], k))
            v = torch.cat((self.values[layer], v))
        self.keys[layer], self.values[layer] = k, v
        return attention(q, k, v)
        ### END SOLUTION


# %%
check("kv_cache", KVCache)

# %% [markdown]
# ## The loop
#
# `model.forward(tokens, positions, cache)` takes the ids to feed and their positions in the text, both as tensors
# [n], and gives logits [n, V]: row i says what follows token i.
#
# **What is fed.** First the whole prompt. Then, at each step, the token that was just chosen, and nothing else.
#
# **Where it stands.** A token's position is its place in the whole text, from 0 on. The model turns queries and keys
# by it, so a wrong one gives fluent nonsense. The cache does not tell how long the text is: count yourself.
#
# **What is chosen.** The largest logit of the last row.
#
# **When it ends.** After `max_tokens` tokens, or with a token of `stop_ids`, which is part of the answer. The last
# token is never fed: nobody asks what follows it. If no token is wanted, nothing is fed at all.

# %%
@torch.inference_mode()
def decode(model, cache, prompt_ids, max_tokens, stop_ids=()):
    """The greedy continuation of `prompt_ids`, as a list of ids. `cache` is empty."""
    ### BEGIN SOLUTION
    answer, feed, position = [], list(prompt_ids), 0
    while len(answer) < max_tokens:
        positions = torch.arange(position, position + len(feed))
        logits = model.forward(torch.tensor(feed), positions, cache)
        position += len(feed)
        feed = [int(logits[-1].argmax())]
        answer += feed
        if answer[-1] in stop_ids:
            break
    return answer
    ### END SOLUTION


# %%
check("cached_decode", decode)

# %% [markdown]
# ## With the real model
#
# The checks use a small model with random weights. This is SmolLM2, with your cache and your loop.

# %% tags=["demo"]
model, tokenizer = minillm.load_model(dtype="fp32", device="cpu"), minillm.load_tokenizer()
prompt = tokenizer.chat("What is the capital of France?")
print(tokenizer.decode(decode(model, KVCache(), prompt, 20, model.config.eos_token_id)))
