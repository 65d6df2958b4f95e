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
from kvbench.report.gathered import Gathered, configs, gather, manifests
from kvbench.report.runs import map_content, map_size, palette, run_content
from kvbench.report.tables import MAX_ROWS, Row, labels_of
from kvbench.results import SIMULATED, write_text

FILE = "report.html"
COMPARED = Path("results/compare")
"""Where reports of several folders go."""
_RUNS_BYTES, _MAPS_BYTES, _FIGURES_BYTES = 2_200_000, 1_000_000, 1_100_000
"""What runs, maps and pictures may take of the 5 MB that a page has at most."""
_FEWEST_RUN_BYTES = 10_000
_SCRIPTS = ("data.js", "tables.js", "charts.js", "runs.js", "player.js", "main.js")
_AXES = ("request_rate", "block_size", "num_samples", "beam_width", "kv_cache_bytes", "duration_s")
"""Columns against which results can be drawn."""


def write(
    words: str | Path | Sequence[str | Path], to: Path | None = None, *, mix: bool = False
) -> tuple[Path, list[str]]:
    """Write the report of an experiment, or of several that can be compared.

    Args:
        words: folders of results, ``results/<name>``, also those in ``results/reference``, which keep no single runs;
            ``column=value[,value]`` after one keeps those of its points.
        to: the file; None: ``report.html`` in the folder, of several folders in ``results/compare``.
        mix: whether to put together what cannot be compared.

    Returns:
        The file, and what it leaves out, in sentences.

    Raises:
        KvbenchError: a folder holds no results, or several cannot be compared.
    """
    gathered = gather([words] if isinstance(words, str | Path) else words, mix=mix)
    path = to or (COMPARED if len(gathered.folders) > 1 else next(iter(gathered.folders.values())).path) / FILE
    html, notes = page(gathered)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, html)
    return path, notes


def page(gathered: Gathered) -> tuple[str, list[str]]:
    """The report as HTML, and what it leaves out."""
    rows = gathered.rows
    found, settings = manifests(gathered), configs(gathered)
    runs, runs_notes = _runs(gathered)
    maps, maps_notes = _maps(gathered)
    figures, figures_notes = _figures(gathered)
    notes = [*gathered.notes, *runs_notes, *maps_notes, *figures_notes]
    devices = list(dict.fromkeys(str(row["device"]) for row in rows))
    sweep = _sweep(rows)
    content = {
        "sweep": sweep,
        "runs": [{name: run[name] for name in ("point", "label", "key")} for run in runs],
        "palette": palette(),
    }
    html = _environment().get_template("page.html").render(
        title=gathered.title,
        version=__version__,
        devices=devices,
        is_simulated=devices == [SIMULATED],
        sources=list(dict.fromkeys(str(row["workload_source"]) for row in rows)),
        rows=rows,
        results_table=tables.results_table(rows),
        comparison_table=tables.comparison_table(gathered.frame, gathered.over) if len(gathered.folders) > 1 else None,
        everything_table=tables.everything_table(rows),
        claims_table=(claims := tables.claims_table(gathered.folders)),
        verdicts=_counts([str(cells[0]) for cells in claims.rows]) if claims else {},
        metrics_table=tables.metrics_table(),
        assumptions_table=assumptions_table(rows, settings, found),
        provenance_table=tables.provenance_table(found, len(rows)),
        config_tables=tables.config_tables(settings),
        has_sweep=bool(sweep["axes"]),
        runs=runs,
        maps=maps,
        figures=figures,
        notes=notes,
        content=content,
        css=Markup(_asset("uplot/uPlot.min.css") + _asset("page.css")),
        scripts=Markup("\n".join(map(_asset, ("uplot/uPlot.iife.min.js", *_SCRIPTS)))),
        license=_asset("uplot/LICENSE"),
    )  # fmt: skip
    return html, notes


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
    pairs = list(dict.fromkeys((str(row.get("results", "")), str(row["system"])) for row in kept))
    looks = style.looks_of_runs(*map(list, zip(*pairs, strict=True)))
    return {
        "axes": axes,
        "metrics": metrics,
        "systems": {
            "/".join(pair): {"label": look.label, "color": look.color, "dash": _dash(look.linestyle)}
            for pair, look in zip(pairs, looks, strict=True)
        },
        "rows": [
            {
                "point": row["point"],
                "panel": text(row.get("panel")),
                "system": f"{row.get('results', '')}/{row['system']}",
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


def _runs(gathered: Gathered) -> tuple[list[dict[str, Any]], list[str]]:
    """What single runs left, and what of it the page has not."""
    rows = gathered.rows
    there = [row for row in rows if (home := gathered.homes[row["point"]]).results.folder(home.row).is_dir()]
    kept = there[: _RUNS_BYTES // _FEWEST_RUN_BYTES]
    labels = [name for name in labels_of(rows) if name not in {"system", "duration_s"}]
    looks = style.looks(str(row["system"]) for row in rows)
    found: list[dict[str, Any]] = []
    for row in kept:
        if (content := run_content(*gathered.homes[row["point"]], _RUNS_BYTES // len(kept))) is None:
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


def _maps(gathered: Gathered) -> tuple[list[dict[str, Any]], list[str]]:
    """The memory maps, and what of them the page has not."""
    found: list[dict[str, Any]] = []
    notes, left = [], _MAPS_BYTES
    for folder, results in gathered.folders.items():
        for group in groups([results]) if (results.path / "points").is_dir() else []:
            name = gathered.named(folder, group.name)
            content = map_content(group._replace(name=name))
            if map_size(content) > left:
                notes.append(f"{name} is too large for this page; python -m kvbench.memory_map draws it.")
                continue
            left -= map_size(content)
            found.append({"key": f"map-{len(found)}", "name": name, "content": content})
    return found, notes


def _figures(gathered: Gathered) -> tuple[list[dict[str, str]], list[str]]:
    """The experiments' own figures, as they were drawn, and which of them the page has not."""
    found: list[dict[str, str]] = []
    notes, left = [], _FIGURES_BYTES
    for folder, results in gathered.folders.items():
        for path in sorted(results.path.glob("*.png")):
            data = base64.b64encode(path.read_bytes()).decode()
            if len(data) > left:
                notes.append(
                    f"{gathered.named(folder, path.name)} is too large for this page; it is in {results.path}."
                )
                continue
            left -= len(data)
            found.append({"name": gathered.named(folder, path.stem), "data": data})
    return found, notes
