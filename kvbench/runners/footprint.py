"""How much memory a piece of work takes at its peak, by what Linux counts for this process."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

from kvbench.core import KvbenchError

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"


def peak_bytes(work: Callable[[], object]) -> int:
    """Run ``work`` and return how far the process's resident memory rose above where it was.

    Memory that an allocator keeps from earlier work would hide what ``work`` takes, so it is given back first, where
    the C library can. Pages are counted when they are touched.

    Raises:
        KvbenchError: as ``check_can_measure``.
    """
    check_can_measure()
    gc.collect()
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)
    _CLEAR.write_text(_RESET_PEAK, encoding="ascii")
    before = _status_bytes("VmRSS")
    work()
    return max(_status_bytes("VmHWM") - before, 0)


def check_can_measure() -> None:
    """Refuse a system that does not tell. Raises KvbenchError with the way out."""
    try:
        _CLEAR.write_text(_RESET_PEAK, encoding="ascii")
        _status_bytes("VmHWM")
    except (OSError, StopIteration):
        raise KvbenchError(
            "this system does not tell how much memory a forward takes (Linux does, by /proc/self/clear_refs);\n"
            "give the size of the KV pool: kv_cache_bytes= or kv_cache_seqs="
        ) from None


def _status_bytes(name: str) -> int:
    lines = _STATUS.read_text(encoding="utf-8").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
