"""B: what a batch buys, and what the policy that fills it is worth."""

from __future__ import annotations

from itertools import pairwise

from minillm.course.experiments.batching import REQUESTS_A_CLIENT, knee_of, knees_of, power
from minillm.course.verdicts.reading import (
    Reading,
    Rows,
    barely,
    column,
    digits,
    exponent,
    find,
    inside,
    judged,
    less,
    more,
    near,
    not_more,
    over,
    ratio,
    reading,
    times,
    within_turns,
)
from minillm.course.verdicts.words import Claim, TooSmall, Verdict, every, true

CURVE = {1: 40, 8: 290, 32: 980, 64: 1400}  # the articles' tokens/s by rows
REQUESTS_THAT_TELL = 32  # of a comparison of policies


def b1(rows: Rows) -> Verdict:
    """Direction: eight rows give more tokens/s than one. Size: 8 times the output within 1.25, and a step of 1.2 times
    within 1.25."""
    one, eight = find(rows, rows=1), find(rows, rows=8)
    gain, step = ratio(eight, one, "tokens_per_s"), ratio(eight, one, "step_ms")
    measured = (f"8 rows give {gain} times the output in {step} times the step (claimed 8 in 1.2)"
                + (barely(gain.value, 8 / 1.25) or barely(step.value, 1.2 * 1.25)))
    return judged(measured, more(gain), every(near(gain.value, 8), near(step.value, 1.2)), by=[gain])


def b2(rows: Rows) -> Verdict:
    """Direction: 32 rows give more in total than one, and less each. Size: the total at 8, 32 and 64 rows, over one
    row's, within 1.25 of the articles' 7.3, 24.5 and 35."""
    one, many = find(rows, rows=1), find(rows, rows=32)
    gains = {row["rows"]: ratio(row, one, "tokens_per_s") for row in rows if row["rows"] in CURVE and row["rows"] > 1}
    each = Reading(*(value / 32 for value in (gains[32].value, gains[32].low, gains[32].high)), gains[32].recorded)
    listed = ", ".join(f"{number}: {gain} (claimed {CURVE[number] / CURVE[1]:.3g})" for number, gain in gains.items())
    measured = (f"times the tokens/s of one row, by rows: {listed}; among 32 each runs at {each} of its speed alone "
                f"(claimed {CURVE[32] / 32 / CURVE[1]:.2f}), {digits(many['tokens_per_s'])} tokens/s in all")
    size = every(*(near(gain.value, CURVE[number] / CURVE[1]) for number, gain in gains.items()))
    return judged(measured, every(more(gains[32]), less(each)), size, by=gains.values())


def b3(rows: Rows) -> Verdict:
    """Direction: past the last client that may be the knee (`knees_of`, or `knee_of` within its spread) latency grows,
    and by more than throughput, in per cent. Size: latency as clients to the 0.7 or more, throughput to the 0.3 or less
    (steps of a + b n seconds give 0.72 and 0.28 over three doublings), the knee from 10 to 99. Too small: fewer than 8
    requests a client or three quarters of the clients running on average, or an end before twice the knee."""
    column(rows, "tokens_per_s")
    rows = sorted(({**row, "power": power(row)} for row in rows), key=lambda row: row["clients"])
    last, knees = rows[-1], may_be_the_knee(rows)
    first, past = knees[0]["clients"], knees[-1]
    check_loop(last, past["clients"])
    waits, faster = (ratio(last, past, name) for name in ("itl_p50_ms", "tokens_per_s"))
    growth = over(waits, faster)
    growth = growth if growth.recorded else times(growth.value)
    slower, quicker = (exponent(last["clients"] / past["clients"], each) for each in (waits, faster))
    where = f"{first}" if first == past["clients"] else f"{first} to {past['clients']}"
    measured = (
        f"knee at {where} clients (claimed: tens), {past['tokens_per_s']:,.0f} tokens/s; from there to "
        f"{last['clients']} latency grows as clients to the {slower}, throughput to the {quicker} (claimed about 1 "
        f"and 0): {growth} times as much"
    )
    tens = every(*(inside(row["clients"], 10, 99) for row in knees))
    size = every(tens, inside(slower.value, 0.7, 1.3), true(quicker.value <= 0.3))
    return judged(measured, every(more(growth), more(waits)), size, by=[waits])


