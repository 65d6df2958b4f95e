"""Models saved by Hugging Face transformers, in a folder or on the hub."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from kvbench.core import KvbenchError
from kvbench.models.sources import Source, first_line, unreachable


def read_config(source: Source) -> PreTrainedConfig:
    """The configuration alone, before any weights are fetched or read.

    Raises:
        KvbenchError: it cannot be read or fetched, or transformers does not know it.
    """
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(_place(source), revision=source.revision)
    except (OSError, ValueError, KeyError) as error:
        raise _refused(source, error) from error
    return config


def read_model(
    source: Source, config: PreTrainedConfig, dtype: torch.dtype, device: str | torch.device
) -> PreTrainedModel:
    """The weights.

    Raises:
        KvbenchError: they cannot be read or fetched, or some are missing (transformers would make them up).
    """
    arguments: dict[str, Any] = {"revision": source.revision, "dtype": dtype, "output_loading_info": True}
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(_place(source), config=config, **arguments)
    except (OSError, ValueError, RuntimeError) as error:
        raise _refused(source, error) from error
    model: PreTrainedModel = loaded[0]
    report: dict[str, Any] = loaded[1]
    if missing := sorted(report["missing_keys"]):
        raise KvbenchError(
            f"model.weights={_place(source)} lacks {missing[0]} and {len(missing) - 1} other weights;\n"
            "give the folder of a complete causal language model"
        )
    torch.nn.Module.to(model, device)
    model.requires_grad_(False).eval()
    return model


def read_tokenizer(source: Source) -> PreTrainedTokenizerBase | None:
    """The tokenizer; None for a folder that has none, since a run on lengths needs none.

    Raises:
        KvbenchError: it cannot be read or fetched.
    """
    if source.path is not None and not any(source.path.glob("tokenizer*")):
        return None
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(_place(source), revision=source.revision)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise _refused(source, error) from error
    return tokenizer


def _place(source: Source) -> str:
    return str(source.path or source.repository)


def _refused(source: Source, error: Exception) -> KvbenchError:
    if source.repository is not None and isinstance(error, OSError):
        return unreachable(source.repository, error)
    return KvbenchError(f"model.weights={_place(source)} cannot be loaded: {first_line(error)}")
