"""The mechanism under paged placement: a free list of blocks with reference counts. Knows no sequences."""

from __future__ import annotations

from collections.abc import Iterable

from kvbench.allocators.base import AllocationError


class BlockPool:
    """``num_blocks`` blocks; the one freed last is taken first (LIFO), so that hot memory is reused.

    A block with one holder is not in ``shared``; one with n > 1 holders is, with the count n.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.free = list(range(num_blocks - 1, -1, -1))
        self.shared: dict[int, int] = {}

    def take(self, count: int) -> list[int]:
        """Take ``count`` free blocks. Raises AllocationError with the shortage in blocks, taking none."""
        free = self.free
        if count > len(free):
            raise AllocationError(count - len(free))
        if count == 1:
            return [free.pop()]
        taken = free[len(free) - count :]
        del free[len(free) - count :]
        taken.reverse()
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """Add a holder to each block."""
        for block in blocks:
            self.shared[block] = self.shared.get(block, 1) + 1

    def num_holders(self, block: int) -> int:
        """How many sequences hold a block that is not free."""
        return self.shared.get(block, 1)

    def give_back(self, blocks: list[int]) -> None:
        """Drop a holder of each block; those nobody holds any more are free, the last of the list on top."""
        if not self.shared:
            self.free += blocks
            return
        for block in blocks:
            holders = self.shared.get(block, 1)
            if holders == 1:
                self.free.append(block)
            elif holders == 2:
                del self.shared[block]
            else:
                self.shared[block] = holders - 1