def may_be_the_knee(rows: Rows) -> list[dict]:
    """By the resamples of a run; without them, the rows whose power overlaps the highest."""
    if all(row.get("knee_share") is not None for row in rows):
        return knees_of(rows)
    best = reading(knee_of(rows), "power")
    return [row for row in rows if reading(row, "power").high >= best.low]


def check_loop(last: dict, knee: int) -> None:
    """TooSmall where the runs are too short or end too early to show a knee."""
    asked, clients = last.get("requests_per_client", REQUESTS_A_CLIENT), last["clients"]
    if asked < REQUESTS_A_CLIENT or last.get("mean_rows", clients) < 0.75 * clients:
        raise TooSmall(f"of {clients} clients {last.get('mean_rows', clients):.0f} ran on average: most of the run is "
                       f"its start and end; at least {REQUESTS_A_CLIENT} requests for each client would tell")
    if clients < 2 * knee:
        raise TooSmall(f"the knee may be at {knee} clients and the run ends at {clients}: {2 * knee} or more would "
                       "tell")


def b4(rows: Rows) -> Verdict:
    """Direction: a static batch idles more than a continuous one. Size: exactly 720 idle slot-steps for 80 tokens
    beside 800, and more than half of all with seven of 40 beside one of 800. Counted, so without noise."""
    pair, pair_free = (find(rows, case="80 beside 800 tokens", batching=each) for each in ("static", "continuous"))
    eight = find(rows, case="one of 800, seven of 40", batching="static")
    measured = (
        f"{pair['idle_slot_steps']:,} idle slot-steps (claimed 720), {pair_free['idle_slot_steps']:,} if continuous; "
        f"with seven of 40 beside one of 800, {eight['idle_slot_steps']:,}, {eight['idle_share']:.0%} of all"
    )
    return judged(measured, true(pair["idle_slot_steps"] > pair_free["idle_slot_steps"]),
                  true(pair["idle_slot_steps"] == 720 and eight["idle_share"] > 0.5))


def b5(rows: Rows) -> Verdict:
    """Direction: in no continuous run is a slot held by a finished request, or empty while a request waits; in static
    ones some are. Counted, so without noise."""
    continuous = [row for row in rows if row["batching"] == "continuous"]
    column(continuous, "steps")
    idle, empty = (sum(row[name] for row in continuous) for name in ("idle_slot_steps", "empty_while_waiting"))
    static = sum(row["idle_slot_steps"] for row in rows if row["batching"] == "static")
    return judged(f"{idle} idle slot-steps and {empty} empty ones while a request waited; static batches: {static:,} "
                  "idle", true(idle == empty == 0 < static))


def b6(rows: Rows) -> Verdict:
    """Direction: continuous batching, in slots as static batching has them, gives more tokens/s in the whole run.
    Size: 2 to 4 times. What pages add is paging's. Too small: fewer than 32 requests."""
    asked = min((row.get("requests", REQUESTS_THAT_TELL) for row in rows), default=REQUESTS_THAT_TELL)
    if asked < REQUESTS_THAT_TELL:
        raise TooSmall(f"{asked} requests are a batch or two, whose longest answer is luck: {REQUESTS_THAT_TELL} or "
                       "more would tell")
    gains = {}
    for part in ("whole run", "answers only"):
        static = find(rows, part=part, setup="static, slots")
        gains[part] = {setup: within_turns(find(rows, part=part, setup=f"continuous, {setup}"), static,
                                           "tokens_per_s", "times_static") for setup in ("slots", "paged")}
    whole, answers = gains["whole run"], gains["answers only"]
    measured = (
        f"in slots {whole['slots']} times static in the whole run (claimed 2 to 4), {answers['slots']} for answers "
        f"alone; with pages, which is not this claim's, {whole['paged']} and {answers['paged']}"
    )
    return judged(measured, more(whole["slots"]), inside(whole["slots"].value, 2, 4), by=[whole["slots"]])


