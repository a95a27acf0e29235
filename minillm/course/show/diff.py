"""What changed from one function of a page to the next one that grew from it."""

from __future__ import annotations

import difflib
import inspect
import textwrap


def show_diff(before, after):
    """The second function whole, with what it adds and drops, as one Markdown display object."""
    from IPython.display import Markdown  # only a notebook has use for it

    return Markdown(f"```diff\n{diff(before, after)}\n```")


def diff(before, after) -> str:
    """Every line of `after`, those that `before` lacks marked +, and those of `before` that are gone, marked -."""
    old, new = (textwrap.dedent(inspect.getsource(each)).splitlines() for each in (before, after))
    lines = difflib.unified_diff(old, new, n=len(old) + len(new), lineterm="")
    return "\n".join(list(lines)[3:])  # without the two names and the numbers of the lines
