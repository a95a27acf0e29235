"""One submission, graded in a process of its own.

The process is fresh for every notebook. It is forked from a server that has imported torch
once, so that it starts in milliseconds. It works in an empty temporary folder on a copy of the
notebook, with a scrubbed environment, without input, with limits on time, memory and output,
and it sends each outcome as soon as it is known. If it hangs or dies, the parent writes down
what it was doing, and starts another that leaves this out: one bad cell costs its own marks.

**This guards against accidents, not malice.** A submission runs with your user's rights: it can
read your files and reach the network. To grade people you do not trust, run the grader in a
container without network that holds the submissions and nothing else; exercises/README.md says how.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import math
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from minillm.course.grading import checks
from minillm.course.grading.checks import CHECK_SECONDS, Outcome, run_task
from minillm.course.grading.exercises import find, load_all
from minillm.course.grading.notebook import Answers, Submission, find_answer, read, run_cells
from minillm.course.grading.tasks import Task

MAX_PRINTED = 1_000_000  # characters
MAX_RESTARTS = 3
SHELL = "minillm.course.grading.shell"
PACKAGE_PARENT = str(Path(checks.PACKAGE).parent)
KEPT_VARIABLES = ("PATH", "LANG", "LC_ALL", "TMPDIR", "SYSTEMROOT", "LD_LIBRARY_PATH")


@dataclass(frozen=True)
class Limits:
    """What a submission may use."""

    step_seconds: float = CHECK_SECONDS  # of processor time, for each cell and each check
    notebook_seconds: float = 60.0  # by the clock, for a process
    memory_mb: int = 2048  # on top of what Python and torch take (not enforced on Windows and macOS)


DEFAULT_LIMITS = Limits()


@dataclass
class Marks:
    """What a notebook got: its tasks' outcomes, and lines about what went wrong outside of them."""

    exercise: str
    outcomes: dict[str, list[Outcome]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def points(self) -> int:
        return sum(outcome.passed is True for outcomes in self.outcomes.values() for outcome in outcomes)

    @property
    def begun(self) -> bool:
        """Whether at least one of its tasks is no longer as it was handed out."""
        return any(all(outcome.answered for outcome in outcomes) for outcomes in self.outcomes.values())

    @property
    def out_of(self) -> int:
        return sum(len(task.checks) for task in find(self.exercise).tasks)

    def to_json(self) -> dict[str, Any]:
        tasks = {name: [plain(outcome) for outcome in outcomes] for name, outcomes in self.outcomes.items()}
        return {"exercise": self.exercise, "points": self.points, "out_of": self.out_of, "notes": self.notes,
                "tasks": tasks}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Marks:
        outcomes = {name: [Outcome(**outcome) for outcome in row] for name, row in content["tasks"].items()}
        return cls(content["exercise"], outcomes, content["notes"])


def plain(outcome: Outcome) -> dict[str, Any]:
    """An outcome for JSON, which has no infinity."""
    finite = outcome.margin is not None and math.isfinite(outcome.margin)
    return {**asdict(outcome), "margin": outcome.margin if finite else None}


def nothing(exercise: str, why: str) -> Marks:
    """The marks of an exercise that could not be looked at."""
    tasks = find(exercise).tasks
    return Marks(exercise, {task.name: refused(task, why, answered=False) for task in tasks}, [why])


def refused(task: Task, why: str, answered: bool = True) -> list[Outcome]:
    """No points for a task, and the reason beside its first check."""
    first, *rest = task.checks
    return [Outcome(first.name, False, why, answered=answered), *(Outcome(check.name, None) for check in rest)]


# -- the parent -----------------------------------------------------------------------------------


def grade_notebook(path: Path, limits: Limits = DEFAULT_LIMITS) -> Marks:
    """The marks of a notebook. Raises NotANotebook if it is none of ours."""
    submission = read(path)
    marks = Marks(submission.exercise.name)
    skip_cells: dict[int, str] = {}
    for _ in range(MAX_RESTARTS + 1):
        place, why = run_once(path, limits, marks, skip_cells)
        if place is None:
            break
        kind, name = place
        if kind == "cell":
            skip_cells[name] = why
        elif kind == "task":
            task = next(task for task in submission.exercise.tasks if task.name == name)
            ended = marks.outcomes.setdefault(name, [])
            at, *behind = task.checks[len(ended) :]
            ended += [Outcome(at.name, False, f"{why} {at.mistake} Look at {at.look}.")]
            ended += [Outcome(check.name, None) for check in behind]
    for task in submission.exercise.tasks:
        if task.name not in marks.outcomes:
            marks.outcomes[task.name] = refused(task, f"Not reached: {MAX_RESTARTS + 1} processes ended before it.")
    marks.notes = list(dict.fromkeys(marks.notes))
    return marks


Place = tuple[str, Any]  # what a process is at: ("cell", 3), ("task", "block_pool")


def run_once(path: Path, limits: Limits, marks: Marks, skip_cells: dict[int, str]) -> tuple[Place | None, str]:
    """Grade what `marks` lacks in a new process. Returns (None, "") or where it was when it ended badly, and why."""
    context = process_context()
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory(prefix="minillm-grade-", ignore_cleanup_errors=True) as folder:
        copy = shutil.copy(path, folder)
        arguments = (sender, copy, marks.exercise, skip_cells, list(marks.outcomes), limits)
        process = context.Process(target=child, args=arguments, daemon=True)
        process.start()
        sender.close()
        try:
            return listen(receiver, process, limits, marks)
        finally:
            end(process)
            receiver.close()


def listen(receiver, process, limits: Limits, marks: Marks) -> tuple[Place | None, str]:
    """Take what the process sends, until it is done, dies or is out of time."""
    at: Place = ("start", None)
    left = limits.notebook_seconds
    while left > 0:
        start = time.monotonic()
        ready = receiver.poll(min(left, 1.0))
        left -= min(time.monotonic() - start, 1.0)  # a machine that sleeps meanwhile costs a submission one second
        if not ready:
            continue
        try:
            kind, *rest = json.loads(receiver.recv_bytes())  # JSON: what a submission sends is not unpickled
        except EOFError:
            process.join(5)
            return at, f"It ended the whole process (status {process.exitcode}): does it call os._exit, or crash?"
        if kind == "done":
            return None, ""
        if kind == "note":
            marks.notes.append(rest[0])
        elif kind == "outcome":
            marks.outcomes.setdefault(rest[0], []).append(Outcome(**rest[1]))
        else:
            at = (kind, rest[0])
    return at, f"It was still running after {limits.notebook_seconds:g} s and was stopped: does it wait for something?"


def end(process) -> None:
    """Stop a process and whatever it has started."""
    with contextlib.suppress(ProcessLookupError, PermissionError, AttributeError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join(5)


_starting = threading.Lock()


def process_context():
    """How processes are made: forked from a server that has torch imported, where the system can fork.

    Raises ModuleNotFoundError where there is no IPython to run a notebook's cells in.
    """
    with _starting:
        importlib.import_module(SHELL)
        if "forkserver" not in multiprocessing.get_all_start_methods():
            return multiprocessing.get_context("spawn")
        context = multiprocessing.get_context("forkserver")
        load_all()
        checks_of_all = [name for name in sys.modules if name.startswith("minillm.course.grading.exercises.")]
        context.set_forkserver_preload([__name__, SHELL, *checks_of_all])
        from multiprocessing import forkserver  # not on Windows

        with this_package_first():
            forkserver.ensure_running()
        return context


@contextlib.contextmanager
def this_package_first() -> Iterator[None]:
    """A Python that starts meanwhile imports this package: no folder of its name where the grader was called."""
    path = os.pathsep.join(filter(None, (PACKAGE_PARENT, os.environ.get("PYTHONPATH"))))
    before = {name: os.environ.get(name) for name in ("PYTHONPATH", "PYTHONSAFEPATH")}
    os.environ.update(PYTHONPATH=path, PYTHONSAFEPATH="1")
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


# -- the child ------------------------------------------------------------------------------------


class OutputFlood(Exception):
    """The submission printed more than anybody will read."""


class Counted(io.TextIOBase):
    """Standard output of a submission: counted, and thrown away."""

    printed = 0

    def write(self, text: str) -> int:
        self.printed += len(text)
        if self.printed > MAX_PRINTED:
            raise OutputFlood(f"it printed more than {MAX_PRINTED:,} characters")
        return len(text)


def child(sender, path: str, exercise: str, skip_cells: dict[int, str], done: list[str], limits: Limits) -> None:
    """Run the notebook's cells, then the checks of each task that is not `done`, and send what comes out."""

    def send(*message) -> None:
        sender.send_bytes(json.dumps(message).encode())

    isolate(Path(path).parent, limits)
    submission = read(Path(path))
    with restored(lambda name: send("note", f"{name} was replaced by the notebook, and put back before the checks")):
        checks.RUNNING_NOTEBOOK = True
        answers = run_cells(submission.cells, limits.step_seconds, lambda i: send("cell", i), skip_cells)
    for note in answers.notes:
        send("note", note)
    for task in find(exercise).tasks:
        if task.name not in done:
            send("task", task.name)
            for outcome in grade_task(task, submission, answers, limits):
                send("outcome", task.name, plain(outcome))
    send("done")


def grade_task(task: Task, submission: Submission, answers: Answers, limits: Limits) -> Iterator[Outcome]:
    """The outcomes of a task's checks on its answer, or why there is no answer."""
    answer, why, tried = find_answer(task, submission, answers)
    if why:
        yield from refused(task, why, tried)
    else:
        yield from run_task(task, answer, limits.step_seconds)


def isolate(folder: Path, limits: Limits) -> None:
    """Leave what belongs to the person who grades: terminal, environment, folder; and take the limits on."""
    kept = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
    os.environ.clear()
    os.environ.update(kept, HOME=str(folder), USERPROFILE=str(folder), IPYTHONDIR=str(folder / ".ipython"),
                      MPLBACKEND="Agg", TQDM_DISABLE="1", CUDA_VISIBLE_DEVICES="")
    elsewhere = (os.getcwd(), "") if os.getcwd() != PACKAGE_PARENT else ("",)
    sys.path[:] = ["", *(place for place in sys.path if place not in elsewhere)]  # as in Jupyter: the notebook's own
    os.chdir(folder)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    sys.stdout, sys.stderr = Counted(), Counted()
    torch.set_num_threads(1)
    if hasattr(os, "setsid"):
        os.setsid()  # so that what it starts can be stopped with it
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + limits.memory_mb * 2**20,) * 2)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100 * 2**20,) * 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


@contextlib.contextmanager
def restored(said) -> Iterator[None]:
    """Put back what the cells replace in modules that the checks rely on; `said` hears the names."""
    names = ("builtins", "math", "random", "statistics", "time", "traceback", "torch")
    modules = [module for name, module in sys.modules.items() if name in names or name.startswith("minillm")]
    owners = {module.__name__: module for module in modules}
    for module in modules:
        for value in vars(module).values():
            if isinstance(value, type) and value.__module__ == module.__name__ and module.__name__ != "torch":
                owners[f"{module.__name__}.{value.__qualname__}"] = value
    before = {name: dict(vars(owner)) for name, owner in owners.items()}
    try:
        yield
    finally:
        for name, owner in owners.items():
            for key, value in before[name].items():
                if key not in vars(owner) or vars(owner)[key] is not value:
                    with contextlib.suppress(AttributeError, TypeError):
                        setattr(owner, key, value)
                        if key != "RUNNING_NOTEBOOK":
                            said(f"{name}.{key}")
