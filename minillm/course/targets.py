"""What the engine is to reach on an H200: each target beside what is predicted for it, and what was recorded.

A prediction comes from a data sheet, from counts (bytes, FLOPs, launches of a step) and from what each kind of work
reaches of a limit. The last is not known before a run, so it is given as two bounds, and a prediction is a range. A
recorded figure outside of it says that a bound, or a count, is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from minillm.course.show.recorded import on_gpu
from minillm.load.config import ModelConfig
from minillm.measure.measurement import MEASUREMENTS, Measurement
from minillm.measure.roofline import StepShape, read_numbers
from minillm.measure.virtual import DEVICES, CostModel, virtual_engine
from minillm.measure.workload import play, yardstick

SHEET, COPY_SHARE = DEVICES["h200"], 0.9  # of the promised bandwidth a large copy reaches 4.3 TB/s there
# Kernels of a layer: four products, rotate and store, attend, two of add and norm, gate. Of a step beside them:
# embedding, last norm, head, two of sampling.
LAYER_KERNELS, STEP_KERNELS = 9, 5
BIG, SMALL = "llama-3-8b", "qwen3-0.6b"  # of the targets for one step, and of the yardstick
NOT_YET = "not recorded yet"


@dataclass(frozen=True)
class Reach:
    """One bound of what work reaches. products, kv, coded_kv: of the copy bandwidth, in reading weights, 16-bit keys
    and values, and those of 8 bits. rate: of the promised FLOPs. kernel_s: of each kernel what its reading does not
    explain: starting, filling the chip, ending. host_s and host_row_s: idle between steps, and for each row."""

    products: float
    kv: float
    coded_kv: float
    rate: float
    kernel_s: float
    host_s: float
    host_row_s: float

    def cost(self, model: str, kv_format: str = "bf16", rows: float = 1) -> CostModel:
        """The time of this model's steps, of `rows` rows about."""
        config, copy = ModelConfig.preset(model), SHEET.gb_per_s * 1e9 * COPY_SHARE
        kernels = config.num_hidden_layers * LAYER_KERNELS + STEP_KERNELS
        overhead = kernels * self.kernel_s + self.host_s + rows * self.host_row_s
        kv = self.kv if kv_format == "bf16" else self.coded_kv
        return CostModel(config, kv_format, 2 * read_numbers(config), copy * self.products, copy * kv,
                         SHEET.tflops * 1e12 * self.rate, overhead)

    def step_s(self, rows: int, context: int, kv_format: str = "bf16", model: str = BIG) -> float:
        """Seconds of a decode step."""
        return self.cost(model, kv_format, rows).seconds(StepShape.decode([context] * rows))


SLOW = Reach(products=0.92, kv=0.6, coded_kv=0.3, rate=0.55, kernel_s=3e-6, host_s=4e-4, host_row_s=6e-6)
FAST = Reach(products=0.97, kv=0.85, coded_kv=0.7, rate=0.75, kernel_s=1.5e-6, host_s=5e-5, host_row_s=5e-7)


# -- predictions ----------------------------------------------------------------------------------


def share_of_copy(reach: Reach) -> float:
    """Of the copy bandwidth what one row's step reads its weights with, after 1,024 tokens."""
    return 2 * read_numbers(ModelConfig.preset(BIG)) / reach.step_s(1, 1024) / (SHEET.gb_per_s * 1e9 * COPY_SHARE)


@cache
def yardstick_speed(reach: Reach) -> float:
    """Output tokens per second of the whole workload, played by the engine's own scheduler in virtual time."""
    items, rows = yardstick(), 128  # rows: of a step on average, which the run confirms to a tenth
    longest = max(len(item.prompt_ids) + item.max_tokens for item in items)
    engine = virtual_engine(reach.cost(SMALL, rows=rows), max_batch=256, max_step_tokens=2048, max_context=longest,
                            prefix_cache=False, kv_memory=100 * 10**9)
    play(engine, items, len(items))
    return sum(item.output_tokens for item in items) / (engine.records.ended - engine.records.began)


def eight_over_one(reach: Reach) -> float:
    """A step of eight rows over a step of one."""
    return reach.step_s(8, 1024) / reach.step_s(1, 1024)


def coded_over_native(reach: Reach) -> float:
    """A step of 64 rows over keys and values of 8 bits, over one of 16."""
    return reach.step_s(64, 1024, "int8") / reach.step_s(64, 1024)


