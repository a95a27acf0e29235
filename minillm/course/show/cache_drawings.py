"""Drawings of how keys and values are kept and how drafts are used, each from the records of a page's own run.

A colour is a row, as in `plots`; hatching means held and empty.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from minillm.course.show.plots import (
    COLOURS,
    GREY,
    HATCH,
    colour,
    drawing,
    headline,
    ink,
)

BOX = 0.86  # of the unit that a box has


def box(ax: Axes, x: float, y: float, shade: str, text: str, filled: float = 1.0, width: float = BOX) -> None:
    """A box with its lower left corner at (x, y): the filled part in a colour, the rest hatched."""
    ax.add_patch(Rectangle((x, y), width, BOX, facecolor="white", edgecolor=shade, hatch=HATCH, linewidth=0.8))
    ax.add_patch(Rectangle((x, y), width * filled, BOX, facecolor=shade, edgecolor=shade, linewidth=0.8))
    half_empty = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none"} if filled < 0.65 else None
    ax.text(x + width / 2, y + BOX / 2, text, ha="center", va="center", fontsize=9, bbox=half_empty,
            color="black" if half_empty else ink(shade))


# -- where a row's blocks lie ---------------------------------------------------------------------


def block_tables(rows: Sequence[tuple[int, Sequence[int]]], num_blocks: int, block_size: int) -> Figure:
    """Each row as its text sees its blocks, above and below the store as they lie in it, and lines between the two.

    rows: for each the tokens that it has stored, and its block table. The first half stands above the store.
    """
    wide = max(num_blocks, *(len(table) for _, table in rows))
    above = len(rows) - len(rows) // 2
    height = 1 + 2.2 * len(rows)
    with drawing(size=(min(12.0, 0.9 * wide + 1.6), 0.55 * height + 1.1)) as (figure, axes):
        ax = axes[0, 0]
        owners = {}
        for number, (stored, table) in enumerate(rows, start=1):
            level = 2.2 * (above - number + 1) if number <= above else -2.2 * (number - above)
            _draw_text(ax, number, stored, table, level, (num_blocks - len(table)) / 2, block_size)
            owners |= {block: (number, min(stored - i * block_size, block_size)) for i, block in enumerate(table)}
        for block in range(num_blocks):
            number, filled = owners.get(block, (0, 0))
            if number:
                box(ax, block, 0, colour(number), f"{block}", filled / block_size)
            else:
                ax.add_patch(Rectangle((block, 0), BOX, BOX, facecolor="white", edgecolor="#C8C8C8"))
                ax.text(block + BOX / 2, BOX / 2, f"{block}", ha="center", va="center", fontsize=9, color=GREY)
        ax.text(-0.2, BOX / 2, "store", ha="right", va="center", fontsize=10)
        ax.set(xlim=(-1.3, wide + 0.2), ylim=(-2.2 * (len(rows) - above) - 0.3, 2.2 * above + BOX + 0.3))
        ax.set_axis_off()
        taken = len(owners)
        headline(figure, f"{len(rows)} texts in {taken} of {num_blocks} blocks: the order of a text is that of its "
                         "table, not that of the store")
        figure.legend(handles=[Patch(color=GREY, label="tokens stored"),
                               Patch(facecolor="white", edgecolor=GREY, hatch=HATCH, label="held, empty"),
                               Patch(facecolor="white", edgecolor="#C8C8C8", label="free")],
                      loc="outside lower center", ncols=3, fontsize=9)
    return figure


def _draw_text(
    ax: Axes, number: int, stored: int, table: Sequence[int], level: float, left: float, block_size: int
) -> None:
    """A row's blocks in the order of its text, with the tokens in each, and its lines to the store."""
    ax.text(-0.2, level + BOX / 2, f"row {number}", ha="right", va="center", fontsize=10)
    for i, block in enumerate(table):
        filled = min(stored - i * block_size, block_size)
        box(ax, left + i, level, colour(number), _span(i * block_size, filled), filled / block_size)
        ends = (level, BOX) if level > 0 else (level + BOX, 0.0)
        ax.plot([left + i + BOX / 2, block + BOX / 2], ends, color=colour(number), linewidth=1.3, zorder=0)


def _span(first: int, number: int) -> str:
    """Tokens by their places: "32-47", or "48"."""
    return f"{first}-{first + number - 1}" if number > 1 else f"{first}"


# -- blocks that several rows hold ----------------------------------------------------------------


