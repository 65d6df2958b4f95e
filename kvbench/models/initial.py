"""Random weights: real shapes and real work without a download."""

from __future__ import annotations

import math

import torch
from transformers import PreTrainedModel

from kvbench.capacity import Model
from kvbench.models.dtypes import torch_dtype
from kvbench.models.families import config_of, empty


def build(shapes: Model, device: str | torch.device, seed: int) -> PreTrainedModel:
    """A model of these shapes whose every matrix is uniform with variance 1 / fan-in; norms are 1 and biases 0.

    So every layer passes on a variance near 1, and what is generated depends on the whole context. (Hugging Face's
    standard deviation of 0.02 hardly moves the embeddings: a small model with tied ones then repeats a token for
    ever, and a wrong attention would go unnoticed.) The values are drawn in float32 and rounded, so a seed gives the
    same model in every dtype; they differ between kinds of devices.

    Raises:
        KvbenchError: as ``kvbench.models.families.config_of``.
    """
    model = empty(config_of(shapes), torch_dtype(shapes.dtype), device)
    generator = torch.Generator(device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            bound = math.sqrt(3 / parameter.shape[-1])
            values = torch.empty(parameter.shape, dtype=torch.float32, device=device)
            parameter.copy_(values.uniform_(-bound, bound, generator=generator))
        else:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
    return model
