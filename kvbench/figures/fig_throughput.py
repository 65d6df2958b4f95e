"""Fig. 12: normalized latency against request rate with basic sampling, and the rate each system sustains."""

from __future__ import annotations

from statistics import median

from matplotlib.figure import Figure

from kvbench.figures import rates
from kvbench.figures.rates import Gains, over_panels
from kvbench.paper.claims import Claim, stated
from kvbench.results import Results

ORCA = ("orca_max", "orca_pow2", "orca_oracle")


def draw(results: Results) -> dict[str, Figure]:
    """One figure with the panels that were run."""
    figure = rates.draw(results, rates.panels(results).values())
    return {"fig_throughput": figure} if figure else {}


def table(results: Results) -> str | None:
    """The rate at 0.5 s/token of every curve that was run, beside the paper's."""
    return rates.table(results, rates.panels(results).values())


def claims(results: Results) -> list[Claim]:
    """Of every panel the distance of the curves, the rates at 0.5 s/token and their ratios; then what the text says."""
    panels = rates.panels(results)
    rows = [claim for panel in panels.values() for claim in (*panel.distance_claims(), *panel.rate_claims())]
    for name, system in (("vllm_over_oracle", "orca_oracle"), ("vllm_over_max", "orca_max")):
        for letter in "abc":
            panel = panels[letter]
            statement = stated(name, letter, panel=letter, model=panel.condition.title.partition(",")[0])
            rows.append(panel.judge(statement, panel.gain(system), system, "vllm"))
    oracle = ("orca_oracle",)
    return [
        *rows,
        over_panels(panels, stated("vllm_over_fastertransformer"), "abc", ("fastertransformer",), _largest),
        over_panels(panels, stated("overall_gain"), "abcdef", ORCA, lambda gains: median(gains.values())),
        over_panels(panels, stated("vllm_over_oracle_basic"), "d", oracle, _largest),
        over_panels(panels, stated("gain_with_length"), "ad", oracle, _gain_with_length),
        over_panels(panels, stated("gain_with_model"), "abc", oracle, _gain_with_model),
        over_panels(panels, stated("exception_f"), "abcdef", ("orca_pow2", "orca_oracle"), _exception_f),
    ]


def _largest(gains: Gains) -> float:
    return max(gains.values())


def _gain_with_length(gains: Gains) -> float:
    return gains["a", "orca_oracle"] / gains["d", "orca_oracle"]


def _gain_with_model(gains: Gains) -> float:
    small, medium, large = (gains[letter, "orca_oracle"] for letter in "abc")
    return min(medium / small, large / medium)


def _exception_f(gains: Gains) -> float:
    return max(
        gains["f", system] / min(gains[letter, system] for letter in "abcde") for system in ("orca_pow2", "orca_oracle")
    )
