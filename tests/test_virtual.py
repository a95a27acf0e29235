"""Virtual time: the real scheduler on simulated steps, costs calculated here, a fit that predicts another run."""

from dataclasses import replace

import pytest
from fakes import FakeTokenizer
from tiny import tiny_config

from minillm.course.experiments.example import worked_example_rows
from minillm.course.experiments.fitting import FittedCost, corrections, fit, step_seconds
from minillm.course.experiments.prediction import LIMITS, swelling
from minillm.ladder.quantized import kv_bytes_per_token
from minillm.ladder.records import Records
from minillm.ladder.request import SamplingParams
from minillm.load.config import ModelConfig
from minillm.measure import metrics
from minillm.measure.fleet import run_until, serve, serve_disaggregated
from minillm.measure.roofline import StepShape, least_work, read_numbers
from minillm.measure.service import Service
from minillm.measure.virtual import (
    DEVICES,
    GIVEN_TOKENS,
    CostModel,
    VirtualClock,
    VirtualProposer,
    virtual_engine,
)
from minillm.measure.workload import WorkItem, chat, lognormal, play, shared_prefix

SMALL = tiny_config(max_position_embeddings=8192)
TOKEN_BYTES = kv_bytes_per_token(SMALL, "bf16")
SECOND = CostModel(SMALL, "bf16", 0, 1e30, 1e30, 1e30, overhead_s=1.0)  # every step takes one
LLAMA = ModelConfig.preset("llama-3-8b")
A100 = CostModel.of_device("a100-80gb", LLAMA)


# -- the clock and the cost -----------------------------------------------------------------------


def test_the_clock_jumps_forward_and_never_back():
    clock = VirtualClock()
    clock.wait_until(5.0)
    clock.wait_until(3.0)
    clock.advance(0.5)
    assert clock.now() == 5.5


@pytest.mark.parametrize(("overlap", "expected"), [(1.0, 6.5), (0.0, 9.5), (0.5, 8.0)])
def test_a_step_is_the_longer_time_and_what_is_not_hidden_of_the_shorter(overlap, expected):
    shape = StepShape.decode([10, 20])
    work = least_work(SMALL, "bf16", shape, weight_bytes=1000.0)
    cost = CostModel(SMALL, "bf16", 1000.0, bytes_per_s=1000.0, kv_bytes_per_s=(work.bytes - 1000) / 5,
                     flops_per_s=work.flops / 3, overhead_s=0.5, overlap=overlap)
    assert cost.seconds(shape) == pytest.approx(expected)  # memory 1 + 5, compute 3, overhead 0.5


def test_devices_come_from_data_sheets_and_unknown_ones_are_refused():
    step = StepShape.decode([1000])
    assert 0.008 < A100.seconds(step) < 0.011  # 15 GB at the 1.7 TB/s that a copy reaches
    assert all(CostModel.of_device(name, LLAMA).seconds(step) > 0 for name in DEVICES)
    with pytest.raises(ValueError, match="unknown device 'a100'; known: a100-80gb, h100, h200, l4, t4, rtx-4090, cpu"):
        CostModel.of_device("a100", LLAMA)
    assert A100.weight_bytes == 2 * read_numbers(LLAMA)


# -- the engine on virtual time -------------------------------------------------------------------


def test_arrivals_ahead_are_jumped_to_and_tokens_never_repeat():
    engine = virtual_engine(SECOND)
    outputs = play(engine, [WorkItem(0.0, [1, 2], 2), WorkItem(1e6, [1, 2], 3)])
    assert engine.clock.now() == 1e6 + 3
    tokens = [token for output in outputs for token in output]
    assert len(set(tokens)) == 5


def test_distinct_prompts_hit_no_prefix_and_a_shared_one_does():
    distinct, shared = (virtual_engine(SECOND) for _ in range(2))
    play(distinct, [WorkItem(0.0, list(range(i * 100, i * 100 + 50)), 40) for i in range(6)])
    play(shared, shared_prefix(requests=6, prefix_tokens=160))
    assert metrics.summary(distinct.records)["prefix_hit_rate"] == 0
    assert metrics.summary(shared.records)["cached_prompt_tokens"] == 5 * 160


