"""How fast attention reads a cache on this CPU, and what paging costs: ``make bench``.

Decoding, batch 16, context 512, head size 64: the compiled attention over contiguous sequences, over the same tokens in
shuffled blocks, and torch's own (gather the blocks, then ``scaled_dot_product_attention``), in fp32 and bf16, with one
K/V head per query head and with one for three. Prefill of 4 x 512 tokens is compared with torch's over padded tensors.

Times are CPU time, medians over rounds in one process; every round times every case once, in a random order, over
layers that are together much larger than the caches. Ratios are medians of each round's ratio. The GB/s of decoding
count K and V once. Numbers of a machine that others use are rough: compare ratios.
"""

from __future__ import annotations

import argparse
import csv
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "0")  # or threads that wait would be counted, and disturb

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

sys.path.insert(0, str(Path(__file__).parents[2]))

from kvbench.attention import cpu
from kvbench.attention.base import PackedBatch
from kvbench.cache import KVCache
from tests.packed import pack, place

BATCH, CONTEXT_LEN, HEAD_DIM, BLOCK_SIZE = 16, 512, 64, 16
PREFILLS = 4
POOL_BYTES = 160 * 2**20
COLUMNS = ("case", "dtype", "heads", "kv_heads", "ms", "gb_per_s", "gflop_per_s", "ratio_to_contiguous")
Attention = Callable[[int], object]


def over_slots(q: torch.Tensor, cache: KVCache, batch: PackedBatch, layer: int) -> torch.Tensor:
    """Ours, over one layer."""
    return cpu.attend(q, cache.keys[layer], cache.values[layer], batch, HEAD_DIM**-0.5)


def gathered(q: torch.Tensor, cache: KVCache, slots: torch.Tensor, layer: int) -> torch.Tensor:
    """Torch's, over the gathered tokens of sequences of one length, ``slots`` ``[B * context]``."""
    shape = (BATCH, CONTEXT_LEN, *cache.keys[layer].shape[1:])
    k = cache.keys[layer].index_select(0, slots).view(shape).transpose(1, 2)
    v = cache.values[layer].index_select(0, slots).view(shape).transpose(1, 2)
    return scaled_dot_product_attention(q, k, v, enable_gqa=True)


def padded(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _: int) -> torch.Tensor:
    """Torch's prefill."""
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def filled(num_layers: int, num_slots: int, num_kv_heads: int, dtype: torch.dtype) -> KVCache:
    """A cache of random numbers."""
    cache = KVCache(num_layers, num_slots, num_kv_heads, HEAD_DIM, dtype)
    cache.data.copy_(torch.randn(cache.data.shape[2:]))
    return cache


def decodes(num_heads: int, num_kv_heads: int, dtype: torch.dtype) -> tuple[dict[str, Attention], int]:
    """The cases of decoding, and how many layers there are to rotate."""
    rng = np.random.default_rng(0)
    lengths = [CONTEXT_LEN] * BATCH
    runs, num_run_slots = place(lengths, None, rng)
    blocks, num_block_slots = place(lengths, BLOCK_SIZE, rng)
    num_slots = max(num_run_slots, num_block_slots)
    num_layers = max(2, POOL_BYTES // (num_slots * num_kv_heads * HEAD_DIM * 2 * dtype.itemsize))
    cache = filled(num_layers, num_slots, num_kv_heads, dtype)
    q = torch.randn(BATCH, num_heads, HEAD_DIM).to(dtype)
    ones = [1] * BATCH
    return {
        "decode, contiguous": partial(over_slots, q, cache, pack(runs, ones, lengths, None)),
        "decode, paged": partial(over_slots, q, cache, pack(blocks, ones, lengths, BLOCK_SIZE)),
        "decode, gather + torch SDPA": partial(gathered, q[:, :, None], cache, torch.cat(blocks)),
    }, num_layers


def prefills(num_heads: int, num_kv_heads: int, dtype: torch.dtype) -> tuple[dict[str, Attention], int]:
    """The cases of prefill."""
    rng = np.random.default_rng(0)
    lengths = [CONTEXT_LEN] * PREFILLS
    runs, num_run_slots = place(lengths, None, rng)
    blocks, num_block_slots = place(lengths, BLOCK_SIZE, rng)
    cache = filled(1, max(num_run_slots, num_block_slots), num_kv_heads, dtype)
    q = torch.randn(PREFILLS * CONTEXT_LEN, num_heads, HEAD_DIM).to(dtype)
    k, v = torch.randn(2, PREFILLS, num_kv_heads, CONTEXT_LEN, HEAD_DIM).to(dtype)
    batched = q.view(PREFILLS, CONTEXT_LEN, num_heads, HEAD_DIM).transpose(1, 2).contiguous()
    return {
        "prefill, contiguous": partial(over_slots, q, cache, pack(runs, lengths, lengths, None)),
        "prefill, paged": partial(over_slots, q, cache, pack(blocks, lengths, lengths, BLOCK_SIZE)),
        "prefill, torch SDPA, not paged": partial(padded, batched, k, v),
    }, 1


def measure(cases: dict[str, Attention], num_layers: int, num_rounds: int) -> dict[str, list[float]]:
    """Seconds of CPU time per layer, by case and round."""
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for attention in cases.values():
        attention(0)
    for _ in range(num_rounds):
        for name in random.sample(list(cases), len(cases)):
            start = time.process_time()
            for layer in range(num_layers):
                cases[name](layer)
            seconds[name].append((time.process_time() - start) / num_layers)
    return seconds


def rows(num_heads: int, num_kv_heads: int, dtype: torch.dtype, num_rounds: int) -> list[tuple[object, ...]]:
    """The table's rows of one shape."""
    table: list[tuple[object, ...]] = []
    kv_bytes = 2 * num_kv_heads * HEAD_DIM * dtype.itemsize * CONTEXT_LEN
    flop = 4 * num_heads * HEAD_DIM * CONTEXT_LEN
    for (cases, num_layers), num_seqs, queries_seen in (
        (decodes(num_heads, num_kv_heads, dtype), BATCH, 1.0),
        (prefills(num_heads, num_kv_heads, dtype), PREFILLS, (CONTEXT_LEN + 1) / 2),
    ):
        seconds = measure(cases, num_layers, num_rounds)
        base = next(iter(seconds.values()))
        for name, times in seconds.items():
            median = statistics.median(times)
            table.append((
                name,
                str(dtype).removeprefix("torch."),
                num_heads,
                num_kv_heads,
                round(median * 1e3, 3),
                round(num_seqs * kv_bytes / median / 1e9, 2) if queries_seen == 1.0 else "-",
                round(num_seqs * flop * queries_seen / median / 1e9, 1),
                round(statistics.median(own / other for own, other in zip(times, base, strict=True)), 3),
            ))  # fmt: skip
    return table


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("results/bench/attention.csv"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    table: list[tuple[object, ...]] = []
    print(("{:<32}" + "{:>12}" * 7).format(*COLUMNS[:-1], "ratio"))
    for dtype in (torch.float32, torch.bfloat16):
        for num_kv_heads in (12, 4):
            for row in rows(12, num_kv_heads, dtype, options.repeats):
                table.append(row)
                print(("{:<32}" + "{:>12}" * 7).format(*row), flush=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with options.out.open("w", newline="") as file:
        csv.writer(file).writerows([COLUMNS, *table])
    print(f"wrote {options.out}: CPU time per layer, medians of {options.repeats} rounds, {options.threads} thread(s)")


if __name__ == "__main__":
    main()
