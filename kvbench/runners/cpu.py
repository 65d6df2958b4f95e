"""`runner=cpu`: from the configuration to a runner that is warm, and to what it will take beside its pool."""

from __future__ import annotations

import importlib
import json
import os
from dataclasses import asdict, replace
from functools import lru_cache
from itertools import accumulate

import torch

from kvbench.allocators.base import Allocator
from kvbench.attention.base import Attend, PackedBatch
from kvbench.cache import KVCache
from kvbench.capacity import Footprint, Model
from kvbench.core import KvbenchError
from kvbench.models.dtypes import torch_dtype
from kvbench.models.loading import LoadedModel, load
from kvbench.models.packed_linear import pack, weights_bytes
from kvbench.runners.footprint import (
    check_can_measure,
    keep_freed_memory,
    largest_prefill,
    peak_bytes,
    profiled_prefill,
)
from kvbench.runners.packed_model import PackedModel
from kvbench.runners.torch import Torch, random_prompts
from kvbench.sampling import SamplingParams, SamplingRows, sample

ATTENTION = ("cpu", "reference")
_seen: dict[tuple[str, str, str, SamplingParams, int, int], Footprint] = {}


def open_runner(
    model: Model,
    allocator: Allocator,
    seed: int,
    device: str,
    attention: str,
    sampling: SamplingParams,
    num_threads: int | None = None,
    stops: bool = False,
) -> Torch:
    """Load a model and warm everything up, so that the first iteration is like the others.

    Args:
        model: shapes, weights and dtype.
        allocator: of a pool that the model's K and V will fill.
        seed: of random weights and prompts.
        device: ``cpu``.
        attention: ``cpu`` or ``reference``.
        sampling: how tokens are chosen.
        num_threads: of the computation; None: all cores.
        stops: whether the model's stop tokens end an output before its forced length.

    Raises:
        KvbenchError: a device or attention that does not exist, a dtype the attention cannot read, or what loading
            the model raises.
    """
    loaded = _prepare(model, device, attention, seed, num_threads)
    shapes = loaded.shapes
    cache = _cache(shapes, allocator.num_slots, device)
    if stops:
        sampling = replace(sampling, stop_token_ids=(*sampling.stop_token_ids, *loaded.stop_token_ids))
    packed = PackedModel(loaded.model, cache, _attend_of(attention))
    runner = Torch(packed, cache, allocator, random_prompts(shapes.vocab_size, seed), sampling)
    runner.warm_up()
    return runner


def measure(
    model: Model,
    num_tokens: int,
    num_seqs: int,
    seed: int,
    device: str,
    attention: str,
    sampling: SamplingParams,
    num_threads: int | None = None,
    stops: bool = False,
) -> Footprint:
    """Load a model and see what it and its largest iteration take: what ``open_runner`` will need beside its pool.

    The iteration is a prefill of ``num_tokens`` tokens in ``num_seqs`` prompts, one of them as long as possible, and
    the choice of a token for each. Where the scheduler has no limit to speak of, ``MAX_BATCHED_TOKENS`` of the tokens
    and as small a share of the prompts stand for all: activations grow in proportion. Done once in a process.

    Args:
        model: as in ``open_runner``, as the other arguments are.
        num_tokens: the most that an iteration computes.
        num_seqs: the most that it computes for.
        seed: of random weights.
        device: ``cpu``.
        attention: ``cpu`` or ``reference``.
        sampling: how tokens are chosen.
        num_threads: of the computation.
        stops: makes no difference here.

    Raises:
        KvbenchError: as ``open_runner``, or the system does not tell how much memory a process takes.
    """
    del stops
    check_can_measure()
    loaded = _prepare(model, device, attention, seed, num_threads)
    profiled, rows = profiled_prefill(num_tokens, num_seqs)
    sampling = replace(sampling, seed=0)  # as no seed makes a difference
    key = json.dumps(asdict(model)), device, attention, sampling, profiled, rows
    if key not in _seen:
        _seen[key] = Footprint(weights_bytes(loaded.model), _profile(loaded, *key[1:]) / profiled)
    return _seen[key]


def _profile(
    loaded: LoadedModel, device: str, attention: str, sampling: SamplingParams, num_tokens: int, num_seqs: int
) -> int:
    """Bytes that a prefill and the choice of its tokens take at their peak, beside the weights and the pool."""
    cache = _cache(loaded.shapes, num_tokens, device)
    cache.data.zero_()  # touched, so that the pool's own memory is not counted
    model = PackedModel(loaded.model, cache, _attend_of(attention))

    def prefill(lengths: list[int]) -> None:
        context_len, end = torch.tensor(lengths), sum(lengths)
        start = torch.tensor([0, *accumulate(lengths)])
        positions = torch.cat([torch.arange(length) for length in lengths])
        rows = SamplingRows.of([sampling.for_request(row) for row in range(len(lengths))])
        batch = PackedBatch(start, context_len, torch.arange(end), start[:-1], None, 1)
        sample(model(torch.zeros(end, dtype=torch.int64), positions, batch), rows, context_len)

    keep_freed_memory()  # as in a run
    prefill([1])  # compiles
    lengths = largest_prefill(num_tokens, num_seqs, loaded.shapes.max_model_len)
    # What else a process does only adds, so the lower of two is nearer.
    return min(peak_bytes(lambda: prefill(lengths)) for _ in range(2))


def _cache(shapes: Model, num_slots: int, device: str) -> KVCache:
    return KVCache(
        shapes.num_layers, num_slots, shapes.num_kv_heads, shapes.head_dim, torch_dtype(shapes.dtype), device
    )


def _prepare(model: Model, device: str, attention: str, seed: int, num_threads: int | None) -> LoadedModel:
    """Check the options, then load. Raises KvbenchError as ``open_runner``."""
    if device != "cpu":
        raise KvbenchError(f"runner.device={device} is not supported; give cpu")
    if attention not in ATTENTION:
        raise KvbenchError(f"runner.attention={attention} does not exist; choose one of {', '.join(ATTENTION)}")
    if num_threads is not None and num_threads < 1:
        raise KvbenchError(f"runner.num_threads={num_threads} computes nothing; give 1 or more, or null for all cores")
    torch.set_num_threads(num_threads or os.cpu_count() or 1)
    return _load(json.dumps(asdict(model)), device, seed)


def _attend_of(attention: str) -> Attend:
    attend: Attend = importlib.import_module(f"kvbench.attention.{attention}").attend
    return attend


@lru_cache(maxsize=1)
def _load(shapes: str, device: str, seed: int) -> LoadedModel:
    """Points that differ in other parts only, and are run one after the other, share a model."""
    loaded = load(Model(**json.loads(shapes)), device=device, seed=seed)
    pack(loaded.model)
    return loaded
