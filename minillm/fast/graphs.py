"""CUDA graphs: the launches of a small step, recorded once and replayed in one call.

A decode step is a few hundred kernels of some microseconds each, and Python takes longer to launch
them than the GPU to run them. A CUDA graph launches all of them together, but always with the shapes
and addresses it was recorded with. So a step of N tokens is padded to the next recorded size, and its
inputs are written into buffers that never move: see step_inputs.py.

Sizes count tokens, not requests, so a step that verifies drafts replays the same graphs as one that
only decodes. The output head and the likeliest ids are part of the graph: the ids stay on the device,
from where the next step takes its tokens.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from minillm.fast.attention import SHORT_ROW, FastAttention, kernels_for
from minillm.fast.step_inputs import BLOCKS, ENTRIES, POSITIONS, SLOTS, TOKENS, StepInputs, StepRows
from minillm.guard.inputs import is_switch
from minillm.ladder.continuous import Row
from minillm.ladder.sampling import greedy

MOST_TOKENS = 512  # a larger step computes for so long that its launches hide behind it

Recorder = Callable[[Callable[[], Tensor]], tuple[Callable[[], None], Tensor]]


def graph_sizes(most_tokens: int) -> list[int]:
    """The sizes to record, up to one that holds `most_tokens`: close where padding would cost most."""
    most_tokens = min(most_tokens, MOST_TOKENS)
    if most_tokens < 1:
        return []
    return [size for size in (1, 2, 4, 8) if size < most_tokens] + [*range(16, most_tokens, 16), most_tokens]


def wants_graphs(model, cuda_graphs: bool | Literal["auto"]) -> bool:
    """Whether the engine of this model records graphs; ValueError where it was told to and cannot."""
    if not is_switch(cuda_graphs) and not (isinstance(cuda_graphs, str) and cuda_graphs == "auto"):
        raise ValueError(f"cuda_graphs={cuda_graphs!r}: choose True, False or 'auto'")
    can = model is not None and kernels_for(model.device) is not None
    if cuda_graphs is True and not can:
        raise ValueError("cuda_graphs=True needs a model on CUDA and its Triton kernels: leave it at 'auto'")
    return can and cuda_graphs is not False


@dataclass(frozen=True)
class Replayed:
    """What a replay left on the device, for the step's N tokens; the next replay overwrites it."""

    hidden: Tensor  # [N, H]
    logits: Tensor  # [N, V]
    ids: Tensor  # [N] the likeliest
    slots: Tensor  # [N] where the tokens are stored


