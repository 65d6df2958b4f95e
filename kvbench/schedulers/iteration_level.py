"""Iteration-level scheduling (Orca, vLLM): first come first served, prompts and decodes in one iteration.

Speed follows from one rule: what grows by one per step is a difference from the step counter, and a sequence is
touched only when something happens to it. Sequences that fill their room at the same step form a cohort in the
``calendar``; one call then makes room for all of them.

The streams of a request are equally long and fill their room together, so the first stands for all of them here too.
How they part when they were forked is told by ``forks``, what requests share with one another by ``prefixes``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Literal

from kvbench.allocators.base import Ability, AllocationError, Allocator
from kvbench.core import Batch, BlockCopy, Fit, KvbenchError, Sequence
from kvbench.reservation import Reservation
from kvbench.schedulers.base import MissingCorner, check_at_least, check_corner
from kvbench.schedulers.calendar import NOBODY, Calendar, Cohort
from kvbench.schedulers.foresight import Foresight
from kvbench.schedulers.forks import Fork, Forks
from kvbench.schedulers.prefixes import Prefixes

OK, NEVER = Fit.OK, Fit.NEVER  # looked up in the loop
Restore = Literal["auto", "recompute", "swap"]
Victim = Literal["newest", "oldest", "largest"]
Served = tuple[Seq[Sequence], int, Seq[Sequence]]
"""Who was granted more room, how many tokens of it each of their streams, and who was preempted."""


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

    Attributes:
        keep: slots that admission leaves free, the watermark's.

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
            watermark = 0.01 if reservation.grows and not reservation.foresees else 0.0
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
        self.step = 0
        # Sums over the streams of what runs.
        self._context_len = 0  # their tokens
        self._prefix_len = 0  # those of them that lie in a shared prefix
        self._num_siblings = 0  # streams that are not the first of their request
        self._num_beams = 0  # those of them that are beams
        self._widest = 1  # most streams of any request so far
        self._grows = reservation.grows
        self._swaps = Ability.SWAP in allocator.abilities
        self._calendar = Calendar()
        self._forks = Forks(allocator, shares=reservation.grows and Ability.FORK in allocator.abilities)
        self._prefixes = Prefixes(allocator, self.keep)
        self._foresight: Foresight | None = None
        if reservation.foresees:
            self._foresight = Foresight(allocator.num_slots // allocator.block_size, allocator.block_size)
        self._serve_short = self._grow_in_order if victim == "newest" else self._serve_in_order
        self._left: dict[Sequence, tuple[list[Fork], int]] = {}  # of those swapped out: forks, tokens they had room for
        self._moves: list[BlockCopy] = []  # to the host pool and back, for the next batch
        self._rejected: list[tuple[Sequence, str]] = []  # for the next batch
        self._blocked = False  # the head did not fit, and nothing was released since

    def schedule(self) -> Batch:
        """Make room for the running sequences; let those that are swapped out return, or admit."""
        copies: list[BlockCopy] = []
        grown, gained, preempted = self._serve(copies)
        returned: Seq[Sequence] = ()
        if self.swapped and not preempted:
            returned = self._return(copies)
        num_decodes, num_siblings, num_beams = len(self.running), self._num_siblings, self._num_beams
        context_len, prefix_len = self._context_len, self._prefix_len
        prefills: Seq[Sequence] = ()
        rejected: Seq[tuple[Sequence, str]] = ()
        if self.waiting and not (self._blocked or preempted or self.swapped):
            prefills = self._admit(copies)
        if self._rejected:
            rejected, self._rejected = self._rejected, []
        prefixes = self._prefixes
        batch = Batch(  # by position: keywords cost half a microsecond in every step
            self.step,
            self.running,
            num_decodes,
            context_len,
            prefills,
            0,
            self._context_len + prefixes.token_states,
            grown,
            gained,
            preempted,
            rejected,
            copies,
            num_siblings,
            num_beams,
            prefix_len,
        )
        if prefixes.fresh and self.running:
            batch.prefixes, prefixes.fresh = prefixes.fresh, []
        if returned:
            batch.returned = returned
        if self._moves:
            batch.moves, self._moves = self._moves, []
            batch.swapped = [seq for seq in preempted if seq in self._left]
        return batch

    def commit(self, finished: Seq[Sequence], parents: Mapping[Sequence, Seq[int]] | None = None) -> Seq[Sequence]:
        """Release what finished at once; then drop the beams that did not survive and fork others in their place."""
        running = self.running
        self._context_len += len(running) + self._num_siblings
        self.step += 1
        for seq in finished:
            del running[seq]
            self._release(seq)
        if parents:
            self._forks.add_beams({seq: beams for seq, beams in parents.items() if seq in running})
            if self._forks.shares:  # what dropped beams held is free from now on
                self._blocked = False
        return finished

    def _serve(self, copies: list[BlockCopy]) -> Served:
        """Make room for one token more of each stream that runs."""
        allocator, cohort = self.allocator, self._calendar.cohorts.pop(self.step, NOBODY)
        if self._num_siblings:
            return self._serve_streams(cohort, copies)
        if cohort:
            if not allocator.can_append(len(cohort) + 1):
                return self._serve_short(cohort, copies)
            gained = allocator.append(cohort, copies)
            self._calendar.file(cohort, self.step + gained)
            return tuple(cohort), gained, ()
        if self._grows and self.running and not allocator.can_append(1):
            return self._serve_short(cohort, copies)
        return (), 0, ()

    def _serve_streams(self, cohort: Cohort, copies: list[BlockCopy]) -> Served:
        """The same where requests have several streams: room for a cohort, and copies for those that forked."""
        allocator, forks = self.allocator, self._forks
        if not self._grows:
            forks.part_all(copies)
            return (), 0, ()
        if forks.parents:
            forks.move_beams(cohort, self._widest, self.step, copies)
        pending = forks.pending
        if not (cohort or pending):
            return ((), 0, ()) if allocator.can_append(self._widest) else self._serve_in_order(cohort, copies)
        streams = [stream for seq in cohort for stream in seq.streams]
        if not allocator.can_append(len(streams) + sum(map(len, pending.values())) + self._widest):
            return self._serve_in_order(cohort, copies)
        gained = 0
        for seq in list(pending):  # one call each: room is that of the fullest of a call
            if not allocator.can_append(seq.num_streams):  # one that is not ours may have granted others ahead
                return self._serve_in_order(cohort, copies)
            self._part(seq, seq in cohort, copies)
        if streams and not allocator.can_append(len(streams)):
            return self._serve_in_order(cohort, copies)
        if streams:
            gained = allocator.append(streams, copies)
            self._calendar.file(cohort, self.step + gained)
        return tuple(cohort), gained, ()

    def _serve_in_order(self, cohort: Cohort, copies: list[BlockCopy]) -> Served:
        """The same request by request, in service order, because memory is short."""
        allocator, running, pending = self.allocator, self.running, self._forks.pending
        grown: list[Sequence] = []
        rooms: list[int] = []
        preempted: list[Sequence] = []
        unserved = dict(running)
        for seq in list(running):
            while seq in running and not allocator.can_append(seq.num_streams):
                preempted.append(self._preempt(unserved))
            unserved.pop(seq, None)
            if seq not in running:
                continue
            if seq in pending:
                self._part(seq, seq in cohort, copies)
            if seq in cohort:
                rooms.append(allocator.append(seq.streams, copies))
                grown.append(seq)
        return grown, self._file(cohort, grown, rooms) if cohort else 0, preempted

    def _grow_in_order(self, cohort: Cohort, copies: list[BlockCopy]) -> Served:
        """The same where every request has one stream and the newest is the victim: only the cohort is looked at.

        That each *running* sequence must see free room when its turn comes, also those not in the cohort, comes down to
        this: preempt the newest if there is none at the start, and after each grant that leaves none, unless
        its owner is the newest.
        """
        allocator, running = self.allocator, self.running
        due = [seq for seq in running if seq in cohort]
        grown: list[Sequence] = []
        rooms: list[int] = []
        preempted: list[Sequence] = []
        while running and not allocator.can_append(1):  # once where whoever leaves gives room for one, as blocks do
            preempted.append(self._preempt())
        for seq in due:
            if seq not in cohort:  # it was preempted, and so was everyone after it
                break
            rooms.append(allocator.append((seq,), copies))
            grown.append(seq)
            while seq is not next(reversed(running)) and not allocator.can_append(1):
                preempted.append(self._preempt())
        return grown, self._file(cohort, grown, rooms) if cohort else 0, preempted

    def _file(self, cohort: Cohort, grown: Seq[Sequence], rooms: Seq[int]) -> int:
        """Each asks again when it has filled its own room, those with the least of it together; returns how much."""
        least = rooms[0] if rooms else 0
        if rooms.count(least) != len(rooms):
            least = min(rooms)
            for seq, room in zip(grown, rooms, strict=True):
                if room != least:
                    self._calendar.add(seq, self.step + room)
        self._calendar.file(cohort, self.step + least)
        return least

    def _part(self, seq: Sequence, is_due: bool, copies: list[BlockCopy]) -> None:
        """Let the streams of a request part, and come back when those that did have filled their room."""
        room = self._forks.part(seq, is_due, copies)
        if room:
            self._calendar.hasten(seq, self.step + room)

    def _preempt(self, unserved: Cohort = NOBODY) -> Sequence:
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
                room = self._calendar.step_of(seq, popped=self.step) - 1 - seq.origin
                self._left[seq] = self._forks.pending.pop(seq, []), room
                self._prefixes.swapped_out(seq)
                self._stop(seq)
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
        return (self.step - seq.origin) * seq.num_streams

    def _return(self, copies: list[BlockCopy]) -> list[Sequence]:
        """Swap in the oldest of those that are out, as long as there is room for them and one block for each stream."""
        allocator = self.allocator
        returned: list[Sequence] = []
        while self.swapped:
            seq = self.swapped[0]
            streams = seq.streams
            if len(self.running) + len(streams) > self.max_num_seqs:
                break
            fits = allocator.can_swap_in(streams, self.keep + len(streams) * allocator.block_size)
            if not fits and self.running:
                break
            self.swapped.popleft()
            self._prefixes.swapped_in(seq)
            pairs, room = self._left.pop(seq)
            if not fits:
                for stream in streams:
                    allocator.free(stream)
                self._rejected.append((seq, f"{seq.length} tokens of {len(streams)} streams outgrew the pool"))
                continue
            self._moves += allocator.swap_in(streams)
            seq.origin = self.step - seq.length
            is_due = seq.length > room
            if not is_due:
                self._calendar.add(seq, seq.origin + room + 1)
            self._forks.pending[seq] = pairs
            self._part(seq, is_due, copies)
            if is_due:
                self._calendar.add(seq, self.step + allocator.append(streams, copies))
            seq.requested, seq.granted = 0, len(allocator.slots(seq))
            self._start(seq)
            returned.append(seq)
        return returned

    def _admit(self, copies: list[BlockCopy]) -> list[Sequence]:
        """Move the head of the queue into service until something stops it."""
        waiting, max_num_tokens = self.waiting, self.max_num_batched_tokens
        num_tokens = len(self.running) + self._num_siblings
        num_free = self.max_num_seqs - len(self.running)
        admitted: list[Sequence] = []
        while waiting and len(admitted) < num_free:
            seq = waiting[0]
            length = seq.length
            if seq.siblings and len(admitted) + seq.num_streams > num_free:
                if seq.num_streams > self.max_num_seqs:
                    self._reject(f"{seq.num_streams} streams exceed max_num_seqs={self.max_num_seqs}")
                    continue
                break
            if num_tokens + length > max_num_tokens:
                if length > max_num_tokens:
                    self._reject(f"{length} tokens to compute at once exceed max_num_batched_tokens={max_num_tokens}")
                    continue
                break  # not `_blocked`: the budget is new in every step
            seq.requested = max(self.reservation.slots(seq.request, self.max_model_len), length)
            fit = self._can_place(seq)
            if fit is not OK:
                # A prefix is never released: with nobody else in the pool, what does not fit now never will.
                if fit is NEVER or (self._prefixes.num_tokens and not (self.running or self.swapped)):
                    self._reject(self._misfit(seq))
                    continue
                self._blocked = self._foresight is None  # what fits later may fit though nothing was released
                break
            num_tokens += length
            seq.granted = self._place(seq, copies)
            seq.origin = self.step - length
            if self._grows:
                self._calendar.add(seq, seq.origin + seq.granted + 1)
            self._start(seq)
            admitted.append(seq)
            waiting.popleft()
        return admitted

    def _can_place(self, seq: Sequence) -> Fit:
        """Whether all streams of a request find the room that it asks for.

        Those that share their prompt need no more than one, and one that shares a prefix needs what lies beyond.
        """
        if self._foresight and (fit := self._foresight.fit(self.step, seq)) is not OK:
            return fit
        shares = self._forks.shares
        seq.num_prefills = 1 if shares and seq.length == seq.request.prompt_len else seq.num_streams
        seq.num_cached = 0
        if seq.request.prefix_len and shares and seq.num_prefills == 1:
            return self._prefixes.fit(seq, seq.requested)
        return self.allocator.can_allocate(seq.requested, self.keep, seq.num_prefills)

    def _misfit(self, seq: Sequence) -> str:
        """Why a request can never be placed."""
        streams = f" for each of {seq.num_streams} streams" if seq.siblings else ""
        pool = f"the empty pool of {self.allocator.num_slots}, {self.keep} kept free"
        if num_tokens := self._prefixes.num_tokens:
            pool += f", {num_tokens} tokens of shared prefixes in it"
        return f"{seq.requested} slots{streams} do not fit {pool}"

    def _place(self, seq: Sequence, copies: list[BlockCopy]) -> int:
        """Let a request share its prefix, and its siblings its prompt, or grant each its own; returns what each has."""
        allocator = self.allocator
        if self._foresight:
            self._foresight.book(self.step, seq)
        granted = self._prefixes.share(seq, copies) if seq.num_cached else allocator.allocate(seq, seq.requested)
        for sibling in seq.siblings:
            if seq.num_prefills > 1:
                granted = min(granted, allocator.allocate(sibling, seq.requested))
            else:
                allocator.fork(seq, sibling, seq.length)
        if seq.siblings and seq.num_prefills == 1 and granted > seq.length:
            self._forks.add_samples(seq)
        return granted

    def _reject(self, reason: str) -> None:
        """Drop the head of the queue for good."""
        self._rejected.append((self.waiting.popleft(), reason))

    def _start(self, seq: Sequence) -> None:
        """A request runs from now on."""
        self.running[seq] = None
        self._context_len += seq.length
        if seq.siblings or seq.num_cached:
            self._count(seq, 1)
            self._widest = max(self._widest, seq.num_streams)

    def _stop(self, seq: Sequence) -> None:
        """A request that was taken out of ``running`` keeps its tokens, and loses or has lost its memory."""
        seq.length = length = self.step - seq.origin
        self._context_len -= length
        if seq.siblings or seq.num_cached:
            self._count(seq, -1)
        self._calendar.remove(seq)
        self._blocked = False

    def _count(self, seq: Sequence, sign: int) -> None:
        """Add to the sums what a request has beyond one stream of its own, or subtract it."""
        num_siblings = sign * len(seq.siblings)
        self._context_len += num_siblings * seq.length
        self._prefix_len += (sign + num_siblings) * seq.num_cached
        self._num_siblings += num_siblings
        if seq.request.is_beam:
            self._num_beams += num_siblings

    def _release(self, seq: Sequence) -> None:
        """The same, and what it held is free."""
        self._stop(seq)
        self.allocator.free(seq)
        if seq.siblings:
            for sibling in seq.siblings:
                self.allocator.free(sibling)
            self._forks.forget(seq)
