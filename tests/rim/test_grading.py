"""The grader at its edges: Jupyter's own dialect, odd files, odd texts, and what a class's report makes of them."""

from __future__ import annotations

import collections
import csv
import gc
import importlib.util
import io
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
import urllib.parse
import weakref
from pathlib import Path

import pytest

from minillm.cli import main
from minillm.course.grading import check, checks, classroom, handout, hint, report
from minillm.course.grading.exercises import find, load_all
from minillm.course.grading.notebook import read, run_cells
from minillm.course.grading.runner import Limits, Marks, grade_notebook, grade_task
from minillm.course.grading.shell import NotebookShell

ROOT = Path(__file__).resolve().parents[2]
NAME = "05_block_pool"
POOL, TABLE = find(NAME).tasks
LIMITS = Limits(step_seconds=2.0, notebook_seconds=60.0)


def solution(name: str = NAME) -> dict:
    return json.loads((ROOT / "exercises" / "solutions" / f"{name}.ipynb").read_text(encoding="utf-8"))


def cell_of(notebook: dict, task: str = POOL.name) -> dict:
    return next(cell for cell in notebook["cells"] if cell["metadata"].get("nbgrader", {}).get("grade_id") == task)


def code(source: str) -> dict:
    return {"cell_type": "code", "source": source, "metadata": {}, "outputs": [], "execution_count": None}


def hand_in(folder: Path, notebook: dict) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{NAME}.ipynb"
    path.write_text(json.dumps(notebook), encoding="utf-8")
    return path


def with_pool(source: str) -> dict:
    """The solution with this in place of the block pool's cell."""
    notebook = solution()
    cell_of(notebook)["source"] = source
    return notebook


def with_cells(*sources: str) -> dict:
    """The solution with these cells in front of the others."""
    notebook = solution()
    notebook["cells"][1:1] = [code(source) for source in sources]
    return notebook


def in_the_answer(line: str) -> dict:
    """The solution with one more line at the end of the block pool's cell."""
    return with_pool("".join(cell_of(solution())["source"]) + "\n\n" + line)


def said(marks) -> str:
    lines = [outcome.message + outcome.detail for row in marks.outcomes.values() for outcome in row]
    return "\n".join([*marks.notes, *lines])


def has_all(folder: Path, notebook: dict) -> None:
    """Expect full marks, and not a word about a cell that failed."""
    marks = grade_notebook(hand_in(folder, notebook), LIMITS)
    assert marks.points == marks.out_of and marks.notes == [], said(marks)


# --- a hand-in runs as in Jupyter ---------------------------------------------------------------------------------

DATACLASS = '''
from dataclasses import dataclass, field
from typing import ClassVar

@dataclass
class BlockPool:
    made: ClassVar[int] = 0
    num_blocks: int
    block_size: int

    def __post_init__(self):
        self.free = list(range(self.num_blocks))

    def blocks_for(self, num_tokens):
        return -(-num_tokens // self.block_size)

    def take(self, number):
        return None if number > len(self.free) else [self.free.pop() for _ in range(number)]

    def release(self, blocks):
        if len(set(blocks)) < len(blocks) or set(blocks) & set(self.free):
            raise ValueError("free already")
        self.free += blocks
'''


@pytest.mark.parametrize("first", ["", "from __future__ import annotations\n"])
def test_a_dataclass_with_a_class_variable_is_a_right_answer(first, tmp_path):
    """Its annotations are types, as in Jupyter; where a cell asks for texts, they can be looked up in __main__."""
    has_all(tmp_path, with_pool(first + DATACLASS))


AS_MAIN = {
    "annotations are types": "def f(x: int): ...\nassert f.__annotations__ == {'x': int}",
    "annotations choose the function": (
        "from functools import singledispatch\n@singledispatch\ndef f(x): return 0\n"
        "@f.register\ndef _(x: int): return 1\nassert f(3) == 1"),
    "what it defines can be pickled": (
        "import pickle\nclass Point: pass\nassert isinstance(pickle.loads(pickle.dumps(Point())), Point)"),
    "it is __main__": "import __main__\nanswer = 42\nassert __main__.answer == 42 and __name__ == '__main__'",
    "its folder is on the path": "%%writefile helper.py\nanswer = 42",
    "a task runs on while a cell waits": (
        "import asyncio\nasync def f(): return 42\nasyncio.get_running_loop()\nassert await asyncio.create_task(f())"),
}


