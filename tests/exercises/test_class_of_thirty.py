"""Thirty hand-ins by `minillm grade --class`: right, untouched, broken in every way, and files that are no notebook."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest
from test_class_guesses import chapter
from test_grader import BROKEN, FOLDER, NAME, POOL, TABLE, Pages, hand_in, solution, with_cell, with_edit

from minillm.cli import main
from minillm.course.grading.class_guesses import histogram, of_class

SLOW_KINDS = {"endless loop in a method", "endless loop that swallows", "output flood"}  # each takes its time limit
NO_NOTEBOOK = {
    "empty file": b"", "picture": b"\x89PNG\xff\x00", "half a file": json.dumps(solution()).encode()[:2000],
    "list": b"[1, 2]", "deep": b"[" * 100_000, "of no exercise": b'{"cells": [], "metadata": {}, "nbformat": 4}',
}
SIZE, MEASURED = 30, 60.0


def spoiled() -> dict[str, dict]:
    """By its kind, a notebook whose block pool is broken and whose block table is right."""
    return {kind: make() for kind, (make, _) in BROKEN.items() if kind not in SLOW_KINDS}


def learners_of(room: Path) -> dict[str, tuple[str, str]]:
    """A class of thirty on disk -> by learner the points in per cent, as in the table, and a line that names why."""
    kinds = [(kind, notebook, None, BROKEN[kind][1]) for kind, notebook in spoiled().items()]
    kinds += [(kind, data, "0", "was not graded") for kind, data in NO_NOTEBOOK.items()]
    untouched = json.loads((FOLDER / f"{NAME}.ipynb").read_text(encoding="utf-8"))
    kinds += [("untouched", untouched, "0", "Not answered"), ("nothing", None, "0", "Not handed in"),
              ("off by one", with_edit("-(-num_tokens //", "(num_tokens //"), None, "The count is off by one"),
              ("a cell that fails", with_cell("1 / 0"), "100", "ZeroDivisionError")]
    kinds += [(f"right {number}", solution(), "100", "") for number in range(SIZE - len(kinds))]
    for number, (kind, content, _, _) in enumerate(kinds):
        folder = room / kind
        folder.mkdir(parents=True)
        if isinstance(content, bytes):
            (folder / f"{NAME}.ipynb").write_bytes(content)
        elif content is not None:
            hand_in(folder, content)
        guess_of(folder, number)
    share = f"{100 * len(TABLE.checks) / (len(POOL.checks) + len(TABLE.checks)):.0f}"
    return {kind: (share if per_cent is None and kind != "off by one" else per_cent, line)
            for kind, _, per_cent, line in kinds}


def guess_of(folder: Path, number: int) -> None:
    """Each learner's chapter 2: the guesses are 10, 20, 30 and so on; every tenth is blank, one page is damaged."""
    about, value = "static steps", 10 * (number + 1)
    page = folder / "02_static_batching.ipynb"
    if number == SIZE - 1:
        page.write_text("{" * 50)
    elif number % 10 == 9:
        chapter(page, f'guess("{about}", None)')
    else:
        chapter(page, f'guess("{about}", {value})', printed=f"{about}: your guess {value}, measured {MEASURED:g}, "
                f"{MEASURED / value:.3g} times the guess\n")


def numbers_in(page: str) -> list[int]:
    """The bars of a page's histogram."""
    return [int(number) for number in re.findall(r'<td class="number">(\d+)</td>', page)]


def test_the_guesses_of_thirty_are_all_in_the_histogram(tmp_path):
    for number in range(SIZE):
        (tmp_path / f"{number:02}").mkdir()
        guess_of(tmp_path / f"{number:02}", number)
    its = of_class(sorted(tmp_path.iterdir()))["static steps"]
    assert len(its.guessed) == 27 and set(its.measured) == {MEASURED}  # two were blank, one page is damaged
    bins = histogram(its.guessed, MEASURED)
    assert sum(number for *_, number in bins) == 27 and all(number for *_, number in bins)
    assert [next(start for start, end, _ in bins if start <= MEASURED < end)] == [
        start for start, end, _ in bins if start <= MEASURED < end]


@pytest.mark.slow
def test_a_class_of_thirty_by_the_command(tmp_path, capsys):
    room, out = tmp_path / "class", tmp_path / "out"
    expected = learners_of(room)
    assert len(expected) == SIZE
    assert main(["grade", "--class", str(room), "--report", str(out), "--jobs", "2"]) == 0
    with (out / "report.csv").open(newline="", encoding="utf-8-sig") as file:
        rows = {row["learner"]: row[NAME] for row in csv.DictReader(file)}
    assert set(rows) == set(expected)
    wrong = {kind: (rows[kind], per_cent) for kind, (per_cent, _) in expected.items()
             if per_cent is not None and rows[kind] != per_cent}
    assert not wrong, wrong
    assert 0 < float(rows["off by one"]) < 100
    for kind, (_, line) in expected.items():
        page = Pages((out / "learners" / f"{kind}.html").read_text(encoding="utf-8"))
        assert page.open == [] and line in page.text, f"{kind}: {page.text}"
    guesses = (out / "guesses.html").read_text(encoding="utf-8")
    assert sum(numbers_in(guesses)) == 27 and guesses.count("<td>measured</td>") == 1
