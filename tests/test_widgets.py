"""The sliders: one move draws once, a cell that runs again leaves nothing behind, and all works without a kernel."""

from __future__ import annotations

import base64
import gc
import importlib.util
from pathlib import Path

import ipywidgets
import nbformat
import pytest
from tiny import tiny_model

from minillm import Engine, SamplingParams
from minillm.course import diagnose
from minillm.course.experiments import common
from minillm.course.experiments.speculation import ReplayProposer
from minillm.course.show import explore, explore_service, plots, widgets
from minillm.ladder.speculative import NgramProposer, Speculator
from minillm.load.config import ModelConfig
from minillm.measure import metrics
from minillm.measure.capacity import capacity
from minillm.measure.workload import lognormal

WIDGET = "application/vnd.jupyter.widget-view+json"


@pytest.fixture(scope="module")
def records():
    items = lognormal(1.0, requests=9, mean_tokens=12, prompt_tokens=20)
    return common.count(ModelConfig.preset("smollm2-135m"), items, max_batch=3, max_step_tokens=32)


def counting(name: str = "test") -> tuple[widgets.Panel, list]:
    """A panel over one slider, and the positions at which it was drawn."""
    drawn = []

    def draw(at):
        drawn.append(at)
        return plots.note(f"at {at}")

    return widgets.Panel(name, draw, at=ipywidgets.IntSlider(1, 0, 9)), drawn


def is_png(panel: widgets.Panel) -> bool:
    return bytes(panel.face.value).startswith(b"\x89PNG")


def live_controls() -> int:
    """Widgets that are open, but for the layouts and styles that come with each."""
    gc.collect()
    kinds = ipywidgets.IntSlider, ipywidgets.Image, ipywidgets.VBox
    return sum(type(thing) in kinds and thing.comm is not None for thing in gc.get_objects())


def test_a_cell_that_ran_three_times_draws_once_for_each_move():
    panels = [counting() for _ in range(3)]
    before = [list(drawn) for _, drawn in panels]
    panels[-1][0].controls["at"].value = 5
    assert [drawn[len(old):] for (_, drawn), old in zip(panels, before, strict=True)] == [[], [], [5]]
    panels[0][0].controls["at"].value = 7  # of a run that is gone: nobody listens
    assert panels[0][1] == [1]


def test_a_closed_panel_leaves_no_widgets_behind():
    counting()[0].close()
    before = live_controls()
    for _ in range(4):
        counting()
    assert live_controls() == before + 3  # the newest panel's slider, picture and box
    counting()[0].close()
    assert live_controls() == before


def test_the_picture_changes_with_the_slider_and_comes_back_with_it():
    panel, _ = counting()
    first = bytes(panel.face.value)
    panel.controls["at"].value = 2
    assert bytes(panel.face.value) != first and is_png(panel)
    panel.controls["at"].value = 1
    assert bytes(panel.face.value) == first


def test_a_panel_has_a_static_twin():
    bundle = counting()[0]._repr_mimebundle_()
    assert WIDGET in bundle
    assert base64.b64decode(bundle["image/png"]).startswith(b"\x89PNG")


def test_the_twin_is_what_a_built_notebook_keeps():
    file = Path(__file__).resolve().parent.parent / "notebooks/build.py"
    spec = importlib.util.spec_from_file_location("notebooks_build", file)
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    bundle = counting()[0]._repr_mimebundle_()
    kept = build.without_widget(nbformat.v4.new_output("execute_result", data=bundle))
    assert list(kept.data) == ["image/png"]
    plain = nbformat.v4.new_output("execute_result", data={WIDGET: {}, "text/plain": "VBox()"})
    assert build.without_widget(plain) is None


# -- each panel of the course, at its ends ------------------------------------------------------------------------


def ends(control) -> list:
    return list(control.options) if hasattr(control, "options") else (
        [control.min, control.max] if hasattr(control, "min") else [True, False])


