"""Exercise 9: which drafts are accepted, and what follows them.

The truth is small enough to be enumerated: prefixes compared one by one, distributions in
tenths, and the law of the first token summed over a grid of uniform numbers that is exact.
"""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor

from minillm.course.grading.tasks import Exercise, Task, close, expect, leaves_alone

TOLERANCE = 1e-4

verify_greedy = Task(
    "verify_greedy",
    "verify_greedy",
    hints=(
        "Walk along the drafts and compare each with what the target would have said at its place.",
        "Stop at the first that differs. The target's own token at that place is right anyway: it comes last.",
        "accepted = 0; while accepted < len(drafts) and drafts[accepted] == best[accepted]: accepted += 1. "
        "Then drafts[:accepted] and best[accepted].",
    ),
)
residual = Task(
    "residual",
    "residual",
    hints=(
        "Where q gave a token too often, drafts have used up its share: nothing is left there.",
        "max(0, p - q) for each token, divided by the sum of all. If that sum is 0, there is nothing to divide.",
        "left = (p - q).clamp_min(0); return left / left.sum() if left.sum() > 0 else p.",
    ),
)
verify_sampled = Task(
    "verify_sampled",
    "verify_sampled",
    hints=(
        "The same walk as in the greedy case, with a draw instead of a comparison.",
        "Draft i is accepted if u[i] < p[i, draft] / q[i, draft]. At the first that is not, draw from the residual of "
        "p[i] and q[i]; if there is none, from p after the last draft.",
        "for i, draft in enumerate(drafts): if u[i] * q[i, draft] >= p[i, draft]: return [*drafts[:i], "
        "draw(residual(p[i], q[i]), u_next)]. Behind the loop: [*drafts, draw(p[-1], u_next)].",
    ),
)
EXERCISE = Exercise(
    name="09_speculation",
    title="Accept a draft, or not",
    minutes=40,
    difficulty=2,
    importance=2,
    chapter="06_speculative",
    tasks=(verify_greedy, residual, verify_sampled),
)


# -- greedy ---------------------------------------------------------------------------------------


def greedy_is(answer, best: list[int], drafts: list[int]) -> None:
    """Expect the longest prefix of the drafts that the target agrees with, and its own token."""
    same = max(i for i in range(len(drafts) + 1) if drafts[:i] == best[:i])
    got, want = list(answer(list(best), list(drafts))), best[: same + 1]
    mistake = LAST if got and got[:-1] == want[:-1] else NO_LAST if got == want[:-1] else ""
    expect(got == want, f"the target says {best}, the drafts are {drafts}", mistake)


LAST = "The right drafts are accepted, but the token after them is not the target's own at that place."
NO_LAST = "The right drafts are accepted, but the target's own token, which follows them, is missing."


@verify_greedy.check(
    mistake="The first draft must be compared too, and when it is wrong the target's token takes its place.",
    look="'Greedy'",
)
def first_wrong(answer):
    """A wrong first draft leaves the target's own token."""
    greedy_is(answer, [7, 3, 9], [4, 3])
    greedy_is(answer, [7, 4, 9], [4, 9])


@verify_greedy.check(
    mistake="The forward also gave the target's token after the last draft; with k right drafts a step gives k + 1.",
    look="'Greedy'",
)
def all_right(answer):
    """Right drafts are followed by one token more."""
    greedy_is(answer, [7, 3, 9], [7, 3])
    greedy_is(answer, [5, 5, 5, 5], [5, 5, 5])


@verify_greedy.check(
    mistake="Behind a wrong draft the target was asked about a text that does not exist: later matches mean nothing.",
    look="'Greedy'",
)
def stops(answer):
    """The first wrong draft ends it."""
    greedy_is(answer, [7, 3, 9, 5], [7, 8, 9])
    greedy_is(answer, [1, 2, 3, 4, 6], [1, 2, 5, 4])


@verify_greedy.check(
    mistake="A row without drafts gets one token, the target's own.",
    look="'Greedy'",
)
def no_drafts(answer):
    """Without drafts it is plain decoding."""
    greedy_is(answer, [6], [])


WRITTEN = "The answer was written into what was passed in (append, pop, sub_, an assignment): make a new one."


@verify_greedy.check(mistake=WRITTEN, look="'Greedy'")
def lists_stay(answer):
    """The lists stay as they were."""
    leaves_alone(answer, [7, 3, 9], [7, 4], asked="the target says [7, 3, 9], the drafts are [7, 4]: both lists")


