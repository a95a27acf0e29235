"""What the course's sliders show, as plain functions from their positions to a picture.

Each works without widgets: `widgets.py` only puts controls over them.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from minillm.course.experiments import speculation
from minillm.course.experiments.common import NoForward
from minillm.course.show import plots
from minillm.fast.engine import Engine
from minillm.ladder.continuous import Row
from minillm.ladder.quantized import kv_bytes_per_token
from minillm.ladder.records import Records, accepted_drafts
from minillm.ladder.request import SamplingParams
from minillm.load.config import ModelConfig
from minillm.measure.capacity import capacity
from minillm.measure.roofline import StepShape
from minillm.measure.virtual import DEVICES, CostModel

# -- a schedule, step by step ---------------------------------------------------------------------


def schedule_at(records: Records, step: int) -> Figure:
    """What has been in which row up to a step, counted from 1, and in the title what that step did."""
    segments = plots.timeline(records, "step")
    past = [segment for segment in segments if segment.start < step]
    lines, record = 1 + max(segment.line for segment in segments), records.steps[step - 1]
    with plots.drawing(size=(9.5, 1.9 + 0.28 * lines)) as (figure, axes):
        ax = axes[0, 0]
        plots.draw_timeline(ax, past, len(records.steps), lines)
        ax.axvspan(step - 1, step, color="black", alpha=0.12, linewidth=0)
        ax.set_xlabel("steps")
        plots.headline(figure, f"Step {step} of {len(records.steps)}: {step_sentence(records, step)}")
        ax.set_title(f"{record.waiting} waiting,  {record.blocks_live} blocks live,  {record.blocks_free} free")
    return figure


def step_sentence(records: Records, step: int) -> str:
    """How many rows did what in a step (counted from 1)."""
    kinds = list(plots.row_kinds(records)[step - 1].values())
    words = {"prefill": "in prefill", "decode": "decoding", "idle": "idle"}
    return ", ".join(f"{kinds.count(kind)} {word}" for kind, word in words.items() if kind in kinds)


# -- a pool that fills and empties ----------------------------------------------------------------

POOL_BLOCKS, POOL_CAP, INSTRUCTIONS = 48, 96, 32  # blocks; the cap on an answer; tokens of a shared beginning


def pool_after(steps: int, kv: str = "paged", shared: bool = False, block_size: int = 16) -> plots.PoolSnapshot:
    """A pool of 48 * 16 tokens after some steps of twelve requests; scheduler and pool are the real ones.

    kv: "paged" or "slots". shared: all prompts begin with the same 32 tokens. Every request
    may get 96 tokens, and gets between 12 and 80.
    """
    config = ModelConfig.preset("smollm2-135m")
    engine = Engine(
        None, executor=NoForward(config), kv_format="fp32", kv=kv, block_size=block_size, max_batch=12,
        kv_memory=POOL_BLOCKS * 16 * kv_bytes_per_token(config, "fp32"), max_context=256,
    )
    for number in range(12):
        own = [1000 + 100 * number + i for i in range(8 + INSTRUCTIONS * (not shared))]
        engine.add(
            [*range(INSTRUCTIONS * shared), *own],
            SamplingParams(max_tokens=POOL_CAP, stop_after=12 + 17 * number % 69, ignore_eos=True),
        )
    for _ in range(steps):
        if engine.has_work:
            engine.step()
    return plots.pool_snapshot(engine)


def pool_at(steps: int, kv: str = "paged", shared: bool = False, block_size: int = 16) -> Figure:
    """`pool_after` as a picture."""
    pool = pool_after(steps, kv, shared, block_size)
    title = (f"After {steps} steps: {pool.requests} requests hold {pool.count('live')} of {len(pool.blocks)} blocks, "
             f"{pool.shared} of them shared; {pool.wasted_tokens} token slots are reserved and empty")
    return plots.block_map({kv: pool}, title, columns=16 if block_size >= 16 else 24)


# -- how many fit, and how fast -------------------------------------------------------------------

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True)
class Fleet:
    """One device under one model: how many requests fit, and the step time of a batch of them."""

    fits: int
    parts_gb: dict[str, float]  # weights, overhead, keys and values in whole requests, rest
    rows: list[int]
    tokens_per_s: list[float]
    step_ms: list[float]
    doubled_at: float  # requests at which a step takes twice as long as with one


def explore_capacity(device: str, model: str, context: int, kv_format: str, overhead_gb: float = 4.0) -> Fleet:
    """The capacity sum and the decode curve of a device in the table, by its data sheet.

    Raises ValueError for an unknown device or model, or where the weights leave no room.
    """
    if device not in DEVICES:
        raise ValueError(f"unknown device {device!r}; known: {', '.join(DEVICES)}")
    config, memory = ModelConfig.preset(model), DEVICES[device].memory_gb
    room = capacity(config, memory, None, overhead_gb, context, kv_format)
    cost = CostModel.of_device(device, config, kv_format)
    seconds = {n: cost.seconds(StepShape.decode([context] * n)) for n in ROWS}
    used = room.max_concurrent * room.request_gb
    parts = {"weights": room.weights_gb, "overhead": overhead_gb, "keys and values": used,
             "too small for one more": room.cache_gb - used}
    one_more = (cost.seconds(StepShape.decode([context] * 1024)) - seconds[1]) / 1023  # seconds a request adds
    return Fleet(
        room.max_concurrent, parts, list(ROWS), [n / seconds[n] for n in ROWS], [1e3 * seconds[n] for n in ROWS],
        doubled_at=1 + seconds[1] / one_more,
    )


def capacity_at(device: str, model: str, context: int, kv_format: str) -> Figure:
    """`explore_capacity` as a picture; or the sentence that says why nothing fits."""
    try:
        found = explore_capacity(device, model, context, kv_format)
    except ValueError as error:
        return plots.note(str(error))
    with plots.drawing(1, 3, size=(11, 4), width_ratios=[0.7, 1.4, 1.4]) as (figure, axes):
        memory, speed, step = axes[0]
        bottom = 0.0
        for number, (name, gb) in enumerate(found.parts_gb.items()):
            look = {"color": plots.COLOURS[number]} if number < 3 else {"facecolor": "white", "edgecolor": plots.GREY}
            memory.bar([device], [gb], bottom=bottom, label=name, width=0.5, **look)
            bottom += gb
        memory.set(ylabel="GB", title="memory", xlim=(-0.6, 0.6))
        memory.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.1))
        curves = (speed, found.tokens_per_s, "output tokens per second"), (step, found.step_ms, "ms per step")
        for ax, ys, label in curves:
            plots.draw_curves(ax, {label: (found.rows, ys)}, log_x=True, log_y=True)
            ax.axvspan(max(found.fits, 0.5), found.rows[-1] * 2, color=plots.LIGHT, zorder=0)
            ax.axvline(found.doubled_at, color="black", linestyle=":", linewidth=1)
            ax.set(xlabel="requests in the batch", ylabel=label, xlim=(0.9, 1200),
                   xticks=[1, 4, 16, 64, 256, 1024], xticklabels=["1", "4", "16", "64", "256", "1,024"])
        speed.set_title("throughput (grey: does not fit)")
        step.set_title(f"a step takes twice as long from {found.doubled_at:,.0f} on")
        requests = f"{context:,} tokens of {kv_format} each: {found.fits} requests fit"
        plots.headline(figure, f"{model} on {device}, {requests}")
    return figure


# -- what drafts of some acceptance buy ------------------------------------------------------------


def promise(costs: Sequence[dict], acceptance: float, batch: int) -> dict[int, float]:
    """By the number of drafts a row, the speed-up over plain decoding that measured step costs promise.

    costs: rows of `speculation.step_costs`. What proposing costs is not in it.
    """
    lengths = [row["k"] for row in costs if row["batch"] == batch]
    return {k: speculation.predict(costs, batch, k, speculation.expected_tokens(acceptance, k)) for k in lengths}


def drafts_at(costs: Sequence[dict], acceptance: float, batch: int) -> Figure:
    """The speed-up by the number of drafts in this batch; and with the best number, by acceptance in every batch."""
    here, batches = promise(costs, acceptance, batch), sorted({row["batch"] for row in costs})
    best = max(here, key=here.get)
    with plots.drawing(1, 2, size=(10, 4)) as (figure, (axes,)):
        by_length, by_acceptance = axes
        plots.draw_curves(by_length, {f"acceptance {acceptance:g}, batch {batch}": (list(here), list(here.values()))})
        by_length.plot([best], [here[best]], "o", color="black", markersize=10, fillstyle="none")
        by_length.set(xlabel="drafts a row (circle: the best)", ylabel="times plain decoding", ylim=0,
                      title=f"acceptance {acceptance:g}, batch {batch}")
        shares = [step / 20 for step in range(21)]
        plots.draw_curves(by_acceptance, {
            f"batch {each}": (shares, [max(promise(costs, share, each).values()) for share in shares])
            for each in batches})
        by_acceptance.plot([acceptance], [here[best]], "o", color="black", markersize=10, fillstyle="none")
        by_acceptance.set(xlabel="acceptance", title="with the best number of drafts")
        for ax in axes:
            ax.axhline(1, color=plots.GREY, linewidth=1.5)
        gain = f"k = {best} is best, {here[best]:.2f} times plain decoding" if best else "no draft pays"
        plots.headline(figure, f"Each draft right with chance {acceptance:g}, in a batch of {batch}: {gain}")
    return figure


# -- drafts, round by round -----------------------------------------------------------------------


@dataclass(frozen=True)
class DraftRound:
    """One verification: what was proposed, how much of it the target kept, and the tokens that came of it."""

    drafts: list[int]
    accepted: int
    tokens: list[int]  # the accepted drafts and the target's own token


class Watched:
    """A proposer that notes the rounds of one request that is served alone; everything else is the inner one's."""

    def __init__(self, inner) -> None:
        self.inner, self.proposed = inner, []

    def __getattr__(self, name: str):
        return getattr(self.inner, name)

    def propose(self, rows: Sequence[Row]):
        """The inner one's drafts, noted before they are verified."""
        result = self.inner.propose(rows)
        self.proposed += [list(row.drafts) for row in rows if row.samples]
        return result


