"""Clients that hang up, read slowly or come too many at once; a server that fails or stops; metrics and page."""

from __future__ import annotations

import gc
import json
import random
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from minillm.ladder.quantized import kv_bytes_per_token
from minillm.measure.client import Server, bench_server
from minillm.measure.workload import WorkItem
from minillm.serve.page import block_map
from serve.conftest import TOKENS, WAIT_S, Live, running, tiny_engine, tiny_model, toy_tokenizer
from serve.test_api import alone, events

TOKENIZER = toy_tokenizer()


def connect(server: Live, body: dict, path: str = "completions", cut: int | None = None) -> socket.socket:
    """A bare connection with a request on it; `cut` sends only so many bytes of it."""
    content = json.dumps(body).encode()
    head = (f"POST /v1/{path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(content)}\r\n\r\n")
    connection = socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=WAIT_S)
    connection.sendall((head.encode() + content)[:cut])
    return connection


def slowed(engine, seconds: float):
    """The engine, with steps that take so long at least."""
    run = engine.executor.run

    def slow(plan):
        time.sleep(seconds)
        return run(plan)

    engine.executor.run = slow
    return engine


LONG = {"prompt": "hello", "max_tokens": 200, "temperature": 0, "ignore_eos": True}


# -- hanging up -----------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up_is_aborted_and_its_blocks_are_free(stream):
    with running(slowed(tiny_engine(), 0.01)) as server:
        connection = connect(server, {**LONG, "stream": stream})
        server.until(lambda: server.engine.stats().blocks_live > 0)
        connection.close()
        server.at_rest()
        assert server.engine.records.totals["finished_abort"] == 1
        assert server.engine.records.totals["output_tokens"] < 200


def test_one_that_waits_in_the_queue_can_hang_up_too():
    with running(slowed(tiny_engine(max_batch=1), 0.01)) as server:
        first = connect(server, {**LONG, "stream": True})
        server.until(lambda: server.engine.stats().running == 1)
        second = connect(server, {**LONG, "stream": True})
        server.until(lambda: server.engine.stats().waiting == 1)
        second.close()
        server.until(lambda: server.engine.stats().waiting == 0)
        assert server.engine.stats().running == 1
        first.close()
        server.at_rest()


def test_one_that_hangs_up_within_its_body_was_never_a_request(live):
    before = live.engine.records.totals["admitted"]
    connect(live, LONG, cut=150).close()
    assert live.post(prompt="hello", max_tokens=1).status_code == 200
    assert live.engine.records.totals["admitted"] == before + 1


def test_a_slow_reader_holds_up_nobody_and_gets_its_whole_text():
    with running(tiny_engine(max_context=2048, max_batch=2)) as server:
        body = {"prompt": "hello", "max_tokens": 1500, "temperature": 0, "ignore_eos": True, "stream": True}
        slow = connect(server, body)
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        server.until(lambda: server.engine.stats().running == 1)
        quick = server.post(prompt="hello", max_tokens=9, temperature=0).json()["choices"][0]["text"]
        assert quick == alone(TOKENIZER.encode("hello"), 9)
        server.until(lambda: not server.engine.unfinished)  # the engine is done with both, though one has read nothing
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        received = b""
        while not received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
            received += slow.recv(1 << 16)
        slow.close()
        assert received.count(b'"text":') == 1500
        server.at_rest()


# -- too many at once -----------------------------------------------------------------------------


def test_over_the_bound_of_the_queue_a_request_is_refused_and_told_to_come_again():
    with running(slowed(tiny_engine(max_batch=2), 0.01), max_waiting=1) as server:
        held = [connect(server, {**LONG, "stream": True}) for _ in range(3)]  # two rows, and one that waits
        server.until(lambda: (server.engine.stats().running, server.engine.stats().waiting) == (2, 1))
        answer = server.post(prompt="hello")
        assert answer.status_code == 429 and answer.headers["retry-after"]
        error = answer.json()["error"]
        assert error["code"] == "queue_full" and "1 requests wait already" in error["message"]
        held[0].close()
        server.until(lambda: server.engine.stats().waiting == 0)
        held.append(connect(server, LONG))  # there is room again
        server.until(lambda: server.engine.stats().waiting == 1)
        for connection in held:
            connection.close()
        server.at_rest()


