"""Wrong answers as test data: mutants written by hand, and mutants made from a solution by rule."""

from __future__ import annotations

import ast
import copy
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from minillm.course.grading.checks import Outcome, run_task
from minillm.course.grading.notebook import Cell, read, run_cells
from minillm.course.grading.tasks import Exercise, Task

FOLDER = Path(__file__).resolve().parents[2] / "exercises"
BEGIN, END = "### BEGIN SOLUTION", "### END SOLUTION"
SECONDS = 1.0  # of processor time for a mutant's check: many never end, and a right answer takes milliseconds


@dataclass(frozen=True)
class Mutant:
    """A plausible mistake: `old`, which the solution's cell holds once, written as `new`."""

    task: str
    mistake: str
    old: str
    new: str
    caught_by: str  # the check that must name it
    says: str = ""  # what the message must hold, where the check knows several mistakes
    also: tuple[str, str] = ("", "")  # a second replacement, where the mistake takes two


class Solution:
    """The solution notebook of an exercise, any cell of which can be exchanged."""

    def __init__(self, exercise: Exercise) -> None:
        self.exercise = exercise
        cells = read(FOLDER / "solutions" / f"{exercise.name}.ipynb").cells
        self.cells = [cell for cell in cells if cell.kind == "code" and "demo" not in cell.tags]

    def source(self, task: Task) -> str:
        return next(cell.source for cell in self.cells if cell.grade_id == task.name)

    def answer(self, task: Task, source: str | None = None) -> Any:
        """What the notebook defines for `task`, with `source` in its cell's place."""
        cells = [
            Cell(cell.kind, source if source is not None and cell.grade_id == task.name else cell.source)
            for cell in self.cells if not (cell.grade_id or "").startswith("check_")
        ]
        answers = run_cells(cells, seconds=SECONDS)
        assert not answers.failed or source is not None, answers.failed
        return answers.namespace.get(task.answer)


def outcomes(task: Task, answer: Any, seconds: float = SECONDS) -> list[Outcome]:
    return list(run_task(task, answer, seconds))


def by_rule(source: str) -> Iterator[tuple[str, str]]:
    """Every single change of the marked regions by the rules of `changes`: (what was changed, the cell with it)."""
    tree = ast.parse(source)
    marked, lines, seen = marked_lines(source), source.splitlines(), Counter()
    for at, node in enumerate(ast.walk(tree)):
        for number, change in enumerate(changes(node)):
            if change.line not in marked:
                continue
            mutated = copy.deepcopy(tree)
            twin = next(twin for i, twin in enumerate(ast.walk(mutated)) if i == at)
            changes(twin)[number].apply()
            name = f"{lines[change.line - 1].strip()} | {change.said}"
            seen[name] += 1
            yield name + (f" ({seen[name]})" if seen[name] > 1 else ""), ast.unparse(mutated)


@dataclass(frozen=True)
class Change:
    """One change of a syntax tree, in place."""

    line: int
    said: str
    apply: Callable[[], None]


OPPOSITE = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.Add: ast.Sub, ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult, ast.Mod: ast.FloorDiv, ast.USub: ast.UAdd,
    ast.And: ast.Or, ast.Or: ast.And,
}


def changes(node: ast.AST) -> list[Change]:
    """Comparison flipped, operator or sign changed, number moved by one, truth value changed, statement dropped."""
    found = []
    if isinstance(node, ast.Compare):
        for i, op in enumerate(node.ops):
            found.append(Change(node.lineno, exchanged(op), partial(node.ops.__setitem__, i, OPPOSITE[type(op)]())))
    if isinstance(node, ast.BinOp | ast.AugAssign | ast.BoolOp | ast.UnaryOp) and type(node.op) in OPPOSITE:
        change = partial(setattr, node, "op", OPPOSITE[type(node.op)]())
        found.append(Change(node.lineno, exchanged(node.op), change))
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        values = [not node.value] if isinstance(node.value, bool) else [node.value - 1, node.value + 1]
        for value in values:
            found.append(Change(node.lineno, f"{node.value} becomes {value}", partial(setattr, node, "value", value)))
    for statements in (getattr(node, "body", None), getattr(node, "orelse", None)):
        for i, statement in enumerate(statements if isinstance(statements, list) else []):
            if not isinstance(statement, ast.Pass):
                found.append(Change(statement.lineno, "dropped", partial(statements.__setitem__, i, ast.Pass())))
    return found


def exchanged(op: ast.AST) -> str:
    return f"{type(op).__name__} becomes {OPPOSITE[type(op)].__name__}"


def marked_lines(source: str) -> set[int]:
    """The numbers of the lines between the markers."""
    lines, inside = set(), False
    for number, line in enumerate(source.splitlines(), 1):
        inside = (inside or BEGIN in line) and END not in line
        if inside:
            lines.add(number)
    return lines
