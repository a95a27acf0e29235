"""Weights of 4 bits here, beside llama.cpp's on the same processor: the default model comes from its format Q4_1.

llama.cpp's server runs in a process of its own, stopped but in its turns, and answers over HTTP, which is in its times;
our engine has no network between. Its weights are the file's: Q4_1 in groups of 32 (5 bits), and a head of 8 bits.
Ours in int4 are in groups of 64 (4.5 bits), with a head of 8 bits too. Its keys and values are fp16, ours fp32, and
prompts are short, so that they hardly count.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import median

from minillm.course.experiments.common import measured, random_prompts, serve, spread_columns, warm_up
from minillm.course.experiments.formats import TURNS, served_weights
from minillm.course.experiments.repeats import in_turns
from minillm.course.setting import NotHere, Setting, timed
from minillm.ladder.records import RequestRecord
from minillm.load.source import DEFAULT, ModelNotFound, fetch_gguf
from minillm.measure import peers
from minillm.measure.client import Server, play_to_end
from minillm.measure.measurement import Measurement, Spread
from minillm.measure.peers import Worker
from minillm.measure.workload import WorkItem

LLAMA_CPP = "llama.cpp"
STREAMS = (1, 8)
PROMPT = 16  # tokens
FIRST_ID, IDS = 3, 200  # of prompts: every vocabulary has these


@timed
def beside_llama_cpp(setting: Setting) -> Measurement:
    """Decoded tokens per second at 1 and 8 streams, of each of our weight formats and of llama.cpp, in turns.

    times_llama_cpp: over llama.cpp's of the same turn. NotHere where llama.cpp, or its file of this model, is not.
    """
    plain, answer, rows = setting.model, setting.size(16, 128), []
    with llama_cpp_server(setting, max(STREAMS), PROMPT + answer) as (llama, file_bytes):
        models = {("minillm", scheme.name): scheme.make(plain)[0] for scheme in served_weights(plain)}
        for model in models.values():
            warm_up(model)
        ask(llama, stream_items(max(STREAMS), 2))
        read_mb = {**{who: model.weight_bytes / 1e6 for who, model in models.items()},
                   (LLAMA_CPP, "Q4_1"): file_bytes / 1e6}
        for streams in setting.each("beside llama.cpp", STREAMS):
            items = stream_items(streams, answer)
            cases = {who: partial(ours, model, items) for who, model in models.items()}
            runs = in_turns({**cases, (LLAMA_CPP, "Q4_1"): partial(ask, llama, items)}, TURNS)
            rows += [row_of(who, streams, read_mb[who], lives, runs[LLAMA_CPP, "Q4_1"]) for who, lives in runs.items()]
    speeds = Spread.of([row["tokens_per_s"] for row in rows[:1]], warmups=1)
    return measured("beside_llama_cpp", plain, setting.model_name, rows, speeds, setting.seed)


def stream_items(streams: int, answer: int) -> list[WorkItem]:
    """A short prompt for each stream, and an answer of so many tokens."""
    return [WorkItem(0.0, [FIRST_ID + token for token in ids], answer) for ids in random_prompts(streams, PROMPT, IDS)]


def ours(model, items: Sequence[WorkItem]) -> list[RequestRecord]:
    """The requests' records, from a new engine."""
    return serve(model, items).requests


def ask(llama: Worker, items: Sequence[WorkItem]) -> list[RequestRecord]:
    """The same from the server, all asked concurrently; RuntimeError if it did not answer every request in full."""
    with llama.awake():
        run = play_to_end(Server(f"{llama.hello}/v1", DEFAULT), items, len(items))
    if run.faults or run.short:
        raise RuntimeError(f"{LLAMA_CPP} failed: {dict(run.faults) or 'answers of another length'}")
    return run.lives


def decode_rate(lives: Sequence[RequestRecord]) -> float:
    """Tokens per second of all streams once each has its first token: the sum over the streams."""
    return sum((life.output_tokens - 1) / (life.finish - life.first_token) for life in lives)


def row_of(
    who: tuple[str, str], streams: int, read_mb: float, turns: Sequence[Sequence[RequestRecord]],
    beside: Sequence[Sequence[RequestRecord]],
) -> dict:
    """One set-up's turns as a row; beside: llama.cpp's."""
    rates, theirs = ([decode_rate(lives) for lives in each] for each in (turns, beside))
    return {
        "engine": who[0], "weights": who[1], "streams": streams, "read_mb": read_mb,
        **spread_columns("tokens_per_s", rates), "ms_between_tokens": 1e3 * streams / median(rates),
        **spread_columns("times_llama_cpp", [own / other for own, other in zip(rates, theirs, strict=True)]),
        "turns": len(turns),
    }


@contextmanager
def llama_cpp_server(setting: Setting, streams: int, tokens: int) -> Iterator[tuple[Worker, int]]:
    """llama.cpp's server on the default model's own file, in a process of its own, and the file's bytes.

    It has as many threads as PyTorch, and room for `streams` requests of `tokens`. NotHere says what is missing.
    """
    if setting.gpu:
        raise NotHere("llama.cpp's wheel computes on the processor: add --device cpu")
    if setting.model_name != DEFAULT:
        raise NotHere(f"llama.cpp reads a GGUF file, and only that of {DEFAULT} is fetched")
    with ExitStack() as opened:
        with setting.watch.paused():
            file = gguf_file()
            try:
                found = opened.enter_context(peers.llama_cpp(file, streams, tokens + 64))
            except peers.NoPeer as why:
                raise NotHere(f"llama.cpp can't run beside: {why}") from None
        yield found, file.stat().st_size


def gguf_file() -> Path:
    """The default model as it was published; NotHere where it can't be had."""
    try:
        return fetch_gguf()
    except ModelNotFound as error:
        raise NotHere(f"the file that llama.cpp reads could not be had: {error}") from error
