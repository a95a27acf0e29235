"""Do the pictures say what the records and metrics say, and does a page show the package's real source?"""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path

import nbformat
import pytest
from fakes import fake_engine

from minillm import SamplingParams, metrics
from minillm.course.ledger import LEDGER
from minillm.course.show import plots
from minillm.course.show.names import resolve
from minillm.course.show.recorded import heading, ledger, recorded
from minillm.course.show.source import show_source, source_block
from minillm.ladder.decode import NoCache, decode_cached
from minillm.ladder.records import Records
from minillm.measure.measurement import SEE_ROWS, Measurement, Provenance

NOTEBOOKS = Path(__file__).resolve().parent.parent / "notebooks"
LENGTHS = (3, 12, 5, 30, 8, 4)


def loaded_engine(requests: int = 12, prompt_tokens: int = 5, seed: int = 0, **settings):
    """An engine with requests whose answers end, unknown to it, long before their cap."""
    engine, draw = fake_engine(**{"blocks": 256, **settings}), random.Random(seed)
    for i in range(requests):
        params = SamplingParams(max_tokens=40, stop_after=LENGTHS[i % len(LENGTHS)])
        engine.add([draw.randrange(90) for _ in range(prompt_tokens)], params)
    return engine


def run(engine) -> Records:
    while engine.has_work:
        engine.step()
    return engine.records


# --- the timeline -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batching", ["static", "continuous"])
@pytest.mark.parametrize("kv", ["slots", "paged"])
def test_idle_segments_are_the_idle_slot_steps(batching, kv):
    records = run(loaded_engine(batching=batching, kv=kv, max_batch=4))
    segments = plots.timeline(records, unit="step")
    assert plots.idle_time(segments) == metrics.summary(records)["batch"]["idle_row_steps"]
    assert len(segments) == sum(step.rows for step in records.steps)
    assert (plots.idle_time(segments) > 0) == (batching == "static")


def test_a_slot_holds_one_request_at_a_time_and_no_more_slots_are_drawn_than_rows():
    records = run(loaded_engine(batching="static", kv="slots", max_batch=4))
    segments = plots.timeline(records, unit="step")
    assert len({(s.line, s.start) for s in segments}) == len(segments)
    assert {s.line for s in segments} == set(range(4))
    lines = {s.request: s.line for s in segments}
    assert all(lines[s.request] == s.line for s in segments), "a request changed its slot"


def test_seconds_add_up_to_what_the_rows_took():
    records = run(loaded_engine(batching="static", kv="slots", max_batch=4, seconds=0.25))
    segments = plots.timeline(records, unit="s")
    assert sum(s.end - s.start for s in segments) == pytest.approx(0.25 * records.totals["rows"])
    assert plots.idle_time(segments) == pytest.approx(0.25 * records.totals["idle_rows"])


def test_decodes_and_prefills_are_told_apart_in_chunks():
    records = run(loaded_engine(requests=3, prompt_tokens=20, max_batch=3, max_step_tokens=8))
    kinds = [kind for rows in plots.row_kinds(records) for kind in rows.values()]
    # the first token of an answer comes from the last chunk of its prompt
    assert kinds.count("decode") == sum(LENGTHS[:3]) - 3
    assert kinds.count("prefill") == records.totals["rows"] - kinds.count("decode")
    assert kinds.count("prefill") > 3, "no prompt was cut into chunks: this test proves nothing"


def test_what_a_preempted_request_computes_again_is_prefill():
    records = run(loaded_engine(requests=6, prompt_tokens=8, blocks=12, max_batch=6, prefix_cache=False))
    assert records.totals["preempted"] > 0, "nobody was preempted: this test proves nothing"
    kinds = [kind for rows in plots.row_kinds(records) for kind in rows.values()]
    returns = records.totals["preempted"]
    assert kinds.count("prefill") == 6 + returns
    assert kinds.count("decode") == records.totals["output_tokens"] - 6 - returns


def test_requests_are_numbered_by_arrival():
    engine = fake_engine(max_batch=1)
    for name, arrival in [("late", 5.0), ("early", 0.0), ("middle", 1.0)]:
        engine.add([1, 2, 3], SamplingParams(max_tokens=2), name, arrival)
    assert plots.arrival_numbers(run(engine)) == {"early": 1, "middle": 2, "late": 3}


def test_an_unfinished_run_can_be_drawn():
    engine = loaded_engine(batching="static", max_batch=4)
    for _ in range(9):
        engine.step()
    segments = plots.timeline(engine.records, unit="step")
    assert plots.idle_time(segments) == engine.records.totals["idle_rows"] > 0


