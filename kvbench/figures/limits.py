"""What kept more requests from running: the reasons for a queue, and the share of the time that each held."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from kvbench.records import Columns
from kvbench.results import Results


def limits(steps: Columns, scheduler: Mapping[str, Any]) -> dict[str, float]:
    """Why no more requests ran: reason -> share of the time in which anything ran, largest first.

    * ``memory``: requests wait, and a longest sequence would not fit the largest free piece.
    * ``batch limit``: it would, but ``max_num_seqs`` run.
    * ``batch not over``: it would, but the batch has to end first (request-level scheduling).
    * ``tokens per iteration``: it would, but the iteration's prompts are as long as they may be.
    * ``no queue``: none waits.

    Args:
        steps: of a point.
        scheduler: its configuration.
    """
    names = ("num_waiting", "largest_free", "num_running", "seconds")
    num_waiting, largest_free, num_running, seconds = (np.asarray(steps[name], np.float64) for name in names)
    waits = num_waiting > 0
    fits = largest_free >= scheduler["max_model_len"]
    full = num_running >= scheduler["max_num_seqs"]
    rest = "batch not over" if "max_padded_len" in scheduler else "tokens per iteration"
    reasons = {
        "memory": waits & ~fits,
        "batch limit": waits & fits & full,
        rest: waits & fits & ~full,
        "no queue": ~waits,
    }
    total = float(seconds.sum())
    shares = {reason: float(seconds[where].sum()) / total for reason, where in reasons.items()} if total else {}
    return dict(sorted(((k, v) for k, v in shares.items() if v > 0), key=lambda each: -each[1]))


def limited_by(results: Results, points: pd.DataFrame) -> str:
    """The two reasons that count most, in words, over all repeats of a point."""
    found: list[dict[str, float]] = []
    for _, row in points.iterrows():
        if (results.folder(row) / "steps.parquet").is_file():
            found.append(limits(results.steps(row), results.config(row)["scheduler"]))
    reasons = {reason for shares in found for reason in shares}
    means = {reason: float(np.mean([shares.get(reason, 0.0) for shares in found])) for reason in reasons}
    ranked = sorted(means.items(), key=lambda each: (-each[1], each[0]))
    said = [f"{reason} {100 * share:.0f} %" for reason, share in ranked if share >= 0.05]
    return ", ".join(said[:2]) or "unknown (records=summary)"
