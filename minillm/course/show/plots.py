"""Pictures of records and measurements, all in one style. Each function returns a Figure.

What a picture shows is first worked out as plain data (`timeline`, `pool_snapshot`), which
the tests compare with the metrics; drawing adds nothing to it. A title states the finding,
computed from the very rows that are drawn, unless the caller passes one.

pyplot and its backends have no part in it: a figure draws itself as PNG, in a file or as a cell's
last value, whatever backend the host has chosen (MPLBACKEND), installed or not.
"""

from __future__ import annotations

import io
import os
import sys
import textwrap
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

try:
    import matplotlib
except ValueError:  # MPLBACKEND is no backend's name
    del os.environ["MPLBACKEND"]
    for half_imported in [name for name in sys.modules if name.startswith("matplotlib.")]:
        del sys.modules[half_imported]
    import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from minillm.course.experiments.batching import knee_of, knees_of
from minillm.fast.engine import Engine
from minillm.ladder.continuous import StepPlan
from minillm.ladder.records import Records, RequestRecord, StepRecord
from minillm.ladder.request import RequestId

# The palette of Okabe and Ito (2008), told apart by colour-blind readers; olive for its yellow, too pale on white.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#999933")
GREY, LIGHT = "#7F7F7F", "#E8E8E8"
HATCH = "////"
STYLE = {
    "font.size": 11,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "lines.linewidth": 2,
    "lines.markersize": 6,
    "hatch.linewidth": 0.7,
    "figure.dpi": 110,
    "figure.constrained_layout.use": True,
}


class Picture(Figure):
    """A figure that shows itself in a notebook."""

    def _repr_png_(self) -> bytes:
        file = io.BytesIO()
        self.savefig(file, format="png", bbox_inches="tight")
        return file.getvalue()


@contextmanager
def drawing(rows: int = 1, columns: int = 1, size: tuple[float, float] = (9, 4), **settings):
    """A figure and its axes [rows, columns] in the common style."""
    with matplotlib.rc_context(STYLE):
        figure = Picture(figsize=size)
        FigureCanvasAgg(figure)
        yield figure, figure.subplots(rows, columns, squeeze=False, **settings)


def headline(figure: Figure, text: str) -> None:
    """The finding, above everything, in as few lines as fit into the width, and those about equally long."""
    title = figure.suptitle("", fontweight="bold", fontsize=12, x=0.01, ha="left")
    chosen = None
    for letters in range(int(figure.get_figwidth() * 14), 10, -1):
        wrapped = textwrap.fill(text, letters)
        if chosen is not None and wrapped.count("\n") > chosen.count("\n"):
            break
        title.set_text(wrapped)
        if title.get_window_extent().x1 < 0.99 * figure.bbox.width:
            chosen = wrapped
    title.set_text(chosen or wrapped)


def note(text: str) -> Figure:
    """A sentence where a picture would stand, because there is nothing to draw."""
    with drawing(size=(9, 1.4)) as (figure, axes):
        axes[0, 0].set_axis_off()
        axes[0, 0].text(0, 0.5, textwrap.fill(text, 90), va="center", fontsize=12)
    return figure


def colour(number: int) -> str:
    """The colour of a request, a line or a bar; the first is number 1."""
    return COLOURS[(number - 1) % len(COLOURS)]


def thousands(value: float, place: int = 0) -> str:
    """A tick's label: 12,000, not 12000."""
    return f"{value:,g}"


def darker(shade: str) -> tuple[float, ...]:
    """The same colour in a darker shade."""
    return tuple(0.55 * part for part in to_rgb(shade))


# -- who is in which slot, step by step -----------------------------------------------------------


Kind = Literal["prefill", "decode", "idle"]
ROUNDING = 1e-9  # seconds: a step's end is its start plus its duration, but for the last bit


@dataclass(frozen=True)
class Segment:
    """One row of one step. Requests are numbered from 1 in order of arrival, lines from 0."""

    line: int
    start: float
    end: float
    request: int
    kind: Kind


