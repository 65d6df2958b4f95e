"""What a report says in tables: results, claims, where they come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import pandas as pd

from kvbench.figures import comparison
from kvbench.figures.terminal import text
from kvbench.metrics import METRICS
from kvbench.paper.claims import Claim
from kvbench.results import POINT_COLUMNS, Results, leaves, read_csv
from kvbench.schema import HEADINGS

Row = dict[str, Any]
MAX_ROWS = 2000
"""Most points that a page lists; more make it slow, and nobody reads them."""
_MAX_CELLS = 60_000
_MAIN_LABELS = ("results", "panel", "model", "workload", "request_rate")
LABELS = (
    "results", "panel", "system", "model", "hardware", "workload", "request_rate", "num_samples", "beam_width",
    "block_size", "runner", "device", "duration_s", "kv_cache_bytes", "metric", "threshold", "seed", "repeat",
)  # fmt: skip
"""Columns that may tell points apart."""
_CONFIG = ("choices",)
"""Of a configuration, what repeats the rest."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column's heading, and what it says when asked."""

    title: str
    meaning: str = ""
    is_number: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text and numbers; None: there is nothing.

    Attributes:
        key: its id in the page.
        caption: what it shows.
        anchors: an id for each row, or none.
        note: what is left out.
    """

    key: str
    caption: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[object]]
    anchors: Sequence[str] = field(default_factory=list)
    note: str = ""


def rows_of(summary: pd.DataFrame) -> list[Row]:
    """The summary as plain values; empty fields are None."""
    return [
        {str(name): None if pd.isna(value) else _plain(value) for name, value in row.items()}
        for row in summary.to_dict(orient="records")
    ]


def labels_of(rows: Sequence[Row]) -> list[str]:
    """The columns that tell these rows apart: the system, and what differs; most only if it does within a panel."""
    found = []
    for name in LABELS:
        groups: dict[object, set[object]] = {}
        for row in rows:
            groups.setdefault(None if name in _MAIN_LABELS else row.get("panel"), set()).add(row.get(name))
        if name == "system" or any(len(values) > 1 for values in groups.values()):
            found.append(name)
    return found


def results_table(rows: Sequence[Row]) -> Table:
    """One row for each point: what tells it apart, and the metrics that most people look for."""
    labels = labels_of(rows)
    metrics = [name for name in HEADINGS if any(row.get(name) is not None for row in rows)]
    columns = [Column(name.replace("_", " "), is_number=_is_numeric(rows, name)) for name in labels]
    columns += [Column(HEADINGS[name], _meaning(name), _is_numeric(rows, name)) for name in metrics]
    kept = rows[:MAX_ROWS]
    return Table(
        "results-table",
        "One row for each point",
        columns,
        [[row.get(name) for name in (*labels, *metrics)] for row in kept],
        [f"point-{row['point']}" for row in kept],
        f"{len(rows) - MAX_ROWS} more points are in summary.csv" if len(rows) > MAX_ROWS else "",
    )


def comparison_table(frame: pd.DataFrame, over: str) -> Table:
    """Points of several folders beside each other: means with intervals, and each one's ratio to the first curve's."""
    x = comparison.axis(frame)
    beside = comparison.table(frame, x, over=over)
    columns = [Column(title) for title in beside.header]
    what = f"; over the first: {comparison.in_words(over)}" if over else ""
    return Table("comparison-table", f"Side by side{what}", columns, beside.rows)


def everything_table(rows: Sequence[Row]) -> Table | None:
    """Every column of ``summary.csv`` that is not empty throughout; None where that is too much for a page."""
    names = [
        name
        for name in ("results", "panel", "repeat", *POINT_COLUMNS, "point")
        if any(row.get(name) is not None for row in rows)
    ]
    if len(names) * len(rows) > _MAX_CELLS:
        return None
    columns = [Column(name, _meaning(name), _is_numeric(rows, name)) for name in names]
    return Table("all-columns", "All of summary.csv", columns, [[row.get(name) for name in names] for row in rows])


def metrics_table() -> Table:
    """What every measured column means."""
    columns = [Column("column"), Column("unit"), Column("meaning")]
    rows = [[name, metric.unit, metric.description] for name, metric in METRICS.items()]
    return Table("metrics-table", "Every measured column", columns, rows)


def claims_table(folders: Mapping[str, Results]) -> Table | None:
    """``claims.csv`` of every folder with the paper's range and the measured interval; None where there is none."""
    rows: list[Row] = []
    for name, results in folders.items():
        path = results.path / "claims.csv"
        if path.is_file():
            claims = rows_of(read_csv(path, [each.name for each in fields(Claim)]))
            rows += [{**claim, "results": name} for claim in claims]
    if not rows:
        return None
    several = len(folders) > 1
    columns = [
        Column(
            "verdict", "whether the measured value, or its interval, meets the claimed range widened by the tolerance"
        ),
        *([Column("results")] if several else []),
        Column("claim"),
        Column("where"),
        Column("paper", is_number=True),
        Column("measured", is_number=True),
        Column("95 % interval"),
        Column("unit"),
        Column("tolerance"),
        Column("note"),
    ]
    cells = [
        [
            row["verdict"],
            *([row["results"]] if several else []),
            row["claim"],
            row["figure"],
            _span(row["paper_low"], row["paper_high"]),
            row["measured"],
            _span(row["ci_low"], row["ci_high"]),
            row["unit"],
            row["tolerance"],
            row["note"],
        ]
        for row in rows
    ]
    return Table("claims-table", "Claims, stated before anything ran, and what was found", columns, cells)


