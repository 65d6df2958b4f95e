"""Non-negative least squares on relative errors, robust against iterations that something else slowed down."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvbench.calibrate.runs import Iterations, terms
from kvbench.core import KvbenchError

Floats = npt.NDArray[np.float64]

DELTA = 0.05
"""Relative error beyond which an iteration weighs linearly, no longer by its square (Huber)."""
ROUNDS = 50
"""Reweighted regressions at most."""
KNEES = (2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Where a second segment of the cost per request is tried."""
OPTIONAL = ("b_ms", "q_ms")
"""Terms that are left out where the iterations do not determine them."""
CERTAIN = 3.0
"""Standard errors that an optional coefficient must lie above 0; steps of one run are alike, so less proves little."""
GAIN = 20.0
"""By how much the second segment must lower n * ln(loss): twice the difference of a likelihood."""


class Fitted(NamedTuple):
    """Coefficients and how well they describe what they were fitted to.

    Attributes:
        coefficients: by their names in ``IterationCosts``; 0 where left out.
        dropped: those that were left out.
        loss: mean Huber loss of the relative errors.
    """

    coefficients: dict[str, float]
    dropped: list[str]
    loss: float


def fit(iterations: Iterations) -> Fitted:
    """The coefficients that describe the iterations best, with a second segment per request where that pays.

    Raises:
        KvbenchError: fewer iterations than coefficients; scipy is missing.
    """
    num_iterations = len(iterations.ms)
    if num_iterations < 20:
        raise KvbenchError(f"{num_iterations} iterations determine no costs; measure more of them, with more requests")
    best = _without_the_uncertain(iterations, None)
    most = float(iterations.num_requests.max())
    for knee in KNEES:
        if 2 * knee <= most:
            found = _without_the_uncertain(iterations, knee)
            needed = GAIN if "c_large_ms" not in best.coefficients else 0.0
            if num_iterations * math.log(max(best.loss, 1e-12) / max(found.loss, 1e-12)) > needed:
                best = found
    return best


def predicted_ms(coefficients: Mapping[str, Any], iterations: Iterations) -> Floats:
    """What the coefficients say of each iteration, as ``runners.simulated`` prices it."""
    knee = coefficients.get("c_knee")
    parts = [coefficients[name] * column for name, column in terms(iterations, knee)]
    total: Floats = np.sum(parts, axis=0)
    return total


def residuals(coefficients: Mapping[str, Any], fitted: Iterations, held_out: Iterations) -> dict[str, Any]:
    """How far predictions are from the iterations: of the fit, and of a run that took no part in it."""
    relative = 100 * (predicted_ms(coefficients, fitted) / fitted.ms - 1)
    held_out_pct = 100 * (predicted_ms(coefficients, held_out).sum() / held_out.ms.sum() - 1)
    return {
        "num_iterations": len(fitted.ms),
        "rms_pct": _rounded(np.sqrt(np.mean(relative**2))),
        "p90_pct": _rounded(np.percentile(np.abs(relative), 90)),
        "held_out_iterations": len(held_out.ms),
        "held_out_total_pct": _rounded(held_out_pct),
    }


def _rounded(value: Any) -> float:
    return round(float(value), 2)


def _without_the_uncertain(iterations: Iterations, knee: int | None) -> Fitted:
    """Fit, leave out the least certain optional term, and fit again, until all are certain."""
    columns = dict(terms(iterations, knee))
    dropped: list[str] = []
    while True:
        names = [name for name in columns if name not in dropped]
        values, weights = _robust(np.stack([columns[name] for name in names]).T, iterations.ms)
        certain = _certainty(np.stack([columns[name] for name in names]).T, iterations.ms, values, weights)
        doubts = {name: certain[i] for i, name in enumerate(names) if name in OPTIONAL and certain[i] < CERTAIN}
        if not doubts:
            break
        dropped.append(min(doubts, key=lambda name: doubts[name]))
    found = dict.fromkeys(columns, 0.0) | {name: float(v) for name, v in zip(names, values, strict=True)}
    coefficients: dict[str, Any] = {name: float(f"{value:.4g}") for name, value in found.items()}
    if knee is not None:
        coefficients["c_knee"] = knee
    errors = np.abs(predicted_ms(coefficients, iterations) / iterations.ms - 1)
    loss = np.where(errors <= DELTA, errors**2 / 2, DELTA * (errors - DELTA / 2))
    return Fitted(coefficients, sorted(dropped), float(loss.mean()))


def _robust(columns: Floats, ms: Floats) -> tuple[Floats, Floats]:
    """Iteratively reweighted, non-negative: the coefficients and the iterations' last weights."""
    try:
        from scipy.optimize import nnls
    except ModuleNotFoundError:
        raise KvbenchError("calibrating needs scipy: make install EXTRAS=dev,models") from None
    scales = np.maximum(np.abs(columns).max(axis=0), 1e-12)
    relative = columns / scales / ms[:, None]  # times the coefficients: predicted / measured
    weights = np.ones_like(ms)
    values = np.zeros(columns.shape[1])
    for _ in range(ROUNDS):
        before = values
        root = np.sqrt(weights)
        values, _ = nnls(relative * root[:, None], root)
        errors = np.abs(relative @ values - 1)
        weights = np.minimum(1.0, DELTA / np.maximum(errors, 1e-12))
        if np.allclose(values, before, rtol=1e-6, atol=1e-9):
            break
    return values / scales, weights


def _certainty(columns: Floats, ms: Floats, values: Floats, weights: Floats) -> Floats:
    """Each coefficient over its standard error; about 0 where nothing tells it from the others."""
    relative = columns / ms[:, None] * np.sqrt(weights)[:, None]
    scales = np.maximum(np.linalg.norm(relative, axis=0), 1e-300)
    relative = relative / scales
    errors = (columns @ values / ms - 1) * np.sqrt(weights)
    variance = float(errors @ errors) / max(len(ms) - len(values), 1)
    covariance = np.linalg.inv(relative.T @ relative + 1e-12 * np.eye(len(values)))  # huge where columns are alike
    certainty: Floats = values * scales / np.sqrt(np.maximum(variance * np.diag(covariance), 1e-30))
    return certainty
