"""The memory map of a finished run: what every slot is for at every iteration, as pictures and as rectangles."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvbench.core import KvbenchError
from kvbench.records import Columns, read_metadata, read_parquet, write_parquet

FILE = "memory_map.parquet"
VERSION = "1"
"""Of the file's schema: files of another are refused."""
Integers = NDArray[np.integer]


class Purpose(IntEnum):
    """What a slot is for: the ledger's classes. What nobody holds is free, cached and pinned included."""

    FREE = 0
    TOKEN_STATES = 1
    RESERVED = 2
    OVERRESERVED = 3
    PADDING = 4


RECTANGLE = np.dtype(
    [
        ("address", "<i4"),
        ("length", "<i4"),
        ("from_step", "<i4"),
        ("to_step", "<i4"),
        ("from_s", "<f8"),
        ("to_s", "<f8"),
        ("request", "<i4"),
        ("stream", "<i2"),
        ("position", "<i4"),
        ("purpose", "<i1"),
        ("num_holders", "<i2"),
        ("span", "<i4"),
    ]
)


class _Piece(NamedTuple):
    """Slots of one span over rows in which they have as many holders; ``span`` is the row of the first of these."""

    span: int
    from_step: int
    to_step: int
    num_holders: int
    address: int
    end: int


@dataclass(frozen=True, slots=True)
class MemoryMap:
    """Who held which slots, when.

    Attributes:
        num_slots: the pool; addresses are 0 to ``num_slots - 1``.
        block_size: the allocator's granule, in slots.
        spans: one row for each time that a stream held slots which follow each other: see ``docs/memory_map.md``.
        start_s: when each iteration began, by the run's clock.
        end_s: when it ended.
    """

    num_slots: int
    block_size: int
    spans: Columns
    start_s: NDArray[np.float64]
    end_s: NDArray[np.float64]

    @property
    def num_steps(self) -> int:
        """Iterations of the run."""
        return len(self.end_s)

    def step_at(self, seconds: ArrayLike) -> Integers:
        """The iteration that is computed at these times; -1 where none is."""
        times = np.asarray(seconds, np.float64)
        steps = np.searchsorted(self.end_s, times, side="right")
        found: Integers = np.where(steps < self.num_steps, steps, -1)
        return np.where((found >= 0) & (self.start_s[found] <= times), found, -1)

    def purposes(self, steps: ArrayLike) -> NDArray[np.int8]:
        """The ``Purpose`` of every slot, in these iterations: ``[num_slots, len(steps)]``."""
        columns = np.asarray(steps)
        picture = np.zeros((self.num_slots, len(columns)), np.int8)
        for index, place in self._places(columns):
            picture[place] = self._purposes_of(index, columns[place[1]])
        return picture

    def owners(self, steps: ArrayLike) -> NDArray[np.int32]:
        """The request that holds every slot, in these iterations; -1 is a shared prefix, -2 nobody."""
        picture = np.full((self.num_slots, len(np.asarray(steps))), -2, np.int32)
        for index, place in self._places(np.asarray(steps)):
            picture[place] = np.where(picture[place] == -1, -1, self.spans["request"][index])
        return picture

    def num_holders(self, steps: ArrayLike) -> NDArray[np.int16]:
        """How many streams hold every slot, in these iterations."""
        picture = np.zeros((self.num_slots, len(np.asarray(steps))), np.int16)
        for _, place in self._places(np.asarray(steps)):
            picture[place] += 1
        return picture

    def rectangles(self) -> Columns:
        """Every held slot at every iteration in exactly one rectangle: the columns of ``RECTANGLE``.

        A slot that several streams hold is listed for one of them: for a shared prefix, else for the lowest request and
        stream. Tokens that are generated fill a slot at each step, so a slot that was reserved is two rectangles.
        """
        rows = [row for piece in self._pieces() for row in self._by_purpose(piece)]
        table = np.array(rows, RECTANGLE) if rows else np.zeros(0, RECTANGLE)
        return {name: np.ascontiguousarray(table[name]) for name in RECTANGLE.names or ()}

    def _places(self, steps: Integers) -> Iterator[tuple[int, tuple[slice, slice | Integers]]]:
        """Where each span is in a picture whose columns are ``steps``; spans that are not there are left out."""
        spans = self.spans
        for index, (address, length, start, end) in enumerate(
            zip(*(spans[name].tolist() for name in ("address", "length", "from_step", "to_step")), strict=True)
        ):
            columns = np.flatnonzero((steps >= start) & (steps < end))
            if columns.size:
                first, last = int(columns[0]), int(columns[-1]) + 1
                where = slice(first, last) if last - first == columns.size else columns
                yield index, (slice(address, address + length), where)

    def _purposes_of(self, index: int, steps: Integers) -> NDArray[np.int8]:
        """The purposes of a span's slots, ``[length, len(steps)]``."""
        length, position, origin, requested, final_len = (
            int(self.spans[name][index]) for name in ("length", "position", "origin_step", "requested", "final_len")
        )
        positions = np.arange(position, position + length)
        never = np.where(positions < requested, Purpose.OVERRESERVED, Purpose.PADDING)
        if self.spans["is_held"][index]:
            held = np.where(positions < final_len, Purpose.OVERRESERVED, never)
            return np.repeat(held[:, None], len(steps), axis=1).astype(np.int8)
        empty = np.where(positions < final_len, Purpose.RESERVED, never)
        is_there = positions[:, None] < np.minimum(steps - origin, final_len)
        return np.where(is_there, Purpose.TOKEN_STATES, empty[:, None]).astype(np.int8)

    def _pieces(self) -> list[_Piece]:
        """The spans cut where the number of holders changes, each physical slot once."""
        names = ("address", "length", "from_step", "to_step", "request", "stream")
        spans = np.array([self.spans[name] for name in names], np.int64).T.tolist()
        bounds = np.unique([each for span in spans for each in (span[0], span[0] + span[1])])
        there: list[list[int]] = [[] for _ in bounds]
        for index, (address, length, *_) in enumerate(spans):
            first, last = np.searchsorted(bounds, (address, address + length))
            for interval in range(first, last):
                there[interval].append(index)
        pieces: list[_Piece] = []
        for interval, indices in enumerate(there[:-1]):
            place = int(bounds[interval]), int(bounds[interval + 1])
            cuts = sorted({row for index in indices for row in spans[index][2:4]})
            newest: _Piece | None = None
            for start, end in pairwise(cuts):
                holders = [index for index in indices if spans[index][2] <= start and end <= spans[index][3]]
                if not holders:
                    continue
                owner = min(holders, key=lambda index: spans[index][4:6])
                if newest and (newest.span, newest.to_step, newest.num_holders) == (owner, start, len(holders)):
                    newest = pieces[-1] = newest._replace(to_step=end)
                else:
                    newest = _Piece(owner, start, end, len(holders), *place)
                    pieces.append(newest)
        pieces.sort()
        joined: list[_Piece] = []
        for piece in pieces:
            if joined and joined[-1][:4] == piece[:4] and joined[-1].end == piece.address:
                joined[-1] = joined[-1]._replace(end=piece.end)
            else:
                joined.append(piece)
        return joined

    def _by_purpose(self, piece: _Piece) -> Iterator[tuple[float, ...]]:
        """The rectangles of a piece; the tokens that come while it lasts fill one slot at each step."""
        spans, (index, start, end, holders, address, last) = self.spans, piece
        origin, requested, final_len = (int(spans[name][index]) for name in ("origin_step", "requested", "final_len"))
        first = int(spans["position"][index]) + address - int(spans["address"][index])
        stop = first + last - address
        owner = int(spans["request"][index]), int(spans["stream"][index])

        def rows(begin: int, until: int, from_step: int, to_step: int, purpose: Purpose) -> Iterator[tuple[float, ...]]:
            begin, until = max(begin, first), min(until, stop)
            if begin < until and from_step < to_step:
                times = float(self.start_s[from_step]), float(self.end_s[to_step - 1])
                place = address + begin - first, until - begin, from_step, to_step
                yield (*place, *times, *owner, begin, purpose, holders, index)

        if spans["is_held"][index]:
            yield from rows(first, max(requested, final_len), start, end, Purpose.OVERRESERVED)
        else:
            there, coming = min(start - origin, final_len), min(end - 1 - origin, final_len)
            yield from rows(first, there, start, end, Purpose.TOKEN_STATES)
            for position in range(max(there, first), min(coming, stop)):
                filled = origin + position + 1
                yield from rows(position, position + 1, start, filled, Purpose.RESERVED)
                yield from rows(position, position + 1, filled, end, Purpose.TOKEN_STATES)
            yield from rows(max(coming, there), final_len, start, end, Purpose.RESERVED)
            yield from rows(final_len, requested, start, end, Purpose.OVERRESERVED)
        yield from rows(max(requested, final_len), stop, start, end, Purpose.PADDING)