def test_output_adds_up_under_preemption_and_abort():
    engine = virtual_engine(SECOND, kv_memory=20 * 16 * TOKEN_BYTES, max_batch=8)
    for i in range(12):
        engine.add([i] * (20 + i), SamplingParams(max_tokens=60, ignore_eos=True), request_id=i, arrival=float(i))
    given = {i: 0 for i in range(12)}
    steps = 0
    while engine.has_work:
        for event in engine.step():
            given[event.request_id] += len(event.token_ids)
        steps += 1
        if steps == 40:
            engine.abort(2)
            engine.abort(11)
        engine.check_invariants()
    found = metrics.summary(engine.records)
    assert found["preemptions"] > 0 and found["requests"]["aborted"] == 2
    assert found["output_tokens"] == sum(given.values()) == sum(r.output_tokens for r in engine.records.requests)
    assert all(given[i] == 60 for i in range(12) if i not in (2, 11))


@pytest.mark.parametrize("cv", [0.0, 1.0])
def test_continuous_over_static_gains_nothing_where_all_lengths_are_equal(cv):
    speed = {}
    for batching in ("static", "continuous"):
        engine = virtual_engine(A100, batching=batching, max_batch=8, kv_memory=10**10, max_step_tokens=2048)
        play(engine, lognormal(cv, requests=64))
        speed[batching] = metrics.summary(engine.records)["output_tokens_per_s"]
    gain = speed["continuous"] / speed["static"]
    assert gain == pytest.approx(1.0, abs=0.005) if cv == 0 else gain > 1.5


def test_the_same_run_twice_is_the_same_to_the_last_step():
    runs = [virtual_engine(A100, kv_memory=10**10) for _ in range(2)]
    for engine in runs:
        play(engine, chat(requests=30, scale=0.2))
    assert runs[0].records.steps == runs[1].records.steps


@pytest.mark.parametrize("acceptance", [0.0, 0.6, 1.0])
def test_drafts_are_accepted_as_often_as_asked(acceptance):
    per_round = sum(acceptance**i for i in range(5))  # the first is the target's own token
    engine = virtual_engine(SECOND, proposer=VirtualProposer(acceptance), draft_length=4, kv_memory=10**8)
    outputs = play(engine, [WorkItem(0.0, [i, i + 1], 401) for i in range(20)])
    assert [len(output) for output in outputs] == [401] * 20
    found = metrics.summary(engine.records)["speculation"]
    assert found["tokens_per_round"] == pytest.approx(per_round, rel=0.05)
    assert found["acceptance_rate"] == pytest.approx((per_round - 1) / 4, rel=0.05, abs=1e-9)


def test_drafts_help_one_user():
    seconds = []
    for proposer in (None, VirtualProposer(0.8)):
        engine = virtual_engine(A100, proposer=proposer, kv_memory=10**10)
        play(engine, [WorkItem(0.0, list(range(100)), 200)])
        seconds.append(engine.clock.now())
    assert seconds[1] < 0.45 * seconds[0]


# -- several steps as one --------------------------------------------------------------------------

COSTLY = CostModel(SMALL, "bf16", 1e6, 1e9, 1e8, 1e9, overhead_s=1e-3)  # each part of a step's time shows
TIGHT = {"kv_memory": 40 * 16 * TOKEN_BYTES, "max_batch": 8}  # 40 blocks: not enough for eight


