"""The memory map against the ledger's classes, and against what an allocator says at every single iteration."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvbench import compiled
from kvbench.allocators.base import Allocator
from kvbench.allocators.buddy import Buddy
from kvbench.allocators.contiguous import Contiguous
from kvbench.allocators.first_fit import FirstFit
from kvbench.allocators.paged import Paged
from kvbench.app import main
from kvbench.clock import VirtualClock
from kvbench.core import Batch, KvbenchError, Request, Sequence, StepResult
from kvbench.engine import Engine, serve
from kvbench.ledger import Ledger
from kvbench.memory_map import MemoryMap, Purpose, load
from kvbench.memory_map.map import RECTANGLE, write
from kvbench.memory_map.recorder import PREFIX, SPAN, Began, Ended, Recorder
from kvbench.records import Columns, Record, write_parquet
from kvbench.reservation import Max, OnDemand, Oracle, Pow2, Reservation
from kvbench.schedulers.base import Scheduler
from kvbench.schedulers.iteration_level import IterationLevel, Restore, Victim
from kvbench.schedulers.request_level import RequestLevel
from tests.generous import Generous, GenerousPaged, PageEachTime
from tests.reference_streams import StreamCosts
from tests.simulated_streams import Drawn, random_requests, simulated, with_prefixes
from tests.token_by_token import TokenByToken

MAX_MODEL_LEN = 200


class Snapshots:
    """What the allocator says of everyone in every iteration: who holds each slot."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.allocator = scheduler.allocator
        self.prefixes: list[Sequence] = []
        self.rows: list[dict[int, Counter[int]]] = []

    def watch(self, batch: Batch, result: StepResult) -> None:
        self.prefixes += batch.prefixes
        row: dict[int, Counter[int]] = {}
        for first in (*self.prefixes, *batch.running):
            for stream in first.streams:
                for slot in self.allocator.slots(stream):
                    row.setdefault(slot, Counter())[first.request.id] += 1
        self.rows.append(row)


def mapped(
    folder: Path, scheduler: Scheduler, requests: list[Request], *, may_stop_early: bool = False
) -> tuple[Record, MemoryMap, Snapshots]:
    """A run that is recorded, and what it left."""
    allocator = scheduler.allocator
    recorder, snapshots = Recorder(scheduler), Snapshots(scheduler)
    ledger = Ledger(allocator, may_stop_early=may_stop_early)
    engine = Engine(scheduler, simulated(StreamCosts(), Drawn()), VirtualClock(), ledger, (recorder, snapshots))
    record = serve(engine, requests)
    write_parquet(folder / "steps.parquet", record.steps)
    write(folder / "memory_map.parquet", recorder.spans(), allocator.num_slots, allocator.block_size)
    return record, load(folder), snapshots


def assert_true(record: Record, found: MemoryMap, snapshots: Snapshots) -> None:
    """The map's sums are the ledger's, its holders the allocator's, its rectangles the same as its picture."""
    steps = np.arange(found.num_steps)
    purposes, owners, holders = found.purposes(steps), found.owners(steps), found.num_holders(steps)
    for purpose in Purpose:
        booked = record.steps[purpose.name.lower()]
        assert (purposes == purpose).sum(axis=0).tolist() == booked.tolist(), purpose
    for step, row in enumerate(snapshots.rows):
        expected_holders = np.zeros(found.num_slots, np.int16)
        expected_owners = np.full(found.num_slots, -2)
        for slot, by_request in row.items():
            expected_holders[slot] = by_request.total()
            assert len(by_request) == 1 or PREFIX in by_request, "two requests share without a prefix"
            expected_owners[slot] = min(by_request)
        assert np.array_equal(holders[:, step], expected_holders), step
        assert np.array_equal(owners[:, step], expected_owners), step
    painted: list[NDArray[Any]] = [np.zeros_like(purposes), np.full_like(owners, -2), np.zeros_like(holders)]
    rectangles = found.rectangles()
    assert list(rectangles) == list(RECTANGLE.names or ())
    for row_ in zip(*(rectangles[name].tolist() for name in rectangles), strict=True):
        each = dict(zip(rectangles, row_, strict=True))
        place = slice(each["address"], each["address"] + each["length"]), slice(each["from_step"], each["to_step"])
        assert not painted[0][place].any(), "two rectangles overlap"
        for picture, name in zip(painted, ("purpose", "request", "num_holders"), strict=True):
            picture[place] = each[name]
        assert each["from_s"] == found.start_s[each["from_step"]]
        assert each["to_s"] == found.end_s[each["to_step"] - 1]
    pictures: list[NDArray[Any]] = [purposes, owners, holders]
    assert all(np.array_equal(*pair) for pair in zip(painted, pictures, strict=True))


