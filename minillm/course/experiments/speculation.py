"""The experiment of letter E: what drafts buy, by their number, their acceptance and the batch.

Figures called real draft without knowing the answer: by prompt lookup, or by the drafter, on
prompts that it was not trained on. Those called replay are right or wrong to order, so that a
whole curve can be drawn; no drafter produced them. Tokens per second are those of steps in
which the whole batch decodes, so that no step with a prompt is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from statistics import median

import numpy as np
import torch
from torch import Tensor

from minillm.course.experiments.common import measured, spread_columns
from minillm.course.experiments.ladder import compare
from minillm.course.prompts import CHAT_PROMPTS, COPY_PROMPTS
from minillm.course.setting import Setting, timed
from minillm.extras.adaptive import AdaptiveSpeculator
from minillm.extras.drafter import WEIGHTS, DrafterProposer, fits, load_drafter, read_card
from minillm.fast.engine import Engine
from minillm.ladder.continuous import Row, StepPlan
from minillm.ladder.records import Records, StepRecord, accepted_drafts
from minillm.ladder.request import SamplingParams
from minillm.ladder.speculative import NgramProposer, Proposer, Speculator, verify_sampled
from minillm.load.config import ModelConfig
from minillm.measure import metrics
from minillm.measure.bench import started
from minillm.measure.measurement import Measurement, Spread
from minillm.measure.virtual import uniform

ADAPTIVE = 8  # the most drafts that the adaptive length may choose
USUAL = 4  # the draft length at which batches are compared
TURNS = 3  # of plain decoding and of each kind of drafts
PURPOSE = 7  # of the uniform numbers that decide where a replayed draft is wrong


def decode(
    model, prompts: Sequence[list[int]], tokens: int, batch: int, speculator: Speculator | None = None
) -> tuple[Records, list[list[int]]]:
    """`tokens` tokens for each prompt, greedily, never more than `batch` prompts in one step; records and outputs."""
    context, budget = max(map(len, prompts)) + tokens, max(256, batch * (ADAPTIVE + 1))
    engine = started(Engine(model, max_batch=batch, max_context=context, max_step_tokens=budget, prefix_cache=False,
                            kv_memory=None, speculator=speculator))
    done = engine.generate(prompts, SamplingParams(tokens, ignore_eos=True))
    return engine.records, [each.token_ids for each in done]


def full_steps(records: Records, batch: int) -> list[StepRecord]:
    """Those in which the whole batch decodes, and nothing else happens."""
    return [s for s in records.steps if s.sampled_rows == s.rows == batch and not s.prompt_tokens]


def tokens_per_s(records: Records, batch: int) -> float:
    """Over the full steps."""
    steps = full_steps(records, batch)
    return sum(s.output_tokens for s in steps) / sum(s.duration for s in steps)


class Counted(Speculator):
    """A speculator that counts its drafts by their place: those `tried`, all before them right, and those `right`."""

    def __init__(self, proposer: Proposer, draft_length: int = USUAL) -> None:
        super().__init__(proposer, draft_length)
        self.tried, self.right = [0] * draft_length, [0] * draft_length

    def observe(self, plan: StepPlan, outputs: Sequence[Sequence[int]]) -> None:
        """Count a step's drafts, then learn from it as any speculator does."""
        for row, output in zip([row for row in plan.rows if row.samples], outputs, strict=True):
            accepted = accepted_drafts(row.drafts, output)
            for place in range(min(len(row.drafts), accepted + 1)):
                self.tried[place] += 1
                self.right[place] += place < accepted
        super().observe(plan, outputs)


class AdaptiveCounted(Counted, AdaptiveSpeculator):
    """The same, with a draft length that adapts."""


def acceptance_by_position(
    model, proposer: Proposer, prompts: Sequence[list[int]], k: int = USUAL, tokens: int = 48
) -> list[float | None]:
    """The share of drafts that are right, by their place in the round, where those before it were; None: none tried."""
    counted = Counted(proposer, k)
    decode(model, prompts, tokens, 1, counted)
    return [right / tried if tried else None for right, tried in zip(counted.right, counted.tried, strict=True)]


