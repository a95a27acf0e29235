"""Where a command's result goes: stdout, a file, the recorded measurements, and the bar while it runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from minillm.course.show.live import Log
from minillm.course.show.tables import cell, text_table
from minillm.measure.measurement import MEASUREMENTS, Measurement

CURE = "Close what else runs and run it again, or leave it a core: --threads 1"  # of a busy machine
SECONDS = {"queue_s": "queue", "ttft_s": "TTFT", "itl_per_step_s": "ITL per step", "itl_per_token_s": "ITL per token",
           "latency_s": "latency"}


def bar(label: str, total: int):
    """A progress bar on stderr; where that is no terminal, a line now and then."""
    from tqdm import tqdm

    return tqdm(total=total, desc=label, leave=False, disable=None) if sys.stderr.isatty() else Log(label, total)


def write(arguments, measurement: Measurement, result: dict) -> None:
    """Say if the machine was busy; keep the measurement, and write the result, where --save and --json ask for it."""
    say_if_busy(measurement.disturbed)
    if root := place(arguments):
        print(f"saved {measurement.save(root)}")
    write_json(arguments.json, result)


def place(arguments) -> Path | None:
    """The folder in which a command's measurement is kept: --out, the recorded ones with --save, or none."""
    if out := getattr(arguments, "out", None):
        return Path(out)
    return MEASUREMENTS if arguments.save else None


def say_if_busy(disturbance: str) -> None:
    """The sentence, and what to do; nothing for a machine that was not busy."""
    if disturbance:
        print(f"{disturbance}. {CURE}")


def write_json(where: str | None, result: dict) -> None:
    """One line on stdout for "-", nothing for None, else a file."""
    if where == "-":
        print(json.dumps(result))
    elif where is not None:
        Path(where).write_text(json.dumps(result, indent=1) + "\n")


def print_summary(found: dict) -> None:
    """`metrics.summary`, or `seen_by_clients`, in the lines that a server is judged by."""
    rows = [{"seconds": title, **found[name]} for name, title in SECONDS.items() if found.get(name)]
    counts = found["requests"]
    if not counts["finished"] + counts["aborted"] + counts["failed"]:
        print("no request was answered, so there is nothing to show")
        return
    print(text_table(rows, {name: name for name in ("seconds", "n", "p50", "p90", "p99", "max")}))
    if few := next((row["warning"] for row in rows if row["warning"]), None):
        print(few)
    print(f"{cell(found['output_tokens_per_s'])} output tokens/s over {cell(found['span_s'])} s; "
          f"{counts['finished']:,} requests finished" + "".join(
              f", {counts[kind]:,} {kind}" for kind in ("aborted", "failed") if counts[kind]))
    if "mean_in_flight" in found:
        print(f"{cell(found['mean_in_flight'])} requests in flight on average")
    if "batch" in found:
        _print_engine(found)


def _print_engine(found: dict) -> None:
    """What only the engine itself can tell."""
    batch, kv = found["batch"], found["kv"]
    print(f"batch: {cell(batch['mean_rows'])} rows on average, at most {cell(batch['peak_rows'])}; queue at most "
          f"{cell(found['queue_depth']['peak'])}; cache full to {cell(kv.get('peak_share'))} of it at the peak; "
          f"{cell(found['preemptions'])} preemptions")
    if found["speculation"]["drafted_tokens"]:
        print(f"drafts: {cell(found['speculation']['acceptance_rate'])} accepted, "
              f"{cell(found['speculation']['tokens_per_round'])} tokens a round")
    if found["cost_per_million_output_tokens"] is not None:
        print(f"cost per million output tokens: ${cell(found['cost_per_million_output_tokens'])}")