def random_scheduler(name: str, rng: random.Random) -> IterationLevel:
    block_size = rng.choice([1, 4, 7, 16])
    num_slots = rng.randint(4, 40) * 8 + rng.choice([0, 0, 5])
    options: dict[str, Any] = {"max_num_batched_tokens": rng.choice([80, 2560])}
    if name.startswith("paged"):
        paged = Paged(num_slots, block_size, copy_on_write="cow" in name, host_slots=0 if "nohost" in name else None)
        choices: list[Restore] = ["auto", "recompute", "swap"]
        restore = rng.choice(choices[:2] if "nohost" in name else choices)
        return IterationLevel(paged, OnDemand(), MAX_MODEL_LEN, restore=restore, **options)
    allocator: Allocator
    if name == "first_fit":
        allocator = FirstFit(2 * num_slots + 200, rng.choice([1, 16]))
    else:
        allocator = Buddy(2 * num_slots + 2 * MAX_MODEL_LEN, rng.choice([4, 16]), MAX_MODEL_LEN)
    reservations: dict[str, Reservation] = {"max": Max(), "pow2": Pow2(), "oracle": Oracle(), "first_fit": Oracle()}
    return IterationLevel(allocator, reservations[name], MAX_MODEL_LEN, **options)


@pytest.mark.parametrize("name", ["paged cow", "paged", "paged cow nohost", "max", "pow2", "oracle", "first_fit"])
def test_the_map_is_the_ledger_in_places(name: str, tmp_path: Path) -> None:
    rng = random.Random(name)
    began: Counter[int] = Counter()
    ended: Counter[int] = Counter()
    for number in range(10):
        requests = random_requests(rng)
        if number % 3 == 2:
            requests = with_prefixes(rng, requests)
        scheduler = random_scheduler(name, rng)
        record, found, snapshots = mapped(tmp_path, scheduler, requests, may_stop_early=number % 2 == 1)
        assert_true(record, found, snapshots)
        began.update(found.spans["began"].tolist())
        ended.update(found.spans["ended"].tolist())
    assert {Began.ADMITTED} <= began.keys()
    assert {Ended.FINISHED} <= ended.keys()
    if name.startswith("paged"):
        assert {Began.GROWN, Ended.PREEMPTED} <= began.keys() | ended.keys()
        assert ({Began.COPIED, Began.FORKED} <= began.keys()) == ("cow" in name)
        assert (Ended.LEFT in ended) == ("cow" in name)
        assert (Ended.SWAPPED in ended, Began.RETURNED in began) == ("nohost" not in name,) * 2


PLUG_INS: dict[str, Callable[[int, int], Allocator]] = {
    "half as much again": Generous,
    "three times as much": lambda num_slots, size: Generous(num_slots, size, 3.0),
    "token by token": lambda num_slots, size: Generous(num_slots, size, 1.5, 1),
    "some tokens": lambda num_slots, size: Generous(num_slots, size, 2.0, 7),
    "a page each time": PageEachTime,
    "shares and swaps": GenerousPaged,
    "paged, but not kvbench's": TokenByToken,
}


