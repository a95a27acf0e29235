"""The sweep that finds the quickest tile shapes of attention on a device, and writes them to its table.

    python -m minillm.fast.tile_sweep             on a GPU, for the heads of Llama 3 8B; --help names others
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import torch

from minillm.fast import kernels
from minillm.fast.attention import FastAttention
from minillm.fast.tile_shapes import ANY, Shape, device_name, table, write
from minillm.ladder.attention import RowSpan
from minillm.ladder.quantized import kv_storage
from minillm.model.config import ModelConfig

CANDIDATES = [(32, 3, 4), (32, 4, 4), (64, 3, 4), (64, 4, 4), (64, 3, 8), (128, 3, 4), (128, 3, 8)]
# (tokens stored, new tokens) of each row, for each kind
STEPS = {"decode": [[(800, 1)] * 256, [(2000, 1)] * 32, [(8000, 1)]], "prompt": [[(0, 1024)], [(3072, 1024)]]}
BLOCK_SIZE = 16


def sweep(
    config: ModelConfig, kv_format: str, device: torch.device, seconds: Callable[[list, object, Shape], float],
    candidates: Sequence[Shape] = CANDIDATES,
) -> dict[str, Shape]:
    """The quickest shape for each kind of row. seconds: of one call of attention over rows; inf where it cannot run."""
    most = max(sum(start + count + BLOCK_SIZE for start, count in rows) for steps in STEPS.values() for rows in steps)
    stored = "bf16" if kv_format == "native" else kv_format
    storage, quickest = kv_storage(config, stored, most, device), {}  # unwritten: what it holds costs no time
    for kind, steps in STEPS.items():
        times = {shape: [seconds(rows, storage, shape) for rows in steps] for shape in candidates}
        best = [min(column) for column in zip(*times.values(), strict=True)]
        slower = {shape: sum(t / b for t, b in zip(own, best, strict=True)) / len(best) for shape, own in times.items()}
        for shape, own in sorted(times.items(), key=lambda item: slower[item[0]]):
            print(f"{kv_format:7} {kind:7} {shape!s:12} {slower[shape]:6.2f} x the best,",
                  "  ".join(f"{1e6 * t:9.1f} us" for t in own))
        quickest[kind] = min(slower, key=slower.get)
    return quickest


def cuda_seconds(config: ModelConfig, device: torch.device, calls: int = 20) -> Callable[[list, object, Shape], float]:
    """What times a call of attention on the GPU: the median of `calls`, each after a write that evicts the cache, and
    that lasts until the host has launched the call."""
    evict = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    heads = config.num_attention_heads, config.num_key_value_heads

    def seconds(rows: list, storage, shape: Shape) -> float:
        needs, spans, first = [-(-(start + count) // BLOCK_SIZE) for start, count in rows], [], 0
        for (start, count), need in zip(rows, needs, strict=True):
            spans.append(RowSpan(start, count, range(first, first + need)))
            first += need
        step = kernels.step_kernels(FastAttention(storage, spans, BLOCK_SIZE, 0), config.query_group)
        tokens = sum(count for _, count in rows)
        q, k, v = (torch.zeros(tokens, h, config.head_dim, dtype=torch.bfloat16, device=device)
                   for h in (heads[0], heads[1], heads[1]))
        step.shape, times = shape, []
        try:
            step.attend(0, q, k, v)
            for _ in range(calls):
                evict.zero_()
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                step.attend(0, q, k, v)
                end.record()
                end.synchronize()
                times.append(begin.elapsed_time(end) / 1e3)
        except kernels.OutOfResources:  # shared memory
            return float("inf")
        return sorted(times)[calls // 2]

    return seconds


def main(arguments: Sequence[str] | None = None) -> None:
    """Sweep all formats on the GPU here, for one shape of heads, and write the table."""
    parser = argparse.ArgumentParser(prog="python -m minillm.fast.tile_sweep", description=__doc__.splitlines()[0])
    for name, usual in (("heads", 32), ("kv-heads", 8), ("head-dim", 128)):
        parser.add_argument(f"--{name}", type=int, default=usual, help=f"of the model; {usual} by default")
    parser.add_argument("--formats", nargs="+", default=list(table()[ANY]), choices=list(table()[ANY]))
    chosen, device = parser.parse_args(arguments), torch.device("cuda")
    if not torch.cuda.is_available():
        parser.error("a sweep needs a CUDA device")
    config = ModelConfig(
        vocab_size=1, hidden_size=chosen.heads * chosen.head_dim, intermediate_size=1, num_hidden_layers=1,
        num_attention_heads=chosen.heads, num_key_value_heads=chosen.kv_heads, head_dim=chosen.head_dim,
        max_position_embeddings=1, tie_word_embeddings=True,
    )
    found = dict(table().get(device_name(device), {}))
    for kv_format in chosen.formats:
        found[kv_format] = sweep(config, kv_format, device, cuda_seconds(config, device))
        write(device, found)  # as it comes: a run may be cut off


if __name__ == "__main__":
    main()
