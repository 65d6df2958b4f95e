"""Fig. 12: normalized latency against request rate with basic sampling, and the rate each system sustains."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from statistics import median

from matplotlib.figure import Figure

from kvbench.figures import latency, style
from kvbench.figures.frames import footnote, select, systems, way
from kvbench.figures.rates import PanelRates
from kvbench.figures.terminal import aligned
from kvbench.paper.claims import Claim, stated
from kvbench.paper.curves import THRESHOLD_S
from kvbench.paper.points import latency_panels
from kvbench.results import Results

ORCA = ("orca_max", "orca_pow2", "orca_oracle")
Gains = Mapping[tuple[str, str], float]
"""(panel, system) -> vLLM's rate at the threshold over this system's."""


def draw(results: Results) -> dict[str, Figure]:
    """One figure with the panels that were run, at most three beside each other."""
    summary = results.summary
    panels = [panel for panel in _panels(results).values() if panel.curves]
    if not panels:
        return {}
    columns = min(len(panels), 3)
    rows = math.ceil(len(panels) / columns)
    width = style.COLUMN_IN if columns == 1 else style.PAGE_IN
    with style.context():
        note = footnote(summary, f"Filled: {way(summary)}; hollow: the paper's plotted points")
        handles = latency.legend(systems(summary), way(summary))
        legend_columns = 2 if columns == 1 else 4
        height = 0.2 + 0.15 * math.ceil(len(handles) / legend_columns) + 1.7 * rows
        figure = style.new_figure(width, height, note)
        grid = figure.subplots(rows, columns, squeeze=False, sharey=True)
        for axes in grid.flat[len(panels) :]:
            axes.remove()
        for axes, panel in zip(grid.flat, panels, strict=False):
            title = f"({panel.letter}) {panel.condition.title}"
            latency.draw_panel(axes, title, panel.curves, panel.condition.curves)
        for axes in grid[:, 0]:
            axes.set_ylabel("Normalized latency\n(s/token)")
        figure.legend(handles=handles, loc="outside upper center", ncols=legend_columns)
    return {"fig_throughput": figure}


def table(results: Results) -> str | None:
    """The rate at 0.5 s/token of every curve that was run, beside the paper's."""
    rows = []
    for panel in _panels(results).values():
        for system, look in style.looks(panel.curves).items():
            ours = panel.crossings[system]
            papers = panel.papers(system) if system in panel.condition.curves else None
            ratio = f"{ours.rate / papers.rate:.2f}" if papers and papers.rate and ours.rate else ""
            title = f"({panel.letter}) {panel.condition.title}"
            rows.append((title, look.label, str(ours), str(papers or ""), ratio))
    if not rows:
        return None
    header = ("panel", "system", way(results.summary), "paper", "ratio")
    return f"Request rate (requests/s) at {THRESHOLD_S:g} s/token\n" + aligned([header, *rows], left=2)


def claims(results: Results) -> list[Claim]:
    """Of every panel the distance of the curves, the rates at 0.5 s/token and their ratios; then what the text says."""
    panels = _panels(results)
    rows = [claim for panel in panels.values() for claim in (*panel.distance_claims(), *panel.rate_claims())]
    for name, system in (("vllm_over_oracle", "orca_oracle"), ("vllm_over_max", "orca_max")):
        for letter in "abc":
            panel = panels[letter]
            statement = stated(name, letter, panel=letter, model=panel.condition.title.partition(",")[0])
            rows.append(panel.judge(statement, panel.gain(system), system, "vllm"))
    oracle = ("orca_oracle",)
    return [
        *rows,
        _over_panels(panels, "vllm_over_fastertransformer", "abc", ("fastertransformer",), _largest),
        _over_panels(panels, "overall_gain", "abcdef", ORCA, lambda gains: median(gains.values())),
        _over_panels(panels, "vllm_over_oracle_basic", "d", oracle, _largest),
        _over_panels(panels, "gain_with_length", "ad", oracle, _gain_with_length),
        _over_panels(panels, "gain_with_model", "abc", oracle, _gain_with_model),
        _over_panels(panels, "exception_f", "abcdef", ("orca_pow2", "orca_oracle"), _exception_f),
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


def _over_panels(
    panels: Mapping[str, PanelRates],
    name: str,
    letters: str,
    baselines: tuple[str, ...],
    combine: Callable[[Gains], float],
) -> Claim:
    """A claim that several panels decide together: every gain must be known."""
    intervals = {(letter, system): panels[letter].gain(system) for letter in letters for system in baselines}
    gains = {key: found[0] for key, found in intervals.items() if found and found[0] == found[1]}
    lacking = sorted({letter for letter, system in intervals if (letter, system) not in gains})
    if lacking:
        return stated(name).judge(None, missing=f"needs the rates at the threshold of panel {', '.join(lacking)}")
    obstacle = next((reason for letter in letters if (reason := panels[letter].obstacle(*baselines, "vllm"))), None)
    return stated(name).judge(combine(gains), obstacle=obstacle)


def _panels(results: Results) -> dict[str, PanelRates]:
    summary = results.summary
    return {
        letter: PanelRates(letter, condition, results, select(summary, panel=letter))
        for letter, condition in latency_panels().items()
    }
