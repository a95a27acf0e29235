"""The benchmarks run: on models without files, beside transformers on the very same weights."""

import json
from statistics import mean, pstdev
from types import SimpleNamespace

import pytest
import torch
from tiny import tiny_config, tiny_model

from minillm.cli import main
from minillm.course.experiments import ladder as rungs
from minillm.course.experiments.batching import decode
from minillm.course.setting import Setting
from minillm.guard.inputs import RequestError
from minillm.ladder.decode import NoCache
from minillm.load.config import PRESETS
from minillm.load.weights import load_model
from minillm.measure import bench as bench_module
from minillm.measure import client
from minillm.measure.client import save_row
from minillm.measure.measurement import Measurement, device_name
from minillm.measure.reference import load_reference
from minillm.measure.roofline import Ceilings, StepShape, least_work
from minillm.measure.workload import WorkItem, make_workload

CEILINGS = Ceilings(1e11, 1e13)  # more than any CPU reaches
SHAPES = {
    "llama": {},
    "qwen2": {"attention_bias": True, "tie_word_embeddings": False},
    "qwen3": {"head_dim": 16},
}


@pytest.fixture(params=SHAPES)
def name(request, monkeypatch):
    config = tiny_config("t8-2", model_type=request.param, **SHAPES[request.param])
    monkeypatch.setitem(PRESETS, "tiny", config)
    return "random:tiny"


def test_the_reference_of_a_random_model_has_its_very_weights(name):
    model = load_model(name, device="cpu")
    reference = load_reference(name, model)
    tokens = torch.tensor([[5, 9, 2, 60, 33]])
    with torch.inference_mode():
        theirs = reference(tokens).logits[0]
        ours = model.forward(tokens[0], torch.arange(5), NoCache())
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_decode_times_whole_steps_and_shows_their_share_of_the_limit(name):
    setting = Setting(model_name=name, device="cpu")
    setting.ceilings = CEILINGS
    result = decode(setting, ((1, 3), 20, 4), against="transformers")
    assert [(row["engine"], row["batch"]) for row in result.rows] == [
        (engine, batch) for batch in (1, 3) for engine in ("minillm", "transformers, generate")
    ]
    model = setting.model
    for row in result.rows:
        work = least_work(model.config, "fp32", StepShape.decode([22] * row["batch"]), model.weight_bytes)
        assert row["mbu"] == pytest.approx(work.bytes / (row["step_ms"] / 1e3) / CEILINGS.bytes_per_s)
        assert row["tokens_per_s"] == pytest.approx(row["batch"] / row["step_ms"] * 1e3)
        assert 0 < row["least_ms"] < row["min_ms"] <= row["step_ms"] <= row["max_ms"]
    result.check()


def test_a_workload_runs_beside_transformers_and_shows_its_share_of_the_limit(monkeypatch, capsys):
    monkeypatch.setitem(PRESETS, "tiny", tiny_config("t8-2", vocab_size=10_001))
    monkeypatch.setattr(bench_module, "measure_ceilings", lambda device, dtype: CEILINGS)
    arguments = "--model random:tiny --requests 3 --scale 0.02 --repeats 1 --against transformers"
    assert main(["bench", "yardstick", *arguments.split()]) == 0
    shown = capsys.readouterr().out
    assert "transformers, continuous batching" in shown and "MBU" in shown


@pytest.mark.parametrize("loop", [["--clients", "3"], ["--rate", "40"]])
def test_our_engine_in_a_server_s_loop_is_measured_as_a_server(loop, monkeypatch, capsys, tmp_path):
    """The same figures from the same workload; a row of bench_servers."""
    monkeypatch.setitem(PRESETS, "tiny", tiny_config("t8-2", vocab_size=10_001))
    monkeypatch.setattr(client, "save_row", lambda row, device: save_row(row, tmp_path, device))
    asked = make_workload("chat", requests=12, scale=0.02, rate=40)
    command = ["bench", "chat", "--model", "random:tiny", "--requests", "12", "--scale", "0.02", *loop]
    assert main([*command, "--save", "--json", "-"]) == 0
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("TTFT", "ITL per token", "latency", "in flight on average", "12 requests"))
    found = json.loads(shown.strip().splitlines()[-1])
    assert found["output_tokens"] == sum(item.output_tokens for item in asked)
    assert found["ttft_s"]["n"] == 12 and 0 < found["ttft_s"]["p50"] <= found["latency_s"]["p50"]
    if loop[0] == "--clients":
        assert found["batch"]["peak_rows"] <= 3 and found["mean_in_flight"] <= 3
    else:
        last = max(item.arrival for item in asked) - min(item.arrival for item in asked)
        assert found["span_s"] >= last, "an open loop lasts until its last request has come"
    row, = Measurement.load(device_name("cpu"), "bench_servers", tmp_path).rows
    named = {"--clients": "closed loop, 3 clients", "--rate": "open loop, 40 requests/s"}[loop[0]]
    assert (row["server"], row["loop"], found["loop"]) == ("minillm", named, named)
    assert row["requests"] == 12 and {"ttft_p50_ms", "itl_p99_ms", "latency_p50_ms"} <= row.keys()


