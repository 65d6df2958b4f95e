"""What one iteration attends to: its sequences, packed without padding, and where their tokens lie in the cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(slots=True, eq=False)
class PackedBatch:
    """The sequences of one iteration, one after the other; all tensors on the device of the cache.

    They are int64, but for the backend ``triton``, whose kernels want int32 for all but ``slot_mapping`` and ``bases``.

    A sequence's queries are its newest tokens, so query ``i`` of ``n`` sees the first ``context_len - n + i + 1``
    tokens. Exactly one of ``bases`` and ``tables`` is given.

    Attributes:
        query_start: ``[B + 1]``, the first row of each sequence in the packed queries, and their number.
        context_len: ``[B]``, tokens of each sequence in the cache, its new ones included.
        slot_mapping: ``[T]``, the slot of each new token.
        bases: ``[B]``, for contiguous sequences: token ``i`` is in slot ``bases + i``.
        tables: ``[B, max_blocks]``, block tables: token ``i`` is in slot
            ``tables[i // block_size] * block_size + i % block_size``. What lies behind a sequence's last block
            is never read.
        block_size: slots of a block.
        num_decodes: leading sequences that have one query each, for backends that treat these by themselves.
        splits: parts into which such a backend cuts each of them.

    Raises:
        ValueError: both or neither of ``bases`` and ``tables``.
    """

    query_start: torch.Tensor
    context_len: torch.Tensor
    slot_mapping: torch.Tensor
    bases: torch.Tensor | None = None
    tables: torch.Tensor | None = None
    block_size: int = 1
    num_decodes: int = 0
    splits: int = 1

    def __post_init__(self) -> None:
        if (self.bases is None) == (self.tables is None):
            raise ValueError("exactly one of bases and tables")

    def slots(self, index: int) -> torch.Tensor:
        """The slots of one sequence's tokens in their order, ``[context_len]``."""
        tokens = torch.arange(int(self.context_len[index]), device=self.context_len.device)
        if self.bases is not None:
            return self.bases[index] + tokens
        assert self.tables is not None
        return self.tables[index, tokens // self.block_size] * self.block_size + tokens % self.block_size


class Attend(Protocol):
    """Attention of every packed query to its sequence's tokens, causal, softmax in at least float32."""

    def __call__(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, batch: PackedBatch, scale: float
    ) -> torch.Tensor:
        """Attend.

        Args:
            q: ``[T, H, D]``; head ``h`` reads K/V head ``h // (H / kv_heads)``.
            keys: one layer's ``[slots, kv_heads, D]``; the new tokens are written already.
            values: the same shape.
            batch: the sequences.
            scale: what the scores are multiplied by, usually ``D ** -0.5``.

        Returns:
            ``[T, H, D]`` in the dtype of ``q``; zeros for a query that sees nothing.

        Raises:
            KvbenchError: a dtype it does not support.
        """
        ...
