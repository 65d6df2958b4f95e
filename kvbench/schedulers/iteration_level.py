"""Iteration-level scheduling (Orca, vLLM): first come first served, prompts and decodes in one iteration.

Speed follows from one rule: what grows by one per step is a difference from the step counter, and a sequence is
touched only when something happens to it. Sequences that fill their room at the same step form a cohort, filed in
``calendar`` under that step; one call then makes room for all of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq

from kvbench.allocators.base import Allocator
from kvbench.core import Batch, BlockCopy, Fit, KvbenchError, Sequence
from kvbench.reservation import Reservation
from kvbench.schedulers.base import check_at_least, check_corner

OK, NEVER = Fit.OK, Fit.NEVER  # looked up in the loop


class IterationLevel:
    """FCFS with preemption of the latest by recomputation, as the PagedAttention authors' artifact schedules.

    * Before a step every running sequence, oldest first, must see room for one token more; while there is none, the
      newest that was not served yet is preempted: it loses its memory, keeps its tokens and goes to the front of the
      queue. In such a step nothing is admitted.
    * Then the head of the queue is admitted as long as the limits and the memory allow. Memory is first asked for when
      something was released since it last said LATER.

    Args:
        allocator: placement; called by nobody else.
        reservation: slots to guarantee at admission.
        max_model_len: longest sequence of the model, in tokens.
        max_num_seqs: sequences that may run at once.
        max_num_batched_tokens: tokens of one iteration: a decode is one, a prefill its whole length.
        watermark: share of the pool's blocks that admission leaves free, rounded down to whole blocks. None: 0.01
            where the reservation grows, 0 where it never asks again (the artifact's values).

    Raises:
        KvbenchError: a combination that does not exist, a limit below 1, a watermark outside [0, 1).
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
    ) -> None:
        check_corner(allocator, reservation)
        check_at_least("max_num_seqs", max_num_seqs, 1)
        check_at_least("max_num_batched_tokens", max_num_batched_tokens, 1)
        if watermark is None:
            watermark = 0.01 if reservation.grows else 0.0
        if not 0 <= watermark < 1:
            raise KvbenchError(f"scheduler.watermark={watermark} is not a share of the pool; give 0 to 1, 1 excluded")
        self.allocator = allocator
        self.reservation = reservation
        self.max_model_len = max_model_len
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.keep = int(watermark * (allocator.num_slots // allocator.block_size)) * allocator.block_size
        self.waiting: deque[Sequence] = deque()
        self.running: dict[Sequence, None] = {}
        self.calendar: dict[int, dict[Sequence, None]] = {}
        self.step = 0
        self.context_len = 0  # tokens of all running sequences
        self.blocked = False  # the head did not fit, and nothing was released since
        self._grows = reservation.grows
        self._rejected: list[tuple[Sequence, str]] = []

    def schedule(self) -> Batch:
        """Make room for the running sequences, then admit."""
        step = self.step
        grown: Seq[Sequence] = ()
        preempted: Seq[Sequence] = ()
        gained = 0
        copies: list[BlockCopy] = []
        if self._grows:
            cohort = self.calendar.pop(step, None)
            if cohort:
                if self.allocator.can_append(len(cohort) + 1):
                    gained = self.allocator.append(cohort, copies)
                    grown = tuple(cohort)
                    self._file(cohort, step + gained)
                else:
                    grown, gained, preempted = self._grow_in_order(cohort, copies)
            elif self.running and not self.allocator.can_append(1):
                preempted = (self._preempt(),)
        num_decodes = len(self.running)
        context_len = self.context_len
        prefills: Seq[Sequence] = ()
        rejected: Seq[tuple[Sequence, str]] = ()
        if self.waiting and not (self.blocked or preempted):
            prefills = self._admit()
            if self._rejected:
                rejected, self._rejected = self._rejected, []
        return Batch(  # by position: keywords cost half a microsecond in every step
            step,
            self.running,
            num_decodes,
            context_len,
            prefills,
            0,
            self.context_len,
            grown,
            gained,
            preempted,
            rejected,
            copies,
        )

    def commit(self, finished: Seq[Sequence]) -> Seq[Sequence]:
        """Release what finished at once."""
        running = self.running
        self.context_len += len(running)
        self.step += 1
        for seq in finished:
            del running[seq]
            self._release(seq)
        return finished

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

    def _admit(self) -> list[Sequence]:
        """Move the head of the queue into service until something stops it."""
        allocator, calendar, waiting, running = self.allocator, self.calendar, self.waiting, self.running
        step, keep, grows, max_num_tokens = self.step, self.keep, self._grows, self.max_num_batched_tokens
        num_tokens = len(running)
        num_free = self.max_num_seqs - num_tokens
        admitted: list[Sequence] = []
        while waiting and len(admitted) < num_free:
            seq = waiting[0]
            length = seq.length
            if num_tokens + length > max_num_tokens:
                if length > max_num_tokens:
                    self._reject(f"{length} tokens to compute at once exceed max_num_batched_tokens={max_num_tokens}")
                    continue
                break  # not `blocked`: the budget is new in every step
            slots = max(self.reservation.slots(seq.request, self.max_model_len), length)
            fit = allocator.can_allocate(slots, keep)
            if fit is not OK:
                if fit is NEVER:
                    self._reject(f"{slots} slots do not fit the empty pool of {allocator.num_slots}, {keep} kept free")
                    continue
                self.blocked = True
                break
            num_tokens += length
            seq.requested = slots
            seq.granted = granted = allocator.allocate(seq, slots)
            seq.origin = origin = step - length
            if grows:
                due = origin + granted + 1
                cohort = calendar.get(due)
                if cohort is None:
                    cohort = calendar[due] = {}
                cohort[seq] = None
                seq.cohort = cohort
            running[seq] = None
            self.context_len += length
            admitted.append(seq)
            waiting.popleft()
        return admitted

    def _reject(self, reason: str) -> None:
        """Drop the head of the queue for good."""
        self._rejected.append((self.waiting.popleft(), reason))

    def _preempt(self) -> Sequence:
        """The newest running sequence goes back to the front of the queue."""
        seq = self.running.popitem()[0]
        self._release(seq)
        self.waiting.appendleft(seq)
        return seq

    def _release(self, seq: Sequence) -> None:
        seq.length = length = self.step - seq.origin
        self.context_len -= length
        cohort = seq.cohort
        if cohort is not None:
            del cohort[seq]
            seq.cohort = None
        self.allocator.free(seq)
        self.blocked = False

    def _file(self, cohort: dict[Sequence, None], due: int) -> None:
        """Put a cohort under the step at which it needs room again, merged with one that is there already."""
        there = self.calendar.get(due)
        if there is None:
            self.calendar[due] = cohort
            return
        there.update(cohort)
        for seq in cohort:
            seq.cohort = there
