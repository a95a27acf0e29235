"""Fixtures that several test files share."""

from pathlib import Path

import pytest

from minillm.load.source import fetch


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """The default model's directory. Fetched, with a network, the first time on a machine."""
    return fetch()
