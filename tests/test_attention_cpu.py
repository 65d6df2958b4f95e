"""The compiled attention, against the oracle in float64; paged and contiguous give the same bits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.extras import NEEDS_MODELS

pytest.importorskip("torch", reason=NEEDS_MODELS)

import torch

from kvbench.attention import cpu, reference
from kvbench.core import KvbenchError
from tests.packed import Packed, poisoned

PLACEMENTS = (None, 1, 4, 16)  # contiguous, or the block size
# Below, at and above a block of 16, a tile and a split, decoded, prefilled, and prefilled over a cached context.
LENGTHS = [1, 1, 15, 16, 17, 15, 16, 17, 33, 0, 127, 129, 512, 513, 1100, 300, 2]
NUM_QUERIES = [1, 1, 15, 16, 17, 1, 1, 1, 2, 0, 127, 1, 1, 1, 1, 70, 2]
# Both dtypes are accumulated in float32, and the oracle reads the same rounded K and V: bf16 is no worse.
TOLERANCE = 2e-6


def inputs(
    lengths: list[int], num_queries: list[int], num_kv_heads: int, group: int, head_dim: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(head_dim + group)
    keys, values = torch.randn(2, sum(lengths), num_kv_heads, head_dim, generator=generator).to(dtype)
    return torch.randn(sum(num_queries), num_kv_heads * group, head_dim, generator=generator), keys, values


def attend(q: torch.Tensor, packed: Packed, scale: float) -> torch.Tensor:
    return cpu.attend(q, packed.cache.keys[0], packed.cache.values[0], packed.batch, scale)


@pytest.fixture
def threads() -> Iterator[None]:
    """Restores the number that a test changes."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("group", [1, 3, 4, 8])
@pytest.mark.parametrize("head_dim", [8, 64, 80, 96, 128])
def test_equals_the_oracle_and_placements_give_the_same_bits(dtype: torch.dtype, group: int, head_dim: int) -> None:
    q, keys, values = inputs(LENGTHS, NUM_QUERIES, 2, group, head_dim, dtype)
    scale = 2.0 * head_dim**-0.5  # weights that differ
    outs = []
    for block_size in PLACEMENTS:
        packed = poisoned(LENGTHS, NUM_QUERIES, block_size, keys, values)
        outs.append(attend(q, packed, scale))
        if block_size is None:
            expected = reference.attend(q.double(), packed.cache.keys[0], packed.cache.values[0], packed.batch, scale)
            torch.testing.assert_close(outs[0].double(), expected, rtol=TOLERANCE, atol=TOLERANCE)
    assert all(torch.equal(out, outs[0]) for out in outs)


def test_scores_far_apart() -> None:
    """Weights from 1 down to 0, negative scores first: the maximum rises from tile to tile and nothing overflows."""
    length = 400
    keys = torch.linspace(-300.0, 300.0, length)[:, None, None].expand(length, 1, 8).contiguous()
    values = torch.randn(length, 1, 8)
    for sign in (1.0, -1.0):
        q = torch.full((1, 1, 8), sign)
        packed = poisoned([length], [1], 16, keys, values)
        expected = reference.attend(q.double(), packed.cache.keys[0], packed.cache.values[0], packed.batch, 1.0)
        torch.testing.assert_close(attend(q, packed, 1.0).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("num_kv_heads", [1, 5])
def test_neither_neighbours_nor_threads_change_a_bit(num_kv_heads: int) -> None:
    lengths, num_queries = [1100, 40, 17, 700, 90], [1, 40, 1, 1, 33]
    q, keys, values = inputs(lengths, num_queries, num_kv_heads, 2, 16, torch.float32)
    together = []
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        together.append(attend(q, poisoned(lengths, num_queries, 4, keys, values), 1.0))
        assert torch.get_num_threads() == num_threads
    rows = zip(q.split(num_queries), keys.split(lengths), values.split(lengths), lengths, num_queries, strict=True)
    alone = [attend(query, poisoned([length], [num], 4, k, v), 1.0) for query, k, v, length, num in rows]
    assert all(torch.equal(out, torch.cat(alone)) for out in together)


def test_the_queries_dtype_is_the_results() -> None:
    q, keys, values = inputs([20], [1], 2, 2, 16, torch.bfloat16)
    packed = poisoned([20], [1], 4, keys, values)
    exact = attend(q.bfloat16().float(), packed, 0.25)
    assert torch.equal(attend(q.bfloat16(), packed, 0.25), exact.bfloat16())


def test_queries_need_not_be_contiguous() -> None:
    q, keys, values = inputs([9], [9], 2, 2, 16, torch.float32)
    packed = poisoned([9], [9], 4, keys, values)
    assert torch.equal(attend(q.transpose(0, 1).contiguous().transpose(0, 1), packed, 1.0), attend(q, packed, 1.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("what", ["keys", "values"])
def test_it_shows_a_slot_that_should_not_have_been_read(dtype: torch.dtype, what: str) -> None:
    """Every token of a sequence in turn: so the poison of the other tests would have shown."""
    for position in range(9):
        q, keys, values = inputs([9], [1], 1, 1, 16, dtype)
        packed = poisoned([9], [1], 4, keys, values)
        getattr(packed.cache, what)[0][packed.slots[0][position]] = torch.nan
        assert attend(q, packed, 1.0).isnan().all()


def test_a_query_that_sees_nothing_gets_zeros() -> None:
    q, keys, values = inputs([0, 2], [1, 1], 1, 2, 8, torch.float32)
    packed = poisoned([0, 2], [0, 1], 4, keys, values)
    packed.batch.query_start = torch.tensor([0, 1, 2])
    out = attend(q, packed, 1.0)
    assert (out[0] == 0.0).all()
    assert (out[1] != 0.0).all()


def test_no_sequences() -> None:
    packed = poisoned([0], [0], None, torch.ones(0, 1, 8), torch.ones(0, 1, 8))
    assert attend(torch.ones(0, 2, 8), packed, 1.0).shape == (0, 2, 8)


def test_fp16_is_refused() -> None:
    packed = poisoned([1], [1], None, torch.ones(1, 1, 8).half(), torch.ones(1, 1, 8).half())
    with pytest.raises(KvbenchError, match="float16 cache on cpu; it supports float32 and bfloat16"):
        attend(torch.ones(1, 1, 8), packed, 1.0)
