"""Pictures of limits, load and latency, in the style of `plots`. Titles state what the drawn rows say.

What is drawn is worked out by functions that need no figure, which the tests compare with the metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from heapq import heappop, heappush
from itertools import pairwise, zip_longest

from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, NullLocator, PercentFormatter

from minillm.course.experiments.service import littles_law, lives, number_present
from minillm.course.show import plots
from minillm.course.show.plots import COLOURS, GREY, LIGHT, drawing, headline
from minillm.course.show.tables import cell
from minillm.ladder.records import Records, RequestRecord, StepRecord
from minillm.measure import metrics
from minillm.measure.roofline import Ceilings


def roofline(rows: Sequence[Mapping], limits: Ceilings) -> Figure:
    """The two limits as one roof, and measured steps under it, from rows of `limits.roofline_steps`."""
    ridge = limits.flops_per_s / limits.bytes_per_s
    ends = [min(0.5 * rows[0]["flop_per_byte"], 0.1 * ridge), 4 * max(ridge, *(row["flop_per_byte"] for row in rows))]
    xs = [ends[0], ridge, ends[1]]
    one, most = rows[0], max(rows, key=lambda row: row["flop_per_byte"])
    title = (f"One decoded token uses {one['mbu']:.0%} of the bandwidth and {one['mfu']:.1%} of the matmul rate; "
             f"{most['kind']} of {most['tokens']} tokens {most['mbu']:.0%} and {most['mfu']:.0%}")
    with drawing(size=(9, 4.8)) as (figure, axes):
        ax = axes[0, 0]
        roof = [min(x * limits.bytes_per_s, limits.flops_per_s) / 1e9 for x in xs]
        ax.plot(xs, roof, color="black", label="roof: bandwidth, then matmul rate")
        ax.axvline(ridge, color=GREY, linewidth=1, linestyle=":")
        ax.annotate(f"ridge: {ridge:.1f} FLOP a byte", (ridge, 0), xycoords=("data", "axes fraction"), xytext=(-5, 6),
                    textcoords="offset points", ha="right", fontsize=9, color="black")
        for (kind, marker), shade in zip((("decode", "o"), ("prefill", "s")), COLOURS, strict=False):
            some = [row for row in rows if row["kind"] == kind]
            ax.plot([row["flop_per_byte"] for row in some], [row["gflop_per_s"] for row in some], marker,
                    color=shade, label=f"{kind} (number: tokens)")
            for row in some:
                below = kind == "prefill"
                ax.annotate(row["tokens"], (row["flop_per_byte"], row["gflop_per_s"]), fontsize=9, color=shade,
                            xytext=(0, -15 if below else 7), textcoords="offset points", ha="center")
        ax.set(xscale="log", yscale="log", xlabel="arithmetic per byte read: FLOP / byte", ylabel="GFLOP/s")
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.set_major_formatter(plots.thousands)
            axis.set_minor_locator(NullLocator())
        ax.grid(color=LIGHT)
        figure.legend(loc="outside lower center", ncols=3, fontsize=10)
        headline(figure, title)
    return figure


# -- one run, over time ---------------------------------------------------------------------------


def request_lives(records: Records) -> Figure:
    """Each request as a bar from arrival to finish: waiting hatched, prompt dark, answer in colour."""
    ordered = sorted(records.requests, key=lambda record: (record.arrival, record.first_scheduled))
    waits = [record.first_scheduled - record.arrival for record in ordered]
    share = sum(waits) / sum(record.first_token - record.arrival for record in ordered)
    title = f"{share:.0%} of all time to first token is waiting in the queue; the longest wait {max(waits):.2g} s"
    began = records.began
    with drawing(size=(9.5, min(6.5, 1.8 + 0.14 * len(ordered)))) as (figure, axes):
        ax = axes[0, 0]
        for line, record in enumerate(ordered):
            shade = plots.colour(1)
            parts = ((record.arrival, record.first_scheduled, {"facecolor": "white", "edgecolor": COLOURS[5],
                                                                "hatch": plots.HATCH, "linewidth": 0.6}),
                     (record.first_scheduled, record.first_token, {"facecolor": plots.darker(shade)}),
                     (record.first_token, record.finish, {"facecolor": shade}))
            for start, end, look in parts:
                ax.broken_barh([(start - began, end - start)], (line + 0.1, 0.8), **look)
        ax.set(xlabel="seconds", ylabel="requests, in order of arrival", ylim=(len(ordered), 0))
        keys = [Patch(facecolor="white", edgecolor=COLOURS[5], hatch=plots.HATCH, label="in the queue"),
                Patch(color=plots.darker(plots.colour(1)), label="prompt: to the first token"),
                Patch(color=plots.colour(1), label="answer")]
        figure.legend(handles=keys, loc="outside lower center", ncols=3)
        headline(figure, title)
    return figure


def over_time(
    runs: Mapping[str, Records], title: str | None = None, limits: Mapping[str, int] | None = None
) -> Figure:
    """Rows of the step, its duration, requests waiting if any ever do, and the share of the cache that is held, one
    column a run, all over the same seconds. limits: the most rows that a run's service allows, drawn as a line.

    Of a service of several GPUs the fullest is drawn, and the column says so. Needs records="all".
    """
    if title is None:
        parts = [f"{metrics.batch(records)['mean_rows']:.1f} rows on average, "
                 + (f"up to {most} waiting" if (most := records.peaks["waiting"]) else "none waiting")
                 for records in runs.values()]
        named = (f"{name}: {part}" for name, part in zip(runs, parts, strict=True))
        title = ";  ".join(named if len(runs) > 1 else parts)
    panels = panels_of(runs)
    with drawing(len(panels), len(runs), size=(max(7, 5 * len(runs)), 1 + 1.5 * len(panels)), sharex="all",
                 sharey="row") as (figure, axes):
        for line, (label, value) in enumerate(panels):
            most = max(value(step) for records in runs.values() for step in records.steps)
            for ax, records in zip(axes[line], runs.values(), strict=True):
                times, heights = over_moments(records.steps, value)
                ax.fill_between([moment - records.began for moment in times], heights, step="post",
                                color=plots.colour(COLOUR_OF[label]), linewidth=0)
            first = axes[line, 0]
            first.set(ylabel=label, ylim=(0, top_of_axis(value, most)))
            first.yaxis.set_major_locator(MaxNLocator(4, integer=value is not cache_share))
            first.yaxis.set_major_formatter(
                (lambda share, _: f"{100 * share:.3g} %") if value is cache_share else plots.thousands)
        draw_limits(axes[0], runs, limits or {})
        for column, (name, records) in enumerate(runs.items()):
            several = "of several GPUs the fullest" if several_at_once(records.steps) else ""
            axes[0, column].set_title(", ".join(filter(None, (name if len(runs) > 1 else "", several))), fontsize=10)
            axes[-1, column].set_xlabel("seconds")
        headline(figure, title)
    return figure


FULL_AXIS = 0.15  # of the cache held, from which its axis goes up to all of it
COLOUR_OF = {"rows in a step": 1, "ms a step": 2, "waiting": 3, "cache held": 4}


def panels_of(runs: Mapping[str, Records]) -> list[tuple[str, Callable[[StepRecord], float]]]:
    """What is drawn of some runs, by its label: no axis for requests that wait where none ever does."""
    found: dict[str, Callable[[StepRecord], float]] = {
        "rows in a step": useful_rows, "ms a step": lambda step: 1e3 * step.duration,
        "waiting": lambda step: step.waiting, "cache held": cache_share,
    }
    return [(label, value) for label, value in found.items()
            if label != "waiting" or any(records.peaks["waiting"] for records in runs.values())]


def top_of_axis(value: Callable[[StepRecord], float], most: float) -> float:
    """Where an axis ends: all of the cache, unless so little is held that it would not be seen."""
    if value is not cache_share:
        return max(1, 1.08 * most)
    return 1 if most >= FULL_AXIS else 1.2 * most or 1


def draw_limits(axes: Sequence, runs: Mapping[str, Records], limits: Mapping[str, int]) -> None:
    """The most rows that each run allows: a line, and what it is; the number alone where the rows stay far below."""
    top = axes[0].get_ylim()[1]
    for ax, name in zip(axes, runs, strict=True):
        if name not in limits:
            continue
        near = limits[name] <= 2.5 * top
        axes[0].set_ylim(0, max(axes[0].get_ylim()[1], 1.25 * limits[name] if near else 1.35 * top))
        if near:
            ax.axhline(limits[name], color="black", linestyle="--", linewidth=1.2)
        said = f"max_batch {limits[name]}" + ("" if near else ", far above")
        ax.annotate(said, (0.995, limits[name]) if near else (0.995, 0.97),
                    xycoords=("axes fraction", "data") if near else "axes fraction", xytext=(0, 3 if near else -3),
                    textcoords="offset points", ha="right", va="bottom" if near else "top", fontsize=9)


def several_at_once(steps: Sequence[StepRecord]) -> bool:
    """Whether steps overlap in time, as they do on several GPUs."""
    ordered = sorted(steps, key=lambda step: step.start)
    return any(follower.start < step.start + 0.5 * step.duration for step, follower in pairwise(ordered))


def over_moments(steps: Sequence[StepRecord], value: Callable[[StepRecord], float]) -> tuple[list, list]:
    """(moments, the value from each on): a step's own while it runs, 0 while nothing does.

    Of the steps of several GPUs at once it is the largest. A gap of less than half of the step
    before it is the engine's own work between two steps, and not idleness.
    """
    ordered = sorted(steps, key=lambda step: step.start)
    spans = []  # of each step: start, end, value
    for step, follower in zip_longest(ordered, ordered[1:]):
        end = step.start + step.duration
        if follower and 0 < follower.start - end < 0.5 * step.duration:
            end = follower.start
        spans.append((step.start, end, value(step)))
    moments = sorted({moment for start, end, _ in spans for moment in (start, end)})
    heights, running, begun = [], [], 0  # running: a heap of (-value, end)
    for moment in moments:
        while begun < len(spans) and spans[begun][0] <= moment:
            _, end, height = spans[begun]
            heappush(running, (-height, end))
            begun += 1
        while running and running[0][1] <= moment:
            heappop(running)
        heights.append(-running[0][0] if running else 0)
    return moments, heights


def useful_rows(step: StepRecord) -> int:
    """Rows that served somebody."""
    return step.rows - step.idle_rows


def cache_share(step: StepRecord) -> float:
    """The share of the pool's blocks that somebody holds."""
    return step.blocks_live / (step.blocks_live + step.blocks_cached + step.blocks_free)


