"""Slices a model for tensor parallelism, as Megatron-LM does: every rank has some heads, and some of the MLP.

Queries, keys, values and the MLP's first layers are sliced by output, so that each rank computes its own heads; what
follows is sliced by input, and the ranks' results are summed. A layer needs two sums. Embeddings, norms and the
vocabulary are whole on every rank. PagedAttention paper, section 4.6.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn
from transformers import PreTrainedModel

from kvbench.capacity import Model
from kvbench.core import KvbenchError

BY_OUTPUT = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "fc1")
BY_INPUT = ("o_proj", "out_proj", "down_proj", "fc2")
Sum = Callable[[torch.Tensor], None]
"""Replaces a tensor by its sum over all ranks."""


class SummedLinear(nn.Module):
    """A linear layer of which this rank has some inputs.

    Args:
        linear: the whole layer.
        rank: this one.
        num_ranks: of all.
        add_up: sums over them.
    """

    def __init__(self, linear: nn.Linear, rank: int, num_ranks: int, add_up: Sum) -> None:
        super().__init__()
        self.weight = nn.Parameter(_slice(linear.weight, 1, rank, num_ranks), requires_grad=False)
        self.bias: nn.Parameter | None = linear.bias
        self.add_up = add_up

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """``[..., some of in_features]`` to ``[..., out_features]``, the same on every rank."""
        out = nn.functional.linear(rows, self.weight)
        self.add_up(out)
        return out if self.bias is None else out + self.bias


def slice_model(model: PreTrainedModel, rank: int, num_ranks: int, add_up: Sum) -> None:
    """Keep what belongs to a rank, in place."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear and name in BY_OUTPUT:
                for key, whole in list(child.named_parameters()):
                    setattr(child, key, nn.Parameter(_slice(whole, 0, rank, num_ranks), requires_grad=False))
                child.out_features //= num_ranks
            elif type(child) is nn.Linear and name in BY_INPUT:
                setattr(module, name, SummedLinear(child, rank, num_ranks, add_up))
        if hasattr(module, "q_proj") and isinstance(num_heads := getattr(module, "num_heads", None), int):
            module.num_heads = num_heads // num_ranks  # type: ignore[assignment]


def sliced(shapes: Model, num_ranks: int) -> Model:
    """The shapes that a rank has: its heads and its part of the MLP.

    Raises:
        KvbenchError: heads or MLP cannot be divided so.
    """
    for key in ("num_kv_heads", "num_heads", "ffn_size"):
        if num_ranks < 1 or getattr(shapes, key) % num_ranks:
            raise KvbenchError(
                f"runner.tensor_parallel={num_ranks} does not divide model.{key}={getattr(shapes, key)}; "
                "give a number that divides K/V heads, heads and ffn_size"
            )
    return replace(
        shapes,
        num_kv_heads=shapes.num_kv_heads // num_ranks,
        num_heads=shapes.num_heads // num_ranks,
        ffn_size=shapes.ffn_size // num_ranks,
    )


def _slice(weight: torch.Tensor, dim: int, rank: int, num_ranks: int) -> torch.Tensor:
    """The rank's part along a dimension, in memory of its own."""
    return weight.detach().chunk(num_ranks, dim)[rank].clone(memory_format=torch.contiguous_format)
