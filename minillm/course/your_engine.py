"""An engine out of parts that you wrote. Exercise 13 gives this file, and you write the step that ties them together:

    plan      the scheduler (exercise 4) says which request feeds how many tokens
    reserve   each request's block table (5) grows by them; a row whose blocks are refused waits
    forward   the model runs once over the tokens of all rows; attention (7) reads through the tables
    commit    the scheduler takes the token that follows each row; drafts are verified (9) before that
    free      a request that has ended gives its blocks back to the pool (5)

Answers are greedy and on the CPU; there is no text and no shared prefix. `ladder/engine.py` is the package's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minillm.ladder import request as ladder
from minillm.ladder.speculative import NgramIndex


@dataclass(frozen=True)
class Parts:
    """The answers that an engine is made of, by their names in the exercises; `own` names those of the learner."""

    KVCache: Any
    Scheduler: Any
    BlockPool: Any
    BlockTable: Any
    paged_attention: Any
    int8_encode: Any
    verify_greedy: Any
    own: tuple[str, ...] = ()


class Request(ladder.Request):
    """`num_tokens` are known, `num_kv` of them stored, `num_pending` are still to be fed; `append` takes a new one."""

    table = cache = None  # its block table, or its own KV cache
    drafts: Sequence[int] = ()  # guesses, which are the last of its `tokens` while a step verifies them

    def append(self, token: int) -> None:
        self.extend([token])

    def forget_drafts(self) -> None:
        """Drafts that no step verified are not its tokens."""
        del self.tokens[len(self.tokens) - len(self.drafts) :]
        self.drafts = ()


class Step(NamedTuple):
    """One step, for drawings: seconds, and of each row the request's number and "prefill" or "decode"."""

    start: float
    end: float
    rows: list[tuple[int, str]]


class Stuck(RuntimeError):
    """Requests had not ended after as many steps as could be needed."""


class Store:
    """The keys and values of all blocks, layer by layer; with `encode` as codes of 8 bits, and a scale for each row."""

    def __init__(self, config, num_blocks: int, block_size: int, encode: Callable | None = None) -> None:
        shape = (config.num_hidden_layers, 2, num_blocks, block_size, config.num_key_value_heads, config.head_dim)
        self.encode = encode
        self.numbers = torch.zeros(shape, dtype=torch.int8) if encode else torch.full(shape, torch.nan)
        self.scales = torch.full(shape[:-1], torch.nan, dtype=torch.float16) if encode else None

    def write(self, layer: int, slots: Sequence[int], k: Tensor, v: Tensor) -> None:
        """Keep k and v [n, Hkv, D] in these n slots: block b owns slots b * block_size to (b + 1) * block_size - 1."""
        both = torch.stack((k, v))  # [2, n, Hkv, D]
        if self.encode:
            both, scales = self.encode(both)
            self.scales[layer].flatten(1, 2)[:, slots] = scales
        self.numbers[layer].flatten(1, 2)[:, slots] = both

    def read(self, layer: int, blocks: Sequence[int]) -> tuple[Tensor, Tensor, list[int]]:
        """Keys and values [P, block_size, Hkv, D], and the table that finds these blocks in them."""
        if not self.encode:
            return *self.numbers[layer], list(blocks)
        chosen, scales = (tensor[layer][:, list(blocks)].float() for tensor in (self.numbers, self.scales))
        return *(chosen * scales[..., None]), list(range(len(blocks)))


