"""Pictures of limits, load and latency, in the style of `plots`. Titles state what the drawn rows say.

What is drawn is worked out by functions that need no figure (`in_system`, `shares`), which
the tests compare with the metrics.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from minillm.measure.roofline import Ceilings
from minillm.show.plots import COLOURS, GREY, LIGHT, drawing, headline


def roofline(rows: Sequence[Mapping], limits: Ceilings, title: str | None = None) -> Figure:
    """The two limits as one roof, and measured steps under it, from rows of `service.roofline_steps`."""
    ridge = limits.flops_per_s / limits.bytes_per_s
    ends = [min(0.5 * rows[0]["flop_per_byte"], 0.1 * ridge), 4 * max(ridge, *(row["flop_per_byte"] for row in rows))]
    xs = [ends[0], ridge, ends[1]]
    if title is None:
        one, most = rows[0], max(rows, key=lambda row: row["flop_per_byte"])
        title = (f"One decoded token uses {one['mbu']:.0%} of the bandwidth and {one['mfu']:.1%} of the matmul rate; "
                 f"{most['kind']} of {most['tokens']} tokens {most['mbu']:.0%} and {most['mfu']:.0%}")
    with drawing(size=(9, 4.8)) as (figure, axes):
        ax = axes[0, 0]
        roof = [min(x * limits.bytes_per_s, limits.flops_per_s) / 1e9 for x in xs]
        ax.plot(xs, roof, color="black", label="the roof: bandwidth, then matmul rate")
        ax.axvline(ridge, color=GREY, linewidth=1, linestyle=":")
        ax.annotate(f"ridge: {ridge:.1f} FLOP a byte", (ridge, roof[0]), xytext=(5, 0), textcoords="offset points",
                    fontsize=9, color=GREY)
        for (kind, marker), shade in zip((("decode", "o"), ("prefill", "s")), COLOURS, strict=False):
            some = [row for row in rows if row["kind"] == kind]
            ax.plot([row["flop_per_byte"] for row in some], [row["gflop_per_s"] for row in some], marker,
                    color=shade, label=f"{kind}, measured (number: tokens in the step)")
            for row in some:
                below = kind == "prefill"
                ax.annotate(row["tokens"], (row["flop_per_byte"], row["gflop_per_s"]), fontsize=9, color=shade,
                            xytext=(0, -15 if below else 7), textcoords="offset points", ha="center")
        ax.set(xscale="log", yscale="log", xlabel="arithmetic per byte read: FLOP / byte", ylabel="GFLOP/s")
        ax.grid(color=LIGHT)
        ax.legend(loc="lower right")
        headline(figure, title)
    return figure
