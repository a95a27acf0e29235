"""Experiments by name: each leaves a file that loads again, and none takes another with it."""

from __future__ import annotations

import json
import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from tiny import random_tensors, tiny_config, tiny_model
from toy_files import TOKENS, write_gguf

from minillm.cli import main
from minillm.course import catalogue as experiments
from minillm.course.catalogue import EXPERIMENTS, Experiment, run_experiment
from minillm.course.experiments.speculation import ADAPTIVE
from minillm.course.ledger import LEDGER, find_all
from minillm.course.setting import Setting
from minillm.course.show.recorded import heading
from minillm.course.verdicts import HOLDS, IN_DIRECTION, INCONCLUSIVE, OTHER_REASON, TOO_SMALL
from minillm.measure.measurement import EXACT, VIRTUAL, Measurement, MeasurementError, measurement_path, provenance
from minillm.measure.roofline import Ceilings

VOCABULARY = 49_152  # of the default model's tokenizer


@pytest.fixture(autouse=True)
def tiny(monkeypatch, tmp_path):
    """Every setting's model is tiny, every commit is known, and files go to a folder of the test's own."""
    monkeypatch.setattr(Setting, "model", tiny_model(vocab_size=VOCABULARY))
    # out of reach: such a model fits into a cache
    monkeypatch.setattr(Setting, "measure_ceilings", lambda self: Ceilings(1e15, 1e15))
    monkeypatch.setattr("minillm.measure.measurement.current_commit", lambda: "abc")
    monkeypatch.setattr("minillm.course.catalogue.current_commit", lambda: "abc")
    monkeypatch.chdir(tmp_path)


def small_gguf(folder: Path) -> Path:
    """A model of ours as a file that llama.cpp reads, in place of the one that is downloaded."""
    config = tiny_config("t8-2", vocab_size=len(TOKENS), max_position_embeddings=2048)
    return write_gguf(folder / "toy.gguf", config, random_tensors(config, std=0.2))


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_leaves_a_file_that_loads_again(name, tmp_path, smollm2_dir, monkeypatch):
    if name == "beside_llama_cpp":
        pytest.importorskip("xllamacpp", reason="llama.cpp's wheel is not made for this platform")
        monkeypatch.setattr("minillm.course.experiments.llama_cpp.fetch_gguf", lambda: small_gguf(tmp_path))
    outcome = run_experiment(name, Setting(quick=True))
    assert outcome.measurement.rows and outcome.seconds > 0
    assert (outcome.measurement.provenance.device not in (VIRTUAL, EXACT)) == EXPERIMENTS[name].on_device
    outcome.measurement.save(tmp_path)
    again = Measurement.load(outcome.measurement.provenance.device, name, tmp_path)
    assert json.dumps(again.rows) == json.dumps(outcome.measurement.rows)
    for row in again.rows:
        for column in row:
            base = column.removesuffix("_min")
            if base != column and base in row and row[column] is not None:
                assert row[column] <= row[base] <= row[f"{base}_max"], f"{base} lies outside of its spread"
    check_verdicts(name, tmp_path)


def check_verdicts(name: str, root) -> None:
    """Its claims can be judged by these rows. What no clock is in, or only a virtual one, must also speak for them
    or be too small for that; at these sizes some others settle nothing yet."""
    claims = tuple(claim for claim in LEDGER if claim.id in EXPERIMENTS[name].claims)
    for finding in find_all(root, claims):
        assert "no row with" not in finding.measured, "the verdict looks for rows under other names"
        assert "not what its rule reads" not in finding.measured
        assert finding.claim.id[0] not in "AB" or "no runs in turns" not in finding.measured or finding.kind == VIRTUAL
        if finding.kind in (VIRTUAL, EXACT):
            speaks = finding.verdict in (HOLDS, IN_DIRECTION, OTHER_REASON, TOO_SMALL)
            tied = finding.claim.id == "F5" and finding.verdict == INCONCLUSIVE  # a full queue orders set-ups as well
            assert speaks or tied, f"{finding.claim.id}: {finding.measured}"

COMPARED = {  # in virtual time: what a verdict compares has a spread over three seeds
    "worked_example": ("tokens_per_s", "latency_p99_s"), "pools": ("chat_ttft_p99_s", "heap_tokens_per_s"),
    "caps_and_caching": ("latency_p99_s", "queue_p99_s"), "disaggregation": ("itl_p99_ms", "ttft_p99_s"),
    "load_sweep": ("tokens_per_s", "latency_p99_s"), "output_caps": ("mean_rows", "latency_p99_s"),
    "replicas": ("tokens_per_s", "mean_rows", "times_one"), "out_of_cache": ("refused_share", "busy_share"),
    "achieved_batch": ("mean_rows", "tokens_per_s", "ttft_p50_s"), "cures": ("before", "after", "times_better"),
}


