"""Wrong and right answers to exercise 1."""

from wrong_answers import Mutant

WIDTHS = "keys and values are as wide as the KV heads, queries and output as the query heads"
WHOLE = "half a request does not run, and the number is an int"

MUTANTS = [
    Mutant("matrix_weights", "no gate", "3 * config.hidden_size", "2 * config.hidden_size",
           caught_by="the MLP of a layer has three matrices"),
    Mutant("matrix_weights", "no output projection", "2 * query_width", "query_width", caught_by=WIDTHS),
    Mutant("matrix_weights", "as many KV heads as query heads", "config.num_key_value_heads",
           "config.num_attention_heads", caught_by=WIDTHS),
    Mutant("matrix_weights", "queries as wide as the hidden state",
           "query_width = config.num_attention_heads * config.head_dim", "query_width = config.hidden_size",
           caught_by=WIDTHS),
    Mutant("matrix_weights", "no head", " + config.vocab_size * config.hidden_size", "",
           caught_by="the head reads the whole vocabulary, once"),
    Mutant("matrix_weights", "embedding counted too", "+ config.vocab_size", "+ 2 * config.vocab_size",
           caught_by="the head reads the whole vocabulary, once"),
    Mutant("matrix_weights", "one more layer", "return config.num_hidden_layers * (attention + mlp)",
           "return config.num_hidden_layers * (attention + mlp) + config.hidden_size",
           caught_by="the sum is right for whole models"),
    Mutant("kv_bytes_per_token", "keys only", "2 * config", "config",
           caught_by="counts keys and values, of the KV heads"),
    Mutant("kv_bytes_per_token", "query heads", "num_key_value_heads", "num_attention_heads",
           caught_by="counts keys and values, of the KV heads"),
    Mutant("kv_bytes_per_token", "always 4 bytes", "config.head_dim * bytes_per_number", "config.head_dim * 4",
           caught_by="multiplies by the bytes of a number"),
    Mutant("kv_bytes_per_token", "head_dim by division", "config.head_dim",
           "(config.hidden_size // config.num_attention_heads)", caught_by="takes head_dim from the config"),
    Mutant("decode_bytes", "weights for every request", "return weight_bytes", "return weight_bytes * len(contexts)",
           caught_by="the weights are read once, whatever the batch"),
    Mutant("decode_bytes", "padding counted", "sum(contexts)", "max(contexts) * len(contexts)",
           caught_by="each request brings its own length"),
    Mutant("decode_bytes", "a request counted as a token", "sum(contexts)", "len(contexts)",
           caught_by="one request reads the weights and its own tokens"),
    Mutant("decode_bytes", "empties the caller's list", "sum(contexts)",
           "sum(contexts.pop() for _ in range(len(contexts)))", caught_by="the list of contexts stays as it was"),
    Mutant("decode_flops", "empties the caller's list", "sum(contexts)",
           "sum(contexts.pop() for _ in range(len(contexts)))", caught_by="the list of contexts stays as it was"),
    Mutant("decode_flops", "1 FLOP for a multiply-accumulate", "return 2 * (", "return (",
           caught_by="the matrices cost 2 FLOPs a weight and a token"),
    Mutant("decode_flops", "one token for the whole batch", "weights * len(contexts)", "weights",
           caught_by="the matrices cost 2 FLOPs a weight and a token"),
    Mutant("decode_flops", "KV heads", "num_attention_heads", "num_key_value_heads",
           caught_by="attention is counted for every query head, with keys and with values"),
    Mutant("decode_flops", "keys without values", "for_each_pair = 2 * ", "for_each_pair = ",
           caught_by="attention is counted for every query head, with keys and with values"),
    Mutant("decode_flops", "longest for all", "sum(contexts)", "max(contexts) * len(contexts)",
           caught_by="contexts of different lengths add up"),
    Mutant("requests_that_fit", "GiB", "10**9", "2**30", caught_by="a GB is 10⁹ bytes"),
    Mutant("requests_that_fit", "overhead forgotten", " - overhead_gb", "",
           caught_by="memory less weights less overhead, over a request's cache"),
    Mutant("requests_that_fit", "rounds to the nearest", "int(left // (context * bytes_per_token))",
           "round(left / (context * bytes_per_token))", caught_by=WHOLE),
    Mutant("requests_that_fit", "a float", "int(left // (context * bytes_per_token))",
           "left // (context * bytes_per_token)", caught_by=WHOLE),
    Mutant("requests_that_fit", "a part of a request", "int(left // (context * bytes_per_token))",
           "left / (context * bytes_per_token)", caught_by=WHOLE),
    Mutant("requests_that_fit", "one too few where they fit exactly", "int(left // (context * bytes_per_token))",
           "int((left - 1) // (context * bytes_per_token))", caught_by=WHOLE),
    Mutant("requests_that_fit", "negative", "max(0, int(left // (context * bytes_per_token)))",
           "int(left // (context * bytes_per_token))",
           caught_by="weights that fill the memory leave room for nobody"),
]

