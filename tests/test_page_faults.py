"""A page's own code can be wrong, and then nbval says so: one mistake is planted in each page that builds a rung."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"
CHECK = "# NBVAL_CHECK_OUTPUT"

FAULTS = [  # page, what is wrong, the code, the code with the mistake, the check that must see it
    ("04_paged_kv", "two rows get the same block", "self.free.pop(0)", "self.free[0]", "same tokens as the package"),
    ("05_quantized_kv", "numbers are cut off, not rounded", ".round()", ".trunc()", "same tokens over the package"),
    ("06_speculative", "rejected drafts stay stored", "len(text) + right ", "len(text) + len(drafts) ",
     "same rounds as the package"),
]


def until(name: str, check: str):
    """The page as it is stored, up to the check cell with this text."""
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    last = next(i for i, cell in enumerate(notebook.cells) if cell.source.startswith(CHECK) and check in cell.source)
    notebook.cells = [cell for cell in notebook.cells[: last + 1] if cell.cell_type == "code"]
    return notebook


@pytest.mark.parametrize(("name", "fault", "right", "wrong", "check"), FAULTS, ids=[fault[0] for fault in FAULTS])
def test_nbval_fails_on_a_fault_planted_in_the_pages_own_code(name, fault, right, wrong, check, tmp_path):
    notebook = until(name, check)
    planted = [cell for cell in notebook.cells if right in cell.source]
    assert planted, f"{fault}: nothing to plant it in"
    for cell in planted:
        cell.source = cell.source.replace(right, wrong)
    nbformat.write(notebook, tmp_path / "page.ipynb")
    command = [sys.executable, "-m", "pytest", "--nbval-lax", "--nbval-current-env", "--nbval-cell-timeout=120", "-rf"]
    env = os.environ | {"MINILLM_QUICK": "1", "TQDM_DISABLE": "1", "PYTHONPATH": str(FOLDER.parent)}
    run = subprocess.run([*command, str(tmp_path)], cwd=tmp_path, env=env, capture_output=True, text=True)
    failed = re.findall(r"^FAILED page\.ipynb::Cell (\d+)", run.stdout, flags=re.M)
    assert run.returncode == 1 and failed, run.stdout + run.stderr
