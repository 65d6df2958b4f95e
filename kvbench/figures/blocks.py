"""Curves over the block size, doubled from point to point."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator

from kvbench.figures import style
from kvbench.figures.frames import LATENCY, Pairs, curve, select
from kvbench.figures.style import Look
from kvbench.figures.terminal import number


def latencies(summary: pd.DataFrame, panel: str) -> dict[int, float]:
    """Block size -> normalized latency (s/token), of a panel of the experiment."""
    return {int(size): latency for size, latency in curve(select(summary, panel=panel), "block_size", LATENCY)}


def draw(axes: Axes, curves: Mapping[str, Mapping[int, float]], looks: Mapping[str, Look]) -> None:
    """Measured curves, and an axis of block sizes."""
    for name, points in curves.items():
        style.plot(axes, sorted(points.items()), looks[name])
    scale(axes, sorted({size for points in curves.values() for size in points}))


def scale(axes: Axes, sizes: Sequence[int]) -> None:
    """An axis of these block sizes."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("Block size (tokens)")


def papers(points: Pairs) -> dict[int, float]:
    """Block size -> published value."""
    return {int(size): value for size, value in points}


def rows(
    measured: Mapping[str, Mapping[int, float]], published: Mapping[str, Mapping[int, float]]
) -> list[tuple[str, ...]]:
    """A table's header and rows: the curves and the paper's, block size by block size.

    Args:
        measured: title of a column -> block size -> value.
        published: the same, of the paper.
    """
    columns = [*measured.values(), *published.values()]
    sizes = sorted({size for points in measured.values() for size in points})
    body = [(str(size), *(number(points.get(size)) for points in columns)) for size in sizes]
    return [("block size", *measured, *published), *body]
