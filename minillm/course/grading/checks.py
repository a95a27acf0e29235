'''What an exercise is: tasks, their hints, and a small table of checks for each.

A notebook calls `check("block_pool", BlockPool)` behind the learner's cell. The task's checks
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
expected value. The truth comes from another code path than the solution's: brute force,
fp64, plain Python, or the package's own module. To write an exercise, see exercises/README.md.
'''

from __future__ import annotations

import contextlib
import math
import os
import random
import re
import signal
import sysconfig
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

PACKAGE = str(Path(__file__).resolve().parents[2])
CHECK_SECONDS = 10.0  # of processor time; a right answer takes milliseconds
RUNNING_NOTEBOOK = False  # set by the grader while it runs a submission's cells: it does the checking itself


class Wrong(AssertionError):
    """An expectation that did not hold; the message says what was asked."""


class CheckFailed(AssertionError):
    """Raised by `check` under CI (environment variable CI), where nobody reads what it prints."""


class TimeLimit(BaseException):
    """Not an Exception, so that an `except Exception` inside an endless loop cannot swallow it."""


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
    chapter: str  # "04_paged_kv": the notebook behind which it belongs
    tasks: tuple[Task, ...]

    @property
    def number(self) -> int:
        return int(self.name[:2])

    @property
    def level(self) -> str:
        return ("easy", "medium", "hard")[self.difficulty - 1]

    @property
    def facts(self) -> str:
        """The line under the notebook's title."""
        chapter = f"[notebook {self.chapter[:2]}](../notebooks/{self.chapter}.ipynb)"
        return f"About {self.minutes} minutes · {self.level} · belongs behind {chapter}"


@dataclass(frozen=True)
class Outcome:
    """How one check went. `passed` is None if it waits for an earlier one."""

    check: str
    passed: bool | None
    message: str = ""  # the likely mistake, and where to look
    detail: str = ""  # what was asked, or the learner's own traceback
    margin: float | None = None  # the largest error that `close` saw, in tolerances


@dataclass(frozen=True)
class Result:
    """What `check` returns: the outcomes in the table's order."""

    task: str
    outcomes: tuple[Outcome, ...]

    @property
    def passed(self) -> bool:
        return all(outcome.passed for outcome in self.outcomes)

    @property
    def points(self) -> int:
        """One for each check that passed."""
        return sum(outcome.passed is True for outcome in self.outcomes)

    @property
    def failed(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.passed is False]

    def __str__(self) -> str:
        """The table, then the first failure in words; its traceback, if there is one, stands last."""
        marks = {True: "  ok  ", False: "  NO  ", None: "  --  "}
        lines = [f"{self.task}: {self.points} of {len(self.outcomes)} checks pass"]
        waits = {None: " (waits for the first)"}
        lines += [marks[outcome.passed] + outcome.check + waits.get(outcome.passed, "") for outcome in self.outcomes]
        if self.failed:
            first, *others = self.failed
            more = f" (mend this first; {len(others)} more may follow from it)" if others else ""
            lines += ["", f"{first.check}:{more}", f"  {first.message}"]
            lines += [f"  {line}" for line in first.detail.splitlines()]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<{self.task}: {self.points} of {len(self.outcomes)} checks pass>"

    def _ipython_display_(self) -> None:
        """Nothing: `check` has printed it."""


def expect(condition: bool, asked: str) -> None:
    """Raise Wrong unless `condition`. `asked` says on which input, and never what would have been right."""
    if not condition:
        raise Wrong(asked)


