"""Hugging Face models over our cache, packed, against their own eager forward of each sequence alone."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from tests.extras import NEEDS_MODELS

pytest.importorskip("transformers", reason=NEEDS_MODELS)

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from kvbench.attention import cpu, reference
from kvbench.attention.base import Attend
from kvbench.attention.hf import NAME, Step
from kvbench.cache import KVCache
from kvbench.core import KvbenchError
from tests.packed import pack, place

VOCABULARY, LAYERS, HEAD_DIM = 97, 2, 16
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
}
GQA: dict[str, Any] = {**SHAPE, "num_key_value_heads": 2, "intermediate_size": 96, "head_dim": HEAD_DIM}
FAMILIES: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaForCausalLM, LlamaConfig(**GQA)),
    "opt": (OPTForCausalLM, OPTConfig(**SHAPE, ffn_dim=96, word_embed_proj_dim=64)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**GQA)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**GQA)),
    "mistral": (MistralForCausalLM, MistralConfig(**GQA, sliding_window=4)),
}
PROMPT_LEN = [1, 15, 16, 17, 3]
NUM_DECODES = 5


@cache
def model(family: str) -> PreTrainedModel:
    """Random weights, ten times the usual ones, so that attention is far from uniform and logits from each other."""
    torch.manual_seed(0)
    architecture, config = FAMILIES[family]
    made: PreTrainedModel = architecture(config)
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if weight.ndim == 2 and "layers" in name:
                weight.mul_(10.0)
    return made.eval()


@cache
def tokens_and_logits(family: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each sequence, prompt and output, and the logits of the model's own forward after each of its tokens."""
    eager = model(family)
    eager.set_attn_implementation("eager")
    generator = torch.Generator().manual_seed(1)
    sequences = [torch.randint(VOCABULARY, (length + NUM_DECODES,), generator=generator) for length in PROMPT_LEN]
    with torch.inference_mode():
        return [(tokens, eager(tokens[None], use_cache=False).logits[0]) for tokens in sequences]


@pytest.mark.parametrize("attend", [cpu.attend, reference.attend], ids=["cpu", "reference"])
@pytest.mark.parametrize("block_size", [None, 1, 4, 16])
@pytest.mark.parametrize("family", ["llama", "opt", "qwen2", "qwen3"])
def test_prefill_and_decodes_give_the_logits_of_eager(family: str, block_size: int | None, attend: Attend) -> None:
    """The second half of the batch arrives later, so that prefills and decodes share a forward."""
    expected = tokens_and_logits(family)
    packed_model = model(family)
    packed_model.set_attn_implementation(NAME)
    slots, num_slots = place([len(tokens) for tokens, _ in expected], block_size, np.random.default_rng(2))
    num_kv_heads = 4 if family == "opt" else 2
    kv = KVCache(LAYERS, num_slots, num_kv_heads, HEAD_DIM)
    kv.data.fill_(torch.nan)
    late = len(expected) // 2
    computed = [0] * len(expected)
    for step in range(NUM_DECODES + 2):
        present = range(late if step == 0 else len(expected))
        running = [i for i in present if computed[i] < len(expected[i][0])]
        num_queries = [PROMPT_LEN[i] if computed[i] == 0 else 1 for i in running]
        for i, num in zip(running, num_queries, strict=True):
            computed[i] += num
        context = [computed[i] for i in running]
        batch = pack([slots[i] for i in running], num_queries, context, block_size)
        positions = torch.cat([torch.arange(n - num, n) for n, num in zip(context, num_queries, strict=True)])
        rows = [
            (tokens[n - num : n], logits[n - num : n])
            for (tokens, logits), n, num in zip([expected[i] for i in running], context, num_queries, strict=True)
        ]
        with torch.inference_mode():
            got = packed_model(
                torch.cat([tokens for tokens, _ in rows])[None],
                position_ids=positions[None],
                use_cache=False,
                kvbench=Step(batch, kv, attend),
            ).logits[0]
        torch.testing.assert_close(got, torch.cat([logits for _, logits in rows]), rtol=1e-4, atol=1e-4)
    assert computed == [len(tokens) for tokens, _ in expected]


def test_attention_matters_to_these_models() -> None:
    """Otherwise equal logits would say nothing: without its context, a token's logits are others."""
    for family in ("llama", "opt", "qwen2", "qwen3"):
        tokens, logits = tokens_and_logits(family)[-1]
        with torch.inference_mode():
            alone = model(family)
            alone.set_attn_implementation("eager")
            without = alone(tokens[None, -1:], position_ids=torch.tensor([[len(tokens) - 1]])).logits[0, -1]
        assert (without - logits[-1]).abs().max() > 0.1


def forward(family: str, **keywords: object) -> None:
    used = model(family)
    used.set_attn_implementation(NAME)
    with torch.inference_mode():
        used(torch.zeros(1, 1, dtype=torch.int64), position_ids=torch.zeros(1, 1, dtype=torch.int64), **keywords)


def test_a_forward_without_the_step_is_refused() -> None:
    with pytest.raises(KvbenchError, match=r"LlamaAttention got no kvbench=Step"):
        forward("llama", use_cache=False)


def test_a_model_that_asks_for_more_is_refused() -> None:
    step = Step(pack([torch.tensor([0])], [1], [1], None), KVCache(LAYERS, 1, 2, HEAD_DIM), cpu.attend)
    with pytest.raises(KvbenchError, match="MistralAttention asks for sliding_window"):
        forward("mistral", use_cache=False, kvbench=step)
