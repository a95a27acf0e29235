"""How long the course takes, and what of it fits into half a day, a day and two days in a room.

A chapter's minutes stand here, an exercise's in its EXERCISE. Timetables, sums and what is left out are computed from
them; `make readme` writes them into the pages for people.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from minillm.course.grading.exercises import load_all

# Minutes of a chapter with its guesses and its runs, without its exercises. Estimates: a minute for 150 words of text
# or for 10 lines of code, and 15 for guessing, running and talking.
CHAPTERS = {
    "00_your_machine": 40,
    "01_decode_loop": 45,
    "02_static_batching": 45,
    "03_continuous_batching": 50,
    "04_paged_kv": 60,
    "05_quantized_kv": 50,
    "06_speculative": 50,
    "07_serving_metrics": 40,
    "08_capacity": 45,
    "09_latency_or_throughput": 45,
    "10_worked_example": 50,
    "11_diagnose": 40,
    "12_appendix_names": 25,
    "13_lab_live_server": 35,
    "14_beyond_the_articles": 55,
    "15_lab_your_own_server": 40,
}
# What a room takes first when time is short. Pages that are not named here come after these, in the course's order.
FIRST = (
    "01_decode_loop", "02_static_batching", "03_continuous_batching", "04_paged_kv", "02_kv_cache",
    "04_continuous_scheduler", "07_serving_metrics", "05_block_pool", "06_speculative", "07_paged_attention",
    "13_your_engine", "08_capacity", "00_your_machine", "05_quantized_kv", "11_diagnose", "09_latency_or_throughput",
    "10_latencies", "03_static_batch",
)
OPENING, CLOSING, BREAK, LUNCH = 10, 10, 15, 60
LONGEST = 100  # minutes without a break
MORNING = 150  # a break after this many minutes of a long day is lunch
LONG_DAY = 360
QUESTIONS = "questions, and what took longer"
RESERVE = 0.1  # of a day, for questions, for what takes longer, and in a long day for a break before them


@dataclass(frozen=True)
class Part:
    """A chapter, or an exercise that belongs after one. `place` sorts parts in the course's order."""

    name: str
    title: str  # "01 The decode loop", "exercise 2: Decode with a KV cache"
    minutes: int
    chapter: str  # its own name, for a chapter
    link: str  # from the repository's root
    place: tuple[str, int]

    @property
    def is_exercise(self) -> bool:
        return self.name != self.chapter


@dataclass(frozen=True)
class Row:
    """A line of a timetable: minutes from the day's start, and how many."""

    start: int
    minutes: int
    what: str | Part


# -- what there is -------------------------------------------------------------------------------------------------


def course(root: Path) -> list[Part]:
    """All chapters and exercises of the checkout at `root`, in order.

    Raises ValueError for a chapter whose minutes nobody has stated.
    """
    parts = []
    for page in sorted((root / "notebooks").glob("[0-9]*.ipynb")):
        if page.stem not in CHAPTERS:
            raise ValueError(f"notebooks/{page.name} has no minutes: add a line for {page.stem!r} to CHAPTERS in "
                             "minillm/course/timetable.py")
        parts.append(Part(page.stem, f"{page.stem[:2]} {title_of(page)}", CHAPTERS[page.stem], page.stem,
                          f"notebooks/{page.name}", (page.stem, 0)))
    for each in load_all():
        parts.append(Part(each.name, f"exercise {each.number}: {each.title}", each.minutes, each.chapter,
                          f"exercises/{each.name}.ipynb", (each.chapter, each.number)))
    return sorted(parts, key=lambda part: part.place)


def title_of(page: Path) -> str:
    """What follows the number in a notebook's first line: "# 1 · The decode loop"."""
    first = "".join(json.loads(page.read_text(encoding="utf-8"))["cells"][0]["source"]).splitlines()[0]
    return first.rpartition(" · ")[2].lstrip("# ")


def by_worth(parts: Iterable[Part]) -> list[Part]:
    """Parts in the order in which a room takes them."""
    def worth(part: Part) -> tuple:
        return (FIRST.index(part.name) if part.name in FIRST else len(FIRST), part.place)

    return sorted(parts, key=worth)


# -- what fits -----------------------------------------------------------------------------------------------------


def chosen(parts: list[Part], days: tuple[int, ...]) -> list[Part]:
    """The parts that fit into days of so many minutes, in the course's order; an exercise only with its chapter."""
    taken: list[Part] = []
    for part in by_worth(parts):
        with_it = sorted([*taken, part], key=lambda one: one.place)
        its_chapter = not part.is_exercise or any(one.name == part.chapter for one in taken)
        if its_chapter and lay_out(with_it, days) is not None:
            taken = with_it
    return taken


def lay_out(parts: list[Part], days: tuple[int, ...]) -> list[list[Row]] | None:
    """The rows of each day, with breaks, lunch and the reserve; None if the parts do not fit."""
    left, table = list(parts), []
    for number, length in enumerate(days):
        table.append(one_day(left, length, "opening, and the set-up" if number == 0 else "what was left open"))
        left = left[sum(isinstance(row.what, Part) for row in table[-1]):]
    return None if left else table


