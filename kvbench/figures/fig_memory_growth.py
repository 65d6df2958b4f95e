"""Fig. 1 (right): throughput and memory against the number of requests in the batch."""

from __future__ import annotations

import math

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from kvbench.figures import style
from kvbench.figures.frames import Pairs, difference, footnote, way
from kvbench.figures.terminal import aligned
from kvbench.paper.claims import Claim, stated
from kvbench.paper.curves import interpolate, log_ratios, root_mean_square, slope
from kvbench.paper.points import published
from kvbench.results import Results

PAPER_NAMES = {"orca_max": "existing", "vllm": "vllm"}
"""System -> the paper's name of the curve: Orca (Max) stands for existing systems, which reserve the maximum length."""
BATCH = "num_running_iteration_mean"
THROUGHPUT = "throughput_tok_per_s"
GB = 1e9


def draw(results: Results) -> dict[str, Figure]:
    """Tokens per second above, gigabytes of weights and KV cache below."""
    summary = results.summary
    curves = _systems(summary)
    if not curves:
        return {}
    with style.context():
        note = footnote(
            summary, f"Filled: {way(summary)}; hollow: the paper's plotted points (context length not stated)"
        )
        figure = style.new_figure(style.COLUMN_IN, 3.3, note)
        upper, lower = figure.subplots(2, 1, sharex=True)
        looks = style.looks(curves)
        for system, look in looks.items():
            for axes, points in ((upper, _throughput(curves[system])), (lower, _memory(curves[system]))):
                style.plot(axes, points, look)
        paper = published()["fig1_right"]
        style.plot_hollow(upper, paper["throughput_tok_per_s"], style.INK, "o")
        for system, name in PAPER_NAMES.items():
            look = style.SYSTEMS[system]
            style.plot_hollow(lower, paper["memory_gb"][name], look.color, look.marker)
        upper.set_ylabel("Throughput\n(tokens/s)")
        upper.set_ylim(bottom=0)
        lower.set_ylabel("Weights and\nKV cache (GB)")
        lower.yaxis.set_major_locator(MaxNLocator(5, integer=True))
        lower.set_xlabel("Requests in the batch")
        lower.set_xlim(left=0)
        handles = style.legend(looks)
        style.put_legend(figure, [*handles, style.hollow("o")], len(handles) + 1)
    return {"fig_memory_growth": figure}


def table(results: Results) -> str | None:
    """The batch with which the memory is full, and what a request takes."""
    measured = _measured(results.summary)
    rows = [
        (statement.claim, "-" if value is None else f"{value:.3g}", f"{statement.high:.3g}", statement.unit)
        for statement, value in ((stated(name, value=papers), value) for name, (papers, value) in measured.items())
    ]
    header = ("", way(results.summary), "paper", "")
    return aligned([header, *rows]) if any(value is not None for _, value in measured.values()) else None


def claims(results: Results) -> list[Claim]:
    """Batches that fill the memory, memory per request, and the course of the throughput."""
    summary = results.summary
    curves = _systems(summary)
    obstacle = _obstacle(summary) if curves else None
    return [
        stated(name, value=papers).judge(value, obstacle=obstacle)
        for name, (papers, value) in _measured(summary).items()
    ]


def _measured(summary: pd.DataFrame) -> dict[str, tuple[float | None, float | None]]:
    """Claim -> (the paper's value if it is not stated, the measured one)."""
    curves = _systems(summary)
    paper = published()["fig1_right"]
    found: dict[str, tuple[float | None, float | None]] = {}
    for system, name in PAPER_NAMES.items():
        rows = curves.get(system)
        largest = None if rows is None else float(rows[BATCH].max())
        found[f"fig1_{name}_batch"] = (None, largest)
        per_request = None if rows is None else slope(_memory(rows))
        found[f"fig1_{name}_memory"] = (slope([(x, y) for x, y in paper["memory_gb"][name]]), per_request)
    rms = None
    if "vllm" in curves:
        points = _throughput(curves["vllm"])
        expected = [(x, y) for x, y in paper["throughput_tok_per_s"] if y > 0]
        reached = {x: y for x, _ in expected if not math.isnan(y := interpolate(points, x))}
        rms = root_mean_square(log_ratios(reached, expected))
    found["fig1_throughput"] = (None, rms)
    return found


def _systems(summary: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Preset -> its rows, whatever limit they were given, in order of the batch."""
    presets = [str(system).partition("[")[0] for system in summary["system"]]
    return {
        str(preset): rows.dropna(subset=[BATCH, THROUGHPUT]).sort_values(BATCH)
        for preset, rows in summary.groupby(presets)
        if rows[BATCH].notna().any()
    }


def _throughput(rows: pd.DataFrame) -> Pairs:
    return list(zip(rows[BATCH].tolist(), rows[THROUGHPUT].tolist(), strict=True))


def _memory(rows: pd.DataFrame) -> Pairs:
    used_bytes = rows["kv_cache_bytes"] * (1 - rows["free_iteration_pct"] / 100)
    return list(zip(rows[BATCH].tolist(), ((rows["weights_bytes"] + used_bytes) / GB).tolist(), strict=True))


def _obstacle(summary: pd.DataFrame) -> str | None:
    return difference(summary, model="opt_13b", hardware="a100_40gb", workload="sharegpt", costs="paper_engine")
