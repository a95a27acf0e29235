"""The command line: `minillm` and `python -m minillm`. Each command is a parser and a function."""

from __future__ import annotations

import argparse
import io
import os
import sys

from minillm.cli.bench import add_bench
from minillm.cli.course import add_claims, add_exercises, add_grade, add_ladder, add_measure, add_overhead
from minillm.cli.record import add_record
from minillm.cli.running import add_fetch, add_generate
from minillm.cli.serve import add_serve
from minillm.cli.serving import add_capacity, add_simulate
from minillm.guard.inputs import check_at_least

COMMANDS = (
    add_generate, add_serve, add_ladder, add_measure, add_record, add_claims, add_bench, add_capacity, add_simulate,
    add_overhead, add_grade, add_exercises, add_fetch,
)

# Of pyproject.toml, by what they bring.
EXTRAS = {"matplotlib": "lab", "ipywidgets": "lab", "IPython": "lab", "transformers": "test",
          "starlette": "serve", "uvicorn": "serve", "prometheus_client": "serve"}


def show_any_character() -> None:
    """Let a console that lacks a character show a question mark for it, and the rest of the answer."""
    for stream, errors in ((sys.stdout, "replace"), (sys.stderr, "backslashreplace")):
        if isinstance(stream, io.TextIOWrapper):  # a notebook's stream takes every character
            stream.reconfigure(errors=errors)


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit status. Errors that a user can correct are one line on stderr, status 2.

    A reader that closes the pipe, such as `head`, ends it silently, with a shell's 128 + SIGPIPE.
    """
    show_any_character()
    parser = argparse.ArgumentParser(prog="minillm", description="LLM inference, built a rung at a time.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add in COMMANDS:
        add(commands)
    arguments = parser.parse_args(argv)
    try:
        _limit_threads(getattr(arguments, "threads", None))
        status = arguments.run(arguments)
        sys.stdout.flush()  # here, where a closed pipe can still be caught
        return status
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at its end
        return 141
    except (ValueError, OSError) as error:  # a file that is missing, damaged, or not ours to write
        print(f"minillm {arguments.command}: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        print(f"minillm {arguments.command}: this needs {package}, which is not installed: "
              f"pip install -e '.[{EXTRAS[package]}]' in the repository", file=sys.stderr)
        return 2
    except MemoryError:
        print(f"minillm {arguments.command}: this does not fit in this machine's memory", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _limit_threads(number: int | None) -> None:
    """Of PyTorch, for this process; None leaves one for each core."""
    check_at_least(1, threads=number)
    if number is not None:
        import torch

        torch.set_num_threads(number)
