"""How all figures look: sizes, fonts, colours, markers, the footnote, and files that are the same bytes on every run.

Colours are Okabe and Ito's (distinguishable with any colour vision); marker and line style differ too, so that a print
in grey can be read. Figures are made without pyplot: they keep no global state.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.textpath import text_to_path

from kvbench.core import KvbenchError

COLUMN_IN = 3.33
"""Width of one column of a two-column page, in inches."""
PAGE_IN = 7.0
"""Width of both columns."""

INK = "#000000"
GREY = "#777777"
_FONT_PT = 7.0
_NOTE_PT = 5.5

_RC: dict[str, Any] = {
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same on every machine
    "font.size": _FONT_PT,
    "axes.titlesize": _FONT_PT,
    "axes.labelsize": _FONT_PT,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.5,
    "xtick.labelsize": _FONT_PT - 0.5,
    "ytick.labelsize": _FONT_PT - 0.5,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "lines.linewidth": 1.0,
    "lines.markersize": 3.0,
    "hatch.linewidth": 0.4,
    "legend.fontsize": _FONT_PT,
    "legend.frameon": False,
    "legend.handlelength": 2.2,
    "legend.handletextpad": 0.5,
    "legend.columnspacing": 1.2,
    "savefig.dpi": 200,
    "pdf.fonttype": 42,
    "svg.fonttype": "path",
    "svg.hashsalt": "kvbench",
}
_METADATA: dict[str, dict[str, Any]] = {
    "pdf": {"CreationDate": None, "Creator": "kvbench", "Producer": None},
    "svg": {"Date": None, "Creator": "kvbench"},
    "png": {"Software": "kvbench"},
}


LineStyle = Literal["-", "none"] | tuple[float, Sequence[float]]


class Look(NamedTuple):
    """How a system is drawn, and what it is called."""

    label: str
    color: str
    marker: str
    linestyle: LineStyle


SYSTEMS: dict[str, Look] = {
    "fastertransformer": Look("FasterTransformer", "#000000", "v", (0, (1, 1))),
    "orca_max": Look("Orca (Max)", "#D55E00", "s", (0, (4, 1.2))),
    "orca_pow2": Look("Orca (Pow2)", "#E69F00", "^", (0, (4, 1, 1, 1))),
    "orca_oracle": Look("Orca (Oracle)", "#009E73", "D", (0, (6, 1, 1, 1, 1, 1))),
    "vllm": Look("vLLM", "#0072B2", "o", "-"),
}
"""The systems of the literature, in the order in which they are drawn and listed."""

_OTHERS: list[tuple[str, str, LineStyle]] = [
    ("#CC79A7", "P", (0, (2, 1))),
    ("#56B4E9", "X", (0, (5, 2, 1, 2))),
    ("#8c6d00", "p", (0, (3, 2))),
    (GREY, "h", (0, (1, 2))),
    ("#332288", "*", (0, (7, 2))),
]
_MODULE = re.compile(r"(?<==)(?:[A-Za-z_]\w*\.)+(?=[A-Za-z_])")
"""The module of a class that a system's name gives."""
_OF_RUNS: tuple[LineStyle, ...] = ("-", (0, (4, 1.5)), (0, (1, 1.2)), (0, (5, 1.5, 1, 1.5)))


def looks(systems: Iterable[str]) -> dict[str, Look]:
    """A look for each system: the known ones first, then the others (``vllm[reservation=max]``) by alphabet.

    Classes are called without their modules where that tells the systems apart.
    """
    present = set(systems)
    found = {system: look for system, look in SYSTEMS.items() if system in present}
    others = sorted(present - set(SYSTEMS))
    short = [_MODULE.sub("", system) for system in others]
    for index, (system, name) in enumerate(zip(others, short, strict=True)):
        preset, bracket, axes = (name if short.count(name) == 1 else system).partition("[")
        label = (SYSTEMS[preset].label if preset in SYSTEMS else preset) + (f" [{axes}" if bracket else "")
        found[system] = Look(label, *_OTHERS[index % len(_OTHERS)])
    return found


