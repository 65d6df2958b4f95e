"""Times the decode kernel over contiguous and over paged memory: what Fig. 18(a) of the PagedAttention paper times.

A run of it looks like any other, so that it has a configuration, a manifest and records: its one request has a prompt
as long as the context, and each of its iterations is one operation, whose time is the iteration's ``seconds``. All
operations but the copy are one kernel over the same pool, with the same tiles and splits:

* ``contiguous``: each sequence lies in one piece;
* ``identity``: the same memory through a block table that names it in order, so the difference is addressing;
* ``shuffled``: through a table of shuffled blocks, so the difference to ``identity`` is locality;
* ``naive``: as ``shuffled`` by the usual kernel, which reads the table entry of every token inside its loop;
* ``copy``: of ``rotated_bytes`` from one place of the device to another: how fast its memory is.

A round has every operation once, in an order of its own. Launches rotate over layers that are together far larger than
the caches, and are replayed as one CUDA graph, so that the host does not count.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvbench.allocators.base import Allocator
from kvbench.capacity import Model
from kvbench.core import Batch, KvbenchError, StepResult
from kvbench.records import Columns

if TYPE_CHECKING:
    import torch

    from kvbench.runners.device import Device

OPERATIONS = ("copy", "contiguous", "identity", "shuffled", "naive")
NUM_WARM_UPS = 2
"""Rounds whose times do not count."""
MIN_LAYERS, MAX_LAYERS = 4, 256
MIN_CACHES = 4
"""What launches rotate over is at least so many times the GPU's cache, so that none finds K and V there."""


