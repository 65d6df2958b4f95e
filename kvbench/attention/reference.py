"""The oracle: gather a sequence's K and V by its slots, mask, softmax. Slow, obvious, exact in float64."""

from __future__ import annotations

import torch

from kvbench.attention.base import PackedBatch


def attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, batch: PackedBatch, scale: float) -> torch.Tensor:
    """``kvbench.attention.base.Attend`` on any device; computes in float64 if ``q`` is float64, else in float32."""
    precision = torch.float64 if q.dtype == torch.float64 else torch.float32
    num_kv_heads, head_dim = keys.shape[1:]
    group = q.shape[1] // num_kv_heads
    out = torch.zeros_like(q)
    for index in range(len(batch.context_len)):
        first, last = batch.query_start[index : index + 2].tolist()
        slots = batch.slots(index)
        k = keys[slots].to(precision)
        v = values[slots].to(precision)
        grouped = q[first:last].to(precision).view(last - first, num_kv_heads, group, head_dim)
        scores = torch.einsum("qhgd,khd->hgqk", grouped, k) * scale
        positions = torch.arange(len(slots), device=q.device)
        visible = positions <= positions.new_tensor(range(len(slots) - (last - first), len(slots)))[:, None]
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        weights[:, :, ~visible.any(-1)] = 0.0  # a query that sees nothing
        out[first:last] = (
            torch.einsum("hgqk,khd->qhgd", weights, v).reshape(last - first, num_kv_heads * group, head_dim).to(q.dtype)
        )
    return out
