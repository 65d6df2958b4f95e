"""The oracle itself, against torch's attention on each sequence alone, and by hand."""

from __future__ import annotations

import pytest

from tests.extras import NEEDS_MODELS

pytest.importorskip("torch", reason=NEEDS_MODELS)

import torch
from torch.nn.functional import scaled_dot_product_attention

from kvbench.attention import reference
from kvbench.attention.base import PackedBatch
from tests.packed import poisoned


@pytest.mark.parametrize("block_size", [None, 1, 4, 16])
@pytest.mark.parametrize("group", [1, 3])
def test_reference_is_softmax_attention_on_each_sequence(block_size: int | None, group: int) -> None:
    lengths, num_queries = [1, 15, 16, 17, 40], [1, 15, 1, 3, 40]
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, sum(lengths), 2, 8, generator=generator)
    q = torch.randn(sum(num_queries), 2 * group, 8, generator=generator, dtype=torch.float64)
    packed = poisoned(lengths, num_queries, block_size, keys, values)
    out = reference.attend(q, packed.cache.keys[0], packed.cache.values[0], packed.batch, 0.3)
    queries = q.split(num_queries)
    rows = zip(queries, keys.double().split(lengths), values.double().split(lengths), strict=True)
    expected = [
        scaled_dot_product_attention(
            query.transpose(0, 1),
            key.transpose(0, 1).repeat_interleave(group, 0),
            value.transpose(0, 1).repeat_interleave(group, 0),
            attn_mask=torch.ones(len(query), len(key), dtype=torch.bool).tril(len(key) - len(query)),
            scale=0.3,
        ).transpose(0, 1)
        for query, key, value in rows
    ]
    torch.testing.assert_close(out, torch.cat(expected), rtol=1e-13, atol=1e-13)


def test_by_hand() -> None:
    """Two tokens with scores 0 and ln 3: the second query weighs their values 1/4 and 3/4, the first sees one."""
    keys = torch.tensor([0.0, 3.0]).log().nan_to_num(neginf=0.0).view(2, 1, 1)
    values = torch.tensor([4.0, 8.0]).view(2, 1, 1)
    packed = poisoned([2], [2], None, keys, values)
    out = reference.attend(torch.ones(2, 1, 1), packed.cache.keys[0], packed.cache.values[0], packed.batch, 1.0)
    torch.testing.assert_close(out.flatten(), torch.tensor([4.0, 7.0]))


def test_it_shows_a_slot_that_should_not_have_been_read() -> None:
    rows = torch.ones(3, 1, 2)
    packed = poisoned([3], [1], None, rows, rows)
    packed.cache.keys[0][packed.slots[0][1]] = torch.nan
    out = reference.attend(torch.ones(1, 1, 2), packed.cache.keys[0], packed.cache.values[0], packed.batch, 1.0)
    assert out.isnan().all()


def test_a_query_that_sees_nothing_gets_zeros() -> None:
    rows = torch.ones(2, 1, 2)
    packed = poisoned([0, 2], [0, 1], 4, rows, rows)
    packed.batch.query_start = torch.tensor([0, 1, 2])  # as padding of a fixed batch has it: a query, but no token
    out = reference.attend(torch.ones(2, 1, 2), packed.cache.keys[0], packed.cache.values[0], packed.batch, 1.0)
    assert out.tolist() == [[[0.0, 0.0]], [[1.0, 1.0]]]


@pytest.mark.parametrize("block_size", [None, 1, 4])
def test_slots(block_size: int | None) -> None:
    rows = torch.ones(9, 1, 2)
    packed = poisoned([5, 0, 4], [1, 0, 2], block_size, rows, rows)
    assert [packed.batch.slots(i).tolist() for i in range(3)] == [run.tolist() for run in packed.slots]


def test_sequences_are_contiguous_or_paged() -> None:
    one = torch.tensor([1])
    with pytest.raises(ValueError, match="bases and tables"):
        PackedBatch(torch.tensor([0, 1]), one, one)
    with pytest.raises(ValueError, match="bases and tables"):
        PackedBatch(torch.tensor([0, 1]), one, one, bases=one, tables=one[None], block_size=1)
