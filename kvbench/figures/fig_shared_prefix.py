"""Fig. 16: normalized latency against request rate where all requests share a prefix."""

from __future__ import annotations

from functools import cached_property

import pandas as pd
from matplotlib.figure import Figure

from kvbench.figures import rates
from kvbench.figures.rates import Gains, over_panels
from kvbench.paper.claims import Claim, stated
from kvbench.results import Results

FIGURE = "fig16"
NAMES = {"vllm[system.max_num_seqs=256]": "vllm", "vllm": "vllm[system.max_num_seqs=2048]"}
"""What a system is called here: vLLM is the one under the limit that the authors' branch for prefixes has."""
TEXT = {"a": ("1.67", "with one example"), "b": ("3.58", "with five examples")}


class _Named(Results):
    """The same results with names of this figure."""

    @cached_property
    def summary(self) -> pd.DataFrame:
        """See ``Results``."""
        summary = super().summary
        return summary.assign(system=[NAMES.get(system, system) for system in summary["system"]])


def draw(results: Results) -> dict[str, Figure]:
    """One figure with the panels that were run."""
    results = _Named(results.path)
    figure = rates.draw(results, rates.panels(results, FIGURE).values())
    return {"fig_shared_prefix": figure} if figure else {}


def table(results: Results) -> str | None:
    """The rate at 0.5 s/token of every curve that was run, beside the paper's."""
    results = _Named(results.path)
    return rates.table(results, rates.panels(results, FIGURE).values())


def claims(results: Results) -> list[Claim]:
    """Of both panels the rates at 0.5 s/token and their ratio, as plotted and as the text has it."""
    panels = rates.panels(_Named(results.path), FIGURE)
    rows = [claim for panel in panels.values() for claim in panel.rate_claims("fig16_rate", "fig16_ratio")]
    for letter, (times, examples) in TEXT.items():
        statement = stated("fig16_text", letter, panel=letter, times=times, examples=examples)
        rows.append(panels[letter].judge(statement, panels[letter].gain("orca_oracle"), "orca_oracle", "vllm"))
    rows.append(over_panels(panels, stated("fig16_gain_with_prefix"), "ab", ("orca_oracle",), _longer_over_shorter))
    return rows


def _longer_over_shorter(gains: Gains) -> float:
    return gains["b", "orca_oracle"] / gains["a", "orca_oracle"]
