"""Do the drawings show what the pages' loops noted down, and does a diff show what changed?"""

from __future__ import annotations

import pytest

from minillm.course.show import drawings, page
from minillm.course.show.diff import diff, show_diff
from minillm.course.show.plots import idle_time

STEPS = [[(0, "a", False), (1, "b", False)], [(0, "a", False), (1, "b", True)], [(0, "c", False)]]


def bars(ax) -> list[tuple[float, float, float]]:
    """Left and right end, and line from 0, of every bar on these axes."""
    boxes = [path.get_extents() for bar in ax.collections for path in bar.get_paths()]
    return [(box.x0, box.x1, int(box.y0)) for box in boxes]


def test_each_steps_tokens_stand_at_their_positions_after_what_the_cache_holds():
    figure = drawings.fed_by_step({"rung 0": [(0, 3), (0, 4)], "rung 1": [(0, 3), (3, 1)]})
    again, kept = figure.axes
    assert {bar for bar in bars(again) if bar[0] < bar[1]} == {(0, 3, 0), (0, 4, 1)}
    assert {bar for bar in bars(kept) if bar[0] < bar[1]} == {(0, 3, 0), (0, 3, 1), (3, 4, 1)}
    assert figure.get_suptitle() == "rung 0 feeds 7 tokens; rung 1 feeds 4 tokens"


def test_a_requests_first_step_is_its_prompt_and_idle_rows_are_those_that_the_loop_noted():
    segments = drawings.slot_segments(STEPS)
    assert [(s.line, s.start, s.request, s.kind) for s in segments] == [
        (0, 0, 1, "prefill"), (1, 0, 2, "prefill"), (0, 1, 1, "decode"), (1, 1, 2, "idle"), (0, 2, 3, "prefill"),
    ]
    assert idle_time(segments) == 1


def test_slots_are_drawn_with_the_counts_of_each_run():
    figure = drawings.slots_by_step({"static": STEPS, "continuous": [step for step in STEPS if len(step) == 2][:1]})
    title = figure.get_suptitle().replace("\n", " ")
    assert title == "static: 3 steps, 1 idle slot-steps; continuous: 1 steps, 0 idle slot-steps"
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["0", "1"]


@pytest.mark.parametrize("rows, title", [
    ([(0, 4, 1), (1, 6, 1), (2, 0, 6)], "8 flat tokens and 18 keys: 33 of 144 pairs are looked at"),
    ([(3, 0, 2)], "2 flat tokens and 2 keys: 3 of 4 pairs are looked at"),
    ([(1, 5, 1)], "1 flat tokens and 6 keys: 6 of 6 pairs are looked at"),
])
def test_a_flat_token_sees_its_own_slot_up_to_itself(rows, title):
    assert drawings.flat_mask(rows).get_suptitle() == title


def test_a_stem_is_as_high_as_the_gap_before_its_token():
    figure = drawings.gaps({"whole": ([1.0, 2.0], [40.0, 900.0]), "chunks": ([1.0], [50.0])}, "A title")
    stems = [stem for ax in figure.axes for run in ax.collections for stem in run.get_paths()]
    heights = [stem.vertices[1].tolist() for stem in stems]
    assert heights == [[1.0, 40.0], [2.0, 900.0], [1.0, 50.0]]


def before(x):
    y = x + 1
    return y


def after(x):
    y = x + 2
    print(y)
    return y


def test_a_diff_is_the_second_function_whole_with_what_changed():
    dropped, added = ["-def before(x):", "-    y = x + 1"], ["+def after(x):", "+    y = x + 2", "+    print(y)"]
    assert diff(before, after).splitlines() == [*dropped, *added, "     return y"]
    assert show_diff(before, after).data == f"```diff\n{diff(before, after)}\n```"
    assert diff(before, before) == ""


def test_a_page_begins_with_names_that_are_there():
    assert not [name for name in page.__all__ if not hasattr(page, name)] and page.__all__ == sorted(page.__all__)
