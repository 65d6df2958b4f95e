"""Every number of K and V is read once, and nothing outside the tensors of a launch is touched."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvbench_kernels import device
from kvbench_kernels.plan import Tiles, workspace_len
from tests.kernels.pool import Pool
from tests.kernels.traffic import counted

LENS = [0, 1, 16, 33, 70]
HEADS, GROUP, DIM = 2, 4, 64


def tensors(placement: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: each for name, each in placement.items() if isinstance(each, torch.Tensor)}


@pytest.mark.parametrize("placement", ["paged", "contiguous"])
@pytest.mark.parametrize(("splits", "window"), [(1, 0), (4, 0), (2, 20)])
def test_decode(placement: str, splits: int, window: int) -> None:
    pool = Pool.of(LENS, num_kv_heads=HEADS, head_dim=DIM)
    cache = getattr(pool, placement)
    q = pool.queries(len(LENS), GROUP)
    out, lse = torch.empty_like(q), torch.empty(q.shape[:2])
    workspace = torch.empty(workspace_len(len(LENS), HEADS * GROUP, DIM, splits))
    launch: dict[str, Any] = {"q": q, "lens": pool.lens, "out": out, "lse": lse, "workspace": workspace}
    with counted(**launch, **tensors(cache)) as traffic:
        device.decode(**launch, **cache, splits=splits, window=window, tiles=Tiles(32, 4, 2))
    kv_bytes = sum(min(length, window or length) for length in LENS) * HEADS * DIM * 4
    assert not traffic.astray
    for name in "kv":
        assert traffic.read[name] == traffic.touched[name] == kv_bytes
    assert traffic.written["out"] == out.nbytes
    assert traffic.written["lse"] == lse.nbytes
    assert traffic.touched["q"] == q.nbytes
    assert traffic.written["workspace"] <= workspace.nbytes


@pytest.mark.parametrize("placement", ["paged", "contiguous"])
def test_prefill(placement: str) -> None:
    pool = Pool.of(LENS, num_kv_heads=HEADS, head_dim=DIM)
    cache = getattr(pool, placement)
    new = [0, 1, 4, 16, 10]  # no more than one program takes
    q = pool.queries(sum(new), GROUP)
    launch: dict[str, Any] = {"q": q, "lens": pool.lens, "out": torch.empty_like(q)}
    launch["cu_q"] = torch.tensor([0, *new], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    with counted(**launch, **tensors(cache)) as traffic:
        device.prefill(**launch, **cache, tiles=Tiles(32, 4, 2, 64))
    assert not traffic.astray
    for name in "kv":
        assert traffic.read[name] == traffic.touched[name] == (sum(LENS) - LENS[0]) * HEADS * DIM * 4
    assert traffic.written["out"] == q.nbytes


def test_the_table_is_a_small_part_of_what_is_read() -> None:
    pool = Pool.of([512], num_kv_heads=HEADS, head_dim=DIM, page=16)
    q = pool.queries(1, GROUP)
    with counted(**tensors(pool.paged)) as traffic:
        device.decode(q, lens=pool.lens, **pool.paged)
    assert traffic.read["table"] == HEADS * 512 // 16 * 4
    assert traffic.read["table"] < 0.01 * traffic.read["k"]


def test_copies_read_and_write_each_number_once() -> None:
    kv = torch.zeros((2, 2, 5, 16, 3, 80))
    pairs = torch.tensor([[0, 3], [1, 4]])
    with counted(kv=kv) as traffic:
        device.copy_blocks(kv, pairs)
    assert traffic.read["kv"] == traffic.touched["kv"] == traffic.written["kv"] == kv.nbytes * 2 // 5
