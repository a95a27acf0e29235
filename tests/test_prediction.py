"""Predictions put to the test: runs that take turns on a machine whose speed moves, and what a fit makes of them."""

from dataclasses import dataclass, replace
from itertools import count, pairwise
from math import sin
from random import Random

import pytest
import torch
from tiny import tiny_model

from minillm.course.experiments import prediction
from minillm.course.experiments.fitting import FittedCost, fit
from minillm.course.experiments.prediction import (
    ALLOWED,
    LIMITS,
    REPLAYS,
    TurnClock,
    TurnRun,
    error_rows,
    figures,
    in_turns,
    replayed,
    swelling,
)
from minillm.course.setting import Setting
from minillm.fast.engine import Engine
from minillm.load.config import ModelConfig
from minillm.measure.virtual import CostModel, VirtualExecutor, virtual_engine
from minillm.measure.workload import VOCAB, WorkItem, chat, lognormal, play

CONFIG = ModelConfig.preset("smollm2-135m")
TRUE = CostModel(CONFIG, "fp32", 538e6, 25e9, 7e9, 190e9, 2e-3, 0.0)


@dataclass
class Machine:
    """Steps take longer for minutes and shorter for minutes, and some of them, at random, half as long again."""

    drift: float = 0.0
    stalls: float = 0.0
    time: float = 0.0

    def __post_init__(self):
        self.draw = Random(1)

    def now(self):
        return self.time

    def advance(self, seconds):
        """What a virtual clock is asked to: the step's time, as it comes out on this machine."""
        stalled = 1 + 0.5 * (self.draw.random() < self.stalls)
        self.time += seconds * stalled * (1 + self.drift * sin(self.time / 60))

    def run(self, items, clients=None, cost=TRUE):
        engine = Engine(None, executor=VirtualExecutor(cost, self), clock=TurnClock(self.now), kv_format="fp32",
                        kv_memory=1 << 28, **LIMITS)
        return TurnRun(engine, items, clients)


def test_a_turn_clock_stands_still_between_turns_and_skips_waits():
    machine = Machine()
    clock = TurnClock(machine.now)
    machine.time = 5.0
    assert clock.now() == 0
    with clock.running():
        machine.time = 7.0
        assert clock.now() == 2
        clock.wait_until(10.0)
        clock.wait_until(9.0)
        machine.time = 7.5
        assert clock.now() == 10.5
    machine.time = 100.0
    assert clock.now() == 10.5
    with pytest.raises(RuntimeError), clock.running():
        machine.time = 101.0
        raise RuntimeError
    machine.time = 200.0
    assert clock.now() == 11.5, "a turn that failed has ended too"


def test_runs_in_turns_are_each_what_they_are_alone():
    loads = [(lognormal(0.8, 12, 20, 30, seed=1), 3), (chat(8, 2.0, 0.05, seed=2), None), ([WorkItem(0.0, [1], 1)], 1)]
    together, shared = [], Machine()
    for items, clients in loads:
        together.append(shared.run(items, clients))
    tokens = []
    in_turns(together, tokens.append)
    assert sum(tokens) == sum(run.output_tokens for run in together)
    for run, (items, clients) in zip(together, loads, strict=True):
        alone = Machine().run(items, clients)
        in_turns([alone])
        assert run.share == 1
        assert figures(run.engine.records) == pytest.approx(figures(alone.engine.records))


def test_runs_in_turns_end_together_whatever_their_lengths():
    machine, ends = Machine(), []
    runs = [machine.run(lognormal(0.5, requests, 30, 20, seed=requests), 4) for requests in (8, 80)]

    def watch(tokens):
        ends.append([run.share for run in runs])

    in_turns(runs, watch)
    middle = min(ends, key=lambda shares: abs(shares[0] - 0.5))
    assert middle == pytest.approx([0.5, 0.5], abs=0.05)


def predicted(machine, together):
    """Rows for two loads, fitted to a run on the same machine, played with them or before them."""
    pairs = [
        [machine.run(lognormal(0.8, 60, 24, 40, seed=3), 6) for _ in range(2)],
        [machine.run(chat(60, 1.2, 0.09, seed=7)) for _ in range(2)],
    ]
    recorded = machine.run(swelling(chat(180, 4.0, 0.06), waves=7))
    runs = [recorded, *pairs[0], *pairs[1]]
    for turn in [runs] if together else [[run] for run in runs]:
        in_turns(turn)
    cost = fit(recorded.engine.records, CONFIG, "fp32", 538e6)
    limits = {**LIMITS, "kv_memory": 1 << 28}
    return [row for pair in pairs
            for row in error_rows("", [figures(run.engine.records) for run in pair], replayed(cost, pair[0], limits))]


def test_a_drift_of_the_machine_misleads_one_run_after_another_and_not_runs_in_turns():
    after, together = (predicted(Machine(drift=0.2), together) for together in (False, True))
    assert sum(not row["within"] for row in after) >= 3
    assert max(abs(row["error_percent"]) for row in together) < 3
    assert max(row["apart_percent"] for row in together) < 3


