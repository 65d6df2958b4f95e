"""What one device does of an iteration: its part of the model over its part of the cache, fed with integers.

A decode step has one row of integers for each sequence: the new token, where it is, how long the sequence is, and its
block table. Rows are copied into a static tensor, padded to the next of some batch sizes (*buckets*), and a CUDA graph
of that size is replayed; a padded row has length 0 and its token is written nowhere. Steps with prompts in them differ
in shape every time and are launched kernel by kernel.

Tokens are chosen on the device where the most probable ones are wanted. Nothing here waits for the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kvbench.attention import triton
from kvbench.attention.base import PackedBatch
from kvbench.core import KvbenchError
from kvbench.runners.device import COMPUTE, SWAP, Device
from kvbench.runners.packed_model import PackedModel
from kvbench.sampling import most_probable

Ints = NDArray[np.int32]
ID, POSITION, SLOT, LENGTH, BASE = range(5)
HEADER = 16
"""Numbers of a row before its block table: as many as keep the tables aligned to 64 bytes."""
NOWHERE = -1
STAGED_BYTES = 64 * 2**20
"""Of each of the two buffers on the device that swapped blocks pass through; a block at least."""
NOT_FINITE = -1
"""Stands for the token of a sequence whose largest logit is none."""


def buckets(largest: int) -> list[int]:
    """Batch sizes to capture up to ``largest``: padding costs at most 7 rows up to 64, and 15 beyond."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, largest + 16, 16)]
    return [size for size in sizes if size < largest] + [largest]


