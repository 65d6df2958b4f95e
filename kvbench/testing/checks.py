"""Directed checks, each the same in every run, where random calls are weak: every size, every hole, long drives."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations
from random import Random

from kvbench.allocators.base import Ability, AllocationError, Allocator
from kvbench.core import KvbenchError, Request, Sequence
from kvbench.ledger import Ledger
from kvbench.reservation import Max, OnDemand, Oracle, Pow2, Reservation
from kvbench.schedulers.iteration_level import IterationLevel
from kvbench.testing.laws import Broken, Law
from kvbench.testing.mistakes import mistakes
from kvbench.testing.shadow import Shadow, Tracked, survivors

Build = Callable[[], Allocator]


def every_size(build: Build) -> None:
    """``can_allocate`` and ``allocate`` in an empty pool, for every size (of a large pool: at its edges)."""
    shadow = Shadow(build)
    size, largest, end = shadow.subject.block_size, shadow.fresh.largest_free, shadow.subject.num_slots
    sizes = set(range(1, end + size + 2)) if end <= 64 else {1, 2, size - 1, size, size + 1, 2 * size}
    sizes |= {edge + offset for edge in (largest, end) for offset in (-1, 0, 1)}
    for slots in sorted(sizes - {-1, 0}):
        for keep in (0, size, end // size * size):
            shadow.probe(slots, keep)
        if slots <= largest:
            shadow.probe(slots, 0, 2)


def several(build: Build) -> None:
    """``can_allocate`` for several sequences, in pools with every pattern of holes."""
    for keep_one_in in (1 << 20, 2, 3, 4):
        shadow = Shadow(build)
        _fill(shadow)
        random = Random(keep_one_in)
        for seq in [seq for seq in shadow.live if random.randrange(keep_one_in)]:
            shadow.free(seq)
        size = shadow.subject.block_size
        for count in (2, 3, 5):
            for slots in dict.fromkeys((1, size + 1, shadow.subject.books().free // count, size * 2)):
                if slots:
                    shadow.probe(slots, 0, count)
                    shadow.probe(slots, size, count)
        shadow.drain(list(shadow.live))


def same_holes(build: Build) -> None:
    """What is free must not depend on the order in which it was freed: neighbours merge whoever comes first."""
    for keep_one_in in (2, 3, 4, 1 << 20):
        usages = set()
        for order in ("oldest first", "newest first", "shuffled"):
            shadow = Shadow(build)
            _fill(shadow)
            random = Random(keep_one_in)
            freed = [seq for seq in shadow.live if random.randrange(keep_one_in)]
            if order == "newest first":
                freed.reverse()
            elif order == "shuffled":
                random.shuffle(freed)
            for seq in freed:
                shadow.free(seq)
            usages.add(shadow.subject.books().largest_free)
            if len(usages) > 1:
                shadow.subject.broken(
                    Law.LEAK, f"largest_free is {usages} with the same slots free, freed in another order"
                )
            shadow.drain(list(shadow.live))


def refusals(build: Build) -> None:
    """Every mistake, in a pool that is empty, used, full, and empty again, once with somebody out."""
    shadow = Shadow(build)
    for fill, num_out in ((0, 0), (2, 0), (2, 1), (1 << 20, 0), (0, 0)):
        if not fill:
            shadow.drain(list(shadow.live))
        _fill(shadow, fill)
        if Ability.SWAP in shadow.subject.abilities and num_out:
            shadow.swap_out(shadow.live[:num_out])
        for seq in shadow.live:
            shadow.write(seq, seq.room)
        for mistake in mistakes(shadow):
            shadow.subject.refuse(mistake, shadow.keys())


def growth(build: Build) -> None:
    """One sequence grows until the pool is full, then two side by side."""
    shadow = Shadow(build)
    if Ability.GROW not in shadow.subject.abilities:
        return
    for num_seqs in (1, 2):
        seqs = [seq for _ in range(num_seqs) if (seq := shadow.allocate(1, 1))]
        ample = shadow.fresh.largest_free >= 4 * shadow.subject.books().used
        if ample and not shadow.subject.can_append(num_seqs):
            shadow.subject.broken(
                Law.CAN_APPEND, f"can_append({num_seqs}) is False, yet three quarters of the slots are free"
            )
        while shadow.append(seqs):
            pass
        shadow.drain(list(shadow.live))


def forks(build: Build) -> None:
    """Three sequences of one family write in every order, or are freed first; then grandchildren."""
    for length in (1, 2, 3):
        for writers in permutations(range(3), 2):
            shadow = Shadow(build)
            if Ability.FORK not in shadow.subject.abilities:
                return
            size = shadow.subject.block_size
            parent = shadow.allocate(min(length * size // 2 + 1, shadow.fresh.largest_free), 1)
            if parent is None:
                return
            family = [parent, shadow.fork(parent), shadow.fork(parent)]
            for writer in writers:
                if shadow.append([family[writer]]):
                    shadow.write(family[writer], 1)
            shadow.free(family[writers[0]])
            for seq in list(shadow.live):
                if shadow.append([shadow.fork(seq), seq]):
                    shadow.step()
                shadow.readmit(shadow.fork(seq))
            shadow.drain(list(shadow.live))


def prefixes(build: Build) -> None:
    """A shared prefix that stays, with an end at a block's or within; who begins with it comes, writes and goes."""
    size = Shadow(build).subject.block_size
    for length in sorted({max(1, size - 1), size, size + 1, 2 * size, 2 * size + size // 2}):
        shadow = Shadow(build)
        if Ability.FORK not in shadow.subject.abilities:
            return
        if prefix := shadow.allocate(length, length):
            for order in (1, -1):
                _serve_behind(shadow, prefix, order)
            shadow.drain(list(shadow.live))


def _serve_behind(shadow: Shadow, prefix: Tracked, order: int) -> None:
    """Requests until one does not fit, all their slots written; then samples, swaps, and the end of everybody."""
    size, length = shadow.subject.block_size, len(prefix.tokens)
    requests: list[Tracked] = []
    while seq := shadow.begin_with(prefix, length + 1 + len(requests) * size // 2):
        requests.append(seq)
        shadow.write(seq, seq.room)
    for seq in requests[-1:]:
        shadow.free(seq)
    if Ability.GROW in shadow.subject.abilities and requests[:-1]:
        shadow.append([requests[0], shadow.fork(requests[0])])
        shadow.step()
    present = [seq for seq in requests if seq in shadow.live]
    group = shadow.swap_out(present[:2]) if Ability.SWAP in shadow.subject.abilities and present else None
    for seq in [seq for seq in shadow.live if seq is not prefix][::order]:
        shadow.free(seq)
    if group and shadow.swap_in(group):
        for seq in present[:2]:
            shadow.free(seq)


def searches(build: Build) -> None:
    """Beam searches, step by step until they find no room, swapped out and in between."""
    for width in (2, 3, 6):
        shadow, random = Shadow(build), Random(width)
        if Ability.FORK | Ability.GROW not in shadow.subject.abilities:
            return
        length = shadow.subject.block_size // 2 + 1
        first = shadow.allocate(length, length)
        if first is None:
            return
        beams = [first, *(shadow.fork(first) for _ in range(width - 1))]
        for step in range(60):
            if not first.room and not shadow.append(beams):
                break
            for beam in beams:
                shadow.write(beam, 1)
            shadow.refork(beams, survivors([random.randrange(width) for _ in beams], width))
            if (
                Ability.SWAP in shadow.subject.abilities
                and step % 7 == 6
                and not ((group := shadow.swap_out(beams)) and shadow.swap_in(group))
            ):
                break
        shadow.drain(list(shadow.live))


def swaps(build: Build) -> None:
    """A family leaves between a fork and the write after it, together and one by one, and so does everybody else."""
    if Ability.SWAP not in Shadow(build).subject.abilities:
        return
    for length in (1, 2, 3):
        _swap_families(Shadow(build), length)
    _swap_until_full(Shadow(build))


def _swap_families(shadow: Shadow, length: int) -> None:
    """Three generations with an end in the middle of a block, or at its end."""
    size = shadow.subject.block_size
    parent = shadow.allocate(min(length * size // 2 + 1, shadow.fresh.largest_free), 1)
    if parent is None:
        return
    family = [parent]
    if Ability.FORK in shadow.subject.abilities:
        family += [shadow.fork(parent)]
        family += [shadow.fork(family[1])]
    for leaving in (family, family[:1], family[1:], family[::-1]):
        group = shadow.swap_out(leaving)
        if group is None:
            continue
        if seq := shadow.allocate(1, 1):  # takes what they left
            shadow.free(seq)
        for keep in (shadow.subject.num_slots // size * size, 0):
            if group in shadow.out:
                shadow.swap_in(group, keep)
        if group not in shadow.out and Ability.GROW in shadow.subject.abilities:
            for seq in leaving:
                shadow.append([seq])
    if group := shadow.swap_out([seq for seq in family if seq in shadow.live]):
        shadow.free_out(group, group.seqs[0])
        if group.seqs:
            shadow.swap_in(group)
    shadow.drain(list(shadow.live))


def _swap_until_full(shadow: Shadow) -> None:
    """The host pool is filled until it refuses; then everybody comes back, in the other order."""
    for _ in range(3):
        _fill(shadow)
        while shadow.live and shadow.swap_out(shadow.live[-1:]):
            pass
    for group in reversed(shadow.out.copy()):
        while not shadow.swap_in(group) and shadow.live:
            shadow.free(shadow.live[0])
    shadow.drain(list(shadow.live))


def drives(build: Build) -> None:
    """A few hundred steps of a small server under each reservation that the allocator can serve."""
    for reservation in (Max(), Pow2(), Oracle(), OnDemand()):
        drive(build, reservation)


def drive(build: Build, reservation: Reservation, num_steps: int = 250, seed: int = 0) -> None:
    """Requests come, are granted what the reservation says, grow where it does, fork where they can, and finish.

    Args:
        build: makes a new allocator.
        reservation: with one that never grows nobody ever asks again; one that grows is skipped without GROW.
        num_steps: scheduler steps.
        seed: of the requests.
    """
    shadow = Shadow(build)
    if reservation.grows and Ability.GROW not in shadow.subject.abilities:
        return
    random = Random(seed)
    longest = max(2, shadow.fresh.largest_free // 2)
    final_len: dict[Tracked, int] = {}
    for number in range(num_steps):
        if random.random() < 0.6:
            prompt_len = random.randint(1, longest - 1)
            request = Request(number, 0.0, prompt_len, random.randint(1, longest - prompt_len))
            slots = max(reservation.slots(request, longest), prompt_len)
            if slots <= shadow.fresh.largest_free and (
                seq := shadow.allocate(prompt_len, slots, again=number % 2 == 0)
            ):
                final_len[seq] = request.final_len
        if reservation.grows and Ability.FORK in shadow.subject.abilities and shadow.live and random.random() < 0.2:
            parent = random.choice(shadow.live)
            final_len[shadow.fork(parent)] = final_len[parent] + random.randint(0, 3)
        if reservation.grows and Ability.SWAP in shadow.subject.abilities:
            _swap_some(shadow, random)
        for seq in list(shadow.live):
            if len(seq.tokens) >= final_len[seq]:
                shadow.free(seq)
        if not reservation.grows and any(not seq.room for seq in shadow.live):
            shadow.subject.broken(Law.ROOM, "a sequence ran out of the room that was reserved for all of its tokens")
        shadow.step()
    shadow.drain(list(shadow.live))


def runs(build: Build) -> None:
    """Runs by the scheduler that a benchmark has, in a pool that is too small, as a benchmark checks them."""
    for num_seqs, is_beam, has_prefix in ((1, False, False), (1, False, True), (3, False, True), (3, True, False)):
        allocator = build()
        reservation: Reservation = OnDemand()
        if Ability.GROW not in allocator.abilities:
            reservation = Oracle() if Ability.ANY_SIZE in allocator.abilities else Max()
        largest = allocator.usage().largest_free
        longest = largest if reservation.fits_slabs else max(2, largest // (2 * num_seqs))
        random = Random(num_seqs + is_beam)
        waiting = []
        for number in range(24):
            prefix_len = min(allocator.block_size + 1, longest - 2) if has_prefix and number % 2 else 0
            prompt_len = random.randint(prefix_len + 1, longest - 1) if longest > 2 else 1
            output_len = random.randint(1, longest - prompt_len)
            request = Request(number, 0.0, prompt_len, output_len, num_seqs, is_beam, max(0, prefix_len))
            waiting.append(Sequence(request, request.final_len, prompt_len))
            waiting[-1].siblings = tuple(Sequence(request, request.final_len, prompt_len) for _ in range(num_seqs - 1))
        scheduler = IterationLevel(allocator, reservation, longest)
        scheduler.waiting.extend(waiting)
        try:
            _serve(scheduler, random)
        except AllocationError as error:
            raise Broken(
                Law.CAN_APPEND, f"in a run it is {error}, though it was asked whether there is room", ()
            ) from None
        except KvbenchError as error:
            said = str(error).partition(" breaks the protocol: ")[2].partition("; test it by ")[0] or str(error)
            raise Broken(Law.BOOKS, f"in a run {said}", ()) from None


def _serve(scheduler: IterationLevel, random: Random, most_steps: int = 2000) -> None:
    """The loop of the engine, without a clock."""
    ledger = Ledger(scheduler.allocator, audited=True)
    while (scheduler.waiting or scheduler.running or scheduler.swapped) and scheduler.step < most_steps:
        batch = scheduler.schedule()
        for seq in batch.preempted:
            seq.num_preemptions += 1
        if not scheduler.running:
            if not (batch.preempted or batch.rejected):
                raise Broken(Law.FIT, "nothing is in the pool, yet the next request is neither OK nor NEVER", ())
            ledger.skip(batch, 0.0)
            continue
        ledger.record(batch, 0.0, 0.0, 0)
        finished = [seq for seq in scheduler.running if batch.step + 1 - seq.origin == seq.final_len]
        parents = {
            seq: survivors([random.randrange(seq.num_streams) for _ in seq.streams], seq.num_streams)
            for seq in scheduler.running
            if seq.request.is_beam and seq not in batch.prefills and random.random() < 0.3
        }
        released = scheduler.commit(finished, {seq: beams for seq, beams in parents.items() if seq not in finished})
        ledger.settle(finished, released)


def _swap_some(shadow: Shadow, random: Random) -> None:
    """Who is out returns if there is room; else a family may leave."""
    for group in shadow.out.copy():
        shadow.swap_in(group, shadow.subject.block_size)
    if shadow.live and random.random() < 0.1:
        family = random.choice(shadow.live).family
        shadow.swap_out([seq for seq in shadow.live if seq.family == family])


def _fill(shadow: Shadow, most: int = 1 << 20) -> None:
    """Grant small equal pieces (a granule, of a large pool a 32nd) until the pool is full."""
    piece = max(shadow.subject.block_size, shadow.subject.num_slots // 32)
    while len(shadow.live) < most and shadow.allocate(1, piece):
        pass


CHECKS: tuple[Callable[[Build], None], ...] = (
    every_size,
    several,
    same_holes,
    refusals,
    growth,
    forks,
    prefixes,
    searches,
    swaps,
    drives,
    runs,
)
