"""Where the time of a decode step goes as its rows grow, by the sums of `roofline.py`, and the knees of that curve.

What is drawn is worked out by `split` and `knees`, which the tests compare with the cost model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullLocator

from minillm.course.experiments.common import decode_seconds
from minillm.course.setting import Setting
from minillm.course.show.plots import COLOURS, GREY, LIGHT, drawing, headline, thousands
from minillm.fast.memory import default_kv_memory, native_format
from minillm.measure.capacity import GB
from minillm.measure.roofline import StepShape, least_work, read_numbers
from minillm.measure.service import Service
from minillm.measure.virtual import CostModel

CONTEXTS = (512, 4096, 16_384)
PARTS = {"weights": "reading the weights", "cache": "reading keys and values", "arithmetic": "arithmetic",
         "fixed": "fixed"}
COLOUR_OF = {"weights": COLOURS[0], "cache": COLOURS[3], "arithmetic": COLOURS[2], "fixed": GREY}
DASH_OF = {"weights": "-", "cache": "--", "arithmetic": "-.", "fixed": ":"}


@dataclass(frozen=True)
class Device:
    """What the picture needs of a device with a model on it. kv_memory: bytes for keys and values."""

    cost: CostModel
    kv_memory: int

    def contexts(self) -> list[int]:
        """CONTEXTS, the longer ones cut at what the model can take; each once."""
        most = self.cost.config.max_position_embeddings
        return list(dict.fromkeys(min(context, most) for context in CONTEXTS))


@dataclass(frozen=True)
class Knees:
    """Rows of one context at which a step's cost changes its kind.

    arithmetic, cache: the fewest rows whose arithmetic, or whose keys and values, take longer than the
    weights. memory: the most rows that fit, so that a knee above it is never seen.
    """

    arithmetic: int
    cache: int
    memory: int


def split(cost: CostModel, context: int, rows: int) -> dict[str, float]:
    """Milliseconds of each of PARTS in a decode step of `rows` requests of `context` tokens, and of the whole "step".

    A GPU reads and multiplies concurrently, so that the parts add up to more than the step.
    """
    shape = StepShape.decode([context] * rows)
    work = least_work(cost.config, cost.kv_format, shape, weight_bytes=0)
    seconds = {
        "weights": cost.weight_bytes / cost.bytes_per_s, "cache": work.bytes / cost.kv_bytes_per_s,
        "arithmetic": work.flops / cost.flops_per_s, "fixed": cost.overhead_s, "step": cost.seconds(shape),
    }
    return {part: 1e3 * value for part, value in seconds.items()}


def knees(device: Device, context: int) -> Knees:
    """The knees of one context."""
    one = split(device.cost, context, 1)  # what a row adds to arithmetic and cache; the weights are read once for all
    arithmetic, cache = (int(one["weights"] / one[part]) + 1 for part in ("arithmetic", "cache"))
    return Knees(arithmetic, cache, int(device.kv_memory // (context * device.cost.unit_costs[0])))


def by_data_sheet(service: Service | None = None) -> Device:
    """A service's device and model, by the maker's figures: as a default Llama-3.1-8B in 16 bits on an A100."""
    service = service or Service()
    return Device(service.cost, round(service.capacity().cache_gb * GB))


def this_machine(setting: Setting) -> Device:
    """The device at hand with its measured ceilings under the course's model, and the memory that an engine takes.

    The fixed part is what one measured step of one row takes beyond reading and multiplying.
    """
    model, limits = setting.model, setting.ceilings
    kv_format, overlap = native_format(model.dtype), 1.0 if setting.gpu else 0.0
    weight_bytes = read_numbers(model.config) * model.dtype.itemsize
    cost = CostModel(model.config, kv_format, weight_bytes, limits.bytes_per_s, limits.bytes_per_s, limits.flops_per_s,
                     overhead_s=0.0, overlap=overlap)
    steps, prompt = setting.size(4, 16), 16
    taken = decode_seconds(model, 1, prompt, steps).median
    fixed = max(0.0, taken - cost.seconds(StepShape.decode([prompt + steps // 2])))
    memory = default_kv_memory(model, Service.max_step_tokens, Service.max_batch, ())
    return Device(replace(cost, overhead_s=fixed), memory)


def step_parts(devices: Mapping[str, Device], title: str) -> Figure:
    """A line of panels for each device, a panel for each context: what a step's parts take, up to where memory ends.

    Circles stand where a part overtakes the reading of the weights; grey is what does not fit.
    """
    with drawing(len(devices), 3, size=(11, 0.9 + 3.3 * len(devices)), sharex="row", sharey="row") as (figure, axes):
        for line, (name, device) in zip(axes, devices.items(), strict=True):
            contexts = device.contexts()
            most = max(knees(device, context).memory for context in contexts)
            for ax, context in zip(line, contexts, strict=False):
                draw_parts(ax, device, context, most)
                ax.set(xscale="log", yscale="log", xlim=(0.9, 1.3 * most), xlabel="rows in the step")
                for axis in (ax.xaxis, ax.yaxis):
                    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if most < 100 or axis is ax.yaxis else (1,)))
                    axis.set_major_formatter(thousands)
                    axis.set_minor_locator(NullLocator())
                ax.grid(color=LIGHT)
            for ax in line[len(contexts):]:
                ax.set_axis_off()
            line[0].set_ylabel(f"{name}\nms")
        keys = [Line2D([], [], color=COLOUR_OF[part], linestyle=DASH_OF[part], label=label)
                for part, label in PARTS.items()]
        keys += [Line2D([], [], color="black", linewidth=3, label="the step"),
                 Line2D([], [], color="black", marker="o", fillstyle="none", linestyle="", markersize=10,
                        label="overtakes the weights")]
        figure.legend(handles=keys, loc="outside lower center", ncols=6, fontsize=9)
        headline(figure, title)
    return figure


def draw_parts(ax: Axes, device: Device, context: int, most: int) -> None:
    """One panel, up to `most` rows: the parts and their sum for all rows that fit, the knees, and the memory's end."""
    found = knees(device, context)
    rows = sorted({max(1, round(found.memory ** (place / 40))) for place in range(41)})
    parts = [split(device.cost, context, number) for number in rows]
    ax.plot(rows, [each["step"] for each in parts], color="black", linewidth=3)
    for part in PARTS:
        if any(each[part] for each in parts):  # a logarithm of zero has no place
            ax.plot(rows, [each[part] for each in parts], color=COLOUR_OF[part], linestyle=DASH_OF[part], linewidth=1.8)
    for part in ("cache", "arithmetic"):
        if (at := getattr(found, part)) <= found.memory:
            ax.plot([at], [parts[0]["weights"]], "o", color=COLOUR_OF[part], fillstyle="none", markersize=10,
                    markeredgewidth=2)
    ax.axvspan(found.memory, 1e9, color=LIGHT, zorder=0)
    ax.axvline(found.memory, color="black", linewidth=1, linestyle=":")
    if 4 * found.memory < most:
        ax.text(0.96, 0.06, "does not fit", transform=ax.transAxes, ha="right", fontsize=9)
    ax.set_title("\n".join(knee_lines(found, context)), fontsize=9)


def knee_lines(found: Knees, context: int) -> list[str]:
    """How many fit, and the knees that lie below that, in the order in which they are met."""
    knees_met = sorted([(found.cache, "keys and values overtake"), (found.arithmetic, "arithmetic overtakes")])
    return [f"{context:,} tokens each: {found.memory:,} fit",
            *(f"{what} the weights at {rows:,}" for rows, what in knees_met if rows <= found.memory)]
