"""llama.cpp's GGUF files, by the package ``gguf``: weights are dequantized, the tokenizer is rebuilt.

transformers reads such files as well, but takes more than twice as long (it parses the file once for each of
configuration, weights and tokenizer) and needs a further package.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedModel
from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast

from kvbench.core import KvbenchError
from kvbench.models.families import empty, fill, half_split, shapes_of

_CONTROL = 3
"""Token type of control tokens, such as the ends of a chat's turns."""
_PLACES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_SPLITTERS = {
    "gpt-2": (),
    "smollm": (pre_tokenizers.Digits(individual_digits=True),),
}
"""Pre-tokenizer's name -> what it does before the byte-level splitting of GPT-2."""


class GGUF:
    """One file, parsed once.

    Args:
        path: the file.

    Raises:
        KvbenchError: it cannot be read, holds another architecture than llama, or the package gguf is missing.
    """

    def __init__(self, path: Path) -> None:
        try:
            from gguf import GGUFReader
        except ImportError:
            raise KvbenchError(f"model.weights={path} needs the package gguf: make install EXTRAS=dev,models") from None
        try:
            self._reader = GGUFReader(path)
        except (OSError, ValueError, IndexError) as error:
            raise KvbenchError(f"model.weights={path} is no GGUF file that can be read: {error}") from error
        self._origin = f"model.weights={path}"
        architecture = self._value("general.architecture")
        if architecture != "llama":
            raise KvbenchError(
                f"{self._origin} is a {architecture} model; of GGUF files llama is supported, other families as a "
                "folder saved by transformers"
            )

    def config(self) -> LlamaConfig:
        """The configuration.

        Raises:
            KvbenchError: rotary embeddings are scaled, or a key is missing.
        """
        if self._value("llama.rope.scaling.type", "none") != "none":
            raise KvbenchError(f"{self._origin} scales its rotary embeddings, which is supported for folders alone")
        num_heads = self._value("llama.attention.head_count")
        hidden_size = self._value("llama.embedding_length")
        return LlamaConfig(
            hidden_size=hidden_size,
            intermediate_size=self._value("llama.feed_forward_length"),
            num_hidden_layers=self._value("llama.block_count"),
            num_attention_heads=num_heads,
            num_key_value_heads=self._value("llama.attention.head_count_kv", num_heads),
            head_dim=self._value("llama.attention.key_length", hidden_size // num_heads),
            vocab_size=len(self._value("tokenizer.ggml.tokens")),
            max_position_embeddings=self._value("llama.context_length"),
            tie_word_embeddings=all(tensor.name != "output.weight" for tensor in self._reader.tensors),
            rms_norm_eps=self._value("llama.attention.layer_norm_rms_epsilon"),
            rope_parameters={"rope_type": "default", "rope_theta": self._value("llama.rope.freq_base", 10000.0)},
            bos_token_id=self._value("tokenizer.ggml.bos_token_id", None),
            eos_token_id=self._value("tokenizer.ggml.eos_token_id", None),
            pad_token_id=self._value("tokenizer.ggml.padding_token_id", None),
        )

    def model(self, config: LlamaConfig, dtype: torch.dtype, device: str | torch.device) -> PreTrainedModel:
        """The weights.

        Raises:
            KvbenchError: weights that are missing or unknown, or in an encoding that gguf cannot decode.
        """
        model = empty(config, dtype, device)
        fill(model, self._weights(config), self._origin)
        return model

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """The tokenizer, with its chat template.

        Raises:
            KvbenchError: it is of another kind than GPT-2's byte-level merges, or splits text in an unknown way.
        """
        kind, splitter = self._value("tokenizer.ggml.model"), self._value("tokenizer.ggml.pre", "gpt-2")
        if kind != "gpt2" or splitter not in _SPLITTERS:
            raise KvbenchError(
                f"{self._origin} has a tokenizer of kind {kind}, {splitter}; supported are gpt2 with "
                f"{' or '.join(_SPLITTERS)}, others as a folder saved by transformers"
            )
        tokens: list[str] = self._value("tokenizer.ggml.tokens")
        merges = [tuple(merge.split(" ", 1)) for merge in self._value("tokenizer.ggml.merges")]
        tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [*_SPLITTERS[splitter], pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        tokenizer.decoder = decoders.ByteLevel()
        control = zip(tokens, self._value("tokenizer.ggml.token_type"), strict=True)
        tokenizer.add_special_tokens([AddedToken(token, special=True) for token, type_ in control if type_ == _CONTROL])
        special = {
            f"{name}_token": tokens[index]
            for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
            if (index := self._value(f"tokenizer.ggml.{key}_token_id", None)) is not None
        }
        return PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, chat_template=self._value("tokenizer.chat_template", None), **special
        )

    def _weights(self, config: LlamaConfig) -> Iterator[tuple[str, torch.Tensor]]:
        from gguf import dequantize

        shapes = shapes_of(config)
        heads: dict[str, int] = {"attn_q": shapes["num_heads"], "attn_k": shapes["num_kv_heads"]}
        for tensor in self._reader.tensors:
            *block, place, kind = tensor.name.split(".")
            layer = f"model.layers.{block[1]}." if block else ""
            try:
                values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
            except NotImplementedError as error:
                raise KvbenchError(f"{self._origin}: the weight {tensor.name} cannot be decoded: {error}") from error
            if place in heads:
                values = half_split(values, heads[place])
            yield f"{layer}{_PLACES.get(place, place)}.{kind}", values

    _REQUIRED = object()

    def _value(self, key: str, default: Any = _REQUIRED) -> Any:
        field = self._reader.get_field(key)
        if field is not None:
            return field.contents()
        if default is self._REQUIRED:
            raise KvbenchError(f"{self._origin} lacks {key}; it is not a complete model")
        return default
