"""What a request must be to be served, and what happens to rows that are not.

Invalid is a row with a missing, unreadable or infinite number, an arrival below 0 or before that of a row above it, a
prompt or an output that is not a whole number of at least one token, or a prompt and output longer together than the
model allows.

* ``error``: the first such row is an error that names it.
* ``drop``: such rows are left out and counted. Of rows out of order the later one goes.
* ``clip``: as ``drop``, but what can be repaired is, and counted: an output too long for the model is shortened where
  the prompt leaves room for one token, and rows out of order are sorted.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvbench.core import KvbenchError
from kvbench.workloads.base import FloatArray, IntArray, Invalid, one_of, whole
from kvbench.workloads.rows import Column, Rows

_REMEDY = "correct it, or leave such rows out with workload.invalid=drop"


@dataclass(frozen=True, slots=True)
class Valid:
    """Requests that can be served; ``arrival_s`` ascends, and is empty where the rows had no arrivals.

    ``kept`` says which rows they were.
    """

    arrival_s: FloatArray
    prompt_len: IntArray
    output_len: IntArray
    num_dropped: int
    num_clipped: int
    kept: IntArray


def enforce(rows: Rows, invalid: Invalid, max_model_len: int, strict: bool = False) -> Valid:
    """The rows that can be served, under one of the three rules above.

    Args:
        rows: what was read.
        invalid: the rule.
        max_model_len: tokens of prompt and output the model can hold together.
        strict: whether a request must stay below that instead of reaching it, as the paper's trace generator asks.

    Raises:
        KvbenchError: an invalid row under ``error``; no row left; a rule or limit that is none.
    """
    one_of("invalid", invalid, ("error", "drop", "clip"))
    limit = whole("max_model_len", max_model_len, least=2) - strict
    arrival = np.zeros(len(rows)) if rows.arrival is None else rows.arrival.values
    prompt, output = rows.prompt.values, rows.output.values
    well_formed = np.isfinite(arrival) & (arrival >= 0) & _whole(prompt) & _whole(output)
    fits = prompt + output <= limit
    in_order = _in_order(arrival, well_formed & fits)
    if invalid == "error" and not (good := well_formed & fits & in_order).all():
        raise KvbenchError(_complaint(rows, int(np.argmin(good)), limit))
    clipped = np.zeros(len(rows), dtype=bool)
    if invalid == "clip":
        clipped = well_formed & ~fits & (prompt < limit)
        output = np.where(clipped, limit - prompt, output)
        kept = well_formed & (fits | clipped)
        clipped |= kept & ~_in_order(arrival, kept)
    else:
        kept = well_formed & fits & in_order
    if not kept.any():
        first = _complaint(rows, 0, limit).partition(";")[0]
        raise KvbenchError(f"none of the {len(rows)} rows of {rows.origin} can be served, for example {first}")
    order = np.flatnonzero(kept)
    order = order[np.argsort(arrival[order], kind="stable")]
    return Valid(
        arrival[order] if rows.arrival is not None else np.empty(0),
        prompt[order].astype(np.int64),
        output[order].astype(np.int64),
        num_dropped=len(rows) - len(order),
        num_clipped=int(clipped.sum()),
        kept=order,
    )


def _whole(values: FloatArray) -> NDArray[np.bool_]:
    whole: NDArray[np.bool_] = np.isfinite(values) & (values >= 1) & (values == np.floor(values))
    return whole


def _in_order(arrival: FloatArray, among: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Which rows arrive no earlier than every one of ``among`` above them."""
    latest = np.maximum.accumulate(np.where(among, arrival, -np.inf))
    return np.greater_equal(arrival, latest)


def _complaint(rows: Rows, row: int, limit: int) -> str:
    """What is wrong with a row: the first fault, with its value, its limit and its remedy."""
    where = f"{rows.origin}, {rows.unit} {rows.numbers[row]}"
    arrival, prompt, output = rows.arrival, rows.prompt, rows.output
    if arrival is not None and not np.isfinite(arrival.values[row]):
        said = arrival.said(row)
        return f"{where}: {arrival.name} is {said}, not a finite time{_dates(said)}; {_REMEDY}"
    if arrival is not None and arrival.values[row] < 0:
        return f"{where}: {arrival.name} is {arrival.said(row)}, below 0; {_REMEDY}"
    for column in (prompt, output):
        if not _whole(column.values[row : row + 1])[0]:
            return f"{where}: {column.name} is {column.said(row)}, not a whole number of 1 token or more; {_REMEDY}"
    if (total := prompt.values[row] + output.values[row]) > limit:
        return (
            f"{where}: {prompt.name} {prompt.said(row)} + {output.name} {output.said(row)} = {total:.12g} tokens, but "
            f"the model allows {limit}; workload.invalid=clip shortens the output, drop leaves such rows out"
        )
    assert arrival is not None, "a row without arrival cannot be out of order"
    return f"{where}: {_before(arrival, row)}; sort the rows, or let workload.invalid=clip do it (drop leaves them out)"


def _dates(said: str) -> str:
    """A remedy for what looks like a date."""
    return " (workload.arrival_as=timestamps reads dates)" if re.match(r"'\d{4}-\d\d-\d\d", said) else ""


def _before(arrival: Column, row: int) -> str:
    above = np.nanmax(np.where(np.isfinite(arrival.values[:row]), arrival.values[:row], np.nan))
    return f"{arrival.name} is {arrival.said(row)}, before the {above:.12g} of a row above it"
