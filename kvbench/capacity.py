"""What a model leaves of the GPUs' memory for its KV cache. Knows shapes and sizes, no strategy."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from kvbench.core import KvbenchError
from kvbench.instantiate import check_arguments, whole

GIB = 2**30
PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
"""Of weights, activations and cache; ``auto`` is bfloat16 where a real run's device computes in it, else float32."""
DTYPE_BYTES: dict[Dtype, int] = {"auto": 2, "float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of one value; ``auto`` as long as no device has resolved it."""
MAX_BATCHED_TOKENS = 2560
"""Tokens the activations are sized for, as in the authors' artifact."""
RESERVE_FRACTION = 0.05
"""Share of each GPU that is not used (artifact: utilization 0.95)."""
WORKSPACE_BYTES = GIB
"""Workspace of each GPU (artifact)."""
PUBLISHED_BLOCK = 16
"""Slots of the blocks in which a model's ``published_blocks`` are counted."""
SWAP_SPACE_BYTES = 4 * GIB
"""Host memory of each GPU for what is swapped out, unless a size is given: as vLLM's ``swap_space``."""


@dataclass(frozen=True, slots=True)
class Model:
    """Shapes of a decoder-only transformer.

    One file of ``conf/model/`` serves simulated and real runs: the former use the shapes alone.

    Attributes:
        family: the architecture, by its Hugging Face ``model_type``: ``opt``, ``llama``, ...
        num_kv_heads: heads of the keys and values; fewer than ``num_heads`` where heads share them.
        head_dim: values of one head.
        num_parameters: tied ones counted once.
        dtype: of weights, activations and cache; the paper runs float16.
        weights: where a real run takes them from; ``kvbench.models.sources`` lists the forms.
        hf_config: further keys of the family's Hugging Face configuration, for ``weights=random``.
        published_blocks: hardware name -> blocks of 16 slots of the KV pool, where a publication states it.
        request_level_batch: workload name -> requests of a FasterTransformer batch, where a publication states it.
    """

    name: str
    family: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    num_parameters: int
    max_model_len: int
    dtype: Dtype = "float16"
    weights: str = "random"
    hf_config: dict[str, Any] = field(default_factory=dict)
    published_blocks: dict[str, int] = field(default_factory=dict)
    request_level_batch: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse shapes that no model has. Raises KvbenchError."""
        for name in ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "ffn_size", "vocab_size"):
            whole(f"model.{name}", getattr(self, name))
        whole("model.max_model_len", self.max_model_len, least=2)  # a prompt and an output
        whole("model.num_parameters", self.num_parameters, least=0)
        if self.num_heads % self.num_kv_heads:
            raise KvbenchError(
                f"model.num_heads={self.num_heads} cannot share model.num_kv_heads={self.num_kv_heads} equally; "
                "give a number that divides it"
            )

    @property
    def value_bytes(self) -> int:
        """Size of a weight, an activation or a cached value."""
        return DTYPE_BYTES[self.dtype]

    @property
    def bytes_per_slot(self) -> int:
        """K and V of one token in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.value_bytes


@dataclass(frozen=True, slots=True)
class Hardware:
    """``num_gpus`` equal GPUs that hold one model, sliced (tensor parallel).

    Attributes:
        gpu_memory_bytes: what the driver reports of one GPU.
        gpu_gb_per_s: peak bandwidth of its memory, by the data sheet; for bounds only.
        gpu_tflops: peak of dense 16-bit operations.
    """

    name: str
    gpu: str
    num_gpus: int
    gpu_memory_bytes: int
    gpu_gb_per_s: float | None = None
    gpu_tflops: float | None = None

    def __post_init__(self) -> None:
        """Refuse what no machine has. Raises KvbenchError."""
        whole("hardware.num_gpus", self.num_gpus)
        whole("hardware.gpu_memory_bytes", self.gpu_memory_bytes)


@dataclass(frozen=True, slots=True)
class Capacity:
    """Where the memory goes, all GPUs together.

    Attributes:
        source: where ``kv_cache_bytes`` comes from.
        swap_space_bytes: of the host's memory, for what is swapped out; 0 where the allocator cannot swap.
    """

    model: str
    hardware: str
    total_bytes: int
    weights_bytes: int
    activation_bytes: int
    reserve_bytes: int
    kv_cache_bytes: int
    bytes_per_slot: int
    source: str
    num_gpus: int = 1
    swap_space_bytes: int = 0

    @property
    def num_slots(self) -> int:
        """Tokens whose K and V fit."""
        return self.kv_cache_bytes // self.bytes_per_slot

    @property
    def is_published(self) -> bool:
        """Whether the pool is the one a publication states."""
        return self.source == PUBLISHED

    def line(self) -> str:
        """The report, for a terminal."""
        pool = self.kv_cache_bytes // self.bytes_per_slot * self.bytes_per_slot
        unused = self.total_bytes - (
            self.weights_bytes + self.activation_bytes + self.reserve_bytes + self.kv_cache_bytes
        )
        shown = round(abs(unused) / GIB, 2) > 0.01  # less is rounding
        rest = f" {'+ unused' if unused > 0 else '- missing'} {_gib(abs(unused))}" if shown else ""
        slots = f"{self.num_slots:,} slots of {self.bytes_per_slot:,} bytes"
        return (
            f"{self.model} on {self.hardware}: {_gib(self.total_bytes)} = weights {_gib(self.weights_bytes)}"
            f" + activations {_gib(self.activation_bytes)} + reserve {_gib(self.reserve_bytes)} + KV cache"
            f" {_gib(self.kv_cache_bytes)} ({self.source}){rest}: {slots}"
            + (f"; swap space {_gib(self.swap_space_bytes)}" if 0 < self.swap_space_bytes < pool else "")
        )


PUBLISHED = "Table 1 of the paper"
GIVEN = "kv_cache_bytes"
COMPUTED = "computed"
ESTIMATED = "estimated; a real run measures it when it starts"
MEASURED = "measured"


class Footprint(NamedTuple):
    """What a loaded model was seen to take.

    Attributes:
        token_bytes: activations of one token of an iteration.
        graph_bytes: of all CUDA graphs; reported among the activations, which they hold.
    """

    weights_bytes: int
    token_bytes: float
    graph_bytes: int = 0


def capacity(model: Model, hardware: Hardware, kv_cache_bytes: float | None = None) -> Capacity:
    """Divide the memory of ``hardware`` as the memory analyzer of the PagedAttention authors' artifact does.

    95 % of every GPU, less the weights, the activations of an iteration of 2560 tokens (the larger of the logits and
    of a layer's, each in double, on every GPU) and 1 GiB of workspace, is the KV pool. A pool that the paper states
    (Table 1) is taken as stated, so the parts need not add up to the last percent; ``kv_cache_bytes`` stands
    above both.

    Args:
        model: what is served.
        hardware: what serves it.
        kv_cache_bytes: size of the pool; None to take the published or the computed one.

    Raises:
        KvbenchError: nothing is left for the pool, or less than one slot.
    """
    slot = model.bytes_per_slot
    total = hardware.num_gpus * hardware.gpu_memory_bytes
    weights = model.num_parameters * model.value_bytes
    layer = max(3 * model.hidden_size, model.ffn_size) // hardware.num_gpus + model.hidden_size
    activations = hardware.num_gpus * model.value_bytes * MAX_BATCHED_TOKENS * 2 * max(layer, model.vocab_size)
    reserve = int(RESERVE_FRACTION * total) + hardware.num_gpus * WORKSPACE_BYTES
    if kv_cache_bytes is not None:
        pool, source = int(kv_cache_bytes), GIVEN
        if pool < slot:
            raise KvbenchError(
                f"kv_cache_bytes={kv_cache_bytes} holds no slot of {model.name}; give {slot} (one slot) or more"
            )
    elif hardware.name in model.published_blocks:
        pool, source = model.published_blocks[hardware.name] * PUBLISHED_BLOCK * slot, PUBLISHED
    else:
        pool, source = total - weights - activations - reserve, COMPUTED
        if pool < slot:
            raise KvbenchError(
                f"{model.name} does not fit {hardware.name} ({_gib(total)}): weights {_gib(weights)}, activations "
                f"{_gib(activations)} and reserve {_gib(reserve)} leave {_gib(pool)} for the KV cache.\n"
                "Choose a larger hardware=, or set kv_cache_bytes= to size the pool yourself."
            )
    num_gpus = hardware.num_gpus
    return Capacity(model.name, hardware.name, total, weights, activations, reserve, pool, slot, source, num_gpus)


def batch_limit(model: Model, pool: Capacity, workload: str) -> int:
    """Requests of a request-level batch: the published number for this workload, else as many longest sequences as fit.

    The published numbers (5 / 14, 2 / 8 and 24 / 80 for ShareGPT / Alpaca on the three OPT sizes) are those of the
    authors' artifact and hold in the published pool only.

    Raises:
        KvbenchError: the pool is smaller than one longest sequence.
    """
    if pool.is_published and workload in model.request_level_batch:
        return model.request_level_batch[workload]
    if pool.num_slots < model.max_model_len:
        raise KvbenchError(
            f"a pool of {pool.num_slots} slots holds no sequence of {model.max_model_len} tokens (its max_model_len), "
            "as scheduler=request_level needs; raise kv_cache_bytes, or set scheduler.max_num_seqs"
        )
    return pool.num_slots // model.max_model_len


def session_len(model: Model, pool: Capacity, max_num_seqs: int) -> int:
    """Slots of each slab when ``max_num_seqs`` of them share the pool, at most the model's longest sequence."""
    return min(model.max_model_len, pool.num_slots // max(max_num_seqs, 1))


def model_of(config: Mapping[str, Any]) -> Model:
    """The model of a configuration. Raises KvbenchError for wrong keys."""
    check_arguments(Model, config["model"], "model")
    return Model(**config["model"])


def capacity_of(config: Mapping[str, Any]) -> Capacity:
    """The capacity report of a configuration.

    Raises:
        KvbenchError: wrong keys of ``model`` or ``hardware``, or nothing left for the KV cache.
    """
    check_arguments(Hardware, config["hardware"], "hardware")
    model, kv_cache_bytes = model_of(config), config["kv_cache_bytes"]
    if (num_seqs := config.get("kv_cache_seqs")) is not None and type(num_seqs) in (int, float):
        kv_cache_bytes = int(num_seqs * model.max_model_len) * model.bytes_per_slot
    if kv_cache_bytes is not None and not (type(kv_cache_bytes) in (int, float) and math.isfinite(kv_cache_bytes)):
        raise KvbenchError(f"kv_cache_bytes={kv_cache_bytes!r} is no number of bytes; give one, or null")
    return capacity(model, Hardware(**config["hardware"]), kv_cache_bytes)


def check_fits(capacity: Capacity, usable_bytes: int | None = None) -> None:
    """Refuse a real run that needs more memory than there is.

    Args:
        capacity: what it needs; a pool that is not given counts as one slot.
        usable_bytes: what the machine can give now; None: all that ``capacity`` divides.

    Raises:
        KvbenchError: with every part, the limit and the remedy.
    """
    is_given = capacity.source in (GIVEN, PUBLISHED, MEASURED)
    pool = capacity.kv_cache_bytes if is_given else capacity.bytes_per_slot
    needed = capacity.weights_bytes + capacity.activation_bytes + capacity.reserve_bytes + pool
    limit = capacity.total_bytes if usable_bytes is None else min(usable_bytes, capacity.total_bytes)
    if needed > limit:
        free = "" if limit == capacity.total_bytes else f" of {_gib(capacity.total_bytes)} are free now"
        remedy = "lower kv_cache_bytes= or kv_cache_seqs=, " if is_given else ""
        raise KvbenchError(
            f"{capacity.model} needs {_gib(needed)}: weights {_gib(capacity.weights_bytes)}, activations "
            f"{_gib(capacity.activation_bytes)}, reserve {_gib(capacity.reserve_bytes)}, KV cache "
            f"{'' if is_given else 'at least '}{_gib(pool)}\n"
            f"too much for hardware={capacity.hardware}: {_gib(limit)}{free}; {remedy}choose a smaller model= "
            "or end other programs"
        )


def measured(planned: Capacity, seen: Footprint, max_num_tokens: int, usable_bytes: int) -> Capacity:
    """Give the KV cache what a loaded model leaves of a machine's memory.

    Every token of an iteration has a slot, so the largest has ``min(max_num_tokens, num_slots)`` tokens: where a
    scheduler knows no limit, activations and slots share what is left in the ratio of their sizes.

    Args:
        planned: its total and its reserve hold.
        seen: what was measured.
        max_num_tokens: of an iteration, by the scheduler's limits.
        usable_bytes: what the machine can give to this process, what it has already included.

    Raises:
        KvbenchError: less than one slot is left.
    """
    total = min(planned.total_bytes, usable_bytes)
    rest = total - seen.weights_bytes - planned.reserve_bytes - seen.graph_bytes
    slot = planned.bytes_per_slot
    pool = max(rest - math.ceil(seen.token_bytes * max_num_tokens), int(rest * slot / (slot + seen.token_bytes)))
    found = replace(
        planned,
        total_bytes=total,
        weights_bytes=seen.weights_bytes,
        activation_bytes=rest - pool + seen.graph_bytes,
        kv_cache_bytes=pool,
        source=MEASURED,
    )
    if pool < slot:
        activations = math.ceil(seen.token_bytes) + seen.graph_bytes
        check_fits(replace(found, activation_bytes=activations, source=planned.source), usable_bytes)
    return found


def with_swap_space(found: Capacity, given: float | None, free_bytes: int, *, pinned: bool) -> Capacity:
    """Set memory of the host aside for what a real run swaps out.

    Args:
        found: the pool, and the parts beside it.
        given: the size; None: that of the pool, at most ``SWAP_SPACE_BYTES`` for each GPU and what is left.
        free_bytes: what the host can give now, what this process holds already included.
        pinned: whether a GPU reads it by itself. The model and its pool are elsewhere then, and torch takes a power of
            two for each GPU.

    Raises:
        KvbenchError: the size that is given is more than what is left.
    """
    beside = 0 if pinned else found.weights_bytes + found.activation_bytes + found.kv_cache_bytes
    left = max(0, (free_bytes if pinned else min(free_bytes, found.total_bytes)) - beside)
    num = found.num_gpus
    if given is None:
        most = left // 2 if pinned else left  # rounding up takes less than as much again
        return replace(found, swap_space_bytes=min(found.kv_cache_bytes, num * SWAP_SPACE_BYTES, most))
    taken = size = int(given)
    if pinned and size:
        taken = num * (1 << (math.ceil(size / num) - 1).bit_length())
    if taken > left:
        rounded = f" ({_gib(taken)} when it is pinned)" if taken > size else ""
        raise KvbenchError(
            f"swap_space_bytes={size}: {_gib(size)}{rounded} of the host's memory for what is swapped out, but "
            f"{_gib(left)} are left; lower it, or give 0 to compute again what is preempted"
        )
    return replace(found, swap_space_bytes=size)


def memory_bytes() -> int:
    """Memory that this machine, or the control group that this process runs in, has in all."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *(limit for limit, _ in _control_groups())])


def usable_bytes() -> int:
    """Memory that this process could hold now, what it holds already included.

    On Linux what the kernel can give without swapping (``MemAvailable``) and what the process's control groups leave;
    elsewhere all there is.
    """
    own = _proc_bytes("self/status").get("RssAnon", 0)
    left = [limit - used for limit, used in _control_groups()]
    if (available := _proc_bytes("meminfo").get("MemAvailable")) is not None:
        left.append(available)
    return min([memory_bytes(), *(each + own for each in left)])


def _proc_bytes(path: str) -> dict[str, int]:
    """The sizes in a file of Linux's ``/proc``: name -> bytes; none elsewhere."""
    try:
        lines = Path(PROC, path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    fields = (line.replace(":", " ").split() for line in lines if line.endswith(" kB"))
    return {name: int(value) * 1024 for name, value, _ in fields}


def _control_groups() -> Iterator[tuple[int, int]]:
    """Limit and use, in bytes, of every control group above this process that has a limit (Linux, version 2 and 1).

    Cached files that can be dropped do not count as used.
    """
    try:
        entries = Path(PROC, "self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for entry in entries:
        _, controllers, name = entry.split(":", 2)
        if controllers == "":
            root, limit_file, use_file, idle = CGROUPS, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            root, limit_file, use_file = CGROUPS / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            idle = "total_inactive_file"
        else:
            continue
        group = Path(root, name.strip("/"))
        for folder in (group, *group.parents):  # in a container the group's own folder is often mounted as the root
            if not folder.is_relative_to(root):
                break
            try:
                limit = (folder / limit_file).read_text(encoding="ascii").strip()
                used = int((folder / use_file).read_text(encoding="ascii"))
                stat = dict(line.split() for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines())
            except (OSError, ValueError):
                continue
            if limit.isdigit() and int(limit) < 2**60:  # version 1 writes "none" as a huge number
                yield int(limit), used - int(stat.get(idle, 0))


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB" if abs(num_bytes) >= GIB // 10 else f"{num_bytes / 2**20:.2f} MiB"
