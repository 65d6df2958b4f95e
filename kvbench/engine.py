"""The one loop under every run: admit, schedule, execute, retire, record.

Simulated and real runs differ in the runner and the clock alone.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from typing import Protocol

from kvbench.allocators.base import AllocationError, Allocator, broken_protocol, is_plug_in
from kvbench.clock import Clock
from kvbench.core import Batch, Request, Sequence, StepResult
from kvbench.ledger import Ledger
from kvbench.records import Record, request_columns
from kvbench.runners.base import Runner
from kvbench.schedulers.base import Scheduler


class Watcher(Protocol):
    """Looks on and changes nothing."""

    def watch(self, batch: Batch, result: StepResult) -> None:
        """An iteration is done and recorded; who finished in it still holds its memory."""
        ...


class Engine:
    """Serves requests with one scheduler, one runner and one clock.

    Attributes:
        sequences: every sequence that arrived, in order of arrival.
        rejected: those that can never be served, with the reason.
        watchers: who looks on.
    """

    def __init__(
        self, scheduler: Scheduler, runner: Runner, clock: Clock, ledger: Ledger, watchers: Seq[Watcher] = ()
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.clock = clock
        self.ledger = ledger
        self.sequences: list[Sequence] = []
        self.rejected: dict[Sequence, str] = {}
        self.watchers = watchers

    def run(self, requests: Iterable[Request]) -> Iterator[Batch]:
        """Serve requests, sorted by arrival, until all are finished or rejected.

        Yields:
            Each iteration's batch when it is done. It shows live state: look before asking for the next.

        Raises:
            RuntimeError: the scheduler waits although nothing runs and nothing is due: it would wait for ever.
            KvbenchError: so it does because of a plug-in allocator, or that answers what cannot be true.
        """
        scheduler, runner, clock, ledger = self.scheduler, self.runner, self.clock, self.ledger
        waiting, running, sequences, watchers = scheduler.waiting, scheduler.running, self.sequences, self.watchers
        arrivals = iter(requests)
        upcoming = next(arrivals, None)
        now = clock.now()
        while True:
            while upcoming is not None and upcoming.arrival_s <= now:
                seq = Sequence(upcoming, upcoming.prompt_len + upcoming.output_len, upcoming.prompt_len)
                if upcoming.num_seqs > 1:
                    seq.siblings = _siblings(seq)
                sequences.append(seq)
                waiting.append(seq)
                upcoming = next(arrivals, None)
            if not running and not waiting and not scheduler.swapped:
                if upcoming is None:
                    return
                now = clock.wait_until(upcoming.arrival_s)
                continue

            batch = scheduler.schedule()
            for seq in batch.preempted:
                seq.num_preemptions += 1
                seq.left_s = now
            if batch.rejected:
                self.rejected.update(batch.rejected)
            if not running:
                now = self._skip(batch, now)
                continue

            result = runner.execute(batch)
            seconds, finished = result.seconds, result.finished
            scheduled_s, now = now, clock.advance(seconds)
            ledger.record(batch, now, seconds, len(waiting))
            if batch.prefills or batch.moves:
                recomputed = _stamp(batch, scheduled_s, now)
                ledger.lose(recomputed, result.recompute_s, result.swap_s)
            for watcher in watchers:
                watcher.watch(batch, result)
            released = scheduler.commit(finished, result.parents)
            if finished or released:
                ledger.settle(finished, released)
                _finish(released, now)
            yield batch

    def _skip(self, batch: Batch, now: float) -> float:
        """A step in which nothing is left to run: no iteration, hence no row; returns the time after it."""
        if not (batch.preempted or batch.rejected):
            allocator, waiting = self.scheduler.allocator, self.scheduler.waiting
            if is_plug_in(allocator) and waiting:
                raise broken_protocol(allocator, _lacks_room(allocator, waiting[0]))
            raise RuntimeError(f"{len(waiting)} sequences wait, nothing runs and nothing was decided")
        seconds = self.runner.execute(batch).seconds if batch.moves else 0.0
        self.ledger.skip(batch, seconds)
        return self.clock.advance(seconds) if batch.moves else now


def _lacks_room(allocator: Allocator, head: Sequence) -> str:
    """What is wrong where nothing runs, yet the head of the queue has to wait."""
    return (
        f"the pool of {allocator.num_slots} slots, with no sequence in it, has no room for the {head.requested} that "
        "the next asks for, and can_allocate answered neither OK nor NEVER"
    )


def _siblings(first: Sequence) -> tuple[Sequence, ...]:
    """The other streams of its request."""
    request = first.request
    return tuple(Sequence(request, first.final_len, first.length) for _ in range(request.num_seqs - 1))


def _finish(released: Iterable[Sequence], now: float) -> None:
    """Note when they were done."""
    for seq in released:
        seq.finish_s = now


def _stamp(batch: Batch, scheduled_s: float, now: float) -> int:
    """Note first tokens, and who regained its place.

    Returns:
        Tokens that were computed again.
    """
    recomputed = 0
    for seq in batch.returned:
        seq.preempted_s += scheduled_s - seq.left_s
    for seq in batch.prefills:
        if seq.first_token_s < 0:
            seq.first_token_s = now
        else:
            seq.recomputed_tokens += seq.recompute_len
            seq.preempted_s += scheduled_s - seq.left_s
            recomputed += seq.recompute_len
    return recomputed


def serve(engine: Engine, requests: Iterable[Request]) -> Record:
    """Run to the end; returns the raw record. Raises what ``Engine.run`` does."""
    collecting = gc.isenabled()
    gc.disable()  # a run makes no cycles, and scanning its live sequences costs about a tenth of the time
    try:
        for _ in engine.run(requests):
            pass
    except AllocationError as error:
        allocator = engine.scheduler.allocator
        if not is_plug_in(allocator):
            raise
        raise broken_protocol(allocator, f"it is {error}, though it was asked whether there is room") from error
    finally:
        if collecting:
            gc.enable()
    return Record(engine.ledger.columns(), request_columns(engine.sequences))
