"""The grader on submissions that are broken in every way we know of: a clear line, and no harm to other marks."""

from __future__ import annotations

import csv
import json
import os
import shutil
import time
from contextlib import nullcontext
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest

from minillm.cli import main
from minillm.course.grading import classroom, report
from minillm.course.grading.exercises import find, load_all
from minillm.course.grading.runner import Limits, grade_notebook

FOLDER = Path(__file__).resolve().parents[2] / "exercises"
NAME = "05_block_pool"
POOL, TABLE = find(NAME).tasks
LIMITS = Limits(step_seconds=1.0, notebook_seconds=60.0)


def bar(label, total):
    return nullcontext(SimpleNamespace(update=lambda: None))


def solution() -> dict:
    return json.loads((FOLDER / "solutions" / f"{NAME}.ipynb").read_text(encoding="utf-8"))


def cell_of(notebook: dict, task: str = "block_pool") -> dict:
    return next(cell for cell in notebook["cells"] if cell["metadata"].get("nbgrader", {}).get("grade_id") == task)


def hand_in(folder: Path, notebook: dict) -> Path:
    path = folder / f"{NAME}.ipynb"
    path.write_text(json.dumps(notebook), encoding="utf-8")
    return path


def with_cell(source: str, before: bool = True) -> dict:
    """The solution with one more code cell, at the top or at the end."""
    notebook = solution()
    cell = {"cell_type": "code", "source": source, "metadata": {}, "outputs": [], "execution_count": None, "id": "new"}
    notebook["cells"].insert(1 if before else len(notebook["cells"]), cell)
    return notebook


def with_edit(old: str, new: str) -> dict:
    notebook = solution()
    cell = cell_of(notebook)
    text = "".join(cell["source"])
    assert old in text
    cell["source"] = text.replace(old, new)
    return notebook


def points(marks, task) -> int:
    return sum(outcome.passed is True for outcome in marks.outcomes[task.name])


def said(marks) -> str:
    lines = [outcome.message + outcome.detail for row in marks.outcomes.values() for outcome in row]
    return "\n".join([*marks.notes, *lines])


# --- all that we ship -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("folder", "status", "share"), [("solutions", 0, 1), (".", 1, 0)])
def test_solutions_get_full_marks_and_stubs_nothing(folder, status, share, tmp_path, capsys):
    assert main(["grade", str(FOLDER / folder), "--json", str(tmp_path / "marks.json")]) == status
    (learner,) = json.loads((tmp_path / "marks.json").read_text())["learners"]
    assert [row["exercise"] for row in learner["exercises"]] == [exercise.name for exercise in load_all()]
    for row in learner["exercises"]:
        assert row["out_of"] > 0 and row["points"] == share * row["out_of"], row
        assert row["notes"] == []
    if not share:
        assert capsys.readouterr().out.count("Not answered") == sum(len(exercise.tasks) for exercise in load_all())


# --- broken notebooks: the block pool is spoiled, the block table is not ------------------------------------------


def deleted():
    notebook = solution()
    notebook["cells"].remove(cell_of(notebook))
    return notebook


def deleted_beside_a_folded_solution():
    """As a learner's notebook has it: the solution stands in a Markdown cell."""
    notebook = deleted()
    stub = json.loads((FOLDER / f"{NAME}.ipynb").read_text(encoding="utf-8"))
    folded = [cell for cell in stub["cells"] if "solution" in cell["metadata"].get("tags", [])]
    assert "class BlockPool" in "".join(folded[0]["source"])
    notebook["cells"] += folded
    return notebook


def turned_to_markdown():
    notebook = solution()
    cell = cell_of(notebook)
    cell["cell_type"] = "markdown"
    del cell["outputs"], cell["execution_count"]
    return notebook


STUB_LINE = '        raise NotImplementedError("Exercise 5: BlockPool.__init__")\n'

