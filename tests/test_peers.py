"""Other engines beside ours: llama.cpp on a toy file, a stand-in for vLLM's process, and what is said without them."""

from __future__ import annotations

import sys

import pytest
from tiny import random_tensors, tiny_config, tiny_model
from toy_files import TOKENS, write_gguf

from minillm.cli import bench as command
from minillm.load.source import DEFAULT
from minillm.measure import peers as module
from minillm.measure.bench import peer_row
from minillm.measure.peers import CONTINUOUS, PEERS, VLLM_PYTHON, NoPeer, peers
from minillm.measure.workload import WorkItem

ITEMS = [WorkItem(0.0, [5 + i] * 4, 3 + i) for i in range(3)]
FAKE_VLLM = """#!{python}
import json, sys
{before}
print(json.dumps("ready"), flush=True)
for line in sys.stdin:
    work = json.loads(line)
    print(json.dumps([sum(tokens for _, tokens in work), 2.0]), flush=True)
"""


def fake_vllm(tmp_path, monkeypatch, before: str = "") -> None:
    file = tmp_path / "python"
    file.write_text(FAKE_VLLM.format(python=sys.executable, before=before))
    file.chmod(0o755)
    monkeypatch.setenv(VLLM_PYTHON, str(file))
    monkeypatch.setattr(module, "locate", lambda name: tmp_path)


def test_llama_cpp_answers_every_item_in_full(tmp_path, monkeypatch):
    pytest.importorskip("xllamacpp", reason="llama.cpp's wheel is not made for this platform")
    config = tiny_config("t8-2", vocab_size=len(TOKENS), max_position_embeddings=2048)
    file = write_gguf(tmp_path / "toy.gguf", config, random_tensors(config, std=0.2))
    monkeypatch.setattr(module, "fetch_gguf", lambda: file)
    with peers("llama.cpp", DEFAULT, tiny_model(vocab_size=len(TOKENS)), ITEMS) as engines:
        ((name, run),) = engines.items()
        assert name == "llama.cpp, 4-bit weights"
        tokens, seconds = run(ITEMS)
        assert tokens == 3 + 4 + 5 and seconds > 0


def test_a_process_is_asked_in_its_turn_and_ended_at_the_end(tmp_path, monkeypatch):
    fake_vllm(tmp_path, monkeypatch)
    with peers("vllm", DEFAULT, tiny_model(), ITEMS) as engines:
        process = engines["vLLM"].__self__.process
        assert [engines["vLLM"](ITEMS) for _ in range(2)] == [(12, 2.0)] * 2
        assert process.poll() is None
    assert process.poll() is not None


def test_a_process_that_ends_is_an_error_and_one_that_does_not_start_says_why(tmp_path, monkeypatch):
    fake_vllm(tmp_path, monkeypatch, "sys.exit('no such kernel')")
    with pytest.raises(NoPeer, match=r"vllm can't run beside: it did not start: no such kernel"):
        peers("vllm", DEFAULT, tiny_model(), ITEMS).__enter__()
    fake_vllm(tmp_path, monkeypatch, "print(0, flush=True); sys.exit(1)")
    ended = pytest.raises(RuntimeError, match="vLLM ended before its answer")
    with peers("vllm", DEFAULT, tiny_model(), ITEMS) as engines, ended:
        engines["vLLM"](ITEMS)


def test_all_takes_those_that_are_here_and_says_what_the_others_lack(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(module, "find_spec", lambda name: None)  # as if it were not installed
    monkeypatch.setenv(VLLM_PYTHON, str(tmp_path / "nowhere"))
    monkeypatch.setattr(module, "load_reference", lambda name, model: None)
    with peers("all", DEFAULT, tiny_model(), ITEMS) as engines:
        assert list(engines) == ["transformers, static batch of 8", "transformers, continuous batching"]
    said = capsys.readouterr().out
    assert "llama.cpp is left out: it is not installed" in said and "vllm is left out: no interpreter at" in said
    with peers(None, DEFAULT, tiny_model(), ITEMS) as engines:
        assert engines == {}


@pytest.mark.parametrize("peer", ["llama.cpp", "vllm"])
def test_a_peer_that_reads_files_refuses_random_weights(peer, monkeypatch):
    monkeypatch.setenv(VLLM_PYTHON, sys.executable)
    with pytest.raises(NoPeer, match=f"{peer} can't run beside: it"):
        peers(peer, "random:tiny", tiny_model(), ITEMS).__enter__()


def test_a_ratio_is_of_the_same_turn_and_the_command_knows_every_peer():
    row = peer_row("other", 100, [10.0, 20.0, 40.0], [30.0, 40.0, 40.0])
    assert (row["times_minillm"], row["times_minillm_min"], row["times_minillm_max"]) == (2.0, 1.0, 3.0)
    assert row["tokens_per_s"] == 20.0
    assert (command.PEERS, command.CONTINUOUS) == (PEERS, CONTINUOUS)
