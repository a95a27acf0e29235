"""Wrong and right answers to exercise 7."""

import torch
from torch.nn import functional as F
from wrong_answers import Mutant

MUTANTS = [
    Mutant("gather", "reads side by side", "store[block_table]", "store[: len(block_table)]",
           caught_by="one full block comes whole, from where the table says"),
    Mutant("gather", "reads in the store's order", "store[block_table]", "store[sorted(block_table)]",
           caught_by="blocks come in the table's order"),
    Mutant("gather", "takes the last block whole", "[:num_tokens]", "",
           caught_by="a part-filled last block gives only what is stored"),
    Mutant("gather", "one token too many", "[:num_tokens]", "[: num_tokens + 1]",
           caught_by="a part-filled last block gives only what is stored"),
    Mutant("gather", "one token too few", "[:num_tokens]", "[: num_tokens - 1]",
           caught_by="one full block comes whole, from where the table says"),
    Mutant("gather", "whole blocks only, rounded up", "[:num_tokens]", "[: -(-num_tokens // 4) * 4]",
           caught_by="a part-filled last block gives only what is stored"),
    Mutant("gather", "takes the last tokens", "[:num_tokens]", "[-num_tokens:]",
           caught_by="a part-filled last block gives only what is stored"),
    Mutant("gather", "reads blocks that are only reserved", "[:num_tokens]",
           "[: num_tokens if num_tokens % store.shape[1] else len(block_table) * store.shape[1]]",
           caught_by="blocks that are only reserved are left out"),
    Mutant("gather", "blocks of 4 and one head", "store[block_table].flatten(0, 1)",
           "store[block_table].reshape(-1, 1, 2)", caught_by="any block size, any number of heads"),
    Mutant("gather", "in fp32 whatever the store", "store[block_table]", "store.float()[block_table]",
           caught_by="what is gathered has the store's dtype, and the store stays as it was"),
    Mutant("paged_attention", "masks the last block only", "    weights = ",
           "    unseen = unseen.clone()\n"
           "    unseen[:, : (num_tokens - 1) // keys.shape[1] * keys.shape[1]] = False\n    weights = ",
           caught_by="a whole prompt over several blocks, with grouped heads of any size"),
    Mutant("paged_attention", "does not scale", " / head_dim**0.5", "",
           caught_by="scores are divided by the root of head_dim"),
    Mutant("paged_attention", "divides by head_dim", "head_dim**0.5", "head_dim",
           caught_by="scores are divided by the root of head_dim"),
    Mutant("paged_attention", "deals KV heads out in turns",
           "k = gather(keys, block_table, num_tokens).repeat_interleave(group, dim=1)",
           "k = gather(keys, block_table, num_tokens).repeat(1, group, 1)",
           caught_by="neighbouring query heads share a KV head"),
    Mutant("paged_attention", "ignores the table", "k = gather(keys, block_table, num_tokens)",
           "k = keys.flatten(0, 1)[:num_tokens]", caught_by="the table says where a block lies"),
    Mutant("paged_attention", "values without the table", "v = gather(values, block_table, num_tokens)",
           "v = values.flatten(0, 1)[:num_tokens]", caught_by="the table says where a block lies",
           says="read from where the text would lie without a table"),
    Mutant("paged_attention", "values in another order than keys", "v = gather(values, block_table, num_tokens)",
           "v = gather(values, block_table[::-1], num_tokens)", caught_by="the table says where a block lies"),
    Mutant("paged_attention", "attends to whole blocks",
           "v = gather(values, block_table, num_tokens)",
           "num_tokens = -(-num_tokens // keys.shape[1]) * keys.shape[1]; v = gather(values, block_table, num_tokens)",
           caught_by="one stored token: every head gives that token's value"),
    Mutant("paged_attention", "masks the rest of the last block instead of leaving it out",
           """    k = gather(keys, block_table, num_tokens).repeat_interleave(group, dim=1)  # [S, Hq, D]
    v = gather(values, block_table, num_tokens).repeat_interleave(group, dim=1)  # [S, Hq, D]
    scores = torch.einsum("nhd,shd->nhs", q, k) / head_dim**0.5
    position = torch.arange(num_tokens - n, num_tokens)[:, None]  # [n, 1]
    unseen = torch.arange(num_tokens) > position  # [n, S]""",
           """    k = gather(keys, block_table, 999).repeat_interleave(group, dim=1)  # [S, Hq, D]
    v = gather(values, block_table, 999).repeat_interleave(group, dim=1)  # [S, Hq, D]
    scores = torch.einsum("nhd,shd->nhs", q, k) / head_dim**0.5
    position = torch.arange(num_tokens - n, num_tokens)[:, None]  # [n, 1]
    unseen = torch.arange(len(k)) > position  # [n, S]""",
           caught_by="of the last block, only what is stored is read"),
    Mutant("paged_attention", "one block more where the last is full",
           "q_heads // keys.shape[2]",
           "q_heads // keys.shape[2]; num_tokens = num_tokens if num_tokens % keys.shape[1] else "
           "min(num_tokens + keys.shape[1], len(block_table) * keys.shape[1])",
           caught_by="a text that ends with its block needs no further one"),
    Mutant("paged_attention", "no causal mask", "scores.masked_fill(unseen[:, None], -torch.inf)", "scores",
           caught_by="a new token sees itself and nothing behind it"),
    Mutant("paged_attention", "positions of new tokens counted from 0", "torch.arange(num_tokens - n, num_tokens)",
           "torch.arange(n)", caught_by="the table says where a block lies", says="saw position 0 only"),
    Mutant("paged_attention", "a mask that begins at the top left",
           'scores.masked_fill(unseen[:, None], -torch.inf).softmax(-1)',
           "scores.masked_fill(~torch.ones(n, num_tokens, dtype=torch.bool).tril()[:, None], -torch.inf).softmax(-1)",
           caught_by="the table says where a block lies", says="saw position 0 only"),
    Mutant("paged_attention", "PyTorch's attention with is_causal",
           'weights = scores.masked_fill(unseen[:, None], -torch.inf).softmax(-1)\n'
           '    return torch.einsum("nhs,shd->nhd", weights, v)',
           "q, k, v = (x.transpose(0, 1) for x in (q, k, v))\n"
           "    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1)",
           caught_by="the table says where a block lies", says="saw position 0 only"),
    Mutant("paged_attention", "softmax over the new tokens", ".softmax(-1)", ".softmax(0)",
           caught_by="the table says where a block lies", says="the softmax runs over the wrong axis"),
    Mutant("paged_attention", "a token does not see itself", "> position", ">= position",
           caught_by="one stored token: every head gives that token's value"),
    Mutant("paged_attention", "softmax over the heads", ".softmax(-1)", ".softmax(1)",
           caught_by="one stored token: every head gives that token's value"),
    Mutant("paged_attention", "scales the query in place", 'torch.einsum("nhd,shd->nhs", q, k) / head_dim**0.5',
           'torch.einsum("nhd,shd->nhs", q.div_(head_dim**0.5), k)', caught_by="nothing that was passed in is changed"),
]
SURVIVORS = {}


