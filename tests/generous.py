"""Plug-in allocators that hold more for a sequence than they say can be written, each sequence another amount."""

from __future__ import annotations

from collections.abc import Collection, Hashable

from kvbench.allocators.base import Ability, AllocationError, FixedGrant
from kvbench.allocators.paged import Paged
from kvbench.core import BlockCopy, Fit, Usage


class Generous(FixedGrant):
    """Pages for a multiple of what is asked for, and by turns one or more when a sequence grows.

    Args:
        num_slots: the pool.
        block_size: slots of a page.
        factor: the multiple.
        promise: tokens of room that ``append`` answers at most; else the room of the fullest.
    """

    abilities = Ability.ANY_SIZE | Ability.GROW
    most = 3  # pages that a sequence gets at once when it grows

    def __init__(self, num_slots: int, block_size: int = 16, factor: float = 1.5, promise: int = 1 << 30) -> None:
        self.num_slots, self.block_size, self.factor, self.promise = num_slots, block_size, factor, promise
        self.num_pages = num_slots // block_size
        self.empty = list(range(self.num_pages))
        self.tables: dict[Hashable, list[int]] = {}
        self.lens: dict[Hashable, int] = {}  # tokens that each has when it asks next

    def _pages(self, slots: int) -> int:
        return -(-int(slots * self.factor) // self.block_size)

    def _take(self, num_pages: int) -> list[int]:
        if num_pages > len(self.empty):
            raise AllocationError((num_pages - len(self.empty)) * self.block_size)
        taken, self.empty = self.empty[:num_pages], self.empty[num_pages:]
        return taken

    def can_allocate(self, slots: int, keep: int = 0, count: int = 1) -> Fit:
        need = count * self._pages(slots) + keep // self.block_size
        if need > self.num_pages:
            return Fit.NEVER
        return Fit.OK if need <= len(self.empty) else Fit.LATER

    def allocate(self, seq: Hashable, slots: int) -> int:
        if seq in self.tables or slots < 1:
            raise ValueError(f"{seq!r}, {slots}")
        self.tables[seq] = self._take(self._pages(slots))
        self.lens[seq] = len(self.tables[seq]) * self.block_size
        return self.lens[seq]

    def can_append(self, num_seqs: int) -> bool:
        return self.most * num_seqs <= len(self.empty)

    def append(self, seqs: Collection[Hashable], copies: list[BlockCopy]) -> int:
        num_pages: dict[Hashable, int] = {}
        for seq in seqs:
            if self.lens[seq] == len(self.tables[seq]) * self.block_size:
                num_pages[seq] = 1 + len(self.tables[seq]) % self.most
        taken = self._take(sum(num_pages.values()))
        for seq, count in num_pages.items():
            self.tables[seq] += [taken.pop() for _ in range(count)]
        room = min(self.promise, *(len(self.tables[seq]) * self.block_size - self.lens[seq] for seq in seqs))
        for seq in seqs:
            self.lens[seq] += room
        return room

    def free(self, seq: Hashable) -> None:
        self.empty = sorted(self.empty + self.tables.pop(seq))
        del self.lens[seq]

    def slots(self, seq: Hashable) -> list[int]:
        return [page * self.block_size + i for page in self.tables[seq] for i in range(self.block_size)]

    def usage(self) -> Usage:
        used = (self.num_pages - len(self.empty)) * self.block_size
        largest = len(self.empty) * self.block_size
        while largest and self._pages(largest) > len(self.empty):
            largest -= 1
        return Usage(used, self.num_slots - used, largest)


class PageEachTime(Generous):
    """A page at every call, of which one slot is promised."""

    most = 1

    def append(self, seqs: Collection[Hashable], copies: list[BlockCopy]) -> int:
        tables = [self.tables[seq] for seq in seqs]
        for table, page in zip(tables, self._take(len(tables)), strict=True):
            table.append(page)
        return 1


class GenerousPaged(Paged):
    """Shares and swaps, grants a block more than is asked for, and others ahead while there are plenty."""

    def can_allocate(self, slots: int, keep: int = 0, count: int = 1) -> Fit:
        return super().can_allocate(slots + self.block_size, keep, count)

    def allocate(self, seq: Hashable, slots: int) -> int:
        return super().allocate(seq, slots + self.block_size if slots > 0 else slots)

    def append(self, seqs: Collection[Hashable], copies: list[BlockCopy]) -> int:
        room = super().append(seqs, copies)
        for seq in seqs:
            asks_at = self._lens.get(seq, len(self.tables[seq]) * self.block_size)
            if len(self.tables[seq]) % 2 and len(self.pool.free) > self.pool.num_blocks // 2:
                self.tables[seq] += self.pool.take(2)
                self._lens[seq] = asks_at
        return room

    def usage(self) -> Usage:
        usage = super().usage()
        usage.largest_free = max(0, usage.largest_free - self.block_size)
        return usage
