"""`bench`: a workload here, beside transformers, or on a server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from secrets import randbelow

from minillm.cli.common import add_model, add_outputs, add_workload, in_course, lengths_that_fit, workload_settings
from minillm.course.show.live import Gauges, on_terminal
from minillm.course.show.output import bar, place, print_summary, say_if_busy, write, write_json
from minillm.course.show.tables import filled, text_table, with_range
from minillm.load import DEFAULT

PEERS = ("transformers", "llama.cpp", "vllm")  # as in `measure/peers.py`, which needs PyTorch
CONTINUOUS = "transformers-continuous"
NO_SUCH_PATH = "does the URL end in /v1, and is --model the name under which it serves?"
CURES = {  # of what goes wrong with every request on the first try, by how its name begins
    "refused": "does a server listen at this address and port?",
    "reset": "the connection was closed before an answer: by a server that ended, or a proxy with no server after it",
    "name not found": "is the host in the URL right, and does this machine know it?",
    "TLS": "does the server speak https, with a certificate that this machine trusts? http:// is without encryption",
    "connection timed out": "can this machine reach the address, past firewalls and containers?",
    "too many open files": "each request in flight holds one: raise the limit with `ulimit -n 65536` in this shell, "
                           "or lower --clients or --rate",
    "stalled": "is the server still loading, or does it need a larger --patience-s?",
    "malformed: no choices": NO_SUCH_PATH,  # llama.cpp answers /completions in a form of its own
    "malformed: not a stream of events": NO_SUCH_PATH,
    "server error 400": "are --model and the lengths what the server takes? --scale shrinks lengths, --text sends text",
    "server error 401": "this client sends no key: start the server without one",
    "server error 404": NO_SUCH_PATH,
    "server error 422": "does the server take prompts as token ids? --text sends text",
}


def bench_table(rows: Sequence[Mapping]) -> str:
    """The rows of `bench`: medians, with the lowest and highest turn; ratios are of the same turn."""
    columns = {"engine": "engine", "tokens_per_s": "tokens/s", "times_minillm": "minillm is x", "mbu": "MBU",
               "mfu": "MFU"}
    shown = [{**row, **{name: with_range(row, name) for name in ("tokens_per_s", "times_minillm")}} for row in rows]
    return text_table(shown, filled(shown, columns))


def add_bench(commands) -> None:
    """The parser of `minillm bench`."""
    parser = commands.add_parser(
        "bench", help="run a workload: here, beside transformers, or on a server",
        description="Here all requests come at the start, in turns with those of --against. With --clients or --rate "
                    "they come as to a server, once, and the figures are those that --url gives of a server.",
    )
    parser.add_argument("workload", nargs="?", default="peers",
                        help="decode: steps by batch, beside the device's limits; or a workload, such as chat (an "
                             "unknown name lists them; default: peers)")
    add_model(parser)
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--against", choices=[*PEERS, CONTINUOUS, "all"],
                       help=f"run it too, in turns; {CONTINUOUS}: without static batches; all: those that are here "
                            "(`make peers` fetches vLLM)")
    where.add_argument("--url", help="run it there instead: an OpenAI-compatible server, up to and with /v1")
    add_workload(parser)
    parser.add_argument("--repeats", type=int, default=3, help="of each engine; the median is shown (default: 3)")
    parser.add_argument("--budget-s", type=float, metavar="S", help="no further turn begins after it; what is there "
                                                                    "is kept with --save after each turn")
    parser.add_argument("--batch", default="1,8,32", metavar="N,N,...", help="of decode (default: 1,8,32)")
    parser.add_argument("--context", type=int, default=128, help="tokens before a step of decode (default: 128)")
    parser.add_argument("--steps", type=int, default=16, help="of decode, timed for each batch (default: 16)")
    parser.add_argument("--kv-format", default="auto", help="of decode, as in Engine (default: auto)")
    server = parser.add_argument_group("with --url")
    server.add_argument("--text", action="store_true", help=f"send prompts as text, spelled by {DEFAULT}'s tokenizer")
    server.add_argument("--patience-s", type=float, default=60.0, help="silence after which a request has stalled")
    parser.add_argument("--seed", type=int, help="of a workload's prompts, lengths and arrivals: the same sends the "
                                                 "same (default: 0; with --url a new one each time, which is printed)")
    parser.add_argument("--label", help="the server's name in what is saved (default: its URL, or minillm)")
    add_outputs(parser)
    parser.add_argument("--out", metavar="DIR", help="keep the measurement there; not of --clients, --rate or --url")
    parser.set_defaults(run=_bench)


def _bench(arguments) -> int:
    from minillm.measure.bench import bench

    settings = workload_settings(arguments)
    if arguments.url and arguments.workload == "decode":
        raise ValueError("decode times this engine's steps, which no client sees: name a workload for --url")
    if arguments.text and not arguments.url:
        raise ValueError("--text is for --url: this engine takes token ids")
    if arguments.seed is not None:
        settings["seed"] = arguments.seed
    if arguments.url:
        return _bench_server(arguments, settings)
    if arguments.rate is not None or arguments.clients is not None:
        return _bench_loop(arguments, settings)
    if arguments.workload == "decode":
        if arguments.against not in (None, "transformers"):
            raise ValueError(f"decode runs beside transformers only, not beside {arguments.against}")
        return in_course("decode")(arguments)
    engines = "this engine" + f", then {arguments.against}," * bool(arguments.against)
    print(f"{arguments.workload} on {arguments.model}: {engines} in {arguments.repeats + 1} turns, the first of which "
          "warms up", flush=True)
    with lengths_that_fit(), on_terminal(arguments.workload) as show:
        settings["watch"] = Gauges(show)
        settings |= {"budget_s": arguments.budget_s, "keep": partial(_keep, place(arguments))}
        result = bench(arguments.workload, arguments.model, arguments.against, arguments.repeats, bar, **settings)
    print(f"{arguments.workload} on {arguments.model}, {result.provenance.dtype}, {result.provenance.device}")
    print(bench_table(result.rows))
    write(arguments, result, {"device": result.provenance.device, "model": arguments.model, "rows": result.rows})
    return 0


def _keep(root: Path | None, result) -> None:
    """Keep what a bench has so far; rows that cannot be kept are refused once they are printed, at the end."""
    with suppress(ValueError):
        if root:
            result.save(root)


def _bench_loop(arguments, settings: dict) -> int:
    from minillm.load.weights import load_model
    from minillm.measure.bench import bench_loop
    from minillm.measure.measurement import device_name, disturbance
    from minillm.measure.workload import make_workload

    if arguments.against or arguments.workload == "decode":
        what = "--against" if arguments.against else "decode"
        raise ValueError(f"{what} has no --rate and no --clients: leave them out, or {what}")
    items, model = make_workload(arguments.workload, **settings), load_model(arguments.model)
    device = device_name(model.device)
    print(f"{arguments.workload} on {arguments.model} on {device}, {_loop(arguments)}", flush=True)
    with lengths_that_fit(), on_terminal(f"{arguments.workload}, {len(items)} requests") as show:
        found = bench_loop(items, model, arguments.clients, Gauges(show))
    print_summary(found)
    say_if_busy(disturbance(found))
    _write_loop(arguments, found, "minillm", {"device": device}, settings.get("seed", 0), model.device)
    return 0


def _loop(arguments) -> str:
    """In words, as in what is saved: a figure of one loop says nothing of another."""
    if arguments.clients is not None:
        return f"closed loop, {arguments.clients} clients"
    return "open loop" if arguments.rate is None else f"open loop, {arguments.rate:g} requests/s"


def _write_loop(arguments, found: dict, label: str, where: dict, seed: int, device="cpu") -> None:
    """Keep a loop's figures as a row, and write them, where the options ask for it."""
    from minillm.measure.client import save_row, server_row

    loop = _loop(arguments)
    if arguments.save:
        row = server_row(found, arguments.label or label, arguments.workload, arguments.model, loop)
        print(f"saved {save_row({**row, 'seed': seed}, device=device)}")
    model = {"workload": arguments.workload, "model": arguments.model, "loop": loop, "seed": seed}
    write_json(arguments.json, {**where, **model, **found})