# --- the pool ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv", ["slots", "paged"])
def test_waste_is_that_of_the_metrics(kv):
    engine = loaded_engine(requests=6, kv=kv, max_batch=6)
    engine.step()  # nobody has ended yet, so what was planned is what stands
    pool, step = plots.pool_snapshot(engine), engine.records.steps[-1]
    occupancy = metrics.summary(engine.records)["kv"]
    assert pool.count("live") == step.blocks_live and pool.used_tokens == step.kv_tokens
    assert pool.wasted_tokens == occupancy["peak_wasted_tokens"] > 0
    assert pool.reserved_tokens == occupancy["peak_reserved_tokens"]
    assert [pool.count(state) for state in ("cached", "free")] == [step.blocks_cached, step.blocks_free]


def test_shared_blocks_are_counted_once_and_named_for_all_who_hold_them():
    engine = fake_engine(max_batch=4)
    prefix = list(range(8))  # two blocks
    engine.add([*prefix, 20], SamplingParams(max_tokens=30))
    engine.step()
    for last in (21, 22):
        engine.add([*prefix, last], SamplingParams(max_tokens=30))
    engine.step()
    pool = plots.pool_snapshot(engine)
    assert pool.shared == 2 and [b.holders for b in pool.blocks if len(b.holders) > 1] == [(1, 2, 3), (1, 2, 3)]
    assert pool.used_tokens == engine.records.steps[-1].kv_tokens == 8 + 2 + 1 + 1


def test_what_a_request_leaves_behind_is_cached_not_live():
    engine = loaded_engine(requests=1, prompt_tokens=8)
    run(engine)
    pool = plots.pool_snapshot(engine)
    assert pool.count("live") == pool.wasted_tokens == 0
    assert pool.count("cached") == engine.stats().blocks_cached > 0


# --- figures are made, closed, and say what they find -----------------------------------------------------------


def title_of(figure) -> str:
    return figure.get_suptitle().replace("\n", " ")


def test_titles_state_what_the_rows_say():
    rows = [{"rows": n, "tokens_per_s": 10 * n, "step_ms": 50 + n, "least_ms": 40} for n in (1, 8)]
    title = title_of(plots.tokens_per_s_curve(rows))
    assert title == "8 rows: 8.0 times the tokens per second, a step 1.14 times as long"
    costs = [{"context_tokens": n, "recompute_ms": 2.0 * n, "cached_ms": 40.0} for n in (16, 32)]
    costs.append({"context_tokens": 64, "recompute_ms": None, "cached_ms": 40.0})
    assert "2.0 times as much without a cache, 1.00 times with one" in title_of(plots.cost_per_token(costs))
    records = run(loaded_engine(batching="static", max_batch=4))
    share = metrics.summary(records)["batch"]["idle_share"]
    assert f"static: {share:.0%} of slot-steps idle" in title_of(plots.slot_timeline({"static": records}, unit="step"))


def spread(name: str, value: float, part: float) -> dict:
    return {name: value, f"{name}_min": value * (1 - part), f"{name}_max": value * (1 + 2 * part)}


def bars_of(ax) -> list[list[tuple[float, float]]]:
    """The ends of each bar of spread, as points."""
    return [[tuple(point) for point in segment] for lines in ax.collections for segment in lines.get_segments()]


@pytest.mark.parametrize("part", [None, 0.0, 0.1])
def test_a_picture_shows_the_lowest_and_the_highest_turn_where_they_are_recorded(part):
    def given(name: str, value: float) -> dict:
        return {name: value} if part is None else spread(name, value, part)

    curve = [{"rows": n, "least_ms": 5.0, **given("tokens_per_s", 9.0 * n), **given("step_ms", 50.0 + n)}
             for n in (1, 8)]
    costs = [{"context_tokens": n, **given("recompute_ms", 2.0 * n), **given("cached_ms", 40.0)} for n in (16, 32)]
    loop = [{"clients": n, **given("tokens_per_s", 9.0 * n), **given("itl_p50_ms", 50.0 + n)} for n in (1, 8)]
    cases = [{"case": case, "prompt_tokens": 90, "computed": 90 - found, "found": found, **given("ttft_p50_ms", ms)}
             for case, found, ms in (("no sharing", 0, 80.0), ("shared prefix", 60, 20.0), ("changed", 0, 81.0))]
    drawn = {"curve": plots.tokens_per_s_curve(curve).axes[1], "costs": plots.cost_per_token(costs).axes[0],
             "loop": plots.knee_curve(loop).axes[0], "cases": plots.prefix_bars(cases).axes[1]}
    counts = {name: len(bars_of(ax)) for name, ax in drawn.items()}
    assert counts == dict.fromkeys(counts, 0) if part is None else counts == {
        "curve": 2, "costs": 4, "loop": 4, "cases": 3}
    if part:
        (_, low), (_, high) = bars_of(drawn["curve"])[0]
        assert (low, high) == pytest.approx((51 * 0.9, 51 * 1.2))


