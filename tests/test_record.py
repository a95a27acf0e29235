"""`minillm record`: parts under limits, results as they come, and the machine whose lacks `rehearsal.py` fakes."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
import rehearsal
from tiny import random_tensors, tiny_config
from toy_files import TOKENS, write_gguf

from minillm.cli import main
from minillm.course import catalogue, record
from minillm.course.record import CALLS, Part, Recording
from minillm.load import DEFAULT
from minillm.load import source as model_source


def python(name: str, code: str, limit_s: float = 60) -> Part:
    """A part that runs a few lines of Python."""
    return Part(name, limit_s, (), (code,), module="code_part")


@pytest.fixture
def call(monkeypatch, tmp_path):
    """A call of parts that are lines of Python; returns whether all are done, and what was said."""
    monkeypatch.setenv("MINILLM_COMMIT", "abc")
    monkeypatch.setattr(record, "current_commit", lambda: "abc")
    monkeypatch.setattr(record, "gather_model", lambda say: False)
    monkeypatch.setattr(record, "LEAST_S", 1)
    monkeypatch.setattr(Recording, "command", lambda self, part: [sys.executable, "-c", *part.rehearsal])
    said = []

    def run(*parts: Part, seconds: float = 120, packed: Path | None = None):
        monkeypatch.setitem(CALLS, 1, parts)
        said.clear()
        recording = Recording(tmp_path / "out", rehearse=True, packed=packed, say=said.append)
        return recording.call(1, seconds), "\n".join(said)

    run.out = tmp_path / "out"
    return run


def test_a_part_that_hangs_or_fails_costs_its_limit_and_takes_no_other_with_it(call):
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    began = time.monotonic()
    done, said = call(python("hangs", child, limit_s=2 / 3), python("fails", "raise SystemExit(3)"),
                      python("works", "print('found it')"))
    assert not done and time.monotonic() - began < 30
    state = json.loads((call.out / "state.json").read_text())
    assert [each["ended"] for each in state.values()] == ["stopped at its limit of 2 s", "failed with status 3", "done"]
    assert "    found it" in said and (call.out / "logs" / "works.log").read_text() == "found it\n"


def test_the_same_call_again_runs_what_is_missing(call, tmp_path, monkeypatch):
    flag = tmp_path / "flag"
    needs_flag = f"import pathlib, sys; sys.exit(not pathlib.Path({str(flag)!r}).exists())"
    parts = python("one", "print(1)"), python("two", needs_flag)
    assert not call(*parts)[0]
    flag.touch()
    done, said = call(*parts)
    assert done and "one: done already" in said and "two: done, " in said
    monkeypatch.setattr(record, "current_commit", lambda: "def")
    assert "done already" not in call(*parts)[1], "another commit's figures"


def test_what_was_found_is_packed_after_each_part_and_goes_on_on_a_fresh_machine(call, tmp_path):
    packed = tmp_path / "OUT" / "record.tar.gz"
    sees = f"import tarfile; print([m.name for m in tarfile.open({str(packed)!r}) if m.name.endswith('log')])"
    call(python("one", "print(1)"), python("two", sees), packed=packed)
    assert "logs/one.log" in (call.out / "logs" / "two.log").read_text(), "packed before the second part ran"
    call.out.rename(tmp_path / "lost")
    done, said = call(python("one", "print(1)"), python("three", "print(3)"), packed=packed)
    assert done and "one: done already" in said
    with tarfile.open(packed) as tar:
        assert {"state.json", "logs/two.log", "logs/three.log"} <= set(tar.getnames())


def test_no_part_begins_when_the_call_s_time_is_over_and_none_runs_past_it(call):
    began = time.monotonic()
    done, said = call(python("long", "import time; time.sleep(60)"), python("late", "print(1)"),
                      seconds=record.GRACE_S + 3)
    assert not done and time.monotonic() - began < record.GRACE_S + 3
    assert "long: stopped at its limit of 3 s" in said and "late: left out: no time is left" in said


def test_what_needs_the_model_is_left_out_where_it_is_missing(call):
    done, said = call(Part("quality", 9, (), ("print(1)",), needs_model=True), python("one", "print(1)"))
    assert not done and "quality: left out" in said and "one: done" in said


def test_a_commit_must_be_known_and_a_call_too(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(record, "current_commit", lambda: "")
    assert main(["record", "1", "--out", str(tmp_path)]) == 2 and "MINILLM_COMMIT" in capsys.readouterr().err
    assert main(["record", "9"]) == 2 and "unknown call '9'" in capsys.readouterr().err
    assert main(["record", "1", "--only", "decode,nonsense"]) == 2 and "no part nonsense" in capsys.readouterr().err


def test_the_calls_fit_and_name_what_there_is():
    """What decides the targets, and 27 of the 30 minutes for all."""
    names = [part.name for parts in CALLS.values() for part in parts]
    assert len(set(names)) == len(names)
    for number, parts in CALLS.items():
        assert sum(part.limit_s for part in parts) <= (540 if number < 4 else 1000)
        for part in parts:
            if part.arguments[0] == "measure":
                assert catalogue.find(part.arguments[1]).on_device
                assert float(part.arguments[-1]) < part.limit_s, "no time to write what it has"


def test_the_model_comes_in_pieces_and_is_joined_when_all_are_here(tmp_path, monkeypatch):
    config = tiny_config("t8-2", vocab_size=len(TOKENS), max_position_embeddings=2048)
    whole = write_gguf(tmp_path / "toy.gguf", config, random_tensors(config))
    monkeypatch.setattr(model_source, "fetch_gguf", lambda: whole)
    monkeypatch.setattr(model_source, "_check_sha256", lambda path, expected: None)
    monkeypatch.setattr(record, "CHECKOUT", tmp_path / "there")
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path / "cache"))
    said, paths = [], record.split_model(tmp_path / "here")
    assert sum(path.stat().st_size for path in paths[:-1]) == whole.stat().st_size
    for number, path in enumerate(paths[:-1]):
        record.carried().mkdir(parents=True, exist_ok=True)
        path.rename(record.carried() / path.name)
        assert record.gather_model(said.append) == (number == record.PIECES - 1)
        (record.carried() / path.name).unlink()  # a later call brings another, and this one is no longer there
    assert (tmp_path / "cache" / f"{DEFAULT}-{model_source.CONVERSION}" / "config.json").is_file()
    code = f"import sys; sys.path[:] = [p for p in sys.path if 'site-packages' not in p]; " \
           f"sys.path.insert(0, {str(paths[-1])!r}); import importlib.util as u; print(u.find_spec('gguf').origin)"
    origin = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
    assert origin.strip().endswith("gguf.zip/gguf/__init__.py")


@pytest.mark.parametrize("parts", [
    "decode,decode_by_format", pytest.param("", marks=pytest.mark.slow)], ids=["two parts", "all of call 1"])
def test_a_call_where_there_is_no_git_no_network_and_no_gguf(parts, tmp_path):
    copy, environment = rehearsal.fake_machine(tmp_path)
    packed = tmp_path / "OUT" / "record.tar.gz"
    done = rehearsal.call(copy, environment, "1", "--rehearse", "--only", parts, "--pack", str(packed))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 of 3 pieces" in done.stdout and "Python 3" in done.stdout and "torch" in done.stdout
    with tarfile.open(packed) as tar:
        found = [json.load(tar.extractfile(name)) for name in tar.getnames() if name.endswith(".json") and "/" in name]
    assert {"decode", "decode_by_format"} <= {each["experiment"] for each in found}
    assert all(each["provenance"]["commit"] == rehearsal.COMMIT for each in found)
