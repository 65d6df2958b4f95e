"""Columns in, Parquet out. Knows no figure and no metric."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvbench.core import Sequence

Columns = dict[str, NDArray[np.generic]]


@dataclass(slots=True)
class Record:
    """What one run measured, raw.

    Attributes:
        steps: one row per iteration: ``end_s``, ``seconds``, ``num_running``, ``num_waiting``, ``num_prefills``,
            ``num_preempted``, ``prefill_tokens``, ``context_len`` (tokens), and in slots ``token_states``, ``reserved``,
            ``overreserved``, ``padding``, ``cached``, ``pinned``, ``free`` (which sum to the pool), ``largest_free``.
        requests: one row per request: ``id``, ``arrival_s``, ``prompt_len``, ``output_len``, ``first_token_s``,
            ``finish_s`` (NaN where rejected), ``num_preemptions``, ``recomputed_tokens``, ``rejected``.
    """

    steps: Columns
    requests: Columns


def request_columns(sequences: Iterable[Sequence]) -> Columns:
    """One row per sequence, in the order given; what never happened is NaN."""
    seqs = list(sequences)
    count = len(seqs)

    def ints(values: Iterable[int]) -> NDArray[np.generic]:
        return np.fromiter(values, np.int32, count)

    def stamps(values: Iterable[float]) -> NDArray[np.generic]:
        column = np.fromiter(values, np.float64, count)
        column[column < 0] = np.nan
        return column

    finish_s = stamps(seq.finish_s for seq in seqs)
    return {
        "id": ints(seq.request.id for seq in seqs),
        "arrival_s": np.fromiter((seq.request.arrival_s for seq in seqs), np.float64, count),
        "prompt_len": ints(seq.request.prompt_len for seq in seqs),
        "output_len": ints(seq.request.output_len for seq in seqs),
        "first_token_s": stamps(seq.first_token_s for seq in seqs),
        "finish_s": finish_s,
        "num_preemptions": ints(seq.num_preemptions for seq in seqs),
        "recomputed_tokens": ints(seq.recomputed_tokens for seq in seqs),
        "rejected": np.isnan(finish_s),
    }


def write_parquet(path: Path, columns: Mapping[str, NDArray[np.generic]]) -> None:
    """Write columns of equal length to ``path``, compressed."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({name: pa.array(column) for name, column in columns.items()}), path, compression="zstd")


def read_parquet(path: Path) -> Columns:
    """The columns of a file ``write_parquet`` wrote."""
    import pyarrow.parquet as pq

    table = pq.read_table(path)
    return {name: table[name].to_numpy() for name in table.column_names}