@pytest.mark.parametrize(
    ("settings", "clients"),
    [
        ({}, None), ({}, 6), (TIGHT, None), (TIGHT, 8), ({**TIGHT, "prefix_cache": False}, None),
        ({"kv": "slots", **TIGHT}, 8), ({"kv": "slots", "batching": "static", **TIGHT}, None),
        ({"chunked_prefill": False, "max_step_tokens": 512, "max_batch": 4}, None), ({"max_step_tokens": 4}, 8),
        ({"block_size": 1, "kv_memory": 700 * TOKEN_BYTES}, None), ({"proposer": VirtualProposer(0.5)}, None),
        ({"records": "summary"}, None),
    ],
)
def test_steps_run_as_one_are_the_steps_that_would_have_been_run_one_by_one(settings, clients):
    items = [replace(item, arrival=item.arrival / 40) for item in chat(40, scale=0.05, seed=3)]
    items += [WorkItem(0.01 * i, [i % 3] * 33, 1 + 9 * i) for i in range(8)]  # some share a prefix
    alone, together = virtual_engine(COSTLY, **settings), virtual_engine(COSTLY, **settings)
    looks = []
    outputs = play(alone, items, clients, watch=looks.append), play(together, items, clients)
    assert [len(output) for output in outputs[0]] == [len(output) for output in outputs[1]]
    assert together.records.steps == alone.records.steps
    assert together.records.requests == alone.records.requests
    assert (together.records.totals, together.records.peaks) == (alone.records.totals, alone.records.peaks)
    assert len(looks) == alone.records.totals["steps"], "a watched run shows every step"
    together.check_invariants()


WHOLE = {"chunked_prefill": False, "max_step_tokens": 16}


@pytest.mark.parametrize(
    ("settings", "requests"),
    [
        ({"kv_memory": 6 * 16 * TOKEN_BYTES}, [(16, 60, 0.0), (16, 60, 0.0)]),  # the second is preempted for a block
        (WHOLE, [(4, 40, 0.0), (16, 9, 5.0), (16, 9, 5.0)]),  # the third needs a step to itself, which is the next
        ({"batching": "static", **WHOLE}, [(16, 9, 0.0)] * 3),  # the third is in the batch, and not in each step
    ],
    ids=["one was preempted", "one waits for budget", "one runs without a row"],
)
def test_a_step_that_the_next_one_will_not_be_like_is_run_once(settings, requests):
    engines = [virtual_engine(SECOND, **settings) for _ in range(2)]
    for engine, until in zip(engines, (None, 1e3), strict=True):
        for number, (prompt, answer, arrival) in enumerate(requests):
            engine.add([number] * prompt, SamplingParams(max_tokens=answer), number, arrival)
        while engine.has_work:
            engine.step(until)
    alone, together = (engine.records for engine in engines)
    assert together.steps == alone.steps and together.requests == alone.requests


def test_a_step_runs_on_until_a_request_arrives_or_ends_and_no_further():
    engine = virtual_engine(SECOND)
    engine.add([1], SamplingParams(max_tokens=10), request_id="a")
    assert [len(event.token_ids) for event in engine.step()] == [1], "without a moment given, one step is one step"
    engine.add([2], SamplingParams(max_tokens=2), request_id="b", arrival=5.5)
    tokens = {event.request_id: len(event.token_ids) for event in engine.step(until=100.0)}
    assert (engine.clock.now(), tokens) == (6.0, {"a": 5}), "the engine's own next arrival counts too"
    assert engine.stats().running == 1
    while engine.has_work:
        engine.step(until=100.0)
    assert [record.token_times for record in engine.records.requests] == [
        [7.0, 8.0], [float(moment) for moment in range(1, 11)]
    ]


@pytest.mark.parametrize(
    ("tokenizer", "stop"),
    [(None, {"stop_ids": [GIVEN_TOKENS + 2]}), (FakeTokenizer(), {"stop": chr(97 + (GIVEN_TOKENS + 2) % 26)})],
    ids=["an id", "a text"],
)
def test_a_stop_that_any_token_might_be_keeps_steps_apart(tokenizer, stop):
    engine = virtual_engine(SECOND, tokenizer=tokenizer)
    engine.add([1], SamplingParams(max_tokens=50, ignore_eos=True, **stop))
    while engine.has_work:
        engine.step(until=100.0)
    assert engine.clock.now() == 3.0 and engine.records.totals["finished_stop"] == 1


