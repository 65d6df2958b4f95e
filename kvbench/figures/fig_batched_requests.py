"""Fig. 13: how many requests are in the batch on average."""

from __future__ import annotations

from itertools import cycle
from typing import Any

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from kvbench.figures import bars, style
from kvbench.figures.frames import PUBLIC, difference, footnote, other_lengths, select, systems, value, way
from kvbench.figures.terminal import aligned
from kvbench.paper.claims import Claim, stated
from kvbench.paper.points import published
from kvbench.results import Results

BATCH = "num_running_iteration_mean"
HOUR_S = 3600
HATCHES = ("", "////", "....", "xxxx")
"""Of trace lengths, shortest first."""


def draw(results: Results) -> dict[str, Figure]:
    """A panel for each data set, bars for systems and trace lengths."""
    summary = results.summary
    panels = [letter for letter in _panels() if len(select(summary, panel=letter))]
    if not panels:
        return {}
    durations = sorted(set(summary["duration_s"]))
    start = ", ".join(f"{start:g}" for start in sorted(set(summary["measure_from_s"])))
    what = f"means over the iterations from {start} s on"
    with style.context():
        note = footnote(summary, f"Bars: {way(summary)}, {what}; hollow: the paper's bars")
        figure = style.new_figure(style.PAGE_IN if len(panels) > 1 else style.COLUMN_IN, 2.0, note)
        for axes, letter in zip(figure.subplots(1, len(panels), squeeze=False).flat, panels, strict=True):
            _draw_panel(axes, select(summary, panel=letter), durations, letter)
        kinds: list[Artist] = [
            Patch(facecolor=style.GREY, hatch=hatch, edgecolor="white", label=f"{way(summary)}, {duration_s:g} s trace")
            for duration_s, hatch in zip(durations, cycle(HATCHES), strict=False)
        ]
        style.put_legend(figure, [*kinds, style.hollow(bars.MARKER)], len(kinds) + 1)
    return {"fig_batched_requests": figure}


def _draw_panel(axes: Axes, rows: pd.DataFrame, durations: list[float], letter: str) -> None:
    panel = _panels()[letter]
    looks = style.looks(systems(rows))
    width = 0.76 / len(durations)
    for x, (system, look) in enumerate(looks.items()):
        for index, (duration_s, hatch) in enumerate(zip(durations, cycle(HATCHES), strict=False)):
            height = value(select(rows, system=system, duration_s=duration_s), BATCH)
            if height is not None:
                at = x - 0.38 + (index + 0.5) * width
                axes.bar(at, height, 0.94 * width, color=look.color, hatch=hatch, edgecolor="white")
                axes.annotate(
                    f"{height:.1f}", (at, height), (0, 1), textcoords="offset points", ha="center", fontsize=5.5
                )
        if system in panel["num_requests"]:
            style.plot_hollow(axes, [(x - 0.43, panel["num_requests"][system])], style.INK, bars.MARKER, size=4)
    axes.set_xticks(range(len(looks)), [look.label.replace(" ", "\n", 1) for look in looks.values()])
    axes.margins(y=0.1)
    axes.set_title(f"({letter}) {panel['title']}")
    axes.set_ylabel("Batched requests")
    axes.grid(visible=False, axis="x")


def table(results: Results) -> str | None:
    """Every bar, beside the paper's."""
    summary = results.summary
    rows = []
    for letter, panel in _panels().items():
        mine = select(summary, panel=letter)
        for duration_s in sorted(set(mine["duration_s"])):
            for system, look in style.looks(systems(mine)).items():
                found = value(select(mine, system=system, duration_s=duration_s), BATCH)
                cells = (
                    "-" if number is None else f"{number:.2f}" for number in (found, panel["num_requests"].get(system))
                )
                rows.append((f"({letter}) {panel['title']}", f"{duration_s:g} s", look.label, *cells))
    return (
        aligned([("panel", "trace", "requests in the batch", way(summary), "paper"), *rows], left=3) if rows else None
    )


def claims(results: Results) -> list[Claim]:
    """Every bar and the two ratios of the text, for the script's trace length and for an hour."""
    summary = results.summary
    found = []
    for duration_s, trace in ((published()["fig13"]["duration_s"], ""), (HOUR_S, " (1 h trace)")):
        for letter, panel in _panels().items():
            found += _claims(select(summary, panel=letter), letter, panel, duration_s, trace)
    return found


def _claims(rows: pd.DataFrame, letter: str, panel: dict[str, Any], duration_s: float, trace: str) -> list[Claim]:
    batches: dict[str, float | None] = {}
    obstacles: dict[str, str | None] = {}
    found = []
    for system, papers in panel["num_requests"].items():
        mine = select(rows, system=system)
        exact = select(mine, duration_s=duration_s)
        if not len(exact) and not trace:
            exact = mine  # another length than the paper's: shown, and said to be not comparable
        batches[system] = value(exact, BATCH)
        obstacles[system] = _obstacle(exact, panel, duration_s) if len(exact) else None
        label = style.SYSTEMS[system].label
        statement = stated("fig13_bar", letter, value=papers, panel=letter, system=label, trace=trace)
        missing = f"no result of {label} in panel {letter} with a trace of {duration_s:g} s"
        found.append(statement.judge(batches[system], missing=missing, obstacle=obstacles[system]))
    if letter == "a":
        for name, system in (("fig13_over_oracle", "orca_oracle"), ("fig13_over_max", "orca_max")):
            ours, others = batches["vllm"], batches[system]
            ratio = ours / others if ours and others else None
            missing = f"needs vLLM and {style.SYSTEMS[system].label} in panel a with a trace of {duration_s:g} s"
            obstacle = obstacles["vllm"] or obstacles[system]
            found.append(stated(name, trace=trace).judge(ratio, missing=missing, obstacle=obstacle))
    return found


def _panels() -> dict[str, dict[str, Any]]:
    return dict(published()["fig13"]["panels"])


def _obstacle(rows: pd.DataFrame, panel: dict[str, Any], duration_s: float) -> str | None:
    lengths = other_lengths(rows, panel["workload"]) if panel["workload"] in PUBLIC else None
    return lengths or difference(
        rows,
        model="opt_13b",
        hardware="a100_40gb",
        workload=panel["workload"],
        request_rate=panel["request_rate"],
        duration_s=duration_s,
        measure_from_s=published()["fig13"]["measure_from_s"],
        measure_to_s=None,
        costs="paper_engine",
        block_size=16,
    )
