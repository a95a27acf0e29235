"""`grade`: exercises checked, of one learner or of a class."""

from __future__ import annotations

import os
from pathlib import Path

from minillm.cli.common import add_json, bar, write_json


def add_grade(commands) -> None:
    """The parser of `minillm grade`."""
    parser = commands.add_parser("grade", help="check exercise notebooks, of one learner or of a class")
    parser.add_argument("path", nargs="?", type=Path, metavar="PATH", help="a notebook, or a folder of notebooks")
    parser.add_argument("--class", dest="classroom", type=Path, metavar="DIR", help="a folder with one per learner")
    parser.add_argument("--report", type=Path, metavar="OUT", help="folder for the class's CSV, JSON and HTML")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="notebooks at a time (default: one a core)")
    add_json(parser)
    parser.set_defaults(run=_grade)


def _grade(arguments) -> int:
    """Status 0 if every check passes, 1 if one does not; a class's report is 0 whatever its marks are."""
    if (arguments.path is None) == (arguments.classroom is None):
        raise ValueError("give either PATH, for one learner's notebooks, or --class DIR")
    if (arguments.report is None) != (arguments.classroom is None):
        raise ValueError("--class DIR and --report OUT belong together")
    return _grade_path(arguments) if arguments.classroom is None else _grade_class(arguments)


def _grade_path(arguments) -> int:
    from minillm.course.grading import classroom, report
    from minillm.course.show.tables import text_table

    learner = classroom.find_notebooks(arguments.path)
    if not learner.notebooks:
        why = "; ".join(learner.notes) or "there is no notebook in it"
        raise ValueError(f"{arguments.path} holds no exercise: {why}")
    classroom.grade_class([learner], arguments.jobs, bar)
    print(text_table(report.rows(learner), report.COLUMNS))
    for line in report.lines(learner):
        print(line)
    print(f"{learner.points} of {learner.out_of} checks pass")
    write_json(arguments.json, report.to_json([learner]))
    return 0 if learner.points == learner.out_of else 1


def _grade_class(arguments) -> int:
    from minillm.course.grading import classroom, report

    learners = classroom.find_learners(arguments.classroom, arguments.report)
    classroom.grade_class(learners, arguments.jobs, bar, kept=arguments.report / "marks")
    for learner in learners:
        print(f"{learner.name}: {learner.points} of {learner.out_of}")
    print(f"report: {report.write(learners, arguments.report)}")
    write_json(arguments.json, report.to_json(learners))
    return 0
