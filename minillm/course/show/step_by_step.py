"""The states of each request over time, and beside them the pool, step by step: from a small run's own records.

    request_states    who was queued, in prefill, decoding or preempted, and when each finished
    watch             serve some prompts, and keep how the pool stood in every step
    states_and_pool   both up to one step; `widgets.run_stepper` puts a slider over it
    moving            the same pictures one after another, as an animated PNG: it moves where no kernel runs
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from minillm.course.show.plots import (
    GREY,
    HATCH,
    ROUNDING,
    PoolSnapshot,
    arrival_numbers,
    colour,
    darker,
    draw_block,
    drawing,
    headline,
    lives_of,
    pool_snapshot,
)
from minillm.fast.engine import Engine
from minillm.ladder.records import Records, RequestRecord, StepRecord
from minillm.ladder.request import RequestId, SamplingParams

State = Literal["queued", "prefill", "decode", "preempted"]
WAITS = "#D55E00"  # the outline of the time in which a request computes nothing


@dataclass(frozen=True)
class Stretch:
    """A time that a request spent in one state. Requests are numbered from 1 in order of arrival."""

    request: int
    start: float
    end: float
    state: State


def stretches(records: Records, unit: Literal["s", "step"] = "s") -> list[Stretch]:
    """The states of every request from its arrival to its end, one after another without a gap.

    unit: seconds since the first arrival, or one unit a step. Needs records="all" and a run that has ended.
    """
    steps, lives, numbers = records.steps, lives_of(records), arrival_numbers(records)

    def place(moment: float) -> float:
        if unit == "s":
            return moment - records.began
        return sum(step.start + step.duration <= moment + ROUNDING for step in steps)

    found = []
    for request_id, number in numbers.items():
        life = lives[request_id]
        marks = [*changes(records.steps, life), (life.finish, None)]
        found += [Stretch(number, place(start), place(end), state) for (start, state), (end, _) in pairwise(marks)]
    return [each for each in found if each.start < each.end]


def changes(steps: Sequence[StepRecord], life: RequestRecord) -> list[tuple[float, State]]:
    """When a request came into each of its states, in order. What it computes again is prefill."""
    state: State = "queued"
    marks = [(life.arrival, state)]
    for step in steps:
        if not life.arrival <= step.start < life.finish:
            continue
        if life.request_id in step.members:
            kind = step.kinds[step.members.index(life.request_id)]
            state = "decode" if kind == "decode" else "prefill"
        elif state != "queued" and life.preemptions:
            state = "preempted"
        if state != marks[-1][1]:
            marks.append((step.start, state))
    return marks


def request_states(records: Records, title: str, names: Mapping[RequestId, str] | None = None,
                   unit: Literal["s", "step"] = "s") -> Figure:
    """One line a request, from its arrival to its end; names: what stands beside its line."""
    found, numbers = stretches(records, unit), arrival_numbers(records)
    with drawing(size=(9.5, 1.7 + 0.42 * len(numbers))) as (figure, axes):
        ax = axes[0, 0]
        draw_states(ax, found, len(numbers))
        ax.set(xlabel="steps" if unit == "step" else "seconds", ylabel="request" if names is None else "")
        if names is not None:
            ax.set_yticklabels([names[request_id] for request_id in numbers])
        for at, each in enumerate(found):
            if at + 1 == len(found) or found[at + 1].request != each.request:
                ax.annotate("finished", (each.end, each.request - 0.5), xytext=(7, 0), textcoords="offset points",
                            va="center", fontsize=9, color=darker(colour(each.request)))
        ax.set_xlim(0, 1.12 * max(each.end for each in found))
        figure.legend(handles=keys_of_states(), loc="outside lower center", ncols=4)
        headline(figure, title)
    return figure


def draw_states(ax: Axes, found: Sequence[Stretch], lines: int, until: float = math.inf) -> None:
    """The bars alone, on axes of the caller's, and a dot where each request ends; nothing of what comes after `until`.
    """
    ends = {each.request: each.end for each in found}
    found = [replace(each, end=min(each.end, until)) for each in found if each.start < until]
    for each in found:
        shade = colour(each.request)
        look = {
            "queued": {"facecolor": "white", "edgecolor": WAITS, "linestyle": ":"},
            "preempted": {"facecolor": "white", "edgecolor": WAITS, "hatch": HATCH},
            "prefill": {"facecolor": darker(shade), "edgecolor": "white"},
            "decode": {"facecolor": shade, "edgecolor": "white"},
        }[each.state]
        ax.broken_barh([(each.start, each.end - each.start)], (each.request - 0.88, 0.76), linewidth=0.8, **look)
    for request, end in ends.items():
        if end <= until:
            ax.plot([end], [request - 0.5], "o", color=darker(colour(request)), markersize=5, clip_on=False)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set(ylim=(lines, 0), yticks=[line + 0.5 for line in range(lines)], yticklabels=range(1, lines + 1))


def keys_of_states() -> list[Patch]:
    """What the looks of `draw_states` mean."""
    return [Patch(facecolor="white", edgecolor=WAITS, linestyle=":", label="queued"),
            Patch(color=darker(GREY), label="prefill"), Patch(color=GREY, label="decode"),
            Patch(facecolor="white", edgecolor=WAITS, hatch=HATCH, label="preempted")]


# -- beside the pool ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """A run that has ended: its records, and how the pool stood in each step once its rows were computed."""

    records: Records
    pools: tuple[PoolSnapshot, ...]


def watch(engine: Engine, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> Run:
    """Serve the prompts on an engine that has served none, and keep how its pool stood in every step.

    It is read when a step has been planned: once it is over, a request that has ended holds nothing any more.
    """
    for prompt, each in zip(prompts, params, strict=True):
        engine.add(prompt, each)
    pools: list[PoolSnapshot] = []
    scheduler, plan_step = engine.scheduler, engine.scheduler.plan

    def plan_and_look():
        plan = plan_step()
        pools.append(pool_snapshot(engine, plan))
        return plan

    scheduler.plan = plan_and_look
    try:
        while engine.has_work:
            engine.step()
    finally:
        del scheduler.plan
    return Run(engine.records, tuple(pools))


def states_and_pool(run: Run, step: int) -> Figure:
    """Every request up to the end of a step (counted from 1) and, beside it, the blocks that each held in that step."""
    found, lines = stretches(run.records, "step"), len(arrival_numbers(run.records))
    pool, size = run.pools[step - 1], len(run.pools[0].blocks)
    columns = max(1, round((1.5 * size) ** 0.5))
    with drawing(1, 2, size=(9.5, 3.4), width_ratios=[1.6, 1]) as (figure, (axes,)):
        states, blocks = axes
        states.axvspan(step - 1, step, color="black", alpha=0.1, linewidth=0)
        draw_states(states, found, lines, until=step)
        states.set(xlabel="steps", ylabel="request", xlim=(0, len(run.records.steps) + 1))
        for place, block in enumerate(pool.blocks):
            draw_block(blocks, place % columns, place // columns, block, pool.block_size)
        blocks.set(xlim=(-0.1, columns + 0.1), ylim=(-(-size // columns) + 0.1, -0.1), aspect="equal")
        blocks.set_axis_off()
        blocks.set_title(f"{pool.count('live'):>2} of {size} blocks held", fontsize=10)
        figure.legend(handles=[*keys_of_states(), Patch(facecolor="white", edgecolor="#C8C8C8", label="a free block")],
                      loc="outside lower center", ncols=5, fontsize=9)
        headline(figure, f"Step {step} of {len(run.records.steps)}: {what_happens(run, found, step)}")
    return figure


def what_happens(run: Run, found: Sequence[Stretch], step: int) -> str:
    """What is new in a step, by the numbers of the requests; else how many decode and how many wait."""
    news = {state: [each.request for each in found if each.start == step - 1 and each.state == state]
            for state in ("preempted", "prefill", "decode", "queued")}
    last = {each.request: each.end for each in found}
    news["finished"] = [request for request, end in last.items() if end == step]
    if parts := [f"request{'s' * (len(some) > 1)} {' and '.join(map(str, some))} {state}"
                 for state, some in news.items() if some]:
        return ", ".join(parts)
    record = run.records.steps[step - 1]
    waiting = f", {record.waiting} wait{'s' * (record.waiting == 1)}" if record.waiting else ""
    return f"{record.kinds.count('decode')} of {len(last)} requests decode{waiting}"


def moving(draw: Callable[[int], Figure], steps: int, dpi: int = 72, frame_ms: int = 450) -> bytes:
    """An animated PNG of `draw(1)` to `draw(steps)`, over and over.

    It moves wherever a page's pictures are shown, without a kernel, a script or trust in the page: no GIF does, since
    JupyterLab takes data out of the HTML of a page that was only opened.
    """
    from PIL import Image

    frames = []
    for step in range(1, steps + 1):
        file = io.BytesIO()
        draw(step).savefig(file, format="png", dpi=dpi)
        frames.append(Image.open(file).convert("RGB"))
    palette = frames[len(frames) // 2].quantize(63)
    frames = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    file = io.BytesIO()
    holds = [frame_ms] * (steps - 1) + [4 * frame_ms]
    frames[0].save(file, format="PNG", save_all=True, append_images=frames[1:], duration=holds, loop=0)
    return file.getvalue()
