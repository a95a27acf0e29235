"""Who asks for what, and when: the workloads that the experiments share.

A workload is a list of `WorkItem`s, made from a seed. Its answers have a cap that the engine
sees (`max_tokens`: what a slot must reserve) and an end that it does not (`stop_after`).

Open loop: requests arrive at their times, also while the server stalls. Closed loop: a fixed number
of clients, each of which asks again once answered. A stalling server looks better in the second.
"""

from __future__ import annotations

import csv
import math
import os
import random
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from inspect import signature
from pathlib import Path
from statistics import NormalDist

import numpy as np

from minillm.fast.engine import Engine
from minillm.guard.inputs import check_at_least, check_positive, whole_setting
from minillm.ladder.request import RequestId, SamplingParams, TokenEvent
from minillm.measure.virtual import VirtualEngine

VOCAB = 10_000  # random prompts use ids under this one, which every real model has
MOST_REQUESTS = 1_000_000
MOST_TOKENS = 10_000_000  # of a prompt that is written out


@dataclass(frozen=True)
class WorkItem:
    """One request: seconds after the start, token ids, the visible cap, and the hidden end (None: the cap)."""

    arrival: float
    prompt_ids: Sequence[int]
    max_tokens: int
    stop_after: int | None = None

    @property
    def output_tokens(self) -> int:
        """Tokens that the answer will have."""
        return self.max_tokens if self.stop_after is None else min(self.max_tokens, self.stop_after)

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(max_tokens=self.max_tokens, stop_after=self.stop_after, ignore_eos=True)


def make_workload(name: str, **settings) -> list[WorkItem]:
    """A workload by name, with its function's settings; ValueError lists both, and refuses what cannot be."""
    if not isinstance(name, str) or name not in WORKLOADS:
        raise ValueError(f"unknown workload {name!r}; known: {', '.join(WORKLOADS)}")
    settings = {setting: value for setting, value in settings.items() if value is not None}
    known = signature(WORKLOADS[name]).parameters
    if unknown := [setting for setting in settings if setting not in known]:
        raise ValueError(f"workload {name!r} has no {', '.join(unknown)}; it has {', '.join(known)}")
    if missing := [setting for setting, p in known.items() if p.default is p.empty and setting not in settings]:
        raise ValueError(f"workload {name!r} needs {', '.join(missing)}")
    items = WORKLOADS[name](**_checked_settings(settings))
    if not all(math.isfinite(item.arrival) for item in items):
        raise ValueError(f"workload {name!r} has arrivals that never come: rate {settings.get('rate')!r} is too low")
    return items


WHOLE = {  # settings that are whole numbers, from the first to the last of these
    "seed": (0, math.inf), "requests": (1, MOST_REQUESTS), "mean_tokens": (1, MOST_TOKENS), "answer": (1, MOST_TOKENS),
    "prompt_tokens": (1, MOST_TOKENS), "prefix_tokens": (1, MOST_TOKENS), "context": (2, MOST_TOKENS),
}


def _checked_settings(settings: dict) -> dict:
    """The settings as Python's own numbers; ValueError for the first that cannot be meant."""
    for name in settings.keys() & WHOLE:
        settings[name] = whole_setting(name, settings[name], *WHOLE[name])
    for name in settings.keys() & {"rate", "scale"}:
        check_positive(**{name: settings[name]})
        settings[name] = float(settings[name])
    check_at_least(0, cv=settings.get("cv"))
    if "answers" in settings:
        answers = settings["answers"]
        if isinstance(answers, str) or not isinstance(answers, Sequence) or not answers:
            raise ValueError(f"answers {answers!r:.60} is not a list of lengths")
        settings["answers"] = [whole_setting("answers", length, 1, MOST_TOKENS) for length in answers]
    if not callable(settings.get("ids", random_ids)):
        raise ValueError(f"ids {settings['ids']!r:.60} makes no prompts: give random_ids or numbered_ids")
    return settings


def play(
    engine: Engine, items: Sequence[WorkItem], clients: int | None = None, watch: Callable[[Engine], None] | None = None
) -> list[list[int]]:
    """Serve a workload to its end; the output ids in the items' order. The figures are in `engine.records`.

    clients: of a closed loop, which ignores the arrival times; None plays the open loop, from now.
    watch: called after each step.
    """
    outputs: list[list[int]] = [[] for _ in items]
    for events in play_by_step(engine, items, clients, repeats=watch is None):
        for item, event in events:
            outputs[item] += event.token_ids
        if watch:
            watch(engine)
    return outputs


