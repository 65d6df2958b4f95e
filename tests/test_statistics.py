"""Intervals whose truth is known, a queue that has a formula, and how many runs pairing saves."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from scipy.special import stdtrit

from kvbench.allocators.paged import Paged
from kvbench.clock import VirtualClock
from kvbench.core import KvbenchError, Request
from kvbench.engine import Engine, serve
from kvbench.ledger import Ledger
from kvbench.metrics import summarize
from kvbench.reservation import OnDemand
from kvbench.runners.simulated import IterationCosts, Simulated
from kvbench.schedulers.iteration_level import IterationLevel
from kvbench.statistics import (
    Interval,
    bootstrap_interval,
    geometric_mean,
    growth_score,
    has_grown,
    intervals_by,
    mean_interval,
    mean_levels,
    mser,
    named,
    num_replications,
    paired_difference,
    paired_ratio,
    t_interval,
    unpaired_difference,
    warm_up,
)
from tests.queues import SERVICE_S, arrivals_s, departures_s

LOADS = (0.5, 0.8)


def mean_wait_s(load: float) -> float:
    """M/D/1: Pollaczek and Khinchine's formula with constant service."""
    return load * SERVICE_S / (2 * (1 - load))


def steady_wait_s(load: float, duration_s: float, seed: int, service_s: float = SERVICE_S) -> float:
    """Mean wait of the requests that arrive after the warm-up."""
    up = arrivals_s(load, duration_s, seed)
    down = departures_s(up, service_s)
    return float(np.mean((down - up - service_s)[up >= warm_up(up, down, float(up[-1])).end_s]))


# Intervals


def test_t_interval_is_the_textbooks() -> None:
    # Law, example 9.14: ten replications, 90 %.
    values = [1.53, 1.66, 1.24, 2.34, 2.00, 1.69, 2.69, 2.86, 1.70, 2.60]
    found = t_interval(values, 0.9)
    assert found.value == pytest.approx(np.mean(values))
    assert (found.high - found.low) / 2 == pytest.approx(1.833 * np.std(values, ddof=1) / math.sqrt(10), rel=1e-3)
    assert found.num == 10
    assert 2.0 in found
    assert 3.0 not in found


def test_one_run_has_no_interval() -> None:
    for function in (t_interval, bootstrap_interval):
        found = function([2.0])
        assert (found.value, found.num) == (2.0, 1)
        assert math.isnan(found.low)
        assert math.isnan(found.high)
        assert str(found) == "2 (one run)"
    assert str(Interval(1.833, 1.81, 1.849, 8)) == "1.83 [1.81, 1.85]"


@pytest.mark.parametrize("interval", [t_interval, bootstrap_interval])
def test_intervals_without_spread_have_no_width(interval: Callable[[list[float]], Interval]) -> None:
    assert interval([3.0] * 4) == Interval(3.0, 3.0, 3.0, 4)


def test_bootstrap_covers_a_mean_and_is_the_same_twice() -> None:
    drawn = np.random.default_rng(0).standard_normal((200, 20))
    found = [bootstrap_interval(row, num_resamples=400) for row in drawn]
    assert 0.88 <= np.mean([0.0 in each for each in found]) <= 0.98
    assert bootstrap_interval(drawn[0]) == bootstrap_interval(drawn[0])


def test_means_and_ratios_have_the_intervals_that_are_asked_for() -> None:
    first, second = np.random.default_rng(2).lognormal(size=(2, 12))
    assert mean_interval(first) == t_interval(first)
    with intervals_by("bootstrap"):
        assert mean_interval(first) == bootstrap_interval(first) != t_interval(first)
        logs = bootstrap_interval(np.log(first / second))
        assert paired_ratio(first, second) == pytest.approx(geometric_mean(first / second))
        assert paired_ratio(first, second)[:3] == pytest.approx(np.exp(logs[:3]))
        assert paired_difference(first, second) == bootstrap_interval(first - second)
        assert named() == "95 % bootstrap intervals"
        assert math.isnan(mean_interval([2.0]).low)
        with pytest.raises(KvbenchError, match="repeats=9: interval=bootstrap is too narrow then; give 10 or more"):
            mean_interval(first[:9])
    assert mean_interval(first) == t_interval(first)
    assert named() == "95 % intervals"


