"""Chapters 14 and 15: each sum against a count that shares no line with it, and each probe on streams made here."""

from __future__ import annotations

from collections import deque
from itertools import combinations, product

import pytest
from fakes import fake_engine
from prometheus_client import generate_latest

from minillm.course.experiments import beyond
from minillm.course.experiments.outside import (
    METRICS,
    Stream,
    engine_of,
    most_at_once,
    read_metrics,
    tokens_a_step,
)
from minillm.course.experiments.service import chats
from minillm.course.show import beyond_plots
from minillm.ladder.quantized import kv_bytes_per_token
from minillm.ladder.records import RequestRecord
from minillm.load.config import ModelConfig
from minillm.measure.capacity import GB, capacity
from minillm.measure.roofline import StepShape
from minillm.measure.service import Service
from minillm.measure.virtual import CostModel
from minillm.serve.metrics import Metrics

LLAMA = ModelConfig.preset("llama-3.1-8b")

# -- what a token leaves in the cache -------------------------------------------------------------


@pytest.mark.parametrize("name", beyond.CACHES)
@pytest.mark.parametrize("context", [1, 1023, 1025, 5000])
def test_cache_bytes_are_those_of_layers_that_are_fed_token_by_token(name, context):
    shape = beyond.CACHES[name]
    layers = [deque(maxlen=shape.window if layer < shape.windowed else None) for layer in range(shape.layers)]
    for token in range(context):
        for layer in layers:
            layer.append(token)
    assert shape.bytes(context) == sum(map(len, layers)) * shape.numbers * 2


@pytest.mark.parametrize(("name", "preset"), [("grouped, Llama-3.1-8B", "llama-3.1-8b")])
def test_a_shape_that_is_also_a_preset_has_the_presets_bytes(name, preset):
    assert beyond.CACHES[name].bytes(7) == 7 * kv_bytes_per_token(ModelConfig.preset(preset), "bf16")


# -- mixture of experts ---------------------------------------------------------------------------


@pytest.mark.parametrize(("experts", "active", "rows"), [(4, 2, 1), (4, 2, 3), (5, 1, 4), (3, 3, 2), (6, 4, 2)])
def test_distinct_experts_are_the_mean_over_all_choices(experts, active, rows):
    choices = list(product(combinations(range(experts), active), repeat=rows))
    mean = sum(len(set().union(*chosen)) for chosen in choices) / len(choices)
    assert beyond.distinct_experts(experts, active, rows) == pytest.approx(mean)


def test_drawn_experts_agree_with_the_expectation_and_favourites_make_them_fewer():
    drawn = beyond.simulated_experts(32, 4, 6, times=2000)
    assert drawn.mean() == pytest.approx(beyond.distinct_experts(32, 4, 6), rel=0.01)
    assert beyond.simulated_experts(32, 4, 6, times=500, skew=1.0).mean() < drawn.mean() - 1
    assert set(beyond.simulated_experts(32, 4, 1, skew=2.0)) == {4}, "a row draws each expert once"


def tensors(hidden, inner, layers, heads, kv_heads, head_dim, vocabulary, experts, qk_norm) -> dict[str, int]:
    """Every matrix and vector of a mixture, by name, counted from its checkpoint's shapes. inner: of one expert."""
    sizes = {"embed": vocabulary * hidden, "lm_head": vocabulary * hidden, "norm": hidden}
    for i in range(layers):
        sizes |= {f"{i}.q": hidden * heads * head_dim, f"{i}.k": hidden * kv_heads * head_dim,
                  f"{i}.v": hidden * kv_heads * head_dim, f"{i}.o": heads * head_dim * hidden,
                  f"{i}.norms": 2 * hidden + qk_norm * 2 * head_dim, f"{i}.router": hidden * experts}
        sizes |= {f"{i}.expert{e}.{part}": hidden * inner for e in range(experts) for part in ("gate", "up", "down")}
    return sizes


SHAPES = {"Qwen3-30B-A3B": (2048, 768, 48, 32, 4, 128, 151_936, 128, True),
          "Mixtral-8x7B": (4096, 14_336, 32, 32, 8, 128, 32_000, 8, False)}
PUBLISHED = {"Qwen3-30B-A3B": (30.5e9, 3.3e9), "Mixtral-8x7B": (46.7e9, 12.9e9)}  # all, active