def _bench_server(arguments, settings: dict) -> int:
    """Status 1 if no request was answered."""
    from minillm.load.tokenizer import load_tokenizer
    from minillm.measure.client import Server, bench_server
    from minillm.measure.workload import make_workload

    seed = settings.setdefault("seed", randbelow(1 << 32))
    items = make_workload(arguments.workload, **settings)
    text_of = load_tokenizer().decode if arguments.text else None
    server = Server(arguments.url, arguments.model, arguments.patience_s, text_of)
    with on_terminal(f"{arguments.workload}, {len(items)} requests") as show:
        found = bench_server(server, items, arguments.clients, show)
    print(f"{arguments.workload} on {arguments.model} at {server.url}, {_loop(arguments)}; "
          "times as the client saw them")
    print(f"seed {seed}: " + ("a new one, so that no server has these prompts cached; --seed repeats them"
                              if arguments.seed is None else
                              "a server that was sent these prompts before may have them cached, and is then faster"))
    print_summary(found)
    _print_faults(found, len(items))
    _write_loop(arguments, found, server.url, {"url": server.url}, seed)
    return 1 if found["failed"] == len(items) else 0


def _print_faults(found: dict, asked: int, most: int = 10) -> None:
    """What went wrong, the most frequent first, and what helps."""
    faults = sorted(found["faults"].items(), key=lambda fault: -fault[1])
    print(f"{found['failed']:,} of {asked:,} requests failed, and are in no figure above"
          + "".join(f"; {kind}: {number:,}" for kind, number in faults[:most])
          + f"; and {len(faults) - most:,} other kinds" * (len(faults) > most))
    for start, cure in CURES.items():
        for kind in found["faults"]:
            if kind.startswith(start):
                print(f"{kind}: {cure}")
    if found["short_answers"]:
        print(f"{found['short_answers']:,} answers were not as long as asked: the server does not know ignore_eos, "
              "or counts otherwise")
