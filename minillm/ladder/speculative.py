"""Rung 6: guess the next tokens cheaply, then verify all guesses in one forward.

A decoding row feeds its newest token and k drafts after it: k + 1 tokens, a short prefill to the
model. The logits after each say what the target would have said there. Drafts are accepted up to
the first that it would not have said, and the target's own token follows:

    fed        newest   d1      d2      d3          logits after each, in one forward
    target     d1 ok    d2 ok   x≠d3                2 drafts accepted, and x: 3 tokens for one step

Decode is bound by reading the weights, so k + 1 tokens cost little more than one, until the batch is
large. The answer is that of plain decoding: token for token when greedy, and in distribution when
sampling (Leviathan et al., 2023; Chen et al., 2023). A round is one verification. Acceptance rate:
drafts accepted and kept over drafts verified. Tokens per round: those and the target's own one.
The drafts here are n-grams; a second model that drafts is in `extras/draft_model.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import functional as F

from minillm.guard.inputs import check_whole, is_distribution, usable_drafts
from minillm.ladder.attention import KVStorage, StepAttention
from minillm.ladder.continuous import Row, Scheduler, StepPlan
from minillm.ladder.executor import ModelExecutor
from minillm.ladder.request import NO_TOKEN, Request
from minillm.ladder.sampling import ACCEPT, SAMPLE, draw, greedy, probabilities, uniforms
from minillm.model.config import ModelConfig


class Proposer(Protocol):
    """What guesses tokens. A guess may be wrong, and may be shorter than asked for; it is never trusted."""

    bytes_per_token: int  # of draft cache, 0 if it has none

    def prepare(self, config: ModelConfig, num_blocks: int, block_size: int, attention=StepAttention) -> None:
        """Called once, by the engine that it will serve; raises ValueError where it cannot serve this target."""

    def propose(self, rows: Sequence[Row]) -> list[Tensor | None]:
        """Write at most `row.num_drafts` drafts into `row.drafts` of each row of a step.

        Returns for each row what its drafts were drawn from [k, V], or None where they were picked.
        """


def verify_greedy(best: Sequence[int], drafts: Sequence[int]) -> list[int]:
    """best [k + 1], the target's argmax after the newest token and each draft -> accepted drafts, its own token."""
    accepted = 0
    while accepted < len(drafts) and drafts[accepted] == best[accepted]:
        accepted += 1
    return [*drafts[:accepted], best[accepted]]


def verify_sampled(p: Tensor, q: Tensor, drafts: Tensor, u: Tensor, u_next: Tensor) -> tuple[Tensor, Tensor]:
    """Rejection sampling over R rows of k drafts -> how many each accepts [R], and the token that follows [R].

    p [R, k + 1, V]: what the target samples from at each place, all filters applied. q [R, k, V]:
    what the drafts [R, k] were drawn from, likewise; one-hot where they were picked.
    u [R, k]: uniform numbers in [0, 1) that accept; u_next [R, k + 1]: those that draw at each place.

    A draft x is accepted with probability min(1, p(x) / q(x)). After the first rejection the
    token comes from max(0, p - q), renormalised; after none, from p at the place after the last draft.
    """
    k, rows, at = drafts.shape[1], torch.arange(len(drafts), device=p.device), drafts[..., None]
    p_draft, q_draft = p[:, :k].gather(2, at)[..., 0], q.gather(2, at)[..., 0]  # [R, k]
    accepts = u * q_draft < p_draft  # strictly: a token that p excludes is never accepted, not even at u = 0
    accepted = accepts.long().cumprod(1).sum(1)  # [R]
    target = p[rows, accepted]  # [R, V] at the place of the token that follows
    proposed = F.pad(q, (0, 0, 0, 1))[rows, accepted]  # nothing was proposed after the last draft
    residual = (target - proposed).clamp_min(0)
    empty = residual.sum(-1, keepdim=True) == 0  # rounding left no residual: draw from p
    return accepted, draw(torch.where(empty, target, residual), u_next[rows, accepted])


@torch.inference_mode()
def verify(rows: Sequence[Row], logits: Tensor, proposed: Sequence[Tensor | None]) -> list[list[int]]:
    """The tokens of each row that samples. logits [R, V]: after its newest token and its drafts, row after row."""
    best, outputs, first = greedy(logits).tolist(), [], 0
    for row, q in zip(rows, proposed, strict=True):
        own = slice(first, first + len(row.drafts) + 1)
        plain = row.request.params.greedy
        outputs.append(verify_greedy(best[own], row.drafts) if plain else verify_row(row, logits[own], q, best[own]))
        first = own.stop
    return outputs


def verify_row(row: Row, logits: Tensor, q: Tensor | None, best: Sequence[int]) -> list[int]:
    """A sampling row of k drafts: logits [k + 1, V], q [k, V] or None. Without drafts it draws as in decoding.
    best [k + 1]: NO_TOKEN where the logits cannot be used; nothing is accepted or drawn there."""
    request, k, device = row.request, len(row.drafts), logits.device
    p = probabilities(logits, [request.params] * (k + 1))  # [k + 1, V]
    drafts = torch.tensor(row.drafts, dtype=torch.long, device=device)  # [k]
    if not is_distribution(q, p[:k]):  # the drafts were picked, not drawn
        q = F.one_hot(drafts, p.shape[1]).to(p.dtype)
    places, seeds = range(request.num_output, request.num_output + k + 1), [request.seed] * (k + 1)
    u, u_next = (uniforms(seeds, places, purpose).to(device) for purpose in (ACCEPT, SAMPLE))  # [k + 1]
    accepted, following = verify_sampled(p[None], q[None], drafts[None], u[None, :k], u_next[None])
    return [*row.drafts[: int(accepted)], NO_TOKEN if best[int(accepted)] == NO_TOKEN else int(following)]


