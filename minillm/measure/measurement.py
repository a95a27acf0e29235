"""A measurement that can be believed: rows with units in their names, and where they came from.

One experiment returns one `Measurement`. It is saved as
`notebooks/measurements/<device>/<experiment>.json`, and `load` refuses a file that does not
say which commit on which device made it, or that claims more than the device can do. A `Watch`
says whether other programs took part of the machine meanwhile.

PyTorch is imported where it is first needed: a list of measurements is read without it.
"""

from __future__ import annotations

import json
import math
import os
import platform
import re
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from minillm.guard.inputs import check_at_least

if TYPE_CHECKING:
    import torch

    from minillm.ladder.records import StepRecord

CHECKOUT = Path(__file__).resolve().parent.parent.parent


def course_root(*roots: Path) -> Path:
    """The first of some folders that holds recorded measurements; the current one if none does."""
    return next((root for root in roots if (root / "notebooks" / "measurements").is_dir()), Path())


# The checkout's; in a room kit those of the folder around its environment, or around the page that runs.
MEASUREMENTS = course_root(CHECKOUT, Path(sys.prefix).parent, Path.cwd().parent) / "notebooks" / "measurements"
VIRTUAL, EXACT = "virtual time", "arithmetic"  # in place of a device: simulated, and counted or calculated
SEE_ROWS = "see rows"  # in place of a model: each row is of another


class MeasurementError(ValueError):
    """A measurement that must not be shown; the message says what is wrong with it."""


@dataclass(frozen=True)
class Spread:
    """Repeats of one reading: the median is the figure, min and max are its noise. readings: all of them."""

    min: float
    median: float
    max: float
    repeats: int
    warmups: int
    readings: tuple[float, ...] = field(default=(), repr=False)

    @classmethod
    def of(cls, values: Sequence[float], warmups: int = 0) -> Spread:
        return cls(min(values), median(values), max(values), len(values), warmups, tuple(values))


def time_seconds(work: Callable[[], object], device: str | torch.device, warmups: int = 2, repeats: int = 5) -> Spread:
    """Seconds that `work` takes on the device, which is synchronised before each reading of the clock.

    Warm-ups are not counted: the first calls pay for compilation, allocation and cold caches.
    """
    import torch

    kind = torch.device(device).type
    synchronize = getattr(torch, kind).synchronize  # torch.cpu's does nothing
    seconds = []
    for _ in range(warmups + repeats):
        synchronize()
        start = time.perf_counter()
        work()
        synchronize()
        seconds.append(time.perf_counter() - start)
    return Spread.of(seconds[warmups:], warmups)


def _times() -> tuple[float, ...]:
    """Seconds now: on the wall, and of processor time of this process, of its main thread, and of its children."""
    seconds = os.times()
    return time.perf_counter(), time.process_time(), time.thread_time(), seconds[2] + seconds[3]


QUIET_CPU_SHARE = 0.85  # alone, a run gets 97 % or more; beside one busy process on two cores, two thirds
UNEQUAL_STEPS = 2.0  # alone, the slowest tenth of equal steps takes up to 1.4 times the fastest
STEPS_TO_COMPARE = 5  # of one size


class Watch:
    """Whether a run had the machine to itself: its processor time, and its steps of equal size beside each other.

        watch = Watch()
        with watch:
            engine.generate(prompts)
        watch.compare_steps(engine.records.steps)
        watch.found()           # fields of a Provenance

    With as many threads as cores each parallel part of a step waits for its slowest thread, so
    one other busy process makes steps several times slower, and not by half.
    """

    def __init__(self) -> None:
        self.wall = self.used = 0.0
        self.times_fastest: list[float] = []
        self.began: tuple[float, ...] | None = None

    def __enter__(self) -> Watch:
        self.began = _times()
        return self

    def __exit__(self, *error: object) -> None:
        """Count the processor time that could have been used: of all threads, or of one where one did all the work."""
        import torch

        wall, process, thread, children = (after - before for after, before in zip(_times(), self.began, strict=True))
        self.wall += wall
        self.used += max(process / torch.get_num_threads(), thread) + children
        self.began = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out what waits for something else than a processor, such as loading from a disk."""
        if self.began is None:
            yield
            return
        self.__exit__()
        try:
            yield
        finally:
            self.__enter__()

    def compare(self, readings: Sequence[float]) -> None:
        """Take note of repeats of the same work, in seconds."""
        if len(readings) >= STEPS_TO_COMPARE and min(readings) > 0:
            self.times_fastest += [reading / min(readings) for reading in readings]

    def compare_steps(self, steps: Iterable[StepRecord]) -> None:
        """Take note of an engine's steps, those of equal size with each other."""
        sizes: dict[tuple, list[float]] = defaultdict(list)
        for step in steps:
            kv = round(4 * math.log2(step.kv_tokens + 1))  # a fifth more keys and values is another size
            fed = step.prompt_tokens, step.decode_tokens, step.recomputed_tokens, step.drafted_tokens, step.idle_rows
            sizes[*fed, kv].append(step.duration)
        for durations in sizes.values():
            self.compare(durations)

    def found(self, on_cpu: bool = True) -> dict:
        """`busy`, `cpu_share` and `slow_steps` of a Provenance. Of a GPU's run only the steps are looked at."""
        share = self.used / self.wall if self.wall and on_cpu else None
        slow = sorted(self.times_fastest)[int(0.9 * (len(self.times_fastest) - 1))] if self.times_fastest else None
        busy = (share is not None and share < QUIET_CPU_SHARE) or (slow is not None and slow > UNEQUAL_STEPS)
        return {"busy": busy, "cpu_share": share, "slow_steps": slow}


