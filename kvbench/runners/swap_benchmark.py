"""Times what Fig. 19(a) of the PagedAttention paper times, on this machine: swapping out and in, and recomputing.

A run of it looks like any other, so that it has a configuration, a manifest and records; its iterations are what is
timed, in turn, and ``seconds`` in its ``steps`` are the times.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from kvbench.allocators.base import Allocator
from kvbench.capacity import Model
from kvbench.core import Batch, BlockCopy, Request, StepResult
from kvbench.records import Columns

if TYPE_CHECKING:
    from kvbench.runners.torch import Torch

OPERATIONS = ("recompute", "swap_out", "swap_in")
"""Iterations of a request, in turn; the first computes its prompt."""
NUM_WARM_UPS = 3
"""Turns whose times do not count, as in the authors' benchmark."""


class SwapBenchmark:
    """A runner that computes a request's prompt, moves its K and V to a host pool and back, and so on.

    As in the authors' benchmark blocks lie at random in both pools, wherever the allocator would put them. They are
    moved as a real run moves them.

    Args:
        runner: whose model and pool are used; its allocator's block size is that of the blocks.
        seed: of the places.

    Attributes:
        host: the pool that is swapped to, as large as the runner's.
        places: where the request's blocks lie in each, ``pool`` and ``host``.
    """

    may_stop_early = False

    def __init__(self, runner: Torch, seed: int) -> None:
        from kvbench.cache import KVCache

        self.runner = runner
        self.device_name = runner.device_name
        self.weights_bytes = runner.weights_bytes
        self._block_size = runner.allocator.block_size
        num_layers, _, self._num_slots, num_kv_heads, head_dim = runner.cache.data.shape
        self.host = KVCache(num_layers, self._num_slots, num_kv_heads, head_dim, runner.cache.data.dtype)
        for pool in (runner.cache, self.host):
            pool.data.zero_()  # touched, as in a run that has been going on
        self._rng = np.random.default_rng(seed)
        self.places: dict[str, list[int]] = {}

    def execute(self, batch: Batch) -> StepResult:
        """Do what comes next for the request; its output is as long as the run is to be."""
        (seq,) = batch.running
        num_done = batch.step - seq.origin - seq.request.prompt_len
        operation = OPERATIONS[num_done % len(OPERATIONS)]
        seconds = self._recompute(seq.request) if operation == "recompute" else self._swap(operation)
        return StepResult(seconds, [seq] if num_done + 1 == seq.request.output_len else [])

    def _recompute(self, request: Request) -> float:
        """Compute the prompt into new places."""
        import torch

        from kvbench.attention.base import PackedBatch

        size, length = self._block_size, request.prompt_len
        self.places["pool"] = blocks = self._draw(-(-length // size))
        start, context_len, table = (torch.tensor(values) for values in ([0, length], [length], [blocks]))
        positions = torch.arange(length)
        ids = torch.tensor(self.runner.prompts(request))
        packed = PackedBatch(
            start, context_len, table[0, positions // size] * size + positions % size, None, table, size
        )
        started = time.perf_counter()
        self.runner.model(ids, positions, packed)
        return time.perf_counter() - started

    def _swap(self, operation: str) -> float:
        """Move what was computed from one pool into new places of the other."""
        size, pool = self._block_size, self.runner.cache
        source, target, key = (pool, self.host, "host") if operation == "swap_out" else (self.host, pool, "pool")
        sources = self.places["pool" if key == "host" else "host"]
        self.places[key] = targets = self._draw(len(sources))
        started = time.perf_counter()
        target.move(
            [BlockCopy(src * size, dst * size, size) for src, dst in zip(sources, targets, strict=True)], source
        )
        return time.perf_counter() - started

    def _draw(self, num_blocks: int) -> list[int]:
        blocks: list[int] = self._rng.permutation(self._num_slots // self._block_size)[:num_blocks].tolist()
        return blocks


def open_benchmark(model: Model, allocator: Allocator, seed: int, **options: Any) -> SwapBenchmark:
    """The benchmark with what ``open_runner`` opens; options and errors are the same."""
    from kvbench.runners.cpu import open_runner

    return SwapBenchmark(open_runner(model, allocator, seed, **options), seed)


def medians_ms(steps: Columns) -> Mapping[str, float]:
    """What is done -> milliseconds, the median of the turns that count."""
    turns = steps["seconds"].astype(np.float64).reshape(-1, len(OPERATIONS))[NUM_WARM_UPS:]
    return dict(zip(OPERATIONS, (1e3 * np.median(turns, axis=0)).tolist(), strict=True))
