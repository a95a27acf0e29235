"""What a step must move and compute at the least, and what the device was measured to reach.

A step takes at least `bytes / bandwidth` and at least `FLOPs / rate`, whichever is longer
(the roofline: Williams, Waterman and Patterson, 2009). So every figure can also be shown as
a share of its limit: MBU, of the bandwidth, and MFU, of the matmul rate.

Counted are the weights, read once a step whatever the batch; each row's stored keys and
values, read, and the new ones, written; and every product of a matrix or of attention, at
2 FLOPs per multiply-accumulate. Not counted, since it is small: activations, norms, softmax,
sampling, and the embedding table, of which a step reads a row per token.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from minillm.ladder.quantized import kv_bytes_per_token
from minillm.ladder.records import StepRecord
from minillm.load.config import ModelConfig
from minillm.measure.measurement import time_seconds


@dataclass(frozen=True)
class StepShape:
    """All that a step's cost depends on."""

    tokens: int  # fed
    due: int  # of them, those that need logits
    stored: int  # tokens whose keys and values the rows read or write
    pairs: int  # (token, token that it sees)

    @classmethod
    def of(cls, rows: Iterable[tuple[int, int, int]]) -> StepShape:
        """From (position of the first token, tokens fed, how many of them need logits) of each row."""
        tokens = due = stored = pairs = 0
        for start, count, logits in rows:
            tokens += count
            due += logits
            stored += start + count
            pairs += count * start + count * (count + 1) // 2
        return cls(tokens, due, stored, pairs)

    @classmethod
    def decode(cls, contexts: Iterable[int]) -> StepShape:
        """A step that decodes one token for each of these contexts (tokens stored, the new one included)."""
        return cls.of((context - 1, 1, 1) for context in contexts)


def shape_of(step: StepRecord) -> StepShape:
    """A recorded step's shape. Records keep no positions: each token is taken to see the rows' mean context."""
    fed = step.prompt_tokens + step.decode_tokens + step.recomputed_tokens
    tokens = fed + step.drafted_tokens + step.idle_rows
    logits = step.sampled_rows + step.drafted_tokens
    return StepShape(tokens, logits, step.kv_tokens, tokens * step.kv_tokens // step.rows)


@dataclass(frozen=True)
class StepWork:
    """The least that a step must do."""

    bytes: float
    flops: float


def least_work(config: ModelConfig, kv_format: str, shape: StepShape, weight_bytes: float) -> StepWork:
    """Bytes and FLOPs of a step of this shape; `weight_bytes` are those read a step (`Llama.weight_bytes`)."""
    layers, head = macs_per_token(config)
    attention = 2 * config.num_hidden_layers * config.num_attention_heads * config.head_dim  # MACs a pair: QK and PV
    return StepWork(
        bytes=weight_bytes + shape.stored * kv_bytes_per_token(config, kv_format),
        flops=2 * (layers * shape.tokens + head * shape.due + attention * shape.pairs),
    )


def macs_per_token(config: ModelConfig) -> tuple[int, int]:
    """Multiply-accumulates of the matrices: for a token through all layers, and for one through the head."""
    hidden, heads = config.hidden_size, config.num_attention_heads
    attention = (heads + 2 * config.num_key_value_heads) * config.head_dim * hidden + heads * config.head_dim * hidden
    return config.num_hidden_layers * (attention + 3 * hidden * config.intermediate_size), config.vocab_size * hidden


def weight_numbers(config: ModelConfig) -> int:
    """All weights of a model, norms and biases included."""
    layers, table = macs_per_token(config)  # each weight of a matrix is one MAC
    return layers + table * (1 if config.tie_word_embeddings else 2) + _small_weights(config)


def read_numbers(config: ModelConfig) -> int:
    """The weights that a decode step reads: all but an embedding table that is not also the head."""
    return sum(macs_per_token(config)) + _small_weights(config)


def _small_weights(config: ModelConfig) -> int:
    """Norms and biases."""
    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    layer = 2 * hidden + config.has_qk_norm * 2 * head_dim
    layer += config.attention_bias * (config.num_attention_heads + 2 * config.num_key_value_heads) * head_dim
    layer += config.has_output_bias * hidden + config.mlp_bias * (2 * inner + hidden)
    return config.num_hidden_layers * layer + hidden


@dataclass(frozen=True)
class Ceilings:
    """What a device was measured to reach."""

    bytes_per_s: float
    flops_per_s: float

    def least_seconds(self, work: StepWork) -> float:
        """The roofline: no step of this work is faster."""
        return max(work.bytes / self.bytes_per_s, work.flops / self.flops_per_s)

    def bound_by(self, work: StepWork) -> str:
        """Which limit takes longer: "reading" or "multiplying"."""
        return "reading" if work.bytes / self.bytes_per_s > work.flops / self.flops_per_s else "multiplying"

    def mbu(self, work: StepWork, seconds: float) -> float:
        """Model bandwidth utilisation: the share of the bandwidth that the least bytes account for."""
        return work.bytes / seconds / self.bytes_per_s

    def mfu(self, work: StepWork, seconds: float) -> float:
        """Model FLOPs utilisation: the share of the matmul rate that the needed FLOPs account for."""
        return work.flops / seconds / self.flops_per_s


def measure_ceilings(device: str | torch.device, dtype: torch.dtype) -> Ceilings:
    """Bandwidth and matmul rate of this device, each the best of several readings, since it is a limit."""
    return Ceilings(measured_bandwidth(device), measured_matmul_rate(device, dtype))


def measured_bandwidth(device: str | torch.device, megabytes: int | None = None) -> float:
    """Bytes per second of a copy or of a dot product, whichever is faster; the default size exceeds every cache."""
    megabytes = megabytes or (256 if torch.device(device).type == "cpu" else 2048)
    a = torch.ones(megabytes * 10**6 // 4, device=device)
    b = torch.zeros_like(a)
    works = (lambda: b.copy_(a)), (lambda: torch.dot(a, b))
    return max((a.nbytes + b.nbytes) / time_seconds(work, device).min for work in works)


def measured_matmul_rate(device: str | torch.device, dtype: torch.dtype, size: int | None = None) -> float:
    """FLOPs per second of one square product, 2 per multiply-accumulate."""
    size = size or (2048 if torch.device(device).type == "cpu" else 8192)
    a = torch.randn(size, size, device=device).to(dtype)
    return 2 * size**3 / time_seconds(lambda: a @ a, device).min
