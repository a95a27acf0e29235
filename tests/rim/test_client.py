"""The client against sound servers of unusual habits, failing ones, and bytes at random."""

from __future__ import annotations

import asyncio
import errno
import json
import random
import re
import signal
import socket
import ssl
import struct
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import repeat

import httpx
import numpy as np
import pytest
from fake_server import ANSWER, END, bench, event, fake_server, items, sends, usage

from minillm.cli import main
from minillm.cli.bench import CURES
from minillm.measure import client
from minillm.measure.client import Run, Server, bench_server, play, why_unconnected
from minillm.measure.stream import EventDecoder, Fault
from minillm.measure.workload import WorkItem, make_workload

SOUND = [event("a"), event("b"), event("c"), event("d"), END]
DONE = b"data: [DONE]\n\n"


def as_bytes(*chunks: str) -> bytes:
    return b"".join(f"data: {chunk}\n\n".encode() for chunk in chunks)


def raw(*parts: bytes, content_type: str | None = "text/event-stream", gap: float = 0.0):
    """A reply of exactly these bytes."""

    def reply(handler, body: dict) -> None:
        handler.send_response(200)
        if content_type:
            handler.send_header("Content-Type", content_type)
        handler.end_headers()
        with suppress(OSError):  # the client has gone
            for part in parts:
                handler.wfile.write(part)
                time.sleep(gap)

    return reply


def measured(found: dict, tokens: int = 4) -> bool:
    """Whether all of three requests were answered, by so many tokens each."""
    assert found["faults"] == {}
    return found["requests"]["finished"] == 3 and found["output_tokens"] == 3 * tokens


def faults(reply) -> list[str]:
    """Of a request among sound ones, which are measured right."""
    turn = iter(range(99))
    found = bench(lambda *to: (reply if next(turn) == 1 else sends(*SOUND))(*to), items(4), clients=1, patience_s=20.0)
    assert found["output_tokens"] == 4 * found["requests"]["finished"] == 12
    return list(found["faults"])


# -- lines and events -----------------------------------------------------------------------------


@pytest.mark.parametrize("char", list("\u2028\u2029\x85\x0b\x0c\x1c\x1d\x1e"), ids=ascii)
@pytest.mark.parametrize("escaped", [False, True])
def test_a_token_may_hold_what_python_takes_for_the_end_of_a_line(char, escaped):
    token = event(f"a{char}b") if escaped else event("a?b").replace("?", char)
    assert measured(bench(sends(token, *SOUND[1:])))


FRAMES = {
    "CR": as_bytes(*SOUND).replace(b"\n", b"\r"),
    "CRLF": as_bytes(*SOUND).replace(b"\n", b"\r\n"),
    "each line its own end": b"\r".join(f"data: {chunk}\r\n\n".encode() for chunk in SOUND),
    "two lines of data": as_bytes(*SOUND).replace(b'[{"index": 0, ', b'[{"index": 0,\ndata: '),
    "a line ends inside of a string": as_bytes(*SOUND).replace(b'"text": "a"', b'"text": "a\ndata: b"'),
    "no space": as_bytes(*SOUND).replace(b"data: ", b"data:"),
    "empty data": b"data:\n\n" + b"data\n\n".join(as_bytes(chunk) for chunk in SOUND),
    "byte-order mark": b"\xef\xbb\xbf" + as_bytes(*SOUND),
    "comments and other fields": b": hello\n\nid: 7\nretry: 10\n" + as_bytes(*SOUND),
    "named events": as_bytes(*SOUND).replace(b"data", b"event: completion\ndata"),
    "pings": b'event: ping\ndata: {"type": "ping"}\n\nevent: ping\ndata: now\n\nevent: ping\n\n' + as_bytes(*SOUND),
    "another charset is named": as_bytes(*SOUND),
    "a broken character": as_bytes(*SOUND).replace(b'"a"', b'"\xff\xfe"'),
}


@pytest.mark.parametrize("frame", FRAMES)
@pytest.mark.parametrize("content_type", ["text/event-stream; charset=utf-16", None, "text/plain"])
def test_events_are_read_as_the_standard_says(frame, content_type):
    assert measured(bench(raw(FRAMES[frame], DONE, content_type=content_type)))