@pytest.mark.parametrize("kind", AS_MAIN)
def test_a_cell_finds_what_a_notebook_s_main_module_has(kind, tmp_path):
    more = ["from helper import answer\nassert answer == 42"] if "writefile" in AS_MAIN[kind] else []
    has_all(tmp_path, with_cells(AS_MAIN[kind], *more))


def test_a_future_import_holds_for_the_cells_after_it(tmp_path):
    has_all(tmp_path, with_cells("from __future__ import annotations", "def f(x: nowhere): ...\nassert f"))


IPYTHON = {
    "help": "BlockPool?",
    "help on a method": "list.pop?",
    "source": "BlockPool??",
    "help in front": "?len",
    "a magic's value": "x = %pwd\nassert isinstance(x, str) and x",
    "a command's output": "files = !ls\nassert list(files)",
    "a command": "!true",
    "timed": "%timeit -n1 -r1 BlockPool(3, 4)",
    "the value before": "BlockPool(3, 4).take(3)",
    "await": "import asyncio\nawait asyncio.sleep(0)",
    "the shell": "assert get_ipython().user_ns['BlockPool'] is BlockPool",
    "display": "from IPython.display import Markdown\ndisplay(Markdown('# done'))",
    "a magic that this place lacks": "%load_ext no_such_extension_anywhere",
    "an unknown magic": "%no_such_magic 3",
    "settings of Jupyter's pictures": "%config InlineBackend.figure_format = 'retina'",
}


@pytest.mark.parametrize("kind", IPYTHON)
def test_ipythons_syntax_at_the_end_of_the_answers_cell_costs_nothing(kind, tmp_path):
    marks = grade_notebook(hand_in(tmp_path, in_the_answer(IPYTHON[kind])), LIMITS)
    assert marks.points == marks.out_of, said(marks)
    assert len(marks.notes) == (kind in ("a magic that this place lacks", "an unknown magic")), marks.notes


def test_a_cell_magic_in_front_of_the_answer_defines_it(tmp_path):
    has_all(tmp_path, with_pool("%%time\n" + "".join(cell_of(solution())["source"])))
    marks = grade_notebook(hand_in(tmp_path, with_pool("%%no_such_magic\n" + DATACLASS)), LIMITS)
    assert marks.points == marks.out_of and "no_such_magic" in said(marks)


def test_the_value_of_a_cell_is_known_to_the_next(tmp_path):
    has_all(tmp_path, with_cells("6 * 7", "assert _ == 42 and Out and In"))


def test_a_cell_that_fails_fails_as_before(tmp_path):
    """The neighbours: an error is named, with its cell's number, and what an await does not end is stopped."""
    marks = grade_notebook(hand_in(tmp_path, with_cells("1 / 0", "import asyncio\nwhile True: await asyncio.sleep(0)",
                                                        "x = = 3", "exit()", "BlockPool = 3")), LIMITS)
    assert marks.points == marks.out_of
    for line in ("cell 2 failed: ZeroDivisionError: division by zero", "cell 3 failed: it ran for more than 2 s",
                 "cell 4 failed: SyntaxError in line 1", "cell 5 failed: it calls exit()"):
        assert line in said(marks), said(marks)


def test_a_traceback_names_the_cell_and_shows_its_line(tmp_path):
    marks = grade_notebook(hand_in(tmp_path, with_pool(DATACLASS.replace("return -(-num", "return 1 / 0 + -(-num"))),
                           LIMITS)
    cell = solution()["cells"].index(cell_of(solution())) + 1
    assert f'File "<cell {cell}>", line' in said(marks) and "return 1 / 0" in said(marks), said(marks)


@pytest.mark.parametrize("line", ["!pip install --quiet no-such-package", "%pip uninstall -y torch",
                                  "done = !conda install x", "!python -m pip install no-such-package"])
def test_a_hand_in_installs_nothing_where_it_is_graded(line, tmp_path):
    marks = grade_notebook(hand_in(tmp_path, with_cells(line)), LIMITS)
    assert marks.points == marks.out_of, said(marks)
    assert "was not run: a hand-in installs nothing" in said(marks)


# --- where the grader is called -----------------------------------------------------------------------------------

FINDER = f'''
import sys
import urllib.parse
from importlib.machinery import PathFinder
from importlib.util import spec_from_file_location

class Finder:  # as an editable install has it: it is asked after the folders on the path
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "minillm":
            return spec_from_file_location(name, {str(ROOT / "minillm" / "__init__.py")!r})

sys.meta_path.insert(sys.meta_path.index(PathFinder) + 1, Finder)
'''


