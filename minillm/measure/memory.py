"""Experiments of part C: who has the cache, and what sharing it saves."""

from __future__ import annotations

from dataclasses import replace

from minillm.ladder.quantized import kv_bytes_per_token, native_format
from minillm.measure import chapters
from minillm.measure.measurement import Measurement
from minillm.measure.setting import Setting
from minillm.measure.workload import lognormal, shared_prefix

BLOCK = 16  # tokens


def memory_by_policy(setting: Setting) -> Measurement:
    """The same requests in the same bytes, as slots and as pages."""
    model = setting.timed_model
    requests, mean_tokens, prompt, cap, slots, batch = setting.size(
        (16, 6, 16, 64, 2, 64), (48, 24, 32, 256, 4, 64), (512, 64, 32, 256, 32, 256)
    )
    items = lognormal(1.0, requests, mean_tokens, prompt)
    cap = max(cap, items[0].max_tokens)
    slot_tokens = -(-(prompt + cap - 1) // BLOCK) * BLOCK
    memory = slots * slot_tokens * kv_bytes_per_token(model.config, native_format(model.dtype))
    items = [replace(item, max_tokens=cap) for item in items]
    return chapters.memory_by_policy(model, setting.timed_name, items, memory, batch)


def prefix_sharing(setting: Setting) -> Measurement:
    """One system prompt before several questions: computed each time, shared, and with its first token changed."""
    requests, prefix = setting.size((4, 128), (8, 512), (16, 2048))
    prompts = [item.prompt_ids for item in shared_prefix(requests, prefix, seed=setting.seed)]
    return chapters.prefix_sharing(setting.timed_model, setting.timed_name, prompts)


def cost_of_blocks(setting: Setting) -> Measurement:
    """A step over keys and values in one run of memory, and in blocks."""
    contexts = setting.size((64, 256), (64, 512, 2048), (64, 512, 2048, 8000))
    return chapters.cost_of_blocks(setting.timed_model, setting.timed_name, contexts)