# -- residual -------------------------------------------------------------------------------------


def tenths(*numbers: int) -> Tensor:
    """A distribution written in tenths."""
    return torch.tensor(numbers, dtype=torch.float32) / 10


@residual.check(
    mistake="The residual is p - q where that is above 0: not q - p, not |p - q|, and nothing below 0.",
    look="'What is left over'",
)
def support(answer):
    """Only tokens that p gives more often than q are left."""
    got = answer(tenths(4, 3, 2, 1), tenths(1, 2, 5, 2)).tolist()
    expect(len(got) == 4 and got[0] > 0 and got[1] > 0, "p = .4 .3 .2 .1, q = .1 .2 .5 .2: the first two tokens")
    expect(got[2] == 0 and got[3] == 0, "p = .4 .3 .2 .1, q = .1 .2 .5 .2: the last two tokens")


@residual.check(
    mistake="What is left over must be divided by its sum before a token can be drawn from it.",
    look="'What is left over'",
)
def normalised(answer):
    """It is a distribution: its sum is 1."""
    got = answer(tenths(4, 3, 2, 1), tenths(1, 2, 5, 2))
    expect(close(sum(got.tolist()), 1.0, TOLERANCE), "the sum for p = .4 .3 .2 .1, q = .1 .2 .5 .2")


@residual.check(
    mistake="The shares are those of p - q, not of p: a token that q covers in part counts with the rest.",
    look="'What is left over'",
)
def proportions(answer):
    """Tokens keep the proportions of what is left."""
    for p, q in (((4, 3, 2, 1), (1, 2, 5, 2)), ((2, 8, 0), (6, 0, 4)), ((5, 1, 4), (3, 7, 0))):
        left = [max(0, a - b) for a, b in zip(p, q, strict=True)]
        want = [number / sum(left) for number in left]
        expect(close(answer(tenths(*p), tenths(*q)), want, TOLERANCE), f"p = {p} and q = {q}, in tenths")


@residual.check(mistake=WRITTEN, look="'What is left over'")
def distributions_stay(answer):
    """Both distributions stay as they were."""
    for p in (tenths(4, 3, 2, 1), tenths(1, 2, 5, 2)):
        leaves_alone(answer, p, tenths(1, 2, 5, 2), asked="p and q, once different and once equal")


@residual.check(
    mistake="Where p and q are equal nothing is left over, and divided by its sum, 0, it is NaN: p is asked for then.",
    look="'What is left over'",
)
def equal(answer):
    """Where p and q are equal it gives p."""
    expect(close(answer(tenths(3, 6, 1), tenths(3, 6, 1)), [0.3, 0.6, 0.1], TOLERANCE), "p = q = .3 .6 .1")


# -- sampled --------------------------------------------------------------------------------------


def rows(*distributions: tuple[int, ...]) -> Tensor:
    """Distributions written in tenths, one a row."""
    return torch.stack([tenths(*numbers) for numbers in distributions])


@verify_sampled.check(
    mistake="The draft x is accepted if u < p(x) / q(x): not u < p(x), and not the other way up.",
    look="'Sampled'",
)
def ratio(answer):
    """A draft is accepted with probability p / q."""
    p, q = rows((4, 2, 4), (4, 2, 4)), rows((2, 5, 3))  # draft 1: p / q is 0.4
    for u, accepted in ((0.35, True), (0.45, False)):
        got = list(answer(p.clone(), q.clone(), [1], [u], 0.1))
        expect((got[0] == 1) == accepted, f"p(x) = .2, q(x) = .5, u = {u}")


@verify_sampled.check(
    mistake="Where p(x) >= q(x) the ratio is 1 or more, and every u below 1 accepts.",
    look="'Sampled'",
)
def always(answer):
    """What the target says at least as often is always accepted."""
    p, q = rows((1, 6, 3), (1, 6, 3)), rows((4, 3, 3))
    for draft in (1, 2):
        got = answer(p.clone(), q.clone(), [draft], [0.999], 0.05)
        expect(got[0] == draft, f"p = .1 .6 .3, q = .4 .3 .3, draft {draft}, u = .999")


