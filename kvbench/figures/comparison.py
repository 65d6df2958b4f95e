"""Points of any experiments side by side: one curve and one line of the table for each series of them.

A series is what one system did in one folder of results, told apart further by whatever else differs (``KEYS``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from matplotlib.figure import Figure

from kvbench.figures import replications, style
from kvbench.figures.frames import curve, footnote, value, where
from kvbench.figures.style import Look
from kvbench.figures.terminal import stability
from kvbench.figures.typeset import Table
from kvbench.schema import HEADINGS, SUMMARY
from kvbench.statistics import Interval, named

KEYS = (
    "results", "panel", "system", "device", "hardware", "model", "workload", "workload_source", "num_samples",
    "beam_width", "kv_cache_bytes", "costs", "duration_s", "measure_from_s", "measure_to_s", "metric", "threshold",
)  # fmt: skip
"""Columns that tell series apart."""
AXES = ("request_rate", "kv_cache_bytes", "block_size", "num_samples", "beam_width")
"""Columns that may be the horizontal axis unless one is asked for: the first that takes several values in a series."""
METRICS = {
    name: heading for name, heading in HEADINGS.items() if name not in ("num_preemptions", "num_rejected", "stable")
}
"""Metrics of a table unless others are asked for, with their headings; whether a queue grew has its own column."""
_LOG_FROM = 30.0
"""Values that differ by more than this factor get a logarithmic axis."""


class Series(NamedTuple):
    """Rows that one curve is drawn through.

    Attributes:
        label: what tells it apart from the others.
        look: how it is drawn.
        keys: the columns of ``KEYS`` that differ somewhere -> its values, in words.
        rows: of the summary.
    """

    label: str
    look: Look
    keys: dict[str, str]
    rows: pd.DataFrame


def axis(frame: pd.DataFrame) -> str | None:
    """The column along which series go on; None where each has one point."""
    groups = _asked(frame).groupby([key for key in KEYS if key not in AXES], dropna=False, observed=True)
    return next((name for name in AXES if len(frame) and groups[name].nunique().max() > 1), None)


def series(frame: pd.DataFrame, x: str | None) -> list[Series]:
    """The series of a loaded summary, in its order.

    Raises:
        KvbenchError: there are more than can be told apart.
    """
    found = _grouped(frame, x)
    shown = _telling([keys for keys, _ in found])
    labels = [", ".join(keys[key] for key in shown if key != "system") for keys, _ in found]
    runs = [keys.get("results", "") for keys, _ in found]
    looks = style.looks_of_runs(runs, [str(rows["system"].iloc[0]) for _, rows in found])
    return [
        Series(", ".join(filter(None, (look.label, label))), look, keys, rows)
        for (keys, rows), look, label in zip(found, looks, labels, strict=True)
    ]


def draw(frame: pd.DataFrame, x: str | None, y: str, *more: str, width_in: float = style.COLUMN_IN) -> Figure:
    """One panel: ``y`` along ``x``, bands for intervals over repeats; without ``x`` a line for each series.

    Args:
        frame: a loaded summary.
        x: the column of the horizontal axis.
        y: a metric.
        more: sentences for the footnote.
        width_in: of the figure.
    """
    found = series(frame, x)
    with style.context():
        names = [style.wrapped(each.label, 0.45 * width_in) for each in found]
        height_in = 2.0 + 0.14 * len(found) if x else 0.55 + 0.22 * len("\n".join(names).splitlines())
        figure = style.new_figure(width_in, height_in, _note(frame, *more))
        axes = figure.subplots()
        if x is None:
            _draw_values(axes, found, y)
            axes.set_yticks(range(len(found)), names)
            axes.set_xlabel(titled(y), loc="right")
            return figure
        curves = [curve(each.rows, x, y) for each in found]
        heights = [height for points in curves for _, height in points]
        is_log = min(heights) > 0 and max(heights) > _LOG_FROM * min(heights)
        floor = min(heights) / 2 if is_log else -math.inf
        for each, points in zip(found, curves, strict=True):
            style.plot(axes, points, each.look)
            style.band(axes, _intervals(each.rows, x, y, floor), each.look)
        if is_log:
            axes.set_yscale("log")
        elif min(heights) >= 0:
            axes.set_ylim(bottom=0)
        axes.set_xlim(left=0)
        axes.set_xlabel(titled(x))
        axes.set_ylabel(titled(y))
        handles = style.legend({each.label: each.look._replace(label=each.label) for each in found})
        style.put_legend(figure, handles, 1 if width_in < style.PAGE_IN else 2)
        return figure


def table(
    frame: pd.DataFrame, x: str | None, metrics: Mapping[str, str] = METRICS, *more: str, over: str = ""
) -> Table:
    """One line for each point: what tells it apart, metrics with intervals over repeats, a ratio to the first series.

    Args:
        frame: a loaded summary.
        x: the column of the horizontal axis.
        metrics: column -> heading; those without a number anywhere are left out.
        more: sentences for the note.
        over: the metric whose ratio to the first series' is shown; empty for none.
    """
    found = _grouped(frame, x)
    names = list(found[0][0])
    metrics = {name: heading for name, heading in metrics.items() if pd.to_numeric(frame[name]).notna().any()}
    lines: list[list[str]] = []
    verdicts: list[str] = []
    first: dict[Any, pd.DataFrame] = {}
    for keys, mine in found:
        for at, rows in mine.groupby(x, dropna=False) if x else [(None, mine)]:
            reference = first.setdefault(at, rows) if keys is found[0][0] else first.get(at)
            cells = [*keys.values(), *([_word(x, at)] if x else [])]
            cells += [_cell(rows, name) for name in metrics]
            cells += [_ratio(rows, reference, over)] if over else []
            lines.append(cells)
            verdicts.append(stability(replications.verdict(rows)))
    header = [*(name.replace("_", " ") for name in names), *([titled(x)] if x else []), *metrics.values()]
    header += ["over the first"] if over else []
    if set(verdicts) - {stability(True)}:
        header.append("stable")
        lines = [[*cells, verdict] for cells, verdict in zip(lines, verdicts, strict=True)]
    return Table(header, lines, len(names), _note(frame, *more))


def folder_names(folders: Iterable[str]) -> dict[str, str]:
    """What folders of results are called beside each other: by their names, by their paths where names are alike."""
    paths = list(dict.fromkeys(folders))
    names = [Path(path).resolve().name for path in paths]
    return dict(zip(paths, names if len(set(names)) == len(names) else paths, strict=True))


def titled(column: str) -> str:
    """A column as the title of an axis, with its unit."""
    unit = SUMMARY[column].unit if column in SUMMARY else ""
    words = in_words(column)
    return words[:1].upper() + words[1:] + (f" ({unit})" if unit else "")


def in_words(column: str) -> str:
    """What a column holds, without its unit."""
    words = column
    for suffix in ("_pct", "_bytes", "_req_per_s", "_tok_per_s", "_s"):
        words = words.removesuffix(suffix)
    words = words.removeprefix("num_").replace("_", " ")
    return words.replace("ttft", "TTFT").replace("tpot", "TPOT").replace("slo ", "SLO ")


def _note(frame: pd.DataFrame, *more: str) -> str:
    repeats = [f"{named()} of means over repeats"] if frame["repeat"].nunique() > 1 else []
    return footnote(frame, f"Served: {where(frame)}", *repeats, *more)


def _grouped(frame: pd.DataFrame, x: str | None) -> list[tuple[dict[str, str], pd.DataFrame]]:
    """What tells each series apart, in words, and its rows."""
    if x != "request_rate" or frame["metric"].isna().any():
        frame = _asked(frame)
    keys = [key for key in KEYS if key != x and (key == "system" or _differs(frame, key))]
    frame = frame.assign(results=frame["results"].map(folder_names(frame["results"])))
    looks = style.looks(frame["system"])
    words = {"system": lambda system: looks[system].label}
    groups = frame.groupby(keys, sort=False, dropna=False, observed=True)
    return [
        ({key: words.get(key, partial(_word, key))(cell) for key, cell in zip(keys, cells, strict=True)}, rows)
        for cells, rows in groups
    ]


def _asked(frame: pd.DataFrame) -> pd.DataFrame:
    """Without the rates that searches found: they are results, and differ between repeats of a point."""
    return frame.assign(request_rate=frame["request_rate"].where(frame["metric"].isna()))


def _differs(frame: pd.DataFrame, key: str) -> bool:
    """Whether a column takes several values; costs, which a system brings, whether they do for one system."""
    cells = frame.groupby("system")[key] if key == "costs" else frame.groupby(lambda _: 0)[key]
    return bool((cells.nunique(dropna=False) > 1).any())


def _telling(all_keys: Sequence[dict[str, str]]) -> list[str]:
    """The keys that a label needs: not those that each folder has one value of, but where it ran."""
    return [
        key
        for key in all_keys[0]
        if key in ("results", "device") or _vary([(keys.get("results"), keys[key]) for keys in all_keys])
    ]


def _vary(pairs: Sequence[tuple[str | None, str]]) -> bool:
    return len(set(pairs)) > len({folder for folder, _ in pairs})


def _word(key: str | None, cell: Any) -> str:
    if pd.isna(cell):
        return "-"
    if key == "kv_cache_bytes":
        return f"{cell / 2**30:.4g} GiB"
    return f"{cell:g}" if isinstance(cell, int | float) else str(cell)


def _intervals(rows: pd.DataFrame, x: str, y: str, floor: float) -> list[tuple[float, float, float]]:
    """(x, low, high) where repeats say it: more than one, and no growing queue, as a mean is nobody's there."""
    settled = [(float(str(at)), mine) for at, mine in rows.groupby(x) if not _is_unstable(mine)]
    found = [(at, replications.interval(mine, y)) for at, mine in settled]
    return [(at, max(each.low, floor), each.high) for at, each in found if each is not None and each.num > 1]