@pytest.mark.parametrize("name", SHAPES)
def test_a_mixtures_bytes_are_those_of_its_tensors(name):
    mixture, sizes = beyond.MIXTURES[name], tensors(*SHAPES[name])
    assert mixture.total_bytes == 2 * sum(sizes.values())
    used = [key for key in sizes if key != "embed" and (".expert" not in key or any(
        f".expert{e}." in key for e in range(mixture.active)))]
    assert mixture.bytes_read(1) == pytest.approx(2 * sum(sizes[key] for key in used))
    assert mixture.bytes_read(1e6) == pytest.approx(2 * (sum(sizes.values()) - sizes["embed"]))


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_mixture_has_as_many_weights_as_its_makers_say(name):
    mixture, (total, active) = beyond.MIXTURES[name], PUBLISHED[name]
    table = mixture.dense.vocab_size * mixture.dense.hidden_size  # read as a lookup, but counted as active
    assert mixture.total_bytes / 2 == pytest.approx(total, rel=0.005)
    assert mixture.bytes_read(1) / 2 + table == pytest.approx(active, rel=0.02)


def test_a_mixture_multiplies_what_is_active_and_reads_what_is_touched():
    mixture = beyond.MIXTURES["Mixtral-8x7B"]
    few, many = mixture.cost("h100", 1), mixture.cost("h100", 64)
    assert few.unit_costs == many.unit_costs and few.weight_bytes < many.weight_bytes / 3


# -- tensor parallelism ---------------------------------------------------------------------------


def ring_all_reduce(values: list[list[float]]) -> tuple[list[list[float]], int]:
    """The sum of each device's numbers on every device, and the numbers that one device sent."""
    devices = len(values)
    chunk, sent = len(values[0]) // devices, 0
    for phase in range(2):  # first each chunk is summed on its way round, then it is copied on
        for step in range(devices - 1):
            moves = [((d - step + phase) % devices, d, (d + 1) % devices) for d in range(devices)]
            copies = [values[d][at * chunk : (at + 1) * chunk] for at, d, _ in moves]
            for (at, _, to), copy in zip(moves, copies, strict=True):
                old = values[to][at * chunk : (at + 1) * chunk]
                values[to][at * chunk : (at + 1) * chunk] = copy if phase else [
                    a + b for a, b in zip(old, copy, strict=True)]
            sent += chunk
    return values, sent


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_an_all_reduce_takes_its_latency_and_what_a_ring_sends(devices):
    values = [[float(d * 100 + i) for i in range(16)] for d in range(devices)]
    sums = [sum(column) for column in zip(*values, strict=True)]
    after, sent = ring_all_reduce(values)
    assert all(each == sums for each in after), "this ring does not sum: the test proves nothing"
    seconds = beyond.all_reduce_seconds(beyond.Link(2.0, 5e-6), devices, 16)
    assert seconds == pytest.approx(5e-6 + sent / 2e9)


def test_one_device_sums_nothing_and_its_step_is_the_plain_one():
    cost, link = CostModel.of_device("h100", LLAMA), beyond.LINKS["NVLink 4"]
    parts = beyond.parallel_step(cost, link, 1, [100, 200])
    assert parts["all_reduce_ms"] == 0
    assert sum(parts.values()) == pytest.approx(1e3 * cost.seconds(StepShape.decode([100, 200])))
    split = beyond.parallel_step(cost, link, 4, [100, 200])
    each = beyond.all_reduce_seconds(link, 4, 2 * 4096 * 2)  # two rows of 4,096 numbers
    assert split["work_ms"] == parts["work_ms"] / 4 and split["fixed_ms"] == parts["fixed_ms"]
    assert split["all_reduce_ms"] == pytest.approx(1e3 * 2 * 32 * each)


def test_replicas_share_the_rows_and_the_fullest_sets_the_pace():
    rows = beyond.parallel_rows("h100", LLAMA, 3, 1000)
    cost = CostModel.of_device("h100", LLAMA)
    two = next(row for row in rows if row["devices"] == 2)
    assert two["replicas_tokens_per_s"] == pytest.approx(3 / cost.seconds(StepShape.decode([1000, 1000])))
    assert [row["devices"] for row in rows] == [1, 2, 4, 8] * len(beyond.LINKS)


# -- goodput --------------------------------------------------------------------------------------