SCRIPT = "import sys\nfrom minillm.cli import main\nif __name__ == '__main__':\n    sys.exit(main())"  # as pip makes it


@pytest.mark.parametrize(("installed", "inside"), [
    ("editable", "minillm/pyproject.toml"), ("on the path", "minillm/__init__.py"), ("editable", "elsewhere/x"),
])
def test_a_folder_named_as_the_package_adds_no_line_to_a_right_answer(inside, installed, tmp_path):
    """A clone in the home folder, or an older checkout, where `minillm grade` is called."""
    for name, text in ((f"home/{inside}", ""), ("bin/grade.py", SCRIPT),
                       ("site/sitecustomize.py", FINDER if installed == "editable" else "")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    path = ROOT / "exercises" / "solutions" / "01_step_cost.ipynb"
    places = [str(tmp_path / "site"), *([str(ROOT)] if installed == "on the path" else [])]
    done = subprocess.run([sys.executable, tmp_path / "bin" / "grade.py", "grade", path], cwd=tmp_path / "home",
                          env={**os.environ, "PYTHONPATH": os.pathsep.join(places)}, capture_output=True, text=True)
    right = sum(len(task.checks) for task in find(path.stem).tasks)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == f"{right} of {right} checks pass", done.stderr
    assert len(done.stdout.splitlines()) == 4 and done.stderr.split() == ["grading"], done.stdout + done.stderr


def test_a_cell_does_not_see_the_folder_in_which_the_grader_was_called(tmp_path, monkeypatch):
    (tmp_path / "answers_of_the_course.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    marks = grade_notebook(hand_in(tmp_path / "work", with_cells("import answers_of_the_course")), LIMITS)
    assert "ModuleNotFoundError" in said(marks)


# --- texts and files of any kind ----------------------------------------------------------------------------------

HALF = "\ud800"  # half of a pair of surrogates: JSON can hold it, and no encoding
ODD_TEXTS = {
    "half a pair in a cell's error": lambda: with_cells("raise ValueError('\\ud800')", f"raise ValueError('{HALF}')"),
    "half a pair in an answer's error": lambda: with_pool(
        DATACLASS.replace("return -(-num", "raise type('\\ud800', (Exception,), {})('\\ud800')\n#")),
    "half a pair in a name": lambda: with_pool(f"'{HALF}'\n" + DATACLASS),
    "a console's commands": lambda: with_cells("raise ValueError('\\x1b[2J\\x00\\r\\u202e <b>done</b>')"),
    "an error that cannot be shown": lambda: with_cells(
        "class Bad(Exception):\n    def __str__(self): raise Bad('x')\nraise Bad()"),
    "a very long error": lambda: with_pool(DATACLASS.replace("return -(-num", "raise ValueError('x' * 10**7)\n#")),
    "letters of other languages": lambda: with_cells("raise ValueError('čaj 茶 🍵')"),
}


@pytest.fixture
def odd_class(tmp_path) -> Path:
    """A learner for each odd text, and for odd names of folders and files."""
    root = tmp_path / "class"
    for i, make in enumerate(ODD_TEXTS.values()):
        hand_in(root / f"odd-{i}", make())
    for name in ("ann", "čaj 茶 🍵", "x" * 255, "a\nb"):
        hand_in(root / name, solution())
    bad = os.fsdecode(os.fsencode(root) + b"/caf\xe9")
    hand_in(Path(bad), solution())
    (Path(bad) / os.fsdecode(b"notes\xff\x1b[2J.txt")).write_text("")
    return root


CONSOLES = ("utf-8", "ascii", "cp1252")


@pytest.mark.parametrize("encoding", CONSOLES)
def test_a_class_keeps_its_report_whatever_its_texts_hold(encoding, odd_class, tmp_path, monkeypatch):
    console = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", console)
    assert main(["grade", "--class", str(odd_class), "--report", str(tmp_path / "out")]) == 0
    console.flush()
    lines = console.buffer.getvalue().decode(encoding)
    assert lines.isprintable() or set(c for c in lines if not c.isprintable()) == {"\n"}
    assert "ann: 13 of 13" in lines.replace(str(len(POOL.checks) + len(TABLE.checks)), "13")
    index = (tmp_path / "out" / "index.html").read_text(encoding="utf-8")
    links = re.findall(r'<th scope="row"><a href="(.+?)">', index)
    assert len(links) == len(os.listdir(odd_class))
    for link in links:  # every learner has a page, and the index leads there
        page = Path(os.fsdecode(os.fsencode(tmp_path / "out") + b"/" + urllib.parse.unquote_to_bytes(link)))
        text = page.read_text(encoding="utf-8")
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u202e]", text) and len(text) < 100_000
    with (tmp_path / "out" / "report.csv").open(newline="", encoding="utf-8-sig") as file:
        rows = {row["learner"]: row for row in csv.DictReader(file)}
    assert len(rows) == len(links) and rows["ann"]["total"] == rows["čaj 茶 🍵"]["total"] == "100"


def test_an_odd_text_is_shown_as_its_escape(odd_class, tmp_path, capsys):
    main(["grade", "--class", str(odd_class), "--report", str(tmp_path / "out")])
    pages = [path.read_text(encoding="utf-8") for path in sorted((tmp_path / "out" / "learners").iterdir())
             if path.name.startswith("odd")]
    assert "ValueError: \\ud800" in pages[0] and "\\ud800" in pages[1]
    assert "\\x1b[2J\\x00\\r\\u202e &lt;b&gt;done" in pages[3] and "čaj 茶 🍵" in pages[6]
    whole = [name for name, text in zip(ODD_TEXTS, pages, strict=True) if "100 % of the checks pass" in text]
    assert whole == [name for name in ODD_TEXTS if "answer" not in name and "very long" not in name
                     and "in a name" not in name]


@pytest.mark.parametrize("encoding", CONSOLES)
def test_one_learner_s_marks_are_shown_on_any_console(encoding, odd_class, monkeypatch):
    console = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", console)
    assert main(["grade", str(odd_class / "odd-0" / f"{NAME}.ipynb")]) == 0
    console.flush()
    assert b"cell 2 failed: ValueError: \\ud800" in console.buffer.getvalue()


def test_a_check_and_a_hint_are_shown_on_any_console(monkeypatch):
    """As in a learner's terminal, or under CI."""
    console = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", console)
    monkeypatch.delenv("CI", raising=False)

    def percentile(values, percent):
        raise ValueError(HALF + "čaj")

    check("percentile", percentile)
    hint("kv_cache", 2), hint("block_table", 1), check("requests_that_fit", lambda *_: 7)
    console.flush()
    assert b"ValueError: \\ud800\\u010daj" in console.buffer.getvalue()


@pytest.mark.parametrize("environment", [{"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
                                         {"PYTHONIOENCODING": "ascii"}])
def test_a_class_keeps_its_report_in_any_locale(environment, odd_class, tmp_path):
    command = [sys.executable, "-m", "minillm", "grade", "--class", odd_class, "--report", tmp_path / "out"]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True)
    assert done.returncode == 0 and done.stderr.split() == [b"grading"], done.stderr
    assert (tmp_path / "out" / "index.html").read_text(encoding="utf-8").count('<th scope="row">') == len(
        os.listdir(odd_class))


def encoded(encoding: str):
    return json.dumps(solution(), ensure_ascii=False).encode(encoding)


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (lambda: b"\xef\xbb\xbf" + encoded("utf-8"), None),
        (lambda: encoded("utf-8"), None),
        (lambda: encoded("utf-16"), "encoded as UTF-16"), (lambda: encoded("utf-16-le"), "encoded as UTF-16-LE"),
        (lambda: encoded("utf-32"), "encoded as UTF-32"),
        (lambda: json.dumps({"cells": [code("# š")]}, ensure_ascii=False).encode("cp1250"), "not encoded as UTF-8"),
        (lambda: b"\xff\xfe\x00", "not JSON"), (lambda: b"", "not JSON"), (lambda: b"\x00\x00\x00\x00", "not JSON"),
    ],
)
def test_a_notebook_in_another_encoding_is_read_or_its_encoding_named(content, line, tmp_path, capsys):
    path = tmp_path / f"{NAME}.ipynb"
    path.write_bytes(content())
    assert main(["grade", str(path)]) == (2 if line else 0)
    assert (line or "") in capsys.readouterr().err


