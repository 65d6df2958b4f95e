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
        tokenizer: None where the weights bring none, as random ones do.
        shapes: as configured, with ``dtype`` resolved.
        stop_token_ids: tokens after which the model has nothing to say; none for random weights.
        bos_token_id: what its texts begin with, if with anything.
        source: where the weights come from, one phrase for tables.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    shapes: Model
    stop_token_ids: tuple[int, ...]
    bos_token_id: int | None
    source: str

    @property
    def weights_bytes(self) -> int:
        """What the parameters take, tied ones once."""
        return sum(parameter.nbytes for parameter in self.model.parameters())


def load(shapes: Model, *, device: str = "cpu", seed: int = 0) -> LoadedModel:
    """Build or read the model that ``model=`` describes.

    Args:
        shapes: the node ``model`` of a configuration.
        device: ``cpu`` or ``cuda``.
        seed: of random weights.

    Raises:
        KvbenchError: weights that are not there or not complete, an unsupported family, tokenizer or dtype, or shapes
            that the weights do not have.
    """
    source = sources.find(shapes.weights)
    shapes = replace(shapes, dtype=dtypes.resolve(shapes.dtype, device))
    if source.kind == "random":
        model, tokenizer = initial.build(shapes, device, seed), None
    else:
        model, tokenizer = _read(source, shapes, device)
    families.check_num_parameters(shapes, model)
    phrase = f"random weights, seed {seed}" if source.kind == "random" else shapes.weights
    return LoadedModel(model, tokenizer, shapes, _stop_token_ids(model), model.config.bos_token_id, phrase)


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


def _read(source: sources.Source, shapes: Model, device: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    dtype = dtypes.torch_dtype(shapes.dtype)
    if source.path is not None and source.kind == "gguf":
        file = GGUF(source.path)
        stated = file.config()
        families.check_shapes(shapes, stated)
        return file.model(stated, dtype, device), file.tokenizer()
    if source.path is not None and source.kind == "llama2c":
        header = llama2c.read_config(source.path)
        families.check_shapes(shapes, header)
        model = llama2c.read_model(source.path, header, dtype, device)
        return model, llama2c.read_tokenizer(source.path, shapes.vocab_size)
    config = pretrained.read_config(source)
    families.check_supported(config, f"model.weights={shapes.weights}")
    families.check_shapes(shapes, config)
    return pretrained.read_model(source, config, dtype, device), pretrained.read_tokenizer(source)
