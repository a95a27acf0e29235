"""Exercise 12: an order of prompts that beats first come, first served.

Orders are judged by what they do: by hand on a few prompts, and in virtual time on loads whose
seeds the notebook does not show. The scheduler underneath is the package's own.
"""

from __future__ import annotations

from minillm.course.grading.queueing import Prompt, given, load, rush, serve
from minillm.course.grading.tasks import Exercise, Task, expect

SEEDS = (4, 7, 21)
LOWER = 0.75  # p99 of the learner's order over that of first come, first served
AS_MANY = 0.98  # tokens per second, likewise
PATIENCE_S = 4.0

order_prompts = Task(
    "order_prompts",
    "order_prompts",
    hints=(
        "Who suffers from one long document in front of them? And who would, if short ones always went first?",
        "Shortest first ruins the longest wait. Let every second of waiting count: weigh how long a prompt has waited "
        "against how much of it is left.",
        "Sort by (now - prompt.arrival + 0.1) / prompt.left, the largest first: a question of 300 tokens gets ahead "
        "quickly, a document more slowly, but surely. Without the 0.1 all that have just come are alike.",
    ),
)
EXERCISE = Exercise(
    name="12_beat_the_scheduler",
    title="Beat the scheduler",
    minutes=45,
    difficulty=3,
    importance=1,
    chapter="03_continuous_batching",
    tasks=(order_prompts,),
)


@order_prompts.check(
    mistake="An order holds each of the prompts once: nobody may be dropped, not even a very long one.",
    look="'The rules'",
)
def everybody(answer):
    """Every prompt comes back, once."""
    prompts = [Prompt(1, 2.0, 300, 300), Prompt(2, 2.5, 16_000, 9_000), Prompt(3, 2.5, 16_000, 16_000)]
    for some in (prompts, prompts[:1], prompts[::-1]):
        got = list(answer(list(some), 3.0))
        expect(sorted(p.number for p in got) == sorted(p.number for p in some), f"{len(some)} prompts, one of 16,000")


NO_TIME = "Both have waited for 0 seconds: what is divided, or multiplied, by that no longer tells them apart."


@order_prompts.check(
    mistake="The longer one still goes first: then a question waits behind a document that came no earlier.",
    look="'What to gain'",
)
def shorter_first(answer):
    """Of two that came together, the shorter one goes first."""
    for long, short in ((4_000, 200), (900, 300)):
        got = answer([Prompt(1, 5.0, long, long), Prompt(2, 5.0, short, short)], 5.5)
        expect(got[0].number == 2, f"prompts of {long} and {short} tokens, both half a second old")
        got = answer([Prompt(1, 5.0, long, long), Prompt(2, 5.0, short, short)], 5.0)
        expect(got[0].number == 2, f"prompts of {long} and {short} tokens, both of this very moment", NO_TIME)


@order_prompts.check(
    mistake="A document that is computed but for its last piece is nearly out of the way: look at left, not at tokens.",
    look="'What a server sees'",
)
def what_is_left(answer):
    """What is left counts, not what was asked."""
    got = answer([Prompt(1, 5.0, 600, 600), Prompt(2, 5.0, 16_000, 200)], 5.5)
    expect(got[0].number == 2, "a prompt with 600 of 600 tokens left, and one with 200 of 16,000 left, equally old")


@order_prompts.check(
    mistake="The list was sorted in place: sorted() makes a new one.",
    look="'The rules'",
)
def left_alone(answer):
    """The list that was passed in stays as it was."""
    prompts = [Prompt(1, 5.0, 900, 900), Prompt(2, 5.1, 500, 500), Prompt(3, 5.2, 100, 100)]
    answer(prompts, 6.0)
    expect([p.number for p in prompts] == [1, 2, 3], "three prompts, looked at after the call")


@order_prompts.check(
    mistake="While short prompts keep coming, the long one starves: the longer it has waited, the more it must count.",
    look="'What to lose'",
)
def nobody_starves(answer):
    """Nobody waits for ever."""
    longest = serve(answer, rush()).longest_s
    expect(longest <= PATIENCE_S, f"one document and 120 questions behind it: somebody waited {longest:.1f} s")


@order_prompts.check(
    mistake="Waiting counts so much, or so little, that questions behind a document wait about as long as before.",
    look="'What to gain'",
)
def lower_p99(answer):
    """The p99 is a quarter lower, and the throughput the same."""
    for number, seed in enumerate(SEEDS, 1):
        score, first_come = serve(answer, load(seed)), given(seed)
        expect(score.p99_s <= LOWER * first_come.p99_s, f"load {number} of {len(SEEDS)}: p99 {score.p99_s:.2f} s")
        as_many = score.tokens_per_s >= AS_MANY * first_come.tokens_per_s
        expect(as_many, f"load {number} of {len(SEEDS)}: {score.tokens_per_s:.0f} tokens/s")