def timeline(records: Records, unit: Literal["s", "step"] = "s") -> list[Segment]:
    """Every row of every step. A request keeps the lowest line that is free when it first appears.

    unit: seconds since the first step, or one unit a step. A request that was preempted
    keeps its line while it is away; what it computes again counts as prefill. Needs
    records="all", and request ids that are not used twice.
    """
    kinds = row_kinds(records)
    numbers = arrival_numbers(records)
    last_step = {request_id: i for i, rows in enumerate(kinds) for request_id in rows}
    segments, lines = [], {}
    for i, (step, rows) in enumerate(zip(records.steps, kinds, strict=True)):
        start = i if unit == "step" else step.start - records.steps[0].start
        end = i + 1 if unit == "step" else start + step.duration
        for request_id, kind in rows.items():
            if request_id not in lines:
                lines[request_id] = next(line for line in range(len(lines) + 1) if line not in lines.values())
            segments.append(Segment(lines[request_id], start, end, numbers[request_id], kind))
        lines = {request_id: line for request_id, line in lines.items() if last_step[request_id] > i}
    return segments


def lives_of(records: Records) -> dict[RequestId, RequestRecord]:
    """The record of every request, finished or not."""
    return {life.request_id: life for life in (*records.requests, *records.live.values())}


def arrival_numbers(records: Records) -> dict[RequestId, int]:
    """All requests that were in a step -> 1, 2, 3 in order of arrival; of equal times the first scheduled is first."""
    lives, seen = lives_of(records), dict.fromkeys(id for step in records.steps for id in step.members)
    return {id: number for number, id in enumerate(sorted(seen, key=lambda id: lives[id].arrival), start=1)}


def row_kinds(records: Records) -> list[dict[RequestId, Kind]]:
    """What each row of each step did, worked out from the times in the requests' records."""
    lives, kinds = lives_of(records), []
    computing: set[RequestId] = set()  # those whose next token waits for a prompt to be computed
    last_seen: dict[RequestId, int] = {}
    for i, step in enumerate(records.steps):
        rows: dict[RequestId, Kind] = {}
        for request_id in step.members:
            life = lives[request_id]
            was_away = life.preemptions and last_seen.get(request_id, i) < i - 1
            if request_id not in last_seen or was_away:
                computing.add(request_id)
            last_seen[request_id] = i
            ended = life.finish is not None and step.start >= life.finish
            rows[request_id] = "idle" if ended else "prefill" if request_id in computing else "decode"
            if tokens_given(life, step):
                computing.discard(request_id)
        kinds.append(rows)
    return kinds


def tokens_given(life: RequestRecord, step: StepRecord) -> int:
    """Tokens that this step gave to this request."""
    before = bisect_right(life.token_times, step.start)
    return bisect_right(life.token_times, step.start + step.duration + ROUNDING) - before


def idle_time(segments: Sequence[Segment]) -> float:
    """Slot-steps, or slot-seconds, that rows sat idle."""
    return sum(segment.end - segment.start for segment in segments if segment.kind == "idle")


def slot_timeline(
    runs: Mapping[str, Records], unit: Literal["s", "step"] = "s", title: str | None = None
) -> Figure:
    """One panel a run, one line a slot: each request in its colour, prefill darker, idle rows hatched."""
    drawn = {name: timeline(records, unit) for name, records in runs.items()}
    heights = [1 + max(segment.line for segment in segments) for segments in drawn.values()]
    size = (9.5, 1.3 + sum(0.6 + 0.28 * height for height in heights))
    with drawing(len(runs), size=size, sharex=True, height_ratios=[2 + h for h in heights]) as (figure, axes):
        longest = max(segment.end for segments in drawn.values() for segment in segments)
        for ax, (name, segments) in zip(axes[:, 0], drawn.items(), strict=True):
            draw_timeline(ax, segments, longest)
            _mark_end(ax, max(segment.end for segment in segments), unit)
            ax.set_title(name)
        axes[-1, 0].set_xlabel("steps" if unit == "step" else "seconds")
        headline(figure, title or _timeline_title(drawn, unit))
        keys = [Patch(color=darker(GREY), label="prefill"), Patch(color=GREY, label="decode")]
        if any(map(idle_time, drawn.values())):
            idle = "idle: held for a request that has ended"
            keys.append(Patch(facecolor="white", edgecolor=GREY, hatch=HATCH, label=idle))
        figure.legend(handles=keys, loc="outside lower center", ncols=3)
    return figure


