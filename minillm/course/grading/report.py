"""Marks as a table, as CSV and JSON, and as one HTML page for the class and one for each learner."""

from __future__ import annotations

import csv
import hashlib
import html
import json
import os
import urllib.parse
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from minillm.course.grading.checks import Outcome
from minillm.course.grading.class_guesses import Guesses, sections
from minillm.course.grading.classroom import Learner
from minillm.course.grading.exercises import find, load_all
from minillm.course.grading.tasks import Exercise
from minillm.course.grading.text import printable

MARK = {True: ("ok", "passes"), False: ("no", "fails"), None: ("wait", "waits for the first check")}
MAX_NAME = 200  # bytes; file systems allow 255
COLUMNS = {"exercise": "exercise", "points": "points", "out_of": "of", "percent": "%"}
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; color: #1a1a1a; }
table { border-collapse: collapse; margin: 1rem 0; }
th, td { padding: .3rem .6rem; border-bottom: 1px solid #ddd; text-align: left; vertical-align: top; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
td.ok { background: #dff3e3; } td.no { background: #fbe0dc; } td.wait { background: #eee; color: #555; }
td.some { background: #fff3cf; }
pre { white-space: pre-wrap; background: #f6f6f6; padding: .6rem; margin: .3rem 0; font-size: .85rem; }
a { color: #0b57a4; }
"""


def score(learner: Learner) -> str:
    """How many checks pass, and where exercises are as they were handed out, how many of the others'."""
    begun = [marks for marks in learner.marks.values() if marks.begun]
    points, out_of = sum(marks.points for marks in begun), sum(marks.out_of for marks in begun)
    whole = f"{learner.points} of {learner.out_of} checks pass"
    if len(begun) in (0, len(learner.marks)):
        return whole
    return f"{whole}; of the exercises begun ({len(begun)}): {points} of {out_of}, {percent(points, out_of):.0f} %"


def percent(points: int, out_of: int) -> float:
    """Points as per cent of what could be had; 0 of nothing."""
    return 100 * points / out_of if out_of else 0.0


def rows(learner: Learner) -> list[dict]:
    """A learner's marks as rows of COLUMNS."""
    return [
        {"exercise": name, "points": marks.points, "out_of": marks.out_of,
         "percent": round(percent(marks.points, marks.out_of))}
        for name, marks in sorted(learner.marks.items())
    ]


def lines(learner: Learner) -> list[str]:
    """What went wrong, a line each: files, notebooks, and the first check of each task that fails."""
    said = list(learner.notes)
    for name, marks in sorted(learner.marks.items()):
        said += [f"{name}: {note}" for note in marks.notes]
        for task, outcomes in marks.outcomes.items():
            if first := next((outcome for outcome in outcomes if outcome.passed is False), None):
                said.append(f"{name}, {task}: {first.check}\n    {first.message}")
    return said


def to_json(learners: Sequence[Learner]) -> dict:
    """Everything, for other programs."""
    return {
        "learners": [
            {
                "name": learner.name, "points": learner.points, "out_of": learner.out_of, "notes": learner.notes,
                "exercises": [marks.to_json() for _, marks in sorted(learner.marks.items())],
            }
            for learner in learners
        ]
    }


def write(learners: Sequence[Learner], folder: Path, guessed: Mapping[str, Guesses] | None = None) -> Path:
    """report.csv, report.json, index.html and learners/NAME.html in `folder`; returns the index.

    guessed: what the class guessed, by what it is about; guesses.html if there is anything.
    """
    (folder / "learners").mkdir(parents=True, exist_ok=True)
    write_csv(learners, folder / "report.csv")
    (folder / "report.json").write_text(json.dumps(to_json(learners), indent=1) + "\n", encoding="utf-8")
    for learner in learners:
        (folder / "learners" / page_name(learner)).write_text(learner_page(learner), encoding="utf-8")
    (folder / "index.html").write_text(class_page(learners, bool(guessed)), encoding="utf-8")
    (folder / "guesses.html").unlink(missing_ok=True)  # of an earlier run
    if guessed:
        text = page("What the class guessed, and what was measured", *sections(guessed))
        (folder / "guesses.html").write_text(text, encoding="utf-8")
    return folder / "index.html"


def page_name(learner: Learner) -> str:
    """The file of a learner's page: the folder's name, shortened where a longer one is not allowed."""
    name = os.fsencode(learner.name)
    short = f"{learner.name[:40]}-{hashlib.sha256(name).hexdigest()[:12]}"
    return f"{learner.name if len(name) <= MAX_NAME else short}.html"


def write_csv(learners: Sequence[Learner], path: Path) -> None:
    """A row per learner: percent of each exercise, and of all points. Its first bytes say UTF-8 to a spreadsheet."""
    names = [exercise.name for exercise in graded(learners)]
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.writer(file)
        writer.writerow(["learner", *names, "total"])
        for learner in learners:
            # a spreadsheet takes a cell that begins with one of these for a formula
            name = f"'{learner.name}" if learner.name.startswith(("=", "+", "-", "@", "\t")) else learner.name
            each = [f"{percent(learner.marks[n].points, learner.marks[n].out_of):.0f}" for n in names]
            writer.writerow([printable(name), *each, f"{percent(learner.points, learner.out_of):.0f}"])


def graded(learners: Sequence[Learner]) -> list[Exercise]:
    """The exercises that somebody has marks for."""
    return [exercise for exercise in load_all() if any(exercise.name in learner.marks for learner in learners)]


# -- pages ----------------------------------------------------------------------------------------


def page(title: str, *parts: str) -> str:
    """A whole HTML page of these parts."""
    title = html.escape(title)
    return printable(
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{STYLE}</style></head>\n<body><h1>{title}</h1>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def table(head: Sequence[str], body: Sequence[str]) -> str:
    """An HTML table of titles and finished rows."""
    titles = "".join(f'<th scope="col">{html.escape(title)}</th>' for title in head)
    return f"<table><thead><tr>{titles}</tr></thead><tbody>\n" + "\n".join(body) + "\n</tbody></table>"


def score_cell(points: int, out_of: int, link: str = "") -> str:
    """A table's cell with the per cent, coloured by all, some or none."""
    share = percent(points, out_of)
    kind = "ok" if share == 100 else "no" if share == 0 else "some"
    text = f"{share:.0f}"
    return f'<td class="number {kind}">{f"<a href={link!r}>{text}</a>" if link else text}</td>'


def class_page(learners: Sequence[Learner], guesses: bool = False) -> str:
    """Who has what, in per cent, and which checks most learners fail; with a link to the page of guesses."""
    exercises = graded(learners)
    body = []
    for learner in learners:
        link = f"learners/{urllib.parse.quote(os.fsencode(page_name(learner)))}"
        cells = [f'<th scope="row"><a href="{link}">{html.escape(learner.name)}</a></th>']
        for exercise in exercises:
            marks = learner.marks[exercise.name]
            cells.append(score_cell(marks.points, marks.out_of, f"{link}#{exercise.name}"))
        cells.append(score_cell(learner.points, learner.out_of))
        body.append(f"<tr>{''.join(cells)}</tr>")
    head = ["learner", *(f"{e.number} {e.title}" for e in exercises), "total"]
    return page(f"{len(learners)} learners, per cent of the checks passed", table(head, body),
                *(['<p><a href="guesses.html">What the class guessed</a></p>'] if guesses else []), stuck(learners))


def stuck(learners: Sequence[Learner], most: int = 15) -> str:
    """The checks that most of those who answered fail first: what to talk about next time. Then what was not answered.

    A learner without the notebook counts in neither table.
    """
    answered, failing, unanswered, handed_in = Counter(), Counter(), Counter(), Counter()
    for learner in learners:
        for name in learner.marks.keys() & learner.notebooks.keys():
            for task, outcomes in learner.marks[name].outcomes.items():
                first = next((outcome for outcome in outcomes if outcome.passed is False), None)
                tried = all(outcome.answered for outcome in outcomes)
                handed_in[name, task] += 1
                (answered if tried else unanswered)[name, task] += 1
                if first and tried:
                    failing[name, task, first.check] += 1
    worst = sorted(failing.items(), key=lambda item: (-item[1], item[0]))[:most]
    left = sorted(unanswered.items(), key=lambda item: (-item[1], item[0]))[:most]
    return (
        "<h2>Where the class is stuck</h2>"
        + table(["of those who answered", "exercise", "task", "first check to fail"],
                [counted(number, answered[key[:2]], key) for key, number in worst])
        + "<h2>Not answered</h2>"
        + table(["of those who handed it in", "exercise", "task"],
                [counted(number, handed_in[key], key) for key, number in left])
    )


def counted(number: int, of: int, key: Sequence[str]) -> str:
    """A table's row: how many of how many, and of what."""
    parts = "".join(f"<td>{html.escape(part)}</td>" for part in key)
    return f'<tr><td class="number">{number} of {of}</td>{parts}</tr>'


def learner_page(learner: Learner) -> str:
    """Every check of every exercise; what fails is explained."""
    parts = [f"<p>{percent(learner.points, learner.out_of):.0f} % of the checks pass.</p>", notes(learner.notes)]
    for name, marks in sorted(learner.marks.items()):
        exercise = find(name)
        parts.append(f'<h2 id="{name}">{exercise.number} · {html.escape(exercise.title)}: '
                     f"{marks.points} of {marks.out_of}</h2>")
        parts.append(notes(marks.notes))
        body = [outcome_row(task, outcome) for task, outcomes in marks.outcomes.items() for outcome in outcomes]
        parts.append(table(["task", "check", "", ""], body))
    return page(learner.name, *parts)


def outcome_row(task: str, outcome: Outcome) -> str:
    """A table's row for one check: what it asks, how it went, and why."""
    kind, said = MARK[outcome.passed]
    why = html.escape(outcome.message) if outcome.passed is False else ""
    detail = f"<pre>{html.escape(outcome.detail)}</pre>" if outcome.detail else ""
    return (f'<tr><td>{html.escape(task)}</td><td>{html.escape(outcome.check)}</td><td class="{kind}">{said}</td>'
            f"<td>{why}{detail}</td></tr>")


def notes(lines: Sequence[str]) -> str:
    """Remarks as an HTML list; nothing where there are none."""
    return "<ul>" + "".join(f"<li>{html.escape(line)}</li>" for line in lines) + "</ul>" if lines else ""
