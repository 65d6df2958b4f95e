"""The bridge to transformers: a model whose attention is ``"kvbench"`` reads and writes our cache.

It is plugged in through the public ``AttentionInterface``. A forward pass gets the sequences packed without padding as
one row, and says what they are in the keyword ``kvbench``, which the models hand on to every attention layer:

    model.set_attn_implementation("kvbench")
    model(input_ids=tokens[None], position_ids=positions[None], use_cache=False, kvbench=Step(batch, cache, attend))

transformers builds no attention mask for an implementation that has not registered one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface

from kvbench.attention.base import Attend, PackedBatch
from kvbench.cache import KVCache
from kvbench.core import KvbenchError

NAME = "kvbench"
Write = Callable[[KVCache, int, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Puts new K and V into a layer of a cache, as ``KVCache.write`` does."""
REFUSED = ("sliding_window", "softcap", "s_aux", "position_bias")
"""What some models ask of their attention and kvbench's does not do."""


@dataclass(slots=True, eq=False)
class Step:
    """What every attention layer of one forward pass needs: the sequences, their cache, who computes, who writes."""

    batch: PackedBatch
    cache: KVCache
    attend: Attend
    write: Write = KVCache.write


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    kvbench: Step | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """One layer's attention, in transformers' form: write the new K and V, then attend.

    Args:
        module: the attention layer; ``layer_idx`` says which.
        query: ``[1, H, T, D]``, the packed tokens; ``key`` and ``value`` are ``[1, kv_heads, T, D]``.
        key: see ``query``.
        value: see ``query``.
        attention_mask: None; what a query sees follows from the batch.
        scaling: what scores are multiplied by; ``D ** -0.5`` if None.
        kvbench: the step.
        options: what else the model asks of its attention; refused unless it asks for nothing.

    Returns:
        ``[1, T, H, D]``, and None for the weights.

    Raises:
        KvbenchError: the model did not hand the step on, or asks for something this attention does not do.
    """
    model = type(module).__name__
    if kvbench is None:
        raise KvbenchError(
            f"{model} got no kvbench=Step(...): pass it to the model's forward; "
            "if you did, this model does not hand it on and is not supported"
        )
    refused = [name for name in REFUSED if options.get(name) is not None]
    if options.get("dropout"):
        refused.append("dropout")
    if attention_mask is not None:
        refused.append("attention_mask")
    if not getattr(module, "is_causal", True):
        refused.append("is_causal=False")
    if refused:
        raise KvbenchError(f"{model} asks for {', '.join(refused)}; kvbench's attention is causal and plain")
    layer: int = module.layer_idx  # type: ignore[assignment]
    cache = kvbench.cache
    kvbench.write(cache, layer, kvbench.batch.slot_mapping, key[0].transpose(0, 1), value[0].transpose(0, 1))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = kvbench.attend(query[0].transpose(0, 1), cache.keys[layer], cache.values[layer], kvbench.batch, scale)
    return out[None], None


AttentionInterface.register(NAME, _attention)
