"""Fig. 14 (d-f): normalized latency against request rate with beam search, and what beams gain more than samples."""

from __future__ import annotations

from collections.abc import Callable

from matplotlib.figure import Figure

from kvbench.figures import rates
from kvbench.figures.rates import Gains, PanelRates, over_panels
from kvbench.paper.claims import Claim, stated
from kvbench.results import Results

FIGURE = "fig14_beams"
SAMPLES = "fig14_parallel"
WIDTHS = {"a": "d", "b": "e", "c": "f"}
"""Panel with so many samples -> panel with as many beams."""


def draw(results: Results) -> dict[str, Figure]:
    """One figure with the panels of beams that were run."""
    figure = rates.draw(results, rates.panels(results, FIGURE).values())
    return {"fig_beam_search": figure} if figure else {}


def table(results: Results) -> str | None:
    """The rate at 0.5 s/token of every curve that was run, beside the paper's."""
    return rates.table(results, _all_panels(results).values())


def claims(results: Results) -> list[Claim]:
    """Of every panel the rates at 0.5 s/token and their ratios; then how the gain changes with the width."""
    panels = _all_panels(results)
    oracle = ("orca_oracle",)
    rows = [claim for letter in "def" for claim in panels[letter].rate_claims("fig14_beams_rate", "fig14_beams_ratio")]
    rows.append(panels["f"].judge(stated("fig14_over_oracle_beam6"), panels["f"].gain("orca_oracle"), *oracle, "vllm"))
    rows.append(over_panels(panels, stated("fig14_gain_with_width"), "def", oracle, _smallest_rise))
    for samples, beams in WIDTHS.items():
        width = str(panels[beams].condition.beam_width)
        statement = stated("fig14_beams_over_samples", beams, samples=samples, beams=beams, width=width)
        rows.append(over_panels(panels, statement, samples + beams, oracle, _over(samples, beams)))
    return rows


def _smallest_rise(gains: Gains) -> float:
    two, four, six = (gains[letter, "orca_oracle"] for letter in "def")
    return min(four / two, six / four)


def _over(samples: str, beams: str) -> Callable[[Gains], float]:
    return lambda gains: gains[beams, "orca_oracle"] / gains[samples, "orca_oracle"]


def _all_panels(results: Results) -> dict[str, PanelRates]:
    return rates.panels(results, FIGURE) | rates.panels(results, SAMPLES)
