"""Rung 6 with a second model: a smaller one of the same vocabulary writes the drafts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from minillm.ladder.attention import KVStorage, RowSpan, StepAttention, native_storage
from minillm.ladder.continuous import Row
from minillm.ladder.request import Request
from minillm.ladder.sampling import DRAFT, draw, probabilities, uniforms
from minillm.model.config import ModelConfig


class DraftModelProposer:
    """A smaller model of the same vocabulary writes the drafts, with a KV cache of its own.

    Its keys and values lie in a second storage under the same block ids, so that a block table and a
    shared prefix serve both models. `filled` says which slots hold what the draft model computed for the
    token that is there now. It may lag: the last draft of a round is never fed, not even if it is
    accepted, and its block may be shared since. The next round feeds each row from its first gap on.
    """

    keeps_drafts = True  # what was computed for a draft is right, should it be accepted

    def __init__(self, model, tokenizer=None) -> None:
        """tokenizer: the draft model's, so that its token map can be compared with the target's."""
        self.model, self.tokenizer = model, tokenizer
        self.bytes_per_token = native_storage(model.config, 1, "meta", model.dtype).nbytes
        self.storage: KVStorage | None = None

    def prepare(self, config: ModelConfig, num_blocks: int, block_size: int, attention=StepAttention) -> None:
        """Make the second storage. Raises ValueError if it serves an engine already."""
        if self.storage is not None:
            raise ValueError(f"this {type(self).__name__} serves an engine already; make one for each")
        self.vocab_size, self.block_size, self.scratch = config.vocab_size, block_size, num_blocks * block_size
        self.attention = attention
        self.storage = native_storage(self.model.config, self.scratch + 1, self.model.device, self.model.dtype)
        self.filled = torch.zeros(self.scratch, dtype=torch.bool)  # [slots]

    def propose(self, rows: Sequence[Row]) -> list[Tensor | None]:
        """One forward that catches up, over prompts as well; then a short one for each further draft.

        Drafts stay on the device until all are there, so that the host waits for it once.
        """
        for row in rows:
            if not row.idle:  # this step stores other tokens in these slots
                self.filled[self.slots(row.request, row.start, row.end + row.num_drafts)] = False
        q: dict[int, list[Tensor]] = {id(row): [] for row in rows}
        drafting = [row for row in rows if self.reads(row)]
        if not drafting:
            return [None] * len(rows)
        starts = [int(self.filled[self.slots(row.request, 0, row.start)].cumprod(0).sum()) for row in drafting]
        unread = [row.request.tokens[start : row.end] for row, start in zip(drafting, starts, strict=True)]
        ids = torch.tensor([token for tokens in unread for token in tokens]).to(self.model.device)  # [N]
        takers, drafts = [], []  # the row of each draft, and the drafts [rows] of each forward
        for place in range(max(1, *(row.num_drafts for row in drafting))):
            logits = self.feed(drafting, starts, ids, place)  # [rows, V]
            going = [i for i, row in enumerate(drafting) if row.num_drafts > place]
            drafting = [drafting[i] for i in going]
            drafts.append(self.draft(drafting, place, logits[going], q))
            takers += drafting
            going = [i for i, row in enumerate(drafting) if row.num_drafts > place + 1]
            drafting, ids = [drafting[i] for i in going], drafts[-1][going]
            starts = [row.end + place for row in drafting]
        for row, draft in zip(takers, torch.cat(drafts).tolist(), strict=True):
            row.drafts.append(draft)
        return [torch.stack(q[id(row)]) if q[id(row)] else None for row in rows]

    def reads(self, row: Row) -> bool:
        """Whether the draft model reads this row in this step. Prompts too: their blocks may be shared soon."""
        return row.num_drafts > 0 or row.end - row.start > 1

    def slots(self, request: Request, start: int, end: int) -> Tensor:
        """The slots of a request's tokens from start to end."""
        return RowSpan(start, end - start, request.block_table).slots(self.block_size)[start:]

    def feed(self, rows: Sequence[Row], starts: Sequence[int], ids: Tensor, place: int) -> Tensor:
        """ids [N] of each row from its start to its newest token and `place` drafts -> logits after that [rows, V]."""
        spans = [RowSpan(start, row.end + place - start, row.request.block_table)
                 for row, start in zip(rows, starts, strict=True)]
        cache = self.attention(self.storage, spans, self.block_size, self.scratch)
        last = torch.tensor([span.count for span in spans]).cumsum(0) - 1  # [rows]
        positions, last = cache.positions.to(ids.device), last.to(ids.device)
        logits = self.logits(rows, ids, positions, cache, last)
        if self.keeps_drafts or place == 0:
            self.filled[cache.new_slots.cpu()] = True
        return logits

    def logits(self, rows: Sequence[Row], ids: Tensor, positions: Tensor, cache: StepAttention, last: Tensor) -> Tensor:
        """ids, positions [N] of all rows -> logits of the last of each [rows, V of the target]."""
        own_size = self.model.config.vocab_size
        # ids that only one of the two has are padding: never proposed, and read as any other
        logits = self.model.forward(ids.clamp(max=own_size - 1), positions, cache, last)
        missing = max(0, self.vocab_size - own_size)
        return F.pad(logits[:, : self.vocab_size], (0, missing), value=-torch.inf)

    def draft(self, rows: Sequence[Row], place: int, logits: Tensor, q: dict[int, list[Tensor]]) -> Tensor:
        """Pick or draw each row's draft from logits [rows, V], as the request's own parameters say -> ids [rows].

        place: of these among a row's drafts. q: takes what was drawn from.
        """
        ids = logits.argmax(-1)
        drawing = [i for i, row in enumerate(rows) if not row.request.params.greedy]
        if drawing:
            at, requests = torch.tensor(drawing, device=logits.device), [rows[i].request for i in drawing]
            p = probabilities(logits[at], [request.params for request in requests])
            places = [request.num_output + place for request in requests]
            ids[at] = draw(p, uniforms([request.seed for request in requests], places, DRAFT))
            for i, own in zip(drawing, p, strict=True):
                q[id(rows[i])].append(own)
        return ids
