"""Exercise 1: bytes and FLOPs of a decode step, and the capacity sum."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from minillm.course.grading.tasks import Exercise, Task, expect, leaves_alone
from minillm.ladder.quantized import kv_bytes_per_token as packages_kv_bytes
from minillm.load.config import ModelConfig
from minillm.load.weights import tensor_shapes
from minillm.measure.capacity import capacity
from minillm.measure.roofline import StepShape, least_work

# Shapes that keep the likely mistakes apart: head_dim is not hidden / heads, and KV heads are not query heads.
WIDE = ModelConfig(97, 64, 100, 2, 8, 2, 12)
PLAIN = ModelConfig(97, 64, 100, 2, 8, 2, 8)  # here head_dim is hidden / heads
DEEP = ModelConfig(211, 48, 130, 5, 4, 1, 12)
QWEN = ModelConfig.preset("qwen3-0.6b")


def matrices(config: ModelConfig) -> dict[str, int]:
    """The size of each matrix of the untied model, by name: the shapes that a checkpoint must have."""
    shapes = {name: shape for name, shape in tensor_shapes(config).items() if len(shape) == 2}
    table = shapes.pop("model.embed_tokens.weight")
    return {name: prod(shape) for name, shape in {**shapes, "lm_head.weight": table}.items()}


weights = Task(
    "matrix_weights", "matrix_weights",
    hints=(
        "Write the two sides of each of the seven matrices down. One side is hidden_size in all of them.",
        "Queries are num_attention_heads * head_dim wide, keys and values num_key_value_heads * head_dim each, and the "
        "output projection goes back from the queries' width.",
        "layers * (hidden * (2 * query_width + 2 * kv_width) + 3 * hidden * intermediate) + vocab * hidden",
    ),
)


def differing(answer, change_of: dict[str, int]) -> bool:
    """Whether a longer config field changes the answer as it changes the checkpoint."""
    changed = replace(WIDE, **change_of)
    return answer(changed) - answer(WIDE) == sum(matrices(changed).values()) - sum(matrices(WIDE).values())


@weights.check(
    mistake="The MLP's share is not right: gate, up and down are three matrices of hidden_size x intermediate_size.",
    look="'The weights'",
)
def three_in_the_mlp(matrix_weights):
    """The MLP of a layer has three matrices."""
    expect(differing(matrix_weights, {"intermediate_size": 101}), "what one more intermediate_size adds, 2 layers")


@weights.check(
    mistake="The head is missing, or counted twice: it has vocab_size x hidden_size numbers, and stands behind the "
    "last layer; the embedding table is left out.",
    look="'The weights'",
)
def the_head(matrix_weights):
    """The head reads the whole vocabulary, once."""
    expect(differing(matrix_weights, {"vocab_size": 98}), "what one more entry of the vocabulary adds")


@weights.check(
    mistake="A matrix of attention has the wrong width: keys and values have num_key_value_heads * head_dim columns, "
    "queries num_attention_heads * head_dim, and the output projection goes back from the queries' width.",
    look="'The weights'",
)
def attention_widths(matrix_weights):
    """Keys and values are as wide as the KV heads, queries and output as the query heads."""
    expect(differing(matrix_weights, {"num_key_value_heads": 4}), "what two more KV heads add")
    expect(differing(matrix_weights, {"num_attention_heads": 10}), "what two more query heads add")
    expect(differing(matrix_weights, {"head_dim": 14}), "what a head_dim of 14 instead of 12 adds")


@weights.check(
    mistake="The parts are right but the sum is not: every layer has its seven matrices, and the head comes once.",
    look="'The weights'",
)
def whole_models(matrix_weights):
    """The sum is right for whole models."""
    for name, config in (("5 layers", DEEP), ("Qwen3-0.6B", QWEN), ("2 layers", WIDE)):
        expect(matrix_weights(config) == sum(matrices(config).values()), f"a model of {name}")


kv = Task(
    "kv_bytes_per_token", "kv_bytes_per_token",
    hints=(
        "How many vectors of head_dim numbers does one token leave behind in one layer?",
        "A key and a value for each KV head, in every layer; the query heads do not matter.",
        "2 * layers * kv_heads * head_dim * bytes_per_number",
    ),
)


@kv.check(
    mistake="A factor is wrong: 2 (a key and a value), layers, num_key_value_heads (not the query heads) and head_dim.",
    look="'The cache'",
)
def counts_the_cache(kv_bytes_per_token):
    """Counts keys and values, of the KV heads."""
    for config, name in ((PLAIN, "8 query and 2 KV heads of 8, 2 layers"), (DEEP, "4 and 1 heads of 12, 5 layers")):
        expect(kv_bytes_per_token(config, 4) == packages_kv_bytes(config, "fp32"), f"{name}, 4 bytes a number")


@kv.check(
    mistake="head_dim is computed as hidden_size / num_attention_heads, or as something else; use config.head_dim.",
    look="'The weights': head_dim",
)
def head_dim_as_given(kv_bytes_per_token):
    """Takes head_dim from the config."""
    for config, name in ((QWEN, "Qwen3-0.6B"), (WIDE, "hidden_size 64, 8 heads of 12")):
        expect(kv_bytes_per_token(config, 4) == packages_kv_bytes(config, "fp32"), f"{name}, 4 bytes a number")


@kv.check(
    mistake="The bytes of a number are fixed, or used twice; 8-bit numbers must give half of 16-bit ones.",
    look="'The cache'",
)
def bytes_of_a_number(kv_bytes_per_token):
    """Multiplies by the bytes of a number."""
    values = [kv_bytes_per_token(QWEN, size) for size in (1, 2, 4)]
    expect(values[1] == 2 * values[0] and values[2] == 4 * values[0], "Qwen3-0.6B at 1, 2 and 4 bytes a number")


moved = Task(
    "decode_bytes", "decode_bytes",
    hints=(
        "Two terms: one does not depend on the batch, the other is a sum over it.",
        "The weights are read once for all requests. Each request brings bytes_per_token for every token of its own.",
        "weight_bytes + bytes_per_token * sum(contexts)",
    ),
)


def least_bytes(weight_bytes: int, contexts: list[int]) -> float:
    """What the package says that a step over these contexts reads at the least."""
    return least_work(WIDE, "fp32", StepShape.decode(contexts), weight_bytes).bytes


@moved.check(
    mistake="For a single request the step reads weight_bytes, and bytes_per_token for each token of its context.",
    look="'The bytes of a step'",
)
def one_request(decode_bytes):
    """One request reads the weights and its own tokens."""
    per_token = packages_kv_bytes(WIDE, "fp32")
    for context in (1, 50, 700):
        expect(decode_bytes(10_000, per_token, [context]) == least_bytes(10_000, [context]), f"contexts [{context}]")


@moved.check(
    mistake="The weights are counted once for every request; sharing that one read is what a batch is for.",
    look="'The bytes of a step'",
)
def weights_once(decode_bytes):
    """The weights are read once, whatever the batch."""
    for batch in (2, 9):
        contexts = [30] * batch
        grown = decode_bytes(5_000_000, 768, list(contexts)) - decode_bytes(1_000_000, 768, list(contexts))
        expect(grown == 4_000_000, f"a batch of {batch}, with 5 and with 1 MB of weights: the difference")


@moved.check(
    mistake="Lengths are taken from the longest, the first or their number: there is no padding, each token counts.",
    look="'The bytes of a step'",
)
def own_lengths(decode_bytes):
    """Each request brings its own length."""
    per_token = packages_kv_bytes(WIDE, "fp32")
    for contexts in ([3, 900], [900, 3], [17, 4, 256, 1]):
        expect(decode_bytes(777, per_token, list(contexts)) == least_bytes(777, contexts), f"contexts {contexts}")


@moved.check(
    mistake="The list was changed (by pop, remove or sort): the server goes on with it at the next step.",
    look="'The bytes of a step'",
)
def contexts_stay(decode_bytes):
    """The list of contexts stays as it was."""
    leaves_alone(decode_bytes, 777, 96, [17, 4, 256, 1], asked="contexts [17, 4, 256, 1]")


flops = Task(
    "decode_flops", "decode_flops",
    hints=(
        "Count multiply-accumulates first, for the matrices and for attention, and double them at the end.",
        "Matrices: every new token meets every weight. Attention: layers x query heads x pairs, and for each pair "
        "head_dim for the key and head_dim for the value.",
        "2 * (weights * len(contexts) + 2 * layers * heads * head_dim * sum(contexts))",
    ),
)


def counted(config: ModelConfig, contexts: list[int]) -> int:
    """FLOPs by walking over a step: every matrix, then every layer, query head and token that is looked at."""
    total = 0
    for context in contexts:
        total += sum(2 * size for size in matrices(config).values())
        for _ in range(config.num_hidden_layers * config.num_attention_heads):
            total += context * (2 * config.head_dim + 2 * config.head_dim)
    return total


@flops.check(
    mistake="The matrices' share is wrong: each new token meets each weight once, and that is 2 FLOPs.",
    look="'The FLOPs of a step'",
)
def matrices_share(decode_flops):
    """The matrices cost 2 FLOPs a weight and a token."""
    for batch in (1, 3):
        grown = decode_flops(5_000, WIDE, [4] * batch) - decode_flops(4_000, WIDE, [4] * batch)
        expect(grown == 1_000 * 2 * batch, f"a batch of {batch}: what 1,000 more weights add")


@flops.check(
    mistake="Attention's share is wrong: per token looked at, each query head (not each KV head) of each layer makes "
    "two products of head_dim numbers, at 2 FLOPs each.",
    look="'The FLOPs of a step'",
)
def attention_share(decode_flops):
    """Attention is counted for every query head, with keys and with values."""
    for config, name in ((WIDE, "8 query heads of 12, 2 layers"), (DEEP, "4 query heads of 12, 5 layers")):
        grown = decode_flops(1_000, config, [11]) - decode_flops(1_000, config, [10])
        expect(grown == counted(config, [11]) - counted(config, [10]), f"{name}: what one more token of context adds")


@flops.check(
    mistake="Each request has its own context: neither the longest, nor the first, nor their mean stands for all.",
    look="'The FLOPs of a step'",
)
def mixed_contexts(decode_flops):
    """Contexts of different lengths add up."""
    weights = sum(matrices(WIDE).values())
    for contexts in ([5], [1, 400], [400, 1], [7, 7, 90]):
        expect(decode_flops(weights, WIDE, list(contexts)) == counted(WIDE, contexts), f"contexts {contexts}")


@flops.check(
    mistake="The list was changed (by pop, remove or sort): the server goes on with it at the next step.",
    look="'The bytes of a step'",
)
def same_contexts(decode_flops):
    """The list of contexts stays as it was."""
    leaves_alone(decode_flops, 1_000, WIDE, [17, 4, 256, 1], asked="contexts [17, 4, 256, 1]")


fit = Task(
    "requests_that_fit", "requests_that_fit",
    hints=(
        "Three steps: what is left for the cache, what one request takes, and how often the one goes into the other.",
        "GB are 10**9 bytes. A request takes context * bytes_per_token bytes. Round down.",
        "int((memory_gb - weights_gb - overhead_gb) * 10**9 // (context * bytes_per_token)), and at least 0",
    ),
)


@fit.check(
    mistake="The sum is wrong: (memory - weights - overhead) over context * bytes_per_token, all in bytes.",
    look="'The capacity sum'",
)
def capacity_sum(requests_that_fit):
    """Memory less weights less overhead, over a request's cache."""
    for memory, context in ((24, 2048), (48, 1000)):
        right = capacity(QWEN, memory, weights_gb=1.5, overhead_gb=2.5, context=context).max_concurrent
        got = requests_that_fit(memory, 1.5, 2.5, context, packages_kv_bytes(QWEN, "bf16"))
        expect(got == right or abs(got - right) < 0.08 * right, f"{memory} GB, contexts of {context}: roughly right?")


