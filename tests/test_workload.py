"""Workloads: the numbers that others report on, seeds, the two loops, and lengths as asked for."""

import hashlib
import time

import numpy as np
import pytest
from fakes import fake_engine
from tiny import tiny_config

from minillm.fast.engine import Engine
from minillm.measure import metrics
from minillm.measure.virtual import VirtualClock
from minillm.measure.workload import WORKLOADS, WorkItem, articles_static, at_quantiles, make_workload, play


class OneSecondSteps:
    """Every step takes a second and gives each due row the next number."""

    def __init__(self, clock):
        self.clock, self.config, self.token = clock, tiny_config(vocab_size=1 << 40), 1 << 20

    def run(self, plan):
        self.clock.advance(1.0)
        self.token += len(plan.rows)
        return [[self.token + i] for i in range(sum(row.samples for row in plan.rows))]


def engine_on_a_virtual_clock(**settings):
    clock = VirtualClock()
    return Engine(None, executor=OneSecondSteps(clock), clock=clock, **settings)


def fingerprint(items):
    return hashlib.sha256(repr([(i.prompt_ids, i.max_tokens) for i in items]).encode()).hexdigest()[:16]


def test_yardstick_is_the_published_one():
    items = make_workload("yardstick")
    assert len(items) == 256 and sum(item.output_tokens for item in items) == 133_966
    assert len(items[0].prompt_ids) == 964 and items[0].prompt_ids[:4] == [6_311, 6_890, 663, 4_242]


def test_peers_are_the_requests_that_the_other_engines_were_given():
    items = make_workload("peers")
    assert sum(item.output_tokens for item in items) == 612
    assert [len(item.prompt_ids) for item in items[:6]] == [84, 66, 56, 37, 40, 19]
    assert [item.max_tokens for item in items[:6]] == [4, 19, 7, 12, 14, 18]
    assert items[0].prompt_ids[:4] == [20_730, 23_811, 35_225, 43_586]
    assert fingerprint(items) == "d673e1a1e16478a2", "of all ids and lengths that the other engines' script draws"


def test_unknown_names_are_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="unknown workload 'chatt'; known: yardstick, peers, chat, code"):
        make_workload("chatt")


@pytest.mark.parametrize("name", sorted(set(WORKLOADS) - {"trace"}))
def test_every_workload_is_repeatable_and_can_be_shrunk(name):
    settings = {"cv": 1.0} if name == "lognormal" else {}
    items, again = make_workload(name, **settings), make_workload(name, **settings)
    small = make_workload(name, scale=0.1, **settings)
    assert items == again and len(small) == len(items)
    if name != "articles-static":
        assert make_workload(name, requests=3, **settings) != make_workload(name, requests=3, seed=1, **settings)
    for item, shrunk in zip(items, small, strict=True):
        assert item.arrival == shrunk.arrival and 1 <= item.output_tokens <= item.max_tokens
        assert len(shrunk.prompt_ids) == pytest.approx(len(item.prompt_ids) / 10, abs=2.6)
        assert shrunk.output_tokens == pytest.approx(item.output_tokens / 10, abs=1)


def test_chat_has_the_trace_s_lengths_and_poisson_arrivals():
    items = make_workload("chat", requests=4000, scale=1.0)
    gaps = np.diff([item.arrival for item in items])
    answers = [item.output_tokens for item in items]
    assert np.mean(gaps) == pytest.approx(1 / 5.53, rel=0.05)
    assert np.std(gaps) / np.mean(gaps) == pytest.approx(1, abs=0.07)
    assert np.median(answers) == pytest.approx(129, rel=0.06) and np.mean(answers) == pytest.approx(211, rel=0.05)
    assert {item.max_tokens for item in items} == {1000}, "the cap tells nothing of the answer's length"


def test_code_arrives_in_bursts():
    gaps = np.diff([item.arrival for item in make_workload("code", requests=2000, scale=0.01)])
    assert np.std(gaps) / np.mean(gaps) > 6


def test_quantiles_are_met_exactly_and_no_length_is_invented_below_the_first():
    table = (10, 20, 30, 40, 50, 60, 70, 80, 90)
    shares = np.array([0.0, 0.01, 0.5, 0.95, 1.0])
    assert at_quantiles(table, shares).tolist() == pytest.approx([10, 10, 40, 70, 90])


@pytest.mark.parametrize("cv", [0.0, 0.5, 1.0, 2.0])
def test_lognormal_answers_vary_as_asked(cv):
    for requests in (16, 200):
        items = make_workload("lognormal", cv=cv, requests=requests, mean_tokens=200)
        answers = np.array([item.output_tokens for item in items])
        assert answers.mean() == pytest.approx(200, rel=0.01)
        assert answers.std() / answers.mean() == pytest.approx(cv, rel=0.01)


def test_shared_prefix_is_shared_to_the_last_token_at_any_scale():
    for scale in (1.0, 0.1):
        items = make_workload("shared-prefix", requests=8, scale=scale)
        prefix = round(2048 * scale)
        assert len({tuple(item.prompt_ids[:prefix]) for item in items}) == 1
        assert len({tuple(item.prompt_ids) for item in items}) == 8