def test_many_steps_run_as_one_are_few_plans():
    engine = virtual_engine(A100, kv_memory=60 * 10**9, max_batch=64)
    plans, plan = [], engine.scheduler.plan
    engine.scheduler.plan = lambda: plans.append(plan()) or plans[-1]
    play(engine, chat(30, rate=5.0, scale=0.2))
    assert len(plans) < engine.records.totals["steps"] / 3


# -- fitting --------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [0.0, 1.0])
def test_a_fit_finds_the_cost_that_made_the_steps(overlap):
    config = ModelConfig.preset("smollm2-135m")
    true = CostModel(config, "fp32", 538e6, 25e9, 7e9, 190e9, 2e-3, overlap)
    load = {"kv_memory": 1 << 30, "max_batch": 24, "max_step_tokens": 128, "max_context": 2048}
    recorded = virtual_engine(true, **load)
    play(recorded, chat(60, rate=3.0, scale=0.15))
    fitted = fit(recorded.records, config, "fp32", 538e6)
    for items, clients in ((lognormal(0.8, 24, 60, 40), 12), (chat(40, rate=1.0, scale=0.1, seed=5), None)):
        found = []
        for cost in (true, fitted):
            engine = virtual_engine(cost, **load)
            play(engine, items, clients)
            found.append(metrics.summary(engine.records))
        assert errors(*found) == pytest.approx((0, 0, 0), abs=0.05)


def test_a_fit_finds_what_the_form_lacks():
    """Steps of 8 to 40 tokens take a third more, as where a library changes its way: the form alone cannot say so."""
    config = ModelConfig.preset("smollm2-135m")
    lacking = ((7, 1.0), (8, 1.33), (40, 1.33), (41, 1.0))
    true = FittedCost(config, "fp32", 538e6, 25e9, 7e9, 190e9, 2e-3, 0.0, lacking)
    recorded = virtual_engine(true, **LIMITS)
    play(recorded, swelling(chat(60, 4.0, 0.06)))
    fitted = fit(recorded.records, config, "fp32", 538e6)
    for items, clients in ((lognormal(0.8, 24, 60, 40), 12), (lognormal(0.8, 24, 20, 40), 3),
                           (chat(40, rate=2.0, scale=0.1, seed=5), None)):
        found = []
        for cost in (true, fitted):
            engine = virtual_engine(cost, **LIMITS)
            play(engine, items, clients)
            found.append(metrics.summary(engine.records))
        throughput, ttft, itl = errors(*found)
        assert abs(throughput) < 0.03 and abs(ttft) < 0.06 and abs(itl) < 0.06
    twelve, form = StepShape.decode([60] * 12), replace(fitted, corrections=())
    assert fitted.seconds(twelve) == pytest.approx(true.seconds(twelve), rel=0.06)
    assert form.seconds(twelve) < 0.93 * true.seconds(twelve), "else nothing was lacking"


def errors(real, predicted):
    """Relative errors of throughput, p50 TTFT and p50 ITL."""
    return (
        predicted["output_tokens_per_s"] / real["output_tokens_per_s"] - 1,
        predicted["ttft_s"]["p50"] / real["ttft_s"]["p50"] - 1,
        predicted["itl_per_step_s"]["p50"] / real["itl_per_step_s"]["p50"] - 1,
    )


def test_a_few_stalled_steps_do_not_bend_a_fit():
    engine = virtual_engine(CostModel.of_device("l4", LLAMA), kv_memory=8 * 10**9, max_batch=16)
    play(engine, chat(40, rate=2.0, scale=0.3))
    before = fit(engine.records, LLAMA, "bf16", 2 * read_numbers(LLAMA))
    stalled = 0.0
    for i, step in enumerate(engine.records.steps):
        stall = 5.0 * (i % 97 == 5)
        engine.records.steps[i] = replace(step, start=step.start + stalled, duration=step.duration + stall)
        stalled += stall
    after = fit(engine.records, LLAMA, "bf16", 2 * read_numbers(LLAMA))
    for shape in (StepShape.decode([400] * 8), StepShape.of([(0, 512, True)])):
        assert after.seconds(shape) == pytest.approx(before.seconds(shape), rel=0.05)
    assert len(after.noise) == len([step for i, step in enumerate(engine.records.steps) if i % 97 != 5])


