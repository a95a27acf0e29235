"""The committed measurements of an experiment, as text to stand beside what was measured just now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from minillm.course.ledger import LEDGER, Claim, Finding, find_all, judged
from minillm.course.show.tables import filled, text_table
from minillm.course.verdicts import NOT_MEASURED, TOO_SMALL, Rows
from minillm.measure.measurement import EXACT, MEASUREMENTS, SEE_ROWS, VIRTUAL, Measurement


def recorded(experiment: str, columns: Mapping[str, str], root: Path = MEASUREMENTS, **wanted) -> str:
    """A table for each device on which `experiment` was recorded, or a line that says that there is none.

    Whether a GPU was among them is not said here, but once on a page, by its `ledger`.

    wanted: values that a row must have to be shown, by column.
    """
    runs = [
        Measurement.load(file.parent.name, experiment, root) for file in sorted(Path(root).glob(f"*/{experiment}.json"))
    ]
    shown = [[row for row in run.rows if all(row.get(name) == value for name, value in wanted.items())] for run in runs]
    tables = [text_table(rows, filled(rows, columns)) for rows in shown]
    parts = [f"{heading(run)}\n{table}" for run, table in zip(runs, tables, strict=True)]
    return "\n\n".join(parts) or f"No run of {experiment!r} is recorded yet: `minillm measure {experiment}` makes one."


def heading(run: Measurement) -> str:
    """Where and when a measurement was made."""
    p = run.provenance
    ran = () if p.model == SEE_ROWS else (f"{p.model} in {p.dtype}", f"torch {p.torch}")
    parts = p.label, *ran, p.date[:10], f"commit {p.commit[:10]}", "made on a busy machine" * p.busy, run.missing
    return ", ".join(part for part in parts if part)


def on_gpu(run: Measurement) -> bool:
    """Whether a CUDA device made it."""
    return "CUDA" in run.provenance.driver


def ledger(here: Mapping[str, Rows | Measurement | None], root: Path = MEASUREMENTS) -> str:
    """What is known of some claims, by id: the verdict on rows that were measured just now, and on each recorded run.

    here: None for a claim of which this page measured nothing. A Measurement of a busy machine is
    not judged. ValueError for an unknown claim.
    """
    known = {claim.id: claim for claim in LEDGER}
    if strangers := [id for id in here if id not in known]:
        raise ValueError(f"no claims {', '.join(strangers)}; known: {', '.join(known)}")
    lines, no_gpu = [], []
    for claim, rows in ((known[id], rows) for id, rows in here.items()):
        lines.append(f"{claim.id}  {claim.sentence}" + (f"  [the articles: {claim.figure}]" if claim.figure else ""))
        if rows is not None:
            lines.append(f"    here: {verdict_on(claim, rows)}")
        recorded_runs = find_all(root, (claim,))
        lines += [f"    {where(finding)}: {finding.verdict}: {finding.measured}" for finding in recorded_runs]
        if rows is not None:
            lines += difference(verdict_on(claim, rows).partition(":")[0], recorded_runs)
        if not {finding.kind for finding in recorded_runs} & {"GPU", VIRTUAL, EXACT}:
            no_gpu.append(claim.id)
    if no_gpu:
        lines.append(f"No GPU run is recorded yet for {', '.join(no_gpu)}.")
    return "\n".join(lines)


def verdict_on(claim: Claim, rows: Rows | Measurement) -> str:
    """The ledger's own verdict on rows, in words; what is missing, where they are too few to tell."""
    if isinstance(rows, Measurement):
        if rows.disturbed:
            return f"{NOT_MEASURED}: {rows.disturbed}; run the page again when it is not"
        rows = rows.rows
    verdict = judged(claim, rows)
    return f"{verdict.word}: {verdict.measured}"


def difference(word: str, findings: Sequence[Finding]) -> list[str]:
    """A line on why the page's word differs from those of recorded runs; none where it does not."""
    words = {finding.verdict for finding in findings if finding.kind in ("GPU", "CPU")} - {NOT_MEASURED}
    if word in (*words, NOT_MEASURED, TOO_SMALL) or not words:
        return []
    why = "the page's run is smaller, and on this device. `minillm measure` asks it at full size."
    return [f"    page and record differ: {why}"]


def where(finding: Finding) -> str:
    """On what a finding was made."""
    return f"recorded, {finding.device}" if finding.kind in ("GPU", "CPU") else finding.device or "recorded"