def test_a_spreadsheet_reads_the_reports_letters(tmp_path):
    """Without a byte-order mark it takes them for another encoding's."""
    learner = classroom.Learner("čaj")
    report.write([learner], tmp_path)
    assert (tmp_path / "report.csv").read_bytes().startswith("\ufefflearner".encode())


def test_a_hand_in_that_breaks_the_grader_costs_its_own_marks_only(odd_class, tmp_path, monkeypatch, capsys):
    """Whatever that is: a full disk, a file that is gone meanwhile, a process that cannot be started."""
    def breaking(path, limits):
        if path.parent.name == "odd-0":
            raise OSError(28, "No space left on device")
        return classroom.nothing(NAME, "graded")

    monkeypatch.setattr(classroom, "grade_notebook", breaking)
    assert main(["grade", "--class", str(odd_class), "--report", str(tmp_path / "out")]) == 0
    assert "No space left on device" in (tmp_path / "out" / "learners" / "odd-0.html").read_text(encoding="utf-8")
    assert not (tmp_path / "out" / "marks" / "odd-0" / f"{NAME}.json").exists(), "it would not be tried again"


# --- where the class is stuck -------------------------------------------------------------------------------------


def tables(learners: list[classroom.Learner]) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:
    """The rows under "Where the class is stuck" and under "Not answered"."""
    text = report.class_page(learners).split("Where the class is stuck")[1]
    return tuple([tuple(re.findall("<td.*?>(.*?)</td>", row)) for row in part.split("<tr>")[2:]]
                 for part in text.split("Not answered"))