@pytest.mark.parametrize("name", COMPARED)
def test_what_virtual_time_compares_differs_by_seed(name):
    rows = run_experiment(name, Setting(quick=True, seed=7)).measurement.rows
    for column in COMPARED[name]:
        assert all(row["turns"] == 3 and row["seeds"] == [7, 8, 9] for row in rows)
        assert any(row[f"{column}_min"] < row[f"{column}_max"] for row in rows), f"{column} is the same for every seed"


def fake(name: str, rows: int = 3) -> Experiment:
    """An experiment whose rows are numbers, checked against the budget between one and the next."""

    def run(setting):
        shown = [{"number": number} for number in setting.each(name, range(rows))]
        return Measurement(name, provenance("m", "fp32", "cpu", 0, None), shown)

    return Experiment(name, run, "numbers")


def broken(setting):
    raise RuntimeError("the device is on fire")


@pytest.fixture
def three(monkeypatch):
    listed = {name: fake(name) for name in ("first", "last")}
    listed = {"first": listed["first"], "broken": Experiment("broken", broken, "fails"), "last": listed["last"]}
    monkeypatch.setattr(experiments, "EXPERIMENTS", listed)


def files(folder) -> set[str]:
    return {path.stem for path in folder.glob("*/*.json")}


def test_one_that_fails_does_not_stop_the_others(three, tmp_path, capsys):
    assert main(["measure", "--json", "-"]) == 1
    said = capsys.readouterr()
    assert files(tmp_path / "measurements") == {"first", "last"}
    assert "broken failed: RuntimeError: the device is on fire" in said.err
    result = json.loads(said.out.splitlines()[-1])
    assert [m["experiment"] for m in result["measurements"]] == ["first", "last"]
    assert list(result["failed"]) == ["broken"]


