"""Clairvoyant admission against its definition, and who is preempted."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvbench.allocators.paged import Paged
from kvbench.clock import VirtualClock
from kvbench.core import KvbenchError, Request
from kvbench.engine import Engine, serve
from kvbench.ledger import Ledger
from kvbench.reservation import Clairvoyant, OnDemand, Reservation
from kvbench.runners.simulated import IterationCosts, Simulated
from kvbench.schedulers.iteration_level import IterationLevel, Victim


def engine_of(reservation: Reservation, num_blocks: int, block_size: int, victim: Victim = "newest") -> Engine:
    allocator = Paged(num_blocks * block_size, block_size)
    scheduler = IterationLevel(allocator, reservation, 64, watermark=0.0, victim=victim)
    return Engine(scheduler, Simulated(IterationCosts(1000, 0, 0, 0, 0)), VirtualClock(), Ledger(allocator))


def test_nobody_is_preempted_and_nobody_waits_in_vain() -> None:
    """First steps are the earliest for which there is room to the end, found by trying; iterations take a second."""
    for seed in range(30):
        rng = random.Random(seed)
        block_size, num_blocks = rng.choice([1, 4]), rng.randint(20, 40)
        requests = [
            Request(index, 0.0, rng.randint(1, 12), rng.randint(1, 20 if block_size == 4 else 7)) for index in range(25)
        ]
        found = serve(engine_of(Clairvoyant(), num_blocks, block_size), requests).requests
        assert not found["num_preemptions"].any()
        held = np.zeros(10_000)
        start = 0
        for request, first_s in zip(requests, found["first_token_s"], strict=True):
            own = -(-np.arange(request.prompt_len, request.prompt_len + request.output_len) // block_size)
            while (held[start : start + len(own)] + own >= num_blocks).any():
                start += 1
            held[start : start + len(own)] += own
            assert first_s == start + 1


def test_what_is_not_foreseen_is_refused() -> None:
    with pytest.raises(KvbenchError, match="one output and no shared prefix"):
        serve(engine_of(Clairvoyant(), 20, 4), [Request(0, 0.0, 4, 4, num_seqs=2)])
    engine = engine_of(Clairvoyant(), 5, 4)
    found = serve(engine, [Request(0, 0.0, 4, 20), Request(1, 0.0, 4, 4)]).requests
    assert [seq.request.id for seq in engine.rejected] == [0]
    assert np.isnan(found["finish_s"][0])
    assert found["finish_s"][1] == 4


def test_the_victim_is_the_one_that_was_asked_for() -> None:
    """Three requests fill nine blocks of 1; in step 1 there is no room for any of them to grow."""
    late = [Request(0, 0.0, 3, 3), Request(1, 0.0, 4, 3), Request(2, 0.0, 2, 3)]
    for victim, expected in (("newest", 2), ("oldest", 0), ("largest", 1)):
        batches = engine_of(OnDemand(), 9, 1, victim).run(late)  # type: ignore[arg-type]
        assert next(batch.preempted[0].request.id for batch in batches if batch.preempted) == expected
    with pytest.raises(KvbenchError, match=r"scheduler\.victim=smallest"):
        engine_of(OnDemand(), 9, 1, "smallest")  # type: ignore[arg-type]


def test_the_preempted_wait_in_order_of_arrival() -> None:
    rng = random.Random(1)
    arrival_s = 0.0
    requests = []
    for index in range(200):
        arrival_s += rng.expovariate(2.0)
        requests.append(Request(index, arrival_s, rng.randint(1, 10), rng.randint(1, 30)))
    for victim in ("newest", "oldest", "largest"):
        engine = engine_of(OnDemand(), 100, 1, victim)  # type: ignore[arg-type]
        num_preempted = 0
        for batch in engine.run(requests):
            num_preempted += len(batch.preempted)
            arrivals = [seq.request.arrival_s for seq in engine.scheduler.waiting]
            assert arrivals == sorted(arrivals)
        assert num_preempted > 20
