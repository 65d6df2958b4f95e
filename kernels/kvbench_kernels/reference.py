"""What every kernel computes, in plain torch: slow, obvious, on any device. The signatures are those of ``device``."""

from __future__ import annotations

import math

import torch

from kvbench_kernels.plan import Tiles, check_pairs


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
    """Attention of one new token per sequence to all tokens of its sequence; exactly one of ``table`` and ``base``.

    Args:
        q: ``[B, Hq, D]``; head ``h`` reads K/V head ``h // (Hq / Hkv)``.
        k: one layer's ``[rows, Hkv, D]``, or ``[blocks, page, Hkv, D]`` with ``table``; the new tokens are written.
        v: like ``k``, with the same strides.
        lens: ``[B]`` int32, tokens of each sequence, the new one included. 0 (padding of a batch) gives zeros.
        table: ``[B, max_blocks]`` int32 block tables. Entries behind a sequence's last block are never read.
        base: ``[B]`` int64, first row of each sequence.
        page: tokens of a block.
        window: how many of the newest tokens are seen; 0: all.
        splits: into how many parts a sequence is cut that are computed in parallel, a power of two (``plan_splits``).
        scale: of the scores; ``D ** -0.5`` unless given.
        out: ``[B, Hq, D]`` to write to.
        lse: ``[B, Hq]`` float32 to write to.
        workspace: scratch of ``plan.workspace_len(...)`` float32, so that a captured graph owns it.
        tiles: other tiles than ``plan.decode_tiles``.
        prefetch: whether the table is read one tile ahead. False is the usual paged kernel, kept to be measured.

    Returns:
        The output, ``[B, Hq, D]``, and the natural logarithm of the sum of exponentials, ``[B, Hq]`` float32 (``-inf``
        for a length of 0).
    """
    del splits, workspace, tiles, prefetch  # how it is computed there, not what
    starts = torch.arange(len(lens) + 1, device=q.device)
    return _attend(q, k, v, starts, lens, table, base, page, True, window, scale, out, lse)


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
    """Attention of the newest tokens of each sequence to its tokens, all read from the cache, the new ones included.

    So a whole prompt, a chunk of one, and a prompt behind a cached prefix are the same call.

    Args:
        q: ``[T, Hq, D]``, the sequences' new tokens one after the other, without padding.
        k: as for ``decode``.
        v: as for ``decode``.
        cu_q: ``[B + 1]`` int32, first row of each sequence in ``q``, and ``T``.
        lens: ``[B]`` int32, tokens of each sequence, its new ones included.
        table: as for ``decode``.
        base: as for ``decode``.
        page: tokens of a block.
        causal: whether a token sees none behind itself.
        window: how many of the newest tokens a token sees, itself included; 0: all. Only with ``causal``.
        scale: of the scores; ``D ** -0.5`` unless given.
        out: ``[T, Hq, D]`` to write to.
        tiles: other tiles than ``plan.prefill_tiles``.

    Returns:
        ``[T, Hq, D]``; zeros for a token that sees nothing.
    """
    del tiles
    return _attend(q, k, v, cu_q, lens, table, base, page, causal, window, scale, out, None)[0]