def test_every_control_of_every_panel_reaches_its_ends(records):
    for make in (lambda: widgets.schedule_stepper(records), widgets.pool_explorer, widgets.capacity_explorer):
        panel = make()
        for control in panel.controls.values():
            for value in ends(control):
                control.value = value
                assert is_png(panel)
        panel.close()


def moves_to_its_ends(panel):
    """The static twin is a picture, and so is each end of each control."""
    assert "image/png" in panel._repr_mimebundle_()
    for control in panel.controls.values():
        for value in (ends(control)[0], ends(control)[-1]):
            control.value = value
            assert is_png(panel)
    panel.close()


@pytest.mark.parametrize("make", [
    lambda: widgets.cure_chooser("crowd", 12), lambda: widgets.arrival_explorer(6), lambda: widgets.pools_explorer(6),
    widgets.budget_explorer,
], ids=["cure", "arrivals", "pools", "budget"])
def test_the_controls_of_a_service_reach_their_ends_and_have_a_static_twin(make):
    panel = make()
    moves_to_its_ends(panel)


def test_a_cure_is_said_with_what_it_does_to_the_complaint():
    rows, _ = diagnose.diagnose("crowd", ["a larger batch"], 12)
    said = explore_service.cure_sentence("crowd", rows)
    assert said.startswith("a larger batch: tokens/s from ") and said.endswith(f"it {rows[1]['effect']}")
    assert {case.figure for case in diagnose.CASES.values()} <= set(explore_service.FIGURES)


def test_the_pools_say_whether_they_are_better_for_people():
    calm, noon = (explore_service.pools_at(2, rate, 120).get_suptitle() for rate in (8, 90))
    assert "times shorter with pools of 2 and 2" in calm.replace("\n", " ")
    assert "times longer with pools of 2 and 2" in noon.replace("\n", " ")


def test_a_smaller_budget_shortens_the_longest_gap_and_delays_the_late_prompt():
    runs = [explore_service.served_within(budget) for budget in (8196, 1024, 128)]
    assert len({len(moments) for moments, *_ in runs}) == 1  # the same tokens, at other moments
    longest, late = [max(gaps) for _, gaps, _ in runs], [ttft for *_, ttft in runs]
    assert longest == sorted(longest, reverse=True) and late == sorted(late)
    assert explore_service.budget_at(1024).get_suptitle().startswith("At most 1,024 tokens a step")


def test_the_schedules_sentence_counts_the_rows_of_its_step(records):
    for number, step in enumerate(records.steps, start=1):
        words = explore.step_sentence(records, number).replace(",", "").split()
        assert sum(int(word) for word in words if word.isdigit()) == step.rows
    assert "in prefill" in explore.step_sentence(records, 1)


def test_the_pool_holds_more_requests_as_pages_and_more_still_with_a_shared_beginning():
    slots, paged, shared = (explore.pool_after(30, *how) for how in (("slots",), ("paged",), ("paged", True)))
    assert slots.requests < paged.requests <= shared.requests
    assert shared.shared == 2 and paged.shared == slots.shared == 0
    assert slots.wasted_tokens > paged.wasted_tokens
    assert explore.pool_after(10_000).count("live") == 0  # all served: nothing is held


@pytest.mark.parametrize(("kv_format", "fits"), [("bf16", 111), ("int8", 220)])
def test_the_explorer_counts_as_the_capacity_sum_does(kv_format, fits):
    found = explore.explore_capacity("a100-80gb", "llama-3-8b", 4096, kv_format)
    assert found.fits == capacity("llama-3-8b", 80, None, 4, 4096, kv_format).max_concurrent
    assert abs(found.fits - fits) <= 1  # the articles' weights are 16 GB, the model's own 16.06
    assert sum(found.parts_gb.values()) == pytest.approx(80)
    doubled = found.doubled_at
    assert found.step_ms[found.rows.index(32)] < 2 * found.step_ms[0] < found.step_ms[found.rows.index(128)]
    assert 32 < doubled < 128


