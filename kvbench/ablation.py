"""What the steps of a change contribute to its whole: a chain of systems, or the average over the orders of its axes.

The corners are systems that differ in named axes. Values of an axis count in the order in which the corners bring
them, so the first corner is where the change starts and the last where it ends. An order goes from one to the other,
one axis and one value at a time, over corners that exist; a chain is the case of a single order. A step contributes
the logarithm of the ratio that it makes, averaged over all orders: Shapley's value where every corner exists (Shapley,
Contributions to the Theory of Games II, 1953), its restriction to the feasible orders where not (Faigle and Kern,
International Journal of Game Theory 21, 1992). The factors of all steps multiply to the whole.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from kvbench.statistics import Floats, Interval, paired_ratio

Corner = Mapping[str, Hashable]
"""Axis -> value."""
Order = list[int]
"""Corners that follow each other, by index."""


class Step(NamedTuple):
    """One axis, from one of its values to the next."""

    axis: str
    before: Hashable
    after: Hashable


def orders(corners: Sequence[Corner]) -> list[Order]:
    """Every order of steps from the first corner to the last.

    Raises:
        ValueError: two corners are alike.
    """
    ranks: dict[str, dict[Hashable, int]] = {axis: {} for axis in corners[0]}
    for corner in corners:
        for axis, rank in ranks.items():
            rank.setdefault(corner[axis], len(rank))
    places = [tuple(rank[corner[axis]] for axis, rank in ranks.items()) for corner in corners]
    index = {place: number for number, place in enumerate(places)}
    if len(index) < len(places):
        raise ValueError("two corners have the same value on every axis")

    def onward(place: tuple[int, ...]) -> list[Order]:
        if place == places[-1]:
            return [[index[place]]]
        following = [(*place[:i], place[i] + 1, *place[i + 1 :]) for i in range(len(place))]
        return [[index[place], *rest] for each in following if each in index for rest in onward(each)]

    return onward(places[0])


def step(before: Corner, after: Corner) -> Step:
    """What is different in ``after``, a neighbour of ``before``."""
    (axis,) = (axis for axis in before if before[axis] != after[axis])
    return Step(axis, before[axis], after[axis])


def contributions(corners: Sequence[Corner], values: Sequence[Floats]) -> dict[Step, Interval]:
    """The factor of each step, with Student's interval of its logarithm over repeats, paired.

    Args:
        corners: see ``orders``.
        values: of each corner, one for each repeat; above 0.

    Returns:
        In the order of the first order; empty where none leads from the first corner to the last.
    """
    logs = np.log(np.asarray(values, np.float64))
    sides: dict[Step, tuple[list[Floats], list[Floats]]] = {}
    for order in orders(corners):
        for before, after in pairwise(order):
            ends = sides.setdefault(step(corners[before], corners[after]), ([], []))
            ends[0].append(logs[before])
            ends[1].append(logs[after])
    return {
        each: paired_ratio(np.exp(np.mean(after, axis=0)), np.exp(np.mean(before, axis=0)))
        for each, (before, after) in sides.items()
    }
