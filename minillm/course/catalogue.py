"""The list of experiments, and how one is run.

An experiment is a function of a `Setting` that returns a `Measurement`. Notebook, command
line and README show what these return, and nothing else. To add one, write the function and
name it below, with the claims that its rows settle (`ledger.py`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minillm.measure.measurement import (
    EXACT,
    VIRTUAL,
    Measurement,
    MeasurementError,
    current_commit,
    device_name,
    measurement_path,
)

if TYPE_CHECKING:
    from minillm.course.setting import Setting

Run = Callable[["Setting"], Measurement]


def placed(file: str, name: str) -> Any:
    """What has this name in a file of `experiments/`, imported now: their list is shown without PyTorch."""
    return getattr(import_module(f"minillm.course.experiments.{file}"), name)


@dataclass(frozen=True)
class Experiment:
    """claims: those that it settles, by id. seconds: about what it takes with `--quick` on two cores.
    on_device: False where only virtual time or arithmetic is in it, for which no model is loaded.

    run: its function, or the file of `experiments/` in which it stands: "file" if it has the experiment's name,
    else "file.function".
    tables: what to print, by its name in that file; without any, one table of all columns.
    """

    name: str
    run: Run | str
    about: str
    claims: tuple[str, ...] = ()
    seconds: float = 1.0
    tables: str = ""
    on_device: bool = True

    def __call__(self, setting: Setting) -> Measurement:
        if not isinstance(self.run, str):
            return self.run(setting)
        file, _, function = self.run.partition(".")
        return placed(file, function or self.name)(setting)

    @property
    def columns(self) -> Sequence[Mapping[str, str]]:
        """{column: title} of each table to print; none for one table of everything."""
        return placed(self.run, self.tables) if self.tables else ()


EXPERIMENTS = {
    experiment.name: experiment
    for experiment in (
        Experiment("ladder", "ladder.ladder_experiment", "every rung on the same prompts", (), 20),
        Experiment("decode", "batching", "decode steps by batch, and their shares of the limits", (), 4),
        Experiment("decode_by_format", "batching", "a decode step by the format of keys and values", (), 4),
        Experiment("roofline_steps", "limits", "decode steps and prompts, and their shares of the limits", (), 4),
        Experiment("decode_step", "limits", "a step of one row against the bytes that it reads", ("A1",), 8),
        Experiment("operators", "operators", "where a step's time goes, by part", (), 10, "TABLES"),
        Experiment("prefill", "limits", "prompts by length and number, beside decoding", ("A2", "A3", "A6"), 18),
        Experiment("cost_by_length", "limits", "the next token by the text's length", ("A4",), 12),
        Experiment("utilisation", "limits", "what the usual gauge reads at batch 1 and 64", ("A5",), 8),
        Experiment("batch_curve", "batching", "a step's time by its rows", ("B1", "B2", "B8"), 12),
        Experiment("knee", "batching", "where more clients stop paying", ("B3",), 15),
        Experiment("idle_slots", "batching", "idle slot-steps, counted", ("B4", "B5"), on_device=False),
        Experiment("continuous_vs_static", "batching", "chat lengths in equal memory", ("B6",), 25),
        Experiment("gain_by_spread", "batching", "continuous over static by spread", ("B7",), 30),
        Experiment("stall_by_chunking", "batching", "one long prompt among streams", (), 5),
        Experiment("replicas", "service", "the same traffic on 1 to 8 GPUs", ("B9",), 3, on_device=False),
        Experiment("capacity_sum", "memory", "how many requests fit", ("C1", "C2", "C5", "C7", "C10"), on_device=False),
        Experiment("memory_by_policy", "memory", "slots and pages in the same bytes", ("C3",), 8),
        Experiment("prefix_sharing", "memory", "one prompt's start stored for all", ("C8",), 6),
        Experiment("speculation", "speculation", "drafts by length, acceptance and batch",
                   ("E1", "E2", "E3", "E4"), 70),
        Experiment("cost_of_blocks", "memory", "one run of memory against blocks", (), 5),
        Experiment("kv_quality", "formats", "KV formats: bytes, and quality against fp32",
                   ("C6", "D1", "D2", "D4", "D5", "D6"), 70, "KV_TABLES"),
        Experiment("key_errors", "formats", "int4 keys: errors of each way to store them", (), 10),
        Experiment("weight_quality", "formats", "weight formats: quality against the weights as loaded",
                   ("D2", "D4", "D5", "D6"), 45, "WEIGHT_TABLES"),
        Experiment("weight_speed", "formats", "weight formats: a decode step, and room for cache",
                   ("D3", "D6"), 15),
        Experiment("beside_llama_cpp", "llama_cpp", "4-bit weights here and in llama.cpp, in turns", (), 8),
        Experiment("kv_concurrency", "formats", "KV formats in the same bytes: requests at once, speed",
                   (), 10),
        Experiment("out_of_cache", "memory", "a server that refuses while it computes little", ("C4",), 2,
                   on_device=False),
        Experiment("output_caps", "memory", "what a cap on answers saves", ("C9",), 2, on_device=False),
        Experiment("virtual_prediction", "prediction", "one run predicts others", (), 130),
        Experiment("load_sweep", "service", "one GPU from 1 to 256 clients", ("F1",), 2, on_device=False),
        Experiment("pools", "service", "chats and offline work, mixed and apart", ("F2",), 3, on_device=False),
        Experiment("caps_and_caching", "service", "capped answers, cached prompts", ("F3",), 3, on_device=False),
        Experiment("watch", "service", "every figure that is worth watching", ("F4",), 1, on_device=False),
        Experiment("achieved_batch", "service", "eight limits on a batch, every gauge", ("F5",), 3, on_device=False),
        Experiment("cures", "service", "symptom, cure, before and after", ("F6",), 5, on_device=False),
        Experiment("disaggregation", "service", "prefill and decoding apart", ("F7",), 3, on_device=False),
        Experiment("worked_example", "example", "8B on one A100", ("C10", "G1", "G2", "G3"), 3, on_device=False),
        Experiment("articles_sums", "example", "what the articles' figures imply", ("H1", "H2", "H3", "H4", "H5"),
                   on_device=False),
        Experiment("worked_example_here", "example", "the same three set-ups on this device", (), 10),
    )
}


def in_running_order() -> list[str]:
    """All of them: what needs no model first, then the cheapest first, so that early results come early."""
    return sorted(EXPERIMENTS, key=lambda name: (EXPERIMENTS[name].on_device, EXPERIMENTS[name].seconds))


def find(name: str) -> Experiment:
    """An experiment by name; ValueError lists the names."""
    if name not in EXPERIMENTS:
        raise ValueError(f"unknown experiment {name!r}; known: {', '.join(EXPERIMENTS)}")
    return EXPERIMENTS[name]


@dataclass(frozen=True)
class Outcome:
    """What became of one experiment."""

    measurement: Measurement
    seconds: float

    def report(self, budget_s: float | None = None) -> str:
        """How long it took, and what that means for its rows."""
        text = f"{self.seconds:.1f} s"
        if self.measurement.missing:
            return f"{text}, {self.measurement.missing}"
        if budget_s is not None and self.seconds > budget_s:
            return f"{text}, past its budget of {budget_s:g} s, at which it cannot stop between rows"
        return text


def run_experiment(name: str, setting: Setting) -> Outcome:
    """Run one; ValueError for an unknown name, MeasurementError for another one's rows. `save` checks the rows."""
    experiment = find(name)
    setting.begin()
    measurement = experiment(setting)
    if measurement.experiment != name:
        raise MeasurementError(f"{name} returned the rows of {measurement.experiment!r}: its file would not be found")
    if setting.cut:
        measurement = replace(measurement, cut_at_s=setting.budget_s)
    return Outcome(measurement, time.perf_counter() - setting.started)


def recorded_here(name: str, setting: Setting, root: Path) -> Measurement | None:
    """What this commit has left of it for this device, if it has all rows that the budget now allows.

    So what was cut counts for no larger budget than its own. A file that cannot be read does
    not count, and a commit with changes on top has left none.
    """
    allowed = math.inf if setting.budget_s is None else setting.budget_s
    for place in (device_name(setting.place), VIRTUAL, EXACT):
        if measurement_path(place, name, root).exists():
            try:
                stored = Measurement.load(place, name, root)
            except MeasurementError:
                return None
            whole = stored.cut_at_s is None or stored.cut_at_s >= allowed
            commit = stored.provenance.commit
            return stored if whole and commit == current_commit() and not commit.endswith("-dirty") else None
    return None
