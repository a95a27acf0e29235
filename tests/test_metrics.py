"""Metrics: one definition each, on runs small enough to work out by hand."""

import pytest
from tiny import tiny_config

from minillm.course.figures import COLUMNS, LATENCIES, flat
from minillm.extras.bounded_records import BoundedRecords
from minillm.fast.engine import Engine
from minillm.ladder.records import Records, RequestRecord
from minillm.ladder.request import SamplingParams
from minillm.measure import metrics
from minillm.measure.virtual import CostModel, VirtualClock, VirtualProposer, virtual_engine


class Ticking:
    """An executor whose every step takes `seconds`, and whose tokens never repeat."""

    def __init__(self, clock, seconds=1.0):
        self.clock, self.seconds, self.next = clock, seconds, 50
        self.config = tiny_config(vocab_size=1_000_000)

    def run(self, plan):
        self.clock.advance(self.seconds)
        due = sum(row.samples for row in plan.rows)
        self.next += due
        return [[self.next - due + i] for i in range(due)]


def ticking_engine(seconds=1.0, blocks=64, block_size=4, **settings):
    clock = VirtualClock()
    config = tiny_config()
    token_bytes = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 2
    return Engine(None, executor=Ticking(clock, seconds), clock=clock, block_size=block_size,
                  kv_memory=blocks * block_size * token_bytes, **settings)


def run(engine, prompts, caps, arrivals=None, stop_after=None):
    """Serve to the end; the output tokens that the events reported."""
    for i, (prompt, cap) in enumerate(zip(prompts, caps, strict=True)):
        end = stop_after[i] if stop_after else None
        params = SamplingParams(max_tokens=cap, stop_after=end, ignore_eos=True)
        engine.add(prompt, params, request_id=i, arrival=arrivals[i] if arrivals else 0.0)
    return drain(engine)


def drain(engine):
    tokens = 0
    while engine.has_work:
        tokens += sum(len(event.token_ids) for event in engine.step())
        engine.check_invariants()
    return tokens


@pytest.mark.parametrize(
    ("n", "p50", "p90", "p99"),
    [(0, None, None, None), (1, 1, 1, 1), (2, 1, 2, 2), (3, 2, 3, 3), (4, 2, 4, 4), (10, 5, 9, 10), (100, 50, 90, 99),
     (200, 100, 180, 198)],
)
def test_percentile_is_the_nearest_rank(n, p50, p90, p99):
    values = list(range(n, 0, -1))  # unsorted
    d = metrics.distribution(values)
    assert (d["n"], d["p50"], d["p90"], d["p99"], d["max"]) == (n, p50, p90, p99, n or None)
    assert (d["warning"] is None) == (n >= 100 or n == 0)


def test_ranks_are_counted_in_whole_numbers():
    # 0.07 * 100 is 7.000000000000001 in floating point, whose ceiling is the 8th
    assert all(metrics.percentile(range(1, 101), percent) == percent for percent in range(1, 101))


def test_ttft_counts_the_wait_and_the_queue_stands_beside_it():
    engine = ticking_engine(seconds=10.0, max_batch=1)
    run(engine, [[i, i] for i in range(4)], [1] * 4)
    times = [(r.first_scheduled - r.arrival, r.first_token - r.arrival) for r in engine.records.requests]
    assert times == [(0, 10), (10, 20), (20, 30), (30, 40)]
    found = metrics.summary(engine.records)
    assert (found["queue_s"]["p50"], found["queue_s"]["max"]) == (10, 30)
    assert (found["ttft_s"]["p50"], found["ttft_s"]["max"], found["ttft_s"]["n"]) == (20, 40, 4)


def test_aborted_requests_are_counted_and_not_averaged():
    engine = ticking_engine(max_batch=1)
    for i in range(3):
        engine.add([1, 2, i], SamplingParams(max_tokens=4), request_id=i, arrival=0.0)
    engine.step()
    engine.step()
    engine.abort(0)  # two of its four tokens given
    engine.abort(2)  # none
    assert drain(engine) == 4
    found = metrics.summary(engine.records)
    assert found["requests"] == {"finished": 1, "aborted": 2, "failed": 0, "unfinished": 0}
    assert found["output_tokens"] == 6, "the work for an aborted request was done"
    assert found["ttft_s"]["n"] == found["latency_s"]["n"] == found["queue_s"]["n"] == 1


def test_requests_under_way_are_counted_as_such():
    engine = ticking_engine()
    engine.add([1, 2], SamplingParams(max_tokens=4))
    engine.step()
    found = metrics.summary(engine.records)
    assert found["requests"] == {"finished": 0, "aborted": 0, "failed": 0, "unfinished": 1}
    assert found["output_tokens"] == 1 and found["ttft_s"]["n"] == 0