def over_transformers(reach: Reach) -> float:
    """Times the tokens per second of transformers' continuous batching with PyTorch's attention, 16 rows of 600 tokens.

    Its step launches about 30 kernels a layer one by one, each 5 to 8 µs of Python, and copies all keys and values
    into one tensor before it attends, for every query head: 8 times their bytes are moved.
    """
    rows, context, config = 16, 600, ModelConfig.preset(SMALL)
    launch_s = 5e-6 if reach is SLOW else 8e-6  # a quick rival makes the gain small
    cost = reach.cost(SMALL)
    moved = 8 * rows * context * cost.unit_costs[0] / cost.kv_bytes_per_s
    theirs = max(config.num_hidden_layers * 30 * launch_s, cost.weight_bytes / cost.bytes_per_s + moved)
    return theirs / reach.step_s(rows, context, model=SMALL)


# -- what was recorded ----------------------------------------------------------------------------

Rows = Sequence[dict]


def decoded(rows: Rows, batch: int) -> dict:
    """The row of `bench decode` with this batch, of this engine."""
    return next(row for row in rows if row["engine"] == "minillm" and row["batch"] == batch)


def slower_code(rows: Rows) -> float:
    """Of the 8-bit formats the slower step over the native one's."""
    return max(row["times_native_step"] for row in rows if row["kv_format"] in ("int8", "fp8"))


def beside(rows: Rows) -> float:
    """How many times the speed of transformers' continuous batching."""
    return next(row["times_minillm"] for row in rows if "continuous" in row["engine"])


@dataclass(frozen=True)
class Target:
    """about: what is asked, of which model. at_least: False where less is better. shown: how its figure is written.
    experiment: whose rows `read` takes the figure from; StopIteration or KeyError where they do not have it."""

    about: str
    asked: float
    at_least: bool
    shown: str
    predict: Callable[[Reach], float]
    experiment: str
    model: str
    read: Callable[[Rows], float]

    def row(self, root: Path) -> dict:
        """Asked, predicted and recorded, as text."""
        low, high = sorted(self.predict(reach) for reach in (SLOW, FAST))
        recorded, where = self.recorded(root)
        return {
            "target": self.about, "asked": ("≥ " if self.at_least else "≤ ") + self.shown.format(self.asked),
            "predicted": f"{self.shown.format(low)} to {self.shown.format(high)}",
            "recorded": NOT_YET if recorded is None else self.shown.format(recorded),
            "met": "" if recorded is None else "yes" if self.met(recorded) else "no",
            "where": where,
        }

    def met(self, figure: float) -> bool:
        """Whether a figure is as good as asked."""
        return figure >= self.asked if self.at_least else figure <= self.asked

    def recorded(self, root: Path) -> tuple[float | None, str]:
        """The newest figure that a GPU left of this model, and on which; None and "" without one."""
        runs = [Measurement.load(file.parent.name, self.experiment, root)
                for file in sorted(root.glob(f"*/{self.experiment}.json"))]
        for run in sorted(runs, key=lambda run: run.provenance.date, reverse=True):
            if on_gpu(run) and run.provenance.model == f"random:{self.model}":
                try:
                    return self.read(run.rows), f"{run.provenance.device}, commit {run.provenance.commit[:10]}"
                except (StopIteration, KeyError):
                    continue
        return None, ""


TARGETS = (
    Target("8B, one row: of the copy bandwidth", 0.8, True, "{:.0%}", share_of_copy, "decode", BIG,
           lambda rows: decoded(rows, 1)["mbu"]),
    Target("yardstick (qwen3-0.6b): tokens/s", 20_000, True, "{:,.0f}", yardstick_speed, "bench_yardstick", SMALL,
           lambda rows: rows[0]["tokens_per_s"]),
    Target("8B: a step of 8 rows over one of 1", 1.2, False, "{:.2f}", eight_over_one, "decode", BIG,
           lambda rows: decoded(rows, 8)["step_ms"] / decoded(rows, 1)["step_ms"]),
    Target("8B, 64 rows: an int8 or fp8 step over bf16's", 1.0, False, "{:.2f}", coded_over_native,
           "decode_by_format", BIG, slower_code),
    Target("times transformers' continuous batching", 3.0, True, "{:.1f}", over_transformers, "bench_yardstick_32",
           SMALL, beside),
)
COLUMNS = {"target": "on an H200", "asked": "asked", "predicted": "predicted", "recorded": "recorded", "met": "met",
           "where": "where"}


def targets(root: Path = MEASUREMENTS) -> list[dict]:
    """A row for each target."""
    return [target.row(root) for target in TARGETS]