BROKEN = {
    "cell deleted": (deleted, "No cell defines BlockPool: was its cell deleted?"),
    "cell deleted beside a folded solution": (
        deleted_beside_a_folded_solution, "No cell defines BlockPool: was its cell deleted?"),
    "cell turned to Markdown": (turned_to_markdown, "has become a Markdown cell"),
    "renamed": (lambda: with_edit("class BlockPool:", "class Pool:"), "no longer defines BlockPool"),
    "stub line left below the code": (
        lambda: with_edit("        self.free = list(range(num_blocks))\n",
                          "        self.free = list(range(num_blocks))\n" + STUB_LINE),
        "The line `raise NotImplementedError(…)` still runs"),
    "syntax error": (lambda: with_edit("if number > len", "if number > > len"), "SyntaxError in line"),
    "endless loop in a method": (
        lambda: with_edit("if number > len(self.free):", "while number >= 0:\n            pass\n        if False:"),
        "does a loop never end?"),
    "endless loop that swallows": (
        lambda: with_edit("if number > len(self.free):",
                          "while number >= 0:\n            try:\n                number += 0\n"
                          "            except Exception:\n                pass\n        if False:"),
        "does a loop never end?"),
    "endless loop in the cell": (lambda: with_edit("class BlockPool:", "while True:\n    pass\nclass BlockPool:"),
                                 "does a loop never end?"),
    "exit() in a method": (lambda: with_edit("if number > len(self.free):", "exit(0)\n        if False:"),
                           "called exit()"),
    "exit() in the cell": (lambda: with_edit("class BlockPool:", "exit(0)\nclass BlockPool:"), "it calls exit()"),
    "os._exit in a method": (
        lambda: with_edit("if number > len(self.free):", "import os; os._exit(0)\n        if False:"),
        "ended the whole process (status 0)"),
    "os._exit in the cell": (lambda: with_edit("class BlockPool:", "import os; os._exit(3)\nclass BlockPool:"),
                             "ended the whole process (status 3)"),
    "output flood": (
        lambda: with_edit("if number > len(self.free):", "while True: print('x' * 1000)\n        if False:"),
        "printed more than 1,000,000 characters"),
    "memory": (lambda: with_edit("if number > len(self.free):", "bytearray(2**40)\n        if False:"),
               "ran out of memory"),
    "asks for input": (lambda: with_edit("if number > len(self.free):", "input()\n        if False:"), "EOFError"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_cell_is_named_and_costs_its_own_marks_only(kind, tmp_path):
    spoil, line = BROKEN[kind]
    path = hand_in(tmp_path, spoil())
    before = path.read_bytes()
    marks = grade_notebook(path, LIMITS)
    assert points(marks, POOL) == 0 and points(marks, TABLE) == len(TABLE.checks)
    assert line in said(marks), said(marks)
    assert path.read_bytes() == before


def test_what_hangs_without_using_the_processor_is_stopped(tmp_path):
    sleeping = with_edit("if number > len(self.free):", "__import__('time').sleep(999)\n        if False:")
    path = hand_in(tmp_path, sleeping)
    marks = grade_notebook(path, Limits(step_seconds=1.0, notebook_seconds=4.0))
    assert "was still running after 4 s" in said(marks)
    assert (points(marks, POOL), points(marks, TABLE)) == (0, len(TABLE.checks))


HARMLESS = {
    "random and traceback replaced": (
        "import random, traceback\nrandom.random = lambda: 4\nrandom.Random.sample = None\n"
        "traceback.extract_tb = lambda *a: []\n", "random.random was replaced"),
    "checks replaced": (
        "from minillm.course.grading import checks\nchecks.run_check = lambda *a: None\nchecks.Check.run = None\n",
        "minillm.course.grading.checks.run_check was replaced"),
    "a cell that fails": ("1 / 0", "ZeroDivisionError"),
    "magics": ("%matplotlib inline\n!ls\nx = 1", ""),
    "environment": ("import os\nassert 'MINILLM_TEST_SECRET' not in os.environ", ""),
    "writes beside itself": (f"open('{NAME}.ipynb', 'w').write('')", ""),
    "prints to the terminal": ("import os\nos.write(1, b'spoiled')\nos.write(2, b'spoiled')", ""),
}


@pytest.mark.parametrize("kind", HARMLESS)
def test_what_a_cell_does_to_others_does_no_harm(kind, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("MINILLM_TEST_SECRET", "x")
    source, line = HARMLESS[kind]
    path = hand_in(tmp_path, with_cell(source))
    before = path.read_bytes()
    marks = grade_notebook(path, LIMITS)
    assert marks.points == marks.out_of, said(marks)
    assert (line in said(marks)) if line else (marks.notes == [])
    assert path.read_bytes() == before and "spoiled" not in "".join(capfd.readouterr())


def test_a_wrong_answer_says_what_the_notebook_says_and_not_what_is_right(tmp_path):
    marks = grade_notebook(hand_in(tmp_path, with_edit("-(-num_tokens //", "(num_tokens //")), LIMITS)
    (failed,) = [outcome for outcome in marks.outcomes["block_pool"] if not outcome.passed]
    assert failed.message.startswith("The count is off by one") and failed.detail.startswith("Asked: ")


# --- a class ------------------------------------------------------------------------------------------------------


@pytest.fixture
def a_class(tmp_path) -> Path:
    """Four folders: a perfect one, one with an odd name and a stub, one with junk, one empty."""
    root = tmp_path / "class"
    for name in ("ann", "=b & <i>o", "cy", "dee"):
        (root / name).mkdir(parents=True)
    hand_in(root / "ann", solution())
    (root / "=b & <i>o" / "deep").mkdir()
    hand_in(root / "=b & <i>o" / "deep", json.loads((FOLDER / f"{NAME}.ipynb").read_text()))
    (root / "cy" / "05_block_pool.ipynb").write_bytes(b"\x89PNG\xff no notebook")
    (root / "cy" / "list.ipynb").write_text("[1, 2]")
    (root / "cy" / "holiday.ipynb").write_text('{"cells": [], "metadata": {}}')
    (root / "cy" / "answers.docx").write_text("see attached")
    return root


class Pages(HTMLParser):
    """Every tag closed, and the text."""

    def __init__(self, text):
        super().__init__()
        self.open, self.text = [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_a_class_becomes_a_table_and_a_page_each(a_class, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["grade", "--class", str(a_class), "--report", str(out)]) == 0
    with (out / "report.csv").open(newline="", encoding="utf-8-sig") as file:
        rows = {row["learner"]: row for row in csv.DictReader(file)}
    assert [rows[name][NAME] for name in ("ann", "'=b & <i>o", "cy", "dee")] == ["100", "0", "0", "0"]
    for page in [out / "index.html", *(out / "learners").iterdir()]:
        parsed = Pages(page.read_text(encoding="utf-8"))
        assert parsed.open == []
    assert "=b & <i>o" in Pages((out / "index.html").read_text()).text
    cy = Pages((out / "learners" / "cy.html").read_text()).text
    for line in ("its content is not JSON", "no notebook of format 4", "says which exercise", "answers.docx"):
        assert line in cy
    assert "Not handed in." in Pages((out / "learners" / "dee.html").read_text()).text
    learners = {row["name"]: row for row in json.loads((out / "report.json").read_text())["learners"]}
    assert learners["ann"]["points"] == len(POOL.checks) + len(TABLE.checks)


def test_what_nobody_handed_in_counts_for_nobody(a_class, tmp_path):
    """Of a short course's exercises one can have all the points."""
    (a_class / "eli").mkdir()
    shutil.copy(FOLDER / "solutions" / "03_static_batch.ipynb", a_class / "eli")
    main(["grade", "--class", str(a_class), "--report", str(tmp_path / "out")])
    with (tmp_path / "out" / "report.csv").open(newline="", encoding="utf-8-sig") as file:
        rows = {row["learner"]: row for row in csv.DictReader(file)}
    assert list(rows["ann"]) == ["learner", "03_static_batch", NAME, "total"]
    assert (rows["eli"]["03_static_batch"], rows["eli"][NAME], rows["ann"][NAME]) == ("100", "0", "100")
    talk = Pages((tmp_path / "out" / "index.html").read_text()).text.split("Where the class is stuck")[1]
    assert "block_pool" in talk and "run_static" not in talk, "who did not hand it in was called stuck"


def test_folders_that_are_nobody_s_are_no_learners(a_class, capsys):
    (a_class / ".git").mkdir()
    (a_class / "__MACOSX").mkdir()
    for _ in range(2):
        assert main(["grade", "--class", str(a_class), "--report", str(a_class / "out")]) == 0
        names = {line.split(":")[0] for line in capsys.readouterr().out.splitlines()}
        assert names == {"ann", "=b & <i>o", "cy", "dee", "report"}


def test_a_folder_without_an_exercise_is_refused_and_a_chapter_is_none(tmp_path, capsys):
    chapter = FOLDER.parent / "notebooks" / "05_quantized_kv.ipynb"
    shutil.copy(chapter, tmp_path)
    for path in (tmp_path, tmp_path / chapter.name):
        assert main(["grade", str(path)]) == 2
        error = capsys.readouterr().err
        assert chapter.name in error and "which exercise it is" in error
    (tmp_path / chapter.name).unlink()
    assert main(["grade", str(tmp_path)]) == 2
    assert "no notebook in it" in capsys.readouterr().err


ODD = ("text", 7, ["a", ["b"]], None, True)


@pytest.mark.parametrize("odd", ODD, ids=repr)
def test_metadata_of_any_shape_is_read_as_if_it_were_not_there(odd, tmp_path):
    """What a notebook says of itself is a stranger's JSON: any of it may be of any shape."""
    notebook = solution()
    places = [(notebook, "metadata"), *((cell, "metadata") for cell in notebook["cells"][:2])]
    places += [(notebook["cells"][2]["metadata"], key) for key in ("nbgrader", "minillm", "tags")]
    places += [(notebook["cells"][3]["metadata"].setdefault("nbgrader", {}), "grade_id")]
    for holder, key in places:
        holder[key] = odd
    notebook["cells"].append(odd)
    learner = classroom.find_notebooks(hand_in(tmp_path, notebook))
    assert list(learner.notebooks) == [NAME], "its name still says which exercise it is"


def test_brackets_in_too_many_brackets_are_no_notebook(tmp_path):
    (tmp_path / "deep.ipynb").write_text("[" * 100_000)
    assert classroom.find_notebooks(tmp_path).notes == [
        "deep.ipynb was not graded: it is no notebook: its content is not JSON"
    ]


@pytest.mark.parametrize("damage", ["", "{half", "[]", '{"key": 3}'])
def test_marks_that_were_kept_and_damaged_are_made_anew(damage, a_class, tmp_path, monkeypatch):
    monkeypatch.setattr(classroom, "grade_notebook", lambda path, limits: classroom.nothing(NAME, "graded again"))
    learner = classroom.find_notebooks(a_class / "ann")
    (kept := tmp_path / "marks" / "ann" / f"{NAME}.json").parent.mkdir(parents=True)
    kept.write_text(damage)
    assert classroom.grade_one(learner, find(NAME), tmp_path / "marks", LIMITS).notes == ["graded again"]
    assert json.loads(kept.read_text())["notes"] == ["graded again"]


def test_an_interrupted_run_goes_on_where_it_was(a_class, tmp_path, monkeypatch):
    graded = []

    def counting(path, limits):
        graded.append(path.parts[-2])
        if len(graded) == 2:
            raise KeyboardInterrupt
        return grade_notebook(path, limits)

    monkeypatch.setattr(classroom, "grade_notebook", counting)
    with pytest.raises(KeyboardInterrupt):
        classroom.grade_class(classroom.find_learners(a_class), 1, bar, kept=tmp_path / "kept")
    learners = classroom.find_learners(a_class)
    classroom.grade_class(learners, 1, bar, kept=tmp_path / "kept")
    assert len(graded) == 3 and graded[1] == graded[2]  # the one that was interrupted, again; the other not
    hand_in(a_class / "ann", with_edit("-(-num_tokens //", "(num_tokens //"))
    classroom.grade_class(classroom.find_learners(a_class), 1, bar, kept=tmp_path / "kept")
    assert graded[3:] == ["ann"]  # handed in again


def test_of_two_notebooks_the_one_with_the_exercises_name_counts(a_class):
    copy = a_class / "ann" / "05_block_pool (1).ipynb"
    copy.write_text(json.dumps(with_cell("x = 1")))
    os.utime(copy, (2e9, 2e9))
    ann = classroom.find_learners(a_class)[1]
    assert ann.notebooks[NAME].stem == NAME and "several notebooks" in ann.notes[0]


@pytest.mark.slow
def test_a_class_of_thirty_takes_less_than_ten_minutes(tmp_path):
    """Ten learners with solutions, ten with stubs, ten with an endless loop in one notebook and a bad cell in each."""
    for number in range(30):
        folder = tmp_path / "class" / f"learner-{number:02}"
        shutil.copytree(FOLDER / ("." if number % 3 == 1 else "solutions"), folder,
                        ignore=lambda _, names: [name for name in names if not name.endswith(".ipynb")])
        if number % 3 == 2:
            for path in folder.glob("*.ipynb"):
                notebook = json.loads(path.read_text(encoding="utf-8"))
                for source in ["1 / 0", "while True: pass"][: 2 if path.stem == NAME else 1]:
                    notebook["cells"].insert(1, {"cell_type": "code", "source": source, "metadata": {}})
                path.write_text(json.dumps(notebook), encoding="utf-8")
    learners, start = classroom.find_learners(tmp_path / "class"), time.perf_counter()
    classroom.grade_class(learners, 2, bar, kept=tmp_path / "kept")
    assert time.perf_counter() - start < 600
    for number, learner in enumerate(learners):
        assert learner.points == (0 if number % 3 == 1 else learner.out_of), learner.name


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "give either PATH"),
        (["x", "--class", "y", "--report", "z"], "give either PATH"),
        (["--class", "y"], "belong together"),
        (["no-such-folder"], "no such file or folder"),
    ],
)
def test_the_command_says_what_it_needs(arguments, line, capsys):
    assert main(["grade", *arguments]) == 2
    assert line in capsys.readouterr().err


def test_a_page_escapes_what_learners_write():
    learner = classroom.Learner("<script>", notes=["<b>"])
    assert "<script>" not in report.learner_page(learner).split("<body>")[1]
    assert "<b>" not in report.learner_page(learner)
