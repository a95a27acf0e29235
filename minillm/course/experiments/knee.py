"""Where more clients stop paying: throughput and latency against the number of requests at once."""

from __future__ import annotations

from collections.abc import Sequence

from minillm.course.experiments import chapters
from minillm.course.experiments.service import percentiles
from minillm.course.setting import Setting
from minillm.fast.engine import Engine
from minillm.measure import metrics
from minillm.measure.measurement import Measurement, Spread
from minillm.measure.workload import lognormal, play


def knee(setting: Setting) -> Measurement:
    """A closed loop of more and more clients, and the knee by `knee_of`."""
    model = setting.timed_model
    clients = setting.size((1, 4, 16, 32, 64), (1, 2, 4, 8, 16, 24, 32, 48, 64),
                           (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512))
    mean_tokens, prompt = setting.size((8, 8), (12, 8), (128, 64))
    chapters.warm_up(model)
    rows: list[dict] = []
    for number in setting.each("knee", clients):
        items = lognormal(0.3, max(number + number // 2, 4), mean_tokens, prompt, seed=setting.seed)
        longest = prompt + items[0].max_tokens
        engine = Engine(model, max_batch=number, max_context=longest, max_step_tokens=max(256, 2 * number),
                        prefix_cache=False)
        play(engine, items, number)
        found = metrics.summary(engine.records)
        rows.append({
            "clients": number, "mean_rows": found["batch"]["mean_rows"], "tokens_per_s": found["output_tokens_per_s"],
            "tokens_per_s_each": found["output_tokens_per_s"] / number, **percentiles(found),
        })
    at = knee_of(rows)
    for row in rows:
        row |= {"power": power(row), "knee": "<- knee" if row is at else ""}
    return chapters.measured("knee", model, setting.timed_name, rows, Spread.of([row["tokens_per_s"] for row in rows]))


def power(row: dict) -> float:
    """Tokens per second over the median gap between tokens, in ms (power: Kleinrock, 1979)."""
    return row["tokens_per_s"] / row["itl_p50_ms"]


def knee_of(rows: Sequence[dict]) -> dict:
    """The row with the most power.

    Up to it throughput grows faster than latency, in per cent; past it, latency does. With
    steps of a + b n seconds for n rows it lies at n = a / b: where the rows' own work takes
    as long as what they share.
    """
    return max(rows, key=power)
