"""Write the README's measured tables and its picture from the committed measurements (`make readme`)."""

from __future__ import annotations

import re
from pathlib import Path

from minillm.cli.measuring import BENCH_COLUMNS
from minillm.cli.running import LADDER_COLUMNS
from minillm.course.ledger import as_markdown, find_all
from minillm.course.show.plots import bars
from minillm.course.show.recorded import recorded
from minillm.measure.measurement import Measurement

ROOT = Path(__file__).resolve().parent.parent
MEASUREMENTS = ROOT / "notebooks" / "measurements"
TABLES = {"ladder": LADDER_COLUMNS, "bench_peers": BENCH_COLUMNS}
CLAIMS = "claims"  # the block that holds the ledger


def with_tables(text: str) -> str:
    """The README with each block between `<!-- NAME -->` and `<!-- end -->` made anew."""

    def block(match: re.Match) -> str:
        name = match[1]
        if name == CLAIMS:
            content = as_markdown(find_all(MEASUREMENTS))
        else:
            content = f"```\n{recorded(name, TABLES[name], MEASUREMENTS)}\n```"
        return f"<!-- {name} -->\n{content}\n<!-- end -->"

    return re.sub(r"<!-- (\w+) -->\n.*?<!-- end -->", block, text, flags=re.DOTALL)


def draw_ladder() -> None:
    """A picture of each recorded ladder, beside its file."""
    for file in MEASUREMENTS.glob("*/ladder.json"):
        run = Measurement.load(file.parent.name, "ladder", MEASUREMENTS)
        rows = [{**row, "label": f"{row['rung']}\n{row['name']}"} for row in run.rows]
        best = max(rows, key=lambda row: row["tokens_per_s"])
        gain = best["tokens_per_s"] / rows[0]["tokens_per_s"]
        title = f"From recomputing to {best['name']}: {gain:.0f} times the tokens ({run.provenance.device})"
        figure = bars(rows, "label", {"tokens_per_s": "tokens per second"}, title, "output tokens per second")
        figure.savefig(file.with_suffix(".png"), dpi=110, bbox_inches="tight")


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(with_tables(readme.read_text()))
    draw_ladder()
