"""Requests as a file states them, read but not yet believed."""

from __future__ import annotations

import csv
import json
import warnings
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from kvbench.core import KvbenchError
from kvbench.workloads.base import FloatArray, IntArray
from kvbench.workloads.files import open_text


@dataclass(frozen=True, slots=True)
class Column:
    """One column as numbers, NaN where there is none.

    Attributes:
        name: what the file calls it.
        values: one float per row.
        texts: what the file holds, kept only where some value is no number, for the message.
    """

    name: str
    values: FloatArray
    texts: Seq[object] | None = None

    def said(self, row: int) -> str:
        """What stands in a row, as a message quotes it."""
        if self.texts is not None:
            text = self.texts[row]
            return "missing" if text is None or text == "" else repr(text)
        return f"{self.values[row]:.12g}"


@dataclass(frozen=True, slots=True)
class Rows:
    """Unchecked requests, or unchecked pairs of lengths where there is no ``arrival``.

    Attributes:
        origin: the file, for messages.
        unit: what a row is called there: a line of a text file, an entry of a list.
        numbers: the line or entry of each row.
        prompt: prompt lengths, in tokens.
        output: output lengths, in tokens.
        arrival: arrival times, in seconds (`read_csv` and `read_json_lines` give them as the file has them).
    """

    origin: str
    unit: str
    numbers: IntArray
    prompt: Column
    output: Column
    arrival: Column | None = None

    def __len__(self) -> int:
        return len(self.numbers)


def head(rows: Rows, count: int) -> Rows:
    """The first so many rows."""

    def cut(column: Column) -> Column:
        texts = None if column.texts is None else column.texts[:count]
        return replace(column, values=column.values[:count], texts=texts)

    arrival = None if rows.arrival is None else cut(rows.arrival)
    return replace(
        rows, numbers=rows.numbers[:count], prompt=cut(rows.prompt), output=cut(rows.output), arrival=arrival
    )


def from_arrays(origin: str, prompt_len: IntArray, output_len: IntArray) -> Rows:
    """Pairs that never were text; entries count from 1."""
    numbers = np.arange(1, len(prompt_len) + 1)
    prompt, output = prompt_len.astype(np.float64), output_len.astype(np.float64)
    return Rows(origin, "entry", numbers, Column("prompt", prompt), Column("output", output))


def read_csv(path: Path, names: Seq[str], timestamps: bool = False) -> Rows:
    """Rows of a CSV file with a header line; other columns than those named are ignored, so are blank lines.

    Args:
        path: the file, plain or gzipped.
        names: the columns of arrivals, prompts and outputs, or of prompts and outputs only.
        timestamps: whether arrivals are dates with a time (UTC) instead of numbers; then they become seconds since
            the first of them.

    Raises:
        KvbenchError: unreadable, empty, no such columns, no rows.
    """
    wanted = ",".join(names)
    try:
        with open_text(path) as file:
            reader = csv.reader(file)
            header = [name.strip() for name in next(reader, [])]
            if not header:
                raise KvbenchError(f"{path} is empty; it needs the header line {wanted} and a row per request")
            where = _positions(path, header, names)
            lines, rows = [], []
            for row in reader:
                if any(field.strip() for field in row[len(header) :]):
                    raise KvbenchError(
                        f"{path}, line {reader.line_num}: {len(row)} fields under {len(header)} columns "
                        f"({','.join(header)}); quote fields that have commas in them, or mend the row"
                    )
                if row:
                    rows.append(row)
                    lines.append(reader.line_num)
    except csv.Error as error:
        raise KvbenchError(f"cannot read {path}: {error}; it must be a CSV file with the columns {wanted}") from error
    width = max(where) + 1
    for row in rows:
        if len(row) < width:
            row.extend([""] * (width - len(row)))
    return _rows(path, "line", lines, names, [[row[i] for row in rows] for i in where], timestamps)


def read_json_lines(path: Path, names: Seq[str]) -> Rows:
    """Rows of a file with one JSON object per line; arguments and errors as for `read_csv`."""
    lines: list[int] = []
    columns: list[list[object]] = [[] for _ in names]
    with open_text(path) as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise KvbenchError(f"{path}, line {number}: not a JSON object; fetch or copy the file again") from error
            if not lines:
                _positions(path, list(entry) if isinstance(entry, dict) else [], names)
            lines.append(number)
            for name, column in zip(names, columns, strict=True):
                column.append(entry.get(name) if isinstance(entry, dict) else None)
    return _rows(path, "line", lines, names, columns, False)


def _positions(path: Path, header: list[str], names: Seq[str]) -> list[int]:
    """Where the named columns stand."""
    missing = [name for name in names if name not in header]
    if missing:
        found = ", ".join(header)[:120] or "none"
        wanted = f"it needs a header line with {','.join(names)}"
        other = "; workload.columns.arrival=NAME and so on name yours" if len(names) == 3 else ""
        raise KvbenchError(f"{path} has no column {', '.join(missing)}; {wanted} (found: {found}){other}")
    return [header.index(name) for name in names]


def _rows(
    path: Path, unit: str, numbers: list[int], names: Seq[str], texts: Seq[Seq[object]], timestamps: bool
) -> Rows:
    if not numbers:
        raise KvbenchError(f"{path} has no requests; it needs a row per request with {','.join(names)}")
    arrival = None
    if len(names) == 3:
        arrival = Column(names[0], *(_seconds if timestamps else _numbers)(texts[0]))
    prompt, output = (Column(name, *_numbers(column)) for name, column in zip(names[-2:], texts[-2:], strict=True))
    return Rows(str(path), unit, np.array(numbers, dtype=np.int64), prompt, output, arrival)


def _numbers(texts: Seq[object]) -> tuple[FloatArray, Seq[object] | None]:
    """A column as floats; with its texts where one of them is no number."""
    try:
        values = np.array(texts, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        values = np.empty((0, 0))
    if values.ndim != 1:
        values = np.array([_number(text) for text in texts], dtype=np.float64)
    return values, texts if np.isnan(values).any() else None


def _number(text: object) -> float:
    try:
        return float(text)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return float("nan")


def _seconds(texts: Seq[object]) -> tuple[FloatArray, Seq[object] | None]:
    """A column of UTC timestamps as seconds since the first; with its texts where one of them is none."""
    plain = [str(text).strip().removesuffix("Z").removesuffix("+00:00") for text in texts]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # numpy only warns of another time zone
        try:
            times = np.array(plain, dtype="datetime64[ns]")
        except (ValueError, UserWarning):
            times = np.array([_time(text) for text in plain])
    valid = ~np.isnat(times)
    if not valid.any():
        return np.full(len(plain), np.nan), texts
    seconds = np.where(valid, (times - times[valid][0]).astype(np.int64) / 1e9, np.nan)
    return seconds, None if valid.all() else texts


def _time(text: str) -> np.datetime64:
    try:
        return np.datetime64(text, "ns")
    except (ValueError, UserWarning):
        return np.datetime64("NaT", "ns")