@pytest.mark.parametrize("frame", FRAMES)
def test_where_the_bytes_are_cut_changes_no_event(frame):
    whole, decode = FRAMES[frame], EventDecoder()
    expected = list(decode.feed(whole))
    assert len(expected) >= 5
    for cut in range(len(whole)):
        halves = EventDecoder()
        assert [*halves.feed(whole[:cut]), *halves.feed(whole[cut:])] == expected
    by_byte = EventDecoder()
    assert [event for byte in whole for event in by_byte.feed(bytes([byte]))] == expected


@pytest.mark.parametrize("end", [b"\n\n", b"\r\r", b"\r\n\r\n", b"\r\n\r"])
def test_an_event_is_given_with_the_byte_that_ends_it(end):
    decode = EventDecoder()
    assert list(decode.feed(b"data: a" + end[:-1])) == ([("", "a")] if end == b"\r\n\r\n" else [])
    assert list(decode.feed(end[-1:])) == ([] if end == b"\r\n\r\n" else [("", "a")])
    assert list(decode.feed(b"\ndata: b\n\n")) == [("", "b")]


def test_an_event_without_its_empty_line_does_not_count():
    assert faults(raw(as_bytes(*ANSWER), f"data: {END}\n".encode())) == ["cut off"]
    assert measured(bench(raw(as_bytes(*SOUND), b"data: [DONE]")))


@pytest.mark.parametrize(
    "answer", [b"<html>\n<p>hello\n</html>\n", b'{\n "choices": [{"text": "abcd", "finish_reason": "length"}]\n}', b""]
)
def test_what_is_not_a_stream_is_said_not_to_be_one(answer):
    assert faults(raw(answer, content_type="application/json")) == ["malformed: not a stream of events"]
    assert faults(raw(answer)) == ["cut off"]


# -- chunks of sound servers ----------------------------------------------------------------------

FILTERED = {"hate": {"filtered": False, "severity": "safe"}}


@pytest.mark.parametrize(
    "chunks",
    [
        ['{"choices": []}', *SOUND],
        [json.dumps({"choices": [], "prompt_filter_results": [{"content_filter_results": FILTERED}]}), *SOUND],
        [*ANSWER, json.dumps({"choices": [{"finish_reason": None, "content_filter_results": FILTERED}]}), END],
        [*SOUND, '{"choices": null, "usage": {"completion_tokens": 4}}'],
        [*SOUND, '{"usage": {"completion_tokens": 4}}'],
        ['{"choices": null}', *SOUND],
        [event(None), *SOUND],
        [*ANSWER, event(None, finish_reason="stop")],
        [*ANSWER, '{"choices": [{"index": 0, "finish_reason": "stop"}]}'],  # what is empty is left out
        [*ANSWER, event("", finish_reason=""), END],
    ],
)
def test_a_chunk_that_says_nothing_is_ignored(chunks):
    assert measured(bench(sends(*chunks)))


@pytest.mark.parametrize("chunk", ['{"choices": "a"}', '{"choices": [null]}', '{"choices": [{"text": 5}]}',
                                   '{"choices": [{"index": 0}]}', '{"model": "any"}', "null", "7"])
def test_a_chunk_of_another_shape_is_still_malformed(chunk):
    fault, = faults(sends(*ANSWER, chunk, END))
    assert re.fullmatch("malformed: (no choices|a choice without text|not an object)", fault)


# -- errors in the stream -------------------------------------------------------------------------

BOOM = {"message": "boom", "code": 500, "type": "server_error"}


