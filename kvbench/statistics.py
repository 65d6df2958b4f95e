"""What replications say: intervals, paired comparisons, where a run's warm-up ends, and whether its queue grew.

Replications are independent runs of one point, each with its own seed. Systems are compared under common random
numbers: repeat ``k`` of every system serves the same requests, so what the requests do to both cancels in differences
and ratios of the same repeat (Law, *Simulation Modeling and Analysis*, 5th ed., sections 9.4, 10.2 and 11.2).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.special import nctdtr, ndtri, stdtrit

from kvbench.core import KvbenchError

Floats = npt.NDArray[np.float64]
Values = Sequence[float] | Floats

CONFIDENCE = 0.95
"""Of every interval, unless another is asked for."""
NUM_BINS = 500
"""Equal pieces of time in which a run is looked at for its warm-up."""
NUM_INCREMENTS = 20
"""Equal pieces of time over which the growth of a queue is judged."""
NUM_RESIDENCES = 5
"""Least length of a warm-up, in mean times that a request stays."""
_BATCH = 5
"""Observations averaged before MSER: the 5 of MSER-5."""
Method = Literal["t", "bootstrap"]
"""How intervals of means are made: Student's, or by resampling."""
BOOTSTRAP_LEAST = 10
"""Replications below which bootstrap intervals are too narrow."""
_method: ContextVar[Method] = ContextVar("method", default="t")


class Interval(NamedTuple):
    """An estimate and where its true value lies.

    Attributes:
        value: the estimate.
        low: lower end; NaN where ``num`` is below 2, since one run says nothing of the next.
        high: upper end.
        num: replications behind it.
    """

    value: float
    low: float
    high: float
    num: int

    def __contains__(self, value: object) -> bool:
        """Whether a number lies in the interval."""
        return isinstance(value, int | float) and self.low <= value <= self.high

    def __str__(self) -> str:
        """``1.83 [1.81, 1.85]``, or ``1.83 (one run)``."""
        if math.isnan(self.low):
            return f"{self.value:.3g} (one run)"
        return f"{self.value:.3g} [{self.low:.3g}, {self.high:.3g}]"


@contextmanager
def intervals_by(method: Method) -> Iterator[None]:
    """Inside, intervals of means, hence of differences and ratios, are made by this method; outside by Student's."""
    token = _method.set(method)
    try:
        yield
    finally:
        _method.reset(token)


def named() -> str:
    """What the intervals are called that are made here."""
    return "95 % bootstrap intervals" if _method.get() == "bootstrap" else "95 % intervals"


def mean_interval(values: Values, confidence: float = CONFIDENCE) -> Interval:
    """For the mean: by ``t_interval``, or what ``intervals_by`` says.

    Raises:
        KvbenchError: the bootstrap is asked for, and there are too few replications for it.
    """
    if _method.get() == "t" or len(values) == 1:
        return t_interval(values, confidence)
    check_bootstrap(len(values))
    return bootstrap_interval(values, confidence)


def check_bootstrap(num: int) -> None:
    """Raise KvbenchError where so many replications are too few for it."""
    if num < BOOTSTRAP_LEAST:
        raise KvbenchError(
            f"repeats={num}: interval=bootstrap is too narrow then; give {BOOTSTRAP_LEAST} or more, or interval=t"
        )


def t_interval(values: Values, confidence: float = CONFIDENCE) -> Interval:
    """Student's interval for the mean: ``m +- t(n - 1) s / sqrt(n)``.

    Right for normal replications, and good for means of many requests (Law, section 9.4.1).
    """
    data = _data(values)
    return _around(float(data.mean()), _standard_error(data), len(data) - 1, len(data), confidence)


def bootstrap_interval(
    values: Values,
    confidence: float = CONFIDENCE,
    *,
    statistic: Callable[..., npt.NDArray[np.generic] | np.floating] = np.mean,
    num_resamples: int = 9999,
    seed: int = 0,
) -> Interval:
    """Bias-corrected and accelerated bootstrap (Efron, JASA 82, 1987), from ``scipy.stats.bootstrap``.

    For statistics that are no means, and skewed replications. With fewer than about ten of them it is too narrow
    (``check_bootstrap``).

    Args:
        values: one per replication.
        confidence: of the interval.
        statistic: of an array along ``axis``.
        num_resamples: drawn with replacement.
        seed: of the resampling; the same data give the same interval.
    """
    data = _data(values)
    value = float(statistic(data, axis=-1))
    if len(data) < 2:
        return Interval(value, math.nan, math.nan, len(data))
    if np.ptp(data) == 0.0:
        return Interval(value, value, value, len(data))
    from scipy.stats import bootstrap  # takes a second, which a worker process need not wait for

    found = bootstrap(
        (data,), statistic, n_resamples=num_resamples, confidence_level=confidence, rng=np.random.default_rng(seed)
    ).confidence_interval
    return Interval(value, float(found.low), float(found.high), len(data))


