"""Memory maps side by side: address over time, coloured by what a slot is for or by whose it is.

Beside each map stands what it holds on average, as in the paper's Fig. 2; below, who runs and who waits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from numpy.typing import ArrayLike, NDArray

from kvbench.figures import style
from kvbench.figures.frames import footnote
from kvbench.figures.terminal import aligned
from kvbench.memory_map import MemoryMap, Purpose, load
from kvbench.memory_map.map import FILE
from kvbench.memory_map.recorder import PREFIX, Began, Ended
from kvbench.paper.claims import Claim
from kvbench.partition import CLASSES, Part
from kvbench.records import Columns
from kvbench.results import Results, is_nothing

By = Literal["purpose", "owner"]
SHARED = Part("tokens that several streams share", "#0072B2")
PURPOSES = {
    Purpose.TOKEN_STATES: Part("tokens", CLASSES["token_states"].color),
    Purpose.RESERVED: Part("reserved, will be filled", CLASSES["reserved"].color),
    Purpose.OVERRESERVED: Part("reserved, never filled (internal)", CLASSES["overreserved"].color),
    Purpose.PADDING: Part("rounding, never filled", CLASSES["padding"].color),
    Purpose.FREE: Part("free (external, if others wait)", CLASSES["free"].color),
}
"""Classes of the ledger, in a newcomer's words."""
ORDER: list[Purpose | None] = [None, *list(Purpose)[1:], Purpose.FREE]
"""From bottom to top; None: shared tokens."""
PREEMPTED = "#000000"
_COPY_MARK: dict[str, Any] = {
    "color": "#F0E442", "marker": ">", "markeredgecolor": style.INK, "markeredgewidth": 0.3, "linestyle": "none",
}  # fmt: skip
WAIT = "#d9a0a0"
_HUES = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#8c6d00", "#6a51a3", "#1b9e9e", "#b2182b"]
_TINTS: dict[Purpose | None, float] = {
    Purpose.TOKEN_STATES: 0.0,
    Purpose.RESERVED: 0.5,
    Purpose.OVERRESERVED: 0.78,
    Purpose.PADDING: 0.9,
}
"""How much white there is in an owner's colour."""
_DARKER = 0.6
"""Of an owner's colour, where several streams share."""
_PREFIX_COLOR = "#444444"
_COLUMNS, _ROWS = 900, 1100
"""Most pixels of a map: no more can be told apart in print."""
_THINNEST = 130
"""Spans below this part of the pool have no outline: it would hide them."""


@dataclass(frozen=True, slots=True)
class Mapped:
    """A run that left a map.

    Attributes:
        label: what it is called beside others.
        source: what a footnote says of its numbers.
    """

    label: str
    memory: MemoryMap
    requests: Columns
    steps: Columns
    model: str
    source: str

    @property
    def end_s(self) -> float:
        """When the last request was done."""
        return float(self.memory.end_s[-1]) if self.memory.num_steps else 0.0

    @property
    def loaded_s(self) -> float:
        """Until when requests were waiting to be computed for the first time."""
        return float(np.nanmax(self.requests["first_token_s"], initial=0.0))


