"""What `check` and `hint` say and do, and that a message never gives the answer away."""

from __future__ import annotations

import random
import re

import pytest
import torch
from wrong_answers import FOLDER

from minillm.course.grading import check, hint
from minillm.course.grading.checks import CheckFailed, TimeLimit, run_task, time_limit
from minillm.course.grading.exercises import load_all
from minillm.course.grading.notebook import read, run_cells
from minillm.course.grading.tasks import Exercise, Task, close, expect

EXERCISES = load_all()


@pytest.fixture
def double(monkeypatch) -> Task:
    """A task of our own: double(x)."""
    task = Task("double", "double", hints=("think", "add", "x + x"))

    @task.check(mistake="It does not double.", look="'Doubling'")
    def first(double):
        """Doubles a number."""
        expect(double(21) == 42, "double(21)")

    @task.check(mistake="It rounds.", look="'Doubling'")
    def second(double):
        """Doubles a fraction."""
        expect(close(double(0.25), 0.5, 1e-6), "double(0.25)")

    exercise = Exercise("99_double", "Double", 1, 1, "01_decode_loop", (task,))
    monkeypatch.setattr("minillm.course.grading.checks.load_all", lambda: (exercise,))
    monkeypatch.delenv("CI", raising=False)
    return task


def test_a_right_answer_prints_the_table(double, capsys):
    result = check("double", lambda x: 2 * x)
    assert result.passed and result.points == 2
    assert capsys.readouterr().out.splitlines() == [
        "double: 2 of 2 checks pass", "  ok  doubles a number", "  ok  doubles a fraction"
    ]


def test_a_wrong_answer_names_the_mistake_and_the_place(double, capsys):
    result = check("double", lambda x: 2 * int(x))
    assert not result.passed and [outcome.check for outcome in result.failed] == ["doubles a fraction"]
    assert capsys.readouterr().out.splitlines()[-4:] == [
        "", "doubles a fraction:", "  It rounds. Look at 'Doubling'.", "  Asked: double(0.25)"
    ]


def test_behind_a_failed_first_check_the_others_wait(double, capsys):
    result = check("double", lambda x: x)
    assert [outcome.passed for outcome in result.outcomes] == [False, None] and result.points == 0
    assert "  --  doubles a fraction (waits for the first)" in capsys.readouterr().out


def test_a_traceback_stands_last_and_holds_the_learners_lines_only(double, capsys):
    learners = {}
    source = "import torch\n\n@torch.inference_mode()\ndef double(x):\n    return x / 0"  # a decorator has frames
    exec(compile(source, "<cell 1>", "exec"), learners)
    check("double", learners["double"])
    lines = capsys.readouterr().out.splitlines()
    assert any("Your code raised ZeroDivisionError, see below." in line for line in lines)
    assert lines[-1].strip() == "ZeroDivisionError: division by zero"
    assert sum("File" in line for line in lines) == 1 and "== 42" not in "\n".join(lines)


def test_an_answer_of_the_wrong_kind_is_no_crash(double, capsys):
    for answer in (None, 7, lambda: 1, lambda x: None, lambda x: "a"):
        assert not check("double", answer).passed
    assert "42" not in capsys.readouterr().out


@pytest.mark.parametrize("answer", [7, lambda: 1, lambda x, y: x])
def test_an_answer_that_cannot_be_called_so_is_told_that_it_cannot(double, capsys, answer):
    assert not check("double", answer).passed
    out = capsys.readouterr().out
    assert "It could not be called:" in out and "What came back" not in out


def test_what_came_back_and_cannot_be_used_is_called_that(double, capsys):
    assert not check("double", lambda x: 42 if x == 21 else "a").passed
    out = capsys.readouterr().out
    assert "What came back could not be used:" in out and "called" not in out


def test_an_answer_without_a_return_is_told_so_and_one_that_gives_none_rightly_is_not(double, capsys):
    def forgets(x):
        2 * x

    check("double", forgets)
    assert "It returned None: is a `return` missing?" in capsys.readouterr().out
    for answer in (lambda x: x, lambda x: 1 / 0, lambda x: 42 if x == 21 else None):
        check("double", answer)
    assert capsys.readouterr().out.count("It returned None") == 1, "the last one's second check got None only"


def test_of_several_failures_the_first_is_explained(double, capsys):
    @double.check(mistake="It adds.", look="'Doubling'")
    def third(double):
        """Doubles nothing."""
        expect(double(0) == 0, "double(0)")

    check("double", lambda x: 2 * int(x) + (x == 0))
    out = capsys.readouterr().out
    assert "doubles a fraction: (mend this first; 1 more may follow from it)" in out and "It adds." not in out


def test_an_unwritten_answer_says_what_to_do(double, capsys):
    def stub(x):
        raise NotImplementedError("Exercise 99: double")

    check("double", stub)
    assert "Write your code in its place, and delete the line" in capsys.readouterr().out


