"""Fig. 15: memory saved by sharing blocks among the samples and beams of a request."""

from __future__ import annotations

from typing import NamedTuple

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from kvbench.figures import bars, style
from kvbench.figures.frames import PUBLIC, difference, footnote, noted, other_lengths, select, value, way, window
from kvbench.figures.terminal import aligned, number
from kvbench.paper.claims import Claim, stated
from kvbench.paper.points import published
from kvbench.results import Results

SAVED = "sharing_saved_pct"


class Series(NamedTuple):
    """Bars of one kind.

    Attributes:
        workload: whose lengths.
        decoding: ``parallel`` or ``beam``.
        beta: of the beam process; None: there is none.
        label: in the legend and the table.
        claim: the claim's name in ``claims.yaml``.
        num_seeds: how many seeds the claim asks for.
    """

    workload: str
    decoding: str
    beta: float | None
    label: str
    claim: str
    color: str
    hatch: str = ""
    num_seeds: int = 1

    @property
    def column(self) -> str:
        """Of ``summary.csv``, with the number of samples or beams."""
        return "num_samples" if self.decoding == "parallel" else "beam_width"

    @property
    def papers(self) -> dict[int, float]:
        """Number of samples or beams -> percent."""
        return dict(published()["fig15"]["saved_pct"][self.workload][self.decoding])


SERIES = {
    "alpaca_samples": Series("alpaca", "parallel", None, "Alpaca", "fig15_alpaca", "#0072B2"),
    "sharegpt_samples": Series(
        "sharegpt", "parallel", None, "ShareGPT", "fig15_sharegpt", "#E69F00", "////", num_seeds=6
    ),
    "alpaca_beams": Series("alpaca", "beam", 4, "Alpaca", "fig15_alpaca", "#0072B2"),
    "sharegpt_beams": Series("sharegpt", "beam", 20, "ShareGPT", "fig15_sharegpt", "#E69F00", "////", num_seeds=6),
    "sharegpt_beams_as_alpaca": Series(
        "sharegpt", "beam", 4, "ShareGPT, Alpaca's beams", "fig15_as_alpaca", "#009E73", "....", num_seeds=6
    ),
}
"""Panel of the experiment -> what it measures, in the order of the bars."""
TITLES = {"parallel": ("(a) Parallel sampling", "Samples"), "beam": ("(b) Beam search", "Beams")}


def draw(results: Results) -> dict[str, Figure]:
    """A panel for samples and one for beams, a group of bars for each width."""
    summary = results.summary
    there = {name: each for name, each in SERIES.items() if value(select(summary, panel=name), SAVED) is not None}
    panels = [decoding for decoding in TITLES if any(each.decoding == decoding for each in there.values())]
    if not panels:
        return {}
    with style.context():
        kinds = (
            f"Bars: {way(summary)}, means over the iterations in {window(summary)} and over seeds (lines: their range)"
        )
        figure = style.new_figure(
            style.PAGE_IN if len(panels) > 1 else style.COLUMN_IN,
            2.1,
            footnote(summary, kinds, "Hollow: the paper's bars, and the ends of the ranges in its text"),
        )
        for axes, decoding in zip(figure.subplots(1, len(panels), squeeze=False).flat, panels, strict=True):
            _draw_panel(axes, summary, {n: s for n, s in there.items() if s.decoding == decoding}, decoding)
        looks = {each.label: each for each in there.values()}
        handles = [
            Patch(facecolor=each.color, hatch=each.hatch, edgecolor="white", label=label)
            for label, each in looks.items()
        ]
        columns = len(handles) + 1 if len(panels) > 1 else 2
        figure.legend(handles=[*handles, style.hollow(bars.MARKER)], loc="outside upper center", ncols=columns)
    return {"fig_sharing": figure}


