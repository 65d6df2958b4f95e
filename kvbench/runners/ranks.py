"""Tensor parallelism: several processes, each with its slice of the model and the K/V heads of that slice.

There is one scheduler, in rank 0. It tells the others what to do in integers (tokens, slots, block tables, copies,
swaps; the same for all, because every rank divides its cache alike) and then does the same itself. Between the layers
they sum their results. Logits and tokens are rank 0's business. (PagedAttention paper, section 4.6.)

Integers go through gloo, sums through NCCL on GPUs and gloo on a CPU. The processes stay as long as runs use the same
model; they end with the process that started them.
"""

from __future__ import annotations

import json
import multiprocessing
import shutil
import tempfile
import weakref
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import asdict, replace
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch._C._distributed_c10d import FileStore

from kvbench.capacity import Model
from kvbench.core import KvbenchError
from kvbench.models.loading import LoadedModel, load
from kvbench.models.slicing import slice_model, sliced
from kvbench.runners.device import Device, device_of
from kvbench.runners.shard import Ints, Output, Places, Shard

STOP, OPEN, STEP, COPY, SWAP_OUT, SWAP_IN = range(6)
NOTHING: NDArray[np.int64] = np.empty(0, np.int64)
MEETING = timedelta(minutes=10)
"""For how long ranks wait for each other at the start, while each loads the model."""
PAUSE = timedelta(days=1)
"""For how long they wait for the next run; that one has died is seen at once."""
OpenShard = Callable[[LoadedModel, Device, int, Places, list[int], bool], Shard]
"""From rank's slice, queues, slots, places, buckets and whether it is rank 0."""


class Together:
    """The shards of all ranks, as rank 0 sees them: like its own, but the others do the same.

    Args:
        shard: rank 0's.
    """

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        self.places = shard.places
        self.device = shard.device
        self.model = shard.model

    @property
    def output(self) -> Output:
        """Rank 0's: the vocabulary is not sliced."""
        return self.shard.output

    def step(self, rows: Ints, tokens: Ints | None = None) -> None:
        """As ``Shard.step``, on all."""
        tell(STEP, rows, NOTHING if tokens is None else tokens)
        self.shard.step(rows, tokens)

    def copy(self, pairs: NDArray[np.int64]) -> None:
        """As ``Shard.copy``, on all."""
        tell(COPY, pairs)
        self.shard.copy(pairs)

    def swap_out(self, pairs: NDArray[np.int64]) -> None:
        """As ``Shard.swap_out``, on all."""
        tell(SWAP_OUT, pairs)
        self.shard.swap_out(pairs)

    def swap_in(self, pairs: NDArray[np.int64]) -> None:
        """As ``Shard.swap_in``, on all."""
        tell(SWAP_IN, pairs)
        self.shard.swap_in(pairs)


class Ranks:
    """The processes; made once for a model.

    Args:
        model: whole.
        device: as ``runner.device``.
        num_ranks: this process included.
        seed: of random weights.
        open_shard: how a rank makes its shard.

    Attributes:
        loaded: rank 0's slice.
    """

    def __init__(self, model: Model, device: str, num_ranks: int, seed: int, open_shard: OpenShard) -> None:
        self.open_shard = open_shard
        sliced(model, num_ranks)  # refused before anything is started
        folder = tempfile.mkdtemp(prefix="kvbench")
        context = multiprocessing.get_context("spawn")
        arguments = (num_ranks, str(Path(folder, "ranks")), asdict(model), device, seed)
        options = (torch.get_num_threads(), open_shard)
        others = [
            context.Process(target=_follow, args=(rank, *arguments, *options), daemon=True)
            for rank in range(1, num_ranks)
        ]
        for process in others:
            process.start()
        self.close = weakref.finalize(self, _close, others, folder)
        self.device, self.loaded = _join(0, *arguments)

    def open(self, num_slots: int, places: Places, sizes: list[int]) -> Together:
        """Give every rank a new cache, and warm all up."""
        tell(OPEN, np.array([[num_slots, *places]], np.int64), np.array(sizes, np.int64))
        return Together(self.open_shard(self.loaded, self.device, num_slots, places, sizes, True))