@dataclass
class Node:
    """A run of blocks that the same rows hold, and the runs that follow it."""

    blocks: list[int]
    rows: list[int]
    following: list[Node] = field(default_factory=list)


def grow(tables: Mapping[int, Sequence[int]], depth: int = 0) -> list[Node]:
    """The tree of block tables, by row: rows whose tables agree so far share a node."""
    groups: dict[int, dict[int, Sequence[int]]] = {}
    for row, table in tables.items():
        if depth < len(table):
            groups.setdefault(table[depth], {})[row] = table
    nodes = []
    for block, own in groups.items():
        following = grow(own, depth + 1)
        if len(following) == 1 and following[0].rows == list(own):
            following[0].blocks.insert(0, block)
            nodes.append(following[0])
        else:
            nodes.append(Node([block], list(own), following))
    return nodes


def prefix_tree(tables: Mapping[str, Sequence[int]], block_size: int) -> Figure:
    """Block tables by the rows' names as a tree from left to right: what several rows hold is drawn once, with their
    number. A box is as wide as its run of blocks."""
    names = list(tables)
    roots = grow(dict(enumerate(tables.values())))
    longest = max(map(len, tables.values()))
    held, taken = sum(map(len, tables.values())), len({block for table in tables.values() for block in table})
    with drawing(size=(10, 0.5 * len(names) + 1.3)) as (figure, axes):
        ax, next_line = axes[0, 0], iter(range(len(names)))
        for node in roots:
            _draw_node(ax, node, 0, next_line, lambda row: names[row])
        ax.set(xlim=(-0.2, longest + 4.5), ylim=(len(names) + 0.1, -0.2))
        ax.set_axis_off()
        headline(figure, f"{len(names)} rows hold {held} blocks of {block_size} tokens by their tables; with what they "
                         f"share, {taken} are taken")
    return figure


def _draw_node(ax: Axes, node: Node, depth: int, next_line: Iterator[int], name: Callable[[int], str]) -> float:
    """A node and all that follows it -> the height at which it stands. Rows that end with it are named beside it."""
    width, first = len(node.blocks), node.blocks[0]
    heights = [_draw_node(ax, each, depth + width, next_line, name) for each in node.following]
    if ended := [row for row in node.rows if not any(row in each.rows for each in node.following)]:
        heights.append(float(next(next_line)))
        ax.text(depth + width + 0.1, heights[-1] + BOX / 2, ", ".join(map(name, ended)), va="center", fontsize=10)
    height, end = sum(heights) / len(heights), depth + width - 1 + BOX
    shared = len(node.rows) > 1
    in_order = node.blocks == list(range(first, first + width))
    text = f"{first} to {first + width - 1}" if in_order and width > 2 else ", ".join(map(str, node.blocks))
    text += f": ×{len(node.rows)}" if shared else ""
    box(ax, depth, height, COLOURS[1] if shared else COLOURS[0], text, width=end - depth)
    for other in heights:
        ax.plot([end, depth + width], [height + BOX / 2, other + BOX / 2], color=GREY, linewidth=1.2, zorder=0)
    return height


# -- a key on the lines of int8 and int4 ----------------------------------------------------------


def number_lines(ways: Mapping[str, tuple[Sequence[float], Sequence[float], Sequence[float]]], title: str) -> Figure:
    """A panel for each way to store numbers: above the numbers as computed, below all values that it can store, and
    the ones that the numbers become.

    ways: by name, the numbers, the values that can be stored, and the numbers as read back.
    """
    every = [float(number) for numbers, _, _ in ways.values() for number in numbers]
    margin = 0.04 * (max(every) - min(every))
    with drawing(len(ways), size=(10, 1.3 * len(ways) + 0.9), sharex=True) as (figure, axes):
        for ax, (name, parts) in zip(axes[:, 0], ways.items(), strict=True):
            numbers, levels, read = ([float(number) for number in part] for part in parts)
            ax.vlines(levels, 0, 0.3, color=GREY, linewidth=0.5 if len(levels) > 64 else 1.2)
            ax.plot([numbers, read], [1, 0.3], color="#C0C0C0", linewidth=0.8, zorder=0)
            ax.plot(numbers, [1] * len(numbers), "o", color=COLOURS[0], markersize=4, alpha=0.7)
            ax.plot(read, [0.3] * len(read), "o", color=COLOURS[5], markersize=4)
            ax.set(xlim=(min(every) - margin, max(every) + margin), ylim=(0, 1.2), yticks=[0.3, 1],
                   yticklabels=["as stored", "as computed"],
                   title=f"{name}: {len(numbers)} numbers become {len(set(read))} of {len(levels)} values")
            ax.spines["left"].set_visible(False)
            ax.tick_params(left=False)
        headline(figure, title)
    return figure


