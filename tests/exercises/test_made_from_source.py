"""Are the exercises' notebooks, the learner's and the solution's, what their source says, and nothing else?"""

from __future__ import annotations

import importlib.util
import re
from itertools import pairwise
from pathlib import Path

import nbformat
import pytest

from minillm.course.grading.exercises import load_all

FOLDER = Path(__file__).resolve().parents[2] / "exercises"
EXERCISES = load_all()
STUB = re.compile(r'^( *)raise NotImplementedError\("Exercise \d+: [\w.]+"\)$', flags=re.MULTILINE)

spec = importlib.util.spec_from_file_location("exercises_build", FOLDER / "build.py")
build = importlib.util.module_from_spec(spec)
spec.loader.exec_module(build)

each = pytest.mark.parametrize("exercise", EXERCISES, ids=[exercise.name for exercise in EXERCISES])


def stored(path: Path):
    return nbformat.read(path, as_version=4)


def test_sources_checks_and_notebooks_are_of_the_same_exercises():
    names = [exercise.name for exercise in EXERCISES]
    for folder, pattern in ((FOLDER / "src", "*.py"), (FOLDER, "*.ipynb"), (FOLDER / "solutions", "*.ipynb")):
        assert sorted(path.stem for path in folder.glob(pattern)) == names, folder


@each
def test_both_notebooks_are_what_the_source_says(exercise):
    message = f"run: python exercises/build.py {exercise.name}"
    assert stored(FOLDER / "solutions" / f"{exercise.name}.ipynb") == build.make_solution(exercise), message
    assert stored(FOLDER / f"{exercise.name}.ipynb") == build.make_stub(exercise), message


def test_the_readmes_table_lists_them():
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert text == build.with_table(text), "run: python exercises/build.py"
    assert all(f"({exercise.name}.ipynb)" in text for exercise in EXERCISES)


@each
def test_stub_and_solution_differ_in_the_marked_regions_and_nowhere_else(exercise):
    stub, solution = stored(FOLDER / f"{exercise.name}.ipynb"), stored(FOLDER / "solutions" / f"{exercise.name}.ipynb")
    without_folded = [cell for cell in stub.cells if "solution" not in cell.metadata.get("tags", [])]
    assert stub.metadata == solution.metadata and len(without_folded) == len(solution.cells)
    for learners, ours in zip(without_folded, solution.cells, strict=True):
        # cut the solution at its markers, and the stub at the lines that raise: the same pieces are left
        text = ours.source.replace("](../../", "](../")  # the solutions lie one folder deeper
        left = re.split(rf"^ *{build.BEGIN}\n.*?^ *{build.END}$", text, flags=re.DOTALL | re.MULTILINE)
        assert STUB.sub("\0", learners.source).split("\0") == left
        assert (learners.id, learners.cell_type, learners.metadata) == (ours.id, ours.cell_type, ours.metadata)
        assert "SOLUTION" not in learners.source


@each
def test_a_solution_is_folded_beneath_its_check_in_a_markdown_cell(exercise):
    stub, solution = stored(FOLDER / f"{exercise.name}.ipynb"), stored(FOLDER / "solutions" / f"{exercise.name}.ipynb")
    code = {cell.metadata.nbgrader.grade_id: cell.source for cell in solution.cells if "nbgrader" in cell.metadata}
    folded = [(before, cell) for before, cell in pairwise(stub.cells) if "solution" in cell.metadata.get("tags", [])]
    assert len(folded) == len(exercise.tasks)
    for task, (before, cell) in zip(exercise.tasks, folded, strict=True):
        assert before.metadata.nbgrader.grade_id == f"check_{task.name}" and cell.cell_type == "markdown"
        assert cell.source.startswith("<details>\n<summary>") and cell.source.endswith("</details>")
        shown = re.search(r"```python\n(.*)\n```", cell.source, flags=re.DOTALL)[1]
        marked = [line for line in code[task.name].splitlines() if build.BEGIN not in line and build.END not in line]
        assert shown == "\n".join(marked).strip() and "SOLUTION" not in shown


@each
def test_each_task_has_a_cell_to_fill_in_a_check_and_nbgraders_metadata(exercise):
    cells = stored(FOLDER / f"{exercise.name}.ipynb").cells
    grading = {cell.metadata.nbgrader.grade_id: (cell, cell.metadata.nbgrader) for cell in cells
               if "nbgrader" in cell.metadata}
    assert sorted(grading) == sorted(name for task in exercise.tasks for name in (task.name, f"check_{task.name}"))
    for task in exercise.tasks:
        cell, its = grading[task.name]
        assert STUB.search(cell.source) and its.solution and not its.grade and not its.locked
        cell, its = grading[f"check_{task.name}"]
        assert cell.source.strip().endswith(f'check("{task.name}", {task.answer})')
        assert its.grade and its.locked and its.points == len(task.checks)


@each
def test_a_notebook_says_what_it_takes_and_where_it_belongs(exercise):
    first = stored(FOLDER / f"{exercise.name}.ipynb").cells[0].source
    title, _, facts = first.splitlines()[:3]
    assert title == f"# Exercise {exercise.number} · {exercise.title}"
    assert facts == exercise.facts and exercise.minutes > 0 and exercise.difficulty in (1, 2, 3)
    assert exercise.importance in (1, 2, 3) and f"· {exercise.weight} ·" in facts
    assert "**To look at**" in first


@each
def test_what_a_check_points_to_stands_in_the_notebook(exercise):
    """`look` names a part of the page in quotes: 'The pool' is a heading, or bold, there."""
    text = "\n".join(cell.source for cell in stored(FOLDER / f"{exercise.name}.ipynb").cells
                     if cell.cell_type == "markdown")
    text = re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", text)  # a part's name may be linked to the glossary
    parts = set(re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)) | set(re.findall(r"\*\*(.+?)\.?\*\*", text))
    for task in exercise.tasks:
        for check in task.checks:
            named = re.findall(r"'(.+?)'", check.look)
            assert named and set(named) <= parts, f"{check.name}: {check.look} is not among {sorted(parts)}"
