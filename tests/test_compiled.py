"""The compiled loop against the engine, to the last bit."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvbench import compiled
from kvbench.allocators.base import Allocator
from kvbench.allocators.buddy import Buddy
from kvbench.allocators.contiguous import Contiguous
from kvbench.allocators.first_fit import FirstFit
from kvbench.allocators.paged import Paged
from kvbench.clock import VirtualClock
from kvbench.core import Request
from kvbench.engine import Engine, serve
from kvbench.ledger import Ledger
from kvbench.records import Record
from kvbench.reservation import Clairvoyant, Max, OnDemand, Oracle, Pow2, Reservation
from kvbench.runners.simulated import IterationCosts, Simulated
from kvbench.schedulers.iteration_level import IterationLevel
from kvbench.workloads.arrivals import Paper
from kvbench.workloads.lengths import ShareGPT
from kvbench.workloads.synthetic import Synthetic

COSTS = IterationCosts(28.2, 7.9e-4, 0.22, 0.109, 8.1e-6, 0.37, 3, weights_ms=20.0, alone_ms=0.083)
MAX_MODEL_LEN = 64
Build = Callable[[random.Random], tuple[Allocator, Reservation]]
PLACEMENTS: dict[str, Build] = {
    "paged": lambda rng: (Paged(rng.randint(96, 300), rng.choice([1, 3, 4, 16])), OnDemand()),
    "paged clairvoyant": lambda rng: (Paged(rng.randint(96, 300), rng.choice([1, 3, 4, 16])), Clairvoyant()),
    "paged oracle": lambda rng: (Paged(rng.randint(96, 300), rng.choice([1, 4, 16])), Oracle()),
    "buddy max": lambda rng: (Buddy(rng.randint(96, 600), 4, MAX_MODEL_LEN), Max()),
    "buddy pow2": lambda rng: (Buddy(rng.randint(96, 600), rng.choice([1, 4, 8]), MAX_MODEL_LEN), Pow2()),
    "buddy oracle": lambda rng: (Buddy(rng.randint(96, 600), 4, MAX_MODEL_LEN), Oracle()),
    "first fit oracle": lambda rng: (FirstFit(rng.randint(96, 600), rng.choice([1, 4])), Oracle()),
    "first fit pow2": lambda rng: (FirstFit(rng.randint(96, 600)), Pow2()),
}


def engine(allocator: Allocator, reservation: Reservation, max_num_seqs: int = 256, max_tokens: int = 2560) -> Engine:
    scheduler = IterationLevel(allocator, reservation, MAX_MODEL_LEN, max_num_seqs, max_tokens)
    return Engine(scheduler, Simulated(COSTS), VirtualClock(), Ledger(allocator))


def assert_same(found: Record, expected: Record) -> None:
    for mine, theirs in ((found.steps, expected.steps), (found.requests, expected.requests)):
        assert list(mine) == list(theirs)
        for name, column in theirs.items():
            assert mine[name].dtype == column.dtype, name
            np.testing.assert_array_equal(mine[name], column, err_msg=name)


@pytest.mark.parametrize("name", PLACEMENTS)
def test_records_are_those_of_the_engine(name: str) -> None:
    rng = random.Random(name)
    num_preemptions = num_refused = 0
    for _ in range(120):
        rate = rng.choice([1.0, 10.0, 100.0])
        arrival_s, requests = 0.0, []
        for index in range(rng.randint(1, 60)):
            arrival_s += rng.expovariate(rate) if rng.random() < 0.9 else 0.0
            prompt_len = rng.randint(1, 40)
            requests.append(Request(index, arrival_s, prompt_len, rng.randint(1, MAX_MODEL_LEN - prompt_len)))
        limits = rng.choice([3, 256]), rng.choice([64, 2560])
        seed = rng.random()
        mine, theirs = (engine(*PLACEMENTS[name](random.Random(seed)), *limits) for _ in range(2))
        found, expected = compiled.serve(mine, requests, 0), serve(theirs, requests)
        if found is None:
            assert theirs.rejected
            num_refused += 1
            continue
        assert_same(found, expected)
        num_preemptions += int(expected.requests["num_preemptions"].sum())
    assert (num_preemptions > 500) == (name == "paged")
    assert num_refused < 60


@pytest.mark.parametrize("name", ["paged", "buddy", "first fit"])
def test_records_of_a_paper_trace_are_those_of_the_engine(name: str) -> None:
    """ShareGPT at 13B's pool, more than any system serves: long queues, hundreds of preemptions."""
    lengths = ShareGPT(Path("nowhere"), pairs="histogram")
    requests = Synthetic("sharegpt", lengths, Paper(), 2048, request_rate=4.0, duration_s=300.0).generate().requests
    assert len(requests) > 1000
    placements: dict[str, Callable[[], IterationLevel]] = {
        "paged": lambda: IterationLevel(Paged(15728), OnDemand(), 2048),
        "buddy": lambda: IterationLevel(Buddy(15728), Pow2(), 2048),
        "first fit": lambda: IterationLevel(FirstFit(15728), Oracle(), 2048),
    }
    mine, theirs = (placements[name]() for _ in range(2))
    costs = IterationCosts(28.2, 7.9e-4, 0.22, 0.109, 8.1e-6, 0.37, 40)
    engines = [Engine(each, Simulated(costs), VirtualClock(), Ledger(each.allocator)) for each in (mine, theirs)]
    found = compiled.serve(engines[0], requests, 0)
    assert found is not None
    assert_same(found, serve(engines[1], requests))


def test_what_it_does_not_cover_is_left_to_the_engine() -> None:
    class Own(Paged):
        pass

    class Grows(Oracle):
        grows = True

    class Foresees(Oracle):
        foresees = True

    def found(allocator: Allocator, reservation: Reservation, *requests: Request) -> bool:
        return compiled.serve(engine(allocator, reservation), requests, 0) is not None

    request = Request(0, 0.0, 5, 5)
    assert found(Paged(64, 4), OnDemand(), request)
    assert not found(Own(64, 4), OnDemand(), request)
    assert found(Paged(64, 4), Oracle(), request)
    assert not found(Paged(64, 4), Grows(), request)
    assert not found(Paged(64, 4), Foresees(), request)
    assert not found(Contiguous(128, 64), Max(), request)
    assert not found(Paged(64, 4), OnDemand(), Request(0, 0.0, 5, 5, num_seqs=2))
    assert not found(Paged(64, 4), OnDemand())
    assert compiled.serve(engine(Paged(64, 4), OnDemand()), [request]) is None
