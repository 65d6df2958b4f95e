"""Repeats of a point in ``summary.csv``: values side by side, intervals of them, and whether the point was stable.

Repeat ``k`` of two systems served the same requests, so what is compared is paired by ``repeat``.
"""

from __future__ import annotations

import pandas as pd

from kvbench import statistics
from kvbench.statistics import Interval


def by_repeat(rows: pd.DataFrame, column: str) -> dict[int, float]:
    """Repeat -> the value of a column; repeats without a number are left out."""
    numbers = pd.to_numeric(rows[column])
    return {
        int(repeat): float(number)
        for repeat, number in zip(rows["repeat"], numbers, strict=True)
        if not pd.isna(number)
    }


def interval(rows: pd.DataFrame, column: str) -> Interval | None:
    """Mean of a column over the repeats of a point, with Student's interval; None if no repeat has a number."""
    values = by_repeat(rows, column)
    return statistics.t_interval(list(values.values())) if values else None


def ratio(first: pd.DataFrame, second: pd.DataFrame, column: str) -> Interval | None:
    """How many times the second point's value the first one's is, paired; None if no repeat has both."""
    return paired_ratio(by_repeat(first, column), by_repeat(second, column))


def paired_ratio(first: dict[int, float], second: dict[int, float]) -> Interval | None:
    """The same of values by repeat, those that both have."""
    both = [repeat for repeat in first if repeat in second]
    if not both:
        return None
    return statistics.paired_ratio([first[each] for each in both], [second[each] for each in both])


def is_stable(rows: pd.DataFrame) -> bool:
    """Whether the repeats of a point, taken together, show no growth, and at most half of them are flagged themselves.

    Only then is a mean over them a property of the system, and not of how long requests arrived.
    """
    scores = list(by_repeat(rows, "growth_score").values())
    flagged = sum(str(verdict) == "False" for verdict in rows["stable"])
    return bool(scores) and not statistics.has_grown(scores) and flagged <= len(rows) / 2
