"""The experiment of part E: what drafts buy, by their number, their acceptance and the batch.

Figures called real draft without knowing the answer: by prompt lookup, or by the drafter, on
prompts that it was not trained on. Those called replay are right or wrong to order, so that a
whole curve can be drawn; no drafter is behind them. Tokens per second are those of steps in
which the whole batch decodes, so that prompts are in none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch
from torch import Tensor

from minillm.course.experiments.ladder import compare
from minillm.course.prompts import CHAT_PROMPTS, COPY_PROMPTS
from minillm.course.setting import Setting
from minillm.extras.drafter import WEIGHTS, DrafterProposer, fits, load_drafter, read_card
from minillm.fast.engine import Engine
from minillm.ladder.continuous import Row
from minillm.ladder.quantized import native_format
from minillm.ladder.records import Records, accepted_drafts
from minillm.ladder.request import SamplingParams
from minillm.ladder.speculative import NgramProposer, Proposer, Speculator, verify_sampled
from minillm.load.config import ModelConfig
from minillm.measure import metrics
from minillm.measure.measurement import Measurement, Spread, provenance
from minillm.measure.virtual import uniform

ADAPTIVE = 8  # the most drafts that the adaptive length may choose
USUAL = 4  # the draft length at which batches are compared
PURPOSE = 7  # of the uniform numbers that decide where a replayed draft is wrong


@dataclass
class Run:
    """One way of serving some prompts, `batch` at a time."""

    records: Records
    outputs: list[list[int]]
    batch: int

    @property
    def steps(self) -> list:
        """Those in which the whole batch decodes, and nothing else happens."""
        return [s for s in self.records.steps if s.sampled_rows == s.rows == self.batch and not s.prompt_tokens]

    @property
    def tokens_per_s(self) -> float:
        return sum(s.output_tokens for s in self.steps) / sum(s.duration for s in self.steps)

    @property
    def drafts_per_row(self) -> float:
        return sum(s.drafted_tokens for s in self.steps) / (self.batch * len(self.steps))

    @property
    def tokens_per_step(self) -> float:
        """Given to each row by a step."""
        return sum(s.output_tokens for s in self.steps) / (self.batch * len(self.steps))


def serve(model, prompts: Sequence[list[int]], tokens: int, batch: int, speculator: Speculator | None = None) -> Run:
    """Serve the prompts greedily, each for so many tokens; never more than `batch` at once."""
    context, budget = max(map(len, prompts)) + tokens, max(256, batch * (ADAPTIVE + 1))
    engine = Engine(model, max_batch=batch, max_context=context, max_step_tokens=budget, prefix_cache=False,
                    kv_memory=None, speculator=speculator)
    done = engine.generate(prompts, SamplingParams(tokens, ignore_eos=True))
    return Run(engine.records, [each.token_ids for each in done], batch)


class Counted(Speculator):
    """A speculator that counts its drafts by their place: those `tried`, all before them right, and those `right`."""

    def __init__(self, proposer: Proposer, draft_length: int = USUAL, adaptive: bool = False) -> None:
        super().__init__(proposer, draft_length, adaptive)
        self.tried, self.right = [0] * draft_length, [0] * draft_length

    def observe(self, rows: Sequence[Row], outputs: Sequence[Sequence[int]], seconds: float) -> None:
        """Count a step's drafts; then learn from it as ever."""
        for row, output in zip([row for row in rows if row.samples], outputs, strict=True):
            accepted = accepted_drafts(row.drafts, output)
            for place in range(min(len(row.drafts), accepted + 1)):
                self.tried[place] += 1
                self.right[place] += place < accepted
        super().observe(rows, outputs, seconds)


def acceptance_by_position(
    model, proposer: Proposer, prompts: Sequence[list[int]], k: int = USUAL, tokens: int = 48
) -> list[float | None]:
    """The share of drafts that are right, by their place in the round, where those before it were; None: none tried."""
    counted = Counted(proposer, k)
    serve(model, prompts, tokens, 1, counted)
    return [one / all_ if all_ else None for one, all_ in zip(counted.right, counted.tried, strict=True)]


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
    """A step's time against the tokens it verifies. All drafts are id 0, and rejected."""
    for batch in batches:
        prompts = [[1 + row % 97] * 16 for row in range(batch)]
        sweep = Sweep(ReplayProposer({tuple(prompt): [0] * 4096 for prompt in prompts}, lambda i: True), lengths)
        tokens = (repeats + 1) * len(lengths) + max(lengths) + 2  # near its end a request drafts fewer
        run = serve(model, prompts, tokens, batch, sweep)
        plain = None
        for k in sorted(lengths):
            spread = Spread.of([s.duration for s in run.steps if s.drafted_tokens == k * batch][1:], warmups=1)
            plain = plain or spread.median
            yield {
                "part": "step cost", "drafts": "wrong", "k": k, "batch": batch, "step_tokens": batch * (k + 1),
                "step_ms": spread.median * 1e3, "min_ms": spread.min * 1e3, "max_ms": spread.max * 1e3,
                "times_plain": spread.median / plain,
            }


