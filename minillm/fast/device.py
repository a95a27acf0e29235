"""What a device can do: Triton kernels, and transfers that no launch has to wait for."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor


def triton_module(name: str, device: torch.device) -> ModuleType | None:
    """A module of Triton kernels if they run on this device: Triton is installed, on CUDA, from Ampere (8.0) on."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0):
        return None
    try:
        return import_module(name)
    except ImportError:  # no Triton for this system
        return None


def to_device(tensors: Sequence[Tensor], device: torch.device, dtype: torch.dtype = torch.long) -> list[Tensor]:
    """Tensors of whole numbers, as int64 or `dtype` on the device: in one transfer, which nothing waits for."""
    flat = torch.cat([tensor.flatten().to(dtype) for tensor in tensors])
    if device.type == "cuda":
        flat = flat.pin_memory()  # a transfer from other memory makes CUDA wait
    parts = flat.to(device, non_blocking=True).split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
