"""Rung 6: guess the next tokens cheaply, then verify all guesses in one forward.

A decoding row feeds its newest token and k drafts behind it: k + 1 tokens, a short prefill
to the model. The logits after each say what the target would have said there. Drafts are
taken up to the first that it would not have said, and the target's own token follows:

    fed        newest   d1      d2      d3          logits behind each, in one forward
    target     d1 ok    d2 ok   x≠d3                2 drafts accepted, and x: 3 tokens for one step

Decode is bound by reading the weights, so k + 1 tokens cost little more than one, until the
batch is large. The answer is that of plain decoding: token for token when greedy, and in
distribution when sampling (Leviathan et al., 2023; Chen et al., 2023).

Definitions, used everywhere: a round is one verification. Acceptance rate: drafts accepted
and kept over drafts verified. Tokens per round: those and the target's own one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median_low
from typing import Protocol
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from minillm.ladder.attention import RowSpan, StepAttention, send, to_device
from minillm.ladder.continuous import Row
from minillm.ladder.quantized import KVStorage, kv_bytes_per_token, native_format
from minillm.ladder.request import Request
from minillm.ladder.sampling import ACCEPT, DRAFT, SAMPLE, draw, probabilities, uniforms
from minillm.load.tokenizer import Tokenizer
from minillm.model.config import ModelConfig


class Proposer(Protocol):
    """What guesses tokens. A guess may be wrong, and may be shorter than asked for; it is never trusted."""

    bytes_per_token: int  # of cache that it needs in every block, beside the target's

    def prepare(self, config: ModelConfig, num_blocks: int, block_size: int) -> None:
        """Called once, by the engine that it will serve; raises ValueError where it cannot serve this target."""
        ...

    def propose(self, rows: Sequence[Row]) -> list[Tensor | None]:
        """Write at most `row.num_drafts` drafts into `row.drafts` of each row of a step.

        Returns for each row the distributions its drafts were drawn from [k, V], or None
        where they were not drawn but chosen.
        """
        ...


def check_vocabularies(target: Tokenizer | None, proposer: Proposer) -> None:
    """Raise ValueError if a draft model reads and writes by another token map than the target.

    Equal sizes prove nothing, and unequal ones may be padding: only the maps can tell, where both are known.
    """
    draft = getattr(proposer, "tokenizer", None)
    if target and draft and target.content_hash != draft.content_hash:
        raise ValueError(
            f"the draft model's tokens are not the target's: {draft.name} ({draft.vocab_size:,} ids) and "
            f"{target.name} ({target.vocab_size:,} ids) have different maps; draft with a model of the same tokenizer"
        )


# -- verification ---------------------------------------------------------------------------------


def verify_greedy(best: Sequence[int], drafts: Sequence[int]) -> list[int]:
    """best [k + 1], the target's argmax behind the newest token and each draft -> accepted drafts, its own token."""
    accepted = 0
    while accepted < len(drafts) and drafts[accepted] == best[accepted]:
        accepted += 1
    return [*drafts[:accepted], best[accepted]]


def verify_sampled(p: Tensor, q: Tensor, drafts: Tensor, u: Tensor, u_next: Tensor) -> tuple[Tensor, Tensor]:
    """Rejection sampling over R rows of k drafts -> how many each accepts [R], and the token that follows [R].

    p [R, k + 1, V]: what the target samples from at each place, all filters applied. q [R, k, V]:
    what the drafts [R, k] were drawn from, likewise; one-hot where they were chosen.
    u [R, k]: uniform numbers in [0, 1) that accept; u_next [R, k + 1]: those that draw at each place.

    A draft x is accepted with probability min(1, p(x) / q(x)). After the first rejection the
    token comes from what p has more of than q; after none, from p behind the last draft.
    """
    k, rows, at = drafts.shape[1], torch.arange(len(drafts), device=p.device), drafts[..., None]
    p_draft, q_draft = p[:, :k].gather(2, at)[..., 0], q.gather(2, at)[..., 0]  # [R, k]
    accepts = u * q_draft < p_draft  # strictly: a token that p excludes is never accepted, not even at u = 0
    accepted = accepts.long().cumprod(1).sum(1)  # [R]
    target = p[rows, accepted]  # [R, V] at the place of the token that follows
    proposed = F.pad(q, (0, 0, 0, 1))[rows, accepted]  # nothing was proposed behind the last draft
    residual = (target - proposed).clamp_min(0)
    empty = residual.sum(-1, keepdim=True) == 0  # p = q up to rounding, and u fell into it
    return accepted, draw(torch.where(empty, target, residual), u_next[rows, accepted])


