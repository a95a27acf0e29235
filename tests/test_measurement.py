"""Measurements: timed after a synchronise, saved with their provenance, refused where they cannot be right."""

import json
import subprocess
from dataclasses import replace

import pytest
import torch

from minillm.course.ledger import find_all
from minillm.measure import measurement
from minillm.measure.measurement import Measurement, MeasurementError, Provenance, Spread, provenance, time_seconds

HERE = Provenance(
    device="Some GPU 80GB", driver="1", torch="2", dtype="bf16", model="m", commit="abc", date="2026-01-01", seed=0,
    warmups=2, repeats=5, noise={"min": 1.0, "median": 2.0, "max": 3.0}, bandwidth_gb_per_s=1700.0,
)


def test_saved_and_loaded_is_the_same(tmp_path):
    measured = Measurement("decode", HERE, [{"batch_rows": 1, "step_ms": 9.4, "read_gb_per_s": 1397.0, "mbu": 0.82}])
    path = measured.save(tmp_path)
    assert path == tmp_path / "some-gpu-80gb" / "decode.json"
    assert Measurement.load("Some GPU 80GB", "decode", tmp_path) == measured
    assert Measurement.load("some-gpu-80gb", "decode", tmp_path) == measured


@pytest.mark.parametrize("field", ["commit", "device"])
@pytest.mark.parametrize("absent", ["missing", "empty"])
def test_without_commit_or_device_it_is_refused(tmp_path, field, absent):
    path = Measurement("decode", HERE).save(tmp_path)
    stored = json.loads(path.read_text())
    if absent == "missing":
        del stored["provenance"][field]
    else:
        stored["provenance"][field] = ""
    path.write_text(json.dumps(stored))
    with pytest.raises(MeasurementError, match=f"decode: no {field} is named"):
        Measurement.load(HERE.device, "decode", tmp_path)
    with pytest.raises(MeasurementError):
        Measurement("decode", replace(HERE, **{field: ""})).save(tmp_path)


@pytest.mark.parametrize(
    ("column", "value", "share"), [("read_gb_per_s", 1870.0, "110%"), ("mbu", 1.02, "102%"), ("mfu", 2.0, "200%")]
)
def test_more_than_the_device_can_do_is_refused(tmp_path, column, value, share):
    path = Measurement("decode", HERE, [{"mbu": 1.0, "read_gb_per_s": 1700.0}, {"step_ms": 1}]).save(tmp_path)
    path.write_text(path.read_text().replace('"step_ms": 1', f'"{column}": {value}'))
    with pytest.raises(MeasurementError, match=f"decode, row 1: {column} .* is {share} of what"):
        Measurement.load(HERE.device, "decode", tmp_path)


def test_an_unknown_measurement_names_the_known_ones(tmp_path):
    Measurement("decode", HERE).save(tmp_path)
    with pytest.raises(MeasurementError, match="no measurement some-gpu-80gb/prefill; known: some-gpu-80gb/decode"):
        Measurement.load(HERE.device, "prefill", tmp_path)
    with pytest.raises(MeasurementError, match="no measurement tpu/decode; known: some-gpu-80gb/decode"):
        Measurement.load("TPU", "decode", tmp_path)


def test_a_file_that_is_no_measurement_says_so(tmp_path):
    path = Measurement("decode", HERE).save(tmp_path)
    stored = json.loads(path.read_text())
    del stored["provenance"]["seed"]
    path.write_text(json.dumps(stored))
    with pytest.raises(MeasurementError, match="not a measurement: .*seed"):
        Measurement.load(HERE.device, "decode", tmp_path)


