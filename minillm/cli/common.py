"""What the commands share: their common options, the bar that shows progress, and where results go."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tqdm import tqdm

from minillm.guard.inputs import check_at_least
from minillm.load.source import DEFAULT


def add_model(parser) -> None:
    """The option that names a model."""
    parser.add_argument("--model", default=DEFAULT, help=f"a name for load_model (default: {DEFAULT})")


def add_outputs(parser) -> None:
    """The options that say where a measurement goes."""
    parser.add_argument("--save", action="store_true", help="keep the measurement under notebooks/measurements")
    add_json(parser)


def add_json(parser) -> None:
    """The option that writes the result as JSON."""
    parser.add_argument("--json", metavar="FILE", type=writable,
                        help="write the result there too; - prints it as the last line")


def writable(where: str) -> str:
    """The place itself. Refused before anything runs, and not after, is one that cannot be written."""
    path = Path(where)
    if where != "-" and (path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK)):
        raise argparse.ArgumentTypeError(f"{where} cannot be written: give a file in a folder that is there, or -")
    return where


def add_workload(parser) -> None:
    """The options that change a workload."""
    parser.add_argument("--requests", type=int, help="how many (default: the workload's own number)")
    parser.add_argument("--rate", type=float, help="requests a second, of an open loop (default: the workload's own)")
    parser.add_argument("--clients", type=int, help="a closed loop of so many, in place of arrivals")
    parser.add_argument("--scale", type=float, default=1.0, help="shrink all lengths by this factor")
    parser.add_argument("--trace", metavar="FILE", help="with the workload `trace`: a CSV of arrival and lengths")


def workload_settings(arguments) -> dict:
    """What these options ask of the workload's own function; ValueError for both loops at once, or no client."""
    check_at_least(1, clients=arguments.clients)
    if (arguments.workload == "trace") != (arguments.trace is not None):
        raise ValueError("the workload `trace` and --trace FILE belong together")
    if arguments.clients is not None and arguments.rate is not None:
        raise ValueError("--clients asks again once answered, and has no --rate: leave one of them")
    asked = {"requests": arguments.requests, "rate": arguments.rate, "path": arguments.trace}
    return {name: value for name, value in asked.items() if value is not None} | {"scale": arguments.scale}


@contextmanager
def lengths_that_fit() -> Iterator[None]:
    """A workload's request that can never run is refused with the option that makes it shorter."""
    from minillm.guard.inputs import RequestError

    try:
        yield
    except RequestError as error:
        raise ValueError(f"{error}. --scale 0.1 makes all prompts and answers a tenth as long") from None


def write(arguments, measurement, result: dict) -> None:
    """Keep the measurement, and write the result, where the options ask for it."""
    if arguments.save:
        print(f"saved {measurement.save()}")
    write_json(arguments.json, result)


def write_json(where: str | None, result: dict) -> None:
    """One line on stdout for "-", nothing for None, else a file."""
    if where == "-":
        print(json.dumps(result))
    elif where is not None:
        Path(where).write_text(json.dumps(result, indent=1) + "\n")


def bar(label: str, total: int):
    """A progress bar on stderr, if that is a terminal."""
    return tqdm(total=total, desc=label, leave=False, disable=None)


def print_summary(found: dict) -> None:
    """What `metrics.summary` or `seen_by_clients` found, in the lines that a server is judged by."""
    from minillm.course.show.tables import cell, text_table

    names = {"queue_s": "queue", "ttft_s": "TTFT", "itl_per_step_s": "ITL per step", "itl_per_token_s": "ITL per token",
             "latency_s": "latency"}
    rows = [{"seconds": title, **found[name]} for name, title in names.items() if found.get(name)]
    counts = found["requests"]
    if not counts["finished"] + counts["aborted"]:
        print("no request was answered, so there is nothing to show")
        return
    print(text_table(rows, {name: name for name in ("seconds", "n", "p50", "p90", "p99", "max")}))
    if few := next((row["warning"] for row in rows if row["warning"]), None):
        print(few)
    print(f"{cell(found['output_tokens_per_s'])} output tokens/s over {cell(found['span_s'])} s; "
          f"{counts['finished']:,} requests finished" + f", {counts['aborted']:,} aborted" * bool(counts["aborted"]))
    if "mean_in_flight" in found:
        print(f"{cell(found['mean_in_flight'])} requests in flight on average")
    if "batch" in found:
        _print_inside(found)


def _print_inside(found: dict) -> None:
    """What an engine knows of itself, and no client of it."""
    from minillm.course.show.tables import cell

    batch, kv = found["batch"], found["kv"]
    print(f"batch: {cell(batch['mean_rows'])} rows on average, at most {cell(batch['peak_rows'])}; queue at most "
          f"{cell(found['queue_depth']['peak'])}; cache full to {cell(kv.get('peak_share'))} of it at the peak; "
          f"{cell(found['preemptions'])} preemptions")
    if found["speculation"]["drafted_tokens"]:
        print(f"drafts: {cell(found['speculation']['acceptance_rate'])} accepted, "
              f"{cell(found['speculation']['tokens_per_round'])} tokens a round")
    if found["cost_per_million_output_tokens"] is not None:
        print(f"cost per million output tokens: {cell(found['cost_per_million_output_tokens'])}")
