"""Real runs of tiny models: every system, requests short of memory, and what Hugging Face generates for them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import torch

from kvbench.allocators.base import Allocator
from kvbench.allocators.buddy import Buddy
from kvbench.allocators.contiguous import Contiguous
from kvbench.allocators.first_fit import FirstFit
from kvbench.allocators.paged import Paged
from kvbench.attention.base import Attend
from kvbench.cache import KVCache
from kvbench.capacity import Model
from kvbench.clock import VirtualClock
from kvbench.core import Batch, Request, StepResult
from kvbench.engine import Engine, serve
from kvbench.ledger import Ledger
from kvbench.models.loading import LoadedModel, load
from kvbench.records import Record
from kvbench.reservation import Max, OnDemand, Oracle, Pow2, Reservation
from kvbench.runners.beams import ScoreModel
from kvbench.runners.packed_model import PackedModel
from kvbench.runners.simulated import IterationCosts, Simulated
from kvbench.runners.torch import Torch, random_prompts
from kvbench.sampling import SamplingParams
from kvbench.schedulers.base import Scheduler
from kvbench.schedulers.iteration_level import IterationLevel
from kvbench.schedulers.request_level import RequestLevel

MAX_LEN = 64

SHAPES = {
    "tiny_llama": Model("tiny_llama", "llama", 2, 64, 4, 2, 16, 128, 211, 101_056, MAX_LEN, "float32"),
    "tiny_opt": Model("tiny_opt", "opt", 2, 64, 4, 4, 16, 128, 211, 84_800, MAX_LEN, "float32"),
}

COSTS = IterationCosts(a_ms=20.0, b_ms=0.01, c_ms=0.5, p_ms=0.2, q_ms=0.0)


@cache
def model(name: str) -> LoadedModel:
    return load(SHAPES[name])


def system(name: str, num_slots: int) -> Scheduler:
    if name == "fastertransformer":
        return RequestLevel(Contiguous(num_slots, MAX_LEN), Max(), MAX_LEN, 4, MAX_LEN)
    if name.startswith("vllm"):
        block_size = int(name.removeprefix("vllm") or 4)
        return IterationLevel(Paged(num_slots, block_size), OnDemand(), MAX_LEN, watermark=0.0)
    allocator: Allocator = FirstFit(num_slots) if name == "first_fit" else Buddy(num_slots, 4, MAX_LEN)
    rules: dict[str, Reservation] = {"orca_max": Max(), "orca_pow2": Pow2()}
    reservation = rules.get(name, Oracle())
    return IterationLevel(allocator, reservation, MAX_LEN)


SYSTEMS = ["fastertransformer", "orca_max", "orca_pow2", "orca_oracle", "first_fit", "vllm1", "vllm4", "vllm16"]


class Priced:
    """A real runner whose iterations take the seconds that a simulated one charges for them."""

    def __init__(self, real: Torch) -> None:
        self.real = real
        self.device_name, self.may_stop_early, self.weights_bytes = "priced", real.may_stop_early, real.weights_bytes
        self.simulated = Simulated(COSTS, beams=ScoreModel(4.0))

    def execute(self, batch: Batch) -> StepResult:
        seconds = self.simulated.execute(batch).seconds
        return replace(self.real.execute(batch), seconds=seconds)


def run(
    name: str, scheduler: Scheduler, requests: list[Request], attend: Attend, params: SamplingParams | None = None
) -> tuple[Record, dict[int, list[int]]]:
    loaded = model(name)
    shapes = loaded.shapes
    pool = KVCache(shapes.num_layers, scheduler.allocator.num_slots, shapes.num_kv_heads, shapes.head_dim)
    for tensor in (*pool.keys, *pool.values):
        tensor.fill_(torch.nan)  # whatever a sequence does not own shows if it is read
    prompts = random_prompts(shapes.vocab_size, 0)
    packed = PackedModel(loaded.model, pool, attend)
    runner = Torch(packed, pool, scheduler.allocator, prompts, params or SamplingParams())
    ledger = Ledger(scheduler.allocator, may_stop_early=bool(params and params.stop_token_ids))
    record = serve(Engine(scheduler, Priced(runner), VirtualClock(), ledger), requests)
    return record, runner.outputs


@cache
def some_requests() -> tuple[Request, ...]:
    rng = random.Random(3)
    return tuple(Request(i, i * 0.02, rng.randint(1, 24), rng.randint(1, 32)) for i in range(14))


@cache
def generated(name: str) -> dict[int, tuple[int, ...]]:
    """What Hugging Face generates, one request at a time, with its own cache and attention."""
    loaded = load(SHAPES[name])
    loaded.model.set_attn_implementation("eager")
    prompts = random_prompts(loaded.shapes.vocab_size, 0)
    outputs = {}
    for request in some_requests():
        ids = torch.tensor([prompts(request)])
        generate: Callable[..., torch.Tensor] = loaded.model.generate  # type: ignore[assignment]
        whole = generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, min_new_tokens=request.output_len,
            max_new_tokens=request.output_len, pad_token_id=0,
        )  # fmt: skip
        outputs[request.id] = tuple(whole[0, request.prompt_len :].tolist())
    return outputs