def draw_timeline(ax: Axes, segments: Sequence[Segment], longest: float, lines: int | None = None) -> None:
    """The bars alone, on axes of the caller's, over a time of `longest`; lines: None for as many as are used."""
    for run in _runs(segments):
        first, width = run[0], run[-1].end - run[0].start
        shade = colour(first.request)
        look = {
            "prefill": {"facecolor": darker(shade), "edgecolor": "white"},
            "decode": {"facecolor": shade, "edgecolor": "white"},
            "idle": {"facecolor": "white", "edgecolor": shade, "hatch": HATCH},
        }[first.kind]
        ax.broken_barh([(first.start, width)], (first.line + 0.1, 0.8), linewidth=0.4, **look)
        if first.kind == "decode" and width > 0.018 * longest:
            ax.text(first.start + width / 2, first.line + 0.5, first.request, color=ink(shade), fontsize=9,
                    ha="center", va="center", clip_on=True)
    lines = lines or 1 + max(segment.line for segment in segments)
    ax.set(xlim=(0, longest * 1.06), ylim=(lines, 0), ylabel="row", yticks=[line + 0.5 for line in range(lines)],
           yticklabels=range(1, lines + 1))


def _mark_end(ax: Axes, end: float, unit: str) -> None:
    ax.axvline(end, color="black", linewidth=1, linestyle=":")
    ax.annotate(f"{end:.0f} steps" if unit == "step" else f"{end:.1f} s", (end, 1), xytext=(4, 2),
                xycoords=("data", "axes fraction"), textcoords="offset points", fontsize=10)


def _runs(segments: Sequence[Segment]) -> Iterator[list[Segment]]:
    """Neighbours of one line, request and kind, which are drawn as one bar."""
    ordered = sorted(segments, key=lambda s: (s.line, s.start))
    for _, same in groupby(ordered, key=lambda s: (s.line, s.request, s.kind)):
        run: list[Segment] = []
        for segment in same:
            if run and segment.start - run[-1].end > 0.5 * (segment.end - segment.start):  # it was away
                yield run
                run = []
            run.append(segment)
        yield run


def _timeline_title(drawn: Mapping[str, Sequence[Segment]], unit: str) -> str:
    parts = []
    for name, segments in drawn.items():
        share = idle_time(segments) / sum(s.end - s.start for s in segments)
        parts.append(f"{name}: {share:.0%} of slot-{'steps' if unit == 'step' else 'seconds'} idle")
    return ";  ".join(parts)


def ink(shade: str) -> str:
    """Black or white, whichever can be read on this colour."""
    red, green, blue = to_rgb(shade)
    return "black" if 0.3 * red + 0.59 * green + 0.11 * blue > 0.5 else "white"


# -- who holds which block ------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """One block of the pool. `holders` are numbers in order of arrival, from 1; `filled` counts tokens stored."""

    state: Literal["live", "cached", "free"]
    holders: tuple[int, ...]
    filled: int


@dataclass(frozen=True)
class PoolSnapshot:
    """A pool at one moment, between two steps."""

    block_size: int
    blocks: tuple[Block, ...]

    def count(self, state: str) -> int:
        """Blocks in this state."""
        return sum(block.state == state for block in self.blocks)

    @property
    def requests(self) -> int:
        """Requests that hold blocks."""
        return len({holder for block in self.blocks for holder in block.holders})

    @property
    def shared(self) -> int:
        """Blocks that more than one request holds."""
        return sum(len(block.holders) > 1 for block in self.blocks)

    @property
    def reserved_tokens(self) -> int:
        return self.count("live") * self.block_size

    @property
    def used_tokens(self) -> int:
        return sum(block.filled for block in self.blocks if block.state == "live")

    @property
    def wasted_tokens(self) -> int:
        """Reserved by a request, and empty."""
        return self.reserved_tokens - self.used_tokens


def pool_snapshot(engine: Engine, plan: StepPlan | None = None) -> PoolSnapshot:
    """How the engine's pool stands now; with a plan, how it will stand once its rows are computed."""
    fed = {row.request.id: row.end for row in plan.rows} if plan else {}
    pool = engine.scheduler.memory.pool
    holders: list[list[int]] = [[] for _ in range(pool.num_blocks)]
    filled = [pool.block_size if block in pool.cached else 0 for block in range(pool.num_blocks)]
    for request in engine.scheduler.running:
        stored = fed.get(request.id, request.num_kv)
        for i, block in enumerate(request.block_table):
            holders[block].append(request.arrival_number)
            filled[block] = max(filled[block], min(max(stored - i * pool.block_size, 0), pool.block_size))
    states = ["live" if holders[b] else "cached" if b in pool.cached else "free" for b in range(pool.num_blocks)]
    blocks = (Block(*parts) for parts in zip(states, map(tuple, holders), filled, strict=True))
    return PoolSnapshot(pool.block_size, tuple(blocks))


