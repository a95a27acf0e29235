"""The ledger: what articles on serving say, and what was measured of it.

A verdict is computed from measurement files by the claim's function in `verdicts.py`, once
for each device that has a file of the experiment that settles it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from minillm.course import verdicts
from minillm.course.catalogue import EXPERIMENTS
from minillm.course.verdicts import NOT_MEASURED, Missing, Rows, Verdict
from minillm.measure.measurement import EXACT, MEASUREMENTS, VIRTUAL, Measurement, MeasurementError


@dataclass(frozen=True)
class Claim:
    """figure: what the articles name, for an 8B model in fp16 on an A100 80 GB."""

    id: str
    sentence: str
    figure: str
    judge: Callable[[Rows], Verdict]

    @property
    def experiment(self) -> str:
        """The name of the experiment that settles it."""
        return next(e.name for e in EXPERIMENTS.values() if self.id in e.claims)


LEDGER = (
    Claim("A1", "Decoding is bound by memory bandwidth: a token costs one read of all the weights.",
          "step = weight bytes / bandwidth", verdicts.a1),
    Claim("A2", "Prefill is bound by compute, and one long prompt is enough to saturate it.", "", verdicts.a2),
    Claim("A3", "Batching helps prefill far less than it helps decoding.", "moderate against very large", verdicts.a3),
    Claim("A4", "A prompt costs time about in proportion to its length; an output token's hardly depends on it.",
          "", verdicts.a4),
    Claim("A5", "GPU utilisation reads high while the arithmetic units idle: it does not measure useful work.",
          "the same at batch 1 and 64", verdicts.a5),
    Claim("B1", "Eight requests in a batch give eight times the output for little more time.", "8x for 1.2x",
          verdicts.b1),
    Claim("B2", "Total tokens/s rise steeply with the batch while each request slows down a little.",
          "at 1, 8, 32, 64: 40, 290, 980, 1,400", verdicts.b2),
    Claim("B3", "The curve has a knee; past it latency grows about linearly and throughput flattens.",
          "in the tens of requests", verdicts.b3),
    Claim("B4", "A static batch holds the slot of a finished request until the longest has finished.",
          "80 beside 800 tokens: 720 idle steps", verdicts.b4),
    Claim("B5", "In a continuous batch a finished request leaves at once and no slot idles while anything waits.", "",
          verdicts.b5),
    Claim("B6", "Continuous batching gives several times the throughput of static batching on real traffic.", "2-4x",
          verdicts.b6),
    Claim("B7", "The more the answers' lengths vary, the wider that gap.", "", verdicts.b7),
    Claim("B8", "Batching does nothing for a single request.", "", verdicts.b8),
    Claim("B9", "More GPUs under the same traffic dilute each one's batch: throughput grows less than they.", "",
          verdicts.b9),
    Claim("C1", "Memory less weights less overhead, over the cache of one request, is how many fit.",
          "60 GB / 0.54 GB = 111", verdicts.c1),
    Claim("C2", "Cache bytes per token are 2 x layers x KV heads x head size x bytes per number.", "", verdicts.c2),
    Claim("C3", "Slots reserve for the longest answer and waste most of it; blocks are taken as tokens appear.",
          "", verdicts.c3),
    Claim("C4", "A server that turns requests away while its GPU looks half idle is out of cache.",
          "at 45 % utilisation", verdicts.c4),
    Claim("C5", "Half the context, twice the requests.", "2x", verdicts.c5),
    Claim("C6", "8-bit keys and values halve a request's footprint at a small cost in quality.", "111 to 222 requests",
          verdicts.c6),
    Claim("C7", "Grouped-query attention shrinks the cache by the sharing factor.", "", verdicts.c7),
    Claim("C8", "A common prefix can share its cache; one changed token in front loses all of it.", "",
          verdicts.c8),
    Claim("C9", "Without a cap on the answer, memory is reserved for the worst case and the batch shrinks.", "",
          verdicts.c9),
    Claim("C10", "Memory is weights, cache and activations, and the cache is often the largest.", "", verdicts.c10),
    Claim("D1", "Against 16 bits, FP8 and INT8 take half of the memory and INT4 a quarter.", "50 %, 50 %, 25 %",
          verdicts.d1),
    Claim("D2", "FP8 costs hardly any quality, INT8 little, INT4 noticeably and by the task.", "",
          verdicts.d2),
    Claim("D3", "Quantised weights help twice: fewer bytes read per token, and more room for the cache.", "",
          verdicts.d3),
    Claim("D4", "The damage is uneven: long contexts and rare tokens suffer more.", "",
          verdicts.d4),
    Claim("D5", "An aggregate score can stay while one ability goes: test your own task.", "",
          verdicts.d5),
    Claim("E1", "A draft proposes and the target verifies several tokens in one pass; the output is the same.", "",
          verdicts.e1),
    Claim("E2", "Verifying several tokens costs little more than giving one.", "", verdicts.e2),
    Claim("E3", "Speculation lowers the latency of one request where drafts are often right.", "",
          verdicts.e3),
    Claim("E4", "On throughput the articles disagree: it hardly hurts, or it costs what a batch would have used.", "",
          verdicts.e4),
    Claim("F1", "Under load throughput and latency pull apart; no one setting serves both.", "", verdicts.f1),
    Claim("F2", "So interactive and batch work belong in pools of their own.", "", verdicts.f2),
    Claim("F3", "Capping answers cuts the tail; caching prompts takes prefill out of the queue.", "", verdicts.f3),
    Claim("F4", "TTFT, ITL, tokens/s, achieved batch, cache occupancy and queue are what to watch.", "", verdicts.f4),
    Claim("F5", "The achieved batch is the most telling number.", "3 where 40 would fit", verdicts.f5),
    Claim("F6", "Each symptom has its own cure.", "", verdicts.f6),
    Claim("F7", "Prefill and decoding can have pools of their own.", "", verdicts.f7),
    Claim("G1", "An 8B model on one A100: continuous batching and paging multiply a static batch's throughput.",
          "310 to 2,850 tokens/s: 9.2x", verdicts.g1),
    Claim("G2", "With 8-bit keys and values throughput still rises while the tail gets worse.",
          "3,900 tokens/s; p99 4.1 to 6.8 s", verdicts.g2),
    Claim("G3", "The cost of a million tokens is the GPU's price per hour over the tokens made in it.",
          "$2.60 and $0.28", verdicts.g3),
)


@dataclass(frozen=True)
class Finding:
    """A claim's verdict on one device; `device` is "" where nothing was measured."""

    claim: Claim
    device: str
    kind: str  # "GPU", "CPU", "virtual time", "arithmetic", or ""
    verdict: str
    measured: str


