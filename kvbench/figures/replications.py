"""Repeats of a point in ``summary.csv``: values side by side, intervals of them, and whether the point was stable.

Repeat ``k`` of two systems served the same requests, so what is compared is paired by ``repeat``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd

from kvbench import statistics
from kvbench.figures.terminal import aligned, stability
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
    """Mean of a column over the repeats of a point, with its interval; None if no repeat has a number."""
    values = by_repeat(rows, column)
    return statistics.mean_interval(list(values.values())) if values else None


def ratio(first: pd.DataFrame, second: pd.DataFrame, column: str) -> Interval | None:
    """How many times the second point's value the first one's is, paired; None if no repeat has both."""
    one, other = by_repeat(first, column), by_repeat(second, column)
    both = [repeat for repeat in one if repeat in other]
    return statistics.paired_ratio([one[each] for each in both], [other[each] for each in both]) if both else None


def is_stable(rows: pd.DataFrame) -> bool:
    """Whether the repeats of a point, taken together, show no growth, and at most half of them are flagged themselves.

    Only then is a mean over them a property of the system, and not of how long requests arrived.
    """
    scores = list(by_repeat(rows, "growth_score").values())
    flagged = sum(str(verdict) == "False" for verdict in rows["stable"])
    return bool(scores) and not statistics.has_grown(scores) and flagged <= len(rows) / 2


def verdict(rows: pd.DataFrame) -> bool | None:
    """Whether a point is stable: repeats together by ``is_stable``, else as its rows say; None: it cannot be told."""
    if rows["repeat"].nunique() > 1 and rows["growth_score"].notna().any():
        return is_stable(rows)
    flags = {str(flag) for flag in rows["stable"]}
    return False if "False" in flags else True if flags == {"True"} else None


def table(summary: pd.DataFrame, labels: Sequence[str], metrics: Mapping[str, str]) -> str:
    """One line for each point: means with intervals; none where a queue grows, since no mean is the system's there.

    Args:
        summary: rows of all repeats.
        labels: columns that tell points apart.
        metrics: column -> heading. Of the first each point's ratio to the first system's is shown, too, over whole
            runs: those have the same requests, while warm-ups end where each system's does.
    """
    points = list(summary.groupby(list(labels), sort=False, dropna=False))
    first = str(summary["system"].iloc[0])
    place = labels.index("system")
    references = {_others(values, place): rows for values, rows in points if values[place] == first}
    column, heading = next(iter(metrics.items()))
    column = column.removeprefix("steady_")
    lines = [
        (
            *labels,
            "repeats",
            *metrics.values(),
            f"{heading.split()[0]} over {first}'s",
            "stable",
            "censored",
            "rejected",
        )
    ]
    for values, rows in points:
        stable = verdict(rows)
        means = [None if stable is False else interval(rows, name) for name in metrics]
        reference = references.get(_others(values, place))
        if stable is False or reference is None or values[place] == first or verdict(reference) is False:
            means.append(None)
        else:
            means.append(ratio(rows, reference, column))
        counts = [f"{rows[name].mean():.4g}" for name in ("num_censored", "num_rejected")]
        cells = (f"{value:g}" if isinstance(value, float) else str(value) for value in values)
        lines.append((*cells, str(len(rows)), *(str(each or "-") for each in means), stability(stable), *counts))
    return (
        f"{aligned(lines, left=len(labels))}\n"
        f"Means and {statistics.named()} between warm-up and last arrival; ratios of whole runs, paired by repeat; "
        "stable: no growing queue (docs/statistics.md)."
    )


def _others(values: Sequence[object], place: int) -> str:
    """The labels of a point but its system's."""
    return repr([*values[:place], *values[place + 1 :]])
