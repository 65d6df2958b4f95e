"""What figures ask of ``summary.csv``: rows, curves, conditions. A row whose numbers are missing counts as not run."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pandas as pd

from kvbench.paper.claims import Claim
from kvbench.results import SIMULATED

Pairs = list[tuple[float, float]]

LATENCY = "normalized_latency_mean_s"
"""The latency that the paper plots (s/token)."""
PAPERS_PAIRS = {
    "sharegpt": "ShareGPT pairs of the authors' artifact",
    "alpaca": "Alpaca pairs of the authors' artifact",
    "wmt16": "WMT16 English-German",
}
"""Workload -> the source whose lengths are the paper's own."""
_NAMES = {"opt": "OPT", "llama": "LLaMA", "sharegpt": "ShareGPT", "alpaca": "Alpaca", "wmt16": "WMT16"}
"""How models and workloads are written."""
PUBLIC = ("sharegpt",)
"""Those of them that anybody can have; of the others only stand-ins can be compared."""


def select(summary: pd.DataFrame, **equal: Any) -> pd.DataFrame:
    """The rows in which every named column has the given value."""
    rows = summary
    for column, value in equal.items():
        rows = rows[rows[column] == value]
    return rows


def simulated(rows: pd.DataFrame) -> pd.DataFrame:
    """Those that were not measured."""
    return rows[rows["runner"] == SIMULATED]


def measured(rows: pd.DataFrame) -> pd.DataFrame:
    """Those of real runs."""
    return rows[rows["runner"] != SIMULATED]


def value(rows: pd.DataFrame, column: str) -> float | None:
    """Mean of a column over the rows (repeats of a point); None if no row has a number there."""
    mean = float(pd.to_numeric(rows[column]).mean()) if len(rows) else math.nan
    return None if math.isnan(mean) else mean


def curve(rows: pd.DataFrame, x: str, y: str) -> Pairs:
    """(x, mean of y over the rows with this x) in order of x; without the x that have no number."""
    means = rows.assign(**{y: pd.to_numeric(rows[y])}).groupby(x)[y].mean().dropna()
    return list(zip(means.index.astype(float).tolist(), means.tolist(), strict=True))


def systems(rows: pd.DataFrame) -> list[str]:
    """Systems that occur, each once."""
    return sorted(set(rows["system"]))


def difference(rows: pd.DataFrame, whose: str = "the paper's", /, **conditions: Any) -> str | None:
    """The first condition in which the rows are not as in the paper, in words; None if there is none.

    Args:
        rows: of one claim.
        whose: the conditions are, if not the paper's.
        conditions: column -> the paper's value; None stands for an empty cell.
    """
    for column, wanted in conditions.items():
        found = [None if pd.isna(cell) else cell for cell in rows[column].unique()]
        if found != [wanted]:
            return f"{column} is {_words(found)}, {whose} is {_words([wanted])}"
    return None


def obstacle(rows: pd.DataFrame, **conditions: Any) -> str | None:
    """Why kvbench's own expectation of a real run does not speak of these rows, in words; None if it does.

    Args:
        rows: of one claim.
        conditions: column -> the value for which the expectation was made.
    """
    if len(simulated(rows)):
        return SIMULATED
    return difference(rows, "the expectation's", **conditions) if len(rows) else None


def setting(model: str, hardware: str, workload: str) -> str:
    """What was served, where, and with which requests, as the paper writes it: "OPT-13B, A100-40GB, ShareGPT"."""
    family, _, size = model.partition("_")
    if family in _NAMES:
        model = f"{_NAMES[family]}-{size.upper()}"
    if gpus := re.fullmatch(r"([a-z]+\d+)_(\d+gb)(?:_x(\d+))?", hardware):
        hardware = f"{gpus[3]}x " * bool(gpus[3]) + f"{gpus[1]}-{gpus[2]}".upper()
    return f"{model}, {hardware}, {_NAMES.get(workload, workload.replace('_', ' '))}"


def other_lengths(rows: pd.DataFrame, workload: str) -> str | None:
    """Where the requests' lengths come from, if they are not the paper's own."""
    sources = sorted(set(rows["workload_source"].dropna()))
    return None if sources == [PAPERS_PAIRS.get(workload)] else f"lengths: {'; '.join(sources)}"


def noted(claim: Claim, what: str | None) -> Claim:
    """The claim with ``what`` in its note, unless that says it already."""
    if not what or what in claim.note:
        return claim
    return replace(claim, note="; ".join(part for part in (claim.note, what) if part))


def _words(values: Iterable[Any]) -> str:
    return ", ".join(
        "unset" if value is None else f"{value:g}" if isinstance(value, float) else str(value) for value in values
    )


def way(rows: pd.DataFrame) -> str:
    """How the numbers came about, in a word: "simulated", or the runners."""
    return _words(sorted(set(rows["runner"]))) or "measured"


def window(rows: pd.DataFrame) -> str:
    """The averaging window, or the windows."""
    windows = sorted(set(zip(rows["measure_from_s"], rows["measure_to_s"].fillna(math.inf), strict=True)))
    return ", ".join(f"{start:g}-{end:g} s" if math.isfinite(end) else f"{start:g} s-end" for start, end in windows)


def where(rows: pd.DataFrame) -> str:
    """What was served, and where it was measured if it was."""
    models, devices = (join.join(sorted(set(rows[column]))) for column, join in (("model", ", "), ("device", "; ")))
    return models if len(simulated(rows)) else f"{models}, measured on {devices}"


def footnote(rows: pd.DataFrame, *more: str) -> str:
    """What a reader must know of every number shown: simulated or not, with which costs, from which workload."""
    costs, sources = (sorted(set(rows[column].dropna())) for column in ("costs", "workload_source"))
    how = way(rows)
    parts = [f"{how.capitalize()} (costs: {_words(costs)})" if len(simulated(rows)) else f"Run by {how}"]
    parts.append(f"Lengths: {'; '.join(sources)}")  # a source has commas of its own
    return ". ".join([*parts, *more]) + "."
