"""The conformance suite passes for every allocator and fails for every planted bug."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import settings

from kvbench.allocators.base import Ability, Allocator
from kvbench.allocators.buddy import Buddy
from kvbench.allocators.contiguous import Contiguous
from kvbench.allocators.first_fit import FirstFit
from kvbench.allocators.paged import Paged
from kvbench.core import Usage
from kvbench.testing import CHECKS, AllocatorMachine, Broken, Law, examine, first_broken
from tests.planted_bugs import BUGS, Bug, CopyNotReported, LeakLastBlock
from tests.token_by_token import TokenByToken

# A new allocator is one line here: pools that are and are not a multiple of the block, blocks down to one slot.
MATRIX: dict[str, Callable[[], Allocator]] = {
    "contiguous": lambda: Contiguous(61, 9),
    "contiguous, one slab": lambda: Contiguous(24, 24),
    "buddy": lambda: Buddy(61, 4),
    "buddy, regions of one token": lambda: Buddy(23, 1, 8),
    "buddy, one region": lambda: Buddy(130, 16),
    "first fit": lambda: FirstFit(40),
    "first fit, granules": lambda: FirstFit(61, 4),
    "paged": lambda: Paged(61, 4),
    "paged, many blocks": lambda: Paged(130, 4),
    "paged, vLLM's block": lambda: Paged(130, 16),
    "paged, tokens": lambda: Paged(13, 1),
    "paged, one block": lambda: Paged(24, 24),
    "paged, no sharing": lambda: Paged(61, 4, copy_on_write=False),
    "paged, small host pool": lambda: Paged(61, 4, host_slots=14),
    "token by token": lambda: TokenByToken(61, 4),
    "paged, no host pool": lambda: Paged(61, 4, host_slots=0),
}


class UndeclaredVerbs:
    """The least that an allocator can be: one sequence at a time, no verbs that it does not declare."""

    abilities = Ability.NONE
    num_slots = block_size = 5

    def __init__(self) -> None:
        self._paged = Paged(5, 5)
        for verb in ("can_allocate", "allocate", "free", "slots", "usage"):
            setattr(self, verb, getattr(self._paged, verb))


class PagedMachine(AllocatorMachine):
    @staticmethod
    def build() -> Allocator:
        return Paged(30, 4)


TestPaged = PagedMachine.TestCase  # as users do it
TestPaged.settings = settings(max_examples=20, stateful_step_count=20, derandomize=True, deadline=None, database=None)


@pytest.mark.parametrize("name", MATRIX)
def test_machine_passes(name: str) -> None:
    if broken := first_broken(MATRIX[name], num_examples=25):
        raise broken


@pytest.mark.parametrize("name", MATRIX)
def test_directed_checks_pass(name: str) -> None:
    for check in CHECKS:
        check(MATRIX[name])


def test_verbs_that_are_not_declared_may_be_missing() -> None:
    assert not examine(UndeclaredVerbs, num_examples=5)  # type: ignore[arg-type]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.kind.__name__)
def test_planted_bug_is_found(bug: Bug) -> None:
    broken = _directed(bug.build) if bug.directed else first_broken(bug.build, num_examples=300, shrink=False)
    assert broken, "not found"
    assert broken.law in bug.laws, str(broken)


def test_each_law_is_the_only_one_to_find_some_bug() -> None:
    assert {bug.laws[0] for bug in BUGS if len(bug.laws) == 1} == set(Law)


def test_every_broken_law_is_reported_with_a_few_calls() -> None:
    class Both(CopyNotReported, LeakLastBlock):
        pass

    broken = examine(lambda: Both(34, 4), num_examples=15)
    assert set(broken) == {Law.MEMORY, Law.BOOKS}
    title, *calls = str(broken[Law.MEMORY]).splitlines()
    assert title.startswith("memory: token ")
    assert "is lost: it is read from slot" in title
    assert calls[0] == "   1. allocate(A, 1) -> 4"
    assert any("fork(A, B, " in call for call in calls)
    assert len(calls) <= 10


def test_failures_are_the_same_every_time() -> None:
    first, second = (first_broken(lambda: LeakLastBlock(34, 4), num_examples=30) for _ in range(2))
    assert first
    assert second
    assert first.calls == second.calls


def test_allocator_that_changes_from_run_to_run_is_not_deterministic() -> None:
    runs: list[int] = []

    class Moody(Paged):
        def usage(self) -> Usage:
            books = super().usage()
            if len(runs) > 20 and len(runs) % 2:
                books.used += 1
            return books

    def build() -> Allocator:
        runs.append(0)
        return Moody(34, 4)

    broken = first_broken(build, num_examples=20)
    assert broken
    assert broken.law in (Law.DETERMINISM, Law.BOOKS, Law.PROTOCOL)


def _directed(build: Callable[[], Allocator]) -> Broken | None:
    for check in CHECKS:
        try:
            check(build)
        except Broken as broken:
            return broken
    return None