class StepGraphs:
    """The recorded forwards of a model over one store, by size; each is recorded when it is first needed."""

    def __init__(self, model, storage, block_size: int, scratch_slot: int, most_tokens: int, most_blocks: int,
                 record: Recorder | None = None) -> None:
        """most_blocks: of one request. record: what makes a graph; by default CUDA does."""
        self.model, self.storage, self.block_size = model, storage, block_size
        self.sizes = graph_sizes(most_tokens)
        self.record = record or CudaRecorder()
        self.kernels = kernels_for(model.device)
        self.block_m, tile_tokens = self.kernels.tile_tokens(self.kernels.SHORT_TILE, model.config.query_group)
        most = self.sizes[-1]
        self.inputs = StepInputs(block_size, scratch_slot, most, most_blocks, tile_tokens, model.device)
        self.ids = torch.zeros(most, dtype=torch.long, device=model.device)  # of the last replay, or drawn since
        self.graphs: dict[int, tuple[Callable[[], None], Tensor]] = {}  # by size: replay, hidden states [size, H]
        self.logits: dict[int, Tensor] = {}  # by size [size, V]
        self.last: tuple[StepRows, int] | None = None  # the rows and the size of the step that was launched last

    # -- a step -------------------------------------------------------------------------------------

    def run(self, rows: Sequence[Row]) -> Replayed | None:
        """Launch a step; None where it is not small: many tokens, or a row with the tiles of a prompt."""
        tables, start = [row.request.block_table for row in rows], [row.start for row in rows]
        drafted, self.last = any(row.drafts for row in rows), None
        if self.inputs.send_expected(tables, start, self.ids) and not drafted:
            return self.replay(StepRows(tables, start, [1] * len(rows), [True] * len(rows)), len(rows))
        count = [row.end - row.start + len(row.drafts) for row in rows]
        if sum(count) > self.sizes[-1] or max(count) > SHORT_ROW:
            return None
        step = StepRows(tables, start, count, [not row.idle for row in rows])
        self.inputs.write(step, [token for row in rows for token in row.tokens], self.size_for(sum(count)))
        return self.replay(step, sum(count))

    def replay(self, step: StepRows, tokens: int) -> Replayed:
        """Launch the step that the inputs hold."""
        size = self.size_for(tokens)
        replay, x = self.graph(size)
        replay()
        self.last = step, size
        slots = self.inputs.fields[SLOTS, :tokens]
        return Replayed(x[:tokens], self.logits[size][:tokens], self.ids[:tokens], slots)

    def keep(self, ids: Tensor) -> None:
        """Let the next step take its tokens from ids [R], which this one samples."""
        if self.last and ids.data_ptr() != self.ids.data_ptr():
            self.ids[: len(ids)].copy_(ids)

    def expect_next(self, rows: Sequence[Row]) -> None:
        """While a step computes, prepare the one that feeds what it samples, if each of its rows samples one token."""
        if self.last and all(row.samples and not row.drafts and row.end - row.start == 1 for row in rows):
            self.inputs.expect(*self.last)

    def size_for(self, tokens: int) -> int:
        """The smallest recorded size that holds a step's tokens."""
        return self.sizes[bisect_left(self.sizes, tokens)]

    def fits(self, step: FastAttention) -> bool:
        """Whether a step is small enough: few tokens, and no row with the tiles of a prompt."""
        return len(step.positions) <= self.sizes[-1] and int(step.count.max()) <= SHORT_ROW

    def hidden_states(self, tokens: Tensor, step: FastAttention) -> Tensor:
        """tokens [N], on the CPU as the step's tables are -> `Llama.hidden_states` [N, H], until the next replay."""
        spans = step.spans
        rows = StepRows([list(span.block_table) for span in spans], [span.start for span in spans],
                        [span.count for span in spans], [span.stores for span in spans])
        self.inputs.write(rows, tokens.tolist(), self.size_for(len(tokens)))
        return self.replay(rows, len(tokens)).hidden

    # -- recording ----------------------------------------------------------------------------------

    def graph(self, size: int) -> tuple[Callable[[], None], Tensor]:
        """What replays a forward of this size, and where its hidden states [size, H] then lie."""
        if size not in self.graphs:
            self.graphs[size] = self.record(partial(self.forward, size))
        return self.graphs[size]

    @torch.inference_mode()
    def record_all(self) -> None:
        """Record every size over padding alone, the largest first, whose memory all share; and compile what larger
        steps launch. No step may be under way."""
        self.kernels.compile_all(self.model, self.storage, self.block_size, self.inputs.scratch_slot)
        self.inputs.write(StepRows([], [], [], []), [], self.sizes[-1])
        for size in reversed(self.sizes):
            self.graph(size)

    def forward(self, size: int) -> Tensor:
        """What is recorded: a forward that reads nothing but the buffers -> hidden states [size, H]."""
        inputs = self.inputs
        fields = inputs.fields[:, :size]
        inputs.tables.view(-1).index_copy_(0, fields[ENTRIES].long(), fields[BLOCKS])
        tiles = [self.kernels.Tiles(inputs.tiles[:size], self.block_m)]
        cache = self.kernels.StepKernels(self.storage, fields[SLOTS], inputs.tables, tiles, self.block_size)
        x = self.model.hidden_states(fields[TOKENS], fields[POSITIONS], cache)
        self.logits[size] = self.model.logits(x)
        self.ids[:size].copy_(greedy(self.logits[size]))
        return x


class CudaRecorder:
    """Records CUDA graphs that share their memory, since no two of them run concurrently."""

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """What replays `run`, and the tensor in which its result then lies."""
        side, current = torch.cuda.Stream(), torch.cuda.current_stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):  # compiles kernels and makes workspaces, neither of which can be recorded
            run()
        current.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            out = run()
        return graph.replay, out
