"""``python -m kvbench.compare A B ...``: any runs in one figure and one table, unless they cannot be compared.

Allocators, systems, machines and versions are what a comparison is for. Requests, the model, the pool and the costs of
iterations have to be the same, and a simulated run stands beside simulated ones only; ``--mix`` waives that, and then
the figure says what differs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from kvbench import command
from kvbench.core import KvbenchError
from kvbench.figures import comparison, style
from kvbench.figures.typeset import Table
from kvbench.results import SIMULATED, Results, leaves
from kvbench.tables import load

CONDITIONS = {
    "model": "model",
    "workload": "workload",
    "workload_source": "lengths",
    "num_samples": "num_samples",
    "beam_width": "beam_width",
    "kv_cache_bytes": "pool (bytes)",
    "duration_s": "duration_s",
    "measure_from_s": "measure_from_s",
    "measure_to_s": "measure_to_s",
    "metric": "searched metric",
    "threshold": "threshold",
}
"""Column -> its name in a refusal; all points have to agree in these."""
_OBJECTIVE = ("slo_ttft_s", "slo_tpot_s")
"""The same where the metric depends on it."""
_NOT_OPTIONS = {
    "_target_",
    "name",
    "request_rate",
    "seed",
    "duration_s",
    "path",
    "lengths.path",
    "num_samples",
    "beam_width",
}
"""Options of a workload that have a column, are the axis, or differ between machines."""
_SHOWN = 3


def main(argv: Sequence[str] | None = None) -> int:
    """Compare what the command line names.

    Args:
        argv: the arguments, by default those of the process.

    Returns:
        The exit status: 0, or 2 where there is nothing to compare, or what must not be.
    """
    options = _parser().parse_intermixed_args(argv)

    def action() -> int:
        frame = select(options.words)
        shown, paths = compare(
            frame, options.to, x=options.x, y=options.y, mix=options.mix, wide=options.wide, metrics=options.metrics
        )
        print(shown.text())
        print(*paths, sep="\n")
        return 0

    return command.run("kvbench.compare", action, "files that are written stay")


def select(words: Sequence[str]) -> pd.DataFrame:
    """Load folders; ``column=value[,value]`` after one keeps those of its points.

    Raises:
        KvbenchError: a folder has no results or none with these values, or is given twice.
    """
    chosen: dict[str, dict[str, list[str]]] = {}
    for word in words:
        column, equals, texts = word.partition("=")
        if not equals or Path(word).is_dir():
            if word in chosen:
                raise KvbenchError(f"{word} is given twice; one selection may take several values (panel=a,b)")
            chosen[word] = {}
        elif not chosen:
            raise KvbenchError(f"{word} selects points of the folder before it; give results/NAME first")
        else:
            chosen[list(chosen)[-1]][column] = texts.split(",")
    frame = load(chosen)
    keep = pd.Series(True, frame.index)
    for folder, columns in chosen.items():
        mine = frame["results"] == str(Path(folder))
        for column, values in columns.items():
            if column not in frame:
                raise KvbenchError(f"there is no column {column} in {folder}; docs/columns.md lists them")
            cells = frame[column].map(_text)
            if not (mine & keep & cells.isin(values)).any():
                there = ", ".join(dict.fromkeys(cells[mine & keep]))
                raise KvbenchError(f"{folder} has no such point with {column}={','.join(values)}; there is {there}")
            keep &= ~mine | cells.isin(values)
    return frame[keep]


def compare(
    frame: pd.DataFrame,
    folder: Path,
    *,
    x: str | None = None,
    y: str = "normalized_latency_mean_s",
    mix: bool = False,
    wide: bool = False,
    metrics: Sequence[str] = (),
) -> tuple[Table, list[Path]]:
    """Write ``compare.pdf``, ``.svg``, ``.png``, ``.md`` and ``.tex``.

    Args:
        frame: points, see ``select``.
        folder: where to.
        x: column of the horizontal axis; None: the one that series go along.
        y: metric that is drawn.
        mix: whether to draw what is not comparable.
        wide: as wide as a page, else as one column of two.
        metrics: columns of the table; none: ``y`` and the usual ones.

    Returns:
        The table, and the files.

    Raises:
        KvbenchError: the points are not comparable and ``mix`` is not set, or there is nothing to draw.
    """
    for option, name in (("-x", x), ("-y", y), *(("--metrics", each) for each in metrics)):
        if name is not None:
            _check_numbers(frame, name, option)
    x = x or comparison.axis(frame)
    if x is not None and frame.dropna(subset=[x, y]).empty:
        raise KvbenchError(f"no point has a number in both {x} and {y}; choose others with -x and -y")
    differing = list(differences(frame, x, y))
    if differing and not mix:
        more = f"; and {len(differing) - _SHOWN} more" if len(differing) > _SHOWN else ""
        raise KvbenchError(
            f"not comparable: {'; '.join(differing[:_SHOWN])}{more}.\n"
            "Select with column=value after a folder (panel=a, model=opt_13b), or draw it all the same with --mix."
        )
    notes = [f"Not comparable: {'; '.join(differing)}"] if differing else []
    notes += _unknown(frame) if frame["results"].nunique() > 1 else []
    wanted = {
        name: comparison.METRICS.get(name, comparison.titled(name)) for name in (metrics or [y, *comparison.METRICS])
    }
    shown = comparison.table(frame, x, wanted, *notes, over="" if differing else y)
    width_in = style.PAGE_IN if wide else style.COLUMN_IN
    figure = comparison.draw(frame, x, y, *notes, width_in=width_in)
    folder.mkdir(parents=True, exist_ok=True)
    return shown, style.save(figure, folder, "compare") + shown.save(folder, "compare")


def differences(frame: pd.DataFrame, x: str | None, y: str) -> Iterator[str]:
    """Why points cannot be compared, in words: what they ought to have in common, and have not."""
    simulated = frame["runner"] == SIMULATED
    if simulated.any() and not simulated.all():
        yield f"simulated beside measured ({_listed(frame['runner'][~simulated])})"
    asked = {name: name for name in _OBJECTIVE} if y.removeprefix("steady_").startswith(("slo_", "goodput_")) else {}
    for column, name in (CONDITIONS | asked).items():
        if column != x and frame[column].nunique(dropna=False) > 1:
            yield f"{name} is {_listed(frame[column])}"
    slabs = frame["system"].str.startswith("fastertransformer")  # an engine of its own, so costs of its own
    for costs in (frame["costs"][slabs], frame["costs"][~slabs]):
        if costs.nunique() > 1:
            yield f"costs are {_listed(costs)}"
    if frame["workload"].nunique() == 1:
        yield from _other_requests(frame)


def _other_requests(frame: pd.DataFrame) -> Iterator[str]:
    """What differs in workloads without having a column: their options, and the files they read."""
    found: dict[str, set[str]] = {}
    known: list[set[str]] = []
    has_one_source = frame["workload_source"].nunique() == 1
    for _, config, manifest in _origins(frame):
        options = {key: each for key, each in leaves(config.get("workload", {})) if not key.endswith("data_dir")}
        if "inputs" in manifest and has_one_source:
            options["files"] = ", ".join(sorted({each[:14] for each in manifest["inputs"].values()}))
        known.append(set(options))
        for key, each in options.items():
            found.setdefault(key, set()).add(str(each))
    for key in sorted(set.intersection(*known) - _NOT_OPTIONS) if known else ():
        if len(found[key]) > 1:
            yield f"workload.{key} is {_listed(sorted(found[key]))}"


def _origins(frame: pd.DataFrame) -> Iterator[tuple[pd.Series[Any], dict[str, Any], dict[str, Any]]]:
    """Configuration and manifest of a point of every system and panel; empty where they are not kept."""
    for _, row in frame.groupby(["results", "panel", "system"], dropna=False, observed=True).head(1).iterrows():
        results = Results(row["results"])
        yield row, results.config(row) if results.has_config(row) else {}, results.manifest(row)


def _check_numbers(frame: pd.DataFrame, column: str, option: str) -> None:
    if column not in frame:
        raise KvbenchError(f"there is no column {column}; docs/columns.md lists them")
    cells = frame[column]
    if not pd.api.types.is_numeric_dtype(cells) or pd.api.types.is_bool_dtype(cells):
        what = "yes or no" if pd.api.types.is_bool_dtype(cells) else "text"
        raise KvbenchError(f"{option} needs numbers, and {column} is {what}; docs/columns.md lists every column's type")
    if cells.isna().all():
        raise KvbenchError(f"no point has a number in {column}; choose another column with {option}")


def _unknown(frame: pd.DataFrame) -> list[str]:
    folders = [str(row["results"]) for row, config, _ in _origins(frame) if not config]
    names = ", ".join(Path(each).name for each in dict.fromkeys(folders))
    return [f"Options of the workload are not kept in {names}, so not compared"] if names else []


def _text(cell: Any) -> str:
    return "unset" if pd.isna(cell) else f"{cell:g}" if isinstance(cell, float) else str(cell)


def _listed(cells: pd.Series[Any] | Sequence[str]) -> str:
    texts = list(dict.fromkeys(_text(each) for each in cells))
    more = f" and {len(texts) - 4} more" if len(texts) > 4 else ""
    return " / ".join(texts[:4]) + more


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m kvbench.compare",
        description="Put points of any experiments into one figure (PDF, SVG, PNG) and one table (Markdown, LaTeX).",
    )
    parser.add_argument(
        "words", metavar="results/NAME [column=value[,value] ...]", nargs="+", help="folders, and which of their points"
    )
    parser.add_argument("-x", help="column of the horizontal axis; by default the one that changes: the rate, ...")
    parser.add_argument("-y", default="normalized_latency_mean_s", help="metric that is drawn (%(default)s)")
    parser.add_argument(
        "--metrics", type=lambda text: text.split(","), default=(), help="columns of the table: a,b,..."
    )
    parser.add_argument("--mix", action="store_true", help="draw what is not comparable, too; the figure says why")
    parser.add_argument("--wide", action="store_true", help="as wide as a page; else as one column of two")
    parser.add_argument("--to", type=Path, default=Path("results/compare"), help="folder of the files (%(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