def block_map(pools: Mapping[str, PoolSnapshot], title: str | None = None, columns: int = 16) -> Figure:
    """Each pool as a grid of blocks, read like text: filled parts in the holder's colour, empty ones hatched."""
    rows = max(-(-len(pool.blocks) // columns) for pool in pools.values())
    width = min(14.0, 0.4 * columns * len(pools) + 0.5)
    with drawing(1, len(pools), size=(width, 1.3 + (width - 0.5) / columns / len(pools) * rows)) as (figure, axes):
        for ax, (name, pool) in zip(axes[0], pools.items(), strict=True):
            for place, block in enumerate(pool.blocks):
                draw_block(ax, place % columns, place // columns, block, pool.block_size)
            ax.set(xlim=(-0.1, columns + 0.1), ylim=(rows + 0.1, -0.1), aspect="equal")
            ax.set_axis_off()
            ax.set_title(f"{name}: {_pool_line(pool)}")
        counts = ", ".join(f"{pool.requests} as {name}" for name, pool in pools.items())
        headline(figure, title or f"Requests that one pool of {len(pool.blocks)} blocks holds: {counts}")
        keys = [Patch(color=COLOURS[0], label="holds tokens (number: request)"),
                Patch(facecolor="white", edgecolor=COLOURS[0], hatch=HATCH, label="reserved, empty"),
                Patch(facecolor="white", edgecolor="black", linewidth=2, label="shared by several"),
                Patch(facecolor=LIGHT, edgecolor=GREY, label="cached, held by no request"),
                Patch(facecolor="white", edgecolor=LIGHT, label="free")]
        figure.legend(handles=keys, loc="outside lower center", ncols=5 if width > 8 else 3, fontsize=9)
    return figure


def _pool_line(pool: PoolSnapshot) -> str:
    share = pool.wasted_tokens / pool.reserved_tokens if pool.reserved_tokens else 0
    return f"{share:.0%} of what is held is empty"


def draw_block(ax: Axes, x: int, y: int, block: Block, block_size: int) -> None:
    """One block as a square whose upper left corner is (x, y)."""
    box = {"xy": (x + 0.06, y + 0.06), "width": 0.88, "height": 0.88}
    if block.state != "live":
        look = {"facecolor": LIGHT, "edgecolor": GREY} if block.state == "cached" else {
            "facecolor": "white", "edgecolor": "#C8C8C8"}
        ax.add_patch(Rectangle(**box, linewidth=0.8, **look))
        return
    shade = colour(block.holders[0])
    ax.add_patch(Rectangle(**box, facecolor="white", edgecolor=shade, hatch=HATCH, linewidth=0.8))
    ax.add_patch(Rectangle(box["xy"], 0.88 * block.filled / block_size, 0.88, facecolor=shade, linewidth=0))
    if len(block.holders) > 1:
        ax.add_patch(Rectangle(**box, fill=False, edgecolor="black", linewidth=2.2))
    label = f"×{len(block.holders)}" if len(block.holders) > 1 else f"{block.holders[0]}"
    full = block.filled > 0.6 * block_size
    paper = None if full else {"boxstyle": "round,pad=0.1", "facecolor": "white", "edgecolor": "none"}
    if block.filled:
        ax.text(x + 0.5, y + 0.52, label, color=ink(shade) if full else "black", fontsize=8, ha="center", va="center",
                bbox=paper)


# -- curves and bars ------------------------------------------------------------------------------


def curves(
    series: Mapping[str, Sequence[Sequence[float]]], title: str, x: str, y: str, log_x: bool = False,
    log_y: bool = False, level: tuple[str, float] | None = None,
) -> Figure:
    """Lines by name, each with its own colour, marker and dash. `x` and `y` are labels with units.

    A line is (xs, ys), or (xs, ys, lows, highs) with a bar from the lowest to the highest turn. level: the name and
    the y of what all are compared with, a grey line across.
    """
    with drawing() as (figure, axes):
        draw_curves(axes[0, 0], series, log_x, log_y)
        if level is not None:
            axes[0, 0].axhline(level[1], color=GREY, linewidth=1.5, label=level[0])
            axes[0, 0].legend()
        axes[0, 0].set(xlabel=x, ylabel=y)
        headline(figure, title)
        if not log_y:
            axes[0, 0].set_ylim(bottom=0)
        clear_names(axes[0, 0])
    return figure


def draw_curves(ax: Axes, series: Mapping, log_x: bool = False, log_y: bool = False) -> None:
    """The lines alone, on axes of the caller's; ticks stand where there are points."""
    for number, (name, (xs, ys, *ends)) in enumerate(series.items(), start=1):
        ax.plot(xs, ys, color=colour(number), marker="osD^vP"[(number - 1) % 6], label=name,
                linestyle=("-", "--", "-.", ":")[(number - 1) % 4])
        if ends:
            draw_spread(ax, xs, ys, *ends, color=colour(number))
    ax.grid(color=LIGHT)
    ax.yaxis.set_major_formatter(thousands)
    if all(isinstance(x, int) for xs, *_ in series.values() for x in xs):
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))  # nothing lies between two drafts, or two channels
    if log_x:
        ax.set_xscale("log", base=2)
        ticks = sorted({tick for xs, *_ in series.values() for tick in xs})
        ax.set_xticks(ticks, [f"{tick:,g}" for tick in ticks])
    if log_y:
        ax.set_yscale("log")
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.yaxis.set_major_formatter(thousands)  # a scale brings its own
        ax.yaxis.set_minor_locator(NullLocator())
    if len(series) > 1:
        ax.legend()


def draw_spread(ax: Axes, xs: Sequence, ys: Sequence, lows: Sequence, highs: Sequence, color, of: str = "y") -> None:
    """A bar at each point from its low to its high, of `y` or of `x`."""
    at = ys if of == "y" else xs
    ends = [[value - low for value, low in zip(at, lows, strict=True)],
            [high - value for value, high in zip(at, highs, strict=True)]]
    ax.errorbar(xs, ys, **{f"{of}err": ends}, fmt="none", ecolor=color, elinewidth=1.5, capsize=4)


def clear_names(ax: Axes) -> None:
    """Put the lines' names beside the axes, if even in the emptiest corner a line runs through them.

    Call it last: it depends on limits and titles.
    """
    if (names := ax.get_legend()) is None:
        return
    ax.figure.draw_without_rendering()
    box = names.get_window_extent()
    paths = (line.get_transform().transform_path(line.get_path()) for line in ax.lines)
    if any(path.intersects_bbox(box, filled=False) for path in paths):
        ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))


