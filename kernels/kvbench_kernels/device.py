"""The functions of ``reference`` as Triton kernels. What they compute, and their arguments, is said there.

Nothing here waits for the GPU or reads from it. ``decode``, ``prefill`` and ``write_kv`` can be captured in a graph,
where ``out``, ``lse`` and ``workspace`` are the caller's. Wrong arguments are refused here: a kernel would read
elsewhere, and a grid that is too large would leave the output as it was.
"""

from __future__ import annotations

import math

import torch
import triton

from kvbench_kernels import attention_kernels, cache_kernels
from kvbench_kernels.plan import DTYPES, Tiles, check_pairs, decode_tiles, prefill_tiles, workspace_len

INTERPRETED = bool(triton.knobs.runtime.interpret)
MAX_GRID = 65535
"""Programs along the second and third axis of a grid."""
COPY_BYTES = 16384
"""What a program that copies blocks moves of K, and of V."""


def decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lens: torch.Tensor,
    *,
    table: torch.Tensor | None = None,
    base: torch.Tensor | None = None,
    page: int = 16,
    window: int = 0,
    splits: int = 1,
    scale: float | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    tiles: Tiles | None = None,
    prefetch: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``reference.decode``.

    Raises:
        ValueError: shapes, strides or numbers that the kernel cannot take; the message names them.
    """
    batch, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[-2]
    tiles = tiles or decode_tiles(head_dim, q.dtype, architecture(q.device))
    where, page, s_block, s_token = _addresses(k, v, lens, table, base, page)
    group = _group(q, k, window)
    if len(lens) != batch:
        raise ValueError(f"{batch} queries for {len(lens)} sequences")
    if splits < 1 or splits & (splits - 1) or max(num_heads, splits) > MAX_GRID:
        raise ValueError(f"splits={splits} must be a power of two; heads and splits at most {MAX_GRID}")
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    lse = q.new_empty((batch, num_heads), dtype=torch.float32) if lse is None else lse
    needed = workspace_len(batch, num_heads, head_dim, splits)
    if workspace is None:
        workspace = q.new_empty(needed, dtype=torch.float32)
    if workspace.numel() < needed or workspace.dtype != torch.float32:
        raise ValueError(f"the workspace has {workspace.numel()} numbers of {workspace.dtype}, {needed} float32 needed")
    if not lse.is_contiguous() or lse.dtype != torch.float32 or out.stride(-1) != 1 or q.stride(-1) != 1:
        raise ValueError("q and out need contiguous heads, lse must be contiguous float32")
    if batch == 0:
        return out, lse
    partial_lse = workspace[batch * num_heads * splits * head_dim :]
    attention_kernels.decode_part[(batch, num_kv_heads, splits)](
        q, k, v, where, lens, out, lse, workspace, partial_lse, _log2_scale(scale, head_dim),
        q.stride(0), q.stride(1), s_block, s_token, k.stride(-2), 0 if table is None else where.stride(0),
        out.stride(0), out.stride(1),
        GROUP=group, D=head_dim, D_PAD=_padded(head_dim), BLOCK_H=_padded(group), BLOCK_N=tiles.block_n,
        PAGED=table is not None, PAGE=page, PREFETCH=prefetch, WINDOW=window, SPLITS=splits,
        STAGES=tiles.num_stages, VEC=16 // k.element_size(), UPCAST=_upcast(k),
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    if splits > 1:
        attention_kernels.decode_merge[(batch, num_heads)](
            workspace,
            partial_lse,
            out,
            lse,
            out.stride(0),
            out.stride(1),
            D=head_dim,
            D_PAD=_padded(head_dim),
            SPLITS=splits,
        )
    return out, lse


def prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor,
    lens: torch.Tensor,
    *,
    table: torch.Tensor | None = None,
    base: torch.Tensor | None = None,
    page: int = 16,
    causal: bool = True,
    window: int = 0,
    scale: float | None = None,
    out: torch.Tensor | None = None,
    tiles: Tiles | None = None,
) -> torch.Tensor:
    """``reference.prefill``.

    Raises:
        ValueError: shapes, strides or numbers that the kernel cannot take; the message names them.
    """
    num_tokens, _, head_dim = q.shape
    num_kv_heads = k.shape[-2]
    tiles = tiles or prefill_tiles(head_dim, q.dtype, architecture(q.device))
    where, page, s_block, s_token = _addresses(k, v, lens, table, base, page)
    group = _group(q, k, window)
    if len(cu_q) != len(lens) + 1 or cu_q.dtype != torch.int32:
        raise ValueError(f"cu_q has {len(cu_q)} of {cu_q.dtype}; {len(lens) + 1} int32 needed")
    if window and not causal:
        raise ValueError(f"window={window} needs causal=True")
    if group > tiles.block_m:
        raise ValueError(f"{group} query heads for one of K/V; at most {tiles.block_m}")
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    if out.stride(-1) != 1 or q.stride(-1) != 1:
        raise ValueError("q and out need contiguous heads")
    if num_tokens == 0:
        return out
    attention_kernels.prefill_tile[(num_tokens // (tiles.block_m // group) + len(lens), num_kv_heads)](
        q, k, v, where, lens, cu_q, out, len(lens), _log2_scale(scale, head_dim),
        q.stride(0), q.stride(1), s_block, s_token, k.stride(-2), 0 if table is None else where.stride(0),
        out.stride(0), out.stride(1),
        GROUP=group, D=head_dim, D_PAD=_padded(head_dim), BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n,
        PAGED=table is not None, PAGE=page, CAUSAL=causal, WINDOW=window,
        STAGES=tiles.num_stages, VEC=16 // k.element_size(), UPCAST=_upcast(k),
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    return out


def write_kv(k_new: torch.Tensor, v_new: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: torch.Tensor) -> None:
    """``reference.write_kv``.

    Raises:
        ValueError: shapes or strides that the kernel cannot take; the message names them.
    """
    num_tokens, num_heads, head_dim = k_new.shape
    page, s_block = (k.shape[1], k.stride(0)) if k.dim() == 4 else (1, k.stride(0))
    _check_strides(k, v)
    _check_strides(k_new, v_new)
    if len(rows) != num_tokens or rows.dtype != torch.int64 or k.shape[-2:] != k_new.shape[1:]:
        raise ValueError(f"{num_tokens} new tokens of {tuple(k_new.shape[1:])}, {len(rows)} rows of {rows.dtype}")
    if num_tokens == 0:
        return
    size = num_heads * head_dim
    block = min(1024, triton.next_power_of_2(size))
    cache_kernels.write_rows[(num_tokens, triton.cdiv(size, block))](
        k_new, v_new, k, v, rows, k_new.stride(0), k_new.stride(1), s_block, k.stride(-3), k.stride(-2),
        PAGE=page, HEADS=num_heads, D=head_dim, BLOCK=block, VEC=16 // k.element_size(), num_warps=4,
    )  # fmt: skip


def copy_blocks(kv: torch.Tensor, pairs: torch.Tensor) -> None:
    """``reference.copy_blocks``.

    Raises:
        ValueError: a copy whose result depends on the order, or a cache whose blocks are not in one piece.
    """
    check_pairs(pairs)
    pinned = pairs.pin_memory() if kv.is_cuda else pairs  # a buffer of its own: the last call's may not be copied yet
    where = pinned.to(kv.device, non_blocking=True)
    _copy(kv, kv, where[:, 0], where[:, 1], len(pairs))


def gather_blocks(kv: torch.Tensor, staging: torch.Tensor, ids: torch.Tensor) -> None:
    """``reference.gather_blocks``.

    Raises:
        ValueError: a cache or staging whose blocks are not in one piece, or not of the same shape.
    """
    _copy(kv, staging.movedim(0, 2), ids, None, len(ids))


def scatter_blocks(kv: torch.Tensor, staging: torch.Tensor, ids: torch.Tensor) -> None:
    """``reference.scatter_blocks``.

    Raises:
        ValueError: a cache or staging whose blocks are not in one piece, or not of the same shape.
    """
    _copy(staging.movedim(0, 2), kv, None, ids, len(ids))


def move_rows(kv: torch.Tensor, src: int, dst: int, n: int) -> None:
    """``reference.move_rows``.

    Raises:
        ValueError: rows outside the cache, or not in one piece.
    """
    if min(src, dst, n) < 0 or max(src, dst) + n > kv.shape[2]:
        raise ValueError(f"rows {src} to {src + n}, and {dst} to {dst + n}, must lie among {kv.shape[2]}")
    size = _piece(kv)
    if n == 0 or src == dst:
        return
    block = min(triton.next_power_of_2(size), 512 // kv.element_size())
    cache_kernels.shift_rows[(kv.shape[0], 2, triton.cdiv(size, block))](
        kv, src, dst, n, kv.stride(0), kv.stride(1), kv.stride(2), SIZE=size, BLOCK=block, ROWS=32, num_warps=4
    )


def architecture(device: torch.device) -> str:
    """What tiles are chosen by: ``sm_90``, ``gfx942``; of a CPU, where kernels are interpreted, the former."""
    if device.type != "cuda":
        return "sm_90"
    if torch.version.hip:
        return str(torch.cuda.get_device_properties(device).gcnArchName).partition(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def _copy(
    src: torch.Tensor, dst: torch.Tensor, sources: torch.Tensor | None, targets: torch.Tensor | None, num: int
) -> None:
    """Copy blocks of ``[layers, 2, blocks, ...]``."""
    size = _piece(src)
    given = sources if sources is not None else targets
    if _piece(dst) != size or src.shape[:2] != dst.shape[:2] or src.dtype != dst.dtype:
        raise ValueError(f"blocks of {tuple(src.shape)} {src.dtype} do not fit into {tuple(dst.shape)} {dst.dtype}")
    if num > (src if sources is None else dst).shape[2] or given is None or given.dtype != torch.int64:
        raise ValueError(f"{num} blocks; their numbers must be int64, and the staging have room for them")
    if num == 0:
        return
    block = min(triton.next_power_of_2(size), COPY_BYTES // src.element_size())
    cache_kernels.copy_pieces[(num, src.shape[0], triton.cdiv(size, block))](
        src, dst, sources, targets, given.stride(0), src.stride(2), src.stride(0), src.stride(1),
        dst.stride(2), dst.stride(0), dst.stride(1), SIZE=size, BLOCK=block, num_warps=8,
    )  # fmt: skip


def _piece(kv: torch.Tensor) -> int:
    """Numbers of one block of ``[layers, 2, blocks, ...]``."""
    size = math.prod(kv.shape[3:])
    in_one_piece = kv.dim() > 3 and kv.stride()[3:] == tuple(math.prod(kv.shape[i + 1 :]) for i in range(3, kv.dim()))
    if not in_one_piece or kv.shape[1] != 2 or kv.shape[0] > MAX_GRID:
        raise ValueError(
            f"a cache of {tuple(kv.shape)} with {kv.stride()}; needed are [layers, 2, blocks, ...], at most {MAX_GRID} "
            "layers, each block in one piece"
        )
    return size


def _addresses(
    k: torch.Tensor,
    v: torch.Tensor,
    lens: torch.Tensor,
    table: torch.Tensor | None,
    base: torch.Tensor | None,
    page: int,
) -> tuple[torch.Tensor, int, int, int]:
    """The table or the first rows, and page, block stride and token stride that turn them into offsets."""
    _check_strides(k, v)
    for name, given, dtype in (("lens", lens, torch.int32), ("table", table, torch.int32), ("base", base, torch.int64)):
        if given is not None and (given.dtype != dtype or len(given) != len(lens) or given.stride(-1) != 1):
            raise ValueError(f"{name}: {tuple(given.shape)} of {given.dtype}; {dtype} for {len(lens)} sequences needed")
    if base is not None and table is None and k.dim() == 3:
        return base, 1, 0, k.stride(0)
    if table is None or base is not None:
        raise ValueError("exactly one of table and base; base needs a cache of [rows, heads, head_dim]")
    if page < 1 or (k.dim() == 4 and k.shape[1] != page):
        raise ValueError(f"page={page}, of a cache of {tuple(k.shape)}")
    s_token = k.stride(-3)
    s_block = k.stride(0) if k.dim() == 4 else page * s_token
    if page & (page - 1) == 0:
        return table, page, s_block, s_token
    # A page that no tile divides: a table of tokens, each a page of its own.
    if s_block % s_token:
        raise ValueError(f"blocks {s_block} apart are not a whole number of tokens, {s_token} apart; page={page}")
    rows = table[:, :, None] * (s_block // s_token) + torch.arange(page, device=table.device, dtype=table.dtype)
    return rows.flatten(1), 1, s_token, s_token


def _check_strides(k: torch.Tensor, v: torch.Tensor) -> None:
    if k.dtype not in DTYPES or k.dtype != v.dtype:
        raise ValueError(f"K in {k.dtype}, V in {v.dtype}; both must be one of {', '.join(map(str, DTYPES))}")
    vec = 16 // k.element_size()
    aligned = all(stride % vec == 0 for stride in k.stride()[:-1]) and (k.data_ptr() | v.data_ptr()) % 16 == 0
    if k.shape != v.shape or k.stride() != v.stride() or k.stride(-1) != 1 or not aligned or k.shape[-1] % vec:
        raise ValueError(
            f"K and V need equal strides, heads in one piece and all of it aligned to 16 bytes: {tuple(k.shape)} with "
            f"{k.stride()}, {tuple(v.shape)} with {v.stride()}"
        )


def _group(q: torch.Tensor, k: torch.Tensor, window: int) -> int:
    """Query heads for each K/V head."""
    num_kv_heads, head_dim = k.shape[-2:]
    if q.shape[1] % num_kv_heads or q.shape[2] != head_dim or q.dtype != k.dtype or num_kv_heads > MAX_GRID:
        raise ValueError(f"q is {tuple(q.shape)} {q.dtype}, the cache's heads {num_kv_heads} x {head_dim} {k.dtype}")
    if window < 0:
        raise ValueError(f"window={window} must not be negative")
    return q.shape[1] // num_kv_heads


def _padded(size: int) -> int:
    """What a tile has room for: a power of two, and no less than a matrix product takes."""
    return max(16, int(triton.next_power_of_2(size)))


def _log2_scale(scale: float | None, head_dim: int) -> float:
    return (head_dim**-0.5 if scale is None else scale) * math.log2(math.e)


def _upcast(k: torch.Tensor) -> bool:
    """The interpreter knows bfloat16 only as bits."""
    return INTERPRETED and k.dtype == torch.bfloat16