_margin: list[float] = []  # of the check that runs


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
    _margin.append(worst)
    return worst <= 1


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeLimit after so many seconds of processor time, where the system can (not on Windows)."""
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_) -> None:
        raise TimeLimit

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds, 0.1)  # again and again, should a bare `except:` swallow it
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def run_check(check: Check, answer: Any, seconds: float = CHECK_SECONDS) -> Outcome:
    """One check, whatever the answer does."""
    _margin.clear()
    random.seed(0)
    torch.manual_seed(0)
    message = f"{check.mistake} Look at {check.look}."
    try:
        with time_limit(seconds):
            check.run(answer)
    except Wrong as wrong:
        return Outcome(check.name, False, message, f"Asked: {wrong}", max(_margin, default=None))
    except NotImplementedError as error:
        return Outcome(check.name, False, NOT_WRITTEN, learners_traceback(error, check))
    except TimeLimit:
        return Outcome(check.name, False, f"It ran for more than {seconds:g} s: does a loop never end? {message}")
    except SystemExit:
        return Outcome(check.name, False, "The answer called exit(): use return.")
    except KeyboardInterrupt:
        raise
    except MemoryError:
        return Outcome(check.name, False, f"It ran out of memory: does a list grow for ever? {message}")
    except BaseException as error:
        own = learners_frames(error, check)
        raised = f"Your code raised {type(error).__name__}, see below. If that does not help: " if own else ""
        return Outcome(check.name, False, raised + message, learners_traceback(error, check))
    return Outcome(check.name, True, margin=max(_margin, default=None))


NOT_WRITTEN = (
    "The line `raise NotImplementedError(…)` still runs. Write your code in its place, and delete the line."
)


def learners_frames(error: BaseException, check: Check) -> list[traceback.FrameSummary]:
    """The frames of a traceback that are neither ours, which would quote the check, nor a library's."""
    others = (PACKAGE, check.run.__code__.co_filename, *map(sysconfig.get_path, ("stdlib", "purelib", "platlib")))
    return [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(others)]


NO_CALL = re.compile(r"not callable|\(\) (takes|missing|got)")  # how Python words a call with the wrong arguments


def learners_traceback(error: BaseException, check: Check) -> str:
    """The learner's own lines of the traceback, and the error."""
    frames, last = learners_frames(error, check), traceback.format_exception_only(error)
    if not frames:
        uncalled = isinstance(error, TypeError) and NO_CALL.search(str(error))
        return f"{'It could not be called' if uncalled else 'What came back could not be used'}:\n" + "".join(last)
    return "".join(["Traceback, your own lines:\n", *traceback.format_list(frames), *last])


def run_task(task: Task, answer: Any, seconds: float = CHECK_SECONDS) -> Iterator[Outcome]:
    """The outcomes of a task's checks, one by one. Behind a first check that failed, the others wait."""
    gate_open = True
    for i, check in enumerate(task.checks):
        if not gate_open:
            yield Outcome(check.name, None, "waits for the first check")
            continue
        outcome = run_check(check, answer, seconds)
        gate_open = i > 0 or outcome.passed
        yield outcome


def check(name: str, answer: Any) -> Result:
    """Run the checks of task `name` on the learner's function or class, print the table and return the result.

    Raises CheckFailed if something fails and the environment variable CI is set, and
    ValueError for a name that no exercise has.
    """
    task = find_task(name)
    if RUNNING_NOTEBOOK:
        return Result(name, ())
    result = Result(name, tuple(run_task(task, answer)))
    if not result.passed and os.environ.get("CI", "").lower() not in ("", "0", "false"):
        raise CheckFailed(str(result))
    print(result)
    return result


def hint(name: str, level: int = 1) -> None:
    """Print a hint for task `name`: 1 is a nudge, 2 says more, 3 nearly gives the code."""
    hints = find_task(name).hints
    if level not in (1, 2, 3):
        raise ValueError(f"hint level {level}: there are 1, 2 and 3")
    if not RUNNING_NOTEBOOK:
        print(f"Hint {level} of 3: {hints[level - 1]}")


def find_task(name: str) -> Task:
    """A task of any exercise by its name."""
    from minillm.course.grading.exercises import load_all  # which imports this module

    tasks: Sequence[Task] = [task for exercise in load_all() for task in exercise.tasks]
    for task in tasks:
        if task.name == name:
            return task
    raise ValueError(f"no check is called {name!r}; known: {', '.join(task.name for task in tasks)}")
