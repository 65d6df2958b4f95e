"""The mechanism under paged placement: a free list of blocks with reference counts. Knows no sequences."""

from __future__ import annotations

from collections.abc import Sequence

from kvbench.allocators.base import AllocationError


class BlockPool:
    """``num_blocks`` blocks; the one freed last is taken first (LIFO), so that hot memory is reused.

    A block with one holder is not in ``shared``; one with n > 1 holders is, with the count n. ``num_saved`` counts the
    holders beyond the first of all blocks.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.free = list(range(num_blocks - 1, -1, -1))
        self.shared: dict[int, int] = {}
        self.num_saved = 0

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

    def share(self, blocks: Sequence[int]) -> None:
        """Add a holder to each block."""
        shared = self.shared
        for block in blocks:
            shared[block] = shared.get(block, 1) + 1
        self.num_saved += len(blocks)

    def follow(self, source: list[int], table: list[int], end: int) -> None:
        """Make the first ``end`` blocks of a table those of another, from the end to the first that they share.

        Tables that stem from one never share a block after one that they do not.
        """
        shared, free = self.shared, self.free
        saved = 0
        for index in range(end - 1, -1, -1):
            new, old = source[index], table[index]
            if new == old:
                break
            table[index] = new
            shared[new] = shared.get(new, 1) + 1
            holders = shared.get(old, 1)
            if holders == 1:
                free.append(old)
                saved += 1
            elif holders == 2:
                del shared[old]
            else:
                shared[old] = holders - 1
        self.num_saved += saved

    def num_holders(self, block: int) -> int:
        """How many sequences hold a block that is not free."""
        return self.shared.get(block, 1)

    def leave(self, block: int) -> None:
        """Drop a holder of a block that others hold too."""
        holders = self.shared[block]
        if holders == 2:
            del self.shared[block]
        else:
            self.shared[block] = holders - 1
        self.num_saved -= 1

    def give_back(self, blocks: Sequence[int]) -> None:
        """Drop a holder of each block; those nobody holds any more are free, the last of the list on top."""
        shared = self.shared
        if not shared:
            self.free += blocks
            return
        free = self.free
        before = len(free)
        for block in blocks:
            holders = shared.get(block, 1)
            if holders == 1:
                free.append(block)
            elif holders == 2:
                del shared[block]
            else:
                shared[block] = holders - 1
        self.num_saved -= len(blocks) - (len(free) - before)