def test_an_endless_loop_is_ended(double, monkeypatch):
    def endless(x):
        while True:
            pass

    (first, _) = run_task(double, endless, seconds=0.2)
    assert "does a loop never end?" in first.message


def test_the_time_limit_counts_processor_time_and_leaves_no_timer():
    with pytest.raises(TimeLimit), time_limit(0.1):
        while True:
            pass
    with time_limit(0.1):
        pass
    for _ in range(10**6):
        pass


@pytest.mark.parametrize(
    ("value", "raises"), [("1", True), ("true", True), ("", False), ("0", False), ("false", False)]
)
def test_under_ci_a_failed_check_raises(double, monkeypatch, value, raises):
    monkeypatch.setenv("CI", value)
    assert check("double", lambda x: 2 * x).passed
    if raises:
        with pytest.raises(CheckFailed, match="It does not double"):
            check("double", lambda x: x)
    else:
        assert not check("double", lambda x: x).passed


def test_hints_come_in_three_levels(double, capsys):
    for level, text in ((1, "think"), (2, "add"), (3, "x + x")):
        hint("double", level)
        assert capsys.readouterr().out == f"Hint {level} of 3: {text}\n"
    with pytest.raises(ValueError, match="there are 1, 2 and 3"):
        hint("double", 4)


def test_an_unknown_name_lists_the_known(double):
    with pytest.raises(ValueError, match="known: double"):
        check("dubble", None)


def test_a_check_draws_the_same_numbers_whatever_ran_before(double):
    drawn = []

    def answer(x):
        drawn.append((random.random(), float(torch.rand(1))))
        return 2 * x

    for _ in range(2):
        list(run_task(double, answer))
        random.random()
    assert drawn[:2] == drawn[2:]


@pytest.mark.parametrize(
    ("got", "want", "right"),
    [
        (0.5, 0.5, True), ([1, 2], [1.0, 2.0], True), (torch.tensor([1.0]), [1.0], True),
        (torch.tensor([0.1], dtype=torch.float32), torch.tensor([0.1], dtype=torch.float64), True),
        (0.5001, 0.5, False), ([1, 2], [1, 2, 3], False), (float("nan"), 0.5, False), (float("inf"), 0.5, False),
        ([[1, 2]], [1, 2], False), ([], [], True),
    ],
)
def test_close_compares_shape_and_size(got, want, right):
    assert close(got, want, 1e-6) is right


def test_the_margin_is_kept(double):
    outcomes = list(run_task(double, lambda x: 2 * x + (x < 1) * 5e-6))
    assert outcomes[1].passed is False and outcomes[1].margin == pytest.approx(5, rel=0.01)


# --- all exercises ------------------------------------------------------------------------------------------------


def test_names_are_unique_and_texts_are_whole_sentences():
    tasks = [task for exercise in EXERCISES for task in exercise.tasks]
    assert len({task.name for task in tasks}) == len(tasks)
    for task in tasks:
        for one in task.checks:
            assert re.search(r"[.?!)]$", one.mistake), one.mistake
            assert not one.look.endswith("."), one.look


@pytest.mark.parametrize("exercise", EXERCISES, ids=[exercise.name for exercise in EXERCISES])
def test_a_solution_notebook_runs_from_top_to_bottom(exercise, monkeypatch, tmp_path):
    """The cells that the grader leaves out too. Under CI a check that fails raises."""
    monkeypatch.setenv("CI", "1")
    monkeypatch.setenv("MPLBACKEND", "Agg")
    cells = read(FOLDER / "solutions" / f"{exercise.name}.ipynb").cells
    answers = run_cells([cell.__class__(cell.kind, cell.source) for cell in cells], seconds=180)
    assert not answers.failed, answers.failed


@pytest.mark.parametrize("exercise", EXERCISES, ids=[exercise.name for exercise in EXERCISES])
def test_what_an_exercise_says_to_look_at_exists(exercise):
    """Files of the package by their paths, and parts of the course's notebooks by number and heading."""
    text = (FOLDER / "src" / f"{exercise.name}.py").read_text(encoding="utf-8")
    for name in re.findall(r"`(minillm/[\w/]+\.py)`", text):
        assert (FOLDER.parent / name).is_file(), name
    look = re.search(r"\*\*To look at\*\*(.*?)\n\n", text.replace("\n# ", " "), flags=re.DOTALL)[1]
    for number, parts in re.findall(r"notebook (\d+), ([^;.]+)", look):
        (source,) = (FOLDER.parent / "notebooks" / "src").glob(f"{int(number):02}_*.py")
        headings = re.findall(r"^# #+ (.+)$", source.read_text(encoding="utf-8"), flags=re.MULTILINE)
        named = re.findall(r'"(.+?)"', parts)
        assert named and set(named) <= set(headings), f"{named} in {headings}"
