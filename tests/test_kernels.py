"""kvbench_kernels without triton: what the host decides, and the functions in plain torch."""

from __future__ import annotations

import pytest

from tests.extras import NEEDS_MODELS

torch = pytest.importorskip("torch", reason=NEEDS_MODELS)

from kvbench_kernels import plan, reference  # noqa: E402

H200_SMS = 132


@pytest.mark.parametrize(
    ("lens", "num_kv_heads", "splits"),
    [
        ([4096] * 64, 40, 1),  # programs enough
        ([4096] * 32, 8, 4),
        ([4096], 8, 32),  # parts as short as they may be
        ([100], 8, 1),  # shorter than that
        ([512] * 255 + [32768], 8, 16),  # one long sequence would run on alone
        ([0], 8, 1),
        ([], 8, 1),
    ],
)
def test_splits(lens: list[int], num_kv_heads: int, splits: int) -> None:
    assert plan.plan_splits(lens, num_kv_heads, H200_SMS) == splits


def test_tiles_are_looked_up_and_what_has_none_is_named() -> None:
    assert plan.decode_tiles(96, torch.bfloat16, "sm_90") == plan.decode_tiles(128, torch.float16, "sm_90")
    assert plan.prefill_tiles(64, torch.bfloat16, "sm_89") == plan.prefill_tiles(64, torch.bfloat16, "sm_80")
    for head_dim, dtype, arch, named in (
        (256, torch.bfloat16, "sm_90", "head_dim 256"),
        (64, torch.float64, "sm_90", "float64"),
        (64, torch.bfloat16, "gfx90a", "gfx90a"),
    ):
        with pytest.raises(ValueError, match=named):
            plan.decode_tiles(head_dim, dtype, arch)


@pytest.mark.parametrize("window", [0, 3])
def test_the_reference_is_what_torch_computes(window: int) -> None:
    lens, new, group = [7, 4, 1], [3, 4, 1], 2
    generator = torch.Generator().manual_seed(0)
    k, v = torch.randn((2, 40, 3, 16), generator=generator, dtype=torch.float64)
    q = torch.randn((sum(new), 6, 16), generator=generator, dtype=torch.float64)
    base = torch.tensor([20, 2, 9])
    cu_q = torch.tensor([0, 3, 7, 8], dtype=torch.int32)
    tokens = torch.tensor(lens, dtype=torch.int32)
    out = reference.prefill(q, k, v, cu_q, tokens, base=base, window=window)
    newest, lse = reference.decode(q[cu_q[1:] - 1], k, v, tokens, base=base, window=window)
    for index, (length, count) in enumerate(zip(lens, new, strict=True)):
        keys, values = (each[base[index] : base[index] + length].transpose(0, 1) for each in (k, v))
        seen = torch.ones((length, length), dtype=torch.bool).tril()
        if window:
            seen &= ~torch.ones((length, length), dtype=torch.bool).tril(-window)
        rows = slice(int(cu_q[index]), int(cu_q[index + 1]))
        queries = q[rows].transpose(0, 1)
        expected = torch.nn.functional.scaled_dot_product_attention(
            queries, keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0), seen[length - count :]
        ).transpose(0, 1)
        torch.testing.assert_close(out[rows], expected)
        torch.testing.assert_close(newest[index], expected[-1])
        scores = (queries[0, -1] @ keys[0, -window:].T) / 4
        torch.testing.assert_close(lse[index, 0].double(), scores.logsumexp(0), atol=1e-5, rtol=1e-5)


def test_a_table_of_blocks_is_the_same_as_their_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    k, v = torch.randn((2, 40, 1, 16), generator=generator, dtype=torch.float64)
    q = torch.randn((1, 1, 16), generator=generator, dtype=torch.float64)
    lens, table = torch.tensor([11], dtype=torch.int32), torch.tensor([[3, 0, 1, -1]], dtype=torch.int32)
    rows = torch.cat([torch.arange(12, 16), torch.arange(7)])
    flat = reference.decode(q, k[rows], v[rows], lens, base=torch.zeros(1, dtype=torch.int64))
    assert all(map(torch.equal, reference.decode(q, k, v, lens, table=table, page=4), flat))
    blocks = k.unflatten(0, (-1, 4)), v.unflatten(0, (-1, 4))
    assert all(map(torch.equal, reference.decode(q, *blocks, lens, table=table, page=4), flat))


def test_copies_that_depend_on_their_order_are_refused() -> None:
    plan.check_pairs(torch.tensor([[0, 1], [0, 2]]))
    for pairs, why in (([[0, 1], [1, 2]], "block 1 is read and written"), ([[0, 2], [1, 2]], "written twice")):
        with pytest.raises(ValueError, match=why):
            plan.check_pairs(torch.tensor(pairs))
