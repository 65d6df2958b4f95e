"""kvbench: what a KV-cache memory strategy does to throughput, latency and memory."""

from __future__ import annotations

import os
from collections.abc import Iterable
from importlib import import_module
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import pandas as pd

__version__ = "0.1.0"

# Read when torch is loaded. A thread that waits spins for some 0.2 ms, longer than the gaps inside a forward pass, then
# sleeps: one that sleeps at once costs a decode step up to 20 ms, one that spins on slows down everything beside it.
os.environ.setdefault("GOMP_SPINCOUNT", "20000")


def load(
    folders: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    table: Literal["summary", "requests", "steps"] = "summary",
) -> pd.DataFrame:
    """Results as a table: ``kvbench.load("results/fig_throughput")``, or of several folders.

    Args:
        folders: ``results/NAME``, one or several; column ``results`` says which of them a row is from.
        table: ``summary`` has a row for each point; ``requests`` and ``steps`` have one for each request and iteration
            of all the points, told apart by ``results`` and ``point``, as in the summary.

    Returns:
        Typed columns, as docs/columns.md lists them; what does not exist is missing. ``.attrs["units"]`` has their
        units, ``.attrs["missing"]`` the columns that an older folder lacks, ``.attrs["unknown"]`` those that are not
        kvbench's (they stay, untyped).

    Raises:
        kvbench.core.KvbenchError: there are no results, they are of a newer kvbench, or the points were run without
            keeping that table.
    """
    # By name, so that whoever asks for the version imports nothing else.
    frame: pd.DataFrame = import_module("kvbench.tables").load(folders, table)
    return frame