def play_by_step(
    engine: Engine, items: Sequence[WorkItem], clients: int | None = None, repeats: bool = False
) -> Iterator[list[tuple[int, TokenEvent]]]:
    """The same, a step each time the iterator is asked: (number of the item, event) of what the step gave.

    repeats: let an executor that can (`Engine.step`) run identical decode steps as one.
    """
    check_at_least(1, clients=clients)
    start = engine.clock.now()
    coming = deque(sorted(range(len(items)), key=lambda i: items[i].arrival))
    asked: dict[RequestId, int] = {}
    while coming or engine.has_work:
        while coming:
            item = items[coming[0]]
            arrival = start + item.arrival if clients is None else engine.clock.now()
            # the open loop queues the next arrival only when it is due, or for an idle engine to wait for
            if engine.has_work and (arrival > engine.clock.now() if clients is None else len(asked) >= clients):
                break
            asked[engine.add(item.prompt_ids, item.params, arrival=arrival)] = coming.popleft()
        until = start + items[coming[0]].arrival if coming and clients is None else math.inf
        events = engine.step(until) if repeats and isinstance(engine, VirtualEngine) else engine.step()
        yield [(asked.pop(event.request_id) if event.finished else asked[event.request_id], event) for event in events]


# -- the workloads --------------------------------------------------------------------------------
# `scale` shrinks every length, so that a laptop can run what was drawn for a data centre. `ids`
# makes the prompts: `random_ids`, or in virtual time `numbered_ids`, which take no memory.


def yardstick(requests: int = 256, scale: float = 1.0, seed: int = 0) -> list[WorkItem]:
    """The bench that nano-vllm, its forks and mini-sglang report: 256 at the start, 133,966 output tokens."""
    draw = random.Random(seed)
    prompts = [[draw.randint(0, 10_000) for _ in range(draw.randint(100, 1024))] for _ in range(requests)]
    caps = [draw.randint(100, 1024) for _ in range(requests)]
    return [
        WorkItem(0.0, ids[: scaled(len(ids), scale)], scaled(cap, scale))
        for ids, cap in zip(prompts, caps, strict=True)
    ]


def peers(requests: int = 24, scale: float = 1.0, seed: int = 0) -> list[WorkItem]:
    """What other engines were run on beside this one: prompts of 16 to 95 tokens, lognormal answers of 4 to 128."""
    draw = np.random.default_rng(seed)
    prompt_tokens = draw.integers(16, 96, requests)
    answers = draw.lognormal(np.log(24), 0.9, requests).astype(int).clip(4, 128)
    return [
        WorkItem(0.0, draw.integers(10, 49_000, prompt).tolist()[: scaled(prompt, scale)], scaled(answer, scale))
        for prompt, answer in zip(prompt_tokens, answers, strict=True)
    ]


def chat(requests: int = 256, rate: float = 5.53, scale: float = 1.0, seed: int = 0, ids=None) -> list[WorkItem]:
    """Lengths of Azure's conversation trace (2023, CC BY 4.0), Poisson arrivals at `rate` a second."""
    return from_quantiles(CHAT_PROMPT, CHAT_ANSWER, 1.0, requests, rate, scale, seed, ids)


def code(requests: int = 256, rate: float = 2.57, scale: float = 1.0, seed: int = 0, ids=None) -> list[WorkItem]:
    """Lengths of Azure's code trace: long prompts, short answers, in bursts (gaps that vary by 13.2 of their mean)."""
    return from_quantiles(CODE_PROMPT, CODE_ANSWER, 13.2, requests, rate, scale, seed, ids)


# Tokens at these percentages of the requests of Azure's LLM inference traces, 2023.
PERCENTAGES = (1, 10, 25, 50, 75, 90, 95, 99, 100)
CHAT_PROMPT = (29, 207, 396, 1_020, 1_189, 2_735, 4_083, 4_142, 14_050)
CHAT_ANSWER = (16, 54, 85, 129, 395, 424, 451, 601, 1_000)
CODE_PROMPT = (17, 147, 578, 1_469, 2_745, 5_188, 7_303, 7_436, 7_437)
CODE_ANSWER = (6, 7, 9, 13, 24, 55, 90, 251, 1_899)


def from_quantiles(
    prompts: Sequence[int], answers: Sequence[int], gap_cv: float, requests: int, rate: float, scale: float, seed: int,
    ids=None,
) -> list[WorkItem]:
    """Independent lengths from two tables of quantiles; the cap is the longest answer of the table.

    Gaps are Gamma with the coefficient of variation `gap_cv`: 1 is a Poisson process, more is bursts.
    """
    draw, ids = np.random.default_rng(seed), ids or random_ids
    gaps = draw.gamma(gap_cv**-2, gap_cv**2 / rate, requests)
    prompt_tokens, answer_tokens = (at_quantiles(table, draw.random(requests)) for table in (prompts, answers))
    return [
        WorkItem(float(arrival), ids(draw, prompt, scale), scaled(max(answers), scale), scaled(answer, scale))
        for arrival, prompt, answer in zip(gaps.cumsum(), prompt_tokens, answer_tokens, strict=True)
    ]