def disturbance(found: Mapping) -> str:
    """In words, with the numbers of `Watch.found`, that the machine was busy; "" where it was not."""
    if not found["busy"]:
        return ""
    share, slow = found["cpu_share"], found["slow_steps"]
    signs = [
        share is not None and f"the run got {share:.0%} of the processor time that its threads could use",
        slow is not None and f"the slowest tenth of equal steps took {slow:.1f} times as long as the fastest",
    ]
    return ": ".join(filter(None, ("this machine was busy", " and ".join(filter(None, signs)))))


@dataclass(frozen=True)
class Provenance:
    """Where rows came from. `noise` is the spread of the rows' main figure over the repeats.

    cpu_share: processor time over what the run's threads could have had. slow_steps: the slowest
    tenth of steps of equal size over the fastest of them. busy: one of the two says that other
    programs took part of the machine, so that the rows' times say little of it.
    """

    device: str
    driver: str
    torch: str
    dtype: str
    model: str
    commit: str
    date: str  # UTC, ISO 8601
    seed: int
    warmups: int
    repeats: int
    noise: dict[str, float] | None = None  # min, median, max
    bandwidth_gb_per_s: float | None = None  # the device's, as measured: what no row may exceed
    busy: bool = False
    cpu_share: float | None = None
    slow_steps: float | None = None

    @property
    def label(self) -> str:
        """The device; with its instruction set too where that was noted in `driver` alone, as in older files."""
        found = re.search(r"\bAVX\w*", self.driver)
        return f"{self.device}, {found[0]}" if found and "AVX" not in self.device else self.device


TEXTS = ("device", "driver", "torch", "dtype", "model", "commit", "date")  # of a provenance


@dataclass(frozen=True)
class Measurement:
    """An experiment's rows and their provenance.

    Names of columns end in their unit (`step_ms`, `kv_gb`, `read_gb_per_s`). `mbu` and `mfu`
    are shares of the measured bandwidth and matmul rate. cut_at_s: the budget in seconds at
    which later rows were left out; None where none is missing.
    """

    experiment: str
    provenance: Provenance
    rows: list[dict] = field(default_factory=list)
    cut_at_s: float | None = None

    @property
    def missing(self) -> str:
        """In words, to follow its figures: "" where no row is missing."""
        return "" if self.cut_at_s is None else f"cut at its budget of {self.cut_at_s:g} s: rows are missing"

    @property
    def disturbed(self) -> str:
        """`disturbance` of its run."""
        return disturbance(asdict(self.provenance))

    def check(self) -> None:
        """Raise MeasurementError unless commit and device are named and no row exceeds the measured limits."""
        for name in ("commit", "device"):
            if not getattr(self.provenance, name):
                raise MeasurementError(f"{self.experiment}: no {name} is named; run it again from a git checkout, or "
                                       "name it in MINILLM_COMMIT")
        limit = self.provenance.bandwidth_gb_per_s
        for number, row in enumerate(self.rows):
            for column, value in row.items():
                share = value if column in ("mbu", "mfu") else None
                if column.endswith("gb_per_s") and limit:
                    share = value / limit
                if share is not None and share > 1:
                    raise MeasurementError(
                        f"{self.experiment}, row {number}: {column} {value:.4g} is {share:.0%} of what this device was "
                        "measured to reach; the bytes, the time or the limit is wrong: measure all three again"
                    )

    def save(self, root: Path = MEASUREMENTS) -> Path:
        """Write the JSON file, unless `check` objects; returns its path."""
        self.check()
        path = measurement_path(self.provenance.device, self.experiment, root)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")  # an interrupted write leaves the old file, or none
        partial.write_text(json.dumps(asdict(self), indent=1) + "\n")
        return partial.replace(path)

    @classmethod
    def load(cls, device: str, experiment: str, root: Path = MEASUREMENTS) -> Measurement:
        """Read one back; MeasurementError lists what there is if it is unknown, or says why it is refused."""
        path = measurement_path(device, experiment, root)
        if not path.exists():
            known = ", ".join(sorted(f"{file.parent.name}/{file.stem}" for file in root.glob("*/*.json")))
            raise MeasurementError(f"no measurement {path.parent.name}/{path.stem}; known: {known or 'none'}")
        absent = {"commit": "", "device": ""}  # what a file leaves out, `check` misses
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
            source, cut_at_s = Provenance(**absent | stored["provenance"]), stored.get("cut_at_s")
            if wrong := [name for name in TEXTS if not isinstance(getattr(source, name), str)]:
                raise TypeError(f"{', '.join(wrong)} of its provenance is not text")
            check_at_least(0, cut_at_s=cut_at_s)
            measurement = cls(stored["experiment"], source, stored["rows"], cut_at_s)
            measurement.check()
        except MeasurementError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError) as error:  # cut off, or of another shape
            raise MeasurementError(f"{path.parent.name}/{path.stem}: not a measurement: {error}") from error
        return measurement


