"""The tables of ``docs/fidelity.md``: everything in it that is a number comes from here."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor
from typing import Any

import numpy as np
from tqdm import tqdm

from kvbench.composition import Setting, composer
from kvbench.fit.curves import (
    ONE_ENGINE,
    Config,
    Group,
    Target,
    cells,
    digits,
    grouped,
    panel_of,
    rms_log,
    run,
    settings,
    targets,
)
from kvbench.metrics import summarize
from kvbench.paper.curves import crossing
from kvbench.paper.points import latency_panels, published

Window = tuple[float, float | None]
"""Seconds of the averages over iterations, from and to; None is the end of the run."""

Row = Sequence[object]

SHAREGPT, ALPACA = "abc", "def"
SEEDS = range(16)
SEEDED = (
    ("a", "vllm", (1.5, 1.8, 1.9, 2.0)),
    ("a", "orca_oracle", (0.9, 1.0, 1.1)),
    ("a", "orca_max", (0.5,)),
    ("c", "vllm", (2.0, 2.25)),
)
"""Points near a knee and below it."""
FIG13_WINDOWS: dict[str, dict[float, Window]] = {
    "from 600 s to the end of the run": {900: (600, None), 3600: (600, None)},
    "from 600 s to the last arrival": {900: (600, 900), 3600: (600, 3600)},
    "whole run": {900: (0, None), 3600: (0, None)},
}


def report(pool: Executor) -> str:
    """Simulate everything and write it down, as Markdown.

    Raises:
        KvbenchError: the exact pairs are not in ``data_dir``.
    """
    parts = [_every_point, _alpaca_stand_ins, _held_out, _without_data, _seeds, _memory, _batched]
    return "\n\n".join([_HEAD, *(part(pool) for part in parts)]) + "\n"


_HEAD = """# Fidelity: the tables

Written by `python -m kvbench.fit --report docs/fidelity_tables.md`; do not edit. Every number but the paper's is
simulated. `fidelity.md` says what was fitted on what, and what follows. Latencies are normalized latencies in s/token;
*rms* is the root mean square of ln(simulated / published)."""


def measure(config: Config, windows: Sequence[Window] = ((0.0, None),)) -> list[dict[str, float | int]]:
    """Simulate a point; its metrics with each averaging window."""
    record = run(config)
    steps = record.steps
    classes = ("token_states", "reserved", "overreserved", "padding", "cached", "pinned", "free")
    num_slots = int(sum(steps[name][0] for name in classes))
    return [summarize(record, num_slots, *window) for window in windows]


def _latencies(configs: Iterable[Config], pool: Executor, title: str) -> list[float]:
    """Normalized latencies, in order."""
    return [
        float(each[0]["normalized_latency_mean_s"]) for each in _measured([(each,) for each in configs], pool, title)
    ]


def _measured(jobs: list[tuple[Any, ...]], pool: Executor, title: str) -> list[list[dict[str, float | int]]]:
    futures = [pool.submit(measure, *job) for job in jobs]
    return [future.result() for future in tqdm(futures, desc=title, dynamic_ncols=True)]


def _every_point(pool: Executor) -> str:
    """What the shipped coefficients give, with the pairs of files."""
    lines = [
        "## Every plotted point of Fig. 12",
        "Rate: simulated/published. Lengths: ShareGPT the authors' pairs, Alpaca a sample of 9,229 pairs (not theirs).",
    ]
    for letter in latency_panels():
        curves = _curves(letter, "file", pool)
        rows = [(each[0][0].system, f"{rms_log(*each):.3f}", " · ".join(cells(each))) for each in curves.values()]
        together = _one_engine(curves)
        rows.append(("Orca x3 and vLLM", f"**{rms_log(*together):.3f}**", f"{len(together[0])} points"))
        lines += [f"### ({letter}) {panel_of(letter).title}", _table(("curve", "rms", "points"), rows)]
    return "\n\n".join(lines)


def _curves(letter: str, pairs: str, pool: Executor, systems: Iterable[str] = (), costs: str = "") -> dict[str, Group]:
    """A panel's curves with their simulated latencies."""
    overrides = [f"workload.lengths.pairs={pairs}"] + ([f"costs={costs}"] if costs else [])
    of = targets({letter: systems or panel_of(letter).curves}, overrides)
    title = f"panel {letter}, pairs={pairs}{f', costs={costs}' if costs else ''}"
    return grouped(of, _latencies([target.config for target in of], pool, title), lambda target: target.curve)


