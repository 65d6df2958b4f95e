"""How far one seed, one trace length and one threshold move latencies, rates and gains read off a single run."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

from kvbench.figures import replications, style
from kvbench.figures.frames import LATENCY, footnote, select
from kvbench.figures.style import LineStyle, Look
from kvbench.figures.terminal import aligned, number
from kvbench.paper.claims import Claim
from kvbench.paper.curves import crossing
from kvbench.paper.points import Curve, latency_panels
from kvbench.results import Results
from kvbench.statistics import Interval, named

CAPACITY, STEADY = "trace_capacity_req_per_s", "capacity_req_per_s"
SYSTEMS = ("vllm", "orca_oracle")
_LINES: list[tuple[str, str, LineStyle]] = [
    ("#E69F00", "s", (0, (4, 1.2))),
    ("#0072B2", "o", "-"),
    ("#009E73", "^", (0, (1, 1))),
]


class Seeds(NamedTuple):
    """One of the paper's points.

    Attributes:
        name: system, model and rate.
        replay: latency of the paper's own trace; None where it was not run.
        latencies: of the other seeds.
        papers: the plotted value; None where there is none.
    """

    name: str
    replay: float | None
    latencies: list[float]
    papers: float | None

    @property
    def variation(self) -> float:
        """Standard deviation over mean."""
        return float(np.std(self.latencies, ddof=1) / np.mean(self.latencies)) if len(self.latencies) > 1 else np.nan


class Reading(NamedTuple):
    """What is read at one threshold on traces of one length.

    Attributes:
        rate: vLLM's.
        steady: the same, corrected for the length.
        gain: vLLM's rate over Orca (Oracle)'s, paired.
        gains: of each repeat.
        papers: the gain on the paper's curves, if it ran traces of this length.
    """

    threshold: float
    duration_s: float
    rate: Interval
    steady: Interval
    gain: Interval
    gains: list[float]
    papers: float | None


def seeds(summary: pd.DataFrame) -> list[Seeds]:
    """Every point that was run with several seeds."""
    found = []
    for _, rows in select(summary, panel="seeds").groupby(["system", "model", "request_rate"], sort=False):
        first = rows.iloc[0]
        system, model, rate = str(first["system"]), str(first["model"]), float(first["request_rate"])
        values = replications.by_repeat(rows, LATENCY)
        curve = _curve(system, model, float(first["duration_s"]))
        papers = [point.y for point in curve.measurements if point.x == rate] if curve else []
        label = f"{style.looks([system])[system].label}, {model.removeprefix('opt_').upper()}, {rate:g}/s"
        replay = values.pop(0, None)
        found.append(Seeds(label, replay, list(values.values()), float(np.mean(papers)) if papers else None))
    return found


def readings(summary: pd.DataFrame) -> list[Reading]:
    """Every threshold and length at which both systems were run."""
    found = []
    rows = select(summary, panel="readings").dropna(subset=[CAPACITY])
    for _, both in rows.groupby(["threshold", "duration_s"]):
        threshold, duration_s = (float(both[name].iloc[0]) for name in ("threshold", "duration_s"))
        mine, other = (select(both, system=system) for system in SYSTEMS)
        gain = replications.ratio(mine, other, CAPACITY)
        rate, steady = replications.interval(mine, CAPACITY), replications.interval(mine, STEADY)
        if gain is None or rate is None or steady is None:
            continue
        rates = [replications.by_repeat(each, CAPACITY) for each in (mine, other)]
        gains = [rate / rates[1][repeat] for repeat, rate in rates[0].items() if repeat in rates[1]]
        papers = _papers(str(both["model"].iloc[0]), duration_s, threshold)
        found.append(Reading(threshold, duration_s, rate, steady, gain, gains, papers))
    return found


def _curve(system: str, model: str, duration_s: float) -> Curve | None:
    """The paper's curve on ShareGPT traces of this length."""
    for condition in latency_panels().values():
        if (condition.model, condition.workload, condition.duration_s) == (model, "sharegpt", duration_s):
            return condition.curves.get(system)
    return None


def _papers(model: str, duration_s: float, threshold: float) -> float | None:
    curves = [_curve(system, model, duration_s) for system in SYSTEMS]
    mine, other = (crossing(((p.x, p.y) for p in c.points), threshold).rate if c else None for c in curves)
    return mine / other if mine and other else None


