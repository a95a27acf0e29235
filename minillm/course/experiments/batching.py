"""Ledger part B: what a batch buys, and what the policy that fills it is worth. Notebooks 02 and 03."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import mean, median, pstdev

import numpy as np
import torch

from minillm.course.experiments.common import (
    WARM_UPS,
    Decoding,
    Key,
    TimedStep,
    count,
    decode_seconds,
    engine_for,
    random_prompts,
    spread_columns,
    step_row,
    time_in_turns,
    timed_step,
    warm_up,
)
from minillm.course.experiments.prediction import TurnClock, TurnRun, in_turns
from minillm.course.figures import LATENCIES, flat
from minillm.course.setting import Setting, timed
from minillm.fast.engine import Engine
from minillm.fast.memory import native_format
from minillm.guard.inputs import check_at_least
from minillm.ladder.quantized import kv_bytes_per_token
from minillm.ladder.records import Records
from minillm.ladder.request import SamplingParams
from minillm.load.config import ModelConfig
from minillm.measure import metrics
from minillm.measure.bench import started
from minillm.measure.measurement import EXACT, Measurement, Spread, provenance
from minillm.measure.reference import load_reference
from minillm.measure.roofline import StepShape
from minillm.measure.workload import WorkItem, articles_static, chat, lognormal

COUNTED_SHAPE = "smollm2-135m"  # any will do: nothing is computed

# -- loads in turns -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Load:
    """Requests, the clients of a closed loop (None gives all at the start), and settings of the engine."""

    items: Sequence[WorkItem]
    clients: int | None
    settings: dict


def play_in_turns(setting: Setting, label: str, loads: Mapping[Key, Load], turns: int) -> list[dict[Key, Records]]:
    """The records of each load in each turn, or in as many turns as the budget allows.

    On a CPU the loads of a turn are played together, a step of each, and every engine's clock stands still
    meanwhile (`in_turns`). A GPU launches steps ahead, into another's turn, so there they follow one another.
    """
    found, together = [], not setting.gpu
    for turn in setting.within_budget(range(1, turns + 1)):
        runs = {key: turn_run(setting.timed_model, load, together) for key, load in loads.items()}
        total = sum(run.output_tokens for run in runs.values())
        with setting.progress(f"{label}: turn {turn} of {turns}, tokens", total) as bar:
            for group in [list(runs.values())] if together else [[run] for run in runs.values()]:
                in_turns(group, bar.update)
        found.append({key: run.engine.records for key, run in runs.items()})
    for key in loads:
        setting.watch.compare_steps(step for run in found for step in run[key].steps)
    return found


def turn_run(model, load: Load, together: bool) -> TurnRun:
    """A load on a new engine whose clock runs in its own turns alone."""
    engine = engine_for(model, load.items, clock=TurnClock(time.perf_counter), **load.settings)
    engine.runs_ahead = engine.runs_ahead and not together
    return TurnRun(engine, load.items, load.clients or len(load.items))


# -- rows of a step -------------------------------------------------------------------------------



@timed
def batch_curve(setting: Setting) -> Measurement:
    """A decode step's time, and the tokens per second it gives, by the rows that share it."""
    sizes = setting.size((1, 8, 32, 64), (1, 2, 4, 8, 16, 32, 64, 128), (1, 2, 4, 8, 16, 32, 64, 128, 256))
    turns, repeats = setting.size((3, 3), (5, 4), (5, 16))
    steps = {number: timed_step(setting, "decode", number, 16, repeats, turns) for number in sizes}
    found = time_in_turns(setting, "batch_curve", steps, turns)
    rows = [{"rows": number, **turns.columns()} for number, turns in found.items()]
    for row, turns in zip(rows, found.values(), strict=True):
        row |= {"times_step": row["step_ms"] / rows[0]["step_ms"],
                "times_tokens": row["tokens_per_s"] / rows[0]["tokens_per_s"],
                **spread_columns("tokens_per_s_each", [1 / seconds for seconds in turns.seconds])}
    return setting.measured("batch_curve", rows, found[sizes[0]].spread)


