"""`record`: what is to be measured on a borrowed GPU, a call at a time. `course/record.py` runs it."""

from __future__ import annotations

from pathlib import Path

SECONDS = 560  # of a call that may take ten minutes


def add_record(commands) -> None:
    """The parser of `minillm record`."""
    parser = commands.add_parser(
        "record", help="on a borrowed GPU: measure in calls of ten minutes, each part under its own limit",
        description="Calls 1 to 3 belong together; 4 is for another day. Status 1 if a part is not done: the same line "
                    "again runs what is missing.",
    )
    parser.add_argument("call", help="1, 2, 3 or 4; or split, to cut the default model into pieces that travel")
    parser.add_argument("--out", metavar="DIR", type=Path, default=Path("recorded"),
                        help="where results are written as they come (default: recorded/ in this folder)")
    parser.add_argument("--pack", metavar="FILE", type=Path,
                        help="a .tar.gz of them, made anew after each part; unpacked first if DIR is new")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"of the whole call (default: {SECONDS})")
    parser.add_argument("--only", default="", metavar="PART,PART", help="of the call's parts, these")
    parser.add_argument("--rehearse", action="store_true", help="small sizes, on the CPU, to see that it all runs")
    parser.set_defaults(run=_record)


def _record(arguments) -> int:
    from minillm.course import record
    from minillm.guard.inputs import check_at_least

    check_at_least(1, seconds=arguments.seconds)
    if arguments.call == "split":
        for path in record.split_model(record.carried()):
            print(f"{path}: {path.stat().st_size / 2**20:.1f} MiB")
        return 0
    if arguments.call not in map(str, record.CALLS):
        raise ValueError(f"unknown call {arguments.call!r}; known: {', '.join(map(str, record.CALLS))}, split")
    call, only = int(arguments.call), tuple(filter(None, arguments.only.split(",")))
    if strangers := set(only) - {part.name for part in record.CALLS[call]}:
        raise ValueError(f"call {call} has no part {', '.join(sorted(strangers))}; it has "
                         f"{', '.join(part.name for part in record.CALLS[call])}")
    recording = record.Recording(arguments.out, arguments.rehearse, arguments.pack,
                                 say=lambda text: print(text, flush=True))
    return 0 if recording.call(call, arguments.seconds, only) else 1
