"""Panels of latency curves beside the paper's: drawn, and compared by distances, rates at the threshold and gains.

A rate that a curve does not reach is known as an interval only; such an interval can refute a claim, not confirm it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import pandas as pd
from matplotlib.figure import Figure

from kvbench.figures import latency, style
from kvbench.figures.frames import (
    PUBLIC,
    Pairs,
    curve,
    difference,
    footnote,
    noted,
    other_lengths,
    select,
    systems,
    way,
)
from kvbench.figures.style import SYSTEMS
from kvbench.figures.terminal import aligned
from kvbench.paper.claims import Claim, Statement, stated
from kvbench.paper.curves import THRESHOLD_S, Crossing, crossing, log_ratios, root_mean_square
from kvbench.paper.points import LatencyPanel, latency_panels, published
from kvbench.results import Results

Interval = tuple[float, float]
Gains = Mapping[tuple[str, str], float]
"""(panel, system) -> vLLM's rate at the threshold over this system's."""
LATENCY = "normalized_latency_mean_s"
POOLS = {"llama_13b": "opt_13b"}
"""Model that Table 1 leaves out -> the one in whose pool it ran."""
PAPERS_ARRIVALS = "kvbench.workloads.arrivals.Paper"


def curves(rows: pd.DataFrame) -> dict[str, Pairs]:
    """System -> (rate, latency), for every system that was run."""
    found = {system: curve(select(rows, system=system), "request_rate", LATENCY) for system in systems(rows)}
    return {system: points for system, points in found.items() if points}


def interval(found: Crossing | None) -> Interval | None:
    """Where a crossing lies: an interval without width if the curve crosses. None: not run."""
    if found is None:
        return None
    if found.rate is not None:
        return found.rate, found.rate
    return found.above or 0.0, found.below or math.inf


def gain(crossings: Mapping[str, Crossing], system: str) -> Interval | None:
    """The rate of vLLM at the threshold over another system's."""
    ours, others = interval(crossings.get("vllm")), interval(crossings.get(system))
    if ours is None or others is None:
        return None
    return ours[0] / others[1], ours[1] / others[0] if others[0] else math.inf


def judge(
    statement: Statement,
    found: Interval | None,
    crossings: Mapping[str, Crossing],
    names: Iterable[str],
    *,
    place: str = "",
    obstacle: str | None = None,
) -> Claim:
    """Hold what these systems' curves decide against a claim.

    Args:
        statement: the claim.
        found: the interval in which the value lies; None where it is not known at all.
        crossings: of all curves.
        names: the systems that decide.
        place: where they were looked for.
        obstacle: see ``Statement.judge``.
    """
    if found is None:
        lacking = [SYSTEMS[name].label for name in names if name not in crossings]
        return statement.judge(None, missing=f"no result of {' and '.join(lacking)}{place}")
    if found[0] == found[1]:
        return statement.judge(found[0], obstacle=obstacle)
    reach = [f"{SYSTEMS[name].label} {crossings[name]}" for name in names if crossings[name].rate is None]
    missing = f"no crossing between the rates that were run: {', '.join(reach)} requests/s"
    return statement.judge(None, interval=found, missing=missing, obstacle=obstacle)


def panels(results: Results, figure: str = "fig12") -> dict[str, PanelRates]:
    """Every panel of one of the paper's figures by letter, those that were not run too."""
    summary = results.summary
    return {
        letter: PanelRates(letter, condition, results, select(summary, panel=letter))
        for letter, condition in latency_panels(figure).items()
    }


def draw(results: Results, panels: Iterable[PanelRates]) -> Figure | None:
    """The panels that were run, at most three beside each other."""
    summary = results.summary
    there = [panel for panel in panels if panel.curves]
    if not there:
        return None
    columns = min(len(there), 3)
    rows = math.ceil(len(there) / columns)
    width = style.COLUMN_IN if columns == 1 else style.PAGE_IN
    with style.context():
        note = footnote(summary, f"Filled: {way(summary)}; hollow: the paper's plotted points")
        handles = latency.legend(systems(summary), way(summary))
        legend_columns = 2 if columns == 1 else 4
        height = 0.2 + 0.15 * math.ceil(len(handles) / legend_columns) + 1.7 * rows
        figure = style.new_figure(width, height, note)
        grid = figure.subplots(rows, columns, squeeze=False, sharey=True)
        for axes in grid.flat[len(there) :]:
            axes.remove()
        for axes, panel in zip(grid.flat, there, strict=False):
            latency.draw_panel(axes, panel.title, panel.curves, panel.condition.curves)
        for axes in grid[:, 0]:
            axes.set_ylabel("Normalized latency\n(s/token)")
        figure.legend(handles=handles, loc="outside upper center", ncols=legend_columns)
    return figure


