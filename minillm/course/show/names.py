"""What every idea of the course is called here, in vLLM and in SGLang, as data.

`here` is a setting of `Engine` or `SamplingParams` (written `Engine.kv`), or a dotted name in
this package; `resolve` finds it, and a test resolves them all, so that the table cannot name
what is gone. The other columns follow the two projects' documentation of 2026; they change.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass

import minillm


@dataclass(frozen=True)
class Name:
    """One idea. chapter: the notebook that builds it; "": the other engine has no such name."""

    idea: str
    here: str
    chapter: int
    vllm: str
    sglang: str


NAMES = (
    Name("the model and where it comes from", "minillm.load_model", 1, "`vllm serve MODEL`", "`--model-path`"),
    Name("longest context", "Engine.max_context", 1, "`--max-model-len`", "`--context-length`"),
    Name("keys and values kept", "minillm.ladder.decode.SequenceCache", 1, "always", "always"),
    Name("static batch", "minillm.ladder.static.decode_static", 2, "none", "none"),
    Name("continuous batch", "minillm.ladder.continuous.ContinuousBatching", 3, "always", "always"),
    Name("the scheduler's step", "minillm.ladder.continuous.Scheduler.plan", 3, "`Scheduler.schedule`",
         "`get_next_batch_to_run`"),
    Name("most rows of a step", "Engine.max_batch", 3, "`--max-num-seqs`", "`--max-running-requests`"),
    Name("token budget of a step", "Engine.max_step_tokens", 3, "`--max-num-batched-tokens`",
         "`--chunked-prefill-size`, `--max-prefill-tokens`"),
    Name("prompts in chunks", "minillm.ladder.continuous.Scheduler.chunked_prefill", 3, "`--enable-chunked-prefill`",
         "`--chunked-prefill-size`, -1 for off"),
    Name("first come, first served", "minillm.ladder.continuous.Scheduler.waiting", 3, "`--scheduling-policy fcfs`",
         "`--schedule-policy fcfs`"),
    Name("block of the cache", "Engine.block_size", 4, "`--block-size`", "`--page-size`"),
    Name("pool of blocks", "minillm.ladder.paged.BlockPool", 4, "`BlockPool`, `KVCacheManager`",
         "`TokenToKVPool`, allocator"),
    Name("memory for the cache", "Engine.kv_memory", 4, "`--gpu-memory-utilization`, with the weights",
         "`--mem-fraction-static`, with the weights"),
    Name("shared prefixes", "Engine.prefix_cache", 4, "`--enable-prefix-caching`",
         "RadixAttention; `--disable-radix-cache`"),
    Name("preemption", "minillm.ladder.records.RequestRecord.preemptions", 4, "`vllm:num_preemptions_total`",
         "retraction; `--schedule-conservativeness`"),
    Name("bits per key and value", "Engine.kv_format", 5, "`--kv-cache-dtype fp8`", "`--kv-cache-dtype fp8_e4m3`"),
    Name("drafts and verification", "Engine.speculator", 6, "`--speculative-config`", "`--speculative-algorithm`"),
    Name("drafts a round", "minillm.ladder.speculative.Speculator.draft_length", 6, "`num_speculative_tokens`",
         "`--speculative-num-steps`, `--speculative-num-draft-tokens`"),
    Name("acceptance", "minillm.measure.metrics.speculation", 6, "`vllm:spec_decode_num_accepted_tokens_total`",
         "`sglang:spec_accept_length`"),
    Name("time to first token", "minillm.ladder.request.Timing.ttft", 7, "`vllm:time_to_first_token_seconds`",
         "`sglang:time_to_first_token_seconds`"),
    Name("time between tokens", "minillm.measure.metrics.step_gaps", 7, "`vllm:inter_token_latency_seconds`",
         "`sglang:inter_token_latency_seconds`"),
    Name("whole latency", "minillm.measure.metrics.latencies", 7, "`vllm:e2e_request_latency_seconds`",
         "`sglang:e2e_request_latency_seconds`"),
    Name("time in the queue", "minillm.ladder.records.RequestRecord.first_scheduled", 7,
         "`vllm:request_queue_time_seconds`", "`sglang:queue_time_seconds`"),
    Name("rows now", "minillm.fast.engine.EngineStats.running", 7, "`vllm:num_requests_running`",
         "`sglang:num_running_reqs`"),
    Name("queue now", "minillm.fast.engine.EngineStats.waiting", 7, "`vllm:num_requests_waiting`",
         "`sglang:num_queue_reqs`"),
    Name("share of the cache held", "minillm.measure.metrics.occupancy", 7, "`vllm:kv_cache_usage_perc`",
         "`sglang:token_usage`"),
    Name("load test, open and closed", "minillm.measure.workload.play", 7, "`vllm bench serve`", "`bench_serving`"),
    Name("requests that fit", "minillm.measure.capacity.capacity", 8, "\"Maximum concurrency\" in the log",
         "`max_total_num_tokens` in the log"),
    Name("bounded queue", "minillm.measure.fleet.serve", 9, "a proxy in front",
         "`--max-queued-requests`"),
    Name("prefill apart from decoding", "minillm.measure.fleet.serve_disaggregated", 9, "`--kv-transfer-config`",
         "`--disaggregation-mode`"),
    Name("cap on the answer", "SamplingParams.max_tokens", 1, "`max_tokens`", "`max_new_tokens`"),
    Name("temperature, top-k, top-p", "SamplingParams.temperature", 1, "`temperature`, `top_k`, `top_p`",
         "the same"),
    Name("further ends of a text", "SamplingParams.stop_ids", 1, "`stop_token_ids`", "`stop_token_ids`"),
    Name("going on behind the end", "SamplingParams.ignore_eos", 7, "`ignore_eos`", "`ignore_eos`"),
)


def resolve(here: str) -> object:
    """What a name of the table stands for. LookupError if there is no such thing."""
    if here.startswith(("Engine.", "SamplingParams.")):
        owner, setting = here.split(".")
        parameters = inspect.signature(getattr(minillm, owner)).parameters
        if setting not in parameters:
            raise LookupError(f"{owner} has no setting {setting!r}")
        return parameters[setting]
    parts = here.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        return _inside(found, parts[cut:], here) if parts[cut:] else found
    raise LookupError(f"no module holds {here!r}")


def _inside(found: object, parts: Sequence[str], here: str) -> object:
    """The attribute at the end of the path; a field or an attribute set in `__init__` counts."""
    for part in parts:
        if not hasattr(found, part):
            fields = getattr(found, "__annotations__", {})
            if part not in fields and f"self.{part}" not in inspect.getsource(found):
                raise LookupError(f"{here!r}: {part!r} is not there")
            return part
        found = getattr(found, part)
    return found or parts[-1]  # a field whose default is None or 0


def names_table() -> str:
    """The names as a Markdown table, by chapter."""
    lines = ["| idea | here | chapter | vLLM | SGLang |", "|---|---|---|---|---|"]
    for name in sorted(NAMES, key=lambda name: name.chapter):
        here = name.here.removeprefix("minillm.")
        lines.append(f"| {name.idea} | `{here}` | {name.chapter} | {name.vllm} | {name.sglang} |")
    return "\n".join(lines)
