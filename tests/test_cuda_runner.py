"""The CUDA runner's code on a CPU: its tokens are Hugging Face's for every system, whatever order its queues run in."""

from __future__ import annotations

import copy
import json
import random
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.extras import NEEDS_MODELS

pytest.importorskip("torch", reason=NEEDS_MODELS)

import torch
import yaml
from torch.utils._python_dispatch import TorchDispatchMode

from kvbench.allocators.base import Ability, Allocator
from kvbench.app import main
from kvbench.attention import reference, triton
from kvbench.cache import KVCache
from kvbench.clock import VirtualClock
from kvbench.core import KvbenchError, Request
from kvbench.engine import Engine, serve
from kvbench.ledger import Ledger
from kvbench.records import Record
from kvbench.runners.cuda import Queued, measure
from kvbench.runners.device import COMPUTE, SWAP, Cpu, Device
from kvbench.runners.packed_model import PackedModel
from kvbench.runners.shard import Places, Shard, buckets, runs
from kvbench.runners.torch import Torch, random_prompts
from kvbench.sampling import SamplingParams
from kvbench.schedulers.base import Scheduler
from tests import real_runs, real_streams
from tests.real_runs import MAX_LEN, SHAPES, SYSTEMS, Priced, generated, model, some_requests, system

SIZES = [1, 2, 4, 6]
"""Buckets, so that some batches are padded, and some are larger than the largest."""
Event = tuple[str, int]


class Delayed(Cpu):
    """Runs work only when somebody waits for it, or that of ``hasty`` as soon as what it waits for has run."""

    def __init__(self, hasty: str | None = None) -> None:
        super().__init__()
        self.hasty = hasty
        self.pending: dict[str, deque[Callable[[], None] | Event]] = {COMPUTE: deque(), SWAP: deque()}
        self.done = {COMPUTE: 0, SWAP: 0}
        self.log: list[str] = []

    def submit(self, queue: str, work: Callable[[], None]) -> None:
        self.pending[queue].append(work)
        self.log.append(f"{queue}: {work.__name__}")
        if queue == self.hasty:
            self.drain(*self.record(queue))

    def record(self, queue: str) -> Event:  # type: ignore[override]
        return queue, self.done[queue] + len(self.pending[queue])

    def wait(self, queue: str, event: Event) -> None:  # type: ignore[override]
        self.pending[queue].append(event)
        self.log.append(f"{queue} waits for {event[0]}")

    def synchronize(self, event: Event) -> None:  # type: ignore[override]
        self.log.append(f"host waits for {event[0]}")
        self.drain(*event)

    def drain(self, queue: str, number: int) -> None:
        while self.done[queue] < number:
            item = self.pending[queue].popleft()
            self.done[queue] += 1
            if isinstance(item, tuple):
                self.drain(*item)
            else:
                item()


DEVICES: dict[str, Callable[[], Device]] = {
    "cpu": Cpu,
    "lazy": Delayed,
    "hasty swaps": lambda: Delayed(SWAP),
}


pytestmark = pytest.mark.usefixtures("one_thread")


def shard(name: str, allocator: Allocator, device: Device, sizes: list[int]) -> Shard:
    """A shard over a poisoned pool, warmed up."""
    loaded = model(name)
    shapes = loaded.shapes
    pool = KVCache(shapes.num_layers, allocator.num_slots, shapes.num_kv_heads, shapes.head_dim)
    pool.data.fill_(torch.nan)
    packed = PackedModel(loaded.model, pool, triton.attend, triton.write)
    block_size = allocator.block_size if Ability.GROW in allocator.abilities else 0
    made = Shard(packed, device, Places(block_size, MAX_LEN, allocator.host_slots), sizes)
    made.warm_up()
    assert pool.data.isnan().all()  # warming up writes nowhere
    return made


def run(
    name: str,
    scheduler: Scheduler,
    requests: list[Request],
    params: SamplingParams | None = None,
    device: Device | None = None,
    sizes: list[int] = SIZES,
) -> tuple[Record, Queued]:
    allocator = scheduler.allocator
    prompts = random_prompts(SHAPES[name].vocab_size, 0)
    runner = Queued(shard(name, allocator, device or Delayed(), sizes), allocator, prompts, params or SamplingParams())
    ledger = Ledger(allocator, may_stop_early=bool(params and params.stop_token_ids))
    record = serve(Engine(scheduler, Priced(runner), VirtualClock(), ledger), requests)
    assert not record.requests["rejected"].any()
    return record, runner


