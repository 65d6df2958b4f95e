"""Request-level scheduling (FasterTransformer behind a dynamic batcher): a batch starts together and ends together."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as Seq

from kvbench.allocators.base import Allocator
from kvbench.core import Batch, Fit, KvbenchError, Sequence
from kvbench.reservation import Reservation
from kvbench.schedulers.base import check_at_least, check_corner


class RequestLevel:
    """When idle, take the earliest waiting requests; compute all of them until the longest output is done.

    Prompts are padded to the longest of the batch. A sequence that has finished keeps its memory, and is computed
    along, until the batch ends; then all requests are answered at once. The rules, with the batch cut that looks at the
    true output lengths, are those of the PagedAttention authors' artifact.

    Args:
        allocator: placement; called by nobody else.
        reservation: slots to guarantee at admission; one that covers the whole request.
        max_model_len: longest sequence the engine was set up for, in tokens.
        max_num_seqs: requests of a batch (the artifact's B).
        max_padded_len: a batch is cut before the request with which longest prompt + longest output pass this.

    Raises:
        KvbenchError: a combination that does not exist, a limit below 1.
    """

    uses_true_lengths = True

    def __init__(
        self,
        allocator: Allocator,
        reservation: Reservation,
        max_model_len: int,
        max_num_seqs: int,
        max_padded_len: int = 2040,
    ) -> None:
        check_corner(allocator, reservation)
        if reservation.grows:
            raise KvbenchError(
                f"reservation={reservation.name} does not exist for scheduler=request_level, which never asks again: "
                "use reservation=max, pow2 or oracle"
            )
        check_at_least("max_num_seqs", max_num_seqs, 1)
        check_at_least("max_padded_len", max_padded_len, 2)
        self.allocator = allocator
        self.reservation = reservation
        self.max_model_len = max_model_len
        self.max_num_seqs = max_num_seqs
        self.max_padded_len = min(max_padded_len, max_model_len)
        self.waiting: deque[Sequence] = deque()
        self.swapped: deque[Sequence] = deque()  # nothing is ever preempted
        self.running: dict[Sequence, None] = {}
        self.step = 0
        self._unfinished = 0
        self._held = 0  # tokens of the unfinished sequences
        self._padded_len = 0  # tokens of each sequence as the engine computes it

    def schedule(self) -> Batch:
        """Start a batch if none runs, else decode."""
        running = self.running
        if running:
            return Batch(self.step, running, len(running), len(running) * self._padded_len, token_states=self._held)
        rejected: list[tuple[Sequence, str]] = []
        prefills = self._admit(rejected)
        return Batch(
            self.step,
            running,
            0,
            0,
            prefills,
            prefill_len=self._padded_len,
            token_states=self._held,
            rejected=rejected,
        )

    def commit(self, finished: Seq[Sequence], parents: Mapping[Sequence, Seq[int]] | None = None) -> Seq[Sequence]:
        """Hold what finished; release the whole batch with its last sequence."""
        del parents
        self.step += 1
        self._held += self._unfinished
        self._padded_len += 1
        self._unfinished -= len(finished)
        for seq in finished:
            self._held -= self.step - seq.origin
        if self._unfinished:
            return ()
        released = list(self.running)
        for seq in released:
            self.allocator.free(seq)
        self.running.clear()
        return released

    def _admit(self, rejected: list[tuple[Sequence, str]]) -> list[Sequence]:
        waiting, allocator = self.waiting, self.allocator
        longest_prompt = longest_output = 0
        admitted: list[Sequence] = []
        while waiting and len(admitted) < self.max_num_seqs:
            seq = waiting[0]
            request = seq.request
            if seq.siblings:
                raise KvbenchError(
                    f"a request with {request.num_seqs} outputs: scheduler=request_level serves one for each request; "
                    "use iteration_level"
                )
            slots = max(self.reservation.slots(request, self.max_model_len), seq.length)
            fit = allocator.can_allocate(slots)
            if fit is Fit.NEVER or seq.final_len > self.max_model_len:
                reason = f"{seq.final_len} tokens: the engine is set up for {self.max_model_len}"
                rejected.append((waiting.popleft(), reason))
                continue
            prompt = max(longest_prompt, request.prompt_len)
            output = max(longest_output, request.output_len)
            if fit is Fit.LATER or (admitted and prompt + output > self.max_padded_len):
                break
            longest_prompt, longest_output = prompt, output
            seq.requested = slots
            seq.granted = allocator.allocate(seq, slots)
            seq.origin = self.step - seq.length
            self.running[seq] = None
            admitted.append(waiting.popleft())
        self._unfinished = len(admitted)
        self._held = sum(seq.length for seq in admitted)
        self._padded_len = longest_prompt
        return admitted
