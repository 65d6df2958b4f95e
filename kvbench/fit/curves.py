"""The measurements of the paper's Fig. 12 with the run that should meet each of them, and how far it does."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from kvbench.composition import Setting, composer, parse
from kvbench.core import KvbenchError, Request
from kvbench.paper.points import LatencyPanel, latency_panels
from kvbench.parts import build, instantiate_workload, serve
from kvbench.records import Record

Config = dict[str, Any]
"""A resolved configuration, as `kvbench.parts.build` takes it."""

Costs = dict[str, Any]
"""Coefficients by the names of ``IterationCosts``."""

ONE_ENGINE = ("orca_max", "orca_pow2", "orca_oracle", "vllm")
"""The systems that share one engine, hence one set of coefficients."""


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """A point of a curve, and the run that should meet it.

    Attributes:
        panel: letter.
        system: name of the preset.
        rate: requests/s.
        latency_s: normalized latency to meet, in s/token.
    """

    panel: str
    system: str
    rate: float
    latency_s: float
    config: Config

    @property
    def curve(self) -> str:
        """What it is listed under."""
        return f"({self.panel}) {self.system}"


def panel_of(letter: str) -> LatencyPanel:
    """A panel of Fig. 12. Raises KvbenchError where there is none."""
    if letter not in latency_panels():
        raise KvbenchError(f"Fig. 12 has no panel {letter}; it has {', '.join(latency_panels())}")
    return latency_panels()[letter]


def settings(panel: LatencyPanel, system: str, rate: float) -> list[Setting]:
    """What the command line would say for a point of a panel."""
    return [
        Setting("system", system),
        Setting("model", panel.model),
        Setting("workload", panel.workload),
        Setting("workload.duration_s", panel.duration_s),
        Setting("workload.request_rate", rate),
    ]


def targets(curves: Mapping[str, Iterable[str]], overrides: Iterable[str] = ()) -> list[Target]:
    """The measurements of some curves; marks where a line leaves the plot are none.

    Args:
        curves: letter of the panel -> systems.
        overrides: as on kvbench's command line; they win over the panel's own settings.

    Raises:
        KvbenchError: a panel, a system or an override that does not exist.
    """
    [given] = parse(list(overrides), sweep=False)
    found = []
    with composer() as compose:
        for letter, systems in curves.items():
            panel = panel_of(letter)
            for system in systems:
                if system not in panel.curves:
                    raise KvbenchError(f"panel {letter} has no curve of {system}; it has {', '.join(panel.curves)}")
                for point in panel.curves[system].measurements:
                    config = compose.resolve([*settings(panel, system, point.x), *given]).point
                    found.append(Target(letter, system, point.x, point.y, config))
    return found


def run(config: Config, costs: Costs | None = None) -> Record:
    """Simulate a configuration; ``costs`` replaces its coefficients."""
    if costs is not None:
        config = {**config, "costs": {"hardware": config["costs"]["hardware"], **costs}}
    return serve(build(config).open_engine(), _requests(json.dumps(config["workload"])))


@lru_cache(maxsize=4)
def _requests(workload: str) -> list[Request]:
    return instantiate_workload({"workload": json.loads(workload)}).generate().requests


def normalized_latency(config: Config, costs: Costs | None = None) -> float:
    """Mean over the finished requests of seconds from arrival to end per output token."""
    columns = run(config, costs).requests
    finish_s, arrival_s, output_len = (columns[name].astype(float) for name in ("finish_s", "arrival_s", "output_len"))
    return float(np.nanmean((finish_s - arrival_s) / output_len))


def predict(of: Sequence[Target], costs: Costs | None, pool: Executor) -> list[float]:
    """The simulated normalized latency of every target, in s/token.

    Targets of one curve at one rate (the paper has a rate that was run twice) are simulated once.
    """
    longest_first = sorted(of, key=lambda each: each.rate * each.config["workload"]["duration_s"], reverse=True)
    jobs = {(target.curve, target.rate): target.config for target in longest_first}
    latencies = pool.map(normalized_latency, jobs.values(), [costs] * len(jobs))
    found = dict(zip(jobs, latencies, strict=True))
    return [found[target.curve, target.rate] for target in of]


def rms_log(of: Sequence[Target], simulated: Sequence[float], weights: Mapping[str, float] | None = None) -> float:
    """Root mean square of ln(simulated / published).

    Args:
        of: the points.
        simulated: their latencies.
        weights: letter of a panel -> weight of each of its points; 1 where it is not listed.
    """
    squares = [math.log(latency_s / target.latency_s) ** 2 for target, latency_s in zip(of, simulated, strict=True)]
    return math.sqrt(np.average(squares, weights=[(weights or {}).get(target.panel, 1.0) for target in of]))


Group = tuple[list[Target], list[float]]
"""Targets and their simulated latencies."""


def grouped(of: Sequence[Target], simulated: Sequence[float], key: Callable[[Target], str]) -> dict[str, Group]:
    """Targets and latencies that have a key in common, in the order of their first."""
    groups: dict[str, Group] = {}
    for target, latency_s in zip(of, simulated, strict=True):
        points, latencies = groups.setdefault(key(target), ([], []))
        points.append(target)
        latencies.append(latency_s)
    return groups


def cells(of: Group) -> list[str]:
    """``rate: simulated/published`` of each target."""
    return [f"{target.rate:g}: {digits(y)}/{digits(target.latency_s)}" for target, y in zip(*of, strict=True)]


def digits(latency_s: float) -> str:
    """A latency to three digits, or four places below 0.1: more means nothing."""
    return f"{latency_s:.4f}" if latency_s < 0.1 else f"{latency_s:.3f}"
