"""The paper's plotted points and printed numbers, typed; ``points.yaml`` holds them and says where each was read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from importlib.resources import files
from typing import Any, cast

import yaml


class Kind(StrEnum):
    """What a point of a curve is."""

    PLOTTED = "plotted"
    """A measurement inside the axes."""
    ABOVE_AXIS = "above_axis"
    """A measurement above the top of the axis, of known value."""
    LEAVES_PLOT = "leaves_plot"
    """Where the line towards the next measurement leaves the drawing; on the line, but not a measurement."""


@dataclass(frozen=True, slots=True)
class Point:
    """``x`` and ``y`` in the units of the figure's axes."""

    x: float
    y: float
    kind: Kind = Kind.PLOTTED


@dataclass(frozen=True, slots=True)
class Curve:
    """Normalized latency (s/token) against request rate (requests/s) of one system.

    Attributes:
        points: by rate; the mark where the line leaves the plot comes last.
        next_rate: rate of the measurement after the last known one, where the line leaves the plot.
    """

    points: tuple[Point, ...]
    next_rate: float | None = None

    @property
    def measurements(self) -> tuple[Point, ...]:
        """The points that are measurements."""
        return tuple(point for point in self.points if point.kind is not Kind.LEAVES_PLOT)

    @property
    def rates(self) -> tuple[float, ...]:
        """Rates to run for a curve that can be laid over this one, each once, in order."""
        rates = {point.x for point in self.measurements}
        return tuple(sorted(rates if self.next_rate is None else rates | {self.next_rate}))


@dataclass(frozen=True, slots=True)
class LatencyPanel:
    """One panel of Fig. 12 or its kind: the condition, and a curve per system."""

    title: str
    model: str
    workload: str
    duration_s: float
    curves: dict[str, Curve]
    num_samples: int = 1
    beam_width: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of the workload, by name; one value for all systems, or one for each of them."""


@cache
def published() -> dict[str, Any]:
    """All of ``points.yaml``, block by block; treat it as read-only."""
    text = files("kvbench.paper").joinpath("points.yaml").read_text(encoding="utf-8")
    return cast(dict[str, Any], yaml.safe_load(text))


@cache
def latency_panels(figure: str = "fig12") -> dict[str, LatencyPanel]:
    """The panels of a figure by letter; ``figure`` is its block in ``points.yaml``."""
    return {
        letter: LatencyPanel(
            title=panel["title"],
            model=panel["model"],
            workload=panel["workload"],
            duration_s=panel["duration_s"],
            curves={system: _curve(curve) for system, curve in panel["curves"].items()},
            num_samples=panel.get("num_samples", 1),
            beam_width=panel.get("beam_width", 1),
            options=panel.get("options", {}),
        )
        for letter, panel in published()[figure]["panels"].items()
    }


def _curve(entry: dict[str, Any]) -> Curve:
    points = [Point(x, y, kind) for kind in (Kind.PLOTTED, Kind.ABOVE_AXIS) for x, y in entry.get(kind, ())]
    points.sort(key=lambda point: point.x)
    if Kind.LEAVES_PLOT in entry:
        x, y = entry[Kind.LEAVES_PLOT]
        points.append(Point(x, y, Kind.LEAVES_PLOT))
    return Curve(tuple(points), entry.get("next_rate"))