def draft_rounds(engine: Engine, watched: Watched, prompt: list[int], max_tokens: int) -> list[DraftRound]:
    """Serve one prompt greedily on an engine whose speculator has the watched proposer; its rounds in order."""
    engine.add(prompt, SamplingParams(max_tokens=max_tokens))
    rounds = []
    while engine.has_work:
        watched.proposed.clear()
        events = engine.step()
        for event in events:
            drafts = watched.proposed[0] if watched.proposed else []
            rounds.append(DraftRound(drafts, accepted_drafts(drafts, event.token_ids), event.token_ids))
    return rounds


def rounds_html(tokenizer, rounds: Sequence[DraftRound], shown: int) -> str:
    """The answer after `shown` rounds: accepted drafts, the target's own tokens, and what the last round rejected."""
    parts, before = [], 0
    for number, entry in enumerate(rounds[:shown], start=1):
        kept, own = entry.tokens[: entry.accepted], entry.tokens[entry.accepted :]
        rejected = entry.drafts[entry.accepted :] if number == shown else []
        parts += [
            _span(tokenizer, kept, "background:#0072B2;color:white;border-radius:3px"),
            _span(tokenizer, rejected, "color:#B04A00;text-decoration:line-through"),
            _span(tokenizer, own, "border-bottom:2px solid #7F7F7F"),
        ]
        before += len(entry.tokens)
    last = rounds[shown - 1]
    line = (f"Round {shown} of {len(rounds)}: {len(last.drafts)} drafted, {last.accepted} accepted; "
            f"{before} tokens in {shown} forwards so far ({before / shown:.2f} a forward)")
    key = ("<small>blue: drafts that were accepted · struck out: the rest of this round's drafts · "
           "underlined: the target's own token</small>")
    return f"<p><b>{line}</b></p><p style='white-space:pre-wrap'>{''.join(parts)}</p>{key}"


def _span(tokenizer, ids: Sequence[int], style: str) -> str:
    return f"<span style='{style}'>{html.escape(tokenizer.decode(list(ids)))}</span>" if ids else ""
