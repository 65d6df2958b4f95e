"""What the engine asks of a scheduler, and which corners of placement x reservation x scheduling exist."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Protocol

from kvbench.allocators.base import Ability, Allocator
from kvbench.core import Batch, KvbenchError, Sequence
from kvbench.reservation import Reservation


class Scheduler(Protocol):
    """Decides what the next iteration computes and when memory is given and taken."""

    allocator: Allocator
    reservation: Reservation
    waiting: deque[Sequence]
    """Sequences that hold no memory, in order of arrival; the engine appends new ones at the end."""
    swapped: deque[Sequence]
    """Sequences whose memory is in the host pool, in order of arrival."""
    running: dict[Sequence, None]
    """Sequences that hold memory, in service order."""
    step: int
    """How many iterations were committed."""
    uses_true_lengths: bool
    """Whether it looks at ``output_len``, which a real system does not know; recorded with every result."""

    def schedule(self) -> Batch:
        """Grow, preempt, admit; returns what to compute. An empty batch means nothing can run in this call."""
        ...

    def commit(self, finished: Seq[Sequence], parents: Mapping[Sequence, Seq[int]] | None = None) -> Seq[Sequence]:
        """The iteration is done; every running sequence has one token more.

        Args:
            finished: those for which it was the last.
            parents: which beams survived, see ``StepResult``.

        Returns:
            Those whose memory was released for good: the finished ones, or all where a batch ends together.
        """
        ...


class MissingCorner(KvbenchError):
    """A combination of choices that exist each, but not together."""


def check_corner(allocator: Allocator, reservation: Reservation) -> None:
    """Refuse a combination of placement and reservation that does not exist.

    Raises:
        MissingCorner: slabs with a reservation that does not fit them; growth where a grant cannot grow.
    """
    placement = type(allocator).__name__
    if Ability.ANY_SIZE not in allocator.abilities and not reservation.fits_slabs:
        raise MissingCorner(
            f"reservation={reservation.name} does not exist for {placement}, which grants slabs of one length: "
            "use reservation=max"
        )
    if reservation.grows and Ability.GROW not in allocator.abilities:
        raise MissingCorner(
            f"reservation={reservation.name} does not exist for {placement}, whose grants cannot grow: "
            "use reservation=max, pow2 or oracle, or allocator=paged"
        )


def check_at_least(name: str, value: float, limit: float) -> None:
    """Refuse a setting below its limit. Raises KvbenchError."""
    if not value >= limit:
        raise KvbenchError(f"scheduler.{name}={value} is below {limit}; give {limit} or more")