def table(results: Results, panels: Iterable[PanelRates]) -> str | None:
    """The rate at the threshold of every curve that was run, beside the paper's."""
    rows = []
    for panel in panels:
        for system, look in style.looks(panel.curves).items():
            ours = panel.crossings[system]
            papers = panel.papers(system) if system in panel.condition.curves else None
            ratio = f"{ours.rate / papers.rate:.2f}" if papers and papers.rate and ours.rate else ""
            rows.append((panel.title, look.label, str(ours), str(papers or ""), ratio))
    if not rows:
        return None
    header = ("panel", "system", way(results.summary), "paper", "ratio")
    return f"Request rate (requests/s) at {THRESHOLD_S:g} s/token\n" + aligned([header, *rows], left=2)


def over_panels(
    panels: Mapping[str, PanelRates],
    statement: Statement,
    letters: str,
    baselines: tuple[str, ...],
    combine: Callable[[Gains], float],
) -> Claim:
    """A claim that the gains of several panels decide together: every one must be known.

    Args:
        panels: by letter.
        statement: the claim.
        letters: of the panels that decide.
        baselines: the systems over which vLLM gains.
        combine: makes one number of them.
    """
    intervals = {(letter, system): panels[letter].gain(system) for letter in letters for system in baselines}
    gains = {key: found[0] for key, found in intervals.items() if found and found[0] == found[1]}
    lacking = sorted({letter for letter, system in intervals if (letter, system) not in gains})
    if lacking:
        return statement.judge(None, missing=f"needs the rates at the threshold of panel {', '.join(lacking)}")
    obstacle = next((reason for letter in letters if (reason := panels[letter].obstacle(*baselines, "vllm"))), None)
    return statement.judge(combine(gains), obstacle=obstacle)


