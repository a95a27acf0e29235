"""The committed measurements of an experiment, as text to stand beside what was measured just now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from minillm.measure.claims import LEDGER
from minillm.measure.measurement import MEASUREMENTS, Measurement
from minillm.show.tables import filled, text_table


def recorded(experiment: str, columns: Mapping[str, str], root: Path = MEASUREMENTS, **wanted) -> str:
    """A table for each device on which `experiment` was recorded; a line that says so where no GPU was among them.

    wanted: values that a row must have to be shown, by column.
    """
    runs = [
        Measurement.load(file.parent.name, experiment, root) for file in sorted(Path(root).glob(f"*/{experiment}.json"))
    ]
    shown = [[row for row in run.rows if all(row.get(name) == value for name, value in wanted.items())] for run in runs]
    tables = [text_table(rows, filled(rows, columns)) for rows in shown]
    parts = [f"{heading(run)}\n{table}" for run, table in zip(runs, tables, strict=True)]
    if not any(on_gpu(run) for run in runs):
        parts.append(f"No GPU run of {experiment!r} is recorded yet, so none is shown.")
    return "\n\n".join(parts)


def heading(run: Measurement) -> str:
    """Where and when a measurement was made."""
    p = run.provenance
    return f"{p.device}, {p.model} in {p.dtype}, torch {p.torch}, {p.date[:10]}, commit {p.commit[:10]}"


def on_gpu(run: Measurement) -> bool:
    return "CUDA" in run.provenance.driver


def verdict_here(claim_id: str, rows: Sequence[Mapping]) -> str:
    """The ledger's own verdict on one claim, from rows that were measured just now; ValueError for an unknown one."""
    claim = next((claim for claim in LEDGER if claim.id == claim_id and claim.judge), None)
    if claim is None:
        known = ", ".join(claim.id for claim in LEDGER if claim.judge)
        raise ValueError(f"no rule judges a claim {claim_id!r}; known: {known}")
    found = claim.judge(rows)
    return f"{claim.id}  {claim.sentence}\n    {found.word}: {found.measured}"
