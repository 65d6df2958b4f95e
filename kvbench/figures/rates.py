"""Panels of latency curves beside the paper's: drawn, and compared by distances, rates at the threshold and gains.

A curve is that of the first repeat: one trace, as the paper's. Others add what one trace cannot say: bands around the
stable part of the curve, and intervals of rates and gains, each read from the curves of one repeat.

A rate that a curve does not reach is known by bounds only; they can refute a claim, not confirm it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import pandas as pd
from matplotlib.figure import Figure

from kvbench.figures import latency, preemption, style
from kvbench.figures.frames import (
    LATENCY,
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
from kvbench.figures.replications import interval, is_stable
from kvbench.figures.style import SYSTEMS
from kvbench.figures.terminal import aligned
from kvbench.paper.claims import Claim, Statement, stated
from kvbench.paper.curves import THRESHOLD_S, Crossing, crossing, log_ratios, root_mean_square
from kvbench.paper.points import LatencyPanel, latency_panels, published
from kvbench.results import Results
from kvbench.statistics import Interval, geometric_mean, mean_interval, named

Gains = Mapping[tuple[str, str], float]
"""(panel, system) -> vLLM's rate at the threshold over this system's."""
STEADY = f"steady_{LATENCY}"
POOLS = {"llama_13b": "opt_13b"}
"""Model that Table 1 leaves out -> the one in whose pool it ran."""
PAPERS_ARRIVALS = "kvbench.workloads.arrivals.Paper"


def curves(rows: pd.DataFrame) -> dict[str, Pairs]:
    """System -> (rate, latency), for every system that was run."""
    found = {system: curve(select(rows, system=system), "request_rate", LATENCY) for system in systems(rows)}
    return {system: points for system, points in found.items() if points}


class Reading(NamedTuple):
    """What is known of a rate or a gain.

    Attributes:
        low: lower end of the interval of repeats; alike ``value`` where there is one; a bound where ``value`` is None.
        high: its upper end.
        value: None where a curve, or that of some repeat, does not reach the threshold.
    """

    low: float
    high: float
    value: float | None = None

    @classmethod
    def at(cls, value: float) -> Reading:
        """Of one run."""
        return cls(value, value, value)

    @classmethod
    def over(cls, repeats: Interval) -> Reading:
        """Of several."""
        return cls.at(repeats.value) if repeats.num < 2 else cls(repeats.low, repeats.high, repeats.value)

    @classmethod
    def together(cls, repeats: list[Reading], mean: Callable[[list[float]], Interval]) -> Reading | None:
        """Of several, by their ``mean``; a bound where one of them is one. None: there are none."""
        values = [each.value for each in repeats if each.value is not None]
        if len(values) < len(repeats):
            return cls(min(each.low for each in repeats), max(each.high for each in repeats))
        return cls.over(mean(values)) if values else None

    @property
    def spread(self) -> tuple[float, float] | None:
        """The interval, where it has a width."""
        return (self.low, self.high) if self.low < self.high else None

    def __str__(self) -> str:
        """``1.83 [1.81, 1.85]``, or ``1.83`` of one run; empty where there is no value."""
        if self.value is None:
            return ""
        return f"{self.value:.3g}" + (f" [{self.low:.3g}, {self.high:.3g}]" if self.spread else "")


def reading(found: Crossing | None) -> Reading | None:
    """What a crossing says. None: not run."""
    if found is None:
        return None
    if found.rate is not None:
        return Reading.at(found.rate)
    return Reading(found.above or 0.0, found.below or math.inf)


def gain(crossings: Mapping[str, Crossing], system: str) -> Reading | None:
    """The rate of vLLM at the threshold over another system's."""
    ours, others = reading(crossings.get("vllm")), reading(crossings.get(system))
    if ours is None or others is None:
        return None
    value = None if ours.value is None or others.value is None else ours.value / others.value
    return Reading(ours.low / others.high, ours.high / others.low if others.low else math.inf, value)


