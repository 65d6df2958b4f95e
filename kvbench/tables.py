"""Results as pandas tables with typed columns, those of ``kvbench.schema``: what ``kvbench.load`` returns."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import pyarrow as pa

from kvbench.core import KvbenchError
from kvbench.records import read_parquet
from kvbench.results import Results
from kvbench.schema import TABLES, VERSION, Column

Folders = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


def load(folders: Folders, table: str = "summary") -> pd.DataFrame:
    """See ``kvbench.load``."""
    if table not in [*TABLES]:  # whatever it is
        raise KvbenchError(f"there is no table {table!r}; choose from {', '.join(TABLES)}")
    paths = [folders] if isinstance(folders, str | os.PathLike) else list(_each(folders))
    if not paths:
        raise KvbenchError("no folder of results is given; give results/NAME, or several")
    columns = TABLES[table][1]
    frames = [_load(Results(Path(path)), table, columns) for path in paths]
    keys = ["results"] if table == "summary" else ["results", "point"]
    unknown = list(dict.fromkeys(name for frame in frames for name in frame if name not in {*keys, *columns}))
    missing = [name for name in columns if any(name not in frame for frame in frames)]
    whole = pd.concat([_complete(frame, columns) for frame in frames], ignore_index=True)
    whole = whole[[*keys, *columns, *unknown]].astype(dict.fromkeys(keys, "category"))
    whole.attrs = {
        "schema": VERSION,
        "units": {name: column.unit for name, column in columns.items()},
        "missing": missing,
        "unknown": unknown,
    }
    return whole


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
            cells = frame[column].map(cell_text)
            if not (mine & keep & cells.isin(values)).any():
                there = ", ".join(dict.fromkeys(cells[mine & keep]))
                raise KvbenchError(f"{folder} has no such point with {column}={','.join(values)}; there is {there}")
            keep &= ~mine | cells.isin(values)
    return frame[keep]


def cell_text(cell: Any) -> str:
    """A cell as it is typed: whole numbers without a point, "unset" for what does not exist."""
    return "unset" if pd.isna(cell) else f"{cell:g}" if isinstance(cell, float) else str(cell)


def _each(folders: Iterable[str | os.PathLike[str]]) -> Iterable[str | os.PathLike[str]]:
    if not isinstance(folders, Iterable):
        raise KvbenchError(f"{folders!r} is no folder of results; give results/NAME, or several")
    for folder in folders:
        if not isinstance(folder, str | os.PathLike):
            raise KvbenchError(f"{folder!r} is no folder of results; give results/NAME, or several")
        yield folder


def _load(results: Results, table: str, columns: Mapping[str, Column]) -> pd.DataFrame:
    summary = results.summary
    if lacking := [name for name in ("system", "point") if name not in summary]:
        raise KvbenchError(f"{results.path / 'summary.csv'} is not kvbench's: it has no column {' and '.join(lacking)}")
    _check_version(results, summary)
    if table == "summary":
        frame = _typed(summary, columns, results.path / "summary.csv")
    else:
        frame = _records(results, summary, "requests" if table == "requests" else "steps")
    frame.insert(0, "results", str(results.path))
    return frame


def _records(results: Results, summary: pd.DataFrame, table: Literal["requests", "steps"]) -> pd.DataFrame:
    for point in summary["point"].unique():
        path = results.path / "points" / point / f"{table}.parquet"
        if not path.is_file():
            why = "the point was run with records=summary; run it with records=full"
            if not path.parent.is_dir():
                why = "only the summary was kept; run the experiment"
            raise KvbenchError(f"{path} does not exist: {why}")
    try:
        frame: pd.DataFrame = results.dataset(table).to_table().to_pandas()
    except (pa.ArrowException, OSError):
        for point in summary["point"].unique():
            read_parquet(results.path / "points" / point / f"{table}.parquet")  # names the one that is not whole
        raise
    frame.insert(0, "point", frame.pop("point"))
    return frame


def _check_version(results: Results, summary: pd.DataFrame) -> None:
    """All points of a summary were written by the same sources, so that one manifest speaks for all."""
    if summary.empty:
        return
    version = results.manifest(summary.iloc[0]).get("schema", 1)
    if version > VERSION:
        raise KvbenchError(
            f"{results.path} has schema version {version}, this kvbench reads up to {VERSION}; update kvbench"
        )


def _typed(summary: pd.DataFrame, columns: Mapping[str, Column], path: Path) -> pd.DataFrame:
    typed = {}
    for name, cells in summary.items():
        column = columns.get(str(name))
        try:
            typed[name] = cells if column is None else cells.astype(pd.api.types.pandas_dtype(column.dtype))
        except (TypeError, ValueError):
            kind = "numbers" if column and column.dtype in ("Int64", "float64") else "flags"
            raise KvbenchError(f"{path}: column {name} should hold {kind}, and does not") from None
    return pd.DataFrame(typed)


def _complete(frame: pd.DataFrame, columns: Mapping[str, Column]) -> pd.DataFrame:
    """With the columns that it lacks, empty; integers then need a type that has room for nothing."""
    lacking = {
        name: pd.Series(pd.NA, frame.index, dtype="Int32")
        if column.dtype == "int32"
        else pd.Series(float("nan"), frame.index, dtype=column.dtype)
        for name, column in columns.items()
        if name not in frame
    }
    return pd.concat([frame, pd.DataFrame(lacking, frame.index)], axis=1)