def shares(run: Mapped) -> dict[Purpose | None, float]:
    """What the pool holds while the run is loaded, mean over time in percent; None: the tokens that streams share."""
    memory, steps = run.memory, run.steps
    weights = np.clip(run.loaded_s - memory.start_s, 0.0, memory.end_s - memory.start_s)
    percent = 100 / ((run.loaded_s or 1.0) * memory.num_slots)
    found: dict[Purpose | None, float] = {
        purpose: percent * float(weights @ steps[purpose.name.lower()].astype(np.float64))
        for purpose in list(Purpose)[1:]
    }
    chunks = np.array_split(np.arange(memory.num_steps), memory.num_steps // 256 + 1)
    shared = np.concatenate([is_shared(memory, chunk).sum(axis=0) for chunk in chunks])
    found[None] = percent * float(weights @ shared)
    found[Purpose.TOKEN_STATES] -= found[None]
    found[Purpose.FREE] = 100.0 - sum(found.values())
    return found


def is_shared(memory: MemoryMap, steps: ArrayLike) -> NDArray[np.bool_]:
    """Where a token is held by several streams: ``[num_slots, len(steps)]``."""
    one_stream = not memory.spans["stream"].any() and PREFIX not in memory.spans["request"]
    if one_stream:  # most runs: what follows takes time
        return np.zeros((memory.num_slots, len(np.asarray(steps))), np.bool_)
    found: NDArray[np.bool_] = np.logical_and(
        memory.num_holders(steps) > 1, memory.purposes(steps) == Purpose.TOKEN_STATES
    )
    return found


class Group(NamedTuple):
    """Runs of the same requests with pools of one size, to be shown side by side; ``name`` is its file's."""

    name: str
    runs: list[Mapped]


def groups(folders: Sequence[Results]) -> list[Group]:
    """The runs of these folders that left maps, put side by side where requests and pools are the same."""
    found: dict[tuple[object, ...], list[Mapped]] = {}
    for results in folders:
        summary = results.summary
        labels = {system: look.label for system, look in style.looks(summary["system"]).items()}
        for _, row in summary.iterrows():
            if not (results.folder(row) / FILE).is_file():
                continue
            memory, requests = load(results.folder(row)), results.requests(row)
            same = (requests["arrival_s"].tobytes(), requests["prompt_len"].tobytes(), memory.num_slots)
            panel = "" if is_nothing(row["panel"]) or row["panel"] is pd.NA else str(row["panel"])
            source = footnote(summary[summary["point"] == row["point"]])
            mapped = Mapped(labels[row["system"]], memory, requests, results.steps(row), str(row["model"]), source)
            found.setdefault((panel, row["num_samples"], row["beam_width"], *same), []).append(mapped)
    names = [f"memory_map_{panel}" if (panel := str(key[0])) else "memory_map" for key in found]
    return [
        Group(name if names.count(name) == 1 else f"{name}_{names[:index].count(name) + 1}", runs)
        for index, (name, runs) in enumerate(zip(names, found.values(), strict=True))
    ]


def draw(results: Results) -> dict[str, Figure]:
    """One still for each group of runs, coloured by purpose."""
    return {group.name: still(group.runs) for group in groups([results])}


def table(results: Results) -> str | None:
    """What the pools hold on average over time, in percent, and what happened to the requests."""
    lines = []
    for group in groups([results]):
        for run in group.runs:
            found = shares(run)
            numbers = [f"{found[purpose]:.1f}" for purpose in ORDER]
            counts = str(run.requests["num_preemptions"].sum()), f"{run.steps['copied'].sum():,}"
            lines.append((group.name.removeprefix("memory_map_"), run.label, *numbers, *counts, f"{run.end_s:.0f}"))
    head = ("panel", "system", "shared", "tokens", "reserved", "internal", "rounding", "free")
    return aligned([(*head, "preempted", "copied", "end s"), *lines], left=2) if lines else None


def claims(results: Results) -> list[Claim]:
    """None: a map is to be looked at."""
    del results
    return []


def still(runs: Sequence[Mapped], by: By = "purpose") -> Figure:
    """Maps on one clock, below each other.

    Args:
        runs: of a group.
        by: what the colours stand for.
    """
    end_s = max(run.end_s for run in runs)
    highest = max(int(run.steps[name].max()) for run in runs for name in ("num_waiting", "num_running"))
    found = [shares(run) for run in runs]
    with style.context():
        figure = style.new_figure(style.PAGE_IN, 0.7 + 1.95 * len(runs), _note(runs, by))
        grid = figure.subplots(
            2 * len(runs), 2, squeeze=False, height_ratios=[5, 1.1] * len(runs), width_ratios=[26, 1], sharex="col"
        )
        for index, run in enumerate(runs):
            (map_axes, bar_axes), (queue_axes, empty) = grid[2 * index : 2 * index + 2]
            _map(map_axes, run, by, end_s)
            _bar(bar_axes, found[index], by)
            _queue(queue_axes, run, highest)
            empty.set_axis_off()
        grid[-1, 0].set_xlabel("Time (s)")
        figure.legend(handles=legend(runs, found, by), loc="outside upper center", ncols=4)
    return figure


def colors(memory: MemoryMap, steps: ArrayLike, by: By) -> NDArray[np.uint8]:
    """The colour of every slot in these iterations: ``[num_slots, len(steps), 3]``."""
    if by == "purpose":
        palette = np.array([_rgb(PURPOSES[purpose].color) for purpose in Purpose])
        picture: NDArray[np.uint8] = palette[memory.purposes(steps)]
        picture[is_shared(memory, steps)] = _rgb(SHARED.color)
        return picture
    hues = (*_HUES, _PREFIX_COLOR)
    tints = np.array([[_rgb(_of_owner(hue, purpose)) for purpose in (*Purpose, None)] for hue in hues])
    owners = memory.owners(steps)
    which = np.where(is_shared(memory, steps), len(Purpose), memory.purposes(steps))
    mixed: NDArray[np.uint8] = tints[np.where(owners < 0, len(_HUES), owners % len(_HUES)), which]
    return mixed


def _rgb(color: str) -> NDArray[np.uint8]:
    return (255 * np.array(to_rgb(color)) + 0.5).astype(np.uint8)


def _of_owner(hue: str, purpose: Purpose | None) -> str:
    """The colour of an owner's slots; None: tokens that its streams share."""
    if purpose is None:
        return _mixed(hue, 1 - _DARKER, 0.0)
    return PURPOSES[purpose].color if purpose is Purpose.FREE else _mixed(hue, _TINTS[purpose], 1.0)


def legend(runs: Sequence[Mapped], found: Sequence[Mapping[Purpose | None, float]], by: By) -> list[Any]:
    """What the colours and the marks stand for, as far as they are there.

    Args:
        runs: that are drawn.
        found: what their pools hold, see ``shares``.
        by: what the colours stand for.
    """
    there = [purpose for purpose in ORDER if any(each[purpose] > 0 for each in found)]
    parts = {purpose: SHARED if purpose is None else PURPOSES[purpose] for purpose in there}
    if by == "owner":
        for purpose, part in parts.items():
            label = "tokens, a colour for each request" if purpose is Purpose.TOKEN_STATES else part.label
            parts[purpose] = Part(label, _of_owner(_HUES[0], purpose))
    handles: list[Any] = [Patch(color=part.color, label=part.label) for part in parts.values()]
    spans = [run.memory.spans for run in runs]
    if any(np.isin(each["ended"], (Ended.PREEMPTED, Ended.SWAPPED)).any() for each in spans):
        handles.append(
            Line2D([], [], color=PREEMPTED, marker="|", markersize=7, linestyle="none", label="lost to preemption")
        )
    if any((each["began"] == Began.COPIED).any() for each in spans):
        handles.append(Line2D([], [], label="copied to, before writing", **_COPY_MARK, markersize=4))
    handles.append(Line2D([], [], color=style.INK, linewidth=0.7, label="requests that run"))
    handles.append(Patch(color=WAIT, label="requests that wait"))
    return handles


def _mixed(color: str, share: float, grey: float) -> str:
    """A colour with a share of white (1) or black (0) in it."""
    red, green, blue = (part + (grey - part) * share for part in to_rgb(color))
    return to_hex((red, green, blue))


def _note(runs: Sequence[Mapped], by: By) -> str:
    memory = runs[0].memory
    what = "what a slot is for" if by == "purpose" else "which request holds a slot"
    return (
        f"{runs[0].source} {runs[0].model}: the same {len(runs[0].requests['id'])} requests and a pool of "
        f"{memory.num_slots:,} slots everywhere. Colour: {what}. Bars: "
        "means until the last request is admitted (dashed line)."
    )


def _map(axes: Axes, run: Mapped, by: By, end_s: float) -> None:
    memory = run.memory
    times = (np.arange(_COLUMNS) + 0.5) * end_s / _COLUMNS
    stride = max(1, -(-memory.num_slots // _ROWS))
    picture = colors(memory, memory.step_at(times), by)[::stride]
    picture[:, times > run.end_s] = 255
    extent = (0.0, end_s, 0.0, float(memory.num_slots))
    axes.imshow(picture, origin="lower", extent=extent, aspect="auto", interpolation="none", zorder=1)
    borders, lost = _borders(memory)
    thin = 0.5 if borders else 0.35
    axes.add_collection(LineCollection(borders, colors="white", linewidths=0.2, zorder=2))
    axes.add_collection(LineCollection(lost, colors=PREEMPTED, linewidths=thin + 0.2, zorder=4))
    copied = memory.spans["began"] == Began.COPIED
    starts_s = memory.start_s[memory.spans["from_step"][copied]]
    middles = memory.spans["address"][copied] + memory.spans["length"][copied] / 2
    axes.plot(starts_s, middles, **_COPY_MARK, markersize=1.8, zorder=5)
    axes.axvline(run.loaded_s, color=style.GREY, linewidth=0.5, linestyle=(0, (3, 2)), zorder=6)
    if run.end_s < 0.97 * end_s:
        axes.text(
            run.end_s + 0.02 * end_s, memory.num_slots / 2, f"all served at {run.end_s:.0f} s", rotation=90,
            va="center", color=style.GREY,
        )  # fmt: skip
    axes.set_xlim(0, end_s)
    axes.set_ylim(0, memory.num_slots)
    axes.set_ylabel("Address (slot)")
    axes.grid(visible=False)
    axes.set_title(run.label)


def _borders(memory: MemoryMap) -> tuple[list[NDArray[np.float64]], list[NDArray[np.float64]]]:
    """The outlines of spans that are large enough, and the ends of those lost to preemption, in seconds and slots."""
    spans = memory.spans
    left, right = memory.start_s[spans["from_step"]], memory.end_s[spans["to_step"] - 1]
    low = spans["address"].astype(np.float64)
    lens = spans["length"].astype(np.float64)
    high = low + lens
    corners = np.array([[left, low], [right, low], [right, high], [left, high], [left, low]]).transpose(2, 0, 1)
    ends = np.array([[right, low], [right, high]]).transpose(2, 0, 1)
    is_lost = np.isin(spans["ended"], (Ended.PREEMPTED, Ended.SWAPPED))
    return list(corners[lens >= memory.num_slots / _THINNEST]), list(ends[is_lost])


def _bar(axes: Axes, found: Mapping[Purpose | None, float], by: By) -> None:
    """What the map holds on average, from tokens at the bottom to free at the top."""
    bottom = 0.0
    for purpose in ORDER:
        part, share = SHARED if purpose is None else PURPOSES[purpose], found[purpose]
        part = part._replace(color=_of_owner(_HUES[0], purpose)) if by == "owner" else part
        axes.bar(0, share, 1.0, bottom, color=part.color, edgecolor="white", linewidth=0.4)
        if share >= 4:
            color = "white" if part.is_dark else style.INK
            axes.text(0, bottom + share / 2, f"{share:.0f}", color=color, ha="center", va="center", fontsize=5.5)
        bottom += share
    axes.set_xlim(-0.5, 0.5)
    axes.set_ylim(0, 100)
    axes.set_axis_off()
    axes.set_title("%")


def _queue(axes: Axes, run: Mapped, highest: int) -> None:
    """Who runs and who waits."""
    times = np.concatenate([[0.0], run.memory.end_s])
    axes.stairs(run.steps["num_waiting"], times, fill=True, color=WAIT)
    axes.stairs(run.steps["num_running"], times, color=style.INK, linewidth=0.7)
    axes.set_ylim(0, 1.1 * highest + 1)
    axes.set_ylabel("Requests")
