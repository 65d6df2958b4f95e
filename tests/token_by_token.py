"""A plug-in allocator over another: it promises room for one token at a time, as the protocol allows."""

from __future__ import annotations

from collections.abc import Collection, Hashable
from collections.abc import Sequence as Seq

from kvbench.allocators.paged import Paged
from kvbench.core import BlockCopy, Fit, Usage


class TokenByToken:
    """Paged placement whose ``append`` always answers 1, however many slots there are.

    Args:
        num_slots: the pool.
        block_size: of the blocks beneath.
        host_slots: size of the host pool.
    """

    def __init__(self, num_slots: int, block_size: int = 4, host_slots: int | None = None) -> None:
        self._paged = Paged(num_slots, block_size, host_slots=host_slots)
        self.abilities = self._paged.abilities
        self.num_slots = num_slots
        self.block_size = block_size
        self.host_slots = self._paged.host_slots
        self.promised: dict[Hashable, int] = {}
        """Tokens that a sequence may hold before it asks."""
        self._granted: dict[Hashable, int] = {}
        """Tokens that it may hold before the placement beneath is asked."""

    def can_allocate(self, slots: int, keep: int = 0, count: int = 1) -> Fit:
        return self._paged.can_allocate(slots, keep, count)

    def allocate(self, seq: Hashable, slots: int) -> int:
        granted = self.promised[seq] = self._granted[seq] = self._paged.allocate(seq, slots)
        return granted

    def can_append(self, num_seqs: int) -> bool:
        return self._paged.can_append(num_seqs)

    def append(self, seqs: Collection[Hashable], copies: list[BlockCopy]) -> int:
        due = [seq for seq in seqs if self.promised[seq] == self._granted[seq]]
        if due:
            room = self._paged.append(due, copies)
            for seq in due:
                self._granted[seq] += room
        for seq in seqs:
            self.promised[seq] += 1
        return 1

    def fork(self, parent: Hashable, child: Hashable, length: int) -> None:
        self._paged.fork(parent, child, length)
        for seq in (parent, child):
            self.promised[seq] = self._granted[seq] = length

    def refork(self, seqs: Seq[Hashable], parents: Seq[int], length: int, copies: list[BlockCopy]) -> None:
        self._paged.refork(seqs, parents, length, copies)

    def extend(self, seq: Hashable, slots: int, copies: list[BlockCopy]) -> int:
        granted = self.promised[seq] = self._granted[seq] = self._paged.extend(seq, slots, copies)
        return granted

    def swap_out(self, seqs: Collection[Hashable]) -> list[BlockCopy]:
        return self._paged.swap_out(seqs)

    def can_swap_in(self, seqs: Collection[Hashable], keep: int = 0) -> bool:
        return self._paged.can_swap_in(seqs, keep)

    def swap_in(self, seqs: Collection[Hashable]) -> list[BlockCopy]:
        return self._paged.swap_in(seqs)

    def free(self, seq: Hashable) -> None:
        self._paged.free(seq)
        del self.promised[seq], self._granted[seq]

    def slots(self, seq: Hashable) -> list[int]:
        return self._paged.slots(seq)

    def usage(self) -> Usage:
        return self._paged.usage()
