"""The books of contiguous placement for the compiled loop: a buddy heap, and extents by first fit.

The rules are those of ``allocators.buddy_heap`` and ``allocators.first_fit``. A pool is a tuple of arrays.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

NONE = -1


@njit(cache=True)
def buddy_pool(num_blocks: int, max_order: int) -> Any:
    """A heap carved into aligned regions of at most ``2**max_order`` blocks.

    Returns:
        newest: by order, the region freed last (its first block).
        older, newer: by first block, its neighbours in the list of its order.
        free_order: by first block, the order of the free region that starts there, else NONE.
        state: the largest order, and the number of free blocks.
    """
    newest = np.full(max_order + 1, NONE, np.int64)
    older, newer = np.full(num_blocks, NONE, np.int64), np.full(num_blocks, NONE, np.int64)
    free_order = np.full(num_blocks, NONE, np.int64)
    state = np.array([0, num_blocks], np.int64)
    starts = np.empty(num_blocks, np.int64)
    orders = np.empty(num_blocks, np.int64)
    count = start = 0
    for order in range(max_order, -1, -1):
        while num_blocks - start >= 1 << order:
            starts[count], orders[count] = start, order
            start += 1 << order
            count += 1
    state[0] = orders[0]
    for index in range(count - 1, -1, -1):  # the lowest address on top
        _push(newest, older, newer, free_order, starts[index], orders[index])
    return newest, older, newer, free_order, state


@njit(cache=True)
def _push(newest: Any, older: Any, newer: Any, free_order: Any, start: int, order: int) -> None:
    before = newest[order]
    older[start], newer[start], free_order[start] = before, NONE, order
    if before != NONE:
        newer[before] = start
    newest[order] = start


@njit(cache=True)
def _remove(newest: Any, older: Any, newer: Any, free_order: Any, start: int, order: int) -> None:
    before, after = older[start], newer[start]
    if before != NONE:
        newer[before] = after
    if after != NONE:
        older[after] = before
    else:
        newest[order] = before
    free_order[start] = NONE


@njit(cache=True)
def buddy_largest(pool: Any) -> int:
    """The order of the largest free region, NONE if there is none."""
    newest, _, _, _, state = pool
    for order in range(state[0], -1, -1):
        if newest[order] != NONE:
            return order
    return NONE


@njit(cache=True)
def buddy_take(pool: Any, order: int) -> int:
    """Take a region that is known to be there; returns its first block."""
    newest, older, newer, free_order, state = pool
    available = order
    while newest[available] == NONE:
        available += 1
    start = newest[available]
    _remove(newest, older, newer, free_order, start, available)
    while available > order:  # keep the lower half
        available -= 1
        _push(newest, older, newer, free_order, start + (1 << available), available)
    state[1] -= 1 << order
    return int(start)


@njit(cache=True)
def buddy_give_back(pool: Any, start: int, order: int) -> None:
    """Free a region, merging it with its buddy as long as that is free too."""
    newest, older, newer, free_order, state = pool
    state[1] += 1 << order
    while order < state[0]:
        buddy = start ^ (1 << order)
        if buddy >= len(free_order) or free_order[buddy] != order:
            break
        _remove(newest, older, newer, free_order, buddy, order)
        start = min(start, buddy)
        order += 1
    _push(newest, older, newer, free_order, start, order)


@njit(cache=True)
def extent_pool(num_slots: int, most: int) -> Any:
    """One hole that is the pool, with room for ``most`` extents.

    Returns:
        starts, lens: the holes by address.
        state: how many holes there are, the length of the largest, and the free slots.
    """
    starts, lens = np.zeros(most + 2, np.int64), np.zeros(most + 2, np.int64)
    lens[0] = num_slots
    return starts, lens, np.array([1, num_slots, num_slots], np.int64)


@njit(cache=True)
def extent_take(pool: Any, size: int) -> int:
    """Cut an extent from the front of the first hole that holds it, which is known to be there; returns its start."""
    starts, lens, state = pool
    index = 0
    while lens[index] < size:
        index += 1
    start = starts[index]
    if lens[index] == size:
        for i in range(index, state[0] - 1):
            starts[i], lens[i] = starts[i + 1], lens[i + 1]
        state[0] -= 1
    else:
        starts[index] += size
        lens[index] -= size
    _changed(pool, -size)
    return int(start)


@njit(cache=True)
def _changed(pool: Any, freed: int) -> None:
    _, lens, state = pool
    largest = 0
    for i in range(state[0]):
        largest = max(largest, lens[i])
    state[1] = largest
    state[2] += freed


@njit(cache=True)
def extent_give_back(pool: Any, start: int, size: int) -> None:
    """Make an extent a hole, merged with the holes before and after it."""
    starts, lens, state = pool
    index = np.searchsorted(starts[: state[0]], start)
    joins_before = index > 0 and starts[index - 1] + lens[index - 1] == start
    joins_after = index < state[0] and starts[index] == start + size
    if joins_before and joins_after:
        lens[index - 1] += size + lens[index]
        for i in range(index, state[0] - 1):
            starts[i], lens[i] = starts[i + 1], lens[i + 1]
        state[0] -= 1
    elif joins_before:
        lens[index - 1] += size
    elif joins_after:
        starts[index] = start
        lens[index] += size
    else:
        for i in range(state[0], index, -1):
            starts[i], lens[i] = starts[i - 1], lens[i - 1]
        starts[index], lens[index] = start, size
        state[0] += 1
    _changed(pool, size)