def test_a_correction_believes_steps_less_the_more_they_differ():
    form = CostModel(SMALL, "bf16", 0, 1e30, 1e30, 1e30, overhead_s=1.0)
    shapes = [StepShape.decode([10])] * 40
    (_, steady), = corrections(form, shapes, [1.2] * 40)
    (_, shaky), = corrections(form, shapes, [1.0, 1.4] * 20)
    assert steady == pytest.approx(1 + 0.2 * 40 / 44) and shaky == pytest.approx(1 + 0.2 * 40 / (44 + 0.04 / 0.04**2))


def test_time_between_steps_counts_where_work_went_on_and_not_where_the_engine_waited():
    engine = virtual_engine(SECOND, max_batch=1)
    play(engine, [WorkItem(0.0, [1], 2), WorkItem(0.0, [2], 1), WorkItem(100.0, [3], 1)])
    steps = engine.records.steps
    late = [replace(step, start=step.start + 0.25 * i) for i, step in enumerate(steps)]  # a quarter of a second between
    assert step_seconds(late) == [1.25, 1.25, 1.0, 1.0]


def test_too_short_a_run_is_refused():
    with pytest.raises(ValueError, match="0 recorded steps cannot settle 5 numbers"):
        fit(Records(), SMALL, "bf16", 1000)


# -- several engines ------------------------------------------------------------------------------


def test_replicas_share_the_load_and_every_request_ends_once():
    engines = [virtual_engine(SECOND, max_batch=1) for _ in range(3)]
    items = [WorkItem(0.0, [i + 1], 4) for i in range(9)]
    ended = serve(engines, items)
    assert [record.request_id for record in ended] == list(range(9))
    assert [len(engine.records.requests) for engine in engines] == [3, 3, 3]
    assert max(record.finish for record in ended) == 12
    merged = metrics.summary(metrics.merge([engine.records for engine in engines]))
    assert merged["output_tokens"] == 36 and merged["output_tokens_per_s"] == 3.0


def test_a_request_goes_to_the_replica_with_the_fewest_unfinished():
    """In turns the third would wait for the long answer of the first."""
    items = [WorkItem(0.0, [1], 100), WorkItem(1.0, [2], 1), WorkItem(2.5, [3], 1), WorkItem(4.5, [4], 1)]
    ended = serve([virtual_engine(SECOND, max_batch=1) for _ in range(2)], items)
    assert max(record.first_token - record.arrival for record in ended) == 1.0


def test_more_replicas_dilute_the_batch():
    rows, speed = {}, {}
    for number in (1, 4):
        engines = [virtual_engine(A100, kv_memory=10**10, max_batch=64, max_step_tokens=2048) for _ in range(number)]
        serve(engines, chat(120, rate=40, scale=0.2))
        found = metrics.summary(metrics.merge([engine.records for engine in engines]))
        rows[number], speed[number] = found["batch"]["mean_rows"], found["output_tokens_per_s"]
    assert rows[4] < rows[1] / 2 and speed[1] < speed[4] < 4 * speed[1]


def test_pools_keep_the_interactive_away_from_the_batch():
    interactive = [WorkItem(2.0 * i, [i, i + 1, 7], 8) for i in range(20)]
    batch = [WorkItem(0.0, list(range(3000 + i, 3600 + i)), 200) for i in range(40)]
    mixed = [virtual_engine(A100, kv_memory=10**10, max_batch=8) for _ in range(2)]
    together = serve(mixed, interactive + batch)[: len(interactive)]
    own = serve([virtual_engine(A100, kv_memory=10**10, max_batch=8)], interactive)
    ttft = [metrics.latencies(records)["ttft_s"]["p99"] for records in (together, own)]
    assert ttft[1] < ttft[0] / 5


