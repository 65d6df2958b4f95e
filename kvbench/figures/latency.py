"""Panels of normalized latency against request rate: the paper's Fig. 12 and its kind."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.path import Path
from matplotlib.transforms import Affine2D

from kvbench.figures import style
from kvbench.figures.frames import Pairs
from kvbench.paper.curves import crossing
from kvbench.paper.points import Curve, Kind

TOP_S = 1.0
"""Top of the axis (s/token), as in the paper."""
_ARROW = Path([(-0.12, 0), (-0.12, 0.5), (-0.35, 0.5), (0, 1), (0.35, 0.5), (0.12, 0.5), (0.12, 0), (-0.12, 0)])
"""A marker that no system has; it stands on its point."""


def draw_panel(
    axes: Axes, title: str, measured: Mapping[str, Pairs], published: Mapping[str, Curve], top_s: float = TOP_S
) -> None:
    """Measured curves as filled markers and lines, the paper's measurements as hollow markers.

    A curve that goes on above the axis gets an arrow where it leaves.

    Args:
        axes: drawn into.
        title: of the panel.
        measured: system -> (rate, latency).
        published: system -> the paper's curve.
        top_s: of the axis (s/token).
    """
    exits: list[float] = []
    for system, look in style.looks(measured).items():
        points = measured[system]
        style.plot(axes, points, look)
        exits += _mark_exit(axes, points, look.color, top_s, filled=True)
        if system in published:
            inside = [(point.x, point.y) for point in published[system].points if point.kind is Kind.PLOTTED]
            style.plot_hollow(axes, inside, look.color, look.marker, size=6)
            leaving = [(point.x, point.y) for point in published[system].points]
            exits += _mark_exit(axes, leaving, look.color, top_s, filled=False)
    shown = [x for points in measured.values() for x, y in points if y <= 1.1 * top_s]
    shown += [p.x for s in measured if s in published for p in published[s].measurements if p.y <= 1.1 * top_s]
    axes.set_xlim(0, max(1.1 * max(shown, default=1.0), 1.03 * max(exits, default=0.0)))
    axes.set_ylim(0, top_s)
    axes.set_title(title)
    axes.set_xlabel("Request rate (requests/s)")


def draw_bands(
    axes: Axes,
    bands: Mapping[str, Sequence[tuple[float, float, float]]],
    unstable: Mapping[str, tuple[float, float]],
) -> None:
    """What repeats add to a panel.

    Args:
        axes: that ``draw_panel`` drew into.
        bands: system -> (rate, low, high) of its mean latency where it is stable.
        unstable: system -> (from, to), the rates at which its queue grows.
    """
    for system, look in style.looks(bands.keys() | unstable.keys()).items():
        if system in bands:
            style.band(axes, bands[system], look)
        if system in unstable:
            axes.axvspan(*unstable[system], color=look.color, alpha=0.1, linewidth=0, zorder=0.5)


def _mark_exit(axes: Axes, points: Pairs, color: str, top_s: float, *, filled: bool) -> list[float]:
    """An arrow where a curve leaves the axes; the rate there, if there is one."""
    leaves = crossing(points, top_s).rate
    if leaves is not None:
        axes.plot(
            [leaves],
            [top_s],
            color=color,
            marker=_ARROW,
            markersize=7,
            markerfacecolor=color if filled else "none",
            markeredgewidth=0.7,
            clip_on=False,
            zorder=5,
        )
    return [] if leaves is None else [leaves]


def legend(systems: Iterable[str], way: str, *, has_bands: bool = False) -> list[Artist]:
    """Entries: the systems, and what the kinds of markers mean; ``way`` is a word for the measured ones."""
    return [
        *style.legend(style.looks(systems)),
        Line2D([], [], color=style.GREY, marker="o", label=way),
        style.hollow("o"),
        leaves_the_axes(),
        *(
            [
                Patch(facecolor=style.GREY, alpha=0.4, linewidth=0, label="95 % of repeats' mean"),
                Patch(facecolor=style.GREY, alpha=0.15, linewidth=0, label="queue grows"),
            ]
            if has_bands
            else []
        ),
    ]


def leaves_the_axes() -> Line2D:
    """A legend's entry for the arrows."""
    arrow = _ARROW.transformed(Affine2D().translate(0, -0.5))
    return Line2D([], [], color=style.GREY, marker=arrow, linestyle="none", markersize=5, label="leaves the axes")
