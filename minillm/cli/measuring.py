"""`measure`, `claims`, `bench` and `overhead`: what was found, and by which measurement."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

from minillm.cli.common import (
    add_json,
    add_model,
    add_outputs,
    add_workload,
    bar,
    lengths_that_fit,
    print_summary,
    workload_settings,
    write,
    write_json,
)
from minillm.guard.inputs import check_at_least
from minillm.load.source import DEFAULT

OVERHEAD_COLUMNS = {
    "batch_rows": "rows", "queued": "queued", "step_ms": "step ms", "min_ms": "min", "max_ms": "max",
}
BENCH_COLUMNS = {
    "engine": "engine", "tokens_per_s": "tokens/s", "min": "min", "max": "max", "times_minillm": "minillm is x",
    "mbu": "MBU", "mfu": "MFU",
}
DECODE_COLUMNS = {
    "engine": "engine", "batch": "batch", "context_tokens": "context", "step_ms": "step ms", "min_ms": "min",
    "max_ms": "max", "least_ms": "least ms", "tokens_per_s": "tokens/s", "mbu": "MBU", "mfu": "MFU",
}


CURES = {  # of what goes wrong with every request on the first try
    "refused": "does a server listen at this address and port?",
    "stalled": "is the server still loading, or does it need a larger --patience-s?",
    "server error 400": "are --model and the lengths what the server takes? --scale shrinks lengths, --text sends text",
    "server error 401": "this client sends no key: start the server without one",
    "server error 404": "does the URL end in /v1, and is --model the name under which it serves?",
    "server error 422": "does the server take prompts as token ids? --text sends text",
}


# -- measure --------------------------------------------------------------------------------------


def add_measure(commands) -> None:
    """The parser of `minillm measure`."""
    parser = commands.add_parser("measure", help="run experiments; each result is written as soon as it is there")
    parser.add_argument("names", nargs="*", metavar="NAME", help="experiments; all of them if none is named")
    parser.add_argument("--all", action="store_true", help="all of them")
    parser.add_argument("--list", action="store_true", help="name them, with what each shows, and stop")
    parser.add_argument("--quick", action="store_true", help="small sizes: all of them in minutes")
    add_model(parser)
    parser.add_argument("--device", default="auto", help="as in load_model: auto, cpu, cuda (default: auto)")
    parser.add_argument("--budget-s", type=float, metavar="S", help="for each: later rows are left out")
    parser.add_argument("--resume", action="store_true", 
                        help="leave out what this commit has recorded already, unless it was cut at a smaller budget")
    add_outputs(parser)
    parser.add_argument("--out", metavar="DIR", help="where to write (default: measurements/ in this folder)")
    parser.set_defaults(run=_measure)


def _measure(arguments) -> int:
    from minillm.course.catalogue import EXPERIMENTS, find
    from minillm.course.show.tables import text_table
    from minillm.measure.measurement import MEASUREMENTS

    if arguments.list:
        rows = [{"name": e.name, "seconds": e.seconds, "claims": " ".join(e.claims), "about": e.about}
                for e in EXPERIMENTS.values()]
        print(text_table(rows, {"name": "experiment", "seconds": "--quick takes s", "claims": "claims",
                                "about": "what it shows"}))
        return 0
    if arguments.save and (arguments.quick or arguments.out):
        raise ValueError("--save is for full sizes, in their own place: leave out --quick and --out")
    check_at_least(0, budget_s=arguments.budget_s)
    names = list(EXPERIMENTS) if arguments.all or not arguments.names else [find(n).name for n in arguments.names]
    root = MEASUREMENTS if arguments.save else Path(arguments.out or "measurements")
    root.mkdir(parents=True, exist_ok=True)  # where that is refused, now rather than after the first experiment
    found, failed = _run_all(arguments, names, root)
    if arguments.json:
        done = [dataclasses.asdict(measurement) for measurement in found]
        result = done[0] if len(names) == len(done) == 1 else {"measurements": done, "failed": failed}
        write_json(arguments.json, result)
    return 1 if failed else 0


def _run_all(arguments, names: list[str], root: Path) -> tuple[list, dict[str, str]]:
    """Run them in turn, whatever becomes of each; the measurements, and what went wrong by name."""
    from minillm.course.catalogue import find, recorded_here, run_experiment
    from minillm.course.setting import Setting
    from minillm.course.show.live import ticking
    from minillm.course.show.plots import PICTURES  # here, so that a missing matplotlib is said before anything runs
    from minillm.course.show.recorded import heading
    from minillm.course.show.tables import filled, tables, text_table

    setting = Setting(arguments.quick, arguments.model, arguments.device, progress=bar, budget_s=arguments.budget_s)
    found, failed = [], {}
    for name in names:
        if arguments.resume and (known := recorded_here(name, setting, root)):
            print(f"{name}: this commit has it already" + f", {known.missing}" * bool(known.missing) + "\n")
            continue
        try:
            with ticking(f"{name}, {find(name).about}"):
                outcome = run_experiment(name, setting)
            path = outcome.measurement.save(root)
        except Exception as error:  # one that fails must not take the others with it
            failed[name] = f"{type(error).__name__}: {error}"
            print(f"{name} failed: {failed[name]}\n", file=sys.stderr)
            continue
        found.append(outcome.measurement)
        print(f"{name}: {heading(outcome.measurement)}")
        rows, chosen = outcome.measurement.rows, find(name).tables
        print("\n\n".join(text_table(rows, filled(rows, each)) for each in chosen) if chosen else tables(rows))
        if name in PICTURES:
            picture = path.with_suffix(".png")
            PICTURES[name](outcome.measurement.rows).savefig(picture, dpi=110, bbox_inches="tight")
            print(f"drawn in {picture}")
        print(f"{outcome.report(arguments.budget_s)}; written to {path}\n", flush=True)
    return found, failed


# -- claims ---------------------------------------------------------------------------------------


def add_claims(commands) -> None:
    """The parser of `minillm claims`."""
    parser = commands.add_parser("claims", help="what articles say of serving, and what was measured of it")
    parser.add_argument("ids", nargs="*", metavar="ID", help="claims, such as A1; all of them if none is named")
    parser.add_argument("--root", metavar="DIR", help="a folder of measurements (default: those of this checkout)")
    parser.add_argument("--markdown", action="store_true", help="as the table of notebooks/CLAIMS.md")
    add_json(parser)
    parser.set_defaults(run=_claims)


def _claims(arguments) -> int:
    from minillm.course.ledger import LEDGER, as_markdown, as_rows, find_all
    from minillm.course.show.tables import cell
    from minillm.measure.measurement import MEASUREMENTS

    known = {claim.id: claim for claim in LEDGER}
    for name in arguments.ids:
        if name not in known:
            raise ValueError(f"unknown claim {name!r}; known: {', '.join(known)}")
    if arguments.root and not Path(arguments.root).is_dir():
        raise ValueError(f"--root {arguments.root} is no folder")
    findings = find_all(arguments.root or MEASUREMENTS, tuple(known[name] for name in arguments.ids or known))
    if arguments.markdown:
        print(as_markdown(findings))
    else:
        for row in as_rows(findings):
            print(f"{row['id']:>3}  {row['verdict'].upper()} on {cell(row['device'] or None)}\n     {row['claim']}")
            print(f"     {row['measured']}\n")
    write_json(arguments.json, {"claims": as_rows(findings)})
    return 0


# -- bench ----------------------------------------------------------------------------------------


def add_bench(commands) -> None:
    """The parser of `minillm bench`."""
    parser = commands.add_parser(
        "bench", help="run a workload: here, beside transformers, or on a server",
        description="Here all requests come at once, in turns with those of --against. With --clients or --rate they "
                    "come as to a server, once, and the figures are those that --url gives of a server.",
    )
    parser.add_argument("workload", nargs="?", default="peers",
                        help="decode: steps by batch, beside the device's limits; or a workload, such as chat (an "
                             "unknown name lists them; default: peers)")
    add_model(parser)
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--against", choices=["transformers"], help="run it too, in turns, in this process")
    where.add_argument("--url", help="run it there instead: an OpenAI-compatible server, up to and with /v1")
    add_workload(parser)
    parser.add_argument("--repeats", type=int, default=3, help="of each engine; the median is shown (default: 3)")
    parser.add_argument("--batch", default="1,8,32", metavar="N,N,...", help="of decode (default: 1,8,32)")
    parser.add_argument("--context", type=int, default=128, help="tokens before a step of decode (default: 128)")
    parser.add_argument("--steps", type=int, default=16, help="of decode, timed for each batch (default: 16)")
    parser.add_argument("--kv-format", default="auto", help="of decode, as in Engine (default: auto)")
    server = parser.add_argument_group("with --url")
    server.add_argument("--text", action="store_true", help=f"send prompts as text, spelled by {DEFAULT}'s tokenizer")
    server.add_argument("--patience-s", type=float, default=60.0, help="silence after which a request has stalled")
    parser.add_argument("--label", help="the server's name in what is saved (default: its URL, or minillm)")
    add_outputs(parser)
    parser.set_defaults(run=_bench)


def _bench(arguments) -> int:
    from minillm.course.experiments.batching import decode
    from minillm.course.setting import Setting
    from minillm.course.show.live import Gauges, on_terminal
    from minillm.course.show.tables import text_table
    from minillm.measure.bench import bench

    settings = workload_settings(arguments)
    if arguments.url and arguments.workload == "decode":
        raise ValueError("decode times this engine's steps, which no client sees: name a workload for --url")
    if arguments.text and not arguments.url:
        raise ValueError("--text is for --url: this engine takes token ids")
    if arguments.url:
        return _bench_server(arguments, settings)
    if arguments.rate is not None or arguments.clients is not None:
        return _bench_loop(arguments, settings)
    if arguments.workload == "decode":
        setting = Setting(model_name=arguments.model, gpu_model=arguments.model, progress=bar)
        sizes = whole_numbers("--batch", arguments.batch), arguments.context, arguments.steps
        settings = {} if arguments.kv_format == "auto" else {"kv_format": arguments.kv_format}
        result = decode(setting, sizes, arguments.against, **settings)
    else:
        with lengths_that_fit(), on_terminal(arguments.workload) as show:
            settings["watch"] = Gauges(show)
            result = bench(arguments.workload, arguments.model, arguments.against, arguments.repeats, bar, **settings)
    print(f"{arguments.workload} on {arguments.model}, {result.provenance.dtype}, {result.provenance.device}")
    print(text_table(result.rows, DECODE_COLUMNS if arguments.workload == "decode" else BENCH_COLUMNS))
    write(arguments, result, {"device": result.provenance.device, "model": arguments.model, "rows": result.rows})
    return 0


def whole_numbers(option: str, text: str) -> list[int]:
    """The numbers of an option such as 1,8,32; ValueError shows the form."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{option} {text!r}: give whole numbers with commas, such as 1,8,32") from None


