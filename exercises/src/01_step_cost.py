# %% [markdown]
# # Exercise 1 · What a step costs
#
# Before you measure a server, work out what it must do at the least. Five sums are enough: the weights, the cache, the
# bytes and the FLOPs of a decode step, and how many requests fit into memory.
#
# **To look at**: notebook 0, "What a step must do"; notebook 1, "The bytes of a token"; in the package
# `minillm/measure/roofline.py` and `minillm/measure/capacity.py`.

# %%
import minillm
from minillm.course.grading import check, hint

config = minillm.ModelConfig.preset("smollm2-135m")
config

# %% [markdown]
# `config` describes a model's shape with transformers' names. You need `hidden_size`, `intermediate_size`,
# `num_hidden_layers`, `num_attention_heads` (queries), `num_key_value_heads`, `head_dim` and `vocab_size`.
#
# Do not assume that `head_dim` is `hidden_size / num_attention_heads`: for Qwen3 it is not.
#
# ## The weights
#
# A layer has seven matrices. Four belong to attention: the hidden state becomes queries, keys and values, and what
# the query heads return becomes a hidden state again. Three belong to the MLP: gate and up go from `hidden_size` to
# `intermediate_size`, down goes back. Behind the last layer the head turns a hidden state into one number for each
# entry of the vocabulary.
#
# Count the numbers in all matrices that a decode step reads. Leave out norms and biases, which are small, and the
# embedding table, of which a step reads a row.

# %%
def matrix_weights(config):
    """How many numbers the layers' matrices and the head hold."""
    ### BEGIN SOLUTION
    query_width = config.num_attention_heads * config.head_dim
    kv_width = config.num_key_value_heads * config.head_dim
    attention = config.hidden_size * (2 * query_width + 2 * kv_width)
    mlp = 3 * config.hidden_size * config.intermediate_size
    return config.num_hidden_layers * (attention + mlp) + config.vocab_size * config.hidden_size
    ### END SOLUTION


# %%
check("matrix_weights", matrix_weights)

# %% [markdown]
# ## The cache
#
# For each token, each layer keeps a key and a value of `head_dim` numbers for every KV head.

# %%
def kv_bytes_per_token(config, bytes_per_number):
    """Bytes of keys and values that one token takes in the cache."""
    ### BEGIN SOLUTION
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * bytes_per_number
    ### END SOLUTION


# %%
check("kv_bytes_per_token", kv_bytes_per_token)

# %% [markdown]
# ## The bytes of a step
#
# A decode step feeds one token for each request of the batch. `contexts` lists how many tokens each of these new
# tokens looks at, itself included. The step reads every weight once, however many requests share it, and the keys
# and values of all these tokens. There is no padding: each request brings its own length. Leave the list as it is.

# %%
def decode_bytes(weight_bytes, bytes_per_token, contexts):
    """The least bytes that a decode step moves. `bytes_per_token` is what a token takes in the cache."""
    ### BEGIN SOLUTION
    return weight_bytes + bytes_per_token * sum(contexts)
    ### END SOLUTION


# %%
check("decode_bytes", decode_bytes)

# %% [markdown]
# ## The FLOPs of a step
#
# A multiplication with an addition counts as 2 FLOPs. Each new token meets every weight of the matrices once. In
# each layer, each **query** head multiplies its query with the key of every token that it looks at, and then its
# weights with the values: two products of `head_dim` numbers for each pair.

# %%
def decode_flops(weights, config, contexts):
    """The FLOPs of a decode step. `weights` is the number of weights in the matrices."""
    ### BEGIN SOLUTION
    for_each_pair = 2 * config.num_hidden_layers * config.num_attention_heads * config.head_dim
    return 2 * (weights * len(contexts) + for_each_pair * sum(contexts))
    ### END SOLUTION


# %%
check("decode_flops", decode_flops)

# %% [markdown]
# ## The capacity sum
#
# What the weights and the overhead (activations, the runtime) leave of the memory is for the cache. A GB is 10⁹
# bytes here. How many requests of `context` tokens fit at once? Half a request does not run: the answer is an `int`.

# %%
def requests_that_fit(memory_gb, weights_gb, overhead_gb, context, bytes_per_token):
    """The number of requests of `context` tokens each whose keys and values fit; 0 if nothing is left."""
    ### BEGIN SOLUTION
    left = (memory_gb - weights_gb - overhead_gb) * 10**9
    return max(0, int(left // (context * bytes_per_token)))
    ### END SOLUTION


# %%
check("requests_that_fit", requests_that_fit)

# %% [markdown]
# ## What it says
#
# Llama-3-8B in 16 bits, with 1,000 tokens in each request, on a GPU that reads 1.5 TB/s and computes 250 TFLOP/s. Which
# of the two takes longer, and how far does a larger batch change that?

# %% tags=["demo"]
llama = minillm.ModelConfig.preset("llama-3-8b")
weights, per_token = matrix_weights(llama), kv_bytes_per_token(llama, 2)
for batch in (1, 8, 64, 256):
    contexts = [1000] * batch
    by_memory = decode_bytes(2 * weights, per_token, contexts) / 1.5e12
    by_compute = decode_flops(weights, llama, contexts) / 250e12
    print(f"batch {batch:>3}: memory {by_memory * 1e3:5.1f} ms, compute {by_compute * 1e3:5.1f} ms, "
          f"at most {batch / max(by_memory, by_compute):,.0f} tokens/s")
print(f"80 GB hold {requests_that_fit(80, 16, 4, 4096, per_token)} requests of 4,096 tokens")
