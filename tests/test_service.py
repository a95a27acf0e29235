"""The service chapters' experiments and pictures: equal to figures calculated here, or to the metrics."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from tiny import tiny_config, tiny_model

from minillm.course import diagnose
from minillm.course.experiments import drafts, example, service
from minillm.course.experiments.limits import gauges
from minillm.course.figures import service_row
from minillm.course.ledger import LEDGER, judged
from minillm.course.setting import Setting
from minillm.course.show import names, service_plots
from minillm.course.verdicts.service import WATCHED
from minillm.fast.engine import Engine
from minillm.load.config import ModelConfig
from minillm.measure import fleet, metrics
from minillm.measure.measurement import Measurement, MeasurementError, Provenance
from minillm.measure.roofline import Ceilings, least_work, shape_of
from minillm.measure.service import Service
from minillm.measure.virtual import CostModel, virtual_engine
from minillm.measure.workload import WorkItem, play

VOCABULARY = 10_000  # random prompts draw ids below this
LIMITS = Ceilings(bytes_per_s=1e15, flops_per_s=1e15)  # no tiny step comes near


@pytest.fixture(scope="module")
def model():
    return tiny_model(vocab_size=VOCABULARY)


def title_of(figure) -> str:
    return figure.get_suptitle().replace("\n", " ")


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


def test_gauges_count_the_time_between_requests_as_idle():
    engine = virtual_engine(SECOND)
    fleet.serve([engine], items(0.0, 9.0))
    limits = Ceilings(bytes_per_s=1e6, flops_per_s=1e6)
    found = gauges(engine.records, SECOND.config, "bf16", 0.0, limits)
    assert found["busy_share"] == pytest.approx(6 / 12) and found["mean_rows"] == 1.0
    works = [least_work(SECOND.config, "bf16", shape_of(step), 0.0) for step in engine.records.steps]
    assert found["mfu"] == pytest.approx(sum(work.flops for work in works) / 12 / 1e6)
    assert found["mbu"] == pytest.approx(sum(work.bytes for work in works) / 12 / 1e6)
    assert found["tokens_per_s"] == pytest.approx(6 / 12)


def test_a_bounded_queue_refuses_whoever_finds_it_full():
    engine = virtual_engine(SECOND, max_batch=1)
    requests = fleet.serve([engine], items(0.0, 0.5, 0.6, 0.7, 5.5, tokens=4), max_waiting=2)
    assert requests[3] is None, "one runs, two wait, the fourth finds two waiting; the fifth comes when one has gone"
    assert sorted(record.request_id for record in engine.records.requests) == [0, 1, 2, 4]


@pytest.mark.parametrize(("kv_format", "number"), [("bf16", 111), ("int8", 220)])
def test_the_scheduler_runs_as_many_at_once_as_the_sum_says(kv_format, number):
    records = service.fill(LLAMA, kv_format, 60 * 10**9, "slots", answer=1)
    assert records.peaks["rows"] == number


def test_gauges_under_load_are_those_of_the_records():
    found = service.under_load(Service(SECOND, max_waiting=2, max_batch=1), items(0.0, 0.5, 0.6, 0.7))
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
    fleet.serve([engine], items(0.0, 0.5, 3.7, 3.9, 8.1, tokens=5))
    law = service.littles_law(service.lives(engine.records, where))
    assert law["mean_present"] == pytest.approx(law["rate_per_s"] * law["mean_stay_s"], rel=1e-12)
    with pytest.raises(ValueError, match="system, queue, service"):
        service.lives(engine.records, "kitchen")


def test_arrivals_are_stretched_to_a_rate():
    stretched = service.at_rate(items(0.0, 1.0, 2.0, 8.0), per_s=1.5)
    assert [item.arrival for item in stretched] == pytest.approx([0.0, 0.25, 0.5, 2.0])


def test_the_closed_loop_does_not_see_the_long_prompt():
    runs = service.one_long_prompt(requests=30, clients=4)
    closed, opened = (
        metrics.latencies([r for r in records.requests if r.prompt_tokens < 60_000])["ttft_s"]
        for records in runs.values())
    assert closed["n"] == opened["n"] and opened["p90"] > closed["p90"]


def test_open_and_closed_serve_everybody_in_every_loop(model):
    def serve(items, clients):
        engine = Engine(model, max_batch=2)
        play(engine, items, clients)
        return engine.records

    runs = service.open_and_closed(serve, items(0.0, 0.1, 0.2, 0.3, tokens=2), clients=2, loads=(0.5,))
    assert [len(records.requests) for records in runs.values()] == [4, 4]
    assert next(iter(runs)) == "closed, 2 clients" and max(s.rows for s in next(iter(runs.values())).steps) == 2


# --- 09, 10: pools, and the example here ------------------------------------------------------------------------


def test_pools_keep_people_and_jobs_apart():
    people, jobs = service.two_kinds(interactive=3, per_s=2.0, jobs=2, prompt=4, answer=2, job_prompt=8, job_answer=3)
    one = Service(SECOND)
    layouts = {"mixed": [[one] * 3], "apart": [[one], [one] * 2]}
    (_, *mixed, _), (_, *apart, records) = service.in_pools(layouts, people, jobs)
    for answered, done in (mixed, apart):
        assert [record.prompt_tokens for record in (*answered, *done)] == [4] * 3 + [8] * 2
    assert max(step.rows for step in records.steps if step.start == 0) == 1, "each job has a GPU of its own"


def test_more_rows_make_more_tokens_per_second():
    few, many = (
        service_row(Service(SECOND, kv_memory=10**6, max_batch=most).serve(items(0.0, 0.0, 0.0, 0.0), clients=4),
                    "tokens_per_s", "mean_rows") for most in (1, 4)
    )
    assert many["tokens_per_s"] > 2 * few["tokens_per_s"] and (few["mean_rows"], many["mean_rows"]) == (1.0, 4.0)


def test_the_example_here_lets_as_many_clients_in_as_fit(model):
    found = example.three_setups(model, "tiny", requests=8, context=32, answer=8, static_batch=2, fit=4)
    assert [row["clients"] for row in found.rows] == [4, 4, 8]
    assert [row["mean_rows"] for row in found.rows] == pytest.approx([2, 4, 8], rel=0.2)
    for row in found.rows:
        assert row["cost_per_million_output_tokens"] == pytest.approx(0.1 / 3600 / row["tokens_per_s"] * 1e6)


# --- 07: figures counted a second time ----------------------------------------------------------------------------


def watched(**changes) -> tuple[list[dict], object]:
    """Rows of `watch` for a small service, and its records."""
    limits = {"kv_memory": 10**6, "max_batch": 8, **changes}
    asked = [WorkItem(0.3 * n, [n] * (5 + n % 7), 3 + n % 11) for n in range(60)]
    records, counted = service.counted_by_others(Service(SECOND, **limits), asked)
    return records, counted


@pytest.mark.parametrize("changes", [{}, {"chunked_prefill": True, "max_step_tokens": 16}, {"kv": "slots"},
                                     {"kv_memory": 40 * 16 * 128}])
def test_every_watched_figure_is_what_others_count_in_the_same_run(changes):
    records, counted = watched(**changes)
    found = metrics.summary(records)
    told = {
        "ttft_p50_s": found["ttft_s"]["p50"], "ttft_p99_s": found["ttft_s"]["p99"],
        "itl_p50_ms": found["itl_per_step_s"]["p50"] * 1e3, "itl_p99_ms": found["itl_per_step_s"]["p99"] * 1e3,
        "tokens_per_s": found["output_tokens_per_s"], "queue_depth_peak": found["queue_depth"]["peak"],
        "queue_wait_p99_s": found["queue_s"]["p99"], "preemptions": found["preemptions"],
        "achieved_batch_steps_kept": found["steps"], "kv_occupancy_peak_share": found["kv"]["peak_share"],
    }
    assert {name: counted[name] for name in told} == pytest.approx(told, rel=0.01)
    if not found["preemptions"]:  # a preempted request is away for some steps
        assert counted["achieved_batch_mean_rows"] == pytest.approx(found["batch"]["mean_rows"], rel=0.01)


def test_a_record_that_is_wrong_disagrees_with_the_count():
    records, counted = watched()
    for record in records.requests:
        record.token_times = [moment + 1.0 for moment in record.token_times]
    assert metrics.summary(records)["ttft_s"]["p50"] > 1.01 * counted["ttft_p50_s"]


def test_the_recorded_watch_is_counted_within_a_hundredth():
    rows = service.watch(Setting(quick=True)).rows
    assert {row["metric"] for row in rows} >= set(WATCHED)
    for row in rows:
        assert row["value"] == pytest.approx(row["counted"], rel=0.01), row["metric"]


# --- 10: the worked example ---------------------------------------------------------------------------------------


def test_answers_that_vary_leave_every_context_full():
    items = example.example_items(200, 4096, 300, seed=3, vary=0.1)
    answers = [item.max_tokens for item in items]
    assert all(len(item.prompt_ids) + item.max_tokens == 4096 for item in items)
    assert min(answers) >= 270 and max(answers) <= 330 and len(set(answers)) > 40
    assert example.example_items(2, 64, 8)[0].max_tokens == 8 and answers != [
        item.max_tokens for item in example.example_items(200, 4096, 300, seed=4, vary=0.1)]


def test_the_articles_static_batch_has_eight_at_once_and_the_crowd_stands_beside_it():
    rows = {row["setup"]: row for row in example.worked_example(Setting(quick=True)).rows}
    own, crowd = rows["static batch of 8"], rows[example.CROWDED]
    assert (own["clients"], crowd["clients"]) == (8, 111) and own["peak_rows"] == crowd["peak_rows"] == 8
    assert own["tokens_per_s"] == pytest.approx(crowd["tokens_per_s"], rel=0.05), "the same eight rows"
    assert crowd["ttft_p50_s"] > 10 * own["ttft_p50_s"], "of the crowd most wait"
    for row in rows.values():
        assert row["busy_share"] > 0.99 and 0 < row["arithmetic_share"] < row["bandwidth_share"] < 1


# --- 11: diagnose -----------------------------------------------------------------------------------------------


def speculations(root, date: str = "2026-01-02", **changes) -> None:
    """A recorded `speculation` in which half of the steps have drafts, of which the first is right in half of them."""
    row = {"part": "real", "prompts": "chat", "drafts": "n-gram", "k": 4, "batch": 1, "acceptance": 0.2,
           "tokens_per_round": 2.0, "tokens_per_step": 1.5, "speedup": 0.75, "predicted": 1.0,
           "tried_by_place": [20, 10, 0, 0], "right_by_place": [10, 5, 0, 0], **changes}
    source = Provenance(f"device of {date}", "1", "2", "fp32", "m", "abc", date, 0, 1, 3)
    Measurement("speculation", source, [row, {**row, "batch": 8, "speedup": 0.5}]).save(root)


def test_drafts_are_worth_what_the_newest_record_says(tmp_path):
    speculations(tmp_path, "2026-01-01", acceptance=0.9)
    speculations(tmp_path)
    found = drafts.recorded_drafts("chat", "n-gram", tmp_path)
    assert found.source == "device of 2026-01-02"
    one, eight = found.worth
    assert (one.found, one.right, one.acceptance) == (0.5, (0.5, 0.5, 0.0, 0.0), 0.2)
    assert one.cost == pytest.approx(1.5 / 0.75 - 1.5) and eight.cost == pytest.approx(1.5 / 0.5 - 1.5)
    assert [found.at(rows).rows for rows in (1, 7, 8, 200)] == [1, 1, 8, 8]
    for missing, message in ((tmp_path / "none", "no speculation is recorded"), (tmp_path, "no drafts by drafter")):
        with pytest.raises(MeasurementError, match=message):
            drafts.recorded_drafts("chat", "drafter", missing)


def test_a_service_that_drafts_gains_what_is_right_and_pays_for_proposing(tmp_path):
    """A step takes 1 s; half of the steps have drafts, 0.75 tokens of each are right: 1.375 tokens a step."""
    def speed(**changes) -> float:
        speculations(tmp_path, **changes)
        recorded = drafts.recorded_drafts("chat", "n-gram", tmp_path)
        drafting = drafts.DraftingService(SECOND, acceptance=1.0, recorded=recorded)
        served = drafting.serve(items(0.0, tokens=4000), clients=1)
        return served.summary["output_tokens_per_s"]

    plain = Service(SECOND).serve(items(0.0, tokens=4000), clients=1).summary["output_tokens_per_s"]
    free = speed(speedup=1.0)
    assert free / plain == pytest.approx(1 + 0.5 * 0.75, rel=0.05)
    assert speed() / free == pytest.approx(1 / 1.5, rel=0.05), "proposing takes half a plain step"


def test_a_cure_that_does_not_cure_is_told_so():
    told = {times: service.effect(times) for times in (2.0, 1.2, 1.19, 1.0, 0.9)}
    assert list(told.values()) == ["cures", "cures", "helps little", "does nothing", "makes it worse"]
    rows = service.cures(Setting(quick=True)).rows
    drafted = [row for row in rows if "drafts" in row["cure"]]
    assert len(drafted) == 3 and all(0 < row["acceptance"] < 1 and row["right_by_place"] for row in drafted)
    assert all(row["effect"] == service.effect(row["times_better"]) for row in rows)
    found = judged(next(claim for claim in LEDGER if claim.id == "F6"), rows)
    lost = [row for row in drafted if row["times_better_min"] <= 1]
    assert found.measured.count("no cure beyond the noise") == len(lost)


@pytest.mark.parametrize("name", diagnose.CASES)
def test_each_case_yields_to_its_cure_and_not_to_the_tempting_one(name):
    case = diagnose.CASES[name]
    (before, cured, tempted), _ = diagnose.diagnose(name, [case.cure, case.tempting], requests=30)
    assert before["times_better"] == 1 and cured["times_better"] >= 1.2 and tempted["times_better"] < 1.2


def test_unknown_cases_and_cures_are_refused():
    with pytest.raises(ValueError, match=r"unknown case 'fever'; known: slow start"):
        diagnose.diagnose("fever")
    with pytest.raises(ValueError, match=r"unknown cure 'rest'; known: cache prompts"):
        diagnose.diagnose("crowd", ["rest"])


def test_a_cure_is_a_service_that_can_be_asked_for_its_limit():
    assert {name: service.max_batch for name, service in diagnose.services("crowd", ["a larger batch"]).items()} == {
        "before": 8, "a larger batch": 256}
    (before, tempted), _ = diagnose.diagnose("crowd", ["8-bit keys and values"], requests=20)
    assert (before["effect"], tempted["effect"]) == ("does nothing", service.effect(tempted["times_better"]))


def test_without_a_cure_nothing_is_compared():
    rows, records = diagnose.diagnose("alone and slow", requests=20)
    assert [row["times_better"] for row in rows] == [1] and list(records) == ["before"]


# --- pictures ---------------------------------------------------------------------------------------------------


def test_pictures_of_a_run_state_what_its_records_say():
    engine = virtual_engine(SECOND, max_batch=1)
    fleet.serve([engine], items(0.0, 0.5, 1.0))
    lives, run = title_of(service_plots.request_lives(engine.records)), {"all": engine.records}
    queue = metrics.latencies(engine.records.requests)["queue_s"]["max"]
    assert f"the longest wait {queue:.2g} s" in lives
    assert "1.0 rows on average, up to 2 waiting" in title_of(service_plots.over_time(run))
    law = service.littles_law(service.lives(engine.records))
    assert f"{law['mean_present']:.3g} are present on average" in title_of(service_plots.presence(engine.records))
    ttft = metrics.latencies(engine.records.requests)["ttft_s"]
    asked = {"all": engine.records.requests}
    assert f"all: {ttft['p50']:.2g} and {ttft['p90']:.2g} s" in title_of(service_plots.latency_distributions(asked))


def test_a_picture_of_a_run_has_a_line_at_its_limit_and_no_axis_for_a_queue_that_never_is():
    def axes(limit: int, **settings):
        engine = virtual_engine(SECOND, max_batch=limit, **settings)
        fleet.serve([engine], items(0.0, 0.1, 0.2, 0.3))
        figure = service_plots.over_time({"run": engine.records}, limits={"run": limit})
        return {ax.get_ylabel(): ax for ax in figure.axes}

    queued, free = axes(2), axes(64)
    assert [line.get_ydata()[0] for line in queued["rows in a step"].lines] == [2]
    assert "waiting" in queued and "waiting" not in free and set(free) < set(queued)
    assert not free["rows in a step"].lines
    assert "max_batch 64, far above" in {text.get_text() for text in free["rows in a step"].texts}


def test_runs_side_by_side_have_one_time_axis():
    """The longer run's; and labels of a frontier stay inside its axes."""
    short, long = (Service(SECOND).serve(items(*moments)).records for moments in ((0.0,), (0.0, 9.0)))
    axes = service_plots.over_time({"short": short, "long": long}).axes
    assert len({ax.get_xlim() for ax in axes}) == 1 and axes[0].get_xlim()[1] >= long.ended - long.began
    found = ((1, 90, 4), (64, 1400, 16), (256, 2000, 51))
    rows = [{"clients": clients, "speed": speed, "wait": wait} for clients, speed, wait in found]
    figure = service_plots.frontier(rows, "clients", "speed", "wait", "title", xlabel="tokens/s", ylabel="s")
    figure.draw_without_rendering()
    box = figure.axes[0].get_window_extent()
    for text in figure.axes[0].texts:
        at = text.get_window_extent()
        assert box.x0 <= at.x0 and at.x1 <= box.x1 and box.y0 <= at.y0 and at.y1 <= box.y1, text.get_text()


