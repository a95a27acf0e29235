"""What a notebook's cells change in this process ends with the test that ran them."""

from __future__ import annotations

import sys

import pytest


@pytest.fixture(autouse=True)
def this_main():
    """Cells run in a shell with a `__main__` of its own, which other tests must not meet."""
    before = sys.modules["__main__"]
    yield
    sys.modules["__main__"] = before
    if shell := sys.modules.get("minillm.course.grading.shell"):
        shell.NotebookShell.clear_instance()
