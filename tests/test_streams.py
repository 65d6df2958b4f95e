"""Requests with several streams: the engine against the slow reference, to the last bit."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import pytest

from kvbench.allocators.base import Allocator
from kvbench.allocators.buddy import Buddy
from kvbench.allocators.contiguous import Contiguous
from kvbench.allocators.first_fit import FirstFit
from kvbench.allocators.paged import Paged
from kvbench.clock import VirtualClock
from kvbench.core import Batch, BlockCopy, Request, Sequence, StepResult
from kvbench.engine import Engine, serve
from kvbench.ledger import Ledger
from kvbench.records import Record
from kvbench.reservation import Max, OnDemand, Oracle, Pow2, Reservation
from kvbench.runners.simulated import Simulated
from kvbench.schedulers.iteration_level import IterationLevel, Restore
from tests.reference_streams import Setting, StreamCosts, Streamed, World
from tests.simulated_streams import Drawn, parents, random_requests, simulated, with_prefixes
from tests.token_by_token import TokenByToken

RESERVATIONS: dict[str, Reservation] = {"max": Max(), "pow2": Pow2(), "oracle": Oracle(), "on_demand": OnDemand()}
MAX_MODEL_LEN = 256
COSTS = StreamCosts()


def both(requests: list[Request], *, may_stop_early: bool = False, **setting: Any) -> tuple[Record, Streamed]:
    """The same run by the engine and by the reference."""
    outcome = World(requests, COSTS, parents, Setting(max_model_len=MAX_MODEL_LEN, **setting)).run()
    system, num_slots, block_size = setting.pop("system"), setting.pop("num_slots"), setting.pop("block_size")
    paged = {name: setting.pop(name) for name in ("copy_on_write", "host_slots") if name in setting}
    allocator: Allocator = Paged(num_slots, block_size, **paged)
    if system != "on_demand":
        allocator = Buddy(num_slots, block_size, MAX_MODEL_LEN)
        setting["watermark"] = 0.0
    scheduler = IterationLevel(allocator, RESERVATIONS[system], MAX_MODEL_LEN, **setting)
    ledger = Ledger(allocator, may_stop_early=may_stop_early)
    return serve(Engine(scheduler, simulated(COSTS, Drawn()), VirtualClock(), ledger), requests), outcome


def assert_same(record: Record, outcome: Streamed) -> None:
    """Bit for bit, every column of every iteration and every request."""
    steps, rows = record.steps, outcome.rows
    for name in rows[0] if rows else ():
        assert steps[name].tolist() == [row[name] for row in rows], name
    assert len(steps["end_s"]) == len(rows)
    requests, jobs = record.requests, outcome.jobs
    finish_s = [float("nan") if job.finish_s is None else job.finish_s for job in jobs]
    assert np.array_equal(requests["finish_s"], finish_s, equal_nan=True)
    assert requests["rejected"].tolist() == [job.rejected for job in jobs]
    assert requests["num_preemptions"].tolist() == [job.preemptions for job in jobs]
    assert requests["recomputed_tokens"].tolist() == [job.recomputed for job in jobs]
    assert requests["preempted_s"].tolist() == [job.without_memory_s for job in jobs]
    assert steps["num_preempted"].sum() == requests["num_preemptions"].sum()
    assert steps["recomputed"].sum() == requests["recomputed_tokens"].sum()


@pytest.mark.parametrize("copy_on_write", [True, False])
@pytest.mark.parametrize("restore", ["auto", "recompute", "swap"])
def test_paged_agrees_with_the_reference_on_random_traces(restore: str, copy_on_write: bool) -> None:
    rng = random.Random(f"{restore} {copy_on_write}")
    seen = dict.fromkeys(("preempted", "swapped", "recomputed", "copied", "shared", "rejected", "partings"), 0)
    for number in range(120):
        block_size = rng.choice([1, 2, 4, 7, 16, 16])
        num_slots = rng.randint(4, 40 if copy_on_write else 60) * 8 + rng.choice([0, 0, 5])
        setting: dict[str, Any] = {
            "num_slots": num_slots,
            "block_size": block_size,
            "host_slots": rng.choice([None, None, rng.randint(block_size, 8 * 16 + block_size)]),
            "copy_on_write": copy_on_write,
            "restore": restore,
            "max_num_seqs": rng.choice([5, 7, 2048, 2048]),
            "max_num_batched_tokens": rng.choice([80, 300, 2560]),
            "watermark": rng.choice([0.0, 0.01, 0.1]),
        }
        requests = random_requests(rng)
        if number % 3 == 2:
            requests = with_prefixes(rng, requests)
        record, outcome = both(requests, system="on_demand", may_stop_early=number % 2 == 1, **setting)
        assert_same(record, outcome)
        steps = record.steps
        seen["preempted"] += int(record.requests["num_preemptions"].sum())
        seen["swapped"] += int(steps["swapped_out"].sum())
        seen["recomputed"] += int(record.requests["recomputed_tokens"].sum())
        seen["copied"] += int(steps["copied"].sum())
        seen["shared"] += int(steps["shared"].sum(dtype=np.int64))
        seen["rejected"] += int(record.requests["rejected"].sum())
        seen["partings"] += outcome.num_partings
    assert seen["preempted"] > 200
    assert seen["rejected"] > 50
    assert seen["recomputed"] > 1000
    assert seen["copied"] > 5000
    assert (seen["shared"] > 100_000) == copy_on_write
    assert (seen["swapped"] > 5000) == (restore != "recompute")
    assert (seen["partings"] > 10) == (restore != "recompute" and copy_on_write)


@pytest.mark.parametrize("system", ["max", "pow2", "oracle"])
def test_reserving_systems_agree_with_the_reference_on_random_traces(system: str) -> None:
    rng = random.Random(system)
    num_copied = 0
    for _ in range(60):
        setting: dict[str, Any] = {
            "num_slots": rng.randint(8, 80) * 16 + (rng.randint(0, 6) * MAX_MODEL_LEN if system == "max" else 0),
            "block_size": rng.choice([4, 16]),
            "max_num_seqs": rng.choice([7, 256]),
            "max_num_batched_tokens": rng.choice([80, 2560]),
        }
        record, outcome = both(random_requests(rng), system=system, **setting)
        assert_same(record, outcome)
        num_copied += int(record.steps["copied"].sum())
    assert num_copied > 20_000


class Remembering:
    """A runner that does what a batch says on a memory of numbers, and reads every stream back."""

    def __init__(self, allocator: Allocator, priced: Simulated) -> None:
        self.allocator = allocator
        self.priced = priced
        self.may_stop_early = priced.may_stop_early
        self.device_name = priced.device_name
        self.weights_bytes = priced.weights_bytes
        self.pool: dict[int, int] = {}
        self.host: dict[int, int] = {}
        self.written: dict[Sequence, list[int]] = {}
        self.prefixes: dict[int, Sequence] = {}
        self.numbers = itertools.count()

    def execute(self, batch: Batch) -> StepResult:
        source, target = (self.pool, self.host) if batch.swapped else (self.host, self.pool)
        copy(batch.moves, source, target)
        for prefix in batch.prefixes:
            self.written[prefix] = []
            for position in range(prefix.length):
                self.write(prefix, position)
            self.prefixes[prefix.length] = prefix
        copy(batch.copies, self.pool, self.pool)
        self.compute(batch)
        prefixes = set(self.prefixes.values())
        for seq in batch.running:
            for stream in (*self.prefixes.values(), *seq.streams):
                slots = self.allocator.slots(stream)[: stream.length if stream in prefixes else batch.step - seq.origin]
                assert [self.pool[slot] for slot in slots] == self.written[stream]
        result = self.priced.execute(batch)
        for seq, beams in (result.parents or {}).items():
            before = [self.written[stream] for stream in seq.streams]
            for stream, parent in zip(seq.streams, beams, strict=True):
                self.written[stream] = before[parent].copy()
        return result

    def compute(self, batch: Batch) -> None:
        for seq in batch.running:
            length = batch.step - seq.origin
            for index, stream in enumerate(seq.streams):
                if seq not in batch.prefills:
                    self.write(stream, length - 1)
                elif index < seq.num_prefills:
                    self.written[stream] = self.written[self.prefixes[seq.num_cached]].copy() if seq.num_cached else []
                    for position in range(seq.num_cached, length):
                        self.write(stream, position)
                else:
                    self.written[stream] = self.written[seq].copy()

    def write(self, stream: Sequence, position: int) -> None:
        if isinstance(self.allocator, TokenByToken):
            assert position < self.allocator.promised[stream]
        number = next(self.numbers)
        self.pool[self.allocator.slots(stream)[position]] = number
        self.written[stream].append(number)


def copy(copies: Seq[BlockCopy], source: dict[int, int], target: dict[int, int]) -> None:
    for src, dst, num_slots in copies:
        for offset in range(num_slots):
            target[dst + offset] = source.get(src + offset, -1)


PLACEMENTS: dict[str, tuple[Callable[[random.Random], Allocator], str]] = {
    "paged": (lambda rng: Paged(rng.randint(60, 300), rng.choice([1, 4, 16])), "on_demand"),
    "paged, no sharing": (
        lambda rng: Paged(rng.randint(60, 400), rng.choice([1, 4]), copy_on_write=False),
        "on_demand",
    ),
    "paged, host pool too small": (lambda rng: Paged(rng.randint(60, 300), 4, host_slots=60), "on_demand"),
    "token by token": (lambda rng: TokenByToken(rng.randint(60, 300), rng.choice([4, 16])), "on_demand"),
    "paged, reserved": (lambda rng: Paged(rng.randint(200, 900), 16), "oracle"),
    "buddy": (lambda rng: Buddy(rng.randint(200, 900), 16, MAX_MODEL_LEN), "pow2"),
    "first fit": (lambda rng: FirstFit(rng.randint(200, 900)), "oracle"),
    "contiguous": (lambda rng: Contiguous(6 * MAX_MODEL_LEN, MAX_MODEL_LEN), "max"),
}


@pytest.mark.parametrize("name", PLACEMENTS)
@pytest.mark.parametrize("restore", ["auto", "recompute"])
def test_every_stream_reads_what_it_wrote(name: str, restore: Restore) -> None:
    """Moves before copies before writes: whatever is shared, forked, swapped or computed again."""
    rng = random.Random(name)
    build, system = PLACEMENTS[name]
    num_copies = num_preemptions = num_prefixes = 0
    for number in range(25):
        scheduler = IterationLevel(build(rng), RESERVATIONS[system], MAX_MODEL_LEN, restore=restore)
        allocator = scheduler.allocator
        empty = allocator.usage()
        remembering = Remembering(allocator, simulated(COSTS, Drawn()))
        requests = random_requests(rng)
        if number % 3 == 2:
            requests = with_prefixes(rng, requests)
        record = serve(Engine(scheduler, remembering, VirtualClock(), Ledger(allocator)), requests)
        num_prefixes += len(remembering.prefixes)
        assert allocator.usage().used == sum(prefix.granted for prefix in remembering.prefixes.values())
        assert remembering.prefixes or allocator.usage() == empty
        num_copies += int(record.steps["copied"].sum())
        num_preemptions += int(record.requests["num_preemptions"].sum())
    assert num_copies > 500
    assert (num_prefixes > 5) == (system == "on_demand" and "no sharing" not in name)
    assert (num_preemptions > 20) == (system == "on_demand")