def cost_per_token(rows: Sequence[Mapping]) -> Figure:
    """Rung 0 beside rung 1, from rows of `limits.cost_by_length`."""
    both = [row for row in rows if row["recompute_ms"] is not None]
    series = {
        "rung 0: compute the whole text again": _with_spread(both, "context_tokens", "recompute_ms"),
        "rung 1: keys and values are kept": _with_spread(rows, "context_tokens", "cached_ms"),
    }
    first, last = both[0], both[-1]
    grows, flat = (last[name] / first[name] for name in ("recompute_ms", "cached_ms"))
    title = (f"Text {last['context_tokens'] / first['context_tokens']:,.0f} times as long: the next token costs "
             f"{grows:.1f} times as much without a cache, {flat:.2f} times with one")
    return curves(series, title, "tokens of text so far", "ms for the next token", log_x=True, log_y=True)


def tokens_per_s_curve(rows: Sequence[Mapping]) -> Figure:
    """Throughput and step time against the rows of a step, beside the roofline's, from rows of `batch_curve`."""
    first, chosen = rows[0], next((row for row in rows if row["rows"] == 8), rows[-1])
    xs = [row["rows"] for row in rows]
    faster, longer = (chosen[name] / first[name] for name in ("tokens_per_s", "step_ms"))
    title = f"{chosen['rows']} rows: {faster:.1f} times the tokens per second, a step {longer:.2f} times as long"
    free = [row * first["tokens_per_s"] / first["rows"] for row in xs]
    least_ms = [row["least_ms"] for row in rows]
    limit = [1e3 * row / ms for row, ms in zip(xs, least_ms, strict=True)]
    through = {"measured": _with_spread(rows, "rows", "tokens_per_s"), "if rows were free": (xs, free),
               "the roofline's limit": (xs, limit)}
    durations = {"measured": _with_spread(rows, "rows", "step_ms"), "the roofline's least": (xs, least_ms)}
    with drawing(1, 2, size=(10, 4)) as (figure, axes):
        left, right = axes[0]
        draw_curves(left, through, log_x=True, log_y=True)
        left.set(xlabel="rows in the step", ylabel="output tokens per second", title="throughput")
        draw_curves(right, durations, log_x=True)
        right.set(xlabel="rows in the step", ylabel="ms per step", title="duration of a step")
        right.set_ylim(bottom=0)
        headline(figure, title)
    return figure


