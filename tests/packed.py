"""Packed batches over a poisoned cache, for the tests of attention: every slot that no sequence owns is NaN."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch

from kvbench.attention.base import PackedBatch
from kvbench.cache import KVCache


@dataclass(slots=True)
class Packed:
    """Sequences with their K and V in a cache."""

    batch: PackedBatch
    cache: KVCache
    slots: list[torch.Tensor]


def place(lengths: Seq[int], block_size: int | None, rng: np.random.Generator) -> tuple[list[torch.Tensor], int]:
    """The slots of every sequence, and how many the pool has: shuffled blocks, or (None) shuffled runs with gaps.

    The first and the last block belong to nobody, for those who read before or behind what is theirs.
    """
    size = block_size or max([*lengths, 1]) + 3
    num_blocks = [-(-length // size) for length in lengths]
    blocks = iter((1 + rng.permutation(sum(num_blocks) + 2)).tolist())
    slots = []
    for length, number in zip(lengths, num_blocks, strict=True):
        starts = [next(blocks) * size + (0 if block_size else int(rng.integers(4))) for _ in range(number)]
        slots.append(torch.tensor([starts[i // size] + i % size for i in range(length)], dtype=torch.int64))
    return slots, (sum(num_blocks) + 4) * size


def pack(
    slots: list[torch.Tensor], num_queries: Seq[int], context_len: Seq[int], block_size: int | None
) -> PackedBatch:
    """The newest ``num_queries`` of the first ``context_len`` tokens of every sequence."""
    held = list(zip(slots, context_len, strict=True))
    new = [run[length - num : length] for (run, length), num in zip(held, num_queries, strict=True)]
    bases = tables = None
    if block_size is None:
        bases = torch.tensor([int(run[0]) if len(run) else 0 for run in slots])
    else:
        firsts = [run[:length:block_size] // block_size for run, length in held]
        tables = torch.full((len(slots), max(map(len, firsts)) + 1), -(10**12))  # behind the last block: never read
        for row, blocks in zip(tables, firsts, strict=True):
            row[: len(blocks)] = blocks
    start = torch.tensor([0, *num_queries]).cumsum(0)
    return PackedBatch(start, torch.tensor(context_len), torch.cat(new), bases, tables, block_size or 1)


def poisoned(
    lengths: Seq[int], num_queries: Seq[int], block_size: int | None, keys: torch.Tensor, values: torch.Tensor
) -> Packed:
    """A one-layer cache that holds the sequences' tokens, rows of ``keys`` and ``values``, and else NaN."""
    slots, num_slots = place(lengths, block_size, np.random.default_rng(len(lengths)))
    cache = KVCache(1, num_slots, keys.shape[1], keys.shape[2], keys.dtype)
    cache.data.fill_(torch.nan)
    cache.write(0, torch.cat(slots), keys, values)
    return Packed(pack(slots, num_queries, lengths, block_size), cache, slots)