def test_an_unknown_setting_is_refused_with_those_there_are():
    with pytest.raises(ValueError, match="workload .peers. has no rate; it has requests, scale, seed"):
        make_workload("peers", rate=3.0)
    with pytest.raises(ValueError, match="workload .trace. needs path"):
        make_workload("trace")


@pytest.mark.parametrize(
    "wrong",
    [dict(requests=0), dict(requests=-1), dict(rate=0.0), dict(rate=-1.0), dict(rate=float("nan")), dict(scale=0.0),
     dict(scale=float("inf"))],
    ids=str,
)
def test_settings_that_make_no_workload_are_refused_by_name(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} .* must be a (finite|whole) number"):
        make_workload("chat", **wrong)


@pytest.mark.parametrize("clients", [0, -1])
def test_a_closed_loop_needs_a_client(clients):
    with pytest.raises(ValueError, match=f"clients {clients}"):
        play(fake_engine(), make_workload("peers", requests=1), clients)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no request"),
        ("a,b,c\n", "holds no request"),
        ("a,b,c\n0.5,3,4\n0.7,3\n", "line 3"),
        ("a,b,c\n0.5,3,4\nsoon,3,4\n", "line 3: .*soon"),
        ("a,b,c\n0.5,many,4\n", "line 2: .*many"),
        ("a,b,c\n0.5,3,4\n0.7,-3,4\n", "line 3: .*-3"),
        ("a,b,c\nnan,3,4\n", "line 2: .*nan"),
        ("a,b,c\n\0\xff\n", "line 2"),
    ],
    ids=["empty", "a header alone", "a short line", "no date", "no number", "a negative one", "no moment", "no text"],
)
def test_a_damaged_trace_is_refused_with_its_line(text, message, tmp_path):
    (file := tmp_path / "trace.csv").write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=message):
        make_workload("trace", path=file)


def test_trace_reads_dates_and_seconds(tmp_path):
    dates = tmp_path / "dates.csv"
    dates.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"
                     "2023-11-16 18:15:50.9951690,396,109\n")
    seconds = tmp_path / "seconds.csv"
    seconds.write_text("arrived_at,num_prefill,num_decode\n100.5,374,44\n104.8145790,396,109\n")
    for path in (dates, seconds):
        items = make_workload("trace", path=path)
        assert [len(item.prompt_ids) for item in items] == [374, 396]
        assert [(item.stop_after, item.max_tokens) for item in items] == [(44, 109), (109, 109)]
        assert [item.arrival for item in items] == pytest.approx([0.0, 4.314579])
    assert len(make_workload("trace", path=dates, requests=1)) == 1
    seconds.write_text("header\n9,5,3\n1,4,3\n")
    assert [item.arrival for item in make_workload("trace", path=seconds)] == [8, 0], "not in order: nobody before 0"


CLOCKS_BACK = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-05 01:59:59,4,5\n2023-11-05 02:00:00,6,7\n"


@pytest.mark.parametrize("zone", ["UTC", "America/New_York", "Asia/Kolkata", "Australia/Lord_Howe"])
def test_a_date_without_an_offset_is_utc_on_every_machine(zone, tmp_path, monkeypatch):
    (file := tmp_path / "trace.csv").write_text(CLOCKS_BACK)
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        assert arrivals(file) == [0.0, 1.0]
        file.write_text(CLOCKS_BACK.replace("02:00:00", "02:00:00+00:00"))
        assert arrivals(file) == [0.0, 1.0], "and beside one with an offset"
        file.write_text(CLOCKS_BACK.replace("02:00:00", "04:00:00+02:00").replace("01:59:59", "01:59:59Z"))
        assert arrivals(file) == [0.0, 1.0]
    finally:
        monkeypatch.undo()
        time.tzset()


def arrivals(file, **settings):
    return [item.arrival for item in make_workload("trace", path=file, **settings)]


@pytest.mark.parametrize(
    "text",
    ["1,3,40\n2,4,50\n", "\n1,3,40\n2,4,50\n", "a,b,c\n1,3,40\n2,4,50\n\n", "a,b,c\n1,3,40\n\n2,4,50\n  \n",
     "\ufeffTIMESTAMP,ContextTokens,GeneratedTokens\n1,3,40\n2,4,50",
     "Timestamp,Model,Request tokens,Response tokens,Log Type\n1,x,3,40,y\n2,x,4,50,y\n",
     "num_decode_tokens,arrived_at,num_prefill_tokens\n40,1,3\n50,2,4\n",
     "id,Input-Length,output_length,arrival time\n8,3,40,1\n9,4,50,2\n"],
    ids=["no header", "a blank first line", "a blank last line", "blank lines", "a byte-order mark", "other columns",
         "another order", "other names"],
)  # fmt: skip
def test_columns_are_found_by_name_and_no_request_is_lost(text, tmp_path):
    (file := tmp_path / "trace.csv").write_text(text, encoding="utf-8")
    items = make_workload("trace", path=file)
    assert [(item.arrival, len(item.prompt_ids), item.stop_after) for item in items] == [(0, 3, 40), (1, 4, 50)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Timestamp,Model,Request tokens\n1,x,3\n", "which column holds generated tokens"),
        ("a,b,c,d\n1,2,3,4\n", "which column holds arrival"),
        ("tokens,timestamp,x\n1,2,3\n", "which column holds context tokens"),
        ("a,b,c\n1,2,3\n2023-11-05,2,3\n", "line 3: .*seconds, as in the first"),
        ("a,b,c\n2023-11-05,2,3\n17,2,3\n", "line 3: .*a date, as in the first"),
        ("a,b,c\n1," + "9" * 200_000 + ",3\n", "line 2: field larger than"),
        ("a,b,c\n1," + "9" * 5000 + ",3\n", "line 2: .{,150} is not an arrival"),
        ("soon,3,4\n", "line 1: .*soon"),
    ],
    ids=["no answers", "no known name", "another place", "seconds and a date", "a date and seconds", "a long field",
         "a long number", "no date in the first line"],
)  # fmt: skip
def test_a_trace_that_could_mean_other_things_is_refused(text, message, tmp_path):
    (file := tmp_path / "trace.csv").write_text(text)
    with pytest.raises(ValueError, match=message):
        make_workload("trace", path=file)


