"""How long points will take."""

from __future__ import annotations

from typing import Any

import pytest

from kvbench.estimate import PER_POINT_S, PER_REQUEST_S, PER_SEARCH, Estimate, arrivals_s, num_requests, rule_s
from kvbench.point import Point


def config(seed: int = 0, real: bool = False, metric: str | None = None, **workload: Any) -> dict[str, Any]:
    runner = {"real_clock": real}
    return {"seed": seed, "metric": metric, "runner": runner, "workload": {"seed": seed, **workload}}


def point(**given: Any) -> Point:
    return Point(config(**given), {}, repr(given))


@pytest.mark.parametrize(
    ("workload", "count", "seconds"),
    [
        ({"request_rate": 2.0, "duration_s": 30.0}, 60, 30),
        ({"request_rate": 2.0, "num_requests": 40}, 40, 20),
        ({"request_rate": 2.0, "duration_s": 30.0, "num_requests": 40}, 40, 20),
        ({"num_requests": 7}, 7, 0),
        ({}, 10_000, 0),
    ],
)
def test_what_a_workload_says(workload: dict[str, Any], count: float, seconds: float) -> None:
    assert num_requests(config(**workload)) == count
    assert arrivals_s(config(**workload)) == seconds


def test_the_rule_of_thumb() -> None:
    per_request = rule_s(config(num_requests=1001)) - rule_s(config(num_requests=1))
    assert per_request == pytest.approx(1000 * PER_REQUEST_S)
    assert rule_s(config(num_requests=10, num_samples=4)) == pytest.approx(PER_POINT_S + 40 * PER_REQUEST_S)
    assert rule_s(config(num_requests=1, metric="ttft_p99_s")) == pytest.approx(
        PER_POINT_S + PER_SEARCH * PER_REQUEST_S
    )
    assert rule_s(config(real=True, request_rate=1.0, duration_s=60.0)) == 60


def test_replications_take_what_their_like_took() -> None:
    learnt = Estimate([(point(seed=0, num_requests=5), 3.0), (point(seed=1, num_requests=5), 5.0)])
    assert learnt.seconds(point(seed=7, num_requests=5)) == 4.0
    assert learnt.source == "from 2 finished points"


def test_others_take_what_the_rule_says_times_what_it_was_wrong_by() -> None:
    done = point(num_requests=1000)
    learnt = Estimate([(done, 7 * rule_s(done.config))])
    other = point(num_requests=5000)
    assert learnt.seconds(other) == pytest.approx(7 * rule_s(other.config))
    assert Estimate([]).seconds(other) == rule_s(other.config)
    assert "rule of thumb" in Estimate([]).source