def knee_curve(rows: Sequence[Mapping]) -> Figure:
    """Throughput against the gap between tokens, a point for each number of clients, from rows of `knee`.

    A ring marks the knee, and thinner ones where it may lie as well.
    """
    at, last, may_be = knee_of(rows), rows[-1], knees_of(rows)
    first, past = may_be[0]["clients"], may_be[-1]["clients"]
    where = f"at {at['clients']}" if first == past else f"between {first} and {past}"
    says, of = f"The knee lies {where} clients", at
    if at is last:
        says, of = f"No knee below {last['clients']} clients", rows[0]
    title = (
        f"{says}: {last['clients']} make {last['tokens_per_s'] / of['tokens_per_s']:.2f} times the tokens per second "
        f"of {of['clients']}, with {last['itl_p50_ms'] / of['itl_p50_ms']:.1f} times the gap between them"
    )
    with drawing(size=(8, 4.5)) as (figure, axes):
        ax = axes[0, 0]
        speeds, gaps, *ends = _with_spread(rows, "tokens_per_s", "itl_p50_ms")
        draw_curves(ax, {"clients": (speeds, gaps, *ends)})
        if ends:
            draw_spread(ax, speeds, gaps, *_with_spread(rows, "clients", "tokens_per_s")[2:], COLOURS[0], of="x")
        for row in rows:
            ax.annotate(f"{row['clients']}", (row["tokens_per_s"], row["itl_p50_ms"]), xytext=(-7, 7), ha="right",
                        textcoords="offset points", fontsize=9)
        for row in (at, *may_be):
            ax.plot(row["tokens_per_s"], row["itl_p50_ms"], "o", color=COLOURS[5], markersize=14, fillstyle="none",
                    markeredgewidth=2.5 if row is at else 1)
        ax.set(xlabel="output tokens per second, all clients together", ylabel="ms between a client's tokens, p50")
        ax.set_xlim(left=0)
        ax.set_ylim(0, 1.1 * ax.get_ylim()[1])
        headline(figure, title)
    return figure


def prefix_bars(rows: Sequence[Mapping]) -> Figure:
    """Prompt tokens computed and found, and the time to the first token, from rows of `prefix_sharing`."""
    alone, shared, _ = rows
    names = [row["case"].replace(" ", "\n", 1) for row in rows]
    sooner = alone["ttft_p50_ms"] / shared["ttft_p50_ms"]
    title = (f"{shared['found'] / shared['prompt_tokens']:.0%} of the prompt tokens are found, and the first token "
             f"comes {sooner:.1f} times sooner; another token in front loses both")
    with drawing(1, 2, size=(10, 4)) as (figure, axes):
        left, right = axes[0]
        computed, found = ([row[name] for row in rows] for name in ("computed", "found"))
        left.bar(names, computed, width=0.55, color=COLOURS[0], label="computed")
        left.bar(names, found, bottom=computed, width=0.55, color=COLOURS[2], label="found in the pool")
        left.set(ylabel="prompt tokens", ylim=(0, 1.3 * max(row["prompt_tokens"] for row in rows)))
        left.yaxis.set_major_formatter(thousands)
        left.legend(loc="upper center", ncols=2)
        times = _with_spread(rows, "case", "ttft_p50_ms")[1:]
        right.bar(names, times[0], width=0.55, color=COLOURS[0])
        if len(times) > 1:
            draw_spread(right, names, *times, color="black")
        right.set(ylabel="ms to the first token, p50")
        right.set_ylim(bottom=0)
        headline(figure, title)
    return figure