def test_what_does_not_fit_is_said_and_what_is_unknown_is_refused():
    with pytest.raises(ValueError, match="leave nothing of 16 GB"):
        explore.explore_capacity("t4", "llama-3-70b", 4096, "int8")
    explore.capacity_at("t4", "llama-3-70b", 4096, "int8")  # a sentence, not an error
    with pytest.raises(ValueError, match="unknown device 'abacus'; known: a100-80gb"):
        explore.explore_capacity("abacus", "llama-3-8b", 4096, "int8")


def step_costs() -> list[dict]:
    """Measured costs, as if: a draft adds a tenth of a plain step at batch 1, and a whole one at batch 8."""
    return [{"part": "step cost", "batch": batch, "k": k, "times_plain": 1 + each * k}
            for batch, each in ((1, 0.1), (8, 1.0)) for k in (0, 2, 4)]


def test_what_drafts_promise_is_tokens_a_round_over_the_cost_of_the_step():
    costs = step_costs()
    assert explore.promise(costs, 0.5, 1) == pytest.approx({0: 1, 2: 1.75 / 1.2, 4: 1.9375 / 1.4})
    assert max(explore.promise(costs, 1.0, 8).values()) == 1.0  # a full batch gains nothing, however good the drafts
    said = [explore.drafts_at(costs, a, batch).get_suptitle().replace("\n", " ") for a, batch in
            ((0.5, 1), (1.0, 1), (0.9, 8))]
    assert said[0].endswith("k = 2 is best, 1.46 times plain decoding")
    assert "k = 4 is best, 3.57 times" in said[1] and said[2].endswith("no draft pays")


def test_acceptance_and_batch_reach_their_ends_and_have_a_static_twin():
    panel = widgets.acceptance_explorer(step_costs(), batch=8)
    moves_to_its_ends(panel)


# -- drafts -------------------------------------------------------------------------------------------------------


class Letters:
    """A tokenizer whose every token is one letter."""

    def decode(self, ids):
        return "".join(chr(97 + id % 26) for id in ids)


@pytest.mark.parametrize("right", [True, False])
def test_rounds_add_up_to_the_answer_and_to_the_engines_own_count(right):
    model, prompt = tiny_model(), [5, 6, 7, 5, 6]
    answer = Engine(model).generate([prompt], SamplingParams(max_tokens=12))[0].token_ids
    watched = explore.Watched(ReplayProposer({tuple(prompt): answer}, lambda i: right))
    engine = Engine(model, speculator=Speculator(watched, 3))
    rounds = explore.draft_rounds(engine, watched, prompt, 12)
    tokens = [token for entry in rounds for token in entry.tokens]
    assert tokens == answer[: len(tokens)]
    speculation = metrics.summary(engine.records)["speculation"]
    assert sum(entry.accepted for entry in rounds) == speculation["accepted_tokens"]
    assert (speculation["accepted_tokens"] > 0) == right


def test_the_text_shows_who_wrote_what():
    rounds = [explore.DraftRound([], 0, [1]), explore.DraftRound([2, 3, 4], 1, [2, 9])]
    text = explore.rounds_html(Letters(), rounds, 2)
    assert ">c</span>" in text and "line-through'>de</span>" in text and text.count("struck out:") == 1
    assert "3 drafted, 1 accepted; 3 tokens in 2 forwards so far (1.50 a forward)" in text
    assert "line-through" not in explore.rounds_html(Letters(), rounds, 1)
    panel = widgets.draft_stepper(Letters(), rounds)
    first = panel.face.value
    panel.controls["shown"].value = 2
    assert panel.face.value == text != first and panel._repr_mimebundle_()["text/html"] == first


def test_an_ngram_proposer_can_be_watched():
    watched = explore.Watched(NgramProposer())
    assert watched.bytes_per_token == 0