@pytest.mark.parametrize(
    "failure",
    [
        as_bytes(json.dumps({"error": BOOM})),
        as_bytes(json.dumps({"error": "boom", "error_type": "generation"})),
        as_bytes(json.dumps({"error": True, "message": "boom"})),
        as_bytes(json.dumps({"type": "error", "error": {"type": "overloaded", "message": "boom"}})),
        as_bytes(json.dumps({"object": "error", **BOOM})),
        as_bytes(json.dumps({"status": "error", "detail": "boom"})),
        as_bytes(json.dumps({"text": "boom", "error_code": 50002})),
        as_bytes(json.dumps({"choices": [{"text": "", "finish_reason": "error"}], "error": BOOM})),
        as_bytes(json.dumps({"choices": [{"text": "", "finish_reason": "error", "error": BOOM}]})),
        b"error: " + json.dumps(BOOM).encode() + b"\n\n",
        b"error: boom\r\n\r\n",
        b"error: boom",
        b"event: error\ndata: " + json.dumps(BOOM).encode() + b"\n\n",
        b"event: error\r\rdata: not looked at\r\r",
        b"event:error\ndata:boom\n\n",
        json.dumps({"error": BOOM}).encode(),
        json.dumps({"error": "boom"}).encode() + b"\n",
        b"data: " + json.dumps({"error": BOOM}).encode(),
    ],
)
def test_an_error_in_the_stream_is_the_server_s_with_its_message(failure):
    named = "server error in the stream" + (": boom" if b"boom" in failure else "")
    assert faults(raw(as_bytes(*ANSWER[:2]), failure)) == [named]
    assert faults(raw(as_bytes(*SOUND), failure)) == [named], "after the last token, too"


@pytest.mark.parametrize("reason", ["error", "abort"])
def test_an_answer_that_the_server_ended_as_failed_is_its_error(reason):
    assert faults(sends(*ANSWER, event("", finish_reason=reason))) == [
        f"server error in the stream: finish_reason {reason}"
    ]


def test_a_long_message_of_many_lines_becomes_a_short_one_that_every_console_can_take():
    fault, = faults(sends(json.dumps({"error": {"message": "out\nof\x1b[31m \ud800 memory " + "x" * 10_000}})))
    assert fault.startswith("server error in the stream: out of [31m memory xxx") and len(fault) < 200
    fault.encode()


@pytest.mark.parametrize("more", [
    {"error": None}, {"error": ""}, {"error": {}}, {"error": False}, {"error": {"code": 0, "message": ""}},
    {"error": {"message": None}}, {"error_code": 0}, {"object": "text_completion", "type": None, "status": "ok"},
])
def test_a_sound_chunk_may_have_a_field_for_errors(more):
    chunks = [json.dumps({**json.loads(chunk), **more}) for chunk in SOUND]
    assert measured(bench(sends(*chunks)))
    chunks = [event(text, **more) for text in ("error", "error: {", 'data: {"error": "a"}', "d")]
    assert measured(bench(raw(b"error:\n\n", b"error: null\n\n", as_bytes(*chunks, END))))


# -- counts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chunks", "tokens"),
    [
        ([*ANSWER, event("e"), usage(5, {"text": "", "finish_reason": "length"})], 5),  # one more than asked
        ([*ANSWER, event("e"), END], 5),
        ([*ANSWER, END, usage(3)], 3),  # a token's text came in two events
        ([*SOUND, usage(8)], 8),
        ([*SOUND, usage(0)], 4),
        ([usage(0, {"text": letter}) for letter in "abcd"] + [END, usage(4)], 4),  # counted at the end only
        ([*SOUND, usage(4.0)], 4),
        ([*SOUND, usage(None)], 4),
        ([*SOUND, '{"choices": [], "usage": {"prompt_tokens": 3}}'], 4),
        ([*SOUND, '{"choices": [], "usage": {}}'], 4),
    ],
)
def test_a_count_that_is_odd_but_possible_is_measured(chunks, tokens):
    found = bench(sends(*chunks))
    assert measured(found, tokens)
    assert found["short_answers"] == 3 * (tokens != 4)


def test_tokens_that_are_counted_at_the_end_keep_the_times_of_their_text():
    found = bench(sends(*[usage(0, {"text": letter}) for letter in "abcd"], END, usage(4), gap=0.02), clients=1)
    assert found["itl_per_token_s"]["n"] == 9 and found["itl_per_token_s"]["p50"] >= 0.01


@pytest.mark.parametrize("told", [-1, 4.5, float("inf"), float("nan"), "4", [4], {}, True, 10**9, 1e300])
def test_a_count_that_cannot_be_is_malformed(told):
    assert faults(sends(*SOUND, usage(told))) == ["malformed: no count of tokens"]


