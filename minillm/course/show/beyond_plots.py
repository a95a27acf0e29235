"""Pictures of chapters 14 and 15 that no other chapter needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from minillm.course.show import plots
from minillm.course.show.plots import COLOURS, GREY, LIGHT, drawing, headline

PARTS = {"work_ms": "reading and multiplying", "all_reduce_ms": "all-reduces", "fixed_ms": "fixed"}


def step_parts(panels: Mapping[str, Sequence[Mapping]], title: str) -> Figure:
    """A panel for each load: the step of 1, 2, 4, 8 devices in its parts, a bar for each link; its tokens/s above."""
    links = list(dict.fromkeys(row["link"] for rows in panels.values() for row in rows))
    with drawing(1, len(panels), size=(10.5, 4.2)) as (figure, axes):
        for ax, (name, rows) in zip(axes[0], panels.items(), strict=True):
            places = {devices: place for place, devices in enumerate(sorted({row["devices"] for row in rows}))}
            for row in rows:
                draw_step(ax, places[row["devices"]], links.index(row["link"]), row)
            ax.set_xticks(list(places.values()), [str(devices) for devices in places])
            ax.set(title=name, xlabel="devices", ylabel="ms a step",
                   ylim=(0, 1.3 * max(row["step_ms"] for row in rows)))
            ax.tick_params(bottom=False)
            ax.grid(color=LIGHT, axis="y")
        handles = [axes[0, 0].bar(0, 0, color=shade, label=PARTS[part])
                   for part, shade in zip(PARTS, (COLOURS[0], COLOURS[1], GREY), strict=True)]
        figure.legend(handles=handles, loc="outside lower center", ncols=3)
        headline(figure, f"{title} (left bar {links[0]}, right bar {links[-1]}; above: tokens/s)")
    return figure


def draw_step(ax, place: int, side: int, row: Mapping) -> None:
    """One bar, its parts on top of each other."""
    below, x = 0.0, place + (side - 0.5) * 0.42
    for part, shade in zip(PARTS, (COLOURS[0], COLOURS[1], GREY), strict=True):
        ax.bar(x, row[part], 0.36, bottom=below, color=shade)
        below += row[part]
    ax.annotate(f"{row['tokens_per_s']:,.0f}", (x, below), xytext=(0, 3), textcoords="offset points", ha="center",
                fontsize=8, rotation=55)


def goodput(rows: Sequence[Mapping], bounds: str, title: str) -> Figure:
    """Against the rate: tokens/s of all, requests a second within both bounds, and the share that they are."""
    rates = [row["rate"] for row in rows]
    best = {name: max(rows, key=lambda row, name=name: row[name])["rate"] for name in ("tokens_per_s", "good_per_s")}
    with drawing(1, 3, size=(11, 3.6)) as (figure, axes):
        columns = (("tokens_per_s", "tokens/s of all"), ("good_per_s", "requests/s within the bounds"),
                   ("share", "share within the bounds"))
        for number, (ax, (name, label)) in enumerate(zip(axes[0], columns, strict=True), start=1):
            ax.plot(rates, [row[name] for row in rows], marker="o", color=plots.colour(number))
            ax.set(xlabel="requests a second that arrive", ylabel=label, ylim=(0, None))
            ax.grid(color=LIGHT)
            if name in best:
                ax.axvline(best[name], color="black", linestyle=":", linewidth=1.2)
                ax.set_title(f"most at {best[name]:g} a second", fontsize=10)
        axes[0, 0].yaxis.set_major_formatter(plots.thousands)
        axes[0, 1].plot(rates, rates, color=GREY, linestyle="--", linewidth=1)
        top = 1.3 * max(row["good_per_s"] for row in rows)
        axes[0, 1].set_ylim(0, top)
        axes[0, 1].annotate("all in time", (0.86 * top, 0.86 * top), xytext=(-5, 3), textcoords="offset points",
                            ha="right", fontsize=8)
        axes[0, 2].set_title(bounds, fontsize=10)
        axes[0, 2].yaxis.set_major_formatter(PercentFormatter(1))
        headline(figure, title)
    return figure


def client_loads(rows: Sequence[Mapping], limit: int, title: str) -> Figure:
    """Against the clients of a closed loop: tokens/s of all, and the two waits of one. limit: the server's rows."""
    clients = [row["clients"] for row in rows]
    with drawing(1, 2, size=(10, 3.8)) as (figure, axes):
        first, second = axes[0]
        first.plot(clients, [row["tokens_per_s"] for row in rows], marker="o", color=COLOURS[0])
        first.set(ylabel="tokens/s of all")
        for number, (name, label) in enumerate((("ttft_ms", "TTFT p50"), ("itl_ms", "ITL p50")), start=2):
            second.plot(clients, [row[name] for row in rows], marker="os"[number - 2], color=plots.colour(number),
                        label=label, linestyle=("-", "--")[number - 2])
        second.set(ylabel="milliseconds")
        second.legend()
        for ax in (first, second):
            ax.set(xlabel="clients", xlim=(0, 1.05 * max(clients)), ylim=(0, None))
            ax.set_xticks(clients)
            ax.yaxis.set_major_formatter(plots.thousands)
            ax.grid(color=LIGHT)
            ax.axvline(limit, color="black", linestyle=":", linewidth=1.2)
            ax.set_title(f"dotted: the {limit} rows of a step", fontsize=10)
        headline(figure, title)
    return figure
