"""The package's own source as a notebook's output, so that page and package cannot drift apart."""

from __future__ import annotations

import inspect
import textwrap


def show_source(*objects):
    """The source of functions, methods or classes, as one Markdown display object."""
    from IPython.display import Markdown  # only a notebook has use for it

    return Markdown("\n\n".join(map(source_block, objects)))


def source_block(obj) -> str:
    """A line that says what this is and where it stands, then the code in a fence."""
    source = textwrap.dedent(inspect.getsource(obj)).rstrip()
    file = obj.__module__.replace(".", "/") + ".py"
    return f"`{obj.__module__}.{obj.__qualname__}`, from `{file}`:\n\n```python\n{source}\n```"
