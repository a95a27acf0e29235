"""A run step by step: the states and the pools that are drawn are those of the records, and the pictures move."""

from __future__ import annotations

import base64
import io
from collections import Counter
from itertools import pairwise
from pathlib import Path

import nbformat
import pytest
from PIL import Image
from test_widgets import is_png
from tiny import tiny_model

from minillm import Engine, SamplingParams
from minillm.course.experiments.common import NoForward
from minillm.course.show import plots, step_by_step, widgets
from minillm.course.show.step_by_step import Run, Stretch, stretches
from minillm.ladder.quantized import kv_bytes_per_token
from minillm.load.config import ModelConfig

CONFIG = ModelConfig.preset("smollm2-135m")
PROMPTS, ANSWERS = (37, 44, 35, 46), (14, 16, 14, 6)
PAGE = Path(__file__).resolve().parent.parent / "notebooks/04_paged_kv.ipynb"


def played(blocks: int = 10, rows: int = 3, budget: int = 64, answers=ANSWERS) -> Run:
    """Four requests in a pool of so many blocks of 16 tokens."""
    engine = Engine(None, executor=NoForward(CONFIG), kv_format="fp32", prefix_cache=False, max_batch=rows,
                    max_step_tokens=budget, max_context=256, kv_memory=blocks * 16 * kv_bytes_per_token(CONFIG, "fp32"))
    prompts = [[100 * number + i for i in range(length)] for number, length in enumerate(PROMPTS, start=1)]
    return step_by_step.watch(engine, prompts, [SamplingParams(max_tokens=n, ignore_eos=True) for n in answers])


@pytest.fixture(scope="module")
def run() -> Run:
    return played()


def steps_in(found: list[Stretch], request: int) -> Counter:
    counted = Counter()
    for each in found:
        if each.request == request:
            counted[each.state] += each.end - each.start
    return counted


def test_the_states_of_a_request_follow_one_another_from_its_arrival_to_its_end(run):
    found, seconds = stretches(run.records, "step"), stretches(run.records)
    for number, record in enumerate(sorted(run.records.requests, key=lambda record: record.request_id), start=1):
        mine = [each for each in found if each.request == number]
        assert mine[0].start == 0 and all(a.end == b.start and a.state != b.state
                                          for a, b in pairwise(mine))
        timed = [each for each in seconds if each.request == number]
        assert timed[-1].end == pytest.approx(record.finish - run.records.began)
        waited = sum(each.end - each.start for each in timed if each.state == "queued")
        assert waited == pytest.approx(record.first_scheduled - record.arrival)


def test_the_states_count_the_rows_of_the_records(run):
    found = stretches(run.records, "step")
    kinds = Counter((id, "decode" if kind == "decode" else "prefill")
                    for step in run.records.steps for id, kind in zip(step.members, step.kinds, strict=True))
    for id, number in plots.arrival_numbers(run.records).items():
        counted = steps_in(found, number)
        assert [counted[state] for state in ("prefill", "decode")] == [kinds[id, state] for state in
                                                                     ("prefill", "decode")]
    assert sum(steps_in(found, number)["preempted"] for number in (1, 2, 3, 4)) == 2
    waiting = sum(step.waiting for step in run.records.steps)
    assert waiting == sum(steps_in(found, n)[state] for n in (1, 2, 3, 4) for state in ("queued", "preempted"))


def test_with_room_for_all_no_request_waits():
    found = stretches(played(blocks=64, rows=4, budget=512).records, "step")
    assert {each.state for each in found} == {"prefill", "decode"} and len(found) == 8


def test_each_pool_is_that_of_its_step(run):
    for step, pool in zip(run.records.steps, run.pools, strict=True):
        assert pool.count("live") == step.blocks_live and pool.used_tokens == step.kv_tokens
        numbers = plots.arrival_numbers(run.records)
        assert {holder for block in pool.blocks for holder in block.holders} == {numbers[id] for id in step.members}
    assert len({pool.blocks for pool in run.pools}) == len(run.pools)  # each step stores something


def test_an_engine_that_launches_ahead_shows_the_same_steps():
    """As on a GPU, where the next step is planned before the last one is reported."""
    runs = []
    for ahead in (False, True):
        engine = Engine(tiny_model(), kv_format="fp32", prefix_cache=False, max_batch=3, max_step_tokens=64,
                        kv_memory=10 * 16 * kv_bytes_per_token(tiny_model().config, "fp32"))
        engine.runs_ahead = ahead
        prompts = [[1 + (number + i) % 90 for i in range(length)] for number, length in enumerate(PROMPTS)]
        params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in ANSWERS]
        runs.append(step_by_step.watch(engine, prompts, params))
    plain, ahead = runs
    assert len(ahead.pools) == len(ahead.records.steps) and ahead.pools == plain.pools
    assert stretches(ahead.records, "step") == stretches(plain.records, "step")


def test_what_is_new_in_a_step_is_said(run):
    found = stretches(run.records, "step")
    said = [step_by_step.what_happens(run, found, step) for step in range(1, len(run.pools) + 1)]
    assert said[0] == "requests 1 and 2 prefill, requests 3 and 4 queued"
    assert [step for step, text in enumerate(said, start=1) if "3 preempted" in text] == [13]
    assert said[4] == "3 of 4 requests decode, 1 waits" and said[-1] == "request 4 finished"


def test_nothing_is_drawn_of_what_comes_after_a_step(run):
    for step in (1, 13, len(run.pools)):
        states, blocks = step_by_step.states_and_pool(run, step).axes
        bars = [bar.get_datalim(states.transData) for bar in states.collections]
        assert max(bar.x1 for bar in bars) == step
        ended = sum(each.end <= step for each in last_of_each(stretches(run.records, "step")))
        assert len(states.lines) == ended
        assert len(blocks.patches) >= len(run.pools[0].blocks)


def last_of_each(found: list[Stretch]) -> list[Stretch]:
    return list({each.request: each for each in found}.values())


def test_the_drawing_of_states_names_the_end_of_each(run):
    figure = step_by_step.request_states(run.records, "title", unit="step")
    words = [text.get_text() for text in figure.axes[0].texts]
    assert words == ["finished"] * 4


# -- it moves, with a kernel and without -----------------------------------------------------------


def animation_in(png: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(png)))


def pixels_of(animation: Image.Image) -> list[bytes]:
    frames = []
    for number in range(animation.n_frames):
        animation.seek(number)
        frames.append(animation.convert("RGB").tobytes())
    return frames


def test_the_slider_reaches_its_ends_and_the_twin_shows_every_step_once():
    run = played(answers=(3, 4, 3, 2))
    panel = widgets.run_stepper(run)
    slider = panel.controls["step"]
    assert (slider.min, slider.max) == (1, len(run.pools))
    first = bytes(panel.face.value)
    slider.value = slider.max
    assert is_png(panel) and bytes(panel.face.value) != first
    frames = pixels_of(animation_in(panel._repr_mimebundle_()["image/png"]))
    assert len(frames) == len(set(frames)) == len(run.pools)
    panel.close()


def test_the_page_keeps_a_small_animation():
    outputs = [output for cell in nbformat.read(PAGE, as_version=4).cells for output in cell.get("outputs", [])]
    pictures = [png for output in outputs if (png := output.get("data", {}).get("image/png"))]
    moving = [png for png in pictures if animation_in(png).n_frames > 12]
    assert len(moving) == 1 and len(moving[0]) < 400_000
