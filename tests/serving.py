"""Drive an engine in tests: pools by the block, a clock moved by hand, notes of what enters the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from minillm.fast.engine import Engine
from minillm.guard.invariants import check_invariants
from minillm.ladder import engine as heart
from minillm.ladder.quantized import kv_bytes_per_token, storage_in
from minillm.ladder.request import RequestId, SamplingParams
from minillm.model.llama import Llama

MOST_STEPS = 2000  # far more than any run here needs: an engine that gets nowhere must fail, not hang


class ManualClock:
    """Time stands still until the test moves it, or the engine waits for an arrival."""

    def __init__(self) -> None:
        self.moment = 0.0

    def now(self) -> float:
        return self.moment

    def wait_until(self, moment: float) -> None:
        self.moment = max(self.moment, moment)


def make_engine(model: Llama, blocks: int = 64, block_size: int = 4, kv_format: str = "fp32", **settings) -> Engine:
    """An engine whose pool has this many blocks: the fast one, or the heart's for a model that is plainly a `Llama`."""
    memory = blocks * block_size * kv_bytes_per_token(model.config, kv_format)
    if type(model) is Llama:
        return heart.Engine(
            model, kv_memory=memory, block_size=block_size, storage=storage_in(kv_format), **settings
        )
    return Engine(model, kv_memory=memory, block_size=block_size, kv_format=kv_format, **settings)


def numbers(storage) -> tuple[Tensor, Tensor]:
    """The keys and the values of a native format as they lie in memory, each [L, slots, Hkv, D]."""
    return storage.keys.numbers, storage.values.numbers


def serve(
    engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams]
) -> list[list[int]]:
    """The output tokens of all prompts, added at once; the engine's books are checked after every step."""
    every = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    ids = [engine.add(prompt, own) for prompt, own in zip(prompts, every, strict=True)]
    texts = run_to_end(engine)
    return [texts[request_id] for request_id in ids]


def run_to_end(engine: Engine) -> dict[RequestId, list[int]]:
    """Step until nothing is left. Everything that was lent must then be back."""
    texts: dict[RequestId, list[int]] = {}
    for _ in range(MOST_STEPS):
        if not engine.has_work:
            break
        for event in engine.step():
            texts.setdefault(event.request_id, []).extend(event.token_ids)
        check_invariants(engine.scheduler)
    assert not engine.has_work, f"still busy after {MOST_STEPS} steps"
    pool = engine.scheduler.memory.pool
    assert pool.num_live == 0, f"{pool.num_live} blocks are still held when no request is left"
    assert len(pool.cached) + len(pool.free) == pool.num_blocks
    return texts


@dataclass(frozen=True)
class FedRow:
    """One row of one forward: what the plan says, and what the model was given for it."""

    request_id: RequestId
    samples: bool
    idle: bool
    tokens: list[int]
    positions: list[int]


class Watch:
    """Notes every forward of a model, and row by row where an engine plans it."""

    def __init__(self, monkeypatch, model: Llama, engine: Engine | None = None) -> None:
        self.forwards: list[tuple[list[int], list[int]]] = []  # tokens and positions, flat
        self.logits: list[Tensor] = []
        self.steps: list[list[FedRow]] = []
        hidden_states, logits = model.hidden_states, model.logits

        def noted_hidden_states(tokens, positions, cache):
            self.forwards.append((tokens.tolist(), positions.tolist()))
            return hidden_states(tokens, positions, cache)

        def noted_logits(x):
            self.logits.append(logits(x))
            return self.logits[-1]

        monkeypatch.setattr(model, "hidden_states", noted_hidden_states)
        monkeypatch.setattr(model, "logits", noted_logits)
        if engine is not None:
            run = engine.executor.run

            def noted_run(plan):
                outputs = run(plan)
                self.steps.append(list(self._rows(plan)))
                return outputs

            monkeypatch.setattr(engine.executor, "run", noted_run)

    def _rows(self, plan):
        """The flat tokens and positions of the last forward, cut where the plan's rows end."""
        tokens, positions = self.forwards[-1]
        at = 0
        for row in plan.rows:
            end = at + len(row.tokens)
            yield FedRow(row.request.id, row.samples, row.idle, tokens[at:end], positions[at:end])
            at = end
        assert at == len(tokens) == len(positions)

    @property
    def rows(self) -> list[FedRow]:
        return [row for step in self.steps for row in step]

    @property
    def tokens_fed(self) -> int:
        return sum(len(tokens) for tokens, _ in self.forwards)


def check_positions(watch: Watch, texts: dict[RequestId, list[int]]) -> None:
    """Every row must be one run of positions, and bring at each just the token that stands there in its text.

    Outputs cannot prove this: RoPE hides a shift of a whole row.
    """
    for row in watch.rows:
        first = row.positions[0]
        assert row.positions == list(range(first, first + len(row.tokens))), f"{row.request_id}: {row.positions}"
        there = texts[row.request_id][first : first + len(row.tokens)]
        assert row.tokens == there, f"{row.request_id}: {row.tokens} fed at {first}, where the text has {there}"