def test_gaps_are_drawn_where_they_say_something():
    records = Service(SECOND).serve(items(0.0, 0.5, 1.0)).records
    both, first = (service_plots.latency_distributions({"all": records.requests}, gaps) for gaps in (True, False))
    assert [ax.get_xlabel()[:13] for ax in both.axes] == ["time to first", "time between "]
    assert [ax.get_xlabel()[:13] for ax in first.axes] == ["time to first"]


@pytest.mark.parametrize(("most", "top"), [(0.004, 0.0048), (0.014, 0.0168), (0.15, 1), (0.97, 1), (0.0, 1)])
def test_a_cache_of_which_little_is_held_has_an_axis_of_its_own(most, top):
    assert service_plots.top_of_axis(service_plots.cache_share, most) == pytest.approx(top)
    assert service_plots.top_of_axis(service_plots.useful_rows, 40) == pytest.approx(43.2)


def test_of_several_gpus_the_picture_says_that_the_fullest_is_drawn():
    one, two = (Service(SECOND, replicas=number).serve(items(0.0, 0.1, 0.2)).records for number in (1, 2))
    titles = [ax.get_title(loc="left") for ax in service_plots.over_time({"one": one, "two": two}).axes]
    assert titles[:2] == ["one", "two, of several GPUs the fullest"]


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
    assert names.names_table().count("\n") == 1 + len(names.NAMES)