# -- the prompts of a run -------------------------------------------------------------------------


def run_command(*more: str) -> tuple[list[list[int]], dict]:
    """`bench --url` on a sound server: the prompts that it was sent, and the result."""
    prompts = []

    def reply(handler, body):
        prompts.append(body["prompt"])
        sends(*[event("x")] * body["max_tokens"], END)(handler, body)

    with fake_server(reply) as url:
        assert main(["bench", "peers", "--requests", "3", "--url", url, "--clients", "1", "--json", "-", *more]) == 0
    return prompts


def test_each_run_sends_prompts_that_no_server_has_cached_and_prints_their_seed(capsys):
    first, shown = run_command(), capsys.readouterr().out
    seed = json.loads(shown.splitlines()[-1])["seed"]
    assert f"seed {seed}: a new one" in shown
    second = run_command()
    assert not {tuple(ids[:8]) for ids in first} & {tuple(ids[:8]) for ids in second}
    capsys.readouterr()
    assert run_command("--seed", str(seed)) == first
    shown = capsys.readouterr().out
    assert f"seed {seed}: " in shown and "cached" in shown and "a new one" not in shown


def test_a_seed_is_that_of_the_workload(capsys):
    assert run_command("--seed", "7") == [item.prompt_ids for item in make_workload("peers", requests=3, seed=7)]


def test_a_seed_below_0_is_refused(capsys):
    assert main(["bench", "peers", "--url", "http://127.0.0.1:9/v1", "--seed", "-1"]) == 2
    assert "seed -1" in capsys.readouterr().err


# -- why a connection failed ----------------------------------------------------------------------


