"""`ladder`, `measure`, `claims`, `overhead`, `grade` and `exercises`: their parsers. `course/commands.py` runs them."""

from __future__ import annotations

import os
from pathlib import Path

from minillm.cli.common import add_json, add_model, add_outputs, in_course

EXPERIMENT_COLUMNS = {"name": "experiment", "seconds": "--quick takes s", "claims": "claims", "about": "what it shows"}


def add_ladder(commands) -> None:
    """The parser of `minillm ladder`."""
    parser = commands.add_parser("ladder", help="run every rung on the same chat requests and print the table")
    add_model(parser)
    parser.add_argument("--requests", type=int, help="chat requests, all at the start")
    parser.add_argument("--max-tokens", type=int, help="cap on each answer; on average they are a sixth of it")
    parser.add_argument("--kv-memory", type=int, metavar="BYTES", help="of rungs 2 to 5 (default: six longest slots)")
    add_outputs(parser)
    parser.set_defaults(run=in_course("ladder"))


def add_measure(commands) -> None:
    """The parser of `minillm measure`."""
    parser = commands.add_parser("measure", help="run experiments; each result is written as soon as it is there")
    parser.add_argument("names", nargs="*", metavar="NAME", help="experiments; all of them if none is named")
    parser.add_argument("--all", action="store_true", help="all of them, those without a model first")
    parser.add_argument("--list", action="store_true", help="name them, with what each shows, and stop")
    parser.add_argument("--quick", action="store_true", help="small sizes: all of them in minutes, some too "
                        "small for a verdict")
    add_model(parser)
    parser.add_argument("--device", default="auto", help="as in load_model: auto, cpu, cuda (default: auto)")
    parser.add_argument("--budget-s", type=float, metavar="S", help="for each: later rows or turns are left out")
    parser.add_argument("--resume", action="store_true",
                        help="leave out what this commit has recorded already, unless it was cut at a smaller budget")
    add_outputs(parser)
    parser.add_argument("--out", metavar="DIR", help="where to write (default: measurements/ in this folder)")
    parser.set_defaults(run=_measure)


def _measure(arguments) -> int:
    return _list_experiments() if arguments.list else in_course("measure")(arguments)


def _list_experiments() -> int:
    """Here, where nothing has imported PyTorch."""
    from minillm.course.catalogue import EXPERIMENTS
    from minillm.course.show.tables import text_table

    rows = [{"name": e.name, "seconds": e.seconds, "claims": " ".join(e.claims), "about": e.about}
            for e in EXPERIMENTS.values()]
    print(text_table(rows, EXPERIMENT_COLUMNS))
    return 0


def add_claims(commands) -> None:
    """The parser of `minillm claims`."""
    parser = commands.add_parser("claims", help="what articles say of serving, and what was measured of it")
    parser.add_argument("ids", nargs="*", metavar="ID", help="claims, such as A1; all of them if none is named")
    parser.add_argument("--root", metavar="DIR",
                        help="a folder of measurements (default: measurements/ in this folder, and the checkout's)")
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--audit", action="store_true",
                       help="claimed and measured figure, direction, size, cause, device, file and commit of each")
    shown.add_argument("--markdown", action="store_true", help="as the table of notebooks/CLAIMS.md")
    add_json(parser)
    parser.set_defaults(run=in_course("claims"))


def add_overhead(commands) -> None:
    """The parser of `minillm overhead`."""
    parser = commands.add_parser("overhead", help="the engine's own time and memory, without a model")
    add_outputs(parser)
    parser.set_defaults(run=in_course("engine_overhead"))


def add_grade(commands) -> None:
    """The parser of `minillm grade`."""
    parser = commands.add_parser("grade", help="check exercise notebooks, of one learner or of a class")
    parser.add_argument("path", nargs="?", type=Path, metavar="PATH", help="a notebook, or a folder of notebooks")
    parser.add_argument("--class", dest="classroom", type=Path, metavar="DIR", help="a folder with one per learner")
    parser.add_argument("--report", type=Path, metavar="OUT", help="folder for the class's CSV, JSON and HTML")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="notebooks at a time (default: one a core)")
    add_json(parser)
    parser.set_defaults(run=in_course("grade"))


def add_exercises(commands) -> None:
    """The parser of `minillm exercises`."""
    parser = commands.add_parser("exercises", help="copy the exercises into a folder of your own, to solve them there")
    parser.add_argument("folder", type=Path, metavar="DIR", help="made if it is not there")
    parser.add_argument("--force", action="store_true", help="overwrite exercises that are there, with what is in them")
    parser.set_defaults(run=in_course("exercises"))
