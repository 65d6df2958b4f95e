"""Crossings, distances, interpolation."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.paper.curves import Crossing, crossing, interpolate, log_ratios, root_mean_square, slope


def test_crossing_is_linear_between_the_points_around_it() -> None:
    found = crossing([(1.0, 0.1), (2.0, 0.9)])
    assert found.rate == pytest.approx(1.5)
    assert (found.above, found.below) == (1.0, 2.0)
    assert crossing([(2.0, 0.9), (1.0, 0.1)]).rate == pytest.approx(1.5)  # in any order
    assert crossing([(1.0, 0.1), (2.0, 0.9)], threshold=0.3).rate == pytest.approx(1.25)
    assert crossing([(1.0, 0.2), (1.5, 0.5), (2.0, 0.9)]).rate == 1.5


def test_the_first_crossing_counts() -> None:
    assert crossing([(1, 0.4), (2, 0.6), (3, 0.4), (4, 0.6)]).rate == pytest.approx(1.5)


def test_a_mark_on_the_line_reads_like_the_point_beyond_it() -> None:
    known, beyond = (1.0, 0.1), (2.0, 4.1)
    mark = (1.35, 1.5)  # on the line between them
    assert crossing([known, mark]).rate == pytest.approx(crossing([known, beyond]).rate)


def test_a_curve_that_does_not_cross_gives_the_side() -> None:
    assert crossing([(1.0, 0.1), (2.0, 0.2)]) == Crossing(None, 2.0, None)
    assert crossing([(1.0, 0.6), (2.0, 0.7)]) == Crossing(None, None, 1.0)
    assert crossing([]) == Crossing(None, None, None)
    assert [str(crossing(c)) for c in ([(1, 0.1)], [(1, 0.6)], [], [(1, 0.1), (2, 0.9)])] == ["> 1", "< 1", "-", "1.5"]


def test_failed_points_are_left_out() -> None:
    assert crossing([(1.0, 0.1), (1.5, math.nan), (2.0, 0.9)]).rate == pytest.approx(1.5)


@given(
    st.lists(st.tuples(st.floats(0.01, 30), st.floats(0.001, 3)), min_size=1, max_size=8, unique_by=lambda p: p[0]),
    st.floats(0.05, 1.0),
)
def test_a_crossing_lies_between_its_neighbours_and_on_the_line(points: list[tuple[float, float]], at: float) -> None:
    found = crossing(points, at)
    if found.rate is None:
        assert found.above is None or found.below is None
    else:
        assert found.above is not None
        assert found.below is not None
        assert found.above <= found.rate <= found.below
        assert interpolate(points, found.rate) == pytest.approx(at, rel=1e-3)


def test_distance_weighs_every_point_alike_and_a_double_rate_twice() -> None:
    expected = [(1.0, 0.1), (2.0, 0.1), (2.0, 0.2), (3.0, 0.1)]
    ratios = log_ratios({1.0: 0.1, 2.0: 0.2}, expected)  # 3.0 was not run
    assert ratios == pytest.approx([0.0, math.log(2), 0.0])
    assert root_mean_square(ratios) == pytest.approx(math.log(2) / math.sqrt(3))
    assert math.isnan(root_mean_square([]))


def test_interpolation_ends_with_the_points() -> None:
    points = [(4.0, 8.0), (2.0, 4.0)]
    assert interpolate(points, 3.0) == 6.0
    assert interpolate(points, 4.0) == 8.0
    assert math.isnan(interpolate(points, 4.1))
    assert math.isnan(interpolate([], 1.0))


def test_slope_of_a_line() -> None:
    assert slope([(0, 26), (1, 28), (3, 32)]) == pytest.approx(2.0)
    assert math.isnan(slope([(1, 28), (1, 29)]))
