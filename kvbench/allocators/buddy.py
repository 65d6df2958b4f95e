"""Contiguous placement on a buddy heap (the Orca baselines): a reservation rounded up to 2^k blocks."""

from __future__ import annotations

from collections.abc import Hashable

from kvbench.allocators.base import Ability, AllocationError, FixedGrant
from kvbench.allocators.buddy_heap import BuddyHeap
from kvbench.core import Fit, KvbenchError, Usage


class Buddy(FixedGrant):
    """One region of a buddy heap for each sequence.

    Args:
        num_slots: the pool; slots beyond the last whole block stay unused (and count as free).
        block_size: slots of the smallest region.
        region_len: slots of the largest region, rounded up to ``2**k`` blocks: the model's maximum length.

    Raises:
        KvbenchError: a block size below 1 or larger than the pool, a region shorter than a block.
    """

    abilities = Ability.ANY_SIZE

    def __init__(self, num_slots: int, block_size: int = 16, region_len: int = 2048) -> None:
        if not 1 <= block_size <= num_slots:
            raise KvbenchError(
                f"allocator.block_size={block_size} does not fit the pool of {num_slots} slots; give 1 to {num_slots}"
            )
        if region_len < block_size:
            raise KvbenchError(
                f"allocator.region_len={region_len} is shorter than a block of {block_size}; give at least that"
            )
        self.num_slots = num_slots
        self.block_size = block_size
        self.heap = BuddyHeap(num_slots // block_size, self._order(region_len))
        self._regions: dict[Hashable, tuple[int, int]] = {}  # sequence -> first block, order

    def _order(self, slots: int) -> int:
        """The order of the smallest region that holds ``slots``."""
        return (-(-slots // self.block_size) - 1).bit_length()

    def can_allocate(self, slots: int, keep: int = 0, count: int = 1) -> Fit:
        """Regions of the rounded size, or larger ones to split, are free."""
        heap, order = self.heap, self._order(slots)
        need = (count << order) + keep // self.block_size
        if order > heap.largest_order or need > heap.num_blocks or (count > 1 and count > heap.num_regions(order)):
            return Fit.NEVER
        largest = heap.largest_free_order()
        if largest is None or order > largest or need > heap.num_free:
            return Fit.LATER
        return Fit.OK if count == 1 or heap.num_free_regions(order) >= count else Fit.LATER

    def allocate(self, seq: Hashable, slots: int) -> int:
        """Take a region; returns ``slots`` rounded up to ``2**k`` blocks."""
        if seq in self._regions:
            raise ValueError(f"{seq!r} holds slots already")
        if slots < 1:
            raise ValueError(f"slots={slots}: at least 1")
        order = self._order(slots)
        try:
            self._regions[seq] = (self.heap.take(order), order)
        except AllocationError as short:
            raise AllocationError(short.shortage * self.block_size) from None
        return self.block_size << order

    def free(self, seq: Hashable) -> None:
        """Give the region back to the heap."""
        self.heap.give_back(*self._regions.pop(seq))

    def slots(self, seq: Hashable) -> list[int]:
        """``base + i`` over the whole region."""
        start, order = self._regions[seq]
        base = start * self.block_size
        return list(range(base, base + (self.block_size << order)))

    def usage(self) -> Usage:
        """The largest grant is the largest free region."""
        order = self.heap.largest_free_order()
        used = (self.heap.num_blocks - self.heap.num_free) * self.block_size
        return Usage(used, self.num_slots - used, 0 if order is None else self.block_size << order)
