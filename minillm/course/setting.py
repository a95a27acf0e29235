"""Where and how large an experiment runs: what every experiment is given."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, wraps
from typing import Any, TypeVar

import torch

from minillm.fast.memory import native_format
from minillm.load.config import ModelConfig
from minillm.load.source import DEFAULT
from minillm.load.tokenizer import Tokenizer, load_tokenizer
from minillm.load.weights import choose_device, load_model
from minillm.measure.measurement import Measurement, Spread, Watch, provenance
from minillm.measure.roofline import Ceilings, StepShape, StepWork, least_work, measure_ceilings
from minillm.model.llama import Llama

GPU_MODEL = "random:llama-3-8b"  # on a GPU the default model is too small to be worth timing
Item = TypeVar("Item")


class NotHere(RuntimeError):
    """What an experiment needs is not on this machine; the message says what, and how to get it."""


class _Silent:
    """A progress bar that shows nothing."""

    def update(self, number: int) -> None: ...


Progress = Callable[[str, int], AbstractContextManager[Any]]  # (label, total) -> a bar with `update`


def silent(label: str, total: int) -> AbstractContextManager[_Silent]:
    """The progress bar of a run that shows none."""
    return nullcontext(_Silent())


@dataclass
class Setting:
    """What an experiment is to run on.

    quick: sizes for a look or a test, seconds each. device: as in `load_model`. gpu_model: timed
    on a GPU in place of the default model. budget_s: seconds after which `each` gives no
    further item, and `cut` says that it did. Model and tokenizer are made when they are first
    asked for, and kept; the ceilings until the next experiment begins.
    """

    quick: bool = False
    model_name: str = DEFAULT
    gpu_model: str = GPU_MODEL
    device: str = "auto"
    seed: int = 0
    progress: Progress = silent
    budget_s: float | None = None
    cut: bool = False
    started: float = field(default_factory=time.perf_counter)
    watch: Watch = field(default_factory=Watch)  # of the experiment that runs, if its rows depend on the clock

    @cached_property
    def model(self) -> Llama:
        with self.watch.paused():
            return load_model(self.model_name, self.device)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.model_name)

    @property
    def config(self) -> ModelConfig:
        return self.model.config

    @property
    def gpu(self) -> bool:
        """Whether the model is on a GPU: sizes follow it. Loads none."""
        return self.place.type == "cuda"

    @property
    def place(self) -> torch.device:
        """The device on which models are loaded."""
        model = vars(self).get("model")
        return model.device if model is not None else choose_device(self.device)

    @property
    def timed_name(self) -> str:
        """The model whose steps are timed, where the text does not matter: on a GPU one that is worth a GPU."""
        return self.gpu_model if self.gpu and self.model_name == DEFAULT else self.model_name

    @cached_property
    def timed_model(self) -> Llama:
        if self.timed_name == self.model_name:
            return self.model
        with self.watch.paused():
            return load_model(self.timed_name, self.device)

    def measure_ceilings(self) -> Ceilings:
        """Bandwidth and matmul rate of the device now, in the timed model's dtype."""
        return measure_ceilings(self.timed_model.device, self.timed_model.dtype)

    @cached_property
    def ceilings(self) -> Ceilings:
        """The same, measured once for each experiment that `run_experiment` runs, or for a page."""
        return self.measure_ceilings()

    def work(self, shape: StepShape, model: Llama | None = None, kv_format: str | None = None) -> StepWork:
        """The least that a step of this shape must do: of the timed model, or of another."""
        model = model or self.timed_model
        return least_work(model.config, kv_format or native_format(model.dtype), shape, model.weight_bytes)

    def shares(self, work: StepWork, seconds: float) -> dict[str, float]:
        """A step's least time by the limits, and its shares of them: MBU and MFU (`roofline.py`)."""
        return {
            "least_ms": self.ceilings.least_seconds(work) * 1e3,
            "mbu": self.ceilings.mbu(work, seconds), "mfu": self.ceilings.mfu(work, seconds),
        }

    def measured(self, experiment: str, rows: list[dict], spread: Spread | None = None, **more) -> Measurement:
        """Rows of the timed model with their provenance. spread: of the first row's main figure, if it was repeated."""
        model = self.timed_model
        source = provenance(self.timed_name, native_format(model.dtype), model.device, self.seed, spread, **more)
        return Measurement(experiment, source, rows)

    def size(self, quick: Item, full: Item, gpu: Item | None = None) -> Item:
        """The size to run at: `gpu` on a GPU if given, `full` elsewhere, `quick` on request."""
        if self.quick:
            return quick
        return gpu if gpu is not None and self.gpu else full

    def begin(self) -> None:
        """Start the clock of the budget, and forget the ceilings, since a machine's speed moves."""
        self.started, self.cut = time.perf_counter(), False
        vars(self).pop("ceilings", None)

    def each(self, label: str, items: Iterable[Item]) -> Iterator[Item]:
        """The items, under a progress bar, for as long as the budget lasts; the first is always given."""
        items: Sequence[Item] = list(items)
        with self.progress(label, len(items)) as bar:
            for item in self.within_budget(items):
                yield item
                bar.update(1)

    def within_budget(self, items: Iterable[Item]) -> Iterator[Item]:
        """The same without a bar."""
        for number, item in enumerate(items):
            if number and self.budget_s is not None and time.perf_counter() - self.started > self.budget_s:
                self.cut = True
                return
            yield item


def timed(experiment: Callable[..., Measurement]) -> Callable[..., Measurement]:
    """An experiment whose rows depend on the clock: its provenance says whether the machine was busy meanwhile."""

    @wraps(experiment)
    def run(setting: Setting, *arguments, **settings) -> Measurement:
        setting.watch = Watch()
        with setting.watch:
            measurement = experiment(setting, *arguments, **settings)
        found = setting.watch.found(setting.place.type == "cpu")
        return replace(measurement, provenance=replace(measurement.provenance, **found))

    return run
