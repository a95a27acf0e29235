"""Counts the inputs that the tests of the rim try; the sum stands at the end of the run."""

from collections import Counter

import pytest

TRIED: Counter[str] = Counter()


@pytest.fixture(scope="session")
def count_inputs():
    """Call with what was tried, and how many of it."""
    return lambda what, number: TRIED.update({what: number})


def pytest_terminal_summary(terminalreporter):
    if TRIED:
        parts = ", ".join(f"{number:,} {what}" for what, number in TRIED.most_common())
        terminalreporter.write_line(f"{TRIED.total():,} inputs tried: {parts}")
