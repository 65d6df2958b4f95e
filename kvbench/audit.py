"""What sequences hold of a plug-in's pool, by the slots that it lists, and whether its other answers agree with that.

Placements of kvbench are not asked: the conformance suite has tested them, and what they answer is what they grant.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence as Seq
from typing import NamedTuple, NoReturn

from kvbench.allocators.base import Allocator, broken_protocol
from kvbench.core import Batch, Sequence, Usage


class Holding(NamedTuple):
    """What the streams of a request hold, a slot that several hold once; what is a shared prefix's is not theirs.

    Attributes:
        num_slots: how many.
        empty: the tokens that those slots are for which were empty at the last admission, by position, sorted.
        num_shared: tokens at the last look that a slot of another stream, or of the prefix, holds.
    """

    num_slots: int
    empty: Seq[int]
    num_shared: int

    def beyond(self, position: int) -> int:
        """Slots for tokens from a position on, none of which was there at the last admission."""
        return len(self.empty) - bisect_left(self.empty, position)


class Audit:
    """Asks an allocator for the slots of every sequence to which something happened.

    Args:
        allocator: it.

    Attributes:
        used: slots that are held.
        num_shared: tokens that share a slot with one that is counted.

    Raises:
        KvbenchError: from any method: what it answers cannot be true.
    """

    def __init__(self, allocator: Allocator) -> None:
        self.used = 0
        self.num_shared = 0
        self._allocator = allocator
        self._holdings: dict[Sequence, Holding] = {}
        self._prefixes: dict[int, frozenset[int]] = {}  # their slots, by length

    def add_prefix(self, prefix: Sequence) -> Holding:
        """A shared prefix is in the pool, for good."""
        self._check_grant(prefix)
        self._prefixes[prefix.length] = frozenset(self._allocator.slots(prefix))
        return self._keep(prefix, self._of_one(prefix, prefix.length))

    def look(self, seq: Sequence, batch: Batch, *, is_new: bool = False, is_grown: bool = False) -> Holding:
        """What a request holds in an iteration.

        Args:
            seq: its first stream.
            batch: of the iteration.
            is_new: it was admitted in it.
            is_grown: it was granted more room in it.
        """
        if is_new:
            self._check_grant(seq)
        num_tokens = batch.step - seq.origin
        room = 0
        if is_grown:
            if batch.gained < 1:
                self._refuse(f"append answered {batch.gained}, which is no room for a token")
            room = batch.gained - 1  # the token of this iteration is one of them
        alone = not (seq.siblings or seq.num_cached)
        return self._keep(seq, (self._of_one if alone else self._of_streams)(seq, num_tokens, room))

    def release(self, seq: Sequence) -> None:
        """A request holds nothing any more."""
        if (gone := self._holdings.pop(seq, None)) is not None:
            self.used -= gone.num_slots
            self.num_shared -= gone.num_shared

    def check(self, usage: Usage) -> None:
        """Hold its books against what it lists."""
        if usage.used != self.used:
            self._refuse(f"usage() says that {usage.used} slots are used, slots() lists {self.used} of its sequences")
        total = usage.used + usage.free + usage.cached + usage.pinned
        if total != self._allocator.num_slots or min(usage.free, usage.cached, usage.pinned) < 0:
            self._refuse(f"{usage} does not sum to the pool of {self._allocator.num_slots} slots")

    def _keep(self, seq: Sequence, holding: Holding) -> Holding:
        self.release(seq)
        self._holdings[seq] = holding
        self.used += holding.num_slots
        self.num_shared += holding.num_shared
        return holding

    def _of_one(self, seq: Sequence, num_tokens: int, room: int = 0) -> Holding:
        num_slots = len(self._allocator.slots(seq))
        if num_slots < num_tokens + room:
            self._lacks(num_slots, num_tokens, room)
        return Holding(num_slots, range(seq.length, max(seq.length, num_slots)), 0)

    def _of_streams(self, seq: Sequence, num_tokens: int, room: int = 0) -> Holding:
        positions: dict[int, int] = {}
        for stream in seq.streams:
            slots = self._allocator.slots(stream)
            if len(slots) < num_tokens + room:
                self._lacks(len(slots), num_tokens, room)
            for position, slot in enumerate(slots):
                positions.setdefault(slot, position)
        for slot in self._prefixes.get(seq.num_cached, ()):
            positions.pop(slot, None)
        own = sorted(positions.values())
        shared = seq.num_streams * num_tokens - bisect_left(own, num_tokens)
        return Holding(len(own), own[bisect_left(own, seq.length) :], shared)

    def _check_grant(self, seq: Sequence) -> None:
        if seq.granted < seq.requested:
            self._refuse(f"allocate was asked for {seq.requested} slots and answered {seq.granted}")
        if seq.granted > (listed := len(self._allocator.slots(seq))):
            self._refuse(f"allocate answered {seq.granted} slots, slots() lists {listed}")

    def _lacks(self, num_slots: int, num_tokens: int, room: int) -> NoReturn:
        promised = f" and was promised room for {room} more" if room else ""
        self._refuse(f"slots() lists {num_slots} slots of a sequence that has {num_tokens} tokens{promised}")

    def _refuse(self, said: str) -> NoReturn:
        raise broken_protocol(self._allocator, said)
