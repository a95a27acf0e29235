"""The ladder: every rung on the same chat requests, how fast it is, and whether its tokens are the same.

The set-ups take turns, so that whatever slows the machine for a while slows all of them, and
each figure is a median with the lowest and highest beside it. Rungs 0 and 1 are slow by
nature and run only the first requests. Rungs 2 to 5 run all of them in one budget of memory.
Rung 6 is about the latency of one user: it serves one request whose answer copies from its
prompt, after plain decoding has served the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import mean, median, pstdev

import torch

from minillm.course.experiments.common import spread_columns
from minillm.course.prompts import CHAT_PROMPTS, COPY_PROMPTS
from minillm.course.setting import Progress, Setting, silent
from minillm.course.show.tables import cell, text_table, with_range
from minillm.fast.engine import Engine
from minillm.fast.memory import native_format
from minillm.ladder.decode import NoCache, decode_cached, decode_recomputing
from minillm.ladder.quantized import kv_bytes_per_token
from minillm.ladder.records import StepRecord
from minillm.ladder.request import SamplingParams
from minillm.ladder.speculative import NgramProposer, Speculator
from minillm.measure import metrics
from minillm.measure.bench import started
from minillm.measure.measurement import Measurement, Spread, Watch, provenance
from minillm.measure.workload import WorkItem, lognormal, play_by_step

# How far apart the two likeliest logits may be where two rungs are allowed to disagree: sums in
# another order move a logit by this much, and a tie then falls the other way.
MARGIN_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.5}

TURNS = 3
REQUESTS, MAX_TOKENS = 36, 48  # by default; an answer's cap is what a slot must reserve
CAP_OVER_MEAN = 6  # answers are a sixth of their cap on average, and vary as chats do: CV 1
SEED = 0
SLOTS = 6  # of the longest request, in the default memory
DRAFTS = 8  # a row, on rung 6
COPIED_TOKENS = 32  # of the answer that copies


@dataclass(frozen=True)
class Rung:
    """A line of the table. settings: of its engine; None decodes one request after another.

    first: how many of the requests it runs; None is all. exact: its tokens must be rung 1's.
    alone: it serves the copying request. beside: the place of the rung it is compared with in RUNGS.
    """

    number: int
    name: str
    adds: str
    settings: dict | None = None
    first: int | None = None
    exact: bool = True
    alone: bool = False
    drafts: int = 0
    beside: int | None = None


CONTINUOUS = {"batching": "continuous", "kv": "slots"}
PAGED = {"batching": "continuous", "kv": "paged"}
RUNGS = (
    Rung(0, "recompute", "a forward over the whole text for every token", first=2),
    Rung(1, "KV cache", "keys and values are kept; a step feeds one token", first=6, beside=0),
    Rung(2, "static batch", "a batch shares one read of the weights", {"batching": "static", "kv": "slots"}, beside=1),
    Rung(3, "continuous batch", "the batch is re-decided at every step", CONTINUOUS, beside=2),
    Rung(4, "paged KV", "memory by block, shared prefixes", PAGED, beside=3),
    Rung(5, "int8 KV", "8 bits per key and value: more rows in the same memory", {**PAGED, "kv_format": "int8"},
         exact=False, beside=4),
    Rung(4, "one request alone", "nothing to share a step with", PAGED, alone=True),
    Rung(6, "n-gram drafts, alone", "guess tokens, verify them in one pass", PAGED, alone=True, drafts=DRAFTS,
         beside=6),
)
FIRST_BATCHED = 2  # the place in RUNGS of the first that runs all requests
MAIN = 4  # the place of the rung whose spread is the measurement's noise


@dataclass(frozen=True)
class Task:
    """What a rung is given: its requests, and bytes for their keys and values."""

    rung: Rung
    items: Sequence[WorkItem]
    kv_memory: int


@dataclass
class Run:
    """What one rung did with its requests in one turn. ends_s: of each request, where they ran one after another;
    steps: an engine's, where they ran on one."""

    outputs: list[list[int]]
    seconds: float
    details: dict
    ends_s: list[float] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        return sum(map(len, self.outputs)) / self.seconds

    def speed_on_first(self, requests: int) -> float:
        """Output tokens per second over the first requests of a run one by one; of a batch, over all."""
        if not self.ends_s or requests >= len(self.outputs):
            return self.tokens_per_s
        return sum(map(len, self.outputs[:requests])) / self.ends_s[requests - 1]


# -- the requests ---------------------------------------------------------------------------------


