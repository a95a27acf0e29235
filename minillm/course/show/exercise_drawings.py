"""What the exercises draw: always what the learner's own code did, right or wrong. Each function returns a Figure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

import torch
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from minillm.course.show.plots import (
    COLOURS,
    GREY,
    HATCH,
    LIGHT,
    Block,
    PoolSnapshot,
    Segment,
    colour,
    darker,
    draw_block,
    draw_timeline,
    drawing,
    headline,
)

# -- who runs when: exercises 4 and 13 ----------------------------------------------------------------------------

Rows = Sequence[tuple[int, Literal["prefill", "decode"]]]  # of a step: requests, numbered from 1, and what they do


def segments(steps: Iterable[tuple[float, float, Rows]]) -> list[Segment]:
    """The rows of steps (start, end, rows) as bars; a request keeps the lowest line that was free when it came."""
    steps = list(steps)
    last = {request: i for i, (_, _, rows) in enumerate(steps) for request, _ in rows}
    found, lines = [], {}
    for i, (start, end, rows) in enumerate(steps):
        for request, kind in rows:
            if request not in lines:
                lines[request] = next(line for line in range(len(lines) + 1) if line not in lines.values())
            found.append(Segment(lines[request], start - steps[0][0], end - steps[0][0], request, kind))
        lines = {request: line for request, line in lines.items() if last[request] > i}
    return found


def gantt(steps: Sequence[Rows], title: str = "") -> Figure:
    """Exercise 4: one line a row of the batch, one unit a step."""
    bars = segments((i, i + 1, rows) for i, rows in enumerate(steps))
    most = max(map(len, steps), default=0)
    return _timelines({"your scheduler": bars}, "steps",
                      title or f"{len(steps)} steps for {len({bar.request for bar in bars})} requests, of which at "
                               f"most {most} run at a time")


def step_timeline(runs: Mapping[str, Sequence[tuple[float, float, Rows]]], title: str = "") -> Figure:
    """Exercise 13: one panel a run, in seconds since its first step."""
    drawn = {name: segments(steps) for name, steps in runs.items()}
    ends = {name: max((bar.end for bar in bars), default=0.0) for name, bars in drawn.items()}
    return _timelines(drawn, "seconds", title or ", ".join(f"{name}: {end:.1f} s" for name, end in ends.items()))


def _timelines(drawn: Mapping[str, Sequence[Segment]], x: str, title: str) -> Figure:
    drawn = {name: bars for name, bars in drawn.items() if bars}
    heights = [1 + max(bar.line for bar in bars) for bars in drawn.values()]
    size = (9.5, 1.4 + sum(0.6 + 0.28 * height for height in heights))
    with drawing(max(len(drawn), 1), size=size, sharex=True,
                 height_ratios=[2 + height for height in heights] or None) as (figure, axes):
        longest = max((bar.end for bars in drawn.values() for bar in bars), default=1)
        for ax, (name, bars) in zip(axes[:, 0], drawn.items(), strict=False):
            draw_timeline(ax, bars, longest)
            ax.set_title(name)
        axes[-1, 0].set_xlabel(x)
        headline(figure, title)
        keys = [Patch(color=darker(GREY), label="prefill"), Patch(color=GREY, label="decode (number: request)")]
        figure.legend(handles=keys, loc="outside lower center", ncols=2)
    return figure


# -- who holds which block: exercises 5 and 6 ---------------------------------------------------------------------


def pool_of(
    num_blocks: int, block_size: int, tables: Mapping[int, tuple[Sequence[int], int]], cached: Iterable[int] = ()
) -> PoolSnapshot:
    """A pool at one moment. tables: of each request, numbered from 1, its blocks and how many tokens it has stored."""
    holders: list[list[int]] = [[] for _ in range(num_blocks)]
    cached = set(cached)
    filled = [block_size if block in cached else 0 for block in range(num_blocks)]
    for request, (blocks, tokens) in tables.items():
        for i, block in enumerate(blocks):
            holders[block].append(request)
            filled[block] = max(filled[block], min(max(tokens - i * block_size, 0), block_size))
    states = ["live" if holders[b] else "cached" if b in cached else "free" for b in range(num_blocks)]
    return PoolSnapshot(block_size, tuple(map(Block, states, map(tuple, holders), filled)))


def pool_map(moments: Mapping[str, PoolSnapshot], title: str = "") -> Figure:
    """Exercises 5 and 6: the blocks of your pool side by side, a line for each moment."""
    last = list(moments.values())[-1]
    counts = f"{last.count('live')} held, {last.count('cached')} cached, {last.count('free')} free"
    number = len(last.blocks)
    with drawing(size=(min(14.0, 2.6 + 0.7 * number), 1.7 + 0.7 * len(moments))) as (figure, axes):
        ax = axes[0, 0]
        for line, pool in enumerate(moments.values()):
            for place, block in enumerate(pool.blocks):
                draw_block(ax, place, line, block, pool.block_size)
        ax.set(xlim=(-0.1, number + 0.1), ylim=(len(moments) + 0.1, -0.1), aspect="equal", xlabel="block",
               xticks=[block + 0.5 for block in range(number)], xticklabels=range(number),
               yticks=[line + 0.5 for line in range(len(moments))], yticklabels=list(moments))
        ax.tick_params(length=0)
        ax.spines[:].set_visible(False)
        headline(figure, title or f"Your pool of {number} blocks, in the end {counts}")
        keys = [Patch(color=COLOURS[0], label="holds tokens (number: request)"),
                Patch(facecolor="white", edgecolor=COLOURS[0], hatch=HATCH, label="reserved, empty"),
                Patch(facecolor="white", edgecolor="black", linewidth=2, label="shared by several"),
                Patch(facecolor=LIGHT, edgecolor=GREY, hatch="..", label="cached, held by no request"),
                Patch(facecolor="white", edgecolor="#C8C8C8", label="free")]
        figure.legend(handles=keys, loc="outside lower center", ncols=3, fontsize=9)
    return figure


# -- what attention reads: exercise 7 -----------------------------------------------------------------------------

ENOUGH = 1e-4  # a change of 100 in a value shows at least so much, if the value has any weight


def slots_read(
    paged_attention: Callable, block_table: Sequence[int], num_tokens: int, new: int, num_blocks: int, block_size: int
) -> torch.Tensor:
    """Which slots each of `new` tokens reads [new, slots]: those whose value, when it is changed, changes the result.

    Two query heads share one KV head, and what no token has written holds numbers too.
    """
    draw = torch.Generator().manual_seed(0)
    q = torch.randn(new, 2, 4, generator=draw)
    keys, values = torch.randn(2, num_blocks, block_size, 1, 4, generator=draw)

    def result(values: torch.Tensor) -> torch.Tensor:
        return paged_attention(q.clone(), keys.clone(), values, list(block_table), num_tokens)

    before, read = result(values.clone()), torch.zeros(new, num_blocks * block_size, dtype=torch.bool)
    for slot in range(num_blocks * block_size):
        changed = values.clone()
        changed[slot // block_size, slot % block_size] += 100
        read[:, slot] = (result(changed) - before).abs().amax((1, 2)) > ENOUGH
    return read


def attention_map(
    paged_attention: Callable, block_table: Sequence[int], num_tokens: int, new: int = 3, num_blocks: int = 8,
    block_size: int = 4,
) -> Figure:
    """Exercise 7: a line for each new token, a column for each slot of the pool; what it reads is filled."""
    read = slots_read(paged_attention, block_table, num_tokens, new, num_blocks, block_size)
    position_in = {block * block_size + place: i * block_size + place
                   for i, block in enumerate(block_table) for place in range(block_size)}
    with drawing(size=(10, 1.7 + 0.34 * new)) as (figure, axes):
        ax = axes[0, 0]
        for row in range(new):
            for slot in range(num_blocks * block_size):
                position = position_in.get(slot, num_tokens)
                shade = COLOURS[0] if read[row, slot] else LIGHT if position < num_tokens else "white"
                ax.add_patch(Rectangle((slot + 0.05, row + 0.08), 0.9, 0.84, facecolor=shade, edgecolor=GREY,
                                       linewidth=0.4))
                if position < num_tokens:
                    ax.text(slot + 0.5, row + 0.5, position, ha="center", va="center", fontsize=8,
                            color="white" if read[row, slot] else "black")
        for block in range(1, num_blocks):
            ax.axvline(block * block_size, color="black", linewidth=1.2)
        ax.set(xlim=(0, num_blocks * block_size), ylim=(new, 0), yticks=[row + 0.5 for row in range(new)],
               yticklabels=[f"token {num_tokens - new + row}" for row in range(new)],
               xticks=[(block + 0.5) * block_size for block in range(num_blocks)],
               xticklabels=[f"block {block}" for block in range(num_blocks)])
        ax.tick_params(length=0)
        counts = ", ".join(map(str, read.sum(1).tolist()))
        headline(figure, f"Table {list(block_table)}, {num_tokens} tokens: the {new} new ones read {counts} slots")
        keys = [Patch(facecolor=COLOURS[0], edgecolor=GREY, label="read (number: position in the text)"),
                Patch(facecolor=LIGHT, edgecolor=GREY, label="of this text, not read"),
                Patch(facecolor="white", edgecolor=GREY, label="not of this text")]
        figure.legend(handles=keys, loc="outside lower center", ncols=3)
    return figure


# -- drafts: exercise 9 -------------------------------------------------------------------------------------------


def draft_tree(start: str, rounds: Sequence[tuple[Sequence[str], Sequence[str]]]) -> Figure:
    """Exercise 9: the text from left to right, and below it the drafts that were rejected.

    start: the text so far. rounds: of each step the drafts, and the tokens that it gave, as words.
    """
    accepted_shade, own_shade, rejected_shade = COLOURS[2], COLOURS[0], COLOURS[5]
    deepest = max((len(drafts) - _accepted(drafts, given) for drafts, given in rounds), default=0)
    with drawing(size=(11, 1.9 + 0.45 * deepest)) as (figure, axes):
        ax, x = axes[0, 0], 1.0
        _word(ax, 0.0, 0, start, GREY)
        for number, (drafts, given) in enumerate(rounds, 1):
            accepted, first = _accepted(drafts, given), x
            for i, word in enumerate(given):
                ax.plot((x - 1, x), (0, 0), color=GREY, linewidth=1, zorder=1)
                _word(ax, x, 0, word, accepted_shade if i < accepted else own_shade)
                x += 1
            for depth, word in enumerate(drafts[accepted:], 1):
                at = first + accepted
                ax.plot((at - 1 if depth == 1 else at, at), (depth - 1, depth), color=GREY, linewidth=1, zorder=1)
                _word(ax, at, depth, word, rejected_shade, struck=True)
            ax.axvspan(first - 0.5, x - 0.5, color=LIGHT if number % 2 else "white", zorder=0)
            ax.text((first + x - 1) / 2, -0.75, f"step {number}", ha="center", va="center", fontsize=9, color="black")
        ax.set(xlim=(-0.6, x - 0.4), ylim=(deepest + 0.6, -1.1))
        ax.set_axis_off()
        kept = sum(_accepted(drafts, given) for drafts, given in rounds)
        all_drafts, tokens = (sum(len(parts[i]) for parts in rounds) for i in (0, 1))
        headline(figure, f"{kept} of {all_drafts} drafts accepted: {tokens} tokens in {len(rounds)} steps")
        keys = [Patch(color=accepted_shade, label="draft, accepted"), Patch(color=own_shade, label="the target's own"),
                Patch(color=rejected_shade, label="draft, rejected, with what follows it")]
        figure.legend(handles=keys, loc="outside lower center", ncols=3)
    return figure


def _accepted(drafts: Sequence[str], given: Sequence[str]) -> int:
    """How many drafts a step gave, before its last token."""
    number = 0
    while number < min(len(drafts), len(given) - 1) and drafts[number] == given[number]:
        number += 1
    return number


def _word(ax, x: float, y: float, word: str, shade: str, struck: bool = False) -> None:
    paper = {"boxstyle": "round,pad=0.25", "facecolor": "white" if struck else shade, "edgecolor": shade}
    ax.text(x, y, word, ha="center", va="center", fontsize=9, color=shade if struck else "white", bbox=paper, zorder=2)


# -- exercise 13 --------------------------------------------------------------------------------------------------


def ladder_bars(tokens_per_s: Mapping[str, float], title: str = "") -> Figure:
    """Tokens a second of each rung, the first at the top."""
    names, speeds = list(tokens_per_s), list(tokens_per_s.values())
    with drawing(size=(9, 1.3 + 0.42 * len(names))) as (figure, axes):
        ax = axes[0, 0]
        ax.barh(names, speeds, color=[colour(1) if "your" in name else GREY for name in names], height=0.65)
        for place, speed in enumerate(speeds):
            ax.text(speed, place, f" {speed:,.0f}", va="center", fontsize=10)
        ax.set(xlabel="output tokens per second, all requests together", xlim=(0, 1.12 * max(speeds)))
        ax.invert_yaxis()
        yours = tokens_per_s.get("yours", speeds[-1])
        headline(figure, title or f"Yours: {yours / speeds[0]:.1f} times the tokens/s of {names[0].split(',')[0]}, "
                                  f"{yours / speeds[-1]:.2f} times those of {names[-1]}")
    return figure
