"""Bars of the memory that sharing saves, one panel for parallel samples and one for beams."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from kvbench.figures import bars, style
from kvbench.figures.frames import select, value
from kvbench.figures.terminal import aligned, number

SAVED = "sharing_saved_pct"
TITLES = {"parallel": ("(a) Parallel sampling", "Samples"), "beam": ("(b) Beam search", "Beams")}
"""Decoding -> title of its panel, and what is counted along it."""
COLUMNS = {"parallel": "num_samples", "beam": "beam_width"}
"""Decoding -> column of ``summary.csv`` with their number."""


class Bars(NamedTuple):
    """Bars of one kind.

    Attributes:
        decoding: ``parallel`` or ``beam``.
        label: in the legend and the table; the same in both panels for what is drawn alike.
        papers: number of samples or beams -> the paper's percent.
    """

    decoding: str
    label: str
    color: str
    hatch: str = ""
    papers: Mapping[int, float] = {}

    def found(self, rows: pd.DataFrame) -> dict[int, pd.Series[float]]:
        """Number of samples or beams -> percent of every repeat, of the rows of their panel."""
        column = COLUMNS[self.decoding]
        savings = {int(each): select(rows, **{column: each})[SAVED].dropna() for each in sorted(set(rows[column]))}
        return {width: each for width, each in savings.items() if len(each)}


def draw(summary: pd.DataFrame, kinds: Mapping[str, Bars], footnote: str) -> Figure | None:
    """A panel for samples and one for beams, a group of bars for each number of them.

    Args:
        summary: rows of ``summary.csv``.
        kinds: panel of the experiment -> its bars, in the order in which they are drawn.
        footnote: of the figure.
    """
    there = {name: each for name, each in kinds.items() if value(select(summary, panel=name), SAVED) is not None}
    panels = [decoding for decoding in TITLES if any(each.decoding == decoding for each in there.values())]
    if not panels:
        return None
    figure = style.new_figure(style.PAGE_IN if len(panels) > 1 else style.COLUMN_IN, 2.1, footnote)
    shown = [{name: each for name, each in there.items() if each.decoding == decoding} for decoding in panels]
    grid = figure.subplots(1, len(panels), squeeze=False, width_ratios=[1 + len(each) for each in shown])
    for axes, decoding, each in zip(grid.flat, panels, shown, strict=True):
        _draw_panel(axes, summary, each)
        axes.set_title(TITLES[decoding][0])
        axes.set_xlabel(f"{TITLES[decoding][1]} of a request")
        axes.set_ylabel("Memory saved (%)")
    looks = {each.label: each for each in there.values()}
    handles = [Patch(facecolor=b.color, hatch=b.hatch, edgecolor="white", label=label) for label, b in looks.items()]
    papers = [style.hollow(bars.MARKER)] if any(each.papers for each in there.values()) else []
    columns = len(handles) + len(papers) if len(panels) > 1 else 2
    style.put_legend(figure, [*handles, *papers], columns)
    return figure


def _draw_panel(axes: Axes, summary: pd.DataFrame, kinds: Mapping[str, Bars]) -> None:
    savings = {name: each.found(select(summary, panel=name)) for name, each in kinds.items()}
    widths = sorted({width for name, each in kinds.items() for width in (*each.papers, *savings[name])})
    step = 0.8 / len(kinds)
    for index, (name, each) in enumerate(kinds.items()):
        for width, found in savings[name].items():
            at, height = widths.index(width) - 0.4 + (index + 0.5) * step, float(found.mean())
            axes.bar(at, height, 0.92 * step, color=each.color, hatch=each.hatch, edgecolor="white")
            if len(found) > 1:
                axes.plot([at, at], [found.min(), found.max()], color=style.INK, linewidth=0.8)
            axes.annotate(
                f"{height:.1f}", (at, float(found.max())), (1, 1), textcoords="offset points", ha="center", fontsize=5.5
            )
            if width in each.papers:
                style.plot_hollow(axes, [(at - 0.46 * step, each.papers[width])], style.INK, bars.MARKER, size=4)
    axes.set_xticks(range(len(widths)), [str(width) for width in widths])
    axes.set_xlim(-0.55, len(widths) - 0.45)
    axes.margins(y=0.1)
    axes.grid(visible=False, axis="x")


def table(summary: pd.DataFrame, kinds: Mapping[str, Bars], way: str) -> str | None:
    """Every bar, with the range of its seeds beside the paper's where there are some.

    Args:
        summary: as in ``draw``.
        kinds: as in ``draw``.
        way: how the numbers came about.
    """
    rows = [("memory saved (%)", "", way, "range", "seeds", "paper")]
    for name, each in kinds.items():
        for width, found in each.found(select(summary, panel=name)).items():
            spread = f"{found.min():.2f}-{found.max():.2f}" if len(found) > 1 else ""
            what = f"{width} {TITLES[each.decoding][1].lower()}"
            papers = number(each.papers.get(width))
            rows.append((each.label, what, f"{found.mean():.2f}", spread, str(len(found)), papers))
    shown = 6 if any(each.papers for each in kinds.values()) else 5
    return aligned([row[:shown] for row in rows], left=2) if len(rows) > 1 else None
