"""How long points will take: what their like took where some have finished, rules of thumb where none has."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any, NamedTuple

from kvbench import compiled
from kvbench.parts import build, is_real
from kvbench.point import Point


class Pace(NamedTuple):
    """Seconds of one core that a simulated run takes.

    Attributes:
        iteration_s: per iteration.
        request_s: per stream of a request: per sample, or per beam.
    """

    iteration_s: float
    request_s: float


COMPILED = Pace(0.3e-6, 4.5e-6)
"""Of ``kvbench.compiled``."""
STEPPED = Pace(6e-6, 25e-6)
"""Of ``kvbench.engine``."""
BEAMS = Pace(30e-6, 60e-6)
"""The same where each request has beams."""
MAPPED = Pace(130e-6, 60e-6)
"""The same where a memory map is kept."""
PER_RUN_S = 0.01
"""Of a run besides."""
PER_PROCESS_S = 2.0
"""Until a process has imported everything and loaded the compiled loop, which compiles once, when it first runs."""
PER_SEARCH = 13
"""Runs of a search for a rate, those on half of the trace counted half."""
UNKNOWN_REQUESTS = 10_000
"""Requests of a trace that is replayed whole: it is not read for an estimate."""
UNKNOWN_RATE = 1.0
"""Requests/s where the workload does not say."""
UNKNOWN_OUTPUT_LEN = 300
"""Tokens of an output, since no lengths are read."""
UNKNOWN_ITERATION_MS = 30.0


def arrivals_s(config: Mapping[str, Any]) -> float:
    """For how long requests arrive, in seconds, as far as the workload says; in real time a run takes at least that."""
    rate, duration_s, count = (config["workload"].get(key) for key in ("request_rate", "duration_s", "num_requests"))
    return float(min(([duration_s] if duration_s else []) + ([count / rate] if count and rate else []), default=0.0))


def num_requests(config: Mapping[str, Any]) -> float:
    """The expected number of requests, as far as the workload says."""
    rate, duration_s, count = (config["workload"].get(key) for key in ("request_rate", "duration_s", "num_requests"))
    limits = [rate * duration_s] if rate and duration_s else []
    return float(min([*limits, count] if count else limits, default=UNKNOWN_REQUESTS))


def num_iterations(config: Mapping[str, Any]) -> float:
    """About how many iterations a run has: one after the other while requests arrive, or one for each output token."""
    count = num_requests(config)
    iteration_ms = (config["costs"] or {}).get("a_ms", UNKNOWN_ITERATION_MS)
    return float(min(1000 * (arrivals_s(config) or count / UNKNOWN_RATE) / iteration_ms, UNKNOWN_OUTPUT_LEN * count))


def pace(config: Mapping[str, Any], *, keeps_map: bool = False) -> Pace:
    """Which loop serves a simulated point."""
    workload = config["workload"]
    if keeps_map:
        return MAPPED
    if workload.get("beam_width", 1) > 1:
        return BEAMS
    one_stream = workload.get("num_samples", 1) == 1 and not workload.get("prefix_len")
    if one_stream and num_requests(config) >= compiled.MIN_REQUESTS and _is_covered(config):
        return COMPILED
    return STEPPED


def rule_s(config: Mapping[str, Any], *, keeps_map: bool = False) -> float:
    """Wall seconds by the rules of thumb; of a real run at least the time for which requests arrive."""
    workload = config["workload"]
    streams = max(workload.get("num_samples", 1), workload.get("beam_width", 1))
    if is_real(config):
        return max(_run_s(STEPPED, config, streams), arrivals_s(config))
    runs = PER_SEARCH if config["metric"] else 1
    return runs * _run_s(pace(config, keeps_map=keeps_map), config, streams)


def _is_covered(config: Mapping[str, Any]) -> bool:
    """Whether the compiled loop knows its parts; thousands of points are made of few."""
    key = json.dumps([config[name] for name in ("allocator", "reservation", "scheduler", "runner")], default=str)
    if key not in _covered:
        parts = build(config)
        _covered[key] = compiled.covers(parts.scheduler, parts.open_runner())
    return _covered[key]


_covered: dict[str, bool] = {}


def _run_s(of: Pace, config: Mapping[str, Any], streams: int) -> float:
    return PER_RUN_S + of.iteration_s * num_iterations(config) + of.request_s * num_requests(config) * streams


class Estimate:
    """Wall seconds of points, learnt from those of a sweep that have finished.

    A point like one that finished (the same but for the seed) takes as long; another takes what the rules of thumb say
    times the median of what the finished ones took over what they say of them.

    Args:
        finished: points, and the wall seconds they took.
        keeps_map: whether points leave a memory map.
    """

    def __init__(self, finished: Iterable[tuple[Point, float]], *, keeps_map: bool = False) -> None:
        took = defaultdict(list)
        ratios = []
        for point, wall_s in finished:
            took[_kind(point.config)].append(wall_s)
            ratios.append(wall_s / rule_s(point.config, keeps_map=keeps_map))
        self._took = {kind: median(seconds) for kind, seconds in took.items()}
        self._factor = median(ratios) if ratios else 1.0
        self._num_finished = len(ratios)
        self._keeps_map = keeps_map

    @property
    def source(self) -> str:
        """What it rests on, in words."""
        if self._num_finished:
            return f"from {self._num_finished} finished points"
        return "by rules of thumb (docs/scale.md), as none has finished"

    def seconds(self, point: Point) -> float:
        """Wall seconds of one point."""
        took = self._took.get(_kind(point.config))
        return took or self._factor * rule_s(point.config, keeps_map=self._keeps_map)


def _kind(config: Mapping[str, Any]) -> str:
    """What the replications of a point share."""
    kept = {key: value for key, value in config.items() if key != "seed"}
    kept["workload"] = {key: value for key, value in config["workload"].items() if key != "seed"}
    return json.dumps(kept, sort_keys=True, default=str)
