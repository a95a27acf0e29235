"""Drawings of one idea each, from what a page's own loops noted down.

    fed_by_step     rungs 0 and 1: what each step feeds, and what it reads from the cache
    slots_by_step   rungs 2 and 3: which request holds which slot, and where it is idle
    flat_mask       rung 3: which keys each token of a flat list may see
    gaps            rung 3: how long a stream waits for each of its tokens
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from minillm.course.show.plots import (
    COLOURS,
    GREY,
    HATCH,
    LIGHT,
    Segment,
    colour,
    darker,
    draw_timeline,
    drawing,
    headline,
    idle_time,
    thousands,
)

Fed = Sequence[tuple[int, int]]  # of each step: position of the first token fed, and how many
Step = Sequence[tuple[int, str | int, bool]]  # of each row: its slot, its request, whether the row is idle


def fed_by_step(runs: Mapping[str, Fed]) -> Figure:
    """One panel a run, one line a step: positions that are fed, and before them those that are read from a cache."""
    steps = max(map(len, runs.values()))
    with drawing(1, len(runs), size=(9, 1.6 + 0.22 * steps), sharex=True, sharey=True) as (figure, axes):
        for ax, (name, fed) in zip(axes[0], runs.items(), strict=True):
            for step, (start, count) in enumerate(fed):
                ax.broken_barh([(0, start)], (step + 0.1, 0.8), color=LIGHT)
                ax.broken_barh([(start, count)], (step + 0.1, 0.8), color=COLOURS[0])
            ax.set_title(name)
            ax.set(xlabel="position in the text", ylim=(steps, 0), yticks=[step + 0.5 for step in range(steps)],
                   yticklabels=range(1, steps + 1))
            ax.set_xlim(0)
        axes[0, 0].set_ylabel("step")
        totals = (f"{name} feeds {sum(count for _, count in fed):,} tokens" for name, fed in runs.items())
        headline(figure, "; ".join(totals))
        keys = [Patch(color=COLOURS[0], label="fed to the model"), Patch(color=LIGHT, label="read from the cache")]
        figure.legend(handles=keys, loc="outside lower center", ncols=2)
    return figure


def slots_by_step(runs: Mapping[str, Sequence[Step]]) -> Figure:
    """One panel a run, one line a slot: each request in its colour, its prompt's step darker, idle rows hatched."""
    drawn = {name: slot_segments(steps) for name, steps in runs.items()}
    longest = max(map(len, runs.values()))
    counts = {name: f"{name}: {len(runs[name])} steps, {idle_time(bars):.0f} idle slot-steps"
              for name, bars in drawn.items()}
    heights = [1 + max(segment.line for segment in segments) for segments in drawn.values()]
    size = (9.5, 1.3 + sum(0.6 + 0.28 * height for height in heights))
    with drawing(len(runs), size=size, sharex=True, height_ratios=[2 + h for h in heights]) as (figure, axes):
        for ax, (name, segments) in zip(axes[:, 0], drawn.items(), strict=True):
            draw_timeline(ax, segments, longest)
            ax.set(ylabel="slot", yticklabels=range(len(ax.get_yticks())), title=name if len(runs) > 1 else "")
        axes[-1, 0].set_xlabel("steps")
        headline(figure, "; ".join(counts.values()))
        keys = [Patch(color=darker(GREY), label="prompt and first token"), Patch(color=GREY, label="one token a step")]
        if any(map(idle_time, drawn.values())):
            keys.append(Patch(facecolor="white", edgecolor=GREY, hatch=HATCH, label="idle: the request has ended"))
        figure.legend(handles=keys, loc="outside lower center", ncols=3)
    return figure


def slot_segments(steps: Sequence[Step]) -> list[Segment]:
    """A bar for each row of each step; requests are numbered from 1 in the order in which they appear."""
    numbers: dict[str | int, int] = {}
    segments = []
    for at, step in enumerate(steps):
        for slot, request, idle in step:
            kind = "idle" if idle else "decode" if request in numbers else "prefill"
            number = numbers.setdefault(request, len(numbers) + 1)
            segments.append(Segment(slot, at, at + 1, number, kind))
    return segments


def flat_mask(rows: Sequence[tuple[int, int, int]]) -> Figure:
    """Flat tokens downwards, stored keys of all slots across: a filled square is a key that the token may see.

    rows: of each row its slot, the position of the first token it feeds, and how many it feeds.
    """
    keys, fed = sum(start + count for _, start, count in rows), sum(count for *_, count in rows)
    with drawing(size=(9, 1.9 + 0.27 * fed)) as (figure, axes):
        ax, first_key, token = axes[0, 0], 0, 0
        for number, (slot, start, count) in enumerate(rows, start=1):
            end, shade = start + count, colour(number)
            for position in range(start, end):
                ax.broken_barh([(first_key + key + 0.05, 0.9) for key in range(end)], (token + 0.05, 0.9), color=LIGHT)
                ax.broken_barh([(first_key + key + 0.05, 0.9) for key in range(position + 1)], (token + 0.05, 0.9),
                               color=[darker(shade) if key >= start else shade for key in range(position + 1)])
                token += 1
            words = f"slot {slot}: {start} stored, {count} fed"
            ax.text(first_key + end / 2, -0.35, words, ha="center", fontsize=9, color=darker(shade))
            first_key += end
        ax.set(xlim=(0, keys), ylim=(fed, -1.1), xlabel="keys, slot after slot", ylabel="flat tokens of one forward",
               xticks=[], yticks=[at + 0.5 for at in range(fed)], yticklabels=range(fed))
        seen = sum(position + 1 for _, start, count in rows for position in range(start, start + count))
        headline(figure, f"{fed} flat tokens and {keys} keys: {seen} of {fed * keys} pairs are looked at")
        legend = [Patch(color=GREY, label="sees: stored by an earlier step"),
                  Patch(color=darker(GREY), label="sees: fed in this step"),
                  Patch(color=LIGHT, label="in the same slot, but later in the text")]
        figure.legend(handles=legend, loc="outside lower center", ncols=3)
    return figure


def gaps(runs: Mapping[str, tuple[Sequence[float], Sequence[float]]], title: str) -> Figure:
    """One panel a run, a stem for each token of a stream: when it came, in s, and how many ms after the one before."""
    with drawing(len(runs), size=(9, 1.2 + 1.7 * len(runs)), sharex=True, sharey=True) as (figure, axes):
        for number, (ax, (name, (moments, waits))) in enumerate(zip(axes[:, 0], runs.items(), strict=True), start=1):
            ax.vlines(moments, 0, waits, color=colour(number), linewidth=1.5)
            ax.plot(moments, waits, "o", color=colour(number), markersize=4)
            ax.set(title=name, ylabel="ms", ylim=0)
            ax.yaxis.set_major_formatter(thousands)
        axes[-1, 0].set_xlabel("seconds since the streams began")
        headline(figure, title)
    return figure