def test_as_many_clients_as_rows_and_places_in_the_queue_are_never_refused():
    """Rows that ended in the last step are free, though others still wait that will take them."""
    with running(tiny_engine(max_batch=6), max_waiting=5) as server:
        items = [WorkItem(prompt_ids=[3 + n % 90] * 4, max_tokens=1 + n % 7, arrival=0.0) for n in range(300)]
        found = bench_server(Server(f"{server.url}/v1", "toy"), items, clients=11)
        assert found["faults"] == {} and found["requests"]["finished"] == 300
        server.at_rest()


def test_a_request_that_waits_for_the_budget_of_a_step_does_not_wait_for_a_row():
    """Prompts of five steps each: the first steps take one row after another, though all six are free."""
    with running(slowed(tiny_engine(max_batch=6, max_step_tokens=8), 0.005), max_waiting=5) as server:
        items = [WorkItem(prompt_ids=[3 + n % 90] * 40, max_tokens=2, arrival=0.0) for n in range(44)]
        found = bench_server(Server(f"{server.url}/v1", "toy"), items, clients=11)
        assert found["faults"] == {} and found["requests"]["finished"] == 44
        server.at_rest()


@pytest.mark.parametrize("most", [0, 1])
def test_rows_that_there_is_no_memory_for_are_not_free(most):
    """Eight rows, and memory for two such requests: two run, as many wait as may, and the others are refused."""
    token_bytes = kv_bytes_per_token(tiny_model(vocab_size=len(TOKENS)).config, "fp32")
    engine = tiny_engine(max_batch=8, max_context=64, block_size=16, prefix_cache=False, kv_memory=8 * 16 * token_bytes)
    with running(slowed(engine, 0.1), max_waiting=most) as server:
        with ThreadPoolExecutor(8) as pool:  # each of three blocks, and none grows into a fourth
            prompts = [[3 + n] * 40 for n in range(8)]
            asked = [pool.submit(server.post, prompt=prompt, max_tokens=7, ignore_eos=True) for prompt in prompts]
            codes = sorted(answer.result().status_code for answer in asked)
        assert codes == [200] * (2 + most) + [429] * (6 - most)
        server.at_rest()


def test_without_a_queue_as_many_run_as_there_are_rows():
    with running(slowed(tiny_engine(max_batch=3), 0.02), max_waiting=0) as server:
        with ThreadPoolExecutor(8) as pool:
            asked = [pool.submit(server.post, prompt="hello", max_tokens=20) for _ in range(8)]
            codes = sorted(answer.result().status_code for answer in asked)
        assert codes == [200] * 3 + [429] * 5
        server.at_rest()


# -- a server that fails --------------------------------------------------------------------------


def failing(engine, times: int):
    """The engine, whose next `times` steps fail."""
    run, left = engine.executor.run, [times]

    def fails(plan):
        if left[0]:
            left[0] -= 1
            raise RuntimeError("the device is gone")
        return run(plan)

    engine.executor.run = fails
    return engine


@pytest.mark.parametrize("times", [1, 2])
def test_a_step_that_fails_is_tried_again_and_nobody_notices(times):
    with running(failing(tiny_engine(), times)) as server:
        text = server.post(prompt="hello", max_tokens=9, temperature=0).json()["choices"][0]["text"]
        assert text == alone(TOKENIZER.encode("hello"), 9)
        server.at_rest()


