"""What preemption cost, for the terminal: how often, tokens and bytes, and seconds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pandas as pd

from kvbench.figures.frames import curve, select, value
from kvbench.figures.terminal import aligned, number

LOST = "lost_s"
Labelled = tuple[tuple[str, ...], pd.DataFrame]
"""What tells the points of a line apart, and its points (the repeats of one)."""
_HEADER = ("preempted", "recomputed", "GB out", "lost s", "of run", "away s")
_MEANING = """Recomputed: tokens. Lost: computing them again, and waiting for swaps.
Away: from losing the memory to regaining it, mean of a preemption."""


def table(lines: Iterable[Labelled], header: tuple[str, ...], title: str = "") -> str | None:
    """A line for all points where somebody was preempted; None where nobody ever was.

    Args:
        lines: labels and points.
        header: of the labels.
        title: what the lines are, where it is not plain.
    """
    found = [(*labels, *_cells(rows)) for labels, rows in lines if value(rows, "num_preemptions")]
    if not found:
        return None
    first = f"Preemption{title and f', {title}'}"
    return "\n".join([first, _MEANING, aligned([(*header, *_HEADER), *found], left=len(header))])


def worst(rows: pd.DataFrame) -> pd.DataFrame:
    """Of a curve over request rates the points at the rate where most time was lost."""
    lost = pd.to_numeric(rows[LOST]).groupby(rows["request_rate"]).mean().dropna()
    return rows[rows["request_rate"] == lost.idxmax()] if len(lost) else rows[:0]


def lost_by_block(summary: pd.DataFrame, panel: str) -> dict[int, float]:
    """Block size -> seconds lost to preemption, of a panel of the experiment."""
    return {int(size): lost_s for size, lost_s in curve(select(summary, panel=panel), "block_size", LOST)}


def table_by_block(summary: pd.DataFrame, panels: Sequence[str]) -> str | None:
    """What preemption cost, by panel and block size; None where nobody was preempted."""
    lines = (
        ((panel, f"{size:.0f}"), rows)
        for panel in panels
        for size, rows in select(summary, panel=panel).groupby("block_size")
    )
    return table(lines, ("panel", "block size"))


def _cells(rows: pd.DataFrame) -> tuple[str, ...]:
    preemptions, tokens, swapped, lost_s, run_s, away_s = (
        value(rows, name) or 0.0
        for name in ("num_preemptions", "recomputed_tokens", "swapped_out_bytes", LOST, "simulated_s", "preempted_s")
    )
    return (
        f"{preemptions:,.0f}",
        f"{tokens:,.0f}",
        f"{swapped / 1e9:,.1f}",
        number(lost_s),
        f"{100 * lost_s / run_s:.1f} %" if run_s else "-",
        number(away_s / preemptions),
    )
