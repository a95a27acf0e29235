"""The client against a small server that misbehaves on purpose, and against a real one."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from itertools import chain, repeat

import pytest
from fake_server import ANSWER, END, GAP, bench, event, fake_server, items, sends, usage
from serving import make_engine
from tiny import random_tensors, tiny_config
from toy_files import TOKENS, write_gguf

from minillm.cli import main
from minillm.ladder.request import SamplingParams
from minillm.load.weights import make_model
from minillm.measure.client import Server, bench_server, play, save_row, server_row
from minillm.measure.measurement import Measurement, device_name
from minillm.measure.workload import WorkItem, make_workload
from minillm.model.llama import Llama

# -- what is measured -----------------------------------------------------------------------------


def test_times_are_those_of_the_events():
    found = bench(sends(*ANSWER, END, gap=GAP), clients=1)
    assert found["requests"] == {"finished": 3, "aborted": 0, "failed": 0, "unfinished": 0}
    assert (found["output_tokens"], found["failed"], found["short_answers"]) == (12, 0, 0)
    assert found["ttft_s"]["n"] == 3 and found["itl_per_token_s"]["n"] == 9
    assert GAP <= found["ttft_s"]["p50"] < found["latency_s"]["p50"] and found["latency_s"]["p50"] >= 5 * GAP
    assert found["itl_per_token_s"]["p50"] >= 0.5 * GAP  # no upper bounds here: the machine may be busy
    assert found["span_s"] >= 3 * 5 * GAP, "one client asks again only once it has been answered"
    assert 0.5 < found["mean_in_flight"] <= 1
    assert not {"queue_s", "batch", "kv", "preemptions", "busy_s"} & found.keys(), "no client can know these"


def test_an_open_loop_asks_when_it_is_due_and_waits_for_nobody():
    found = bench(sends(*ANSWER, END, gap=0.1), items(5, every=0.05))
    assert 0.5 + 0.2 <= found["span_s"] < 5 * 0.5, "one after the other would take longer"
    assert found["mean_in_flight"] > 1.5


def test_a_workload_s_ids_lengths_and_wishes_are_sent():
    bodies = []

    def reply(handler, body):
        bodies.append(body)
        sends(*[event("x")] * body["max_tokens"], END)(handler, body)

    asked = make_workload("peers", requests=4)
    assert bench(reply, asked)["output_tokens"] == sum(item.output_tokens for item in asked)
    by_prompt = {tuple(body["prompt"]): body for body in bodies}
    for item in asked:
        body = by_prompt[tuple(item.prompt_ids)]
        assert (body["max_tokens"], body["temperature"], body["ignore_eos"]) == (item.output_tokens, 0, True)


def test_a_prompt_may_go_as_text():
    bodies = []
    with fake_server(lambda handler, body: (bodies.append(body), sends(*ANSWER, END)(handler, body))) as url:
        bench_server(Server(url, "any", text_of=lambda ids: "-".join(map(str, ids))), items(1))
    assert bodies[0]["prompt"] == "1-2-3"


@pytest.mark.parametrize(
    "lines",
    [
        [event("a"), event("b"), END, usage(4)],  # two events of two tokens, counted at the end
        [event("a"), event("b"), event("c"), usage(4, {"text": "", "finish_reason": "length"})],  # as llama.cpp ends
        [usage(2, {"text": "ab"}), usage(3, {"text": ""}), usage(4, {"text": "c", "finish_reason": "length"})],  # vLLM
    ],
    ids=["counted at the end", "counted with the end", "counted along"],
)
def test_a_server_that_bundles_tokens_is_taken_at_its_count(lines):
    found = bench(sends(*lines, gap=GAP), clients=1)
    assert (found["output_tokens"], found["failed"], found["short_answers"]) == (12, 0, 0)
    assert found["itl_per_step_s"]["n"] in (3, 6)  # between events, not tokens


def test_an_answer_that_ends_early_is_counted_as_short_and_measured():
    found = bench(sends(event("a"), event("b"), END))
    assert (found["short_answers"], found["failed"], found["output_tokens"]) == (3, 0, 6)


# -- what goes wrong ------------------------------------------------------------------------------


def keeps_alive(handler: BaseHTTPRequestHandler) -> None:
    """A comment every now and then, as proxies send them, and never an event."""
    handler.send_response(200)
    handler.end_headers()
    for _ in range(30):
        time.sleep(0.1)
        with suppress(OSError):  # the client has gone
            handler.wfile.write(b": still here\n\n")


def never_ends(handler: BaseHTTPRequestHandler, *first: str) -> None:
    """Tokens for as long as anybody listens, whatever was asked; perhaps behind a whole answer."""
    handler.send_response(200)
    handler.end_headers()
    with suppress(OSError):
        for line in chain(first, repeat(event("a"))):
            handler.wfile.write(f"data: {line}\n\n".encode())


def claims_gzip(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.send_header("Content-Encoding", "gzip")
    handler.end_headers()
    handler.wfile.write(b"data: plain text")


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (sends(status=500), "server error 500"),
        (sends(status=429), "server error 429"),
        (sends(*ANSWER[:2], json.dumps({"error": {"message": "out of memory"}})),
         "server error in the stream: out of memory"),
        (sends(*ANSWER[:2], "{half an object"), "malformed: not JSON"),
        (sends(*ANSWER[:2], "[1, 2]"), "malformed: not an object"),
        (sends(*ANSWER[:2], '{"choices": {}}'), "malformed: no choices"),
        (sends(*ANSWER[:2], '{"id": 3}'), "malformed: no choices"),
        (sends(*ANSWER[:2], '{"choices": [{"delta": "a"}]}'), "malformed: a choice without text"),
        (sends(*ANSWER[:2], '{"choices": [], "usage": {"completion_tokens": "4"}}'), "malformed: no count of tokens"),
        (sends(*ANSWER[:2], usage(10**15)), "malformed: no count of tokens"),  # a list of so many would end the client
        (sends(*ANSWER[:2], "[" * 100_000), "malformed: not JSON"),
        (sends(*ANSWER[:2], '{"choices": ' + "9" * 5_000), "malformed: not JSON"),
        (sends(*ANSWER[:2], usage(True)), "malformed: no count of tokens"),
        (sends(*ANSWER, event("", finish_reason={"a": 1})), "malformed: a reason to finish that is not text"),
        (lambda handler, body: never_ends(handler), "malformed: an answer without an end"),
        (lambda handler, body: never_ends(handler, *ANSWER, END), "malformed: an answer without an end"),
        (sends(END), "malformed: an answer without a token"),
        (sends(*ANSWER[:2], done=False), "cut off"),
        (sends(*ANSWER), "cut off"),  # it says that it is done, but not why
        (sends(*ANSWER[:2], hold=3.0), "stalled"),
        (lambda handler, body: keeps_alive(handler), "stalled"),
        (lambda handler, body: claims_gzip(handler), "malformed: not what its encoding says"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_fault_is_counted_by_kind_and_averaged_nowhere(reply, kind):
    """One request of four goes wrong; the others' figures are as if it had not been."""
    turn = iter(range(99))

    def sometimes(handler, body):
        (reply if next(turn) == 1 else sends(*ANSWER, END, gap=GAP))(handler, body)

    found = bench(sometimes, items(4), clients=1, patience_s=1.0 if kind == "stalled" else 30.0)
    assert found["faults"] == {kind: 1} and found["failed"] == 1
    assert found["requests"]["finished"] == found["ttft_s"]["n"] == 3
    assert found["output_tokens"] == 12, "tokens of a request that failed were counted as output"


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://127.0.0.1/v1", "http://", "", "http://a:99999"])
def test_what_is_no_url_is_refused_before_anything_is_sent(url):
    with pytest.raises(ValueError, match="URL"):
        Server(url, "any")


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_no_patience_is_refused(seconds):
    with pytest.raises(ValueError, match="patience_s"):
        Server("http://127.0.0.1:9/v1", "any", seconds)


