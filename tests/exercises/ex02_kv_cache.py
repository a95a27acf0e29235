"""Wrong and right answers to exercise 2."""

import torch
from wrong_answers import Mutant

from minillm.ladder.decode import attend

MUTANTS = [
    Mutant("kv_cache", "forgets to store", "self.keys[layer], self.values[layer] = k, v", "pass",
           caught_by="a new token sees what was stored before"),
    Mutant("kv_cache", "stores the first call only", "self.keys[layer], self.values[layer] = k, v",
           "self.keys.setdefault(layer, k); self.values.setdefault(layer, v)",
           caught_by="everything that was fed is kept, not only the last call's"),
    Mutant("kv_cache", "new before old",
           "k = torch.cat((self.keys[layer], k))\n            v = torch.cat((self.values[layer], v))",
           "k = torch.cat((k, self.keys[layer]))\n            v = torch.cat((v, self.values[layer]))",
           caught_by="several tokens on a warm cache see what stands before each of them, in order"),
    Mutant("kv_cache", "keys in the values' place", "torch.cat((self.values[layer], v))",
           "torch.cat((self.keys[layer], v))", caught_by="a new token sees what was stored before"),
    Mutant("kv_cache", "one store for all layers", "if layer in self.keys:",
           "layer = 0\n        if layer in self.keys:",
           caught_by="each layer has its own keys and values", says="share one store"),
    Mutant("kv_cache", "one length for all layers, counted on in each",
           """        if layer in self.keys:
            k = torch.cat((self.keys[layer], k))
            v = torch.cat((self.values[layer], v))
        self.keys[layer], self.values[layer] = k, v
        return attention(q, k, v)""",
           """        start = getattr(self, "length", 0)
        self.length = start + len(k)
        store = self.keys.setdefault(layer, torch.zeros(2, 64, *k.shape[1:]))
        store[0, start : self.length], store[1, start : self.length] = k, v
        return attention(q, *store[:, : self.length])""",
           caught_by="each layer has its own keys and values", says="counted once a layer instead of once a call"),
    Mutant("kv_cache", "one store for all caches", "self.keys, self.values = {}, {}",
           "KVCache.shared = KVCache.__dict__.get('shared') or ({}, {}); self.keys, self.values = KVCache.shared",
           caught_by="two sequences do not share a cache"),
    Mutant("kv_cache", "no mask among the new tokens", "return attention(q, k, v)",
           "return torch.cat([attention(row[None], k, v) for row in q])",
           caught_by="the first tokens attend to themselves"),
    Mutant("kv_cache", "no mask on a warm cache", "        self.keys[layer], self.values[layer] = k, v\n        return",
           "        warm = layer in self.keys\n        self.keys[layer], self.values[layer] = k, v\n"
           "        if warm:\n            return torch.cat([attention(row[None], k, v) for row in q])\n        return",
           caught_by="several tokens on a warm cache see what stands before each of them, in order"),
    Mutant("kv_cache", "a list of 30 layers", "if layer in self.keys:", "if list(range(30))[layer] in self.keys:",
           caught_by="it works for models with any number of layers and heads"),
    Mutant("cached_decode", "asks the cache how long the text is",
           "position = [], list(prompt_ids), 0", "position = [], list(prompt_ids), cache.length",
           caught_by="the first token is the model's choice behind the prompt", says="so count yourself"),
    Mutant("cached_decode", "takes the first row", "logits[-1]", "logits[0]",
           caught_by="the first token is the model's choice behind the prompt"),
    Mutant("cached_decode", "feeds everything again", "        answer += feed\n",
           "        answer += feed\n        feed = [*prompt_ids, *answer]; position = 0\n",
           caught_by="the prompt is fed once, and then one token a step"),
    Mutant("cached_decode", "positions from 0 in every pass", "torch.arange(position, position + len(feed))",
           "torch.arange(len(feed))", caught_by="each token is fed at its place in the text"),
    Mutant("cached_decode", "positions off by one behind the prompt", "position += len(feed)",
           "position += len(feed) + 1 if position == 0 else len(feed)",
           caught_by="each token is fed at its place in the text"),
    Mutant("cached_decode", "one token too many", "while len(answer) < max_tokens", "while len(answer) <= max_tokens",
           caught_by="it makes exactly max_tokens tokens, and does not feed the last"),
    Mutant("cached_decode", "always one token", "while len(answer) < max_tokens:",
           "while not answer or len(answer) < max_tokens:",
           caught_by="it makes exactly max_tokens tokens, and does not feed the last"),
    Mutant("cached_decode", "feeds the last token too", "    return answer",
           "    model.forward(torch.tensor(feed), torch.tensor([position]), cache)\n    return answer",
           caught_by="it makes exactly max_tokens tokens, and does not feed the last"),
    Mutant("cached_decode", "never stops", "if answer[-1] in stop_ids:", "if False:",
           caught_by="a stop token ends the answer, and is part of it", says="goes on after a stop token"),
    Mutant("cached_decode", "feeds the stop token too",
           "        feed = [int(logits[-1].argmax())]\n        answer += feed\n"
           "        if answer[-1] in stop_ids:\n            break\n",
           "        if answer and answer[-1] in stop_ids:\n            break\n"
           "        feed = [int(logits[-1].argmax())]\n        answer += feed\n",
           caught_by="a stop token ends the answer, and is part of it"),
    Mutant("cached_decode", "leaves the stop token out", "            break",
           "            answer.pop()\n            break",
           caught_by="a stop token ends the answer, and is part of it", says="leaves the stop token out"),
    Mutant("cached_decode", "stops at the prompt's own token", "answer, feed, position = [], list(prompt_ids), 0",
           "answer, feed, position = [], list(prompt_ids), 0\n    if prompt_ids[-1] in stop_ids:\n        return []",
           caught_by="a stop token ends the answer, and is part of it", says="a token of the prompt"),
]

