"""A submission as it lies on disk: read without trust, and its cells run one by one.

Only `json` reads it, since a grader should not fall over a file that nbformat refuses. A cell
that fails does not keep the next one from running, so one mistake costs one task.
"""

from __future__ import annotations

import hashlib
import json
import re
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from minillm.course.grading.checks import TimeLimit, time_limit
from minillm.course.grading.exercises import load_all
from minillm.course.grading.tasks import Exercise, Task
from minillm.course.grading.text import shortened

if TYPE_CHECKING:
    from minillm.course.grading.shell import NotebookShell

MAX_BYTES = 20_000_000
DEMO = "demo"  # the tag of a cell that only shows something: the grader leaves it out, since it may run a model
FOLDED = "solution"  # the tag of a Markdown cell that holds a solution, folded: no answer of the learner's


class NotANotebook(ValueError):
    """The file cannot be graded; the message says why."""


@dataclass(frozen=True)
class Cell:
    """One cell. `stub` is the hash of what the learner was given, if the notebook still says it."""

    kind: str  # "code" | "markdown" | "raw"
    source: str
    grade_id: str | None = None
    stub: str | None = None
    tags: tuple[str, ...] = ()

    @property
    def untouched(self) -> bool:
        """Whether it is still the learner's stub."""
        return self.stub is not None and self.stub == stub_hash(self.source)


@dataclass
class Submission:
    """A notebook of one exercise."""

    path: Path
    exercise: Exercise
    cells: list[Cell]


@dataclass
class Answers:
    """What a notebook's cells defined, and what went wrong on the way."""

    namespace: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    failed: dict[int, str] = field(default_factory=dict)  # cell -> its error


def stub_hash(source: str) -> str:
    """What an untouched cell is recognised by, whatever an editor did to the ends of its lines."""
    text = "\n".join(line.rstrip() for line in source.strip().splitlines())
    return hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()[:16]


def read(path: Path) -> Submission:
    """The notebook in `path`. Raises NotANotebook saying why it is none of ours."""
    if path.stat().st_size > MAX_BYTES:
        raise NotANotebook(f"it has {path.stat().st_size / 1e6:.0f} MB; clear its outputs and hand it in again")
    content = from_json(path.read_bytes())
    if not isinstance(content, dict) or not isinstance(content.get("cells"), list):
        raise NotANotebook("it is no notebook of format 4: open it in JupyterLab and save it again")
    cells = [read_cell(cell) for cell in content["cells"] if isinstance(cell, dict)]
    return Submission(path, which_exercise(path, content, cells), cells)


def from_json(data: bytes) -> Any:
    """What the file holds, if it is JSON in UTF-8, with a byte-order mark or without; else NotANotebook."""
    encoding, why = json.detect_encoding(data), ""
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError:
        text, why = data.decode("latin-1"), "it is not encoded as UTF-8"
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):  # no JSON, or no text at all, or brackets in too many brackets
        raise NotANotebook("it is no notebook: its content is not JSON") from None
    if not encoding.startswith("utf-8"):
        why = f"it is encoded as {encoding.upper()}"
    if why:
        raise NotANotebook(f"{why}: save it as UTF-8, which is what Jupyter opens")
    return content


def read_cell(cell: dict) -> Cell:
    """One cell as JSON has it; whatever is not of the shape it should have counts as missing."""
    source, metadata = cell.get("source", ""), as_dict(cell.get("metadata"))
    lines = source if isinstance(source, list) else [source]
    grade_id, stub = as_dict(metadata.get("nbgrader")).get("grade_id"), as_dict(metadata.get("minillm")).get("stub")
    tags = metadata.get("tags")
    return Cell(
        str(cell.get("cell_type")), "".join(map(str, lines)),
        grade_id if isinstance(grade_id, str) else None, stub if isinstance(stub, str) else None,
        tuple(tags) if isinstance(tags, list) else (),
    )


def as_dict(value: Any) -> dict:
    """The value, if it is a dict; else an empty one."""
    return value if isinstance(value, dict) else {}