def at_quantiles(table: Sequence[int], shares: np.ndarray) -> np.ndarray:
    """Lengths at these shares in [0, 1): the table's points, straight lines in log length between, flat below."""
    return np.exp(np.interp(shares * 100, PERCENTAGES, np.log(table)))


def lognormal(
    cv: float = 1.0, requests: int = 64, mean_tokens: int = 64, prompt_tokens: int = 32, scale: float = 1.0,
    seed: int = 0,
) -> list[WorkItem]:
    """All at the start; equal prompts, and answers whose standard deviation is `cv` times their mean.

    The lengths stand at evenly spaced quantiles, in random order, and are spread until this
    very sample has the mean and the variation asked for: by chance, a small one seldom would.
    """
    draw = np.random.default_rng(seed)
    normal = draw.permutation([NormalDist().inv_cdf((i + 0.5) / requests) for i in range(requests)])
    low, high = 0.0, 8.0
    for _ in range(50):  # halve the interval in which the right sigma lies
        sigma = (low + high) / 2
        spread = np.exp(sigma * normal)
        low, high = (sigma, high) if spread.std() < cv * spread.mean() else (low, sigma)
    lengths = [scaled(length, scale) for length in mean_tokens * spread / spread.mean()]
    return [WorkItem(0.0, random_ids(draw, prompt_tokens, scale), max(lengths), length) for length in lengths]


def articles_static(answers: Sequence[int] = (800, *[40] * 7), scale: float = 1.0, seed: int = 0) -> list[WorkItem]:
    """One answer of 800 tokens among seven of 40: what a static batch holds. The pair is `answers=(80, 800)`."""
    draw = np.random.default_rng(seed)
    cap = scaled(max(answers), scale)
    return [WorkItem(0.0, random_ids(draw, 16, scale), cap, scaled(answer, scale)) for answer in answers]


def worked_example(
    requests: int = 512, context: int = 4096, answer: int = 300, scale: float = 1.0, seed: int = 0, ids=None
) -> list[WorkItem]:
    """The articles' service: chats that fill a context of 4,096 tokens, 300 of them the answer. All at the start."""
    if answer >= context:
        raise ValueError(f"an answer of {answer:,} tokens leaves no prompt in a context of {context:,}")
    draw, ids = np.random.default_rng(seed), ids or random_ids
    return [WorkItem(0.0, ids(draw, context - answer, scale), scaled(answer, scale)) for _ in range(requests)]


def shared_prefix(
    requests: int = 64, prefix_tokens: int = 2048, rate: float = 4.0, scale: float = 1.0, seed: int = 0
) -> list[WorkItem]:
    """One long system prompt, many short questions after it; Poisson arrivals at `rate` a second."""
    draw = np.random.default_rng(seed)
    arrivals, questions = draw.exponential(1 / rate, requests).cumsum(), draw.integers(16, 65, requests)
    prefix = random_ids(draw, prefix_tokens, scale)
    return [
        WorkItem(float(arrival), prefix + random_ids(draw, question, scale), scaled(64, scale))
        for arrival, question in zip(arrivals, questions, strict=True)
    ]


def trace(
    path: str | Path, requests: int | None = None, scale: float = 1.0, seed: int = 0, ids=None
) -> list[WorkItem]:
    """A CSV file of arrivals (dates, or seconds), context tokens and generated tokens.

    Columns are found by the names that traces give them; in that order, if the file has no header or one with
    other names. A date without an offset is UTC. requests: the first so many to arrive, which need not be the
    first in the file. The first one arrives at 0. ValueError names the first line that is not so.
    """
    draw, ids = np.random.default_rng(seed), ids or random_ids
    rows = _trace_rows(path)
    first = sorted(range(len(rows)), key=lambda place: rows[place][0])[:requests]
    rows = [rows[place] for place in sorted(first)]
    start, cap = min(arrival for arrival, _, _ in rows), scaled(max(answer for _, _, answer in rows), scale)
    return [
        WorkItem(arrival - start, ids(draw, prompt, scale), cap, scaled(answer, scale))
        for arrival, prompt, answer in rows
    ]


