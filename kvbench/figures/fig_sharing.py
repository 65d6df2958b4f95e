"""Fig. 15: memory saved by sharing blocks among the samples and beams of a request."""

from __future__ import annotations

from typing import NamedTuple

import pandas as pd
from matplotlib.figure import Figure

from kvbench.figures import savings, style
from kvbench.figures.frames import PUBLIC, difference, footnote, noted, other_lengths, select, value, way, window
from kvbench.figures.savings import SAVED, TITLES, Bars
from kvbench.paper.claims import Claim, stated
from kvbench.paper.points import published
from kvbench.results import Results


class Series(NamedTuple):
    """What a panel of the experiment measures.

    Attributes:
        workload: whose lengths.
        decoding: ``parallel`` or ``beam``.
        label: in the legend and the table.
        claim: the claim's name in ``claims.yaml``.
        beams: what the claim asks of ``runner.beams``, as key and value; None: there are none.
        num_seeds: how many seeds the claim asks for.
    """

    workload: str
    decoding: str
    label: str
    claim: str
    color: str
    hatch: str = ""
    beams: tuple[str, object] | None = None
    num_seeds: int = 1

    @property
    def column(self) -> str:
        """Of ``summary.csv``, with the number of samples or beams."""
        return savings.COLUMNS[self.decoding]

    @property
    def papers(self) -> dict[int, float]:
        """Number of samples or beams -> percent."""
        return dict(published()["fig15"]["saved_pct"][self.workload][self.decoding])

    @property
    def bars(self) -> Bars:
        """How it is drawn."""
        return Bars(self.decoding, self.label, self.color, self.hatch, self.papers)


BLUE, ORANGE, GREEN, SKY = "#0072B2", "#E69F00", "#009E73", "#56B4E9"
SERIES = {
    "alpaca_samples": Series("alpaca", "parallel", "Alpaca", "fig15_alpaca", BLUE),
    "sharegpt_samples": Series("sharegpt", "parallel", "ShareGPT", "fig15_sharegpt", ORANGE, "////", num_seeds=6),
    "alpaca_beams": Series("alpaca", "beam", "Alpaca", "fig15_alpaca", BLUE, beams=("beta", 4)),
    "alpaca_recorded": Series(
        "alpaca", "beam", "Alpaca, recorded beams", "fig15_recorded", SKY, "\\\\\\\\", beams=("model", "smollm2_135m")
    ),
    "sharegpt_beams": Series(
        "sharegpt", "beam", "ShareGPT", "fig15_sharegpt", ORANGE, "////", beams=("beta", 20), num_seeds=6
    ),
    "sharegpt_beams_as_alpaca": Series(
        "sharegpt", "beam", "ShareGPT, Alpaca's beams", "fig15_as_alpaca", GREEN, "....", ("beta", 4), num_seeds=6
    ),
}
"""Panel of the experiment -> what it measures, in the order of the bars."""
_BARS = {name: each.bars for name, each in SERIES.items()}


def draw(results: Results) -> dict[str, Figure]:
    """A panel for samples and one for beams, a group of bars for each width."""
    summary = results.summary
    with style.context():
        kinds = (
            f"Bars: {way(summary)}, means over the iterations in {window(summary)} and over seeds (lines: their range)"
        )
        rows = select(summary, panel="alpaca_recorded")
        models = {results.config(row)["runner"]["beams"]["model"] for _, row in rows.iterrows()}
        recorded = [f"Recorded: searches of {', '.join(sorted(models))}"] if models else []
        note = footnote(summary, kinds, "Hollow: the paper's bars, and the ends of the ranges in its text", *recorded)
        figure = savings.draw(summary, _BARS, note)
    return {"fig_sharing": figure} if figure else {}


def table(results: Results) -> str | None:
    """Every bar with the range of its seeds, beside the paper's."""
    return savings.table(results.summary, _BARS, way(results.summary))


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
    if series.beams is not None:
        key, wanted = series.beams
        found = {results.config(row)["runner"]["beams"].get(key) for _, row in rows.iterrows()}
        if found != {wanted}:
            return f"runner.beams.{key} is {', '.join(map(str, sorted(found, key=str)))}, not {wanted}"
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
