"""The shapes of attention's tiles: a table by device, format and kind of row, which `tile_sweep.py` fills.

A shape is (keys a tile, pipeline stages, warps). More keys and stages keep more of the cache on its way
to a program; they also take more shared memory and registers, so that fewer programs run beside each other.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import torch

Shape = tuple[int, int, int]

TABLE = Path(__file__).with_suffix(".json")
ANY = "any device"  # two buffers of keys and values fit the shared memory of every card from Ampere on


@cache
def table() -> dict[str, dict[str, dict[str, list[int]]]]:
    """Device -> format -> kind -> shape."""
    return json.loads(TABLE.read_text(encoding="utf-8"))


@cache
def device_name(device: torch.device) -> str:
    """The name under which the table may hold this device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ANY


def tile_shape(kv_format: str, block_m: int, device: torch.device) -> Shape:
    """The shape for tiles of `block_m` queries: as measured on this device, else one that every device takes."""
    kind = "decode" if block_m <= 16 else "prompt"
    for name in (device_name(device), ANY):
        if found := table().get(name, {}).get(kv_format, {}).get(kind):
            return tuple(found)
    raise KeyError(f"no tile shape for {kv_format!r}")


def write(device: torch.device, found: dict[str, dict[str, Shape]], path: Path = TABLE) -> None:
    """Put a device's shapes into the table: format -> kind -> shape."""
    rows = json.loads(path.read_text(encoding="utf-8")) | {device_name(device): found}
    path.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    table.cache_clear()
