"""What the controls over a service show, as plain functions from their positions to a picture. Virtual time.

Each works without widgets: `widgets.py` only puts controls over them.
"""

from __future__ import annotations

import math
from itertools import pairwise

from matplotlib.figure import Figure

from minillm.course import diagnose
from minillm.course.diagnose import CASES
from minillm.course.experiments import service
from minillm.course.show import drawings, service_plots
from minillm.course.show.tables import cell
from minillm.measure.service import Service
from minillm.measure.workload import WorkItem

NO_CURE = "as it is"
FIGURES = {"ttft_p50_s": "TTFT p50, s", "ttft_p99_s": "TTFT p99, s", "itl_p50_ms": "ITL p50, ms",
           "itl_p99_ms": "ITL p99, ms", "latency_p50_s": "latency p50, s", "tokens_per_s": "tokens/s",
           "mean_rows": "rows, mean", "refused_share": "refused, share", "cache_peak_share": "most of cache held",
           service.COST: "$ a million tokens"}
JOBS = 12  # handed in at the start, beside people's requests


def cure_at(case: str, cure: str = NO_CURE, requests: int = 120) -> Figure:
    """A case's run over time, and with a cure the same requests beside it; the title says what the cure did."""
    cures = [] if cure == NO_CURE else [cure]
    rows, records = diagnose.diagnose(case, cures, requests)
    limits = {name: served.max_batch for name, served in diagnose.services(case, cures).items()}
    return service_plots.over_time(records, cure_sentence(case, rows) if cures else None, limits)


def cure_sentence(case: str, rows: list[dict]) -> str:
    """What a cure made of the figure of the complaint, from the rows of `diagnose`."""
    (before, after), figure = rows, CASES[case].figure
    better = f", {after['times_better']:.3g} times better" if math.isfinite(after["times_better"]) else ""
    return (f"{after['set-up']}: {FIGURES[figure]} from {cell(before[figure])} to {cell(after[figure])}{better}: it "
            f"{after['effect']}")


def arrivals_at(per_s: float, requests: int = 120) -> Figure:
    """Chats that arrive at random at an A100 under an 8B model, so many a second, over time; the title has TTFT."""
    served = Service().serve(service.chats(requests, rate=per_s))
    first = served.summary["ttft_s"]
    title = (f"{per_s:g} requests a second: the time to the first token is {first['p50']:.2g} s at the median, "
             f"{first['p90']:.2g} s at p90; up to {served.records.peaks['waiting']} wait")
    return service_plots.over_time({"run": served.records}, title)


STREAMS, LATE_PROMPT = 4, 8192  # clients that read their answers; tokens of the prompt that arrives in their midst


def served_within(tokens_a_step: int) -> tuple[list[float], list[float], float]:
    """The streams on an A100 under an 8B model, and the long prompt at 0.5 s -> of one stream the moments of its tokens
    in s and the gaps before them in ms, and the late request's time to the first token in s."""
    streams = [WorkItem(0.0, range(100 * number, 100 * number + 32), 250) for number in range(STREAMS)]
    late = WorkItem(0.5, range(1000, 1000 + LATE_PROMPT), 20)
    records = Service(max_step_tokens=tokens_a_step).serve([*streams, late]).records.requests
    one, *_, long = sorted(records, key=lambda record: record.prompt_tokens)
    gaps = [1e3 * (after - before) for before, after in pairwise(one.token_times)]
    return one.token_times[1:], gaps, long.first_token - long.arrival


def budget_at(tokens_a_step: int) -> Figure:
    """What a stream waits for its tokens while a long prompt is read in one step, and in chunks of this budget."""
    (*whole, ttft_whole), (*chunked, ttft) = map(served_within, (LATE_PROMPT + STREAMS, tokens_a_step))
    title = (f"At most {tokens_a_step:,} tokens a step: a stream waits {max(chunked[1]):.0f} ms in place of "
             f"{max(whole[1]):.0f}; the late request's first token comes after {ttft:.2f} s in place of "
             f"{ttft_whole:.2f}")
    return drawings.gaps({f"a prompt of {LATE_PROMPT:,} tokens in one step": whole,
                          f"at most {tokens_a_step:,} tokens a step": chunked}, title)


def pools_at(for_people: int, per_s: float, people: int = 200) -> Figure:
    """Four GPUs as one mixed pool, and as two; for_people: how many of the four are kept for people's requests."""
    mixed, apart = service.mixed_and_pools(*service.two_kinds(people, per_s, JOBS), for_people=for_people)
    better = mixed["ttft_p99_s"] / apart["ttft_p99_s"]
    title = (f"{per_s:g} people a second: their p99 to the first token is {cell(max(better, 1 / better))} times "
             f"{'shorter' if better > 1 else 'longer'} with {apart['setup']}; the jobs take "
             f"{apart['jobs_done_s'] / mixed['jobs_done_s']:.2f} times as long")
    return service_plots.side_by_side(
        [mixed, apart], "setup", {"ttft_p99_s": "people: TTFT p99, s", "latency_p99_s": "people: latency p99, s",
                                  "jobs_done_s": "jobs done after, s"}, title)
