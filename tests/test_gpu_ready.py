"""What a first run on a borrowed GPU would meet: no git, no model, little time, another release of transformers."""

from __future__ import annotations

import gc
import json
import os
import re
import subprocess
import sys
import weakref
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fakes import fake_engine
from tiny import tiny_config, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode

from minillm.cli import main
from minillm.course import catalogue
from minillm.course.catalogue import Experiment
from minillm.course.experiments import batching, common, example, memory
from minillm.course.experiments import ladder as rungs
from minillm.course.setting import Setting, silent
from minillm.fast import weight_formats
from minillm.fast.engine import Engine
from minillm.fast.weight_formats import Int4Linear, Int8Linear
from minillm.ladder.decode import NoCache, SequenceCache, attend
from minillm.ladder.request import SamplingParams
from minillm.load.config import PRESETS
from minillm.measure import bench as bench_module
from minillm.measure import measurement
from minillm.measure.measurement import Measurement, provenance
from minillm.measure.peers import page_name
from minillm.measure.roofline import Ceilings

VOCABULARY = 49_152
CEILINGS = Ceilings(1e15, 1e15)


# -- what stops a run -----------------------------------------------------------------------------


@dataclass
class Before:
    """ContinuousBatchingConfig as transformers 5.17 has it."""

    block_size: int = 256
    num_blocks: int | None = None


@dataclass
class Now(Before):
    page_size: int = 256


def test_the_size_of_a_block_has_the_name_that_this_transformers_knows():
    from transformers.generation import ContinuousBatchingConfig

    assert page_name(Before) == "block_size" and page_name(Now) == "page_size"
    ContinuousBatchingConfig(**{page_name(ContinuousBatchingConfig): 32})


def test_without_git_the_commit_is_the_one_that_was_named(monkeypatch):
    monkeypatch.setattr(measurement, "_output", lambda *command: "")
    monkeypatch.setenv("MINILLM_COMMIT", "0123abc")
    assert measurement.current_commit() == "0123abc"
    monkeypatch.delenv("MINILLM_COMMIT")
    assert measurement.current_commit() == ""


@pytest.fixture
def one(monkeypatch, tmp_path):
    """An experiment of one row and, before it, one whose model is missing; files go to a folder of the test's own."""
    monkeypatch.chdir(tmp_path)

    def needs_a_model(setting):
        return setting.model

    def run(setting):
        return Measurement("one", provenance("m", "fp32", "cpu", 0, None), [{"answer": 42}])

    listed = {"missing": Experiment("missing", needs_a_model, "fails"), "one": Experiment("one", run, "a number")}
    monkeypatch.setattr(catalogue, "EXPERIMENTS", listed)


def test_rows_are_shown_even_where_they_cannot_be_kept(one, monkeypatch, capsys):
    monkeypatch.setattr(measurement, "current_commit", lambda: "")
    assert main(["measure", "one"]) == 1
    said = capsys.readouterr()
    assert "42" in said.out and "no commit is named" in said.err


def no_model(*arguments):
    raise FileNotFoundError("there is no such model")


def test_a_missing_model_fails_its_experiment_and_no_other(one, monkeypatch, capsys):
    """With --resume too, which asks for the device before anything runs."""
    monkeypatch.setattr("minillm.course.setting.load_model", no_model)
    monkeypatch.setattr("minillm.course.catalogue.current_commit", lambda: "abc")
    monkeypatch.setattr(measurement, "current_commit", lambda: "abc")
    assert main(["measure", "missing", "one", "--resume"]) == 1
    said = capsys.readouterr()
    assert "missing failed: FileNotFoundError" in said.err and "written to" in said.out
    assert main(["measure", "missing", "one", "--resume"]) == 1
    assert "one: this commit has it already" in capsys.readouterr().out


def test_the_device_and_the_sizes_are_known_without_a_model(monkeypatch):
    monkeypatch.setattr("minillm.course.setting.load_model", no_model)
    setting = Setting(device="cpu")
    assert not setting.gpu and setting.size(1, 2, 3) == 2 and setting.timed_name == setting.model_name
    monkeypatch.setattr("minillm.course.setting.choose_device", lambda device: torch.device("cuda"))
    assert setting.gpu and setting.size(1, 2, 3) == 3 and setting.timed_name == "random:llama-3-8b"


