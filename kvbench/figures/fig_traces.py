"""Recorded and bursty arrivals: normalized latency against the mean rate, and what could not be served as it came."""

from __future__ import annotations

import math

import pandas as pd
from matplotlib.figure import Figure

from kvbench.figures import latency, style
from kvbench.figures.frames import LATENCY, footnote, select, systems, way
from kvbench.figures.rates import curves
from kvbench.figures.terminal import aligned
from kvbench.paper.claims import Claim
from kvbench.paper.curves import THRESHOLD_S, crossing
from kvbench.results import Results

TITLES = {
    "a": "Azure 2023, conversation",
    "b": "Azure 2023, code",
    "c": "VTC, chat.lmsys.org",
    "d": "ShareGPT, gamma gaps, CV 4",
    "e": "ShareGPT, on a quarter of the time",
    "f": "Mooncake, conversation",
}
"""Of the panels."""


def draw(results: Results) -> dict[str, Figure]:
    """One figure with the panels that were run."""
    summary = results.summary
    panels = _panels(summary.dropna(subset=[LATENCY]))
    if not panels:
        return {}
    columns = min(len(panels), 3)
    rows = math.ceil(len(panels) / columns)
    with style.context():
        handles = [*style.legend(style.looks(systems(summary))), latency.leaves_the_axes()]
        figure = style.new_figure(
            style.COLUMN_IN if columns == 1 else style.PAGE_IN,
            0.2 + 0.15 * math.ceil(len(handles) / (2 if columns == 1 else 6)) + 1.7 * rows,
            footnote(
                summary, "Time is stretched to the mean rate. Counts of what is clipped, dropped, rejected: table"
            ),
        )
        grid = figure.subplots(rows, columns, squeeze=False, sharey=True)
        for axes in grid.flat[len(panels) :]:
            axes.remove()
        for axes, (letter, part) in zip(grid.flat, panels.items(), strict=False):
            latency.draw_panel(axes, f"({letter}) {TITLES.get(letter, letter)}", curves(part), {})
        for axes in grid[:, 0]:
            axes.set_ylabel("Normalized latency\n(s/token)")
        style.put_legend(figure, handles, 2 if columns == 1 else 6)
    return {"fig_traces": figure}


def table(results: Results) -> str | None:
    """Of every curve the rate at 0.5 s/token, and what became of the requests."""
    summary = results.summary
    rows = []
    for letter, part in _panels(summary).items():
        for system, look in style.looks(systems(part)).items():
            own = select(part, system=system)
            rows.append(
                (
                    f"({letter}) {TITLES.get(letter, letter)}",
                    look.label,
                    str(crossing(curves(own)[system])) if system in curves(own) else "-",
                    *(_range(own[column]) for column in ("num_requests", "num_dropped", "num_clipped", "num_rejected")),
                )
            )
    if not rows:
        return None
    rate = f"requests/s at {THRESHOLD_S:g} s/token, {way(summary)}"
    header = ("panel", "system", rate, "requests", "dropped", "clipped", "rejected")
    said = (
        "dropped: too long for the model (prompts of a trace, pairs of a data set), none of the requests;\n"
        "clipped: outputs cut to what the model holds; "
        "rejected: requests that can never have their memory there, left out of latencies"
    )
    return f"{aligned([header, *rows], left=2)}\n{said}"


def claims(results: Results) -> list[Claim]:
    """None: no published number stands beside these runs."""
    del results
    return []


def _panels(summary: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """The panels that were run, by letter."""
    return {str(letter): part for letter, part in summary.groupby("panel")}


def _range(column: pd.Series[int]) -> str:
    """One number, or the smallest and the largest of the points of a curve."""
    low, high = int(column.min()), int(column.max())
    return f"{low:,}" if low == high else f"{low:,}-{high:,}"
