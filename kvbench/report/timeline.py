"""Iterations as a page can draw them: as they are, or as buckets of equal time that hide no extreme."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvbench.partition import CLASSES
from kvbench.records import Columns

Floats = NDArray[np.float64]
COUNTED = ("num_running", "num_waiting")
"""Columns of ``steps`` that are drawn beside the ledger's classes."""


@dataclass(frozen=True, slots=True)
class Buckets:
    """Columns of ``steps`` over buckets of time.

    Attributes:
        edges_s: where buckets begin and end, one more than there are buckets.
        mean: column -> mean over the time of each bucket.
        low: column -> smallest value in it.
        high: column -> largest.
        is_exact: whether every iteration and every pause between two is a bucket of its own.
    """

    edges_s: Floats
    mean: dict[str, Floats]
    low: dict[str, Floats]
    high: dict[str, Floats]
    is_exact: bool


def bucketed(steps: Columns, num_slots: int, max_buckets: int) -> Buckets:
    """Put iterations into at most so many buckets; while nothing runs the pool is free and nobody waits.

    Args:
        steps: one row per iteration, see ``kvbench.records.Record``.
        num_slots: the pool.
        max_buckets: where iterations and pauses are no more than this, they are kept as they are.
    """
    end_s = steps["end_s"].astype(np.float64)
    start_s = end_s - steps["seconds"].astype(np.float64)
    start_s[1:] = np.maximum(start_s[1:], end_s[:-1])  # the difference rounds
    values = {name: steps[name].astype(np.float64) for name in (*COUNTED, *CLASSES)}
    idle = dict.fromkeys(values, 0.0) | {"free": float(num_slots)}
    edges_s = np.unique(np.concatenate([[0.0], start_s, end_s]))
    edges_s = edges_s[np.concatenate([[True], np.diff(edges_s) > 1e-9])]
    is_exact = len(edges_s) - 1 <= max_buckets
    if not is_exact:
        edges_s = np.linspace(0.0, float(end_s[-1]), max_buckets + 1)
    covered = _integral(np.ones(len(end_s)), start_s, end_s, edges_s)
    width_s = np.diff(edges_s)
    pause_s = np.maximum(width_s - covered, 0.0)
    slack = 1e-9 * max(float(edges_s[-1]), 1.0)
    has_pause = pause_s > slack
    first = np.searchsorted(end_s, edges_s[:-1] + slack, side="right")
    after = np.searchsorted(start_s, edges_s[1:] - slack, side="left")
    mean, low, high = {}, {}, {}
    for name, column in values.items():
        mean[name] = (_integral(column, start_s, end_s, edges_s) + idle[name] * pause_s) / width_s
        low[name] = _extremes(np.minimum, column, first, after, has_pause, idle[name])
        high[name] = _extremes(np.maximum, column, first, after, has_pause, idle[name])
    return Buckets(edges_s, mean, low, high, is_exact)


def columns_of(buckets: Buckets, names: Sequence[str]) -> Columns:
    """Buckets as columns to pack: of exact ones only the mean, slots and counts as whole numbers.

    Means of slots are rounded to a slot, those of requests to a 64th.
    """
    found: Columns = {"edges_s": buckets.edges_s}
    for name in names:
        mean = buckets.mean[name]
        whole = name in CLASSES or buckets.is_exact
        found[name] = np.rint(mean).astype(np.int64) if whole else np.rint(mean * 64) / 64
        if not buckets.is_exact:
            found[f"{name}_low"] = buckets.low[name].astype(np.int64)
            found[f"{name}_high"] = buckets.high[name].astype(np.int64)
    return found


def _integral(column: Floats, start_s: Floats, end_s: Floats, edges_s: Floats) -> Floats:
    """Over each bucket, of a column that holds during iterations and is 0 in between."""
    knots = np.stack([start_s, end_s], axis=1).ravel()
    rises = np.stack([np.zeros(len(column)), column * (end_s - start_s)], axis=1).ravel()
    areas: Floats = np.diff(np.interp(edges_s, knots, np.cumsum(rises)))
    return areas


def _extremes(
    pick: np.ufunc,
    column: Floats,
    first: NDArray[np.intp],
    after: NDArray[np.intp],
    has_pause: NDArray[np.bool_],
    idle: float,
) -> Floats:
    """The smallest or the largest of iterations ``first`` to ``after`` of each bucket, and of its pause."""
    padded = np.append(column, idle)  # so that no index is beyond the end
    found = pick.reduceat(padded, np.stack([first, after], axis=1).ravel())[::2]
    found = np.where(first < after, found, idle)
    extremes: Floats = np.where(has_pause, pick(found, idle), found)
    return extremes
