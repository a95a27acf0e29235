"""How much memory there is for keys and values: what is free, less what a step needs beside them.

    free once the weights are loaded  x SHARE
      less the largest step           its widest tensors, and the logits that it samples from
      less the CUDA graphs            one size's tensors, which all share, and a little for each graph
      = keys and values

The two terms are sums over shapes, not measurements; SHARE leaves room for workspaces and fragmentation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from minillm.model.config import ModelConfig

CPU_BYTES = 1 << 30  # where memory is not the GPU's own, it is not ours to take
SHARE = 0.9
GRAPH_BYTES = 4 << 20  # allowed for each recorded graph's few hundred launches


def step_bytes(config: ModelConfig, itemsize: int, tokens: int, due: int) -> int:
    """What a forward of so many tokens holds at once, about: one layer's tensors, and logits in three fp32 copies."""
    heads = (config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim
    widest = 4 * config.hidden_size + 3 * heads + 4 * config.intermediate_size
    return tokens * widest * itemsize + due * config.vocab_size * (itemsize + 3 * 4)


def reserved_bytes(
    config: ModelConfig, itemsize: int, max_step_tokens: int, max_due: int, graph_sizes: Sequence[int]
) -> int:
    """What steps and graphs need beside the weights and the cache."""
    graphs = 0
    if graph_sizes:
        graphs = step_bytes(config, itemsize, graph_sizes[-1], 0) + GRAPH_BYTES * len(graph_sizes)
    return step_bytes(config, itemsize, max_step_tokens, max_due) + graphs


def default_kv_memory(model, max_step_tokens: int, max_due: int, graph_sizes: Sequence[int]) -> int:
    """Bytes for keys and values where the user names none: 1 GiB, or on CUDA what is free beside steps and graphs.

    max_due: rows of logits in a step. graph_sizes: the steps that are recorded, in tokens.
    """
    if model is None or model.device.type != "cuda":
        return CPU_BYTES
    reserved = reserved_bytes(model.config, model.dtype.itemsize, max_step_tokens, max_due, graph_sizes)
    return max(0, int(free_bytes(model.device) * SHARE) - reserved)


@contextmanager
def refuse_too_much(kv_memory: int, usual: int) -> Iterator[None]:
    """While the cache is allocated: turn "out of memory" into a ValueError that names a budget."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        cure = f"kv_memory={usual:,}, the default here, would" if usual < kv_memory else "take less"
        raise ValueError(f"kv_memory of {kv_memory:,} bytes does not fit in memory: {cure}") from error


def free_bytes(device: torch.device) -> int:
    """What a CUDA device can still give: its free memory, and what PyTorch holds of it unused."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def is_out_of_memory(error: RuntimeError) -> bool:
    """On a CPU PyTorch has no class for it."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


@contextmanager
def refuse_large_weights(numbers: int, dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    """While `numbers` weights are loaded: turn "out of memory" into a ValueError that says what would fit."""
    needed, free = numbers * dtype.itemsize, free_bytes(device) if device.type == "cuda" else None
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        there, cure = "does not have", "take a smaller model, or fewer bytes for each weight"
        if free is not None:
            there, cure = f"has {free:,} free", f"a model of at most {free // dtype.itemsize:,} weights would fit"
        if dtype.itemsize > 2 and (free is None or numbers * 2 < free):
            cure = f"in dtype='bf16' or 'fp16' they take {numbers * 2:,}"
        size = f"{numbers:,} weights take {needed:,} bytes in {str(dtype).removeprefix('torch.')}"
        raise ValueError(f"{size}, which {device} {there}: {cure}") from error