def paired_difference(first: Values, second: Values, confidence: float = CONFIDENCE) -> Interval:
    """The interval for the mean of ``first - second``, repeat by repeat (Law, section 10.2.1).

    Raises:
        ValueError: they have different lengths.
    """
    return mean_interval(_pairs(first, second, np.subtract), confidence)


def paired_ratio(first: Values, second: Values, confidence: float = CONFIDENCE) -> Interval:
    """Geometric mean of ``first / second``, repeat by repeat, with the interval of the logarithms' mean.

    Logarithms make it one statement whichever is called first, and let the factors of a chain multiply to the whole.

    Raises:
        ValueError: they have different lengths, or a value is not above 0.
    """
    return _exp(mean_interval(_pairs(_logs(first), _logs(second), np.subtract), confidence))


def geometric_mean(values: Values, confidence: float = CONFIDENCE) -> Interval:
    """Of ratios, one per repeat, with the interval of their logarithms' mean: ``paired_ratio`` of what they compare.

    Raises:
        ValueError: a value is not above 0.
    """
    return _exp(mean_interval(_logs(values), confidence))


def unpaired_difference(first: Values, second: Values, confidence: float = CONFIDENCE) -> Interval:
    """Welch's interval for the difference of two means whose replications have nothing in common.

    Degrees of freedom by Welch and Satterthwaite (Welch, Biometrika 34, 1947).
    """
    one, other = _data(first), _data(second)
    squares = _standard_error(one) ** 2, _standard_error(other) ** 2
    freedom = math.nan
    if (total := sum(squares)) > 0:
        freedom = total**2 / sum(
            square**2 / (len(data) - 1) for square, data in zip(squares, (one, other), strict=True)
        )
    return _around(float(one.mean() - other.mean()), math.sqrt(total), freedom, min(len(one), len(other)), confidence)


def num_replications(
    deviation: float, difference: float, *, power: float = 0.9, confidence: float = CONFIDENCE, most: int = 100_000
) -> int:
    """Replications with which a t-test finds a true difference with the given probability.

    The smallest ``n`` of which the noncentral t-distribution with ``n - 1`` degrees of freedom and noncentrality
    ``difference sqrt(n) / deviation`` exceeds the two-sided critical value with probability ``power``. For a paired
    comparison give the deviation of the pairs' differences; for an unpaired one ``sqrt(s1**2 + s2**2)``; it answers
    how many runs of each system.

    Args:
        deviation: standard deviation between replications of what is compared.
        difference: to be found.
        power: probability of finding it.
        confidence: of the interval that must exclude 0.
        most: is answered where even so many do not suffice.
    """
    if deviation == 0.0:
        return 2

    def suffices(n: int) -> bool:
        critical = float(stdtrit(n - 1, 0.5 + confidence / 2))
        return 1.0 - float(nctdtr(n - 1, abs(difference) * math.sqrt(n) / deviation, critical)) >= power

    # The normal approximation is below the answer, by a few replications only.
    n = max(2, int((float(ndtri(0.5 + confidence / 2)) + float(ndtri(power))) ** 2 * (deviation / difference) ** 2))
    while n < most and not suffices(n):
        n += 1
    return min(n, most)


