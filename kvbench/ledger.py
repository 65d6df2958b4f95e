"""Splits the pool by purpose at every iteration: a partition that sums to the pool's capacity, in slots.

Fed by the engine from what the scheduler granted, grew and released; the allocator only reports how much is used.
The split of granted slots needs the final length of a sequence, which runs with forced lengths know; where a stop token
may end it earlier, the split is completed at the end of the run.
The sums change only when something happens to a sequence; the tokens present are counted by the scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from struct import Struct
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvbench.allocators.base import Allocator
from kvbench.core import Batch, Sequence

_STORED = np.dtype(
    [
        ("end_s", "<f8"),
        ("seconds", "<f8"),
        ("num_running", "<i4"),
        ("num_waiting", "<i4"),
        ("num_prefills", "<i4"),
        ("num_preempted", "<i4"),
        ("context_len", "<i4"),
        ("token_states", "<i4"),
        ("overreserved", "<i4"),
        ("padding", "<i4"),
        ("used", "<i4"),
        ("largest_free", "<i4"),
    ]
)
_CHUNK_ROWS = 1 << 14


class _Event(NamedTuple):
    """From this row on a sequence holds ``granted`` slots of which it asked for ``requested``.

    0 and 0: it holds none. None: it has finished and is only held.
    """

    row: int
    seq: Sequence
    requested: int | None
    granted: int


class Ledger:
    """One row for every iteration, taken while it is computed: a sequence that finishes in it still holds its memory.

    Classes, in slots:
        token_states: hold a token some running sequence attends to.
        reserved: granted, empty, and will be filled by their sequence.
        overreserved: reserved for a length that will never come, or held by a finished sequence until its batch ends.
        padding: rounding that will never be filled.
        cached, pinned, free: as the allocator reports them.

    Args:
        allocator: whose pool it is.
        may_stop_early: sequences may end before their ``final_len``, which is corrected when they do.
    """

    def __init__(self, allocator: Allocator, *, may_stop_early: bool = False) -> None:
        self.allocator = allocator
        self._events: list[_Event] | None = [] if may_stop_early else None
        self._pack = Struct("<2d10i").pack_into
        self._chunks: list[bytearray] = []
        self._chunk = bytearray(_CHUNK_ROWS * _STORED.itemsize)
        self._offset = 0
        self._overreserved = self._padding = 0
        self._overreserved_by: dict[Sequence, int] = {}
        self._padding_by: dict[Sequence, int] = {}
        self._usage = allocator.usage()
        self._stale = False
        self._kept: list[tuple[int, int, int]] = []  # row from which on so much is cached and pinned; empty: never any

    def record(self, batch: Batch, end_s: float, seconds: float, num_waiting: int) -> None:
        """Book what happened before the iteration, then note its row."""
        if self._events is not None:
            self._note(batch)
        if batch.grown:
            self._stale = True
            # Room for the tokens up to the step before they ask again; what lies beyond the last token is padding.
            last = batch.step + batch.gained - 1
            for seq in batch.grown:
                spare = last - seq.origin - seq.final_len
                if spare > 0:
                    self._padding += spare
                    self._padding_by[seq] = spare
        if batch.preempted:
            self._release(batch.preempted)
        if batch.prefills:
            self._stale = True
            self._admit(batch.prefills)
        if self._stale:
            self._usage = self.allocator.usage()
            self._stale = False
            if self._usage.cached or self._usage.pinned or self._kept:
                self._kept.append((self._num_rows(), self._usage.cached, self._usage.pinned))
        if self._offset == len(self._chunk):
            self._chunks.append(self._chunk)
            self._chunk = bytearray(len(self._chunk))
            self._offset = 0
        self._pack(
            self._chunk,
            self._offset,
            end_s,
            seconds,
            len(batch.running),
            num_waiting,
            len(batch.prefills),
            len(batch.preempted),
            batch.context_len,
            batch.token_states,
            self._overreserved,
            self._padding,
            self._usage.used,
            self._usage.largest_free,
        )
        self._offset += _STORED.itemsize

    def settle(self, finished: Seq[Sequence], released: Seq[Sequence]) -> None:
        """Book what happened after the iteration: released memory is free, memory that is only held is overreserved."""
        if self._events is not None:
            held = finished if finished is not released else ()
            self._events += [_Event(self._num_rows(), seq, None, 0) for seq in held]
            self._events += [_Event(self._num_rows(), seq, 0, 0) for seq in released]
        if finished is not released:
            for seq in finished:
                self._overreserved += seq.final_len
                self._overreserved_by[seq] = self._overreserved_by.get(seq, 0) + seq.final_len
        if released:
            self._release(released)

    def _admit(self, admitted: Seq[Sequence]) -> None:
        for seq in admitted:
            over = seq.requested - seq.final_len
            if over > 0:
                self._overreserved += over
                self._overreserved_by[seq] = over
                spare = seq.granted - seq.requested
            else:
                spare = seq.granted - seq.final_len
            if spare > 0:
                self._padding += spare
                self._padding_by[seq] = spare

    def _num_rows(self) -> int:
        return len(self._chunks) * _CHUNK_ROWS + self._offset // _STORED.itemsize

    def _note(self, batch: Batch) -> None:
        """Keep what the split depends on, for the end of the run."""
        events, row = self._events, self._num_rows()
        assert events is not None
        room = batch.step + batch.gained - 1
        events += [_Event(row, seq, seq.requested, room - seq.origin) for seq in batch.grown]
        events += [_Event(row, seq, 0, 0) for seq in batch.preempted]
        events += [_Event(row, seq, seq.requested, seq.granted) for seq in batch.prefills]

    def _complete(self, columns: dict[str, NDArray[np.generic]]) -> None:
        """Split again, now that every final length is known."""
        changes = np.zeros((2, self._num_rows() + 1), np.int64)
        current: dict[Sequence, tuple[int, int]] = {}
        for row, seq, requested, granted in self._events or ():
            over, padding = current.get(seq, (0, 0))
            if requested is None:
                split = over + seq.final_len, padding
            else:
                split = (
                    max(requested - seq.final_len, 0),
                    max(granted - max(requested, seq.final_len), 0),
                )
            changes[:, row] += split[0] - over, split[1] - padding
            current[seq] = split
        sums = changes.cumsum(axis=1)[:, :-1].astype(np.int32)
        columns["overreserved"], columns["padding"] = sums

    def _cached_and_pinned(self, num_rows: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Columns of what hardly ever changes."""
        rows, cached, pinned = np.array([(0, 0, 0), *self._kept, (num_rows, 0, 0)], np.int64).T
        lasts = np.diff(rows)
        return np.repeat(cached[:-1], lasts).astype(np.int32), np.repeat(pinned[:-1], lasts).astype(np.int32)

    def _release(self, released: Seq[Sequence]) -> None:
        self._stale = True
        overreserved_by, padding_by = self._overreserved_by, self._padding_by
        for seq in released:
            if overreserved_by:
                self._overreserved -= overreserved_by.pop(seq, 0)
            self._padding -= padding_by.pop(seq, 0)

    def columns(self) -> dict[str, NDArray[np.generic]]:
        """The rows as columns: noted and derived ones. Gives its own memory up: the run is over."""
        num_rows = self._num_rows()
        columns: dict[str, NDArray[np.generic]] = {
            name: np.empty(num_rows, _STORED[name]) for name in _STORED.names or ()
        }
        if self._events is not None:
            self._complete(columns)
        self._chunks.append(self._chunk[: self._offset])
        self._chunk = bytearray()
        while self._chunks:  # from the end, so that each chunk's memory is given back
            chunk = np.frombuffer(self._chunks.pop(), _STORED)
            start = len(self._chunks) * _CHUNK_ROWS
            for name, column in columns.items():
                if self._events is None or name not in ("overreserved", "padding"):
                    column[start : start + len(chunk)] = chunk[name]
        used, present, over, padding = (
            columns[name].astype(np.int32, copy=False) for name in ("used", "token_states", "overreserved", "padding")
        )
        prefill_tokens = present - columns["context_len"].astype(np.int32, copy=False)
        prefill_tokens[columns["num_prefills"] == 0] = 0
        columns["prefill_tokens"] = prefill_tokens
        columns["reserved"] = used - present - over - padding
        cached, pinned = self._cached_and_pinned(num_rows)
        columns["cached"], columns["pinned"] = cached, pinned
        columns["free"] = self.allocator.num_slots - used - cached - pinned
        del columns["used"]
        return columns
