"""`serve`: an engine behind OpenAI's API."""

from __future__ import annotations

import sys

from minillm.cli.common import add_model
from minillm.guard.inputs import check_at_least

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def add_serve(commands) -> None:
    """The parser of `minillm serve`: every setting of the engine, by vLLM's name where vLLM has one."""
    parser = commands.add_parser("serve", help="a server that speaks OpenAI's API, with a live page")
    add_model(parser)
    parser.add_argument("--served-model-name", metavar="NAME", help="what clients call it (default: as --model)")
    parser.add_argument("--host", default="127.0.0.1", help="default: 127.0.0.1, which only this machine reaches")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--api-key", metavar="KEY", help="that clients must bring")
    parser.add_argument("--max-waiting", type=int, metavar="N",
                        help="requests in the queue; one more gets status 429 (default: no limit)")
    engine = parser.add_argument_group("engine")
    engine.add_argument("--max-num-seqs", type=int, metavar="N", help="rows of a step (Engine's max_batch)")
    engine.add_argument("--max-num-batched-tokens", type=int, metavar="N", help="tokens of a step (max_step_tokens)")
    engine.add_argument("--max-model-len", type=int, metavar="N", help="prompt and answer together (max_context)")
    engine.add_argument("--kv-cache-dtype", default="auto", metavar="FORMAT", help="auto, fp32, bf16, int8, ...")
    engine.add_argument("--kv-cache-memory-bytes", type=int, metavar="N", help="for keys and values (kv_memory)")
    engine.add_argument("--block-size", type=int, default=16, help="tokens of a block (default: 16)")
    engine.add_argument("--no-enable-prefix-caching", action="store_true", help="share no prefixes")
    engine.add_argument("--no-enable-chunked-prefill", action="store_true", help="feed a prompt whole or let it wait")
    engine.add_argument("--speculator", choices=["ngram"], help="draft by prompt lookup")
    engine.add_argument("--batching", default="continuous", choices=["continuous", "static"])
    engine.add_argument("--kv", default="paged", choices=["paged", "slots"])
    engine.add_argument("--dtype", default="auto", help="of weights and arithmetic, as in load_model")
    engine.add_argument("--device", default="auto", help="auto, cpu, cuda")
    engine.add_argument("--seed", type=int, default=0)
    parser.set_defaults(run=_serve)


def make_engine(arguments):
    """The engine that the flags describe, and its tokenizer."""
    from minillm import Engine, load_model, load_tokenizer

    model = load_model(arguments.model, device=arguments.device, dtype=arguments.dtype)
    tokenizer = load_tokenizer(arguments.model)
    engine = Engine(
        model, tokenizer, batching=arguments.batching, kv=arguments.kv, kv_format=arguments.kv_cache_dtype,
        kv_memory=arguments.kv_cache_memory_bytes, block_size=arguments.block_size, max_batch=arguments.max_num_seqs,
        max_context=arguments.max_model_len, max_step_tokens=arguments.max_num_batched_tokens,
        chunked_prefill=not arguments.no_enable_chunked_prefill, speculator=arguments.speculator,
        prefix_cache=not arguments.no_enable_prefix_caching, records="summary", seed=arguments.seed,
    )
    return engine, tokenizer


def _serve(arguments) -> int:
    from minillm.serve.app import Server
    from minillm.serve.engine_thread import EngineThread
    from minillm.serve.run import DrainingServer

    check_at_least(0, max_waiting=arguments.max_waiting)
    if not 0 <= arguments.port <= 65_535:
        raise ValueError(f"--port {arguments.port} is not a port: give one from 0 to 65,535 (0 takes a free one)")
    if arguments.host not in LOOPBACK and not arguments.api_key:
        print(f"minillm serve: {arguments.host} is reached from other machines, and no --api-key is asked of them",
              file=sys.stderr)
    engine, tokenizer = make_engine(arguments)
    name = arguments.served_model_name or arguments.model
    server = Server(EngineThread(engine, arguments.max_waiting), tokenizer, name, arguments.api_key)
    stats = engine.stats()
    print(f"{name}: up to {engine.scheduler.max_batch} rows, {stats.blocks_free:,} blocks of {arguments.block_size} "
          f"tokens, context {engine.max_context:,}", flush=True)
    running = DrainingServer(server, arguments.host, arguments.port)
    running.run()
    return 0 if running.started else 2  # its log has said why: a port that is taken, above all
