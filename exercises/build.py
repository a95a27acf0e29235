"""Make the exercises' notebooks from their sources: python exercises/build.py [NAME ...]

exercises/src/NAME.py (jupytext's percent format) is the exercise with its solution. From it come
exercises/solutions/NAME.ipynb, the same as a notebook, and exercises/NAME.ipynb, the learner's,
in which every region between `### BEGIN SOLUTION` and `### END SOLUTION` has become one line that
raises NotImplementedError, and the solution stands folded beneath its check, in a Markdown cell with
the tag "solution", which copies for a class leave out. Cells carry nbgrader's metadata. No outputs
are stored. The table in exercises/README.md is written anew as well.
"""

from __future__ import annotations

import argparse
import ast
import re
from pathlib import Path

import jupytext
import nbformat
from nbformat import NotebookNode

from minillm.course.glossary import link_glossary
from minillm.course.grading.exercises import find, load_all
from minillm.course.grading.notebook import FOLDED, stub_hash
from minillm.course.grading.tasks import Exercise

FOLDER = Path(__file__).resolve().parent
BEGIN, END = "### BEGIN SOLUTION", "### END SOLUTION"
REGION = re.compile(rf"^( *){BEGIN}\n.*?^ *{END}$", flags=re.DOTALL | re.MULTILINE)
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def make_solution(exercise: Exercise, up: str = "../../") -> NotebookNode:
    """The exercise with its solution, as a notebook; `up` leads from its folder to the repository."""
    notebook = jupytext.read(FOLDER / "src" / f"{exercise.name}.py", fmt="py:percent")
    notebook.metadata = nbformat.from_dict({
        "kernelspec": KERNEL, "language_info": {"name": "python"}, "minillm": {"exercise": exercise.name},
    })
    title, rest = notebook.cells[0].source.split("\n", 1)
    facts = exercise.facts.replace("](../", f"]({up}")
    notebook.cells[0].source = f"{title}\n\n{facts}\n\n{help_line(exercise)}\n{rest}"
    for i, cell in enumerate(notebook.cells):
        grading = grading_metadata(exercise, cell)
        name = grading["grade_id"] if grading else f"cell_{i}"
        metadata = {"tags": cell.metadata["tags"]} if "tags" in cell.metadata else {}
        if grading:
            metadata["nbgrader"] = grading
        if BEGIN in cell.source:  # lets the grader tell an untouched cell from one with a stub line left in it
            metadata["minillm"] = {"stub": stub_hash(without_solution(cell.source, exercise.number))}
        cell.metadata = nbformat.from_dict(metadata)
        cell.id = name.replace("_", "-")
    link_glossary(notebook, f"{up}notebooks/GLOSSARY.md")
    nbformat.validate(notebook)
    return notebook


def help_line(exercise: Exercise) -> str:
    """What stands in every notebook about its checks."""
    name = exercise.tasks[0].name
    return (
        "Write your code where `NotImplementedError` is raised, and run the check below it: it says what is probably "
        f'wrong. Stuck? `hint("{name}")`, with a check\'s name, gives a nudge; `level=2` and `level=3` say more.'
    )


def make_stub(exercise: Exercise) -> NotebookNode:
    """The same notebook without the solution, which stands folded beneath each check."""
    notebook = make_solution(exercise, up="../")
    cells, answers = [], {}
    for cell in notebook.cells:
        grade_id = cell.metadata.get("nbgrader", {}).get("grade_id", "")
        if BEGIN in cell.source:
            answers[grade_id] = cell.source
            cell.source = without_solution(cell.source, exercise.number)
        cells.append(cell)
        if (task := grade_id.removeprefix("check_")) != grade_id:
            cells.append(folded(task, answers[task]))
    notebook.cells = cells
    nbformat.validate(notebook)
    return notebook


def folded(task: str, source: str) -> NotebookNode:
    """A Markdown cell that shows a solution once it is unfolded."""
    code = re.sub(rf"^ *({BEGIN}|{END})\n?", "", source, flags=re.MULTILINE).strip()
    text = f"<details>\n<summary>Solution of <code>{task}</code></summary>\n\n```python\n{code}\n```\n\n</details>"
    cell = nbformat.v4.new_markdown_cell(text, metadata={"tags": [FOLDED]})
    cell.id = f"solution-{task}".replace("_", "-")
    return cell


def grading_metadata(exercise: Exercise, cell: NotebookNode) -> dict | None:
    """nbgrader's metadata: a solution cell is the learner's, a check cell gives points, neither is lost on a copy."""
    if cell.cell_type != "code":
        return None
    for task in exercise.tasks:
        common = {"schema_version": 3, "task": False}
        if task.answer in top_level_names(cell.source) and BEGIN in cell.source:
            return {**common, "grade_id": task.name, "solution": True, "grade": False, "locked": False}
        if f'check("{task.name}"' in cell.source:
            points = {"points": len(task.checks)}
            return {**common, "grade_id": f"check_{task.name}", "solution": False, "grade": True, "locked": True,
                    **points}
    return None


def top_level_names(source: str) -> list[str]:
    return [node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef | ast.ClassDef)]


def without_solution(source: str, number: int) -> str:
    """Each marked region replaced by a line that raises, which names the exercise and the function."""

    def stub(match: re.Match) -> str:
        line = source.count("\n", 0, match.start()) + 1
        return f'{match[1]}raise NotImplementedError("Exercise {number}: {function_at(source, line)}")'

    return REGION.sub(stub, source)


def function_at(source: str, line: int) -> str:
    """The qualified name of the innermost function that holds a line."""
    names, body = [], ast.parse(source).body
    while inside := [node for node in body if node.lineno <= line <= node.end_lineno]:
        if isinstance(inside[0], ast.FunctionDef | ast.ClassDef):
            names.append(inside[0].name)
        body = getattr(inside[0], "body", [])
    return ".".join(names)


def with_table(text: str) -> str:
    """README.md with the table of all exercises between its markers."""
    rows = [
        f"| [{e.number} {e.title}]({e.name}.ipynb) | [{e.chapter[:2]}](../notebooks/{e.chapter}.ipynb) | {e.minutes} "
        f"| {e.level} | {e.weight} | {', '.join(f'`{task.name}`' for task in e.tasks)} |"
        for e in load_all()
    ]
    table = "\n".join(["| exercise | after notebook | minutes | | | checks |", "|---|---|---|---|---|---|", *rows])
    return re.sub(r"(<!-- exercises -->\n).*?(<!-- end -->)", rf"\g<1>\n{table}\n\n\2", text, flags=re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the exercises' notebooks from exercises/src.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="such as 05_block_pool; without any, all of them")
    names = parser.parse_args().names or sorted(path.stem for path in (FOLDER / "src").glob("*.py"))
    for name in names:
        exercise = find(name)
        nbformat.write(make_solution(exercise), FOLDER / "solutions" / f"{name}.ipynb")
        nbformat.write(make_stub(exercise), FOLDER / f"{name}.ipynb")
        print(f"{name}: {', '.join(task.name for task in exercise.tasks)}")
    readme = FOLDER / "README.md"
    readme.write_text(with_table(readme.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
