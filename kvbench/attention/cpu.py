"""Attention on a CPU, compiled by numba: decode and prefill, contiguous and paged, fp32 and bf16, in one body.

The placements differ in ``_addresses`` only, the dtypes in ``_widen`` only; everything is accumulated in fp32. What is
done with a token depends on its index in its sequence alone, so every placement gives the same bits, and a sequence's
result depends neither on its neighbours nor on the number of threads.

A batch is cut into units: up to ``QUERY_ROWS`` query rows of one sequence, the K/V heads they read, and a range of its
tokens. A sequence with one query is split every ``SPLIT_LEN`` tokens, and the parts are merged at the end. A unit walks
its tokens in tiles with an online softmax, so its memory does not grow with the context. Decoding reads whole token
rows, all heads at once, because memory is fastest in long runs; prefill takes head by head, because it computes.

Compiled on first use, once per dtype, and kept beside this file (in ``NUMBA_CACHE_DIR`` if set; in numba's own cache
folder of the user where this one cannot be written).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np
import numpy.typing as npt
import torch
from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic, overload

from kvbench.attention.base import PackedBatch
from kvbench.core import KvbenchError

DTYPES = (torch.float32, torch.bfloat16)
TILE_LEN = 128
SPLIT_LEN = 512  # a multiple of TILE_LEN
QUERY_ROWS = 32
AHEAD_LEN = 8  # how far ahead tokens are prefetched: blocks and narrow rows end before the hardware sees a pattern
LINE_BYTES = 64

Array = npt.NDArray[Any]
F = TypeVar("F", bound=Callable[..., Any])
F32, I32, U32 = np.float32, np.int32, np.uint32
MASKED = F32(-1e30)
# Not "nnan" and "ninf": a NaN that is read must show in the result.
FAST_MATH = {"reassoc", "contract", "nsz", "arcp"}


def attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, batch: PackedBatch, scale: float) -> torch.Tensor:
    """``kvbench.attention.base.Attend`` on a CPU, with as many threads as torch uses.

    Raises:
        KvbenchError: a cache of another dtype than float32 and bfloat16, or not on a CPU.
    """
    if keys.dtype not in DTYPES or keys.device.type != "cpu":
        raise KvbenchError(
            f"attention on a CPU cannot read a {str(keys.dtype).removeprefix('torch.')} cache on {keys.device}; "
            "it supports float32 and bfloat16 on cpu"
        )
    if batch.tables is not None:
        where, block_size = batch.tables.numpy(), batch.block_size
    else:
        assert batch.bases is not None
        where, block_size = batch.bases.numpy().reshape(-1, 1), 0
    out = _attend(
        q.float().contiguous().numpy(),
        _bits(keys),
        _bits(values),
        batch.query_start.numpy(),
        batch.context_len.numpy(),
        where,
        block_size,
        F32(scale),
        _use_threads(torch.get_num_threads()),
    )
    return torch.from_numpy(out).to(q.dtype)


def _bits(tensor: torch.Tensor) -> Array:
    """The memory of a tensor; numpy has no bfloat16, so that is its bits."""
    array: Array = (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return array


def _use_threads(num_threads: int) -> int:
    """Let numba use so many threads, as far as it has them; returns how many."""
    usable: int = min(num_threads, numba.config.NUMBA_NUM_THREADS)
    numba.set_num_threads(usable)  # the first call starts numba's threads ...
    if torch.get_num_threads() != num_threads:
        torch.set_num_threads(num_threads)  # ... which sets torch's number too where both share an OpenMP library
    return usable


def _compiled(function: F) -> F:
    compiled: F = numba.njit(cache=True, error_model="numpy", fastmath=FAST_MATH)(function)
    return compiled


def _inlined(function: F) -> F:
    compiled: F = numba.njit(cache=True, error_model="numpy", fastmath=FAST_MATH, forceinline=True)(function)
    return compiled


def _compiled_parallel(function: F) -> F:
    compiled: F = numba.njit(cache=True, error_model="numpy", parallel=True)(function)
    return compiled


@_compiled
def _addresses(where: Array, block_size: int, sequence: int, first: int, num: int, slots: Array) -> None:
    """The slots of ``num`` tokens of a sequence, all that tells paged from contiguous (block size 0) placement."""
    if block_size == 0:
        for t in range(num):
            slots[t] = where[sequence, 0] + first + t
    else:
        block = first // block_size
        offset = first % block_size
        for t in range(num):
            slots[t] = where[sequence, block] * block_size + offset
            offset += 1
            if offset == block_size:
                offset = 0
                block += 1


def _widen(x: Any) -> Any:
    """A stored number as fp32; only ever compiled."""
    raise NotImplementedError


@overload(_widen, inline="always", strict=False)  # type: ignore[untyped-decorator]
def _widen_typed(x: Any) -> Callable[[Any], Any]:
    if x == numba.types.uint16:
        return lambda x: U32(U32(x) << U32(16)).view(F32)
    return lambda x: x


@intrinsic  # type: ignore[untyped-decorator]
def _prefetch(typing: Any, array: Any, index: Any) -> Any:
    """Ask for the cache line of element ``index`` of a contiguous array, counted from its first."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        address = builder.bitcast(builder.gep(data, [arguments[1]]), cgutils.voidptr_t)
        i32 = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, i32, i32, i32])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        builder.call(function, [address, i32(0), i32(3), i32(1)])  # to read, into all levels, data
        return context.get_dummy_value()

    return numba.types.void(array, numba.types.intp), generate


