"""Fig. 17: normalized latency against request rate of conversations, for three settings of how often one begins."""

from __future__ import annotations

import math

from matplotlib.figure import Figure

from kvbench.figures import rates
from kvbench.figures.rates import PanelRates, Reading
from kvbench.figures.style import SYSTEMS
from kvbench.paper.claims import Claim, stated
from kvbench.results import Results

FIGURE = "fig17"
ORCA = ("orca_max", "orca_pow2", "orca_oracle")


def draw(results: Results) -> dict[str, Figure]:
    """One figure with the settings that were run, the paper's one panel in each."""
    figure = rates.draw(results, rates.panels(results, FIGURE).values())
    return {"fig_chatbot": figure} if figure else {}


def table(results: Results) -> str | None:
    """The rate at 0.5 s/token of every curve that was run, beside the paper's."""
    return rates.table(results, rates.panels(results, FIGURE).values())


def claims(results: Results) -> list[Claim]:
    """Of every setting vLLM's gains; where all systems have one load, their rates and how alike Orca's are, too."""
    rows: list[Claim] = []
    for letter, panel in rates.panels(results, FIGURE).items():
        title = panel.condition.title
        papers = {system: panel.papers(system).rate or 0.0 for system in panel.condition.curves}
        if letter != "c":  # whose curves are those of a and b
            for system, rate in papers.items():
                statement = stated("fig17_rate", value=rate, title=title, system=SYSTEMS[system].label)
                rows.append(panel.judge(statement, panel.rate(system), system))
        for system in ORCA:
            label = SYSTEMS[system].label
            statement = stated("fig17_ratio", value=papers["vllm"] / papers[system], title=title, system=label)
            rows.append(panel.judge(statement, panel.gain(system), system, "vllm"))
        if letter == "a":
            rows.append(panel.judge(stated("fig17_orcas_alike", title=title), _spread(panel), *ORCA))
        gains = [panel.gain(system) for system in ORCA]
        rows.append(panel.judge(stated("fig17_over_orca", title=title), _smallest(gains), *ORCA, "vllm"))
    return rows


def _spread(panel: PanelRates) -> Reading | None:
    """The largest rate of the Orca systems over the smallest."""
    found = [rate for system in ORCA if (rate := panel.rate(system))]
    if len(found) < len(ORCA):
        return None
    lows, highs, values = zip(*found, strict=True)
    low, high = max(1.0, max(lows) / min(highs)), max(highs) / min(lows) if min(lows) else math.inf
    return Reading(low, high, None if None in values else max(values) / min(values))


def _smallest(gains: list[Reading | None]) -> Reading | None:
    found = [gain for gain in gains if gain]
    if len(found) < len(gains):
        return None
    lows, highs, values = zip(*found, strict=True)
    return Reading(min(lows), min(highs), None if None in values else min(values))
