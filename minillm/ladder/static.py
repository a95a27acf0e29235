"""Rung 2: static batches. Eight rows share one read of the weights, and one end.

A batch is admitted into an empty engine and nothing joins it until its longest row has
ended. Until then a finished row stays in every forward, feeding its last stored token
again for nothing: that is an idle slot-step, and counting them is the point of this rung.

Everything else, from the model to the memory, is shared with the rungs above: static
batching is an admission policy of the one scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence

from minillm.ladder.request import Request


class StaticBatching:
    """Admit only into an empty batch; hold every row until the longest has ended."""

    waits_for_budget = False  # the batch closes with this step: who is not in it now waits for the next one

    def is_open(self, running: Sequence[Request]) -> bool:
        """Whether new requests may join at this step."""
        return not running

    def leaving(self, running: Sequence[Request]) -> list[Request]:
        """Who leaves after this step."""
        return list(running) if all(request.finished for request in running) else []

    def tokens_to_claim(self, request: Request) -> int:
        """Tokens that memory must be found for before the batch starts: its longest, since nobody can be sent away."""
        return request.max_kv
