"""Live cases: a service with a complaint, and cures to try on it. Virtual time, an 8B model on A100s.

A case is a load and a set-up. A cure changes the set-up, or the load where that is what an
operator can change, and nothing else; the same requests are then served again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from minillm.course.experiments import service, traffic
from minillm.ladder.records import Records
from minillm.measure import metrics
from minillm.measure.capacity import GB
from minillm.measure.virtual import VirtualProposer
from minillm.measure.workload import WorkItem, chat, lognormal, play, shared_prefix


@dataclass(frozen=True)
class Setup:
    """What an operator decides. clients: a closed loop of so many, or None for an open one; cap: of every answer."""

    gpus: int = 1
    kv_format: str = "bf16"
    weights: float = 1.0  # their bytes, as a share of 16 bits
    drafts_right: float | None = None  # with speculation: how often a draft is
    cap: int | None = None
    clients: int | None = None
    most_waiting: int | None = None
    settings: dict = field(default_factory=dict)  # of the engine

    def with_settings(self, **changes) -> Setup:
        """The same with other settings of the engine."""
        return replace(self, settings=self.settings | changes)


CURES: dict[str, Callable[[Setup], Setup]] = {
    "cache prompts": lambda setup: setup.with_settings(prefix_cache=True),
    "chunked prefill": lambda setup: setup.with_settings(chunked_prefill=True, max_step_tokens=256),
    "8-bit weights": lambda setup: replace(setup, weights=0.5),
    "8-bit keys and values": lambda setup: replace(setup, kv_format="int8"),
    "speculation": lambda setup: replace(setup, drafts_right=0.7),
    "a larger batch": lambda setup: setup.with_settings(max_batch=256),
    "pages for slots": lambda setup: setup.with_settings(kv="paged"),
    "cap answers at 200": lambda setup: replace(setup, cap=200),
    "another GPU": lambda setup: replace(setup, gpus=setup.gpus + 1),
    "half of the GPUs": lambda setup: replace(setup, gpus=max(1, setup.gpus // 2)),
}


@dataclass(frozen=True)
class Case:
    """A complaint. figure: the column that tells; less of it is better, unless it is tokens_per_s.

    cure: what the symptom asks for. tempting: what people try first, and what does little.
    """

    name: str
    complaint: str
    figure: str
    cure: str
    tempting: str
    setup: Setup
    load: Callable[[int], list[WorkItem]]  # of so many requests

    def better(self, before: dict, after: dict) -> float:
        """How many times better the figure has become."""
        old, new = before[self.figure], after[self.figure]
        if old == new:  # perhaps both are nothing
            return 1.0
        if self.figure == "tokens_per_s":
            return new / old
        return old / new if new else float("inf")


def uncapped(items: Sequence[WorkItem]) -> list[WorkItem]:
    """The same requests, whose answers end where they did, under a cap of 4,096 tokens."""
    return [replace(item, max_tokens=4096, stop_after=item.output_tokens) for item in items]


CASES = {
    case.name: case
    for case in (
        Case("slow start", "The answer runs well, but it takes seconds until it begins.", "ttft_p50_s",
             "cache prompts", "a larger batch", Setup(settings={"max_batch": 64}),
             lambda requests: shared_prefix(requests, 4096, rate=6.0)),
        Case("stutter", "Every now and then all answers stand still for a moment.", "itl_p99_ms",
             "chunked prefill", "8-bit keys and values",
             Setup(settings={"chunked_prefill": False, "max_step_tokens": 16_384}),
             lambda requests: service.chats(requests, rate=4.0)),
        Case("alone and slow", "There is one user, at night, and the text still crawls.", "latency_p50_s",
             "8-bit weights", "another GPU", Setup(clients=1),
             lambda requests: chat(max(2, requests // 20), scale=0.5)),
        Case("crowd", "Ever more people wait, and the tokens per second do not rise.", "tokens_per_s",
             "a larger batch", "8-bit keys and values", Setup(clients=200, settings={"max_batch": 8}),
             lambda requests: lognormal(0.5, requests, 100, 256)),
        Case("turned away", "Many requests are refused; the dashboard says that the GPU computes little.",
             "refused_share", "pages for slots", "a larger batch",
             Setup(most_waiting=4, settings={"kv": "slots", "kv_memory": 5 * GB}),
             lambda requests: uncapped(service.chats(requests, rate=5.0, context=4096))),
        Case("the bill", "Everything is quick. A million tokens cost more than elsewhere.",
             "cost_per_million_output_tokens", "half of the GPUs", "another GPU", Setup(gpus=4),
             lambda requests: service.chats(requests, rate=8.0, scale=0.5)),
    )
}


@dataclass(frozen=True)
class Treatment:
    """One case, served as it was and with a cure; rows to print, records to draw."""

    case: Case
    rows: list[dict]
    records: dict[str, Records]

    @property
    def times_better(self) -> float:
        """Of the case's figure; 1 where nothing was tried."""
        return self.case.better(self.rows[0], self.rows[-1])