def test_pairs_take_out_what_both_share() -> None:
    rng = np.random.default_rng(1)
    shared = 10 + rng.standard_normal(8)
    first, second = shared + 0.01 * rng.standard_normal(8) + 0.2, shared + 0.01 * rng.standard_normal(8)
    assert 0.2 in paired_difference(first, second)
    assert 0.0 not in paired_difference(first, second)
    assert 0.0 in unpaired_difference(first, second)
    with pytest.raises(ValueError, match="8 replications cannot be paired with 7"):
        paired_difference(first, second[:7])


def test_ratios_of_a_chain_multiply() -> None:
    rng = np.random.default_rng(2)
    one, two, three = (np.exp(rng.standard_normal(6)) for _ in range(3))
    ratio = paired_ratio(one, two)
    assert paired_ratio(two, one).low == pytest.approx(1 / ratio.high)
    assert ratio.value * paired_ratio(two, three).value == pytest.approx(paired_ratio(one, three).value)
    with pytest.raises(ValueError, match="above 0"):
        paired_ratio([1.0, 0.0], [1.0, 1.0])


# Warm-up and growth


def test_mser_finds_where_a_jump_ends() -> None:
    noise = np.random.default_rng(3).standard_normal(500)
    dropped, is_found = mser(np.where(np.arange(500) < 60, -8.0, 0.0) + noise)
    assert is_found
    assert 60 <= dropped <= 65
    assert mser(np.where(np.arange(500) < 60, 8.0, 0.0) + noise) == (0, True)  # a burst belongs to the run
    assert mser(np.zeros(500)) == (0, True)
    assert mser(np.arange(500.0) + noise)[1] is False


def test_mean_levels_are_the_integral() -> None:
    found = mean_levels(np.array([0.0, 1.0, 1.5]), np.array([2.0, 1.25, 4.0]), np.array([0.0, 1.0, 2.0, 4.0]))
    assert found == pytest.approx([1.0, 1.0 + 0.25 + 0.5, 1.0])


def test_a_warm_up_is_five_residences_and_at_most_half() -> None:
    up = arrivals_s(0.5, 2000, 0)
    down = departures_s(up)
    warm = warm_up(up, down, 2000.0)
    assert warm.is_found
    assert warm.is_long
    assert warm.end_s >= 5 * np.mean(down - up)
    assert warm_up(up, up + 300, 2000.0) == (1000.0, True, False)


@pytest.mark.parametrize(
    ("load", "share"), [(0.5, (0.0, 0.0)), (0.9, (0.0, 0.05)), (1.0, (0.0, 0.15)), (1.1, (0.8, 1))]
)
def test_growth_is_seen_where_there_is_some(load: float, share: tuple[float, float]) -> None:
    grown = []
    for seed in range(100):
        up = arrivals_s(load, 1000, seed)
        grown.append(has_grown([growth_score(up, departures_s(up), 50.0, 1000.0)]))
    assert share[0] <= np.mean(grown) <= share[1]


def test_few_requests_are_no_growth_though_the_last_has_just_arrived() -> None:
    scores = []
    for seed in range(100):
        up = arrivals_s(0.02, 2000, seed)
        scores.append(growth_score(up, departures_s(up), 50.0, float(up[-1])))
    assert abs(np.mean(scores)) < 0.1
    assert not has_grown(scores)


def test_replications_see_growth_that_a_single_run_does_not() -> None:
    alone, together = [], []
    for start in range(20):
        scores = []
        for seed in range(8 * start, 8 * start + 8):
            up = arrivals_s(1.05, 1000, seed)
            scores.append(growth_score(up, departures_s(up), 50.0, 1000.0))
        alone += [has_grown([score]) for score in scores]
        together.append(has_grown(scores))
    assert np.mean(alone) < 0.6
    assert np.mean(together) > 0.9


