"""A model that computes sequences packed without padding, over K and V that lie in a cache."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from kvbench.attention.base import Attend, PackedBatch
from kvbench.attention.hf import NAME, Step, Write
from kvbench.cache import KVCache


class PackedModel:
    """A causal language model whose K and V lie in a cache and whose sequences are packed without padding.

    Args:
        model: of a family in ``kvbench.models.families``; its attention implementation is changed.
        cache: of the model's shapes.
        attend: one of the attention functions of ``kvbench.attention``.
        write: puts new K and V into the cache.
    """

    def __init__(self, model: PreTrainedModel, cache: KVCache, attend: Attend, write: Write = KVCache.write) -> None:
        model.set_attn_implementation(NAME)
        self.model = model
        self.cache = cache
        self.attend = attend
        self.write = write

    @torch.inference_mode()
    def __call__(self, ids: torch.Tensor, positions: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
        """Write the new tokens' K and V, attend, and return the logits after the last token of each sequence.

        Args:
            ids: ``[T]``, the new tokens of all sequences.
            positions: ``[T]``, their positions in their sequences.
            batch: the sequences.

        Returns:
            ``[B, vocabulary]``.
        """
        logits: torch.Tensor = self.model(
            input_ids=ids[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=batch.query_start[1:] - 1,
            kvbench=Step(batch, self.cache, self.attend, self.write),
        ).logits
        return logits[0]

    @torch.inference_mode()
    def body(self, ids: torch.Tensor, positions: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
        """The same without the vocabulary: the last layer's output ``[T, hidden_size]``."""
        hidden: torch.Tensor = self.model.base_model(
            input_ids=ids[None],
            position_ids=positions[None],
            use_cache=False,
            kvbench=Step(batch, self.cache, self.attend, self.write),
        ).last_hidden_state
        return hidden[0]
