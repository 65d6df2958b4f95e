"""The pickled pairs of the PagedAttention authors' artifact, read without trusting them.

Unpickling can run any code: a pickle names a global and calls it. Lists of integers need no global, so a pickle is read
only when every instruction in it builds lists, tuples and integers; the unpickler refuses globals besides.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from kvbench.core import KvbenchError
from kvbench.workloads.files import open_bytes
from kvbench.workloads.rows import Rows, from_arrays

_HARMLESS = frozenset(
    {"PROTO", "FRAME", "STOP", "MARK", "INT", "BININT", "BININT1", "BININT2"}
    | {"EMPTY_LIST", "LIST", "APPEND", "APPENDS", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"}
    | {"PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE", "GET", "BINGET", "LONG_BINGET"}
)


class _NoGlobals(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it names the global {module_name}.{global_name}")


def read_pickled_pairs(path: Path) -> Rows:
    """Pairs from a pickled list of ``(prompt, output)``, each a number of tokens or the list of their ids.

    Raises:
        KvbenchError: unreadable, not such a list, or holding anything but lists, tuples and integers.
    """
    with open_bytes(path) as file:
        data = file.read()
    try:
        _refuse_all_but_lists(data)
        entries: Any = _NoGlobals(io.BytesIO(data)).load()
        pairs = np.array([(_length(prompt), _length(output)) for prompt, output in entries], dtype=np.int64)
    except Exception as error:  # a broken pickle raises nearly anything
        raise KvbenchError(
            f"{path} is not a pickled list of (prompt, output) lengths: {error}; fetch the artifact's file again"
        ) from error
    if not len(pairs):
        raise KvbenchError(f"{path} holds no pairs; fetch the artifact's file again")
    return from_arrays(str(path), pairs[:, 0], pairs[:, 1])


def _refuse_all_but_lists(data: bytes) -> None:
    """Raises `pickle.UnpicklingError` before anything is built."""
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name not in _HARMLESS:
            named = f" {argument}" if isinstance(argument, str) else ""
            raise pickle.UnpicklingError(f"it holds {opcode.name}{named}".replace("\n", " "))
        # A memo index may be up to 2**32, for which the unpickler would claim 64 GB.
        if opcode.name in {"PUT", "LONG_BINPUT"} and isinstance(argument, int) and not 0 <= argument <= len(data):
            raise pickle.UnpicklingError(f"it stores an object under the index {argument}")


def _length(tokens: Any) -> int:
    if type(tokens) is int:
        return tokens
    if isinstance(tokens, list | tuple):
        return len(tokens)
    raise pickle.UnpicklingError(f"it holds {tokens!r:.40} for a number of tokens")