@_inlined
def _exp(x: Any) -> Any:
    """``exp`` for x <= 0 within 2 units in the last place (Cephes' ``expf``): a loop over it vectorises."""
    whole = np.floor(x * F32(1.44269504) + F32(0.5))
    rest = (x - whole * F32(0.693359375)) + whole * F32(2.12194440e-4)
    series = F32(1.9875691500e-4)
    series = series * rest + F32(1.3981999507e-3)
    series = series * rest + F32(8.3334519073e-3)
    series = series * rest + F32(4.1665795894e-2)
    series = series * rest + F32(1.6666665459e-1)
    series = series * rest + F32(5.0000001201e-1)
    series = series * rest * rest + rest + F32(1.0)
    power = U32((I32(whole) + I32(127)) << I32(23)).view(F32)
    return F32(0.0) if x < F32(-87.0) else series * power  # of NaN, NaN


@_inlined
def _fetch_rows(stored: Array, slots: Array, t: int, first_head: int, num_heads: int) -> None:
    """Prefetch the rows of four tokens."""
    head_dim = stored.shape[2]
    for i in range(t, t + 4):
        first = (slots[i] * stored.shape[1] + first_head) * head_dim
        for x in range(first, first + num_heads * head_dim, LINE_BYTES // stored.itemsize):
            _prefetch(stored, x)


@_inlined
def _copy_rows(stored: Array, slots: Array, t: int, head: int, rows: Array) -> None:
    """The rows of four tokens as fp32, ``rows[i, 0]``."""
    for i in range(4):
        slot = slots[t + i]
        for x in range(stored.shape[2]):
            rows[i, 0, x] = _widen(stored[slot, head, x])


# Both products take four tokens at a time, in slots a to d, so that a query row or a sum is loaded once for four. They
# index whole arrays, because a view of a row would cost numba two atomic reference counts.


@_inlined
def _multiply(
    q: Array, h: int, num_rows: int, k: Array, a: int, b: int, c: int, d: int, head: int, t: int, scores: Array
) -> None:
    for row in range(num_rows):
        sa = sb = sc = sd = F32(0.0)
        for x in range(k.shape[2]):
            y = q[h, row, x]
            sa += y * _widen(k[a, head, x])
            sb += y * _widen(k[b, head, x])
            sc += y * _widen(k[c, head, x])
            sd += y * _widen(k[d, head, x])
        scores[h, row, t], scores[h, row, t + 1], scores[h, row, t + 2], scores[h, row, t + 3] = sa, sb, sc, sd


@_inlined
def _accumulate(
    p: Array, h: int, num_rows: int, v: Array, a: int, b: int, c: int, d: int, head: int, t: int, sums: Array
) -> None:
    for row in range(num_rows):
        pa, pb, pc, pd = p[h, row, t], p[h, row, t + 1], p[h, row, t + 2], p[h, row, t + 3]
        for x in range(v.shape[2]):
            sums[h, row, x] += (
                pa * _widen(v[a, head, x])
                + pb * _widen(v[b, head, x])
                + pc * _widen(v[c, head, x])
                + pd * _widen(v[d, head, x])
            )


@_compiled
def _score_tile(
    q: Array, keys: Array, slots: Array, num: int, first_head: int, num_heads: int, num_rows: int, rows: Array,
    scores: Array,
) -> None:  # fmt: skip
    """Every query row times the keys of a tile."""
    for t in range(0, num, 4):
        _fetch_rows(keys, slots, t + AHEAD_LEN, first_head, num_heads)
        a, b, c, d = slots[t], slots[t + 1], slots[t + 2], slots[t + 3]
        for h in range(num_heads):
            if num_rows > 2:  # what several queries read is widened once
                _copy_rows(keys, slots, t, first_head + h, rows)
                _multiply(q, h, num_rows, rows, 0, 1, 2, 3, 0, t, scores)
            else:
                _multiply(q, h, num_rows, keys, a, b, c, d, first_head + h, t, scores)


@_compiled
def _sum_tile(
    weights: Array, values: Array, slots: Array, num: int, first_head: int, num_heads: int, num_rows: int, rows: Array,
    sums: Array,
) -> None:  # fmt: skip
    """Add the values of a tile to every query row's weighted sum."""
    for t in range(0, num, 4):
        _fetch_rows(values, slots, t + AHEAD_LEN, first_head, num_heads)
        a, b, c, d = slots[t], slots[t + 1], slots[t + 2], slots[t + 3]
        for h in range(num_heads):
            if num_rows > 2:
                _copy_rows(values, slots, t, first_head + h, rows)
                _accumulate(weights, h, num_rows, rows, 0, 1, 2, 3, 0, t, sums)
            else:
                _accumulate(weights, h, num_rows, values, a, b, c, d, first_head + h, t, sums)


@_compiled
def _weigh_tile(
    scores: Array, num: int, num_heads: int, num_rows: int, group: int, num_seen: int, states: Array, sums: Array
) -> None:
    """Turn the scores of a tile into weights, relative to each row's maximum so far.

    The first query sees ``num_seen`` tokens of the tile, each next one more. ``states`` holds a row's maximum and its
    sum of weights; if the maximum rises, that sum and the row's ``sums`` shrink.
    """
    for h in range(num_heads):
        for row in range(num_rows):
            for t in range(max(0, num_seen + row // group), num):
                scores[h, row, t] = MASKED
            old = states[h, row, 0]
            high = old
            for t in range(num):
                high = max(high, scores[h, row, t])
            total = F32(0.0)
            for t in range(num):
                weight = _exp(scores[h, row, t] - high)
                scores[h, row, t] = weight
                total += weight
            shrink = _exp(old - high)
            states[h, row, 0] = high
            states[h, row, 1] = states[h, row, 1] * shrink + total
            if shrink != F32(1.0):
                for x in range(sums.shape[2]):
                    sums[h, row, x] *= shrink


@_compiled
def _attend_units(
    q: Array, keys: Array, values: Array, where: Array, block_size: int, scale: Any, units: Array, max_rows: int,
    out: Array, lse: Array,
) -> None:  # fmt: skip
    """Compute units, as ``_units`` describes them, one after the other."""
    num_kv_heads, head_dim = keys.shape[1], keys.shape[2]
    group = q.shape[1] // num_kv_heads
    queries = np.empty((num_kv_heads, max_rows, head_dim), F32)
    scores = np.empty((num_kv_heads, max_rows, TILE_LEN), F32)
    sums = np.empty((num_kv_heads, max_rows, head_dim), F32)
    states = np.empty((num_kv_heads, max_rows, 2), F32)
    rows = np.empty((4, 1, head_dim), F32)
    slots = np.empty(TILE_LEN + AHEAD_LEN, np.int64)
    for u in range(len(units)):
        unit = units[u]
        sequence, first_query, num_queries, target = unit[0], unit[1], unit[2], unit[3]
        first_head, num_heads, first_token, last_token = unit[4], unit[5], unit[6], unit[7]
        num_rows = num_queries * group
        for h in range(num_heads):
            for row in range(num_rows):
                source, head = first_query + row // group, (first_head + h) * group + row % group
                for x in range(head_dim):
                    queries[h, row, x] = q[source, head, x] * scale
                    sums[h, row, x] = F32(0.0)
                states[h, row, 0] = MASKED
                states[h, row, 1] = F32(0.0)
        for start in range(first_token, last_token, TILE_LEN):
            num = min(TILE_LEN, last_token - start)
            num4 = (num + 3) // 4 * 4
            num_ahead = min(num + AHEAD_LEN, last_token - start)
            _addresses(where, block_size, sequence, start, num_ahead, slots)
            for t in range(num_ahead, num4 + AHEAD_LEN):  # never a slot the sequence does not own
                slots[t] = slots[num_ahead - 1]
            num_seen = last_token - num_queries + 1 - start
            _score_tile(queries, keys, slots, num4, first_head, num_heads, num_rows, rows, scores)
            _weigh_tile(scores, num4, num_heads, num_rows, group, num_seen, states, sums)
            _sum_tile(scores, values, slots, num4, first_head, num_heads, num_rows, rows, sums)
        for h in range(num_heads):
            for row in range(num_rows):
                result, head = target + row // group, (first_head + h) * group + row % group
                total = states[h, row, 1]
                lse[result, head] = states[h, row, 0] + np.log(total)
                inverse = F32(0.0) if total == F32(0.0) else F32(1.0) / total
                for x in range(head_dim):
                    out[result, head, x] = sums[h, row, x] * inverse


@_compiled
def _units(
    query_start: Array, context_len: Array, num_kv_heads: int, group: int, num_threads: int
) -> tuple[Array, Array, Array, int]:
    """Cut a batch into units of work.

    Returns:
        The units, one row each: sequence, first query, number of queries, first row of the output, first K/V head,
        number of K/V heads, first token, last token (what its last query sees). Where each thread's share of
        them begins, equal in cost, ``[num_threads + 1]``. Where the parts of each sequence begin in the output,
        behind all queries, ``[B + 1]``. The most query rows of a unit.
    """
    num_seqs = len(context_len)
    chunk = max(1, QUERY_ROWS // group)
    # Whole token rows, unless there are too few sequences to share out.
    decode_heads = num_kv_heads if num_seqs >= 8 * num_threads else (num_kv_heads + num_threads - 1) // num_threads
    num_parts = np.ones(num_seqs, np.int64)
    parts_start = np.empty(num_seqs + 1, np.int64)
    parts_start[0] = query_start[num_seqs]
    limit = 0
    for b in range(num_seqs):
        num_queries = query_start[b + 1] - query_start[b]
        if num_queries == 1 and context_len[b] > SPLIT_LEN:
            num_parts[b] = (context_len[b] + SPLIT_LEN - 1) // SPLIT_LEN
        parts_start[b + 1] = parts_start[b] + (num_parts[b] if num_parts[b] > 1 else 0)
        limit += (num_queries + chunk - 1) // chunk * num_parts[b] * num_kv_heads

    units = np.empty((limit, 8), np.int64)
    cost = np.zeros(limit + 1, np.int64)
    num_units = 0
    max_queries = 1
    for b in range(num_seqs):
        num_queries = query_start[b + 1] - query_start[b]
        step = decode_heads if num_queries == 1 else 1
        for first in range(0, num_queries, chunk):
            num = min(chunk, num_queries - first)
            max_queries = max(max_queries, num)
            for part in range(num_parts[b]):
                first_token = part * SPLIT_LEN
                last_token = context_len[b] - num_queries + first + num
                target = query_start[b] + first
                if num_parts[b] > 1:
                    last_token = min(last_token, first_token + SPLIT_LEN)
                    target = parts_start[b] + part
                for head in range(0, num_kv_heads, step):
                    num_heads = min(step, num_kv_heads - head)
                    unit = units[num_units]
                    unit[0], unit[1], unit[2], unit[3] = b, query_start[b] + first, num, target
                    unit[4], unit[5], unit[6], unit[7] = head, num_heads, first_token, last_token
                    num_units += 1
                    # Reading a row costs about as much as multiplying it with four queries.
                    cost[num_units] = cost[num_units - 1] + num_heads * (last_token - first_token) * (num * group + 4)

    shares = np.full(num_threads + 1, num_units)
    thread = 0
    for u in range(num_units):
        while thread < num_threads and cost[u] * num_threads >= cost[num_units] * thread:
            shares[thread] = u
            thread += 1
    return units[:num_units], shares, parts_start, max_queries * group


@_compiled
def _merge(query_start: Array, parts_start: Array, lse: Array, out: Array) -> None:
    """Put the parts of split sequences together, weighed by their sums of weights (``lse``: the logarithm)."""
    for b in range(len(query_start) - 1):
        first, last = parts_start[b], parts_start[b + 1]
        if first == last:
            continue
        result = query_start[b]
        for head in range(out.shape[1]):
            high = lse[first, head]
            for part in range(first, last):
                high = max(high, lse[part, head])
            total = F32(0.0)
            for part in range(first, last):
                lse[part, head] = _exp(lse[part, head] - high)
                total += lse[part, head]
            for x in range(out.shape[2]):
                out[result, head, x] = F32(0.0)
            for part in range(first, last):
                weight = lse[part, head] / total
                for x in range(out.shape[2]):
                    out[result, head, x] += weight * out[part, head, x]


@_compiled_parallel
def _attend(
    q: Array, keys: Array, values: Array, query_start: Array, context_len: Array, where: Array, block_size: int,
    scale: Any, num_threads: int,
) -> Array:  # fmt: skip
    """``attend`` on arrays: ``q`` in fp32, ``keys`` and ``values`` in fp32 or the bits of bf16."""
    num_kv_heads = keys.shape[1]
    units, shares, parts_start, max_rows = _units(
        query_start, context_len, num_kv_heads, q.shape[1] // num_kv_heads, num_threads
    )
    out = np.empty((parts_start[-1], q.shape[1], q.shape[2]), F32)
    lse = np.empty((parts_start[-1], q.shape[1]), F32)
    for thread in numba.prange(num_threads):
        share = units[shares[thread] : shares[thread + 1]]
        _attend_units(q, keys, values, where, block_size, scale, share, max_rows, out, lse)
    _merge(query_start, parts_start, lse, out)
    return out[: len(q)]
