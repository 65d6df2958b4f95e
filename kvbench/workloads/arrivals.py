"""When requests arrive, and in which order a data set's pairs of lengths come to them.

Both belong together because the paper's generator ties them: it takes the first N pairs for N arrivals. The others are
made for comparisons (common random numbers): with one seed, two rates see the same requests, and only the time between
arrivals is scaled; two lengths of a run see the same beginning.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np

from kvbench.core import KvbenchError
from kvbench.workloads.base import MAX_REQUESTS, FloatArray, IntArray, Load, positive

_GAPS, _PAIRS = 0, 1
"""Second words of the seeds of two generators that must not share a stream."""


class Arrivals(Protocol):
    """A rule of arrival."""

    strict: ClassVar[bool]
    """Whether prompt and output must stay below the model's maximum length together, instead of reaching it."""

    def draw(self, load: Load, num_pairs: int, seed: int) -> tuple[FloatArray, IntArray]:
        """Arrival times, in seconds, ascending, and for each the index of its pair of lengths below ``num_pairs``.

        Raises:
            KvbenchError: the load lacks what the rule needs, has what it cannot use, or is beyond all measure.
        """
        ...


def drawn(arrivals: Arrivals, load: Load, num_pairs: int, seed: int) -> tuple[FloatArray, IntArray]:
    """What ``arrivals.draw`` returns, at least one arrival.

    Raises:
        KvbenchError: as it raises, or nobody arrives.
    """
    arrival_s, pairs = arrivals.draw(load, num_pairs, seed)
    if not len(arrival_s):
        raise KvbenchError(
            f"no request arrives within workload.duration_s={load.duration_s} at workload.request_rate="
            f"{load.request_rate} with seed {seed}; raise one of the two"
        )
    return arrival_s, pairs


class Paper:
    """The generator of the PagedAttention authors' artifact, to the last bit.

    Counts per bin of 10 ms are Poisson (numpy's legacy generator), requests arrive at the start of their bin, and get
    the first pairs of the data set, which is repeated where it is too short, in shuffled order (Python's generator).
    """

    strict: ClassVar[bool] = True

    def draw(self, load: Load, num_pairs: int, seed: int) -> tuple[FloatArray, IntArray]:
        """See `Arrivals`; wants a rate and a duration, and cuts what they give at ``num_requests``."""
        rate, duration = _rate(load, "paper"), load.duration_s
        if duration is None:
            raise KvbenchError("the paper's arrivals need a duration; give workload.duration_s")
        _refuse_too_many(rate * duration, rate, duration)
        counts = np.random.RandomState(seed).poisson(rate * 0.01, size=int(duration * 100))
        arrival_s = np.repeat(np.arange(len(counts)) * 0.01, counts)
        pairs = [i % num_pairs for i in range(len(arrival_s))]
        random.Random(seed).shuffle(pairs)
        return arrival_s[: load.num_requests], np.array(pairs[: load.num_requests], dtype=np.int64)


class Poisson:
    """Exponential gaps: independent users."""

    strict: ClassVar[bool] = False

    def draw(self, load: Load, num_pairs: int, seed: int) -> tuple[FloatArray, IntArray]:
        """See `Arrivals`; wants a rate, and a duration or a number of requests (or both: whichever ends first)."""
        return _renewal("poisson", lambda rng, n: rng.standard_exponential(n), load, num_pairs, seed)


@dataclass(slots=True)
class Gamma:
    """Gamma-distributed gaps.

    Args:
        cv: coefficient of variation of the gaps: 1 is Poisson, more comes in bursts, less is more even.
    """

    cv: float

    strict: ClassVar[bool] = False

    def draw(self, load: Load, num_pairs: int, seed: int) -> tuple[FloatArray, IntArray]:
        """See `Arrivals`; wants what `Poisson` wants."""
        shape = 1 / positive("arrivals.cv", self.cv) ** 2
        return _renewal("gamma", lambda rng, n: rng.standard_gamma(shape, n) / shape, load, num_pairs, seed)


