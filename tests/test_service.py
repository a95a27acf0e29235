"""The service chapters' experiments and pictures: right by hand where a hand can, equal to the metrics elsewhere."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from tiny import tiny_config, tiny_model

from minillm.course import diagnose
from minillm.course.experiments import service
from minillm.course.show import names, service_plots
from minillm.load.config import ModelConfig
from minillm.measure import fleet, metrics
from minillm.measure.roofline import Ceilings, StepWork, least_work, read_numbers
from minillm.measure.virtual import CostModel, shape_of, virtual_engine
from minillm.measure.workload import WorkItem

VOCABULARY = 10_000  # random prompts draw ids below this
LIMITS = Ceilings(bytes_per_s=1e15, flops_per_s=1e15)  # no tiny step comes near


@pytest.fixture(scope="module")
def model():
    return tiny_model(vocab_size=VOCABULARY)


def title_of(figure) -> str:
    return figure.get_suptitle().replace("\n", " ")


# --- 00: the machine --------------------------------------------------------------------------------------------


def test_a_step_is_bound_by_the_limit_that_takes_longer():
    limits = Ceilings(bytes_per_s=10.0, flops_per_s=100.0)
    assert service.bound_by(limits, StepWork(bytes=20.0, flops=100.0)) == "reading"
    assert service.bound_by(limits, StepWork(bytes=5.0, flops=100.0)) == "multiplying"


def test_roofline_steps_know_their_work_and_their_shares(model):
    found = service.roofline_steps(model, "tiny", LIMITS, rows=(1, 4), prompts=(16,), context=16, steps=6)
    one, four, prefill = found.rows
    assert [row["tokens"] for row in found.rows] == [1, 4, 16]
    assert four["gflop"] == pytest.approx(4 * one["gflop"]) and prefill["gflop"] > one["gflop"]
    assert four["flop_per_byte"] > 3 * one["flop_per_byte"]
    for row in found.rows:
        seconds = row["step_ms"] / 1e3
        assert row["mbu"] == pytest.approx(row["read_mb"] * 1e6 / seconds / 1e15)
        assert row["mfu"] == pytest.approx(row["gflop"] * 1e9 / seconds / 1e15)
        assert row["least_ms"] < row["step_ms"] and row["tokens_per_s"] == pytest.approx(row["tokens"] / seconds)
    found.check()


def test_a_narrow_model_has_as_many_layers_and_heads_and_fewer_weights():
    config = ModelConfig.preset("smollm2-135m")
    narrow = service.narrowed(config, 4)
    assert (narrow.num_hidden_layers, narrow.num_attention_heads, narrow.num_key_value_heads) == (30, 9, 3)
    assert read_numbers(narrow) < read_numbers(config) / 15
    with pytest.raises(ValueError, match="576, 1536, 64 by 5"):
        service.narrowed(config, 5)


def test_mbu_falls_with_the_width(model):
    wide = replace(model.config, hidden_size=256, intermediate_size=512, head_dim=32)
    rows = service.mbu_by_width(tiny_model(**narrowable(wide)), "tiny", LIMITS, divisors=(1, 8)).rows
    assert rows[0]["read_mb"] > 20 * rows[1]["read_mb"] and rows[0]["mbu"] > rows[1]["mbu"]


def narrowable(config: ModelConfig) -> dict:
    return {name: getattr(config, name) for name in ("hidden_size", "intermediate_size", "head_dim", "vocab_size")}


def test_the_roofline_states_the_shares_of_its_ends():
    limits = Ceilings(bytes_per_s=1e9, flops_per_s=1e10)
    shared = {"gflop_per_s": 1.0, "kind": "decode"}
    rows = [{"tokens": 1, "flop_per_byte": 0.5, "mbu": 0.5, "mfu": 0.025, **shared},
            {**shared, "tokens": 64, "flop_per_byte": 30.0, "mbu": 0.1, "mfu": 0.7, "kind": "prefill"}]
    expected = ("One decoded token uses 50% of the bandwidth and 2.5% of the matmul rate; "
                "prefill of 64 tokens 10% and 70%")
    assert title_of(service_plots.roofline(rows, limits)) == expected


# --- 07 and 08: gauges, and what fits ---------------------------------------------------------------------------

LLAMA = ModelConfig.preset("llama-3-8b")
SECOND = CostModel(tiny_config(max_position_embeddings=8192), "bf16", 0, 1e30, 1e30, 1e30, overhead_s=1.0)


def items(*arrivals: float, tokens: int = 3) -> list[WorkItem]:
    return [WorkItem(arrival, [1, 2, 3, int(arrival)], tokens) for arrival in arrivals]


def test_utilisation_counts_the_time_between_requests_as_idle():
    engine = virtual_engine(SECOND)
    service.serve_bounded([engine], items(0.0, 9.0))
    limits = Ceilings(bytes_per_s=1e6, flops_per_s=1e6)
    found = service.utilisation(engine.records, SECOND.config, "bf16", 0.0, limits)
    assert found["busy_share"] == pytest.approx(6 / 12) and found["mean_rows"] == 1.0
    works = [least_work(SECOND.config, "bf16", shape_of(step), 0.0) for step in engine.records.steps]
    assert found["mfu"] == pytest.approx(sum(work.flops for work in works) / 12 / 1e6)
    assert found["mbu"] == pytest.approx(sum(work.bytes for work in works) / 12 / 1e6)
    assert found["tokens_per_s"] == pytest.approx(6 / 12)


def test_a_bounded_queue_refuses_whoever_finds_it_full():
    engine = virtual_engine(SECOND, max_batch=1)
    refused = service.serve_bounded([engine], items(0.0, 0.5, 0.6, 0.7, 5.5, tokens=4), most_waiting=2)
    assert refused == [3], "one runs, two wait, the fourth finds two waiting; the fifth comes when one has gone"
    assert sorted(record.request_id for record in engine.records.requests) == [0, 1, 2, 4]


@pytest.mark.parametrize(("kv_format", "number"), [("bf16", 111), ("int8", 220)])
def test_the_scheduler_runs_as_many_at_once_as_the_sum_says(kv_format, number):
    records = service.fill(LLAMA, kv_format, 60 * 10**9, "slots", answer=1)
    assert records.peaks["rows"] == number


def test_gauges_under_load_are_those_of_the_records():
    found = service.under_load(SECOND, items(0.0, 0.5, 0.6, 0.7), most_waiting=2, max_batch=1)
    assert found["refused"] == 1 and found["refused_share"] == 1 / 4
    ttft = metrics.latencies(found["records"].requests)["ttft_s"]
    assert (found["ttft_p50_s"], found["ttft_p99_s"]) == (ttft["p50"], ttft["p99"])
    assert found["itl_p50_ms"] == pytest.approx(1000)


def test_chats_fit_their_context():
    assert all(len(item.prompt_ids) + item.max_tokens <= 8192 for item in service.chats(50, 1.0))


# --- 07: who is present, and what a load test sees --------------------------------------------------------------


def test_littles_law_by_hand():
    lives = [(0.0, 4.0), (1.0, 2.0), (2.0, 8.0)]
    assert service.number_present(lives) == [(0.0, 1), (1.0, 2), (2.0, 2), (4.0, 1), (8.0, 0)]
    law = service.littles_law(lives)
    assert law == {"mean_present": 11 / 8, "rate_per_s": 3 / 8, "mean_stay_s": 11 / 3}


@pytest.mark.parametrize("where", ["system", "queue", "service"])
def test_littles_law_holds_in_records(where):
    engine = virtual_engine(SECOND, max_batch=2)
    service.serve_bounded([engine], items(0.0, 0.5, 3.7, 3.9, 8.1, tokens=5))
    law = service.littles_law(service.lives(engine.records, where))
    assert law["mean_present"] == pytest.approx(law["rate_per_s"] * law["mean_stay_s"], rel=1e-12)
    with pytest.raises(ValueError, match="system, queue, service"):
        service.lives(engine.records, "kitchen")


def test_arrivals_are_stretched_to_a_rate():
    stretched = service.at_rate(items(0.0, 1.0, 2.0, 8.0), per_s=1.5)
    assert [item.arrival for item in stretched] == pytest.approx([0.0, 0.25, 0.5, 2.0])


def test_the_closed_loop_does_not_see_the_long_prompt():
    runs = service.one_long_prompt(CostModel.of_device("a100-80gb", LLAMA), requests=30, clients=4)
    closed, opened = (
        metrics.latencies([r for r in records.requests if r.prompt_tokens < 60_000])["ttft_s"]
        for records in runs.values())
    assert closed["n"] == opened["n"] and opened["p90"] > closed["p90"]


def test_open_and_closed_serve_everybody_in_every_loop(model):
    asked = items(0.0, 0.1, 0.2, 0.3, tokens=2)
    runs = service.open_and_closed(model, asked, clients=2, loads=(0.5,))
    assert [len(records.requests) for records in runs.values()] == [4, 4]
    assert next(iter(runs)) == "closed, 2 clients" and max(s.rows for s in next(iter(runs.values())).steps) == 2


# --- 09, 10: pools, and the example here ------------------------------------------------------------------------


def test_pools_keep_people_and_jobs_apart():
    asked = service.two_kinds(interactive=3, per_s=2.0, jobs=2, prompt=4, answer=2, job_prompt=8, job_answer=3)
    assert [service.is_job(item) for item in asked] == [False] * 3 + [True] * 2
    engines = [virtual_engine(SECOND) for _ in range(3)]
    fleet.serve(engines, asked, service.pools(1))
    assert len(engines[0].records.requests) == 3 and sum(len(e.records.requests) for e in engines[1:]) == 2


def test_more_rows_make_more_tokens_per_second():
    few, many = service.batch_limits(SECOND, (1, 4), items(0.0, 0.0, 0.0, 0.0), clients=4, kv_memory=10**6)
    assert many["tokens_per_s"] > 2 * few["tokens_per_s"] and (few["mean_rows"], many["mean_rows"]) == (1.0, 4.0)


def test_the_example_here_lets_as_many_clients_in_as_fit(model):
    found = service.worked_example_here(model, "tiny", requests=8, context=32, answer=8, static_batch=2, fit=4)
    assert [row["clients"] for row in found.rows] == [4, 4, 8]
    assert [row["mean_rows"] for row in found.rows] == pytest.approx([2, 4, 8], rel=0.2)
    for row in found.rows:
        assert row["cost_per_million_output_tokens"] == pytest.approx(0.1 / 3600 / row["tokens_per_s"] * 1e6)


# --- 11: diagnose -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", diagnose.CASES)
def test_each_case_yields_to_its_cure_and_not_to_the_tempting_one(name):
    case = diagnose.CASES[name]
    assert diagnose.diagnose(name, case.cure, requests=30).times_better >= 1.2
    assert diagnose.diagnose(name, case.tempting, requests=30).times_better < 1.2


def test_unknown_cases_and_cures_are_refused():
    with pytest.raises(ValueError, match=r"unknown case 'fever'; known: slow start"):
        diagnose.diagnose("fever")
    with pytest.raises(ValueError, match=r"unknown cure 'rest'; known: cache prompts"):
        diagnose.diagnose("crowd", "rest")


def test_without_a_cure_nothing_is_compared():
    found = diagnose.diagnose("alone and slow", requests=20)
    assert found.times_better == 1 and list(found.records) == ["before"]


# --- pictures ---------------------------------------------------------------------------------------------------


def test_pictures_of_a_run_state_what_its_records_say():
    engine = virtual_engine(SECOND, max_batch=1)
    service.serve_bounded([engine], items(0.0, 0.5, 1.0))
    lives, run = title_of(service_plots.request_lives(engine.records)), {"all": engine.records}
    queue = metrics.latencies(engine.records.requests)["queue_s"]["max"]
    assert f"the longest wait {queue:.2g} s" in lives
    assert "1.0 rows on average, up to 2 waiting" in title_of(service_plots.over_time(run))
    law = service.littles_law(service.lives(engine.records))
    assert f"{law['mean_present']:.3g} are present on average" in title_of(service_plots.presence(engine.records))
    ttft = metrics.latencies(engine.records.requests)["ttft_s"]
    asked = {"all": engine.records.requests}
    assert f"all: {ttft['p50']:.2g} and {ttft['p90']:.2g} s" in title_of(service_plots.latency_distributions(asked))


def steps_at(*spans: tuple[float, float, int]) -> list[SimpleNamespace]:
    return [SimpleNamespace(start=start, duration=end - start, rows=rows) for start, end, rows in spans]


@pytest.mark.parametrize(
    ("spans", "moments", "heights"),
    [
        ([(0, 1, 3), (1, 2, 4)], [0, 1, 2], [3, 4, 0]),
        ([(0, 1, 3), (1.1, 2, 4)], [0, 1.1, 2], [3, 4, 0]),  # the engine's own work between two steps
        ([(0, 1, 3), (9, 10, 4)], [0, 1, 9, 10], [3, 0, 4, 0]),  # nothing ran for eight seconds
        ([(0, 4, 1), (1, 2, 5), (3, 6, 2)], [0, 1, 2, 3, 4, 6], [1, 5, 1, 2, 2, 0]),  # several GPUs
    ],
)
def test_between_two_steps_nothing_is_drawn(spans, moments, heights):
    assert service_plots.over_moments(steps_at(*spans), lambda step: step.rows) == (moments, heights)


def test_shares_are_those_of_the_percentile():
    values = [5.0, 1.0, 3.0, 2.0]
    ordered, shares = service_plots.shares(values)
    assert all(metrics.percentile(values, round(100 * share)) == value
               for value, share in zip(ordered, shares, strict=True))


def test_every_name_of_the_appendix_is_there():
    assert all(names.resolve(name.here) is not None for name in names.NAMES)
    for gone in ("Engine.max_rows", "minillm.ladder.paged.Nothing", "nowhere.at.all"):
        with pytest.raises(LookupError):
            names.resolve(gone)
    assert names.names_table(3).count("\n") == 1 + sum(name.chapter == 3 for name in names.NAMES)