def draw(results: Results) -> dict[str, Figure]:
    """Latencies of seeds beside each other; rates and gains against the length of the trace, a line per threshold."""
    summary = results.summary
    points, found = seeds(summary), readings(summary)
    if not points and not found:
        return {}
    looks = _looks(found)
    with style.context():
        figure = style.new_figure(style.PAGE_IN, 2.3, _note(summary, points, found))
        left, middle, right = figure.subplots(1, 3, width_ratios=[1.35, 1, 1])
        _draw_seeds(left, points)
        for index, (threshold, look) in enumerate(looks.items()):
            aside = 1.13 ** (index - (len(looks) - 1) / 2)
            mine = [each for each in found if each.threshold == threshold]
            _draw_line(middle, [(aside * each.duration_s, each.rate) for each in mine], look)
            _draw_line(right, [(aside * each.duration_s, each.gain) for each in mine], look)
            for each in mine:
                xs = [aside * each.duration_s] * len(each.gains)
                right.plot(xs, each.gains, "_", color=look.color, markersize=5, alpha=0.6)
            papers = [(aside * each.duration_s, each.papers) for each in mine if each.papers is not None]
            style.plot_hollow(right, papers, look.color, "D")
        durations = sorted({each.duration_s for each in found})
        _frame(middle, durations, "vLLM's rate (requests/s)", "The rate that is read")
        _frame(right, durations, "Its ratio to Orca (Oracle)'s", "The gain that is read")
        handles: list[Artist] = style.legend({look.label: look for look in looks.values()})
        handles += [Line2D([], [], color=style.INK, marker="_", linestyle="none", label="one seed")]
        handles += [Line2D([], [], color=style.INK, marker="o", linestyle="none", label="the paper's seed")]
        handles += [style.hollow("D")]
        style.put_legend(figure, handles, len(handles))
    return {"fig_noise": figure}


def _looks(found: list[Reading]) -> dict[float, Look]:
    thresholds = sorted({each.threshold for each in found})
    return {
        threshold: Look(f"{threshold:g} s/token", *_LINES[index % len(_LINES)])
        for index, threshold in enumerate(thresholds)
    }


def _draw_seeds(axes: Axes, points: list[Seeds]) -> None:
    for place, point in enumerate(points):
        axes.plot(point.latencies, [place] * len(point.latencies), "|", color=style.INK, markersize=9)
        if point.replay is not None:
            axes.plot(point.replay, place, "o", color=style.INK, markersize=4)
        if point.papers is not None:
            style.plot_hollow(axes, [(point.papers, place)], style.INK, "D", size=6)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_yticks(range(len(points)), [point.name.replace(", ", "\n", 1) for point in points])
    axes.set_ylim(len(points) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("Normalized latency (s/token)")
    axes.set_title("One seed")


def _draw_line(axes: Axes, points: list[tuple[float, Interval]], look: Look) -> None:
    xs, means = [x for x, _ in points], [each.value for _, each in points]
    errors = [[each.value - each.low for _, each in points], [each.high - each.value for _, each in points]]
    axes.errorbar(xs, means, yerr=errors, color=look.color, marker=look.marker, linestyle=look.linestyle, capsize=2)


def _frame(axes: Axes, durations: list[float], label: str, title: str) -> None:
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(durations))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: _time(x)))
    if durations:
        axes.set_xlim(durations[0] / 1.5, durations[-1] * 1.5)
    axes.set_xlabel("Length of the trace")
    axes.set_ylabel(label)
    axes.set_title(title)


def _time(seconds: float) -> str:
    return f"{seconds / 3600:g} h" if seconds >= 3600 else f"{seconds / 60:g} min"


def table(results: Results) -> str | None:
    """Latencies over seeds, then rates and gains for every threshold and length."""
    parts = []
    if points := seeds(results.summary):
        lines: list[tuple[str, ...]] = [
            (
                "at the paper's rate (s/token)",
                "paper",
                "its trace",
                "seeds",
                "least",
                "median",
                "most",
                "deviation/mean",
            )
        ]
        for point in points:
            spread = (number(float(np.quantile(point.latencies, q))) if point.latencies else "-" for q in (0, 0.5, 1))
            count, variation = str(len(point.latencies)), number(point.variation, 2)
            lines.append((point.name, number(point.papers), number(point.replay), count, *spread, variation))
        parts.append(aligned(lines))
    if found := readings(results.summary):
        lines = [("threshold", "trace", "vLLM's rate", "corrected", "over Orca (Oracle)", "of one seed", "paper")]
        for each in found:
            gains = str(each.gain), f"{min(each.gains):.3g} to {max(each.gains):.3g}", number(each.papers)
            threshold, length = f"{each.threshold:g} s/token", _time(each.duration_s)
            lines.append((threshold, length, str(each.rate), str(each.steady), *gains))
        parts.append(aligned(lines, left=2))
    return "\n\n".join(parts) or None


def claims(results: Results) -> list[Claim]:
    """None: what is shown is how much the paper's numbers can mean."""
    del results
    return []


def _note(summary: pd.DataFrame, points: list[Seeds], found: list[Reading]) -> str:
    more = []
    if points:
        nums = " and ".join(str(num) for num in sorted({len(each.latencies) for each in points}))
        more.append(f"Left: {nums} seeds of Poisson arrivals and random lengths")
    if found:
        nums = " and ".join(str(num) for num in sorted({each.rate.num for each in found}))
        more.append(f"Middle and right: means and {named()} over {nums} paired repeats, as read on the trace")
    return footnote(summary, *more)
