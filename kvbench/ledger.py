"""Splits the pool by purpose at every iteration: a partition that sums to the pool's capacity, in slots.

Fed by the engine from what the scheduler granted, grew and released; the allocator only reports how much is used. One
that is not kvbench's may hold more for a sequence than it says that can be written: it is asked what (``audit``).
The split of granted slots needs the final length of a sequence, which runs with forced lengths know; where a stop token
may end it earlier, the split is completed at the end of the run.
The sums change only when something happens to a sequence; the tokens present are counted by the scheduler.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence as Seq
from struct import Struct
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvbench.allocators.base import Allocator, is_plug_in
from kvbench.audit import Audit, Holding
from kvbench.core import Batch, Sequence, Usage

ROW = np.dtype(
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
"""What is kept of an iteration; the other columns follow from it at the end."""
_CHUNK_ROWS = 1 << 14


class _Event(NamedTuple):
    """From this row on a sequence holds ``granted`` slots of which it asked for ``requested``.

    0 and 0: it holds none. None: it has finished and is only held. ``num_streams`` of its request do so each. Of a
    plug-in ``granted`` are all the tokens, by position, for which its streams hold empty slots.
    """

    row: int
    seq: Sequence
    requested: int | None
    granted: int | Seq[int]
    num_streams: int

    def split(self) -> tuple[int, int]:
        """Slots reserved for tokens that will never come, and padding."""
        assert self.requested is not None
        final_len, covered = self.seq.final_len, max(self.requested, self.seq.final_len)
        return self._beyond(final_len) - self._beyond(covered), self._beyond(covered)

    def _beyond(self, position: int) -> int:
        if isinstance(self.granted, int):
            return self.num_streams * max(self.granted - position, 0)
        return len(self.granted) - bisect_left(self.granted, position)


class _Kept(NamedTuple):
    """From this row on so much is cached, pinned and shared, and so many streams run beside the first of their request.

    ``hidden`` tokens are computed or attended to beyond the physical ``token_states``.
    """

    row: int
    cached: int
    pinned: int
    shared: int
    num_siblings: int
    hidden: int


_FLOWS: dict[str, type[np.generic]] = {
    "copied": np.int32,
    "swapped_out": np.int32,
    "swapped_in": np.int32,
    "recomputed": np.int32,
    "swap_s": np.float64,
    "recompute_s": np.float64,
}
"""Columns of what happens in few rows."""


class Ledger:
    """One row for every iteration, taken while it is computed: a sequence that finishes in it still holds its memory.

    Classes, in slots:
        token_states: hold a token some running sequence attends to; one that several share counts once.
        reserved: granted, empty, and will be filled by their sequence.
        overreserved: reserved for a length that will never come, or held by a finished sequence until its batch ends.
        padding: rounding that will never be filled.
        cached, pinned, free: as the allocator reports them.

    Beside the partition: ``shared``, what sequences would hold on top of it if each held its own; ``num_seqs``, the
    streams that run; the slots ``copied``, ``swapped_out`` and ``swapped_in`` before the iteration; the tokens
    ``recomputed`` in it; of its seconds, ``swap_s`` and ``recompute_s`` as ``StepResult`` has them.

    Args:
        allocator: whose pool it is.
        may_stop_early: sequences may end before their ``final_len``, which is corrected when they do.
        audited: the allocator is asked what it holds, and its answers are checked; None: if it is not kvbench's.
    """

    def __init__(self, allocator: Allocator, *, may_stop_early: bool = False, audited: bool | None = None) -> None:
        self.allocator = allocator
        self._events: list[_Event] | None = [] if may_stop_early else None
        self._pack = Struct("<2d10i").pack_into
        self._chunks: list[bytearray] = []
        self._chunk = bytearray(_CHUNK_ROWS * ROW.itemsize)
        self._offset = 0
        self._overreserved = self._padding = 0
        self._overreserved_by: dict[Sequence, int] = {}
        self._padding_by: dict[Sequence, int] = {}
        self._usage = allocator.usage()
        self._stale = False
        self._kept: list[_Kept] = []  # empty: never any
        self._flows: list[tuple[str, int, float]] = []  # column, row, amount
        self._parting: list[Sequence] = []  # admitted in the last row, sharing a block that each will copy or fill
        self._unfilled = 0  # slots at the end of such blocks, for every stream but the first
        self._new_siblings = 0  # streams beside the first of those admitted in this row
        self._not_computed = 0  # their tokens, for every stream but the first
        self._prefix_states = 0  # tokens of shared prefixes
        self._cached = 0  # those of them that the admitted of this row found there
        self._audit = Audit(allocator) if (is_plug_in(allocator) if audited is None else audited) else None
        self._lost = 0  # tokens of streams that share the slot of another, or are out, as the audit found

    def record(self, batch: Batch, end_s: float, seconds: float, num_waiting: int) -> None:
        """Book what happened before the iteration, then note its row.

        Raises:
            KvbenchError: what a plug-in allocator answers cannot be true.
        """
        if self._audit is None:
            if self._parting or batch.moves or batch.copies or batch.prefixes:
                self._book_streams(batch)
            if self._events is not None:
                self._note(batch)
            if batch.grown:
                self._stale = True
                # Room for the tokens up to the step before they ask again; what lies beyond the last token is padding.
                last = batch.step + batch.gained - 1
                for seq in batch.grown:
                    spare = last - seq.origin - seq.final_len
                    if spare > 0:
                        self._pad(seq, spare * seq.num_streams)
            if batch.preempted:
                self._release(batch.preempted)
            if batch.prefills:
                self._stale = True
                self._admit(batch.prefills)
            if self._stale:
                usage = self._usage = self.allocator.usage()
                self._keep(batch, usage, usage.shared - self._unfilled)
            token_states = batch.token_states - self._usage.shared + self._unfilled
        else:
            self._book_audited(batch, self._audit)
            token_states = batch.token_states - self._lost
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
            token_states,
            self._overreserved,
            self._padding,
            self._usage.used,
            self._usage.largest_free,
        )
        self._offset += ROW.itemsize

    def _book_audited(self, batch: Batch, audit: Audit) -> None:
        """The same by what each sequence holds. Streams are looked at in every row, as they part without notice."""
        self._note_flow(batch)
        if batch.preempted:
            self.settle((), batch.preempted)
        self._not_computed = 0
        for prefix in batch.prefixes:
            self._prefix_states += prefix.length
            self._hold(prefix, prefix.length, audit.add_prefix(prefix))
        for seq in batch.prefills:
            self._hold(seq, seq.requested, audit.look(seq, batch, is_new=True))
            self._cached += seq.num_cached
            self._new_siblings += len(seq.siblings)
            if seq.num_streams > seq.num_prefills:
                self._not_computed += len(seq.siblings) * seq.length
        changed = {**dict.fromkeys(batch.returned, False), **dict.fromkeys(batch.grown, True)}
        if batch.num_siblings:
            admitted = set(batch.prefills)
            changed = {seq: False for seq in batch.running if seq.siblings and seq not in admitted} | changed
        for seq, is_grown in changed.items():
            self._hold(seq, seq.requested, audit.look(seq, batch, is_grown=is_grown))
        if not (self._stale or changed or batch.prefills or batch.prefixes):
            return
        usage = self._usage = self.allocator.usage()
        audit.check(usage)
        num_tokens = batch.token_states
        if self._prefix_states:  # of those that are out, the scheduler counts what they go on sharing with a prefix
            num_tokens = batch.context_len + self._prefix_states
            num_tokens += sum(seq.length * seq.num_streams for seq in batch.prefills)
        self._lost = batch.token_states - num_tokens + audit.num_shared
        self._keep(batch, usage, self._lost)

    def _hold(self, seq: Sequence, requested: int, holding: Holding) -> None:
        """What a request holds, or a prefix, which asked for so many slots."""
        event = _Event(self._num_rows(), seq, requested, holding.empty, 1)
        if self._events is not None:
            self._events.append(event)
        over, padding = event.split()
        self._overreserved += over - self._overreserved_by.get(seq, 0)
        self._overreserved_by[seq] = over
        self._pad(seq, padding)

    def newest(self) -> dict[str, int]:
        """The pool's partition in the newest row; before the first all is free."""
        names = ("token_states", "overreserved", "padding", "used")
        rows = np.frombuffer(self._chunk[max(self._offset - ROW.itemsize, 0) : self._offset], ROW)
        present, over, padding, used = (int(rows[name][-1]) if rows.size else 0 for name in names)
        cached, pinned = self._usage.cached, self._usage.pinned
        return {
            "token_states": present,
            "reserved": used - present - over - padding,
            "overreserved": over,
            "padding": padding,
            "cached": cached,
            "pinned": pinned,
            "free": self.allocator.num_slots - used - cached - pinned,
        }

    def skip(self, batch: Batch, swap_s: float) -> None:
        """Book a step that led to no iteration, as all were preempted; what it did counts for the next row."""
        self.settle((), batch.preempted)
        if batch.preempted:
            row = self._num_rows()
            self._flows += [("num_preempted", row, len(batch.preempted)), ("swap_s", row, swap_s)]
            self._note_flow(batch)

    def lose(self, recomputed: int, recompute_s: float, swap_s: float) -> None:
        """Add to the newest row what preemptions cost in it."""
        if not (recomputed or swap_s):
            return
        row = self._num_rows() - 1
        self._flows += [("recomputed", row, recomputed), ("recompute_s", row, recompute_s), ("swap_s", row, swap_s)]

    def settle(self, finished: Seq[Sequence], released: Seq[Sequence]) -> None:
        """Book what happened after the iteration: released memory is free, memory that is only held is overreserved."""
        if self._events is not None:
            held = finished if finished is not released else ()
            self._events += [_Event(self._num_rows(), seq, None, 0, 1) for seq in held]
            self._events += [_Event(self._num_rows(), seq, 0, 0, 1) for seq in released]
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
                spare = seq.granted - seq.requested
                over *= seq.num_prefills
                self._overreserved += over
                self._overreserved_by[seq] = over
            else:
                spare = seq.granted - seq.final_len
            if spare > 0:
                spare *= seq.num_prefills
                self._padding += spare
                self._padding_by[seq] = spare
            self._cached += seq.num_cached
            if seq.siblings:
                siblings = len(seq.siblings)
                self._new_siblings += siblings
                if seq.num_streams > seq.num_prefills:
                    self._parting.append(seq)
                    self._unfilled += siblings * (seq.granted - seq.length)
                    self._not_computed += siblings * seq.length

    def _keep(self, batch: Batch, usage: Usage, lost: int) -> None:
        """Of the allocator's books, what most runs never have; ``lost`` tokens share a slot, or are out."""
        self._stale = False
        siblings = batch.num_siblings + self._new_siblings
        self._new_siblings = 0
        if self._kept or usage.cached or usage.pinned or usage.shared or siblings or self._prefix_states:
            hidden = lost - self._not_computed - self._prefix_states - self._cached
            self._cached = 0
            self._kept.append(_Kept(self._num_rows(), usage.cached, usage.pinned, usage.shared, siblings, hidden))

    def _book_streams(self, batch: Batch) -> None:
        """What happens only where requests have several streams, or are swapped.

        Streams admitted in the last row write for the first time: each holds a last block of its own.
        """
        self._stale = True
        for prefix in batch.prefixes:
            self._prefix_states += prefix.length
            self._padding += prefix.granted - prefix.length
        for seq in self._parting:
            if seq in batch.running and (spare := self._padding_by.get(seq, 0)):
                self._pad(seq, spare * seq.num_streams)
        self._parting.clear()
        self._unfilled = self._not_computed = 0
        for seq in batch.returned:
            spare = seq.granted - seq.final_len
            if spare > 0:
                self._pad(seq, spare * seq.num_streams)
        self._note_flow(batch)

    def _note_flow(self, batch: Batch) -> None:
        row = self._num_rows()
        if batch.copies:
            self._flows.append(("copied", row, sum(copy.num_slots for copy in batch.copies)))
        if batch.moves:
            direction = "swapped_out" if batch.swapped else "swapped_in"
            self._flows.append((direction, row, sum(move.num_slots for move in batch.moves)))

    def _pad(self, seq: Sequence, slots: int) -> None:
        """So much of what a request holds is padding now."""
        self._padding += slots - self._padding_by.get(seq, 0)
        self._padding_by[seq] = slots

    def _num_rows(self) -> int:
        return len(self._chunks) * _CHUNK_ROWS + self._offset // ROW.itemsize

    def _note(self, batch: Batch) -> None:
        """Keep what the split depends on, for the end of the run."""
        events, row = self._events, self._num_rows()
        assert events is not None
        room = batch.step + batch.gained - 1
        events += [_Event(row, seq, seq.requested, room - seq.origin, seq.num_streams) for seq in batch.grown]
        events += [_Event(row, seq, 0, 0, 1) for seq in batch.preempted]
        events += [_Event(row, seq, 0, seq.granted, seq.num_streams) for seq in batch.returned]
        events += [_Event(row, prefix, prefix.length, prefix.granted, 1) for prefix in batch.prefixes]
        for seq in batch.prefills:
            events.append(_Event(row, seq, seq.requested, seq.granted, seq.num_prefills))
            if seq.num_streams > seq.num_prefills:  # they part in the next row
                events.append(_Event(row + 1, seq, seq.requested, seq.granted, seq.num_streams))

    def _complete(self, columns: dict[str, NDArray[np.generic]]) -> None:
        """Split again, now that every final length is known."""
        changes = np.zeros((2, self._num_rows() + 1), np.int64)
        current: dict[Sequence, tuple[int, int]] = {}
        for event in sorted(self._events or (), key=lambda event: event.row):
            seq = event.seq
            over, padding = current.get(seq, (0, 0))
            split = event.split() if event.requested is not None else (over + seq.final_len, padding)
            changes[:, event.row] += split[0] - over, split[1] - padding
            current[seq] = split
        sums = changes.cumsum(axis=1)[:, :-1].astype(np.int32)
        columns["overreserved"], columns["padding"] = sums

    def _rare(self, columns: dict[str, NDArray[np.generic]], num_rows: int) -> None:
        """Columns of what most runs never have: what was kept from a row on, and what happened in single rows."""
        kept = np.array([(0,) * 6, *self._kept, (num_rows, *(0,) * 5)], np.int64).T
        lasts = np.diff(kept[0])
        cached, pinned, shared, siblings, hidden = (np.repeat(each[:-1], lasts).astype(np.int32) for each in kept[1:])
        columns["cached"], columns["pinned"], columns["shared"] = cached, pinned, shared
        columns["num_seqs"] = columns["num_running"].astype(np.int32, copy=False) + siblings
        columns["prefill_tokens"] = columns["prefill_tokens"].astype(np.int32, copy=False) + hidden
        columns["prefill_tokens"][columns["num_prefills"] == 0] = 0
        columns |= {name: np.zeros(num_rows, kind) for name, kind in _FLOWS.items()}
        for name, row, amount in self._flows:
            columns[name][min(row, num_rows - 1)] += amount  # beyond the last row: all were preempted, then rejected

    def _release(self, released: Seq[Sequence]) -> None:
        self._stale = True
        overreserved_by, padding_by = self._overreserved_by, self._padding_by
        for seq in released:
            if overreserved_by:
                self._overreserved -= overreserved_by.pop(seq, 0)
            self._padding -= padding_by.pop(seq, 0)
        if self._audit is not None:
            for seq in released:
                self._audit.release(seq)

    def fill(self, rows: NDArray[np.void], recomputed: NDArray[np.int64], recompute_s: NDArray[np.float64]) -> None:
        """Take the rows of a whole run of single streams, of dtype ``ROW``, instead of recording them."""
        for start in range(0, len(rows), _CHUNK_ROWS):
            self._chunk = bytearray(rows[start : start + _CHUNK_ROWS].tobytes())
            self._offset = len(self._chunk)
            self._chunks.append(self._chunk)
        if rows.size:
            self._chunks.pop()
        for row in np.flatnonzero(recomputed).tolist():
            lost = ("recomputed", row, recomputed[row]), ("recompute_s", row, recompute_s[row])
            self._flows += lost

    def columns(self) -> dict[str, NDArray[np.generic]]:
        """The rows as columns: noted and derived ones. Gives its own memory up: the run is over."""
        num_rows = self._num_rows()
        columns: dict[str, NDArray[np.generic]] = {name: np.empty(num_rows, ROW[name]) for name in ROW.names or ()}
        if self._events is not None:
            self._complete(columns)
        self._chunks.append(self._chunk[: self._offset])
        self._chunk = bytearray()
        while self._chunks:  # from the end, so that each chunk's memory is given back
            chunk = np.frombuffer(self._chunks.pop(), ROW)
            start = len(self._chunks) * _CHUNK_ROWS
            for name, column in columns.items():
                if self._events is None or name not in ("overreserved", "padding"):
                    column[start : start + len(chunk)] = chunk[name]
        used, present, over, padding = (
            columns[name].astype(np.int32, copy=False) for name in ("used", "token_states", "overreserved", "padding")
        )
        prefill_tokens = present - columns["context_len"].astype(np.int32, copy=False)
        columns["prefill_tokens"] = prefill_tokens
        columns["reserved"] = used - present - over - padding
        self._rare(columns, num_rows)
        kept = columns["cached"].astype(np.int32, copy=False) + columns["pinned"].astype(np.int32, copy=False)
        columns["free"] = self.allocator.num_slots - used - kept
        del columns["used"]
        return columns