@pytest.fixture
def yardstick(monkeypatch):
    monkeypatch.setitem(PRESETS, "tiny", tiny_config("t8-2", vocab_size=10_001))
    monkeypatch.setattr(bench_module, "measure_ceilings", lambda device, dtype: CEILINGS)
    monkeypatch.setattr(measurement, "current_commit", lambda: "abc")
    return lambda **more: bench_module.bench("yardstick", "random:tiny", None, 3, silent, requests=3,
                                             scale=0.02, **more)


def test_a_bench_keeps_each_turn_and_begins_none_past_its_budget(yardstick):
    kept = []
    whole = yardstick(keep=kept.append)
    assert [each.provenance.repeats for each in kept] == [1, 2, 3]
    assert all(each.missing for each in kept[:2]) and not kept[2].missing and not whole.missing
    assert whole.experiment == "bench_yardstick_3", "of another size than the one that is recorded as bench_yardstick"
    kept.clear()
    cut = yardstick(keep=kept.append, budget_s=0)
    assert cut.provenance.repeats == 1 == len(kept) and cut.cut_at_s == 0 and kept[0] == cut


@pytest.fixture
def tiny_setting(monkeypatch):
    monkeypatch.setattr(Setting, "model", tiny_model(vocab_size=VOCABULARY))
    monkeypatch.setattr(Setting, "measure_ceilings", lambda self: CEILINGS)
    monkeypatch.setattr(Setting, "tokenizer", SimpleNamespace(chat=lambda text: [ord(letter) % 64 for letter in text]))
    return lambda **more: Setting(quick=True, device="cpu", **more)


def test_a_spent_budget_ends_the_ladder_after_a_turn_and_the_worked_example_after_a_set_up(tiny_setting, monkeypatch):
    setting = tiny_setting(budget_s=0)
    turns = []
    run = rungs._run
    monkeypatch.setattr(rungs, "_run", lambda *arguments: turns.append(arguments) or run(*arguments))
    assert len(rungs.ladder_experiment(setting).rows) == len(turns) == len(rungs.RUNGS) and setting.cut
    setting = tiny_setting(budget_s=0)
    assert len(example.worked_example_here(setting).rows) == 1 and setting.cut


# -- what would record wrong figures --------------------------------------------------------------


class Graphs:
    """Stands for an engine's recorded steps; knows whether a step ran before they were recorded."""

    def __init__(self) -> None:
        self.recorded = False

    def record_all(self) -> None:
        self.recorded = True

    def fits(self, step) -> bool:
        assert self.recorded, "a graph would be recorded inside a timed run"
        return False

    def run(self, rows) -> None:
        self.fits(rows)

    def keep(self, computed) -> None: ...

    def expect_next(self, rows) -> None: ...


@pytest.mark.parametrize("experiment", [
    batching.knee, batching.continuous_vs_static, batching.gain_by_spread, batching.stall_by_chunking,
    example.worked_example_here, memory.memory_by_policy, memory.prefix_sharing, rungs.ladder_experiment,
], ids=lambda experiment: experiment.__name__)
def test_no_graph_is_recorded_inside_a_timed_run(experiment, tiny_setting, monkeypatch):
    make = Engine.make_executor

    def with_graphs(engine, *parts):
        executor = make(engine, *parts)
        executor.graphs = Graphs()
        return executor

    monkeypatch.setattr(Engine, "make_executor", with_graphs)
    monkeypatch.setattr(common, "warm", {tiny_setting().model: 1 << 30})  # warm-ups may record
    monkeypatch.setattr(rungs, "_warm_up", lambda *arguments: None)
    assert experiment(tiny_setting(budget_s=0)).rows


@pytest.mark.parametrize("ahead", [False, True])
def test_a_steps_time_holds_its_planning(ahead):
    engine = fake_engine()
    engine.runs_ahead, plan = ahead, engine.scheduler.plan

    def slow_plan():
        engine.clock.moment += 0.5
        return plan()

    engine.scheduler.plan = slow_plan
    engine.generate([[1, 2]], SamplingParams(3, ignore_eos=True))
    assert [step.duration for step in engine.records.steps] == [1.5] * 3