def answered(arrival: float, *moments: float) -> RequestRecord:
    record = RequestRecord("one", arrival, 10)
    record.token_times, record.finish, record.finish_reason = list(moments), moments[-1], "length"
    return record


@pytest.mark.parametrize(("record", "kept"), [
    (answered(1.0, 1.5, 1.6), True),
    (answered(1.0, 1.75, 1.8), False),  # the first token is late
    (answered(1.0, 1.25, 1.5, 1.75, 2.0), True),  # as slow as may be
    (answered(1.0, 1.25, 1.26, 1.27, 2.25), False),  # a pause that the mean shows
    (answered(1.0, 1.25, 1.75, 1.75, 1.75), True),  # a step that gives three: the mean counts tokens
    (answered(1.0, 1.25), True),  # one token has no gap
    (None, False),  # refused
])
def test_a_request_keeps_both_bounds_or_is_not_counted(record, kept):
    assert beyond.meets(record, 0.5, 0.25) is kept


def test_goodput_is_the_rate_times_the_share_that_a_client_would_count():
    server = Service(kv_memory=60 * GB)
    low, high = beyond.goodput_rows(server, (1.0, 30.0), 40, 0.5, 0.05)
    served = server.serve(chats(40, 30.0)).requests
    late = 0
    for request in served:
        times = request.token_times
        slow = len(times) > 1 and (times[-1] - times[0]) / (len(times) - 1) > 0.05
        late += times[0] > request.arrival + 0.5 or slow
    assert 0 < late < len(served), "all or none are late: this test proves nothing"
    assert high["share"] == 1 - late / len(served) and high["good_per_s"] == 30 * high["share"]
    assert low["share"] == 1 and low["tokens_per_s"] < high["tokens_per_s"]


@pytest.mark.parametrize(("shares", "highest"), [
    ({1: 1.0, 2: 0.95, 3: 0.5}, 2), ({1: 0.5, 2: 1.0}, None), ({3: 0.2, 2: 0.9, 1: 1.0}, 2), ({1: 1.0}, 1),
])
def test_the_highest_rate_is_the_last_before_the_promise_breaks(shares, highest):
    assert beyond.highest_rate([{"rate": rate, "share": share} for rate, share in shares.items()]) == highest


# -- answers of thousands of tokens ---------------------------------------------------------------


def test_what_is_computed_again_is_that_of_the_steps_and_a_bound_ends_it():
    small = Service(kv_memory=2 * GB)
    served = small.serve(beyond.thinking(24, 1500), 12)
    row, steps = beyond.long_answers_row(served), served.records.steps
    again, given = sum(step.recomputed_tokens for step in steps), sum(step.output_tokens for step in steps)
    assert row["computed_again"] == again / given > 0
    assert row["preemptions"] == sum(request.preemptions for request in served.requests) > 0
    longest = max(item.max_tokens for item in beyond.thinking(24, 1500))
    bounded = Service(kv_memory=2 * GB, max_batch=beyond.rows_that_fit(small, 500, longest))
    assert beyond.long_answers_row(bounded.serve(beyond.thinking(24, 1500), 12))["preemptions"] == 0


def test_rows_that_fit_are_the_capacity_of_the_same_memory():
    found = capacity("llama-3.1-8b", 80, 16, 4, 4096).max_concurrent
    assert beyond.rows_that_fit(Service(kv_memory=60 * GB), 4000, 96) == found == 111


# -- a server from outside ------------------------------------------------------------------------

