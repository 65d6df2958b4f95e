"""Attention on a CPU, compiled by numba: decode and prefill, contiguous and paged, fp32 and bf16, in one body.

The placements differ in ``_addresses`` only, the dtypes in ``_widen`` only; everything is accumulated in fp32. The
arithmetic on a token depends on its index in its sequence alone, so every placement gives the same bits, and a
sequence's result depends neither on its neighbours nor on the number of threads.

The queries of a batch are cut into units: up to ``QUERY_ROWS`` query rows of one sequence that share K/V heads, over a
range of its tokens (``SPLIT_LEN`` at most if the sequence has a single query: the parts are merged at the end). A unit
walks its tokens in tiles with an online softmax, so its memory does not grow with the context; it reads whole token
rows, all its heads at once, because memory is fastest in long runs.

Compiled on first use, once per dtype and placement, and kept in ``__pycache__`` (or ``NUMBA_CACHE_DIR``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np
import torch
from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic, overload

from kvbench.attention.base import PackedBatch
from kvbench.core import KvbenchError

DTYPES = (torch.float32, torch.bfloat16)
TILE_LEN = 64
SPLIT_LEN = 512
QUERY_ROWS = 32
AHEAD_LEN = 8  # tokens; prefetched, because blocks and narrow rows are too short for the hardware to foresee
LINE_BYTES = 64

F = TypeVar("F", bound=Callable[..., Any])
F32, I32, U32 = np.float32, np.int32, np.uint32
MASKED = F32(-1e30)
# No "nnan" and "ninf": a NaN that is read must show.
FAST_MATH = {"reassoc", "contract", "nsz", "arcp"}


def attend(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, batch: PackedBatch, scale: float
) -> torch.Tensor:
    """``kvbench.attention.base.Attend`` on a CPU with ``torch.get_num_threads()`` threads.

    Raises:
        KvbenchError: a cache of another dtype than float32 and bfloat16, or not on a CPU.
    """
    if keys.dtype not in DTYPES or keys.device.type != "cpu":
        raise KvbenchError(
            f"attention=cpu cannot read a {str(keys.dtype).removeprefix('torch.')} cache on {keys.device}; "
            "it supports float32 and bfloat16 on cpu"
        )
    num_threads = min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS)
    numba.set_num_threads(num_threads)
    where, block_size = _where(batch)
    out = _attend(
        q.float().contiguous().numpy(),
        _array(keys),
        _array(values),
        batch.query_start.numpy(),
        batch.context_len.numpy(),
        where,
        block_size,
        F32(scale),
        num_threads,
    )
    return torch.from_numpy(out).to(q.dtype)


def _where(batch: PackedBatch) -> tuple[np.ndarray, int]:
    """Block tables and the block size, or one base per sequence and 0."""
    if batch.tables is not None:
        return batch.tables.numpy(), batch.block_size
    assert batch.bases is not None
    return batch.bases.numpy().reshape(-1, 1), 0


def _array(tensor: torch.Tensor) -> np.ndarray:
    """The memory of a tensor; numpy has no bfloat16, so its bits."""
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def _compiled(function: F) -> F:
    compiled: F = numba.njit(cache=True, error_model="numpy", fastmath=FAST_MATH)(function)
    return compiled


def _compiled_parallel(function: F) -> F:
    compiled: F = numba.njit(cache=True, error_model="numpy", parallel=True)(function)
    return compiled


@_compiled
def _addresses(where: Any, block_size: Any, sequence: Any, first: Any, num: Any, slots: Any) -> None:
    """The slots of tokens ``first ...`` of a sequence: all that tells contiguous (block size 0) from paged."""
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
    """A stored number as fp32."""
    raise NotImplementedError


@overload(_widen, inline="always", strict=False)
def _widen_typed(x: Any) -> Callable[[Any], Any]:
    if x == numba.types.uint16:
        return lambda x: U32(U32(x) << U32(16)).view(F32)
    return lambda x: x


@intrinsic  # type: ignore[untyped-decorator]
def _prefetch(typing: Any, row: Any, index: Any) -> Any:
    """Ask for the cache line of ``row[index]``, which may lie beyond the row."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        address = builder.bitcast(builder.gep(data, [arguments[1]]), cgutils.voidptr_t)
        i32 = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, i32, i32, i32])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        builder.call(function, [address, i32(0), i32(3), i32(1)])  # a read, kept in all levels, of data
        return context.get_dummy_value()

    return numba.types.void(row, numba.types.intp), generate


