"""What vLLM's gain over another system is made of: capacities along a chain of axes, and the bounds beside them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from textwrap import fill
from typing import NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from kvbench import ablation, bounds
from kvbench.ablation import Corner, Step
from kvbench.capacity import Hardware, Model
from kvbench.figures import replications, style
from kvbench.figures.frames import footnote, select
from kvbench.figures.terminal import aligned
from kvbench.metrics import METRICS
from kvbench.paper.claims import Claim
from kvbench.paper.curves import crossing
from kvbench.paper.points import LatencyPanel, latency_panels
from kvbench.partition import Part
from kvbench.results import Results
from kvbench.runners.simulated import NOT_COEFFICIENTS, IterationCosts
from kvbench.statistics import Interval, mean_interval, named, paired_ratio

CAPACITY = "trace_capacity_req_per_s"
"""The rate at which the mean latency of the trace itself reaches the threshold, as the paper's rates are read."""
CLAIRVOYANT = "clairvoyant"
"""The reservation that is a bound, and no step of the chain."""
ROOFLINE = "roofline of the GPUs"
OPTIONS = ("watermark", "victim", "restore")
"""Axes that are options of the scheduler."""
PARTS: dict[Step, Part] = {
    Step("placement", "buddy", "first_fit"): Part("no rounding to powers of two", "#E69F00", "////"),
    Step("placement", "first_fit", "paged"): Part("no contiguity: blocks", "#0072B2"),
    Step("reservation", "oracle", "on_demand"): Part("on demand", "#56B4E9", "...."),
}
"""The steps of the paper's chain, in its words; others are named after the axis and its values."""
_OTHERS = [("#CC79A7", "\\\\\\\\"), ("#8c6d00", "xxxx"), ("#F0E442", "----"), ("#D55E00", "||||"), (style.GREY, "")]
_TEXT_PT = 6.0
_WIDTHS_IN = (4.4, 2.4)
"""Of a panel that stands alone, and of one beside another, about."""
_LABEL_LEN = 34
"""Characters of a line of a row's name."""
_TIMES = "\N{MULTIPLICATION SIGN}"


class Bar(NamedTuple):
    """A step, from the rate before it to the rate after it."""

    part: Part
    factor: Interval
    before: float
    after: float


class Bound(NamedTuple):
    """A rate beside the chain (requests/s), an interval without width where it is a formula."""

    label: str
    marker: str
    rate: Interval


class Panel(NamedTuple):
    """One setting.

    Attributes:
        title: model, hardware and workload.
        first: the system where the chain starts.
        last: where it ends.
        start: its capacity.
        end: that of the last.
        total: how many times the first's the last's is.
        bars: the steps between.
        num_orders: over which they are averages.
        bounds: beside them.
        papers: the same ratio on the paper's curves; None where it has none.
    """

    title: str
    first: str
    last: str
    start: Interval
    end: Interval
    total: Interval
    bars: list[Bar]
    num_orders: int
    bounds: list[Bound]
    papers: float | None

    def share(self, bar: Bar) -> float:
        """Of the logarithm of the whole gain."""
        return float(np.log(bar.factor.value) / np.log(self.total.value))


def panels(results: Results) -> list[Panel]:
    """Every setting in which a chain leads from the first system to the last."""
    summary = results.summary.dropna(subset=[CAPACITY])
    settings = (rows for _, rows in summary.groupby("panel", sort=False, dropna=False))
    return [panel for rows in settings if (panel := _panel(results, rows)) is not None]


