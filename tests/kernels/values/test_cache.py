"""write_kv, copy_blocks, gather_blocks, scatter_blocks and move_rows against plain torch."""

from __future__ import annotations

import pytest
import torch

from kvbench_kernels import device, reference
from tests.kernels.pool import DEVICE


def cache(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Numbers that all differ, so that a K in V's place, or another layer's, shows."""
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape).to(dtype).to(DEVICE)


@pytest.mark.parametrize(("num_heads", "head_dim"), [(1, 64), (3, 80), (2, 96), (10, 128)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_write_kv(num_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    k, v = torch.full((2, 40, num_heads, head_dim), torch.nan, dtype=dtype, device=DEVICE)
    k_new, v_new = (
        torch.randn((2, 6, num_heads, head_dim), generator=torch.Generator().manual_seed(0)).to(dtype).to(DEVICE)
    )
    rows = torch.tensor([7, 39, -1, 0, 8, -1], device=DEVICE)
    expected = k.clone(), v.clone()
    reference.write_kv(k_new, v_new, *expected, rows)
    device.write_kv(k_new, v_new, k, v, rows)
    for got, wanted in zip((k, v), expected, strict=True):
        assert torch.equal(got.nan_to_num(-1.0), wanted.nan_to_num(-1.0))


def test_write_kv_into_blocks_that_lie_apart_from_a_packed_projection() -> None:
    pool = torch.full((5, 2, 2, 4, 2, 16), torch.nan, device=DEVICE)  # [blocks, layers, K and V, page, heads, head_dim]
    qkv = torch.randn((3, 6, 16), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    rows = torch.tensor([5, 19, 6], device=DEVICE)
    device.write_kv(qkv[:, 2:4], qkv[:, 4:], pool[:, 1, 0], pool[:, 1, 1], rows)
    for token, row in enumerate(rows.tolist()):
        assert torch.equal(pool[row // 4, 1, 0, row % 4], qkv[token, 2:4])
        assert torch.equal(pool[row // 4, 1, 1, row % 4], qkv[token, 4:])
    assert int(pool.isnan().sum()) == pool.numel() - 3 * 2 * 2 * 16


@pytest.mark.parametrize("block", [(2, 32), (16, 3, 80), (16, 8, 128)])
def test_copy_gather_and_scatter(block: tuple[int, ...]) -> None:
    kv = cache(3, 2, 7, *block)
    before = kv.clone()
    device.copy_blocks(kv, torch.tensor([[0, 5], [0, 2], [6, 1]]))
    expected = before.clone()
    reference.copy_blocks(expected, torch.tensor([[0, 5], [0, 2], [6, 1]]))
    assert torch.equal(kv, expected)
    ids = torch.tensor([4, 0, 6], device=DEVICE)
    staging = torch.full((4, 3, 2, *block), torch.nan, device=DEVICE)
    device.gather_blocks(kv, staging, ids)
    assert torch.equal(staging[1], kv[:, :, 0])
    assert staging[3].isnan().all()
    device.scatter_blocks(kv, staging, ids.flip(0))
    reference.scatter_blocks(expected, staging, ids.flip(0))
    assert torch.equal(kv, expected)


def test_blocks_may_hold_all_layers_side_by_side() -> None:
    pool = cache(6, 3, 2, 4, 2, 16)
    kv = pool.permute(1, 2, 0, 3, 4, 5)
    expected = pool.clone()
    expected[5] = expected[2]
    device.copy_blocks(kv, torch.tensor([[2, 5]]))
    assert torch.equal(pool, expected)


@pytest.mark.parametrize(
    ("src", "dst", "n"), [(0, 50, 40), (0, 1, 90), (1, 0, 90), (3, 40, 60), (60, 33, 37), (5, 5, 9)]
)
def test_move_rows(src: int, dst: int, n: int) -> None:
    kv = cache(2, 2, 100, 3, 80)
    expected = kv.clone()
    reference.move_rows(expected, src, dst, n)
    device.move_rows(kv, src, dst, n)
    assert torch.equal(kv, expected)


def test_nothing_to_do_is_nothing_done() -> None:
    kv = cache(1, 2, 3, 1, 16)
    expected, ids = kv.clone(), torch.empty(0, dtype=torch.int64, device=DEVICE)
    device.copy_blocks(kv, torch.empty((0, 2), dtype=torch.int64))
    device.gather_blocks(kv, torch.empty((0, 1, 2, 1, 16), device=DEVICE), ids)
    device.move_rows(kv, 0, 1, 0)
    device.write_kv(kv[0, 0, :0], kv[0, 1, :0], kv[0, 0], kv[0, 1], ids)
    assert torch.equal(kv, expected)