def test_an_engine_stops_at_the_first_step_that_reaches_the_moment():
    engine = virtual_engine(SECOND)
    engine.add([1], SamplingParams(max_tokens=10), arrival=0.0)
    run_until(engine, 2.5)
    assert engine.clock.now() == 3.0


def test_disaggregation_joins_the_halves_and_counts_the_transfer():
    cost = replace(SECOND, overhead_s=0.0, flops_per_s=1e9)
    prefill = [virtual_engine(cost, max_step_tokens=8192)]
    decode = [virtual_engine(cost, prompts_received=True, max_step_tokens=8192)]
    items = [WorkItem(0.0, list(range(100)), 5), WorkItem(50.0, list(range(200, 260)), 1)]
    first, second = serve_disaggregated(prefill, decode, items, transfer_bytes_per_s=100 * TOKEN_BYTES / 3.0)
    assert first.output_tokens == 5 and second.output_tokens == 1 and first.finish_reason == "length"
    assert first.token_times[1] - first.token_times[0] == pytest.approx(3.0, abs=0.01), "a hundred tokens took 3 s"
    computed = sum(step.duration for step in decode[0].records.steps)
    assert computed == pytest.approx(4 * cost.seconds(StepShape.decode([103])), rel=0.02), "no prompt is computed twice"


def test_a_received_prompt_is_computed_once_it_was_lost():
    cost = replace(SECOND, overhead_s=0.0, flops_per_s=1e9)
    seconds = {}
    for blocks in (100, 20):
        engine = virtual_engine(cost, prompts_received=True, kv_memory=blocks * 16 * TOKEN_BYTES,
                                max_step_tokens=8192, prefix_cache=False)
        play(engine, [WorkItem(0.0, list(range(i * 1000, i * 1000 + 100)), 90) for i in range(2)])
        seconds[blocks], preempted = engine.clock.now(), engine.records.totals["preempted"]
    assert preempted and seconds[20] > seconds[100] + 0.5 * cost.seconds(StepShape.of([(0, 100, True)]))


def test_prefill_elsewhere_leaves_decoding_undisturbed():
    items = [WorkItem(0.15 * i, list(range(i * 5000, i * 5000 + 2000)), 100) for i in range(24)]
    settings = {"kv_memory": 60 * 10**9, "max_step_tokens": 8192, "max_batch": 64}
    together = serve([virtual_engine(A100, **settings) for _ in range(2)], items)
    apart = serve_disaggregated([virtual_engine(A100, **settings)],
                                [virtual_engine(A100, prompts_received=True, **settings)], items, 50e9)
    slowest = [metrics.latencies(records)["itl_per_step_s"]["p99"] for records in (together, apart)]
    assert slowest[1] < slowest[0] / 2


# -- the worked example ---------------------------------------------------------------------------


def test_the_worked_example_in_rows():
    rows = worked_example_rows(Service(), scale=0.05, requests=512, clients=300)
    static, crowded, paged, eight_bit = rows
    assert (static["clients"], crowded["clients"]) == (8, 300) and crowded["ttft_p50_s"] > 10 * static["ttft_p50_s"]
    assert (static["fit_at_once"], paged["fit_at_once"]) == (111, 111) and eight_bit["fit_at_once"] in (219, 220)
    assert static["mean_rows"] <= 8 < paged["mean_rows"] and static["times_first"] == 1.0
    for better, worse in ((paged, static), (eight_bit, paged)):
        assert better["tokens_per_s"] >= worse["tokens_per_s"]
    for row in rows:
        assert row["cost_per_million_output_tokens"] * row["tokens_per_s"] == pytest.approx(2.9 / 3600 * 1e6)


def test_received_prompts_leave_the_worked_example_to_decoding():
    loads = {"scale": 0.1, "requests": 64}
    computed, received = (worked_example_rows(Service(prompts_received=given), **loads) for given in (False, True))
    assert received[2]["tokens_per_s"] > 1.5 * computed[2]["tokens_per_s"]
    with pytest.raises(ValueError, match="unknown device 'cpu'; known: a100-80gb"):
        Service(device="cpu")
