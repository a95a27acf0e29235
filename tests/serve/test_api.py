"""OpenAI's API over a live server: answers, streams, and errors in its shape."""

from __future__ import annotations

import json
import random

import pytest
from tiny import tiny_model
from toy_files import TOKENS

from minillm.ladder.decode import decode_cached
from minillm.ladder.request import SamplingParams
from serve.conftest import running, tiny_engine, toy_tokenizer

TOKENIZER = toy_tokenizer()
MODEL = tiny_model(vocab_size=len(TOKENS))


def events(text: str) -> list[dict | str]:
    """The data of each server-sent event."""
    parts = text.removesuffix("\n\n").split("\n\n")
    assert all(part.startswith("data: ") for part in parts)
    return [part[6:] if part == "data: [DONE]" else json.loads(part[6:]) for part in parts]


def alone(prompt: list[int], tokens: int) -> str:
    """What rung 1 answers, greedily."""
    return TOKENIZER.decode(list(decode_cached(MODEL, prompt, tokens, MODEL.config.eos_token_id)))


# -- answers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", ["hello world", TOKENIZER.encode("hello world"), ["hello world"],
                                    [TOKENIZER.encode("hello world")]])
def test_a_prompt_is_a_text_or_ids_or_a_list_of_one(live, prompt):
    answer = live.post(prompt=prompt, max_tokens=9, temperature=0).json()
    choice, = answer["choices"]
    assert choice["text"] == alone(TOKENIZER.encode("hello world"), 9)
    assert choice["finish_reason"] == "length" and choice["index"] == 0
    fed = len(TOKENIZER.encode("hello world"))
    assert answer["usage"] == {"prompt_tokens": fed, "completion_tokens": 9, "total_tokens": fed + 9}
    assert answer["object"] == "text_completion" and answer["model"] == "toy"


def test_a_chat_is_rendered_by_the_model_s_own_template(live):
    messages = [{"role": "user", "content": "hello"}]
    answer = live.post("chat/completions", messages=messages, max_completion_tokens=7, temperature=0).json()
    message = answer["choices"][0]["message"]
    assert message == {"role": "assistant", "content": alone(TOKENIZER.chat(messages), 7)}
    assert answer["object"] == "chat.completion" and answer["id"].startswith("chatcmpl-")


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_a_stream_says_what_the_whole_answer_says(live, path):
    asked = {"prompt": "hello"} if path == "completions" else {"messages": [{"role": "user", "content": "hello"}]}
    whole = live.post(path, **asked, max_tokens=12, temperature=0).json()
    streamed = events(live.post(path, **asked, max_tokens=12, temperature=0, stream=True).text)
    assert streamed.pop() == "[DONE]"
    choices = [chunk["choices"][0] for chunk in streamed]
    if path == "completions":
        assert "".join(choice["text"] for choice in choices) == whole["choices"][0]["text"]
    else:
        assert choices[0]["delta"]["role"] == "assistant"
        assert "".join(choice["delta"]["content"] for choice in choices) == whole["choices"][0]["message"]["content"]
    assert [choice["finish_reason"] for choice in choices] == [None] * 11 + ["length"]
    assert all("usage" not in chunk for chunk in streamed)


def test_usage_comes_at_the_end_or_with_every_chunk_as_asked(live):
    asked = {"prompt": "hello", "max_tokens": 5, "temperature": 0, "stream": True}
    *chunks, last, _ = events(live.post(**asked, stream_options={"include_usage": True}).text)
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 5
    assert all("usage" not in chunk for chunk in chunks)
    always = events(live.post(**asked, stream_options={"continuous_usage_stats": True}).text)[:-1]
    assert [chunk["usage"]["completion_tokens"] for chunk in always] == [1, 2, 3, 4, 5, 5]


def test_a_stop_string_ends_the_text_before_it(live):
    text = live.post(prompt="hello", max_tokens=30, temperature=0).json()["choices"][0]["text"]
    stop = text[10:12]
    for stops in (stop, [stop, "never said"]):
        answer = live.post(prompt="hello", max_tokens=30, temperature=0, stop=stops).json()["choices"][0]
        assert answer["text"] == text[: text.index(stop)] and answer["finish_reason"] == "stop"


def test_a_seed_gives_the_same_draws_and_another_seed_others(live):
    asked = {"prompt": "hello", "max_tokens": 24, "temperature": 1.5}
    one, same, other = (live.post(**asked, seed=seed).json()["choices"][0]["text"] for seed in (1, 1, 2))
    assert one == same != other


@pytest.mark.parametrize("top_k", [0, -1])
def test_a_top_k_of_0_or_minus_1_keeps_all(live, top_k):
    asked = {"prompt": "hello", "max_tokens": 16, "temperature": 1.5, "seed": 3}
    assert live.post(**asked, top_k=top_k).json()["choices"] == live.post(**asked).json()["choices"]