class Places(NamedTuple):
    """How the cache is divided.

    Attributes:
        block_size: slots of a block; 0: every sequence lies in one piece.
        max_len: tokens of the longest sequence.
        host_slots: of the host pool.
    """

    block_size: int
    max_len: int
    host_slots: int

    @property
    def width(self) -> int:
        """Numbers of a sequence's row: the header and its block table, always as wide so that one kernel serves all."""
        max_blocks = -(-self.max_len // self.block_size) if self.block_size else 0
        return HEADER + -(-max_blocks // HEADER) * HEADER


class Output(NamedTuple):
    """Of a step.

    Attributes:
        logits: after each sequence's last token, ``[rows, vocabulary]``.
        chosen: ``[rows]``, the most probable tokens; ``NOT_FINITE`` where the logits are not.
    """

    logits: torch.Tensor
    chosen: torch.Tensor


@dataclass(slots=True)
class Staging:
    """A buffer between the cache and the host pool.

    Attributes:
        blocks: ``[N, layers, 2, block_size, heads, D]``.
        fetched: an event of ``SWAP``: what was in it is on the host.
        scattered: an event of ``COMPUTE``: what was in it is in the cache.
    """

    blocks: torch.Tensor
    fetched: Any = None
    scattered: Any = None


class Shard:
    """One device's part of a run.

    Args:
        model: over the cache of this device.
        device: where both are.
        places: of that cache.
        sizes: the buckets, ascending; larger batches are launched kernel by kernel, as all are without sizes.
        leads: whether it computes logits and tokens: of several ranks the first does.

    Attributes:
        output: of the last step that was submitted, when the device has done it; only valid inside its queue.
        graph_bytes: what each graph took of the device's memory when it was captured, the largest first.
    """

    def __init__(
        self, model: PackedModel, device: Device, places: Places, sizes: Seq[int] = (), *, leads: bool = True
    ) -> None:
        self.model = model
        self.leads = leads
        self.cache = model.cache
        self.device = device
        self.places = places
        self.sizes = list(sizes)
        self._rows = torch.zeros((max(sizes, default=0), places.width), dtype=torch.int32, device=device.where)
        self._rows[:, SLOT] = NOWHERE
        self._replays: dict[int, Callable[[], None]] = {}
        self._host: torch.Tensor | None = None
        self._staging: deque[Staging] = deque()
        self.output: Output
        self.graph_bytes: list[int] = []

    def warm_up(self) -> None:
        """Before any sequence: compile what steps, copies and swaps use, and capture the buckets, the largest first.

        Raises:
            KvbenchError: the host has no memory for what is swapped out.
        """
        for queries in ([2], [1, 2]):
            rows, starts = np.zeros((len(queries), self.places.width), np.int32), np.cumsum([0, *queries])
            rows[:, LENGTH] = queries
            tokens = np.zeros(3 * starts[-1] + len(starts), np.int32)
            tokens[2 * starts[-1] : 3 * starts[-1]] = NOWHERE
            tokens[3 * starts[-1] :] = starts
            self.step(rows, tokens)
        for splits in triton.all_splits(self.places.max_len, self.device.where):  # of which lengths choose one later

            def decode(splits: int = splits) -> None:
                idle = torch.zeros((2, self.places.width), dtype=torch.int32, device=self.device.where)
                idle[:, SLOT] = NOWHERE
                self._decode(idle, splits)

            self.device.submit(COMPUTE, decode)
        block_size = self.places.block_size
        if block_size and self.places.host_slots >= block_size:
            self._open_host_pool()
        if block_size and self.cache.data.shape[2] >= 2 * block_size:

            def move() -> None:
                block = torch.zeros(1, dtype=torch.int64, device=self.device.where)
                for staging in self._staging:
                    triton.gather_blocks(self.cache, block_size, staging.blocks, block)
                    triton.scatter_blocks(self.cache, block_size, staging.blocks, block)
                triton.copy_blocks(self.cache, block_size, torch.tensor([[0, 1]]))

            self.device.submit(COMPUTE, move)
        for size in reversed(self.sizes):
            splits = triton.num_splits([self.places.max_len] * size, self.cache.data.shape[3], self.device.where)
            outputs: list[Output] = []

            def work(size: int = size, splits: int = splits, outputs: list[Output] = outputs) -> None:
                outputs[:] = [self._decode(self._rows[:size], splits)]

            self.device.submit(COMPUTE, work)
            before = self.device.used_bytes()
            replay = self.device.capture(work)
            self.graph_bytes.append(max(0, self.device.used_bytes() - before))

            def again(replay: Callable[[], None] = replay, outputs: list[Output] = outputs) -> None:
                replay()
                self.output = outputs[0]

            self._replays[size] = again
        self.device.synchronize(self.device.record(COMPUTE))

    def step(self, rows: Ints, tokens: Ints | None = None) -> None:
        """Compute: write K and V, attend, and leave ``output``.

        Args:
            rows: ``[B, places.width]``: of a decode the columns ``ID`` to ``BASE``, and the block table; with
                ``tokens`` only ``LENGTH``, ``BASE`` and the table count.
            tokens: of a step in which some sequence has several new tokens: ids, positions and slots ``[T]`` each, and
                the first of each sequence ``[B + 1]``, one after the other.
        """
        num = len(rows)
        size = next((size for size in self.sizes if size >= num), 0)
        if tokens is None and size:
            table = self._on_host(rows, padded_to=size)

            def replay() -> None:
                self._rows[:size].copy_(table, non_blocking=True)
                self._replays[size]()

            self.device.submit(COMPUTE, replay)
            return
        table = self._on_host(rows)
        lens, heads = rows[:, LENGTH].tolist(), self.cache.data.shape[3]
        if tokens is None:
            splits = triton.num_splits(lens, heads, self.device.where)

            def decode() -> None:
                self.output = self._decode(table.to(self.device.where, non_blocking=True), splits)

            self.device.submit(COMPUTE, decode)
            return
        starts = tokens[-num - 1 :]
        lengths = np.diff(starts)
        num_decodes = int((lengths != 1).argmax()) if (lengths != 1).any() else num
        splits = triton.num_splits(lens[:num_decodes], heads, self.device.where)
        new = self._on_host(tokens)

        def mixed() -> None:
            self.output = self._mixed(
                table.to(self.device.where, non_blocking=True),
                new.to(self.device.where, non_blocking=True),
                int(starts[-1]),
                num_decodes,
                splits,
            )

        self.device.submit(COMPUTE, mixed)

    def step_seconds(self, size: int) -> float:
        """What the device takes for the last decode step of this bucket, when it does it once more."""
        return self.device.seconds(self._replays[size])

    def copy(self, pairs: NDArray[np.int64]) -> None:
        """Copy slots within the cache, ``[N, 3]``: first source, first target, how many; the last of a target counts.

        Everything is read before anything is written.
        """
        size = self.places.block_size
        if size and (pairs[:, :2] % size == 0).all():
            blocks = {dst: src for src, dst in (pairs[:, :2] // size).tolist()}
            if blocks.keys().isdisjoint(blocks.values()):
                whole = torch.tensor([(src, dst) for dst, src in blocks.items()])

                def copy_blocks() -> None:
                    triton.copy_blocks(self.cache, size, whole)

                self.device.submit(COMPUTE, copy_blocks)
                return
        slots = {dst + i: src + i for src, dst, count in pairs.tolist() for i in range(count)}
        moved = self._on_host(np.array([(src, dst) for dst, src in slots.items()], np.int64))

        def copy_slots() -> None:
            src, dst = moved.to(self.device.where, non_blocking=True).unbind(1)
            self.cache.data.index_copy_(2, dst, self.cache.data.index_select(2, src))

        self.device.submit(COMPUTE, copy_slots)

    def swap_out(self, pairs: NDArray[np.int64]) -> None:
        """Copy blocks, ``[N, 2]`` of this cache and of the host pool: collected now, then copied beside the rest."""
        for part, staging in self._in_parts(pairs):
            self._out(self._on_host(part[:, 0]), runs(part[:, 1]), staging)

    def swap_in(self, pairs: NDArray[np.int64]) -> None:
        """The other way round, ``[N, 2]`` of the host pool and of this cache; what is computed next waits for it."""
        for part, staging in self._in_parts(pairs):
            self._in(runs(part[:, 0]), self._on_host(part[:, 1]), staging)

    def _in_parts(self, pairs: NDArray[np.int64]) -> Iterator[tuple[NDArray[np.int64], Staging]]:
        """As many at a time as fit into a buffer, which are used by turns."""
        size = len(self._staging[0].blocks)
        for start in range(0, len(pairs), size):
            yield pairs[start : start + size], self._staging[0]
            self._staging.rotate()

    def _out(self, ids: torch.Tensor, targets: list[tuple[int, int, int]], staging: Staging) -> None:
        device, host, size = self.device, self._host, self.places.block_size
        assert host is not None

        def gather() -> None:
            triton.gather_blocks(self.cache, size, staging.blocks, ids.to(device.where, non_blocking=True))

        def fetch() -> None:
            for at, block, count in targets:
                host[block : block + count].copy_(staging.blocks[at : at + count], non_blocking=True)

        if staging.fetched is not None:
            device.wait(COMPUTE, staging.fetched)
        device.submit(COMPUTE, gather)
        device.wait(SWAP, device.record(COMPUTE))
        device.submit(SWAP, fetch)
        staging.fetched = device.record(SWAP)

    def _in(self, sources: list[tuple[int, int, int]], ids: torch.Tensor, staging: Staging) -> None:
        device, host, size = self.device, self._host, self.places.block_size
        assert host is not None

        def fetch() -> None:
            for at, block, count in sources:
                staging.blocks[at : at + count].copy_(host[block : block + count], non_blocking=True)

        def scatter() -> None:
            triton.scatter_blocks(self.cache, size, staging.blocks, ids.to(device.where, non_blocking=True))

        if staging.scattered is not None:
            device.wait(SWAP, staging.scattered)
        device.submit(SWAP, fetch)
        device.wait(COMPUTE, device.record(SWAP))
        device.submit(COMPUTE, scatter)
        staging.scattered = device.record(COMPUTE)

    @torch.inference_mode()
    def _decode(self, rows: torch.Tensor, splits: int) -> Output:
        """One new token of each row."""
        ids, positions, slots, lens, bases = rows[:, :5].T.contiguous()
        starts = torch.arange(len(rows) + 1, dtype=torch.int32, device=rows.device)
        return self._forward(ids, positions, self._batch(rows, starts, lens, slots, bases, len(rows), splits))

    @torch.inference_mode()
    def _mixed(
        self, rows: torch.Tensor, tokens: torch.Tensor, num_tokens: int, num_decodes: int, splits: int
    ) -> Output:
        """Any number of new tokens of each row, at least one."""
        ids, positions, slots = tokens[: 3 * num_tokens].view(3, num_tokens)
        lens, bases = rows[:, LENGTH].contiguous(), rows[:, BASE]
        batch = self._batch(rows, tokens[3 * num_tokens :], lens, slots, bases, num_decodes, splits)
        return self._forward(ids, positions, batch)

    def _batch(
        self,
        rows: torch.Tensor,
        starts: torch.Tensor,
        lens: torch.Tensor,
        slots: torch.Tensor,
        bases: torch.Tensor,
        num_decodes: int,
        splits: int,
    ) -> PackedBatch:
        size = self.places.block_size
        return PackedBatch(
            starts,
            lens,
            slots.long(),
            None if size else bases.long(),
            rows[:, HEADER:] if size else None,
            size or 1,
            num_decodes,
            splits,
        )

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor, batch: PackedBatch) -> Output:
        if not self.leads:
            return Output(*2 * [self.model.body(ids, positions, batch)])
        logits = self.model(ids, positions, batch)
        best, tokens = most_probable(logits)
        return Output(logits, torch.where(best.isfinite(), tokens, NOT_FINITE))

    def _open_host_pool(self) -> None:
        """``[host blocks, layers, 2, block_size, heads, D]``: a block is one piece, and one copy; and two buffers."""
        num_layers, _, _, num_kv_heads, head_dim = self.cache.data.shape
        size, dtype = self.places.block_size, self.cache.data.dtype
        block = (num_layers, 2, size, num_kv_heads, head_dim)
        block_bytes = torch.Size(block).numel() * dtype.itemsize
        num_blocks = self.places.host_slots // size
        try:
            self._host = self.device.on_host((num_blocks, *block), dtype)
        except RuntimeError as error:
            raise KvbenchError(
                f"the host gives no {num_blocks * block_bytes} bytes of memory for what is swapped out "
                f"({str(error).splitlines()[0]}); lower swap_space_bytes="
            ) from None
        num_staged = min(num_blocks, max(1, STAGED_BYTES // block_bytes))
        for _ in range(2):
            self._staging.append(Staging(torch.empty((num_staged, *block), dtype=dtype, device=self.device.where)))

    def _on_host(self, values: NDArray[np.int32] | NDArray[np.int64], padded_to: int = 0) -> torch.Tensor:
        """A copy that nobody changes before the device has read it; rows of padding do nothing."""
        shape = (max(len(values), padded_to), *values.shape[1:])
        copied = self.device.on_host(shape, torch.int64 if values.dtype == np.int64 else torch.int32)
        array = copied.numpy()
        array[: len(values)] = values
        if len(values) < padded_to:
            array[len(values) :] = 0
            array[len(values) :, SLOT] = NOWHERE
        return copied


def runs(blocks: NDArray[np.int64]) -> list[tuple[int, int, int]]:
    """Neighbouring blocks as one: where each run begins in the list, its first block, and how many there are."""
    ends = [0, *(np.flatnonzero(np.diff(blocks) != 1) + 1).tolist(), len(blocks)]
    return [(at, int(blocks[at]), end - at) for at, end in pairwise(ends)]
