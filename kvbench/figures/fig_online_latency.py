"""Real tokens in real time: latency and batch against the request rate, and the rate that each system sustains."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from kvbench.figures import latency, style
from kvbench.figures.frames import LATENCY, curve, footnote, obstacle, select, systems, value, where
from kvbench.figures.limits import limited_by
from kvbench.figures.rates import curves, gain, judge
from kvbench.figures.terminal import aligned, number
from kvbench.paper.claims import Claim, expectation
from kvbench.paper.curves import Crossing, crossing
from kvbench.records import Columns
from kvbench.results import Results

BATCH = "num_running_mean"
UNLOADED = 5
"""The threshold, in multiples of the lowest mean latency of all points, where requests should hardly meet."""
TOP = 3
"""Top of the latency axis, in thresholds."""
QUEUE = 2
"""Requests that a queue must hold, on average, to count as growing."""
EXPECTED = {"orca_max": 1.5, "orca_pow2": 1.2, "orca_oracle": 1.0}
"""System -> how many times its rate at the threshold vLLM must sustain: kvbench's own bars, fixed before the first run,
below what simulated runs of the experiment gave with any of six seeds (1.6, 1.4 and 1.1)."""
CONDITIONS = {"model": "opt_125m", "workload": "sharegpt_scaled", "num_slots": 4 * 256}
"""For which they were fixed."""
CROSS: dict[str, Any] = {"color": style.INK, "marker": "x", "linestyle": "none", "markersize": 5.5, "zorder": 5}
"""Over a point whose queue grew."""
THRESHOLD: dict[str, Any] = {"color": style.GREY, "linestyle": (0, (3, 2)), "linewidth": 0.8}


def draw(results: Results) -> dict[str, Figure]:
    """Normalized latency and mean batch against the rate; points whose queue grew are marked."""
    summary = _measured(results)
    found = curves(summary)
    if not found:
        return {}
    looks = style.looks(found)
    threshold_s, growing = _threshold_s(summary), _growing(results, summary)
    with style.context():
        figure = style.new_figure(style.PAGE_IN, 2.5, _footnote(summary))
        left, right = figure.subplots(1, 2)
        latency.draw_panel(left, "", found, {}, TOP * threshold_s)
        left.axhline(threshold_s, **THRESHOLD)
        left.set_ylabel("Normalized latency (s/token)")
        batches = {system: curve(select(summary, system=system), "request_rate", BATCH) for system in looks}
        for system, look in looks.items():
            style.plot(right, batches[system], look)
            shown = [point for point in found[system] if point[1] <= TOP * threshold_s]
            for axes, points in ((left, shown), (right, batches[system])):
                marked = [point for point in points if (system, point[0]) in growing]
                axes.plot(*np.reshape(marked, (-1, 2)).T, **CROSS)
        right.set_xlim(left.get_xlim()[0], max(left.get_xlim()[1], 1.05 * max(summary["request_rate"])))
        right.set_ylim(bottom=0)
        right.set_xlabel("Request rate (requests/s)")
        right.set_ylabel("Mean batch (requests)")
        handles = [
            *style.legend(looks),
            Line2D([], [], **THRESHOLD, label=f"{threshold_s:.2g} s/token"),
            Line2D([], [], **CROSS, label="queue grew to the end"),
        ]
        if max(summary[LATENCY]) > TOP * threshold_s:
            handles.append(latency.leaves_the_axes())
        style.put_legend(figure, handles, 4)
    return {"fig_online_latency": figure}


def table(results: Results) -> str | None:
    """Every point with what limited it, then the rate at the threshold of every system and vLLM's over it."""
    summary = _measured(results)
    looks = style.looks(systems(summary))
    if not looks:
        return None
    growing = _growing(results, summary)
    names = ("num_requests", LATENCY, "ttft_p50_s", BATCH, "num_preemptions")
    header = ("requests/s", "limited by (share of the time)", "requests", "s/token", "TTFT s", "batch", "preempted")
    rows: list[tuple[str, ...]] = [("system", *header)]
    for system, look in looks.items():
        for rate, points in select(summary, system=system).groupby("request_rate"):
            mark = "*" if (system, rate) in growing else ""
            numbers = [number(value(points, name)) for name in names]
            rows.append((look.label, f"{rate:g}{mark}", limited_by(results, points), *numbers))
    crossings = _crossings(summary)
    sustained = [("system", "requests/s", "vLLM over it")]
    for system, look in looks.items():
        over = gain(crossings, system)
        ratio = f"{over.value:.2f}" if over and over.value and system != "vllm" else "-"
        sustained.append((look.label, str(crossings[system]), ratio))
    return "\n".join(
        [
            aligned(rows, left=3),
            "TTFT: median. Batch: over the time of arrivals; request-level batches count the finished.",
            *(["* the queue grew until arrivals ended: a longer run has a higher latency"] if growing else []),
            "",
            f"Request rate at {_threshold_words(summary)}",
            aligned(sustained),
        ]
    )