def test_nothing_gives_none_and_no_division_by_zero():
    found = metrics.summary(Records(), price_per_hour=3.0)
    assert found["output_tokens_per_s"] is None and found["cost_per_million_output_tokens"] is None
    assert found["prefix_hit_rate"] is None and found["batch"]["mean_rows"] is None


def test_itl_per_token_and_per_step_differ_where_a_step_gives_several():
    events = RequestRecord("r", 0.0, 3, first_scheduled=0.0, finish=20.0, finish_reason="length",
                           token_times=[0.0, 10.0, 10.0, 10.0, 20.0, 20.0])
    found = metrics.latencies([events])
    assert [part.tolist() for part in metrics.step_gaps(events)] == [[10.0, 10.0], [3, 2]]
    assert (found["itl_per_step_s"]["n"], found["itl_per_step_s"]["p50"]) == (2, 10)
    assert found["itl_per_token_s"]["n"] == 5 == events.output_tokens - 1
    assert found["itl_per_token_s"]["p50"] == pytest.approx(10 / 3) and found["itl_per_token_s"]["max"] == 5
    one_token = RequestRecord("r", 0.0, 3, 0.0, token_times=[1.0], finish=1.0, finish_reason="stop")
    assert metrics.latencies([one_token])["itl_per_step_s"]["n"] == 0


def test_throughput_latency_and_cost():
    engine = ticking_engine(seconds=0.5)
    given = run(engine, [[1, 2], [3, 4]], [10, 10])
    found = metrics.summary(engine.records, price_per_hour=3.6)
    assert given == found["output_tokens"] == 20
    assert found["span_s"] == found["busy_s"] == 5.0 and found["output_tokens_per_s"] == 4.0
    assert found["itl_per_step_s"]["p50"] == 0.5 and found["latency_s"]["max"] == 5.0
    assert found["cost_per_million_output_tokens"] == pytest.approx(3.6 / (4 * 3600) * 1e6) == pytest.approx(250)


def test_preemption_recomputes_without_counting_output_twice():
    engine = ticking_engine(blocks=10, max_batch=4)
    given = run(engine, [[i * 7 + j for j in range(7)] for i in range(4)], [16] * 4)
    found = metrics.summary(engine.records)
    assert found["preemptions"] > 0 and found["recomputed_tokens"] > 0
    assert given == found["output_tokens"] == 4 * 16
    assert found["prompt_tokens"] + found["cached_prompt_tokens"] == 4 * 7
    assert found["prefix_hit_rate"] == 0, "distinct prompts hit nothing, and a request's own tokens are no hit"
    firsts = {r.request_id: r.first_token for r in engine.records.requests}
    assert all(first <= 4 for first in firsts.values()), "a resumed request keeps its first token's time"


def test_prefix_hits_are_a_share_of_prompt_tokens():
    engine = ticking_engine(block_size=4)
    prefix = list(range(8))
    run(engine, [[*prefix, 20], [*prefix, 21]], [1, 1], arrivals=[0.0, 5.0])
    found = metrics.summary(engine.records)
    assert found["cached_prompt_tokens"] == 8 and found["prefix_hit_rate"] == 8 / 18


def test_static_batches_idle_and_continuous_ones_do_not():
    idle = {}
    for batching in ("static", "continuous"):
        engine = ticking_engine(batching=batching, max_batch=2)
        run(engine, [[1, 2], [3, 4]], [8, 8], stop_after=[2, 8])
        idle[batching] = metrics.summary(engine.records)["batch"]
    assert idle["static"]["idle_row_steps"] == 6 and idle["static"]["idle_share"] == 6 / 16
    assert idle["continuous"]["idle_row_steps"] == 0
    assert idle["static"]["mean_rows"] == idle["continuous"]["mean_rows"] == 10 / 8, "idle rows are no use to anybody"


def test_reserved_used_and_wasted_tokens_of_slots_and_blocks():
    wasted = {}
    for kv in ("slots", "paged"):
        engine = ticking_engine(kv=kv, block_size=4, prefix_cache=False) if kv == "paged" else ticking_engine(kv=kv)
        run(engine, [[1, 2, 3]], [30], stop_after=[3])
        wasted[kv] = metrics.summary(engine.records)["kv"]
    assert wasted["slots"]["peak_reserved_tokens"] == 32, "a slot holds 3 + 30 - 1 tokens from the start"
    assert wasted["paged"]["peak_reserved_tokens"] == 8 and wasted["paged"]["peak_used_tokens"] in (4, 5)
    for kv in wasted.values():
        assert kv["peak_reserved_tokens"] - kv["peak_used_tokens"] == kv["peak_wasted_tokens"]
        assert sum(kv[f"mean_{state}"] for state in metrics.BLOCK_STATES) == pytest.approx(64)


def test_queue_depth():
    engine = ticking_engine(max_batch=1)
    run(engine, [[1], [2], [3]], [2, 2, 2])
    assert [step.waiting for step in engine.records.steps] == [2, 2, 1, 1, 0, 0]
    assert metrics.summary(engine.records)["queue_depth"] == {"peak": 2, "mean": 1.0}