def test_the_picture_of_a_knee_marks_all_that_may_be_the_knee():
    rows = [{"clients": n, "tokens_per_s": n / (20 + n) * 1e3, "itl_p50_ms": 20.0 + n, "knee_share": share}
            for n, share in ((1, 0.0), (8, 0.2), (16, 0.5), (32, 0.3), (128, 0.0))]
    figure = plots.knee_curve(rows)
    rings = {(*line.get_xdata(), *line.get_ydata()) for line in figure.axes[0].lines if line.get_fillstyle() == "none"}
    assert rings == {(row["tokens_per_s"], row["itl_p50_ms"]) for row in rows[1:4]}
    assert "between 8 and 32 clients: 128 make 1.95 times the tokens per second of 16" in title_of(figure)
    rising = [{**row, "itl_p50_ms": 20.0, "knee_share": None} for row in rows]
    assert "No knee below 128 clients: 128 make 18.16 times" in title_of(plots.knee_curve(rising))


@pytest.mark.parametrize("inches", [4, 7, 10])
def test_a_title_of_any_length_stays_inside_its_figure(inches):
    for words in (3, 20, 40):
        with plots.drawing(size=(inches, 6)) as (figure, _):
            plots.headline(figure, "WIDE 1,024,288 " * words)
            box = figure._suptitle.get_window_extent()
            assert box.x0 >= 0 and box.x1 <= figure.bbox.width
            assert title_of(figure).split() == ["WIDE", "1,024,288"] * words


@pytest.mark.parametrize("count, beside", [(2, False), (6, True)])
def test_no_line_runs_through_the_names_of_the_lines(count, beside):
    """Two level lines leave room between them; six that cross everywhere leave none."""
    ys = [[1, 1, 1], [5, 5, 5]] if count == 2 else [[i, 5 - i, i] for i in range(6)]
    figure = plots.curves({f"line {i}": ([1, 2, 4], each) for i, each in enumerate(ys)}, "title", "x", "y")
    figure.draw_without_rendering()
    names, area = figure.axes[0].get_legend().get_window_extent(), figure.axes[0].get_window_extent()
    assert (names.x0 >= area.x1) == beside and names.x1 <= figure.bbox.width
    for line in figure.axes[0].lines:
        assert not line.get_transform().transform_path(line.get_path()).intersects_bbox(names, filled=False)


def test_a_figure_is_closed_so_that_running_a_cell_again_stacks_nothing_up():
    import matplotlib.pyplot as plt

    before = plt.get_fignums()
    for _ in range(3):
        plots.curves({"a": ([1, 2], [3, 4])}, "title", "x", "y")
        plots.block_map({"pool": plots.pool_snapshot(loaded_engine())}, "title")
        plots.bars([{"kv": "slots", "used": 1, "wasted": 2}], "kv", {"used": "used", "wasted": "empty"}, "title", "MB")
    assert plt.get_fignums() == before


# --- source on the page -----------------------------------------------------------------------------------------


def test_source_is_the_real_one_and_names_no_path_of_this_machine():
    block = source_block(NoCache.attend)
    assert block.startswith("`minillm.ladder.decode.NoCache.attend`, from `minillm/ladder/decode.py`:")
    assert "\ndef attend(self, layer: int" in block, "a method stands at the left edge"
    shown = show_source(NoCache, decode_cached)
    assert "Rung 1: yield greedy tokens" in shown.data and "class NoCache:" in shown.data


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_stored_pages_show_the_source_of_today(path):
    for name, stored in stored_sources(nbformat.read(path, as_version=4)):
        assert source_block(resolve(name)) == stored, f"{name} has changed: python notebooks/build.py {path.stem}"


def stored_sources(notebook) -> list[tuple[str, str]]:
    """The name and the whole block of everything that `show_source` has put on a page."""
    pages = [o.data.get("text/markdown", "") for c in notebook.cells for o in c.get("outputs", []) if "data" in o]
    found = [block for page in pages for block in re.findall(r"^`minillm\.[\w.]+`, from .*?\n```$", page, re.M | re.S)]
    return [(re.match(r"`([\w.]+)`", block)[1], block) for block in found]


