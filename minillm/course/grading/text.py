"""Text that learners wrote, for a page, a table or a console: it may hold anything, and each of them shows it."""

from __future__ import annotations

import re
import sys

# Control characters but tab and line feed, and those that turn the direction of what follows.
UNSEEN = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def printable(text: object, encoding: str | None = "utf-8") -> str:
    r"""The text with escapes, such as \ud800 or \x1b, for what this encoding lacks and what is invisible."""
    seen = UNSEEN.sub(lambda found: ascii(found[0])[1:-1], str(text))
    return seen.encode(encoding or "utf-8", "backslashreplace").decode(encoding or "utf-8")


def say(text: object) -> None:
    """Print it, whatever the console's encoding."""
    print(printable(text, getattr(sys.stdout, "encoding", None)))


def shortened(text: str, most: int) -> str:
    """At most this many characters, and a sign that there were more."""
    return text if len(text) <= most else text[: most - 1] + "…"
