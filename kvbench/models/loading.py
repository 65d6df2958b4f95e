"""From the configuration of a model to a model that runs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from transformers import PreTrainedConfig, PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from kvbench.capacity import Model
from kvbench.core import KvbenchError
from kvbench.models import dtypes, families, initial, llama2c, pretrained, sources
from kvbench.models.gguf import GGUF


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A model on its device, in evaluation mode.

    Attributes:
        model: a Hugging Face causal language model of one of ``kvbench.models.families.FAMILIES``.
        shapes: as configured, with ``dtype`` resolved.
        stop_token_ids: tokens after which the model has nothing to say; none for random weights.
    """

    model: PreTrainedModel
    shapes: Model
    stop_token_ids: tuple[int, ...]


def load(shapes: Model, *, device: str = "cpu", seed: int = 0) -> LoadedModel:
    """Build or read the model that ``model=`` describes.

    Args:
        shapes: the node ``model`` of a configuration.
        device: ``cpu`` or ``cuda``.
        seed: of random weights.

    Raises:
        KvbenchError: weights that are not there or not complete, an unsupported family or dtype, or shapes
            that the weights do not have.
    """
    source = sources.find(shapes.weights)
    shapes = replace(shapes, dtype=dtypes.resolve(shapes.dtype, device))
    model = initial.build(shapes, device, seed) if source.kind == "random" else _read(source, shapes, device)
    families.check_num_parameters(shapes, model)
    return LoadedModel(model, shapes, _stop_token_ids(model))


def read_tokenizer(shapes: Model) -> PreTrainedTokenizerBase | None:
    """The tokenizer that lies with a model's weights; None where there is none. A run needs only tokens' numbers.

    Raises:
        KvbenchError: it is of an unsupported kind, or cannot be read.
    """
    source = sources.find(shapes.weights)
    if source.path is not None and source.kind == "gguf":
        return GGUF(source.path).tokenizer()
    if source.path is not None and source.kind == "llama2c":
        return llama2c.read_tokenizer(source.path, shapes.vocab_size)
    return None if source.kind == "random" else pretrained.read_tokenizer(source)


def read_config(source: sources.Source) -> PreTrainedConfig:
    """The configuration of weights that lie somewhere; ``random`` ones have none. Raises KvbenchError as ``load``."""
    if source.kind == "random":
        raise KvbenchError("random weights have no shapes of their own; give a folder, a file or a name on the hub")
    if source.path is not None and source.kind == "gguf":
        return GGUF(source.path).config()
    if source.path is not None and source.kind == "llama2c":
        return llama2c.read_config(source.path)
    return pretrained.read_config(source)


def _stop_token_ids(model: PreTrainedModel) -> tuple[int, ...]:
    stops = model.generation_config.eos_token_id
    if stops is None:
        return ()
    return (stops,) if isinstance(stops, int) else tuple(stops)


def _read(source: sources.Source, shapes: Model, device: str) -> PreTrainedModel:
    dtype = dtypes.torch_dtype(shapes.dtype)
    if source.path is not None and source.kind == "gguf":
        file = GGUF(source.path)
        stated = file.config()
        families.check_shapes(shapes, stated)
        return file.model(stated, dtype, device)
    if source.path is not None and source.kind == "llama2c":
        header = llama2c.read_config(source.path)
        families.check_shapes(shapes, header)
        return llama2c.read_model(source.path, header, dtype, device)
    config = pretrained.read_config(source)
    families.check_supported(config, f"model.weights={shapes.weights}")
    families.check_shapes(shapes, config)
    return pretrained.read_model(source, config, dtype, device)