SURVIVORS = {}


def matrix_by_matrix(config):
    hidden, queries = config.hidden_size, config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    layer = [(hidden, queries), (hidden, keys), (hidden, keys), (queries, hidden)]
    layer += [(hidden, config.intermediate_size)] * 2 + [(config.intermediate_size, hidden)]
    return sum(rows * columns for rows, columns in layer * config.num_hidden_layers + [(config.vocab_size, hidden)])


def weights_as_float(config):
    group = config.num_attention_heads / config.num_key_value_heads
    queries = config.hidden_size * config.num_attention_heads * config.head_dim
    layer = 2 * queries + 2 * queries / group + 3 * config.intermediate_size * config.hidden_size
    return layer * config.num_hidden_layers + config.vocab_size * config.hidden_size


def kv_from_shapes(config, bytes_per_number):
    key = config.head_dim * config.num_key_value_heads
    return sum((key + key) * bytes_per_number for _ in range(config.num_hidden_layers))


def kv_other_order(config, bytes_per_number):
    return bytes_per_number * config.head_dim * config.num_key_value_heads * config.num_hidden_layers * 2


def bytes_row_by_row(weight_bytes, bytes_per_token, contexts):
    moved = weight_bytes
    for context in contexts:
        moved += context * bytes_per_token
    return moved


def bytes_token_by_token(weight_bytes, bytes_per_token, contexts):
    return float(sum(bytes_per_token for context in contexts for _ in range(context))) + weight_bytes


def flops_row_by_row(weights, config, contexts):
    total = 0
    for context in contexts:
        total += 2 * weights
        total += 4 * context * config.head_dim * config.num_attention_heads * config.num_hidden_layers
    return total


def flops_layer_by_layer(weights, config, contexts):
    keys = values = 2 * config.num_attention_heads * config.head_dim * sum(contexts)
    return 2.0 * weights * len(contexts) + sum(keys + values for _ in range(config.num_hidden_layers))


def fit_by_counting(memory_gb, weights_gb, overhead_gb, context, bytes_per_token):
    left, number = round((memory_gb - weights_gb - overhead_gb) * 1e9), 0
    if left <= 0:
        return 0
    number = left // (context * bytes_per_token)
    return number


def fit_floor(memory_gb, weights_gb, overhead_gb, context, bytes_per_token):
    from math import floor

    bytes_left = memory_gb * 1e9 - weights_gb * 1e9 - overhead_gb * 1e9
    return floor(max(bytes_left, 0) / context / bytes_per_token)


ALTERNATIVES = {
    "matrix_weights": [matrix_by_matrix, weights_as_float],
    "kv_bytes_per_token": [kv_from_shapes, kv_other_order],
    "decode_bytes": [bytes_row_by_row, bytes_token_by_token],
    "decode_flops": [flops_row_by_row, flops_layer_by_layer],
    "requests_that_fit": [fit_by_counting, fit_floor],
}
