"""A class: a folder with a folder of notebooks for each learner.

What has been graded is kept in the report's folder, one file per notebook, under a key made of
the notebook's bytes and of the checks' source. So a run that was interrupted, or repeated
after one learner handed something in again, grades only what is new.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from minillm.course.grading.exercises import load_all
from minillm.course.grading.notebook import NotANotebook, read
from minillm.course.grading.runner import DEFAULT_LIMITS, Limits, Marks, grade_notebook, nothing, process_context
from minillm.course.grading.tasks import Exercise
from minillm.course.grading.text import shortened
from minillm.guard.inputs import check_at_least


@dataclass
class Learner:
    """One person's folder: which notebook is which exercise, and lines about files that are none."""

    name: str
    notebooks: dict[str, Path] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    marks: dict[str, Marks] = field(default_factory=dict)

    @property
    def points(self) -> int:
        return sum(marks.points for marks in self.marks.values())

    @property
    def out_of(self) -> int:
        return sum(marks.out_of for marks in self.marks.values())


def find_learners(folder: Path, report: Path | None = None) -> list[Learner]:
    """Every folder in `folder` but hidden ones and the report's, in order of name, with its notebooks at any depth."""
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is no folder")
    theirs = [path for path in sorted(folder.iterdir()) if path.is_dir() and not hidden(path.name)]
    learners = [find_notebooks(path, recursive=True) for path in theirs
                if report is None or path.resolve() != report.resolve()]
    if not learners:
        raise ValueError(f"{folder} holds no folder; it needs one for each learner, with the notebooks in it")
    return learners


def hidden(name: str) -> bool:
    """Whether a program made it for itself: .git, .ipynb_checkpoints, __pycache__, __MACOSX."""
    return name.startswith((".", "__"))


def find_notebooks(folder: Path, recursive: bool = False) -> Learner:
    """The notebooks of a folder, or the one notebook. Of two for an exercise, the one with its own name, or the newer.

    Raises FileNotFoundError, or NotANotebook for a single file that is none.
    """
    learner = Learner(folder.name)
    if folder.is_file():
        try:
            learner.notebooks[read(folder).exercise.name] = folder
        except NotANotebook as error:
            raise NotANotebook(f"{folder}: {error}") from None
        return learner
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such file or folder")
    files = [path for path in sorted(folder.glob("**/*" if recursive else "*")) if path.is_file()]
    for path in files:
        inner = path.relative_to(folder)
        if any(map(hidden, inner.parts)):
            continue
        if path.suffix != ".ipynb":
            if recursive:
                learner.notes.append(f"{inner} is no notebook (.ipynb), and was not graded")
            continue
        try:
            name = read(path).exercise.name
        except (NotANotebook, OSError) as error:
            learner.notes.append(f"{inner} was not graded: {error}")
            continue
        chosen = max(learner.notebooks.get(name, path), path, key=lambda p: (p.stem == name, p.stat().st_mtime))
        if name in learner.notebooks:
            learner.notes.append(f"there are several notebooks of {name}; {chosen.relative_to(folder)} was graded")
        learner.notebooks[name] = chosen
    return learner


@cache
def checks_version() -> str:
    """A hash of the grader's source: marks given by other checks are not re-used."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def grade_class(
    learners: list[Learner], jobs: int, bar: Callable, kept: Path | None = None, limits: Limits = DEFAULT_LIMITS
) -> None:
    """Fill in every learner's marks, `jobs` notebooks at a time.

    bar: (label, total) -> a progress bar. kept: a folder; what it holds from an earlier run is used again, and what
    a learner did not hand in counts as nothing, unless nobody did: it was not asked then. Without it, only what is
    there is graded. A notebook that cannot be graded gets nothing, and a line with the reason. Raises
    ModuleNotFoundError where there is no IPython to run a notebook's cells in.
    """
    check_at_least(1, jobs=jobs)
    process_context()
    handed_in = {name for learner in learners for name in learner.notebooks}
    asked = [exercise for exercise in load_all() if exercise.name in handed_in] or load_all()
    work = [(learner, exercise) for learner in learners for exercise in asked
            if kept is not None or exercise.name in learner.notebooks]
    with ThreadPoolExecutor(jobs) as threads, bar("grading", len(work)) as progress:
        futures = [threads.submit(grade_one, learner, exercise, kept, limits) for learner, exercise in work]
        try:
            for (learner, exercise), future in zip(work, futures, strict=True):
                learner.marks[exercise.name] = future.result()
                progress.update()
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            raise


def grade_one(learner: Learner, exercise: Exercise, kept: Path | None, limits: Limits) -> Marks:
    """One learner's notebook of one exercise; an error in it, or while grading it, costs no other marks."""
    path = learner.notebooks.get(exercise.name)
    if path is None:
        return nothing(exercise.name, "Not handed in.")
    try:
        return grade_notebook(path, limits) if kept is None else grade_or_find(learner, exercise, kept, limits)
    except Exception as error:
        return nothing(exercise.name, shortened(f"It could not be graded: {type(error).__name__}: {error}", 300))


def grade_or_find(learner: Learner, exercise: Exercise, kept: Path, limits: Limits) -> Marks:
    """The marks that an earlier run kept, or new ones, which are kept."""
    path = learner.notebooks[exercise.name]
    key = f"{hashlib.sha256(path.read_bytes()).hexdigest()[:16]}-{checks_version()}"
    file = kept / learner.name / f"{exercise.name}.json"
    if earlier := kept_marks(file, key):
        return earlier
    marks = grade_notebook(path, limits)
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")  # written beside it and renamed: an interrupted run leaves no half file
    partial.write_text(json.dumps({"key": key, **marks.to_json()}, indent=1), encoding="utf-8")
    partial.replace(file)
    return marks


def kept_marks(file: Path, key: str) -> Marks | None:
    """The marks of an earlier run under this key; None if there are none, or the file is damaged."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        return Marks.from_json(content) if content["key"] == key else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
