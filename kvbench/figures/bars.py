"""Stacked and grouped bars with the paper's values as hollow markers."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from kvbench.figures import style
from kvbench.partition import Part

MARKER = "D"
"""Of published values on bars."""
WIDTH = 0.62
"""Of a bar; bars stand 1 apart."""


def stack(axes: Axes, x: float, parts: Sequence[Part], heights: Sequence[float], *, labelled_from: float) -> None:
    """One bar from bottom to top; segments of at least ``labelled_from`` carry their height."""
    bottom = 0.0
    for part, height in zip(parts, heights, strict=True):
        axes.bar(x, height, WIDTH, bottom, color=part.color, hatch=part.hatch, edgecolor="white", linewidth=0.5)
        if height >= labelled_from:
            box = {"facecolor": part.color, "edgecolor": "none", "pad": 0.8} if part.hatch else None
            axes.text(
                x,
                bottom + height / 2,
                f"{height:.1f}",
                ha="center",
                va="center",
                fontsize=6,
                color="white" if part.is_dark else style.INK,
                bbox=box,
            )
        bottom += height


def paper(axes: Axes, x: float, heights: Sequence[float]) -> None:
    """Published values of the bar at ``x``, beside it."""
    style.plot_hollow(axes, [(x + WIDTH / 2 + 0.08, height) for height in heights], style.INK, MARKER, size=4)


def legend(parts: Sequence[Part], paper_label: str = "paper") -> list[Artist]:
    """Entries: the parts, the published values."""
    handles: list[Artist] = [Patch(facecolor=p.color, hatch=p.hatch, edgecolor="white", label=p.label) for p in parts]
    return [*handles, style.hollow(MARKER, paper_label)]
