"""Memory saved by sharing in real runs on this machine, beside simulated runs of the same requests."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from kvbench.figures import savings, style
from kvbench.figures.frames import difference, measured, select, value, where
from kvbench.figures.savings import COLUMNS, SAVED, TITLES, Bars
from kvbench.paper.claims import Claim, Statement
from kvbench.results import Results

MEASURED, SIMULATED = ("measured", "#0072B2"), ("simulated", "#E69F00", "////")
BARS = {
    "samples": Bars("parallel", *MEASURED),
    "simulated_samples": Bars("parallel", *SIMULATED),
    "beams": Bars("beam", *MEASURED),
    "simulated_beams": Bars("beam", *SIMULATED),
}
"""Panel of the experiment -> its bars, in the order in which they are drawn."""
WIDTHS = (2, 4, 6)
TOLERANCES = {"samples": 0.1, "beams": 5.0}
"""Panel -> points between simulated and measured savings: who runs when is the same, which beams survive is not."""
MODEL = "smollm2_135m"


def draw(results: Results) -> dict[str, Figure]:
    """A panel for samples and one for beams, a pair of bars for each number of them."""
    summary = results.summary
    real = measured(summary)
    sources = "; ".join(sorted(set(summary["workload_source"].dropna())))
    notes = [
        *([where(real)] if len(real) else []),
        "Simulated: the same requests in as many slots, beams as in recorded searches of the model, drawn 8 times",
        "All requests arrive at once, so that no costs make a difference",
        "Means over all iterations",
        f"Lengths: {sources}",
    ]
    with style.context():
        figure = savings.draw(summary, BARS, ". ".join(notes) + ".")
    return {"fig_sharing_measured": figure} if figure else {}


def table(results: Results) -> str | None:
    """Every bar."""
    return savings.table(results.summary, BARS, "all iterations")


def claims(results: Results) -> list[Claim]:
    """Measured less the mean of the simulated, for each number of samples and beams; the paper has no such runs."""
    rows = []
    for panel, tolerance in TOLERANCES.items():
        bars = BARS[panel]
        for width in WIDTHS:
            real, simulated = (
                select(results.summary, panel=name, **{COLUMNS[bars.decoding]: width})
                for name in (panel, f"simulated_{panel}")
            )
            statement = Statement(
                claim=f"{width} {TITLES[bars.decoding][1].lower()}: memory saved by sharing, measured less simulated",
                figure="none",
                low=0.0,
                high=0.0,
                unit="points",
                tolerance=f"{tolerance:g}",
                note="kvbench's own expectation of its simulator, not the paper's",
            )
            found, expected = value(real, SAVED), value(simulated, SAVED)
            gap = None if found is None or expected is None else found - expected
            missing = f"needs a real and a simulated run with {width}"
            rows.append(statement.judge(gap, missing=missing, obstacle=_obstacle(real, simulated)))
    return rows


def _obstacle(real: pd.DataFrame, simulated: pd.DataFrame) -> str | None:
    """Why the two cannot be compared."""
    if not (len(real) and len(simulated)):
        return None
    alike = {column: real[column].iloc[0] for column in ("workload_source", "num_requests", "num_slots")}
    other_model = difference(real, "the expectation's", model=MODEL)
    return other_model or difference(simulated, "the real run's", **alike)
