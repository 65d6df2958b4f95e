"""Memory maps as a film: the pools side by side, slot by slot, on one clock. GIF; MP4 where ffmpeg is installed."""

from __future__ import annotations

import math
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.patches import Patch
from numpy.typing import NDArray
from PIL import Image
from tqdm import tqdm

from kvbench.core import KvbenchError
from kvbench.figures import memory_map, style
from kvbench.figures.memory_map import By, Mapped
from kvbench.memory_map.recorder import Began, Ended

FRAMES_PER_S = 10
DPI = 110
_LOST, _COPY = (0, 0, 0), (240, 228, 66)
"""What flashes in one frame: slots just lost to preemption, slots just copied to."""


def film(runs: Sequence[Mapped], folder: Path, stem: str, seconds: float = 16.0, by: By = "owner") -> list[Path]:
    """Write ``<stem>.gif``, and ``<stem>.mp4`` where ffmpeg is installed.

    Args:
        runs: of a group (``kvbench.figures.memory_map.groups``).
        folder: where to.
        stem: the files' name.
        seconds: how long it plays; the runs' own time is as much faster.
        by: what the colours stand for.

    Returns:
        The files.
    """
    end_s = max(run.end_s for run in runs)
    times = np.linspace(0.0, end_s, max(2, round(seconds * FRAMES_PER_S)))
    gif = folder / f"{stem}.gif"
    with style.context():
        drawn = scene(runs, by)
        changes = list(zip([0.0, *times], times, strict=False))
        frames = [
            Image.fromarray(drawn.frame(before, now))
            for before, now in tqdm(changes, gif.name, unit="frame", leave=False, delay=1, disable=None)
        ]
    some = frames[:: -(-len(frames) // 16)]
    colors = Image.fromarray(np.concatenate([np.asarray(frame) for frame in some])).quantize(256)
    # One palette for all: colours that change between frames would flicker.
    first, *others = [frame.quantize(palette=colors, dither=Image.Dither.NONE) for frame in frames]
    first.save(gif, save_all=True, append_images=others, duration=1000 // FRAMES_PER_S, loop=0)
    return [gif, *_mp4(gif)]


def _mp4(gif: Path) -> list[Path]:
    """The same where there is ffmpeg, which the players of slides read."""
    if (ffmpeg := shutil.which("ffmpeg")) is None:
        return []
    path = gif.with_suffix(".mp4")
    even = "crop=trunc(iw/2)*2:trunc(ih/2)*2:0:0"  # what its codec takes
    made = ["-vf", even, "-c:v", "libx264", "-pix_fmt", "yuv420p", str(path)]
    command = [ffmpeg, "-y", "-loglevel", "error", "-i", str(gif), *made]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode:
        words = done.stderr.decode(errors="replace").strip().splitlines() or [f"status {done.returncode}"]
        raise KvbenchError(f"{path} cannot be written; ffmpeg says: {words[-1]}")
    return [path]


@dataclass(slots=True)
class Scene:
    """The figure of a film, drawn but for what changes.

    Attributes:
        canvas: of the figure.
        still: what does not change, as the canvas keeps it.
        shows: what sets the changing parts of each pool to a time, given that of the frame before; it returns them.
    """

    canvas: Any  # matplotlib's are not typed
    still: Any
    shows: list[Callable[[float, float], list[Artist]]]

    def frame(self, before: float, now: float) -> NDArray[np.uint8]:
        """A frame, ``[height, width, 3]``, given the time of the frame before."""
        self.canvas.restore_region(self.still)
        for show in self.shows:
            for artist in show(before, now):
                self.canvas.figure.draw_artist(artist)
        return np.asarray(self.canvas.buffer_rgba())[..., :3].copy()


def scene(runs: Sequence[Mapped], by: By) -> Scene:
    """The pools of a film side by side."""
    figure = style.new_figure(
        3.1 * len(runs),
        4.3,
        f"{runs[0].source} Rows of slots from the top. Black: just lost to preemption; yellow: just copied to.",
    )
    figure.set_dpi(DPI)
    found = [memory_map.shares(run) for run in runs]
    grid = figure.subplots(2, len(runs), squeeze=False, height_ratios=[9, 1])
    handles = [each for each in memory_map.legend(runs, found, by) if isinstance(each, Patch)]
    figure.legend(handles=handles, loc="outside upper center", ncols=3)
    end_s = max(run.end_s for run in runs)
    shows = [_pool(grid[0, i], grid[1, i], run, by, end_s) for i, run in enumerate(runs)]
    canvas: Any = FigureCanvasAgg(figure)
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # what was laid out once holds for all frames
    for artist in (artist for show in shows for artist in show(0.0, 0.0)):
        artist.set_animated(True)
    canvas.draw()
    return Scene(canvas, canvas.copy_from_bbox(figure.bbox), shows)


def _pool(axes: Axes, below: Axes, run: Mapped, by: By, end_s: float) -> Callable[[float, float], list[Artist]]:
    """One pool as rows of slots, the first at the top, and who runs and waits below it."""
    memory, block = run.memory, max(run.memory.block_size, 1)
    width = min(memory.num_slots, max(block, round(2 * math.sqrt(memory.num_slots) / block) * block))
    rows = -(-memory.num_slots // width)
    canvas = np.full((rows * width, 3), 255, np.uint8)
    image = axes.imshow(canvas.reshape(rows, width, 3), aspect="auto", interpolation="none")
    axes.set_xticks(np.arange(0, width + 1, block) - 0.5, [])
    axes.set_yticks(np.arange(rows + 1) - 0.5, [])
    axes.tick_params(length=0)
    axes.grid(color="white", linewidth=0.5)
    axes.set_axisbelow(False)
    title = axes.set_title(f"{run.label}\n", linespacing=1.4)
    _timeline(below, run, end_s)
    (clock,) = below.plot([0, 0], [0, 1], color=style.INK, linewidth=0.8, transform=below.get_xaxis_transform())

    def show(before: float, now: float) -> list[Artist]:
        step = int(memory.step_at([now])[0])
        canvas[: memory.num_slots] = memory_map.colors(memory, [step], by)[:, 0]
        for place, color in _flashes(run, before, now):
            canvas[place] = color
        image.set_data(canvas.reshape(rows, width, 3))
        arrived, done = (int(np.sum(run.requests[name].astype(float) <= now)) for name in ("arrival_s", "finish_s"))
        state = f"{run.steps['num_running'][step]} run, {run.steps['num_waiting'][step]} wait" if step >= 0 else "idle"
        title.set_text(f"{run.label}\n{now:.1f} s: {state}, {done} of {arrived} done")
        clock.set_xdata([now, now])
        return [image, axes.xaxis, axes.yaxis, title, clock]

    return show


def _timeline(axes: Axes, run: Mapped, end_s: float) -> None:
    """Who waits, over the whole run."""
    times = np.concatenate([[0.0], run.memory.end_s])
    axes.stairs(run.steps["num_waiting"], times, fill=True, color=memory_map.WAIT)
    axes.stairs(run.steps["num_running"], times, color=style.INK, linewidth=0.7)
    axes.set_xlim(0, end_s)
    axes.set_ylim(bottom=0)
    axes.set_yticks([])
    axes.set_xlabel("Time (s); requests that wait, and that run")


def _flashes(run: Mapped, before: float, now: float) -> list[tuple[slice, NDArray[Any]]]:
    """Slots of spans that were lost, or copied to, between two frames, and their colours."""
    spans, memory = run.memory.spans, run.memory
    lost_s, began_s = memory.end_s[spans["to_step"] - 1], memory.start_s[spans["from_step"]]
    lost = np.isin(spans["ended"], (Ended.PREEMPTED, Ended.SWAPPED)) & (before < lost_s) & (lost_s <= now)
    copied = (spans["began"] == Began.COPIED) & (before < began_s) & (began_s <= now)
    starts, lens = spans["address"].astype(np.int64), spans["length"].astype(np.int64)
    return [
        (slice(int(starts[index]), int(starts[index] + lens[index])), np.array(color, np.uint8))
        for which, color in ((lost, _LOST), (copied, _COPY))
        for index in np.flatnonzero(which)
    ]
