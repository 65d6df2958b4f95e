"""Fig. 11: how long prompts and outputs are."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from kvbench.figures import style
from kvbench.figures.frames import select
from kvbench.figures.terminal import aligned
from kvbench.paper.claims import Claim, stated
from kvbench.paper.points import published
from kvbench.results import Results
from kvbench.workloads import histograms

PANELS = {"a": ("sharegpt", "ShareGPT"), "b": ("alpaca", "Alpaca")}
"""Panel -> (workload, its name)."""
NUM_BINS = 128
"""Equal bins from the shortest to the longest, as in the paper."""
LOOKS = {"prompt": ("#0072B2", "o"), "output": ("#D55E00", "s")}
PAPERS_BARS = {
    ("sharegpt", "prompt"): histograms.SHAREGPT_PROMPT,
    ("sharegpt", "output"): histograms.SHAREGPT_OUTPUT,
    ("alpaca", "prompt"): histograms.ALPACA_PROMPT,
    ("alpaca", "output"): histograms.ALPACA_OUTPUT,
}


class Lengths(NamedTuple):
    """The requests of one panel, and where their lengths come from."""

    lengths: dict[str, npt.NDArray[np.int64]]
    source: str


def draw(results: Results) -> dict[str, Figure]:
    """A panel for each data set: densities of prompt and output length, logarithmic to show the tails."""
    found = _lengths(results)
    if not found:
        return {}
    with style.context():
        sources = ", ".join(panel.source for panel in found.values())
        note = f"Lines: the workload's requests ({sources}); hollow: the paper's bars; dotted: means."
        figure = style.new_figure(style.PAGE_IN if len(found) > 1 else style.COLUMN_IN, 1.9, note)
        for axes, (letter, panel) in zip(
            figure.subplots(1, len(found), squeeze=False).flat, found.items(), strict=True
        ):
            _draw_panel(axes, letter, panel)
        handles = [
            Line2D([], [], color=color, marker=marker, label=f"{which} length")
            for which, (color, marker) in LOOKS.items()
        ]
        style.put_legend(figure, [*handles, style.hollow("o")], 3)
    return {"fig_lengths": figure}


def _draw_panel(axes: Axes, letter: str, panel: Lengths) -> None:
    workload, title = PANELS[letter]
    shown_to = max(float(np.percentile(values, 99.7)) for values in panel.lengths.values())
    for which, values in panel.lengths.items():
        color, marker = LOOKS[which]
        density, edges = np.histogram(values, bins=NUM_BINS, density=True)
        axes.stairs(np.where(density > 0, density, np.nan), edges, color=color, linewidth=0.9)
        bars = PAPERS_BARS[workload, which]
        share = bars.counts / bars.counts.sum() / bars.width
        centres = (bars.edges[:-1] + bars.edges[1:]) / 2
        some = np.flatnonzero((share > 0) & (centres < shown_to))[:: 4 if workload == "sharegpt" else 2]
        points = zip(centres[some].tolist(), share[some].tolist(), strict=True)
        style.plot_hollow(axes, points, color, marker, size=3.5)
        axes.axvline(float(values.mean()), color=color, linestyle=(0, (1, 1.5)), linewidth=0.9)
    axes.set_xlim(0, shown_to)
    axes.set_yscale("log")
    axes.set_title(f"({letter}) {title}")
    axes.set_xlabel("Length (tokens)")
    axes.set_ylabel("Density (1/token)")


def table(results: Results) -> str | None:
    """Mean lengths, beside the paper's."""
    rows = []
    for letter, panel in _lengths(results).items():
        workload, title = PANELS[letter]
        for which, values in panel.lengths.items():
            papers = published()["fig11"]["mean_len"][workload][which]
            rows.append((title, which, f"{len(values):,}", f"{values.mean():.2f}", f"{papers:.2f}"))
    return aligned([("data set", "length", "requests", "mean", "paper"), *rows], left=2) if rows else None


def claims(results: Results) -> list[Claim]:
    """The means, and the ratios of the text."""
    found = _lengths(results)
    rows = []
    means: dict[tuple[str, str], float] = {}
    for letter, (workload, title) in PANELS.items():
        for which, papers in published()["fig11"]["mean_len"][workload].items():
            statement = stated("fig11_mean", value=papers, panel=letter, workload=title, which=which)
            if letter in found:
                means[letter, which] = float(found[letter].lengths[which].mean())
            claim = statement.judge(means.get((letter, which)), missing=f"no result in panel {letter}")
            rows.append(replace(claim, note=found[letter].source) if letter in found else claim)
    for which in LOOKS:
        known = ("a", which) in means and ("b", which) in means
        ratio = means["a", which] / means["b", which] if known else None
        rows.append(stated(f"fig11_{which}_ratio").judge(ratio, missing="needs panels a and b"))
    return rows


def _lengths(results: Results) -> dict[str, Lengths]:
    summary = results.summary
    found = {}
    for letter, (workload, _) in PANELS.items():
        rows = select(summary, panel=letter, workload=workload)
        if len(rows):
            requests = results.requests(rows.iloc[0])
            lengths = {which: np.asarray(requests[f"{which}_len"], np.int64) for which in LOOKS}
            found[letter] = Lengths(lengths, str(rows["workload_source"].iloc[0]))
    return found
