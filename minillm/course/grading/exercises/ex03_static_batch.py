"""Exercise 3: a static batch and its idle slots."""

from __future__ import annotations

import random
from functools import cache

from minillm.course.experiments.common import count
from minillm.course.grading.tasks import Exercise, Task, expect, leaves_alone
from minillm.ladder.records import StepRecord
from minillm.load.config import ModelConfig
from minillm.measure.workload import WorkItem

SMALL = ModelConfig(97, 16, 16, 1, 2, 1, 8)


@cache
def engines_steps(lengths: tuple[int, ...], batch: int) -> list[StepRecord]:
    """What the package's own engine does, with its static policy and without a model."""
    items = [WorkItem(0.0, [1], max_tokens=length) for length in lengths]
    return count(SMALL, items, batching="static", max_batch=batch).steps


def members(step: StepRecord) -> list[int]:
    """Who has a row, as numbers: the engine calls its requests request-0, request-1 and so on."""
    return [int(name.removeprefix("request-")) for name in step.members]


CHANGED = "The caller's list was changed (by pop, del or sort): work on a copy."


def draws(seed: int, number: int = 6) -> list[tuple[list[int], int]]:
    """Lengths and batch sizes, drawn."""
    draw = random.Random(seed)
    return [([draw.randint(1, 9) for _ in range(draw.randint(1, 11))], draw.randint(1, 5)) for _ in range(number)]


def shown(lengths: list[int], batch: int) -> str:
    """What was asked, for a learner to read."""
    return f"lengths {lengths}, batches of {batch}"


static = Task(
    "run_static", "run_static",
    hints=(
        "Two loops: over the batches, and over the steps of one batch. Who is in a batch, and how many steps has it?",
        "range(0, len(lengths), batch) gives the first request of each batch. A batch runs as many steps as its "
        "longest answer has tokens.",
        "In step number `made` of a batch (from 0), request r is idle if made >= lengths[r].",
    ),
)


@static.check(
    mistake="A single request must give one step for each of its tokens, with one row (0, False) in each.",
    look="'Running'",
)
def alone(run_static):
    """A request alone has one row for each of its tokens."""
    for length in (1, 4):
        steps = [[tuple(row) for row in step] for step in run_static([length], 3)]
        expect(steps == [[(0, False)] for _ in range(length)], shown([length], 3))


@static.check(
    mistake="The batch ends with another row than its longest: with the first, the shortest, or the mean.",
    look="'Ending'",
)
def until_the_longest(run_static):
    """A batch runs until its longest has ended."""
    for lengths in ([2, 7], [7, 2], [3, 9, 5]):
        steps = run_static(list(lengths), 3)
        expect(len(steps) == len(engines_steps(tuple(lengths), 3)), f"{shown(lengths, 3)}: how many steps")


@static.check(
    mistake="A finished row leaves the batch, or is called idle a step early or late: it is idle in each step before "
    "which it had all its tokens.",
    look="'Running'",
)
def finished_rows_stay(run_static):
    """A finished row stays, and is idle."""
    for lengths in ([2, 6], [6, 1, 4]):
        steps, truth = run_static(list(lengths), 3), engines_steps(tuple(lengths), 3)
        rows = [len(step) for step in steps]
        expect(rows == [step.rows for step in truth], f"{shown(lengths, 3)}: rows in each step")
        idle = [sum(bool(row[1]) for row in step) for step in steps]
        expect(idle == [step.idle_rows for step in truth], f"{shown(lengths, 3)}: idle rows in each step")
        ends = [sum(not row[1] for step in steps for row in step if row[0] == i) for i in range(len(lengths))]
        expect(ends == lengths, f"{shown(lengths, 3)}: steps in which each request is not idle")


@static.check(
    mistake="A waiting request joins while a batch runs (that is continuous batching), or batches overlap.",
    look="'Filling'",
)
def nobody_joins(run_static):
    """Nobody joins a batch that runs."""
    lengths = [1, 5, 3, 3]
    got = [sorted(row[0] for row in step) for step in run_static(list(lengths), 2)]
    truth = [members(step) for step in engines_steps(tuple(lengths), 2)]
    expect(got == truth, f"{shown(lengths, 2)}: who is in each step")


@static.check(
    mistake="The requests that do not fill a batch are lost, or the last batch is filled up with rows of nobody.",
    look="'Ending'",
)
def small_last_batch(run_static):
    """The last batch may be smaller, and nobody is left out."""
    for lengths, batch in (([2, 2, 2, 5, 1], 3), ([4], 8), ([], 4)):
        got = [sorted(row[0] for row in step) for step in run_static(list(lengths), batch)]
        truth = [members(step) for step in engines_steps(tuple(lengths), batch)] if lengths else []
        expect(got == truth, f"{shown(lengths, batch)}: who is in each step")


