"""Experiments of part B: what a batch buys, and what the policy that fills it is worth."""

from __future__ import annotations

from minillm.measure import chapters
from minillm.measure.measurement import Measurement
from minillm.measure.setting import Setting


def batch_curve(setting: Setting) -> Measurement:
    """A decode step's time against its rows."""
    rows = setting.size((1, 2, 4, 8, 16, 32), (1, 2, 4, 8, 16, 32, 64, 128), (1, 2, 4, 8, 16, 32, 64, 128, 256))
    return chapters.batch_curve(setting.timed_model, setting.timed_name, rows, steps=setting.size(8, 16))


def gain_by_spread(setting: Setting) -> Measurement:
    """Continuous over static batching against the spread of the answers' lengths."""
    requests, mean_tokens = setting.size((16, 8), (32, 16), (128, 64))
    return chapters.gain_by_spread(
        setting.timed_model, setting.timed_name, requests=requests, mean_tokens=mean_tokens, max_batch=8
    )


def stall_by_chunking(setting: Setting) -> Measurement:
    """How long streams stand still while a long prompt is read, whole and in chunks."""
    long_prompt, budget, tokens = setting.size((192, 64, 20), (1024, 64, 40), (8128, 256, 40))
    return chapters.stall_by_chunking(
        setting.timed_model, setting.timed_name, long_prompt, budget=budget, tokens=tokens
    )
