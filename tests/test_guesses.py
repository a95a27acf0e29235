"""Guesses: kept, set beside the measurement, silent where there is none."""

from __future__ import annotations

import numpy as np
import pytest

from minillm.course.show import guesses as page
from minillm.course.show.guesses import guess, guesses, reveal


@pytest.fixture(autouse=True)
def _fresh_page(monkeypatch):
    monkeypatch.setattr(page, "made", {})


def test_a_guess_is_set_beside_the_measurement_with_the_factor_between_them(capsys):
    guess("static steps", 54)
    assert capsys.readouterr().out == ""
    reveal("static steps", 81)
    assert capsys.readouterr().out == "static steps: your guess 54, measured 81, 1.5 times the guess\n"


def test_what_was_not_guessed_stays_silent(capsys):
    guess("static steps", None)
    reveal("static steps", 81)
    reveal("another thing", 1)
    guesses()
    assert capsys.readouterr().out == ""


def test_a_guess_that_is_taken_back_is_gone():
    guess("static steps", 54)
    guess("static steps", None)
    assert page.made == {}


def test_the_list_at_the_end_begins_with_the_nearest(capsys):
    for about, value, measured in (("far", 10, 1000), ("zero", 0, 3), ("half", 10, 5), ("near", 100, 104)):
        guess(about, value)
        reveal(about, measured)
    guess("never measured", 7)
    capsys.readouterr()
    guesses()
    lines = capsys.readouterr().out.splitlines()[2:]
    assert [line.split()[0] for line in lines] == ["near", "half", "far", "zero"]
    assert lines[-1].split()[-1] == "-"  # no factor leads from 0 to 3


def test_a_near_guess_is_said_to_be_near(capsys):
    guess("ratio", np.float64(2.0))
    reveal("ratio", 2.1)
    assert "(near)" in capsys.readouterr().out


@pytest.mark.parametrize("value", ["54", float("nan"), float("inf"), [3], np.array([1.0, 2.0])])
def test_what_is_no_number_is_refused_by_name(value):
    with pytest.raises(ValueError, match="static steps"):
        guess("static steps", value)
