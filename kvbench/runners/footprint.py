"""How much memory a piece of work takes at its peak, by what Linux counts for this process."""

from __future__ import annotations

import ctypes
import gc
import math
import sys
from collections.abc import Callable
from pathlib import Path

from kvbench.capacity import MAX_BATCHED_TOKENS
from kvbench.core import KvbenchError

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of <malloc.h>
_KEPT_BYTES = 2**30


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


def profiled_prefill(num_tokens: int, num_seqs: int) -> tuple[int, int]:
    """Tokens and prompts that stand for so many of them where activations are measured."""
    profiled = min(num_tokens, MAX_BATCHED_TOKENS)
    return profiled, max(1, math.ceil(min(num_seqs, num_tokens) * profiled / num_tokens))


def largest_prefill(num_tokens: int, num_seqs: int, max_model_len: int) -> list[int]:
    """So many tokens in so many prompts, or as few more as can be, one of them as long as possible."""
    longest = min(max_model_len, num_tokens - num_seqs + 1)
    rest = num_tokens - longest
    num_others = max(num_seqs - 1, -(-rest // longest))
    return [longest, *(rest // num_others + (row < rest % num_others) for row in range(num_others))]


def keep_freed_memory() -> None:
    """Let glibc keep large blocks that are freed: it would fault in the activations anew in every iteration.

    A prefill of a small model spends a quarter of its time there; other C libraries have no such setting.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(ctypes.c_int(_TRIM_THRESHOLD), ctypes.c_int(_KEPT_BYTES))
        mallopt(ctypes.c_int(_MMAP_THRESHOLD), ctypes.c_int(_KEPT_BYTES))
