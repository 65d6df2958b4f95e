"""How long points will take: what their like took where some have finished, a rule of thumb where none has."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any

from kvbench.point import Point, is_real

PER_REQUEST_S, PER_POINT_S = 3e-4, 0.02
"""Rule of thumb for a simulated run on one core: seconds of a request of some 400 tokens, and of a point besides."""
PER_SEARCH = 15
"""Runs of a search for a rate."""
UNKNOWN_REQUESTS = 10_000
"""Requests of a trace that is replayed whole: it is not read for an estimate."""


def arrivals_s(config: Mapping[str, Any]) -> float:
    """For how long requests arrive, in seconds, as far as the workload says; in real time a run takes at least that."""
    rate, duration_s, count = (config["workload"].get(key) for key in ("request_rate", "duration_s", "num_requests"))
    return float(min(([duration_s] if duration_s else []) + ([count / rate] if count and rate else []), default=0.0))


def num_requests(config: Mapping[str, Any]) -> float:
    """The expected number of requests, as far as the workload says."""
    rate, duration_s, count = (config["workload"].get(key) for key in ("request_rate", "duration_s", "num_requests"))
    limits = [rate * duration_s] if rate and duration_s else []
    return float(min([*limits, count] if count else limits, default=UNKNOWN_REQUESTS))


def rule_s(config: Mapping[str, Any]) -> float:
    """Wall seconds by the rule of thumb; of a real run the time for which requests arrive."""
    workload = config["workload"]
    runs = max(workload.get("num_samples", 1), workload.get("beam_width", 1))  # as many streams for each request
    runs *= PER_SEARCH if config["metric"] else 1
    simulated: float = PER_POINT_S + PER_REQUEST_S * num_requests(config) * runs
    return max(simulated, arrivals_s(config)) if is_real(config) else simulated


class Estimate:
    """Wall seconds of points, learnt from those of a sweep that have finished.

    A point like one that finished (the same but for the seed) takes as long; another takes what the rule of thumb says
    times the median of what the finished ones took over what it says of them.

    Args:
        finished: points, and the wall seconds they took.
    """

    def __init__(self, finished: Iterable[tuple[Point, float]]) -> None:
        took = defaultdict(list)
        ratios = []
        for point, wall_s in finished:
            took[_kind(point.config)].append(wall_s)
            ratios.append(wall_s / rule_s(point.config))
        self._took = {kind: median(seconds) for kind, seconds in took.items()}
        self._factor = median(ratios) if ratios else 1.0
        self._num_finished = len(ratios)

    @property
    def source(self) -> str:
        """What it rests on, in words."""
        if self._num_finished:
            return f"from {self._num_finished} finished points"
        return f"by a rule of thumb, {1000 * PER_REQUEST_S:g} ms per request, as none has finished"

    def seconds(self, point: Point) -> float:
        """Wall seconds of one point."""
        return self._took.get(_kind(point.config)) or self._factor * rule_s(point.config)


def _kind(config: Mapping[str, Any]) -> str:
    """What the replications of a point share."""
    kept = {key: value for key, value in config.items() if key != "seed"}
    kept["workload"] = {key: value for key, value in config["workload"].items() if key != "seed"}
    return json.dumps(kept, sort_keys=True, default=str)
