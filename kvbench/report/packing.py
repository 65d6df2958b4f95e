"""Columns of numbers as text that a page can carry: little-endian, deflated, base64."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

Packed = dict[str, object]


def packed(columns: Mapping[str, NDArray[np.generic]]) -> Packed:
    """Columns behind each other, with what is needed to take them apart.

    Args:
        columns: of whole numbers and floats. Integers take the narrowest of 1, 2 and 4 bytes that holds them exactly,
            floats 4 bytes: seven digits.

    Returns:
        ``columns``: name, type (as in JavaScript's ``Uint8Array``) and length of each; ``data``: the text.
    """
    narrow = {name: _narrow(column) for name, column in columns.items()}
    data = b"".join(column.tobytes() for column in narrow.values())
    return {
        "columns": [[name, _TYPES[column.dtype.str], len(column)] for name, column in narrow.items()],
        "data": base64.b64encode(zlib.compress(data, 9)).decode(),
    }


def size(content: Packed) -> int:
    """Bytes that packed columns take in a page."""
    return len(str(content["data"]))


_TYPES = {
    "|u1": "Uint8",
    "|i1": "Int8",
    "<u2": "Uint16",
    "<i2": "Int16",
    "<u4": "Uint32",
    "<i4": "Int32",
    "<f4": "Float32",
}


def _narrow(column: NDArray[np.generic]) -> NDArray[np.generic]:
    if column.dtype.kind == "f":
        return column.astype("<f4")
    whole = column.astype(np.int64)
    low, high = (int(whole.min()), int(whole.max())) if len(whole) else (0, 0)
    kinds = ("|u1", "<u2", "<u4") if low >= 0 else ("|i1", "<i2", "<i4")
    fits = (kind for kind in kinds if np.iinfo(kind).min <= low and high <= np.iinfo(kind).max)
    return whole.astype(next(fits))
