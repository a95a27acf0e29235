"""Do the drawings of blocks, prefixes, numbers and drafts show what the records say?"""

from __future__ import annotations

import pytest
from matplotlib.colors import to_rgb

from minillm.course.show import plots
from minillm.course.show.cache_drawings import (
    Node,
    block_tables,
    draft_tree,
    grow,
    lanes_of,
    number_lines,
    prefix_tree,
    rejected_drafts,
)


def words(figure) -> list[str]:
    return [text.get_text() for ax in figure.axes for text in ax.texts]


def title_of(figure) -> str:
    return figure.get_suptitle().replace("\n", " ")


def test_each_block_of_a_text_is_joined_to_its_place_in_the_store():
    tables = [(33, [0, 4, 2]), (20, [3, 1])]
    figure = block_tables(tables, num_blocks=6, block_size=16)
    assert [word for word in words(figure) if "-" in word or word == "32"] == ["0-15", "16-31", "32", "0-15", "16-19"]
    ends = [int(line.get_xdata()[1]) for line in figure.axes[0].lines]
    assert ends == [0, 4, 2, 3, 1]
    assert title_of(figure).startswith("2 texts in 5 of 6 blocks")


def test_a_run_of_blocks_that_the_same_rows_hold_is_one_node():
    assert grow({0: [7, 8, 1], 1: [7, 8, 2], 2: [5]}) == [
        Node([7, 8], [0, 1], [Node([1], [0]), Node([2], [1])]), Node([5], [2])
    ]


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ({"a": [0, 1, 2, 3], "b": [0, 1, 2, 4]}, {"0 to 2: ×2", "3", "4", "a", "b"}),
        ({"a": [0, 1], "b": [2]}, {"0, 1", "2", "a", "b"}),  # nothing is shared
        ({"a": [0, 1], "b": [0]}, {"0: ×2", "1", "a", "b"}),  # one ends where the other goes on
        ({"a": [0, 1], "b": [0, 1]}, {"0, 1: ×2", "a, b"}),
    ],
)
def test_a_prefix_tree_counts_the_rows_of_each_run_and_names_every_row(tables, said):
    assert set(words(prefix_tree(tables, 16))) == said


def test_number_lines_count_the_values_that_are_told_apart():
    figure = number_lines({"coarse": ([0.0, 0.1, 0.9], [0.0, 1.0], [0.0, 0.0, 1.0])}, "title")
    assert figure.axes[0].get_title(loc="left") == "coarse: 3 numbers become 2 of 2 values"


def test_a_tree_of_drafts_has_the_answer_as_its_trunk_and_rejected_drafts_below():
    rounds = [([], [10]), ([11, 12, 9, 8], [11, 12, 13]), ([14], [14, 15])]
    figure = draft_tree(rounds, lambda token: f"{token}.", across=4)
    assert title_of(figure) == "6 tokens in 3 rounds: 3 of 5 drafts accepted"
    assert words(figure) == ["10.", "11.", "12.", "13.", "9.", "8.", "14.", "15."]
    blue = to_rgb(plots.COLOURS[0])
    accepted = [patch.get_facecolor()[:3] == blue for patch in figure.axes[0].patches]
    assert accepted == [False, True, True, False, False, False, True, False]


def test_branches_that_would_lie_on_each_other_go_to_lanes_of_their_own():
    assert lanes_of([(0, [1, 2]), (1, [3, 4, 5]), (2, [6]), (3, [7])]) == [
        (0, [1, 2], 0), (1, [3, 4, 5], 1), (2, [6], 0), (3, [7], 0)
    ]


def test_rejected_drafts_leave_the_answer_where_the_target_said_something_else():
    assert rejected_drafts([([], [1]), ([2, 9], [2, 3]), ([4], [4, 5]), ([8, 8], [6])]) == [(2, [9]), (5, [8, 8])]


def test_bars_stand_from_the_largest_to_the_smallest():
    figure = plots.sorted_bars({"a": [1.0, 3.0, 2.0], "b": [5.0, 4.0, 6.0]}, "title", "x", "y")
    heights = [[bar.get_height() for bar in ax.patches] for ax in figure.axes]
    assert heights == [[3.0, 2.0, 1.0], [6.0, 5.0, 4.0]] and words(figure) == ["number 1", "number 2"]


def test_an_unknown_error_is_hollow_and_a_part_apart_has_its_own_scale():
    rows = [{"scheme": "int4", "a_change_nats": 0.1, "a_change_error_nats": None, "b_change_nats": 9.0,
             "b_change_error_nats": 1.0}]
    left, right = plots.with_errors(rows, "scheme", {"a": "a", "b": "b"}, "title", "y", apart=["b"]).axes
    assert left.get_ylim()[1] < 1 < right.get_ylim()[1]
    faces = [[line.get_markerfacecolor() for line in ax.lines if line.get_marker() == "o" and len(line.get_xdata())]
             for ax in (left, right)]
    assert faces == [["white"], [plots.COLOURS[0]]]


def test_what_lines_are_compared_with_is_grey_and_named():
    figure = plots.curves({"a": ([1, 2], [3, 4])}, "title", "x", "y", level=("plain decoding", 1.0))
    (line,) = [line for line in figure.axes[0].lines if line.get_label() == "plain decoding"]
    assert line.get_color() == plots.GREY and list(line.get_ydata()) == [1.0, 1.0]
    assert "plain decoding" in [text.get_text() for text in figure.axes[0].get_legend().get_texts()]


def test_what_was_found_is_not_hatched_as_what_is_wasted_is():
    cases = [{"case": case, "prompt_tokens": 90, "computed": 90 - found, "found": found, "ttft_p50_ms": 5.0}
             for case, found in (("no sharing", 0), ("shared prefix", 60), ("changed", 0))]
    assert not any(bar.get_hatch() for bar in plots.prefix_bars(cases).axes[0].patches)
    wasted = plots.bars([{"kv": "slots", "used": 1, "wasted": 2}], "kv", {"used": "used", "wasted": "empty"}, "t", "MB")
    assert [bool(bar.get_hatch()) for bar in wasted.axes[0].patches] == [False, True]
