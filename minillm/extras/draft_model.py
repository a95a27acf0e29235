"""Rung 6 with a second model: a smaller one of the same vocabulary writes the drafts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
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

    Its keys and values lie in a second storage under the same block ids, so that a block
    table and a shared prefix serve both models. `filled` says which slots hold what the
    draft model made of the token that stands there now. It may lag behind the target: after
    a full acceptance by the last draft, which was never fed to it, also in a block that
    others share by then. The next round feeds it from the first gap on.
    """

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
            drafting, at = [drafting[i] for i in going], torch.tensor(going, device=self.model.device)
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
        return self._feed(rows, starts, list(map(len, tokens)), ids.to(self.model.device))

    def _feed_drafts(self, rows: Sequence[Row], number: int, drafts: Tensor) -> Tensor:
        """Feed each row's newest draft, of `number` that it has [rows] -> logits after it [rows, V]."""
        return self._feed(rows, [row.end + number - 1 for row in rows], [1] * len(rows), drafts)

    def _feed(self, rows: Sequence[Row], starts: Sequence[int], counts: Sequence[int], ids: Tensor) -> Tensor:
        """Feed each row so many tokens from its start on, ids [N] of all -> logits after its last [rows, V]."""
        spans = [
            RowSpan(start, number, row.request.block_table)
            for row, start, number in zip(rows, starts, counts, strict=True)
        ]
        cache = self.attention(self.storage, spans, self.block_size, self.scratch)
        logits = self._logits(rows, ids, cache)
        for row, span in zip(rows, spans, strict=True):  # a draft's too, which counts should it be accepted
            self.filled[self._slots(row.request, span.start, span.start + span.count)] = True
        return logits

    def _logits(self, rows: Sequence[Row], ids: Tensor, cache: StepAttention) -> Tensor:
        """ids [N] of all rows -> logits after each row's last [rows, V of the target]."""
        own_size = self.model.config.vocab_size
        positions = cache.positions.to(ids.device)
        last = torch.tensor([span.count for span in cache.spans], device=ids.device).cumsum(0) - 1  # [rows]
        # ids that only one of the two has are padding: never proposed, and read as any other
        logits = self.model.forward(ids.clamp(max=own_size - 1), positions, cache, last)
        missing = max(0, self.vocab_size - own_size)
        return F.pad(logits[:, : self.vocab_size], (0, missing), value=-torch.inf)

    def _draft(self, rows: Sequence[Row], place: int, logits: Tensor, q: dict[int, list[Tensor]]) -> Tensor:
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
