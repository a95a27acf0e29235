"""The exercises' checks: one module per exercise, `exNN_name.py`, each of which defines EXERCISE."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from minillm.course.grading.tasks import Exercise


@cache
def load_all() -> tuple[Exercise, ...]:
    """Every exercise, in order. A new module in this folder is found by itself."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name.startswith("ex"))
    return tuple(importlib.import_module(f"{__name__}.{name}").EXERCISE for name in names)


def find(name: str) -> Exercise:
    """An exercise by its notebook's name, such as "05_block_pool"."""
    for exercise in load_all():
        if exercise.name == name:
            return exercise
    raise ValueError(f"no exercise is called {name!r}; known: {', '.join(e.name for e in load_all())}")