def _bench_loop(arguments, settings: dict) -> int:
    from minillm.course.show.live import Gauges, on_terminal
    from minillm.load.weights import load_model
    from minillm.measure.bench import bench_loop
    from minillm.measure.measurement import device_name
    from minillm.measure.workload import make_workload

    if arguments.against or arguments.workload == "decode":
        what = "--against" if arguments.against else "decode"
        raise ValueError(f"{what} has no --rate and no --clients: leave them out, or {what}")
    items, model = make_workload(arguments.workload, **settings), load_model(arguments.model)
    with lengths_that_fit(), on_terminal(f"{arguments.workload}, {len(items)} requests") as show:
        found = bench_loop(items, model, arguments.clients, Gauges(show))
    device = device_name(model.device)
    print(f"{arguments.workload} on {arguments.model} on {device}, {_loop(arguments)}")
    print_summary(found)
    _write_loop(arguments, found, "minillm", {"device": device}, model.device)
    return 0


def _loop(arguments) -> str:
    """In words, as in what is saved: a figure of one loop says nothing of another."""
    if arguments.clients is not None:
        return f"closed loop, {arguments.clients} clients"
    return "open loop" if arguments.rate is None else f"open loop, {arguments.rate:g} requests/s"


def _write_loop(arguments, found: dict, label: str, where: dict, device="cpu") -> None:
    """Keep a loop's figures as a row, and write them, where the options ask for it."""
    from minillm.measure.client import save_row, server_row

    loop = _loop(arguments)
    if arguments.save:
        row = server_row(found, arguments.label or label, arguments.workload, arguments.model, loop)
        print(f"saved {save_row(row, device=device)}")
    model = {"workload": arguments.workload, "model": arguments.model, "loop": loop}
    write_json(arguments.json, {**where, **model, **found})


