"""Whether there is room for a model: what a device has free, and what to say when it is not enough."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def free_bytes(device: torch.device) -> int:
    """What a CUDA device can still give: its free memory, and what PyTorch holds of it unused."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def is_out_of_memory(error: RuntimeError) -> bool:
    """On a CPU PyTorch has no class of its own for it."""
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