class Devices(TorchDispatchMode):
    """The kinds of devices on which the results of operations lie."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        out = function(*arguments, **(options or {}))
        leaves = torch.utils._pytree.tree_leaves(out)
        self.seen |= {each.device.type for each in leaves if isinstance(each, torch.Tensor)}
        return out


def test_rungs_0_and_1_make_their_mask_on_the_models_device_and_none_for_one_token():
    """Where a mask is made on the CPU, each layer copies it and waits."""
    q, k = torch.empty(4, 4, 8, device="meta"), torch.empty(6, 2, 8, device="meta")
    with Devices() as devices:
        attend(q, k, k, 2)
        NoCache().attend(0, q, k[:4], k[:4])
    assert devices.seen == {"meta"}
    cache = SequenceCache(tiny_model(), 4)
    cache.length = 3
    with torch.profiler.profile() as profile:
        cache.attend(0, torch.ones(1, 8, 8), torch.ones(1, 2, 8), torch.ones(1, 2, 8))
    assert not {"aten::arange", "aten::le"} & {each.name for each in profile.events()}


@pytest.mark.parametrize("kind", [Int8Linear, Int4Linear])
def test_on_a_gpu_a_product_reads_codes_and_makes_no_dense_weight(kind, monkeypatch):
    calls = []

    def product(x, codes, scales, middles, weight_format):
        calls.append((weight_format, codes.shape, scales.shape, middles.shape))
        return x.new_zeros(len(x), len(codes))

    monkeypatch.setattr(weight_formats, "triton_module", lambda name, device: SimpleNamespace(product=product))
    monkeypatch.setattr(weight_formats, "kernel_fits", lambda weight: False)
    monkeypatch.setattr(weight_formats, "int4_dense", lambda *parts: pytest.fail("dequantised"))
    monkeypatch.setattr(torch.nn.functional, "linear", lambda *parts: pytest.fail("dequantised"))
    linear = kind(torch.randn(48, 128))
    for rows in (1, 300):
        assert linear(torch.ones(rows, 128)).shape == (rows, 48)
    expected = {Int8Linear: ("int8", (48, 128), (48,), (48,)), Int4Linear: ("int4", (48, 64), (48, 2), (48, 2))}
    assert calls == [expected[kind]] * 2


def test_the_worked_example_frees_a_cache_before_it_makes_the_next(tiny_setting, monkeypatch):
    """On a GPU each takes 60 GB."""
    alive: weakref.WeakSet = weakref.WeakSet()
    init = Engine.__init__

    def counted(engine, *arguments, **settings):
        assert not alive, "two caches at once"
        init(engine, *arguments, **settings)
        alive.add(engine)

    setting = tiny_setting()
    common.warm_up(setting.timed_model)
    gc.collect()
    monkeypatch.setattr(Engine, "__init__", counted)
    assert len(json.dumps(example.worked_example_here(setting).rows)) > 2


# -- what a CPU can see of the kernels ------------------------------------------------------------


def test_the_kernel_checks_hold_with_the_sizes_of_a_gpu():
    """A block of 16 and heads of 64: what is only right for the interpreter's small sizes fails here."""
    pytest.importorskip("triton", reason="Triton is published for Linux alone")
    environment = os.environ | {"TRITON_INTERPRET": "1", "MINILLM_GPU_SIZES": "1"}
    chosen = "share_a_key and 3 or plain_loops or (dequantised_reference and int4 and 64)"
    run = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/kernel_checks.py",
                          "-k", chosen], env=environment, cwd=Path(__file__).parent.parent, capture_output=True,
                         text=True)
    assert run.returncode == 0 and "3 passed" in run.stdout, run.stdout[-3000:]


@pytest.mark.parametrize("capability", [90, pytest.param(80, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", [Int8Linear, Int4Linear])
@pytest.mark.parametrize("rows", [1, 64])
def test_products_over_codes_compile_for_real_cards(kind, rows, capability, monkeypatch):
    """As a launch would compile them: in bf16, at the widths of an 8B model, with what alignment tells."""
    pytest.importorskip("triton", reason="Triton is published for Linux alone")
    from fake_card import fake_card

    from minillm.fast import weight_kernels

    compiled = fake_card(monkeypatch, capability)
    monkeypatch.setattr(weight_formats, "triton_module", lambda name, device: weight_kernels)
    monkeypatch.setattr(weight_formats, "kernel_fits", lambda weight: False)
    linear = kind(torch.ones(1024, 4096))
    linear(torch.ones(rows, 4096, dtype=torch.bfloat16))
    (variant,) = compiled["product_kernel"].values()
    ptx = variant.asm["ptx"]
    assert variant.asm["cubin"] and variant.metadata.shared <= 99 << 10
    assert "mma" in ptx, "multiplied without matrix instructions"
    assert not re.search(r"ld\.global[.\w]*\.b8\s", ptx), "bytes are loaded one by one"
