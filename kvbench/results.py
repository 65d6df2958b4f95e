"""The files of a results folder: ``summary.csv`` with one row for each point, and what each point left.

Figures, notebooks and users read results through ``Results``; nothing here runs anything.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml

from kvbench.core import KvbenchError
from kvbench.metrics import METRICS
from kvbench.records import Columns, damaged, read_parquet

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow.dataset as ds

POINT_COLUMNS = (
    "system", "allocator", "reservation", "scheduler", "copy_on_write", "block_size", "runner", "device", "hardware",
    "costs", "model", "workload", "workload_source", "decoding", "num_samples", "beam_width", "request_rate",
    "duration_s", "seed", "uses_true_lengths", "weights_bytes", "activation_bytes", "reserve_bytes", "kv_cache_bytes",
    "num_slots", "num_dropped", "num_clipped", "measure_from_s", "measure_to_s", "slo_ttft_s", "slo_tpot_s", *METRICS,
    "metric", "threshold", "capacity_req_per_s", "trace_capacity_req_per_s", "wall_s",
)  # fmt: skip
"""What ``summary.json`` of a point holds, in this order."""
COLUMNS = ("experiment", "panel", "repeat", *POINT_COLUMNS, "point")
"""The columns of ``summary.csv``; empty fields do not exist or are not a number. ``point`` is the folder's name."""
SIMULATED = "simulated"
"""Runner and device of what was not measured."""
TOGETHER = "manifests.json"
"""Point -> manifest, of results that are kept without the points' folders."""
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The one in C is ten times as fast; PyYAML may be built without it."""


def write_csv(path: Path, columns: Iterable[str], rows: Iterable[Mapping[str, object]]) -> None:
    """Write rows to ``path``, which never holds half of them. None and NaN are left empty, numbers are exact."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(columns), lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({key: "" if is_nothing(value) else value for key, value in row.items()})
    write_text(path, text.getvalue())


def write_text(path: Path, text: str) -> None:
    """Replace ``path`` in one go; an error names it."""
    part = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError as error:
        with suppress(OSError):
            part.unlink()
        raise OSError(error.errno, error.strerror, str(path)) from error


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """Replace ``path`` in one go; NaN becomes null, as JSON has none."""
    clean = {key: None if is_nothing(value) else value for key, value in content.items()}
    write_text(path, json.dumps(clean, indent=1, allow_nan=False) + "\n")


def is_nothing(value: object) -> bool:
    """Whether a value is None or NaN: what does not exist."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def leaves(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """The values of a configuration or a manifest, with dotted keys."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


class Results:
    """What one command left in ``results/<name>/``; a summary is read once.

    Args:
        path: that folder.

    Raises:
        KvbenchError: it holds no ``summary.csv``.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        if not (self.path / "summary.csv").is_file():
            raise KvbenchError(f"{self.path} holds no summary.csv; run the experiment first")

    @cached_property
    def summary(self) -> pd.DataFrame:
        """``summary.csv``: exactly the last command's points, one row each, in the order of the experiment.

        Raises:
            KvbenchError: it is not whole, or not kvbench's.
        """
        path = self.path / "summary.csv"
        summary = read_csv(path, ("point",), {"panel": "string", "point": "string"})
        if summary["point"].isna().any():  # the last column
            raise _garbled(path)
        return summary

    def folder(self, row: Mapping[str, Any] | pd.Series[Any]) -> Path:
        """The folder of a row's point."""
        return self.path / "points" / str(row["point"])

    def steps(self, row: Mapping[str, Any] | pd.Series[Any]) -> Columns:
        """One row per iteration; see ``kvbench.records.Record``.

        Raises:
            KvbenchError: the point was run with ``records=summary``.
        """
        path = self.folder(row) / "steps.parquet"
        if not path.is_file():
            raise KvbenchError(
                f"{path} does not exist: the point was run with records=summary; run it with records=full"
            )
        return read_parquet(path)

    def requests(self, row: Mapping[str, Any] | pd.Series[Any]) -> Columns:
        """One row per request; see ``kvbench.records.Record``.

        Raises:
            KvbenchError: they were not kept, or not whole.
        """
        return read_parquet(self.folder(row) / "requests.parquet")

    def dataset(self, name: Literal["requests", "steps"]) -> ds.Dataset:
        """The requests, or the iterations, of all the last command's points as one partitioned dataset.

        Nothing is read before it is asked for (``.to_table(columns=..., filter=...)``); the column ``point`` says whose
        a row is, as in the summary.
        """
        import pyarrow as pa
        import pyarrow.dataset as ds

        folder = self.path / "points"
        return ds.dataset(
            [str(folder / point / f"{name}.parquet") for point in self.summary["point"].unique()],
            format="parquet",
            partitioning=ds.partitioning(pa.schema([("point", pa.string())])),
            partition_base_dir=str(folder),
        )

    def config(self, row: Mapping[str, Any] | pd.Series[Any]) -> dict[str, Any]:
        """The resolved configuration.

        Raises:
            KvbenchError: it was not kept, or not whole.
        """
        return _mapping(self.folder(row) / "config.yaml", lambda text: yaml.load(text, _LOADER))

    def has_config(self, row: Mapping[str, Any] | pd.Series[Any]) -> bool:
        """Whether the point's configuration was kept."""
        return (self.folder(row) / "config.yaml").is_file()

    def manifest(self, row: Mapping[str, Any] | pd.Series[Any]) -> dict[str, Any]:
        """Where the numbers come from: key, inputs, capacity, versions, host, wall time; empty where it was not kept.

        The point's own, else the one in ``manifests.json``.
        """
        path = self.folder(row) / "manifest.json"
        if path.is_file():
            return _mapping(path, json.loads)
        return dict(self._manifests.get(str(row["point"]), {}))

    @cached_property
    def _manifests(self) -> dict[str, dict[str, Any]]:
        path = self.path / TOGETHER
        return _mapping(path, json.loads) if path.is_file() else {}


def read_csv(path: Path, columns: Iterable[str], dtype: Mapping[str, str] | None = None) -> pd.DataFrame:
    """A table that ``write_csv`` wrote.

    Args:
        path: of the file.
        columns: that it has to have.
        dtype: types of columns that are not to be guessed.

    Raises:
        KvbenchError: it is not whole, or has not these columns.
    """
    import pandas as pd

    try:
        table = pd.read_csv(path, dtype=dict(dtype or {}))
    except ValueError as error:  # pandas' own, and those of decoding, are such
        raise _garbled(path) from error
    if lacking := [name for name in columns if name not in table]:
        raise KvbenchError(f"{path} is not kvbench's: it has no column {' and '.join(lacking)}")
    return table


def _garbled(path: Path) -> KvbenchError:
    return KvbenchError(f"{path} is empty, cut or garbled; run the same command again")


def _mapping(path: Path, parse: Callable[[str], Any]) -> dict[str, Any]:
    """What a point's file of YAML or JSON says."""
    try:
        found = parse(path.read_text(encoding="utf-8"))
    except (ValueError, yaml.YAMLError, FileNotFoundError) as error:
        raise damaged(path) from error
    if not isinstance(found, dict):
        raise damaged(path)
    return found