def write(path: Path, spans: Columns, num_slots: int, block_size: int) -> None:
    """Write what a ``Recorder`` saw, beside the run's ``steps.parquet``."""
    numbers = {"version": VERSION, "num_slots": str(num_slots), "block_size": str(block_size)}
    write_parquet(path, spans, {f"kvbench.{name}": value for name, value in numbers.items()})


def failure(folder: Path) -> str | None:
    """Why the run of a point failed; None where it did not."""
    file = folder / "error.json"
    return str(json.loads(file.read_text(encoding="utf-8"))["error"]) if file.is_file() else None


def load(path: Path | str) -> MemoryMap:
    """The map that a run with ``memory_map=true`` left.

    Args:
        path: the folder of its point, ``results/<name>/points/<point>``.

    Raises:
        KvbenchError: there is none, as the run failed or was not mapped, or it has another version of the schema.
    """
    folder = Path(path)
    file = folder / FILE
    if not file.is_file():
        if reason := failure(folder):
            raise KvbenchError(f"{folder} left no map, as its run failed: {reason}")
        raise KvbenchError(f"{file} does not exist: run the point with memory_map=true")
    numbers = read_metadata(file)
    if (version := numbers.get("kvbench.version")) != VERSION:
        raise KvbenchError(f"{file} has schema version {version}, this kvbench reads {VERSION}; run the point again")
    steps = read_parquet(folder / "steps.parquet")
    end_s = steps["end_s"].astype(np.float64, copy=False)
    return MemoryMap(
        num_slots=int(numbers["kvbench.num_slots"]),
        block_size=int(numbers["kvbench.block_size"]),
        spans=read_parquet(file),
        start_s=end_s - steps["seconds"].astype(np.float64, copy=False),
        end_s=end_s,
    )
