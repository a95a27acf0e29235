"""What the commands share: their common options, and how they reach the course."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from minillm.guard.inputs import RequestError, check_at_least
from minillm.load import DEFAULT


def add_model(parser) -> None:
    """The options that name a model, and limit the threads that compute it."""
    parser.add_argument("--model", default=DEFAULT, help=f"a name for load_model (default: {DEFAULT})")
    parser.add_argument("--threads", type=int, metavar="N",
                        help="of the processor (default: one for each core; 1 beside other work, which else slows "
                             "every step several times)")


def add_outputs(parser) -> None:
    """The options that say where a measurement goes."""
    parser.add_argument("--save", action="store_true", help="keep the measurement under notebooks/measurements")
    add_json(parser)


def add_json(parser) -> None:
    """The option that writes the result as JSON."""
    parser.add_argument("--json", metavar="FILE", type=writable,
                        help="write the result there too; - prints it as the last line")


def writable(where: str) -> str:
    """The place itself; one that cannot be written is refused before anything runs."""
    path = Path(where)
    if where != "-" and (path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK)):
        raise argparse.ArgumentTypeError(f"{where} cannot be written: give a file in a folder that is there, or -")
    return where


def add_workload(parser) -> None:
    """The options that change a workload."""
    parser.add_argument("--requests", type=int, help="how many (default: the workload's own number)")
    parser.add_argument("--rate", type=float, help="requests a second, of an open loop (default: the workload's own)")
    parser.add_argument("--clients", type=int, help="a closed loop of this many, in place of arrivals")
    parser.add_argument("--scale", type=float, default=1.0, help="shrink all lengths by this factor")
    parser.add_argument("--trace", metavar="FILE", help="with the workload `trace`: a CSV of arrival and lengths")


def workload_settings(arguments) -> dict:
    """The workload's own settings among the options; ValueError for both loops together, or no client."""
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
    try:
        yield
    except RequestError as error:
        raise ValueError(f"{error}. --scale 0.1 makes all prompts and answers a tenth as long") from None


def in_course(name: str):
    """The command of this name in `course/commands.py`, which is imported when it runs."""

    def run(arguments) -> int:
        from minillm.course import commands

        return getattr(commands, name)(arguments)

    return run
