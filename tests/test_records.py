"""What is written down of a run adds up, and means one thing each."""

from __future__ import annotations

import itertools
import json
import math
import random
import tracemalloc

import pytest
from fakes import BLOCK_SIZE, busy_engines, expected_output, fake_engine, on_random_workloads, outputs, steps
from hypothesis import given

from minillm.extras.bounded_records import BoundedRecords, Histogram
from minillm.extras.trace import to_chrome_trace
from minillm.fast.engine import Engine
from minillm.ladder.records import Records
from minillm.ladder.request import SamplingParams


def params(max_tokens: int = 4, **more) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, **more)


def run(engine: Engine) -> dict:
    return outputs(steps(engine))


def watch_executor(engine: Engine, look) -> None:
    """Call `look(plan)` before each forward."""
    forward = engine.executor.run

    def looked_at(plan):
        look(plan)
        return forward(plan)

    engine.executor.run = looked_at


# -- sums -----------------------------------------------------------------------------------------


@on_random_workloads
@given(busy_engines())
def test_every_token_is_counted_once_and_under_one_name(engine):
    fed = []
    watch_executor(engine, lambda plan: fed.extend(len(row.tokens) for row in plan.rows if not row.idle))
    tokens, records = run(engine), engine.records
    totals = records.totals
    assert totals["output_tokens"] == sum(len(output) for output in tokens.values())
    assert {r.request_id: r.output_tokens for r in records.requests} == {name: len(t) for name, t in tokens.items()}
    # Each token of a prompt is computed for the first time or found in the cache; the newest output is never fed.
    assert totals["prompt_tokens"] + totals["cached_tokens"] == sum(r.prompt_tokens for r in records.requests)
    assert totals["decode_tokens"] == totals["output_tokens"] - len(tokens)
    assert totals["prompt_tokens"] + totals["decode_tokens"] + totals["recomputed_tokens"] == sum(fed)
    assert totals["preempted"] == sum(r.preemptions for r in records.requests)
    assert totals["admitted"] == len(tokens) + totals["preempted"]
    for name in ("cached_tokens", "recovered_tokens"):
        assert totals[name] == sum(getattr(r, name) for r in records.requests)


@on_random_workloads
@given(busy_engines())
def test_totals_and_peaks_are_those_of_the_steps(engine):
    run(engine)
    records, pool = engine.records, engine.scheduler.memory.pool
    for name in ("rows", "idle_rows", "sampled_rows", "prompt_tokens", "decode_tokens", "recomputed_tokens",
                 "output_tokens", "admitted", "preempted"):
        assert records.totals[name] == sum(getattr(step, name) for step in records.steps)
    for name in ("rows", "blocks_live", "kv_tokens", "waiting"):
        assert records.peaks[name] == max(getattr(step, name) for step in records.steps)
    assert records.totals["steps"] == len(records.steps) == records.totals["busy_seconds"]  # each took a second
    assert (records.began, records.ended) == (records.steps[0].start, engine.clock.now())
    for step in records.steps:
        assert step.blocks_live + step.blocks_cached + step.blocks_free == pool.num_blocks
        assert step.rows == len(step.members) == len(set(step.members))
    assert (engine.stats().blocks_live, records.live) == (0, {})


