"""E: speculative decoding."""

from __future__ import annotations

import math

from minillm.course.verdicts.reading import Rows, column, find, judged, less, more, near, over, reading
from minillm.course.verdicts.words import Claim, Missing, Verdict, every, true

OFTEN_RIGHT = 0.5  # the share of accepted drafts from which acceptance is high


def e1(rows: Rows) -> Verdict:
    """Every greedy run with drafts gives plain decoding's tokens, ties aside, and sampling passes its chi-square."""
    greedy = [row for row in rows if row["part"] in ("real", "replay")]
    column(greedy, "same_tokens")
    sampled = find(rows, part="sampling")
    measured = (
        f"{sum(row['same_tokens'] for row in greedy)} of {len(greedy)} greedy runs give the same tokens; "
        f"{sampled['draws']:,} draws: chi-square {sampled['chi_square']:.3g}, limit {sampled['limit']}"
    )
    same = all(row["same_tokens"] for row in greedy)
    return judged(measured, true(same and sampled["chi_square"] < sampled["limit"]))


def e2(rows: Rows) -> Verdict:
    """Direction: at one row, verifying four drafts and the newest token takes less than the middle between one step and
    five (2.2). Size, "little": within 1.25 of one step. Cause, memory: at the largest batch it costs more."""
    costs = [row for row in rows if row["part"] == "step cost" and row["k"] == 4]
    column(costs, "times_plain")
    one, many = (pick(costs, key=lambda row: row["batch"]) for pick in (min, max))
    alone, crowd = (reading(row, "times_plain") for row in (one, many))
    measured = (
        f"a step of 5 tokens a row in place of 1: {alone} times as long at batch {one['batch']} (claimed about 1), "
        f"{crowd} at batch {many['batch']}"
    )
    return judged(measured, less(alone, math.sqrt(5)), near(alone.value, 1), more(over(crowd, alone)), [alone])


def e3(rows: Rows) -> Verdict:
    """Direction: every case of one request in which half of the drafts or more are accepted is faster than plain
    decoding, and the best of them faster than the best of the others."""
    alone = [row for row in rows if row["part"] == "real" and row["batch"] == 1 and row["k"] != "adaptive"]
    column(alone, "speedup")
    right = [row for row in alone if row["acceptance"] >= OFTEN_RIGHT]
    wrong = [row for row in alone if row["acceptance"] < OFTEN_RIGHT]
    if not right or not wrong:
        raise Missing(f"cases on both sides of {OFTEN_RIGHT:.0%} of drafts accepted")
    best, least = (pick(right, key=lambda row: row["speedup"]) for pick in (max, min))
    other, worst = (pick(wrong, key=lambda row: row["speedup"]) for pick in (max, min))
    measured = "; ".join(f"{row['drafts']} on {row['prompts']}, k = {row['k']}, {row['acceptance']:.0%} accepted: "
                         f"{reading(row, 'speedup')} times as fast" for row in (best, least, other, worst))
    decided = [reading(row, "speedup") for row in (best, least)]
    return judged(measured, every(more(decided[1]), more(over(decided[0], reading(other, "speedup")))), by=decided)


def e4(rows: Rows) -> Verdict:
    """Direction: for each kind of real drafts of a fixed length, the gain at the largest batch is less than at one.
    Size, "costs": there each kind is slower than plain decoding."""
    fixed = [row for row in rows if row["part"] == "real" and row["k"] == 4]
    column(fixed, "speedup")
    gains = {}
    for row in fixed:
        gains.setdefault((row["drafts"], row["prompts"]), {})[row["batch"]] = reading(row, "speedup")
    gains = {kind: (by_batch[min(by_batch)], by_batch[max(by_batch)]) for kind, by_batch in gains.items()}
    largest = max(row["batch"] for row in fixed)
    listed = ", ".join(f"{drafts} on {prompts} {one.value:.2f} and {many.value:.2f}"
                       for (drafts, prompts), (one, many) in gains.items())
    adaptive = [row for row in rows if row["part"] == "real" and row["k"] == "adaptive" and row["batch"] == largest]
    adapted = ", ".join(f"{row['speedup']:.2f}" for row in adaptive)
    measured = f"times plain decoding at batch 1 and {largest}: {listed}; {adapted} at {largest} if the length adapts"
    falls = [less(over(many, one)) for one, many in gains.values()]
    return judged(measured, every(*falls), every(*(less(many) for _, many in gains.values())),
                  by=[each for pair in gains.values() for each in pair])


CLAIMS = (
    Claim("E1", "A draft proposes and the target verifies several tokens in one pass; the output is the same.", "",
          ("speculation",), e1),
    Claim("E2", "Verifying several tokens costs little more than giving one.", "", ("speculation",), e2, ("batch",)),
    Claim("E3", "Speculation lowers the latency of one request where drafts are often right.", "", ("speculation",), e3,
          ("acceptance",)),
    Claim("E4", "It costs throughput that a batch would have used (one article; the other: it hardly hurts).", "",
          ("speculation",), e4, ("batch",)),
)