def judge(
    statement: Statement,
    found: Reading | None,
    crossings: Mapping[str, Crossing],
    names: Iterable[str],
    *,
    place: str = "",
    obstacle: str | None = None,
) -> Claim:
    """Hold what these systems' curves decide against a claim.

    Args:
        statement: the claim.
        found: what they say; None where they say nothing.
        crossings: of all curves.
        names: the systems that decide.
        place: where they were looked for.
        obstacle: see ``Statement.judge``.
    """
    if found is None:
        lacking = [SYSTEMS[name].label for name in names if name not in crossings]
        return statement.judge(None, missing=f"no result of {' and '.join(lacking)}{place}")
    if found.value is not None:
        return statement.judge(found.value, interval=found.spread, obstacle=obstacle)
    reach = [f"{SYSTEMS[name].label} {crossings[name]}" for name in names if crossings[name].rate is None]
    missing = f"no crossing between the rates that were run: {', '.join(reach)} requests/s"
    return statement.judge(None, interval=(found.low, found.high), missing=missing, obstacle=obstacle)


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
        note = footnote(summary, f"Filled: {way(summary)}; hollow: the paper's plotted points", *_of_repeats(there))
        handles = latency.legend(systems(summary), way(summary), has_bands=any(panel.bands for panel in there))
        legend_columns = 2 if columns == 1 else 4
        height = 0.2 + 0.15 * math.ceil(len(handles) / legend_columns) + 1.7 * rows
        figure = style.new_figure(width, height, note)
        grid = figure.subplots(rows, columns, squeeze=False, sharey=True)
        for axes in grid.flat[len(there) :]:
            axes.remove()
        for axes, panel in zip(grid.flat, there, strict=False):
            latency.draw_panel(axes, panel.title, panel.curves, panel.condition.curves)
            latency.draw_bands(axes, panel.bands, panel.unstable)
        for axes in grid[:, 0]:
            axes.set_ylabel("Normalized latency\n(s/token)")
        style.put_legend(figure, handles, legend_columns)
    return figure


def _of_repeats(panels: Iterable[PanelRates]) -> list[str]:
    """What a reader must know of bands; nothing where every point was run once."""
    nums = sorted({len(panel.repeats) for panel in panels})
    if nums[-1] < 2:
        return []
    many = " and ".join(map(str, nums))
    return [
        f"Lines: the first repeat. Bands: {named()} of the mean over {many} repeats, warm-up and drain left out, "
        "where the system is stable. Shaded: its queue grows, so that latency depends on the trace's length"
    ]


def table(results: Results, panels: Iterable[PanelRates]) -> str | None:
    """The rate at the threshold of every curve that was run, beside the paper's; with repeats also vLLM's over it.

    Then what preemption cost at the rate where it cost most.
    """
    rows = []
    panels = list(panels)
    repeated = any(len(panel.repeats) > 1 for panel in panels)
    for panel in panels:
        for system, look in style.looks(panel.curves).items():
            ours, gained = panel.rate(system), panel.gain(system) if system != "vllm" else None
            papers = panel.papers(system) if system in panel.condition.curves else None
            value = ours.value if ours else None
            ratio = f"{value / papers.rate:.2f}" if papers and papers.rate and value else ""
            said = str(ours or "") or str(panel.crossings[system])
            more = (str(gained or "") or "-", _stable_to(panel, system)) if repeated else ()
            rows.append((panel.title, look.label, said, str(papers or ""), ratio, *more))
    if not rows:
        return None
    more = ("vLLM over it", "stable up to") if repeated else ()
    header = ("panel", "system", way(results.summary), "paper", "ratio", *more)
    title = f"Request rate (requests/s) at {THRESHOLD_S:g} s/token"
    if repeated:
        title += f", read on traces as long as the paper's; {named()} over repeats"
    lost = preemption.table(
        (
            ((panel.title, look.label, f"{worst['request_rate'].iloc[0]:g}"), worst)
            for panel in panels
            for system, look in style.looks(panel.curves).items()
            if len(worst := preemption.worst(select(panel.rows, system=system)))
        ),
        ("panel", "system", "rate"),
        "at the rate where most was lost",
    )
    return "\n\n".join([f"{title}\n" + aligned([header, *rows], left=2), *([lost] if lost else [])])