def presence(records: Records) -> Figure:
    """How many requests were in the system, over time; the area is the time that all of them spent there."""
    law, steps = littles_law(lives(records)), number_present(lives(records))
    title = (f"{law['rate_per_s']:.3g} requests a second, each staying {law['mean_stay_s']:.3g} s: "
             f"{law['mean_present']:.3g} are present on average")
    with drawing(size=(9, 3.6)) as (figure, axes):
        ax, times = axes[0, 0], [moment - steps[0][0] for moment, _ in steps]
        ax.fill_between(times, [number for _, number in steps], step="post", color=COLOURS[4], linewidth=0)
        ax.axhline(law["mean_present"], color="black", linestyle="--", linewidth=1.5)
        ax.annotate(f"mean {law['mean_present']:.2f}", (times[-1], law["mean_present"]), xytext=(0, 4),
                    textcoords="offset points", ha="right", fontsize=10,
                    bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5})
        ax.set(xlabel="seconds", ylabel="requests in the system", ylim=(0, None))
        headline(figure, title)
    return figure


# -- latencies ------------------------------------------------------------------------------------


def latency_distributions(runs: Mapping[str, Sequence[RequestRecord]], gaps: bool = True) -> Figure:
    """TTFT and, if asked for, the gaps between steps: for each length of time, the share of values that are no longer.

    A mark stands at each p50 and p90, and at each p99 that is more than the highest value.
    """
    tails = {name: metrics.latencies(requests)["ttft_s"] for name, requests in runs.items()}
    title = "Time to first token, p50 and p90:  " + ";  ".join(
        f"{name}: {found['p50']:.2g} and {found['p90']:.2g} s" for name, found in tails.items())
    with drawing(1, 1 + gaps, size=(10, 4.4), sharey=True) as (figure, axes):
        for number, (name, requests) in enumerate(runs.items(), start=1):
            first = [record.first_token - record.arrival for record in requests]
            between = [gap for record in requests for gap in metrics.step_gaps(record)[0]]
            counts = [f"{len(first):,} requests", f"{len(between):,} gaps"][: 1 + gaps]
            for ax, values in zip(axes[0], (first, between), strict=False):
                xs, ys = shares(values)
                ax.step(xs, ys, where="post", color=plots.colour(number), label=f"{name} (n = {', '.join(counts)})",
                        linestyle=("-", "--", "-.")[(number - 1) % 3])
                marks = [50, 90] + [99] * (len(values) >= metrics.ENOUGH_FOR_P99)
                ax.plot([metrics.percentile(values, mark) for mark in marks], [mark / 100 for mark in marks], "o",
                        color=plots.colour(number))
        for ax, label in zip(axes[0], ("time to first token, s", "time between two steps' tokens, s"), strict=False):
            ax.set(xscale="log", xlabel=label, ylim=(0, 1.02))
            shortest, longest = ax.get_xlim()
            ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if longest < 30 * shortest else (1,)))
            ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
            ax.xaxis.set_minor_formatter(NullFormatter())
            ax.grid(color=LIGHT)
        figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=9)
        axes[0, 0].set_ylabel("share no longer (dots: p50, p90, p99)")
        axes[0, 0].yaxis.set_major_formatter(PercentFormatter(1))
        headline(figure, title)
    return figure