def which_exercise(path: Path, content: dict, cells: list[Cell]) -> Exercise:
    """By the notebook's metadata, else by its grade ids, else by its name's number, if it calls one of its checks."""
    said = as_dict(as_dict(content.get("metadata")).get("minillm")).get("exercise")
    ids = {cell.grade_id for cell in cells} - {None}
    number = re.match(r"(\d\d?)\D", path.name)
    tests = (
        lambda e: e.name == said,
        lambda e: any(task.name in ids for task in e.tasks),
        lambda e: number is not None and int(number[1]) == e.number and calls_a_check_of(e, cells),
    )
    for test in tests:
        for exercise in load_all():
            if test(exercise):
                return exercise
    raise NotANotebook("neither its metadata nor its name says which exercise it is")


def calls_a_check_of(exercise: Exercise, cells: list[Cell]) -> bool:
    """A chapter of the course begins with a number too, and checks nothing."""
    text = "\n".join(cell.source for cell in cells if FOLDED not in cell.tags)
    return any(re.search(rf"check\(\s*['\"]{task.name}['\"]", text) for task in exercise.tasks)


def run_cells(
    cells: list[Cell],
    seconds: float,
    started: Callable[[int], None] = lambda i: None,
    skip: Mapping[int, str] = MappingProxyType({}),
) -> Answers:
    """Run the code cells in order. `started` hears of each before it runs; `skip` leaves some out, and says why."""
    from minillm.course.grading.shell import NotebookShell

    shell = NotebookShell.fresh()
    answers = Answers(shell.user_ns)
    for i, cell in enumerate(cells):
        if cell.kind != "code" or not cell.source.strip() or DEMO in cell.tags:
            continue
        if i not in skip:
            started(i)
        if error := skip.get(i) or run_cell(cell, i, shell, seconds):
            answers.failed[i] = error
            if not cell.untouched:
                answers.notes.append(f"cell {i + 1} failed: {error}")
        answers.notes += [f"cell {i + 1}: {note}" for note in shell.left_out]
        shell.left_out.clear()
    return answers


def run_cell(cell: Cell, i: int, shell: NotebookShell, seconds: float) -> str | None:
    """Run one cell; what went wrong in a line, or None."""
    try:
        with time_limit(seconds):
            error = shell.run(cell.source, f"<cell {i + 1}>")
    except BaseException as its_own:
        error = its_own
    match error:
        case None:
            return None
        case TimeLimit():
            return f"it ran for more than {seconds:g} s: does a loop never end?"
        case KeyboardInterrupt():
            raise error
        case SystemExit():
            return "it calls exit()"
        case SyntaxError():
            return f"SyntaxError in line {error.lineno}: {error.msg}"
    return shortened("".join(traceback.format_exception_only(error)).strip(), 300)


def find_answer(task: Task, submission: Submission, answers: Answers) -> tuple[Any, str, bool]:
    """The learner's function or class for a task and "", or None and why there is none; and whether one was tried."""
    written = re.compile(rf"^\s*(?:def|class)\s+{task.answer}\b", flags=re.MULTILINE)
    own = [i for i, cell in enumerate(submission.cells)
           if FOLDED not in cell.tags and (cell.grade_id == task.name or written.search(cell.source))]
    for i in own:
        if i in answers.failed:
            return None, f"The cell that should define {task.answer} (cell {i + 1}) failed: {answers.failed[i]}.", True
    if task.answer in answers.namespace:
        if any(submission.cells[i].untouched for i in own):
            return None, "Not answered: the cell is as it was handed out.", False
        return answers.namespace[task.answer], "", True
    for i in own:
        if submission.cells[i].kind != "code":
            kind = submission.cells[i].kind.capitalize()
            why = f"Cell {i + 1}, with {task.answer}, has become a {kind} cell: turn it back into a Code cell."
            return None, why, True
    if own:
        return None, f"Cell {own[0] + 1} no longer defines {task.answer}: was it renamed?", True
    return None, f"No cell defines {task.answer}: was its cell deleted? Copy it from the exercise again.", False
