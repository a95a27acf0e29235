"""A learner's own copy of the exercises: what is written there never clashes with a newer version of the course."""

from __future__ import annotations

import json
import os
import sys
import urllib.parse
from pathlib import Path

from minillm.course.grading.checks import PACKAGE
from minillm.course.grading.exercises import load_all
from minillm.course.grading.notebook import FOLDED

CHAPTERS = "](../notebooks/"  # a link to the course, as an exercise has it


def find_exercises() -> Path:
    """The folder of exercises: of the checkout, or beside the environment that a room kit has made.

    Raises FileNotFoundError where there is none, as after an installation of the package alone.
    """
    for root in (Path(PACKAGE).parent, Path(sys.prefix).parent, Path.cwd()):
        if (root / "exercises" / f"{load_all()[0].name}.ipynb").is_file():
            return root / "exercises"
    raise FileNotFoundError("the exercises are not here: call this in a clone of the course, or in its room kit")


def copy_exercises(folder: Path, force: bool = False) -> list[Path]:
    """Copy every exercise into `folder`, without solutions, its links to the chapters mended; the copies.

    Raises FileExistsError, before anything is written, if one of them is there already and not `force`.
    """
    source = find_exercises()
    files = {folder / f"{exercise.name}.ipynb": source / f"{exercise.name}.ipynb" for exercise in load_all()}
    if folder.resolve() == source.resolve():
        raise FileExistsError(f"{folder} is where the exercises come from: name another folder")
    there = [str(path) for path in files if os.path.lexists(path)]
    if there and not force:
        more = f", and {len(there) - 1} more" if there[1:] else ""
        raise FileExistsError(f"{there[0]}{more}: there already, perhaps with your work in it. Name another folder; "
                              "--force overwrites what is there")
    folder.mkdir(parents=True, exist_ok=True)
    for path, original in files.items():
        text = without_solutions(original.read_text(encoding="utf-8"))
        path.write_text(text.replace(CHAPTERS, chapters(source, folder)), encoding="utf-8")
    return list(files)


def without_solutions(text: str) -> str:
    """A notebook's text without the cells that hold solutions, folded."""
    content = json.loads(text)
    content["cells"] = [cell for cell in content["cells"] if FOLDED not in cell["metadata"].get("tags", ())]
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def chapters(source: Path, folder: Path) -> str:
    """The beginning of a link from a copy to the course's chapters."""
    try:
        way = os.path.relpath(source.parent.resolve() / "notebooks", folder.resolve())
    except ValueError:  # on another drive, where no such link leads
        return CHAPTERS
    return f"]({urllib.parse.quote(Path(way).as_posix())}/"
