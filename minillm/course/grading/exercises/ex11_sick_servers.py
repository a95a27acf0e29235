"""Exercise 11: which limit a server has run into, and what helps.

The truth is how the servers were made, and what a treatment does to the complaint in virtual
time, on loads whose seeds the notebook does not show.
"""

from __future__ import annotations

import copy
from dataclasses import replace

from minillm.course.grading.servers import SERVERS, TREATMENTS, USUAL, complaint, examine, load
from minillm.course.grading.tasks import Exercise, Task, expect
from minillm.ladder.records import Records
from minillm.measure.capacity import GB

SEEDS = (11, 12)
CURED = 0.7  # of the complaint, at most, is left

diagnose = Task(
    "diagnose",
    "diagnose",
    hints=(
        "Each cause is a limit. For each, compute how much of it is used on average, and see which is nearest to 1.",
        "Rows over max_batch; live blocks over all blocks; prompt tokens over max_step_tokens. For the knee: the part "
        "of a step's time that the shortest step does not need.",
        "mean = lambda value: sum(value(s) * s.duration for s in steps) / busy; used = {'batch_cap': mean(rows) / "
        "max_batch, …, 'knee': 1 - shortest / mean(duration)}; return max(used, key=used.get).",
    ),
)
treat = Task(
    "treat",
    "treat",
    hints=(
        "Every cause but one is cured by a setting. Which setting moves the limit that is reached?",
        "A full batch wants a larger one. Full memory wants smaller tokens. Prompts that begin alike need not be "
        "computed again. Past the knee every setting is used up.",
        "A dictionary from cause to treatment, with 'second_server' for the one that no setting helps.",
    ),
)
EXERCISE = Exercise(
    name="11_sick_servers",
    title="Four sick servers",
    minutes=45,
    difficulty=3,
    importance=2,
    chapter="11_diagnose",
    tasks=(diagnose, treat),
)


def own(cause: str, seed: int) -> Records:
    """A server's records with a list of steps of their own, which an answer may spoil."""
    records = copy.copy(examine(cause, seed))
    records.steps = list(records.steps)
    return records


def says(answer, cause: str, others: tuple[str, ...]) -> None:
    """Expect this diagnosis where it is due, on both seeds, and not of the others."""
    for seed in SEEDS:
        expect(answer(own(cause, seed), SERVERS[cause].settings) == cause, f"a server of that kind, load {seed}")
    for other in others:
        got = answer(own(other, SEEDS[0]), SERVERS[other].settings)
        expect(got in SERVERS and got != cause, f"a server of another kind, load {SEEDS[0]}")


@diagnose.check(
    mistake="Compare rows with max_batch, on average over time: a queue alone does not say why it waits.",
    look="'The causes'",
)
def batch_cap(answer):
    """A full batch with memory to spare is the batch cap's fault."""
    says(answer, "batch_cap", ("memory", "prompts"))


@diagnose.check(
    mistake="The pool is blocks_live + blocks_cached + blocks_free, and only live blocks are taken for good.",
    look="'The causes'",
)
def memory(answer):
    """Live blocks near the size of the pool mean that memory is short."""
    says(answer, "memory", ("batch_cap", "prompts"))


@diagnose.check(
    mistake="Compare prompt_tokens with the budget max_step_tokens: beside the output tokens they always look many.",
    look="'The causes'",
)
def prompts(answer):
    """Steps full of prompt tokens mean that prompts are the work."""
    says(answer, "prompts", ("batch_cap", "memory"))


@diagnose.check(
    mistake="No limit is reached here, but a step takes a multiple of the shortest: the rows themselves are too many.",
    look="'The causes'",
)
def knee(answer):
    """Long steps with every limit far away are past the knee."""
    says(answer, "knee", ("batch_cap", "prompts"))


@diagnose.check(
    mistake="The settings tell these servers apart, but not others: the records say which limit is reached.",
    look="'The causes'",
)
def other_settings(answer):
    """It looks at the records: servers with other settings have the same faults."""
    capped, short = replace(USUAL, max_batch=16), replace(USUAL, max_batch=256, kv_memory=GB)
    for cause, settings, work in (("batch_cap", capped, (200, 60, 100, 60)), ("memory", short, (120, 16, 500, 120))):
        got = answer(settings.serve(load(*work, seed=SEEDS[0])).records, settings)
        expect(got == cause, f"max_batch {settings.max_batch}, {settings.kv_memory / GB:.0f} GB for keys and values")


@diagnose.check(
    mistake="The list of steps was changed, by sort or pop: other code reads them after you.",
    look="'The causes'",
)
def records_stay(answer):
    """The records stay as they were."""
    records = own("knee", SEEDS[0])
    before = list(records.steps)
    answer(records, SERVERS["knee"].settings)
    expect(list(map(id, records.steps)) == list(map(id, before)), "records.steps, after the call")


def cures(answer, cause: str) -> None:
    """Expect a treatment that leaves little of the complaint."""
    treatment = answer(cause)
    expect(treatment in TREATMENTS, f"the treatment for {cause!r}: is its name on the list?")
    before, after = complaint(cause, SEEDS[0]), complaint(cause, SEEDS[0], treatment)
    figure = SERVERS[cause].complaint
    asked = f"the treatment for {cause!r}: {figure} was {before:.3f}, and is {after:.3f} now"
    expect(after <= CURED * before, asked)


@treat.check(
    mistake="Memory and steps are hardly used: the only thing in the way is the number of rows that may run.",
    look="'Treatments'",
)
def cure_batch_cap(answer):
    """A capped batch is cured."""
    cures(answer, "batch_cap")


@treat.check(
    mistake="More rows are of no use without blocks to hold them: make a token's keys and values smaller.",
    look="'Treatments'",
)
def cure_memory(answer):
    """Short memory is cured."""
    cures(answer, "memory")


@treat.check(
    mistake="The same instructions are computed for every request; a bigger step computes them no faster.",
    look="'Treatments'",
)
def cure_prompts(answer):
    """Prompts are cured."""
    cures(answer, "prompts")


@treat.check(
    mistake="8-bit keys and a prefix cache are in use already, and fewer rows only move the wait into the queue.",
    look="'Treatments'",
)
def cure_knee(answer):
    """Past the knee is cured."""
    cures(answer, "knee")


@treat.check(
    mistake="A second server helps nearly everything, and doubles the bill: a setting would have done.",
    look="'Treatments'",
)
def cheapest(answer):
    """A second server only where nothing cheaper helps."""
    for cause in ("batch_cap", "memory", "prompts"):
        expect(answer(cause) in TREATMENTS and answer(cause) != "second_server", f"the treatment for {cause!r}")