def test_nobody_listens():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
    found = bench_server(Server(url, "any"), items())
    assert found["faults"] == {"refused": 3}
    assert (found["output_tokens"], found["ttft_s"]["p50"]) == (0, None)


def test_the_command_reports_faults_and_fails_where_nothing_was_answered(capsys, tmp_path):
    with fake_server(sends(status=503)) as url:
        assert main(["bench", "peers", "--requests", "3", "--url", url, "--model", "any", "--json", "-"]) == 1
    text = capsys.readouterr().out
    assert "3 of 3 requests failed" in text and "server error 503" in text and "no request was answered" in text
    assert not any(word in text for word in ("queue", "batch", "preemptions", "p99 of 0"))
    assert json.loads(text.strip().splitlines()[-1])["faults"] == {"server error 503": 3}
    with fake_server(lambda handler, body: sends(*[event("x")] * body["max_tokens"], END)(handler, body)) as url:
        assert main(["bench", "peers", "--requests", "3", "--url", url, "--clients", "2", "--seed", "0",
                     "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert found["output_tokens"] == sum(item.output_tokens for item in make_workload("peers", requests=3))


def test_what_every_request_fell_over_is_named_with_its_cure(capsys):
    with fake_server(sends(status=404)) as url:
        assert main(["bench", "peers", "--requests", "2", "--url", url, "--model", "any"]) == 1
    assert "server error 404: does the URL end in /v1" in capsys.readouterr().out


def test_rows_of_servers_are_kept_and_a_later_run_replaces_its_own(tmp_path):
    found = bench(sends(*ANSWER, END))
    for label, loop in (("one", "open loop"), ("two", "open loop"), ("one", "closed loop, 2 clients")):
        save_row(server_row(found, label, "peers", "any", loop), tmp_path)
    path = save_row({**server_row(found, "two", "peers", "any", "open loop"), "tokens_per_s": 7.0}, tmp_path)
    kept = Measurement.load(device_name("cpu"), "bench_servers", tmp_path)
    assert path.stem == "bench_servers"
    assert [(row["server"], row["loop"]) for row in kept.rows] == [
        ("one", "open loop"), ("one", "closed loop, 2 clients"), ("two", "open loop"),
    ]
    assert kept.rows[-1]["tokens_per_s"] == 7.0 and kept.rows[0]["output_tokens"] == 12


# -- a real server --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama_cpp(tmp_path_factory) -> Iterator[tuple[str, Llama]]:
    """llama.cpp's own server on a small model that we wrote: its URL, and the same model here."""
    xllamacpp = pytest.importorskip("xllamacpp", reason="llama.cpp's wheel is not made for this platform")
    config = tiny_config("t8-2", vocab_size=len(TOKENS), max_position_embeddings=2048)
    tensors = random_tensors(config, std=0.2)
    settings = xllamacpp.CommonParams()
    settings.model.path = str(write_gguf(tmp_path_factory.mktemp("gguf") / "toy.gguf", config, tensors))
    settings.n_parallel, settings.n_ctx, settings.port, settings.warmup = 4, 4 * 1024, 0, False
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = 1
    server = xllamacpp.Server(settings)
    yield f"{server.listening_address}/v1", make_model(config, tensors)
    del server


def small(name: str, **settings) -> list[WorkItem]:
    """A workload whose ids the small model knows."""
    made = make_workload(name, **settings)
    return [WorkItem(i.arrival, [3 + token % 200 for token in i.prompt_ids], i.output_tokens) for i in made]


@pytest.mark.parametrize("clients", [None, 4], ids=["open loop", "closed loop"])
def test_llama_cpp_s_server_is_measured(llama_cpp, clients):
    asked = small("chat", requests=24, rate=50, scale=0.05)
    found = bench_server(Server(llama_cpp[0], "toy"), asked, clients)
    assert (found["faults"], found["short_answers"]) == ({}, 0)
    assert found["output_tokens"] == sum(item.output_tokens for item in asked)
    assert found["requests"]["finished"] == found["ttft_s"]["n"] == 24
    assert 0 < found["ttft_s"]["p50"] <= found["latency_s"]["p50"] <= found["span_s"]


def test_what_llama_cpp_refuses_is_counted(llama_cpp):
    """A prompt that is longer than its context."""
    found = bench_server(Server(llama_cpp[0], "toy"), [*small("peers", requests=2), WorkItem(0.0, [5] * 1200, 4)])
    assert found["faults"] == {"server error 400": 1} and found["requests"]["finished"] == 2


def test_our_engine_beside_it_on_the_same_requests(llama_cpp):
    """The same workload through both doors: as many tokens, and a life for every request."""
    asked = small("peers", requests=6)
    run = asyncio.run(play(Server(llama_cpp[0], "toy"), asked))
    engine = make_engine(llama_cpp[1], blocks=256)
    lengths = [SamplingParams(item.max_tokens, ignore_eos=True) for item in asked]
    ours = engine.generate([item.prompt_ids for item in asked], lengths)
    assert {life.request_id: life.output_tokens for life in run.lives} == {
        number: len(answer.token_ids) for number, answer in enumerate(ours)
    }
