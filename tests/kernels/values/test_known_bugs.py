"""What went wrong in other people's paged kernels, each as a test; the name of the project and its thread beside it."""

from __future__ import annotations

import pytest
import torch

from kvbench_kernels import device, reference
from kvbench_kernels.plan import Tiles, workspace_len
from tests.kernels.pool import DEVICE, Pool, check_decode, check_prefill, close

SMALL = Tiles(32, 4, 2, 64)
HUGE = 2**31
"""Elements beyond what 32 bits address. A tensor of so many costs no memory where it is not touched."""


def at_the_end(num_rows: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """K and V of more than ``HUGE`` elements, and the first of their last ``num_rows`` rows, which are filled."""
    rows = HUGE // 64 + num_rows
    k, v = (torch.empty((rows, 1, 64), dtype=torch.float16, device=DEVICE) for _ in range(2))
    generator = torch.Generator().manual_seed(0)
    for cache in (k, v):
        cache[-num_rows:] = torch.randn((num_rows, 1, 64), generator=generator).half()
    return k, v, rows - num_rows


def test_offsets_in_the_cache_are_wider_than_32_bits() -> None:
    """vllm #47671, #50427; sglang #20389: block number times stride wrapped around."""
    k, v, first = at_the_end(32)
    q = torch.randn((1, 2, 64), generator=torch.Generator().manual_seed(1)).half().to(DEVICE)
    lens = torch.tensor([29], dtype=torch.int32, device=DEVICE)
    cu_q = torch.tensor([0, 1], dtype=torch.int32, device=DEVICE)
    expected = reference.decode(
        q.double(), k[first:].double(), v[first:].double(), lens, base=torch.zeros(1, dtype=torch.int64, device=DEVICE)
    )[0]
    table = torch.tensor([[first // 16, first // 16 + 1]], dtype=torch.int32, device=DEVICE)
    base = torch.tensor([first], device=DEVICE)
    for out in (
        device.decode(q, k, v, lens, base=base)[0],
        device.decode(q, k, v, lens, table=table)[0],
        device.decode(q, k, v, lens, table=table, prefetch=False)[0],
        device.prefill(q, k, v, cu_q, lens, base=base),
        device.prefill(q, k, v, cu_q, lens, table=table),
    ):
        close(out, expected, torch.float16)


def test_offsets_of_what_moves_are_wider_than_32_bits() -> None:
    k, v, first = at_the_end(32)
    new = torch.full((1, 1, 64), 3.0, dtype=torch.float16, device=DEVICE)
    device.write_kv(new, 2 * new, k, v, torch.tensor([first + 31], device=DEVICE))
    assert (k[-1] == 3.0).all()
    assert (v[-1] == 6.0).all()
    kv = torch.empty((1, 2, HUGE // 64 + 32, 64), dtype=torch.float16, device=DEVICE)
    kv[:, :, -16:] = new[0, 0]
    last = kv.shape[2] // 16 - 1
    device.copy_blocks(kv.unflatten(2, (-1, 16)), torch.tensor([[last, last - 1]]))
    assert (kv[:, :, -32:] == 3.0).all()
    kv[:, :, -32:-16] = 1.0
    device.move_rows(kv, last * 16, last * 16 - 8, 16)
    assert kv[0, 1, -32:, 0].tolist() == [1.0] * 8 + [3.0] * 24


def test_offsets_of_queries_are_wider_than_32_bits() -> None:
    """The same threads: query index times stride."""
    pool = Pool.of([5, 20], page=16, dtype=torch.float16)
    spread = torch.empty_strided((2, 1, 64), (HUGE + 64, 64, 1), dtype=torch.float16, device=DEVICE)
    spread[:] = pool.queries(2, 1)
    out = torch.empty_strided((2, 1, 64), (HUGE + 64, 64, 1), dtype=torch.float16, device=DEVICE)
    expected = device.decode(spread.contiguous(), lens=pool.lens, **pool.paged)[0]
    assert torch.equal(device.decode(spread, lens=pool.lens, **pool.paged, out=out)[0], expected)
    cu_q = torch.tensor([0, 1, 2], dtype=torch.int32, device=DEVICE)
    expected = device.prefill(spread.contiguous(), cu_q=cu_q, lens=pool.lens, **pool.paged)
    assert torch.equal(device.prefill(spread, cu_q=cu_q, lens=pool.lens, **pool.paged, out=out), expected)


@pytest.mark.parametrize("window", [0, 1, 5, 31, 33])
def test_values_outside_the_window_and_behind_the_end_are_not_multiplied(window: int) -> None:
    """vllm #30887; sglang #32477; transformers #46765: zero times NaN. What a window has left behind may be freed."""
    lens = [40, 17]
    pool = Pool.of(lens, page=16)
    if window:
        for index, length in enumerate(lens):
            tokens = torch.arange(max(0, length - window))
            rows = pool.paged["table"][index].cpu()[tokens // 16] * 16 + tokens % 16
            first = int(pool.contiguous["base"][index])
            for name in "kv":
                pool.paged[name][rows.long()] = torch.nan
                pool.contiguous[name][first : first + len(tokens)] = torch.nan
    check_decode(pool, splits=2, window=window, tiles=SMALL)
    check_prefill(pool, [1, 1], window=window, tiles=SMALL)


@pytest.mark.parametrize("window", [1, 2, 16, 17, 37, 38, 39])
def test_windows_are_not_off_by_one(window: int) -> None:
    """sglang #32087. The length is 38."""
    pool = Pool.of([38], page=16)
    check_decode(pool, window=window, tiles=SMALL)
    out = check_prefill(pool, [38], window=window, tiles=SMALL)
    if window == 1:
        close(out, pool.contiguous["v"][5:43].double(), torch.float32)


@pytest.mark.parametrize(("splits", "window"), [(16, 0), (8, 5), (4, 40)])
def test_parts_without_tokens_do_not_leave_their_scratch_unwritten(splits: int, window: int) -> None:
    """vllm #47188."""
    pool = Pool.of([1, 33, 70], page=16)
    workspace = torch.full((workspace_len(3, 2, 64, splits),), torch.nan, device=DEVICE)
    check_decode(pool, 2, splits=splits, window=window, workspace=workspace, tiles=SMALL)


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("window", [0, 8])
def test_a_length_of_zero_gives_zeros_and_minus_infinity(splits: int, window: int) -> None:
    """vllm #57094, #39148, #38436; sglang #1779, #1782: padding of a captured batch gave 0 / 0."""
    pool = Pool.of([0, 9, 0], page=16)
    q = pool.queries(3, 2)
    out, lse = device.decode(q, lens=pool.lens, **pool.paged, splits=splits, window=window)
    assert (out[::2] == 0).all()
    assert (lse[::2] == -torch.inf).all()
    assert torch.isfinite(out[1]).all()
    cu_q = torch.tensor([0, 1, 2, 3], dtype=torch.int32, device=DEVICE)
    assert (device.prefill(q, cu_q=cu_q, lens=pool.lens, **pool.paged, window=window)[::2] == 0).all()


def test_a_row_of_minus_one_is_not_the_last() -> None:
    """vllm #43810; the guard rows around the cache stay as they were."""
    guarded = torch.full((2, 12, 2, 16), 7.0, device=DEVICE)
    new = torch.ones((3, 2, 16), device=DEVICE)
    device.write_kv(new, new, guarded[0, 2:10], guarded[1, 2:10], torch.tensor([-1, 3, -1], device=DEVICE))
    assert (guarded[:, 5] == 1.0).all()
    guarded[:, 5] = 7.0
    assert (guarded == 7.0).all()


def test_fewer_rows_than_new_tokens_are_refused() -> None:
    """vllm #13922."""
    cache, new = torch.zeros((8, 2, 16), device=DEVICE), torch.ones((3, 2, 16), device=DEVICE)
    with pytest.raises(ValueError, match=r"3 new tokens .* 2 rows"):
        device.write_kv(new, new, cache, cache, torch.tensor([1, 2], device=DEVICE))


@pytest.mark.parametrize("padding", [-1, 2**31 - 1, None])
def test_entries_behind_a_sequence_are_not_read(padding: int | None) -> None:
    """Several projects: padding of -1, or the number of a block that was freed (None: one that holds NaN)."""
    pool = Pool.of([1, 16, 17, 40], page=16, padding=padding)
    check_decode(pool, splits=2, tiles=SMALL)
    check_prefill(pool, [1, 16, 2, 40], tiles=SMALL)


def test_grids_that_are_too_large_are_refused() -> None:
    """triton #3299; fla #1096; flashinfer #3125, #4534: the launch fails and leaves the output as it was."""
    lens, base = torch.ones(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    k = torch.empty((1, 65536, 16), device="meta")
    q = torch.empty((1, 65536, 16), device="meta")
    with pytest.raises(ValueError, match="65536"):
        device.decode(q, k, k, lens, base=base)
    with pytest.raises(ValueError, match="65536"):
        device.prefill(q, k, k, torch.tensor([0, 1], dtype=torch.int32), lens, base=base)
    with pytest.raises(ValueError, match="65536"):
        device.move_rows(torch.empty((65536, 2, 4, 16), device="meta"), 0, 1, 1)


@pytest.mark.gpu
@pytest.mark.skipif(device.INTERPRETED, reason="takes minutes without a GPU")
def test_a_batch_of_65536_is_computed_to_its_end() -> None:
    """The same threads: the batch is along the first axis, which is not limited so."""
    pool = Pool.of([3], page=16)
    q = pool.queries(1, 1).expand(65537, 1, 64).contiguous()
    lens, base = pool.lens.expand(65537).contiguous(), pool.contiguous["base"].expand(65537).contiguous()
    out = torch.full_like(q, torch.nan)
    device.decode(q, pool.contiguous["k"], pool.contiguous["v"], lens, base=base, out=out)
    assert (out == out[0]).all()


@pytest.mark.parametrize("page", [24, 48, 192])
def test_no_part_of_a_page_is_skipped_where_no_tile_divides_it(page: int) -> None:
    """TileOps #1787: pages of 192 in tiles of 128."""
    pool = Pool.of([page - 1, page + 1, 2 * page + 5], page=page)
    check_decode(pool, tiles=SMALL)
    check_prefill(pool, [1, page, 3], tiles=SMALL)


def test_many_parts_of_a_wide_head_are_merged() -> None:
    """lmdeploy #4920: Triton 3.5 to 3.6.0 miscompiled the sum over 128 parts of 128 numbers, with two warps."""
    pool = Pool.of([128 * 16 - 7], page=128, head_dim=128)
    q = pool.queries(1, 1)
    expected, _ = reference.decode(q, lens=pool.lens, **pool.paged)
    out, _ = device.decode(q, lens=pool.lens, **pool.paged, splits=128, tiles=Tiles(16, 4, 2))
    close(out, expected.double(), torch.float32)


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_the_last_tiles_do_not_read_ahead_of_the_table(num_stages: int) -> None:
    """triton #10573 (an access out of bounds with two stages, on a GPU only): a table with no entry to spare."""
    pool = Pool.of([64, 32], page=16)
    pool.paged["table"] = pool.paged["table"][:, :4].contiguous()
    check_decode(pool, tiles=Tiles(32, 4, num_stages))
    check_prefill(pool, [64, 1], tiles=Tiles(32, 4, num_stages, 64))


def test_a_cache_in_8_bits_is_refused_and_not_read_without_its_scales() -> None:
    """sglang #18882, #22615; vllm #42580."""
    k = torch.zeros((16, 1, 64), device=DEVICE).to(torch.float8_e4m3fn)
    q, lens = torch.zeros((1, 1, 64), device=DEVICE), torch.ones(1, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match="float8_e4m3fn"):
        device.decode(q, k, k, lens, base=torch.zeros(1, dtype=torch.int64, device=DEVICE))


@pytest.mark.parametrize("page", [4, 16])
def test_short_prompts(page: int) -> None:
    """sglang #2479: every length to two pages and one, alone and beside others."""
    lens = list(range(1, 2 * page + 2))
    check_prefill(Pool.of(lens, page=page), lens, tiles=SMALL)


def test_copies_that_depend_on_their_order_are_refused() -> None:
    """vllm #45704, #7577; TensorRT-LLM #15546: chains of copies, and K copied for V (see test_cache for the latter)."""
    kv = torch.zeros((1, 2, 4, 16), device=DEVICE)
    for pairs, why in (([[0, 1], [1, 2]], "read and written"), ([[0, 1], [2, 1]], "written twice")):
        with pytest.raises(ValueError, match=why):
            device.copy_blocks(kv, torch.tensor(pairs))


def test_wrong_shapes_are_refused_by_name() -> None:
    pool = Pool.of([5], page=16)
    q = pool.queries(1, 1)
    for changed, why in (
        ({"base": torch.zeros(1, dtype=torch.int64, device=DEVICE)}, "exactly one"),
        ({"table": None}, "exactly one"),
        ({"table": pool.paged["table"].long()}, "table: .*int32"),
        ({"v": pool.paged["v"][:, :, ::2]}, "equal strides"),
        ({"k": pool.paged["k"][1:].flatten()[1:-63].view(-1, 1, 64), "v": pool.paged["v"][2:]}, "aligned"),
        ({"splits": 3}, "splits=3"),
        ({"window": -1}, "window=-1"),
        ({"workspace": torch.empty(3, device=DEVICE), "splits": 2}, "workspace has 3"),
    ):
        with pytest.raises(ValueError, match=why):
            device.decode(q, lens=pool.lens, **pool.paged | changed)
