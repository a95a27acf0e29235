"""Exercise 10: what the users of a server felt, from its records.

The truth counts: a percentile is searched for by its definition, gaps are added up again,
and whole summaries are compared with the package's metrics.
"""

from __future__ import annotations

import random

from minillm.course.grading.tasks import Exercise, Task, close, expect
from minillm.ladder.records import RequestRecord
from minillm.measure import metrics

TOLERANCE = 1e-6  # seconds

percentile = Task(
    "percentile",
    "percentile",
    hints=(
        "Put the values in order. Which of them, counted from 1, is the one?",
        "Its rank is percent * n / 100, rounded up. Python counts from 0. The order is yours to make, in a new list.",
        "rank = -(-percent * len(values) // 100) rounds up in whole numbers; sorted(values)[rank - 1].",
    ),
)
ttft = Task(
    "ttft",
    "ttft",
    hints=(
        "The user's clock starts when the request is sent.",
        "Two fields are enough: arrival, and the first of token_times, if there is one.",
        "record.token_times[0] - record.arrival if record.token_times else None.",
    ),
)
token_gaps = Task(
    "token_gaps",
    "token_gaps",
    hints=(
        "Tokens of one step have the same time. How many tokens came at each time?",
        "Go from each time to the next one that differs; the later time's tokens share what lies between.",
        "counts = Counter(record.token_times); for each pair of neighbouring times a, b of counts: "
        "[(b - a) / counts[b]] * counts[b].",
    ),
)
summarise = Task(
    "summarise",
    "summarise",
    hints=(
        "First decide for each figure which requests it is about: those answered, or all.",
        "Collect the TTFTs, and the gaps of all answered requests in one list, before you take any percentile.",
        "answered = those with finish_reason not None, not 'abort', and with token_times. The rate: the token_times of "
        "all records, counted, over max(token_times) - min(arrival).",
    ),
)
EXERCISE = Exercise(
    name="10_latencies",
    title="What the users felt",
    minutes=40,
    difficulty=1,
    importance=3,
    chapter="07_serving_metrics",
    tasks=(percentile, ttft, token_gaps, summarise),
)


# -- percentile -----------------------------------------------------------------------------------


def by_definition(values: list[float], percent: int) -> float:
    """The smallest of the values that at least `percent` per cent of them do not exceed."""
    return min(v for v in values if sum(other <= v for other in values) * 100 >= percent * len(values))


@percentile.check(
    mistake="Off by one: ranks count from 1, Python's lists from 0.",
    look="'Percentiles'",
)
def median_of_three(answer):
    """The median of three is the second."""
    expect(answer([10.0, 20.0, 40.0], 50) == 20.0, "p50 of 10, 20, 40")


@percentile.check(
    mistake="The values were taken in the order in which they came, or the caller's list was sorted: sort a copy.",
    look="'Percentiles'",
)
def any_order(answer):
    """Values may come in any order, and stay in it."""
    values = [40.0, 10.0, 50.0, 30.0, 20.0]
    expect(answer(values, 50) == by_definition(values, 50), "p50 of 40, 10, 50, 30, 20")
    expect(values == [40.0, 10.0, 50.0, 30.0, 20.0], "the list that was passed in, after the call")


@percentile.check(
    mistake="Ranks count from 1, indices from 0; a rank that is no whole number is rounded up, never averaged.",
    look="'Percentiles'",
)
def rounded_up(answer):
    """The rank is rounded up to a value that occurs."""
    for values, percent in (([10.0, 20.0, 40.0, 80.0], 50), ([10.0, 20.0, 40.0, 80.0, 160.0], 90), ([10.0, 20.0], 1)):
        expect(answer(values, percent) == by_definition(values, percent), f"p{percent} of {values}")


@percentile.check(
    mistake="Off by one: p99 of 100 values is not the highest, which only p100 is.",
    look="'Percentiles'",
)
def of_a_hundred(answer):
    """Of 100 values the p99 is the 99th, and p100 the last."""
    for n, percent in ((100, 99), (100, 100), (200, 99), (200, 100)):
        values = [float(i) for i in range(1, n + 1)]
        expect(answer(values, percent) == by_definition(values, percent), f"p{percent} of 1, 2, …, {n}")


@percentile.check(
    mistake="percent / 100 * n is a little more than the whole number it should be, and is rounded up: multiply first.",
    look="'Percentiles'",
)
def whole_numbers(answer):
    """No rounding error moves the rank."""
    values = [float(i) for i in range(1, 101)]
    for percent in (7, 14, 28, 29, 55, 57, 58):
        expect(answer(values, percent) == by_definition(values, percent), f"p{percent} of 1, 2, …, 100")