def one_day(parts: list[Part], length: int, opening: str) -> list[Row]:
    """A day of `length` minutes with the first of the parts, as many as fit."""
    rows = [Row(0, OPENING, opening)]
    worked = OPENING  # minutes since the last break
    last = length - CLOSING

    def clock() -> int:
        return rows[-1].start + rows[-1].minutes

    for part in parts:
        pause = pause_before(part.minutes, worked, clock(), rows, length)
        if clock() + (pause[0] if pause else 0) + part.minutes > last - RESERVE * length:
            break
        if pause:
            rows.append(Row(clock(), *pause))
            worked = 0
        rows.append(Row(clock(), part.minutes, part))
        worked += part.minutes
    if length >= LONG_DAY and (pause := pause_before(length - clock(), worked, clock(), rows, length)):
        rows.append(Row(clock(), *pause))
    rows.append(Row(clock(), last - clock(), QUESTIONS))
    rows.append(Row(clock(), CLOSING, "closing: each participant names the number that they will look at tomorrow"))
    return rows


def pause_before(minutes: int, worked: int, clock: int, rows: list[Row], length: int) -> tuple[int, str] | None:
    """The break that is due before so many more minutes, as (minutes, name); None if there need not be one."""
    if worked + minutes <= LONGEST:
        return None
    had_lunch = any(row.what == "lunch" for row in rows)
    return (LUNCH, "lunch") if length >= LONG_DAY and clock >= MORNING and not had_lunch else (BREAK, "break")


# -- in words ------------------------------------------------------------------------------------------------------


def timetable(root: Path, days: tuple[int, ...], up: str = "../../") -> str:
    """A table for each day as Markdown, then what they leave out; `up` leads from the page to the repository's root."""
    parts = course(root)
    taken = chosen(parts, days)
    tables = []
    for number, rows in enumerate(lay_out(taken, days), 1):
        head = f"| {f'day {number}' if days[1:] else 'time'} | minutes | what |\n|---|---|---|\n"
        lines = [f"| {in_hours(row.start)} | {row.minutes} | {what(row, up)} |" for row in rows]
        end = rows[-1].start + rows[-1].minutes
        tables.append(head + "\n".join([*lines, f"| {in_hours(end)} | | end |"]))
    return "\n\n".join([*tables, left_out([part for part in parts if part not in taken])])


def left_out(parts: list[Part]) -> str:
    """A sentence on what a timetable has no time for, and how long it takes afterwards."""
    pages = [part.title for part in parts if not part.is_exercise]
    exercises = sorted(part.place[1] for part in parts if part.is_exercise)
    kinds = {"pages": pages, "exercises": exercises}
    named = [f"{kind} {', '.join(map(str, names))}" for kind, names in kinds.items() if names]
    return f"Left out, {hours(parts)} for afterwards: {'; '.join(named)}." if named else "Nothing is left out."


def what(row: Row, up: str) -> str:
    """A row's name, as a link where it is a page or an exercise; `up` leads to the repository."""
    return f"[{row.what.title}]({up}{row.what.link})" if isinstance(row.what, Part) else row.what


def in_hours(minutes: int) -> str:
    """65 minutes as "1:05"."""
    return f"{minutes // 60}:{minutes % 60:02}"


def hours(parts: Iterable[Part]) -> str:
    """The parts' minutes together: "9 h 40 min", "18 h"."""
    total = sum(part.minutes for part in parts)
    return f"{total // 60} h" + f" {total % 60} min" * (total % 60 > 0)


def how_long(root: Path, link: str) -> str:
    """One paragraph on how long the course takes, alone and in a room; `link` leads to the timetables."""
    parts = course(root)
    pages, exercises = ([part for part in parts if part.is_exercise == kind] for kind in (False, True))
    rooms = [f"{name} {counted(chosen(parts, days))}" for name, days in ROOMS.items()]
    return (
        f"{len(pages)} pages of {span(pages)} minutes, {hours(pages)} together, and {len(exercises)} exercises of "
        f"{span(exercises)} minutes, {hours(exercises)}: alone about {hours(parts)}. In a room, by "
        f"[timetables]({link}) with breaks and time for questions: {', '.join(rooms)}. All minutes are estimates."
    )


def counted(parts: list[Part]) -> str:
    """How many pages and exercises these are, in words."""
    exercises = sum(part.is_exercise for part in parts)
    return f"for {len(parts) - exercises} pages and {exercises or 'no'} exercise{'s' * (exercises != 1)}"


def span(parts: list[Part]) -> str:
    """The shortest and the longest of them, in minutes: "10 to 25"."""
    return f"{min(part.minutes for part in parts)} to {max(part.minutes for part in parts)}"


ROOMS = {"half a day": (240,), "a day": (480,), "two days": (480, 480)}  # minutes of each day
