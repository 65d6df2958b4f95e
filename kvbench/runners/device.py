"""Where a runner's work goes: two queues of a GPU, or a CPU that does everything at once.

``COMPUTE`` has the forward passes and all that touches the cache, ``SWAP`` the copies between the host and the device.
Work of one queue is done in its order; what has to wait for the other queue says so. The host waits for events alone.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch

from kvbench.core import KvbenchError

COMPUTE, SWAP = "compute", "swap"
T = TypeVar("T")


class Device(Protocol):
    """Queues of work.

    Attributes:
        where: for tensors.
        name: for tables.
    """

    where: torch.device
    name: str

    def submit(self, queue: str, work: Callable[[], None]) -> None:
        """Put work into a queue. It may run later: what it reads on the host must not change any more."""
        ...

    def record(self, queue: str) -> Any:
        """An event: all that is in the queue now is done."""
        ...

    def wait(self, queue: str, event: Any) -> None:
        """What is put into the queue from now on runs after the event."""
        ...

    def synchronize(self, event: Any) -> None:
        """The host waits."""
        ...

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Work to be submitted to ``COMPUTE`` again and again, over the same tensors; it has run there before."""
        ...

    def used_bytes(self) -> int:
        """Memory of the device that is taken, by whomever, less what is kept for reuse; 0 where nobody counts."""
        ...

    def cache_bytes(self) -> int:
        """Of the largest cache before that memory; 0 where it does not matter."""
        ...

    def seconds(self, work: Callable[[], None]) -> float:
        """What work takes in ``COMPUTE``, on the device's own clock where it has one; waits for it."""
        ...

    def on_host(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Memory of the host that the device can read and write by itself."""
        ...


class Cpu:
    """Does everything when it is submitted."""

    where = torch.device("cpu")

    def __init__(self) -> None:
        num_threads = torch.get_num_threads()
        self.name = f"cpu, {num_threads} thread{'s' * (num_threads > 1)}"

    def submit(self, queue: str, work: Callable[[], None]) -> None:
        """Now."""
        del queue
        work()

    def record(self, queue: str) -> None:
        """Everything is done already."""

    def wait(self, queue: str, event: None) -> None:
        """Nothing to wait for."""

    def synchronize(self, event: None) -> None:
        """Nothing to wait for."""

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """The work itself."""
        return work

    def used_bytes(self) -> int:
        """Nobody counts."""
        return 0

    def cache_bytes(self) -> int:
        """A CPU's times are for trying the code."""
        return 0

    def seconds(self, work: Callable[[], None]) -> float:
        """On the host's clock."""
        started = time.perf_counter()
        work()
        return time.perf_counter() - started

    def on_host(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Plain memory."""
        return torch.empty(shape, dtype=dtype)


class Cuda:
    """Two streams of a GPU; none is the default one, which would wait for all others.

    Args:
        index: of the GPU.

    Raises:
        KvbenchError: there is no such GPU.
    """

    def __init__(self, index: int = 0) -> None:
        check_gpus(index + 1)
        torch.cuda.set_device(index)
        gc.collect()  # the pool of an earlier run, and its graphs
        torch.cuda.empty_cache()
        self.where = torch.device("cuda", index)
        self.name = torch.cuda.get_device_name(index)
        self._streams = {queue: torch.cuda.Stream(self.where) for queue in (COMPUTE, SWAP)}
        self._pool: Any = None

    def submit(self, queue: str, work: Callable[[], None]) -> None:
        """Launch it on the queue's stream."""
        with torch.cuda.stream(self._streams[queue]):
            work()

    def record(self, queue: str) -> torch.cuda.Event:
        """A CUDA event."""
        event: torch.cuda.Event = self._streams[queue].record_event()
        return event

    def wait(self, queue: str, event: torch.cuda.Event) -> None:
        """On the device."""
        self._streams[queue].wait_event(event)

    def synchronize(self, event: torch.cuda.Event) -> None:
        """On the host."""
        event.synchronize()

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """A CUDA graph. All graphs share their memory, as one runs at a time: capture the largest first."""
        graph = torch.cuda.CUDAGraph()
        # Only this thread is watched: others, as a communication library's, may ask the driver meanwhile.
        with torch.cuda.graph(graph, self._pool, self._streams[COMPUTE], capture_error_mode="thread_local"):
            work()
        self._pool = self._pool or graph.pool()
        return graph.replay

    def used_bytes(self) -> int:
        """By the driver, so that what it keeps for graphs counts too."""
        torch.cuda.synchronize(self.where)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.where)
        return int(total - free)

    def cache_bytes(self) -> int:
        """L2, as the driver says."""
        return int(torch.cuda.get_device_properties(self.where).L2_cache_size)

    def seconds(self, work: Callable[[], None]) -> float:
        """By CUDA events."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(self._streams[COMPUTE]):
            start.record()
            work()
            end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    def on_host(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Pinned, and not reused by torch before the copies that were launched are done."""
        return torch.empty(shape, dtype=dtype, pin_memory=True)


def call(device: Device, work: Callable[[], T]) -> T:
    """Do work behind all that is in ``COMPUTE``, and wait for its result."""
    results: list[T] = []
    device.submit(COMPUTE, lambda: results.append(work()))
    device.synchronize(device.record(COMPUTE))
    return results[0]


def device_of(name: str, index: int = 0) -> Device:
    """The device that ``runner.device`` names. Raises KvbenchError for a GPU that does not exist."""
    return Cuda(index) if name == "cuda" else Cpu()


def check_gpus(num: int = 1) -> None:
    """Refuse a machine with fewer GPUs. Raises KvbenchError with the remedy."""
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found < num:
        built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPUs only"
        raise KvbenchError(
            f"runner=cuda needs {num} GPU{'s' * (num > 1)}, but torch {torch.__version__} (built for {built}) sees "
            f"{found}; use runner=cpu here, or see docs/gpu.md for a machine with a GPU"
        )


def usable_bytes(num_gpus: int = 1) -> int:
    """Memory that this process could hold on so many GPUs now, what torch holds already included.

    Raises:
        KvbenchError: there are not so many.
    """
    check_gpus(num_gpus)
    return sum(torch.cuda.mem_get_info(gpu)[0] + torch.cuda.memory_reserved(gpu) for gpu in range(num_gpus))


def gpu_memory_bytes() -> int:
    """Memory of the first GPU. Raises KvbenchError without one."""
    check_gpus()
    return int(torch.cuda.get_device_properties(0).total_memory)