class Size(NamedTuple):
    """What a launch reads.

    Attributes:
        batch: sequences.
        context_len: tokens of each.
        num_heads: query heads.
        num_kv_heads: K/V heads.
        head_dim: numbers of a head.
        value_bytes: of a number.
        block_size: slots of a block.
        rotated_bytes: K and V of all layers that launches rotate over, at least.
    """

    batch: int
    context_len: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_bytes: int
    block_size: int
    rotated_bytes: float

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Size:
        """That of a point."""
        model = Model(**config["model"])
        return cls(
            config["runner"]["batch"],
            config["workload"]["lengths"]["prompt_len"],
            model.num_heads,
            model.num_kv_heads,
            model.head_dim,
            model.value_bytes,
            config["allocator"]["block_size"],
            config["runner"]["rotated_bytes"],
        )

    @property
    def kv_bytes(self) -> int:
        """K and V of one layer, each read once."""
        return 2 * self.batch * self.context_len * self.num_kv_heads * self.head_dim * self.value_bytes

    @property
    def launch_bytes(self) -> int:
        """All that a launch must move: K and V, queries and outputs, and the block table."""
        rows = 2 * self.batch * self.num_heads * self.head_dim * self.value_bytes
        return self.kv_bytes + rows + 4 * self.batch * self.num_blocks

    @property
    def num_blocks(self) -> int:
        """Of a sequence."""
        return -(-self.context_len // self.block_size)

    @property
    def num_layers(self) -> int:
        """That launches rotate over."""
        return min(max(MIN_LAYERS, math.ceil(self.rotated_bytes / self.kv_bytes)), MAX_LAYERS)

    @property
    def copied_bytes(self) -> int:
        """That a copy reads, and writes."""
        return int(self.rotated_bytes)


class KernelBenchmark:
    """A runner whose iterations are operations; ``seconds`` are those of one launch, or of one copy.

    Args:
        size: of the launches.
        dtype: of the cache.
        device: where they run.
        seed: of the numbers, the blocks and the order.

    Raises:
        KvbenchError: launches that would read the GPU's cache, not its memory.
    """

    may_stop_early = False
    weights_bytes: int | None = None

    def __init__(self, size: Size, dtype: torch.dtype, device: Device, seed: int) -> None:
        import torch

        self.size = size
        self.device = device
        self.device_name = device.name
        self.seed = seed
        rotated, cached = size.num_layers * size.kv_bytes, device.cache_bytes()
        if min(rotated, size.copied_bytes) < MIN_CACHES * cached:
            raise KvbenchError(
                f"launches over {rotated} bytes of K and V, and copies of {size.copied_bytes}, would be served by the "
                f"GPU's cache of {cached}; raise runner.rotated_bytes (at most {MAX_LAYERS} layers), or runner.batch"
            )
        where, num_blocks = device.where, size.batch * size.num_blocks
        rows = num_blocks * size.block_size
        generator = torch.Generator(where).manual_seed(seed)
        shape = (size.num_layers, 2, rows, size.num_kv_heads, size.head_dim)
        self.pool = torch.empty(shape, dtype=dtype, device=where).normal_(generator=generator)
        self.copied = torch.empty(2, size.copied_bytes, dtype=torch.uint8, device=where)
        self.q = torch.empty((size.batch, size.num_heads, size.head_dim), dtype=dtype, device=where)
        self.q.normal_(generator=generator)
        self.lens = torch.full((size.batch,), size.context_len, dtype=torch.int32, device=where)
        blocks = torch.arange(num_blocks, dtype=torch.int32)
        shuffled = torch.from_numpy(np.random.default_rng(seed).permutation(num_blocks).astype(np.int32))
        pad = (-size.num_blocks) % 16  # rows of a table are as aligned as in a run
        tables = [torch.nn.functional.pad(each.view(size.batch, -1), (0, pad)).to(where) for each in (blocks, shuffled)]
        base = torch.arange(size.batch, device=where) * size.num_blocks * size.block_size
        paged = {"page": size.block_size}
        self.options: dict[str, dict[str, Any]] = {
            "contiguous": {"base": base},
            "identity": {"table": tables[0], **paged},
            "shuffled": {"table": tables[1], **paged},
            "naive": {"table": tables[1], **paged, "prefetch": False},
        }
        self.turns = {operation: self._turn(operation) for operation in OPERATIONS}

    def attend(self, operation: str, layer: int) -> torch.Tensor:
        """One launch; its output ``[batch, num_heads, head_dim]``."""
        from kvbench.attention import triton

        splits = triton.num_splits([self.size.context_len] * self.size.batch, self.size.num_kv_heads, self.device.where)
        keys, values = self.pool[layer]
        out: torch.Tensor = triton.kernels(self.device.where).decode(
            self.q, keys, values, self.lens, splits=splits, **self.options[operation]
        )[0]
        return out

    def check(self) -> None:
        """Refuse to time kernels that differ in what they compute.

        Raises:
            KvbenchError: the placements do not give the same bits, or the naive kernel not the same numbers.
        """
        import torch

        from kvbench.runners.device import call

        size = self.size

        def outputs() -> list[torch.Tensor]:
            kept = self.pool[0].clone()
            contiguous, identity = self.attend("contiguous", 0), self.attend("identity", 0)
            order = self.options["shuffled"]["table"][:, : size.num_blocks].flatten().long()
            blocks = (2, -1, size.block_size, size.num_kv_heads, size.head_dim)
            self.pool[0].view(blocks)[:, order] = kept.view(blocks)  # the same sequences in shuffled blocks
            found = [contiguous, identity, self.attend("shuffled", 0), self.attend("naive", 0)]
            self.pool[0].copy_(kept)
            return found

        contiguous, identity, shuffled, naive = call(self.device, outputs)
        if not (torch.equal(contiguous, identity) and torch.equal(contiguous, shuffled)):
            raise KvbenchError(f"paged and contiguous attention differ at {size}")
        tolerance = 1e-5 if naive.dtype == torch.float32 else 2e-2
        if not torch.allclose(contiguous.float(), naive.float(), rtol=tolerance, atol=tolerance):
            raise KvbenchError(f"the naive kernel differs at {size}")

    def execute(self, batch: Batch) -> StepResult:
        """Do the next operation; the request's output is as long as the run is to be."""
        (seq,) = batch.running
        num_done = batch.step - seq.origin - seq.request.prompt_len
        turn, index = divmod(num_done, len(OPERATIONS))
        seconds = self.turns[OPERATIONS[order(self.seed, turn)[index]]]()
        return StepResult(seconds, [seq] if num_done + 1 == seq.request.output_len else [])

    def _turn(self, operation: str) -> Callable[[], float]:
        """What a turn of an operation takes, per launch."""
        from kvbench.runners.device import COMPUTE

        def work() -> None:
            if operation == "copy":
                self.copied[1].copy_(self.copied[0])
                return
            for layer in range(self.size.num_layers):
                self.attend(operation, layer)

        self.device.submit(COMPUTE, work)
        self.device.synchronize(self.device.record(COMPUTE))
        replay = self.device.capture(work)
        launches = 1 if operation == "copy" else self.size.num_layers
        return lambda: self.device.seconds(replay) / launches


def order(seed: int, turn: int) -> NDArray[np.int64]:
    """The operations of a round, by their numbers."""
    return np.random.Generator(np.random.Philox(key=[seed, turn])).permutation(len(OPERATIONS))


def times(steps: Columns, seed: int) -> dict[str, NDArray[np.float64]]:
    """Operation -> its seconds in every round that counts."""
    rounds = steps["seconds"].astype(np.float64).reshape(-1, len(OPERATIONS))
    sorted_rounds = np.array([seconds[np.argsort(order(seed, turn))] for turn, seconds in enumerate(rounds)])
    return dict(zip(OPERATIONS, sorted_rounds[NUM_WARM_UPS:].T, strict=True))


def open_benchmark(
    model: Model, allocator: Allocator, seed: int, device: str, batch: int, context_len: int, rotated_bytes: float
) -> KernelBenchmark:
    """Fill the memory, check the kernels, and warm up.

    Args:
        model: its heads and its dtype count.
        allocator: its block size counts.
        seed: of everything random.
        device: ``cuda``, or ``cpu`` to try the code.
        batch: sequences of a launch.
        context_len: tokens of each.
        rotated_bytes: K and V of all layers that launches rotate over, at least.

    Raises:
        KvbenchError: no such device, or kernels that compute something else.
    """
    from kvbench.models.dtypes import torch_dtype
    from kvbench.runners.cuda import check_device
    from kvbench.runners.device import device_of

    check_device(device)
    heads = (model.num_heads, model.num_kv_heads, model.head_dim)
    size = Size(batch, context_len, *heads, model.value_bytes, allocator.block_size, rotated_bytes)
    benchmark = KernelBenchmark(size, torch_dtype(model.dtype), device_of(device), seed)
    benchmark.check()
    return benchmark