@percentile.check(
    mistake="An empty list is not an error: return None.",
    look="'Percentiles'",
)
def of_nothing(answer):
    """Nothing has no percentile."""
    expect(answer([], 99) is None, "p99 of no values")


# -- records --------------------------------------------------------------------------------------


def record(arrival: float, times: list[float], scheduled: float | None = None, reason: str | None = "stop"):
    """A request's record. It was scheduled half a second before its first token, if not said otherwise."""
    if scheduled is None and times:
        scheduled = times[0] - 0.5
    finish = None if reason is None else (times[-1] if times else arrival + 1)
    return RequestRecord("r", arrival, 8, scheduled, list(times), finish, reason)


@ttft.check(
    mistake="The first token counts, not the last, and the time since arrival, not the time on the clock.",
    look="'Time to first token'",
)
def plain_ttft(answer):
    """From arrival to the first token."""
    expect(close(answer(record(2.0, [2.5, 3.5, 5.0], scheduled=2.0)), 0.5, TOLERANCE), "arrival 2, tokens 2.5, 3.5, 5")


@ttft.check(
    mistake="The clock started late: the user has been waiting since arrival, not since first_scheduled.",
    look="'Time to first token'",
)
def with_queue(answer):
    """Waiting in the queue counts."""
    got = answer(record(2.0, [6.0, 6.5], scheduled=5.0))
    expect(close(got, 4.0, TOLERANCE), "arrival 2, scheduled 5, tokens 6, 6.5")


@ttft.check(
    mistake="A request that was aborted in the queue has no tokens: return None.",
    look="'Time to first token'",
)
def no_tokens(answer):
    """Without a token there is none."""
    expect(answer(record(2.0, [], reason="abort")) is None, "a record without tokens")


def gaps_are(answer, times: list[float], asked: str) -> None:
    """Expect one gap a token after the first step's, each step's gaps equal and adding up to its wait."""
    want, before = [], times[:1]
    for moment in sorted(set(times))[1:]:
        number = times.count(moment)
        want += [(moment - before[-1]) / number] * number
        before.append(moment)
    got = list(answer(record(0.25, times)))
    expect(close(got, want, TOLERANCE), asked)


@token_gaps.check(
    mistake="There is one gap fewer than tokens: none from arrival to the first token, which is the TTFT.",
    look="'Between tokens'",
)
def plain_gaps(answer):
    """The time between a token and the next."""
    gaps_are(answer, [1.0, 1.5, 3.0, 3.25], "tokens at 1, 1.5, 3, 3.25")


@token_gaps.check(
    mistake="An answer of one token, or of none, has an empty list of gaps.",
    look="'Between tokens'",
)
def one_token(answer):
    """One token has no gap."""
    for times in ([1.0], []):
        expect(list(answer(record(0.25, times))) == [], f"tokens at {times}")


@token_gaps.check(
    mistake="With speculation a step gives several tokens at once: gaps of 0 beside one long gap are not what is read.",
    look="'Between tokens'",
)
def shared_gaps(answer):
    """Tokens of one step share the time."""
    gaps_are(answer, [1.0, 2.0, 2.0, 2.0, 2.5, 4.5, 4.5], "tokens at 1, 2, 2, 2, 2.5, 4.5, 4.5")


@token_gaps.check(
    mistake="All tokens of the first step came with the first token: gaps begin with the second step.",
    look="'Between tokens'",
)
def first_step(answer):
    """A first step with several tokens gives no gap either."""
    gaps_are(answer, [1.0, 1.0, 2.0], "tokens at 1, 1, 2")


# -- the summary ----------------------------------------------------------------------------------

KEYS = ("answered", "ttft_p50_s", "ttft_p99_s", "itl_p50_s", "itl_p99_s", "output_tokens_per_s")


def summary_by_metrics(records: list[RequestRecord]) -> dict:
    """The same figures from the package."""
    found = metrics.latencies(records)
    times = [moment for r in records for moment in r.token_times]
    waits, gaps = found["ttft_s"], found["itl_per_token_s"]
    rate = len(times) / (max(times) - min(r.arrival for r in records)) if times else None
    return dict(zip(KEYS, (waits["n"], waits["p50"], waits["p99"], gaps["p50"], gaps["p99"], rate), strict=True))