def test_attempted_answers_count_and_untouched_ones_stand_apart(tmp_path):
    stub = json.loads((ROOT / "exercises" / f"{NAME}.ipynb").read_text(encoding="utf-8"))
    wrong = with_pool("".join(cell_of(solution())["source"]).replace("-(-num_tokens //", "(num_tokens //"))
    half = json.loads(json.dumps(stub))  # one method is written, the others are as they were
    cell_of(half)["source"] = "".join(cell_of(half)["source"]).replace(
        'raise NotImplementedError("Exercise 5: BlockPool.__init__")', "self.free = list(range(num_blocks))")
    gone = solution()
    gone["cells"].remove(cell_of(gone))
    for i, notebook in enumerate((stub, stub, half, wrong, solution(), gone)):
        hand_in(tmp_path / "class" / f"learner-{i}", notebook)
    learners = classroom.find_learners(tmp_path / "class")
    for learner in learners:
        learner.marks[NAME] = grade_notebook(learner.notebooks[NAME], LIMITS)
    stuck, unanswered = tables(learners)
    assert [(row[0], row[2]) for row in stuck] == [("1 of 2", POOL.name)] and "blocks_for" in stuck[0][3]
    assert [(row[0], row[2]) for row in unanswered] == [("4 of 6", POOL.name), ("3 of 6", TABLE.name)]


# --- a message is true of the answer ------------------------------------------------------------------------------


def grows_if_needed(self, num_tokens):
    taken = self.pool.take(self.pool.blocks_for(num_tokens) - len(self.blocks))
    if not taken:
        return False
    self.blocks += taken
    return True


def accepted(best: list, drafts: list) -> int:
    return max(i for i in range(len(drafts) + 1) if drafts[:i] == best[:i])


