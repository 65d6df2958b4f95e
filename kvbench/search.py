"""The largest rate at which a metric keeps a threshold: bisection, and what the trace's length has to do with it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from kvbench.core import KvbenchError

RISING = (
    "normalized_latency_mean_s",
    "normalized_latency_p90_s",
    "ttft_p50_s",
    "ttft_p99_s",
    "tpot_p50_s",
    "tpot_p99_s",
)
"""Metrics that grow with the rate: it is searched where they exceed the threshold."""
FALLING = ("slo_attainment_pct",)
"""Those that shrink: where they fall below it."""
TOLERANCE = 0.01
"""Largest relative width of the last two rates, between which the rate is interpolated."""
MAX_STEPS = 12
"""Doublings, or halvings, of the first rate before the search gives up."""


@dataclass(slots=True)
class Search:
    """A search and what it tried.

    Attributes:
        metric: one of ``RISING`` or ``FALLING``.
        threshold: in its unit.
        tried: (rate, value) in the order in which they were run.
    """

    metric: str
    threshold: float
    tried: list[tuple[float, float]] = field(default_factory=list)

    def rate(self, value: Callable[[float], float], start: float, factor: float = 2.0) -> float:
        """Where the metric reaches the threshold, in requests/s.

        The first rate is multiplied, or divided, by ``factor`` until the threshold lies between two rates. These are
        bisected, geometrically, until they differ by ``TOLERANCE`` at most; between them the metric counts as linear.
        Every rate is meant to see the same requests, only closer together: then the metric hardly jumps.

        Args:
            value: runs a rate and returns the metric.
            start: first rate (requests/s).
            factor: above 1.

        Raises:
            KvbenchError: the metric has no value, or no rate within reach has the threshold on its other side.
        """
        low, high = self._bracket(value, start, factor)
        while high[0] / low[0] > 1 + TOLERANCE:
            rate = math.sqrt(low[0] * high[0])
            excess = self._excess(value, rate)
            if excess <= 0:
                low = rate, excess
            else:
                high = rate, excess
        return low[0] + (high[0] - low[0]) * -low[1] / (high[1] - low[1])

    def _bracket(
        self, value: Callable[[float], float], start: float, factor: float
    ) -> tuple[tuple[float, float], tuple[float, float]]:
        """Two rates, each with its excess: the first keeps the threshold, the second does not."""
        here = start, self._excess(value, start)
        is_kept = here[1] <= 0
        for _ in range(MAX_STEPS):
            rate = here[0] * factor if is_kept else here[0] / factor
            next_ = rate, self._excess(value, rate)
            if (next_[1] <= 0) != is_kept:
                return (here, next_) if is_kept else (next_, here)
            here = next_
        side = "is kept up to" if is_kept else "is missed down to"
        raise KvbenchError(
            f"threshold={self.threshold:g} of metric={self.metric} {side} {here[0]:.3g} requests/s; "
            "give another threshold, or a workload.request_rate= nearer to where it lies"
        )

    def _excess(self, value: Callable[[float], float], rate: float) -> float:
        """How far the metric is beyond the threshold: 0 or less where it keeps it."""
        found = value(rate)
        self.tried.append((rate, found))
        if math.isnan(found):
            raise KvbenchError(f"metric={self.metric} has no value at {rate:.3g} requests/s: nothing finishes there")
        return self.threshold - found if self.metric in FALLING else found - self.threshold


def of_steady_state(whole: float, half: float) -> float:
    """A rate read on a trace, without what is due to the trace's length.

    A run of length ``T`` starts empty and, above the load it can sustain, ends with a queue that grew for ``T``: the
    mean latency reaches ``(rate / limit - 1) T / 2``. Both move the rate at which it reaches a threshold, by a term
    that falls as ``1 / T`` (to first order). Read on the whole trace and on its first half, the term cancels in
    ``2 whole - half`` (Richardson's extrapolation; in statistics, the jackknife of Quenouille, Biometrika 43, 1956).

    Args:
        whole: the rate read on the whole trace.
        half: that on its first half.
    """
    return 2 * whole - half
