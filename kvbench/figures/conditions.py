"""What points have to have in common so that their numbers say something of systems: requests, model, pool, costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from kvbench.core import KvbenchError
from kvbench.results import SIMULATED, Results, leaves
from kvbench.tables import cell_text

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
REFUSED = "Not comparable"
"""How a note begins of what was put together all the same."""
_SHOWN = 3


def check(frame: pd.DataFrame, x: str | None, y: str, *, mix: bool = False) -> list[str]:
    """Refuse what cannot be compared, or say why it should not be.

    Args:
        frame: a loaded summary.
        x: the column along which points differ.
        y: the metric that is compared.
        mix: whether to go on all the same.

    Returns:
        Sentences for a footnote; none where there is nothing to say.

    Raises:
        KvbenchError: the points are not comparable and ``mix`` is not set.
    """
    differing = list(differences(frame, x, y))
    if differing and not mix:
        more = f"; and {len(differing) - _SHOWN} more" if len(differing) > _SHOWN else ""
        raise KvbenchError(
            f"not comparable: {'; '.join(differing[:_SHOWN])}{more}.\n"
            "Select with column=value after a folder (panel=a, model=opt_13b), or go on all the same with --mix."
        )
    notes = [f"{REFUSED}: {'; '.join(differing)}"] if differing else []
    return notes + (_unknown(frame) if frame["results"].nunique() > 1 else [])


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
    folders = {folder: Results(Path(folder)) for folder in frame["results"].unique()}
    for _, row in frame.groupby(["results", "panel", "system"], dropna=False, observed=True).head(1).iterrows():
        results = folders[row["results"]]
        yield row, results.config(row) if results.has_config(row) else {}, results.manifest(row)


def _unknown(frame: pd.DataFrame) -> list[str]:
    folders = [str(row["results"]) for row, config, _ in _origins(frame) if not config]
    names = ", ".join(Path(each).name for each in dict.fromkeys(folders))
    return [f"Options of the workload are not kept in {names}, so not compared"] if names else []


def _listed(cells: pd.Series[Any] | Sequence[str]) -> str:
    texts = list(dict.fromkeys(cell_text(each) for each in cells))
    more = f" and {len(texts) - 4} more" if len(texts) > 4 else ""
    return " / ".join(texts[:4]) + more