@dataclass(slots=True)
class OnOff:
    """Bursts: exponential gaps while a source is on, an exponential time of silence after each burst.

    Args:
        on_share: of the time, above 0 and below 1; while the source is on, requests come at the mean rate over it.
        burst: mean number of requests of a burst, 1 or more; geometrically distributed.
    """

    on_share: float
    burst: float

    strict: ClassVar[bool] = False

    def draw(self, load: Load, num_pairs: int, seed: int) -> tuple[FloatArray, IntArray]:
        """See `Arrivals`; wants what `Poisson` wants."""
        share, burst = positive("arrivals.on_share", self.on_share), positive("arrivals.burst", self.burst)
        if share >= 1:
            raise KvbenchError(f"workload.arrivals.on_share={self.on_share} is never off; give less than 1")
        if burst < 1:
            raise KvbenchError(f"workload.arrivals.burst={self.burst} is less than a request; give 1 or more")
        silence = burst * (1 - share)  # in mean gaps
        until = -math.log1p(-1 / burst) if burst > 1 else math.inf

        def gaps(rng: np.random.Generator, n: int) -> FloatArray:
            drawn = rng.standard_exponential((n, 3))  # row by row, so that more of them begin with the same
            found: FloatArray = share * drawn[:, 0] + silence * drawn[:, 1] * (drawn[:, 2] < until)
            return found

        return _renewal("on_off", gaps, load, num_pairs, seed)


class AllAtOnce:
    """Everything arrives at time 0: for memory at saturation, and for looking at a data set."""

    strict: ClassVar[bool] = False

    def draw(self, load: Load, num_pairs: int, seed: int) -> tuple[FloatArray, IntArray]:
        """See `Arrivals`; ``num_requests`` pairs drawn with replacement, or every pair once where it is None."""
        for option in ("request_rate", "duration_s"):
            if getattr(load, option) is not None:
                raise KvbenchError(f"requests that arrive all at once have no {option}; set workload.{option}=null")
        pairs = np.arange(num_pairs) if load.num_requests is None else _choose(num_pairs, load.num_requests, seed)
        return np.zeros(len(pairs)), pairs


def _renewal(
    name: str, gaps: Callable[[np.random.Generator, int], FloatArray], load: Load, num_pairs: int, seed: int
) -> tuple[FloatArray, IntArray]:
    """Arrivals after independent gaps of mean 1, divided by the rate."""
    rate = _rate(load, name)
    if load.duration_s is None and load.num_requests is None:
        raise KvbenchError(f"{name} arrivals have no end; give workload.duration_s or workload.num_requests")
    most = load.num_requests if load.num_requests is not None else MAX_REQUESTS + 1
    until = load.duration_s if load.duration_s is not None else math.inf
    expected = min(rate * until, most)
    _refuse_too_many(expected, rate, until)
    rng = np.random.default_rng((seed, _GAPS))
    drawn = gaps(rng, int(expected + 6 * math.sqrt(expected)) + 16)
    while len(drawn) < most and np.cumsum(drawn)[-1] / rate < until:
        _refuse_too_many(len(drawn), rate, until)
        drawn = np.concatenate((drawn, gaps(rng, len(drawn))))
    arrival_s = np.cumsum(drawn)[: load.num_requests] / rate
    arrival_s = arrival_s[: int(np.searchsorted(arrival_s, until))]
    return arrival_s, _choose(num_pairs, len(arrival_s), seed)


def _choose(num_pairs: int, num_requests: int, seed: int) -> IntArray:
    return np.random.default_rng((seed, _PAIRS)).integers(num_pairs, size=num_requests)


def _rate(load: Load, name: str) -> float:
    if load.request_rate is None:
        raise KvbenchError(f"{name} arrivals need a rate; give workload.request_rate (requests/s)")
    return load.request_rate


def _refuse_too_many(expected: float, rate: float, until: float) -> None:
    if expected > MAX_REQUESTS:
        raise KvbenchError(
            f"workload.request_rate={rate} over {until} s makes more than {MAX_REQUESTS} requests, the limit; lower one"
        )
