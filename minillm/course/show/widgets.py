"""Controls over the pictures of `explore.py` and `explore_service.py`, for a notebook with a running kernel.

A panel owns its controls, and moving one draws the picture once. It is one output with
two faces: a reader with a kernel sees the controls; one without (a page on the web, a
notebook that was only opened) sees the same picture at its first position, as an image.
There is no stop button, since a kernel hears of a click only when a cell has ended: every
move does a bounded amount of work. Without ipywidgets the still picture is all there is.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from matplotlib.figure import Figure

try:
    import ipywidgets
except ImportError:  # a host may have none, and a damaged one is as good as none
    ipywidgets = None

from minillm.course.diagnose import CURES
from minillm.course.show import explore, explore_service, step_by_step
from minillm.course.show.step_by_step import Run
from minillm.ladder.records import Records
from minillm.load.config import PRESETS
from minillm.measure.virtual import DEVICES

_shown: dict[str, Panel] = {}  # by name: a cell that runs again closes what it showed before


class Panel:
    """Controls over what `draw(**positions)` returns: a Figure, or a string of HTML.

    Showing a second panel of the same name closes the first, observers and all. twin: the PNG that a reader without a
    kernel sees, where it is not the first picture.
    """

    def __init__(
        self, name: str, draw: Callable[..., Figure | str], twin: bytes | None = None, **controls: Any
    ) -> None:
        if name in _shown:
            _shown[name].close()
        _shown[name] = self
        self.name, self.draw, self.twin, self.controls = name, draw, twin, controls
        self.first = self.picture()
        if ipywidgets is None:
            return
        self.face = ipywidgets.HTML(self.first) if isinstance(self.first, str) else ipywidgets.Image(value=self.first)
        self.box = ipywidgets.VBox([*controls.values(), self.face])
        for control in controls.values():
            control.observe(self.redraw, names="value")

    def picture(self) -> bytes | str:
        """What the controls' positions show: the bytes of a PNG, or HTML."""
        drawn = self.draw(**{name: control.value for name, control in self.controls.items()})
        return drawn if isinstance(drawn, str) else png(drawn)

    def redraw(self, change: object = None) -> None:
        """Draw again, after a control has moved."""
        self.face.value = self.picture()

    def close(self) -> None:
        """Let go of the controls; what was shown stays as it is."""
        if _shown.get(self.name) is self:
            del _shown[self.name]
        if ipywidgets is None:
            return
        for control in self.controls.values():
            control.unobserve_all()
            control.close()
        self.face.close()
        self.box.close()

    def _repr_mimebundle_(self, **kwargs) -> dict:
        """Both faces: the widgets, and the twin or the first picture for whoever has no kernel."""
        still = self.twin or self.first
        twin = {"text/html": still} if isinstance(still, str) else {"image/png": base64.b64encode(still).decode()}
        return twin if ipywidgets is None else {**self.box._repr_mimebundle_(**kwargs), **twin}


def png(figure: Figure) -> bytes:
    """A figure as the bytes of a PNG file."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=100)
    return file.getvalue()


def _control(kind: str, value: Any, label: str, **settings: Any) -> Any:
    """A control of ipywidgets; where that is not installed, its value alone."""
    if ipywidgets is None:
        return SimpleNamespace(value=value)
    return getattr(ipywidgets, kind)(value=value, description=label, **settings)


def _slider(label: str, lowest: int, highest: int, start: int) -> Any:
    """A slider that draws when it is let go, so that a drag draws one picture and not fifty."""
    return _control("IntSlider", start, label, min=lowest, max=highest, continuous_update=False,
                    layout={"width": "60%"})


def schedule_stepper(records: Records, start: int = 1) -> Panel:
    """Step through a schedule: who was in which row. `records` need mode "all"."""
    return Panel(
        "schedule", lambda step: explore.schedule_at(records, step),
        step=_slider("step", 1, len(records.steps), start),
    )


def run_stepper(run: Run, start: int = 1) -> Panel:
    """Step through a run: the state of every request, and the pool beside it. Without a kernel it moves by itself."""
    def draw(step: int) -> Figure:
        return step_by_step.states_and_pool(run, step)

    steps = len(run.pools)
    return Panel("run", draw, step_by_step.moving(draw, steps), step=_slider("step", 1, steps, start))


def pool_explorer() -> Panel:
    """Fill and empty a block pool, as slots or as pages, with and without a shared beginning."""
    return Panel(
        "pool", explore.pool_at,
        steps=_slider("steps", 0, 90, 12),
        kv=_control("ToggleButtons", "paged", "policy", options=["paged", "slots"]),
        shared=_control("Checkbox", False, "same first 32 tokens"),
        block_size=_control("SelectionSlider", 16, "block size", options=[4, 8, 16, 32]),
    )


def capacity_explorer() -> Panel:
    """How many requests fit on a device, and where its throughput bends."""
    return Panel(
        "capacity", explore.capacity_at,
        device=_control("Dropdown", next(iter(DEVICES)), "device", options=list(DEVICES)),
        model=_control("Dropdown", "llama-3.1-8b", "model", options=sorted(PRESETS)),
        context=_control("SelectionSlider", 4096, "context", options=[2**n for n in range(8, 18)],
                         continuous_update=False),
        kv_format=_control("ToggleButtons", "bf16", "KV format", options=["bf16", "int8", "int4"]),
    )


def cure_chooser(case: str, requests: int = 120) -> Panel:
    """A case of chapter 11, and beside it the same requests under the cure that is chosen."""
    return Panel(
        f"cure of {case}", lambda cure: explore_service.cure_at(case, cure, requests),
        cure=_control("Dropdown", explore_service.NO_CURE, "cure", options=[explore_service.NO_CURE, *CURES],
                      layout={"width": "60%"}),
    )


def arrival_explorer(requests: int = 120) -> Panel:
    """Requests that arrive more and more often."""
    return Panel(
        "arrivals", lambda per_s: explore_service.arrivals_at(per_s, requests),
        per_s=_slider("per second", 1, 30, 6),
    )


def budget_explorer(start: int = 512) -> Panel:
    """Four streams, a long prompt, and how many tokens a step may feed."""
    return Panel(
        "budget", explore_service.budget_at,
        tokens_a_step=_control("SelectionSlider", start, "budget", options=[2**n for n in range(6, 14)],
                               continuous_update=False, layout={"width": "60%"}),
    )


def pools_explorer(people: int = 200) -> Panel:
    """Four GPUs: how many are kept for people, and how many people come."""
    return Panel(
        "pools", lambda for_people, per_s: explore_service.pools_at(for_people, per_s, people),
        for_people=_slider("for people", 1, 3, 2), per_s=_slider("people a second", 5, 90, 8),
    )


def acceptance_explorer(costs: Sequence[dict], batch: int) -> Panel:
    """What drafts of any acceptance would buy in each batch whose steps were measured; begins with `batch`."""
    return Panel(
        "acceptance", lambda percent, batch: explore.drafts_at(costs, percent / 100, batch),
        percent=_slider("% accepted", 0, 100, 70),
        batch=_control("ToggleButtons", batch, "batch", options=sorted({row["batch"] for row in costs})),
    )


def draft_stepper(tokenizer, rounds: list[explore.DraftRound], start: int = 1) -> Panel:
    """Step through the rounds of a speculative decode: what was drafted, what was kept."""
    return Panel(
        "drafts", lambda shown: explore.rounds_html(tokenizer, rounds, shown),
        shown=_slider("round", 1, len(rounds), start),
    )
