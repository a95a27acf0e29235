"""Runs the kernels' checks: on a GPU where there is one, else in Triton's interpreter; and compiles the kernels."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny import random_tensors, tiny_config

from minillm import Engine
from minillm.fast import attention
from minillm.fast import graphs as graphs_module
from minillm.fast.attention import kernels_for
from minillm.fast.device import triton_module
from minillm.fast.graphs import StepGraphs
from minillm.fast.model import FastLlama
from minillm.ladder.quantized import kv_storage
from minillm.measure.workload import make_workload, play
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
    if not module.name.endswith(("kernels", "fused", "matvec", "tile_sweep", "__main__")):
        __import__(module.name)
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=TESTS.parent, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@pytest.fixture
def compiled(request, monkeypatch):
    """The variants that were compiled, by kernel, for the card that `request.param` names; 90 if it names none."""
    pytest.importorskip("triton", reason="Triton is published for Linux alone")
    from fake_card import fake_card

    return fake_card(monkeypatch, getattr(request, "param", 90))


CARDS = pytest.mark.parametrize("compiled", [90, pytest.param(80, marks=pytest.mark.slow)], indirect=True)
LARGE = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 2}  # as in 8B
SHARED_MEMORY = 99 << 10  # that a program may have on the smallest card from Ampere on


def wide_model(monkeypatch, dtype=torch.bfloat16, **changes):
    """A model with the heads of a large one, and fused layers; else narrow, so that a CPU can compute it."""
    from minillm.fast import fused

    monkeypatch.setattr(FastLlama, "layer", fused.FusedLayer)
    config = tiny_config(**{**LARGE, **changes})
    return FastLlama(config, random_tensors(config), dtype=dtype)


def test_the_yardstick_meets_eight_variants_all_compiled_before_its_first_step(compiled, monkeypatch):
    """Steps of all shapes that its 256 requests make, replayed and not; nothing is computed but the plan."""
    from minillm.fast import kernels

    model = wide_model(monkeypatch, vocab_size=10_001)
    engine = Engine(model, max_batch=256, max_step_tokens=2048, max_context=512)
    for module in (attention, graphs_module):
        monkeypatch.setattr(module, "kernels_for", lambda device: kernels)
    executor = engine.executor
    executor.graphs = StepGraphs(model, executor.storage, executor.block_size, executor.scratch_slot, 256, 32, again)
    executor.warm_up()
    warm = {name: dict(variants) for name, variants in compiled.items()}
    assert sum(map(len, warm.values())) <= 8, {name: len(variants) for name, variants in warm.items()}

    monkeypatch.setattr(model, "logits", lambda x: x[:, :8])  # what the kernels have not computed is not needed
    monkeypatch.setattr(executor, "read", lambda plan, computed: [[5] for row in plan.rows if row.samples])
    items = make_workload("yardstick", scale=0.1)
    outputs = play(engine, items, len(items))
    assert sum(map(len, outputs)) == sum(item.output_tokens for item in items)
    sizes = {step.decode_tokens for step in engine.records.steps}
    assert len(sizes) > 50 and {1, 256} <= sizes and any(step.prompt_tokens > 512 for step in engine.records.steps)
    assert {name: set(variants) for name, variants in compiled.items()} == {k: set(v) for k, v in warm.items()}


def again(run):
    """Stands for a CUDA graph, which launches what was recorded and compiles nothing."""
    result = run()
    return lambda: None, result


@CARDS
@pytest.mark.parametrize("kv_format", ["bf16", "int8", "fp8", "int4"])
def test_the_kernels_compile_for_real_cards(kv_format, compiled, monkeypatch):
    """The interpreter takes what the compiler may refuse. Triton brings its own assembler, so no card is needed.

    Keys and values are on their way while others are computed with: a wait leaves some copies pending.
    """
    from minillm.fast import kernels

    model = wide_model(monkeypatch, num_hidden_layers=1)
    kernels.compile_all(model, kv_storage(model.config, kv_format, 17, "cpu"), 16, 16)
    assert len(compiled["attend_kernel"]) == 4 and all(len(variants) <= 4 for variants in compiled.values())
    for variants in compiled.values():
        assert all(one.asm["cubin"] and one.metadata.shared <= SHARED_MEMORY for one in variants.values())
    for one in compiled["attend_kernel"].values():
        ptx = one.asm["ptx"]
        assert max(map(int, re.findall(r"cp\.async\.wait_group\s+(\d+)", ptx))) > 0
        assert len(re.findall(r"ld\.global", ptx)) <= 60, "scales are loaded once a score"
        assert not re.search(r"ld\.global[.\w]*\.b8\s", ptx), "bytes are loaded one by one"


@pytest.mark.slow
def test_a_model_in_fp32_and_one_that_norms_its_heads_compile(compiled, monkeypatch):
    from minillm.fast import kernels

    model = wide_model(monkeypatch, torch.float32, num_hidden_layers=1, model_type="qwen3")
    kernels.compile_all(model, kv_storage(model.config, "fp32", 17, "cpu"), 16, 16)
    assert all(one.asm["cubin"] for variants in compiled.values() for one in variants.values())