@torch.inference_mode()
def verify(rows: Sequence[Row], logits: Tensor, proposed: Sequence[Tensor | None]) -> list[list[int]]:
    """The tokens of each due row. logits [R, V]: after its newest token and after its drafts, row after row.

    The device is waited for once for all greedy rows, and once for the sampling rows of each number of drafts.
    """
    best = logits.argmax(-1).tolist()
    outputs, first, sampling = [], 0, {}
    for i, (row, q) in enumerate(zip(rows, proposed, strict=True)):
        end = first + len(row.drafts) + 1
        outputs.append(verify_greedy(best[first:end], row.drafts) if row.request.params.greedy else [])
        if not row.request.params.greedy:
            sampling.setdefault(len(row.drafts), []).append((i, row, logits[first:end], q))
        first = end
    for group in sampling.values():
        places, *parts = zip(*group, strict=True)
        for i, tokens in zip(places, _verify_rows(*parts), strict=True):
            outputs[i] = tokens
    return outputs


def _verify_rows(rows: Sequence[Row], logits: Sequence[Tensor], q: Sequence[Tensor | None]) -> list[list[int]]:
    """Sampling rows of k drafts each: logits [k + 1, V], q [k, V] or None. Without drafts they draw as in decoding."""
    k, device = len(rows[0].drafts), logits[0].device
    p = probabilities(torch.cat(tuple(logits)), [row.request.params for row in rows for _ in range(k + 1)])
    p = p.unflatten(0, (len(rows), k + 1))  # [R, k + 1, V]
    drafts = torch.tensor([row.drafts for row in rows], dtype=torch.long, device=device)  # [R, k]
    chosen = F.one_hot(drafts, p.shape[2]).to(p.dtype)  # [R, k, V]: what drafts are drawn from that are not drawn
    drawn_from = torch.stack([own if given is None else given for own, given in zip(chosen, q, strict=True)])

    def numbers(count: int, purpose: int) -> Tensor:
        seeds = [row.request.seed for row in rows for _ in range(count)]
        places = [row.request.num_output + i for row in rows for i in range(count)]
        return uniforms(seeds, places, purpose).view(len(rows), count).to(device)  # [R, count]

    found = verify_sampled(p, drawn_from, drafts, numbers(k, ACCEPT), numbers(k + 1, SAMPLE))
    accepted, following = torch.stack(found).tolist()
    return [[*row.drafts[:n], token] for row, n, token in zip(rows, accepted, following, strict=True)]


# -- proposers ------------------------------------------------------------------------------------


class NgramProposer:
    """Prompt lookup: what followed the last few tokens when they last occurred (Saxena, 2023).

    Costs next to nothing, and is right wherever an answer copies from its prompt or itself.
    """

    bytes_per_token = 0
    lengths = range(3, 0, -1)  # look for the last three tokens first, then for fewer

    def __init__(self) -> None:
        self.indices: WeakKeyDictionary[Request, NgramIndex] = WeakKeyDictionary()

    def prepare(self, config: ModelConfig, num_blocks: int, block_size: int) -> None:
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
        self.following: dict[tuple[int, ...], int] = {}  # n-gram -> the place behind it
        self.indexed = 1  # n-grams that end before this place are known

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