TRACE_COLUMNS = {  # names in published traces, without case and punctuation
    "arrival": "timestamp arrival arrivedat arrivaltime arrivals time starttime",
    "context tokens": "contexttokens numprefilltokens numprefill prompttokens prompt numprompttokens inputtokens "
                      "numinputtokens input inputlength requesttokens context prefilltokens promptlength promptlen",
    "generated tokens": "generatedtokens numdecodetokens numdecode outputtokens output numoutputtokens outputlength "
                        "responsetokens completiontokens generated decodetokens numgeneratedtokens outputlen",
}


def _trace_rows(path: str | Path) -> list[tuple[float, int, int]]:
    """The requests of a trace in its order: seconds, tokens of context, generated tokens."""
    lines = _csv_lines(path)
    columns = range(3)
    if lines and not any(map(_is_number, lines[0][1])):
        columns = _trace_columns(path, lines.pop(0)[1])
    if not lines:
        raise ValueError(f"{path} holds no request: lines of arrival, context tokens and generated tokens")
    dated = not all(map(_is_number, lines[0][1][columns[0] : columns[0] + 1]))  # a row may be too short
    return [_trace_row(f"{path}, line {number}: {row!r:.100}", row, columns, dated) for number, row in lines]


def _trace_row(line: str, row: Sequence[str], columns: Sequence[int], dated: bool) -> tuple[float, int, int]:
    """One request of a trace, whose arrivals are all dates or all seconds."""
    try:
        moment, prompt, answer = (row[column].strip() for column in columns)
        arrival = _date(moment) if dated else float(moment)
        prompt, answer = int(prompt), int(answer)
        if math.isfinite(arrival) and 0 <= prompt <= MOST_TOKENS and 0 <= answer <= MOST_TOKENS:
            return arrival, prompt, answer
    except (ValueError, IndexError):
        pass
    wanted = "a date" if dated else "seconds"
    raise ValueError(f"{line} is not an arrival ({wanted}, as in the first), context tokens, generated tokens")


def _csv_lines(path: str | Path) -> list[tuple[int, list[str]]]:
    """(number in the file, cells) of each line that is not blank."""
    if not isinstance(path, str | os.PathLike):
        raise ValueError(f"path {path!r:.60} is not a file's name")
    try:
        with open(path, newline="", encoding="utf-8-sig", errors="replace") as file:
            reader = csv.reader(file)
            return [(reader.line_num, row) for row in reader if any(cell.strip() for cell in row)]
    except csv.Error as error:
        raise ValueError(f"{path}, line {reader.line_num}: {error}") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None


def _trace_columns(path: str | Path, header: Sequence[str]) -> Sequence[int]:
    """Where arrival, context and generated tokens stand."""
    names = [re.sub(r"[^a-z]", "", name.lower()) for name in header]
    found = [
        next((place for place, name in enumerate(names) if name in known.split()), None)
        for known in TRACE_COLUMNS.values()
    ]
    if None not in found:
        return found
    if len(header) <= 3 and all(place in (None, column) for column, place in enumerate(found)):
        return range(3)  # in this order, by names of their own
    missing = list(TRACE_COLUMNS)[found.index(None)]
    raise ValueError(f"{path}: which column holds {missing}? Call it '{missing}', among {header!r:.200}")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _date(text: str) -> float:
    """Seconds since 1970 of a date in ISO format, in UTC where it has no offset."""
    date = datetime.fromisoformat(text)
    return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()


def random_ids(draw: np.random.Generator, tokens: float, scale: float) -> list[int]:
    """A prompt that shares no prefix with another."""
    if (length := scaled(tokens, scale)) > MOST_TOKENS:
        raise ValueError(f"a prompt of {length:,} tokens is more than {MOST_TOKENS:,}: take a smaller scale")
    return draw.integers(0, VOCAB, length).tolist()


def numbered_ids(draw: np.random.Generator, tokens: float, scale: float) -> range:
    """The same for virtual time, where any whole number is a token: consecutive ones from a random first."""
    first = int(draw.integers(0, 1 << 31))
    return range(first, first + scaled(tokens, scale))


def scaled(tokens: float, scale: float) -> int:
    """A length, shrunk; at least 1."""
    if not (length := float(tokens) * scale) < 2**62:
        raise ValueError(f"scale {scale:g} makes {tokens:g} tokens more than any memory holds")
    return max(1, round(length))


WORKLOADS = {
    "yardstick": yardstick,
    "peers": peers,
    "chat": chat,
    "code": code,
    "lognormal": lognormal,
    "articles-static": articles_static,
    "worked-example": worked_example,
    "shared-prefix": shared_prefix,
    "trace": trace,
}