def _one_engine(curves: dict[str, Group]) -> Group:
    """The points of the systems that share an engine, together."""
    points: list[Target] = []
    latencies: list[float] = []
    for each in curves.values():
        if each[0][0].system in ONE_ENGINE:
            points += each[0]
            latencies += each[1]
    return points, latencies


def _alpaca_stand_ins(pool: Executor) -> str:
    rows: list[Row] = []
    for letter in ALPACA:
        sample, drawn = (_curves(letter, pairs, pool) for pairs in ("file", "histogram"))
        rows += [(curve, f"{rms_log(*sample[curve]):.3f}", f"{rms_log(*drawn[curve]):.3f}") for curve in sample]
        both = (f"**{rms_log(*_one_engine(each)):.3f}**" for each in (sample, drawn))
        rows.append((f"({letter}) Orca x3 and vLLM", *both))
    title = "## What stands in for Alpaca's pairs: rms with the sample of 9,229 and with the paper's two histograms"
    return "\n\n".join([title, _table(("curve", "sample", "histograms"), rows)])


def _held_out(pool: Executor) -> str:
    rows = []
    for each in _curves("a", "file", pool, ONE_ENGINE, "paper_engine_orca_only").values():
        system = each[0][0].system
        use = "predicted" if system == "vllm" else "fitted"
        rows.append((system, use, f"{rms_log(*each):.3f}", " · ".join(cells(each))))
    title = "## Fig. 12(a) with coefficients fitted on its Orca curves alone"
    return "\n\n".join([title, _table(("curve", "", "rms", "points"), rows)])


def _without_data(pool: Executor) -> str:
    """Where curves cross 0.5 s/token, with the exact pairs and with what the package carries."""
    cases = [(letter, system, pairs) for letter in SHAREGPT for system in ONE_ENGINE for pairs in ("file", "histogram")]
    configs = []
    with composer() as compose:
        for letter, system, pairs in cases:
            panel = panel_of(letter)
            for rate in panel.curves[system].rates:
                chosen = [*settings(panel, system, rate), Setting("workload.lengths.pairs", pairs)]
                configs.append(compose.resolve(chosen).point)
    latencies = iter(_latencies(configs, pool, "rates at 0.5 s/token"))
    found: dict[tuple[str, str], list[float]] = {}
    for letter, system, _ in cases:
        curve = panel_of(letter).curves[system]
        crossed = crossing([(rate, next(latencies)) for rate in curve.rates]).rate
        found.setdefault((letter, system), []).append(math.nan if crossed is None else crossed)
    rows = []
    for (letter, system), (exact, drawn) in found.items():
        paper = crossing((point.x, point.y) for point in panel_of(letter).curves[system].points).rate or math.nan
        rows.append(
            (
                f"({letter}) {system}",
                f"{paper:.3f}",
                *(f"{rate:.3f} ({rate / paper - 1:+.1%})" for rate in (exact, drawn)),
            )
        )
    title = "## Rates at 0.5 s/token, without any data file"
    return "\n\n".join([title, _table(("curve", "paper", "authors' pairs", "histogram"), rows)])


