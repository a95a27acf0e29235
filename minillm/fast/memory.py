"""How much memory there is for keys and values: what is free, less what a step needs beside them.

    free once the weights are loaded  x SHARE
      less the largest step           its widest tensors, and the logits that it samples from
      less the CUDA graphs            one size's tensors and logits, which all share, and a little for each graph
      = keys and values

The two terms are sums over shapes, not measurements; SHARE leaves room for workspaces and fragmentation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch

from minillm.ladder.quantized import DTYPES
from minillm.model.config import ModelConfig

CPU_BYTES = 1 << 30  # where memory is not the GPU's own, it is not ours to take
SHARE = 0.9
GRAPH_BYTES = 4 << 20  # allowed for each recorded graph's few hundred launches


def step_bytes(config: ModelConfig, itemsize: int, tokens: int, due: int) -> int:
    """What a forward holds, about: one layer's tensors of its tokens, and three fp32 copies of its rows of logits."""
    heads = (config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim
    widest = 4 * config.hidden_size + 3 * heads + 4 * config.intermediate_size
    return tokens * widest * itemsize + due * config.vocab_size * (itemsize + 3 * 4)


def reserved_bytes(
    config: ModelConfig, itemsize: int, max_step_tokens: int, max_due: int, graph_sizes: Sequence[int]
) -> int:
    """What steps and graphs need beside the weights and the cache."""
    most = graph_sizes[-1] if graph_sizes else 0
    graphs = step_bytes(config, itemsize, most, 0) + most * config.vocab_size * itemsize
    return step_bytes(config, itemsize, max_step_tokens, max_due) + graphs + GRAPH_BYTES * len(graph_sizes)


def default_kv_memory(model, max_step_tokens: int, max_due: int, graph_sizes: Sequence[int]) -> int:
    """Bytes for keys and values where the user names none: 1 GiB, or on CUDA what is free beside steps and graphs.

    max_due: rows of logits in a step. graph_sizes: the steps that are recorded, in tokens.
    """
    if model is None or model.device.type != "cuda":
        return CPU_BYTES
    reserved = reserved_bytes(model.config, model.dtype.itemsize, max_step_tokens, max_due, graph_sizes)
    return max(0, int(free_bytes(model.device) * SHARE) - reserved)


def native_format(dtype: torch.dtype) -> str:
    """The format that stores a model's keys and values as they are."""
    return next(name for name, native in DTYPES.items() if native == dtype)


def free_bytes(device: torch.device) -> int:
    """What a CUDA device can still give: its free memory, and what PyTorch holds of it unused."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


@contextmanager
def refuse_out_of_memory(message: str) -> Iterator[None]:
    """While something is allocated: turn "out of memory" into a ValueError."""
    try:
        yield
    except RuntimeError as error:  # on a CPU PyTorch has no class for it
        if not (isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)):
            raise
        raise ValueError(message) from error


def refuse_too_much(kv_memory: int, usual: int) -> AbstractContextManager[None]:
    """For the cache: the error names a budget that fits."""
    cure = f"kv_memory={usual:,}, the default here, would" if usual < kv_memory else "take less"
    return refuse_out_of_memory(f"kv_memory of {kv_memory:,} bytes does not fit in memory: {cure}")


def refuse_large_weights(numbers: int, dtype: torch.dtype, device: torch.device) -> AbstractContextManager[None]:
    """For the weights of a model: the error says what would fit."""
    needed, free = numbers * dtype.itemsize, free_bytes(device) if device.type == "cuda" else None
    there, cure = "does not have", "take a smaller model, or fewer bytes for each weight"
    if free is not None:
        there, cure = f"has {free:,} free", f"a model of at most {free // dtype.itemsize:,} weights would fit"
    if dtype.itemsize > 2 and (free is None or numbers * 2 < free):
        cure = f"in dtype='bf16' or 'fp16' they take {numbers * 2:,}"
    size = f"{numbers:,} weights take {needed:,} bytes in {str(dtype).removeprefix('torch.')}"
    return refuse_out_of_memory(f"{size}, which {device} {there}: {cure}")