def agrees(answer, records: list[RequestRecord], keys: tuple[str, ...], asked: str) -> None:
    """Expect these keys of an answer to be those of the package's own metrics."""
    got, want = answer(list(records)), summary_by_metrics(records)
    for key in keys:
        same = got[key] is None if want[key] is None else close(got[key], want[key], TOLERANCE)
        expect(same, f"{key} of {asked}")


def some(seed: int, number: int, tokens: int) -> list[RequestRecord]:
    """Answered requests in order of arrival, of which some are far slower than most."""
    draw, records = random.Random(seed), []
    for i in range(number):
        at, slow = i * 0.5 + draw.random(), draw.lognormvariate(0, 1)
        times = [at + slow]
        while len(times) < tokens:
            times.append(times[-1] + slow * draw.uniform(0.02, 0.06))
        records.append(record(at, times))
    return records


@summarise.check(
    mistake="The dictionary has the six keys that the text names; p50 and p99 are percentiles over the requests.",
    look="'All of them'",
)
def plain_summary(answer):
    """Answered requests are counted, each with its time to first token."""
    agrees(answer, some(0, 7, 3), KEYS[:3], "7 answered requests")
    agrees(answer, some(4, 150, 1), KEYS[:3], "150 answered requests")


@summarise.check(
    mistake="Percentiles were averaged over requests, or taken of their means: collect the gaps of all, then take one.",
    look="'All of them'",
)
def pooled(answer):
    """The gaps of all answers make one distribution."""
    agrees(answer, some(1, 20, 9), KEYS[3:5], "20 answered requests of 9 tokens")
    long_and_short = [*some(2, 4, 2), record(1.0, [2.0 + 0.03125 * i for i in range(60)])]
    agrees(answer, long_and_short, KEYS[3:5], "4 answers of 2 tokens and one of 60")


@summarise.check(
    mistake="Requests that were aborted, are still under way, or have no token must not be among the answered ones.",
    look="'All of them'",
)
def not_answered(answer):
    """Who was not answered is in no latency."""
    records = [
        *some(3, 5, 4),
        record(0.0, [30.0, 60.0], reason="abort"),
        record(0.5, [40.0, 90.0], reason=None),
        record(1.0, [], reason="abort"),
        record(1.5, [], reason="length"),
    ]
    agrees(answer, records, KEYS[:5], "5 answered requests, and 4 that were not")


@summarise.check(
    mistake="An answer that reached max_tokens ends by itself too: its finish_reason is 'length'.",
    look="'All of them'",
)
def cut_by_length(answer):
    """An answer that ended at max_tokens is answered."""
    records = [*some(5, 6, 4), record(3.0, [9.0, 9.5], reason="length"), record(3.5, [20.0, 23.0], reason="length")]
    agrees(answer, records, KEYS[:5], "8 answered requests, of which two reached max_tokens")


@summarise.check(
    mistake="The list of records, or a record's token_times, was changed, by sort or pop: others read them too.",
    look="'All of them'",
)
def records_stay(answer):
    """The records stay as they were."""
    records = [record(2.0, [3.0, 4.0, 8.0]), record(1.0, [1.5], reason="abort"), record(3.0, [3.25, 3.5])]
    times = [list(r.token_times) for r in records]
    given = list(records)
    answer(given)
    expect([id(r) for r in given] == [id(r) for r in records], "three records, looked at after the call")
    expect([r.token_times for r in records] == times, "the token_times of three records, looked at after the call")


@summarise.check(
    mistake="Tokens of requests that were aborted or are still under way count too; the time runs from the first "
    "arrival to the last token, not to a finish.",
    look="'All of them'",
)
def rate(answer):
    """The rate counts every token, from the first arrival to the last token."""
    agrees(answer, [record(5.0, [7.0, 8.0]), record(4.0, [9.0, 9.5, 10.0])], KEYS[5:], "5 tokens in two requests")
    aborted = [record(3.0, [6.0, 7.0]), record(2.0, [3.0, 4.0, 8.0], reason="abort"), record(1.0, [], reason="abort")]
    agrees(answer, aborted, KEYS[5:], "one answered request, one aborted after 3 tokens, one in the queue")
    late = [record(3.0, [6.0, 7.0]), record(4.0, [6.5, 9.0], reason=None), record(20.0, [], reason="abort")]
    agrees(answer, late, KEYS[5:], "one answered request, one still under way, one aborted in the queue at the end")


@summarise.check(
    mistake="Without tokens a percentile is None, and so is the rate, which would divide by nothing.",
    look="'All of them'",
)
def nobody(answer):
    """Where nobody was answered, there are no figures."""
    agrees(answer, [record(1.0, [], reason="abort")], KEYS, "one request, aborted in the queue")