def test_a_request_that_cannot_run_is_refused_before_the_others_run():
    """Though it would be the last to come."""
    model, steps = tiny_model(), []
    asked = [WorkItem(0.0, [1, 2, 3], 4), WorkItem(0.1, [1] * 4000, 200)]
    with pytest.raises(RequestError, match="4,096"):
        bench_module.bench_loop(asked, model, clients=1, watch=steps.append)
    assert not steps


@pytest.mark.parametrize("loop", ([], ["--clients", "2"]), ids=["at once", "closed loop"])
def test_a_workload_that_is_too_long_is_refused_with_the_option_that_shrinks_it(loop, monkeypatch, capsys):
    monkeypatch.setitem(PRESETS, "tiny", tiny_config("t8-2", vocab_size=10_001, max_position_embeddings=64))
    monkeypatch.setattr(bench_module, "measure_ceilings", lambda device, dtype: CEILINGS)
    assert main(["bench", "chat", "--model", "random:tiny", "--requests", "3", *loop]) == 2
    error = capsys.readouterr().err
    assert "> context 64" in error and "--scale 0.1" in error


# -- the ladder -----------------------------------------------------------------------------------

SPELLED = SimpleNamespace(chat=lambda text: [ord(letter) % 64 for letter in text])  # a tokenizer of letters


@pytest.fixture
def tiny_ladder(monkeypatch):
    """`minillm ladder` on a model without files."""
    monkeypatch.setattr("minillm.load_model", lambda name: tiny_model())
    monkeypatch.setattr("minillm.load_tokenizer", lambda name: SPELLED)
    return ["ladder", "--model", "tiny", "--requests", "9", "--max-tokens", "6"]


def test_the_ladder_says_what_it_runs_and_shows_each_rung_with_its_spread(tiny_ladder, capsys):
    assert main([*tiny_ladder, "--json", "-"]) == 0
    shown, said = capsys.readouterr()
    assert "9 chat requests, all at the start: prompts of 18 to 77 tokens" in shown
    turns = [f"turn {turn} of {rungs.TURNS}, rung {rung.number}: {rung.name}" for turn in (1, 2, 3)
             for rung in rungs.RUNGS]
    assert said.splitlines() == turns, "there is no terminal, so each run is a line"
    title, rule = (line for line in shown.splitlines() if line.startswith(("rung ", "----")))
    assert title.split("  ")[0] == "rung" and len(rule.split()) <= 8
    rows = json.loads(shown.splitlines()[-1])["rungs"]
    assert [row["rung"] for row in rows] == [0, 1, 2, 3, 4, 5, 4, 6]
    assert [row["requests"] for row in rows] == [2, 6, 9, 9, 9, 9, 1, 1]
    assert all(row["identical"] in (True, None) for row in rows) and rows[5]["identical"] is None
    for row in rows:
        assert row["tokens_per_s_min"] <= row["tokens_per_s"] <= row["tokens_per_s_max"]
        assert (row["times_rung_before"] is None) == (row["name"] in ("recompute", "one request alone"))
    assert rows[2]["idle_slot_steps"] > 0 == rows[3]["idle_slot_steps"]
    assert all(row["kv_held_mb"] > row["kv_used_mb"] for row in rows[2:4]), "slots reserve for the cap"


def test_a_rung_that_gives_other_tokens_ends_with_status_1_and_says_where(tiny_ladder, monkeypatch, capsys):
    serve = rungs._run_engine

    def wrong(engine, items, bar):
        run = serve(engine, items, bar)
        if engine.speculator:
            run.outputs[0][3] = (run.outputs[0][3] + 1) % 64
        return run

    monkeypatch.setattr(rungs, "_run_engine", wrong)
    monkeypatch.setattr(rungs, "top2_margin", lambda model, ids: 0.5)
    assert main(tiny_ladder) == 1
    assert "rung 6, request 0: first differs at token 3" in capsys.readouterr().out


def test_the_ladder_s_requests_vary_as_chats_do_and_no_two_are_alike():
    items = rungs.chat_requests(SPELLED)
    answers = [item.output_tokens for item in items]
    assert len(items) == len({tuple(item.prompt_ids) for item in items}) == rungs.REQUESTS
    assert 0.8 < pstdev(answers) / mean(answers) < 1.1 and max(answers) <= rungs.MAX_TOKENS
    first = answers[: rungs.RUNGS[1].first]
    assert mean(first) == pytest.approx(mean(answers), rel=0.1), "so that rungs 1 and 2 compare"


@pytest.mark.parametrize(
    ("max_tokens", "kv_memory", "message"),
    [(4, 0, "kv_memory 0"), (4, 5, "holds no block"), (200, 20_000, "the pool has"), (5_000, None, "> context 4,096")],
)
def test_what_no_engine_could_run_is_refused_before_the_slow_rungs(max_tokens, kv_memory, message, monkeypatch):
    monkeypatch.setattr(rungs, "decode_recomputing", None)
    chats = SimpleNamespace(chat=lambda text: [1, 2, 3])
    with pytest.raises(ValueError, match=message):
        rungs.ladder(tiny_model(), chats, "tiny", rungs.chat_requests(chats, 2, max_tokens), kv_memory)


@pytest.mark.parametrize(("option", "value"), [("--batch", "1,x"), ("--batch", "0"), ("--steps", "0")])
def test_bad_sizes_are_refused(option, value, capsys):
    assert main(["bench", "decode", "--model", "random:smollm2-135m", option, value]) == 2
    assert capsys.readouterr().err.startswith("minillm bench: ")
