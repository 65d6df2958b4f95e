"""The page: everything it says and shows, in one file that needs nothing else. The same results give the same bytes."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from kvbench import __version__
from kvbench.figures import style
from kvbench.figures.memory_map import groups
from kvbench.figures.terminal import text
from kvbench.metrics import METRICS
from kvbench.report import tables
from kvbench.report.assumptions import assumptions_table
from kvbench.report.runs import map_content, map_size, palette, run_content
from kvbench.report.tables import MAX_ROWS, Row, labels_of
from kvbench.results import SIMULATED, Results, write_text

FILE = "report.html"
_RUNS_BYTES, _MAPS_BYTES, _FIGURES_BYTES = 2_200_000, 1_000_000, 1_100_000
"""What runs, maps and pictures may take of the 5 MB that a page has at most."""
_FEWEST_RUN_BYTES = 10_000
_SCRIPTS = ("data.js", "tables.js", "charts.js", "runs.js", "player.js", "main.js")
_AXES = ("request_rate", "block_size", "num_samples", "beam_width", "kv_cache_bytes", "duration_s")
"""Columns against which results can be drawn."""


def write(folder: Path | str, to: Path | None = None) -> Path:
    """Write the report of an experiment.

    Args:
        folder: of results, ``results/<name>``; also those in ``results/reference``, which keep no single runs.
        to: the file; None: ``report.html`` in the folder.

    Returns:
        The file.

    Raises:
        KvbenchError: the folder holds no results.
    """
    results = Results(folder)
    path = to or results.path / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, page(results))
    return path


def page(results: Results) -> str:
    """The report as HTML."""
    rows = tables.read(results)
    manifests, configs = tables.manifests(results, rows), tables.configs(results, rows)
    runs, notes = _runs(results, rows)
    maps, maps_note = _maps(results)
    figures, figures_note = _figures(results.path)
    devices = list(dict.fromkeys(str(row["device"]) for row in rows))
    sweep = _sweep(rows)
    content = {
        "sweep": sweep,
        "runs": [{name: run[name] for name in ("point", "label", "key")} for run in runs],
        "palette": palette(),
    }
    return _environment().get_template("page.html").render(
        title=str(rows[0].get("experiment") or results.path.name),
        version=__version__,
        devices=devices,
        is_simulated=devices == [SIMULATED],
        sources=list(dict.fromkeys(str(row["workload_source"]) for row in rows)),
        rows=rows,
        results_table=tables.results_table(rows),
        everything_table=tables.everything_table(rows),
        claims_table=(claims := tables.claims_table(results)),
        verdicts=_counts([str(cells[0]) for cells in claims.rows]) if claims else {},
        metrics_table=tables.metrics_table(),
        assumptions_table=assumptions_table(rows, configs, manifests),
        provenance_table=tables.provenance_table(manifests, len(rows)),
        config_tables=tables.config_tables(configs),
        has_sweep=bool(sweep["axes"]),
        runs=runs,
        maps=maps,
        figures=figures,
        notes=[*notes, *maps_note, *figures_note],
        content=content,
        css=Markup(_asset("uplot/uPlot.min.css") + _asset("page.css")),
        scripts=Markup("\n".join(map(_asset, ("uplot/uPlot.iife.min.js", *_SCRIPTS)))),
        license=_asset("uplot/LICENSE"),
    )  # fmt: skip


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("kvbench.report", "."), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    environment.filters["cell"] = text
    environment.filters["data"] = _json
    environment.tests["numeric"] = lambda value: isinstance(value, int | float)
    return environment


def _asset(name: str) -> str:
    return files("kvbench.report").joinpath(name).read_text(encoding="utf-8")


def _json(content: object) -> Markup:
    """JSON that can stand in a ``<script>``."""
    return Markup(json.dumps(content, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"))


def _counts(words: Sequence[str]) -> dict[str, int]:
    return {word: words.count(word) for word in dict.fromkeys(words)}


def _sweep(rows: Sequence[Row]) -> dict[str, Any]:
    """Results by parameter: the axes along which points differ, and their numbers."""
    kept = rows[:MAX_ROWS]
    axes = [name for name in _AXES if len({row.get(name) for row in kept if row.get(name) is not None}) > 2]
    if not axes:
        return {"axes": [], "metrics": {}, "systems": {}, "rows": []}
    metrics = {
        name: {"unit": metric.unit, "meaning": metric.description}
        for name, metric in METRICS.items()
        if any(row.get(name) not in {None, 0, True} for row in kept)
    }
    labels = [name for name in labels_of(kept) if name not in {*_AXES, "panel", "system", "seed", "repeat"}]
    return {
        "axes": axes,
        "metrics": metrics,
        "systems": {
            system: {"label": look.label, "color": look.color, "dash": _dash(look.linestyle)}
            for system, look in style.looks(str(row["system"]) for row in kept).items()
        },
        "rows": [
            {
                "point": row["point"],
                "panel": text(row.get("panel")),
                "system": row["system"],
                "labels": [text(row.get(name)) for name in labels],
                "x": [row.get(name) for name in axes],
                "y": [_short(row.get(name)) for name in metrics],
            }
            for row in kept
        ],
    }


def _dash(linestyle: style.LineStyle) -> list[float]:
    """A line's dashes in pixels; none where it is solid."""
    return [] if isinstance(linestyle, str) else [2.2 * length for length in linestyle[1]]


