"""Simulated against real runs of the same points on this machine, with costs that were fitted to other runs."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from kvbench.figures import style
from kvbench.figures.frames import measured, select, simulated, value
from kvbench.figures.terminal import aligned, number
from kvbench.paper.claims import Claim, Statement
from kvbench.results import Results

LOADS = {"at_once": "all at once", "poisson": "Poisson"}
"""Panels of the experiment."""
METRICS = {
    "throughput_tok_per_s": "output tokens/s",
    "normalized_latency_mean_s": "normalized latency, s/token",
    "num_running_mean": "mean batch",
    "ttft_p50_s": "TTFT median, s",
    "num_preemptions": "preemptions",
}
CLAIMED = ("throughput_tok_per_s", "normalized_latency_mean_s")
"""Metrics that kvbench expects to be right within the tolerance."""
TOLERANCE_PCT = 15.0
NUM_TRIALS = 3
"""Real runs of each point whose median is compared."""
MODEL = "opt_125m"
OWN = "kvbench's own expectation of its simulator, not the paper's"


class Pair(NamedTuple):
    """A metric of a point, simulated and real.

    Attributes:
        simulated: the value; None where it was not run.
        real: the median of the trials; None where there is none.
        least: of the trials.
        most: of the trials.
        num_trials: real runs.
    """

    simulated: float | None
    real: float | None
    least: float
    most: float
    num_trials: int

    @property
    def ratio(self) -> float | None:
        """Simulated over real; None where one of them does not exist or the real one is 0."""
        return self.simulated / self.real if self.simulated is not None and self.real else None

    @property
    def error_pct(self) -> float | None:
        """By which the simulated value is above the real one."""
        return None if self.ratio is None else 100 * (self.ratio - 1)

    @property
    def spread_pct(self) -> float | None:
        """From the least to the most of the real runs, of their median."""
        return 100 * (self.most - self.least) / self.real if self.real else None


def draw(results: Results) -> dict[str, Figure]:
    """Throughput, normalized latency and median TTFT: simulated over real, one marker per system and load."""
    summary = _prepared(results)
    looks = style.looks(_systems(summary))
    if not looks:
        return {}
    with style.context():
        figure = style.new_figure(style.PAGE_IN, 2.5, _footnote(summary))
        for axes, metric in zip(figure.subplots(1, 3), (*CLAIMED, "ttft_p50_s"), strict=True):
            ends: list[float] = []
            for load, system in _points(summary):
                pair = pair_of(summary, load, system, metric)
                if pair.simulated is None or pair.real is None or min(pair.simulated, pair.least) <= 0:
                    continue
                look = looks[system]
                axes.errorbar(
                    pair.real,
                    pair.simulated,
                    xerr=[[pair.real - pair.least], [pair.most - pair.real]],
                    color=look.color,
                    marker=look.marker,
                    markersize=4,
                    markerfacecolor="none" if load == "poisson" else look.color,
                    markeredgewidth=0.8,
                    elinewidth=0.7,
                    capsize=1.5,
                    linestyle="none",
                    zorder=3,
                )
                ends += [pair.simulated, pair.least, pair.most]
            _frame(axes, METRICS[metric], ends)
        handles: list[Artist] = [
            Line2D([], [], color=look.color, marker=look.marker, linestyle="none", markersize=4, label=look.label)
            for look in looks.values()
        ]
        handles += [
            Line2D([], [], color=style.INK, marker="o", linestyle="none", markersize=4, label="all at once"),
            style.hollow("o", "Poisson arrivals"),
            Patch(facecolor="#e6e6e6", edgecolor="none", label=f"\N{PLUS-MINUS SIGN}{TOLERANCE_PCT:g} %"),
        ]
        style.put_legend(figure, handles, 4)
    return {"fig_fidelity": figure}


def table(results: Results) -> str | None:
    """Every load and system: the error of each metric, and how far the real runs lie apart."""
    summary = _prepared(results)
    points = _points(summary)
    if not points:
        return None
    looks = style.looks(_systems(summary))
    header = ("load", "system", "runs", "tokens/s", "error", "spread", "s/token", "error", "spread")
    rows = [(*header, "batch", "TTFT", "preempted")]
    for load, system in points:
        pairs = {metric: pair_of(summary, load, system, metric) for metric in METRICS}
        cells = [LOADS.get(load, load), looks[system].label, str(pairs[CLAIMED[0]].num_trials)]
        for metric in CLAIMED:
            cells += [number(pairs[metric].real), _signed(pairs[metric].error_pct), _percent(pairs[metric].spread_pct)]
        cells += [_signed(pairs[metric].error_pct) for metric in ("num_running_mean", "ttft_p50_s")]
        preempted = pairs["num_preemptions"]
        rows.append((*cells, f"{number(preempted.simulated)}/{number(preempted.real)}"))  # type: ignore[arg-type]
    lines = [
        aligned(rows, left=2),
        "Values: real, median of the runs. Error: simulated above it. Spread: of the real runs, greatest less least.",
        "Batch, TTFT (median): errors. Preempted: simulated/real.",
        *_worst(summary, points),
        *_calibration(results, summary),
    ]
    return "\n".join(lines)


def claims(results: Results) -> list[Claim]:
    """Simulated over the median of three real runs, for each load, system and claimed metric; the paper has none."""
    summary = _prepared(results)
    rows = []
    for load, title in LOADS.items():
        for system, look in style.SYSTEMS.items():
            for metric in CLAIMED:
                pair = pair_of(summary, load, system, metric)
                spread = pair.spread_pct
                note = OWN if spread is None else f"{OWN}; the real runs lie {spread:.1f} % apart"
                statement = Statement(
                    claim=f"{look.label}, {title}: {METRICS[metric].partition(',')[0]}, simulated over real",
                    figure="none",
                    low=1.0,
                    high=1.0,
                    unit="ratio",
                    tolerance=f"{TOLERANCE_PCT:g} %",
                    note=note,
                )
                ratio = pair.ratio if pair.num_trials >= NUM_TRIALS else None
                missing = f"needs {NUM_TRIALS} real runs (trial=0,1,2) and a simulated one"
                of = select(summary, load=load, preset=system)
                rows.append(statement.judge(ratio, missing=missing, obstacle=_obstacle(of)))
    return rows


def pair_of(summary: pd.DataFrame, load: str, system: str, metric: str) -> Pair:
    """A metric of a point, from the rows that are prepared."""
    rows = select(summary, load=load, preset=system)
    real = pd.to_numeric(measured(rows)[metric]).dropna().to_numpy(np.float64)
    expected = value(simulated(rows), metric)
    if not len(real):
        return Pair(expected, None, np.nan, np.nan, 0)
    return Pair(expected, float(np.median(real)), float(real.min()), float(real.max()), len(real))


def _prepared(results: Results) -> pd.DataFrame:
    """The summary's rows that have a number, with their load and the system's preset, whatever prices it."""
    summary = results.summary.dropna(subset=[CLAIMED[0]])
    preset = summary["system"].astype(str).str.replace(r"\[costs=[^\],]*\]$", "", regex=True)
    return summary.assign(preset=preset, load=summary["panel"].astype(str))


def _systems(summary: pd.DataFrame) -> list[str]:
    return sorted(set(summary["preset"]))


def _points(summary: pd.DataFrame) -> list[tuple[str, str]]:
    """Load and system of each point, loads first."""
    there = set(zip(summary["load"], summary["preset"], strict=True))
    loads = [*LOADS, *sorted({load for load, _ in there} - set(LOADS))]
    return [(load, system) for load in loads for system in style.looks(_systems(summary)) if (load, system) in there]


def _frame(axes: Axes, label: str, ends: list[float]) -> None:
    """Equal logarithmic axes with the identity and the band of the tolerance."""
    axes.set_xscale("log")
    axes.set_yscale("log")
    low, high = (min(ends) / 1.4, max(ends) * 1.4) if ends else (0.1, 10.0)
    line = np.array([low, high])
    axes.fill_between(
        line, line * (1 - TOLERANCE_PCT / 100), line * (1 + TOLERANCE_PCT / 100), color="#e6e6e6", linewidth=0, zorder=1
    )
    axes.plot(line, line, color=style.GREY, linewidth=0.6, zorder=2)
    axes.set_xlim(low, high)
    axes.set_ylim(low, high)
    axes.set_aspect("equal")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.set_minor_formatter(NullFormatter())
    axes.grid(visible=False)
    axes.set_title(label[0].upper() + label[1:])
    axes.set_xlabel("Real")
    axes.set_ylabel("Simulated")


def _footnote(summary: pd.DataFrame) -> str:
    def words(rows: pd.DataFrame, column: str) -> str:
        return "; ".join(sorted(set(rows[column].dropna().astype(str)))) or "none"

    return (
        f"Real: {words(summary, 'model')}, measured on {words(measured(summary), 'device')}; median of the runs, "
        f"bars from the least to the most. Simulated (costs: {words(simulated(summary), 'costs')}, fitted to "
        f"other requests). Lengths: {words(summary, 'workload_source')}."
    )


def _worst(summary: pd.DataFrame, points: list[tuple[str, str]]) -> list[str]:
    """The largest error of each metric that is expected to be right."""
    looks, lines = style.looks(_systems(summary)), []
    for metric in CLAIMED:
        errors = [(load, system, pair_of(summary, load, system, metric).error_pct) for load, system in points]
        known = [(abs(error), load, system, error) for load, system, error in errors if error is not None]
        if known:
            _, load, system, error = max(known)
            lines.append(
                f"Largest error of {METRICS[metric]}: {error:+.1f} % ({looks[system].label}, {LOADS.get(load, load)}; "
                f"expected: within {TOLERANCE_PCT:g} %)"
            )
    return lines


def _calibration(results: Results, summary: pd.DataFrame) -> list[str]:
    """How well the costs describe what they were fitted to."""
    for _, row in simulated(summary).iterrows():
        costs = results.config(row).get("costs") or {}
        if found := costs.get("residuals"):
            return [
                f"costs={costs['name']}: fitted to {found['num_iterations']} iterations (relative error: rms "
                f"{found['rms_pct']:g} %, 90 % within {found['p90_pct']:g} %); total time of a run held out "
                f"{found['held_out_total_pct']:+g} %"
            ]
    return []


def _obstacle(rows: pd.DataFrame) -> str | None:
    """Why the expectation does not speak of these rows."""
    others = sorted(set(rows["model"]) - {MODEL})
    if others:
        return f"model is {', '.join(others)}, the expectation's is {MODEL}"
    costs = sorted(set(simulated(rows)["costs"].dropna()))
    hardware = sorted(set(rows["hardware"]) - {"local"})
    return f"costs={', '.join(costs)} on {', '.join(hardware)}" if hardware else None


def _signed(error_pct: float | None) -> str:
    return "-" if error_pct is None else f"{error_pct:+.1f} %"


def _percent(share_pct: float | None) -> str:
    return "-" if share_pct is None else f"{share_pct:.1f} %"
