"""Shapes to Hugging Face configurations and back, and what of them can be run."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from kvbench.capacity import Model
from kvbench.core import KvbenchError

FAMILIES = ("opt", "llama", "qwen2", "qwen3")
"""Architectures whose layers are attention over all earlier tokens and an MLP, nothing else."""
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings that depend on a token's position alone; others change with the longest sequence in the batch."""


def config_of(shapes: Model) -> PreTrainedConfig:
    """The configuration of a model that is built rather than loaded. It has no special tokens: nothing stops it.

    Raises:
        KvbenchError: an unsupported family, shapes it cannot have, or an unknown key in ``hf_config``.
    """
    _check_family(shapes.family, f"model={shapes.name}")
    _check_heads(shapes)
    known = {*vars(AutoConfig.for_model(shapes.family)), "rope_theta"}
    if unknown := sorted(shapes.hf_config.keys() - known):
        raise KvbenchError(f"model.hf_config.{unknown[0]} is no key of {shapes.family}'s Hugging Face configuration")
    names = _names(shapes.family)
    stated = {names[key]: getattr(shapes, key) for key in names}
    if twice := sorted(shapes.hf_config.keys() & stated.keys()):
        key = next(key for key, name in names.items() if name == twice[0])
        raise KvbenchError(f"model.hf_config.{twice[0]} is stated already; set model.{key}")
    special = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    try:
        config = AutoConfig.for_model(shapes.family, **stated, **special, **shapes.hf_config)
    except (StrictDataclassError, ValueError, TypeError, KeyError) as error:
        lines = str(error).strip().splitlines()
        raise KvbenchError(f"model={shapes.name} is no {shapes.family} model: {lines[-1].strip()}") from error
    check_supported(config, f"model={shapes.name}")
    return config


def shapes_of(config: PreTrainedConfig) -> dict[str, Any]:
    """The keys of ``kvbench.capacity.Model`` that a configuration of a supported family states."""
    num_heads: int = config.num_attention_heads
    stated = {key: getattr(config, name, None) for key, name in _names(config.model_type).items()}
    stated["num_kv_heads"] = stated.get("num_kv_heads") or num_heads
    stated["head_dim"] = stated.get("head_dim") or config.hidden_size // num_heads
    return {"family": config.model_type, **stated}


def check_supported(config: PreTrainedConfig, origin: str) -> None:
    """Refuse what the packed forward would compute wrongly.

    Args:
        config: of any model.
        origin: for the message: ``key=value`` of what the user gave.

    Raises:
        KvbenchError: another architecture, rotary embedding or attention than those supported, or quantized weights.
    """
    _check_family(config.model_type, origin)
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope not in ROPE_TYPES:
        raise KvbenchError(f"{origin} has rotary embeddings of type {rope}; supported are {', '.join(ROPE_TYPES)}")
    windowed = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if windowed:
        raise KvbenchError(f"{origin} has layers with {', '.join(sorted(windowed))}; supported is full_attention alone")
    if getattr(config, "quantization_config", None) is not None:
        raise KvbenchError(f"{origin} has quantized weights; supported are float32, bfloat16 and float16")


def check_shapes(shapes: Model, config: PreTrainedConfig) -> None:
    """Compare loaded weights with what ``conf/model/`` says of them: memory is budgeted from the latter.

    A ``max_model_len`` below what the weights allow is fine.

    Raises:
        KvbenchError: they differ; names the first key.
    """
    found = shapes_of(config)
    for key, value in found.items():
        stated = getattr(shapes, key)
        if stated != value and not (key == "max_model_len" and stated < value):
            raise _differs(shapes, key, stated, value)
    for key, stated in shapes.hf_config.items():
        rope = getattr(config, "rope_parameters", None) or {}
        value = rope.get("rope_theta") if key == "rope_theta" else getattr(config, key, None)
        is_close = isinstance(value, float) and math.isclose(stated, value, rel_tol=1e-6)  # files hold float32
        if stated != value and not is_close:
            raise _differs(shapes, f"hf_config.{key}", stated, value)


