"""What an interpreted kernel really reads and writes, by tensor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from triton.runtime import interpreter


@dataclass(slots=True)
class Traffic:
    """Bytes by name of the tensor, and accesses to none of them.

    Attributes:
        read: bytes loaded from each tensor, as often as they were.
        written: bytes stored to each.
        touched: the distinct bytes loaded from each.
        astray: addresses that lie in no tensor.
    """

    read: Counter[str] = field(default_factory=Counter)
    written: Counter[str] = field(default_factory=Counter)
    touched: Counter[str] = field(default_factory=Counter)
    astray: list[int] = field(default_factory=list)


@contextmanager
def counted(**tensors: torch.Tensor) -> Iterator[Traffic]:
    """Count every load and store of the kernels that are launched inside."""
    traffic = Traffic()
    first = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    sizes = {name: tensor.untyped_storage().nbytes() for name, tensor in tensors.items()}
    seen = {name: np.zeros(size, bool) for name, size in sizes.items()}
    builder = interpreter.interpreter_builder
    load, store = builder.create_masked_load, builder.create_masked_store

    def note(counter: Counter[str], pointers: Any, mask: Any) -> None:
        width = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        addresses = np.asarray(pointers.data)
        addresses = addresses[np.broadcast_to(np.asarray(mask.data, bool), addresses.shape)].astype(np.int64).ravel()
        known = np.zeros(len(addresses), bool)
        for name, start in first.items():
            inside = (addresses >= start) & (addresses + width <= start + sizes[name])
            known |= inside
            counter[name] += int(inside.sum()) * width
            if counter is traffic.read:
                offsets = addresses[inside] - start
                seen[name][(offsets[:, None] + np.arange(width)).ravel()] = True
        traffic.astray += addresses[~known].tolist()

    def counting_load(pointers: Any, mask: Any, *rest: Any) -> Any:
        note(traffic.read, pointers, mask)
        return load(pointers, mask, *rest)

    def counting_store(pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        note(traffic.written, pointers, mask)
        return store(pointers, value, mask, *rest)

    builder.create_masked_load, builder.create_masked_store = counting_load, counting_store
    try:
        yield traffic
    finally:
        builder.create_masked_load, builder.create_masked_store = load, store
        for name, bytes_seen in seen.items():
            traffic.touched[name] = int(bytes_seen.sum())
