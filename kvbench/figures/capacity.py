"""The rate that each system sustains, with intervals over repeats, and how many times another's it is."""

from __future__ import annotations

import math
import re

import pandas as pd
from matplotlib.figure import Figure

from kvbench.figures import comparison, replications, style
from kvbench.figures.frames import footnote, select, setting, systems
from kvbench.figures.terminal import aligned
from kvbench.metrics import METRICS
from kvbench.paper.claims import Claim
from kvbench.results import Results
from kvbench.statistics import named

CAPACITY = "capacity_req_per_s"
ON_THE_TRACE = "trace_capacity_req_per_s"
_BELOW = 0.3
"""Of a row's height: so far below it stands what the traces gave."""
SETTING = ["panel", "model", "hardware", "workload", "metric", "threshold", "slo_ttft_s", "slo_tpot_s", "duration_s"]
"""Columns that rows have in common where systems are compared."""


def draw(results: Results) -> dict[str, Figure]:
    """One row for each system, settings below each other: its capacity with the interval; hollow what traces gave."""
    settings = _settings(results.summary)
    if not settings:
        return {}
    count = sum(len(systems(rows)) for rows in settings)
    with style.context():
        hollow = "Hollow, below: as read on the traces, not corrected"
        criterion = _criterion(results.summary)
        criterion = criterion[:1].upper() + criterion[1:]
        note = footnote(results.summary, criterion, _meaning(results.summary), hollow)
        figure = style.new_figure(style.COLUMN_IN, 0.35 + 0.22 * count + 0.3 * len(settings), note)
        heights = [len(systems(rows)) for rows in settings]
        grid = figure.subplots(len(settings), 1, squeeze=False, sharex=True, height_ratios=heights)
        for axes, rows in zip(grid[:, 0], settings, strict=True):
            looks = style.looks(systems(rows))
            for place, (system, look) in enumerate(looks.items()):
                mine = select(rows, system=system)
                found, trace = replications.interval(mine, CAPACITY), replications.interval(mine, ON_THE_TRACE)
                if found is None or trace is None:
                    continue
                error = [[found.value - found.low], [found.high - found.value]]
                axes.errorbar(found.value, place, xerr=error, color=look.color, marker=look.marker, capsize=2)
                style.plot_hollow(axes, [(trace.value, place + _BELOW)], look.color, look.marker, size=3.5)
            names = [style.wrapped(look.label, 0.45 * style.COLUMN_IN) for look in looks.values()]
            axes.set_yticks(range(len(looks)), names)
            axes.set_ylim(len(looks) - 0.4, -0.5)
            axes.margins(x=0.08)
            axes.set_xlim(left=0)
            axes.set_title(_title(rows))
        grid[-1, 0].set_xlabel("Request rate sustained (requests/s)")
    return {"capacity": figure}


def table(results: Results) -> str | None:
    """Capacities with intervals, what the trace itself gave, and vLLM's capacity over each other's."""
    lines: list[tuple[str, ...]] = []
    for rows in _settings(results.summary):
        vllm = select(rows, system="vllm")
        for system, look in style.looks(systems(rows)).items():
            mine = select(rows, system=system)
            found, trace = replications.interval(mine, CAPACITY), replications.interval(mine, ON_THE_TRACE)
            over = replications.ratio(vllm, mine, CAPACITY) if system != "vllm" else None
            lines.append((_title(rows), look.label, str(found or "-"), str(trace or "-"), str(over or "-")))
    if not lines:
        return None
    header = ("setting", "system", "capacity", "as read", "vLLM over it")
    title = (
        f"Capacity (requests/s): {_criterion(results.summary)}.\n{_meaning(results.summary)}; as read: not corrected."
    )
    return f"{title}\n{aligned([header, *lines], left=2)}"


def claims(results: Results) -> list[Claim]:
    """None: the paper has no capacities of this kind."""
    del results
    return []


def _settings(summary: pd.DataFrame) -> list[pd.DataFrame]:
    """The rows of each setting in which systems are compared."""
    rows = summary.dropna(subset=[CAPACITY])
    return [group for _, group in rows.groupby(SETTING, sort=False, dropna=False)]


def _title(rows: pd.DataFrame) -> str:
    row = rows.iloc[0]
    return setting(row["model"], row["hardware"], row["workload"])


def _criterion(summary: pd.DataFrame) -> str:
    """The thresholds, in words."""
    found = []
    for metric, threshold in dict.fromkeys(zip(summary["metric"], summary["threshold"], strict=True)):
        unit = METRICS[metric].unit
        found.append(f"{_in_words(metric)} {'at least' if unit == '%' else 'at most'} {threshold:g} {unit}")
    return "; ".join(found)


def _in_words(metric: str) -> str:
    """Which number of what: "mean normalized latency"."""
    words = comparison.in_words(metric)
    what, _, which = words.rpartition(" ")
    return f"{which} {what}" if re.fullmatch(r"mean|p\d+", which) else words


def _meaning(summary: pd.DataFrame) -> str:
    nums = " and ".join(
        map(str, sorted({int(num) for num in summary.groupby([*SETTING, "system"], dropna=False).size()}))
    )
    durations = [f"{each:g} s" for each in sorted(set(summary["duration_s"])) if not math.isnan(each)]
    length = f" ({', '.join(durations)})" if durations else ""
    return f"Means and {named()} over {nums} paired repeats, corrected for the length of the trace{length}"