VLLM = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a } b"} 3.0
vllm:num_requests_running{engine="1",model_name="a } b"} 4.0
# TYPE vllm:num_requests_waiting_by_reason gauge
vllm:num_requests_waiting_by_reason{reason="capacity"} 9.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:kv_cache_usage_perc{engine="1"} 0.75
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0"} 20
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{le="0.5"} 1
vllm:time_to_first_token_seconds_bucket{le="+Inf"} 2
vllm:time_to_first_token_seconds_count 2
vllm:time_to_first_token_seconds_sum 1.5
"""
SGLANG = """# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{tp_rank="0"} 7
# TYPE sglang:token_usage gauge
sglang:token_usage{tp_rank="0"} 0.75
# TYPE sglang:generation_tokens_total counter
sglang:generation_tokens_total{tp_rank="0"} 20
"""
LLAMACPP = "llamacpp:requests_processing 7\nllamacpp:tokens_predicted_total 20\nllamacpp:requests_deferred 1\n"
OLD_VLLM = 'vllm:gpu_cache_usage_perc{model_name="m"} 0.75\n'


@pytest.mark.parametrize(("page", "engine", "found"), [
    (VLLM, "vllm", {"rows now": 7, "share of the cache held": 0.75, "output tokens": 20,
                    "time to first token, sum": 1.5, "time to first token, count": 2}),
    (SGLANG, "sglang", {"rows now": 7, "share of the cache held": 0.75, "output tokens": 20}),
    (LLAMACPP, "llamacpp", {"rows now": 7, "queue now": 1, "output tokens": 20}),
    (OLD_VLLM, "vllm", {"share of the cache held": 0.75}),
    ("process_open_fds 12\n", None, {}),
])
def test_four_dialects_are_read_under_the_same_names(page, engine, found):
    assert read_metrics(page) == found and engine_of(page) == engine


def test_this_packages_own_page_has_every_idea():
    page = generate_latest(Metrics(fake_engine()).registry).decode()
    assert read_metrics(page).keys() == METRICS.keys() and engine_of(page) == "minillm"


def test_a_page_that_is_not_prometheus_text_is_refused():
    with pytest.raises(ValueError):
        read_metrics("<html><body>404</body></html>")


@pytest.mark.parametrize(("lines", "most"), [
    (["xxx", " xx", "   xx"], 2),  # the third begins when two have ended
    (["xxxx", "xxxx", "xxxx"], 3),
    (["xx", "  xx", "    xx"], 1),
    ([" ", "xx"], 1),  # one that was refused has no events
])
def test_rows_are_the_streams_that_are_open_at_the_same_time(lines, most):
    streams = [Stream(0.0, 200, events=[at + 0.1 * row for at, mark in enumerate(line) if mark == "x"])
               for row, line in enumerate(lines)]
    assert most_at_once(streams) == most


@pytest.mark.parametrize(("events", "tokens"), [
    ([1, 2, 3, 4, 5, 6], 128),  # sent at 1.5, first token at 6: one step was under way, four had a chunk
    ([1, 2, 6], 512),  # computed whole
    ([1, 6], 512),
])
def test_a_chunk_is_the_prompt_over_the_steps_that_computed_it(events, tokens):
    assert tokens_a_step(512, Stream(0.0, 200, events=[float(moment) for moment in events]), 1.5, 6.0) == tokens


# -- pictures -------------------------------------------------------------------------------------


def test_a_bars_parts_stand_on_each_other_and_end_at_the_step():
    rows = beyond.parallel_rows("h100", LLAMA, 8, 1000)
    axes = beyond_plots.step_parts({"8 requests": rows}, "title").axes[0]
    tops = {round(bar.get_x() + bar.get_width() / 2, 2): 0.0 for bar in axes.patches}
    for bar in axes.patches:
        place = round(bar.get_x() + bar.get_width() / 2, 2)
        tops[place] = max(tops[place], bar.get_y() + bar.get_height())
    assert {round(top, 6) for top in tops.values()} - {0.0} == {round(row["step_ms"], 6) for row in rows}
    assert [text.get_text() for text in axes.texts] == [f"{row['tokens_per_s']:,.0f}" for row in rows]


def test_goodput_and_loads_are_drawn_from_their_rows():
    rows = [{"rate": 1.0, "share": 1.0, "good_per_s": 1.0, "tokens_per_s": 10.0},
            {"rate": 3.0, "share": 0.2, "good_per_s": 0.6, "tokens_per_s": 20.0}]
    drawn = beyond_plots.goodput(rows, "bounds", "title").axes
    assert [list(ax.lines[0].get_ydata()) for ax in drawn] == [[10, 20], [1, 0.6], [1, 0.2]]
    assert [ax.get_title(loc="left") for ax in drawn[:2]] == ["most at 3 a second", "most at 1 a second"]
    loads = [{"clients": n, "tokens_per_s": 5.0 * n, "ttft_ms": 10.0, "itl_ms": 2.0} for n in (1, 4)]
    first, second = beyond_plots.client_loads(loads, 4, "title").axes
    assert list(first.lines[0].get_ydata()) == [5, 20] and list(second.lines[1].get_ydata()) == [2, 2]
