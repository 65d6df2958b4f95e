"""An allocator under test, called through a shadow that knows what each call should have done."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from kvbench.allocators.base import Ability, AllocationError, Allocator
from kvbench.core import BlockCopy, Fit
from kvbench.testing.laws import Law, note_tried
from kvbench.testing.subject import EARLIER, Key, Subject, asked, is_count


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


@dataclass(slots=True, eq=False)
class Group:
    """Sequences that were swapped out together.

    Attributes:
        seqs: those of them that were not freed since.
        where: for each the slots of its tokens as they are now: of the pool where others held them too, else ``~slot``
            of the host pool.
    """

    seqs: list[Tracked]
    where: dict[Tracked, list[int]]

    @property
    def keys(self) -> list[Key]:
        """As the allocator under test knows them."""
        return [seq.key for seq in self.seqs]

    @property
    def twins(self) -> list[Key]:
        """As the twin does."""
        return [seq.twin for seq in self.seqs]

    def hosted(self) -> set[int]:
        """The slots of the host pool that they hold."""
        return {~slot for seq in self.seqs for slot in self.where[seq] if slot < 0}


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
        self.out: list[Group] = []
        self.freed: list[tuple[Key, Key]] = []  # keys, to the allocator and to the twin, the newest last
        self.subject = Subject(build(), self.calls)
        self.twin = Subject(build(), self.calls)
        self.empty = Subject(build(), self.calls)
        self.fresh = self.subject.books()
        self._memory: dict[int, int] = {}  # slot -> the write it holds
        self._host: dict[int, int] = {}  # the same of the host pool
        self._num_writes = 0
        self._num_keys = 0
        self._num_families = 0
        self._slab: int | None = None
        self._not_now: dict[tuple[int, int, int], None] = {}  # (slots, keep, count) that were refused once

    def keys(self) -> list[Key]:
        """The live sequences as the allocator under test knows them."""
        return [seq.key for seq in self.live]

    # verbs -----------------------------------------------------------------------------------------------------------

    def allocate(self, length: int, slots: int, again: bool = False) -> Tracked | None:
        """Grant a new sequence ``slots`` and write its first ``length`` tokens; None where it does not fit now.

        ``again`` gives it the key of the one freed last, as when a preempted sequence returns.
        """
        key, twin = self.freed[-1] if again and self.freed else self._new_keys()
        text = f"allocate({key!r}, {slots})"
        fit = self.subject.can_allocate(slots)
        largest = self.subject.books().largest_free
        before = self.subject.snapshot(self.keys())
        try:
            granted = self.subject.allocator.allocate(key, slots)
        except AllocationError as error:
            self.subject.note_shortage(text, error, slots - largest)
            self.subject.refused(text, before, self.keys())
            if fit is Fit.OK:
                self.subject.broken(Law.FIT, f"can_allocate({slots}) answered OK, then {text} raised AllocationError")
            return None
        except Exception as error:
            self.subject.unexpected(text, error)
        self.calls.append(f"{text} -> {granted}")
        if fit is not Fit.OK:
            self.subject.broken(Law.FIT, f"can_allocate({slots}) answered {fit.name}, then {text} succeeded")
        if (key, twin) in self.freed:
            self.freed.remove((key, twin))
        self._num_families += 1
        seq = Tracked(key, twin, self._num_families, [], granted)
        self._check_grant(seq, slots, granted)
        if slots > largest:
            self.subject.broken(Law.LARGEST, f"{text} succeeded when largest_free was {largest}")
        self.live.append(seq)
        self._same(text, granted, lambda: self.twin.allocator.allocate(twin, slots))
        self.check(Law.GRANT)
        self.write(seq, length)
        return seq

    def write(self, seq: Tracked, count: int) -> None:
        """Write the next ``count`` tokens of a sequence, at most its room."""
        count = min(count, seq.room)
        if count < 1:
            return
        self._note_write(seq, count)
        others = {slot: other for other in self.live if other is not seq for slot in self.subject.slots(other.key)}
        others |= {slot: other for group in self.out for other in group.seqs for slot in group.where[other]}
        for slot in self.subject.slots(seq.key)[len(seq.tokens) : len(seq.tokens) + count]:
            if slot in others:
                position, other = len(seq.tokens), others[slot].key
                self.subject.broken(
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
        can = self.subject.can_append(len(seqs))
        before = self.subject.snapshot(self.keys())
        copies = [EARLIER]
        try:
            room = self.subject.allocator.append(dict.fromkeys(seq.key for seq in seqs), copies)
        except AllocationError as error:
            self.subject.note_shortage(text, error, 1)
            self.subject.refused(text, before, self.keys(), copies)
            if can:
                self.subject.broken(
                    Law.CAN_APPEND, f"can_append({len(seqs)}) was True, yet {text} raised AllocationError"
                )
            return False
        except Exception as error:
            self.subject.unexpected(text, error)
        done = self._note_copies(text, room, copies)
        if not is_count(room):
            self.subject.broken(Law.ROOM, f"{text} answered {room!r} instead of a number of tokens >= 1")
        self._copy(done)
        for seq in seqs:
            seq.room = room
        more = [EARLIER]
        self._same(text, room, lambda: self.twin.allocator.append([seq.twin for seq in seqs], more))
        self._same_copies(text, done, more[1:])
        self.check(Law.ROOM, Law.CAN_APPEND, Law.COPIES)
        return True

    def fork(self, parent: Tracked) -> Tracked:
        """Let a new sequence share all tokens of ``parent``. Needs FORK."""
        length = len(parent.tokens)
        key, twin = self._new_keys()
        text = f"fork({parent.key!r}, {key!r}, {length})"
        used = self.subject.books().used
        try:
            self.subject.allocator.fork(parent.key, key, length)
        except Exception as error:
            self.subject.unexpected(text, error)
        self.calls.append(text)
        child = Tracked(key, twin, parent.family, parent.tokens.copy(), 0)
        parent.room = 0
        mine, theirs = self.subject.slots(child.key)[:length], self.subject.slots(parent.key)[:length]
        if mine != theirs:
            self.subject.broken(
                Law.FORK, f"the first {length} slots of the child are {mine}, those of the parent {theirs}"
            )
        if (now := self.subject.books().used) != used:
            self.subject.broken(Law.FORK, f"usage().used was {used} before the fork and is {now} after it")
        self.live.append(child)
        self._same(text, None, lambda: self.twin.allocator.fork(parent.twin, twin, length))
        self.check(Law.FORK)
        return child

    def extend(self, seq: Tracked, slots: int) -> bool:
        """Grant a sequence without room ``slots`` in all, more than its tokens; False where it does not fit now."""
        text = f"extend({seq.key!r}, {slots})"
        ample = self.subject.books().largest_free >= slots + self.subject.block_size
        before = self.subject.snapshot(self.keys())
        copies = [EARLIER]
        try:
            granted = self.subject.allocator.extend(seq.key, slots, copies)
        except AllocationError as error:
            self.subject.note_shortage(text, error, 1)
            self.subject.refused(text, before, self.keys(), copies)
            if ample:
                self.subject.broken(Law.EXTEND, f"{text} raised AllocationError, though all of it would fit once more")
            return False
        except Exception as error:
            self.subject.unexpected(text, error)
        done = self._note_copies(text, granted, copies)
        listed = len(self.subject.slots(seq.key))
        if not is_count(granted) or granted < slots or granted != listed:
            self.subject.broken(Law.EXTEND, f"{text} answered {granted}, slots({seq.key!r}) lists {listed}")
        self._copy(done)
        seq.room = granted - len(seq.tokens)
        more = [EARLIER]
        self._same(text, granted, lambda: self.twin.allocator.extend(seq.twin, slots, more))
        self._same_copies(text, done, more[1:])
        self.check(Law.EXTEND)
        return True

    def begin_with(self, prefix: Tracked, slots: int) -> Tracked | None:
        """A new sequence that begins with ``prefix`` and is granted ``slots`` in all, more than the prefix has tokens.

        None where it does not fit now. Needs FORK.
        """
        size, length = self.subject.block_size, len(prefix.tokens)
        whole = length // size * size
        fits = self.subject.can_allocate(slots - whole) is Fit.OK
        there, used = self.subject.slots(prefix.key), self.subject.books().used
        child = self.fork(prefix)
        extended = self.extend(child, slots)
        text = f"{child.key!r}, which begins with the {length} tokens of {prefix.key!r} and asked for {slots} slots,"
        if not extended:
            if fits:
                self.subject.broken(Law.PREFIX, f"{text} was refused, though {slots - whole} slots could be granted")
            self.free(child)
            return None
        if (mine := self.subject.slots(child.key)[:whole]) != there[:whole]:
            self.subject.broken(Law.PREFIX, f"{text} reads from {mine} instead of {there[:whole]}")
        most = -(-(slots - whole) // size) * size
        if (grown := self.subject.books().used - used) > most:
            self.subject.broken(Law.PREFIX, f"{text} took {grown} slots instead of {most} at most")
        if (now := self.subject.slots(prefix.key)) != there:
            self.subject.broken(Law.PREFIX, f"{text} turned slots({prefix.key!r}) from {there} into {now}")
        note_tried(Law.PREFIX)
        return child

    def refork(self, seqs: Sequence[Tracked], parents: Sequence[int]) -> None:
        """Let sequence ``i`` go on from what was ``parents[i]``; see ``can_refork``. Needs FORK."""
        length, size = len(seqs[0].tokens), self.subject.block_size
        keys = [seq.key for seq in seqs]
        text = f"refork({keys}, {list(parents)}, {length})"
        before, used = [self.subject.slots(key) for key in keys], self.subject.books().used
        copies = [EARLIER]
        try:
            self.subject.allocator.refork(keys, parents, length, copies)
        except Exception as error:
            self.subject.unexpected(text, error)
        done = self._note_copies(text, None, copies)
        self._copy(done)
        tokens = [seq.tokens for seq in seqs]
        for i, (seq, parent) in enumerate(zip(seqs, parents, strict=True)):
            seq.tokens = tokens[parent].copy()
            whole, now = length // size * size, self.subject.slots(seq.key)
            if now[:whole] != before[parent][:whole] or now[whole:] != before[i][whole:]:
                expected = before[parent][:whole] + before[i][whole:]
                self.subject.broken(Law.REFORK, f"after {text} slots({seq.key!r}) are {now} instead of {expected}")
        if (grown := self.subject.books().used - used) > 0:
            self.subject.broken(Law.REFORK, f"{text} took {grown} slots")
        more = [EARLIER]
        self._same(text, None, lambda: self.twin.allocator.refork([seq.twin for seq in seqs], parents, length, more))
        self._same_copies(text, done, more[1:])
        self.check(Law.REFORK)

    def can_refork(self, seq: Tracked) -> list[Tracked]:
        """The sequences that may be reforked with this one: as long, each with its own last granule or a full one."""
        length, size = len(seq.tokens), self.subject.block_size
        family = [other for other in self.live if other.family == seq.family and len(other.tokens) == length]
        if not length % size:
            return family
        lasts = [self.subject.slots(other.key)[length - 1] for other in self.live if len(other.tokens) >= length]
        lasts += [
            group.where[other][length - 1] for group in self.out for other in group.seqs if len(other.tokens) >= length
        ]
        return [other for other in family if lasts.count(self.subject.slots(other.key)[length - 1]) == 1]

    def swap_out(self, seqs: Sequence[Tracked]) -> Group | None:
        """Move sequences to the host pool together; None where that is too full. Needs SWAP."""
        keys = [seq.key for seq in seqs]
        text = f"swap_out({keys})"
        before = self.subject.snapshot(self.keys())
        slots = {seq: self.subject.slots(seq.key) for seq in seqs}
        stays = {slot for seq in self.live if seq not in slots for slot in self.subject.slots(seq.key)}
        stays |= {slot for group in self.out for seq in group.seqs for slot in group.where[seq] if slot >= 0}
        leaves = {slot for listed in slots.values() for slot in listed} - stays
        room = self.subject.host_slots // self.subject.block_size * self.subject.block_size - len(self._hosted())
        try:
            moves = list(self.subject.allocator.swap_out(keys))
        except AllocationError as error:
            self.subject.note_shortage(text, error, len(leaves) - room)
            self.subject.refused(text, before, self.keys())
            if len(leaves) <= room:
                self.subject.broken(Law.SWAP, f"{text} raised, though {room} slots of the host pool are free")
            return None
        except Exception as error:
            self.subject.unexpected(text, error)
        self._note_moves(text, moves)
        where = self._moved(text, moves, leaves, self._hosted(), self.subject.host_slots)
        for slot, target in where.items():
            if slot in self._memory:
                self._host[target] = self._memory.pop(slot)
        group = Group(
            list(seqs), {seq: [~where[slot] if slot in where else slot for slot in slots[seq]] for seq in seqs}
        )
        self.live = [seq for seq in self.live if seq not in slots]
        self._same(text, moves, lambda: list(self.twin.allocator.swap_out(group.twins)))
        self._set_out([*self.out, group])
        for seq in self.live:
            if (now := self.subject.slots(seq.key)) != (listed := before[f"slots({seq.key!r})"]):
                self.subject.broken(Law.SWAP, f"{text} turned slots({seq.key!r}) from {listed} into {now}")
        self.check(Law.SWAP)
        return group

    def swap_in(self, group: Group, keep: int = 0) -> bool:
        """Move them back, and hold ``can_swap_in`` against that; False where they do not fit now."""
        text = f"swap_in({group.keys})"
        before = self.subject.snapshot(self.keys())
        can, can_keep = self.subject.can_swap_in(group.keys), self.subject.can_swap_in(group.keys, keep)
        held = self._holders()
        try:
            moves = list(self.subject.allocator.swap_in(group.keys))
        except AllocationError as error:
            self.subject.note_shortage(text, error, 1)
            self.subject.refused(text, before, self.keys())
            if can or can_keep:
                self.subject.broken(Law.CAN_SWAP_IN, f"can_swap_in({group.keys}) was True, yet {text} raised")
            return False
        except Exception as error:
            self.subject.unexpected(text, error)
        self._note_moves(text, moves)
        where = self._moved(text, moves, group.hosted(), set(held), self.subject.num_slots)
        for slot, target in where.items():
            if slot in self._host:
                self._memory[target] = self._host.pop(slot)
        for seq in group.seqs:
            expected = [where[~slot] if slot < 0 else slot for slot in group.where[seq]]
            if (now := self.subject.slots(seq.key)) != expected:
                self.subject.broken(Law.SWAP, f"after {text} slots({seq.key!r}) are {now} instead of {expected}")
        self.live += group.seqs
        self._same(text, moves, lambda: list(self.twin.allocator.swap_in(group.twins)))
        self._set_out([other for other in self.out if other is not group])
        left = self.subject.books().free
        if not can or can_keep != (left >= keep):
            question = f"can_swap_in({group.keys}, keep={keep})"
            self.subject.broken(
                Law.CAN_SWAP_IN, f"{question} was {can_keep}, with keep=0 {can}; {text} left {left} slots free"
            )
        self.check(Law.CAN_SWAP_IN)
        return True

    def free_out(self, group: Group, seq: Tracked) -> None:
        """Take everything back from a sequence that is swapped out."""
        text = f"free({seq.key!r})"
        before = group.hosted()
        try:
            self.subject.allocator.free(seq.key)
        except Exception as error:
            self.subject.unexpected(text, error)
        self.calls.append(text)
        group.seqs.remove(seq)
        for slot in before - group.hosted():
            self._host.pop(slot, None)
        self.freed.append((seq.key, seq.twin))
        self._same(text, None, lambda: self.twin.allocator.free(seq.twin))
        self._set_out([other for other in self.out if other.seqs])
        self.check()

    def free(self, seq: Tracked) -> None:
        """Take everything back from a sequence."""
        text = f"free({seq.key!r})"
        try:
            self.subject.allocator.free(seq.key)
        except Exception as error:
            self.subject.unexpected(text, error)
        self.calls.append(text)
        self.live.remove(seq)
        self.freed.append((seq.key, seq.twin))
        self._same(text, None, lambda: self.twin.allocator.free(seq.twin))
        self.check()

    def readmit(self, seq: Tracked) -> None:
        """Preempt a sequence and let it return, which computes its tokens again and asks for more room."""
        length = len(seq.tokens)
        self.free(seq)
        back = self.allocate(length, length, again=True)
        if back and Ability.GROW in self.subject.abilities:
            self.append([back])

    def step(self) -> None:
        """What a scheduler does: everybody writes a token; room for those who have none, preempting the newest."""
        due = [seq for seq in self.live if not seq.room]
        for seq in self.live:
            self.write(seq, 1)
        if Ability.GROW not in self.subject.abilities:
            for seq in due:
                self.free(seq)
            return
        while due and not self.append(due):
            self.free(self.live[-1])
            due = [seq for seq in due if seq in self.live]

    # questions -------------------------------------------------------------------------------------------------------

    def probe(self, slots: int, keep: int, count: int = 1) -> None:
        """Hold ``can_allocate(slots, keep, count)`` against what then happens; what was granted is given back."""
        self.subject.snapshot(self.keys())
        answer = self.subject.can_allocate(slots, keep, count)
        text = asked(slots, keep, count)
        self.calls.append(f"{text} -> {answer.name}")
        ever = self.empty.can_allocate(slots, keep, count)
        if ever is Fit.LATER:
            self.subject.broken(Law.FIT, f"{text} answers LATER in an empty pool, where nothing is left to be freed")
        if (answer is Fit.NEVER) != (ever is Fit.NEVER):
            self.subject.broken(Law.FIT, f"{text} answers {answer.name} here and {ever.name} in an empty pool")
        before = self.subject.books()
        granted: list[Tracked] = []
        while len(granted) < count and (seq := self.allocate(slots, slots)):
            granted.append(seq)
        left = self.subject.books().free
        for seq in reversed(granted):
            self.free(seq)
        if len(granted) < count:
            if answer is Fit.OK:
                self.subject.broken(
                    Law.FIT, f"{text} answered OK, but allocate raised AllocationError after {len(granted)} grants"
                )
        elif (answer is Fit.OK) != (left >= keep):
            self.subject.broken(
                Law.FIT, f"{text} answered {answer.name}, but granting {slots} {count} times leaves {left} slots free"
            )
        if (after := self.subject.books()) != before:
            self.subject.broken(Law.LEAK, f"granting {slots} and freeing them turned {before} into {after}")
        if answer is not Fit.OK:
            self._not_now[slots, keep, count] = None
        note_tried(Law.FIT)

    def probe_largest(self, keep: int) -> None:
        """``probe`` what is said to be the largest grant possible."""
        if largest := self.subject.books().largest_free:
            self.probe(largest, keep)

    def drain(self, order: Iterable[Tracked]) -> None:
        """Free everything in the given order; the pool must be as good as new."""
        for seq in list(order):
            self.free(seq)
        for group in self.out.copy():
            for seq in group.seqs.copy():
                self.free_out(group, seq)
        after = self.subject.books()
        if after != self.fresh:
            self.subject.broken(Law.LEAK, f"everything was freed: usage is {after}, in a new pool {self.fresh}")
        for slots, keep, count in self._not_now:
            answer = self.subject.can_allocate(slots, keep, count)
            ever = self.empty.can_allocate(slots, keep, count)
            if answer is not ever:
                text = asked(slots, keep, count)
                self.subject.broken(
                    Law.FIT, f"everything was freed: {text} answers {answer.name}, in a new pool {ever.name}"
                )
        largest = self.allocate(self.fresh.largest_free, self.fresh.largest_free)
        if largest is None:
            self.subject.broken(
                Law.LEAK, f"everything was freed, but {self.fresh.largest_free} slots do not fit any more"
            )
        self.free(largest)
        if self._num_keys > 1:
            note_tried(Law.LEAK)

    # laws ------------------------------------------------------------------------------------------------------------

    def check(self, *tried: Law) -> None:
        """Everything that must hold at any time; a call that could have broken these laws did not."""
        books = self.subject.books()
        if books.total != self.subject.num_slots or min(books) < 0:
            self.subject.broken(Law.BOOKS, f"{books} sums to {books.total} in a pool of {self.subject.num_slots} slots")
        holders = self._holders()
        if books.used != len(holders):
            self.subject.broken(
                Law.BOOKS, f"usage().used is {books.used}, but sequences hold {len(holders)} different slots"
            )
        held = sum(len(self.subject.slots(seq.key)) for seq in self.live)
        held += sum(slot >= 0 for group in self.out for seq in group.seqs for slot in group.where[seq])
        if books.shared != held - len(holders):
            self.subject.broken(
                Law.BOOKS,
                f"usage().shared is {books.shared}, but sequences hold {held} slots, {len(holders)} different ones",
            )
        if books.swapped != (swapped := len(self._hosted())):
            self.subject.broken(Law.BOOKS, f"usage().swapped is {books.swapped}, but {swapped} slots are out")
        self._check_memory()
        largest = books.largest_free
        if largest and (fit := self.subject.can_allocate(largest)) is not Fit.OK:
            self.subject.broken(
                Law.LARGEST, f"largest_free is {largest}, but can_allocate({largest}) answers {fit.name}"
            )
        if self.subject.can_allocate(largest + 1) is Fit.OK:
            self.subject.broken(Law.LARGEST, f"largest_free is {largest}, but can_allocate({largest + 1}) answers OK")
        twin = self.twin.books()
        if twin != books:
            self._differs(f"usage is {books}", str(twin))
        note_tried(*tried)
        if self.live:
            note_tried(Law.BOOKS, Law.LARGEST, Law.DETERMINISM)
        if sum(bool(seq.tokens) for seq in self.live) > 1:
            note_tried(Law.EXCLUSIVE, Law.MEMORY)

    def _holders(self) -> dict[int, tuple[Tracked, int]]:
        """A holder of every slot that is held, and the position of its token there."""
        holders: dict[int, tuple[Tracked, int]] = {}
        for seq in self.live:
            slots = self.subject.slots(seq.key)
            if len(slots) < len(seq.tokens) + seq.room:
                self.subject.broken(
                    Law.ROOM,
                    f"{seq.key!r} holds {len(seq.tokens)} tokens and was promised room for {seq.room} more, but has "
                    f"{len(slots)} slots",
                )
            if (twin := self.twin.slots(seq.twin)) != slots:
                self._differs(f"slots({seq.key!r}) are {slots}", str(twin))
            for position, slot in enumerate(slots):
                if not 0 <= slot < self.subject.num_slots:
                    self.subject.broken(
                        Law.GRANT, f"slots({seq.key!r}) lists {slot} in a pool of {self.subject.num_slots} slots"
                    )
                self._hold(holders, seq, position, slot)
        for group in self.out:
            for seq in group.seqs:
                for position, slot in enumerate(group.where[seq]):
                    if slot >= 0:
                        self._hold(holders, seq, position, slot)
        return holders

    def _hold(self, holders: dict[int, tuple[Tracked, int]], seq: Tracked, position: int, slot: int) -> None:
        holder, where = holders.setdefault(slot, (seq, position))
        if holder is seq and where != position:
            self.subject.broken(Law.GRANT, f"slots({seq.key!r}) lists slot {slot} twice")
        if holder.family != seq.family or where != position:
            self.subject.broken(
                Law.EXCLUSIVE, f"slot {slot} is token {where} of {holder.key!r} and token {position} of {seq.key!r}"
            )

    def _hosted(self) -> set[int]:
        """The slots of the host pool that anybody holds."""
        return set[int]().union(*(group.hosted() for group in self.out))

    def _set_out(self, groups: list[Group]) -> None:
        self.out = groups
        self.subject.out = [group.keys for group in groups]

    def _check_memory(self) -> None:
        for seq in self.live:
            slots = self.subject.slots(seq.key)
            read = [self._memory.get(slot) for slot in slots[: len(seq.tokens)]]
            if read != seq.tokens:
                position = next(i for i, token in enumerate(seq.tokens) if read[i : i + 1] != [token])
                self.subject.broken(
                    Law.MEMORY,
                    f"token {position} of {seq.key!r} is lost: it is read from slot {slots[position]}, which "
                    f"{self._content(read[position])}",
                )
        for group in self.out:
            for seq in group.seqs:
                for token, slot in zip(seq.tokens, group.where[seq], strict=False):
                    if (self._memory.get(slot) if slot >= 0 else self._host.get(~slot)) != token:
                        self.subject.broken(Law.MEMORY, f"a token of {seq.key!r} is lost while it is swapped out")

    def _content(self, write: int | None) -> str:
        if write is None:
            return "was never written"
        for seq in self.live:
            if write in seq.tokens:
                return f"holds token {seq.tokens.index(write)} of {seq.key!r}"
        return "holds a token of a sequence that is gone"

    def _check_grant(self, seq: Tracked, slots: int, granted: Any) -> None:
        if not is_count(granted) or granted < slots:
            self.subject.broken(Law.GRANT, f"{slots} slots were asked for, {granted} granted")
        if granted % self.subject.block_size:
            self.subject.broken(
                Law.GRANT, f"{granted} slots were granted, not a multiple of block_size={self.subject.block_size}"
            )
        if (listed := len(self.subject.slots(seq.key))) != granted:
            self.subject.broken(Law.GRANT, f"{granted} slots were granted, slots({seq.key!r}) lists {listed}")
        if Ability.ANY_SIZE not in self.subject.abilities:
            self._slab = self._slab or granted
            if granted != self._slab:
                self.subject.broken(
                    Law.GRANT, f"{self._slab} and {granted} slots were granted; without ANY_SIZE all are one size"
                )

    def _copy(self, copies: Sequence[BlockCopy]) -> None:
        """Do the copies of one call on the shadow memory."""
        read: set[int] = set()
        written: set[int] = set()
        for copy in copies:
            src, dst, num_slots = copy
            if num_slots < 1 or min(src, dst) < 0 or max(src, dst) + num_slots > self.subject.num_slots:
                self.subject.broken(Law.COPIES, f"{copy} leaves the pool of {self.subject.num_slots} slots")
            target = set(range(dst, dst + num_slots))
            if target & written:
                self.subject.broken(Law.COPIES, f"two copies of one call write to slot {min(target & written)}")
            read.update(range(src, src + num_slots))
            written |= target
        if read & written:
            self.subject.broken(Law.COPIES, f"slot {min(read & written)} is read and written by the copies of one call")
        for src, dst, num_slots in copies:
            for offset in range(num_slots):
                if (write := self._memory.get(src + offset)) is not None:
                    self._memory[dst + offset] = write

    def _moved(
        self, text: str, moves: Sequence[BlockCopy], leaves: set[int], taken: set[int], end: int
    ) -> dict[int, int]:
        """Where moves bring each slot: exactly ``leaves``, each to a slot of its own below ``end``, not taken."""
        where: dict[int, int] = {}
        for src, dst, num_slots in moves:
            for offset in range(num_slots):
                if src + offset in where:
                    self.subject.broken(Law.SWAP, f"{text} moves slot {src + offset} twice")
                where[src + offset] = dst + offset
        if where.keys() != leaves:
            self.subject.broken(Law.SWAP, f"{text} moves the slots {sorted(where)} instead of {sorted(leaves)}")
        targets = set(where.values())
        if len(targets) < len(where) or targets & taken:
            self.subject.broken(Law.SWAP, f"{text} moves to {sorted(where.values())}, while {sorted(taken)} are in use")
        if targets and not 0 <= min(targets) <= max(targets) < end:
            self.subject.broken(Law.SWAP, f"{text} moves to {sorted(targets)} in a pool of {end} slots")
        return where

    def _note_moves(self, text: str, moves: Sequence[BlockCopy]) -> None:
        noted = "".join(f", move {num_slots} slots from {src} to {dst}" for src, dst, num_slots in moves)
        self.calls.append(f"{text}{noted}")

    def _note_copies(self, text: str, answer: object, copies: Sequence[BlockCopy]) -> list[BlockCopy]:
        """The copies that a call asked for."""
        kept, done = copies[:1], list(copies[1:])
        noted = "".join(f", copy {copy[2]} slots from {copy[0]} to {copy[1]}" for copy in done)
        self.calls.append(f"{text} -> {answer}{noted}")
        if kept != [EARLIER]:
            self.subject.broken(Law.COPIES, f"{text} removed work that was in the list of copies already")
        return done

    def _same_copies(self, text: str, here: list[BlockCopy], there: list[BlockCopy]) -> None:
        if here != there:
            self.subject.broken(
                Law.DETERMINISM, f"{text} asked for the copies {here}, in a second instance for {there}"
            )

    def _same(self, text: str, expected: object, call: Callable[[], object]) -> None:
        """The twin must answer the same."""
        try:
            answer = call()
        except Exception as error:
            answer = error
        if answer != expected:
            self._differs(f"{text} answered {expected!r}", repr(answer))

    def _differs(self, here: str, there: str) -> NoReturn:
        self.subject.broken(
            Law.DETERMINISM,
            f"{here}; in a second instance, which got the successful calls only and other keys: {there}",
        )

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


def survivors(draws: Sequence[int], width: int) -> list[int]:
    """Where each of so many beams goes on from, by arbitrary numbers: one that somebody goes on from stays in place."""
    parents = [draws[i % len(draws)] % width for i in range(width)]
    return [i if i in parents else parent for i, parent in enumerate(parents)]
