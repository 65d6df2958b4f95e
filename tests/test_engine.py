"""The engine against the slow reference loop, to the last bit, and against pinned numbers on one small trace."""

from __future__ import annotations

import csv
import itertools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvbench.allocators.base import Allocator
from kvbench.allocators.buddy import Buddy
from kvbench.allocators.contiguous import Contiguous
from kvbench.allocators.first_fit import FirstFit
from kvbench.allocators.paged import Paged
from kvbench.clock import VirtualClock
from kvbench.core import Batch, KvbenchError, Request, Sequence, StepResult, Usage
from kvbench.engine import Engine, serve
from kvbench.ledger import Ledger
from kvbench.records import Record
from kvbench.reservation import Max, OnDemand, Oracle, Pow2, Reservation
from kvbench.runners.simulated import IterationCosts, Simulated
from kvbench.schedulers.base import Scheduler
from kvbench.schedulers.iteration_level import IterationLevel
from kvbench.schedulers.request_level import RequestLevel
from kvbench.workloads.arrivals import Paper
from kvbench.workloads.lengths import ShareGPT
from kvbench.workloads.synthetic import Synthetic
from tests.reference_loop import POOL_CLASSES, Costs, Outcome, reference, reference_request_level

COSTS = Costs(a=28.2, b=7.9e-4, c=0.22, p=0.109, q=8.1e-6, c_large=0.37, knee=40)
RESERVATIONS: dict[str, Reservation] = {"max": Max(), "pow2": Pow2(), "oracle": Oracle(), "on_demand": OnDemand()}
SMALL_TRACE = Path(__file__).parent / "data" / "small_trace.csv"


def runner() -> Simulated:
    return Simulated(IterationCosts(COSTS.a, COSTS.b, COSTS.c, COSTS.p, COSTS.q, COSTS.c_large, COSTS.knee))


def engine_of(scheduler: Scheduler) -> Engine:
    return Engine(scheduler, runner(), VirtualClock(), Ledger(scheduler.allocator))


def paper_engine(system: str, num_slots: int = 15728, block_size: int = 16, **limits: Any) -> Engine:
    """vLLM (``on_demand``) or one of the three Orca baselines, with the artifact's limits."""
    on_demand = system == "on_demand"
    allocator: Allocator = Paged(num_slots, block_size) if on_demand else Buddy(num_slots, block_size)
    limits = {"max_num_seqs": 2048 if on_demand else 256, **limits}
    return engine_of(IterationLevel(allocator, RESERVATIONS[system], 2048, **limits))


def assert_same(record: Record, outcome: Outcome) -> None:
    """Bit for bit: every iteration's end, sizes and ledger row, every request's finish."""
    steps = record.steps
    assert len(steps["end_s"]) == len(outcome.rows)
    assert steps["end_s"].tolist() == [row[0] for row in outcome.rows]
    assert steps["num_running"].tolist() == [row[1] for row in outcome.rows]
    for index, name in enumerate(POOL_CLASSES):
        assert steps[name].tolist() == [row[3][index] for row in outcome.rows], name
    finish_s = [float("nan") if finish is None else finish for finish in outcome.finish_s]
    assert np.array_equal(record.requests["finish_s"], finish_s, equal_nan=True)


def assert_partition(record: Record, num_slots: int) -> None:
    """The seven classes are non-negative and sum to the pool in every row."""
    names = ("token_states", "reserved", "overreserved", "padding", "cached", "pinned", "free")
    columns = np.stack([record.steps[name].astype(np.int64) for name in names])
    assert columns.min(initial=0) >= 0
    assert (columns.sum(axis=0) == num_slots).all()


def random_requests(rng: random.Random) -> list[Request]:
    rate = rng.choice([1.0, 5.0, 50.0])
    now = 0.0
    requests = []
    for index in range(rng.randint(1, 25)):
        now += rng.expovariate(rate)
        requests.append(Request(index, now, rng.randint(1, 120), rng.randint(1, 150)))
    return requests