@pytest.mark.parametrize(
    ("name", "system_name"),
    [*(("tiny_llama", each) for each in SYSTEMS), ("tiny_opt", "orca_pow2"), ("tiny_opt", "vllm4")],
)
def test_greedy_tokens_equal_generate(name: str, system_name: str) -> None:
    record, runner = run(name, system(system_name, 3 * MAX_LEN), list(some_requests()))
    if system_name == "vllm4":
        assert record.steps["num_running"].max() > max(SIZES)  # some steps fit no bucket
    assert {key: tuple(tokens) for key, tokens in runner.outputs.items()} == generated(name)


def test_without_buckets_the_tokens_are_the_same() -> None:
    _, runner = run("tiny_llama", system("vllm4", 3 * MAX_LEN), list(some_requests()), sizes=[])
    assert {key: tuple(tokens) for key, tokens in runner.outputs.items()} == generated("tiny_llama")


def test_sampled_tokens_are_those_of_the_other_runner() -> None:
    params = SamplingParams(temperature=0.8, top_k=50, top_p=0.9, seed=11)
    requests = list(some_requests())
    _, ours = run("tiny_llama", system("vllm4", 3 * MAX_LEN), requests, params)
    _, theirs = real_runs.run("tiny_llama", system("vllm4", 3 * MAX_LEN), requests, reference.attend, params)
    assert ours.outputs == theirs


STREAMS = [("swap4", is_beam, device, 2**26) for is_beam in (False, True) for device in DEVICES]
STREAMS += [("swap4", True, device, 1) for device in ("lazy", "hasty swaps")]
STREAMS += [
    ("swap1", True, "lazy", 2**26),
    ("copies4", True, "lazy", 2**26),
    ("orca_pow2", True, "lazy", 2**26),
    ("orca_pow2", False, "lazy", 2**26),
]


