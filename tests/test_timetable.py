"""The room's timetables add up, whatever the minutes are, and say what they leave out."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import nbformat
import pytest

from minillm.course import timetable
from minillm.course.timetable import BREAK, LONGEST, LUNCH, QUESTIONS, ROOMS, Part, chosen, course, lay_out

ROOT = Path(__file__).resolve().parent.parent
PARTS = course(ROOT)
rooms = pytest.mark.parametrize("days", ROOMS.values(), ids=ROOMS)


def faults(parts: list[Part], days: tuple[int, ...]) -> list[str]:
    """What is wrong with the timetable that is computed for the parts; an empty list for a good one."""
    taken = chosen(parts, days)
    table, found = lay_out(taken, days), []
    shown = [row.what for day in table for row in day if isinstance(row.what, Part)]
    if shown != taken or [part for part in parts if part in taken] != taken:
        found.append("not the chosen parts, once each, in the course's order")
    found += [f"{part.title} comes without its chapter" for part in shown
              if part.chapter not in [one.name for one in shown[: shown.index(part) + 1]]]
    for day, length in zip(table, days, strict=True):
        if sum(row.minutes for row in day) != length or day[0].start != 0:
            found.append("a day's rows do not add up to the day")
        if any(one.start + one.minutes != after.start for one, after in pairwise(day)):
            found.append("a row does not begin where the one before it ends")
        if next(row.minutes for row in day if row.what == QUESTIONS) < length / 20:
            found.append("hardly any time is left for questions")
        breaks = [row for row in day if row.what in ("break", "lunch")]
        if any(row.minutes != (LUNCH if row.what == "lunch" else BREAK) for row in breaks):
            found.append("a break has another length")
        starts = [0, *(row.start + row.minutes for row in breaks)]
        last = next(row.start for row in day if row.what == QUESTIONS)
        ends = [*(row.start for row in breaks), last]
        if any(end - start > LONGEST for start, end in zip(starts, ends, strict=True)):
            found.append("too long without a break")
        if length > 400 and [row.what for row in breaks].count("lunch") != 1:
            found.append("a long day without its lunch")
    return found


@rooms
def test_it_adds_up(days):
    assert not faults(PARTS, days)


@rooms
@pytest.mark.parametrize("factor", [0.7, 1.4])
def test_it_adds_up_when_everything_takes_longer_or_shorter(days, factor):
    parts = [replace(part, minutes=round(part.minutes * factor)) for part in PARTS]
    assert not faults(parts, days)
    assert (len(chosen(parts, days)) > len(chosen(PARTS, days))) == (factor < 1)


@rooms
def test_it_says_what_is_left_out(days):
    text, taken = timetable.timetable(ROOT, days), chosen(PARTS, days)
    left = text.rpartition("Left out")[2]
    numbers = re.findall(r"\d+", left.partition("exercises ")[2])
    for part in PARTS:
        named = str(part.place[1]) in numbers if part.is_exercise else part.title in left
        assert named == (part not in taken), part.title
        assert (f"../../{part.link}" in text) == (part in taken)
    assert left.startswith(f", {timetable.hours([part for part in PARTS if part not in taken])} ")


def test_more_time_takes_more_and_all_the_time_takes_all():
    counts = [len(chosen(PARTS, days)) for days in ROOMS.values()]
    assert counts == sorted(set(counts))
    assert chosen(PARTS, (480,) * 6) == PARTS
    assert timetable.timetable(ROOT, (480,) * 6).endswith("Nothing is left out.")


def test_what_does_not_fit_is_not_laid_out():
    assert lay_out(PARTS, (480,)) is None and lay_out([replace(PARTS[0], minutes=240)], (240,)) is None
    assert lay_out([PARTS[0]], (240,)) is not None


def test_the_sums_of_the_paragraph_add_up():
    text = timetable.how_long(ROOT, "x")
    pages, exercises, alone = (60 * int(h) + int(m or 0) for h, m in re.findall(r"(\d+) h(?: (\d+) min)?\b", text))
    assert alone == pages + exercises == sum(part.minutes for part in PARTS)


def test_a_chapter_without_minutes_is_named(tmp_path):
    (tmp_path / "notebooks").mkdir()
    page = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("# 0 · A title\n\nText.")])
    nbformat.write(page, tmp_path / "notebooks/00_your_machine.ipynb")
    assert course(tmp_path)[0].title == "00 A title"
    nbformat.write(page, tmp_path / "notebooks/77_new.ipynb")
    with pytest.raises(ValueError, match=r"77_new.ipynb has no minutes: add a line for '77_new' to CHAPTERS"):
        course(tmp_path)