class DraftModelProposer:
    """A smaller model of the same vocabulary writes the drafts, with a KV cache of its own.

    Its keys and values lie in a second storage under the same block ids, so that a block
    table and a shared prefix serve both models. `filled` says which slots hold what the
    draft model made of the token that stands there now. It may lag behind the target: after
    a full acceptance by the last draft, which was never fed to it, also in a block that
    others share by then. The next round feeds it from the first gap on.
    """

    def __init__(self, model, tokenizer=None) -> None:
        """tokenizer: the draft model's, so that its token map can be compared with the target's."""
        self.model, self.tokenizer = model, tokenizer
        self.bytes_per_token = kv_bytes_per_token(model.config, native_format(model.dtype))
        self.storage: KVStorage | None = None

    def prepare(self, config: ModelConfig, num_blocks: int, block_size: int) -> None:
        """Make the second storage. Raises ValueError if it serves an engine already."""
        if self.storage is not None:
            raise ValueError(f"this {type(self).__name__} serves an engine already; make one for each")
        self.vocab_size, self.block_size, self.scratch = config.vocab_size, block_size, num_blocks * block_size
        native = native_format(self.model.dtype)
        self.storage = KVStorage(self.model.config, native, self.scratch + 1, self.model.device)
        self.filled = np.zeros(self.scratch, dtype=bool)  # [slots]

    def propose(self, rows: Sequence[Row]) -> list[Tensor | None]:
        """One forward that catches up, over prompts as well; then a short one for each further draft.

        Drafts stay on the device until all are there: it is waited for once.
        """
        for row in rows:
            if not row.idle:  # what lies in the slots that this step writes is of another token, or of none
                self.filled[self._slots(row.request, row.start, row.end + row.num_drafts)] = False
        q: dict[int, list[Tensor]] = {id(row): [] for row in rows}
        drafting = [row for row in rows if self._reads(row)]
        logits = self._catch_up(drafting) if drafting else None  # [rows, V]
        takers, drafts = [], []  # whose draft each is, and those that each forward gave
        for place in range(max((row.num_drafts for row in drafting), default=0)):
            going = [i for i, row in enumerate(drafting) if row.num_drafts > place]
            drafting, at = [drafting[i] for i in going], send(torch.tensor(going), self.model.device)
            logits = self._feed_drafts(drafting, place, drafts[-1][at]) if place else logits[at]
            drafts.append(self._draft(drafting, place, logits, q))
            takers += drafting
        for row, draft in zip(takers, torch.cat(drafts).tolist() if drafts else [], strict=True):
            row.drafts.append(draft)
        return [torch.stack(q[id(row)]) if q[id(row)] else None for row in rows]

    def _reads(self, row: Row) -> bool:
        """Whether the draft model reads this row in this step. Prompts too: their blocks may be shared soon."""
        return row.num_drafts > 0 or row.end - row.start > 1

    def _slots(self, request: Request, start: int, end: int) -> np.ndarray:
        """The slots of a request's tokens from start to end."""
        places = np.arange(start, end)
        blocks = np.asarray(request.block_table, dtype=np.int64)[places // self.block_size]
        return blocks * self.block_size + places % self.block_size

    def _catch_up(self, rows: Sequence[Row]) -> Tensor:
        """Feed each row from its first gap up to the newest token -> logits after that [rows, V]."""
        starts, tokens = [], []
        for row in rows:
            filled = self.filled[self._slots(row.request, 0, row.start)]
            starts.append(row.start if filled.all() else int(filled.argmin()))
            tokens.append(row.request.tokens[starts[-1] : row.end])
        ids = torch.tensor([token for own in tokens for token in own])
        return self._feed(rows, starts, list(map(len, tokens)), send(ids, self.model.device))

    def _feed_drafts(self, rows: Sequence[Row], number: int, drafts: Tensor) -> Tensor:
        """Feed each row's newest draft, of `number` that it has [rows] -> logits after it [rows, V]."""
        return self._feed(rows, [row.end + number - 1 for row in rows], [1] * len(rows), drafts)

    def _feed(self, rows: Sequence[Row], starts: Sequence[int], counts: Sequence[int], ids: Tensor) -> Tensor:
        """Feed each row so many tokens from its start on, ids [N] of all -> logits after its last [rows, V]."""
        spans = [
            RowSpan(start, number, row.request.block_table)
            for row, start, number in zip(rows, starts, counts, strict=True)
        ]
        cache = StepAttention(
            self.storage, spans, self.block_size, self.scratch, self.model.config.query_group, self.model.dtype
        )
        logits = self._logits(rows, ids, cache)
        for row, span in zip(rows, spans, strict=True):  # a draft's too, which counts should it be accepted
            self.filled[self._slots(row.request, span.start, span.start + span.count)] = True
        return logits

    def _logits(self, rows: Sequence[Row], ids: Tensor, cache: StepAttention) -> Tensor:
        """ids [N] of all rows -> logits after each row's last [rows, V of the target]."""
        own_size = self.model.config.vocab_size
        positions, last = to_device([cache.positions, cache.first + cache.count - 1], ids.device)
        # ids that only one of the two has are padding: never proposed, and read as any other
        logits = self.model.forward(ids.clamp(max=own_size - 1), positions, cache, last)
        missing = max(0, self.vocab_size - own_size)
        return F.pad(logits[:, : self.vocab_size], (0, missing), value=-torch.inf)

    def _draft(self, rows: Sequence[Row], place: int, logits: Tensor, q: dict[int, list[Tensor]]) -> Tensor:
        """Choose or draw each row's draft from logits [rows, V], as the request's own parameters say -> ids [rows].

        place: of these among a row's drafts. q: takes what was drawn from.
        """
        ids = logits.argmax(-1)
        drawing = [i for i, row in enumerate(rows) if not row.request.params.greedy]
        if drawing:
            at, requests = send(torch.tensor(drawing), logits.device), [rows[i].request for i in drawing]
            p = probabilities(logits[at], [request.params for request in requests])
            places = [request.num_output + place for request in requests]
            ids[at] = draw(p, uniforms([request.seed for request in requests], places, DRAFT))
            for i, own in zip(drawing, p, strict=True):
                q[id(rows[i])].append(own)
        return ids


# -- how many drafts ------------------------------------------------------------------------------


class Speculator:
    """A proposer, and how many drafts to ask it for."""

    def __init__(self, proposer: Proposer, draft_length: int = 4, adaptive: bool = False) -> None:
        """draft_length: k, or with `adaptive` the most that k may be."""
        if draft_length < 1:
            raise ValueError(f"draft_length {draft_length} would never draft; leave the speculator out instead")
        self.proposer, self.most, self.adaptive = proposer, draft_length, adaptive
        self.acceptance = [HOPE] * draft_length  # by place in the round, where those before it were accepted
        self.costs: dict[int, StepCost] = {}  # by batch: 1, 2 to 3, 4 to 7, ...
        self.turn = 0

    def draft_length(self, batch: int) -> int:
        """k for a step in which `batch` rows decode.

        Adaptive: the k with the most tokens per second, as far as acceptance and step times are
        known. Nothing is known of a k that is never tried, and what was known grows old. So a
        batch of a new size begins with a few set lengths, and later one step in `PROBE_EVERY`
        tries no drafts, one fewer or one more than seems best.
        """
        if not self.adaptive:
            return self.most
        cost = self.costs.setdefault(batch.bit_length(), StepCost())
        if cost.steps < len(FIRST_LENGTHS):
            return min(FIRST_LENGTHS[cost.steps], self.most)
        best = max(range(self.most + 1), key=lambda k: self.expected_tokens(k) / cost.seconds(k))
        self.turn += 1
        if self.turn % PROBE_EVERY:
            return best
        others = (best + 1, best - 1, 0)
        return min(max(others[self.turn // PROBE_EVERY % len(others)], 0), self.most)

    def expected_tokens(self, k: int) -> float:
        """Of a round that asks for k drafts: the target's own, and every draft that all before it lead to."""
        return 1.0 + sum(np.cumprod(self.acceptance[:k]).tolist())

    def observe(self, rows: Sequence[Row], outputs: Sequence[Sequence[int]], seconds: float) -> None:
        """Learn from a step how many drafts were accepted, and, if it read no prompts, what it cost.

        A draft that was asked for and not made counts as one that was rejected.
        """
        if not self.adaptive:  # a fixed length has no use for it, and the next step waits
            return
        due = [row for row in rows if row.due]
        for row, output in zip(due, outputs, strict=True):
            for place in range(min(row.num_drafts, len(output))):
                accepted = place < len(output) - 1
                self.acceptance[place] += LEARNING_RATE * (accepted - self.acceptance[place])
        if due and all(row.end - row.start == 1 for row in rows):
            cost = self.costs.setdefault(len(due).bit_length(), StepCost())
            cost.add(max(row.num_drafts for row in due), seconds)


HOPE, LEARNING_RATE = 0.5, 0.05  # the acceptance of drafts never tried, and how fast those that were change it
FIRST_LENGTHS, PROBE_EVERY = (1, 0, 1, 0), 20  # 1 twice: at its first drafts a drafter has prompts to read


class StepCost:
    """A decode step's seconds by the number of drafts k: the median of the last few, or a line where none was tried."""

    RECENT = 5

    def __init__(self) -> None:
        self.steps, self.recent = 0, {}

    def add(self, k: int, seconds: float) -> None:
        """Take in one step."""
        self.steps += 1
        self.recent.setdefault(k, deque(maxlen=self.RECENT)).append(seconds)

    def seconds(self, k: int) -> float:
        """What a step with k drafts a row should cost; more drafts never cost less than none."""
        known = {tried: median_low(times) for tried, times in sorted(self.recent.items())}
        if k in known:
            return known[k]
        slope, plain = np.polyfit(list(known), list(known.values()), 1) if len(known) > 1 else (0.0, *known.values())
        return float(plain + max(slope, 0.0) * k)
