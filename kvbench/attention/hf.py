"""Plugs attention over a cache of slots into Hugging Face models, by transformers' public attention interface.

What an iteration attends to travels explicitly, as a keyword of the model's forward that reaches every layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel

from kvbench.attention.base import Attend, PackedBatch
from kvbench.cache import KVCache

NAME = "kvbench"


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    """What the layers of one forward need besides queries, keys and values."""

    batch: PackedBatch
    cache: KVCache
    attend: Attend


class PackedModel:
    """A causal language model whose K and V lie in ``cache`` and whose sequences are packed without padding.

    Args:
        model: of a family in ``kvbench.models.families``; its attention implementation is changed.
        cache: of the model's shapes.
        attend: one of the attention functions beside this file.
    """

    def __init__(self, model: PreTrainedModel, cache: KVCache, attend: Attend) -> None:
        AttentionInterface.register(NAME, _attention)
        model.set_attn_implementation(NAME)
        self.model = model
        self.cache = cache
        self.attend = attend

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
            kvbench_step=_Step(batch, self.cache, self.attend),
        ).logits
        return logits[0]


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    *,
    kvbench_step: _Step,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Transformers' attention function: ``[1, heads, T, head_dim]`` in, ``[1, T, heads, head_dim]`` out."""
    del attention_mask, dropout  # causality follows from the batch; models run in evaluation mode
    step, layer = kvbench_step, int(module.layer_idx)  # type: ignore[arg-type]
    step.cache.write(layer, step.batch.slot_mapping, key[0].transpose(0, 1), value[0].transpose(0, 1))
    out = step.attend(query[0].transpose(0, 1), step.cache.keys[layer], step.cache.values[layer], step.batch, scaling)
    return out[None], None