def _short(value: object) -> object:
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _runs(results: Results, rows: Sequence[Row]) -> tuple[list[dict[str, Any]], list[str]]:
    """What single runs left, and what of it the page has not."""
    there = [row for row in rows if results.folder(row).is_dir()]
    kept = there[: _RUNS_BYTES // _FEWEST_RUN_BYTES]
    labels = [name for name in labels_of(rows) if name not in {"system", "duration_s"}]
    looks = style.looks(str(row["system"]) for row in rows)
    found: list[dict[str, Any]] = []
    for row in kept:
        if (content := run_content(results, row, _RUNS_BYTES // len(kept))) is None:
            continue
        more = [f"{name.replace('_', ' ')} {text(row[name])}" for name in labels if row.get(name) is not None]
        label = ", ".join([looks[str(row["system"])].label, *more])
        found.append({"point": row["point"], "label": label, "key": f"run-{len(found)}", "content": content})
    notes = []
    if len(kept) < len(there):
        notes.append(f"Charts over time are here for the first {len(kept)} of {len(there)} points.")
    if found and (without := sum("steps" not in run["content"] for run in found)):
        notes.append(f"{without} points were run with records=summary: they kept no iterations, only requests.")
    return found, notes


def _maps(results: Results) -> tuple[list[dict[str, Any]], list[str]]:
    """The memory maps, and what of them the page has not."""
    found: list[dict[str, Any]] = []
    notes, left = [], _MAPS_BYTES
    for group in groups([results]) if (results.path / "points").is_dir() else []:
        content = map_content(group)
        if map_size(content) > left:
            notes.append(f"{group.name} is too large for this page; python -m kvbench.memory_map draws it.")
            continue
        left -= map_size(content)
        found.append({"key": f"map-{len(found)}", "name": group.name, "content": content})
    return found, notes


def _figures(folder: Path) -> tuple[list[dict[str, str]], list[str]]:
    """The experiment's own figures, as they were drawn, and which of them the page has not."""
    found: list[dict[str, str]] = []
    notes, left = [], _FIGURES_BYTES
    for path in sorted(folder.glob("*.png")):
        data = base64.b64encode(path.read_bytes()).decode()
        if len(data) > left:
            notes.append(f"{path.name} is too large for this page; it is in the folder of the results.")
            continue
        left -= len(data)
        found.append({"name": path.stem, "data": data})
    return found, notes
