"""Very many requests in virtual time, with aborts, failing forwards, unusable logits and preemptions.

`-m slow` runs the million; CI a part of it. And 2,000 on a real model, whose forward fails now and then.
"""

from __future__ import annotations

import gc
import random
import resource
from itertools import count

import pytest
from serving import make_engine
from tiny import tiny_config, tiny_model

from minillm.ladder.decode import decode_cached
from minillm.ladder.quantized import kv_bytes_per_token
from minillm.ladder.request import NO_TOKEN, SamplingParams
from minillm.measure.virtual import CostModel, virtual_engine

BLOCKS, BLOCK_SIZE, ROWS = 24, 4, 12  # a third of what the rows may come to need: preemption is usual


class Fails(Exception):
    """A forward that broke down."""


class Troubled:
    """Put around an executor: now and then its forward fails, or the logits of a row cannot be used."""

    def __init__(self, executor, draw: random.Random, fails: float, unusable: float) -> None:
        self.executor, self.draw, self.fails, self.unusable = executor, draw, fails, unusable
        self.failed = self.given_up = 0

    def __getattr__(self, name: str):
        return getattr(self.executor, name)

    def run(self, plan):
        if self.draw.random() < self.fails:
            self.failed += 1
            raise Fails
        outputs = self.executor.run(plan)
        for at in range(len(outputs)):
            if self.draw.random() < self.unusable:
                self.given_up += 1
                outputs[at] = [NO_TOKEN]
        return outputs


def soak(engine, requests: int, draw: random.Random, check_every: int, judge) -> dict[str, int]:
    """Keep the engine full until all have been served; how they ended. Memory must not grow after the first fifth."""
    ended, sent, alive, objects, steps = {}, 0, {}, [], count(1)
    while sent < requests or engine.has_work:
        while sent < requests and len(alive) < 3 * ROWS:
            prompt = [draw.randrange(3)] * draw.randint(1, 9) + [draw.randrange(50) for _ in range(draw.randint(1, 12))]
            wanted = draw.randint(0, 10)
            arrival = engine.clock.now() + draw.random() if draw.random() < 0.2 else None
            alive[engine.add(prompt, SamplingParams(wanted, ignore_eos=True), arrival=arrival)] = (prompt, wanted, [])
            sent += 1
        if draw.random() < 0.05:
            engine.abort(draw.choice(list(alive)))
        try:
            events = engine.step()
        except Fails:
            events = []
        for event in events:
            alive[event.request_id][2].extend(event.token_ids)
            if event.finished:
                judge(alive.pop(event.request_id), event.finish_reason)
                ended[event.finish_reason] = ended.get(event.finish_reason, 0) + 1
        if next(steps) % check_every == 0:
            engine.check_invariants()
            gc.collect()
            objects.append(len(gc.get_objects()))
    engine.check_invariants()
    stats = engine.stats()
    assert (stats.blocks_live, stats.waiting, stats.running, stats.arriving) == (0, 0, 0, 0)
    assert not (engine.unfinished or engine.events or engine.streams or alive)
    assert sum(ended.values()) == requests
    settled = objects[len(objects) // 5 :]
    assert max(settled) < 1.1 * min(settled), "objects pile up"
    return ended


def right_length(life: tuple, reason: str) -> None:
    """An answer that ended by itself has all its tokens; no other has more."""
    _, wanted, tokens = life
    assert reason in ("length", "abort", "error")
    assert len(tokens) == wanted if reason == "length" else len(tokens) <= wanted


@pytest.mark.parametrize("requests", [20_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_nothing_leaks_in_a_long_run_in_virtual_time(requests):
    draw = random.Random(0)
    config = tiny_config()
    cost = CostModel(config, "bf16", 0, 1e30, 1e30, 1e30, overhead_s=0.25)
    engine = virtual_engine(cost, records="summary", max_batch=ROWS, max_step_tokens=32, block_size=BLOCK_SIZE,
                            kv_memory=BLOCKS * BLOCK_SIZE * kv_bytes_per_token(config, "bf16"))
    engine.executor = troubled = Troubled(engine.executor, draw, fails=0.002, unusable=0.001)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ended = soak(engine, requests, draw, check_every=max(500, requests // 200), judge=right_length)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    totals = engine.records.totals
    assert totals["preempted"] > requests / 200 and troubled.failed > 5 and ended["error"] == troubled.given_up > 5
    print(f"{requests:,} requests: {ended}; {totals['preempted']:,} preemptions, {troubled.failed:,} forwards failed; "
          f"{totals['steps']:,} steps, memory grew by {grown:.0f} MiB")
    assert grown < 100


@pytest.mark.parametrize("settings", [dict(), dict(speculator="ngram")], ids=["plain", "drafts"])
def test_a_thousand_real_requests_survive_forwards_that_fail(settings):
    """Every tenth answer is compared with the one that rung 1 gives to the prompt alone, as far as it came."""
    draw, model, seen = random.Random(1), tiny_model(), count()

    def right_tokens(life: tuple, reason: str) -> None:
        right_length(life, reason)
        prompt, wanted, tokens = life
        if next(seen) % 10 == 0:
            assert tokens == list(decode_cached(model, prompt, wanted))[: len(tokens)]

    engine = make_engine(model, BLOCKS, BLOCK_SIZE, records="summary", max_batch=ROWS, max_step_tokens=32, **settings)
    engine.executor = troubled = Troubled(engine.executor, draw, fails=0.02, unusable=0.005)
    ended = soak(engine, 1000, draw, check_every=20, judge=right_tokens)
    totals = engine.records.totals
    print(f"1,000 real requests: {ended}; {troubled.failed} forwards failed, {totals['preempted']} preemptions")
    assert ended["error"] == troubled.given_up > 5 and troubled.failed > 5 and totals["preempted"] > 5
