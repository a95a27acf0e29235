"""What stands between the matrices of a layer: the norms, the rotation, the gate. Here in plain PyTorch.

These are a few operations per number, and together next to none of the arithmetic. On a GPU they
still cost time, since each is a launch of some microseconds that reads its input from memory and
writes its result back. `fused.py` has the same functions, each as one kernel that reads and writes
once; `elementwise_for` chooses.

Letters as in llama.py.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor
from torch.nn import functional as F

Rotation = tuple[Tensor, Tensor]  # cosines and signed sines, each [N, 1, D]: see `llama.rotation_for`


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale the last axis of x to unit root mean square, then by weight (Zhang and Sennrich, 2019)."""
    return F.rms_norm(x, weight.shape, weight, eps)


def add_norm(x: Tensor, change: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x, change [N, H] -> their sum, which is the residual stream, and its norm, which the next matrix reads."""
    x = x + change
    return x, rms_norm(x, weight, eps)


def rotate(heads: Tensor, rotation: Rotation, norm: Tensor | None, eps: float) -> Tensor:
    """Rotate heads [N, h, D], pairing dimension i with i + D/2 as transformers does.

    norm [h, D]: the weights of each head's norm before it, in models that have one.
    (a, b) becomes (a cos - b sin, b cos + a sin): rolling by half a head swaps a and b,
    and the sign waits in the sine.
    """
    if norm is not None:
        heads = F.rms_norm(heads, norm.shape[1:], eps=eps) * norm
    cos, sin = rotation
    return torch.addcmul(heads * cos, heads.roll(heads.shape[-1] // 2, dims=-1), sin)


def gate(both: Tensor) -> Tensor:
    """both [N, 2 inner], the gate's half before the other -> silu(gate) * up [N, inner] (Shazeer, 2020)."""
    gate, up = both.chunk(2, dim=-1)
    return F.silu(gate) * up


def elementwise_for(device: torch.device) -> ModuleType:
    """The module with these functions for a device: `fused` where Triton runs, else this one."""
    return triton_module("minillm.fast.fused", device) or sys.modules[__name__]


def triton_module(name: str, device: torch.device) -> ModuleType | None:
    """A module of Triton kernels if they run on this device: Triton is installed, on CUDA, from Ampere (8.0) on."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0):
        return None
    try:
        return import_module(name)
    except ImportError:  # no Triton for this system
        return None
