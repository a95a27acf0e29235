'''What an exercise is: tasks, their hints, and a small table of checks for each.

A notebook calls `check("block_pool", BlockPool)` after the learner's cell. The task's checks
run in order, the most fundamental first. The first of them is a gate: if it fails, nothing
else is worth looking at, and the others wait. Each check isolates one mechanism, on
inputs that expose the likely mistake, and knows one sentence that names that mistake. Its
docstring says what a right answer does, and is its line in the table:

    @pool.check(
        mistake="Blocks were taken one by one before it was known that there are too few.",
        look="'Taking' above",
    )
    def refused(BlockPool):
        """A refused take changes nothing."""
        pool = BlockPool(3, 2)
        expect(pool.take(4) is None and len(pool.take(3)) == 3, "3 blocks: take(4), then take(3)")

`expect` is told what was asked, never what would have been right: no message holds an
expected value. What a message says must be true of the answer: where a check can fail for
several reasons, `expect` takes the reason as its third argument. The truth comes from another
code path than the solution's: brute force, fp64, plain Python, or the package's own module. To
write an exercise, see exercises/README.md.
'''

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch


class Wrong(AssertionError):
    """An expectation that did not hold; the message says what was asked.

    mistake, look: what probably went wrong and where to look, where that is not what the check usually says.
    """

    def __init__(self, asked: str, mistake: str = "", look: str = "") -> None:
        super().__init__(asked)
        self.mistake, self.look = mistake, look


@dataclass(frozen=True)
class Check:
    """One mechanism. `run` takes the answer and raises if it is wrong."""

    name: str  # what a right answer does
    run: Callable[[Any], None]
    mistake: str  # one sentence: what probably went wrong
    look: str  # which part of the notebook says more


@dataclass(eq=False)
class Task:
    """What `check(name, answer)` looks at: one function or class that the learner writes."""

    name: str
    answer: str  # what it is called in the notebook
    hints: tuple[str, str, str]  # from a nudge to nearly the code
    checks: list[Check] = field(default_factory=list)

    def check(self, mistake: str, look: str) -> Callable:
        """Decorator: add a check, named by its docstring. The order of the file is the order of the table."""

        def add(run: Callable[[Any], None]) -> Callable[[Any], None]:
            says = run.__doc__.rstrip(".")
            self.checks.append(Check(says[0].lower() + says[1:], run, mistake, look))
            return run

        return add


@dataclass(frozen=True, eq=False)
class Exercise:
    """A notebook's worth of tasks."""

    name: str  # "05_block_pool", the notebook's name
    title: str
    minutes: int
    difficulty: int  # 1 to 3
    chapter: str  # "04_paged_kv": the notebook after which it belongs
    tasks: tuple[Task, ...]
    importance: int = 2  # 1 to 3

    @property
    def number(self) -> int:
        return int(self.name[:2])

    @property
    def level(self) -> str:
        return ("easy", "medium", "hard")[self.difficulty - 1]

    @property
    def weight(self) -> str:
        """The importance in a word."""
        return ("further practice", "useful", "essential")[self.importance - 1]

    @property
    def facts(self) -> str:
        """The line under the notebook's title."""
        chapter = f"[notebook {self.chapter[:2]}](../notebooks/{self.chapter}.ipynb)"
        return f"About {self.minutes} minutes · {self.level} · {self.weight} · belongs after {chapter}"


def expect(condition: bool, asked: str, mistake: str = "", look: str = "") -> None:
    """Raise Wrong unless `condition`. `asked` says on which input, and never what would have been right.

    mistake, look: said in place of the check's own, where these would not be true of this answer.
    """
    if not condition:
        raise Wrong(asked, mistake, look)


def leaves_alone(answer: Callable, *given: Any, asked: str) -> None:
    """Expect that a call changes nothing of what it is given: lists, tensors, or lists of them."""
    before = copy.deepcopy(given)
    answer(*given)
    expect(same(given, before), f"{asked}, looked at after the call")


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal, tensors among them too."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


margins: list[float] = []  # errors in tolerances that `close` has seen in the check that runs


def close(got: Any, want: Any, tolerance: float) -> bool:
    """Whether two numbers, lists or tensors agree: same shape, finite, largest difference within `tolerance`.

    The difference in tolerances is kept as the outcome's margin, so that a test can see how
    far right answers stay inside and wrong ones outside.
    """
    got, want = (torch.as_tensor(x).to(torch.float64) for x in (got, want))
    worst = math.inf
    if got.shape == want.shape:
        worst = float((got - want).abs().max()) / tolerance if got.numel() else 0.0
        worst = math.inf if math.isnan(worst) else worst
    margins.append(worst)
    return worst <= 1
