"""Contiguous placement with slabs of one length (FasterTransformer): a sequence has a whole slab or nothing."""

from __future__ import annotations

from collections.abc import Hashable

from kvbench.allocators.base import Ability, AllocationError, FixedGrant
from kvbench.core import Fit, KvbenchError, Usage


class Contiguous(FixedGrant):
    """``num_slots // slab_len`` slabs; what is left over stays unused (and counts as free).

    Args:
        num_slots: the pool.
        slab_len: slots of a slab: the longest sequence it will hold.

    Raises:
        KvbenchError: a slab shorter than one slot or longer than the pool.
    """

    abilities = Ability.NONE

    def __init__(self, num_slots: int, slab_len: int) -> None:
        if not 1 <= slab_len <= num_slots:
            raise KvbenchError(
                f"allocator.slab_len={slab_len} does not fit the pool of {num_slots} slots; give 1 to {num_slots}"
            )
        self.num_slots = num_slots
        self.block_size = slab_len
        self.num_slabs = num_slots // slab_len
        self._free = list(range((self.num_slabs - 1) * slab_len, -1, -slab_len))
        self._bases: dict[Hashable, int] = {}

    def can_allocate(self, slots: int, keep: int = 0, count: int = 1) -> Fit:
        """Slabs are free, or will be; longer than a slab is NEVER."""
        slab_len = self.block_size
        need = count + keep // slab_len
        if slots > slab_len or need > self.num_slabs:
            return Fit.NEVER
        return Fit.OK if need <= len(self._free) else Fit.LATER

    def allocate(self, seq: Hashable, slots: int) -> int:
        """Grant a slab; returns its length."""
        if seq in self._bases:
            raise ValueError(f"{seq!r} holds slots already")
        if slots < 1:
            raise ValueError(f"slots={slots}: at least 1")
        if not self._free or slots > self.block_size:
            raise AllocationError(max(slots, self.block_size) - self.usage().largest_free)
        self._bases[seq] = self._free.pop()
        return self.block_size

    def free(self, seq: Hashable) -> None:
        """Give the slab back."""
        self._free.append(self._bases.pop(seq))

    def slots(self, seq: Hashable) -> list[int]:
        """``base + i`` over the whole slab."""
        base = self._bases[seq]
        return list(range(base, base + self.block_size))

    def usage(self) -> Usage:
        """The largest grant is one slab."""
        used = len(self._bases) * self.block_size
        return Usage(used, self.num_slots - used, self.block_size if self._free else 0)
