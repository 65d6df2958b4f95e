"""Linear layers on a CPU whose weights are laid out once for oneDNN, not at every call.

A decode step multiplies few rows by every weight of the model. ``torch.nn.Linear`` hands float32 to MKL, which
rearranges the weights at each call: with 4 rows OPT-125M's layers take 2.2 times as long, its vocabulary 3.7 times.
"""

from __future__ import annotations

import torch
from torch import nn

ROWS = 16
"""For which the layout is chosen; others work as well, and from 4 to 128 none was seen to be better."""


class PackedLinear(nn.Module):
    """``torch.nn.Linear`` over a packed copy of its weight, for inference.

    Attributes:
        weight: opaque, in oneDNN's layout.
        weight_bytes: what it takes, less what oneDNN may pad.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS)
        self.weight_bytes = weight.nbytes
        self.bias = linear.bias

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """``[..., in_features]`` to ``[..., out_features]``."""
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, self.weight, self.bias, "none", [], "")
        return out


def pack(model: nn.Module) -> None:
    """Replace every linear layer whose type the CPU computes in; a weight tied to an embedding is copied."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and _is_supported(child.weight):
                setattr(parent, name, PackedLinear(child))


def weights_bytes(model: nn.Module) -> int:
    """What the weights of a packed model, or of another one, take."""
    packed = sum(layer.weight_bytes for layer in model.modules() if isinstance(layer, PackedLinear))
    return packed + sum(parameter.nbytes for parameter in model.parameters())


def _is_supported(weight: torch.Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    bfloat16 = weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return weight.dtype == torch.float32 or bfloat16
