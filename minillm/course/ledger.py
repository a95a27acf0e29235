"""The ledger: what articles on serving say, and what was measured of it.

A verdict is computed from measurement files by the claim's rule in `verdicts/`, once for each file of an experiment
that settles it, and so once for each device that ran one.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from pathlib import Path

from minillm.course.verdicts import (
    CLAIMS,
    NOT_MEASURED,
    TOO_SMALL,
    Claim,
    Missing,
    Part,
    Rows,
    TooSmall,
    Verdict,
)
from minillm.measure.measurement import EXACT, MEASUREMENTS, VIRTUAL, Measurement, MeasurementError

LEDGER: tuple[Claim, ...] = CLAIMS
COMMIT_DIGITS = 10


@dataclass(frozen=True)
class Finding:
    """A claim's verdict on one file; `device` is "" where nothing was measured."""

    claim: Claim
    experiment: str
    device: str
    kind: str  # "GPU", "CPU", "virtual time", "arithmetic", or ""
    verdict: str
    measured: str
    direction: Part = Part.NOT_TESTED
    size: Part = Part.NOT_TESTED
    cause: Part = Part.NOT_TESTED
    file: str = ""
    commit: str = ""


def find_all(root: Path = MEASUREMENTS, claims: tuple[Claim, ...] = LEDGER) -> list[Finding]:
    """The ledger over all measurement files under `root`."""
    return [finding for claim in claims for finding in _of_claim(claim, Path(root))]


def _of_claim(claim: Claim, root: Path) -> list[Finding]:
    found = [_of_file(claim, file, root) for name in claim.experiments for file in sorted(root.glob(f"*/{name}.json"))]
    asked = " ".join(claim.experiments)
    return found or [Finding(claim, claim.experiments[0], "", "", NOT_MEASURED, f"run `minillm measure {asked}`")]


def _of_file(claim: Claim, file: Path, root: Path) -> Finding:
    """A file that is refused, was measured beside other work, or holds too few rows settles nothing; the finding says
    why."""
    place = file.relative_to(root).as_posix()
    try:
        run = Measurement.load(file.parent.name, file.stem, root)
    except MeasurementError as error:
        return Finding(claim, file.stem, file.parent.name, "", NOT_MEASURED, f"refused: {error}", file=place)
    source, kind, cut = run.provenance, kind_of(run), f"; {run.missing}" * bool(run.missing)
    verdict = judged(claim, run.rows)
    if verdict.word == NOT_MEASURED:
        verdict = Verdict(NOT_MEASURED, f"{verdict.measured}, in the rows of {file.stem}")
    if run.disturbed:
        verdict = Verdict(NOT_MEASURED, run.disturbed)
    return Finding(claim, file.stem, source.label, kind, verdict.word, verdict.measured + cut, verdict.direction,
                   verdict.size, verdict.cause, place, source.commit)


def judged(claim: Claim, rows: Rows) -> Verdict:
    """The claim's verdict. "Not measured" where rows are too few, or have not what its rule reads, as in an edited
    file, and "too small to tell" where the claim cannot show at their size."""
    try:
        return claim.judge(rows)
    except TooSmall as error:
        return Verdict(TOO_SMALL, str(error))
    except Missing as error:
        return Verdict(NOT_MEASURED, str(error))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        return Verdict(NOT_MEASURED, f"not what its rule reads ({type(error).__name__}: {error})")


def kind_of(run: Measurement) -> str:
    """How its figures came about."""
    if run.provenance.device in (VIRTUAL, EXACT):
        return run.provenance.device
    return "GPU" if "CUDA" in run.provenance.driver else "CPU"


# -- as text --------------------------------------------------------------------------------------


def as_rows(findings: list[Finding]) -> list[dict]:
    """As plain rows, for JSON and tables."""
    return [
        {"id": f.claim.id, "claim": f.claim.sentence, "figure": f.claim.figure, "experiment": f.experiment,
         "device": f.device, "kind": f.kind, "verdict": f.verdict, "measured": f.measured,
         "direction": f.direction.value, "size": f.size.value, "cause": f.cause.value, "file": f.file,
         "commit": f.commit}
        for f in findings
    ]


def on(row: dict) -> str:
    """The device of one of `as_rows`, with what it is."""
    return row["device"] if row["kind"] in ("", row["device"]) else f"{row['kind']}: {row['device']}"


def as_markdown(findings: list[Finding]) -> str:
    """A table for the README, a line for each finding."""
    lines = ["| | claim | the articles | experiment | verdict | direction, size, cause | on | measured |",
             "|---|---|---|---|---|---|---|---|"]
    for row in as_rows(findings):
        parts = ", ".join(row[part] for part in ("direction", "size", "cause"))
        cells = (row["id"], row["claim"], row["figure"], row["experiment"], row["verdict"], parts, on(row),
                 row["measured"])
        lines.append("| " + " | ".join(text.replace("|", "\\|") for text in cells) + " |")
    return "\n".join(lines)


def as_audit(findings: list[Finding], width: int = 100) -> str:
    """For each finding all that its verdict rests on, in lines of at most `width` characters."""
    blocks = []
    for row in as_rows(findings):
        parts = "   ".join(f"{part} {row[part]}" for part in ("direction", "size", "cause"))
        source = f"{row['file']}, commit {row['commit'][:COMMIT_DIGITS]}" if row["commit"] else row["file"]
        lines = [(f"{row['id']:>3}  ", row["claim"]), ("     verdict    ", row["verdict"].upper()),
                 ("     claimed    ", row["figure"] or "no figure"), ("     measured   ", row["measured"]),
                 ("     parts      ", parts), ("     device     ", on(row) or "none"),
                 ("     file       ", source or "none")]
        blocks.append("\n".join(wrapped(text, width, first) for first, text in lines))
    return "\n\n".join(blocks)


def wrapped(text: str, width: int, first: str) -> str:
    """Text after the words of its first line, further lines set in as far."""
    return textwrap.fill(text, max(width, len(first) + 20), initial_indent=first, subsequent_indent=" " * len(first),
                         break_on_hyphens=False)