def test_one_alone_prints_its_measurement_last(three, tmp_path, capsys):
    assert main(["measure", "first", "--json", "-", "--out", str(tmp_path / "here")]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["rows"] == [{"number": 0}, {"number": 1}, {"number": 2}] and result["provenance"]["commit"] == "abc"
    assert files(tmp_path / "here") == {"first"}


def test_a_spent_budget_leaves_out_the_later_rows_and_says_so(three, capsys):
    assert main(["measure", "first", "--budget-s", "0", "--json", "-"]) == 0
    said = capsys.readouterr().out
    result = json.loads(said.splitlines()[-1])
    assert (result["rows"], result["cut_at_s"]) == ([{"number": 0}], 0)
    assert "cut at its budget of 0 s: rows are missing" in said


SWEEPS = {"decode": 1, "batch_curve": 1, "roofline_steps": 1, "prefill": 1, "cost_by_length": 1, "gain_by_spread": 1,
          "cost_of_blocks": 1,
          # step costs of one batch, a check of sampling, n-grams on copies of one length and adaptive, their crossover
          "speculation": len({0, 1, 2, 4, 7, ADAPTIVE}) + 1 + 2 + 1}


@pytest.mark.parametrize("name", SWEEPS)
def test_a_spent_budget_ends_the_sweep_of_an_experiment_after_its_first_value(name, smollm2_dir):
    found = run_experiment(name, Setting(quick=True, budget_s=0)).measurement
    assert len(found.rows) == SWEEPS[name] and found.cut_at_s == 0
    assert heading(found).endswith("cut at its budget of 0 s: rows are missing")


def test_a_budget_that_cannot_be_kept_is_reported():
    assert "past its budget of 1 s" in experiments.Outcome(Measurement("knee", None), 2.0).report(1.0)


def test_resume_leaves_out_what_this_commit_has(three, capsys, monkeypatch):
    main(["measure", "first"])
    main(["measure", "first", "last", "--resume"])
    said = capsys.readouterr().out
    assert "first: this commit has it already" in said and said.count("last: ") == 1
    for commit in ("def", "abc-dirty"):
        monkeypatch.setattr("minillm.course.catalogue.current_commit", lambda commit=commit: commit)
        main(["measure", "first", "--resume"])
        assert "already" not in capsys.readouterr().out


def test_resume_runs_again_what_a_smaller_budget_cut(three, capsys):
    for budget, runs in (("0", True), ("0", False), ("60", True), ("90", False), (None, False)):
        main(["measure", "first", "--resume", *(["--budget-s", budget] if budget else [])])
        assert ("already" not in capsys.readouterr().out) == runs, f"budget {budget}"
    main(["measure", "last", "--budget-s", "0"])
    main(["measure", "last", "--resume"])
    assert "already" not in capsys.readouterr().out, "no budget is larger than any"


@pytest.mark.parametrize("damage", ["", "{", '{"experiment": "first"}'])
def test_resume_runs_again_what_cannot_be_read(damage, three, capsys, tmp_path):
    main(["measure", "first"])
    (file,) = tmp_path.glob("measurements/*/first.json")
    file.write_text(damage)
    assert main(["measure", "first", "--resume"]) == 0
    assert "already" not in capsys.readouterr().out and json.loads(file.read_text())["rows"]


@pytest.mark.parametrize("names", [["nonsense"], ["first", "nonsense"]])
def test_an_unknown_experiment_is_refused_before_any_runs(three, capsys, tmp_path, names):
    assert main(["measure", *names]) == 2
    assert "unknown experiment 'nonsense'; known: first, broken, last" in capsys.readouterr().err
    assert not files(tmp_path / "measurements")


def test_quick_rows_are_never_kept_among_the_recorded_ones(three, capsys):
    assert main(["measure", "first", "--quick", "--save"]) == 2
    assert "--save is for full sizes" in capsys.readouterr().err


def test_rows_under_another_name_are_refused(monkeypatch):
    monkeypatch.setitem(EXPERIMENTS, "one", Experiment("one", fake("two").run, "misnamed"))
    with pytest.raises(MeasurementError, match="one returned the rows of 'two'"):
        run_experiment("one", Setting())


def test_all_run_without_a_model_first_and_then_the_cheapest(monkeypatch, capsys):
    order = experiments.in_running_order()
    assert sorted(order) == sorted(EXPERIMENTS)
    kinds = [EXPERIMENTS[name].on_device for name in order]
    assert kinds == sorted(kinds) and kinds[0] != kinds[-1]
    seconds = [EXPERIMENTS[name].seconds for name in order if EXPERIMENTS[name].on_device]
    assert seconds == sorted(seconds)
    dear, cheap, counted = fake("dear"), fake("cheap"), fake("counted")
    listed = {"dear": replace(dear, seconds=9.0), "cheap": cheap,
              "counted": replace(counted, seconds=20.0, on_device=False)}
    monkeypatch.setattr(experiments, "EXPERIMENTS", listed)
    for arguments, expected in ((["--all"], ["counted", "cheap", "dear"]), (["dear", "cheap"], ["dear", "cheap"])):
        main(["measure", *arguments])
        said = capsys.readouterr().out
        assert [line.split(":")[0] for line in said.splitlines() if line.startswith(tuple(listed))] == expected


def test_the_bar_shows_the_whole_list_and_one_alone_what_it_is(three, monkeypatch, capsys):
    labels = []
    monkeypatch.setattr("minillm.course.commands.ticking", lambda label: labels.append(label) or nullcontext())
    main(["measure"])
    assert [re.sub(r"\d+ s", "N s", label) for label in labels] == [
        "[--------------------] 0 of 3 done, N s so far, now first",
        "[######--------------] 1 of 3 done, N s so far, now broken",
        "[#############-------] 2 of 3 done, N s so far, now last"]
    main(["measure", "first"])
    assert labels[3] == "first, numbers"


def test_the_table_shows_a_spread_in_the_cell_of_its_figure(monkeypatch, capsys):
    rows = [{"rows": 1, "step_ms": 2.0, "step_ms_min": 1.5, "step_ms_max": 9.0},
            {"rows": 8, "step_ms": None, "step_ms_min": None, "step_ms_max": None}]
    source = provenance("m", "fp32", "cpu", 0, None)
    one = Experiment("one", lambda setting: Measurement("one", source, rows), "numbers")
    monkeypatch.setattr(experiments, "EXPERIMENTS", {"one": one})
    main(["measure", "one"])
    said = capsys.readouterr().out
    assert "2 (1.5-9)" in said and "step ms min" not in said and "8  -" in said


def test_the_list_names_them_all(capsys):
    assert main(["measure", "--list"]) == 0
    assert {line.split()[0] for line in capsys.readouterr().out.splitlines()[2:]} == set(EXPERIMENTS)


def test_measurements_lie_in_the_checkout_wherever_one_works(tmp_path):
    """The notebooks run in their own folder, commands in another."""
    from minillm.measure.measurement import CHECKOUT, MEASUREMENTS

    assert MEASUREMENTS == CHECKOUT / "notebooks" / "measurements" and MEASUREMENTS.is_absolute()
    assert measurement_path("cpu", "first").is_relative_to(CHECKOUT)


def test_measurements_lie_in_a_room_kit_and_not_in_just_any_folder_of_notebooks(tmp_path):
    """In a kit the package lies among other packages, and only the kit's folder has the recorded figures."""
    from minillm.measure.measurement import course_root

    installed, mine, kit = (tmp_path / name for name in ("site-packages", "mine", "kit"))
    for folder in (installed, mine / "notebooks", kit / "notebooks" / "measurements"):
        folder.mkdir(parents=True)
    assert course_root(installed, mine, kit) == kit and course_root(kit, mine) == kit
    assert not course_root(installed, mine).is_absolute()  # the current folder


def test_measuring_the_knee_draws_it_beside_the_file(tmp_path, capsys, smollm2_dir):
    assert main(["measure", "knee", "--quick"]) == 0
    (picture,) = tmp_path.glob("measurements/*/knee.png")
    assert picture.stat().st_size > 10_000 and "<- knee" in capsys.readouterr().out
