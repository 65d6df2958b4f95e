"""When running sequences fill their room: the one occasion on which growth has to touch them."""

from __future__ import annotations

from kvbench.core import Sequence

Cohort = dict[Sequence, None]
"""Sequences that fill their room at the same step; an ordered set."""
NOBODY: Cohort = {}


class Calendar:
    """Cohorts, each under the step at which it needs room again.

    Each sequence points to its cohort (``Sequence.cohort``): it leaves without a search, and a whole cohort is filed
    under another step without touching its members.

    Attributes:
        cohorts: by step. The one of a step is popped when its time has come, and filed again with those that stay.
    """

    def __init__(self) -> None:
        self.cohorts: dict[int, Cohort] = {}

    def file(self, cohort: Cohort, step: int) -> None:
        """Put a cohort that was popped under a step, merged with one that is there already."""
        there = self.cohorts.get(step)
        if there is None:
            self.cohorts[step] = cohort
            return
        there.update(cohort)
        for seq in cohort:
            seq.cohort = there

    def add(self, seq: Sequence, step: int) -> None:
        """Put one sequence, filed or not, under a step."""
        self.remove(seq)
        cohort = self.cohorts.get(step)
        if cohort is None:
            cohort = self.cohorts[step] = {}
        cohort[seq] = None
        seq.cohort = cohort

    def hasten(self, seq: Sequence, step: int) -> None:
        """Put a sequence under a step if it is filed under a later one."""
        if self.cohorts.get(step) is not seq.cohort and step < self.step_of(seq, popped=step):
            self.add(seq, step)

    def step_of(self, seq: Sequence, popped: int) -> int:
        """The step that a sequence is filed under; ``popped`` if its cohort was popped."""
        return next((step for step, cohort in self.cohorts.items() if cohort is seq.cohort), popped)

    def remove(self, seq: Sequence) -> None:
        """A sequence needs no room any more; one that is in no cohort never did."""
        if seq.cohort is not None:
            del seq.cohort[seq]
            seq.cohort = None