class Speculator:
    """A proposer, and how many drafts to ask it for; what an engine needs of rung 6."""

    def __init__(self, proposer: Proposer, draft_length: int = 4) -> None:
        """draft_length: k, the drafts of a row in a step."""
        check_whole(1, draft_length=draft_length)
        self.proposer, self.most = proposer, draft_length
        self.bytes_per_token = proposer.bytes_per_token

    def draft_length(self, batch: int) -> int:
        """Drafts per row, given the number of decoding rows."""
        return self.most

    def observe(self, plan: StepPlan, outputs: Sequence[Sequence[int]]) -> None:
        """What a step accepted, and how long it took: nothing to learn for a fixed length."""

    def scheduler(self, base: type[Scheduler]) -> partial[SpeculativeScheduler]:
        """What makes a scheduler of class `base` that plans drafts too."""
        both = (SpeculativeScheduler, base) if base is not Scheduler else (SpeculativeScheduler,)
        return partial(type("SpeculativeScheduler", both, {}), self)

    def executor(self, *parts) -> SpeculativeExecutor:
        """An executor of these parts that drafts and verifies."""
        return SpeculativeExecutor(self.proposer, *parts)


class SpeculativeScheduler(Scheduler):
    """A fourth rule: decoding rows verify drafts, with the budget that is left and blocks that no row holds."""

    def __init__(self, speculator: Speculator, *parts) -> None:
        super().__init__(*parts)
        self.speculator = speculator

    def plan(self, plan: StepPlan | None = None, decodes: bool = True) -> StepPlan:
        """The next step, with room for drafts."""
        plan = super().plan(plan, decodes)
        decoding = [row for row in plan.rows if row.samples and row.end - row.start == 1]
        wanted = self.speculator.draft_length(len(decoding)) if decoding else 0
        for row in decoding:
            request = row.request
            # a round gives accepted + 1 tokens, so drafts are capped at one less than what remains
            number = min(wanted, plan.budget, request.params.max_tokens - request.num_output - 1)
            if number > 0 and self.memory.reserve(request, request.num_tokens + number):
                row.num_drafts = number
                plan.budget -= number
        return plan

    def commit(self, plan: StepPlan, outputs: Sequence[Sequence[int]]) -> list[tuple[Request, list[int]]]:
        """Take the accepted runs; rejected drafts are no longer stored."""
        self.speculator.observe(plan, outputs)
        return super().commit(plan, outputs)


class SpeculativeExecutor(ModelExecutor):
    """Drafts, one forward over newest tokens and drafts, verification."""

    def __init__(self, proposer: Proposer, model, storage: KVStorage, num_blocks: int, block_size: int) -> None:
        super().__init__(model, storage, num_blocks, block_size)
        self.proposer = proposer
        proposer.prepare(model.config, num_blocks, block_size, self.attention)

    @torch.inference_mode()
    def compute(self, plan: StepPlan) -> Tensor | tuple[Tensor, list[Tensor | None]]:
        """Sampled ids [R], or where there are drafts the logits to verify them with, and what they were drawn from."""
        proposed = usable_drafts(plan.rows, self.proposer.propose(plan.rows), self.model.config.vocab_size)
        if not any(row.drafts for row in plan.rows):
            return super().compute(plan)
        return self.logits(plan.rows), [q for row, q in zip(plan.rows, proposed, strict=True) if row.samples]

    def read(self, plan: StepPlan, computed: Tensor | tuple[Tensor, list[Tensor | None]]) -> list[list[int]]:
        """For each row that samples its one token, or its accepted run."""
        if isinstance(computed, Tensor):
            return super().read(plan, computed)
        return verify([row for row in plan.rows if row.samples], *computed)


class NgramProposer:
    """Prompt lookup: what followed the last few tokens when they last occurred (Saxena, 2023)."""

    bytes_per_token = 0
    lengths = range(3, 0, -1)  # look for the last three tokens first, then for fewer

    def __init__(self) -> None:
        self.indices: WeakKeyDictionary[Request, NgramIndex] = WeakKeyDictionary()

    def prepare(self, config: ModelConfig, num_blocks: int, block_size: int, attention=StepAttention) -> None:
        """Nothing to prepare: it knows each request by itself."""

    def propose(self, rows: Sequence[Row]) -> list[Tensor | None]:
        """Fill `row.drafts` from each request's own text."""
        for row in rows:
            if row.num_drafts:
                index = self.indices.setdefault(row.request, NgramIndex(self.lengths))
                row.drafts[:] = index.continuation(row.request.tokens, row.num_drafts)
        return [None] * len(rows)


class NgramIndex:
    """What followed each n-gram of one text, the last time; grows with the text, a token at a time."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = lengths
        self.following: dict[tuple[int, ...], int] = {}  # n-gram -> the place after it
        self.indexed = 1  # n-grams that end before this place are indexed

    def continuation(self, tokens: Sequence[int], number: int) -> list[int]:
        """Up to `number` tokens that followed the latest earlier occurrence of the text's own end."""
        for place in range(self.indexed, len(tokens)):
            for n in self.lengths:
                if n <= place:
                    self.following[tuple(tokens[place - n : place])] = place
        self.indexed = len(tokens)
        for n in self.lengths:
            place = self.following.get(tuple(tokens[len(tokens) - n :])) if n <= len(tokens) else None
            if place is not None:
                return list(tokens[place : place + number])
        return []
