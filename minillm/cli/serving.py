"""`capacity` and `simulate`: what would fit, and how it would serve, without the device at hand."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial

from minillm.cli.common import add_json, add_workload, in_course, workload_settings
from minillm.course.show.output import print_summary, write_json
from minillm.course.show.tables import all_columns, text_table

CAPACITY_COLUMNS = {
    "case": "case", "kv_bytes_per_token": "bytes/token", "request_gb": "GB/request", "max_concurrent": "fit",
    "times": "x as asked",
}


# -- capacity -------------------------------------------------------------------------------------


def add_capacity(commands) -> None:
    """The parser of `minillm capacity`."""
    parser = commands.add_parser("capacity", help="how many requests fit into a device's memory")
    parser.add_argument("--model", default="llama-3-8b", help="a preset (default: llama-3-8b)")
    parser.add_argument("--memory-gb", type=float, default=80.0, help="of the device, 10^9 bytes each (default: 80)")
    parser.add_argument("--weights-gb", type=float, help="default: the model's own, at 16 bits")
    parser.add_argument("--overhead-gb", type=float, default=4.0, help="activations and the runtime (default: 4)")
    parser.add_argument("--context", type=int, default=4096, help="tokens of one request (default: 4096)")
    parser.add_argument("--kv-format", default="bf16", help="how keys and values are stored (default: bf16)")
    parser.add_argument("--presets", action="store_true", help="list what a token takes in every preset, and stop")
    add_json(parser)
    parser.set_defaults(run=_capacity)


def _capacity(arguments) -> int:
    from minillm.measure.capacity import capacity, preset_rows, server_flags, what_changes_it

    if arguments.presets:
        rows = preset_rows()
        print(text_table(rows, all_columns(rows)))
        write_json(arguments.json, {"presets": rows})
        return 0
    named = ("memory_gb", "weights_gb", "overhead_gb", "context", "kv_format")
    sums = {name: getattr(arguments, name) for name in named}
    found = capacity(arguments.model, **sums)
    rows, flags = what_changes_it(arguments.model, **sums), server_flags(found)
    print(
        f"{arguments.model}: {found.memory_gb:g} GB - {found.weights_gb:.4g} GB of weights - {found.overhead_gb:g} GB "
        f"of overhead = {found.cache_gb:.4g} GB for keys and values\n"
        f"{found.kv_bytes_per_token:,} bytes a token in {found.kv_format} x {found.context_tokens:,} tokens "
        f"= {found.request_gb:.3f} GB a request\n"
        f"{found.cache_gb:.4g} / {found.request_gb:.3f} = {found.cache_gb / found.request_gb:.2f}: "
        f"{found.max_concurrent:,} requests at once"
    )
    if found.rule_of_thumb != found.max_concurrent:
        print(f"(The rule of thumb, bits alone, says {found.rule_of_thumb:,}: it forgets the scales.)")
    print(f"\n{text_table(rows, CAPACITY_COLUMNS)}\n\nThe same to other engines:")
    for engine, line in flags.items():
        print(f"  {engine:8}{line}")
    write_json(arguments.json, {"model": arguments.model, **asdict(found), "changes": rows, "flags": flags})
    return 0


# -- simulate -------------------------------------------------------------------------------------


def add_simulate(commands) -> None:
    """The parser of `minillm simulate`."""
    parser = commands.add_parser("simulate", help="serve a workload in virtual time, on a device that need not be here")
    parser.add_argument("workload", help="worked-example, beside the articles' figures; chat, code, yardstick, ...")
    add_workload(parser)
    parser.add_argument("--device", default="a100-80gb", help="one with a data sheet (default: a100-80gb)")
    parser.add_argument("--model", default="llama-3-8b", help="a preset (default: llama-3-8b)")
    parser.add_argument("--replicas", type=int, default=1, help="devices that share the requests (default: 1)")
    parser.add_argument("--prefill-replicas", type=int, default=0, help="more devices, for prompts alone (default: 0)")
    parser.add_argument("--kv-format", default="bf16", help="how keys and values are stored (default: bf16)")
    parser.add_argument("--speculation", type=float, metavar="SHARE", help="4 drafts a row, of which SHARE are right")
    parser.add_argument("--max-batch", type=int, default=256, help="rows a step (default: 256)")
    parser.add_argument("--price", type=float, default=2.9,
                        help="US dollars for an hour of one device (default: 2.9, an A100's)")
    parser.add_argument("--compute-prompts", action="store_true", help="worked-example: histories are not in the cache")
    parser.add_argument("--seed", type=int, default=0)
    add_json(parser)
    parser.set_defaults(run=partial(_simulate, parser))


# Options that only one of the two understands: the other must not seem to obey them.
OF_WORKLOADS = ("rate", "trace", "replicas", "prefill_replicas", "kv_format", "speculation", "max_batch", "seed")
OF_THE_WORKED_EXAMPLE = ("compute_prompts",)


def _simulate(parser, arguments) -> int:
    run, others = _workload, OF_THE_WORKED_EXAMPLE
    if arguments.workload == "worked-example":
        run, others = in_course("worked_example"), OF_WORKLOADS
    for name in others:
        if getattr(arguments, name) != parser.get_default(name):
            raise ValueError(f"{arguments.workload} has no --{name.replace('_', '-')}: leave it out")
    return run(arguments)


def _workload(arguments) -> int:
    from minillm.measure.service import Service, simulate

    service = Service(
        arguments.device, arguments.model, arguments.kv_format, replicas=arguments.replicas,
        prefill_replicas=arguments.prefill_replicas, acceptance=arguments.speculation, max_batch=arguments.max_batch,
        price_per_hour=arguments.price,
    )
    settings = workload_settings(arguments)
    found = simulate(arguments.workload, service, arguments.clients, seed=arguments.seed, **settings)
    print(f"{arguments.workload} on {found['devices']} x {arguments.device}, {arguments.model}, in virtual time")
    print_summary(found)
    print(f"(that cost is in US dollars, at ${arguments.price:g} an hour of each device: --price)")
    write_json(arguments.json, {"workload": arguments.workload, **found})
    return 0