def _seeds(pool: Executor) -> str:
    cases = [(letter, system, rate) for letter, system, rates in SEEDED for rate in rates]
    configs = []
    with composer() as compose:
        for letter, system, rate in cases:
            chosen = [*settings(panel_of(letter), system, rate), Setting("workload.lengths.pairs", "file")]
            configs += [compose.resolve([*chosen, Setting("seed", seed)]).point for seed in SEEDS]
    latencies = np.reshape(_latencies(configs, pool, "seeds"), (len(cases), len(SEEDS)))
    rows = []
    for (letter, system, rate), of in zip(cases, latencies, strict=True):
        paper = " and ".join(
            digits(point.y) for point in panel_of(letter).curves[system].measurements if point.x == rate
        )
        seen = [digits(value) for value in (of[0], of.mean(), of.min(), of.max())]
        rows.append((f"({letter}) {system} {rate:g}", paper, *seen, f"{of.std(ddof=1) / of.mean():.2f}"))
    title = f"## How far a seed moves a point: {len(SEEDS)} seeds of arrivals and of the order of the pairs"
    header = ("point", "paper", "seed 0", "mean", "least", "most", "coefficient of variation")
    return "\n\n".join([title, _table(header, rows)])


def _memory(pool: Executor) -> str:
    """Fig. 2."""
    paper = published()["fig2"]
    configs = _opt13b(paper["pct"], paper["request_rate"], paper["duration_s"], "sharegpt")
    window = (paper["measure_from_s"], paper["measure_to_s"])
    rows = []
    for (system, printed), [metrics] in zip(
        paper["pct"].items(), _measured([(config, (window,)) for config in configs], pool, "Fig. 2"), strict=True
    ):
        share = {
            name: float(metrics[f"{name}_iteration_pct"])
            for name in ("token_states", "reserved", "overreserved", "padding", "free")
        }
        buckets = {
            "token_states": share["token_states"],
            "reservation": share["reserved"],
            "internal": share["overreserved"],
            "external": share["padding"] + share["free"],
            "allocated": 100 - share["free"],
            "unfilled": share["reserved"] + share["padding"],
        }
        rows.append((system, " · ".join(f"{name} {buckets[name]:.1f}/{value:.1f}" for name, value in printed.items())))
    title = "## Fig. 2: percent of the pool, simulated/published"
    return "\n\n".join([title, _table(("system", "segments"), rows)])


def _batched(pool: Executor) -> str:
    """Fig. 13(a)."""
    paper = published()["fig13"]["panels"]["a"]
    systems = paper["num_requests"]
    durations = (900, 3600)
    jobs: list[tuple[Any, ...]] = []
    for duration_s in durations:
        windows = tuple(each[duration_s] for each in FIG13_WINDOWS.values())
        jobs += [(config, windows) for config in _opt13b(systems, paper["request_rate"], duration_s, "sharegpt")]
    found = iter(_measured(jobs, pool, "Fig. 13"))
    rows = []
    for duration_s in durations:
        for each in zip(*(next(found) for _ in systems), FIG13_WINDOWS, strict=True):
            *metrics, reading = each
            rows.append((f"{duration_s} s", reading, *(f"{of['num_running_iteration_mean']:.2f}" for of in metrics)))
    rows.append(("paper", "", *(f"{value:.2f}" for value in systems.values())))
    title = "## Fig. 13(a): requests in the batch, mean over iterations, 2 requests/s"
    return "\n\n".join([title, _table(("trace", "iterations", *systems), rows)])


def _opt13b(systems: Iterable[str], request_rate: float, duration_s: float, workload: str) -> list[Config]:
    chosen = {
        "model": "opt_13b",
        "workload": workload,
        "workload.request_rate": request_rate,
        "workload.duration_s": duration_s,
    }
    chosen["workload.lengths.pairs"] = "file"
    with composer() as compose:
        return [
            compose.resolve([Setting("system", system), *(Setting(*each) for each in chosen.items())]).point
            for system in systems
        ]


def _table(header: Row, rows: Iterable[Row]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)