class ReplayProposer:
    """For experiments: drafts that are right or wrong to order, replayed from answers known beforehand.

    It stands for a drafter of any given quality on models whose text means nothing. Whatever
    is drawn from it says so: it is not a measure of a real drafter.
    """

    bytes_per_token = 0

    def __init__(self, answers: Mapping[tuple[int, ...], Sequence[int]], is_right: Callable[[int], bool]) -> None:
        """answers: prompt -> the target's own greedy output. is_right(i): whether to draft output token i rightly."""
        self.answers, self.is_right = answers, is_right

    def prepare(self, config: ModelConfig, num_blocks: int, block_size: int, attention=None) -> None:
        """Take the vocabulary's size, for wrong tokens."""
        self.vocab_size = config.vocab_size

    def propose(self, rows: Sequence[Row]) -> list[Tensor | None]:
        """Fill `row.drafts` from the known answers."""
        for row in rows:
            if row.num_drafts:
                answer, at = self.answers[tuple(row.request.prompt_ids)], row.request.num_output
                coming = enumerate(answer[at : at + row.num_drafts], start=at)
                row.drafts[:] = [token if self.is_right(i) else (token + 1) % self.vocab_size for i, token in coming]
        return [None] * len(rows)


def right_at_random(acceptance: float, seed: int) -> Callable[[int], bool]:
    """Whether to draft the i-th output token rightly: at random, with this probability."""
    return lambda i: uniform(seed, i, PURPOSE) < acceptance


# -- what a step costs ----------------------------------------------------------------------------


class Sweep(Speculator):
    """Draft lengths in turn, so that one run times them all."""

    def __init__(self, proposer: Proposer, lengths: Sequence[int]) -> None:
        super().__init__(proposer, max(lengths))
        self.lengths, self.turn = lengths, 0

    def draft_length(self, batch: int) -> int:
        self.turn += 1
        return self.lengths[self.turn % len(self.lengths)]


def step_costs(model, batches: Iterable[int], lengths: Sequence[int], repeats: int) -> Iterator[dict]:
    """A step's time against the tokens it verifies. All drafts are id 0, and rejected.

    The lengths follow one another in every round of steps; `times_plain` is taken in each of `turns` parts of the run.
    """
    for batch in batches:
        prompts = [[1 + row % 97] * 16 for row in range(batch)]
        sweep = Sweep(ReplayProposer({tuple(prompt): [0] * 4096 for prompt in prompts}, lambda i: True), lengths)
        tokens = (repeats + 1) * len(lengths) + max(lengths) + 2  # near its end a request drafts fewer
        steps = full_steps(decode(model, prompts, tokens, batch, sweep)[0], batch)
        seconds = {k: [s.duration for s in steps if s.drafted_tokens == k * batch][1:] for k in sorted(lengths)}
        plain = parts(seconds[min(lengths)])
        for k, durations in seconds.items():
            spread, own = Spread.of(durations, warmups=1), parts(durations)
            yield {
                "part": "step cost", "drafts": "wrong", "k": k, "batch": batch, "step_tokens": batch * (k + 1),
                "step_ms": spread.median * 1e3, "min_ms": spread.min * 1e3, "max_ms": spread.max * 1e3,
                **spread_columns("times_plain", [mine / bare for mine, bare in zip(own, plain, strict=False)]),
                "turns": min(len(own), len(plain)),
            }