@pytest.mark.parametrize("name", PLUG_INS)
def test_the_ledger_is_the_map_of_every_plug_in(name: str, tmp_path: Path) -> None:
    """Whatever it grants ahead of need, and whatever of that it promises."""
    rng = random.Random(name)
    num_grown = 0
    reserving: list[Reservation] = [Max(), Pow2(), Oracle()]
    victims: list[Victim] = ["newest", "oldest", "largest"]
    for number in range(12):
        requests = random_requests(rng)
        if number % 3 == 2:
            requests = with_prefixes(rng, requests)
        block_size = rng.choice([1, 4, 16])
        allocator = PLUG_INS[name](rng.randint(8, 60) * 16 + 5, block_size)
        scheduler: Scheduler = IterationLevel(allocator, OnDemand(), MAX_MODEL_LEN, victim=rng.choice(victims))
        if number % 4 == 3:
            scheduler = IterationLevel(allocator, rng.choice(reserving), MAX_MODEL_LEN)
        record, found, snapshots = mapped(tmp_path, scheduler, requests, may_stop_early=number % 2 == 1)
        assert_true(record, found, snapshots)
        num_grown += found.spans["began"].tolist().count(Began.GROWN)
    assert num_grown > 20
    for reservation in reserving:
        requests = [Request(index, 0.1 * index, 10 + index, rng.randint(1, 40)) for index in range(9)]
        scheduler = RequestLevel(PLUG_INS[name](3000, 16), reservation, MAX_MODEL_LEN, 3)
        record, found, snapshots = mapped(tmp_path, scheduler, requests)
        assert_true(record, found, snapshots)
        assert Ended.HELD in found.spans["ended"]


def test_a_batch_that_ends_together_holds_what_has_finished(tmp_path: Path) -> None:
    rng = random.Random("held")
    for _ in range(4):
        requests = [Request(i, 0.1 * i, rng.randint(1, 40), rng.randint(1, 60)) for i in range(12)]
        record, found, snapshots = mapped(tmp_path, RequestLevel(Contiguous(3 * 100 + 7, 100), Max(), 100, 3), requests)
        assert_true(record, found, snapshots)
        assert found.spans["is_held"].any()
        assert Ended.HELD in found.spans["ended"]


COMMAND = ["workload=fixed", "workload.request_rate=20", "workload.num_requests=20", "kv_cache_seqs=1", "name=map"]


def test_a_command_leaves_a_map_and_changes_no_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(COMMAND) == 0
    (steps,) = tmp_path.glob("results/map/points/*/steps.parquet")
    before = steps.read_bytes()
    assert main([*COMMAND, "memory_map=true"]) == 0
    assert "Finished before" not in capsys.readouterr().out
    found = load(steps.parent)  # the same point's folder
    assert steps.read_bytes() == before
    assert found.num_slots == 2048
    assert len(set(found.spans["request"])) == 20
    assert main([*COMMAND, "memory_map=true"]) == 0
    assert main(COMMAND) == 0
    assert capsys.readouterr().out.count("Finished before: 1 of 1") == 2


def test_what_cannot_be_mapped_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*COMMAND, "memory_map=true", "records=summary"]) == 2
    assert "leave records= at full" in capsys.readouterr().err
    assert main(["memory_map=true", "metric=ttft_p99_s", "threshold=1", "repeats=2"]) == 2
    assert "a search for metric= makes many" in capsys.readouterr().err
    assert main(COMMAND) == 0
    (folder,) = tmp_path.glob("results/map/points/*")
    with pytest.raises(KvbenchError, match="run the point with memory_map=true"):
        load(folder)
    write_parquet(folder / "memory_map.parquet", {}, {"kvbench.version": "0"})
    with pytest.raises(KvbenchError, match="schema version 0, this kvbench reads 1"):
        load(folder)


def test_a_run_that_is_watched_is_not_compiled() -> None:
    scheduler = IterationLevel(Paged(800, 16), OnDemand(), MAX_MODEL_LEN)
    engine = Engine(scheduler, simulated(StreamCosts()), VirtualClock(), Ledger(scheduler.allocator))
    requests = [Request(i, 0.1 * i, 10, 10) for i in range(5)]
    assert compiled.serve(engine, requests, min_requests=1) is not None
    engine.watchers = [Recorder(scheduler)]
    assert compiled.serve(engine, requests, min_requests=1) is None


def test_steps_are_found_by_time() -> None:
    spans: Columns = {name: np.zeros(0, np.int32) for name in SPAN.names or ()}
    found = MemoryMap(16, 4, spans, start_s=np.array([0.0, 1.0, 5.0]), end_s=np.array([1.0, 2.0, 6.0]))
    assert found.step_at([0.0, 0.99, 1.0, 2.0, 4.9, 5.5, 6.0, 9.0]).tolist() == [0, 0, 1, -1, -1, 2, -1, -1]
    assert found.rectangles()["address"].size == 0
