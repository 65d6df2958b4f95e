"""K and V of ragged sequences in both placements, with poison in every row that no sequence owns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kvbench_kernels import device, reference

DEVICE = "cpu" if device.INTERPRETED else "cuda"
TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 3e-2}
"""The interpreter truncates to bfloat16 where a GPU rounds."""


@dataclass(slots=True)
class Pool:
    """Sequences of one layer.

    Attributes:
        lens: ``[B]``, on the device.
        paged: ``k``, ``v``, ``table`` and ``page``, blocks in a random order.
        contiguous: ``k``, ``v`` and ``base`` with the same numbers.
        num_kv_heads: of each token.
        head_dim: of each head.
        dtype: of the cache.
        generator: of random numbers.
    """

    lens: torch.Tensor
    paged: dict[str, Any]
    contiguous: dict[str, Any]
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    generator: torch.Generator

    @classmethod
    def of(
        cls,
        lens: list[int],
        *,
        page: int = 16,
        num_kv_heads: int = 1,
        head_dim: int = 64,
        dtype: torch.dtype = torch.float32,
        padding: int | None = None,
        seed: int = 0,
    ) -> Pool:
        """Fill a pool; ``padding`` stands behind a sequence's blocks in its table, by default a poisoned block's id."""
        generator = torch.Generator().manual_seed(seed)
        num_blocks = [-(-length // page) for length in lens]
        order = torch.randperm(sum(num_blocks) + 3, generator=generator).int()
        free = iter(order.tolist())
        padding = int(order[-1]) if padding is None else padding
        table = torch.full((len(lens), max(num_blocks) + 2), padding, dtype=torch.int32)
        for row, count in zip(table, num_blocks, strict=True):
            row[:count] = torch.tensor([next(free) for _ in range(count)])
        base, end = [], 5
        for length in lens:
            base.append(end)
            end += length + 7
        k, v = _poisoned(len(order) * page, num_kv_heads, head_dim, dtype)
        k_flat, v_flat = _poisoned(end, num_kv_heads, head_dim, dtype)
        for index, length in enumerate(lens):
            tokens = torch.arange(length)
            rows = table[index, tokens // page] * page + tokens % page
            for scattered, flat in ((k, k_flat), (v, v_flat)):
                numbers = torch.randn((length, num_kv_heads, head_dim), generator=generator).to(dtype)
                scattered[rows] = numbers
                flat[base[index] : base[index] + length] = numbers
        paged = {"k": k, "v": v, "table": table}
        contiguous = {"k": k_flat, "v": v_flat, "base": torch.tensor(base)}
        return cls(
            torch.tensor(lens, dtype=torch.int32, device=DEVICE),
            {name: tensor.to(DEVICE) for name, tensor in paged.items()} | {"page": page},
            {name: tensor.to(DEVICE) for name, tensor in contiguous.items()},
            num_kv_heads,
            head_dim,
            dtype,
            generator,
        )

    def queries(self, num_rows: int, group: int) -> torch.Tensor:
        """``[num_rows, heads, head_dim]``."""
        shape = (num_rows, self.num_kv_heads * group, self.head_dim)
        return torch.randn(shape, generator=self.generator).to(self.dtype).to(DEVICE)


def check_decode(pool: Pool, group: int = 1, **options: Any) -> torch.Tensor:
    """Decode in both placements: the same bits, and what float64 says; returns the output."""
    q = pool.queries(len(pool.lens), group)
    window = options.get("window", 0)
    expected, expected_lse = reference.decode(q.double(), lens=pool.lens, window=window, **_double(pool.contiguous))
    out, lse = device.decode(q, lens=pool.lens, **pool.contiguous, **options)
    paged_out, paged_lse = device.decode(q, lens=pool.lens, **pool.paged, **options)
    assert torch.equal(paged_out, out)
    assert torch.equal(paged_lse, lse)
    close(out, expected, pool.dtype)
    torch.testing.assert_close(lse, expected_lse, atol=1e-4, rtol=1e-5)
    return out


def check_prefill(pool: Pool, new: list[int], group: int = 1, **options: Any) -> torch.Tensor:
    """Prefill the newest ``new`` tokens of each sequence in both placements; as ``check_decode``."""
    q = pool.queries(sum(new), group)
    cu_q = torch.tensor([0, *new], dtype=torch.int32, device=DEVICE).cumsum(0, dtype=torch.int32)
    plain = {name: value for name, value in options.items() if name != "tiles"}
    expected = reference.prefill(q.double(), cu_q=cu_q, lens=pool.lens, **_double(pool.contiguous), **plain)
    out = device.prefill(q, cu_q=cu_q, lens=pool.lens, **pool.contiguous, **options)
    paged_out = device.prefill(q, cu_q=cu_q, lens=pool.lens, **pool.paged, **options)
    assert torch.equal(paged_out, out)
    close(out, expected, pool.dtype)
    return out


def close(out: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """No number further off than the dtype explains, none NaN."""
    torch.testing.assert_close(out.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def _poisoned(num_rows: int, num_heads: int, head_dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    k = torch.full((num_rows, num_heads, head_dim), torch.nan, dtype=dtype)
    return k, k.clone()


def _double(placement: dict[str, Any]) -> dict[str, Any]:
    return {name: each.double() if name in "kv" else each for name, each in placement.items()}
