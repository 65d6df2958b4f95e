"""decode and prefill against float64, paged and contiguous bit for bit, over everything that a launch can vary."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from kvbench_kernels import device
from kvbench_kernels.plan import Tiles
from tests.kernels.pool import DEVICE, Pool, check_decode, check_prefill

SMALL = Tiles(32, 4, 2, 64)
"""Few tokens reach its edges."""
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
CASES = [
    # group, page, splits, window: each with each dtype, and each head dimension somewhere
    (1, 16, 1, 0),
    (3, 8, 2, 17),
    (4, 48, 4, 0),
    (8, 64, 1, 40),
]


def edges(page: int) -> list[int]:
    """Lengths around the ends of blocks and of tiles."""
    tile = SMALL.block_n
    return sorted({0, 1, page - 1, page, page + 1, tile - 1, tile, tile + 1, 2 * tile + 3})


@pytest.mark.parametrize(
    ("dtype", "head_dim", "case"),
    [
        (dtype, (64, 80, 96, 128)[(i + j) % 4], case)
        for (i, dtype), (j, case) in product(enumerate(DTYPES), enumerate(CASES))
    ],
)
def test_decode(dtype: torch.dtype, head_dim: int, case: tuple[int, int, int, int]) -> None:
    group, page, splits, window = case
    pool = Pool.of(edges(page), page=page, head_dim=head_dim, dtype=dtype)
    check_decode(pool, group, splits=splits, window=window, tiles=SMALL)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "case"),
    [
        (dtype, (128, 64, 80, 96)[(i + j) % 4], case)
        for (i, dtype), (j, case) in product(enumerate(DTYPES), enumerate(CASES))
    ],
)
def test_prefill(dtype: torch.dtype, head_dim: int, case: tuple[int, int, int, int]) -> None:
    group, page, _, window = case
    lens = edges(page)
    pool = Pool.of(lens, page=page, head_dim=head_dim, dtype=dtype)
    new = [length if index % 3 == 0 else min(length, (5, 1)[index % 2]) for index, length in enumerate(lens)]
    check_prefill(pool, new, group, window=window, tiles=SMALL)


def test_prefill_that_is_not_causal() -> None:
    check_prefill(Pool.of([0, 3, 40], page=16), [0, 3, 25], causal=False, tiles=SMALL)


def test_several_kv_heads_and_the_tiles_that_are_chosen() -> None:
    pool = Pool.of([70, 9], num_kv_heads=3, page=16)
    check_decode(pool, 2)
    check_prefill(pool, [70, 1], 2)


@pytest.mark.parametrize("page", [1, 2, 4, 8, 16, 32, 64, 128])
def test_every_power_of_two_is_a_page(page: int) -> None:
    pool = Pool.of([page + 33, 2 * page - 1], page=page)
    check_decode(pool, tiles=SMALL)
    check_prefill(pool, [page + 33, 2], tiles=SMALL)


def test_a_table_that_is_looked_up_inside_the_loop_gives_the_same() -> None:
    pool = Pool.of(edges(16), page=16)
    q = pool.queries(len(pool.lens), 1)
    ahead, inside = (
        device.decode(q, lens=pool.lens, **pool.paged, tiles=SMALL, prefetch=prefetch) for prefetch in (True, False)
    )
    assert all(map(torch.equal, ahead, inside))


def test_a_chunk_behind_a_cached_prefix_gives_what_the_whole_prompt_gives() -> None:
    pool = Pool.of([90], page=16)
    q = pool.queries(90, 2)
    ends = torch.tensor([[0, 90], [0, 30]], dtype=torch.int32, device=DEVICE)
    whole = device.prefill(q, cu_q=ends[0], lens=pool.lens, **pool.paged, tiles=SMALL)
    chunk = device.prefill(q[60:], cu_q=ends[1], lens=pool.lens, **pool.paged, tiles=SMALL)
    torch.testing.assert_close(chunk, whole[60:], atol=1e-6, rtol=1e-5)


def test_blocks_of_a_pool_that_holds_all_layers_side_by_side() -> None:
    pool = Pool.of([40, 17], page=16)
    blocks = pool.paged["k"].unflatten(0, (-1, 16)), pool.paged["v"].unflatten(0, (-1, 16))
    shape = (len(blocks[0]), 3, 2, *blocks[0].shape[1:])  # [blocks, layers, K and V, ...]
    apart = torch.full(shape, torch.nan, device=DEVICE)
    apart[:, 1, 0], apart[:, 1, 1] = blocks
    q = pool.queries(2, 2)
    expected = device.decode(q, lens=pool.lens, **pool.paged, tiles=SMALL)
    views = {"k": apart[:, 1, 0], "v": apart[:, 1, 1]}
    assert all(map(torch.equal, device.decode(q, lens=pool.lens, **pool.paged | views, tiles=SMALL), expected))


def test_what_is_given_to_write_to_is_written_to() -> None:
    pool = Pool.of([40, 0], page=16)
    q = pool.queries(2, 1)
    out, lse = torch.full_like(q, torch.nan), torch.full((2, 1), torch.nan, device=DEVICE)
    got = device.decode(q, lens=pool.lens, **pool.paged, out=out, lse=lse, tiles=SMALL)
    assert got[0] is out
    assert got[1] is lse
    assert not out.isnan().any()
    cu_q = torch.tensor([0, 1, 1], dtype=torch.int32, device=DEVICE)
    assert device.prefill(q[:1], cu_q=cu_q, lens=pool.lens, **pool.paged, out=out[:1], tiles=SMALL)._base is out
