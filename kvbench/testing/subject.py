"""An allocator under test, asked with suspicion: every answer is checked for its kind, every call is noted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, NoReturn

from kvbench.allocators.base import Ability, AllocationError, Allocator
from kvbench.core import BlockCopy, Fit
from kvbench.testing.laws import Broken, Law, note_tried

ALWAYS = ("can_allocate", "allocate", "free", "slots", "usage")
EARLIER = BlockCopy(0, 0, 1)  # in the list before append is called; it must stay there


class Key:
    """A sequence as an allocator sees it: hashable, and nothing else."""

    __slots__ = ("_hash", "_name")

    def __init__(self, name: str, hash_value: int) -> None:
        self._name = name
        self._hash = hash_value

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return self._name


class Books(NamedTuple):
    """``Usage`` at one moment."""

    used: int
    free: int
    largest_free: int
    cached: int
    pinned: int
    shared: int
    swapped: int

    @property
    def total(self) -> int:
        """What must sum to the pool."""
        return self.used + self.free + self.cached + self.pinned


class Mistake(NamedTuple):
    """A call that must raise.

    Attributes:
        text: the call as a report shows it.
        law: broken if it does not raise.
        raises: what it may raise.
        call: makes it.
    """

    text: str
    law: Law
    raises: tuple[type[Exception], ...]
    call: Callable[[], object]

    @property
    def verb(self) -> str:
        """Which of the allocator's verbs it misuses."""
        return self.text.partition("(")[0]