def test_agrees_with_the_reference_on_random_traces_with_tiny_pools() -> None:
    rng = random.Random(20230921)
    num_preemptions = num_rejected = 0
    for _ in range(700):
        requests = random_requests(rng)
        block_size = rng.choice([1, 2, 7, 16, 16, 16, 32])
        num_slots = rng.randint(4, 60) * 16 + rng.choice([0, 0, 5])
        limits: dict[str, Any] = {
            "max_num_seqs": rng.choice([2, 5, 2048]),
            "max_num_batched_tokens": rng.choice([130, 300, 2560]),
        }
        watermark = rng.choice([0.0, 0.01, 0.1])
        record = serve(paper_engine("on_demand", num_slots, block_size, watermark=watermark, **limits), requests)
        outcome = reference(
            requests,
            COSTS,
            num_slots=num_slots,
            system="on_demand",
            block_size=block_size,
            watermark=watermark,
            **limits,
        )
        assert_same(record, outcome)
        assert_partition(record, num_slots)
        assert record.requests["num_preemptions"].sum() == outcome.preemptions
        num_preemptions += outcome.preemptions
        num_rejected += int(record.requests["rejected"].sum())
    assert num_preemptions > 10_000  # the storms this test is about
    assert num_rejected > 100


@pytest.mark.parametrize("system", ["max", "pow2", "oracle"])
def test_reserving_systems_agree_with_the_reference_on_random_traces(system: str) -> None:
    rng = random.Random(system)
    for _ in range(100):
        requests = random_requests(rng)
        num_slots = rng.randint(4, 60) * 16 + (2048 if system == "max" else 0)
        record = serve(paper_engine(system, num_slots, max_num_seqs=rng.choice([2, 256])), requests)
        assert_partition(record, num_slots)
        limits: dict[str, Any] = {"max_num_seqs": 256}
        record = serve(paper_engine(system, num_slots, **limits), requests)
        assert_same(record, reference(requests, COSTS, num_slots=num_slots, system=system, **limits))


def test_request_level_agrees_with_the_reference_on_random_traces() -> None:
    rng = random.Random(7)
    for _ in range(100):
        requests = random_requests(rng)
        session_len, batch_size = rng.choice([200, 272, 600]), rng.randint(1, 8)
        num_slots = session_len * rng.randint(1, 6) + 3
        scheduler = RequestLevel(Contiguous(num_slots, session_len), Max(), session_len, batch_size)
        record = serve(engine_of(scheduler), requests)
        outcome = reference_request_level(
            requests, COSTS, num_slots=num_slots, session_len=session_len, batch_size=batch_size
        )
        assert_same(record, outcome)
        assert_partition(record, num_slots)


@pytest.mark.parametrize(
    ("system", "rate"), [("on_demand", 2.0), ("max", 0.5), ("pow2", 0.75), ("oracle", 1.1), ("on_demand", 1.75)]
)
def test_agrees_with_the_reference_on_the_papers_trace(
    system: str, rate: float, data_file: Callable[[str], Path]
) -> None:
    lengths = ShareGPT(data_file("sharegpt_lengths.csv.gz").parent)
    requests = Synthetic("sharegpt", lengths, Paper(), 2048, rate, 3600.0).generate().requests
    limits: dict[str, Any] = {"max_num_seqs": 2048 if system == "on_demand" else 256}
    record = serve(paper_engine(system), requests)
    assert_same(record, reference(requests, COSTS, num_slots=15728, system=system, **limits))
    assert_partition(record, 15728)


def small_trace() -> list[Request]:
    with SMALL_TRACE.open() as file:
        return [
            Request(index, float(row["arrival"]), int(row["prompt"]), int(row["output"]))
            for index, row in enumerate(csv.DictReader(file))
        ]


def test_paged_with_block_size_one_is_token_granular() -> None:
    record = serve(paper_engine("on_demand", 2000, block_size=1), small_trace())
    assert record.requests["num_preemptions"].sum() > 0
    assert (record.steps["reserved"] == 0).all()
    assert (record.steps["padding"] == 0).all()
    assert (record.steps["token_states"].astype(int) + record.steps["free"].astype(int) == 2000).all()