def _panel(results: Results, rows: pd.DataFrame) -> Panel | None:
    chain = rows[rows["reservation"] != CLAIRVOYANT]
    groups = [select(chain, system=system) for system in chain["system"].unique()]
    values = [replications.by_repeat(group, CAPACITY) for group in groups]
    repeats = sorted(set.intersection(*(set(each) for each in values))) if values else []
    if len(repeats) < 2 or len(groups) < 2:
        return None
    rates = [np.array([each[repeat] for repeat in repeats]) for each in values]
    corners = _corners(results, groups)
    factors = ablation.contributions(corners, rates)
    if not factors:
        return None
    start, end = mean_interval(rates[0]), mean_interval(rates[-1])
    condition = _condition(rows)
    row = rows.iloc[0]
    return Panel(
        title=condition.title if condition else f"{row['model']} on {row['hardware']}, {row['workload']}",
        first=_name(groups[0], _common(rows)),
        last=_name(groups[-1], _common(rows)),
        start=start,
        end=end,
        total=paired_ratio(rates[-1], rates[0]),
        bars=list(_bars(factors, start.value)),
        num_orders=len(ablation.orders(corners)),
        bounds=[*_clairvoyant(rows), *_formulas(results, groups[-1])],
        papers=_papers(groups[0], groups[-1]),
    )


def _corners(results: Results, groups: list[pd.DataFrame]) -> list[Corner]:
    """Where each system lies on the axes in which they differ."""
    found: list[dict[str, object]] = []
    for group in groups:
        row = group.iloc[0]
        options = results.config(row)["scheduler"]
        found.append(
            {"placement": row["allocator"], "reservation": row["reservation"]}
            | {name: options.get(name) for name in OPTIONS}
            | {"block size": row["block_size"]}
        )
    axes = [axis for axis in found[0] if len({str(each[axis]) for each in found}) > 1]
    sizes = {(str(each["placement"]), str(each["block size"])) for each in found}
    if len(sizes) == len({placement for placement, _ in sizes}):  # the block size is a part of the placement
        axes = [axis for axis in axes if axis != "block size"]
    return [{axis: str(each[axis]) for axis in axes} for each in found]


def _bars(factors: Mapping[Step, Interval], start: float) -> Iterator[Bar]:
    looks = iter(_OTHERS * len(factors))
    rate = start
    for step, factor in factors.items():
        part = PARTS.get(step) or Part(f"{step.axis}: {step.before} to {step.after}", *next(looks))
        yield Bar(part, factor, rate, rate * factor.value)
        rate *= factor.value


def _name(rows: pd.DataFrame, common: list[str]) -> str:
    """Of a system, without what all have in common."""
    system = str(rows["system"].iloc[0])
    label = style.looks([system])[system].label.partition(" [")[0]
    own = [option.rpartition("scheduler.")[2] for option in _settings(system) if option not in common]
    return f"{label} [{', '.join(own)}]" if own else label


def _settings(system: str) -> list[str]:
    """By which a system differs from its preset."""
    return [each for each in system.partition("[")[2].removesuffix("]").split(",") if each]


def _common(rows: pd.DataFrame) -> list[str]:
    """Settings that all systems have."""
    first, *others = (_settings(str(system)) for system in rows["system"].unique())
    return [each for each in first if all(each in other for other in others)]


def _clairvoyant(rows: pd.DataFrame) -> Iterator[Bound]:
    found = replications.interval(rows[rows["reservation"] == CLAIRVOYANT], CAPACITY)
    if found is not None:
        yield Bound("clairvoyant admission", "^", found)


def _formulas(results: Results, rows: pd.DataFrame) -> Iterator[Bound]:
    """Zero waste and roofline, of the requests that were served."""
    row = rows.iloc[0]
    config, requests = results.config(row), results.requests(row)
    demand = bounds.Demand.of(*(np.asarray(requests[name], np.float64) for name in ("prompt_len", "output_len")))
    costs = IterationCosts(**{key: value for key, value in config["costs"].items() if key not in NOT_COEFFICIENTS})
    num_slots = int(row["num_slots"])
    waste = bounds.zero_waste(demand, costs, num_slots)
    yield Bound("no waste of memory", "s", Interval(waste, waste, waste, 1))
    roof = bounds.roofline(demand, Model(**config["model"]), Hardware(**config["hardware"]), num_slots)
    if roof is not None:
        yield Bound(ROOFLINE, "*", Interval(roof, roof, roof, 1))


