"""The points of a report: those of one folder of results, or of several that can be compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from kvbench.core import KvbenchError
from kvbench.figures import comparison, conditions
from kvbench.metrics import METRICS
from kvbench.report.tables import Row, rows_of
from kvbench.results import Results
from kvbench.tables import select

_KEPT = ("config.yaml", "manifest.json", "requests.parquet")
"""What a point's folder has in any case."""
_GOODPUT = next(name for name in METRICS if name.startswith("goodput_"))
"""The metric for which most has to agree."""


class Home(NamedTuple):
    """Where a point is kept.

    Attributes:
        results: the folder of results.
        row: the point in its summary.
    """

    results: Results
    row: Row

    @property
    def manifest(self) -> Row:
        """Empty where it was not kept."""
        return self.results.manifest(self.row)

    @property
    def config(self) -> Row:
        """Empty where it was not kept."""
        return self.results.config(self.row) if self.results.has_config(self.row) else {}


class Gathered(NamedTuple):
    """What a report is made of.

    Attributes:
        frame: the points, loaded.
        rows: the same; of several folders ``results`` says which, and ``point`` begins with it.
        folders: name -> results, whose summary are the points that were selected.
        homes: ``point`` -> where it is kept.
        notes: what is left out, and what should not be compared.
        over: the metric whose ratios compare several folders; empty for none.
    """

    frame: pd.DataFrame
    rows: list[Row]
    folders: dict[str, Results]
    homes: dict[str, Home]
    notes: list[str]
    over: str

    @property
    def title(self) -> str:
        """The folders' names."""
        return ", ".join(self.folders)

    def named(self, folder: str, what: str) -> str:
        """``what`` as it is called in this report: with its folder where there are several."""
        return f"{folder}/{what}" if len(self.folders) > 1 else what


def gather(words: Sequence[str | Path], *, mix: bool = False) -> Gathered:
    """Load folders, and of each the points that the ``column=value`` after it select.

    Args:
        words: see ``kvbench.tables.select``.
        mix: whether to put together what cannot be compared.

    Raises:
        KvbenchError: a folder has no results, or several cannot be compared and ``mix`` is not set.
    """
    frame = select(list(map(str, words)))
    if frame.empty:
        raise KvbenchError(f"{' and '.join(frame['results'].cat.categories) or words[0]} hold no point; run it first")
    names = comparison.folder_names(frame["results"])
    several = len(names) > 1
    refused = conditions.check(frame, comparison.axis(frame), _GOODPUT, mix=mix) if several else []
    folders: dict[str, Results] = {}
    homes: dict[str, Home] = {}
    rows: list[Row] = []
    notes = [f"{each}." for each in refused]
    for path, name in names.items():
        results = folders[name] = Results(path)
        mine = frame[frame["results"] == path]
        results.summary = results.summary[results.summary["point"].isin(set(mine["point"]))]
        for row in rows_of(mine.drop(columns="results")):
            point = f"{name}/{row['point']}" if several else str(row["point"])
            homes[point] = Home(results, row)
            rows.append({**row, "point": point, **({"results": name} if several else {})})
        notes += _lacking(results, name if several else "This folder")
    mixed = any(each.startswith(conditions.REFUSED) for each in refused)
    return Gathered(frame, rows, folders, homes, notes, "" if mixed or not several else "normalized_latency_mean_s")


def _lacking(results: Results, name: str) -> list[str]:
    """What points should have left and have not, in words."""
    points = list(results.summary["point"].unique())
    if not (results.path / "points").is_dir():
        return [f"{name} keeps summaries only: no runs over time, memory maps and configurations of it are here."]
    lacking = [each for each in points if not all((results.path / "points" / each / one).is_file() for one in _KEPT)]
    if not lacking:
        return []
    more = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
    return [
        f"{name} has lost files of {len(lacking)} of {len(points)} points ({lacking[0]}{more}): what they said is left "
        "out. Delete those folders in points/ and run the same command again."
    ]


def manifests(gathered: Gathered) -> Mapping[str, Row]:
    """The manifest of every point whose manifest was kept."""
    return {point: found for point, home in gathered.homes.items() if (found := home.manifest)}


def configs(gathered: Gathered) -> Mapping[str, Row]:
    """The configuration of every point whose configuration was kept."""
    return {point: found for point, home in gathered.homes.items() if (found := home.config)}