@_compiled
def _exp(x: Any) -> Any:
    """``exp`` for x <= 0 within 2 units in the last place, so that loops over it vectorise (Cephes' ``expf``)."""
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
    return series * power if x > F32(-87.0) else F32(0.0)


@_compiled
def _scores(q: Any, k0: Any, k1: Any, k2: Any, k3: Any, scores: Any, t: Any) -> None:
    """Every query row times four tokens' keys."""
    for row in range(len(scores)):
        s0 = s1 = s2 = s3 = F32(0.0)
        for d in range(q.shape[1]):
            x = q[row, d]
            s0 += x * _widen(k0[d])
            s1 += x * _widen(k1[d])
            s2 += x * _widen(k2[d])
            s3 += x * _widen(k3[d])
        scores[row, t] = s0
        scores[row, t + 1] = s1
        scores[row, t + 2] = s2
        scores[row, t + 3] = s3


@_compiled
def _accumulate(scores: Any, t: Any, v0: Any, v1: Any, v2: Any, v3: Any, sums: Any) -> None:
    """Add four tokens' values to every query row's sum."""
    for row in range(len(scores)):
        p0, p1, p2, p3 = scores[row, t], scores[row, t + 1], scores[row, t + 2], scores[row, t + 3]
        total = sums[row]
        for d in range(sums.shape[1]):
            total[d] += p0 * _widen(v0[d]) + p1 * _widen(v1[d]) + p2 * _widen(v2[d]) + p3 * _widen(v3[d])


@_compiled
def _softmax(scores: Any, num: Any, num_visible: Any, state: Any, sums: Any) -> None:
    """Turn one row's scores of a tile into weights; ``state`` is its maximum so far and its sum of weights."""
    for t in range(num_visible, num):
        scores[t] = MASKED
    high = state[0]
    for t in range(num):
        high = max(high, scores[t])
    total = F32(0.0)
    for t in range(num):
        weight = _exp(scores[t] - high)
        scores[t] = weight
        total += weight
    shrink = _exp(state[0] - high)
    state[0] = high
    state[1] = state[1] * shrink + total
    if shrink != F32(1.0):
        for d in range(len(sums)):
            sums[d] *= shrink


@_compiled
def _rows4(stored: Any, slots: Any, t: Any, head: Any, wide: Any) -> None:
    """Four tokens' rows as fp32."""
    for i in range(4):
        row = stored[slots[t + i], head]
        for d in range(len(row)):
            wide[i, d] = _widen(row[d])


@_compiled
def _prefetch4(stored: Any, slots: Any, t: Any, first_head: Any, num_heads: Any) -> None:
    """Prefetch the rows of four tokens to come."""
    step = LINE_BYTES // stored.itemsize
    for i in range(4):
        row = stored[slots[t + i], first_head]
        for x in range(0, num_heads * stored.shape[2], step):
            _prefetch(row, x)


