"""How two latency curves are compared: where they cross a threshold, and how far apart they lie.

The same functions serve the paper's curves and measured ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

THRESHOLD_S = 0.5
"""Normalized latency (s/token) at which rates are read. The paper compares rates "at similar latencies" and names none;
0.5 is the middle of its axis, and published curves are steep there."""


@dataclass(frozen=True, slots=True)
class Crossing:
    """Where a curve first rises through a threshold.

    Attributes:
        rate: the rate there, by linear interpolation; None if the curve does not cross between two of its points.
        above: the largest rate known to lie below it: the crossing is above this rate. None: no such rate.
        below: the smallest rate known to lie beyond it. None: no such rate.
    """

    rate: float | None
    above: float | None
    below: float | None

    def __str__(self) -> str:
        """The rate, or the side on which it lies."""
        if self.rate is not None:
            return f"{self.rate:.3g}"
        if self.above is not None:
            return f"> {self.above:g}"
        return "-" if self.below is None else f"< {self.below:g}"


def crossing(points: Iterable[tuple[float, float]], threshold: float = THRESHOLD_S) -> Crossing:
    """Read the rate at which latency first reaches ``threshold``, linearly in the rate between neighbouring points.

    Args:
        points: (rate, latency) in any order; NaN latencies are left out. A mark where the line leaves the plot may
            be among them: it lies on the line to the next point.
        threshold: in the unit of the latencies.
    """
    curve = sorted((x, y) for x, y in points if not math.isnan(y))
    before: tuple[float, float] | None = None
    for rate, latency in curve:
        if latency >= threshold:
            if before is None:
                return Crossing(None, None, rate)
            x, y = before
            return Crossing(x + (threshold - y) / (latency - y) * (rate - x), x, rate)
        before = (rate, latency)
    return Crossing(None, before[0] if before else None, None)


def log_ratios(measured: Mapping[float, float], expected: Iterable[tuple[float, float]]) -> list[float]:
    """ln(measured / expected) of every expected point that was measured; one that occurs twice counts twice.

    Args:
        measured: rate -> latency; rates must be the very numbers of ``expected``.
        expected: (rate, latency).
    """
    return [math.log(measured[rate] / latency) for rate, latency in expected if rate in measured]


def root_mean_square(values: Sequence[float]) -> float:
    """NaN if there are none."""
    return math.sqrt(sum(value**2 for value in values) / len(values)) if values else math.nan


def slope(points: Iterable[tuple[float, float]]) -> float:
    """Of the least-squares line through the points; NaN if all have one x."""
    xs, ys = zip(*points, strict=True)
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - mean_x) ** 2 for x in xs)
    covered = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
    return covered / spread if spread > 0 else math.nan


def interpolate(points: Iterable[tuple[float, float]], x: float) -> float:
    """The value at ``x``, linear between neighbouring points; NaN outside them."""
    curve = sorted(point for point in points if not math.isnan(point[1]))
    for (x0, y0), (x1, y1) in pairwise(curve):
        if x0 <= x <= x1:
            return y0 if x1 == x0 else y0 + (x - x0) / (x1 - x0) * (y1 - y0)
    return math.nan
