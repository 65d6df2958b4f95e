"""Notes which stream of which request holds which slots, when that changes.

Knows no allocator: it asks for ``slots`` of a sequence to which something happened, as a runner does that looks for the
tokens. The streams of a request that has several are asked for in every iteration, as beams move without notice.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from kvbench.core import Batch, Sequence, StepResult
from kvbench.records import Columns
from kvbench.schedulers.base import Scheduler

PREFIX = -1
"""The request of a shared prefix, which belongs to none."""


class Began(IntEnum):
    """How a stream came to hold slots."""

    ADMITTED = 0
    GROWN = 1
    COPIED = 2
    """They were copied to, before the stream wrote into slots that it shared."""
    RETURNED = 3
    """They came back from the host pool."""
    FORKED = 4
    """It goes on from what another stream holds."""


class Ended(IntEnum):
    """Why a stream holds slots no more."""

    STAYED = 0
    """It held them when the run ended."""
    FINISHED = 1
    PREEMPTED = 2
    SWAPPED = 3
    """They were preempted, and moved to the host pool."""
    LEFT = 4
    """The stream goes on without them: they were copied, or their beam was dropped."""
    HELD = 5
    """The request has finished and holds them on, until its batch ends."""


SPAN = np.dtype(
    [
        ("address", "<i4"),
        ("length", "<i4"),
        ("from_step", "<i4"),
        ("to_step", "<i4"),
        ("request", "<i4"),
        ("stream", "<i2"),
        ("position", "<i4"),
        ("origin_step", "<i4"),
        ("requested", "<i4"),
        ("final_len", "<i4"),
        ("is_held", "?"),
        ("began", "<i1"),
        ("ended", "<i1"),
        ("copied_from", "<i4"),
    ]
)
"""One row of ``memory_map.parquet``: a stream holds slots that follow each other, for tokens that follow each other.

``docs/memory_map.md`` has the meaning of each column.
"""


@dataclass(slots=True)
class _Span:
    """Slots ``address + i`` hold the stream's tokens ``position + i`` from a row on."""

    address: int
    length: int
    position: int
    from_step: int
    began: Began
    copied_from: int

    def part(self, start: int, end: int) -> _Span:
        """Its slots from ``start`` to ``end``, counted from its first."""
        source = self.copied_from + start if self.copied_from >= 0 else -1
        return _Span(self.address + start, end - start, self.position + start, self.from_step, self.began, source)


@dataclass(slots=True)
class _Holding:
    """What a stream holds from its admission until it loses all of it.

    ``stream`` is its number within the request whose first stream is ``first``.
    """

    first: Sequence
    stream: int
    origin_step: int
    requested: int
    slots: NDArray[np.int64]
    spans: list[_Span]
    is_held: bool = False


