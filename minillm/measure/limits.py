"""Experiments of part A: what bounds a decode step and a prompt."""

from __future__ import annotations

from minillm.measure import chapters
from minillm.measure.measurement import Measurement
from minillm.measure.setting import Setting


def cost_by_length(setting: Setting) -> Measurement:
    """What the next token costs behind a text of so many, recomputed and cached."""
    lengths = setting.size((4, 16, 64, 256, 1024), (4, 8, 16, 64, 256, 512, 1024, 2048, 4096, 8192))
    model, name = setting.timed_model, setting.timed_name
    lengths = [length for length in lengths if length <= model.config.max_position_embeddings]
    return chapters.cost_by_length(model, name, lengths, setting.size(256, 1024, max(lengths)))