def bars(
    rows: Sequence[Mapping], label: str, parts: Mapping[str, str], title: str, y: str
) -> Figure:
    """One stacked bar a row. `label` names the bars' column, `parts` maps a column to what it is called."""
    with drawing(size=(max(5.0, 1.6 * len(rows) + 3), 4)) as (figure, axes):
        ax, bottoms, keys = axes[0, 0], [0.0] * len(rows), []
        for number, (column, name) in enumerate(parts.items()):
            heights = [row[column] for row in rows]
            look = {"color": COLOURS[0]} if number == 0 else {
                "facecolor": "white", "edgecolor": COLOURS[number], "hatch": (HATCH, "..")[(number - 1) % 2]}
            edges = [0.0 if height == 0 else 1.0 for height in heights]
            names = [str(row[label]) for row in rows]
            ax.bar(names, heights, bottom=bottoms, width=0.55, linewidth=edges, **look)
            keys.append(Patch(label=name, **look))
            bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
        ax.set(ylabel=y, ylim=(0, 1.06 * max(bottoms) or 1))
        ax.margins(x=0.12)
        headline(figure, title)
        ax.legend(handles=keys, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def with_errors(
    rows: Sequence[Mapping], label: str, parts: Mapping[str, str], title: str, y: str, apart: Sequence[str] = ()
) -> Figure:
    """Points with error bars, a colour for each row: `parts` maps a column's name to where it stands on the x axis.

    A part's value is in the column `<part>_change_nats`, its error in `<part>_change_error_nats`; a point whose
    error is not known is hollow. Parts named in `apart` stand beside the others, on a scale of their own.
    """
    groups = [group for group in ([part for part in parts if part not in apart], list(apart)) if group]
    with drawing(1, len(groups), size=(10, 4), width_ratios=[len(group) + 0.5 for group in groups]) as (figure, axes):
        for ax, group in zip(axes[0], groups, strict=True):
            for number, row in enumerate(rows, start=1):
                _draw_errors(ax, group, number, row, (number - (len(rows) + 1) / 2) * 0.12, row[label])
            ax.axhline(0, color=GREY, linewidth=1)
            ax.set_xticks(range(len(group)), [parts[part] for part in group])
            ax.set_xlim(-0.5, len(group) - 0.5)
            ax.grid(color=LIGHT, axis="y")
        axes[0, 0].set(ylabel=y)
        headline(figure, title)
        axes[0, -1].legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def _draw_errors(ax: Axes, parts: Sequence[str], number: int, row: Mapping, aside: float, label: str) -> None:
    known = [at for at, part in enumerate(parts) if row.get(f"{part}_change_nats") is not None]
    values = [row[f"{parts[at]}_change_nats"] for at in known]
    errors = [row[f"{parts[at]}_change_error_nats"] for at in known]
    look = {"fmt": "osD^vP"[(number - 1) % 6], "color": colour(number), "capsize": 3, "linewidth": 1.5}
    ax.errorbar([], [], [], label=label, **look)
    for at, value, error in zip(known, values, errors, strict=True):
        hollow = {"markerfacecolor": "white"} if error is None else {}
        ax.errorbar([at + aside], [value], None if error is None else [error], **look, **hollow)


def sorted_bars(series: Mapping[str, Sequence[float]], title: str, x: str, y: str) -> Figure:
    """A panel for each series, its bars from the largest to the smallest, all on one scale; the largest is named by its
    place in the series."""
    with drawing(1, len(series), size=(10, 3.6), sharey=True) as (figure, axes):
        for number, (ax, (name, values)) in enumerate(zip(axes[0], series.items(), strict=True), start=1):
            order = sorted(range(len(values)), key=lambda at: -values[at])
            ax.bar(range(len(order)), [values[at] for at in order], color=colour(number), width=0.8)
            ax.annotate(f"number {order[0]}", (-0.4, values[order[0]]), xytext=(0, 2), textcoords="offset points",
                        va="bottom", fontsize=9)
            ax.set(title=name, xlabel=x, xlim=(-1, len(order)))
            ax.grid(color=LIGHT, axis="y")
        axes[0, 0].set(ylabel=y, ylim=(0, 1.1 * max(map(max, series.values()))))
        headline(figure, title)
    return figure


def _with_spread(rows: Sequence[Mapping], x: str, y: str) -> tuple[list, ...]:
    """xs and ys of a line, and the lows and highs of y where every row has them."""
    xs, ys, *ends = ([row.get(name) for row in rows] for name in (x, y, f"{y}_min", f"{y}_max"))
    return (xs, ys) if any(None in each for each in ends) else (xs, ys, *ends)


PICTURES = {  # of experiments, by name: what `minillm measure` draws beside their files
    "cost_by_length": cost_per_token, "batch_curve": tokens_per_s_curve, "knee": knee_curve,
    "prefix_sharing": prefix_bars,
}