def _stable_to(panel: PanelRates, system: str) -> str:
    rates = [rate for rate, _, _ in panel.bands.get(system, ())]
    return f"{max(rates):g}" if rates else "-"


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
    found = {(letter, system): panels[letter].gains(system) for letter in letters for system in baselines}
    known = {
        key: {repeat: each.value for repeat, each in gains.items() if each.value is not None}
        for key, gains in found.items()
    }
    if lacking := sorted({letter for (letter, _), gains in found.items() if not gains}):
        return statement.judge(None, missing=f"needs the rates at the threshold of panel {', '.join(lacking)}")
    if unknown := sorted({key[0] for key, gains in known.items() if len(gains) < len(found[key])}):
        which = f"panel {', '.join(unknown)}"
        return statement.judge(None, missing=f"no crossing between the rates that were run in {which}", ran=True)
    obstacle = next((reason for letter in letters if (reason := panels[letter].obstacle(*baselines, "vllm"))), None)
    common = sorted(set.intersection(*(set(gains) for gains in known.values())))
    if not common:
        return statement.judge(None, missing=f"panels {', '.join(letters)} have no repeat in common", ran=True)
    mean = Reading.over(
        mean_interval([combine({key: gains[repeat] for key, gains in known.items()}) for repeat in common])
    )
    return statement.judge(mean.value, interval=mean.spread, obstacle=obstacle)


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
    def repeats(self) -> dict[int, pd.DataFrame]:
        """Repeat -> its rows, in order."""
        return {repeat: select(self.rows, repeat=repeat) for repeat in sorted(set(self.rows["repeat"]))}

    @cached_property
    def first(self) -> pd.DataFrame:
        """The rows of the first repeat."""
        return next(iter(self.repeats.values()), self.rows)

    @cached_property
    def curves(self) -> dict[str, Pairs]:
        """System -> (rate, latency) of the first repeat, for every system that was run here."""
        return curves(self.first)

    @cached_property
    def crossings(self) -> dict[str, Crossing]:
        """Where each curve reaches the threshold; of several repeats the first that does not, if one does not."""
        return {
            system: next((each for each in found.values() if each.rate is None), found[min(found)])
            for system, found in self._repeated.items()
        }

    @cached_property
    def _repeated(self) -> dict[str, dict[int, Crossing]]:
        """System -> repeat -> where its curve reaches the threshold."""
        found: dict[str, dict[int, Crossing]] = {}
        for repeat, rows in self.repeats.items():
            for system, points in curves(rows).items():
                found.setdefault(system, {})[repeat] = crossing(points)
        return found

    @cached_property
    def _points(self) -> dict[str, list[tuple[float, pd.DataFrame]]]:
        """System -> (rate, repeats of the point), in order of the rate; none where every point was run once."""
        if len(self.repeats) < 2:
            return {}
        found = {}
        for system in self.curves:
            rows = select(self.rows, system=system)
            found[system] = [(rate, select(rows, request_rate=rate)) for rate in sorted(set(rows["request_rate"]))]
        return found

    @cached_property
    def unstable(self) -> dict[str, tuple[float, float]]:
        """System -> the rates at which its queue grows: from half way after the highest stable one to the last."""
        found = {}
        for system, points in self._points.items():
            rates = [rate for rate, _ in points]
            highest = max((rate for rate, rows in points if is_stable(rows)), default=rates[0])
            if highest < rates[-1]:
                after = rates[rates.index(highest) + 1]
                found[system] = ((highest + after) / 2, rates[-1])
        return found

    @cached_property
    def bands(self) -> dict[str, list[tuple[float, float, float]]]:
        """System -> (rate, low, high): intervals of the mean over repeats at its stable rates."""
        found = {}
        for system, points in self._points.items():
            means = [(rate, interval(rows, STEADY)) for rate, rows in points if is_stable(rows)]
            found[system] = [(rate, mean.low, mean.high) for rate, mean in means if mean and mean.num > 1]
        return {system: band for system, band in found.items() if band}

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
        if (self.first["seed"] != 0).any():
            return "one trace against another: seed is not 0"
        arrivals = self.results.config(self.first.iloc[0])["workload"].get("arrivals", {}).get("_target_")
        return None if arrivals == PAPERS_ARRIVALS else f"one trace against another: arrivals are {arrivals}"

    def rate(self, system: str) -> Reading | None:
        """The rate at the threshold: of one run, or the mean over repeats with its interval. None: not run."""
        found = [each for repeat in self._repeated.get(system, {}).values() if (each := reading(repeat))]
        return Reading.together(found, mean_interval)

    def gains(self, system: str) -> dict[int, Reading]:
        """Repeat -> the rate of vLLM over another system's."""
        ours, others = (self._repeated.get(name, {}) for name in ("vllm", system))
        pairs = {each: gain({"vllm": ours[each], system: others[each]}, system) for each in ours if each in others}
        return {repeat: found for repeat, found in pairs.items() if found}

    def gain(self, system: str) -> Reading | None:
        """The rate of vLLM over another system's: of one run, or the geometric mean over repeats, paired."""
        return Reading.together(list(self.gains(system).values()), geometric_mean)

    def judge(self, statement: Statement, found: Reading | None, *names: str) -> Claim:
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
            doubled = sorted({x for x, _ in expected if [each for each, _ in expected].count(x) > 1})
            ratios = log_ratios(dict(self.curves[system]), expected)
            together += [] if slabs else ratios
            obstacle = self.obstacle(system) or self.other_trace
            claim = noted(statement.judge(root_mean_square(ratios), obstacle=obstacle), self.stand_in)
            claims.append(noted(claim, "; ".join(f"the paper has two points at {x:g} requests/s" for x in doubled)))
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