MISLED = {  # task -> an answer, what it must be told, and what would be untrue of it
    "block_table": (type("Table", (), {
        "__init__": lambda self, pool: vars(self).update(pool=pool, blocks=[]), "grow": grows_if_needed}),
        "Nothing was missing", "early or late"),
    "verify_greedy": (lambda best, drafts: [*drafts[: accepted(best, drafts)], best[-1]],
                      "the token after them is not the target's own", "must be compared"),
    "requests_that_fit": (lambda memory, weights, overhead, context, size: max(
        0, (memory - weights - overhead) * 1e9 // (context * size)), "make it an int", "rounded"),
    "decode_bytes": (lambda weights, size, contexts: weights + size * sum(contexts.pop() for _ in list(contexts)),
                     "list was changed", "padding"),
    "percentile": (lambda values, percent: sorted(values) and None, "is a `return` missing", "Your code raised"),
}


@pytest.mark.parametrize("task", MISLED)
def test_a_learner_is_told_what_is_true_of_the_answer(task, monkeypatch, capsys):
    monkeypatch.delenv("CI", raising=False)
    answer, line, untrue = MISLED[task]
    check(task, answer)
    told = capsys.readouterr().out
    assert line in told and untrue not in told, told


# --- what learners are given --------------------------------------------------------------------------------------


def give_away(folder: Path) -> list[str]:
    """What a learner must not find in a folder: solutions, their sources, and files that read them."""
    signs = r"(BEGIN|END) SOLUTION|<summary>Solution|['\"/]src['\"/]|solutions['\"/]"
    return [str(path.relative_to(folder)) for path in sorted(folder.rglob("*")) if path.name in ("src", "solutions")
            or (path.suffix in (".py", ".ipynb", ".md") and re.search(signs, path.read_text(encoding="utf-8")))]


def test_a_room_kit_holds_every_exercise_and_no_solution(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("room_kit", ROOT / "notebooks" / "room" / "kit.py")
    kit = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(kit)
    monkeypatch.setattr(kit, "pip", lambda *_: True)
    (tmp_path / "model.whl").write_bytes(b"")
    kit.gather(tmp_path / "kit", [], [], tmp_path / "model.whl")
    folder = tmp_path / "kit" / "exercises"
    assert give_away(folder) == [] and not list((tmp_path / "kit").rglob("src"))
    assert [path.name for path in sorted(folder.iterdir())] == [*STUBS, "README.md"]
    page = (folder / "README.md").read_text(encoding="utf-8")
    assert all(f"({name})" in page for name in STUBS) and "nbgrader" not in page
    assert {path.name for path in (tmp_path / "kit" / "notebooks").iterdir()} >= {"01_decode_loop.ipynb", "README.md"}


STUBS = sorted(path.name for path in (ROOT / "exercises").glob("*.ipynb"))


def test_the_score_tells_what_was_begun_from_what_was_not():
    def marks(name, right, answered):
        wrong = checks.Outcome("a", right, answered=answered)
        return Marks(name, {task.name: [wrong] * len(task.checks) for task in find(name).tasks})

    one, other = marks("05_block_pool", True, True), marks("06_prefix_sharing", False, False)
    learner = classroom.Learner("a", marks={"05_block_pool": one, "06_prefix_sharing": other})
    whole = f"{one.out_of} of {one.out_of + other.out_of} checks pass"
    assert report.score(learner) == f"{whole}; of the exercises begun (1): {one.out_of} of {one.out_of}, 100 %"
    for got, of, each in ((one.out_of, one.out_of, one), (0, other.out_of, other)):
        assert report.score(classroom.Learner("b", marks={each.exercise: each})) == f"{got} of {of} checks pass"


LINK = re.compile(r"\]\(((?:\.\./)[^)]*/)([^)/]+)\)")  # its folder, and the file


def links_to_pages(notebook: dict) -> list[str]:
    """Where the links of its text cells lead."""
    found = [LINK.findall("".join(cell["source"])) for cell in notebook["cells"]]
    return ["".join(parts) for each in found for parts in each]


def without_places(cells: list[dict]) -> list[dict]:
    """The cells, of whose links only the file is left: a copy's lead from another folder."""
    return [{**cell, "source": LINK.sub(r"](\2)", "".join(cell["source"]))} for cell in cells]


def test_a_copy_of_the_exercises_is_the_learners_own(tmp_path, capsys):
    folder = tmp_path / "my work"
    assert main(["exercises", str(folder)]) == 0
    out = capsys.readouterr().out
    essential = next(exercise.name for exercise in load_all() if exercise.importance == 3)
    assert f"start with {folder / essential}.ipynb" in out and essential != STUBS[0].removesuffix(".ipynb")
    assert f"{len(STUBS)} exercises" in out
    assert sorted(path.name for path in folder.iterdir()) == STUBS and give_away(folder) == []
    for name in STUBS:
        copied, original = (json.loads((place / name).read_text(encoding="utf-8")) for place in
                            (folder, ROOT / "exercises"))
        links = re.findall(r"\]\(((?:\.\./)[^)]+\.ipynb)\)", "".join(copied["cells"][0]["source"]))
        assert links and all((folder / urllib.parse.unquote(link)).resolve().is_file() for link in links), links
        theirs = [cell for cell in original["cells"] if "solution" not in cell["metadata"].get("tags", [])]
        assert len(theirs) < len(original["cells"]), "the course's own notebooks have the solutions, folded"
        assert all((folder / urllib.parse.unquote(link)).resolve().is_file() for link in links_to_pages(copied))
        assert without_places(copied["cells"][1:]) == without_places(theirs[1:])
        assert copied["metadata"] == original["metadata"]
    assert main(["grade", str(folder / STUBS[4])]) == 1
    assert capsys.readouterr().out.count("Not answered") == 2


@pytest.mark.parametrize("there", [[STUBS[2]], STUBS])
def test_work_that_is_there_is_not_overwritten_unless_asked(there, tmp_path, capsys):
    for name in there:
        (tmp_path / name).write_text("my work")
    assert main(["exercises", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert there[0] in error and "--force" in error and ("more" in error) == (len(there) > 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == there, "something was copied before"
    assert {(tmp_path / name).read_text() for name in there} == {"my work"}
    (tmp_path / "notes.txt").write_text("mine")
    assert main(["exercises", str(tmp_path), "--force"]) == 0
    assert (tmp_path / "notes.txt").read_text() == "mine" and "my work" not in (tmp_path / there[0]).read_text()


def test_the_exercises_are_copied_from_a_kit_and_not_onto_themselves(tmp_path, monkeypatch, capsys):
    for force in ([], ["--force"]):
        assert main(["exercises", str(ROOT / "exercises"), *force]) == 2
        assert "where the exercises come from" in capsys.readouterr().err
    shutil.copytree(ROOT / "exercises", tmp_path / "kit" / "exercises")
    monkeypatch.setattr(handout, "PACKAGE", str(tmp_path / "site-packages" / "minillm"))
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "kit" / ".venv"))
    assert main(["exercises", str(tmp_path / "mine")]) == 0
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "elsewhere"))
    monkeypatch.chdir(tmp_path)
    assert main(["exercises", str(tmp_path / "other")]) == 2 and not (tmp_path / "other").exists()
    (tmp_path / "file").write_text("")
    monkeypatch.chdir(tmp_path / "kit")
    assert main(["exercises", str(tmp_path / "file")]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_without_ipython_the_grader_says_what_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "IPython", None)
    monkeypatch.delitem(sys.modules, "minillm.course.grading.shell", raising=False)
    for name in [name for name in sys.modules if name.startswith("IPython.")]:
        monkeypatch.delitem(sys.modules, name)
    assert main(["grade", str(hand_in(tmp_path, solution()))]) == 2
    assert "pip install -e '.[lab]'" in capsys.readouterr().err


# --- anything at all ----------------------------------------------------------------------------------------------

INPUTS = 1000
PIECES = ("", "x = 1", "def take(self", "class BlockPool:\n    pass", "%magic", "BlockPool?", HALF, "\0", "čaj 茶",
          "'" * 99, "raise SystemExit", "(" * 300, "# %% [markdown]", "\ufeff", "\u2028", "\r\n\t ",
          "def percentile(): return 1")


def anything(draw: random.Random, depth: int = 0):
    """A JSON value of any shape."""
    inside = range(draw.randint(0, 3) if depth < 3 else 0)
    return draw.choice([
        lambda: draw.choice([None, True, False, 0, -1, 10**30, 1e308, math.nan, math.inf]),
        lambda: draw.choice(PIECES), lambda: [anything(draw, depth + 1) for _ in inside],
        lambda: {draw.choice(PIECES): anything(draw, depth + 1) for _ in inside},
    ])()


def any_cell(draw: random.Random):
    """A cell whose parts are sometimes right, and sometimes anything."""
    if draw.random() < 0.1:
        return anything(draw)

    def or_anything(*right):
        return draw.choice(right) if draw.random() < 0.7 else anything(draw)

    task = draw.choice(["block_pool", "block_table", "percentile", "nothing"])
    metadata = {"nbgrader": or_anything({"grade_id": or_anything(task)}),
                "minillm": or_anything({"stub": or_anything("0" * 16)}), "tags": or_anything(["demo"])}
    cell = {"cell_type": or_anything("code", "markdown", "raw"), "metadata": or_anything(metadata),
            "source": or_anything(draw.choice(PIECES), list(PIECES))}
    return {key: value for key, value in cell.items() if draw.random() < 0.9}


def any_notebook(draw: random.Random) -> bytes:
    notebook = {"cells": [any_cell(draw) for _ in range(draw.randint(0, 4))], "nbformat": anything(draw),
                "metadata": {"minillm": {"exercise": NAME}} if draw.random() < 0.7 else anything(draw)}
    if draw.random() < 0.1:
        notebook["cells"] = anything(draw)
    return json.dumps(notebook).encode(draw.choice(["utf-8"] * 8 + ["utf-8-sig", "utf-16"]))


def any_bytes(draw: random.Random) -> bytes:
    return draw.choice([
        lambda: b"", lambda: draw.randbytes(draw.randint(1, 200)), lambda: json.dumps(anything(draw)).encode(),
        lambda: any_notebook(draw), lambda: any_notebook(draw), lambda: any_notebook(draw)[: draw.randint(0, 300)],
        lambda: b"[" * 100_000, lambda: b'{"cells": ' + b"9" * 5000 + b"}",
    ])()


def any_name(draw: random.Random) -> str:
    return draw.choice(["05_block_pool.ipynb", "10 copy.ipynb", "x.ipynb", "٣_x.ipynb", "²_x.ipynb", "notes.txt", "05",
                        " ", "x" * 249 + ".ipynb", "-x", os.fsdecode(b"caf\xe9.ipynb"), "a\nb.ipynb", "\x1b[2J.ipynb"])


def any_place(draw: random.Random, folder: Path) -> Path:
    """A file, a folder of files, a link to somewhere or to itself, or nothing, in a folder that is empty."""
    kind = draw.randrange(9)
    path = folder / any_name(draw)
    if kind < 4:
        path.write_bytes(any_bytes(draw))
    elif kind == 4:
        return draw.choice([folder / "missing", folder / ("y" * 5000), Path("a\0b"), folder / "no" / "one", path / "x"])
    elif kind == 5:
        path.symlink_to(draw.choice([path.name, "..", "missing", "/dev/null", "."]))
    elif kind == 6:
        getattr(os, "mkfifo", Path.touch)(path)
    else:
        path.mkdir()
        for _ in range(draw.randint(0, 3)):
            if draw.random() < 0.3:
                link = path / f"link-{draw.randrange(99)}.ipynb"
                link.unlink(missing_ok=True)
                link.symlink_to(draw.choice([link.name, ".", "..", "missing"]))
            else:
                (path / any_name(draw)).write_bytes(any_bytes(draw))
        return draw.choice([path, folder])
    return path


def in_this_process(path: Path, limits: Limits):
    """A notebook read, run and searched for answers here, since a process for each would take minutes."""
    submission = read(path)
    answers = run_cells(submission.cells, seconds=1.0)
    marks = classroom.nothing(submission.exercise.name, "; ".join(answers.notes) or "It has nothing.")
    for task in submission.exercise.tasks:
        marks.outcomes[task.name] = list(grade_task(task, submission, answers, limits))
    return marks


def test_whatever_is_handed_in_the_grader_answers_with_a_sentence(tmp_path, monkeypatch, count_inputs):
    """Status 0, 1 or 2 and never a traceback, on a console of ASCII, for a learner and for a class."""
    draw, statuses, real = random.Random(5), collections.Counter(), classroom.grade_notebook
    before = sys.modules["__main__"]
    for number in range(INPUTS):
        folder = tmp_path / str(number) / "learner"
        folder.mkdir(parents=True)
        path, out = any_place(draw, folder), str(tmp_path / str(number) / "out")
        arguments = [str(path)] if number % 3 else ["--class", str(folder.parent), "--report", out]
        monkeypatch.setattr(classroom, "grade_notebook", in_this_process if number % 150 else real)
        said = [io.TextIOWrapper(io.BytesIO(), "ascii", errors) for errors in ("strict", "backslashreplace")]
        monkeypatch.setattr(sys, "stdout", said[0])
        monkeypatch.setattr(sys, "stderr", said[1])
        status = main(["grade", "--jobs", "1", *["--"] * (number % 3 > 0), *arguments])
        text = "".join((stream.flush(), stream.buffer.getvalue().decode("ascii"))[1] for stream in said)
        assert status in (0, 1, 2) and "Traceback" not in text and len(text) > 20, (number, path, text)
        assert "could not be graded" not in text, (number, path, text)  # it would hide an error of the grader's own
        assert status != 2 or text.startswith("minillm grade: "), (number, path, text)
        assert status == 0 or number % 3, (number, path, text)
        statuses[status] += 1
        shutil.rmtree(folder.parent)
    sys.modules["__main__"] = before
    count_inputs("hand-ins", INPUTS)
    assert min(statuses.values()) > 50, statuses


def test_a_shell_is_let_go_once_the_next_one_is_made():
    """IPython would keep each until the process ends, and then clear them one by one, which took minutes."""
    before = sys.modules["__main__"]
    first = weakref.ref(NotebookShell.fresh())
    NotebookShell.fresh()
    NotebookShell.clear_instance()
    sys.modules["__main__"] = before
    gc.collect()
    assert first() is None
