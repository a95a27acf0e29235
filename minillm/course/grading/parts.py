"""The parts of an engine: from the learner's own notebooks, and the package's where an exercise is not done.

    take_parts()      in exercise 13's notebook: reads those beside it, and says of each part whose it is

Of a notebook only those statements run that define the answer: its imports, functions, classes and
assignments, as far as the answer needs them. No check, no demonstration, nothing else.
"""

from __future__ import annotations

import ast
import linecache
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from minillm.course.grading.checks import find_task, run_task
from minillm.course.grading.notebook import DEMO, Cell, NotANotebook, read
from minillm.course.grading.text import say
from minillm.course.your_engine import Parts, Request
from minillm.ladder import continuous, quantized
from minillm.ladder.attention import RowSpan
from minillm.ladder.decode import SequenceCache, attend
from minillm.ladder.paged import BlockPool, Paged
from minillm.ladder.speculative import verify_greedy

# -- the package's, in the form that the exercises ask for ---------------------------------------------------------


class KVCache:
    """A `SequenceCache` for each layer."""

    capacity = 1024

    def __init__(self) -> None:
        self.layers: dict[int, SequenceCache] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [n, Hq, D], k and v [n, Hkv, D] -> [n, Hq, D]."""
        if layer not in self.layers:
            config = SimpleNamespace(num_hidden_layers=1, num_key_value_heads=k.shape[1], head_dim=k.shape[2])
            model = SimpleNamespace(config=config, dtype=k.dtype, device=k.device)
            self.layers[layer] = SequenceCache(model, self.capacity)
        cache = self.layers[layer]
        out = cache.attend(0, q, k, v)
        cache.length += len(q)
        return out


class Scheduler:
    """The package's scheduler, with a block for each row that no text outgrows: the engine asks a pool of its own."""

    def __init__(self, max_batch: int, max_step_tokens: int) -> None:
        memory = Paged(BlockPool(max_batch, 2**20), prefix_cache=False)
        self.package = continuous.Scheduler(continuous.ContinuousBatching(), memory, max_batch, max_step_tokens)

    def add(self, request: Request) -> None:
        self.package.add(request)

    def plan(self) -> list[tuple[Request, int]]:
        self.step = self.package.plan()
        return [(row.request, row.end - row.start) for row in self.step.rows]

    def commit(self, rows: Sequence[tuple[Request, int]], next_token: Callable[[Request], int]) -> None:
        fed = dict(rows)
        self.step.rows = [row for row in self.step.rows if row.request in fed]
        for row in self.step.rows:
            row.end = row.request.num_kv + fed[row.request]
            row.samples = row.end == row.request.num_tokens
        self.package.commit(self.step, [[next_token(row.request)] for row in self.step.rows if row.samples])


class BlockTable:
    """One request's blocks, taken and returned by `Paged`."""

    finish_reason = None

    def __init__(self, pool) -> None:
        self.memory, self.block_table = Paged(pool, prefix_cache=False), []

    @property
    def blocks(self) -> list[int]:
        return self.block_table

    def grow(self, num_tokens: int) -> bool:
        return self.memory.reserve(self, num_tokens)

    def slot(self, position: int) -> int:
        return int(RowSpan(position, 1, self.block_table).slots(self.memory.pool.block_size)[-1])

    def free(self) -> None:
        self.memory.release(self)


def paged_attention(q: Tensor, keys: Tensor, values: Tensor, block_table: list[int], num_tokens: int) -> Tensor:
    """q [n, Hq, D], keys and values [P, block_size, Hkv, D] -> [n, Hq, D]."""
    slots = RowSpan(0, num_tokens, block_table).slots(keys.shape[1])
    return attend(q, *(store.flatten(0, 1)[slots] for store in (keys, values)), start=num_tokens - len(q))


def int8_encode(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., D] -> codes [..., D] int8, scales [...] fp16."""
    codes, scales = quantized.int8_encode(x)
    return codes.view(torch.int8), scales


PACKAGE = Parts(KVCache, Scheduler, BlockPool, BlockTable, paged_attention, int8_encode, verify_greedy)


# -- the learner's -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """One part: the answer's name, what it is called in a sentence, and the exercise and task that it is written in."""

    name: str
    title: str
    exercise: str
    task: str

    @property
    def number(self) -> int:
        return int(self.exercise[:2])


