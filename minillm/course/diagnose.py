"""Live cases: a service with a complaint, and cures to try on it. Virtual time, an 8B model on A100s.

A case is a load and a service. A cure changes one thing of the service, and the same requests are
served again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from minillm.course.experiments.service import COST, CURES, FIGURES, chats, effect, times_better
from minillm.course.figures import service_row
from minillm.ladder.records import Records
from minillm.measure.capacity import GB
from minillm.measure.service import Service
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
        Case("crowd", "Many people wait, and the tokens per second do not rise.", "tokens_per_s",
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


def services(case: str, cures: Collection[str] = ()) -> dict[str, Service]:
    """A case's service as it is, called "before", and with each of these cures; ValueError lists the cases or the
    cures."""
    for kind, name, known in (("case", case, CASES), *(("cure", cure, CURES) for cure in cures)):
        if name not in known:
            raise ValueError(f"unknown {kind} {name!r}; known: {', '.join(known)}")
    own = CASES[case].service
    return {"before": own, **{cure: CURES[cure](own) for cure in cures}}


def diagnose(case: str, cures: Collection[str] = (), requests: int = 200) -> tuple[list[dict], dict[str, Records]]:
    """Serve a case's requests on each of its `services`.

    Returns rows to print, with the `times_better` that the case's figure became and what that is (`effect`), and
    records to draw.
    """
    tried, chosen = services(case, cures), CASES[case]
    items, rows, records = chosen.load(requests), [], {}
    for name, service in tried.items():
        served = service.serve(items, chosen.clients)
        row, records[name] = service_row(served, *COLUMNS), served.records
        better = times_better(chosen.figure, rows[0] if rows else row, row)
        rows.append({"set-up": name, **row, "times_better": better, "effect": effect(better)})
    return rows, records
