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
    num_threads = _use_threads(torch.get_num_threads())
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


def _use_threads(num_threads: int) -> int:
    """Let numba use as many threads as torch, as far as it has them; returns how many."""
    usable = min(num_threads, numba.config.NUMBA_NUM_THREADS)
    numba.set_num_threads(usable)  # its first call starts numba's threads ...
    if torch.get_num_threads() != num_threads:
        torch.set_num_threads(num_threads)  # ... which resets torch's number where both have one OpenMP library
    return usable


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


def _inlined(function: F) -> F:
    compiled: F = numba.njit(cache=True, error_model="numpy", fastmath=FAST_MATH, forceinline=True)(function)
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
def _prefetch(typing: Any, array: Any, index: Any) -> Any:
    """Ask for the cache line of element ``index`` of a contiguous array, counted from its first."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        address = builder.bitcast(builder.gep(data, [arguments[1]]), cgutils.voidptr_t)
        i32 = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, i32, i32, i32])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        builder.call(function, [address, i32(0), i32(3), i32(1)])  # a read, kept in all levels, of data
        return context.get_dummy_value()

    return numba.types.void(array, numba.types.intp), generate


@_inlined
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


@_inlined
def _fetch(stored: Any, slots: Any, t: Any, first_head: Any, num_heads: Any) -> None:
    """Prefetch four tokens' rows."""
    head_dim = stored.shape[2]
    for i in range(t, t + 4):
        first = (slots[i] * stored.shape[1] + first_head) * head_dim
        for x in range(first, first + num_heads * head_dim, LINE_BYTES // stored.itemsize):
            _prefetch(stored, x)


@_inlined
def _copy_rows(stored: Any, slots: Any, t: Any, head: Any, rows: Any) -> None:
    """Four tokens' rows as fp32."""
    for i in range(4):
        slot = slots[t + i]
        for d in range(stored.shape[2]):
            rows[i, 0, d] = _widen(stored[slot, head, d])


@_inlined
def _multiply(q: Any, h: Any, num_rows: Any, k: Any, a: Any, b: Any, c: Any, d: Any, head: Any, t: Any, out: Any) -> None:
    """Scores of every query row with the keys of four tokens, in slots a to d."""
    for row in range(num_rows):
        sa = sb = sc = sd = F32(0.0)
        for x in range(k.shape[2]):
            y = q[h, row, x]
            sa += y * _widen(k[a, head, x])
            sb += y * _widen(k[b, head, x])
            sc += y * _widen(k[c, head, x])
            sd += y * _widen(k[d, head, x])
        out[h, row, t], out[h, row, t + 1], out[h, row, t + 2], out[h, row, t + 3] = sa, sb, sc, sd


@_inlined
def _accumulate(p: Any, h: Any, num_rows: Any, v: Any, a: Any, b: Any, c: Any, d: Any, head: Any, t: Any, out: Any) -> None:
    """Add the values of four tokens, in slots a to d, to every query row's sum."""
    for row in range(num_rows):
        pa, pb, pc, pd = p[h, row, t], p[h, row, t + 1], p[h, row, t + 2], p[h, row, t + 3]
        for x in range(v.shape[2]):
            out[h, row, x] += (
                pa * _widen(v[a, head, x])
                + pb * _widen(v[b, head, x])
                + pc * _widen(v[c, head, x])
                + pd * _widen(v[d, head, x])
            )


@_compiled
def _multiply_tile(
    queries: Any, keys: Any, slots: Any, num: Any, first_head: Any, num_heads: Any, num_rows: Any, rows: Any, scores: Any
) -> None:
    """The scores of a tile."""
    for t in range(0, num, 4):
        _fetch(keys, slots, t + AHEAD_LEN, first_head, num_heads)
        a, b, c, d = slots[t], slots[t + 1], slots[t + 2], slots[t + 3]
        for h in range(num_heads):
            if num_rows > 2:  # what several queries read is widened once
                _copy_rows(keys, slots, t, first_head + h, rows)
                _multiply(queries, h, num_rows, rows, 0, 1, 2, 3, 0, t, scores)
            else:
                _multiply(queries, h, num_rows, keys, a, b, c, d, first_head + h, t, scores)


@_compiled
def _accumulate_tile(
    weights: Any, values: Any, slots: Any, num: Any, first_head: Any, num_heads: Any, num_rows: Any, rows: Any, sums: Any
) -> None:
    """Add a tile's values."""
    for t in range(0, num, 4):
        _fetch(values, slots, t + AHEAD_LEN, first_head, num_heads)
        a, b, c, d = slots[t], slots[t + 1], slots[t + 2], slots[t + 3]
        for h in range(num_heads):
            if num_rows > 2:
                _copy_rows(values, slots, t, first_head + h, rows)
                _accumulate(weights, h, num_rows, rows, 0, 1, 2, 3, 0, t, sums)
            else:
                _accumulate(weights, h, num_rows, values, a, b, c, d, first_head + h, t, sums)


@_compiled
def _softmax_tile(
    scores: Any, num: Any, num_heads: Any, num_rows: Any, group: Any, first_visible: Any, states: Any, sums: Any
) -> None:
    """Turn a tile's scores into weights; ``states`` holds each row's maximum so far and its sum of weights.

    The first query sees ``first_visible`` tokens of the tile, each next one more.
    """
    for h in range(num_heads):
        for row in range(num_rows):
            for t in range(max(0, first_visible + row // group), num):
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
                for d in range(sums.shape[2]):
                    sums[h, row, d] *= shrink


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
    rows = np.empty((4, 1, head_dim), F32)
    slots = np.empty(TILE_LEN + AHEAD_LEN + 4, np.int64)
    for u in range(len(units)):
        unit = units[u]
        sequence, first_query, num_queries, first_head = unit[0], unit[1], unit[2], unit[3]
        num_heads, first_token, last_token, target = unit[4], unit[5], unit[6], unit[7]
        num_rows = num_queries * group
        for h in range(num_heads):
            for row in range(num_rows):
                source, head = first_query + row // group, (first_head + h) * group + row % group
                for d in range(head_dim):
                    queries[h, row, d] = q[source, head, d] * scale
                    sums[h, row, d] = F32(0.0)
                states[h, row, 0] = MASKED
                states[h, row, 1] = F32(0.0)
        first_seen = context_len[sequence] - (query_start[sequence + 1] - first_query) + 1

        for start in range(first_token, last_token, TILE_LEN):
            num = min(TILE_LEN, last_token - start)
            num4 = (num + 3) // 4 * 4
            num_ahead = min(num + AHEAD_LEN, last_token - start)
            _addresses(where, block_size, sequence, start, num_ahead, slots)
            for t in range(num_ahead, num4 + AHEAD_LEN):
                slots[t] = slots[num_ahead - 1]
            _multiply_tile(queries, keys, slots, num4, first_head, num_heads, num_rows, rows, scores)
            first_visible = first_seen - start
            _softmax_tile(scores, num4, num_heads, num_rows, group, first_visible, states, sums)
            _accumulate_tile(scores, values, slots, num4, first_head, num_heads, num_rows, rows, sums)

        for h in range(num_heads):
            for row in range(num_rows):
                result, head = target + row // group, (first_head + h) * group + row % group
                total = states[h, row, 1]
                lse[result, head] = states[h, row, 0] + np.log(total)
                inverse = F32(1.0) / total if total > F32(0.0) else F32(0.0)
                for d in range(head_dim):
                    out[result, head, d] = sums[h, row, d] * inverse


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
