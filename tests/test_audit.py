"""Runs of allocators that are not kvbench's: what they answer is checked, and a lie ends the run in a line."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Hashable
from pathlib import Path

import pytest

from kvbench import audit
from kvbench.allocators.base import AllocationError, Allocator, is_plug_in
from kvbench.allocators.paged import Paged
from kvbench.app import main
from kvbench.clock import VirtualClock
from kvbench.core import BlockCopy, Fit, KvbenchError, Request, Sequence, Usage
from kvbench.engine import Engine, serve
from kvbench.ledger import Ledger
from kvbench.memory_map import load
from kvbench.memory_map.__main__ import main as draw_maps
from kvbench.reservation import OnDemand
from kvbench.schedulers.iteration_level import IterationLevel, Victim
from kvbench.testing import Broken, examine
from kvbench.testing.checks import runs
from tests.generous import Generous, GenerousPaged, PageEachTime
from tests.reference_streams import StreamCosts
from tests.simulated_streams import Drawn, simulated


class SaysItIsEmpty(Paged):
    def usage(self) -> Usage:
        return Usage(0, self.num_slots, self.num_slots)


class UsesMore(Paged):
    def usage(self) -> Usage:
        usage = super().usage()
        usage.used += 100
        return usage


class FreeTwice(Paged):
    def usage(self) -> Usage:
        usage = super().usage()
        usage.free += 16
        return usage


class GrantsLess(Paged):
    def allocate(self, seq: Hashable, slots: int) -> int:
        return super().allocate(seq, slots) - 16


class ListsLess(Paged):
    def slots(self, seq: Hashable) -> list[int]:
        return super().slots(seq)[:-16]


class NoRoom(Paged):
    def append(self, seqs: Collection[Hashable], copies: list[BlockCopy]) -> int:
        return super().append(seqs, copies) - 16


class TooMuchRoom(Paged):
    def append(self, seqs: Collection[Hashable], copies: list[BlockCopy]) -> int:
        return super().append(seqs, copies) + 1


class Overlaps(Paged):
    """Leaves a block that it granted among the free."""

    def allocate(self, seq: Hashable, slots: int) -> int:
        granted = super().allocate(seq, slots)
        self.pool.free.append(self.tables[seq][0])
        return granted


class SaysItCan(Paged):
    def can_allocate(self, slots: int, keep: int = 0, count: int = 1) -> Fit:
        return Fit.OK


class Never(Paged):
    """Lets everybody wait for what will not come."""

    def can_allocate(self, slots: int, keep: int = 0, count: int = 1) -> Fit:
        return Fit.LATER


LIARS: list[tuple[type[Paged], str]] = [
    (SaysItIsEmpty, r"usage\(\) says that 0 slots are used, slots\(\) lists "),
    (UsesMore, r"usage\(\) says that \d+ slots are used, slots\(\) lists "),
    (FreeTwice, r"free=\d+, .* does not sum to the pool of 400 slots"),
    (GrantsLess, r"allocate was asked for 20 slots and answered 16"),
    (ListsLess, r"allocate answered 32 slots, slots\(\) lists 16"),
    (NoRoom, r"append answered 0, which is no room|lists 32 slots of a sequence that has 33 tokens"),
    (TooMuchRoom, r"slots\(\) lists 48 slots of a sequence that has 33 tokens and was promised room for 16 more"),
    (Overlaps, r"usage\(\) says that \d+ slots are used, slots\(\) lists "),
    (SaysItCan, r"slots short, though it was asked whether there is room"),
    (
        Never,
        r"the pool of 400 slots, with no sequence in it, has no room for the 20 that the next asks for",
    ),
]


def served(allocator: Allocator, num_seqs: int = 1) -> None:
    scheduler = IterationLevel(allocator, OnDemand(), 200)
    ledger = Ledger(allocator)
    requests = [Request(index, 0.01 * index, 20, 60, num_seqs) for index in range(30)]
    serve(Engine(scheduler, simulated(StreamCosts(), Drawn()), VirtualClock(), ledger), requests)


@pytest.mark.parametrize("num_seqs", [1, 2])
@pytest.mark.parametrize(("kind", "said"), LIARS, ids=lambda each: each.__name__ if isinstance(each, type) else "")
def test_a_lie_ends_the_run(kind: type[Paged], said: str, num_seqs: int) -> None:
    with pytest.raises(KvbenchError, match=said) as caught:
        served(kind(400), num_seqs)
    message = str(caught.value)
    assert message.startswith(f"allocator {kind.__module__}.{kind.__name__} breaks the protocol: ")
    assert message.endswith(f"; test it by python -m kvbench.verify {kind.__module__}:{kind.__name__}")
    assert "\n" not in message


def test_the_honest_are_served() -> None:
    class Honest(Paged):
        pass

    for num_seqs in (1, 2):
        served(Honest(400), num_seqs)
        served(Generous(400, 4), num_seqs)


class AlwaysThree(Generous):
    """Cannot give one page: whoever is preempted first may leave too little."""

    def append(self, seqs: Collection[Hashable], copies: list[BlockCopy]) -> int:
        tables = [self.tables[seq] for seq in seqs]
        taken = self._take(self.most * len(tables))
        for table in tables:
            table += [taken.pop() for _ in range(self.most)]
        return self.most * self.block_size


class Exact(Generous):
    """Knows how many tokens there are, from what it answered."""

    step = 0
    num_asked = 0

    def append(self, seqs: Collection[Hashable], copies: list[BlockCopy]) -> int:
        for seq in seqs:
            assert isinstance(seq, Sequence)
            assert self.lens[seq] == self.step - seq.origin - 1, "it has not filled its room"
            self.num_asked += 1
        return super().append(seqs, copies)


@pytest.mark.parametrize("victim", ["newest", "oldest", "largest"])
def test_more_leave_until_there_is_room(victim: Victim) -> None:
    requests = [Request(index, 0.0, 1, 90) for index in range(30)]
    allocator = AlwaysThree(400, 4)
    scheduler = IterationLevel(allocator, OnDemand(), 200, victim=victim)
    record = serve(Engine(scheduler, simulated(StreamCosts()), VirtualClock(), Ledger(allocator)), requests)
    assert record.requests["num_preemptions"].sum() > 30
    assert not record.requests["rejected"].any()


@pytest.mark.parametrize("victim", ["newest", "oldest", "largest"])
def test_each_asks_when_it_has_filled_its_room_and_not_before(victim: Victim) -> None:
    """Also where memory is short, and each is asked alone and told another room."""
    rng = random.Random(victim)
    for promise in (1, 7, 1 << 30):
        requests = [Request(index, 0.02 * index, rng.randint(1, 50), rng.randint(1, 120)) for index in range(60)]
        allocator = Exact(500, 4, promise=promise)
        scheduler = IterationLevel(allocator, OnDemand(), 200, victim=victim)
        engine = Engine(scheduler, simulated(StreamCosts()), VirtualClock(), Ledger(allocator))
        for _ in engine.run(requests):
            allocator.step = scheduler.step
        assert engine.ledger.columns()["num_preempted"].sum() > 10
        assert allocator.num_asked > 200


@pytest.mark.parametrize("kind", [kind for kind, _ in LIARS], ids=lambda kind: kind.__name__)
def test_the_conformance_suite_tries_what_a_run_does(kind: type[Paged]) -> None:
    with pytest.raises(Broken):
        runs(lambda: kind(400))


@pytest.mark.parametrize("kind", [Generous, PageEachTime, AlwaysThree, GenerousPaged], ids=lambda kind: kind.__name__)
def test_what_passes_the_suite_is_served(kind: Callable[[int, int], Allocator]) -> None:
    assert examine(lambda: kind(130, 4), num_examples=8) == {}
    for num_seqs in (1, 3):
        served(kind(800, 4), num_seqs)


def test_ours_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would pay for every list of slots."""
    monkeypatch.setattr(audit.Audit, "look", None)
    assert not is_plug_in(Paged(400))
    served(Paged(400))
    with pytest.raises(TypeError):
        served(Generous(400))


