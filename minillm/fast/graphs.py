"""CUDA graphs: the launches of a small step, recorded once and replayed in one call.

A decode step is a few hundred kernels of some microseconds each, and Python takes longer to launch
them than the GPU to run them. A CUDA graph launches all of them together, but always with the shapes
and addresses it was recorded with. So a step of N tokens is padded to the next recorded size, and its
inputs are written into buffers that never move:

                   | N tokens     | padding to the recorded size
    tokens         | 731   8  95  |  0   0   0   0   0   any id would do
    positions      |  40   7 112  |  0   0   0   0   0
    slots written  | 648  23 320  |  S   S   S   S   S   the scratch slot, which is never read
    tiles          | as kernels.py cuts them, then tiles of no tokens: padding does not attend

Sizes count tokens, not requests, so a step that verifies drafts replays the same graphs as one that
only decodes. The output head stays outside: it is one product, and only over the rows that sample.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from minillm.fast.attention import SHORT_ROW, FastAttention, kernels_for
from minillm.fast.device import to_device
from minillm.guard.inputs import is_switch

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


class StepGraphs:
    """The recorded forwards of a model over one store, by size; each is recorded when it is first needed."""

    def __init__(self, model, storage, block_size: int, scratch_slot: int, most_tokens: int, most_blocks: int,
                 record: Recorder | None = None) -> None:
        """most_blocks: of one request. record: what makes a graph; by default CUDA does."""
        self.model, self.storage, self.block_size, self.scratch_slot = model, storage, block_size, scratch_slot
        self.sizes = graph_sizes(most_tokens)
        self.record = record or CudaRecorder()
        self.kernels = kernels_for(model.device)
        self.block_m, self.tile_tokens = self.kernels.tile_tokens(self.kernels.SHORT_TILE, model.config.query_group)
        most = self.sizes[-1]
        self.inputs = torch.zeros(7 * most, dtype=torch.long, device=model.device)  # of a size: its first 7 · size
        self.tables = torch.zeros(most, most_blocks, dtype=torch.long, device=model.device)
        self.graphs: dict[int, tuple[Callable[[], None], Tensor]] = {}  # by size: replay, hidden states [size, H]

    def fits(self, step: FastAttention) -> bool:
        """Whether a step is small enough: few tokens, and no row with the tiles of a prompt."""
        return len(step.positions) <= self.sizes[-1] and int(step.count.max()) <= SHORT_ROW

    def hidden_states(self, tokens: Tensor, step: FastAttention) -> Tensor:
        """tokens [N], on the CPU as the step's tables are -> `Llama.hidden_states` [N, H], until the next replay."""
        size = self.sizes[bisect_left(self.sizes, len(tokens))]
        self.fill(size, tokens, step)
        replay, x = self.graph(size)
        replay()
        return x[: len(tokens)]

    def graph(self, size: int) -> tuple[Callable[[], None], Tensor]:
        """What replays a forward of this size, and where its hidden states [size, H] then lie."""
        if size not in self.graphs:
            self.graphs[size] = self.record(partial(self.forward, size))
        return self.graphs[size]

    @torch.inference_mode()
    def record_all(self) -> None:
        """Record every size over padding alone, the largest first, whose memory all share. No step may be under way."""
        for size in reversed(self.sizes):
            self.inputs.zero_()
            self.inputs[2 * size : 3 * size] = self.scratch_slot
            self.graph(size)

    def fill(self, size: int, tokens: Tensor, step: FastAttention) -> None:
        """Write a step's inputs, padded, into the buffers."""
        padding = (0, size - len(tokens))
        rows = torch.arange(len(step.count))
        tiles = self.kernels.make_tiles(rows, step.first, step.start, step.count, self.tile_tokens)  # [T, 4], T <= N
        padded = torch.cat((
            F.pad(tokens, padding), F.pad(step.positions, padding),
            F.pad(step.new_slots, padding, value=self.scratch_slot),
            F.pad(tiles, (0, 0, 0, size - len(tiles))).flatten(),
        ))
        inputs, tables = to_device([padded, step.tables], self.inputs.device)
        self.inputs[: 7 * size].copy_(inputs)
        self.tables[: len(tables), : tables.shape[1]].copy_(tables)

    def forward(self, size: int) -> Tensor:
        """What is recorded: a forward that reads nothing but the buffers -> [size, H]."""
        tokens, positions, slots, tiles = self.inputs[: 7 * size].split((size, size, size, 4 * size))
        tiles = [self.kernels.Tiles(tiles.view(size, 4), self.block_m)]
        cache = self.kernels.StepKernels(self.storage, slots, self.tables, tiles, self.block_size)
        return self.model.hidden_states(tokens, positions, cache)


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
