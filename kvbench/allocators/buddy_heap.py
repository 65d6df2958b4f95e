"""The mechanism under buddy placement: regions of 2^k blocks, split in halves and merged again. Knows no sequences."""

from __future__ import annotations

from kvbench.allocators.base import AllocationError


class BuddyHeap:
    """A pool carved greedily into aligned regions of at most ``2**max_order`` blocks, each a tree of halves.

    The rules of the PagedAttention authors' Orca baseline: one free list per order, last in first out; the smallest
    sufficient region is split; a freed region merges with its free buddy, up to ``max_order``.
    (983 blocks and order 7: seven regions of 128, then 64, 16, 4, 2 and 1.)
    """

    def __init__(self, num_blocks: int, max_order: int) -> None:
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self.free: list[dict[int, None]] = [{} for _ in range(max_order + 1)]  # by order: region starts, newest last
        regions = []
        start = 0
        for order in range(max_order, -1, -1):
            while num_blocks - start >= 1 << order:
                regions.append((order, start))
                start += 1 << order
        self.largest_order = regions[0][0]
        self._carved = [order for order, _ in regions]
        for order, start in reversed(regions):  # the lowest address on top
            self.free[order][start] = None

    def largest_free_order(self) -> int | None:
        """The order of the largest free region, None if there is none."""
        for order in range(self.largest_order, -1, -1):
            if self.free[order]:
                return order
        return None

    def num_free_regions(self, order: int) -> int:
        """How many regions of ``2**order`` blocks could be taken now, larger ones being split."""
        return sum(len(self.free[larger]) << (larger - order) for larger in range(order, self.largest_order + 1))

    def num_regions(self, order: int) -> int:
        """The same of an empty heap."""
        return sum(1 << (carved - order) for carved in self._carved if carved >= order)

    def take(self, order: int) -> int:
        """Take a region of ``2**order`` blocks; returns its first. Raises AllocationError, short in blocks."""
        available = order
        while available <= self.largest_order and not self.free[available]:
            available += 1
        if available > self.largest_order:
            raise AllocationError(1 << order)
        start = self.free[available].popitem()[0]
        while available > order:  # keep the lower half
            available -= 1
            self.free[available][start + (1 << available)] = None
        self.num_free -= 1 << order
        return start

    def give_back(self, start: int, order: int) -> None:
        """Free a region that ``take`` returned, merging it with its buddy as long as that is free too."""
        self.num_free += 1 << order
        while order < self.largest_order:
            buddy = start ^ (1 << order)
            if buddy not in self.free[order]:
                break
            del self.free[order][buddy]
            start = min(start, buddy)
            order += 1
        self.free[order][start] = None
