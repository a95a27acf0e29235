"""The decoder with quicker layers: packed matrices on an x86 CPU, fused kernels on a GPU; the same numbers."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from minillm.fast.device import triton_module
from minillm.fast.packed import make_linear, weight_bytes
from minillm.model.config import ModelConfig
from minillm.model.llama import Llama


class FastLlama(Llama):
    """`Llama` with the quickest layers that its device has; what `load_model` returns."""

    def __init__(
        self, config: ModelConfig, tensors: Mapping[str, Tensor], device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32, packed: bool = True,
    ) -> None:
        """packed: see `make_linear`."""
        self.linear = partial(make_linear, packed=packed)
        if fused := triton_module("minillm.fast.fused", torch.device(device)):
            self.layer = fused.FusedLayer
        self.weight_format: str | None = None  # "int8" or "int4" after `quantize_weights`
        super().__init__(config, tensors, device, dtype)

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that one decode step reads: all but the embedding table, of which it reads a row."""
        linears = [getattr(layer, name) for layer in self.layers for name in layer.LINEARS]
        return sum(map(weight_bytes, [*linears, self.head]))
