"""An allocator under test, called through a shadow that knows what each call should have done."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from kvbench.allocators.base import Ability, AllocationError, Allocator
from kvbench.core import BlockCopy, Fit
from kvbench.testing.laws import Broken, Law

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


@dataclass(slots=True, eq=False)
class Tracked:
    """A live sequence as it should be.

    Attributes:
        key: its name to the allocator under test; ``twin`` to the second instance.
        family: equal for those that stem from one allocation through forks.
        tokens: what its slots must hold, a number that no other write has.
        room: tokens it may still write before it has to ask.
    """

    key: Key
    twin: Key
    family: int
    tokens: list[int]
    room: int


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


class Shadow:
    """One allocator, the memory its slots stand for, and two more instances to compare with.

    Every verb calls the allocator and then holds everything it can be asked against what the protocol promises.
    The *twin* is given the successful calls only, with other keys; the *empty* one is only asked, never filled.

    Args:
        build: makes a new allocator, the same every time.

    Raises:
        Broken: from any method: a law does not hold.
    """

    def __init__(self, build: Callable[[], Allocator]) -> None:
        self.calls: list[str] = []
        self.live: list[Tracked] = []
        self.subject = build()
        self._check_protocol()
        self.twin = build()
        self.empty = build()
        self.abilities = self.subject.abilities
        self.num_slots = self.subject.num_slots
        self.block_size = self.subject.block_size
        self.fresh = self.books()
        self._check_fresh()
        self._memory: dict[int, int] = {}  # slot -> the write it holds
        self._num_writes = 0
        self._num_keys = 0
        self._slab: int | None = None
        self.last_freed: Key | None = None
        self._not_now: dict[tuple[int, int], None] = {}  # (slots, keep) that were refused once

    # verbs -----------------------------------------------------------------------------------------------------------

    def allocate(self, length: int, slots: int) -> Tracked | None:
        """Grant a new sequence ``slots`` and write its first ``length`` tokens; None where it does not fit now."""
        key, twin = self._new_keys()
        text = f"allocate({key!r}, {slots})"
        fit = self.can_allocate(slots)
        largest = self.books().largest_free
        before = self._snapshot()
        try:
            granted = self.subject.allocate(key, slots)
        except AllocationError as error:
            self._note_shortage(text, error, slots - largest)
            self._unchanged(before, text)
            if fit is Fit.OK:
                self.broken(Law.FIT, f"can_allocate({slots}) answered OK, then {text} raised AllocationError")
            return None
        except Exception as error:
            self._unexpected(text, error)
        self.calls.append(f"{text} -> {granted}")
        if fit is not Fit.OK:
            self.broken(Law.FIT, f"can_allocate({slots}) answered {fit.name}, then {text} succeeded")
        seq = Tracked(key, twin, self._num_keys, [], granted)
        self._check_grant(seq, slots, granted)
        if slots > largest:
            self.broken(Law.LARGEST, f"{text} succeeded when largest_free was {largest}")
        self.live.append(seq)
        self._same(text, granted, lambda: self.twin.allocate(twin, slots))
        self.check()
        self.write(seq, length)
        return seq

    def write(self, seq: Tracked, count: int) -> None:
        """Write the next ``count`` tokens of a sequence, at most its room."""
        count = min(count, seq.room)
        if count < 1:
            return
        self._note_write(seq, count)
        others = {slot: other for other in self.live if other is not seq for slot in self.slots(other)}
        for slot in self.slots(seq)[len(seq.tokens) : len(seq.tokens) + count]:
            if slot in others:
                position, other = len(seq.tokens), others[slot].key
                self.broken(
                    Law.EXCLUSIVE, f"{seq.key!r} may write token {position} to slot {slot}, which {other!r} holds too"
                )
            self._num_writes += 1
            self._memory[slot] = self._num_writes
            seq.tokens.append(self._num_writes)
        seq.room -= count
        self._check_memory()

    def append(self, seqs: Sequence[Tracked]) -> bool:
        """Fill the room of all ``seqs`` and ask for more; False where it does not fit now. Needs GROW."""
        for seq in seqs:
            self.write(seq, seq.room)
        text = f"append([{', '.join(repr(seq.key) for seq in seqs)}])"
        can = self.can_append(len(seqs))
        before = self._snapshot()
        copies = [EARLIER]
        try:
            room = self.subject.append(dict.fromkeys(seq.key for seq in seqs), copies)
        except AllocationError as error:
            self._note_shortage(text, error, 1)
            self._unchanged(before, text, copies)
            if can:
                self.broken(Law.CAN_APPEND, f"can_append({len(seqs)}) was True, yet {text} raised AllocationError")
            return False
        except Exception as error:
            self._unexpected(text, error)
        kept, done = copies[:1], copies[1:]
        noted = "".join(f", copy {copy[2]} slots from {copy[0]} to {copy[1]}" for copy in done)
        self.calls.append(f"{text} -> {room}{noted}")
        if not _is_count(room):
            self.broken(Law.ROOM, f"{text} answered {room!r} instead of a number of tokens >= 1")
        if kept != [EARLIER]:
            self.broken(Law.COPIES, f"{text} removed work that was in the list of copies already")
        self._copy(done)
        for seq in seqs:
            seq.room = room
        more = [EARLIER]
        self._same(text, room, lambda: self.twin.append([seq.twin for seq in seqs], more))
        if more[1:] != done:
            self.broken(Law.DETERMINISM, f"{text} asked for the copies {done}, in a second instance for {more[1:]}")
        self.check()
        return True

    def fork(self, parent: Tracked) -> Tracked:
        """Let a new sequence share all tokens of ``parent``. Needs FORK."""
        length = len(parent.tokens)
        key, twin = self._new_keys()
        text = f"fork({parent.key!r}, {key!r}, {length})"
        used = self.books().used
        try:
            self.subject.fork(parent.key, key, length)
        except Exception as error:
            self._unexpected(text, error)
        self.calls.append(text)
        child = Tracked(key, twin, parent.family, parent.tokens.copy(), 0)
        parent.room = 0
        mine, theirs = self.slots(child)[:length], self.slots(parent)[:length]
        if mine != theirs:
            self.broken(Law.FORK, f"the first {length} slots of the child are {mine}, those of the parent {theirs}")
        if (now := self.books().used) != used:
            self.broken(Law.FORK, f"usage().used was {used} before the fork and is {now} after it")
        self.live.append(child)
        self._same(text, None, lambda: self.twin.fork(parent.twin, twin, length))
        self.check()
        return child

    def free(self, seq: Tracked) -> None:
        """Take everything back from a sequence."""
        text = f"free({seq.key!r})"
        try:
            self.subject.free(seq.key)
        except Exception as error:
            self._unexpected(text, error)
        self.calls.append(text)
        self.live.remove(seq)
        self.last_freed = seq.key
        self._same(text, None, lambda: self.twin.free(seq.twin))
        self.check()

    def step(self) -> None:
        """What a scheduler does: everybody writes a token; room for those who have none, preempting the newest."""
        due = [seq for seq in self.live if not seq.room]
        for seq in self.live:
            self.write(seq, 1)
        if Ability.GROW not in self.abilities:
            for seq in due:
                self.free(seq)
            return
        while due and not self.append(due):
            self.free(self.live[-1])
            due = [seq for seq in due if seq in self.live]

    # questions -------------------------------------------------------------------------------------------------------

    def probe(self, slots: int, keep: int) -> None:
        """Hold ``can_allocate(slots, keep)`` against what then happens; the grant is given back."""
        self._snapshot()
        answer = self.can_allocate(slots, keep)
        text = f"can_allocate({slots}, keep={keep})"
        self.calls.append(f"{text} -> {answer.name}")
        ever = self._ask(text, self.empty.can_allocate, slots, keep)
        if ever is Fit.LATER:
            self.broken(Law.FIT, f"{text} answers LATER in an empty pool, where nothing is left to be freed")
        if (answer is Fit.NEVER) != (ever is Fit.NEVER):
            self.broken(Law.FIT, f"{text} answers {answer.name} here and {ever.name} in an empty pool")
        before = self.books()
        granted = self.allocate(slots, slots)
        if granted is None:
            if answer is Fit.OK:
                self.broken(Law.FIT, f"{text} answered OK, but allocate raised AllocationError")
        else:
            left = self.books().free
            self.free(granted)
            if (answer is Fit.OK) != (left >= keep):
                self.broken(Law.FIT, f"{text} answered {answer.name}, but granting {slots} leaves {left} slots free")
            if (after := self.books()) != before:
                self.broken(Law.LEAK, f"granting {slots} and freeing them turned {before} into {after}")
        if answer is not Fit.OK:
            self._not_now[slots, keep] = None

    def probe_largest(self, keep: int) -> None:
        """``probe`` what is said to be the largest grant possible."""
        if largest := self.books().largest_free:
            self.probe(largest, keep)

    def refuse(self, mistake: Mistake) -> None:
        """Make a mistake; it must raise what it should and change nothing."""
        text = mistake.text
        before = self._snapshot()
        try:
            mistake.call()
        except mistake.raises as error:
            self.calls.append(f"{text} raises {type(error).__name__}")
        except Exception as error:
            expected = " or ".join(kind.__name__ for kind in mistake.raises)
            self.broken(mistake.law, f"{text} raised {error!r} instead of {expected}")
        else:
            self.broken(mistake.law, f"{text} was not refused")
        self._unchanged(before, text)

    def drain(self, order: Iterable[Tracked]) -> None:
        """Free everything in the given order; the pool must be as good as new."""
        for seq in list(order):
            self.free(seq)
        after = self.books()
        if after != self.fresh:
            self.broken(Law.LEAK, f"everything was freed: usage is {after}, in a new pool {self.fresh}")
        for slots, keep in self._not_now:
            answer = self.can_allocate(slots, keep)
            ever = self._ask("can_allocate", self.empty.can_allocate, slots, keep)
            if answer is not ever:
                text = f"can_allocate({slots}, keep={keep})"
                self.broken(Law.FIT, f"everything was freed: {text} answers {answer.name}, in a new pool {ever.name}")
        largest = self.allocate(self.fresh.largest_free, self.fresh.largest_free)
        if largest is None:
            self.broken(Law.LEAK, f"everything was freed, but {self.fresh.largest_free} slots do not fit any more")
        self.free(largest)

    # laws ------------------------------------------------------------------------------------------------------------

    def broken(self, law: Law, reason: str) -> NoReturn:
        """Raise ``Broken`` with the calls so far."""
        raise Broken(law, reason, self.calls)

    def check(self) -> None:
        """Everything that must hold at any time."""
        books = self.books()
        total = books.used + books.free + books.cached + books.pinned
        if total != self.num_slots or min(books) < 0:
            self.broken(Law.BOOKS, f"{books} sums to {total} in a pool of {self.num_slots} slots")
        holders = self._holders()
        if books.used != len(holders):
            self.broken(Law.BOOKS, f"usage().used is {books.used}, but sequences hold {len(holders)} different slots")
        self._check_memory()
        largest = books.largest_free
        if largest and (fit := self.can_allocate(largest)) is not Fit.OK:
            self.broken(Law.LARGEST, f"largest_free is {largest}, but can_allocate({largest}) answers {fit.name}")
        if self.can_allocate(largest + 1) is Fit.OK:
            self.broken(Law.LARGEST, f"largest_free is {largest}, but can_allocate({largest + 1}) answers OK")
        twin = self._books(self.twin)
        if twin != books:
            self._differs(f"usage is {books}", str(twin))

    def _holders(self) -> dict[int, tuple[Tracked, int]]:
        """A holder of every slot that is held, and the position of its token there."""
        holders: dict[int, tuple[Tracked, int]] = {}
        for seq in self.live:
            slots = self.slots(seq)
            if len(slots) < len(seq.tokens) + seq.room:
                self.broken(
                    Law.ROOM,
                    f"{seq.key!r} holds {len(seq.tokens)} tokens and was promised room for {seq.room} more, but has "
                    f"{len(slots)} slots",
                )
            if (twin := list(self.twin.slots(seq.twin))) != slots:
                self._differs(f"slots({seq.key!r}) are {slots}", str(twin))
            for position, slot in enumerate(slots):
                if not 0 <= slot < self.num_slots:
                    self.broken(Law.GRANT, f"slots({seq.key!r}) lists {slot} in a pool of {self.num_slots} slots")
                holder, where = holders.setdefault(slot, (seq, position))
                if holder is seq and where != position:
                    self.broken(Law.GRANT, f"slots({seq.key!r}) lists slot {slot} twice")
                if holder.family != seq.family or where != position:
                    self.broken(
                        Law.EXCLUSIVE,
                        f"slot {slot} is token {where} of {holder.key!r} and token {position} of {seq.key!r}",
                    )
        return holders

    def _check_memory(self) -> None:
        for seq in self.live:
            slots = self.slots(seq)
            read = [self._memory.get(slot) for slot in slots[: len(seq.tokens)]]
            if read != seq.tokens:
                position = next(i for i, token in enumerate(seq.tokens) if read[i : i + 1] != [token])
                self.broken(
                    Law.MEMORY,
                    f"token {position} of {seq.key!r} is lost: it is read from slot {slots[position]}, which "
                    f"{self._content(read[position])}",
                )

    def _content(self, write: int | None) -> str:
        if write is None:
            return "was never written"
        for seq in self.live:
            if write in seq.tokens:
                return f"holds token {seq.tokens.index(write)} of {seq.key!r}"
        return "holds a token of a sequence that is gone"

    def _check_protocol(self) -> None:
        subject = self.subject
        abilities = getattr(subject, "abilities", None)
        if not isinstance(abilities, Ability):
            self.broken(Law.PROTOCOL, f"abilities is {abilities!r}, not a kvbench.allocators.base.Ability")
        verbs = list(ALWAYS)
        if Ability.GROW in abilities:
            verbs += ["can_append", "append"]
        if Ability.FORK in abilities:
            verbs += ["fork"]
        if absent := [verb for verb in verbs if not callable(getattr(subject, verb, None))]:
            self.broken(Law.PROTOCOL, f"it has no method {', '.join(absent)}")
        for name in ("num_slots", "block_size"):
            value = getattr(subject, name, None)
            if not _is_count(value):
                self.broken(Law.PROTOCOL, f"{name} is {value!r}, not a number >= 1")

    def _check_fresh(self) -> None:
        fresh = self.fresh
        if fresh[:2] != (0, self.num_slots) or fresh[3:] != (0, 0) or not 1 <= fresh.largest_free <= self.num_slots:
            self.broken(Law.PROTOCOL, f"a new pool of {self.num_slots} slots reports {fresh}")

    def _check_grant(self, seq: Tracked, slots: int, granted: Any) -> None:
        if not _is_count(granted) or granted < slots:
            self.broken(Law.GRANT, f"{slots} slots were asked for, {granted} granted")
        if granted % self.block_size:
            self.broken(Law.GRANT, f"{granted} slots were granted, not a multiple of block_size={self.block_size}")
        if (listed := len(self.slots(seq))) != granted:
            self.broken(Law.GRANT, f"{granted} slots were granted, slots({seq.key!r}) lists {listed}")
        if Ability.ANY_SIZE not in self.abilities:
            self._slab = self._slab or granted
            if granted != self._slab:
                self.broken(
                    Law.GRANT, f"{self._slab} and {granted} slots were granted; without ANY_SIZE all are one size"
                )

    def _copy(self, copies: Sequence[BlockCopy]) -> None:
        """Do the copies of one call on the shadow memory."""
        read: set[int] = set()
        written: set[int] = set()
        for copy in copies:
            src, dst, num_slots = copy
            if num_slots < 1 or min(src, dst) < 0 or max(src, dst) + num_slots > self.num_slots:
                self.broken(Law.COPIES, f"{copy} leaves the pool of {self.num_slots} slots")
            target = set(range(dst, dst + num_slots))
            if target & written:
                self.broken(Law.COPIES, f"two copies of one call write to slot {min(target & written)}")
            read.update(range(src, src + num_slots))
            written |= target
        if read & written:
            self.broken(Law.COPIES, f"slot {min(read & written)} is read and written by the copies of one call")
        for src, dst, num_slots in copies:
            for offset in range(num_slots):
                if (write := self._memory.get(src + offset)) is not None:
                    self._memory[dst + offset] = write

    def _snapshot(self) -> dict[str, object]:
        """All that can be asked; asked twice, because asking must not change it."""
        first, second = self._answers(), self._answers()
        if difference := self._difference(first, second):
            self.broken(Law.PURE, f"asked twice in a row, {difference}")
        return first

    def _answers(self) -> dict[str, object]:
        books = self.books()
        answers: dict[str, object] = {"usage": books}
        for seq in self.live:
            answers[f"slots({seq.key!r})"] = self.slots(seq)
        size = self.block_size
        for slots in (1, size, 2 * size, books.largest_free, books.largest_free + 1):
            if slots:
                for keep in (0, size):
                    answers[f"can_allocate({slots}, keep={keep})"] = self.can_allocate(slots, keep)
        if Ability.GROW in self.abilities:
            for num_seqs in range(len(self.live) + 2):
                can = answers[f"can_append({num_seqs})"] = self.can_append(num_seqs)
                if can and not answers.get(f"can_append({num_seqs - 1})", True):
                    self.broken(Law.CAN_APPEND, f"can_append({num_seqs}) is True, can_append({num_seqs - 1}) False")
        return answers

    def _unchanged(self, before: dict[str, object], text: str, copies: Sequence[BlockCopy] = (EARLIER,)) -> None:
        if difference := self._difference(before, self._answers()):
            self.broken(Law.ATOMIC, f"{text} raised, yet {difference}")
        if list(copies) != [EARLIER]:
            self.broken(Law.ATOMIC, f"{text} raised, yet left {list(copies[1:])} in the list of copies")

    @staticmethod
    def _difference(before: dict[str, object], after: dict[str, object]) -> str:
        for question, answer in before.items():
            if after.get(question) != answer:
                return f"{question} was {_shown(answer)} and is {_shown(after.get(question))}"
        return ""

    def _same(self, text: str, expected: object, call: Callable[[], object]) -> None:
        """The twin must answer the same."""
        try:
            answer = call()
        except Exception as error:
            answer = error
        if answer != expected:
            self._differs(f"{text} answered {expected!r}", repr(answer))

    def _differs(self, here: str, there: str) -> NoReturn:
        self.broken(
            Law.DETERMINISM,
            f"{here}; in a second instance, which got the successful calls only and other keys: {there}",
        )

    # the allocator's answers -----------------------------------------------------------------------------------------

    def _ask(self, text: str, question: Callable[..., Any], *args: Any) -> Any:
        try:
            return question(*args)
        except Exception as error:
            self._unexpected(text, error)

    def can_allocate(self, slots: int, keep: int = 0) -> Fit:
        """The allocator's answer."""
        answer = self._ask(f"can_allocate({slots}, {keep})", self.subject.can_allocate, slots, keep)
        if not isinstance(answer, Fit):
            self.broken(Law.FIT, f"can_allocate({slots}, {keep}) answered {answer!r}, not a kvbench.core.Fit")
        return answer

    def can_append(self, num_seqs: int) -> bool:
        """The allocator's answer."""
        return bool(self._ask(f"can_append({num_seqs})", self.subject.can_append, num_seqs))

    def slots(self, seq: Tracked) -> list[int]:
        """The allocator's answer."""
        return list(self._ask(f"slots({seq.key!r})", self.subject.slots, seq.key))

    def books(self) -> Books:
        """The allocator's answer to ``usage()``."""
        return self._books(self.subject)

    def _books(self, allocator: Allocator) -> Books:
        usage = self._ask("usage()", allocator.usage)
        return Books(*(self._ask("usage()", getattr, usage, name) for name in Books._fields))

    def _note_shortage(self, text: str, error: AllocationError, at_least: int) -> None:
        self.calls.append(f"{text} raises AllocationError({error.shortage})")
        least = max(1, at_least)
        if not _is_count(error.shortage) or error.shortage < least:
            self.broken(Law.ERRORS, f"{text} says that {error.shortage} slots are missing, but it is at least {least}")

    def _unexpected(self, text: str, error: Exception) -> NoReturn:
        self.calls.append(f"{text} raises {type(error).__name__}")
        raise Broken(Law.ERRORS, f"{text} raised {error!r}", self.calls) from error

    def _note_write(self, seq: Tracked, count: int) -> None:
        """One line for what one sequence writes in a row."""
        total = count
        if self.calls and self.calls[-1].startswith("write ") and self.calls[-1].endswith(f" of {seq.key!r}"):
            total += int(self.calls.pop().split()[1])
        self.calls.append(f"write {total} token{'s' if total > 1 else ''} of {seq.key!r}")

    def _new_keys(self) -> tuple[Key, Key]:
        """A sequence's names; the two sort and hash in opposite orders."""
        number = self._num_keys
        self._num_keys += 1
        letters = chr(ord("A") + number % 26) + (str(number // 26) if number >= 26 else "")
        return Key(letters, number), Key(f"{letters}'", -2 - number)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and value >= 1


def _shown(answer: object) -> str:
    return answer.name if isinstance(answer, Fit) else str(answer)