def _bench_server(arguments, settings: dict) -> int:
    """Status 1 if no request was answered."""
    from minillm.course.show.live import on_terminal
    from minillm.load.tokenizer import load_tokenizer
    from minillm.measure.client import Server, bench_server
    from minillm.measure.workload import make_workload

    items = make_workload(arguments.workload, **settings)
    text_of = load_tokenizer().decode if arguments.text else None
    server = Server(arguments.url.rstrip("/"), arguments.model, arguments.patience_s, text_of)
    with on_terminal(f"{arguments.workload}, {len(items)} requests") as show:
        found = bench_server(server, items, arguments.clients, show)
    print(f"{arguments.workload} on {arguments.model} at {server.url}, {_loop(arguments)}; "
          "times as the client saw them")
    print_summary(found)
    print(f"{found['failed']:,} of {len(items):,} requests failed, and are in no figure above"
          + "".join(f"; {kind}: {number:,}" for kind, number in found["faults"].items()))
    for kind, cure in CURES.items():
        if kind in found["faults"]:
            print(f"{kind}: {cure}")
    if found["short_answers"]:
        print(f"{found['short_answers']:,} answers were not as long as asked: the server does not know ignore_eos")
    _write_loop(arguments, found, server.url, {"url": server.url})
    return 1 if found["failed"] == len(items) else 0


# -- overhead -------------------------------------------------------------------------------------


def add_overhead(commands) -> None:
    """The parser of `minillm overhead`."""
    parser = commands.add_parser("overhead", help="the engine's own time and memory, without a model")
    add_outputs(parser)
    parser.set_defaults(run=_overhead)


def _overhead(arguments) -> int:
    from minillm.course.experiments.overhead import overhead
    from minillm.course.show.tables import text_table

    result = overhead()
    print(result.provenance.device)
    print(text_table([row for row in result.rows if "step_ms" in row], OVERHEAD_COLUMNS))
    for row in result.rows:
        if "served" in row:
            print(f"after {row['served']:,} requests, Python's own memory peaked at {row['memory_kb']:,.0f} KB")
        if "simulated_chats" in row:
            print(f"virtual time: {row['row_steps_per_s']:,.0f} row-steps a second ({row['min_per_s']:,.0f} to "
                  f"{row['max_per_s']:,.0f}) over {row['simulated_chats']:,} chats, {row['row_steps']:,} row-steps")
    write(arguments, result, {"device": result.provenance.device, "rows": result.rows})
    return 0