class OwnCaches:
    """Without a pool: each request has a KV cache of its own (exercise 2). `PagedCache` of exercise 13 is its like."""

    def __init__(self, rows: Sequence[tuple[Request, int]]) -> None:
        self.rows = rows

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [N, Hq, D], k and v [N, Hkv, D] of all rows, one row after the other -> [N, Hq, D]."""
        out, first = [], 0
        for request, count in self.rows:
            row = slice(first, first + count)
            out.append(request.cache.attend(layer, q[row], k[row], v[row]))
            first += count
        return torch.cat(out)


class Unlimited:
    """The block table of a request that has a cache of its own: nothing is refused."""

    blocks = ()

    def grow(self, num_tokens: int) -> bool:
        return True

    def free(self) -> None:
        """Its cache goes with the request."""


class Engine:
    """Serves prompts on one model. A subclass has the parts, the class PagedCache, and the method `step`."""

    parts: Parts
    PagedCache: type

    def __init__(self, model, *, max_batch: int = 8, max_step_tokens: int = 64, num_blocks: int = 256,
                 block_size: int = 16, paged: bool = True, int8: bool = False, drafter: Callable | None = None) -> None:
        """paged: False gives each request a KV cache of its own. drafter(tokens, number) guesses what comes next."""
        self.model, self.paged, self.drafter, self.block_size = model, paged, drafter, block_size
        self.scheduler = self.parts.Scheduler(max_batch, max_step_tokens)
        self.pool = self.parts.BlockPool(num_blocks, block_size)
        self.store = Store(model.config, num_blocks, block_size, self.parts.int8_encode if int8 else None)
        self.requests, self.steps, self.rows = [], [], []

    def add(self, prompt_ids: Sequence[int], max_tokens: int, stop_ids: Sequence[int] = ()) -> Request:
        """Queue a request for at most `max_tokens` tokens, or up to one of `stop_ids`."""
        params = ladder.SamplingParams(max_tokens=max_tokens)
        request = Request(len(self.requests) + 1, list(prompt_ids), params, stop_ids=frozenset(stop_ids))
        request.table = self.parts.BlockTable(self.pool) if self.paged else Unlimited()
        request.cache = None if self.paged else self.parts.KVCache()
        self.requests.append(request)
        self.scheduler.add(request)
        return request

    def step(self) -> None:
        """Plan, reserve, forward, commit, free: exercise 13."""
        raise NotImplementedError("Exercise 13: step")

    def serve(self, prompts: Sequence[Sequence[int]], max_tokens: int, stop_ids: Sequence[int] = (),
              most_steps: int = 100_000) -> list[list[int]]:
        """The answers to these prompts, in their order. Raises Stuck after `most_steps` steps."""
        requests = [self.add(prompt, max_tokens, stop_ids) for prompt in prompts]
        while unfinished := [request.id for request in requests if not request.finished]:
            if len(self.steps) >= most_steps:
                raise Stuck(f"after {most_steps} steps these requests have not ended: {unfinished}")
            self.advance()
        return [request.output_ids for request in requests]

    @torch.inference_mode()
    def advance(self) -> None:
        """Draft where there is a drafter, run one step, and note whose rows it had."""
        start, self.rows = perf_counter(), []
        decoding = [r for r in self.requests if r.num_output and r.num_pending == 1 and not r.finished]
        for request in decoding if self.drafter and self.paged else ():
            # at most what the newest token's block has room for: rejected drafts never leave a block that is too many
            room = min(-(request.num_kv + 1) % self.block_size, request.params.max_tokens - request.num_output - 1)
            request.drafts = self.drafter(request.tokens, room)[:room]
            request.tokens += request.drafts
        self.step()
        for request in decoding:
            request.forget_drafts()
        kinds = [(request.id, "decode" if request in decoding else "prefill") for request, _ in self.rows]
        self.steps.append(Step(start, perf_counter(), kinds))

    # -- what `step` calls ------------------------------------------------------------------------

    def cache(self, rows: Sequence[tuple[Request, int]]):
        """The cache as the model sees it in a step with these rows, pairs of a request and what it feeds."""
        self.rows = rows
        return self.PagedCache(self, rows) if self.paged else OwnCaches(rows)

    def following(self, request: Request, best: Sequence[int]) -> int:
        """The token that follows a row, whose tokens have these likeliest successors. Its drafts are verified here."""
        if not request.drafts:
            return best[-1]
        fed = len(best) - 1  # the budget may have left some out
        given = self.parts.verify_greedy(list(best), list(request.drafts[:fed]))
        ends = next((i for i, token in enumerate(given) if token in request.stop_ids), len(given) - 1)
        *accepted, last = given[: ends + 1]
        request.forget_drafts()
        request.tokens += accepted
        request.num_kv -= fed - len(accepted)  # what was rejected does not count as stored once the step is committed
        return last

    def preempt(self) -> None:
        """The youngest request that holds blocks gives them back; its tokens are computed again when there is room."""
        for request in reversed(self.requests):
            if request.table.blocks:
                request.forget_drafts()
                request.table.free()
                request.num_kv = 0
                return


def prompt_lookup(tokens: Sequence[int], number: int) -> list[int]:
    """A drafter: what followed the last few tokens when they occurred before."""
    return NgramIndex(range(3, 0, -1)).continuation(tokens, number)
