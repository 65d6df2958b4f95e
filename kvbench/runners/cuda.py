"""Real tokens on one GPU or several, or with the same code on a CPU, where plain torch stands in for the kernels.

The scheduler's decisions become integers on the host (``runners.torch``), which ``runners.shard`` carries out on the
device. A step waits for the device once, for its tokens; swaps run beside it. Several GPUs hold a model in slices
(``runners.ranks``); they get the same integers.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Sequence as Seq
from dataclasses import asdict, replace
from functools import lru_cache
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from kvbench.allocators.base import Ability, Allocator
from kvbench.attention import triton
from kvbench.cache import KVCache
from kvbench.capacity import Footprint, Model
from kvbench.core import Batch, BlockCopy, KvbenchError, Sequence
from kvbench.models.dtypes import torch_dtype
from kvbench.models.loading import LoadedModel, load
from kvbench.models.packed_linear import weights_bytes
from kvbench.runners.device import COMPUTE, Device, call, check_gpus, device_of
from kvbench.runners.footprint import largest_prefill, peak_bytes, profiled_prefill
from kvbench.runners.packed_model import PackedModel
from kvbench.runners.ranks import close, ranks
from kvbench.runners.shard import (
    BASE,
    HEADER,
    ID,
    LENGTH,
    NOT_FINITE,
    POSITION,
    SLOT,
    Ints,
    Output,
    Places,
    Shard,
    buckets,
)
from kvbench.runners.torch import Layout, New, Prompts, Torch, random_prompts
from kvbench.sampling import SamplingParams, SamplingRows, draw, not_finite, sample

MAX_GRAPH_BATCH = 256


class Steps(Protocol):
    """Who carries out steps: the shard of one device, or all of them together."""

    places: Places
    device: Device
    model: PackedModel

    @property
    def output(self) -> Output:
        """As ``Shard.output``."""
        ...

    def step(self, rows: Ints, tokens: Ints | None = None) -> None:
        """As ``Shard.step``."""
        ...

    def copy(self, pairs: NDArray[np.int64]) -> None:
        """As ``Shard.copy``."""
        ...

    def swap_out(self, pairs: NDArray[np.int64]) -> None:
        """As ``Shard.swap_out``."""
        ...

    def swap_in(self, pairs: NDArray[np.int64]) -> None:
        """As ``Shard.swap_in``."""
        ...


class Queued(Torch):
    """``Torch`` whose steps are carried out by a device: static buffers, graphs, queues.

    Args:
        steps: who carries them out.
        allocator: asked where sequences lie, never changed.
        prompts: token ids of a request's prompt.
        params: of every request.
    """

    def __init__(self, steps: Steps, allocator: Allocator, prompts: Prompts, params: SamplingParams) -> None:
        super().__init__(steps.model, steps.model.cache, allocator, prompts, params)
        self.steps = steps
        self.device = steps.device
        self.device_name = self.device.name

    def warm_up(self) -> None:
        """Done by whoever made the steps."""

    def _generate(self, layout: Layout, new: New) -> tuple[torch.Tensor, list[int]]:
        started = time.perf_counter()
        self._fill(new, layout.where)
        source, lengths = layout.source, new.lengths if layout.source is None else new.lengths[layout.source]
        count = len(layout.drawn)
        tokens = self.device.on_host((count,), torch.int64)
        logits: list[torch.Tensor] = []

        def choose() -> None:
            output = self.steps.output
            rows: slice | torch.Tensor = slice(None, count)
            if source is not None:
                rows = torch.from_numpy(source).to(self.device.where, non_blocking=True)
            logits.append(output.logits[rows])
            chosen = output.chosen[rows]
            if (layout.sampling.temperature > 0).any():
                drawn = chosen.clone()
                draw(drawn, logits[0], layout.sampling, lengths)
                chosen = torch.where(chosen == NOT_FINITE, chosen, drawn)
            tokens.copy_(chosen, non_blocking=True)

        self.device.submit(COMPUTE, choose)
        self.device.synchronize(self.device.record(COMPUTE))
        self.model_s += time.perf_counter() - started
        drawn = tokens.tolist()
        if NOT_FINITE in drawn:
            raise not_finite(drawn.index(NOT_FINITE), str(logits[0].dtype))
        return logits[0], drawn

    def _fill(self, new: New, where: NDArray[np.int64]) -> None:
        num = len(new.lengths)
        rows = np.zeros((num, self.steps.places.width), np.int32)
        rows[:, LENGTH] = new.lengths
        if self._is_contiguous:
            rows[:, BASE] = where[:, 0]
        else:
            width = min(where.shape[1], rows.shape[1] - HEADER)  # a layout has columns to spare
            rows[:, HEADER : HEADER + width] = where[:, :width]
        if len(new.ids) == num:
            rows[:, ID], rows[:, POSITION], rows[:, SLOT] = new.ids, new.positions, new.slots
            self.steps.step(rows)
        else:
            parts = (new.ids, new.positions, new.slots, new.query_start)
            self.steps.step(rows, np.concatenate(parts).astype(np.int32))

    def _copy(self, copies: Seq[BlockCopy]) -> None:
        self.steps.copy(np.array(copies, np.int64))

    def _swap(self, batch: Batch) -> None:
        pairs = np.array([(move.src, move.dst) for move in batch.moves], np.int64) // self.allocator.block_size
        (self.steps.swap_out if batch.swapped else self.steps.swap_in)(pairs)

    def _search(
        self, batch: Batch, layout: Layout, logits: torch.Tensor, tokens: dict[Sequence, int]
    ) -> dict[Sequence, list[int]] | None:
        search = super()._search
        return call(self.device, lambda: search(batch, layout, logits, tokens))


def open_runner(
    model: Model,
    allocator: Allocator,
    seed: int,
    device: str,
    sampling: SamplingParams,
    max_graph_batch: int = MAX_GRAPH_BATCH,
    tensor_parallel: int = 1,
    stops: bool = False,
) -> Queued:
    """Load a model, compile and capture everything, so that the first iteration is like the others.

    Args:
        model: shapes, weights and dtype.
        allocator: of a pool that the model's K and V will fill.
        seed: of random weights and prompts.
        device: ``cuda``; ``cpu`` runs the same code without kernels and graphs, to try it.
        sampling: how tokens are chosen.
        max_graph_batch: sequences of the largest decode step that is captured; 0: none is.
        tensor_parallel: GPUs, or processes on a CPU, that hold the model in slices.
        stops: whether the model's stop tokens end an output before its forced length.

    Raises:
        KvbenchError: no such device, heads that cannot be sliced so, or what loading the model raises.
    """
    _check(device, max_graph_batch, tensor_parallel)
    is_contiguous = Ability.GROW not in allocator.abilities
    places = Places(0 if is_contiguous else allocator.block_size, model.max_model_len, allocator.host_slots)
    sizes = buckets(min(max_graph_batch, allocator.num_slots)) if max_graph_batch else []
    steps: Steps
    if tensor_parallel > 1:
        group = ranks(model, device, tensor_parallel, seed, open_shard)
        loaded, steps = group.loaded, group.open(allocator.num_slots, places, sizes)
    else:
        close()
        loaded = _load(json.dumps(asdict(model)), device, seed)
        steps = open_shard(loaded, device_of(device), allocator.num_slots, places, sizes)
    if stops:
        sampling = replace(sampling, stop_token_ids=(*sampling.stop_token_ids, *loaded.stop_token_ids))
    runner = Queued(steps, allocator, random_prompts(model.vocab_size, seed), sampling)
    runner.weights_bytes = tensor_parallel * weights_bytes(loaded.model)
    return runner


def open_shard(
    loaded: LoadedModel, device: Device, num_slots: int, places: Places, sizes: list[int], leads: bool = True
) -> Shard:
    """One device's part, warmed up."""
    shapes = loaded.shapes
    dtype = torch_dtype(shapes.dtype)
    cache = KVCache(shapes.num_layers, num_slots, shapes.num_kv_heads, shapes.head_dim, dtype, device.where)
    model = PackedModel(loaded.model, cache, triton.attend, triton.write)
    shard = Shard(model, device, places, sizes, leads=leads)
    if device.where.type == "cuda":
        torch.cuda.synchronize(device.where)  # weights come by the default stream, which no queue waits for
    shard.warm_up()
    return shard