SURVIVORS = {}


def attention(q, k, v):
    return attend(q, k, v, start=len(k) - len(q))


class CacheOfParts:
    """Keeps what it was handed in a list, and joins it when it is needed."""

    def __init__(self):
        self.parts = {}

    def attend(self, layer, q, k, v):
        parts = self.parts.setdefault(layer, [])
        parts.append((k, v))
        keys, values = (torch.cat(side) for side in zip(*parts, strict=True))
        return attention(q, keys, values)


class CacheInDoubles:
    """Room for the longest in each layer, fp64, and attention by einsum."""

    def __init__(self):
        self.room, self.length = {}, {}

    def attend(self, layer, q, k, v):
        if layer not in self.room:
            self.room[layer] = torch.full((2, 64, *k.shape[1:]), float("nan"), dtype=torch.float64)
        start = self.length.get(layer, 0)
        end = self.length[layer] = start + len(k)
        self.room[layer][0, start:end], self.room[layer][1, start:end] = k, v
        group = q.shape[1] // k.shape[1]
        keys, values = (side[:end].repeat_interleave(group, dim=1) for side in self.room[layer])
        scores = torch.einsum("nhd,shd->hns", q.double(), keys) / q.shape[-1] ** 0.5
        ahead = torch.arange(end)[None] > torch.arange(start, end)[:, None]
        weights = scores.masked_fill(ahead, float("-inf")).softmax(-1)
        return torch.einsum("hns,shd->nhd", weights, values)


@torch.inference_mode()
def decode_in_two_parts(model, cache, prompt_ids, max_tokens, stop_ids=()):
    if max_tokens < 1:
        return []
    logits = model.forward(torch.tensor(prompt_ids), torch.arange(len(prompt_ids)), cache)
    answer = [logits[-1].argmax().item()]
    while len(answer) < max_tokens and answer[-1] not in stop_ids:
        place = torch.tensor([len(prompt_ids) + len(answer) - 1])
        answer.append(model.forward(torch.tensor(answer[-1:]), place, cache)[0].argmax().item())
    return answer


@torch.inference_mode()
def decode_last_row_only(model, cache, prompt_ids, max_tokens, stop_ids=()):
    text = [*prompt_ids]
    done = 0
    for _ in range(max_tokens):
        fed = torch.tensor(text[done:])
        last = torch.tensor([len(fed) - 1])
        logits = model.forward(fed, torch.arange(len(text))[done:], cache, last)
        done = len(text)
        text.append(int(logits.topk(1).indices))
        if text[-1] in stop_ids:
            break
    return text[len(prompt_ids) :]


ALTERNATIVES = {
    "kv_cache": [CacheOfParts, CacheInDoubles],
    "cached_decode": [decode_in_two_parts, decode_last_row_only],
}
