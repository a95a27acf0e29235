"""The command line under a user who mistypes, and a shell that closes the pipe."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from minillm.cli import main

ROOT = Path(__file__).resolve().parent.parent


def complaint(capsys, *argv: str) -> str:
    """The one line on stderr of a command that must fail with status 2."""
    try:
        status = main(list(argv))
    except SystemExit as end:  # argparse's own way
        status = end.code
    error = capsys.readouterr().err
    assert status == 2 and "Traceback" not in error
    return error.strip().splitlines()[-1]


def test_a_reader_that_closes_the_pipe_ends_it_without_a_word():
    """As `minillm claims | head -1` does, where the rest no longer fits the pipe."""
    reader, writer = os.pipe()
    os.close(reader)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "minillm", "capacity", "--presets"]
    try:
        done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, env=environment)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("where", ["nowhere/result.json", "."])
def test_a_result_that_cannot_be_written_is_refused_before_anything_runs(where, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert f"{where} cannot be written" in complaint(capsys, "capacity", "--json", where)


def test_a_result_goes_to_a_file(tmp_path, capsys):
    assert main(["capacity", "--json", str(tmp_path / "result.json")]) == 0
    assert json.loads((tmp_path / "result.json").read_text())["max_concurrent"] > 0


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("simulate worked-example --kv-format int8", "worked-example has no --kv-format"),
        ("simulate worked-example --max-batch 8", "worked-example has no --max-batch"),
        ("simulate chat --compute-prompts", "chat has no --compute-prompts"),
        ("simulate chat --requests 2 --clients 2 --rate 3", "leave one of them"),
        ("simulate trace --trace .", "Is a directory"),
        ("simulate trace", "`trace` and --trace FILE belong together"),
        ("simulate chat --trace x.csv", "`trace` and --trace FILE belong together"),
        ("simulate chat --scale 1e9 --requests 2", "the pool has"),
        ("simulate chat --seed -1", "seed -1 must be a whole number from 0 up"),
        ("capacity --memory-gb 1e308", "memory_bytes inf"),
        ("capacity --context 100000", "context 100,000 > 8,192 positions"),
        ("capacity --model qwen3-8b", "near it: qwen3-0.6b"),
        ("simulate chat --requests 1000000000000", "is more than 1,000,000"),
        ("bench peers --repeats 0", "repeats 0 must be a finite number from 1 up"),
        ("bench decode --url http://127.0.0.1:1/v1", "no client sees"),
        ("bench peers --text", "--text is for --url"),
        ("bench chat --clients 0", "clients 0 must be a finite number from 1 up"),
        ("bench peers --rate 3", "'peers' has no rate"),
        ("bench peers --clients 2 --against transformers", "--against has no --rate and no --clients"),
        ("bench decode --clients 2", "decode has no --rate and no --clients"),
        ("bench chat --url nonsense --requests 1", "not a server's URL"),
        ("claims --root nowhere", "not a folder"),
        ("claims Z9", "unknown claim 'Z9'; known: A1"),
        ("grade --class nowhere --report out", "no folder"),
        ("fetch --from nowhere.whl", "no file"),
    ],
)
def test_wrong_options_are_one_line_that_names_them(command, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path / "cache"))
    assert message in complaint(capsys, *command.split())


@pytest.mark.parametrize(
    ("encoding", "shown"), [("cp1252", "caf\xe9 ? ?"), ("ascii", "caf? ? ?"), ("utf-8", "caf\xe9 \N{GRINNING FACE} ?")]
)
def test_a_console_that_lacks_a_character_shows_the_rest(encoding, shown):
    code = (
        "import argparse, sys\n"
        "from minillm import cli\n"
        "def add(commands):\n"
        "    parser = commands.add_parser('say')\n"
        "    parser.set_defaults(run=lambda arguments: print('caf\\u00e9 \\U0001f600 \\ud800') or 0)\n"
        "cli.COMMANDS = [add]\n"
        "sys.exit(cli.main(['say']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True,
                          env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": encoding})
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.decode(encoding).strip() == shown


def test_a_simulated_cost_has_its_currency_and_price(capsys):
    assert main(["simulate", "chat", "--requests", "2", "--device", "h100", "--price", "4"]) == 0
    assert "US dollars, at $4 an hour of each device" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "absent", "extra"),
    [
        ("measure capacity_sum", "matplotlib", ".[lab]"),
        ("bench peers --requests 1 --scale 0.1 --model random:smollm2-135m --against transformers", "transformers",
         ".[test]"),
    ],
)
def test_what_a_bare_install_lacks_is_named_with_its_extra(command, absent, extra, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, absent, None)
    monkeypatch.delitem(sys.modules, "minillm.course.show.plots", raising=False)
    line = complaint(capsys, *command.split())
    assert absent in line and extra in line
    assert not list(tmp_path.rglob("*.json")), "said before anything ran"
