"""How long points will take."""

from __future__ import annotations

from typing import Any

import pytest

from kvbench import compiled
from kvbench.composition import Composer, parse
from kvbench.estimate import (
    BEAMS,
    COMPILED,
    MAPPED,
    PER_SEARCH,
    STEPPED,
    Estimate,
    Pace,
    arrivals_s,
    num_iterations,
    num_requests,
    pace,
    rule_s,
)
from kvbench.parts import build
from kvbench.point import Point
from tests.extras import NEEDS_MODELS


def config(compose: Composer, *typed: str) -> dict[str, Any]:
    (settings,) = parse(list(typed), sweep=False)
    return compose.resolve(settings).point


def point(compose: Composer, *typed: str) -> Point:
    return Point(config(compose, *typed), {}, repr(typed))


@pytest.mark.parametrize(
    ("workload", "count", "seconds", "iterations"),
    [
        ({"request_rate": 2.0, "duration_s": 30.0}, 60, 30, 1000),
        ({"request_rate": 2.0, "num_requests": 40}, 40, 20, 2000 / 3),
        ({"request_rate": 2.0, "duration_s": 30.0, "num_requests": 40}, 40, 20, 2000 / 3),
        ({"request_rate": 0.01, "num_requests": 3}, 3, 300, 900),  # as many as output tokens, while it idles
        ({"num_requests": 30}, 30, 0, 1000),
        ({}, 10_000, 0, 1e6 / 3),
    ],
)
def test_what_a_workload_says(workload: dict[str, Any], count: float, seconds: float, iterations: float) -> None:
    given = {"workload": workload, "costs": {"a_ms": 30.0}}
    assert num_requests(given) == count
    assert arrivals_s(given) == seconds
    assert num_iterations(given) == pytest.approx(iterations)


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ((), COMPILED),
        (("system=orca_max",), COMPILED),
        (("system=fastertransformer",), STEPPED),
        (("scheduler.restore=swap",), STEPPED),
        (("scheduler.victim=largest",), STEPPED),
        (("workload.num_requests=499",), STEPPED),
        (("workload.num_samples=2",), STEPPED),
        (("workload.beam_width=2",), BEAMS),
        (("workload=wmt16",), STEPPED),
    ],
)
def test_the_pace_is_that_of_the_loop_that_serves_it(compose: Composer, typed: tuple[str, ...], expected: Pace) -> None:
    given = config(compose, "workload=fixed", "workload.num_requests=500", "workload.duration_s=1e4", *typed)
    assert pace(given) == expected
    parts = build(given)
    found = compiled.serve(parts.open_engine(), parts.workload.generate().requests)
    assert (found is not None) == (expected == COMPILED)
    assert pace(given, keeps_map=True) == MAPPED


def test_seconds_by_the_rules_of_thumb(compose: Composer) -> None:
    run = rule_s(config(compose))
    assert 0 < run < 1
    assert rule_s(config(compose, "metric=ttft_p99_s", "threshold=1", "repeats=2")) == pytest.approx(PER_SEARCH * run)
    assert rule_s(config(compose, "scheduler.restore=swap")) > 3 * run
    one, four = (rule_s(config(compose, "workload=alpaca", f"workload.beam_width={width}")) for width in (1, 4))
    assert four > 20 * one


def test_a_real_run_takes_as_long_as_its_requests_arrive(compose: Composer) -> None:
    pytest.importorskip("torch", reason=NEEDS_MODELS)
    real = ("runner=cpu", "model=tiny_llama", "workload=sharegpt_scaled", "workload.duration_s=60")
    assert rule_s(config(compose, *real, "workload.request_rate=1")) == 60


def test_replications_take_what_their_like_took(compose: Composer) -> None:
    learnt = Estimate([(point(compose, "seed=0"), 3.0), (point(compose, "seed=1"), 5.0)])
    assert learnt.seconds(point(compose, "seed=7")) == 4.0
    assert learnt.source == "from 2 finished points"


def test_others_take_what_the_rules_say_times_what_they_were_wrong_by(compose: Composer) -> None:
    done, other = point(compose), point(compose, "workload.request_rate=3")
    learnt = Estimate([(done, 7 * rule_s(done.config))])
    assert learnt.seconds(other) == pytest.approx(7 * rule_s(other.config))
    assert Estimate([]).seconds(other) == rule_s(other.config)
    assert "rules of thumb" in Estimate([]).source
    mapped = Estimate([], keeps_map=True)
    assert mapped.seconds(other) == rule_s(other.config, keeps_map=True) > 10 * rule_s(other.config)
