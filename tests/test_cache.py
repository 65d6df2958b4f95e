"""K and V are where they were put, in every layer, and nowhere else."""

from __future__ import annotations

import pytest

from tests.extras import NEEDS_MODELS

pytest.importorskip("torch", reason=NEEDS_MODELS)

import torch

from kvbench.cache import KVCache
from kvbench.core import BlockCopy, KvbenchError

LAYERS, SLOTS, HEADS, HEAD_DIM = 3, 12, 2, 4
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(params=DTYPES, ids=str)
def cache(request: pytest.FixtureRequest) -> KVCache:
    """Every number different, K, V and layers included."""
    made = KVCache(LAYERS, SLOTS, HEADS, HEAD_DIM, request.param)
    made.data.copy_(torch.randn(made.data.shape, generator=torch.Generator().manual_seed(0)))
    return made


def test_write_touches_its_slots_of_its_layer_alone(cache: KVCache) -> None:
    before = cache.data.clone()
    k, v = torch.randn(2, 3, HEADS, HEAD_DIM).to(cache.data.dtype)
    slots = torch.tensor([7, 0, 11])
    cache.write(1, slots, k, v)
    assert torch.equal(cache.keys[1][slots], k)
    assert torch.equal(cache.values[1][slots], v)
    cache.keys[1][slots], cache.values[1][slots] = before[1, 0, slots], before[1, 1, slots]
    assert torch.equal(cache.data, before)


def test_write_rounds_to_the_dtype_of_the_cache() -> None:
    cache = KVCache(1, 2, 1, 1, torch.bfloat16)
    one = torch.full((1, 1, 1), 1.001)
    cache.write(0, torch.tensor([1]), one, one * 2)
    assert (cache.keys[0][1].item(), cache.values[0][1].item()) == (1.0, 2.0)


@pytest.mark.parametrize("slot", [-1, SLOTS])
def test_write_outside_the_pool_is_refused(cache: KVCache, slot: int) -> None:
    row = torch.zeros(1, HEADS, HEAD_DIM)
    with pytest.raises(IndexError):
        cache.write(0, torch.tensor([slot]), row, row)


def test_copy_moves_part_of_a_block_in_all_layers(cache: KVCache) -> None:
    before = cache.data.clone()
    cache.copy([BlockCopy(src=4, dst=8, num_slots=3), BlockCopy(src=0, dst=2, num_slots=1)])
    after = before.clone()
    after[:, :, 8:11] = before[:, :, 4:7]
    after[:, :, 2] = before[:, :, 0]
    assert torch.equal(cache.data, after)


def test_copy_reads_everything_before_it_writes(cache: KVCache) -> None:
    before = cache.data.clone()
    cache.copy([BlockCopy(0, 4, 4), BlockCopy(4, 8, 4)])
    assert torch.equal(cache.data[:, :, 4:], before[:, :, :8])


def test_copy_of_nothing(cache: KVCache) -> None:
    before = cache.data.clone()
    cache.copy([])
    assert torch.equal(cache.data, before)


def test_a_swap_brings_tokens_back_to_other_slots(cache: KVCache) -> None:
    before = cache.data.clone()
    num_layers, _, _, num_kv_heads, head_dim = cache.data.shape
    host = KVCache(num_layers, 8, num_kv_heads, head_dim, cache.data.dtype)
    host.move([BlockCopy(src=5, dst=0, num_slots=2), BlockCopy(src=1, dst=6, num_slots=1)], cache)
    cache.data.zero_()
    cache.move([BlockCopy(src=0, dst=2, num_slots=2), BlockCopy(src=6, dst=9, num_slots=1)], host)
    assert torch.equal(cache.data[:, :, [2, 3, 9]], before[:, :, [5, 6, 1]])
    assert not cache.data[:, :, [0, 1, 4, 5, 6, 7, 8]].any()


def test_layers_are_contiguous_and_aligned_to_cache_lines() -> None:
    cache = KVCache(2, 64, 2, 32)
    assert all(layer.is_contiguous() for layer in (*cache.keys, *cache.values))
    assert cache.data.data_ptr() % 64 == 0


def test_another_dtype_is_refused() -> None:
    with pytest.raises(KvbenchError, match="float64 is not supported; choose one of float32, bfloat16, float16"):
        KVCache(1, 1, 1, 1, torch.float64)