@static.check(
    mistake="On some lengths the steps are not those of the package's own engine: are rows in order of their numbers?",
    look="'The steps of static batches'",
)
def any_lengths(run_static):
    """It is right for any lengths, and leaves the list alone."""
    for lengths, batch in draws(seed=3):
        given = list(lengths)
        steps, truth = run_static(given, batch), engines_steps(tuple(lengths), batch)
        expect(given == lengths, f"{shown(lengths, batch)}: the list after the call", CHANGED)
        expect([[row[0] for row in step] for step in steps] == [members(step) for step in truth],
               f"{shown(lengths, batch)}: who is in each step, in order")
        expect([sum(bool(row[1]) for row in step) for step in steps] == [step.idle_rows for step in truth],
               f"{shown(lengths, batch)}: idle rows in each step")


idle = Task(
    "idle_slot_steps", "idle_slot_steps",
    hints=(
        "Go over all rows of all steps.",
        "True counts as 1 in a sum.",
        "sum(idle for step in steps for request, idle in step)",
    ),
)


@idle.check(
    mistake="Count the rows whose second entry is True; not the rows that work, and not the requests.",
    look="'Idle slot-steps'",
)
def counts_idle(idle_slot_steps):
    """Counts idle rows."""
    steps = [[(0, False), (1, False), (2, False)], [(0, False), (1, True), (2, False)], [(0, False), (1, True)]]
    expect(idle_slot_steps(steps) == 2, "three steps, in which request 1 is idle in the last two")


@idle.check(
    mistake="A step with several idle rows is counted once; each idle row is a slot-step.",
    look="'Idle slot-steps'",
)
def several_in_a_step(idle_slot_steps):
    """Counts every idle row of a step."""
    steps = [[(0, False), (1, True), (2, True), (3, True)]] * 4
    expect(idle_slot_steps(steps) == 12, "four steps with three idle rows each")


@idle.check(
    mistake="Where no row is idle the count is 0, also for no steps at all.",
    look="'Idle slot-steps'",
)
def nothing_idle(idle_slot_steps):
    """Finds nothing where nothing is idle."""
    counts = [idle_slot_steps([[(0, False), (1, False)]] * 5), idle_slot_steps([])]
    expect(counts == [0, 0], "five steps of two working rows; no steps")


returned = Task(
    "returned_after", "returned_after",
    hints=(
        "How many steps does one batch take? And how many have run before it starts?",
        "Keep a running sum of the batches' longest lengths. All requests of a batch get the same number.",
        "passed += max(group); result += [passed] * len(group)",
    ),
)


def left_after(lengths: list[int], batch: int) -> list[int]:
    """The last step, counted from 1, in which the engine carries each request."""
    steps = engines_steps(tuple(lengths), batch) if lengths else []
    return [max(i for i, step in enumerate(steps, 1) if request in members(step)) for request in range(len(lengths))]


@returned.check(
    mistake="In a static batch an answer comes back when the longest has ended: not with its own last token, and not "
    "after all of them one behind the other.",
    look="'When the answer comes back'",
)
def waits_for_the_longest(returned_after):
    """A short answer waits for the longest of its batch."""
    for lengths in ([6], [2, 6], [5, 1, 3]):
        expect(list(returned_after(list(lengths), 4)) == left_after(lengths, 4), shown(lengths, 4))


@returned.check(
    mistake="Each batch is counted from 0; the steps of the batches before it come on top.",
    look="'When the answer comes back'",
)
def waits_for_batches_before(returned_after):
    """A batch waits for the batches before it."""
    for lengths, batch in (([3, 2, 4, 1], 2), ([2, 2, 9], 1), ([1, 1, 1, 1, 8, 3], 2)):
        expect(list(returned_after(list(lengths), batch)) == left_after(lengths, batch), shown(lengths, batch))


@returned.check(
    mistake="There are more or fewer numbers than requests: a last batch that is not full was filled up, or lost.",
    look="'When the answer comes back'",
)
def one_for_each(returned_after):
    """Every request has an answer."""
    for lengths, batch in [([2, 4, 3, 1, 6], 2), *draws(seed=4), ([], 3)]:
        got = list(returned_after(list(lengths), batch))
        expect(len(got) == len(lengths), f"{shown(lengths, batch)}: how many numbers")
        expect(got == left_after(lengths, batch), shown(lengths, batch), "On some lengths the numbers are not right.")


@returned.check(mistake=CHANGED, look="'When the answer comes back'")
def list_stays(returned_after):
    """The list of lengths stays as it was."""
    leaves_alone(returned_after, [2, 4, 3, 1, 6], 2, asked=shown([2, 4, 3, 1, 6], 2))


EXERCISE = Exercise(
    "03_static_batch", "A static batch and its idle slots", 25, 1, "02_static_batching", (static, idle, returned),
    importance=2,
)