@fit.check(
    mistake="GB were taken as GiB (2**30 bytes), which promises 7 % more than there is.",
    look="'The capacity sum'",
)
def decimal_gigabytes(requests_that_fit):
    """A GB is 10⁹ bytes."""
    got = requests_that_fit(11, 0, 1, 1000, 1000)
    expect(abs(got - 10_000) < 100, "11 GB, 1 GB overhead, a request takes 1 MB: right to 1 %?")


FRACTION = "A fraction of a request came back: what does not fit whole does not fit."
NO_INT = "The number is right, but it is a float, such as 3.0, which // makes of floats: make it an int."
TOO_FEW = "Where the requests fill the memory to the last byte, the last of them was left out."


@fit.check(
    mistake="The result is rounded to the nearest, or up; what does not fit whole does not fit.",
    look="'The capacity sum'",
)
def rounds_down(requests_that_fit):
    """Half a request does not run, and the number is an int."""
    for spare in (1, 500_000, 999_999):
        got, asked = requests_that_fit((3 * 10**6 + spare) / 10**9 + 5, 4, 1, 1000, 1000), f"{spare:,} bytes more"
        expect(got == int(got), f"room for 3 requests of 1 MB and {asked}", FRACTION)
        expect(got == 3, f"room for 3 requests of 1 MB and {asked}")
        expect(isinstance(got, int), f"room for 3 requests of 1 MB and {asked}", NO_INT)
    expect(requests_that_fit(11, 0, 1, 1000, 1000) == 10_000, "11 GB, 1 GB overhead, a request takes 1 MB", TOO_FEW)


@fit.check(
    mistake="A negative number of requests was returned; where nothing is left, the answer is 0.",
    look="'The capacity sum'",
)
def never_negative(requests_that_fit):
    """Weights that fill the memory leave room for nobody."""
    expect(requests_that_fit(16, 15, 4, 4096, 131_072) == 0, "16 GB with 15 GB of weights and 4 GB of overhead")


EXERCISE = Exercise(
    "01_step_cost", "What a step costs", 30, 1, "01_decode_loop", (weights, kv, moved, flops, fit), importance=2
)
