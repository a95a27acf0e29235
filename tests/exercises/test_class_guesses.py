"""The guesses of a class are read from the learners' notebooks, without running a cell."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_grader import hand_in, solution

from minillm.cli import main
from minillm.course.grading.class_guesses import calls, histogram, of_class
from minillm.course.show import guesses as page


def chapter(path: Path, *sources: str, printed: str = "") -> None:
    """A notebook of code cells, each with what it printed."""
    outputs = [{"output_type": "stream", "name": "stdout", "text": printed.splitlines(keepends=True)}]
    cells = [{"cell_type": "code", "source": source, "metadata": {}, "outputs": outputs} for source in sources]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"cells": cells, "metadata": {}, "nbformat": 4}), encoding="utf-8")


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ('guess("steps", 54)', [("steps", 54)]), ('guess("steps", -1.5e3)', [("steps", -1500)]),
        ('guess(about="steps", value=54)', [("steps", 54)]), ('show.guess("steps", 54)', [("steps", 54)]),
        ('%time\nguess("steps", 54)', [("steps", 54)]), ('guess("a", 1)\nguess("b", 2)', [("a", 1), ("b", 2)]),
        ('guess("steps", None)', []), ('guess("steps", len(rows))', []), ('guess("steps", "54")', []),
        ('guess("steps", 1e999)', []), ('guess(name, 54)', []), ("guess()", []), ("guess(", []), ("# guess()", []),
    ],
)
def test_a_guess_is_a_call_with_a_number_written_out(source, found):
    assert list(calls(source)) == found


def test_a_class_is_collected_by_what_it_guessed_about(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(page, "made", {})
    page.guess("static steps", 54)
    page.reveal("static steps", 1081)
    printed = capsys.readouterr().out  # as the page prints it, with its separators
    chapter(tmp_path / "ann" / "02.ipynb", 'guess("static steps", 54)', printed=printed)
    chapter(tmp_path / "bob" / "deep" / "02.ipynb", 'guess("static steps", 10)\nguess("static steps", 2000)')
    chapter(tmp_path / "cleo" / "02.ipynb", "raise SystemExit", 'guess("static steps", None)')
    (tmp_path / "cleo" / "03.ipynb").write_text("[[[")
    found = of_class(sorted(tmp_path.iterdir()))
    assert list(found) == ["static steps"]
    assert found["static steps"].guessed == [54, 2000] and found["static steps"].measured == [1081]


@pytest.mark.parametrize(
    ("values", "also", "bins"),
    [([5.0], None, 1), ([5.0, 5.0], 5.0, 1), ([1.0, 2.0, 9.0], None, 8), ([1.0, 1000.0], 30.0, 8), ([-4.0, 4.0], 0, 8)],
)
def test_every_guess_is_in_one_bin(values, also, bins):
    rows = histogram(values, also)
    assert len(rows) == bins and sum(number for _, _, number in rows) == len(values)
    assert rows[0][0] == min([*values, *([] if also is None else [also])])


def test_the_report_has_a_page_of_guesses_where_there_are_any(tmp_path, capsys):
    room, out = tmp_path / "class", tmp_path / "out"
    for name, value in (("ann", 50), ("bob", 70)):
        (room / name).mkdir(parents=True)
        hand_in(room / name, solution())
        chapter(room / name / "02_static_batching.ipynb", f'guess("<steps>", {value})',
                printed=f"<steps>: your guess {value}, measured 60, {60 / value:.3g} times the guess\n")
    arguments = ["grade", "--class", str(room), "--report", str(out), "--jobs", "1"]
    assert main(arguments) == 0
    text = (out / "guesses.html").read_text(encoding="utf-8")
    assert "<h2>&lt;steps&gt;</h2>" in text and "2 guesses, the middle one 60; measured: 60" in text
    assert text.count("<td>measured</td>") == 1
    assert 'href="guesses.html"' in (out / "index.html").read_text(encoding="utf-8")
    for name in ("ann", "bob"):
        (room / name / "02_static_batching.ipynb").unlink()
    assert main(arguments) == 0
    assert not (out / "guesses.html").exists()
    assert "guesses.html" not in (out / "index.html").read_text(encoding="utf-8")
