"""The nouns every layer shares: requests, sequences, batches. Knows no strategy, no time, no tensors."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class KvbenchError(Exception):
    """A user's mistake or an impossible request: one or two lines that name the value, the limit and the remedy."""


class Fit(Enum):
    """An allocator's answer to "could this be granted?"; a request that is NEVER is rejected, not queued."""

    OK = "ok"
    LATER = "later"
    NEVER = "never"


@dataclass(slots=True, eq=False)
class Request:
    """A user's unit of work.

    Attributes:
        id: position in the workload, from 0, in order of arrival.
        arrival_s: seconds since the start of the trace.
        prompt_len: tokens of the prompt, at least 1.
        output_len: tokens it will generate, at least 1. Hidden from every part that does not declare
            ``uses_true_lengths``: only the runner (which must know when to stop), the ledger, oracle-like
            reservations and a request-level scheduler may look.
        num_seqs: outputs of it: parallel samples, or beams.
        is_beam: they are the beams of one search, which end together.
        prefix_len: leading tokens of its prompt that every request with a prefix shares; 0: none.
    """

    id: int
    arrival_s: float
    prompt_len: int
    output_len: int
    num_seqs: int = 1
    is_beam: bool = False
    prefix_len: int = 0

    @property
    def final_len(self) -> int:
        """Tokens of prompt and output together."""
        return self.prompt_len + self.output_len


@dataclass(slots=True, eq=False)
class Sequence:
    """One token stream of a request, compared and hashed by identity.

    The first stream of a request stands for all: its siblings are scheduled, admitted and preempted with it and are as
    long as it is. While it runs nothing in it changes from step to step: its length is ``scheduler.step - origin``.

    Attributes:
        siblings: the other streams of the same request; only the first stream has some, and only it is scheduled.
        final_len: tokens of prompt and output together; a runner that meets a stop token corrects it.
        length: tokens present while it waits (prompt, and what it had generated when it was preempted).
        origin: ``step - length`` at admission; meaningless while it waits.
        requested: slots its scheduler asked the allocator for at the last admission.
        granted: slots it got then, at least ``requested``.
        cohort: the running sequences that fill their room at the same step; a dict used as an ordered set.
        num_prefills: streams whose tokens were computed for themselves at the last admission; 1: all share the first's.
        num_cached: tokens that were there already at the last admission: those of a shared prefix.
        preempted_s: seconds between losing its memory and regaining its place, summed.
        left_s: when it was preempted last.
    """

    request: Request
    final_len: int
    length: int
    origin: int = 0
    requested: int = 0
    granted: int = 0
    cohort: dict[Sequence, None] | None = None
    num_preemptions: int = 0
    recomputed_tokens: int = 0
    preempted_s: float = 0.0
    left_s: float = 0.0
    first_token_s: float = -1.0
    finish_s: float = -1.0
    siblings: tuple[Sequence, ...] = ()
    num_prefills: int = 1
    num_cached: int = 0

    @property
    def num_streams(self) -> int:
        """How many streams the request has."""
        return 1 + len(self.siblings)

    @property
    def streams(self) -> tuple[Sequence, ...]:
        """All streams of the request, itself the first."""
        return (self, *self.siblings)

    @property
    def recompute_len(self) -> int:
        """Tokens that its last admission computes once more, in all streams: all but the newest if it was preempted."""
        return self.num_prefills * (self.length - 1) - self.num_cached if self.num_preemptions else 0


class BlockCopy(NamedTuple):
    """Copy ``num_slots`` slots of a shared block before the step writes to it (copy-on-write).

    ``src`` and ``dst`` are the first physical slots of the two blocks. A swap is described the same way: ``dst`` is
    then a slot of the host pool, or ``src`` is.
    """

    src: int
    dst: int
    num_slots: int


@dataclass(slots=True, eq=False)
class Batch:
    """What one iteration computes, as the scheduler decided it; a runner executes or prices it.

    Attributes:
        step: the scheduler's step counter.
        running: every running sequence in service order, *a live view*: copy it to keep it.
        num_decodes: sequences that generate their next token, siblings not counted; the prefills come on top.
        context_len: tokens the decodes and their siblings attend to, summed (with padding where batching pads).
        prefills: sequences computed from their first token on in this iteration.
        prefill_len: what each prefill is padded to; 0 where batching does not pad.
        token_states: tokens of the unfinished sequences and their siblings, those of the prefills included; shared ones
            count for each.
        grown: sequences that were granted more room at the start of this step: each stream can write ``gained`` tokens
            at least before it asks again.
        preempted: sequences that lost their memory at the start of this step.
        rejected: sequences that can never be served, each with the reason.
        copies: block copies the runner must do before it computes.
        num_siblings: siblings of the decodes.
        num_beams: those of them that are beams.
        prefix_len: tokens of ``context_len`` that lie in a shared prefix, summed.
        swapped: those of ``preempted`` whose tokens were moved to the host pool.
        returned: decodes whose tokens were moved back from there.
        moves: the moves of ``swapped``, or of ``returned``: never both in a step. Done first.
        prefixes: sequences of shared prefixes, to be computed before the copies; they stay.
    """

    step: int
    running: dict[Sequence, None]
    num_decodes: int
    context_len: int
    prefills: Seq[Sequence] = ()
    prefill_len: int = 0
    token_states: int = 0
    grown: Seq[Sequence] = ()
    gained: int = 0
    preempted: Seq[Sequence] = ()
    rejected: Seq[tuple[Sequence, str]] = ()
    copies: Seq[BlockCopy] = ()
    num_siblings: int = 0
    num_beams: int = 0
    prefix_len: int = 0
    swapped: Seq[Sequence] = ()
    returned: Seq[Sequence] = ()
    moves: Seq[BlockCopy] = ()
    prefixes: Seq[Sequence] = ()


@dataclass(slots=True, eq=False)
class StepResult:
    """What a runner gives back.

    Attributes:
        seconds: what the iteration took.
        finished: sequences that produced their last token, siblings included by their first stream.
        parents: of a beam search, by its first stream: beam ``i`` goes on from what was beam ``parents[i]``. Beams that
            survive stay in place; a search in which all do need not be there.
        swap_s: of ``seconds``, what it waited for swaps.
        recompute_s: of ``seconds``, what computing again cost beyond decoding the same sequences.
    """

    seconds: float
    finished: Seq[Sequence]
    parents: Mapping[Sequence, Seq[int]] | None = None
    swap_s: float = 0.0
    recompute_s: float = 0.0


@dataclass(slots=True)
class Usage:
    """An allocator's books, in slots; ``used + cached + pinned + free`` is the pool.

    ``used`` is granted to sequences (counted once physically), ``cached`` unreferenced but reusable, ``pinned`` in
    flight. ``largest_free`` is the largest request that could be granted from ``free`` now: the free memory
    itself where any block serves any sequence, the largest hole where a grant must be contiguous. ``shared`` is what
    sequences hold beyond ``used`` because they share it: a slot with n holders counts n - 1 times. ``swapped`` is held
    in the host pool.
    """

    used: int
    free: int
    largest_free: int
    cached: int = 0
    pinned: int = 0
    shared: int = 0
    swapped: int = 0
