"""The loop of ``engine`` compiled by numba, for the simulated runs of the paper: the same records, bit for bit.

It knows one request as a row of arrays, and covers what needs no more than counting: iteration-level scheduling of
requests with one output each, over paged, buddy and first-fit placement. Everything else, a plug-in above all, is run
by ``engine``; so is what somebody watches, and a trace in which some request can never be served. Nothing is decided
here that is not decided there: ``tests/test_compiled.py`` compares the two.

What makes it short: blocks are interchangeable, so paged placement is the number of free ones. A sequence that grows
asks at steps that are equal modulo the block size, so a cohort is a count.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from kvbench.allocators.buddy import Buddy
from kvbench.allocators.first_fit import FirstFit
from kvbench.allocators.paged import Paged
from kvbench.clock import VirtualClock
from kvbench.core import Request
from kvbench.engine import Engine
from kvbench.ledger import ROW
from kvbench.records import Record, request_table
from kvbench.reservation import Clairvoyant, OnDemand, Reservation
from kvbench.runners.base import Runner
from kvbench.runners.simulated import Simulated
from kvbench.schedulers.base import Scheduler
from kvbench.schedulers.iteration_level import IterationLevel

MIN_REQUESTS = 500
"""Shorter traces are about done before a compiled loop is loaded."""
_PLACEMENTS = (Paged, Buddy, FirstFit)


def covers(scheduler: Scheduler, runner: Runner) -> bool:
    """Whether these parts are known here; what else ``serve`` asks for is in the requests, and in who watches."""
    return (
        type(scheduler) is IterationLevel
        and type(scheduler.allocator) in _PLACEMENTS
        and _covers(scheduler.reservation)
        and scheduler.victim == "newest"
        and scheduler.restore != "swap"
        and type(runner) is Simulated
    )


def _covers(reservation: Reservation) -> bool:
    """Those that are a number of slots, whatever their type, and the two that are more, if they are ours."""
    return type(reservation) in (OnDemand, Clairvoyant) or not (reservation.grows or reservation.foresees)


def serve(engine: Engine, requests: Seq[Request], min_requests: int = MIN_REQUESTS) -> Record | None:
    """What ``engine.serve`` returns, in a fraction of its time; None where that has to be asked.

    Args:
        engine: one that has served nothing yet. It is left as it is: a run leaves its traces in the record alone.
        requests: sorted by arrival.
        min_requests: with fewer it is not worth loading.
    """
    scheduler, runner = engine.scheduler, engine.runner
    if (
        not covers(scheduler, runner)
        or engine.watchers
        or type(engine.clock) is not VirtualClock
        or len(requests) < max(min_requests, 1)
        or any(request.num_seqs > 1 or request.prefix_len for request in requests)
    ):
        return None
    assert isinstance(scheduler, IterationLevel)
    assert isinstance(runner, Simulated)
    from kvbench.compiled.loop import BUDDY, FIRST_FIT, PAGED, run  # takes a second, which short runs do not pay

    reservation, allocator, limit = scheduler.reservation, scheduler.allocator, scheduler.max_model_len
    wanted = [(request.prompt_len, request.output_len, reservation.slots(request, limit)) for request in requests]
    lens = np.array(wanted, np.int64).T.copy()
    arrivals = np.array([request.arrival_s for request in requests])
    order = len(allocator.heap.free) - 1 if isinstance(allocator, Buddy) else 0
    served, seconds, rows, times, counts = run(
        arrivals,
        *lens,
        runner.coefficients(),
        {Paged: PAGED, Buddy: BUDDY, FirstFit: FIRST_FIT}[type(allocator)],
        allocator.num_slots,
        allocator.block_size,
        order,
        reservation.grows,
        type(reservation) is Clairvoyant,
        scheduler.keep,
        scheduler.max_num_seqs,
        scheduler.max_num_batched_tokens,
    )
    if not served:
        return None
    stored = np.empty(len(rows), ROW)
    stored["end_s"], stored["seconds"] = seconds[:, 0], seconds[:, 1]
    for column, name in enumerate((ROW.names or ())[2:]):
        stored[name] = rows[:, column]
    engine.ledger.fill(stored, recomputed=rows[:, -1], recompute_s=seconds[:, 2])
    ids = np.array([request.id for request in requests])
    ones = np.ones(len(ids))
    table = request_table(ids, arrivals, lens[0], lens[1], ones, times[0], times[1], counts[0], counts[1], times[2])
    return Record(engine.ledger.columns(), table)