def test_of_an_unsorted_trace_the_first_to_arrive_are_taken(tmp_path):
    (file := tmp_path / "trace.csv").write_text("header\n9,5,3\n1,4,3\n5,6,3\n1,7,3\n")
    assert arrivals(file, requests=3) == [0, 4, 0]
    assert arrivals(file, requests=1) == [0]
    assert arrivals(file) == [8, 0, 4, 0]


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("chat", dict(requests=2.5), "requests 2.5 must be a whole number"),
        ("chat", dict(requests="3"), "requests '3' must be"),
        ("chat", dict(requests=10**12), "requests 1,000,000,000,000 is more than 1,000,000"),
        ("peers", dict(seed=1.5), "seed 1.5 must be a whole number"),
        ("lognormal", dict(cv=float("nan")), "cv nan"),
        ("lognormal", dict(cv="wide"), "cv 'wide'"),
        ("articles-static", dict(answers=[]), "answers .* is not a list"),
        ("articles-static", dict(answers=[3, "x"]), "answers 'x'"),
        ("worked-example", dict(context=300), "an answer of 300 tokens leaves no prompt in a context of 300"),
        ("chat", dict(scale=1e12, requests=2), "take a smaller scale"),
        ("chat", dict(rate=1e-320, requests=2), "arrivals that never come"),
        ("trace", dict(path=5), "path 5 is not a file's name"),
        ("trace", dict(path="nowhere.csv"), "nowhere.csv cannot be read"),
        (["chat"], {}, "unknown workload"),
    ],
    ids=str,
)
def test_a_setting_that_cannot_be_meant_is_refused_by_name(name, wrong, message):
    with pytest.raises(ValueError, match=message):
        make_workload(name, **wrong)


def test_whole_numbers_of_numpy_are_taken():
    assert make_workload("peers", requests=np.int64(3), seed=np.int32(1)) == make_workload("peers", requests=3, seed=1)


def test_articles_pair_and_batch():
    assert [item.output_tokens for item in make_workload("articles-static")] == [800, *[40] * 7]
    assert [item.output_tokens for item in articles_static(answers=(80, 800))] == [80, 800]


# -- playing them ---------------------------------------------------------------------------------


def test_the_open_loop_keeps_arriving_while_the_server_is_busy():
    engine = engine_on_a_virtual_clock(max_batch=1)
    engine.clock.advance(100.0)
    items = [WorkItem(float(i), [i + 1], 4) for i in (2, 0, 1)]  # not in order of arrival
    outputs = play(engine, items)
    assert [len(output) for output in outputs] == [4, 4, 4]
    assert sorted(r.arrival for r in engine.records.requests) == [100, 101, 102]
    assert metrics.summary(engine.records)["queue_s"]["max"] == 6
    assert outputs[1][0] < outputs[2][0] < outputs[0][0], "outputs are in the items' order, served in that of arrival"


def test_the_open_loop_waits_for_the_next_arrival_when_idle():
    engine = engine_on_a_virtual_clock()
    play(engine, [WorkItem(0.0, [1], 1), WorkItem(50.0, [2], 1)])
    assert [r.first_scheduled for r in engine.records.requests] == [0.0, 50.0]


def test_the_closed_loop_keeps_its_number_of_clients():
    engine = engine_on_a_virtual_clock(max_batch=8)
    play(engine, [WorkItem(1000.0 * i, [i + 1], 1 + i % 3) for i in range(9)], clients=3)
    assert max(step.rows + step.waiting for step in engine.records.steps) == 3
    assert metrics.summary(engine.records)["queue_s"]["max"] == 0 and engine.clock.now() < 10


def test_hidden_ends_and_caps_both_end_an_answer():
    items = [WorkItem(0.0, [1], 9, stop_after=2), WorkItem(0.0, [2], 3, stop_after=7)]
    outputs = play(engine_on_a_virtual_clock(), items)
    assert [len(output) for output in outputs] == [2, 3]
