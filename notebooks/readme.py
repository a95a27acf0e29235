"""Write the measured blocks of README.md and CLAIMS.md, the timetables, and the ladder's picture.

`make readme`. A block stands between `<!-- NAME -->` and `<!-- end -->`; nothing in it is typed: it comes from the
committed measurements, or from the minutes of chapters and exercises.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from minillm.cli.bench import bench_table
from minillm.course.experiments.ladder import ladder_notes, ladder_table
from minillm.course.ledger import as_markdown, find_all
from minillm.course.show.plots import bars
from minillm.course.show.recorded import heading, on_gpu
from minillm.course.show.tables import text_table, with_range
from minillm.course.targets import COLUMNS as TARGET_COLUMNS
from minillm.course.targets import targets
from minillm.course.timetable import ROOMS, how_long, timetable
from minillm.measure.measurement import Measurement, measurement_path

ROOT = Path(__file__).resolve().parent.parent
MEASUREMENTS = ROOT / "notebooks" / "measurements"


def runs(experiment: str) -> list[Measurement]:
    """What was recorded of an experiment, a measurement for each device."""
    files = sorted(MEASUREMENTS.glob(f"*/{experiment}.json"))
    return [Measurement.load(file.parent.name, experiment, MEASUREMENTS) for file in files]


def tables(experiment: str, table: Callable[[Sequence[dict]], str], notes: Callable = lambda rows: None) -> str:
    """The experiment's table on each device, under a line that says where, when and by which commit; then notes."""
    found = runs(experiment)
    parts = [*(f"{heading(run)}\n{table(run.rows)}" for run in found), notes(found[0].rows)]
    return "```\n" + "\n\n".join(filter(None, parts)) + "\n```"


def servers_table(rows: Sequence[dict]) -> str:
    """Servers at each number of streams, as GuideLLM saw them."""
    ranged = ("tokens_per_s", "ttft_ms", "itl_ms")
    shown = [{**row, **{name: with_range(row, name) for name in ranged}} for row in rows]
    return text_table(shown, {"streams": "streams", "server": "server", "tokens_per_s": "tokens/s",
                              "ttft_ms": "TTFT p50, ms", "itl_ms": "ITL p50, ms", "minillm_times": "minillm is x"})


def gpus() -> str:
    """The GPUs on which something was recorded, or that there is none."""
    experiments = sorted({file.stem for file in MEASUREMENTS.glob("*/*.json")})
    found: dict[str, list[str]] = {}
    for run in (run for experiment in experiments for run in runs(experiment) if on_gpu(run)):
        found.setdefault(run.provenance.device, []).append(run.experiment)
    if not found:
        return "No GPU run is recorded yet."
    return "Recorded on GPUs: " + "; ".join(f"{device}: {', '.join(names)}" for device, names in found.items()) + "."


def ladder_pictures() -> str:
    """The pictures of `draw_ladder`."""
    places = [picture_of(run).relative_to(ROOT).as_posix() for run in runs("ladder")]
    return "\n\n".join(f"![Tokens per second by rung]({place})" for place in places)


def picture_of(run: Measurement) -> Path:
    """Where a run's picture is, beside its file."""
    return measurement_path(run.provenance.device, run.experiment, MEASUREMENTS).with_suffix(".png")


BLOCKS = {
    "ladder": lambda: tables("ladder", ladder_table, ladder_notes),
    "ladder_pictures": ladder_pictures,
    "bench_peers": lambda: tables("bench_peers", bench_table),
    "servers": lambda: tables("servers", servers_table),
    "gpu": gpus,
    "claims": lambda: as_markdown(find_all(MEASUREMENTS)),
    "course_time": lambda: how_long(ROOT, "notebooks/room/INSTRUCTOR.md"),
    "pages_time": lambda: how_long(ROOT, "room/INSTRUCTOR.md"),
    "targets": lambda: f"```\n{text_table(targets(MEASUREMENTS), TARGET_COLUMNS)}\n```",
    **{name.replace(" ", "_"): partial(timetable, ROOT, days) for name, days in ROOMS.items()},
}
PAGES = {
    ROOT / "README.md": ("ladder", "ladder_pictures", "bench_peers", "servers", "gpu", "course_time"),
    ROOT / "notebooks" / "CLAIMS.md": ("claims",),
    ROOT / "notebooks" / "README.md": ("pages_time", "targets"),
    ROOT / "notebooks" / "room" / "INSTRUCTOR.md": tuple(name.replace(" ", "_") for name in ROOMS),
}


def with_blocks(text: str) -> str:
    """A page with each of its blocks made anew."""

    def block(match: re.Match) -> str:
        return f"<!-- {match[1]} -->\n{BLOCKS[match[1]]()}\n<!-- end -->"

    return re.sub(r"<!-- (\w+) -->\n.*?<!-- end -->", block, text, flags=re.DOTALL)


def draw_ladder() -> None:
    """A picture of each recorded ladder, beside its file: the rungs that all serve the same requests."""
    for run in runs("ladder"):
        rows = [{**row, "label": f"{row['rung']}\n{row['name']}"} for row in run.rows if not row["alone"]]
        best = max(rows, key=lambda row: row["tokens_per_s"])
        gain = best["tokens_per_s"] / rows[0]["tokens_per_s"]
        title = f"From recomputing to {best['name']}: {gain:.0f} times the tokens ({run.provenance.label})"
        figure = bars(rows, "label", {"tokens_per_s": "tokens per second"}, title, "output tokens per second")
        figure.savefig(picture_of(run), dpi=110, bbox_inches="tight")


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(with_blocks(page.read_text(encoding="utf-8")), encoding="utf-8")
    draw_ladder()
