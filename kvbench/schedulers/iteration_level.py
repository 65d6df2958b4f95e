"""Iteration-level scheduling (Orca, vLLM): first come first served, prompts and decodes in one iteration.

Speed follows from one rule: what grows by one per step is a difference from the step counter, and a sequence is
touched only when something happens to it. Sequences that fill their room at the same step form a cohort, filed in
``calendar`` under that step; one call then makes room for all of them.

The streams of a request are equally long and fill their room together, so the first stands for all of them here too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Literal

from kvbench.allocators.base import Ability, AllocationError, Allocator
from kvbench.core import Batch, BlockCopy, Fit, KvbenchError, Request, Sequence
from kvbench.reservation import Clairvoyant, Reservation
from kvbench.schedulers.base import MissingCorner, check_at_least, check_corner
from kvbench.schedulers.foresight import Foresight

OK, LATER, NEVER = Fit.OK, Fit.LATER, Fit.NEVER  # looked up in the loop
NOBODY: dict[Sequence, None] = {}
Restore = Literal["auto", "recompute", "swap"]
Victim = Literal["newest", "oldest", "largest"]
Fork = tuple[Sequence, Sequence]
"""Parent and child."""


class IterationLevel:
    """FCFS with preemption of the latest, as the PagedAttention authors' artifact schedules.

    * Before a step every running request, in the order of their admission, must see room for one token more of each of
      its streams; while there is none, the newest (``victim``) that was not served yet is preempted: it loses its
      memory, keeps its tokens and goes back to its place in the queue, or it is swapped out. In such a step nobody else
      gets memory.
    * In other steps those swapped out return, oldest first, where there is room for them and a block more for each
      stream; one for which there is none although nothing runs is rejected. Only when nobody is out any more the head
      of the queue is admitted, as long as the limits and the memory allow. Memory is first asked for when something was
      released since it last said LATER.

    Streams of one request share blocks where the allocator can fork: parallel samples their prompt, a beam what it has
    in common with the beam it was forked from. Elsewhere each stream is granted its own slots, its prompt is computed
    for itself, and a fork copies everything the parent was granted. So it is after a recomputation too.

    Args:
        allocator: placement; called by nobody else.
        reservation: slots to guarantee at admission.
        max_model_len: longest sequence of the model, in tokens.
        max_num_seqs: sequences that may run at once.
        max_num_batched_tokens: tokens of one iteration: a decode is one, a prefill its whole length.
        watermark: share of the pool's blocks that admission leaves free, rounded down to whole blocks. None: 0.01
            where the reservation grows, 0 where it never asks again (the artifact's values), or knows.
        restore: how a preempted request gets its memory back: computed again, or swapped out to the host pool and in
            again. ``auto``: swapped if it has several streams (the artifact's rule). One that finds the host pool full
            is computed again.
        victim: who is preempted of those that were not served yet in a step, the one whose turn it is included: the
            ``newest`` (the artifact's rule), the ``oldest``, or the ``largest`` (most tokens in all its streams).

    Raises:
        KvbenchError: a combination that does not exist, a limit below 1, a watermark outside [0, 1), swapping where
            there is no host pool.
    """

    uses_true_lengths = False

    def __init__(
        self,
        allocator: Allocator,
        reservation: Reservation,
        max_model_len: int,
        max_num_seqs: int = 2048,
        max_num_batched_tokens: int = 2560,
        watermark: float | None = None,
        restore: Restore = "auto",
        victim: Victim = "newest",
    ) -> None:
        check_corner(allocator, reservation)
        check_at_least("max_num_seqs", max_num_seqs, 1)
        check_at_least("max_num_batched_tokens", max_num_batched_tokens, 1)
        if watermark is None:
            watermark = 0.01 if reservation.grows and not isinstance(reservation, Clairvoyant) else 0.0
        if not 0 <= watermark < 1:
            raise KvbenchError(f"scheduler.watermark={watermark} is not a share of the pool; give 0 to 1, 1 excluded")
        if restore not in ("auto", "recompute", "swap"):
            raise KvbenchError(f"scheduler.restore={restore} does not exist; choose auto, recompute or swap")
        if victim not in ("newest", "oldest", "largest"):
            raise KvbenchError(f"scheduler.victim={victim} does not exist; choose newest, oldest or largest")
        if restore == "swap" and Ability.SWAP not in allocator.abilities:
            raise MissingCorner(
                "scheduler.restore=swap needs allocator=paged with a host pool: swap_space_bytes= of a block or more"
            )
        self.allocator = allocator
        self.reservation = reservation
        self.max_model_len = max_model_len
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.keep = int(watermark * (allocator.num_slots // allocator.block_size)) * allocator.block_size
        self.restore = restore
        self.victim = victim
        self.waiting: deque[Sequence] = deque()
        self.swapped: deque[Sequence] = deque()
        self.running: dict[Sequence, None] = {}
        self.calendar: dict[int, dict[Sequence, None]] = {}
        self.step = 0
        self.context_len = 0  # tokens of all running streams
        self.num_siblings = 0  # running streams that are not the first of their request
        self.num_beams = 0  # those of them that are beams
        self.blocked = False  # the head did not fit, and nothing was released since
        self._grows = reservation.grows
        self._shares = reservation.grows and Ability.FORK in allocator.abilities
        self._swaps = Ability.SWAP in allocator.abilities
        self._block_size = allocator.block_size
        self._widest = 1  # most streams of any request so far
        self._forks: dict[Sequence, list[Fork]] = {}  # by request, those since the last step: somebody has to copy
        self._left: dict[Sequence, tuple[list[Fork], int]] = {}  # of those swapped out: forks, tokens they had room for
        self._origins: dict[Sequence, Seq[int]] = {}  # of searches in which beams were dropped since the last step
        self._bases: dict[Sequence, tuple[int, int]] = {}  # of streams that were copied: where a contiguous grant lies
        self._moves: list[BlockCopy] = []
        self.prefix_len = 0  # tokens of context_len that lie in a shared prefix
        self._prefixes: dict[int, Sequence] = {}  # by length; registered when first asked for, and kept
        self._prefix_states = 0  # their own tokens, and those that requests which are out share with them
        self._new_prefixes: list[Sequence] = []
        self._rejected: list[tuple[Sequence, str]] = []
        self._foresight: Foresight | None = None
        if isinstance(reservation, Clairvoyant):
            self._foresight = Foresight(allocator.num_slots // allocator.block_size, allocator.block_size)
        self._serve_short = self._grow_in_order if victim == "newest" else self._serve_in_order

    def schedule(self) -> Batch:
        """Make room for the running sequences, then admit."""
        step = self.step
        grown: Seq[Sequence] = ()
        preempted: Seq[Sequence] = ()
        gained = 0
        copies: list[BlockCopy] = []
        if self.num_siblings:
            grown, gained, preempted = self._serve_streams(self.calendar.pop(step, NOBODY), copies)
        elif self._grows:
            cohort = self.calendar.pop(step, None)
            if cohort:
                if self.allocator.can_append(len(cohort) + 1):
                    gained = self.allocator.append(cohort, copies)
                    grown = tuple(cohort)
                    self._file(cohort, step + gained)
                else:
                    grown, gained, preempted = self._serve_short(cohort, copies)
            elif self.running and not self.allocator.can_append(1):
                preempted = self._serve_short(NOBODY, copies)[2]
        returned: Seq[Sequence] = ()
        if self.swapped and not preempted:
            returned = self._return(copies)
        num_decodes, num_siblings, num_beams = len(self.running), self.num_siblings, self.num_beams
        context_len, prefix_len = self.context_len, self.prefix_len
        prefills: Seq[Sequence] = ()
        rejected: Seq[tuple[Sequence, str]] = ()
        if self.waiting and not (self.blocked or preempted or self.swapped):
            prefills = self._admit(copies)
        if self._rejected:
            rejected, self._rejected = self._rejected, []
        batch = Batch(  # by position: keywords cost half a microsecond in every step
            step,
            self.running,
            num_decodes,
            context_len,
            prefills,
            0,
            self.context_len + self._prefix_states,
            grown,
            gained,
            preempted,
            rejected,
            copies,
            num_siblings,
            num_beams,
            prefix_len,
        )
        if self._new_prefixes and self.running:
            batch.prefixes, self._new_prefixes = self._new_prefixes, []
        if returned:
            batch.returned = returned
        if self._moves:
            batch.moves, self._moves = self._moves, []
            batch.swapped = [seq for seq in preempted if seq in self._left]
        return batch

    def commit(self, finished: Seq[Sequence], parents: Mapping[Sequence, Seq[int]] | None = None) -> Seq[Sequence]:
        """Release what finished at once; then drop the beams that did not survive and fork others in their place."""
        running = self.running
        self.context_len += len(running) + self.num_siblings
        self.step += 1
        for seq in finished:
            del running[seq]
            self._release(seq)
        if parents:
            self._fork_beams({seq: places for seq, places in parents.items() if seq in running})
        return finished

    def _serve_streams(
        self, cohort: dict[Sequence, None], copies: list[BlockCopy]
    ) -> tuple[list[Sequence], int, list[Sequence]]:
        """The same where requests have several streams: room for a cohort, and copies for those that forked.

        Returns grown, gained, preempted.
        """
        allocator, forks = self.allocator, self._forks
        if not self._grows:
            for pairs in forks.values():
                self._copy(pairs, copies)
            forks.clear()
            return [], 0, []
        if self._origins:
            self._move_beams(cohort, copies)
        if not (cohort or forks):
            if allocator.can_append(self._widest):
                return [], 0, []
            return self._serve_in_order(cohort, copies)
        streams = [stream for seq in cohort for stream in (seq, *seq.siblings)]
        need = len(streams) + self._widest
        if forks:
            need += sum(map(len, forks.values()))
        if not allocator.can_append(need):
            return self._serve_in_order(cohort, copies)
        gained = 0
        if forks:
            for seq in forks:  # one call each: room is that of the fullest of a call
                self._part(seq, self._parting(seq, cohort), copies)
            forks.clear()
        if streams:
            gained = allocator.append(streams, copies)
            self._file(cohort, self.step + gained)
        return list(cohort), gained, []

    def _serve_in_order(
        self, cohort: dict[Sequence, None], copies: list[BlockCopy]
    ) -> tuple[list[Sequence], int, list[Sequence]]:
        """The same request by request, in service order, because memory is short."""
        allocator, running, forks = self.allocator, self.running, self._forks
        grown: list[Sequence] = []
        preempted: list[Sequence] = []
        gained = 0
        unserved = dict(running)
        for seq in list(running):
            while seq in running and not allocator.can_append(1 + len(seq.siblings)):
                preempted.append(self._preempt(unserved))
            unserved.pop(seq, None)
            if seq not in running:
                continue
            if seq in forks:
                self._part(seq, self._parting(seq, cohort), copies)
                del forks[seq]
            if seq in cohort:
                room = allocator.append(seq.streams, copies)
                gained = min(gained, room) if grown else room
                grown.append(seq)
        if cohort:
            self._file(cohort, self.step + gained)
        return grown, gained, preempted

    def _parting(self, seq: Sequence, cohort: dict[Sequence, None]) -> list[Fork]:
        """Its forks, unless room for them is made anyway, which copies what is shared."""
        return [] if self._shares and seq in cohort else self._forks[seq]

    def _part(self, seq: Sequence, pairs: list[Fork], copies: list[BlockCopy]) -> None:
        """Before they write: parents and children that share their last block copy it, others copy everything."""
        if not self._shares:
            self._copy(pairs, copies)
        elif pairs:
            due = self.step + self.allocator.append(dict.fromkeys(stream for pair in pairs for stream in pair), copies)
            if self.calendar.get(due) is not seq.cohort and due < self._due(seq):
                self._refile(seq, due)

    def _copy(self, pairs: list[Fork], copies: list[BlockCopy]) -> None:
        """Copy all that each parent was granted, piece by piece where it lies in pieces."""
        allocator = self.allocator
        if Ability.GROW not in allocator.abilities:  # it lies in one piece, and stays where it is
            copies += [BlockCopy(self._base(parent)[0], *self._base(child)) for parent, child in pairs]
            return
        size = allocator.block_size
        for parent, child in pairs:
            sources, targets = allocator.slots(parent), allocator.slots(child)
            copies += [BlockCopy(sources[i], targets[i], size) for i in range(0, len(sources), size)]

    def _base(self, stream: Sequence) -> tuple[int, int]:
        """First slot and length of a contiguous grant."""
        base = self._bases.get(stream)
        if base is None:
            slots = self.allocator.slots(stream)
            base = self._bases[stream] = slots[0], len(slots)
        return base

    def _fork_beams(self, origins: dict[Sequence, Seq[int]]) -> None:
        """What dropped beams held is free from now on; their places are filled before the next step."""
        if self._shares:
            self._origins = origins
            self.blocked = False
        else:
            self._forks.update((seq, _pairs(seq, places)) for seq, places in origins.items())

    def _move_beams(self, cohort: dict[Sequence, None], copies: list[BlockCopy]) -> None:
        """Beam i goes on from what was beam ``origins[i]``; the newest token of each is not in the cache yet.

        Where so much room is free that nobody can be preempted, in one call for each search. Where it is not, what the
        dropped beams held must count as free: they are freed and forked anew, and copy when their turn comes.
        """
        allocator, step = self.allocator, self.step
        origins, self._origins = self._origins, {}
        room = (len(cohort) + 1) * self._widest + sum(map(len, self._forks.values()))
        if self._forks.keys().isdisjoint(origins) and allocator.can_append(room):
            for seq, places in origins.items():
                allocator.refork((seq, *seq.siblings), places, step - seq.origin - 1, copies)
            return
        forks = {seq: _pairs(seq, places) for seq, places in origins.items()}
        for pairs in forks.values():
            for _, child in pairs:
                allocator.free(child)
        for seq, pairs in forks.items():
            cached = step - seq.origin - 1
            for parent, child in pairs:
                allocator.fork(parent, child, cached)
            if seq not in cohort:  # else there will be new room for everyone
                self._forks[seq] = [*self._forks.get(seq, ()), *pairs]

    def _return(self, copies: list[BlockCopy]) -> list[Sequence]:
        """Swap in the oldest of those that are out, as long as there is room for them and one block for each stream."""
        allocator = self.allocator
        returned: list[Sequence] = []
        while self.swapped:
            seq = self.swapped[0]
            streams = seq.streams
            if len(self.running) + len(streams) > self.max_num_seqs:
                break
            if not allocator.can_swap_in(streams, self.keep + len(streams) * allocator.block_size):
                if self.running:
                    break
                self.swapped.popleft()
                del self._left[seq]
                self._prefix_states -= self._stay(seq)
                for stream in streams:
                    allocator.free(stream)
                self._rejected.append((seq, f"{seq.length} tokens of {len(streams)} streams outgrew the pool"))
                continue
            self.swapped.popleft()
            self._moves += allocator.swap_in(streams)
            seq.origin = self.step - seq.length
            pairs, room = self._left.pop(seq)
            self._prefix_states -= self._stay(seq)
            if seq.length <= room:
                self._refile(seq, seq.origin + room + 1)
                self._part(seq, pairs, copies)
            else:
                if not self._shares:
                    self._copy(pairs, copies)
                self._refile(seq, self.step + allocator.append(streams, copies))
            seq.requested, seq.granted = 0, len(allocator.slots(seq))
            self._start(seq)
            returned.append(seq)
        return returned

    def _start(self, seq: Sequence) -> None:
        self.running[seq] = None
        siblings = len(seq.siblings)
        self.context_len += seq.length * (1 + siblings)
        self.prefix_len += seq.num_cached * (1 + siblings)
        if siblings:
            self.num_siblings += siblings
            self._widest = max(self._widest, 1 + siblings)
            if seq.request.is_beam:
                self.num_beams += siblings

    def _grow_in_order(
        self, cohort: dict[Sequence, None], copies: list[BlockCopy]
    ) -> tuple[list[Sequence], int, list[Sequence]]:
        """Serve a cohort one by one, in service order, because memory is short; returns grown, gained, preempted.

        That each *running* sequence must see free room when its turn comes, also those not in the cohort, comes down to
        this: preempt the newest if there is none at the start, and after each grant that leaves none, unless
        its owner is the newest.
        """
        allocator, running = self.allocator, self.running
        due = [seq for seq in running if seq in cohort]
        grown: list[Sequence] = []
        preempted: list[Sequence] = []
        gained = 0
        if not allocator.can_append(1):
            preempted.append(self._preempt())
        for seq in due:
            if seq not in cohort:  # it was preempted, and so was everyone after it
                break
            room = allocator.append((seq,), copies)
            gained = min(gained, room) if grown else room
            grown.append(seq)
            if not allocator.can_append(1) and seq is not next(reversed(running)):
                preempted.append(self._preempt())
        if cohort:
            self._file(cohort, self.step + gained)
        return grown, gained, preempted

    def _admit(self, copies: list[BlockCopy]) -> list[Sequence]:
        """Move the head of the queue into service until something stops it."""
        allocator, calendar, waiting, running = self.allocator, self.calendar, self.waiting, self.running
        step, keep, grows, max_num_tokens = self.step, self.keep, self._grows, self.max_num_batched_tokens
        num_tokens = len(running) + self.num_siblings
        num_free = self.max_num_seqs - len(running)
        admitted: list[Sequence] = []
        while waiting and len(admitted) < num_free:
            seq = waiting[0]
            length = seq.length
            siblings = seq.siblings
            if siblings and len(admitted) + len(siblings) >= num_free:
                if len(siblings) >= self.max_num_seqs:
                    self._reject(f"{1 + len(siblings)} streams exceed max_num_seqs={self.max_num_seqs}")
                    continue
                break
            if num_tokens + length > max_num_tokens:
                if length > max_num_tokens:
                    self._reject(f"{length} tokens to compute at once exceed max_num_batched_tokens={max_num_tokens}")
                    continue
                break  # not `blocked`: the budget is new in every step
            slots = max(self.reservation.slots(seq.request, self.max_model_len), length)
            shares = siblings or seq.request.prefix_len or self._foresight
            fit = self._can_place(seq, slots) if shares else allocator.can_allocate(slots, keep)
            if fit is not OK:
                if fit is NEVER or (self._prefixes and not (running or self.swapped)):  # a prefix is never released
                    streams = f" for each of {1 + len(siblings)} streams" if siblings else ""
                    pool = f"the empty pool of {allocator.num_slots}, {keep} kept free"
                    pool += f", {sum(self._prefixes)} tokens of shared prefixes in it" if self._prefixes else ""
                    self._reject(f"{slots} slots{streams} do not fit {pool}")
                    continue
                self.blocked = self._foresight is None  # what fits later may fit though nothing was released
                break
            num_tokens += length
            seq.requested = slots
            seq.granted = granted = self._place(seq, copies) if shares else allocator.allocate(seq, slots)
            seq.origin = origin = step - length
            if grows:
                due = origin + granted + 1
                cohort = calendar.get(due)
                if cohort is None:
                    cohort = calendar[due] = {}
                cohort[seq] = None
                seq.cohort = cohort
            if shares:
                self._start(seq)
            else:
                running[seq] = None
                self.context_len += length
            admitted.append(seq)
            waiting.popleft()
        return admitted

    def _can_place(self, seq: Sequence, slots: int) -> Fit:
        """Whether all streams of a request find room.

        Those that share their prompt need no more than one, and a shared prefix needs only what its last block holds.
        """
        request = seq.request
        if self._foresight and (fit := self._foresight.fit(self.step, seq)) is not OK:
            return fit
        is_new = self._shares and seq.length == request.prompt_len
        seq.num_prefills = 1 if is_new else 1 + len(seq.siblings)
        seq.num_cached = 0
        if not (request.prefix_len and self._shares and seq.num_prefills == 1):
            return self.allocator.can_allocate(slots, self.keep, seq.num_prefills)
        fit = self._register(request.prefix_len)
        if fit is OK:
            seq.num_cached = request.prefix_len
            fit = self.allocator.can_allocate(
                slots - request.prefix_len // self._block_size * self._block_size, self.keep
            )
        return fit

    def _register(self, prefix_len: int) -> Fit:
        """Grant a prefix its slots, once and for good."""
        if prefix_len in self._prefixes:
            return OK
        fit = self.allocator.can_allocate(prefix_len, self.keep)
        if fit is OK:
            request = Request(-1, 0.0, prefix_len, 1, prefix_len=prefix_len)
            prefix = self._prefixes[prefix_len] = Sequence(request, prefix_len, prefix_len)
            prefix.granted = self.allocator.allocate(prefix, prefix_len)
            self._prefix_states += prefix_len
            self._new_prefixes.append(prefix)
        return fit

    def _place(self, seq: Sequence, copies: list[BlockCopy]) -> int:
        """Let a request share its prefix, and its siblings its prompt, or grant each its own; returns what each has."""
        allocator, length, slots = self.allocator, seq.length, seq.requested
        if self._foresight:
            self._foresight.book(self.step, seq)
        if seq.num_cached:
            allocator.fork(self._prefixes[seq.num_cached], seq, seq.num_cached)
            granted = allocator.extend(seq, slots, copies)
        else:
            granted = allocator.allocate(seq, slots)
        for sibling in seq.siblings:
            if seq.num_prefills > 1:
                allocator.allocate(sibling, slots)
            else:
                allocator.fork(seq, sibling, length)
        if seq.siblings and seq.num_prefills == 1 and granted > length:
            self._forks[seq] = [(seq, sibling) for sibling in seq.siblings]
        return granted

    def _reject(self, reason: str) -> None:
        """Drop the head of the queue for good."""
        self._rejected.append((self.waiting.popleft(), reason))

    def _preempt(self, unserved: dict[Sequence, None] = NOBODY) -> Sequence:
        """The victim of those not served yet goes back to its place in the queue, or to the host pool."""
        if self.victim == "newest":
            seq = self.running.popitem()[0]
        else:
            seq = next(iter(unserved)) if self.victim == "oldest" else max(unserved, key=self._num_tokens)
            del self.running[seq]
        unserved.pop(seq, None)
        if self._swaps and (self.restore == "swap" or (seq.siblings and self.restore == "auto")):
            try:
                self._moves += self.allocator.swap_out(seq.streams)
            except AllocationError:
                pass
            else:
                self._left[seq] = self._forks.pop(seq, []), self._due(seq) - 1 - seq.origin
                self._stop(seq)
                self._prefix_states += self._stay(seq)
                self._put_back(self.swapped, seq)
                return seq
        self._release(seq)
        self._put_back(self.waiting, seq)
        return seq

    def _put_back(self, queue: deque[Sequence], seq: Sequence) -> None:
        """The newest to the front (the artifact's rule), another victim before all that arrived with it or later."""
        place, arrival_s = 0, seq.request.arrival_s
        while self.victim != "newest" and place < len(queue) and queue[place].request.arrival_s < arrival_s:
            place += 1
        queue.insert(place, seq)

    def _num_tokens(self, seq: Sequence) -> int:
        """Tokens of a running request, in all its streams."""
        return (self.step - seq.origin) * (1 + len(seq.siblings))

    def _stay(self, seq: Sequence) -> int:
        """Tokens that its streams leave in the pool when they are swapped out: what they share with a prefix."""
        return len(seq.streams) * (seq.num_cached // self._block_size * self._block_size)

    def _release(self, seq: Sequence) -> None:
        self._stop(seq)
        self.allocator.free(seq)
        if seq.siblings:
            self._forks.pop(seq, None)
            for sibling in seq.siblings:
                self.allocator.free(sibling)
            if self._bases:
                for stream in seq.streams:
                    self._bases.pop(stream, None)

    def _stop(self, seq: Sequence) -> None:
        """It leaves the books of what runs."""
        seq.length = length = self.step - seq.origin
        if seq.siblings:
            siblings = len(seq.siblings)
            length *= 1 + siblings
            self.num_siblings -= siblings
            if seq.request.is_beam:
                self.num_beams -= siblings
        self.context_len -= length
        if seq.num_cached:
            self.prefix_len -= seq.num_cached * (1 + len(seq.siblings))
        cohort = seq.cohort
        if cohort is not None:
            del cohort[seq]
            seq.cohort = None
        self.blocked = False

    def _due(self, seq: Sequence) -> int:
        """The step at which it needs room again."""
        return next((due for due, cohort in self.calendar.items() if cohort is seq.cohort), self.step)

    def _refile(self, seq: Sequence, due: int) -> None:
        """Put a sequence, filed or not, under the step at which it needs room again."""
        if seq.cohort is not None:
            del seq.cohort[seq]
        seq.cohort = {seq: None}
        self._file(seq.cohort, due)

    def _file(self, cohort: dict[Sequence, None], due: int) -> None:
        """Put a cohort under the step at which it needs room again, merged with one that is there already."""
        there = self.calendar.get(due)
        if there is None:
            self.calendar[due] = cohort
            return
        there.update(cohort)
        for seq in cohort:
            seq.cohort = there


def _pairs(seq: Sequence, origins: Seq[int]) -> list[Fork]:
    streams = seq.streams
    return [(streams[origin], streams[i]) for i, origin in enumerate(origins) if origin != i]
