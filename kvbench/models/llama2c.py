"""llama2.c's legacy format: small Llama models, such as stories260K, in two files.

``model.bin``: seven int32 (dim, hidden_dim, n_layers, n_heads, n_kv_heads, vocab_size, seq_len; a negative vocab_size
says that the output weights are not the embedding's), then float32 weights in a fixed order, all layers' stacked.
``tok<vocab_size>.bin``: int32 longest piece, then for each piece a float32 score, int32 length and the bytes.
Source: github.com/karpathy/llama2.c, ``export.py`` (legacy_export) and ``run.c``.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors
from transformers import LlamaConfig, PreTrainedModel
from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast

from kvbench.core import KvbenchError
from kvbench.models.families import empty, fill, half_split, shapes_of

BOS, EOS = 1, 2
_HEADER = struct.Struct("<7i")
_NUM_BYTE_PIECES = 256
_FIRST_BYTE_PIECE = 3


def read_config(path: Path) -> LlamaConfig:
    """The configuration that the header states.

    Raises:
        KvbenchError: the file cannot be read, or does not have the size that its header implies.
    """
    try:
        num_bytes = path.stat().st_size
        with path.open("rb") as file:
            header = _HEADER.unpack(file.read(_HEADER.size))
    except (OSError, struct.error) as error:
        raise KvbenchError(f"model.weights={path} cannot be read: {error}") from error
    dim, hidden_dim, num_layers, num_heads, num_kv_heads, vocab_size, seq_len = header
    if min(dim, hidden_dim, num_layers, num_heads, num_kv_heads, seq_len, abs(vocab_size)) < 1 or dim % num_heads:
        raise KvbenchError(f"model.weights={path} is not in llama2.c's legacy format: its header is {header}")
    config = LlamaConfig(
        hidden_size=dim,
        intermediate_size=hidden_dim,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        vocab_size=abs(vocab_size),
        max_position_embeddings=seq_len,
        tie_word_embeddings=vocab_size > 0,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=None,
    )
    expected = _HEADER.size + 4 * sum(math.prod(shape) for _, shape in _layout(config))
    if num_bytes != expected:
        raise KvbenchError(
            f"model.weights={path} is cut off, or not in llama2.c's legacy format: it has {num_bytes} bytes, and its "
            f"header {header} makes {expected}"
        )
    return config


def read_model(path: Path, config: LlamaConfig, dtype: torch.dtype, device: str | torch.device) -> PreTrainedModel:
    """The weights of a file whose ``config`` was read before."""
    values = torch.from_numpy(np.fromfile(path, dtype="<f4", offset=_HEADER.size))
    model = empty(config, dtype, device)
    fill(model, _weights(values, config), f"model.weights={path}")
    return model


def read_tokenizer(path: Path, vocab_size: int) -> PreTrainedTokenizerFast | None:
    """The tokenizer beside the weights, if it is there: byte-pair merges by score, bytes where no piece fits.

    Raises:
        KvbenchError: the file is cut off.
    """
    file = path.with_name(f"tok{vocab_size}.bin")
    if not file.is_file():
        return None
    pieces = _pieces(file, vocab_size)
    vocabulary = {piece: index for index, (piece, _) in enumerate(pieces)}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=_merges(pieces), unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Prepend(" ")
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", left=1)])
    tokenizer.add_special_tokens([AddedToken(piece, special=True) for piece, _ in pieces[:_FIRST_BYTE_PIECE]])
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", BOS)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def _layout(config: LlamaConfig) -> list[tuple[str, tuple[int, ...]]]:
    """Name and shape of the arrays, in the file's order; those without a name are not used."""
    shapes = shapes_of(config)
    dim, hidden_dim, num_layers, head_dim = (
        shapes[key] for key in ("hidden_size", "ffn_size", "num_layers", "head_dim")
    )
    kv_dim = head_dim * shapes["num_kv_heads"]
    rope_table = (shapes["max_model_len"], head_dim // 2)
    return [
        ("model.embed_tokens.weight", (config.vocab_size, dim)),
        ("input_layernorm", (num_layers, dim)),
        ("self_attn.q_proj", (num_layers, dim, dim)),
        ("self_attn.k_proj", (num_layers, kv_dim, dim)),
        ("self_attn.v_proj", (num_layers, kv_dim, dim)),
        ("self_attn.o_proj", (num_layers, dim, dim)),
        ("post_attention_layernorm", (num_layers, dim)),
        ("mlp.gate_proj", (num_layers, hidden_dim, dim)),
        ("mlp.down_proj", (num_layers, dim, hidden_dim)),
        ("mlp.up_proj", (num_layers, hidden_dim, dim)),
        ("model.norm.weight", (dim,)),
        ("", rope_table),
        ("", rope_table),
        *([] if config.tie_word_embeddings else [("lm_head.weight", (config.vocab_size, dim))]),
    ]


def _weights(values: torch.Tensor, config: LlamaConfig) -> Iterator[tuple[str, torch.Tensor]]:
    shapes = shapes_of(config)
    heads: dict[str, int] = {"self_attn.q_proj": shapes["num_heads"], "self_attn.k_proj": shapes["num_kv_heads"]}
    offset = 0
    for name, shape in _layout(config):
        size = math.prod(shape)
        array = values[offset : offset + size].view(shape)
        offset += size
        if name.endswith(".weight"):
            yield name, array
        elif name:
            for layer, weight in enumerate(array):
                ordered = half_split(weight, heads[name]) if name in heads else weight
                yield f"model.layers.{layer}.{name}.weight", ordered


def _pieces(file: Path, vocab_size: int) -> list[tuple[str, float]]:
    """Piece and score of every token; the special and byte pieces by the names that the tokenizer looks for."""
    content, offset = file.read_bytes(), 4
    pieces: list[tuple[str, float]] = []
    for index in range(vocab_size):
        try:
            score, length = struct.unpack_from("<fi", content, offset)
        except struct.error:
            raise KvbenchError(f"{file} has {index} pieces of {vocab_size}; copy it again") from None
        text = content[offset + 8 : offset + 8 + length].decode("utf-8")
        if index < _FIRST_BYTE_PIECE:
            text = ("<unk>", "<s>", "</s>")[index]
        elif index < _FIRST_BYTE_PIECE + _NUM_BYTE_PIECES:
            text = f"<0x{index - _FIRST_BYTE_PIECE:02X}>"
        pieces.append((text, score))
        offset += 8 + length
    return pieces


def _merges(pieces: list[tuple[str, float]]) -> list[tuple[str, str]]:
    """Every split of a piece into two pieces; the best score is merged first, as ``run.c`` does."""
    texts = {piece for piece, _ in pieces}
    ordered = sorted(pieces, key=lambda each: -each[1])
    return [
        (piece[:at], piece[at:])
        for piece, _ in ordered
        for at in range(1, len(piece))
        if piece[:at] in texts and piece[at:] in texts and not piece.startswith("<0x")
    ]
