"""Runs the kernels' checks: on a GPU where there is one, else in Triton's interpreter; and compiles the kernels."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from minillm.fast.attention import kernels_for
from minillm.fast.device import triton_module
from minillm.model.llama import DecoderLayer

TESTS = Path(__file__).parent


def test_kernel_checks_pass():
    """In a process of its own: TRITON_INTERPRET must be set before anything imports triton."""
    pytest.importorskip("triton", reason="Triton is published for Linux alone")
    environment = os.environ if torch.cuda.is_available() else os.environ | {"TRITON_INTERPRET": "1"}
    pytest_run = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(TESTS / "kernel_checks.py")]
    run = subprocess.run(pytest_run, env=environment, cwd=TESTS.parent, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    assert " passed" in run.stdout and "skipped" not in run.stdout


@pytest.mark.parametrize(("capability", "choice"), [((7, 5), None), ((8, 0), "kernels"), ((9, 0), "kernels")])
def test_cards_from_ampere_on_use_the_kernels(capability, choice, monkeypatch):
    pytest.importorskip("triton", reason="Triton is published for Linux alone")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    chosen = kernels_for.__wrapped__(torch.device("cuda"))
    assert (chosen and chosen.__name__.split(".")[-1]) == choice
    assert kernels_for.__wrapped__(torch.device("cpu")) is None
    fused = triton_module("minillm.fast.fused", torch.device("cuda"))
    assert bool(fused) == bool(choice) and (fused is None or issubclass(fused.FusedLayer, DecoderLayer))
    assert triton_module("minillm.fast.fused", torch.device("cpu")) is None


def test_without_triton_everything_imports_and_cuda_takes_the_plain_path():
    code = """
import sys
sys.modules["triton"] = None  # importing it raises ImportError
import torch, minillm
from minillm.fast.attention import kernels_for
from minillm.fast.device import triton_module
torch.cuda.get_device_capability = lambda device: (9, 0)
assert kernels_for(torch.device("cuda")) is None
assert triton_module("minillm.fast.fused", torch.device("cuda")) is None
import pkgutil
for module in pkgutil.walk_packages(minillm.__path__, "minillm."):
    if not module.name.endswith(("kernels", "fused", "__main__")):
        __import__(module.name)
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=TESTS.parent, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("capability", [90, pytest.param(80, marks=pytest.mark.slow)])
def test_the_kernels_compile_for_real_cards(capability):
    """The interpreter takes what the compiler may refuse. Triton brings its own assembler, so no card is needed."""
    pytest.importorskip("triton", reason="Triton is published for Linux alone")
    import triton.language as tl

    from minillm.fast import kernels

    shape = {"HEADS": 8, "D": 128, "BLOCK_D": 128, "FORMAT": "int4", "GROUP": 32}
    tile = {"G": 4, "BLOCK_M": 16, "BLOCK_S": 64, "SPLITS": 8}
    halves = {f"{which}_{part}": "*fp16" for which in "kv" for part in ("scales", "minima")}
    codes = {"k_codes": "*u8", "v_codes": "*u8"}
    attend = {"q": "*bf16", "tables": "*i64", **codes, **halves, "scale": "fp32"}
    for sizes in (tile, tile | {"BLOCK_M": 64, "SPLITS": 1}):
        compile_for(capability, kernels.attend_kernel, attend, shape | sizes | {"BLOCK_SIZE": 16, "DOT": tl.bfloat16})
    native = {"FORMAT": "native", "GROUP": 2, "BLOCK_SIZE": 16, "DOT": tl.float32}
    plain = dict.fromkeys(["q", "out", *codes, *halves], "*fp32") | {"scale": "fp32"}
    compile_for(capability, kernels.attend_kernel, plain, shape | tile | native | {"BLOCK_S": 32})
    new = {"k": "*bf16", "v": "*bf16", "slots": "*i64", **codes, **halves}
    for kv_format, groups in (("int4", (16, 4)), ("fp8", (1, 64))):
        grouped = {"FORMAT": kv_format, "BLOCK_GROUP": groups[0], "BLOCK_GROUPS": groups[1]}
        compile_for(capability, kernels.store_kernel, new, shape | grouped)
    combine = {key: size for key, size in (shape | tile).items() if key not in ("FORMAT", "GROUP")}
    compile_for(capability, kernels.combine_kernel, {}, combine | {"BLOCK_SPLITS": 8})


@pytest.mark.parametrize("capability", [90, pytest.param(80, marks=pytest.mark.slow)])
def test_the_fused_steps_compile_for_real_cards(capability):
    pytest.importorskip("triton", reason="Triton is published for Linux alone")
    from minillm.fast import fused

    types = dict.fromkeys(["x", "change", "weight", "total", "normed", "both", "cos", "sin", "norm"], "*bf16")
    for kernel, sizes in (
        (fused.add_norm_kernel, {"H": 4096, "BLOCK": 4096}),
        (fused.rotate_kernel, {"HEADS": 24, "D": 128, "BLOCK": 128, "HAS_NORM": True}),
        (fused.gate_kernel, {"INNER": 14336, "BLOCK": fused.COLUMNS}),
    ):
        compile_for(capability, kernel, types | {"eps": "fp32"}, sizes)


def compile_for(capability: int, kernel, types: dict, constants: dict) -> None:
    """Compile a kernel to machine code. Arguments of no named type: the tiles and partial results, else strides."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    usual = {"out": "*bf16", "parts": "*fp32", "part_scores": "*fp32", "tiles": "*i64", "tables": "*i64"}
    signature = {name: (usual | types).get(name, "i32") for name in kernel.arg_names}
    signature |= dict.fromkeys(constants, "constexpr")
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    compiled = triton.compile(ASTSource(kernel, signature, places), target=GPUTarget("cuda", capability, 32))
    assert compiled.asm["cubin"]