def test_paged_with_one_block_per_maximum_length_equals_slabs() -> None:
    requests = small_trace()
    records = [
        serve(engine_of(IterationLevel(allocator, Max(), 2000, watermark=0.0)), requests)
        for allocator in (Paged(8000, block_size=2000), Contiguous(8000, slab_len=2000))
    ]
    for columns, others in itertools.zip_longest(
        (records[0].steps, records[0].requests), (records[1].steps, records[1].requests)
    ):
        for name in columns.keys() - {"largest_free"}:
            assert np.array_equal(columns[name], others[name], equal_nan=columns[name].dtype.kind == "f"), name


def test_first_fit_admits_what_paged_admits_where_nothing_is_fragmented() -> None:
    """One request at a time: placement cannot matter."""
    requests = small_trace()
    records = [
        serve(engine_of(IterationLevel(allocator, Oracle(), 2048, max_num_seqs=1)), requests)
        for allocator in (FirstFit(2048), Paged(2048, block_size=1), Buddy(2048, 1))
    ]
    for record in records[1:]:
        assert record.requests["finish_s"].tolist() == records[0].requests["finish_s"].tolist()


class LazyPaged(Paged):
    """A plug-in that answers `1`: always correct, merely asked every step. Grants only where a block is full."""

    def __init__(self, num_slots: int, block_size: int) -> None:
        super().__init__(num_slots, block_size)
        self.room: dict[object, int] = {}

    def allocate(self, seq, slots):  # type: ignore[no-untyped-def]
        granted = super().allocate(seq, slots)
        self.room[seq] = granted - slots
        return slots

    def append(self, seqs, copies):  # type: ignore[no-untyped-def]
        super().append([seq for seq in seqs if not self.room[seq]], copies)
        for seq in seqs:
            self.room[seq] = (self.room[seq] or self.block_size) - 1
        return 1


def test_a_lazy_plug_in_gives_the_same_run() -> None:
    requests = small_trace()
    records = [
        serve(engine_of(IterationLevel(allocator, OnDemand(), 2048)), requests)
        for allocator in (Paged(15728, 16), LazyPaged(15728, 16))
    ]
    assert records[0].requests["finish_s"].tolist() == records[1].requests["finish_s"].tolist()
    assert records[0].steps["token_states"].tolist() == records[1].steps["token_states"].tolist()
    assert_partition(records[1], 15728)


def test_true_lengths_reach_only_parts_that_declare_it() -> None:
    """Permuting the output lengths of requests that have not finished changes no decision of on demand and max."""
    requests = [Request(i, 0.0, 10 + i, 400) for i in range(12)]
    longer = [Request(i, 0.0, 10 + i, 900) for i in range(12)]
    for system in ("on_demand", "max"):
        batches = []
        for trace in (requests, longer):
            engine = paper_engine(system, 2048 + 512)
            seen = []
            for batch in itertools.islice(engine.run(trace), 390):
                seen.append((batch.step, [seq.request.id for seq in batch.running], batch.token_states))
            batches.append(seen)
        assert batches[0] == batches[1], system


def test_a_request_larger_than_the_pool_is_rejected_and_the_run_goes_on() -> None:
    requests = [Request(0, 0.0, 400, 10), Request(1, 0.0, 20, 10), Request(2, 0.0, 30, 10)]
    engine = paper_engine("on_demand", 160)
    record = serve(engine, requests)
    assert record.requests["rejected"].tolist() == [True, False, False]
    (reason,) = engine.rejected.values()
    assert "400 slots" in reason
    assert "pool of 160" in reason


def test_a_sequence_that_outgrows_the_pool_is_rejected_not_restarted_for_ever() -> None:
    record = serve(paper_engine("on_demand", 160), [Request(0, 0.0, 100, 100), Request(1, 0.0, 20, 100)])
    assert record.requests["rejected"].tolist() == [True, False]


def test_a_sequence_that_outgrows_the_token_limit_is_rejected_when_it_was_preempted() -> None:
    requests = [Request(0, 0.0, 60, 90), Request(1, 0.01, 60, 90)]
    record = serve(paper_engine("on_demand", 240, max_num_batched_tokens=100), requests)
    assert record.requests["rejected"].tolist() == [False, True]