def find_all(root: Path = MEASUREMENTS, claims: tuple[Claim, ...] = LEDGER) -> list[Finding]:
    """The ledger over all measurement files under `root`."""
    return [finding for claim in claims for finding in _of_claim(claim, Path(root))]


def _of_claim(claim: Claim, root: Path) -> list[Finding]:
    files = sorted(root.glob(f"*/{claim.experiment}.json"))
    if not files:
        return [Finding(claim, "", "", NOT_MEASURED, f"run `minillm measure {claim.experiment}`")]
    return [_of_file(claim, file, root) for file in files]


def _of_file(claim: Claim, file: Path, root: Path) -> Finding:
    """A file that is refused, or holds too few rows, settles nothing; the finding says why."""
    try:
        run = Measurement.load(file.parent.name, file.stem, root)
    except MeasurementError as error:
        return Finding(claim, file.parent.name, "", NOT_MEASURED, f"refused: {error}")
    where, cut = (run.provenance.device, kind_of(run)), f"; {run.missing}" * bool(run.missing)
    try:
        verdict = judged(claim, run.rows)
    except Missing as error:
        return Finding(claim, *where, NOT_MEASURED, f"{error}, in the rows of {claim.experiment}{cut}")
    return Finding(claim, *where, verdict.word, verdict.measured + cut)


def judged(claim: Claim, rows: Rows) -> Verdict:
    """The claim's verdict. Missing where rows are too few, or have not what its rule reads, as in an edited file."""
    try:
        return claim.judge(rows)
    except Missing:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise Missing(f"not what its rule reads ({type(error).__name__}: {error})") from error


def kind_of(run: Measurement) -> str:
    """How its figures came about."""
    if run.provenance.device in (VIRTUAL, EXACT):
        return run.provenance.device
    return "GPU" if "CUDA" in run.provenance.driver else "CPU"


def as_rows(findings: list[Finding]) -> list[dict]:
    """As plain rows, for JSON and tables."""
    return [
        {"id": f.claim.id, "claim": f.claim.sentence, "figure": f.claim.figure, "experiment": f.claim.experiment,
         "device": f.device, "kind": f.kind, "verdict": f.verdict, "measured": f.measured}
        for f in findings
    ]


def as_markdown(findings: list[Finding]) -> str:
    """A table for the README, a line for each finding."""
    lines = ["| | claim | the articles | experiment | verdict | on | measured |", "|---|---|---|---|---|---|---|"]
    for row in as_rows(findings):
        on = row["device"] if row["kind"] in ("", row["device"]) else f"{row['kind']}: {row['device']}"
        cells = row["id"], row["claim"], row["figure"], row["experiment"], row["verdict"], on, row["measured"]
        lines.append("| " + " | ".join(text.replace("|", "\\|") for text in cells) + " |")
    return "\n".join(lines)
