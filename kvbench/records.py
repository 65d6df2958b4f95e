"""Columns in, Parquet out. Knows no figure and no metric."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvbench.core import KvbenchError, Sequence

Columns = dict[str, NDArray[np.generic]]


REQUEST_COLUMNS: dict[str, type[np.generic]] = {
    "id": np.int32,
    "arrival_s": np.float64,
    "prompt_len": np.int32,
    "output_len": np.int32,
    "num_seqs": np.int32,
    "first_token_s": np.float64,
    "finish_s": np.float64,
    "num_preemptions": np.int32,
    "recomputed_tokens": np.int32,
    "preempted_s": np.float64,
}


@dataclass(slots=True)
class Record:
    """What one run measured, raw.

    Attributes:
        steps: one row per iteration: ``end_s``, ``seconds``, ``num_running``, ``num_waiting``, ``num_prefills``,
            ``num_preempted``, ``prefill_tokens``, ``context_len`` (tokens), and in slots ``token_states``,
            ``reserved``, ``overreserved``, ``padding``, ``cached``, ``pinned``, ``free`` (they sum to the pool) and
            ``largest_free``; beside them ``num_seqs`` (streams that run), and in slots ``shared`` (saved by sharing),
            ``copied``, ``swapped_out`` and ``swapped_in`` (before the iteration), and what preemptions cost: tokens
            ``recomputed``, and seconds ``recompute_s`` and ``swap_s``. What a scheduler decides without an iteration,
            because nobody is left to compute, is in the next row.
        requests: one row per request: ``id``, ``arrival_s``, ``prompt_len``, ``output_len``, ``num_seqs``,
            ``first_token_s``, ``finish_s`` (NaN: never), ``num_preemptions``, ``recomputed_tokens``, ``preempted_s``
            (between losing its memory and regaining its place), ``rejected``.
    """

    steps: Columns
    requests: Columns


def request_columns(sequences: Iterable[Sequence]) -> Columns:
    """One row per sequence, in the order given; what never happened is NaN."""
    seqs = list(sequences)
    requests = [seq.request for seq in seqs]
    return request_table(
        [request.id for request in requests],
        [request.arrival_s for request in requests],
        [request.prompt_len for request in requests],
        [seq.final_len - seq.request.prompt_len for seq in seqs],
        [request.num_seqs for request in requests],
        [seq.first_token_s for seq in seqs],
        [seq.finish_s for seq in seqs],
        [seq.num_preemptions for seq in seqs],
        [seq.recomputed_tokens for seq in seqs],
        [seq.preempted_s for seq in seqs],
    )


def request_table(*columns: ArrayLike) -> Columns:
    """The columns of ``Record.requests`` but the last, in their order; a time below 0 is one that never came."""
    table: Columns = {}
    for (name, kind), column in zip(REQUEST_COLUMNS.items(), columns, strict=True):
        table[name] = np.array(column, kind)
    for name in ("first_token_s", "finish_s"):
        times = table[name].astype(np.float64, copy=False)
        times[times < 0] = np.nan
    table["rejected"] = np.isnan(table["finish_s"])
    return table


def write_parquet(
    path: Path, columns: Mapping[str, NDArray[np.generic]], metadata: Mapping[str, str] | None = None
) -> None:
    """Write columns of equal length to ``path``, compressed; ``metadata`` goes into the file's schema."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    def arrow(column: NDArray[np.generic]) -> pa.Array:
        # Not pa.array(): that imports pandas, which a simulated run does not need.
        packed = column.dtype == np.bool_
        values = np.packbits(column.astype(np.bool_), bitorder="little") if packed else np.ascontiguousarray(column)
        return pa.Array.from_buffers(pa.from_numpy_dtype(column.dtype), len(column), [None, pa.py_buffer(values)])

    table = pa.table({name: arrow(column) for name, column in columns.items()}, metadata=metadata)
    # Numbers that rarely repeat: a dictionary would cost memory and make the file larger.
    pq.write_table(table, path, compression="zstd", use_dictionary=False, row_group_size=1 << 16)


def read_parquet(path: Path) -> Columns:
    """The columns of a file ``write_parquet`` wrote.

    Raises:
        KvbenchError: it is not whole.
    """
    import pyarrow.parquet as pq

    table = _read(pq.read_table, path)
    return {name: table[name].to_numpy() for name in table.column_names}


def read_metadata(path: Path) -> dict[str, str]:
    """The ``metadata`` of a file ``write_parquet`` wrote.

    Raises:
        KvbenchError: it is not whole.
    """
    import pyarrow.parquet as pq

    schema = _read(pq.read_schema, path)
    return {key.decode(): value.decode() for key, value in (schema.metadata or {}).items()}


def _read(read: Callable[[Path], Any], path: Path) -> Any:
    import pyarrow as pa

    try:
        return read(path)
    except (pa.ArrowException, OSError) as error:
        raise damaged(path) from error


def damaged(path: Path) -> KvbenchError:
    """What to say of a point's file that cannot be read."""
    if not path.parent.is_dir():
        return KvbenchError(f"{path} does not exist: only the summary was kept; run the experiment")
    what = "is cut or garbled" if path.exists() else "does not exist"
    return KvbenchError(f"{path} {what}; delete {path.parent} and run the same command again")