@pytest.mark.parametrize(("system_name", "is_beam", "device", "staged_bytes"), STREAMS)
def test_streams_are_those_of_the_other_runner(
    system_name: str, is_beam: bool, device: str, staged_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Samples and beams share, fork, copy and swap, all blocks at once or one by one."""
    monkeypatch.setattr("kvbench.runners.shard.STAGED_BYTES", staged_bytes)
    requests = list(real_streams.some_requests(4, is_beam))
    params = SamplingParams() if is_beam else real_streams.PARAMS
    size = 6 if system_name.startswith("swap") else 4 * 6
    outputs = {}
    for ours in (True, False):
        scheduler = real_streams.system(system_name, size * MAX_LEN // 2)
        runner: Torch
        if ours:
            record, runner = run("tiny_llama", scheduler, requests, params, DEVICES[device]())
            if system_name.startswith("swap"):
                assert record.steps["swapped_out"].sum() > 0
                assert record.steps["swapped_in"].sum() > 0
        else:
            _, runner = real_streams.run("tiny_llama", scheduler, requests, params)
        outputs[ours] = runner.samples
    assert outputs[True] == outputs[False]


def test_a_shared_prefix_is_computed_once_and_read_by_all() -> None:
    rng = random.Random(7)
    requests = [Request(i, 0.0, 18 + rng.randint(1, 9), rng.randint(20, 36), prefix_len=18) for i in range(8)]
    shared, pasted = (
        run("tiny_llama", real_streams.system(name, MAX_LEN + 28), requests) for name in ("recompute4", "copies4")
    )
    assert shared[1].outputs == pasted[1].outputs
    assert shared[0].steps["shared"].max() >= 16


def test_the_host_waits_once_in_a_step() -> None:
    device = Delayed()
    record, _ = run("tiny_llama", system("vllm4", 3 * MAX_LEN), list(some_requests()), device=device)
    assert device.log.count("host waits for compute") == len(record.steps["seconds"]) + 1  # once to warm up
    assert "host waits for swap" not in device.log


class Captured(Delayed):
    """Notes which work is captured, each time taking memory, and which is replayed."""

    taken = 5000

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        number = sum(entry.startswith("capture") for entry in self.log)
        self.log.append(f"capture {number}")
        self.taken += 100 if number else 3000

        def replay() -> None:
            self.log.append(f"replay {number}")
            work()

        return replay

    def used_bytes(self) -> int:
        return self.taken


def test_a_decode_is_padded_to_the_next_bucket_and_replayed_over_the_same_buffer() -> None:
    device = Captured()
    made = shard("tiny_llama", system("vllm4", 64).allocator, device, SIZES)
    graphs = [f"capture {number}" for number in range(len(SIZES))]
    assert [entry for entry in device.log if entry.startswith(("capture", "replay"))] == graphs  # the largest first
    assert made.graph_bytes == [3000, 100, 100, 100]
    static = made._rows.data_ptr()
    for num, number in ((3, 1), (4, 1), (1, 3), (2, 2), (6, 0), (5, 0)):
        rows = np.zeros((num, made.places.width), np.int32)
        rows[:, 2], rows[:, 3] = -1, 1 + np.arange(num)
        given = rows.copy()
        device.log.clear()
        made.step(rows)
        rows[:] = 77  # the host goes on before the device has read them
        device.synchronize(device.record(COMPUTE))
        assert device.log == ["compute: replay", "host waits for compute", f"replay {number}"]
        assert made._rows.data_ptr() == static
        size = next(size for size in SIZES if size >= num)
        assert (made._rows[:num].numpy() == given).all()
        assert (made._rows[num:size, 2] == -1).all()
        assert (made._rows[num:size, 3] == 0).all()
    device.log.clear()
    made.step(np.zeros((7, made.places.width), np.int32))
    assert device.log == ["compute: decode"]  # larger than the largest


@pytest.mark.parametrize("name", ["tiny_opt", "tiny_llama"])
def test_what_is_captured_reads_nothing_back_and_nothing_of_the_host(name: str) -> None:
    """On a device without values, a step that depends on one raises, as a capture would."""

    class Watched(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            assert not any(isinstance(each, torch.Tensor) and each.device.type == "cpu" for each in args), func
            return func(*args, **(kwargs or {}))

    where = torch.device("meta")
    device = Cpu()
    device.where = where
    shapes = SHAPES[name]
    bare = copy.deepcopy(model(name).model)
    torch.nn.Module.to(bare, where)
    pool = KVCache(shapes.num_layers, 64, shapes.num_kv_heads, shapes.head_dim, device=where)
    packed = PackedModel(bare, pool, lambda q, *_: torch.empty_like(q), lambda *_: None)
    made = Shard(packed, device, Places(4, 64, 0), [4])
    watched: Any = Watched
    with watched():
        output = made._decode(made._rows, 1)
    assert output.logits.shape == (4, shapes.vocab_size)
    assert output.chosen.device == where
    with pytest.raises((RuntimeError, NotImplementedError)), watched():
        made._decode(made._rows[output.chosen >= 0], 1)  # how many rows there are would have to be read


def test_graphs_count_among_the_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two are captured for a pool that is not there yet, and stand for all."""
    devices: list[Captured] = []

    def device_of(name: str) -> Captured:
        assert name == "cpu"
        devices.append(Captured())
        return devices[-1]

    monkeypatch.setattr("kvbench.runners.cuda.device_of", device_of)
    shapes = SHAPES["tiny_llama"]
    seen = {
        largest: measure(shapes, 64, 4, 0, "cpu", SamplingParams(), max_graph_batch=largest) for largest in (0, 1, 64)
    }
    assert {largest: found.graph_bytes for largest, found in seen.items()} == {
        0: 0,
        1: 3000,
        64: 3000 + (len(buckets(64)) - 1) * 100,
    }
    assert [sum(entry.startswith("capture") for entry in device.log) for device in devices] == [0, 1, 2]


def test_a_host_without_memory_for_the_swap_space_says_so_before_the_first_iteration() -> None:
    class Full(Cpu):
        def on_host(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            if len(shape) > 3:
                raise RuntimeError("CUDA error: out of memory\nmore lines")
            return super().on_host(shape, dtype)

    with pytest.raises(KvbenchError, match=r"gives no \d+ bytes .*out of memory\); lower swap_space_bytes=$"):
        shard("tiny_llama", real_streams.system("swap4", 64).allocator, Full(), [])


def test_a_swap_waits_for_what_it_reads_and_the_next_step_for_what_it_writes() -> None:
    device = Delayed()
    made = shard("tiny_llama", real_streams.system("swap4", 64).allocator, device, [])
    device.log.clear()
    before = made.cache.data.copy_(torch.randn(made.cache.data.shape)).clone()
    out = np.array([[3, 0], [1, 1], [2, 5]])
    made.swap_out(out)
    made.copy(np.array([[0, 4, 4], [0, 8, 4], [0, 12, 4]]))
    made.swap_in(out[:, ::-1])
    assert len(made._staging[0].blocks) == 16  # there is room for all
    assert device.log == [
        "compute: gather",
        "swap waits for compute",
        "swap: fetch",
        "compute: copy_blocks",
        "swap: fetch",
        "compute waits for swap",
        "compute: scatter",
    ]
    device.synchronize(device.record(COMPUTE))
    assert torch.equal(made.cache.data, before)


@pytest.mark.parametrize("hasty", [None, SWAP])
def test_a_buffer_is_filled_anew_when_what_was_in_it_is_where_it_belongs(
    hasty: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvbench.runners.shard.STAGED_BYTES", 1)
    device = Delayed(hasty)
    made = shard("tiny_llama", real_streams.system("swap4", 64).allocator, device, [])
    assert [len(staging.blocks) for staging in made._staging] == [1, 1]
    device.log.clear()
    before = made.cache.data.copy_(torch.randn(made.cache.data.shape)).clone()
    out = np.array([[3, 0], [1, 1], [2, 5]])
    made.swap_out(out)
    first = ["compute: gather", "swap waits for compute", "swap: fetch"]
    assert device.log == [*first, *first, "compute waits for swap", *first]
    made.copy(np.array([[0, 4, 4], [0, 8, 4], [0, 12, 4]]))
    device.log.clear()
    made.swap_in(out[:, ::-1])
    back = ["swap: fetch", "compute waits for swap", "compute: scatter"]
    assert device.log == [*back, *back, "swap waits for compute", *back]
    device.synchronize(device.record(COMPUTE))
    assert torch.equal(made.cache.data, before)


@pytest.mark.parametrize("block_size", [0, 4])
def test_copies_read_everything_before_they_write(block_size: int) -> None:
    allocator = real_streams.system("swap4" if block_size else "orca_max", 64).allocator
    made = shard("tiny_llama", allocator, Cpu(), [])
    before = made.cache.data.copy_(torch.randn(made.cache.data.shape)).clone()
    made.copy(np.array([[0, 8, 4], [8, 16, 4], [24, 28, 3], [32, 40, 4], [36, 40, 4]]))
    after = before.clone()
    for src, dst, count in ((0, 8, 4), (8, 16, 4), (24, 28, 3), (36, 40, 4)):
        after[:, :, dst : dst + count] = before[:, :, src : src + count]
    same = (made.cache.data == after).all(dim=(0, 1, 3, 4))
    assert same[: 28 + 3].all()
    assert same[32:].all()  # of the partly copied block the rest belongs to nobody yet


def test_logits_that_overflow_are_refused() -> None:
    made = shard("tiny_llama", system("vllm4", 64).allocator, Cpu(), SIZES)
    rows = np.zeros((3, made.places.width), np.int32)
    rows[:, 3] = 1  # lengths of 1 that read what was never written
    rows[:, 2] = -1
    made.step(rows)
    assert made.output.chosen[:3].tolist() == [-1, -1, -1]


TINY = [
    "runner=cuda",
    "model=tiny_llama",
    "workload=fixed",
    "workload/arrivals=all_at_once",
    "workload.num_requests=6",
    "workload.lengths.prompt_len=9",
    "workload.lengths.output_len=7",
]
ON_CPU = ["runner.device=cpu", "hardware=local", "runner.usable_by=null"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="speaks of machines without a GPU")
@pytest.mark.parametrize("overrides", [[], ["hardware=h200", "kv_cache_seqs=2"]])
def test_without_a_gpu_one_line_names_the_remedy(
    overrides: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*TINY, *overrides, f"results_dir={tmp_path}"]) > 0
    assert "needs 1 GPU" in (said := capsys.readouterr().err)
    assert "use runner=cpu" in said
    assert len(said.strip().splitlines()) == 1


@pytest.mark.parametrize("overrides", [[], ["kv_cache_seqs=2", "model.dtype=float32", "system=fastertransformer"]])
def test_the_command_line_runs_it(overrides: list[str], tmp_path: Path) -> None:
    """Without a size of the pool, what the largest iteration takes is measured first."""
    assert main([*TINY, *ON_CPU, *overrides, f"results_dir={tmp_path}"]) == 0
    (path,) = tmp_path.glob("adhoc/points/*/manifest.json")
    manifest = json.loads(path.read_text(encoding="utf-8"))
    assert manifest["device"].startswith("cpu, 1 thread")
    config = yaml.safe_load((path.parent / "config.yaml").read_text(encoding="utf-8"))
    assert config["model"]["dtype"] == ("float32" if overrides else "bfloat16")
    assert manifest["capacity"]["weights_bytes"] == 623_232 * (4 if overrides else 2)


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("runner.device=tpu", "runner.device=tpu"),
        ("runner.max_graph_batch=-1", "max_graph_batch=-1"),
        ("runner.tensor_parallel=0", "tensor_parallel=0"),
        ("hardware.num_gpus=3", "tensor_parallel=3 does not divide model.num_kv_heads=2"),
    ],
)
def test_what_cannot_be_is_refused(
    override: str, named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*TINY, *ON_CPU, "kv_cache_seqs=2", override, f"results_dir={tmp_path}"]) > 0
    assert named in capsys.readouterr().err


def test_buckets_waste_little() -> None:
    sizes = buckets(256)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == 256
    for num in range(1, 257):
        size = next(size for size in sizes if size >= num)
        assert size - num <= (7 if num <= 64 else 15)
    assert buckets(5) == [1, 2, 4, 5]


def test_runs_join_neighbours() -> None:
    assert runs(np.array([4, 5, 6, 9, 8, 3])) == [(0, 4, 3), (3, 9, 1), (4, 8, 1), (5, 3, 1)]