class Undecided:
    """A scheduler that never decides anything."""

    def __init__(self, allocator: Allocator) -> None:
        self.allocator = allocator
        self.reservation: Reservation = Max()
        self.waiting: deque[Sequence] = deque()
        self.swapped: deque[Sequence] = deque()
        self.running: dict[Sequence, None] = {}
        self.step = 0
        self.uses_true_lengths = False

    def schedule(self) -> Batch:
        return Batch(0, self.running, 0, 0)

    def commit(self, finished: object, parents: object = None) -> tuple[Sequence, ...]:
        del finished, parents
        return ()


def test_a_scheduler_that_waits_for_nothing_raises() -> None:
    with pytest.raises(RuntimeError, match="1 sequences wait"):
        serve(engine_of(Undecided(Paged(160))), [Request(0, 0.0, 1, 1)])


@pytest.mark.parametrize(
    ("allocator", "reservation"),
    [
        (Contiguous(4096, 2048), "pow2"),
        (Contiguous(4096, 2048), "oracle"),
        (Contiguous(4096, 2048), "on_demand"),
        (Buddy(4096), "on_demand"),
        (FirstFit(4096), "on_demand"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_missing_corners_are_refused(allocator: Allocator, reservation: str) -> None:
    with pytest.raises(KvbenchError, match="does not exist for"):
        IterationLevel(allocator, RESERVATIONS[reservation], 2048)


def test_every_other_corner_runs() -> None:
    requests = small_trace()[:40]
    for allocator, names in [
        (Contiguous, ["max"]),
        (Buddy, ["max", "pow2", "oracle"]),
        (FirstFit, ["max", "pow2", "oracle"]),
        (Paged, ["max", "pow2", "oracle", "on_demand"]),
    ]:
        for name in names:
            placement: Allocator = Contiguous(8192, 2048) if allocator is Contiguous else allocator(8192)
            record = serve(engine_of(IterationLevel(placement, RESERVATIONS[name], 2048)), requests)
            assert not record.requests["rejected"].any()
            assert_partition(record, 8192)


@pytest.mark.parametrize(
    ("limits", "named"),
    [({"max_num_seqs": 0}, "max_num_seqs=0"), ({"max_num_batched_tokens": 0}, "max_num_batched_tokens=0")]
    + [({"watermark": value}, f"watermark={value}") for value in (-0.1, 1.0, float("nan"))],
)
def test_bad_limits_are_refused(limits: dict[str, Any], named: str) -> None:
    with pytest.raises(KvbenchError, match=named):
        paper_engine("on_demand", **limits)


# system -> iterations, preemptions, recomputed tokens, and sums over the iterations: running, token states, reserved,
# overreserved, padding, free. On the shipped trace, 4,000 slots. After a deliberate change, paste what the test prints.
PINNED = {
    "max": (62239, 0, 0, 62239, 23788849, 14683348, 86005803, 2987472, 121490528),
    "pow2": (30060, 0, 0, 62239, 23788849, 14683348, 10042383, 33527276, 38198144),
    "oracle": (18077, 0, 0, 62239, 23788849, 14683348, 0, 16333563, 17502240),
    "on_demand": (6684, 299, 49864, 62239, 23788849, 460021, 0, 6490, 2480640),
    "fastertransformer": (27706, 0, 0, 110315, 23788849, 14683348, 182157803, 0, 1018000),
}


def pinned_engine(system: str) -> Engine:
    if system == "fastertransformer":
        return engine_of(RequestLevel(Contiguous(8000, 2000), Max(), 2000, 4))
    allocator: Allocator = Paged(4000) if system == "on_demand" else Buddy(4000)
    return engine_of(IterationLevel(allocator, RESERVATIONS[system], 2000, 256))


def pinned_numbers(system: str) -> tuple[int, ...]:
    record = serve(pinned_engine(system), small_trace())
    sums = [
        int(record.steps[name].sum(dtype=np.int64))
        for name in ("num_running", "token_states", "reserved", "overreserved", "padding", "free")
    ]
    assert not record.requests["rejected"].any()
    num_preemptions = int(record.requests["num_preemptions"].sum())
    return (len(record.steps["end_s"]), num_preemptions, int(record.requests["recomputed_tokens"].sum()), *sums)


def test_pinned_numbers_on_the_shipped_trace() -> None:
    measured = {system: pinned_numbers(system) for system in (*RESERVATIONS, "fastertransformer")}
    print("PINNED =", measured)
    assert measured == PINNED


class StopsEarly(Simulated):
    """Ends a sequence after a length that nobody else knows, as a stop token does."""

    def __init__(self, costs: IterationCosts, output_len: dict[int, int]) -> None:
        super().__init__(costs)
        self.output_len = output_len

    def execute(self, batch: Batch) -> StepResult:
        result = super().execute(batch)
        finished = []
        for seq in batch.running:
            final_len = seq.request.prompt_len + self.output_len[seq.request.id]
            if batch.step + 1 - seq.origin == final_len:
                seq.final_len = final_len
                finished.append(seq)
        return replace(result, finished=finished)


@pytest.mark.parametrize("system", ["on_demand", "max"])
def test_the_ledger_is_completed_where_sequences_stop_early(system: str) -> None:
    """A run whose outputs end early by surprise equals one that was told the lengths, row by row."""
    rng = random.Random(5)
    costs = IterationCosts(COSTS.a, COSTS.b, COSTS.c, COSTS.p, COSTS.q, COSTS.c_large, COSTS.knee)
    for _ in range(40):
        known = random_requests(rng)
        open_ended = [Request(r.id, r.arrival_s, r.prompt_len, r.output_len + rng.randint(0, 300)) for r in known]
        num_slots = rng.randint(40, 80) * 16 if system == "on_demand" else 4096 + 16
        told = serve(paper_engine(system, num_slots), known)
        scheduler = paper_engine(system, num_slots).scheduler
        runner = StopsEarly(costs, {request.id: request.output_len for request in known})
        ledger = Ledger(scheduler.allocator, may_stop_early=True)
        surprised = serve(Engine(scheduler, runner, VirtualClock(), ledger), open_ended)
        assert not told.requests["rejected"].any()
        for name, column in told.steps.items():
            assert np.array_equal(column, surprised.steps[name]), name
        for name, column in told.requests.items():
            assert np.array_equal(column, surprised.requests[name]), name


@pytest.mark.parametrize("system", ["on_demand", "max", "pow2", "oracle", "fastertransformer"])
def test_completing_the_ledger_changes_nothing_where_lengths_are_forced(system: str) -> None:
    columns = []
    for may_stop_early in (False, True):
        engine = pinned_engine(system)
        ledger = Ledger(engine.scheduler.allocator, may_stop_early=may_stop_early)
        columns.append(serve(Engine(engine.scheduler, engine.runner, engine.clock, ledger), small_trace()).steps)
    for name, column in columns[0].items():
        assert np.array_equal(column, columns[1][name]), name


class Caching(Paged):
    """Keeps a share of what is freed for somebody who may want it again, and pins a block for ever."""

    def usage(self) -> Usage:
        usage = super().usage()
        cached = min(usage.free - 16, usage.used // 32 * 16)
        return Usage(usage.used, usage.free - cached - 16, usage.largest_free, cached, 16)


def test_the_ledger_shows_what_the_allocator_caches_and_pins() -> None:
    allocator = Caching(15728)
    seen = []
    engine = engine_of(IterationLevel(allocator, OnDemand(), 2048))
    for _ in engine.run(small_trace()[:60]):
        seen.append(engine.ledger._usage)
    steps = engine.ledger.columns()
    assert steps["cached"].tolist() == [usage.cached for usage in seen]
    assert steps["pinned"].tolist() == [usage.pinned for usage in seen]
    assert steps["free"].tolist() == [usage.free for usage in seen]
    assert len(set(steps["cached"].tolist())) > 5
