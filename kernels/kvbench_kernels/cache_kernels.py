"""Triton kernels that move K and V: new tokens into their rows, blocks to other blocks, rows to other rows."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows"])
def write_rows(
    k_new, v_new, k, v, rows, s_new_token, s_new_head, s_block, s_token, s_head,
    PAGE: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """``BLOCK`` numbers of one new token's K and V; grid ``(T, cdiv(HEADS * D, BLOCK))``. Row -1 is nowhere."""
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + token)
    if row < 0:
        return
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = index < HEADS * D
    source = token * s_new_token + index // D * s_new_head + index % D
    target = row // PAGE * s_block + row % PAGE * s_token + index // D * s_head + index % D
    source = tl.max_contiguous(tl.multiple_of(source, VEC), VEC)
    target = tl.max_contiguous(tl.multiple_of(target, VEC), VEC)
    keys = tl.load(k_new + source, mask=mask)
    values = tl.load(v_new + source, mask=mask)
    tl.store(k + target, keys.to(k.dtype.element_ty), mask=mask)
    tl.store(v + target, values.to(v.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["sources", "targets", "s_pair"])
def copy_pieces(
    src, dst, sources, targets, s_pair,
    s_src_block, s_src_layer, s_src_half, s_dst_block, s_dst_layer, s_dst_half,
    SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``BLOCK`` numbers of one block in one layer, K and V; grid ``(N, layers, cdiv(SIZE, BLOCK))``.

    ``sources`` and ``targets`` say which block, ``s_pair`` apart; where one is None, block ``n`` is number ``n``.
    """
    n = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(1).to(tl.int64)
    source = n
    target = n
    if sources is not None:
        source = tl.load(sources + n * s_pair)
    if targets is not None:
        target = tl.load(targets + n * s_pair)
    index = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    mask = index < SIZE
    src += source * s_src_block + layer * s_src_layer
    dst += target * s_dst_block + layer * s_dst_layer
    keys = tl.load(src + index, mask=mask)
    values = tl.load(src + s_src_half + index, mask=mask)  # before the stores, which might alias for all that is known
    tl.store(dst + index, keys, mask=mask)
    tl.store(dst + s_dst_half + index, values, mask=mask)


@triton.jit(do_not_specialize=["first", "target", "n"])
def shift_rows(
    kv, first, target, n, s_layer, s_half, s_row,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Some columns of ``n`` rows, from the end if the rows move there; grid ``(layers, 2, cdiv(SIZE, BLOCK))``."""
    index = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    kv += tl.program_id(0).to(tl.int64) * s_layer + tl.program_id(1).to(tl.int64) * s_half
    for step in range(tl.cdiv(n, ROWS)):
        chunk = step
        if target > first:
            chunk = tl.cdiv(n, ROWS) - 1 - step
        rows = chunk * ROWS + tl.arange(0, ROWS)
        mask = (rows < n)[:, None] & (index < SIZE)[None, :]
        offsets = rows.to(tl.int64)[:, None] * s_row + index[None, :]
        moved = tl.load(kv + first.to(tl.int64) * s_row + offsets, mask=mask)
        tl.debug_barrier()  # another warp may still have to read what this one is about to overwrite
        tl.store(kv + target.to(tl.int64) * s_row + offsets, moved, mask=mask)