# -- drafts, accepted and rejected ----------------------------------------------------------------


LANE = 0.62  # height of a lane of rejected drafts, in trunk boxes


def draft_tree(
    rounds: Sequence[tuple[Sequence[int], Sequence[int]]], text: Callable[[int], str], across: int = 14
) -> Figure:
    """The answer as a trunk, read like text, and every rejected draft on a branch that ended.

    rounds: of each verification its drafts, and the tokens that came of it: the accepted drafts and the target's own.
    text: a token as a word. across: tokens to a line.
    """
    trunk = [(token, place < len(tokens) - 1) for _, tokens in rounds for place, token in enumerate(tokens)]
    branches = rejected_drafts(rounds)
    lines, y = [], 0.0  # of each line: the height at which it stands
    for first in range(0, len(trunk), across):
        own = lanes_of([(at - first, drafts) for at, drafts in branches if first <= at < first + across])
        lines.append((y, first, own))
        y += 1.15 + LANE * (1 + max((lane for *_, lane in own), default=-1))
    with drawing(size=(11, 0.5 * y + 1.1)) as (figure, axes):
        ax = axes[0, 0]
        for top, first, own in lines:
            for x, (token, accepted) in enumerate(trunk[first : first + across]):
                _draw_token(ax, x, top, text(token), COLOURS[0] if accepted else GREY)
            for x, drafts, lane in own:
                _draw_branch(ax, x, top, lane, [text(token) for token in drafts])
        right = max([across, *(x + len(drafts) for *_, own in lines for x, drafts, _ in own)])
        ax.set(xlim=(-0.2, right), ylim=(y, -0.1))
        ax.set_axis_off()
        accepted, drafted = sum(kept for _, kept in trunk), sum(len(drafts) for drafts, _ in rounds)
        headline(figure, f"{len(trunk)} tokens in {len(rounds)} rounds: {accepted} of {drafted} drafts accepted")
        figure.legend(handles=[Patch(color=COLOURS[0], label="draft, accepted"),
                               Patch(color=GREY, label="the target's own token"),
                               Patch(facecolor="white", edgecolor=COLOURS[5], label="draft, rejected")],
                      loc="outside lower center", ncols=3, fontsize=9)
    return figure


def rejected_drafts(rounds: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[tuple[int, Sequence[int]]]:
    """Of each round that lost drafts: the place in the answer where the target said something else, and the drafts."""
    found, at = [], 0
    for drafts, tokens in rounds:
        at += len(tokens)
        if len(drafts) >= len(tokens):
            found.append((at - 1, drafts[len(tokens) - 1 :]))
    return found


def lanes_of(branches: Sequence[tuple[int, Sequence[int]]]) -> list[tuple[int, Sequence[int], int]]:
    """Branches of one line, each with the first lane below the trunk that is free where it begins."""
    ends: list[int] = []
    placed = []
    for x, drafts in branches:
        lane = next((lane for lane, end in enumerate(ends) if end <= x), len(ends))
        ends[lane:] = [x + len(drafts), *ends[lane + 1 :]]
        placed.append((x, drafts, lane))
    return placed


def _draw_branch(ax: Axes, x: int, top: float, lane: int, words: Sequence[str]) -> None:
    y = top + 1 + LANE * lane
    ax.plot([x - 0.03, x - 0.03, x], [top + BOX / 2, y + 0.22, y + 0.22], color=COLOURS[5], linewidth=1.2)
    for place, word in enumerate(words):
        ax.add_patch(Rectangle((x + place, y), 0.94, 0.46, facecolor="white", edgecolor=COLOURS[5], linewidth=0.9))
        ax.text(x + place + 0.47, y + 0.23, word.strip()[:10], ha="center", va="center", fontsize=7, color=COLOURS[5])


def _draw_token(ax: Axes, x: float, y: float, word: str, shade: str) -> None:
    ax.add_patch(Rectangle((x, y), 0.94, BOX, facecolor=shade, edgecolor="white"))
    ax.text(x + 0.47, y + BOX / 2, word.strip()[:10], ha="center", va="center", fontsize=8, color=ink(shade))