def provenance_table(found: Mapping[str, Row], num_points: int) -> Table:
    """What manifests say, each value once with the number of points that have it."""
    names = ("versions", "git_commit", "sources", "device", "host", "platform", "num_cores", "inputs")
    counts: dict[tuple[str, str], int] = {}
    for manifest in found.values():
        for name, value in leaves({name: manifest[name] for name in names if name in manifest}):
            counts[name, str(value)] = counts.get((name, str(value)), 0) + 1
    rows: list[list[object]] = [[name, value, count] for (name, value), count in sorted(counts.items())]
    seconds = [manifest["wall_s"] for manifest in found.values() if "wall_s" in manifest]
    if seconds:
        rows.append(["wall time of the runs, added up", f"{sum(seconds):.1f} s", len(seconds)])
    columns = [Column("what"), Column("value"), Column("points", is_number=True)]
    missing = num_points - len(found)
    note = f"{missing} of {num_points} points have no manifest here" if missing else ""
    return Table("provenance-table", "Where the numbers come from", columns, rows, note=note)


def config_tables(found: Mapping[str, Row]) -> list[Table]:
    """Keys that all points share, and those in which they differ."""
    flats = {
        point: {name: value for name, value in leaves(config) if not name.startswith(_CONFIG)}
        for point, config in found.items()
    }
    names = list(dict.fromkeys(name for each in flats.values() for name in each))
    values = {name: list(dict.fromkeys(str(each[name]) for each in flats.values() if name in each)) for name in names}
    shared = [name for name in names if len(values[name]) == 1 and all(name in each for each in flats.values())]
    columns = [Column("key"), Column("value")]
    tables = [Table("config-shared", "Shared by all points", columns, [[name, values[name][0]] for name in shared])]
    differing = [[name, "; ".join(values[name])] for name in names if name not in set(shared)]
    if differing:
        tables.append(Table("config-differing", "Different between points: all values that occur", columns, differing))
    return tables


def _plain(value: Any) -> object:
    """Python's own type, and whole numbers as such where a column holds them as floats beside empty fields."""
    plain = value.item() if hasattr(value, "item") else value
    return int(plain) if isinstance(plain, float) and plain.is_integer() and abs(plain) < 1e15 else plain


def _is_numeric(rows: Sequence[Row], name: str) -> bool:
    found = [row[name] for row in rows if row.get(name) is not None]
    return bool(found) and all(isinstance(value, int | float) and not isinstance(value, bool) for value in found)


def _meaning(name: str) -> str:
    metric = METRICS.get(name)
    return f"{metric.description} ({metric.unit})" if metric and metric.unit else metric.description if metric else ""


def _span(low: object, high: object) -> str:
    """A range as people write it; an end that is open is said in words."""
    if low is None and high is None:
        return "-"
    if low == high:
        return text(low)
    if high is None:
        return f"at least {text(low)}"
    return f"at most {text(high)}" if low is None else f"{text(low)} to {text(high)}"