def write_kv(k_new: torch.Tensor, v_new: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: torch.Tensor) -> None:
    """Put the K and V of new tokens into their rows of one layer's cache.

    Args:
        k_new: ``[T, Hkv, D]``.
        v_new: ``[T, Hkv, D]``.
        k: the layer's ``[rows, Hkv, D]`` or ``[blocks, page, Hkv, D]``.
        v: like ``k``, with the same strides.
        rows: ``[T]`` int64, the row (slot) of each token; -1: nowhere.
    """
    kept = rows >= 0
    for new, cache in ((k_new, k), (v_new, v)):
        where = (rows[kept],) if cache.dim() == 3 else (rows[kept] // cache.shape[1], rows[kept] % cache.shape[1])
        cache[where] = new[kept].to(cache.dtype)


def copy_blocks(kv: torch.Tensor, pairs: torch.Tensor) -> None:
    """Copy blocks within a cache, K and V, in all layers: copy-on-write.

    Args:
        kv: ``[layers, 2, blocks, ...]``: all behind the third dimension is one block and lies side by side.
        pairs: ``[N, 2]`` int64 on the host, source and target.

    Raises:
        ValueError: a block is written twice, or both read and written, so that the result would depend on the order.
    """
    check_pairs(pairs)
    src, dst = pairs.to(kv.device).unbind(1)
    kv[:, :, dst] = kv[:, :, src]


def gather_blocks(kv: torch.Tensor, staging: torch.Tensor, ids: torch.Tensor) -> None:
    """Collect blocks, each with its K and V of all layers side by side, so that one copy moves them: swapping out.

    Args:
        kv: ``[layers, 2, blocks, ...]``, as for ``copy_blocks``.
        staging: ``[N or more, layers, 2, ...]`` contiguous, on the device or in pinned memory of the host.
        ids: ``[N]`` int64, which blocks.
    """
    staging[: len(ids)] = kv[:, :, ids.to(kv.device)].movedim(2, 0).to(staging.device)


def scatter_blocks(kv: torch.Tensor, staging: torch.Tensor, ids: torch.Tensor) -> None:
    """Put collected blocks back, into the blocks ``ids``: swapping in. The arguments are those of ``gather_blocks``."""
    kv[:, :, ids.to(kv.device)] = staging[: len(ids)].to(kv.device).movedim(0, 2)


def move_rows(kv: torch.Tensor, src: int, dst: int, n: int) -> None:
    """Move ``n`` neighbouring rows, K and V, in all layers: what growing or compacting contiguous memory costs.

    Args:
        kv: ``[layers, 2, rows, ...]``: all behind the third dimension is one row and lies side by side.
        src: first row to read.
        dst: first row to write. The ranges may overlap; the rows arrive as they were.
        n: how many.
    """
    kv[:, :, dst : dst + n] = kv[:, :, src : src + n].clone()


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor,
    lens: torch.Tensor,
    table: torch.Tensor | None,
    base: torch.Tensor | None,
    page: int,
    causal: bool,
    window: int,
    scale: float | None,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequence by sequence: gather its rows, mask, softmax; in float64 if ``q`` is, else in float32."""
    precision = torch.promote_types(q.dtype, torch.float32)
    num_heads, head_dim = q.shape[1:]
    group = num_heads // k.shape[-2]
    out = torch.empty_like(q) if out is None else out
    lse = q.new_empty((len(q), num_heads), dtype=torch.float32) if lse is None else lse
    for index, length in enumerate(lens.tolist()):
        first, last = cu_q[index : index + 2].tolist()
        where = _rows(k, index, length, table, base, page)
        keys, values = (cache[where].to(precision).repeat_interleave(group, 1) for cache in (k, v))
        scores = torch.einsum("qhd,khd->qhk", q[first:last].to(precision), keys) * (scale or head_dim**-0.5)
        positions = torch.arange(length, device=q.device)
        newest = torch.arange(length - (last - first), length, device=q.device)[:, None]
        seen = torch.ones((last - first, length), dtype=torch.bool, device=q.device)
        if causal:
            seen &= positions <= newest
        if window:
            seen &= positions > newest - window
        scores = scores.masked_fill(~seen[:, None], -math.inf)
        values = values.masked_fill(~seen.any(0)[:, None, None], 0.0)  # they may be NaN, which zero does not undo
        sums = torch.logsumexp(scores, -1)
        weights = (scores - sums.nan_to_num(neginf=0.0)[..., None]).exp()
        out[first:last] = torch.einsum("qhk,khd->qhd", weights, values).to(out.dtype)
        lse[first:last] = sums.float()
    return out, lse


def _rows(
    k: torch.Tensor, index: int, length: int, table: torch.Tensor | None, base: torch.Tensor | None, page: int
) -> tuple[torch.Tensor, ...]:
    """Where a sequence's tokens are, as an index of ``k``."""
    tokens = torch.arange(length, device=k.device)
    if (table is None) == (base is None):
        raise ValueError("exactly one of table and base")
    if base is not None:
        return (base[index] + tokens,)
    assert table is not None
    blocks = table[index, tokens // page].long()
    return (blocks * page + tokens % page,) if k.dim() == 3 else (blocks, tokens % page)