@verify_sampled.check(
    mistake="u can be exactly 0: with <= in place of < a token with p(x) = 0 is accepted then.",
    look="'Sampled'",
)
def never(answer):
    """What the target never says is never accepted."""
    p, q = rows((5, 0, 5), (5, 0, 5)), rows((2, 6, 2))
    expect(answer(p.clone(), q.clone(), [1], [0.0], 0.1)[0] != 1, "p(x) = 0, q(x) = .6, u = 0")


@verify_sampled.check(
    mistake="After k accepted drafts comes one more token, drawn from p[k]: the row after the last draft.",
    look="'Sampled'",
)
def bonus(answer):
    """Accepted drafts are followed by one draw from p behind them."""
    p = rows((0, 0, 5, 5), (0, 5, 5, 0), (3, 7, 0, 0))
    q = rows((0, 0, 5, 5), (0, 5, 5, 0))
    for u_next, last in ((0.2, 0), (0.4, 1), (0.9, 1)):
        got = list(answer(p.clone(), q.clone(), [3, 2], [0.5, 0.5], u_next))
        asked = f"p = q at both drafts, p = .3 .7 0 0 behind them, u_next = {u_next}"
        expect(got[:2] == [3, 2], asked, "Where p and q are equal the ratio is 1: every draft is accepted, and stays.")
        expect(got == [3, 2, last], asked)
    expect(list(answer(p[2:].clone(), q[:0], [], [], 0.9)) == [1], "no drafts, p = .3 .7 0 0, u_next = .9")


@verify_sampled.check(
    mistake="Drafts after a rejected one continue a text that does not exist: they are not looked at.",
    look="'Sampled'",
)
def ends(answer):
    """The first rejected draft ends it."""
    p = rows((5, 5, 0, 0), (1, 0, 9, 0), (0, 0, 5, 5), (2, 2, 3, 3))
    q = rows((5, 5, 0, 0), (1, 9, 0, 0), (0, 0, 5, 5))
    got = list(answer(p.clone(), q.clone(), [1, 1, 3], [0.3, 0.6, 0.3], 0.5))
    asked = "3 drafts, of which the second has p(x) = 0"
    expect(got[:1] == [1], asked, "The first draft, which was accepted, is not in the answer.")
    expect(len(got) == 2, asked)


@verify_sampled.check(
    mistake="Draw from the residual of p and q at the rejected place, not from p, nor from another place's row.",
    look="'Sampled'",
)
def from_residual(answer):
    """After a rejection the token comes from what is left over there."""
    p = rows((0, 0, 5, 5), (4, 3, 2, 1), (0, 0, 0, 10))
    q = rows((0, 0, 5, 5), (1, 2, 5, 2))  # what is left at place 1 is 3 : 1 : 0 : 0
    for u_next, last in ((0.3, 0), (0.6, 0), (0.7, 0), (0.8, 1), (0.95, 1)):
        got = list(answer(p.clone(), q.clone(), [2, 2], [0.1, 0.9], u_next))
        expect(got == [2, last], f"draft 2 of 2 rejected at p = .4 .3 .2 .1, q = .1 .2 .5 .2; u_next = {u_next}")


@verify_sampled.check(mistake=WRITTEN, look="'Sampled'")
def inputs_stay(answer):
    """What is passed in stays as it was."""
    p, q = rows((0, 0, 5, 5), (4, 3, 2, 1), (0, 0, 0, 10)), rows((0, 0, 5, 5), (1, 2, 5, 2))
    for u in ([0.1, 0.9], [0.1, 0.1]):
        leaves_alone(answer, p, q, [2, 2], u, 0.3, asked=f"p, q, drafts and u, with u = {u}")


@verify_sampled.check(
    mistake="Over all drafts and draws the first token's frequencies are not p: acceptance and residual must fit.",
    look="'Why it is exact'",
)
def law(answer):
    """The first token has the target's distribution, whatever drafted it."""
    p, q = (4, 3, 2, 1), (1, 2, 5, 2)
    frequency = [0.0] * 4
    grid, fine = [(i + 0.5) / 10 for i in range(10)], [(i + 0.5) / 8 for i in range(8)]  # p / q, and 3 : 1, are exact
    for draft, u, u_next in product(range(4), grid, fine):
        token = answer(rows(p, (10, 0, 0, 0)), rows(q), [draft], [u], u_next)[0]
        frequency[token] += q[draft] / 10 / len(grid) / len(fine)
    expect(close(frequency, [number / 10 for number in p], 1e-3), "p = .4 .3 .2 .1, q = .1 .2 .5 .2, all u and u_next")