def test_what_ours_do_wrong_is_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Paged, "can_allocate", SaysItCan.can_allocate)
    with pytest.raises(AllocationError):
        served(Paged(400))
    monkeypatch.setattr(Paged, "can_allocate", Never.can_allocate)
    with pytest.raises(RuntimeError, match="1 sequences wait, nothing runs and nothing was decided"):
        served(Paged(400, block_size=4))


@pytest.mark.parametrize("kind", [SaysItIsEmpty, Never])
def test_a_command_says_so_in_a_line(
    kind: type[Paged], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    name = f"{kind.__module__}.{kind.__name__}"
    mine = ["allocator=own", f"allocator._target_={name}"]
    assert (
        main(["system=vllm", *mine, "workload=fixed", "workload.num_requests=5", "executor=serial", "memory_map=true"])
        == 1
    )
    printed = "".join(capsys.readouterr())
    assert f"{name} breaks the protocol: " in printed
    assert f"python -m kvbench.verify {kind.__module__}:{kind.__name__}" in printed
    assert "Traceback" not in printed
    (error,) = tmp_path.glob("results/adhoc/points/*/error.json")
    assert '"traceback": null' in error.read_text()
    with pytest.raises(KvbenchError, match=r"left no map, as its run failed: allocator .* breaks the protocol"):
        load(error.parent)
    assert draw_maps(["results/adhoc"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("kvbench.memory_map: no run in results/adhoc left a map, as it failed: allocator ")
    assert "memory_map=true" not in told
