"""Varies coefficients until simulated curves meet given ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor

import numpy as np
import numpy.typing as npt

from kvbench.core import KvbenchError
from kvbench.fit.curves import Costs, Target, predict, rms_log


def fit(
    of: Sequence[Target],
    start: Costs,
    free: Sequence[str],
    pool: Executor,
    *,
    evaluations: int = 150,
    weights: Mapping[str, float] | None = None,
    on_evaluation: Callable[[Costs, float], None] = lambda costs, rms: None,
) -> Costs:
    """Minimize `rms_log` by Nelder-Mead on the logarithms of some coefficients.

    Beyond the knee latency is rough in the coefficients, because a trace is one realisation, and derivatives mislead
    there; so the first steps are 5 % long, and another start may end elsewhere.

    Args:
        of: what to meet.
        start: all coefficients.
        free: the names of those to vary; the others stay.
        pool: where points are simulated.
        evaluations: simulations of all points, at most.
        weights: as in `rms_log`.
        on_evaluation: called with the coefficients tried and their rms.

    Returns:
        The best coefficients seen, to four digits.

    Raises:
        KvbenchError: a coefficient to vary that is not above 0 at the start; scipy is missing.
    """
    try:
        from scipy.optimize import minimize
    except ModuleNotFoundError:
        raise KvbenchError("fitting needs scipy: make install") from None
    for name in free:
        value = start.get(name)
        if not isinstance(value, int | float) or not value > 0:
            raise KvbenchError(f"{name}={value} cannot be varied; give a value above 0 with --start {name}=...")
    best, least = start, math.inf

    def rms_at(logarithms: npt.NDArray[np.float64]) -> float:
        nonlocal best, least
        costs = start | {name: float(f"{math.exp(x):.4g}") for name, x in zip(free, logarithms, strict=True)}
        rms = rms_log(of, predict(of, costs, pool), weights)
        if rms < least:
            best, least = costs, rms
        on_evaluation(costs, rms)
        return rms

    origin = np.log([start[name] for name in free])
    simplex = np.vstack([origin, origin + 0.05 * np.eye(len(free))])
    options = {"initial_simplex": simplex, "maxfev": evaluations, "xatol": 1e-3, "fatol": 1e-4, "adaptive": True}
    minimize(rms_at, origin, method="Nelder-Mead", options=options)
    return best