def predict(costs: Sequence[dict], batch: int, drafts: float, tokens: float) -> float:
    """The speed-up that `tokens` a step give where each row verifies so many drafts, by the measured step costs.

    Between measured draft lengths the cost is interpolated. What proposing costs is not in it.
    """
    own = [row for row in costs if row["part"] == "step cost" and row["batch"] == batch]
    return tokens / float(np.interp(drafts, [row["k"] for row in own], [row["times_plain"] for row in own]))


def expected_tokens(acceptance: float, k: int) -> float:
    """Tokens of a round of k drafts, each of which is right with this chance where those before it were."""
    return sum(acceptance**i for i in range(k + 1))


# -- what drafts buy ------------------------------------------------------------------------------


class ReplayProposer:
    """For experiments: drafts that are right or wrong to order, replayed from answers known beforehand.

    It stands for a drafter of any given quality on models whose text means nothing. Whatever
    is drawn from it says so: it is no measure of a real drafter.
    """

    bytes_per_token = 0

    def __init__(self, answers: Mapping[tuple[int, ...], Sequence[int]], is_right: Callable[[int], bool]) -> None:
        """answers: prompt -> the target's own greedy output. is_right(i): whether to draft output token i rightly."""
        self.answers, self.is_right = answers, is_right

    def prepare(self, config: ModelConfig, num_blocks: int, block_size: int) -> None:
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


@dataclass(frozen=True)
class Case:
    """One line of the table. drafts: "n-gram", "drafter", or "replay 0.7"; k: a draft length, or "adaptive"."""

    prompts: str
    drafts: str
    k: int | str
    batch: int


def cases(lengths: Sequence[int], batches: Sequence[int], dials: Sequence[float], drafter: bool) -> list[Case]:
    """Every kind of drafts: at batch 1 by its length, at the usual length by the batch, and adaptive at both ends."""
    kinds = [("copy", "n-gram"), ("chat", "n-gram"), *[("chat", "drafter")] * drafter]
    found = []
    for prompts, drafts in kinds + [("chat", f"replay {dial:g}") for dial in dials]:
        found += [Case(prompts, drafts, k, 1) for k in lengths]
        found += [Case(prompts, drafts, USUAL, batch) for batch in batches if batch > 1]
        if not drafts.startswith("replay"):
            found += [Case(prompts, drafts, "adaptive", batch) for batch in (1, batches[-1])]
    return found