def test_a_page_that_drifted_is_noticed():
    output = nbformat.v4.new_output("display_data", {"text/markdown": show_source(NoCache, decode_cached).data})
    cell = nbformat.v4.new_code_cell("show_source(...)", outputs=[output])
    pairs = stored_sources(nbformat.v4.new_notebook(cells=[cell]))
    assert [name for name, _ in pairs] == ["minillm.ladder.decode.NoCache", "minillm.ladder.decode.decode_cached"]
    assert all(source_block(resolve(name)) == stored for name, stored in pairs)
    output.data["text/markdown"] = output.data["text/markdown"].replace("max_tokens: int", "tokens: int")
    ((_, first), (name, second)) = stored_sources(nbformat.v4.new_notebook(cells=[cell]))
    assert source_block(NoCache) == first and source_block(resolve(name)) != second


# --- recorded measurements --------------------------------------------------------------------------------------


GPU = Provenance(
    device="NVIDIA A100", driver="550, CUDA 12.8", torch="2.11", dtype="bf16", model="m", commit="c" * 40,
    date="2026-01-02T03:04:05+00:00", seed=0, warmups=1, repeats=3,
)


def test_what_was_never_recorded_is_said_and_a_missing_gpu_is_left_to_the_ledger(tmp_path):
    assert recorded("step_time", {"rows": "rows"}, tmp_path) == (
        "No run of 'step_time' is recorded yet: `minillm measure step_time` makes one.")
    cpu = replace(GPU, device="Some CPU, 2 threads", driver="Linux 6, AVX2")
    Measurement("step_time", cpu, [{"rows": 8}]).save(tmp_path)
    text = recorded("step_time", {"rows": "rows"}, tmp_path)
    assert "Some CPU" in text and "8" in text and "No GPU run" not in text


def test_a_gpu_run_is_shown_with_its_provenance(tmp_path):
    Measurement("step_time", GPU, [{"rows": 8}]).save(tmp_path)
    text = recorded("step_time", {"rows": "rows"}, tmp_path)
    assert text.startswith("NVIDIA A100, m in bf16, torch 2.11, 2026-01-02, commit cccccccccc\n")
    assert "No GPU" not in text
    servers = replace(GPU, model=SEE_ROWS, dtype=SEE_ROWS)  # of several models, on whatever torch each may run
    assert heading(Measurement("bench_servers", servers, [])) == "NVIDIA A100, 2026-01-02, commit cccccccccc"


# --- the ledger on a page ---------------------------------------------------------------------------------------


def step_times(eight_ms: float) -> list[dict]:
    return [{"rows": rows, "step_ms": ms, "tokens_per_s": 1e3 * rows / ms} for rows, ms in ((1, 20.0), (8, eight_ms))]


def test_a_page_judges_its_own_rows_and_shows_every_recorded_run(tmp_path):
    here = ledger({"B1": step_times(24.0), "B3": None}, tmp_path).splitlines()
    assert here[0].startswith("B1  Eight requests") and here[0].endswith("[the articles: 8x for 1.2x]")
    assert here[1].startswith("    here: holds: 8 rows give 6.67 (6.06 to 7.33) times the output in 1.2 (")
    assert here[2] == "    recorded: not measured: run `minillm measure batch_curve`"
    assert here[4:] == ["    recorded: not measured: run `minillm measure knee`",
                        "No GPU run is recorded yet for B1, B3."]
    Measurement("batch_curve", GPU, step_times(200.0)).save(tmp_path)
    text = ledger({"B1": step_times(24.0)}, tmp_path)
    refuted = "recorded, NVIDIA A100: does not hold here: 8 rows give 0.8 (0.727 to 0.88) times"
    assert refuted in text and "No GPU" not in text
    assert text.endswith("page and record differ: the page's run is smaller, and on this device. "
                         "`minillm measure` asks it at full size.")
    assert "differ" not in ledger({"B1": step_times(200.0)}, tmp_path)


def test_rows_that_do_not_tell_and_claims_that_nobody_knows(tmp_path):
    assert "    here: not measured: no row with rows 32" in ledger({"B2": step_times(24.0)}, tmp_path)
    with pytest.raises(ValueError, match=r"no claims Z9; known: A1, A2"):
        ledger({"Z9": None}, tmp_path)


def test_every_claim_of_the_ledger_is_settled_on_a_page():
    text = "".join(path.read_text(encoding="utf-8") for path in sorted(NOTEBOOKS.glob("src/*.py")))
    asked = set(re.findall(r'"([A-H]\d+)"', "".join(re.findall(r"^print\(ledger\(.*?\)\)$", text, re.M | re.S))))
    known = {claim.id for claim in LEDGER}
    assert asked == known
