"""What the live page draws, taken between two steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minillm.serve.engine_thread import EngineThread

MOST_CELLS = 2048  # of the map: a larger pool shows several blocks in a cell


def state(thread: EngineThread, model: str) -> dict:
    """Rows, queue, blocks, tokens and latencies of this moment. Times in seconds on the engine's clock."""
    engine, scheduler = thread.engine, thread.engine.scheduler
    stats, totals = engine.stats(), engine.records.totals
    return {
        "model": model, "time": engine.clock.now(), "max_batch": scheduler.max_batch,
        "rows": [{"prompt": r.num_prompt, "stored": r.num_kv, "output": r.num_output, "most": r.params.max_tokens}
                 for r in scheduler.running],
        "waiting": stats.waiting, "refused": thread.metrics.refused._value.get(),
        "blocks": {"live": stats.blocks_live, "cached": stats.blocks_cached, "free": stats.blocks_free},
        "map": block_map(scheduler.memory.pool), "output_tokens": totals["output_tokens"],
        "finished": sum(totals[f"finished_{reason}"] for reason in ("stop", "length")),
        "aborted": totals["finished_abort"], "preempted": totals["preempted"], **thread.metrics.medians_ms(),
    }


def block_map(pool) -> str:
    """A character a block: "." free, "c" cached, a digit for how many requests hold it (9: nine or more).

    A pool of over `MOST_CELLS` blocks shows the most held of each run of neighbours.
    """
    held = [min(n, 9) if n else (0 if block in pool.cached else -1) for block, n in enumerate(pool.references)]
    each = -(-len(held) // MOST_CELLS)
    cells = [max(held[at : at + each]) for at in range(0, len(held), each)]
    return "".join("." if n < 0 else "c" if n == 0 else str(n) for n in cells)