def test_a_null_stands_for_the_default(live):
    fields = ("suffix", "stop", "logprobs", "logit_bias", "user", "n", "stream", "stream_options", "seed", "top_p")
    plain = live.post(prompt="hello", temperature=0).json()
    with_nulls = live.post(prompt="hello", temperature=0, **dict.fromkeys(fields)).json()
    assert plain["choices"] == with_nulls["choices"] and plain["usage"]["completion_tokens"] == 16


def test_a_chat_without_a_cap_may_fill_the_context(live):
    answer = live.post("chat/completions", messages=[{"role": "user", "content": "hi"}], temperature=0, ignore_eos=True)
    assert answer.json()["usage"]["total_tokens"] == live.engine.max_context


def test_an_answer_of_no_tokens_is_an_answer(live):
    choice, = live.post(prompt="hello", max_tokens=0).json()["choices"]
    assert choice["text"] == "" and choice["finish_reason"] == "length"


def test_the_model_is_listed_and_found_by_name(live):
    card, = live.http.get("/v1/models").json()["data"]
    assert card["id"] == "toy" and card["max_model_len"] == live.engine.max_context
    assert live.http.get("/v1/models/toy").json() == card
    assert live.http.get("/v1/models/other").json()["error"]["code"] == "model_not_found"
    assert live.http.get("/health").status_code == 200


# -- refusals -------------------------------------------------------------------------------------

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("path", "body", "status", "names"),
    [
        ("completions", {"prompt": "a", "temprature": 0}, 400, "temprature"),
        ("completions", {"prompt": "a", "n": 2}, 400, "n 2"),
        ("completions", {"prompt": "a", "logprobs": 5}, 400, "logprobs"),
        ("completions", {"prompt": "a", "echo": True}, 400, "echo"),
        ("completions", {"prompt": ["a", "b"]}, 400, "one prompt"),
        ("completions", {"prompt": {"text": "a"}}, 400, "prompt"),
        ("completions", {"prompt": ""}, 400, "prompt"),
        ("completions", {}, 400, "prompt"),
        ("completions", {"prompt": [1, "a"]}, 400, "one prompt"),
        ("completions", {"prompt": [1, 10**6]}, 400, "1000000"),
        ("completions", {"prompt": [1.5]}, 400, "1.5"),
        ("completions", {"prompt": "a", "max_tokens": -1}, 400, "max_tokens"),
        ("completions", {"prompt": "a", "max_tokens": True}, 400, "max_tokens"),
        ("completions", {"prompt": "a", "max_tokens": 10**6}, 400, "1,000,000 new tokens"),
        ("completions", {"prompt": "a", "temperature": "hot"}, 400, "temperature"),
        ("completions", {"prompt": "a", "temperature": -1}, 400, "temperature"),
        ("completions", {"prompt": "a", "top_p": 7}, 400, "top_p"),
        ("completions", {"prompt": "a", "stop": 7}, 400, "stop"),
        ("completions", {"prompt": "a", "stop_token_ids": ["x"]}, 400, "stop_ids"),
        ("completions", {"prompt": "a", "seed": 1.5}, 400, "seed"),
        ("completions", {"prompt": "a", "ignore_eos": "yes"}, 400, "ignore_eos"),
        ("completions", {"prompt": "a", "stream": 1}, 400, "stream"),
        ("completions", {"prompt": "a", "stream_options": {"usage": True}}, 400, "stream_options"),
        ("completions", {"prompt": "a", "model": "gpt-9"}, 404, "gpt-9"),
        ("completions", {"prompt": "a", **CHAT}, 400, "messages"),
        ("chat/completions", {**CHAT, "prompt": "a"}, 400, "prompt"),
        ("chat/completions", {**CHAT, "chat_template": "{{ 1 }}"}, 400, "chat_template"),
        ("chat/completions", {**CHAT, "tools": [{"type": "function"}]}, 400, "tools"),
        ("chat/completions", {"messages": []}, 400, "messages"),
        ("chat/completions", {"messages": [{"role": "user"}]}, 400, "message 0"),
        ("chat/completions", {"messages": "hello"}, 400, "messages"),
    ],
)
def test_a_body_that_cannot_be_meant_is_refused_by_name(live, path, body, status, names):
    answer = live.post(path, **body)
    error = answer.json()["error"]
    assert answer.status_code == status and names in error["message"], error
    assert error.keys() == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"7", b"null", b'"a"', b"\xff\xfe", b"[" * 100_000, b'{"a": NaN'])
def test_a_body_that_is_no_json_object_is_refused(live, body):
    answer = live.http.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400 and answer.json()["error"]["type"] == "invalid_request_error"


