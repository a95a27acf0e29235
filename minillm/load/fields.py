"""The fields of a settings file, each of the kind that it must be, or a ValueError naming file and field.

A field that is left out takes a default; one that holds null, a text for a number or a number for
a text is damage, and would otherwise show as wrong answers much later.
"""

from __future__ import annotations

import json
import math
from collections import UserDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LARGEST = 2**24  # more than any size or id of a model
POINTER = b"version https://git-lfs"  # how a Git LFS pointer begins, in place of the file itself


class Fields(UserDict[str, Any]):
    """Settings by name, and the file that they stand in."""

    def __init__(self, values: Any, file: str) -> None:
        if not isinstance(values, Mapping):
            raise ValueError(f"{file} holds {values!r:.60}, not settings by name")
        self.data, self.file = dict(values), file

    def refused(self, key: str, wanted: str) -> ValueError:
        """The error for a field that is not what is wanted."""
        return ValueError(f"{self.file}: {key} {self.get(key)!r:.60} is not {wanted}")

    def whole(
        self, key: str, default: int | None, least: int = 1, most: int = LARGEST, nullable: bool = False
    ) -> int | None:
        """A whole number. nullable: null is one of the values that transformers writes."""
        value = self.get(key, default)
        if value is None and (nullable or key not in self):
            return None
        if not (type(value) is int and least <= value <= most):
            raise self.refused(key, f"a whole number from {least} to {most:,}")
        return value

    def positive(self, key: str, default: float) -> float:
        """A finite number above 0."""
        value = self.get(key, default)
        if not (type(value) in (int, float) and 0 < value < math.inf):
            raise self.refused(key, "a finite number above 0")
        return float(value)

    def flag(self, key: str) -> bool:
        """True or false; false if it is left out."""
        value = self.get(key, False)
        if type(value) is not bool:
            raise self.refused(key, "true or false")
        return value

    def text(self, key: str) -> str | None:
        """A text, or the content of an added token as transformers writes one; None for null."""
        value = self.get(key)
        value = value.get("content", 0) if isinstance(value, Mapping) else value
        if not isinstance(value, str | None):
            raise self.refused(key, "a text")
        return value

    def ids(self, key: str, default: int | None = None, below: int = LARGEST) -> tuple[int, ...]:
        """Token ids under `below` as transformers writes them (null, one id, or a list of ids), as a tuple."""
        value = self.get(key, default)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(id) is int and 0 <= id < below for id in ids):
            within = f" of a vocabulary of {below:,}" if below < LARGEST else ""
            raise self.refused(key, f"a token id{within}, or a list of them")
        return tuple(ids)

    def part(self, key: str) -> Fields:
        """Settings inside these, empty for null or if left out."""
        value = self.get(key)
        return Fields({} if value is None else value, f"{self.file}: {key}")


def read_text(path: Path) -> str:
    """A text file of a model's directory; ValueError names one that is not UTF-8, or a Git LFS pointer."""
    data = path.read_bytes()
    refuse_pointer(path, data)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def read_json(path: Path) -> Fields:
    """The settings in a file of a model's directory; ValueError names a file that holds none."""
    text = read_text(path)
    try:
        settings = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    return Fields(settings, str(path))


def refuse_pointer(path: Path, data: bytes | None = None) -> None:
    """ValueError for a file that was cloned without Git LFS."""
    if data is None:
        with open(path, "rb") as file:
            data = file.read(len(POINTER))
    if data.startswith(POINTER):
        raise ValueError(f"{path} is damaged: it is a Git LFS pointer, not the file itself; run `git lfs pull` there")


@contextmanager
def naming_damage(what: str) -> Iterator[None]:
    """The tokenizers library raises no class of its own, and where it panics not even an Exception."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"{what} is damaged: {error}") from error