def measure(
    model: Model,
    num_tokens: int,
    num_seqs: int,
    seed: int,
    device: str,
    sampling: SamplingParams,
    max_graph_batch: int = MAX_GRAPH_BATCH,
    tensor_parallel: int = 1,
    stops: bool = False,
) -> Footprint:
    """As ``kvbench.runners.cpu.measure``, on the device; of several GPUs all together.

    The pool is not there yet, so the graphs that will be captured over it are estimated: the two largest are captured
    for a pool of the prefill's size. The first takes the memory that all share, each other one what the second takes.

    Raises:
        KvbenchError: as ``open_runner``; several GPUs, whose pool has to be given.
    """
    del stops
    _check(device, max_graph_batch, tensor_parallel)
    if tensor_parallel > 1:
        raise KvbenchError(
            f"runner.tensor_parallel={tensor_parallel}: the KV pool of several GPUs is not measured; "
            "give kv_cache_bytes= or kv_cache_seqs="
        )
    close()
    loaded = _load(json.dumps(asdict(model)), device, seed)
    profiled, rows = profiled_prefill(num_tokens, num_seqs)
    sizes = buckets(max_graph_batch) if max_graph_batch else []
    key = json.dumps(asdict(model)), device, profiled, rows, len(sizes)
    if key not in _seen:
        peak, graphs = _profile(loaded, device, sampling, profiled, rows, sizes[-2:])
        all_graphs = graphs[0] + (len(sizes) - 1) * graphs[-1] if graphs else 0
        _seen[key] = Footprint(weights_bytes(loaded.model), peak / profiled, all_graphs)
    return _seen[key]


