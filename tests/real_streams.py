"""Real runs of requests with several streams: systems that share, copy and swap."""

from __future__ import annotations

import random
from functools import cache

import torch

from kvbench.allocators.base import Ability, Allocator
from kvbench.allocators.buddy import Buddy
from kvbench.allocators.first_fit import FirstFit
from kvbench.allocators.paged import Paged
from kvbench.attention import cpu
from kvbench.cache import KVCache
from kvbench.clock import VirtualClock
from kvbench.core import Request
from kvbench.engine import Engine, serve
from kvbench.ledger import Ledger
from kvbench.records import Record
from kvbench.reservation import Max, OnDemand, Oracle, Pow2, Reservation
from kvbench.runners.packed_model import PackedModel
from kvbench.runners.torch import Torch, random_prompts
from kvbench.sampling import SamplingParams
from kvbench.schedulers.iteration_level import IterationLevel, Restore
from tests.real_runs import MAX_LEN, Priced, model

VOCABULARY = 211

PARAMS = SamplingParams(temperature=1.0, top_k=50, seed=11)


def system(name: str, num_slots: int) -> IterationLevel:
    """``swap4`` and ``recompute4``: paged blocks of 4 slots; ``copies4`` cannot share."""
    if name in ("orca_max", "orca_pow2", "orca_oracle", "first_fit"):
        allocator: Allocator = FirstFit(num_slots) if name == "first_fit" else Buddy(num_slots, 4, MAX_LEN)
        rules: dict[str, Reservation] = {"orca_max": Max(), "orca_pow2": Pow2()}
        reservation = rules.get(name, Oracle())
        return IterationLevel(allocator, reservation, MAX_LEN)
    block_size = int("".join(each for each in name if each.isdigit()))
    paged = Paged(num_slots, block_size, copy_on_write=not name.startswith("copies"))
    restore: Restore = "recompute" if name.startswith("recompute") else "swap"
    return IterationLevel(paged, OnDemand(), MAX_LEN, watermark=0.0, restore=restore)


def shares(scheduler: IterationLevel) -> bool:
    return Ability.FORK in scheduler.allocator.abilities and scheduler.reservation.grows


def run(
    name: str, scheduler: IterationLevel, requests: list[Request], params: SamplingParams | None = None
) -> tuple[Record, Torch]:
    loaded = model(name)
    shapes = loaded.shapes
    pool = KVCache(shapes.num_layers, scheduler.allocator.num_slots, shapes.num_kv_heads, shapes.head_dim)
    for tensor in (*pool.keys, *pool.values):
        tensor.fill_(torch.nan)
    packed = PackedModel(loaded.model, pool, cpu.attend)
    prompts = random_prompts(shapes.vocab_size, 0)
    runner = Torch(packed, pool, scheduler.allocator, prompts, params or SamplingParams())
    record = serve(Engine(scheduler, Priced(runner), VirtualClock(), Ledger(scheduler.allocator)), requests)
    assert not record.requests["rejected"].any()
    usage = scheduler.allocator.usage()
    prefix_len = max(request.prefix_len for request in requests)
    assert (usage.used, usage.shared, usage.swapped) == (-(-prefix_len // 4) * 4 if shares(scheduler) else 0, 0, 0)
    return record, runner


@cache
def some_requests(num_seqs: int, is_beam: bool) -> tuple[Request, ...]:
    rng = random.Random(5)
    return tuple(Request(i, 0.0, rng.randint(6, 20), rng.randint(8, 24), num_seqs, is_beam) for i in range(8))
