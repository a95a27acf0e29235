"""A card that is not there: Triton compiles for it as a launch would, alignment and all, and launches nothing."""

from __future__ import annotations

from collections import defaultdict

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime import driver
from triton.runtime.jit import JITFunction


class FakeDriver(DriverBase):
    """What compiling asks of a driver."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    @staticmethod
    def is_active() -> bool:
        return True

    @staticmethod
    def map_python_to_cpp_type(ty: str) -> str:
        return ty

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return self.target.arch  # kernels are cached by device

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_benchmarker(self):
        raise NotImplementedError("nothing runs here")


def fake_card(monkeypatch, capability: int) -> dict[str, dict]:
    """Compile whatever is launched for this card; returns the compiled variants of each kernel, by name."""
    variants, run = defaultdict(dict), JITFunction.run
    monkeypatch.setattr(driver, "_active", FakeDriver(capability))

    def compile_only(self, *arguments, grid, warmup, **keywords):
        compiled = run(self, *arguments, grid=grid, warmup=True, **keywords)
        variants[self.__name__][id(compiled)] = compiled
        return compiled

    monkeypatch.setattr(JITFunction, "run", compile_only)
    return variants