def looks_of_runs(runs: Sequence[str], systems: Sequence[str]) -> list[Look]:
    """A look for each series of several runs, with its system's label.

    Colour and marker tell the system and the line tells the run, where that tells all series apart. Else every series
    has a look of its own.

    Args:
        runs: the run that a series is from.
        systems: and the system.

    Raises:
        KvbenchError: there are more series than looks.
    """
    known = looks(systems)
    if len(known) == len(systems):
        return [known[system] for system in systems]
    order = list(dict.fromkeys(runs))
    pairs = list(zip(runs, systems, strict=True))
    if len(known) > 1 and len(order) <= len(_OF_RUNS) and len(set(pairs)) == len(pairs):
        return [known[system]._replace(linestyle=_OF_RUNS[order.index(run)]) for run, system in pairs]
    palette = [*reversed(SYSTEMS.values()), *(Look("", *other) for other in _OTHERS)]
    if len(systems) > len(palette):
        raise KvbenchError(f"{len(systems)} curves are too many to tell apart; select {len(palette)} at most")
    return [look._replace(label=known[system].label) for look, system in zip(palette, systems, strict=False)]


@contextmanager
def context() -> Iterator[None]:
    """Everything inside is drawn in this style."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        cast(dict[str, Any], matplotlib.rcParams).update(_RC)
        yield


def new_figure(width_in: float, height_in: float, footnote: str = "") -> Figure:
    """An empty figure whose parts make room for each other; ``footnote`` stands below in small print, wrapped."""
    lines = _wrapped(footnote, width_in * 72 * 0.965)
    note_in = len(lines) * _NOTE_PT * 1.35 / 72 + (0.03 if lines else 0.0)
    figure = Figure(figsize=(width_in, height_in + note_in))
    share = note_in / (height_in + note_in)
    figure.set_layout_engine(ConstrainedLayoutEngine(rect=(0, share, 1, 1 - share), w_pad=0.04, h_pad=0.04))
    if lines:
        text = "\n".join(lines)
        figure.text(0.008, 0.0, text, fontsize=_NOTE_PT, color=GREY, va="bottom", linespacing=1.2, in_layout=False)
    return figure


def _wrapped(text: str, width_pt: float) -> list[str]:
    """Lines of small print that are at most so wide."""
    return _lines([f"{word} " for word in text.split()], width_pt, _NOTE_PT)


def wrapped(label: str, width_in: float) -> str:
    """A name on lines that are at most so wide: broken after commas and spaces, within a word only where it must be."""
    width_pt = 72 * width_in
    pieces: list[str] = []
    for word in re.findall(r"[^ ,]+[ ,]*|[ ,]+", label):
        rest = word
        while _width_pt(rest.rstrip()) > width_pt and len(rest) > 1:
            fits = next(end for end in range(len(rest) - 1, 0, -1) if end == 1 or _width_pt(rest[:end]) <= width_pt)
            pieces.append(rest[:fits])
            rest = rest[fits:]
        pieces.append(rest)
    return "\n".join(_lines(pieces, width_pt, _FONT_PT))


def _lines(pieces: Iterable[str], width_pt: float, size_pt: float) -> list[str]:
    """As many pieces behind each other as a line has room for."""
    lines: list[str] = []
    for piece in pieces:
        if lines and _width_pt((lines[-1] + piece).rstrip(), size_pt) <= width_pt:
            lines[-1] += piece
        else:
            lines.append(piece)
    return [line.rstrip() for line in lines]


def _width_pt(text: str, size_pt: float = _FONT_PT) -> float:
    width: float = text_to_path.get_text_width_height_descent(text, FontProperties(size=size_pt), ismath=False)[0]
    return width


def put_legend(figure: Figure, handles: Sequence[Artist], columns: int) -> None:
    """A legend above all panels that is never wider than the figure.

    Where the entries do not fit side by side there are fewer columns, and names that are wider than the figure are
    wrapped; the figure grows by the lines that this takes.

    Args:
        figure: by ``new_figure``.
        handles: the entries.
        columns: as many as fit, and at most these.
    """
    room_in = figure.get_figwidth() - 0.15
    beside_in = (_RC["legend.handlelength"] + _RC["legend.handletextpad"]) * _FONT_PT / 72
    between_in = _RC["legend.columnspacing"] * _FONT_PT / 72
    labels = [str(handle.get_label()) for handle in handles]
    widths_in = [beside_in + _width_pt(label) / 72 for label in labels]
    asked = min(columns, len(handles))
    columns = asked
    while columns > 1 and _legend_in(widths_in, columns, between_in) > room_in:
        columns -= 1
    for handle, label in zip(handles, labels, strict=True):
        handle.set_label(wrapped(label, room_in - beside_in))
    lines = [str(handle.get_label()).count("\n") + 1 for handle in handles]
    extra = math.ceil(len(handles) / columns) - math.ceil(len(handles) / asked) + sum(lines) - len(lines)
    _grow(figure, 0.15 * extra)
    figure.legend(handles=list(handles), loc="outside upper center", ncols=columns)


def _legend_in(widths_in: Sequence[float], columns: int, between_in: float) -> float:
    """The width of a legend, whose columns are filled one after the other, the first ones longer by an entry."""
    length, longer = divmod(len(widths_in), columns)
    ends = [0, *accumulate(length + (column < longer) for column in range(columns))]
    return sum(max(widths_in[at:end]) for at, end in pairwise(ends)) + (columns - 1) * between_in


def _grow(figure: Figure, more_in: float) -> None:
    """Make room for the panels; the footnote stays as it is."""
    width_in, height_in = figure.get_size_inches()
    engine = figure.get_layout_engine()
    if more_in <= 0 or not isinstance(engine, ConstrainedLayoutEngine):
        return
    share = engine.get()["rect"][1] * height_in / (height_in + more_in)
    figure.set_size_inches(width_in, height_in + more_in)
    engine.set(rect=(0, share, 1, 1 - share))


def plot(axes: Axes, points: Sequence[tuple[float, float]], look: Look) -> None:
    """A system's curve."""
    xs, ys = [x for x, _ in points], [y for _, y in points]
    axes.plot(xs, ys, color=look.color, marker=look.marker, linestyle=look.linestyle, zorder=3)