def test_a_body_over_the_limit_is_refused_with_its_status(live):
    answer = live.post(prompt="a" * (1 << 20))
    assert answer.status_code == 413 and answer.json()["error"]["code"] == "body_too_long"


def test_a_body_of_another_kind_is_refused_so_that_no_other_site_s_page_can_send_one(live):
    answer = live.http.post("/v1/completions", content=b'{"prompt": "a"}', headers={"Content-Type": "text/plain"})
    assert answer.status_code == 415 and "application/json" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v1/completions", 405), ("POST", "/v1/embeddings", 404), ("GET", "/nothing", 404), ("POST", "/", 405)],
)
def test_a_route_that_is_not_there_is_said_in_the_same_shape(live, method, path, status):
    answer = live.http.request(method, path)
    assert answer.status_code == status and path in answer.json()["error"]["message"]


def test_a_key_is_asked_for_where_there_is_one():
    with running(api_key="s3cret") as server:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "s3cret"},
                        {"Authorization": "Bearer s3cret\xe9".encode("latin-1")}):
            answer = server.http.post("/v1/completions", json={"prompt": "a"}, headers=headers)
            assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
            assert server.http.get("/v1/models", headers=headers).status_code == 401
        answer = server.http.post("/v1/completions", json={"prompt": "a"}, headers={"Authorization": "Bearer s3cret"})
        assert answer.status_code == 200
        assert server.http.get("/health").status_code == 200
        server.at_rest()


def test_speculation_and_static_batches_are_served_with_the_same_texts(live):
    expected = live.post(prompt="hello hello hello", max_tokens=20, temperature=0).json()["choices"]
    for settings in ({"speculator": "ngram"}, {"batching": "static", "kv": "slots"}, {"chunked_prefill": False}):
        with running(tiny_engine(**settings)) as server:
            assert server.post(prompt="hello hello hello", max_tokens=20, temperature=0).json()["choices"] == expected


def test_defaults_are_those_of_the_api():
    from minillm.serve.openai import read_body

    asked = read_body({"prompt": "a"}, False, "toy", TOKENIZER, 256)
    assert asked.params == SamplingParams(max_tokens=16, temperature=1.0) and not asked.stream


# -- bodies at random -----------------------------------------------------------------------------

VALUES = [
    None, True, False, 0, 1, -1, 7, 2.5, -0.0, 10**30, -(10**30), 1e308, float("nan"), float("inf"), "", "a", "hello",
    "7", "\ud800", "\u2028", "<eos>", "x" * 5000, [], [1], [1, 2], [3.5], [None], [[]], [[5, 6]], ["a"], ["a", 5],
    [True], {}, {"a": 1}, {"role": "user"}, {"role": "user", "content": "hi"}, [{"role": "user", "content": "hi"}],
    [{"role": "\ud800", "content": [{"type": "text", "text": "a"}]}], [{"role": 5, "content": None}], ["a"] * 40,
    [[[[1]]]], {"include_usage": True}, {"include_usage": 5}, {"type": "text"},
]
NAMES = sorted({
    "prompt", "messages", "model", "stream", "stream_options", "max_tokens", "max_completion_tokens", "temperature",
    "top_p", "top_k", "seed", "stop", "stop_token_ids", "ignore_eos", "n", "best_of", "echo", "logprobs", "logit_bias",
    "tools", "response_format", "user", "suffix", "unknown", "\ud800", "",
})


def test_a_body_at_random_is_answered_or_refused_in_the_api_s_shape():
    draw, answered = random.Random(0), 0
    with running(tiny_engine(max_context=64)) as server:
        for _ in range(3_000):
            path = draw.choice(["completions", "chat/completions"])
            body = {"prompt": "hello"} if path == "completions" else dict(CHAT)
            body |= {"max_tokens": 3}
            body |= {draw.choice(NAMES): draw.choice(VALUES) for _ in range(draw.randint(0, 3))}
            content = json.dumps(body).encode()
            if draw.random() < 0.1:
                at = draw.randrange(len(content))
                content = content[:at] + draw.randbytes(2) + content[at + draw.randrange(4) :]
            answer = server.http.post(f"/v1/{path}", content=content, headers={"Content-Type": "application/json"})
            answered += answer.status_code == 200
            if answer.status_code != 200:
                assert answer.status_code in (400, 404), (content, answer.text)
                assert answer.json()["error"]["type"] == "invalid_request_error" and answer.json()["error"]["message"]
        server.at_rest()
    assert 500 < answered < 2_500


def test_a_thread_that_fails_leaves_nobody_waiting(monkeypatch):
    with running() as server:
        monkeypatch.setattr(server.thread.metrics, "observe", lambda events: 1 / 0)
        assert server.post(prompt="hello").status_code == 503
        assert server.http.get("/health").status_code == 503
        assert server.post(prompt="hello").json()["error"]["code"] == "shutting_down"
