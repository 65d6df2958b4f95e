"""Attention, writes, copies and swaps by ``kvbench_kernels``: Triton on a GPU, the same in plain torch elsewhere.

The only module that imports ``kvbench_kernels``. Batches have the kernels' types (see ``PackedBatch``). Nothing here
waits for a device, so everything can be captured in a CUDA graph.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence as Seq
from types import ModuleType
from typing import Any

import torch

from kvbench.attention.base import PackedBatch
from kvbench.cache import KVCache
from kvbench.core import KvbenchError
from kvbench_kernels.plan import MIN_SPLIT_LEN, plan_splits


def attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, batch: PackedBatch, scale: float) -> torch.Tensor:
    """``kvbench.attention.base.Attend``: leading sequences with one query by ``decode``, the others by ``prefill``."""
    kernel = kernels(q.device)
    num, lens = batch.num_decodes, batch.context_len
    parts = []
    if num:
        options = _where(batch, slice(None, num))
        parts.append(kernel.decode(q[:num], keys, values, lens[:num], splits=batch.splits, scale=scale, **options)[0])
    if num < len(lens):
        start = batch.query_start[num:] - num
        options = _where(batch, slice(num, None))
        parts.append(kernel.prefill(q[num:], keys, values, start, lens[num:], scale=scale, **options))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def write(cache: KVCache, layer: int, slot_mapping: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """``KVCache.write`` that skips slot -1, the padding of a bucket."""
    kernels(k.device).write_kv(k.contiguous(), v.contiguous(), cache.keys[layer], cache.values[layer], slot_mapping)


def num_splits(lens: Seq[int], num_kv_heads: int, device: torch.device) -> int:
    """Into how many parts each sequence of a decode is cut, so that the device is busy."""
    if device.type != "cuda":
        return 1
    return plan_splits(lens, num_kv_heads, torch.cuda.get_device_properties(device).multi_processor_count)


def all_splits(max_len: int, device: torch.device) -> list[int]:
    """Whatever ``num_splits`` may say of sequences up to this length: each is a kernel of its own."""
    if device.type != "cuda":
        return [1]
    return [1 << i for i in range(max(1, max_len // MIN_SPLIT_LEN).bit_length())]


def copy_blocks(cache: KVCache, block_size: int, pairs: torch.Tensor) -> None:
    """Copy whole blocks, ``[N, 2]`` on the host, in all layers; no target may be a source, or twice there."""
    kernels(cache.data.device).copy_blocks(_blocks(cache, block_size), pairs)


def gather_blocks(cache: KVCache, block_size: int, staging: torch.Tensor, blocks: torch.Tensor) -> None:
    """Collect these blocks, ``[N]`` on the device, each with K and V of all layers side by side.

    ``staging`` is ``[N or more, layers, 2, block_size, heads, D]``.
    """
    kernels(cache.data.device).gather_blocks(_blocks(cache, block_size), staging, blocks)


def scatter_blocks(cache: KVCache, block_size: int, staging: torch.Tensor, blocks: torch.Tensor) -> None:
    """Put back what ``gather_blocks`` collected, into these blocks."""
    kernels(cache.data.device).scatter_blocks(_blocks(cache, block_size), staging, blocks)


def check_installed() -> None:
    """Refuse a GPU without Triton. Raises KvbenchError with the remedy."""
    try:
        importlib.import_module("triton")
    except ImportError:
        raise KvbenchError("runner=cuda needs triton, which this torch did not bring: pip install triton") from None


def kernels(device: torch.device) -> ModuleType:
    """``kvbench_kernels.device`` for a GPU, else ``kvbench_kernels.reference``."""
    return importlib.import_module("kvbench_kernels.device" if device.type == "cuda" else "kvbench_kernels.reference")


def _blocks(cache: KVCache, block_size: int) -> torch.Tensor:
    """``[layers, 2, blocks, block_size, heads, D]``, without the slots behind the last whole block."""
    num_blocks = cache.data.shape[2] // block_size
    return cache.data[:, :, : num_blocks * block_size].unflatten(2, (num_blocks, block_size))


def _where(batch: PackedBatch, rows: slice) -> dict[str, Any]:
    """How the kernels address some of the sequences."""
    if batch.bases is not None:
        return {"base": batch.bases[rows]}
    assert batch.tables is not None
    return {"table": batch.tables[rows], "page": batch.block_size}
