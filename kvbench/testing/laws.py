"""What every allocator promises: the laws of the protocol in ``kvbench.allocators.base``, one name each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum

from kvbench.allocators.base import Ability


class Law(Enum):
    """A promise of the allocator protocol; the value says it in a sentence."""

    PROTOCOL = "it has the protocol's attributes and verbs, and a new pool is wholly free"
    GRANT = "a grant is at least what was asked for, in whole granules, and slots() lists it"
    MEMORY = "every token that was written is read back through slots()"
    EXCLUSIVE = "only fork lets two sequences hold a slot, and nobody writes to a shared one"
    BOOKS = "usage() sums to the pool, `used` is what slots() lists, counted once; `shared` and `swapped` are as exact"
    LARGEST = "largest_free is exactly the largest request that can be granted"
    FIT = "can_allocate: OK succeeds `count` times, LATER not before a free, NEVER not in a new pool; `keep` stays free"
    PURE = "asking changes nothing"
    ATOMIC = "a call that raises changes nothing"
    ERRORS = "a mistake or a shortage raises what the protocol says, and nothing else raises"
    ABILITIES = "what is not declared in `abilities` raises"
    LEAK = "what was freed can be granted again, in one piece where it was one"
    DETERMINISM = "the same calls give the same slots, whatever the sequences are called"
    ROOM = "append gives every sequence the room it answers"
    CAN_APPEND = "can_append: True means that append succeeds, for fewer sequences too"
    COPIES = "block copies stay within the pool and can be done in any order"
    FORK = "fork shares the parent's slots and takes none"
    EXTEND = "extend gives a sequence the slots it asks for in all, and it writes on where it was"
    PREFIX = "who begins with a shared prefix reads its whole granules in place and is granted no more than the rest"
    REFORK = "refork gives each sequence the tokens of its parent: what is full is shared, no free slot is taken"
    SWAP = "swap_out moves what nobody else holds, each slot once, swap_in brings it back, shared as it was"
    CAN_SWAP_IN = "can_swap_in: True exactly where swap_in succeeds and `keep` stays free"

    @property
    def needs(self) -> Ability:
        """The ability without which an allocator is not asked."""
        if self in (Law.ROOM, Law.CAN_APPEND, Law.COPIES):
            return Ability.GROW
        if self in (Law.SWAP, Law.CAN_SWAP_IN):
            return Ability.SWAP
        return Ability.FORK if self in (Law.FORK, Law.EXTEND, Law.PREFIX, Law.REFORK) else Ability.NONE


class Broken(AssertionError):
    """A law that did not hold.

    Attributes:
        law: which.
        reason: what was seen and what should have been, in one sentence.
        calls: what had been called until then, and what the calls answered.
    """

    def __init__(self, law: Law, reason: str, calls: Sequence[str]) -> None:
        self.law = law
        self.reason = reason
        self.calls = tuple(calls)
        super().__init__("\n".join([f"{law.name.lower()}: {reason}", *numbered(self.calls)]))


def numbered(calls: Sequence[str], most: int = 40) -> list[str]:
    """Lines ``1. call``; of more than ``most`` calls the last."""
    skipped = max(0, len(calls) - most)
    lines = [f"  ... {skipped} calls before"] if skipped else []
    return lines + [f"{number:4}. {call}" for number, call in enumerate(calls[skipped:], skipped + 1)]


_tried: ContextVar[set[Law] | None] = ContextVar("tried", default=None)


@contextmanager
def noting_tried() -> Iterator[set[Law]]:
    """Collect the laws that runs try until the context ends."""
    tried: set[Law] = set()
    token = _tried.set(tried)
    try:
        yield tried
    finally:
        _tried.reset(token)


def note_tried(*laws: Law) -> None:
    """These laws could have been broken by what was called, and were not."""
    if (tried := _tried.get()) is not None:
        tried.update(laws)
