"""OpenAI's own client against a live server, where `openai` is installed.

    python openai_client.py URL MODEL KEY
"""

import sys

import openai


def main(url: str, model: str, key: str) -> None:
    client = openai.OpenAI(base_url=url, api_key=key, max_retries=0)
    asked = {"model": model, "temperature": 0, "max_tokens": 12}
    chat = {**asked, "messages": [{"role": "user", "content": "What is the capital of France?"}]}

    whole = client.chat.completions.create(**chat)
    print("chat:", repr(whole.choices[0].message.content), whole.choices[0].finish_reason)
    chunks = list(client.chat.completions.create(**chat, stream=True, stream_options={"include_usage": True}))
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert said == whole.choices[0].message.content, said
    assert chunks[-1].usage == whole.usage, chunks[-1].usage
    print("stream: the same text in", len(chunks), "chunks; usage", whole.usage.total_tokens, "tokens")

    text = client.completions.create(**asked, prompt="The capital of France is")
    stop = client.completions.create(**asked, prompt="The capital of France is", stop=["."])
    assert stop.choices[0].text == text.choices[0].text.partition(".")[0] and stop.choices[0].finish_reason == "stop"
    print("completion:", repr(text.choices[0].text), "cut at a stop string:", repr(stop.choices[0].text))
    assert [card.id for card in client.models.list()] == [model]

    for wrong, kind in (
        ({"max_tokens": -1}, openai.BadRequestError),
        ({"temperature": 9e9, "n": 3}, openai.BadRequestError),
        ({"model": "another"}, openai.NotFoundError),
    ):
        try:
            client.chat.completions.create(**{**chat, **wrong})
        except kind as error:
            print(f"{kind.__name__}: {error.body['message']}")
        else:
            raise AssertionError(f"{wrong} was taken")
    try:
        openai.OpenAI(base_url=url, api_key="wrong", max_retries=0).models.list()
    except openai.AuthenticationError as error:
        print(f"AuthenticationError: {error.body['message']}")
    else:
        raise AssertionError("a wrong key was taken")


if __name__ == "__main__":
    main(*sys.argv[1:])