def _condition(rows: pd.DataFrame) -> LatencyPanel | None:
    """The paper's panel of this setting."""
    row = rows.iloc[0]
    found = (
        each for each in latency_panels().values() if (each.model, each.workload) == (row["model"], row["workload"])
    )
    return next(found, None)


def _papers(first: pd.DataFrame, last: pd.DataFrame) -> float | None:
    """The ratio of both systems' rates at the threshold, on the paper's curves of this setting."""
    condition, threshold = _condition(first), first["threshold"].iloc[0]
    if condition is None:
        return None
    curves = [condition.curves.get(str(rows["system"].iloc[0])) for rows in (first, last)]
    rates = [crossing(((p.x, p.y) for p in curve.points), threshold).rate if curve else None for curve in curves]
    return rates[1] / rates[0] if rates[0] and rates[1] else None


def draw(results: Results) -> dict[str, Figure]:
    """One panel for each setting: step by step from the first system's capacity to the last one's; then the bounds."""
    found = panels(results)
    if not found:
        return {}
    columns = min(len(found), 2)
    rows = -(-len(found) // columns)
    lines = max(len(panel.bars) + len(panel.bounds) for panel in found) + 2
    with style.context():
        height = rows * (0.5 + (0.165 if columns > 1 else 0.2) * lines)
        figure = style.new_figure(style.PAGE_IN, height, _note(results, found))
        grid = figure.subplots(rows, columns, squeeze=False)
        for axes in grid.flat[len(found) :]:
            axes.remove()
        for axes, panel in zip(grid.flat, found, strict=False):
            _draw_panel(axes, panel, _WIDTHS_IN[columns - 1])
        for left, *others in grid:
            for axes in others:
                if [*map(Text.get_text, axes.get_yticklabels())] == [*map(Text.get_text, left.get_yticklabels())]:
                    axes.set_yticklabels([])
        for axes in grid[-1]:
            axes.set_xlabel("Request rate (requests/s, logarithmic)")
    return {"fig_waterfall": figure}


def _draw_panel(axes: Axes, panel: Panel, width_in: float) -> None:
    labels = [panel.first, *(bar.part.label for bar in panel.bars), panel.last, *(each.label for each in panel.bounds)]
    texts = [(0, panel.start.high, f"{panel.start.value:.3g}")]
    _draw_rate(axes, 0, panel.start, "o")
    for place, bar in enumerate(panel.bars, 1):
        left, width = min(bar.before, bar.after), abs(bar.after - bar.before)
        axes.barh(place, width, 0.66, left, color=bar.part.color, hatch=bar.part.hatch, edgecolor="white", linewidth=0)
        axes.plot([bar.before] * 2, [place - 1, place + 0.33], color=style.INK, linewidth=0.5)
        _draw_rate(
            axes, place, Interval(bar.after, bar.before * bar.factor.low, bar.before * bar.factor.high, 2), "none"
        )
        texts.append((place, max(bar.before, bar.before * bar.factor.high), f"{_TIMES}{bar.factor}"))
    last = len(panel.bars) + 1
    axes.plot([panel.end.value] * 2, [last - 1.33, last], color=style.INK, linewidth=0.5)
    _draw_rate(axes, last, panel.end, "o")
    texts.append((last, panel.end.high, f"{_TIMES}{panel.total}"))
    if panel.papers:
        rate = panel.start.value * panel.papers
        style.plot_hollow(axes, [(rate, last)], style.INK, "D", size=5)
        texts[-1] = last, max(rate, panel.end.high), f"{texts[-1][2]}, paper {panel.papers:.2f}"
    far = 1.5 * max(panel.end.high, *(bar.after for bar in panel.bars))
    for place, bound in enumerate(panel.bounds, last + 1):
        words = f"{bound.rate.value:.3g}: {panel.last.partition(' [')[0]} at {_percent(panel, bound)}"
        if bound.rate.value > far:  # on the axis it would squeeze the steps
            words = f"{words}  \N{RIGHTWARDS ARROW}"
            axes.text(
                0.99, place, words, va="center", ha="right", fontsize=_TEXT_PT, transform=axes.get_yaxis_transform()
            )
        else:
            _draw_rate(axes, place, bound.rate, bound.marker)
            texts.append((place, bound.rate.high, words))
    axes.axhline(last + 0.5, color=style.GREY, linewidth=0.5, linestyle=(0, (1, 2)))
    _frame(axes, 0.94 * panel.start.low, texts, width_in)
    axes.set_yticks(range(len(labels)), [fill(label, _LABEL_LEN) for label in labels])
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")
    axes.set_title(panel.title)


def _draw_rate(axes: Axes, place: int, rate: Interval, marker: str) -> None:
    error = [[rate.value - rate.low], [rate.high - rate.value]]
    axes.errorbar(rate.value, place, xerr=error, color=style.INK, marker=marker, markersize=3.5, capsize=2)


def _frame(axes: Axes, left: float, texts: list[tuple[int, float, str]], width_in: float) -> None:
    """Write beside each row, and give the rate's axis the length that all rows need."""
    axes.set_xscale("log")
    spans = []
    for place, x, words in texts:
        text = axes.annotate(words, (x, place), (5, 0), textcoords="offset points", va="center", fontsize=_TEXT_PT)
        text.set_in_layout(False)
        spans.append(np.log(x / left) / (1 - 0.55 * _TEXT_PT / 72 * (len(words) + 2) / width_in))
    axes.set_xlim(left, left * float(np.exp(max(spans))))
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(axis="x", which="minor", length=0)


def _percent(panel: Panel, bound: Bound) -> str:
    return f"{100 * panel.end.value / bound.rate.value:.0f} %"


def table(results: Results) -> str | None:
    """Every step's factor, interval and share of the gain; every bound, and what part of it is reached."""
    lines: list[tuple[str, ...]] = [("setting", "", "requests/s", "factor", "share of the gain", "reached")]
    for panel in panels(results):
        lines.append((panel.title, panel.first, str(panel.start), "", "", ""))
        for bar in panel.bars:
            share = f"{100 * panel.share(bar):.0f} %"
            lines.append(("", bar.part.label, f"{bar.after:.3g}", str(bar.factor), share, ""))
        papers = f" (paper {panel.papers:.2f})" if panel.papers else ""
        lines.append(("", panel.last, str(panel.end), f"{panel.total}{papers}", "", ""))
        for bound in panel.bounds:
            rate = str(bound.rate) if bound.rate.num > 1 else f"{bound.rate.value:.3g}"
            lines.append(("", bound.label, rate, "", "", _percent(panel, bound)))
    return f"{aligned(lines, left=2)}\n{_meaning(results.summary)}" if len(lines) > 1 else None


def claims(results: Results) -> list[Claim]:
    """None: the paper does not take its gain apart."""
    del results
    return []


def _meaning(summary: pd.DataFrame) -> str:
    row = summary.dropna(subset=[CAPACITY]).iloc[0]
    return (
        f"Rates at which a trace's {row['metric']} is {row['threshold']:g} "
        f"{METRICS[row['metric']].unit}; {named()} over {summary['repeat'].nunique()} repeats, of factors paired."
    )


def _note(results: Results, found: list[Panel]) -> str:
    orders = max(panel.num_orders for panel in found)
    more = [f"All with {', '.join(common)}"] if (common := _common(results.summary)) else []
    more += [f"Steps: averages over {orders} orders of the axes"] if orders > 1 else []
    if any(panel.papers for panel in found):
        more.append("Hollow: the paper's curves")
    if any(each.label.startswith("clairvoyant") for panel in found for each in panel.bounds):
        more.append("Clairvoyant admission: in order of arrival, nobody who would not find room to the end")
    more.append("No waste: this engine's limit if every slot held a token in every iteration")
    if any(each.label == ROOFLINE for panel in found for each in panel.bounds):
        more.append("Roofline: the same pool, with the GPUs' peak bandwidth and operations")
    return footnote(results.summary, _meaning(results.summary).rstrip("."), *more)