class Bench:
    """Runs cases beside plain decoding of the same prompts in the same batch."""

    def __init__(self, model, tokenizer, few: int, tokens: int, turns: int, seed: int) -> None:
        """few: prompts at batch 1. turns: how often plain and speculative runs alternate; medians are kept."""
        self.model, self.few, self.tokens, self.turns, self.seed = model, few, tokens, turns, seed
        self.texts = {"copy": COPY_PROMPTS, "chat": CHAT_PROMPTS}
        self.prompts = {kind: [tokenizer.chat(text) for text in texts] for kind, texts in self.texts.items()}
        self.drafter = load_drafter(model) if WEIGHTS.exists() and fits(model, read_card()) else None
        self.plain: dict[tuple[str, int], list[Run]] = {}

    def asked(self, kind: str, batch: int) -> list[list[int]]:
        """The prompts of a case: one for each row, and at small batches a few."""
        own = self.prompts[kind]
        return [own[i % len(own)] for i in range(max(batch, self.few))]

    def speculator(self, case: Case, answers: Sequence[list[int]]) -> Counted:
        """A new one for each run. answers: the plain run's, which only a replay may see."""
        if case.drafts == "n-gram":
            proposer: Proposer = NgramProposer()
        elif case.drafts == "drafter":
            proposer = DrafterProposer(self.drafter)
        else:
            dial, known = float(case.drafts.split()[1]), self.asked(case.prompts, case.batch)
            texts = {tuple(prompt): answer for prompt, answer in zip(known, answers, strict=True)}
            proposer = ReplayProposer(texts, self.dial(dial, self.seed))
        adaptive = case.k == "adaptive"
        return Counted(proposer, ADAPTIVE if adaptive else case.k, adaptive)

    @staticmethod
    def dial(acceptance: float, seed: int) -> Callable[[int], bool]:
        """Whether to draft the i-th output token rightly: at random, with this chance."""
        return lambda i: uniform(seed, i, PURPOSE) < acceptance

    def run(self, case: Case, costs: Sequence[dict]) -> dict:
        """The row of a case; `costs` predict it."""
        prompts, key = self.asked(case.prompts, case.batch), (case.prompts, case.batch)
        plain, runs, counts = self.plain.setdefault(key, []), [], []
        for turn in range(self.turns + (case.k == "adaptive")):
            if turn >= len(plain):
                plain.append(serve(self.model, prompts, self.tokens, case.batch))
            counts.append(self.speculator(case, plain[0].outputs))
            runs.append(serve(self.model, prompts, self.tokens, case.batch, counts[-1]))
        speeds, before = ([run.tokens_per_s for run in some] for some in (runs, plain))
        one, summary = runs[0], metrics.summary(runs[0].records)
        counted = summary["speculation"]
        return {
            "part": "replay" if case.drafts.startswith("replay") else "real",
            "prompts": case.prompts, "drafts": case.drafts, "k": case.k, "batch": case.batch,
            "acceptance": counted["acceptance_rate"], "tokens_per_round": counted["tokens_per_round"],
            "tried_by_place": counts[0].tried, "right_by_place": counts[0].right,
            "tokens_per_step": one.tokens_per_step,
            "tokens_per_s": median(speeds), "plain_tokens_per_s": median(before),
            "speedup": median(speeds) / median(before),
            "predicted": predict(costs, case.batch, one.drafts_per_row, one.tokens_per_step),
            "itl_token_p50_ms": summary["itl_per_token_s"]["p50"] * 1e3,
            "itl_step_p50_ms": summary["itl_per_step_s"]["p50"] * 1e3,
            "same_tokens": compare(self.model, prompts, one.outputs, plain[0].outputs)["identical"],
        }


def crossovers(rows: Sequence[dict]) -> Iterator[dict]:
    """For each kind of drafts at the usual length: up to which measured batch they gain, and from which they cost."""
    fixed = [row for row in rows if row.get("k") == USUAL and "speedup" in row]
    for prompts, drafts in dict.fromkeys((row["prompts"], row["drafts"]) for row in fixed):
        own = sorted((r for r in fixed if (r["prompts"], r["drafts"]) == (prompts, drafts)), key=lambda r: r["batch"])
        found = {}
        for column, name in (("speedup", ""), ("predicted", "predicted_")):
            costs = next((row["batch"] for row in own if row[column] < 1), None)
            gains = [row["batch"] for row in own if costs is None or row["batch"] < costs]
            found |= {f"{name}gains_up_to_batch": max(gains, default=0), f"{name}costs_from_batch": costs}
        yield {"part": "crossover", "prompts": prompts, "drafts": drafts, "k": USUAL, **found}


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


def speculation(setting: Setting) -> Measurement:
    """Step costs, drafts of every kind by length and batch, where they begin to cost, and a check of sampling."""
    model, name = setting.model, setting.model_name
    batches = setting.size((1, 4, 16), (1, 2, 4, 8, 16, 32), (1, 2, 4, 8, 16, 32, 64))
    lengths = setting.size((2, 4, 7), (1, 2, 4, 8), (1, 2, 3, 4, 6, 8))
    serve(model, [list(range(16))] * 2, 4, 2)  # warm up
    rows = list(step_costs(model, setting.each("step costs", batches), sorted({0, 1, *lengths, ADAPTIVE}),
                           setting.size(3, 5)))
    batches = tuple(dict.fromkeys(row["batch"] for row in rows))  # those that the budget allowed
    rows.append(sampling_check(200_000, setting.seed))
    bench = Bench(model, setting.tokenizer, *setting.size((2, 32, 1), (4, 48, 1), (8, 96, 3)), setting.seed)
    table = cases(lengths, batches, setting.size((0.8,), (0.5, 0.8), (0.5, 0.7, 0.9)), bench.drafter is not None)
    for case in setting.each("speculation", table):
        rows.append(bench.run(case, rows))
    rows += crossovers(rows)
    spread = Spread.of([row["step_ms"] for row in rows if row["part"] == "step cost" and row["batch"] == 1][:1], 1)
    return Measurement("speculation", provenance(name, native_format(model.dtype), model.device, setting.seed, spread),
                       rows)