PARTS = (
    Part("KVCache", "KV cache", "02_kv_cache", "kv_cache"),
    Part("Scheduler", "scheduler", "04_continuous_scheduler", "continuous_scheduler"),
    Part("BlockPool", "block pool", "05_block_pool", "block_pool"),
    Part("BlockTable", "block table", "05_block_pool", "block_table"),
    Part("paged_attention", "paged attention", "07_paged_attention", "paged_attention"),
    Part("int8_encode", "8-bit format", "08_quantised_kv", "int8_encode"),
    Part("verify_greedy", "verification", "09_speculation", "verify_greedy"),
)


class NotDone(Exception):
    """There is no answer to take; the message says why, as in "exercise 5 is not done"."""


def take_parts(folder: str | Path = ".") -> Parts:
    """Parts from the notebooks in `folder`, in Jupyter that of the notebook that runs; each is printed with its owner.

    A part whose exercise is not there, not done, or not defined without an error is the package's.
    """
    parts, own = PACKAGE, []
    for part in PARTS:
        try:
            answer = load(part, Path(folder))
        except NotDone as why:
            say(f"{part.title}: the package's, since {why}")
            continue
        parts, own = replace(parts, **{part.name: answer}), [*own, part.name]
        outcomes = list(run_task(find_task(part.task), answer))
        passed = sum(outcome.passed is True for outcome in outcomes)
        say(f"{part.title}: yours, of exercise {part.number}; {passed} of {len(outcomes)} checks pass")
    return replace(parts, own=tuple(own))


def load(part: Part, folder: Path) -> Any:
    """The learner's answer. Raises NotDone."""
    path = folder / f"{part.exercise}.ipynb"
    try:
        cells = read(path).cells
    except FileNotFoundError:
        raise NotDone(f"{path.name} is not in this folder") from None
    except (NotANotebook, OSError) as error:
        raise NotDone(f"{path.name} could not be read: {error}") from None
    chosen = needed(list(statements(cells, part.exercise)), part.name)
    if not chosen:
        raise NotDone(f"{path.name} defines no {part.name}")
    if any("NotImplementedError" in ast.unparse(statement.node) for statement in chosen):
        raise NotDone(f"exercise {part.number} is not done")
    namespace: dict[str, Any] = {"__name__": f"exercise_{part.number}"}
    try:
        for statement in chosen:
            exec(compile(ast.Module([statement.node], []), statement.file, "exec"), namespace)
        return namespace[part.name]
    except Exception as error:
        raise NotDone(f"its cell in {path.name} fails: {type(error).__name__}: {error}") from None


@dataclass(frozen=True)
class Statement:
    """One statement of a notebook; `file` is what a traceback calls its cell."""

    node: ast.stmt
    file: str


DEFINING = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)
NOT_PYTHON = re.compile(r"^[%!?].*$|^[\w.]+\?\??\s*$", flags=re.MULTILINE)  # IPython's own lines


def statements(cells: Sequence[Cell], exercise: str) -> Iterable[Statement]:
    """What the cells define, in order; a cell that is no Python defines nothing."""
    for number, cell in enumerate(cells, 1):
        if cell.kind != "code" or DEMO in cell.tags:
            continue
        source, file = NOT_PYTHON.sub("pass", cell.source), f"<{exercise}, cell {number}>"
        try:
            nodes = ast.parse(source).body
        except (SyntaxError, ValueError):
            continue
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)  # for tracebacks
        yield from (Statement(node, file) for node in nodes if isinstance(node, DEFINING))


def needed(found: Sequence[Statement], name: str) -> list[Statement]:
    """Those that define a name, or a name that these use, and so on; in their order."""
    wanted, chosen = [name], set()
    while wanted:
        one = wanted.pop()
        for i, statement in enumerate(found):
            if i not in chosen and one in bound(statement.node):
                chosen.add(i)
                wanted += [node.id for node in ast.walk(statement.node) if isinstance(node, ast.Name)]
    return [found[i] for i in sorted(chosen)]


def bound(node: ast.stmt) -> set[str]:
    """The names that a statement defines, or changes an attribute of."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    if isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return {inner.id for target in targets for inner in ast.walk(target) if isinstance(inner, ast.Name)}
    return {node.name}
