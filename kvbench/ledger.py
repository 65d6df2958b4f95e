"""Splits the pool by purpose at every iteration: a partition that sums to the pool's capacity, in slots.

Fed by the engine from what the scheduler granted, grew and released; the allocator only reports how much is used.
The split of granted slots needs the final length of a sequence, which runs with forced lengths know.
The sums change only when something happens to a sequence; the tokens present are counted by the scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from struct import Struct

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


class Ledger:
    """One row for every iteration, taken while it is computed: a sequence that finishes in it still holds its memory.

    Classes, in slots:
        token_states: hold a token some running sequence attends to.
        reserved: granted, empty, and will be filled by their sequence.
        overreserved: reserved for a length that will never come, or held by a finished sequence until its batch ends.
        padding: rounding that will never be filled.
        cached, pinned, free: as the allocator reports them.
    """

    def __init__(self, allocator: Allocator) -> None:
        self.allocator = allocator
        self._pack = Struct("<2d10i").pack_into
        self._chunks: list[bytearray] = []
        self._chunk = bytearray(_CHUNK_ROWS * _STORED.itemsize)
        self._offset = 0
        self._overreserved = self._padding = 0
        self._overreserved_by: dict[Sequence, int] = {}
        self._padding_by: dict[Sequence, int] = {}
        self._usage = allocator.usage()
        self._stale = False

    def record(self, batch: Batch, end_s: float, seconds: float, num_waiting: int) -> None:
        """Book what happened before the iteration, then note its row."""
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

    def _release(self, released: Seq[Sequence]) -> None:
        self._stale = True
        overreserved_by, padding_by = self._overreserved_by, self._padding_by
        for seq in released:
            if overreserved_by:
                self._overreserved -= overreserved_by.pop(seq, 0)
            self._padding -= padding_by.pop(seq, 0)

    def columns(self) -> dict[str, NDArray[np.generic]]:
        """The rows as columns: noted and derived ones. Gives its own memory up: the run is over."""
        num_last = self._offset // _STORED.itemsize
        num_rows = len(self._chunks) * _CHUNK_ROWS + num_last
        columns: dict[str, NDArray[np.generic]] = {
            name: np.empty(num_rows, _STORED[name]) for name in _STORED.names or ()
        }
        self._chunks.append(self._chunk[: self._offset])
        self._chunk = bytearray()
        while self._chunks:  # from the end, so that each chunk's memory is given back
            chunk = np.frombuffer(self._chunks.pop(), _STORED)
            start = len(self._chunks) * _CHUNK_ROWS
            for name, column in columns.items():
                column[start : start + len(chunk)] = chunk[name]
        used, present, over, padding = (
            columns[name].astype(np.int32, copy=False) for name in ("used", "token_states", "overreserved", "padding")
        )
        prefill_tokens = present - columns["context_len"].astype(np.int32, copy=False)
        prefill_tokens[columns["num_prefills"] == 0] = 0
        columns["prefill_tokens"] = prefill_tokens
        columns["reserved"] = used - present - over - padding
        columns["cached"] = columns["pinned"] = np.zeros(num_rows, np.int32)
        columns["free"] = self.allocator.num_slots - used
        del columns["used"]
        return columns
