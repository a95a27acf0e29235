"""The inputs of recorded graphs: what a replay reads from its buffers gives the plain path's tokens.

No GPU and no Triton: a graph is a Python callable here, and attention reads tables and tiles in plain loops.
"""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from serving import make_engine
from tiny import tiny_model
from torch.utils._python_dispatch import TorchDispatchMode

from minillm.extras.draft_model import DraftModelProposer
from minillm.fast import graphs as graphs_module
from minillm.fast.engine import Engine
from minillm.fast.graphs import StepGraphs
from minillm.fast.step_inputs import StepInputs, StepRows
from minillm.ladder.decode import attend
from minillm.ladder.request import SamplingParams
from minillm.ladder.speculative import NgramProposer, Speculator

MOST_OPERATIONS = 15  # of tensors before and after a launch; NumPy's arrays are the faster ones on the host


class LoopKernels:
    """`StepKernels` in plain loops over the tiles."""

    def __init__(self, storage, new_slots, tables, tiles, block_size):
        self.storage, self.new_slots, self.tables, self.block_size = storage, new_slots, tables, block_size
        self.tiles = tiles[0].fields

    def attend(self, layer, q, k, v):
        q, k = self.storage.prepare(layer, q, k)
        self.storage.write(layer, self.new_slots.long(), k, v)
        out = torch.zeros_like(q)
        for row, first, position, count in self.tiles.tolist():
            if count:
                at = torch.arange(position + count)
                slots = self.tables[row, at // self.block_size].long() * self.block_size + at % self.block_size
                keys, values = self.storage.read(layer, slots)
                new = slice(first, first + count)
                out[new] = attend(q[new], keys, values, position)
        return out


KERNELS = SimpleNamespace(
    SHORT_TILE=16, StepKernels=LoopKernels, tile_tokens=lambda block_m, group: (block_m, block_m // group),
    Tiles=lambda fields, block_m: SimpleNamespace(fields=fields),
)


def again(run):
    """What stands for a CUDA graph: the callable itself, into the same result."""
    result = run().clone()
    return lambda: result.copy_(run()), result


def with_graphs(engine: Engine, monkeypatch, most_tokens: int = 24) -> Engine:
    """The engine, its small steps replayed, and the next one prepared while one computes."""
    monkeypatch.setattr(graphs_module, "kernels_for", lambda device: KERNELS)
    executor, most_blocks = engine.executor, engine.scheduler.memory.pool.blocks_for(engine.max_context)
    executor.graphs = StepGraphs(
        engine.model, executor.storage, executor.block_size, executor.scratch_slot, most_tokens, most_blocks, again
    )
    engine.runs_ahead = True
    return engine


SPECULATORS = {
    "no drafts": lambda: None,
    "n-grams": lambda: Speculator(NgramProposer(), 3),
    "a draft model": lambda: Speculator(DraftModelProposer(tiny_model("t4-1")), 2),
}


def busy_engine(seed: int, speculator) -> Engine:
    """Requests of few ids, so that drafts are right at times, greedy and sampled, in a pool too small for all."""
    draw = random.Random(seed)
    engine = make_engine(
        tiny_model(), blocks=draw.randint(22, 30), block_size=draw.choice([2, 4]), max_context=28,
        max_batch=draw.randint(1, 6), max_step_tokens=draw.choice([8, 24, 40]), speculator=speculator,
        batching=draw.choice(["continuous", "continuous", "static"]), kv=draw.choice(["paged", "paged", "slots"]),
    )
    for number in range(9):
        params = SamplingParams(
            draw.randint(1, 9), temperature=draw.choice([0.0, 0.0, 1.0]), stop_ids=[draw.randint(0, 96)]
        )
        prompt = [draw.randint(3, 5) for _ in range(draw.randint(1, 19))]
        engine.add(prompt, params, number, arrival=0.0)
    return engine


def outputs(engine: Engine) -> dict:
    """The tokens of each request, by its name."""
    texts = {}
    while engine.has_work:
        for event in engine.step():
            texts.setdefault(event.request_id, []).extend(event.token_ids)
    engine.check_invariants()
    return texts


@pytest.mark.parametrize("speculator", SPECULATORS)
@pytest.mark.parametrize("seed", range(12))
def test_replayed_steps_give_the_tokens_of_the_plain_path(seed, speculator, monkeypatch):
    """Rows that join, end, are preempted, wait idle in static batches or verify drafts; every token is the same."""
    plain = outputs(busy_engine(seed, SPECULATORS[speculator]()))
    engine = with_graphs(busy_engine(seed, SPECULATORS[speculator]()), monkeypatch, most_tokens=[24, 5, 3][seed % 3])
    assert outputs(engine) == plain
    assert engine.executor.graphs.graphs


def decoding_engine(monkeypatch, rows: int = 5) -> Engine:
    """All rows decode, and no step was timed or counted yet."""
    engine = with_graphs(make_engine(tiny_model(), max_context=40), monkeypatch)
    for number in range(rows):
        engine.add([7, 8, 9 + number], SamplingParams(30, ignore_eos=True))
    for _ in range(3):
        engine.step()
    return engine


class Counted(TorchDispatchMode):
    """The operations of tensors that are called."""

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        self.names.append(str(function))
        return function(*arguments, **(keywords or {}))

    def __enter__(self):
        self.names: list[str] = []
        return super().__enter__()


@pytest.mark.parametrize("expected", [True, False], ids=["the expected step", "another one"])
def test_a_prepared_step_takes_few_tensor_operations(expected, monkeypatch):
    """Operations inside the graph are recorded once; those around it are paid for at every step."""
    engine = decoding_engine(monkeypatch)
    graphs, counts = engine.executor.graphs, []
    for size, (_replay, x) in graphs.graphs.items():
        graphs.graphs[size] = (lambda: None), x
    start = engine.executor.start

    def counted(plan):
        if not expected:
            graphs.inputs.expected = None
        with Counted() as mode:
            wait = start(plan)
        counts.append(mode.names)
        return wait

    monkeypatch.setattr(engine.executor, "start", counted)
    for _ in range(8):  # rows begin new blocks meanwhile
        engine.step()
    assert len(counts) == 8 and 0 < max(map(len, counts)) < MOST_OPERATIONS, counts


def test_the_next_step_is_written_while_one_computes_and_sampled_ids_stay_on_the_device(monkeypatch):
    """Sent are only steps that were expected: `write` makes one anew from its rows, tokens included."""
    engine = decoding_engine(monkeypatch)
    inputs, written = engine.executor.graphs.inputs, []
    write = inputs.write
    monkeypatch.setattr(inputs, "write", lambda *step: written.append(step) or write(*step))
    for _ in range(6):
        engine.step()
    assert not written
    engine.add([50], SamplingParams(4, ignore_eos=True))
    engine.step()  # launches the step that it joins
    assert len(written) == 1


def test_a_step_of_other_rows_at_the_same_positions_is_not_the_expected_one():
    inputs, ids = StepInputs(4, 999, 2, 4, 16, torch.device("cpu")), torch.tensor([7, 8])
    for tables, start, is_expected in (([[5], [6]], [2, 2], True), ([[5], [9]], [2, 2], False), ([[5]], [2], False)):
        rows = StepRows([[5], [6]], [1, 1], [1, 1], [True, True])
        inputs.write(rows, [0, 0], 2)
        inputs.expect(rows, 2)
        assert inputs.send_expected(tables, start, ids) == is_expected
        assert not inputs.send_expected(tables, start, ids), "it was used, or forgotten"
    assert inputs.fields[:3].tolist() == [[0, 0], [1, 1], [21, 25]]


def test_larger_steps_between_two_replays_are_made_good():
    """The row moved on by several blocks without a replay, and the last of them had held a rejected draft."""
    inputs, table = StepInputs(2, 999, 4, 8, 16, torch.device("cpu")), [3, 1, 4]
    for start, count, later in ((2, 4, [3, 1, 6, 7]), (7, 1, [3, 1, 6, 7, 5])):
        inputs.write(StepRows([table], [start], [count], [True]), [0] * count, 4)
        inputs.tables.view(-1).index_copy_(0, inputs.fields[3].long(), inputs.fields[4])
        row, used = int(inputs.tiles[0, 0]), (start + count + 1) // 2
        assert inputs.tables[row, :used].tolist() == table[:used]
        table[:] = later


def test_more_requests_than_rows_on_the_device_take_turns():
    """Tables that no step names give up their rows; one that comes back is sent whole again."""
    inputs = StepInputs(2, 999, 3, 4, 16, torch.device("cpu"))
    tables = [[10 * i + j for j in range(4)] for i in range(7)]
    for turn in range(30):
        draw = random.Random(turn)
        here = draw.sample(range(7), draw.randint(1, 3))
        start = [draw.randint(0, 7) for _ in here]
        inputs.write(StepRows([tables[i] for i in here], start, [1] * len(here), [True] * len(here)),
                     [0] * len(here), 3)
        inputs.tables.view(-1).index_copy_(0, inputs.fields[3].long(), inputs.fields[4])  # as a graph does
        for i, at, (row, *_) in zip(here, start, inputs.tiles.tolist(), strict=False):
            assert inputs.tables[row, : at // 2 + 1].tolist() == tables[i][: at // 2 + 1]
