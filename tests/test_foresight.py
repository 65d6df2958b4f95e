"""Clairvoyant admission against its definition, and who is preempted."""

from __future__ import annotations

import random
from typing import ClassVar

import numpy as np
import pytest

from kvbench.allocators.contiguous import Contiguous
from kvbench.allocators.paged import Paged
from kvbench.clock import VirtualClock
from kvbench.core import KvbenchError, Request
from kvbench.engine import Engine, serve
from kvbench.ledger import Ledger
from kvbench.reservation import Clairvoyant, OnDemand, Reservation
from kvbench.runners.simulated import IterationCosts, Simulated
from kvbench.schedulers.base import MissingCorner
from kvbench.schedulers.iteration_level import IterationLevel, Victim


class Own:
    """A reservation that somebody plugs in: it foresees, under another name."""

    name: ClassVar[str] = "own"
    uses_true_lengths: ClassVar[bool] = True
    grows: ClassVar[bool] = True
    fits_slabs: ClassVar[bool] = False
    foresees: ClassVar[bool] = True

    def slots(self, request: Request, max_model_len: int) -> int:
        return 0


class OwnOfSlabs:
    """One that asks for all, under another name."""

    name: ClassVar[str] = "own"
    uses_true_lengths: ClassVar[bool] = False
    grows: ClassVar[bool] = False
    fits_slabs: ClassVar[bool] = True
    foresees: ClassVar[bool] = False

    def slots(self, request: Request, max_model_len: int) -> int:
        return max_model_len


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


def test_a_plug_in_can_foresee() -> None:
    rng = random.Random(2)
    requests = [Request(index, 0.0, rng.randint(1, 12), rng.randint(1, 20)) for index in range(25)]
    own, ours, blind = (serve(engine_of(each, 30, 4), requests) for each in (Own(), Clairvoyant(), OnDemand()))
    for name, column in ours.steps.items():
        np.testing.assert_array_equal(own.steps[name], column, err_msg=name)
    assert blind.steps["num_preempted"].any()
    assert IterationLevel(Paged(400, 4), Own(), 64).keep == 0 < IterationLevel(Paged(400, 4), OnDemand(), 64).keep


def test_a_plug_in_can_fit_slabs() -> None:
    scheduler = IterationLevel(Contiguous(200, 64), OwnOfSlabs(), 64)
    engine = Engine(scheduler, Simulated(IterationCosts(1000, 0, 0, 0, 0)), VirtualClock(), Ledger(scheduler.allocator))
    steps = serve(engine, [Request(0, 0.0, 4, 4), Request(1, 0.0, 4, 4)]).steps
    granted = np.sum([steps[name] for name in ("token_states", "reserved", "overreserved")], axis=0)
    assert set(granted) == {128}
    with pytest.raises(MissingCorner, match="reservation=own does not exist for Contiguous"):
        IterationLevel(Contiguous(200, 64), Own(), 64)
