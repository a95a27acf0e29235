"""The inputs of a small step, where a recorded graph reads them: buffers that never move, written in place.

A graph reads the same addresses at every replay. So a step of N tokens, padded to a recorded size, is
written into one pinned buffer on the host, in int32, and goes to the device in one transfer:

                   | N tokens     | padding to the recorded size
    tokens         | 731   8  95  |  0   0   0   0   0   any id would do
    positions      |  40   7 112  |  0   0   0   0   0
    slots          | 648  23 320  |  S   S   S   S   S   where they are stored: the scratch slot is never read
    entries        |   2 128 263  |  P   P   P   P   P   whose block is new in the block tables: P is read by no tile
    blocks         |  40   1  20  |  0   0   0   0   0   what the graph writes there
    tiles          | as kernels.py cuts them, then tiles of no tokens: padding does not attend

The block tables stay on the device. A request keeps its row there, and a step adds the block that each
of its tokens lies in; a whole table goes over only when a request is new, or larger steps fed it meanwhile.

Most steps are the last one over again, each row a token further. `expect` writes that step while the
last one computes, all but the sampled ids, which are on the device already, and the blocks that rows begin.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from minillm.fast.device import to_device

TOKENS, POSITIONS, SLOTS, ENTRIES, BLOCKS = range(5)


@dataclass(frozen=True)
class StepRows:
    """The B rows of a step, as lists [B]: block tables, first positions, new tokens, and whether they are stored."""

    tables: list[Sequence[int]]
    start: list[int]
    count: list[int]
    stores: list[bool]


@dataclass(frozen=True)
class Expected:
    """A step that is written already: its rows, the places in it where a block begins, and their entries."""

    tables: list[Sequence[int]]
    start: list[int]
    begins: list[tuple[int, int]]  # (place among the rows, entry of its table)


class HostBuffer:
    """One step's inputs in pinned memory: `fields` [5, most] and `tiles` [most, 4] are NumPy's views of it."""

    def __init__(self, most: int, device: torch.device) -> None:
        self.memory = torch.zeros(9 * most, dtype=torch.int32, pin_memory=device.type == "cuda")
        numbers = self.memory.numpy()
        self.fields, self.tiles = numbers[: 5 * most].reshape(5, most), numbers[5 * most :].reshape(most, 4)


class StepInputs:
    """The buffers of all recorded sizes, and who has which row of the block tables."""

    def __init__(self, block_size: int, scratch_slot: int, most: int, most_blocks: int, tile_tokens: int,
                 device: torch.device) -> None:
        """most: tokens of a step. most_blocks: of one request. tile_tokens: new tokens that a tile holds."""
        self.block_size, self.scratch_slot, self.most = block_size, scratch_slot, most
        self.most_blocks, self.tile_tokens = most_blocks, tile_tokens
        # two, since the next step is written while the transfer of the last may still be under way
        self.buffers = [HostBuffer(most, device), HostBuffer(most, device)]
        self.on_device = torch.zeros(9 * most, dtype=torch.int32, device=device)
        self.fields, self.tiles = self.on_device[: 5 * most].view(5, most), self.on_device[5 * most :].view(most, 4)
        self.tables = torch.zeros(most + 1, most_blocks, dtype=torch.int32, device=device)  # the last is the padding's
        self.row_of: dict[int, int] = {}  # a block table, by its id, -> its row on the device
        self.holders: list[Sequence[int] | None] = [None] * most  # of each row: alive, so that no other has its id
        self.known = np.zeros(most, np.int32)  # of each row, how many of its first entries are right
        self.expected: Expected | None = None

    # -- a step from its rows -----------------------------------------------------------------------

    def write(self, rows: StepRows, tokens: Sequence[int], size: int) -> None:
        """Write a step of N tokens, padded to `size`, and send it to the device."""
        start, count = np.array(rows.start, np.int32), np.array(rows.count, np.int32)
        first = count.cumsum(dtype=np.int32) - count
        row = np.repeat(np.arange(len(count)), count)  # [N]
        position = start[row] + np.arange(len(row), dtype=np.int32) - first[row]
        entry = position // self.block_size
        block = [rows.tables[b][e] for b, e in zip(row.tolist(), entry.tolist(), strict=True)]
        place = self.places(rows.tables, start)  # [B] rows on the device
        fields = self.padded(size, len(row))
        fields[TOKENS], fields[POSITIONS], fields[BLOCKS] = tokens, position, block
        fields[ENTRIES] = place[row] * self.most_blocks + entry
        self.write_slots(fields, np.array(rows.stores)[row])
        tiles = make_tiles(place, first, start, count, self.tile_tokens)
        self.buffers[0].tiles[: len(tiles)], self.buffers[0].tiles[len(tiles) : size] = tiles, 0
        self.send()

    def padded(self, size: int, tokens: int) -> np.ndarray:
        """Write the padding of a step; returns the fields of its tokens [5, N]."""
        fields, padding = self.buffers[0].fields, slice(tokens, size)
        fields[:, padding] = 0
        fields[SLOTS, padding], fields[ENTRIES, padding] = self.scratch_slot, self.most * self.most_blocks
        return fields[:, :tokens]

    def write_slots(self, fields: np.ndarray, stores: np.ndarray | bool = True) -> None:
        """The slots [N] from blocks and positions; those of rows that store nothing are scratch."""
        slots = fields[BLOCKS] * self.block_size + fields[POSITIONS] % self.block_size
        fields[SLOTS] = np.where(stores, slots, self.scratch_slot)

    def send(self) -> None:
        """Copy the written buffer to the device, without waiting; the other one is written next."""
        self.on_device.copy_(self.buffers[0].memory, non_blocking=True)
        self.buffers.reverse()

    # -- the block tables on the device -------------------------------------------------------------

    def places(self, tables: list[Sequence[int]], start: np.ndarray) -> np.ndarray:
        """Which rows [B] of the device's tables hold these, whose steps begin at positions `start` [B].

        A table's entries before the block of its first new token never change while a request has it; those
        from there on are written by the step itself.
        """
        places = [self.row_of.get(id(table)) for table in tables]
        if None in places:
            places = self.take_rows(tables)
        place, before = np.array(places, np.int32), start // self.block_size
        behind = np.flatnonzero(before > self.known[place])
        self.known[place] = before + 1  # with the block that holds the token at `start`
        if len(behind):
            lengths = before[behind]
            entries = np.zeros((len(behind), int(lengths.max())), np.int64)
            for i, (b, length) in enumerate(zip(behind.tolist(), lengths.tolist(), strict=True)):
                entries[i, :length] = tables[b][:length]
            sent = [torch.from_numpy(place[behind]), torch.from_numpy(entries)]
            at, entries = to_device(sent, self.tables.device)
            self.tables[:, : entries.shape[1]].index_copy_(0, at, entries.int())
        return place

    def take_rows(self, tables: list[Sequence[int]]) -> list[int]:
        """Rows [B] for these tables. Where no row is free, those that are not in this step give theirs up."""
        new = {id(table): table for table in tables if id(table) not in self.row_of}
        free = [row for row, holder in enumerate(self.holders) if holder is None]
        if len(free) < len(new):
            here = set(map(id, tables))
            self.holders = [holder if id(holder) in here else None for holder in self.holders]
            self.row_of = {key: row for key, row in self.row_of.items() if key in here}
            free = [row for row, holder in enumerate(self.holders) if holder is None]
        for row, (key, table) in zip(free, new.items(), strict=False):
            self.row_of[key], self.holders[row], self.known[row] = row, table, 0
        return [self.row_of[id(table)] for table in tables]

    # -- the step that is expected next -------------------------------------------------------------

    def expect(self, rows: StepRows, size: int) -> None:
        """Write, not send, the step after this one, in which each row feeds the one token that this one samples."""
        fields, last = self.padded(size, len(rows.start)), self.buffers[1]
        number = len(rows.start)
        fields[POSITIONS:] = last.fields[POSITIONS:, :number]
        fields[POSITIONS] += 1
        begins = fields[POSITIONS] % self.block_size == 0
        fields[ENTRIES] += begins
        self.write_slots(fields)
        tiles = self.buffers[0].tiles
        tiles[:size] = last.tiles[:size]
        tiles[:number, 2] += 1
        at = np.flatnonzero(begins)
        begun = zip(at.tolist(), (fields[POSITIONS, at] // self.block_size).tolist(), strict=True)
        self.expected = Expected(rows.tables, fields[POSITIONS].tolist(), list(begun))

    def send_expected(self, tables: list[Sequence[int]], start: list[int], ids: Tensor) -> bool:
        """Send the expected step if it is the one with these rows, their tokens the device's `ids`; else forget it."""
        expected, self.expected = self.expected, None
        if expected is None or start != expected.start or tables != expected.tables:
            return False
        fields = self.buffers[0].fields
        for place, entry in expected.begins:
            fields[BLOCKS, place] = tables[place][entry]
            fields[SLOTS, place] = tables[place][entry] * self.block_size
            self.known[fields[ENTRIES, place] // self.most_blocks] = entry + 1
        self.send()
        self.fields[TOKENS, : len(start)].copy_(ids[: len(start)])
        return True


def make_tiles(row: np.ndarray, first: np.ndarray, start: np.ndarray, count: np.ndarray, tokens: int) -> np.ndarray:
    """Cut rows (each [B]: block table, place in the step, position, new tokens) into tiles of up to `tokens` [T, 4]."""
    each = -(-count // tokens)
    of = np.repeat(np.arange(len(count)), each)  # [T] which of the rows
    before = (np.arange(len(of)) - (each.cumsum() - each)[of]) * tokens  # [T] tokens in the row's earlier tiles
    return np.stack((row[of], first[of] + before, start[of] + before, np.minimum(count[of] - before, tokens)), 1)
