"""Several engines on virtual clocks: replicas, pools, and prefill apart from decoding.

Results are one `RequestRecord` per item, in the items' order. The engines' own records, merged by
`metrics.merge`, show how the hardware was used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from minillm.fast.engine import Engine
from minillm.ladder.quantized import kv_bytes_per_token
from minillm.ladder.records import RequestRecord
from minillm.measure.virtual import GIVEN_TOKENS
from minillm.measure.workload import WorkItem


def serve(
    engines: Sequence[Engine], items: Sequence[WorkItem], max_waiting: int | None = None
) -> list[RequestRecord | None]:
    """The open loop over replicas: a request goes to the engine with the fewest unfinished ones when it arrives.

    max_waiting: a request that finds this many in its engine's queue is refused, and has None for a
    record; None: no bound. Raises RequestError if the chosen engine could never run a request.
    """
    for index in sorted(range(len(items)), key=lambda i: items[i].arrival):
        item = items[index]
        for engine in engines:
            run_until(engine, item.arrival)
        engine = min(engines, key=unfinished)
        if max_waiting is None or engine.stats().waiting < max_waiting:
            engine.add(item.prompt_ids, item.params, request_id=index, arrival=item.arrival)
    for engine in engines:
        run_until(engine, float("inf"))
    ended = {record.request_id: record for engine in engines for record in engine.records.requests}
    return [ended.get(index) for index in range(len(items))]


def unfinished(engine: Engine) -> int:
    """Requests that an engine was given and has not finished."""
    stats = engine.stats()
    return stats.waiting + stats.running + stats.arriving


def run_until(engine: Engine, moment: float) -> None:
    """Let an engine work until its clock has reached the moment, or it has nothing to do."""
    while engine.has_work and engine.clock.now() < moment:
        engine.step(until=moment)


def serve_disaggregated(
    prefill: Sequence[Engine], decode: Sequence[Engine], items: Sequence[WorkItem], transfer_bytes_per_s: float
) -> list[RequestRecord]:
    """Prompts and first tokens on one pool, the rest on another, once the prompt's cache has been sent there.

    The engines of `decode` are made with `prompts_received=True` and `max_step_tokens` for a whole
    prompt. Transfers do not wait for one another (DistServe: Zhong et al., 2024).
    """
    firsts = serve(prefill, [replace(item, max_tokens=1, stop_after=None) for item in items])
    token_bytes = kv_bytes_per_token(prefill[0].config, prefill[0].executor.cost.kv_format)
    going_on = [index for index, item in enumerate(items) if item.output_tokens > 1]
    handed_over = [
        WorkItem(
            arrival=firsts[index].finish + len(items[index].prompt_ids) * token_bytes / transfer_bytes_per_s,
            prompt_ids=[*items[index].prompt_ids, GIVEN_TOKENS + index],
            max_tokens=items[index].max_tokens - 1,
            stop_after=items[index].stop_after and items[index].stop_after - 1,
        )
        for index in going_on
    ]
    rest = dict(zip(going_on, serve(decode, handed_over), strict=True))
    return [joined(first, rest[i]) if i in rest else first for i, first in enumerate(firsts)]


def joined(first: RequestRecord, rest: RequestRecord) -> RequestRecord:
    """One request's record from those of its two halves."""
    return replace(
        first, token_times=first.token_times + rest.token_times, finish=rest.finish, finish_reason=rest.finish_reason,
        preemptions=first.preemptions + rest.preemptions,
    )
