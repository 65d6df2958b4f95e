"""Fig. 14 (a-c): normalized latency against request rate with n samples of each request."""

from __future__ import annotations

from matplotlib.figure import Figure

from kvbench.figures import rates
from kvbench.figures.rates import Gains, over_panels
from kvbench.paper.claims import Claim, stated
from kvbench.results import Results

FIGURE = "fig14_parallel"


def draw(results: Results) -> dict[str, Figure]:
    """One figure with the panels that were run."""
    figure = rates.draw(results, rates.panels(results, FIGURE).values())
    return {"fig_parallel_sampling": figure} if figure else {}


def table(results: Results) -> str | None:
    """The rate at 0.5 s/token of every curve that was run, beside the paper's."""
    return rates.table(results, rates.panels(results, FIGURE).values())


def claims(results: Results) -> list[Claim]:
    """Of every panel the rates at 0.5 s/token and their ratios; then how the gain changes with n."""
    panels = rates.panels(results, FIGURE)
    return [
        *(
            claim
            for panel in panels.values()
            for claim in panel.rate_claims("fig14_parallel_rate", "fig14_parallel_ratio")
        ),
        over_panels(panels, stated("fig14_gain_with_samples"), "abc", ("orca_oracle",), _smallest_rise),
    ]


def _smallest_rise(gains: Gains) -> float:
    two, four, six = (gains[letter, "orca_oracle"] for letter in "abc")
    return min(four / two, six / four)