def _draw_panel(axes: Axes, summary: pd.DataFrame, series: dict[str, Series], decoding: str) -> None:
    widths = sorted({width for each in series.values() for width in each.papers})
    step = 0.8 / len(series)
    for index, (name, each) in enumerate(series.items()):
        rows = select(summary, panel=name)
        for x, width in enumerate(widths):
            mine = select(rows, **{each.column: width})[SAVED].dropna()
            if not len(mine):
                continue
            at, height = x - 0.4 + (index + 0.5) * step, float(mine.mean())
            axes.bar(at, height, 0.92 * step, color=each.color, hatch=each.hatch, edgecolor="white")
            if len(mine) > 1:
                axes.plot([at, at], [mine.min(), mine.max()], color=style.INK, linewidth=0.8)
            axes.annotate(
                f"{height:.1f}", (at, float(mine.max())), (1, 1), textcoords="offset points", ha="center", fontsize=5.5
            )
            if width in each.papers:
                style.plot_hollow(axes, [(at - 0.46 * step, each.papers[width])], style.INK, bars.MARKER, size=4)
    axes.set_xticks(range(len(widths)), [str(width) for width in widths])
    axes.set_xlim(-0.55, len(widths) - 0.45)
    axes.margins(y=0.1)
    title, unit = TITLES[decoding]
    axes.set_title(title)
    axes.set_xlabel(f"{unit} of a request")
    axes.set_ylabel("Memory saved (%)")
    axes.grid(visible=False, axis="x")


def table(results: Results) -> str | None:
    """Every bar with the range of its seeds, beside the paper's."""
    summary = results.summary
    rows = []
    for name, each in SERIES.items():
        mine = select(summary, panel=name)
        for width in sorted(set(mine[each.column])):
            found = select(mine, **{each.column: width})[SAVED].dropna()
            if len(found):
                spread = f"{found.min():.2f}-{found.max():.2f}" if len(found) > 1 else ""
                papers = number(each.papers.get(int(width)))
                what = f"{width:g} {TITLES[each.decoding][1].lower()}"
                rows.append((each.label, what, f"{found.mean():.2f}", spread, str(len(found)), papers))
    header = ("memory saved (%)", "", way(summary), "range", "seeds", "paper")
    return aligned([header, *rows], left=2) if rows else None


def claims(results: Results) -> list[Claim]:
    """Every bar, and the ends of the ranges in the text."""
    found = []
    for name, each in SERIES.items():
        rows = select(results.summary, panel=name)
        for width, papers in each.papers.items():
            mine = select(rows, **{each.column: width})
            letter, unit = TITLES[each.decoding][0][1], TITLES[each.decoding][1].lower()
            variant = f"{each.decoding}{width}" if each.workload == "sharegpt" else each.decoding
            statement = stated(each.claim, variant, value=papers, panel=letter, width=f"{width}", what=unit)
            measured = value(mine, SAVED)
            if measured is None:
                found.append(statement.judge(None, missing=f"no result of panel {name} with {width} {unit}"))
                continue
            claim = statement.judge(measured, obstacle=_obstacle(results, mine.dropna(subset=[SAVED]), each))
            found.append(noted(claim, other_lengths(mine, each.workload)))
    return found


def _obstacle(results: Results, rows: pd.DataFrame, series: Series) -> str | None:
    paper = published()["fig15"]
    if series.beta is not None:
        betas = {results.config(row)["runner"]["beams"].get("beta") for _, row in rows.iterrows()}
        if betas != {series.beta}:
            return f"runner.beams.beta is {', '.join(map(str, sorted(betas, key=str)))}, not {series.beta:g}"
    if len(rows) < series.num_seeds:
        return f"the mean of {len(rows)} seeds, not of {series.num_seeds}"
    lengths = other_lengths(rows, series.workload) if series.workload in PUBLIC else None
    return lengths or difference(
        rows,
        system="vllm",
        model="opt_13b",
        hardware="a100_40gb",
        workload=series.workload,
        costs="paper_engine",
        block_size=16,
        **{name: paper[name] for name in ("request_rate", "duration_s", "measure_from_s", "measure_to_s")},
    )