def measurement_path(device: str, experiment: str, root: Path = MEASUREMENTS) -> Path:
    """Where a measurement is kept: the device's name in lower case, hyphens for all else.

    Without the measured bandwidth, which is another in each process.
    """
    folder = re.sub(r"[^a-z0-9]+", "-", re.sub(r", \d+ GB/s$", "", device).lower()).strip("-")
    return root / folder / f"{experiment}.json"


def provenance(
    model: str, dtype: str, device: str | torch.device, seed: int, spread: Spread | None, **more
) -> Provenance:
    """The provenance of rows measured here and now; `spread` is that of their main figure, None where none varies.

    device: torch's name for it, or VIRTUAL or EXACT. more: further fields, such as those of `Watch.found`.
    """
    import torch

    return Provenance(
        device=device_name(device), driver=driver_version(device), torch=torch.__version__, dtype=dtype, model=model,
        commit=current_commit(), date=datetime.now(UTC).isoformat(timespec="seconds"), seed=seed,
        warmups=spread.warmups if spread else 0, repeats=spread.repeats if spread else 1,
        noise={"min": spread.min, "median": spread.median, "max": spread.max} if spread else None,
        **more,
    )


def device_name(device: str | torch.device) -> str:
    """The marketing name of a GPU, or of this machine's processor with what decides its speed; VIRTUAL, EXACT as given.

    That is the threads in use, the widest vectors that PyTorch uses, and the measured bandwidth of
    its memory: machines of one name differ in them by 4 to 6 times.
    """
    import torch

    if device in (VIRTUAL, EXACT):
        return device
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    threads, vectors = torch.get_num_threads(), torch.backends.cpu.get_cpu_capability()
    return f"{_processor()}, {threads} threads, {vectors}, {_copy_gb_per_s(threads):.0f} GB/s"


@cache
def _copy_gb_per_s(threads: int) -> float:
    """Bytes read and written per second by a copy of more than a cache holds: the best of eleven."""
    import torch

    source = torch.ones(32_000_000)  # 128 MB
    target = torch.zeros_like(source)
    seconds = time_seconds(lambda: target.copy_(source), "cpu", warmups=1, repeats=11).min
    return (source.nbytes + target.nbytes) / seconds / 1e9


@cache
def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")  # platform.processor() is empty on most Linux systems
    named = re.search(r"model name\s*: (.+)", cpuinfo.read_text()) if cpuinfo.exists() else None
    return named[1] if named else platform.processor() or platform.machine()


def driver_version(device: str | torch.device) -> str:
    """The GPU's driver and CUDA; for a CPU the system's kernel and the widest vectors that PyTorch uses."""
    import torch

    if device in (VIRTUAL, EXACT):
        return "none"
    if torch.device(device).type == "cuda":
        driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()[:1]
        return f"{''.join(driver) or 'unknown'}, CUDA {torch.version.cuda}"
    return f"{platform.system()} {platform.release()}, {torch.backends.cpu.get_cpu_capability()}"


def current_commit() -> str:
    """The commit of this package's own checkout, "-dirty" if files but measurements differ.

    Outside a checkout, or without git: $MINILLM_COMMIT, for a copy that was made of one; else "".
    """
    here = Path(__file__)
    git = "git", "-C", here.parent
    if not _output(*git, "ls-files", here.name):  # installed into another project's folder
        return os.environ.get("MINILLM_COMMIT", "").strip()
    code = ":(top)", ":(top,exclude)notebooks/measurements"
    changed = _output(*git, "status", "--porcelain", "--untracked-files=no", "--", *code)
    return _output(*git, "rev-parse", "HEAD") + ("-dirty" if changed else "")


def _output(*command) -> str:
    """What a program prints; "" where it is not installed or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
