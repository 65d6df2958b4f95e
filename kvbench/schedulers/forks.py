"""Streams that go on from one another: parallel samples after their prompt, beams after a step of their search."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from kvbench.allocators.base import Ability, Allocator
from kvbench.core import BlockCopy, Sequence
from kvbench.schedulers.calendar import Cohort

Fork = tuple[Sequence, Sequence]
"""Parent and child."""


class Forks:
    """Forks from one step to the next, in which parent and child part: each of them writes a token of its own.

    Streams that share slots copy, before they write, the block that both would write to; the allocator does when it is
    asked for room. Where it does not share, a fork copies everything that the parent was granted.

    Args:
        allocator: whose slots they are.
        shares: whether streams share slots.

    Attributes:
        shares: as given.
        pending: forks that have not parted, by the first stream of their request.
        parents: searches in which beams were dropped in the last step, by their first stream: beam ``i`` goes on from
            what was beam ``parents[i]``.
    """

    def __init__(self, allocator: Allocator, shares: bool) -> None:
        self.shares = shares
        self.pending: dict[Sequence, list[Fork]] = {}
        self.parents: dict[Sequence, Seq[int]] = {}
        self._allocator = allocator
        self._grants: dict[Sequence, tuple[int, int]] = {}  # of streams that were copied: first slot and length

    def add_samples(self, seq: Sequence) -> None:
        """The siblings of a request go on from the prompt that its first stream holds."""
        self.pending[seq] = [(seq, sibling) for sibling in seq.siblings]

    def add_beams(self, parents: dict[Sequence, Seq[int]]) -> None:
        """Beams were dropped; their places are filled before the next step."""
        if self.shares:
            self.parents = parents
        else:
            self.pending.update((seq, _pairs(seq, beams)) for seq, beams in parents.items())

    def move_beams(self, cohort: Cohort, widest: int, step: int, copies: list[BlockCopy]) -> None:
        """Fill the places of dropped beams; the newest token of each beam is not in the cache yet.

        Where so much room is free that nobody can be preempted, in one call for each search. Where it is not, what the
        dropped beams held must count as free: they are freed and forked anew, and copy when their turn comes.

        Args:
            cohort: requests for which room will be made in this step.
            widest: most streams that a request has.
            step: that is about to be computed.
            copies: what the runner has to do; added to.
        """
        allocator, pending = self._allocator, self.pending
        parents, self.parents = self.parents, {}
        room = (len(cohort) + 1) * widest + sum(map(len, pending.values()))
        if pending.keys().isdisjoint(parents) and allocator.can_append(room):
            for seq, beams in parents.items():
                allocator.refork(seq.streams, beams, step - seq.origin - 1, copies)
            return
        forks = {seq: _pairs(seq, beams) for seq, beams in parents.items()}
        for pairs in forks.values():
            for _, child in pairs:
                allocator.free(child)
        for seq, pairs in forks.items():
            cached = step - seq.origin - 1
            for parent, child in pairs:
                allocator.fork(parent, child, cached)
            if seq not in cohort:  # else there will be new room for everyone
                pending[seq] = [*pending.get(seq, ()), *pairs]

    def part(self, seq: Sequence, is_due: bool, copies: list[BlockCopy]) -> int:
        """Copy what the streams of a request, which has forks, must not share when they write.

        Args:
            seq: its first stream.
            is_due: room is made for all its streams in this step; where they share, that copies as well.
            copies: what the runner has to do; added to.

        Returns:
            Tokens that those which parted can write before they ask for room; 0 where none was asked for.
        """
        pairs = self.pending.pop(seq)
        if not self.shares:
            self._copy(pairs, copies)
        elif pairs and not is_due:
            return self._allocator.append(dict.fromkeys(stream for pair in pairs for stream in pair), copies)
        return 0

    def part_all(self, copies: list[BlockCopy]) -> None:
        """The same for all requests, where streams do not share."""
        for pairs in self.pending.values():
            self._copy(pairs, copies)
        self.pending.clear()

    def forget(self, seq: Sequence) -> None:
        """A request lost its memory."""
        self.pending.pop(seq, None)
        if self._grants:
            for stream in seq.streams:
                self._grants.pop(stream, None)

    def _copy(self, pairs: list[Fork], copies: list[BlockCopy]) -> None:
        """Copy all that each parent was granted, piece by piece where it lies in pieces."""
        allocator = self._allocator
        if Ability.GROW not in allocator.abilities:  # it lies in one piece, and stays where it is
            copies += [BlockCopy(self._grant(parent)[0], *self._grant(child)) for parent, child in pairs]
            return
        size = allocator.block_size
        for parent, child in pairs:
            sources, targets = allocator.slots(parent), allocator.slots(child)
            both = min(len(sources), len(targets))  # one may hold more than was asked for
            copies += [BlockCopy(sources[i], targets[i], min(size, both - i)) for i in range(0, both, size)]

    def _grant(self, stream: Sequence) -> tuple[int, int]:
        """First slot and length of a contiguous grant."""
        grant = self._grants.get(stream)
        if grant is None:
            slots = self._allocator.slots(stream)
            grant = self._grants[stream] = slots[0], len(slots)
        return grant


def _pairs(seq: Sequence, parents: Seq[int]) -> list[Fork]:
    """The forks of a search: one for each beam that does not go on from itself."""
    streams = seq.streams
    return [(streams[parent], streams[i]) for i, parent in enumerate(parents) if parent != i]