def check_num_parameters(shapes: Model, model: PreTrainedModel) -> None:
    """The same for the number of parameters. Raises KvbenchError."""
    found = model.num_parameters()
    if shapes.num_parameters != found:
        raise _differs(shapes, "num_parameters", shapes.num_parameters, found)


def empty(config: PreTrainedConfig, dtype: torch.dtype, device: str | torch.device) -> PreTrainedModel:
    """A model in evaluation mode whose parameters are whatever the memory holds; its buffers are right.

    Skips the initialisation, which takes seconds for a hundred million parameters that are overwritten anyway.
    """
    with no_init_weights(), torch.device(device):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.tie_weights()
    model.requires_grad_(False).eval()
    return model


def fill(model: PreTrainedModel, weights: Iterable[tuple[str, torch.Tensor]], origin: str) -> None:
    """Copy weights into the parameters of an ``empty`` model.

    Args:
        model: what ``empty`` returned.
        weights: parameter name -> values of its shape; tied parameters once.
        origin: for the message.

    Raises:
        KvbenchError: a weight that the model lacks, or has in another shape, or one that is missing.
    """
    missing = dict(model.named_parameters())  # names a tied parameter once
    for name, values in weights:
        parameter = missing.pop(name, None)
        if parameter is None or parameter.shape != values.shape:
            has = "no such parameter" if parameter is None else f"{tuple(parameter.shape)}"
            raise KvbenchError(f"{origin}: the weight {name} is {tuple(values.shape)}, the model has {has}")
        parameter.copy_(values)
    if missing:
        raise KvbenchError(f"{origin}: the weight {next(iter(missing))} is missing, and {len(missing) - 1} others")


def half_split(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Reorder rows of a query or key projection from interleaved to half-split rotary embedding.

    llama.cpp and llama2.c rotate neighbours (2i, 2i + 1), Hugging Face rotates (i, i + head_dim / 2).

    Args:
        weight: [num_heads * head_dim, hidden_size].
        num_heads: of the queries, or of the keys.
    """
    num_rows, hidden_size = weight.shape
    pairs = weight.view(num_heads, num_rows // num_heads // 2, 2, hidden_size)
    return pairs.transpose(1, 2).reshape(weight.shape)


def _names(family: str) -> dict[str, str]:
    """Key of ``kvbench.capacity.Model`` -> name in the family's configuration."""
    names = {
        "num_layers": "num_hidden_layers",
        "hidden_size": "hidden_size",
        "num_heads": "num_attention_heads",
        "vocab_size": "vocab_size",
        "max_model_len": "max_position_embeddings",
    }
    if family == "opt":
        return {**names, "ffn_size": "ffn_dim"}
    return {
        **names,
        "ffn_size": "intermediate_size",
        "num_kv_heads": "num_key_value_heads",
        "head_dim": "head_dim",
    }


def _check_family(family: str, origin: str) -> None:
    if family not in FAMILIES:
        raise KvbenchError(f"{origin} is of the family {family}; supported are {', '.join(FAMILIES)}")


def _check_heads(shapes: Model) -> None:
    if shapes.family == "opt" and shapes.num_kv_heads != shapes.num_heads:
        raise KvbenchError(
            f"model.num_kv_heads={shapes.num_kv_heads}: OPT's heads share nothing; give {shapes.num_heads}"
        )
    if shapes.family == "opt" and shapes.head_dim * shapes.num_heads != shapes.hidden_size:
        raise KvbenchError(
            f"model.head_dim={shapes.head_dim}: OPT's is hidden_size / num_heads = "
            f"{shapes.hidden_size / shapes.num_heads:g}"
        )


def _differs(shapes: Model, key: str, stated: object, found: object) -> KvbenchError:
    return KvbenchError(
        f"model.{key}={stated}, but model.weights={shapes.weights} has {found};\n"
        "set it, or see python -m kvbench.models.describe for a whole file of conf/model/"
    )