def parts(durations: Sequence[float]) -> list[float]:
    """The medians of TURNS equal stretches of a run, one after another; of each duration where there are fewer."""
    size = max(1, len(durations) // TURNS)
    return [median(durations[start : start + size]) for start in range(0, size * min(TURNS, len(durations)), size)]


def predict(costs: Sequence[dict], batch: int, drafts: float, tokens: float) -> float:
    """The speed-up that `tokens` a step give where each row verifies `drafts` drafts, by the measured step costs.

    Between measured draft lengths the cost is interpolated. What proposing costs is not in it.
    """
    own = [row for row in costs if row["part"] == "step cost" and row["batch"] == batch]
    return tokens / float(np.interp(drafts, [row["k"] for row in own], [row["times_plain"] for row in own]))


def expected_tokens(acceptance: float, k: int) -> float:
    """Tokens of a round of k drafts, each of which is right with this probability where those before it were."""
    return sum(acceptance**i for i in range(k + 1))


# -- what drafts buy ------------------------------------------------------------------------------


def draftings(
    lengths: Sequence[int], batches: Sequence[int], dials: Sequence[float], drafter: bool
) -> list[tuple[str, str, int | str, int]]:
    """Lines of the table, as `DraftBenchmark.row` takes them: every kind of drafts at batch 1 by its length, at the
    usual length by the batch, and adaptive at both ends."""
    kinds = [("copy", "n-gram"), ("chat", "n-gram"), *[("chat", "drafter")] * drafter]
    found = []
    for kind in kinds + [("chat", f"replay {dial:g}") for dial in dials]:
        found += [(*kind, k, 1) for k in lengths]
        found += [(*kind, USUAL, batch) for batch in batches if batch > 1]
        found += [(*kind, "adaptive", batch) for batch in (1, batches[-1]) if kind in kinds]
    return list(dict.fromkeys(found))


class DraftBenchmark:
    """Drafting beside plain decoding of the same prompts in the same batch, whose runs are kept."""

    def __init__(self, model, tokenizer, few: int, tokens: int, turns: int, seed: int) -> None:
        """few: prompts at batch 1. turns: how often plain and speculative runs take turns; medians are kept."""
        self.model, self.few, self.tokens, self.turns, self.seed = model, few, tokens, turns, seed
        texts = {"copy": COPY_PROMPTS, "chat": CHAT_PROMPTS}
        self.prompts = {kind: [tokenizer.chat(text) for text in texts[kind]] for kind in texts}
        self.drafter = load_drafter(model) if WEIGHTS.exists() and fits(model, read_card()) else None
        self.plain: dict[tuple[str, int], list[tuple[Records, list[list[int]]]]] = {}

    def speculator(
        self, drafts: str, k: int | str, asked: Sequence[list[int]], answers: Sequence[list[int]]
    ) -> Counted:
        """A new one for each run. asked, answers: the plain run's, which only a replay may see."""
        if drafts == "n-gram":
            proposer: Proposer = NgramProposer()
        elif drafts == "drafter":
            proposer = DrafterProposer(self.drafter)
        else:
            known = {tuple(prompt): answer for prompt, answer in zip(asked, answers, strict=True)}
            proposer = ReplayProposer(known, right_at_random(float(drafts.split()[1]), self.seed))
        return AdaptiveCounted(proposer, ADAPTIVE) if k == "adaptive" else Counted(proposer, k)

    def row(self, prompts: str, drafts: str, k: int | str, batch: int, costs: Sequence[dict]) -> dict:
        """A line of the table. prompts: "copy" or "chat"; drafts: "n-gram", "drafter", or "replay 0.7"; k: a draft
        length, or "adaptive"; costs: the rows of `step_costs`, by which the speed-up is predicted."""
        (row,) = self.rows([(prompts, drafts, k, batch)], costs)
        return row

    def rows(self, lines: Sequence[tuple[str, str, int | str, int]], costs: Sequence[dict]) -> list[dict]:
        """Lines of the same prompts in the same batch, as `row` takes them. In each turn plain decoding and all of them
        run once; a replay, which is judged by nothing, in the first turn alone."""
        prompts, batch = lines[0][0], lines[0][3]
        own = self.prompts[prompts]
        asked = [own[i % len(own)] for i in range(max(batch, self.few))]  # one for each row, at small batches a few
        plain = self.plain.setdefault((prompts, batch), [])
        runs: dict[tuple, list[tuple[Counted, Records, list[list[int]]]]] = {line: [] for line in lines}
        for turn in range(self.turns):
            if turn >= len(plain):
                plain.append(decode(self.model, asked, self.tokens, batch))
            for line in reversed(lines) if turn % 2 else lines:
                if turn == 0 or not is_replay(line[1]):
                    counted = self.speculator(*line[1:3], asked, plain[0][1])
                    runs[line].append((counted, *decode(self.model, asked, self.tokens, batch, counted)))
        return [self.line(line, runs[line], plain, asked, costs) for line in lines]

    def line(
        self, line: tuple[str, str, int | str, int], runs: Sequence[tuple[Counted, Records, list[list[int]]]],
        plain: Sequence[tuple[Records, list[list[int]]]], asked: Sequence[list[int]], costs: Sequence[dict],
    ) -> dict:
        """The row of one line: its runs beside those of plain decoding in the same turns."""
        prompts, drafts, k, batch = line
        counted, records, outputs = runs[0]
        speeds = [tokens_per_s(run, batch) for _, run, _ in runs]
        before = [tokens_per_s(run, batch) for run, _ in plain[: len(runs)]]
        return {
            "part": "replay" if is_replay(drafts) else "real",
            "prompts": prompts, "drafts": drafts, "k": k, "batch": batch, **drafted_columns(records, batch, costs),
            "tried_by_place": counted.tried, "right_by_place": counted.right,
            "tokens_per_s": median(speeds), "plain_tokens_per_s": median(before),
            **spread_columns("speedup", [now / old for now, old in zip(speeds, before, strict=True)]),
            "turns": len(runs),
            "same_tokens": compare(self.model, asked, outputs, plain[0][1])["identical"],
        }


def is_replay(drafts: str) -> bool:
    """Whether drafts are right or wrong to order, and no drafter's."""
    return drafts.startswith("replay")


def by_batch(lines: Sequence[tuple[str, str, int | str, int]]) -> list[list[tuple[str, str, int | str, int]]]:
    """Lines of the same prompts in the same batch together."""
    groups: dict[tuple[str, int], list] = {}
    for line in lines:
        groups.setdefault((line[0], line[3]), []).append(line)
    return list(groups.values())


def drafted_columns(records: Records, batch: int, costs: Sequence[dict]) -> dict:
    """What one run tells of its drafts: counts, the speed-up that these should give, and the gaps between tokens."""
    summary, steps = metrics.summary(records), full_steps(records, batch)
    drafts, tokens = (sum(getattr(step, name) for step in steps) / (batch * len(steps))
                      for name in ("drafted_tokens", "output_tokens"))
    return {
        "acceptance": summary["speculation"]["acceptance_rate"],
        "tokens_per_round": summary["speculation"]["tokens_per_round"],
        "tokens_per_step": tokens, "predicted": predict(costs, batch, drafts, tokens),
        "itl_token_p50_ms": summary["itl_per_token_s"]["p50"] * 1e3,
        "itl_step_p50_ms": summary["itl_per_step_s"]["p50"] * 1e3,
    }


def crossovers(rows: Sequence[dict]) -> Iterator[dict]:
    """For each kind of drafts at the usual length: up to which measured batch they gain, and from which they cost."""
    fixed = sorted((row for row in rows if row.get("k") == USUAL and "speedup" in row), key=lambda row: row["batch"])
    for kind in dict.fromkeys((row["prompts"], row["drafts"]) for row in fixed):
        own, found = [row for row in fixed if (row["prompts"], row["drafts"]) == kind], {}
        for column, name in (("speedup", ""), ("predicted", "predicted_")):
            costs = next((row["batch"] for row in own if row[column] < 1), None)
            gains = [row["batch"] for row in own if costs is None or row["batch"] < costs]
            found |= {f"{name}gains_up_to_batch": max(gains, default=0), f"{name}costs_from_batch": costs}
        yield {"part": "crossover", "prompts": kind[0], "drafts": kind[1], "k": USUAL, **found}


def sampling_check(draws: int, seed: int) -> dict:
    """Rejection sampling against its target on eight ids, one filtered out: chi-square of the first of two tokens.

    With 6 degrees of freedom, 22.46 is exceeded by chance once in a thousand times.
    """
    make = torch.Generator().manual_seed(seed)
    p, q = (torch.randn(rows, 8, generator=make).softmax(-1) for rows in (3, 2))
    p[:, 7] = 0
    p /= p.sum(-1, keepdim=True)
    drafts = torch.stack([torch.multinomial(row, draws, True, generator=make) for row in q], dim=1)
    u, u_next = (torch.rand(draws, k, generator=make, dtype=torch.float64) for k in (2, 3))
    accepted, following = verify_sampled(p.expand(draws, -1, -1), q.expand(draws, -1, -1), drafts, u, u_next)
    counts = torch.where(accepted > 0, drafts[:, 0], following).bincount(minlength=8)
    expected = p[0] * draws
    chi_square = float(((counts - expected)[:7] ** 2 / expected[:7]).sum())
    return {
        "part": "sampling", "drafts": "drawn", "k": 2, "draws": draws, "chi_square": chi_square, "limit": 22.46,
        "same_tokens": chi_square < 22.46 and int(counts[7]) == 0, "acceptance": float((accepted > 0).float().mean()),
    }


@timed
def speculation(setting: Setting) -> Measurement:
    """Step costs, drafts of every kind by length and batch, where they begin to cost, and a check of sampling."""
    model = setting.model
    batches = setting.size((1, 8), (1, 2, 4, 8, 16, 32), (1, 2, 4, 8, 16, 32, 64))
    lengths = setting.size((2, 4, 7), (1, 2, 4, 8), (1, 2, 3, 4, 6, 8))
    decode(model, [list(range(16))] * 2, 4, 2)  # warm up
    rows = list(step_costs(model, setting.each("step costs", batches), sorted({0, 1, *lengths, ADAPTIVE}),
                           setting.size(3, 9)))
    batches = tuple(dict.fromkeys(row["batch"] for row in rows))  # those that the budget allowed
    rows.append(sampling_check(200_000, setting.seed))
    bench = DraftBenchmark(model, setting.tokenizer, *setting.size((2, 16), (4, 48), (8, 96)), TURNS, setting.seed)
    in_batches = setting.size(tuple(dict.fromkeys((batches[0], batches[-1]))), batches, batches)
    table = draftings(setting.size((USUAL,), lengths), in_batches, setting.size((0.8,), (0.5, 0.8), (0.5, 0.7, 0.9)),
                      bench.drafter is not None)
    for lines in setting.each("speculation", by_batch(table)):
        rows += bench.rows(lines, rows)
    rows += crossovers(rows)
    spread = Spread.of([row["step_ms"] for row in rows if row["part"] == "step cost" and row["batch"] == 1][:1], 1)
    return measured("speculation", model, setting.model_name, rows, spread, setting.seed)