@dataclass(frozen=True)
class PanelRates:
    """One panel of a run, held against the paper's.

    Attributes:
        letter: of the panel.
        condition: the paper's.
        results: the run's.
        rows: those of this panel.
    """

    letter: str
    condition: LatencyPanel
    results: Results
    rows: pd.DataFrame

    @property
    def title(self) -> str:
        """With the panel's letter."""
        return f"({self.letter}) {self.condition.title}"

    @cached_property
    def curves(self) -> dict[str, Pairs]:
        """System -> (rate, latency), for every system that was run here."""
        return curves(self.rows)

    @cached_property
    def crossings(self) -> dict[str, Crossing]:
        """Where each curve reaches the threshold."""
        return {system: crossing(points) for system, points in self.curves.items()}

    def papers(self, system: str) -> Crossing:
        """Where the paper's curve reaches the threshold."""
        return crossing((point.x, point.y) for point in self.condition.curves[system].points)

    @cached_property
    def obstacles(self) -> dict[str, str | None]:
        """Why a system's curve cannot be compared with the paper's, if so."""
        return {system: self._obstacle(system) for system in self.condition.curves if system in self.curves}

    def obstacle(self, *names: str) -> str | None:
        """The first of these systems' obstacles."""
        return next((reason for name in names if (reason := self.obstacles.get(name))), None)

    def _obstacle(self, system: str) -> str | None:
        rows = select(self.rows, system=system)
        condition = self.condition
        memory = published()["table1"]["models"][POOLS.get(condition.model, condition.model)]
        slabs = system == "fastertransformer"
        wrong = difference(
            rows,
            model=condition.model,
            hardware=memory["hardware"],
            workload=condition.workload,
            duration_s=condition.duration_s,
            num_samples=condition.num_samples,
            beam_width=condition.beam_width,
            costs="fastertransformer" if slabs else "paper_engine",
            **({} if slabs else {"block_size": 16}),
        )
        wrong = wrong or self._other_options(rows, system)
        if wrong:
            return wrong
        if (abs(rows["num_slots"] - memory["num_slots"]) > 50).any():
            return f"the pool has {rows['num_slots'].iloc[0]} slots, the paper's about {memory['num_slots']}"
        lacking = set(condition.curves[system].rates) - {rate for rate, _ in self.curves[system]}
        return f"no result at {', '.join(f'{rate:g}' for rate in sorted(lacking))} requests/s" if lacking else None

    def _other_options(self, rows: pd.DataFrame, system: str) -> str | None:
        """The first option of the workload that is not the paper's; all points of a curve have those of one."""
        for name, value in self.condition.options.items():
            workload = self.results.config(rows.iloc[0])["workload"]
            wanted = value[system] if isinstance(value, Mapping) else value
            if workload.get(name) != wanted:
                return f"{name} is {workload.get(name)}, the paper's is {wanted}"
        return None

    @cached_property
    def stand_in(self) -> str | None:
        """Where the lengths come from, if they are not the paper's own."""
        return other_lengths(self.rows, self.condition.workload)

    @cached_property
    def other_trace(self) -> str | None:
        """Why the run's requests are not the paper's very requests, if so."""
        if self.stand_in is not None and self.condition.workload in PUBLIC:
            return f"one trace against another: {self.stand_in}"
        if (self.rows["seed"] != 0).any():
            return "one trace against another: seed is not 0"
        arrivals = self.results.config(self.rows.iloc[0])["workload"].get("arrivals", {}).get("_target_")
        return None if arrivals == PAPERS_ARRIVALS else f"one trace against another: arrivals are {arrivals}"

    def rate(self, system: str) -> Interval | None:
        """Where the rate at the threshold lies: an interval without width if the curve crosses. None: not run."""
        return interval(self.crossings.get(system))

    def gain(self, system: str) -> Interval | None:
        """The rate of vLLM over another system's."""
        return gain(self.crossings, system)

    def judge(self, statement: Statement, found: Interval | None, *names: str) -> Claim:
        """Hold what these systems' curves decide against a claim."""
        place = f" in panel {self.letter}"
        claim = judge(statement, found, self.crossings, names, place=place, obstacle=self.obstacle(*names))
        return claim if found is None else noted(claim, self.stand_in)

    def distance_claims(self) -> list[Claim]:
        """Root mean square of ln(measured / published), for each curve and for Orca and vLLM together.

        Past the knee latency is a property of one trace: comparable is the paper's own only.
        """
        claims = []
        together: list[float] = []
        for system, papers in self.condition.curves.items():
            slabs = system == "fastertransformer"
            statement = stated(
                "curve_rms_fastertransformer" if slabs else "curve_rms",
                self.letter,
                panel=self.letter,
                system=SYSTEMS[system].label,
            )
            if system not in self.curves:
                claims.append(self.judge(statement, None, system))
                continue
            expected = [(point.x, point.y) for point in papers.measurements]
            ratios = log_ratios(dict(self.curves[system]), expected)
            together += [] if slabs else ratios
            obstacle = self.obstacle(system) or self.other_trace
            claims.append(noted(statement.judge(root_mean_square(ratios), obstacle=obstacle), self.stand_in))
        names = [system for system in self.condition.curves if system != "fastertransformer"]
        label = "Orca (Max, Pow2, Oracle) and vLLM together"
        statement = stated("curve_rms", self.letter, panel=self.letter, system=label)
        if any(name not in self.curves for name in names):
            claims.append(self.judge(statement, None, *names))
        else:
            obstacle = self.obstacle(*names) or self.other_trace
            claims.append(noted(statement.judge(root_mean_square(together), obstacle=obstacle), self.stand_in))
        return claims

    def rate_claims(self, rate: str = "rate_at_threshold", ratio: str = "rate_ratio") -> list[Claim]:
        """The rate of every curve at the threshold, and vLLM's over each other's, as plotted.

        Args:
            rate: the claim on a rate; its fields may have one value per system.
            ratio: that on a ratio.
        """
        rates, ratios = [], []
        vllm = self.papers("vllm").rate
        for system in self.condition.curves:
            papers = self.papers(system).rate
            words = {"panel": self.letter, "system": SYSTEMS[system].label}
            rates.append(self.judge(stated(rate, system, value=papers, **words), self.rate(system), system))
            if system != "vllm" and vllm is not None and papers is not None:
                statement = stated(ratio, system, value=vllm / papers, **words)
                ratios.append(self.judge(statement, self.gain(system), system, "vllm"))
        return rates + ratios