@_compiled
def _units(
    query_start: Any, context_len: Any, num_kv_heads: Any, group: Any, num_threads: Any
) -> tuple[Any, Any, Any, Any]:
    """Cut a batch into units of work.

    Returns:
        The units, one row each (sequence, first query, number of queries, first K/V head, number of K/V heads, first
        token, last token, row of the output); where each thread's share of them begins; ``[B + 1]`` first rows
        of the split sequences' parts in the output, behind the queries; the most query rows of a unit.
    """
    num_seqs = len(context_len)
    chunk = max(1, QUERY_ROWS // group)
    parts_start = np.empty(num_seqs + 1, np.int64)
    parts_start[0] = query_start[num_seqs]
    num_decodes = 0
    num_units = 0
    for b in range(num_seqs):
        num_queries = query_start[b + 1] - query_start[b]
        num_parts = (context_len[b] + SPLIT_LEN - 1) // SPLIT_LEN if num_queries == 1 else 1
        parts_start[b + 1] = parts_start[b] + (num_parts if num_parts > 1 else 0)
        if num_queries == 1:
            num_decodes += max(1, num_parts)
        else:
            num_units += (num_queries + chunk - 1) // chunk * num_kv_heads
    # Whole token rows, unless there are too few sequences to share out.
    num_heads = num_kv_heads if num_decodes >= 8 * num_threads else (num_kv_heads + num_threads - 1) // num_threads
    num_units += num_decodes * ((num_kv_heads + num_heads - 1) // num_heads)

    units = np.empty((num_units, 8), np.int64)
    cost = np.empty(num_units + 1)
    cost[0] = 0.0
    u = 0
    max_queries = 1
    for b in range(num_seqs):
        num_queries = query_start[b + 1] - query_start[b]
        decode = num_queries == 1
        num_parts = max(1, (context_len[b] + SPLIT_LEN - 1) // SPLIT_LEN) if decode else 1
        for first in range(0, num_queries, chunk):
            num = min(chunk, num_queries - first)
            max_queries = max(max_queries, num)
            for part in range(num_parts):
                first_token = part * SPLIT_LEN
                last_token = context_len[b] - num_queries + first + num
                if decode:
                    last_token = min(last_token, first_token + SPLIT_LEN)
                target = query_start[b] + first if num_parts == 1 else parts_start[b] + part
                step = num_heads if decode else 1
                for head in range(0, num_kv_heads, step):
                    heads = min(step, num_kv_heads - head)
                    unit = units[u]
                    unit[0], unit[1], unit[2] = b, query_start[b] + first, num
                    unit[3], unit[4] = head, heads
                    unit[5], unit[6], unit[7] = first_token, last_token, target
                    cost[u + 1] = cost[u] + heads * (last_token - first_token) * (num * group + 4)
                    u += 1
    shares = np.full(num_threads + 1, num_units)
    thread = 0
    for u in range(num_units):
        while thread < num_threads and cost[u] * num_threads >= cost[num_units] * thread:
            shares[thread] = u
            thread += 1
    return units, shares, parts_start, max_queries


@_compiled
def _merge(query_start: Any, parts_start: Any, lse: Any, out: Any) -> None:
    """Put together the results of split sequences, weighed by their sums of weights."""
    for b in range(len(query_start) - 1):
        first, last = parts_start[b], parts_start[b + 1]
        if first == last:
            continue
        for head in range(out.shape[1]):
            high = lse[first, head]
            for part in range(first, last):
                high = max(high, lse[part, head])
            total = F32(0.0)
            for part in range(first, last):
                lse[part, head] = _exp(lse[part, head] - high)
                total += lse[part, head]
            result = out[query_start[b], head]
            for d in range(len(result)):
                result[d] = F32(0.0)
            for part in range(first, last):
                for d in range(len(result)):
                    result[d] += lse[part, head] / total * out[part, head, d]


@_compiled
def _attend_units(
    q: Any, keys: Any, values: Any, query_start: Any, context_len: Any, where: Any, block_size: Any, scale: Any,
    units: Any, max_queries: Any, out: Any, lse: Any,
) -> None:  # fmt: skip
    """One thread's share of the units that ``_units`` describes."""
    num_kv_heads, head_dim = keys.shape[1], keys.shape[2]
    group = q.shape[1] // num_kv_heads
    queries = np.empty((num_kv_heads, max_queries * group, head_dim), F32)
    scores = np.empty((num_kv_heads, max_queries * group, TILE_LEN), F32)
    sums = np.empty((num_kv_heads, max_queries * group, head_dim), F32)
    states = np.empty((num_kv_heads, max_queries * group, 2), F32)
    wide = np.empty((4, head_dim), F32)
    slots = np.empty(TILE_LEN + AHEAD_LEN + 4, np.int64)
    for u in range(len(units)):
        unit = units[u]
        sequence, first_query, num_queries, first_head = unit[0], unit[1], unit[2], unit[3]
        num_heads, first_token, last_token, target = unit[4], unit[5], unit[6], unit[7]
        num_rows = num_queries * group
        for h in range(num_heads):
            for row in range(num_rows):
                source = q[first_query + row // group, (first_head + h) * group + row % group]
                for d in range(head_dim):
                    queries[h, row, d] = source[d] * scale
                    sums[h, row, d] = F32(0.0)
                states[h, row, 0] = MASKED
                states[h, row, 1] = F32(0.0)
        shared = num_rows > 2  # rows that several queries read are widened once
        first_seen = context_len[sequence] - (query_start[sequence + 1] - first_query) + 1

        for start in range(first_token, last_token, TILE_LEN):
            num = min(TILE_LEN, last_token - start)
            num4 = (num + 3) // 4 * 4
            num_ahead = min(num + AHEAD_LEN, last_token - start)
            _addresses(where, block_size, sequence, start, num_ahead, slots)
            for t in range(num_ahead, num4 + AHEAD_LEN):
                slots[t] = slots[num_ahead - 1]
            for t in range(0, num4, 4):
                _prefetch4(keys, slots, t + AHEAD_LEN, first_head, num_heads)
                for h in range(num_heads):
                    head = first_head + h
                    if shared:
                        _rows4(keys, slots, t, head, wide)
                        _scores(queries[h], wide[0], wide[1], wide[2], wide[3], scores[h, :num_rows], t)
                    else:
                        k0, k1, k2, k3 = (
                            keys[slots[t], head], keys[slots[t + 1], head], keys[slots[t + 2], head], keys[slots[t + 3], head]
                        )
                        _scores(queries[h], k0, k1, k2, k3, scores[h, :num_rows], t)
            for h in range(num_heads):
                for row in range(num_rows):
                    num_visible = max(0, min(num, first_seen + row // group - start))
                    _softmax(scores[h, row], num4, num_visible, states[h, row], sums[h, row])
            for t in range(0, num4, 4):
                _prefetch4(values, slots, t + AHEAD_LEN, first_head, num_heads)
                for h in range(num_heads):
                    head = first_head + h
                    if shared:
                        _rows4(values, slots, t, head, wide)
                        _accumulate(scores[h, :num_rows], t, wide[0], wide[1], wide[2], wide[3], sums[h])
                    else:
                        v0, v1, v2, v3 = (
                            values[slots[t], head], values[slots[t + 1], head], values[slots[t + 2], head], values[slots[t + 3], head]
                        )
                        _accumulate(scores[h, :num_rows], t, v0, v1, v2, v3, sums[h])

        for h in range(num_heads):
            for row in range(num_rows):
                high, total = states[h, row, 0], states[h, row, 1]
                result = out[target + row // group, (first_head + h) * group + row % group]
                lse[target + row // group, (first_head + h) * group + row % group] = high + np.log(total)
                inverse = F32(1.0) / total if total > F32(0.0) else F32(0.0)
                for d in range(head_dim):
                    result[d] = sums[h, row, d] * inverse


@_compiled_parallel
def _attend(
    q: Any, keys: Any, values: Any, query_start: Any, context_len: Any, where: Any, block_size: Any, scale: Any,
    num_threads: Any,
) -> Any:  # fmt: skip
    """``attend`` on arrays, in fp32; a cache of unsigned 16-bit integers is bf16."""
    num_kv_heads = keys.shape[1]
    units, shares, parts_start, max_queries = _units(
        query_start, context_len, num_kv_heads, q.shape[1] // num_kv_heads, num_threads
    )
    out = np.empty((parts_start[-1], q.shape[1], q.shape[2]), F32)
    lse = np.empty((parts_start[-1], q.shape[1]), F32)
    for thread in numba.prange(num_threads):
        _attend_units(
            q, keys, values, query_start, context_len, where, block_size, scale,
            units[shares[thread] : shares[thread + 1]], max_queries, out, lse,
        )  # fmt: skip
    _merge(query_start, parts_start, lse, out)
    return out[: len(q)]
