"""A learner's engine beside the package's: the ladder of exercise 13, on a real model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

from minillm.course.show.tables import text_table
from minillm.course.your_engine import Engine, Step
from minillm.fast import engine as package
from minillm.ladder.records import Records
from minillm.ladder.request import Request, SamplingParams
from minillm.ladder.static import decode_static

ROWS = 4  # of a batch
BUDGET = 64  # tokens in a step
COLUMNS = {"rung": "", "tokens_per_s": "tokens/s", "steps": "steps", "same": "same tokens as the package's"}


@dataclass(frozen=True)
class Run:
    """One rung: its answers, how long they took, and its steps, where they are known."""

    answers: list[list[int]]
    seconds: float
    steps: list[Step]

    @property
    def tokens_per_s(self) -> float:
        return sum(map(len, self.answers)) / self.seconds


def ladder(
    MyEngine: type[Engine], model, prompts: Sequence[Sequence[int]], max_tokens: int, drafter: Callable | None = None
) -> dict[str, Run]:
    """The same requests on each rung, from one at a time to the package's engine."""
    stops = model.config.eos_token_id
    limits = {"max_batch": ROWS, "max_step_tokens": BUDGET}

    def yours(**settings) -> Run:
        engine = MyEngine(model, **{**limits, **settings})
        start = perf_counter()
        answers = engine.serve(prompts, max_tokens, stops)
        return Run(answers, perf_counter() - start, engine.steps)

    return {
        "one at a time, your cache": yours(max_batch=1, paged=False),
        "static batch (the package's)": static(model, prompts, max_tokens),
        "your scheduler, a cache each": yours(paged=False),
        "yours": yours(),
        "yours, keys and values in int8": yours(int8=True),
        "yours, with drafts": yours(drafter=drafter),
        "the package's": packages(model, prompts, max_tokens, limits),
    }


def static(model, prompts: Sequence[Sequence[int]], max_tokens: int) -> Run:
    """All of them in static batches."""
    params, stops = SamplingParams(max_tokens=max_tokens), frozenset(model.config.eos_token_id)
    requests = [Request(number, list(prompt), params, stop_ids=stops) for number, prompt in enumerate(prompts)]
    start = perf_counter()
    decode_static(model, requests, ROWS)
    return Run([request.output_ids for request in requests], perf_counter() - start, [])


def packages(model, prompts: Sequence[Sequence[int]], max_tokens: int, limits: dict) -> Run:
    """The package's engine, with the same limits."""
    engine = package.Engine(model, records="all", **limits)
    start = perf_counter()
    completions = engine.generate(prompts, SamplingParams(max_tokens=max_tokens))
    seconds = perf_counter() - start
    return Run([completion.token_ids for completion in completions], seconds, steps_of(engine.records))


def steps_of(records: Records) -> list[Step]:
    """The steps of a record, with requests numbered from 1 in the order in which they were first in a step."""
    numbers = {name: i for i, name in enumerate(dict.fromkeys(n for s in records.steps for n in s.members), start=1)}
    return [
        Step(step.start, step.start + step.duration,
             [(numbers[name], "decode" if kind == "decode" else "prefill")
              for name, kind in zip(step.members, step.kinds, strict=True)])
        for step in records.steps
    ]


def ladder_table(runs: dict[str, Run]) -> str:
    """Tokens a second and steps of each rung, and whether its answers are those of the last one, the package's."""
    *_, last = runs.values()
    rows = [{"rung": name, "tokens_per_s": run.tokens_per_s, "steps": len(run.steps) or None,
             "same": run.answers == last.answers} for name, run in runs.items()]
    return text_table(rows, COLUMNS)