def _is_unstable(rows: pd.DataFrame) -> bool:
    """Whether a point's queue grew: what cannot be judged did not."""
    return replications.verdict(rows) is False


def _estimate(rows: pd.DataFrame, column: str) -> Interval | float | None:
    """The mean over repeats with its interval, none where a queue grew; of one repeat, the mean over its trials."""
    if rows["repeat"].nunique() > 1:
        return None if _is_unstable(rows) else replications.interval(rows, column)
    return value(rows, column)


def _cell(rows: pd.DataFrame, column: str) -> str:
    found = _estimate(rows, column)
    return "-" if found is None else str(found) if isinstance(found, Interval) else f"{found:.4g}"


def _ratio(rows: pd.DataFrame, reference: pd.DataFrame | None, column: str) -> str:
    """Paired by repeat where both served the same requests, else of the means."""
    if reference is None or any(each["repeat"].nunique() > 1 and _is_unstable(each) for each in (rows, reference)):
        return "-"
    mine, others = (set(zip(each["repeat"], each["seed"], strict=True)) for each in (rows, reference))
    one, other = value(rows, column), value(reference, column)
    if not one or not other:
        return "-"
    paired = replications.ratio(rows, reference, column) if mine == others and len(mine) > 1 else None
    return f"{one / other:.3g}" if paired is None else str(paired)


def _draw_values(axes: Any, found: Sequence[Series], y: str) -> None:
    """One mark for each series, below each other."""
    for place, each in enumerate(found):
        estimate = _estimate(each.rows, y)
        if estimate is None:
            continue
        middle = estimate.value if isinstance(estimate, Interval) else estimate
        error = [[middle - estimate.low], [estimate.high - middle]] if isinstance(estimate, Interval) else None
        axes.errorbar(middle, place, xerr=error, color=each.look.color, marker=each.look.marker, capsize=2)
    axes.set_ylim(len(found) - 0.5, -0.5)
    axes.set_xlim(left=0)