def mser(series: Values) -> tuple[int, bool]:
    """Where the warm-up of a series that starts low ends: MSER-5, one-sided.

    Of the means ``z`` of batches of 5 those before ``d`` are dropped, such that the marginal standard error of the
    others, ``sum((z - mean(z))**2) / (n - d)**2``, is smallest; ``d`` is at most ``n / 2`` (White, Cobb and Spratt,
    Winter Simulation Conference 2000). A run starts empty, so only beginnings are dropped whose mean is below that of
    the rest. Without this the rule also drops bursts, which makes waits too short: by 2 to 9 % in an M/D/1 queue at
    loads 0.5 and 0.8, with intervals that cover the truth in 78 % of all cases instead of 95 %.

    Args:
        series: observations at equal distances; at least 20.

    Returns:
        The number of observations to drop, and whether it was found inside the first half. If it was not, the series
        is too short, or not stationary.
    """
    data = _data(series)
    num = len(data) // _BATCH
    means = data[: num * _BATCH].reshape(num, _BATCH).mean(axis=1)
    dropped = np.arange(num)
    left = num - dropped
    totals, squares = (np.cumsum(part[::-1])[::-1] for part in (means, means**2))
    errors = (squares - totals**2 / left) / left**2
    errors[errors < 1e-12 * squares / left**2] = 0.0  # rounding: what is constant has no error
    below = (totals[0] - totals) / np.maximum(dropped, 1) < totals / left
    errors[~below & (dropped > 0)] = np.inf
    best = int(np.argmin(errors[: num // 2 + 1]))
    return best * _BATCH, best < num // 2


class WarmUp(NamedTuple):
    """What is left out at the start of a run.

    Attributes:
        end_s: where it ends.
        is_found: whether MSER found its end inside the first half.
        is_long: whether ``NUM_RESIDENCES`` fit into the first half; if not, the run is too short to be judged.
    """

    end_s: float
    is_found: bool
    is_long: bool


def warm_up(up_s: Floats, down_s: Floats, to_s: float) -> WarmUp:
    """The warm-up of a queue that starts empty: MSER-5 on its length, at least 5 residences, at most half of the run.

    Args:
        up_s: arrivals, in seconds from 0.
        down_s: departures of the same, in the same order.
        to_s: end of the arrivals.
    """
    dropped, is_found = mser(mean_levels(up_s, down_s, np.linspace(0.0, to_s, NUM_BINS + 1)))
    least_s = NUM_RESIDENCES * float(np.mean(down_s - up_s))
    return WarmUp(min(max(dropped * to_s / NUM_BINS, least_s), to_s / 2), is_found, least_s <= to_s / 2)


def mean_levels(up_s: Floats, down_s: Floats, edges_s: Floats) -> Floats:
    """Time averages, between neighbouring edges, of a count that rises by 1 at some times and falls by 1 at others."""

    def integral(times_s: Floats) -> Floats:
        ascending = np.sort(times_s)
        before = np.searchsorted(ascending, edges_s, side="right")
        area: Floats = before * edges_s - np.concatenate(([0.0], np.cumsum(ascending)))[before]
        return area

    means: Floats = np.diff(integral(up_s) - integral(down_s)) / np.diff(edges_s)
    return means


def growth_score(up_s: Floats, down_s: Floats, from_s: float, to_s: float) -> float:
    """How far a queue grew, in standard deviations of one that is exactly at its limit.

    Such a queue's length is a random walk: over ``k`` equal pieces of time with increments of deviation ``s`` it grows
    by ``s sqrt(k)``, more or less. A queue below the limit comes back to where it was and scores near 0; above the
    limit the score grows with the square root of time. So a score beyond Student's quantile refutes that the load can
    be sustained. Nothing is assumed of arrivals and services but that pieces are long against their correlation.

    Args:
        up_s: arrivals.
        down_s: departures.
        from_s: end of the warm-up.
        to_s: end of the arrivals.
    """
    edges_s = np.linspace(from_s, to_s, NUM_INCREMENTS + 1)
    # Who arrives at the end itself is not counted: the last arrival finds a queue like any other.
    arrived, left = np.searchsorted(np.sort(up_s), edges_s), np.searchsorted(np.sort(down_s), edges_s, side="right")
    lengths = arrived - left
    increments = np.diff(lengths).astype(np.float64)
    deviation = float(increments.std(ddof=1))
    return float(increments.sum()) / (deviation * math.sqrt(NUM_INCREMENTS)) if deviation > 0 else 0.0


def has_grown(scores: Values) -> bool:
    """Whether growth is seen in replications of one point, or in a single run, at a level of 5 %.

    The scores' sum over ``sqrt(n)`` is judged (Stouffer's method), so that replications see what a single one cannot.

    Args:
        scores: ``growth_score`` of every replication.
    """
    data = _data(scores)
    return bool(data.sum() / math.sqrt(len(data)) > stdtrit(len(data) * (NUM_INCREMENTS - 1), 0.95))


def _exp(logs: Interval) -> Interval:
    return Interval(math.exp(logs.value), math.exp(logs.low), math.exp(logs.high), logs.num)


def _data(values: Values) -> Floats:
    data = np.asarray(values, np.float64)
    if not len(data):
        raise ValueError("no replication has a value")
    return data


def _logs(values: Values) -> Floats:
    data = _data(values)
    if (data <= 0).any():
        raise ValueError(f"a ratio needs values above 0, not {data.min():g}")
    logs: Floats = np.log(data)
    return logs


def _pairs(first: Values, second: Values, combine: np.ufunc) -> Floats:
    one, other = _data(first), _data(second)
    if len(one) != len(other):
        raise ValueError(f"{len(one)} replications cannot be paired with {len(other)}")
    paired: Floats = combine(one, other)
    return paired


def _standard_error(data: Floats) -> float:
    return float(data.std(ddof=1)) / math.sqrt(len(data)) if len(data) > 1 else math.nan


def _around(value: float, error: float, freedom: float, num: int, confidence: float) -> Interval:
    if error == 0.0:
        return Interval(value, value, value, num)
    margin = float(stdtrit(freedom, 0.5 + confidence / 2)) * error if num > 1 else math.nan
    return Interval(value, value - margin, value + margin, num)