_seen: dict[tuple[str, str, int, int, int], Footprint] = {}


def _profile(
    loaded: LoadedModel, device: str, sampling: SamplingParams, num_tokens: int, num_seqs: int, sizes: list[int]
) -> tuple[int, list[int]]:
    """Bytes that a prefill and the choice of its tokens take at their peak, and those that graphs take.

    Both beside the weights and the pool; the graphs' are those of ``Shard.graph_bytes``.
    """
    queues = device_of(device)
    lengths = largest_prefill(num_tokens, num_seqs, loaded.shapes.max_model_len)
    shard = open_shard(loaded, queues, num_tokens, Places(0, loaded.shapes.max_model_len, 0), sizes)
    call(queues, shard.cache.data.zero_)
    starts = np.cumsum([0, *lengths])
    rows = np.zeros((len(lengths), shard.places.width), np.int32)
    rows[:, LENGTH], rows[:, BASE] = lengths, starts[:-1]
    positions = np.concatenate([np.arange(length) for length in lengths])
    tokens = np.concatenate([np.zeros_like(positions), positions, np.arange(num_tokens), starts]).astype(np.int32)
    params = SamplingRows.of([sampling] * len(lengths))

    def prefill() -> None:
        shard.step(rows, tokens)
        call(queues, lambda: sample(shard.output.logits, params, lengths))

    if device == "cpu":
        return peak_bytes(prefill), shard.graph_bytes
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    prefill()
    return torch.cuda.max_memory_allocated() - before, shard.graph_bytes


@lru_cache(maxsize=1)
def _load(shapes: str, device: str, seed: int) -> LoadedModel:
    """Points that differ in other parts only, and are run one after the other, share a model; no two are kept."""
    _load.cache_clear()
    gc.collect()  # the model, pool and graphs of an earlier run, which may fill the device
    return load(Model(**json.loads(shapes)), device=device, seed=seed)


def _check(device: str, max_graph_batch: int, tensor_parallel: int) -> None:
    """Refuse options that cannot be. Raises KvbenchError as ``open_runner``."""
    check_device(device, tensor_parallel)
    if max_graph_batch < 0:
        raise KvbenchError(f"runner.max_graph_batch={max_graph_batch} is below 0; give 0 for no graphs")
    if tensor_parallel < 1:
        raise KvbenchError(f"runner.tensor_parallel={tensor_parallel} computes nothing; give 1 or more")


def check_device(device: str, num_gpus: int = 1) -> None:
    """Refuse a ``runner.device`` that is none, or not here. Raises KvbenchError with the remedy."""
    if device == "cuda":
        check_gpus(num_gpus)
        triton.check_installed()
    elif device != "cpu":
        raise KvbenchError(f"runner.device={device} is not supported here; give cuda, or cpu to try the code")
