"""Fits iteration costs to the paper's latency curves: ``python -m kvbench.fit --help``.

The residual of a plotted point is ln(simulated / published normalized latency), so that a point near idle and one beyond the knee
weigh alike. Coefficients are varied as logarithms, from the values in ``conf/costs`` unless others are given, by
Nelder-Mead: beyond the knee latency is rough in the coefficients, because the trace is one realisation, and
derivatives mislead there. What is not named with ``--free`` stays as it is.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from scipy.optimize import minimize
from tqdm import tqdm

from kvbench.clock import VirtualClock
from kvbench.composition import Setting, composer, parse
from kvbench.core import KvbenchError, Request
from kvbench.engine import Engine, serve
from kvbench.ledger import Ledger
from kvbench.paper.points import latency_panels
from kvbench.point import build, instantiate_workload
from kvbench.records import Record

NOT_COEFFICIENTS = ("name", "hardware", "source")
"""Keys of an entry of a costs file that are no arguments of ``IterationCosts``."""

Costs = dict[str, Any]
"""Coefficients by the names of ``IterationCosts``."""


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """A point of a curve, and the run that should meet it.

    Attributes:
        curve: what it is listed under, as ``(a) vllm``.
        rate: requests/s.
        latency_s: normalized latency to meet, in s/token.
        config: a resolved configuration as `kvbench.point.build` takes it; its coefficients are replaced.
    """

    curve: str
    rate: float
    latency_s: float
    config: dict[str, Any]


def targets(panels: Mapping[str, Iterable[str]], overrides: Iterable[str] = ()) -> list[Target]:
    """The measurements of the paper's Fig. 12; marks where a line leaves the plot are none.

    Args:
        panels: letter -> systems, presets' names.
        overrides: as on kvbench's command line; they win over the panel's own settings.

    Raises:
        KvbenchError: a panel, a system or an override that does not exist.
    """
    published = latency_panels()
    [given] = parse(list(overrides), sweep=False)
    found = []
    with composer() as compose:
        for letter, systems in panels.items():
            if letter not in published:
                raise KvbenchError(f"Fig. 12 has no panel {letter}; it has {', '.join(published)}")
            panel = published[letter]
            for system in systems:
                if system not in panel.curves:
                    raise KvbenchError(f"panel {letter} has no curve of {system}; it has {', '.join(panel.curves)}")
                for point in panel.curves[system].measurements:
                    settings = [
                        Setting("system", system),
                        Setting("model", panel.model),
                        Setting("workload", panel.workload),
                        Setting("workload.duration_s", panel.duration_s),
                        Setting("workload.request_rate", point.x),
                        *given,
                    ]
                    config = compose.resolve(settings).point
                    found.append(Target(f"({letter}) {system}", point.x, point.y, config))
    return found


def run(config: Mapping[str, Any], costs: Costs | None = None) -> Record:
    """Simulate a point; ``costs`` replaces the coefficients of its configuration."""
    if costs is not None:
        config = {**config, "costs": costs}
    parts = build(config)
    engine = Engine(parts.scheduler, parts.runner, VirtualClock(), Ledger(parts.scheduler.allocator))
    return serve(engine, _requests(yaml.safe_dump(config["workload"])))


@lru_cache(maxsize=8)
def _requests(workload: str) -> list[Request]:
    return instantiate_workload({"workload": yaml.safe_load(workload)}).generate().requests


def normalized_latency(config: Mapping[str, Any], costs: Costs | None = None) -> float:
    """Mean over the finished requests of a point of seconds per output token."""
    requests = run(config, costs).requests
    latencies = (requests["finish_s"] - requests["arrival_s"]) / requests["output_len"]
    return float(np.nanmean(latencies))


def predict(of: Sequence[Target], costs: Costs | None, pool: Executor) -> list[float]:
    """The simulated normalized latency of every target, in s/token.

    Two targets with one condition (the paper has a rate that was run twice) are simulated once.
    """
    jobs = {(target.curve, target.rate): target.config for target in of}
    latencies = pool.map(normalized_latency, jobs.values(), [costs] * len(jobs))
    results = dict(zip(jobs, latencies, strict=True))
    return [results[target.curve, target.rate] for target in of]


def rms_log(of: Sequence[Target], predicted: Sequence[float]) -> float:
    """Root mean square of ln(simulated / published)."""
    return math.sqrt(np.mean([math.log(y / target.latency_s) ** 2 for target, y in zip(of, predicted, strict=True)]))


def fit(
    of: Sequence[Target],
    start: Costs,
    free: Sequence[str],
    pool: Executor,
    evaluations: int,
    on_evaluation: Callable[[Costs, float], None] = lambda costs, rms: None,
) -> Costs:
    """Vary some coefficients until the rms no longer falls.

    Args:
        of: what to meet.
        start: all coefficients.
        free: the names of those to vary; each must be above 0 at the start.
        pool: where points are simulated.
        evaluations: at most so often.
        on_evaluation: called with each set of coefficients tried and its rms.

    Returns:
        The best coefficients seen.

    Raises:
        KvbenchError: a coefficient to vary that has no positive value at the start.
    """
    for name in free:
        if not isinstance(start.get(name), int | float) or not start[name] > 0:
            raise KvbenchError(f"{name} cannot be varied from {start.get(name)}; give a start above 0: --start {name}=...")
    best: tuple[float, Costs] = (math.inf, start)

    def objective(logs: Any) -> float:
        nonlocal best
        costs = start | {name: float(f"{math.exp(x):.4g}") for name, x in zip(free, logs, strict=True)}
        rms = rms_log(of, predict(of, costs, pool))
        best = min(best, (rms, costs), key=lambda each: each[0])
        on_evaluation(costs, rms)
        return rms

    origin = np.log([start[name] for name in free])
    simplex = np.vstack([origin, *(origin + step for step in 0.1 * np.eye(len(free)))])
    options = {"initial_simplex": simplex, "maxfev": evaluations, "xatol": 0.003, "fatol": 1e-4, "adaptive": True}
    minimize(objective, origin, method="Nelder-Mead", options=options)
    return best[1]


def table(of: Sequence[Target], predicted: Sequence[float]) -> str:
    """One line per curve, simulated/published at every rate, as text."""
    lines = []
    for curve in dict.fromkeys(target.curve for target in of):
        pairs = [(t, y) for t, y in zip(of, predicted, strict=True) if t.curve == curve]
        cells = "  ".join(f"{t.rate:g}: {y:.4f}/{t.latency_s:.4f}" for t, y in pairs)
        lines.append(f"{curve:22} rms {rms_log(*zip(*pairs, strict=True)):.3f}   {cells}")
    return "\n".join([*lines, f"{'all':22} rms {rms_log(of, predicted):.4f}   {len(of)} points"])


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    options = _parser().parse_args(arguments)
    try:
        _fit(options)
    except KvbenchError as error:
        sys.exit(f"error: {error}")


def _fit(options: argparse.Namespace) -> None:
    panels = dict(_panel(text) for text in options.curves)
    of = targets(panels, [f"costs={options.costs}", *options.set])
    models = {target.config["model"]["name"] for target in of}
    if len(models) != 1:
        raise KvbenchError(f"the curves are of {', '.join(sorted(models))}; coefficients belong to one model")
    start = {key: value for key, value in of[0].config["costs"].items() if key not in NOT_COEFFICIENTS}
    start |= {name: float(value) for name, _, value in (text.partition("=") for text in options.start)}
    with ProcessPoolExecutor(options.workers) as pool:
        costs = start
        if options.free:
            with tqdm(total=options.evaluations, unit="evaluation", dynamic_ncols=True) as bar:
                least = math.inf

                def show(tried: Costs, rms: float) -> None:
                    nonlocal least
                    least = min(least, rms)
                    bar.update()
                    bar.set_postfix_str(f"rms {rms:.4f}, best {least:.4f}")

                costs = fit(of, start, options.free, pool, options.evaluations, show)
        predicted = predict(of, costs, pool)
    print(table(of, predicted))
    for name in options.free or [name for name in costs if name != "context_factors"]:
        print(f"{name:12} {costs[name]}" + (f"   (start {start[name]})" if options.free else ""))
    if options.output:
        entry = {"hardware": of[0].config["hardware"]["name"], **costs, "source": f"python -m kvbench.fit {_words(options)}"}
        content = {"name": options.output.stem, "models": {models.pop(): entry}}
        options.output.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")


def _words(options: argparse.Namespace) -> str:
    words = ["--costs", options.costs, "--curves", *options.curves]
    for name in ("free", "start", "set"):
        words += [f"--{name}", *getattr(options, name)] if getattr(options, name) else []
    return " ".join(words)


def _panel(text: str) -> tuple[str, list[str]]:
    letter, _, systems = text.partition(":")
    if letter not in latency_panels():
        raise KvbenchError(f"Fig. 12 has no panel {letter}; it has {', '.join(latency_panels())}")
    return letter, systems.split(",") if systems else [each for each in latency_panels()[letter].curves if each != "fastertransformer"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m kvbench.fit", description=__doc__.partition("\n")[0])
    parser.add_argument("--curves", nargs="+", required=True, metavar="PANEL[:SYSTEM,...]", help="curves of Fig. 12 to meet, as a:orca_max,vllm; a panel alone: all but fastertransformer")
    parser.add_argument("--costs", default="paper_engine", help="file of conf/costs/ to start from (default: %(default)s)")
    parser.add_argument("--free", nargs="*", default=[], metavar="NAME", help="coefficients to vary; none: only compare")
    parser.add_argument("--start", nargs="*", default=[], metavar="NAME=VALUE", help="other start values")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="overrides of the configuration, as seed=1")
    parser.add_argument("--evaluations", type=int, default=150, help="at most so many simulations of all points (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="processes (default: %(default)s)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the coefficients there, as a file for conf/costs/")
    return parser


if __name__ == "__main__":
    main()