def test_after_three_failures_its_requests_get_an_error_and_the_server_goes_on():
    with running(failing(tiny_engine(), 3)) as server:
        answer = server.post(prompt="hello", max_tokens=9)
        assert answer.status_code == 503 and answer.json()["error"]["type"] == "server_error"
        assert server.post(prompt="hello", max_tokens=9).status_code == 200
        server.at_rest()


def test_unusable_logits_are_an_error_inside_the_stream_too(monkeypatch):
    engine = tiny_engine()
    with running(engine) as server:
        logits = engine.executor.logits
        monkeypatch.setattr(engine.executor, "logits", lambda plan: logits(plan) * float("nan"))
        assert server.post(prompt="hello").status_code == 500
        *_, said, end = events(server.post(prompt="hello", stream=True).text)
        assert said["error"]["code"] == "model_error" and end == "[DONE]"
        monkeypatch.undo()
        assert server.post(prompt="hello").status_code == 200
        server.at_rest()


def stop_while_answering(drain_s: float, tokens: int) -> httpx.Response:
    """What a client gets whose answer of so many tokens, 20 ms each, is under way when the server is told to stop."""
    with ThreadPoolExecutor(1) as pool:
        with running(slowed(tiny_engine(), 0.02), drain_s=drain_s) as server:
            body = {**LONG, "max_tokens": tokens}
            asked = pool.submit(httpx.post, f"{server.url}/v1/completions", json=body, timeout=WAIT_S)
            server.until(lambda: server.engine.stats().running == 1)
        assert server.engine.stats().blocks_live == 0
        return asked.result()


def test_a_server_on_its_way_out_takes_no_new_request():
    with running() as server:
        server.thread.closing = True
        answer = server.post(prompt="hello")
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "shutting_down"


def test_a_server_that_stops_lets_answers_end_for_a_moment():
    assert stop_while_answering(drain_s=WAIT_S, tokens=20).json()["usage"]["completion_tokens"] == 20


def test_then_it_ends_them_with_an_error():
    answer = stop_while_answering(drain_s=0.0, tokens=200)
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "aborted"


# -- random clients -------------------------------------------------------------------------------


def misbehave(server: Live, draw: random.Random, wrong: list) -> None:
    """One request: as it should be, cut off, hung up on, read slowly, or with a body that cannot be meant."""
    prompt = [draw.randrange(3, 200) for _ in range(draw.randint(1, 40))]
    body = {"prompt": prompt, "max_tokens": draw.randint(0, 40), "temperature": 0, "stream": draw.random() < 0.5}
    kind = draw.choice(["sound", "sound", "sound", "hangs up", "cut", "slow", "bad"])
    if kind == "sound":
        answer = server.post(**body)
        chunks = events(answer.text)[:-1] if body["stream"] else [answer.json()]
        text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
        if text != alone(prompt, body["max_tokens"]):
            wrong.append((prompt, body, text))
    elif kind == "bad":
        sick = draw.choice([{"prompt": []}, {"max_tokens": -3}, {"x": 1}, {"stop": 5}, {"prompt": [10**7]}])
        if server.post(**{**body, **sick}).status_code != 400:
            wrong.append(sick)
    else:
        connection = connect(server, body, cut=draw.randint(1, 200) if kind == "cut" else None)
        if kind == "slow":
            for _ in range(draw.randint(1, 4)):
                time.sleep(draw.random() * 0.01)
                connection.recv(draw.randint(1, 300))
        elif draw.random() < 0.7:
            time.sleep(draw.random() * 0.02)
        connection.close()


def objects_held() -> int:
    """Objects of the server, and of what it stands on, that are alive."""
    gc.collect()
    rooms = {"minillm", "starlette", "uvicorn", "h11", "anyio", "asyncio", "_asyncio"}
    return sum(str(type(thing).__module__).partition(".")[0] in rooms for thing in gc.get_objects())