def band(axes: Axes, points: Iterable[tuple[float, float, float]], look: Look) -> None:
    """Intervals around a system's curve: (x, low, high)."""
    if rows := list(points):
        xs, lows, highs = zip(*rows, strict=True)
        axes.fill_between(xs, lows, highs, color=look.color, alpha=0.3, linewidth=0, zorder=2)


def legend(looks: Mapping[str, Look]) -> list[Artist]:
    """Entries of curves, one for each system."""
    return [
        Line2D([], [], color=look.color, marker=look.marker, linestyle=look.linestyle, label=look.label)
        for look in looks.values()
    ]


def hollow(marker: str, label: str = "paper") -> Artist:
    """A legend's entry for published values."""
    return Line2D([], [], color=INK, marker=marker, linestyle="none", markerfacecolor="none", markersize=5, label=label)


def plot_hollow(axes: Axes, points: Iterable[tuple[float, float]], color: str, marker: str, size: float = 5) -> None:
    """Published points: hollow markers, over what was measured."""
    pairs = list(points)
    axes.plot(
        [x for x, _ in pairs],
        [y for _, y in pairs],
        color=color,
        marker=marker,
        markersize=size,
        markerfacecolor="none",
        markeredgewidth=0.7,
        linestyle="none",
        clip_on=False,
        zorder=4,
    )


def save(figure: Figure, folder: Path, stem: str) -> list[Path]:
    """Write ``<stem>.pdf``, ``.svg`` and ``.png`` into ``folder`` and return the paths; same figure, same bytes."""
    paths = []
    with context():
        for suffix, metadata in _METADATA.items():
            paths.append(folder / f"{stem}.{suffix}")
            figure.savefig(paths[-1], format=suffix, metadata=metadata)
            figure.set_layout_engine("none")  # what was laid out for the first file holds for all
    return paths
