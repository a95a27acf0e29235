"""Runs the kernels' checks: on a GPU where there is one, else in Triton's interpreter; and compiles the kernels."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from minillm.ladder import attention

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
    chosen = attention.kernels_for.__wrapped__(torch.device("cuda"))
    assert (chosen and chosen.__name__.split(".")[-1]) == choice
    assert attention.kernels_for.__wrapped__(torch.device("cpu")) is None


def test_without_triton_everything_imports_and_cuda_takes_the_plain_path():
    code = """
import sys
sys.modules["triton"] = None  # importing it raises ImportError
import torch, minillm
from minillm.ladder import attention
torch.cuda.get_device_capability = lambda device: (9, 0)
assert attention.kernels_for(torch.device("cuda")) is None
import pkgutil
for module in pkgutil.walk_packages(minillm.__path__, "minillm."):
    if not module.name.endswith(("kernels", "__main__")):
        __import__(module.name)
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=TESTS.parent, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
