"""The K and V of a real run, by slot: written, copied, swapped. Which slots is the allocator's business."""

from __future__ import annotations

import mmap
from collections.abc import Sequence as Seq

import torch

from kvbench.core import BlockCopy, KvbenchError

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class KVCache:
    """One pool of slots, each with one token's K and V in all layers.

    ``keys[layer]`` and ``values[layer]`` are ``[num_slots, num_kv_heads, head_dim]``, contiguous, uninitialised.

    Args:
        num_layers: layers of the model.
        num_slots: the allocator's pool.
        num_kv_heads: K/V heads of a layer.
        head_dim: numbers of a head.
        dtype: float32, bfloat16 or float16.
        device: where the pool is.

    Raises:
        KvbenchError: another dtype.
    """

    def __init__(
        self,
        num_layers: int,
        num_slots: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        if dtype not in DTYPES:
            raise KvbenchError(
                f"a KV cache of {str(dtype).removeprefix('torch.')} is not supported; "
                f"choose one of {', '.join(str(known).removeprefix('torch.') for known in DTYPES)}"
            )
        shape = (num_layers, 2, num_slots, num_kv_heads, head_dim)
        self.data = _pool(shape, dtype, torch.device(device))
        """All of it: ``[num_layers, 2, num_slots, num_kv_heads, head_dim]``."""
        self.keys = list(self.data[:, 0])
        self.values = list(self.data[:, 1])

    def write(self, layer: int, slot_mapping: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Put the K and V of new tokens, ``[T, num_kv_heads, head_dim]`` each, into their slots, ``[T]``.

        Raises:
            IndexError: a slot outside the pool.
        """
        self.keys[layer].index_copy_(0, slot_mapping, k.to(self.data.dtype))
        self.values[layer].index_copy_(0, slot_mapping, v.to(self.data.dtype))

    def copy(self, copies: Seq[BlockCopy]) -> None:
        """Copy blocks, in all layers at once. Everything is read before anything is written."""
        if copies:
            self.move(copies, self)

    def move(self, moves: Seq[BlockCopy], source: KVCache) -> None:
        """Copy blocks of another pool into this one, in all layers at once: a swap."""
        sources = [slot for move in moves for slot in range(move.src, move.src + move.num_slots)]
        targets = [slot for move in moves for slot in range(move.dst, move.dst + move.num_slots)]
        moved = source.data.index_select(2, source._index(sources)).to(self.data.device)
        self.data.index_copy_(2, self._index(targets), moved)

    def _index(self, slots: list[int]) -> torch.Tensor:
        return torch.tensor(slots, dtype=torch.int64, device=self.data.device)


def _pool(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Uninitialised memory; on a CPU in huge pages where the system has them.

    Blocks lie anywhere in a pool much larger than the reach of the TLB, so 4 KiB pages would cost every strategy time,
    and those that scatter most the most.
    """
    size = torch.Size(shape).numel() * dtype.itemsize
    if device.type != "cpu" or size == 0 or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