class Recorder:
    """Watches an engine; ``spans`` is the map once the run is over.

    Args:
        scheduler: of that engine. Its allocator is asked for slots, its queues are asked for who has some.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._holdings: dict[Sequence, _Holding] = {}  # by stream
        self._finished: Seq[Sequence] = ()  # in the last row
        self._num_steps = 0
        self._ended: list[tuple[_Holding, _Span, int, Ended]] = []

    def watch(self, batch: Batch, result: StepResult) -> None:
        """Note what changed since the last iteration; everyone still holds what they held in this one."""
        row, running = self._num_steps, batch.running
        fresh = {**dict.fromkeys(batch.prefills, Began.ADMITTED), **dict.fromkeys(batch.returned, Began.RETURNED)}
        for stream, holding in list(self._holdings.items()):
            first = holding.first
            if first.request.id != PREFIX and (first not in running or first in fresh):
                was_swapped = first in batch.returned or first in self._scheduler.swapped
                why = Ended.FINISHED if first.finish_s >= 0 else Ended.SWAPPED if was_swapped else Ended.PREEMPTED
                self._close(stream, why)
        for first in self._finished:
            if first in running:
                self._hold_on(first)
        self._finished = result.finished
        copies = {copy.dst: copy.src for copy in batch.copies}
        for prefix in batch.prefixes:
            self._look(prefix, row - prefix.length, Began.ADMITTED, copies)
        changed = dict.fromkeys((*fresh, *batch.grown))
        if batch.num_siblings:
            changed |= dict.fromkeys(first for first in running if first.siblings)
        for first in changed:
            self._look(first, row - (batch.step - first.origin), fresh.get(first, Began.GROWN), copies)
        self._num_steps += 1

    def spans(self) -> Columns:
        """One row for every span, the columns of ``SPAN``, in the order in which they ended."""
        for stream in list(self._holdings):
            self._close(stream, Ended.FINISHED if self._holdings[stream].first.finish_s >= 0 else Ended.STAYED)
        table = np.zeros(len(self._ended), SPAN)
        for index, (holding, span, to_step, why) in enumerate(self._ended):
            table[index] = (
                span.address,
                span.length,
                span.from_step,
                to_step,
                holding.first.request.id,
                holding.stream,
                span.position,
                holding.origin_step,
                holding.requested,
                holding.first.final_len,
                holding.is_held,
                span.began,
                why,
                span.copied_from,
            )
        return {name: np.ascontiguousarray(table[name]) for name in SPAN.names or ()}

    def _look(self, first: Sequence, origin_step: int, began: Began, copies: Mapping[int, int]) -> None:
        """Compare what the streams of a request hold with what they held."""
        for number, stream in enumerate(first.streams):
            slots = np.array(self._scheduler.allocator.slots(stream))
            holding = self._holdings.get(stream)
            if holding is None:
                holding = _Holding(first, number, origin_step, first.requested, slots[:0], [])
                self._holdings[stream] = holding
            elif np.array_equal(slots, holding.slots):
                continue
            before = holding.slots
            both = min(len(before), len(slots))
            differs = np.flatnonzero(before[:both] != slots[:both])
            self._cut(holding, np.union1d(differs, np.arange(both, len(before))))
            got = np.union1d(differs, np.arange(both, len(slots))).astype(np.intp)
            starts = (np.diff(got, prepend=-9) != 1) | (np.diff(slots[got], prepend=-9) != 1)
            starts |= np.isin(slots[got], list(copies))
            for run in np.split(got, np.flatnonzero(starts)[1:]) if got.size else ():
                position, address = int(run[0]), int(slots[run[0]])
                how = began if began is not Began.GROWN or position >= len(before) else Began.FORKED
                source = copies.get(address, -1)
                how = Began.COPIED if source >= 0 else how
                holding.spans.append(_Span(address, len(run), position, self._num_steps, how, source))
            holding.slots = slots

    def _cut(self, holding: _Holding, lost: NDArray[np.integer]) -> None:
        """End what lies at these positions, and keep the rest as it was."""
        if not lost.size:
            return
        spans, holding.spans = holding.spans, []
        for span in spans:
            is_lost = np.isin(np.arange(span.position, span.position + span.length), lost)
            bounds = [0, *(np.flatnonzero(np.diff(is_lost)) + 1).tolist(), span.length]
            for start, end in pairwise(bounds):
                if is_lost[start]:
                    self._ended.append((holding, span.part(start, end), self._num_steps, Ended.LEFT))
                else:
                    holding.spans.append(span.part(start, end))

    def _close(self, stream: Sequence, why: Ended) -> _Holding:
        """It holds nothing any more."""
        holding = self._holdings.pop(stream)
        self._ended += [(holding, span, self._num_steps, why) for span in holding.spans]
        return holding

    def _hold_on(self, first: Sequence) -> None:
        """It has finished; what it holds serves nobody."""
        for stream in first.streams:
            holding = self._close(stream, Ended.HELD)
            spans = [replace(span, from_step=self._num_steps) for span in holding.spans]
            self._holdings[stream] = replace(holding, spans=spans, is_held=True)
