"""The allocator protocol: integers in, integers out. Knows neither tensors, nor time, nor how long a request will be.

An allocator is called when something happens to a sequence, never once per token. Every verb applies fully or
raises and leaves the state as it was.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from collections.abc import Sequence as Seq
from enum import Flag, auto
from typing import Protocol

from kvbench.core import BlockCopy, Fit, KvbenchError, Usage


class Ability(Flag):
    """What an allocator can do beyond granting and freeing; declared, and tested where declared."""

    NONE = 0
    ANY_SIZE = auto()
    """Grants what is asked for (rounded up to blocks); without it every grant is one fixed slab."""
    GROW = auto()
    """``can_append`` and ``append`` work, so a sequence may be admitted with less than its final length."""
    FORK = auto()
    """``fork`` and ``extend`` work: sequences may share slots."""
    SWAP = auto()
    """``swap_out`` and ``swap_in`` work: there is a host pool."""


class AllocationError(Exception):
    """A grant that does not fit now. ``shortage`` is how many slots are missing; nothing was changed."""

    def __init__(self, shortage: int) -> None:
        super().__init__(f"{shortage} slots short")
        self.shortage = shortage


class Allocator(Protocol):
    """Grants slots of one pool to sequences, which are opaque keys to it.

    ``keep`` asks that so many slots stay free after a grant (the scheduler's watermark); a multiple of
    ``block_size``.
    """

    abilities: Ability
    num_slots: int
    """The pool's capacity."""
    block_size: int
    """The granule of a grant, in slots; 1 where any number of slots can be granted."""
    host_slots: int
    """The host pool's capacity; 0 without SWAP."""

    def can_allocate(self, slots: int, keep: int = 0, count: int = 1) -> Fit:
        """Whether ``slots`` could be granted now, to each of ``count`` sequences. Pure.

        OK: the same ``allocate`` succeeds. LATER: not before something is freed. NEVER: not even in an empty pool.
        """
        ...

    def allocate(self, seq: Hashable, slots: int) -> int:
        """Grant a new sequence at least ``slots`` (>= 1) slots; returns how many it got.

        Raises:
            AllocationError: not enough free slots of the kind it needs.
            ValueError: the sequence holds slots already, or ``slots`` < 1.
        """
        ...

    def can_append(self, num_seqs: int) -> bool:
        """Whether so many sequences could each be given room for one token more. Pure. Needs GROW."""
        ...

    def append(self, seqs: Collection[Hashable], copies: list[BlockCopy]) -> int:
        """Make the next token of each sequence writable. Needs GROW.

        Each has written as many tokens as it was told that it can: those of its grant, and of every answer since. So
        the allocator knows how many there are. Where it answered less than it had granted, slots of the sequence are
        still empty, and it needs no more: one that grants more at every call fills the pool with what nobody writes.

        Sequences that were forked are asked together with the streams of their request, and may be asked before they
        have written all that they can. The answer then counts from their last token all the same.

        Returns:
            How many tokens each of them can write before it has to ask again (the smallest, at least 1). An answer
            of ``1`` is correct as long as there is a slot for that token; it is asked again in the next step.

        Work for the runner is added to ``copies``: a shared block that is about to be written is copied first.

        Raises:
            AllocationError: not enough for all of them; none was granted anything.
            KeyError: a sequence holds no slots.
        """
        ...

    def fork(self, parent: Hashable, child: Hashable, length: int) -> None:
        """Let ``child`` share the first ``length`` slots of ``parent``. Both ask before they write again. Needs FORK.

        Raises:
            KeyError: the parent holds no slots.
            ValueError: the child holds some already, or ``length`` is not within the parent's slots.
        """
        ...

    def refork(self, seqs: Seq[Hashable], parents: Seq[int], length: int, copies: list[BlockCopy]) -> None:
        """Sequence ``i`` goes on from the first ``length`` tokens of what was sequence ``parents[i]``. Needs FORK.

        All stem from one allocation, hold at least ``length`` slots and have written their last; those that others go
        on from stay (``parents[i] == i``). Each keeps as many slots as it had, and no free slot is needed: what is full
        is shared, the tokens in a block that will be written go to the sequence's own, by ``copies``.

        Raises:
            KeyError: one of them holds no slots.
        """
        ...

    def extend(self, seq: Hashable, slots: int, copies: list[BlockCopy]) -> int:
        """Grant a sequence that was forked at least ``slots`` slots in all, writable from where it was. Needs FORK.

        Returns:
            How many slots it has, shared ones included.

        Raises:
            AllocationError: not enough; nothing was changed.
            KeyError: it holds no slots.
        """
        ...

    def swap_out(self, seqs: Collection[Hashable]) -> list[BlockCopy]:
        """Move what these sequences hold to the host pool, a shared block once. Needs SWAP.

        What others hold as well stays where it is. They keep sharing what they shared. Until they are back, ``free``
        is all that may be asked of them.

        Returns:
            Copies from slots of the pool to slots of the host pool.

        Raises:
            AllocationError: the host pool is too full; nothing was changed.
            KeyError: one of them holds no slots.
        """
        ...

    def can_swap_in(self, seqs: Collection[Hashable], keep: int = 0) -> bool:
        """Whether there is room for them again, and ``keep`` slots more. Pure. Needs SWAP."""
        ...

    def swap_in(self, seqs: Collection[Hashable]) -> list[BlockCopy]:
        """Move sequences back that were swapped out together. Needs SWAP.

        Returns:
            Copies from slots of the host pool to slots of the pool.

        Raises:
            AllocationError: not enough free slots; nothing was changed.
            KeyError: one of them was not swapped out.
        """
        ...

    def free(self, seq: Hashable) -> None:
        """Take back everything a sequence holds. Raises KeyError if it holds nothing."""
        ...

    def slots(self, seq: Hashable) -> list[int]:
        """The physical slots of a sequence in the order of its tokens, the still empty ones last. Pure."""
        ...

    def usage(self) -> Usage:
        """The books, in O(1)."""
        ...


def is_plug_in(allocator: Allocator) -> bool:
    """Whether its class is none of kvbench's: what it answers is then checked while it runs."""
    return not type(allocator).__module__.startswith("kvbench.")


def broken_protocol(allocator: Allocator, said: str) -> KvbenchError:
    """The error that a plug-in's answer is: who answered, what, and how to test it."""
    kind = type(allocator)
    return KvbenchError(
        f"allocator {kind.__module__}.{kind.__qualname__} breaks the protocol: {said}; "
        f"test it by python -m kvbench.verify {kind.__module__}:{kind.__qualname__}"
    )


class FixedGrant:
    """What every placement answers whose grants neither grow in place nor are shared: contiguous ones."""

    host_slots = 0

    def can_append(self, num_seqs: int) -> bool:
        """A grant does not grow in place."""
        return num_seqs == 0

    def append(self, seqs: Collection[Hashable], copies: list[BlockCopy]) -> int:
        """A grant does not grow in place. Raises AllocationError."""
        raise AllocationError(len(seqs))

    def fork(self, parent: Hashable, child: Hashable, length: int) -> None:
        """Slots are not shared. Raises KvbenchError."""
        raise KvbenchError(f"{self._name()} shares no slots; use allocator=paged")

    def refork(self, seqs: Seq[Hashable], parents: Seq[int], length: int, copies: list[BlockCopy]) -> None:
        """Slots are not shared. Raises KvbenchError."""
        raise KvbenchError(f"{self._name()} shares no slots; use allocator=paged")

    def extend(self, seq: Hashable, slots: int, copies: list[BlockCopy]) -> int:
        """Slots are not shared. Raises KvbenchError."""
        raise KvbenchError(f"{self._name()} shares no slots; use allocator=paged")

    def swap_out(self, seqs: Collection[Hashable]) -> list[BlockCopy]:
        """What is guaranteed is not taken away. Raises KvbenchError."""
        raise KvbenchError(f"{self._name()} does not swap; use allocator=paged")

    def can_swap_in(self, seqs: Collection[Hashable], keep: int = 0) -> bool:
        """Nothing was swapped out."""
        return not seqs

    def swap_in(self, seqs: Collection[Hashable]) -> list[BlockCopy]:
        """Nothing was swapped out. Raises KvbenchError."""
        raise KvbenchError(f"{self._name()} does not swap; use allocator=paged")

    def _name(self) -> str:
        return f"allocator={type(self).__module__.rpartition('.')[2]}"
