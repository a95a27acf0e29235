"""What a notebook calls: `check` runs a task's checks on the learner's answer, `hint` prints a hint.

`tasks.py` says what an exercise, a task and a check are.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import random
import re
import signal
import sysconfig
import threading
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from minillm.course.grading.exercises import load_all
from minillm.course.grading.tasks import Check, Task, Wrong, margins
from minillm.course.grading.text import say, shortened

PACKAGE = str(Path(__file__).resolve().parents[2])
MAX_SHOWN, MAX_FRAMES = 2000, 20  # characters of an error, and lines of a traceback
CHECK_SECONDS = 10.0  # of processor time; a right answer takes milliseconds
RUNNING_NOTEBOOK = False  # set by the grader while it runs a submission's cells: it does the checking itself


class CheckFailed(AssertionError):
    """Raised by `check` under CI (environment variable CI), where its output is not read."""


class TimeLimit(KeyboardInterrupt):
    """No Exception, so that an `except Exception` in an endless loop cannot swallow it, nor can asyncio's own loop."""


@dataclass(frozen=True)
class Outcome:
    """How one check went. `passed` is None if it waits for an earlier one."""

    check: str
    passed: bool | None
    message: str = ""  # the likely mistake, and where to look
    detail: str = ""  # what was asked, or the learner's own traceback
    margin: float | None = None  # the largest error that `close` saw, in tolerances
    answered: bool = True  # False: the stub is still there, so the learner is not stuck at it yet


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


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeLimit after `seconds` of processor time, where the system can (not on Windows)."""
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
    """The outcome of one check; nothing that the answer raises escapes, but KeyboardInterrupt."""
    margins.clear()
    random.seed(0)
    torch.manual_seed(0)
    returned: list[bool] = []
    message = f"{check.mistake} Look at {check.look}."
    try:
        with time_limit(seconds):
            check.run(watched(answer, returned))
    except Wrong as wrong:
        message = no_return(returned) + f"{wrong.mistake or check.mistake} Look at {wrong.look or check.look}."
        return Outcome(check.name, False, message, f"Asked: {wrong}", max(margins, default=None))
    except NotImplementedError as error:
        return Outcome(check.name, False, NOT_WRITTEN, learners_traceback(error, check), answered=False)
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
        return Outcome(check.name, False, (raised or no_return(returned)) + message, learners_traceback(error, check))
    return Outcome(check.name, True, margin=max(margins, default=None))


def watched(answer: Any, returned: list[bool]) -> Any:
    """The answer; a function also notes of each call whether something came back."""
    if not inspect.isfunction(answer):
        return answer

    @functools.wraps(answer)
    def call(*args, **kwargs):
        result = answer(*args, **kwargs)
        returned.append(result is not None)
        return result

    return call


def no_return(returned: list[bool]) -> str:
    """What to say first of a function that was called and gave nothing back."""
    return "" if any(returned) or not returned else "It returned None: is a `return` missing? If that does not help: "


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
    frames = learners_frames(error, check)
    last = shortened("".join(traceback.format_exception_only(error)), MAX_SHOWN)
    if not frames:
        uncalled = isinstance(error, TypeError) and NO_CALL.search(str(error))
        return f"{'It could not be called' if uncalled else 'What came back could not be used'}:\n{last}"
    return "".join(["Traceback, your own lines:\n", *traceback.format_list(frames[-MAX_FRAMES:]), last])


def run_task(task: Task, answer: Any, seconds: float = CHECK_SECONDS) -> Iterator[Outcome]:
    """The outcomes of a task's checks, one by one. After a first check that failed, the others wait."""
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
    say(result)
    return result


def hint(name: str, level: int = 1) -> None:
    """Print a hint for task `name`: 1 is a nudge, 2 says more, 3 nearly gives the code."""
    hints = find_task(name).hints
    if level not in (1, 2, 3):
        raise ValueError(f"hint level {level}: there are 1, 2 and 3")
    if not RUNNING_NOTEBOOK:
        say(f"Hint {level} of 3: {hints[level - 1]}")


def find_task(name: str) -> Task:
    """A task of any exercise by its name."""
    tasks = [task for exercise in load_all() for task in exercise.tasks]
    for task in tasks:
        if task.name == name:
            return task
    raise ValueError(f"no check is called {name!r}; known: {', '.join(task.name for task in tasks)}")
