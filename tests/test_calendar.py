"""Cohorts under the steps at which they need room."""

from __future__ import annotations

from kvbench.core import Request, Sequence
from kvbench.schedulers.calendar import Calendar


def sequences(count: int) -> list[Sequence]:
    return [Sequence(Request(index, 0.0, 4, 4), 8, 4) for index in range(count)]


def test_a_sequence_is_under_one_step_at_a_time() -> None:
    calendar = Calendar()
    a, b, c = sequences(3)
    for seq, step in ((a, 5), (b, 5), (c, 7), (a, 7)):
        calendar.add(seq, step)
    assert [calendar.step_of(seq, popped=0) for seq in (a, b, c)] == [7, 5, 7]
    assert list(calendar.cohorts.pop(5)) == [b]
    assert 5 not in calendar.cohorts
    assert calendar.step_of(b, popped=5) == 5
    calendar.remove(c)
    assert list(calendar.cohorts.pop(7)) == [a]


def test_a_cohort_is_filed_as_a_whole_and_meets_another() -> None:
    calendar = Calendar()
    a, b, c = sequences(3)
    for seq, step in ((a, 1), (b, 1), (c, 9)):
        calendar.add(seq, step)
    cohort = calendar.cohorts.pop(1)
    calendar.file(cohort, 5)
    assert a.cohort is b.cohort is cohort
    assert calendar.cohorts.pop(5) is cohort
    calendar.file(cohort, 9)
    calendar.remove(a)  # leaves the cohort that it came into
    assert list(calendar.cohorts.pop(9)) == [c, b]
    assert [seq.cohort is None for seq in (a, b, c)] == [True, False, False]


def test_only_who_would_ask_later_is_hastened() -> None:
    calendar = Calendar()
    early, late, out = sequences(3)
    for seq, step in ((early, 3), (late, 9), (out, 2)):
        calendar.add(seq, step)
    calendar.file(calendar.cohorts.pop(3), 4)
    taken = calendar.cohorts.pop(2)
    for seq in (early, late, out):
        calendar.hasten(seq, 6)
    assert (list(calendar.cohorts.pop(4)), list(calendar.cohorts.pop(6)), list(taken)) == ([early], [late], [out])
