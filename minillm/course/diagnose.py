"""Live cases: a service with a complaint, and cures to try on it. Virtual time, an 8B model on A100s.

A case is a load and a service. A cure changes one thing of the service, and the same requests are
served again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from minillm.course.experiments.service import COST, CURES, FIGURES, chats, times_better
from minillm.ladder.records import Records
from minillm.measure.capacity import GB
from minillm.measure.service import Served, Service
from minillm.measure.workload import WorkItem, chat, lognormal, shared_prefix

COLUMNS = (*FIGURES, "refused_share", "cache_peak_share", "mean_waiting", COST)


@dataclass(frozen=True)
class Case:
    """A complaint, and the column that shows it.

    cure: what the symptom asks for. tempting: what is often tried first, and does little. load: the
    requests, given their number. clients: of a closed loop, None for an open one.
    """

    name: str
    complaint: str
    figure: str
    cure: str
    tempting: str
    service: Service
    load: Callable[[int], list[WorkItem]]
    clients: int | None = None


def uncapped(items: Sequence[WorkItem]) -> list[WorkItem]:
    """The same requests, whose answers end where they did, under a cap of 4,096 tokens."""
    return [replace(item, max_tokens=4096, stop_after=item.output_tokens) for item in items]


CASES = {
    case.name: case
    for case in (
        Case("slow start", "The answer runs well, but it takes seconds until it begins.", "ttft_p50_s",
             "cache prompts", "a larger batch", Service(max_batch=64),
             lambda requests: shared_prefix(requests, 4096, rate=6.0)),
        Case("stutter", "Every now and then all answers stand still for a moment.", "itl_p99_ms",
             "chunked prefill", "8-bit keys and values", Service(chunked_prefill=False, max_step_tokens=16_384),
             lambda requests: chats(requests, rate=4.0)),
        Case("alone and slow", "There is one user, at night, and the text still crawls.", "latency_p50_s",
             "8-bit weights", "another GPU", Service(),
             lambda requests: chat(max(2, requests // 20), scale=0.5), clients=1),
        Case("crowd", "Ever more people wait, and the tokens per second do not rise.", "tokens_per_s",
             "a larger batch", "8-bit keys and values", Service(max_batch=8),
             lambda requests: lognormal(0.5, requests, 100, 256), clients=200),
        Case("turned away", "Many requests are refused; the dashboard says that the GPU computes little.",
             "refused_share", "pages for slots", "a larger batch",
             Service(max_waiting=4, kv="slots", kv_memory=5 * GB),
             lambda requests: uncapped(chats(requests, rate=5.0, context=4096))),
        Case("the bill", "Everything is quick. A million tokens cost more than elsewhere.",
             COST, "half of the GPUs", "another GPU", Service(replicas=4),
             lambda requests: chats(requests, rate=8.0, scale=0.5)),
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
        """Of the case's figure; 1 where no cure was tried."""
        return times_better(self.case.figure, self.rows[0], self.rows[-1])


def diagnose(case: str, cure: str | None = None, requests: int = 200) -> Treatment:
    """Serve a case's requests as they are, and again with the cure. ValueError lists the cases or the cures."""
    runs = served(case, [cure] if cure is not None else [], requests)
    rows = [{"set-up": name, **run.row(*COLUMNS)} for name, run in runs.items()]
    return Treatment(CASES[case], rows, {name: run.records for name, run in runs.items()})


def every_cure(case: str, requests: int = 200) -> list[dict]:
    """All cures on one case: its figure, how many times better it became, and what a million tokens cost then."""
    rows = {name: run.row(*COLUMNS) for name, run in served(case, CURES, requests).items()}
    figure, before = CASES[case].figure, rows["before"]
    return [{"cure": "as it was" if row is before else name, figure: row[figure],
             "times_better": times_better(figure, before, row), "cost": row[COST]} for name, row in rows.items()]


def served(case: str, cures: Iterable[str], requests: int) -> dict[str, Served]:
    """A case's requests on its service as it is, under "before", and with each of these cures."""
    for kind, name, known in (("case", case, CASES), *(("cure", cure, CURES) for cure in cures)):
        if name not in known:
            raise ValueError(f"unknown {kind} {name!r}; known: {', '.join(known)}")
    chosen = CASES[case]
    items = chosen.load(requests)
    services = {"before": chosen.service, **{cure: CURES[cure](chosen.service) for cure in cures}}
    return {name: service.serve(items, chosen.clients) for name, service in services.items()}