def claims(results: Results) -> list[Claim]:
    """What kvbench expects of vLLM's rate at the threshold; the paper has no such run."""
    summary = _measured(results)
    crossings = _crossings(summary)
    rows = []
    for system, least in EXPECTED.items():
        statement = expectation(
            f"vLLM over {style.SYSTEMS[system].label}: requests/s at {UNLOADED} times the unloaded latency", least
        )
        names = (system, "vllm")
        unlike = obstacle(summary[summary["system"].isin(names)], **CONDITIONS)
        rows.append(judge(statement, gain(crossings, system), crossings, names, obstacle=unlike))
    return rows


def grows(steps: Columns, requests: Columns) -> bool:
    """Whether the queue grew for as long as requests arrived.

    It did if, over time, each third of the arrivals saw a longer queue than the one before, and the last a queue of
    more than ``QUEUE`` requests. Such a run was in no steady state: its latency depends on how long requests arrive.
    """
    until_s = float(np.max(requests["arrival_s"]))
    ends_s, seconds, waiting = (np.asarray(steps[name], np.float64) for name in ("end_s", "seconds", "num_waiting"))
    thirds = np.linspace(0, until_s, 4)
    first, second, last = (
        float(np.sum(waiting * np.clip(np.minimum(ends_s, to_s) - np.maximum(ends_s - seconds, from_s), 0, None)))
        / (until_s / 3 or 1.0)
        for from_s, to_s in pairwise(thirds)
    )
    return first < second < last and last > QUEUE


def _growing(results: Results, summary: pd.DataFrame) -> set[tuple[str, float]]:
    """(system, rate) of the points whose queue grew, in one of its repeats at least."""
    return {
        (row["system"], row["request_rate"])
        for _, row in summary.iterrows()
        if (results.folder(row) / "steps.parquet").is_file() and grows(results.steps(row), results.requests(row))
    }


def _measured(results: Results) -> pd.DataFrame:
    """The summary's rows that have a number."""
    return results.summary.dropna(subset=[LATENCY, "request_rate"])


def _threshold_s(summary: pd.DataFrame) -> float:
    """Latency at which rates are read."""
    return UNLOADED * min(seconds for points in curves(summary).values() for _, seconds in points)


def _crossings(summary: pd.DataFrame) -> dict[str, Crossing]:
    found = curves(summary)
    return {system: crossing(points, _threshold_s(summary)) for system, points in found.items()}


def _threshold_words(summary: pd.DataFrame) -> str:
    """With the batch at the lowest latency: far above 1 the machine was loaded at every rate."""
    batch = value(summary.nsmallest(1, LATENCY), BATCH)
    times = f"{UNLOADED} times the lowest mean latency (where the mean batch is {number(batch, 2)})"
    return f"{_threshold_s(summary):.2g} s/token, {times}"


def _footnote(summary: pd.DataFrame) -> str:
    """Device, model, workload; how many requests a point stands for."""
    fewest, most = summary["num_requests"].min(), summary["num_requests"].max()
    seeds = ", ".join(f"{seed:g}" for seed in sorted(set(summary["seed"])))
    slots = ", ".join(f"{slots:,.0f}" for slots in sorted(set(summary["num_slots"])))
    return footnote(
        summary,
        f"{where(summary)}, KV pool of {slots} slots",
        f"Poisson arrivals of the same requests for every system; seed {seeds}",
        f"Short runs: {fewest:g} to {most:g} requests each, so that another seed moves a point visibly",
        f"Dashed: {_threshold_words(summary)}; latency of all requests, batch over the time of arrivals",
    )
