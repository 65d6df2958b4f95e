"""Contiguous placement without rounding: the lowest hole that is large enough, neighbours merged when freed."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable

from kvbench.allocators.base import Ability, AllocationError, FixedGrant
from kvbench.core import Fit, KvbenchError, Usage


class FirstFit(FixedGrant):
    """One extent for each sequence, searched in order of address.

    Args:
        num_slots: the pool; slots beyond the last whole block stay unused (and count as free).
        block_size: granule of an extent; 1 grants exactly what is asked for.

    Raises:
        KvbenchError: a block size below 1 or larger than the pool.
    """

    abilities = Ability.ANY_SIZE

    def __init__(self, num_slots: int, block_size: int = 1) -> None:
        if not 1 <= block_size <= num_slots:
            raise KvbenchError(
                f"allocator.block_size={block_size} does not fit the pool of {num_slots} slots; give 1 to {num_slots}"
            )
        self.num_slots = num_slots
        self.block_size = block_size
        self._end = num_slots - num_slots % block_size
        self._holes = [(0, self._end)]  # (first slot, length), by address; no two touch
        self._free = self._largest = self._end
        self._extents: dict[Hashable, tuple[int, int]] = {}

    def _rounded(self, slots: int) -> int:
        return -(-slots // self.block_size) * self.block_size

    def can_allocate(self, slots: int, keep: int = 0, count: int = 1) -> Fit:
        """The holes are large enough, and ``keep`` slots remain somewhere."""
        size = self._rounded(slots)
        if count * size + keep > self._end:
            return Fit.NEVER
        if size > self._largest or count * size + keep > self._free:
            return Fit.LATER
        if count == 1 or count * size <= self._largest:
            return Fit.OK
        return Fit.OK if sum(length // size for _, length in self._holes) >= count else Fit.LATER

    def allocate(self, seq: Hashable, slots: int) -> int:
        """Cut the extent from the front of the first hole that holds it; returns ``slots`` rounded up to blocks."""
        if seq in self._extents:
            raise ValueError(f"{seq!r} holds slots already")
        if slots < 1:
            raise ValueError(f"slots={slots}: at least 1")
        size = self._rounded(slots)
        if size > self._largest:
            raise AllocationError(size - self._largest)
        index, (start, length) = next((i, hole) for i, hole in enumerate(self._holes) if hole[1] >= size)
        if length == size:
            del self._holes[index]
        else:
            self._holes[index] = (start + size, length - size)
        self._extents[seq] = (start, size)
        self._changed(-size)
        return size

    def _changed(self, freed: int) -> None:
        self._free += freed
        self._largest = max((length for _, length in self._holes), default=0)

    def free(self, seq: Hashable) -> None:
        """Make the extent a hole, merged with the holes before and after it."""
        start, size = self._extents.pop(seq)
        holes = self._holes
        index = bisect_left(holes, (start, 0))
        begin, end = start, start + size
        first = last = index
        if index and sum(holes[index - 1]) == start:
            first, begin = index - 1, holes[index - 1][0]
        if index < len(holes) and holes[index][0] == end:
            last, end = index + 1, sum(holes[index])
        holes[first:last] = [(begin, end - begin)]
        self._changed(size)

    def slots(self, seq: Hashable) -> list[int]:
        """``base + i`` over the whole extent."""
        start, size = self._extents[seq]
        return list(range(start, start + size))

    def usage(self) -> Usage:
        """The largest grant is the largest hole."""
        return Usage(self._end - self._free, self.num_slots - self._end + self._free, self._largest)
