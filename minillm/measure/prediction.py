"""Virtual time put to the test: fitted to one recorded run, it predicts others of the same machine."""

from __future__ import annotations

from collections.abc import Sequence

from minillm.ladder.engine import Engine
from minillm.ladder.quantized import native_format
from minillm.measure import chapters, metrics
from minillm.measure.measurement import Measurement, Spread
from minillm.measure.setting import Setting
from minillm.measure.virtual import fit, virtual_engine
from minillm.measure.workload import WorkItem, chat, lognormal, play

ALLOWED = {"tokens_per_s": 5.0, "ttft_p50_s": 10.0, "itl_p50_s": 10.0}  # per cent
LIMITS = {"max_batch": 16, "max_step_tokens": 128, "max_context": 4096, "prefix_cache": False}


def virtual_prediction(setting: Setting) -> Measurement:
    """Fit the cost model to an open loop of chats, then replay other loads, of other lengths, and run them for real."""
    model, kv_format = setting.timed_model, native_format(setting.timed_model.dtype)
    requests, scale = setting.size((16, 0.04), (60, 0.06), (200, 0.25))
    limits = {**LIMITS, "kv_memory": setting.size(1 << 28, 1 << 28, 8 << 30)}

    def real(items: Sequence[WorkItem], clients: int | None = None):
        engine = Engine(model, **limits)
        play(engine, items, clients)
        return engine.records

    busy = real(chat(8, scale=scale), clients=8)
    rate = 8 / (busy.ended - busy.began)  # requests a second that the device can do, about
    cost = fit(real(chat(requests, 0.7 * rate, scale, seed=setting.seed)), model.config, kv_format, model.weight_bytes)
    loads = {
        "6 clients, varied answers": (lognormal(0.8, requests, 24, 40, seed=setting.seed + 3), 6),
        "chats half as long again, half the rate":
            (chat(requests, 0.35 * rate, 1.5 * scale, seed=setting.seed + 7), None),
    }
    rows = []
    for load, (items, clients) in setting.each("virtual_prediction", loads.items()):
        engine = virtual_engine(cost, **limits)
        play(engine, items, clients)
        rows += error_rows(load, figures(real(items, clients)), figures(engine.records))
    return chapters.measured("virtual_prediction", model, setting.timed_name, rows,
                             Spread.of([row["error_percent"] for row in rows]))


def figures(records) -> dict[str, float]:
    """What is compared: tokens per second over the whole run, and two medians."""
    found = metrics.summary(records)
    return {
        "tokens_per_s": found["output_tokens_per_s"], "ttft_p50_s": found["ttft_s"]["p50"],
        "itl_p50_s": found["itl_per_step_s"]["p50"],
    }


def error_rows(load: str, recorded: dict[str, float], predicted: dict[str, float]) -> list[dict]:
    """A row for each figure: by how many per cent the prediction is off, beside what it may be off by."""
    rows = []
    for figure, allowed in ALLOWED.items():
        error = 100 * (predicted[figure] / recorded[figure] - 1)
        rows.append({"load": load, "figure": figure, "recorded": recorded[figure], "predicted": predicted[figure],
                     "error_percent": error, "allowed_percent": allowed, "within": abs(error) <= allowed})
    return rows