@contextmanager
def accepting(do: Callable[[socket.socket], None]) -> Iterator[int]:
    """A port at which every connection is handed to `do`."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept() -> None:
            with suppress(OSError):  # closed
                while True:
                    connection, _ = server.accept()
                    threading.Thread(target=handle, args=(connection,), daemon=True).start()

        def handle(connection: socket.socket) -> None:
            with suppress(OSError), connection:
                do(connection)

        threading.Thread(target=accept, daemon=True).start()
        yield server.getsockname()[1]


def reset(connection: socket.socket) -> None:
    connection.recv(1 << 16)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def ends(connection: socket.socket, answer: bytes = b"") -> None:
    """An orderly end: what the client still sends is read, or the close would turn into a reset."""
    connection.recv(1 << 16)
    connection.sendall(answer)
    connection.shutdown(socket.SHUT_WR)
    while connection.recv(1 << 16):
        pass


def speaks_http(connection: socket.socket) -> None:
    ends(connection, b"HTTP/1.1 400 Bad Request\r\n\r\n")


def is_silent(connection: socket.socket) -> None:
    time.sleep(10)


@pytest.mark.parametrize(
    ("scheme", "do", "kind"),
    [
        ("http", reset, "reset"),
        ("http", ends, "cut off"),
        ("http", is_silent, "stalled"),
        ("https", speaks_http, "TLS: .*(wrong version number|record)"),
        ("https", ends, "TLS: .*eof.*"),
        ("https", reset, "reset"),
        ("https", is_silent, "connection timed out"),
    ],
)
def test_a_connection_that_fails_is_counted_under_its_cause(scheme, do, kind):
    with accepting(do) as port:
        found = bench_server(Server(f"{scheme}://127.0.0.1:{port}/v1", "any", 1.0), items())
    assert found["failed"] == 3
    assert all(re.fullmatch(kind, fault) for fault in found["faults"]), found["faults"]


def test_a_name_without_an_address_is_not_found(monkeypatch):
    def no_such_name(*_, **__):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", no_such_name)
    assert bench_server(Server("http://nowhere.invalid/v1", "any"), items())["faults"] == {"name not found": 3}


def caused_by(*causes: Exception) -> httpx.ConnectError:
    error = httpx.ConnectError("All connection attempts failed")
    error.__cause__ = OSError("All connection attempts failed")
    error.__cause__.__cause__ = causes[0] if len(causes) == 1 else ExceptionGroup("several addresses", causes)
    return error


@pytest.mark.parametrize(
    ("causes", "kind"),
    [
        ([ConnectionRefusedError(errno.ECONNREFUSED, "")], "refused"),
        ([OSError(errno.ENETUNREACH, ""), ConnectionRefusedError(errno.ECONNREFUSED, "")], "refused"),
        ([OSError(errno.EHOSTUNREACH, "")], "no connection: No route to host"),
        ([OSError(errno.ENFILE, "")], "too many open files"),
        ([ConnectionRefusedError(errno.ECONNREFUSED, ""), OSError(errno.EMFILE, "")], "too many open files"),
        ([TimeoutError(errno.ETIMEDOUT, "")], "connection timed out"),
        ([ssl.SSLCertVerificationError(1, "bad")], "TLS: no handshake"),
        ([ValueError("of another kind")], "no connection"),
    ],
)
def test_a_cause_is_named_whichever_of_the_addresses_it_is_of(causes, kind):
    assert why_unconnected(caused_by(*causes)) == kind


def test_a_limit_of_open_files_is_named_with_its_cure():
    """80 requests at the same time, of a process that may have 48 files open."""
    pytest.importorskip("resource", reason="this system has no such limit")
    code = """
        import resource, sys
        from minillm.cli import main
        resource.setrlimit(resource.RLIMIT_NOFILE, (48, 48))
        sys.exit(main(["bench", "peers", "--requests", "80", "--clients", "80", "--url", sys.argv[1], "--json", "-"]))
    """
    ready = threading.Semaphore(0)

    def reply(handler, body):
        ready.acquire(timeout=1.0)  # hold the connection while the others come
        sends(*[event("x")] * body["max_tokens"], END)(handler, body)

    with fake_server(reply) as url:
        run = subprocess.run([sys.executable, "-c", textwrap.dedent(code), url], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    assert list(found["faults"]) == ["too many open files"]
    assert 30 <= found["failed"] < 80 and found["failed"] + found["requests"]["finished"] == 80
    assert "ulimit -n" in run.stdout and "listen at this address" not in run.stdout


def native(handler, body) -> None:
    """As llama.cpp answers /completions, which is not /v1/completions."""
    sends(json.dumps({"index": 0, "content": "a", "tokens": [1], "stop": False}))(handler, body)


@pytest.mark.parametrize("reply", [native, sends(status=404), raw(b"<html>", content_type="text/html")])
def test_a_url_without_v1_gets_the_same_hint_however_the_server_answers(reply, capsys):
    with fake_server(reply) as url:
        assert main(["bench", "peers", "--requests", "2", "--url", url.removesuffix("/v1"), "--model", "any"]) == 1
    assert "does the URL end in /v1, and is --model the name" in capsys.readouterr().out


def test_a_flood_of_different_faults_is_shown_in_part(capsys):
    number = iter(range(99))
    with fake_server(lambda *to: sends(json.dumps({"error": f"request {next(number)}"}))(*to)) as url:
        assert main(["bench", "peers", "--requests", "14", "--url", url, "--model", "any"]) == 1
    assert "and 4 other kinds" in capsys.readouterr().out


def test_every_cure_is_of_a_fault_that_there_is():
    named = ["refused", "reset", "stalled", "TLS", "server", "malformed", "too", "connection", "name"]
    assert all(kind.split(":")[0].split()[0] in named for kind in CURES)


# -- in a notebook --------------------------------------------------------------------------------


def test_a_server_is_measured_from_inside_a_running_loop():
    async def cell() -> dict:
        return bench(sends(*SOUND))

    assert measured(asyncio.run(cell()))


def test_a_wrong_setting_is_refused_inside_a_running_loop_too():
    async def cell() -> None:
        bench_server(Server("http://127.0.0.1:9/v1", "any"), items(), clients=0)

    with pytest.raises(ValueError, match="clients 0"):
        asyncio.run(cell())


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="this system cannot interrupt itself")
def test_an_interrupt_ends_it_inside_a_running_loop():
    async def cell() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        bench(lambda handler, body: time.sleep(0.1) or sends(*SOUND, hold=20)(handler, body), patience_s=60.0)

    def interrupt(*_):
        raise KeyboardInterrupt

    before, loop = signal.signal(signal.SIGALRM, interrupt), asyncio.new_event_loop()
    try:
        began = time.perf_counter()
        with pytest.raises(KeyboardInterrupt):
            loop.run_until_complete(cell())
        assert time.perf_counter() - began < 15
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        loop.close()


# -- wrong input ----------------------------------------------------------------------------------

NOT_SIZES = [
    -1, 0, 2.5, float("nan"), "", "a", "5", b"5", [], [1], {}, object(), 1j, "\ud800", np.int64(-3), np.float32("nan"),
    np.str_("a"), np.array("a"), np.array([1, 2]),
]
NOT_SECONDS = [None, "1", "a", -1, 10**400, [], object(), np.array("a"), np.array([1.0]), float("nan"), float("inf")]
HERE = "http://127.0.0.1:9/v1"


@pytest.mark.parametrize("value", NOT_SIZES, ids=ascii)
@pytest.mark.parametrize(
    "make",
    [
        lambda value: bench_server(Server(HERE, "any"), items(), clients=value),
        lambda value: bench_server(Server(HERE, "any"), [*items(), WorkItem(0.0, [1], value)]),
        lambda value: bench_server(Server(HERE, "any"), [*items(), WorkItem(0.0, [1], 4, value)]),
        lambda value: Server(value, "any"),
    ],
    ids=["clients", "max_tokens", "stop_after", "url"],
)
def test_what_is_not_a_size_is_a_value_error_before_anything_is_sent(make, value):
    with pytest.raises(ValueError):
        make(value)


@pytest.mark.parametrize("value", NOT_SECONDS, ids=lambda value: ascii(value)[:20])
def test_what_is_not_a_time_is_a_value_error_before_anything_is_sent(value):
    with pytest.raises(ValueError, match="patience_s"):
        Server(HERE, "any", value)
    with pytest.raises(ValueError, match="request 3: arrival"):
        bench_server(Server(HERE, "any"), [*items(), WorkItem(value, [1], 4)])


@pytest.mark.parametrize("prompt", [None, 5, "abc", [1.0], [None], [True], ["1"], [[1]], np.array([1.5])], ids=ascii)
def test_what_is_not_a_prompt_is_a_value_error_before_anything_is_sent(prompt):
    with pytest.raises(ValueError, match="request 3: "):
        bench_server(Server(HERE, "any"), [*items(), WorkItem(0.0, prompt, 4)])


@pytest.mark.parametrize("model", [None, 5, b"any", ["any"]])
def test_what_is_not_a_model_name_is_a_value_error(model):
    with pytest.raises(ValueError, match="model"):
        Server(HERE, model)


@pytest.mark.parametrize("size", [4, np.int64(4), np.array(4)])
def test_a_size_may_be_any_whole_number(size):
    with fake_server(sends(*SOUND)) as url:
        found = bench_server(Server(url, "any"), [WorkItem(0.0, np.array([1, 2, 3]), size)] * 3, np.int32(2))
    assert measured(found)
    assert found["short_answers"] == 0


@pytest.mark.parametrize("url", ["http://xn--/v1", "http://a/v1?x=1", "http://a/v1#x", "http://a/" + "v" * 70_000,
                                 "http://[::1/v1", "http://a:b/v1", "http://999.1.1.1/v1", "http://\x00/v1"])
def test_what_no_request_can_be_sent_to_is_refused(url):
    with pytest.raises(ValueError, match="URL"):
        Server(url, "any")


def test_a_url_made_at_random_is_refused_or_asked(count_inputs):
    draw = random.Random(0)
    parts = ["http", "https", "://", ":", "/", "localhost", "[::1]", "[", "]", "@", "%", "%zz", "\ud800", "é", "xn--",
             ".", "*", "0", "80", "99999", "-1", "?", "#", "v1", " ", "\n", "\x00", "a" * 70, "\\"]
    for _ in range(5_000):
        url = "http://" * draw.randrange(2) + "".join(draw.choice(parts) for _ in range(draw.randrange(7)))
        with suppress(ValueError):
            httpx.URL(f"{Server(url, 'any').url}/completions")
    count_inputs("addresses", 5_000)


# -- nothing that a server sends holds the client -------------------------------------------------

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"


def floods(start: bytes, part: bytes, pause: float = 0.0):
    def do(connection: socket.socket) -> None:
        connection.recv(1 << 16)
        connection.sendall(start)
        for again in repeat(part):
            connection.sendall(again)
            time.sleep(pause)

    return do


@pytest.mark.parametrize(
    "do",
    [
        floods(HEAD, b": a comment\n\n" * 100), floods(HEAD, b"\n" * 1000), floods(HEAD, b"data:\n\n" * 100),
        floods(HEAD, b"data: {\n" * 100), floods(HEAD, b"x" * 10_000), floods(HEAD, b"event: ping\ndata: 1\n\n" * 100),
        floods(HEAD, b"d", 0.05), floods(b"HTTP/1.1 200 OK\r\n", b"a: b\r\n", 0.05),
        floods(b"", b"HTTP/1.1 100 Continue\r\n\r\n", 0.01), floods(HEAD, as_bytes('{"choices": []}') * 50),
        floods(b"HTTP/1.1 500 Oh\r\n\r\n", b"x" * 1000),
    ],
    ids=["comments", "empty lines", "empty data", "one event", "one line", "pings", "byte by byte", "headers",
         "interim answers", "chunks without a choice", "an error's text"],
)
def test_whatever_a_server_sends_the_client_s_patience_ends_it(do):
    began = time.perf_counter()
    with accepting(do) as port:
        found = bench_server(Server(f"http://127.0.0.1:{port}/v1", "any", 1.0), items(2))
    assert found["failed"] == 2 and time.perf_counter() - began < 30
    assert all(re.fullmatch("stalled|cut off|server error 500|malformed: an (event|answer) without an end", fault)
               for fault in found["faults"]), found["faults"]


@pytest.mark.parametrize("where", ["http://[::1", "http://xn--/", "http:a", "//\x80"])
def test_a_redirection_is_not_followed_and_not_even_read(where):
    def redirects(handler, body):
        handler.send_response(307)
        handler.send_header("Location", where)
        handler.end_headers()

    assert faults(redirects) == ["server error 307"]


# -- bytes at random ------------------------------------------------------------------------------

WHOLE = [
    as_bytes(*SOUND) + DONE,
    b"\xef\xbb\xbf" + as_bytes(*SOUND).replace(b"\n", b"\r\n") + DONE,
    as_bytes('{"choices": []}', *ANSWER, usage(4, {"text": "", "finish_reason": "stop"})) + DONE,
    as_bytes(*[usage(i + 1, {"text": "\u2028x", "error": None}) for i in range(4)], END) + DONE,
    as_bytes(*SOUND).replace(b'"index": 0,', b'\ndata: "index": 0,').replace(b"\n", b"\r") + b": bye\r\r" + DONE,
]
SPLICES = [
    b"\r", b"\n", b"\r\n", b"\n\n", b"data: ", b"data: [DONE]\n\n", b"event: error\n", b"error: {", b": ", b"\xff",
    b"\xef\xbb\xbf", "\u2028".encode(), b"{", b"}", b"[", b"]", b'"', b"null", b"-1", b"1e999", b"NaN", b"\\ud800",
    b"\x00", b"9" * 5_000, b"[" * 2_000, b'{"a":' * 2_000, b'{"error": {"message": ["x"]}}\n', b'"error": 1, ',
    b'"choices": null, ', b'"text": null, ', b'"usage": {"completion_tokens": 7}, ', b'"finish_reason": "error", ',
]
VALUES = [
    b"null", b"true", b"0", b"-1", b"2.5", b"1e999", b"NaN", b"7", b"9" * 5_000, b'""', b'"error"', b'"abort"',
    b'"\\ud800"', b'"\xe2\x80\xa8"', b"[]", b"[null]", b"[[[]]]", b"{}", b'{"message": "m"}', b"[" * 2_000,
    b'{"completion_tokens": 3}', b'{"error": ' * 900 + b"1" + b"}" * 900,
]
FIELD = re.compile(rb'("\w+": )("[^"]*"|[\w.]+|\[\{.*?\}\])', re.DOTALL)
NAMED = re.compile(
    r"cut off|stalled|server error in the stream(: .{1,100})?|malformed: (not JSON|not an object|no choices|"
    r"a choice without text|no count of tokens|a reason to finish that is not text|an answer without (an end|a token))"
)


def mutated(stream: bytes, draw: random.Random) -> bytes:
    """Bytes replaced, lost or repeated; or, more often, the value of a field, whose JSON stays sound."""
    if draw.random() < 0.6:
        field, value = draw.choice(list(FIELD.finditer(stream))), draw.choice(VALUES)
        more = draw.choice([b'"error": ', b'"usage": ', b'"object": ', b'"error_code": '])
        new = field[1] + value if draw.random() < 0.5 else more + value + b", " + field[0]
        return stream[: field.start()] + new + stream[field.end() :]
    for _ in range(draw.randint(1, 3)):
        at = draw.randrange(len(stream) + 1)
        to = at + draw.choice([0, 0, 1, draw.randrange(40), len(stream) if draw.random() < 0.1 else 0])
        between = draw.choice([b"", draw.choice(SPLICES), draw.choice(SPLICES), draw.randbytes(2), stream[at:to] * 2])
        stream = stream[:at] + between + stream[to:]
    return stream


def cut(stream: bytes, draw: random.Random) -> list[bytes]:
    at = sorted(draw.randrange(len(stream) + 1) for _ in range(draw.randrange(12)))
    return [stream[start:stop] for start, stop in zip([0, *at], [*at, len(stream)], strict=True)]


def play_streams(streams: list[list[bytes]], monkeypatch) -> Run:
    """Request i of the run is answered by these chunks."""

    def respond(request: httpx.Request) -> httpx.Response:
        chunks = streams[json.loads(request.content)["prompt"][0]]

        async def body():
            for chunk in chunks:
                yield chunk

        return httpx.Response(200, headers={"Content-Type": "text/event-stream"}, content=body())

    mock = partial(httpx.AsyncClient, transport=httpx.MockTransport(respond))
    monkeypatch.setattr(client.httpx, "AsyncClient", mock)
    asked = [WorkItem(0.0, [number], 4) for number in range(len(streams))]
    return asyncio.run(play(Server("http://mock/v1", "any", 30.0), asked, clients=16))


def test_bytes_at_random_end_as_an_answer_or_as_a_named_fault_and_spoil_no_neighbour(monkeypatch, count_inputs):
    draw, streams = random.Random(20), []
    for number in range(3_000):
        sound = WHOLE[number % len(WHOLE)]
        streams.append(cut(sound if number % 4 == 0 else mutated(sound, draw), draw))
    run = play_streams(streams, monkeypatch)
    lives = {life.request_id: life for life in run.lives}
    count_inputs("streams", 3_000)
    assert len(lives) + run.faults.total() == 3_000
    assert not [fault for fault in run.faults if not NAMED.fullmatch(fault)]
    assert len(run.faults) >= 9 and len(lives) >= 1_000, "both ends are reached"
    for life in lives.values():
        assert 1 <= life.output_tokens <= 80 and life.finish_reason
        assert life.arrival <= life.token_times[0] and sorted(life.token_times) == life.token_times
    assert all(lives[number].output_tokens == 4 for number in range(0, 3_000, 4))


@pytest.mark.parametrize("endless", [b": a comment\n\n", b"data:\n\n", b"x"])
def test_a_stream_that_never_pauses_is_ended_by_the_client_s_patience(endless, monkeypatch):
    def respond(request: httpx.Request) -> httpx.Response:
        async def body():
            for part in repeat(endless):
                yield part

        return httpx.Response(200, content=body())

    mock = partial(httpx.AsyncClient, transport=httpx.MockTransport(respond))
    monkeypatch.setattr(client.httpx, "AsyncClient", mock)
    run = asyncio.run(play(Server("http://mock/v1", "any", 0.5), items(2)))
    assert run.faults.total() == 2 and set(run.faults) <= {"stalled", "malformed: an event without an end"}


def test_an_event_that_would_fill_the_memory_is_refused():
    decode = EventDecoder()
    with pytest.raises(Fault, match="an event without an end"):
        for _ in range(1 << 10):
            list(decode.feed(b"data: " + b"x" * (1 << 15)))