# A queue with a known answer


@pytest.mark.parametrize("load", LOADS)
def test_the_engine_is_the_queue_of_the_formula(load: float) -> None:
    """One sequence at a time, fixed service: the recursion below may stand for the engine."""
    up = arrivals_s(load, 2000, 7)
    allocator = Paged(1600)
    scheduler = IterationLevel(allocator, OnDemand(), max_model_len=16, max_num_seqs=1)
    runner = Simulated(IterationCosts(1000 * SERVICE_S, 0, 0, 0, 0), bytes_per_slot=1)
    engine = Engine(scheduler, runner, VirtualClock(), Ledger(allocator))
    record = serve(engine, [Request(i, float(at), 1, 1) for i, at in enumerate(up)])
    assert record.requests["finish_s"].astype(float) == pytest.approx(departures_s(up), abs=1e-6)
    steady = summarize(record, allocator.num_slots)["steady_normalized_latency_mean_s"]
    assert steady == pytest.approx(steady_wait_s(load, 2000, 7) + SERVICE_S, abs=1e-6)


@pytest.mark.parametrize("load", LOADS)
def test_intervals_cover_the_formulas_mean_wait(load: float) -> None:
    """95 % intervals of 8 replications each: the first holds the formula's value, as do 90 to 98 % of 200."""
    duration_s = 4000.0
    found = [
        t_interval([steady_wait_s(load, duration_s, seed) for seed in range(8 * start, 8 * start + 8)])
        for start in range(200)
    ]
    assert mean_wait_s(load) in found[0]
    assert 0.90 <= np.mean([mean_wait_s(load) in each for each in found]) <= 0.98


# What pairing saves


def test_pairing_finds_two_percent_with_a_quarter_of_the_runs() -> None:
    """Two systems, of which one makes requests wait 2 % longer, by the formula; 90 % power, 95 % confidence."""
    load, difference = 0.5, 0.02 * mean_wait_s(0.5)
    # load * s**2 / (2 * (1 - load * s)) = 1.02 * mean_wait_s(load)
    slower_s = -1.02 * mean_wait_s(load) + math.sqrt((1.02 * mean_wait_s(load)) ** 2 + 2.04 * mean_wait_s(load) / load)
    fast, slow = (
        np.array([steady_wait_s(load, 2000, seed, service_s) for seed in range(1000)]) for service_s in (1.0, slower_s)
    )
    assert slow.mean() - fast.mean() == pytest.approx(difference, rel=0.1)
    paired = num_replications(float(np.std(slow - fast, ddof=1)), difference)
    unpaired = num_replications(math.hypot(np.std(slow, ddof=1), np.std(fast, ddof=1)), difference)
    assert paired <= unpaired / 4
    groups = [slice(start, start + paired) for start in range(0, 1000 - paired, paired)]
    found = [0.0 not in paired_difference(slow[group], fast[group]) for group in groups]
    missed = [
        0.0 in unpaired_difference(slow[here], fast[there])
        for here, there in zip(groups, groups[1:] + groups[:1], strict=True)
    ]
    assert np.mean(found) > 0.8
    assert np.mean(missed) > 0.5


def test_num_replications_gives_the_power_it_promises() -> None:
    n = num_replications(1.0, 0.5, power=0.8)
    assert n == 34  # tables of the paired t-test
    rng = np.random.default_rng(4)
    data = 0.5 + rng.standard_normal((4000, n))
    scores = data.mean(axis=1) / (data.std(axis=1, ddof=1) / math.sqrt(n))
    assert np.mean(np.abs(scores) > stdtrit(n - 1, 0.975)) == pytest.approx(0.8, abs=0.03)
    assert num_replications(0.0, 0.5) == 2
    assert num_replications(1.0, 1e-9, most=50) == 50