@timed
def decode(
    setting: Setting, sizes: tuple[Sequence[int], int, int] | None = None, against: str | None = None, **settings
) -> Measurement:
    """Decode steps by batch, beside the least that the device could need. `sizes`: batches, context, steps of each.

    Every row has the same context, so a step reads only weights and cache: it should be near
    the memory's bandwidth at batch 1, and move towards the matmul rate as the batch grows.
    against: "transformers" adds its `generate` on the same weights. settings: the engine's.
    ValueError for sizes below 1.
    """
    batches, context, steps = sizes or setting.size(
        ((1, 8), 32, 4), ((1, 8, 32), 128, 16), ((1, 8, 32, 64, 128), 1024, 64)
    )
    check_at_least(1, batch=min(batches), context=context, steps=steps)
    model, rows, spreads = setting.timed_model, [], []
    reference = load_reference(setting.timed_name, model) if against else None
    for batch in setting.each("decode", batches):
        found = {"minillm": decode_seconds(model, batch, context, steps, **settings)}
        if reference:
            prompts = random_prompts(batch, context, model.config.vocab_size)
            found["transformers, generate"] = generate_step_seconds(reference, prompts, steps, WARM_UPS)
        work = setting.work(StepShape.decode([context + steps // 2] * batch), kv_format=settings.get("kv_format"))
        rows += [{"engine": engine, "batch": batch, "context_tokens": context,
                  **step_row(setting, work, spread, batch)} for engine, spread in found.items()]
        spreads.append(found["minillm"])
    return setting.measured("decode", rows, spreads[0])


@timed
def decode_by_format(setting: Setting) -> Measurement:
    """A decode step of many rows with long contexts, by the format of their keys and values, in turns: fewer bytes are
    read, which someone must turn back into numbers."""
    rows, context, turns, repeats = setting.size((2, 32, 3, 2), (16, 512, 3, 4), (64, 1024, 5, 16))
    steps = {kv_format: format_step(setting, kv_format, rows, context, turns, repeats)
             for kv_format in (native_format(setting.timed_model.dtype), "int8", "fp8")}
    found = time_in_turns(setting, "decode_by_format", steps, turns)
    native = next(iter(found.values()))
    columns = [{"kv_format": kv_format, "rows": rows, "context_tokens": context, **turns.columns()}
               for kv_format, turns in found.items()]
    for row in columns:
        row["times_native_step"] = row["step_ms"] / columns[0]["step_ms"]
    return setting.measured("decode_by_format", columns, native.spread)


def format_step(setting: Setting, kv_format: str, rows: int, context: int, turns: int, repeats: int) -> TimedStep:
    """Steps of `rows` that decode over this format, `repeats` in each turn."""
    steps = turns * (1 + repeats)
    decoding = Decoding(setting.timed_model, rows, context, steps, kv_format=kv_format)
    work = setting.work(StepShape.decode([context + steps // 2] * rows), kv_format=kv_format)
    return TimedStep(work, rows, lambda: decoding.seconds(repeats))


@torch.inference_mode()
def generate_step_seconds(reference, prompts: Sequence[Sequence[int]], steps: int, warmups: int) -> Spread:
    """Seconds between the logits of one step of `generate` and those of the next; prompts are of equal length."""
    ids = torch.tensor(prompts, device=reference.device)  # [B, S]
    synchronize, times = getattr(torch, reference.device.type).synchronize, []

    def note_time(_ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        synchronize()
        times.append(time.perf_counter())
        return logits

    tokens = warmups + steps + 1
    reference.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens,
        do_sample=False, eos_token_id=None, pad_token_id=0, logits_processor=[note_time],
    )
    return Spread.of([after - before for before, after in pairwise(times)][warmups:], warmups)


# -- the knee -------------------------------------------------------------------------------------

REQUESTS_A_CLIENT = 8  # on average: a client that asks once or twice shows a run's start and end, and no queue
RESAMPLES = 200
OUTSIDE = 0.025  # the share of resamples whose knee may lie beyond either end of the interval


@timed
def knee(setting: Setting) -> Measurement:
    """A closed loop of more and more clients, and the knee by `knee_of`, with the interval in which it lies.

    Prompts are of one token, so that every row of a step decodes. `knee_share` is the share of resamples in which the
    knee lies at a row; `power_min` and `power_max` leave out a fortieth of them at either end.
    """
    model = setting.timed_model
    clients = setting.size((1, 2, 4, 8), (1, 2, 4, 8, 16, 24, 32, 48, 64, 128),
                           (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512))
    mean_tokens, prompt = setting.size((6, 1), (8, 1), (32, 16))
    warm_up(model)
    loads = {n: Load(lognormal(0.3, REQUESTS_A_CLIENT * n, mean_tokens, prompt, seed=setting.seed), n,
                     {"max_batch": n, "max_step_tokens": max(256, 2 * n)}) for n in clients}
    runs = play_in_turns(setting, "knee", loads, turns=3)
    rows = [{"clients": n, "requests_per_client": REQUESTS_A_CLIENT, "turns": len(runs),
             **loop_columns([metrics.summary(run[n]) for run in runs], n)} for n in clients]
    add_powers(rows, [{n: Answered.of(run[n]) for n in clients} for run in runs], setting.seed)
    speed = [knee_of(rows)[f"tokens_per_s{end}"] for end in ("_min", "", "_max")]
    return setting.measured("knee", rows, Spread(*speed, repeats=len(runs), warmups=1))


def loop_columns(summaries: Sequence[dict], clients: int) -> dict:
    """What the turns of a closed loop found: medians, and the spread of the two figures of the knee."""
    found = [flat(each, "tokens_per_s", "mean_rows", *LATENCIES) for each in summaries]
    columns = {name: median(each[name] for each in found) for name in found[0]}
    speeds, gaps = ([each[name] for each in found] for name in ("tokens_per_s", "itl_p50_ms"))
    return {
        "mean_rows": columns.pop("mean_rows"), **spread_columns("tokens_per_s", speeds),
        "tokens_per_s_each": median(speeds) / clients, **columns, **spread_columns("itl_p50_ms", gaps),
    }


def power(row: dict) -> float:
    """Tokens per second over the median gap between tokens, in ms (power: Kleinrock, 1979)."""
    return row["tokens_per_s"] / row["itl_p50_ms"]


def knee_of(rows: Sequence[dict]) -> dict:
    """The row with the most power.

    Up to it throughput grows faster than latency, in per cent; past it, latency does. With
    steps of a + b n seconds for n rows it lies at n = a / b: where the rows' own work takes
    as long as what they share.
    """
    return max(rows, key=power)


def knees_of(rows: Sequence[dict]) -> list[dict]:
    """The rows at which the knee may lie: from the first to the last that more than `OUTSIDE` of the resamples reach.

    Of rows without resamples `knee_of` alone.
    """
    if any(row.get("knee_share") is None for row in rows):
        return [knee_of(rows)]
    reached = np.cumsum([row["knee_share"] for row in rows])
    return [row for row, upto in zip(rows, reached, strict=True)
            if upto > OUTSIDE and upto - row["knee_share"] < 1 - OUTSIDE]


def add_powers(rows: Sequence[dict], turns: Sequence[Mapping[int, Answered]], seed: int) -> None:
    """Give each row its power, where it lies in the resamples of these turns, and the share in which its knee is."""
    powers, at = resampled_powers(turns, seed), knee_of(rows)
    knees = powers.argmax(1)
    for i, row in enumerate(rows):
        low, high = np.quantile(powers[:, i], (OUTSIDE, 1 - OUTSIDE)).tolist()
        row |= {"power": power(row), "power_min": min(low, power(row)), "power_max": max(high, power(row)),
                "knee_share": float((knees == i).mean()), "knee": "<- knee" if row is at else ""}


@dataclass(frozen=True)
class Answered:
    """What a closed loop's requests tell of its power. tokens, seconds [R]: of each request, from arrival to finish;
    gaps [G]: between two tokens of one request, of_request [G]; present: requests under way on average."""

    tokens: np.ndarray
    seconds: np.ndarray
    gaps: np.ndarray
    of_request: np.ndarray
    present: float

    @classmethod
    def of(cls, records: Records) -> Answered:
        requests = records.requests
        seconds = np.array([request.finish - request.arrival for request in requests])
        gaps = [metrics.step_gaps(request)[0] for request in requests]
        return cls(np.array([request.output_tokens for request in requests]), seconds, np.concatenate(gaps),
                   np.repeat(range(len(gaps)), [len(each) for each in gaps]),
                   seconds.sum() / (records.ended - records.began))

    def figures(self, drawn: np.ndarray) -> tuple[float, float]:
        """Tokens per second, and the median gap in ms, had these been the requests [R]; some are drawn repeatedly.

        By Little's law: as many are present, and each takes its own time, so their rate follows.
        """
        tokens_per_s = self.present * self.tokens[drawn].sum() / self.seconds[drawn].sum()
        times = np.bincount(drawn, minlength=len(self.tokens))
        return tokens_per_s, 1e3 * metrics.percentile(np.repeat(self.gaps, times[self.of_request]), 50)


def resampled_powers(turns: Sequence[Mapping[int, Answered]], seed: int, resamples: int = RESAMPLES) -> np.ndarray:
    """The power of each number of clients in each resample [resamples, clients] (bootstrap: Efron, 1979).

    A resample draws turns, since all requests of a turn share the machine's mood, and in each of them requests.
    """
    draw, powers = np.random.default_rng(seed), []
    for _ in range(resamples):
        drawn = draw.integers(len(turns), size=len(turns))
        found = [[each.figures(draw.integers(len(each.tokens), size=len(each.tokens))) for each in turns[turn].values()]
                 for turn in drawn]  # [turns][clients] pairs
        speeds, gaps = np.median(found, axis=0).T
        powers.append(speeds / gaps)
    return np.array(powers)


def idle_slots(setting: Setting) -> Measurement:
    """Slot-steps that serve no request, under both policies. Counted without a forward, so no clock is in them."""
    cases = {
        "80 beside 800 tokens": (articles_static((80, 800)), 2),
        "one of 800, seven of 40": (articles_static(), 8),
        "32 answers of varied length, 4 slots": (lognormal(1.0, 32, 20, 8, seed=setting.seed), 4),
    }
    rows, config = [], ModelConfig.preset(COUNTED_SHAPE)
    for case, (items, slots) in cases.items():
        for batching in ("static", "continuous"):
            records = count(config, items, batching=batching, kv="slots", max_batch=slots)
            totals = records.totals
            rows.append({
                "case": case, "batching": batching, "slots": slots, "steps": totals["steps"],
                "idle_slot_steps": totals["idle_rows"],  # finished rows that were carried on
                "idle_share": totals["idle_rows"] / totals["rows"],
                "empty_while_waiting": sum(slots - step.rows for step in records.steps if step.waiting),
            })
    source = provenance(f"none ({COUNTED_SHAPE}'s shape)", "none", EXACT, setting.seed, None)
    return Measurement("idle_slots", source, rows)


# -- continuous over static -----------------------------------------------------------------------

SETUPS = {
    "static, slots": {"batching": "static", "kv": "slots"},
    "continuous, slots": {"batching": "continuous", "kv": "slots"},
    "continuous, paged": {"batching": "continuous", "kv": "paged"},
}


@timed
def continuous_vs_static(setting: Setting) -> Measurement:
    """The policies on the lengths of real chats, in the same bytes, which alone limit the batch.

    "answers only" has the same answers after prompts of one token: what the policy is worth
    once prompts are no part of it. A gain is taken within a turn, and `times_static` is their median.
    """
    model = setting.timed_model
    requests, scale = setting.size((12, 0.03), (48, 0.1), (256, 1.0))
    items = chat(requests, scale=scale, seed=setting.seed)
    token_bytes = kv_bytes_per_token(model.config, native_format(model.dtype))
    parts = {"whole run": items, "answers only": [replace(item, prompt_ids=item.prompt_ids[:1]) for item in items]}
    warm_up(model)
    rows = []
    for part, asked in parts.items():
        limits = {"kv_memory": tokens_of_slots(asked, 8) * token_bytes, "max_batch": 64}
        loads = {setup: Load(asked, None, {**limits, **settings}) for setup, settings in SETUPS.items()}
        runs = play_in_turns(setting, f"continuous_vs_static, {part}", loads, turns=3)
        common = {"requests": requests, "turns": len(runs)}
        rows += [{"part": part, "setup": setup, **common, **policy_row(runs, setup)} for setup in SETUPS]
    return setting.measured("continuous_vs_static", rows)


def policy_row(runs: Sequence[Mapping[str, Records]], setup: str) -> dict:
    """What the turns of a set-up found, and beside the first set-up of the same turn; counts are equal in all."""
    one = metrics.summary(runs[0][setup])
    speeds, static = ([metrics.summary(run[name])["output_tokens"] / run[name].totals["busy_seconds"] for run in runs]
                      for name in (setup, next(iter(SETUPS))))
    gains = [speed / other for speed, other in zip(speeds, static, strict=True)]
    return {
        "steps": one["steps"], "mean_rows": one["batch"]["mean_rows"], "idle_share": one["batch"]["idle_share"],
        **spread_columns("tokens_per_s", speeds), **spread_columns("times_static", gains),
    }


def tokens_of_slots(items: Sequence[WorkItem], slots: int) -> int:
    """Tokens that `slots` of the mean request reserve, and at least those of the longest request."""
    tokens = [len(item.prompt_ids) + item.max_tokens + 16 for item in items]
    return round(max(slots * mean(tokens), max(tokens)))


@timed
def gain_by_spread(setting: Setting, repeats: int = 3) -> Measurement:
    """Continuous over static batching on the same requests, by the spread of their answers' lengths.

    repeats: turns of each. A gain is taken within a turn, and the median is shown.
    """
    rows: list[dict] = []
    requests, mean_tokens, spreads = setting.size((32, 8, (0.0, 1.0)), (32, 12, (0.0, 0.5, 1.0, 2.0)),
                                                  (128, 64, (0.0, 0.5, 1.0, 2.0)))
    warm_up(setting.timed_model)
    for cv in setting.within_budget(spreads):
        items = lognormal(cv, requests=requests, mean_tokens=mean_tokens, prompt_tokens=8)
        loads = {batching: Load(items, None, {"batching": batching, "max_batch": 8})
                 for batching in ("static", "continuous")}
        runs = play_in_turns(setting, f"gain_by_spread, CV {cv:g}", loads, repeats)
        rows.append({"cv": cv, **spread_row(items, runs)})
    return setting.measured("gain_by_spread", rows)


def spread_row(items: Sequence[WorkItem], runs: Sequence[Mapping[str, Records]]) -> dict:
    """The spread as drawn, and steps and speeds of both policies over the turns."""
    lengths, first = [item.output_tokens for item in items], runs[0]
    static, continuous = ([run[name].totals["busy_seconds"] for run in runs] for name in ("static", "continuous"))
    steps = {name: len(records.steps) for name, records in first.items()}
    return {
        "drawn_cv": pstdev(lengths) / mean(lengths), "static_steps": steps["static"],
        "continuous_steps": steps["continuous"], "times_steps": steps["static"] / steps["continuous"],
        "idle_share": metrics.batch(first["static"])["idle_share"],
        **spread_columns("static_tokens_per_s", [sum(lengths) / seconds for seconds in static]),
        **spread_columns("continuous_tokens_per_s", [sum(lengths) / seconds for seconds in continuous]),
        **spread_columns("times_tokens_per_s", [a / b for a, b in zip(static, continuous, strict=True)]),
        "turns": len(runs),
    }


@timed
def stall_by_chunking(setting: Setting, streams: int = 4) -> Measurement:
    """A long prompt arrives while streams decode: the gaps between their tokens, with and without chunks.

    With chunks a step has a budget of tokens; without, it takes the whole prompt. `gaps_ms`
    are the times between the tokens of stream 0, `gap_at_s` when each ended.
    """
    long_prompt, budget, tokens = setting.size((192, 64, 20), (1024, 64, 40), (8128, 256, 40))
    rows, model = [], setting.timed_model
    warm_up(model, long_prompt // 2)
    for prompt, step_budget in (("whole", long_prompt + streams), ("in chunks", budget)):
        engine = started(Engine(model, max_batch=streams + 1, max_context=long_prompt + tokens, prefix_cache=False,
                                max_step_tokens=step_budget, chunked_prefill=prompt == "in chunks"))
        for number in range(streams):
            engine.add([number] * 16, SamplingParams(max_tokens=tokens, ignore_eos=True), number)
        while engine.has_work:
            engine.step()
            if len(engine.records.steps) == 8:
                engine.add([0] * long_prompt, SamplingParams(max_tokens=4, ignore_eos=True), "late")
        rows.append({"prompt": prompt, "step_budget": step_budget, **stall_row(engine.records)})
    return setting.measured("stall_by_chunking", rows)


def stall_row(records: Records) -> dict:
    """The gaps of stream 0, and the steps and the time that the late prompt took to its first token."""
    ended = {record.request_id: record for record in records.requests}
    stream, late = ended[0], ended["late"]
    gaps = (metrics.step_gaps(stream)[0] * 1e3).tolist()
    return {
        "p50_gap_ms": median(gaps), "longest_gap_ms": max(gaps),
        "prompt_steps": sum(step.start < late.first_token and "late" in step.members for step in records.steps),
        "late_ttft_ms": (late.first_token - late.arrival) * 1e3,
        "gaps_ms": gaps, "gap_at_s": [moment - stream.arrival for moment in stream.token_times[1:]],
    }