@pytest.mark.parametrize(
    "damage",
    [lambda text: "", lambda text: text[: len(text) // 2], lambda text: "[1, 2]", lambda text: "\x89PNG",
     lambda text: text.replace('"rows": []', '"rows": [3]'), lambda text: text.replace('"rows": []', '"rows": 3'),
     lambda text: text.replace('"cut_at_s": null', '"cut_at_s": [3]'),
     lambda text: text.replace('"driver": "', '"driver": 5, "date": "')],
    ids=["empty", "cut off", "a list", "a picture", "a row that is none", "rows that are none", "a budget that is none",
         "a driver that is none"],
)
def test_a_damaged_file_is_refused_by_its_name_and_costs_one_claim_its_verdict(damage, tmp_path):
    path = Measurement("decode_step", HERE).save(tmp_path)
    path.write_text(damage(path.read_text()))
    with pytest.raises(MeasurementError, match="some-gpu-80gb/decode_step: not a measurement"):
        Measurement.load(HERE.device, "decode_step", tmp_path)
    (finding,) = [finding for finding in find_all(tmp_path) if finding.device == "some-gpu-80gb"]
    assert finding.claim.id == "A1" and finding.measured.startswith("refused: some-gpu-80gb/decode_step")


def test_provenance_of_this_machine_is_complete(monkeypatch):
    monkeypatch.setattr(measurement, "current_commit", lambda: "abc")
    found = provenance("tiny", "fp32", "cpu", seed=3, spread=Spread.of([1.0, 3.0, 2.0], warmups=1))
    assert found.device and found.driver and found.torch == torch.__version__ and found.date.endswith("+00:00")
    assert (found.warmups, found.repeats, found.noise) == (1, 3, {"min": 1.0, "median": 2.0, "max": 3.0})
    assert f"{torch.get_num_threads()} threads" in found.device


class FakeDevice:
    """Work is only queued by a call, and done at the synchronise, which takes its time."""

    def __init__(self, monkeypatch, module):
        self.now, self.queued, self.calls = 0.0, 0.0, []
        monkeypatch.setattr(measurement.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(module, "synchronize", self.synchronize)

    def work(self):
        self.calls.append("work")
        self.now += 1e-6  # the launch
        self.queued += 1.0 if len(self.calls) > 6 else 50.0  # the first calls compile

    def synchronize(self):
        self.calls.append("sync")
        self.now, self.queued = self.now + self.queued, 0.0


def test_the_device_is_synchronised_before_both_readings_and_warm_ups_are_left_out(monkeypatch):
    device = FakeDevice(monkeypatch, torch.cuda)
    spread = time_seconds(device.work, "cuda", warmups=2, repeats=3)
    assert device.calls == ["sync", "work", "sync"] * 5
    assert (spread.min, spread.max) == (pytest.approx(1.0, abs=1e-3), pytest.approx(1.0, abs=1e-3))
    assert (spread.repeats, spread.warmups) == (3, 2)


def test_a_cpu_is_timed_without_a_cuda_call(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: pytest.fail("CUDA was called"))
    assert time_seconds(lambda: sum(range(1000)), "cpu", warmups=0, repeats=3).min > 0


def test_the_commit_is_this_checkout_s_or_none(monkeypatch):
    commit = measurement.current_commit()
    assert commit == "" or len(commit.removesuffix("-dirty")) == 40
    monkeypatch.setattr(measurement, "_output", lambda *command: "")
    assert measurement.current_commit() == ""


def test_what_was_recorded_does_not_make_a_checkout_dirty(tmp_path, monkeypatch):
    def git(*words):
        who = "-c", "user.name=a", "-c", "user.email=a@example.org"
        subprocess.run(["git", "-C", tmp_path, *who, *words], check=True, capture_output=True)

    module, recorded = tmp_path / "package" / "module.py", tmp_path / "notebooks" / "measurements" / "one.json"
    for file in (module, recorded):
        file.parent.mkdir(parents=True)
        file.write_text("before")
    git("init")
    git("add", ".")
    git("commit", "-m", "first")
    monkeypatch.setattr(measurement, "__file__", str(module))
    clean = measurement.current_commit()
    recorded.write_text("after")
    assert measurement.current_commit() == clean and len(clean) == 40
    module.write_text("after")
    assert measurement.current_commit() == f"{clean}-dirty"