@pytest.mark.parametrize("settings", [{}, {"speculator": "ngram"}, {"max_batch": 8, "kv_memory": 40_000}])
def test_random_clients_leak_no_block_change_no_text_and_leave_nothing_in_memory(settings):
    """Twice 704 and once 592 requests of eight clients: 2,000 in all."""
    each = 74 if settings.get("max_batch") else 88
    with running(tiny_engine(**settings)) as server:
        wrong: list = []

        def client(seed: int) -> None:
            draw = random.Random(seed)
            for _ in range(each // 2):
                misbehave(server, draw, wrong)

        def serve_half(half: int) -> None:
            with ThreadPoolExecutor(8) as pool:
                list(pool.map(client, range(8 * half, 8 * half + 8)))
            assert not wrong, wrong[0]
            server.at_rest()
            assert server.post(prompt="hello", max_tokens=3).status_code == 200
            server.at_rest()

        serve_half(0)
        before = objects_held()
        serve_half(1)
        # each is an eighth of all, so that a leak of one a request shows; connections of clients that left take seconds
        server.until(lambda: objects_held() < before + each)


# -- metrics and page -----------------------------------------------------------------------------


def scraped(server: Live) -> dict[str, float]:
    families = text_string_to_metric_families(server.http.get("/metrics").text)
    return {sample.name + "".join(sample.labels.get("finished_reason", "")): sample.value
            for family in families for sample in family.samples if "le" not in sample.labels}


def test_metrics_agree_with_what_the_client_and_the_records_counted():
    with running() as server:
        items = [WorkItem(prompt_ids=list(range(3, 20 + n)), max_tokens=5 + n, arrival=0.0) for n in range(6)]
        found = bench_server(Server(f"{server.url}/v1", "toy"), items, clients=3)
        assert found["failed"] == 0 and found["short_answers"] == 0
        server.at_rest()
        seen, totals = scraped(server), server.engine.records.totals
        asked = sum(item.max_tokens for item in items)
        assert found["output_tokens"] == asked == seen["minillm:generation_tokens_total"] == totals["output_tokens"]
        prompts = sum(len(item.prompt_ids) for item in items)
        assert seen["minillm:prefix_cache_queries_total"] == prompts
        assert seen["minillm:prompt_tokens_total"] + seen["minillm:prefix_cache_hits_total"] == prompts
        assert seen["minillm:time_to_first_token_seconds_count"] == seen["minillm:request_success_totallength"] == 6
        assert seen["minillm:inter_token_latency_seconds_count"] == asked - 6
        assert seen["minillm:num_requests_running"] == seen["minillm:num_requests_waiting"] == 0
        assert seen["minillm:kv_cache_usage_perc"] == 0


def test_the_page_is_one_file_and_its_state_is_that_of_the_engine():
    with running(slowed(tiny_engine(max_batch=2), 0.01)) as server:
        page = server.http.get("/").text
        assert "<canvas" in page and "http://" not in page and "https://" not in page
        held = [connect(server, {**LONG, "stream": True}) for _ in range(3)]
        server.until(lambda: server.engine.stats().waiting == 1 and server.engine.stats().running == 2)
        state = server.http.get("/state").json()
        assert len(state["rows"]) == 2 and state["waiting"] == 1 and state["max_batch"] == 2
        assert state["rows"][0]["most"] == 200 and state["rows"][0]["prompt"] == len(TOKENIZER.encode("hello"))
        blocks = state["blocks"]
        assert sum(blocks.values()) == len(state["map"])
        assert sum(cell.isdigit() for cell in state["map"]) == blocks["live"] > 0
        for connection in held:
            connection.close()
        server.at_rest()


def test_a_large_pool_is_drawn_by_runs_of_blocks():
    class Pool:
        references = [0] * 5000
        cached = (4999,)

    Pool.references[0], Pool.references[4] = 1, 12
    cells = block_map(Pool)
    assert len(cells) == 1667 and cells[:3] == "19." and cells[-1] == "c" and cells.count(".") == 1664