_running: dict[tuple[str, str, int, int, OpenShard], Ranks] = {}


def ranks(model: Model, device: str, num_ranks: int, seed: int, open_shard: OpenShard) -> Ranks:
    """Those of this model; runs that follow each other share them, and those of another one are closed first."""
    key = json.dumps(asdict(model)), device, num_ranks, seed, open_shard
    if key not in _running:
        close()
        _running[key] = Ranks(model, device, num_ranks, seed, open_shard)
    return _running[key]


def close() -> None:
    """End the processes, if there are some."""
    while _running:
        _running.popitem()[1].close()


def tell(command: int, first: NDArray[Any] = NOTHING[None], second: NDArray[Any] = NOTHING) -> None:
    """Rank 0: what all others do next, with an array of two dimensions and one of one."""
    dist.broadcast(torch.tensor([command, *first.shape, len(second)]), 0)
    for array in (first, second):
        if array.size:
            dist.broadcast(torch.from_numpy(np.ascontiguousarray(array, np.int64)), 0)


def _listen() -> tuple[int, NDArray[np.int64], NDArray[np.int64]]:
    """Another rank: a command and its arrays."""
    head = torch.empty(4, dtype=torch.int64)
    dist.broadcast(head, 0)
    command, rows, columns, count = head.tolist()
    first, second = torch.empty((rows, columns), dtype=torch.int64), torch.empty(count, dtype=torch.int64)
    for array in (first, second):
        if array.numel():
            dist.broadcast(array, 0)
    return command, first.numpy(), second.numpy()


def _follow(
    rank: int,
    num_ranks: int,
    meeting: str,
    model: dict[str, Any],
    device: str,
    seed: int,
    num_threads: int,
    open_shard: OpenShard,
) -> None:
    """The life of another rank."""
    torch.set_num_threads(num_threads)
    try:
        queues, loaded = _join(rank, num_ranks, meeting, model, device, seed)
    except KvbenchError:  # rank 0 has the same and tells it
        return
    shard: Shard | None = None
    while True:
        try:
            command, first, second = _listen()
        except RuntimeError:  # rank 0 is gone
            return
        if command == STOP:
            return
        if command == OPEN:
            shard = None  # its memory is free before the next takes some
            num_slots, *places = first[0].tolist()
            shard = open_shard(loaded, queues, num_slots, Places(*places), second.tolist(), False)
            continue
        assert shard is not None
        if command == STEP:
            shard.step(first.astype(np.int32), second.astype(np.int32) if len(second) else None)
        else:
            {COPY: shard.copy, SWAP_OUT: shard.swap_out, SWAP_IN: shard.swap_in}[command](first)


def _join(
    rank: int, num_ranks: int, meeting: str, model: dict[str, Any], device: str, seed: int
) -> tuple[Device, LoadedModel]:
    """Load this rank's slice, by way of the whole model in the host's memory, and meet the others."""
    queues = device_of(device, rank)
    loaded = load(Model(**model), seed=seed)
    store = FileStore(meeting, num_ranks)
    store.set_timeout(MEETING)
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=PAUSE)
    slice_model(loaded.model, rank, num_ranks, dist.all_reduce)
    torch.nn.Module.to(loaded.model, queues.where)
    return queues, replace(loaded, shapes=sliced(loaded.shapes, num_ranks))


def _close(others: Seq[BaseProcess], folder: str) -> None:
    """Send the other ranks home."""
    if any(process.is_alive() for process in others):
        tell(STOP)
    for process in others:
        process.join(timeout=10)
        process.kill()
    if dist.is_initialized():
        dist.destroy_process_group()
    shutil.rmtree(folder, ignore_errors=True)