def diagnose(case: str, cure: str | None = None, requests: int = 200) -> Treatment:
    """Serve a case's requests as they are, and again with the cure. ValueError lists the cases or the cures."""
    if case not in CASES:
        raise ValueError(f"unknown case {case!r}; known: {', '.join(CASES)}")
    if cure is not None and cure not in CURES:
        raise ValueError(f"unknown cure {cure!r}; known: {', '.join(CURES)}")
    chosen = CASES[case]
    items, setups = chosen.load(requests), {"before": chosen.setup}
    if cure is not None:
        setups[cure] = CURES[cure](chosen.setup)
    rows, records = [], {}
    for name, setup in setups.items():
        row, records[name] = run(setup, items)
        rows.append({"set-up": name, **row})
    return Treatment(chosen, rows, records)


def every_cure(case: str, requests: int = 200) -> list[dict]:
    """All cures on one case: its figure, how many times better it became, and what a million tokens cost then."""
    if case not in CASES:
        raise ValueError(f"unknown case {case!r}; known: {', '.join(CASES)}")
    chosen = CASES[case]
    items = chosen.load(requests)
    before, _ = run(chosen.setup, items)
    rows = [{"cure": "as it was", chosen.figure: before[chosen.figure], "times_better": 1.0, "cost": cost_of(before)}]
    for cure, change in CURES.items():
        after, _ = run(change(chosen.setup), items)
        rows.append({"cure": cure, chosen.figure: after[chosen.figure], "times_better": chosen.better(before, after),
                     "cost": cost_of(after)})
    return rows


def cost_of(row: dict) -> float:
    """Dollars for a million output tokens."""
    return row["cost_per_million_output_tokens"]


def run(setup: Setup, items: Sequence[WorkItem]) -> tuple[dict, Records]:
    """Serve the requests on a set-up: the figures that an operator watches, and the records of all its GPUs."""
    if setup.cap is not None:
        items = traffic.capped(items, setup.cap)
    cost = traffic.cost_model(setup.kv_format, setup.weights)
    proposer = None if setup.drafts_right is None else VirtualProposer(setup.drafts_right)
    engines = [traffic.server(cost, proposer=proposer, **setup.settings) for _ in range(setup.gpus)]
    refused = []
    if setup.clients is None:
        refused = service.serve_bounded(engines, items, setup.most_waiting)
    else:
        for number, engine in enumerate(engines):  # the clients are shared out
            share = items[number :: setup.gpus]
            play(engine, share, max(1, setup.clients // setup.gpus))
    records = metrics.merge([engine.records for engine in engines])
    found = metrics.summary(records, traffic.PRICE * setup.gpus)
    return {
        **traffic.figures(found), "refused_share": len(refused) / len(items),
        "cache_peak_share": found["kv"]["peak_share"],
        "mean_waiting": found["queue_depth"]["mean"],
        "cost_per_million_output_tokens": found["cost_per_million_output_tokens"],
    }, records