@on_random_workloads
@given(busy_engines())
def test_kv_tokens_is_the_number_of_slots_that_hold_something(engine):
    counts = []

    def count(plan):
        ends = {row.request.id: row.start + len(row.tokens) for row in plan.rows if not row.idle}
        counts.append(len({
            (request.block_table[place // BLOCK_SIZE], place % BLOCK_SIZE)
            for request in engine.scheduler.running
            for place in range(ends.get(request.id, request.num_kv))
        }))

    watch_executor(engine, count)
    run(engine)
    assert [step.kv_tokens for step in engine.records.steps] == counts
    assert all(step.kv_tokens <= step.blocks_live * BLOCK_SIZE for step in engine.records.steps)


def test_what_others_computed_meanwhile_is_a_hit_and_not_recovered():
    """"b" is sent away with 3 of its 5 tokens stored, and finds 4 of them when it returns, which "a" has stored."""
    engine = fake_engine(blocks=8, max_step_tokens=5)
    engine.add([10] * 3, params(12), "c")
    engine.add([20] * 4, params(12), "d")
    engine.add([30] * 5, params(3), "a", arrival=3.0)
    engine.add([30] * 5, params(1), "b", arrival=3.0)
    run(engine)
    b = next(record for record in engine.records.requests if record.request_id == "b")
    assert (b.preemptions, b.recovered_tokens, b.cached_tokens) == (1, 3, 1)
    assert engine.records.totals["prompt_tokens"] + engine.records.totals["cached_tokens"] == 3 + 4 + 5 + 5


def test_recomputed_tokens_are_no_output_and_no_hits():
    engine = fake_engine(blocks=5)
    for name, first in [("a", 10), ("b", 20)]:
        engine.add([first, 1, 2, 3], params(12), name)
    run(engine)
    totals = engine.records.totals
    assert totals["preempted"] == 1
    assert totals["output_tokens"] == 24
    assert totals["cached_tokens"] == 0, "its own blocks, found again, are no hits of the prefix cache"
    assert (totals["prompt_tokens"], totals["decode_tokens"]) == (8, 22)
    assert totals["recomputed_tokens"] + totals["recovered_tokens"] == 8  # prompt of 4, and 4 of 5 outputs


def test_distinct_prompts_hit_nothing_and_an_idle_engine_holds_nothing():
    engine = fake_engine(blocks=20, max_batch=4)
    for number in range(24):
        engine.add([number, 1, 2, 3, 4, 5, 6, 7, 8], params(5), number)
    run(engine)
    stats = engine.stats()
    assert engine.records.totals["cached_tokens"] == 0
    assert (stats.blocks_live, stats.blocks_cached + stats.blocks_free) == (0, 20)
    assert stats.blocks_cached > 0, "idle blocks that are still known are no leak, and must not be counted as live"


@pytest.mark.parametrize("mode", ["all", "summary"])
def test_the_work_of_an_aborted_request_is_counted(mode):
    engine = fake_engine(records=mode)
    engine.add([1, 2, 3], params(10), "a")
    tokens = [token for _ in range(4) for event in engine.step() for token in event.token_ids]
    engine.abort("a")
    assert tokens == expected_output((1, 2, 3), 4)
    assert engine.records.totals["output_tokens"] == 4
    assert engine.records.totals["finished_abort"] == 1
    if mode == "all":
        (record,) = engine.records.requests
        assert (record.output_tokens, record.finish_reason) == (4, "abort")
    # its times would flatter or spoil those of whole answers
    assert durations(engine.records) == {"queue": [], "ttft": [], "itl": [], "latency": []}


# -- times ----------------------------------------------------------------------------------------


def durations(records: Records) -> dict[str, list[float]]:
    """What the run tells of durations, be it of its requests or, rounded to whole seconds, of its histograms."""
    if isinstance(records, BoundedRecords):
        return {
            name: sorted(round(math.exp(bucket * Histogram.GROWTH)) for bucket in histogram.buckets.elements())
            for name, histogram in records.histograms.items()
        }
    ended = [r for r in records.requests if r.finish_reason != "abort" and r.token_times]
    return {
        "queue": [r.first_scheduled - r.arrival for r in ended],
        "ttft": [r.first_token - r.arrival for r in ended],
        "itl": [later - earlier for r in ended for earlier, later in itertools.pairwise(r.token_times)],
        "latency": [r.finish - r.arrival for r in ended],
    }


@pytest.mark.parametrize("mode", ["all", "summary"])
def test_time_to_first_token_counts_from_arrival_and_the_queue_is_told_apart(mode):
    engine = fake_engine(seconds=10.0, max_batch=1, records=mode)
    answers = engine.generate([[number] for number in range(4)], params(1))
    assert [a.timing.ttft for a in answers] == [10, 20, 30, 40]
    assert [a.timing.first_scheduled - a.timing.arrival for a in answers] == [0, 10, 20, 30]
    assert [a.timing.finish for a in answers] == [10, 20, 30, 40]
    assert durations(engine.records) == {
        "queue": [0, 10, 20, 30], "ttft": [10, 20, 30, 40], "itl": [], "latency": [10, 20, 30, 40],
    }


def test_time_to_first_token_counts_from_an_arrival_that_the_engine_was_too_busy_to_see():
    engine = fake_engine(seconds=10.0)
    engine.add([1], params(2), "a")
    engine.add([2], params(1), "b", arrival=3.0)
    run(engine)
    timing = {r.request_id: r.timing for r in engine.records.requests}["b"]
    assert (timing.arrival, timing.first_scheduled, timing.first_token, timing.ttft) == (3, 10, 20, 17)


@pytest.mark.parametrize("mode", ["all", "summary"])
def test_a_request_aborted_before_its_first_token_is_counted_and_not_averaged(mode):
    engine = fake_engine(seconds=10.0, max_batch=1, records=mode)
    engine.add([1], params(2), "a")
    engine.add([2], params(2), "b")
    engine.step()
    engine.abort("b")
    run(engine)
    records = engine.records
    assert (records.totals["finished_abort"], records.totals["finished_length"]) == (1, 1)
    assert durations(records) == {"queue": [0], "ttft": [10], "itl": [10], "latency": [20]}
    if mode == "all":
        timing = {r.request_id: r.timing for r in records.requests}["b"]
        assert (timing.first_scheduled, timing.first_token, timing.ttft, timing.finish) == (None, None, None, 10)


def test_several_tokens_of_one_step_have_one_time_each_and_an_only_token_has_no_gap():
    runs = iter([[1], [2, 3, 4], [5, 6]])
    engine = fake_engine(seconds=10.0, say=lambda request: next(runs))
    engine.add([0], params(6), "a")
    run(engine)
    (record,) = engine.records.requests
    assert record.token_times == [10, 20, 20, 20, 30, 30]
    assert [(step.sampled_rows, step.output_tokens) for step in engine.records.steps] == [(1, 1), (1, 3), (1, 2)]
    assert durations(engine.records)["itl"] == [10, 0, 0, 10, 0]
    for mode in ("all", "summary"):
        engine = fake_engine(records=mode)
        engine.generate([[1]], params(1))
        assert (len(durations(engine.records)["ttft"]), durations(engine.records)["itl"]) == (1, [])


def test_a_run_that_is_cut_at_its_stop_counts_up_to_the_stop():
    engine = fake_engine(say=lambda request: [1, 2, 3, 4, 5, 6], eos_ids=(3,))
    engine.generate([[0]], params(20))
    assert engine.records.totals["output_tokens"] == 3
    assert engine.records.requests[0].token_times == [1, 1, 1]



# -- the trace ------------------------------------------------------------------------------------


def test_a_trace_is_json_with_no_negative_durations(tmp_path):
    engine = fake_engine(blocks=5, seconds=0.25, max_batch=2)
    for name in (1, "1"):
        engine.add([1, 2, 3, 4], params(12), name)
    engine.add([5], params(3), "late", arrival=2.0)
    engine.add([5], params(0), "no token")
    engine.add([6], params(3), "aborted while waiting")
    engine.add([7], params(3), "aborted before it came", arrival=99.0)
    engine.step()
    engine.abort("aborted while waiting")
    engine.abort("aborted before it came")
    run(engine)
    to_chrome_trace(engine.records, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {(event["ph"], event["pid"]) for event in events} == {("X", 0)}
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in events)
    lines: dict[int, list[dict]] = {}
    for event in events:
        lines.setdefault(event["tid"], []).append(event)
    forwards = [(250_000 * number, 250_000) for number in range(len(engine.records.steps))]
    assert [(event["ts"], event["dur"]) for event in lines.pop(0)] == forwards  # microseconds
    by_request = {line[0]["args"]["request"]: line for line in lines.values()}
    assert len(lines) == 6  # each request has a line of its own, and "1" and 1 have two
    for line in lines.values():
        assert len({event["args"]["request"] for event in line}) == 1
        assert all(event["ts"] + event["dur"] == after["ts"] for event, after in itertools.pairwise(line))
    assert [event["name"] for event in by_request["late"]] == ["waiting", "prefill", "decode"]


# -- summary --------------------------------------------------------------------------------------


def busy_day(mode: str) -> Engine:
    """Preemptions, hits, idle rows and an abort."""
    engine = fake_engine(blocks=9, records=mode, max_batch=4, max_step_tokens=16)
    for number in range(30):
        engine.add([number % 3] * (3 + number % 8), params(5 + number % 9), number, arrival=number * 1.5)
    engine.abort(7)
    run(engine)
    assert engine.records.totals["preempted"] > 0 and engine.records.totals["cached_tokens"] > 0
    return engine


def test_a_summary_keeps_the_counts_and_histograms_of_full_records_and_no_list():
    full, summary = busy_day("all").records, busy_day("summary").records
    assert len(full.requests) == 30 and len(full.steps) == full.totals["steps"]
    assert (summary.requests, summary.steps, summary.live) == ([], [], {})
    assert (summary.totals, summary.peaks) == (full.totals, full.peaks)
    assert (summary.began, summary.ended) == (full.began, full.ended)
    for name, values in durations(full).items():
        histogram = Histogram()
        histogram.add(*values)
        assert (summary.histograms[name].buckets, summary.histograms[name].highest) == (
            histogram.buckets, histogram.highest)


@pytest.mark.parametrize(("mode", "bytes_per_request"), [("summary", (-20, 20)), ("all", (300, 10_000))])
def test_a_thousand_requests_leave_nothing_behind_in_a_summary(mode, bytes_per_request):
    engine = fake_engine(blocks=32, records=mode)

    def serve(number: int) -> None:
        for place in range(number):
            engine.add([place % 50, 1, 2, 3, 4], params(3), arrival=engine.clock.now() + 1)
            run(engine)

    tracemalloc.start()
    try:
        serve(300)  # fills the pool and its index
        before = tracemalloc.get_traced_memory()[0]
        serve(1000)
        growth = (tracemalloc.get_traced_memory()[0] - before) / 1000
    finally:
        tracemalloc.stop()
    assert bytes_per_request[0] < growth < bytes_per_request[1]


# -- histogram ------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3, 100, 1000])
@pytest.mark.parametrize("spread", [0.0, 0.1, 2.0])
def test_a_quantile_is_the_nearest_rank_to_one_per_cent(n, spread):
    choose, histogram = random.Random(n), Histogram()
    values = sorted(choose.lognormvariate(-3, spread) for _ in range(n))
    for value in choose.sample(values, n):
        histogram.add(value)
    assert histogram.n == n and histogram.highest == values[-1]
    for percent in (1, 50, 90, 99, 100):
        exact = values[-(-percent * n // 100) - 1]
        assert histogram.nearest_rank(percent) == pytest.approx(exact, rel=0.01)
    assert histogram.nearest_rank(100) == values[-1]


def test_no_rank_is_off_by_one_for_want_of_an_exact_fraction():
    """0.07 * 100 is 7.000000000000001: rounded up, the eighth value in place of the seventh."""
    histogram = Histogram()
    for value in range(1, 101):
        histogram.add(float(value))
    for percent in range(1, 101):
        assert histogram.nearest_rank(percent) == pytest.approx(percent, rel=0.005)


def test_a_quantile_of_nothing_is_none():
    assert (Histogram().n, Histogram().nearest_rank(50), Histogram().highest) == (0, None, None)


def test_durations_of_zero_are_counted():
    histogram = Histogram()
    for seconds in (0.0, 0.0, 5.0):
        histogram.add(seconds)
    assert histogram.n == 3 and histogram.nearest_rank(50) <= Histogram.SHORTEST * 1.01
