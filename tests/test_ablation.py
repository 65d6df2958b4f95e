"""Contributions of steps: chains, lattices with and without holes, against Shapley's formula and known effects."""

from __future__ import annotations

import math
from itertools import permutations, product

import numpy as np
import pytest

from kvbench.ablation import Step, contributions, orders
from kvbench.statistics import paired_ratio

REPEATS = np.array([1.0, 1.1, 0.9, 1.05])


def test_a_chain_has_one_order_and_its_factors_are_plain_ratios() -> None:
    corners = [
        {"placement": "buddy", "reservation": "oracle"},
        {"placement": "first_fit", "reservation": "oracle"},
        {"placement": "paged", "reservation": "oracle"},
        {"placement": "paged", "reservation": "on_demand"},
    ]
    values = [1.00 * REPEATS, 1.24 * REPEATS**1.1, 1.38 * REPEATS, 1.83 * REPEATS**0.9]
    assert orders(corners) == [[0, 1, 2, 3]]
    found = contributions(corners, values)
    assert list(found) == [
        Step("placement", "buddy", "first_fit"),
        Step("placement", "first_fit", "paged"),
        Step("reservation", "oracle", "on_demand"),
    ]
    for number, interval in enumerate(found.values()):
        assert interval == pytest.approx(paired_ratio(values[number + 1], values[number]))
    assert math.prod(each.value for each in found.values()) == pytest.approx(paired_ratio(values[-1], values[0]).value)


def test_orders_of_three_axes_are_those_of_shapley() -> None:
    """Axis ``x`` doubles, ``y`` adds a half, and both together with ``z`` treble once more."""
    corners = [{"x": x, "y": y, "z": z} for x, y, z in product((0, 1), repeat=3)]

    def worth(x: int, y: int, z: int) -> float:
        return 2.0**x * 1.5**y * 3.0 ** (x * y * z)

    found = contributions(corners, [worth(*corner.values()) * REPEATS for corner in corners])
    assert len(orders(corners)) == 6
    for axis in range(3):
        logs = []
        for order in permutations(range(3)):
            before = [int(order.index(each) < order.index(axis)) for each in range(3)]
            after = [each or int(place == axis) for place, each in enumerate(before)]
            logs.append(math.log(worth(*after) / worth(*before)))
        factor = found[Step("xyz"[axis], 0, 1)]
        assert factor.value == pytest.approx(math.exp(np.mean(logs)))
        assert factor.high - factor.low == pytest.approx(0, abs=1e-12)  # what the repeats do to all cancels


def test_orders_over_corners_that_do_not_exist_are_left_out() -> None:
    corners = [{"x": 0, "y": 0, "z": 0}, {"x": 1, "y": 0, "z": 0}, {"x": 1, "y": 1, "z": 0}, {"x": 1, "y": 0, "z": 1}]
    corners.append({"x": 1, "y": 1, "z": 1})
    assert orders(corners) == [[0, 1, 2, 4], [0, 1, 3, 4]]
    found = contributions(corners, [np.full(2, value) for value in (1.0, 2.0, 3.0, 8.0, 24.0)])
    assert {each.axis: interval.value for each, interval in found.items()} == pytest.approx(
        {"x": 2.0, "y": math.sqrt(1.5 * 3), "z": math.sqrt(8 * 4)}
    )


def test_no_order_no_contribution() -> None:
    assert contributions([{"x": 0, "y": 0}, {"x": 1, "y": 1}], [REPEATS, REPEATS]) == {}
    with pytest.raises(ValueError, match="the same value"):
        orders([{"x": 0}, {"x": 0}])