def gather_by_slots(store, block_table, num_tokens):
    """Every position's slot, one by one."""
    size = store.shape[1]
    slots = [block_table[position // size] * size + position % size for position in range(num_tokens)]
    return store.flatten(0, 1)[slots]


def gather_by_blocks(store, block_table, num_tokens):
    """Pieces of blocks, put one behind the other."""
    size = store.shape[1]
    pieces = [store[block, : max(0, num_tokens - i * size)] for i, block in enumerate(block_table)]
    return torch.cat(pieces)


def attention_in_double(q, keys, values, block_table, num_tokens):
    """One query head at a time, in fp64, with PyTorch's own attention."""
    k, v = (gather_by_slots(store, block_table, num_tokens).double() for store in (keys, values))
    n, heads, _ = q.shape
    mask = torch.ones(n, num_tokens, dtype=torch.bool).tril(num_tokens - n)
    group = heads // k.shape[1]
    out = [
        F.scaled_dot_product_attention(q[:, head].double(), k[:, head // group], v[:, head // group], mask)
        for head in range(heads)
    ]
    return torch.stack(out, dim=1)


def attention_by_blocks(q, keys, values, block_table, num_tokens):
    """One token at a time, one block at a time, with an online softmax."""
    n, heads, head_dim = q.shape
    size, kv_heads = keys.shape[1:3]
    out = torch.empty_like(q)
    for i in range(n):
        seen = num_tokens - n + i + 1
        query = q[i].view(kv_heads, heads // kv_heads, head_dim) * head_dim**-0.5
        highest = torch.full((kv_heads, heads // kv_heads, 1), -torch.inf)
        total, weighted = torch.zeros_like(highest), torch.zeros_like(query)
        for at in range(0, seen, size):
            k, v = (store[block_table[at // size], : seen - at].transpose(0, 1) for store in (keys, values))
            scores = query @ k.transpose(1, 2)
            top = torch.maximum(highest, scores.amax(-1, keepdim=True))
            weights, shrink = (scores - top).exp(), (highest - top).exp()
            total = total * shrink + weights.sum(-1, keepdim=True)
            weighted, highest = weighted * shrink + weights @ v, top
        out[i] = (weighted / total).view(heads, head_dim)
    return out


ALTERNATIVES = {
    "gather": [gather_by_slots, gather_by_blocks],
    "paged_attention": [attention_in_double, attention_by_blocks],
}