def b7(rows: Rows) -> Verdict:
    """Direction: continuous over static batching is larger at the largest spread of lengths than at none, and falls
    nowhere in between, beyond the spread of its turns. Too small: fewer than 32 steps at the least spread."""
    rows = sorted(rows, key=lambda row: row["cv"])
    column(rows, "times_tokens_per_s")
    if rows[0].get("static_steps", 32) < 32:
        raise TooSmall(f"{rows[0]['static_steps']} steps at CV {rows[0]['cv']:g}: a batch or two, whose longest answer "
                       "is luck; 32 steps or more would tell, such as 32 requests of 12 tokens in batches of 8")
    ratios = [reading(row, "times_tokens_per_s") for row in rows]
    falls = any(later.high < earlier.low for earlier, later in pairwise(ratios))
    wider = Reading(ratios[-1].value / ratios[0].value, ratios[-1].low / ratios[0].high,
                    ratios[-1].high / ratios[0].low, ratios[0].recorded and ratios[-1].recorded)
    listed = ", ".join(f"{row['cv']:g}: {each}" for row, each in zip(rows, ratios, strict=True))
    return judged(f"continuous over static, by CV: {listed}", every(true(not falls), more(wider)), by=[wider])


def b8(rows: Rows) -> Verdict:
    """Direction, none: at no number of rows does one request run faster than alone, beyond the noise."""
    alone = find(rows, rows=1)
    best = max((row for row in rows if row["rows"] > 1), key=lambda row: row["tokens_per_s_each"])
    gain = ratio(best, alone, "tokens_per_s_each")
    measured = (f"alone {digits(alone['tokens_per_s_each'])} tokens/s; at best, among {best['rows']}, "
                f"{digits(best['tokens_per_s_each'])}: {gain} times")
    return judged(measured, not_more(gain), by=[gain])


def b9(rows: Rows) -> Verdict:
    """Direction: eight replicas make less than eight times one's tokens/s, and each runs fewer rows."""
    one, eight = find(rows, replicas=1), find(rows, replicas=8)
    gain, batch = ratio(eight, one, "tokens_per_s"), ratio(eight, one, "mean_rows")
    measured = (
        f"8 replicas make {gain} times the tokens/s of one, with {eight['mean_rows']:.1f} rows each in place of "
        f"{one['mean_rows']:.1f}"
    )
    return judged(measured, every(less(gain, 8), less(batch)), by=[gain, batch])


CLAIMS = (
    Claim("B1", "Eight requests in a batch give eight times the output for little more time.", "8x for 1.2x",
          ("batch_curve",), b1, ("rows",), (1, 8)),
    Claim("B2", "Total tokens/s rise steeply with the batch while each request slows down a little.",
          "at 1, 8, 32, 64: 40, 290, 980, 1,400", ("batch_curve",), b2, ("rows",), (1, 32)),
    Claim("B3", "The curve has a knee; past it latency grows about linearly and throughput flattens.",
          "in the tens of requests", ("knee",), b3, ("clients",)),
    Claim("B4", "A static batch holds the slot of a finished request until the longest has finished.",
          "80 beside 800 tokens: 720 idle steps", ("idle_slots",), b4, ("batching",), ("static", "continuous")),
    Claim("B5", "In a continuous batch a finished request leaves at once and no slot idles while anything waits.", "",
          ("idle_slots",), b5, ("batching",), ("static", "continuous")),
    Claim("B6", "Continuous batching gives several times the throughput of static batching on real traffic.", "2-4x",
          ("continuous_vs_static",), b6, ("setup",), ("static, slots", "continuous, slots")),
    Claim("B7", "The more the answers' lengths vary, the wider that gap.", "", ("gain_by_spread",), b7, ("cv",)),
    Claim("B8", "Batching does nothing for a single request.", "", ("batch_curve",), b8, ("rows",), (1, 64)),
    Claim("B9", "More GPUs under the same traffic dilute each one's batch: throughput grows less than they.", "",
          ("replicas",), b9, ("replicas",), (1, 8)),
)
