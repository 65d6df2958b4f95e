"""Triton kernels of attention: decode in two stages, and prefill. Placements differ in the addresses of rows alone.

One loop serves both, and both placements: a comparison of paged with contiguous memory then compares addresses and
nothing else. Three things keep the paged loop as short as the contiguous one:

* the table entries of the next tile are loaded while a tile is computed, so that loads of K and V do not wait for
  another load of the same iteration (else the compiler gives them fewer buffers);
* K and V have equal strides, so one tensor of offsets serves both;
* the compiler is told that a row is contiguous and aligned, since it loses sight of it behind a table.

Sums are in float32, offsets in a cache 64 bits wide. A tile that is masked throughout, a part without tokens and a
sequence of length 0 give zeros, never NaN, and what is masked is never read.
"""

import triton
import triton.language as tl

LN_2 = tl.constexpr(0.6931471805599453)
NOTHING = tl.constexpr(float("-inf"))


@triton.jit
def _dot(a, b, acc, UPCAST: tl.constexpr):
    if UPCAST:  # the interpreter would multiply the bits of bfloat16
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def _entries(table, first, end, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Table entries of the tile that starts at token ``first``: one for each page in it, or the one that it lies in."""
    PIECE: tl.constexpr = PAGE if PAGE < BLOCK_N else BLOCK_N
    tokens = first + tl.arange(0, BLOCK_N // PIECE) * PIECE
    return tl.load(table + tokens // PAGE, mask=tokens < end, other=0).to(tl.int64)


@triton.jit
def _paged_rows(entries, first, s_block, s_token, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Offsets of a tile's rows, ``[BLOCK_N]``."""
    PIECE: tl.constexpr = PAGE if PAGE < BLOCK_N else BLOCK_N
    within = tl.arange(0, PIECE)
    if PIECE < PAGE:
        within += first % PAGE
    return tl.reshape(entries[:, None] * s_block + within[None, :] * s_token, [BLOCK_N])


@triton.jit
def _attend(
    q, k, v, where, oldest, start, end, newest, qk_scale, s_block, s_token,
    ROWS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_N: tl.constexpr,
    PAGED: tl.constexpr, PAGE: tl.constexpr, PREFETCH: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    STAGES: tl.constexpr, VEC: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Online softmax of ``ROWS`` queries over tokens ``start`` (a multiple of BLOCK_N) to ``end`` of one sequence.

    ``where`` is the sequence's table, or its first row; ``oldest`` the first token that any query sees; ``newest``, if
    causal, the last that each sees. Returns the maximum, in powers of two, the sum, and the weighted sum of V.
    """
    m = tl.full([ROWS], NOTHING, tl.float32)
    z = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D_PAD], tl.float32)
    offs_d = tl.arange(0, D_PAD)
    if PAGED and PREFETCH:
        following = _entries(where, start, end, PAGE, BLOCK_N)
    for first in tl.range(start, end, BLOCK_N, num_stages=STAGES):
        tokens = first + tl.arange(0, BLOCK_N)
        stored = tokens < end
        if WINDOW > 0:
            stored &= tokens >= oldest
        if PAGED and PREFETCH:
            entries = following
            following = _entries(where, first + BLOCK_N, end, PAGE, BLOCK_N)
            rows = _paged_rows(entries, first, s_block, s_token, PAGE, BLOCK_N)
        elif PAGED:
            entries = tl.load(where + tokens // PAGE, mask=stored, other=0).to(tl.int64)
            rows = entries * s_block + tokens % PAGE * s_token
        else:
            rows = (where + tokens) * s_token
        offsets = rows[:, None] + offs_d[None, :]
        offsets = tl.max_contiguous(tl.multiple_of(offsets, (1, VEC)), (1, D_PAD))  # the host sees to it
        mask = stored[:, None]
        if D < D_PAD:
            mask &= offs_d[None, :] < D
        keys = tl.load(k + offsets, mask=mask, other=0.0)
        seen = stored[None, :]
        if CAUSAL:
            seen &= tokens[None, :] <= newest[:, None]
            if WINDOW > 0:
                seen &= tokens[None, :] > newest[:, None] - WINDOW
        scores = _dot(q, tl.trans(keys), tl.zeros([ROWS, BLOCK_N], tl.float32), UPCAST) * qk_scale
        scores = tl.where(seen, scores, NOTHING)
        m_next = tl.maximum(m, tl.max(scores, 1))
        shift = tl.where(m_next == NOTHING, 0.0, m_next)
        decay = tl.exp2(m - shift)
        weights = tl.exp2(scores - shift[:, None])
        z = z * decay + tl.sum(weights, 1)
        values = tl.load(v + offsets, mask=mask, other=0.0)  # masked too: 0 * NaN is NaN
        acc = _dot(weights.to(values.dtype), values, acc * decay[:, None], UPCAST)
        m = m_next
    return m, z, acc


@triton.jit(do_not_specialize=["where", "lens", "s_table"])
def decode_part(
    q, k, v, where, lens, out, lse, partial_out, partial_lse, qk_scale,
    s_q_batch, s_q_head, s_block, s_token, s_head, s_table, s_out_batch, s_out_head,
    GROUP: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr,
    PAGED: tl.constexpr, PAGE: tl.constexpr, PREFETCH: tl.constexpr, WINDOW: tl.constexpr, SPLITS: tl.constexpr,
    STAGES: tl.constexpr, VEC: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """One part of one sequence for the query heads of one K/V head; grid ``(B, Hkv, SPLITS)``.

    Writes the output itself where there is one part, else its share and the logarithm of its sum to the scratch,
    ``[B, Hq, SPLITS, D]`` and ``[B, Hq, SPLITS]``.
    """
    b = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(lens + b)
    oldest = 0
    if WINDOW > 0:
        oldest = tl.maximum(length - WINDOW, 0)
    start = oldest // BLOCK_N * BLOCK_N
    part_len = tl.cdiv(tl.cdiv(length - start, BLOCK_N), SPLITS) * BLOCK_N
    start += split * part_len
    end = tl.minimum(start + part_len, length)
    heads = tl.arange(0, BLOCK_H)
    offs_d = tl.arange(0, D_PAD)
    rows = kv_head * GROUP + heads
    mask = (heads < GROUP)[:, None] & (offs_d < D)[None, :]
    queries = tl.load(q + b * s_q_batch + rows[:, None] * s_q_head + offs_d[None, :], mask=mask, other=0.0)
    if PAGED:
        where += b * s_table
    else:
        where = tl.load(where + b)
    m, z, acc = _attend(
        queries, k + kv_head * s_head, v + kv_head * s_head, where, oldest, start, end, None, qk_scale,
        s_block, s_token,
        BLOCK_H, D, D_PAD, BLOCK_N, PAGED, PAGE, PREFETCH, False, WINDOW, STAGES, VEC, UPCAST,
    )  # fmt: skip
    total = tl.where(z == 0.0, 1.0, z)
    share = acc / total[:, None]
    logarithm = tl.where(z == 0.0, NOTHING, m + tl.log2(total))
    heads_in_all = tl.num_programs(1) * GROUP
    if SPLITS == 1:
        target = out + b * s_out_batch + rows[:, None] * s_out_head + offs_d[None, :]
        tl.store(target, share.to(out.dtype.element_ty), mask=mask)
        tl.store(lse + b * heads_in_all + rows, logarithm * LN_2, mask=heads < GROUP)
    else:
        parts = (b * heads_in_all + rows) * SPLITS + split
        tl.store(partial_out + parts[:, None] * D + offs_d[None, :], share, mask=mask)
        tl.store(partial_lse + parts, logarithm, mask=heads < GROUP)


@triton.jit
def decode_merge(
    partial_out, partial_lse, out, lse, s_out_batch, s_out_head,
    D: tl.constexpr, D_PAD: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Weigh the parts of one head by their sums; grid ``(B, Hq)``."""
    b = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    # Scalars go on the pointers: Triton 3.5 to 3.6.0 miscompiles this reduction where they are part of the offsets.
    index = b * tl.num_programs(1) + head
    partial_out += index * (SPLITS * D)
    partial_lse += index * SPLITS
    parts = tl.arange(0, SPLITS)
    offs_d = tl.arange(0, D_PAD)
    logarithms = tl.load(partial_lse + parts)
    m = tl.max(logarithms, 0)
    m = tl.where(m == NOTHING, 0.0, m)
    weights = tl.exp2(logarithms - m)
    total = tl.sum(weights, 0)
    divisor = tl.where(total == 0.0, 1.0, total)
    mask = (weights > 0.0)[:, None] & (offs_d < D)[None, :]
    shares = tl.load(partial_out + parts[:, None] * D + offs_d[None, :], mask=mask, other=0.0)
    result = tl.sum(shares * weights[:, None], 0) / divisor
    target = out + b * s_out_batch + head * s_out_head + offs_d
    tl.store(target, result.to(out.dtype.element_ty), mask=offs_d < D)
    tl.store(lse + index, tl.where(total == 0.0, NOTHING, (m + tl.log2(divisor)) * LN_2))


@triton.jit
def _sequence_of(tile, cu_q, num_seqs, BLOCK_Q: tl.constexpr):
    """The sequence that a tile of queries belongs to: the tiles of sequence b start at ``cu_q[b] // BLOCK_Q + b``."""
    low = 0
    high = num_seqs
    while low < high:
        middle = (low + high) // 2
        if tl.load(cu_q + middle) // BLOCK_Q + middle <= tile:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit(do_not_specialize=["where", "lens", "cu_q", "num_seqs", "s_table"])
def prefill_tile(
    q, k, v, where, lens, cu_q, out, num_seqs, qk_scale,
    s_q_token, s_q_head, s_block, s_token, s_head, s_table, s_out_token, s_out_head,
    GROUP: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PAGED: tl.constexpr, PAGE: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    STAGES: tl.constexpr, VEC: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """``BLOCK_M // GROUP`` new tokens of one sequence for the query heads of one K/V head.

    Grid ``(T // (BLOCK_M // GROUP) + B, Hkv)``: enough for any lengths, so the host need not know them.
    """
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    b = _sequence_of(tile, cu_q, num_seqs, BLOCK_Q)
    first_row = tl.load(cu_q + b)
    num_new = tl.load(cu_q + b + 1) - first_row
    first = (tile - first_row // BLOCK_Q - b) * BLOCK_Q
    if first >= num_new:
        return
    length = tl.load(lens + b)
    m_index = tl.arange(0, BLOCK_M)
    tokens = first + m_index // GROUP
    heads = kv_head * GROUP + m_index % GROUP
    newest = length - num_new + tokens
    offs_d = tl.arange(0, D_PAD)
    mask = ((m_index < BLOCK_Q * GROUP) & (tokens < num_new))[:, None] & (offs_d < D)[None, :]
    rows = (first_row + tokens).to(tl.int64)
    queries = tl.load(q + rows[:, None] * s_q_token + heads[:, None] * s_q_head + offs_d[None, :], mask=mask, other=0.0)
    oldest = 0
    end = length
    if CAUSAL:
        end = tl.minimum(length, length - num_new + first + BLOCK_Q)
    if WINDOW > 0:
        oldest = tl.maximum(length - num_new + first - WINDOW + 1, 0)
    start = oldest // BLOCK_N * BLOCK_N
    if PAGED:
        where += b.to(tl.int64) * s_table
    else:
        where = tl.load(where + b)
    _, z, acc = _attend(
        queries, k + kv_head * s_head, v + kv_head * s_head, where, oldest, start, end, newest, qk_scale,
        s_block, s_token,
        BLOCK_M, D, D_PAD, BLOCK_N, PAGED, PAGE, True, CAUSAL, WINDOW, STAGES, VEC, UPCAST,
    )  # fmt: skip
    share = acc / tl.where(z == 0.0, 1.0, z)[:, None]
    target = out + rows[:, None] * s_out_token + heads[:, None] * s_out_head + offs_d[None, :]
    tl.store(target, share.to(out.dtype.element_ty), mask=mask)
