"""What the exercises draw is what the learner's code did, right or wrong."""

from __future__ import annotations

import pytest
import torch
from wrong_answers import Solution

from minillm.course.grading.exercises import find
from minillm.course.show.exercise_drawings import (
    attention_map,
    draft_tree,
    gantt,
    ladder_bars,
    pool_map,
    pool_of,
    segments,
    slots_read,
    step_timeline,
)


def texts(figure) -> list[str]:
    """All that is written in a figure."""
    own = [figure.get_suptitle()] if figure.get_suptitle() else []
    return own + [text.get_text() for ax in figure.axes for text in ax.texts]


def answer(name: str, task: int, old: str = "", new: str = ""):
    """The solution of a task, with a replacement in its cell."""
    solution = Solution(find(name))
    its = solution.exercise.tasks[task]
    assert old in solution.source(its)
    return solution.answer(its, solution.source(its).replace(old, new))


def test_attention_reads_the_places_of_its_text_up_to_each_token():
    read = slots_read(answer("07_paged_attention", 1), [5, 0, 3], 10, new=3, num_blocks=8, block_size=4)
    order = [20, 21, 22, 23, 0, 1, 2, 3, 12, 13]
    for row in range(3):
        assert sorted(torch.nonzero(read[row]).flatten().tolist()) == sorted(order[: 8 + row])


@pytest.mark.parametrize(
    ("old", "new", "counts"),
    [("> position  #", ">= position  #", [7, 8, 9]), ("> position  #", "> position + 1  #", [9, 10, 10]),
     ("scores.masked_fill(unseen[:, None], -torch.inf)", "scores", [10, 10, 10])],
)
def test_a_wrong_mask_shows_in_what_is_read(old, new, counts):
    attention = answer("07_paged_attention", 1, old, new)
    read = slots_read(attention, [5, 0, 3], 10, new=3, num_blocks=8, block_size=4)
    assert read.sum(1).tolist() == counts
    assert ", ".join(map(str, counts)) in texts(attention_map(attention, [5, 0, 3], 10))[0].replace("\n", " ")


def test_a_request_keeps_its_line_and_a_free_line_is_used_again():
    rows = [[(1, "prefill"), (2, "prefill")], [(2, "decode")], [(3, "prefill"), (2, "decode")], []]
    found = segments((i, i + 1, step) for i, step in enumerate(rows))
    assert {(bar.request, bar.line) for bar in found} == {(1, 0), (2, 1), (3, 0)}
    assert [bar.start for bar in found if bar.request == 2] == [0, 1, 2]
    assert "4 steps for 3 requests, of which at most 2" in texts(gantt(rows))[0].replace("\n", " ")


def test_steps_without_rows_draw_no_bar():
    for rows in ([], [[]]):
        gantt(rows)
    step_timeline({"nothing": [], "one": [(1.0, 1.5, [(1, "prefill")])]})


def test_a_pool_shows_who_holds_what():
    pool = pool_of(6, 4, {1: ([5, 0], 6), 2: ([5, 3], 8)}, cached=[1])
    assert [block.state for block in pool.blocks] == ["live", "cached", "free", "live", "free", "live"]
    assert pool.blocks[5].holders == (1, 2) and pool.blocks[0].filled == 2 and pool.blocks[3].filled == 4
    assert "3 held, 1 cached, 2 free" in texts(pool_map({"now": pool}))[0].replace("\n", " ")


def test_a_tree_of_drafts_has_every_word_once_and_counts_what_was_accepted():
    rounds = [(["first", "ship", "was"], ["first", "ship", "is"]), ([], ["met"]), (["by"], ["with"])]
    said = texts(draft_tree("the", rounds))
    assert "2 of 4 drafts accepted: 5 tokens in 3 steps" in said[0].replace("\n", " ")
    assert [said.count(word) for word in ("the", "first", "was", "is", "met", "by", "with")] == [1] * 7


def test_a_ladder_compares_with_its_ends():
    said = texts(ladder_bars({"one at a time": 10.0, "yours": 40.0, "the package's": 50.0}))
    assert "4.0 times the tokens/s of one at a time, 0.80 times those of the package's" in said[0].replace("\n", " ")