def test_a_fit_keeps_by_how_much_like_steps_differ():
    """Every fourth step takes half as long again: the mean rises by an eighth, the median stays."""
    machine = Machine(stalls=0.25)
    recorded = machine.run(swelling(chat(180, 4.0, 0.06), waves=7))
    in_turns([recorded])
    cost = fit(recorded.engine.records, CONFIG, "fp32", 538e6)
    assert sum(cost.noise) / len(cost.noise) == pytest.approx(1)
    assert sorted(cost.noise)[len(cost.noise) // 2] == pytest.approx(1 / 1.125, abs=0.03)
    items = [WorkItem(0.0, [i + 1] * 16, 400) for i in range(6)]
    real = machine.run(items, 6)
    in_turns([real])
    limits = {**LIMITS, "kv_memory": 1 << 28}
    median, mean = figures(real.engine.records)["itl_p50_s"], replayed(cost, real, limits)
    assert sum(run["itl_p50_s"] for run in mean) / len(mean) == pytest.approx(median, rel=0.03)
    assert sum(run["tokens_per_s"] for run in mean) / len(mean) == pytest.approx(
        figures(real.engine.records)["tokens_per_s"], rel=0.03)


def test_noise_is_drawn_by_a_seed():
    noisy = FittedCost(CONFIG, "fp32", 538e6, 25e9, 7e9, 190e9, 2e-3, 0.0, noise=(0.5, 1.0, 1.5))

    def steps(cost):
        engine = virtual_engine(cost)
        play(engine, [WorkItem(0.0, [1, 2, 3], 50)])
        return [step.duration for step in engine.records.steps]

    costs = TRUE, *(replace(noisy, draw=Random(seed)) for seed in (0, 0, 1))
    quiet, first, again, other = map(steps, costs)
    assert first == again != other
    run = Machine().run([WorkItem(0.0, [1, 2, 3], 50)])
    limits = {**LIMITS, "kv_memory": 1 << 28}
    assert len({found["tokens_per_s"] for found in replayed(noisy, run, limits)}) == REPLAYS
    ratios = {round(took / usual, 6) for took, usual in zip(first, quiet, strict=True)}
    assert ratios == {0.5, 1.0, 1.5}


def test_a_swelling_load_has_steps_of_every_size_in_each_wave():
    items = chat(120, 8.0, 0.06)
    swollen = swelling(items, 2, 0.5, 2.0)
    assert [item.prompt_ids for item in swollen] == [item.prompt_ids for item in items]
    gaps = [(after.arrival - before.arrival) / (late.arrival - early.arrival)
            for before, after, early, late in zip(swollen, swollen[1:], items, items[1:], strict=False)]
    for wave in (gaps[:59], gaps[60:]):
        assert wave[0] == pytest.approx(2, rel=0.05) and wave[-1] == pytest.approx(0.5, rel=0.05)
        assert wave == sorted(wave, reverse=True)
    engine = virtual_engine(TRUE, **LIMITS)
    play(engine, swollen)
    sizes = [(step.start < swollen[60].arrival, step.rows.bit_length()) for step in engine.records.steps]
    assert set(sizes) >= {(wave, size) for wave in (True, False) for size in (1, 2, 3, 4)}  # 1 row, 2 to 3, ... 15
    assert 5 in {size for _, size in sizes}, "16 rows"


def test_the_experiment_runs_on_one_thread_and_a_look_on_eight_layers(monkeypatch):
    monkeypatch.setattr("minillm.measure.measurement.current_commit", lambda: "abc")
    monkeypatch.setattr(Setting, "model", tiny_model(num_hidden_layers=9, vocab_size=VOCAB))
    threads, seen = torch.get_num_threads(), []
    monkeypatch.setattr(prediction, "in_turns", lambda *given: seen.append(torch.get_num_threads()) or in_turns(*given))
    rows = prediction.virtual_prediction(Setting(quick=True)).rows
    assert set(seen) == {1} and torch.get_num_threads() == threads
    assert [row["layers"] for row in rows] == [8] * 6


def test_the_run_to_fit_to_swells_and_each_load_is_played_twice():
    setting, seconds = Setting(quick=True, seed=5), count()  # a step's clock is read twice or so: any rate will do
    recorded, loads = prediction.make_runs(setting, tiny_model(vocab_size=VOCAB), lambda: next(seconds) / 1e3, LIMITS)
    assert all(first.items == second.items and first.engine is not second.engine for first, second in loads.values())
    gaps = [after.arrival - before.arrival for before, after in pairwise(recorded.items)]
    steady = chat(len(recorded.items), 1.0, 0.05, seed=5)
    paces = [(after.arrival - before.arrival) / gap
             for (before, after), gap in zip(pairwise(steady), gaps, strict=True)]
    assert max(paces) / min(paces) > 6, "at its fastest the load comes eight times as fast as at its slowest"


def test_an_error_is_relative_has_a_sign_and_is_that_of_the_means():
    real = [dict.fromkeys(ALLOWED, 98.0), dict.fromkeys(ALLOWED, 102.0)]
    guesses = [dict(zip(ALLOWED, values, strict=True)) for values in ((103, 89, 108), (105, 89, 110))]
    rows = error_rows("load", real, guesses)
    assert [round(row["error_percent"], 6) for row in rows] == [4, -11, 9]
    assert [row["within"] for row in rows] == [True, False, True]
    assert [row["apart_percent"] for row in rows] == [pytest.approx(4)] * 3
