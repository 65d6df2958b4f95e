"""Bounds: by hand on requests that are all alike, and above everything that the simulator reaches."""

from __future__ import annotations

import numpy as np
import pytest

from kvbench.allocators.paged import Paged
from kvbench.bounds import Demand, roofline, zero_waste
from kvbench.capacity import Hardware, Model
from kvbench.clock import VirtualClock
from kvbench.core import Request
from kvbench.engine import Engine, serve
from kvbench.ledger import Ledger
from kvbench.reservation import Clairvoyant, OnDemand, Oracle, Reservation
from kvbench.runners.simulated import IterationCosts, Simulated
from kvbench.schedulers.iteration_level import IterationLevel

ALIKE = Demand.of(np.full(3, 10.0), np.full(3, 5.0))


def test_what_a_request_takes() -> None:
    assert Demand(10, 100, 5, 10 + 11 + 12 + 13 + 14) == ALIKE
    both = Demand.of(np.array([10.0, 1.0]), np.array([5.0, 1.0]))
    assert both == Demand(5.5, 50.5, 3, 30.5)


def test_zero_waste_by_hand() -> None:
    """A pool of 60 slots holds one request's token-iterations in an iteration: 5 requests of each age."""
    costs = IterationCosts(a_ms=20, b_ms=0.1, c_ms=1, p_ms=0.5, q_ms=0.01)
    assert zero_waste(ALIKE, costs, 60) == pytest.approx(1e3 / (20 + 0.1 * 50 + 5 + 0.5 * 10 + 0.01 * 100))
    above = IterationCosts(a_ms=20, b_ms=0.1, c_ms=1, p_ms=0.5, q_ms=0.01, c_large_ms=2, c_knee=3)
    assert zero_waste(ALIKE, above, 60) == pytest.approx(1e3 / (20 + 0.1 * 50 + 3 + 2 * 2 + 0.5 * 10 + 0.01 * 100))


def test_a_batch_is_no_larger_than_is_good() -> None:
    """Beyond three requests each costs more than its share of an iteration saves: iterations of three are best."""
    costs = IterationCosts(a_ms=2, b_ms=0, c_ms=1, p_ms=0, q_ms=0, c_large_ms=9, c_knee=3)
    iterations = 5 / 3
    assert zero_waste(ALIKE, costs, 60) == pytest.approx(1e3 / (2 * iterations + 5))
    assert zero_waste(ALIKE, costs, 20) == pytest.approx(1e3 / (2 * 3 + 5))  # the pool holds fewer


@pytest.mark.parametrize("reservation", [OnDemand(), Oracle(), Clairvoyant()])
def test_no_saturated_run_beats_zero_waste(reservation: Reservation) -> None:
    """All requests wait from the start; the pool is as full as each reservation can keep it."""
    rng = np.random.default_rng(1)
    prompts, outputs = rng.integers(1, 60, 600), rng.integers(1, 120, 600)
    requests = [Request(i, 0.0, int(p), int(o)) for i, (p, o) in enumerate(zip(prompts, outputs, strict=True))]
    costs = IterationCosts(20, 1e-2, 0.3, 0.1, 1e-4, 0.6, 10)
    allocator = Paged(2048, 16)
    engine = Engine(IterationLevel(allocator, reservation, 256), Simulated(costs), VirtualClock(), Ledger(allocator))
    rate = 600 / serve(engine, requests).requests["finish_s"].max()
    bound = zero_waste(Demand.of(prompts.astype(float), outputs.astype(float)), costs, 2048)
    assert 0.5 * bound < rate < bound


def test_roofline_by_hand() -> None:
    model = Model("m", "opt", 2, 4, 1, 1, 4, 16, 10, 1000, 64, "float16")
    slot = model.bytes_per_slot
    hardware = Hardware("h", "gpu", 2, 10**9, gpu_gb_per_s=1e-3, gpu_tflops=1.0)
    assert roofline(ALIKE, model, hardware, 30) == pytest.approx(2e6 / (2 * 2000 + 60 * slot))
    slow = Hardware("h", "gpu", 2, 10**9, gpu_gb_per_s=1e3, gpu_tflops=1e-6)
    assert roofline(ALIKE, model, slow, 30) == pytest.approx(2e6 / (2 * 1000 * 14))
    assert roofline(ALIKE, model, Hardware("h", "gpu", 2, 10**9), 30) is None