def shares(values: Sequence[float]) -> tuple[list[float], list[float]]:
    """The values in order, and of each the share of all values that are no larger."""
    ordered = sorted(values)
    return ordered, [(rank + 1) / len(ordered) for rank in range(len(ordered))]


# -- settings side by side ------------------------------------------------------------------------


def side_by_side(rows: Sequence[Mapping], label: str, columns: Mapping[str, str], title: str) -> Figure:
    """One panel a column, one bar a row, each with its value. `columns` maps a column to its title with unit."""
    size = (min(13, 2.2 + 2.4 * len(columns)), 1.5 + 0.42 * len(rows))
    with drawing(1, len(columns), size=size, sharey=True) as (figure, axes):
        names = [str(row[label]) for row in rows]
        for number, (ax, (column, heading)) in enumerate(zip(axes[0], columns.items(), strict=True), start=1):
            values = [row[column] or 0 for row in rows]
            ax.barh(names, values, color=plots.colour(number), height=0.62)
            for name, row in zip(names, rows, strict=True):
                ax.annotate(cell(row[column]), (row[column] or 0, name), xytext=(3, 0), textcoords="offset points",
                            va="center", fontsize=9)
            ax.set_title(heading, fontsize=10)
            ax.set_xlim(0, 1.3 * max(values) or 1)
            ax.tick_params(left=False)
            ax.xaxis.set_major_locator(MaxNLocator(3))
            ax.xaxis.set_major_formatter(plots.thousands)
        axes[0, 0].invert_yaxis()
        headline(figure, title)
    return figure


def frontier(rows: Sequence[Mapping], label: str, x: str, y: str, title: str, **axes_labels: str) -> Figure:
    """One point a row, joined in the rows' order, each with its `label`. `axes_labels`: xlabel and ylabel."""
    with drawing(size=(8, 4)) as (figure, axes):
        ax = axes[0, 0]
        ax.plot([row[x] for row in rows], [row[y] for row in rows], marker="o", color=COLOURS[0])
        for row in rows:
            ax.annotate(row[label], (row[x], row[y]), xytext=(-7, 5), textcoords="offset points", ha="right", size=10)
        ax.set(xlim=(0, None), ylim=(0, 1.15 * max(row[y] for row in rows)), **axes_labels)
        ax.grid(color=LIGHT)
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_formatter(plots.thousands)
        headline(figure, title)
    return figure