def chat_requests(tokenizer, requests: int = REQUESTS, max_tokens: int = MAX_TOKENS) -> list[WorkItem]:
    """Chat prompts, no two alike, all arriving at the start; their answers end where the scheduler cannot see it."""
    lengths = lognormal(1.0, requests, max_tokens / CAP_OVER_MEAN, prompt_tokens=1, seed=SEED)
    prompts = [CHAT_PROMPTS[i % len(CHAT_PROMPTS)] for i in range(requests)]
    rounds = [i // len(CHAT_PROMPTS) for i in range(requests)]
    asked = [f"In {r + 1} sentences: {prompt}" if r else prompt for r, prompt in zip(rounds, prompts, strict=True)]
    return [
        WorkItem(0.0, tokenizer.chat(text), max_tokens, min(length.output_tokens, max_tokens))
        for text, length in zip(asked, lengths, strict=True)
    ]


def copying_request(tokenizer) -> WorkItem:
    """One request whose answer repeats a passage of its prompt."""
    return WorkItem(0.0, tokenizer.chat(COPY_PROMPTS[0]), COPIED_TOKENS)


def describe(items: Sequence[WorkItem]) -> str:
    """The requests in one line: how many, how long, how varied."""
    prompts, answers = [len(item.prompt_ids) for item in items], [item.output_tokens for item in items]
    return (
        f"{len(items)} chat requests, all at the start: prompts of {min(prompts)} to {max(prompts)} tokens, answers of "
        f"{min(answers)} to {max(answers)} (mean {mean(answers):.1f}, CV {pstdev(answers) / mean(answers):.2f})"
    )


def _memory(model, items: Sequence[WorkItem], slots: int, block_size: int = 16) -> int:
    """Bytes of keys and values that hold so many slots of the longest request."""
    blocks = -(-max(len(item.prompt_ids) + item.max_tokens for item in items) // block_size)
    return slots * blocks * block_size * kv_bytes_per_token(model.config, native_format(model.dtype))


# -- the measurement ------------------------------------------------------------------------------


def ladder(
    model,
    tokenizer,
    name: str,
    items: Sequence[WorkItem],
    kv_memory: int | None = None,
    progress: Progress = silent,
    within: Callable[[Iterable[int]], Iterable[int]] = iter,
) -> Measurement:
    """Every rung of RUNGS on the requests, TURNS times in turns; a row for each. `ladder_table` shows the rows.

    kv_memory: bytes of keys and values for rungs 2 to 5; by default what holds SLOTS slots of
    the longest request. progress(label, total) gives a bar with `update`. within: of the turns, those to run.
    """
    copying = [copying_request(tokenizer)]
    if kv_memory is None:
        kv_memory = _memory(model, items, SLOTS)
    alone = {"items": copying, "kv_memory": _memory(model, copying, 1)}
    tasks = [Task(rung, **alone) if rung.alone else Task(rung, items[: rung.first], kv_memory) for rung in RUNGS]
    _refuse_what_cannot_run(model, tasks)
    _warm_up(model, items)
    watch = Watch()
    runs = _in_turns(model, tasks, progress, watch, within)
    references = {  # rung 1's tokens, and rung 2's for the requests that rung 1 did not run
        False: runs[1][0].outputs + runs[FIRST_BATCHED][0].outputs[len(tasks[1].items) :],
        True: [list(decode_cached(model, item.prompt_ids, item.output_tokens)) for item in copying],
    }
    rows = [_row(model, task, runs, references[task.rung.alone]) for task in tasks]
    spread = Spread.of([run.tokens_per_s for run in runs[MAIN]], warmups=1)
    load = watch.found(model.device.type == "cpu")
    return Measurement("ladder", provenance(name, native_format(model.dtype), model.device, SEED, spread, **load), rows)


def _refuse_what_cannot_run(model, tasks: Sequence[Task]) -> None:
    """Raise RequestError or ValueError now, and not after the slow rungs have run."""
    for task in tasks:
        if task.rung.settings is not None:
            engine = _engine(model, task)
            for item in task.items:
                engine.add(item.prompt_ids, item.params)


def _in_turns(model, tasks: Sequence[Task], progress: Progress, watch: Watch, within: Callable) -> list[list[Run]]:
    """Every task once a turn; the runs of each. watch: told how busy the machine is."""
    runs: list[list[Run]] = [[] for _ in tasks]
    for turn in within(range(1, TURNS + 1)):
        for task, mine in zip(tasks, runs, strict=True):
            with progress(f"turn {turn} of {TURNS}, rung {task.rung.number}: {task.rung.name}", len(task.items)) as bar:
                with watch:
                    mine.append(_run(model, task, bar))
                watch.compare_steps(mine[-1].steps)
    return runs


def _engine(model, task: Task) -> Engine:
    speculator = Speculator(NgramProposer(), task.rung.drafts) if task.rung.drafts else None
    return started(Engine(model, kv_memory=task.kv_memory, speculator=speculator, **task.rung.settings))


def _run(model, task: Task, bar) -> Run:
    """One turn of one rung."""
    if task.rung.settings is None:
        return _run_one_by_one(model, decode_cached if task.rung.number else decode_recomputing, task.items, bar)
    return _run_engine(_engine(model, task), task.items, bar)


def _run_one_by_one(model, decode: Callable, items: Sequence[WorkItem], bar) -> Run:
    """Serve the requests in order, each by itself; all are taken to have arrived at the start."""
    outputs, ttft, ends, start = [], [], [], time.perf_counter()
    for item in items:
        outputs.append([])
        for token in decode(model, item.prompt_ids, item.output_tokens):
            if not outputs[-1]:
                ttft.append(time.perf_counter() - start)
            outputs[-1].append(token)
        ends.append(time.perf_counter() - start)
        bar.update(1)
    per_token = kv_bytes_per_token(model.config, native_format(model.dtype)) / 1e6
    longest = max(len(item.prompt_ids) + item.output_tokens for item in items) if decode is decode_cached else 0
    details = {
        "ttft_p50_s": metrics.percentile(ttft, 50), "latency_p99_s": metrics.percentile(ends, 99), "batch_rows": 1.0,
        "idle_slot_steps": 0, "kv_held_mb": longest * per_token, "kv_used_mb": max(longest - 1, 0) * per_token,
    }
    return Run(outputs, ends[-1], details, ends)


def _run_engine(engine: Engine, items: Sequence[WorkItem], bar) -> Run:
    """Serve the requests on an engine."""
    outputs: list[list[int]] = [[] for _ in items]
    for events in play_by_step(engine, items):
        for item, event in events:
            outputs[item] += event.token_ids
            bar.update(event.finished)
    found = metrics.summary(engine.records)
    per_token = engine.block_bytes / engine.records.block_size / 1e6
    details = {
        "ttft_p50_s": found["ttft_s"]["p50"], "latency_p99_s": found["latency_s"]["p99"],
        "batch_rows": found["batch"]["mean_rows"], "idle_slot_steps": found["batch"]["idle_row_steps"],
        "kv_held_mb": found["kv"]["peak_reserved_tokens"] * per_token,
        "kv_used_mb": found["kv"]["peak_used_tokens"] * per_token,
    }
    return Run(outputs, found["span_s"], details, steps=engine.records.steps)


def _warm_up(model, items: Sequence[WorkItem]) -> None:
    """Let the allocator and the kernels see a prompt and a step before anything is timed."""
    Engine(model).generate([item.prompt_ids for item in items[:2]], SamplingParams(max_tokens=3))
    list(decode_cached(model, items[0].prompt_ids, 3))


def _row(model, task: Task, runs: Sequence[Sequence[Run]], reference) -> dict:
    """One line of the table: medians over the turns, the gain over the rung before, and the comparison of tokens."""
    rung, mine = task.rung, runs[RUNGS.index(task.rung)]
    times = None
    if rung.beside is not None:
        pairs = zip(mine, runs[rung.beside], strict=True)  # of the same turn
        times = [run.speed_on_first(len(before.outputs)) / before.tokens_per_s for run, before in pairs]
    return {
        "rung": rung.number, "name": rung.name, "adds": rung.adds, "alone": rung.alone, "requests": len(task.items),
        "output_tokens": sum(map(len, mine[0].outputs)), "turns": len(mine),
        **spread_columns("tokens_per_s", [run.tokens_per_s for run in mine]),
        **spread_columns("times_rung_before", times),
        **{column: median(run.details[column] for run in mine) for column in mine[0].details},
        **_compared(model, task, mine, reference),
    }


def _compared(model, task: Task, runs: Sequence[Run], reference) -> dict:
    """Whether the tokens of every turn are the reference's; of an inexact rung only how far they agree."""
    agreed = {"agreement_percent": 100 * agreement(runs[0].outputs, reference)}
    if not task.rung.exact:
        return {"identical": None, "divergences": [], **agreed}
    found = [compare(model, [item.prompt_ids for item in task.items], run.outputs, reference) for run in runs]
    return {**next((turn for turn in found if not turn["identical"]), found[0]), **agreed}


# -- comparing tokens -----------------------------------------------------------------------------


def agreement(outputs: Sequence[Sequence[int]], reference: Sequence[Sequence[int]]) -> float:
    """The share of the reference's tokens, of the requests that both ran, before the first that differs."""
    pairs = list(zip(outputs, reference, strict=False))
    same = sum(next(iter(first_divergence(got, want)), len(want)) for got, want in pairs)
    return same / sum(len(want) for _, want in pairs)


def compare(model, prompts, outputs, reference) -> dict:
    """Whether a rung's tokens are the reference's, and where not, by how small a margin.

    `identical` forgives a first divergence only where the two likeliest logits are as good
    as tied; `divergences` lists them all.
    """
    divergences = [
        {"request": number, "token": token, "top2_margin": top2_margin(model, prompt + want[:token])}
        for number, (prompt, got, want) in enumerate(zip(prompts, outputs, reference, strict=False))
        for token in first_divergence(got, want)
    ]
    identical = all(d["top2_margin"] <= MARGIN_TOLERANCE[model.dtype] for d in divergences)
    return {"identical": identical, "divergences": divergences}


def first_divergence(got: Sequence[int], want: Sequence[int]) -> Iterator[int]:
    """The index of the first token in which two outputs differ, if they do."""
    if list(got) != list(want):
        pairs = enumerate(zip(got, want, strict=False))
        yield next((i for i, (a, b) in pairs if a != b), min(len(got), len(want)))


@torch.inference_mode()
def top2_margin(model, ids: Sequence[int]) -> float:
    """By how much the likeliest next token's logit exceeds the second's, computed without a cache."""
    tokens = torch.tensor(ids, device=model.device)
    positions = torch.arange(len(ids), device=model.device)
    best, second = model.forward(tokens, positions, NoCache(), positions[-1:])[0].float().topk(2).values
    return float(best - second)


# -- the table ------------------------------------------------------------------------------------

COLUMNS = {
    "rung": "rung", "tokens_per_s": "tokens/s", "times": "x before", "ttft_p50_s": "TTFT p50 s",
    "latency_p99_s": "latency p99 s", "batch_rows": "mean batch", "kv": "KV MB, used of held", "same": "same tokens",
}
NOT_COMPARABLE = {"ttft_p50_s": None, "latency_p99_s": None}  # of the first few requests: nobody waits for the others


def ladder_table(rows: Sequence[dict]) -> str:
    """The rows as `minillm ladder` and README.md show them; `ladder_notes` says what the columns mean."""
    all_requests = rows[FIRST_BATCHED]["requests"]
    shown = [
        {
            **row, **({} if row["requests"] == all_requests or row["alone"] else NOT_COMPARABLE),
            "rung": f"{row['rung']} {row['name']}", "tokens_per_s": with_range(row, "tokens_per_s"),
            "times": _times(row, before),
            "kv": f"{cell(row['kv_used_mb'])} of {cell(row['kv_held_mb'])}" if row["kv_held_mb"] else "-",
            "same": f"{row['agreement_percent']:.0f} %" if row["identical"] is None else cell(row["identical"]),
        }
        for row, before in zip(rows, [None, *rows], strict=False)
    ]
    return text_table(shown, COLUMNS)


def _times(row: dict, before: dict | None) -> str:
    """The ratio of the two medians that the table shows, so that a reader finds it again."""
    return "-" if row["times_rung_before"] is None else f"{row['tokens_per_s'] / before['tokens_per_s']:.2f}"


def ladder_notes(rows: Sequence[dict]) -> str:
    """What the columns of `ladder_table` mean, with the numbers that belong to it."""
    first, second, every = (rows[place]["requests"] for place in (0, 1, FIRST_BATCHED))
    turns, copied, idle = rows[0]["turns"], rows[-1]["output_tokens"], rows[FIRST_BATCHED]["idle_slot_steps"]
    return "\n".join((
        f"Rung 0 ran the first {first} requests, rung 1 {second}, rungs 2 to 5 all {every}. Alone: one request, "
        f"whose {copied} tokens copy its prompt.",
        f"tokens/s of output: the median of {turns} turns (lowest-highest). x before: it over that of the line above.",
        "TTFT, latency: from a request's arrival to its first and last token, queueing included, where all requests "
        "ran;\nunder 100 requests p99 is the highest.",
        f"mean batch: rows a step that served a request; static batches also carried finished rows, {idle:,} times.",
        "KV MB: the peak of keys and values in use, of the memory held for them.",
        "same tokens: as rung 1's, or rung 2's where rung 1 did not run. In %: tokens before a request's first that "
        "differs:\nafter it a greedy text goes another way, which need not be worse; `minillm measure kv_quality` asks "
        "that.",
    ))


def ladder_experiment(setting: Setting) -> Measurement:
    """`ladder` at the sizes of a setting."""
    requests, max_tokens = setting.size((6, 8), (REQUESTS, MAX_TOKENS), (128, 256))
    items = chat_requests(setting.tokenizer, requests, max_tokens)
    return ladder(setting.model, setting.tokenizer, setting.model_name, items, progress=setting.progress,
                  within=setting.within_budget)