def test_summary_mode_tells_the_same_within_the_width_of_a_bucket():
    found = {}
    for mode in ("all", "summary"):
        engine = ticking_engine(seconds=0.25, max_batch=2, records=mode)
        run(engine, [[i, i + 1] for i in range(6)], [3, 5, 2, 7, 4, 6], arrivals=[0, 0.1, 0.2, 0.5, 4, 4])
        found[mode] = metrics.summary(engine.records, price_per_hour=1.0)
    assert found["summary"]["itl_per_step_s"] is None and found["summary"]["queue_depth"]["mean"] is None
    for name in ("requests", "output_tokens", "output_tokens_per_s", "batch", "prefix_hit_rate"):
        assert found["all"][name] == found["summary"][name]
    for name in ("ttft_s", "latency_s", "itl_per_token_s"):
        for figure in ("n", "p50", "p90", "p99", "max"):
            assert found["summary"][name][figure] == pytest.approx(found["all"][name][figure], rel=0.011)


def test_live_blocks_are_none_once_idle():
    engine = ticking_engine(blocks=64, max_batch=24)
    run(engine, [[i, i + 1, i + 2, i + 3, i + 4] for i in range(0, 24)], [2] * 24)
    stats = engine.stats()
    assert stats.blocks_live == 0 and stats.blocks_live + stats.blocks_cached + stats.blocks_free == 64


def test_merged_servers_are_one_service():
    parts = []
    for first in (0, 100):
        engine = ticking_engine(seconds=1.0)
        run(engine, [[first, first + 1]], [4], arrivals=[float(first // 50)])
        parts.append(engine.records)
    merged = metrics.merge(parts)
    found = metrics.summary(merged)
    assert found["requests"]["finished"] == 2 and found["output_tokens"] == 8
    assert found["span_s"] == 6.0 and found["output_tokens_per_s"] == 8 / 6, "two servers side by side, not in turn"
    assert [step.start for step in merged.steps] == sorted(step.start for step in merged.steps)
    assert merged.block_size == 4 and found["kv"]["peak_reserved_tokens"] == 8
    assert metrics.merge([parts[0], Records(16)]).block_size is None, "blocks of two sizes have no common one"
    with pytest.raises(ValueError, match="records='all'"):
        metrics.merge([BoundedRecords()])


def test_a_summary_in_columns_has_the_summarys_values():
    engine = ticking_engine()
    run(engine, [[1, 2], [3, 4]], [3, 3], arrivals=[0.0, 1.5])
    found = metrics.summary(engine.records, price_per_hour=3.6)
    assert flat(found, "itl_p50_ms", "ttft_p99_s", "mean_rows", "cost_per_million_output_tokens") == {
        "itl_p50_ms": 1e3 * found["itl_per_step_s"]["p50"], "ttft_p99_s": found["ttft_s"]["p99"],
        "mean_rows": found["batch"]["mean_rows"], "cost_per_million_output_tokens": 1e3 / found["output_tokens_per_s"],
    }
    assert list(flat(found)) == list(COLUMNS) and None not in flat(found).values()
    assert list(flat(metrics.latencies(engine.records.requests))) == list(LATENCIES)
    nothing = flat(metrics.summary(Records("all")))
    assert nothing["ttft_p50_s"] is None and nothing["cache_peak_share"] is None and nothing["preemptions"] == 0
    with pytest.raises(KeyError):
        flat(found, "speed")


def drafting_engine(acceptance, draft_length):
    cost = CostModel(tiny_config(), "bf16", 0, 1e30, 1e30, 1e30, overhead_s=1.0)
    return virtual_engine(cost, proposer=VirtualProposer(acceptance), draft_length=draft_length)


def test_speculation_counts_what_was_accepted_and_kept():
    engine = drafting_engine(acceptance=1.0, draft_length=6)
    given = run(engine, [[1, 2, 3]], [20], stop_after=[4])  # one token, then the end is the 3rd of 6 accepted drafts
    found = metrics.summary(engine.records)
    assert given == found["output_tokens"] == 4
    assert found["speculation"] == {
        "drafted_tokens": 6, "accepted_tokens": 3, "acceptance_rate": 0.5, "tokens_per_round": 3.0,
    }
    assert (found["itl_per_step_s"]["n"], found["itl_per_token_s"]["n"]) == (1, 3)
    assert found["itl_per_step_s"]["p50"] == 1.0 and found["itl_per_token_s"]["p50"] == pytest.approx(1 / 3)


def test_without_drafts_acceptance_is_undefined():
    engine = ticking_engine()
    run(engine, [[1, 2]], [3])
    found = metrics.summary(engine.records)["speculation"]
    assert found["acceptance_rate"] is None and found["tokens_per_round"] is None