class Subject:
    """One instance of the allocator.

    Args:
        allocator: the instance.
        calls: where calls that may change something are noted.

    Attributes:
        out: the groups of sequences that are swapped out.

    Raises:
        Broken: here and from any method: a law does not hold.
    """

    def __init__(self, allocator: Allocator, calls: list[str]) -> None:
        self.allocator = allocator
        self.calls = calls
        self.out: list[list[Key]] = []
        self._check_protocol()
        self.abilities = allocator.abilities
        self.num_slots = allocator.num_slots
        self.block_size = allocator.block_size
        self.host_slots = allocator.host_slots if Ability.SWAP in self.abilities else 0

    def broken(self, law: Law, reason: str) -> NoReturn:
        """Raise ``Broken`` with the calls so far."""
        raise Broken(law, reason, self.calls)

    def unexpected(self, text: str, error: Exception) -> NoReturn:
        """The call ``text`` raised what it must not."""
        self.calls.append(f"{text} raises {type(error).__name__}")
        raise Broken(Law.ERRORS, f"{text} raised {error!r}", self.calls) from error

    def can_allocate(self, slots: int, keep: int = 0, count: int = 1) -> Fit:
        """Its answer."""
        text = asked(slots, keep, count)
        several = (count,) if count > 1 else ()
        answer = self._ask(text, self.allocator.can_allocate, slots, keep, *several)
        if not isinstance(answer, Fit):
            self.broken(Law.FIT, f"{text} answers {answer!r}, not a kvbench.core.Fit")
        return answer

    def can_append(self, num_seqs: int) -> bool:
        """Its answer."""
        return bool(self._ask(f"can_append({num_seqs})", self.allocator.can_append, num_seqs))

    def can_swap_in(self, keys: Sequence[Key], keep: int = 0) -> bool:
        """Its answer."""
        return bool(self._ask(f"can_swap_in({keys}, keep={keep})", self.allocator.can_swap_in, keys, keep))

    def slots(self, key: Key) -> list[int]:
        """Its answer."""
        return list(self._ask(f"slots({key!r})", self.allocator.slots, key))

    def books(self) -> Books:
        """Its answer to ``usage()``."""
        usage = self._ask("usage()", self.allocator.usage)
        return Books(*(self._ask("usage()", getattr, usage, name) for name in Books._fields))

    def snapshot(self, keys: Iterable[Key]) -> dict[str, object]:
        """All that can be asked, asked twice, because asking must not change it."""
        keys = list(keys)
        first, second = self._answers(keys), self._answers(keys)
        if difference := _difference(first, second):
            self.broken(Law.PURE, f"asked twice in a row, {difference}")
        note_tried(Law.PURE)
        return first

    def refused(
        self, text: str, before: dict[str, object], keys: Iterable[Key], copies: Sequence[BlockCopy] = (EARLIER,)
    ) -> None:
        """The call ``text`` raised: all must be as in the snapshot taken before."""
        if difference := _difference(before, self._answers(keys)):
            self.broken(Law.ATOMIC, f"{text} raised, yet {difference}")
        if list(copies) != [EARLIER]:
            self.broken(Law.ATOMIC, f"{text} raised, yet left {list(copies[1:])} in the list of copies")
        note_tried(Law.ATOMIC)

    def note_shortage(self, text: str, error: AllocationError, least: int) -> None:
        """The call ``text`` says how many slots are missing, and it is at least ``least``."""
        self.calls.append(f"{text} raises AllocationError({error.shortage})")
        least = max(1, least)
        if not is_count(error.shortage) or error.shortage < least:
            self.broken(Law.ERRORS, f"{text} says that {error.shortage} slots are missing, but it is at least {least}")

    def refuse(self, mistake: Mistake, keys: Iterable[Key]) -> None:
        """Make a mistake; it must raise what it should and change nothing."""
        text = mistake.text
        keys = list(keys)
        before = self.snapshot(keys)
        try:
            mistake.call()
        except mistake.raises as error:
            self.calls.append(f"{text} raises {type(error).__name__}")
            note_tried(mistake.law)
        except Exception as error:
            expected = " or ".join(kind.__name__ for kind in mistake.raises)
            self.broken(mistake.law, f"{text} raised {error!r} instead of {expected}")
        else:
            self.broken(mistake.law, f"{text} was not refused")
        self.refused(text, before, keys)

    def _ask(self, text: str, question: Callable[..., Any], *args: Any) -> Any:
        try:
            return question(*args)
        except Exception as error:
            self.unexpected(text, error)

    def _answers(self, keys: Iterable[Key]) -> dict[str, object]:
        books = self.books()
        answers: dict[str, object] = {"usage": books}
        keys = list(keys)
        for key in keys:
            answers[f"slots({key!r})"] = self.slots(key)
        size = self.block_size
        for slots in (1, size, 2 * size, books.largest_free, books.largest_free + 1):
            for keep in (0, size) if slots else ():
                answers[asked(slots, keep)] = self.can_allocate(slots, keep)
        for keys_out in self.out:
            for keep in (0, size):
                answers[f"can_swap_in({keys_out}, keep={keep})"] = self.can_swap_in(keys_out, keep)
        if Ability.GROW in self.abilities:
            for num_seqs in range(len(keys) + 2):
                can = answers[f"can_append({num_seqs})"] = self.can_append(num_seqs)
                if can and not answers.get(f"can_append({num_seqs - 1})", True):
                    self.broken(Law.CAN_APPEND, f"can_append({num_seqs}) is True, can_append({num_seqs - 1}) False")
        return answers

    def _check_protocol(self) -> None:
        abilities = getattr(self.allocator, "abilities", None)
        if not isinstance(abilities, Ability):
            self.broken(Law.PROTOCOL, f"abilities is {abilities!r}, not a kvbench.allocators.base.Ability")
        verbs = list(ALWAYS)
        if Ability.GROW in abilities:
            verbs += ["can_append", "append"]
        if Ability.FORK in abilities:
            verbs += ["fork", "refork", "extend"]
        if Ability.SWAP in abilities:
            verbs += ["swap_out", "can_swap_in", "swap_in"]
        if absent := [verb for verb in verbs if not callable(getattr(self.allocator, verb, None))]:
            self.broken(Law.PROTOCOL, f"it has no method {', '.join(absent)}")
        for name in ("num_slots", "block_size", *(["host_slots"] if Ability.SWAP in abilities else [])):
            value = getattr(self.allocator, name, None)
            if not is_count(value):
                self.broken(Law.PROTOCOL, f"{name} is {value!r}, not a number >= 1")
        fresh, num_slots = self.books(), self.allocator.num_slots
        if fresh[:2] != (0, num_slots) or fresh[3:] != (0, 0, 0, 0) or not 1 <= fresh.largest_free <= num_slots:
            self.broken(Law.PROTOCOL, f"a new pool of {num_slots} slots reports {fresh}")
        note_tried(Law.PROTOCOL)
        if Ability.GROW | Ability.FORK | Ability.SWAP in abilities:
            note_tried(Law.ABILITIES)  # nothing is undeclared


def asked(slots: int, keep: int, count: int = 1) -> str:
    """The question as a report shows it."""
    return f"can_allocate({slots}, keep={keep}{f', count={count}' if count > 1 else ''})"


def is_count(value: object) -> bool:
    """Whether it is an integer, at least 1."""
    return isinstance(value, int) and value >= 1


def _difference(before: dict[str, object], after: dict[str, object]) -> str:
    for question, answer in before.items():
        if after.get(question) != answer:
            return f"{question} was {_shown(answer)} and is {_shown(after.get(question))}"
    return ""


def _shown(answer: object) -> str:
    return answer.name if isinstance(answer, Fit) else str(answer)
